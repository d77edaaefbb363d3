# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # Block v1: one tile
#
# The scores of a block fit on the chip. What of FlashAttention-2 can be left out, and what is each
# piece worth?
#
# :::{admonition} In this chapter (25 minutes)
# You will be able to take a general algorithm apart, price each piece by its bytes, and check the
# price by putting the piece back alone. Back to back at head_dim 128, block v1 is
# {glue:text}`gain_forward:.2f` times as fast as block v0 in the forward pass and
# {glue:text}`gain_backward:.2f` times in the backward pass.
# :::

# %% tags=["hide-input"]
from dataclasses import replace

import pandas as pd

from _lib import block_bytes, block_studies
from gdpa_kernels.block_attention.kernels import v1_one_tile
from gdpa_kernels.block_attention.kernels.v1_one_tile import default_config
from gdpa_kernels.block_attention.ladder import v0_flash
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts, results
from gdpa_lab.report.chapter import Chapter
from notebooks.block import _eliminations

WORK = {128: workload("block-fill70-2000"), 64: workload("block-fill70-2000-d64")}
WAYS = ("forward", "backward")

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("block/v1_one_tile", mode=mode, device=device, data_dir=data_dir)
V0, V1, STUDY = "v0_flash", "v1_one_tile", "eliminations"
us = chapter.rows("block/results", scope="sustained", workload=WORK[128].name, impl=[V0, V1])
us = us.set_index(["direction", "impl"])["time_us_p50"]
chapter.glue(**{f"gain_{way}": us[way, V0] / us[way, V1] for way in WAYS})

# %% tags=["remove-cell"]
SWITCHES = ("key_loop", "rescale", "accumulate", "lse", "delta", "two_passes")
NO_EFFECT = {"forward": ("delta", "two_passes"), "backward": ("rescale",)}
CASES = {way: [case for case in SWITCHES if case not in NO_EFFECT[way]] + ["all"] for way in WAYS}


def study(case: str) -> _eliminations.Config:
    """The study with one piece put back, none or all."""
    pieces = SWITCHES if case == "all" else [case] if case in SWITCHES else []
    return _eliminations.Config(**dict.fromkeys(pieces, True))


def kernels(case: str, way: str) -> list[tuple[str, str]]:
    """Names of the tensors that its kernels read and write."""
    on = study(case)
    if way == "forward":
        return [("q k v", "out" + " lse" * on.lse)]
    read = "q k v dO" + " lse" * on.lse + " D" * on.delta
    delta = [("dO out", "D")] if on.delta else []
    return delta + [
        (read, written) for written in (("dk dv", "dq") if on.two_passes else ("dq dk dv",))
    ]


@chapter.measure
def _(session):
    for dim, work in WORK.items():
        for way in WAYS:
            inputs = block_studies.blank(dim)
            constants, flash = default_config(way, inputs), v0_flash.default_config(way, inputs)
            listed = [(V1, "default", {"config": constants})]
            for inner, order in ((True, "inner"), (False, "outer")):
                for warps in (4, 8):
                    config = replace(constants, heads_inner=inner, num_warps=warps, registers=None)
                    listed.append((V1, f"heads {order}, {warps} warps", {"config": config}))
            for case in ("none", *CASES[way]):
                listed.append((STUDY, case, {"config": study(case)}))
            for stages, name in ((1, "one stage"), (2, "two stages")):
                listed.append((V0, name, {"config": replace(flash, num_stages=stages)}))
            session.measure(work, listed, direction=way)


# %% tags=["remove-cell"]
rows, limits = chapter.rows(variant=None), results.ceilings(chapter.record())
rows = rows.assign(head_dim=rows["workload"].map({work.name: dim for dim, work in WORK.items()}))
rows = rows.set_index(["direction", "head_dim", "impl", "variant"]).sort_index()
us, share = rows["time_us_p50"], rows["percent_of_roofline"]
bytes_of = {
    (way, case): block_bytes.floor_us(kernels(case, way), WORK[128], limits)
    for way in WAYS for case in ("none", *CASES[way])
}  # fmt: skip
put_back = pd.DataFrame({
    f"{way}: {case}": {
        **{f"head_dim {d}": us[way, d, STUDY, case] / us[way, d, STUDY, "none"] for d in WORK},
        "by bytes": bytes_of[way, case] / bytes_of[way, "none"],
    }
    for way in WAYS for case in CASES[way]
}).T  # fmt: skip
excess = put_back.drop(columns="by bytes").div(put_back["by bytes"], axis=0)
copy = {(way, dim): share[way, dim, V1, "default"] for way in WAYS for dim in WORK}
INNER, OUTER = "heads inner, 4 warps", "heads outer, 4 warps"
order = [us[way, dim, V1, INNER] / us[way, dim, V1, OUTER] for way in WAYS for dim in WORK]

# %% tags=["remove-input"]
# | name: fig-b-v1-ladder
# | caption: >
# |   **Block v1 on the ladder.** Time of the backward pass of each rung on block-fill70-2000, back
# |   to back; each tick leads to its chapter. Dashed: libraries.
# | alt: >
# |   An axis of milliseconds with a tick for each rung, that of v1 thick, and dashed lines for the
# |   libraries.
chapter.ladder("v1_one_tile", "block")

# %% tags=["remove-input"]
# | name: fig-bv1-put-back
# | caption: >
# |   **A second pass costs about its bytes, and the accumulation costs time without any.** Time
# |   with one piece put back over the time with none, in bursts. Triangles: what the bytes say
# |   (modelled for head_dim 128; within 1 % of that at 64).
# | alt: >
# |   Eleven rows, three marks each. Forward the bytes say 1 everywhere; key loop, accumulate and
# |   all lie to the right. Backward delta kernel, two passes and all lie to the right, near what
# |   the bytes say or beyond it.
chart = charts.dots(
    put_back,
    xlabel="time / time with none",
)
chapter.figure(chart, measured=chapter.rows(impl=STUDY, variant=None))

# %% [markdown]
# ## What stays, what changes
#
# | | {doc}`block v0 <v0_flash>` | block v1 |
# |:--|:--|:--|
# | work split | 64 rows of one head, keys or queries in a loop | one block of one head, whole |
# | tensors moved | 4 forward, 13 backward, and log-sum-exps | 4 and 7 |
# | order of programs | the blocks of a head follow each other | the heads of a block do |
#
# A program holds all scores of its block. So five things go {cite}`siso2026block`:
#
# 1. *The loop over keys* in the forward pass, and over queries in the backward pass.
# 2. *The rescaling*: a row's maximum is known before anything is summed.
# 3. *The log-sum-exp*: the backward pass has all scores of a row and recomputes P from them.
# 4. *The `delta` kernel*: the row sums of O ∘ dO equal those of P ∘ dP
#    ({doc}`../backward/by_hand`), and both are on chip, so the output is not needed.
# 5. *The accumulation* over tiles, for which the backward pass took two kernels: dQ is a sum over
#    keys, dK and dV are sums over queries. A program that holds the whole block has all the terms.
#
# What is left of the softmax in the forward and in the backward kernel ({doc}`block_attention`
# runs them in the emulator, against fp64):

# %% tags=["remove-input"]
chapter.code(v1_one_tile.forward_kernel, "p, total = softmax_parts")
chapter.code(v1_one_tile.backward_kernel, "p, total = softmax_parts", "if member == GROUP")
chapter.code(v1_one_tile.backward_kernel, "ds = (p * (dp", "store_gradient(")

# %% [markdown]
# ## A piece costs its bytes, or does it?
#
# In `notebooks/block/_eliminations.py` any one piece can be put back alone
# ({numref}`fig-bv1-put-back`).

# %% tags=["remove-cell"]
chapter.predict(
    "Block v1 moves the fewest bytes, so it runs at 90 % of a copy's rate or more (the smallest of "
    "four shares).", pd.Series(copy), least=90, form=".0f", unit=" %",
)  # fmt: skip
chapter.predict(
    "A piece costs its bytes and at most 5 % more (the largest time over what the bytes say).",
    excess.max().max(), most=1.05,
)  # fmt: skip
chapter.predict(
    "The order of the programs changes no byte, so it changes the time by less than 2 % (the "
    "smallest ratio, heads inner to heads outer).", min(order), least=0.98,
)  # fmt: skip
passes, grown = (put_back.loc[row] for row in ("backward: two_passes", "forward: accumulate"))
chapter.glue(
    cases=excess.size, priced=((excess - 1).abs() <= 0.05).sum().sum(),
    lse=100 * (put_back.loc["forward: lse", "head_dim 128"] - 1),
    passes=passes["head_dim 128"], passes_bytes=passes["by bytes"],
    accumulate=100 * (grown["head_dim 128"] - 1),
    **{f"{way}_{dim}": each for (way, dim), each in copy.items()},
)  # fmt: skip

# %% [markdown]
# In the forward pass block v1 *is* a copy, at {glue:text}`forward_128:.1f` % of a copy's rate at
# head_dim 128. In the backward pass it reaches {glue:text}`backward_128:.0f` % (in bursts).
#
# Of {glue:text}`cases:.0f` cases {glue:text}`priced:.0f` are within 5 % of their bytes. *Pieces
# with bytes* cost about that much: the second pass takes {glue:text}`passes:.2f` times the time at
# head_dim 128, where bytes say {glue:text}`passes_bytes:.2f`. The log-sum-exp, the best known of
# the five, costs {glue:text}`lse:.1f` % in the forward pass. But *pieces without bytes* are not
# free. The accumulation, which needs the loop, costs {glue:text}`accumulate:.0f` % in the forward
# pass at head_dim 128. The rescaling, pure arithmetic, does not show.
#
# ## Registers cost programs, and programs keep memory busy
#
# The pieces that move hardly any bytes, compiled for sm_90a and timed:

# %% tags=["remove-cell"]
SMALL = ["none", "rescale", "lse", "key_loop", "accumulate"]
cases = {case: (_eliminations, "forward", study(case)) for case in SMALL}
facts = block_studies.compiled(cases)[["case", "registers", "programs on an SM"]]
facts["time / none"] = (us["forward", 128, STUDY] / us["forward", 128, STUDY, "none"])[SMALL].array

# %% tags=["remove-input"]
chapter.table(
    facts.round(3),
    caption="**Fewer programs on an SM, more time.** Forward kernel at head_dim 128 with one piece "
    "put back; time over that with none, in bursts.",
    name="tab-bv1-registers", measured=chapter.rows(impl=STUDY, variant=SMALL),
)  # fmt: skip
fits = facts.set_index("case")["programs on an SM"]
assert fits["none"] > fits["key_loop"] > fits["accumulate"], "the text says so"
slower = facts.set_index("case")["time / none"]
same = [case for case in SMALL if fits[case] == fits["none"]]
assert slower[same].max() < 1.05 < slower["key_loop"] < slower["accumulate"], "the caption"
chapter.glue(fits=fits["none"], fits_accumulate=fits["accumulate"])

# %% [markdown]
# The tiles of Q, K and V pass through registers on their way to {term}`shared memory`, 96 registers
# per thread. An accumulator of a loop, 64 per thread, must exist before the loop begins, while
# those tiles are being loaded. The output of a single tile exists only after the scores, when the
# tiles are gone. So {glue:text}`fits_accumulate:.0f` programs share an SM with the accumulation and
# {glue:text}`fits:.0f` without it.
#
# ## Surprise: the order of the programs changes the time
#
# The hardware starts the programs of a grid in order. With $n$ blocks and 4 heads there are two
# natural orders. Block v0 walks through the blocks of a head: program $n \cdot \mathrm{head} +
# \mathrm{block}$. Block v1 walks
# through the heads of a block: $4 \cdot \mathrm{block} + \mathrm{head}$.

# %% tags=["remove-cell"]
count = {
    "heads outer": pd.DataFrame([[8 * head + block for head in range(4)] for block in range(8)]),
    "heads inner": pd.DataFrame([[4 * block + head for head in range(4)] for block in range(8)]),
}
running = {name: (each < 8).astype(float) for name, each in count.items()}

# %% tags=["remove-input"]
# | name: fig-bv1-order
# | caption: >
# |   **With heads inner, programs that run together own whole blocks.** A row for a block of 64
# |   tokens, a column for a head, with the number of the program that owns the tile. Coloured: the
# |   first eight, which run at the same time.
# | alt: >
# |   Two grids of eight rows and four columns. On the left the numbers run down the columns, and
# |   the first eight are one column. On the right they run along the rows: two whole rows.
chapter.figure(block_bytes.cells(running, numbers=count, xlabel="head", ylabel="block"),
               modelled="drawn from place() of v1_one_tile.py")  # fmt: skip
chapter.glue(inner=share["forward", 128, V1, INNER], outer=share["forward", 128, V1, OUTER])
assert max(order) < 1, "the text says: in all four cases"

# %% [markdown]
# Heads inner is faster in both passes and at both head_dims. In the forward pass at head_dim 128
# the order alone takes the kernel from {glue:text}`outer:.0f` to {glue:text}`inner:.0f` % of the
# copy. Our guess at the cause: DRAM is organised in pages, and with heads outer each page is opened
# four times, for a quarter of its rows' bytes.
#
# In the backward pass registers leave no room for more programs, so loads must overlap with
# computation inside one: {doc}`v3_warp_specialized`.

# %% tags=["remove-input"]
chapter.predictions()

# %% tags=["remove-input"]
chapter.profile("v0_flash", "v1_one_tile", workload="block-fill70-4000")
chapter.profile("v1_one_tile", workload="block-fill70-4000", direction="backward")

# %% [markdown]
# ## Exercises
#
# {doc}`Write it </exercises>`: `make exercise NAME=block`.
#
# :::{exercise} Other layouts
# :label: ex-bv1-layouts
#
# Which order would you choose if q, k and v were stored as `[num_heads, total_tokens, head_dim]`?
# And if they were slices of a packed `[total_tokens, 3 * num_heads, head_dim]`? *(paper)*
# :::
#
# :::{solution} ex-bv1-layouts
# :class: dropdown
#
# Heads first: the blocks of a head are neighbours in memory, so blocks should be inner. Packed:
# heads inner; the heads of q of a token are still neighbours, and between them and the next token
# lie its k and v, which the same programs read.
# :::
#
# :::{exercise} The price list
# :label: ex-bv1-prices
#
# Price the `delta` kernel, the two passes and both together in tensors of q's size, as multiples of
# the seven of block v1. Why do the triangles of {numref}`fig-bv1-put-back` lie a little lower?
# *(paper)*
# :::
#
# :::{solution} ex-bv1-prices
# :class: dropdown
#
# `delta` reads dO and out: $9 / 7 = 1.29$. Two passes read q, k, v and dO twice: $11 / 7 = 1.57$.
# Both: $13 / 7 = 1.86$, and the fp32 rows add little. The triangles are ratios of times, and
# kernels that mostly read have a faster copy to be measured against.
# :::
#
# :::{exercise} Causal blocks
# :label: ex-bv1-causal
#
# Let a token see only itself and earlier tokens of its block. How many pairs of a full block are
# left, what happens to the bytes, and which of the five pieces come back? *(paper, five minutes)*
# :::
#
# :::{solution} ex-bv1-causal
# :class: dropdown
#
# $64 \cdot 65 / 2 = 2080$ of 4096 pairs are left. Every tile is still read and written whole, so
# the bytes and the floor are the same, and skipping half of the FLOPs gains little where FLOPs
# hardly count. No piece comes back: a row of scores is still complete in one tile.
# :::
#
# ## Takeaways
#
# - Remove the pieces that a small case does not need, and measure each by putting it back.
# - Bytes price a pass over the data; registers price what must stay alive while data arrive.
# - Programs that run together should own what lies together in memory.
