"""Block pointers: `tl.make_block_ptr`, `tl.advance`, and loads and stores through them.

A block pointer is a pointer, sizes, strides and a position. Elements outside of the sizes along
`boundary_check` are not accessed. Without `padding_option` they read zero, as in fbtriton 3.7.4 on
NVIDIA GPUs; along dimensions that are not checked, only the tensor's own bounds hold.
"""

import math
from typing import Any

import torch
import triton.language as tl

from .errors import InvalidKernel
from .launch import current
from .tile import Tile, check_shape, is_pointer, to_tile

_PADDINGS = {"zero": 0, "nan": math.nan}


def _integers(name: str, values: Any) -> tuple[int, ...]:
    tiles = [to_tile(value) for value in (values if isinstance(values, tuple) else (values,))]
    for tile in tiles:
        if tile.shape or not tile.dtype.is_int():
            raise InvalidKernel(f"{name} of a block pointer must be integer scalars, got {tile!r}")
    return tuple(map(int, tiles))


class BlockPointer:
    """Block pointer. sizes, strides, offsets: in elements, per dimension of block_shape."""

    def __init__(
        self, base: Tile, shape: Any, strides: Any, offsets: Any, block_shape: Any, order: Any
    ):
        if not is_pointer(base) or base.shape:
            raise InvalidKernel(f"base of a block pointer must be a scalar pointer, got {base!r}")
        self.base = base
        self.sizes, self.strides = _integers("shape", shape), _integers("strides", strides)
        self.offsets, self.block_shape = _integers("offsets", offsets), check_shape(block_shape)
        lengths = {len(v) for v in (self.sizes, self.strides, self.offsets, self.block_shape)}
        if len(lengths) != 1:
            raise InvalidKernel(f"a block pointer must have one rank, got {sorted(lengths)}")
        if sorted(order) != list(range(len(self.sizes))):
            raise InvalidKernel(f"order must name each dimension once, got {order}")
        self.order = order

    @property
    def dtype(self) -> tl.dtype:
        return self.base.dtype

    type = dtype

    def advance(self, offsets: Any) -> "BlockPointer":
        steps = _integers("offsets", offsets)
        if len(steps) != len(self.offsets):
            raise InvalidKernel(f"advance needs {len(self.offsets)} offsets, got {len(steps)}")
        moved = tuple(offset + step for offset, step in zip(self.offsets, steps, strict=True))
        return BlockPointer(
            self.base, self.sizes, self.strides, moved, self.block_shape, self.order
        )

    def lanes(self, boundary_check: Any) -> tuple[Tile, Tile | None]:
        """Return a pointer to each element, and a mask of those inside, None for all."""
        checked = boundary_check if isinstance(boundary_check, tuple) else (boundary_check or ())
        rank = len(self.sizes)
        if not all(isinstance(dim, int) and 0 <= dim < rank for dim in checked):
            raise InvalidKernel(f"boundary_check must name dimensions below {rank}, got {checked}")
        where, inside = self.base.data, None
        for dim, (size, stride, offset, extent) in enumerate(
            zip(self.sizes, self.strides, self.offsets, self.block_shape, strict=True)
        ):
            index = torch.arange(offset, offset + extent).reshape(-1, *[1] * (rank - dim - 1))
            where = where + index * stride
            if dim in checked and not 0 <= offset <= size - extent:
                valid = (index >= 0) & (index < size)
                inside = valid if inside is None else inside & valid
        mask = None if inside is None else Tile(inside.expand(self.block_shape), tl.int1)
        return self.base.like(where.expand(self.block_shape)), mask

    def load(self, boundary_check: Any = (), padding_option: str | None = "") -> Tile:
        pointers, mask = self.lanes(boundary_check)
        if padding_option not in (None, "", *_PADDINGS):
            raise InvalidKernel(f"padding_option must be 'zero' or 'nan', got {padding_option!r}")
        if padding_option == "nan" and not self.dtype.element_ty.is_floating():
            raise InvalidKernel(f"padding_option='nan' needs floats, got {self.dtype.element_ty}")
        padding = None if mask is None else _PADDINGS[padding_option or "zero"]
        return current().memory.load(pointers, mask, padding)

    def store(self, value: Any, boundary_check: Any = ()) -> None:
        value, (pointers, mask) = to_tile(value), self.lanes(boundary_check)
        if value.shape and value.shape != self.block_shape:
            raise InvalidKernel(f"value must be {list(self.block_shape)}, got {value!r}")
        current().memory.store(pointers, value, mask)
