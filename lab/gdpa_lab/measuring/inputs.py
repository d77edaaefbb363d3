"""Inputs: the seeded tensors of a workload."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch

from gdpa_kernels.block_attention import batch as block_batch
from gdpa_kernels.gdpa import batch as gdpa_batch
from gdpa_lab.measuring.require import require
from gdpa_lab.measuring.workload import Workload

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Arguments:
    """Base of inputs: attributes and workload options become arguments of an operator."""

    workload: Workload
    TENSORS: ClassVar[tuple[str, ...]]
    OPTIONS: ClassVar[tuple[str, ...]]

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the operator, except the one that names an implementation."""
        tensors = {name: getattr(self, name) for name in self.TENSORS}
        return tensors | {name: getattr(self.workload, name) for name in self.OPTIONS}

    def scale(self) -> float:
        """Factor of Q K^T."""
        scale = self.workload.scale
        return self.workload.head_dim**-0.5 if scale is None else scale


@dataclass(frozen=True)
class Inputs(Arguments):
    """Tensors of one workload on one device.

    q [rows_q, num_heads_q, head_dim], k and v [total_k, num_heads_k, head_dim] and the gradient of
    the output, grad_out [total_q, num_heads_q, head_dim], in the workload's dtype; cu_seqlens_q
    (None when q is shared) and cu_seqlens_k int32 [batch + 1]; num_targets int32 [batch] or None.
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
    num_targets: torch.Tensor | None = None

    TENSORS = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    OPTIONS = ("activation", "scale", "output_scale", "mask")

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the operator, with the batch's targets in its mask."""
        arguments = super().arguments()
        return arguments | {"mask": arguments["mask"].of_batch(self.num_targets, None)}

    def batch(self) -> gdpa_batch.Batch:
        """Batch for a rung."""
        name = self.workload.activation
        names = (name,) if isinstance(name, str) else tuple(name)
        arguments = self.arguments() | {"activation": names, "scale": self.scale()}
        segments = arguments["mask"].segments(self.cu_seqlens_q, self.cu_seqlens_k, False, False)
        arguments["mask"] = self.workload.mask
        return gdpa_batch.Batch(**arguments, segments=segments)


@dataclass(frozen=True)
class BlockInputs(Arguments):
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

    TENSORS = ("q", "k", "v", "cu_seqlens", "rotary")
    OPTIONS = ("block_size", "scale", "rotate_v")

    def batch(self) -> block_batch.Batch:
        """Batch for a rung."""
        return block_batch.Batch(**self.arguments() | {"scale": self.scale()})


def make_inputs(
    workload: Workload, *, device: torch.device | str, seed: int | None = None
) -> Inputs | BlockInputs:
    """Make the tensors of `workload` on `device`: q, then k, then v, then the gradient of the
    output from N(0, 1), and with rotary the sines and cosines of angles uniform on a full turn.

    `seed` (default: the workload's) seeds the values only; lengths follow the workload's own seed.
    Values are drawn on the device, so they repeat for a seed on one kind of device and one PyTorch
    version; on "meta" there are none.
    """
    if seed is None:
        seed = workload.seed
    ok = type(seed) is int and 0 <= seed < 2**63
    require(ok, "seed", "an integer in 0 .. 2**63 - 1 or None", seed)
    device = torch.device(device)
    dtype = DTYPES[workload.dtype]
    generator = None
    if device.type != "meta":
        generator = torch.Generator(device=device).manual_seed(seed)
    heads_q, heads_k = workload.num_heads_q, workload.num_heads_k

    def draw(rows: int, heads: int) -> torch.Tensor:
        shape = (rows, heads, workload.head_dim)
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)

    sizes = (workload.rows_q, heads_q), (workload.total_k, heads_k), (workload.total_k, heads_k)
    q, k, v = (draw(*size) for size in sizes)
    grad_out = draw(workload.total_q, heads_q)
    offsets_q = None if workload.shared_q else cu_seqlens(workload.seqlens_q, device)
    if workload.operator == "block_attention":
        rotary = None
        if workload.rotary:
            shape = (workload.total_q, workload.head_dim // 2)
            angle = torch.rand(shape, generator=generator, device=device).mul_(2 * math.pi)
            rotary = (angle.sin().to(dtype), angle.cos().to(dtype))
        return BlockInputs(workload, q, k, v, offsets_q, grad_out, rotary)
    offsets_k = cu_seqlens(workload.seqlens_k, device)
    longest = workload.max_seqlen_q, workload.max_seqlen_k
    targets = None
    if workload.target_share:
        targets = torch.tensor(workload.num_targets, dtype=torch.int32, device=device)
    return Inputs(workload, q, k, v, offsets_q, offsets_k, *longest, grad_out, targets)


def cu_seqlens(seqlens: tuple[int, ...] | list[int], device: torch.device | str) -> torch.Tensor:
    """Compute offsets 0, l0, l0 + l1, ... as int32 [batch + 1]; ValueError beyond int32."""
    offsets = [0, *accumulate(seqlens)]
    if offsets[-1] >= 2**31:
        raise ValueError(f"seqlens must sum to less than 2**31, got {offsets[-1]}")
    return torch.tensor(offsets, dtype=torch.int32, device=device)
