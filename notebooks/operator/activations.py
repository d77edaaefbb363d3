# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # Activations and their errors
#
# How accurate must an activation be, and which instructions are accurate enough?
#
# :::{admonition} In this chapter (25 minutes)
# You will judge an approximation by the rounding that hides it, and choose inputs that expose one
# with a limited range. The published kernel's degree-6 polynomial is GELU for small scores only: at
# standard deviation 1 its relative L2 error is {glue:text}`l2_one:.0f` %.
# :::

# %% tags=["hide-input"]
import math

import pandas as pd
import torch

from _lib import activation_sequences as sequences
from _lib import approximations as approx
from _lib import drawings
from gdpa_kernels.gdpa import reference
from gdpa_kernels.gdpa.device import activations
from gdpa_lab.measuring import cost_model, record
from gdpa_lab.report import charts
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("operator/activations", mode=mode, device=device, data_dir=data_dir)
FORMULAS = {
    "degree-6 polynomial": approx.taylor6, "tanh form": approx.gelu_tanh,
    "fitted tanh": approx.fitted_tanh,
}  # fmt: skip

# %% tags=["remove-input"]
# | name: fig-taylor-by-std
# | caption: >
# |   **The published polynomial leaves GELU as soon as scores are of ordinary size.** Relative L2
# |   error of three formulas against GELU for normally distributed scores. Marked: 0.25; 1, the
# |   default scale; sqrt(128), the published benchmark.
# | alt: >
# |   Logarithmic chart of relative error against the standard deviation of the scores. Both tanh
# |   forms stay around 2e-4 or below. The polynomial rises steeply: below the bf16 line at 0.25,
# |   about one at standard deviation 1, above 1e5 at 11.3.
by_std = approx.by_std(FORMULAS)
polynomial = by_std["degree-6 polynomial"]
chapter.figure(
    charts.lines(
        by_std, log="xy", xlabel="standard deviation of the scores", ylabel="relative L2 error",
        highlight=list(FORMULAS), ylim=(1e-8, 1e7),
        points={0.25: "std 0.25", 1.0: "std 1", 128**0.5: "std √128"},
    ),
    data=by_std.rename_axis("std").reset_index(), modelled="integrated in double precision",
)  # fmt: skip

# %% [markdown]
# ## The activations
#
# {numref}`fig-activations` shows the activations of `gdpa`, with the derivatives that the backward
# pass needs. GELU {cite}`hendrycks2016gelu` is $x\,\Phi(x)$, with the normal distribution function
# $\Phi$; `gelu_tanh` is its usual approximation by a hyperbolic tangent; SiLU
# {cite}`elfwing2017silu` is $x\,\sigma(x)$; hard swish {cite}`howard2019mobilenetv3` replaces the
# sigmoid by a ramp; squared ReLU comes from {cite}`so2021primer`.

# %% tags=["remove-input"]
# | name: fig-activations
# | caption: >
# |   **Five of the eight activations look alike, and all pass through the origin.** Solid: the
# |   activation. Dashed: its derivative.
# | alt: >
# |   Eight small charts from minus 4 to 4. Identity, ReLU and leaky ReLU are made of straight
# |   lines, squared ReLU is half a parabola. GELU, its tanh form, SiLU and hard swish look alike: a
# |   shallow dip below zero, then close to x; their derivatives overshoot one.
shown = [name for name in reference.ACTIVATIONS if name != "gelu_taylor6"]
chapter.figure(
    drawings.activations(shown), modelled="the definitions in gdpa/reference.py, double precision"
)

# %% [markdown]
# ## The yardstick
#
# Between its two matmuls a bf16 kernel rounds every activated score to bfloat16, which keeps eight
# significant bits. Half the distance between neighbours is $2^{-9}$ to $2^{-8}$ of the value. We
# take the smaller number: **an error well below $2^{-9}$ of the activated score disappears in a
# rounding that happens anyway.**
#
# An output is a sum over $n$ keys. If $V$ has mean zero, both the sum and its error grow like
# $\sqrt{n}$, and their ratio stays that of $P$: the **relative L2 error**, which we use for rows.
#
# If all terms have one sign, the sum grows like $n$. Random errors still grow like $\sqrt n$: they
# average out. Errors of one sign grow like $n$ and do not:

# %% tags=["remove-cell"]
make = torch.Generator().manual_seed(0)


def toward_zero(x: torch.Tensor) -> torch.Tensor:
    return (x.view(torch.int32) & -(2**16)).view(torch.float32)


def in_bf16(x: torch.Tensor) -> torch.Tensor:
    """The sum of each row, rounded after each term."""
    total = torch.zeros(len(x), dtype=torch.bfloat16)
    for term in x.T:
        total = (total.float() + term).bfloat16()
    return total.double()


def rounded_sums(n: int) -> list[float]:
    """Errors, in %, of sums of n terms between 1 and 2, root mean square of 200."""
    x = 1 + torch.rand(200, n, generator=make)
    exact = x.double().sum(1)
    sums = x.bfloat16().double().sum(1), toward_zero(x).double().sum(1), in_bf16(x)
    return [100 * (one / exact - 1).square().mean().sqrt().item() for one in sums]


columns = ["terms to nearest", "terms toward zero", "sum in bf16"]
summed = pd.DataFrame({n: rounded_sums(n) for n in (16, 256, 4096)}, index=columns).T
nearest, cut = summed["terms to nearest"], summed["terms toward zero"]
assert (nearest / nearest.shift() < 0.3).iloc[1:].all() and cut.max() / cut.min() < 1.1, "the text"
assert summed["sum in bf16"].iloc[-1] > 50, "the text: adds nothing any more"

# %% tags=["remove-input"]
chapter.table(
    summed.map("{:.2g}".format).rename_axis("n").reset_index(),
    caption="**Rounding to nearest averages out; cutting off does not.** Errors, in %, of sums of "
    "n numbers between 1 and 2 in bf16; in the last column the sum is rounded after each term.",
    computed="by PyTorch on a CPU; root mean square of 200 sums",
)

# %% [markdown]
# A polynomial that is always too small acts like the second column. In the last one a large sum
# drops small terms, so kernels add in fp32.
#
# ## Three ways to compute GELU
#
# - **By definition**: an error function, or an exponential and a division. Exact to a few units in
#   the last place of fp32, and expensive.
# - **By hardware**: the {term}`MUFU` evaluates `tanh.approx.f32` in one instruction. GELU's tanh
#   form needs one per score. So does SiLU, because $x\,\sigma(x) = h\,(1 + \tanh h)$ with
#   $h = x/2$ exactly. So does `gelu` in bf16 and fp16: with two fitted coefficients, $\tanh u$
#   matches the error function to within {glue:text}`fitted_erf:.1f` × 10⁻⁴.
# - **By polynomial**: the published Blackwell kernel uses the Maclaurin series of GELU up to degree
#   six for every score of its forward pass and most of its backward pass
#   {cite}`adsmodelkernellibrary`. It needs no special function.
#
# The bodies of `gelu_tanh` and `gelu_taylor6` in our kernels; the first one folds the scale into
# its constants:

# %% tags=["remove-input"]
chapter.code(activations.gelu_tanh, "linear, cubic =")
chapter.code(activations.gelu_taylor6, "square =")

# %% tags=["remove-input"]
# | name: fig-gelu-formulas
# | caption: >
# |   **The polynomial is excellent near zero and then departs abruptly.** Distance of three
# |   formulas from GELU when evaluated exactly, the larger of the errors at x and -x.
# | alt: >
# |   Logarithmic chart of error against absolute x from 0.05 to 16. The tanh form rises to 5e-4
# |   between 2 and 3 and falls off, the fitted one to 4e-4, with dips. The polynomial of degree 6
# |   starts far lower, crosses the bf16 line near 1, and climbs beyond 1e5.
formulas = approx.by_score(FORMULAS)
chapter.figure(
    charts.lines(
        formulas, log="xy", xlabel="|x|", ylabel="absolute error", ylim=(1e-10, 1e6),
        highlight=list(FORMULAS),
    ),
    data=formulas.rename_axis("x").reset_index(), modelled="evaluated in double precision",
)  # fmt: skip
chapter.glue(
    right=approx.reach(approx.taylor6), left=approx.reach(approx.taylor6, -1),
    tanh_worst=1e4 * approx.worst(approx.gelu_tanh),
    fitted_worst=1e4 * approx.worst(approx.fitted_tanh),
    fitted_erf=2e4 * ((approx.fitted_tanh(approx.GRID) - approx.gelu(approx.GRID)) / approx.GRID)
    .abs().max().item(),
    worst_4=approx.worst(approx.taylor6, 4),
    fit_l2=100 * approx.normal_l2(approx.fitted), yardstick=100 * approx.HALF_ULP,
    std_limit=polynomial[polynomial < approx.HALF_ULP].index.max(),
    l2_one=100 * approx.normal_l2(approx.taylor6),
    l2_published=1e-3 * approx.normal_l2(approx.taylor6, 128**0.5),
)  # fmt: skip

# %% [markdown]
# The tanh form is never more than {glue:text}`tanh_worst:.1f` × 10⁻⁴ away from GELU, the fitted one
# {glue:text}`fitted_worst:.1f` × 10⁻⁴. The error of the polynomial is {glue:text}`worst_4:.0f` up
# to $|x| = 4$. It stays below the yardstick only for $x$ between {glue:text}`left:.2f` and
# {glue:text}`right:.2f`.
#
# ## What the instruction is worth
#
# PTX documents `tanh.approx.f32` with a relative error of at most $2^{-11}$ {cite}`nvidiaptx`. In
# $y = h\,(1 + \tanh u)$ with $h = x/2$ an error of the tangent is multiplied by $h$, so the
# documentation promises $2^{-11}\,\tfrac{|x|}{2}\,|\tanh u| \le 2^{-12}\,|x|$. For positive scores
# that is below the yardstick everywhere: one instruction is enough, whatever the chip. For negative
# scores GELU approaches zero while the bound grows, and below $x =$ {glue:text}`left_bound:.1f` it
# exceeds the yardstick. Among scores of both signs that does not matter: in the L2 norm over
# standard normal scores the bound costs {glue:text}`bound_l2:.1f` × 10⁻⁴, the rounding to bfloat16
# {glue:text}`rounding_l2:.1f` × 10⁻⁴.
#
# What does the chip do at $2^{22}$ points between -20 and 20?


# %% tags=["hide-input"]
@chapter.measure
def _(session):
    x, rows = torch.linspace(-20, 20, 2**22, device=session.device), []
    for name, activation in reference.ACTIVATIONS.items():
        exact = activation.function(x.double())
        for fast in (True, False):
            error = (activations.evaluate(x, name, approx=fast).double() - exact).abs()
            per_x = error / x.abs().clamp(min=1e-30)
            for limit in (1.0, 4.0, 20.0):
                worst = [e[x.abs() <= limit].max().item() for e in (error, per_x)]
                rows.append((name, fast, limit, *worst))
    columns = ("activation", "approx", "range", "max_abs_error", "max_error_per_x")
    session.tables["activation_errors"] = record.Table(columns, rows)


recorded = chapter.recorded("activation_errors")
errors = recorded[recorded["range"] == 20].set_index(["activation", "approx"])[list(recorded)[3:]]
largest = errors["max_error_per_x"]

# %% tags=["remove-input"]
shown = errors.loc[["gelu_tanh", "silu"]].reset_index()
shown["approx"] = shown["approx"].map({True: "`tanh.approx`", False: "`exp`, division"})
shown.columns = ["activation", "by", "largest error", "largest error over |x|"]
chapter.table(
    shown.map(lambda x: f"{x:.1e}" if isinstance(x, float) else x), data=recorded,
    caption="**One instruction errs by far less than is promised.** Largest errors on an H200 "
    "against double precision.",
    measured=chapter.holders("activation_errors"),
)  # fmt: skip
chapter.predict(
    "PTX keeps its promise: the error of `gelu_tanh` per |x| is at most 2⁻¹².",
    largest["gelu_tanh", True], most=2**-12, form=".1e",
)  # fmt: skip
tangent = 2 * max(largest["gelu_tanh", True], largest["silu", True])
exact, half = approx.gelu_tanh(approx.NODES), 2.0**-12 * approx.GRID
chapter.glue(
    tangent_bits=-math.log2(tangent), better=2.0**-11 / tangent,
    left_bound=-approx.leaves(half, approx.gelu_tanh(-approx.GRID)),
    bound_l2=1e4 * approx.relative_l2(approx.documented(approx.NODES), exact),
    rounding_l2=1e4 * approx.relative_l2(exact.bfloat16().double() - exact, exact),
)  # fmt: skip
assert 2.0**-11 / tangent > 8, "the text: far better than documented"
chapter.predictions()

# %% [markdown]
# ### The chip is better than its documentation
#
# Twice the error per $|x|$ bounds the error of the
# tangent: {glue:text}`tangent_bits:.1f` bits, where the documentation promises 11. The next GPU or
# driver promises nothing of the kind, so we test against the documented bound: the emulator rounds
# `tanh` until its error comes close to it.
#
# ## Amplified errors
#
# If a score has the relative error $\epsilon$, its activation has $\kappa\epsilon$, with the
# *relative condition number* $\kappa(s) = s\,\alpha'(s) / \alpha(s)$ of the activation $\alpha$.
# That of GELU's tanh form is close to 1 for positive scores and −{glue:text}`kappa:.0f` at −4. That
# is harmless if
#
# - $\epsilon$ is small: scores summed in fp32 stand any of these factors; or
# - the row holds larger terms: the *absolute* error at −4 is only $|s\,\alpha'(s)|\,\epsilon =$
#   {glue:text}`absolute:.3f` $\epsilon$.
#
# It does harm if *all* scores of a row are strongly negative:

# %% tags=["remove-cell"]
tanh_form = reference.ACTIVATIONS["gelu_tanh"]
normal = torch.randn(2**18, generator=make, dtype=torch.float64)
amplified = {}
for name, s in {"0 ± 1": normal, "-4 ± 0.5": normal / 2 - 4}.items():
    p = tanh_form.function(s)
    wrong = {
        "score in fp32": tanh_form.function(s.float().double()) - p,
        "score in bf16": tanh_form.function(s.bfloat16().double()) - p,
        "`tanh.approx`, as documented": approx.documented(s),
        "P in bf16, the yardstick": p.bfloat16().double() - p,
    }
    amplified[f"scores {name}"] = {
        what: 100 * (error.norm() / p.norm()).item() for what, error in wrong.items()
    }
amplified = pd.DataFrame(amplified)
point = torch.tensor(-4.0, dtype=torch.float64)
slope, value = tanh_form.derivative(point).item(), tanh_form.function(point).item()
low = amplified["scores -4 ± 0.5"]
assert low["score in fp32"] < 1e-3 < low["P in bf16, the yardstick"] < low["score in bf16"] / 5
assert low["`tanh.approx`, as documented"] > 50, "the text: worth nothing"
chapter.glue(kappa=4 * slope / value, absolute=abs(4 * slope))

# %% tags=["remove-input"]
chapter.table(
    amplified.map("{:.2g}".format).reset_index(names="error of"),
    caption="**Where all scores are negative, nothing hides an amplified error.** Relative L2 "
    "error of P, in %, for normally distributed scores, mean ± standard deviation.",
    computed="the tanh form of GELU in double precision",
)

# %% [markdown]
# There a score in bf16 costs several times the yardstick, and the promise of `tanh.approx` is worth
# nothing: $1 + \tanh u$ cancels. Written as $x / (1 + e^{-2u})$ the function has no such
# difference.
#
# ## The polynomial on real scores
#
# The polynomial stays below the yardstick up to a standard deviation of {glue:text}`std_limit:.2f`
# ({numref}`fig-taylor-by-std`). On the published benchmark's own inputs, standard normal $q$ and
# $k$ with head_dim 128 and no scale, its relative error is {glue:text}`l2_published:.0f` thousand:
# the output has nothing to do with GELU.
#
# Scores of standard deviation 1, which the default scale makes of standard normal inputs, expose
# any polynomial of this kind; a standard deviation of 1/3 hides it. In production, the authors say,
# normalised queries and keys keep the scores small {cite}`meta2026gem`: with $q$ and $k$ of length
# one every score lies between -1 and 1, about where the polynomial holds. Nothing in the kernel
# checks that.
#
# ## What an activation costs
#
# A score costs $4 d$ FLOPs in the forward pass. At head_dim 128 the tensor cores of a Hopper
# {term}`SM` are done with it after 1/8 of a clock, at 64 after 1/16 ({doc}`machine`). If its
# activation takes the MUFU or the issue slots longer, the tensor cores wait:

# %% tags=["remove-input"]
cost = pd.DataFrame(activations.INSTRUCTIONS, index=["fp32", "MUFU"]).T
budget = 4 * 128 / cost_model.H200.flops  # clocks of the tensor cores for a score
by_erf = sequences.loop_cost("gelu.erf").issued - sequences.loop_cost(sequences.LOOP).issued
cost["fp32, % of MMA"] = 100 * (cost["fp32"] / sequences.ISSUE_RATE) / budget
cost["MUFU, % of MMA"] = 100 * (cost["MUFU"] / cost_model.MUFU_LANES) / budget
cost["at head_dim 64"] = 2 * cost[["fp32, % of MMA", "MUFU, % of MMA"]].max(axis=1)
chapter.glue(
    erf=by_erf,
    erf_slots=100 * (by_erf / sequences.ISSUE_RATE) / budget,
    gelu_slots=cost["fp32, % of MMA"]["gelu_tanh"], silu_slots=cost["fp32, % of MMA"]["silu"],
)  # fmt: skip
chapter.table(
    cost.round(0).astype(int).reset_index(names="activation"),
    caption="**At head_dim 128 one tanh leaves half of the time free, at 64 nothing.** Counts "
    "for a score in bf16, their share of the tensor cores' time, and the larger share at 64.",
    compiled="counts of the compiled instructions",
)

# %% [markdown]
# One MUFU per score is hidden if the kernel overlaps it with the tensor cores. GELU and SiLU need
# the same one, but GELU also takes {glue:text}`gelu_slots:.0f` % of the issue slots and SiLU
# {glue:text}`silu_slots:.0f` %: inside a kernel SiLU is the cheaper one
# ({doc}`../forward/v7_packed`). GELU by its error function compiles to
# {glue:text}`erf:.0f` instructions, {glue:text}`erf_slots:.0f` % of the issue slots in that time,
# and nothing could hide it.
#
# ## Exercises
#
# {doc}`Write it </exercises>`: `make exercise NAME=activate`.
#
# :::{exercise} Half the head_dim
# :label: ex-activations-64
#
# Take a SiLU written as $x / (1 + e^{-x})$, an exponential and a reciprocal. Which share of the
# tensor cores' time does it ask of the MUFU at head_dim 128, and at 64? Which activations of the
# table still hide at 64? *(paper, five minutes)*
# :::
#
# :::{solution} ex-activations-64
# :class: dropdown
#
# Two MUFU per score are 100 % at head_dim 128. At 64 the FLOPs per score halve and the instructions
# do not, so it is 200 %, and one MUFU already takes as long as both MMAs. Only the polynomial and
# the piecewise activations still hide.
# :::
#
# :::{exercise} Why softmax is safe
# :label: ex-activations-condition
#
# Find $\kappa$ of SiLU, of ReLU and of the exponential. Scores of −50 amplify an exponential's
# errors by 50. Why does softmax not suffer, whatever its scores are? *(paper, ten minutes)*
# :::
#
# :::{solution} ex-activations-condition
# :class: dropdown
#
# SiLU: $1 + s\,(1 - \sigma(s))$, about $1 + s$ for strongly negative scores. ReLU: 1 for positive
# scores; the others give exactly 0. Exponential: $s$. Softmax subtracts the maximum of each row. So
# each row holds a term $e^0 = 1$, with $\kappa = 0$, and terms with a large $\kappa$ are small
# beside it. GDPA subtracts nothing, so a row may consist of small terms alone.
# :::
#
# :::{exercise} A better polynomial
# :label: ex-activations-fit
#
# Find the polynomial $x/2 + c_2 x^2 + c_4 x^4 + c_6 x^6$ with the least relative L2 error for
# standard normal scores. Would you use it? *(Python, open)*
# :::
#
# :::{solution} ex-activations-fit
# :class: dropdown
#
# Weighted least squares gives a relative L2 error of {glue:text}`fit_l2:.1f` % instead of
# {glue:text}`l2_one:.0f` %, for the same instructions. That is still above the yardstick
# ({glue:text}`yardstick:.1f` %) and still unbounded outside.
# :::
#
# ## Takeaways
#
# - The rounding of activated scores to bfloat16 is the yardstick. One `tanh.approx` per score
#   passes it by its documented bound, for positive scores and in the L2 norm.
# - The chip is {glue:text}`better:.0f` times better than documented. Rely on the documentation.
# - A polynomial has a range. Inside it `gelu_taylor6` is GELU without MUFU; outside, fast nonsense.
# - Ask of an error: has it one sign, is it amplified, and what in the sum is larger?
#
# To register an activation of yours: {doc}`../serving/own_operator`.
