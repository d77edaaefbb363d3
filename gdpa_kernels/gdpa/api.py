"""`gdpa`: check the arguments, choose the implementation, call it through operators of PyTorch, one
for each direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from gdpa_kernels.calling import checks, jagged, ladder, packed
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
from gdpa_kernels.calling.recipe import Recipe
from gdpa_kernels.calling.rung import Rung, capability, dtype_name
from gdpa_kernels.calling.sequences import Sequences, read_sequences, with_max_seqlen
from gdpa_kernels.device.padding import assert_offsets, clear_padding
from gdpa_kernels.gdpa import choices
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.bias import NONE, Bias, RelativeBias, bias_of_call
from gdpa_kernels.gdpa.mask import ALL, Mask, check_counts, mask_of, of_rule
from gdpa_kernels.gdpa.registration import check_activation, prove

IMPLS = ladder.impls()
BACKWARD_IMPLS = ladder.impls(direction="backward")
SHARED_OPTIONS = ("activation", "scale", "output_scale", "precise", "impl", "backward_impl")
"""The options of `gdpa` that layers, serving and parallel calls take and pass on."""


def gdpa(
    q: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | Lengths | None = None,
    cu_seqlens_k: torch.Tensor | Lengths | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    num_kv_heads: int | None = None,
    activation: str | tuple[str, ...] | list[str] = "gelu_tanh",
    scale: float | None = None,
    output_scale: float = 1.0,
    mask: Mask = ALL,
    relative_bias: RelativeBias | None = None,
    precise: bool = False,
    impl: str = "auto",
    backward_impl: str = "auto",
    validate: bool = True,
    out_dtype: torch.dtype | None = None,
    add_to: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    **mask_fields: object,
) -> torch.Tensor:
    """Generalized dot-product attention on a jagged batch; differentiable.

    For each sequence and head, O = output_scale activation(scale Q K^T) V: an element-wise
    activation stands where softmax would be. A pair that is masked out counts as 0 after the
    activation; a NaN in a row of v reaches the rows of its own sequence all the same, and no other.

    Only q, k, v and the offsets are saved for backward. The gradients cannot be differentiated
    again.

    Under autocast q, k and v are cast to its dtype, fp64 excepted, as for PyTorch's
    scaled_dot_product_attention. Kernels round activation(S) to the dtype of v: in float16 one
    above 65,504 becomes infinite.

    Args:
        q: `[total_q, num_heads_q, head_dim]`, or `[max_seqlen_q, num_heads_q, head_dim]` with
            `cu_seqlens_q=None`: one q shared by the whole batch (PMA seeds).
        k, v: `[total_k, num_heads_k, head_dim]`; num_heads_q must be a multiple of num_heads_k.
            v None: k holds both, `[total_k, 2 * num_heads_k, head_dim]` or `[total_k, 2,
            num_heads_k, head_dim]`. k and v None: q holds all three, `[total, num_heads_q + 2 *
            num_heads_k, head_dim]` or `[total, 3, num_heads, head_dim]`. What is packed so has one
            gradient, where three slices have three, which PyTorch concatenates. A v of its own may
            have another head_dim than q and k: what is narrower is copied and filled with zeros,
            and the call costs as much as if all had the wider one.
        cu_seqlens_q, cu_seqlens_k: int32 `[batch + 1]` on q's device: sequence i holds the rows
            cu_seqlens[i] up to, not including, cu_seqlens[i + 1]. Lengths of 0 are ordinary. Rows
            may follow the last sequence, as padding: their results, but for add_to, and gradients
            are 0. int64 is converted in each call. Or `Lengths`, checked once for many calls. Or
            None for what is nested `[batch, jagged, heads, head_dim]`, of layout torch.jagged: k
            and v with the same offsets, q, and add_to with it, with its own; the result is then
            nested as q is.
        max_seqlen_q, max_seqlen_k: at least the longest sequence, in tokens. None: that of
            `Lengths`, the rows of a shared q, or the longest itself, which is read from the offsets
            in each call and waits for the device; not in the capture of a CUDA graph.
        num_kv_heads: num_heads_k of a q that holds all three; None for a third of its heads.
        activation: a name of `reference.ACTIVATIONS` or of `register_activation`, or one per query
            head.
        scale: multiplies Q K^T before the activation; None means head_dim ** -0.5.
        output_scale: multiplies the result after the activation; applied once, to the fp32 sum.
        mask: `Mask`, the keys that a query sees; all of its sequence's by default.
        relative_bias: `RelativeBias`, what is added to the scores by distances of positions and of
            times; its tables get gradients. Not with a shared q.
        precise: compute the activation in fp32. By default GELU and SiLU of bf16 inputs are
            computed in packed bf16, from rounded scores, where the implementation can: for inputs
            from N(0, 1) the relative error of the result is then about 3.6e-3, as PyTorch's in
            bf16, and 2.4e-3 with True. What that costs: see the chapter on v7. Gradients always
            take fp32.
        impl: a rung's name, "reference", or "auto" for the fastest that supports the call. Which
            ones take which options: `Requires` of each rung in calling/ladder.py.
        backward_impl: the same for the gradients. Some implementations add up that of q in an order
            that differs from run to run (`Rung.is_deterministic`); everything else is
            deterministic. Under `torch.use_deterministic_algorithms` "auto" leaves those out.
        validate: check the values of cu_seqlens, num_targets and num_contexts, which waits for the
            device in each call, and of time_thresholds. In compiled calls, and in the capture of a
            CUDA graph, a kernel checks them without waiting: it stops the GPU with the name of the
            argument. False trusts the caller. `Lengths` have been checked.
        out_dtype: q's dtype, which None means, or torch.float32 (q in fp64 aside): the sum over
            these keys as it is, to be added to others. Its gradient is rounded to q's dtype.
        add_to: of the result's shape, in q's dtype or fp32 (of q in fp64 in fp64): added in fp32
            (fp64) before the rounding. Attention over [A; B] is `gdpa` over B added to that over A:
            nothing is normalised. Its gradient is the result's.
        dropout_p: 0.0; anything else is refused, and the error says what to do in its place.
        mask_fields: the fields of `Mask` as keywords (causal=True), in place of mask; they go with
            version 0.3.

    Returns:
        `[total_q, num_heads_q, head_dim]` of v's head_dim, or `[batch * max_seqlen_q, ...]` with a
        shared q, in `out_dtype`, rounded once from fp32 (by impl "v0_eager" in every step).

    Raises:
        TypeError, ValueError: an argument is wrong: its name, what is expected, what was received.
        NotImplementedError: an explicit impl does not support the call: what it needs, what it got.
        RuntimeError: a second derivative, or a forward-mode derivative, is asked for; inside a
            transform of `torch.func` (vmap, grad, jvp); or an explicit backward_impl is not
            deterministic where PyTorch was told to be.

    Source: the operator of Kunlun (arXiv 2602.10016); see the chapter "What GDPA computes".
    """
    check_transforms("gdpa")
    if dropout_p != 0:
        raise ValueError(
            f"dropout_p must be 0.0, got {dropout_p!r}: no pair is dropped here; apply "
            "torch.nn.functional.dropout to the result or to v"
        )
    nested = None
    if jagged.is_nested(q, k, v, add_to):
        nested = q if jagged.is_nested(q) else None
        (q, add_to), cu_seqlens_q, max_seqlen_q = jagged.unnest(
            {"q": q, "add_to": add_to}, cu_seqlens_q, max_seqlen_q, "q"
        )
        if nested is not None and k is None and v is None and cu_seqlens_k is None:
            cu_seqlens_k = cu_seqlens_q
            max_seqlen_k = max_seqlen_q if max_seqlen_k is None else max_seqlen_k
        (k, v), cu_seqlens_k, max_seqlen_k = jagged.unnest(
            {"k": k, "v": v}, cu_seqlens_k, max_seqlen_k, "k"
        )
    packed_qkv, num_kv_heads = packed.flatten(*checks.autocast(q, k, v), num_kv_heads)
    packed_qkv, head_dim, width = _of_one_width(*packed_qkv)
    q, k, v = packed.unpack(*packed_qkv, num_kv_heads)
    checks.check_tensors(q, k, v)
    names = check_activation(activation, q.shape[1])
    if mask_fields or mask is not ALL:
        mask = mask_of(mask, mask_fields)
    _check_options(scale, output_scale, precise, validate, impl, backward_impl)
    same, shared_q = cu_seqlens_q is cu_seqlens_k, cu_seqlens_q is None
    of_q = _sequences_of("q", q, cu_seqlens_q, max_seqlen_q, validate)
    of_k = _sequences_of("k", k, cu_seqlens_k, max_seqlen_k, validate)
    cu_seqlens_q, cu_seqlens_k = of_q.cu_seqlens, of_k.cu_seqlens
    if not shared_q and cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_q must have cu_seqlens_k's shape {list(cu_seqlens_k.shape)}, "
            f"got {list(cu_seqlens_q.shape)}"
        )
    unread = of_q.check_values or of_k.check_values
    may_have_padding = of_q.may_have_padding or of_k.may_have_padding
    lengths = None
    if of_k.lengths is not None and (shared_q or of_q.lengths is not None):
        lengths = of_q.lengths, of_k.lengths
    # Of the same offsets both alignments are one, which all products take.
    lower_right = mask.causal == "lower_right" and not same
    check_alignment = validate and mask.causal is True and not same
    if unread or check_alignment or (validate and mask.has_segments):
        unread = not checks.is_readable(cu_seqlens_k)
    if check_alignment and not unread:
        _check_alignment(lengths, cu_seqlens_q, cu_seqlens_k, q.shape[0])
    segments = None
    if not mask.plain:
        segments = mask.segments(cu_seqlens_q, cu_seqlens_k, lower_right, validate)
    rows = q.shape[0] * (1 if cu_seqlens_q is not None else cu_seqlens_k.shape[0] - 1)
    head_dim, width = (head_dim, width) if width else (q.shape[2], q.shape[2])
    out_dtype = check_sum(q, (rows, q.shape[1], width), out_dtype, add_to)
    if add_to is not None and width < q.shape[2]:
        add_to = F.pad(add_to, (0, q.shape[2] - width))
    bias = ()
    if relative_bias is not None:
        bias = bias_of_call(
            relative_bias, q.shape[1], q.shape[0], k.shape[0], cu_seqlens_q, cu_seqlens_k, same,
            lower_right, validate,
        )  # fmt: skip
        bias = bias if bias.is_given else ()
    tensors = *packed_qkv, cu_seqlens_q, cu_seqlens_k, add_to, segments, *bias
    scale = head_dim**-0.5 if scale is None else float(scale)
    options = Options(
        num_kv_heads, of_q.max_seqlen, of_k.max_seqlen, ",".join(names), scale, float(output_scale),
        "" if mask is ALL else mask.rule(lower_right), precise, impl, backward_impl, out_dtype,
        check_values=unread, check_alignment=unread and check_alignment,
        may_have_padding=may_have_padding,
    )  # fmt: skip
    compiling, work_lists = torch.compiler.is_compiling(), None
    if compiling:
        tensors = distinct(*tensors)
    elif lengths is not None:
        work_lists = CallWorkLists((cu_seqlens_k, cu_seqlens_q), of_k.lengths, of_q.lengths)
    recorded = torch.is_grad_enabled() or has_tangents() or compiling
    out = (_Gdpa.apply if recorded else _operate)(work_lists, *tensors, options)
    out = out if width == q.shape[2] else out[..., :width].contiguous()
    return out if nested is None else jagged.like(nested, out, None)


def resolve(impl: str, direction: str, batch: Batch) -> Rung:
    """The rung that computes a direction, "forward" or "backward": "auto" is the first that
    supports the call in the order measured at the nearest shape (choices.py). Raises what
    `ladder.resolve` raises."""

    def order() -> tuple[str, ...]:
        kind = capability(batch.device), direction, dtype_name(batch.dtype)
        return choices.order(*kind, batch.head_dim, batch.max_seqlen_q, batch.max_seqlen_k)

    return ladder.resolve(impl, "gdpa", direction, batch, order)


class Options(NamedTuple):
    """What a call asks for beside its tensors: arguments of the operators, in this order.

    activation: its names with commas between them. mask: `Mask.rule`. check_values: nobody has read
    the offsets, nor what counts tokens; check_alignment: nor whether a sequence has fewer queries
    than keys. may_have_padding: rows may follow the last sequence.
    """

    num_kv_heads: Size | None
    max_seqlen_q: Size
    max_seqlen_k: Size
    activation: str
    scale: float
    output_scale: float
    mask: str
    precise: bool
    impl: str
    backward_impl: str
    out_dtype: torch.dtype | None = None
    check_values: bool = False
    check_alignment: bool = False
    may_have_padding: bool = False

    def rung(self, direction: str, batch: Batch) -> Rung:
        """The rung that computes a direction; registered activations are proved for its device."""
        impl = self.impl if direction == "forward" else self.backward_impl
        rung = resolve(impl, direction, batch)
        if rung.requires.capability is not None:
            prove(batch.activation, batch.device)
        return rung


def _operate(
    work_lists, q, k, v, cu_seqlens_q, cu_seqlens_k, add_to, segments, *bias_and_options
) -> torch.Tensor:
    """The operator of the forward pass."""
    bias, options = Bias(*bias_and_options[:-1]), bias_and_options[-1]
    more = {"add_to": add_to, "segments": segments, **bias.named()}
    tensors = q, k, v, cu_seqlens_q, cu_seqlens_k
    return with_work_lists(work_lists, _FORWARD, *tensors, *options, **more)


class _Gdpa(torch.autograd.Function):
    """The operators of both directions as one differentiable function."""

    @staticmethod
    def forward(ctx, *arguments):
        ctx.work_lists, *tensors, add_to, segments = arguments[:8]
        bias, ctx.options = Bias(*arguments[8:-1]), arguments[-1]
        ctx.save_for_backward(*tensors, segments, *bias)
        ctx.set_materialize_grads(False)
        ctx.add_dtype = None if add_to is None else add_to.dtype
        return _operate(*arguments)

    @staticmethod
    def backward(ctx, grad_out):
        if grad_out is None:
            return (None,) * 14
        options, needs, work_lists = ctx.options, ctx.needs_input_grad[1:4], ctx.work_lists
        needs_of_tables = ctx.needs_input_grad[8:10]
        saved = ctx.saved_tensors  # read once: checkpointing allows no more
        saved, segments, bias = saved[:5], saved[5], Bias(*saved[6:])
        if work_lists is not None and checks.is_fake(saved[0]):  # as compiled autograd has it
            work_lists = None
        if work_lists is not None:  # hooks may have copied what was saved
            work_lists.offsets = saved[4], saved[3]
        tensors = grad_out.to(saved[0].dtype), *saved
        more = {"segments": segments, **bias.named()}
        tables = None, None
        with torch.no_grad():
            gradients = with_work_lists(work_lists, _BACKWARD, *tensors, *needs, *options, **more)
            gradients = needed(gradients, needs)
            if any(needs_of_tables):
                tables = _BIAS_BACKWARD(*tensors, *needs_of_tables, *options, **more)
                tables = needed(tables, needs_of_tables)
            added = grad_out.to(ctx.add_dtype) if ctx.needs_input_grad[6] else None
        inputs = grad_out, *saved[:3], *bias[:2]
        gradients = *gradients, added, *tables
        dq, dk, dv, added, *tables = once_differentiable("gdpa", gradients, inputs)
        return None, dq, dk, dv, None, None, added, None, *tables, None, None, None, None


def _of_one_width(q: object, k: object, v: object) -> tuple[tuple, int, int]:
    """((q, k, v), head_dim, width): where v has another head_dim, `width`, than q and k, what is
    narrower is filled with zeros, which add nothing; elsewhere as given, and (0, 0)."""
    for x in (q, k, v):
        if not isinstance(x, torch.Tensor) or x.dim() != 3:
            return (q, k, v), 0, 0
    if v.shape[2] == k.shape[2]:
        return (q, k, v), 0, 0
    head_dim, width = k.shape[2], v.shape[2]
    if head_dim != q.shape[2] or v.shape[:2] != k.shape[:2] or 0 in (head_dim, width):
        return (q, k, v), 0, 0
    most = max(head_dim, width)
    filled = tuple(F.pad(x, (0, most - x.shape[2])) if x.shape[2] < most else x for x in (q, k, v))
    return filled, head_dim, width


def _batch(q, k, v, cu_seqlens_q, cu_seqlens_k, options: Options, **more) -> Batch:
    """The `Batch` of an operator's arguments."""
    return Batch(
        *packed.unpack(q, k, v, options.num_kv_heads), cu_seqlens_q, cu_seqlens_k,
        options.max_seqlen_q, options.max_seqlen_k, tuple(options.activation.split(",")),
        options.scale, options.output_scale, of_rule(options.mask), options.precise,
        may_have_padding=options.may_have_padding, **more,
    )  # fmt: skip


def _forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, *options, add_to=None, segments=None, **bias
) -> torch.Tensor:
    options = Options(*options)
    tensors = q, k, v, cu_seqlens_q, cu_seqlens_k
    both = {"segments": segments, "bias": Bias(**bias)}
    batch = _batch(*tensors, options, out_dtype=options.out_dtype, add_to=add_to, **both)
    if options.check_values:
        _check_values(batch, options.check_alignment)
    rung = options.rung("forward", batch)
    if options.backward_impl != "auto":  # an explicit one that cannot take the call says so here
        resolve(options.backward_impl, "backward", _batch(*tensors, options, **both))
    with checks.without_autocast(q):  # the definition is made of operators that it would change
        out = rung.module().forward(batch, **handed_over(rung, "forward", batch)).contiguous()
    if options.may_have_padding:
        clear_padding(out, cu_seqlens_q, add_to=add_to)
    return out


def _check_values(batch: Batch, alignment: bool) -> None:
    """Raises ValueError unless offsets and counts fit; on a GPU asserts it, without waiting.

    alignment: no sequence may have fewer queries than keys either.
    """
    ends_q, ends_k, segments = batch.cu_seqlens_q, batch.cu_seqlens_k, batch.segments
    rows, longest = (batch.q.shape[0], batch.k.shape[0]), (batch.max_seqlen_q, batch.max_seqlen_k)
    if batch.device.type == "cuda":
        equal = segments is not None and not batch.lower_right
        name = "cu_seqlens_k" if ends_q is None else "cu_seqlens"
        options = {"name": name, "aligned": alignment, "equal": equal}
        assert_offsets(ends_q, ends_k, segments, rows, longest, **options)
        return
    for letter, ends, total, most in zip("qk", (ends_q, ends_k), rows, longest, strict=True):
        if ends is not None:
            name = f"cu_seqlens_{letter}"
            checks.check_offset_values(name, ends, total, most, allow_padding=True)
    if alignment:
        _check_alignment(None, ends_q, ends_k, rows[0])
    if segments is not None:
        check_counts(segments, ends_q, ends_k, batch.lower_right)


def _fake_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, *options, **_):
    options = Options(*options)
    q, _, _ = packed.unpack(q, k, v, options.num_kv_heads)
    rows = q.shape[0] if cu_seqlens_q is not None else (cu_seqlens_k.shape[0] - 1) * q.shape[0]
    return q.new_empty(rows, q.shape[1], q.shape[2], dtype=options.out_dtype)


def _backward(
    grad_out, q, k, v, cu_seqlens_q, cu_seqlens_k, need_q, need_k, need_v, *options,
    segments=None, **bias,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    needs, options = (need_q, need_k, need_v), Options(*options)

    def backward(buffers, needs):
        more = {"gradients": buffers, "segments": segments, "bias": Bias(**bias)}
        batch = _batch(q, k, v, cu_seqlens_q, cu_seqlens_k, options, **more)
        rung = options.rung("backward", batch)
        extra = handed_over(rung, "backward", batch)
        if rung.takes("backward", "needs"):
            extra["needs"] = needs
        with checks.without_autocast(q):
            gradients = needed(rung.module().backward(grad_out, batch, **extra), needs)
        if options.may_have_padding:
            clear_padding(gradients[0], cu_seqlens_q)
            clear_padding(gradients[1], cu_seqlens_k, gradients[2])
        return gradients

    gradients = needed(packed.gradients(backward, q, k, v, options.num_kv_heads, needs), needs)
    return tuple([q.new_empty(0) if x is None else x for x in gradients])


def _fake_backward(
    grad_out, q, k, v, cu_seqlens_q, cu_seqlens_k, need_q, need_k, need_v, *options, **_
):
    gradients = needed((q, k, v), (need_q, need_k, need_v))
    return tuple(q.new_empty(0 if x is None else x.shape) for x in gradients)


def _bias_backward(
    grad_out, q, k, v, cu_seqlens_q, cu_seqlens_k, need_position, need_time, *options,
    segments=None, **bias,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    needs, options = (need_position, need_time), Options(*options)
    more = {"segments": segments, "bias": Bias(**bias)}
    batch = _batch(q, k, v, cu_seqlens_q, cu_seqlens_k, options, **more)
    rung = options.rung("backward", batch)
    with checks.without_autocast(q):
        gradients = rung.module().bias_backward(grad_out, batch, needs)
    return tuple(q.new_empty(0) if x is None else x.contiguous() for x in gradients)


def _fake_bias_backward(
    grad_out, q, k, v, cu_seqlens_q, cu_seqlens_k, need_position, need_time, *_,
    position_table=None, time_table=None, **__,
):  # fmt: skip
    tables = needed((position_table, time_table), (need_position, need_time))
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in tables)


def _matmul_flops(q, k, v, cu_seqlens_q, cu_seqlens_k, options, segments) -> int:
    """FLOPs of one matmul of a call, of pairs that count."""
    batch = _batch(q, k, v, cu_seqlens_q, cu_seqlens_k, options, segments=segments)
    return 2 * batch.num_heads * batch.head_dim * batch.pairs()


def _forward_flops(q, k, v, cu_seqlens_q, cu_seqlens_k, *options, segments=None, **_) -> int:
    return 2 * _matmul_flops(q, k, v, cu_seqlens_q, cu_seqlens_k, Options(*options), segments)


def _backward_flops(
    grad_out, q, k, v, cu_seqlens_q, cu_seqlens_k, need_q, need_k, need_v, *options,
    segments=None, **_,
) -> int:  # fmt: skip
    need_q, need_k, need_v = packed.needs_of_parts(k, v, (need_q, need_k, need_v))
    matmuls = 1 + (need_q or need_k) + need_q + need_k + need_v  # S, dP, dQ, dK, dV
    tensors = q, k, v, cu_seqlens_q, cu_seqlens_k
    return matmuls * _matmul_flops(*tensors, Options(*options), segments)


def _bias_backward_flops(
    grad_out, q, k, v, cu_seqlens_q, cu_seqlens_k, need_position, need_time, *options,
    segments=None, **_,
) -> int:  # fmt: skip
    tensors = q, k, v, cu_seqlens_q, cu_seqlens_k
    return 2 * _matmul_flops(*tensors, Options(*options), segments)  # S, dP


_TENSORS = "Tensor q, Tensor? k, Tensor? v, Tensor? cu_seqlens_q, Tensor cu_seqlens_k"
_BIAS = ", ".join(f"Tensor? {name}=None" for name in ("segments", *NONE._asdict()))
_FORWARD = define(
    "gdpa_forward",
    f"({_TENSORS}, {schema(Options)}, *, Tensor? add_to=None, {_BIAS}) -> Tensor",
    _forward,
    _fake_forward,
    _forward_flops,
)
_BACKWARD = define(
    "gdpa_backward",
    f"(Tensor grad_out, {_TENSORS}, bool need_q, bool need_k, bool need_v, "
    f"{schema(Options)}, *, {_BIAS}) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
    _backward_flops,
)
_BIAS_BACKWARD = define(
    "gdpa_bias_backward",
    f"(Tensor grad_out, {_TENSORS}, bool need_position, bool need_time, {schema(Options)}, "
    f"*, {_BIAS}) -> (Tensor, Tensor)",
    _bias_backward,
    _fake_bias_backward,
    _bias_backward_flops,
)


@checks.cached_check
def _check_options(
    scale: object, output_scale: object, precise: object, validate: object, impl: object,
    backward_impl: object,
) -> None:  # fmt: skip
    """Raises TypeError or ValueError unless each is what `gdpa` takes."""
    check_scalars(scale, output_scale)
    checks.check_bool(precise=precise, validate=validate)
    checks.check_impl(impl, IMPLS)
    checks.check_impl(backward_impl, BACKWARD_IMPLS, "backward_impl")


@dataclass(frozen=True)
class _FewerQueries(Recipe[tuple[int, int] | None]):
    """(queries, keys) of a sequence that has fewer queries than keys; rows_of_q: of a shared q."""

    rows_of_q: int

    def make(self, cu_seqlens_k, cu_seqlens_q=None):
        keys = cu_seqlens_k.diff().tolist()
        shared = [self.rows_of_q] * len(keys)
        queries = shared if cu_seqlens_q is None else cu_seqlens_q.diff().tolist()
        pairs = zip(queries, keys, strict=True)
        return next((pair for pair in pairs if pair[0] < pair[1]), None)


def _check_alignment(
    lengths: tuple[Lengths | None, Lengths] | None, ends_q: torch.Tensor | None,
    ends_k: torch.Tensor, rows: int,
) -> None:  # fmt: skip
    """Raises ValueError if a sequence has fewer queries than keys; `rows` are those of a shared q.
    Waits for the device, once if both offsets are Lengths."""
    recipe = _FewerQueries(rows if ends_q is None else 0)
    pair = lengths[1].once(recipe, lengths[0]) if lengths else recipe.make(ends_k, ends_q)
    if pair is not None:
        raise ValueError(
            "causal must be 'upper_left' (positions start with their sequence) or 'lower_right' "
            "(they end with it) where a sequence has fewer queries than keys, got True with "
            f"{pair[0]} queries and {pair[1]} keys"
        )


def check_sum(
    q: torch.Tensor, shape: tuple[int, int, int], out_dtype: object, add_to: object
) -> torch.dtype | None:
    """The output's dtype, None for q's. Raises TypeError or ValueError unless both are what `gdpa`
    takes of this q for an output of this shape."""
    if out_dtype is None and add_to is None:
        return None
    known = tuple(dict.fromkeys((q.dtype, torch.promote_types(q.dtype, torch.float32))))
    names = " or ".join(map(str, known))
    if out_dtype is not None and out_dtype not in known:
        raise TypeError(f"out_dtype must be None or {names}, got {out_dtype!r}")
    if add_to is not None:
        if not isinstance(add_to, torch.Tensor):
            raise TypeError(f"add_to must be None or a tensor, got {type(add_to).__name__}")
        if add_to.dtype not in known:
            raise TypeError(f"add_to must be {names}, got {add_to.dtype}")
        if add_to.shape != shape or add_to.device != q.device:
            raise ValueError(
                f"add_to must have shape {list(shape)} on {q.device}, "
                f"got {list(add_to.shape)} on {add_to.device}"
            )
    return None if out_dtype == q.dtype else out_dtype


def check_shared_options(options: dict[str, object], *others: str) -> None:
    """Raises TypeError unless the names of options are among SHARED_OPTIONS and others."""
    known = SHARED_OPTIONS + others
    for name in options:
        if name not in known:
            raise TypeError(f"options must be of {', '.join(known)}, got {name}")


def check_scalars(scale: object, output_scale: object) -> None:
    """Raises TypeError or ValueError unless each is what `gdpa` takes."""
    for name, value in (("scale", scale), ("output_scale", output_scale)):
        if value is not None or name == "output_scale":
            checks.check_float(name, value)


def _sequences_of(
    letter: str, tensor: torch.Tensor, cu_seqlens: object, max_seqlen: int | None, validate: bool
) -> Sequences:
    """The sequences of q or k, with a max_seqlen; of a shared q without offsets."""
    name, rows = f"cu_seqlens_{letter}", tensor.shape[0]
    if cu_seqlens is not None:
        known = read_sequences(name, cu_seqlens, rows, tensor.device, max_seqlen, validate=validate)
        return known if known.max_seqlen is not None else with_max_seqlen(name, known)
    if letter == "k":
        raise TypeError(
            f"{name} must be the offsets [batch + 1] of k's {rows} rows, a tensor or Lengths, "
            "unless k is nested, got None"
        )
    if max_seqlen is not None:
        max_seqlen = checks.check_max_seqlen("max_seqlen_q", max_seqlen)
    if max_seqlen not in (None, rows):
        raise ValueError(f"max_seqlen_q must equal the {rows} rows of a shared q, got {max_seqlen}")
    return Sequences(None, rows)
