"""Measuring without a GPU: what is timed, what is refused, what a failure leaves behind."""

import contextlib
import functools
import json
import math
import re
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import attention
from torch.nn.attention import varlen

import tritonemu
from _lib import gradients
from gdpa_kernels.block_attention import reference as block_reference
from gdpa_kernels.block_attention import rotary
from gdpa_kernels.block_attention.kernels import v1_one_tile
from gdpa_kernels.calling import ladder
from gdpa_kernels.gdpa import reference as gdpa_reference
from gdpa_kernels.gdpa.kernels import v0_eager, v1_tiled_backward
from gdpa_kernels.gdpa.kernels import v4_warp_specialized_backward as v4
from gdpa_lab import __main__
from gdpa_lab.measuring import (
    baselines,
    measure,
    operators,
    record,
    sustained,
    system,
    testing,
    timing,
)
from gdpa_lab.measuring.inputs import make_inputs
from gdpa_lab.measuring.length_distributions import Between, Full, Uniform
from gdpa_lab.measuring.session import ONLY_VARIABLE, Session
from gdpa_lab.measuring.workload import Workload
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import doctor
from gdpa_lab.report.chapter import Chapter
from notebooks.block import _eliminations, _rotary_alone
from tests.peers import varlen_attn
from tests.records import H200, LOAD, SELF, SHORT, STATE, available
from tests.tiers import sweep, swept

SMALL = replace(
    workload("gdpa-self-half-jagged-256"), name="small", batch=3, max_seqlen_q=20, max_seqlen_k=20
)
CROSS = replace(SMALL, name="cross", lengths_k=Full(), max_seqlen_k=7)
# Keys of more than one tile of v4; v5 takes all of them at once.
JAGGED = replace(
    SMALL, name="jagged", batch=2, num_heads_q=1, num_heads_k=1, max_seqlen_q=70, max_seqlen_k=140,
    lengths_q=Between(0.4, 1.0), lengths_k=Between(0.9, 1.0),
)  # fmt: skip
LONG = replace(JAGGED, name="long", batch=1, max_seqlen_k=300)
SHARED = {"shared_q": True, "lengths_q": Full(), "lengths_k": Full()}
POOLING = replace(SMALL, name="pooling", num_heads_k=2, max_seqlen_q=5, **SHARED)
BLOCKS = Workload(
    name="blocks", operator="block_attention", batch=3, num_heads_q=2, num_heads_k=2, head_dim=16,
    max_seqlen_q=40, max_seqlen_k=40, lengths_q=Between(0.4, 1.0), block_size=16,
)  # fmt: skip
TURNED = replace(BLOCKS, name="turned", rotary=True, rotate_v=True)
DIRECTIONS = ("forward", "backward")
BACKWARDS = [rung.impl for rung in ladder.BACKWARD_RUNGS if "wide" not in rung.impl]
OF_ANY_TILES = [impl for impl in BACKWARDS if "one_tile" not in impl]
WALKS = ["v4_warp_specialized_backward", "v5_short_kv_backward"]  # a list of work, OF_ANY_TILES
LISTED = [*WALKS, "v6_one_tile_backward"]


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


def run(work, impls, direction="forward", scopes=("kernel",), arch=None, **options) -> list:
    """The rows of `measure.measure` on the CPU; in the emulator if `arch` names a GPU."""
    with tritonemu.enabled(arch) if arch else contextlib.nullcontext():
        return measure.measure(
            work, impls, device=torch.device("cpu"), direction=direction, scopes=scopes,
            log=lambda text: None, **options,
        )  # fmt: skip


emulated = functools.partial(run, arch="sm_90")


def damaged(tensor: torch.Tensor, damage: str) -> torch.Tensor:
    if damage == "shape":
        return tensor[:-1]
    if damage == "dtype":
        return tensor.half()
    tensor[-1, 1, 5] += {"one element": 3.0, "nan": math.nan, "not finite": math.inf}[damage]
    return tensor


@pytest.mark.parametrize(
    ("work", "impls", "direction"),
    [
        (SMALL, ["v0_eager"], "forward"),
        (JAGGED, [*OF_ANY_TILES, "reference"], "backward"),
        *((work, ["v1_one_tile", "v0_flash", "reference"], direction)
          for work in (BLOCKS, TURNED) for direction in DIRECTIONS),
    ],
)  # fmt: skip
def test_a_right_result_is_timed_and_recorded_raw(cpu, small_parts, work, impls, direction):
    rows = emulated(work, impls, direction)
    assert [row.impl for row in rows] == impls and sorted(cpu) == sorted(f"{x} " for x in impls)
    tokens = work.total_q + (2 * work.total_k if direction == "backward" else 0)
    math = "activation" if work.operator == "gdpa" else "softmax"
    for row in rows:
        assert (row.operator, row.direction, row.math) == (work.operator, direction, math)
        assert row.failure is None and row.samples_us == (1.0, 2.0, 3.0)
        assert row.error.passed and row.error.max_abs <= row.error.budget
        assert row.error.elements == tokens * work.num_heads_q * work.head_dim
        for count in ("flops", "bytes_read", "bytes_written"):
            assert getattr(row, count) == getattr(work, count)(direction)
    configs = {row.impl: row.config for row in rows}
    if work.operator == "block_attention":
        assert configs["v1_one_tile"]["num_warps"] == 4 and configs["v0_flash"]["BLOCK_M"] == 16
    elif direction == "backward":
        tiles = configs["v1_tiled_backward"]
        assert (tiles["keys"]["BLOCK_N"], tiles["queries"]["BLOCK_N"]) == (128, 64)
        assert {configs[impl]["registers"] for impl in WALKS} == {240}
        assert configs["reference"] == {}


@pytest.mark.parametrize("damage", ("one element", "nan", "not finite", "shape", "dtype"))
@pytest.mark.parametrize(
    ("module", "work", "which"),
    [
        (v0_eager, SMALL, "out"),
        *((module, work, which)
          for module, work in ((v1_one_tile, BLOCKS),
                               (v1_tiled_backward, replace(SMALL, head_dim=16)))
          for which in ("dq", "dk", "dv")),
    ],
)  # fmt: skip
def test_nothing_is_timed_behind_a_failed_check(
    cpu, small_parts, monkeypatch, module, work, which, damage
):
    direction = "forward" if which == "out" else "backward"
    right, impl = getattr(module, direction), module.__name__.rpartition(".")[2]

    def wrong(*args, **kwargs):
        found = right(*args, **kwargs)
        if which == "out":
            return damaged(found, damage)
        gradients = dict(zip(("dq", "dk", "dv"), found, strict=True))
        gradients[which] = damaged(gradients[which], damage)
        return tuple(gradients.values())

    monkeypatch.setattr(module, direction, wrong)
    rows = emulated(work, [impl, "reference"], direction)
    failed, right_one = sorted(rows, key=lambda row: row.failure is None)
    assert cpu == ["reference "] and right_one.impl == "reference" and right_one.samples_us
    assert failed.impl == impl and failed.samples_us == () and which in failed.failure
    assert failed.error is None or not failed.error.passed


ON_CUDA = "NotImplementedError: .*needs tensors on a CUDA device"
NO_FA3 = "Unsupported: needs FlashAttention-3, which is not inst"


@pytest.mark.parametrize(
    ("work", "impl", "direction", "arch", "reason"),
    [
        (SMALL, "v2_tma", "forward", None, "NotImplementedError: impl 'v2_tma' needs tensors on a"),
        (SMALL, "v1_tiled_backward", "backward", None, ON_CUDA),
        (BLOCKS, "v1_one_tile", "forward", None, ON_CUDA),
        (SMALL, "fa3", "forward", None, NO_FA3),
        (LONG, "fa3", "backward", "sm_90", NO_FA3),
        (LONG, "v1_tiled", "backward", "sm_90", "ValueError: impl must be one of refer"),
        (LONG, "v5_short_kv_backward", "backward", "sm_90",
         "NotImplementedError: backward_impl 'v5_short_kv_backward' needs a max_seqlen_k of at mo"),
        (TURNED, "eliminations", "forward", "sm_90",
         r"Unsupported: eliminations needs a workload without rotary, got \(sin, cos\)$"),
    ],
)  # fmt: skip
def test_an_implementation_that_cannot_run_leaves_its_reason(
    cpu, work, impl, direction, arch, reason
):
    rows = {row.impl: row for row in run(work, [impl, "reference"], direction, arch=arch)}
    assert re.match(reason, rows[impl].failure)
    assert rows["reference"].samples_us and cpu == ["reference "]


def test_a_call_that_waits_for_the_device_has_no_time(cpu, monkeypatch):
    sample = timing.sample_kernels

    def strict(functions, *how):
        if "v0_eager " in functions:
            raise timing.WaitsForDevice("v0_eager ")
        return sample(functions, *how)

    monkeypatch.setattr(timing, "sample_kernels", strict)
    rows = {row.impl: row for row in run(SMALL, ["v0_eager", "reference"])}
    assert rows["v0_eager"].failure == (
        "WaitsForDevice: a timed call must not wait for the device, got one of v0_eager that does"
    )
    assert rows["v0_eager"].samples_us == () and rows["v0_eager"].error.passed
    assert rows["reference"].samples_us and cpu == ["reference "]


def test_each_scope_times_whom_it_was_given_and_failures_stand_in_it(cpu, monkeypatch):
    called = []

    def sample(functions, device, protocol, *, seconds):
        called.append(([*functions], seconds))
        return {name: ([1.0], LOAD) for name in functions}

    monkeypatch.setattr(sustained, "sample_each", sample)
    scopes = {"kernel": ["v0_eager", "reference"], "sustained": ["v2_tma", "v0_eager"]}
    rows = run(SMALL, ["v2_tma", "v0_eager", "reference"], scopes=scopes, seconds=1.0)
    assert called == [(["v0_eager "], 1.0)] and cpu == ["v0_eager ", "reference "]
    found = {(row.impl, row.scope): row.failure is None for row in rows}
    assert found == {
        ("v2_tma", "sustained"): False, ("v0_eager", "kernel"): True,
        ("v0_eager", "sustained"): True, ("reference", "kernel"): True,
    }  # fmt: skip
    assert [row.load for row in rows if row.scope == "sustained"] == [None, LOAD]
    (row,) = run(SMALL, ["v2_tma"], scopes=("schedule",))
    assert row.scope == "kernel" and row.failure


def test_a_session_needs_a_gpu():
    with pytest.raises(ValueError, match="device must be a CUDA device to measure, got 'cpu'"):
        Session("notebooks/forward/results.py", "cpu")


MASKED = replace(SMALL, num_heads_k=2, causal=True, window=3)


@pytest.mark.parametrize("work", (SMALL, replace(SMALL, lengths_k=Full(), max_seqlen_k=7), MASKED))
def test_softmax_gradients_are_autograds(work):
    inputs = make_inputs(replace(work, dtype="float32"), device="cpu")
    leaves = [getattr(inputs, name).double().requires_grad_() for name in "qkv"]
    twin = replace(inputs, **dict(zip("qkv", leaves, strict=True)))
    out = baselines.softmax_reference(twin, torch.float64)
    expected = torch.autograd.grad(out, leaves, inputs.grad_out.double())
    found = baselines.softmax_gradients(inputs, torch.float64)
    for gradient, right in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, right)


@pytest.fixture
def small_parts(monkeypatch):
    """Check in several parts, as large workloads are."""
    monkeypatch.setattr(operators.BlockAttention, "PART", 32)
    monkeypatch.setattr(operators.Gdpa, "PART", 32)


@pytest.fixture
def peers(monkeypatch):
    """Let the peers that need no GPU run, on any backend, and varlen attention be PyTorch's, block
    by block."""
    available(monkeypatch)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr(attention, "sdpa_kernel", lambda backend: contextlib.nullcontext())


def doubled(batch):
    return replace(batch, q=batch.q.double(), k=batch.k.double(), v=batch.v.double())


@pytest.mark.parametrize("direction", ("forward", "backward"))
@pytest.mark.parametrize("kind", ("activation", "softmax"))
def test_scores_of_long_sequences_are_computed_by_heads(monkeypatch, kind, direction):
    names = ("relu", "silu", "gelu", "identity")
    work = replace(MASKED, activation=names)
    inputs, results = make_inputs(work, device="cpu"), []
    for most in (operators.Gdpa.SCORES, 0):
        monkeypatch.setattr(operators.Gdpa, "SCORES", most)
        operator = operators.of(inputs, direction)
        results.append([x for _, part in operator.exact(kind) for x in part])
    for whole, by_heads in zip(*results, strict=True):
        torch.testing.assert_close(by_heads, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("direction", ("forward", "backward"))
def test_parts_keep_the_targets_of_their_sequences(small_parts, direction):
    work = replace(
        MASKED, batch=5, lengths_q=Uniform(0.5), lengths_k=None, max_seqlen_q=30, max_seqlen_k=30,
        target_share=0.4,
    )  # fmt: skip
    inputs = make_inputs(work, device="cpu")
    operator = operators.of(inputs, direction)
    assert len(list(operator._parts())) > 1
    batch = doubled(inputs.batch())
    if direction == "forward":
        expected = [gdpa_reference.forward_in_dtype(batch)]
    else:
        expected = gdpa_reference.backward_in_dtype(inputs.grad_out.double(), batch)
    for places, part in operator.exact("activation"):
        for whole, rows, right in zip(expected, places, part, strict=True):
            torch.testing.assert_close(whole[rows], right)


@pytest.mark.parametrize("room", (True, False))
def test_what_is_allowed_is_computed_once(small_parts, monkeypatch, room):
    inputs = make_inputs(BLOCKS, device="cpu")
    operator, computed = operators.of(inputs, "backward"), []
    backward = block_reference.backward_in_dtype

    def count(grad_out, batch):
        computed.append(grad_out.dtype)
        return backward(grad_out, batch)

    monkeypatch.setattr(block_reference, "backward_in_dtype", count)
    monkeypatch.setattr(operators.BlockAttention, "_has_room", lambda self: room)
    results = backward(inputs.grad_out, inputs.batch())
    wrong = [tensor.clone() for tensor in results]
    wrong[1][-1, 0, 0] = 50.0
    first, second, third = (operator.check("softmax", r) for r in (results, wrong, results))
    parts = len(list(operator._parts()))
    assert computed.count(torch.bfloat16) == parts and (
        computed.count(torch.float64) == (1 if room else 3) * parts
    )
    assert first == third and [c.passed for c in second] == [True, False, True]
    assert [c.max_abs_budget for c in first] == [c.max_abs_budget for c in second]


@pytest.mark.parametrize("always", (True, False))
def test_a_call_that_runs_out_of_memory_is_tried_once_more_alone(small_parts, monkeypatch, always):
    operator = operators.of(make_inputs(BLOCKS, device="cpu"), "forward")
    calls = []

    def full():
        calls.append(len(operator._exact))
        if always or operator._exact:
            raise torch.OutOfMemoryError("full")
        return next(iter(results))

    results = [torch.cat([values[0] for _, values in operator.exact("softmax")]).bfloat16()]
    monkeypatch.setattr(measure, "run_once", lambda ready: (ready.call(), 0))
    monkeypatch.setattr(measure, "free", lambda: None)
    monkeypatch.setattr(operator, "candidate", lambda *_: operators.Candidate("x", "softmax", full))
    operator._exact["softmax", 0] = results
    tried = measure.attempt("x", operator)
    assert calls == [1, 0]
    assert ("full" in tried.failure) if always else tried.failure is None


KEYS = v1_tiled_backward.Config(keys=v1_tiled_backward.Tile(BLOCK_M=32, BLOCK_N=32))
# (implementation, variant, its Config or None) of calls that are measured together.
VARIANTS = [
    (SMALL, "forward", [("v0_eager", f"replicate {i}", None) for i in range(2)]),
    (BLOCKS, "backward", [
        ("v1_one_tile", "heads inner", v1_one_tile.Config(WIDTH=16, heads_inner=True)),
        ("eliminations", "none", None),
        ("eliminations", "lse and delta", _eliminations.Config(lse=True, delta=True)),
    ]),
    (replace(JAGGED, batch=1), "backward", [
        ("v1_tiled_backward", "keys 32", KEYS),
        ("v4_warp_specialized_backward", "2 steps", v4.Config(q_stages=2)),
    ]),
]  # fmt: skip


@pytest.mark.parametrize("work, direction, listed", VARIANTS)
def test_variants_are_kept_apart_with_their_configs(cpu, work, direction, listed):
    given = [(impl, name, {"config": config} if config else {}) for impl, name, config in listed]
    rows = emulated(work, given, direction)
    assert cpu == [f"{impl} {name}" for impl, name, _ in listed]
    for row, (impl, name, config) in zip(rows, listed, strict=True):
        assert (row.impl, row.variant, row.failure) == (impl, name, None)
        if config or impl == "eliminations":
            assert row.config == asdict(config or _eliminations.Config())


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("head_dim", (sweep(64), 128))
@pytest.mark.parametrize("impl", ladder.impls("block_attention"))
def test_every_rung_of_block_attention_has_its_own_constants(cpu, impl, head_dim, direction):
    work = TURNED if impl.startswith("v4") else BLOCKS
    work = replace(work, head_dim=head_dim, block_size=64)
    for_blackwell = ladder.rung(impl, "block_attention") in ladder.BLACKWELL_BLOCK_RUNGS
    (row,) = run(work, [impl], direction, arch="sm_100" if for_blackwell else "sm_90")
    assert row.failure is None and bool(row.config) == (impl != "reference")


@pytest.mark.sweep
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_peers_of_block_attention_are_right(cpu, peers, monkeypatch, direction):
    """Code is generated for the workload with the most in it; of the others the graph is run."""
    torch._dynamo.reset()
    generate = torch.compile

    def trace(function, *, dynamic, options):
        return generate(function, dynamic=dynamic, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", trace)
    plain = {r.impl: r for r in emulated(BLOCKS, ["fa2_varlen", "torch_compile"], direction)}
    assert {impl: row.failure for impl, row in plain.items()} == dict.fromkeys(plain)
    whole = replace(BLOCKS, lengths_q=Full(), max_seqlen_q=32, max_seqlen_k=32)  # two blocks each
    assert emulated(whole, ["fa2_varlen"], direction)[0].failure is None
    turned = [
        "torch_compile",
        ("eager_rotary", "", {"attention": "v1_one_tile"}),
        ("rotary_kernel", "", {"attention": "v1_one_tile"}),
    ]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", generate)
        rows = {row.impl: row for row in emulated(TURNED, turned, direction)}
    assert {impl: row.failure for impl, row in rows.items()} == dict.fromkeys(rows)
    assert rows["rotary_kernel"].config == {"attention": "v1_one_tile"}
    apart = replace(TURNED, rotate_v=False, num_heads_k=1)
    for row in emulated(apart, turned, direction):
        assert row.failure is None and row.error.passed
    refused = emulated(TURNED, ["fa2_varlen"], direction)
    refused += emulated(BLOCKS, ["rotary_kernel"], direction)
    assert [row.failure for row in refused] == [
        "Unsupported: needs a workload without rotary",
        "Unsupported: needs a workload with rotary",
    ]


@pytest.mark.sweep
def test_a_compiled_backward_runs_again(peers):
    torch._dynamo.reset()
    inputs = make_inputs(BLOCKS, device="cpu")
    made = measure.candidate("torch_compile", inputs, direction="backward")
    for first, second in zip(made.call(), made.call(), strict=True):
        assert torch.equal(first, second)


@pytest.fixture
def called(cpu, peers, monkeypatch):
    """Arguments of each sampler: the results of the functions, by their names."""
    found = []

    def sample(functions, device, protocol):
        found.append({name: functions[name]() for name in sorted(functions)})
        return {name: [4.0] for name in functions}

    for sampler in ("sample_kernels", "sample_ops", "sample_hosts"):
        monkeypatch.setattr(timing, sampler, sample)
    return found


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_scopes_of_block_attention(called, direction):
    impls = ["v1_one_tile", "reference", "fa2_varlen"]
    rows = emulated(BLOCKS, impls, direction, ("kernel", "op", "host", "schedule"))
    ours, peer = "v1_one_tile ", "fa2_varlen "
    names = [[peer, "reference ", ours], [ours], [ours], [peer, ours]]
    assert [[*each] for each in called] == names
    result = called[1][ours]
    assert isinstance(result, torch.Tensor) if direction == "forward" else len(result) == 3
    host, *schedules = (row for row in rows if row.scope in ("host", "schedule"))
    assert host.scope == "host" and host.error.passed
    assert len(schedules) == 2 and all(row.error is None for row in schedules)
    assert {(r.flops, r.bytes_read, r.bytes_written) for r in (host, *schedules)} == {(0, 0, 0)}
    scopes = r"\('kernel', 'sustained', 'op', 'host', 'schedule'\)"
    with pytest.raises(ValueError, match=f"scopes must be among {scopes}, got"):
        emulated(BLOCKS, ["reference"], direction, ("wall",))


def test_directions_that_are_not_measured():
    for work in (SMALL, BLOCKS):
        with pytest.raises(ValueError, match="direction must be one of .*, got 'both'"):
            run(work, [], "both")


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


def test_a_result_made_in_inference_mode_can_be_poisoned():
    call = torch.inference_mode()(lambda: torch.ones(3))
    with tritonemu.fake_gpu("sm_90"):
        result, _ = measure.run_once(measure.Candidate("stub", "softmax", call))
    assert result.tolist() == [1, 1, 1]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("work", (SMALL, JAGGED, POOLING, BLOCKS), ids=lambda work: work.name)
def test_the_error_of_a_part_is_that_of_the_whole(small_parts, work, direction):
    reference = block_reference if work is BLOCKS else gdpa_reference
    inputs = make_inputs(work, device="cpu")
    operator = operators.of(inputs, direction)
    parts = len(list(operator._parts()))
    assert parts == 1 if work.shared_q else parts > 1
    batch, exact = inputs.batch(), doubled(inputs.batch())
    if direction == "forward":
        outs = reference.forward_in_dtype(batch), reference.forward(exact)
        results, right = ((out[0] if work is BLOCKS else out,) for out in outs)
    else:
        results = reference.backward_in_dtype(inputs.grad_out, batch)
        right = reference.backward(inputs.grad_out.double(), exact)
    checked = operator.check("softmax" if work is BLOCKS else "activation", results)
    for found, result, expected in zip(checked, results, right, strict=True):
        whole = testing.compare(name=found.name, actual=result, expected=expected, baseline=result)
        assert found.passed
        for name, value in asdict(whole).items():
            assert getattr(found, name) == pytest.approx(value), name


@pytest.mark.parametrize("direction", swept(DIRECTIONS, ("forward",)))
def test_peers_of_gdpa_are_right(cpu, peers, small_parts, direction):
    torch._dynamo.reset()
    rows = run(CROSS, ["fa2_varlen", "torch_compile", "cudnn"], direction)
    assert [(row.impl, row.math) for row in rows[-2:]] == [
        ("fa2_varlen", "softmax"), ("torch_compile", "activation"),
    ]  # fmt: skip
    assert rows[0].failure == "Unsupported: needs sequences of one length, got a jagged batch"
    for row in rows[-2:]:
        assert row.failure is None and row.error.passed and row.flops == CROSS.flops(direction)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "changes",
    ({}, {"causal": True}, {"window": 3}, {"causal": True, "window": 2},
     {"lengths_k": Full(), "max_seqlen_k": 7}),
)  # fmt: skip
def test_a_peer_computes_masks_and_groups_of_heads_or_says_no(
    cpu, peers, monkeypatch, direction, changes
):
    def flash(q, k, v, *, softmax_scale, causal=False, window_size=(-1, -1), **lengths):
        sides = (window_size[0], 0) if causal else window_size
        return varlen.varlen_attn(
            q, k, v, *lengths.values(), scale=softmax_scale, window_size=sides, enable_gqa=True
        )

    module = SimpleNamespace(flash_attn_varlen_func=flash)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    work = replace(SMALL, num_heads_k=2, lengths_q=Full(), **changes)
    rows = run(work, ["fa2_varlen", "fa3", "cudnn"], direction)
    failures = {row.impl: row.failure for row in rows if row.failure is not None}
    refused = f"Unsupported: needs a batch without a window, got window={work.window}"
    assert failures == ({"cudnn": refused} if "window" in changes else {})
    assert all(row.error.passed for row in rows if row.impl not in failures)


def test_an_option_that_an_older_pytorch_lacks_is_named(cpu, peers, monkeypatch):
    def older(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        pytest.fail("it must not be called")

    monkeypatch.setattr(varlen, "varlen_attn", older)
    (row,) = run(replace(SMALL, num_heads_k=2), ["fa2_varlen"], "forward")
    version = torch.__version__
    assert row.failure == f"Unsupported: varlen_attn of torch {version} has no enable_gqa"


def test_a_wrong_peer_is_found(cpu, peers, monkeypatch):
    """In blocks it attends to whole sequences, in gdpa its gradients have another scale."""
    offsets, right = baselines.block_offsets, varlen.varlen_attn
    with monkeypatch.context() as patch:
        patch.setattr(baselines.peer, "block_offsets", lambda x: offsets(x)[[0, -1]])
        (blocks,) = emulated(BLOCKS, ["fa2_varlen"], "forward")
    assert blocks.failure and not blocks.samples_us
    monkeypatch.setattr(varlen, "varlen_attn", lambda *args, scale: right(*args, scale=1.1 * scale))
    (row,) = run(SMALL, ["fa2_varlen"], "backward")
    assert row.failure.startswith("check failed: dq") and cpu == []


def test_scopes_of_gdpa_backward(called):
    work = replace(JAGGED, batch=1, max_seqlen_q=20, max_seqlen_k=20)
    impls = [*BACKWARDS, ("v1_tiled_backward", "again", {}), "reference", "fa2_varlen"]
    rows = emulated(work, impls, "backward", ("kernel", "op", "schedule"))
    assert all(row.failure is None for row in rows)
    kernels, ops, schedules = called
    steps = [f"{impl} {baselines.STEP}" for impl in BACKWARDS]
    assert {*ops} == {*(f"{impl} " for impl in BACKWARDS), *steps} and len(kernels) == len(impls)
    assert {len(result) for result in (*kernels.values(), *ops.values())} == {3}
    assert [*schedules] == [f"{impl} " for impl in LISTED]
    lists = [*schedules.values()]
    assert [len(made[0]) for made in lists] == [2, 1, 2] and lists[1][0].tolist() == [0]
    ops = [row for row in rows if row.scope == "op"]
    assert [row.variant for row in ops] == ["", baselines.STEP] * len(BACKWARDS)
    for row in ops[1::2]:
        for count in ("flops", "bytes_read", "bytes_written"):
            assert getattr(row, count) == sum(map(getattr(work, count), DIRECTIONS))
        assert row.peak_bytes is None and row.config["forward"] in ladder.impls()
    assert all("forward" not in row.config for row in ops[::2])


@pytest.fixture
def counted(monkeypatch):
    """Memory without a GPU: a call "needs" as many bytes as its results have."""

    def run_once(made):
        result = made.call()
        return result, sum(tensor.nbytes for tensor in result)

    monkeypatch.setattr(measure, "run_once", run_once)


def test_memory_of_steps_gathers_in_one_table(session, counted, peers):
    work = replace(JAGGED, batch=1, max_seqlen_q=20, max_seqlen_k=20)
    with tritonemu.enabled():
        gradients.memory(session, work, ["v1_tiled_backward", "fa2_varlen"])
        gradients.memory(session, replace(work, name="other"), ["cudnn_varlen", "v1_tiled"])
    table, size = session.tables["memory"], (work.total_q + 2 * work.total_k) * 256
    assert table.columns == ("workload", "impl", "bytes")
    assert table.rows == (
        ("jagged", "v1_tiled_backward", size), ("jagged", "fa2_varlen", size),
        ("other", "cudnn_varlen", None), ("other", "v1_tiled", None),
    )  # fmt: skip
    assert set(session.workloads) == {"jagged", "other"}
    assert "backward_impl must be" in session.said[-1]
    with pytest.raises(ValueError, match="workload must be of operator 'gdpa', got 'block_att"):
        gradients.memory(session, BLOCKS, [])


def test_the_memory_of_a_wrong_step_is_not_recorded(session, counted, monkeypatch):
    backward = v1_tiled_backward.backward

    def wrong(*args, **kwargs):
        dq, dk, dv = backward(*args, **kwargs)
        return dq, dk * 1.5, dv

    monkeypatch.setattr(v1_tiled_backward, "backward", wrong)
    work = replace(SMALL, head_dim=16)
    with tritonemu.enabled():
        gradients.memory(session, work, ["v1_tiled_backward"])
    assert session.tables["memory"].rows == (("small", "v1_tiled_backward", None),)
    failed = "  no memory of v1_tiled_backward: ValueError: check failed: dk: max error"
    assert session.said[-1].startswith(failed)


def turn_alone(session, work, direction="forward", **options) -> list:
    with tritonemu.enabled():
        _rotary_alone.measure_rotary(session, work, direction=direction, **options)
    return session.rows


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("rotate_v", (True, False))
def test_rotary_alone(session, cpu, small_parts, direction, rotate_v):
    work = replace(TURNED, rotate_v=rotate_v)
    rows = {row.impl: row for row in turn_alone(session, work, direction)}
    assert set(rows) == {"rotary", "rotary_eager"} == set(cpu)
    size = work.total_q * 2 * 16 * 2 * (3 if rotate_v else 2)
    for row in rows.values():
        assert row.samples_us == (1.0, 2.0, 3.0) and row.error.passed and row.failure is None
        assert row.error.elements == size // 2 and row.math == "rotary"
        assert (row.bytes_read, row.bytes_written) == (size + work.total_q * 16 * 2, size)
        assert row.flops == 3 * size // 2 and row.direction == direction


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_rotary_turned_the_wrong_way_is_not_timed(session, cpu, monkeypatch, direction):
    right = rotary.rotary

    def wrong(*tensors, transposed):
        return right(*tensors, transposed=not transposed)

    monkeypatch.setattr(rotary, "rotary", wrong)
    rows = {row.impl: row for row in turn_alone(session, TURNED, direction)}
    assert rows["rotary"].failure.startswith("check failed: q: max error")
    assert rows["rotary_eager"].samples_us and cpu == ["rotary_eager"]


def test_rotary_alone_is_timed_back_to_back_too(session, cpu, monkeypatch):
    slow = sustained.HostTooSlow("one in 4012 us")
    loops = {"rotary": ([4.0], LOAD), "rotary_eager": slow}
    monkeypatch.setattr(sustained, "sample_each", lambda calls, *_, seconds: loops)
    rows = turn_alone(session, TURNED, scopes=("kernel", "sustained"), seconds=0.7)
    assert [(row.impl, row.scope, row.samples_us) for row in rows] == [
        ("rotary", "kernel", (1.0, 2.0, 3.0)), ("rotary_eager", "kernel", (1.0, 2.0, 3.0)),
        ("rotary", "sustained", (4.0,)), ("rotary_eager", "sustained", ()),
    ]  # fmt: skip
    assert rows[2].load == LOAD and rows[3].failure == "HostTooSlow: one in 4012 us"
    with pytest.raises(ValueError, match="workload must have rotary, got 'blocks' without"):
        turn_alone(session, BLOCKS, "forward")


def test_accuracy_is_that_of_every_element(small_parts, peers):
    once = ("v1_one_tile", "", {})
    twice = ("rotary_kernel", "", {"attention": "v1_one_tile"})
    with tritonemu.enabled():
        inputs = make_inputs(TURNED, device="cpu")
        table = gradients.errors(inputs, {1: once, 2: twice})
        found = {
            entry[0]: measure.candidate(entry[0], inputs, direction="backward", **entry[2]).call()
            for entry in (once, twice)
        }
    assert table.columns == ("gradient", "roundings", "impl", "max_abs", "mean_abs")
    assert [row[:3] for row in table.rows] == [
        (name, n, impl)
        for name in ("dk", "dq", "dv")
        for n, impl in ((1, "v1_one_tile"), (2, "rotary_kernel"))
    ]
    turned = tuple(turn.double() for turn in inputs.rotary)
    exact = block_reference.backward(
        inputs.grad_out.double(), replace(doubled(inputs.batch()), rotary=turned)
    )
    means = {}
    for name, roundings, impl, largest, mean in table.rows:
        which = ("dq", "dk", "dv").index(name)
        error = (found[impl][which].double() - exact[which]).abs()
        assert largest == pytest.approx(error.max().item())
        assert mean == pytest.approx(error.mean().item())
        means[name, roundings] = mean
    assert all(means[name, 2] > means[name, 1] for name in ("dq", "dk", "dv"))


@pytest.fixture
def session(monkeypatch):
    """A session without a GPU; what it measures are the calls it makes."""
    made = object.__new__(Session)
    made.__dict__.update(
        device=torch.device("cpu"), protocol=timing.DEFAULT, ceilings=[], rows=[], tables={},
        workloads={}, said=[], broken=[], _limits=set(), _plan={},
        _partial=None,
        _probe=SimpleNamespace(measure=lambda *_, **__: {}, problem=lambda *_: None),
    )  # fmt: skip
    made.log = made.said.append
    monkeypatch.setattr(measure, "measure", lambda work, *_, **__: [work.name])
    for name in ("limits", "attention_copies"):
        monkeypatch.setattr(timing, name, lambda device, name=name: [name])
    for kind, said in ((timing, "timing"), (sustained, "sustained")):
        monkeypatch.setattr(
            kind, "measure_ceilings", lambda limits, *_, said=said: [(said, *limits)]
        )
    return made


def test_a_session_may_be_asked_for_some_workloads_only(session, monkeypatch):
    monkeypatch.setenv(ONLY_VARIABLE, "self-full-(256|512)$")
    session.measure(SHORT, ["v1_tiled"])
    session.measure(SELF, ["v1_tiled"])
    session.launch("nothing", BLOCKS, [], lambda inputs: pytest.fail("it was left out"))
    assert session.rows == [SHORT.name] and [*session.workloads] == [SHORT.name]


def every_part(session):
    session.measure(BLOCKS, ["v1_one_tile"], direction="backward")
    _rotary_alone.measure_rotary(session, TURNED)
    gradients.accuracy(session, TURNED, {})


@pytest.mark.parametrize("fails", (False, True))
def test_a_session_in_time_measures_everything_but_a_table_that_fails(session, monkeypatch, fails):
    def errors(*_, **__):
        if fails:
            raise NotImplementedError("impl 'v4_rotary' needs sm_90")
        return "table"

    monkeypatch.setattr(_rotary_alone, "_rows", lambda session, inputs, *_: [inputs.workload.name])
    monkeypatch.setattr(gradients, "errors", errors)
    every_part(session)
    assert session.rows == ["blocks", "turned"] and set(session.workloads) == {"blocks", "turned"}
    assert session.tables == ({} if fails else {"accuracy": "table"})
    assert ("NotImplementedError: impl 'v4_rotary' needs sm_90" in session.said[-1]) == fails
    assert not any("left out" in line for line in session.said)


def test_a_backward_needs_copies_of_its_mixes_and_each_scope_ceilings_of_its_own(session):
    session.measure(SMALL, ["v1_tiled"])
    assert session.ceilings == [("timing", "limits")]
    session.measure(SMALL, ["v1_tiled_backward"], direction="backward")
    session.measure(BLOCKS, ["v1_one_tile"])
    assert session.ceilings[1:] == [("timing", "attention_copies")]
    for _ in range(2):
        session.measure(SMALL, ["v1_tiled"], scopes={"sustained": ["v1_tiled"]}, seconds=1.0)
        session.measure(BLOCKS, ["v1_one_tile"], scopes=("kernel", "sustained"))
    assert session.ceilings[2:] == [("sustained", "limits"), ("sustained", "attention_copies")]


def test_what_a_child_process_measured_is_not_measured_here(session, monkeypatch):
    given = {}

    def tried(workload, impls, direction, **how):
        given.update(how)
        return {0: ["of the child"]}

    session._probe.measure = tried
    monkeypatch.setattr(measure, "measure", lambda work, impls, **how: [*impls, how["seconds"]])
    session.measure(SMALL, ["v2_tma", "v1_tiled"], scopes=("sustained",), seconds=0.5)
    assert session.rows == ["of the child", "v1_tiled", 0.5]
    assert given == {"protocol": timing.DEFAULT, "scopes": ("sustained",), "seconds": 0.5}
    session.rows.clear()
    session.measure(SMALL, ["v2_tma"])
    assert session.rows == ["of the child"]


def test_what_has_not_been_right_is_not_launched(session):
    def problem(impls, operator, direction):
        assert (operator, direction) == ("gdpa", "backward")
        return "v5_short_kv_backward needs sm_90" if "v5_short_kv_backward" in impls else None

    launched = []
    session._probe.problem = problem
    for impls in (["v5_short_kv_backward"], ["v1_tiled_backward"]):
        session.launch("bits", SMALL, impls, launched.append, direction="backward")
    (inputs,) = launched
    assert inputs.workload == SMALL and inputs.q.device == session.device
    gradients.memory(session, SMALL, ["v5_short_kv_backward"])
    assert session.tables["memory"].rows == (("small", "v5_short_kv_backward", None),)
    both = {1: "v5_short_kv_backward", 2: "v1_tiled_backward"}
    gradients.accuracy(session, SMALL, both)
    session.launch("parts", SMALL, [], lambda inputs: 1 / 0, direction="backward")
    assert "accuracy" not in session.tables
    told = [line for line in session.said if line.startswith("  ")]
    wrong = "NotImplementedError: v5_short_kv_backward needs sm_90"
    assert told == [
        f"  no bits: {wrong}",
        f"  no memory of v5_short_kv_backward: {wrong}",
        f"  no accuracy: {wrong}",
        "  no parts: ZeroDivisionError: division by zero",
    ]
    assert session.broken == ["parts: ZeroDivisionError: division by zero"]


@pytest.fixture
def run_of(session, monkeypatch):
    """The session with a machine, and rows that fit a record."""
    session.notebook, session.system, session.before = "notebooks/forward/results.py", H200, STATE
    monkeypatch.setattr(system, "state", lambda device: STATE)

    def measured(work, impls, **_):
        return [
            record.Row.of(
                work, "forward", impl=impl, math="activation", scope="kernel", failure="no GPU"
            )
            for impl in impls
        ]

    monkeypatch.setattr(measure, "measure", measured)
    for kind in (timing, sustained):
        monkeypatch.setattr(kind, "measure_ceilings", lambda *_: [])
    return session


def test_what_was_measured_before_a_crash_is_kept(run_of, tmp_path):
    data = tmp_path / "data"
    (data / "records").mkdir(parents=True)
    run_of.begin(data)
    run_of.measure(SMALL, ["v1_tiled"])
    run_of.measure(CROSS, ["v2_tma"])
    (partial,) = (data / "partial").iterdir()  # all that a killed process leaves
    killed = Path(shutil.copytree(data, tmp_path / "killed"))
    found = doctor.check_records(killed)
    left = killed / "partial" / partial.name
    assert not found.ok and f"did not end: python -m gdpa_lab keep {left}" in found.detail
    assert __main__.main(["keep", str(left)]) == 0
    assert doctor.check_records(killed).ok
    (made,) = record.load_all(killed)
    assert {row.impl: row.failure for row in made.rows} == {
        "v1_tiled": "no GPU",
        "v2_tma": "not measured: the run ended before it",
    }
    assert made.plan == tuple(row.key for row in made.rows)
    path = run_of.write(data)
    assert not partial.exists() and [x.failure for x in record.load(path).rows] == ["no GPU"] * 2


def test_a_planned_row_that_was_not_measured_is_a_failure(run_of, tmp_path, monkeypatch):
    run_of.measure(SMALL, ["v1_tiled"])
    monkeypatch.setattr(measure, "measure", lambda *_, **__: [])
    run_of.measure(CROSS, ["v1_tiled", ("v2_tma", "small", {})], scopes=("kernel", "op"))
    rows = record.load(run_of.write(tmp_path)).rows
    assert [(row.workload, row.impl, row.variant, row.failure) for row in rows[1:]] == [
        ("cross", "v1_tiled", "", "not measured: the run ended before it"),
        ("cross", "v2_tma", "small", "not measured: the run ended before it"),
    ]


def test_records_of_other_machines_go_to_their_own_folder(run_of, tmp_path, monkeypatch):
    promoted = tmp_path / system.PROMOTED
    promoted.write_text(json.dumps({"NVIDIA H200": []}))
    run_of.measure(SMALL, ["v1_tiled"])
    monkeypatch.setenv("GDPA_KERNELS_HANDLE", "some/body")
    with pytest.raises(ValueError, match="must be letters, digits and hyphens, got 'some/body'"):
        run_of.write(tmp_path)
    monkeypatch.setenv("GDPA_KERNELS_HANDLE", "somebody")
    path = run_of.write(tmp_path)
    assert path.parent == tmp_path / "community" / "somebody" / "records"
    record.load(path)
    assert not (tmp_path / "records").exists()
    promoted.write_text(json.dumps({"NVIDIA H200": [H200.id]}))
    assert run_of.write(tmp_path).parent == tmp_path / "records"


def fails(session):
    session.measure(SMALL, ["v1_tiled"])
    raise AssertionError("a sentence does not hold here")


def breaks(session):
    session.launch("parts", SMALL, [], lambda inputs: 1 / 0)
    session.measure(SMALL, ["v1_tiled"])


@pytest.mark.parametrize(
    "run, error, message",
    ((fails, AssertionError, "does not hold here"),
     (breaks, RuntimeError, "the record lacks parts: ZeroDivisionError")),
)  # fmt: skip
def test_a_chapter_that_fails_leaves_a_record(run_of, tmp_path, monkeypatch, run, error, message):
    chapter = Chapter("forward/results", mode="measure", data_dir=tmp_path)
    monkeypatch.setattr(chapter, "_session", lambda: run_of)
    with pytest.raises(error, match=message):
        chapter.measure(run)
    (made,) = record.load_all(tmp_path)
    assert [row.impl for row in made.rows] == ["v1_tiled"]
