"""Measuring without a GPU: what is timed, what is refused, what a failure leaves behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gdpa_kernels import baselines, emulator, measure, operators, testing, timing
from gdpa_kernels.block_attention import eliminations, v1_one_tile
from gdpa_kernels.block_attention import reference as block_reference
from gdpa_kernels.gdpa import v0_eager
from gdpa_kernels.inputs import make_inputs
from gdpa_kernels.workload import Between, Workload, workload

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


BLOCKS = Workload(
    name="blocks",
    operator="block_attention",
    batch=3,
    num_heads_q=2,
    num_heads_k=2,
    head_dim=16,
    max_seqlen_q=40,
    max_seqlen_k=40,
    lengths_q=Between(0.4, 1.0),
    block_size=16,
)
TURNED = replace(BLOCKS, name="turned", rotary=True, rotate_v=True)
DIRECTIONS = ("forward", "backward")


@pytest.fixture
def small_parts(monkeypatch):
    """Check in several parts, as large workloads are."""
    monkeypatch.setattr(operators.BlockAttention, "PART", 32)


@pytest.fixture
def peers(monkeypatch):
    """Let the peers that need no GPU run, and varlen attention be PyTorch's, block by block."""
    for name, baseline in baselines.BLOCK_BASELINES.items():
        runs = replace(baseline, needs=lambda: None)
        monkeypatch.setitem(baselines.BLOCK_BASELINES, name, runs)

    def varlen_attn(q, k, v, ends_q, ends_k, longest_q, longest_k, *, scale):
        assert torch.equal(ends_q, ends_k) and ends_q.diff().max() <= longest_q == longest_k
        parts = [x.split(ends_q.diff().tolist()) for x in (q, k, v)]
        blocks = (tuple(x.transpose(0, 1) for x in part) for part in zip(*parts, strict=True))
        attention = torch.nn.functional.scaled_dot_product_attention
        return torch.cat([attention(*b, scale=scale).transpose(0, 1) for b in blocks])

    from torch.nn.attention import varlen

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)


def run_blocks(work, impls, direction, scopes=("kernel",)) -> list:
    with emulator.enabled():
        return measure.measure(
            work, impls, device=torch.device("cpu"), direction=direction, scopes=scopes,
            log=lambda text: None,
        )  # fmt: skip


@pytest.mark.parametrize("work", (BLOCKS, TURNED), ids=lambda work: work.name)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_block_attention_is_checked_timed_and_recorded(cpu, small_parts, work, direction):
    rows = run_blocks(work, ["v1_one_tile", "v0_flash", "reference"], direction)
    assert [row.impl for row in rows] == ["v1_one_tile", "v0_flash", "reference"]
    for row in rows:
        assert row.failure is None and row.samples_us == (1.0, 2.0, 3.0)
        assert row.operator == "block_attention" and row.direction == direction
        assert row.math == "softmax" and row.error.passed
        tensors = 1 if direction == "forward" else 3
        assert row.error.elements == tensors * work.total_q * 2 * 16
        assert row.flops == work.flops(direction)
        assert row.bytes_read == work.bytes_read(direction)
    assert rows[0].config["num_warps"] == 4 and rows[1].config["BLOCK_M"] == 16


def test_the_error_of_a_part_is_that_of_the_whole(small_parts):
    inputs = make_inputs(BLOCKS, device="cpu")
    made = measure.candidate("reference", inputs, direction="backward")
    results = made.call()
    operator = operators.of(inputs, "backward")
    assert len(list(operator._parts())) > 1
    arguments = inputs.rung_arguments()
    arguments |= {name: arguments[name].double() for name in "qkv"}
    exact = block_reference.backward(inputs.grad_out.double(), **arguments)
    for found, result, right in zip(
        operator.check("softmax", results), results, exact, strict=True
    ):
        whole = testing.compare(name=found.name, actual=result, expected=right, baseline=result)
        for name, value in whole.to_dict().items():
            assert found.to_dict()[name] == pytest.approx(value), name


@pytest.mark.parametrize("damage", ("one element", "nan", "shape", "dtype"))
@pytest.mark.parametrize("which", (0, 1, 2))
def test_one_wrong_gradient_is_not_timed(cpu, small_parts, monkeypatch, which, damage):
    backward = v1_one_tile.backward

    def wrong(*args, **kwargs):
        gradients = list(backward(*args, **kwargs))
        if damage == "shape":
            gradients[which] = gradients[which][:-1]
        elif damage == "dtype":
            gradients[which] = gradients[which].half()
        else:
            gradients[which][-1, 1, 5] += 3.0 if damage == "one element" else float("nan")
        return tuple(gradients)

    monkeypatch.setattr(v1_one_tile, "backward", wrong)
    rows = run_blocks(BLOCKS, ["v1_one_tile", "reference"], "backward")
    failed, right = sorted(rows, key=lambda row: row.failure is None)
    assert cpu == ["reference "] and right.samples_us
    assert failed.impl == "v1_one_tile" and failed.samples_us == ()
    assert ("dq", "dk", "dv")[which] in failed.failure
    assert failed.error is None or not failed.error.passed


def test_studies_and_configs_are_variants(cpu):
    config = v1_one_tile.Config(WIDTH=16, heads_inner=True)
    study = eliminations.Config(lse=True, delta=True)
    listed = [
        ("v1_one_tile", "heads inner", {"config": config}),
        ("eliminations", "none", {}),
        ("eliminations", "lse and delta", {"config": study}),
    ]
    rows = run_blocks(BLOCKS, listed, "backward")
    assert all(row.failure is None for row in rows)
    assert [row.variant for row in rows] == ["heads inner", "none", "lse and delta"]
    assert rows[0].config["heads_inner"] and not rows[1].config["lse"] and rows[2].config["lse"]
    (refused,) = run_blocks(TURNED, ["eliminations"], "forward")
    assert refused.failure == "Unsupported: eliminations needs a workload without rotary"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_peers_of_block_attention_are_right(cpu, peers, direction):
    torch._dynamo.reset()
    plain = {r.impl: r for r in run_blocks(BLOCKS, ["fa2_varlen", "torch_compile"], direction)}
    assert {impl: row.failure for impl, row in plain.items()} == dict.fromkeys(plain)
    turned = [
        "torch_compile",
        ("eager_rotary", "", {"attention": "v1_one_tile"}),
        ("rotary_kernel", "", {"attention": "v1_one_tile"}),
    ]
    rows = {row.impl: row for row in run_blocks(TURNED, turned, direction)}
    assert {impl: row.failure for impl, row in rows.items()} == dict.fromkeys(rows)
    assert rows["rotary_kernel"].config == {"attention": "v1_one_tile"}
    apart = replace(TURNED, rotate_v=False, num_heads_k=1)
    for row in run_blocks(apart, ["torch_compile", *turned[1:]], direction):
        assert row.failure is None and row.error.passed
    refused = run_blocks(TURNED, ["fa2_varlen"], direction)
    refused += run_blocks(BLOCKS, ["rotary_kernel"], direction)
    assert [row.failure for row in refused] == [
        "Unsupported: needs a workload without rotary",
        "Unsupported: needs a workload with rotary",
    ]


def test_a_compiled_backward_runs_again(peers):
    torch._dynamo.reset()
    made = measure.candidate(
        "torch_compile", make_inputs(BLOCKS, device="cpu"), direction="backward"
    )
    for first, second in zip(made.call(), made.call(), strict=True):
        assert torch.equal(first, second)


def test_a_wrong_peer_is_found(cpu, peers, monkeypatch):
    right = baselines.block_offsets
    monkeypatch.setattr(baselines, "block_offsets", lambda inputs: right(inputs)[[0, -1]])
    (row,) = run_blocks(BLOCKS, ["fa2_varlen"], "forward")
    assert row.failure and not row.samples_us and cpu == []


def test_block_offsets_are_the_blocks():
    inputs = make_inputs(BLOCKS, device="cpu")
    tokens = block_reference.tokens_of_blocks(inputs.cu_seqlens, 16)
    offsets = baselines.block_offsets(inputs)
    assert offsets.dtype == torch.int32 and len(offsets) == BLOCKS.blocks + 1
    assert offsets[:-1].tolist() == tokens[:, 0].tolist()
    assert offsets.diff().tolist() == (tokens >= 0).sum(1).tolist()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_scopes_of_block_attention(cpu, peers, monkeypatch, direction):
    called = []

    def sample(functions, device, protocol):
        called.append(sorted(functions))
        for function in functions.values():
            result = function()
            tensors = result if isinstance(result, tuple) else (result,)
            if called[1:] == [sorted(functions)]:  # op
                assert len(tensors) == (1 if direction == "forward" else 3)
        return {name: [4.0] for name in functions}

    monkeypatch.setattr(timing, "sample_kernels", sample)
    monkeypatch.setattr(timing, "sample_ops", sample)
    impls = ["v1_one_tile", "reference", "fa2_varlen"]
    rows = run_blocks(BLOCKS, impls, direction, ("kernel", "op", "schedule"))
    assert called[0] == ["fa2_varlen ", "reference ", "v1_one_tile "]
    assert called[1] == ["v1_one_tile "]
    assert called[2] == ["fa2_varlen ", "v1_one_tile "]
    schedules = [row for row in rows if row.scope == "schedule"]
    assert all((r.flops, r.bytes_read, r.bytes_written) == (0, 0, 0) for r in schedules)
    assert len(schedules) == 2 and all(row.error is None for row in schedules)
    with pytest.raises(ValueError, match="scopes must be among 'kernel', 'op', 'schedule', got"):
        run_blocks(BLOCKS, ["reference"], direction, ("wall",))


def test_directions_that_are_not_measured():
    for work in (SMALL, BLOCKS):
        with pytest.raises(ValueError, match="direction must be one of .*, got 'both'"):
            measure.measure(work, [], device=torch.device("cpu"), direction="both")


def test_block_attention_without_a_gpu_says_what_it_needs(cpu):
    (row,) = measure.measure(
        BLOCKS, ["v1_one_tile"], device=torch.device("cpu"), log=lambda text: None
    )
    assert "needs tensors on a CUDA device" in row.failure


def test_the_second_result_meets_nan_where_the_first_was(monkeypatch):
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    kept = (torch.zeros(3), torch.zeros(2))
    seen = []

    def call():
        seen.append([tensor.isnan().all().item() for tensor in kept])
        return kept

    measure.run_once(measure.Candidate("stub", "softmax", call))
    assert seen == [[False, False], [True, True]]
