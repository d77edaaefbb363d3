"""The timing protocol: what a sample is, and what the device can do at best.

A sample of scope "kernel" is the time between two CUDA events around one call, on an empty L2
cache, the call already enqueued when the first event fires: a device-side pause before it gives the
host that lead, so that launch overhead is not measured. The pause is at least twice what the host
needed to enqueue the call. A sample of scope "op" is host time from the call on an idle device to
its completion, which is what a caller waits for; of scope "host", to its return, which is how long
it keeps the host. In none of them may the call itself wait for the device: a pause would not cover
it, and host time would be taken for the device's. Kernels under comparison take turns in an order
shuffled every round, so that a drift of clocks or temperature meets all of them alike.
`sample_calls` is for calls in a row, as a program makes them, and belongs to no scope.
"""

from __future__ import annotations

import contextlib
import functools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from gdpa_lab.measuring import private
from gdpa_lab.measuring.rows import Ceiling

CYCLES_PER_US = 2000
COPY_BLOCKS = ((1024, 4), (2048, 4), (4096, 4), (8192, 8))  # elements of a program, its warps


@dataclass(frozen=True)
class Protocol:
    """How calls are to be timed: their number, and the preparation before each.

    `l2_flush_bytes` are written before each sample; `pause_us` is the host's least lead.
    """

    warmup: int = 3
    samples: int = 30
    l2_flush_bytes: int = 256 * 2**20
    pause_us: float = 300.0
    interleaved: bool = True


DEFAULT = Protocol()
RECORDED = ("warmup", "samples", "l2_flush_bytes", "interleaved")
"""Fields of a protocol that a record has too."""


class WaitsForDevice(RuntimeError):
    """Raised if a timed call waits for the device; `name` is the implementation."""

    def __init__(self, name: str) -> None:
        expected = "a timed call must not wait for the device"
        super().__init__(f"{expected}, got one of {name.strip()} that does")
        self.name = name


@contextlib.contextmanager
def no_waiting(device: torch.device, name: str) -> Iterator[None]:
    """Raise WaitsForDevice if the block waits for a GPU, as far as PyTorch notices."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing CUDA operation" in str(error):
            raise WaitsForDevice(name) from error
        raise
    finally:
        torch.cuda.set_sync_debug_mode("default")


def sample_kernels(
    functions: Mapping[str, Callable[[], object]],
    device: torch.device,
    protocol: Protocol = DEFAULT,
) -> dict[str, list[float]]:
    """Sample the device time of each function's calls, in microseconds, `protocol.samples` each.

    WaitsForDevice if a call waits for the device."""
    flush = torch.empty(max(protocol.l2_flush_bytes, 1), dtype=torch.int8, device=device)
    shuffle = random.Random(0).shuffle
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in functions}
    with torch.cuda.device(device):
        pauses = {}
        for name, function in functions.items():
            for _ in range(protocol.warmup):
                function()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            with no_waiting(device, name):
                function()
            enqueue_us = (time.perf_counter() - begin) * 1e6
            torch.cuda.synchronize()
            pauses[name] = int(max(protocol.pause_us, 2 * enqueue_us) * CYCLES_PER_US)
        rounds = [[name] * protocol.samples for name in functions]
        if protocol.interleaved:
            rounds = [[*functions] for _ in range(protocol.samples)]
        for turn in rounds:
            if protocol.interleaved:
                shuffle(turn)
            for name in turn:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                if protocol.l2_flush_bytes:
                    flush.zero_()
                if protocol.pause_us:
                    private.sleep(pauses[name])
                with no_waiting(device, name):
                    start.record()
                    functions[name]()
                    end.record()
                events[name].append((start, end))
            torch.cuda.synchronize()
    return {n: [s.elapsed_time(e) * 1e3 for s, e in pairs] for n, pairs in events.items()}


def burst_us(function: Callable[[], object], device: torch.device) -> float:
    """Measure the median device time of a few isolated calls in microseconds."""
    few = Protocol(warmup=2, samples=7)
    return statistics.median(sample_kernels({"": function}, device, few)[""])


def sample_calls(
    functions: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    in_a_row: int = 40,
    rounds: int = 25,
) -> dict[str, list[float]]:
    """Sample the host time from call to return, in microseconds, of consecutive calls; the device
    may still be busy with earlier ones.

    The functions take turns, `in_a_row` calls each, after a round that warms up. WaitsForDevice if
    a call waits for the device.
    """
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds + 1):
        for name, function in functions.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            with no_waiting(device, name):
                for _ in range(in_a_row):
                    begin = time.perf_counter()
                    function()
                    if turn:
                        samples[name].append((time.perf_counter() - begin) * 1e6)
    return samples


def _sample_on_host(
    functions: Mapping[str, Callable[[], object]],
    device: torch.device,
    protocol: Protocol = DEFAULT,
    *,
    to_completion: bool,
) -> dict[str, list[float]]:
    """Sample the host time in microseconds of calls on an idle device, until they return or
    complete. Of the protocol warmup, samples and l2_flush_bytes count.

    WaitsForDevice if a call waits before it returns."""
    flush = torch.empty(max(protocol.l2_flush_bytes, 1), dtype=torch.int8, device=device)
    samples: dict[str, list[float]] = {name: [] for name in functions}
    with torch.cuda.device(device):
        for function in functions.values():
            for _ in range(protocol.warmup):
                function()
        for _ in range(protocol.samples):
            for name, function in functions.items():
                flush.zero_()
                torch.cuda.synchronize()
                with no_waiting(device, name):
                    begin = time.perf_counter()
                    function()
                if to_completion:
                    torch.cuda.synchronize()
                samples[name].append((time.perf_counter() - begin) * 1e6)
    return samples


sample_ops = functools.partial(_sample_on_host, to_completion=True)
"""Scope "op": host time from call to completion."""
sample_hosts = functools.partial(_sample_on_host, to_completion=False)
"""Scope "host": host time from call to return."""


Limit = tuple[Ceiling, Callable[[], object]]
"""Pair of a ceiling without samples and the call to sample."""


def limits(device: torch.device) -> list[Limit]:
    """A bf16 matmul of 8192^3 on random data, and copies.

    The copies read one, two and three bytes for each byte they write, over tensors of 1 GiB: a
    kernel's memory floor is taken from the copy with its own mix.
    """
    size, length = 8192, 2**29
    make = torch.Generator(device=device).manual_seed(0)

    def random_tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make, dtype=torch.bfloat16, device=device)

    a, b = random_tensor(size, size), random_tensor(size, size)
    product = torch.empty_like(a)
    x, y, z = (random_tensor(length) for _ in range(3))
    out = torch.empty_like(x)
    copies: dict[str, Callable[[], object]] = {
        "copy": lambda: out.copy_(x),
        "add": lambda: torch.add(x, y, out=out),
        "addcmul": lambda: torch.addcmul(x, y, z, out=out),
    }
    matmul = Ceiling("matmul", "bf16 8192 x 8192 x 8192", flops=2 * size**3)
    pairs: list[Limit] = [(matmul, lambda: torch.mm(a, b, out=product))]
    for reads, (name, call) in enumerate(copies.items(), start=1):
        sizes = {"bytes_read": reads * out.nbytes, "bytes_written": out.nbytes}
        pairs.append((Ceiling("copy", f"{name} of 1 GiB bf16", **sizes), call))
    return pairs


def attention_copies(device: torch.device, *, length: int = 2**29) -> list[Limit]:
    """Copies with the read:write mixes of attention, by our own kernels: three tensors of `length`
    bf16 values read for one written, and four for three. The fastest of a mix is its ceiling."""
    from gdpa_lab.measuring.copies import copy

    x, y, z, w = (torch.randn(length, dtype=torch.bfloat16, device=device) for _ in range(4))
    outs = tuple(torch.empty_like(x) for _ in range(3))
    pairs: list[Limit] = []
    for reads, writes in (((x, y, z), outs[:1]), ((x, y, z, w), outs)):
        for block, warps in COPY_BLOCKS:
            mix = f"{len(reads)} : {len(writes)}"
            shape = f"{mix}, programs of {block}, {x.nbytes / 2**30:g} GiB bf16"
            size = {"bytes_read": len(reads) * x.nbytes, "bytes_written": len(writes) * x.nbytes}
            call = functools.partial(copy, reads, writes, block=block, num_warps=warps)
            pairs.append((Ceiling("copy", shape, **size), call))
    return pairs


def measure_ceilings(
    limits: Sequence[Limit], device: torch.device, protocol: Protocol = DEFAULT
) -> list[Ceiling]:
    """Measure the samples of `limits`."""
    functions = {ceiling.shape: call for ceiling, call in limits}
    samples = sample_kernels(functions, device, protocol)
    return [replace(ceiling, samples_us=tuple(samples[ceiling.shape])) for ceiling, _ in limits]
