"""`gdpa`: check the arguments, choose the implementation, call it through an operator of PyTorch.

The operator is defined with `torch.library.Library`: `torch.library.custom_op` makes the same
operator, but wraps every call in about 25 us of Python. So profilers, modes, `torch.compile`,
`torch.jit`, `torch.func` and autograd see each call. The dispatcher itself costs 5 us and more: a
call that none of them can see (`_facts`) goes straight to the rung.
"""

from __future__ import annotations

import weakref

import torch
from torch.autograd import forward_ad

from gdpa_kernels import ladder
from gdpa_kernels.gdpa import choices
from gdpa_kernels.gdpa.reference import ACTIVATIONS

try:  # who may see a call of an operator; not documented, so another PyTorch may lack one
    from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
    from torch._C._autograd import _profiler_enabled
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
    from torch._C._functorch import peek_interpreter_stack

    KNOWN = True
except ImportError:
    KNOWN = False  # every call takes the dispatcher's way

IMPLS = tuple(ladder.impls())


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
    validate: bool = True,
) -> torch.Tensor:
    """Generalized dot-product attention on a jagged batch.

    For each sequence and head, O = output_scale activation(scale Q K^T) V: an element-wise
    activation stands where softmax would be. A pair that is masked out contributes exactly 0.

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
        validate: check the values of cu_seqlens, which waits for the device once per tensor (the
            result is remembered until the tensor is modified). False trusts the caller.

    Returns:
        `[total_q, num_heads_q, head_dim]`, or `[batch * max_seqlen_q, ...]` with a shared q, in q's
        dtype, rounded once from fp32.

    Raises:
        TypeError, ValueError: an argument is wrong: its name, what is expected, what was received.
        NotImplementedError: an explicit impl does not support the call: what it needs, what it got.
        RuntimeError: backward, or a forward-mode derivative; the forward pass is what there is so
            far.

    Source: the operator of Kunlun (arXiv 2602.10016); see the chapter "What is GDPA".
    """
    compiling = torch.compiler.is_compiling()
    facts = None
    if not compiling:
        facts = _facts(q, k, v, max_seqlen_q, max_seqlen_k, activation, impl)
    known = None if facts is None else _resolved.get(facts)
    if known is None:
        _check_tensors(q, k, v)
        names = _check_activation(activation, q)
        if impl != "auto" and impl not in IMPLS:
            raise ValueError(f"impl must be 'auto' or one of {', '.join(IMPLS)}, got {impl!r}")
    lengths = q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    if compiling or not _are_checked(*lengths):
        _check_lengths(*lengths, validate and not compiling)
    _check_scalars(scale, output_scale, window)
    if known is None and facts is not None:
        if len(_resolved) >= _MOST:
            _resolved.clear()
        known = _resolved[facts] = (
            names,
            ladder.rung(resolve(impl, q, k, v, max_seqlen_q, max_seqlen_k)),
        )
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    differentiated = not compiling and _differentiated(q, k, v)
    if known is not None and not differentiated:
        return known[1].module().forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            activation=known[0], scale=scale, output_scale=float(output_scale),
            causal=bool(causal), window=window,
        ).contiguous()  # fmt: skip
    arguments = (
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        ",".join(names if known is None else known[0]), scale, float(output_scale),
        bool(causal), window, impl,
    )  # fmt: skip
    if compiling or differentiated:
        return _FORWARD(*arguments)
    # What the autograd kernel does when nothing is differentiated, without its 10 us of Python.
    with torch._C._AutoDispatchBelowAutograd():
        return _FORWARD(*arguments)


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_MOST = 1024  # entries of `_resolved`; a full one is emptied
_resolved: dict[tuple, tuple[tuple[str, ...], ladder.Rung]] = {}


def _facts(q, k, v, max_seqlen_q, max_seqlen_k, activation, impl: str) -> tuple | None:
    """All that the checks of q, k, v and activation and the choice of the rung depend on.

    None where they depend on more (tensors that are not on a GPU: the emulator), or where somebody
    may see the call of the operator: subclasses, modes, transforms, tracers, profilers and Dynamo,
    which looks into every function that a compiled program calls.
    """
    if (
        not KNOWN
        or type(q) not in _PLAIN or type(k) not in _PLAIN or type(v) not in _PLAIN
        or not q.is_cuda or type(impl) is not str
        or _len_torch_dispatch_stack() or _len_torch_function_stack()
        or peek_interpreter_stack() is not None or _get_tracing_state() is not None
        or _profiler_enabled() or get_eval_frame_callback() is not None
    ):  # fmt: skip
        return None
    try:
        return (
            impl, activation if type(activation) is str else tuple(activation),
            max_seqlen_q, max_seqlen_k,
            q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, q.shape, k.shape, v.shape,
            q.stride(), k.stride(), v.stride(),
            q.data_ptr() % 16, k.data_ptr() % 16, v.data_ptr() % 16,
        )  # fmt: skip
    except (RuntimeError, TypeError):  # a tensor without strides or memory; an odd activation
        return None


def _differentiated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether a derivative may be wanted: by autograd, or by a transform of torch.func.

    Raises RuntimeError for a forward-mode derivative, which PyTorch would drop without a word.
    """
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in (q, k, v)
    ):
        raise RuntimeError("gdpa has no forward-mode derivative; use the primal of q, k and v")
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None


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
    for candidate in choices.order(capability, dtype, q.shape[-1], max_seqlen_q, max_seqlen_k):
        requires = ladder.rung(candidate).requires
        if requires.of_call(q, k, v) is None and ladder.availability(candidate, q.device).ok:
            return candidate
    raise NotImplementedError(
        "impl 'auto' needs dtype bfloat16, float16, float32 or float64, "
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
) -> torch.Tensor:
    return (
        ladder.rung(resolve(impl, q, k, v, max_seqlen_q, max_seqlen_k))
        .module()
        .forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            activation=tuple(activation.split(",")), scale=scale, output_scale=output_scale,
            causal=causal, window=window,
        )
        .contiguous()
    )  # fmt: skip


def _fake_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    activation, scale, output_scale, causal, window, impl,
):  # fmt: skip
    rows = q.shape[0] if cu_seqlens_q is not None else (cu_seqlens_k.shape[0] - 1) * q.shape[0]
    return q.new_empty(rows, q.shape[1], q.shape[2])


def _no_backward(ctx, grad):
    raise RuntimeError("gdpa has no backward pass yet; detach q, k and v or use torch.no_grad()")


_LIBRARY = torch.library.Library("gdpa_kernels", "FRAGMENT")  # the operator lives as long as this
_LIBRARY.define(
    "gdpa_forward(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor cu_seqlens_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, str activation, float scale, float output_scale, "
    "bool causal, SymInt? window, str impl) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# A compiled program that calls the operator must not have Dynamo look into the implementation.
_LIBRARY.impl("gdpa_forward", torch._disable_dynamo(_forward), "CompositeExplicitAutograd")
torch.library.register_fake("gdpa_kernels::gdpa_forward", _fake_forward, lib=_LIBRARY)
torch.library.register_autograd("gdpa_kernels::gdpa_forward", _no_backward, lib=_LIBRARY)
_FORWARD = torch.ops.gdpa_kernels.gdpa_forward.default


def _check_activation(activation, q: torch.Tensor) -> tuple[str, ...]:
    names = (activation,) if isinstance(activation, str) else tuple(activation)
    for name in names:
        if name not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {name!r}")
    if len(names) != 1 and len(names) != q.shape[1]:
        raise ValueError(
            f"activation must be one name or one per query head ({q.shape[1]}), got {len(names)}"
        )
    return names if len(set(names)) > 1 else names[:1]


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dim() != 3:
            raise ValueError(
                f"{name} must have shape [total, num_heads, head_dim], got {list(tensor.shape)}"
            )
        if tensor is q:
            continue
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {tensor.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {tensor.device}")
        if tensor.shape[2] != q.shape[2]:
            raise ValueError(f"{name} must have q's head_dim {q.shape[2]}, got {tensor.shape[2]}")
    if not q.dtype.is_floating_point:
        raise TypeError(f"q must have a floating-point dtype, got {q.dtype}")
    if v.shape != k.shape:
        raise ValueError(f"v must have k's shape {list(k.shape)}, got {list(v.shape)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q must have a multiple of k's {k.shape[1]} heads, got {q.shape[1]} heads"
        )


def _check_scalars(scale, output_scale, window) -> None:
    for name, value in (("scale", scale), ("output_scale", output_scale)):
        if value is not None and not isinstance(value, float | int):
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
        if not isinstance(cu_seqlens, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(cu_seqlens).__name__}")
        if (
            cu_seqlens.dtype != torch.int32
            or cu_seqlens.dim() != 1
            or cu_seqlens.numel() < 1
            or cu_seqlens.device != q.device
            or not cu_seqlens.is_contiguous()
        ):
            raise ValueError(
                f"{name} must be a contiguous int32 tensor of shape [batch + 1] on {q.device}, "
                f"got {cu_seqlens.dtype} of shape {list(cu_seqlens.shape)} on {cu_seqlens.device}"
            )
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
            _check_values("cu_seqlens_q", cu_seqlens_q, q, max_seqlen_q)
        _check_values("cu_seqlens_k", cu_seqlens_k, k, max_seqlen_k)


_checked: dict[int, tuple[weakref.ref, tuple, torch.UntypedStorage]] = {}


def _state(cu_seqlens: torch.Tensor, tensor: torch.Tensor, max_seqlen: int) -> tuple:
    """What a check of cu_seqlens, the offsets of `tensor`, depends on. Raises RuntimeError for a
    tensor of inference mode, which does not count its modifications."""
    return (
        cu_seqlens._version, cu_seqlens.data_ptr(), cu_seqlens.shape, cu_seqlens.dtype,
        cu_seqlens.is_contiguous(), tensor.device, tensor.shape[0], max_seqlen,
    )  # fmt: skip


def _is_checked(cu_seqlens, tensor: torch.Tensor, max_seqlen: int) -> bool:
    known = _checked.get(id(cu_seqlens))
    return (
        known is not None
        and known[0]() is cu_seqlens
        and known[1] == _state(cu_seqlens, tensor, max_seqlen)
    )


def _are_checked(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> bool:
    """Whether `_check_lengths` has found these right, and nothing has changed since."""
    return (
        type(max_seqlen_q) is int and type(max_seqlen_k) is int  # True is 1, and wrong
        and _is_checked(cu_seqlens_k, k, max_seqlen_k)
        and (
            q.shape[0] == max_seqlen_q
            if cu_seqlens_q is None
            else _is_checked(cu_seqlens_q, q, max_seqlen_q)
            and cu_seqlens_q.shape == cu_seqlens_k.shape
        )
    )  # fmt: skip


def _check_values(
    name: str, cu_seqlens: torch.Tensor, tensor: torch.Tensor, max_seqlen: int
) -> None:
    """Check that cu_seqlens rises from 0 to the rows of `tensor` in steps of at most `max_seqlen`.

    Reading the values waits for the device, so a tensor that passed is not read again until it is
    modified. A tensor without values (fake) or inside a CUDA graph's capture cannot be read. What
    was made in inference mode does not say when it was modified, and is read every time.
    """
    if _is_checked(cu_seqlens, tensor, max_seqlen):
        return
    if isinstance(cu_seqlens, torch._subclasses.FakeTensor) or (
        cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing()
    ):
        return
    key, total = id(cu_seqlens), tensor.shape[0]
    # Before the values are read: what modifies them meanwhile must not go unnoticed.
    state = None if cu_seqlens.is_inference() else _state(cu_seqlens, tensor, max_seqlen)
    values = cu_seqlens.tolist()
    lengths = [after - before for before, after in zip(values, values[1:], strict=False)]
    if values[0] != 0 or values[-1] != total:
        raise ValueError(
            f"{name} must run from 0 to the {total} rows of its tensor, "
            f"got {values[0]} to {values[-1]}"
        )
    if lengths and min(lengths) < 0:
        at = lengths.index(min(lengths))
        raise ValueError(
            f"{name} must not decrease, got {values[at]} followed by {values[at + 1]} at index {at}"
        )
    if lengths and max(lengths) > max_seqlen:
        raise ValueError(
            f"{name.replace('cu_seqlens', 'max_seqlen')} must be at least the longest sequence, "
            f"{max(lengths)} tokens, got {max_seqlen}"
        )
    if state is not None:
        ref = weakref.ref(cu_seqlens, lambda _: _checked.pop(key, None))
        # With its memory: an address in use is not reused.
        _checked[key] = ref, state, cu_seqlens.untyped_storage()
