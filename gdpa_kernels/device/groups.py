"""Groups of values that kernels pass to their functions as one.

A class under `triton.aggregate` has named members that a function reads: tensors, buffers,
barriers, TMA descriptors, other groups, and constants, which stay constants. To the compiler it is
its members; it costs nothing on the device.
"""

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx


@triton.aggregate
class Ring:
    """Ring of buffers between a producer and its consumers, with the barriers of both directions.

    full[i] completes when buffer[i] may be read, empty[i] when it may be filled again. Use `count`
    of the ring takes stage count % STAGES, counted from `first` where several consumers have stages
    of their own; every STAGES uses the phase of its barriers changes.
    """

    buffer: tlx.buffered_tensor
    full: tlx.mbarrier
    empty: tlx.mbarrier
    STAGES: tl.constexpr

    @triton.jit
    def acquire(self, count, first=0):
        """The stage of a use, once its buffer may be filled."""
        stage = first + count % self.STAGES
        tlx.barrier_wait(self.empty[stage], ((count // self.STAGES) & 1) ^ 1)
        return stage

    @triton.jit
    def wait(self, count, first=0):
        """The stage of a use, once its buffer may be read."""
        stage = first + count % self.STAGES
        tlx.barrier_wait(self.full[stage], (count // self.STAGES) & 1)
        return stage


@triton.jit
def ring(buffer, STAGES: tl.constexpr, CONSUMERS: tl.constexpr = 1):
    """A ring of STAGES buffers that all 128 threads of each of CONSUMERS warp groups release."""
    return Ring(
        buffer, tlx.alloc_barriers(STAGES), tlx.alloc_warp_barrier(STAGES, 4, CONSUMERS), STAGES
    )


@triton.aggregate
class OneWay:
    """Buffers with one-way barriers: full[i] completes when buffer[i] may be read.

    Other barriers say when it may be filled again.
    """

    buffer: tlx.buffered_tensor
    full: tlx.mbarrier
