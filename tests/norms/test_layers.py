"""Layers with `fused_qk_norm` are the same functions as without it."""

from __future__ import annotations

import pytest
import torch

from gdpa_kernels import PFFN, PMA, BlockAttention, GDPASelfAttention
from gdpa_lab.measuring.inputs import cu_seqlens

LAYERS = {
    "self": (GDPASelfAttention, (32, 4), {}),
    "rotary": (GDPASelfAttention, (32, 4, 2), {"rotary": 100.0, "causal": True}),
    "pma": (PMA, (32, 4, 3, 2), {}),
    "pffn": (PFFN, (32, 4, 7, 6, 2), {}),
    "pffn of tokens": (PFFN, (32, 4, 7, 6), {"summary_tokens": 5}),
    "block": (BlockAttention, (32, 4, 2, 16), {"rotary": 100.0}),
}
LENGTHS = [0, 5, 19, 0, 1]


def make(name: str, fused: bool, dtype=torch.float64):
    layer, sizes, options = LAYERS[name]
    torch.manual_seed(0)
    made = layer(*sizes, qk_norm=True, fused_qk_norm=fused, dtype=dtype, **options)
    for norm in (made.q_norm, made.k_norm):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    return made


def run(layer, call=None, lengths=LENGTHS):
    """Result and all gradients, and the values that came in as they are afterwards."""
    torch.manual_seed(1)
    dtype = layer.out.weight.dtype
    values = torch.randn(sum(lengths), 32, dtype=dtype, requires_grad=True)
    tokens = getattr(layer, "summary_tokens", None)
    shape = (len(lengths), 7) if tokens is None else (len(lengths), tokens, 7)
    summary = (torch.randn(shape, dtype=dtype),) if isinstance(layer, PFFN) else ()
    y = (layer if call is None else call)((values, cu_seqlens(lengths, "cpu")), *summary)
    y = y if isinstance(y, torch.Tensor) else y[0]
    inputs = {"values": values} | dict(layer.named_parameters())
    found = torch.autograd.grad(y.square().sum(), list(inputs.values()))
    return {"y": y.detach(), **dict(zip(inputs, found, strict=True))}


@pytest.mark.parametrize("lengths", (LENGTHS, [0, 0]), ids=("jagged", "no tokens"))
@pytest.mark.parametrize("name", LAYERS)
def test_fused_is_the_same_function(name, lengths):
    eager, fused = (run(make(name, which), lengths=lengths) for which in (False, True))
    assert eager.keys() == fused.keys()
    for key, expected in eager.items():
        torch.testing.assert_close(fused[key], expected, atol=1e-12, rtol=1e-10, msg=key)


@pytest.mark.parametrize("name", LAYERS)
def test_fused_compiles_to_one_graph(name):
    layer = make(name, True, torch.float32)
    layer.max_seqlen = 20
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for lengths in (LENGTHS, [9, 3, 5]):
        expected, found = (run(layer, call, lengths) for call in (None, compiled))
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, msg=key)


def test_there_must_be_a_norm_to_fuse():
    for name in ("self", "block"):
        layer, sizes, _ = LAYERS[name]
        with pytest.raises(ValueError, match="fused_qk_norm must be False without qk_norm, got T"):
            layer(*sizes, fused_qk_norm=True)
