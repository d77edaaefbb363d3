"""Inputs: shapes, offsets, seeds, packing, errors."""

from dataclasses import replace

import pytest
import torch

from gdpa_kernels.block_attention.api import block_attention
from gdpa_lab.measuring.inputs import cu_seqlens, make_inputs
from gdpa_lab.measuring.length_distributions import Full, Uniform
from gdpa_lab.measuring.workload import Workload

SELF = Workload(
    name="self", batch=5, num_heads_q=4, num_heads_k=2, head_dim=16, max_seqlen_q=40,
    max_seqlen_k=40, lengths_q=Uniform(0.5),
)  # fmt: skip
CROSS = replace(SELF, max_seqlen_k=12, lengths_k=Full())
POOLING = replace(SELF, max_seqlen_q=3, lengths_q=Full(), lengths_k=Uniform(0.5), shared_q=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_shapes_dtype_and_offsets(dtype):
    w = replace(CROSS, dtype=dtype)
    x = make_inputs(w, device="cpu")
    assert x.q.shape == (w.total_q, 4, 16)
    assert x.k.shape == x.v.shape == (5 * 12, 2, 16) and x.grad_out.shape == x.q.shape
    tensors = (x.q, x.k, x.v, x.grad_out)
    assert {tensor.dtype for tensor in tensors} == {getattr(torch, dtype)}
    assert x.cu_seqlens_q.dtype == x.cu_seqlens_k.dtype == torch.int32
    assert x.cu_seqlens_q[0] == 0 and x.cu_seqlens_q.diff().tolist() == list(w.seqlens_q)
    assert x.cu_seqlens_k.tolist() == [0, 12, 24, 36, 48, 60]
    assert (x.max_seqlen_q, x.max_seqlen_k) == (40, 12)


def test_values_are_standard_normal():
    x = make_inputs(replace(SELF, batch=400, dtype="float32"), device="cpu")
    for tensor in (x.q, x.k, x.v, x.grad_out):
        assert tensor.mean().abs() < 0.01
        assert (tensor.std() - 1).abs() < 0.01
    assert not torch.equal(x.k, x.v) and not torch.equal(x.q, x.grad_out)


def test_values_are_those_of_records_made_before_there_was_a_gradient():
    x = make_inputs(SELF, device="cpu")
    draw = torch.Generator().manual_seed(SELF.seed)
    for tensor in (x.q, x.k, x.v, x.grad_out):
        assert torch.equal(tensor, torch.randn(tensor.shape, generator=draw, dtype=torch.bfloat16))


def test_seed_decides_values_and_leaves_lengths():
    first, again, other = (make_inputs(SELF, device="cpu", seed=s) for s in (None, 2025, 7))
    assert torch.equal(first.q, again.q) and torch.equal(first.v, again.v)
    assert first.q.shape == other.q.shape and not torch.equal(first.q, other.q)
    assert torch.equal(first.cu_seqlens_q, other.cu_seqlens_q)


def test_the_global_generator_is_left_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    make_inputs(SELF, device="cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_on_meta_there_are_shapes_alone():
    x, paper = make_inputs(SELF, device="cpu"), make_inputs(SELF, device="meta").batch()
    assert paper.q.is_meta and paper.cu_seqlens_q.is_meta
    assert paper.q.shape == x.q.shape and paper.k.stride() == x.k.stride()
    assert paper.mean_seqlen_k == x.batch().mean_seqlen_k


def test_shared_q_has_one_copy():
    x = make_inputs(POOLING, device="cpu")
    assert x.q.shape == (3, 4, 16)
    assert x.cu_seqlens_q is None
    assert x.k.shape[0] == POOLING.total_k
    assert x.grad_out.shape == (POOLING.total_q, 4, 16) == (5 * 3, 4, 16)
    assert x.arguments()["cu_seqlens_q"] is None


def test_arguments_carry_the_options():
    w = replace(SELF, activation=("relu",) * 4, scale=0.5, output_scale=2.0, causal=True, window=3)
    x = make_inputs(w, device="cpu")
    arguments = x.arguments()
    assert arguments["q"] is x.q and arguments["cu_seqlens_k"] is x.cu_seqlens_k
    options = ("activation", "scale", "output_scale", "mask")
    assert [arguments[name] for name in options] == [("relu",) * 4, 0.5, 2.0, w.mask]
    assert (w.mask.causal, w.mask.window) == (True, 3)
    tensors = {"q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
    assert set(arguments) == tensors | set(options)


BLOCKS = replace(SELF, operator="block_attention", rotary=True, rotate_v=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_block_attention_has_gradients_and_turns(dtype):
    w = replace(BLOCKS, dtype=dtype)
    x = make_inputs(w, device="cpu")
    assert x.q.shape == x.grad_out.shape == (w.total_q, 4, 16)
    assert x.k.shape == x.v.shape == (w.total_q, 2, 16)
    sin, cos = x.rotary
    assert sin.shape == cos.shape == (w.total_q, 8)
    tensors = (x.q, x.k, x.v, x.grad_out, sin, cos)
    assert {tensor.dtype for tensor in tensors} == {getattr(torch, dtype)}
    assert torch.allclose(sin.float() ** 2 + cos.float() ** 2, torch.ones(()), atol=0.02)
    assert sin.min() < -0.9 and sin.max() > 0.9 and cos.min() < -0.9 and cos.max() > 0.9
    assert x.cu_seqlens.diff().tolist() == list(w.seqlens_q)
    plain = make_inputs(replace(w, rotary=False, rotate_v=False), device="cpu")
    assert plain.rotary is None and torch.equal(plain.grad_out, x.grad_out)
    assert torch.equal(plain.q, make_inputs(replace(SELF, dtype=dtype), device="cpu").q)


def test_block_attention_takes_its_arguments():
    x = make_inputs(replace(BLOCKS, block_size=16, dtype="float32"), device="cpu")
    assert x.arguments()["block_size"] == 16 and x.arguments()["rotate_v"]
    batch = x.batch()
    assert batch.scale == 16**-0.5 and batch.q is x.q and batch.rotary is x.rotary
    assert batch.block_size == 16 and batch.rotate_v
    assert block_attention(**x.arguments()).shape == x.q.shape


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_inputs(SELF, device="cpu", seed=-1), "seed must be an integer .*, got -1"),
        (lambda: make_inputs(SELF, device="cpu", seed=1.0), "seed must be an integer .*, got 1.0"),
        (lambda: cu_seqlens([2**30, 2**30], "cpu"), r"seqlens must sum to less than 2\*\*31"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
