# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # Forward v7: packed
#
# How few instructions does an accurate activation take, and what does one of them cost inside a
# kernel?
#
# :::{admonition} In this chapter (50 minutes)
# You will write an activation as $x$ times a gate and bound its error for every score, compute in
# pairs of bf16 that survive the compiler, and ask the GPU for its clock. Back to back, forward v7
# is {glue:text}`loop_min:.0f` to {glue:text}`loop_max:.0f` % faster than forward v6.
# :::

# %% tags=["hide-input"]
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
import triton
import triton.language as tl

import tritonemu
from _lib import activation_sequences as sequences
from _lib import rare_charts, studies
from gdpa_kernels.calling.ladder import RUNGS
from gdpa_kernels.calling.launch import launch
from gdpa_kernels.gdpa import reference
from gdpa_kernels.gdpa.device import activations
from gdpa_kernels.gdpa.device.activations import (
    INSTRUCTIONS,
    multiply_add_packed,
    tanh_packed,
)
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts
from gdpa_lab.report.chapter import Chapter
from notebooks.forward import _activation_rates

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("forward/v7_packed", mode=mode, device=device, data_dir=data_dir)
V6, V7, LONGEST = "v6_short_kv", "v7_packed", "gdpa-self-full-2048"
CLOCKED = [(V6, "identity"), (V6, "relu"), (V6, "gelu_tanh"), (V7, "gelu_tanh")]
SAME = ("fp16-512", "identity-1024", "relu-1024")  # where v7 computes as v6


@chapter.measure
def _(session):
    session.measure(workload(LONGEST), [V6, "cudnn", V7])
    half = replace(workload("gdpa-self-full-512"), name=f"packed-{SAME[0]}", dtype="float16")
    session.measure(half, [V6, "cudnn", V7])
    for name in ("identity", "relu", "silu", "gelu_tanh", "gelu"):
        work = replace(workload("gdpa-self-full-1024"), name=f"packed-{name}-1024", activation=name)
        session.measure(work, [V6, "cudnn", V7])
    studies.snapshots(session, workload(LONGEST), CLOCKED)
    _activation_rates.run_all(session)


# The gates had a chapter of their own; its record counts until one of this chapter has them.
gates = chapter
if "clocks" not in chapter.record().tables:
    gates = Chapter("forward/activation_arithmetic", data_dir=data_dir)

us = chapter.times("forward/results", together=[V6, V7], direction="forward").filter(
    like="gdpa-", axis=0
)
gain = (us[V6] / us[V7]).dropna()
steady = chapter.times("measuring/power_wall", direction="forward", scope="sustained")
loops = (steady[V6] / steady[V7]).dropna()
assert min(gain.min(), loops.min()) > 1, "the text says that v7 is the faster kernel everywhere"
ladder = chapter.times("forward/results", direction="forward", scope="sustained")
ladder = ladder.loc["gdpa-self-full-1024"]
earlier = ladder[[rung.impl for rung in RUNGS[: [x.impl for x in RUNGS].index(V7)]]]
assert ladder["cudnn"] > 1.05 * ladder[V7], "the caption: by a clear margin"
assert earlier.min() > 0.98 * ladder["cudnn"], "the caption: as the first"
chapter.glue(loop_min=100 * (loops.min() - 1), loop_max=100 * (loops.max() - 1))

# %% tags=["remove-input"]
# | name: fig-v7-ladder
# | caption: >
# |   **Forward v7 passes cuDNN's softmax attention, as the first of the ladder by a clear
# |   margin.** Time of each rung on gdpa-self-full-1024, back to back; each tick leads to its
# |   chapter. Dashed: libraries.
# | alt: >
# |   An axis of milliseconds with a tick for each rung and dashed lines for the libraries. v7
# |   lies left of cuDNN and of every rung but v8.
chapter.ladder(V7)

# %% [markdown]
# ## The gate: one error bound for every score
#
# GELU, SiLU and hard swish are $x\,g(x)$ with a gate $g$ that rises from 0 to 1. An error $\delta$
# of the gate is an error $\delta |x|$ of the result. So here errors are shares of $|x|$, with two
# bounds: **2⁻¹⁰**, which for positive $x$ is the yardstick of {doc}`../operator/activations`, and
# **2⁻¹²**, what PTX promises for one `tanh.approx.f32`. A gate can be made in three ways:
#
# - *One MUFU.* $g = (1 + \tanh u)/2$, with $u = x/2$ for SiLU and a cubic for GELU.
# - *None.* $g$ is 1/2 plus an odd polynomial, clamped to $[0, 1]$ by `.sat`, a free modifier of the
#   last multiply-add. The last coefficient must be positive, so that the polynomial leaves the
#   interval at the right end.
# - *A mixture.* Every fourth element takes the polynomial, chosen at compile time: neighbouring
#   columns are registers of one thread, so no thread branches.

# %% tags=["remove-cell"]
scores = np.linspace(0, 8, 2001)
target = sequences.normal_gate(scores)
GATES = {f"degree {d}": getattr(sequences, f"GATE_GELU_{d}").value for d in (5, 9, 13)}
published = np.array([1, -1 / 6, 1 / 40]) / np.sqrt(2 * np.pi)
curves = {name: 0.5 + sequences.odd_polynomial(scores, c) for name, c in GATES.items()}
curves["published"] = 0.5 + sequences.odd_polynomial(scores, published)
errors = {name: abs(gate.clip(0, 1) - target) for name, gate in curves.items()}
errors = pd.DataFrame(errors, index=scores).rename(columns={"published": "published, clamped"})
errors["published"] = abs(curves["published"] - target)

# %% tags=["remove-input"]
# | name: fig-aa-gates
# | caption: >
# |   **A clamped polynomial is accurate for every score; the published one only near zero.** Error
# |   of gates for GELU: three fitted polynomials (colours), and the published one, clamped and as
# |   it is (grey).
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
# ## In registers the slowest unit sets the time
#
# On each SM one program of 16 warps evaluates a sequence 1,024 times on 4,096 elements in
# registers, between two readings of the SM's clock. The model counts the {term}`SASS` of this loop
# and takes the slowest of three limits per clock: 128 instructions issued, 64 comparisons or
# conversions, 16 {term}`MUFU` results.

# %% tags=["remove-cell"]
speed = _activation_rates.speeds(gates)
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
# |   **Whatever is faster than one tanh is less accurate.** Accuracy and speed in registers. The
# |   lines join the sequences than which none is faster and as accurate; the others are grey.
# |   Dashed: what the tensor cores need. Shaded: beyond the bound of 2⁻¹⁰, with `gelu_taylor6`,
# |   which has no bound, at the edge.
# | alt: >
# |   Scatter plot of elements a clock over the largest error, logarithmic, with a rising line each
# |   for GELU and SiLU. More accurate polynomials are slower. One tanh lies far left.
chapter.figure(
    rare_charts.scatter(
        kinds, xlabel="largest error / |x|", ylabel="elements per clock and SM",
        levels={"hidden behind the MMAs at head_dim 128": 8, "at head_dim 64": 16},
        most=("not accurate enough", 2.0**-10),
    ),
    measured=gates.holders("repeat"),
)  # fmt: skip

# %% tags=["remove-cell"]
chapter.predict(
    "In registers the slowest of the three limits gives the time of every sequence: found over "
    "modelled.", fits, least=0.97, most=1.15, shown=False,
    registered="forward/activation_arithmetic#1",
)  # fmt: skip
chapter.predict("Sequences with one tanh run at one rate: fastest over slowest.",
                ones.max() / ones.min(), most=1.05, shown=False,
                registered="forward/activation_arithmetic#2")  # fmt: skip
chapter.predict("A packed 16-bit tanh gains nothing over a plain one.", packed, most=1.05,
                shown=False, registered="forward/activation_arithmetic#3")  # fmt: skip
chapter.predict("A polynomial for every fourth element speeds SiLU up.", mix["silu"], least=1.2,
                shown=False, registered="forward/activation_arithmetic#4")  # fmt: skip
for name in ("gelu_tanh", "silu"):
    chapter.glue(**{f"issue_{name[:4]}": 100 * cost[f"{name}.tanh"].issued / 8})
chapter.glue(
    ones_min=ones.min(), ones_max=ones.max(), mix_gelu=mix["gelu_tanh"], mix_silu=mix["silu"],
    taylor_gain=rate["gelu_taylor6"] / rate["gelu_tanh.tanh"],
)  # fmt: skip
for one in ("gelu_tanh.tanh", "silu.tanh"):
    alike = front[front.index.str.startswith(one[:4])]
    quick = alike[alike["rate"] > 1.02 * rate[one]]
    assert (quick["error"] > speed["error"][one]).all(), "the caption says so"

# %% [markdown]
# *Where two limits are close, the loop is slower than either.* GELU and SiLU both need one MUFU
# result, but GELU also fills {glue:text}`issue_gelu:.0f` % of the issue slots that pass meanwhile,
# SiLU {glue:text}`issue_silu:.0f` %. Sequences with one tanh reach {glue:text}`ones_min:.1f` to
# {glue:text}`ones_max:.1f` (SiLU) elements a clock, of 16. A mixture makes SiLU
# {glue:text}`mix_silu:.2f` times as fast and GELU only {glue:text}`mix_gelu:.2f` times.
#
# *A packed tanh is no packed tanh.* One PTX instruction becomes two `MUFU.TANH` in SASS, with
# conversions around them, so it gains nothing.
#
# *A bound is free.* `gelu.poly5` has as many instructions as the published polynomial, which has no
# bound. In the emulator, whose `tanh`, `ex2` and `rcp` are as inaccurate as PTX allows, every
# sequence with a bound keeps it, and a NaN stays NaN.

# %% tags=["remove-cell"]
points = torch.linspace(-60, 60, 4801)
bounded = [name for name in SHOWN if sequences.BY_NAME[name].bound is not None]
with tritonemu.enabled():
    for name in bounded:
        error = sequences.error_per_x(name, _activation_rates.exact(name), points)
        assert max(error, speed["error"][name]) <= sequences.BY_NAME[name].bound, name
        assert sequences.evaluate(torch.full((4,), torch.nan), name).isnan().all(), name

# %% [markdown]
# ## The count: inside a kernel a tanh costs what any instruction costs
#
# Forward v6 ran gdpa-self-full-1024 with seven activations on the same inputs, in turns:

# %% tags=["remove-cell"]
by_name = gates.times()[V6].filter(like="activation-", axis=0)
by_name.index = pd.MultiIndex.from_tuples(name.split("-")[1:] for name in by_name.index)
by_name = by_name.unstack()[["128", "64"]].rename(columns="head_dim {}".format)
over = 100 * (by_name / by_name.loc["identity"] - 1)
for name in ("gelu_tanh", "silu"):
    chapter.glue(**{f"{name[:4]}_{d}": over.loc[name, f"head_dim {d}"] for d in (128, 64)})

# %% tags=["remove-input"]
# | name: fig-aa-kernel
# | caption: >
# |   **GELU and the polynomial without a tanh cost the same; SiLU costs far less.** Time of forward
# |   v6 over that of the identity, in bursts. `gelu`: the tanh of a cubic that is fitted to the
# |   error function.
# | alt: >
# |   A dot plot with a row for each of six activations and two marks a row, for head_dim 128 and
# |   64. ReLU is nearly free. SiLU is far left of GELU. Hard swish and the polynomial, which have
# |   no tanh, lie near GELU.
DRAWN = ["relu", "silu", "hardswish", "gelu_taylor6", "gelu", "gelu_tanh"]
chapter.figure(
    charts.dots(over.loc[DRAWN], xlabel="time over the identity in bursts (%)", levels={"": 0}),
    measured=gates.rows(workload=[f"activation-{n}-{d}" for n in by_name.index for d in (128, 64)]),
)

# %% tags=["remove-cell"]
gelu, silu, poly = (by_name.loc[n, "head_dim 128"] for n in ("gelu_tanh", "silu", "gelu_taylor6"))
identity = by_name.loc["identity", "head_dim 128"]
chapter.predict("At head_dim 128 GELU adds little to the time of the identity: the ratio of times.",
                gelu / identity, most=1.1,
                registered="forward/activation_arithmetic#5")  # fmt: skip
chapter.predict("SiLU needs one tanh too, so it takes the time of GELU: the ratio of times.",
                silu / gelu, least=0.97, most=1.03, shown=False,
                registered="forward/activation_arithmetic#6")  # fmt: skip
chapter.predict("The published polynomial, without a tanh, gains little over GELU: its speedup.",
                gelu / poly, most=1.05, form=".3f", shown=False,
                registered="forward/activation_arithmetic#7")  # fmt: skip

# %% [markdown]
# At head_dim 128 GELU adds {glue:text}`gelu_128:.0f` %, SiLU {glue:text}`silu_128:.0f` %. A MUFU
# result for each score takes half of the tensor cores' time there, so most of it should hide. If
# nothing hid, both would add the time of the MUFU, and SiLU would save the issue slots of its
# missing instructions:

# %% tags=["hide-input"]
ghz = speed["GHz"].median()
run = gates.record().workload("activation-silu-128")
scores_of_an_sm = run.num_heads_q * run.pairs / gates.recorded("repeat")["programs"][0]
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
# (Power lowers the clock in such a kernel, so these shares are lower estimates.) Two comparisons
# say what counts:
#
# - *The same tanh, fewer instructions.* SiLU is faster than GELU by more than the issue slots that
#   it saves.
# - *As many instructions, no tanh.* The published polynomial must multiply by `scale`, which GELU
#   folds into its constants, so it has as many instructions in the kernel. In registers it is
#   {glue:text}`taylor_gain:.1f` times as fast; in the kernel the two take the same time.
#
# So at head_dim 128 the *number* of instructions sets the price, and a tanh is one of them. (At 64,
# where the MUFU alone takes as long as the tensor cores, GELU adds {glue:text}`gelu_64:.0f` % and
# SiLU {glue:text}`silu_64:.0f` %.) How many can GELU do without?
#
# ## The pairs: two scores in one instruction
#
# | | {doc}`forward v6 <v6_short_kv>` | forward v7 |
# |:--|:--|:--|
# | GELU and SiLU of bf16 inputs | in fp32, one score at a time | in bf16, two at a time |
# | the factor `scale / 2` | a multiplication for each score | in the output |
# | carried to the next iteration | $P$ in fp32 | $x$ and $t$ in bf16, as many registers |
# | last step before P V | $P$ rounded to bf16 | $p = x + x t$ in bf16 |
# | consumer warp groups | two | two; four up to head_dim 64 |
#
# fp16 and all other activations are computed as in v6, whose GELU is $h + h \tanh u$ with $h =
# \frac{\sigma}{2} s$, $s$ the raw score, $\sigma$ the scale. Three observations:
#
# - *The factor commutes with the sum.* $\sum_j h_j (1 + t_j) v_j = \frac{\sigma}{2} \sum_j s_j (1 +
#   t_j) v_j$. The launcher multiplies `output_scale` by $\sigma / 2$.
# - *The matmuls read bf16 anyway.* v6 rounds $P$ before P V. If $s$ is rounded first, the rest can
#   be done in bf16, where sm_90 multiplies and adds two numbers in one instruction.
# - *The last step can wait.* Registers that a `wgmma` reads must not be written while another one
#   runs ({doc}`v5_pingpong`), so v6 carries $P$ in fp32 and rounds it late. v7 carries the pair
#   $(x, t)$ in the same registers and makes their multiply-add the late step.

# %% tags=["remove-input"]
chapter.code(activations.tanh_cubic_packed)

# %% [markdown]
# In {term}`SASS`, for head_dim 128, there is one tanh per score, so dividing by the number of
# `MUFU` gives instructions per score, once the {glue:text}`output_slots:.0f` that scale and round
# the output are left out:

# %% tags=["remove-cell"]
ARITHMETIC = ["FFMA", "FMUL", "HFMA2", "HMUL2", "F2FP", "PRMT"]
OUTPUT = 128 + 64  # FMUL and F2FP that scale and round the output
built = studies.compiled(
    {"forward v6": (V6, None), "forward v7": (V7, None)}, ("MUFU", *ARITHMETIC)
)
count = built.set_index("kernel")
chapter.glue(output_slots=OUTPUT)
# The code of a score stands three times in a loop's role, its last half instruction only twice.
count["for a score"] = (count[ARITHMETIC].sum(axis=1) - OUTPUT) / count["MUFU"] + 0.5 / 3

# %% tags=["remove-input"]
sorts = {
    "MUFU": count["MUFU"], "fp32": count[["FFMA", "FMUL"]].sum(axis=1),
    "bf16 pairs": count[["HFMA2", "HMUL2"]].sum(axis=1),
    "convert, join": count[["F2FP", "PRMT"]].sum(axis=1),
    "for a score": count["for a score"].round(1),
}  # fmt: skip
chapter.table(
    pd.DataFrame(sorts).rename_axis("kernel").reset_index(),
    caption="**Pairs of bf16 take the place of fp32 arithmetic.** Instructions of the compiled "
    "kernels; last: arithmetic instructions for a score, besides its tanh.",
    compiled="nvdisasm of kernels compiled for sm_90a when this page was built",
)
assert count["MUFU"].nunique() == 1, "the text says so"

# %% [markdown]
# The first version of `tanh_cubic_packed` had a statement for each step. Between statements the
# compiler took pairs apart: `PRMT` moved halves out of registers and back, and the kernel spilled.
# Inside one block of assembly a pair stays one register.
#
# ## Is it right?
#
# The arithmetic alone, in the emulator, with a tanh as inaccurate as PTX allows (errors as shares
# of $|x|$, $x = \sigma s$):


# %% tags=["hide-input"]
@triton.jit
def pairs_kernel(s_ptr, p_ptr, scale, SIZE: tl.constexpr):
    offsets = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x, t = tanh_packed(tl.load(s_ptr + offsets), scale, "gelu_tanh")
    tl.store(p_ptr + offsets, multiply_add_packed(x, t, x))


SCALE = 128**-0.5
raw = torch.linspace(-8, 8, 2**14) / SCALE
x = raw.double() * SCALE
p = torch.empty(len(raw), dtype=torch.bfloat16)
with tritonemu.enabled():
    launch(pairs_kernel, (16,), p.device, raw, p, SCALE, SIZE=1024)
    rounded = activations.evaluate(raw, "gelu_tanh", scale=SCALE).bfloat16()
ways = {
    "v7, pairs": p.double() * SCALE / 2,
    "v6, rounded": rounded.double(),
    "PyTorch in bf16": torch.nn.functional.gelu(x.bfloat16(), approximate="tanh").double(),
}
exact = reference.ACTIVATIONS["gelu_tanh"].function(x)
worst = {name: ((y - exact) / x).abs().max().item() for name, y in ways.items()}
print("; ".join(f"{name}: {error:.1e}" for name, error in worst.items()))
assert worst["v6, rounded"] < worst["PyTorch in bf16"] < worst["v7, pairs"], "the text says so"

# %% [markdown]
# v7 is about as accurate as PyTorch's GELU of bf16 scores.
#
# ## The surprise: the better kernel runs at a lower clock
#
# Why did the instructions cost time, if the timelines of {doc}`v6_short_kv` show tensor cores that
# are busy most of the time? Our guess was energy: saved instructions leave power for a higher
# clock. So we read the H200's clock while it repeated each kernel on gdpa-self-full-2048. The
# predictions are about {ref}`bursts <rule-scope>`, and the first assumes, from earlier trials, that
# an fp32 instruction per score costs 3 % of the rate:

# %% tags=["remove-cell"]
times = chapter.times()
here = times[V6] / times[V7]  # by workload: the rate of v7 over that of v6
same = (here[[f"packed-{name}" for name in SAME]] - 1).abs().max()
exact_gelu, tanh_gelu, packed_silu = (
    times.loc[f"packed-{name}-1024"] for name in ("gelu", "gelu_tanh", "silu")
)
change = tanh_gelu / exact_gelu  # between two runs
ahead = (steady["cudnn"] / steady[V7]).dropna()
chapter.glue(beside=change[V7] / change["cudnn"])
chapter.glue(cudnn_min=ahead.min(), cudnn_max=ahead.max())
power = chapter.recorded("power")
power["limited"] = power["throttle_reasons"].str.contains("power", case=False)
state = power.groupby(["impl", "activation"], sort=False).agg(
    **{
        "SM clock (MHz)": ("sm_clock_mhz", "median"), "power (W)": ("power_w", "median"),
        "at the power limit": ("limited", "sum"), "snapshots": ("limited", "count"),
    }
)  # fmt: skip

clock, watts = (state[name].xs("gelu_tanh", level=1) for name in ("SM clock (MHz)", "power (W)"))
cycles = clock[V7] / clock[V6]  # of a second

# %% tags=["remove-input"]
chapter.predict("v7 gains 4 to 8 % on gdpa-self-full-2048.", gain[LONGEST], least=1.04, most=1.08)
chapter.predict("Control: in fp16, with the identity and with ReLU v7 is v6. Largest difference:",
                same, most=0.03, form=".3f", shown=False)  # fmt: skip
chapter.predict("`gelu` in v7 runs at the rate of `gelu_tanh`: only the coefficients differ.",
                change[V7], least=0.97, most=1.03, shown=False)  # fmt: skip
chapter.predict("The GPU is at its power limit, and v7 runs at a higher clock than v6.", cycles,
                least=1.0)  # fmt: skip
chapter.predictions()

# %% tags=["hide-input"]
work, energy = here[LONGEST] / cycles, watts[V7] / watts[V6] / cycles  # of a cycle
print(f"v7 over v6: clock {cycles:.2f}, work of a cycle {work:.2f}, energy of a cycle {energy:.2f}")
for impl, tflops in chapter.times(value="tflops").loc[LONGEST, [V6, V7]].items():
    busy = tflops * 1e6 / clock[impl] / (132 * 4096)  # bf16 FLOPs of all SMs in a cycle
    print(f"{impl}: the tensor cores work in {busy:.0%} of the cycles")
ratio = (packed_silu[V6] / packed_silu["cudnn"]) / (tanh_gelu[V6] / tanh_gelu["cudnn"])  # two runs
print(f"v6 with SiLU instead of GELU: {fewer} instructions fewer, {1 / ratio - 1:.0%} faster")

# %% tags=["remove-input"]
named = state.index.map(lambda key: f"forward {key[0][:2]}, {key[1]}")
chapter.table(
    state[["SM clock (MHz)", "power (W)"]].set_axis(named).rename_axis("kernel").reset_index(),
    caption="**At nearly the same power, forward v7 runs at the lower clock.** Medians of "
    "snapshots while each kernel repeats gdpa-self-full-2048.", measured=chapter.holders("power"),
)  # fmt: skip
assert (state["at the power limit"] == state["snapshots"]).all(), "the text says: all of them"
assert work > energy > 1, "the text explains a lower clock"
chapter.glue(fewer=fewer, each=100 * (1 / ratio - 1) / fewer)

# %% [markdown]
# The guess was half right. Power limits the clock in every snapshot, but v7 runs at the *lower*
# clock and does more in each cycle. A cycle in which the tensor cores work takes more energy than
# one in which they wait, and at the limit more energy per cycle means fewer cycles a second. (Waits
# play a part too: {doc}`v8_own_waits`.)
#
# v6's SiLU and GELU differ by {glue:text}`fewer:.0f` instructions per score, and each costs
# {glue:text}`each:.1f` % of the rate, twice what the prediction assumed.
#
# On full batches v7 runs at {glue:text}`cudnn_min:.2f` to {glue:text}`cudnn_max:.2f` times the rate
# of cuDNN's softmax attention, back to back. Relative to cuDNN in the same run, exact GELU has
# {glue:text}`beside:.2f` times the rate of the tanh form.

# %% tags=["remove-input"]
chapter.profile("v6_short_kv", "v7_packed", workload="gdpa-self-full-512")

# %% [markdown]
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
# :::{exercise} The error of a pair
# :label: ex-v7-error
#
# bf16 rounds with a relative error of at most $2^{-8}$, and the packed tanh has an absolute error
# of at most $2^{-8}$. Bound the error of $p = x + x t$ as a share of $|x|$, and say which term
# dominates. *(paper, fifteen minutes)*
# :::
#
# :::{solution} ex-v7-error
# :class: dropdown
#
# The activation is half of $x (1 + t)$. Rounding $x$ changes it by at most $2^{-8} |x|$, and so
# does rounding $p$. An error $\delta$ of $t$ changes it by $\frac{\delta}{2} |x|$. $\delta$ is at
# most $2^{-8}$ from the tanh itself, plus $|u| / \cosh^2 u \le 0.45$ times the relative error of
# $u$. In $u$ up to seven roundings add up: that of $x$ counts three times in a cubic, then come
# $x^2$, the coefficients, a multiply-add and a multiplication. Together $(\frac{1}{2} (1 + 7 \cdot
# 0.45) + 2)\, 2^{-8} = 0.016$. The emulator finds less, since not all peak at one $x$. The
# roundings of $x$ and $p$ are half of it, and PyTorch makes them too.
# :::
#
# :::{exercise} A score that breaks fp16
# :label: ex-v7-fp16
#
# The largest number of fp16 is 65,504. With the factor $\sigma / 2$ left out, which raw scores
# overflow? Does one occur at head_dim 128 with inputs of standard deviation 1? And 30? *(paper,
# ten minutes)*
# :::
#
# :::{solution} ex-v7-fp16
# :class: dropdown
#
# For large positive scores $t = 1$ and $p = 2 s$: scores above 32,752 overflow. At head_dim 128 a
# raw score of standard normal inputs has a standard deviation of $\sqrt{128}$, so that is 2,895 of
# them and never occurs. With inputs of standard deviation 30 it is 3.2 of them: about one score in
# 1,500 would be infinite. So fp16 keeps v6's arithmetic.
# :::
#
# ## Takeaways
#
# - Write an activation as $x$ times a gate. Then an error of the gate is a share of $|x|$, and a
#   saturating multiply-add makes it hold for all scores, for free.
# - Inside the kernel, at head_dim 128, count the instructions: a tanh costs no more than another.
# - A factor that commutes with the sum belongs in the output, and a pair survives the compiler only
#   inside one block of assembly.
# - At the power limit a better kernel may run at a lower clock. Compare rates, not clocks.
