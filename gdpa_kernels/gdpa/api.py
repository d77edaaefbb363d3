"""`gdpa`: check the arguments, choose the implementation, call it through operators of PyTorch, one
for each direction; or directly where nobody can see the difference (`calls`).
"""

from __future__ import annotations

import torch

from gdpa_kernels.calling import calls, ladder
from gdpa_kernels.gdpa import choices
from gdpa_kernels.gdpa.reference import ACTIVATIONS

BACKWARD = "gdpa_backward"
IMPLS = tuple(ladder.impls())
BACKWARD_IMPLS = tuple(ladder.impls(BACKWARD))


def gdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    activation: str | tuple[str, ...] | list[str] = "gelu_tanh",
    scale: float | None = None,
    output_scale: float = 1.0,
    causal: bool = False,
    window: int | None = None,
    impl: str = "auto",
    backward_impl: str = "auto",
    validate: bool = True,
) -> torch.Tensor:
    """Generalized dot-product attention on a jagged batch; differentiable.

    For each sequence and head, O = output_scale activation(scale Q K^T) V: an element-wise
    activation stands where softmax would be. A pair that is masked out contributes exactly 0.

    The gradients of q, k and v need only q, k, v and the offsets, which are all that is kept. They
    have no gradient of their own.

    Under autocast q, k and v are cast to its dtype, fp64 excepted, as for PyTorch's
    scaled_dot_product_attention.

    Args:
        q: `[total_q, num_heads_q, head_dim]`, or `[max_seqlen_q, num_heads_q, head_dim]` with
            `cu_seqlens_q=None`: one q shared by the whole batch (PMA seeds).
        k, v: `[total_k, num_heads_k, head_dim]`; num_heads_q must be a multiple of num_heads_k.
        cu_seqlens_q, cu_seqlens_k: int32 `[batch + 1]` on q's device: sequence i holds the rows
            cu_seqlens[i] up to, not including, cu_seqlens[i + 1]. Lengths of 0 are ordinary.
        max_seqlen_q, max_seqlen_k: at least the longest sequence, in tokens.
        activation: a name of `reference.ACTIVATIONS`, or one name per query head.
        scale: multiplies Q K^T before the activation; None means head_dim ** -0.5.
        output_scale: multiplies the result after the activation; applied once, to the fp32 sum.
        causal: keep keys at or before the query's position; positions start with their sequence.
        window: keep keys at most this many positions from the query.
        impl: a rung's name, "reference", or "auto" for the fastest that supports the call.
        backward_impl: the same for the gradients. That of q is added up in an order that differs
            from run to run by "v2_fused_backward" where a sequence has more than 256 keys, by
            "v4_warp_specialized_backward" where it has more than 256, or 128 at head_dim 64, and by
            both where q is shared; everything else is deterministic.
        validate: check the values of cu_seqlens, which waits for the device once per tensor (the
            result is remembered until the tensor is modified). False trusts the caller.

    Returns:
        `[total_q, num_heads_q, head_dim]`, or `[batch * max_seqlen_q, ...]` with a shared q, in q's
        dtype, rounded once from fp32.

    Raises:
        TypeError, ValueError: an argument is wrong: its name, what is expected, what was received.
        NotImplementedError: an explicit impl does not support the call: what it needs, what it got.
        RuntimeError: a second derivative, or a forward-mode derivative, is asked for.

    Source: the operator of Kunlun (arXiv 2602.10016); see the chapter "What is GDPA".
    """
    compiling = torch.compiler.is_compiling()
    q, k, v = calls.autocast(q, k, v)
    facts = None
    if not compiling and type(impl) is str and type(backward_impl) is str:
        given = activation if type(activation) is str else tuple(activation)
        options = impl, backward_impl, given, max_seqlen_q, max_seqlen_k, cu_seqlens_q is None
        facts = calls.facts(q, k, v, options)
    known = None if facts is None else _resolved.get(facts)
    if known is None:
        calls.check_tensors(q, k, v)
        names = check_activation(activation, q)
        calls.check_impl(impl, IMPLS)
        calls.check_impl(backward_impl, BACKWARD_IMPLS, "backward_impl")
    if compiling or not _are_checked(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        _check_lengths(
            q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            validate and not compiling,
        )  # fmt: skip
    check_scalars(scale, output_scale, window)
    if known is None and facts is not None:
        lengths = max_seqlen_q, max_seqlen_k
        rung = ladder.rung(resolve(impl, q, k, v, *lengths))
        found = resolve_backward(backward_impl, q, k, v, cu_seqlens_q, *lengths)
        known = calls.Known(facts, rung, ladder.rung(found, BACKWARD), backward_impl, names)
        calls.keep(_resolved, facts, known)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    differentiated = not compiling and calls.differentiated("gdpa", q, k, v)
    tensors = q, k, v, cu_seqlens_q, cu_seqlens_k
    if known is not None:
        sizes = max_seqlen_q, max_seqlen_k
        options = scale, float(output_scale), bool(causal), window
        if differentiated:
            return _apply_direct(*tensors, (known, sizes, options))
        return _known_forward(known, tensors, sizes, options)
    arguments = (
        *tensors, max_seqlen_q, max_seqlen_k, ",".join(names), scale, float(output_scale),
        bool(causal), window, impl, backward_impl,
    )  # fmt: skip
    if compiling or differentiated:
        return _FORWARD(*arguments)
    # What the autograd kernel does when nothing is differentiated, without its 10 us of Python.
    with torch._C._AutoDispatchBelowAutograd():
        return _FORWARD(*arguments)


_resolved: dict[tuple, calls.Known] = {}


def resolve(
    impl: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> str:
    """The implementation that runs: "auto" resolved, an explicit one checked.

    "auto" is the first that supports the call in the order measured at the nearest shape
    (choices.py).

    Raises NotImplementedError if an explicit impl does not support the device or the tensors.
    """
    if impl != "auto":
        requires = ladder.rung(impl).requires
        problem = requires.of_device(q.device) or requires.of_call(q, k, v)
        if problem is not None:
            raise NotImplementedError(f"impl {impl!r} {problem}")
        return impl
    dtype = str(q.dtype).removeprefix("torch.")
    capability = ladder.capability(q.device)
    sizes = q.shape[-1], max_seqlen_q, max_seqlen_k
    for candidate in choices.order(capability, "forward", dtype, *sizes):
        requires = ladder.rung(candidate).requires
        if requires.of_call(q, k, v) is None and ladder.availability(candidate, q.device).ok:
            return candidate
    raise NotImplementedError(
        "impl 'auto' needs dtype bfloat16, float16, float32 or float64, "
        f"got {q.dtype} on {q.device}"
    )


def resolve_backward(
    impl: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> str:
    """`resolve` for the gradients: names of the ladder "gdpa_backward"."""

    def problem(candidate: str) -> str | None:
        rung = ladder.rung(candidate, BACKWARD)
        found = rung.requires.of_call(q, k, v)
        if found is None:
            own = getattr(rung.module(), "requires", None)  # what `ladder.Requires` cannot say
            found = None if own is None else own(cu_seqlens_q, max_seqlen_k)
        return found

    if impl != "auto":
        found = ladder.rung(impl, BACKWARD).requires.of_device(q.device) or problem(impl)
        if found is not None:
            raise NotImplementedError(f"backward_impl {impl!r} {found}")
        return impl
    dtype = str(q.dtype).removeprefix("torch.")
    sizes = q.shape[-1], max_seqlen_q, max_seqlen_k
    for candidate in choices.order(ladder.capability(q.device), "backward", dtype, *sizes):
        if ladder.availability(candidate, q.device, BACKWARD).ok and problem(candidate) is None:
            return candidate
    raise NotImplementedError(
        "backward_impl 'auto' needs dtype bfloat16, float16, float32 or float64, "
        f"got {q.dtype} on {q.device}"
    )


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    activation: str,
    scale: float,
    output_scale: float,
    causal: bool,
    window: int | None,
    impl: str,
    backward_impl: str,
) -> torch.Tensor:
    rung = ladder.rung(resolve(impl, q, k, v, max_seqlen_q, max_seqlen_k))
    if backward_impl != "auto":  # an explicit one that cannot take the call says so here
        resolve_backward(backward_impl, q, k, v, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    return _rung_forward(
        rung, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        tuple(activation.split(",")), scale, output_scale, causal, window,
    )  # fmt: skip


def _rung_forward(
    rung: ladder.Rung, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    activation, scale, output_scale, causal, window,
) -> torch.Tensor:  # fmt: skip
    """The output of a rung, contiguous."""
    with torch._C._DisableAutocast():  # the definition is made of operators that it would change
        return rung.module().forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            activation=activation, scale=scale, output_scale=output_scale, causal=causal,
            window=window,
        ).contiguous()  # fmt: skip


def _known_forward(
    known: calls.Known, tensors: tuple, sizes: tuple, options: tuple
) -> torch.Tensor:
    """`_rung_forward` of a call whose facts are known: tensors (q, k, v, cu_seqlens_q,
    cu_seqlens_k), sizes (max_seqlen_q, max_seqlen_k), options (scale, output_scale, causal,
    window)."""

    def forward() -> tuple[torch.Tensor]:
        return (_rung_forward(known.rung, *tensors, *sizes, known.names, *options),)

    key = known, known.rung.module().forward, options
    (out,) = known.run(forward, *_kind(key, *tensors))
    return out


def _known_backward(
    known: calls.Known, grad_out: torch.Tensor, tensors: tuple, sizes: tuple, options: tuple, needs
) -> tuple[torch.Tensor | None, ...] | None:
    """`_rung_backward` of a call whose forward was known, as `_known_forward`; None if the tensors
    have changed their facts since, or somebody may see it."""
    if type(grad_out) is not torch.Tensor:
        return None
    if calls.facts(*tensors[:3], known.facts[0]) != known.facts:
        return None

    def backward() -> tuple[torch.Tensor | None, ...]:
        return _rung_backward(
            known.backward_rung, grad_out, *tensors, *sizes, known.names, *options, needs
        )

    key = known, known.backward_rung.module().backward, options, needs
    return known.run(backward, *_kind((*key, calls.layout(grad_out)), *tensors, grad_out))


def _kind(key: tuple, q, k, v, cu_seqlens_q, cu_seqlens_k, *others) -> tuple[tuple, tuple]:
    """(key, inputs) of a call for `replay.run`: with the numbers of rows and sequences, and no
    tensor twice."""
    if cu_seqlens_q is cu_seqlens_k:
        cu_seqlens_q = None
    inputs = q, k, v, cu_seqlens_k, cu_seqlens_q, *others
    return (key, q.shape[0], k.shape[0], cu_seqlens_k.shape[0]), inputs


def _fake_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    activation, scale, output_scale, causal, window, impl, backward_impl,
):  # fmt: skip
    rows = q.shape[0] if cu_seqlens_q is not None else (cu_seqlens_k.shape[0] - 1) * q.shape[0]
    return q.new_empty(rows, q.shape[1], q.shape[2])


def _backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    activation: str,
    scale: float,
    output_scale: float,
    causal: bool,
    window: int | None,
    need_q: bool,
    need_k: bool,
    need_v: bool,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    found = resolve_backward(impl, q, k, v, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    gradients = _rung_backward(
        ladder.rung(found, BACKWARD), grad_out, q, k, v, cu_seqlens_q, cu_seqlens_k,
        max_seqlen_q, max_seqlen_k, tuple(activation.split(",")), scale, output_scale, causal,
        window, (need_q, need_k, need_v),
    )  # fmt: skip
    return tuple(q.new_empty(0) if gradient is None else gradient for gradient in gradients)


def _rung_backward(
    rung: ladder.Rung, grad_out, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    activation, scale, output_scale, causal, window, needs,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """(dq, dk, dv) of a rung; None for what is not needed."""
    module = rung.module()
    only = {"needs": needs} if getattr(module, "TAKES_NEEDS", False) else {}
    with torch._C._DisableAutocast():
        gradients = module.backward(
            grad_out, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            activation=activation, scale=scale, output_scale=output_scale, causal=causal,
            window=window, **only,
        )  # fmt: skip
    return calls.needed(gradients, needs)


def _fake_backward(
    grad_out, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    activation, scale, output_scale, causal, window, need_q, need_k, need_v, impl,
):  # fmt: skip
    needs = zip((q, k, v), (need_q, need_k, need_v), strict=True)
    return tuple(x.new_empty(x.shape) if need else x.new_empty(0) for x, need in needs)


def _setup(ctx, inputs, output) -> None:
    """Save what backward needs; inputs are the operator's."""
    q, k, v, cu_seqlens_q, cu_seqlens_k, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, cu_seqlens_q, cu_seqlens_k)
    ctx.set_materialize_grads(False)


def _gradients(ctx, grad_out) -> tuple:
    """The gradients of the operator's fourteen arguments: None for what needs none."""
    if grad_out is None:
        return (None,) * 14
    *options, _, backward_impl = ctx.options
    needs = ctx.needs_input_grad[:3]
    gradients = _BACKWARD(grad_out, *ctx.saved_tensors, *options, *needs, backward_impl)
    return *calls.needed(gradients, needs), *(None,) * 11


class _Direct(torch.autograd.Function):
    """The operator's derivative around rungs that are known, without the dispatcher.

    Its arguments are the tensors of `_known_forward`, and the others as one.
    """

    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens_q, cu_seqlens_k, call):
        tensors = q, k, v, cu_seqlens_q, cu_seqlens_k
        ctx.call = known, sizes, options = call
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return _known_forward(known, tensors, sizes, options)

    @staticmethod
    def backward(ctx, grad_out):
        if grad_out is None:
            return (None,) * 6
        known, sizes, options = ctx.call
        needs, tensors, gradients = ctx.needs_input_grad[:3], ctx.saved_tensors, None
        # Not to be differentiated again, nor to be seen.
        if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            gradients = _known_backward(known, grad_out, tensors, sizes, options, needs)
        if gradients is None:
            names = ",".join(known.names)
            made = _BACKWARD(grad_out, *tensors, *sizes, names, *options, *needs, known.impl)
            gradients = calls.needed(made, needs)
        return *gradients, None, None, None


_apply_direct = calls.apply_of(_Direct)


def _no_second_derivative(ctx, *_):
    raise RuntimeError(
        "gdpa has no second derivative; its gradients cannot be differentiated again"
    )


_SHARED_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor cu_seqlens_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, str activation, float scale, float output_scale, "
    "bool causal, SymInt? window, "
)
_FORWARD = calls.define(
    "gdpa_forward",
    f"({_SHARED_SCHEMA}str impl, str backward_impl) -> Tensor",
    _forward,
    _fake_forward,
    _gradients,
    _setup,
)
_BACKWARD = calls.define(
    "gdpa_backward",
    f"(Tensor grad_out, {_SHARED_SCHEMA}bool need_q, bool need_k, bool need_v, str impl) "
    "-> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
    _no_second_derivative,
)


def check_activation(activation, q: torch.Tensor) -> tuple[str, ...]:
    names = (activation,) if isinstance(activation, str) else tuple(activation)
    for name in names:
        if name not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}")
    if len(names) != 1 and len(names) != q.shape[1]:
        raise ValueError(
            f"activation must be one name or one per query head ({q.shape[1]}), got {len(names)}"
        )
    return names if len(set(names)) > 1 else names[:1]


def check_scalars(scale, output_scale, window) -> None:
    for name, value in (("scale", scale), ("output_scale", output_scale)):
        if value is not None and not isinstance(value, (float, int)):
            raise TypeError(f"{name} must be a float, got {type(value).__name__}")
    if window is not None and (
        isinstance(window, bool) or not isinstance(window, int) or window < 0
    ):
        raise ValueError(f"window must be None or an integer of at least 0, got {window!r}")


def _check_lengths(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, validate) -> None:
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if isinstance(value, bool) or not isinstance(value, int | torch.SymInt) or value < 0:
            raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if cu_seqlens is None and name == "cu_seqlens_q":
            continue
        calls.check_offsets(name, cu_seqlens, q.device)
    if cu_seqlens_q is None:
        if q.shape[0] != max_seqlen_q:
            raise ValueError(
                f"max_seqlen_q must equal the {q.shape[0]} rows of a shared q, got {max_seqlen_q}"
            )
    elif cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_q must have cu_seqlens_k's shape {list(cu_seqlens_k.shape)}, "
            f"got {list(cu_seqlens_q.shape)}"
        )
    if validate:
        if cu_seqlens_q is not None:
            calls.check_lengths("cu_seqlens_q", cu_seqlens_q, q, max_seqlen_q)
        calls.check_lengths("cu_seqlens_k", cu_seqlens_k, k, max_seqlen_k)


def _are_checked(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> bool:
    """Whether `_check_lengths` has found these right, and nothing has changed since."""
    return (
        type(max_seqlen_q) is int and type(max_seqlen_k) is int  # True is 1, and wrong
        and calls.are_checked(cu_seqlens_k, k, max_seqlen_k)
        and (
            q.shape[0] == max_seqlen_q
            if cu_seqlens_q is None
            else calls.are_checked(cu_seqlens_q, q, max_seqlen_q)
            and cu_seqlens_q.shape == cu_seqlens_k.shape
        )
    )  # fmt: skip
