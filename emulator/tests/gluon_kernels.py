"""Kernels in Gluon, each right with BUG="", and with the mistake that BUG names otherwise."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
    clc,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma,
    tcgen05_mma_scaled,
)
from triton.experimental.gluon.language.nvidia.blackwell import (
    tma as blackwell_tma,
)
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def grid2(ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    return rows[:, None] * COLUMNS + columns[None, :]


@gluon.jit
def cp_async(x, y, BUG: gl.constexpr):
    """y = x of 256, in two stages."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    stages = gl.allocate_shared_memory(gl.float32, [2, 128], S)
    i = gl.arange(0, 128, L)
    async_copy.async_load(stages.index(0), x + i)
    if BUG != "one group":
        async_copy.commit_group()
    async_copy.async_load(stages.index(1), x + 128 + i)
    if BUG != "no commit":
        async_copy.commit_group()
    if BUG == "no wait":
        gl.store(y + i, stages.index(0).load(L))
    async_copy.wait_group(1)
    gl.store(y + i, stages.index(0).load(L))
    if BUG != "waits for one":
        async_copy.wait_group(0)
    gl.store(y + 128 + i, stages.index(1).load(L))


@gluon.jit
def tma_copy(source, target, BUG: gl.constexpr):
    """target = source of [32, 64], in tiles of [32, 32], through one buffer."""
    tile = gl.allocate_shared_memory(source.dtype, source.block_type.shape, source.layout)
    bar = mbarrier.allocate_mbarrier()
    if BUG != "no init":
        mbarrier.init(bar, count=2 if BUG == "count of two" else 1)
    if BUG == "two inits":
        mbarrier.init(bar, count=1)
    for i in range(2):
        bytes: gl.constexpr = source.nbytes_per_cta
        if BUG != "no expect":
            mbarrier.expect(bar, bytes - 128 if BUG == "too few bytes" else bytes)
        if BUG == "too many bytes":
            mbarrier.expect(bar, 128)
        tma.async_load(source, [0, 32 * i], bar, tile)
        if BUG == "parity":
            mbarrier.wait(bar, (i & 1) ^ 1)
        elif BUG != "no wait":
            mbarrier.wait(bar, 0 if BUG == "phase stays" else i & 1)
        tma.async_store(target, [0, 32 * i], tile)
        if BUG != "no store wait":
            tma.store_wait(1 if BUG == "one store in flight" else 0)
    mbarrier.invalidate(bar)
    if BUG == "after invalidate":
        mbarrier.wait(bar, 1)


@gluon.jit
def store_tile(tile, full, empty, x, BUG: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [1, 1], [1, 0])
    for i in range(3):
        if BUG != "no empty wait":
            mbarrier.wait(empty, (i & 1) ^ 1)
        if BUG == "arrives early":
            mbarrier.arrive(full)
        tile.store(gl.load(x + i * 1024 + grid2(32, 32, L)))
        if BUG != "no fence" and BUG != "fence after arrive" and BUG != "fence of consumer":
            fence_async_shared()
        if BUG != "no arrive" and BUG != "arrives early":
            mbarrier.arrive(full, count=2 if BUG == "arrives twice" else 1)
        if BUG == "fence after arrive":
            fence_async_shared()


@gluon.jit
def send_tile(target, tile, full, empty, BUG: gl.constexpr):
    for i in range(3):
        if BUG != "no full wait":
            mbarrier.wait(full, i & 1)
        if BUG == "fence of consumer":
            fence_async_shared()
        tma.async_store(target, [32 * i, 0], tile)
        if BUG != "no store wait":
            tma.store_wait(0)
        if BUG != "no empty arrive":
            mbarrier.arrive(empty)
    tma.store_wait(0)


@gluon.jit
def stored_and_sent(target, x, BUG: gl.constexpr):
    """target = x of [96, 32]: a worker stores tiles, the default partition sends them."""
    tile = gl.allocate_shared_memory(target.dtype, [32, 32], target.layout)
    full = mbarrier.allocate_mbarrier()
    empty = mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    gl.warp_specialize(
        [
            (send_tile, (target, tile, full, empty, BUG)),
            (store_tile, (tile, full, empty, x, BUG)),
        ],
        [1],
        [24],
    )


@gluon.jit
def fetch_tile(source, tile, full, empty, BUG: gl.constexpr):
    for i in range(3):
        mbarrier.wait(empty, (i & 1) ^ 1)
        mbarrier.expect(full, source.nbytes_per_cta)
        tma.async_load(source, [32 * i, 0], full, tile)


@gluon.jit
def read_tile(tile, full, empty, y, BUG: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    for i in range(3):
        mbarrier.wait(full, i & 1)
        if BUG == "arrives early":
            mbarrier.arrive(empty)
        value = tile.load(L)
        if BUG != "no fence":
            fence_async_shared()
        if BUG != "arrives early":
            mbarrier.arrive(empty)
        gl.store(y + i * 1024 + grid2(32, 32, L), value)


@gluon.jit
def fetched_and_read(source, y, BUG: gl.constexpr):
    """y = source of [96, 32]: a worker fetches tiles, the default partition reads them."""
    tile = gl.allocate_shared_memory(source.dtype, [32, 32], source.layout)
    full = mbarrier.allocate_mbarrier()
    empty = mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    gl.warp_specialize(
        [
            (read_tile, (tile, full, empty, y, BUG)),
            (fetch_tile, (source, tile, full, empty, BUG)),
        ],
        [1],
        [24],
    )


@gluon.jit
def no_such_barrier(flag, y):
    """An index may be of no barrier if nothing is performed there."""
    bars = mbarrier.allocate_mbarrier(batch=2)
    mbarrier.init(bars.index(0), count=1)
    mbarrier.arrive(bars.index(-1), count=1, pred=flag > 0)
    mbarrier.arrive(bars.index(0), count=1)
    mbarrier.wait(bars.index(0), 0)
    gl.store(y, 1)


@gluon.jit
def mixed(y, CONVERT: gl.constexpr):
    """y = 2 i, of two layouts."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    R: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    i = gl.arange(0, 512, L)
    j = gl.arange(0, 512, R)
    if CONVERT:
        j = gl.convert_layout(j, L)
    gl.store(y + i, i + j)


@gluon.jit
def operands(a, b, ROWS: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    S: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, 64], gl.float16)
    T: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.float16)
    left = gl.allocate_shared_memory(gl.float16, [ROWS, 64], S, gl.load(a + grid2(ROWS, 64, L)))
    right = gl.allocate_shared_memory(gl.float16, [64, 64], T, gl.load(b + grid2(64, 64, L)))
    return left, right


@gluon.jit
def wgmma(a, b, y, BUG: gl.constexpr):
    """y = 2 a @ b of [64, 64]."""
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    left, right = operands(a, b, 64)
    acc = gl.zeros([64, 64], gl.float32, M)
    acc = warpgroup_mma(left, right, acc, use_acc=False, is_async=True)
    acc = warpgroup_mma(left, right, acc, is_async=BUG != "")
    if BUG == "operand stored":
        left.store(gl.full([64, 64], 1.0, gl.float16, L))
    if BUG == "one in flight":
        acc = warpgroup_mma_wait(1, deps=[acc])
    elif BUG != "no wait":
        acc = warpgroup_mma_wait(0, deps=[acc])
    gl.store(y + grid2(64, 64, M), acc)


@gluon.jit
def transposed(a, b, y, BUG: gl.constexpr):
    """y = a @ b^T of [64, 64], with a in registers."""
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    left, right = operands(a, b, 64)
    gl.static_assert(isinstance(left.type.layout, gl.NVMMASharedLayout))
    acc = gl.zeros([64, 64], gl.float32, M)
    acc = warpgroup_mma(left.load(A), right.permute((1, 0)), acc)
    gl.store(y + grid2(64, 64, M), acc)


@gluon.jit
def tcgen05(a, b, y, BUG: gl.constexpr):
    """y = 2 a @ b of [128, 64]."""
    T: gl.constexpr = TensorMemoryLayout([128, 64], col_stride=1)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    left, right = operands(a, b, 128)
    acc = allocate_tensor_memory(gl.float32, [128, 64], T)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    tcgen05_mma(left, right, acc, use_acc=False)
    if BUG == "commit too early":
        tcgen05_commit(bar)
    tcgen05_mma(left, right, acc)
    if BUG != "no commit" and BUG != "commit too early":
        tcgen05_commit(bar)
    if BUG == "operand stored":
        left.store(gl.full([128, 64], 1.0, gl.float16, L))
    if BUG != "no wait":
        mbarrier.wait(bar, 0)
    value = acc.load()
    gl.store(y + grid2(128, 64, L), gl.convert_layout(value, L))


@gluon.jit
def allocated_in_loop(source, y, BUG: gl.constexpr):
    """y = source of [160, 128], a buffer of 64 KiB for each of five tiles."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    for i in range(5):
        tile = gl.allocate_shared_memory(gl.float32, [128, 128], source.layout)
        mbarrier.expect(bar, source.nbytes_per_cta)
        tma.async_load(source, [128 * i, 0], bar, tile)
        mbarrier.wait(bar, i & 1)
        gl.store(y + i * 16384 + grid2(128, 128, L), tile.load(L))


@gluon.jit
def used_again(source, target, BUG: gl.constexpr):
    """target = source of [128, 32], through a buffer of its own for each of four tiles."""
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    for i in range(4):
        tile = gl.allocate_shared_memory(gl.float32, [32, 32], source.layout)
        mbarrier.expect(bar, source.nbytes_per_cta)
        tma.async_load(source, [32 * i, 0], bar, tile)
        mbarrier.wait(bar, i & 1)
        tma.async_store(target, [32 * i, 0], tile)
        if BUG == "":
            tma.store_wait(0)
    tma.store_wait(0)


@gluon.jit
def waits(bar):
    mbarrier.wait(bar, 0)


@gluon.jit
def invalidates(bar, BUG: gl.constexpr):
    if BUG == "":
        mbarrier.arrive(bar)
        mbarrier.wait(bar, 0)
    else:
        mbarrier.invalidate(bar)
        mbarrier.init(bar, count=1)
        mbarrier.arrive(bar)


@gluon.jit
def invalidated(y, BUG: gl.constexpr):
    """A barrier that another partition waits for, or will."""
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    gl.warp_specialize([(invalidates, (bar, BUG)), (waits, (bar,))], [1], [24])
    gl.store(y, 1)


@gluon.jit
def backwards(x, y, FIRST: gl.constexpr):
    """y = x of 64, backwards, through shared memory of which nobody writes the rest."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared = gl.allocate_shared_memory(gl.float32, [128], S)
    i = gl.arange(0, 64, L)
    shared.scatter(gl.load(x + i), FIRST + 63 - i, axis=0)
    gl.store(y + i, shared.gather(FIRST + i, axis=0))


@gluon.jit
def gathered(rows, source, target, BUG: gl.constexpr):
    """target[rows] = source[rows] of [64, 32], in two tiles of 32 rows, through one buffer."""
    L: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 4], [32, 1], [1, 4], [1, 0]))
    tile = gl.allocate_shared_memory(source.dtype, [32, 32], source.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    for i in range(2):
        these = gl.load(rows + 32 * i + gl.arange(0, 32, L))
        mbarrier.expect(bar, source.nbytes_per_cta if BUG == "bytes of one row" else 4096)
        blackwell_tma.async_gather(source, these, 0, bar, tile)
        if BUG != "no wait":
            mbarrier.wait(bar, i & 1)
        blackwell_tma.async_scatter(target, these, 0, tile)
        if BUG != "no store wait":
            tma.store_wait(0)


@gluon.jit
def taken_over(y, BUG: gl.constexpr):
    """y[i] = i + 1 of 8 programs, by those that have started."""
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    response = gl.allocate_shared_memory(gl.int64, [2], S)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    tile = gl.program_id(0)
    more = gl.to_tensor(True)
    phase = gl.to_tensor(0)
    while more:
        clc.try_cancel(response, bar)
        if BUG != "no expect":
            mbarrier.expect(bar, 16)
        gl.store(y + tile, tile + 1)
        if BUG != "no wait":
            mbarrier.wait(bar, phase)
        answer = clc.load_result(response)
        more = answer.is_canceled()
        tile = answer.program_id(0)
        phase ^= 1


@gluon.jit
def scaled(a, b, a_scale, b_scale, y, BUG: gl.constexpr):
    """y = a @ b^T of [128, 128], of fp8 and a factor for each 32 elements.

    The factors of b reach tensor memory by way of shared memory, where they lie permuted.
    """
    T: gl.constexpr = TensorMemoryLayout([128, 128], col_stride=1)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    C: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    P: gl.constexpr = gl.NVMMASharedLayout(0, 8, rank=5)
    S: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, 128], gl.float8e4nv)
    left = gl.allocate_shared_memory(gl.float8e4nv, [128, 128], S, gl.load(a + grid2(128, 128, L)))
    right = gl.allocate_shared_memory(gl.float8e4nv, [128, 128], S, gl.load(b + grid2(128, 128, L)))
    acc = allocate_tensor_memory(gl.float32, [128, 128], T)
    left_scale = allocate_tensor_memory(gl.uint8, [128, 4], TensorMemoryScalesLayout())
    right_scale = allocate_tensor_memory(gl.uint8, [128, 4], TensorMemoryScalesLayout())
    factors = gl.load(a_scale + grid2(128, 4, C))
    left_scale.store(gl.convert_layout(factors, left_scale.get_reg_layout()))
    permuted = gl.load(b_scale + grid2(32, 16, C))
    stored = gl.allocate_shared_memory(gl.uint8, [1, 1, 32, 4, 4], P)
    stored.reshape((32, 16)).store(permuted)
    tcgen05_copy(stored.permute((0, 3, 2, 1, 4)).reshape((128, 4)), right_scale)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    if BUG == "commit too early":
        tcgen05_commit(bar)
    tcgen05_mma_scaled(
        left, right.permute((1, 0)), acc, left_scale, right_scale, "e4m3", "e4m3", use_acc=False
    )
    if BUG != "commit too early":
        tcgen05_commit(bar)
    if BUG == "factors stored":
        left_scale.store(gl.convert_layout(factors, left_scale.get_reg_layout()))
    mbarrier.wait(bar, 0)
    gl.store(y + grid2(128, 128, L), gl.convert_layout(acc.load(), L))


@gluon.jit
def read_only(tile, full, empty, y, LAYOUT: gl.constexpr):
    for i in gl.static_range(2):
        mbarrier.wait(full, i)
        gl.store(y + 1024 * i + grid2(32, 32, LAYOUT), tile.load(LAYOUT))
        mbarrier.arrive(empty)


@gluon.jit
def load_and_read(source, tile, full, empty, y, LAYOUT: gl.constexpr, BUG: gl.constexpr):
    for i in range(2):
        mbarrier.wait(empty, (i & 1) ^ 1)
        mbarrier.expect(full, source.nbytes_per_cta)
        tma.async_load(source, [32 * i, 0], full, tile)
        mbarrier.wait(full, i & 1)
        if BUG != "loads only":
            gl.store(y + 1024 * i + grid2(32, 32, LAYOUT), tile.load(LAYOUT))


@gluon.jit
def read_by_both(source, y, z, BUG: gl.constexpr):
    """y = z = source of [64, 32]; who loads the tile reads it, too, and so has a fence."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    W: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [1, 1], [1, 0])
    tile = gl.allocate_shared_memory(source.dtype, [32, 32], source.layout)
    full = mbarrier.allocate_mbarrier()
    empty = mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    gl.warp_specialize(
        [
            (read_only, (tile, full, empty, y, L)),
            (load_and_read, (source, tile, full, empty, z, W, BUG)),
        ],
        [1],
        [64],
    )


@gluon.jit
def pixels(image, target, ROW: gl.constexpr, COLUMN: gl.constexpr, BUG: gl.constexpr):
    """The pixels under one element of a filter, from the first one on."""
    tile = gl.allocate_shared_memory(image.dtype, image.block_type.shape, image.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, image.nbytes_per_cta)
    start: gl.constexpr = -2 if BUG == "starts outside" else -1
    tma.async_load_im2col(image, [0, -1, start, 0], [ROW, COLUMN], bar, tile)
    if BUG != "no wait":
        mbarrier.wait(bar, 0)
    tma.async_store(target, [0, 0], tile)
    tma.store_wait(0)


@gluon.jit
def unused(desc, y):
    gl.store(y, 1)


@gluon.jit
def of_two(view):
    return view.index(1)


@gluon.jit
def sends_ones(target, first):
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    first.store(gl.full([32, 32], 1.0, gl.float32, L))
    fence_async_shared()
    tma.async_store(target, [0, 0], first)


@gluon.jit
def stores_twos(y, second):
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    second.store(gl.full([64, 32], 2.0, gl.float32, L))
    tma.store_wait(0)
    gl.store(y + grid2(64, 32, L), second.load(L))


@gluon.jit
def dead_memory(target, y, BUG: gl.constexpr):
    """target = 1 of [32, 32], y = 2 of [64, 32]: the memory of the first may be the second's."""
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    both = gl.allocate_shared_memory(gl.float32, [2, 32, 32], target.layout)
    first = of_two(both)
    sends_ones(target, first)
    if BUG == "":
        tma.store_wait(0)
    second = gl.allocate_shared_memory(gl.float32, [64, 32], S)
    if BUG == "waits before it stores":
        tma.store_wait(0)
    stores_twos(y, second)


@gluon.jit
def large_memory(y, KEPT: gl.constexpr):
    """Two buffers of 128 KB, which fit if the first is dead before the second."""
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    first = gl.allocate_shared_memory(gl.float32, [128, 256], S)
    first.store(gl.full([128, 256], 1.0, gl.float32, L))
    ones = first.load(L)
    second = gl.allocate_shared_memory(gl.float32, [128, 256], S)
    second.store(ones + 1.0)
    if KEPT:
        second.store(first.load(L) + 1.0)
    rows = gl.arange(0, 128, gl.SliceLayout(1, L))[:, None]
    gl.store(y + rows * 256 + gl.arange(0, 256, gl.SliceLayout(0, L))[None, :], second.load(L))


@gluon.jit
def kept_memory(target, y):
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    first = gl.allocate_shared_memory(gl.float32, [32, 32], target.layout)
    sends_ones(target, first)
    second = gl.allocate_shared_memory(gl.float32, [64, 32], S)
    stores_twos(y, second)
    first._keep_alive()


@gluon.jit
def dead_in_loop(target, y):
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    first = gl.allocate_shared_memory(gl.float32, [32, 32], target.layout)
    sends_ones(target, first)
    for _ in range(2):
        second = gl.allocate_shared_memory(gl.float32, [64, 32], S)
        stores_twos(y, second)


@gluon.jit
def kept_by_loop(target, y):
    """The next turn uses the first buffer again."""
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    first = gl.allocate_shared_memory(gl.float32, [32, 32], target.layout)
    for _ in range(2):
        sends_ones(target, first)
        second = gl.allocate_shared_memory(gl.float32, [64, 32], S)
        stores_twos(y, second)


@gluon.jit
def two_barrier_arrays(y):
    """Barriers in the second row of a buffer lie beside those in the first."""
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    L: gl.constexpr = mbarrier.MBarrierLayout()
    memory = gl.allocate_shared_memory(gl.int64, [2, 2], S)
    first = memory.index(0).reinterpret(gl.int64, [2, 1], L)
    second = memory.index(1).reinterpret(gl.int64, [2, 1], L)
    for i in gl.static_range(2):
        mbarrier.init(first.index(i), count=1)
        mbarrier.init(second.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.arrive(second.index(i), count=1)
        mbarrier.wait(second.index(i), 0)
    gl.store(y, 1.0)


@gluon.jit
def undefined_address(x, y, n):
    """The pointers of a copy come from a masked load without `other`."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile = gl.allocate_shared_memory(gl.float32, [128], S)
    i = gl.arange(0, 128, L)
    j = gl.load(n + i, mask=i < 100)
    async_copy.async_load(tile, x + j)
    async_copy.commit_group()
    async_copy.wait_group(0)
    gl.store(y + i, tile.load(L))
