"""Programs in Gluon that span CTAs: two pipelines, and small ones with the mistake BUG names.

The pipelines need two CTAs: a matmul by pairs on sm_100, and one on sm_90 whose B is multicast.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
    clc,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma,
    tcgen05_mma_barrier_count,
    tcgen05_mma_scaled,
)
from triton.experimental.gluon.language.nvidia.hopper import (
    cluster,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def load_pair(a, b, left, right, full, empty, TILES: gl.constexpr, STEPS: gl.constexpr,
              STAGES: gl.constexpr):  # fmt: skip
    for i in range(TILES * STEPS):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), a.nbytes_per_cta + b.nbytes_per_cta)
        tma.async_load(a, [i // STEPS * 256, i % STEPS * 64], full.index(stage), left.index(stage))
        tma.async_load(b, [i % STEPS * 64, 0], full.index(stage), right.index(stage))


@gluon.jit
def multiply_pair(acc, left, right, full, empty, acc_full, acc_empty, TILES: gl.constexpr,
                  STEPS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
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
def store_pair(c, acc, acc_full, acc_empty, TILES: gl.constexpr, STAGES: gl.constexpr):
    out = gl.allocate_shared_memory(c.dtype, [256, 64], c.layout)
    for tile in range(TILES):
        slot = tile % STAGES
        mbarrier.wait(acc_full.index(slot), (tile // STAGES) & 1)
        value = acc.index(slot).load()
        mbarrier.arrive(acc_empty.index(slot))
        tma.store_wait(0)
        out.store(value)
        fence_async_shared()
        tma.async_store(c, [256 * tile, 0], out)
    tma.store_wait(0)


@gluon.jit
def pair_kernel(a, b, c, TILES: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr):
    """c = a @ b in tiles of 256 rows, of which each CTA of a pair has half."""
    T: gl.constexpr = TensorMemoryLayout([128, 64], 1, cga_layout=((1, 0),), two_ctas=True)
    left = gl.allocate_shared_memory(a.dtype, [STAGES, 256, 64], a.layout)
    right = gl.allocate_shared_memory(b.dtype, [STAGES, 64, 64], b.layout)
    acc = allocate_tensor_memory(gl.float32, [STAGES, 256, 64], T)
    full = mbarrier.allocate_mbarrier(batch=STAGES, two_ctas=True)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    acc_full = mbarrier.allocate_mbarrier(batch=STAGES)
    acc_empty = mbarrier.allocate_mbarrier(batch=STAGES, two_ctas=True)
    for k in gl.static_range(STAGES):
        mbarrier.init(full.index(k), count=1)
        mbarrier.init(empty.index(k), count=1)
        mbarrier.init(acc_full.index(k), count=1)
        mbarrier.init(acc_empty.index(k), count=1)
    gl.warp_specialize(
        [
            (store_pair, (c, acc, acc_full, acc_empty, TILES, STAGES)),
            (load_pair, (a, b, left, right, full, empty, TILES, STEPS, STAGES)),
            (
                multiply_pair,
                (acc, left, right, full, empty, acc_full, acc_empty, TILES, STEPS, STAGES),
            ),
        ],
        [1, 1],
        [24, 24],
    )


@gluon.jit
def load_shared_b(a, b, left, right, full, empty, both_empty, STEPS: gl.constexpr,
                  STAGES: gl.constexpr):  # fmt: skip
    for i in range(STEPS):
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.wait(both_empty.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), a.nbytes_per_cta + b.nbytes_per_cta)
        tma.async_load(a, [0, i * 64], full.index(stage), left.index(stage))
        tma.async_load(b, [i * 64, 0], full.index(stage), right.index(stage), multicast=True)


@gluon.jit
def multiply_shared_b(c, left, right, full, empty, both_empty, STEPS: gl.constexpr,
                      STAGES: gl.constexpr):  # fmt: skip
    M: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16], ((1, 0),))
    acc = gl.zeros([128, 64], gl.float32, M)
    for i in range(STEPS):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        acc = warpgroup_mma(left.index(stage), right.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(stage))
        mbarrier.arrive(both_empty.index(stage))
    out = gl.allocate_shared_memory(c.dtype, [128, 64], c.layout)
    out.store(acc)
    fence_async_shared()
    tma.async_store(c, [0, 0], out)
    tma.store_wait(0)


@gluon.jit
def multicast_kernel(a, b, c, STEPS: gl.constexpr, STAGES: gl.constexpr):
    """c = a @ b of 128 rows, half of them in each CTA; the first CTA loads B for both."""
    left = gl.allocate_shared_memory(a.dtype, [STAGES, 128, 64], a.layout)
    right = gl.allocate_shared_memory(b.dtype, [STAGES, 64, 64], b.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    empty = mbarrier.allocate_mbarrier(batch=STAGES)
    both_empty = mbarrier.allocate_mbarrier(batch=STAGES, two_ctas=True)
    for k in gl.static_range(STAGES):
        mbarrier.init(full.index(k), count=1)
        mbarrier.init(empty.index(k), count=1)
        mbarrier.init(both_empty.index(k), count=1)
    gl.warp_specialize(
        [
            (multiply_shared_b, (c, left, right, full, empty, both_empty, STEPS, STAGES)),
            (load_shared_b, (a, b, left, right, full, empty, both_empty, STEPS, STAGES)),
        ],
        [1],
        [24],
    )


@gluon.jit
def softmax(x, y, COLUMNS: gl.constexpr):
    """Softmax of a row over all CTAs."""
    bases: gl.constexpr = ((1,), (2,), (4,))[: gl.num_ctas().bit_length() - 1]
    L: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0], cga_layout=bases)
    offsets = gl.program_id(0) * COLUMNS + gl.arange(0, COLUMNS, L)
    z = gl.exp(gl.load(x + offsets) - gl.max(gl.load(x + offsets), axis=0))
    gl.store(y + offsets, z / gl.sum(z, axis=0))


@gluon.jit
def multicast_again(source, y, BUG: gl.constexpr):
    """y = both halves of `source` [64, 32], one after the other through one multicast buffer."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0], cga_layout=((0, 0),))
    tile = gl.allocate_shared_memory(source.dtype, [32, 32], source.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=2 if BUG == "count" else 1)
    rows = gl.arange(0, 32, gl.SliceLayout(1, L))[:, None]
    offsets = rows * 32 + gl.arange(0, 32, gl.SliceLayout(0, L))[None, :]
    for i in gl.static_range(2):
        if BUG == "bytes of both":
            mbarrier.expect(bar, 2 * source.nbytes_per_cta)
        elif BUG != "no expect":
            mbarrier.expect(bar, source.nbytes_per_cta)
        tma.async_load(source, [32 * i, 0], bar, tile, multicast=BUG != "no multicast")
        if BUG != "no wait":
            mbarrier.wait(bar, i)
        gl.store(y + 1024 * i + offsets, tile.load(L))
        if BUG == "relaxed":
            cluster.barrier(relaxed=True)
        elif BUG == "barrier of a CTA":
            gl.barrier()
        elif BUG == "one wait for both":
            mbarrier.wait(bar, i)
        else:
            gl.barrier(cluster=True)
    mbarrier.invalidate(bar)


@gluon.jit
def peers(x, y, C: gl.constexpr, BUG: gl.constexpr):
    """y = x of [4, 32], through rows that the CTAs store, and columns that they load."""
    R: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0], cga_layout=((1, 0),))
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0], cga_layout=((1, 0),))
    rows = gl.arange(0, 4, gl.SliceLayout(1, R))[:, None]
    shared = gl.allocate_shared_memory(gl.float32, [4, 32], S)
    shared.store(gl.load(x + rows * 32 + gl.arange(0, 32, gl.SliceLayout(0, R))[None, :]))
    if BUG != "stored":
        gl.barrier(cluster=True)
    value = shared.load(C)
    if BUG == "loaded":
        shared.store(gl.full([4, 32], 0.0, gl.float32, R))
    rows = gl.arange(0, 4, gl.SliceLayout(1, C))[:, None]
    gl.store(y + rows * 32 + gl.arange(0, 32, gl.SliceLayout(0, C))[None, :], value)


@gluon.jit
def pair_once(a, b, c, BUG: gl.constexpr):
    """c = a @ b of [256, 64] by [64, 64]: one MMA of a pair of CTAs."""
    T: gl.constexpr = TensorMemoryLayout([128, 64], 1, cga_layout=((1, 0),), two_ctas=True)
    R: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0], cga_layout=((1, 0),))
    left = gl.allocate_shared_memory(a.dtype, [256, 64], a.layout)
    right = gl.allocate_shared_memory(b.dtype, [64, 64], b.layout)
    loaded = mbarrier.allocate_mbarrier(two_ctas=BUG != "barrier of each")
    done = mbarrier.allocate_mbarrier(two_ctas=BUG == "one to wait")
    mbarrier.init(loaded, count=2 if BUG == "count of both" else 1)
    mbarrier.init(done, count=1)
    bytes: gl.constexpr = a.nbytes_per_cta + b.nbytes_per_cta
    mbarrier.expect(loaded, 2 * bytes if BUG == "bytes of both" else bytes)
    tma.async_load(a, [0, 0], loaded, left)
    tma.async_load(b, [0, 0], loaded, right)
    mbarrier.wait(loaded, 0)
    if BUG == "read by both":
        left.load(R)
    acc = allocate_tensor_memory(gl.float32, [256, 64], T)
    tcgen05_mma(left, right, acc, use_acc=False, mbarriers=[done])
    if BUG != "no wait":
        mbarrier.wait(done, 0)
    out = gl.allocate_shared_memory(c.dtype, [256, 64], c.layout)
    out.store(acc.load())
    fence_async_shared()
    tma.async_store(c, [0, 0], out)
    if BUG != "no store wait":
        tma.store_wait(0)


@gluon.jit
def pairs_of_four(a, b, c, BUG: gl.constexpr):
    """c = a @ b of [512, 128] by [128, 64], two pairs of CTAs; B is multicast to both."""
    T: gl.constexpr = TensorMemoryLayout([128, 64], 1, cga_layout=((1, 0), (2, 0)), two_ctas=True)
    left = gl.allocate_shared_memory(a.dtype, [512, 64], a.layout)
    right = gl.allocate_shared_memory(b.dtype, [64, 64], b.layout)
    acc = allocate_tensor_memory(gl.float32, [512, 64], T)
    loaded = mbarrier.allocate_mbarrier(two_ctas=True)
    done = mbarrier.allocate_mbarrier()
    commits: gl.constexpr = tcgen05_mma_barrier_count([left, right], True, True)
    mbarrier.init(loaded, count=1)
    mbarrier.init(done, count=1 if BUG == "own commit" else commits)
    for k in gl.static_range(2):
        mbarrier.expect(loaded, a.nbytes_per_cta + b.nbytes_per_cta)
        tma.async_load(a, [0, k * 64], loaded, left)
        tma.async_load(b, [k * 64, 0], loaded, right, multicast=True)
        mbarrier.wait(loaded, k)
        tcgen05_mma(left, right, acc, use_acc=k > 0, multicast=BUG != "commit to own pair",
                    mbarriers=[done])  # fmt: skip
        mbarrier.wait(done, k)
    out = gl.allocate_shared_memory(c.dtype, [512, 64], c.layout)
    out.store(acc.load())
    fence_async_shared()
    tma.async_store(c, [0, 0], out)
    tma.store_wait(0)


@gluon.jit
def scaled_pair(a, b, a_scale, b_scale, c, BUG: gl.constexpr):
    """c = a @ b.T of [256, 128] by [64, 128], both in e4m3 with scales, by a pair of CTAs.

    a_scale: as it lies in tensor memory, in halves of [32, 4, 4]; b_scale: [64, 4].
    """
    T: gl.constexpr = TensorMemoryLayout([128, 64], 1, cga_layout=((1, 0),), two_ctas=True)
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0], cga_layout=((1, 0),))
    R: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0], cga_layout=((1, 0),))
    B: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0], cga_layout=((0, 0),))
    left = gl.allocate_shared_memory(a.dtype, [256, 128], a.layout)
    right = gl.allocate_shared_memory(b.dtype, [64, 128], b.layout)
    packed = gl.allocate_shared_memory(gl.uint8, [2, 512], S)
    left_scale = allocate_tensor_memory(
        gl.uint8, [256, 4], TensorMemoryScalesLayout(cga_layout=((1, 0),))
    )
    right_scale = allocate_tensor_memory(
        gl.uint8, [64, 4], TensorMemoryScalesLayout(cga_layout=((0, 0),))
    )
    acc = allocate_tensor_memory(gl.float32, [256, 64], T)
    loaded = mbarrier.allocate_mbarrier(two_ctas=True)
    done = mbarrier.allocate_mbarrier()
    mbarrier.init(loaded, count=1)
    mbarrier.init(done, count=1)
    if BUG == "stored last":
        mbarrier.expect(loaded, a.nbytes_per_cta + b.nbytes_per_cta)
        tma.async_load(a, [0, 0], loaded, left)
        tma.async_load(b, [0, 0], loaded, right)
    rows = gl.arange(0, 2, gl.SliceLayout(1, R))[:, None]
    columns = gl.arange(0, 512, gl.SliceLayout(0, R))[None, :]
    packed.store(gl.load(a_scale + rows * 512 + columns))
    rows = gl.arange(0, 64, gl.SliceLayout(1, B))[:, None]
    columns = gl.arange(0, 4, gl.SliceLayout(0, B))[None, :]
    factors = gl.load(b_scale + rows * 4 + columns)
    right_scale.store(gl.convert_layout(factors, right_scale.get_reg_layout()))
    if BUG != "stored last":
        mbarrier.expect(loaded, a.nbytes_per_cta + b.nbytes_per_cta)
        tma.async_load(a, [0, 0], loaded, left)
        tma.async_load(b, [0, 0], loaded, right)
    mbarrier.wait(loaded, 0)
    tcgen05_copy(packed.reshape([2, 32, 4, 4]).permute([0, 2, 1, 3]).reshape([256, 4]), left_scale)
    tcgen05_mma_scaled(
        left, right.permute([1, 0]), acc, left_scale, right_scale, "e4m3", "e4m3", use_acc=False
    )
    tcgen05_commit(done)
    mbarrier.wait(done, 0)
    out = gl.allocate_shared_memory(c.dtype, [256, 64], c.layout)
    out.store(acc.slice(0, 64).load())
    fence_async_shared()
    tma.async_store(c, [0, 0], out)
    tma.store_wait(0)


@gluon.jit
def persistent(y, BUG: gl.constexpr):
    """y[i] = 1 for all programs i, each done by whoever takes it over."""
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0], cga_layout=((0,),))
    response = gl.allocate_shared_memory(gl.int64, [2], S)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    program, phase, more = gl.program_id(0), 0, True
    while more:
        gl.store(y + program, 1.0)
        if BUG == "no barrier" or BUG == "each expects, no barrier":
            gl.barrier()
        else:
            gl.barrier(cluster=True)
        if BUG == "each expects, no barrier":
            mbarrier.expect(bar, 16)
        elif BUG == "expected in one":
            mbarrier.expect(bar, 16, from_cta=0)
            mbarrier.expect(bar, 16, from_cta=1)
        else:
            mbarrier.expect(bar, 16, from_cta=0)
        clc.try_cancel(response, bar)
        mbarrier.wait(bar, phase)
        result = clc.load_result(response)
        more = result.is_canceled()
        program = result.program_id(0)
        phase ^= 1


@gluon.jit
def cp_async(x, y, BUG: gl.constexpr):
    """y = x of 256, half of it in each CTA."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], cga_layout=((1,),))
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0], cga_layout=((1,),))
    shared = gl.allocate_shared_memory(gl.float32, [256], S)
    offsets = gl.arange(0, 256, L)
    async_copy.async_load(shared, x + offsets)
    async_copy.commit_group()
    if BUG != "no wait":
        async_copy.wait_group(0)
    gl.store(y + offsets, shared.load(L))


@gluon.jit
def barrier_in_memory(y, BUG: gl.constexpr):
    """y[0] = 1: a barrier of four CTAs, in memory that is allocated as any other."""
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0], cga_layout=((0,), (0,)))
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], S)
    if BUG != "no init":
        mbarrier.init(bars.index(1), count=1)
    mbarrier.arrive(bars.index(1), count=2 if BUG == "arrives twice" else 1)
    mbarrier.wait(bars.index(1), 0)
    mbarrier.invalidate(bars.index(1))
    gl.store(y, 1.0)


@gluon.jit
def cta_rank():
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %cluster_ctarank;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def first_of(x, y):
    if cta_rank() == 0:
        gl.store(y, gl.load(x))


@gluon.jit
def sent(x, y, HAS: gl.constexpr, GETS: gl.constexpr, BUG: gl.constexpr):
    """y = x of 512, from registers of the CTAs by HAS to their shared memory by GETS.

    If each has all of it, and gets a part, the first one sends.
    """
    R: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0], cga_layout=HAS)
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], cga_layout=GETS)
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0], cga_layout=GETS)
    shared = gl.allocate_shared_memory(gl.float32, [512], S)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    if BUG == "4 bytes more":
        mbarrier.expect(bar, shared.nbytes_per_cta + 4)
    elif BUG == "4 bytes fewer":
        mbarrier.expect(bar, shared.nbytes_per_cta - 4)
    else:
        mbarrier.expect(bar, shared.nbytes_per_cta)
    value = gl.load(x + gl.arange(0, 512, R))
    if HAS == GETS or BUG == "from all":
        hopper.async_store(shared, value, bar)
    else:
        if cta_rank() == 0:
            hopper.async_store(shared, value, bar)
    if BUG != "no wait":
        mbarrier.wait(bar, 0)
    gl.store(y + gl.arange(0, 512, L), shared.load(L))
    if BUG == "no wait":
        mbarrier.wait(bar, 0)


@gluon.jit
def send_sevens(shared, bar, R: gl.constexpr):
    mbarrier.expect(bar, shared.nbytes_per_cta)
    hopper.async_store(shared, gl.full([64, 32], 7.0, gl.float32, R), bar)


@gluon.jit
def take_sevens(target, shared, bar, BUG: gl.constexpr):
    if BUG == "fence too early":
        fence_async_shared()
    mbarrier.wait(bar, 0)
    if BUG == "":
        fence_async_shared()
    tma.async_store(target, [0, 0], shared)
    tma.store_wait(0)


@gluon.jit
def sevens(target, BUG: gl.constexpr):
    """target = 7 of [64, 32], which one partition stores asynchronously, and another one copies."""
    R: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [0, 1], cga_layout=((1, 0),))
    shared = gl.allocate_shared_memory(gl.float32, [64, 32], target.layout)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    gl.warp_specialize(
        [(send_sevens, (shared, bar, R)), (take_sevens, (target, shared, bar, BUG))], [4], [24]
    )


@gluon.jit
def last_rows(x, y, WRITER: gl.constexpr, BUG: gl.constexpr):
    """y = x[2:] of [4, 32], rows of the second CTA, which the first one loads; then WRITER stores
    other values there."""
    R: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0], cga_layout=((1, 0),))
    A: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0], cga_layout=((0, 0),))
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0], cga_layout=((1, 0),))
    offsets = gl.arange(0, 4, gl.SliceLayout(1, R))[:, None] * 32
    shared = gl.allocate_shared_memory(gl.float32, [4, 32], S)
    shared.store(gl.load(x + offsets + gl.arange(0, 32, gl.SliceLayout(0, R))[None, :]))
    rows = shared.slice(2, 2, dim=0)
    if BUG != "read early":
        gl.barrier(cluster=True)
    rank = cta_rank()
    offsets = gl.arange(0, 2, gl.SliceLayout(1, A))[:, None] * 32
    offsets += gl.arange(0, 32, gl.SliceLayout(0, A))[None, :]
    if rank == 0:
        gl.store(y + offsets, rows.load(A))
    if WRITER == 0 and BUG != "nobody else reads":
        gl.barrier(cluster=True)
        if rank == 1:
            gl.store(y + rank * 0 + offsets, rows.load(A))
    if BUG == "relaxed":
        cluster.barrier(relaxed=True)
    elif BUG != "no barrier":
        gl.barrier(cluster=True)
    if rank == WRITER:
        rows.store(gl.full([2, 32], 0.0, gl.float32, A))
    gl.barrier(cluster=True)


@gluon.jit
def halves_swapped(x, y, OP: gl.constexpr, BUG: gl.constexpr):
    """y = x of [2, 32] with its halves swapped, of which each CTA has one."""
    R: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0], cga_layout=((0, 1),))
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0], cga_layout=((0, 1),))
    rows = gl.arange(0, 2, gl.SliceLayout(1, R))[:, None]
    columns = gl.arange(0, 32, gl.SliceLayout(0, R))[None, :]
    other = (columns ^ 16) + rows * 0
    value = gl.load(x + rows * 32 + columns)
    shared = gl.allocate_shared_memory(gl.float32, [2, 32], S)
    if OP == "gather":
        shared.store(value)
        if BUG != "stored":
            gl.barrier(cluster=True)
        result = shared.gather(other, axis=1)
        if BUG == "gathered":
            shared.store(value)
    else:
        if BUG == "stored":
            shared.store(value)
        shared.scatter(value, other, axis=1)
        if BUG != "scattered":
            gl.barrier(cluster=True)
        result = shared.load(R)
    gl.barrier(cluster=True)
    gl.store(y + rows * 32 + columns, result)


@gluon.jit
def use_slot(slot, used, L: gl.constexpr):
    value = slot.load(L)
    slot.store(value + 1)
    mbarrier.arrive(used)


@gluon.jit
def fill_slot(y, slot, response, bar, used, L: gl.constexpr, BUG: gl.constexpr):
    mbarrier.wait(used, 0)
    if BUG == "each expects":
        mbarrier.expect(bar, 16)
    else:
        mbarrier.expect(bar, 16, from_cta=0)
    clc.try_cancel(response, bar)
    mbarrier.wait(bar, 0)
    slot.store(gl.full([1], 1, gl.int64, L))
    gl.store(y, 1.0)


@gluon.jit
def slot_again(y, BUG: gl.constexpr):
    """y = 1. Only the first CTA waits until the slots of both are used; the second one hears of
    that from the first one, which expects the bytes for both."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], cga_layout=((0,),))
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0], cga_layout=((0,),))
    slot = gl.allocate_shared_memory(gl.int64, [1], S)
    response = gl.allocate_shared_memory(gl.int64, [2], S)
    bar = mbarrier.allocate_mbarrier()
    used = mbarrier.allocate_mbarrier(two_ctas=True)
    mbarrier.init(bar, count=1)
    mbarrier.init(used, count=1)
    slot.store(gl.full([1], 0, gl.int64, L))
    gl.warp_specialize(
        [(use_slot, (slot, used, L)), (fill_slot, (y, slot, response, bar, used, L, BUG))],
        [4],
        [24],
    )


@gluon.jit
def use_answers(bar, used):
    for i in range(3):
        mbarrier.arrive(used)
        mbarrier.wait(bar, i & 1)


@gluon.jit
def ask_again(y, response, bar, used):
    for i in range(3):
        mbarrier.wait(used, i & 1)
        mbarrier.expect(bar, 16)
        clc.try_cancel(response, bar)
        mbarrier.wait(bar, i & 1)
    gl.store(y, 1.0)


@gluon.jit
def answers(y):
    """y = 1, after three requests, each made when both CTAs have got the one before."""
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0], cga_layout=((0,),))
    response = gl.allocate_shared_memory(gl.int64, [2], S)
    bar = mbarrier.allocate_mbarrier()
    used = mbarrier.allocate_mbarrier(two_ctas=True)
    mbarrier.init(bar, count=1)
    mbarrier.init(used, count=1)
    gl.warp_specialize(
        [(use_answers, (bar, used)), (ask_again, (y, response, bar, used))], [4], [24]
    )


@gluon.jit
def send(shared, value, bar):
    hopper.async_store(shared, value, bar)


@gluon.jit
def some_ctas(x, y, WHAT: gl.constexpr):
    """Operations refused where CTAs diverge, or have not diverged."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], cga_layout=((1,),))
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0], cga_layout=((1,),))
    shared = gl.allocate_shared_memory(gl.float32, [256], S)
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    rank, value = cta_rank(), 0
    if WHAT == "atomic_scatter_add":
        shared.store(gl.full([256], 0.0, gl.float32, L))
        shared.atomic_scatter_add(gl.full([256], 1.0, gl.float32, L), gl.arange(0, 256, L), 0)
    elif WHAT == "registers of 2 layouts":
        send(shared, gl.full([256], 0.0, gl.float32, L), bar)
        R: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], cga_layout=((0,),))
        send(shared, gl.full([256], 0.0, gl.float32, R), bar)
    elif WHAT == "this use of a slice":
        shared.slice(128, 128).permute([0])
    elif WHAT == "a value that CTAs have several of":
        gl.store(x + rank, 1.0)
    elif WHAT == "`else`":
        if rank == 1:
            gl.store(x, 1.0)
        else:
            gl.store(x, 2.0)
    elif WHAT == "a return in a branch":
        if rank == 1:
            return
    elif rank != 0:
        if WHAT == "a wait for bar":
            mbarrier.wait(bar, 0)
        elif WHAT == "a cluster barrier":
            gl.barrier(cluster=True)
        elif WHAT == "an allocation":
            gl.allocate_shared_memory(gl.float32, [256], S)
        elif WHAT == "value of CTAs":
            value = 1
    gl.store(x, value)
