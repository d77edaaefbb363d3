"""PyTorch's own peers: a compiled definition, FlashAttention-2, cuDNN and FlexAttention; ragged
cuDNN by its own frontend."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F

from gdpa_kernels.gdpa.kernels import v0_eager
from gdpa_lab.measuring import private
from gdpa_lab.measuring.baselines import cudnn_frontend, peer
from gdpa_lab.measuring.baselines.peer import Baseline, Call, both, needs_cuda, no_window
from gdpa_lab.measuring.inputs import BlockInputs, Inputs
from gdpa_lab.measuring.workload import Workload

OFFSETS = {"gelu": 0.2, "gelu_tanh": 0.2, "silu": 0.3, "hardswish": 0.4, "relu": 0.1}
"""Offsets by activation for FlexAttention: more than minus the activation's minimum."""


def needs_varlen() -> str | None:
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        needed = "torch.nn.attention.varlen (torch 2.10 or newer)"
        return f"needs {needed}, got torch {torch.__version__}"
    return needs_cuda()


def grouped(q: torch.Tensor, k: torch.Tensor) -> dict[str, bool]:
    """PyTorch's option for fewer key heads than query heads."""
    return {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}


def compiled(
    function: Callable[..., torch.Tensor], inputs: Inputs | BlockInputs, direction: str
) -> Call:
    """Differentiate a function with a compiled part. Its backward is timed repeatedly, so it must
    not overwrite what forward saved."""
    with private.without_donated_buffers():
        return peer.differentiate(function, inputs, direction)


def torch_compile(inputs: Inputs, direction: str = "forward") -> Call:
    """Run v0_eager with its arithmetic compiled; padding and unpadding stay eager."""
    batch = inputs.batch()
    options = ("activation", "scale", "output_scale", "causal", "window")
    arguments = {option: getattr(batch, option) for option in options}
    attention = functools.partial(v0_eager.padded_attention, **arguments)
    attention = peer.by_inductor(attention)

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q = v0_eager.pad(q, inputs.cu_seqlens_q, inputs.max_seqlen_q)
        k = v0_eager.pad(k, inputs.cu_seqlens_k, inputs.max_seqlen_k)
        v = v0_eager.pad(v, inputs.cu_seqlens_k, inputs.max_seqlen_k)
        return v0_eager.unpad(attention(q, k, v), inputs.cu_seqlens_q, inputs.q.shape[0])

    return compiled(function, inputs, direction)


def fa2_varlen(inputs: Inputs | BlockInputs, direction: str = "forward") -> Call:
    from torch.nn.attention import varlen

    lengths = peer.ragged(inputs)
    options = grouped(inputs.q, inputs.k) | {"scale": inputs.scale()}
    if (sides := peer.window_size(inputs.workload)) != (-1, -1):
        options["window_size"] = sides
    taken = inspect.signature(varlen.varlen_attn).parameters
    if missing := options.keys() - taken:
        raise peer.Unsupported(f"varlen_attn of torch {torch.__version__} has no {min(missing)}")
    return peer.differentiate(
        lambda q, k, v: varlen.varlen_attn(q, k, v, *lengths, **options), inputs, direction
    )


def cudnn(inputs: Inputs, direction: str = "forward") -> Call:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batch, causal, heads = peer.dense(inputs), inputs.workload.causal, grouped(inputs.q, inputs.k)

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (tensor.unflatten(0, batch).transpose(1, 2) for tensor in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(
                q, k, v, scale=inputs.scale(), is_causal=causal, **heads
            )
        return out.transpose(1, 2).reshape(inputs.q.shape)

    return peer.differentiate(function, inputs, direction)


def flex(inputs: Inputs, direction: str = "forward") -> Call:
    """Compute the activation f through the softmax of FlexAttention: with scores log(f(s) + a),
    where a is an offset, the weights are (f(s) + a) / l, and log l is returned too, so f(S) V is
    the output times l minus a times the sum of V. Dense tensors without a mask only."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    batch, workload, heads = peer.dense(inputs), inputs.workload, grouped(inputs.q, inputs.k)
    offset, f = OFFSETS[workload.activation], v0_eager.ACTIVATIONS[workload.activation]

    def score(s: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return torch.log(f(s) + offset)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (tensor.unflatten(0, batch).transpose(1, 2) for tensor in (q, k, v))
        out, aux = flex_attention(
            q, k, v, score, scale=inputs.scale(), return_aux=AuxRequest(lse=True), **heads
        )
        values = v.sum(-2, keepdim=True, dtype=torch.float32)
        values = values.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        product = (out.float() * aux.lse.exp()[..., None] - offset * values) * workload.output_scale
        return product.to(q.dtype).transpose(1, 2).reshape(inputs.q.shape)

    attention = peer.by_inductor(attention)
    return compiled(attention, inputs, direction)


def _has_offset(workload: Workload, direction: str) -> str | None:
    if workload.activation not in OFFSETS or workload.causal:
        known = f"an activation among {', '.join(OFFSETS)} without a mask"
        return f"needs {known}, got {workload.activation}, causal={workload.causal}"
    return None


PEERS = (
    Baseline("torch_compile", "torch.compile", "activation", needs_cuda, torch_compile),
    Baseline("fa2_varlen", "FlashAttention-2 (torch)", "softmax", needs_varlen, fa2_varlen),
    Baseline("cudnn", "cuDNN, dense", "softmax", needs_cuda, cudnn, peer.dense_only),
    Baseline(
        "cudnn_varlen", "cuDNN, ragged", "softmax", cudnn_frontend.needs_frontend,
        cudnn_frontend.cudnn_varlen, both(peer.own_q, no_window), cudnn_frontend.INSTALL,
        "https://github.com/NVIDIA/cudnn-frontend",
    ),
    Baseline(
        "flex", "FlexAttention, dense", "activation", needs_cuda, flex,
        both(peer.dense_only, _has_offset),
        source="https://github.com/meta-pytorch/attention-gym/pull/195",
    ),
)  # fmt: skip
