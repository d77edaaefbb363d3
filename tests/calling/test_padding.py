"""Rows behind the last sequence, and offsets that the host cannot read."""

import contextlib
import re

import pytest
import torch

import tritonemu
from gdpa_kernels import (
    BlockAttention,
    GDPASelfAttention,
    Lengths,
    Tokenwise,
    block_attention,
    gdpa,
)
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launch import launch
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.calling.rung import Rung
from gdpa_kernels.device import padding
from gdpa_kernels.device.offsets import check_kernel
from tests.calls import assert_same_bits, emulated, ends, pretended
from tests.rungs import head_dim_of, takes_turns
from tests.tiers import swept

TOTAL, ROWS = 44, 51
OFFSETS = ends(0, 14, TOTAL)
EVERY = [rung for rungs in ladder.LADDERS.values() for rung in rungs]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that nobody wrote is NaN."""
    new_empty = torch.Tensor.new_empty

    def filled(x, *size, **options):
        memory = new_empty(x, *size, **options)
        return memory.fill_(torch.nan) if memory.is_floating_point() else memory

    monkeypatch.setattr(torch.Tensor, "new_empty", filled)


def tensors(rows: int, head_dim: int, dtype=torch.bfloat16) -> list[torch.Tensor]:
    """q, k, v and a gradient; rows of padding are NaN."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(ROWS, 2, head_dim, generator=generator).to(dtype) for _ in range(4)]
    for x in made:
        x[TOTAL:] = torch.nan
    return [x[:rows].clone() for x in made]


def results(call, rows: int, head_dim: int, dtype=torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """The output and all gradients of call(q, k, v)."""
    *qkv, grad = tensors(rows, head_dim, dtype)
    leaves = [x.requires_grad_() for x in qkv]
    out = call(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def call_of(rung: Rung, head_dim: int, offsets: torch.Tensor | Lengths, **options):
    """A call(q, k, v) that takes a rung in its directions."""
    if rung.operator == "gdpa":
        names = zip(("impl", "backward_impl"), ("forward", "backward"), strict=True)
        impls = {x: rung.impl if way in rung.directions else "reference" for x, way in names}
        most = () if isinstance(offsets, Lengths) else (30, 30)
        return lambda *qkv: gdpa(*qkv, offsets, offsets, *most, **impls, **options)
    turns = torch.randn(2, ROWS, head_dim // 2, generator=torch.Generator().manual_seed(1))

    def blocks(q, k, v):
        rotary = tuple(turns[:, : len(q)]) if takes_rotary else None
        return block_attention(q, k, v, offsets, impl=rung.impl, rotary=rotary, **options)

    takes_rotary = rung.requires.capability and takes_turns(rung)
    return blocks


@pytest.mark.parametrize(
    "rung",
    swept(EVERY, lambda rung: not rung.is_lesson),
    ids=lambda rung: f"{rung.operator}-{rung.impl}",
)
def test_every_rung_gives_zeros_behind_the_last_sequence(rung):
    """And in front of it what it gives without them, whatever they hold."""
    head_dim = head_dim_of(rung) if rung.requires.capability else 16
    with emulated(rung.impl) if rung.requires.capability else contextlib.nullcontext():
        expected = results(call_of(rung, head_dim, OFFSETS), TOTAL, head_dim)
        for offsets, options in (
            (OFFSETS, {}), (OFFSETS, {"validate": False}), (Lengths(OFFSETS), {}),
        ):  # fmt: skip
            found = results(call_of(rung, head_dim, offsets, **options), ROWS, head_dim)
            assert all(len(x) == ROWS and not x[TOTAL:].any() for x in found)
            assert_same_bits([x[:TOTAL] for x in found], expected)


@pytest.mark.parametrize("impl", ("reference", "v1_tiled", "v4_warp_specialized"))
def test_what_is_packed_is_cleared_part_by_part(impl):
    """By the offsets of queries and of keys, which may differ."""
    head_dim = 64 if impl.startswith("v4") else 16
    x = torch.randn(ROWS, 6, head_dim, generator=torch.Generator().manual_seed(2)).bfloat16()
    grad = torch.randn(ROWS, 2, head_dim, generator=torch.Generator().manual_seed(3)).bfloat16()
    impls = {"impl": "reference", "backward_impl": "reference"}
    if impl != "reference":
        impls = {"impl": "v1_tiled", "backward_impl": f"{impl}_backward"}
    for q_ends, k_ends in ((OFFSETS, ends(0, 20, ROWS)), (ends(0, 20, ROWS), OFFSETS)):
        results = []
        with tritonemu.enabled():
            for parts in (1, 3):
                leaves = [y.clone().requires_grad_() for y in x.chunk(parts, dim=1)]
                qkv = (*leaves, None, None)[:3]
                out = gdpa(*qkv, q_ends, k_ends, ROWS, ROWS, **impls)
                results.append(torch.cat(torch.autograd.grad(out, leaves, grad), dim=1))
        assert_same_bits(*([y] for y in results))
        assert not results[0][TOTAL:, : 2 if q_ends is OFFSETS else 0].any()


def test_a_sum_keeps_what_it_is_added_to():
    q, k, v, other = tensors(ROWS, 16, torch.float32)
    other[TOTAL:] = 3.0
    out = gdpa(q, k, v, OFFSETS, OFFSETS, 30, 30, add_to=other)
    assert torch.equal(out[TOTAL:], other[TOTAL:])


@pytest.mark.parametrize("kind", (GDPASelfAttention, BlockAttention))
@pytest.mark.parametrize("kept", (False, True))
def test_layers_take_padding(kind, kept):
    layer, x = kind(32, 2, rotary=1e4), torch.randn(ROWS, 32)
    offsets = Lengths(OFFSETS) if kept else OFFSETS
    expected = layer((x[:TOTAL], offsets))[0]
    found = layer((x, offsets))[0]
    torch.testing.assert_close(found[:TOTAL], expected)
    torch.testing.assert_close(found[TOTAL:], layer.out.bias.expand(ROWS - TOTAL, -1))
    both = torch.nn.Sequential(Tokenwise(torch.nn.Identity()), layer)
    assert torch.equal(both((x, offsets))[0], found)


WRONG = (
    ([4, 14, TOTAL], 40, "cu_seqlens_k must run from 0 to at most the 44 rows"),
    ([0, TOTAL], 40, "max_seqlen_k must be at least the longest sequence, 44 tokens, got 40"),
    ([0, 14, 60], 60, "cu_seqlens_k must run from 0 to at most the 44 rows .*, got 0 to 60"),
    ([0, 40, 14, TOTAL], 44, "cu_seqlens_k must not decrease, got 40 followed by 14"),
    ([0, 14, 2**32 + TOTAL], 44, "cu_seqlens_k must run .* got 0 to [24]"),
)


@pytest.mark.parametrize("offsets, most, message", WRONG, ids=lambda x: str(x)[:12])
def test_a_compiled_call_refuses_what_an_eager_one_refuses(offsets, most, message):
    """On the CPU with the same sentence."""
    *qkv, _ = tensors(TOTAL, 16, torch.float32)
    wrong = torch.tensor(offsets)
    right = torch.linspace(0, TOTAL, len(offsets)).int()

    def call(q, k, v, offsets):
        return gdpa(q, k, v, right, offsets, TOTAL, most)

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for each in (call, compiled):
        with pytest.raises(ValueError, match=message):
            each(*qkv, wrong)


def test_a_compiled_call_checks_counts_and_alignment():
    *qkv, _ = tensors(TOTAL, 16, torch.float32)
    fewer = ends(0, 20, TOTAL)

    def targets(q, k, v, counts):
        return gdpa(q, k, v, OFFSETS, OFFSETS, 30, 30, causal=True, num_targets=counts)

    def causal(q, k, v, offsets):
        return gdpa(q, k, v, offsets, OFFSETS, 30, 30, causal=True)

    def blocks(q, k, v, offsets):
        return block_attention(q, k, v, offsets)

    def kept(q, k, v, counts):
        return gdpa(q, k, v, lengths, lengths, causal=True, num_targets=counts)

    def kept_causal(q, k, v, _):
        return gdpa(q, k, v, fewer_lengths, lengths, causal=True)

    lengths, fewer_lengths = Lengths(OFFSETS), Lengths(fewer)
    for call, last, message in (
        (kept, ends(15, 0), "together at most the length, got 15 and 0 of 14 in sequence 0"),
        (kept_causal, fewer, "causal must be .* got True with 24 queries and 30 keys"),
        (targets, ends(15, 0), "together at most the length, got 15 and 0 of 14 in sequence 0"),
        (causal, fewer, "causal must be .* got True with 24 queries and 30 keys"),
        (blocks, ends(0, 14, 60), "cu_seqlens must run from 0 to at most the 44 rows"),
    ):
        torch._dynamo.reset()
        for each in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
            with pytest.raises(ValueError, match=message):
                each(*qkv, last)


def on_the_device(**changes) -> None:
    """`check_kernel` of an ordinary call with some changes, in the emulator."""
    given = {
        "ends_q": OFFSETS, "ends_k": OFFSETS, "segments": None, "sequences": 2, "rows": ROWS,
        "most": 30, "aligned": False, "equal": False, "padding": True,
    } | changes  # fmt: skip
    rows, most = (given["rows"],) * 2, (given["most"],) * 2
    with tritonemu.enabled():
        launch(
            check_kernel, (2,), torch.device("cpu"),
            given["ends_q"], given["ends_k"], given["segments"], given["sequences"], *rows, *most,
            NAME="cu_seqlens", ALIGNED=given["aligned"], EQUAL=given["equal"],
            PADDING=given["padding"], BLOCK=1,
        )  # fmt: skip


def test_the_device_finds_what_the_host_finds():
    on_the_device()
    on_the_device(ends_q=None, aligned=True)
    on_the_device(segments=torch.tensor([[3, 4], [0, 30]], dtype=torch.int32), equal=True)
    for changes, message in (
        ({"ends_q": ends(1, 14, TOTAL)}, "cu_seqlens_q must start at 0"),
        ({"ends_k": ends(0, 14, 60), "most": 60}, "cu_seqlens_k must end at or before the rows"),
        ({"padding": False}, "cu_seqlens_q must end at the rows of its tensor"),
        ({"ends_k": ends(0, 40, 14)}, "cu_seqlens_k must not decrease|no sequence beyond"),
        ({"most": 29}, "cu_seqlens_q must have no sequence beyond its max_seqlen"),
        ({"ends_q": None, "most": 29}, "cu_seqlens must have no sequence beyond"),
        ({"segments": torch.tensor([[3, 12], [0, 0]], dtype=torch.int32)}, "num_targets and"),
        ({"segments": torch.tensor([[-1, 0], [0, 0]], dtype=torch.int32)}, "num_targets and"),
        ({"ends_q": ends(0, 13, 44), "most": 31, "aligned": True}, "causal must be named where"),
        ({"ends_q": ends(0, 15, 44), "equal": True}, "causal must be 'lower_right'"),
    ):
        with pytest.raises(tritonemu.DeviceAssertion, match=message):
            on_the_device(**changes)


@pytest.mark.parametrize("parts", ("xo", "x", "o", "xa"))
@pytest.mark.parametrize("strides", ("own", "packed", "mixed"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_the_device_clears_what_the_host_clears(dtype, strides, parts, monkeypatch):
    """Whichever gradients are needed, as parts of a packed one or not; to what is added or to 0."""
    whole = torch.randn(ROWS, 7, 16).to(dtype)
    add_to = torch.ones(ROWS, 3, 16) if "a" in parts else None
    results = []
    for device in (False, True):
        packed = whole.clone()
        x, other = packed[:, :3], packed[:, 4:]
        x = x if strides == "packed" else x.contiguous()
        other = other.contiguous() if strides == "own" else other
        given = x if "x" in parts else None, OFFSETS, other if "o" in parts else None, add_to
        if device:
            monkeypatch.setattr(padding, "multiprocessors", lambda _: 3)
            monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
        with tritonemu.enabled():
            padding.clear_padding(*given)
        results.append((x, other, packed))
    assert_same_bits(*results)
    for name, tensor, before in (("x", x, whole[:, :3]), ("o", other, whole[:, 4:])):
        expected = before.clone()
        if name in parts:
            expected[TOTAL:] = float("a" in parts)
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("arch", (80, 90, 100))
def test_both_kernels_compile(arch):
    """With their assertions: a trap in the code."""
    x = torch.zeros(ROWS, 2, 16)
    with launches(run=False) as seen:
        launch(
            check_kernel, (1,), torch.device("cpu"), OFFSETS, OFFSETS, torch.zeros(2, 2).int(), 2,
            ROWS, ROWS, 30, 30, NAME="cu_seqlens", ALIGNED=True, EQUAL=True, PADDING=True,
            BLOCK=1024,
        )  # fmt: skip
        padding.clear_on_device([x, x], OFFSETS, x, 1)
    with pretended(arch):
        check, clear = (
            each.kernel.run(grid=(1,), warmup=True, **each.arguments, **each.constants).asm["ptx"]
            for each in seen
        )
    assert "num_targets and num_contexts must fit" in bytes_of(check) and "__assertfail" in check
    assert "__assertfail" not in clear


def bytes_of(ptx: str) -> str:
    """The strings that PTX writes as lists of numbers."""
    lists = re.findall(r"b8 \w+\[\d+\] = \{([\d, ]+)\}", ptx)
    return " ".join(bytes(map(int, each.split(","))).decode("ascii", "ignore") for each in lists)
