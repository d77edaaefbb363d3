"""TMA descriptors whose layout is checked once.

Triton checks shape, strides and block of a `TensorDescriptor` in Python every time one is made.
Calls differ in the address, seldom in the layout: a `Layout` is checked by Triton when it is made,
a `Descriptor` puts it at an address. It holds the tensor as a `TensorDescriptor` does; a layout
holds none.
"""

import torch
from triton.tools.tensor_descriptor import TensorDescriptor


class Layout:
    """All of a descriptor but the address. Equal only to itself: keep it to use it again."""

    __slots__ = ("block_shape", "dtype", "shape", "strides")

    def __init__(
        self,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        block_shape: tuple[int, ...],
    ):
        """Raises what `TensorDescriptor` raises: AssertionError, TypeError or ValueError."""
        somewhere = torch.empty(0, dtype=dtype)
        TensorDescriptor(somewhere, list(shape), list(strides), list(block_shape))
        self.dtype, self.shape, self.strides = dtype, shape, strides
        self.block_shape = block_shape


class Descriptor(TensorDescriptor):
    """A `TensorDescriptor` of `layout` at the address of `base`; out of bounds reads as zero."""

    padding = "zero"
    round_f32_to_tf32 = False
    shape = property(lambda self: self.layout.shape)
    strides = property(lambda self: self.layout.strides)
    block_shape = property(lambda self: self.layout.block_shape)

    def __init__(self, base: torch.Tensor, layout: Layout):
        assert base.dtype is layout.dtype, f"base must be {layout.dtype}, got {base.dtype}"
        assert not base.data_ptr() % 16, "base must be 16-byte aligned"
        self.base = base
        self.layout = layout
