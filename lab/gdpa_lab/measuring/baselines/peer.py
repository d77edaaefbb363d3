"""The interface of a peer: a call behind one signature, what it needs, and how to install it."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import triton

from gdpa_kernels.calling.ladder import Availability
from gdpa_lab.measuring import private
from gdpa_lab.measuring.inputs import BlockInputs, Inputs
from gdpa_lab.measuring.workload import STEP, Workload

Call = Callable[[], object]
Results = tuple[torch.Tensor, ...]
Problem = Callable[[Workload, str], str | None]
"""Function of a workload and a direction: what they lack for a peer, or None."""
Configurations = Mapping[str, Mapping[str, object]]
"""Options of `Baseline.prepare` by the name of what they make."""


class Unsupported(Exception):
    """Raised for a workload that a baseline cannot compute; the text says what is missing."""


def takes_all(workload: Workload, direction: str) -> str | None:
    """Accept every workload."""
    return None


def one_configuration(direction: str) -> Configurations:
    """Leave a peer as it comes."""
    return {"default": {}}


@dataclass(frozen=True)
class Baseline:
    """A peer of GDPA or of block attention, forward or backward.

    `prepare(inputs, direction="forward", **options)` does what its layout needs, untimed, and
    returns the call to be timed, which must not wait for the device; `direction` as for
    `differentiate`. `math`: "activation", the same function as ours, or "softmax". `needs`: what
    this machine lacks, or None; `lacks`: what a workload lacks, targets aside; `install`: how to
    get it, in a sentence; `source`: where its code is. `metadata`, where there is any, makes on the
    device the offsets or the mask that the call needs. `checked`, where there is any, makes of
    (inputs, results) what is checked, where the inputs were changed for the peer. `takes_targets`:
    whether it computes batches with targets. `configurations` of a direction are all that are tried
    on a batch; the fastest that passes the check is timed, and the `config` of its row holds them
    all. Options of a call rule them out.
    """

    impl: str
    title: str
    math: str
    needs: Callable[[], str | None]
    prepare: Callable[..., Call]
    lacks: Problem = takes_all
    install: str = ""
    source: str = ""
    metadata: Callable[[BlockInputs], object] | None = None
    checked: Callable[[Inputs, Results], Results] = lambda inputs, results: results
    takes_targets: bool = False
    configurations: Callable[[str], Configurations] = one_configuration

    def problem(self, workload: Workload, direction: str) -> str | None:
        """Return what the workload lacks for the peer in `direction`, or None."""
        if workload.target_share and not self.takes_targets:
            return "needs a batch without targets"
        return self.lacks(workload, direction)

    def availability(self) -> Availability:
        """Return whether this machine has what the peer needs, or how to get it."""
        problem = self.needs()
        if problem is not None and self.install:
            problem = f"{problem}: {self.install}"
        return Availability(problem is None, problem or "runs on cuda:0")

    def call(self, inputs: Inputs | BlockInputs, direction: str, **options: object) -> Call:
        """Call `prepare`, or raise Unsupported if this machine or the workload lacks something."""
        available = self.availability()
        lacks = self.problem(inputs.workload, direction) if available.ok else available.reason
        if lacks is not None:
            raise Unsupported(lacks)
        return self.prepare(inputs, direction, **options)


def differentiate(
    function: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    inputs: Inputs | BlockInputs,
    direction: str,
) -> Call:
    """Build the call of a direction: `function` of q, k and v without gradients; its backward
    alone, by autograd; or for `STEP` both in one call."""
    tensors = inputs.q, inputs.k, inputs.v
    if direction == "forward":

        def call() -> torch.Tensor:
            with torch.no_grad():
                return function(*tensors)

        return call

    def leaves() -> tuple[torch.Tensor, ...]:
        return tuple(tensor.detach().requires_grad_() for tensor in tensors)

    def step() -> tuple[torch.Tensor, ...]:
        qkv = leaves()
        return torch.autograd.grad(function(*qkv), qkv, inputs.grad_out)

    if direction == STEP:
        return step
    qkv = leaves()
    out = function(*qkv)
    return lambda: torch.autograd.grad(out, qkv, inputs.grad_out, retain_graph=True)


def by_inductor(
    function: Callable[..., torch.Tensor], **options: object
) -> Callable[..., torch.Tensor]:
    """Compile a function with TorchInductor, with its `options`, and leave other kernels of this
    process their assembler: TorchInductor sends all of Triton to PyTorch's ptxas without
    TRITON_PTXAS_PATH."""
    os.environ.setdefault("TRITON_PTXAS_PATH", triton.knobs.nvidia.ptxas.path)
    private.compile_every_workload()
    return torch.compile(function, dynamic=False, options={"compile_threads": 1, **options})


def block_offsets(inputs: BlockInputs) -> torch.Tensor:
    """Compute offsets with every block as its own sequence: int32 `[blocks + 1]`, on the device.

    The host knows the number of blocks from the workload, so nothing waits for the device.
    """
    ends, size, count = inputs.cu_seqlens, inputs.workload.block_size, inputs.workload.blocks
    blocks = (ends.diff() + (size - 1)) // size
    first_block = blocks.cumsum(0) - blocks
    start = (ends[:-1] - first_block * size).repeat_interleave(blocks, output_size=count)
    start += torch.arange(0, count * size, size, device=ends.device)
    return torch.cat((start, ends[-1:])).int()


def ragged(inputs: Inputs | BlockInputs) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Return offsets of queries and keys and the longest of each; every block is a sequence."""
    if isinstance(inputs, BlockInputs):
        offsets, longest = block_offsets(inputs), inputs.workload.block_size
        return offsets, offsets, longest, longest
    return inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.max_seqlen_q, inputs.max_seqlen_k


def ragged_options(inputs: Inputs | BlockInputs) -> dict[str, torch.Tensor | int]:
    """Name the values of `ragged` as FlashAttention and its successors do."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return dict(zip(names, ragged(inputs), strict=True))


def window_size(workload: Workload) -> tuple[int, int]:
    """Number of keys visible before and after a query, -1 for all."""
    side = -1 if workload.window is None else workload.window
    return side, 0 if workload.causal else side


def needs_cuda() -> str | None:
    return None if torch.cuda.is_available() else "needs a CUDA device; this machine has none"


def is_importable(module: str) -> bool:
    """Return whether a module can be found; its parent packages are imported, the module is not."""
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def needs_module(module: str, what: str) -> Callable[[], str | None]:
    """Build a `needs`: a CUDA device and `module`, which is part of `what`."""

    def needs() -> str | None:
        return needs_cuda() if is_importable(module) else f"needs {what}, which is not installed"

    return needs


def one_length(workload: Workload, direction: str) -> str | None:
    """Report, as a `problem`, sequences of different lengths."""
    jagged = any(len({*x}) != 1 for x in (workload.seqlens_q, workload.seqlens_k))
    return "needs sequences of one length, got a jagged batch" if jagged else None


def no_window(workload: Workload, direction: str) -> str | None:
    """Report, as a `problem`, a window."""
    window = workload.window
    return None if window is None else f"needs a batch without a window, got window={window}"


def own_q(workload: Workload, direction: str) -> str | None:
    """Report, as a `problem`, a q that the batch shares."""
    return "needs a q of its own for each sequence" if workload.shared_q else None


def both(*problems: Problem) -> Problem:
    """Combine several `problem` functions; the first reason counts."""

    def problem(workload: Workload, direction: str) -> str | None:
        reasons = (each(workload, direction) for each in problems)
        return next((text for text in reasons if text is not None), None)

    return problem


dense_only = both(one_length, no_window)


def dense(inputs: Inputs) -> tuple[int, int]:
    """Shape [batch, length] for `unflatten`."""
    return len(inputs.workload.seqlens_q), -1
