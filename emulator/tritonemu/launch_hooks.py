"""Hooks of launches within `enabled`: those the emulator runs, and their configurations."""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction, KernelInterface

from . import unwritten
from .compiled_kernel import Compiled
from .errors import EmulatorError
from .execution import OPTIONS, execute
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
    caches: dict[int, tuple[Any, dict]] = field(default_factory=dict)


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
    fits; with `all_configs` each that fits runs when Triton tunes, the first one last. `options`
    are those of `execution.execute`; keywords of a launch are the kernel's and Triton's, whatever
    their names.

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

    jitted, autotuned = JITFunction.run, Autotuner.run

    @functools.wraps(jitted)
    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _ENABLED.get() is None or _are_on_gpu(tensors_of((args, kwargs))):
            return jitted(self, *args, **kwargs)
        warmup, grid = kwargs.pop("warmup", False), kwargs.pop("grid")
        for hook in self.pre_run_hooks:
            hook(*args, **kwargs)
        report = None if warmup else run_enabled(self, grid, *args, **kwargs)
        return Compiled(self, kwargs, _opened().arch, report)

    @functools.wraps(autotuned)
    def tune(self: Autotuner, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(autotuned, self, *args, **kwargs)
        if _ENABLED.get() is None or _are_on_gpu(tensors_of((args, kwargs))):
            return call()
        return _Tuning(self, args, kwargs, call).run() if len(self.configs) > 1 else call()

    JITFunction.run, Autotuner.run = launch, tune


def _are_on_gpu(tensors: list[torch.Tensor]) -> bool:
    with torch._C.DisableTorchFunction():
        return any(tensor.is_cuda for tensor in tensors)


def run_enabled(kernel: Any, grid: tuple[int, ...], /, *args: Any, **kwargs: Any) -> Report:
    """Run a kernel in the open `enabled` context, which gets its report, or the finding.

    Raises RuntimeError without such a context, and what `run` raises.
    """
    opened = _opened()
    if not isinstance(kernel, KernelInterface):
        raise TypeError(f"kernel must be a @triton.jit function, got {type(kernel).__name__}")
    if not isinstance(kernel, JITFunction):
        return kernel.run(*args, grid=grid, warmup=False, **kwargs).report
    try:
        with torch._C.DisableTorchFunction():
            report = execute(kernel, grid, args, kwargs, arch=opened.arch, **opened.options)
    except EmulatorError as error:
        opened.reports.findings.append(error)
        raise
    opened.reports.append(report)
    return report


def run(kernel: Any, grid: Any, /, *args: Any, **kwargs: Any) -> Report:
    """Execute every CTA of `grid`, cluster by cluster, x fastest, and return what they did.

    kernel: a `@triton.jit` function, also one under `@triton.heuristics` or `@triton.autotune`,
    which is tuned anew. grid: one to three sizes, or a function of the kernel's arguments. args,
    kwargs: the kernel's own, tensors on the CPU; of the launch options, `num_warps` and
    `ctas_per_cga` count; and options of `execute`. A keyword that is a parameter of the kernel is
    the kernel's; within `enabled` every keyword is.

    Raises subclasses of EmulatorError, which carry the kernel's file and line.
    """
    parameters = set(getattr(kernel, "arg_names", ()))
    options = {name: kwargs.pop(name) for name in OPTIONS & kwargs.keys() - parameters}
    with enabled(**options, multiprocessors=current_multiprocessors()):
        return run_enabled(kernel, grid, *args, **kwargs)


# Of each argument with memory: its name, the bytes there, and a copy of them.
_Contents = list[tuple[str, torch.Tensor, torch.Tensor]]


class _Tuning:
    """One call of Triton's own `Autotuner.run`: hooks, cache and pruning are Triton's.

    Its clock is not: the first configuration that fits is the fastest, and the others run only if
    all are wanted, each on the memory as it was. before: that memory, once Triton has asked for a
    time. timed: the configurations that have run. timing: the one that does, to be timed.
    """

    def __init__(self, tuner: Autotuner, args: tuple, kwargs: dict[str, Any], call: Callable):
        self.tuner, self.call, self.opened = tuner, call, _opened()
        self.named = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
        tuner.nargs = {name: each for name, each in self.named.items() if name not in kwargs}
        self.configs = list(tuner.prune_configs(kwargs))
        self.cache = self.opened.caches.setdefault(id(tuner), (tuner, {}))[1]
        self.before: _Contents = []
        self.timed: set[int] = set()
        self.timing: Any = None

    def run(self) -> Any:
        first = not self.cache
        for number in range(len(self.configs)):
            self.timed.add(number)
            try:
                result = self.choose(number)
                break
            except EmulatorError as error:
                if error.unfit and self.before and number + 1 < len(self.configs):
                    self.pass_over(error)
                    continue
                if not error.unfit:
                    config = self.timing or self.tuner.best_config
                    chosen = {**config.kwargs, "num_warps": config.num_warps}
                    named = ", ".join(f"{name}={value}" for name, value in chosen.items())
                    error.args = (f"{error.args[0]} (configuration {named})", *error.args[1:])
                raise
        if first and self.before and str(self.opened.options["schedule"]) == "modelled":
            self.note(number, result.report)
        return result

    def pass_over(self, error: EmulatorError) -> None:
        self.opened.reports.findings.remove(error)
        _restore(self.before)

    def choose(self, number: int, afresh: bool = False) -> Any:
        """Call with a clock by which this configuration is the fastest; afresh: it runs once before
        as any that is timed, and leaves what it leaves."""
        numbers = itertools.count()

        def do_bench(call: Callable, **how: Any) -> list[float]:
            each = next(numbers)
            self.before = self.before or self.contents()
            if each == number and afresh:
                call()
            elif each not in self.timed and self.opened.all_configs:
                self.timed.add(each)
                self.timing = self.configs[each]
                try:
                    call()
                    _restore(self.before)
                except EmulatorError as error:
                    if not error.unfit:
                        raise
                    self.pass_over(error)
                self.timing = None
            return [math.inf if each != number else 0.0] * 3

        fields, cache = vars(self.tuner), {} if afresh else dict(self.cache)
        ours = {"do_bench": do_bench, "cache": cache, "cache_results": False}
        theirs = {name: fields[name] for name in ours if name in fields}
        fields.update(ours)
        try:
            result = self.call()
            self.cache.update(cache)
        finally:
            for name in ours:
                del fields[name]
            fields.update(theirs)
        return result

    def note(self, number: int, report: Report) -> None:
        """Note if the launch ends otherwise after one on the same memory, of which tuning makes
        many."""
        if not (updated := [name for name in self.named if name in report.updated]):
            return
        after, what = self.contents(), ""
        _restore(self.before)
        options = {**self.opened.options, "trace": False, "compile": False}
        token = _ENABLED.set(dataclasses.replace(self.opened, options=options, reports=Reports()))
        try:
            self.choose(number, afresh=True)
            differ = {name for name, now, then in after if not torch.equal(now, then)}
            changed = [name for name in updated if name in differ]
            what = f"leaves something else in {', '.join(changed)}" if changed else ""
        except EmulatorError as error:
            what = f"ends with {type(error).__name__} ({error})"
        finally:
            _ENABLED.reset(token)
        _restore(after)
        if what:
            report.notes.append(
                f"autotuning runs {report.kernel} many times on the same memory, for "
                f"{len(self.configs)} configurations, before it runs as asked, and a run after "
                f"another one {what}: reset_to_zero or restore_value of triton.autotune is missing"
            )

    def contents(self) -> _Contents:
        with torch._C.DisableTorchFunction():  # that of `fake_gpu`
            views = [
                (name, torch.empty(0, dtype=torch.uint8).set_(each.untyped_storage()))
                for name, value in self.named.items()
                for each in tensors_of(value)
            ]
            return [(name, view, view.clone()) for name, view in views]


def _restore(contents: _Contents) -> None:
    with torch._C.DisableTorchFunction():
        for _, view, content in contents:
            view.copy_(content)


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
