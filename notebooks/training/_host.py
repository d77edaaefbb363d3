"""Host time of a call, measured in a process of its own.

    python -m notebooks.training._host --device cuda:0 gdpa-cross-full-512

prints rows of `COLUMNS` as JSON. Triton reads what makes its launches faster from the environment
when kernels are defined, so `measure` starts a process for each of `LAUNCHERS`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from gdpa_kernels import Lengths, block_attention, gdpa
from gdpa_lab.measuring import timing
from gdpa_lab.measuring.inputs import make_inputs
from gdpa_lab.measuring.workload import Workload
from gdpa_lab.measuring.workloads import workload

COLUMNS = ("workload", "call", "what", "median_us", "p20_us", "p80_us")
FORWARD, STEP = "forward", "forward + backward"
NEW, SHARED, GRAPH = "new offsets", "Lengths", "CUDA graph"
PARTS = ("until backward begins", "backward itself", "until backward returns")
LAUNCHERS = {
    "default": {},
    "C": {"TRITON_ENABLE_C_CACHE": "1", "TRITON_USE_C_DISPATCHER": "1"},
}
"""Environment variables of Triton's launchers: in Python, or in C where the kernel allows it."""


def measure(workloads: Sequence[str], device: torch.device | str, launcher: str) -> list[tuple]:
    """`rows` of each workload, from a new process. Raises CalledProcessError if it fails."""
    command = [sys.executable, "-m", __name__, "--device", str(device), *workloads]
    environment = os.environ | LAUNCHERS[launcher]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [tuple(row) for row in json.loads(done.stdout.splitlines()[-1])]


def rows(of: Workload, device: torch.device | str, **counts: int) -> list[tuple]:
    """Median, p20 and p80 in microseconds of calls of the workload's operator, of `exp` of its q,
    and of `interpret`, each by what it is given. `counts`: of `timing.sample_calls`."""
    device = torch.device(device)
    inputs = make_inputs(of, device=device)
    operator = block_attention if of.operator == "block_attention" else gdpa
    functions = {operator.__name__: operator, "exp": lambda q, **_: q.exp()}
    ways = {
        (call, what): way
        for call, function in functions.items()
        for what, way in calls(function, inputs).items()
    }
    ways["Python", "a loop"] = interpret
    samples = timing.sample_calls(ways, device, **counts)
    for call, function in functions.items():
        for part, times in parts(function, inputs).items():
            samples[call, part] = times
    lines = []
    for way, times in samples.items():
        percentiles = [sorted(times)[int(share * len(times))] for share in (0.5, 0.2, 0.8)]
        lines.append((of.name, *way, *percentiles))
    return lines


def batches(inputs, count: int = 1100) -> Iterator[dict]:
    """The arguments for ever shorter batches; offsets are trusted, since to check is to wait."""
    arguments = inputs.arguments()
    sizes = {name: len(arguments[name]) for name in "qkv"}
    sizes |= {"cu_seqlens": sizes["k"], "cu_seqlens_q": sizes["q"], "cu_seqlens_k": sizes["k"]}
    for n in range(1, count):
        shorter = {}
        for name, x in arguments.items():
            if name in "qkv":
                shorter[name] = x[: sizes[name] - n].detach().requires_grad_()
            elif name in sizes and x is not None:
                shorter[name] = x.clamp(max=sizes[name] - n)
        yield arguments | shorter | {"validate": False}


def forward(function: Callable, call: dict) -> torch.Tensor:
    """The output of a call, nothing kept for gradients."""
    with torch.no_grad():
        return function(**call)


def step(function: Callable, call: dict, grad_out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The gradients of q, k and v of a call."""
    out = function(**call)
    leaves = [call[name] for name in "qkv"]
    return torch.autograd.grad(out, leaves, grad_out[: len(out)], allow_unused=True)


def graph_of(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of a call."""
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        call()
    return graph


def calls(function: Callable, inputs) -> dict[str, Callable[[], object]]:
    """Calls of a function of an operator's arguments, by what they are given; each of those with
    new offsets takes a batch that no call has seen."""
    new = {what: list(batches(inputs)) for what in (FORWARD, STEP)}
    first, grad = new[FORWARD][0], inputs.grad_out
    shared = first | {x: Lengths(y) for x, y in first.items() if x.startswith("cu_seqlens")}
    ways = {
        f"{FORWARD}, {NEW}": lambda: forward(function, new[FORWARD].pop()),
        f"{FORWARD}, {SHARED}": lambda: forward(function, shared),
        f"{STEP}, {NEW}": lambda: step(function, new[STEP].pop(), grad),
        f"{STEP}, {SHARED}": lambda: step(function, shared, grad),
    }
    if grad.is_cuda:
        ways[f"{STEP}, {GRAPH}"] = graph_of(lambda: step(function, first, grad)).replay
    return ways


def parts(function: Callable, inputs, count: int = 400) -> dict[str, list[float]]:
    """Microseconds of the parts of autograd's backward: from the call to the first line of the
    operator's own, that one, and from its end to the return. On a GPU another thread runs it."""
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    marks: list[float] = []

    def mark(*_: object) -> None:
        marks.append(time.perf_counter())

    for number, call in enumerate(batches(inputs, count + 1)):
        out = function(**call)
        marks.clear()
        out.grad_fn.register_prehook(mark)
        out.grad_fn.register_hook(mark)
        leaves, grad = [call[name] for name in "qkv"], inputs.grad_out[: len(out)]
        mark()
        torch.autograd.grad(out, leaves, grad, allow_unused=True)
        mark()
        called, begun, ended, returned = sorted(marks)
        if number >= count // 10:
            for part, took in zip(
                PARTS, (begun - called, ended - begun, returned - ended), strict=True
            ):
                times[part].append(1e6 * took)
        if grad.is_cuda and number % 40 == 0:
            torch.cuda.synchronize()
    return times


class _Object:
    def __init__(self, value: int):
        self.value = value


def interpret() -> int:
    """200 small objects, made and read: the speed of this host's Python."""
    return sum(_Object(n).value for n in range(200))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("workloads", nargs="+")
    options = parser.parse_args()
    print(
        json.dumps(
            [row for name in options.workloads for row in rows(workload(name), options.device)]
        )
    )


if __name__ == "__main__":
    main()
