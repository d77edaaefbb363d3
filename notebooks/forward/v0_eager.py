# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# ---

# %% [markdown]
# # v0: what one would write first
#
# How far are a few lines of PyTorch from what the machine could do, and where does their time go?
#
# :::{admonition} In this chapter (15 minutes)
# You will count the bytes of an eager program without running it, predict its time, and find by a
# fit over {glue:text}`workloads:.0f` workloads which part of the prediction failed. v0 takes
# {glue:text}`measured_ms:.0f` ms where the roofline is {glue:text}`floor_ms:.0f`, and more than
# half of it goes to padding.
# :::

# %%
import numpy as np
import pandas as pd
import torch

from gdpa_kernels import gdpa
from gdpa_kernels.gdpa import v0_eager
from gdpa_kernels.measuring import roofline, testing
from gdpa_kernels.measuring.inputs import cu_seqlens, make_inputs
from gdpa_kernels.measuring.workload import Workload, workload
from gdpa_kernels.report import charts, ledger, results
from gdpa_kernels.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("forward/v0_eager", mode=mode, device=device, data_dir=data_dir)
FULL, HALF, V0 = "gdpa-self-full-1024", "gdpa-self-half-jagged-1024", "v0_eager"
us = chapter.times("forward/results", direction="forward")
record = chapter.record("forward/results")
limits = results.ceilings(record)
work, half = workload(FULL), workload(HALF)
floor, half_floor = (roofline.bracket(w, "forward", limits).lower_us / 1e3 for w in (work, half))

# %% tags=["remove-input"]
# | name: fig-v0-ladder
# | caption: >
# |   The first rung on gdpa-self-full-1024, forward, and what one could install instead.
# | alt: >
# |   Horizontal bars of TFLOP/s. v0 is the shortest bar at about a tenth of the roofline,
# |   torch.compile a little longer; the kernels that compute softmax are several times longer.
chapter.ladder(V0, FULL)

# %% [markdown]
# ## The first attempt
#
# PyTorch multiplies matrices well, as long as they have one shape. A
# {doc}`jagged batch <../operator/gdpa>` has many, so v0 makes one shape of it: it pads every
# sequence with zeros to the longest, multiplies, applies the activation, multiplies again, and
# removes the padding. Each step is a library kernel over the whole padded batch, and every
# intermediate result goes through memory. This is the arithmetic:

# %% tags=["remove-input"]
chapter.code(v0_eager.padded_attention)

# %% [markdown]
# and this makes the padding. Zero rows of K give scores of zero, and every activation of this book
# is zero at zero, so padded keys contribute nothing.

# %% tags=["remove-input"]
chapter.code(v0_eager.pad)

# %% [markdown]
# ## Bytes per score
#
# A score has 2 bytes. The first matmul writes it; `* scale` reads and writes it; so does the
# activation; the second matmul reads it. That is six crossings of the memory bus, 12 bytes, for two
# multiply-adds per element of `head_dim`, `4 * head_dim` = 512 FLOPs:
# {glue:text}`intensity:.0f` FLOPs per byte. The H200 needs {glue:text}`ridge:.0f` before its tensor
# cores, and not its memory, are the limit ({doc}`../measuring/roofline`). No length changes this:
# FLOPs and bytes both grow with its square.
#
# ## All bytes
#
# The rest can be counted by the program itself. PyTorch runs on tensors of the device `meta`, which
# have a shape and no contents, and a dispatch mode sees each operation on its way:

# %% tags=["remove-input"]
chapter.code(ledger.Ledger, "def __torch_dispatch__")
chapter.code(ledger.account)

# %% [markdown]
# A step reads each of its inputs once and writes its result once. It runs at the rate of a copy
# with the same mix of reads and writes, or at the rate of a large matmul, whichever takes longer;
# steps do not overlap. Rates are the ceilings measured with the record. So v0 is executed on the
# full problem, 1152 sequences of 1,024 tokens, in milliseconds, without a GPU:


# %%
def gigabytes(work: Workload) -> dict[str, float]:
    """One tensor of scores; q, k and v padded; the output."""
    heads, row = work.batch * work.num_heads_q, 2 * work.head_dim
    return {
        "scores": 2e-9 * heads * work.max_seqlen_q * work.max_seqlen_k,
        "padded rows": 1e-9 * heads * row * (work.max_seqlen_q + 2 * work.max_seqlen_k),
        "output rows": 1e-9 * row * work.num_heads_q * work.total_q,
    }


def on_paper(work: Workload) -> tuple[pd.DataFrame, int]:
    """v0's steps, with their modelled time in us and whether they touch scores; the peak."""
    batch = make_inputs(work, device="meta").batch()
    given = (batch.q, batch.k, batch.v, batch.cu_seqlens_q, batch.cu_seqlens_k)
    steps, peak_bytes = ledger.count(lambda: v0_eager.forward(batch), *given)
    scores = (work.batch, work.num_heads_q, work.max_seqlen_q, work.max_seqlen_k)
    flat = (work.batch * work.num_heads_q, *scores[2:])  # what a matmul sees
    steps["scores"] = [sum(shape in (scores, flat) for shape in all_) for all_ in steps["shapes"]]
    return steps.assign(us=ledger.modelled_us(steps, limits)), peak_bytes


paper = {name: on_paper(workload(name)) for name in us.index}
steps, peak_bytes = paper[FULL]
predicted_us = pd.Series({name: made["us"].sum() for name, (made, _) in paper.items()})
assert steps["scores"].sum() == 6  # crossings
ridge = limits.tflops * 1e3 / limits.copies[0][1]  # FLOPs per byte; a copy reads what it writes
score_gb = gigabytes(work)["scores"]
fused_ms = 2 * score_gb / limits.copies[0][1] * 1e3  # two crossings

# %% tags=["remove-cell"]
chapter.glue(
    workloads=len(us), measured_ms=us[V0][FULL] / 1e3, floor_ms=floor, ridge=ridge,
    intensity=512 / 12, gbytes=steps[["bytes_read", "bytes_written"]].to_numpy().sum() / 1e9,
    fewest_gbytes=work.bytes("forward") / 1e9, scores_gbytes=score_gb, fused_ms=fused_ms,
    scores_share=100 * steps["us"][steps["scores"] > 0].sum() / predicted_us[FULL],
)  # fmt: skip

# %% [markdown]
# Together {glue:text}`gbytes:.0f` GB, where q, k, v and the output are
# {glue:text}`fewest_gbytes:.1f`. Scores are {glue:text}`scores_share:.0f` % of the modelled time.
# Steps in order, those on padded rows together:

# %%
names = iter(("$QK^T$", "scale", "activation", "$PV$"))
last = steps.index[steps["scores"] > 0].max()
steps["part"] = [
    next(names) if touched else "pad and copy" if number < last else "unpad"
    for number, touched in enumerate(steps["scores"])
]
parts = steps.groupby("part", sort=False)["us"].sum().to_frame("v0").T / 1e3
parts.loc["v0, scale\nfused"] = parts.loc["v0"].where(parts.columns != "scale", 0)

# %% tags=["remove-input"]
# | name: fig-v0-timeline
# | caption: >
# |   The steps of v0 on gdpa-self-full-1024, in modelled milliseconds. Filled: steps on the scores.
# |   Hollow: steps on padded rows. Dashed: the roofline. Below, the same with the scale folded into
# |   the activation, which is what a compiler can do.
# | alt: >
# |   Two stacked bars over milliseconds. Padding takes about a third of the first, the two matmuls
# |   and the two element-wise steps on the scores nearly two thirds, unpadding the small rest. The
# |   second bar lacks one element-wise step. A dashed line near 3 ms marks the roofline.
looks = {name: "hollow" if "pad" in name else "filled" for name in parts}
options = {"xlabel": "time (ms)", "hue": V0, "inside": True, "ceiling": floor}
chart = charts.stacked(parts, looks=looks, **options)
chapter.figure(chart, data=steps.drop(columns="shapes"), modelled=f"ceilings of {record.id}")

# %% [markdown]
# A time well above this sum would say that the steps do not run at the rates we assumed. A
# half-full batch that is much faster would say that padding is not what is paid for.

# %% tags=["remove-input"]
peaks = {(r.workload, r.impl): r.peak_bytes for r in record.rows if r.scope == "kernel"}
half_full = us[V0][HALF] / us[V0][FULL]
saved_ms = (us[V0] - us["torch_compile"])[FULL] / 1e3
predicted_ms = predicted_us[FULL] / 1e3
chapter.predict(
    f"The whole takes what the steps add up to, {predicted_ms:.1f} ms (25 % for what is not "
    "counted).", us[V0][FULL] / 1e3, most=1.25 * predicted_ms, form=".1f", unit=" ms",
)  # fmt: skip
chapter.predict(
    "A half-full batch has the same padded shapes and takes nearly the same time, though its "
    f"roofline is {half_floor:.1f} ms: the ratio.", half_full, least=0.85,
)  # fmt: skip
chapter.predict(
    f"torch.compile saves two crossings of the scores, {fused_ms:.1f} ms, and no more than 20 % "
    "on top.", saved_ms, most=1.2 * fused_ms, form=".1f", unit=" ms",
)  # fmt: skip
found, least = peaks[FULL, V0] / 1e9, (peak_bytes - 1e6) / 1e9
chapter.predict(
    "Peak memory is the ledger's.", found, least=least, most=least + 0.002, form=".3f", unit=" GB"
)

# %% [markdown]
# ## Is it right?
#
# v0 needs no GPU. A batch with an empty sequence, on this CPU, against the definition in double
# precision. The error budget is computed, not chosen ({doc}`../measuring/protocol`):

# %%
torch.manual_seed(0)
lengths = [130, 0, 33, 64]
ends = cu_seqlens(lengths, "cpu")
q, k, v = (torch.randn(sum(lengths), 2, 64).bfloat16() for _ in range(3))
call = (ends, ends, max(lengths), max(lengths))
comparison = testing.compare(
    name="out",
    actual=gdpa(q, k, v, *call, impl="v0_eager"),
    expected=gdpa(q.double(), k.double(), v.double(), *call, impl="reference"),
    baseline=gdpa(q, k, v, *call, impl="reference"),
)
assert comparison.passed
print(f"max error {comparison.max_abs:.3f}, budget {comparison.max_abs_budget:.3f}")

# %% tags=["remove-cell"]
fa2 = us[V0] / us["fa2_varlen"]
chapter.glue(
    percent=1e5 * floor / us[V0][FULL], over_fa2=fa2[FULL], half_over_fa2=fa2[HALF], peak_gb=found,
    fa2_peak_gb=peaks[FULL, "fa2_varlen"] / 1e9, half_percent=100 * half_full, saved_ms=saved_ms,
    useful=100 * half.flops("forward") / work.flops("forward"),
)  # fmt: skip

# %% [markdown]
# ## Measurement
#
# v0 reaches {glue:text}`percent:.0f` % of the roofline and takes {glue:text}`over_fa2:.1f` times
# the time of FlashAttention-2, which computes softmax and writes no scores. It allocates
# {glue:text}`peak_gb:.0f` GB: two tensors of scores, {glue:text}`scores_gbytes:.1f` GB each, and
# the padded rows. FlashAttention-2 allocates its output, {glue:text}`fa2_peak_gb:.1f` GB.
# `torch.compile` needs one tensor of scores instead of two; its two matmuls stay library kernels
# with the scores between them.
#
# On gdpa-self-half-jagged-1024, where lengths are uniform up to 1,024, only
# {glue:text}`useful:.0f` % of the FLOPs are useful ({doc}`../operator/workloads`). A kernel that
# works on the jagged batch skips the rest. v0 takes {glue:text}`half_percent:.0f` % of its time on
# the full batch, and is now {glue:text}`half_over_fa2:.0f` times slower than FlashAttention-2.
#
# ## The surprise: padding costs more than the scores
#
# The prediction is off by a factor of {glue:text}`over_predicted:.2f`. Which part of it? The record
# holds one time for a whole call, but for {glue:text}`workloads:.0f` workloads, in which three
# kinds of data grow differently: scores with the product of the lengths, padded rows with the
# longest, rows of the output with the tokens that exist. Fit milliseconds per gigabyte of each, to
# the measured times and to the modelled ones:

# %%
sizes = pd.DataFrame({name: gigabytes(workload(name)) for name in us.index}).T


def fit(times_us: pd.Series) -> tuple[pd.Series, float]:
    """ms per GB of each kind, by least squares of relative errors, and the largest of these."""
    relative = sizes.div(times_us / 1e3, axis=0)
    found = np.linalg.lstsq(relative, np.ones(len(sizes)), rcond=None)[0]
    return pd.Series(found, sizes.columns), (relative @ found - 1).abs().max()


modelled, _ = fit(predicted_us)
measured, fit_error = fit(us[V0])
compiled, _ = fit(us["torch_compile"])

# %% tags=["remove-input"]
# | name: fig-v0-parts
# | caption: >
# |   Where the time of v0 goes on gdpa-self-full-1024: as modelled, and as the fit divides the
# |   measured times. Dashed: the roofline.
# | alt: >
# |   Two stacked bars over milliseconds. The part of the scores is about as long in both. The part
# |   of the padded rows is twice as long in the measured bar, and that of the output rows grows
# |   from a sliver to a visible piece.
split = pd.DataFrame({"modelled": modelled, "measured": measured}).T * sizes.loc[FULL]
looks = {"scores": "filled", "padded rows": "hollow", "output rows": "pale"}
chart = charts.stacked(split, looks=looks, **options)
chapter.figure(chart, measured=chapter.rows("forward/results", direction="forward", impl=V0))

# %% tags=["remove-cell"]
worse, rows_ms = measured / modelled, split.loc["measured"].drop("scores").sum()
assert fit_error < 0.03 and worse["scores"] < 1.25 < 1.5 < worse["padded rows"], "as in the text"
chapter.glue(
    over_predicted=us[V0][FULL] / predicted_us[FULL], fit_error=100 * fit_error, rows_ms=rows_ms,
    worse_scores=worse["scores"], worse_padded=worse["padded rows"],
    worse_output=worse["output rows"], rows_share=100 * rows_ms / split.loc["measured"].sum(),
    compile_scores_ms=(measured - compiled)["scores"] * score_gb,
)  # fmt: skip

# %% [markdown]
# The fit holds to {glue:text}`fit_error:.1f` % on every workload. Six crossings of the scores, the
# part we studied, cost {glue:text}`worse_scores:.2f` times their prediction. Padded rows cost
# {glue:text}`worse_padded:.1f` times theirs and output rows {glue:text}`worse_output:.1f` times:
# {glue:text}`rows_ms:.0f` ms, {glue:text}`rows_share:.0f` % of the whole. The assumption that
# failed is that everything moves at the rate of a copy. A gather by an index tensor computes an
# address for each element, and a copy that exchanges dimensions does not stream. The ledger is
# right about bytes and wrong about rates. Whether these are the slow operations a total cannot
# tell; the third exercise asks a profiler.
#
# It also explains `torch.compile`. Of the {glue:text}`saved_ms:.1f` ms it saves,
# {glue:text}`compile_scores_ms:.1f` belong to the scores, as predicted; the others to rows.
#
# What v0 cannot escape is written in its first line: `q @ k.transpose(-1, -2)` is a tensor, and a
# tensor is in memory. {doc}`The next rung <v1_tiled>` writes no score down and pads no row.
#
# ## Exercises
#
# :::{exercise} Wide heads
# :label: ex-v0-head-dim
#
# From which head_dim on would the tensor cores be the limit of v0's six crossings? And of four?
# *(paper, five minutes)*
# :::
#
# :::{solution} ex-v0-head-dim
# :class: dropdown
#
# `4 * head_dim / 12` must reach {glue:text}`ridge:.0f`: a head_dim of three times that. With 8
# bytes per score it is twice that. Attention heads are narrower, which is why fast attention
# kernels do not write scores.
# :::
#
# :::{exercise} Scale the queries instead
# :label: ex-v0-scale
#
# Multiply `q` by `scale` before the first matmul. What does the ledger say, and what does it cost
# in accuracy at head_dim 128, and at 64? *(one change; on paper or with the ledger)*
# :::
#
# :::{solution} ex-v0-scale
# :class: dropdown
#
# Two crossings of the scores go, as with the fused scale: {glue:text}`fused_ms:.1f` ms modelled.
# One pass over q comes. The scaled q is rounded to bf16, so each term of a score inherits another
# relative error of up to $2^{-9}$; but rounding the scores after `* scale` is gone. At head_dim 64
# the scale is 1/8, a power of two, and nothing is rounded.
# :::
#
# :::{exercise} Ask a profiler
# :label: ex-v0-profile
#
# Run v0 under `torch.profiler` on a GPU and divide the bytes of each step in the ledger by the time
# of its kernel. Which steps reach the rate of a copy, and do the others account for the difference?
# Then replace the worst. *(a GPU)*
# :::
#
# :::{solution} ex-v0-profile
# :class: dropdown
#
# The fit says what to expect: steps on the scores near the rate of a copy, gathers and copies of
# rows far below it. A gather that moves whole rows needs one address for `heads * head_dim`
# elements and should come close to a copy. If it is the matmuls that are slow, the explanation
# above is wrong, and the fit has put their cost on the wrong kind of data.
# :::
#
# ## Takeaways
#
# - Count crossings. At 12 bytes a score v0 does {glue:text}`intensity:.0f` FLOPs per byte where the
#   machine needs {glue:text}`ridge:.0f`; no library call can repair that.
# - Padding is paid twice: in FLOPs and bytes for rows that do not exist, and in the copies that
#   make and remove them.
# - When a prediction fails, find the term that failed: several workloads and three coefficients
#   are enough.
