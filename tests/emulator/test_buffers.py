"""Shared and tensor memory: allocations, views, aliases, limits, and what nobody has written."""

import warnings

import pytest
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from _lib import studies
from _lib.compile_check import build, build_launch
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import launches
from tests.emulator.checking import place
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


def nothing(*shape, dtype=torch.float32):
    """An output that shows what was left out."""
    return torch.full(shape, -1, dtype=dtype)


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
        with pytest.raises(OutOfBounds, match=f"ring of CTA 0 has 2 buffers, got index {i}"):
            run(view_kernel, (1,), i, WHOLE=False)
    with pytest.raises(InvalidKernel, match="ring is 2 buffers; index it"):
        run(view_kernel, (1,), 0, WHOLE=True)


@triton.jit
def rows_kernel(out_ptr, row):
    cell = tlx.local_alloc((4, 16), tl.int32, 1)
    table = cell[0]
    lanes = tl.arange(0, 16)
    tlx.local_store(table, tl.zeros((4, 16), tl.int32))
    tlx.local_store(table[row], lanes + 1)
    tl.store(out_ptr + tl.arange(0, 4)[:, None] * 16 + lanes[None, :], tlx.local_load(table))


def test_a_row_of_a_buffer():
    for row in range(4):
        out = nothing(4, 16, dtype=torch.int32)
        run(rows_kernel, (1,), out, row)
        expected = torch.zeros(4, 16, dtype=torch.int32)
        expected[row] = torch.arange(1, 17)
        assert torch.equal(out, expected)
    with pytest.raises(OutOfBounds):
        run(rows_kernel, (1,), out, 4)


@triton.jit
def windows_kernel(out_ptr, ROW: tl.constexpr, COLUMN: tl.constexpr, TRANSPOSED: tl.constexpr):
    cell = tlx.local_alloc((8, 32), tl.float32, 2)
    rows, columns = tl.arange(0, 8), tl.arange(0, 32)
    tlx.local_store(cell[0], tl.zeros((8, 32), tl.float32))
    tlx.local_store(cell[1], tl.zeros((8, 32), tl.float32))
    window = tlx.local_slice(cell[1], [ROW, COLUMN], [4, 16])
    value = tl.arange(0, 4)[:, None] * 16 + tl.arange(0, 16)[None, :] + 1.0
    if TRANSPOSED:
        tlx.local_store(tlx.local_trans(window), tl.trans(value))
    else:
        tlx.local_store(window, value)
    again = tlx.local_load(tlx.local_trans(tlx.local_trans(window)))
    tl.device_assert(again == value)
    place = rows[:, None] * 32 + columns[None, :]
    tl.store(out_ptr + place, tlx.local_load(cell[0]))
    tl.store(out_ptr + 256 + place, tlx.local_load(cell[1]))


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
    with pytest.raises(OutOfBounds, match=r"leaves cell\[1\] of CTA 0") as caught:
        run(windows_kernel, (1,), nothing(512), ROW=row, COLUMN=column, TRANSPOSED=False)
    assert (caught.value.file, caught.value.line) == place(windows_kernel, "local_slice")


@triton.jit
def trans_kernel(out_ptr):
    cell = tlx.local_alloc((8, 16), tl.bfloat16, 1)
    value = tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tlx.local_store(cell[0], value.to(tl.bfloat16))
    turned = tlx.local_load(tlx.local_trans(cell[0]))
    tl.static_assert(turned.shape[0] == 16)
    tl.store(out_ptr + tl.arange(0, 16)[:, None] * 8 + tl.arange(0, 8)[None, :], turned)


def test_transposed():
    out = nothing(16, 8)
    run(trans_kernel, (1,), out)
    assert torch.equal(out, torch.arange(128.0).view(8, 16).T)


@triton.jit
def seen_otherwise_kernel(out_ptr, HOW: tl.constexpr):
    cell = tlx.local_alloc((8, 16), tl.float32, 1)
    value = (tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 16)[None, :]) * 1.5
    tlx.local_store(cell[0], value)
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
    ROWS: tl.constexpr = other.shape[0]
    COLUMNS: tl.constexpr = other.shape[1]
    tl.store(out_ptr + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS), other)


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
    with pytest.raises(InvalidKernel):
        run(seen_otherwise_kernel, (1,), nothing(256), HOW=how)


@triton.jit
def wrong_value_kernel(DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    cell = tlx.local_alloc((16,), tl.float32, 1)
    tlx.local_store(cell[0], tl.zeros((BLOCK,), DTYPE))


def test_a_store_has_the_type_and_size_of_the_buffer():
    run(wrong_value_kernel, (1,), DTYPE=tl.float32, BLOCK=16)
    for dtype, block in ((tl.float16, 16), (tl.float32, 8)):
        with pytest.raises(InvalidKernel, match=r"into cell\[0\] takes fp32\[16\]"):
            run(wrong_value_kernel, (1,), DTYPE=dtype, BLOCK=block)


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
        spec.set_buffer_overlap(
            tlx.reuse_group(
                a,
                tlx.reuse_group(b, c, group_type=tlx.reuse_group_type.distinct),
                group_type=tlx.reuse_group_type.shared,
            )
        )
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
    with pytest.raises(InvalidKernel, match="takes one set_buffer_overlap, got two"):
        run(spec_twice_kernel, (1,), SIZE=256)
    with pytest.raises(InvalidKernel, match="must fit the 255 bytes .* got 256"):
        run(spec_twice_kernel, (1,), SIZE=255)


# Tensor memory.


@triton.jit
def columns_kernel(out_ptr, WHERE: tl.constexpr):
    acc = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem)
    tlx.local_store(acc[0], tl.zeros((128, 64), tl.float32))
    value = tl.arange(0, 128)[:, None] * 16 + tl.arange(0, 16)[None, :] + 1.0
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
    tlx.local_store(part, value)
    place = tl.arange(0, 128)[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(out_ptr + place, tlx.local_load(acc[0]))


@pytest.mark.parametrize("where", ("subslice", "slice"))
def test_columns_of_tensor_memory(where):
    out = nothing(128, 64)
    report = run(columns_kernel, (1,), out, WHERE=where, arch="sm_100")
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
    with pytest.raises(error, match=message):
        run(columns_kernel, (1,), nothing(128, 64), WHERE=where, arch=arch)


# A number in each 16-bit half of a column: i in both halves.
@triton.jit
def both_halves(i):
    return (i * 65537).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def store_columns(out_ptr, buffers, NUM: tl.constexpr, COLUMNS: tl.constexpr):
    place = tl.arange(0, 128)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    for i in tl.static_range(NUM):
        tl.store(out_ptr + i * 128 * COLUMNS + place, tlx.local_load(buffers[i]))


@triton.jit
def fill_bf16(buffer, number, COLUMNS: tl.constexpr):
    bits = tl.full((128, COLUMNS), 0, tl.int16) + number.to(tl.int16)
    tlx.local_store(buffer, bits.to(tl.bfloat16, bitcast=True))


@triton.jit
def fill_f32(buffer, number, COLUMNS: tl.constexpr):
    bits = tl.full((128, COLUMNS), 0, tl.int32) + number * 65537
    tlx.local_store(buffer, bits.to(tl.float32, bitcast=True))


@triton.jit
def tmem_reuse_kernel(out_ptr, WHAT: tl.constexpr):
    qk = tlx.local_alloc((128, 128), tl.float32, 2, tlx.storage_kind.tmem)
    p = tlx.local_alloc((128, 128), tl.bfloat16, 4, tlx.storage_kind.tmem, reuse=qk)
    alpha = tlx.local_alloc((128, 1), tl.float32, 256, tlx.storage_kind.tmem, reuse=qk)
    for i in tl.static_range(2):
        fill_f32(qk[i], tl.full((), 100 + i, tl.int32), 128)
    if WHAT == "p":
        for i in tl.static_range(4):
            fill_bf16(p[i], tl.full((), 1 + i, tl.int32), 128)
    else:
        for i in tl.static_range(3):
            fill_f32(alpha[i], tl.full((), 1 + i, tl.int32), 1)
            fill_f32(alpha[128 + i], tl.full((), 11 + i, tl.int32), 1)
        fill_f32(alpha[255], tl.full((), 14, tl.int32), 1)
    store_columns(out_ptr, qk, 2, 128)


def column_numbers(kernel, num, columns, **options):
    """The number in each column of the `num` buffers, the same in every lane and both halves."""
    out = nothing(num, 128, columns)
    report = run(kernel, (1,), out, arch="sm_100", **options)
    bits = out.view(torch.int32)
    assert bits.eq(bits[:, :1]).all()
    halves = out.view(torch.int16).view(num, 128, columns, 2)
    assert halves[..., 0].eq(halves[..., 1]).all()
    return (bits[:, 0] // 65537).tolist(), report


def test_bf16_tiles_over_fp32_tiles_of_tensor_memory():
    numbers, report = column_numbers(tmem_reuse_kernel, 2, 128, WHAT="p")
    assert numbers == [[1] * 64 + [2] * 64, [3] * 64 + [4] * 64]
    assert report.tensor_columns == 256


def test_single_columns_over_tiles_of_tensor_memory():
    numbers, _ = column_numbers(tmem_reuse_kernel, 2, 128, WHAT="alpha")
    assert numbers == [[1, 2, 3] + [100] * 125, [11, 12, 13] + [101] * 124 + [14]]


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
        spec.set_buffer_overlap(
            tlx.reuse_group(
                qk,
                tlx.reuse_group(
                    tlx.reuse_group(p, group_size=2),
                    alpha,
                    l_sum,
                    m_max,
                    group_type=tlx.reuse_group_type.distinct,
                ),
                group_type=tlx.reuse_group_type.shared,
            )
        )
    for i in tl.static_range(2):
        fill_f32(qk[i], tl.full((), 100 + i, tl.int32), 128)
    for i in tl.static_range(4):
        fill_bf16(p[i], tl.full((), 1 + i, tl.int32), 64)
    for i in tl.static_range(2):
        fill_f32(alpha[i], tl.full((), 11 + i, tl.int32), 1)
        fill_f32(l_sum[i], tl.full((), 21 + i, tl.int32), 1)
        fill_f32(m_max[i], tl.full((), 31 + i, tl.int32), 1)
    store_columns(out_ptr, qk, 2, 128)


def test_an_overlap_in_tensor_memory():
    numbers, report = column_numbers(tmem_spec_kernel, 2, 128, WHAT="overlap")
    # The compiler puts p[i] into slot 2 * i + i % 2 of 32 columns (seen in its TTGIR).
    for i in range(2):
        left = [1 + 2 * i] * 32 + [100 + i] * 32
        right = [11 + i, 21 + i, 31 + i, *[100 + i] * 29, *[2 + 2 * i] * 32]
        assert numbers[i] == left + right
    assert report.tensor_columns == 256


def test_a_spec_without_overlap_in_tensor_memory():
    numbers, report = column_numbers(tmem_spec_kernel, 2, 128, WHAT="none")
    first = [31, 32] + [1] * 30 + [2] * 32 + [3] * 32 + [4] * 32
    assert numbers == [first, [101] * 128] and report.tensor_columns == 256


@triton.jit
def backward_spec_kernel(out_ptr):
    """The layout of a backward pass: p in columns 0 to 63 of qk, dq in 64 to 127."""
    spec = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    qk = tlx.local_alloc((128, 128), tl.float32, 1, tlx.storage_kind.tmem, reuse=spec)
    p = tlx.local_alloc((128, 128), tl.bfloat16, 1, tlx.storage_kind.tmem, reuse=spec)
    dq = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem, reuse=spec)
    dq_again = tlx.local_alloc((128, 64), tl.float32, 1, tlx.storage_kind.tmem, reuse=spec)
    spec.set_buffer_overlap(
        tlx.reuse_group(
            qk,
            tlx.reuse_group(
                p,
                tlx.reuse_group(dq, dq_again, group_type=tlx.reuse_group_type.shared),
                group_type=tlx.reuse_group_type.distinct,
            ),
            group_type=tlx.reuse_group_type.shared,
        )
    )
    fill_f32(qk[0], tl.full((), 100, tl.int32), 128)
    fill_bf16(p[0], tl.full((), 1, tl.int32), 128)
    fill_f32(dq[0], tl.full((), 2, tl.int32), 64)
    fill_f32(tlx.subslice(dq_again[0], 0, 8), tl.full((), 3, tl.int32), 8)
    store_columns(out_ptr, qk, 1, 128)


def test_groups_in_a_distinct_group():
    numbers, report = column_numbers(backward_spec_kernel, 1, 128)
    assert numbers == [[1] * 64 + [3] * 8 + [2] * 56] and report.tensor_columns == 128


@triton.jit
def odd_distance_kernel(qk_ptr, alpha_ptr):
    spec = tlx.storage_alias_spec(storage=tlx.storage_kind.tmem)
    qk = tlx.local_alloc((128, 64), tl.float32, 2, tlx.storage_kind.tmem, reuse=spec)
    p = tlx.local_alloc((128, 128), tl.bfloat16, 2, tlx.storage_kind.tmem, reuse=spec)
    alpha = tlx.local_alloc((128, 1), tl.float32, 2, tlx.storage_kind.tmem, reuse=spec)
    inner = tlx.reuse_group(p, alpha, group_type=tlx.reuse_group_type.distinct)
    spec.set_buffer_overlap(tlx.reuse_group(qk, inner, group_type=tlx.reuse_group_type.shared))
    for i in tl.static_range(2):
        fill_f32(alpha[i], tl.full((), 1 + i, tl.int32), 1)
        fill_f32(qk[i], tl.full((), 101 + i, tl.int32), 64)
    fill_bf16(tlx.subslice(p[1], 0, 64), tl.full((), 7, tl.int32), 64)
    store_columns(qk_ptr, qk, 2, 64)
    store_columns(alpha_ptr, alpha, 2, 1)


def test_the_distance_in_a_shared_group_is_a_multiple_of_every_size():
    # 64 columns and one beside them: the compiler spaces them by 128, and the last ends at 193.
    qk, alpha = nothing(2, 128, 64), nothing(2, 128)
    report = run(odd_distance_kernel, (1,), qk, alpha, arch="sm_100")
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
    rows, columns = tl.arange(0, 64), tl.arange(0, 128)
    value = rows[:, None] * 128 + columns[None, :] + 1.0
    tlx.local_store(dq[0], value)
    x = tlx.local_load(dq_lanes[0])
    out = out_ptr + tl.program_id(0) * 8192
    tl.store(out + tl.arange(0, 128)[:, None] * 64 + rows[None, :], x)
    back = tlx.local_load(tlx.subslice(dq[0], 0, 128))
    tl.store(back_ptr + tl.program_id(0) * 8192 + rows[:, None] * 128 + columns[None, :], back)


def test_64_rows_in_a_pair_of_ctas():
    out, back = nothing(2, 128, 64), nothing(2, 64, 128)
    report = run(paired_kernel, (2,), out, back, arch="sm_100", ctas_per_cga=(2, 1, 1))
    value = torch.arange(1.0, 8193).view(64, 128)
    for cta in range(2):
        assert torch.equal(back[cta], value)
        assert torch.equal(out[cta], torch.cat([value[:, :64], value[:, 64:]]))
    assert report.tensor_columns == 64


@triton.jit
def rows64_kernel(out_ptr, SECOND: tl.constexpr):
    acc = tlx.local_alloc((64, 32), tl.float32, 2, tlx.storage_kind.tmem)
    value = tl.arange(0, 64)[:, None] * 32 + tl.arange(0, 32)[None, :] + 1.0
    tlx.local_store(acc[0], value)
    tlx.local_store(acc[1], -value)
    place = tl.arange(0, 64)[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(out_ptr + place, tlx.local_load(acc[SECOND]))


def test_64_rows_in_one_cta():
    value = torch.arange(1.0, 2049).view(64, 32)
    for second, sign in ((0, 1), (1, -1)):
        out = nothing(64, 32)
        report = run(rows64_kernel, (1,), out, SECOND=second, arch="sm_100")
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
    tlx.local_store(a[A[2] - 1], tl.full((A[0], A[1]), 1.0, tl.float32))
    tlx.local_store(b[B[2] - 1], tl.full((B[0], B[1]), 2.0, tl.float32))
    tlx.local_store(c[C[2] - 1], tl.full((C[0], C[1]), 3.0, tl.float32))
    tlx.local_store(d[D[2] - 1], tl.full((D[0], D[1]), 4.0, tl.float32))
    tl.store(out_ptr, tl.sum(tlx.local_load(a[A[2] - 1])))
    tl.store(out_ptr + 1, tl.sum(tlx.local_load(b[B[2] - 1])))
    tl.store(out_ptr + 2, tl.sum(tlx.local_load(c[C[2] - 1])))
    tl.store(out_ptr + 3, tl.sum(tlx.local_load(d[D[2] - 1])))


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
    given = dict(zip("ABCD", shapes, strict=True))
    types, options, out = {"out_ptr": "*fp32"}, {"num_warps": 4}, torch.zeros(4)
    if columns > 512:
        with pytest.raises(ResourceLimit, match=f"512 columns, got {columns}"):
            run(packed_kernel, (1,), out, arch="sm_100", **given)
        with pytest.raises(OutOfResources, match=f"tensor memory, Required: {columns}"):
            build(packed_kernel, types, given, capability=100, options=options)
        return
    report = run(packed_kernel, (1,), out, arch="sm_100", **given)
    sums = [value * rows * cols for value, (rows, cols, _) in enumerate(shapes, 1)]
    assert out.tolist() == sums and report.tensor_columns == columns
    pair = {"races": False, "ctas_per_cga": (2, 1, 1)}
    assert run(packed_kernel, (2,), out, arch="sm_100", **given, **pair).tensor_columns == columns
    made = build(packed_kernel, types, given, capability=100, options=options)
    assert made.metadata.tmem_size == 2 ** (columns - 1).bit_length()


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


@pytest.mark.parametrize("two, columns", ((False, 256), (True, 256)))
def test_64_rows_are_those_of_a_pair_if_a_product_of_the_pair_writes_them(two, columns):
    """Alone: 256 columns of half the lanes, `other` in the other half. Of a pair: twice 64 columns
    of all lanes, `other` after them in 128 of one half."""
    a, b, out = torch.randn(128, 64), torch.randn(64, 128), torch.zeros(128, 128)
    a, b = a.bfloat16(), b.bfloat16()
    given = {"arch": "sm_100", "ctas_per_cga": (2, 1, 1), "races": False, "TWO": two}
    report = run(rows64_dot_kernel, (2,), a, b, out, SLICES=not two, ORDER=0, **given)
    torch.testing.assert_close(out, a.float() @ b.float())
    assert report.tensor_columns == columns
    types = {"a_ptr": "*bf16", "b_ptr": "*bf16", "out_ptr": "*fp32"}
    constants = {"TWO": two, "SLICES": not two, "ORDER": 0}
    options = {"num_warps": 4, "ctas_per_cga": (2, 1, 1)}
    made = build(rows64_dot_kernel, types, constants, capability=100, options=options)
    assert made.metadata.tmem_size == columns
    if two:
        for match, more in (
            ("a slice of acc.1., whose 64 rows", {"SLICES": True, "ORDER": 0}),
            ("acc.0., 64 rows both of a pair", {"SLICES": False, "ORDER": 1}),
        ):
            with pytest.raises(Unsupported, match=match):
                run(rows64_dot_kernel, (2,), a, b, out, **more, **given)


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
    rows, columns = tl.arange(0, 64)[:, None], tl.arange(0, 128)[None, :]
    tlx.local_store(v[0], tl.load(v_ptr + rows * 128 + columns))
    tlx.local_store(p[0], tl.full((64, 64), 1.0, tl.bfloat16))
    tlx.fence("async_shared")
    tlx.async_dot(p[0], v[0], acc[0], use_acc=False, mBarriers=[done[0]])
    tlx.barrier_wait(done[0], 0)
    tl.store(out_ptr + rows * 128 + columns, tlx.local_load(acc[0]))


@pytest.mark.parametrize("first", ("p", "acc"))
def test_operands_in_tensor_memory_share_their_lanes(first):
    v, out = torch.randn(64, 128).bfloat16(), torch.zeros(64, 128)
    report = run(beside_kernel, (1,), v, out, FIRST=first, arch="sm_100")
    torch.testing.assert_close(out, v.float().sum(0).expand(64, 128))
    assert report.tensor_columns == 160
    types = {"v_ptr": "*bf16", "out_ptr": "*fp32"}
    options = {"num_warps": 4}
    made = build(beside_kernel, types, {"FIRST": first}, capability=100, options=options)
    assert made.metadata.tmem_size == 256


@triton.jit
def lanes_kernel(out_ptr, ROWS: tl.constexpr, OVER: tl.constexpr):
    first = tlx.local_alloc((ROWS, 64), tl.float32, 1, tlx.storage_kind.tmem)
    over = tlx.local_alloc((OVER, 64), tl.float32, 1, tlx.storage_kind.tmem, reuse=first)
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, 64)[None, :]
    tlx.local_store(first[0], tl.zeros((ROWS, 64), tl.float32))
    tlx.local_store(over[0], tl.full((OVER, 64), 1.0, tl.float32))
    tl.store(out_ptr + rows * 64 + columns, tlx.local_load(first[0]))


def test_64_rows_take_16_lanes_of_each_warp():
    out = nothing(128, 64)
    run(lanes_kernel, (1,), out, ROWS=128, OVER=64, arch="sm_100")
    expected = (torch.arange(128) % 32 < 16).float()
    assert torch.equal(out, expected[:, None].expand(128, 64))
    with pytest.raises(InvalidKernel, match="reuse must have 128 rows .* got 64 in first"):
        run(lanes_kernel, (1,), out, ROWS=64, OVER=128, arch="sm_100")


# Limits.


@triton.jit
def shared_limit_kernel(KILOBYTES: tl.constexpr, BARRIERS: tl.constexpr):
    tlx.local_alloc((1024,), tl.int8, KILOBYTES)
    if BARRIERS:
        tlx.alloc_barriers(BARRIERS)


def test_shared_memory_has_232448_bytes():
    report = run(shared_limit_kernel, (2,), KILOBYTES=227, BARRIERS=0)
    assert report.shared_bytes == 232448
    report = run(shared_limit_kernel, (1,), KILOBYTES=226, BARRIERS=128)
    assert report.shared_bytes == 232448 and report.barriers == 128
    for kilobytes, barriers, got in ((228, 0, 233472), (227, 1, 232456), (226, 129, 232456)):
        with pytest.raises(ResourceLimit, match=f"232448 bytes per CTA, got {got}"):
            run(shared_limit_kernel, (1,), KILOBYTES=kilobytes, BARRIERS=barriers)


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
    """What the compiler adds for what tasks capture is not modelled: some hundred bytes."""
    x, y = torch.full((64, 64), 3.0).bfloat16(), torch.zeros(192, 64).bfloat16()
    descs = [TensorDescriptor.from_tensor(tensor, [64, 64]) for tensor in (x, y)]
    types = dict.fromkeys(("x_desc", "y_desc"), "tensordesc<bf16[64, 64]>")
    for buffers in (4, 52):
        made = build(staged_kernel, types, {"BUFFERS": buffers}, options={"num_warps": 4})
        report = run(staged_kernel, (1,), *descs, BUFFERS=buffers)
        assert y[::64, 0].tolist() == [1, 2, 3]
        assert report.shared_bytes == 4096 * buffers + 2 * 8192
        assert 0 < made.metadata.shared - report.shared_bytes < 256
    with pytest.raises(ResourceLimit, match="232448 bytes per CTA, got 233472") as caught:
        run(staged_kernel, (1,), *descs, BUFFERS=53)
    assert caught.value.line in (
        place(staged_kernel, "([0, 0], tl.full")[1], place(staged_kernel, "x_desc.load")[1]
    )  # fmt: skip
    with pytest.raises(OutOfResources, match="shared memory"):
        build(staged_kernel, types, {"BUFFERS": 53}, options={"num_warps": 4})


@pytest.mark.parametrize("impl", ("v4_warp_specialized", "v8_own_waits"))
def test_the_shared_memory_of_a_rung_is_the_compilers(impl):
    with enabled() as reports, launches() as seen:
        ladder.rung(impl).module().forward(studies.batch((256,)))
    made = build_launch(seen[-1])
    assert 0 < made.metadata.shared - reports[-1].shared_bytes < 256


@triton.jit
def tensor_limit_kernel(TILES: tl.constexpr, COLUMNS: tl.constexpr):
    tlx.local_alloc((128, 128), tl.float32, TILES, tlx.storage_kind.tmem)
    tlx.local_alloc((128, 2 * COLUMNS), tl.bfloat16, 1, tlx.storage_kind.tmem)


def test_tensor_memory_has_512_columns():
    report = run(tensor_limit_kernel, (1,), TILES=3, COLUMNS=128, arch="sm_100")
    assert report.tensor_columns == 512
    with pytest.raises(ResourceLimit, match="512 columns, got 513") as caught:
        run(tensor_limit_kernel, (1,), TILES=4, COLUMNS=1, arch="sm_100")
    assert (caught.value.file, caught.value.line) == place(tensor_limit_kernel, "bfloat16")


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
    """Where the emulator warns, the compiler drops all requests."""
    constants = {"MATH": math, "A": a, "B": b, "WARPS": warps}
    made = build(
        groups_kernel, {"out_ptr": "*i32"}, constants, capability=100, options={"num_warps": 4}
    )
    assert ("setmaxnreg" in made.asm["ptx"]) == (dropped is None)
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
        build(some_registers_kernel, {"out_ptr": "*i32"}, {}, options={"num_warps": 4})
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
    tl.store(out_ptr + tl.arange(0, 128)[:, None] * 4 + tl.arange(0, 4)[None, :], x)


@pytest.mark.parametrize("tensor", (False, True))
def test_unwritten_memory(tensor):
    options = {"TENSOR": tensor, "arch": "sm_100"}
    for written in (0, 1, 2):
        with pytest.raises(UninitializedRead, match="before it has been written") as caught:
            run(unwritten_kernel, (1,), nothing(512), WRITTEN=written, **options)
        assert caught.value.buffer == "cell[1]"
        assert (caught.value.file, caught.value.line) == place(unwritten_kernel, "x = ")
        out = nothing(128, 4)
        report = run(unwritten_kernel, (1,), out, WRITTEN=written, uninitialized="allow", **options)
        assert report.uninitialized == 1
        assert out[:, :written].eq(1).all() and out[:, written:].isnan().all()
    out = nothing(128, 4)
    assert run(unwritten_kernel, (1,), out, WRITTEN=4, **options).uninitialized == 0
    assert out.eq(1).all()
    with pytest.raises(ValueError, match='"error" or "allow"'):
        run(unwritten_kernel, (1,), out, WRITTEN=4, uninitialized="ignore", **options)


def test_memory_is_new_in_every_cta():
    with pytest.raises(UninitializedRead):
        run(left_over_kernel, (2,))
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
