# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: false
# ---

# %% [markdown]
# # v0: FlashAttention-2 on this mask
#
# Kernels for attention exist. What do they pay here for what long sequences need?
#
# :::{admonition} In this chapter (15 minutes)
# You will be able to say what each piece of FlashAttention-2 is for, price it in bytes, and see
# whether a baseline deserves the name. At head_dim 128 v0 reaches {glue:text}`forward_128:.0f` % of
# a copy forward and {glue:text}`backward_128:.0f` % backward. Its bytes explain most of what is
# missing backward, and nothing of what is missing forward.
# :::

# %%
import pandas as pd

from gdpa_kernels.block_attention import v0_flash
from gdpa_kernels.block_attention.v0_flash import Config
from gdpa_kernels.measuring.workload import workload
from gdpa_kernels.report import block_bytes, block_studies, charts, results
from gdpa_kernels.report.chapter import Chapter

KERNELS = {  # what each reads and writes
    "forward": {"forward_kernel": ("q k v", "out lse")},
    "backward": {
        "delta_kernel": ("dO out", "D"),
        "dk_dv_kernel": ("q k v dO lse D", "dk dv"),
        "dq_kernel": ("q k v dO lse D", "dq"),
    },
}
LEAST = {"forward": [("q k v", "out")], "backward": [("q k v dO", "dq dk dv")]}
WORK = {128: workload("block-fill70-2000"), 64: workload("block-fill70-2000-d64")}

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("block/v0_flash", mode=mode, device=device, data_dir=data_dir)
V0 = "v0_flash"
PEERS = {V0: "v0", "fa2_varlen": "FlashAttention-2", "cudnn_varlen": "cuDNN"}

# %%
limits = results.ceilings(chapter.record("block/results"))
dims = {work.name: dim for dim, work in WORK.items()}
rows = chapter.rows("block/results", workload=list(dims), impl=list(PEERS))
rows = rows.assign(head_dim=rows["workload"].map(dims))
wide = rows.pivot(
    index=["direction", "head_dim"], columns="impl", values=["percent_of_roofline", "time_us_p50"]
)
share, us = wide["percent_of_roofline"], wide["time_us_p50"]
floor = {  # of v0's bytes, µs
    (way, dim): block_bytes.floor_us(list(KERNELS[way].values()), work, limits)
    for way, dim in share.index
    for work in [WORK[dim]]
}
least = {(w, d): block_bytes.floor_us(LEAST[w], WORK[d], limits) for w, d in share.index}
bound = pd.Series({case: 100 * least[case] / floor[case] for case in share.index})

# %% tags=["remove-input"]
# | name: fig-bv0-share
# | caption: >
# |   The rate of the least bytes, in percent of the best copy with the same mix of reads and
# |   writes, at head_dim 128. The peers get a sequence for each block. What v0's bytes allow is
# |   modelled from the rates of copies.
# | alt: >
# |   Eight bars. Forward: what v0's bytes allow, almost 100, v0 near 78, FlashAttention-2 near 59,
# |   cuDNN near 18. Backward: what v0's bytes allow, a little above 55, v0 near 43,
# |   FlashAttention-2 near 26, cuDNN near 10.
bars = {}
for way in KERNELS:
    bars[f"v0's bytes, {way}"] = bound[way, 128]
    bars |= {f"{name}, {way}": share.loc[(way, 128), impl] for impl, name in PEERS.items()}
mine = [name for name in bars if name.startswith("v0,")]
drawn = charts.bars(
    pd.Series(bars),
    xlabel="% of the copy",
    highlight=mine,
    ceiling=100,
    names={f"v0's bytes, {way}": f"allowed by v0's bytes, {way}" for way in KERNELS},
)
chapter.figure(drawn, measured=rows)

# %% [markdown]
# ## What it is
#
# A block of tokens is a sequence of its own, and on these sequences runs FlashAttention-2
# {cite}`dao2024flashattention2`: four kernels of plain Triton, written for this book. Everything in
# them has a reason, and the reason is that a sequence is longer than a tile.
#
# | what | why, on a long sequence | on a block of 64 |
# |:--|:--|:--|
# | a loop over keys | all scores do not fit | one trip |
# | running maximum, rescaling {cite}`milakov2018online` | the largest comes last | known at once |
# | log-sum-exp, written forward, read backward | P again in one pass | the row is at hand |
# | `delta`, the row sums of O ∘ dO, by a kernel | dS needs a sum over keys | the row is at hand |
# | dK and dV in one kernel, dQ in another | an owner sums, no atomics | one owner for all |
#
# The same list is what {doc}`v1_one_tile` leaves out. To say what leaving it out is worth, somebody
# has to do it all first, and do it well. The loop of the forward kernel:

# %% tags=["remove-input"]
chapter.code(v0_flash.forward_kernel, "highest = tl.full")

# %% [markdown]
# With the maximum $m$ of a row so far, the sum $l$ and the output $a$, a step with scores $t$ in
# units of $\log_2$ sets
#
# $$m' = \max(m, \max_j t_j), \quad f = 2^{m - m'}, \quad l' = f l + \sum_j 2^{t_j - m'}, \quad
# a' = f a + \sum_j 2^{t_j - m'} v_j .$$
#
# At the first step $m = -\infty$, so that $f = 0$ and multiplies zeros. On a block of 64 there is
# no second step, but the compiler cannot know that: the number of rows is read from a list at run
# time. A program owns 64 rows of one head: queries in the forward kernel and for dQ, keys for dK
# and dV. Neighbouring programs own neighbouring blocks of the same head.
#
# ## Prediction
#
# {doc}`counting_bytes` shows that memory decides here. So count bytes, kernel by kernel:

# %%
moved = pd.DataFrame([
    {
        "direction": way, "kernel": name,
        **{f"tensors, {d}": block_bytes.tensors([names], work) for d, work in WORK.items()},
        **{f"floor (µs), {d}": block_bytes.floor_us([names], work, limits)
           for d, work in WORK.items()},
    }
    for way, kernels in KERNELS.items() for name, names in kernels.items()
])  # fmt: skip

# %% tags=["remove-input"]
chapter.table(moved.round(2), modelled="for head_dim 128 and 64; at the measured rates of copies")
of_bound = {case: 100 * share[V0][case] / bound[case] for case in share.index}
chapter.predict(
    "Backward cannot pass what 13 tensors allow where 7 would do. In percent of the copy, head_dim "
    "128:", share[V0]["backward", 128], most=bound["backward", 128], form=".1f",
)  # fmt: skip
chapter.predict(
    "Nothing else matters at so few FLOPs per byte: v0 reaches nine tenths of what its bytes "
    "allow. In percent, the smallest of four:", min(of_bound.values()), least=90, form=".0f",
)  # fmt: skip
for way, dim in share.index:
    time = us[V0][way, dim]
    compute = WORK[dim].flops(way) / limits.tflops / 1e6
    chapter.glue(**{f"{way}_{dim}": share[V0][way, dim], f"of_{way}_{dim}": of_bound[way, dim]})
    chapter.glue(**{f"beyond_{way}_{dim}": time - floor[way, dim],
                    f"compute_{way}_{dim}": 100 * compute / time})  # fmt: skip

# %% [markdown]
# Of what its bytes allow v0 reaches {glue:text}`of_forward_128:.0f` % forward and
# {glue:text}`of_backward_128:.0f` % backward, at head_dim 64 {glue:text}`of_forward_64:.0f` and
# {glue:text}`of_backward_64:.0f` %. The time beyond the bytes is
# {glue:text}`beyond_forward_128:,.0f` and {glue:text}`beyond_backward_128:,.0f` µs. It does not go
# to the tensor cores: at the rate of a large matmul, the MMAs of a pass take
# {glue:text}`compute_forward_128:.0f` % of v0's time forward and
# {glue:text}`compute_backward_128:.0f` % backward.
#
# ## What the compiler made of it

# %%
built = block_studies.compiled(
    {way: (v0_flash, way) for way in KERNELS}, mnemonics=["HGMMA", "LDGSTS"]
)

# %% tags=["remove-input"]
chapter.table(
    built.rename(columns={"case": "direction"}),
    modelled="compiled for sm_90a at head_dim 128 when this page was built",
)
assert (built[built["HGMMA"] > 0]["programs on an SM"] == 2).all(), "the text says two"

# %% [markdown]
# Matmuls are HGMMA, the asynchronous MMAs of Hopper. The column to remember is that of the
# programs: two of each kernel with MMAs share an SM. A program asks for tiles and waits,
# computes and asks for nothing, stores and ends. Whatever one of them waits for, only the others
# can cover, and there are moments in which nobody asks for anything. That is a description, not a
# proof; {doc}`v1_one_tile` tests it by taking the pieces out one at a time.
#
# ## Is it right?
#
# A ragged batch in the emulator, against fp64. A step of 32 keys makes the loop run twice, so that
# the rescaling is tested too.

# %%
ragged = block_studies.batch((0, 1, 63, 64, 65, 0, 130), head_dim=32)
for step in (64, 32):
    checked = block_studies.comparison(v0_flash, ragged, Config(BLOCK_N=step))

# %% tags=["remove-input"]
chapter.table(checked, emulated="two heads, bf16; allowed: twice PyTorch's error and one rounding")

# %% [markdown]
# ## Is it a fair baseline?

# %%
ratio = us.div(us[V0], axis=0).rename(columns=PEERS).sort_index(ascending=False)
published = pd.read_csv(chapter.data_dir / "published" / "block_attention_times.csv")
published = published[published["kernel"] == "fa2_jfa"].set_index("direction")["time_ms"]
sheet = pd.DataFrame({  # percent of the data sheet: 8 TB/s of a B200, 4.8 TB/s of an H200
    "published baseline": {w: WORK[128].bytes(w) / published[w] / 80e6 for w in KERNELS},
    "v0": {w: WORK[128].bytes(w) / us.loc[(w, 128), V0] / 48e3 for w in KERNELS},
})  # fmt: skip
print(sheet.round(1))

# %% tags=["remove-input"]
chapter.table(ratio.drop(columns="v0").add_suffix(" / v0").reset_index(), measured=rows)
assert ratio.drop(columns="v0").min().min() > 1.05, "the text says that v0 is the faster one"
assert (sheet["v0"] > sheet["published baseline"]).all(), "the text says: not the weaker one"
chapter.glue(fa2_least=min(ratio["FlashAttention-2"]), fa2_most=max(ratio["FlashAttention-2"]))

# %% [markdown]
# The workload is that of the published table: 1,152 sequences, lengths uniform between 800 and
# 1,999. The library's FlashAttention-2, called with a sequence for each block, takes
# {glue:text}`fa2_least:.1f` to {glue:text}`fa2_most:.1f` times as long as v0. It is made for long
# sequences: rows of a tile that a block of 64 does not fill move no bytes, but take time all the
# same.
#
# The published kernels are compared with an implementation of the same algorithm in Triton that is
# not public {cite}`siso2026block`. The lines above have its published times and the measured ones
# of v0, with our count of the least bytes, in percent of the data sheets' rates. By this measure
# v0 is not the weaker opponent.
#
# ## The surprise: a pipeline for a loop that runs once
#
# `tl.range` can keep several steps of a loop in flight: the next K and V are on their way while
# this step computes. Our loop has no next step, so `num_stages=1` should do. Two stages, compiled
# and measured:

# %%
kernels = block_studies.compiled(
    {f"{n} stage{'s' * (n > 1)}": (v0_flash, "forward", Config(num_stages=n)) for n in (1, 2)},
    mnemonics=["LDGSTS"],
)
kernels = kernels.drop(columns="kernel").rename(columns={"case": "forward, head_dim 128"})
stages = chapter.rows("block/v1_one_tile", impl=V0, variant=["one stage", "two stages"])
timed = stages.pivot(index=["direction", "workload"], columns="variant", values="time_us_p50")
pipelined = (timed["two stages"] / timed["one stage"]).rename("two stages / one stage")

# %% tags=["remove-input"]
chapter.table(kernels, modelled="compiled for sm_90a when this page was built")
chapter.table(pipelined.sort_index(ascending=False).reset_index(), measured=stages)
chapter.predict("In a loop that runs once, two stages change nothing (2 %): the smallest ratio.",
                pipelined.min(), least=0.98)  # fmt: skip
assert pipelined["forward"].max() < 1 < pipelined["backward"].max(), "the text says so"
assert kernels["programs on an SM"].nunique() == 1 and kernels["LDGSTS"][0] == 0

# %% [markdown]
# What a pipeline changes besides its depth is the path. With one stage K and V are loaded into
# registers, and the warps store them into shared memory once they have arrived. A pipeline asks
# with LDGSTS (`cp.async`) instead: the data go to shared memory without a stop in registers, and
# the warp is free until its `wait_group`. The number of programs stays the same, the sums stay the
# same, and the time does not. Backward two stages help at head_dim 128 and hurt at 64; v0 has two
# stages forward and one backward. A baseline is fair only when its constants have been tried, also
# those that cannot matter.
#
# ## Exercises
#
# :::{exercise} The price of a log-sum-exp
# :label: ex-bv0-lse
#
# Which share of all bytes of v0 are the log-sum-exp and `delta`, forward and backward, at head_dim
# 128? For which head_dim would they be a tenth forward? *(paper, five minutes)*
# :::

# %% tags=["remove-cell"]
extra = moved.groupby("direction")["tensors, 128"].sum()
chapter.glue(lse_forward=100 * (1 - 4 / extra["forward"]),
             lse_backward=100 * (1 - 13 / extra["backward"]))  # fmt: skip

# %% [markdown]
# :::{solution} ex-bv0-lse
# :class: dropdown
#
# A row of a tensor has $2 \cdot 128$ bytes, a row of the log-sum-exp 4. Forward writes it once
# beside four tensors: {glue:text}`lse_forward:.2f` %. Backward moves 5 such rows (`delta` written
# once and read twice, the log-sum-exp read twice) beside thirteen tensors:
# {glue:text}`lse_backward:.2f` %. A tenth forward means $4 = 0.1 (4 + 8 d)$, $d = 4.5$: no head is
# so small. Leaving the log-sum-exp out cannot bring much by its bytes.
# :::
#
# :::{exercise} Shared keys
# :label: ex-bv0-groups
#
# Four query heads share one head of K and V. How many tensors of q's size does v0's backward move
# now, and how many are the least? Which of the bytes too many could L2 spare? *(paper, then
# `block_studies.traffic`; fifteen minutes)*
# :::

# %% tags=["remove-cell"]
shared = block_studies.batch((64,), heads=4, heads_k=1, head_dim=128)
asked = block_studies.traffic(v0_flash, shared).set_index("kernel").sum(axis=1)
chapter.glue(grouped=asked.drop("forward_kernel").sum(), between=WORK[128].bytes("forward") / 8e6)
assert round(asked.drop("forward_kernel").sum()) == 10

# %% [markdown]
# :::{solution} ex-bv0-groups
# :class: dropdown
#
# K, V and their gradients are now a quarter of a tensor each. The least is q, dO and dQ and four
# quarters: 4. v0 reads out and dO for `delta`, 2; for dK and dV a program owns a head of keys and
# reads four heads of q and dO, $2 + 2 \cdot \frac14$, and writes $2 \cdot \frac14$; for dQ each of
# the four query heads reads K and V for itself, $2 + 2$, and writes 1. Together 10, and the
# emulator counts {glue:text}`grouped:.2f` with `delta` and the log-sum-exp. L2 could spare the K
# and V of the three other heads if their programs ran at about the same time. They do not:
# neighbours own blocks of the same head, and between a block and the same block of the next head
# lie {glue:text}`between:.0f` MB of K and V.
# :::
#
# :::{exercise} Two tiles in a block
# :label: ex-bv0-two-tiles
#
# Blocks of 128 tokens with the same tiles of 64. What does the emulator count for the forward
# kernel? What would memory see on a GPU? *(`block_studies.traffic`, ten minutes)*
# :::

# %% tags=["remove-cell"]
two = block_studies.batch((128,), heads=1, head_dim=64, block_size=128)
(first, *_) = block_studies.traffic(v0_flash, two, Config())[["read", "written"]].sum(axis=1)
assert abs(first - 6) < 0.1
chapter.glue(two_tiles=first)

# %% [markdown]
# :::{solution} ex-bv0-two-tiles
# :class: dropdown
#
# A block has two programs, one for each 64 queries, and each reads all 128 keys: q once, K and V
# twice, the output once, 6 tensors instead of 4 ({glue:text}`two_tiles:.2f` emulated, with the
# log-sum-exp). Memory should see 4: the two programs are neighbours, start together, and read the
# same 128 rows at about the same time. The loop now runs twice, and the machinery of
# FlashAttention-2 has something to do.
# :::
#
# ## Takeaways
#
# - Count the bytes of every kernel of a pass, not of the operator. Here the two passes and the
#   extra kernel of backward cost more than everything else together.
# - A bound by bytes is a bound. What is missing to it is the next question, and it has no bytes.
# - Try the constants of a baseline, also the pointless ones.
