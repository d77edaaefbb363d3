"""A norm of the attention's result times a gate, one kernel for each direction.

Forward reads x and u once and writes what the output projection takes; backward reads both, and the
gradient of each part, once, and writes two gradients. All arithmetic is fp32. Saved are one or two
numbers a row: mean and rstd.

With s the scale, m and r the mean and rstd of s x, z = r (s x - m), w and b the weight and bias,
n = w z + b and c = u or SiLU(u), the parts are u' = c, a = s x, n and un = c n. With g_p their
gradients, after dropout's mask,

    dn = c g_un + g_n,    dc = n g_un + g_u,    dw = the sum of dn z over rows,    db = that of dn,
    dx = s (r (w dn - mean(w dn) - z mean(w dn z)) + g_a).

Without centring m = 0, and mean(w dn) is left out. A norm of each head has rows of that head, whose
weight and bias are numbers. The sums over rows are added as in residual.py, always in one order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gdpa_kernels.calling.launch import cdiv, launch, multiprocessors, next_power_of_2
from gdpa_kernels.norms.common import Form


@dataclass(frozen=True)
class Config:
    """rows: of a tile. programs: of backward, per multiprocessor, each with many tiles."""

    rows: int
    num_warps: int
    programs: int = 0


def config_of(width: int, parts: int, backward: bool) -> Config:
    """Forward about 16 elements of each tensor in a thread, 8 of a head's rows, with which sm_80
    would spill; not tuned. Backward a row at a time: with several parts 4 elements of it in a
    thread and 32 warps on a multiprocessor, with one part 8 elements and 24 warps, the fastest on
    an H200 or near it for 256 to 2,048 columns; more have 16 warps."""
    block = next_power_of_2(width)
    if backward:
        per_thread, warps = (4, 32) if parts > 1 else (8, 24)
        num_warps = max(1, block // (32 * per_thread))
        if num_warps > 16:
            num_warps = warps = 16
        return Config(max(1, 32 * per_thread // block), num_warps, warps // num_warps)
    per_thread = 8 if block <= 128 else 16
    num_warps = min(16, max(4, block // (32 * per_thread)))
    return Config(max(1, 128 * per_thread // block), num_warps)


@triton.jit
def _affine(pointer, head, column, WIDTH: tl.constexpr, OF_HEADS: tl.constexpr):
    """The weight or bias of each element, [rows or 1, columns or 1]."""
    if OF_HEADS:
        values = tl.load(pointer + head)[:, None]
    else:
        values = tl.load(pointer + column, mask=column < WIDTH, other=0.0)[None, :]
    return values.to(tl.float32)


@triton.jit
def _store_part(y_ptr, keep_ptr, offsets, part, mask, FORM: tl.constexpr):
    if keep_ptr is not None:
        keep = tl.load(keep_ptr + offsets, mask=mask, other=0)
        part = tl.where(keep != 0, part * FORM.dropout_scale, 0.0)
    tl.store(y_ptr + offsets, part.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_gradient(grad_ptr, keep_ptr, offsets, mask, FORM: tl.constexpr):
    grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if keep_ptr is not None:
        keep = tl.load(keep_ptr + offsets, mask=mask, other=0)
        grad = tl.where(keep != 0, grad * FORM.dropout_scale, 0.0)
    return grad


@triton.jit(do_not_specialize=["total"])
def norm_mul_kernel(
    x_ptr, u_ptr, scale_ptr, weight_ptr, bias_ptr, keep_ptr, y_ptr, mean_ptr, rstd_ptr,
    total, U_STRIDE: tl.constexpr, FORM: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile of ROWS rows of WIDTH, of `total`; FORM.heads of them are a token's."""
    HEADS: tl.constexpr = FORM.heads
    column = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = row // HEADS
    head = row % HEADS
    mask = (row < total)[:, None]
    if BLOCK != WIDTH:
        mask = mask & (column < WIDTH)[None, :]
    x = tl.load(x_ptr + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
    x = x.to(tl.float32)
    if scale_ptr is not None:
        x *= tl.load(scale_ptr).to(tl.float32)
    z = x
    if FORM.centred:
        mean = tl.sum(x, axis=1) / WIDTH
        tl.store(mean_ptr + row, mean, mask=row < total)
        z = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(z * z, axis=1) / WIDTH + FORM.eps)
    tl.store(rstd_ptr + row, rstd, mask=row < total)
    n = z * rstd[:, None]
    if weight_ptr is not None:
        n *= _affine(weight_ptr, head, column, WIDTH, FORM.weights_of_heads)
    if bias_ptr is not None:
        n += _affine(bias_ptr, head, column, WIDTH, FORM.weights_of_heads)
    u_offsets = (token * U_STRIDE + head * WIDTH)[:, None] + column[None, :]
    u = tl.load(u_ptr + u_offsets, mask=mask, other=0.0).to(tl.float32)
    if FORM.silu:
        u *= tl.sigmoid(u)
    part = (token * (PARTS * HEADS * WIDTH) + head * WIDTH)[:, None] + column[None, :]
    if FORM.u:
        _store_part(y_ptr, keep_ptr, part, u, mask, FORM)
        part += HEADS * WIDTH
    if FORM.a:
        _store_part(y_ptr, keep_ptr, part, x, mask, FORM)
        part += HEADS * WIDTH
    if FORM.n:
        _store_part(y_ptr, keep_ptr, part, n, mask, FORM)
        part += HEADS * WIDTH
    _store_part(y_ptr, keep_ptr, part, n * u, mask, FORM)


@triton.jit(do_not_specialize=["total", "tiles"])
def norm_mul_backward_kernel(
    grad_ptr, x_ptr, u_ptr, scale_ptr, weight_ptr, bias_ptr, keep_ptr, mean_ptr, rstd_ptr,
    grad_x_ptr, grad_u_ptr, weight_sums_ptr, bias_sums_ptr, total, tiles,
    U_STRIDE: tl.constexpr, FORM: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Every tile of a program. Sums [programs, width or heads]; SLOTS: heads, to a power of two."""
    HEADS: tl.constexpr = FORM.heads
    column, slot = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    scale = 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr).to(tl.float32)
    if FORM.weights_of_heads:
        weight_sums = tl.zeros([SLOTS], tl.float32)
        bias_sums = tl.zeros([SLOTS], tl.float32)
    else:
        weight_sums = tl.zeros([ROWS, BLOCK], tl.float32)
        bias_sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        token = row // HEADS
        head = row % HEADS
        mask = (row < total)[:, None]
        if BLOCK != WIDTH:
            mask = mask & (column < WIDTH)[None, :]
        offsets = row[:, None] * WIDTH + column[None, :]
        z = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * scale
        if FORM.centred:
            z -= tl.load(mean_ptr + row, mask=row < total, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + row, mask=row < total, other=0.0)[:, None]
        z *= rstd
        u_offsets = (token * U_STRIDE + head * WIDTH)[:, None] + column[None, :]
        u = tl.load(u_ptr + u_offsets, mask=mask, other=0.0).to(tl.float32)
        gate, slope = u, 1.0
        if FORM.silu:
            sigmoid = tl.sigmoid(u)
            gate, slope = u * sigmoid, sigmoid * (1.0 + u * (1.0 - sigmoid))
        part = (token * (PARTS * HEADS * WIDTH) + head * WIDTH)[:, None] + column[None, :]
        of_product = part + (PARTS - 1) * (HEADS * WIDTH)
        grad = _load_gradient(grad_ptr, keep_ptr, of_product, mask, FORM)
        n = z
        if weight_ptr is not None:
            weight = _affine(weight_ptr, head, column, WIDTH, FORM.weights_of_heads)
            n *= weight
        if bias_ptr is not None:
            n += _affine(bias_ptr, head, column, WIDTH, FORM.weights_of_heads)
        grad_gate, grad_n = grad * n, grad * gate
        if FORM.u:
            grad_gate += _load_gradient(grad_ptr, keep_ptr, part, mask, FORM)
            part += HEADS * WIDTH
        if FORM.a:
            grad_a = _load_gradient(grad_ptr, keep_ptr, part, mask, FORM)
            part += HEADS * WIDTH
        if FORM.n:
            grad_n += _load_gradient(grad_ptr, keep_ptr, part, mask, FORM)
        grad_u = (grad_gate * slope).to(grad_u_ptr.dtype.element_ty)
        tl.store(grad_u_ptr + offsets, grad_u, mask=mask)
        if weight_ptr is not None:
            if FORM.weights_of_heads:
                of_rows = tl.sum(grad_n * z, axis=1)[:, None]
                weight_sums += tl.sum(tl.where(head[:, None] == slot[None, :], of_rows, 0.0), 0)
            else:
                weight_sums += grad_n * z
        if bias_ptr is not None:
            if FORM.weights_of_heads:
                of_rows = tl.sum(grad_n, axis=1)[:, None]
                bias_sums += tl.sum(tl.where(head[:, None] == slot[None, :], of_rows, 0.0), 0)
            else:
                bias_sums += grad_n
        if weight_ptr is not None:
            grad_n *= weight
        grad_x = grad_n - z * (tl.sum(grad_n * z, axis=1) / WIDTH)[:, None]
        if FORM.centred:
            grad_x -= (tl.sum(grad_n, axis=1) / WIDTH)[:, None]
        grad_x *= rstd
        if FORM.a:
            grad_x += grad_a
        grad_x = (grad_x * scale).to(grad_x_ptr.dtype.element_ty)
        tl.store(grad_x_ptr + offsets, grad_x, mask=mask)
    if weight_ptr is not None:
        _store_sums(weight_sums_ptr, weight_sums, WIDTH, FORM)
    if bias_ptr is not None:
        _store_sums(bias_sums_ptr, bias_sums, WIDTH, FORM)


@triton.jit
def _store_sums(sums_ptr, sums, WIDTH: tl.constexpr, FORM: tl.constexpr):
    if FORM.weights_of_heads:
        entry = tl.arange(0, sums.shape[0])
        pointers = sums_ptr + tl.program_id(0).to(tl.int64) * FORM.heads + entry
        tl.store(pointers, sums, mask=entry < FORM.heads)
    else:
        entry = tl.arange(0, sums.shape[1])
        pointers = sums_ptr + tl.program_id(0).to(tl.int64) * WIDTH + entry
        tl.store(pointers, tl.sum(sums, axis=0), mask=entry < WIDTH)


def _options(x: torch.Tensor, u: torch.Tensor, form: Form, config: Config) -> dict:
    width = x.shape[1] // form.heads
    return {
        "U_STRIDE": u.stride(0), "FORM": form, "PARTS": form.parts, "WIDTH": width,
        "BLOCK": next_power_of_2(width), "ROWS": config.rows, "num_warps": config.num_warps,
    }  # fmt: skip


def forward(
    x: torch.Tensor, u: torch.Tensor, scale: torch.Tensor | None, weight: torch.Tensor | None,
    bias: torch.Tensor | None, keep: torch.Tensor | None, form: Form, dtype: torch.dtype,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:  # fmt: skip
    """The parts beside each other `[tokens, parts * width]` of `dtype`, and fp32 `[tokens * heads]`
    the means, None unless centred, and rstd.

    x: contiguous `[tokens, width]`. u: the same shape, its columns adjacent. scale: one number.
    keep: uint8, of the result's shape, 0 where dropout drops.
    """
    tokens, width = x.shape
    config = config or config_of(width // form.heads, form.parts, backward=False)
    y = x.new_empty(tokens, form.parts * width, dtype=dtype)
    total = tokens * form.heads
    rstd = x.new_empty(total, dtype=torch.float32)
    mean = torch.empty_like(rstd) if form.centred else None
    launch(
        norm_mul_kernel, (cdiv(total, config.rows),), x.device,
        x, u, scale, weight, bias, keep, y, mean, rstd, total, **_options(x, u, form, config),
    )  # fmt: skip
    return y, mean, rstd


def backward(
    grad: torch.Tensor, x: torch.Tensor, u: torch.Tensor, scale: torch.Tensor | None,
    weight: torch.Tensor | None, bias: torch.Tensor | None, keep: torch.Tensor | None,
    mean: torch.Tensor | None, rstd: torch.Tensor, form: Form, config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """The gradients of x, u, weight and bias, None for one that is None; grad is contiguous."""
    tokens, width = x.shape
    config = config or config_of(width // form.heads, form.parts, backward=True)
    grad_x = torch.empty_like(x)
    grad_u = u.new_empty(u.shape)
    total = tokens * form.heads
    tiles = cdiv(total, config.rows)
    programs = min(tiles, config.programs * multiprocessors(x.device))
    entries = form.heads if form.weights_of_heads else width
    sums = tuple(
        None if each is None else x.new_empty(programs, entries, dtype=torch.float32)
        for each in (weight, bias)
    )
    launch(
        norm_mul_backward_kernel, (programs,), x.device,
        grad, x, u, scale, weight, bias, keep, mean, rstd, grad_x, grad_u, *sums, total, tiles,
        SLOTS=next_power_of_2(form.heads), **_options(x, u, form, config),
    )  # fmt: skip
    pairs = zip(sums, (weight, bias), strict=True)
    weights = (None if each is None else partial.sum(0).to(each.dtype) for partial, each in pairs)
    return grad_x, grad_u, *weights
