"""Runs one launch, from its arguments to its report."""

import math
import operator
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import triton.language as tl
from triton.backends.nvidia.compiler import CUDAOptions
from triton.runtime.jit import TensorWrapper
from triton.tools.tensor_descriptor import TensorDescriptor

from .barriers import Rendezvous
from .compiler import allocated, ask_front_end, asm_of, compile_launch, signature_of
from .errors import EmulatorError, InvalidKernel, ResourceLimit, Unsupported, location_of
from .gpu import HOST_DESCRIPTORS, check_arch, has_gluon, is_on_host, tensors_of
from .language import MODULES, NAMES
from .launch import CURRENT, Cluster, Cta, Launch, Report
from .memory import Descriptor, Memory
from .messages import explain
from .orders import Order, order_of
from .rewrite import Lowering, map_tuple
from .scheduler import Role, Scheduler
from .tasks import Region
from .threads import Threads
from .tile import FROM_TORCH, cast, scalar
from .timeline import Timeline
from .ttgir import places, registers, shared_bytes
from .undefined import MODES

if find_spec("triton.language.extra.tlx"):  # not in upstream's Triton
    from .tlx import MODULES as TLX_MODULES

    MODULES = {**MODULES, **TLX_MODULES}

if has_gluon():
    from .gluon import MODULES as GLUON_MODULES
    from .gluon.im2col import Im2Col
    from .gluon.memory import described

    MODULES = {**MODULES, **GLUON_MODULES}

# Launch options, as opposed to arguments of the kernel; most do not change its results.
# "ctas_per_cga" is a plugin's, with TLX.
_LAUNCH_OPTIONS = frozenset(CUDAOptions.__dataclass_fields__) | {"ctas_per_cga"}

JUDGED, BOUNDS = ("error", "allow"), ("tensor", "storage")


def execute(
    kernel: Any,
    grid: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    arch: str = "sm_90",
    schedule: str | int | Order = "modelled",
    trace: bool = False,
    races: bool = True,
    strict: bool = False,
    uninitialized: str = "error",
    unguarded: str = "error",
    masked: str = "nan",
    max_steps: int | None = None,
    timeout: float | None = None,
    bounds: str = "tensor",
    resident: int = 1,
    compile: bool = False,
) -> Report:
    """Run a kernel, with the emulator's options apart from the kernel's keywords.

    schedule: "modelled", an integer that seeds random interleavings, or another name of an order
    (see `orders`). trace: keep a timeline. races: whether unordered accesses raise `Race`,
    `MissingFence` and `EarlyExit`. strict: whether stores that change no bit race, too; without it,
    one value from several programs is a note of the report. uninitialized: "error", or "allow" to
    let reads of unwritten shared memory yield NaN. unguarded: "error", or "allow" to let pass what
    warps of one program do to memory without a barrier, and loops ahead of time (see `threads`).
    masked: what lanes hold that a mask turns off and no `other` fills, "nan" (or any integer, and
    `UndefinedValue` if what is stored depends on it), or "zero", as on NVIDIA GPUs.
    bounds: "tensor", or "storage": of tensors that are parts of one, kernels may use the memory
    around them. max_steps: how many operations that other roles can notice the kernel may take, and
    timeout: how many seconds, None for any number. resident: how many clusters run at the same
    time; if all of them spin, the next one starts. compile: whether Triton compiles the launch
    first, of which `compiler` says what it finds.
    """
    check_arch(arch)
    order = order_of(schedule)
    for name, value, known in (
        ("uninitialized", uninitialized, JUDGED),
        ("unguarded", unguarded, JUDGED),
        ("masked", masked, MODES),
        ("bounds", bounds, BOUNDS),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {known}, got {value!r}")
    signature = signature_of(kernel)
    # A kernel may take some of them as parameters, too.
    options = {name: kwargs[name] for name in _LAUNCH_OPTIONS & kwargs.keys()}
    named = kwargs.keys() - (options.keys() - signature.parameters)
    bound = signature.bind(*args, **{name: kwargs[name] for name in named})
    bound.apply_defaults()
    sizes = _three(grid(dict(bound.arguments)) if callable(grid) else grid, "grid", 0)
    shape = _three(options.get("ctas_per_cga") or (1,), "ctas_per_cga", 1)
    if any(size % ctas for size, ctas in zip(sizes, shape, strict=True)):
        raise ValueError(f"grid must be divisible by ctas_per_cga {shape}, got {sizes}")

    report = Report(arch, kernel.fn.__name__)
    report.timeline = Timeline(kernel.fn.__code__.co_filename) if trace else None
    warps = options.get("num_warps") or bound.arguments.get("num_warps") or 4
    options["num_warps"] = warps
    lowering = Lowering(MODULES, {**NAMES, "__tasks__": Region})
    launch = Launch(
        *(arch, sizes, shape, warps, report, races, uninitialized),
        *(lowering, masked),
        strict=strict,
        whole_storage=bounds == "storage",
    )
    asm = partial(asm_of, kernel, arch, bound.arguments, options)
    if races and unguarded == "error":
        launch.threads = Threads(launch, asm)
    launch.memory = Memory(launch)
    numbers = {"roles": 0, "operations": 0, "steps": 0}
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    token, threads = CURRENT.set(launch), torch.get_num_threads()
    try:
        # A tile is too small for more than one thread to pay.
        torch.set_num_threads(1)
        _check_launch(launch, options.get("num_ctas") or 1, bound.arguments)
        if compile:
            compile_launch(kernel, arch, bound.arguments, options)
        with torch.no_grad():
            if getattr(kernel, "is_gluon", bool)():
                if not has_gluon():
                    known = "the Gluon of this Triton; the emulator knows that of 3.9"
                    raise Unsupported(known, ("", 0))
                launch.partition_fences, launch.num_ctas = True, options.get("num_ctas") or 1
                ask_front_end(kernel, arch, bound.arguments, options)
                module = cache(lambda: allocated(asm(), arch))
                launch.placed = cache(lambda: places(module()))
                launch.compiled_bytes = cache(lambda: shared_bytes(module()))
                launch.registers = cache(lambda: registers(asm()["ttgir"]))
            body = lowering.function(kernel)
            values = {p.name: _argument(launch, bound.arguments[p.name], p) for p in kernel.params}
            launch.clusters.extend(range(math.prod(sizes) // math.prod(shape)))
            while launch.clusters:
                launch.scheduler = Scheduler(order, numbers, report.timeline, max_steps, deadline)
                together = range(min(resident, len(launch.clusters)))
                chosen = [launch.clusters.popleft() for _ in together]
                run_clusters(launch, chosen, lambda: (body(**values), _end(launch.role)))
            if launch.undecided:
                ask_front_end(kernel, arch, bound.arguments, options)
    except EmulatorError as error:
        _annotated(error, report, order)
        raise
    except Exception as error:
        location = location_of(error)
        if location[1] == 0:
            raise
        message = f"{type(error).__name__}: {error} in program {launch.program}"
        role = launch.scheduler and launch.role
        marks = (role.mark(location[1], "ends: InvalidKernel"),) if role else ()
        invalid = InvalidKernel(message, location, marks=marks)
        raise _annotated(invalid, report, order) from error
    finally:
        CURRENT.reset(token)
        torch.set_num_threads(threads)
    if launch.together > resident and not options.get("launch_cooperative_grid"):
        count = math.prod(shape)
        report.notes.append(
            f"{launch.together} of {math.prod(sizes) // count} "
            f"{'programs' if count == 1 else 'clusters'} must run at the same time, as those "
            f"before them wait for later ones: if they do not fit on a GPU it hangs "
            f"(launch_cooperative_grid=True makes that an error)"
        )
    return report


def _check_launch(launch: Launch, num_ctas: int, arguments: dict[str, Any]) -> None:
    """Raise for what Triton's options, its launcher or CUDA's driver refuse."""
    where = {name: [*map(is_on_host, tensors_of(value))] for name, value in arguments.items()}
    if not all(map(all, where.values())):  # a program without a GPU means the CPU
        for name in (name for name, on_host in where.items() if any(on_host)):
            raise InvalidKernel(f"{name} is on the CPU, and others on the GPU", ("", 0))
    (x, y, z), warps = launch.grid, launch.num_warps
    for holds, error, rule in (
        (warps > 0 and not warps & warps - 1, InvalidKernel, "num_warps must be a power of 2"),
        (warps <= 32, ResourceLimit, "num_warps must be at most 32, which are 1024 threads"),
        (num_ctas in (1, 2, 4, 8, 16), InvalidKernel, "num_ctas must be 1, 2, 4, 8 or 16"),
        (
            x * num_ctas < 2**31 and max(y, z) < 2**16,
            InvalidKernel,
            f"the grid of a GPU ends at {2**31 - 1}, {2**16 - 1}, {2**16 - 1}",
        ),
    ):
        if not holds:
            received = f"grid {launch.grid}, num_warps={warps}, num_ctas={num_ctas}"
            raise error(f"{rule}, got {received}", ("", 0))


def _end(role: Role) -> None:
    """End the kernel of the running role."""
    for lane in role.lanes:
        lane.retire()
    if len(role.lanes) > 1:
        role.joined()
    elif role.cta.cluster.waits:
        role.cta.cluster.barrier.count(role, 1, wait=True)
    for lane in role.lanes:
        lane.cta.end(lane)


OPTIONS = frozenset(execute.__kwdefaults__)


def _annotated(error: EmulatorError, report: Report, order: Order) -> EmulatorError:
    error.report, error.schedule = report, str(order)
    if report.timeline is not None:
        report.timeline.marks, report.timeline.missing = error.marks, error.missing
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


def run_clusters(launch: Launch, numbers: Sequence[int], body: Callable[[], None]) -> None:
    """Run the CTAs of some clusters to the end, all at the same time; more if all these spin."""
    scheduler, count = launch.scheduler, math.prod(launch.cluster_shape)
    launch.memory.start_clusters()
    ctas = []

    def start(group: int) -> None:
        key = "cluster", group
        cluster = Cluster(scheduler, Rendezvous(scheduler, "", "cluster barrier", key, count))
        for rank in range(count):
            program = launch.place(group, rank)
            x, y, z = program
            linear = x + launch.grid[0] * (y + launch.grid[1] * z)
            role = None
            for part in range(launch.num_ctas):
                number = launch.num_ctas * linear + part
                cta = Cta(launch, cluster, number, max(rank, part), program)
                cluster.ctas.append(cta)
                each = Role(scheduler, cta, "default", launch.num_warps, body, leader=role)
                role = role or each
            scheduler.start(role)
        ctas.extend(cluster.ctas)

    for number in numbers:
        start(number)
    launch.start_next = lambda: start(launch.clusters.popleft())
    scheduler.run()
    launch.together = max(launch.together, len(ctas) // count)
    launch.report.cycles = max(launch.report.cycles, scheduler.last)
    for cta in ctas:
        if launch.report.timeline is not None:
            busy = {name: engine.total for name, engine in cta.engines.items()}
            launch.report.timeline.busy[cta.number] = busy
        for allocation in cta.allocations:
            for barrier in getattr(allocation, "barriers", ()):
                barrier.finish()
    launch.report.programs += len(ctas)


def _pointer_like(launch: Launch, value: Any, name: str) -> Any:
    """Build the pointer for an object with a `data_ptr()` of its own."""
    address = value.data_ptr()
    for tensor in (member for member in vars(value).values() if isinstance(member, torch.Tensor)):
        step, odd = divmod(address - tensor.data_ptr(), tensor.itemsize)
        first = tensor.untyped_storage().data_ptr()
        if not odd and first <= address <= first + tensor.untyped_storage().nbytes():
            pointer = launch.memory.pointer(name, tensor)
            return cast(pointer.like(pointer.data + step), tl.pointer_type(FROM_TORCH[value.dtype]))
    raise Unsupported(f"argument {name} of type {type(value).__name__}, which holds no tensor")


def _type_of(value: int) -> tl.dtype:
    """Return the type of an integer argument, as Triton's launcher specializes it."""
    if -(2**31) <= value < 2**31:
        return tl.int32
    return tl.int64 if value < 2**63 else tl.uint64


def _argument(launch: Launch, value: Any, param: Any, name: str = "") -> Any:
    """Convert a launch argument to the kernel's value.

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
    if isinstance(value, HOST_DESCRIPTORS):
        if getattr(value, "round_f32_to_tf32", False):
            raise Unsupported("TensorDescriptor(round_f32_to_tf32=True)")
        base = launch.memory.pointer(name, value.base)
        if type(value).__name__ == "TensorDescriptorIm2Col":
            return described(Im2Col(base, value), value.layout)
        desc = Descriptor(base, value.shape, value.strides, value.block_shape, value.padding)
        return desc if isinstance(value, TensorDescriptor) else described(desc, value.layout)
    if isinstance(value, (tuple, list)):
        return map_tuple(lambda item: _argument(launch, item, param, f"{name}[]"), value)
    if isinstance(value, bool):
        return scalar(value, tl.int1)
    if isinstance(value, int):
        if param.annotation_type:
            return scalar(value, tl.str_to_ty(param.annotation_type, None))
        if value == 1 and not param.do_not_specialize:
            return 1
        return scalar(value, _type_of(value))
    if isinstance(value, float):
        return scalar(value, tl.float32)
    return launch.lowering.convert(value)
