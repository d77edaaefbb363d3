"""Peers of block attention: softmax inside blocks, with rotary or without."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask

from gdpa_kernels.calling.lengths import Lengths
from gdpa_lab.measuring.baselines import flash, peer, torch_peers
from gdpa_lab.measuring.baselines.peer import Baseline, Call, needs_cuda
from gdpa_lab.measuring.inputs import BlockInputs
from gdpa_lab.measuring.workload import Workload


def with_rotary(workload: Workload, direction: str) -> str | None:
    return None if workload.rotary else "needs a workload with rotary"


def without_rotary(workload: Workload, direction: str) -> str | None:
    return "needs a workload without rotary" if workload.rotary else None


def _padded(
    inputs: BlockInputs, backend: Callable[[], contextlib.AbstractContextManager[None]]
) -> Callable[..., torch.Tensor]:
    """Pad blocks to [blocks, block_size] and call PyTorch's attention with a key mask. Token
    indices of the blocks are computed once; each call copies to the padded tensors and back."""
    from gdpa_kernels.block_attention import reference

    workload, factor = inputs.workload, inputs.scale()
    tokens = reference.tokens_of_blocks(inputs.cu_seqlens, workload.block_size)
    exists = tokens >= 0
    mask = exists[:, None, None, :].expand(-1, 1, workload.block_size, -1)
    gather, scatter = tokens.clamp(min=0).flatten(), exists.flatten().nonzero()[:, 0]

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if inputs.rotary is not None:
            q, k = (reference.rotate(x, *inputs.rotary) for x in (q, k))
            v = reference.rotate(v, *inputs.rotary) if workload.rotate_v else v
        q, k, v = (
            x.index_select(0, gather).unflatten(0, tokens.shape).transpose(1, 2) for x in (q, k, v)
        )
        with backend():
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=factor, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out.transpose(1, 2).flatten(0, 1).index_select(0, scatter)

    return function


def compiled_blocks(inputs: BlockInputs, direction: str) -> Call:
    function = _padded(inputs, contextlib.nullcontext)
    function = peer.by_inductor(function)
    return torch_peers.compiled(function, inputs, direction)


def cudnn_padded(inputs: BlockInputs, direction: str) -> Call:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    function = _padded(inputs, lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION))
    return peer.differentiate(function, inputs, direction)


def block_mask(inputs: BlockInputs, tile: int) -> BlockMask:
    """Make FlexAttention's mask of attention inside blocks, on the packed tokens: for each `tile`
    of queries the tiles with keys of their blocks, which a mask by token cuts down. The mask is
    symmetric. Nothing of the size of tokens times tokens is made."""
    ends, total = peer.block_offsets(inputs), inputs.workload.total_q
    blocks = torch.arange(len(ends) - 1, device=ends.device)
    block = blocks.repeat_interleave(ends.diff(), output_size=total)  # of each token
    first_token = torch.arange(0, total, tile, device=ends.device)
    last_token = (first_token + tile - 1).clamp(max=total - 1)
    first = ends[block[first_token]] // tile
    last = (ends[block[last_token] + 1] - 1) // tile
    count = (last - first + 1).int()[None, None]
    most = 1 + 2 * -(-(inputs.workload.block_size - 1) // tile)  # known without the device
    columns = torch.arange(most, device=ends.device)
    indices = (first[:, None] + columns).clamp(max=len(first) - 1).int()[None, None]

    def same_block(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return block[query] == block[key]

    return BlockMask(
        seq_lengths=(total, total), kv_num_blocks=count, kv_indices=indices,
        full_kv_num_blocks=None, full_kv_indices=None, q_num_blocks=count, q_indices=indices,
        full_q_num_blocks=None, full_q_indices=None, BLOCK_SIZE=(tile, tile), mask_mod=same_block,
    )  # fmt: skip


def flex_blocks(
    inputs: BlockInputs, direction: str, tile: int = 128, max_autotune: bool = False
) -> Call:
    """Call FlexAttention on the packed tokens with `block_mask`. Its kernel's tiles must divide
    those of the mask: TorchInductor's own are of 128 tokens, and with `max_autotune` it looks for
    the fastest that fit."""
    mask, heads = block_mask(inputs, tile), torch_peers.grouped(inputs.q, inputs.k)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        out = flex_attention.flex_attention(q, k, v, block_mask=mask, scale=inputs.scale(), **heads)
        return out[0].transpose(0, 1).reshape(inputs.q.shape)

    attention = peer.by_inductor(attention, max_autotune=max_autotune)
    return torch_peers.compiled(attention, inputs, direction)


def flex_configurations(direction: str) -> peer.Configurations:
    return {
        "tiles of 128": {"tile": 128},
        "tiles of 64, tuned": {"tile": 64, "max_autotune": True},
    }


def _unturned(inputs: BlockInputs, attention: str) -> dict[str, object]:
    """Build the arguments of our attention without rotary. Offsets are checked here, not in each
    call; `attention` is its `impl`."""
    arguments = inputs.arguments() | {"rotary": None, "rotate_v": False, "impl": attention}
    return arguments | {"cu_seqlens": Lengths(inputs.cu_seqlens)}


def eager_rotary(inputs: BlockInputs, direction: str, attention: str = "auto") -> Call:
    """Apply rotary in PyTorch, operation by operation and differentiated by autograd, around our
    attention without it; `attention` is its `impl`."""
    from gdpa_kernels.block_attention import reference
    from gdpa_kernels.block_attention.api import block_attention

    turns, rotate_v = inputs.rotary, inputs.workload.rotate_v
    arguments = _unturned(inputs, attention)

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k = reference.rotate(q, *turns), reference.rotate(k, *turns)
        v = reference.rotate(v, *turns) if rotate_v else v
        return block_attention(**arguments | {"q": q, "k": k, "v": v})

    return peer.differentiate(function, inputs, direction)


def rotary_kernel(inputs: BlockInputs, direction: str, attention: str = "auto") -> Call:
    """Run our rotary kernel, which moves every byte once, and our attention without rotary;
    `attention` is its `impl`."""
    from gdpa_kernels.block_attention.api import block_attention
    from gdpa_kernels.block_attention.rotary import rotary

    turns, rotate_v = inputs.rotary, inputs.workload.rotate_v
    arguments = _unturned(inputs, attention)

    def turned(q, k, v, **options) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, turned_v = rotary(q, k, v if rotate_v else None, turns, **options)
        return q, k, turned_v if rotate_v else v

    if direction == "forward":

        @torch.no_grad()
        def forward() -> torch.Tensor:
            q, k, v = turned(inputs.q, inputs.k, inputs.v)
            return block_attention(**arguments | {"q": q, "k": k, "v": v})

        return forward
    leaves = [x.requires_grad_() for x in turned(inputs.q, inputs.k, inputs.v.detach())]
    out = block_attention(**arguments | dict(zip("qkv", leaves, strict=True)))

    def backward() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gradients = torch.autograd.grad(out, leaves, inputs.grad_out, retain_graph=True)
        return turned(*gradients, transposed=True, in_place=True)

    return backward


def _of_blocks(impl: str) -> Baseline:
    """Adapt a peer of GDPA: every block is a sequence of its own."""
    ragged = next(x for x in (*torch_peers.PEERS, *flash.PEERS) if x.impl == impl)
    title = f"{ragged.title}, a sequence per block"
    return replace(ragged, title=title, lacks=without_rotary, metadata=peer.block_offsets)


PEERS = (
    *map(_of_blocks, ("fa2_varlen", "cudnn_varlen", "fa3")),
    Baseline(
        "cudnn", "cuDNN, padded blocks", "softmax", needs_cuda, cudnn_padded, without_rotary
    ),
    Baseline(
        "torch_compile", "torch.compile, padded blocks", "softmax", needs_cuda, compiled_blocks
    ),
    Baseline(
        "flex", "FlexAttention, mask of blocks", "softmax", needs_cuda, flex_blocks, without_rotary,
        configurations=flex_configurations, metadata=functools.partial(block_mask, tile=128),
    ),
    Baseline(
        "eager_rotary", "eager rotary, then our attention", "softmax", needs_cuda, eager_rotary,
        with_rotary,
    ),
    Baseline(
        "rotary_kernel", "our rotary kernel, then our attention", "softmax", needs_cuda,
        rotary_kernel, with_rotary,
    ),
)  # fmt: skip
