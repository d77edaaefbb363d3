"""Rotary alone on the tensors of a workload of block attention: our kernel and PyTorch's way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gdpa_kernels.block_attention import reference, rotary
from gdpa_lab.measuring import measure, operators, record, sustained, testing
from gdpa_lab.measuring.inputs import BlockInputs
from gdpa_lab.measuring.measure import Candidate
from gdpa_lab.measuring.session import Session
from gdpa_lab.measuring.workload import Workload


def measure_rotary(
    session: Session,
    workload: Workload,
    *,
    direction: str = "forward",
    scopes: Sequence[str] = ("kernel",),
    seconds: float = sustained.SECONDS,
) -> None:
    """Rows of `workload` in the session's record: impl "rotary" is our kernel, "rotary_eager"
    PyTorch operation by operation.

    Forward rotates q and k, and v if the workload rotates it; backward applies the transpose to
    tensors of the same shapes. Both read sin and cos. Scopes: those of `measure.measure` on the
    device. What a row counts: `record.Row.of`. ValueError for a workload without rotary.
    """
    if not workload.rotary:
        raise ValueError(f"workload must have rotary, got {workload.name!r} without")

    def run(inputs: BlockInputs) -> None:
        session.prepare(workload, direction, "sustained" in scopes)
        session.add(workload, *_rows(session, inputs, direction, scopes, seconds))

    session.launch(f"rotary alone, {direction}", workload, [], run, direction=direction)


def _rows(
    session: Session, inputs: BlockInputs, direction: str, scopes: Sequence[str], seconds: float
) -> list[record.Row]:
    workload, turns = inputs.workload, inputs.rotary
    tensors = (inputs.q, inputs.k, inputs.v)[: 2 + workload.rotate_v]
    turn = reference.rotate if direction == "forward" else reference.rotate_transposed

    def kernel() -> tuple[torch.Tensor, ...]:
        q, k, *v = tensors
        back = direction == "backward"
        return rotary.rotary(q, k, v[0] if v else None, turns, transposed=back)[: len(tensors)]

    def eager() -> tuple[torch.Tensor, ...]:
        return tuple(turn(tensor, *turns) for tensor in tensors)

    rows, ready, common = [], {}, {}
    for impl, call in (("rotary", kernel), ("rotary_eager", eager)):
        what: dict[str, Any] = {"impl": impl, "math": "rotary"}
        try:
            result, peak = measure.run_once(Candidate(impl, "rotary", call))
            comparisons = _check(turn, tensors, turns, result)
            del result
            what["error"] = measure.worst_error(comparisons)
            failed = "; ".join(str(c) for c in comparisons if not c.passed)
            failure = f"check failed: {failed}" if failed else None
        except Exception as error:
            failure = measure.reason(error)
        if failure is None:
            ready[impl], common[impl] = call, what | {"peak_bytes": peak}
            continue
        what["failure"] = failure
        rows += [record.Row.of(workload, direction, scope=x, **what) for x in scopes]
        session.log(f"  {impl}: {failure}")
    measure.free()
    for scope in scopes:
        sampled = measure.sampled(scope, ready, session.device, session.protocol, seconds)
        for impl, (times, more) in sampled.items():
            what = {**common[impl], "scope": scope, "samples_us": times} | more
            if times:
                what["launches"] = measure.launched(ready[impl], session.device)
                session.log(f"  {impl} alone: {scope} {sorted(times)[len(times) // 2]:.0f} us")
            rows.append(record.Row.of(workload, direction, **what))
    return rows


def _check(
    turn: Callable[..., torch.Tensor],
    tensors: Sequence[torch.Tensor],
    turns: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
) -> list[testing.Comparison]:
    """Every element of rotated tensors, in parts of `operators.BlockAttention.PART` rows."""
    rows = operators.BlockAttention.PART
    comparisons = []
    for name, tensor, result in zip("qkv", tensors, results, strict=False):
        for first in range(0, len(tensor), rows):
            part, *angles = (t[first : first + rows] for t in (tensor, *turns))
            expected = turn(part.double(), *(angle.double() for angle in angles))
            baseline, actual = turn(part, *angles), result[first : first + rows]
            comparisons.append(
                testing.compare(name=name, actual=actual, expected=expected, baseline=baseline)
            )
    return comparisons
