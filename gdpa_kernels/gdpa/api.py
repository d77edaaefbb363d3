"""`gdpa`: check the arguments, choose the implementation, call it through a torch custom op."""

from __future__ import annotations

import weakref

import torch

from gdpa_kernels import ladder
from gdpa_kernels.gdpa.reference import ACTIVATIONS

IMPLS = tuple(ladder.impls())
AUTO_ORDER = ("v6_short_kv", "v2_tma", "v1_tiled", "v0_eager")


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
        RuntimeError: backward; the forward pass is what there is so far.

    Source: the operator of Kunlun (arXiv 2602.10016); see the chapter "What is GDPA".
    """
    _check_tensors(q, k, v)
    names = _check_activation(activation, q)
    if impl != "auto" and impl not in IMPLS:
        raise ValueError(f"impl must be 'auto' or one of {', '.join(IMPLS)}, got {impl!r}")
    _check_lengths(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, validate)
    for name, value in {"scale": scale, "output_scale": output_scale}.items():
        if value is not None and not isinstance(value, int | float):
            raise TypeError(f"{name} must be a float, got {type(value).__name__}")
    if window is not None and (
        isinstance(window, bool) or not isinstance(window, int) or window < 0
    ):
        raise ValueError(f"window must be None or an integer of at least 0, got {window!r}")
    return torch.ops.gdpa_kernels.gdpa_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, ",".join(names),
        q.shape[-1] ** -0.5 if scale is None else float(scale), float(output_scale),
        bool(causal), window, impl,
    )  # fmt: skip


def resolve(impl: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """The implementation that runs: "auto" resolved, an explicit one checked.

    Raises NotImplementedError if an explicit impl does not support the device or the tensors.
    """
    if impl != "auto":
        requires = ladder.rung(impl).requires
        problem = requires.of_device(q.device) or requires.of_call(q, k, v)
        if problem is not None:
            raise NotImplementedError(f"impl {impl!r} {problem}")
        return impl
    for candidate in AUTO_ORDER:
        requires = ladder.rung(candidate).requires
        available = ladder.availability(candidate, q.device).ok
        if available and requires.of_call(q, k, v) is None:
            return candidate
    raise NotImplementedError(
        "impl 'auto' needs dtype bfloat16, float16, float32 or float64, "
        f"got {q.dtype} on {q.device}"
    )


@torch.library.custom_op("gdpa_kernels::gdpa_forward", mutates_args=())
def _gdpa_forward(
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
        ladder.rung(resolve(impl, q, k, v))
        .module()
        .forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            activation=tuple(activation.split(",")), scale=scale, output_scale=output_scale,
            causal=causal, window=window,
        )
        .contiguous()
    )  # fmt: skip


@_gdpa_forward.register_fake
def _(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    activation, scale, output_scale, causal, window, impl,
):  # fmt: skip
    rows = q.shape[0] if cu_seqlens_q is not None else (cu_seqlens_k.shape[0] - 1) * q.shape[0]
    return q.new_empty(rows, q.shape[1], q.shape[2])


def _no_backward(ctx, grad):
    raise RuntimeError("gdpa has no backward pass yet; detach q, k and v or use torch.no_grad()")


_gdpa_forward.register_autograd(_no_backward)


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
    for name, tensor in {"q": q, "k": k, "v": v}.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dim() != 3:
            raise ValueError(
                f"{name} must have shape [total, num_heads, head_dim], got {list(tensor.shape)}"
            )
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


def _check_lengths(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, validate) -> None:
    for name, value in {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}.items():
        if isinstance(value, bool) or not isinstance(value, int | torch.SymInt) or value < 0:
            raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")
    for name, cu_seqlens in {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}.items():
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
    if validate and not torch.compiler.is_compiling():
        if cu_seqlens_q is not None:
            _check_values("cu_seqlens_q", cu_seqlens_q, q.shape[0], max_seqlen_q)
        _check_values("cu_seqlens_k", cu_seqlens_k, k.shape[0], max_seqlen_k)


_checked: dict[int, tuple[weakref.ref, int, int, int]] = {}


def _check_values(name: str, cu_seqlens: torch.Tensor, total: int, max_seqlen: int) -> None:
    """Check that cu_seqlens rises from 0 to `total` in steps of at most `max_seqlen`.

    Reading the values waits for the device, so a tensor that passed is not read again until it is
    modified. A tensor without values (fake) or inside a CUDA graph's capture cannot be read.
    """
    if isinstance(cu_seqlens, torch._subclasses.FakeTensor) or (
        cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing()
    ):
        return
    key = id(cu_seqlens)
    known = _checked.get(key)
    state = (cu_seqlens._version, total, max_seqlen)
    if known is not None and known[0]() is cu_seqlens and known[1:] == state:
        return
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
    _checked[key] = (weakref.ref(cu_seqlens, lambda _: _checked.pop(key, None)), *state)
