# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Forward v0: eager
#
# How far are a few lines of PyTorch from what the machine could do, and where does their time go?
#
# :::{admonition} In this chapter (25 minutes)
# You will count the bytes of an eager program without running it, predict its time, and find by a
# fit which part of the prediction failed. Back to back forward v0 takes
# {glue:text}`measured_ms:.0f` ms where the roofline is {glue:text}`floor_ms:.0f` ms.
# :::

# %% tags=["hide-input"]
import numpy as np
import pandas as pd

from _lib import rare_charts, studies
from _lib.listings import decided
from gdpa_kernels.gdpa.kernels import v0_eager
from gdpa_lab.measuring import roofline
from gdpa_lab.measuring.inputs import make_inputs
from gdpa_lab.measuring.workload import Workload
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import results
from gdpa_lab.report.chapter import Chapter
from notebooks.forward import _counted

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("forward/v0_eager", mode=mode, device=device, data_dir=data_dir)
FULL, SHORT, HALF = "gdpa-self-full-1024", "gdpa-self-full-256", "gdpa-self-half-jagged-256"
V0 = "v0_eager"
us = chapter.times("forward/results", direction="forward").dropna(subset=["v0_eager"])
record = chapter.record("forward/results")
loop = chapter.rows("forward/results", scope="sustained", workload=FULL, impl=V0).iloc[0]
limits = results.ceilings(record)
work, half, short = map(workload, (FULL, HALF, SHORT))
floor, half_floor = (roofline.bracket(w, "forward", limits).lower_us / 1e3 for w in (work, half))

# %% tags=["remove-input"]
# | name: fig-v0-ladder
# | caption: >
# |   **Forward v0 takes several times as long as what one could install instead.** Time of each
# |   rung on gdpa-self-full-1024, back to back; each tick leads to its chapter. Dashed:
# |   libraries.
# | alt: >
# |   An axis of milliseconds with a tick for each rung and dashed lines for the libraries. v0
# |   stands beyond the right end.
chapter.ladder(V0)

# %% [markdown]
# ## The first attempt
#
# PyTorch multiplies matrices well, as long as they have one shape. A {doc}`jagged batch
# <../operator/gdpa>` has many, so v0 pads every sequence with zeros, multiplies, applies the
# activation, multiplies again, and removes the padding. Each step is a library kernel over the
# whole padded batch, and every result goes through memory. The arithmetic, and the gather that
# makes the padding:

# %% tags=["remove-input"]
plain = {"added": None, "causal": False, "window": None, "len": len, "activation": ("gelu_tanh",)}
arithmetic = decided(v0_eager.padded_attention, **plain).splitlines()
unmasked = "\n".join(line for line in arithmetic if "rows, keys" not in line)
chapter.code(unmasked, "s = q @")
chapter.code(v0_eager.pad, "rows =")

# %% [markdown]
# Padded keys contribute nothing, since every activation of this book is zero at zero.

# %% [markdown]
# ## Bytes per score
#
# A score has 2 bytes. The first matmul writes it; `* scale` reads and writes it; so does the
# activation; the second matmul reads it. That is six crossings of the memory bus, 12 bytes, for
# `4 * head_dim` = 512 FLOPs: {glue:text}`intensity:.0f` FLOPs per byte at any length. The H200
# needs {glue:text}`ridge:.0f` before its tensor cores are the limit
# ({doc}`../measuring/roofline`).
#
# ## All bytes
#
# The program can count the rest itself: tensors on the device `meta` have a shape and no contents,
# and PyTorch's `TorchDispatchMode` sees each operation on them. We assume that a step reads each of
# its inputs once, writes its result once, and takes the longer of bytes and FLOPs at our
# {ref}`ceilings <rule-ceiling>`.


# %% tags=["hide-input"]
def gigabytes(work: Workload) -> dict[str, float]:
    """One tensor of scores; q, k and v padded; the output."""
    heads, row = work.batch * work.num_heads_q, 2 * work.head_dim
    return {
        "scores": 2e-9 * heads * work.max_seqlen_q * work.max_seqlen_k,
        "padded rows": 1e-9 * heads * row * (work.max_seqlen_q + 2 * work.max_seqlen_k),
        "output rows": 1e-9 * row * work.num_heads_q * work.total_q,
    }


def on_paper(work: Workload) -> pd.DataFrame:
    """v0's steps, with their modelled time in us and how often they touch scores."""
    batch = make_inputs(work, device="meta").batch()
    inputs = (batch.q, batch.k, batch.v, batch.cu_seqlens_q, batch.cu_seqlens_k)
    steps, _ = _counted.count(lambda: v0_eager.forward(batch), *inputs)
    scores = (work.batch, work.num_heads_q, work.max_seqlen_q, work.max_seqlen_k)
    flat = (work.batch * work.num_heads_q, *scores[2:])  # what a matmul sees
    steps["scores"] = [sum(shape in (scores, flat) for shape in all_) for all_ in steps["shapes"]]
    return steps.assign(us=_counted.modelled_us(steps, limits))


paper = {name: on_paper(workload(name)) for name in us.index}
steps = paper[FULL]
predicted_us = pd.Series({name: counted["us"].sum() for name, counted in paper.items()})
assert steps["scores"].sum() == 6  # crossings
ridge = limits.tflops * 1e3 / limits.copies[0][1]  # FLOPs per byte; a copy reads what it writes
fused_ms = 2e3 * gigabytes(work)["scores"] / limits.copies[0][1]  # two crossings

# %% tags=["remove-cell"]
chapter.glue(
    workloads=len(us), measured_ms=loop["time_us_p50"] / 1e3,
    floor_ms=loop["time_us_p50"] * loop["percent_of_roofline"] / 1e5, ridge=ridge,
    intensity=512 / 12, gbytes=steps[["bytes_read", "bytes_written"]].to_numpy().sum() / 1e9,
    fewest_gbytes=work.bytes("forward") / 1e9, fused_ms=fused_ms,
    scores_share=100 * steps["us"][steps["scores"] > 0].sum() / predicted_us[FULL],
)  # fmt: skip

# %% [markdown]
# Together the steps move {glue:text}`gbytes:.0f` GB, where q, k, v and the output have
# {glue:text}`fewest_gbytes:.1f`. Steps on the scores take {glue:text}`scores_share:.0f` % of the
# modelled time. From this count follow two predictions (from here on times are
# {ref}`in bursts <rule-scope>`):

# %% tags=["remove-input"]
half_full = us[V0][HALF] / us[V0][SHORT]
saved_ms = (us[V0] - us["torch_compile"])[FULL] / 1e3
predicted_ms = predicted_us[FULL] / 1e3
chapter.predict(
    f"The whole takes what the steps add up to, {predicted_ms:.1f} ms (25 % for what is not "
    "counted).", us[V0][FULL] / 1e3, most=1.25 * predicted_ms, form=".1f", unit=" ms",
)  # fmt: skip
chapter.predict(
    "A half-full batch has the same padded shapes and takes nearly the time of the full one, "
    f"though its roofline is {half_floor:.1f} ms: the ratio of times.", half_full, least=0.85,
)  # fmt: skip
chapter.predict(
    f"torch.compile saves two crossings of the scores, {fused_ms:.1f} ms, and no more than 20 % "
    "on top.", saved_ms, most=1.2 * fused_ms, form=".1f", unit=" ms", shown=False,
)  # fmt: skip
chapter.predictions()

# %% [markdown]
# ## Is it right?
#
# A batch with an empty sequence on this CPU, against the definition in double precision
# ({doc}`../measuring/protocol` computes the allowed error):

# %% tags=["hide-input"]
checked = studies.comparison(v0_eager, studies.batch((130, 0, 33, 64), heads=2, head_dim=64))
print(f"largest error: {(checked['largest error'] / checked['allowed']).max():.2f} of the allowed")

# %% tags=["remove-cell"]
fa2 = us[V0] / us["fa2_varlen"]
chapter.glue(
    percent=1e5 * floor / us[V0][FULL], over_fa2=fa2[FULL], half_over_fa2=fa2[HALF],
    half_percent=100 * half_full, useful=100 * half.flops("forward") / short.flops("forward"),
)  # fmt: skip

# %% [markdown]
# ## Measurement
#
# v0 reaches {glue:text}`percent:.0f` % of the {term}`roofline`. FlashAttention-2, which computes
# softmax and writes no scores, is {glue:text}`over_fa2:.1f` times as fast. With lengths uniform up
# to 256 only {glue:text}`useful:.0f` % of the FLOPs are useful, and v0 still takes
# {glue:text}`half_percent:.0f` % of its time on the full batch. FlashAttention-2 skips the padding
# and is {glue:text}`half_over_fa2:.0f` times as fast.
#
# ## The surprise: the padded layout costs as much as the scores
#
# The prediction is off by a factor of {glue:text}`over_predicted:.2f`. Which part of it is wrong?
# The record holds times of whole calls on {glue:text}`workloads:.0f` workloads, in which three
# kinds of data grow differently: scores with the product of the lengths, padded rows with the
# longest length, and rows of the output with the tokens that exist. So we fit three coefficients,
# milliseconds per gigabyte of each kind, to the measured times, and three to the modelled ones.

# %% tags=["hide-input"]
sizes = pd.DataFrame({name: gigabytes(workload(name)) for name in us.index}).T


def fit(times_us: pd.Series) -> tuple[pd.Series, float]:
    """ms per GB of each kind, by least squares of relative errors, and the largest of these."""
    relative = sizes.div(times_us / 1e3, axis=0)
    coefficients = np.linalg.lstsq(relative, np.ones(len(sizes)), rcond=None)[0]
    return pd.Series(coefficients, sizes.columns), (relative @ coefficients - 1).abs().max()


modelled, _ = fit(predicted_us)
measured, fit_error = fit(us[V0])

# %% tags=["remove-input"]
# | name: fig-v0-parts
# | caption: >
# |   **The scores cost what the count said; the padded rows cost twice as much.** Time on
# |   gdpa-self-full-1024, as modelled and as the fit divides the measured times, in bursts. Dashed:
# |   the roofline.
# | alt: >
# |   Two stacked bars over milliseconds. The part of the scores is about as long in both. The part
# |   of the padded rows is twice as long in the measured bar, and that of the output rows grows
# |   from a sliver to a visible piece.
split = pd.DataFrame({"modelled": modelled, "measured": measured}).T * sizes.loc[FULL]
looks = {"scores": "filled", "padded rows": "hollow", "output rows": "pale"}
chart = rare_charts.stacked(
    split, looks=looks, xlabel="ms", hue=V0, inside=True, levels={"roof": floor}
)
chapter.figure(chart, measured=chapter.rows("forward/results", direction="forward", impl=V0))

# %% tags=["remove-cell"]
worse, rows_ms = measured / modelled, split.loc["measured"].drop("scores").sum()
assert 0.4 < rows_ms / split.loc["measured"].sum() < 0.6, "the titles: half, as much"
assert fit_error < 0.03 and worse["scores"] < 1.25 < 1.5 < worse["padded rows"], "as in the text"
chapter.glue(
    over_predicted=us[V0][FULL] / predicted_us[FULL], fit_error=100 * fit_error, rows_ms=rows_ms,
    worse_scores=worse["scores"], worse_padded=worse["padded rows"],
    worse_output=worse["output rows"], rows_share=100 * rows_ms / split.loc["measured"].sum(),
)  # fmt: skip

# %% [markdown]
# The fit holds to {glue:text}`fit_error:.1f` % on every workload. The scores cost
# {glue:text}`worse_scores:.2f` times their prediction, padded rows {glue:text}`worse_padded:.1f`
# times theirs and output rows {glue:text}`worse_output:.1f` times: {glue:text}`rows_ms:.0f` ms,
# {glue:text}`rows_share:.0f` % of the whole. What failed is the assumption that everything moves at
# the rate of a copy. A gather by an index tensor computes an address for each element, and a copy
# that exchanges dimensions does not stream; the third exercise asks a profiler.
#
# One cost remains whatever we repair: `q @ k.transpose(-1, -2)` is a tensor, and a tensor lives in
# memory. {doc}`Forward v1 <v1_tiled>` never writes the scores and pads no row.
#
# ## Exercises
#
# :::{exercise} Wide heads
# :label: ex-v0-head-dim
#
# From which head_dim on would the tensor cores limit v0 with six crossings? With four? *(paper,
# five minutes)*
# :::
#
# :::{solution} ex-v0-head-dim
# :class: dropdown
#
# `4 * head_dim / 12` must reach {glue:text}`ridge:.0f`, so head_dim must be three times that; with
# 8 bytes per score, twice that. Attention heads are narrower.
# :::
#
# :::{exercise} Scale the queries instead
# :label: ex-v0-scale
#
# Multiply `q` by `scale` before the first matmul. What does the count say, and what does it cost
# in accuracy at head_dim 128, and at 64? *(paper, ten minutes)*
# :::
#
# :::{solution} ex-v0-scale
# :class: dropdown
#
# Two crossings of the scores go: {glue:text}`fused_ms:.1f` ms modelled.
# One pass over q comes. The scaled q is rounded to bf16, so each term of a score inherits another
# relative error of up to $2^{-9}$; but rounding the scores after `* scale` is gone. At head_dim 64
# the scale is 1/8, a power of two, and nothing is rounded.
# :::
#
# :::{exercise} Ask a profiler
# :label: ex-v0-profile
#
# Run v0 under `torch.profiler` on a GPU and divide the bytes of each step in the count by the time
# of its kernel. Which steps reach the rate of a copy, and do the others account for the difference?
# Then replace the worst. *(GPU, an hour)*
# :::
#
# :::{solution} ex-v0-profile
# :class: dropdown
#
# Matmuls and passes over the scores run near the rate of a copy, copies of rows far below it: each
# thread computes an address for two bytes ({doc}`../measuring/profiles`).
# :::
#
# ## Takeaways
#
# - Count crossings: no library call changes them.
# - You pay for padding twice: in FLOPs and bytes for missing rows, and in copies that make and
#   remove them.
# - When a prediction fails, find the term that failed by a fit over several workloads.
