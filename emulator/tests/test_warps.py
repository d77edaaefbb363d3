"""Accesses of one role's warps to shared and tensor memory, and the points where they meet.

That a barrier lies between, or does not, is asked of the PTX that fbtriton makes of each.
"""

import pytest
import torch
import triton
import triton.language as tl

from emulator.tests.checking import B200, SCHEDULES, grid2, place, refused, tlx
from tritonemu import Race, run
from tritonemu.assembly import Code
from tritonemu.compiler import asm_of
from tritonemu.ttgir import Module

pytestmark = pytest.mark.tlx

N = 128
EIGHT = {**B200, "num_warps": 8}


def tiles(*names):
    tensors = {"x": torch.ones(N, N), "half": torch.ones(N, N).half(), "y": torch.zeros(N, N)}
    return [tensors[name] for name in names]


@triton.jit
def softmax_step(x, scores, p, full, HOW: tl.constexpr, N: tl.constexpr):
    """As in the backward of the flash attention of facebookexperimental/triton#1993: P takes the
    first half of the columns of the scores. HOW: "named" as in #1992."""
    tlx.local_store(scores, tl.load(x + grid2(N, N)))
    tlx.barrier_arrive(full)
    tlx.barrier_wait(full, 0)
    s = tlx.local_load(scores)  # loads
    out = tl.math.exp2(s).to(tl.float16)
    if HOW == "named":
        tlx.named_barrier_wait(10, 256)
    if HOW == "debug":
        tl.debug_barrier()
    if HOW == "arrive" or HOW == "each":
        tlx.barrier_arrive(full)
    if HOW == "wait":
        tlx.barrier_wait(full, 0)
    tlx.local_store(p, out)  # stores


@triton.jit
def alias_kernel(x, y, HOW: tl.constexpr, PART: tl.constexpr, N: tl.constexpr):
    scores = tlx.local_alloc((N, N), tl.float32, 1, tlx.storage_kind.tmem)
    p = tlx.local_alloc((N, N), tl.float16, 2, tlx.storage_kind.tmem, reuse=scores)
    full = tlx.alloc_warp_barrier(1, 8) if HOW == "each" else tlx.alloc_barriers(1)
    softmax_step(x, scores[0], p[PART], full[0], HOW, N)
    tl.store(y + grid2(N, N), tlx.local_load(p[PART]).to(tl.float32))


@triton.jit
def task_kernel(x, y, HOW: tl.constexpr, N: tl.constexpr):
    scores = tlx.local_alloc((N, N), tl.float32, 1, tlx.storage_kind.tmem)
    p = tlx.local_alloc((N, N), tl.float16, 2, tlx.storage_kind.tmem, reuse=scores)
    full = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_wait(full[0], 0)
        with tlx.async_task(num_warps=8):
            softmax_step(x, scores[0], p[0], full[0], HOW, N)
            tl.store(y + grid2(N, N), tlx.local_load(p[0]).to(tl.float32))


@triton.jit
def in_place_kernel(x, y, N: tl.constexpr):
    acc = tlx.local_alloc((N, N), tl.float32, 1, tlx.storage_kind.tmem)
    tlx.local_store(acc[0], tl.load(x + grid2(N, N)))
    tlx.local_store(acc[0], tlx.local_load(acc[0]) * 2)
    tl.store(y + grid2(N, N), tlx.local_load(acc[0]))


@triton.jit
def columns_kernel(x, y, N: tl.constexpr):
    """Some warps read all columns, the others clear half of them."""
    acc = tlx.local_alloc((N, N), tl.float32, 1, tlx.storage_kind.tmem)
    tlx.local_store(acc[0], tl.load(x + grid2(N, N)))
    v = tlx.local_load(acc[0])  # loads
    part = tlx.local_slice(acc[0], [0, 0], [N, N // 2])
    tlx.local_store(part, tl.zeros((N, N // 2), tl.float32))  # stores
    tl.store(y + grid2(N, N), v + tlx.local_load(acc[0]))


@triton.jit
def again_kernel(half, y, HOW: tl.constexpr, N: tl.constexpr):
    """Two products into one accumulator, which is read between."""
    a = tlx.local_alloc((N, N), tl.float16, 1)
    acc = tlx.local_alloc((N, N), tl.float32, 1, tlx.storage_kind.tmem)
    done = tlx.alloc_barriers(1)
    tlx.local_store(a[0], tl.load(half + grid2(N, N)))
    tlx.async_dot(a[0], a[0], acc[0], use_acc=False, mBarriers=[done[0]])
    tlx.barrier_wait(done[0], 0)
    v = tlx.local_load(acc[0])  # loads
    if HOW == "debug":
        tl.debug_barrier()
    if HOW == "convert":
        tl.store(y + grid2(N, N), v)
    tlx.async_dot(a[0], a[0], acc[0], use_acc=False, mBarriers=[done[0]])  # multiplies
    tlx.barrier_wait(done[0], 1)
    tl.store(y + grid2(N, N), v + tlx.local_load(acc[0]))


@triton.jit
def ring_kernel(half, y, HOW: tl.constexpr, N: tl.constexpr):
    """Between the load and the next product of a round none of the warps wait for each other, but
    that product goes to the other accumulator."""
    a = tlx.local_alloc((N, N), tl.float16, 1)
    acc = tlx.local_alloc((N, N), tl.float32, 2, tlx.storage_kind.tmem)
    done = tlx.alloc_barriers(1)
    tlx.local_store(a[0], tl.load(half + grid2(N, N)))
    tlx.async_dot(a[0], a[0], acc[0], use_acc=False, mBarriers=[done[0]])
    tlx.barrier_wait(done[0], 0)
    for i in range(4):
        v = tlx.local_load(acc[i % 2])  # loads
        other = (i + 1) % 2 if HOW == "" else i % 2
        tlx.async_dot(a[0], a[0], acc[other], use_acc=False, mBarriers=[done[0]])  # multiplies
        tlx.barrier_wait(done[0], (i + 1) % 2)
        if HOW != "":
            v += tlx.local_load(acc[other])
        tl.store(y + grid2(N, N), v)


@triton.jit
def alone_kernel(half, y, HOW: tl.constexpr, N: tl.constexpr):
    """Warps read an accumulator, and one thread tells another task that it may be written."""
    a = tlx.local_alloc((N, N), tl.float16, 1)
    acc = tlx.local_alloc((N, N), tl.float32, 2, tlx.storage_kind.tmem)
    done, read = tlx.alloc_barriers(1), tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.local_store(a[0], tl.load(half + grid2(N, N)))
            tlx.async_dot(a[0], a[0], acc[0], use_acc=False, mBarriers=[done[0]])
            tlx.barrier_wait(done[0], 0)
            v = tlx.local_load(acc[0])  # loads
            if HOW == "debug":
                tl.debug_barrier()
            if HOW == "commit" or HOW == "debug":
                tlx.tcgen05_commit(read[0])  # speaks of commit
            if HOW == "expect":
                tlx.barrier_expect_bytes(read[0], 0)  # speaks of expect
            if HOW == "mma":
                tlx.async_dot(a[0], a[0], acc[1], use_acc=False, mBarriers=[read[0]])
            if HOW == "arrive":
                tlx.barrier_arrive(read[0])
            tl.store(y + grid2(N, N), v)
        with tlx.async_task(num_warps=4):
            tlx.barrier_wait(read[0], 0)
            tlx.local_store(acc[0], tl.zeros((N, N), tl.float32))  # overwrites


@triton.jit
def shared_kernel(x, y, HOW: tl.constexpr, N: tl.constexpr):
    """Warps read a tile of shared memory, and one thread speaks of something else."""
    a = tlx.local_alloc((N, N), tl.float32, 1)
    read = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.local_store(a[0], tl.load(x + grid2(N, N)))
            if HOW == "arrive":
                tlx.barrier_arrive(read[0])
            else:
                tlx.tcgen05_commit(read[0])  # speaks
            tlx.barrier_wait(read[0], 0)
        with tlx.async_task(num_warps=4):
            tlx.barrier_wait(read[0], 0)
            tl.store(y + grid2(N, N), tlx.local_load(a[0]))  # reads


@triton.jit
def views_kernel(x, y, N: tl.constexpr):
    """Aliases and views of shared memory, between which the compiler puts barriers."""
    a = tlx.local_alloc((N, N), tl.float32, 1)
    b = tlx.local_alloc((N, N), tl.float16, 2, reuse=a)
    tlx.local_store(a[0], tl.load(x + grid2(N, N)))  # whole
    v = tlx.local_load(a[0])  # again
    tlx.local_store(b[0], v.to(tl.float16))  # alias
    w = tlx.local_load(tlx.local_trans(b[0])).to(tl.float32)
    tlx.local_store(a[0], w)  # back
    tl.store(y + grid2(N, N), tlx.local_load(a[0]))


def code_of(kernel, arguments, **constants):
    warps = constants.pop("num_warps", 4)
    bound = dict(zip(kernel.arg_names, arguments, strict=False)) | constants
    return Code(asm_of(kernel, "sm_100", bound, {"num_warps": warps})["ptx"])


@pytest.mark.parametrize("how", ("", "each"))
def test_an_alias_of_tensor_memory_needs_a_barrier(how):
    """The pattern of #1993; an arrival of each thread is none."""
    for schedule in SCHEDULES:
        options = {**EIGHT, "schedule": schedule}
        error = refused(
            Race, "have its bytes", alias_kernel, *tiles("x", "y"), how, 0, N, **options
        )
        assert (error.file, error.line) == place(softmax_step, "# stores")
        assert error.other == place(softmax_step, "# loads") and error.buffer == "p[0]"
        assert "may not have read yet as scores[0] at" in str(error)
        assert 'put tl.debug_barrier() there, or allow it with unguarded="allow"' in str(error)


@pytest.mark.parametrize("how", ("named", "debug", "arrive", "wait"))
def test_what_makes_the_warps_meet_is_enough(how):
    """Of #1992, and what else does it; "wait": the machine code has a barrier between two waits for
    one mbarrier."""
    x, y = tiles("x", "y")
    run(alias_kernel, (1,), x, y, how, 0, N, **EIGHT)
    assert torch.equal(y, 2 * x)


def test_the_warps_of_a_task_need_one_as_well():
    error = refused(Race, "a warp of task0", task_kernel, *tiles("x", "y"), "", N, **B200)
    assert error.role == "task0 of CTA 0"
    run(task_kernel, (1,), *tiles("x", "y"), "debug", N, **B200)
    run(task_kernel, (1,), *tiles("x", "y"), "named", N, **B200)


def test_four_warps_and_the_option_need_none():
    run(alias_kernel, (1,), *tiles("x", "y"), "", 0, N, **B200)
    run(alias_kernel, (1,), *tiles("x", "y"), "", 0, N, **EIGHT, unguarded="allow")
    run(alias_kernel, (1,), *tiles("x", "y"), "", 0, N, **EIGHT, races=False)


def test_the_same_bytes_of_each_warp_need_none():
    x, y = tiles("x", "y")
    run(in_place_kernel, (1,), x, y, N, **EIGHT)
    assert torch.equal(y, 2 * x)


def test_the_other_half_of_the_columns_is_of_other_warps_too():
    refused(Race, None, alias_kernel, *tiles("x", "y"), "", 1, N, **EIGHT)


def test_columns_that_other_warps_read_need_one():
    error = refused(Race, "have its bytes", columns_kernel, *tiles("x", "y"), N, **EIGHT)
    assert error.other == place(columns_kernel, "# loads")


def test_an_mma_does_not_wait_for_the_warps_that_read():
    error = refused(Race, "one thread issues it", again_kernel, *tiles("half", "y"), "", N, **B200)
    assert (error.file, error.line) == place(again_kernel, "# multiplies")
    assert error.other == place(again_kernel, "# loads") and error.buffer == "acc[0]"


@pytest.mark.parametrize("how", ("debug", "convert"))
def test_a_barrier_before_an_mma_is_enough(how):
    """A converted layout has such a barrier too, as only the machine code shows."""
    half, y = tiles("half", "y")
    run(again_kernel, (1,), half, y, how, N, **B200)
    assert torch.equal(y, torch.full((N, N), 2.0 * N))
    run(again_kernel, (1,), half, y, "", N, **B200, num_warps=1)


def test_the_way_leads_along_what_the_role_did_between():
    half, y = tiles("half", "y")
    code = code_of(ring_kernel, (half, y), HOW="", N=N)
    loads, multiplies = (place(ring_kernel, f"# {text}") for text in ("loads", "multiplies"))
    assert code.is_open([("tensor load", loads), ("mma", multiplies)])
    around = [("tensor load", loads), ("mma", multiplies)] * 2
    assert not code.is_open(around)
    run(ring_kernel, (1,), half, y, "", N, **B200)
    assert torch.equal(y, torch.full((N, N), float(N)))
    refused(Race, "one thread issues it", ring_kernel, half, y, "same", N, **B200)


@pytest.mark.parametrize("how", ("commit", "expect", "mma"))
def test_one_thread_speaks_for_itself_alone(how):
    match = "speaks for itself alone at"
    error = refused(Race, match, alone_kernel, *tiles("half", "y"), how, N, **B200)
    assert (error.file, error.line) == place(alone_kernel, "# overwrites")
    assert error.other == place(alone_kernel, "# loads")
    if how != "mma":
        line = place(alone_kernel, f"# speaks of {how}")[1]
        assert f"{match} {error.file}:{line}" in str(error)


@pytest.mark.parametrize("how", ("arrive", "debug"))
def test_an_arrival_speaks_for_all_warps(how):
    run(alone_kernel, (1,), *tiles("half", "y"), how, N, **B200)
    run(shared_kernel, (1,), *tiles("x", "y"), "arrive", N, **B200)


def test_shared_memory_of_which_one_thread_spoke():
    error = refused(Race, "speaks for itself", shared_kernel, *tiles("x", "y"), "", N, **B200)
    assert "may not have written yet" in str(error)


def test_the_compiler_guards_aliases_and_views_of_shared_memory():
    """The emulator relies on it."""
    x, y = tiles("x", "y")
    run(views_kernel, (1,), x, y, N, **EIGHT)
    assert torch.equal(y, x)
    code = code_of(views_kernel, (x, y), N=N, num_warps=8)
    lines = {text: place(views_kernel, f"# {text}") for text in ("whole", "again", "alias")}
    loaded = [("shared load", lines["again"]), ("shared store", lines["alias"])]
    assert not code.is_open(loaded)
    assert not code.is_open([("shared store", lines["whole"]), ("shared load", lines["again"])])
    # Both are told of: without the barriers the way were open.
    unguarded = asm_of(views_kernel, "sm_100", {"x": x, "y": y, "N": N}, {"num_warps": 8})["ptx"]
    unguarded = Code(unguarded.replace("bar.sync", "bar.warp.sync"))
    assert unguarded.is_open(loaded)


def test_the_compiler_guards_stores_to_tensor_memory_and_arrivals():
    """The emulator relies on some of it; the rest is not guarded."""
    code = code_of(alias_kernel, tiles("x", "y"), HOW="arrive", PART=0, N=N, num_warps=8)
    loads, stores = (place(softmax_step, f"# {text}") for text in ("loads", "stores"))
    assert not code.is_open([("tensor load", loads), ("tensor store", stores)])
    code = code_of(alias_kernel, tiles("x", "y"), HOW="", PART=0, N=N, num_warps=8)
    assert code.is_open([("tensor load", loads), ("tensor store", stores)])
    back = place(alias_kernel, "local_load(p[PART])")
    assert not code.is_open([("tensor store", stores), ("tensor load", back)])


PTX = """
	.file	1 "/a/b" "c.py"
	.loc	1 5 1
	tcgen05.ld.sync.aligned.32x32b.x128.b32 {%r1}, [%r2];
	tcgen05.wait::ld.sync.aligned;
	{}
	.loc	1 7 1
	@%p2 tcgen05.st.sync.aligned.32x32b.x64.b32 [%r3], {%r1};
	ret;
"""
INLINE = "// begin inline asm\n\t{\n\tsub.f32x2 %rd1, %rd2, %rd3;\n\t}\n\t// end inline asm"


@pytest.mark.parametrize(
    "between, open_",
    (
        ("", True),
        (INLINE, True),
        ("mbarrier.try_wait.parity.shared::cta.b64 complete, [%r1], %r2;", True),
        ("bar.sync 2, 256;", False),
        ("call.uni (_), f, (%r1);", False),
        ("bar.arrive 2, 256;", True),
    ),
)
def test_every_way_between_two_accesses_counts(between, open_):
    code = Code(PTX.replace("{}", between, 1))
    way = [("tensor load", ("/x/c.py", 5)), ("tensor store", ("c.py", 7))]
    assert code.is_open(way) == open_
    assert code.is_open([way[0], ("commit", ("c.py", 6)), way[1]]) == open_
    assert code.is_open(way[:1]) is None
    assert code.is_open([way[0], ("mma", ("c.py", 7))]) is None
    assert code.is_open(way[::-1]) is False


TTGIR = """
#linear = #ttg.linear<{register = [[0, 1], [0, 2]], lane = [[1, 0], [2, 0]], warp = LIST, block = []}>
    %v = ttng.tmem_load %0 : !ttg.memdesc<8x8xf32, #tmem> -> tensor<8x8xf32, #linear> loc(#loc5)
#loc5 = loc("/a/b/c.py":5:3)
"""  # noqa: E501


def test_linear_layouts_say_which_warp_has_what():
    def warps(bases: str):
        module = Module(TTGIR.replace("LIST", bases))
        return module.warps_of(("tensor load", ("c.py", 5)), 64)

    rows, columns = torch.arange(8)[:, None], torch.arange(8)[None, :]
    expected = (rows // 4 + 2 * (columns // 4)).reshape(-1)
    assert torch.equal(warps("[[4, 0], [0, 4]]"), expected)
    assert warps("[[4, 0], [0, 0]]") is None  # two warps have each element
    assert warps("[[4, 0], [4, 4]]") is None
    assert warps("LIST") is None
