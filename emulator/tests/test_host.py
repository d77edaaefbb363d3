"""Host side: what lies between `kernel[grid](...)` and the first instruction, each row of the table
in docs/limits.md."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import _allocation

from emulator.tests.checking import box
from tritonemu import InvalidKernel, OutOfBounds, ResourceLimit, enabled, fake_gpu, run


@triton.jit
def fill_kernel(x, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + i, i, mask=i < n)


@triton.jit
def two_kernel(x, y):
    tl.store(y, tl.load(x))


@triton.jit
def type_kernel(x, n):
    tl.static_assert(n.dtype == tl.uint64)
    tl.store(x, n)


@triton.jit
def made_kernel(x):
    tl.make_tensor_descriptor(x, [8, 8], [8, 1], [8, 8]).load([0, 0])


@triton.jit
def put_kernel(desc, COLUMNS: tl.constexpr):
    desc.store([0, 0], tl.full([8, COLUMNS], 1, desc.dtype))


def launch(grid=(1,), block=8, **options):
    fill_kernel[grid](torch.zeros(8), 8, B=block, **options)


@triton.heuristics({"B": lambda arguments: 2 * arguments["n"]})
@triton.jit
def heuristic_kernel(x, n, B: tl.constexpr):
    tl.store(x + tl.arange(0, B), 1)


REFUSED = {
    "y": (InvalidKernel, "grid of a GPU ends", lambda: launch((1, 65536))),
    "z": (InvalidKernel, "grid of a GPU ends", lambda: launch((1, 1, 65536))),
    "x": (InvalidKernel, "grid of a GPU ends", lambda: launch((2**31,))),
    "warps": (InvalidKernel, "num_warps must be a power of 2", lambda: launch(num_warps=3)),
    "threads": (ResourceLimit, "1024 threads", lambda: launch(num_warps=64)),
    "ctas": (InvalidKernel, "num_ctas must be 1, 2, 4, 8 or 16", lambda: launch(num_ctas=32)),
    "block": (InvalidKernel, "at most 1048576 elements", lambda: launch(block=2**21)),
    "option": (TypeError, "num_wraps", lambda: launch(num_wraps=4)),
    "meta": (KeyError, "num_warps", lambda: launch(lambda meta: (meta["num_warps"],))),
    "sizes": (ValueError, "one to three sizes", lambda: launch((1, 1, 1, 1))),
}


@pytest.mark.parametrize("row", REFUSED)
def test_refused(row):
    kind, text, call = REFUSED[row]
    with enabled(), pytest.raises(kind, match=text):
        call()


def test_taken():
    with enabled() as reports:
        launch((0,))
        launch((1, 3, 2), num_warps=8, num_ctas=2, num_stages=5, maxnreg=64)
    assert [report.programs for report in reports] == [0, 6]


def test_a_tensor_on_the_cpu():
    with fake_gpu(), enabled():
        with pytest.raises(InvalidKernel, match="y is on the CPU, and others on the GPU"):
            two_kernel[(1,)](torch.zeros(8, device="cuda"), torch.zeros(8))
        two_kernel[(1,)](torch.zeros(8, device="cuda"), torch.zeros(8).cuda())
        two_kernel[(1,)](torch.zeros(8), torch.zeros(8))
        two_kernel[(1,)](torch.zeros(8, pin_memory=True), torch.zeros(8, device="cuda"))
        two_kernel[(1,)](torch.zeros(8).pin_memory(), torch.zeros(8, device="cuda"))


def test_integers():
    x = torch.zeros(1, dtype=torch.uint64)
    run(type_kernel, (1,), x, 2**63)
    assert x.item() == 2**63
    with pytest.raises(InvalidKernel, match="must fit uint64"):
        run(type_kernel, (1,), x, 2**64)


def test_hooks_and_heuristics():
    seen, x = [], torch.zeros(8)
    kernel = triton.jit(fill_kernel.fn)
    kernel.add_pre_run_hook(lambda *args, **kwargs: seen.append(kwargs["B"]))
    with enabled():
        kernel[(1,)](x, 8, B=8)
        heuristic_kernel[(1,)](x, 4)
    assert seen == [8] and x.eq(1).all()


def test_the_allocator():
    allocator = _allocation._allocator.get()
    triton.set_allocator(_allocation.NullAllocator())
    try:
        with enabled(), pytest.raises(InvalidKernel, match="triton.set_allocator; none is set"):
            made_kernel[(1,)](torch.zeros(8, 8))
    finally:
        triton.set_allocator(allocator)
    run(made_kernel, (1,), torch.zeros(8, 8))


@pytest.mark.parametrize(
    "dtype, columns, wide, end",
    (
        (torch.int8, 35, 64, 48),
        (torch.bfloat16, 36, 64, 40),
        (torch.float32, 33, 64, 36),
        (torch.bfloat16, 40, 64, 0),
        (torch.float32, 64, 64, 0),
    ),
)
def test_stores_of_whole_chunks(dtype, columns, wide, end):
    x = torch.full((8, wide), 5).to(dtype)
    desc = box(x[:, :columns], 8, 64)
    if end:
        with pytest.raises(OutOfBounds, match=f"with {columns} elements also those up to {end},"):
            run(put_kernel, (1,), desc, 64)
    run(put_kernel, (1,), desc, 64, bounds="storage")
    assert x[:, :columns].eq(1).all() and x[:, columns:].eq(5).all()


def test_a_chunk_at_the_end_of_memory():
    x = torch.zeros(1, 33)
    run(put_kernel, (1,), box(x.as_strided((1, 33), (64, 1)), 8, 64), 64)
    assert x.eq(1).all()


def test_what_is_not_played():
    seen, hooks = [], triton.knobs.runtime.launch_enter_hook
    hooks.add(seen.append)
    with enabled():
        launch(launch_cooperative_grid=True, num_stages=7)
    hooks.remove(seen.append)
    assert not seen


FACTOR = tl.constexpr(2)


@triton.jit
def factor_kernel(x):
    tl.store(x, FACTOR)


def test_a_constant_that_changes(monkeypatch):
    x = torch.zeros(1)
    run(factor_kernel, (1,), x)
    monkeypatch.setitem(globals(), "FACTOR", tl.constexpr(3))
    run(factor_kernel, (1,), x)
    assert x.item() == 3
