"""Profiles: ncu's output by launch, and what a session keeps of it."""

import json
import subprocess
from types import SimpleNamespace

import pandas as pd
import pytest

from gdpa_lab.measuring import profiling
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import profiles
from tests.measuring.test_measure import session

__all__ = ["session"]

SELF = workload("gdpa-self-full-512")
CALLS = [(SELF, "forward", "v0_eager"), (SELF, "backward", "v4_warp_specialized_backward")]
METRICS = [*profiling.COUNTERS.values(), *map(profiling._STATE.format, profiling.STATES)]


def csv_of(*launches: tuple[str, float]) -> str:
    """CSV of ncu for launches of these kernels, all of whose counters have that value."""
    rows = [("Kernel Name", *METRICS), ["", *("unit" for _ in METRICS)]]
    rows += [(name, *(f"{value:,}" for _ in METRICS)) for name, value in launches]
    lines = [
        '"' + '","'.join([str(i - 1) if i else "ID", *row]) + '"' for i, row in enumerate(rows)
    ]
    return "\n".join(["==PROF== connected", *lines, ""])


@pytest.fixture
def ncu(monkeypatch):
    """A profiler that runs nothing; its arguments, and what its child was asked."""
    seen = SimpleNamespace(commands=[], asked=None, text="", fails=False)

    def run(command, **how):
        seen.commands.append(list(command))
        if seen.fails:
            raise subprocess.CalledProcessError(1, command)
        if "input" in how:
            seen.asked = json.loads(how["input"])
        return SimpleNamespace(stdout=seen.text)

    monkeypatch.setattr(profiling.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(profiling.subprocess, "run", run)
    return seen


def test_launches_follow_the_marker_of_their_call(ncu):
    marker = "cuda::<unnamed>::spin_kernel(long)"
    ncu.text = csv_of(
        (marker, 1), ("void at::native::<unnamed>::gather<4>(int)", 1_200), ("gemm", 2.5),
        (marker, 1), ("backward_kernel", 7),
    )  # fmt: skip
    table = profiling.profile(CALLS)
    assert ncu.asked == [[SELF.to_dict(), *rest] for _, *rest in CALLS]
    frame = pd.DataFrame(list(table.rows), columns=list(table.columns))
    assert list(zip(frame["impl"], frame["launch"], strict=True)) == [
        ("v0_eager", 0), ("v0_eager", 1), ("v4_warp_specialized_backward", 0)
    ]  # fmt: skip
    assert frame["duration_ns"].tolist() == [1200, 2.5, 7]
    assert frame[[*profiling.STATES]].sum(axis=1).tolist() == pytest.approx([100, 100, 100])


def test_a_profile_needs_ncu(monkeypatch):
    monkeypatch.setattr(profiling.shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError, match="ncu must be in PATH"):
        profiling.profile(CALLS)


@pytest.mark.parametrize("fails", (False, True))
def test_a_session_profiles_what_was_right_and_says_what_failed(session, ncu, fails):
    ncu.fails, ncu.text = fails, csv_of(("spin_kernel", 1), ("backward_kernel", 7))
    right, wrong = (
        SimpleNamespace(workload=of.name, direction=way, impl=impl, passed=impl != "v0_eager")
        for of, way, impl in reversed(CALLS)
    )
    session.rows += [right, wrong]
    session.profile(CALLS)
    if fails:
        assert not session.tables and session.broken[0].startswith("profiles: CalledProcessError")
    else:
        assert [call[2] for call in ncu.asked] == [right.impl] and not session.broken
        assert len(session.tables["profiles"].rows) == 1


def test_launches_of_a_kernel_are_one_row_and_small_ones_none():
    table = [
        dict.fromkeys(profiling.COLUMNS, value) | {"impl": "v0_eager", "kernel": name}
        for name, value in (("at::copy<1>(int)", 100.0), ("at::copy<2>(int)", 300.0), ("tiny", 1.0))
    ]
    kernels = profiles.kernels(pd.DataFrame(table))
    assert kernels.index.tolist() == ["v0_eager"] and kernels["launches"].tolist() == [2]
    assert kernels["duration_ns"].tolist() == [400], "durations add up"
    assert kernels["local_sectors_read"].tolist() == [400], "sectors add up"
    assert kernels["tensor_percent"].tolist() == [250], "a mean by time"
    shown = profiles.beside(pd.DataFrame(table))
    assert shown.columns.tolist() == ["counter", "v0_eager"]
