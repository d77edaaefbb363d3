"""Arithmetic of tiles against values worked out by hand."""

import math

import pytest
import torch
import triton.language as tl

from tritonemu import InvalidKernel, Unsupported, tile
from tritonemu.tile import Tile, cast, scalar, to_tile


def vector(*values, dtype=tl.int32):
    return Tile(torch.tensor(values).to(tile.held(dtype)), dtype)


def test_int32_wraps():
    big = scalar(2**31 - 1, tl.int32)
    assert int(big + 1) == -(2**31)
    assert int(big * 2) == -2
    assert int(cast(big, tl.int64) + 1) == 2**31


def test_uint32_wraps_and_divides_unsigned():
    x = vector(2**32 - 1, 7, dtype=tl.uint32)
    assert (x + 1).data.tolist() == [0, 8]
    assert (x * 3).data.tolist() == [2**32 - 3, 21]
    assert (x // 2).data.tolist() == [2**31 - 1, 3]
    assert (x >> 31).data.tolist() == [1, 0]
    assert (~x).data.tolist() == [0, 2**32 - 8]
    assert cast(x, tl.int32).data.tolist() == [-1, 7]


def test_division_truncates_as_in_c():
    x = vector(-7, 7, -7, 7)
    y = vector(2, -2, -2, 2)
    assert (x // y).data.tolist() == [-3, -3, 3, 3]
    assert (x % y).data.tolist() == [-1, 1, -1, 1]
    assert (x / 2).dtype == tl.float32
    assert (x / 2).data.tolist() == [-3.5, 3.5, -3.5, 3.5]


def test_what_triton_does_not_promote_is_refused():
    with pytest.raises(InvalidKernel, match="compatible types: .* different signedness"):
        vector(1) // vector(1, dtype=tl.uint32)
    with pytest.raises(Unsupported, match="does not fit 64 bits"):
        to_tile(2**64)


def test_division_by_zero_does_not_trap():
    assert (vector(6, 6) // vector(0, 3)).data[1] == 2


def test_bf16_rounds_after_each_operation():
    one = vector(1.0, dtype=tl.bfloat16)
    half_ulp = vector(2.0**-8, dtype=tl.bfloat16)
    assert (one + half_ulp).dtype == tl.bfloat16
    assert float((one + half_ulp + half_ulp).data) == 1.0
    assert float((cast(one, tl.float32) + 2.0**-8).data) == 1 + 2.0**-8


def test_constants_are_weak_and_variables_are_not():
    x = vector(1.0, 3.0, dtype=tl.bfloat16)
    weak = x * 0.1
    assert weak.dtype == tl.bfloat16
    assert torch.equal(weak.data, x.data * torch.tensor(0.1, dtype=torch.bfloat16))
    assert (x * to_tile(0.1)).dtype == tl.float32
    assert (x / 3).dtype == tl.float32
    assert (x + vector(1, 1)).dtype == tl.float32


def test_comparison_makes_constants_fp32():
    x = vector(0.1, dtype=tl.bfloat16)
    assert bool(x > 0.1)
    assert not bool(x == 0.1)


def test_fp16_meets_bf16_in_fp16():
    assert (vector(1.0, dtype=tl.float16) * vector(1.0, dtype=tl.bfloat16)).dtype == tl.float16


def test_constant_must_fit():
    with pytest.raises(InvalidKernel, match="must fit int32"):
        vector(1) + 2**31


def test_int1_addition_wraps():
    yes = vector(True, dtype=tl.int1)
    assert not bool(yes + yes)
    assert int(yes + vector(1)) == 2


@pytest.mark.parametrize(
    "value, dtype, expected",
    (
        (2.9, tl.int32, 2),
        (-2.9, tl.int32, -2),
        (1e20, tl.int32, 2**31 - 1),
        (-math.inf, tl.int32, -(2**31)),
        (math.nan, tl.int32, 0),
        (math.inf, tl.int64, 2**63 - 1),
        (-1.0, tl.uint32, 0),
        (1e20, tl.uint32, 2**32 - 1),
        (2.0**63, tl.int64, 2**63 - 1),
        (1.5 * 2.0**63, tl.uint64, -(2**62)),  # its bits, as int64 has them
        (2.0**64, tl.uint64, -1),
    ),
)
def test_float_to_integer_saturates(value, dtype, expected):
    assert int(cast(value, dtype)) == expected


def test_fp8_saturates_and_keeps_nan():
    x = cast(vector(1e6, -1e6, 1.0, math.nan, dtype=tl.float32), tl.float8e4nv)
    assert x.data.float()[:3].tolist() == [448.0, -448.0, 1.0]
    assert x.data.float()[3].isnan()
    with pytest.raises(Unsupported, match="arithmetic in fp8e4nv"):
        x + x


def test_bitcast():
    one = vector(1.0, dtype=tl.float32)
    assert int(one.to(tl.int32, bitcast=True)) == 0x3F800000
    assert int((-one).to(tl.uint32, bitcast=True)) == 0xBF800000
    back = (-one).to(tl.uint32, bitcast=True).to(tl.float32, bitcast=True)
    assert float(back.data) == -1.0
    with pytest.raises(InvalidKernel, match="keep the width"):
        one.to(tl.int64, bitcast=True)


def test_nan_loses_unless_it_propagates():
    x, nan = vector(1.0, dtype=tl.float32), vector(math.nan, dtype=tl.float32)
    assert float(tile.maximum(x, nan).data) == 1.0
    assert tile.maximum(x, nan, tl.PropagateNan.ALL).data.isnan()
    assert tile.minimum(vector(1.0, dtype=tl.bfloat16), 2.0).dtype == tl.float32


def test_condition_must_be_a_scalar():
    with pytest.raises(InvalidKernel, match="condition must be a scalar"):
        bool(vector(1, 2) > 0)


def test_index_must_be_none_or_colon():
    assert vector(1, 2)[:, None].shape == (2, 1)
    with pytest.raises(InvalidKernel, match="index of a tile"):
        vector(1, 2)[0]
