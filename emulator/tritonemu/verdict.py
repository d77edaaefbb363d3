"""Checks a call: one check, one verdict."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from .errors import EmulatorError
from .execution import OPTIONS
from .gpu import tensors_of
from .launch import Report
from .launch_hooks import enabled
from .messages import Remarks, described, finding_as_json
from .orders import Order, order_of
from .search import Search
from .timeline import Timeline


@dataclass
class Verdict(Remarks):
    """The finding in a call, and what was judged.

    finding: the one that ended it, or None. reports: of the launches under its first schedule, or
    under that of the finding; what they tell beside it is in the fields of `Remarks`. covered: as
    `Search.as_json`, "exhausted" false if the search did not come to its end. differs: the first
    schedule that gives other bits than the first one, "" without one. outputs: what the call
    returned under the first.
    """

    finding: EmulatorError | None = None
    reports: list[Report] = field(default_factory=list)
    covered: dict[str, Any] = field(default_factory=dict)
    differs: str = ""
    outputs: Any = None

    @property
    def clean(self) -> bool:
        """Whether nothing was found, in what could be judged."""
        return self.finding is None

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
        if self.finding:
            return described(self.finding)
        tried, count = self.covered.get("schedules", 1), sum(self.unjudged.values())
        counted = f"{tried} schedule{'s' * (tried != 1)}{f'; {count} not judged' * bool(count)}"
        return "\n".join([f"nothing found in {counted}", *self.lines()])

    def as_json(self, replay: str = "") -> dict[str, Any]:
        """Convert to JSON values; the fields are those of `--json`."""
        finding = finding_as_json(self.finding, replay) if self.finding else None
        return {"found": finding, **super().as_json(), "covered": self.covered}


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
    parts = Search() if search is None else search
    parts = [parts] if isinstance(parts, Search) else list(parts)
    orders = ([order_of(part)] if isinstance(part, int | str) else part for part in parts)
    names = getattr(kernel, "arg_names", None)
    ours = (OPTIONS | {"multiprocessors", "all_configs"}) - set(names or ())
    keywords = {name: options.pop(name) for name in options.keys() - ours}
    call = kernel if names is None else _launch(kernel, *args, **keywords)
    if names is None and (args or keywords):
        raise TypeError(f"a function takes no arguments here, got {[*args, *keywords]}")

    def launched(order: Order | str, trace: bool) -> tuple[EmulatorError | None, list[Report], Any]:
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
        finding = reports.findings[0] if reports.findings else None
        if finding and finding.report and finding.report not in reports:
            reports.append(finding.report)
        return finding, reports, outputs

    verdict, first, tried = Verdict(), [], 0
    for order in chain.from_iterable(orders):
        finding, reports, outputs = launched(order, bool(trace))
        tried += 1
        if finding:
            if trace is None and type(finding) is not EmulatorError:
                finding, reports, _ = launched(finding.schedule, True)
            verdict.finding, verdict.reports = finding, reports
            break
        content = _bytes(outputs)
        if tried == 1:
            verdict.reports, verdict.outputs = reports, outputs
            first = [each.clone() for each in content]
        elif not verdict.differs and not all(map(torch.equal, first, content)):
            verdict.differs = str(order)
    for part in parts:
        verdict.covered |= part.as_json() if isinstance(part, Search) else {}
    verdict.covered["schedules"] = tried
    verdict.add(verdict.reports)
    if names is not None and first:
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
