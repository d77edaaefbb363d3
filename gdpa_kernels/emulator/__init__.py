"""Runs unmodified `@triton.jit` kernels on CPU torch tensors, and checks what they do.

    report = run(kernel, (programs,), x, y, n, BLOCK=128)

Arithmetic is done in the real dtypes with Triton's promotion rules, one program after another.
Accesses out of bounds, write races between programs, broken descriptors and the use of undefined
lanes are found. An operation the emulator does not know raises `Unsupported`; it never guesses.
Time, registers and layouts are not modelled.

`rewrite` turns the kernel's source into Python on tiles; `tile` is the arithmetic; `memory` is
pointers, descriptors, bounds and races; `language` the operations; `instructions` inline PTX;
`launch` the state of a launch; `errors` the findings. Needs torch and triton, and no GPU.
"""

import contextlib
import contextvars
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton.language as tl
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from .errors import (
    DescriptorError,
    DeviceAssertion,
    EmulatorError,
    InvalidKernel,
    OutOfBounds,
    Race,
    Unsupported,
    location_of,
)
from .language import MODULES, NAMES
from .launch import CURRENT, Launch, Report
from .memory import Descriptor, Memory
from .rewrite import Lowering, map_tuple
from .tile import scalar

__all__ = [
    "DescriptorError",
    "DeviceAssertion",
    "EmulatorError",
    "InvalidKernel",
    "OutOfBounds",
    "Race",
    "Report",
    "Unsupported",
    "current_arch",
    "enabled",
    "is_enabled",
    "run",
]

ARCHITECTURES = ("sm_90", "sm_100")

# Options of a launch that do not change its results.
_OPTIONS = frozenset(
    ("num_warps", "num_stages", "num_ctas", "maxnreg", "debug", "enable_fp_fusion", "launch_pdl")
)

_ENABLED: contextvars.ContextVar[str | None] = contextvars.ContextVar("emulator", default=None)


def _check_arch(arch: str) -> None:
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch must be one of {ARCHITECTURES}, got {arch!r}")


@contextlib.contextmanager
def enabled(arch: str = "sm_90") -> Iterator[None]:
    """Within this context, launchers that are given CPU tensors call `run`."""
    _check_arch(arch)
    token = _ENABLED.set(arch)
    try:
        yield
    finally:
        _ENABLED.reset(token)


def is_enabled() -> bool:
    """Whether an `enabled` context is open."""
    return _ENABLED.get() is not None


def current_arch() -> str:
    """The architecture of the open `enabled` context; RuntimeError without one."""
    arch = _ENABLED.get()
    if arch is None:
        raise RuntimeError("emulator.enabled() must be open, got no open context")
    return arch


def run(
    kernel: Any,
    grid: tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]],
    *args: Any,
    arch: str = "sm_90",
    races: bool = True,
    **kwargs: Any,
) -> Report:
    """Execute every program of `grid`, x fastest, and return what they did.

    kernel: a `@triton.jit` function, also one under `@triton.autotune` (its first configuration is
    taken) or `@triton.heuristics`. grid: one to three sizes, or a function of the bound arguments.
    args, kwargs: the kernel's own, tensors on the CPU; `num_warps`, `num_stages`, ... are ignored.
    races: whether plain stores of two programs to one element raise `Race`.

    Raises subclasses of EmulatorError, which carry the kernel's file and line.
    """
    _check_arch(arch)
    kernel, kwargs = _undecorated(kernel, args, kwargs)
    signature = inspect.signature(kernel.fn)
    options = {name: kwargs.pop(name) for name in _OPTIONS & kwargs.keys() - signature.parameters}
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    sizes = tuple(grid({**bound.arguments, **options}) if callable(grid) else grid)
    if not 1 <= len(sizes) <= 3 or min(sizes) < 0:
        raise ValueError(f"grid must have one to three sizes, got {sizes}")
    sizes += (1,) * (3 - len(sizes))

    launch = Launch(arch, sizes, Report(arch), races, Lowering(MODULES, NAMES))
    launch.memory = Memory(launch)
    token = CURRENT.set(launch)
    try:
        with torch.no_grad():
            body = launch.lowering.function(kernel)
            values = {p.name: _argument(launch, bound.arguments[p.name], p) for p in kernel.params}
            for z, y, x in itertools.product(*(range(size) for size in reversed(sizes))):
                launch.program = (x, y, z)
                body(**values)
                launch.report.programs += 1
    except EmulatorError:
        raise
    except Exception as error:
        at = location_of(error)
        if at[1] == 0:
            raise
        message = f"{type(error).__name__}: {error} in program {launch.program}"
        raise InvalidKernel(message, at) from error
    finally:
        CURRENT.reset(token)
    return launch.report


def _undecorated(kernel: Any, args: Any, kwargs: dict[str, Any]) -> tuple[JITFunction, dict]:
    """The Triton function below autotune and heuristics, and the arguments with theirs."""
    while not isinstance(kernel, JITFunction):
        named = {**dict(zip(getattr(kernel, "arg_names", ()), args, strict=False)), **kwargs}
        if hasattr(kernel, "configs"):
            config = kernel.configs[0]
            kwargs = {**kwargs, **config.kwargs}
            if config.pre_hook is not None:
                config.pre_hook({**named, **config.kwargs})
        elif hasattr(kernel, "values"):
            kwargs = {**kwargs, **{name: rule(named) for name, rule in kernel.values.items()}}
        else:
            raise TypeError(f"kernel must be a @triton.jit function, got {type(kernel).__name__}")
        kernel = kernel.fn
    return kernel, kwargs


def _argument(launch: Launch, value: Any, param: Any, name: str = "") -> Any:
    """What the kernel sees of a launch argument.

    Integers become int32 or int64 scalars; like Triton, 1 stays a constant unless the parameter is
    in `do_not_specialize`. Floats become fp32 scalars.
    """
    name = name or param.name
    if param.is_constexpr:
        return launch.lowering.convert(value)
    if isinstance(value, torch.Tensor):
        return launch.memory.pointer(name, value)
    if isinstance(value, TensorDescriptor):
        if getattr(value, "round_f32_to_tf32", False):
            raise Unsupported("TensorDescriptor(round_f32_to_tf32=True)")
        base = launch.memory.pointer(name, value.base)
        return Descriptor(base, value.shape, value.strides, value.block_shape, value.padding)
    if isinstance(value, (tuple, list)):
        return map_tuple(lambda item: _argument(launch, item, param, f"{name}[]"), value)
    if isinstance(value, bool):
        return scalar(value, tl.int1)
    if isinstance(value, int):
        if param.annotation_type:
            return scalar(value, tl.str_to_ty(param.annotation_type, None))
        if value == 1 and not param.do_not_specialize:
            return 1
        return scalar(value, tl.int32 if -(2**31) <= value < 2**31 else tl.int64)
    if isinstance(value, float):
        return scalar(value, tl.float32)
    return launch.lowering.convert(value)
