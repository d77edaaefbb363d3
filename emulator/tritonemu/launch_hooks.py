"""Hooks of launches within `enabled`: those the emulator runs, and their configurations."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.jit import JITFunction

from . import unwritten
from .compiled_kernel import Compiled
from .errors import EmulatorError
from .execution import OPTIONS, execute, undecorated
from .gpu import check_arch, tensors_of
from .launch import Report
from .orders import order_of

MULTIPROCESSORS = 3


class Reports(list[Report]):
    """Reports of launches, one after the other. findings: errors of those that raised one."""

    def __init__(self) -> None:
        super().__init__()
        self.findings: list[EmulatorError] = []


@dataclass(frozen=True)
class _Enabled:
    arch: str
    multiprocessors: int
    all_configs: bool
    options: dict[str, Any]
    reports: Reports
    tuned: set[int] = field(default_factory=set)


_ENABLED: contextvars.ContextVar[_Enabled | None] = contextvars.ContextVar("emulator", default=None)


@contextlib.contextmanager
def enabled(
    arch: str = "sm_90",
    *,
    multiprocessors: int = MULTIPROCESSORS,
    all_configs: bool = False,
    **options: Any,
) -> Iterator[Reports]:
    """Run kernels that are launched on CPU tensors within this context in the emulator.

    `kernel[grid](...)` does, in the thread that opens it, and launchers that call `run_enabled`.
    Yields the reports of the launches. The emulated device has `multiprocessors` of them: a few, so
    that persistent programs share work. An autotuned kernel runs with the first configuration that
    fits, with `all_configs` with each that fits, the first one last. `options` are those of
    `execution.execute`; keywords of a launch are the kernel's and Triton's, whatever their names.

    Raises TypeError for an option that there is not.
    """
    check_arch(arch)
    if unknown := options.keys() - OPTIONS:
        raise TypeError(f"options must be among {sorted(OPTIONS)}, got {sorted(unknown)}")
    _take_launches()
    options["schedule"] = order_of(options.get("schedule", "modelled"))  # one for all launches
    opened = _Enabled(arch, multiprocessors, all_configs, options, Reports())
    token = _ENABLED.set(opened)
    judged = unwritten.JUDGED.set(options.get("uninitialized", "error") == "error")
    try:
        yield opened.reports
    finally:
        _ENABLED.reset(token)
        unwritten.JUDGED.reset(judged)


@functools.cache
def _take_launches() -> None:
    """Hook launches, which ask from now on whether a context is open."""

    def taken(original: Callable) -> Callable:
        @functools.wraps(original)
        def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _ENABLED.get() is None or _are_on_gpu(tensors_of((args, kwargs))):
                return original(self, *args, **kwargs)
            warmup, grid = kwargs.pop("warmup", False), kwargs.pop("grid")
            report = None if warmup else run_enabled(self, grid, *args, **kwargs)
            return Compiled(self, kwargs, _opened().arch, report)

        return launch

    for kind in (JITFunction, Autotuner, Heuristics):
        if "run" in vars(kind):
            kind.run = taken(kind.run)


def _are_on_gpu(tensors: list[torch.Tensor]) -> bool:
    with torch._C.DisableTorchFunction():
        return any(tensor.is_cuda for tensor in tensors)


def run_enabled(kernel: Any, grid: tuple[int, ...], /, *args: Any, **kwargs: Any) -> Report:
    """Run a kernel in the open `enabled` context, which gets its report, or the finding.

    Raises RuntimeError without such a context, and what `execution.run` raises.
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
    def launch(**chosen: Any) -> Report:
        options = {"arch": opened.arch, **opened.options, **chosen}
        opened.reports.append(execute(kernel, grid, args, kwargs, **options))
        return opened.reports[-1]

    configs = [] if "config" in opened.options else undecorated(kernel, args, kwargs)[2]
    if len(configs) < 2:
        return launch()
    snapshots = [
        (x.untyped_storage(), x.untyped_storage().clone()) for x in tensors_of((args, kwargs))
    ]

    def restore() -> None:
        for storage, content in snapshots:
            storage.copy_(content)

    def launch_afresh(config: Any) -> Report:
        restore()
        return launch(config=config)

    def launch_as_tuned(config: Any) -> Report:
        report = launch_afresh(config)
        if id(kernel) not in opened.tuned and str(opened.options["schedule"]) == "modelled":
            opened.tuned.add(id(kernel))
            _note_tuning(opened, kernel, grid, args, kwargs, config, len(configs), report, restore)
        return report

    fitting, refused = [], None
    for config in reversed(configs) if opened.all_configs else configs:
        try:
            report = launch_as_tuned(config)
        except EmulatorError as error:
            if error.unfit:
                refused = error
                continue
            chosen = {**config.kwargs, "num_warps": config.num_warps}
            named = ", ".join(f"{name}={value}" for name, value in chosen.items())
            error.args = (f"{error.args[0]} (configuration {named})", *error.args[1:])
            raise
        if not opened.all_configs:
            return report
        fitting.append(config)
    if not fitting:
        raise refused
    return report if config is fitting[-1] else launch_afresh(fitting[-1])


def _note_tuning(
    opened: _Enabled, kernel: Any, grid: Any, args: tuple, kwargs: dict[str, Any], config: Any,
    count: int, report: Report, restore: Callable[[], None],
) -> None:  # fmt: skip
    """Note if a launch ends otherwise after one on the same memory, as autotuning makes many."""
    tuner = kernel
    while not hasattr(tuner, "configs"):
        tuner = tuner.fn
    named = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
    updated = {
        name: [(each, each.clone()) for each in (x.untyped_storage() for x in tensors_of(value))]
        for name, value in named.items()
        if name in report.updated
    }
    if not updated:
        return
    what, held = "", {**named, **config.all_kwargs()}
    options = {**opened.options, "trace": False, "compile": False, "config": config}
    restore()
    try:
        tuner.pre_hook(held)
        execute(kernel, grid, args, kwargs, arch=opened.arch, **options)
        tuner.post_hook(held, exception=None)
        tuner.pre_hook(held, reset_only=True)
        execute(kernel, grid, args, kwargs, arch=opened.arch, **options)
        changed = [
            name for name, pairs in updated.items()
            if not all(torch.equal(_bytes(now), _bytes(then)) for now, then in pairs)
        ]  # fmt: skip
        what = f"leaves something else in {', '.join(changed)}" if changed else ""
    except EmulatorError as error:
        what = f"ends with {type(error).__name__} ({error})"
    for now, then in (pair for pairs in updated.values() for pair in pairs):
        now.copy_(then)
    if what:
        report.notes.append(
            f"autotuning runs {report.kernel} many times on the same memory, for {count} "
            f"configurations, before it runs as asked, and a run after another one {what}: "
            f"reset_to_zero or restore_value of triton.autotune is missing"
        )


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def is_enabled() -> bool:
    return _ENABLED.get() is not None


def current_reports() -> Reports:
    """Return the reports of the open `enabled` context so far; RuntimeError without one."""
    return _opened().reports


def current_arch() -> str:
    """Return the architecture of the open `enabled` context; RuntimeError without one."""
    return _opened().arch


def current_multiprocessors() -> int:
    """Return the multiprocessors of the open `enabled` context; without one, the default."""
    opened = _ENABLED.get()
    return MULTIPROCESSORS if opened is None else opened.multiprocessors


def _opened() -> _Enabled:
    opened = _ENABLED.get()
    if opened is None:
        raise RuntimeError("tritonemu.enabled() must be open, got no open context")
    return opened
