# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # Shapes that nobody published
#
# Your batch is in none of the published figures. Does what they show hold for it?
#
# :::{admonition} In this chapter (10 minutes)
# You will see the best rung against the best peer on head counts, head_dims, lengths and masks that
# no figure has, count what part of a tile is useful, and measure a shape of your own. Back to back
# on the H200 the best rung is {glue:text}`forward_over` times as fast as the best peer forward, and
# {glue:text}`backward_over` times backward; behind on {glue:text}`behind`.
# :::

# %%
from _lib import ratios, studies
from gdpa_kernels.gdpa.kernels import v8_own_waits as v8
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% [markdown]
# ## The shapes
#
# A name says how a shape differs from the published ones, which have 1,152 sequences, 4 heads and
# head_dim 128: `b64` sequences, `h3` heads, `kv320` keys, `d64` columns; `gqa` is eight query heads
# on two key heads, `ml1m` has the lengths of MovieLens 1M, `gelu` is GELU by erf.

# %%
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
        return [V8, *(MASKED if of.causal or of.window else [])]
    if of.head_dim > 128:
        return ["v7_wide_backward"]
    return [V4, V6] if of.max_seqlen_k <= 128 else [V4]


GUARD = studies.piece(v8, "    if not all_visible(", "        x = mask_prob")
EVERY = studies.changed(v8, (GUARD, "    if True:\n"))
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
best = {way: ratios.best(found) for way, found in rows.items()}
ahead = {way: found["peer / rung (time)"] for way, found in best.items()}
lost = [f"{ratios.short(n)}, {way}" for way, x in ahead.items() for n in x[x < 1].index]
variants = chapter.rows(impl=V8, scope="sustained", variant=None)
masks = variants.replace({"variant": {"": "v8"}}).pivot_table(
    index="workload", columns="variant", values="time_us_p50", sort=False
).dropna().rename(index=ratios.short)  # fmt: skip
gain = masks["masks every block"] / masks["v8"]
chapter.glue(
    **{f"{way}_over": ratios.spread(x) for way, x in ahead.items()},
    behind=ratios.listed(lost),
)  # fmt: skip

# %% [markdown]
# Peers run what they take: dense cuDNN one length, FlashAttention-2, FlashAttention-4 and ragged
# cuDNN all lengths, each with a softmax. Rates in TFLOP/s count visible pairs only, and shares are
# of the roofline under ceilings that ran back to back too.
#
# ## Forward

# %% tags=["remove-input"]
chapter.table(ratios.shown(best["forward"]), measured=rows["forward"])

# %% [markdown]
# v8 makes tiles of 128 rows and blocks of 64 or 128 keys. A shape that they do not divide, or that
# a mask cuts, pays for what it computes and drops:
#
# - **causal**: of 1,024 keys a tile of 128 rows computes the blocks of 64 up to its last row. Over
#   eight tiles that is 72 blocks, 64 of them visible: at most 89 %.
# - **window128**: a row sees 257 keys. Its tile reads 6 blocks: at most 67 %.
# - **kv192**: three blocks of 64, nothing is dropped, but Q and the output are most of the bytes.
# - **d256**: one slot of Q beside two blocks of 64 keys ({doc}`../backward/v5_short_kv_backward`).
#
# ## A mask costs most where it does nothing
#
# A block that all rows of a tile see needs no mask. A mask is a comparison and a selection for each
# score, so v8 asks first:

# %% tags=["remove-input"]
chapter.code(v8.begin, "    x = s if", "    t = 0")

# %% [markdown]
# The condition is the same for all threads: one branch. *Masks every block* is v8 without the
# question. Counted before the run: with causal 3 of 18 blocks of a mean tile need a mask, so it
# issues 0.6 times the instructions, and the tensor cores become the limit.

# %% tags=["remove-input"]
chapter.table(
    masks.reset_index(), measured=variants[variants["workload"].str.contains("causal|window")]
)
chapter.predict(
    "Causal: asking first makes v8 faster by this factor.", gain["self-full-1024-causal"],
    least=1.15, most=1.45,
)  # fmt: skip
chapter.predict(
    "Window: half of the blocks need no mask, the gain is smaller than with causal.",
    gain["self-full-1024-window128"], least=1.05, most=gain["self-full-1024-causal"],
)  # fmt: skip

# %% [markdown]
# Fewer instructions bring less than their count, so something else limits a block: waits and
# barriers. With causal, blocks of 128 keys hold the same pairs as blocks of 64 and wait half as
# often. v8 still takes 64 under every mask: at 128, masking leaves too few registers for all
# activations but packed GELU and SiLU, and the others spill. With the window,
# blocks of 128 hold more hidden pairs.
#
# ## Backward

# %% tags=["remove-input"]
named = best["backward"].replace({"best rung": "_.*"}, "", regex=True)
chapter.table(ratios.shown(named), measured=rows["backward"])

# %% [markdown]
# - **kv320** is two and a half tiles of 128 keys: v4 computes three, and 83 % count.
# - **384 and 640**: whole tiles, but v5 ends at 256 keys. v4 adds every dQ to fp32 sums in memory,
#   once for each tile of keys, fills them before and rounds them afterwards.
# - **b64 and b8**: few long sequences, which the peers were tuned for. Sums of dQ stay in L2.
#   FlashAttention-4 is ahead here and with **causal**.
# - **d64**: half the columns, as many activations. Each step has half of the MMAs of head_dim 128
#   for the same instructions; v6 takes up to 128 keys ({doc}`../backward/v5_short_kv_backward`).
# - **gelu**: erf costs what tanh costs here, as a tanh of a cubic
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
# Each prints its rate; a row that fails says why. `make measure NOTEBOOKS=measuring/other_shapes`
# appends a record of all shapes above for your GPU.
#
# ## Exercises
#
# :::{exercise} Keys that do not divide
# :label: ex-shapes-keys
#
# For which numbers of keys up to 640 does v4 backward compute less than 90 % useful pairs? How
# would tiles of 64 keys change that, and what would they cost? *(paper)*
# :::
#
# :::{solution} ex-shapes-keys
# :class: dropdown
#
# With n tiles of 128 the share is keys / 128 n: under 0.9 for up to 115 keys, 129 to 230, 257 to
# 345, 385 to 460 and 513 to 575. Tiles of 64 keep 90 % from 288 on, except for a few after each
# multiple of 64. But each tile reads all of Q and dO, and adds all of dQ: twice as many bytes for
# the same MMAs.
# :::
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
# - A shape between two tuned ones is where a peer may be ahead: measure yours.
