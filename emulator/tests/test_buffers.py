"""Shared and tensor memory: allocations, views, aliases, limits, and what nobody has written."""

import warnings

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from emulator.tests.checking import (
    B200,
    PAIR,
    box,
    build,
    fill,
    grid2,
    nothing,
    place,
    refused,
    tlx,
)
from tritonemu import (
    InvalidKernel,
    OutOfBounds,
    ResourceLimit,
    UninitializedRead,
    Unsupported,
    enabled,
    run,
)
from tritonemu.buffers import Storage

pytestmark = pytest.mark.tlx

# Views of shared memory.


@triton.jit
def ring_kernel(out_ptr, first, NUM: tl.constexpr, BLOCK: tl.constexpr):
    ring = tlx.local_alloc((BLOCK,), tl.int32, NUM)
    lanes = tl.arange(0, BLOCK)
    for i in range(NUM):
        tlx.local_store(ring[(first + i) % NUM], (first + i) % NUM * 100 + lanes)
    for i in tl.static_range(NUM):
        tl.store(out_ptr + i * BLOCK + lanes, tlx.local_load(tlx.local_view(ring, i)))


def test_buffers_of_an_allocation_are_separate():
    out = nothing(5, 32, dtype=torch.int32)
    report = run(ring_kernel, (1,), out, 3, NUM=5, BLOCK=32)
    assert torch.equal(out, (torch.arange(5)[:, None] * 100 + torch.arange(32)).int())
    assert report.shared_bytes == 5 * 32 * 4 and report.tensor_columns == 0
    assert report.checks["shared"] == 10


@triton.jit
def view_kernel(i, WHOLE: tl.constexpr):
    ring = tlx.local_alloc((16,), tl.int32, 2)
    tlx.local_store(ring if WHOLE else ring[i], tl.arange(0, 16))


def test_indices():
    run(view_kernel, (1,), 0, WHOLE=False)
    for i in (2, -1):
        message = f"ring of CTA 0 has 2 buffers, got index {i}"
        refused(OutOfBounds, message, view_kernel, i, WHOLE=False)
    refused(InvalidKernel, "ring is 2 buffers; index it", view_kernel, 0, WHOLE=True)


@triton.jit
def rows_kernel(out_ptr, row):
    cell = tlx.local_alloc((4, 16), tl.int32, 1)
    table = cell[0]
    tlx.local_store(table, tl.zeros((4, 16), tl.int32))
    tlx.local_store(table[row], tl.arange(0, 16) + 1)
    tl.store(out_ptr + grid2(4, 16), tlx.local_load(table))


def test_a_row_of_a_buffer():
    for row in range(4):
        out = nothing(4, 16, dtype=torch.int32)
        run(rows_kernel, (1,), out, row)
        expected = torch.zeros(4, 16, dtype=torch.int32)
        expected[row] = torch.arange(1, 17)
        assert torch.equal(out, expected)
    refused(OutOfBounds, None, rows_kernel, out, 4)


@triton.jit
def windows_kernel(out_ptr, ROW: tl.constexpr, COLUMN: tl.constexpr, TRANSPOSED: tl.constexpr):
    cell = tlx.local_alloc((8, 32), tl.float32, 2)
    for i in tl.static_range(2):
        tlx.local_store(cell[i], tl.zeros((8, 32), tl.float32))
    window = tlx.local_slice(cell[1], [ROW, COLUMN], [4, 16])
    value = grid2(4, 16) + 1.0
    if TRANSPOSED:
        tlx.local_store(tlx.local_trans(window), tl.trans(value))
    else:
        tlx.local_store(window, value)
    turned = tlx.local_load(tlx.local_trans(window))
    tl.device_assert(turned == tl.trans(value))
    again = tlx.local_load(tlx.local_trans(tlx.local_trans(window)))
    tl.device_assert(again == value)
    for i in tl.static_range(2):
        tl.store(out_ptr + 256 * i + grid2(8, 32), tlx.local_load(cell[i]))


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize("row, column", ((0, 0), (4, 16), (2, 3)))
def test_windows(row, column, transposed):
    out = nothing(2, 8, 32)
    run(windows_kernel, (1,), out, ROW=row, COLUMN=column, TRANSPOSED=transposed)
    expected = torch.zeros(2, 8, 32)
    expected[1, row : row + 4, column : column + 16] = torch.arange(1.0, 65).view(4, 16)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("row, column", ((5, 0), (0, 17), (-1, 0)))
def test_a_window_stays_inside(row, column):
    keywords = {"ROW": row, "COLUMN": column, "TRANSPOSED": False, "line": "local_slice"}
    refused(OutOfBounds, r"leaves cell\[1\] of CTA 0", windows_kernel, nothing(512), **keywords)


@triton.jit
def placed_kernel(out_ptr, n, HOW: tl.constexpr):
    cell = tlx.local_alloc((32, 16), tl.float32, 1)
    if HOW == "in the call":
        window = tlx.local_slice(cell[0], [2 * 8, 0], [16, 16])
    elif HOW == "a list":
        offsets = [16, 0]
        window = tlx.local_slice(cell[0], offsets, [16, 16])
    elif HOW == "a variable":
        row = 16
        window = tlx.local_slice(cell[0], [row, 0], [16, 16])
    elif HOW == "a constant":
        row: tl.constexpr = 16
        window = tlx.local_slice(cell[0], [row, 0], [16, 16])
    elif HOW == "an argument":
        window = tlx.local_slice(cell[0], [n, 0], [16, 16])
    tlx.local_store(window, grid2(16, 16) + 1.0)
    tl.store(out_ptr + grid2(16, 16), tlx.local_load(window))


@pytest.mark.parametrize(
    "how", ("in the call", "a constant", "a list", "a variable", "an argument")
)
def test_where_a_window_lies_is_a_constant(how):
    """The compiler requires it, and takes a variable for a value."""
    types, right = {"out_ptr": "*fp32", "n": "i32"}, how in ("in the call", "a constant")
    if right:
        run(placed_kernel, (1,), out := nothing(256), 16, HOW=how)
        assert torch.equal(out, torch.arange(1.0, 257))
        build(placed_kernel, types, {"HOW": how})
        return
    refused(InvalidKernel, "a constant integer", placed_kernel, nothing(256), 16, HOW=how)
    with pytest.raises(CompilationError):
        build(placed_kernel, types, {"HOW": how})


@triton.jit
def seen_otherwise_kernel(out_ptr, HOW: tl.constexpr):
    cell = tlx.local_alloc((8, 16), tl.float32, 1)
    tlx.local_store(cell[0], grid2(8, 16) * 1.5)
    if HOW == "reshape":
        other = tlx.local_load(tlx.local_reshape(cell[0], [4, 32]))
    elif HOW == "bits":
        other = tlx.local_load(tlx.local_reinterpret(cell[0], tl.int32))
    elif HOW == "halves":
        other = tlx.local_load(tlx.local_reinterpret(cell[0], tl.int16, [8, 32]))
    elif HOW == "too large":
        other = tlx.local_load(tlx.local_reinterpret(cell[0], tl.float32, [8, 32]))
    elif HOW == "too small":
        other = tlx.local_load(tlx.local_reshape(cell[0], [4, 16]))
    else:
        part = tlx.local_slice(cell[0], [0, 8], [8, 8])
        other = tlx.local_load(tlx.local_reinterpret(part, tl.int32))
    tl.store(out_ptr + grid2(other.shape[0], other.shape[1]), other)


@pytest.mark.parametrize(
    "how, dtype", (("reshape", torch.float32), ("bits", torch.int32), ("halves", torch.int16))
)
def test_other_shapes_and_types_of_the_same_bytes(how, dtype):
    x = torch.arange(128.0) * 1.5
    out = nothing(x.view(dtype).numel(), dtype=dtype)
    run(seen_otherwise_kernel, (1,), out, HOW=how)
    assert torch.equal(out, x.view(dtype))


@pytest.mark.parametrize("how", ("too large", "too small", "a window"))
def test_views_that_do_not_fit(how):
    refused(InvalidKernel, None, seen_otherwise_kernel, nothing(256), HOW=how)


@triton.jit
def wrong_value_kernel(DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    cell = tlx.local_alloc((16,), tl.float32, 1)
    tlx.local_store(cell[0], tl.zeros((BLOCK,), DTYPE))


def test_a_store_has_the_type_and_size_of_the_buffer():
    run(wrong_value_kernel, (1,), DTYPE=tl.float32, BLOCK=16)
    message = r"into cell\[0\] takes fp32\[16\]"
    for dtype, block in ((tl.float16, 16), (tl.float32, 8)):
        refused(InvalidKernel, message, wrong_value_kernel, DTYPE=dtype, BLOCK=block)


# Aliases in shared memory.


@triton.jit
def reuse_kernel(out_ptr):
    wide = tlx.local_alloc((64,), tl.int32, 2)
    narrow = tlx.local_alloc((32,), tl.int16, 3, reuse=wide)
    again = tlx.local_alloc((16,), tl.int32, 2, tlx.storage_kind.smem, reuse=narrow)
    lanes = tl.arange(0, 64)
    for i in tl.static_range(2):
        tlx.local_store(wide[i], tl.full((64,), -1, tl.int32))
    for i in tl.static_range(3):
        tlx.local_store(narrow[i], tl.full((32,), 1 + i, tl.int16))
    tlx.local_store(again[1], tl.full((16,), 0x90009, tl.int32))
    for i in tl.static_range(2):
        tl.store(out_ptr + i * 64 + lanes, tlx.local_load(wide[i]))


def test_reuse_of_a_buffer_starts_where_it_starts():
    out = nothing(2, 64, dtype=torch.int32)
    report = run(reuse_kernel, (1,), out)
    parts = out.flatten().view(torch.int16).view(8, 32)
    assert parts.eq(torch.tensor([1, 9, 3, -1, -1, -1, -1, -1])[:, None]).all()
    assert report.shared_bytes == 2 * 64 * 4


@triton.jit
def spec_kernel(out_ptr, KIND: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    spec = tlx.storage_alias_spec(storage=tlx.storage_kind.smem)
    a = tlx.local_alloc((A,), tl.int8, 2, reuse=spec)
    b = tlx.local_alloc((B,), tl.int8, 2, reuse=spec)
    c = tlx.local_alloc((C,), tl.int8, 2, reuse=spec)
    if KIND == "shared":
        spec.set_buffer_overlap(tlx.reuse_group(a, b, c, group_type=tlx.reuse_group_type.shared))
    elif KIND == "distinct":
        spec.set_buffer_overlap(tlx.reuse_group(a, b, c, group_type=tlx.reuse_group_type.distinct))
    elif KIND == "nested":
        inner = tlx.reuse_group(b, c, group_type=tlx.reuse_group_type.distinct)
        spec.set_buffer_overlap(tlx.reuse_group(a, inner, group_type=tlx.reuse_group_type.shared))
    for i in tl.static_range(2):
        tlx.local_store(a[i], tl.full((A,), 10 + i, tl.int8))
    for i in tl.static_range(2):
        tlx.local_store(b[i], tl.full((B,), 20 + i, tl.int8))
    for i in tl.static_range(2):
        tlx.local_store(c[i], tl.full((C,), 30 + i, tl.int8))
    for i in tl.static_range(2):
        tl.store(out_ptr + i * A + tl.arange(0, A), tlx.local_load(a[i]))


@pytest.mark.parametrize(
    "kind, sizes, first, second, total",
    (
        # b is packed over a[0], c over b[0].
        ("none", (256, 128, 64), [30] * 64 + [31] * 64 + [21] * 128, [11] * 256, 512),
        ("shared", (256, 128, 128), [30, 10], [31, 11], 512),
        ("distinct", (128, 128, 128), [10], [11], 768),
        ("nested", (256, 128, 128), [20, 30], [21, 31], 512),
    ),
)
def test_buffers_of_a_spec(kind, sizes, first, second, total):
    """The bytes of both buffers of `a` after a, b and c were written; of groups, of 128 each."""
    out = nothing(2, sizes[0], dtype=torch.int8)
    report = run(spec_kernel, (1,), out, KIND=kind, **dict(zip("ABC", sizes, strict=True)))
    expected = torch.tensor([first, second]).repeat_interleave(sizes[0] // len(first), 1)
    assert torch.equal(out, expected.to(torch.int8)) and report.shared_bytes == total


@triton.jit
def spec_twice_kernel(SIZE: tl.constexpr):
    spec = tlx.storage_alias_spec(storage=tlx.storage_kind.smem, buffer_size_bytes=SIZE)
    a = tlx.local_alloc((64,), tl.int32, 1, reuse=spec)
    b = tlx.local_alloc((64,), tl.int32, 1, reuse=spec)
    spec.set_buffer_overlap(tlx.reuse_group(a, b, group_type=tlx.reuse_group_type.shared))
    spec.set_buffer_overlap(tlx.reuse_group(a, b, group_type=tlx.reuse_group_type.shared))


def test_misused_specs():
    refused(InvalidKernel, "takes one set_buffer_overlap, got two", spec_twice_kernel, SIZE=256)
    refused(InvalidKernel, "must fit the 255 bytes .* got 256", spec_twice_kernel, SIZE=255)


# Tensor memory.


@triton.jit
def columns_kernel(out_ptr, WHERE: tl.constexpr):
    acc = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem)
    tlx.local_store(acc[0], tl.zeros((128, 64), tl.float32))
    if WHERE == "subslice":
        part = tlx.subslice(acc[0], 32, 16)
    elif WHERE == "slice":
        part = tlx.local_slice(acc[0], [0, 32], [128, 16])
    elif WHERE == "rows":
        part = tlx.local_slice(acc[0], [64, 32], [64, 16])
    elif WHERE == "shared memory":
        part = tlx.subslice(tlx.local_alloc((128, 64), tl.float32, 1)[0], 0, 16)
    else:
        part = tlx.subslice(acc[0], 56, 16)
    tlx.local_store(part, grid2(128, 16) + 1.0)
    tl.store(out_ptr + grid2(128, 64), tlx.local_load(acc[0]))


@pytest.mark.parametrize("where", ("subslice", "slice"))
def test_columns_of_tensor_memory(where):
    out = nothing(128, 64)
    report = run(columns_kernel, (1,), out, WHERE=where, **B200)
    expected = torch.zeros(128, 64)
    expected[:, 32:48] = torch.arange(1.0, 2049).view(128, 16)
    assert torch.equal(out, expected)
    assert report.tensor_columns == 64 and report.shared_bytes == 0


@pytest.mark.parametrize(
    "where, arch, error, message",
    (
        ("rows", "sm_100", InvalidKernel, "all rows"),
        ("beyond", "sm_100", OutOfBounds, "leaves acc"),
        ("shared memory", "sm_100", InvalidKernel, "takes tensor memory, got shared memory"),
        ("slice", "sm_90", InvalidKernel, "needs arch sm_100, got sm_90"),
    ),
)
def test_wrong_slices_of_tensor_memory(where, arch, error, message):
    refused(error, message, columns_kernel, nothing(128, 64), WHERE=where, arch=arch)


@triton.jit
def store_columns(out_ptr, buffers, NUM: tl.constexpr, COLUMNS: tl.constexpr):
    for i in tl.static_range(NUM):
        offsets = i * 128 * COLUMNS + grid2(128, COLUMNS)
        tl.store(out_ptr + offsets, tlx.local_load(buffers[i]))


# A number in each 16-bit half of every column.


@triton.jit
def fill_bf16(buffer, number, COLUMNS: tl.constexpr):
    bits = tl.full((128, COLUMNS), number, tl.int16)
    tlx.local_store(buffer, bits.to(tl.bfloat16, bitcast=True))


@triton.jit
def fill_f32(buffer, number, COLUMNS: tl.constexpr):
    bits = tl.full((128, COLUMNS), number * 65537, tl.int32)
    tlx.local_store(buffer, bits.to(tl.float32, bitcast=True))


@triton.jit
def tmem_reuse_kernel(out_ptr, WHAT: tl.constexpr):
    qk = tlx.local_alloc((128, 128), tl.float32, 2, tlx.storage_kind.tmem)
    p = tlx.local_alloc((128, 128), tl.bfloat16, 4, tlx.storage_kind.tmem, reuse=qk)
    alpha = tlx.local_alloc((128, 1), tl.float32, 256, tlx.storage_kind.tmem, reuse=qk)
    for i in tl.static_range(2):
        fill_f32(qk[i], 100 + i, 128)
    if WHAT == "p":
        for i in tl.static_range(4):
            fill_bf16(p[i], 1 + i, 128)
    else:
        for i in tl.static_range(3):
            fill_f32(alpha[i], 1 + i, 1)
            fill_f32(alpha[128 + i], 11 + i, 1)
        fill_f32(alpha[255], 14, 1)
    store_columns(out_ptr, qk, 2, 128)


@triton.jit
def tmem_spec_kernel(out_ptr, WHAT: tl.constexpr):
    """The layout of softmax attention: qk, over it two slices of p and three columns."""
    spec = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    qk = tlx.local_alloc((128, 128), tl.float32, 2, tlx.storage_kind.tmem, reuse=spec)
    p = tlx.local_alloc((128, 64), tl.bfloat16, 4, tlx.storage_kind.tmem, reuse=spec)
    alpha = tlx.local_alloc((128, 1), tl.float32, 2, tlx.storage_kind.tmem, reuse=spec)
    l_sum = tlx.local_alloc((128, 1), tl.float32, 2, tlx.storage_kind.tmem, reuse=spec)
    m_max = tlx.local_alloc((128, 1), tl.float32, 2, tlx.storage_kind.tmem, reuse=spec)
    if WHAT == "overlap":
        pairs = tlx.reuse_group(p, group_size=2)
        distinct: tl.constexpr = tlx.reuse_group_type.distinct
        inner = tlx.reuse_group(pairs, alpha, l_sum, m_max, group_type=distinct)
        spec.set_buffer_overlap(tlx.reuse_group(qk, inner, group_type=tlx.reuse_group_type.shared))
    for i in tl.static_range(2):
        fill_f32(qk[i], 100 + i, 128)
    for i in tl.static_range(4):
        fill_bf16(p[i], 1 + i, 64)
    for i in tl.static_range(2):
        fill_f32(alpha[i], 11 + i, 1)
        fill_f32(l_sum[i], 21 + i, 1)
        fill_f32(m_max[i], 31 + i, 1)
    store_columns(out_ptr, qk, 2, 128)


@triton.jit
def backward_spec_kernel(out_ptr, WHAT: tl.constexpr):
    """The layout of a backward pass: p in columns 0 to 63 of qk, dq in 64 to 127."""
    spec = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    qk = tlx.local_alloc((128, 128), tl.float32, 1, tlx.storage_kind.tmem, reuse=spec)
    p = tlx.local_alloc((128, 128), tl.bfloat16, 1, tlx.storage_kind.tmem, reuse=spec)
    dq = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem, reuse=spec)
    dq_again = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem, reuse=spec)
    both = tlx.reuse_group(dq, dq_again, group_type=tlx.reuse_group_type.shared)
    inner = tlx.reuse_group(p, both, group_type=tlx.reuse_group_type.distinct)
    spec.set_buffer_overlap(tlx.reuse_group(qk, inner, group_type=tlx.reuse_group_type.shared))
    fill_f32(qk[0], 100, 128)
    fill_bf16(p[0], 1, 128)
    fill_f32(dq[0], 2, 64)
    fill_f32(tlx.subslice(dq_again[0], 0, 8), 3, 8)
    store_columns(out_ptr, qk, 1, 128)


# The compiler puts p[i] into slot 2 * i + i % 2 of 32 columns (seen in its TTGIR).
OVERLAP = [
    [1 + 2 * i] * 32 + [100 + i] * 32 + [11 + i, 21 + i, 31 + i, *[100 + i] * 29, *[2 + 2 * i] * 32]
    for i in range(2)
]
PACKED = [31, 32] + [1] * 30 + [2] * 32 + [3] * 32 + [4] * 32


@pytest.mark.parametrize(
    "kernel, what, numbers",
    (
        (tmem_reuse_kernel, "p", [[1] * 64 + [2] * 64, [3] * 64 + [4] * 64]),
        (tmem_reuse_kernel, "alpha", [[1, 2, 3] + [100] * 125, [11, 12, 13] + [101] * 124 + [14]]),
        (tmem_spec_kernel, "overlap", OVERLAP),
        (tmem_spec_kernel, "none", [PACKED, [101] * 128]),
        (backward_spec_kernel, "", [[1] * 64 + [3] * 8 + [2] * 56]),
    ),
)
def test_what_lies_over_tiles_of_tensor_memory(kernel, what, numbers):
    """The number in each column of each tile, the same in every lane and in both halves."""
    out = nothing(len(numbers), 128, 128)
    report = run(kernel, (1,), out, WHAT=what, **B200)
    halves = out.view(torch.int16).view(-1, 128, 128, 2)
    assert halves.eq(torch.tensor(numbers)[:, None, :, None]).all()
    assert report.tensor_columns == 128 * len(numbers)


@triton.jit
def odd_distance_kernel(qk_ptr, alpha_ptr):
    spec = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    qk = tlx.local_alloc((128, 64), tl.float32, 2, tlx.storage_kind.tmem, reuse=spec)
    p = tlx.local_alloc((128, 128), tl.bfloat16, 2, tlx.storage_kind.tmem, reuse=spec)
    alpha = tlx.local_alloc((128, 1), tl.float32, 2, tlx.storage_kind.tmem, reuse=spec)
    inner = tlx.reuse_group(p, alpha, group_type=tlx.reuse_group_type.distinct)
    spec.set_buffer_overlap(tlx.reuse_group(qk, inner, group_type=tlx.reuse_group_type.shared))
    for i in tl.static_range(2):
        fill_f32(alpha[i], 1 + i, 1)
        fill_f32(qk[i], 101 + i, 64)
    fill_bf16(tlx.subslice(p[1], 0, 64), 7, 64)
    store_columns(qk_ptr, qk, 2, 64)
    store_columns(alpha_ptr, alpha, 2, 1)


def test_the_distance_in_a_shared_group_is_a_multiple_of_every_size():
    # 64 columns and one beside them: the compiler spaces them by 128, and the last ends at 193.
    qk, alpha = nothing(2, 128, 64), nothing(2, 128)
    report = run(odd_distance_kernel, (1,), qk, alpha, **B200)
    numbers = (qk.view(torch.int32)[:, 0] // 65537).tolist()
    assert numbers == [[101] * 64, [7] * 32 + [102] * 32]
    assert (alpha.view(torch.int32)[:, 0] // 65537).tolist() == [1, 2]
    assert report.tensor_columns == 193


@triton.jit
def paired_kernel(out_ptr, back_ptr):
    spec = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    dq = tlx.local_alloc((64, 128), tl.float32, 1, tlx.storage_kind.tmem, reuse=spec)
    dq_lanes = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem, reuse=spec)
    tl.static_assert(dq_lanes.shape[0] == 128)
    tlx.local_store(dq[0], grid2(64, 128) + 1.0)
    first = tl.program_id(0) * 8192
    tl.store(out_ptr + first + grid2(128, 64), tlx.local_load(dq_lanes[0]))
    back = tlx.local_load(tlx.subslice(dq[0], 0, 128))
    tl.store(back_ptr + first + grid2(64, 128), back)


def test_64_rows_in_a_pair_of_ctas():
    out, back = nothing(2, 128, 64), nothing(2, 64, 128)
    report = run(paired_kernel, (2,), out, back, **B200, **PAIR)
    value = torch.arange(1.0, 8193).view(64, 128)
    for cta in range(2):
        assert torch.equal(back[cta], value)
        assert torch.equal(out[cta], torch.cat([value[:, :64], value[:, 64:]]))
    assert report.tensor_columns == 64


@triton.jit
def rows64_kernel(out_ptr, SECOND: tl.constexpr):
    acc = tlx.local_alloc((64, 32), tl.float32, 2, tlx.storage_kind.tmem)
    value = grid2(64, 32) + 1.0
    tlx.local_store(acc[0], value)
    tlx.local_store(acc[1], -value)
    tl.store(out_ptr + grid2(64, 32), tlx.local_load(acc[SECOND]))


def test_64_rows_in_one_cta():
    value = torch.arange(1.0, 2049).view(64, 32)
    for second, sign in ((0, 1), (1, -1)):
        out = nothing(64, 32)
        report = run(rows64_kernel, (1,), out, SECOND=second, **B200)
        assert torch.equal(out, sign * value) and report.tensor_columns == 64


@triton.jit
def packed_kernel(
    out_ptr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Four allocations of A = (rows, columns, number) and so on: all written, then all read."""
    a = tlx.local_alloc((A[0], A[1]), tl.float32, tl.constexpr(A[2]), tlx.storage_kind.tmem)
    b = tlx.local_alloc((B[0], B[1]), tl.float32, tl.constexpr(B[2]), tlx.storage_kind.tmem)
    c = tlx.local_alloc((C[0], C[1]), tl.float32, tl.constexpr(C[2]), tlx.storage_kind.tmem)
    d = tlx.local_alloc((D[0], D[1]), tl.float32, tl.constexpr(D[2]), tlx.storage_kind.tmem)
    last = (a[A[2] - 1], b[B[2] - 1], c[C[2] - 1], d[D[2] - 1])
    for i in tl.static_range(4):
        tlx.local_store(last[i], tl.full(last[i].shape, 1.0 + i, tl.float32))
    for i in tl.static_range(4):
        tl.store(out_ptr + i, tl.sum(tlx.local_load(last[i])))


@pytest.mark.parametrize(
    "shapes, columns",
    (
        # Beside the three of 64 rows; then under them, since all 128 lanes are free there only.
        (((64, 32, 3), (128, 64, 1), (64, 32, 1), (64, 64, 1)), 160),
        (((64, 128, 2), (64, 64, 2), (64, 64, 1), (64, 64, 1)), 256),
        (((64, 64, 1), (128, 64, 1), (64, 128, 1), (64, 64, 1)), 256),
        (((128, 128, 1), (64, 64, 4), (64, 128, 3), (128, 16, 1)), 528),
    ),
)
def test_64_rows_leave_half_of_the_lanes_to_another_allocation(shapes, columns):
    """Columns as in the compiler's allocation, whose `tmem_size` is the next power of two."""
    keywords = dict(zip("ABCD", shapes, strict=True))
    types, out = {"out_ptr": "*fp32"}, torch.zeros(4)
    if columns > 512:
        message = f"512 columns, got {columns}"
        refused(ResourceLimit, message, packed_kernel, out, **keywords, **B200)
        with pytest.raises(OutOfResources, match=f"tensor memory, Required: {columns}"):
            build(packed_kernel, types, keywords, capability=100)
        return
    report = run(packed_kernel, (1,), out, **B200, **keywords)
    sums = [value * rows * cols for value, (rows, cols, _) in enumerate(shapes, 1)]
    assert out.tolist() == sums and report.tensor_columns == columns
    pair = {"races": False, **PAIR}
    assert run(packed_kernel, (2,), out, **B200, **keywords, **pair).tensor_columns == columns
    compiled = build(packed_kernel, types, keywords, capability=100)
    assert compiled.metadata.tmem_size == 2 ** (columns - 1).bit_length()


@triton.jit
def rows64_dot_kernel(
    a_ptr, b_ptr, out_ptr, TWO: tl.constexpr, SLICES: tl.constexpr, ORDER: tl.constexpr
):  # fmt: skip
    """Two accumulators of 64 rows, and beside them other tensor memory of 64 rows."""
    N: tl.constexpr = 64 if TWO else 128
    a = tlx.local_alloc((64, 64), tl.bfloat16, 1)
    b = tlx.local_alloc((64, N), tl.bfloat16, 1)
    acc = tlx.local_alloc((64, 128), tl.float32, 2, tlx.storage_kind.tmem)
    other = tlx.local_alloc((64, 64), tl.float32, 2, tlx.storage_kind.tmem)
    done = tlx.alloc_barriers(1, 2)
    rank = tlx.cluster_cta_rank()
    rows, columns = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    tlx.local_store(a[0], tl.load(a_ptr + (rank * 64 + rows) * 64 + columns))
    wide = tl.arange(0, N)[None, :]
    tlx.local_store(b[0], tl.load(b_ptr + rows * 128 + (rank * 64 if TWO else 0) + wide))
    if ORDER:
        tlx.local_store(acc[0], tl.zeros((64, 128), tl.float32))
    tlx.fence("async_shared")
    tlx.cluster_barrier()
    for i in tl.static_range(2):
        tlx.async_dot(a[0], b[0], acc[i], use_acc=False, mBarriers=[done[0]], two_ctas=TWO)
    tlx.barrier_wait(done[0], 0)
    tlx.local_store(other[1], tl.zeros((64, 64), tl.float32))
    out = out_ptr + (rank * 64 + rows) * 128
    if SLICES:
        for s in tl.static_range(2):
            half = tlx.local_load(tlx.subslice(acc[1], s * 64, 64))
            tl.store(out + s * 64 + columns, half)
    else:
        tl.store(out + tl.arange(0, 128)[None, :], tlx.local_load(acc[1]))
    tl.store(out_ptr, tl.load(out_ptr) + tl.sum(tlx.local_load(other[1])))


@pytest.mark.parametrize("two", (False, True))
def test_64_rows_are_those_of_a_pair_if_a_product_of_the_pair_writes_them(two):
    """Alone: 256 columns of half the lanes, `other` in the other half. Of a pair: twice 64 columns
    of all lanes, `other` after them in 128 of one half."""
    a, b = torch.randn(128, 64).bfloat16(), torch.randn(64, 128).bfloat16()
    out = torch.zeros(128, 128)
    keywords = {**B200, **PAIR, "races": False, "TWO": two}
    report = run(rows64_dot_kernel, (2,), a, b, out, SLICES=not two, ORDER=0, **keywords)
    torch.testing.assert_close(out, a.float() @ b.float())
    assert report.tensor_columns == 256
    types = {"a_ptr": "*bf16", "b_ptr": "*bf16", "out_ptr": "*fp32"}
    constants = {"TWO": two, "SLICES": not two, "ORDER": 0}
    compiled = build(rows64_dot_kernel, types, constants, capability=100, **PAIR)
    assert compiled.metadata.tmem_size == 256
    if two:
        for match, more in (
            ("a slice of acc.1., whose 64 rows", {"SLICES": True, "ORDER": 0}),
            ("acc.0., 64 rows both of a pair", {"SLICES": False, "ORDER": 1}),
        ):
            refused(Unsupported, match, rows64_dot_kernel, a, b, out, **more, **keywords, grid=(2,))


@triton.jit
def beside_kernel(v_ptr, out_ptr, FIRST: tl.constexpr):
    """A product of P in tensor memory: with the accumulator, in one half of the lanes."""
    v = tlx.local_alloc((64, 128), tl.bfloat16, 1)
    if FIRST == "acc":
        acc = tlx.local_alloc((64, 128), tl.float32, 1, tlx.storage_kind.tmem)
    p = tlx.local_alloc((64, 64), tl.bfloat16, 1, tlx.storage_kind.tmem)
    if FIRST == "p":
        acc = tlx.local_alloc((64, 128), tl.float32, 1, tlx.storage_kind.tmem)
    done = tlx.alloc_barriers(1)
    fill(v[0], v_ptr, 64, 128)
    tlx.local_store(p[0], tl.full((64, 64), 1.0, tl.bfloat16))
    tlx.fence("async_shared")
    tlx.async_dot(p[0], v[0], acc[0], use_acc=False, mBarriers=[done[0]])
    tlx.barrier_wait(done[0], 0)
    tl.store(out_ptr + grid2(64, 128), tlx.local_load(acc[0]))


@pytest.mark.parametrize("first", ("p", "acc"))
def test_operands_in_tensor_memory_share_their_lanes(first):
    v, out = torch.randn(64, 128).bfloat16(), torch.zeros(64, 128)
    report = run(beside_kernel, (1,), v, out, FIRST=first, **B200)
    torch.testing.assert_close(out, v.float().sum(0).expand(64, 128))
    assert report.tensor_columns == 160
    types = {"v_ptr": "*bf16", "out_ptr": "*fp32"}
    compiled = build(beside_kernel, types, {"FIRST": first}, capability=100)
    assert compiled.metadata.tmem_size == 256


@triton.jit
def lanes_kernel(out_ptr, ROWS: tl.constexpr, OVER: tl.constexpr):
    first = tlx.local_alloc((ROWS, 64), tl.float32, 1, tlx.storage_kind.tmem)
    over = tlx.local_alloc((OVER, 64), tl.float32, 1, tlx.storage_kind.tmem, reuse=first)
    tlx.local_store(first[0], tl.zeros((ROWS, 64), tl.float32))
    tlx.local_store(over[0], tl.full((OVER, 64), 1.0, tl.float32))
    tl.store(out_ptr + grid2(ROWS, 64), tlx.local_load(first[0]))


def test_64_rows_take_16_lanes_of_each_warp():
    out = nothing(128, 64)
    run(lanes_kernel, (1,), out, ROWS=128, OVER=64, **B200)
    expected = (torch.arange(128) % 32 < 16).float()
    assert torch.equal(out, expected[:, None].expand(128, 64))
    message = "reuse must have 128 rows .* got 64 in first"
    refused(InvalidKernel, message, lanes_kernel, out, ROWS=64, OVER=128, **B200)


# Limits.


@triton.jit
def shared_limit_kernel(KILOBYTES: tl.constexpr, BARRIERS: tl.constexpr):
    tlx.local_alloc((1024,), tl.int8, KILOBYTES)
    if BARRIERS:
        tlx.alloc_barriers(BARRIERS)


def test_shared_memory_has_232448_bytes():
    for kilobytes, barriers in ((227, 0), (226, 128)):
        report = run(shared_limit_kernel, (2,), KILOBYTES=kilobytes, BARRIERS=barriers)
        assert report.shared_bytes == 232448 and report.barriers == barriers
    for kilobytes, barriers, got in ((228, 0, 233472), (227, 1, 232456), (226, 129, 232456)):
        keywords = {"KILOBYTES": kilobytes, "BARRIERS": barriers}
        message = f"232448 bytes per CTA, got {got}"
        refused(ResourceLimit, message, shared_limit_kernel, **keywords)


@triton.jit
def staged_kernel(x_desc, y_desc, BUFFERS: tl.constexpr):
    """Two tasks that move registers by TMA: one twice, one to and fro, 8 KB each time."""
    ring = tlx.local_alloc((1024,), tl.float32, BUFFERS)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.local_store(ring[0], tl.full((1024,), 1.0, tl.float32))
            y_desc.store([0, 0], tl.full((64, 64), 1.0, tl.bfloat16))
            y_desc.store([64, 0], tl.full((64, 64), 2.0, tl.bfloat16))
        with tlx.async_task(num_warps=4):
            tlx.local_store(ring[BUFFERS - 1], tl.full((1024,), 1.0, tl.float32))
            y_desc.store([128, 0], x_desc.load([0, 0]))


def test_what_a_task_stages_for_tma_counts():
    """The compiler's extra for captures of tasks is not modelled: some hundred bytes."""
    x, y = torch.full((64, 64), 3.0).bfloat16(), torch.zeros(192, 64).bfloat16()
    descs = [box(tensor, 64, 64) for tensor in (x, y)]
    types = dict.fromkeys(("x_desc", "y_desc"), "tensordesc<bf16[64, 64]>")
    for buffers in (4, 52):
        compiled = build(staged_kernel, types, {"BUFFERS": buffers})
        report = run(staged_kernel, (1,), *descs, BUFFERS=buffers)
        assert y[::64, 0].tolist() == [1, 2, 3]
        assert report.shared_bytes == 4096 * buffers + 2 * 8192
        assert 0 < compiled.metadata.shared - report.shared_bytes < 256
    with pytest.raises(ResourceLimit, match="232448 bytes per CTA, got 233472") as caught:
        run(staged_kernel, (1,), *descs, BUFFERS=53)
    assert caught.value.line in (
        place(staged_kernel, "([0, 0], tl.full")[1], place(staged_kernel, "x_desc.load")[1]
    )  # fmt: skip
    with pytest.raises(OutOfResources, match="shared memory"):
        build(staged_kernel, types, {"BUFFERS": 53})


@triton.jit
def tensor_limit_kernel(TILES: tl.constexpr, COLUMNS: tl.constexpr):
    tlx.local_alloc((128, 128), tl.float32, TILES, tlx.storage_kind.tmem)
    tlx.local_alloc((128, 2 * COLUMNS), tl.bfloat16, 1, tlx.storage_kind.tmem)


def test_tensor_memory_has_512_columns():
    assert run(tensor_limit_kernel, (1,), TILES=3, COLUMNS=128, **B200).tensor_columns == 512
    keywords = {"TILES": 4, "COLUMNS": 1, "line": "bfloat16", **B200}
    refused(ResourceLimit, "512 columns, got 513", tensor_limit_kernel, **keywords)


@triton.jit
def roles_kernel(WARPS: tl.constexpr, REPLICAS: tl.constexpr, REGISTERS: tl.constexpr):
    with tlx.async_tasks():
        with tlx.async_task("default"):
            pass
        with tlx.async_task(num_warps=WARPS, registers=REGISTERS, replicate=REPLICAS):
            pass


def test_warps():
    report = run(roles_kernel, (1,), WARPS=4, REPLICAS=7, REGISTERS=24)
    assert report.warps == {"default": 4, **{f"task0[{i}]": 4 for i in range(7)}}
    with pytest.raises(ResourceLimit, match="at most 32 warps, got 36"):
        run(roles_kernel, (1,), WARPS=4, REPLICAS=8, REGISTERS=24)
    with pytest.raises(ResourceLimit, match="at most 32 warps, got 36"):
        run(roles_kernel, (1,), WARPS=4, REPLICAS=7, REGISTERS=24, num_warps=8)


def test_registers():
    # 384 threads have 168 each: 24 * 128 for the default task and 256 * 240 for the others.
    run(roles_kernel, (1,), WARPS=4, REPLICAS=2, REGISTERS=240)
    with pytest.warns(UserWarning, match="384 threads have 64512, and the tasks ask for 66560"):
        run(roles_kernel, (1,), WARPS=4, REPLICAS=2, REGISTERS=248)
    with pytest.raises(InvalidKernel, match="a multiple of 8, got 100"):
        run(roles_kernel, (1,), WARPS=4, REPLICAS=2, REGISTERS=100)


@triton.jit
def groups_kernel(
    out_ptr, MATH: tl.constexpr, A: tl.constexpr, B: tl.constexpr, WARPS: tl.constexpr
):  # fmt: skip
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tl.store(out_ptr, 1)
        with tlx.async_task(num_warps=1, registers=A):
            tl.store(out_ptr + 1, 2)
        with tlx.async_task(num_warps=8, registers=MATH):
            tl.store(out_ptr + 2, 3)
        with tlx.async_task(num_warps=WARPS, registers=B):
            tl.store(out_ptr + 3, 4)


@pytest.mark.parametrize(
    "math, a, b, warps, dropped",
    (
        (208, 48, 48, 1, None),
        (208, 48, 80, 1, "512 threads have 65536, and the tasks ask for 66560"),
        (184, 48, 24, 4, None),  # the one warp has a warp group to itself
        (200, 48, 24, 4, "640 threads have 61440, and the tasks ask for 63488"),
    ),
)
def test_a_warp_group_gets_the_most_that_one_of_its_tasks_asks_for(math, a, b, warps, dropped):
    """The compiler drops all requests where the emulator warns."""
    constants = {"MATH": math, "A": a, "B": b, "WARPS": warps}
    compiled = build(groups_kernel, {"out_ptr": "*i32"}, constants, capability=100)
    assert ("setmaxnreg" in compiled.asm["ptx"]) == (dropped is None)
    out = torch.zeros(4, dtype=torch.int32)
    with warnings.catch_warnings(record=True) as shown:
        run(groups_kernel, (2,), out, **constants)
    assert out.tolist() == [1, 2, 3, 4]
    assert len(shown) == (dropped is not None)
    for warning in shown:
        assert dropped in str(warning.message)
        assert (warning.filename, warning.lineno) == place(groups_kernel, "async_tasks()")


@triton.jit
def some_registers_kernel(out_ptr):
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tl.store(out_ptr, 1)
        with tlx.async_task(num_warps=4, registers=120):
            tl.store(out_ptr + 1, 2)
        with tlx.async_task(num_warps=4):
            tl.store(out_ptr + 2, 3)


def test_all_tasks_name_registers_or_none():
    with pytest.raises(CompilationError, match="either ALL or NONE"):
        build(some_registers_kernel, {"out_ptr": "*i32"})
    with pytest.raises(InvalidKernel, match="must name registers, or none"):
        run(some_registers_kernel, (1,), torch.zeros(3, dtype=torch.int32))


# Contents that nobody wrote.


@triton.jit
def unwritten_kernel(out_ptr, WRITTEN: tl.constexpr, TENSOR: tl.constexpr):
    if TENSOR:
        cell = tlx.local_alloc((128, 4), tl.float32, 2, tlx.storage_kind.tmem)
    else:
        cell = tlx.local_alloc((128, 4), tl.float32, 2)
    if WRITTEN:
        part = tlx.local_slice(cell[1], [0, 0], [128, WRITTEN])
        tlx.local_store(part, tl.full((128, WRITTEN), 1.0, tl.float32))
    x = tlx.local_load(cell[1])
    tl.store(out_ptr + grid2(128, 4), x)


@pytest.mark.parametrize("tensor", (False, True))
def test_unwritten_memory(tensor):
    options = {"TENSOR": tensor, **B200}
    for written in (0, 1, 2):
        keywords = {"WRITTEN": written, "line": "x = ", **options}
        message = "before it has been written"
        error = refused(UninitializedRead, message, unwritten_kernel, nothing(512), **keywords)
        assert error.buffer == "cell[1]"
        out = nothing(128, 4)
        report = run(unwritten_kernel, (1,), out, WRITTEN=written, uninitialized="allow", **options)
        assert report.uninitialized == 1
        assert out[:, :written].eq(1).all() and out[:, written:].isnan().all()
    out = nothing(128, 4)
    assert run(unwritten_kernel, (1,), out, WRITTEN=4, **options).uninitialized == 0
    assert out.eq(1).all()
    with pytest.raises(ValueError, match="uninitialized must be one of"):
        run(unwritten_kernel, (1,), out, WRITTEN=4, uninitialized="ignore", **options)


def test_enabled_passes_its_options_on_and_ends_with_an_error():
    keywords = {"WRITTEN": 0, "TENSOR": False}
    with pytest.raises(UninitializedRead), enabled("sm_100", schedule=3) as reports:
        unwritten_kernel[(1,)](nothing(512), **keywords)
    assert reports == [] and [type(error) for error in reports.findings] == [UninitializedRead]
    with enabled("sm_100", uninitialized="allow", trace=True) as reports:
        unwritten_kernel[(1,)](nothing(512), **keywords)
    assert reports[0].uninitialized == 1 and reports[0].arch == "sm_100"
    assert reports[0].timeline.events


def test_memory_is_new_in_every_cta():
    refused(UninitializedRead, None, left_over_kernel, grid=(2,))
    run(left_over_kernel, (1,))


@triton.jit
def left_over_kernel():
    cell = tlx.local_alloc((16,), tl.int32, 1)
    if tl.program_id(0) == 0:
        tlx.local_store(cell[0], tl.arange(0, 16))
    tlx.local_load(cell[0])


@pytest.mark.parametrize("tensor", (False, True))
def test_a_storage_that_grows_keeps_what_was_written(tensor):
    class Cta:
        def reserve(self, num_bytes):
            pass

        def reserve_columns(self, storage):
            pass

    storage = Storage(Cta(), tensor)
    storage.reserve(4)
    storage.data.fill_(7)
    storage.reserve(8)
    assert (storage.data[..., :4] == 7).all() and (storage.data[..., 4:] == 0xFF).all()
