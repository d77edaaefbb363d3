"""One check, one verdict: what is found, not judged, and not seen of barriers."""

import json
import re
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from emulator.tests.checking import box, grid2, tlx
from tritonemu import Race, Search, Verdict, check, line_in
from tritonemu.__main__ import main
from tritonemu.messages import painted


@triton.jit
def add_kernel(x_ptr, out_ptr, schedule, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + index, tl.load(out_ptr + index) + tl.load(x_ptr + index) + schedule)


@triton.jit
def last_kernel(out_ptr, RACE: tl.constexpr):
    if RACE:
        tl.store(out_ptr, tl.program_id(0))
    else:
        tl.atomic_xchg(out_ptr, tl.program_id(0))


def test_a_kernel_is_launched_on_the_same_memory_under_each_order():
    x, out = torch.arange(64.0), torch.ones(64)
    verdict = check(add_kernel, (4,), x, out, schedule=2, BLOCK=16)
    assert verdict.clean and verdict.finding is None and not verdict.unjudged and verdict.cycles
    assert torch.equal(out, x + 3)
    assert verdict.covered == {"search": "random", "schedules": 5} and not verdict.differs
    assert str(verdict) == "nothing found in 5 schedules" and verdict.timeline is None


def test_orders_that_give_other_bits_are_named_and_the_first_ones_are_kept():
    out = torch.zeros(1, dtype=torch.int32)
    verdict = check(last_kernel, (3,), out, RACE=False, search=["modelled", *range(8)], resident=3)
    assert verdict.differs in map(str, range(8)) and out.item() == 2


def test_a_finding_comes_first_with_its_timeline():
    verdict = check(last_kernel, (2,), torch.zeros(1, dtype=torch.int32), RACE=True)
    assert not verdict.clean and isinstance(verdict.finding, Race)
    assert str(verdict).startswith("Race (schedule modelled): ")
    assert verdict.timeline.marks and "nothing orders" in verdict.timeline.finding()
    assert line_in(verdict.finding.location, __file__) == verdict.finding.line
    assert verdict.as_json()["found"]["kind"] == "Race"


def test_what_a_function_returns_may_be_expanded():
    assert check(lambda: torch.ones(1).sum().expand(1)).clean


def test_a_function_takes_no_arguments():
    with pytest.raises(TypeError, match="takes no arguments here, got"):
        check(lambda: None, 1)


@triton.jit
def ring_kernel(desc, out_ptr, turns, ONCE: tl.constexpr):
    tiles = tlx.local_alloc((8, 16), tl.float32, 2)
    full = tlx.alloc_barriers(2)
    empty = tlx.alloc_barriers(2)
    once = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_arrive(once)
            for i in tl.range(0, turns):
                tlx.barrier_wait(empty[i % 2], i // 2 & 1 ^ 1)
                tlx.barrier_expect_bytes(full[i % 2], 8 * 16 * 4)
                tlx.async_descriptor_load(desc, tiles[i % 2], [8 * i, 0], full[i % 2])
        with tlx.async_task(num_warps=4):
            tlx.barrier_wait(once, 0 if ONCE else turns * 0)
            for i in tl.range(0, turns):
                tlx.barrier_wait(full[i % 2], i // 2 & 1)
                tl.store(out_ptr + 128 * i + grid2(8, 16), tlx.local_load(tiles[i % 2]))
                tlx.barrier_arrive(empty[i % 2])


@pytest.mark.tlx
@pytest.mark.parametrize(
    "turns, once, missing",
    [
        (1, True, {"full[0]": "one phase only", "full[1]": "no phase",
                   "empty[0]": "one phase only", "empty[1]": "no phase"}),
        (2, True, {"full": "one phase only", "empty": "one phase only"}),
        (3, True, {"full[1]": "one phase only", "empty[1]": "one phase only"}),
        (4, True, {}),
        (4, False, {"once": "one phase only"}),
    ],
)  # fmt: skip
def test_barriers_that_did_not_go_through_both_parities_are_named(turns, once, missing):
    """One whose waits all name a constant parity is used once by its text."""
    desc, out = box(torch.arange(512.0).view(32, 16), 8, 16), torch.zeros(512)
    verdict = check(ring_kernel, (1,), desc, out, turns, ONCE=once, search=["modelled"])
    assert verdict.unwrapped == {("ring_kernel", name): what for name, what in missing.items()}
    said = [f"barrier {name} of ring_kernel: {what}" for name, what in missing.items()]
    assert sorted(str(verdict).splitlines()[1:]) == sorted(said)


@pytest.mark.tlx
def test_launches_together_are_what_was_seen():
    def call():
        for turns in (3, 4):
            out = torch.zeros(512)
            desc = box(torch.arange(512.0).view(32, 16), 8, 16)
            ring_kernel[(1,)](desc, out, turns, ONCE=True)
        return {"out": out}

    verdict = check(call, search=Search("exhaustive"))
    assert verdict.covered["exhausted"] and not verdict.unwrapped
    assert torch.equal(verdict.outputs["out"], torch.arange(512.0))
    assert verdict.barriers["ring_kernel", "full[1]"].phases == 2


PROGRAM = """
import torch, triton
import triton.language as tl
import triton.language.extra.tlx as tlx

@triton.jit
def pass_kernel(n):
    bar = tlx.alloc_barriers(1)
    for i in tl.range(0, n):
        tlx.barrier_arrive(bar)
        tlx.barrier_wait(bar, i & 1)

pass_kernel[(1,)](TURNS)
"""


@pytest.mark.tlx
def test_the_command_its_json_and_sarif_say_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for turns, lines in ((1, ["barrier bar of pass_kernel: one phase only"]), (2, [])):
        Path("once.py").write_text(PROGRAM.replace("TURNS", str(turns)))
        assert main(["--json", "a.json", "--sarif", "a.sarif", "once.py"]) == 0
        out = capsys.readouterr().out.splitlines()
        assert [line for line in out if line.startswith("barrier ")] == lines
        (run,) = json.loads(Path("a.sarif").read_text())["runs"]
        notes = run["invocations"][0]["toolExecutionNotifications"]
        assert [note["message"]["text"] for note in notes] == lines
        seen = json.loads(Path("a.json").read_text())["unwrapped"]
        missing = {"kernel": "pass_kernel", "barrier": "bar", "missing": "one phase only"}
        assert seen == [missing] * len(lines)


class Stream:
    def __init__(self, terminal):
        self.isatty = lambda: terminal


def test_colours_are_for_terminals_that_want_them(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    verdict = check(last_kernel, (2,), torch.zeros(1, dtype=torch.int32), RACE=True)
    text, terminal = str(verdict), Stream(True)
    assert painted(text, terminal).startswith("\033[1;31mRace (schedule modelled)\033[0m: ")
    assert painted("nothing found in", terminal) == "\033[1;32mnothing found in\033[0m"
    assert re.sub(r"\033\[[\d;]*m", "", painted(text, terminal)) == text
    assert painted(text, Stream(False)) == text
    monkeypatch.setenv("TERM", "dumb")
    assert painted(text, terminal) == text
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert painted(text, terminal) == text


def test_a_verdict_of_nothing_is_clean():
    assert Verdict().clean and Verdict().cycles == 0


@triton.jit
def failing_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr, tl.sum(tl.exp(tl.arange(0, BLOCK) * 2.0)) + nowhere)  # noqa: F821


def test_a_launch_costs_the_same_after_one_that_failed():
    def cycles():
        x, out = torch.arange(64.0), torch.ones(64)
        return check(add_kernel, (4,), x, out, schedule=2, BLOCK=16, search=["modelled"]).cycles

    once = cycles()
    assert not check(failing_kernel, (1,), torch.ones(4096), BLOCK=4096, search=["modelled"]).clean
    assert cycles() == once
