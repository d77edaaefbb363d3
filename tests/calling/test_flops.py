"""FLOPs that `torch.utils.flop_counter` sees in the operators."""

import subprocess
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from gdpa_kernels import GDPASelfAttention, block_attention, gdpa
from gdpa_kernels.gdpa.mask import Mask
from gdpa_kernels.gdpa.reference import visible
from gdpa_lab.measuring.inputs import cu_seqlens
from gdpa_lab.measuring.workload import visible_pairs

QUERIES, KEYS = [4, 0, 17, 3], [9, 5, 0, 30]
HEADS, DIM = 4, 16
CAUSAL = {"causal": "upper_left"}
MASKS = ({}, CAUSAL, {"window": 2}, CAUSAL | {"window": 5}, {"window": 100})


def counted(call) -> dict[str, int]:
    with FlopCounterMode(display=False) as counter:
        call()
    return {op.__name__: n for op, n in counter.get_flop_counts()["Global"].items()}


def leaves(rows: int, keys: int, wanted: str = "qkv") -> list[torch.Tensor]:
    shapes = (rows, HEADS, DIM), (keys, 2, DIM), (keys, 2, DIM)
    pairs = zip("qkv", shapes, strict=True)
    return [torch.randn(shape).requires_grad_(name in wanted) for name, shape in pairs]


def of_gdpa(wanted: str = "qkv", packed: bool = False, **mask):
    q, k, v = leaves(sum(QUERIES), sum(KEYS), wanted)
    if packed:
        k, v = torch.cat((k, v), 1).detach().requires_grad_(k.requires_grad), None
    ends = (cu_seqlens(x, "cpu") for x in (QUERIES, KEYS))
    return gdpa(q, k, v, *ends, 17, 30, **mask)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_of_gdpa_are_those_of_pairs_that_count(mask):
    flops = 2 * HEADS * DIM * visible_pairs(QUERIES, KEYS, Mask(**mask))
    found = counted(lambda: of_gdpa(**mask).sum().backward())
    assert found == {"gdpa_forward": 2 * flops, "gdpa_backward": 5 * flops}


@pytest.mark.parametrize("window", (None, 2, 100))
def test_of_positions_that_end_with_their_sequence(window):
    mask = {"causal": "lower_right", "window": window}
    pairs = sum(int(visible(*n, **mask).sum()) for n in zip(QUERIES, KEYS, strict=True))
    found = counted(lambda: of_gdpa(**mask))
    assert found == {"gdpa_forward": 4 * HEADS * DIM * pairs} and pairs


@pytest.mark.parametrize(
    "wanted, matmuls", {"q": 3, "k": 3, "v": 2, "qk": 4, "kv": 4, "qkv": 5}.items()
)
def test_of_gradients_are_those_that_are_needed(wanted, matmuls):
    flops = 2 * HEADS * DIM * visible_pairs(QUERIES, KEYS)
    for packed in (False, True)[: 1 + (wanted in ("q", "kv", "qkv"))]:
        found = counted(lambda p=packed: of_gdpa(wanted, p).sum().backward())
        assert found["gdpa_backward"] == matmuls * flops


def test_of_a_shared_q():
    q, k, v = leaves(3, sum(KEYS))
    found = counted(lambda: gdpa(q, k, v, None, cu_seqlens(KEYS, "cpu"), 3, 30, **CAUSAL))
    pairs = visible_pairs([3] * 4, KEYS, Mask(**CAUSAL))
    assert found == {"gdpa_forward": 4 * HEADS * DIM * pairs}


@pytest.mark.parametrize("size", (16, 64))
def test_of_block_attention_are_those_of_blocks(size):
    lengths = [0, 5, 16, 150]
    q, k, v = leaves(sum(lengths), sum(lengths))
    ends = cu_seqlens(lengths, "cpu")
    call = lambda: block_attention(q, k, v, ends, block_size=size).sum().backward()  # noqa: E731
    pairs = sum(min(size, n - at) ** 2 for n in lengths for at in range(0, n, size))
    flops = 2 * HEADS * DIM * pairs
    found = counted(call)
    assert found == {"block_attention_forward": 2 * flops, "block_attention_backward": 5 * flops}


def test_of_fake_calls_are_those_of_the_longest_sequences():
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        q, k, v = (mode.from_tensor(x.detach()) for x in leaves(24, 24))
        ends = mode.from_tensor(cu_seqlens([4, 0, 17, 3], "cpu"))
        found = counted(lambda: gdpa(q, k, v, ends, ends, 17, 17, causal=True))
        found |= counted(lambda: block_attention(q, k, v, ends, block_size=16))
    assert found["gdpa_forward"] == 4 * HEADS * DIM * 4 * 17 * 17
    assert found["block_attention_forward"] == 4 * HEADS * DIM * 24 * 16


def test_a_layer_counts_its_projections_too():
    layer, x = GDPASelfAttention(32, 2), torch.randn(24, 32)
    found = counted(lambda: layer((x, cu_seqlens([4, 0, 17, 3], "cpu"))))
    assert found == {"gdpa_forward": 4 * 32 * (16 + 289 + 9), "addmm": 2 * 24 * 32 * (96 + 32)}


def test_a_broken_triton_keeps_nobody_from_importing_the_package(tmp_path):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise AttributeError('half an install')\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import gdpa_kernels"
    subprocess.run([sys.executable, "-c", code], check=True)
