"""Checks a call: one check, one verdict.

verdict = check(kernel, (8,), x, y, n, BLOCK=128)
print(verdict)
assert verdict.clean and not verdict.unjudged and not verdict.unwrapped
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import messages
from .errors import EmulatorError
from .execution import OPTIONS
from .gpu import tensors_of
from .launch import BarrierUse, Report
from .launch_hooks import enabled
from .orders import Order, order_of
from .search import Search
from .timeline import Timeline


@dataclass
class Verdict:
    """Findings in a call, and what was judged.

    findings: the one that ended it, or none. reports: of the launches under its first schedule, or
    under that of the finding. covered: as `Search.as_json`, without "exhausted" if the search did
    not come to its end. differs: the first schedule that gives other bits than the first one, ""
    without one. outputs: what the call returned under the first.
    """

    findings: list[EmulatorError] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    covered: dict[str, Any] = field(default_factory=dict)
    differs: str = ""
    outputs: Any = None

    @property
    def clean(self) -> bool:
        """Whether nothing was found, in what could be judged."""
        return not self.findings

    @property
    def finding(self) -> EmulatorError | None:
        return self.findings[0] if self.findings else None

    @property
    def unjudged(self) -> dict[tuple[str, int, str], int]:
        """Count how often each (file, line, question) could not be judged."""
        return dict(messages.unjudged(self.reports))

    @property
    def allowed(self) -> dict[tuple[str, str, int, str], int]:
        """Count how often a comment allowed each (kind, file, line, reason)."""
        return dict(messages.allowed(self.reports))

    @property
    def notes(self) -> list[str]:
        """List remarks on what may be intended."""
        return messages.notes(self.reports)

    @property
    def barriers(self) -> dict[tuple[str, str], BarrierUse]:
        """Use of each mbarrier, by kernel and name: the most of all launches."""
        return messages.barriers(self.reports)

    @property
    def unwrapped(self) -> dict[tuple[str, str], str]:
        """Phases of mbarriers that were not seen, by kernel and name."""
        return messages.unwrapped(self.barriers)

    @property
    def timeline(self) -> Timeline | None:
        """The trace of the launch with the finding, with `trace=True` of the last one."""
        traced = [report.timeline for report in self.reports if report.timeline is not None]
        return traced[-1] if traced else None

    @property
    def cycles(self) -> float:
        """Modelled cycles of all launches, one after the other."""
        return sum(report.cycles for report in self.reports)

    def __str__(self) -> str:
        if self.findings:
            return messages.described(self.findings[0])
        tried, count = self.covered.get("schedules", 1), sum(self.unjudged.values())
        counted = f"{tried} schedule{'s' * (tried != 1)}{f'; {count} not judged' * bool(count)}"
        lines = [f"nothing found in {counted}"]
        return "\n".join([*lines, *messages.remarks(self.reports)])

    def as_json(self, replay: str = "") -> dict[str, Any]:
        """Convert to JSON values; the fields are those of `--json`."""
        return messages.report_of(self.finding, replay, self.covered, self.reports)


def check(
    kernel: Any,
    /,
    *args: Any,
    search: Search | Sequence[Search | Iterable[Order] | int | str] | None = None,
    arch: str = "sm_90",
    trace: bool | None = None,
    **options: Any,
) -> Verdict:
    """Launch a kernel under each order of a search, and return what is said of it.

    kernel: a Triton kernel, followed by its grid and arguments as in `run`; its tensors then hold
    what the first order leaves. Or a function without arguments that launches kernels on memory of
    its own and returns the tensors that it computes, if any, as a sequence or a mapping; it is
    called once for each order. search: default `Search()`; a number is the seed of an order, a text
    its name. trace: whether launches have a timeline; None: that with the finding, which is run
    once more. options: of `enabled`, and keywords of the kernel.

    Stops at the first finding; other exceptions pass.
    """
    verdict, first, tried = Verdict(), None, 0
    parts = Search() if search is None else search
    parts = (parts,) if isinstance(parts, Search) else tuple(parts)
    names = getattr(kernel, "arg_names", None)
    ours = (OPTIONS | {"multiprocessors", "all_configs"}) - set(names or ())
    keywords = {name: options.pop(name) for name in options.keys() - ours}
    call = kernel if names is None else _launch(kernel, *args, **keywords)
    if names is None and (args or keywords):
        raise TypeError(f"a function takes no arguments here, got {[*args, *keywords]}")

    def launched(order: Order | str, trace: bool) -> Any:
        outputs = None
        with enabled(arch, **options | {"schedule": order, "trace": trace}) as reports:
            try:
                outputs = call()
            except EmulatorError as error:
                if error not in reports.findings:  # what PyTorch reads after a launch
                    if error.report is None:
                        raise
                    error.schedule = str(order)
                    reports.findings.append(error)
        verdict.findings = reports.findings[:1]
        if verdict.findings or first is None:
            failed = [each.report for each in verdict.findings if each.report is not None]
            verdict.reports = [*reports, *(each for each in failed if each not in reports)]
        return outputs

    for order in (each for part in parts for each in _orders(part)):
        outputs, tried = launched(order, bool(trace)), tried + 1
        if verdict.findings:
            error = verdict.findings[0]
            if trace is None and type(error) is not EmulatorError:
                launched(error.schedule, True)
            break
        now = _bytes(outputs)
        if first is None:
            verdict.outputs, first = outputs, [each.clone() for each in now]
        elif not verdict.differs and not all(map(torch.equal, first, now)):
            verdict.differs = str(order)
    for part in parts:
        verdict.covered |= part.as_json() if isinstance(part, Search) else {}
    verdict.covered["schedules"] = tried
    if names is not None and first is not None:
        for tensor, content in zip(call.outputs, first, strict=True):
            tensor.copy_(content)
    return verdict


def _launch(kernel: Any, grid: Any, *args: Any, **keywords: Any) -> Callable[[], list]:
    """Build a call that launches a kernel on what its arguments hold now; `outputs`: its memory."""
    memory = {id(s): s for s in (each.untyped_storage() for each in tensors_of((args, keywords)))}
    held = [(storage, storage.clone()) for storage in memory.values()]

    def call() -> list[torch.Tensor]:
        for storage, content in held:
            storage.copy_(content)
        kernel[grid](*args, **keywords)
        return call.outputs

    call.outputs = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage, _ in held]
    return call


def _bytes(outputs: Any) -> list[torch.Tensor]:
    """List the bytes of the tensors that a call returned."""
    tensors = tensors_of([*outputs] if isinstance(outputs, Sequence) else [outputs])
    copies = (each.clone(memory_format=torch.contiguous_format) for each in tensors)
    return [each.reshape(-1).view(torch.uint8) for each in copies]


def _orders(part: Search | Iterable[Order] | int | str) -> Iterator[Order]:
    return iter((order_of(part),)) if isinstance(part, int | str) else iter(part)
