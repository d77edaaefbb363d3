"""Calls that are judged: inputs, launches and what they should give. The reader writes the kernel
and its constants alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType

import torch
import triton

from gdpa_kernels.calling.launch import launch
from gdpa_kernels.device.ragged import ragged_descriptor
from gdpa_kernels.gdpa import reference
from gdpa_kernels.gdpa.batch import Batch

Outputs = dict[str, torch.Tensor]

EDGES = (0, 1, 63, 64, 65, 127, 128, 129)
"""Lengths of sequences: none, one, and about the edges of tiles of 64 and 128."""


@dataclass(frozen=True)
class Case:
    """One call that is judged.

    what: its sizes, in words. call: module -> outputs. inputs: what it must not change. exact,
    baseline: the outputs in fp64, and as PyTorch computes them in the kernel's dtype. parts: rows
    of the outputs that belong together, each with its name. mistakes: what known ones would give.
    """

    what: str
    call: Callable[[ModuleType], Outputs]
    inputs: tuple[torch.Tensor, ...]
    exact: Callable[[], Outputs]
    baseline: Callable[[], Outputs]
    parts: Sequence[tuple[str, slice]] = ()
    mistakes: Mapping[str, Callable[[], Outputs]] = field(default_factory=dict)


def unwritten(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Memory for an output, of NaN, so that what a kernel leaves out shows."""
    return like.new_full(shape or like.shape, torch.nan)


def jagged(lengths: Sequence[int]) -> torch.Tensor:
    """Offsets of sequences, int32."""
    return torch.tensor([0, *lengths]).cumsum(0).int()


def rows_of(offsets: torch.Tensor) -> list[slice]:
    ends = offsets.tolist()
    return [slice(*pair) for pair in zip(ends[:-1], ends[1:], strict=True)]


def gdpa_batch(
    lengths_q: Sequence[int],
    lengths_k: Sequence[int] | None = None,
    *,
    heads: int = 1,
    head_dim: int = 64,
    activation: str = "gelu_tanh",
) -> Batch:
    lengths_k = lengths_q if lengths_k is None else lengths_k
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(sum(lengths), heads, head_dim, generator=generator).bfloat16()
        for lengths in (lengths_q, lengths_k, lengths_k)
    )
    offsets = jagged(lengths_q), jagged(lengths_k)
    return Batch(
        q, k, v, *offsets, max(lengths_q), max(lengths_k), (activation,), head_dim**-0.5
    )  # fmt: skip


def gdpa_case(
    batch: Batch,
    launched: Callable[[ModuleType, Batch, torch.Tensor], None],
    block_n: int = 0,
) -> Case:
    """The forward pass of a batch. launched: launches the kernel, which fills the output.
    block_n: keys of a block, of which mistakes at the last one are known."""

    def call(module: ModuleType) -> Outputs:
        out = unwritten(batch.q)
        launched(module, batch, out)
        return {"out": out}

    queries, keys = batch.cu_seqlens_q.diff().tolist(), batch.cu_seqlens_k.diff().tolist()
    pairs = [f"{a} rows x {b} keys" for a, b in zip(queries, keys, strict=True)]
    what = (
        pairs[0]
        if len(pairs) == 1
        else f"{len(pairs)} sequences of {min(queries)} to {max(queries)} rows"
    )
    mistakes = {
        "scale": lambda: _exact(replace(batch, scale=1.0)),
        "activation": lambda: _exact(replace(batch, activation=("identity",))),
        "v-is-k": lambda: _exact(replace(batch, v=batch.k)),
    }
    if block_n:
        whole = [n // block_n * block_n for n in keys]
        last = [max(0, (n - 1) // block_n * block_n) for n in keys]
        mistakes |= {
            "last-keys": lambda: _exact(_of_keys(batch, [0] * len(keys), whole)),
            "last-block-only": lambda: _exact(_of_keys(batch, last, keys)),
            "last-block-missing": lambda: _exact(_of_keys(batch, [0] * len(keys), last)),
        }
    return Case(
        what, call, (batch.q, batch.k, batch.v), lambda: _exact(batch),
        lambda: {"out": reference.forward_in_dtype(batch)},
        list(zip(pairs, rows_of(batch.cu_seqlens_q), strict=True)), mistakes,
    )  # fmt: skip


def _exact(batch: Batch) -> Outputs:
    return {"out": reference.forward(widened(batch))}


def widened(batch: Batch) -> Batch:
    """The same batch in fp64."""
    return replace(batch, **{name: getattr(batch, name).double() for name in "qkv"})


def _of_keys(batch: Batch, first: list[int], last: list[int]) -> Batch:
    """The batch with keys first .. last - 1 of each sequence alone."""
    starts = batch.cu_seqlens_k[:-1].tolist()
    ranges = [torch.arange(s + a, s + b) for s, a, b in zip(starts, first, last, strict=True)]
    index, lengths = torch.cat(ranges), [len(each) for each in ranges]
    return replace(batch, k=batch.k[index], v=batch.v[index], cu_seqlens_k=jagged(lengths))


def launch_tiled(module: ModuleType, batch: Batch, out: torch.Tensor) -> None:
    """A plain kernel on pointers, a program for BLOCK_M rows of a sequence and head."""
    blocks = triton.cdiv(batch.max_seqlen_q, module.BLOCK_M)
    launch(
        module.kernel, (blocks * batch.num_heads * batch.sequences,), batch.device,
        batch.q, batch.k, batch.v, out, batch.cu_seqlens_q, batch.cu_seqlens_k, blocks,
        batch.scale, HEADS=batch.num_heads, HEAD_DIM=batch.head_dim, BLOCK_M=module.BLOCK_M,
        BLOCK_N=module.BLOCK_N, num_warps=4, num_stages=2,
    )  # fmt: skip


def descriptors(
    module: ModuleType, batch: Batch, out: torch.Tensor, rows: int
) -> tuple[object, ...]:
    """Descriptors of Q, K, V and the output, of boxes of `rows` and BLOCK_N rows."""
    sizes = (batch.q, rows), (batch.k, module.BLOCK_N), (batch.v, module.BLOCK_N), (out, rows)
    return tuple(ragged_descriptor(*each) for each in sizes)


def launch_roles(
    module: ModuleType, batch: Batch, out: torch.Tensor, programs: int | None = None
) -> None:
    """A kernel of warp roles, a tile of 128 rows. programs: of a persistent one, which takes the
    number of all tiles besides."""
    tiles = triton.cdiv(batch.max_seqlen_q, 128)
    every = tiles * batch.num_heads * batch.sequences
    launch(
        module.kernel, (min(programs or every, every),), batch.device,
        *descriptors(module, batch, out, 64), batch.cu_seqlens_q, batch.cu_seqlens_k, tiles,
        *([every] if programs else []), batch.scale,
        HEADS=batch.num_heads, HEAD_DIM=batch.head_dim, BLOCK_N=module.BLOCK_N,
        STAGES=module.STAGES, REGISTERS=240, num_warps=4,
    )  # fmt: skip
