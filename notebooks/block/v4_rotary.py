# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # Fused rotary
#
# Rotary embeddings are a pass over q, k and v before attention, and one over their gradients after
# it. What does it cost to apply them inside the kernels?
#
# :::{admonition} In this chapter (30 minutes)
# You will count what fusing rotary saves, find why the obvious form spills, and count what a warp
# can issue. v4 applies rotary in the consumer and reaches {glue:text}`v4_forward:.0f` % of the rate
# of a copy back to back forward and {glue:text}`v4_backward:.0f` % backward. v4a gives it to a role
# of its own: {glue:text}`v4a_forward:.0f` % and {glue:text}`v4a_backward:.0f` %. Fusing alone is
# worth little: backward v1 and v2, fused, are slower than two kernels.
# :::

# %%
import inspect
from dataclasses import replace

import pandas as pd
import torch

from _lib import block_studies, loops, studies
from gdpa_kernels.block_attention.kernels import v1_one_tile, v4a_turning_role
from gdpa_kernels.block_attention.ladder import v2_slab, v4_rotary
from gdpa_kernels.block_attention.ladder.v4_rotary import Config
from gdpa_lab.measuring import system
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts
from gdpa_lab.report.chapter import Chapter
from gdpa_lab.report.house import RUNG_COLOURS

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("block/v4_rotary", mode=mode, device=device, data_dir=data_dir)
ROTARY = workload("block-rotary-1735537")
PLAIN = replace(ROTARY, name="block-plain-1735537", rotary=False, rotate_v=False)
WAYS = {
    "rotary_kernel": "rotary kernel, then attention", "v1_one_tile": "v1", "v2_slab": "v2",
    "v4_rotary": "v4", "v4a_turning_role": "v4a",
}  # fmt: skip
shown = chapter.rows("block/results", scope="sustained", workload=ROTARY.name)
DIRECTIONS = ["forward", "backward"]
us, of_copy = (shown.pivot(index="impl", columns="direction", values=value).rename(WAYS)
               for value in ("time_us_p50", "percent_of_roofline"))  # fmt: skip
for way in ("v4", "v4a"):
    chapter.glue(**{f"{way}_{d}": of_copy.loc[way, d] for d in DIRECTIONS})

# %% tags=["remove-input"]
# | name: fig-rot-times
# | caption: >
# |   Fewest bytes of the fused pass over time, in percent of the rate of the fastest copy with the
# |   same mix of reads and writes, both back to back.
# | alt: >
# |   A dot plot, a mark for each direction: v4a lies nearest to the line at 100, then v4. Two
# |   kernels one after the other lie near the middle, fused v1 and v2 lower still backward.
chapter.figure(
    charts.dots(
        of_copy.loc[list(WAYS.values()), DIRECTIONS], xlabel="% of the rate of a copy",
        levels={"copy": 100}, colours=(RUNG_COLOURS[1], RUNG_COLOURS[3]),
    ),
    measured=shown,
)  # fmt: skip

# %% [markdown]
# ## What changes
#
# | | {doc}`v3 <v3_warp_specialized>` | v4 |
# |:--|:--|:--|
# | loads of a block | q, k, v (and grad_out) of each head | the same, and sin and cos once |
# | before the first MMA | | rotary is applied to q, k and v in place, in shared memory |
# | gradients on their way out | rounded | rotary transposed is applied in fp32, then rounded |
# | roles, slots, MMAs | | the same |
#
# *Interleaved* {term}`rotary`, {eq}`eq-block-rotary`, rotates columns $2i$ and $2i + 1$ of a token
# by the token's angle number $i$, the same for all heads.
#
# Backward applies it again, since only q, k and v are kept, and its transpose to the gradients
# ({doc}`backward_alone`). The batch is the published one: 1,735,537 tokens, 3 heads of 128, rotary
# on v too, sin and cos in bf16.
#
# ## Bytes
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
# ## The lines that matter
#
# `rotated` applies rotary to a tile in registers, `rotate_tile` to one in shared memory, in place:
# an MMA reads its operands there, and the old tile is no longer needed. A fence makes the threads'
# writes visible to the MMA. Gradients are rotated as accumulators, before they are rounded.

# %% tags=["remove-input"]
chapter.code(v4_rotary.rotated, "    sin = ")
chapter.code(v4_rotary.rotate_tile, "    x = ")

# %% [markdown]
# Why so complicated? The obvious form first splits the tile into even and odd columns. Both,
# compiled backward with two consumers, sin and cos in fp32:

# %%
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
print(spilled.to_string())
assert spilled.iloc[0] < 16 < 50 < spilled.iloc[1]

# %% [markdown]
# An accumulator has the MMA's register layout; sin and cos, read from shared memory with 16 bytes
# per load, have another. To multiply the two, one is converted, through shared memory. The obvious
# form converts each gradient, and spills. v4 doubles sin and cos to full width, multiplies, and
# splits the *products*.
#
# ## Prediction
#
# A tile is read, multiplied, written back and read again by the MMA, in shared memory, which has
# bandwidth to spare: it should hide. The variants (consumers, slots, slots of sin and cos):

# %%
CASES = {"forward": [(1, 2, 2), (1, 3, 2)], "backward": [(1, 2, 2), (1, 2, 1), (1, 3, 1)]}
MORE = {
    v4_rotary: {"forward": [(2, 2, 2), (2, 4, 2)], "backward": [(2, 2, 2)]},
    v4a_turning_role: {"forward": [(1, 3, 1)], "backward": []},  # comes below
}
DEFAULT = {"forward": (1, 3, 2), "backward": (1, 2, 2)}  # of v4


def label(consumers: int, slots: int, of_sin_cos: int) -> str:
    """The variant's name in the record."""
    own = ", 1 of sin and cos" if of_sin_cos == 1 else ""
    return f"{consumers} math role{'s' * (consumers > 1)}, {slots} slots{own}"


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


# %%
rows = chapter.rows(variant=None).set_index(["workload", "direction", "impl", "variant"])
own, share = rows["time_us_p50"], rows["percent_of_roofline"][ROTARY.name].swaplevel(0, 1)
v4, v4a = (own[ROTARY.name].xs(impl, level="impl") for impl in ("v4_rotary", "v4a_turning_role"))
default = pd.Series({d: v4[d, label(*case)] for d, case in DEFAULT.items()})
attention = own[PLAIN.name].groupby("direction").min()
of_bytes = [ROTARY.bytes(direction) / PLAIN.bytes(direction) for direction in attention.index]
hidden = default / (attention * of_bytes)

# %% tags=["remove-input"]
chapter.predict(
    "v4 hides rotary: it takes the time of attention without it, more by its bytes, within 10 % "
    "(the larger ratio).", hidden.max(skipna=False), least=0.90, most=1.10,
)  # fmt: skip
text = "Backward one consumer is enough: two are not more than 2 % faster."
two = {d: v4[d, label(2, n, 2)] / default[d] for d, n in (("forward", 4), ("backward", 2))}
chapter.predict(text, two["backward"], least=0.98)
chapter.glue(two_forward=two["forward"], two_backward=two["backward"])

# %% [markdown]
# The first fails badly, and the second says where to look. Two consumers take
# {glue:text}`two_forward:.2f` and {glue:text}`two_backward:.2f` times the time of the default,
# although the loads are in flight. We had counted shared memory, not instructions.
#
# ## Count what a warp issues
#
# Instructions of one warp for an item, one head of one block, backward, from the {term}`SASS`. v4a
# is the answer to this table:

# %%
v4_built, v4a_built = (
    block_studies.built(module, "backward", None, BF16)["backward_kernel"] for module in MORE
)
roles = {
    "v4, consumer": loops.of_an_item(v4_built),
    "v4a, consumer": loops.of_an_item(v4a_built),
    "v4a, rotary role": loops.of_an_item(v4a_built, matmuls=False),
}
roles = pd.DataFrame(roles).T.rename_axis("role")
whole = roles["for an item"] + roles["for a block"] / 3
chapter.table(roles.reset_index(), compiled="SASS for sm_90a, head_dim 128, sin and cos in bf16")

# %% tags=["remove-cell"]
machine = system.load(chapter.data_dir / "systems" / f"{chapter.record().system}.json")
clocks = default["backward"] * machine.max_sm_clock_mhz * machine.num_sms / (ROTARY.blocks * 3)
gone = whole["v4, consumer"] - whole["v4a, consumer"] - whole["v4a, rotary role"]
chapter.glue(
    clocks=clocks, each=clocks / whole["v4, consumer"], mhz=machine.max_sm_clock_mhz, gone=gone,
    needed=clocks * share["v4_rotary", "backward", label(1, 2, 2)] / 100,
)  # fmt: skip

# %% [markdown]
# Each of the four schedulers of an SM has one warp of the consumer, so a wait of this warp is a
# wait of its scheduler. v4 takes {glue:text}`clocks:,.0f` cycles for an item at the highest clock
# of {glue:text}`mhz:,.0f` MHz, {glue:text}`each:.1f` per instruction. Memory needs
# {glue:text}`needed:,.0f`. A second consumer is a second warp on each scheduler.
#
# ## v4a: a role that applies rotary
#
# Between producer and consumer v4a puts a third role. It applies rotary to q, k and v of a slot in
# place and hands the slot on, so that one item is rotated while another is multiplied:

# %% tags=["remove-input"]
chapter.code(v4a_turning_role.rotate_role, "                rotate_tile(tiles.q")

# %% [markdown]
# The price is one more array of barriers, `ready[stage]`. Each role reads sin and cos of a block
# once and keeps them in registers for all heads, in the layout that it needs. Nothing large is
# converted, so v4a uses the obvious form again. Of a backward item {glue:text}`gone:,.0f`
# instructions do not move to the new role; they are gone.
#
# The emulator shows the overlap, forward, with three slots and one of sin and cos:

# %%
six_blocks = block_studies.batch((6 * 64,), head_dim=128, rotary=torch.bfloat16, rotate_v=True)
lanes = {"math_forward": "math", "rotate_role": "rotary"}
v4_line, v4a_line = (
    block_studies.timeline(m, six_blocks, config=m.Config(num_stages=3, num_turns=1), lanes=lanes)
    for m in MORE
)
end, a_end = (max(event.end for event in line.events) for line in (v4_line, v4a_line))
print(f"v4 takes {end / a_end:.1f} times the modelled cycles of v4a")

# %% tags=["remove-input"]
# | name: fig-rot-turning
# | caption: >
# |   v4a forward, two blocks of two heads. The rotary role works on one slot while the consumer
# |   works on the one before. Modelled cycles.
# | alt: >
# |   Five lanes. The rotary role reads, computes and writes, slot after slot. math waits for it and
# |   has short pieces of work, with the MMAs, while rotary is already at the next slot.
chapter.figure(v4a_line, emulated="v4a_turning_role forward, modelled schedule")

# %% [markdown]
# ## Is it right?
#
# sin and cos from N(0, 1), so that transpose and inverse differ. v4 against fp64, v4a against v4:

# %%
ragged = block_studies.batch((0, 1, 63, 64, 65), rotary=torch.bfloat16, rotate_v=True)
print(block_studies.comparison(v4_rotary, ragged, schedule=0).to_string(index=False))
expected, _ = block_studies.emulated(v4_rotary, ragged)
found, _ = block_studies.emulated(v4a_turning_role, ragged, schedule=0)
print("v4a has the bits of v4:", all(map(torch.equal, found, expected)))

# %% [markdown]
# ## Does it reach what memory allows?
#
# Written before v4a was measured, in cycles at a clock below the highest: backward 7,000 to 7,800
# an item where memory needs 6,450, forward 3,900 to 4,200 where it needs 3,740. Two slots are the
# weak point backward: an item is loaded, rotated, multiplied and stored before its slot is free. As
# shares of what memory allows, the clock drops out:

# %% tags=["remove-input"]
of_v4a = share["v4a_turning_role"]
chapter.predict(
    "Backward, two slots: 6,450 / 7,800 to 6,450 / 7,000.",
    of_v4a["backward", label(1, 2, 2)], least=645 / 7.8, most=645 / 7, form=".1f", unit=" %",
)  # fmt: skip
chapter.predict(
    "Forward, three slots: 3,740 / 4,200 to 3,740 / 3,900.",
    of_v4a["forward", label(1, 3, 2)], least=374 / 4.2, most=374 / 3.9, form=".1f", unit=" %",
)  # fmt: skip
chapter.glue(
    third_v4a=100 * (1 - v4a["backward", label(1, 3, 1)] / v4a["backward", label(1, 2, 1)]),
    third_v4=100 * (v4["backward", label(1, 3, 1)] / v4["backward", label(1, 2, 1)] - 1),
    share_forward=of_v4a["forward", label(1, 3, 1)],
    share_backward=of_v4a["backward", label(1, 3, 1)],
)  # fmt: skip

# %% [markdown]
# Backward misses narrowly, and the weak point was it. A third slot saves v4a
# {glue:text}`third_v4a:.0f` %; in v4, which waits for its consumer, it costs
# {glue:text}`third_v4:.1f` %. With three slots and one of sin and cos, its default, v4a is at
# {glue:text}`share_forward:.0f` % of the copy forward and {glue:text}`share_backward:.0f` %
# backward, about where v3 is without rotary. Only 16-bit sin and cos leave room for that.
#
# ## The surprise: what a fusion is worth
#
# Fusing saves a pass over memory, whoever does it. Yet backward the fused v1 and v2 take
# {glue:text}`v1_lost:.2f` and {glue:text}`v2_lost:.2f` times the time of two kernels one after the
# other. Bytes a thread that the fused kernels {term}`spill`, backward:

# %%
RUNGS = {"v1": v1_one_tile, "v2": v2_slab, "v4": v4_rotary, "v4a": v4a_turning_role}
cases = {name: (module, "backward", None, BF16) for name, module in RUNGS.items()}
spills = block_studies.compiled(cases).set_index("case")["spilled (B)"]
print(spills.to_string())

# %% tags=["remove-cell"]
lost = us["backward"] / us["backward"]["rotary kernel, then attention"]
assert lost[["v1", "v2"]].min() > 1 > lost["v4"] > lost["v4a"] and spills["v4"] == 0, "the text"
eager = us["backward"]["eager_rotary"] / us["backward"]["v1"]
chapter.glue(v1_lost=lost["v1"], v2_lost=lost["v2"], eager=eager, won=1 / lost["v4a"])

# %% [markdown]
# A tile that is rotated in registers must be there in fp32 and then go to shared memory for the
# MMA, in another layout; v1 and v2 spill on the way. v4a is {glue:text}`won:.2f` times as fast as
# the two kernels, most of what the bytes allow. Nor are those a weak baseline: over PyTorch's
# operations even v1 is {glue:text}`eager:.1f` times as fast backward.
#
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
# The rotary kernel then moves 4 1/3 tensors. Forward 8 1/3 to 4 1/3, or 1.9 times; backward 11 1/3
# to 7 1/3, or 1.5 times.
# :::
#
# :::{exercise} Twice the digits
# :label: ex-rot-fp32
#
# sin and cos in fp32 take twice the room. Which of the measured variants of v4 no longer fit into
# 227 KiB? Count, then compile. *(paper, then code without a GPU)*
# :::
#
# :::{solution} ex-rot-fp32
# :class: dropdown
#
# A slot is 48 KiB forward and 64 KiB backward, dS 8 KiB for each consumer, a slot of sin and cos
# 32. Forward, two consumers with four slots need 256 KiB; backward, one with three slots needs 232.
# Two consumers with two slots of each kind, 208 KiB backward, still fit: P has the place of V.
# :::
#
# :::{exercise} Without the fence
# :label: ex-rot-fence
#
# Leave out the fence after rotary in a copy of the file. What does the emulator say, and would you
# ship it? *(code, ten minutes, no GPU)*
# :::
#
# :::{solution} ex-rot-fence
# :class: dropdown
#
# Nothing, and the bits are the same: in the emulator a write is visible to whoever comes after it.
# On a GPU threads write shared memory by one path and MMAs read it by another, and without the
# fence nothing promises that the MMA sees what was written. It may work for years. A tool that
# cannot see a mistake is no evidence against it; the documentation of the instruction is.
# :::
#
# ## Takeaways
#
# - A pass saved in memory reappears in shared memory, registers and instructions. A consumer has
#   one warp on each scheduler to issue them.
# - Convert what is small, and once: sin and cos of a block, not a gradient of each head.
# - A fused kernel can lose to two kernels. Between a fusion and a good one lies a factor as
#   large as that of fusing.
