"""Mistakes of people who write their first Triton kernels, each beside the right kernel.

`CASES[name](wrong)` launches the one or the other on a pretended GPU, and checks the result. None
was changed after it had been run for the first time.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.runtime import _allocation
from triton.tools.tensor_descriptor import TensorDescriptor

from emulator.tests.checking import allocate

CASES: dict[str, Callable[[bool], None]] = {}


def case(function: Callable[[bool], None]) -> Callable[[bool], None]:
    CASES[function.__name__] = function
    return function


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).cuda()


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")


def same(x: torch.Tensor, y: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


# Masks, strides, grids.


@triton.jit
def copy_kernel(x, y, n, B: tl.constexpr, KIND: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    mask = i <= n if KIND == "inclusive" else i < n
    value = tl.load(x + i, mask=mask)
    if KIND == "store":
        tl.store(y + i, value)
    elif KIND == "none":
        tl.store(y + i, tl.load(x + i))
    else:
        tl.store(y + i, value, mask=mask)


def copied(kind: str, blocks: int = 4) -> None:
    x, y = randn(100), torch.empty(100, device="cuda")
    copy_kernel[(blocks,)](x, y, 100, 32, kind)
    same(y, x)


@case
def mask_includes_the_end(wrong):
    copied("inclusive" if wrong else "")


@case
def store_without_the_mask_of_the_load(wrong):
    copied("store" if wrong else "")


@case
def no_mask_at_all(wrong):
    copied("none" if wrong else "")


@case
def grid_rounded_down(wrong):
    copied("", 100 // 32 if wrong else triton.cdiv(100, 32))


@triton.jit
def matrix_kernel(x, y, M, N, sm, B: tl.constexpr, KIND: tl.constexpr):
    p, q = tl.program_id(0), tl.program_id(1)
    if KIND == "programs":
        p, q = q, p
    r, c = p * B + tl.arange(0, B)[:, None], q * B + tl.arange(0, B)[None, :]
    mask = (r < N) & (c < M) if KIND == "mask" else (r < M) & (c < N)
    offsets = r + c * sm if KIND == "strides" else r * sm + c
    tl.store(y + offsets, tl.load(x + offsets, mask=mask) * 2, mask=mask)


def doubled(kind: str) -> None:
    x, y = randn(20, 70), torch.empty(20, 70, device="cuda")
    matrix_kernel[(triton.cdiv(20, 16), triton.cdiv(70, 16))](x, y, 20, 70, 70, 16, kind)
    same(y, 2 * x)


@case
def mask_of_the_other_axes(wrong):
    doubled("mask" if wrong else "")


@case
def strides_of_the_other_axes(wrong):
    doubled("strides" if wrong else "")


@case
def program_ids_of_the_other_axes(wrong):
    doubled("programs" if wrong else "")


@triton.jit
def stencil_kernel(x, y, n, B: tl.constexpr, LEFT: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    left = tl.load(x + i - 1, mask=i < n if LEFT else (i > 0) & (i < n), other=0.0)
    tl.store(y + i, left + tl.load(x + i, mask=i < n), mask=i < n)


@case
def halo_before_the_first(wrong):
    x, y = randn(100), torch.empty(100, device="cuda")
    stencil_kernel[(4,)](x, y, 100, 32, wrong)
    same(y, x + torch.nn.functional.pad(x, (1, 0))[:-1])


@triton.jit
def embed_kernel(ids, table, y, D: tl.constexpr, PADDED: tl.constexpr):
    row, d = tl.program_id(0), tl.arange(0, D)
    i = tl.load(ids + row)
    value = tl.load(table + i * D + d) if PADDED else tl.load(table + i * D + d, i >= 0, 0.0)
    tl.store(y + row * D + d, value)


@case
def index_of_padding(wrong):
    ids, table = torch.tensor([0, 2, -1, 1], device="cuda"), randn(3, 16)
    y = torch.empty(4, 16, device="cuda")
    embed_kernel[(4,)](ids, table, y, 16, wrong)
    same(y[:2], table[ids[:2]])


@triton.jit
def ragged_kernel(x, starts, y, longest, B: tl.constexpr, OWN: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, B)
    start = tl.load(starts + row)
    n = tl.load(starts + row + 1) - start if OWN else longest
    tl.store(y + row, tl.sum(tl.load(x + start + i, mask=i < n, other=0.0)))


@case
def longest_row_for_each(wrong):
    starts, x = torch.tensor([0, 5, 14, 20], device="cuda"), randn(20)
    y = torch.empty(3, device="cuda")
    ragged_kernel[(3,)](x, starts, y, 9, 16, not wrong)
    same(y, torch.stack([x[0:5].sum(), x[5:14].sum(), x[14:].sum()]))


@triton.jit
def matmul_kernel(a, b, c, M, N, K, B: tl.constexpr, KIND: tl.constexpr):
    r, n, k = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :], tl.arange(0, B)
    acc = tl.zeros([B, B], tl.float32)
    for s in range(0, K, B):
        row, column = (s + k)[None, :], (s + k)[:, None]
        if KIND == "tail":
            x, y = tl.load(a + r * K + row, r < M), tl.load(b + column * N + n, n < N)
        elif KIND == "other":
            x = tl.load(a + r * K + row, (r < M) & (row < K))
            y = tl.load(b + column * N + n, (column < K) & (n < N), 0.0)
        else:
            x = tl.load(a + r * K + row, (r < M) & (row < K), 0.0)
            y = tl.load(b + column * N + n, (column < K) & (n < N), 0.0)
        acc += tl.dot(x, y, input_precision="ieee")
    tl.store(c + r * N + n, acc, (r < M) & (n < N))


def multiplied(kind: str) -> None:
    a, b, c = randn(16, 40), randn(40, 16), torch.empty(16, 16, device="cuda")
    matmul_kernel[(1,)](a, b, c, 16, 16, 40, 16, kind)
    same(c, a @ b)


@case
def matmul_without_a_mask_of_the_tail(wrong):
    multiplied("tail" if wrong else "")


@case
def matmul_with_one_other_of_two(wrong):
    multiplied("other" if wrong else "")


# Values that nobody wrote.


@triton.jit
def segment_kernel(x, ids, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.atomic_add(y + tl.load(ids + i, i < n, 0), tl.load(x + i, i < n, 0.0), i < n)


@case
def accumulator_of_empty(wrong):
    x, ids = randn(100), torch.arange(100, device="cuda") % 7
    y = torch.empty(7, device="cuda") if wrong else zeros(7)
    segment_kernel[(4,)](x, ids, y, 100, 32)
    same(y, zeros(7).index_add(0, ids, x))


@case
def accumulator_cleared_but_for_a_row(wrong):
    x, ids, y = randn(100), torch.arange(100, device="cuda") % 7, torch.empty(7, device="cuda")
    y[: 6 if wrong else 7] = 0
    segment_kernel[(4,)](x, ids, y, 100, 32)
    same(y, zeros(7).index_add(0, ids, x))


@triton.jit
def norm_kernel(x, y, n, B: tl.constexpr, KIND: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, B)
    value = (
        tl.load(x + row * n + i, i < n) if KIND == "other" else tl.load(x + row * n + i, i < n, 0)
    )
    mean = tl.sum(value) / n
    centred = value - mean if KIND == "centred" else tl.where(i < n, value - mean, 0.0)
    tl.store(y + row, tl.sum(centred * centred) / n)


def normed(kind: str) -> None:
    x, y = 3 + randn(3, 20), torch.empty(3, device="cuda")
    norm_kernel[(3,)](x, y, 20, 32, kind)
    same(y, x.var(1, correction=0))


@case
def mean_without_other(wrong):
    normed("other" if wrong else "")


@case
def variance_of_padding(wrong):
    normed("centred" if wrong else "")


@triton.jit
def softmax_kernel(x, y, n, B: tl.constexpr, KIND: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, B)
    if KIND == "largest":
        value = tl.load(x + row * n + i, i < n)
        value = tl.where(i < n, value - tl.max(value), float("-inf"))
    elif KIND == "sum":
        value = tl.load(x + row * n + i, i < n)
        value -= tl.max(tl.where(i < n, value, float("-inf")))
    else:
        value = tl.load(x + row * n + i, i < n, float("-inf"))
        value -= tl.max(value)
    e = tl.exp(value)
    tl.store(y + row * n + i, e / tl.sum(e), i < n)


def soft(kind: str) -> None:
    x, y = randn(3, 20) - 50, torch.empty(3, 20, device="cuda")
    softmax_kernel[(3,)](x, y, 20, 32, kind)
    same(y, x.softmax(1))


@case
def softmax_whose_largest_is_of_padding(wrong):
    soft("largest" if wrong else "")


@case
def softmax_whose_sum_has_padding(wrong):
    soft("sum" if wrong else "")


@triton.jit
def early_kernel(counts, y, EARLY: tl.constexpr):
    row = tl.program_id(0)
    count = tl.load(counts + row)
    if EARLY & (count == 0):
        return
    tl.store(y + row, 1.0 / tl.maximum(count, 1))


@case
def early_return_before_the_store(wrong):
    counts, y = torch.tensor([1, 0, 4], device="cuda"), torch.empty(3, device="cuda")
    early_kernel[(3,)](counts, y, wrong)
    same(y, 1.0 / counts.clamp(min=1))


# Programs beside each other.


@triton.jit
def largest_kernel(x, y, B: tl.constexpr, ATOMIC: tl.constexpr):
    value = tl.max(tl.load(x + tl.program_id(0) * B + tl.arange(0, B)))
    if ATOMIC:
        tl.atomic_max(y, value)
    elif value > tl.load(y):
        tl.store(y, value)


@case
def largest_by_load_and_store(wrong):
    x, y = randn(128).abs(), zeros(1)
    largest_kernel[(4,)](x, y, 32, not wrong)
    same(y, x.max()[None])


@triton.jit
def split_kernel(a, b, c, B: tl.constexpr, ADD: tl.constexpr):
    r, n = tl.arange(0, B)[:, None], tl.arange(0, B)[None, :]
    k = tl.program_id(0) * B + tl.arange(0, B)
    part = tl.dot(tl.load(a + r * 64 + k[None, :]), tl.load(b + k[:, None] * B + n))
    if ADD:
        tl.atomic_add(c + r * B + n, part)
    else:
        tl.store(c + r * B + n, part)


@case
def split_k_by_store(wrong):
    a, b, c = randn(16, 64, dtype=torch.float16), randn(64, 16, dtype=torch.float16), zeros(16, 16)
    split_kernel[(4,)](a, b, c, 16, not wrong)
    same(c, a.float() @ b.float(), 1e-3)


@triton.jit
def shift_kernel(x, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i + 1, i + 1 < n, 0.0), i < n)


@case
def shift_in_place(wrong):
    x = randn(100)
    expected = torch.nn.functional.pad(x, (0, 1))[1:].clone()
    y = x if wrong else torch.empty_like(x)
    shift_kernel[(4,)](x, y, 100, 32)
    same(y, expected)


@triton.jit
def transpose_kernel(x, y, N: tl.constexpr, B: tl.constexpr):
    r = tl.program_id(0) * B + tl.arange(0, B)[:, None]
    c = tl.program_id(1) * B + tl.arange(0, B)[None, :]
    tl.store(y + c * N + r, tl.load(x + r * N + c))


@case
def transpose_in_place(wrong):
    x = randn(32, 32)
    expected, y = x.t().clone(), x if wrong else torch.empty_like(x)
    transpose_kernel[(2, 2)](x, y, 32, 16)
    same(y, expected)


@triton.jit
def totals_kernel(x, totals, y, B: tl.constexpr, BEFORE: tl.constexpr):
    pid = tl.program_id(0)
    i = pid * B + tl.arange(0, B)
    value = tl.load(x + i)
    if BEFORE:
        tl.store(totals + pid, tl.sum(value))
    before = tl.sum(tl.load(totals + tl.arange(0, B), tl.arange(0, B) < pid, 0.0))
    tl.store(y + i, before + tl.cumsum(value))


@triton.jit
def sums_kernel(x, totals, B: tl.constexpr):
    pid = tl.program_id(0)
    tl.store(totals + pid, tl.sum(tl.load(x + pid * B + tl.arange(0, B))))


@case
def totals_of_programs_before(wrong):
    x, totals, y = randn(128), zeros(4), torch.empty(128, device="cuda")
    if not wrong:
        sums_kernel[(4,)](x, totals, 32)
    totals_kernel[(4,)](x, totals, y, 32, wrong)
    same(y, x.cumsum(0), 1e-3)


@triton.jit
def last_kernel(x, parts, count, y, P: tl.constexpr, B: tl.constexpr, SEM: tl.constexpr):
    pid = tl.program_id(0)
    tl.store(parts + pid, tl.sum(tl.load(x + pid * B + tl.arange(0, B))))
    tl.debug_barrier()
    if tl.atomic_add(count, 1, sem=SEM) == P - 1:
        tl.store(y, tl.sum(tl.load(parts + tl.arange(0, P))))


@case
def last_program_by_a_relaxed_counter(wrong):
    x, parts, y = randn(128), torch.empty(4, device="cuda"), torch.empty(1, device="cuda")
    count = zeros(1, dtype=torch.int32)
    last_kernel[(4,)](x, parts, count, y, 4, 32, "relaxed" if wrong else "acq_rel")
    same(y, x.sum()[None], 1e-3)


@triton.jit
def locked_kernel(lock, x, y, B: tl.constexpr, STORE: tl.constexpr):
    i = tl.arange(0, B)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.debug_barrier()
    tl.store(y + i, tl.load(y + i) + tl.load(x + tl.program_id(0) * B + i))
    tl.debug_barrier()
    if STORE:
        tl.store(lock, 0)
    else:
        tl.atomic_xchg(lock, 0)


@case
def lock_released_by_a_store(wrong):
    x, y, lock = randn(4, 32), zeros(32), zeros(1, dtype=torch.int32)
    locked_kernel[(4,)](lock, x, y, 32, wrong)
    same(y, x.sum(0))


@triton.jit
def scratch_kernel(x, scratch, y, B: tl.constexpr, OWN: tl.constexpr):
    pid, i = tl.program_id(0), tl.arange(0, B)
    place = scratch + pid * B + i if OWN else scratch + i
    tl.store(place, tl.load(x + pid * B + i) * 2)
    tl.debug_barrier()
    tl.store(y + pid * B + i, tl.load(place))


@case
def scratch_of_all_programs(wrong):
    x, scratch, y = (
        randn(4, 32),
        torch.empty(4, 32, device="cuda"),
        torch.empty(4, 32, device="cuda"),
    )
    scratch_kernel[(4,)](x, scratch, y, 32, not wrong)
    same(y, 2 * x)


@triton.jit
def visits_kernel(visits, y, SCOPE: tl.constexpr):
    ticket = tl.atomic_add(visits, 1, scope=SCOPE)
    tl.store(y + ticket, 1)


@case
def tickets_of_scope_cta(wrong):
    visits, y = zeros(1, dtype=torch.int32), zeros(4, dtype=torch.int32)
    visits_kernel[(4,)](visits, y, "cta" if wrong else "gpu")
    same(y, torch.ones_like(y))


@triton.jit
def bins_kernel(ids, weights, y, B: tl.constexpr, KIND: tl.constexpr):
    i = tl.arange(0, B)
    where = y + tl.load(ids + i)
    if KIND == "weights":
        tl.store(where, tl.load(where) + tl.load(weights + i))
    elif KIND == "count":
        tl.store(where, tl.load(where) + 1)
    else:
        tl.atomic_add(where, tl.load(weights + i))


def binned(kind: str, weights: torch.Tensor) -> None:
    ids, y = torch.arange(64, device="cuda") % 5, zeros(5)
    bins_kernel[(1,)](ids, weights, y, 64, kind)
    if kind != "count":
        same(y, zeros(5).index_add(0, ids, weights))


@case
def histogram_of_weights(wrong):
    binned("weights" if wrong else "", randn(64))


@case
def histogram_of_counts(wrong):
    binned("count" if wrong else "", torch.ones(64, device="cuda"))


@triton.jit
def scatter_kernel(grads, ids, y, D: tl.constexpr, ADD: tl.constexpr):
    row, d = tl.program_id(0), tl.arange(0, D)
    target = y + tl.load(ids + row) * D + d
    if ADD:
        tl.atomic_add(target, tl.load(grads + row * D + d))
    else:
        tl.store(target, tl.load(target) + tl.load(grads + row * D + d))


@case
def gradient_of_an_embedding(wrong):
    grads, ids, y = randn(4, 16), torch.tensor([0, 2, 0, 1], device="cuda"), zeros(3, 16)
    scatter_kernel[(4,)](grads, ids, y, 16, not wrong)
    same(y, zeros(3, 16).index_add(0, ids, grads))


@triton.jit
def meeting_kernel(count, x, y, P: tl.constexpr):
    pid = tl.program_id(0)
    tl.atomic_xchg(x + pid, pid)
    tl.atomic_add(count, 1)
    while tl.atomic_add(count, 0) < P:
        pass
    tl.atomic_xchg(y + pid, tl.atomic_add(x + (pid + 1) % 4, 0))


@case
def barrier_of_more_programs_than_run(wrong):
    count, x, y = (zeros(n, dtype=torch.int32) for n in (1, 4, 4))
    meeting_kernel[(4,)](count, x, y, 5 if wrong else 4, launch_cooperative_grid=True)
    same(y, torch.tensor([1, 2, 3, 0], device="cuda", dtype=torch.int32))


# Operators.


@triton.jit
def average(a, b):
    return (a + b) / 2


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def decay(a, b):
    return 0.9 * a + b


@triton.jit
def decay_pairs(w1, a1, w2, a2):
    return w1 * w2, a1 * w2 + a2


@triton.jit
def operator_kernel(x, y, B: tl.constexpr, KIND: tl.constexpr):
    i = tl.arange(0, B)
    value = tl.load(x + i)
    if KIND == "average":
        tl.store(y, tl.reduce(value, 0, average))
    elif KIND == "sum":
        tl.store(y, tl.reduce(value, 0, add) / B)
    elif KIND == "decay":
        tl.store(y + i, tl.associative_scan(value, 0, decay))
    else:
        _, value = tl.associative_scan((value * 0 + 0.9, value), 0, decay_pairs)
        tl.store(y + i, value)


@case
def mean_of_means(wrong):
    x, y = randn(32), torch.empty(1, device="cuda")
    operator_kernel[(1,)](x, y, 32, "average" if wrong else "sum")
    if not wrong:
        same(y, x.mean()[None])


@case
def moving_average_by_a_scan(wrong):
    x, y = randn(32), torch.empty(32, device="cuda")
    operator_kernel[(1,)](x, y, 32, "decay" if wrong else "pairs")
    same(y[1], 0.9 * x[0] + x[1])


# Launches.


@triton.jit
def increment_kernel(x, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + i, tl.load(x + i) + 1)


@case
def tuned_in_place(wrong):
    configs = [triton.Config({"B": size}) for size in (16, 32)]
    kernel = triton.autotune(configs, ["x"], restore_value=None if wrong else ["x"])(
        increment_kernel
    )
    x = zeros(64)
    kernel[lambda meta: (64 // meta["B"],)](x)


@case
def tensor_left_on_the_cpu(wrong):
    x, y = randn(64), torch.empty(64) if wrong else torch.empty(64, device="cuda")
    copy_kernel[(2,)](x, y, 64, 32, "")
    same(y, x)


@case
def batch_in_the_third_axis_of_the_grid(wrong):
    increment_kernel[(1, 1, 70000) if wrong else (1,)](zeros(32), 32)


@case
def block_of_a_size_that_is_no_power_of_two(wrong):
    increment_kernel[(1,)](zeros(64), 48 if wrong else 64)


SCALE = 2.0


@triton.jit
def global_kernel(x, GLOBAL: tl.constexpr, B: tl.constexpr):
    i = tl.arange(0, B)
    if GLOBAL:
        tl.store(x + i, tl.load(x + i) * SCALE)
    else:
        tl.store(x + i, tl.load(x + i) * 2.0)


@triton.jit
def scaled_kernel(x, B: tl.constexpr):
    tl.store(x + tl.arange(0, B), tl.load(x + tl.arange(0, B)) * 2.0)


@case
def global_that_is_no_constexpr(wrong):
    x = torch.ones(32, device="cuda")
    if wrong:
        global_kernel[(1,)](x, True, 32)
    else:
        scaled_kernel[(1,)](x, 32)
    same(x, torch.full_like(x, 2))


@triton.jit
def loaded_kernel(x, y, M, N, B: tl.constexpr):
    desc = tl.make_tensor_descriptor(x, [M, N], [N, 1], [B, B])
    tl.store(y + tl.arange(0, B), tl.sum(desc.load([0, 0]), 0))


@case
def descriptor_without_an_allocator(wrong):
    allocator = _allocation._allocator.get()
    triton.set_allocator(_allocation.NullAllocator() if wrong else allocate)
    try:
        x, y = randn(16, 16), torch.empty(16, device="cuda")
        loaded_kernel[(1,)](x, y, 16, 16, 16)
        same(y, x.sum(0))
    finally:
        triton.set_allocator(allocator)


@triton.jit
def boxed_kernel(desc, y, B: tl.constexpr):
    tl.store(y + tl.arange(0, B), tl.sum(desc.load([0, 0]), 0))


@case
def descriptor_of_the_other_axes(wrong):
    x, y = randn(8, 32), torch.empty(16, device="cuda")
    shape, strides = ([32, 8], [32, 1]) if wrong else ([8, 32], [32, 1])
    boxed_kernel[(1,)](TensorDescriptor(x, shape, strides, [16, 16]), y, 16)
    same(y, x[:, :16].sum(0))


@triton.jit
def put_kernel(desc, B: tl.constexpr):
    desc.store([0, 0], tl.full([B, B], 1.0, tl.float32))


@case
def descriptor_of_columns_beside_others(wrong):
    x = zeros(16, 64)
    columns = 13 if wrong else 12
    put_kernel[(1,)](TensorDescriptor.from_tensor(x[:, :columns], [16, 16]), 16)
    same(x.sum(), torch.tensor(16.0 * columns, device="cuda"))


@case
def view_taken_for_contiguous(wrong):
    x, y = randn(10, 20)[:, ::2], torch.empty(10, 10, device="cuda")
    copy_kernel[(4,)](x if wrong else x.contiguous(), y, 100, 32, "")
    same(y, x)
