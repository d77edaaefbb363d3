"""Checks and times implementations on workloads; notebooks in measure mode call it.

Nothing is timed behind a failed check: an implementation that raises, or whose output misses its
budget, yields a row with the reason and no samples.
"""

from __future__ import annotations

import functools
import gc
import math
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from gdpa_kernels.calling.launches import launches
from gdpa_lab.measuring import machine_code, operators, record, sustained, testing, timing
from gdpa_lab.measuring.baselines import STEP
from gdpa_lab.measuring.inputs import BlockInputs, Inputs, make_inputs
from gdpa_lab.measuring.operators import Candidate
from gdpa_lab.measuring.rows import reason
from gdpa_lab.measuring.workload import Workload

SCOPES = ("kernel", "sustained", "op", "host", "schedule")
"""What is timed: "kernel", all kernels of the pass, zero fills and conversions included;
"sustained", the same in a loop, one implementation at a time, with the load of the GPU; "op", the
public call of a rung, or autograd's backward of it, and of GDPA's backward rungs also the variant
`baselines.STEP`, with the FLOPs and bytes of both directions; "host", until that call returns;
"schedule", what makes the lists and offsets that the kernels were given."""
ON_DEVICE = ("kernel", "sustained")
Entry = str | tuple[str, str, Mapping[str, object]]
"""Name of an implementation, or (name, variant, options of the rung)."""
Scopes = Sequence[str] | Mapping[str, Collection[str]]
"""Scopes timed for all implementations, or the implementations of each scope."""
Stage = Callable[[str], None]
"""Callback for the stage that begins, one of `probe.LIMITS_S`."""


class Attempt(NamedTuple):
    """Outcome of an implementation: a candidate, its error and `run_once` peak, or a failure."""

    candidate: Candidate | None = None
    error: record.Error | None = None
    peak: int = 0
    failure: str | None = None


def candidate(
    impl: str,
    inputs: Inputs | BlockInputs,
    *,
    direction: str = "forward",
    variant: str = "",
    **options: object,
) -> Candidate:
    """Prepare a rung or a baseline on `inputs`; `options` go to the rung, e.g. `config` or
    `work_list`.

    The option `module`, a changed copy of the rung's own (`studies.changed`), stands in for it.
    A rung's work list is made here, outside what is timed, and so is what its backward needs of its
    forward; their cost is a measurement of its own. Raises whatever the baseline or rung raises
    when it cannot take the workload.
    """
    return operators.of(inputs, direction).candidate(impl, variant, **options)


def run_once(ready: Candidate) -> tuple[torch.Tensor | tuple[torch.Tensor, ...], int]:
    """Run one call on memory full of NaN; return its result and its peak memory."""
    result = ready.call()
    with torch.inference_mode():  # a peer's backward may have made them in it
        for tensor in tensors(result):
            tensor.fill_(float("nan"))  # no earlier right answer for what is allocated next
    poison = [torch.full_like(tensor, float("nan")) for tensor in tensors(result)]
    del result, poison
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    result = ready.call()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - allocated


def attempt(
    entry: Entry,
    operator: operators.Gdpa | operators.BlockAttention,
    stage: Stage = lambda name: None,
) -> Attempt:
    """Make, run and check an entry; once more, without the fp64 results that `operator` remembers,
    if memory runs out beside them."""
    while True:
        try:
            return _attempt(entry, operator, stage)
        except torch.OutOfMemoryError as error:
            if not operator.forget():
                return Attempt(failure=reason(error))
        except Exception as error:
            return Attempt(failure=reason(error))
        free()


def _attempt(
    entry: Entry, operator: operators.Gdpa | operators.BlockAttention, stage: Stage
) -> Attempt:
    impl, variant, options = parts(entry)
    ready = operator.candidate(impl, variant, **options)
    stage("run")
    result, peak = run_once(ready)
    stage("check")
    comparisons = operator.check(ready.math, ready.checked(tensors(result)))
    worst = worst_error(comparisons)
    if worst.passed:
        return Attempt(ready, worst, peak)
    failed = "; ".join(str(c) for c in comparisons if not c.passed)
    return Attempt(error=worst, failure=f"check failed: {failed}")


def tensors(result: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return the output, or each gradient, as a tuple."""
    return result if isinstance(result, tuple) else (result,)


def failed_rows(
    workload: Workload, direction: str, scopes: Scopes, entry: Entry, tried: Attempt
) -> list[record.Row]:
    """Build the rows of an entry that cannot be timed."""
    impl, variant, _ = parts(entry)
    kind = operators.math(workload.operator, impl)
    common = {"impl": impl, "variant": variant, "math": kind}
    common |= {"error": tried.error, "failure": tried.failure}
    there = [scope for scope in ON_DEVICE if asks(scopes, scope, impl)] or ["kernel"]
    return [record.Row.of(workload, direction, scope=scope, **common) for scope in there]


def worst_error(comparisons: Sequence[testing.Comparison]) -> record.Error:
    """Reduce comparisons to the one closest to its budget, or farthest beyond it."""

    def share(comparison: testing.Comparison) -> tuple[bool, float]:
        share = comparison.max_abs / max(comparison.max_abs_budget, sys.float_info.min)
        return not comparison.passed, share if math.isfinite(share) else math.inf

    worst = max(comparisons, key=share)
    elements, passed = sum(c.elements for c in comparisons), all(c.passed for c in comparisons)
    judged = record.Error.judge(worst.max_abs, worst.max_abs_budget, elements=elements)
    return replace(judged, passed=passed, pytorch=worst.pytorch, rounding=worst.rounding)


def measure(
    workload: Workload,
    impls: Sequence[Entry],
    *,
    device: torch.device,
    direction: str = "forward",
    protocol: timing.Protocol = timing.DEFAULT,
    scopes: Scopes = ("kernel",),
    seconds: float = sustained.SECONDS,
    log: Callable[[str], None] = print,
    stage: Stage = lambda name: None,
) -> list[record.Row]:
    """Check and time `impls` on `workload` in `direction`; one row for each impl and scope.

    `scopes`: of `SCOPES`; `seconds`: of "sustained". What fails has a row in each scope of
    `ON_DEVICE` that was asked of it; a call that waits for the device, or that the device waits
    for, has one in the scope where it did. The error of a backward row is that of the gradient
    closest to its budget.
    """
    stage("inputs")
    inputs = make_inputs(workload, device=device)
    operator = operators.of(inputs, direction)
    ready: list[Attempt] = []
    rows: list[record.Row] = []
    for entry in impls:
        tried = attempt(entry, operator, stage)
        if tried.failure is None:
            ready.append(tried)
        else:
            rows += failed_rows(workload, direction, scopes, entry, tried)
            log(f"  {' '.join(filter(None, parts(entry)[:2]))}: {tried.failure}")
        free()
    operator = operators.of(inputs, direction)  # without what it remembered to check
    free()
    for scope in scopes:
        requested = [tried for tried in ready if asks(scopes, scope, tried.candidate.impl)]
        calls = list(_calls(scope, operator, [tried.candidate for tried in requested]))
        functions = {f"{requested[i].candidate.impl} {variant}": call for i, variant, call in calls}
        stage("time")
        samples = sampled(scope, functions, device, protocol, seconds)
        for i, variant, call in calls:
            one = requested[i].candidate
            times, more = samples[f"{one.impl} {variant}"]
            values = {"samples_us": times, **more, "scope": scope, "variant": variant}
            values |= {"impl": one.impl, "math": one.math}
            if times:
                values["launches"] = launched(call, device)
            if scope != "schedule":
                values |= _checked_values(operator, requested[i], scope, variant)
            rows.append(record.Row.of(workload, direction, **values))
            if scope in ON_DEVICE and times:
                median = sorted(times)[len(times) // 2]
                rate = workload.flops(direction) / median / 1e6
                speed = workload.bytes(direction) / median / 1e3
                log(
                    f"  {one.impl} {one.variant}: {scope} {median:.0f} us, "
                    f"{rate:.0f} TFLOP/s, {speed:.0f} GB/s"
                )
    return rows


def _checked_values(
    operator: operators.Gdpa | operators.BlockAttention, tried: Attempt, scope: str, variant: str
) -> dict[str, object]:
    """Build the error, config and peak of a row; the call that was checked had no other peak."""
    config, is_step = dict(tried.candidate.config), (scope, variant) == ("op", STEP)
    if is_step:
        config["forward"] = operator.forward_of_step()
    peak = None if is_step or scope == "host" else tried.peak
    return {"error": tried.error, "config": config, "peak_bytes": peak}


def launched(call: operators.Call, device: torch.device) -> list[dict[str, object]] | None:
    """Describe what one call launches of our kernels, for a row; None without a GPU."""
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        with launches() as seen:
            call()
        return [machine_code.describe(launch) for launch in seen]


def parts(entry: Entry) -> tuple[str, str, Mapping[str, object]]:
    """Split an entry of `impls` into (name, variant, options)."""
    return (entry, "", {}) if isinstance(entry, str) else entry


def asks(scopes: Scopes, scope: str, impl: str) -> bool:
    """Return whether `impl` is to be timed in `scope`."""
    return scope in scopes and (not isinstance(scopes, Mapping) or impl in scopes[scope])


def _calls(
    scope: str, operator: operators.Gdpa | operators.BlockAttention, ready: Sequence[Candidate]
) -> Iterator[tuple[int, str, operators.Call]]:
    """Yield the calls timed in `scope`: the number of the candidate, the variant, the call.

    A candidate that is a variant has no public call.
    """
    if scope not in SCOPES:
        raise ValueError(f"scopes must be among {SCOPES}, got {scope!r}")
    for i, one in enumerate(ready):
        if scope in ON_DEVICE:
            yield i, one.variant, one.call
        elif one.variant:
            continue
        elif scope in ("op", "host"):
            for variant, call in operator.ops(one.impl).items():
                yield i, variant, call
        else:
            call = operator.work_list(one.impl)
            if call is not None:
                yield i, "", call


def sampled(
    scope: str,
    functions: Mapping[str, operators.Call],
    device: torch.device,
    protocol: timing.Protocol,
    seconds: float,
) -> dict[str, tuple[Sequence[float], dict[str, object]]]:
    """Sample each function in `scope`, by name, with more values for its row: the load for
    "sustained", and a failure for a call that waits for the device or lets it wait."""
    others = {
        "op": timing.sample_ops,
        "host": timing.sample_hosts,
        "sustained": functools.partial(sustained.sample_each, seconds=seconds),
    }
    sampler = others.get(scope, timing.sample_kernels)
    sound, waiting = dict(functions), {}
    while True:
        try:
            samples_of = waiting | sampler(sound, device, protocol)
            return {name: _samples(scope, samples) for name, samples in samples_of.items()}
        except timing.WaitsForDevice as error:
            waiting[error.name] = error
            del sound[error.name]


def _samples(scope: str, sampled: Any) -> tuple[Sequence[float], dict[str, object]]:
    """Split the result of the timer of `scope` into samples and more values for the row."""
    if isinstance(sampled, Exception):
        return [], {"failure": reason(sampled)}
    return (sampled[0], {"load": sampled[1]}) if scope == "sustained" else (sampled, {})


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
