# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: false
# ---

# %% [markdown]
# # Block v0: flash
#
# FlashAttention-2 was built for long sequences. What does its machinery cost on a block of 64?
#
# :::{admonition} In this chapter (30 minutes)
# You will be able to say what each piece of FlashAttention-2 is for, price it in bytes, and tell
# whether a baseline is fair. Back to back at head_dim 128, block v0 reaches
# {glue:text}`forward_128:.0f` % of a copy's rate in the forward pass and
# {glue:text}`backward_128:.0f` % in the backward pass.
# :::

# %% tags=["hide-input"]
import pandas as pd

from _lib import block_bytes, block_studies
from gdpa_kernels.block_attention.ladder import v0_flash
from gdpa_kernels.block_attention.ladder.v0_flash import Config
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts, results
from gdpa_lab.report.chapter import Chapter

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
PEERS = {V0: "block v0", "fa2_varlen": "FlashAttention-2"}
limits = results.ceilings(chapter.record("block/results"), "sustained")
dims = {work.name: dim for dim, work in WORK.items()}
rows = chapter.rows("block/results", scope="sustained", workload=list(dims), impl=list(PEERS))
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
gap = {way: (100 - bound[way, 128]) / (100 - share[V0][way, 128]) for way in KERNELS}
assert gap["forward"] < 0.05 < 0.5 < gap["backward"], "the caption"
assert 50 < bound["backward", 128] < 60, "the caption: little more than half"

# %% tags=["remove-input"]
# | name: fig-b-v0-ladder
# | caption: >
# |   **Block v0 on the ladder.** Time of the backward pass of each rung on block-fill70-2000, back
# |   to back; each tick leads to its chapter. Dashed: libraries.
# | alt: >
# |   An axis of milliseconds with a tick for each rung, that of v0 thick, and dashed lines for the
# |   libraries.
chapter.ladder("v0_flash", "block")

# %% tags=["remove-input"]
# | name: fig-bv0-share
# | caption: >
# |   **Block v0 falls short of what its bytes allow in the forward pass, and its bytes allow little
# |   more than half in the backward pass.** Fewest bytes over time, in percent of the {ref}`ceiling
# |   <rule-ceiling>`, back to back at head_dim 128. What v0's bytes allow is modelled.
# | alt: >
# |   Bars for each direction: what v0's bytes allow, v0, then FlashAttention-2. Forward the bytes
# |   allow nearly everything and v0 falls short of it; backward they allow little more than half.
bars = {}
for way in KERNELS:
    bars[f"v0's bytes, {way}"] = bound[way, 128]
    bars |= {f"{name}, {way}": share.loc[(way, 128), impl] for impl, name in PEERS.items()}
of_v0 = [name for name in bars if name.startswith("block v0,")]
drawn = charts.bars(
    pd.Series(bars),
    xlabel="% of the copy",
    highlight=of_v0,
    levels={"copy": 100},
    names={f"v0's bytes, {way}": f"allowed by block v0's bytes, {way}" for way in KERNELS},
)
chapter.figure(drawn, measured=rows, modelled="what the bytes of v0 allow")

# %% [markdown]
# ## Every piece is there because a sequence is longer than a tile
#
# Block v0 runs the algorithm of FlashAttention-2 {cite}`dao2024flashattention2` with every block as
# a sequence, in four kernels of plain Triton:
#
# | what | why, on a long sequence | on a block of 64 |
# |:--|:--|:--|
# | a loop over keys | all scores do not fit | one trip |
# | running maximum, rescaling {cite}`milakov2018online` | the largest may be last | known at once |
# | log-sum-exp, written forward, read backward | recovers P tile by tile | the row is on chip |
# | a kernel for `delta`, the row sums of O ∘ dO | dS needs a sum over keys | the row is on chip |
# | dK and dV in one kernel, dQ in another | sums without atomics | one program owns all |
#
# (`delta` is the $D$ of {doc}`../backward/by_hand`.) {doc}`Block v1 <v1_one_tile>` leaves all of it
# out. The loop of the forward kernel:

# %% tags=["remove-input"]
chapter.code(v0_flash.forward_kernel, "highest = tl.full")

# %% [markdown]
# Let $m$ be a row's maximum so far, $l$ its sum and $a$ its output. A step with scores $t$ (base 2)
# sets
#
# $$\begin{gathered} m' = \max(m, \max_j t_j), \qquad f = 2^{m - m'}, \\
# l' = f l + \sum_j 2^{t_j - m'}, \qquad a' = f a + \sum_j 2^{t_j - m'} v_j . \end{gathered}$$
#
# At the first step $m = -\infty$, so $f = 0$ and the rescaling multiplies zeros. On a block of 64
# there is no second step, but the compiler cannot know that: the number of rows is read from a list
# at run time.
#
# ## The bytes allow more than block v0 reaches
#
# Memory decides here ({doc}`counting_bytes`), so we count bytes, kernel by kernel:

# %% tags=["remove-cell"]
moved = pd.DataFrame([
    {
        "direction": way, "kernel": name,
        "tensors": block_bytes.tensors([names], WORK[128]),
        "floor (µs)": block_bytes.floor_us([names], WORK[128], limits),
    }
    for way, kernels in KERNELS.items() for name, names in kernels.items()
])  # fmt: skip

# %% tags=["remove-input"]
chapter.table(
    moved.round(2),
    caption="**The backward pass moves 13 tensors, nearly all of them in two passes.** Block v0 by "
    "kernel, and the time of copies with as many bytes.",
    name="tab-bv0-bytes", digits={"floor (µs)": 0, "tensors": 2},
    modelled="head_dim 128, at the measured rates of copies",
)  # fmt: skip
of_bound = {case: 100 * share[V0][case] / bound[case] for case in share.index}
chapter.predict(
    "At head_dim 128 the backward pass stays below what its 13 tensors allow, where 7 would do (in "
    "percent of the copy).", share[V0]["backward", 128], most=bound["backward", 128], form=".1f",
    shown=False,
)  # fmt: skip
chapter.predict(
    "At so few FLOPs per byte only bytes matter, so block v0 reaches nine tenths of what its bytes "
    "allow (in percent, the smallest of four cases).", pd.Series(of_bound), least=90, form=".0f",
)  # fmt: skip
for way, dim in share.index:
    time = us[V0][way, dim]
    compute = WORK[dim].flops(way) / limits.tflops / 1e6
    chapter.glue(**{f"{way}_{dim}": share[V0][way, dim], f"of_{way}_{dim}": of_bound[way, dim]})
    chapter.glue(**{f"compute_{way}_{dim}": 100 * compute / time})

# %% [markdown]
# At head_dim 128 block v0 reaches {glue:text}`of_forward_128:.0f` % of what its bytes allow in the
# forward pass and {glue:text}`of_backward_128:.0f` % in the backward pass. The rest is not spent in
# the tensor cores: at the rate of a large matmul, the {term}`MMAs <MMA>` would take
# {glue:text}`compute_forward_128:.0f` % of v0's time in the forward pass and
# {glue:text}`compute_backward_128:.0f` % in the backward pass.
#
# ## It is right, and it is a fair baseline

# %% tags=["remove-cell"]
ragged = block_studies.batch((0, 1, 63, 64, 65, 0, 130), head_dim=32)
checked = block_studies.comparison(v0_flash, ragged, Config(BLOCK_N=32))
chapter.glue(error=100 * (checked["largest error"] / checked["allowed"]).max())
ratio = us["fa2_varlen"] / us[V0]
chapter.glue(fa2_least=ratio.min(), fa2_most=ratio.max())
times = pd.read_csv(chapter.data_dir / "published" / "block_attention_times.csv")
times = times[times["kernel"] == "fa2_jfa"].set_index("direction")["time_ms"]
for way in KERNELS:  # least bytes per second, in percent of nominal: B200 8 TB/s, H200 4.8 TB/s
    theirs = WORK[128].bytes(way) / times[way] / 80e6
    ours = WORK[128].bytes(way) / us[V0][way, 128] / 48e3
    chapter.glue(**{f"{way}_theirs": theirs, f"{way}_ours": ours})
    assert ours > theirs, "the text says: not the weaker one"

# %% [markdown]
# A ragged batch in the emulator, with steps of 32 keys, which make the loop run twice: the largest
# error of output and gradients is {glue:text}`error:.0f` % of what is allowed against fp64. The
# library's FlashAttention-2, given each block as a sequence, takes {glue:text}`fa2_least:.1f` to
# {glue:text}`fa2_most:.1f` times as long as block v0.
#
# The source of the published baseline is not public {cite}`siso2026block`. By the fewest bytes over
# the published times, it reaches {glue:text}`forward_theirs:.0f` and
# {glue:text}`backward_theirs:.0f` % of a B200's nominal rate in the forward and the backward pass,
# block v0 {glue:text}`forward_ours:.0f` and {glue:text}`backward_ours:.0f` % of an H200's: block v0
# is not the weaker baseline.
#
# ## Surprise: a pipeline speeds up a loop that runs once
#
# `tl.range` can keep several steps of a loop in flight ({term}`stage`): the next K and V load while
# this step computes. Our loop has no next step, so `num_stages=1` should do:

# %% tags=["remove-cell"]
kernels = block_studies.compiled(
    {f"{n} stage{'s' * (n > 1)}": (v0_flash, "forward", Config(num_stages=n)) for n in (1, 2)},
    mnemonics=["LDGSTS"],
)
kernels = kernels.drop(columns=["kernel", "spilled (B)"])
stages = chapter.rows("block/v1_one_tile", impl=V0, variant=["one stage", "two stages"])
timed = stages.pivot(index=["direction", "workload"], columns="variant", values="time_us_p50")
pipelined = (timed["two stages"] / timed["one stage"]).rename("two stages / one stage")

# %% tags=["remove-input"]
chapter.table(
    pipelined.sort_index(ascending=False).reset_index(),
    caption="**Two stages are faster in the forward pass.** Time with two stages over time with "
    "one, in bursts.",
    name="tab-bv0-pipelined", measured=stages,
)  # fmt: skip
chapter.predict(
    "In a loop that runs once, two stages save no more than 2 % (the smallest ratio of times).",
    pipelined, least=0.98,
)  # fmt: skip
assert pipelined["forward"].max() < 1 < pipelined["backward"].max(), "the text says so"
assert kernels["programs on an SM"].eq(2).all() and kernels["LDGSTS"][0] == 0
assert kernels["shared (KiB)"].round().tolist() == [48, 80], "an answer says so"
for stage, kernel in enumerate(kernels.itertuples(index=False), 1):
    chapter.glue(**{f"regs_{stage}": kernel[1], f"shared_{stage}": kernel[2]})
assert [*kernels.columns[1:3]] == ["registers", "shared (KiB)"], "the exercise names them"

# %% [markdown]
# A pipeline also changes the path of the data. With one stage, K and V are loaded into registers
# and then stored to {term}`shared memory`. With two, the compiler uses the instruction LDGSTS
# (`cp.async`): the data go straight to shared memory, and the warp is free until it needs them. In
# the backward pass two stages help at head_dim 128 and hurt at 64, so block v0 has two stages in
# the forward and one in the backward pass. And only two programs fit on an SM: at times neither has
# a load in flight. {doc}`v1_one_tile` takes the pieces out one at a time.

# %% tags=["remove-input"]
chapter.predictions()

# %% tags=["remove-input"]
chapter.profile("v0_flash", workload="block-fill70-4000")
chapter.profile("v0_flash", workload="block-fill70-4000", direction="backward")

# %% [markdown]
# ## Exercises
#
# :::{exercise} The price of a log-sum-exp
# :label: ex-bv0-lse
#
# What share of block v0's bytes are the log-sum-exp and `delta` in each pass, at head_dim 128? At
# which head_dim would they be a tenth of the forward pass? *(paper, five minutes)*
# :::

# %% tags=["remove-cell"]
extra = moved.groupby("direction")["tensors"].sum()
chapter.glue(lse_forward=100 * (1 - 4 / extra["forward"]),
             lse_backward=100 * (1 - 13 / extra["backward"]))  # fmt: skip

# %% [markdown]
# :::{solution} ex-bv0-lse
# :class: dropdown
#
# A row of a tensor has $2 \cdot 128$ bytes, a row of the log-sum-exp 4. The forward pass writes it
# once, next to four tensors: {glue:text}`lse_forward:.2f` %. The backward pass moves five such rows
# (`delta` is written once and read twice, the log-sum-exp read twice) next to thirteen tensors:
# {glue:text}`lse_backward:.2f` %. A tenth of the forward pass means $4 = 0.1 (4 + 8 d)$, $d = 4.5$:
# no head is that small. Dropping the log-sum-exp cannot save much by its bytes.
# :::
#
# :::{exercise} Room for a third program
# :label: ex-bv0-third
#
# An SM has 64 Ki registers and 228 KiB of shared memory. A program of v0 has 128 threads: with one
# stage of {glue:text}`regs_1:.0f` registers and {glue:text}`shared_1:.0f` KiB, with two of
# {glue:text}`regs_2:.0f` and {glue:text}`shared_2:.0f` KiB. What keeps a third program out with
# two stages, and what with one? Which tile of the loop would you rather not have? *(paper, five
# minutes)*
# :::
#
# :::{solution} ex-bv0-third
# :class: dropdown
#
# Two stages: both. Three times 80 KiB do not fit, and three programs leave $65{,}536 / 384 = 170$
# registers a thread. One stage: shared memory has room for four programs, so only registers are in
# the way. `acc` takes $64 \cdot 128 / 128 = 64$ of them, and it exists from before the loop, while
# tiles are still being loaded. {doc}`v1_one_tile` has no such {term}`accumulator`.
# :::
#
# :::{exercise} Online softmax by hand
# :label: ex-bv0-online
#
# A row has scores $t = (1, 3)$ in the first step and $(2, 4)$ in the second, with values $v = (8,
# 0)$ and $(0, 14)$. Compute $m$, $l$ and $a$ after each step, and check the output against a
# softmax over all four at once (base 2). *(paper, five minutes)*
# :::
#
# :::{solution} ex-bv0-online
# :class: dropdown
#
# First step: $m = 3$, $l = \frac14 + 1 = \frac54$, $a = \frac14 \cdot 8 = 2$. Second: $m' = 4$, $f
# = \frac12$, $l' = \frac58 + \frac14 + 1 = \frac{15}{8}$, $a' = 1 + 14 = 15$. Output $a' / l' = 8$.
# At once: the weights are $\frac18, \frac12, \frac14, 1$, their sum is $\frac{15}{8}$, and $\frac18
# \cdot 8 + 14 = 15$. On one tile only the second calculation is left.
# :::
#
# ## Takeaways
#
# - Count the bytes of every kernel of a pass. They give a bound, and cannot say what keeps a kernel
#   from it.
# - Tune a baseline's constants, even those that look pointless.
