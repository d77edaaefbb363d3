"""Times kernels under sustained load, as a training loop runs them on a device that never rests.

Isolated calls (`timing.sample_kernels`) have pauses between them, so the device runs near its
highest clock. Here one function runs alone for `seconds`, after `WARM_S` that bring clock and
temperature to a steady state: 1 s gives the median of 1.5 s within a percent, an energy needs 5 s.
A sample is the mean time of the calls in a chunk of about `CHUNK_US`, between two CUDA events; L2
holds what the previous call left in it. Meanwhile NVML reports clock, energy and throttle reasons.
Source: NVML reference, nvmlDeviceGetTotalEnergyConsumption.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import pynvml
import torch

from gdpa_lab.measuring import system, timing
from gdpa_lab.measuring.rows import Load

SECONDS, WARM_S = 1.5, 0.5
CHUNK_US = 20_000.0


class HostTooSlow(RuntimeError):
    """Raised if the device waited for the host between calls."""


class Meter:
    """Reads energy, clock and throttle reasons from NVML; None for what it does not report."""

    def __init__(self, device: torch.device) -> None:
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

    def energy_j(self) -> float | None:
        """Energy since the driver was loaded."""
        millijoules = self._ask(pynvml.nvmlDeviceGetTotalEnergyConsumption)
        return None if millijoules is None else millijoules / 1e3

    def clock_mhz(self) -> float | None:
        """Current clock of the SMs."""
        return self._ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM)

    def throttle_reasons(self) -> set[str] | None:
        """Current reasons, named as in a record's state."""
        mask = self._ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        return None if mask is None else set(system.throttle_reasons(mask))

    def _ask(self, question: Callable[..., int], *more: object) -> int | None:
        try:
            return question(self._handle, *more)
        except pynvml.NVMLError:
            return None


def sample(
    function: Callable[[], object],
    device: torch.device,
    meter: Meter | None = None,
    *,
    seconds: float = SECONDS,
    warm_s: float = WARM_S,
    name: str = "the function",
) -> tuple[list[float], Load]:
    """Measure the mean time of a call in microseconds, chunk by chunk, and the load of the GPU.

    HostTooSlow if the device was idle between calls, WaitsForDevice if a call waits for it.
    """
    meter = meter or Meter(device)

    def unwaiting() -> contextlib.AbstractContextManager[None]:
        return timing.no_waiting(device, name)

    with torch.cuda.device(device):
        function()
        once_us = _chunks(function, unwaiting, 3, 2)[0][-1]
        calls = max(1, round(CHUNK_US / once_us))
        chunk_s = calls * once_us / 1e6
        _chunks(function, unwaiting, calls, math.ceil(warm_s / chunk_s))
        start_j = meter.energy_j()
        count = math.ceil(seconds / chunk_s)
        times, clocks, reasons = _chunks(function, unwaiting, calls, count, meter)
        end_j = meter.energy_j()
    joules = power = None
    if None not in (start_j, end_j):
        joules = (end_j - start_j) / (len(times) * calls)
        power = joules / statistics.fmean(times) * 1e6
    clock = None if None in clocks else statistics.median(clocks)
    throttled = None if None in reasons else tuple(sorted(set().union(*reasons)))
    return times, Load(clock, power, joules, throttled)


def _chunks(
    function: Callable[[], object],
    unwaiting: Callable[[], contextlib.AbstractContextManager[None]],
    calls: int,
    count: int,
    meter: Meter | None = None,
) -> tuple[list[float], list[float | None], list[set[str] | None]]:
    """Measure the mean time of a call, in microseconds, in each of `count` consecutive chunks; with
    a meter, also clock and throttle reasons during each."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    clocks, reasons = [], []
    events[0].record()
    for event in events[1:]:
        with unwaiting():
            for _ in range(calls):
                function()
        event.record()
        if meter is not None:
            clocks.append(meter.clock_mhz())
            reasons.append(meter.throttle_reasons())
    # A device that is kept busy is behind by all that its queue holds, more than a chunk.
    idle = meter is not None and events[-2].query()
    torch.cuda.synchronize()
    pairs = zip(events, events[1:], strict=False)
    times = [start.elapsed_time(end) * 1e3 / calls for start, end in pairs]
    if idle:
        raise HostTooSlow(
            f"the host must enqueue calls faster than the device runs them, got one in "
            f"{statistics.median(times):.0f} us: the device was not busy all the time"
        )
    return times, clocks, reasons


def sample_each(
    functions: Mapping[str, Callable[[], object]],
    device: torch.device,
    protocol: timing.Protocol = timing.DEFAULT,
    *,
    seconds: float = SECONDS,
) -> dict[str, tuple[list[float], Load] | HostTooSlow | timing.WaitsForDevice]:
    """Sample one function after another; an error takes the place of its result. `protocol` is that
    of isolated calls and is ignored."""
    meter, samples = Meter(device), {}
    for name, function in functions.items():
        try:
            samples[name] = sample(function, device, meter, seconds=seconds, name=name)
        except (HostTooSlow, timing.WaitsForDevice) as error:
            samples[name] = error
    return samples


def measure_ceilings(
    limits: Iterable[timing.Limit], isolated: Iterable[timing.Ceiling], device: torch.device
) -> list[timing.Ceiling]:
    """Measure sustained ceilings: for each mix, the limit that was fastest in `isolated`."""
    fastest = {}
    for ceiling in sorted(isolated, key=lambda c: statistics.median(c.samples_us), reverse=True):
        fastest[ceiling.flops, ceiling.bytes_read, ceiling.bytes_written] = ceiling.shape
    meter, measured = Meter(device), []
    for ceiling, call in limits:
        if ceiling.shape in fastest.values():
            times, load = sample(call, device, meter)
            measured.append(replace(ceiling, samples_us=tuple(times), scope="sustained", load=load))
    return measured
