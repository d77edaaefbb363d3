"""Every kernel of the ladders through one call, so that a new rung joins by itself."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from gdpa_kernels.block_attention import batch as block
from gdpa_kernels.block_attention import reference as block_reference
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import Launch, launches
from gdpa_kernels.calling.rung import Rung
from gdpa_kernels.gdpa import reference
from gdpa_kernels.gdpa.batch import Batch
from gdpa_lab.measuring.inputs import cu_seqlens
from tests.calls import emulated

KERNELS = [rung for rungs in ladder.LADDERS.values() for rung in rungs if rung.requires.capability]
Tensors = Sequence[torch.Tensor]


def batch_of(rung: Rung, qkv: Tensors, turns: Tensors | None, lengths: Sequence[int]):
    """The arguments of a call on sequences of these lengths, for its `module()`."""
    ends, most, scale = cu_seqlens(lengths, qkv[0].device), max(lengths), qkv[0].shape[2] ** -0.5
    if rung.operator == "block_attention":
        return block.Batch(*qkv, ends, scale, rotary=turns)
    return Batch(*qkv, ends, ends, most, most, ("silu",), scale)


def head_dim_of(rung: Rung) -> int:
    """The least of 32, 64, ... that a rung takes."""
    with emulated(rung.impl):
        for head_dim in (32, 64, 128, 256):
            x = torch.zeros(1, 1, head_dim, dtype=torch.bfloat16)
            for turns in (None, tuple(torch.zeros(2, 1, head_dim // 2))):
                if rung.call_problem(batch_of(rung, (x, x, x), turns, (1,))) is None:
                    return head_dim
    raise ValueError(f"rung must take a head_dim of 32, 64, 128 or 256, got {rung.impl}")


def takes_turns(rung: Rung) -> bool:
    """Whether it takes rotary, which it then may need."""
    if rung.operator != "block_attention":
        return False
    x, turns = torch.zeros(1, 1, 64, dtype=torch.bfloat16), tuple(torch.zeros(2, 1, 32))
    with emulated(rung.impl):
        return rung.call_problem(batch_of(rung, (x, x, x), turns, (1,))) is None


def results(rung: Rung, batch, grad: torch.Tensor, module=None) -> tuple[torch.Tensor, ...]:
    """What a rung computes: out, (dq, dk, dv), or all of them. module: in place of its own."""
    module = module or rung.module()
    if rung.directions == ("forward",):
        return (module.forward(batch),)
    if rung.directions == ("backward",):
        return module.backward(grad, batch)
    out, saved = module.forward(batch)
    return out, *module.backward(grad, batch, saved)


def defined(rung: Rung, batch, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`results` of the definition."""
    of_blocks = rung.operator == "block_attention"
    return results(rung, batch, grad, block_reference if of_blocks else reference)


def launched(
    rung: Rung, head_dim: int, dtype=torch.bfloat16, block_size: int = 64, turned: bool = False
) -> list[Launch]:
    """What forward, backward or both of a rung launch on 130 tokens with 4 heads; nothing runs.

    turned: of blocks, with rotary of q, k and v.
    """
    x = torch.zeros(130, 4, head_dim, dtype=dtype)
    turns = (torch.zeros(130, head_dim // 2),) * 2 if turned else None
    batch = batch_of(rung, (x, x, x), turns, (130,))
    module = rung.module()
    with launches(run=False) as seen:
        if rung.operator == "block_attention":
            batch = replace(batch, block_size=block_size, rotate_v=turned)
            blocks = (torch.zeros(3, 2, dtype=torch.int32),)
            _, saved = module.forward(batch, work_list=blocks)
            module.backward(x, batch, saved, work_list=blocks)
        else:
            results(rung, batch, x)
    return seen
