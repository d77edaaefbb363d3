"""What hangs, kills its process or is wrong costs its own row, and what is proven costs nothing."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace

import pytest
import torch

import tritonemu
from gdpa_kernels.calling import ladder
from gdpa_kernels.gdpa import v7_packed
from gdpa_kernels.measuring import measure, probe, record
from gdpa_kernels.report import studies
from tests.measuring import unproven
from tests.measuring.test_measure import SMALL, cpu  # noqa: F401  (a fixture)
from tests.report.test_results import a_row, a_system, add  # noqa: F401  (a fixture)

CPU = torch.device("cpu")
B200 = replace(a_system(gpu="NVIDIA B200"), compute_capability="10.0")


@pytest.fixture
def ladder_with_stand_ins(monkeypatch):
    rungs = (*ladder.LADDERS["gdpa"], *unproven.RUNGS)
    monkeypatch.setitem(ladder.LADDERS, "gdpa", rungs)
    with tritonemu.enabled("sm_100"):
        yield


@pytest.fixture
def forked(monkeypatch):
    """Children that need not import everything again: seconds less for each."""
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", {"spawn": fork}.get)


def test_each_failure_costs_its_row_and_the_run_goes_on(cpu, forked, ladder_with_stand_ins):  # noqa: F811
    impls = ["b94_wrong", "b95_raises", "b91_hangs", "b92_exits", "b93_crashes", "v0_eager"]
    impls += ["b90_right"]
    said = []
    made = probe.Probe(CPU, set(), said.append, limit_s=5, attempt=unproven.attempt)
    failures = made.failures(SMALL, impls)
    assert {place: found.failure for place, found in failures.items() if place} == {
        1: "RuntimeError: CUDA error: an illegal memory access was encountered",
        2: "timeout after 5 s in a child process",
        3: "its child process ended with status 3",
        4: "its child process ended with SIGSEGV",
    }
    assert failures[0].failure.startswith("check failed: out: max error")
    assert not failures[0].error.passed
    assert [line.split(":")[0].strip() for line in said] == [*impls[:5], "b90_right"]
    assert made.failures(SMALL, impls) == failures and len(said) == 6  # known: no other process
    rows = measure.measure(SMALL, impls[:6], device=CPU, failures=failures, log=lambda text: None)
    assert [(row.impl, row.failure) for row in rows[:5]] == [
        (impls[place], failures[place].failure) for place in range(5)
    ]
    assert rows[0].error == failures[0].error
    assert cpu == ["v0_eager "] and rows[5].samples_us


def test_a_rung_that_hangs_again_is_not_tried_a_third_time(forked, ladder_with_stand_ins):
    made = probe.Probe(CPU, set(), str, limit_s=0.2, attempt=unproven.attempt)
    names = [replace(SMALL, name=f"small {i}") for i in range(3)]
    found = [made.failures(name, ["b91_hangs"])[0].failure for name in names]
    assert found == [
        *["timeout after 0.2 s in a child process"] * 2,
        "not tried: timeouts on 2 workloads of this run",
    ]


def test_a_right_row_of_this_run_proves_a_rung(forked, ladder_with_stand_ins):
    said = []
    made = probe.Probe(CPU, set(), said.append, attempt=unproven.attempt)
    made.failures(SMALL, ["b90_right"])
    row = a_row(impl="b90_right")
    made.learn([replace(row, failure="slow", samples_us=()), replace(row, impl="b94_wrong")])
    made.failures(replace(SMALL, name="second"), ["b90_right"])
    made.learn([row])
    made.failures(replace(SMALL, name="third"), ["b90_right"])
    assert len(said) == 2


def test_a_changed_copy_reaches_a_new_process_with_its_constants(ladder_with_stand_ins):
    """No fork: nothing is there but what was sent."""
    module = studies.changed(v7_packed, ("BLOCK_N: int = 128", "BLOCK_N: int = 96"))
    entry = "b90_right", "wide", {"config": module.Config(), "module": module}
    said = []
    made = probe.Probe(CPU, set(), said.append, attempt=unproven.report)
    found = made.failures(SMALL, [entry, ("b90_right", "odd", {"config": lambda: 0})])
    assert found[0].failure == "v7_packed.py, its own Config with BLOCK_N 96"
    assert found[1].failure.startswith("no child process takes it: ")


def test_only_rungs_whose_kernels_the_device_runs_are_tried(ladder_with_stand_ins):
    known = {("gdpa", "forward", "b92_exits"), ("block_attention", "forward", "v1_one_tile")}

    def tried(impl, operator="gdpa", direction="forward"):
        return probe.is_unproven(impl, operator, direction, CPU, known)

    assert tried("b91_hangs") and tried("v1_tiled") and tried("v2_tma")
    assert not tried("b92_exits")  # proven
    assert not tried("v0_eager") and not tried("reference")  # PyTorch
    assert not tried("fa2_varlen") and not tried("v8_own_waits")  # a peer; for sm_90 alone
    assert tried("v1_tiled_backward", direction="backward")
    assert not tried("v1_one_tile", "block_attention")
    assert tried("v1_one_tile", "block_attention", "backward")
    assert tried("eliminations", "block_attention")


def test_a_correct_row_on_such_a_gpu_proves(add, tmp_path):  # noqa: F811
    wrong = record.Error.judge(1.0, 1e-3, elements=1)
    add(
        a_row(impl="v1_tiled"), a_row(impl="v2_tma", direction="backward"),
        a_row(impl="v3_persistent", samples_us=(), error=wrong, failure="check failed"),
        a_row(impl="v4_warp_specialized", samples_us=(), error=None, failure="timeout"), on=B200,
    )  # fmt: skip
    add(a_row(impl="v7_packed"), on=replace(B200, gpu="NVIDIA B300", compute_capability="10.3"))
    right = {("gdpa", "forward", "v1_tiled"), ("gdpa", "backward", "v2_tma")}
    assert probe.proven(tmp_path, "10.0") == right
    assert probe.proven(tmp_path, "10.3") == {("gdpa", "forward", "v7_packed")}
    assert probe.proven(tmp_path, "9.0") == set()
