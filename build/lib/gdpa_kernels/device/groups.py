"""What kernels hand to their functions as one value.

A class under `triton.aggregate` has named members that a function reads: tensors, buffers,
barriers, TMA descriptors, other groups, and constants, which stay constants. To the compiler it is
its members; it costs nothing on the device.
"""

import triton
import triton.language.extra.tlx as tlx


@triton.aggregate
class Ring:
    """Ring of buffers between a producer and its consumers, with the barriers of both directions.

    full[i] completes when buffer[i] may be read, empty[i] when it may be filled again.
    """

    buffer: tlx.buffered_tensor
    full: tlx.mbarrier
    empty: tlx.mbarrier


@triton.aggregate
class Handover:
    """Buffers with a barrier in one direction: full[i] completes when buffer[i] may be read.

    That it may be filled again is known from other barriers.
    """

    buffer: tlx.buffered_tensor
    full: tlx.mbarrier
