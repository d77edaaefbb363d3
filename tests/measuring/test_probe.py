"""A kernel that hangs, crashes or is wrong costs its own row; a verified one costs nothing."""

from __future__ import annotations

import multiprocessing
import re
from dataclasses import replace

import pytest
import torch

import tritonemu
from _lib import studies
from gdpa_kernels.calling import ladder
from gdpa_kernels.gdpa.kernels import v8_own_waits
from gdpa_lab.measuring import probe
from gdpa_lab.measuring.workloads import WORKLOADS
from tests.measuring import unverified
from tests.measuring.test_measure import SMALL
from tests.records import a_row, a_system, writer

CPU = torch.device("cpu")
B200 = a_system(gpu="NVIDIA B200", compute_capability="10.0")


@pytest.fixture
def ladder_with_stand_ins(monkeypatch):
    rungs = (*ladder.LADDERS["gdpa"], *unverified.RUNGS)
    monkeypatch.setitem(ladder.LADDERS, "gdpa", rungs)
    with tritonemu.enabled("sm_100"):
        yield


@pytest.fixture
def forked(monkeypatch):
    """Children that need not import everything again: seconds less for each."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", {"spawn": fork}.get)


def a_probe(said=None, **options):
    log = [].append if said is None else said.append
    return probe.Probe(CPU, set(), log, in_child=unverified.trial, **options)


@pytest.mark.parametrize("deed", ("raises", "hangs", "wrong", "crashes", "exits"))
def test_a_fault_at_any_launch_costs_its_own_rows(forked, ladder_with_stand_ins, deed):
    """Faults at the first and second launch, at the sustained 5,000th, and while it is timed."""
    bad = [impl for impl in unverified.FORWARDS if f"_{deed}_" in impl]
    short = {"run": 3.0, "launches": 6.0, "time": 3.0} if deed == "hangs" else {}
    made = a_probe(limits_s=probe.LIMITS_S | short)
    found = made.measure(SMALL, ["v0_eager", *bad, "b90_right"], scopes=("kernel", "sustained"))
    *failed, right = found.values()
    assert [*found] == [*range(1, len(bad) + 2)]
    stages = {1: "run", 2: "launches", 5000: "launches", unverified.TIMED: "time"}
    expected = {
        "raises": "RuntimeError: CUDA error: an illegal memory access was encountered",
        "hangs": "timeout after {limit:g} s in a child process ({stage})",
        "wrong": "ValueError: launch {launch:,} of 10,000 on a jagged batch: out",
        "crashes": "its child process ended with SIGSEGV ({stage})",
        "exits": "its child process ended with status 3 ({stage})",
    }[deed]
    for impl, rows in zip(bad, failed, strict=True):
        launch = unverified.FORWARDS[impl][1]
        assert [row.scope for row in rows] == ["kernel", "sustained"]
        for row in rows:
            limit = short.get(stages[launch])
            says = expected.format(launch=launch, stage=stages[launch], limit=limit or 0)
            assert row.impl == impl and row.failure.startswith(says) and not row.samples_us
    assert [row.samples_us for row in right] == [(1.0, 2.0, 3.0)] * 2
    assert right[1].load == unverified.LOAD and all(row.error.passed for row in right)
    assert made.problem(["b90_right", "v0_eager"], "gdpa", "forward") is None
    assert made.problem(bad[:1], "gdpa", "forward") == f"{bad[0]} has not been right on this GPU"
    assert made.problem(["v8_own_waits"], "gdpa", "forward").startswith("v8_own_waits needs sm_90")


def test_a_rung_that_fails_is_given_up_after_a_time(forked, ladder_with_stand_ins):
    made, names = a_probe(most_lost_s=1e-9), ("small 1", "small 2")
    first, second = (made.measure(replace(SMALL, name=x), ["b92_raises_1"])[0] for x in names)
    assert first[0].failure.startswith("RuntimeError: CUDA error")
    assert re.fullmatch(r"not tried: \d+ s of this run were lost on it", second[0].failure)


def test_a_refusal_costs_no_process_and_no_time(forked, ladder_with_stand_ins):
    said = []
    made = a_probe(said, most_lost_s=1e-9)
    for name in ("small 1", "small 2"):
        found = made.measure(replace(SMALL, name=name), ["b91_refuses", "b90_right"])
        assert "needs other lengths" in found[0][0].failure and found[1][0].samples_us
    assert not any("not tried" in line for line in said)


def test_a_rung_is_launched_often_once(forked, ladder_with_stand_ins, monkeypatch):
    asked = []

    def run(child, entry, launches):
        asked.append(launches)
        return run_child(child, entry, launches)

    run_child = probe._Child.run
    monkeypatch.setattr(probe._Child, "run", run)
    made = a_probe()
    for impl in ("b92_raises_5000", "b90_right", "b92_raises_5000", "b90_right"):
        made.measure(SMALL, [impl])
    assert asked == [10_000, 10_000, 10_000, 0]


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_a_jagged_batch_is_small_and_of_the_same_kind(name):
    of = WORKLOADS[name]
    small = probe.jagged(of)
    assert small.total_q <= max(of.batch, 4) * of.max_seqlen_q
    assert small.total_q <= 2 * probe.JAGGED_TOKENS and len({*small.seqlens_k}) > 1
    assert (small.max_seqlen_q, small.max_seqlen_k) == (of.max_seqlen_q, of.max_seqlen_k)


def test_a_changed_copy_reaches_a_new_process_with_its_constants(ladder_with_stand_ins):
    """No fork: nothing is there but what was sent."""
    module = studies.changed(v8_own_waits, ("BLOCK_N: int = 128", "BLOCK_N: int = 96"))
    entry = "b90_right", "wide", {"config": module.Config(), "module": module}
    made = probe.Probe(CPU, set(), [].append, in_child=unverified.report)
    found = made.measure(SMALL, [entry, ("b90_right", "odd", {"config": lambda: 0})])
    says = "ValueError: v8_own_waits.py, its own Config with BLOCK_N 96"
    assert found[0][0].failure == says
    assert found[1][0].failure.startswith("no child process takes it: ")


def test_only_rungs_whose_kernels_the_device_runs_are_tried(ladder_with_stand_ins):
    known = {("gdpa", "forward", "b90_right"), ("block_attention", "forward", "v1_one_tile")}

    def tried(impl, operator="gdpa", direction="forward"):
        return probe.is_unverified(impl, operator, direction, CPU, known)

    assert tried("b91_refuses") and tried("v1_tiled") and tried("v2_tma")
    assert not tried("b90_right")  # proven
    assert not tried("v0_eager") and not tried("reference")  # PyTorch
    assert not tried("fa2_varlen") and not tried("v8_own_waits")  # a peer; for sm_90 alone
    assert tried("v1_tiled_backward", direction="backward")
    assert not tried("v1_one_tile", "block_attention")
    assert tried("v1_one_tile", "block_attention", "backward")
    assert tried("eliminations", "block_attention")


def test_a_correct_row_on_such_a_gpu_proves(tmp_path):
    add = writer(tmp_path)
    wrong = replace(a_row().error, max_abs=1.0, passed=False)
    add(
        a_row(impl="v1_tiled"), a_row(impl="v2_tma", direction="backward"),
        a_row(impl="v3_persistent", samples_us=(), error=wrong, failure="check failed"),
        a_row(impl="v4_warp_specialized", samples_us=(), error=None, failure="timeout"), on=B200,
    )  # fmt: skip
    add(a_row(impl="v7_packed"), on=replace(B200, gpu="NVIDIA B300", compute_capability="10.3"))
    right = {("gdpa", "forward", "v1_tiled"), ("gdpa", "backward", "v2_tma")}
    assert probe.verified(tmp_path, "10.0") == right
    assert probe.verified(tmp_path, "10.3") == {("gdpa", "forward", "v7_packed")}
    assert probe.verified(tmp_path, "9.0") == set()
