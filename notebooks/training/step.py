# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # A training step
#
# These kernels are said to raise training throughput by more than 30 % {cite}`xu2026gdpa`. Of which
# model, on which histories, compared with what?
#
# :::{admonition} In this chapter (20 minutes)
# You will split a training step into kinds of operators, and predict from the shares what replacing
# one of them is worth. On the H200 our attention makes a compiled step {glue:text}`attention` times
# as fast as v1's.
# :::

# %% tags=["hide-input"]
from itertools import chain

from _lib import rare_charts, steps
from _lib.ratios import spread
from gdpa_lab.measuring import record
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("training/step", mode=mode, device=device, data_dir=data_dir)
LAWS = {
    "half-full 1,024": ["--law", "half"],
    "MovieLens 25M events": ["--law", "ml25m", "--rows", "events"],
    "KuaiRand 2,048": ["--law", "kuairand1k", "--max-seqlen", 2048, "--batch", 384],
}
BF16, FUSED = ["--stream", "autocast"], ["--norms", "fused"]
WAYS = {
    "eager": [],
    "compiled, lookups": ["--compile", "--embedding", "lookups"],
    "compiled": ["--compile"],
    "compiled, bf16": ["--compile", *BF16],
    "fused norms": ["--compile", *FUSED],
    "fused, bf16": ["--compile", *FUSED, *BF16],
    "blocks of 64": ["--compile", "--mixer", "block"],
    "HSTULite": ["--compile", "--model", "hstu"],
}
PLAN = {(law, "eager"): ["gdpa", "v1", "fa2_varlen", "padded_sdpa"] for law in list(LAWS)[:2]}
PLAN |= {(law, "compiled"): ["gdpa", "v1"] for law in LAWS}
PLAN |= {(law, "fused, bf16"): ["gdpa"] for law in LAWS}
PLAN |= {
    ("half-full 1,024", "compiled"): ["gdpa", "v1", "fa2_varlen"],
    ("half-full 1,024", "fused norms"): ["gdpa"],
    **{("half-full 1,024", way): ["gdpa", "v1"]
       for way in ("compiled, lookups", "compiled, bf16", "blocks of 64", "HSTULite")},
}  # fmt: skip
PARTS = ("step_s", "forward_s", "backward_s", "optimizer_s", "attention_alone_s", "samples_per_s",
         "tflops", "tokens", "peak_memory_gib")  # fmt: skip
KINDS = ("attention", "norm", "matmul", "embedding", "optimizer", "compiled", "other")


@chapter.measure
def _(session):
    lines, samples = [], []

    def of(law, gpu):  # all on one board: boards differ
        lines_of = []
        for way in [way for way in WAYS if (law, way) in PLAN]:
            options = [*LAWS[law], *WAYS[way], "--warmup", 3, "--repeats", 8]
            options += ["--attentions", *PLAN[law, way]]
            rows = steps.run("step", *options, gpu=gpu, timeout=600)
            lines_of += [(law, way, row) for row in rows]
        return lines_of

    for law, way, row in chain(*steps.one_a_gpu(of, LAWS, steps.gpus())):
        kinds = [row["kinds_s"].get(kind, 0.0) for kind in KINDS]
        what = law, way, row["attention"]
        lines.append((*what, *(row[part] for part in PARTS), *kinds))
        samples += [(*what, part, i, s) for part, each in row["samples_s"].items()
                    for i, s in enumerate(each)]  # fmt: skip
    ids, kinds = ("law", "way", "kernel"), (f"{kind}_kind_s" for kind in KINDS)
    session.tables["steps"] = record.Table((*ids, *PARTS, *kinds), tuple(lines))
    session.tables["samples"] = record.Table((*ids, "part", "sample", "time_s"), tuple(samples))


steps_of = chapter.recorded("steps").set_index(["law", "way", "kernel"])
ms = 1e3 * steps_of["step_s"].unstack("kernel")
HALF, EVENTS, LONG = LAWS
ours, v1 = ms["gdpa"].unstack("way"), ms["v1"].unstack("way")
gain = v1 / ours
both = v1["compiled"] / ours["fused, bf16"]
kinds = steps_of[[f"{kind}_kind_s" for kind in KINDS]].mul(1e3)
kinds.columns = list(KINDS)
share = kinds["norm"] / kinds.sum(axis=1)
passes = 1 - (kinds["matmul"] + kinds["attention"]) / kinds.sum(axis=1)
assert passes[HALF, "eager", "v1"] > 0.5, "the text: most of an eager step"
eager_norm = 100 * share[HALF, "eager", "gdpa"]
attention, fused = kinds["attention"] / kinds.sum(axis=1), ours["fused, bf16"][HALF]
WAY = "compiled, lookups", "compiled", "fused, bf16"
LOOKUPS, COMPILED, FUSED_AT = ((HALF, way, "gdpa") for way in WAY)
cool = 100 * (1 - attention - kinds["matmul"] / kinds.sum(axis=1))
saves = ours["compiled, lookups"] - ours["compiled"], ours["compiled"] - ours["fused norms"]
assert saves[0][HALF] > saves[1][HALF], "the text: tables were worth more than fused norms"
over = gain["eager"][HALF] > 1.13 < gain["eager"][EVENTS] and gain["compiled"][HALF] > 1.20
assert over and gain["compiled"][LONG] <= 1.36 and both.min() < 1.45, "the text under the verdicts"
assert gain["compiled"].idxmax() == LONG, "the text: most with the longest histories"
chapter.glue(
    attention=spread(gain.loc[list(LAWS), "compiled"]),
    fused_fp32=v1["compiled"][HALF] / ours["fused norms"][HALF],
    fused=fused, matmul=ours["compiled"][HALF],
    fused_only=ours["fused norms"][HALF], bf16_only=ours["compiled, bf16"][HALF],
    everything=v1["compiled, lookups"][HALF] / fused, norm_eager=eager_norm,
    share_v1=100 * attention[HALF, "compiled", "v1"], norm_compiled=100 * share[COMPILED],
    most=1 / (1 - attention[HALF, "compiled", "v1"]), cool=cool[COMPILED],
    padded=spread(ms["padded_sdpa"].dropna() / ms["gdpa"].xs("eager", level="way")),
    lookups=ours["compiled, lookups"][HALF], tokens=steps_of["tokens"][LOOKUPS],
    atomics=kinds["embedding"][LOOKUPS], left=100 - cool[FUSED_AT],
    embedding_gain=ours["compiled, lookups"][HALF] / ours["compiled"][HALF],
)  # fmt: skip
chapter.predict(
    "Our attention makes an eager step on half-full batches of 1,024 tokens 1.08 to 1.13 times as "
    "fast as v1's.",
    gain["eager"][HALF], least=1.08, most=1.13, shown=False,
)  # fmt: skip
chapter.predict(
    "Our attention makes an eager step on MovieLens 25M events 1.08 to 1.13 times as fast as v1's.",
    gain["eager"][EVENTS], least=1.08, most=1.13, shown=False,
)  # fmt: skip
chapter.predict(
    "Our attention makes a compiled step on half-full batches of 1,024 tokens 1.15 to 1.20 times "
    "as fast as v1's.",
    gain["compiled"][HALF], least=1.15, most=1.20,
)  # fmt: skip
chapter.predict(
    "Our attention makes a compiled step on KuaiRand with 2,048 tokens 1.25 to 1.36 times as fast "
    "as v1's.",
    gain["compiled"][LONG], least=1.25, most=1.36, shown=False,
)  # fmt: skip
chapter.predict(
    "Norms take 18 to 36 % of an eager step.",
    eager_norm, least=18, most=36, form=".0f", unit=" %", shown=False,
)  # fmt: skip
chapter.predict(
    "With our attention, fused norms and a bf16 stream, a step is at least 1.45 times as fast as "
    "the compiled step of v1: the least of three length distributions.",
    both, least=1.45,
)  # fmt: skip

# %% tags=["remove-input"]
# | name: fig-step-kinds
# | caption: >
# |   **Attention shrinks first, then the gradient of the embeddings, then the norms; matmuls
# |   stay.** Device time of a step on half-full batches of 1,024 tokens, by kind of operator.
# |   "Ours" uses our fastest kernels, v1 our first ones.
# | alt: >
# |   Seven stacked bars. From the first to the second attention halves; compiled, norms halve and
# |   the rest shrinks; at the bottom norms are smallest.
shown = {
    "v1, eager": ("eager", "v1"), "ours, eager": ("eager", "gdpa"),
    "v1, compiled": ("compiled", "v1"), "ours, lookups": ("compiled, lookups", "gdpa"),
    "ours, compiled": ("compiled", "gdpa"), "ours, fused norms": ("fused norms", "gdpa"),
    "ours, fused, bf16": ("fused, bf16", "gdpa"),
}  # fmt: skip
bars = kinds.loc[HALF].loc[list(shown.values())].set_axis(list(shown))
bars["rest"] = bars[["embedding", "optimizer", "compiled", "other"]].sum(axis=1)
chart = rare_charts.stacked(bars[["attention", "norm", "matmul", "rest"]], xlabel="ms", inside=True,
                       looks={"attention": "filled", "norm": "pale", "matmul": "hollow",
                              "rest": "hollow"}, hue="v8_own_waits")  # fmt: skip
chapter.figure(chart, data=bars.reset_index(names="step"), measured=chapter.holders("steps"))

# %% [markdown]
# ## A model to measure
#
# `examples/` has KunlunLite, after Kunlun {cite}`hou2026kunlun`: self-attention, a {term}`PFFN`,
# pooling by {term}`PMA` and interaction, at a width of 512, in two layers. `examples/step.py` times
# steps of AdamW in bf16 autocast on the device, part by part, and asks PyTorch's profiler for the
# kinds of operators. Only the attention is exchanged.
#
# The bars show Amdahl's law. Compiled, v1's attention is {glue:text}`share_v1:.0f` % of a step, so
# even a kernel that cost nothing could make the step only {glue:text}`most:.2f` times as fast. In
# eager mode, where passes over tokens without a matmul take most of the step, the share is smaller.

# %% tags=["remove-input"]
LABELS = {"gdpa": "ours", "v1": "v1", "fa2_varlen": "FA2", "padded_sdpa": "padded"}
both_laws = ms.loc[[(law, way) for law in LAWS for way in ("eager", "compiled", "fused, bf16")
                    if (law, way) in PLAN], list(LABELS)].rename(columns=LABELS)  # fmt: skip
chapter.table(
    both_laws.rename_axis(["lengths", "step"]).reset_index(), missing="", name="tab-step-laws",
    digits=dict.fromkeys(LABELS.values(), 1),
    caption="**Attention is worth most with the longest histories.** Time of a step in ms. FA2: "
    "FlashAttention-2; padded: PyTorch. Blank: not timed.",
    data=steps_of.reset_index(), measured=chapter.holders("steps"),
)  # fmt: skip

# %% [markdown]
# ## The gradient of a small embedding table
#
# A first profile of the compiled step, sorted by name, gave the norms the largest share, and faster
# norms gained far less than that. One kernel took {glue:text}`atomics:.0f` of
# {glue:text}`lookups:.0f` ms:
#
# ```text
# triton_per_fused__fused_rms_norm_backward__to_copy_add_embedding_dense_backward
# ```
#
# The last item of the name dominates, the gradient of embedding lookups: the gradient of every
# token is added to the row that the token came from. Inductor does this with atomic additions,
# which are cheap as long as tokens are spread over many rows. Here topic, like and age have 51 rows
# *together*: half of {glue:text}`tokens:,.0f` tokens were liked, and all of those add to the same
# 512 numbers, one after another.
#
# | way to the gradient | who adds | cost |
# |:--|:--|:--|
# | lookups, atomics (Inductor) | memory, one at a time per number | a queue per row |
# | `nn.EmbeddingBag` | sorts tokens by row, then adds | a sort, and short runs per row |
# | zeros and ones times the table | a matmul, in registers | $2 \cdot 51 \cdot 512$ FLOPs a token |
#
# In the last line the sum of a token's three rows is a vector of zeros and ones times the 51 rows.
# For all tokens that is a matmul, and its gradient is a matmul too, which adds in registers. With
# it the step takes {glue:text}`matmul:.0f` ms instead of {glue:text}`lookups:.0f`,
# {glue:text}`embedding_gain:.2f` times as fast, more than fused norms will gain below. Every other
# number of this chapter has it. (The bag gained nothing. The table of 20,000 items has rows enough
# and is still looked up.)
#
# ## Fused norms
#
# `gdpa_kernels.norms` has two that run near the rate of a copy ({doc}`lab notes
# <../../notes/norms>`): the residual addition and RMSNorm in one kernel in each direction, and the
# norm of q and k in place on packed q, k and v. They bring the step to {glue:text}`fused_only:.1f`
# ms. A residual stream in bf16, which is a change of precision and not of kernels, brings it to
# {glue:text}`bf16_only:.1f` ms, and both together to {glue:text}`fused:.1f` ms. Matmuls and
# attention are {glue:text}`left:.0f` % of such a step. From v1 and lookups to here it became
# {glue:text}`everything:.2f` times as fast.
#
# Normalisation, published as about 20 % of Kunlun's training latency {cite}`zhou2026normalization`,
# is {glue:text}`norm_eager:.0f` % here in eager mode and {glue:text}`norm_compiled:.0f` % compiled.
#
# ## A step that is not at the power limit
#
# Back to back, at the limit of 700 W, 10 % fewer cycles save 7 % of time ({eq}`eq-wall-exponent`).
# Below the limit the clock is free, and they save 10 %. In the compiled step
# {glue:text}`cool:.0f` % of the device time is neither matmul nor attention, but norms, copies and
# embeddings, which wait for memory and draw less, and the regulator averages power over about one
# step. So a kernel inside a step lies between the two. (A model; the record has no power of whole
# steps.)
#
# ## The step that waited for the compiler

# %% tags=["remove-cell"]
STALLED = "20261128T082621Z-training-step-nvidia-h200-62ac9e84"
each = chapter.recorded("samples", STALLED).query("part == 'step' and way == 'eager'")
each = each[each["law"] == HALF].pivot(index="sample", columns="kernel", values="time_s")
longest, usual = each.max(), each.median()
assert longest["gdpa"] / usual["gdpa"] > 15, "the text: a step stalled"
chapter.glue(stall=longest["gdpa"], usual=1e3 * usual["gdpa"])

# %% [markdown]
# A median hides what a trainer sees. In the record of 28 November 2026 an eager step on half-full
# batches took {glue:text}`usual:.0f` ms with our attention, but one of the eight took
# {glue:text}`stall:.1f` s. Nothing was special about that batch but its longest history: 1,022
# events, where those before had 1,024.
#
# Triton compiles a kernel anew for each *kind* of integer that it is given: one that is 1, one that
# is a multiple of 16, or any other. Strides must be known to be such multiples, or no thread may
# load 16 bytes at a time; `max_seqlen` need not be, and 1,022 was the first of another kind.
#
# ```python
# @triton.jit(do_not_specialize=["max_seqlen_q"])
# def tiled_kernel(...
# ```
#
# takes the integer as it comes. All kernels but backward v2a do so now with what follows from
# lengths.
#
# ## Thirty per cent
#
# With attention alone a compiled step becomes {glue:text}`attention` times as fast, most with the
# longest histories, so more than 1.3 needs long, nearly full sequences. Together with fused norms
# the factor is {glue:text}`fused_fp32:.2f` on half-full batches of 1,024 tokens. Against padded
# attention in eager mode it is {glue:text}`padded`: the baseline decides. The published number
# names neither model nor baseline, so it can be neither confirmed nor refuted.
#
# Before the first run, bytes and FLOPs of each part at this GPU's rates predicted the speedups.
# Attention gave more on all but the longest histories:

# %% tags=["remove-input"]
chapter.predictions()

# %% [markdown]
# ## Exercises
#
# :::{exercise} Amdahl
# :label: ex-step-amdahl
#
# Attention is 40 % of a step, and a new kernel takes half of its time. What does the step gain, and
# what would it gain if norms, 30 %, then became three times as fast? *(paper)*
# :::
#
# :::{solution} ex-step-amdahl
# :class: dropdown
#
# 1 / (1 - 0.4 / 2) = 1.25. Then 1 / (1 - 0.2 - 0.2) = 1.67: of what is left the norms are more.
# :::
#
# :::{exercise} Bytes of a norm
# :label: ex-step-bytes
#
# A residual addition with RMSNorm, 590,000 tokens of 512, everything in bf16: how long must the
# forward pass take at 4.3 TB/s, how long would an unfused addition and norm? *(paper)*
# :::
#
# :::{solution} ex-step-bytes
# :class: dropdown
#
# Two tensors are read and two written, 8 bytes an element: 2.4 GB, 0.56 ms. Unfused the addition
# moves 6 and the norm 4: 0.70 ms. Eager mode also casts to fp32 and back, which costs more.
# :::
#
# :::{exercise} Your model
# :label: ex-step-yours
#
# Set `--law`, `--max-seqlen` and `--mixer` to what is nearest to yours. What share has attention?
# *(GPU, one command)*
# :::
#
# :::{solution} ex-step-yours
# :class: dropdown
#
# `python examples/step.py --law lognormal --max-seqlen 512 --compile --attentions gdpa v1`. The
# shorter the histories, the smaller the share: projections grow with tokens, attention with pairs.
# :::
#
# :::{exercise} Is your step at the limit?
# :label: ex-step-power
#
# A step of 60 ms has 25 ms of kernels that back to back would run at the limit of 700 W with a
# clock of 1.4 GHz, and 35 ms of memory-bound kernels at 450 W whose time does not depend on the
# clock. The clock can reach 1.98 GHz. (a) What is the mean power if the hot part runs at 1.4 GHz?
# Is the step capped? (b) Let the hot part's power go as $f^3$ above 150 W of static power. At which
# clock would the mean be 700 W, if the time of the hot part goes as $1/f$? Can it be reached?
# (c) A new kernel needs 20 % fewer cycles for the hot part, with the same switching per call. What
# does the step gain at 1.98 GHz, and what would the hot part alone gain back to back? *(paper,
# thirty minutes, as in an exam)*
# :::
#
# :::{solution} ex-step-power
# :class: dropdown
#
# (a) (25 × 700 + 35 × 450) / 60 = 554 W: not capped. (b) At 1.98 GHz the hot part draws 150 + 550 ×
# (1.98 / 1.4)³ = 1,706 W for 25 × 1.4 / 1.98 = 17.7 ms. The mean over 52.7 ms is (30,200 + 15,750)
# / 52.7 = 872 W, too much. At 1.7 GHz it is 150 + 985 = 1,135 W for 20.6 ms: (23,400 + 15,750) /
# 55.6 = 704 W. So the step settles near 1.7 GHz, between burst and back to back, and its hot
# kernels run about 20 % faster than back to back. (c) If 1.98 GHz could be held, the hot part would
# shrink from 17.7 to 14.1 ms, and the step from 52.7 to 49.1: 7 %. Back to back its time goes as
# 0.8 to the power of 0.7 ({eq}`eq-wall-exponent`), 0.86: 17 % faster rather than 25 %.
# :::
#
# ## Takeaways
#
# - A gain of a part is worth its share: profile first.
# - A fused kernel is named after all that it does; what it does longest need not come first.
# - A training speedup without model, histories and baseline is no number.
