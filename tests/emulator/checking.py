"""What the tests of TLX kernels share: schedules, and where in a kernel a finding must lie."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from tritonemu import EmulatorError, run

# Launch options of a cluster of two CTAs.
PAIR = {"ctas_per_cga": (2, 1, 1)}

# The modelled schedule, and seeds of random ones.
SCHEDULES = ("modelled", *range(11))


@triton.jit
def grid2(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def fill(buffer, ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    tlx.local_store(buffer, tl.load(ptr + grid2(ROWS, COLUMNS)))


def place(kernel: Any, text: str) -> tuple[str, int]:
    """File and number of the only line of `kernel` that contains `text`."""
    lines, first = inspect.getsourcelines(kernel.fn)
    (number,) = (first + i for i, line in enumerate(lines) if text in line)
    return kernel.fn.__code__.co_filename, number


def everywhere(
    kernel: Any,
    grid: Sequence[int],
    arguments: Callable[[], Sequence[Any]] = tuple,
    check: Callable[..., None] = lambda *arguments: None,
    **options: Any,
) -> None:
    """Run under every schedule, each time on fresh arguments, and `check` these afterwards."""
    for schedule in SCHEDULES:
        values = arguments()
        run(kernel, grid, *values, schedule=schedule, **options)
        check(*values)


def found(
    error: type[EmulatorError] | tuple[type[EmulatorError], ...],
    kernel: Any,
    grid: Sequence[int],
    arguments: Callable[[], Sequence[Any]] = tuple,
    match: str | None = None,
    **options: Any,
) -> list[Any]:
    """Run under every schedule; each must raise `error`. Returns the errors, the modelled first."""
    errors = []
    for schedule in SCHEDULES:
        with pytest.raises(error, match=match) as caught:
            run(kernel, grid, *arguments(), schedule=schedule, **options)
        errors.append(caught.value)
    return errors
