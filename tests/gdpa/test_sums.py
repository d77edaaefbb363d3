"""Attention over [A; B] is that over A and over B, added in fp32 before the one rounding."""

from dataclasses import replace

import pytest
import torch

import tritonemu
from gdpa_kernels import gdpa
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.calling.lengths import Lengths
from gdpa_kernels.gdpa import reference
from gdpa_kernels.gdpa.kernels import v8_own_waits as v8
from gdpa_lab.measuring.inputs import cu_seqlens
from tests.budget import within_budget
from tests.calls import cast, full_of_nan, kernels_run, required
from tests.gdpa.cases import CASES, Case, batch_of, of_pytorch
from tests.tiers import sweep, swept

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
PLAIN = ("reference", "v1_tiled")
SUMS = (*PLAIN, "v8_own_waits", "b6_pair_stream", "b7_split_stream")
SPLIT = Case("split", (70, 0, 33), (150, 40, 1), 4, 2)
NAMES = (
    "tile_edges", "empty_sequences", "empty_batch", "no_keys_at_all", "shared_q", "one_kv_head",
    "lower_right", "causal_window", "scales", "head_dim_96",
)  # fmt: skip
SOME = [case for case in CASES if case.name in NAMES]
QUICK = ("empty_sequences", "shared_q", "one_kv_head")


def halves(call: dict) -> list[dict]:
    """The call over the even and over the odd keys of each sequence."""
    lengths, found = call["cu_seqlens_k"].diff().tolist(), []
    place = torch.cat([torch.arange(n) for n in lengths])
    for odd in (0, 1):
        ends = cu_seqlens([(n + 1 - odd) // 2 for n in lengths], call["q"].device)
        parts = {name: call[name][place % 2 == odd] for name in "kv"}
        found.append(call | parts | {"cu_seqlens_k": ends})
    return found


@pytest.mark.parametrize(
    "impl, dtype",
    [
        *((impl, BF16) for impl in SUMS),
        *(sweep(impl, FP16) for impl in SUMS),
        *((impl, FP32) for impl in PLAIN),
    ],
)
def test_parts_add_up_to_the_whole(impl, dtype):
    def draw(i: int) -> tuple:
        call = SPLIT.arguments(dtype, i)
        one, two = halves(call)
        with kernels_run(impl):
            total = gdpa(**one, impl=impl, out_dtype=FP32)
            out = gdpa(**two, impl=impl, add_to=total)
        assert total.dtype == FP32 and out.dtype == dtype
        return [out], *of_pytorch(batch_of(call))

    within_budget(draw, ["out"], least=8192)


@pytest.mark.parametrize("dtype", (BF16, sweep(FP16)))
@pytest.mark.parametrize("impl", swept(SUMS, ("v1_tiled", "v8_own_waits", "b7_split_stream")))
@pytest.mark.parametrize("case", swept(SOME, lambda case: case.name in QUICK), ids=str)
def test_there_is_one_rounding(case, impl, dtype):
    """What fp32 partials give, added and rounded by PyTorch, has the same bits."""
    if case.name == "lower_right" and "causal" not in ladder.rung(impl).requires.extras:
        pytest.skip("it aligns positions with their start alone")
    call = case.arguments(dtype)
    with kernels_run(impl), full_of_nan():
        partial = gdpa(**call, impl=impl, out_dtype=FP32)
        assert torch.equal(partial.to(dtype), gdpa(**call, impl=impl))
        for kind in (dtype, FP32):
            made = torch.randn(partial.shape[::-1]).permute(2, 1, 0).to(partial.device, kind)
            out = gdpa(**call, impl=impl, add_to=made)
            assert torch.equal(out, (partial + made.float()).to(dtype))
            out = gdpa(**call, impl=impl, add_to=made, out_dtype=FP32)
            assert torch.equal(out, partial + made.float())


@pytest.mark.parametrize("kind", (BF16, FP32))
@pytest.mark.parametrize("with_lengths", (False, True))
def test_the_gradient_of_what_is_added_is_that_of_the_result(kind, with_lengths):
    call = required(SPLIT.arguments(BF16))
    if with_lengths:
        call |= {name: Lengths(call[name]) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    made = torch.randn(103, 4, 64).to(kind).requires_grad_()
    grad = torch.randn(103, 4, 64)
    with tritonemu.enabled():
        out = gdpa(**call, add_to=made, out_dtype=FP32)
        found = torch.autograd.grad(out, [*(call[n] for n in "qkv"), made], grad)
        plain = gdpa(**call)
        expected = torch.autograd.grad(
            plain, [call[n] for n in "qkv"], grad.bfloat16(), retain_graph=True
        )
        (alone,) = torch.autograd.grad(
            gdpa(**call | cast(call, BF16), add_to=made), made, grad.bfloat16()
        )
    for one, other in zip(found, (*expected, grad.to(kind)), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert torch.equal(alone, grad.bfloat16().to(kind))


FEW = (
    (Case("one", (70,), (1100,), 1, 1, 128), 3),
    (Case("shared", (64,), (530,), 1, 1, shared_q=True), 2),
    (Case("jagged", (5, 0), (513, 512), 1, 1, 40), 1),
    (Case("many", (300,), (1024,)), 1),
    (Case("masked", (70,), (1100,), 1, 1, options={"causal": "upper_left"}), 1),
)
"""Calls and the pieces of their keys on a device of three multiprocessors."""


@pytest.mark.parametrize("case, pieces", FEW, ids=str)
def test_keys_are_split_where_tiles_are_few(case, pieces, monkeypatch):
    monkeypatch.setattr(v8, "multiprocessors", lambda device: 3)
    assert v8.default_config(batch_of(case.arguments(BF16))).splits == pieces

    def draw(i: int) -> tuple:
        call = case.arguments(BF16, i)
        with kernels_run(), full_of_nan(), launches() as seen:
            out = gdpa(**call, impl="v8_own_waits")
            assert torch.equal(out, gdpa(**call, impl="v8_own_waits")), "the order is fixed"
        assert ("sum_kernel" in {x.name for x in seen}) == (pieces > 1)
        return [out], *of_pytorch(batch_of(call))

    within_budget(draw, ["out"], least=8192)


@pytest.mark.parametrize("pieces", (sweep(2), 5))
@pytest.mark.parametrize(
    "config",
    (
        v8.Config(BLOCK_N=64, num_stages=4),
        v8.Config(BLOCK_N=64, num_stages=4, ahead=True),
        v8.Config(BLOCK_N=64, registers=232, math_roles=1, programs=2),
    ),
    ids=("two roles", "two roles, Q ahead", "one role"),
)
@pytest.mark.parametrize("shared", (False, True))
def test_pieces_may_be_empty(shared, config, pieces):
    """Of a sequence that is shorter than the longest, and of one without keys."""
    lengths = ((64,) * 3 if shared else (5, 0, 129)), (600, 0, 70)
    case = Case("jagged", *lengths, 2, 1, 40, shared_q=shared)

    def draw(i: int) -> tuple:
        batch = batch_of(case.arguments(BF16, i))
        with kernels_run(), full_of_nan():
            out = v8.forward(batch, config=replace(config, splits=pieces))
        return [out], *of_pytorch(batch)

    within_budget(draw, ["out"], least=8192)


def test_a_wide_head_has_no_room_for_a_sum():
    call = Case("call", (9,), head_dim=256).arguments(BF16)
    with (
        tritonemu.enabled(),
        pytest.raises(
            NotImplementedError, match="needs a head_dim of at most 128 for a sum in fp32, got 256"
        ),
    ):
        gdpa(**call, impl="v8_own_waits", out_dtype=FP32)


def own_width(width: int, dtype: torch.dtype, seed: int = 0) -> dict:
    """A call whose v has its own head_dim; k's is 64."""
    call = SPLIT.arguments(dtype, seed)
    make = torch.Generator().manual_seed(seed + 1)
    v = torch.randn(*call["v"].shape[:2], width, generator=make).to(call["q"])
    return call | {"v": v, "causal": "upper_left", "window": 30}


@pytest.mark.parametrize("width", (40, 128))
@pytest.mark.parametrize("impl", ("v1_tiled", "v8_own_waits"))
def test_v_has_a_head_dim_of_its_own(impl, width):
    def draw(i: int) -> tuple:
        call = own_width(width, BF16, i)
        with kernels_run():
            out = gdpa(**call, impl=impl)
        assert out.shape == (103, 4, width) and out.is_contiguous()
        return [out], *of_pytorch(batch_of(call))

    within_budget(draw, ["out"], least=8192)


@pytest.mark.parametrize("width", (40, 128))
def test_gradients_of_a_v_with_a_head_dim_of_its_own(width):
    call = required(own_width(width, FP64) | {"scale": None})
    made = torch.randn(103, 4, width, dtype=FP64, requires_grad=True)
    out, grad = gdpa(**call, add_to=made), torch.randn(103, 4, width, dtype=FP64)
    batch = batch_of(call | {"scale": 64**-0.5, "add_to": made})
    wanted = reference.forward(batch)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    leaves = [*(call[name] for name in "qkv"), made]
    found, expected = (torch.autograd.grad(x, leaves, grad) for x in (out, wanted))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_dropout_is_refused_and_said_where_it_may_be():
    call = SPLIT.arguments(FP32)
    with pytest.raises(
        ValueError, match="dropout_p must be 0.0, got 0.1: .*dropout to the result or"
    ):
        gdpa(**call, dropout_p=0.1)
    assert torch.equal(gdpa(**call, dropout_p=0.0), gdpa(**call))


WRONG = (
    (TypeError, "out_dtype must be None or torch.bfloat16 or torch.float32, got torch.float16",
     BF16, {"out_dtype": FP16}),
    (TypeError, "out_dtype must be None or torch.float64, got torch.float32", FP64,
     {"out_dtype": FP32}),
    (TypeError, "out_dtype must be .*, got 'float32'", BF16, {"out_dtype": "float32"}),
    (TypeError, "add_to must be None or a tensor, got float", BF16, {"add_to": 0.0}),
    (TypeError, "add_to must be torch.float32, got torch.bfloat16", FP32,
     {"add_to": torch.zeros(9, 2, 64, dtype=BF16)}),
    (ValueError, r"add_to must have shape \[9, 2, 64\] on .*, got \[8, 2, 64\]", BF16,
     {"add_to": torch.zeros(8, 2, 64)}),
)  # fmt: skip


@pytest.mark.parametrize("error, message, dtype, option", WRONG)
def test_wrong_arguments_say_what_is_wrong(error, message, dtype, option):
    with pytest.raises(error, match=message):
        gdpa(**Case("call", (4, 5)).arguments(dtype), **option)
