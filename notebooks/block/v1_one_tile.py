# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # v1: a block is one tile
#
# The machinery of FlashAttention-2 exists because the scores of a sequence do not fit on the chip.
# Those of a block do. What can be left out, and what is each piece worth?
#
# :::{admonition} In this chapter (20 minutes)
# You will take a general algorithm apart, price each piece by its bytes, and put it back alone to
# see whether the price is right. At head_dim 128 v0 takes {glue:text}`gain_forward:.2f` times as
# long as v1 forward and {glue:text}`gain_backward:.2f` times as long backward. Two things that move
# no byte cost time as well: an accumulator that exists too early, and the order of the programs.
# :::

# %%
from dataclasses import replace

import pandas as pd
import torch

from gdpa_kernels.block_attention import eliminations, v0_flash, v1_one_tile
from gdpa_kernels.block_attention.v1_one_tile import Config, default_config
from gdpa_kernels.measuring import compile_check
from gdpa_kernels.measuring import system as systems
from gdpa_kernels.measuring.workload import workload
from gdpa_kernels.report import block_bytes, block_studies, charts, results
from gdpa_kernels.report.chapter import Chapter

WORK = {128: workload("block-fill70-2000"), 64: workload("block-fill70-2000-d64")}
WAYS = ("forward", "backward")

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("block/v1_one_tile", mode=mode, device=device, data_dir=data_dir)
V0, V1, STUDY = "v0_flash", "v1_one_tile", "eliminations"
PEERS = {V0: "v0", V1: "v1", "fa2_varlen": "FlashAttention-2"}
listed = chapter.rows("block/results", workload=WORK[128].name, impl=list(PEERS))
found = listed.set_index(["direction", "impl"])
time, rate = found["time_us_p50"], found["percent_of_roofline"]
ladder = {f"{name}, {way}": rate[way, impl] for way in WAYS for impl, name in PEERS.items()}
chapter.glue(**{f"gain_{way}": time[way, V0] / time[way, V1] for way in WAYS})

# %% tags=["remove-input"]
# | name: fig-bv1-ladder
# | caption: >
# |   The ladder so far at head_dim 128: the rate of the least bytes, in percent of the best copy
# |   with the same mix of reads and writes.
# | alt: >
# |   Six bars. Forward: v0 near 78, v1 at 100, FlashAttention-2 near 59. Backward: v0 near 43, v1
# |   near 76, FlashAttention-2 near 26.
drawn = charts.bars(pd.Series(ladder), xlabel="% of the copy", ceiling=100,
                    highlight=[name for name in ladder if name.startswith("v1")])  # fmt: skip
chapter.figure(drawn, measured=listed)

# %% [markdown]
# ## What stays, what changes
#
# | | {doc}`v0 <v0_flash>` | v1 |
# |:--|:--|:--|
# | work split | 64 rows of one head, keys or queries in a loop | one block of one head, whole |
# | data path | 4 tensors forward, 13 backward, and log-sum-exps | 4 and 7 |
# | order of programs | the blocks of a head follow each other | the heads of a block do |
#
# A program holds all scores of its block, so nothing is carried from step to step. Five things go,
# the five that the publication names {cite}`siso2026block`; it gives one speed-up for all of them.
#
# 1. *The loop over keys*, forward, and over queries, backward.
# 2. *The rescaling*: the maximum of a row is known before anything is added up.
# 3. *The log-sum-exp*: backward has all scores of a row and computes P anew from them.
# 4. *The `delta` kernel*. dS needs $\delta_i = \sum_d \mathrm{dO}_{id} O_{id}$. With $O = P V$ and
#    $\mathrm{dP} = \mathrm{dO}\, V^T$ this is $\sum_j P_{ij}\, \mathrm{dP}_{ij}$, and P and dP are
#    both at hand. So backward does not need the output.
# 5. *The accumulation* over tiles, which made two kernels of one: dQ is a sum over keys, dK and dV
#    are sums over queries. A program that has all of both needs neither.
#
# The end of the forward kernel, and the middle of the backward kernel:

# %% tags=["remove-input"]
chapter.code(v1_one_tile.forward_kernel, "p, total = softmax_parts")
chapter.code(
    v1_one_tile.backward_kernel, "p, total = softmax_parts", "        store_gradient(\n"[:-1]
)
chapter.code(v1_one_tile.backward_kernel, "ds = (p * (dp", "store_gradient(")

# %% [markdown]
# ## Prediction
#
# The study in `eliminations.py` has a switch for each piece. By the names of {doc}`counting_bytes`:

# %%
SWITCHES = {
    "key_loop": "key loop", "rescale": "rescale", "accumulate": "accumulate",
    "lse": "log-sum-exp", "delta": "delta kernel", "two_passes": "two passes",
}  # fmt: skip
NO_EFFECT = {"forward": ("delta", "two_passes"), "backward": ("rescale",)}
CASES = {way: [case for case in SWITCHES if case not in NO_EFFECT[way]] + ["all"] for way in WAYS}


def study(case: str) -> eliminations.Config:
    """The study with one piece put back, none or all."""
    pieces = SWITCHES if case == "all" else [case] if case in SWITCHES else []
    return eliminations.Config(**dict.fromkeys(pieces, True))


def kernels(case: str, way: str) -> list[tuple[str, str]]:
    """What its kernels read and write."""
    on = study(case)
    if way == "forward":
        return [("q k v", "out" + " lse" * on.lse)]
    read = "q k v dO" + " lse" * on.lse + " D" * on.delta
    delta = [("dO out", "D")] if on.delta else []
    return delta + [(read, made) for made in (("dk dv", "dq") if on.two_passes else ("dq dk dv",))]


# %% [markdown]
# One run measures them, v1 in both orders of its programs with 4 and 8 warps, and v0:


# %%
@chapter.measure
def _(session):
    for dim, work in WORK.items():
        for way in WAYS:
            given = block_studies.blank(dim)
            own, flash = default_config(way, given), v0_flash.default_config(way, given)
            listed = [(V1, "default", {"config": own})]
            for inner, order in ((True, "inner"), (False, "outer")):
                for warps in (4, 8):
                    config = replace(own, heads_inner=inner, num_warps=warps, registers=None)
                    listed.append((V1, f"heads {order}, {warps} warps", {"config": config}))
            for case in ("none", *CASES[way]):
                listed.append((STUDY, case, {"config": study(case)}))
            for stages, name in ((1, "one stage"), (2, "two stages")):
                listed.append((V0, name, {"config": replace(flash, num_stages=stages)}))
            session.measure(work, listed, direction=way)


# %%
own, limits = chapter.rows(variant=None), results.ceilings(chapter.record())
own = own.assign(head_dim=own["workload"].map({work.name: dim for dim, work in WORK.items()}))
own = own.set_index(["direction", "head_dim", "impl", "variant"])
us, share = own["time_us_p50"], own["percent_of_roofline"]
floor = {
    (way, case, dim): block_bytes.floor_us(kernels(case, way), work, limits)
    for way in WAYS for case in ("none", *CASES[way]) for dim, work in WORK.items()
}  # fmt: skip
put_back = pd.DataFrame({
    f"{way}: {SWITCHES.get(case, case)}": {
        **{f"head_dim {dim}": us[way, dim, STUDY, case] / us[way, dim, STUDY, "none"]
           for dim in WORK},
        "by bytes, 128": floor[way, case, 128] / floor[way, "none", 128],
        "by bytes, 64": floor[way, case, 64] / floor[way, "none", 64],
    }
    for way in WAYS for case in CASES[way]
}).T  # fmt: skip
copy = {(way, dim): share[way, dim, V1, "default"] for way in WAYS for dim in WORK}
excess = put_back.iloc[:, :2] / put_back.iloc[:, 2:].to_numpy()
INNER, OUTER = "heads inner, 4 warps", "heads outer, 4 warps"
order = [us[way, dim, V1, INNER] / us[way, dim, V1, OUTER] for way in WAYS for dim in WORK]

# %% tags=["remove-input"]
# | name: fig-bv1-put-back
# | caption: >
# |   Time with one piece put back, divided by the time of the study with none; less is better.
# |   Triangles: what the bytes say (modelled; the same at head_dim 64 within 1 %).
# | alt: >
# |   Eleven rows, three marks each. Forward the bytes say 1 everywhere; key loop, accumulate and
# |   all lie to the right. Backward delta kernel, two passes and all lie to the right, near what
# |   the bytes say or beyond it.
shown = put_back[["head_dim 128", "head_dim 64", "by bytes, 128"]]
chart = charts.dots(shown, xlabel="time / time with none", colours=["#1f83c4"] * 2 + ["#d55e00"])
chapter.figure(chart, measured=chapter.rows(impl=STUDY, variant=None))
chapter.predict("v1 moves the least, so it is a copy: the smallest share of the copy's rate, of "
                "four.", min(copy.values()), least=90, form=".0f", unit=" %")  # fmt: skip
chapter.predict("A piece costs its bytes: the largest time over what the bytes say.",
                excess.max().max(), most=1.05)  # fmt: skip
chapter.predict("The order of the programs changes no byte, so it changes no time: the smallest "
                "ratio, heads inner to heads outer.", min(order), least=0.98)  # fmt: skip
passes, grown = (put_back.loc[row] for row in ("backward: two passes", "forward: accumulate"))
chapter.glue(
    cases=excess.size, priced=((excess - 1).abs() <= 0.05).sum().sum(),
    lse=100 * (put_back.loc["forward: log-sum-exp", "head_dim 128"] - 1),
    passes=passes["head_dim 128"], passes_bytes=passes["by bytes, 128"],
    accumulate=100 * (grown["head_dim 128"] - 1), accumulate_64=100 * (grown["head_dim 64"] - 1),
    **{f"{way}_{dim}": each for (way, dim), each in copy.items()},
)  # fmt: skip

# %% [markdown]
# Forward v1 *is* a copy: {glue:text}`forward_128:.1f` % at head_dim 128 and
# {glue:text}`forward_64:.1f` % at 64. Backward it reaches {glue:text}`backward_128:.0f` and
# {glue:text}`backward_64:.0f` %.
#
# {glue:text}`priced:.0f` of {glue:text}`cases:.0f` cases are within 5 % of their bytes. *What has
# bytes* pays for them: the second pass takes {glue:text}`passes:.2f` times the time at head_dim 128
# ({glue:text}`passes_bytes:.2f` by bytes). The log-sum-exp, the best known of the five, costs
# {glue:text}`lse:.1f` % forward. *What has none* does not come free: the accumulation, which needs
# the loop, costs {glue:text}`accumulate:.0f` % forward at head_dim 128 and
# {glue:text}`accumulate_64:.0f` % at 64. The rescaling, nothing but arithmetic, does not show.
#
# ## What the bytes leave open
#
# The forward kernel with pieces that move no bytes, or hardly any: compiled for sm_90a, timed:

# %%
SMALL = ("none", "rescale", "lse", "key_loop", "accumulate")
built = {case: block_studies.built(eliminations, "forward", study(case)) for case in SMALL}
made = {case: compile_check.read(each["forward_kernel"]) for case, each in built.items()}
facts = pd.DataFrame({
    "put back": [SWITCHES.get(case, case) for case in SMALL],
    "registers": [made[case].registers for case in SMALL],
    "programs on an SM": [block_studies.programs_on_an_sm(made[case], 4) for case in SMALL],
    "time / none": [us["forward", 128, STUDY, case] for case in SMALL],
})  # fmt: skip
facts["time / none"] /= us["forward", 128, STUDY, "none"]
machine = systems.load(chapter.data_dir / "systems" / f"{chapter.record().system}.json")
per_sm = limits.gbytes_per_s(3, 1) / machine.num_sms  # bytes per ns
period = 4 * 64 * 128 * 2 / per_sm / 1e3  # µs for the four tiles of a program

# %% tags=["remove-input"]
chapter.table(facts.round(3), measured=chapter.rows(impl=STUDY, variant=list(SMALL)))
fits = facts.set_index("put back")["programs on an SM"]
assert fits["none"] > fits["key loop"] > fits["accumulate"], "the text says so"
held = fits["none"] * machine.num_sms
chapter.glue(
    fits=fits["none"], fits_accumulate=fits["accumulate"], period=period, held=held,
    life=period * fits["none"], life_accumulate=period * fits["accumulate"],
    span=held / 4 * 64 * 1024 / 1e6,
)  # fmt: skip

# %% [markdown]
# Registers are the second currency. The tiles of Q, K and V pass through registers on their way to
# shared memory, 96 a thread. An accumulator of a loop, 64 a thread, has to exist from before the
# loop, while the tiles are loaded. The output of one tile exists only after the scores, when the
# tiles are gone. So with the accumulation {glue:text}`fits_accumulate:.0f` programs share an SM,
# and without it {glue:text}`fits:.0f`.
#
# Why do programs count? At the rate of a copy an SM moves the 64 KiB of a program's four tiles in
# {glue:text}`period:.1f` µs. With {glue:text}`fits:.0f` programs each may live for
# {glue:text}`life:.1f` µs without anybody noticing: ask, wait, compute, store. With
# {glue:text}`fits_accumulate:.0f` it has {glue:text}`life_accumulate:.1f` µs. Nothing in a program
# overlaps with itself, so what overlaps are programs.
#
# ## Is it right?
#
# A ragged batch in the emulator, v1 in both orders:

# %%
ragged = block_studies.batch((0, 1, 63, 64, 65, 0, 130), head_dim=32)
inner, outer = Config(WIDTH=32), Config(WIDTH=32, heads_inner=False)
checked = block_studies.comparison(v1_one_tile, ragged, inner)
both = [block_studies.emulated(v1_one_tile, ragged, config=config)[0] for config in (inner, outer)]
assert all(map(torch.equal, *both)), "the order of the programs changes no bit"

# %% tags=["remove-input"]
chapter.table(
    checked, emulated="v1, two heads, bf16; allowed: twice PyTorch's error and a rounding"
)

# %% [markdown]
# ## The surprise: the order of the programs
#
# A grid of programs is a list, and the hardware starts them in its order. With $n$ blocks and 4
# heads there are two natural ones. In v0 the blocks of a head follow each other: program
# $n \cdot \mathrm{head} + \mathrm{block}$. In v1 the heads of a block do:
# $4 \cdot \mathrm{block} + \mathrm{head}$. The kernel is the same, and so are its bytes.

# %%
count = {
    "heads outer": pd.DataFrame([[8 * head + block for head in range(4)] for block in range(8)]),
    "heads inner": pd.DataFrame([[4 * block + head for head in range(4)] for block in range(8)]),
}
running = {name: (each < 8).astype(float) for name, each in count.items()}

# %% tags=["remove-input"]
# | name: fig-bv1-order
# | caption: >
# |   A tensor as it lies in memory, a row for a block of 64 tokens, a column for a head: the number
# |   of the program that owns each tile. Coloured: the first eight, which run at the same time.
# | alt: >
# |   Two grids of eight rows and four columns. On the left the numbers run down the columns, and
# |   the first eight programs are a column, one tile in four. On the right they run along the rows,
# |   and the first eight programs are two whole rows.
chapter.figure(block_bytes.cells(running, numbers=count, xlabel="head", ylabel="block"),
               modelled="drawn from place() of v1_one_tile.py")  # fmt: skip

# %%
ORDERS = [INNER, OUTER, "heads inner, 8 warps", "heads outer, 8 warps"]
by_order = share[:, :, V1].unstack("variant")[ORDERS].sort_index(ascending=False)

# %% tags=["remove-input"]
chapter.table(by_order.reset_index().round(1), measured=chapter.rows(impl=V1, variant=ORDERS))
assert max(order) < 1 and (by_order[INNER] > by_order[ORDERS[2]]).all(), "the text says so"
chapter.glue(inner=by_order[INNER]["forward", 128], outer=by_order[OUTER]["forward", 128])

# %% [markdown]
# In percent of the copy. The heads of a block side by side are faster in every case, and 4 warps
# are better than 8. Forward at head_dim 128 the order alone takes the kernel from
# {glue:text}`outer:.0f` to {glue:text}`inner:.0f` %.
#
# A token has 1,024 bytes in q, and a head 256 of them. A tile of one head is 64 pieces with gaps
# three times as long between them. The {glue:text}`held:.0f` programs that the GPU holds at a time
# cover {glue:text}`span:.1f` MB of q without a gap if the heads are inner. If they are outer, they
# take a quarter of each row of four times as much memory, and come back for the second quarter when
# all sequences are done with the first. All bytes arrive in whole sectors either way. But memory is
# organised in larger units, and opening one of them four times, for a quarter each, is dearer than
# opening it once. That is our explanation; no counter of memory pages stands in the record.
# {doc}`v2_slab` takes the hint and makes all heads of a block the work of one program.
#
# Forward there is little left to win. Backward a program moves seven tiles and computes five
# matmuls, one after another, and registers forbid more programs. So a program has to overlap with
# itself: {doc}`v3_warp_specialized` gives the copies to a producer.
#
# ## Exercises
#
# :::{exercise} Other layouts
# :label: ex-bv1-layouts
#
# Which order would you choose if q, k and v were stored as `[num_heads, total_tokens, head_dim]`?
# And for a packed tensor `[total_tokens, 3 * num_heads, head_dim]` of which q, k and v are slices?
# What if there is one head? *(paper, five minutes)*
# :::
#
# :::{solution} ex-bv1-layouts
# :class: dropdown
#
# Heads first: the blocks of a head lie side by side, and the blocks should be inner. Packed: heads
# inner; the heads of q of a token are still neighbours, and what lies between them and the next
# token's is its k and v, which the same programs read. One head: both orders are the same list.
# :::
#
# :::{exercise} Fewer registers by decree
# :label: ex-bv1-registers
#
# `Config.registers` caps what a thread may use. Compile v1's backward kernel at head_dim 128 with
# caps of 168 and of 128 registers. How many programs share an SM, what is spilled, and which would
# you measure first? *(`block_studies.compiled`, ten minutes)*
# :::

# %% tags=["remove-cell"]
caps = {str(cap): (v1_one_tile, "backward", Config(registers=cap)) for cap in (None, 168, 128)}
caps = block_studies.compiled(caps)
spilled = caps["spilled (B)"]
assert caps["programs on an SM"].tolist() == [2, 3, 3] and spilled[0] == 0 < spilled[1]
chapter.glue(spilled_168=spilled[1], spilled_128=spilled[2], free=caps["registers"][0])
chapter.glue(capped=us["backward", 128, V1, "default"] / us["backward", 128, V1, INNER])

# %% [markdown]
# :::{solution} ex-bv1-registers
# :class: dropdown
#
# Without a cap the compiler takes {glue:text}`free:.0f` registers, for 2 programs, and spills
# nothing. 168 make room for 3 and spill {glue:text}`spilled_168:.0f` bytes of a thread. With 128
# there are 3 as well, because now shared memory is full, and {glue:text}`spilled_128:.0f` bytes are
# spilled for nothing. So 168 is worth a measurement: v1's default has that cap, and takes
# {glue:text}`capped:.3f` times the time of the kernel without one.
# :::
#
# :::{exercise} Asked for twice
# :label: ex-bv1-twice
#
# The source of v1's backward kernel loads q, k and dO twice. Why, and who pays for it? Look at
# head_dim 128 and at 256. *(the source, `block_studies.traffic`; fifteen minutes)*
# :::

# %% tags=["remove-cell"]
for dim in (128, 256):
    given = block_studies.batch((64,), heads=1, head_dim=dim)
    asked = block_studies.traffic(v1_one_tile, given).set_index("kernel").sum(axis=1)
    chapter.glue(**{f"asked_{dim}": asked["backward_kernel"]})

# %% [markdown]
# :::{solution} ex-bv1-twice
# :class: dropdown
#
# A head wider than `WIDTH` is cut into pieces: scores are sums over all pieces, and the results of
# a program belong to one of them, whose columns it loads again. The emulator executes the source
# and counts {glue:text}`asked_128:.0f` tensors at head_dim 128, but nobody pays: the compiler sees
# equal loads with no store between them and keeps the first. At head_dim 256 there are two programs
# for each block and head. Each needs all of q, k, v and dO for the scores and half of three of them
# again: {glue:text}`asked_256:.0f` tensors where 7 are the least. L2 may catch what neighbours read
# together.
# :::
#
# ## Takeaways
#
# - A general algorithm carries its generality at run time. Remove pieces where the case is small
#   enough, and measure each by putting it back.
# - Bytes price a pass over the data; registers price what has to stay alive while data arrive. A
#   kernel can pay in either.
# - Programs that run together should own what lies together in memory.
