"""Peers behind one signature: what a user could install instead.

Each says whether its mathematics is the activation's or softmax. A softmax peer computes another
function at the same FLOPs and bytes: it is compared on time only, and checked against softmax
before it is timed.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from gdpa_kernels.gdpa import v0_eager
from gdpa_kernels.inputs import Inputs


class Availability(NamedTuple):
    """Whether this machine can run a baseline, and why or why not."""

    ok: bool
    reason: str


class Unsupported(Exception):
    """A baseline cannot compute this workload; the text says what it needs."""


@dataclass(frozen=True)
class Baseline:
    """A peer. `prepare` does what its layout needs, untimed, and returns the call to be timed."""

    impl: str
    title: str
    math: str
    needs: Callable[[], str | None]
    prepare: Callable[[Inputs], Callable[[], torch.Tensor]]

    def availability(self) -> Availability:
        """Whether this machine has what the peer needs."""
        problem = self.needs()
        return Availability(problem is None, problem or "runs on cuda:0")


def softmax_reference(inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
    """Softmax attention, one sequence after another, in `dtype`; `[total_q, num_heads,
    head_dim]`."""
    q, k, v = (tensor.to(dtype) for tensor in (inputs.q, inputs.k, inputs.v))
    scale = _scale(inputs)
    ends_q, ends_k = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
    outputs = []
    for i in range(len(ends_q) - 1):
        rows, keys = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
        q_i, k_i, v_i = (t.transpose(0, 1) for t in (q[rows], k[keys], v[keys]))
        outputs.append((torch.softmax(q_i @ k_i.mT * scale, dim=-1) @ v_i).transpose(0, 1))
    return torch.cat(outputs)


def _scale(inputs: Inputs) -> float:
    return inputs.rung_arguments()["scale"]


def _needs_cuda() -> str | None:
    return None if torch.cuda.is_available() else "needs a CUDA device; this machine has none"


def _needs_varlen() -> str | None:
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return (
            f"needs torch.nn.attention.varlen (torch 2.10 or newer), got torch {torch.__version__}"
        )
    return _needs_cuda()


def _needs_module(module: str, package: str) -> Callable[[], str | None]:
    def needs() -> str | None:
        try:
            found = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            found = False
        return _needs_cuda() if found else f"needs the package {package}, which is not installed"

    return needs


def _torch_compile(inputs: Inputs) -> Callable[[], torch.Tensor]:
    """v0_eager with its arithmetic compiled; padding and unpadding stay eager."""
    arguments = inputs.rung_arguments()
    options = ("activation", "scale", "output_scale", "causal", "window")
    compiled = torch.compile(
        functools.partial(
            v0_eager.padded_attention, **{option: arguments[option] for option in options}
        ),
        dynamic=False,
        options={"compile_threads": 1},
    )

    def call() -> torch.Tensor:
        q = v0_eager.pad(inputs.q, inputs.cu_seqlens_q, inputs.max_seqlen_q)
        k = v0_eager.pad(inputs.k, inputs.cu_seqlens_k, inputs.max_seqlen_k)
        v = v0_eager.pad(inputs.v, inputs.cu_seqlens_k, inputs.max_seqlen_k)
        return v0_eager.unpad(compiled(q, k, v), inputs.cu_seqlens_q, inputs.q.shape[0])

    return call


def _fa2_varlen(inputs: Inputs) -> Callable[[], torch.Tensor]:
    from torch.nn.attention.varlen import varlen_attn

    def call() -> torch.Tensor:
        return varlen_attn(
            inputs.q, inputs.k, inputs.v, inputs.cu_seqlens_q, inputs.cu_seqlens_k,
            inputs.max_seqlen_q, inputs.max_seqlen_k, scale=_scale(inputs),
        )  # fmt: skip

    return call


def _cudnn(inputs: Inputs) -> Callable[[], torch.Tensor]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    lengths = {*inputs.workload.seqlens_q}, {*inputs.workload.seqlens_k}
    if any(len(unique) != 1 for unique in lengths):
        raise Unsupported("needs sequences of one length, got a jagged batch")
    shape = (len(inputs.workload.seqlens_q), -1, *inputs.q.shape[1:])
    q, k, v = (t.view(shape).transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, scale=_scale(inputs))
        return out.transpose(1, 2).reshape(inputs.q.shape)

    return call


def _cudnn_varlen(inputs: Inputs) -> Callable[[], torch.Tensor]:
    def call() -> torch.Tensor:
        return torch.ops.aten._cudnn_attention_forward(
            inputs.q, inputs.k, inputs.v, None, inputs.cu_seqlens_q, inputs.cu_seqlens_k,
            inputs.max_seqlen_q, inputs.max_seqlen_k, False, 0.0, False, False,
            scale=_scale(inputs),
        )[0]  # fmt: skip

    return call


def _flash_attn_varlen(module: str) -> Callable[[Inputs], Callable[[], torch.Tensor]]:
    def prepare(inputs: Inputs) -> Callable[[], torch.Tensor]:
        function = importlib.import_module(module).flash_attn_varlen_func
        arguments = {
            name: getattr(inputs, name)
            for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        }

        def call() -> torch.Tensor:
            out = function(inputs.q, inputs.k, inputs.v, softmax_scale=_scale(inputs), **arguments)
            return out[0] if isinstance(out, tuple) else out

        return call

    return prepare


BASELINES: dict[str, Baseline] = {
    baseline.impl: baseline
    for baseline in (
        Baseline("torch_compile", "torch.compile", "activation", _needs_cuda, _torch_compile),
        Baseline("fa2_varlen", "FlashAttention-2 (torch)", "softmax", _needs_varlen, _fa2_varlen),
        Baseline("cudnn", "cuDNN, dense", "softmax", _needs_cuda, _cudnn),
        Baseline("cudnn_varlen", "cuDNN, ragged", "softmax", _needs_cuda, _cudnn_varlen),
        Baseline(
            "fa3", "FlashAttention-3", "softmax",
            _needs_module("flash_attn_interface", "flash-attn-3"),
            _flash_attn_varlen("flash_attn_interface"),
        ),
        Baseline(
            "fa4", "FlashAttention-4", "softmax",
            _needs_module("flash_attn.cute", "flash-attn-4"),
            _flash_attn_varlen("flash_attn.cute"),
        ),
    )
}  # fmt: skip
