"""An aggregate with methods, and a function that makes one, for the test of the mutants."""

import triton
import triton.language as tl

from emulator.tests.checking import tlx


@triton.aggregate
class Ring:
    tiles: tlx.buffered_tensor
    full: tlx.mbarrier
    empty: tlx.mbarrier
    STAGES: tl.constexpr

    @triton.jit
    def acquire(self, count):
        stage = count % self.STAGES
        tlx.barrier_wait(self.empty[stage], (count // self.STAGES + 1) % 2)
        return stage

    @triton.jit
    def wait(self, count):
        stage = count % self.STAGES
        tlx.barrier_wait(self.full[stage], count // self.STAGES % 2)
        return stage

    @triton.jit
    def release(self, count):
        tlx.barrier_arrive(self.empty[count % self.STAGES])


@triton.jit
def ring(tiles, STAGES: tl.constexpr):
    return Ring(tiles, tlx.alloc_barriers(STAGES), tlx.alloc_barriers(STAGES), STAGES)
