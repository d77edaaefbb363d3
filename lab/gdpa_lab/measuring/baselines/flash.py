"""FlashAttention-3 and -4."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path

import torch

from gdpa_lab.measuring.baselines import peer
from gdpa_lab.measuring.baselines.peer import Baseline, Call, needs_module
from gdpa_lab.measuring.inputs import BlockInputs, Inputs
from gdpa_lab.measuring.workload import STEP

FA3 = "flash_attn_interface"
"""The module of FlashAttention-3's own package."""


def needs_fa3() -> str | None:
    if peer.is_importable(FA3) or _library() is not None:
        return peer.needs_cuda()
    return "needs FlashAttention-3, which is not installed"


def _locations(package: str) -> Iterator[Path]:
    """Locate the folders of a package without importing it."""
    spec = importlib.util.find_spec(package)
    yield from map(Path, spec.submodule_search_locations or () if spec is not None else ())


def _library() -> Path | None:
    """Locate the library of operators in the wheel of xformers."""
    files = (folder / "flash_attn_3" / "_C.so" for folder in _locations("xformers"))
    return next((file for file in files if file.exists()), None)


@functools.cache
def _operators() -> object:
    """Load `torch.ops.flash_attn_3` from that library, which is linked with CUDA 12's runtime;
    xformers itself, built for another PyTorch, is not imported."""
    files = [folder / "cuda_runtime/lib/libcudart.so.12" for folder in _locations("nvidia")]
    runtime = next((str(file) for file in files if file.exists()), "libcudart.so.12")
    ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(_library()))
    return torch.ops.flash_attn_3


def fa3(
    inputs: Inputs | BlockInputs, direction: str = "forward", shape: tuple[int, ...] = (-1,)
) -> Call:
    """Call FlashAttention-3 from its package or from xformers' library, on ragged tensors, or on
    dense ones of `shape`, [batch, length]."""
    scale, causal = inputs.scale(), inputs.workload.causal
    sides, is_ragged = peer.window_size(inputs.workload), len(shape) == 1
    lengths = peer.ragged_options(inputs) if is_ragged else {}
    if peer.is_importable(FA3):
        name = "flash_attn_varlen_func" if is_ragged else "flash_attn_func"
        attention = functools.partial(
            getattr(importlib.import_module(FA3), name), **lengths, softmax_scale=scale,
            causal=causal, window_size=sides,
        )  # fmt: skip

        def function(*qkv: torch.Tensor) -> torch.Tensor:
            out = _output(attention(*(tensor.unflatten(0, shape) for tensor in qkv)))
            return out.view(inputs.q.shape)

        return peer.differentiate(function, inputs, direction)
    grad_out, *tensors = (
        tensor.unflatten(0, shape) for tensor in (inputs.grad_out, inputs.q, inputs.k, inputs.v)
    )
    options = lengths | {"softmax_scale": scale, "is_causal": causal}
    options |= {"window_size_left": sides[0], "window_size_right": sides[1]}
    library = _operators()

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = library.fwd(*tensors, **options, num_splits=1)
        return out, lse

    def backward(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gradients = tuple(torch.empty_like(tensor) for tensor in tensors)
        library.bwd(grad_out, *tensors, out, lse, *gradients, **options)
        return tuple(gradient.view(-1, *gradient.shape[-2:]) for gradient in gradients)

    if direction == "forward":
        return lambda: forward()[0].view(inputs.q.shape)
    if direction == STEP:
        return lambda: backward(*forward())
    saved = forward()
    return lambda: backward(*saved)


def fa3_dense(inputs: Inputs, direction: str = "forward") -> Call:
    return fa3(inputs, direction, peer.dense(inputs))


def _output(result: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Drop the statistics that some versions return beside the output."""
    return result[0] if isinstance(result, tuple) else result


def fa4(inputs: Inputs, direction: str = "forward", scan: bool = False) -> Call:
    """Call FlashAttention-4 on ragged batches. `scan`: every CTA finds its sequence by scanning the
    batch, as for up to 256 sequences; above that the library builds a lookup table."""
    attention = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    options = peer.ragged_options(inputs) | {"softmax_scale": inputs.scale()}
    if inputs.workload.causal:
        options["causal"] = True
    if inputs.workload.window is not None:
        options["window_size"] = peer.window_size(inputs.workload)
    call = peer.differentiate(
        lambda q, k, v: _output(attention(q, k, v, **options)), inputs, direction
    )
    if not scan:
        return call
    interface = importlib.import_module("flash_attn.cute.interface")

    def scanning() -> object:
        most = interface.BIN_BATCH_SEARCH_THRESH  # private: no argument of the call decides this
        interface.BIN_BATCH_SEARCH_THRESH = math.inf
        try:
            return call()
        finally:
            interface.BIN_BATCH_SEARCH_THRESH = most

    return scanning


def fa4_dense(inputs: Inputs, direction: str = "forward") -> Call:
    attention = importlib.import_module("flash_attn.cute").flash_attn_func
    batch, masked = peer.dense(inputs), {"causal": True} if inputs.workload.causal else {}

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (tensor.unflatten(0, batch) for tensor in (q, k, v))
        out = _output(attention(q, k, v, softmax_scale=inputs.scale(), **masked))
        return out.view(inputs.q.shape)

    return peer.differentiate(function, inputs, direction)


needs_fa4 = needs_module("flash_attn.cute", "FlashAttention-4")
INSTALL_FA3 = (
    "pip install --no-deps xformers==0.0.34 nvidia-cuda-runtime-cu12, whose wheel holds its kernels"
)
INSTALL_FA4 = "pip install flash-attn-4==4.0.0b36"
REPOSITORY = "https://github.com/Dao-AILab/flash-attention"
PEERS = (
    Baseline(
        "fa3", "FlashAttention-3", "softmax", needs_fa3, fa3, install=INSTALL_FA3, source=REPOSITORY
    ),
    Baseline(
        "fa3_dense", "FlashAttention-3, dense", "softmax", needs_fa3, fa3_dense, peer.one_length,
        INSTALL_FA3, REPOSITORY,
    ),
    Baseline(
        "fa4", "FlashAttention-4", "softmax", needs_fa4, fa4, install=INSTALL_FA4, source=REPOSITORY
    ),
    Baseline(
        "fa4_dense", "FlashAttention-4, dense", "softmax", needs_fa4, fa4_dense,
        peer.dense_only, INSTALL_FA4, REPOSITORY,
    ),
)  # fmt: skip
