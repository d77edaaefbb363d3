"""Compile for sm_90a what a launcher would launch, and read what the compiler made of it."""

from __future__ import annotations

from functools import cache

import torch
from triton.compiler import CompiledKernel

from _lib.compile_check import Compiled, build_launch, read
from gdpa_kernels.block_attention.batch import Batch
from gdpa_kernels.calling.launches import Launch, launches
from tests.block_attention.cases import RUNGS, Case, suited

_READ: dict[str, Compiled] = {}


def compile_launch(launch: Launch) -> Compiled:
    """One launch compiled for sm_90a; tensors are taken to be aligned to 16 bytes."""
    return read_once(build_launch(launch))


def read_once(built: CompiledKernel) -> Compiled:
    """`read`, which runs ptxas, once for every kernel, however a test asks for it."""
    if built.hash not in _READ:
        _READ[built.hash] = read(built)
    return _READ[built.hash]


@cache
def compiled(
    rung: str,
    dtype: torch.dtype = torch.bfloat16,
    turns: torch.dtype = torch.float32,
    **case,
) -> dict[str, Compiled]:
    """The kernels of forward and backward by name, for tensors of 4 heads on the CPU.

    turns: the dtype of sin and cos, if there are any.
    """
    shape = suited(rung, Case("compiled", (64, 3), **{"num_heads": 4, "num_heads_k": 4, **case}))
    grad_out, *others = (t.cpu() for t in shape.tensors(dtype).values())
    options = shape.options()
    if options["rotary"] is not None:
        options["rotary"] = tuple(t.cpu().to(turns) for t in options["rotary"])
    blocks = (torch.zeros(3, 2, dtype=torch.int32),)

    batch = Batch(*others, **options)
    with launches(run=False) as seen:
        _, saved = RUNGS[rung].forward(batch, schedule=blocks)
        RUNGS[rung].backward(grad_out, batch, saved, schedule=blocks)

    return {launch.name: compile_launch(launch) for launch in seen}
