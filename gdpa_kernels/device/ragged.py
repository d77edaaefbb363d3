"""TMA descriptors of a packed jagged tensor that clip at the end of each sequence.

A descriptor of `[total, num_heads, head_dim]` clips at `total`, so the tail of one sequence would
read the next one, and its NaN. A descriptor per sequence would clip rightly but must be made on the
device, tile by tile. The way out: put the sequence's end at a bound that is the same for all
sequences. Row `i` of a sequence of `length` rows is addressed at coordinate `x = BOUND - length +
i` of a dimension of size BOUND, and rows from `length` on are out of bounds. Two more dimensions
bring the address back: the sequence's end, counted in rows, adds `(start + length) * stride`; a
constant coordinate BOUND with stride `2**34 - stride` elements subtracts `BOUND * stride`, since
BOUND * 2**34 = 2**64 wraps to zero:

    (start + length) s + (BOUND - length + i) s + BOUND (2**34 - s) = (start + i) s   (mod 2**64).

The same descriptor stores: rows beyond the sequence are not written. The idea is that of Triton's
`triton.tools.ragged_tma`; here the head is a dimension too, which makes five.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from gdpa_kernels.calling.rung import tma_problem

BOUND = tl.constexpr(2**30)
ANY = 2**31 - 2**16


def ragged_descriptor(
    tensor: torch.Tensor, block_rows: int, min_width: int = 16, width: int | None = None
) -> TensorDescriptor:
    """Descriptor of boxes of `block_rows` rows of one head of a `[total, num_heads, head_dim]`
    tensor.

    A box is `width` columns wide; None: as the next power of two of head_dim, and at least
    `min_width`. Columns beyond head_dim read as zero. `tma_problem` must find none with
    `tensor`; the field `is_empty` tells one without rows.
    """
    rows, num_heads, head_dim = tensor.shape
    if rows == 0:  # nothing is read, but TMA wants an address
        tensor = tensor.new_zeros(1, num_heads, head_dim)
    row_stride, head_stride, _ = tensor.stride()
    width = width or max(min_width, 1 << (head_dim - 1).bit_length())
    layout = num_heads, head_dim, row_stride, head_stride, block_rows, width
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    vars(descriptor).update(_checked(tensor.dtype, *layout), base=tensor, is_empty=rows == 0)
    return descriptor


@functools.lru_cache(maxsize=1024)
def _checked(
    dtype: torch.dtype, num_heads: int, head_dim: int, row_stride: int, head_stride: int,
    block_rows: int, width: int,
) -> dict[str, object]:  # fmt: skip
    """The fields of a descriptor of no tensor: Triton checks them each time that one is made."""
    descriptor = TensorDescriptor(
        torch.empty(0, dtype=dtype),
        shape=[ANY, ANY, num_heads, BOUND.value, head_dim],
        strides=[2**34 - row_stride, row_stride, head_stride, row_stride, 1],
        block_shape=[1, 1, 1, block_rows, width],
    )
    return vars(descriptor)


def tma_readable(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a contiguous copy in new memory where `ragged_descriptor` cannot take it."""
    if tma_problem(tensor) is None:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


@triton.jit
def load_rows(desc, start, length, head, first_row):
    """Rows first_row .. of one head of the sequence at `start`; rows from `length` on read as
    zero."""
    box = desc.load([BOUND, start + length, head, BOUND - length + first_row, 0])
    return tl.reshape(box, [desc.block_shape[3], desc.block_shape[4]])


@triton.jit
def store_rows(desc, start, length, head, first_row, rows):
    """Write `rows` of one head at first_row; rows from `length` on are dropped by the hardware."""
    box = tl.reshape(rows, [1, 1, 1, desc.block_shape[3], desc.block_shape[4]])
    desc.store([BOUND, start + length, head, BOUND - length + first_row, 0], box)
