"""Output of compute-sanitizer is understood, and every rung is called; the tool needs a GPU."""

import time
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch

import tritonemu
from gdpa_kernels.calling import ladder
from notebooks.tools import _sanitizer

V4 = ladder.rung("v4_warp_specialized").path
RETURNED = f"{_sanitizer.RETURNED}6\n"
BLOCK_V4 = ladder.rung("v4_rotary", "block_attention").path
CPU = torch.device("cpu")


def _race(line: int, other: int | None = None, file: str = V4.name) -> str:
    return (
        f"========= Error: Race reported between Write access at x+0x1070 in {file}:{line}\n"
        f"=========     and Read access at kernel+0x1110 in {file}:{other or line} [27 hazards]\n"
        "=========\n"
    )


def _summary(errors: int, warnings: int = 0) -> str:
    total = errors + warnings
    return (
        f"========= RACECHECK SUMMARY: {total} hazards displayed "
        f"({errors} errors, {warnings} warnings)\n{RETURNED}"
    )


def _line(path, start: str) -> int:
    """The one line of a file that starts so."""
    found = [i for i, text in enumerate(path.read_text().splitlines(), 1) if text.startswith(start)]
    assert len(found) == 1, found
    return found[0]


def _elsewhere(impl: str, text: str, errors: int) -> int:
    found = _sanitizer.parse(impl, "racecheck", text + _summary(errors))
    assert found == _sanitizer.Finding(impl, "racecheck", 6, errors, 0, found.elsewhere)
    return found.elsewhere


def test_errors_of_memcheck_count():
    text = f"========= COMPUTE-SANITIZER\n{RETURNED}========= ERROR SUMMARY: 3 errors\n"
    found = _sanitizer.parse("v2_tma", "memcheck", text)
    assert (found.calls, found.errors, found.warnings, found.elsewhere) == (6, 3, 0, 3)


@pytest.mark.parametrize("tool", ("memcheck", "racecheck"))
def test_a_summary_of_calls_that_did_not_return_is_no_success(tool):
    """The tools sum up what they have seen when the program under them fails."""
    text = {"memcheck": "ERROR SUMMARY: 0 errors\n", "racecheck": _summary(0)}[tool]
    expected = f"calls of v4_rotary under {tool} must return, got .*out of resource"
    with pytest.raises(ValueError, match=expected):
        _sanitizer.parse("v4_rotary", tool, "out of resource\n" + text.replace(RETURNED, ""))


KERNEL = _line(V4, "def specialized_kernel(")
BLOCK_KERNELS = [_line(BLOCK_V4, f"def {name}_kernel(") for name in ("forward", "backward")]
BLOCK_RACES = "".join(_race(line, file=BLOCK_V4.name) for line in BLOCK_KERNELS)
SLAB = ladder.rung("v2_slab", "block_attention").path


@pytest.mark.parametrize(
    "impl, text, errors, ours",
    (
        # At the line of the kernel, or between that and the start of the tasks: the compiler's.
        ("v4_warp_specialized", _race(KERNEL) * 2, 2, 0),
        ("v4_warp_specialized", _race(KERNEL, _line(V4, "    with tlx.async_tasks():")), 1, 0),
        # In the body, with the body, without a place, or not displayed.
        ("v4_warp_specialized", _race(KERNEL) + _race(80), 2, 1),
        ("v4_warp_specialized", _race(KERNEL, 80), 1, 1),
        ("v4_warp_specialized", _race(80, KERNEL), 1, 1),
        ("v4_warp_specialized", "========= Error: Race reported between Write access at k\n", 1, 1),
        ("v4_warp_specialized", _race(KERNEL), 3, 2),
        # Each kernel of a file has a first line; a function of a kernel, without tasks, has none.
        ("v4_rotary", BLOCK_RACES, 2, 0),
        (
            "v4_rotary",
            BLOCK_RACES + _race(_line(BLOCK_V4, "def math_backward("), file=BLOCK_V4.name),
            *(3, 1),
        ),
        ("v4_rotary", _race(BLOCK_KERNELS[0], file="block_list.py"), 1, 1),
        # A kernel without tasks has no byte of the compiler's.
        ("v2_slab", _race(_line(SLAB, "def forward_kernel("), file=SLAB.name), 1, 1),
    ),
)
def test_races_of_the_compiler_and_ours(impl, text, errors, ours):
    assert _elsewhere(impl, text, errors) == ours


def test_a_race_that_is_a_warning_is_ours():
    text = _race(80) + _summary(1, 4)
    assert _sanitizer.parse("v4_warp_specialized", "racecheck", text).elsewhere == 1


@pytest.mark.parametrize("control", _sanitizer.CONTROLS)
def test_the_line_of_a_control(control):
    path = Path(_sanitizer.__file__)
    line = _line(path, f"def {control}_kernel(")
    assert _elsewhere(control, _race(line, file=path.name), 1) == 0
    assert _elsewhere(control, _race(line + 1, file=path.name), 1) == 1


def test_output_without_a_summary_is_no_success():
    expected = "racecheck of v4_warp_specialized must print a summary, got .*no such device"
    with pytest.raises(ValueError, match=expected):
        _sanitizer.parse("v4_warp_specialized", "racecheck", "Error: no such device")


def test_names_say_the_ladder():
    names = _sanitizer.rungs()
    assert len(names) == len(set(names)) and not {"reference", "v0_eager"} & set(names)
    for name in names:
        assert _sanitizer.rung_of(name).impl == name
    assert {_sanitizer.rung_of(name).operator for name in names} == set(ladder.LADDERS)


@pytest.mark.parametrize("name", ("reference", "v0_eager", "v4"))
def test_a_name_without_a_kernel_is_refused(name):
    with pytest.raises(ValueError, match=f"impl must be a control or a rung .*; got '{name}'"):
        _sanitizer.calls(name, CPU)


@pytest.mark.parametrize("schedule", ("modelled", 0))
@pytest.mark.parametrize("control", _sanitizer.CONTROLS)
def test_controls_hold_no_race(control, schedule):
    (call,) = _sanitizer.calls(control, CPU)
    with tritonemu.enabled(schedule=schedule) as reports:
        call()
    assert call.args[0].tolist() == [0, 1, 1, 0] and len(reports) == 1


def test_kernels_are_those_that_the_tools_are_told_to_watch():
    """`kns=_kernel` holds for every kernel with tasks, and each ladder has some."""
    kernels = {name: _sanitizer.kernels_with_tasks(name) for name in _sanitizer.rungs()}
    names = {kernel.fn.__name__ for found in kernels.values() for kernel in found}
    names |= {kernel.fn.__name__ for kernel in _sanitizer.CONTROLS.values()}
    assert all("_kernel" in name for name in names)
    with_tasks = {name for name, found in kernels.items() if found}
    assert {_sanitizer.rung_of(name).operator for name in with_tasks} == set(ladder.LADDERS)


class _Calls:
    """The calls of a rung, its functions replaced: (direction, batch, the other arguments)."""

    def __init__(self, name: str):
        module, self.made = _sanitizer.rung_of(name).module(), []
        with mock.patch.multiple(
            module, **{d: self._noted(d) for d in ("forward", "backward") if hasattr(module, d)}
        ):
            self.returned = _sanitizer.launch(name, CPU)

    def _noted(self, direction: str):
        def called(*args):
            at = direction == "backward"
            self.made.append((direction, args[at], (*args[:at], *args[at + 1 :])))
            return "out", "saved"

        return called


@pytest.mark.parametrize("name", _sanitizer.rungs())
def test_every_rung_is_called(name):
    rung, calls = _sanitizer.rung_of(name), _Calls(name)
    made = calls.made
    assert made, "a rung that is called with nothing is not checked"
    assert all(rung.call_problem(batch) is None for _, batch, _ in made)
    directions = [direction for direction, *_ in made]
    if rung.operator == "block_attention":
        assert directions == ["forward", "backward"] * calls.returned
        assert all(args[1] == "saved" for direction, _, args in made if direction == "backward")
    else:
        assert directions == [*rung.directions] * calls.returned
    for direction, batch, args in made:
        if direction == "backward":
            assert args[0].shape == batch.q.shape


LONG, SHORT, ONE_TILE = 300, 200, 128  # keys of the longest sequence


@pytest.mark.parametrize(
    "impl, head_dims, kinds",
    (
        ("v8_own_waits", (64, 128, 256), ((LONG, False), (LONG, True), (SHORT, False))),
        ("v4_warp_specialized", (64, 128), ((LONG, False), (SHORT, False))),  # takes no mask
        ("v4_warp_specialized_backward", (64, 128),
         ((LONG, False), (LONG, True), (SHORT, False), (SHORT, True), (ONE_TILE, False))),
        # what it refuses is left out
        ("v5_short_kv_backward", (128,), ((SHORT, False), (SHORT, True), (ONE_TILE, False))),
    ),
)  # fmt: skip
def test_calls_of_gdpa(impl, head_dims, kinds):
    seen = [(of.head_dim, of.max_seqlen_k, of.causal) for _, of, _ in _Calls(impl).made]
    assert seen == [(head_dim, *kind) for head_dim, kind in product(head_dims, kinds)]


@pytest.mark.parametrize(
    "name, turned",
    [("v2_slab", {False, True}), ("v3_warp_specialized", {False}), ("v4_rotary", {True})],
)
def test_calls_of_block_attention(name, turned):
    made = _Calls(name).made
    seen = {(batch.head_dim, batch.rotary is not None, batch.rotate_v) for _, batch, _ in made}
    assert seen == {(head_dim, turn, turn) for head_dim in (64, 128) for turn in turned}


@pytest.mark.parametrize("name", ("v4_warp_specialized_backward", "v4_rotary"))
def test_a_call_runs(name):
    with tritonemu.enabled():
        _sanitizer.calls(name, CPU)[0]()


def _says(monkeypatch, command) -> None:
    """`command(impl, tool)` runs in place of the tool."""
    monkeypatch.setattr(_sanitizer, "_command", command)


def _prints(impl: str, tool: str) -> list[str]:
    text = _summary(0, 2) if tool == "racecheck" else f"ERROR SUMMARY: 0 errors\n{RETURNED}"
    return ["echo", text]


def test_all_tools_run_on_all(monkeypatch):
    _says(monkeypatch, _prints)
    found = _sanitizer.findings(iter(("v2_tma", _sanitizer.WAITING)))
    assert [(each.impl, each.tool, each.warnings, each.failure) for each in found] == [
        (impl, tool, 2 if tool == "racecheck" else 0, None)
        for impl, tool in product(("v2_tma", _sanitizer.WAITING), _sanitizer.TOOLS)
    ]


def test_a_tool_that_hangs_or_breaks_leaves_the_others(monkeypatch, tmp_path):
    """The hanging one starts another process, which holds its output and would end it late."""
    late = tmp_path / "late"

    def command(impl: str, tool: str) -> list[str]:
        if (impl, tool) == ("v1_tiled", "memcheck"):
            return ["bash", "-c", f"(sleep 3; touch {late}) & wait"]
        return ["echo", "no device"] if impl == "v2_tma" else _prints(impl, tool)

    _says(monkeypatch, command)
    monkeypatch.setattr(_sanitizer, "LONGEST_S", 1.0)
    begin = time.monotonic()
    hung, *others = _sanitizer.findings(("v1_tiled", "v2_tma"))
    assert time.monotonic() - begin < 3
    assert hung == _sanitizer.Finding(
        "v1_tiled", "memcheck", None, None, None, None, "did not end within 1 s"
    )
    assert [each.failure is None for each in others] == [True, True, False, False, False]
    assert others[-1].errors is None and "got 'no device" in others[-1].failure
    time.sleep(3.5 - (time.monotonic() - begin))
    assert not late.exists()


def test_nothing_begins_after_the_time_is_up(monkeypatch):
    """One at a time: racecheck of all comes first, the kernel that hangs takes what is left."""
    begun = []

    def command(impl: str, tool: str) -> list[str]:
        begun.append((impl, tool))
        return ["sleep", "60"] if impl == "v1_tiled" else _prints(impl, tool)

    _says(monkeypatch, command)
    monkeypatch.setattr(_sanitizer, "AT_ONCE", 1)
    found = _sanitizer.findings(("v2_tma", "v1_tiled"), seconds=1)
    assert begun == [("v2_tma", "racecheck"), ("v1_tiled", "racecheck")]
    failures = {(each.impl, each.tool): each.failure for each in found}
    assert failures.pop(("v2_tma", "racecheck")) is None
    assert failures.pop(("v1_tiled", "racecheck")) == "did not end within 1 s"
    assert len(failures) == 4 and set(failures.values()) == {"not begun: the time was up"}


def test_the_newest_kernels_with_tasks_come_first():
    impls = [*_sanitizer.CONTROLS, *_sanitizer.rungs()]
    first = _sanitizer.newest_first(impls)
    assert sorted(first) == sorted(impls)
    ranks = [not _sanitizer.kernels_with_tasks(impl) for impl in first]
    assert ranks == sorted(ranks)
    assert first.index("v8_own_waits") < first.index("v7_packed") < first.index(_sanitizer.EMPTY)
    assert first.index("v2_tma") < first.index("v1_tiled")
