# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # Backward v5–v7: short K/V
#
# With 256 keys or fewer, adding dQ up in memory takes longer than the matmuls. Can a row of dQ be
# finished where it is computed?
#
# :::{admonition} In this chapter (45 minutes)
# You will let two CTAs exchange operands instead of results, write the protocol that makes this
# safe, and knock out parts of a kernel to find what it waits for. With 256 keys, backward v5 is
# {glue:text}`v5_over_v4` times as fast as v4 back to back.
# :::

# %% tags=["hide-input"]
from collections import Counter
from dataclasses import replace
from functools import partial

import pandas as pd
import torch
import triton

from _lib import studies
from _lib.ratios import best_peer, short, spread
from gdpa_kernels.calling.launch import launch
from gdpa_kernels.gdpa.device.gradients import round_kernel
from gdpa_kernels.gdpa.kernels import v4_warp_specialized_backward as v4
from gdpa_kernels.gdpa.kernels import v5_short_kv_backward as v5
from gdpa_kernels.gdpa.kernels import v6_one_tile_backward as v6
from gdpa_kernels.gdpa.kernels import v7_wide_backward as v7
from gdpa_lab.measuring import compile_check, timing
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts, results
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
V1, V2, V2A = "v1_tiled_backward", "v2_fused_backward", "v2a_ordered_backward"
V4, V5 = "v4_warp_specialized_backward", "v5_short_kv_backward"
V6, V7 = "v6_one_tile_backward", "v7_wide_backward"
FORWARD, PEERS = ["v3_persistent", "v8_own_waits"], ["fa2_varlen", "cudnn"]
chapter = Chapter(f"backward/{V5}", mode=mode, device=device, data_dir=data_dir)
cross = {f"gdpa-cross-full-{n}": n for n in (256, 512, 1024, 2048)}
ladder = chapter.rows("backward/results", scope="sustained", direction="backward",
                      workload=list(cross))  # fmt: skip
rates = ladder.pivot_table(index="workload", columns="impl", values="tflops")
rates = rates.loc[list(cross)].rename(cross)
ahead = rates[V5] / rates.drop(columns=V5).max(axis=1)
assert ahead.min() > 1.4, "the caption"
chapter.glue(v5_over_v4=spread(rates[V5] / rates[V4]))

# %% tags=["remove-input"]
# | name: fig-bw5-rungs
# | caption: >
# |   **With 256 keys backward v5 is far ahead of every other kernel, however many queries there
# |   are.** TFLOP/s back to back. FlashAttention-3 (FA3), the dense form of FlashAttention-4 (FA4)
# |   and cuDNN compute softmax attention.
# | alt: >
# |   Lines of TFLOP/s over the number of queries. Backward v5 lies far above all others and rises
# |   with the number of queries; v4 follows, then cuDNN, FlashAttention-3, -4 and v2 together.
NAMES = {V2: "backward v2", V4: "backward v4", V5: "backward v5", "fa3": "FA3",
         "fa4_dense": "FA4", "cudnn": "cuDNN"}  # fmt: skip
chart = charts.lines(
    rates[list(NAMES)], xlabel="queries of a sequence", ylabel="TFLOP/s back to back", names=NAMES,
    highlight=[V4, V5], log="x",
)  # fmt: skip
chapter.figure(chart, measured=ladder)

# %% [markdown]
# ## All-gather instead of all-reduce
#
# In {doc}`backward v4 <v4_warp_specialized_backward>` every {term}`CTA` of a sequence adds its part
# of dQ in memory. That is an {term}`all-reduce`.
#
# Backward v5 gathers instead. A {term}`cluster` of two CTAs, with *ranks* 0 and 1, owns all keys of
# a sequence, up to 256. The two run at the same time on neighbouring SMs, and each may read and
# write the {term}`shared memory` of the other, then called {term}`distributed shared memory`. They
# exchange dS, an *operand* of dQ, and each computes half of the columns of dQ from all keys.
#
# | | {doc}`v4 <v4_warp_specialized_backward>` | v5 | v6 |
# |:--|:--|:--|:--|
# | keys | any number | up to 256 | up to 128 |
# | who has all keys | nobody | a cluster of two CTAs | one CTA |
# | dQ of a CTA | all columns, part of the sum | half of the columns, whole sum | all of it |
# | dQ leaves as | fp32, TMA reduce-add, rounded later | bf16, TMA store | bf16, TMA store |
# | launches | zero fill, main kernel, rounding | one | one |
#
# ## What a sum in memory costs
#
# At head_dim 128 a row has 256 bytes in bf16 and 512 in fp32. Every kernel reads Q and dO (512
# bytes). With 256 keys backward v4 then fills dQ with zeros (512), adds to it once for each of two
# tiles of keys (1,024), reads the sum (512) and writes it rounded (256). Backward v5 just writes
# dQ, 256 bytes. How long do these bytes take, compared with the five matmuls of the row?

# %% tags=["remove-cell"]
limits = results.ceilings(chapter.record("backward/results"), "sustained")
ns = 1 / limits.gbytes_per_s(2, 1)  # of a byte
bytes_of_rows = pd.DataFrame(
    [(256, "backward v4", 512 + 512 + 2 * 512 + 512 + 256), (256, "backward v5", 512 + 256),
     (128, "backward v4", 512 + 512 + 512 + 512 + 256), (128, "backward v6", 512 + 256)],
    columns=["keys", "kernel", "bytes of a row"],
)  # fmt: skip
bytes_of_rows["ns of its bytes"] = bytes_of_rows["bytes of a row"] * ns
bytes_of_rows["ns of its matmuls"] = 5 * 2 * bytes_of_rows["keys"] * 128 / limits.tflops / 1e3
longer = bytes_of_rows["ns of its bytes"] > bytes_of_rows["ns of its matmuls"]
assert [*longer] == [True, False, True, False], "the caption says so"

# %% tags=["remove-input"]
chapter.table(
    bytes_of_rows, digits={"ns of its bytes": 2, "ns of its matmuls": 2}, name="tab-bw5-bytes",
    caption="**With a sum in memory, bytes take longer than matmuls; without one, they do not.** "
    "A row of head_dim 128 at the rates of a copy and of a large matmul, back to back.",
    modelled="bytes and FLOPs of a row at measured ceilings",
)  # fmt: skip

# %% [markdown]
# ## The protocol of two CTAs
#
# Keys stay and queries stream. The roles are v4's; three barriers are new, and one of them counts
# arrivals from the other CTA:

# %% tags=["remove-input"]
chapter.roles(V5)

# %% [markdown]
# **Who computes which columns.** A CTA owns 128 keys: their K, V, dK and dV. Of dQ it computes the
# 64 columns of its rank, so it needs those 64 columns of the other CTA's K too. Which half that is
# becomes known only at run time, but shared memory can only be sliced at compile time. So
# {term}`TMA` decides: every CTA loads *its* half of the columns into buffer 0 and the other half
# into buffer 1.
#
# **How dS crosses.** A consumer stores its dS and copies it into the buffer `peer` of the other
# CTA. The copy arrives with its bytes on a barrier *there*, as a TMA load would:

# %% tags=["remove-input"]
chapter.code(v5.exchange_ds, "tlx.barrier_wait")

# %% [markdown]
# **Who may overwrite dS.** When dQ of a step is done, both this CTA's dS and the copy of the
# other's have been read. So its consumer arrives on `ds.empty` in both CTAs. The barrier counts
# two, and only when both have come may a consumer write the next dS:

# %% tags=["remove-input"]
chapter.code(v5.math, "dq = dq_product(", "tlx.async_descriptor_store_wait(0)")

# %% [markdown]
# **The end.** A CTA must not exit while the other may still write into its shared memory or arrive
# on its barriers. The compiler synchronises a cluster at the start of a kernel but not at its end,
# so the consumers wait for the last arrivals from the other CTA:

# %% tags=["remove-input"]
chapter.code(v5.math, "# The other program")

# %% [markdown]
# ## Is it right?
#
# Each of four steps of the protocol can be forgotten. The emulator's first words about it:

# %% tags=["remove-cell"]
BYTES = "    if role == 0:\n        tlx.barrier_expect_bytes(peer.full[stage], TILE * ROWS * 2)\n"
TELL = "            tlx.barrier_arrive(ds.empty[role], 1, remote_cta_rank=1 - rank)\n"
END = studies.piece(
    v5, "    for stage in tl.static_range(PAIR):\n        tlx.barrier_wait(ds", "\n\n"
)
FORGOTTEN = {
    "waiting for the other's dS": "    tlx.barrier_wait(peer.full[role], phase)\n",
    "telling the other that its dS was used": TELL,
    "announcing the bytes that will come": BYTES,
    "waiting at the end": END,
}
small, says = studies.batch((256,)), {}
for what, line in FORGOTTEN.items():
    wrong = studies.changed(v5, (line, ""))
    texts = studies.findings(lambda to=wrong: to.backward(studies.gradient(small), small), (0, 1))
    lines = texts[0].split("; nothing")[0].splitlines()
    says[what] = " ".join(lines[: 1 + lines[0].endswith(":")])  # a deadlock's first role, too
assert all(says.values()) and "EarlyExit" in says["waiting at the end"], "the caption says so"

# %% tags=["remove-input"]
chapter.table(
    pd.Series(says).map("``{}``".format).rename_axis("forgotten").rename("what the emulator says")
    .reset_index(), name="tab-bw5-forgotten",
    caption="**The emulator finds each forgotten step of the protocol.** One sequence of 256 "
    "tokens.",
    emulated="changed copies of backward v5",
)  # fmt: skip

# %% tags=["remove-cell"]
CROSS, SHORT, SELF = "gdpa-cross-full-2048", "gdpa-cross-full-512", "gdpa-self-full-256"
KEPT = studies.changed(v5, ("            zero = keep_runtime(step)\n", "            zero = 0\n"))
LISTED = [(impl, "default", {}) for impl in (V2, V2A, V4)] + [
    (V5, "default", {"config": v5.Config()}),
    (V5, "not folded", {"config": v5.Config(fold=False)}),
    (V5, "232 registers", {"config": v5.Config(registers=232)}),
    (V5, "addresses kept", {"config": v5.Config(), "module": KEPT}),
]
FEW = replace(workload(CROSS), name=f"{CROSS}-kv128", max_seqlen_k=128)
NARROW = workload("gdpa-cross-full-1024-kv128-d64")
TOKENS, JAGGED = (
    replace(workload(f"{name}-256"), name=f"{name}-128-b2304", batch=2304, max_seqlen_q=128,
            max_seqlen_k=128)
    for name in ("gdpa-self-full", "gdpa-self-half-jagged")
)  # fmt: skip
ONE_TILE = {FEW: [V4, V5, V6, *PEERS], NARROW: [V4, V6, *PEERS], TOKENS: [V4, V5, V6, "cudnn"],
            JAGGED: [V4, V5, V6, "fa2_varlen"]}  # fmt: skip
WIDE = workload("gdpa-self-full-512-b256-d256")
LONG = replace(WIDE, name="gdpa-self-full-2048-b64-d256", batch=64, max_seqlen_q=2048,
               max_seqlen_k=2048)  # fmt: skip
ADD = '    tlx.async_descriptor_store(desc, buffer, coords, store_reduce="add")\n'
SEND = '    tlx.async_descriptor_store(desc, buffer, coords, store_reduce="add")\n'
NOT_ADDED, UNSENT = studies.changed(v4, (ADD, "")), studies.changed(v7, (SEND, ""))


def pieces(inputs) -> dict:
    """v6, v4, and what v4 consists of."""
    batch = inputs.batch()

    def listed(module, config):
        return module.work_list_recipe(batch, config).make(*batch.offsets)

    sums = torch.zeros(batch.q.shape, dtype=torch.float32, device=batch.device)
    rounding = (sums, torch.empty_like(batch.q), 1.0, sums.numel())
    grid = (triton.cdiv(sums.numel(), 4096),)
    run = {
        name: partial(module.backward, inputs.grad_out, batch,
                      work_list=listed(module, module.default_config(batch)))
        for name, module in {"v4": v4, "v4, nothing added": NOT_ADDED, "v6": v6}.items()
    }  # fmt: skip
    run["zero fill"] = sums.zero_
    run["rounding"] = partial(launch, round_kernel, grid, batch.device, *rounding, BLOCK=4096)
    return run


def knocked_out(inputs) -> dict:
    """v7, and what it does without its activation, without sending dQ, without both."""
    batch, plain = inputs.batch(), replace(inputs.batch(), activation=("identity",))
    run = {"v7": (v7, batch), "identity": (v7, plain),
           "not sent": (UNSENT, batch), "both": (UNSENT, plain)}  # fmt: skip
    listed = {"work_list": v7.work_list_recipe(batch, v7.Config()).make(*batch.offsets)}
    return {x: partial(m.backward, inputs.grad_out, b, **listed) for x, (m, b) in run.items()}


@chapter.measure
def _(session):
    for name in (CROSS, SHORT, SELF):
        session.measure(workload(name), LISTED, direction="backward")
        studies.repeat_backward(session, workload(name), [(V4, "", {}), (V5, "", {})])
    how = {"scopes": ("sustained",), "seconds": 0.75}
    for work, impls in ONE_TILE.items():
        session.measure(work, impls, direction="backward", **how)
    wide = [V1, V7, (V7, "not folded", {"config": v7.Config(fold=False)}), *PEERS]
    session.measure(WIDE, wide, direction="backward", **how)
    session.measure(LONG, [V7, "cudnn"], direction="backward", **how)
    session.measure(WIDE, [*FORWARD, *PEERS], **how)

    calls = {"piece": (FEW, [V4, V6], pieces), "part": (WIDE, [V7], knocked_out)}
    for name, (work, impls, calls_of) in calls.items():

        def tabulate(inputs, name=name, calls_of=calls_of):
            timed = timing.sample_kernels(calls_of(inputs), session.device, session.protocol)
            session.tabulate(f"{name}s", (name,), {(x,): us for x, us in timed.items()})

        session.launch(f"{name}s", work, impls, tabulate, direction="backward")


tflops = chapter.times("", "tflops", impl=[V4, V5], variant="default")
us = chapter.times(columns="variant", variant=None, impl=V5, scope="kernel")
RATE = {"form": ".0f", "unit": " TFLOP/s"}
ASIDE = {"shown": False} | RATE
chapter.predict("Backward v5 reaches 450 to 520 TFLOP/s with 2,048 queries on 256 keys.",
                tflops[V5][CROSS], least=450, most=520, **RATE)  # fmt: skip
chapter.predict("Backward v5 reaches 330 to 400 TFLOP/s on full batches of 256 tokens.",
                tflops[V5][SELF], least=330, most=400, **ASIDE)  # fmt: skip
chapter.predict(
    "Folding the factors of GELU into the sums saves 2 to 8 % of time with 2,048 queries.",
    100 * (1 - us["default"][CROSS] / us["not folded"][CROSS]), least=2, most=8, unit=" %",
    shown=False,
)  # fmt: skip

# %% [markdown]
# ## One line is worth a third of the speed
#
# The first draft of backward v5 lacked one line, `zero = keep_runtime(step)`, the added zero of
# {doc}`v4_warp_specialized_backward`. Without it the kernel takes {glue:text}`kept_cross:.2f` times
# as long with 2,048 queries (in bursts).

# %% tags=["remove-cell"]
kernels = {x: studies.build_backward(module) for x, module in {"v5": v5, "kept": KEPT}.items()}
loops = {name: Counter(compile_check.shortest_loop(kernel, "MUFU", 2 * 64 * 64 // 128))
         for name, kernel in kernels.items()}  # fmt: skip
local = pd.Series({name: (loop["LDL"] + loop["STL"]) / 2 for name, loop in loops.items()})
assert local["v5"] == 0 < local["kept"], "the text says so; a loop is two steps"
bits = chapter.recorded("bits").groupby("impl")["different"].sum()
assert bits[V4] == bits[V5] == 0, "the text says so"
memory = chapter.recorded("memory", "backward/results").set_index(["workload", "impl"])["bytes"]
slower = us["addresses kept"] / us["default"]
assert slower.min() > 1.4, "the heading"
chapter.glue(
    kept_cross=slower[CROSS], spilled=compile_check.read(kernels["kept"]).spill_bytes,
    gib_v4=memory[CROSS, V4] / 2**30, gib_v5=memory[CROSS, V5] / 2**30,
)  # fmt: skip

# %% [markdown]
# The compiler hoists all addresses out of the loop, has no registers for them, and {term}`spills
# <spill>` {glue:text}`spilled:.0f` bytes; with the line there are none.
#
# The gradients have the same bits in every run, and a training step with 2,048 queries needs
# {glue:text}`gib_v5:.2f` GiB beside its inputs instead of {glue:text}`gib_v4:.2f`.
#
# ## Backward v6: one CTA is enough for 128 keys
#
# With 128 keys or fewer, dQ is a single product. Backward v6 needs neither a sum nor a cluster: its
# consumers exchange dS inside one CTA, as in v4, and store dQ in bf16, as in v5.

# %% tags=["remove-cell"]
listed = [x.name for x in ONE_TILE]
rows = chapter.rows(scope="sustained", direction="backward", workload=listed)
time = rows.pivot(index="workload", columns="impl", values="time_us_p50").loc[listed]
over = time.div(time[V6], axis=0)
saved = (time[V4] - time[V6])[FEW.name] * 1e3 / (FEW.total_q * FEW.num_heads_q)  # ns of a row
parts = chapter.recorded("pieces").groupby("piece")["time_us"].median()
chapter.glue(
    over_v4=spread(over[V4]), over_v5=spread(over[V5].dropna()), saved=saved, bytes=1536 * ns,
    over_peer=spread(over[PEERS].min(axis=1).dropna()), twice=2048 * ns,
)  # fmt: skip


def mmas(work) -> float:
    """Products of 64 rows and 128 keys that v5 issues over those of v6: v5 in pairs of steps, and
    two CTAs; v6 with one S too many for each tile."""
    steps = [max(-(-rows // 64), 1) for rows in work.seqlens_q]
    return sum(10 * (n + n % 2) for n in steps) / sum(5 * n + 1 for n in steps)


counted = pd.Series({x.name: mmas(x) for x in ONE_TILE if V5 in ONE_TILE[x]})
rate = rows.set_index(["impl", "workload"])["tflops"]
chapter.predict(
    "Backward v6 reaches 250 TFLOP/s at head_dim 64 with 1,024 queries on 128 keys.",
    rate[V6, NARROW.name], least=250, registered="backward/v6_one_tile_backward#1", **ASIDE,
)  # fmt: skip
chapter.predict(
    "A row with 128 keys saves backward v6 0.8 to 1.0 times what the bytes that it no longer moves "
    "take.",
    saved / (1536 * ns), least=0.8, most=1.0, registered="backward/v6_one_tile_backward#2",
)  # fmt: skip
chapter.predict(
    "Backward v6 gains at most the factor of MMAs over v5: the largest quotient of the two.",
    (over[V5] / counted).dropna(), most=1.05, shown=False,
    registered="backward/v6_one_tile_backward#3",
)  # fmt: skip

# %% tags=["remove-input"]
# | name: fig-bw6-over
# | caption: >
# |   **With at most 128 keys backward v6 is the fastest kernel timed on each workload.** Time over
# |   that of v6, back to back.
# | alt: >
# |   A dot plot, a row for each workload, a mark for each kernel, and a line at 1 for v6. All marks
# |   lie right of the line.
named = {V4: "backward v4", V5: "backward v5", "fa2_varlen": "FlashAttention-2", "cudnn": "cuDNN"}
shown = over[list(named)].rename(columns=named, index=short)
assert shown.min(axis=None) > 1, "the caption says so"
assert set(rows["impl"]) == {*named, V6}, "the text: no others were timed"
chart = charts.dots(shown, xlabel="time over that of backward v6")
chapter.figure(chart, measured=rows)

# %% [markdown]
# Back to back, backward v6 runs {glue:text}`over_v4` times as fast as v4, {glue:text}`over_v5`
# times as fast as v5, and {glue:text}`over_peer` times as fast as the better of FA2 and cuDNN, the
# baselines timed there.
#
# **The zero fill was also a promise.** In backward v4 a row without contributions keeps the zeros
# of the fill. Without a fill, every row needs a tile that writes it, even the rows of a sequence
# without keys; the work list has at least one tile a sequence for that.

# %% tags=["remove-cell"]
ragged = studies.batch((130, 70, 0, 1), (128, 0, 5, 63), heads=2)
studies.compare_gradients(studies.backward(v6, ragged).gradients, ragged)
wrong = studies.changed(v6, (", least=1", ""))
silent = studies.findings(lambda: wrong.backward(studies.gradient(ragged), ragged), [0])[0]
torch.use_deterministic_algorithms(True)  # and torch.empty gives NaN
dq = studies.backward(wrong, ragged).gradients[0]
torch.use_deterministic_algorithms(False)
assert silent == "" and dq.isnan().any(), "the text: rows unwritten, the emulator finds nothing"

# %% [markdown]
# If it is left out, rows of dQ are never written, and the emulator reports nothing: it judges what
# programs do, and here none does anything. Only a comparison finds it, if the memory held something
# else before. So `measure` fills earlier results with NaN.
#
# **An addition moves more than it says.** Back to back, with 2,048 queries on 128 keys, a row costs
# backward v6 {glue:text}`saved:.2f` ns less than v4. The 1,536 bytes that it does not move take
# {glue:text}`bytes:.2f` ns at the rate of a copy. Where v4's time goes, in bursts:

# %% tags=["remove-input"]
order = ["v4", "v4, nothing added", "zero fill", "rounding", "v6"]
chapter.table(
    parts[order].rename("µs").rename_axis("backward").reset_index(), digits={"µs": 0},
    name="tab-bw6-pieces",
    caption="**The additions are the largest part of v4's extra time over v6.** "
    "2,048 queries on 128 keys, in bursts.",
    measured=chapter.holders("pieces"),
)  # fmt: skip
assert parts["v4"] - parts["v4, nothing added"] > max(parts["zero fill"], parts["rounding"])

# %% [markdown]
# If L2 has to fetch the zeros from memory and write the sum back later, an addition moves 1,024
# bytes instead of 512. A row then saves 2,048 bytes, or {glue:text}`twice:.2f` ns, close to what we
# found.
#
# ## When the accumulators do not fit: backward v7
#
# With head_dim 256, dK and dV of 64 keys take 256 registers of each thread, one more than a thread
# may have. The two consumers of backward v4 each compute everything for their own keys, so v4 ends
# at head_dim 128. Backward v7 divides the five matmuls *by product* instead: one consumer,
# `scores`, computes S, dP, the activation and dV; the other, `sums`, computes dK and dQ. Only dS
# crosses between them. Shared memory moves 448 KiB in a step of 64 keys and 64 rows, 3,584 cycles,
# where the MMAs need 2,560 ({doc}`lab notes <../../notes/gdpa_backward>`).

# %% tags=["remove-cell"]
rows7 = chapter.rows(scope="sustained", direction=None, workload=[WIDE.name, LONG.name])
timed_rows = rows7.set_index(["direction", "workload", "impl"]).sort_index()
rate7, us7 = timed_rows["tflops"]["backward"], timed_rows["time_us_p50"]["backward"]
clocks = us7 * timed_rows["sm_clock_mhz"]["backward"] * 132  # of all SMs
steps = {x.name: x.batch * x.num_heads_k * (x.max_seqlen_k // 64) ** 2 for x in (WIDE, LONG)}
more = steps[LONG.name] - steps[WIDE.name]
step = (clocks[LONG.name, V7] - clocks[WIDE.name, V7]) / more
others = chapter.rows("measuring/other_shapes", scope="sustained", direction="backward",
                      workload=WIDE.name)  # fmt: skip
peer = best_peer(others)
assert peer["impl"] == "fa3", "the text"
knocked = chapter.recorded("parts").groupby("part", sort=False)["time_us"].median()
share = 100 * knocked / knocked["v7"]
assert share["identity"] > 97 and share["not sent"] < 80, "the text says what saves nothing"
chapter.glue(
    over_v1=rate7[WIDE.name, V7] / rate7[WIDE.name, V1], step=step,
    over_peer7=others.set_index("impl")["tflops"][V7] / peer["tflops"],
    added7=more * 64 * 256 * 4 / (us7[LONG.name, V7] - us7[WIDE.name, V7]) / 1e6,
)  # fmt: skip
chapter.predict("A step of backward v7 takes 3,900 to 4,400 cycles.", step, least=3900, most=4400,
                form=",.0f", shown=False, registered="backward/v7_wide_backward#1")  # fmt: skip
chapter.predict("Backward v7 reaches 370 to 430 TFLOP/s with 512 tokens.", rate7[WIDE.name, V7],
                least=370, most=430, registered="backward/v7_wide_backward#2", **ASIDE)  # fmt: skip
chapter.predict("Backward v7 reaches 420 to 480 TFLOP/s with 2,048 tokens.", rate7[LONG.name, V7],
                least=420, most=480, registered="backward/v7_wide_backward#3", **ASIDE)  # fmt: skip
chapter.predict("Forward v8 reaches 520 to 600 TFLOP/s at head_dim 256.",
                timed_rows["tflops"]["forward", WIDE.name, FORWARD[1]], least=520, most=600,
                registered="backward/v7_wide_backward#4", **ASIDE)  # fmt: skip
chapter.predict(
    "With the identity as activation backward v7 takes 80 to 95 % of its time, since `scores` is a "
    "chain of instructions.",
    share["identity"], least=80, most=95, form=".0f", unit=" %",
    registered="backward/v7_wide_backward#5",
)  # fmt: skip
chapter.predict(
    "Without sending dQ backward v7 takes 75 to 92 % of its time, since each half waits for the "
    "one before.",
    share["not sent"], least=75, most=92, form=".0f", unit=" %", shown=False,
    registered="backward/v7_wide_backward#6",
)  # fmt: skip

# %% [markdown]
# With head_dim 256 and 512 tokens, backward v7 is {glue:text}`over_v1:.1f` times as fast as v1 back
# to back, and {glue:text}`over_peer7:.2f` times as fast as the best baseline, FlashAttention-3
# ({doc}`../measuring/other_shapes`). A step takes {glue:text}`step:,.0f` cycles, much more than the
# count. We suspected `scores`, since in v7 every activation is on one chain, and *knocked out*
# parts of the kernel, one at a time. The output is wrong, but the time saved is what the part cost:

# %% tags=["remove-input"]
names = {"v7": "backward v7", "identity": "identity instead of GELU", "not sent": "dQ not sent",
         "both": "both"}  # fmt: skip
chapter.table(
    share.rename(index=names).rename("time, %").rename_axis("kernel").reset_index(),
    digits={"time, %": 0}, name="tab-bw7-knocked",
    caption="**The activation costs backward v7 nothing, sending dQ more than a fifth of its "
    "time.** Parts knocked out, in bursts.",
    measured=chapter.holders("parts"),
)  # fmt: skip

# %% [markdown]
# The chain under suspicion has slack. A step adds 64 KiB to the sums in memory,
# {glue:text}`added7:.1f` TB/s from all SMs.
#
# The predictions of v5 and v7 precede any run; that of v6 follows from v5's record:

# %% tags=["remove-input"]
chapter.predictions()

# %% tags=["remove-input"]
chapter.profile("v5_short_kv_backward", workload="gdpa-cross-full-512", direction="backward")
chapter.profile(
    "v6_one_tile_backward", workload="gdpa-cross-full-1024-kv128-d64", direction="backward"
)
chapter.profile("v7_wide_backward", workload="gdpa-self-full-512-b256-d256", direction="backward")

# %% [markdown]
# ## Exercises
#
# :::{exercise} How many queries?
# :label: ex-bw5-queries
#
# K, V, dK and dV of a sequence of 256 keys pass memory once. With how many rows of Q do Q, dO and
# dQ move as many bytes? What does that say about {numref}`fig-bw5-rungs`? *(paper, five minutes)*
# :::
#
# :::{solution} ex-bw5-queries
# :class: dropdown
#
# 4 × 256 keys × 256 bytes are 256 KiB; at 768 bytes a row that is 341 rows. On full batches of 256
# most bytes belong to keys, with 2,048 queries one in seven. The fixed cost of a sequence is spread
# over more rows, and the curve of v5 rises.
# :::
#
# :::{exercise} Half a cluster
# :label: ex-bw5-half
#
# A sequence has 128 keys and 256 queries. What does the second CTA of its cluster compute? By what
# factor do v5's MMAs exceed v6's, which computes one S twice? *(paper, ten minutes)*
# :::
#
# :::{solution} ex-bw5-half
# :class: dropdown
#
# Its keys lie beyond the end, TMA brings zeros, and it multiplies them. It is needed all the same:
# half of the columns of dQ are its own. Four steps of five MMAs in each of two CTAs are 40, against
# 21: a factor of 1.9.
# :::
#
# :::{exercise} Plan a cluster of four
# :label: ex-bw5-four
#
# With four CTAs 512 keys would fit. Each CTA owns 128 keys, takes steps of 64 rows, and computes a
# quarter of the 128 columns of dQ. (a) How many KiB of dS does a CTA send in a step, how many does
# it receive, and how much of the others' K does it hold? (b) Add up its shared memory with two
# slots each of Q, dO and dS. An SM has 227 KiB. What fits, and what does that cost? (c) How many
# arrivals must `ds.empty` count now, and where do they come from? *(paper, thirty minutes, as in
# an exam)*
# :::
#
# :::{solution} ex-bw5-four
# :class: dropdown
#
# (a) 128 keys by 64 rows of dS are 16 KiB. It sends them to three others, receives 48 KiB, and
# holds 3 × 128 × 32 numbers of K, 24 KiB. (b) Q and dO twice (64), its own K and V (64), two slots
# of dS (32), the others' K (24), two slots of their dS (96) and staging (16) are 296 KiB. With one
# slot of dS each it is 232 KiB. With one of Q and dO too everything fits, but each step waits for
# its loads. (c) Four: one from this CTA, whose dQ has read its dS, and one from each of the three
# others, which have read their copies.
# :::
#
# ## Takeaways
#
# - Ask who has to be together for a sum to be finished in one place, and count operands before the
#   matmul against results after it.
# - Who removes a zero fill takes over its promise that every row is written.
# - Knock out one part at a time. What saves nothing has slack.
