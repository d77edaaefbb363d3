"""Inline PTX: exactness of the table, and the size of the documented errors."""

import pytest
import torch
import triton
import triton.language as tl

from tritonemu import InvalidKernel, Unsupported, instructions, run
from tritonemu.instructions import INSTRUCTIONS, round_fraction


def relative_error(name, x):
    other = {"ex2": "exp2", "rcp": "reciprocal", "lg2": "log2"}
    function = name.split(".")[0]
    exact = getattr(torch, other.get(function, function))(x.double())
    return ((INSTRUCTIONS[name][1](x).double() - exact) / exact).abs().max().item()


@pytest.mark.parametrize(
    "name, bound",
    (
        ("tanh.approx.f32", 2.0**-11),
        ("ex2.approx.f32", 2.0**-22),
        ("ex2.approx.ftz.f32", 2.0**-22),
        ("rcp.approx.ftz.f32", 2.0**-23),
        ("sqrt.approx.ftz.f32", 2.0**-23),
        ("rsqrt.approx.ftz.f32", 2.0**-22.9),
        ("lg2.approx.ftz.f32", 2.0**-22),
    ),
)
def test_error_reaches_but_does_not_exceed_the_documented_bound(name, bound):
    x = torch.linspace(0.01, 8, 100_003)
    assert 0.8 * bound < relative_error(name, x) <= bound


@pytest.mark.parametrize(
    "name, dtype, relative, absolute",
    (
        ("tanh.approx.f16", torch.float16, 1.0, 2.0**-10.987),
        ("tanh.approx.bf16", torch.bfloat16, 1.0, 2.0**-8),
        ("ex2.approx.f16", torch.float16, 2.0**-9.9, 1e9),
        ("ex2.approx.ftz.bf16", torch.bfloat16, 2.0**-7, 1e9),
    ),
)
def test_16_bit_forms(name, dtype, relative, absolute):
    x = torch.linspace(-4, 4, 10_001).to(dtype)
    exact = (torch.tanh if "tanh" in name else torch.exp2)(x.double())
    error = (INSTRUCTIONS[name][1](x).double() - exact).abs()
    assert (error <= absolute).all() and (error <= relative * exact.abs().clamp(min=2**-9)).all()
    assert INSTRUCTIONS[name][1](x).dtype == dtype


def test_corner_cases():
    x = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0, torch.nan])
    y = INSTRUCTIONS["tanh.approx.f32"][1](x)
    assert y[:4].tolist() == [1.0, -1.0, 0.0, 0.0] and y[4].isnan()
    assert y[3].signbit()
    flushed = INSTRUCTIONS["ex2.approx.ftz.f32"][1](torch.tensor([-130.0, -125.0]))
    assert flushed.tolist() == [0.0, 2.0**-125]
    assert INSTRUCTIONS["ex2.approx.f32"][1](torch.tensor([-130.0])) == 2.0**-130


def test_sat_clamps_after_rounding_and_makes_nan_zero():
    a = torch.tensor([0.25, 3.0, -3.0, torch.nan, torch.inf, -torch.inf, -0.5])
    one, half = torch.ones(7), torch.full((7,), 0.5)
    y = INSTRUCTIONS["fma.rn.sat.f32"][1](a, one, half)
    assert y.tolist() == [0.75, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0] and not y.signbit().any()


def test_round_fraction_rounds_to_nearest_even():
    x = torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-11 + 2.0**-23])
    assert round_fraction(x, 10).tolist() == [1.0, 1 + 2.0**-9, 1 + 2.0**-10]


@triton.jit
def tanh_kernel(x_ptr, out_ptr, N: tl.constexpr, ASM: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    y = tl.inline_asm_elementwise(ASM, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(out_ptr + tl.arange(0, N), y)


@pytest.mark.parametrize(
    "asm",
    (
        *("cos.approx.f32 $0, $1;", "tanh.approx.f32 $0, $2;", "tanh.approx.bf16 $0, $1;"),
        *("fma.rn.f32 $0, $1;", "mov.b32 tmp, $1;"),
        *("mul.f32 $0, $1, 0f3F8;", "mul.f32 $0, $1, 0f3F8000000;"),
    ),
)
def test_unknown_assembly_is_unsupported(asm):
    with pytest.raises(Unsupported, match="inline assembly") as caught:
        run(tanh_kernel, (1,), torch.ones(16), torch.ones(16), N=16, ASM=asm)
    assert caught.value.file == __file__


@triton.jit
def pairs_kernel(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
    a, b = tl.load(a_ptr + tl.arange(0, N)), tl.load(b_ptr + tl.arange(0, N))
    y = tl.inline_asm_elementwise(
        """
        {
            .reg .b64 ra, rb, rc;  // two values each
            mov.b64 ra, { $2, $3 };
            mov.b64 rb, { $4, $5 };
            fma.rn.f32x2 rc, ra, rb, rb;
            mov.b64 { $0, $1 }, rc;
        }
        """,
        "=r,=r,r,r,r,r", [a, b], dtype=tl.float32, is_pure=True, pack=2,
    )  # fmt: skip
    tl.store(out_ptr + tl.arange(0, N), y)


def test_packed_pairs():
    a, b, out = torch.randn(64), torch.randn(64), torch.zeros(64)
    run(pairs_kernel, (1,), a, b, out, N=64, arch="sm_100")
    torch.testing.assert_close(out, (a.double() * b + b).float(), rtol=0, atol=0)
    with pytest.raises(InvalidKernel, match=r"fma\.rn\.f32x2 needs sm_100, got sm_90"):
        run(pairs_kernel, (1,), a, b, out, N=64, arch="sm_90")


@pytest.mark.parametrize("name", ("fma.rn.sat.f32", "min.f32", "tanh.approx.f32", "ex2.approx.f32"))
def test_there_are_no_other_pairs_of_fp32(name):
    """ptxas 13.1 for sm_100a refuses each of them."""
    pair = (torch.ones(1), torch.ones(1))
    names = "fma" in name and "$1, $1, $1" or "min" in name and "$1, $1" or "$1"
    with pytest.raises(Unsupported, match=name + "x2"):
        instructions.execute(f"{name}x2 $0, {names};", [pair], 1)


@triton.jit
def horner_kernel(x_ptr, out_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    y = tl.inline_asm_elementwise(
        """{
        .reg .b64 x, a, b, c, y;
        mov.b64 x, {$2, $3};
        mov.b64 a, {0f3F000000, 0f3F000000};
        mov.b64 b, {0FBFC00000, 0FBFC00000};
        mov.b64 c, {0f40490FDB, 0f40490fdb};
        mul.rn.f32x2 y, x, a;
        add.rn.f32x2 y, y, b;
        fma.rn.f32x2 y, y, x, c;
        mov.b64 {$0, $1}, y;
        }""",
        "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2,
    )  # fmt: skip
    tl.store(out_ptr + tl.arange(0, N), y)


def test_literals_are_fp32_patterns():
    """(x / 2 - 3 / 2) x + pi: each step rounds once."""
    x, out = torch.randn(64), torch.zeros(64)
    run(horner_kernel, (1,), x, out, N=64, arch="sm_100")
    inner = x * 0.5 - 1.5
    pi = torch.tensor(torch.pi)
    assert torch.equal(out, (inner.double() * x.double() + pi.double()).float())
    run(tanh_kernel, (1,), x, out, N=64, ASM="mov.b32 $0, 0fFF800000;")
    assert torch.equal(out, torch.full((64,), -torch.inf))


def test_subnormals_are_flushed_before_and_after():
    tiny = torch.tensor([2.0**-127])
    for asm, expected in (("mul.rn.f32", 2.0**-126), ("mul.rn.ftz.f32", 0.0)):
        ((result,),) = instructions.execute(f"{asm} $0, $1, 0f40000000;", [(tiny,)], 1)
        assert float(result) == expected
    ((result,),) = instructions.execute("add.ftz.sat.f32 $0, $1, 0f00800000;", [(tiny,)], 1)
    assert float(result) == 2.0**-126


@triton.jit
def half_pairs_kernel(x_ptr, out_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    y = tl.inline_asm_elementwise(
        "tanh.approx.bf16x2 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
    )
    tl.store(out_ptr + tl.arange(0, N), y)


def test_packed_16_bit():
    x, out = torch.randn(64).bfloat16(), torch.zeros(64).bfloat16()
    run(half_pairs_kernel, (1,), x, out, N=64)
    assert ((out.float() - x.float().tanh()).abs() <= 2.0**-8).all()


def test_a_scalar_is_broadcast_and_nothing_else():
    """Lanes are not modelled: another lane, or values that differ from thread to thread, would be
    wrong without a word."""
    asm = "shfl.sync.idx.b32 $0, $1, {}, 31, 0xffffffff;"
    one, two = torch.tensor([7]), torch.ones(2)
    assert instructions.execute(asm.format(0), [(one,)], 1) == [(one,)]
    for text, value in ((asm.format(1), one), (asm.format(0), two)):
        with pytest.raises(Unsupported, match="shfl"):
            instructions.execute(text, [(value,)], 1)


def test_greatest_magnitude_with_the_product_of_signs():
    x, y = torch.tensor([1.0, -3, -2, torch.nan]), torch.tensor([-2.0, -1, 0.0, 5])
    asm = "max.NaN.xorsign.abs.f32 $0, $1, $2;"
    ((result,),) = instructions.execute(asm, [(x,), (y,)], 1)
    assert torch.equal(result[:3], torch.tensor([-2.0, 3, -2])) and result[3].isnan()


def test_exclusive_or_is_bitwise_and_of_integers_alone():
    asm = "xor.b32 $0, $1, $2;"
    five, three = (torch.tensor([x], dtype=torch.int32) for x in (5, 3))
    for first, second in ((five, three), (five, five)):
        ((result,),) = instructions.execute(asm, [(first,), (second,)], 1)
        assert result.dtype == torch.int32 and int(result) == int(first) ^ int(second)
    with pytest.raises(Unsupported, match="xor"):
        instructions.execute(asm, [(torch.ones(1),), (torch.ones(1),)], 1)


@triton.jit
def numbered_kernel(out_ptr, N: tl.constexpr):
    for i in tl.range(0, N):
        zero = tl.inline_asm_elementwise("xor.b32 $0, $1, $1;", "=r,r", [i], tl.int32, True, 1)
        tl.store(out_ptr + i, 10 * i + zero)


def test_a_number_xor_itself_is_0():
    out = torch.full((5,), -1, dtype=torch.int32)
    run(numbered_kernel, (1,), out, N=5)
    assert out.tolist() == [0, 10, 20, 30, 40]


def test_two_numbers_become_a_pair_and_are_multiplied_as_one():
    """The first source of cvt is the high half, the second the low one; bf16 rounds once."""
    high, low = torch.tensor([1.0 + 2.0**-9]), torch.tensor([-3.0])
    asm = "{ .reg .b32 p; cvt.rn.bf16x2.f32 p, $1, $2; fma.rn.bf16x2 $0, p, p, p; }"
    ((first, second),) = instructions.execute(asm, [(high,), (low,)], 1)
    assert first.dtype == second.dtype == torch.bfloat16
    assert (float(first), float(second)) == (6.0, 2.0)
    ((first, second),) = instructions.execute(
        "mul.rn.bf16x2 $0, $1, $1;", [(torch.tensor([1.0625]).bfloat16(),) * 2], 1
    )
    assert float(first) == float(second) == 1.125  # 1.12890625 lies half way; to even


@triton.jit
def short_kernel(x_ptr, bytes_ptr, fours_ptr, FP4: tl.constexpr, N: tl.constexpr):
    """Store as SGLang does fp8 and vLLM fp4, each pair in one conversion."""
    x = tl.load(x_ptr + tl.arange(0, N))
    pairs = tl.inline_asm_elementwise(
        "{ .reg .b16 p; cvt.rn.satfinite.e4m3x2.f32 p, $3, $2; cvt.u32.u16 $0, p;"
        "shr.b32 $1, $0, 8; }", "=r,=r,f,f", [x], tl.int32, True, 2,
    )  # fmt: skip
    tl.store(bytes_ptr + tl.arange(0, N), pairs.to(tl.uint8))
    if FP4:
        lower, upper = tl.split(tl.reshape(x, [N // 2, 2]))
        fours = tl.inline_asm_elementwise(
            "{ .reg .b8 t; .reg .b32 w; cvt.rn.satfinite.e2m1x2.f32 t, $2, $1;"
            "mov.b32 w, {t, t, t, t}; and.b32 $0, w, 0xff; }",
            "=r,f,f", [lower, upper], tl.uint32, True, 1,
        )  # fmt: skip
        tl.store(fours_ptr + tl.arange(0, N // 2), fours.to(tl.uint8))


def test_conversions_to_8_and_4_bits():
    x = torch.cat((torch.linspace(-7, 7, 113), torch.tensor([500.0, -500, -0.0, torch.nan])))
    x = torch.cat((x, torch.randn(11) * 2))
    eights, fours = torch.zeros(128, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    run(short_kernel, (1,), x, eights, fours, FP4=True, N=128, arch="sm_100")
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(eights[:116], expected.view(torch.uint8)[:116]) and eights[116] == 0x7F
    codes = torch.stack((fours & 15, fours >> 4), -1).flatten()
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = numbers[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0)
    nearest = (x.abs()[:, None] - numbers).abs().amin(1)
    inside = x.abs() <= 6
    torch.testing.assert_close((values - x).abs()[inside], nearest[inside], rtol=0, atol=0)
    code_of = {each: int(code) for each, code in zip(x[:113].tolist(), codes, strict=False)}
    assert [code_of[each] for each in (0.25, 0.75, 1.75, 2.5, 5.0, -5.0, 7.0)] == [
        0,
        2,
        4,
        4,
        6,
        14,
        7,
    ]
    assert codes[113:117].tolist() == [7, 15, 8, 7]
    with pytest.raises(InvalidKernel, match="e2m1x2.f32 needs sm_100"):
        run(short_kernel, (1,), x, eights, fours, FP4=True, N=128)


def test_words():
    word = torch.tensor([-0x7FFFFF0F], dtype=torch.int32)  # 0x800000F1
    for asm, expected in (
        ("and.b32 $0, $1, 0xFF;", 0xF1), ("or.b32 $0, $1, 2;", 0x800000F3 - 2**32),
        ("not.b32 $0, $1;", 0x7FFFFF0E), ("shr.u32 $0, $1, 4;", 0x0800000F),
        ("shl.b32 $0, $1, 4;", 0xF10), ("shl.b32 $0, $1, 32;", 0), ("shr.b32 $0, $1, 33;", 0),
    ):  # fmt: skip
        ((result,),) = instructions.execute(asm, [(word,)], 1)
        assert result.dtype == torch.int32 and int(result) == expected, asm
    for asm in ("shr.s32 $0, $1, 4;", "cvt.u32.u16 $0, $1;", "and.b32 $0, $1, x;"):
        with pytest.raises(Unsupported, match="inline assembly"):
            instructions.execute(asm, [(word,)], 1)
