"""Peers behind one signature: what a user could install instead.

Each says whether its mathematics is the activation's or softmax. A softmax peer does the same FLOPs
and bytes on a different function: only its run time is compared, and it is checked against softmax
before it is timed.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from gdpa_kernels.gdpa import reference, v0_eager
from gdpa_kernels.measuring.inputs import BlockInputs, Inputs
from gdpa_kernels.measuring.workload import STEP, Workload


class Availability(NamedTuple):
    """Whether this machine can run a baseline, and why or why not."""

    ok: bool
    reason: str


class Unsupported(Exception):
    """A baseline cannot compute this workload; the text says what it needs."""


Problem = Callable[[Workload, str], str | None]
"""What a workload and a direction lack that a peer needs, or None."""


def _takes_all(workload: Workload, direction: str) -> str | None:
    return None


def _one_length(workload: Workload, direction: str) -> str | None:
    jagged = any(len({*x}) != 1 for x in (workload.seqlens_q, workload.seqlens_k))
    return "needs sequences of one length, got a jagged batch" if jagged else None


def _with_rotary(workload: Workload, direction: str) -> str | None:
    return None if workload.rotary else "needs a workload with rotary"


def _without_rotary(workload: Workload, direction: str) -> str | None:
    return "needs a workload without rotary" if workload.rotary else None


@dataclass(frozen=True)
class Baseline:
    """A peer of GDPA, forward or backward.

    `prepare(inputs, direction="forward", **options)` does what its layout needs, untimed, and
    returns the call to be timed; `direction` as for `differentiate`.
    """

    impl: str
    title: str
    math: str
    needs: Callable[[], str | None]
    prepare: Callable[..., Callable[[], object]]
    problem: Problem = _takes_all

    def availability(self) -> Availability:
        """Whether this machine has what the peer needs."""
        problem = self.needs()
        return Availability(problem is None, problem or "runs on cuda:0")


def differentiate(
    function: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    inputs: Inputs | BlockInputs,
    direction: str,
) -> Callable[[], object]:
    """`function` of q, k and v without gradients; its backward, by autograd, alone; or `STEP`, both
    of them in one call."""
    tensors = inputs.q, inputs.k, inputs.v
    if direction == "forward":

        def call() -> torch.Tensor:
            with torch.no_grad():
                return function(*tensors)

        return call

    def leaves() -> tuple[torch.Tensor, ...]:
        return tuple(tensor.detach().requires_grad_() for tensor in tensors)

    if direction == STEP:

        def step() -> tuple[torch.Tensor, ...]:
            own = leaves()
            return torch.autograd.grad(function(*own), own, inputs.grad_out)

        return step
    kept = leaves()
    out = function(*kept)
    return lambda: torch.autograd.grad(out, kept, inputs.grad_out, retain_graph=True)


def _sequences(inputs: Inputs, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, ...]]:
    """(q, k, v, grad_out) of one sequence after another, `[num_heads_q, length, head_dim]`."""
    q, k, v, grad = (t.to(dtype) for t in (inputs.q, inputs.k, inputs.v, inputs.grad_out))
    group = inputs.workload.num_heads_q // inputs.workload.num_heads_k
    ends_q, ends_k = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
    for i in range(len(ends_q) - 1):
        rows, keys = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
        k_b, v_b = (t[keys].repeat_interleave(group, dim=1) for t in (k, v))
        yield tuple(t.transpose(0, 1) for t in (q[rows], k_b, v_b, grad[rows]))


def _probabilities(inputs: Inputs, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Softmax of the visible scores of a sequence."""
    scores, workload = q @ k.mT * _scale(inputs), inputs.workload
    if workload.causal or workload.window is not None:
        keep = reference.visible(
            *scores.shape[1:], causal=workload.causal, window=workload.window, device=scores.device
        )
        scores = scores.masked_fill(~keep, -math.inf)
    return torch.softmax(scores, dim=-1)


def softmax_reference(inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
    """Softmax attention, one sequence after another, in `dtype`; `[total_q, num_heads,
    head_dim]`."""
    return torch.cat(
        [
            (_probabilities(inputs, q, k) @ v).transpose(0, 1)
            for q, k, v, _ in _sequences(inputs, dtype)
        ]
    )


def softmax_gradients(
    inputs: Inputs, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of `softmax_reference` for the gradient grad_out, in `dtype`."""
    scale, found = _scale(inputs), ([], [], [])
    heads = (inputs.workload.num_heads_k, -1)
    for q, k, v, grad in _sequences(inputs, dtype):
        p = _probabilities(inputs, q, k)
        dp = grad @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        dk, dv = (part.unflatten(0, heads).sum(1) for part in (ds.mT @ q, p.mT @ grad))
        for parts, part in zip(found, (ds @ k, dk, dv), strict=True):
            parts.append(part.transpose(0, 1))
    dq, dk, dv = (torch.cat(parts) for parts in found)
    return dq, dk, dv


def _scale(inputs: Inputs) -> float:
    return inputs.batch().scale


def _grouped(q: torch.Tensor, k: torch.Tensor) -> dict[str, bool]:
    """What PyTorch wants to be told of fewer key heads than query heads."""
    return {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}


def _window(inputs: Inputs) -> dict[str, tuple[int, int]]:
    """What FlashAttention wants to be told of the keys that a query sees, before it and after."""
    causal, window = inputs.workload.causal, inputs.workload.window
    side = -1 if window is None else window
    return {"window_size": (side, 0 if causal else side)} if causal or side >= 0 else {}


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


def _torch_compile(inputs: Inputs, direction: str = "forward") -> Callable[[], object]:
    """v0_eager with its arithmetic compiled; padding and unpadding stay eager."""
    batch = inputs.batch()
    options = ("activation", "scale", "output_scale", "causal", "window")
    compiled = torch.compile(
        functools.partial(
            v0_eager.padded_attention, **{option: getattr(batch, option) for option in options}
        ),
        dynamic=False,
        options={"compile_threads": 1},
    )

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q = v0_eager.pad(q, inputs.cu_seqlens_q, inputs.max_seqlen_q)
        k = v0_eager.pad(k, inputs.cu_seqlens_k, inputs.max_seqlen_k)
        v = v0_eager.pad(v, inputs.cu_seqlens_k, inputs.max_seqlen_k)
        return v0_eager.unpad(compiled(q, k, v), inputs.cu_seqlens_q, inputs.q.shape[0])

    return _compiled(function, inputs, direction)


def _compiled(
    function: Callable[..., torch.Tensor], inputs: Inputs | BlockInputs, direction: str
) -> Callable[[], object]:
    """`differentiate` of a function with a compiled part: timed more than once, its backward must
    not overwrite what forward kept for it."""
    with torch._functorch.config.patch(donated_buffer=False):
        return differentiate(function, inputs, direction)


def _fa2_varlen(inputs: Inputs, direction: str = "forward") -> Callable[[], object]:
    from torch.nn.attention import varlen

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return varlen.varlen_attn(
            q, k, v, inputs.cu_seqlens_q, inputs.cu_seqlens_k,
            inputs.max_seqlen_q, inputs.max_seqlen_k, scale=_scale(inputs),
            **_grouped(q, k), **_window(inputs),
        )  # fmt: skip

    return differentiate(function, inputs, direction)


def _dense(inputs: Inputs) -> tuple[int, int]:
    """[batch, length] for `unflatten`; Unsupported for a jagged batch."""
    lengths = {*inputs.workload.seqlens_q}, {*inputs.workload.seqlens_k}
    if any(len(unique) != 1 for unique in lengths):
        raise Unsupported("needs sequences of one length, got a jagged batch")
    return len(inputs.workload.seqlens_q), -1


def _causal(inputs: Inputs) -> bool:
    """What a peer is told that knows no other mask; Unsupported for a window."""
    if inputs.workload.window is not None:
        raise Unsupported(f"needs a batch without a window, got window={inputs.workload.window}")
    return inputs.workload.causal


def _cudnn(inputs: Inputs, direction: str = "forward") -> Callable[[], object]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batch, causal, grouped = _dense(inputs), _causal(inputs), _grouped(inputs.q, inputs.k)

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (tensor.unflatten(0, batch).transpose(1, 2) for tensor in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(
                q, k, v, scale=_scale(inputs), is_causal=causal, **grouped
            )
        return out.transpose(1, 2).reshape(inputs.q.shape)

    return differentiate(function, inputs, direction)


def _cudnn_varlen(inputs: Inputs, direction: str = "forward") -> Callable[[], object]:
    causal = _causal(inputs)

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._cudnn_attention_forward(
            q, k, v, None, inputs.cu_seqlens_q, inputs.cu_seqlens_k,
            inputs.max_seqlen_q, inputs.max_seqlen_k, direction != "forward", 0.0, causal, False,
            scale=_scale(inputs),
        )[0]  # fmt: skip

    return differentiate(function, inputs, direction)


def _flash_attn_varlen(module: str) -> Callable[..., Callable[[], object]]:
    def prepare(inputs: Inputs, direction: str = "forward") -> Callable[[], object]:
        attention = importlib.import_module(module).flash_attn_varlen_func
        arguments: dict[str, object] = {
            name: getattr(inputs, name)
            for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        }
        if inputs.workload.causal:
            arguments["causal"] = True
        if inputs.workload.window is not None:
            arguments |= _window(inputs)

        def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = attention(q, k, v, softmax_scale=_scale(inputs), **arguments)
            return out[0] if isinstance(out, tuple) else out

        return differentiate(function, inputs, direction)

    return prepare


def _fa4(inputs: Inputs, direction: str = "forward", scan: bool = False) -> Callable[[], object]:
    """FlashAttention-4 on ragged batches. `scan`: every CTA finds its sequence by walking over the
    batch, as for up to 256 sequences; above that the library makes a table to look it up in."""
    call = _flash_attn_varlen("flash_attn.cute")(inputs, direction)
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


def _fa4_dense(inputs: Inputs, direction: str = "forward") -> Callable[[], object]:
    attention = importlib.import_module("flash_attn.cute").flash_attn_func
    batch, masked = _dense(inputs), {"causal": True} if _causal(inputs) else {}

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (tensor.unflatten(0, batch) for tensor in (q, k, v))
        out = attention(q, k, v, softmax_scale=_scale(inputs), **masked)
        return (out[0] if isinstance(out, tuple) else out).view(inputs.q.shape)

    return differentiate(function, inputs, direction)


BASELINES: dict[str, Baseline] = {
    baseline.impl: baseline
    for baseline in (
        Baseline("torch_compile", "torch.compile", "activation", _needs_cuda, _torch_compile),
        Baseline("fa2_varlen", "FlashAttention-2 (torch)", "softmax", _needs_varlen, _fa2_varlen),
        Baseline("cudnn", "cuDNN, dense", "softmax", _needs_cuda, _cudnn, _one_length),
        Baseline("cudnn_varlen", "cuDNN, ragged", "softmax", _needs_cuda, _cudnn_varlen),
        Baseline(
            "fa3", "FlashAttention-3", "softmax",
            _needs_module("flash_attn_interface", "flash-attn-3"),
            _flash_attn_varlen("flash_attn_interface"),
        ),
        Baseline(
            "fa4", "FlashAttention-4", "softmax",
            _needs_module("flash_attn.cute", "flash-attn-4"), _fa4,
        ),
        Baseline(
            "fa4_dense", "FlashAttention-4, dense", "softmax",
            _needs_module("flash_attn.cute", "flash-attn-4"), _fa4_dense, _one_length,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class BlockBaseline:
    """A peer of block attention: softmax inside blocks, forward or backward.

    `prepare(inputs, direction, **options)` does what its layout needs, untimed, and returns the
    call to be timed; backward that is autograd's, of a forward pass that was made before.
    `metadata`, where there is any, makes on the device the offsets that the call needs.
    """

    impl: str
    title: str
    needs: Callable[[], str | None]
    prepare: Callable[..., Callable[[], object]]
    metadata: Callable[[BlockInputs], torch.Tensor] | None = None
    problem: Problem = _takes_all

    def availability(self) -> Availability:
        """Whether this machine has what the peer needs."""
        problem = self.needs()
        return Availability(problem is None, problem or "runs on cuda:0")


def block_offsets(inputs: BlockInputs) -> torch.Tensor:
    """Every block as a sequence of its own: int32 `[blocks + 1]`, made on the device.

    The host knows the number of blocks from the workload, so nothing waits for the device.
    """
    ends, size, count = inputs.cu_seqlens, inputs.workload.block_size, inputs.workload.blocks
    blocks = (ends.diff() + (size - 1)) // size
    before = blocks.cumsum(0) - blocks
    start = (ends[:-1] - before * size).repeat_interleave(blocks, output_size=count)
    start += torch.arange(0, count * size, size, device=ends.device)
    return torch.cat((start, ends[-1:])).int()


def _refuse_rotary(inputs: BlockInputs) -> None:
    if inputs.rotary is not None:
        raise Unsupported("needs a workload without rotary")


def _per_block(attention: Callable[..., torch.Tensor]) -> Callable[..., Callable[[], object]]:
    """A ragged attention with one sequence per block.

    `attention(q, k, v, offsets, longest, scale, direction)`.
    """

    def prepare(inputs: BlockInputs, direction: str) -> Callable[[], object]:
        _refuse_rotary(inputs)
        offsets, longest = block_offsets(inputs), inputs.workload.block_size
        scale = inputs.batch().scale
        return differentiate(
            lambda q, k, v: attention(q, k, v, offsets, longest, scale, direction),
            inputs,
            direction,
        )

    return prepare


def _fa2_blocks(q, k, v, offsets, longest, scale, direction) -> torch.Tensor:
    from torch.nn.attention import varlen

    grouped = _grouped(q, k)
    return varlen.varlen_attn(q, k, v, offsets, offsets, longest, longest, scale=scale, **grouped)


def _cudnn_blocks(q, k, v, offsets, longest, scale, direction) -> torch.Tensor:
    return torch.ops.aten._cudnn_attention_forward(
        q, k, v, None, offsets, offsets, longest, longest, direction == "backward", 0.0, False,
        False, scale=scale,
    )[0]  # fmt: skip


def _fa3_blocks(q, k, v, offsets, longest, scale, direction) -> torch.Tensor:
    function = importlib.import_module("flash_attn_interface").flash_attn_varlen_func
    out = function(q, k, v, offsets, offsets, longest, longest, softmax_scale=scale)
    return out[0] if isinstance(out, tuple) else out


def _compiled_blocks(inputs: BlockInputs, direction: str) -> Callable[[], object]:
    """Blocks padded to [blocks, block_size], PyTorch's attention with a mask of the keys, compiled;
    the tokens of the blocks are looked up before."""
    from gdpa_kernels.block_attention import reference

    workload, scale = inputs.workload, inputs.batch().scale
    tokens = reference.tokens_of_blocks(inputs.cu_seqlens, workload.block_size)
    exists = tokens >= 0
    mask = exists[:, None, None, :].expand(-1, 1, workload.block_size, -1)
    gather, scatter = tokens.clamp(min=0).flatten(), exists.flatten().nonzero()[:, 0]

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if inputs.rotary is not None:
            q, k = (reference.rotate(x, *inputs.rotary) for x in (q, k))
            v = reference.rotate(v, *inputs.rotary) if workload.rotate_v else v
        q, k, v = (
            x.index_select(0, gather).unflatten(0, tokens.shape).transpose(1, 2) for x in (q, k, v)
        )
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).flatten(0, 1).index_select(0, scatter)

    compiled = torch.compile(function, dynamic=False, options={"compile_threads": 1})
    return _compiled(compiled, inputs, direction)


def _needs_turns(inputs: BlockInputs) -> tuple[torch.Tensor, torch.Tensor]:
    if inputs.rotary is None:
        raise Unsupported("needs a workload with rotary")
    return inputs.rotary


def _eager_rotary(
    inputs: BlockInputs, direction: str, attention: str = "auto"
) -> Callable[[], object]:
    """Rotary in PyTorch, operation by operation and differentiated by autograd, around our
    attention without it; `attention` is its `impl`."""
    from gdpa_kernels.block_attention import reference
    from gdpa_kernels.block_attention.api import block_attention

    turns, rotate_v = _needs_turns(inputs), inputs.workload.rotate_v
    arguments = inputs.arguments() | {"rotary": None, "rotate_v": False, "impl": attention}

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k = reference.rotate(q, *turns), reference.rotate(k, *turns)
        v = reference.rotate(v, *turns) if rotate_v else v
        return block_attention(**arguments | {"q": q, "k": k, "v": v})

    return differentiate(function, inputs, direction)


def _rotary_kernel(
    inputs: BlockInputs, direction: str, attention: str = "auto"
) -> Callable[[], object]:
    """Our rotary kernel, which moves every byte once, and our attention without rotary; `attention`
    is its `impl`."""
    from gdpa_kernels.block_attention.api import block_attention
    from gdpa_kernels.block_attention.rotary import rotary

    turns, rotate_v = _needs_turns(inputs), inputs.workload.rotate_v
    arguments = inputs.arguments() | {"rotary": None, "rotate_v": False, "impl": attention}

    def turned(q, k, v, **options) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, turned_v = rotary(q, k, v if rotate_v else None, turns, **options)
        return q, k, turned_v if rotate_v else v

    if direction == "forward":

        def forward() -> torch.Tensor:
            q, k, v = turned(inputs.q, inputs.k, inputs.v)
            return block_attention(**arguments | {"q": q, "k": k, "v": v})

        return forward
    leaves = [x.requires_grad_() for x in turned(inputs.q, inputs.k, inputs.v.detach())]
    out = block_attention(**arguments | dict(zip("qkv", leaves, strict=True)))

    def backward() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gradients = torch.autograd.grad(out, leaves, inputs.grad_out, retain_graph=True)
        return turned(*gradients, transposed=True, in_place=True)

    return backward


BLOCK_BASELINES: dict[str, BlockBaseline] = {
    baseline.impl: baseline
    for baseline in (
        BlockBaseline(
            "fa2_varlen", "FlashAttention-2 (torch), a sequence per block", _needs_varlen,
            _per_block(_fa2_blocks), block_offsets, _without_rotary,
        ),
        BlockBaseline(
            "cudnn_varlen", "cuDNN, ragged, a sequence per block", _needs_cuda,
            _per_block(_cudnn_blocks), block_offsets, _without_rotary,
        ),
        BlockBaseline(
            "fa3", "FlashAttention-3, a sequence per block",
            _needs_module("flash_attn_interface", "flash-attn-3"),
            _per_block(_fa3_blocks), block_offsets, _without_rotary,
        ),
        BlockBaseline(
            "torch_compile", "torch.compile, padded blocks", _needs_cuda, _compiled_blocks
        ),
        BlockBaseline(
            "eager_rotary", "eager rotary, then our attention", _needs_cuda, _eager_rotary,
            problem=_with_rotary,
        ),
        BlockBaseline(
            "rotary_kernel", "our rotary kernel, then our attention", _needs_cuda, _rotary_kernel,
            problem=_with_rotary,
        ),
    )
}  # fmt: skip
"""Peers of block attention. The first three know no rotary, the last two are about it."""
