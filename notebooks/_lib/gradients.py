"""Measurements of gradients besides times: the memory of a step, and errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gdpa_lab.measuring import measure, operators, record
from gdpa_lab.measuring.inputs import BlockInputs, Inputs
from gdpa_lab.measuring.session import Session
from gdpa_lab.measuring.workload import Workload

MEMORY = ("workload", "impl", "bytes")
"""Columns of the table "memory"."""


def memory(session: Session, workload: Workload, impls: Sequence[str]) -> None:
    """Add to the table "memory" of the session's record the most device memory that a step of
    training had allocated at once, forward and backward, on top of q, k, v and the gradient of the
    output.

    `impls`: backward rungs, each behind the fastest forward, or baselines.
    bytes is None, and the log says why, where the step failed or a gradient was wrong. ValueError
    for an operator other than GDPA.
    """
    if workload.operator != "gdpa":
        raise ValueError(f"workload must be of operator 'gdpa', got {workload.operator!r}")
    if not session.asks(workload):
        return
    session.add(workload)
    earlier = session.tables.get("memory", record.Table(MEMORY, ())).rows
    peaks: dict[str, int | None] = dict.fromkeys(impls)

    def run(inputs: Inputs, impl: str) -> None:
        operator = operators.of(inputs, "backward")
        candidate = operator.step(impl)
        result, peak = measure.run_once(candidate)
        wrong = [
            c for c in operator.check(candidate.math, candidate.checked(result)) if not c.passed
        ]
        if wrong:
            raise ValueError(f"check failed: {'; '.join(map(str, wrong))}")
        peaks[impl] = peak
        session.log(f"  {impl}: {peak / 2**30:.2f} GiB")

    for impl in impls:
        session.launch(
            f"memory of {impl}", workload, [impl], lambda inputs, impl=impl: run(inputs, impl),
            direction="backward",
        )  # fmt: skip
    lines = [(workload.name, impl, peak) for impl, peak in peaks.items()]
    session.tables["memory"] = record.Table(MEMORY, (*earlier, *lines))


def accuracy(session: Session, workload: Workload, impls: Mapping[int, measure.Entry]) -> None:
    """Keep the errors of each gradient against fp64, over all elements, as the table "accuracy".

    `impls`: how often a gradient is rounded to the workload's dtype -> who computes it, an entry as
    for `Session.measure`. Columns: gradient, roundings, impl, max_abs, mean_abs (absolute errors).
    """

    def run(inputs: Inputs | BlockInputs) -> None:
        session.tables["accuracy"] = errors(inputs, impls)

    rungs = [measure.parts(entry)[0] for entry in impls.values()]
    session.launch("accuracy", workload, rungs, run, direction="backward")


def errors(inputs: Inputs | BlockInputs, impls: Mapping[int, measure.Entry]) -> record.Table:
    """The table of `accuracy`. ValueError if `impls` compute different mathematics."""
    operator = operators.of(inputs, "backward")
    names = operator.results["backward"]
    computed: dict[tuple[str, int, str], tuple[torch.Tensor, list[torch.Tensor]]] = {}
    kinds = {operator.math(measure.parts(entry)[0]) for entry in impls.values()}
    if len(kinds) != 1:
        raise ValueError(f"impls must have one mathematics, got {sorted(kinds)}")
    for roundings, entry in impls.items():
        impl, variant, options = measure.parts(entry)
        candidate = operator.candidate(impl, variant, **options)
        gradients = candidate.checked(candidate.call())
        for name, gradient in zip(names, gradients, strict=True):
            computed[name, roundings, impl] = gradient, []
    for places, expected in operator.exact(*kinds):
        exact = dict(zip(names, zip(places, expected, strict=True), strict=True))
        for (name, *_), (gradient, parts) in computed.items():
            rows, right = exact[name]
            error = gradient[rows].to(torch.float64, copy=True).sub_(right).abs_()
            parts.append(torch.stack((error.max(), error.sum())))
    lines = []
    for key, (gradient, parts) in computed.items():
        error = torch.stack(parts)
        mean = float(error[:, 1].sum()) / gradient.numel()
        lines.append((*key, float(error[:, 0].max()), mean))
    return record.Table(("gradient", "roundings", "impl", "max_abs", "mean_abs"), sorted(lines))
