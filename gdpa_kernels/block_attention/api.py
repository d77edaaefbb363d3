"""`block_attention`: check the arguments, choose the implementation, call it through operators of
PyTorch, one for each direction; or directly where nobody can see the difference (`calls`).
"""

from __future__ import annotations

import torch

from gdpa_kernels.block_attention import choices
from gdpa_kernels.calling import calls, ladder

OPERATOR = "block_attention"
IMPLS = tuple(ladder.impls(OPERATOR))
BLOCK_SIZES = (16, 32, 64, 128)

Rotary = tuple[torch.Tensor, torch.Tensor]


def block_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    block_size: int = 64,
    scale: float | None = None,
    rotary: Rotary | None = None,
    rotate_v: bool = False,
    impl: str = "auto",
    validate: bool = True,
) -> torch.Tensor:
    """Softmax attention inside blocks of consecutive tokens, on a jagged batch; differentiable.

    A sequence is cut into blocks of `block_size` tokens from its start; the last one may be
    shorter. For each block and head, O = softmax(scale Q K^T) V.

    The gradients of q, k and v need only q, k, v, cu_seqlens, sin and cos, which are all that is
    kept (impl "v0_flash" also keeps its output, its log-sum-exp and what it rotated). They are
    deterministic, and have no gradient of their own.

    Under autocast q, k and v are cast to its dtype, fp64 excepted, as for PyTorch's
    scaled_dot_product_attention; sin and cos stay as they are.

    Args:
        q: `[total_tokens, num_heads_q, head_dim]`, of any strides.
        k, v: `[total_tokens, num_heads_k, head_dim]`; num_heads_q must be a multiple of
            num_heads_k. Query head h uses key head h // (num_heads_q // num_heads_k).
        cu_seqlens: int32 `[batch + 1]` on q's device: sequence i holds the tokens cu_seqlens[i] up
            to, not including, cu_seqlens[i + 1]. Lengths of 0 are ordinary, and so is batch 0.
        block_size: 16, 32, 64 or 128 tokens.
        scale: multiplies Q K^T before the softmax; None means head_dim ** -0.5.
        rotary: (sin, cos), each `[total_tokens, head_dim // 2]`, floating point: the pair (x[2i],
            x[2i + 1]) of q and k becomes (cos x[2i] - sin x[2i + 1], cos x[2i + 1] + sin x[2i]),
            rounded to their dtype. Gradients take the transpose; sin^2 + cos^2 = 1 is not assumed.
            sin and cos get no gradient.
        rotate_v: rotate v too.
        impl: a rung's name, "reference", or "auto": in each direction the one that supports the
            call and was fastest where such calls were measured (choices.py).
        validate: check the values of cu_seqlens, which waits for the device once per tensor (the
            result is remembered until the tensor is modified). False trusts the caller.

    Returns:
        `[total_tokens, num_heads_q, head_dim]`, in q's dtype, rounded once from fp32.

    Raises:
        TypeError, ValueError: an argument is wrong: its name, what is expected, what was received.
        NotImplementedError: an explicit impl does not support the call: what it needs, what it got.
        RuntimeError: a second derivative, or a forward-mode derivative, is asked for.

    Source: the block attention of the published TLX kernels; see the chapter "What is block
    attention".
    """
    compiling = torch.compiler.is_compiling()
    _check_types(q, k, v, rotary)
    q, k, v = calls.autocast(q, k, v)
    options = block_size, rotate_v, impl
    facts = None if compiling else _facts(q, k, v, rotary, *options)
    known = None if facts is None else _resolved.get(facts)
    if known is None:
        _check_tensors(q, k, v)
        _check_options(q, rotary, *options)
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, float | int)):
        raise TypeError(f"scale must be a float, got {type(scale).__name__}")
    if compiling or not calls.are_checked(cu_seqlens, q, q.shape[0]):
        calls.check_offsets("cu_seqlens", cu_seqlens, q.device)
        if validate and not compiling:
            calls.check_lengths("cu_seqlens", cu_seqlens, q, q.shape[0])
    if known is None and facts is not None:
        found = (resolve(impl, d, q, k, v, rotary, block_size) for d in ("forward", "backward"))
        rungs = (ladder.rung(i, OPERATOR) for i in found)
        known = calls.keep(_resolved, facts, calls.Known(facts, *rungs, impl))
    sin, cos = (None, None) if rotary is None else rotary
    if sin is not None and torch.is_grad_enabled() and (sin.requires_grad or cos.requires_grad):
        name = "sin" if sin.requires_grad else "cos"
        raise ValueError(
            f"rotary must not require gradients, which it does not get; got a {name} that does: "
            f"use {name}.detach()"
        )
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    rotate_v = bool(rotate_v)
    differentiated = compiling or calls.differentiated(OPERATOR, q, k, v, (sin, cos))
    tensors, options = (q, k, v, cu_seqlens, sin, cos), (block_size, scale, rotate_v)
    if known is not None:
        if differentiated:
            return _apply_direct(*tensors, (known, options))
        return _known_forward(known, tensors, options)[0]
    arguments = *tensors, *options, impl
    if differentiated:
        return _FORWARD(*arguments)[0]
    # What the autograd kernel does when nothing is differentiated, without its 10 us of Python.
    with torch._C._AutoDispatchBelowAutograd():
        return _FORWARD(*arguments)[0]


def resolve(
    impl: str,
    direction: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotary: Rotary | None = None,
    block_size: int = 64,
) -> str:
    """The implementation that runs in a direction, "forward" or "backward": "auto" resolved, an
    explicit one checked.

    Raises NotImplementedError if an explicit impl does not support the device or the call.
    """
    if impl != "auto":
        problem = ladder.rung(impl, OPERATOR).requires.of_device(q.device)
        problem = problem or _problem(impl, q, k, v, rotary, block_size)
        if problem is not None:
            raise NotImplementedError(f"impl {impl!r} {problem}")
        return impl
    kind = str(q.dtype).removeprefix("torch."), direction, rotary is not None, q.shape[-1]
    for candidate in choices.order(ladder.capability(q.device), *kind):
        if (
            ladder.availability(candidate, q.device, OPERATOR).ok
            and _problem(candidate, q, k, v, rotary, block_size) is None
        ):
            return candidate
    raise NotImplementedError(
        "impl 'auto' needs dtype bfloat16, float16, float32 or float64, "
        f"got {q.dtype} on {q.device}"
    )


def _problem(impl: str, q, k, v, rotary: Rotary | None, block_size: int) -> str | None:
    """Why an implementation cannot take these arguments, or None."""
    rung = ladder.rung(impl, OPERATOR)
    problem = rung.requires.of_call(q, k, v)
    if problem is None:
        own = getattr(rung.module(), "requires", None)  # what `ladder.Requires` cannot say
        problem = None if own is None else own(block_size, q, k, v, rotary)
    return problem


_resolved: dict[tuple, calls.Known] = {}


def _facts(q, k, v, rotary, block_size, rotate_v, impl) -> tuple | None:
    """`calls.facts` of a call; None also for options of unusual types."""
    if type(impl) is not str or type(block_size) is not int or type(rotate_v) is not bool:
        return None
    return calls.facts(q, k, v, (impl, block_size, rotate_v), () if rotary is None else rotary)


def _rung_forward(
    rung: ladder.Rung, q, k, v, cu_seqlens, sin, cos, block_size, scale, rotate_v
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """(out, saved) of a rung: saved is empty, or the output and then tensors of the rung's own."""
    rotary = None if sin is None else (sin, cos)
    options = {"block_size": block_size, "scale": scale, "rotary": rotary, "rotate_v": rotate_v}
    with torch._C._DisableAutocast():  # the definition is made of operators that it would change
        result = rung.module().forward(q, k, v, cu_seqlens, **options)
    return (result, ()) if rung.impl == "reference" else result


def _rung_backward(
    rung: ladder.Rung, grad_out, q, k, v, cu_seqlens, sin, cos, saved, block_size, scale, rotate_v
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of a rung that saved `saved`."""
    rotary = None if sin is None else (sin, cos)
    options = {"block_size": block_size, "scale": scale, "rotary": rotary, "rotate_v": rotate_v}
    arguments = (grad_out, q, k, v, cu_seqlens)
    if rung.impl != "reference":
        arguments = (*arguments, tuple(saved))
    with torch._C._DisableAutocast():
        return rung.module().backward(*arguments, **options)


def _known_forward(known: calls.Known, tensors: tuple, options: tuple) -> tuple[torch.Tensor, ...]:
    """The output of a rung, then what it saves of its own, for a call whose facts are known:
    tensors (q, k, v, cu_seqlens, sin, cos), options (block_size, scale, rotate_v)."""

    def forward() -> tuple[torch.Tensor, ...]:
        out, saved = _rung_forward(known.rung, *tensors, *options)
        return out, *saved[1:]

    rows, sequences = tensors[0].shape[0], tensors[3].shape[0]
    key = known, known.rung.module().forward, options[1], rows, sequences
    return known.run(forward, key, tensors)


def _known_backward(
    known: calls.Known, grad_out: torch.Tensor, tensors: tuple, saved: list, options: tuple
) -> tuple[torch.Tensor, ...] | None:
    """(dq, dk, dv) of a rung for a call whose forward was known; None if the tensors have changed
    their facts since, or somebody may see it.

    What the rung saved is not among the inputs of a replay, so one that saves something has none.
    """
    q, k, v, ends, sin, cos = tensors
    block_size, scale, rotate_v = options
    rotary = None if sin is None else (sin, cos)
    facts = _facts(q, k, v, rotary, block_size, rotate_v, known.impl)
    if facts != known.facts or type(grad_out) is not torch.Tensor:
        return None

    def backward() -> tuple[torch.Tensor, ...]:
        return _rung_backward(known.backward_rung, grad_out, *tensors, saved, *options)

    rows, sequences = q.shape[0], ends.shape[0]
    key = known, known.backward_rung.module().backward, scale, rows, sequences
    return known.run(backward, (*key, calls.layout(grad_out)), (*tensors, grad_out))


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    sin: torch.Tensor | None,
    cos: torch.Tensor | None,
    block_size: int,
    scale: float,
    rotate_v: bool,
    impl: str,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    rotary = None if sin is None else (sin, cos)
    rung = ladder.rung(resolve(impl, "forward", q, k, v, rotary, block_size), OPERATOR)
    out, saved = _rung_forward(rung, q, k, v, cu_seqlens, sin, cos, block_size, scale, rotate_v)
    return out, list(saved[1:])


def _fake_forward(q, k, v, cu_seqlens, sin, cos, block_size, scale, rotate_v, impl):
    saved = ()
    if impl != "auto":  # which chooses only what saves nothing
        module = ladder.rung(impl, OPERATOR).module()
        if hasattr(module, "empty_saved"):
            saved = module.empty_saved(q, k, v, sin is not None, rotate_v)
    return q.new_empty(q.shape), list(saved)


def _backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    sin: torch.Tensor | None,
    cos: torch.Tensor | None,
    saved: list[torch.Tensor],
    block_size: int,
    scale: float,
    rotate_v: bool,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rotary = None if sin is None else (sin, cos)
    rung = ladder.rung(resolve(impl, "backward", q, k, v, rotary, block_size), OPERATOR)
    return _rung_backward(
        rung, grad_out, q, k, v, cu_seqlens, sin, cos, saved, block_size, scale, rotate_v
    )


def _fake_backward(
    grad_out, q, k, v, cu_seqlens, sin, cos, saved, block_size, scale, rotate_v, impl
):
    return tuple(tensor.new_empty(tensor.shape) for tensor in (q, k, v))


def _setup(ctx, inputs, output) -> None:
    """Save what backward needs; inputs and output are the operator's."""
    q, k, v, cu_seqlens, sin, cos, *ctx.options = inputs
    ctx.mark_non_differentiable(*output[1])
    _save(ctx, (q, k, v, cu_seqlens, sin, cos), *output)


def _save(ctx, tensors: tuple, out: torch.Tensor, own: list) -> None:
    """Save arguments; the output and what the rung saves of its own, if it does."""
    ctx.save_for_backward(*tensors, *((out, *own) if own else ()))
    ctx.set_materialize_grads(False)


def _gradients(ctx, grad_out, *_) -> tuple:
    """The gradients of the operator's ten arguments: None for what needs none."""
    if grad_out is None:
        return (None,) * 10
    *tensors, saved = _split(ctx.saved_tensors)
    gradients = _BACKWARD(grad_out, *tensors, saved, *ctx.options)
    return *calls.needed(gradients, ctx.needs_input_grad[:3]), *(None,) * 7


def _split(saved: tuple) -> tuple:
    """(q, k, v, cu_seqlens, sin, cos, what the rung saved) of saved tensors."""
    return *saved[:6], list(saved[6:])


class _Direct(torch.autograd.Function):
    """The operator's derivative around rungs that are known, without the dispatcher.

    Its arguments are the operator's tensors, and the others as one.
    """

    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, sin, cos, call):
        tensors = q, k, v, cu_seqlens, sin, cos
        ctx.call = known, options = call
        out, *own = _known_forward(known, tensors, options)
        _save(ctx, tensors, out, own)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        if grad_out is None:
            return (None,) * 7
        known, options = ctx.call
        *tensors, saved = _split(ctx.saved_tensors)
        gradients = None
        # Not to be differentiated again, nor to be seen.
        if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            gradients = _known_backward(known, grad_out, tensors, saved, options)
        if gradients is None:
            gradients = _BACKWARD(grad_out, *tensors, saved, *options, known.impl)
        return *calls.needed(gradients, ctx.needs_input_grad[:3]), *(None,) * 4


_apply_direct = calls.apply_of(_Direct)


def _no_second_derivative(ctx, *_):
    raise RuntimeError(
        "block_attention has no second derivative; its gradients cannot be differentiated again"
    )


_FORWARD = calls.define(
    "block_attention_forward",
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor? sin, Tensor? cos, int block_size, "
    "float scale, bool rotate_v, str impl) -> (Tensor, Tensor[])",
    _forward,
    _fake_forward,
    _gradients,
    _setup,
)
_BACKWARD = calls.define(
    "block_attention_backward",
    "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor? sin, Tensor? cos, "
    "Tensor[] saved, int block_size, float scale, bool rotate_v, str impl) "
    "-> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
    _no_second_derivative,
)


def _check_types(q, k, v, rotary) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if rotary is None:
        return
    if not isinstance(rotary, tuple | list) or len(rotary) != 2:
        got = (
            f"{len(rotary)} of them" if isinstance(rotary, tuple | list) else type(rotary).__name__
        )
        raise TypeError(f"rotary must be None or a pair (sin, cos) of tensors, got {got}")
    for name, tensor in zip(("sin", "cos"), rotary, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} of rotary must be a tensor, got {type(tensor).__name__}")


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    calls.check_tensors(q, k, v)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k must have q's {q.shape[0]} tokens, got {k.shape[0]}")


def _check_options(q: torch.Tensor, rotary, block_size, rotate_v, impl) -> None:
    whole = isinstance(block_size, int) and not isinstance(block_size, bool)
    if not whole or block_size not in BLOCK_SIZES:
        raise ValueError(
            f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))}, got {block_size!r}"
        )
    calls.check_impl(impl, IMPLS)
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
