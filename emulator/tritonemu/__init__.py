"""Runs unmodified Triton and TLX kernels on CPU tensors, and checks what they do.

    report = run(kernel, (programs,), x, y, n, BLOCK=128)

Arithmetic is done in the real dtypes with Triton's promotion rules. Warp-specialized kernels run as
written: every task is a role of its own, with barriers, asynchronous copies and MMAs between them.
Reported are races, deadlocks, barrier misuse, waits that may pass a phase too early, uninitialized
reads, stores of undefined values, missing fences, CTAs that end too early, out-of-bounds accesses
and invalid descriptors; `errors` lists the kinds. An operation the emulator does not know raises
`Unsupported`; it never guesses. Registers, layouts and real time are not modelled.

`rewrite` turns the kernel's source into Python on tiles, and `aggregates` its classes; `scopes`
watches variables; `tile` is the arithmetic; `language` and `tlx` the operations; `instructions`
inline PTX; `memory` global memory, `undefined` what masks turn off, `buffers` shared and tensor
memory; `clocks` what happens before what; `barriers`, `tasks` and `scheduler` who runs when,
`engines` the units that roles share; `timeline` the trace; `launch` the state of a launch. Needs
torch, triton and greenlet, and no GPU.
"""

import contextlib
import contextvars
import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import triton.language as tl
from triton.backends.nvidia.compiler import CUDAOptions
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.jit import JITFunction, TensorWrapper
from triton.tools.tensor_descriptor import TensorDescriptor

from .barriers import ClusterBarrier
from .compiling import ask_front_end, compile_launch
from .errors import (
    AliasedWait,
    BarrierMisuse,
    Deadlock,
    DescriptorError,
    DeviceAssertion,
    EarlyExit,
    EmulatorError,
    InvalidKernel,
    MissingFence,
    OutOfBounds,
    Race,
    ResourceLimit,
    UndefinedValue,
    UninitializedRead,
    Unsupported,
    WrongResult,
    location_of,
)
from .gpu import WARMED_UP, fake_gpu
from .language import MODULES, NAMES
from .launch import CURRENT, Cluster, Cta, Launch, Report
from .memory import Descriptor, Memory
from .messages import explain
from .orders import Order, order_of
from .rewrite import Lowering, map_tuple
from .scheduler import Role, Scheduler
from .tasks import Region
from .tile import FROM_TORCH, cast, scalar
from .timeline import Timeline
from .tracing import Tracer
from .undefined import MODES

__all__ = [
    "AliasedWait",
    "BarrierMisuse",
    "Deadlock",
    "DescriptorError",
    "DeviceAssertion",
    "EarlyExit",
    "EmulatorError",
    "InvalidKernel",
    "MissingFence",
    "OutOfBounds",
    "Race",
    "Report",
    "ResourceLimit",
    "Timeline",
    "UndefinedValue",
    "UninitializedRead",
    "Unsupported",
    "WrongResult",
    "current_arch",
    "current_multiprocessors",
    "enabled",
    "fake_gpu",
    "is_enabled",
    "run",
    "run_enabled",
]

__version__ = "0.1.0"

if find_spec("triton.language.extra.tlx"):
    from .tlx import MODULES as TLX_MODULES
else:  # upstream's Triton
    TLX_MODULES = {}

ARCHITECTURES = ("sm_90", "sm_100")
MULTIPROCESSORS = 3

# Launch options, as opposed to arguments of the kernel; most do not change its results.
_OPTIONS = frozenset(CUDAOptions.__dataclass_fields__) | {"ctas_per_cga"}  # a plugin's, with TLX


class Reports(list[Report]):
    """Reports of launches, one after the other. findings: errors of those that raised one."""

    def __init__(self) -> None:
        super().__init__()
        self.findings: list[EmulatorError] = []


@dataclass(frozen=True)
class _Enabled:
    """What `enabled` was given, and the reports of the launches in it."""

    arch: str
    multiprocessors: int
    all_configs: bool
    options: dict[str, Any]
    reports: Reports


_ENABLED: contextvars.ContextVar[_Enabled | None] = contextvars.ContextVar("emulator", default=None)


def _with_order(options: dict[str, Any]) -> dict[str, Any]:
    """The options of `run`, with one order for all launches."""
    return {**options, "schedule": order_of(options.get("schedule", "modelled"))}


def _check_arch(arch: str) -> None:
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch must be one of {ARCHITECTURES}, got {arch!r}")


@contextlib.contextmanager
def enabled(
    arch: str = "sm_90",
    *,
    multiprocessors: int = MULTIPROCESSORS,
    all_configs: bool = False,
    **options: Any,
) -> Iterator[Reports]:
    """Within this context kernels that are launched on CPU tensors run in the emulator.

    `kernel[grid](...)` does, in the thread that opens it, and launchers that call `run_enabled`.
    Yields the reports of the launches. The emulated device has `multiprocessors` of them: a few, so
    that persistent programs share work. An autotuned kernel runs with the first configuration that
    fits, with `all_configs` with each that fits, the first one last. `options` are those of `run`.
    """
    _check_arch(arch)
    _take_launches()
    opened = _Enabled(arch, multiprocessors, all_configs, _with_order(options), Reports())
    token = _ENABLED.set(opened)
    try:
        yield opened.reports
    finally:
        _ENABLED.reset(token)


@functools.cache
def _take_launches() -> None:
    """Let launches ask from now on whether a context is open."""

    def taken(original: Callable) -> Callable:
        @functools.wraps(original)
        def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _ENABLED.get() is None or _are_on_gpu(_tensors((args, kwargs))):
                return original(self, *args, **kwargs)
            if kwargs.pop("warmup", False):
                return WARMED_UP
            return run_enabled(self, kwargs.pop("grid"), *args, **kwargs)

        return launch

    for kind in (JITFunction, Autotuner, Heuristics):
        if "run" in vars(kind):
            kind.run = taken(kind.run)


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of launch arguments."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, TensorDescriptor):
        return [value.base]
    values = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (dict, tuple, list)):
        return []
    return [tensor for each in values for tensor in _tensors(each)]


def _are_on_gpu(tensors: list[torch.Tensor]) -> bool:
    with torch._C.DisableTorchFunction():
        return any(tensor.is_cuda for tensor in tensors)


def run_enabled(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> Report:
    """`run` on the device of the open `enabled` context, which gets the report, or the finding.

    Raises RuntimeError without such a context, and what `run` raises.
    """
    opened = _opened()
    try:
        with torch._C.DisableTorchFunction():
            return _run_configurations(opened, kernel, grid, args, kwargs)
    except EmulatorError as error:
        opened.reports.findings.append(error)
        raise


def _run_configurations(
    opened: _Enabled, kernel: Any, grid: Any, args: tuple, kwargs: dict[str, Any]
) -> Report:
    def launch(config: Any) -> Report:
        report = run(
            kernel, grid, *args, arch=opened.arch, **opened.options, **{**kwargs, **config}
        )
        opened.reports.append(report)
        return report

    configs = [] if "config" in opened.options else _configurations(kernel, args, kwargs)
    if len(configs) < 2:
        return launch({})
    before = [(x.untyped_storage(), x.untyped_storage().clone()) for x in _tensors((args, kwargs))]
    fitting, refused = [], None
    for config in reversed(configs) if opened.all_configs else configs:
        for storage, content in before:
            storage.copy_(content)
        try:
            report = launch({"config": config})
        except ResourceLimit as error:
            refused = error
            continue
        except EmulatorError as error:
            chosen = {**config.kwargs, "num_warps": config.num_warps}
            named = ", ".join(f"{name}={value}" for name, value in chosen.items())
            error.args = (f"{error.args[0]} (configuration {named})", *error.args[1:])
            raise
        fitting.append(config)
        if not opened.all_configs:
            return report
    if not fitting:
        raise refused
    if config is not fitting[-1]:
        for storage, content in before:
            storage.copy_(content)
        report = launch({"config": fitting[-1]})
    return report


def _configurations(kernel: Any, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """What pruning leaves of an autotuned kernel's configurations; none without an autotuner."""
    while not isinstance(kernel, JITFunction):
        named = dict(zip(getattr(kernel, "arg_names", ()), args, strict=False))
        if hasattr(kernel, "configs"):
            kernel.nargs = named
            return list(kernel.prune_configs(kwargs))
        for name, rule in getattr(kernel, "values", {}).items():
            kwargs = {**kwargs, name: rule({**named, **kwargs})}
        if not hasattr(kernel, "fn"):
            break
        kernel = kernel.fn
    return []


def is_enabled() -> bool:
    """Whether an `enabled` context is open."""
    return _ENABLED.get() is not None


def current_arch() -> str:
    """The architecture of the open `enabled` context; RuntimeError without one."""
    return _opened().arch


def current_multiprocessors() -> int:
    """The multiprocessors of the open `enabled` context; without one, what it has by default."""
    opened = _ENABLED.get()
    return MULTIPROCESSORS if opened is None else opened.multiprocessors


def _opened() -> _Enabled:
    opened = _ENABLED.get()
    if opened is None:
        raise RuntimeError("tritonemu.enabled() must be open, got no open context")
    return opened


def run(
    kernel: Any,
    grid: tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]],
    *args: Any,
    arch: str = "sm_90",
    schedule: str | int | Order = "modelled",
    trace: bool = False,
    races: bool = True,
    uninitialized: str = "error",
    masked: str = "nan",
    config: Any = None,
    reachable: Sequence[torch.Tensor] = (),
    max_steps: int | None = None,
    resident: int = 1,
    compile: bool = False,
    **kwargs: Any,
) -> Report:
    """Execute every CTA of `grid`, cluster by cluster, x fastest, and return what they did.

    kernel: a `@triton.jit` function, also one under `@triton.heuristics` or `@triton.autotune`, of
    which `config`, or the first one that pruning leaves, becomes `best_config`. grid: one to three
    sizes, or a function of the bound arguments. args, kwargs: the kernel's own, tensors on the CPU;
    of the launch options, `num_warps` and `ctas_per_cga` count. schedule: "modelled", an integer
    that seeds random interleavings, or another name of an order (see `orders`). trace: keep a
    timeline. races: whether unordered accesses raise `Race`, `MissingFence` and `EarlyExit`.
    uninitialized: "error", or "allow" to let reads of unwritten shared memory yield NaN. masked:
    what lanes hold that a mask turns off and no `other` fills, "nan" (and large integers, and
    `UndefinedValue` if they are stored), "zero", as on NVIDIA GPUs, or "random". reachable: tensors
    that the kernel finds through addresses in memory instead of arguments. max_steps: how many
    operations that other roles can notice the kernel may take, None for any number. resident: how
    many clusters run at the same time; programs that wait for each other need all of them to.
    compile: whether Triton compiles the launch first, of which `compiling` says what it finds.

    Raises subclasses of EmulatorError, which carry the kernel's file and line.
    """
    _check_arch(arch)
    order = order_of(schedule)
    if uninitialized not in ("error", "allow"):
        raise ValueError(f'uninitialized must be "error" or "allow", got {uninitialized!r}')
    if masked not in MODES:
        raise ValueError(f"masked must be one of {MODES}, got {masked!r}")
    kernel, kwargs = _undecorated(kernel, args, kwargs, config)
    signature = inspect.signature(kernel.fn)
    options = {name: kwargs.pop(name) for name in _OPTIONS & kwargs.keys() - signature.parameters}
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    sizes = _three(grid({**bound.arguments, **options}) if callable(grid) else grid, "grid", 0)
    shape = _three(options.get("ctas_per_cga") or (1,), "ctas_per_cga", 1)
    if any(size % ctas for size, ctas in zip(sizes, shape, strict=True)):
        raise ValueError(f"grid must be divisible by ctas_per_cga {shape}, got {sizes}")

    report = Report(arch, kernel.fn.__name__)
    lowering = Lowering({**MODULES, **TLX_MODULES}, {**NAMES, "__tasks__": Region})
    launch = Launch(
        *(arch, sizes, shape, options.get("num_warps") or 4, report, races, uninitialized),
        *(lowering, masked),
    )
    launch.memory = Memory(launch, reachable)
    tracer = Tracer(kernel.fn.__code__.co_filename) if trace else None
    report.timeline = tracer.timeline if tracer else None
    numbers = {"roles": 0, "operations": 0, "steps": 0}
    token, threads = CURRENT.set(launch), torch.get_num_threads()
    try:
        # A tile is too small for more than one thread to pay.
        torch.set_num_threads(1)
        if compile:
            compile_launch(kernel, arch, bound.arguments, options)
        with torch.no_grad():
            body = lowering.function(kernel)
            values = {p.name: _argument(launch, bound.arguments[p.name], p) for p in kernel.params}
            launch.clusters.extend(range(math.prod(sizes) // math.prod(shape)))
            while launch.clusters:
                launch.scheduler = Scheduler(order, numbers, tracer, max_steps)
                together = range(min(resident, len(launch.clusters)))
                chosen = [launch.clusters.popleft() for _ in together]
                _run_clusters(launch, chosen, lambda: (body(**values), launch.role.cta.end()))
            if launch.undecided:
                ask_front_end(kernel, arch, bound.arguments, options)
    except EmulatorError as error:
        _told(error, report, order)
        raise
    except Exception as error:
        at = location_of(error)
        if at[1] == 0:
            raise
        message = f"{type(error).__name__}: {error} in program {launch.program}"
        raise _told(InvalidKernel(message, at), report, order) from error
    finally:
        CURRENT.reset(token)
        torch.set_num_threads(threads)
    return report


def _told(error: EmulatorError, report: Report, order: Order) -> EmulatorError:
    """The finding, with what a reader needs beside its message."""
    error.report, error.schedule = report, str(order)
    if hasattr(error, "add_note"):
        error.add_note(explain(error))
    return error


def _three(sizes: Any, name: str, least: int) -> tuple[int, int, int]:
    try:
        sizes = tuple(map(operator.index, sizes))
    except TypeError:
        raise ValueError(f"{name} must be a tuple of integers, got {sizes!r}") from None
    if not 1 <= len(sizes) <= 3 or min(sizes) < least:
        raise ValueError(f"{name} must have one to three sizes, got {sizes}")
    return sizes + (1,) * (3 - len(sizes))


def _run_clusters(launch: Launch, numbers: Sequence[int], body: Callable[[], None]) -> None:
    """Run the CTAs of some clusters to the end, all at the same time."""
    scheduler, count = launch.scheduler, math.prod(launch.cluster_shape)
    launch.memory.start_clusters()
    ctas = []
    for number in numbers:
        cluster = Cluster(scheduler, ClusterBarrier(scheduler, count))
        for rank in range(count):
            program = launch.place(number, rank)
            x, y, z = program
            linear = x + launch.grid[0] * (y + launch.grid[1] * z)
            cta = Cta(launch, cluster, linear, rank, program)
            cluster.ctas.append(cta)
            scheduler.start(Role(scheduler, cta, "default", launch.num_warps, body))
        ctas += cluster.ctas
    scheduler.run()
    for cta in ctas:
        if launch.report.timeline is not None:
            busy = {name: engine.total for name, engine in cta.engines.items()}
            launch.report.timeline.busy[cta.number] = busy
        for allocation in cta.allocations:
            for barrier in getattr(allocation, "barriers", ()):
                barrier.finish()
    launch.report.programs += len(ctas)


def _undecorated(
    kernel: Any, args: Any, kwargs: dict[str, Any], chosen: Any
) -> tuple[JITFunction, dict]:
    """The Triton function below autotune and heuristics, and the arguments with theirs."""
    while not isinstance(kernel, JITFunction):
        named = dict(zip(getattr(kernel, "arg_names", ()), args, strict=False))
        if hasattr(kernel, "configs"):
            kernel.nargs = named
            config = kernel.best_config = chosen or kernel.prune_configs(kwargs)[0]
            kwargs = {**kwargs, **config.all_kwargs()}
            if config.pre_hook is not None:
                config.pre_hook({**named, **kwargs})
        elif hasattr(kernel, "values"):
            for name, rule in kernel.values.items():
                kwargs = {**kwargs, name: rule({**named, **kwargs})}
        else:
            raise TypeError(f"kernel must be a @triton.jit function, got {type(kernel).__name__}")
        kernel = kernel.fn
    return kernel, kwargs


def _pointer_like(launch: Launch, value: Any, name: str) -> Any:
    """The pointer that an object with a `data_ptr()` of its own is to a kernel."""
    address = value.data_ptr()
    for tensor in (member for member in vars(value).values() if isinstance(member, torch.Tensor)):
        step, odd = divmod(address - tensor.data_ptr(), tensor.itemsize)
        first = tensor.untyped_storage().data_ptr()
        if not odd and first <= address <= first + tensor.untyped_storage().nbytes():
            pointer = launch.memory.pointer(name, tensor)
            return cast(pointer.like(pointer.data + step), tl.pointer_type(FROM_TORCH[value.dtype]))
    raise Unsupported(f"argument {name} of type {type(value).__name__}, which holds no tensor")


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
    if callable(getattr(value, "data_ptr", None)) and not isinstance(value, TensorWrapper):
        return _pointer_like(launch, value, name)
    if isinstance(value, TensorWrapper):
        pointer = launch.memory.pointer(name, value.base)
        return cast(pointer, tl.pointer_type(value.dtype))
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
