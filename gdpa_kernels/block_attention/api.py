"""`block_attention`: check the arguments, choose the implementation, call it through operators of
PyTorch, one for each direction."""

from __future__ import annotations

from typing import NamedTuple

import torch

from gdpa_kernels.block_attention import choices
from gdpa_kernels.block_attention.batch import Batch, Rotary
from gdpa_kernels.calling import checks, ladder, packed
from gdpa_kernels.calling.handover import CallWorkLists, handed_over, with_work_lists
from gdpa_kernels.calling.lengths import Lengths
from gdpa_kernels.calling.operators import (
    Size,
    check_transforms,
    define,
    distinct,
    needed,
    once_differentiable,
    schema,
)
from gdpa_kernels.calling.private import has_tangents
from gdpa_kernels.calling.rung import Rung, capability, dtype_name
from gdpa_kernels.calling.sequences import read_sequences
from gdpa_kernels.device.padding import assert_offsets, clear_padding

OPERATOR = "block_attention"
IMPLS = ladder.impls(OPERATOR)
SAVES = frozenset(rung.impl for rung in ladder.LADDERS[OPERATOR] if rung.saves)
BLOCK_SIZES = (16, 32, 64, 128)


def block_attention(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cu_seqlens: torch.Tensor | Lengths,
    *,
    num_kv_heads: int | None = None,
    block_size: int = 64,
    scale: float | None = None,
    rotary: Rotary | None = None,
    rotate_v: bool = False,
    impl: str = "auto",
    backward_impl: str | None = None,
    validate: bool = True,
) -> torch.Tensor:
    """Softmax attention inside blocks of consecutive tokens, on a jagged batch; differentiable.

    A sequence is cut into blocks of `block_size` tokens from its start; the last one may be
    shorter. For each block and head, O = softmax(scale Q K^T) V.

    Only q, k, v, cu_seqlens, sin and cos are saved for backward, and the list of blocks (impl
    "v0_flash" also saves its output, its log-sum-exp and what it rotated). The gradients are
    deterministic, and cannot be differentiated again.

    Under autocast q, k and v are cast to its dtype, fp64 excepted, as for PyTorch's
    scaled_dot_product_attention; sin and cos stay as they are.

    Args:
        q: `[total_tokens, num_heads_q, head_dim]`, of any strides.
        k, v: `[total_tokens, num_heads_k, head_dim]`; num_heads_q must be a multiple of
            num_heads_k. Query head h uses key head h // (num_heads_q // num_heads_k). k and v None:
            q holds all three, `[total_tokens, num_heads_q + 2 * num_heads_k, head_dim]` or
            `[total_tokens, 3, num_heads, head_dim]`; v None: k holds both. What is packed so has
            one gradient, written by the kernels where it lies; those of three slices PyTorch
            concatenates.
        cu_seqlens: int32 `[batch + 1]` on q's device: sequence i holds the tokens cu_seqlens[i] up
            to, not including, cu_seqlens[i + 1]. Lengths of 0 are ordinary, and so is batch 0. Rows
            may follow the last sequence, as padding: their results and gradients are 0. int64 is
            converted in each call. Or `Lengths`, checked once for many calls.
        num_kv_heads: num_heads_k of a q that holds all three; None for a third of its heads.
        block_size: 16, 32, 64 or 128 tokens.
        scale: multiplies Q K^T before the softmax; None means head_dim ** -0.5.
        rotary: (sin, cos), each `[total_tokens, head_dim // 2]`, floating point: the pair (x[2i],
            x[2i + 1]) of q and k becomes (cos x[2i] - sin x[2i + 1], cos x[2i + 1] + sin x[2i]),
            rounded to their dtype. Gradients take the transpose; sin^2 + cos^2 = 1 is not assumed.
            sin and cos get no gradient.
        rotate_v: rotate v too.
        impl: a rung's name, "reference", or "auto": in each direction the one that supports the
            call and was fastest where such calls were measured (choices.py).
        backward_impl: the same for the gradients; None for impl. What "v0_flash" saves in forward
            its own backward needs, and no other.
        validate: check the values of cu_seqlens, which waits for the device in each call; in
            compiled calls, and in the capture of a CUDA graph, a kernel checks them without
            waiting. False trusts the caller. `Lengths` have been checked.

    Returns:
        `[total_tokens, num_heads_q, head_dim]`, in q's dtype, rounded once from fp32.

    Raises:
        TypeError, ValueError: an argument is wrong: its name, what is expected, what was received.
        NotImplementedError: an explicit impl does not support the call: what it needs, what it got.
        RuntimeError: a second derivative, or a forward-mode derivative, is asked for; or inside a
            transform of `torch.func` (vmap, grad, jvp).

    Source: the block attention of the published TLX kernels; see the chapter "What block
    attention computes".
    """
    check_transforms("block_attention")
    packed_qkv, num_kv_heads = packed.flatten(*checks.autocast(q, k, v), num_kv_heads)
    q, k, v = packed.unpack(*packed_qkv, num_kv_heads)
    checks.check_tensors(q, k, v)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k must have q's {q.shape[0]} tokens, got {k.shape[0]}")
    if rotary is not None:
        _check_rotary_type(rotary)
    checks.check_bool(rotate_v=rotate_v, validate=validate)
    check_block_size(block_size)
    _check_rotary(q, rotary, rotate_v)
    backward_impl = check_impls(impl, backward_impl)
    if scale is not None:
        checks.check_float("scale", scale)
    known = read_sequences("cu_seqlens", cu_seqlens, q.shape[0], q.device, validate=validate)
    sin, cos = (None, None) if rotary is None else rotary
    tensors = *packed_qkv, known.cu_seqlens, sin, cos
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    options = Options(
        num_kv_heads, scale, block_size, rotate_v, impl, backward_impl,
        check_values=known.check_values, may_have_padding=known.may_have_padding,
    )  # fmt: skip
    compiling, work_lists = torch.compiler.is_compiling(), None
    recorded = torch.is_grad_enabled() or has_tangents() or compiling
    if compiling:
        tensors = distinct(*tensors)
    elif recorded or known.lengths is not None:
        lengths = () if known.lengths is None else (known.lengths,)
        work_lists = CallWorkLists((known.cu_seqlens,), *lengths)
    if recorded:
        return _BlockAttention.apply(work_lists, *tensors, options)
    return with_work_lists(work_lists, _FORWARD, *tensors, *options)[0]


def resolve(impl: str, direction: str, batch: Batch) -> Rung:
    """The rung that runs in a direction, "forward" or "backward". Raises what `ladder.resolve`
    raises."""

    def order() -> tuple[str, ...]:
        kind = capability(batch.device), dtype_name(batch.dtype), direction
        return choices.order(*kind, batch.rotary is not None, batch.head_dim)

    return ladder.resolve(impl, OPERATOR, direction, batch, order)


def check_impls(impl: object, backward_impl: object) -> str:
    """The implementation of the gradients. Raises ValueError unless there are such two, which do
    together."""
    checks.check_impl(impl, IMPLS)
    if backward_impl is None:
        return impl
    checks.check_impl(backward_impl, IMPLS, "backward_impl")
    if backward_impl in SAVES and impl != backward_impl:
        raise ValueError(
            f"backward_impl {backward_impl!r} needs what impl {backward_impl!r} saves, got {impl!r}"
        )
    return backward_impl


def check_block_size(block_size: object) -> None:
    """Raises TypeError unless it is an integer, ValueError unless it is one of BLOCK_SIZES."""
    integer = checks.is_integer(block_size)
    if not integer or block_size not in BLOCK_SIZES:
        error = ValueError if integer else TypeError
        raise error(
            f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, got {block_size!r}"
        )


class Options(NamedTuple):
    """What a call asks for beside its tensors: arguments of the operators, in this order.

    check_values: nobody has read the offsets. may_have_padding: rows may follow the last sequence.
    """

    num_kv_heads: Size | None
    scale: float
    block_size: int
    rotate_v: bool
    impl: str
    backward_impl: str
    check_values: bool = False
    may_have_padding: bool = False

    def rung(self, direction: str, batch: Batch) -> Rung:
        """The rung that computes a direction."""
        impl = self.impl if direction == "forward" else self.backward_impl
        return resolve(impl, direction, batch)


class _BlockAttention(torch.autograd.Function):
    """The operators of both directions as one differentiable function; the list of blocks that
    forward made is kept for backward, but in a compiled program."""

    @staticmethod
    def forward(ctx, work_lists, *tensors_and_options):
        *tensors, ctx.options = tensors_and_options
        ctx.work_lists = work_lists
        out, saved = with_work_lists(work_lists, _FORWARD, *tensors, *ctx.options)
        ctx.save_for_backward(*tensors, *((out, *saved) if saved else ()))
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        if grad_out is None:
            return (None,) * 8
        q, k, v, cu_seqlens, sin, cos, *saved = ctx.saved_tensors
        work_lists = ctx.work_lists
        if work_lists is not None and checks.is_fake(q):  # as compiled autograd has it
            work_lists = None
        if work_lists is not None:  # hooks may have copied what was saved
            work_lists.offsets = (cu_seqlens,)
        tensors = grad_out, q, k, v, cu_seqlens, sin, cos
        with torch.no_grad():
            gradients = with_work_lists(work_lists, _BACKWARD, *tensors, saved, *ctx.options)
        gradients = needed(gradients, ctx.needs_input_grad[1:4])
        return None, *once_differentiable(OPERATOR, gradients, tensors[:4]), *(None,) * 4


def _batch(q, k, v, cu_seqlens, sin, cos, options: Options, **gradients) -> Batch:
    """The `Batch` of an operator's arguments."""
    tensors = *packed.unpack(q, k, v, options.num_kv_heads), cu_seqlens
    rotary = None if sin is None else (sin, cos)
    asked = options.scale, options.block_size, rotary, options.rotate_v
    return Batch(*tensors, *asked, **gradients)


def _forward(q, k, v, cu_seqlens, sin, cos, *options) -> tuple[torch.Tensor, list[torch.Tensor]]:
    options = Options(*options)
    batch = _batch(q, k, v, cu_seqlens, sin, cos, options)
    if options.check_values:
        _check_values(cu_seqlens, q.shape[0])
    rung = options.rung("forward", batch)
    if options.backward_impl not in ("auto", rung.impl):  # one that cannot take the call says so
        resolve(options.backward_impl, "backward", batch)
    with checks.without_autocast(q):  # the definition is made of operators that it would change
        out, saved = rung.module().forward(batch, **handed_over(rung, "forward", batch))
    if options.may_have_padding:
        clear_padding(out, cu_seqlens)
    return out, list(saved[1:])  # the first is the output


def _check_values(cu_seqlens: torch.Tensor, rows: int) -> None:
    """Raises ValueError unless the offsets fit; on a GPU asserts it, without waiting."""
    if cu_seqlens.device.type == "cuda":
        assert_offsets(None, cu_seqlens, None, (rows, rows), (rows, rows))
    else:
        checks.check_offset_values("cu_seqlens", cu_seqlens, rows, None, allow_padding=True)


def _fake_forward(q, k, v, cu_seqlens, sin, cos, *options):
    options = Options(*options)
    batch, saved = _batch(q, k, v, cu_seqlens, sin, cos, options), ()
    if options.impl in SAVES:
        saved = ladder.rung(options.impl, OPERATOR).module().empty_saved(batch)
    return q.new_empty(batch.q.shape), list(saved)


def _backward(
    grad_out, q, k, v, cu_seqlens, sin, cos, saved, *options
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    options = Options(*options)

    def backward(buffers, _):
        batch = _batch(q, k, v, cu_seqlens, sin, cos, options, gradients=buffers)
        rung = options.rung("backward", batch)
        extra = handed_over(rung, "backward", batch)
        with checks.without_autocast(q):
            gradients = rung.module().backward(grad_out, batch, tuple(saved), **extra)
        if options.may_have_padding:
            clear_padding(gradients[0], cu_seqlens)
            clear_padding(gradients[1], cu_seqlens, gradients[2])
        return gradients

    gradients = packed.gradients(backward, q, k, v, options.num_kv_heads, (True, True, True))
    return tuple([q.new_empty(0) if x is None else x for x in gradients])


def _fake_backward(grad_out, q, k, v, *_):
    return tuple(q.new_empty(0 if x is None else x.shape) for x in (q, k, v))


def _matmul_flops(q, k, v, cu_seqlens, sin, cos, options) -> int:
    batch = _batch(q, k, v, cu_seqlens, sin, cos, Options(*options))
    return 2 * batch.num_heads * batch.head_dim * batch.pairs()


def _forward_flops(q, k, v, cu_seqlens, sin, cos, *options) -> int:
    return 2 * _matmul_flops(q, k, v, cu_seqlens, sin, cos, options)


def _backward_flops(grad_out, q, k, v, cu_seqlens, sin, cos, saved, *options) -> int:
    return 5 * _matmul_flops(q, k, v, cu_seqlens, sin, cos, options)


_TENSORS = "Tensor q, Tensor? k, Tensor? v, Tensor cu_seqlens, Tensor? sin, Tensor? cos"
_FORWARD = define(
    "block_attention_forward",
    f"({_TENSORS}, {schema(Options)}) -> (Tensor, Tensor[])",
    _forward,
    _fake_forward,
    _forward_flops,
)
_BACKWARD = define(
    "block_attention_backward",
    f"(Tensor grad_out, {_TENSORS}, Tensor[] saved, {schema(Options)}) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
    _backward_flops,
)


def _check_rotary_type(rotary) -> None:
    if not isinstance(rotary, tuple | list):
        got = type(rotary).__name__
        raise TypeError(f"rotary must be None or a pair (sin, cos) of tensors, got {got}")
    if len(rotary) != 2:
        got = f"{len(rotary)} of them"
        raise ValueError(f"rotary must be None or a pair (sin, cos) of tensors, got {got}")
    for name, tensor in zip(("sin", "cos"), rotary, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} of rotary must be a tensor, got {type(tensor).__name__}")


def _check_rotary(q: torch.Tensor, rotary, rotate_v: bool) -> None:
    if rotary is None:
        if rotate_v:
            raise ValueError(f"rotate_v must be False without rotary, got {rotate_v!r}")
        return
    total, _, head_dim = q.shape
    if head_dim % 2:
        raise ValueError(f"q must have an even head_dim to be rotated, got {head_dim}")
    for name, tensor in zip(("sin", "cos"), rotary, strict=True):
        if tensor.shape != (total, head_dim // 2):
            raise ValueError(
                f"{name} of rotary must have shape [total_tokens, head_dim // 2] = "
                f"{[total, head_dim // 2]}, got {list(tensor.shape)}"
            )
        if not tensor.dtype.is_floating_point:
            raise TypeError(
                f"{name} of rotary must have a floating-point dtype, got {tensor.dtype}"
            )
        if tensor.device != q.device:
            raise ValueError(
                f"{name} of rotary must be on q's device {q.device}, got {tensor.device}"
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"rotary must not require gradients, which it does not get; got a {name} that "
                f"does: use {name}.detach()"
            )
