# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Your first TLX kernel
#
# What becomes of a loop when one group of warps copies and another one multiplies?
#
# :::{admonition} In this chapter (40 minutes)
# You will split a loop into a producer and a consumer with a ring of two slots between them, and
# get phases, bytes and arrivals wrong on purpose. You need the {term}`mbarrier` of
# {doc}`../operator/machine`, and no GPU.
# :::

# %% tags=["hide-input"]
import re
import textwrap

import pandas as pd
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.tools.tensor_descriptor import TensorDescriptor

import tritonemu
from _lib import drawings, studies
from gdpa_lab.measuring import compile_check
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
BLOCK, DIM, SLOTS = tl.constexpr(64), tl.constexpr(64), tl.constexpr(2)
chapter = Chapter("forward/first_tlx_kernel", mode=mode, device=device, data_dir=data_dir)

# %% tags=["remove-input"]
# | name: fig-first-ring
# | caption: >
# |   **Every use of a slot completes a phase of both its barriers.** Five blocks pass through two
# |   slots. Numbers: phases, in the colour of their parity; dots: where a wait for that phase
# |   passes. Dashed: the phase before the first.
# | alt: >
# |   Three rows for each of two slots. The first alternates between copy and read of blocks 0, 2, 4
# |   and 1, 3. Below it full changes its phase where a copy ends, and empty where a read ends; the
# |   colours alternate. empty begins with a dashed phase −1.
chapter.figure(drawings.ring(5), modelled="drawn from the rules of this chapter")

# %% [markdown]
# ## The loop
#
# The loop of {doc}`forward v1 <v1_tiled>` for 64 queries of one head, with ReLU and the descriptors
# of {doc}`forward v2 <v2_tma>`. All warps do everything; the compiler decides when to copy:


# %%
@triton.jit
def plain(q_desc, k_desc, v_desc, out_desc, blocks):
    q = q_desc.load([0, 0])
    acc = tl.zeros([BLOCK, DIM], tl.float32)
    for j in tl.range(blocks):
        k = k_desc.load([j * BLOCK, 0])
        s = tl.dot(q, k.T)
        p = tl.maximum(s, 0.0).to(tl.bfloat16)
        v = v_desc.load([j * BLOCK, 0])
        acc = tl.dot(p, v, acc)
    out_desc.store([0, 0], acc)


# %% tags=["hide-input"]
make = torch.Generator().manual_seed(2025)
queries, keys, values = (torch.randn(n, 64, generator=make).bfloat16() for n in (128, 320, 320))


def launch(kernel, **changes):
    """Launch `kernel` for five blocks of keys; its output must be right."""
    constants = {} if kernel is plain else {"CONSUMERS": 1, "COUNT": 1, "BYTES": 16384} | changes
    q = queries[: 64 * constants.get("CONSUMERS", 1)]
    out = torch.full(q.shape, float("nan"))
    tensors = (TensorDescriptor.from_tensor(x, [64, 64]) for x in (q, keys, values, out))
    kernel[(1,)](*tensors, len(keys) // 64, **constants)
    exact = torch.relu(q.double() @ keys.double().T) @ values.double()
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2**-8 * float(exact.abs().max()))


def attempt(kernel, **changes):
    """Print what the emulator finds in a launch."""
    (text,) = studies.findings(lambda: launch(kernel, **changes), ["modelled"])
    text = re.sub("Deadlock: .*", "Deadlock:", text) or "Nothing found."
    for line in text.splitlines():
        print(textwrap.fill(line, 86, subsequent_indent="    ", break_on_hyphens=False))


def traced(kernel, **changes):
    """The timeline of a launch."""
    with tritonemu.enabled(trace=True) as reports:
        launch(kernel, **changes)
    return reports[0].timeline


# %%
attempt(plain)

# %% [markdown]
# ## A producer, a consumer and a ring
#
# Now `load` only asks {term}`TMA` for blocks, and `math` only computes. Between them lies a ring of
# slots in shared memory, each with two barriers: *full* says "you may read", *empty* "you may
# overwrite".


# %%
@triton.jit
def ring(
    q_desc, k_desc, v_desc, out_desc, blocks,
    CONSUMERS: tl.constexpr, COUNT: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    k = tlx.local_alloc((BLOCK, DIM), tl.bfloat16, SLOTS)
    v = tlx.local_alloc((BLOCK, DIM), tl.bfloat16, SLOTS)
    full = tlx.alloc_barriers(SLOTS)
    if COUNT is None:
        empty = tlx.alloc_warp_barrier(SLOTS, 4, CONSUMERS)
    else:
        empty = tlx.alloc_barriers(SLOTS, COUNT)
    with tlx.async_tasks():
        with tlx.async_task("default"):  # load
            for j in tl.range(blocks):
                slot, phase = j % SLOTS, j // SLOTS % 2
                tlx.barrier_wait(empty[slot], phase ^ 1)
                tlx.barrier_expect_bytes(full[slot], BYTES)
                tlx.async_descriptor_load(k_desc, k[slot], [j * BLOCK, 0], full[slot])
                tlx.async_descriptor_load(v_desc, v[slot], [j * BLOCK, 0], full[slot])
        with tlx.async_task(num_warps=4, replicate=CONSUMERS):  # math
            row = tlx.async_task_replica_id() * BLOCK
            q = q_desc.load([row, 0])
            acc = tl.zeros([BLOCK, DIM], tl.float32)
            for j in tl.range(blocks):
                slot, phase = j % SLOTS, j // SLOTS % 2
                tlx.barrier_wait(full[slot], phase)
                s = tlx.async_dot(q, tlx.local_trans(k[slot]))
                s = tlx.async_dot_wait(0, s)
                p = tl.maximum(s, 0.0).to(tl.bfloat16)
                acc = tlx.async_dot(p, v[slot], acc)
                acc = tlx.async_dot_wait(0, acc)
                tlx.barrier_arrive(empty[slot])
            out_desc.store([row, 0], acc)


# %% [markdown]
# `async_tasks`, of Triton's extension {term}`TLX` {cite}`guan2026tlx`, splits the {term}`CTA`: each
# task is a {term}`role`, an instruction stream with its own warps. `math` computes what `plain`
# does, in the same order. `async_dot` only issues a `wgmma`; `async_dot_wait(0, s)` returns when
# none is in flight, and only then may `math` let go of the slot. `BLOCK` and `DIM` are 64, `SLOTS`
# is 2. The other constants are arguments so that we can get them wrong; at first they are 1, 1 and
# two boxes.
#
# **Predict.** `load` waits with parity 1 for block 0, with parity 0 for block 2. Which wait ends at
# once, and what ends the other?

# %%
timeline = traced(ring)


# %% tags=["remove-input"]
ROLES = {"default": "load", "task0": "math", "TMA": "TMA"}


def step(event) -> tuple:
    """A line of the table: what an event did to a barrier."""
    lacks = [f"{event.pending} arrival"] * bool(event.pending)
    lacks += [f"{event.bytes:,} bytes"] * bool(event.bytes)
    what, lacks = "arrives", ", ".join(lacks) or "nothing"
    if event.kind == "wait":
        what, lacks = f"passes, parity {event.phase % 2}", ""
    elif event.lane == "TMA":
        what = "8,192 bytes land"
    elif event.target.startswith("full"):
        what = "announces 16,384 bytes"
    phase = f"{event.phase}".replace("-", "−")
    return f"{event.end:,.0f}", ROLES[event.lane], event.target, what, phase, lacks


of_slot = [e for e in timeline.events if e.target in ("full[0]", "empty[0]")]
of_slot = sorted(of_slot, key=lambda event: event.end)[:7]
columns = ["cycle", "role", "barrier", "what it does", "phase", "it still lacks"]
did = pd.DataFrame(map(step, of_slot), columns=columns)
chapter.table(
    did, emulated="ring, modelled schedule", name="tab-first-phases",
    caption="**The first wait for empty passes at once, the second when `math` arrives.** What was "
    "done to the barriers of slot 0, by modelled cycles.",
)  # fmt: skip

# %% tags=["remove-cell"]
waits = [e for e in of_slot if e.kind == "wait" and e.lane == "default"]
assert [e.phase for e in waits] == [-1, 0] and waits[0].end == 0, "the caption"
assert {e.bytes for e in of_slot if e.lane == "TMA"} == {0, 8192}, "the table: boxes of 8,192"
assert [e.lane for e in of_slot if e.end == waits[1].end][0] == "task0", "the caption"

# %% [markdown]
# (rule-phases)=
# ### Rule: phases
#
# - Block `j` is use `u = j // SLOTS` of its slot, and completes phase `u` of both barriers.
# - The consumer waits for phase `u` of *full*: parity `u % 2`, called `phase`.
# - The producer waits for phase `u - 1` of *empty*: parity `phase ^ 1`. At first that is phase −1,
#   which a fresh barrier counts as complete: slots begin empty.
# - Wait in every use, since a parity cannot tell phase `u` from `u - 2`.
# - Barriers do not begin again with the next tile: `j` runs on.
#
# (rule-expect-tx)=
# ### Rule: bytes
#
# The one arrival on *full* is `barrier_expect_bytes`, which announces bytes besides, PTX's
# `expect_tx`. Each box subtracts its own when it has landed.
#
# **Predict.** What if only one of the two boxes is announced? If four are? (The emulator calls
# `load` default, and `math` task0.)

# %%
attempt(ring, BYTES=8192)
attempt(ring, BYTES=32768)

# %% [markdown]
# - Once in a phase, announce the bytes of *all* boxes that arrive on the barrier.
# - A box counts in full, also where the tensor ends: TMA writes zeros there, and reports them.
# - Too few: the phase completes before its data are there, and the rest is subtracted from the next
#   one. Too many: the wait hangs.
# - A {term}`multicast` copy reports to each receiver's barrier, and each must announce it.
#
# (rule-arrivals)=
# ### Rule: arrivals
#
# **Predict.** All 128 threads of `math` reach `barrier_arrive`. Should `COUNT` be 128?

# %%
attempt(ring, COUNT=128)

# %% [markdown]
# There are two kinds of barriers, and `barrier_arrive` differs:
#
# | created by | a role arrives | a phase takes |
# |:--|:--|:--|
# | `alloc_barriers(n, count)` | once: its warps meet, then one thread arrives | `count`, else 1 |
# | `alloc_warp_barrier(n, warps, roles)` | by each thread, as it comes | 32 · warps · roles |
#
# - Add up who arrives once in a phase: roles, or threads.
# - Too high a count: whoever waits hangs. Too low: the first to arrive lets go for all;
#   if all arrive before `load` looks, two phases end, the parity is the old one, and `load` hangs.
#
# ## Two consumers
#
# A second consumer takes 64 more rows of Q and reads the same K and V. No role changes.
#
# **Predict.** Which two kinds of *empty* are right, and what does `COUNT=1` do?

# %%
for count in (None, 2, 1):
    attempt(ring, CONSUMERS=2, COUNT=count)

# %% [markdown]
# ## What the compiler made of it

# %% tags=["remove-cell"]
TYPES = dict.fromkeys(("q_desc", "k_desc", "v_desc"), "tensordesc<bf16[64, 64]>")
TYPES |= {"out_desc": "tensordesc<fp32[64, 64]>", "blocks": "i32"}
FORMS = {
    "`plain`": (plain, 1, 1), "`ring`": (ring, 1, 1), "two consumers, `COUNT=2`": (ring, 2, 2),
    "two consumers, threads": (ring, 2, None),
}  # fmt: skip
built = {
    name: compile_check.build(
        kernel, TYPES, {"CONSUMERS": consumers, "COUNT": count, "BYTES": 16384},
        options={"num_warps": 4},
    )
    for name, (kernel, consumers, count) in FORMS.items()
}  # fmt: skip
inits = {
    name: re.findall(r"mbarrier\.init[^;]*, (\d+);", kernel.asm["ptx"])
    for name, kernel in built.items()
}
compiled = studies.facts(built, ("UTMALDG", "HGMMA", "BAR")).set_index("kernel")
numbers = {name: sorted({*map(int, counts)}) for name, counts in inits.items()}
assert list(numbers.values()) == [[1], [1], [1, 2], [1, 256]], "the table"
assert (compiled["spilled (B)"] == 0).all() and (compiled["serialised"] == "no").all()
meets = [" ".join(re.findall(r"@%p\d+ mbarrier\.arrive\.shared", built[name].asm["ptx"]))
         for name in built]  # fmt: skip
assert list(map(bool, meets)) == [False, True, True, False], "the text: predicated"
saved = compiled["BAR"].iloc[2] - compiled["BAR"].iloc[3]
assert saved > 0 and compiled["UTMALDG"]["`plain`"] > compiled["UTMALDG"]["`ring`"], "the text"
chapter.glue(saved=saved, own_copies=compiled["UTMALDG"]["`plain`"], barriers=len(inits["`plain`"]))

# %% tags=["remove-input"]
compiled.insert(0, "mbarrier.init", [", ".join(map(str, counts)) for counts in numbers.values()])
chapter.table(
    compiled.drop(columns=["registers", "spilled (B)", "serialised"]).reset_index(),
    caption="**Two roles are 2 arrivals, or 256.** Arrivals that each `mbarrier.init` in PTX "
    "expects; in SASS TMA "
    "loads, MMAs, and meetings of warps.",
    compiled="for sm_90a when this page was built",
)  # fmt: skip

# %% [markdown]
# In `plain` the compiler makes a ring of its own, {glue:text}`barriers:.0f` mbarriers and
# {glue:text}`own_copies:.0f` TMA loads. But the warps that compute issue them, and all meet before
# each. Arriving by threads saves {glue:text}`saved:.0f` meetings.
#
# ## Exercises
#
# {doc}`Write it </exercises>`: `make exercise NAME=ring` is the next step, this kernel with holes,
# for GELU and jagged rows, K and V on barriers of their own. With `WATCH=1` it judges each change
# that you save. `fetch_rows` there is `barrier_expect_bytes` and a copy.
#
# :::{exercise} One slot
# :label: ex-first-slots
#
# With one slot, does `ring` deadlock, race, or only wait? *(paper, then the emulator)*
# :::

# %% tags=["remove-cell"]
for slots in (1, 3, 4, 2):
    SLOTS = tl.constexpr(slots)
    chapter.glue(**{f"slots_{slots}": max(e.end for e in traced(ring).events)})

# %% [markdown]
# :::{solution} ex-first-slots
# :class: dropdown
#
# It only waits: `j % 1` is 0 and `j // 1 % 2` alternates, so slot and phase are right for any
# number of slots. But the next copy cannot begin before the block is done:
# {glue:text}`slots_1:,.0f` cycles, {glue:text}`slots_2:,.0f` with two slots,
# {glue:text}`slots_3:,.0f` with three, {glue:text}`slots_4:,.0f` with four. {doc}`planning` says
# how many are enough.
# :::
#
# :::{exercise} Let go earlier
# :label: ex-first-early
#
# The scores are complete before the activation begins. Why may `math` not arrive on *empty* there?
# What would let go of K early? *(paper, five minutes)*
# :::
#
# :::{solution} ex-first-early
# :class: dropdown
#
# `empty` lets go of the whole slot, and V is read later: `load` would overwrite it, a race. Give K
# and V a full and an empty barrier each, with one box announced on each full one.
# {doc}`v4_warp_specialized` does that.
# :::
#
# ## Takeaways
#
# - Two loops are ordered only where they share a slot, by *full* and *empty*.
# - Count phases, bytes and arrivals of each barrier; each wrong count has a symptom.
