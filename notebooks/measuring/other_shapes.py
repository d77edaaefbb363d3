# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # Other shapes
#
# Your batch is in none of the published figures. Does what they show hold for it?
#
# :::{admonition} In this chapter (15 minutes)
# You will see our best kernel against the best baseline on head counts, head dimensions, lengths
# and masks that no figure has, count what part of a tile is useful, and measure a shape of your
# own. Back to back on the H200 our best kernel is {glue:text}`forward_over` times as fast as the
# best baseline in the forward pass, and {glue:text}`backward_over` times in the backward pass,
# where it is behind on {glue:text}`behind`.
# :::

# %% tags=["hide-input"]
import pandas as pd

from _lib import ratios, studies
from gdpa_kernels.gdpa.kernels import v8_own_waits as v8
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("measuring/other_shapes", mode=mode, device=device, data_dir=data_dir)
FULL = "gdpa-self-full-1024"
SHAPES = {
    "forward": [
        "gdpa-self-ml1m-1024", f"{FULL}-h3", "gdpa-cross-full-1024-kv192-h6", f"{FULL}-gqa",
        f"{FULL}-causal", f"{FULL}-window128", "gdpa-self-full-512-b256-d256",
    ],
    "backward": [
        "gdpa-cross-full-2048-kv320", "gdpa-self-full-384", "gdpa-self-full-640",
        "gdpa-self-full-4096-b64", "gdpa-self-full-8192-b8", "gdpa-self-half-jagged-800-d64",
        "gdpa-cross-full-1024-kv128-d64", f"{FULL}-gelu", "gdpa-self-full-512-b256-d256",
        "gdpa-self-ml1m-1024", f"{FULL}-gqa", f"{FULL}-causal",
    ],
}  # fmt: skip
V8, V4, V6 = "v8_own_waits", "v4_warp_specialized_backward", "v6_one_tile_backward"


def rungs_on(of, way):
    if way == "forward":
        return [V8, *(MASKED if of.masked else [])]
    if of.head_dim > 128:
        return ["v7_wide_backward"]
    return [V4, V6] if of.max_seqlen_k <= 128 else [V4]


GUARD = studies.piece(v8, "    elif not all_visible(", "        x = mask_prob")
EVERY = studies.changed(v8, (GUARD, "    else:\n"))
MASKED = [
    (V8, "masks every block", {"module": EVERY}),
    (V8, "blocks of 128", {"config": v8.Config()}),
]


@chapter.measure
def _(session):
    for way, names in SHAPES.items():
        for of in map(workload, names):
            peers = ["fa2_varlen", "fa3", "fa4", "cudnn" if of.fill == 1 else "cudnn_varlen"]
            session.measure(of, [*rungs_on(of, way), *peers], direction=way,
                            scopes=("sustained",), seconds=0.7)  # fmt: skip


# %% tags=["remove-cell"]
rows = {way: chapter.rows(direction=way, scope="sustained") for way in SHAPES}
best = {way: ratios.best(table) for way, table in rows.items()}
ahead = {way: table["peer / rung (time)"] for way, table in best.items()}
lost = [ratios.row(n) for n in ahead["backward"].index[ahead["backward"] < 1]]
drawn = pd.concat([x.rename(index=lambda n, of=way: f"{ratios.row(n)}, {of}")
                   for way, x in ahead.items()])  # fmt: skip
variants = chapter.rows(impl=V8, scope="sustained", variant=None)
masks = variants.replace({"variant": {"": "v8"}}).pivot_table(
    index="workload", columns="variant", values="time_us_p50", sort=False
).dropna().rename(index=ratios.row)  # fmt: skip
gain = masks["masks every block"] / masks["v8"]
assert ahead["forward"].min() > 1, "the caption: ahead in the forward pass"
farthest = [x.idxmax() for x in ahead.values()]
assert farthest == ["gdpa-self-ml1m-1024", "gdpa-cross-full-1024-kv128-d64"], "the alt text"
least = best["forward"]["share (%)"].nsmallest(3).index
assert least.str.contains("causal|window|kv192").all(), "the caption: masks and short keys"
chapter.glue(
    **{f"{way}_over": ratios.spread(x) for way, x in ahead.items()},
    behind=ratios.listed(lost), gain_causal=gain["full-1024-causal"],
)  # fmt: skip

# %% tags=["remove-input"]
# | name: fig-shapes-quotients
# | caption: >
# |   **The best kernel is ahead on every shape in the forward pass, and behind on two in the
# |   backward pass.** Times as fast as the best baseline, back to back on the H200.
# | alt: >
# |   A dot for each shape. In the forward pass all dots lie right of the dashed line, that of
# |   MovieLens lengths farthest. In the backward pass the shape with few keys and narrow heads is
# |   farthest right; two of long sequences lie a little left.
assert (ahead["backward"] < 1).sum() == 2, "the caption: two"
chart = charts.dots(drawn.to_frame("best baseline / best kernel"), xlabel="times as fast")
chapter.figure(chart, measured=pd.concat(rows.values()))

# %% [markdown]
# ## The shapes
#
# A name says how a shape differs from the published ones, which have 1,152 sequences, 4 heads and
# head_dim 128: `b64` sequences, `h3` heads, `kv320` keys, `d64` columns. `gqa` is eight query heads
# on two key heads, `ml1m` has the lengths of MovieLens 1M, and `gelu` is GELU by erf. Baselines run
# what they take: dense cuDNN takes one length, FlashAttention-2, FlashAttention-4 and ragged cuDNN
# all lengths, each with a softmax. Rates in TFLOP/s count visible pairs only.
#
# ## The forward pass

# %% tags=["remove-input"]
chapter.table(
    ratios.shown(best["forward"], "forward"), measured=rows["forward"], name="tab-shapes-forward",
    caption="**Masks and short keys cost the most.** Forward pass back to back on the H200; the "
    "last column is the baseline's time over the kernel's.",
)  # fmt: skip

# %% [markdown]
# Forward v8 makes tiles of 128 rows and blocks of 64 or 128 keys. A shape that they do not divide,
# or that a mask cuts, pays for what it computes and drops:
#
# - **causal**: of 1,024 keys a tile of 128 rows computes the blocks of 64 up to its last row. Over
#   eight tiles that is 72 blocks, 64 of them visible: at most 89 %.
# - **window128**: a row sees 257 keys. Its tile reads 6 blocks: at most 67 %.
# - **kv192**: three blocks of 64, so nothing is dropped, but Q and the output are most of what
#   moves.
# - **d256**: one slot of Q beside two blocks of 64 keys ({doc}`../backward/v5_short_kv_backward`).
#
# ## A mask costs most where it hides nothing
#
# A block of keys that all rows of a tile see needs no mask. A mask is a comparison and a selection
# for each score, so forward v8 asks first:

# %% tags=["remove-input"]
chapter.code(v8.activation_prologue, "    x = s if", "    t = 0")

# %% [markdown]
# The condition is the same for all threads, so it is one branch. *Masks every block* is forward v8
# without the question. Counted before the run: with a causal mask 3 of 18 blocks of a mean tile
# need it, so v8 issues 0.6 times the instructions, and the tensor cores become the limit.

# %% tags=["remove-input"]
chapter.table(
    masks.round(0).reset_index(), name="tab-shapes-masks",
    measured=variants[variants["workload"].str.contains("causal|window")],
    caption="**Asking first pays under both masks.** Microseconds of forward v8 and two variants.",
)  # fmt: skip

# %% tags=["remove-cell"]
assert (gain > 1).all(), "the caption: asking first pays"
chapter.predict(
    "With a causal mask asking first makes forward v8 1.15 to 1.45 times as fast.",
    gain["full-1024-causal"], least=1.15, most=1.45,
)  # fmt: skip
chapter.predict(
    "With a window half of the blocks need no mask, so the gain is smaller than with a causal "
    "mask.",
    gain["full-1024-window128"], least=1.05, most=gain["full-1024-causal"],
)  # fmt: skip

# %% tags=["remove-input"]
chapter.predictions()

# %% [markdown]
# Fewer instructions bring less than their count ({glue:text}`gain_causal:.2f` times under the
# causal mask), so something else limits a block. Blocks of 128 keys have half as many waits, yet by
# default v8 uses blocks of 64 under a mask. With 128, only packed GELU and SiLU
# fit into the registers; every other activation {term}`spills <spill>`.
#
# ## The backward pass

# %% tags=["remove-input"]
chapter.table(
    ratios.shown(best["backward"], "backward"), measured=rows["backward"],
    name="tab-shapes-backward",
    caption="**FlashAttention-4 is ahead on long sequences alone.** Backward pass "
    "back to back on the H200; the last column is the baseline's time over the kernel's.",
)  # fmt: skip
behind = best["backward"]["best peer"][ahead["backward"] < 1]
assert (behind == "fa4").all() and behind.index.str.contains("4096|8192").all()

# %% [markdown]
# - **kv320** is two and a half tiles of 128 keys: backward v4 computes three, and 83 % count.
# - **384 and 640** are whole tiles, but backward v5 ends at 256 keys. Backward v4 adds every dQ to
#   fp32 sums in memory, once for each tile of keys, fills them before and rounds them afterwards.
# - **b64 and b8** are a few long sequences.
# - **d64** has half the columns and as many activations, so each step has half the MMAs for the
#   same instructions. Backward v6 takes up to 128 keys
#   ({doc}`../backward/v5_short_kv_backward`).
# - **gelu**: erf costs what tanh costs, since both are a tanh of a cubic here
#   ({doc}`../operator/activations`).
#
# ## Your shape
#
# On a machine with a GPU, with a name of your own. Every output is checked against fp64 before
# anything is timed:
#
# ```python
# from dataclasses import replace
#
# import torch
#
# from gdpa_lab.measuring.measure import measure
# from gdpa_lab.measuring.workloads import workload
#
# mine = replace(workload("gdpa-self-full-1024"), name="mine", batch=200, num_heads_q=6,
#                num_heads_k=6, max_seqlen_q=700, max_seqlen_k=700)
# rows = measure(mine, ["v8_own_waits", "fa2_varlen"], device=torch.device("cuda"),
#                scopes=("sustained",))
# ```
#
# `make measure NOTEBOOKS=measuring/other_shapes` appends a record of all shapes above for your GPU.
#
# ## Exercises
#
# :::{exercise} A narrower window
# :label: ex-shapes-window
#
# What share of a tile is useful with a window of 32, and which blocks need no mask? *(paper)*
# :::
#
# :::{solution} ex-shapes-window
# :class: dropdown
#
# A row sees 65 keys. The tile of 128 rows reads keys from row - 32, rounded down to a block, to
# row + 160: four blocks of 64, 25 %. A block needs no mask if 64 rows see all of its 64 keys, which
# are up to 63 apart: none.
# :::
#
# ## Takeaways
#
# - Count what a tile computes and drops before you blame the kernel.
# - A mask costs instructions in every block unless the block asks first.
# - A shape between two tuned ones is where a baseline may be ahead: measure yours.
