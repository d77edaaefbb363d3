"""NVIDIA's compute-sanitizer on our kernels, on a GPU: the tools' side of what the emulator finds.

`findings` runs each tool on small ragged launches of each rung, in a process of its own:

    python -m tests.emulator.sanitizer v4_warp_specialized      # what is run under the tool

Racecheck reports accesses of shared memory that no barrier orders as it understands them. Kernels
with `tlx.async_tasks` hold such a pair that is not ours: one byte per warp that says which task the
warp is to take, written and read by code that the compiler adds and orders by barriers of its own.
`EMPTY`, a kernel whose tasks do nothing, shows it alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels import ladder
from gdpa_kernels.inputs import cu_seqlens

TOOLS = ("memcheck", "synccheck", "racecheck")
EMPTY = "empty_tasks"
LENGTHS_Q = (200, 0, 130, 65, 1)
LENGTHS_K = (300, 17, 200, 64, 0)
SHORT_K = (200, 17, 200, 64, 0)


@dataclass(frozen=True)
class Finding:
    """What one tool said of one kernel's launches.

    errors: of the tool's summary; for racecheck, pairs of racing accesses. elsewhere: those of them
    that are not at the first line of the kernel, to which the compiler's own code belongs.
    """

    impl: str
    tool: str
    errors: int
    warnings: int
    elsewhere: int


@triton.jit
def empty_tasks_kernel(x_ptr):
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tl.store(x_ptr, 0)
        with tlx.async_task(num_warps=4, replicate=2):
            tl.store(x_ptr + 1 + tlx.async_task_replica_id(), 1)


def launch(impl: str, device: torch.device) -> None:
    """Small ragged calls: long and short keys, two head dimensions, with and without a mask."""
    if impl == EMPTY:
        empty_tasks_kernel[(2,)](torch.zeros(4, dtype=torch.int32, device=device), num_warps=4)
        torch.cuda.synchronize(device)
        return
    module = ladder.rung(impl).module()
    generator = torch.Generator().manual_seed(0)

    def tokens(lengths: tuple[int, ...], head_dim: int) -> torch.Tensor:
        made = torch.randn(sum(lengths), 2, head_dim, generator=generator)
        return made.to(device, torch.bfloat16)

    options = {"activation": ("gelu_tanh",), "output_scale": 1.0, "window": None}
    for head_dim in (64, 128):
        for lengths_k, causal in ((LENGTHS_K, False), (LENGTHS_K, True), (SHORT_K, False)):
            module.forward(
                tokens(LENGTHS_Q, head_dim), tokens(lengths_k, head_dim),
                tokens(lengths_k, head_dim), cu_seqlens(list(LENGTHS_Q), device),
                cu_seqlens(list(lengths_k), device), max(LENGTHS_Q), max(lengths_k),
                scale=head_dim**-0.5, causal=causal, **options,
            )  # fmt: skip
    torch.cuda.synchronize(device)


def parse(impl: str, tool: str, text: str) -> Finding:
    """The summary of a tool's output. Raises ValueError if it has none, naming what it printed."""
    summary = re.search(
        r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)"
        r"|ERROR SUMMARY: (\d+) errors?",
        text,
    )
    if summary is None:
        raise ValueError(f"{tool} must print a summary, got {text[-300:]!r}")
    if summary.group(3) is not None:
        return Finding(impl, tool, int(summary.group(3)), 0, int(summary.group(3)))
    places = re.findall(r"Error: Race reported between .*? at \S+ in (\S+)", text)
    first = _first_line(impl)
    elsewhere = sum(place.rpartition(":")[2] != str(first) for place in places)
    missing = int(summary.group(1)) - len(places)
    return Finding(
        impl, tool, int(summary.group(1)), int(summary.group(2)), elsewhere + max(missing, 0)
    )


def _first_line(impl: str) -> int:
    """The line to which the compiler's own code of a kernel is attributed: that of its `def`."""
    from gdpa_kernels.compile_check import KERNELS

    if impl == EMPTY:
        return empty_tasks_kernel.starting_line_number + 1
    kernel = getattr(ladder.rung(impl).module(), KERNELS[impl])
    return kernel.starting_line_number + 1


def findings(impls: Iterable[str]) -> list[Finding]:
    """All tools on all of them; needs a GPU and compute-sanitizer."""
    jobs = []
    for impl in impls:
        for tool in TOOLS:
            command = [
                "compute-sanitizer", "--tool", tool, "--print-limit", "1000",
                "--kernel-regex", "kns=_kernel", sys.executable, "-m", __spec__.name, impl,
            ]  # fmt: skip
            jobs.append(
                (impl, tool, subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                    env=os.environ,
                ))
            )  # fmt: skip
    return [parse(impl, tool, job.communicate()[0]) for impl, tool, job in jobs]


if __name__ == "__main__":
    launch(sys.argv[1], torch.device("cuda"))
