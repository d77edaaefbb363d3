# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # Activation arithmetic: the number of instructions counts, not the tanh
#
# What is the cheapest sequence of instructions that computes an activation accurately for *every*
# score, and how much of it does a kernel hide?
#
# :::{admonition} In this chapter (35 minutes)
# You will write an activation as $x$ times a gate, bound its error for all scores, and find what it
# costs inside a kernel. A polynomial that is accurate everywhere costs no more than one that is
# not. In forward v6 at head_dim 128, GELU adds {glue:text}`gelu_128:.0f` % to the time of the
# identity, SiLU {glue:text}`silu_128:.0f` % (in bursts, as all times here).
# :::

# %% tags=["hide-input"]
import numpy as np
import pandas as pd
import torch

import tritonemu
from _lib import activation_sequences as sequences
from _lib import rare_charts
from gdpa_kernels.gdpa.device.activations import INSTRUCTIONS
from gdpa_lab.report import charts
from gdpa_lab.report.chapter import Chapter
from notebooks.forward import _activation_rates

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("forward/activation_arithmetic", mode=mode, device=device, data_dir=data_dir)
chapter.measure(_activation_rates.run_all)
speed = _activation_rates.speeds(chapter)
us = chapter.times()["v6_short_kv"]
us.index = pd.MultiIndex.from_tuples(name.split("-")[1:] for name in us.index)
us = us.unstack()[["128", "64"]].rename(columns="head_dim {}".format)  # by activation
over = 100 * (us / us.loc["identity"] - 1)
for name in ("gelu_tanh", "silu"):
    chapter.glue(**{f"{name[:4]}_{d}": over.loc[name, f"head_dim {d}"] for d in (128, 64)})

# %% tags=["remove-input"]
# | name: fig-aa-kernel
# | caption: >
# |   **GELU and the polynomial without a tanh cost the same; SiLU costs far less.** Time of forward
# |   v6 on gdpa-self-full-1024 over that of the identity, in bursts. `gelu`: the tanh of a cubic
# |   that is fitted to the error function.
# | alt: >
# |   A dot plot with a row for each of six activations and two marks a row, for head_dim 128 and
# |   64. ReLU is nearly free. SiLU is far left of GELU. Hard swish and the polynomial, which have
# |   no tanh, lie near GELU.
DRAWN = ["relu", "silu", "hardswish", "gelu_taylor6", "gelu", "gelu_tanh"]
chapter.figure(
    charts.dots(over.loc[DRAWN], xlabel="time over the identity in bursts (%)", levels={"": 0}),
    measured=chapter.rows(),
)

# %% [markdown]
# ## The budget
#
# At head_dim 128 the other units must finish 8 activations a clock, or the tensor cores wait
# ({doc}`../operator/activations`); at 64 they must finish 16. NVIDIA documents three limits, per SM
# and clock ([CUDA programming
# guide](https://docs.nvidia.com/cuda/cuda-c-programming-guide/#arithmetic-instructions)):
#
# | limit | results |
# |:--|--:|
# | instructions of any kind issued, among them fp32 multiply-adds | 128 |
# | comparisons, conversions, integer operations (ALU) | 64 |
# | special functions (MUFU): `tanh`, `ex2`, `rcp` | 16 |
#
# ## A gate, and two bounds
#
# GELU, SiLU and hard swish are $x\,g(x)$ with a gate $g$ that rises from 0 to 1. An error $\delta$
# of the gate is an error $\delta |x|$ of the result, for every score. So errors here are shares of
# $|x|$, with two bounds:
#
# - **2⁻¹⁰**: for positive $x$ the result is at least $x/2$, so its relative error is at most
#   $2^{-9}$, the yardstick of {doc}`../operator/activations`;
# - **2⁻¹²**: what PTX promises for a gate made of one `tanh.approx.f32`.
#
# There are three ways to make a gate:
#
# - *One MUFU.* $g = (1 + \tanh u)/2$, with $u = x/2$ for SiLU and a cubic for GELU.
# - *None.* $g$ is an odd polynomial plus 1/2, clamped to $[0, 1]$. The clamp is `.sat`, a free
#   modifier of the last multiply-add. The last coefficient must be positive, so that the polynomial
#   leaves the interval at the right end.
# - *A mixture.* Every fourth element takes the polynomial, the others tanh. The choice is made at
#   compile time. Neighbouring columns are registers of one thread, so no thread branches.

# %% tags=["remove-input"]
chapter.code(sequences.saturated)
chapter.code(sequences.by_polynomial)

# %% [markdown]
# The fit scans the range beyond which the clamp must be right:

# %% tags=["remove-cell"]
x = np.linspace(0, 8, 2001)
target = sequences.normal_gate(x)
GATES = {f"degree {d}": getattr(sequences, f"GATE_GELU_{d}").value for d in (5, 9, 13)}
published = np.array([1, -1 / 6, 1 / 40]) / np.sqrt(2 * np.pi)
curves = {name: 0.5 + sequences.odd_polynomial(x, c) for name, c in GATES.items()}
curves["published"] = 0.5 + sequences.odd_polynomial(x, published)
errors = {name: abs(gate.clip(0, 1) - target) for name, gate in curves.items()}
errors = pd.DataFrame(errors, index=x).rename(columns={"published": "published, clamped"})
errors["published"] = abs(curves["published"] - target)

# %% tags=["remove-input"]
# | name: fig-aa-gates
# | caption: >
# |   **A clamped polynomial is accurate for every score; the published one only near zero.** Error
# |   of gates for GELU, evaluated exactly: three fitted polynomials (colours), and the published
# |   one, clamped and as it is (grey).
# | alt: >
# |   Logarithmic chart of the error of the gate against x from 0 to 8. The fitted polynomials stay
# |   below their bounds and fall to nothing where the clamp takes over, near 3 to 4. The published
# |   polynomial crosses both bounds near 1 and climbs out of the chart; clamped it falls again.
chapter.figure(
    charts.lines(
        errors.where(errors < 1), xlabel="x", ylabel="error of the gate", highlight=list(GATES),
        levels={"2⁻¹⁰": 2.0**-10, "2⁻¹²": 2.0**-12}, log="y", ylim=(1e-7, 1),
    ),
    modelled="coefficients of activation_sequences.py, in double precision",
)  # fmt: skip
worst = errors.max()
assert worst["degree 9"] < 2.0**-10 and worst["degree 13"] < 2.0**-12, "the text says so"
chapter.glue(clamped=100 * worst["published, clamped"], fitted=100 * worst["degree 5"])

# %% [markdown]
# Degree 9 keeps the first bound, degree 13 the second. The published polynomial has the terms of
# degree 5. Merely clamped, it would stay within {glue:text}`clamped:.0f` % of $|x|$ everywhere, and
# with fitted coefficients within {glue:text}`fitted:.1f` %.
#
# ## Measured in registers
#
# On each SM one program of 16 warps evaluates a sequence 1,024 times on 4,096 elements in
# registers, between two readings of the SM's clock. The model counts the {term}`SASS` of this loop
# and takes the slowest of the three limits.

# %% tags=["remove-cell"]
SHOWN = (
    "gelu_tanh.tanh", "gelu_tanh.mix_quarter", "gelu_tanh.bf16x2", "gelu.erf", "gelu.tanh3",
    "gelu.poly5", "gelu.poly9", "gelu.poly13", "gelu_taylor6", "silu.tanh", "silu.ex2_rcp",
    "silu.mix_quarter", "hardswish.clamp", "hardswish.sat", "relu",
)  # fmt: skip
cost = {name: sequences.loop_cost(name) for name in SHOWN}
fits = pd.Series({name: speed["clocks"][name] / cost[name].clocks for name in SHOWN})
rate = speed["rate"]  # elements a clock
ones = rate[["gelu_tanh.tanh", "gelu.tanh3", "silu.tanh"]]
packed = rate[["gelu_tanh.f16x2", "gelu_tanh.bf16x2"]] / rate["gelu_tanh.tanh"]
mix = {n: rate[f"{n}.mix_quarter"] / rate[f"{n}.tanh"] for n in ("silu", "gelu_tanh")}
front = speed.loc[list(SHOWN), ["error", "rate"]]
front["error"] = front["error"].clip(upper=3e-2)
kinds = {k: front[front.index.str.startswith(k.lower())] for k in ("GELU", "SiLU")}

# %% tags=["remove-input"]
# | name: fig-aa-front
# | caption: >
# |   **Whatever is faster than one tanh is less accurate.** Accuracy and speed in registers.
# |   Dashed: what the tensor cores need at head_dim 128 and 64. Dotted: the two bounds.
# |   `gelu_taylor6` is drawn at the right edge, since it has no bound.
# | alt: >
# |   Scatter plot of elements a clock over the largest error, logarithmic, in two groups, GELU and
# |   SiLU. More accurate polynomials are slower. One tanh lies far left.
chapter.figure(
    rare_charts.scatter(
        kinds, xlabel="largest error / |x|", ylabel="elements per clock and SM",
        levels={"head_dim 128": 8, "head_dim 64": 16}, limits={"2⁻¹⁰": 2.0**-10, "2⁻¹²": 2.0**-12},
    ),
    measured=chapter.holders("repeat"),
)  # fmt: skip

# %% tags=["remove-cell"]
chapter.predict(
    "In registers the slowest of the three limits gives the time of every sequence: found over "
    "modelled.", fits, least=0.97, most=1.15,
)  # fmt: skip
chapter.predict("Sequences with one tanh run at one rate: fastest over slowest.",
                ones.max() / ones.min(), most=1.05, shown=False)  # fmt: skip
chapter.predict("A packed 16-bit tanh gains nothing over a plain one.", packed, most=1.05,
                shown=False)  # fmt: skip
chapter.predict("A polynomial for every fourth element speeds SiLU up.", mix["silu"], least=1.2,
                shown=False)  # fmt: skip
for name in ("gelu_tanh", "silu"):
    chapter.glue(**{f"issue_{name[:4]}": 100 * cost[f"{name}.tanh"].issued / 8})
chapter.glue(
    ones_min=ones.min(),
    ones_max=ones.max(),
    mix_gelu=mix["gelu_tanh"],
    mix_silu=mix["silu"],
    taylor_gain=rate["gelu_taylor6"] / rate["gelu_tanh.tanh"],
)
for one in ("gelu_tanh.tanh", "silu.tanh"):
    alike = front[front.index.str.startswith(one[:4])]
    quick = alike[alike["rate"] > 1.02 * rate[one]]
    assert (quick["error"] > speed["error"][one]).all(), "the caption says so"

# %% [markdown]
# *Two limits that are close cost more than either.* GELU and SiLU both need one MUFU result. But
# GELU also fills {glue:text}`issue_gelu:.0f` % of the issue slots that pass meanwhile, SiLU
# {glue:text}`issue_silu:.0f` %. With one tanh, sequences reach {glue:text}`ones_min:.1f` to
# {glue:text}`ones_max:.1f` (SiLU) elements a clock of 16.
#
# *A packed tanh is no packed tanh.* One PTX instruction becomes two `MUFU.TANH` in SASS, with
# conversions around them, so it gains nothing.
#
# *Mixing* makes SiLU {glue:text}`mix_silu:.2f` times as fast and GELU only
# {glue:text}`mix_gelu:.2f` times: it saves MUFU and adds instructions, and GELU is short of both.
#
# In the emulator, whose `tanh`, `ex2` and `rcp` are as inaccurate as PTX allows, every sequence
# with a bound keeps it, and a NaN stays NaN. (`.sat` makes it 0, and multiplying by $x$ restores
# it.) The bound is free: `gelu.poly5` has as many instructions as the published polynomial, which
# has none ({doc}`../operator/activations`).

# %% tags=["remove-cell"]
points = torch.linspace(-60, 60, 4801)
bounded = [name for name in SHOWN if sequences.BY_NAME[name].bound is not None]
with tritonemu.enabled():
    for name in bounded:
        error = sequences.error_per_x(name, _activation_rates.exact(name), points)
        assert max(error, speed["error"][name]) <= sequences.BY_NAME[name].bound, name
        assert sequences.evaluate(torch.full((4,), torch.nan), name).isnan().all(), name

# %% [markdown]
# ## Inside a kernel
#
# Forward v6 ran gdpa-self-full-1024 with seven activations on the same inputs, in turns
# ({numref}`fig-aa-kernel`). At head_dim 128 one MUFU for each score takes half of the tensor cores'
# time (at peak clocks), so most of it should hide:

# %% tags=["remove-cell"]
gelu, silu, poly = (us.loc[n, "head_dim 128"] for n in ("gelu_tanh", "silu", "gelu_taylor6"))
identity = us.loc["identity", "head_dim 128"]
chapter.predict("At head_dim 128 GELU adds little to the time of the identity: the ratio of times.",
                gelu / identity, most=1.1)  # fmt: skip
chapter.predict("SiLU needs one tanh too, so it takes the time of GELU: the ratio of times.",
                silu / gelu, least=0.97, most=1.03)  # fmt: skip
chapter.predict("The published polynomial, without a tanh, gains little over GELU: its speedup.",
                gelu / poly, most=1.05, form=".3f", shown=False)  # fmt: skip

# %% tags=["remove-input"]
chapter.predictions()

# %% [markdown]
# What if nothing were hidden? Then GELU and SiLU would both add the time of one MUFU for each
# score, and SiLU would save the issue slots of its missing instructions:

# %% tags=["hide-input"]
ghz = speed["GHz"].median()
run = chapter.record().workload("activation-silu-128")
scores_of_an_sm = run.num_heads_q * run.pairs / chapter.recorded("repeat")["programs"][0]
tanh_us = scores_of_an_sm / sequences.MUFU_RATE / ghz / 1e3
listed = {name: sum(INSTRUCTIONS[name]) for name in ("gelu_tanh", "silu", "gelu_taylor6")}
assert listed["gelu_taylor6"] == listed["gelu_tanh"], "the text says: as many instructions"
fewer = listed["gelu_tanh"] - listed["silu"]
slots_us = fewer * scores_of_an_sm / sequences.ISSUE_RATE / ghz / 1e3
assert slots_us < gelu - silu, "the text says: by more than the slots"
hidden = {name: 1 - (time - identity) / tanh_us for name, time in (("GELU", gelu), ("SiLU", silu))}
print(f"one tanh for each score: {tanh_us:.0f} us; hidden:",
      ", ".join(f"{name} {share:.0%}" for name, share in hidden.items()))  # fmt: skip
print(f"{fewer} instructions fewer: {slots_us:.0f} us; measured: {gelu - silu:.0f} us")

# %% [markdown]
# Most of SiLU's tanh is hidden, most of GELU's is not. (Power lowers the clock in such a kernel, so
# these shares are lower estimates.) At head_dim 64, where MUFU alone takes as long as the tensor
# cores, GELU adds {glue:text}`gelu_64:.0f` % and SiLU {glue:text}`silu_64:.0f` %.
#
# ## The surprise: inside a kernel a tanh costs what any instruction costs
#
# The prediction took the slowest unit for the price. Two comparisons disagree.
#
# *The same tanh, fewer instructions.* SiLU is faster than GELU by more than the issue slots that it
# saves. Its missing instructions are worth as much as if nothing else ran.
#
# *As many instructions, no tanh.* In the kernel the published polynomial has as many instructions
# as GELU, because it must multiply by `scale`, which GELU folds into its constants. In registers it
# is {glue:text}`taylor_gain:.1f` times as fast. In the kernel the two take the same time.
#
# So at head_dim 128 the *number* of instructions sets the price, and a tanh is one of them. This
# record does not say why. Two candidates are energy, at the power limit ({doc}`v7_packed`), and
# waits that keep a warp group from computing while its MMAs run ({doc}`v8_own_waits`).
#
# ## Exercises
#
# :::{exercise} The best mixture
# :label: ex-aa-mixture
#
# A share $p$ of the elements goes without MUFU and takes $a$ instructions, the others take $b$
# instructions and one MUFU. Which $p$ is the fastest in the model, for SiLU with $a = 9$, $b = 3$?
# *(paper, ten minutes)*
# :::
#
# :::{solution} ex-aa-mixture
# :class: dropdown
#
# The MUFU limit falls with $p$, $(1 - p)/16$; the issue limit rises, $(b + (a - b)p)/128$. They
# meet at $p = (8 - b)/(8 + a - b) = 5/14 = 0.36$, with $16/(1 - p) = 24.9$ elements a clock. One of
# four and one of two lie on either side of it.
# :::
#
# :::{exercise} Hard swish for less
# :label: ex-aa-hardswish
#
# Write hard swish, $x \cdot \min(\max(x + 3, 0), 6) / 6$, in two instructions. What happens at
# $x = -3$ and for NaN? *(emulator, half an hour)*
# :::
#
# :::{solution} ex-aa-hardswish
# :class: dropdown
#
# `x * saturated(x, 1/6, 1/2)`, the sequence `hardswish.sat`. 1/6 is rounded, so at
# $x = -3$ the gate may be $10^{-8}$ instead of 0, an error far below $2^{-20}|x|$. NaN becomes 0 in
# the gate and NaN again when $x$ multiplies it. A scale turns 1/6 into `scale / 6` and adds one
# multiplication, unless the factor goes into the output, as in {doc}`forward v7 <v7_packed>`.
# :::
#
# :::{exercise} A gate for the backward pass
# :label: ex-aa-derivative
#
# The backward pass needs GELU and its derivative $g(x) + x\,g'(x)$ for the same score. With a
# polynomial gate $g'$ is a polynomial too, but beyond the clamp it must be 0. Find a sequence
# without MUFU and bound its error. *(paper, open)*
# :::
#
# :::{solution} ex-aa-derivative
# :class: dropdown
#
# Differentiating the fitted polynomial differentiates its error as well, and $x$ multiplies it.
# Better fit $g + x g' - 1/2$ itself, which is odd too. But it overshoots 1 near $x = 1.4$, by 0.13:
# a clamp of the result would cut the top off, or end at the wrong value. So clamp the argument, $-c
# \le x \le c$, with a polynomial that is 1 at $c$: two instructions at half the rate. Or spend the
# one tanh, from which the activation and its derivative both follow.
# :::
#
# ## Takeaways
#
# - Write an activation as $x$ times a gate. Then an error of the gate is a share of $|x|$, and a
#   saturating multiply-add makes it hold for all scores, for free.
# - Count the instructions in SASS: inside the kernel, at head_dim 128, a tanh costs no more than
#   another one.
