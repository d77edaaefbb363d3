"""Compile what a launcher would launch, and read what the compiler made of it."""

from functools import cache

import torch
from triton.compiler import CompiledKernel

from gdpa_kernels.block_attention.batch import Batch
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import Launch, launches
from gdpa_lab.measuring.compile_check import Compiled, build_launch, read
from tests.block_attention.cases import Case, suited

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
def built(
    rung: str, dtype: torch.dtype = torch.bfloat16, turns: torch.dtype = torch.float32,
    capability: int = 90, config: object = None, **case,
) -> dict[str, CompiledKernel]:  # fmt: skip
    """The kernels of forward and backward by name, for tensors of 4 heads on the CPU.

    turns: the dtype of sin and cos, if there are any.
    """
    shape = suited(rung, Case("compiled", (64, 3), **{"num_heads": 4, "num_heads_k": 4, **case}))
    grad_out, *others = (t.cpu() for t in shape.tensors(dtype).values())
    options = shape.options()
    if options["rotary"] is not None:
        options["rotary"] = tuple(t.cpu().to(turns) for t in options["rotary"])
    module = ladder.rung(rung, "block_attention").module()
    given = {"config": config, "work_list": (torch.zeros(3, 2, dtype=torch.int32),)}

    batch = Batch(*others, **options)
    with launches(run=False) as seen:
        _, saved = module.forward(batch, **given)
        module.backward(grad_out, batch, saved, **given)

    return {launch.name: build_launch(launch, capability=capability) for launch in seen}


def compiled(*arguments, **options) -> dict[str, Compiled]:
    """What the compiler made of each of `built`."""
    return {name: read_once(each) for name, each in built(*arguments, **options).items()}
