"""Rows behind the last sequence, and offsets that the host cannot read."""

import contextlib
import re

import pytest
import torch

import tritonemu
from gdpa_kernels import BlockAttention, GDPASelfAttention, Lengths, block_attention, gdpa
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launch import launch
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.calling.rung import Rung
from gdpa_kernels.device import padding
from gdpa_kernels.device.offsets import check_kernel, clear_kernel
from tests.calls import assert_same_bits, emulated, ends, pretended
from tests.rungs import head_dim_of, takes_turns

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


@pytest.mark.parametrize("rung", EVERY, ids=lambda rung: f"{rung.operator}-{rung.impl}")
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


WRONG = (
    ([4, 14, TOTAL], 40, "cu_seqlens_k must run from 0 to at most the 44 rows"),
    ([0, TOTAL], 40, "max_seqlen_k must be at least the longest sequence, 44 tokens, got 40"),
    ([0, 14, 60], 60, "cu_seqlens_k must run from 0 to at most the 44 rows .*, got 0 to 60"),
    ([0, 40, 14, TOTAL], 44, "cu_seqlens_k must not decrease, got 40 followed by 14"),
    ([0, 14, 2**32 + TOTAL], 44, "cu_seqlens_k must run .* got 0 to 2147483647"),
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
        with pytest.raises(ValueError, match=message.replace("2147483647", "[24]")):
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

    for call, last, message in (
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
        "most": 30, "aligned": False, "equal": False,
    } | changes  # fmt: skip
    rows, most = (given["rows"],) * 2, (given["most"],) * 2
    with tritonemu.enabled():
        launch(
            check_kernel, (2,), torch.device("cpu"),
            given["ends_q"], given["ends_k"], given["segments"], given["sequences"], *rows, *most,
            NAME="cu_seqlens", ALIGNED=given["aligned"], EQUAL=given["equal"], BLOCK=1,
        )  # fmt: skip


def test_the_device_finds_what_the_host_finds():
    on_the_device()
    on_the_device(ends_q=None, aligned=True)
    on_the_device(segments=torch.tensor([[3, 4], [0, 30]], dtype=torch.int32), equal=True)
    for changes, message in (
        ({"ends_q": ends(1, 14, TOTAL)}, "cu_seqlens_q must start at 0"),
        ({"ends_k": ends(0, 14, 60), "most": 60}, "cu_seqlens_k must end at or before the rows"),
        ({"ends_k": ends(0, 40, 14)}, "cu_seqlens_k must not decrease|no sequence beyond"),
        ({"most": 29}, "cu_seqlens_q must have no sequence beyond its max_seqlen"),
        ({"ends_q": None, "most": 29}, "cu_seqlens must have no sequence beyond"),
        ({"segments": torch.tensor([[3, 12], [0, 0]], dtype=torch.int32)}, "num_targets and"),
        ({"segments": torch.tensor([[-1, 0], [0, 0]], dtype=torch.int32)}, "num_targets and"),
        ({"ends_q": ends(0, 13, 44), "most": 31, "aligned": True}, "causal must name"),
        ({"ends_q": ends(0, 15, 44), "equal": True}, "causal must be 'lower_right'"),
    ):
        with pytest.raises(tritonemu.DeviceAssertion, match=message):
            on_the_device(**changes)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_the_device_clears_what_the_host_clears(dtype, monkeypatch):
    x, k, v, add_to = (torch.randn(ROWS, 3, 16).to(dtype) for _ in range(4))
    expected = [y.clone() for y in (x, k, v)]
    padding.clear_padding(expected[0], OFFSETS, (*expected[1:],), OFFSETS, add_to)
    found = [y.clone() for y in (x, k, v)]
    with tritonemu.enabled(multiprocessors=3):
        launch(
            clear_kernel, (3,), torch.device("cpu"),
            found[0], add_to, *found[1:], OFFSETS, OFFSETS, 2, *(y.numel() for y in found),
            WIDTH=48, WIDTH_K=48, BLOCK=32,
        )  # fmt: skip
    assert_same_bits(found, expected)
    assert torch.equal(found[0][TOTAL:], add_to[TOTAL:]) and not found[2][TOTAL:].any()
    assert torch.equal(found[1][:TOTAL], k[:TOTAL])


@pytest.mark.parametrize("arch", (80, 90, 100))
def test_both_kernels_compile(arch):
    """With their assertions: a trap in the code."""
    x = torch.zeros(ROWS, 2, 16)
    with launches(run=False) as seen:
        launch(
            check_kernel, (1,), torch.device("cpu"), OFFSETS, OFFSETS, torch.zeros(2, 2).int(), 2,
            ROWS, ROWS, 30, 30, NAME="cu_seqlens", ALIGNED=True, EQUAL=True, BLOCK=1024,
        )  # fmt: skip
        launch(
            clear_kernel, (1,), torch.device("cpu"), x, x, x, x, OFFSETS, OFFSETS, 2, 3, 3, 3,
            WIDTH=32, WIDTH_K=32, BLOCK=1024,
        )  # fmt: skip
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
