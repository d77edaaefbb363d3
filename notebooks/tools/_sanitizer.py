"""NVIDIA's compute-sanitizer on our kernels, on a GPU: the tools' side of what the emulator finds.

`findings` runs each tool on small ragged calls of each rung, in a process of its own:

    python -m notebooks.tools._sanitizer v4_warp_specialized      # what is run under the tool

Racecheck reports accesses of shared memory that no barrier orders as it understands them. Kernels
with `tlx.async_tasks` hold such a pair that is not ours: one byte per warp that says which task the
warp is to take, written and read by code that the compiler adds and orders by barriers of its own.
Two controls hold that byte and next to nothing else: the tasks of `EMPTY` do not wait for each
other, those of `WAITING` do, on an mbarrier.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx

from gdpa_kernels import Mask
from gdpa_kernels.block_attention import batch as block_batch
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.rung import Rung
from gdpa_kernels.gdpa import batch as gdpa_batch
from gdpa_lab.measuring.inputs import cu_seqlens

TOOLS = ("memcheck", "synccheck", "racecheck")
RETURNED = "calls that returned: "  # what the program under the tool says at its end
LONGEST_S = 300.0  # of one tool on one kernel's calls
AT_ONCE = 12  # programs beside each other: each holds a context, and gigabytes of memory
EMPTY = "empty_tasks"
WAITING = "waiting_tasks"
LENGTHS_Q = (200, 0, 130, 65, 1)
LENGTHS_K = (300, 17, 200, 64, 0)
SHORT_K = (200, 17, 200, 64, 0)
FEW_K = (100, 17, 128, 64, 0)
HEAD_DIMS = (64, 128)
WIDE = 256


@dataclass(frozen=True)
class Finding:
    """Findings of one tool on one kernel's launches.

    calls: how many of `calls` returned, all of them. errors: of the tool's summary; for racecheck,
    pairs of racing accesses. elsewhere: those of them that are not at the first line of a kernel
    with tasks, to which the compiler's own code belongs.
    failure: why there are no numbers, which are None then; else None.
    """

    impl: str
    tool: str
    calls: int | None
    errors: int | None
    warnings: int | None
    elsewhere: int | None
    failure: str | None = None


@triton.jit
def empty_tasks_kernel(x_ptr):
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tl.store(x_ptr, 0)
        with tlx.async_task(num_warps=4, replicate=2):
            tl.store(x_ptr + 1 + tlx.async_task_replica_id(), 1)


@triton.jit
def waiting_tasks_kernel(x_ptr):
    ready = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tl.store(x_ptr, 0)
            tlx.barrier_arrive(ready[0])
        with tlx.async_task(num_warps=4, registers=232, replicate=2):
            tlx.barrier_wait(ready[0], 0)
            tl.store(x_ptr + 1 + tlx.async_task_replica_id(), 1)


CONTROLS = {EMPTY: empty_tasks_kernel, WAITING: waiting_tasks_kernel}


def rungs() -> list[str]:
    """The rungs of all ladders that have kernels."""
    return [
        rung.impl
        for ladder_rungs in ladder.LADDERS.values()
        for rung in ladder_rungs
        if rung.requires.capability is not None
    ]


def rung_of(impl: str) -> Rung:
    """The rung of that name, on whichever ladder. Raises ValueError unless it has kernels."""
    if impl not in rungs():
        known = ", ".join((*CONTROLS, *rungs()))
        raise ValueError(
            f"impl must be a control or a rung that is a kernel: {known}; got {impl!r}"
        )
    return next(rung for each in ladder.LADDERS.values() for rung in each if rung.impl == impl)


def launch(impl: str, device: torch.device) -> int:
    """All of `calls`, and their number."""
    launched = calls(impl, device)
    for call in launched:
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return len(launched)


def calls(impl: str, device: torch.device) -> list[Callable[[], object]]:
    """Small ragged calls of a rung that it supports, or the one of a control.

    Two head dimensions; for GDPA long and short keys, with and without a mask; for block attention
    forward and then backward, without rotary, and with it for q, k and v.
    """
    if impl in CONTROLS:
        x = torch.zeros(4, dtype=torch.int32, device=device)
        return [partial(CONTROLS[impl][(2,)], x, num_warps=4)]
    rung = rung_of(impl)
    make = torch.Generator().manual_seed(0)
    if rung.operator == "block_attention":
        return _block_calls(rung, device, make)
    return _gdpa_calls(rung, device, make)


def _tokens(
    lengths: tuple[int, ...], head_dim: int, device: torch.device, make: torch.Generator
) -> torch.Tensor:
    """N(0, 1) for two heads, bf16."""
    return torch.randn(sum(lengths), 2, head_dim, generator=make).to(device, torch.bfloat16)


def _gdpa_calls(
    rung: Rung, device: torch.device, make: torch.Generator
) -> list[Callable[[], object]]:
    backward, module, listed = "backward" in rung.directions, rung.module(), []
    kinds = [(LENGTHS_K, False), (LENGTHS_K, True), (SHORT_K, False)]
    if backward:
        kinds += [(SHORT_K, True), (FEW_K, False)]
    for head_dim, (lengths_k, causal) in product((*HEAD_DIMS, WIDE), kinds):
        q = _tokens(LENGTHS_Q, head_dim, device, make)
        k, v = (_tokens(lengths_k, head_dim, device, make) for _ in range(2))
        ends = (cu_seqlens(list(each), device) for each in (LENGTHS_Q, lengths_k))
        batch = gdpa_batch.Batch(
            q, k, v, *ends, max(LENGTHS_Q), max(lengths_k), ("gelu_tanh",), head_dim**-0.5,
            mask=Mask(causal),
        )  # fmt: skip
        if rung.call_problem(batch) is not None:
            continue
        if backward:
            grad_out = _tokens(LENGTHS_Q, head_dim, device, make)
            listed.append(partial(module.backward, grad_out, batch))
        else:
            listed.append(partial(module.forward, batch))
    return listed


def _block_calls(
    rung: Rung, device: torch.device, make: torch.Generator
) -> list[Callable[[], object]]:
    ends, listed = cu_seqlens(list(LENGTHS_Q), device), []
    for head_dim, turned in product(HEAD_DIMS, (False, True)):
        grad_out, q, k, v = (_tokens(LENGTHS_Q, head_dim, device, make) for _ in range(4))
        rotary = None
        if turned:
            angles = torch.randn(sum(LENGTHS_Q), head_dim // 2, generator=make).to(device)
            rotary = (angles.sin(), angles.cos())
        batch = block_batch.Batch(q, k, v, ends, head_dim**-0.5, rotary=rotary, rotate_v=turned)
        if rung.call_problem(batch) is None:
            listed.append(partial(_both, rung, grad_out, batch))
    return listed


def _both(rung: Rung, grad_out: torch.Tensor, batch: block_batch.Batch) -> None:
    """Forward, then backward with what forward saved."""
    module = rung.module()
    _, saved = module.forward(batch)
    module.backward(grad_out, batch, saved)


def parse(impl: str, tool: str, text: str) -> Finding:
    """The summary of a tool's output.

    Raises ValueError if it has none, or if the calls did not return: a tool sums up all the same.
    """
    summary = re.search(
        r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)"
        r"|ERROR SUMMARY: (\d+) errors?",
        text,
    )
    if summary is None:
        raise ValueError(f"{tool} of {impl} must print a summary, got {text[-300:]!r}")
    returned = re.search(rf"{RETURNED}(\d+)", text)
    if returned is None:
        raise ValueError(f"the calls of {impl} under {tool} must return, got {text[-300:]!r}")
    calls_returned = int(returned.group(1))
    if summary.group(3) is not None:
        return Finding(impl, tool, calls_returned, int(summary.group(3)), 0, int(summary.group(3)))
    errors, first, regions = int(summary.group(1)), set(), set()
    for kernel in kernels_with_tasks(impl):
        first.add(_place(kernel, kernel.def_file_line_number))
        regions |= {
            _place(kernel, kernel.starting_line_number + i)
            for i, line in enumerate(kernel.raw_src)
            if "tlx.async_tasks()" in line
        }
    of_compiler = 0
    for report in re.findall(r"Error: Race reported between (.*(?:\n=+ +and .*)*)", text):
        first_access, *others = (
            Path(location).name for location in re.findall(r"access at \S+(?: in (\S+))?", report)
        )
        of_compiler += first_access in first and first | regions >= set(others)
    return Finding(
        impl, tool, calls_returned, errors, int(summary.group(2)), max(errors - of_compiler, 0)
    )


def kernels_with_tasks(impl: str) -> list[triton.JITFunction]:
    """The kernels with `tlx.async_tasks` in a rung's file, or the one of a control.

    The compiler's own code in a kernel is attributed to the line of its `def`; the store that
    starts the tasks, to the line of `with tlx.async_tasks()`.
    """
    if impl in CONTROLS:
        return [CONTROLS[impl]]
    module = rung_of(impl).module()
    return [
        kernel
        for kernel in vars(module).values()
        if isinstance(kernel, triton.JITFunction)
        and kernel.fn.__module__ == module.__name__
        and any("tlx.async_tasks()" in line for line in kernel.raw_src)
    ]


def _place(kernel: triton.JITFunction, line: int) -> str:
    """Name a line of the kernel's file as the tools do."""
    return f"{Path(kernel.fn.__code__.co_filename).name}:{line}"


def newest_first(impls: Iterable[str]) -> list[str]:
    """Kernels with tasks before the others, and in both the last of `impls` first."""
    return sorted(impls, key=lambda impl: bool(kernels_with_tasks(impl)))[::-1]


def findings(impls: Iterable[str], *, seconds: float = math.inf) -> list[Finding]:
    """All tools on all of them; needs a GPU and compute-sanitizer.

    Racecheck comes first, and the tools take `impls` in their order: begin with what matters most.
    After `seconds` no program begins and none goes on; the findings that are missing say so.
    """
    impls, deadline = list(impls), time.monotonic() + seconds
    jobs = [(impl, tool) for tool in reversed(TOOLS) for impl in impls]  # the first fills the cache
    with ThreadPoolExecutor(min(AT_ONCE, len(os.sched_getaffinity(0)))) as pool:
        said = dict(zip(jobs, pool.map(lambda job: _finding(*job, deadline), jobs), strict=True))
    return [said[impl, tool] for impl in impls for tool in TOOLS]


def _finding(impl: str, tool: str, deadline: float) -> Finding:
    """Run a tool on the calls of one rung or control: what it says, or why it says nothing."""
    left = deadline - time.monotonic()
    try:
        if left <= 0:
            raise TimeoutError("not begun: the time was up")
        return parse(impl, tool, _output(_command(impl, tool), min(LONGEST_S, left)))
    except (TimeoutError, ValueError) as error:
        return Finding(impl, tool, None, None, None, None, str(error))


def _command(impl: str, tool: str) -> list[str]:
    return [
        "compute-sanitizer", "--tool", tool, "--print-limit", "1000",
        "--kernel-regex", "kns=_kernel", sys.executable, "-m", __spec__.name, impl,
    ]  # fmt: skip


def _output(command: list[str], seconds: float) -> str:
    """Run a command and return what it prints. Raises TimeoutError if it takes longer; it is ended
    then, and so is every process that it started."""
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        program = subprocess.Popen(
            command, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            program.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it
                program.wait(5)
            raise TimeoutError(f"did not end within {seconds:.0f} s") from None
        printed.seek(0)
        return printed.read()


if __name__ == "__main__":
    print(f"{RETURNED}{launch(sys.argv[1], torch.device('cuda'))}", flush=True)
