"""Lessons: a view compiles to its product's machine code; what a step changes is counted."""

from __future__ import annotations

import importlib
import inspect
import types

import pytest
import torch

from _lib import studies
from gdpa_kernels.block_attention import batch as block
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.calling.rung import PACKAGE, Rung
from gdpa_kernels.gdpa.batch import Batch
from gdpa_lab.__main__ import main
from gdpa_lab.measuring import machine_code
from gdpa_lab.measuring.compile_check import build_launch
from gdpa_lab.report import lessons
from tests.tiers import sweep, swept

RUNGS = [rung for rungs in ladder.LADDERS.values() for rung in rungs]
VIEWS = [rung for rung in RUNGS if rung.lesson != rung.path]
LESSONS = [rung for rung in RUNGS if rung.is_lesson or rung in VIEWS]


def view_of(rung: Rung) -> types.ModuleType:
    """The module of a lesson view."""
    name = ".".join(rung.lesson.relative_to(PACKAGE.parent).with_suffix("").parts)
    return importlib.import_module(name)


def published(rung: Rung) -> list[tuple]:
    """(head_dim, longest q, longest k, whether all are as long, option) of the published calls: the
    option is an activation, or how many of q, k and v rotary turns."""
    if rung.operator == "block_attention":
        return [(dim, 512, 512, True, turned) for dim in (64, 128) for turned in (0, 2, 3)]
    lengths = [(128, 128), (1024, 256), (512, 512), (2048, 2048)]  # short K and V stay
    return [
        (dim, *most, full, "silu" if most == (512, 512) else "gelu_tanh")
        for dim in (64, 128)
        for most in lengths
        for full in (True, False)
    ]


def launched(rung: Rung, module: types.ModuleType, call: tuple) -> list[tuple] | None:
    """The grids, numbers and machine codes of what `module` launches for a rung; None if the rung
    does not take the call."""
    head_dim, most_q, most_k, full, option = call
    lengths = [[most, most if full else most // 2 + 5] for most in (most_q, most_k)]
    q, k = (torch.zeros(sum(each), 4, head_dim, dtype=torch.bfloat16) for each in lengths)
    ends = [torch.tensor([0, each[0], sum(each)], dtype=torch.int32) for each in lengths]
    if rung.operator == "block_attention":
        turns = (torch.zeros(len(q), head_dim // 2, dtype=torch.bfloat16),) * 2 if option else None
        options = {"rotary": turns, "rotate_v": option == 3}
        batch = block.Batch(q, k, k, ends[0], head_dim**-0.5, **options)
    else:
        batch = Batch(q, k, k, *ends, most_q, most_k, (option,), head_dim**-0.5)
    if rung.call_problem(batch) is not None:
        return None
    with launches(run=False) as seen:
        if rung.operator == "block_attention":
            blocks = (torch.zeros(len(q) // 64, 2, dtype=torch.int32),)
            _, saved = module.forward(batch, work_list=blocks)
            module.backward(q, batch, saved, work_list=blocks)
        elif rung.directions == ("backward",):
            module.backward(q, batch)
        else:
            module.forward(batch)
    major, minor = rung.requires.capability
    built = [build_launch(each, capability=10 * major + minor) for each in seen]
    numbers = [[x for x in each.arguments.values() if isinstance(x, int | float)] for each in seen]
    codes = [machine_code.digest(each.asm["cubin"]) for each in built]
    return [*zip((each.grid for each in seen), numbers, codes, strict=True)]


BEYOND = {"v8_own_waits": [("return Config(ahead=True)", "return Config()")]}
"""What a product does on published calls that its lesson leaves out: (old, new) takes it away."""


@pytest.mark.parametrize("every", (False, sweep(True)))
@pytest.mark.parametrize(
    "rung", swept(VIEWS, lambda rung: rung.impl == "v8_own_waits"), ids=lambda rung: rung.impl
)
def test_a_view_is_its_product(rung, every):
    """On the last published call that the product takes, or on every one."""
    product, count = rung.module(), 0
    if rung.impl in BEYOND:
        product = studies.changed(product, *BEYOND[rung.impl])
    for call in reversed(published(rung)):
        if expected := launched(rung, product, call):
            assert launched(rung, view_of(rung), call) == expected, call
            count += 1
            if not every:
                return
    assert count > 1


@pytest.mark.parametrize("rung", VIEWS, ids=lambda rung: rung.impl)
def test_a_view_has_the_functions_of_its_product(rung):
    view, product = view_of(rung), rung.module()
    for name in ("default_config", "work_list_recipe", "forward", "backward"):
        assert hasattr(view, name) == hasattr(product, name), name
        if hasattr(view, name):
            view_takes, takes = (inspect.signature(getattr(x, name)) for x in (view, product))
            assert [*view_takes.parameters] == [*takes.parameters], name
    assert f"Changes from {rung.predecessor}" in view.__doc__


@pytest.mark.parametrize(
    "change",
    [
        (", num_stages=0", ""),
        sweep(("(1, blocks,", "(2, blocks,")),
        sweep(("batch.scale / 2", "batch.scale")),
    ],
)
def test_a_change_is_seen(change):
    """Of a wait, of a loop, of a number."""
    rung = ladder.rung("v8_own_waits")
    call = (128, 1024, 256, True, "silu")
    planted = studies.changed(view_of(rung), change)
    assert launched(rung, planted, call) != launched(rung, rung.module(), call)


def test_every_file_of_a_ladder_is_a_lesson():
    others = "__init__", "published_form"
    files = {path for path in PACKAGE.glob("*/ladder/*.py") if path.stem not in others}
    assert files == {rung.lesson for rung in LESSONS}


def test_changes_are_counted_in_compiled_code(tmp_path, capsys):
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    kernel = '''"""A module."""
import triton


@triton.jit
def kernel(x):
    """What it does."""
    # why
    y = x + 1

    return y


def forward():
    return 1
'''
    before.write_text(kernel)
    after.write_text(kernel.replace("# why", "# because").replace("return 1", "return 2"))
    assert lessons.jit_lines(before) == ["def kernel(x):", "    y = x + 1", "    return y"]
    assert lessons.changed_lines(before, after) == 0
    after.write_text(kernel.replace("    return y", "    y += 1\n    return 2 * y"))
    assert lessons.changed_lines(before, after) == 3
    step = next(iter(lessons.steps()))
    assert main(["steps"]) == 0
    assert f"| {step.changed} | {step.jit} | {step.file} |" in capsys.readouterr().out
