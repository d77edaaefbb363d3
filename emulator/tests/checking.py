"""Shared by the tests: TLX or its absence, compiled kernels, arguments, expected findings.

A kernel is right under `everywhere`; `refused` runs it once, and `found`, `stuck`, `misused` and
`raced` under every schedule.
"""

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

from tritonemu import BarrierMisuse, Deadlock, EmulatorError, Race, run


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


def allocate(size: int, alignment: int, stream: Any) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8)


triton.set_allocator(allocate)

# Of a program at most, on sm_90 and sm_100.
SHARED_BYTES = 232_448
TENSOR_COLUMNS = 512

# The roles of a kernel of two tasks, the second without a name.
DEFAULT, TASK = "default of CTA 0", "task0 of CTA 0"

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


def places(kernel: Any, text: str) -> list[tuple[str, int]]:
    """File and number of each line of `kernel` that contains `text`."""
    lines, first = inspect.getsourcelines(kernel.fn)
    file = kernel.fn.__code__.co_filename
    return [(file, first + i) for i, line in enumerate(lines) if text in line]


def place(kernel: Any, text: str) -> tuple[str, int]:
    """File and number of the only line of `kernel` that contains `text`."""
    (only,) = places(kernel, text)
    return only


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
    """Compile `kernel` for sm_<capability> without running it.

    types: Triton's types of the arguments that are no constants. Raises OutOfResources for a
    kernel that needs more memory than there is.
    """
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    indices = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    aligned = {indices[n]: [["tt.divisibility", 16]] for n, kind in types.items() if kind[0] == "*"}
    values = {indices[name]: value for name, value in (constants or {}).items()}
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": 4, **options},
    )
    metadata = compiled.metadata
    for needs, most, what in (
        (metadata.shared, SHARED_BYTES, "shared memory"),
        (metadata.tmem_size or 0, TENSOR_COLUMNS, "tensor memory"),
    ):
        if needs > most:
            raise OutOfResources(needs, most, what)
    return compiled


def ints(*shape: int, fill: int = -1) -> Callable[[], tuple[torch.Tensor]]:
    """Makes the only argument of a launch: int32 of a shape."""
    return lambda: (torch.full(shape, fill, dtype=torch.int32),)


def normal(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def box(tensor: torch.Tensor, *shape: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, list(shape))


def boxes(number: int = 2, rows: int = 8) -> Callable[[], list[TensorDescriptor]]:
    """Makes descriptors of different fp32 [rows, 16] with boxes of [8, 16]."""
    tile = torch.arange(rows * 16.0).view(rows, 16)
    return lambda: [box(tile + 1000 * i, 8, 16) for i in range(number)]


def of_first(desc: TensorDescriptor, _: TensorDescriptor) -> torch.Tensor:
    """Return the output of a kernel that copies the first of two `boxes` to the second."""
    return desc.base


def matrices(rows: int = 64) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Makes A [rows, 32] and B [32, 32] of fp16 and an output of fp32."""
    return lambda: (normal(rows, 32), normal(32, 32, seed=1), torch.zeros(rows, 32))


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
            result = getattr(values[-1], "base", values[-1]).double()
            expected = torch.as_tensor(gives(*values) if callable(gives) else gives).double()
            expected = expected.expand_as(result)
            torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


def refused(
    error: type[Exception] | tuple[type[Exception], ...],
    match: str | None,
    kernel: Any,
    *arguments: Any,
    grid: Any = (1,),
    line: str | None = None,
    **options: Any,
) -> Any:
    """Run once, which must raise `error` at the line with the text `line`; return the error."""
    with pytest.raises(error, match=match) as caught:
        run(kernel, grid, *arguments, **options)
    assert line is None or (caught.value.file, caught.value.line) == place(kernel, line)
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


def stuck(
    waits: Sequence[tuple[str, str, int, int, int]],
    kernel: Any,
    grid: Sequence[int],
    arguments: Callable[[], Sequence[Any]] = tuple,
    match: str | None = None,
    **options: Any,
) -> None:
    """A deadlock is found. waits: who waits for which phase of what, the arrivals and the bytes
    that it lacks."""
    for error in found(Deadlock, kernel, grid, arguments, match, **options):
        lacking = [(w.role, w.barrier, w.phase, w.arrivals, w.bytes) for w in error.waits]
        assert sorted(lacking) == [*waits]


def misused(
    barrier: str,
    match: str | None,
    kernel: Any,
    grid: Sequence[int],
    arguments: Callable[[], Sequence[Any]] = tuple,
    role: str | None = None,
    **options: Any,
) -> None:
    """The misuse of `barrier`, by `role`, is found."""
    for error in found(BarrierMisuse, kernel, grid, arguments, match, **options):
        assert error.barrier == barrier and role in (None, error.role)


def raced(
    kernel: Any,
    grid: Sequence[int],
    arguments: Callable[[], Sequence[Any]] = tuple,
    *,
    buffer: str | tuple[str, ...],
    between: tuple[str, str],
    roles: Sequence[str] = (),
    programs: Any = None,
    **options: Any,
) -> None:
    """A race is found, on one of `buffer`, between the lines of two texts; without the check for
    races the kernel runs.

    roles: who makes the access of each text. programs: of global memory, whose the accesses are.
    """
    one, other = (places(kernel, text) for text in between)
    for error in found(Race, kernel, grid, arguments, **options):
        here = (error.file, error.line)
        assert error.buffer in ((buffer,) if isinstance(buffer, str) else buffer)
        assert (here in one and error.other in other) or (here in other and error.other in one)
        if roles:
            # The role is that of the later access.
            assert error.role == roles[here in other]
            assert str(error).startswith(f"{here[0]}:{here[1]}: [{error.role}] ")
        assert programs is None or sorted(error.programs) == programs
        assert f"at {error.other[0]}:{error.other[1]}; nothing orders the two" in str(error)
        run(kernel, grid, *arguments(), **options | {"races": False, "uninitialized": "allow"})
