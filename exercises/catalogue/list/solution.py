"""A persistent kernel: a few programs share a list of tiles. Each tile is BLOCK rows of silu(x)."""

import triton
import triton.language as tl

BLOCK = 64


@triton.jit
def compute(
    x_ptr, out_ptr, start, end, head, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """silu of rows start .. of a head, as far as there are rows before end."""
    rows = start + tl.arange(0, BLOCK)
    offsets = (rows[:, None] * HEADS + head) * DIM + tl.arange(0, DIM)[None, :]
    mask = (rows < end)[:, None]
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    y = x / (1.0 + tl.exp(-x))
    tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def kernel(
    x_ptr, out_ptr, cu_ptr, blocks, tiles,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # >>> Compute all tiles, 0 to tiles - 1, each once, whatever tl.num_programs(0) is. Of a
    # tile, tile % blocks is its block of rows, tile // blocks % HEADS its head, and tile //
    # blocks // HEADS its sequence, whose rows are cu[sequence] to cu[sequence + 1] - 1.
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        head = tile // blocks % HEADS
        sequence = tile // blocks // HEADS
        start = tl.load(cu_ptr + sequence) + tile % blocks * BLOCK
        end = tl.load(cu_ptr + sequence + 1)
        compute(x_ptr, out_ptr, start, end, head, HEADS, DIM, BLOCK)
    # <<<
