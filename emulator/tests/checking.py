"""What the tests share: TLX or its absence, compiled kernels, schedules, places of findings."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from tritonemu import EmulatorError, run


class _Absent:
    """Stands for TLX under Triton itself: its names can be read, and none can be called."""

    def __init__(self, name: str):
        self.name = name

    def __getattr__(self, name: str) -> "_Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pytest.fail(f"{self.name} needs fbtriton, and its test the marker tlx")


try:
    import triton.language.extra.tlx as tlx
except ImportError:
    tlx = _Absent("tlx")

# Of a program at most, on sm_90 and sm_100.
SHARED_BYTES = 232_448
TENSOR_COLUMNS = 512

# Launch options of a cluster of two CTAs.
PAIR = {"ctas_per_cga": (2, 1, 1)}

# The emulator's option for Blackwell.
B200 = {"arch": "sm_100"}

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


def nothing(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An output that shows what was left out."""
    return torch.full(shape, -1, dtype=dtype)


def build(
    kernel: triton.JITFunction,
    types: Mapping[str, str],
    constants: Mapping[str, Any] | None = None,
    capability: int = 90,
    **options: Any,
) -> CompiledKernel:
    """What the compiler makes of `kernel` for sm_<capability>; nothing runs.

    types: Triton's types of the arguments that are no constants. Raises OutOfResources for a
    kernel that needs more memory than there is.
    """
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    at = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    aligned = {at[n]: [["tt.divisibility", 16]] for n, kind in types.items() if kind[0] == "*"}
    values = {at[name]: value for name, value in (constants or {}).items()}
    made = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 4, **options},
    )
    metadata = made.metadata
    for needs, most, what in (
        (metadata.shared, SHARED_BYTES, "shared memory"),
        (metadata.tmem_size or 0, TENSOR_COLUMNS, "tensor memory"),
    ):
        if needs > most:
            raise OutOfResources(needs, most, what)
    return made


def ints(*shape: int, fill: int = -1) -> Callable[[], tuple[torch.Tensor]]:
    """Makes the only argument of a launch: int32 of a shape."""
    return lambda: (torch.full(shape, fill, dtype=torch.int32),)


def normal(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def box(tensor: torch.Tensor, *shape: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, list(shape))


def everywhere(
    kernel: Any,
    grid: Sequence[int],
    arguments: Callable[[], Sequence[Any]] = tuple,
    gives: Any = None,
    tolerance: float = 0.0,
    **options: Any,
) -> None:
    """Run under every schedule, each time on fresh arguments.

    gives: what the last argument, or the tensor under it, must hold afterwards: a tensor, numbers,
    or such of the arguments.
    """
    for schedule in SCHEDULES:
        values = arguments()
        run(kernel, grid, *values, schedule=schedule, **options)
        if gives is not None:
            found = getattr(values[-1], "base", values[-1]).double()
            expected = torch.as_tensor(gives(*values) if callable(gives) else gives).double()
            expected = expected.expand_as(found)
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def refused(
    error: type[Exception] | tuple[type[Exception], ...],
    match: str | None,
    kernel: Any,
    *arguments: Any,
    grid: Any = (1,),
    at: str | None = None,
    **options: Any,
) -> Any:
    """Run once, which must raise `error`; at: text of its line in the kernel. Returns the error."""
    with pytest.raises(error, match=match) as caught:
        run(kernel, grid, *arguments, **options)
    assert at is None or (caught.value.file, caught.value.line) == place(kernel, at)
    return caught.value


def found(
    error: type[EmulatorError] | tuple[type[EmulatorError], ...],
    kernel: Any,
    grid: Sequence[int],
    arguments: Callable[[], Sequence[Any]] = tuple,
    match: str | None = None,
    **options: Any,
) -> list[Any]:
    """`refused` under every schedule, each time on fresh arguments: the modelled error first."""
    return [
        refused(error, match, kernel, *arguments(), grid=grid, schedule=schedule, **options)
        for schedule in SCHEDULES
    ]
