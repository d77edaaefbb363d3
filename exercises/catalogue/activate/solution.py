"""GELU in its tanh form, with one special-function instruction an element."""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """One MUFU instruction; its relative error is at most 2**-11."""
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0).to(tl.float32)
    # >>> y = 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3). An element may take
    # one MUFU: exp, a division and a square root are one each.
    # blank: y = x
    u = x * (0.7978845608028654 + 0.035677408136300125 * x * x)
    half = 0.5 * x
    y = half + half * tanh(u)
    # <<<
    tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=offsets < n)
