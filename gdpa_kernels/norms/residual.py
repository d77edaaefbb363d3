"""Residual add and RMSNorm of rows, one kernel for each direction.

Forward reads what it adds once and writes the sum and its normalised rows once; backward reads both
gradients and the sum once and writes the sum's gradient once. All arithmetic is fp32. Saved is one
number per row, rstd = 1 / rms.

The weight's gradient is a sum over rows: each program adds its own rows in registers and writes one
partial sum, and PyTorch adds those, in an order that does not change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gdpa_kernels.calling.launch import cdiv, launch, multiprocessors, next_power_of_2


@dataclass(frozen=True)
class Config:
    """rows: of a tile. programs: of backward, per multiprocessor, each with many tiles."""

    rows: int
    num_warps: int
    programs: int


def config_of(width: int, programs: int = 1) -> Config:
    """About 16 elements per thread; `programs` of 4 warps."""
    block = next_power_of_2(width)
    num_warps = min(16, max(4, block // 512))
    return Config(max(1, 2048 // block), num_warps, max(1, 4 * programs // num_warps))


@triton.jit(do_not_specialize=["total"])
def add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, stream_ptr, rstd_ptr, total, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile of ROWS rows; residual_ptr None: of x alone. weight_ptr None: no weight."""
    column = tl.arange(0, BLOCK)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tile = tl.program_id(0)
    row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = (row < total)[:, None]
    if BLOCK != WIDTH:
        mask = mask & (column < WIDTH)[None, :]
    offsets = row[:, None] * WIDTH + column[None, :]
    stream = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        stream += tl.load(residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        rounded = stream.to(stream_ptr.dtype.element_ty)
        tl.store(stream_ptr + offsets, rounded, mask=mask)
        stream = rounded.to(tl.float32)  # what backward reads
    rstd = tl.rsqrt(tl.sum(stream * stream, axis=1) / WIDTH + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < total)
    y = stream * rstd[:, None]
    if weight_ptr is not None:
        y *= weight[None, :]
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["total", "tiles"])
def add_rms_norm_backward_kernel(
    grad_y_ptr, grad_stream_ptr, stream_ptr, rstd_ptr, weight_ptr,
    grad_ptr, grad_x_ptr, partial_ptr, total, tiles,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Every tile of a program; grad_x_ptr: the gradient once more, in x's dtype, or None."""
    column = tl.arange(0, BLOCK)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    grad_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (row < total)[:, None]
        if BLOCK != WIDTH:
            mask = mask & (column < WIDTH)[None, :]
        offsets = row[:, None] * WIDTH + column[None, :]
        grad_y = tl.load(grad_y_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        stream = tl.load(stream_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if grad_stream_ptr is not None:
            passed = tl.load(grad_stream_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < total, other=0.0)[:, None]
        normalised = stream * rstd
        if partial_ptr is not None:
            grad_weight += grad_y * normalised
        if weight_ptr is not None:
            grad_y *= weight[None, :]
        mean = tl.sum(grad_y * normalised, axis=1)[:, None] / WIDTH
        grad = (grad_y - normalised * mean) * rstd
        if grad_stream_ptr is not None:
            grad += passed
        tl.store(grad_ptr + offsets, grad.to(grad_ptr.dtype.element_ty), mask=mask)
        if grad_x_ptr is not None:
            tl.store(grad_x_ptr + offsets, grad.to(grad_x_ptr.dtype.element_ty), mask=mask)
    if partial_ptr is not None:
        partial_ptrs = partial_ptr + tl.program_id(0) * WIDTH + column
        tl.store(partial_ptrs, tl.sum(grad_weight, axis=0), mask=column < WIDTH)


def forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """y of `dtype`, x + residual in residual's dtype (None without a residual), both `[rows,
    width]`, and rstd, fp32 `[rows]`; x and residual are contiguous `[rows, width]`."""
    total, width = x.shape
    config = config or config_of(width)
    y = torch.empty(total, width, dtype=dtype, device=x.device)
    stream = None if residual is None else torch.empty_like(residual)
    rstd = torch.empty(total, dtype=torch.float32, device=x.device)
    launch(
        add_rms_norm_kernel, (cdiv(total, config.rows),), x.device,
        x, residual, weight, y, stream, rstd, total, eps,
        WIDTH=width, BLOCK=next_power_of_2(width), ROWS=config.rows,
        num_warps=config.num_warps,
    )  # fmt: skip
    return y, stream, rstd


def backward(
    grad_y: torch.Tensor,
    grad_stream: torch.Tensor | None,
    stream: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    x_dtype: torch.dtype | None = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The gradient of the stream in its dtype; the same in x_dtype, None for None; and that of the
    weight, None without one. grad_y, grad_stream and stream are contiguous `[rows, width]`."""
    total, width = stream.shape
    # Measured on an H200: bf16 5 (8 takes 1.06 times as long), fp32 8 (5: 1.19).
    config = config or config_of(width, programs=8 if stream.dtype == torch.float32 else 5)
    grad = torch.empty_like(stream)
    grad_x = None if x_dtype is None else torch.empty_like(stream, dtype=x_dtype)
    tiles = cdiv(total, config.rows)
    programs = min(tiles, config.programs * multiprocessors(stream.device))
    partial = None
    if weight is not None:
        partial = torch.empty(programs, width, dtype=torch.float32, device=stream.device)
    launch(
        add_rms_norm_backward_kernel, (programs,), stream.device,
        grad_y, grad_stream, stream, rstd, weight, grad, grad_x, partial, total, tiles,
        WIDTH=width, BLOCK=next_power_of_2(width), ROWS=config.rows,
        num_warps=config.num_warps,
    )  # fmt: skip
    return grad, grad_x, None if partial is None else partial.sum(0).to(weight.dtype)
