"""Physical and numerical bounds, to refuse records that fit the schema and cannot be true.

Rates are bounded by the machine (`systems/`): all tensor cores at the highest clock, all pins of
the memory at theirs. Mean power is energy over time. An error budget cannot be recomputed without
the tensors, so it is bounded by the roundings in such sums.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import numpy as np
import torch

from gdpa_kernels.gdpa.reference import ACTIVATIONS
from gdpa_lab.measuring.rows import Ceiling, Row
from gdpa_lab.measuring.system import System
from gdpa_lab.measuring.testing import FACTOR
from gdpa_lab.measuring.workload import Workload

FLOPS = {
    "8.0": 2048, "8.6": 1024, "8.9": 1024, "9.0": 4096, "10.0": 8192, "10.3": 8192, "12.0": 1024,
}  # fmt: skip
"""Dense 16-bit FLOPs of an SM per clock, by compute capability; others get the maximum. From the
data sheets of A100, A40, L40S, H100, B200, B300, RTX PRO 6000: rate over SMs and boost clock."""

BUS_BITS = {
    "8.0": 5120, "8.6": 384, "8.9": 384, "9.0": 6144, "10.0": 8192, "10.3": 8192, "12.0": 512,
}  # fmt: skip
"""Bits of the widest memory bus sold, by compute capability; others get the maximum. From the data
sheets of A100, A40, L40S, H200, B200, B300, RTX PRO 6000. Two bits per pin and clock."""

SAME = 1e-12
"""Tolerance between two ways to compute a mean power in double precision."""

ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-11}
"""Largest relative error of one rounding; products of fp32 matrices may be TF32's."""

_ROUNDINGS = 4 * FACTOR + 1
"""Roundings in a budget: of scores, activations, the sum and the result; and its own."""
_SIGMAS = 8.0
"""Bound in deviations that a draw of N(0, 1), or a sum of many, exceeds less than once in 1e15."""


def violation(
    ceilings: Sequence[Ceiling], rows: Sequence[Row], workloads: Mapping[str, Workload],
    machine: System,
) -> str | None:  # fmt: skip
    """Return why a record of these cannot be of `machine`, or a budget in it cannot be right, or
    None. `workloads`: by the names that rows have."""
    return next(_violations(ceilings, rows, workloads, machine), None)


def _violations(
    ceilings: Sequence[Ceiling], rows: Sequence[Row], workloads: Mapping[str, Workload],
    machine: System,
) -> Iterator[str]:  # fmt: skip
    tflops, gbytes = peak_tflops(machine), peak_gbytes_per_s(machine)
    timed = [(f"ceilings[{i}]", ceiling) for i, ceiling in enumerate(ceilings)]
    timed += [(f"rows[{i}]", row) for i, row in enumerate(rows)]
    for where, what in timed:
        yield from _too_fast(where, what, machine, tflops, gbytes)
        yield from _wrong_load(where, what, machine)
    yield from _wrong_budgets(rows, workloads)


def peak_tflops(machine: System) -> float:
    """TFLOP/s of all tensor cores at the highest clock; infinite where the machine is unknown."""
    if machine.num_sms is None or machine.max_sm_clock_mhz is None:
        return math.inf
    flops = FLOPS.get(machine.compute_capability or "", max(FLOPS.values()))
    return machine.num_sms * flops * machine.max_sm_clock_mhz / 1e6


def peak_gbytes_per_s(machine: System) -> float:
    """GB/s of the memory's pins at their highest clock; infinite where the machine is unknown."""
    if machine.max_memory_clock_mhz is None:
        return math.inf
    bits = BUS_BITS.get(machine.compute_capability or "", max(BUS_BITS.values()))
    return 2 * bits / 8 * machine.max_memory_clock_mhz / 1e3


def _too_fast(
    where: str, what: Ceiling | Row, machine: System, tflops: float, gbytes: float
) -> Iterator[str]:
    if not what.samples_us:
        return
    fastest = min(what.samples_us)
    rate = what.flops / fastest / 1e6
    if rate > tflops:
        units = f"{machine.num_sms} SMs at {machine.max_sm_clock_mhz:.0f} MHz"
        yield f"{where}.samples_us must be at most {tflops:.0f} TFLOP/s, {units}, got {rate:.0f}"
    # Bytes that L2 may hold have not come from memory.
    rate = (what.bytes_read + what.bytes_written - (machine.l2_bytes or 0)) / fastest / 1e3
    if rate > gbytes:
        pins = f"memory at {machine.max_memory_clock_mhz:.0f} MHz"
        yield f"{where}.samples_us must be at most {gbytes:.0f} GB/s, {pins}, got {rate:.0f}"


def _wrong_load(where: str, what: Ceiling | Row, machine: System) -> Iterator[str]:
    load = what.load
    if load is None or not what.samples_us:
        return
    if load.joules is not None and load.power_w is not None:
        watts = load.joules / (float(np.mean(what.samples_us)) * 1e-6)
        if not math.isclose(watts, load.power_w, rel_tol=SAME):
            expected = f"{watts}, joules over the mean of samples_us"
            yield f"{where}.load.power_w must be {expected}, got {load.power_w}"
    most = machine.max_sm_clock_mhz
    if None not in (most, load.sm_clock_mhz) and load.sm_clock_mhz > most:
        yield f"{where}.load.sm_clock_mhz must be at most {most:.0f}, got {load.sm_clock_mhz:.0f}"


def _wrong_budgets(rows: Sequence[Row], workloads: Mapping[str, Workload]) -> Iterator[str]:
    """Check budgets against their bound and their number against the tensors compared: they depend
    on the inputs alone, so all rows of one mathematics share them."""
    budgets: dict[tuple[str, str, str], set[float]] = defaultdict(set)
    for i, row in enumerate(rows):
        if row.error is None:
            continue
        budget, must = row.error.budget, f"rows[{i}].error.budget must be"
        work = workloads[row.workload]
        most = most_budget(work, row.direction, row.math)
        if budget > most:
            why = f"what roundings to {work.dtype} amount to"
            yield f"{must} at most {most:.3g}, {why}, got {budget:.3g}"
        if None not in (row.error.pytorch, row.error.rounding):
            expected = FACTOR * row.error.pytorch + row.error.rounding
            if not math.isclose(expected, budget, rel_tol=SAME):
                why = f"{FACTOR:g} times pytorch and rounding"
                yield f"{must} {expected:.6g}, {why}, got {budget:.6g}"
        seen = budgets[row.workload, row.direction, row.math]
        seen.add(budget)
        tensors = 1 if row.direction == "forward" and row.math != "rotary" else 3
        if len(seen) > tensors:
            of = f"one of its workload, direction and math, of which {tensors} can differ"
            yield f"{must} {of}, got {budget:.6g} as another"


@cache
def most_budget(workload: Workload, direction: str, math_of: str) -> float:
    """The largest error budget that a check on `workload` can have.

    Inputs are N(0, 1), so a score is N(0, (scale sqrt(head_dim))^2). A sum over n keys or queries
    of independent terms of deviation g is within 8 g sqrt(n), or 8 of its largest terms; softmax
    averages instead. A budget is `FACTOR` times PyTorch's error, of four roundings, and one
    rounding. Budgets of the records reach a sixth of this.
    """
    heads = workload.num_heads_q // workload.num_heads_k
    queries = workload.total_q if workload.operator == "gdpa" and workload.shared_q else 0
    n_q, n_k = max(workload.max_seqlen_q * heads, queries), workload.max_seqlen_k
    scale = workload.head_dim**-0.5 if workload.scale is None else workload.scale
    deviation = scale * workload.head_dim**0.5
    if math_of == "activation":
        names = workload.activation
        names = (names,) if isinstance(names, str) else tuple(names)
        n = n_k if direction == "forward" else max(n_q, n_k)
        size = max(_size(name, deviation, n, direction) for name in names)
        size *= abs(workload.output_scale) if workload.output_scale is not None else 1.0
    elif direction == "forward" or math_of == "rotary":
        size = 2.0
    else:
        size = _SIGMAS * max(1.0, deviation) * math.sqrt(1 + n_q / n_k)
    return _ROUNDINGS * ROUNDING[workload.dtype] * _SIGMAS * size


def _size(activation: str, deviation: float, n: int, direction: str) -> float:
    """Bound a sum of `n` activations of scores N(0, `deviation`^2), in the backward pass also of
    derivatives, by its deviation or its largest term; each term includes the effect of a relative
    error of the score."""
    x = torch.linspace(-_SIGMAS, _SIGMAS, 4001, dtype=torch.float64)
    weights = torch.exp(-(x**2) / 2)
    x, weights = x * deviation, weights / weights.sum()
    function = ACTIVATIONS[activation]
    slope = function.derivative(x)
    terms = [function.function(x).abs() + (x * slope).abs()]
    if direction == "backward":
        bend = torch.gradient(slope, spacing=(x,))[0]
        terms.append(deviation * (slope.abs() + (x * bend).abs()))
    sums = [math.sqrt(n * float((weights * term**2).sum())) for term in terms]
    return max(*sums, *(float(term.max()) for term in terms))
