"""Warp-specialized kernels in Gluon: two matmuls and a copy, through rings of STAGES buffers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_mma,
)
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def load_operands(a, b, left, right, full, empty, TILES: gl.constexpr, STEPS: gl.constexpr,
                  ROWS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    for i in range(TILES * STEPS):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), a.nbytes_per_cta + b.nbytes_per_cta)
        tma.async_load(a, [i // STEPS * ROWS, i % STEPS * 64], full.index(stage), left.index(stage))
        tma.async_load(b, [i % STEPS * 64, 0], full.index(stage), right.index(stage))


@gluon.jit
def multiply(c, left, right, full, empty, TILES: gl.constexpr, STEPS: gl.constexpr,
             STAGES: gl.constexpr):  # fmt: skip
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    out = gl.allocate_shared_memory(c.dtype, [64, 64], c.layout)
    i = 0
    for tile in range(TILES):
        acc = gl.zeros([64, 64], gl.float32, M)
        for step in range(STEPS):
            stage = i % STAGES
            mbarrier.wait(full.index(stage), (i // STAGES) & 1)
            acc = warpgroup_mma(left.index(stage), right.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            if step > 0:
                mbarrier.arrive(empty.index((i - 1) % STAGES))
            i += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((i - 1) % STAGES))
        tma.store_wait(0)
        out.store(acc)
        fence_async_shared()
        tma.async_store(c, [64 * tile, 0], out)
    tma.store_wait(0)


@gluon.jit
def hopper_kernel(a, b, c, TILES: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr):
    """c = a @ b in tiles of 64 rows, one matmul in flight."""
    left = gl.allocate_shared_memory(a.dtype, [STAGES, 64, 64], a.layout)
    right = gl.allocate_shared_memory(b.dtype, [STAGES, 64, 64], b.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for k in gl.static_range(STAGES):
        mbarrier.init(full.index(k), count=1)
        mbarrier.init(empty.index(k), count=1)
    gl.warp_specialize(
        [
            (multiply, (c, left, right, full, empty, TILES, STEPS, STAGES)),
            (load_operands, (a, b, left, right, full, empty, TILES, STEPS, 64, STAGES)),
        ],
        [1],
        [24],
    )


@gluon.jit
def multiply_in_tensor_memory(acc, left, right, full, empty, acc_full, acc_empty,
                              TILES: gl.constexpr, STEPS: gl.constexpr,
                              STAGES: gl.constexpr):  # fmt: skip
    i = 0
    for tile in range(TILES):
        slot = tile % STAGES
        mbarrier.wait(acc_empty.index(slot), ((tile // STAGES) & 1) ^ 1)
        for step in range(STEPS):
            stage = i % STAGES
            mbarrier.wait(full.index(stage), (i // STAGES) & 1)
            tcgen05_mma(left.index(stage), right.index(stage), acc.index(slot), use_acc=step > 0)
            tcgen05_commit(empty.index(stage))
            i += 1
        tcgen05_commit(acc_full.index(slot))


@gluon.jit
def store_accumulators(c, acc, acc_full, acc_empty, TILES: gl.constexpr, STAGES: gl.constexpr):
    out = gl.allocate_shared_memory(c.dtype, [128, 64], c.layout)
    for tile in range(TILES):
        slot = tile % STAGES
        mbarrier.wait(acc_full.index(slot), (tile // STAGES) & 1)
        value = acc.index(slot).load()
        mbarrier.arrive(acc_empty.index(slot))
        tma.store_wait(0)
        out.store(value)
        fence_async_shared()
        tma.async_store(c, [128 * tile, 0], out)
    tma.store_wait(0)


@gluon.jit
def blackwell_kernel(a, b, c, TILES: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr):
    """c = a @ b in tiles of 128 rows, with STAGES accumulators, too."""
    T: gl.constexpr = TensorMemoryLayout([128, 64], col_stride=1)
    left = gl.allocate_shared_memory(a.dtype, [STAGES, 128, 64], a.layout)
    right = gl.allocate_shared_memory(b.dtype, [STAGES, 64, 64], b.layout)
    acc = allocate_tensor_memory(gl.float32, [STAGES, 128, 64], T)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    acc_full = mbarrier.allocate_mbarrier(batch=STAGES)
    acc_empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for k in gl.static_range(STAGES):
        mbarrier.init(full.index(k), count=1)
        mbarrier.init(empty.index(k), count=1)
        mbarrier.init(acc_full.index(k), count=1)
        mbarrier.init(acc_empty.index(k), count=1)
    gl.warp_specialize(
        [
            (store_accumulators, (c, acc, acc_full, acc_empty, TILES, STAGES)),
            (load_operands, (a, b, left, right, full, empty, TILES, STEPS, 128, STAGES)),
            (
                multiply_in_tensor_memory,
                (acc, left, right, full, empty, acc_full, acc_empty, TILES, STEPS, STAGES),
            ),
        ],
        [1, 1],
        [24, 24],
    )


@gluon.jit
def load_tiles(source, tiles, full, empty, TILES: gl.constexpr, STAGES: gl.constexpr):
    for tile in range(TILES):
        stage = tile % STAGES
        mbarrier.wait(empty.index(stage), ((tile // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), source.nbytes_per_cta)
        tma.async_load(source, [32 * tile, 0], full.index(stage), tiles.index(stage))


@gluon.jit
def double_tiles(tiles, full, empty, out, out_full, out_empty, TILES: gl.constexpr,
                 STAGES: gl.constexpr):  # fmt: skip
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    for tile in range(TILES):
        stage = tile % STAGES
        mbarrier.wait(full.index(stage), (tile // STAGES) & 1)
        value = tiles.index(stage).load(L) * 2
        fence_async_shared()
        mbarrier.arrive(empty.index(stage))
        mbarrier.wait(out_empty.index(stage), ((tile // STAGES) & 1) ^ 1)
        out.index(stage).store(value)
        fence_async_shared()
        mbarrier.arrive(out_full.index(stage))


@gluon.jit
def store_tiles(target, out, out_full, out_empty, TILES: gl.constexpr, STAGES: gl.constexpr):
    for tile in range(TILES):
        stage = tile % STAGES
        mbarrier.wait(out_full.index(stage), (tile // STAGES) & 1)
        tma.async_store(target, [32 * tile, 0], out.index(stage))
        tma.store_wait(0)
        mbarrier.arrive(out_empty.index(stage))


@gluon.jit
def doubling_kernel(source, target, TILES: gl.constexpr, STAGES: gl.constexpr):
    """target = 2 source in tiles of [32, 32], through two rings."""
    tiles = gl.allocate_shared_memory(source.dtype, [STAGES, 32, 32], source.layout)
    out = gl.allocate_shared_memory(source.dtype, [STAGES, 32, 32], source.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    out_full = mbarrier.allocate_mbarrier(batch=STAGES)
    out_empty = mbarrier.allocate_mbarrier(batch=STAGES)
    for k in gl.static_range(STAGES):
        mbarrier.init(full.index(k), count=1)
        mbarrier.init(empty.index(k), count=1)
        mbarrier.init(out_full.index(k), count=1)
        mbarrier.init(out_empty.index(k), count=1)
    gl.warp_specialize(
        [
            (double_tiles, (tiles, full, empty, out, out_full, out_empty, TILES, STAGES)),
            (load_tiles, (source, tiles, full, empty, TILES, STAGES)),
            (store_tiles, (target, out, out_full, out_empty, TILES, STAGES)),
        ],
        [1, 1],
        [24, 24],
    )
