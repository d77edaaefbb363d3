"""Measuring without a GPU: what is timed, what is refused, what a failure leaves behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gdpa_kernels import baselines, measure, timing
from gdpa_kernels.gdpa import v0_eager
from gdpa_kernels.inputs import make_inputs
from gdpa_kernels.workload import workload

SMALL = replace(
    workload("gdpa-self-half-jagged-256"), name="small", batch=3, max_seqlen_q=20, max_seqlen_k=20
)


@pytest.fixture
def cpu(monkeypatch):
    """Let `measure.measure` run on the CPU; return the list of what was timed."""
    timed = []

    def sample(functions, device, protocol):
        timed.extend(functions)
        return {name: [1.0, 2.0, 3.0] for name in functions}

    monkeypatch.setattr(measure, "run_once", lambda ready: (ready.call(), 0))
    monkeypatch.setattr(timing, "sample_kernels", sample)
    return timed


def run(impls) -> list:
    return measure.measure(SMALL, impls, device=torch.device("cpu"), log=lambda text: None)


def test_a_right_result_is_timed_and_recorded_raw(cpu):
    (row,) = run(["v0_eager"])
    assert cpu == ["v0_eager "]
    assert row.samples_us == (1.0, 2.0, 3.0) and row.failure is None
    assert row.error.passed and row.error.max_abs <= row.error.budget
    assert row.flops == SMALL.flops("forward") and row.bytes_read == SMALL.bytes_read("forward")


@pytest.mark.parametrize("damage", ("one element", "nan", "not finite", "shape"))
def test_nothing_is_timed_behind_a_failed_check(cpu, monkeypatch, damage):
    forward = v0_eager.forward

    def wrong(*args, **kwargs):
        out = forward(*args, **kwargs)
        if damage == "shape":
            return out[:-1]
        out[3, 1, 5] += {"one element": 3.0, "nan": float("nan"), "not finite": float("inf")}[
            damage
        ]
        return out

    monkeypatch.setattr(v0_eager, "forward", wrong)
    rows = run(["v0_eager", "reference"])
    failed, right = sorted(rows, key=lambda row: row.failure is None)
    assert cpu == ["reference "]
    assert failed.impl == "v0_eager" and failed.samples_us == () and failed.failure
    assert right.impl == "reference" and right.samples_us


def test_an_implementation_that_cannot_run_leaves_its_reason(cpu):
    rows = {row.impl: row for row in run(["v2_tma", "fa3", "v0_eager"])}
    assert rows["v2_tma"].failure.startswith("RuntimeError: tma_kernel needs tensors on a CUDA")
    assert rows["fa3"].failure.startswith("Unsupported: needs the package flash-attn-3")
    assert rows["v0_eager"].samples_us and cpu == ["v0_eager "]


def test_variants_are_kept_apart(cpu):
    rows = run([("v0_eager", "replicate 0", {}), ("v0_eager", "replicate 1", {})])
    assert [row.variant for row in rows] == ["replicate 0", "replicate 1"]
    assert cpu == ["v0_eager replicate 0", "v0_eager replicate 1"]


def test_a_session_needs_a_gpu():
    with pytest.raises(ValueError, match="device must be a CUDA device to measure, got 'cpu'"):
        measure.Session("notebooks/10_figures.py", "cpu")


def test_softmax_reference_is_attention():
    inputs = make_inputs(replace(SMALL, dtype="float32"), device="cpu")
    out = baselines.softmax_reference(inputs, torch.float64)
    ends = inputs.cu_seqlens_q.tolist()
    for start, end in zip(ends, ends[1:], strict=False):
        parts = (t[start:end].double().transpose(0, 1) for t in (inputs.q, inputs.k, inputs.v))
        expected = torch.nn.functional.scaled_dot_product_attention(*parts)
        torch.testing.assert_close(out[start:end], expected.transpose(0, 1))


def test_every_baseline_says_what_it_computes_and_what_it_needs():
    for name, baseline in baselines.BASELINES.items():
        assert baseline.impl == name and baseline.math in ("activation", "softmax")
        available = baseline.availability()
        assert available.ok or "needs" in available.reason


def test_compiled_baseline_computes_the_activation():
    inputs = make_inputs(replace(SMALL, dtype="float32"), device="cpu")
    arguments = inputs.arguments() | {"activation": ("gelu_tanh",), "scale": 128**-0.5}
    torch._dynamo.reset()
    out = baselines.BASELINES["torch_compile"].prepare(inputs)()
    torch.testing.assert_close(out, v0_eager.forward(**arguments), atol=1e-5, rtol=1e-5)
