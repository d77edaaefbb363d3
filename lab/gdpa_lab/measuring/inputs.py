"""Inputs: the seeded tensors of a workload."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from gdpa_kernels.block_attention import batch as block_batch
from gdpa_kernels.gdpa import batch as gdpa_batch
from gdpa_lab.measuring.workload import Workload

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_TENSORS = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_OPTIONS = ("activation", "scale", "output_scale", "causal", "window")
_BLOCK_TENSORS = ("q", "k", "v", "cu_seqlens", "rotary")
_BLOCK_OPTIONS = ("block_size", "scale", "rotate_v")


@dataclass(frozen=True)
class Inputs:
    """Tensors of one workload on one device.

    q [rows_q, num_heads_q, head_dim], k and v [total_k, num_heads_k, head_dim] and the gradient of
    the output, grad_out [total_q, num_heads_q, head_dim], in the workload's dtype; cu_seqlens_q
    (None when q is shared) and cu_seqlens_k int32 [batch + 1].
    """

    workload: Workload
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    grad_out: torch.Tensor

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `gdpa`, options of the workload included; `impl` and `backward_impl`
        are left out."""
        return {name: getattr(self, name) for name in _TENSORS} | {
            name: getattr(self.workload, name) for name in _OPTIONS
        }

    def batch(self) -> gdpa_batch.Batch:
        """What a rung takes."""
        name = self.workload.activation
        names = (name,) if isinstance(name, str) else tuple(name)
        given = self.arguments() | {"activation": names, "scale": _scale(self)}
        return gdpa_batch.Batch(**given)


@dataclass(frozen=True)
class BlockInputs:
    """Tensors of one workload of block attention on one device, in the workload's dtype.

    q and grad_out [total, num_heads_q, head_dim], k and v [total, num_heads_k, head_dim];
    cu_seqlens int32 [batch + 1]; rotary (sin, cos), each [total, head_dim // 2], or None.
    """

    workload: Workload
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens: torch.Tensor
    grad_out: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor] | None

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `block_attention`; `impl` is left out."""
        return {name: getattr(self, name) for name in _BLOCK_TENSORS} | {
            name: getattr(self.workload, name) for name in _BLOCK_OPTIONS
        }

    def batch(self) -> block_batch.Batch:
        """What a rung takes."""
        return block_batch.Batch(**self.arguments() | {"scale": _scale(self)})


def _scale(inputs: Inputs | BlockInputs) -> float:
    scale = inputs.workload.scale
    return inputs.workload.head_dim**-0.5 if scale is None else scale


def make_inputs(
    workload: Workload,
    *,
    device: torch.device | str,
    seed: int | None = None,
    packed: bool = False,
) -> Inputs | BlockInputs:
    """Make the tensors of `workload` on `device`: q, then k, then v, then the gradient of the
    output from N(0, 1), and with rotary the sines and cosines of angles uniform on a full turn.

    `seed` (default: the workload's) seeds the values only; lengths follow the workload's own seed.
    Values are drawn on the device, so they repeat for a seed on one kind of device and one PyTorch
    version; on "meta" there are none. `packed=True` returns q, k, v with the same values as strided
    slices of one tensor [total, num_heads_q + 2 * num_heads_k, head_dim]; ValueError unless K/V
    lengths equal Q lengths.
    """
    if seed is None:
        seed = workload.seed
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"seed must be an integer in 0 .. 2**63 - 1 or None, got {seed!r}")
    if packed and (workload.shared_q or workload.lengths_k is not None):
        raise ValueError(
            f"packed must be False unless K/V lengths equal Q lengths (lengths_k None), got "
            f"packed=True for {workload.name!r} with lengths_k={workload.lengths_k!r}"
        )
    device = torch.device(device)
    dtype = DTYPES[workload.dtype]
    generator = None
    if device.type != "meta":
        generator = torch.Generator(device=device).manual_seed(seed)
    heads_q, heads_k = workload.num_heads_q, workload.num_heads_k

    def draw(rows: int, heads: int) -> torch.Tensor:
        shape = (rows, heads, workload.head_dim)
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    if packed:
        shape = (workload.total_q, heads_q + 2 * heads_k, workload.head_dim)
        qkv = torch.empty(shape, dtype=dtype, device=device)
        q, k, v = qkv.split([heads_q, heads_k, heads_k], dim=1)
        for part in (q, k, v):
            part.copy_(draw(part.shape[0], part.shape[1]))
    else:
        q = draw(workload.rows_q, heads_q)
        k = draw(workload.total_k, heads_k)
        v = draw(workload.total_k, heads_k)
    grad_out = draw(workload.total_q, heads_q)
    if workload.operator == "block_attention":
        rotary = None
        if workload.rotary:
            shape = (workload.total_q, workload.head_dim // 2)
            angle = torch.rand(shape, generator=generator, device=device).mul_(2 * math.pi)
            rotary = (angle.sin().to(dtype), angle.cos().to(dtype))
        offsets = cu_seqlens(workload.seqlens_q, device)
        return BlockInputs(workload, q, k, v, offsets, grad_out, rotary)
    return Inputs(
        workload=workload,
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=None if workload.shared_q else cu_seqlens(workload.seqlens_q, device),
        cu_seqlens_k=cu_seqlens(workload.seqlens_k, device),
        max_seqlen_q=workload.max_seqlen_q,
        max_seqlen_k=workload.max_seqlen_k,
        grad_out=grad_out,
    )


def cu_seqlens(seqlens: tuple[int, ...] | list[int], device: torch.device | str) -> torch.Tensor:
    """Offsets 0, l0, l0 + l1, ... as int32 [batch + 1] on `device`; ValueError beyond int32."""
    offsets = [0, *accumulate(seqlens)]
    if offsets[-1] >= 2**31:
        raise ValueError(f"seqlens must sum to less than 2**31, got {offsets[-1]}")
    return torch.tensor(offsets, dtype=torch.int32, device=device)
