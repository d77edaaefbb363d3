"""Roofline: a bracket of time for a workload from measured ceilings, before any kernel runs.

A kernel cannot finish before its useful FLOPs at the measured matmul rate, nor before its fewest
bytes at the measured copy rate. Perfect overlap of the two gives the lower time, none the upper.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from gdpa_lab.measuring.require import is_finite, require
from gdpa_lab.measuring.rows import Ceiling
from gdpa_lab.measuring.workload import Workload


@dataclass(frozen=True)
class Ceilings:
    """Measured limits of one device.

    `tflops`: dense matmuls, TFLOP/s. `copies`: (bytes read per byte written, GB/s) of each
    measured copy, with GB/s = (read + written) / time and 1 GB = 1e9 bytes, by rising read share.
    ValueError if a number is not positive and finite, or the mixes do not rise.
    """

    tflops: float
    copies: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        require(_is_positive(self.tflops), "tflops", "a positive number", self.tflops)
        pairs = isinstance(self.copies, tuple) and len(self.copies) > 0
        pairs = pairs and all(isinstance(c, tuple) and len(c) == 2 for c in self.copies)
        pairs = pairs and all(_is_positive(x) for copy in self.copies for x in copy)
        kind = "a non-empty tuple of (read per written, GB/s) pairs of positive numbers"
        require(pairs, "copies", kind, self.copies)
        mixes = [mix for mix, _ in self.copies]
        if mixes != sorted({*mixes}):
            raise ValueError(f"copies must have strictly rising read shares, got {mixes}")

    @staticmethod
    def measured(ceilings: Iterable[Ceiling], scope: str = "kernel") -> Ceilings | None:
        """The limits that `ceilings` of a scope show, from the median of each one's samples.

        The fastest matmul counts, and the fastest copy of each read : written mix. None if
        either kind is missing.
        """
        tflops, copies = 0.0, {}
        for c in (c for c in ceilings if c.scope == scope):
            time_us = statistics.median(c.samples_us)
            if c.kind == "matmul":
                tflops = max(tflops, c.flops / time_us / 1e6)
            else:
                mix = c.bytes_read / c.bytes_written
                rate = (c.bytes_read + c.bytes_written) / time_us / 1e3
                copies[mix] = max(rate, copies.get(mix, 0.0))
        return Ceilings(tflops, tuple(sorted(copies.items()))) if tflops and copies else None

    def floor_us(self, flops: int, read: int, written: int) -> float:
        """Microseconds that `flops` FLOPs, or the bytes, need at least: the larger of the two."""
        return max(self.compute_us(flops), self.memory_us(read, written))

    def compute_us(self, flops: int) -> float:
        """Microseconds that `flops` FLOPs need at least."""
        return flops / (self.tflops * 1e6)

    def memory_us(self, read: int, written: int) -> float:
        """Microseconds that `read` and `written` bytes need at least."""
        return (read + written) / (self.gbytes_per_s(read, written) * 1e3)

    def gbytes_per_s(self, read: int, written: int) -> float:
        """GB/s for `read` and `written` bytes.

        Linear in the ratio read : written between measured mixes; beyond the outermost mix, that
        mix's rate. ValueError if a count is negative or both are 0.
        """
        if read < 0 or written < 0 or read + written == 0:
            raise ValueError(
                f"read and written must be non-negative and not both 0, got {read} and {written}"
            )
        mixes, rates = zip(*self.copies, strict=True)
        return float(np.interp(read / written if written else math.inf, mixes, rates))


def _is_positive(value: object) -> bool:
    return is_finite(value) and value > 0


@dataclass(frozen=True)
class Bracket:
    """Times in microseconds between which a perfect kernel lies.

    `compute_us` and `memory_us` are the two floors; `lower_us` is the larger (perfect overlap) and
    `upper_us` their sum (no overlap). `bound` names the larger floor, "compute" or "memory";
    `tflops_at_lower` is the rate in TFLOP/s of useful work at `lower_us`.
    """

    compute_us: float
    memory_us: float
    lower_us: float
    upper_us: float
    bound: str
    tflops_at_lower: float

    def percent_of_roofline(self, time_us: float) -> float:
        """100 * lower_us / time_us; ValueError unless `time_us` is positive."""
        require(_is_positive(time_us), "time_us", "a positive number", time_us)
        return 100 * self.lower_us / time_us


def bracket(workload: Workload, direction: str, ceilings: Ceilings) -> Bracket:
    """The bracket of `workload` in `direction` ("forward" or "backward") under `ceilings`."""
    flops = workload.flops(direction)
    read, written = workload.bytes_read(direction), workload.bytes_written(direction)
    compute_us, memory_us = ceilings.compute_us(flops), ceilings.memory_us(read, written)
    lower_us, upper_us = max(compute_us, memory_us), compute_us + memory_us
    bound = "compute" if compute_us >= memory_us else "memory"
    return Bracket(compute_us, memory_us, lower_us, upper_us, bound, flops / (lower_us * 1e6))
