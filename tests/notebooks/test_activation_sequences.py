"""Sequences of instructions: their bounds, their coefficients, the code that is measured, and what
the chapter reads of it."""

import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tritonemu
from _lib import activation_sequences as sequences
from gdpa_kernels.gdpa.reference import ACTIVATIONS
from gdpa_lab.measuring import compile_check, measure, timing
from gdpa_lab.measuring.inputs import make_inputs
from gdpa_lab.report.chapter import Chapter
from notebooks.forward import _activation_rates as rates
from tests.report import gates
from tests.tiers import swept

pytestmark = pytest.mark.sweep

NAMES = [sequence.name for sequence in sequences.SEQUENCES]
BOUNDED = [sequence for sequence in sequences.SEQUENCES if sequence.bound is not None]


GATES = {
    "GATE_GELU_5": (sequences.normal_gate, 5, "gelu.poly5"),
    "GATE_GELU_9": (sequences.normal_gate, 9, "gelu.poly9"),
    "GATE_GELU_13": (sequences.normal_gate, 13, "gelu.poly13"),
    "GATE_TANH_9": (gates.tanh_gate, 9, "gelu_tanh.mix_quarter"),
    "GATE_SILU_13": (gates.logistic_gate, 13, "silu.mix_quarter"),
}


def points() -> torch.Tensor:
    """fp32 values from 2**-149 to 2**124 of both signs, dense from -60 to 60."""
    wide = torch.logspace(-149, 124, 1092, base=2, dtype=torch.float64).float()
    return torch.cat([torch.linspace(-60, 60, 12_001), wide, -wide])


def function(name: str):
    """Exact value of what the sequence computes; for the published polynomial itself, not GELU."""
    return ACTIVATIONS[name if name in ACTIVATIONS else sequences.BY_NAME[name].exact].function


@pytest.mark.parametrize("sequence", BOUNDED, ids=lambda sequence: sequence.name)
def test_errors_stay_within_the_documented_bound(sequence):
    x = points()
    with tritonemu.enabled():
        y = sequences.evaluate(x, sequence.name).double()
    error = (y - function(sequence.name)(x.double())).abs()
    allowed = sequence.bound * x.double().abs() + 2.0**-149
    assert (error <= allowed).all(), x[error > allowed][:5]


ROUGH = [sequence for sequence in BOUNDED if sequence.bound > 1e-6]  # not a few fp32 roundings


@pytest.mark.parametrize("sequence", ROUGH, ids=lambda sequence: sequence.name)
def test_bounds_are_not_idle(sequence):
    """Instructions at their worst documented error come within a factor of 3 of the bound."""
    x = points()
    x = x[x.abs() > 2.0**-20]
    with tritonemu.enabled():
        y = sequences.evaluate(x, sequence.name).double()
    error = (y - function(sequence.name)(x.double())).abs() / x.double().abs()
    assert error.max() > sequence.bound / 3


@pytest.mark.parametrize("name", [sequence.name for sequence in BOUNDED])
def test_extremes(name):
    """Scores of both signs, beyond what the bounds are stated for; a NaN stays one."""
    magnitudes = (1e4, 1e19, 1e37, 1e-39, 1e-45, 0.0, math.inf)
    points = torch.tensor([sign * x for x in magnitudes for sign in (1, -1)] + [math.nan])
    with tritonemu.enabled():
        found = sequences.evaluate(points, name).tolist()
    assert math.isnan(found[-1])
    right = function(name)(points.double()).tolist()
    for x, y, exact in zip(points.tolist()[:-1], found, right, strict=False):
        if math.isinf(x):
            assert y == exact or (math.isnan(y) and math.isnan(exact))
        else:
            assert abs(y - exact) <= sequences.BY_NAME[name].bound * abs(x) + 2.0**-149


def test_the_published_polynomial_has_no_bound():
    with tritonemu.enabled():
        y = sequences.evaluate(torch.tensor([-12.0]), "gelu_taylor6").item()
    assert y > 1e4 and ACTIVATIONS["gelu"].function(torch.tensor(-12.0)).abs() < 1e-6


@pytest.mark.parametrize("name", GATES)
def test_the_fit_gives_the_coefficients(name):
    gate, degree, sequence = GATES[name]
    written = getattr(sequences, name).value
    found, error = gates.fit_gate(gate, degree)
    assert len(found) == len(written) == degree // 2 + 1
    x = np.linspace(0, 3, 301)
    difference = sequences.odd_polynomial(x, found) - sequences.odd_polynomial(x, written)
    assert np.abs(difference).max() < 0.05 * error
    assert gates.gate_error(gate, written) == pytest.approx(error, rel=0.02)
    assert error < sequences.BY_NAME[sequence].bound < 1.1 * error


def test_more_terms_and_other_coefficients_are_worse_or_better_as_they_should():
    errors = [gates.fit_gate(sequences.normal_gate, d)[1] for d in (5, 9, 13)]
    assert errors[0] > 5 * errors[1] > 25 * errors[2]
    taylor = (0.3989422804, -0.0664903801, 0.0099735570)
    assert gates.gate_error(sequences.normal_gate, taylor) > 5 * errors[0]
    for factor in (0.999, 1.001):
        bent = [factor * c for c in sequences.GATE_GELU_9.value]
        assert gates.gate_error(sequences.normal_gate, bent) > errors[1]


def test_a_degree_without_a_rising_end_is_refused():
    with pytest.raises(ValueError, match="degree must be 5, 9, 13, ..., got 7"):
        gates.fit_gate(sequences.normal_gate, 7)


def test_the_fit_inside_tanh():
    found, error = gates.fit_tanh()
    assert sequences.ERF_3.value == pytest.approx(found, rel=1e-4)
    assert error < 1.5e-4


@pytest.mark.parametrize("name", (sequences.LOOP, *NAMES))
def test_the_measured_kernel_computes_the_sequence(name):
    compute = (lambda x: x) if name == sequences.LOOP else function(name)
    bound = 1e-6
    if name in NAMES and sequences.BY_NAME[name].bound is not None:
        bound += 1.2 * sequences.BY_NAME[name].bound
    repeated = sequences.Repeated.make("cpu", programs=2, rounds=3, block=256)
    with tritonemu.enabled():
        assert repeated.error_per_x(name, compute) <= bound
        if name != sequences.LOOP:
            assert repeated.error_per_x(name, lambda x: 0.9 * compute(x)) > bound
    assert repeated.evaluations == 3 * sequences.UNROLL * 256


# Sequence -> instructions of one element, without the loop's. ptxas may add constants: 0.4
# instructions at most.
WRITTEN = {
    "gelu_tanh.tanh": {"FMUL": 3, "FFMA": 2, "MUFU": 1},
    "gelu_tanh.mix_quarter": {"FMUL": 2.75, "FFMA": 2.75, "MUFU": 0.75},
    # A pair of tanh is one instruction of PTX and two of the machine.
    "gelu_tanh.f16x2": {"FMUL": 3, "FFMA": 2, "MUFU": 1, "F2FP": 0.5, "HADD2": 1},
    "gelu_tanh.bf16x2": {"FMUL": 3, "FFMA": 2, "MUFU": 1, "F2FP": 0.5},
    "gelu.tanh3": {"FMUL": 3, "FFMA": 2, "MUFU": 1},
    "gelu.poly5": {"FMUL": 2, "FFMA": 3},
    "gelu.poly9": {"FMUL": 2, "FFMA": 5},
    "gelu.poly13": {"FMUL": 2, "FFMA": 7},
    "gelu_taylor6": {"FMUL": 2, "FFMA": 3},
    "silu.tanh": {"FMUL": 1, "FFMA": 1, "MUFU": 1},
    "silu.ex2_rcp": {"FMUL": 2, "FADD": 1, "MUFU": 2},
    "silu.mix_quarter": {"FMUL": 1.25, "FFMA": 2.5, "MUFU": 0.75},
    "hardswish.clamp": {"FMUL": 2, "FADD": 1, "FMNMX": 2},
    "hardswish.sat": {"FMUL": 1, "FFMA": 1},
    "relu": {"FMNMX": 1},
}


@pytest.mark.parametrize("name", swept(WRITTEN, ("gelu.poly13", "silu.tanh")))
def test_the_measured_loop_holds_the_instructions(name):
    loop = sequences.loop_cost(sequences.LOOP).mnemonics
    own = Counter(sequences.loop_cost(name).mnemonics)
    own.subtract(loop)
    for mnemonic, count in WRITTEN[name].items():
        assert own[mnemonic] == pytest.approx(count, abs=0.26), mnemonic
    others = +(own - Counter(WRITTEN[name]))
    allowed = 1.4 if name == "gelu_tanh.bf16x2" else 0.4  # a shift or a byte permute widens bf16
    assert sum(others.values()) < allowed, own
    assert compile_check.read(sequences.built(name)).spill_bytes == 0


def test_the_error_function_is_measured_with_all_its_instructions():
    cost = sequences.loop_cost("gelu.erf")
    assert cost.mufu == 1 and cost.issued > 20
    assert compile_check.read(sequences.built("gelu.erf")).spill_bytes == 0


def test_every_sequence_is_compiled():
    assert {*WRITTEN, "gelu.erf"} == set(NAMES)


@pytest.mark.parametrize("name", ("gelu_tanh.tanh", "gelu_tanh.mix_quarter", "gelu.erf"))
def test_the_clock_is_read_around_the_loop_and_behind_barriers(name):
    sass = compile_check.disassemble(sequences.built(name))
    clocks = [at for at in range(len(sass)) if sass.startswith("SR_CLOCKLO", at)]
    barriers = [at for at in range(len(sass)) if sass.startswith("BAR.SYNC", at)]
    feedback = [at for at in range(len(sass)) if sass.startswith(", 0.0625, ", at)]
    assert len(clocks) == len(barriers) == 2
    assert barriers[0] < clocks[0] < feedback[0] < feedback[-1] < barriers[1] < clocks[1]
    assert not any(word in sass for word in ("SHFL", " STS", " LDS")), "mixing moves no data"


def test_costs_are_the_slowest_of_three_limits():
    cost = sequences.Cost({"FFMA": 6.0, "FMNMX": 1.0, "MUFU": 1.0})
    assert (cost.mufu, cost.issued, cost.clocks) == (1, 8, 1 / 16)
    assert sequences.Cost({"FMNMX": 3.0}).clocks == 3 / 64
    assert sequences.Cost({"FFMA": 9.0, "MUFU": 1.0}).clocks == 10 / 128


def test_a_listing_without_whole_evaluations_is_refused():
    with pytest.raises(RuntimeError, match="must have a loop, got none"):
        sequences.count(["EXIT "], [])
    code = ["FFMA R0, R0, 0.0625, R1 ", "@P0 BRA `(.L_x_0) "]
    with pytest.raises(RuntimeError, match="multiple of 32 evaluations, got 1"):
        sequences.count(code, [range(2)])


def test_the_error_per_x_sees_an_error():
    gelu = ACTIVATIONS["gelu"].function
    with tritonemu.enabled():
        rough = sequences.error_per_x("gelu.poly5", gelu, torch.linspace(-8, 8, 4096))
    assert 4e-3 < rough < 4.5e-3


# What the chapter measures of them


def test_errors_are_rows_of_the_record():
    names = ["silu.tanh", "gelu.poly5"]
    with tritonemu.enabled():
        accuracy = rates.errors(torch.linspace(-60, 60, 201), names)
    recorded = Chapter("forward/activation_arithmetic").recorded("accuracy")
    assert set(accuracy.columns) <= set(recorded.columns)
    assert [row[0] for row in accuracy.rows] == names


def test_speeds_hold_every_sequence_of_the_record():
    found = rates.speeds(Chapter("forward/activation_arithmetic"))
    assert set(rates.NAMES) <= set(found.index)
    assert (found["rate"] * found["clocks"] - 1).abs().max() < 1e-12
    assert found.loc["gelu_taylor6", "error"] > 1e3 > found.loc["gelu.poly5", "error"]


def test_every_activation_in_the_kernel_has_a_row_of_times(monkeypatch):
    tile = {"batch": 1, "num_heads_q": 1, "num_heads_k": 1, "max_seqlen_q": 64, "max_seqlen_k": 64}
    small = replace(rates.workload("gdpa-self-full-1024"), **tile)
    monkeypatch.setattr(rates, "workload", lambda name: small)
    monkeypatch.setattr(measure, "run_once", lambda made: (made.call(), 0))
    monkeypatch.setattr(timing, "sample_kernels", lambda calls, *how: dict.fromkeys(calls, [2.0]))
    rows = []
    session = SimpleNamespace(
        device="cpu", protocol=None, add=lambda work, row: rows.append(row),
        launch=lambda name, work, rungs, run: run(make_inputs(work, device="cpu")),
    )  # fmt: skip
    with tritonemu.enabled():
        rates._kernels(session, 64)
    assert [row.workload for row in rows] == [f"activation-{name}-64" for name in rates.IN_KERNEL]
    assert {(row.scope, row.samples_us, row.passed) for row in rows} == {("kernel", (2.0,), True)}
