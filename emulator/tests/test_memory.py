"""Pointers, bounds, undefined lanes, races, atomics, and tensor descriptors."""

import functools

import pytest
import torch
import triton
import triton.language as tl
from triton.tools import ragged_tma
from triton.tools.tensor_descriptor import TensorDescriptor

from emulator.tests.checking import box, place, refused, tlx
from tritonemu import (
    DescriptorError,
    InvalidKernel,
    OutOfBounds,
    Race,
    UndefinedValue,
    Unsupported,
    run,
)


@triton.jit
def copy_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, MASKED: tl.constexpr, OTHER: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask if MASKED else None, other=OTHER)
    tl.store(out_ptr + offsets, x)


DTYPES = (
    *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16),
    *(torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_copied_bit_by_bit(dtype):
    bits = torch.randint(0, 2, (16,)) if dtype == torch.bool else torch.arange(-8, 8)
    x, out = bits.to(dtype), torch.zeros(16, dtype=dtype)
    report = run(copy_kernel, (2,), x, out, 16, BLOCK=8, MASKED=False, OTHER=None)
    assert torch.equal(out.view(torch.uint8), x.view(torch.uint8))
    assert report.bytes_loaded == report.bytes_stored == 16 * dtype.itemsize


def test_masked_lanes_read_other():
    x, out = torch.arange(5.0), torch.zeros(8)
    run(copy_kernel, (1,), x, out, 5, BLOCK=8, MASKED=True, OTHER=-1.0)
    assert out.tolist() == [0, 1, 2, 3, 4, -1, -1, -1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_lanes_without_other(dtype):
    """They are undefined; to store them is an error."""

    def stored(**options):
        out = torch.ones(8).to(dtype)
        run(copy_kernel, (1,), x, out, 5, BLOCK=8, MASKED=True, OTHER=None, **options)
        assert torch.equal(out[:5].view(torch.uint8), x.view(torch.uint8))
        return out[5:].double()

    x = torch.ones(5).to(dtype)
    assert stored(masked="zero").tolist() == [0, 0, 0]
    with pytest.raises(UndefinedValue, match="out_ptr gets a value that comes from the load") as c:
        stored()
    error, locations = c.value, (place(copy_kernel, "tl.store"), place(copy_kernel, "tl.load"))
    assert ((error.file, error.line), error.other, error.buffer) == (*locations, "out_ptr")


@triton.jit
def grown_kernel(x_ptr, y_ptr, out_desc, n, HOW: tl.constexpr):
    rows, columns = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    defined = tl.load(y_ptr + rows * 16 + columns, mask=rows < 16)
    tile = tl.load(x_ptr + rows * 16 + columns, mask=rows < n)  # this one
    tile = tl.load(x_ptr + rows * 16 + columns, mask=rows < n, other=tile)
    if HOW == "product":
        tile = tl.dot(tile, defined)
    elif HOW == "exponential":
        tile = tl.exp(-tile.to(tl.float32)) + defined
    elif HOW == "sum":
        tile = tl.sum(tile.to(tl.float32), 0, keep_dims=True) * defined
    elif HOW == "shared memory":
        buffer = tlx.local_alloc((16, 16), tl.bfloat16, 1)
        tlx.local_store(buffer[0], tile)
        tlx.async_descriptor_store(out_desc, buffer[0], [0, 0])
        tlx.async_descriptor_store_wait(0)
    elif HOW == "atomic":
        tl.atomic_add(y_ptr + rows * 16 + columns, tile)
    elif HOW == "chosen":
        tile = tl.where(rows < n, tile, 0.0)
    elif HOW == "largest":
        tile = tl.maximum(tile, defined)
    if HOW != "shared memory" and HOW != "atomic":
        out_desc.store([0, 0], tile.to(tl.bfloat16))


GROWN = ("shared memory", "product", "exponential", "sum", "atomic")


@pytest.mark.parametrize(
    "how", (*GROWN[1:], "chosen", "largest", pytest.param(GROWN[0], marks=pytest.mark.tlx))
)
def test_a_nan_is_traced_to_the_load(how):
    x, y, out = (torch.ones(16, 16).bfloat16() for _ in range(3))
    desc = box(out, 16, 16)
    if how not in GROWN:
        run(grown_kernel, (1,), x, y, desc, 5, HOW=how)
        assert out.isfinite().all()
        return
    error = refused(UndefinedValue, None, grown_kernel, x, y, desc, 5, HOW=how)
    assert error.other == place(grown_kernel, "# this one")
    run(grown_kernel, (1,), x, y, desc, 5, HOW=how, masked="zero")
    run(grown_kernel, (1,), x, y, desc, 16, HOW=how)


def test_a_nan_of_the_arguments_is_no_undefined_value():
    for bits in (0x7FC0, 0xFFFF):
        x = torch.full((256,), bits, dtype=torch.uint16).view(torch.bfloat16).reshape(16, 16)
        out = torch.zeros(16, 16).bfloat16()
        desc = box(out, 16, 16)
        run(grown_kernel, (1,), x, x, desc, 5, HOW="chosen")
        assert out[:5].isnan().all()
    with pytest.raises(ValueError, match=r"masked must be one of .*, got 'no'"):
        run(grown_kernel, (1,), x, x, desc, 5, HOW="chosen", masked="no")


def test_out_of_bounds_names_argument_element_bounds_and_line():
    with pytest.raises(OutOfBounds, match=r"load of x_ptr .* \[0, 5\), got element 7") as caught:
        run(copy_kernel, (1,), torch.ones(5), torch.ones(8), 5, BLOCK=8, MASKED=False, OTHER=None)
    assert caught.value.file == __file__
    with pytest.raises(OutOfBounds, match=r"store of out_ptr .*program \(1, 0, 0\)"):
        run(copy_kernel, (2,), torch.ones(8), torch.ones(4), 8, BLOCK=4, MASKED=False, OTHER=None)


@triton.jit
def rows_kernel(x_ptr, out_ptr, row_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SHIFT):
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + rows[:, None] * row_stride + columns[None, :] + SHIFT)
    tl.store(out_ptr + rows[:, None] * COLUMNS + columns[None, :], x)


def test_strided_view():
    packed = torch.arange(4 * 24.0).view(4, 3, 8)
    _, k, v = packed.unbind(1)
    out = torch.zeros(4, 8)
    run(rows_kernel, (1,), k, out, k.stride(0), ROWS=4, COLUMNS=8, SHIFT=0)
    assert torch.equal(out, k)
    for view, shift in ((v, 1), (k, -1), (k, 1)):
        with pytest.raises(OutOfBounds, match="x_ptr"):
            run(rows_kernel, (1,), view, out, view.stride(0), ROWS=4, COLUMNS=8, SHIFT=shift)


def test_memory_around_a_tensor():
    """A kernel may be made for padded storage, of which its argument is a part."""
    whole = torch.zeros(8)
    call = functools.partial(run, copy_kernel, (1,), torch.ones(8), whole[:5], 8)
    how = {"BLOCK": 8, "MASKED": False, "OTHER": None}
    with pytest.raises(OutOfBounds, match=r'element 7 .*around it with bounds="storage"'):
        call(**how)
    call(**how, bounds="storage")
    assert whole.sum() == 8
    with pytest.raises(OutOfBounds, match="element 15 ") as caught:
        run(copy_kernel, (1,), torch.ones(16), whole, 16, **{**how, "BLOCK": 16}, bounds="storage")
    assert "around it" not in str(caught.value)


@triton.jit
def pointer_cast_kernel(x_ptr, out_ptr):
    bits = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + tl.arange(0, 4))
    tl.store(out_ptr + tl.arange(0, 4), bits)


def test_pointer_cast():
    x, out = torch.randn(8).bfloat16(), torch.zeros(4, dtype=torch.int32)
    run(pointer_cast_kernel, (1,), x, out)
    assert torch.equal(out, x.view(torch.int32))


@triton.jit
def bytes_kernel(x_ptr, STEP: tl.constexpr):
    pid = tl.program_id(0)
    if pid == 0:
        tl.store(x_ptr + tl.arange(0, 2), 1)
    else:
        p = x_ptr.to(tl.pointer_type(tl.uint8)) + STEP
        tl.store(p + tl.arange(0, 4), tl.load(p + tl.arange(0, 4)) + 1)


def test_a_pointer_to_parts_of_elements():
    x = torch.zeros(4, dtype=torch.int32)
    run(bytes_kernel, (2,), x, STEP=8)
    assert x.tolist() == [1, 1, 0x01010101, 0]
    refused(Race, "x_ptr", bytes_kernel, x, STEP=7, grid=(2,))
    refused(OutOfBounds, "element 16", bytes_kernel, x, STEP=13, grid=(2,))


@triton.jit
def scatter_kernel(index_ptr, value_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + tl.load(index_ptr + i), tl.load(value_ptr + i))


@triton.jit
def fill_kernel(out_ptr, value, N: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, N)[:, None], value)


@pytest.mark.parametrize("n", (1, 2))
def test_one_value_for_a_block_even_of_one_element(n):
    run(fill_kernel, (1,), out := torch.zeros(n), 2.5, N=n)
    assert out.eq(2.5).all()


def test_an_index_that_is_repeated_in_one_store():
    index, out = torch.tensor([3, 0, 3, 1]), torch.zeros(4)
    same = torch.tensor([torch.nan, 1.0, torch.nan, 2.0])
    run(scatter_kernel, (1,), index, same, out, N=4)
    what = "give element 3 of out_ptr several values"
    other = torch.arange(4.0)
    error = refused(Race, what, scatter_kernel, index, other, out, N=4, line="tl.store(out_ptr")
    assert error.buffer == "out_ptr"
    run(scatter_kernel, (1,), index, other, out, N=4, races=False)


@triton.jit
def overlap_kernel(out_ptr, STEP: tl.constexpr):
    pid = tl.program_id(0)
    tl.store(out_ptr + pid * STEP + tl.arange(0, 8), pid)


def test_race_between_programs():
    out = torch.zeros(64, dtype=torch.int32)
    assert run(overlap_kernel, (4,), out, STEP=8).checks["race"] == 4
    error = refused(Race, "out_ptr", overlap_kernel, out, STEP=7, grid=(4,))
    assert error.programs == ((0, 0, 0), (1, 0, 0))
    assert error.other == (error.file, error.line)
    run(overlap_kernel, (4,), out, STEP=7, races=False)


@triton.jit
def two_views_kernel(a_ptr, b_ptr):
    if tl.program_id(0) == 0:
        tl.store(a_ptr, 1)
    else:
        tl.store(b_ptr + 1, 1)


def test_race_through_views_of_another_type():
    storage = torch.zeros(8, dtype=torch.int32)
    refused(Race, "b_ptr", two_views_kernel, storage, storage.view(torch.int16), grid=(2,))
    run(two_views_kernel, (2,), storage[1:], storage.view(torch.int16))


@triton.jit
def atomics_kernel(counts_ptr, best_ptr, lock_ptr, old_ptr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    old = tl.atomic_add(counts_ptr + lanes % 4, 1)
    tl.atomic_max(best_ptr + lanes * 0, lanes * 1.0, mask=lanes < 5)
    tl.atomic_cas(lock_ptr, 0, tl.program_id(0) + 1)
    tl.store(old_ptr + lanes, old)


def test_atomics_take_turns():
    counts, best = torch.zeros(4, dtype=torch.int32), torch.zeros(1)
    lock, old = torch.zeros(1, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    run(atomics_kernel, (3,), counts, best, lock, old, BLOCK=8, races=False)
    assert counts.tolist() == [6] * 4
    assert old.tolist() == [4] * 4 + [5] * 4
    assert best[0] == 4 and lock[0] == 1


@triton.jit
def box_kernel(in_desc, out_desc, row, column, SHIFT: tl.constexpr):
    x = in_desc.load([row, column])
    out_desc.store([row + SHIFT, column], x)


@pytest.mark.parametrize("row, column", ((0, 0), (4, 8), (-3, 0), (0, -8), (8, 0), (100, 0)))
def test_boxes_are_clipped(row, column):
    """Read from a row, padded by 0, and stored one row below."""
    x, out = torch.randn(10, 24), torch.full((10, 24), 7.0)
    run(box_kernel, (1,), box(x, 8, 16), box(out, 8, 16), row, column, SHIFT=1)
    rows, columns = torch.arange(10)[:, None] - row - 1, torch.arange(24) - column
    inside = (rows >= 0) & (rows < 8) & (columns >= 0) & (columns < 16)
    above = torch.cat([torch.zeros(1, 24), x[:-1]])
    assert torch.equal(out, torch.where(inside, above, 7.0))


def test_nan_padding():
    x, out = torch.ones(4, 16), torch.zeros(8, 16)
    source = TensorDescriptor.from_tensor(x, [8, 16], padding="nan")
    run(box_kernel, (1,), source, box(out, 8, 16), 0, 0, SHIFT=0)
    assert out[:4].eq(1).all() and out[4:].isnan().all()


@triton.jit
def device_desc_kernel(
    x_ptr, out_ptr, rows, columns, stride, ROWS: tl.constexpr, KIND: tl.constexpr
):
    desc = tl.make_tensor_descriptor(x_ptr, [rows, columns], [stride, 1], [ROWS, 16])
    out = tl.make_tensor_descriptor(out_ptr, [rows, columns], [columns, 1], desc.block_shape)
    x = tl.load_tensor_descriptor(desc, [tl.program_id(0) * ROWS, 0])
    if KIND == "store":
        out.store([tl.program_id(0) * ROWS, 0], x)
    else:
        out.atomic_add([0, 0], x)
        tl.store_tensor_descriptor(out, [0, 0], x, store_reduce="max")


def test_descriptor_made_on_the_device():
    x = torch.randn(11, 32).half()[:, :16]
    out = torch.zeros(11, 16).half()
    run(device_desc_kernel, (3,), x, out, 11, 16, 32, ROWS=4, KIND="store")
    assert torch.equal(out, x)


def test_descriptor_reductions():
    x, out = torch.randn(4, 16).half(), torch.full((4, 16), 0.5).half()
    run(device_desc_kernel, (1,), x, out, 4, 16, 16, ROWS=4, KIND="reduce")
    assert torch.equal(out, torch.maximum(x + 0.5, x))
    with pytest.raises(InvalidKernel, match="no reduction 'max' of fp32"):
        run(device_desc_kernel, (1,), x.float(), out.float(), 4, 16, 16, ROWS=4, KIND="reduce")


@triton.jit
def box5_kernel(desc, out_desc, offsets):
    x = desc.load(offsets)
    out_desc.store((0, 0, 0, 0, 0), x)


@pytest.mark.parametrize("seed", range(8))
def test_boxes_of_rank_five_match_padding(seed):
    generator = torch.Generator().manual_seed(seed)
    shape = torch.randint(1, 5, (5,), generator=generator) * torch.tensor([1, 1, 1, 1, 4])
    offsets = torch.randint(-3, 5, (5,), generator=generator).tolist()
    x = torch.randn(*shape, generator=generator).transpose(0, 2).contiguous().transpose(0, 2)
    size = (2, 1, 4, 2, 8)
    out = torch.zeros(size)
    padded = torch.nn.functional.pad(x, (8, 16) * 5)
    window = padded[tuple(slice(8 + a, 8 + a + b) for a, b in zip(offsets, size, strict=True))]
    source = TensorDescriptor(x, x.shape, x.stride(), list(size))
    run(box5_kernel, (1,), source, box(out, *size), tuple(offsets))
    assert torch.equal(out, window)


@triton.jit
def same_box_kernel(x_desc, out_desc):
    out_desc.store([0, 0], x_desc.load([8 * tl.program_id(0), 0]))


def test_race_between_boxes():
    """Two programs may store the same bits."""
    descs = [box(t, 8, 16) for t in (torch.arange(256.0).view(16, 16), torch.zeros(8, 16))]
    refused(Race, "out_desc", same_box_kernel, *descs, grid=(2,))
    run(box_kernel, (2,), *descs, 0, 0, SHIFT=0)


@pytest.mark.parametrize(
    "x, shape, stride, message",
    (
        (torch.ones(64), (4, 16), 17, "multiples of 16"),
        (torch.ones(64), (0, 16), 16, "sizes in"),
        (torch.ones(64), (4, 16), 2**38, "below 2"),
        (torch.ones(64), (4, 16), 0, "strides above 0 along dimensions longer than 1, got .0, 4."),
        (torch.ones(65)[1:], (4, 16), 16, "aligned to 16 bytes, got 4 bytes off"),
        (torch.ones(32), (4, 16), 16, "descriptor load of x_ptr"),
        (torch.ones(64), (1, 16), 0, None),  # one element may have any stride
    ),
)
def test_descriptor_rules(x, shape, stride, message):
    arguments = x, torch.ones(64), *shape, stride
    constants = {"ROWS": 4, "KIND": "store"}
    if message is None:
        run(device_desc_kernel, (1,), *arguments, **constants)
    else:
        refused(
            (DescriptorError, OutOfBounds), message, device_desc_kernel, *arguments, **constants
        )


@triton.jit
def wrong_kernel(desc, big, HOW: tl.constexpr):
    if HOW == "another type":
        desc.store([0, 0], desc.load([0, 0]).to(tl.float16))
    elif HOW == "a large coordinate":
        desc.load([big, 0])
    else:
        desc.prefetch(0)


@pytest.mark.parametrize(
    "how, error, message",
    (
        ("a large coordinate", InvalidKernel, "int32 scalars"),
        ("an unknown operation", Unsupported, "tensor_descriptor.prefetch"),
    ),
)
def test_wrong_uses_of_a_descriptor(how, error, message):
    desc = box(torch.ones(4, 16), 4, 16)
    refused(error, message, wrong_kernel, desc, 2**31, HOW=how)


def test_a_store_through_a_descriptor_casts_where_triton_does():
    desc = box(torch.full((4, 16), 1 + 2**-20), 4, 16)
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8):
        message = r"must be fp32\[4, 16\] as the descriptor, got fp16"
        refused(InvalidKernel, message, wrong_kernel, desc, 0, HOW="another type")
    else:
        run(wrong_kernel, (1,), desc, 0, HOW="another type")
        assert (desc.base == 1).all()


@triton.jit
def ragged_kernel(in_desc, out_desc, cu_ptr, ROWS: tl.constexpr, ADD: tl.constexpr):
    start = tl.load(cu_ptr + tl.program_id(0))
    length = tl.load(cu_ptr + tl.program_id(0) + 1) - start
    for row in range(0, length, ROWS):
        x = ragged_tma.load_ragged(in_desc, start, length, [row, 0])
        if ADD:
            ragged_tma.atomic_add_ragged(out_desc, start, length, [row, 0], x)
        else:
            ragged_tma.store_ragged(out_desc, start, length, [row, 0], x + 1)


@pytest.mark.parametrize("add", (False, True))
def test_ragged_descriptors_wrap_and_clip_at_each_sequence(add):
    lengths = [5, 0, 1, 8, 13]
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    x = torch.randn(40, 16).bfloat16()
    out = torch.full((40, 16), 3.0).bfloat16()
    x[27:] = torch.nan
    descs = [ragged_tma.create_ragged_descriptor(t, [8, 16]) for t in (x, out)]
    run(ragged_kernel, (5,), *descs, cu, ROWS=8, ADD=add)
    assert torch.equal(out[:27], x[:27] + (3 if add else 1))
    assert (out[27:] == 3).all()
