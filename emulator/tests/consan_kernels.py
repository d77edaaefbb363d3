"""Kernels in Gluon for what ConSan's tests ask for, each right with BUG="" and wrong otherwise."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma,
)
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from emulator.tests.gluon_kernels import grid2, operands

ROW = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
TILE = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))


# What TMA brings and takes.


@gluon.jit
def unwritten(y, BUG: gl.constexpr):
    cell = gl.allocate_shared_memory(gl.float32, [128], PLAIN)
    if BUG == "":
        cell.store(gl.arange(0, 128, ROW).to(gl.float32))
    gl.store(y + gl.arange(0, 128, ROW), cell.load(ROW))


@gluon.jit
def fetched(source, y, BUG: gl.constexpr):
    tile = gl.allocate_shared_memory(source.dtype, [32, 32], source.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    bytes: gl.constexpr = source.nbytes_per_cta
    if BUG == "16 bytes fewer":
        mbarrier.expect(bar, bytes - 16)
    elif BUG == "16 bytes more":
        mbarrier.expect(bar, bytes + 16)
    else:
        mbarrier.expect(bar, bytes)
    tma.async_load(source, [0, 0], bar, tile)
    if BUG != "waits late":
        mbarrier.wait(bar, 0)
    value = tile.load(TILE)
    if BUG == "waits late":
        mbarrier.wait(bar, 0)
    gl.store(y + grid2(32, 32, TILE), value)


@gluon.jit
def two_of_one_barrier(source, y, BUG: gl.constexpr):
    tiles = gl.allocate_shared_memory(source.dtype, [2, 32, 32], source.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, 2 * source.nbytes_per_cta)
    for i in range(2):
        tma.async_load(source, [0, 0], bar, tiles.index(i))
    if BUG == "":
        mbarrier.wait(bar, 0)
    total = tiles.index(0).load(TILE) + tiles.index(1).load(TILE)
    if BUG != "":
        mbarrier.wait(bar, 0)
    gl.store(y + grid2(32, 32, TILE), total)


@gluon.jit
def two_barriers(source, y, BUG: gl.constexpr):
    tiles = gl.allocate_shared_memory(source.dtype, [2, 32, 32], source.layout)
    bars = mbarrier.allocate_mbarrier(batch=2)
    for i in range(2):
        mbarrier.init(bars.index(i), count=1)
        mbarrier.expect(bars.index(i), source.nbytes_per_cta)
        tma.async_load(source, [0, 0], bars.index(i), tiles.index(i))
    if BUG != "the second only":
        mbarrier.wait(bars.index(0), 0)
    if BUG != "the first only":
        mbarrier.wait(bars.index(1), 0)
    total = tiles.index(0).load(TILE) + tiles.index(1).load(TILE)
    gl.store(y + grid2(32, 32, TILE), total)


@gluon.jit
def fetched_twice(source, y, BUG: gl.constexpr):
    """Two copies to one buffer."""
    tile = gl.allocate_shared_memory(source.dtype, [32, 32], source.layout)
    bars = mbarrier.allocate_mbarrier(batch=2)
    for i in range(2):
        mbarrier.init(bars.index(i), count=1)
        mbarrier.expect(bars.index(i), source.nbytes_per_cta)
        tma.async_load(source, [0, 0], bars.index(i), tile)
        if BUG == "":
            mbarrier.wait(bars.index(i), 0)
    if BUG == "waits for the first":
        mbarrier.wait(bars.index(0), 0)
    if BUG == "waits for the second":
        mbarrier.wait(bars.index(1), 0)
    gl.store(y + grid2(32, 32, TILE), tile.load(TILE))


@gluon.jit
def sent_twice(target, BUG: gl.constexpr):
    tiles = gl.allocate_shared_memory(target.dtype, [2, 32, 32], target.layout)
    value = gl.full([32, 32], 1.0, gl.float32, TILE)
    for i in range(2):
        tiles.index(i).store(value)
    fence_async_shared()
    for i in range(2):
        tma.async_store(target, [32 * i, 0], tiles.index(i))
    tma.store_wait(1)
    tiles.index(0).store(value + 1)
    if BUG == "":
        tma.store_wait(0)
    tiles.index(1).store(value + 1)
    tma.store_wait(0)


@gluon.jit
def grouped(x, y, BUG: gl.constexpr):
    """cp.async, the first buffer of two filled again."""
    stages = gl.allocate_shared_memory(gl.float32, [2, 128], PLAIN)
    i = gl.arange(0, 128, ROW)
    for k in range(2):
        async_copy.async_load(stages.index(k), x + i)
        async_copy.commit_group()
    async_copy.wait_group(1 if BUG == "" else 2)
    async_copy.async_load(stages.index(0), x + i)
    async_copy.commit_group()
    async_copy.wait_group(0)
    gl.store(y + i, stages.index(0).load(ROW) + stages.index(1).load(ROW))


# Matmuls.


@gluon.jit
def mma_and_more(source, a, b, y, KIND: gl.constexpr, BUG: gl.constexpr):
    """A matmul, and then a use of its operand or its accumulator."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    left, right = operands(a, b, 128)
    fence_async_shared()
    T: gl.constexpr = TensorMemoryLayout([128, 64], col_stride=1)
    acc = allocate_tensor_memory(gl.float32, [128, 64], T)
    bars = mbarrier.allocate_mbarrier(batch=2)
    mbarrier.init(bars.index(0), count=1)
    mbarrier.init(bars.index(1), count=1)
    tcgen05_mma(left, right, acc, use_acc=False)
    tcgen05_commit(bars.index(0))
    if BUG == "":
        mbarrier.wait(bars.index(0), 0)
    if KIND == "TMA load":
        mbarrier.expect(bars.index(1), source.nbytes_per_cta)
        tma.async_load(source, [0, 0], bars.index(1), left)
        mbarrier.wait(bars.index(1), 0)
    elif KIND == "cp.async":
        async_copy.async_load(left, a + grid2(128, 64, L))
        async_copy.commit_group()
        async_copy.wait_group(0)
    elif KIND == "store":
        left.store(gl.full([128, 64], 1.0, gl.float16, L))
    elif KIND == "load of accumulator":
        gl.store(y + grid2(128, 64, L), gl.convert_layout(acc.load(), L))
    else:
        acc.store(gl.full([128, 64], 1.0, gl.float32, acc.get_reg_layout()))
    if BUG != "":
        mbarrier.wait(bars.index(0), 0)


@gluon.jit
def copied_to_tensor_memory(x, y, KIND: gl.constexpr, BUG: gl.constexpr):
    T: gl.constexpr = TensorMemoryLayout([128, 32], col_stride=1)
    S: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 32], gl.int32)
    tensor = allocate_tensor_memory(gl.int32, [128, 32], T)
    shared = gl.allocate_shared_memory(gl.int32, [128, 32], S, gl.load(x + grid2(128, 32, TILE)))
    fence_async_shared()
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    tcgen05_copy(shared, tensor)
    tcgen05_commit(bar)
    if BUG == "":
        mbarrier.wait(bar, 0)
    if KIND == "store":
        shared.store(gl.full([128, 32], 1, gl.int32, TILE))
    else:
        gl.store(y + grid2(128, 32, TILE), gl.convert_layout(tensor.load(), TILE))
    if BUG != "":
        mbarrier.wait(bar, 0)


@gluon.jit
def two_accumulators(a, b, y, USED: gl.constexpr, WAITED: gl.constexpr):
    """Two matmuls with a barrier each and one for both; then one accumulator is stored to."""
    left, right = operands(a, b, 128)
    fence_async_shared()
    T: gl.constexpr = TensorMemoryLayout([128, 64], col_stride=1)
    acc = allocate_tensor_memory(gl.float32, [2, 128, 64], T)
    bars = mbarrier.allocate_mbarrier(batch=4)
    for i in range(4):
        mbarrier.init(bars.index(i), count=1)
    tcgen05_mma(
        left, right, acc.index(0), use_acc=False, mbarriers=[bars.index(3), bars.index(0)],
        mbarrier_preds=[False, True],
    )  # fmt: skip
    tcgen05_mma(left, right, acc.index(1), use_acc=False, mbarriers=[bars.index(1)])
    tcgen05_commit(bars.index(2))
    mbarrier.wait(bars.index(WAITED), 0)
    one = acc.index(USED)
    one.store(gl.full([128, 64], 1.0, gl.float32, one.get_reg_layout()))
    mbarrier.wait(bars.index(2), 0)


@gluon.jit
def rings(source, y, STAGES: gl.constexpr, AHEAD: gl.constexpr, TENSOR: gl.constexpr):
    """Six matmuls of tiles with themselves; TMA is AHEAD tiles ahead, one matmul is in flight."""
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    tiles = gl.allocate_shared_memory(gl.float16, [STAGES, 64, 64], source.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    done = mbarrier.allocate_mbarrier(batch=2)
    for i in range(STAGES):
        mbarrier.init(full.index(i), count=1)
    for i in range(2):
        mbarrier.init(done.index(i), count=1)
    if TENSOR:
        T: gl.constexpr = TensorMemoryLayout([64, 64], col_stride=1)
        acc = allocate_tensor_memory(gl.float32, [64, 64], T)
    else:
        acc = gl.zeros([64, 64], gl.float32, M)
    for i in range(6 + AHEAD):
        if i < 6:
            mbarrier.expect(full.index(i % STAGES), source.nbytes_per_cta)
            tma.async_load(source, [64 * i, 0], full.index(i % STAGES), tiles.index(i % STAGES))
        k = i - AHEAD
        if k >= 0:
            tile = tiles.index(k % STAGES)
            mbarrier.wait(full.index(k % STAGES), (k // STAGES) & 1)
            if TENSOR:
                tcgen05_mma(tile, tile, acc, use_acc=k > 0, mbarriers=[done.index(k % 2)])
                if k > 0:
                    mbarrier.wait(done.index((k - 1) % 2), ((k - 1) // 2) & 1)
            else:
                acc = warpgroup_mma(tile, tile, acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[acc])
    if TENSOR:
        mbarrier.wait(done.index(1), 0)
        gl.store(y + grid2(64, 64, TILE), gl.convert_layout(acc.load(), TILE))
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
        gl.store(y + grid2(64, 64, M), acc)


@gluon.jit
def wgmmas(a, b, y, BUG: gl.constexpr):
    """The operand of both matmuls is stored to."""
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    left, right = operands(a, b, 64)
    one = gl.full([64, 64], 1.0, gl.float16, L)
    acc = gl.zeros([64, 64], gl.float32, M)
    acc = warpgroup_mma(left, right, acc, is_async=True)
    if BUG == "none done":
        left.store(one)
    acc = warpgroup_mma(left, right, acc, is_async=True)
    acc = warpgroup_mma_wait(1, deps=[acc])
    if BUG == "one done":
        left.store(one)
    acc = warpgroup_mma_wait(0, deps=[acc])
    left.store(one)
    gl.store(y + grid2(64, 64, M), acc)


@gluon.jit
def allocated_again(a, b, y, BUG: gl.constexpr):
    """An operand of a matmul is allocated and filled in each turn of a loop."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    left, right = operands(a, b, 128)
    S: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 64], gl.float16)
    T: gl.constexpr = TensorMemoryLayout([128, 64], col_stride=1)
    acc = allocate_tensor_memory(gl.float32, [128, 64], T)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    for k in range(4):
        value = gl.load(a + grid2(128, 64, L))
        tile = gl.allocate_shared_memory(gl.float16, [128, 64], S, value)
        fence_async_shared()
        tcgen05_mma(tile, right, acc, use_acc=k > 0)
        if BUG == "":
            tcgen05_commit(bar)
            mbarrier.wait(bar, k & 1)
    if BUG != "":
        tcgen05_commit(bar)
        mbarrier.wait(bar, 0)


# Partitions. A cell is a row of shared memory.


@gluon.jit
def writes(cell, bars, BEFORE: gl.constexpr, AFTER: gl.constexpr):
    """Waits for each barrier of BEFORE, stores, arrives at each of AFTER."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for k in gl.static_range(len(BEFORE)):
        mbarrier.wait(bars.index(BEFORE[k]), 0)
    cell.store(gl.arange(0, 128, L).to(gl.float32))
    for k in gl.static_range(len(AFTER)):
        mbarrier.arrive(bars.index(AFTER[k]))


@gluon.jit
def reads(cell, kept, bars, BEFORE: gl.constexpr, AFTER: gl.constexpr):
    """Waits for each barrier of BEFORE, loads, arrives at each of AFTER."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for k in gl.static_range(len(BEFORE)):
        mbarrier.wait(bars.index(BEFORE[k]), 0)
    value = cell.load(L)
    for k in gl.static_range(len(AFTER)):
        mbarrier.arrive(bars.index(AFTER[k]))
    kept.store(value)


@gluon.jit
def cells_of(bars, COUNTS: gl.constexpr):
    cells = gl.allocate_shared_memory(gl.float32, [4, 128], PLAIN)
    for k in gl.static_range(len(COUNTS)):
        mbarrier.init(bars.index(k), count=COUNTS[k])
    return cells


@gluon.jit
def store_then_load(y, BUG: gl.constexpr):
    bars = mbarrier.allocate_mbarrier(batch=2)
    cells = cells_of(bars, (1, 1))
    early: gl.constexpr = (0,) if BUG == "" else ()
    gl.warp_specialize(
        [
            (reads, (cells.index(0), cells.index(1), bars, early, (1,))),
            (writes, (cells.index(0), bars, (), (0,))),
        ],
        [4],
        [32],
    )
    mbarrier.wait(bars.index(1), 0)
    gl.store(y + gl.arange(0, 128, ROW), cells.index(1).load(ROW))


@gluon.jit
def load_then_store(y, BUG: gl.constexpr):
    bars = mbarrier.allocate_mbarrier(batch=2)
    cells = cells_of(bars, (1, 1))
    cells.index(0).store(gl.zeros([128], gl.float32, ROW))
    early: gl.constexpr = (0,) if BUG == "" else ()
    gl.warp_specialize(
        [
            (writes, (cells.index(0), bars, early, (1,))),
            (reads, (cells.index(0), cells.index(1), bars, (), (0,))),
        ],
        [4],
        [32],
    )
    mbarrier.wait(bars.index(1), 0)
    gl.store(y + gl.arange(0, 128, ROW), cells.index(0).load(ROW))


@gluon.jit
def two_readers(y, WARPS: gl.constexpr, BUG: gl.constexpr):
    """A cell is stored to when two others have loaded it; each has a barrier."""
    bars = mbarrier.allocate_mbarrier(batch=3)
    cells = cells_of(bars, (1, 1, 1))
    cells.index(0).store(gl.zeros([128], gl.float32, ROW))
    if BUG == "not for the first":
        early: gl.constexpr = (1,)
    elif BUG == "not for the second":
        early: gl.constexpr = (0,)
    else:
        early: gl.constexpr = (0, 1)
    gl.warp_specialize(
        [
            (reads, (cells.index(0), cells.index(1), bars, (), (0,))),
            (reads, (cells.index(0), cells.index(2), bars, (), (1,))),
            (writes, (cells.index(0), bars, early, (2,))),
        ],
        WARPS,
        (32, 32),
    )
    mbarrier.wait(bars.index(2), 0)
    gl.store(y + gl.arange(0, 128, ROW), cells.index(0).load(ROW))


@gluon.jit
def two_readers_of_one_barrier(y, BUG: gl.constexpr):
    bars = mbarrier.allocate_mbarrier(batch=2)
    cells = cells_of(bars, (2, 1))
    cells.index(0).store(gl.zeros([128], gl.float32, ROW))
    early: gl.constexpr = (0,) if BUG == "" else ()
    gl.warp_specialize(
        [
            (reads, (cells.index(0), cells.index(1), bars, (), (0,))),
            (reads, (cells.index(0), cells.index(2), bars, (), (0,))),
            (writes, (cells.index(0), bars, early, (1,))),
        ],
        [4, 4],
        [32, 32],
    )
    mbarrier.wait(bars.index(1), 0)
    gl.store(y + gl.arange(0, 128, ROW), cells.index(0).load(ROW))


@gluon.jit
def reads_on(cell, kept, bars, FULL: gl.constexpr, EMPTY: gl.constexpr, WAITS: gl.constexpr):
    """Ten times: waits for FULL, loads, arrives at each of EMPTY."""
    total = gl.zeros([128], gl.float32, ROW)
    for i in range(10):
        if WAITS:
            mbarrier.wait(bars.index(FULL), i & 1)
        total += cell.load(ROW)
        for k in gl.static_range(len(EMPTY)):
            mbarrier.arrive(bars.index(EMPTY[k]))
    kept.store(total)


@gluon.jit
def writes_on(cell, bars, EMPTY: gl.constexpr, FULL: gl.constexpr):
    """Ten times: waits for each of EMPTY, stores, arrives at each of FULL."""
    for i in range(10):
        for k in gl.static_range(len(EMPTY)):
            mbarrier.wait(bars.index(EMPTY[k]), i & 1)
        cell.store(gl.arange(0, 128, ROW).to(gl.float32))
        for k in gl.static_range(len(FULL)):
            mbarrier.arrive(bars.index(FULL[k]))


@gluon.jit
def readers_in_loops(BUG: gl.constexpr):
    """One writer, two readers: barriers 0, 1 say that a reader is done, 2, 3 that the cell is."""
    bars = mbarrier.allocate_mbarrier(batch=4)
    cells = cells_of(bars, (1, 1, 1, 1))
    mbarrier.arrive(bars.index(0))
    mbarrier.arrive(bars.index(1))
    if BUG == "not for 0":
        empty: gl.constexpr = (1,)
    elif BUG == "not for 1":
        empty: gl.constexpr = (0,)
    else:
        empty: gl.constexpr = (0, 1)
    gl.warp_specialize(
        [
            (reads_on, (cells.index(0), cells.index(1), bars, 2, (0,), BUG != "not for 2")),
            (reads_on, (cells.index(0), cells.index(2), bars, 3, (1,), BUG != "not for 3")),
            (writes_on, (cells.index(0), bars, empty, (2, 3))),
        ],
        [4, 4],
        [32, 32],
    )


@gluon.jit
def two_producers(BUG: gl.constexpr):
    """Two cells with a writer and a reader each, who all wait for both of the other kind."""
    bars = mbarrier.allocate_mbarrier(batch=3)
    cells = cells_of(bars, (2, 2, 2))
    mbarrier.arrive(bars.index(1), count=2)
    mbarrier.arrive(bars.index(2), count=2)
    gl.warp_specialize(
        [
            (writes_on, (cells.index(0), bars, (1,), (0,))),
            (writes_on, (cells.index(1), bars, (2,), (0,))),
            (reads_on, (cells.index(0), cells.index(2), bars, 0, (1, 2), BUG != "first")),
            (reads_on, (cells.index(1), cells.index(3), bars, 0, (1, 2), BUG != "second")),
        ],
        [4, 4, 4],
        [32, 32, 32],
    )


@gluon.jit
def writes_two(cells, bars):
    for i in range(10):
        mbarrier.wait(bars.index(2), (i & 1) ^ 1)
        for k in range(2):
            cells.index(k).store(gl.arange(0, 128, ROW).to(gl.float32))
            mbarrier.arrive(bars.index(k))


@gluon.jit
def reads_one(cells, bars, WHICH: gl.constexpr):
    total = gl.zeros([128], gl.float32, ROW)
    for i in range(10):
        mbarrier.wait(bars.index(0), i & 1)
        total += cells.index(WHICH).load(ROW)
        mbarrier.wait(bars.index(1), i & 1)
        mbarrier.arrive(bars.index(2))
    cells.index(2).store(total)


@gluon.jit
def in_order(BUG: gl.constexpr):
    """The first barrier announces the first of two cells, not yet the second."""
    bars = mbarrier.allocate_mbarrier(batch=3)
    cells = cells_of(bars, (1, 1, 1))
    which: gl.constexpr = 0 if BUG == "" else 1
    gl.warp_specialize([(writes_two, (cells, bars)), (reads_one, (cells, bars, which))], [4], [32])


@gluon.jit
def copies_on(x, cells, OWN: gl.constexpr, READ: gl.constexpr):
    i = gl.arange(0, 128, ROW)
    async_copy.async_load(cells.index(OWN), x + i)
    async_copy.commit_group()
    total = gl.zeros([128], gl.float32, ROW)
    for k in range(1, 10):
        if k < 9:
            async_copy.async_load(cells.index(OWN + k % 2), x + i)
            async_copy.commit_group()
            async_copy.wait_group(1)
        else:
            async_copy.wait_group(0)
        total += cells.index(READ + (k - 1) % 2).load(ROW)
    cells.index(OWN).store(total)


@gluon.jit
def copies_apart(x, BUG: gl.constexpr):
    """Each partition fills two cells by cp.async, and waits for its own groups."""
    cells = gl.allocate_shared_memory(gl.float32, [4, 128], PLAIN)
    read: gl.constexpr = 2 if BUG == "" else 0
    gl.warp_specialize([(copies_on, (x, cells, 0, 0)), (copies_on, (x, cells, 2, read))], [4], [32])


@gluon.jit
def copies_two(x, cells, bars):
    i = gl.arange(0, 128, ROW)
    for k in range(2):
        async_copy.async_load(cells.index(k), x + i)
        async_copy.commit_group()
    async_copy.wait_group(1)
    mbarrier.arrive(bars.index(0))
    async_copy.wait_group(0)


@gluon.jit
def copied_for_others(x, BUG: gl.constexpr):
    """The arrival stands for the first of two groups."""
    bars = mbarrier.allocate_mbarrier(batch=1)
    cells = cells_of(bars, (1,))
    which: gl.constexpr = 0 if BUG == "" else 1
    gl.warp_specialize(
        [
            (copies_two, (x, cells, bars)),
            (reads, (cells.index(which), cells.index(2), bars, (0,), ())),
        ],
        [4],
        [32],
    )


@gluon.jit
def multiplies(left, right, bars):
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    acc = gl.zeros([64, 64], gl.float32, M)
    for k in gl.static_range(2):
        acc = warpgroup_mma(left.index(k), right, acc, is_async=True)
    acc = warpgroup_mma_wait(1, deps=[acc])
    mbarrier.arrive(bars.index(0))
    warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def overwrites(left, bars, WHICH: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    mbarrier.wait(bars.index(0), 0)
    left.index(WHICH).store(gl.full([64, 64], 1.0, gl.float16, L))


@gluon.jit
def multiplied_for_others(BUG: gl.constexpr):
    """The arrival stands for the first of two matmuls."""
    S: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    left = gl.allocate_shared_memory(gl.float16, [2, 64, 64], S)
    right = gl.allocate_shared_memory(gl.float16, [64, 64], S)
    right.store(gl.full([64, 64], 1.0, gl.float16, L))
    for k in range(2):
        left.index(k).store(gl.full([64, 64], 1.0, gl.float16, L))
    fence_async_shared()
    bars = mbarrier.allocate_mbarrier(batch=1)
    mbarrier.init(bars.index(0), count=1)
    which: gl.constexpr = 0 if BUG == "" else 1
    gl.warp_specialize(
        [(multiplies, (left, right, bars)), (overwrites, (left, bars, which))], [4], [32]
    )


# Views of one memory.


@gluon.jit
def writes_view(view, bars, COLUMNS: gl.constexpr):
    view.store(gl.full([32, COLUMNS], 1.0, gl.float32, TILE))
    mbarrier.arrive(bars.index(0))


@gluon.jit
def reads_view(view, kept, bars, WAITS: gl.constexpr):
    if WAITS:
        mbarrier.wait(bars.index(0), 0)
    kept.store(view.load(TILE))


@gluon.jit
def slices(OVERLAP: gl.constexpr, WAITS: gl.constexpr):
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    both = gl.allocate_shared_memory(gl.float32, [32, 64], S)
    both.store(gl.zeros([32, 64], gl.float32, TILE))
    kept = gl.allocate_shared_memory(gl.float32, [32, 32], S)
    bars = mbarrier.allocate_mbarrier(batch=1)
    mbarrier.init(bars.index(0), count=1)
    left = both if OVERLAP else both.slice(0, 32, dim=1)
    columns: gl.constexpr = 64 if OVERLAP else 32
    gl.warp_specialize(
        [
            (writes_view, (left, bars, columns)),
            (reads_view, (both.slice(32, 32, dim=1), kept, bars, WAITS)),
        ],
        [4],
        [32],
    )


@gluon.jit
def copies_view(x, view, bars, COLUMNS: gl.constexpr, WAITS: gl.constexpr):
    async_copy.async_load(view, x + grid2(32, COLUMNS, TILE))
    async_copy.commit_group()
    if WAITS:
        async_copy.wait_group(0)
    mbarrier.arrive(bars.index(0))
    async_copy.wait_group(0)


@gluon.jit
def stores_view(view, bars):
    mbarrier.wait(bars.index(0), 0)
    view.store(gl.full([32, 32], 1.0, gl.float32, TILE))


@gluon.jit
def copied_slices(x, OVERLAP: gl.constexpr, WAITS: gl.constexpr):
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    both = gl.allocate_shared_memory(gl.float32, [32, 64], S)
    bars = mbarrier.allocate_mbarrier(batch=1)
    mbarrier.init(bars.index(0), count=1)
    left = both if OVERLAP else both.slice(0, 32, dim=1)
    columns: gl.constexpr = 64 if OVERLAP else 32
    gl.warp_specialize(
        [
            (copies_view, (x, left, bars, columns, WAITS)),
            (stores_view, (both.slice(32, 32, dim=1), bars)),
        ],
        [4],
        [32],
    )


@gluon.jit
def reads_columns(view, kept, bars):
    kept.store(gl.convert_layout(view.load(), TILE))
    mbarrier.arrive(bars.index(0))


@gluon.jit
def writes_columns(view, bars, WAITS: gl.constexpr):
    if WAITS:
        mbarrier.wait(bars.index(0), 0)
    view.store(gl.full([128, 32], 1.0, gl.float32, view.get_reg_layout()))


@gluon.jit
def columns(BUG: gl.constexpr):
    """Slices of tensor memory, which have columns in common."""
    T: gl.constexpr = TensorMemoryLayout([128, 128], col_stride=1)
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    tensor = allocate_tensor_memory(gl.float32, [128, 128], T)
    tensor.store(gl.full([128, 128], 0.0, gl.float32, tensor.get_reg_layout()))
    kept = gl.allocate_shared_memory(gl.float32, [128, 64], S)
    bars = mbarrier.allocate_mbarrier(batch=1)
    mbarrier.init(bars.index(0), count=1)
    gl.warp_specialize(
        [
            (reads_columns, (tensor.slice(0, 64), kept, bars)),
            (writes_columns, (tensor.slice(32, 32), bars, BUG == "")),
        ],
        [4],
        [32],
    )


@gluon.jit
def refills(source, whole, tail, bars):
    whole.store(gl.full([32, 64], 1.0, gl.float32, TILE))
    fence_async_shared()
    mbarrier.expect(bars.index(0), source.nbytes_per_cta)
    tma.async_load(source, [0, 0], bars.index(0), tail)


@gluon.jit
def refilled_slice(source, BUG: gl.constexpr):
    """A warp that waits for a copy to a slice may read it, whatever else stored to the whole."""
    S: gl.constexpr = gl.NVMMASharedLayout.get_default_for([32, 64], gl.float32)
    whole = gl.allocate_shared_memory(gl.float32, [32, 64], S)
    kept = gl.allocate_shared_memory(gl.float32, [32, 32], source.layout)
    bars = mbarrier.allocate_mbarrier(batch=1)
    mbarrier.init(bars.index(0), count=1)
    tail = whole.slice(32, 32, dim=1)
    gl.warp_specialize(
        [
            (refills, (source, whole, tail, bars)),
            (reads_view, (tail, kept, bars, BUG == "")),
        ],
        [4],
        [32],
    )


# Barriers.


@gluon.jit
def passes(bars):
    pass


@gluon.jit
def meets(bars, ARRIVED: gl.constexpr, WAITED: gl.constexpr, PARITY: gl.constexpr):
    """Arrives at each barrier of ARRIVED, then waits for each of WAITED."""
    for k in gl.static_range(len(ARRIVED)):
        mbarrier.arrive(bars.index(ARRIVED[k]))
    for k in gl.static_range(len(WAITED)):
        mbarrier.wait(bars.index(WAITED[k]), PARITY)


@gluon.jit
def waits_then_arrives(bars):
    mbarrier.wait(bars.index(0), 0)
    mbarrier.arrive(bars.index(0))


@gluon.jit
def meeting(BUG: gl.constexpr):
    """Two partitions arrive at each other's barrier."""
    bars = mbarrier.allocate_mbarrier(batch=2)
    count: gl.constexpr = 2 if BUG == "counts of two" else 1
    for k in range(2):
        mbarrier.init(bars.index(k), count=count)
    first: gl.constexpr = () if BUG == "nobody arrives" else (1,)
    second: gl.constexpr = () if BUG == "nobody arrives" else (0,)
    gl.warp_specialize(
        [(meets, (bars, first, (0,), 0)), (meets, (bars, second, (1,), 0))], [4], [32]
    )


@gluon.jit
def left_alone(BUG: gl.constexpr):
    """Whoever would arrive has returned."""
    bars = mbarrier.allocate_mbarrier(batch=2)
    for k in range(2):
        mbarrier.init(bars.index(k), count=1)
    arrived: gl.constexpr = (0, 1) if BUG == "" else (1,)
    gl.warp_specialize(
        [
            (passes, (bars,)),
            (meets, (bars, (), (0,), 0)),
            (meets, (bars, arrived, (), 0)),
        ],
        [4, 4],
        [32, 32],
    )


@gluon.jit
def three_of_one_warp(BUG: gl.constexpr):
    bars = mbarrier.allocate_mbarrier(batch=1)
    mbarrier.init(bars.index(0), count=1)
    if BUG == "":
        mbarrier.arrive(bars.index(0))
    gl.warp_specialize(
        [
            (passes, (bars,)),
            (meets, (bars, (), (0,), 0)),
            (meets, (bars, (), (0,), 0)),
            (meets, (bars, (), (0,), 0)),
        ],
        [1, 1, 1],
        [32, 32, 32],
    )


@gluon.jit
def phases(BUG: gl.constexpr):
    """One waits for the first phase and completes the second, the other waits for that."""
    bars = mbarrier.allocate_mbarrier(batch=1)
    mbarrier.init(bars.index(0), count=1)
    mbarrier.arrive(bars.index(0))
    if BUG == "":
        gl.warp_specialize([(waits_then_arrives, (bars,)), (meets, (bars, (), (0,), 1))], [4], [32])
    else:
        gl.warp_specialize([(passes, (bars,)), (meets, (bars, (), (0,), 1))], [4], [32])


@gluon.jit
def counted(BUG: gl.constexpr):
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    if BUG == "two at once":
        mbarrier.arrive(bar, count=2)
    else:
        mbarrier.arrive(bar)
    if BUG == "two phases":
        mbarrier.arrive(bar)
    mbarrier.wait(bar, 0)


@gluon.jit
def fetches_own(source, tiles, bars, K: gl.constexpr):
    mbarrier.expect(bars.index(K), source.nbytes_per_cta)
    tma.async_load(source, [0, 0], bars.index(K), tiles.index(K))
    mbarrier.wait(bars.index(K), 0)


@gluon.jit
def fetching(source, BUG: gl.constexpr):
    """All partitions wait, and TMA completes their barriers."""
    tiles = gl.allocate_shared_memory(source.dtype, [2, 32, 32], source.layout)
    bars = mbarrier.allocate_mbarrier(batch=2)
    for k in range(2):
        mbarrier.init(bars.index(k), count=1 if BUG == "" else 2)
    gl.warp_specialize(
        [(fetches_own, (source, tiles, bars, 0)), (fetches_own, (source, tiles, bars, 1))],
        [4],
        [32],
    )


@gluon.jit
def lifetime(USE: gl.constexpr, BUG: gl.constexpr):
    """A barrier is used before its init, or after its end."""
    bar = mbarrier.allocate_mbarrier()
    if BUG != "no init":
        mbarrier.init(bar, count=1)
    if BUG == "init twice":
        mbarrier.init(bar, count=1)
    if BUG == "after invalidate":
        mbarrier.invalidate(bar)
    if USE == "wait":
        mbarrier.wait(bar, 1)
    elif USE == "arrive":
        mbarrier.arrive(bar)
    elif USE == "expect":
        mbarrier.expect(bar, 1024)
        mbarrier.expect(bar, 0)
    mbarrier.invalidate(bar)
    if BUG == "":
        mbarrier.init(bar, count=1)
        mbarrier.invalidate(bar)
