# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# ---

# %% [markdown]
# # v0: what one would write first
#
# How far are a few lines of PyTorch from what the machine could do, and where does their time go?
#
# :::{admonition} In this chapter
# - Each score crosses memory six times, {glue:text}`v0_bytes_per_score:.0f` bytes against
#   {glue:text}`v0_flops_per_score:.0f` FLOPs. That alone keeps v0 below
#   {glue:text}`v0_intensity_percent:.0f` % of the tensor cores' rate.
# - Counted before it ran, it should take {glue:text}`v0_predicted_ms:.0f` ms; it takes
#   {glue:text}`v0_measured_ms:.0f`. The scores cost what was predicted. The padding does not.
# - A batch that is half empty takes {glue:text}`v0_half_time_percent:.0f` % of the time of a full
#   one.
# :::

# %% tags=["remove-cell"]
import inspect
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from IPython.display import Markdown, display
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gdpa_kernels import gdpa
from gdpa_kernels.gdpa import v0_eager
from gdpa_kernels.measuring import roofline, system, testing
from gdpa_kernels.measuring.inputs import cu_seqlens, make_inputs
from gdpa_kernels.measuring.workload import WORKLOADS, Workload, workload
from gdpa_kernels.report import figures, results
from gdpa_kernels.report.house import INK

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
FULL, HALF = "gdpa-self-full-1024", "gdpa-self-half-jagged-1024"

record = results.latest_record(data_dir, notebook="notebooks/forward/results.py", system="h200")
limits = results.ceilings(record)
machine = system.load(Path(data_dir) / "systems" / f"{record.system}.json")
everything = results.table(data_dir, system="h200", latest=False)
kernels = everything[
    (everything["record"] == record.id)
    & (everything["scope"] == "kernel")
    & (everything["variant"] == "")
].drop_duplicates(["workload", "impl"])
peaks = {
    (row.workload, row.impl): row.peak_bytes
    for row in record.rows
    if row.scope == "kernel" and row.peak_bytes is not None
}


def measured_us(impl: str, name: str) -> float:
    return results.one(kernels, workload=name, impl=impl)["time_us_p50"]


def code(function) -> Markdown:
    return Markdown(f"```python\n{inspect.getsource(function).rstrip()}\n```")


def storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def tensors(args: tuple, kwargs: dict | None) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]


# %% [markdown]
# ## The first attempt
#
# PyTorch multiplies matrices well, as long as they have one shape. A
# {doc}`jagged batch <../operator/gdpa>` has not, so v0 makes it so: it pads every sequence with
# zeros to the longest, multiplies, applies the activation, multiplies again, and removes the
# padding.
#
# | | v0 |
# |:--|:--|
# | work split | a library kernel for each step, over the whole padded batch |
# | data path | every intermediate result, the scores included, goes to memory and comes back |
# | synchronisation | a step begins when the last is complete |
#
# There is no rung below this one to compare with, and there are no roles and no barriers of our
# own. This is the arithmetic:

# %% tags=["remove-input"]
code(v0_eager.padded_attention)

# %% [markdown]
# and this makes the padding. Zero rows of K give scores of zero, and every activation of this book
# is zero at zero, so padded keys contribute nothing.

# %% tags=["remove-input"]
code(v0_eager.pad)

# %% [markdown]
# ## Prediction
#
# ### Bytes per score
#
# A score has 2 bytes. The first product writes it; `* scale` reads and writes it; so does the
# activation; the second product reads it. That is six crossings,
# {glue:text}`v0_bytes_per_score:.0f` bytes, for two multiply-adds per element of `head_dim`, `4 *
# head_dim` = {glue:text}`v0_flops_per_score:.0f` FLOPs: {glue:text}`v0_intensity:.0f` FLOPs per
# byte. With scale and activation in one kernel four crossings remain, 8 bytes, and 64 FLOPs per
# byte. The H200 needs {glue:text}`v0_ridge:.0f` before its tensor cores, and not its memory, are
# the limit ({doc}`../measuring/roofline`). No length changes this: FLOPs and bytes both grow with
# its square.
#
# ### All bytes
#
# The rest can be counted by the program itself. PyTorch runs on tensors of the device `meta`, which
# have a shape and no contents, and a dispatch mode sees each operation on its way. So v0 is
# executed on the full problem, 1152 sequences of 1,024 tokens, in milliseconds, without a GPU:


# %%
def account(name: str, inputs: list, result: torch.Tensor) -> tuple:
    """Bytes read, bytes written and FLOPs of one step."""
    read, written = [t.nbytes for t in inputs], result.nbytes
    if name == "index":  # a gather reads no more rows than it writes
        read[0] = min(read[0], written)
    depth = inputs[0].shape[-1] if name == "bmm" else 0
    passes = 2 if name == "masked_fill" else 1  # copies, fills the copy
    return passes * sum(read), passes * written, 2 * result.numel() * depth


class Ledger(TorchDispatchMode):
    """The steps that run inside the block, and the peak of their memory."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.steps, self.live, self.peak_bytes = [], {}, 0
        self.given = {storage(tensor) for tensor in given}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        name, inputs = op.overloadpacket.__name__, tensors(args, kwargs)
        if not op.is_view and name != "_unsafe_view":
            shapes = [tuple(t.shape) for t in (*inputs, result)]
            self.steps.append((name, shapes, *account(name, inputs, result)))
        if storage(result) not in self.given:
            self.live[storage(result)] = result.untyped_storage().nbytes()
        self.live = {s: n for s, n in self.live.items() if not s.expired()}
        self.peak_bytes = max(self.peak_bytes, sum(self.live.values()))
        return result


# %% tags=["hide-input"]
def run_on_paper(work: Workload) -> tuple[pd.DataFrame, int]:
    """v0's steps on `work`, with their modelled time in us, and the modelled peak in bytes."""
    batch = make_inputs(work, device="meta").batch()
    with Ledger(batch.q, batch.k, batch.v, batch.cu_seqlens_q, batch.cu_seqlens_k) as ledger:
        v0_eager.forward(batch)
    steps = pd.DataFrame(
        ledger.steps, columns=["op", "shapes", "bytes_read", "bytes_written", "flops"]
    )
    scores = work.batch * work.num_heads_q * work.max_seqlen_q * work.max_seqlen_k
    steps["scores"] = [any(np.prod(s) == scores for s in shapes) for shapes in steps["shapes"]]
    bytes_us = [
        (read + written) / limits.gbytes_per_s(read, written) / 1e3 if read + written else 0.0
        for read, written in zip(steps["bytes_read"], steps["bytes_written"], strict=True)
    ]
    steps["time_us"] = np.maximum(bytes_us, steps["flops"] / limits.tflops / 1e6)
    return steps, ledger.peak_bytes


paper = {name: run_on_paper(WORKLOADS[name]) for name in dict.fromkeys(kernels["workload"])}
steps, peak_bytes = paper[FULL]


# %% [markdown]
# The rules are few. A step reads each of its inputs once and writes its result once, at the rate of
# a copy with the same mix of reads and writes, or works at the rate of a large matrix product,
# whichever takes longer; steps do not overlap. Rates are the ceilings measured with the record.

# %% tags=["remove-cell"]
work = workload(FULL)
num_scores = work.batch * work.num_heads_q * work.max_seqlen_q * work.max_seqlen_k
bracket = roofline.bracket(work, "forward", limits)
score_crossings = 0
for shapes in steps["shapes"]:
    score_crossings += sum(np.prod(shape) == num_scores for shape in shapes)
assert score_crossings == 6, f"the text counts six crossings, the ledger {score_crossings}"
flops_per_score = 4 * work.head_dim
ridge = limits.tflops * 1e3 / limits.copies[0][1]
predicted_us = {name: p["time_us"].sum() for name, (p, _) in paper.items()}
fused_us = 4 * num_scores / limits.copies[0][1] / 1e3
row_bytes = work.batch * work.max_seqlen_q * work.num_heads_q * work.head_dim * 2

figures.glue_number("v0_bytes_per_score", 2 * score_crossings)
figures.glue_number("v0_flops_per_score", flops_per_score)
figures.glue_number("v0_intensity", flops_per_score / (2 * score_crossings))
figures.glue_number("v0_intensity_percent", 100 * flops_per_score / (2 * score_crossings) / ridge)
figures.glue_number("v0_ridge", ridge)
figures.glue_number("v0_predicted_ms", predicted_us[FULL] / 1e3)
figures.glue_number("v0_predicted_half_ms", predicted_us[HALF] / 1e3)
figures.glue_number("v0_floor_ms", bracket.lower_us / 1e3)
figures.glue_number(
    "v0_floor_half_ms", roofline.bracket(workload(HALF), "forward", limits).lower_us / 1e3
)
figures.glue_number("v0_gbytes", (steps["bytes_read"] + steps["bytes_written"]).sum() / 1e9)
figures.glue_number("v0_fewest_gbytes", work.bytes("forward") / 1e9)
figures.glue_number("v0_scores_gbytes", 2 * num_scores / 1e9)
figures.glue_number("v0_rows_gbytes", row_bytes / 1e9)
figures.glue_number(
    "v0_scores_share", 100 * steps["time_us"][steps["scores"]].sum() / predicted_us[FULL]
)
figures.glue_number("v0_fused_ms", fused_us / 1e3)
figures.glue_number("v0_predicted_peak_gb", peak_bytes / 1e9)

LABELS = {
    "index": "gather rows",
    "masked_fill": "zero the padding, two passes",
    "clone": "copy for the product",
    "bmm": "matrix product",
    "mul": "multiply by a scale",
    "gelu": "activation",
}
large = steps[steps["time_us"] > 0.001 * predicted_us[FULL]].copy()
assert set(large["op"]) == set(LABELS), f"the table explains other steps than {set(large['op'])}"
large["step"] = [LABELS[op] for op in large["op"]]
large["on"] = np.where(large["scores"], "scores", "rows")
summary = (
    large.groupby(["step", "on", "bytes_read", "bytes_written", "flops"], sort=False)["time_us"]
    .agg(times="size", time_us="sum")
    .reset_index()
)
shown_steps = pd.DataFrame(
    {
        "step": summary["step"],
        "on": summary["on"],
        "times": summary["times"],
        "GB read, each": summary["bytes_read"] / 1e9,
        "GB written, each": summary["bytes_written"] / 1e9,
        "modelled time (us), all": summary["time_us"].round(0),
    }
)

# %% tags=["remove-input"]
figures.show_table(shown_steps)

# %% [markdown]
# Together {glue:text}`v0_gbytes:.0f` GB, where q, k, v and the output are
# {glue:text}`v0_fewest_gbytes:.1f`. {numref}`fig-v0-timeline` shows the steps in their order.


# %% tags=["remove-cell"]
def runs(frame: pd.DataFrame) -> list[tuple[str, bool, float]]:
    """Label, whether it touches scores, and modelled ms of each step, neighbours joined."""
    joined: list[tuple[str, bool, float]] = []
    products = iter(("$QK^T$", "$PV$"))
    for row in frame.itertuples():
        if row.op == "bmm":
            label = next(products)
        elif row.scores:
            label = "scale" if row.op == "mul" else "activation"
        else:
            label = "pad and copy" if not any(j[1] for j in joined) else "unpad"
        if joined and joined[-1][0] == label:
            joined[-1] = (label, row.scores, joined[-1][2] + row.time_us / 1e3)
        else:
            joined.append((label, row.scores, row.time_us / 1e3))
    return joined


# %% tags=["remove-input"]
# | name: fig-v0-timeline
# | caption: >
# |   The modelled steps of v0 on gdpa-self-full-1024. Filled: steps on the scores. Hollow: steps on
# |   padded rows. The dashed line is the roofline of the workload. Below, the same with the scale
# |   folded into the activation, which is what a compiler can do.
# | alt: >
# |   Two stacked bars over milliseconds. Padding takes about a third of the first, the two products
# |   and the two element-wise steps on the scores nearly two thirds, unpadding the small rest. The
# |   second bar lacks one element-wise step. A dashed line near 3 ms marks the roofline.
fused = large[~((large["op"] == "mul") & large["scores"])]
with figures.style():
    figure, axis = figures.subplots(width=8.4, height=2.5)
    for row, frame in enumerate((large, fused)):
        left = 0.0
        for label, scores, width in runs(frame):
            axis.barh(
                row, width, 0.55, left=left, linewidth=1.2,
                edgecolor="white" if scores else figures.colour("v0_eager"),
                color=figures.colour("v0_eager") if scores else "none",
            )  # fmt: skip
            axis.text(
                left + width / 2 if left else 0.72 * width, row, label, ha="center", va="center",
                color="white" if scores else INK, fontsize=8,
            )  # fmt: skip
            left += width
    axis.axvline(bracket.lower_us / 1e3, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
    axis.annotate(
        "roofline", (bracket.lower_us / 1e3, 1), xycoords=("data", "axes fraction"),
        xytext=(0, 3), textcoords="offset points", ha="center",
    )  # fmt: skip
    axis.set_yticks([0, 1], ["v0", "v0, scale\nfused"])
    axis.set_ylim(1.5, -0.5)
    axis.grid(visible=False, axis="y")
    axis.set_xlabel("modelled time (ms)")
display(figure)

# %% tags=["remove-input"]
figures.save_csv(steps.drop(columns="shapes"), "v0-timeline")
figures.source(
    "modelled",
    "bytes and FLOPs of each operation that PyTorch dispatches, at the ceilings measured on "
    f"{machine.gpu} with record {record.id}.",
    csv="v0-timeline",
)

# %% [markdown]
# The predictions, all modelled:
#
# - gdpa-self-full-1024 takes {glue:text}`v0_predicted_ms:.1f` ms; the roofline is
#   {glue:text}`v0_floor_ms:.1f` ms. Scores are {glue:text}`v0_scores_share:.0f` % of it.
# - gdpa-self-half-jagged-1024, where lengths are uniform up to 1,024, takes
#   {glue:text}`v0_predicted_half_ms:.1f` ms, nearly the same, though its roofline is
#   {glue:text}`v0_floor_half_ms:.1f` ms: the padded tensors have the same size.
# - Compiled code saves two of the six crossings, {glue:text}`v0_fused_ms:.1f` ms.
# - The call needs {glue:text}`v0_predicted_peak_gb:.1f` GB beside its inputs: at the peak two
#   tensors of scores, {glue:text}`v0_scores_gbytes:.1f` GB each, and five of padded rows,
#   {glue:text}`v0_rows_gbytes:.1f` GB each.
#
# A time well above the first number would say that the steps do not run at the rates we assumed; a
# half-full batch that is much faster would say that padding is not what is paid for.
#
# ## Is it right
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
row = next(r for r in record.rows if (r.workload, r.impl, r.scope) == (FULL, "v0_eager", "kernel"))
assert row.error.passed
figures.glue_number("v0_error", row.error.max_abs)
figures.glue_number("v0_budget", row.error.budget)

# %% [markdown]
# On the GPU, on the inputs that were timed, the largest error was {glue:text}`v0_error:.2f` and the
# budget {glue:text}`v0_budget:.2f` (measured). An output is a sum over 1,024 keys, not an average,
# and from 64 on the numbers of bf16 are half a unit apart. `tests/gdpa/test_forward.py` holds v0 to
# its budget over lengths, masks, activations and head counts.
#
# ## Measurement

# %% tags=["remove-cell"]
us = {
    impl: measured_us(impl, FULL) for impl in ("v0_eager", "torch_compile", "fa2_varlen", "cudnn")
}
half_us = measured_us("v0_eager", HALF)
saved_us = us["v0_eager"] - us["torch_compile"]
assert us["v0_eager"] > 1.25 * predicted_us[FULL], "the text says that v0 is well above prediction"
assert saved_us > 1.2 * fused_us, "the text says that compiling saves more than predicted"
assert abs(peaks[FULL, "v0_eager"] - peak_bytes) < 1e6, "the text says that the peak is exact"
assert peaks[FULL, "torch_compile"] < peaks[FULL, "v0_eager"]
assert 0.85 < half_us / us["v0_eager"] < 1, "the text says that half full is hardly faster"
half = workload(HALF)
useful = half.flops("forward") / work.flops("forward")
largest = max(
    n
    for n in range(1024, 8192)
    if (
        2 * 2 * work.batch * work.num_heads_q * n * n + 8 * row_bytes * n // work.max_seqlen_q
        < machine.memory_bytes
    )
)

figures.glue_number("v0_measured_ms", us["v0_eager"] / 1e3)
figures.glue_number("v0_over_predicted", us["v0_eager"] / predicted_us[FULL])
figures.glue_number(
    "v0_percent", results.one(kernels, workload=FULL, impl="v0_eager")["percent_of_roofline"]
)
figures.glue_number("v0_compile_ms", us["torch_compile"] / 1e3)
figures.glue_number("v0_saved_ms", saved_us / 1e3)
figures.glue_number("v0_over_fa2", us["v0_eager"] / us["fa2_varlen"])
figures.glue_number("v0_peak_gb", peaks[FULL, "v0_eager"] / 1e9)
figures.glue_number("v0_compile_peak_gb", peaks[FULL, "torch_compile"] / 1e9)
figures.glue_number("v0_fa2_peak_gb", peaks[FULL, "fa2_varlen"] / 1e9)
figures.glue_number("v0_half_ms", half_us / 1e3)
figures.glue_number("v0_half_time_percent", 100 * half_us / us["v0_eager"])
figures.glue_number("v0_half_flops_percent", 100 * useful)
figures.glue_number("v0_half_over_fa2", half_us / measured_us("fa2_varlen", HALF))
figures.glue_number("v0_memory_gb", machine.memory_bytes / 1e9)
figures.glue_number("v0_longest", largest)

# %% tags=["remove-input"]
# | name: fig-v0-ladder
# | caption: >
# |   The first rung on gdpa-self-full-1024, forward, beside what one could install instead.
# | alt: >
# |   Horizontal bars of TFLOP/s. v0 is the shortest bar at about a tenth of the roofline,
# |   torch.compile a little longer; FlashAttention-2 and cuDNN, which compute softmax, are several
# |   times longer.
figures.figure_ladder(kernels, FULL, ["v0_eager"], "v0_eager")

# %% tags=["remove-input"]
ladder_rows = kernels[kernels["workload"] == FULL]
figures.save_csv(ladder_rows, "v0-ladder")
figures.provenance(ladder_rows, csv="v0-ladder")

# %% [markdown]
# v0 takes {glue:text}`v0_measured_ms:.1f` ms (measured), {glue:text}`v0_percent:.1f` % of the
# roofline and {glue:text}`v0_over_fa2:.1f` times the time of FlashAttention-2, which computes
# softmax and writes no scores. The prediction was {glue:text}`v0_predicted_ms:.1f` ms. Memory was
# predicted exactly: {glue:text}`v0_peak_gb:.1f` GB beside the inputs; FlashAttention-2 took
# {glue:text}`v0_fa2_peak_gb:.1f`, its output. With {glue:text}`v0_memory_gb:.0f` GB on the device,
# v0 ends at sequences of about {glue:text}`v0_longest:,.0f` tokens (modelled), however long one is
# prepared to wait.
#
# `torch.compile` saves {glue:text}`v0_saved_ms:.1f` ms, more than the {glue:text}`v0_fused_ms:.1f`
# of the fused scale, and does with one tensor of scores instead of two
# ({glue:text}`v0_compile_peak_gb:.1f` GB). The two products stay two library kernels, and a tensor
# of scores lies between them.
#
# ### Half full

# %% tags=["remove-cell"]
lengths_table = pd.DataFrame(
    {
        "max_seqlen": n,
        "full (ms)": measured_us("v0_eager", f"gdpa-self-full-{n}") / 1e3,
        "half full (ms)": measured_us("v0_eager", f"gdpa-self-half-jagged-{n}") / 1e3,
        "fill": WORKLOADS[f"gdpa-self-half-jagged-{n}"].fill,
        "useful FLOPs": WORKLOADS[f"gdpa-self-half-jagged-{n}"].flops("forward")
        / WORKLOADS[f"gdpa-self-full-{n}"].flops("forward"),
        "peak (GB)": peaks[f"gdpa-self-full-{n}", "v0_eager"] / 1e9,
        "FA2, full (ms)": measured_us("fa2_varlen", f"gdpa-self-full-{n}") / 1e3,
        "FA2, half full (ms)": measured_us("fa2_varlen", f"gdpa-self-half-jagged-{n}") / 1e3,
    }
    for n in (256, 512, 1024, 2048)
)

# %% tags=["remove-input"]
figures.show_table(lengths_table.round(3))

# %% [markdown]
# These are measured times. When lengths are uniform between 1 and the longest, half the rows exist
# and a third of the pairs ({doc}`../operator/workloads`): at 1,024 tokens
# {glue:text}`v0_half_flops_percent:.0f` % of the FLOPs. A kernel that works on the jagged batch can
# skip the rest, and FlashAttention-2 does. v0 takes {glue:text}`v0_half_ms:.1f` ms,
# {glue:text}`v0_half_time_percent:.0f` % of its time on the full batch, and is now
# {glue:text}`v0_half_over_fa2:.0f` times slower than FlashAttention-2.
#
# ## What did not match
#
# The prediction is off by a factor of {glue:text}`v0_over_predicted:.2f`. Which part of it? The
# record holds one time for a whole call, but it holds {glue:text}`v0_fit_count:.0f` workloads, in
# which the three kinds of data grow differently: scores with the product of the lengths, padded
# rows with the longest, rows of the output with the tokens that exist. Three coefficients, in
# milliseconds per gigabyte of each, fit all {glue:text}`v0_fit_count:.0f` measured times to
# {glue:text}`v0_fit_error:.1f` %. The same fit on the modelled times shows what they should have
# been.

# %% tags=["hide-input"]
KINDS = ["scores", "padded rows", "rows that exist"]


def gigabytes(work: Workload) -> list[float]:
    """One tensor of scores; q, k and v padded; the output."""
    row = work.head_dim * 2
    queries = work.batch * work.max_seqlen_q * work.num_heads_q
    keys = work.batch * work.max_seqlen_k * work.num_heads_q
    sizes = (2 * queries * work.max_seqlen_k, (queries + 2 * keys) * row)
    return [size / 1e9 for size in (*sizes, work.total_q * work.num_heads_q * row)]


def fit(times_us: dict[str, float]) -> tuple[np.ndarray, float]:
    """ms per GB of each kind, by least squares of relative errors, and the largest of these."""
    sizes = np.array([gigabytes(WORKLOADS[name]) for name in times_us])
    relative = sizes / np.array(list(times_us.values()))[:, None] * 1e3
    coefficients = np.linalg.lstsq(relative, np.ones(len(sizes)), rcond=None)[0]
    return coefficients, float(np.abs(relative @ coefficients - 1).max())


modelled, _ = fit(predicted_us)
found, worst = fit({name: measured_us("v0_eager", name) for name in predicted_us})
compiled, _ = fit({name: measured_us("torch_compile", name) for name in predicted_us})
parts = pd.DataFrame(
    {
        "kind": KINDS,
        "GB": gigabytes(work),
        "modelled (ms per GB)": modelled,
        "measured (ms per GB)": found,
        "ratio": found / modelled,
        "torch.compile, measured (ms per GB)": compiled,
    }
)
figures.show_table(parts.round(3))

# %% tags=["remove-cell"]
ratio = dict(zip(KINDS, found / modelled, strict=True))
assert worst < 0.03, f"the fit must hold to 3 %, got {100 * worst:.1f} %"
assert 0.9 < ratio["scores"] < 1.25, "the text says that scores cost what was predicted"
assert ratio["padded rows"] > 1.5, "the text says that padding costs far more than predicted"
assert ratio["rows that exist"] > 1.5, "the text says that padding costs far more than predicted"
assert compiled[0] < 0.8 * found[0] and compiled[1] < found[1]
split = np.array(gigabytes(work)) * found
figures.glue_number("v0_fit_count", len(predicted_us))
figures.glue_number("v0_fit_error", 100 * worst)
figures.glue_number("v0_ratio_scores", ratio["scores"])
figures.glue_number("v0_ratio_padded", ratio["padded rows"])
figures.glue_number("v0_ratio_exist", ratio["rows that exist"])
figures.glue_number("v0_rows_ms", split[1:].sum())
figures.glue_number("v0_rows_share", 100 * split[1:].sum() / split.sum())
figures.glue_number("v0_saved_scores_ms", (found - compiled)[0] * gigabytes(work)[0])
assert split[1:].sum() > split[0], "the text says that the rows cost more than the scores"

# %% tags=["remove-input"]
# | name: fig-v0-parts
# | caption: >
# |   Where the time of v0 goes on gdpa-self-full-1024: as modelled, and as the fit divides the
# |   measured times.
# | alt: >
# |   Two stacked bars over milliseconds. The part of the scores is about as long in both. The part
# |   of the padded rows is twice as long in the measured bar, and that of the rows that exist grows
# |   from a sliver to a visible piece.
with figures.style():
    figure, axis = figures.subplots(width=8.0, height=2.2)
    for position, coefficients in enumerate((modelled, found)):
        left = 0.0
        for index, (kind, width) in enumerate(
            zip(KINDS, np.array(gigabytes(work)) * coefficients, strict=True)
        ):
            axis.barh(
                position, width, 0.55, left=left, edgecolor=figures.colour("v0_eager"),
                color=figures.colour("v0_eager") if index == 0 else "none",
                hatch="////" if index == 2 else None,
            )  # fmt: skip
            if index < 2:
                axis.text(
                    left + width / 2, position, f"{kind}, {width:.1f}", ha="center", va="center",
                    color="white" if index == 0 else INK,
                )  # fmt: skip
            else:
                axis.text(left + width + 0.3, position, f"{kind}, {width:.1f}", va="center")
            left += width
    axis.set_yticks([0, 1], ["modelled", "measured"])
    axis.set_ylim(1.5, -0.5)
    axis.set_xlim(0, 1.22 * split.sum())
    axis.grid(visible=False, axis="y")
    axis.set_xlabel("time (ms)")
display(figure)

# %% tags=["remove-input"]
fitted_rows = kernels[kernels["impl"] == "v0_eager"]
figures.save_csv(parts, "v0-parts")
figures.provenance(fitted_rows, csv="v0-parts")

# %% tags=["remove-input"]
figures.source("modelled", "the upper bar: the same fit on the modelled times of all workloads.")

# %% [markdown]
# The part that was studied, six crossings of the scores, costs {glue:text}`v0_ratio_scores:.2f`
# times its prediction. The part that was taken for small change costs
# {glue:text}`v0_ratio_padded:.1f` times its prediction for padded rows and
# {glue:text}`v0_ratio_exist:.1f` times for rows that exist, and is {glue:text}`v0_rows_share:.0f` %
# of the whole, {glue:text}`v0_rows_ms:.1f` ms: more than the scores. So the assumption that failed
# is that everything moves at the rate of a copy. A gather by an index tensor computes an address
# for each element, and a copy that exchanges dimensions does not stream. The ledger is right about
# bytes and wrong about rates. Whether these are the operations in question, a total cannot tell;
# the third exercise asks a profiler.
#
# It also explains `torch.compile`. Of the {glue:text}`v0_saved_ms:.1f` ms it saves,
# {glue:text}`v0_saved_scores_ms:.1f` belong to the scores, as predicted; the others to rows.
#
# What v0 cannot escape is written in its first line: `q @ k.transpose(-1, -2)` is a tensor, and a
# tensor is in memory. What would be left to pay if no score were ever written down, and no row
# padded? That is {doc}`the next rung <v1_tiled>`.
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
# `4 * head_dim / 12` must reach {glue:text}`v0_ridge:.0f`: a head_dim of about
# {glue:text}`v0_wide_six:.0f`. With 8 bytes per score it is {glue:text}`v0_wide_four:.0f`.
# Attention heads are narrower, which is why all attention kernels worth the name avoid writing
# scores.
# :::
#
# :::{exercise} Scale the queries instead
# :label: ex-v0-scale
#
# Multiply `q` by `scale` before the first product. What does the ledger say, and what does it cost
# in accuracy at head_dim 128, and at 64? *(one change; on paper or with the ledger)*
# :::
#
# :::{solution} ex-v0-scale
# :class: dropdown
#
# Two crossings of the scores go, as with the fused scale: {glue:text}`v0_fused_ms:.1f` ms modelled.
# One pass over q comes. The scaled q is rounded to bf16, so each score inherits another relative
# error of up to $2^{-9}$ per term; but rounding the scores after `* scale` is gone. At head_dim 64
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
# elements and should come close to a copy. If it is the products that are slow, the explanation
# above is wrong, and the fit has put their cost on the wrong kind of data.
# :::
#
# ## Takeaways
#
# :::{admonition} Three things to remember
# :class: tip
#
# 1. Count crossings. At 12 bytes a score v0 does {glue:text}`v0_intensity:.0f` FLOPs per byte where
#    the machine needs {glue:text}`v0_ridge:.0f`; no library call on the way can repair that.
# 2. Padding is paid twice: in FLOPs and bytes for rows that do not exist, and in the copies that
#    make and remove them.
# 3. A prediction that fails in one term is worth more than one that fits by accident: several
#    workloads and three coefficients say which term.
# :::

# %% tags=["remove-cell"]
figures.glue_number("v0_wide_six", ridge * 12 / 4)
figures.glue_number("v0_wide_four", ridge * 8 / 4)
