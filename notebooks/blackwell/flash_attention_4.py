# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # FlashAttention-4
#
# With few keys the published kernel is "up to 3.5 times as fast as FlashAttention-4". How much of
# that is attention?
#
# :::{admonition} In this chapter (20 minutes)
# You will be able to split a published speedup into factors by a model, and to test the largest of
# them on a GPU of another generation with one switch. All times here are {ref}`in bursts
# <rule-scope>`.
# :::

# %% tags=["hide-input"]
from dataclasses import replace

import numpy as np
import pandas as pd

from gdpa_lab.measuring import cost_model
from gdpa_lab.measuring.baselines import flash
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts, claims
from gdpa_lab.report.chapter import Chapter
from notebooks.blackwell import _tile_law

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("blackwell/flash_attention_4", mode=mode, device=device, data_dir=data_dir)
SHORT = workload("gdpa-self-full-256")
BATCHES = (36, 144, 288, 576, 1152, 2304, 4608)


def of_batch(work, batch=1152):
    """The workload with that batch, under a name of its own."""
    return replace(work, batch=batch, name=f"{work.name}-batch-{batch}")


def plan(session):
    ragged = ["v8_own_waits", "fa4", ("fa4", "scan", {"scan": True})]
    dense = [*ragged, "fa4_dense", "cudnn"]
    for batch in BATCHES:
        session.measure(of_batch(SHORT, batch), dense)
    for batch in (36, 144):
        session.measure(of_batch(workload("gdpa-cross-full-2048"), batch), dense)
    for n in (512, 1024, 2048):
        session.measure(of_batch(workload(f"gdpa-cross-full-{n}")), dense)
        session.measure(of_batch(workload(f"gdpa-self-full-{n}")), dense)
        session.measure(of_batch(workload(f"gdpa-self-half-jagged-{n}")), ragged)


chapter.measure(plan)

# %% tags=["remove-cell"]
WALK, LOOKUP, DENSE = "FA4, walks", "FA4, looks up", "FA4, dense"
V8 = "forward v8"
names = {"fa4scan": WALK, "fa4": LOOKUP, "fa4_dense": DENSE, "cudnn": "cuDNN", "v8_own_waits": V8}
rows = chapter.rows(variant=None)
rows["name"] = (rows["impl"] + rows["variant"]).map(names)
us, rates = (
    rows.pivot(index="workload", columns="name", values=value)[list(names.values())]
    for value in ("time_us_p50", "tflops")
)
short = rates.loc[[of_batch(SHORT, batch).name for batch in BATCHES]].set_axis(BATCHES)
ends = short.iloc[-1] / short.iloc[0]
assert ends[WALK] < 1 < ends.drop(WALK).min(), "the caption: the walk alone slows down"

# %% tags=["remove-input"]
# | name: fig-fa4-batch
# | caption: >
# |   **FlashAttention-4 that walks over the batch slows down as the batch grows.** Rate in bursts
# |   by number of sequences of 256 queries and 256 keys, forward pass, kernel alone on one H200.
# |   FA4 on ragged batches: each program walks over the batch, or looks its sequence up.
# | alt: >
# |   A line chart over the number of sequences. Forward v8, cuDNN, FA4 dense and FA4 with lookup
# |   rise and stay level. FA4 with the walk rises, then falls lower than it began.
chapter.figure(
    charts.lines(
        short, xlabel="sequences", ylabel="TFLOP/s", log="x", highlight=[WALK, LOOKUP, V8]
    ),
    measured=rows[rows["workload"].str.startswith(SHORT.name)],
)

# %% [markdown]
# ## A walk over the batch costs quadratic time
#
# The published speedup compares whole kernels on a B200, batch 1,152 {cite}`xu2026gdpa`. They
# differ in softmax, in what runs while one tile ends and the next begins, and in how a program
# finds its sequence.
#
# FlashAttention-4 {cite}`zadouri2026flashattention4` launches one program for each tile that the
# batch could have at most, `total_q` plus 255 rows for each sequence, and each program finds its
# own by walking: the 32 lanes of a warp read the next lengths and sum them, 31 sequences a step,
# until the sum passes the program's number. For 1,152 sequences that takes up to 38 steps, and a
# program beyond the last tile walks to the end to find that it has nothing to do. The number of
# programs grows with the batch, and so does each walk.
#
# ## By the model, the walk is about half of the published speedup
#
# A law of FA4, fitted to its published bars, has a time for 256 queries, one for a tile of pairs
# and one for a step of the walk, {glue:text}`step_ns:.0f` ns ({glue:text}`step_least:.0f` to
# {glue:text}`step_most:.0f` without any one bar). By it and a law of GDPA's:

# %% tags=["remove-cell"]
bars = claims.published_figures().query("not suspect and direction == 'forward' and fill == 1")
laws = _tile_law.published(claims.published_figures().query("not suspect")).loc["forward"]
rate = bars.drop_duplicates(["workload", "kernel"]).pivot(
    index="workload", columns="kernel", values="tflops"
)
published = {}
for name in [f"gdpa-{x}" for x in ("self-full-256", "cross-full-512", "cross-full-2048",
                                   "self-full-2048")]:  # fmt: skip
    work, gdpa, fa4 = workload(name), rate.loc[name, "cutedsl_gdpa"], rate.loc[name, "cutedsl_fa4"]
    took = work.flops("forward") / fa4 / 1e6
    queries = _tile_law.amounts([work], cost_model.B200.sms, (256, 128)).loc[name, "queries"]
    walk = laws.loc["FA4", "steps"] * _tile_law.scan_steps(work, cost_model.B200.sms)
    ends = (laws.loc["FA4", "queries"] - laws.loc["GDPA", "queries"]) * queries
    left, ours = took - walk - ends, took * fa4 / gdpa
    published[name] = gdpa / fa4, took / (took - walk), (took - walk) / left, left / ours
columns = ["published", "walk", "begin and end", "the loop"]
published = pd.DataFrame.from_dict(published, orient="index", columns=columns)
shares = 100 * np.log(published["walk"]) / np.log(published["published"])

# %% tags=["remove-input"]
chapter.table(
    published.reset_index(names="workload"),
    caption="**By the model the loop, softmax included, contributes nothing.** The published "
    "speedup of GDPA over FA4, and three factors whose product it is.",
    name="tab-fa4-factors",
    digits=dict.fromkeys(columns, 2),
    modelled="published: GDPA over FA4, B200, 750 W; the factors by the laws of both kernels",
)
step_ns, step_least, step_most = (
    1e3 * laws.loc["FA4", f"steps{end}"] for end in ("", ", least", ", most")
)
short_keys = shares.index.str.contains("cross|256")
chapter.glue(
    step_ns=step_ns, step_least=step_least, step_most=step_most,
    walk_256=published.loc[SHORT.name, "walk"],
    ends_256=published.loc[SHORT.name, "begin and end"], share_low=shares[short_keys].min(),
    share_high=shares[short_keys].max(),
)  # fmt: skip
assert published["the loop"].between(0.9, 1.1).all(), "the caption: nothing"
assert shares[short_keys].between(35, 60).all(), "the titles: about half"

# %% [markdown]
# ## One switch makes FlashAttention-4 walk again
#
# The test of this law needs no B200. The version that we time, 4.0.0b36, walks only up to 256
# sequences. Above that a small kernel writes a table first, in which programs look up their
# sequence. Lift that threshold, and the library walks again, with no other change in the kernel:

# %% tags=["remove-input"]
chapter.code(flash.fa4, "interface =", "return scanning")

# %% [markdown]
# Without ragged offsets (`flash_attn_func`) it takes batches of equal lengths. So on those, one
# library has three ways to the same result.
#
# ## The test confirms the walk, and a step takes longer here
#
# If the law is right, the time of the walk grows with the square of the batch: 16 times from 1,152
# to 4,608 sequences. If the fitted step is right here too, it costs the table's
# {glue:text}`walk_256:.1f` at 1,152 of 256 tokens.

# %% tags=["remove-cell"]
walk, extra = us[WALK] / us[LOOKUP], us[WALK] - us[LOOKUP]
few = [name for name in us.index if name.endswith(("-36", "-144"))]
large = [of_batch(SHORT, batch).name for batch in (1152, 4608)]
chapter.predict(
    "Up to 256 sequences the switch changes the time by at most 2 % (the largest change).",
    100 * (walk[few] - 1).abs(), most=2, form=".1f", unit=" %", shown=False,
)  # fmt: skip
chapter.predict(
    "A batch four times as large walks about 16 times as long (what the walk adds at 4,608 "
    "sequences over 1,152).",
    extra[large[1]] / extra[large[0]], least=12, most=20, form=".1f",
)  # fmt: skip
chapter.predict(
    "At 1,152 sequences of 256 tokens the walk costs the factor modelled for a B200, to 30 % "
    "(measured over modelled).",
    walk[large[0]] / published.loc[SHORT.name, "walk"], least=0.7, most=1.3,
)  # fmt: skip

# %% tags=["remove-cell"]
chain = pd.DataFrame(
    {
        "v8 / FA4 that walks": us[WALK] / us[V8],
        "walk": walk,
        "ragged": us[LOOKUP] / us[DENSE],
        "FA4 to cuDNN, dense": us[DENSE] / us["cuDNN"],
        "cuDNN to v8": us["cuDNN"] / us[V8],
    }
).dropna()
chain = chain[chain.index.str.endswith("-1152")]

# %% tags=["remove-input"]
chapter.table(
    chain.set_axis(chain.index.str.removesuffix("-batch-1152").str.removeprefix("gdpa-"))
    .rename_axis("workload")
    .reset_index(),
    caption="**On the H200 the walk is the largest factor of every workload.** How many times as "
    "fast forward v8 is as an FA4 that walks, and four factors whose product it is; 1,152 "
    "sequences, in bursts.",
    name="tab-fa4-chain",
    digits=dict.fromkeys(chain, 2),
    measured=rows[rows["workload"].isin(chain.index)],
)
others = chain.drop(columns=["v8 / FA4 that walks", "walk"])
assert (chain["walk"] > others.max(axis=1)).all(), "the caption says so"
jagged = rates[rates.index.str.contains("jagged")]
cross = [name for name in chain.index if "cross" in name or "256" in name]
both = (chain["ragged"] * chain["FA4 to cuDNN, dense"])[cross]
level = chain.loc["gdpa-self-full-2048-batch-1152", "FA4 to cuDNN, dense"]
assert abs(level - 1) < 0.05 and walk[large[0]] > 2, "the text: level; halves the rate"
per_tile = ((us[LOOKUP] - us[DENSE]) * 132 / (1152 * 4)).loc[cross]
per_tile /= [workload(name.removesuffix("-batch-1152")).max_seqlen_q / 128 for name in cross]
steps = {
    b: _tile_law.scan_steps(of_batch(SHORT, b), cost_model.H200.sms, 128) for b in (1152, 4608)
}
ends = chain.loc[cross, "FA4 to cuDNN, dense"]
walks = jagged[LOOKUP] / jagged[WALK]
chapter.glue(
    scan_256=walk[large[0]], walks_4608=rates.loc[large[1], WALK], level=level,
    dense_4608=rates.loc[large[1], DENSE], tile_low=per_tile.min(), tile_high=per_tile.max(),
    ends_low=ends.min(), ends=ends.max(), jagged_low=walks.min(), jagged=walks.max(),
    ns=1e3 * extra[large[0]] / steps[1152], ns_4608=1e3 * extra[large[1]] / steps[4608],
    steps=steps[1152], both_low=both.min(), both=both.max(),
)  # fmt: skip
assert 1e3 * extra[large[0]] / steps[1152] > step_most, "the title: longer here"

# %% [markdown]
# - *Walk.* {glue:text}`scan_256:.2f` at 256 tokens, close to the model's. But a step takes
#   {glue:text}`ns:.0f` to {glue:text}`ns_4608:.0f` ns here, more than the fitted one. On truly
#   jagged batches the walk costs a factor of {glue:text}`jagged_low:.1f` to
#   {glue:text}`jagged:.1f`.
# - *Ragged.* With 256 keys a program with the table still takes {glue:text}`tile_low:.1f` to
#   {glue:text}`tile_high:.1f` µs of an SM more for each tile than dense. A program has one tile, so
#   nothing hides the lookup. Our guess is a chain of dependent loads.
# - *FA4 to cuDNN*, both dense, both softmax: {glue:text}`ends_low:.2f` to {glue:text}`ends:.2f`
#   with 256 keys, {glue:text}`level:.2f` with 2,048. The loops are level, beginnings and ends of
#   tiles are not. Times *ragged* it is {glue:text}`both_low:.1f` to {glue:text}`both:.1f`; the
#   model of the B200 has {glue:text}`ends_256:.1f`.
# - *cuDNN to forward v8*: softmax against GELU, and whatever else differs between two good kernels.
#
# The published comparison was fair: it timed what a user could install. That its FA4 walked is
# modelled: the publication names no commit, and sources of that month walk
# (`flash_attn/cute/tile_scheduler.py` at 10bbfd0e of Dao-AILab/flash-attention). By the model, with
# 256 keys, {glue:text}`share_low:.0f` to {glue:text}`share_high:.0f` % of the speedup (of its
# logarithm) was the walk, since replaced; nearly all the rest was how tiles begin and end.
#
# ## Surprise: the batch size of a benchmark decides a speedup
#
# At 144 sequences the walk is invisible. At 1,152 it halves the rate, and at 4,608 FA4 runs at
# {glue:text}`walks_4608:.0f` TFLOP/s, where the same kernel without offsets reaches
# {glue:text}`dense_4608:.0f`. Language models batch tens of sequences and never met it;
# recommendation models batch thousands. A speedup holds for the batch it was measured on.

# %% tags=["remove-input"]
chapter.predictions()

# %% [markdown]
# ## Exercises
#
# :::{exercise} Counting the walk
# :label: ex-fa4-steps
#
# 1,152 sequences of 256 tokens, 4 heads, tiles of 128 queries, 132 SMs. How many steps does an SM
# walk? *(paper, ten minutes)*
# :::
#
# :::{solution} ex-fa4-steps
# :class: dropdown
#
# 2 tiles a sequence and head walk 1,152 / 31 / 2 steps on average, and (256 + 127) / 128 - 2,
# almost one more program (tiles of 128 may need 127 rows more, not 255), walks all 37. Times 1,152
# × 4 / 132: {glue:text}`steps:,.0f`.
# :::
#
# :::{exercise} A cure without a new kernel
# :label: ex-fa4-split
#
# You are stuck with a version that walks. What do you do with a batch of 1,152, at what gain?
# *(paper, with the first figure)*
# :::

# %% tags=["remove-cell"]
split = 8 * us.loc[of_batch(SHORT, 144).name, WALK]
assert split < us.loc[large[0], WALK], "the answer"
chapter.glue(split=split, whole_us=us.loc[large[0], WALK], gain=us.loc[large[0], WALK] / split)

# %% [markdown]
# :::{solution} ex-fa4-split
# :class: dropdown
#
# Eight calls of 144 sequences: 8 × the measured time is {glue:text}`split:.0f` µs against
# {glue:text}`whole_us:,.0f`, a factor {glue:text}`gain:.1f`. The walk is quadratic, so an eighth of
# the batch walks a 64th, eight times.
# :::
#
# :::{exercise} Softmax on trial
# :label: ex-fa4-softmax
#
# "cuDNN to forward v8" holds softmax and everything else that differs. Which measurement would
# separate them? *(paper)*
# :::
#
# :::{solution} ex-fa4-softmax
# :class: dropdown
#
# The same kernel with both: forward v8 with a maximum, a sum and a rescaled accumulator for each
# row, the rest unchanged. Until someone writes it, the ratio says little: if cuDNN does the rest
# better than forward v8, softmax costs more than the ratio, if worse, less.
# :::
#
# ## Takeaways
#
# - A speedup is a product. Vary one factor at a time: a threshold, then the interface, then the
#   library.
# - A mechanism can be tested on the wrong machine. Its size there is another matter.
