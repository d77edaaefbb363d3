# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # Block v4: rotary
#
# {term}`Rotary <rotary>` embeddings are a pass over q, k and v before attention, and one over their
# gradients after it. What does it cost to apply them inside the kernels?
#
# :::{admonition} In this chapter (35 minutes)
# You will be able to count what fusing rotary saves, to see in a picture why the obvious code
# spills, and to count what a warp can issue. Block v4 applies rotary in the consumer, block v4a in
# a role of its own, which reaches {glue:text}`v4a_forward:.0f` % of a copy's rate in the forward
# pass and {glue:text}`v4a_backward:.0f` % in the backward pass, back to back.
# :::

# %% tags=["hide-input"]
import inspect
from dataclasses import replace

import pandas as pd
import torch

from _lib import block_studies, loops, studies
from gdpa_kernels.block_attention.kernels import v1_one_tile, v4a_turning_role
from gdpa_kernels.block_attention.ladder import v2_slab, v4_rotary
from gdpa_kernels.block_attention.ladder.v4_rotary import Config
from gdpa_lab.measuring import compile_check, system
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts
from gdpa_lab.report.chapter import Chapter
from notebooks.block import _layouts

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("block/v4_rotary", mode=mode, device=device, data_dir=data_dir)
ROTARY = workload("block-rotary-1735537")
PLAIN = replace(ROTARY, name="block-plain-1735537", rotary=False, rotate_v=False)
WAYS = {
    "v2_slab": "block v2", "v1_one_tile": "block v1", "rotary_kernel": "two kernels",
    "v4_rotary": "block v4", "v4a_turning_role": "block v4a",
}  # fmt: skip
shown = chapter.rows("block/results", scope="sustained", workload=ROTARY.name)
DIRECTIONS = ["forward", "backward"]
us, of_copy = (shown.pivot(index="impl", columns="direction", values=value).rename(WAYS)
               for value in ("time_us_p50", "percent_of_roofline"))  # fmt: skip
for way in ("v4", "v4a"):
    chapter.glue(**{f"{way}_{d}": of_copy.loc[f"block {way}", d] for d in DIRECTIONS})
of_copy = of_copy.loc[list(WAYS.values()), DIRECTIONS].sort_values("backward")

# %% tags=["remove-input"]
# | name: fig-rot-times
# | caption: >
# |   **Only a fusion with care beats two kernels in the backward pass.** Fewest bytes of the fused
# |   pass over time, in percent of the {ref}`ceiling <rule-ceiling>`, back to back. Two kernels: a
# |   rotary kernel, then attention. Slowest backward pass first.
# | alt: >
# |   A dot plot, a mark for each direction: v4a lies nearest to the line at 100, then v4. Two
# |   kernels one after the other lie near the middle, fused v1 and v2 lower still backward.
chapter.figure(
    charts.dots(
        of_copy, xlabel="% of the rate of a copy",
        levels={"copy": 100},
    ),
    measured=shown,
)  # fmt: skip

# %% [markdown]
# ## What block v4 adds to block v3
#
# | | {doc}`block v3 <v3_warp_specialized>` | block v4 |
# |:--|:--|:--|
# | loads of a block | q, k, v (and grad_out) of each head | the same, and sin and cos once |
# | before the first MMA | | rotary is applied to q, k and v in place, in shared memory |
# | gradients on their way out | rounded | rotary transposed is applied in fp32, then rounded |
# | roles, slots, MMAs | | the same |
#
# The backward pass applies rotary again, since only q, k and v are kept, and its transpose to the
# gradients ({doc}`backward_alone`). The batch is the published one: 1,735,537 tokens, 3 heads of
# 128, rotary on v too, sin and cos in bf16.
#
# ## Bytes promise a factor of two
#
# In tensors of q's size; with 3 heads, sin and cos together are a third of one:
#
# | | forward | backward |
# |:--|--:|--:|
# | attention without rotary | 4 | 7 |
# | a rotary kernel for q, k and v, or their gradients | 6 1/3 | 6 1/3 |
# | two kernels | 10 1/3 | 13 1/3 |
# | fused, sin and cos read once for all heads | 4 1/3 | 7 1/3 |
# | two kernels / fused | 2.4 | 1.8 |
#
# ## Move the small operand, not the large one
#
# `rotate_tile` applies rotary to a tile in shared memory, in place, because an MMA reads its
# operands there. Gradients are rotated as accumulators, in registers, before they are rounded. How
# does an accumulator lie in the threads?

# %% tags=["remove-input"]
# | name: fig-rot-layout
# | caption: >
# |   **Both partners of a pair lie in one thread, but their sine does not.** One row of an
# |   accumulator with 16 columns, as the MMA leaves it in threads T0 to T3 of a warp. Lines join
# |   the pairs that interleaved and half-split rotary rotate. Below, the sines of the interleaved
# |   pairs: the thread that needs each, and the thread that a load of 16 bytes (four fp32) gives it
# |   to.
# | alt: >
# |   A row of 16 cells in four colours, two neighbours each: T0 T0 T1 T1 T2 T2 T3 T3, then again.
# |   Short arcs join neighbours, long arcs join cells eight apart, always of one colour. Below are
# |   eight wide cells: needed by T0 T1 T2 T3 T0 T1 T2 T3, loaded by T0 four times, then T1.
chapter.figure(_layouts.rotary(), computed="the layout of wgmma accumulators in the PTX manual")

# %% [markdown]
# Before multiplying, sin and cos or the gradient must move to the other's places, through shared
# memory. The obvious code first splits the tile into even and odd columns, and thereby moves the
# large one, each gradient. Block v4 moves the small one: it widens sin and cos to two equal
# neighbours, multiplies, and only then separates even and odd columns.

# %% tags=["remove-input"]
chapter.code(v4_rotary.rotated, "    sin = ")

# %% [markdown]
# Compiled for the backward pass with two consumers, sin and cos in fp32, the obvious code
# {term}`spills <spill>` {glue:text}`spilled_obvious:.0f` bytes a thread, block v4's code
# {glue:text}`spilled_v4:.0f`.

# %% tags=["remove-cell"]
OBVIOUS = """\
    even, odd = tl.split(tl.reshape(x, [ROWS, WIDTH // 2, 2]))
    if BACK:
        pairs = tl.join(even * cos + odd * sin, odd * cos - even * sin)
    else:
        pairs = tl.join(even * cos - odd * sin, odd * cos + even * sin)
"""
text = inspect.getsource(v4_rotary)
ours = text[text.index("    by_sin = ") : text.index("    return tl.reshape(pairs")]
obvious = studies.changed(v4_rotary, (ours, OBVIOUS))
FP32 = block_studies.blank(128, heads=3, rotary=torch.float32)
BF16 = block_studies.blank(128, heads=3, rotary=torch.bfloat16)
forms = {
    "products taken apart": (v4_rotary, "backward", Config(math_roles=2), FP32),
    "tile taken apart": (obvious, "backward", Config(math_roles=2), FP32),
}
spilled = block_studies.compiled(forms).set_index("case")["spilled (B)"]
chapter.glue(spilled_v4=spilled.iloc[0], spilled_obvious=spilled.iloc[1])
assert spilled.iloc[0] < 16 < 50 < spilled.iloc[1]

# %% [markdown]
# ## Rotary does not hide: a warp issues too few instructions
#
# We expected rotary to hide behind the loads, since shared memory has bandwidth to spare, and
# measured variants with one and two consumers, two to four slots, and one or two slots of sin and
# cos.

# %% tags=["remove-cell"]
CASES = {"forward": [(1, 2, 2), (1, 3, 2)], "backward": [(1, 2, 2), (1, 2, 1), (1, 3, 1)]}
MORE = {
    v4_rotary: {"forward": [(2, 2, 2), (2, 4, 2)], "backward": [(2, 2, 2)]},
    v4a_turning_role: {"forward": [(1, 3, 1)], "backward": []},  # comes below
}
DEFAULT = {"forward": (1, 3, 2), "backward": (1, 2, 2)}  # of v4


def label(consumers: int, slots: int, of_sin_cos: int) -> str:
    """The variant's name in the record."""
    angles = ", 1 of sin and cos" if of_sin_cos == 1 else ""
    return f"{consumers} math role{'s' * (consumers > 1)}, {slots} slots{angles}"


@chapter.measure
def _(session):
    for direction, attention in (("backward", "v3_warp_specialized"), ("forward", "v1_one_tile")):
        listed = [
            (module.__name__.split(".")[-1], label(*case), {"config": module.Config(*case)})
            for module, more in MORE.items()
            for case in CASES[direction] + more[direction]
        ]
        listed += [(impl, "default", {}) for impl in ("v1_one_tile", "v2_slab")]
        for apart in ("rotary_kernel", "eager_rotary"):
            listed.append((apart, "default", {"attention": attention}))
        session.measure(ROTARY, listed, direction=direction)
        plain = [(impl, "default", {}) for impl in ("v1_one_tile", "v3_warp_specialized")]
        session.measure(PLAIN, plain, direction=direction)


# %% tags=["remove-cell"]
rows = chapter.rows(variant=None).set_index(["workload", "direction", "impl", "variant"])
time_us, share = rows["time_us_p50"], rows["percent_of_roofline"][ROTARY.name].swaplevel(0, 1)
v4, v4a = (
    time_us[ROTARY.name].xs(impl, level="impl") for impl in ("v4_rotary", "v4a_turning_role")
)
default = pd.Series({d: v4[d, label(*case)] for d, case in DEFAULT.items()})
attention = time_us[PLAIN.name].groupby("direction").min()
of_bytes = [ROTARY.bytes(direction) / PLAIN.bytes(direction) for direction in attention.index]
hidden = default / (attention * of_bytes)

chapter.predict(
    "Block v4 hides rotary: it takes the time of attention without it, more by its bytes, within "
    "10 % (the larger ratio).", hidden.max(skipna=False), least=0.90, most=1.10,
)  # fmt: skip
text = "In the backward pass one consumer is enough: two are not more than 2 % faster."
two = {d: v4[d, label(2, n, 2)] / default[d] for d, n in (("forward", 4), ("backward", 2))}
chapter.predict(text, two["backward"], least=0.98, shown=False)
chapter.glue(**{f"two_{way}": 100 * (1 / ratio - 1) for way, ratio in two.items()})
assert max(two.values()) < 0.98, "the text: a second consumer is faster"
chapter.glue(hidden=hidden.max())

# %% [markdown]
# It does not hide: block v4 takes up to {glue:text}`hidden:.2f` times the time of attention with as
# many bytes (in bursts). With a second consumer the forward pass is {glue:text}`two_forward:.0f` %
# and the backward pass {glue:text}`two_backward:.0f` % faster, although the loads were in flight
# all along. We had counted bytes and not instructions. Here they are, for one warp and one item of
# the backward pass, from the {term}`SASS`:

# %% tags=["remove-input"]
v4_built, v4a_built = (
    block_studies.built(module, "backward", None, BF16)["backward_kernel"] for module in MORE
)
roles = {
    "block v4, consumer": loops.of_an_item(v4_built),
    "block v4a, consumer": loops.of_an_item(v4a_built),
    "block v4a, rotary role": loops.of_an_item(v4a_built, matmuls=False),
}
roles = pd.DataFrame(roles).T.rename_axis("role")
whole = roles["for an item"] + roles["for a block"] / 3
chapter.table(
    roles.reset_index(),
    caption="**A role of its own takes rotary off the consumer.** Instructions of a warp for an "
    "item, for a block besides, and of those for an item the ones that touch shared memory and the "
    "MMAs.",
    name="tab-rot-roles", compiled="SASS for sm_90a, head_dim 128, sin and cos in bf16",
)  # fmt: skip

# %% tags=["remove-cell"]
machine = system.load(chapter.data_dir / "systems" / f"{chapter.record().system}.json")
clocks = default["backward"] * machine.max_sm_clock_mhz * machine.num_sms / (ROTARY.blocks * 3)
gone = whole["block v4, consumer"] - whole["block v4a, consumer"] - whole["block v4a, rotary role"]
chapter.glue(
    clocks=clocks, each=clocks / whole["block v4, consumer"], gone=gone,
    mhz=machine.max_sm_clock_mhz,
    needed=clocks * share["v4_rotary", "backward", label(1, 2, 2)] / 100,
)  # fmt: skip

# %% [markdown]
# Each of the four schedulers of an SM has one warp of the consumer, so whenever this
# warp waits, its scheduler has nothing to issue. Block v4 takes {glue:text}`clocks:,.0f` cycles for
# an item at the highest clock of {glue:text}`mhz:,.0f` MHz, or {glue:text}`each:.1f` per
# instruction. Memory would need {glue:text}`needed:,.0f`.
#
# ## Block v4a: a role of its own applies rotary
#
# Between producer and consumer block v4a puts a third role. It applies rotary to q, k and v of a
# slot in place and hands the slot on, so that one item is rotated while another is multiplied:

# %% tags=["remove-input"]
chapter.code(v4a_turning_role.rotate_role, "                rotate_tile(tiles.q")

# %% [markdown]
# The price is one more array of barriers, `ready[stage]`. Each role reads sin and cos of a block
# once and keeps them in registers for all heads, in the layout that it needs. No large operand is
# converted, so block v4a uses the obvious code again, and {glue:text}`gone:,.0f` instructions of a
# backward item are gone.

# %% tags=["remove-cell"]
six_blocks = block_studies.batch((6 * 64,), head_dim=128, rotary=torch.bfloat16, rotate_v=True)
lanes = {"math_forward": "math", "rotate_role": "rotary"}
v4_line, v4a_line = (
    block_studies.timeline(m, six_blocks, config=m.Config(num_stages=3, num_turns=1), lanes=lanes)
    for m in MORE
)

# %% tags=["remove-input"]
# | name: fig-rot-turning
# | caption: >
# |   **The rotary role works on one slot while the consumer works on the one before.** Block v4a
# |   forward, two blocks of two heads. Modelled cycles.
# | alt: >
# |   Five lanes. The rotary role reads, computes and writes, slot after slot. math waits for it and
# |   has short pieces of work, with the MMAs, while rotary is already at the next slot.
chapter.figure(v4a_line, emulated="v4a_turning_role forward, modelled schedule")

# %% tags=["remove-input"]
studies.stepper(
    {"block v4": v4_line, "block v4a": v4a_line},
    "block-v4_rotary-steps",
    title="Block v4 and v4a, step by step",
)

# %% [markdown]
# Block v4 agrees with fp64, with sin and cos from N(0, 1), and block v4a has the bits of block v4
# (emulated).

# %% tags=["remove-cell"]
ragged = block_studies.batch((0, 1, 63, 64, 65), rotary=torch.bfloat16, rotate_v=True)
block_studies.comparison(v4_rotary, ragged, schedule=0)
expected, _ = block_studies.emulated(v4_rotary, ragged)
actual, _ = block_studies.emulated(v4a_turning_role, ragged, schedule=0)
assert all(map(torch.equal, actual, expected)), "the text says so"

# %% [markdown]
# ## With three slots block v4a reaches what memory allows
#
# We expected, in cycles at a clock below the highest, 7,000 to 7,800 for a backward item where
# memory needs 6,450, and 3,900 to 4,200 for a forward item where it needs 3,740. Two slots are the
# weak point of the backward pass: an item is loaded, rotated, multiplied and stored before its slot
# is free.

# %% tags=["remove-cell"]
of_v4a = share["v4a_turning_role"]
chapter.predict(
    "In the backward pass with two slots block v4a reaches 6,450 / 7,800 to 6,450 / 7,000 of what "
    "memory allows.",
    of_v4a["backward", label(1, 2, 2)], least=645 / 7.8, most=645 / 7, form=".1f", unit=" %",
    shown=False,
)  # fmt: skip
chapter.predict(
    "In the forward pass with three slots block v4a reaches 3,740 / 4,200 to 3,740 / 3,900 of what "
    "memory allows.",
    of_v4a["forward", label(1, 3, 2)], least=374 / 4.2, most=374 / 3.9, form=".1f", unit=" %",
)  # fmt: skip
chapter.glue(
    third_v4a=100 * (1 - v4a["backward", label(1, 3, 1)] / v4a["backward", label(1, 2, 1)]),
    third_v4=100 * (v4["backward", label(1, 3, 1)] / v4["backward", label(1, 2, 1)] - 1),
    share_forward=of_v4a["forward", label(1, 3, 1)],
    share_backward=of_v4a["backward", label(1, 3, 1)],
)  # fmt: skip
of_v3 = rows["percent_of_roofline"][PLAIN.name].xs("v3_warp_specialized", level="impl").droplevel(1)
assert all(abs(of_v4a[d, label(1, 3, 1)] - of_v3[d]) < 3 for d in DIRECTIONS), "the text: about"

# %% [markdown]
# A third slot saves block v4a {glue:text}`third_v4a:.0f` %; in block v4, which waits for its
# consumer, it costs {glue:text}`third_v4:.1f` %. With three slots and one of sin and cos, its
# default, block v4a reaches {glue:text}`share_forward:.0f` % of the copy in the forward pass and
# {glue:text}`share_backward:.0f` % in the backward pass (in bursts), about where block v3 is
# without rotary.
#
# ## Surprise: a careful fusion gains as much over a naive one as fusing itself promises
#
# In the backward pass the fused block v1 and block v2 take {glue:text}`v1_lost:.2f` and
# {glue:text}`v2_lost:.2f` times the time of two kernels one after the other. They rotate a tile in
# registers, in fp32, and spill {glue:text}`v1_spills:.0f` and {glue:text}`v2_spills:.0f` bytes a
# thread on its way to shared memory.

# %% tags=["remove-cell"]
RUNGS = {"v1": v1_one_tile, "v2": v2_slab, "v4": v4_rotary, "v4a": v4a_turning_role}
cases = {name: (module, "backward", None, BF16) for name, module in RUNGS.items()}
spills = block_studies.compiled(cases).set_index("case")["spilled (B)"]
chapter.glue(v1_spills=spills["v1"], v2_spills=spills["v2"])
lost = us["backward"] / us["backward"]["two kernels"]
assert lost[["block v1", "block v2"]].min() > 1 > lost["block v4"] > lost["block v4a"], "the text"
assert lost["block v1"] / lost["block v4a"] > 40 / 22, "the title: as much as fusing promises"
assert spills["v4"] == 0 < min(spills["v1"], spills["v2"]), "the text"
eager = us["backward"]["eager_rotary"] / us["backward"]["block v1"]
chapter.glue(v1_lost=lost["block v1"], v2_lost=lost["block v2"], eager=eager,
             won=1 / lost["block v4a"])  # fmt: skip

# %% [markdown]
# Block v4a, back to back, is {glue:text}`won:.2f` times as fast as the two kernels, most of what
# the bytes allow. The two kernels are no weak baseline either: even block v1 is
# {glue:text}`eager:.1f` times as fast in the backward pass as rotary in PyTorch's operations.

# %% tags=["remove-input"]
chapter.predictions()

# %% tags=["remove-input"]
chapter.profile("v4_rotary", "v4a_turning_role", workload="block-rotary-1735537")
chapter.profile(
    "v4_rotary", "v4a_turning_role", workload="block-rotary-1735537", direction="backward"
)

# %% [markdown]
# ## Exercises
#
# :::{exercise} q and k alone
# :label: ex-rot-qk
#
# Most models apply rotary to q and k, not to v. By bytes, how many times as long as the fused
# kernel do two kernels take for this batch? *(paper, ten minutes)*
# :::
#
# :::{solution} ex-rot-qk
# :class: dropdown
#
# The rotary kernel then moves 4 1/3 tensors. Two kernels move 8 1/3 to 4 1/3 in the forward pass,
# or 1.9 times as much, and 11 1/3 to 7 1/3 in the backward pass, or 1.5 times.
# :::
#
# :::{exercise} Twice the digits
# :label: ex-rot-fp32
#
# sin and cos in fp32 take twice the room. Which of the measured variants of block v4 no longer fit
# into 227 KiB? Count, then compile. *(paper, then compile it: emulator)*
# :::
#
# :::{solution} ex-rot-fp32
# :class: dropdown
#
# A slot is 48 KiB in the forward and 64 KiB in the backward pass, dS 8 KiB for each consumer, a
# slot of sin and cos 32. Two forward consumers with four slots need 256 KiB; one backward consumer
# with three slots needs 232. Two consumers with two slots of each kind, 208 KiB in the backward
# pass, still fit: P has the place of V.
# :::
#
# :::{exercise} Without the fence
# :label: ex-rot-fence
#
# Leave out the fence after rotary in a copy of the file. What does the emulator say, and how many
# `fence.proxy.async` do the two compiled kernels lose? *(emulator, then compile it; ten minutes)*
# :::

# %% tags=["remove-cell"]
bare = studies.changed(v4_rotary, ('    tlx.fence("async_shared")\n\n', "\n"))
for direction in DIRECTIONS:
    with_it, without = (
        block_studies.built(module, direction, None, BF16)[f"{direction}_kernel"]
        for module in (v4_rotary, bare)
    )
    fences = [kernel.asm["ptx"].count("fence.proxy.async") for kernel in (with_it, without)]
    assert fences[0] == fences[1] > 0, "the answer: none"
    assert compile_check.sass(with_it) == compile_check.sass(without), "the answer: the same code"
    chapter.glue(**{f"fences_{direction}": fences[0]})
said = studies.findings(lambda: block_studies.run_pass(bare, six_blocks, "forward"))
assert not any(said), "the answer: nothing"

# %% [markdown]
# :::{solution} ex-rot-fence
# :class: dropdown
#
# Nothing, and none: {glue:text}`fences_forward:.0f` remain in the forward kernel,
# {glue:text}`fences_backward:.0f` in the backward one, and the machine code is the same. Before an
# MMA {ref}`the compiler <rule-fences>` has one of its own. The fence in the source is for readers
# and for other compilers. Before an `async_store` the copy would be wrong, and the emulator would
# say so.
# :::
#
# ## Takeaways
#
# - A pass saved in memory reappears in shared memory, registers and instructions.
# - Convert what is small, and once: sin and cos of a block, not a gradient of each head.
# - A fused kernel can lose to two kernels.
