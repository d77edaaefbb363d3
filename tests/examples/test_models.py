"""The models compute the same with the operators, jagged, as with plain PyTorch, padded."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attentions import blocks
from models import Config, build
from options import flops_of
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from data import World, make_batch
from gdpa_kernels import Lengths
from tests.peers import varlen_attn

WORLD = World(items=40, topics=4)
SMALL = Config(dim=16, heads=2, layers=2, tokens=3, keys=5, seeds=4, max_seqlen=130)
MODELS = {
    "full": SMALL,
    "window": replace(SMALL, mixer="window"),
    "block": replace(SMALL, mixer="block"),
    "hstu": replace(SMALL, model="hstu"),
}
JAGGED = [70, 0, 5, 130, 1]


def step(config: Config, lengths: list[int], dtype=torch.float64) -> tuple[float, dict]:
    """Loss and gradients of a batch."""
    torch.manual_seed(0)
    model = build(config, WORLD).to(dtype)
    batch = make_batch(WORLD, np.array(lengths), np.arange(len(lengths)), 0)
    loss = F.binary_cross_entropy_with_logits(model(batch).to(dtype), batch.label.to(dtype))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


EXACT, EMPTY, FEW = (1e-12, 1e-12), [0, 0, 0], ("full", "block")
# Of a model, changes that make no difference; (rtol, atol) of its gradients.
SAME = [
    *((name, {}, {"attention": "eager"}, lengths, EXACT)
      for name in MODELS for lengths in (JAGGED, EMPTY)),
    *((name, {"norms": "fused", "recompute": again}, {}, JAGGED, (1e-9, 1e-11))
      for name in FEW for again in (False, True)),
    ("full", {"embedding": "lookups"}, {}, JAGGED, EXACT),
    *((name, {"attention": "fa2_varlen"}, {"attention": "padded_sdpa"}, JAGGED, (1e-10, 1e-12))
      for name in MODELS),
]  # fmt: skip


@pytest.mark.parametrize("name, one, other, lengths, tolerances", SAME, ids=str)
def test_is_the_same_function(name, one, other, lengths, tolerances, monkeypatch):
    """Jagged as padded, fused norms, a matmul as the sum of lookups, PyTorch's varlen attention."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    loss, gradients = step(replace(MODELS[name], **one), lengths)
    right, wanted = step(replace(MODELS[name], **other), lengths)
    assert loss == pytest.approx(right, rel=1e-12)
    rtol, atol = tolerances
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[parameter], rtol=rtol, atol=atol)


@pytest.mark.parametrize("norms", ("eager", "fused"))
def test_a_stream_in_the_dtype_of_autocast(norms):
    config = replace(SMALL, norms=norms, stream="autocast")
    right, _ = step(SMALL, JAGGED)
    with torch.autocast("cpu", torch.bfloat16):
        loss, gradients = step(config, JAGGED, torch.float32)
    assert loss == pytest.approx(right, rel=0.03)
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_block_attention_by_sdpa():
    """Of a softmax mixer the softmax peer is the same function; the rest of the model is not."""
    torch.manual_seed(0)
    layers = [build(replace(MODELS["block"], attention=a), WORLD).layers[0].mixer
              for a in ("gdpa", "padded_sdpa")]  # fmt: skip
    layers[1].load_state_dict(layers[0].state_dict())
    lengths = Lengths(torch.tensor([0, *JAGGED]).cumsum(0))
    x = torch.randn(lengths.total, SMALL.dim)
    ours, peer = (layer((x, lengths))[0] for layer in layers)
    torch.testing.assert_close(ours, peer)


@pytest.mark.parametrize("lengths", (JAGGED, EMPTY), ids=("jagged", "no tokens"))
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_padded_sdpa_are_finite(name, lengths):
    _, gradients = step(replace(MODELS[name], attention="padded_sdpa"), lengths, torch.float32)
    assert all(gradient.isfinite().all() for gradient in gradients.values())


@pytest.mark.parametrize("attention", ("padded_sdpa", "fa2_varlen", "eager"))
@pytest.mark.parametrize("name", MODELS)
def test_peers_under_autocast(name, attention, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    config = replace(MODELS[name], attention=attention)
    right, _ = step(config, JAGGED)
    # PyTorch's fused kernel of a CPU with AMX fails where ATEN_CPU_CAPABILITY denies AVX-512.
    with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
        loss, gradients = step(config, JAGGED, torch.float32)
    assert loss == pytest.approx(right, rel=0.03)
    assert all(gradient.isfinite().all() for gradient in gradients.values())


@pytest.mark.parametrize("name", ("full", "hstu"))
def test_recomputing_changes_nothing(name):
    kept, again = (step(replace(MODELS[name], recompute=x), JAGGED) for x in (False, True))
    assert kept[0] == again[0]
    assert all(torch.equal(kept[1][key], again[1][key]) for key in kept[1])


def test_a_row_does_not_see_its_neighbours():
    torch.manual_seed(0)
    for config in MODELS.values():
        model = build(config, WORLD).double()
        whole = model(make_batch(WORLD, np.array(JAGGED), np.arange(5), 0))
        alone = model(make_batch(WORLD, np.array(JAGGED[3:4]), np.array([3]), 0))
        torch.testing.assert_close(whole[3:4], alone, rtol=1e-12, atol=1e-12)


def test_blocks_are_sequences():
    lengths = Lengths(torch.tensor([0, 70, 70, 75, 203]))
    assert blocks(lengths, 64).cu_seqlens.tolist() == [0, 64, 70, 75, 139, 203]


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_that_pytorch_counts(name):
    """A matmul in place of lookups is none of them."""
    lengths = np.array([*JAGGED, 129, 64, 33])
    model = build(replace(MODELS[name], embedding="lookups"), WORLD)
    batch = make_batch(WORLD, lengths, np.arange(8), 0)
    with FlopCounterMode(display=False) as counter:
        F.binary_cross_entropy_with_logits(model(batch), batch.label).backward()
    assert flops_of(MODELS[name])(lengths) == pytest.approx(counter.get_total_flops(), rel=1e-9)
