"""What the calls of all operators share: the way past PyTorch's dispatcher, the checks of tensors
and offsets, the definition of an operator.

An operator is defined with `torch.library.Library`: `torch.library.custom_op` makes the same
operator, but wraps every call in about 25 us of Python. So profilers, modes, `torch.compile`,
`torch.jit`, `torch.func` and autograd see each call. The dispatcher itself costs 5 us and more: a
call that none of them can see (`facts`) goes straight to the rung.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.autograd import forward_ad

from gdpa_kernels.calling.ladder import Rung

try:  # who may see a call of an operator; not documented, so another PyTorch may lack one
    from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
    from torch._C._autograd import _profiler_enabled
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
    from torch._C._functorch import peek_interpreter_stack

    KNOWN = True
except ImportError:
    KNOWN = False  # every call takes the dispatcher's way

T = TypeVar("T")

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
"""The types of tensors whose operators nobody overrides."""

MOST = 1024
"""Entries of a dictionary that `keep` fills."""


def facts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: tuple,
    others: tuple[torch.Tensor, ...] = (),
) -> tuple | None:
    """All that the checks of a call and the choice of its rung depend on: a key for `keep`.

    `options` is what they depend on besides the tensors; of `others` they depend as they do of q, k
    and v. They do not depend on how many rows a tensor has, but whether it has any, and as many as
    another.

    None where they depend on more (tensors that are not on a GPU: the emulator), or where somebody
    may see the call of the operator: subclasses, modes, transforms, tracers, profilers and Dynamo,
    which looks into every function that a compiled program calls.
    """
    if (
        not KNOWN
        or type(q) not in PLAIN or type(k) not in PLAIN or type(v) not in PLAIN
        or not q.is_cuda
        or _len_torch_dispatch_stack() or _len_torch_function_stack()
        or peek_interpreter_stack() is not None or _get_tracing_state() is not None
        or _profiler_enabled() or get_eval_frame_callback() is not None
    ):  # fmt: skip
        return None
    try:
        rows, rows_k = q.shape[0], k.shape[0]
        found = (
            options,
            q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
            q.shape[1:], k.shape[1:], v.shape[1:], q.stride(), k.stride(), v.stride(),
            q.data_ptr() % 16, k.data_ptr() % 16, v.data_ptr() % 16,
            rows == 0, rows_k == 0, rows == rows_k, rows_k == v.shape[0],
        )  # fmt: skip
        for other in others:
            if type(other) not in PLAIN:
                return None
            found += (
                other.dtype, other.device, other.shape[1:], other.stride(),
                other.data_ptr() % 16, other.shape[0] == rows,
            )  # fmt: skip
    except (RuntimeError, IndexError):  # a tensor without strides or memory, or a scalar
        return None
    return found


class Known:
    """What follows from the facts of a call: the rungs of both directions, and what runs them.

    impl: the backward implementation that was asked for. names: the activations of a call of
    `gdpa`. run: `replay.run`, or without a kernel, which is
    also without Triton, a call.
    """

    __slots__ = ("backward_rung", "facts", "impl", "names", "run", "rung")

    def __init__(
        self, facts: tuple, rung: Rung, backward_rung: Rung, impl: str, names: tuple[str, ...] = ()
    ):
        self.facts, self.rung, self.backward_rung = facts, rung, backward_rung
        self.impl, self.names = impl, names
        if rung.requires.capability is backward_rung.requires.capability is None:
            self.run = _call
        else:
            from gdpa_kernels.calling import replay

            self.run = replay.run


def _call(function: Callable[[], T], key: tuple, inputs: tuple) -> T:
    return function()


def keep(known: dict[tuple, T], key: tuple, value: T) -> T:
    """`value`, from now on `known[key]`; a dictionary of MOST entries is emptied first."""
    if len(known) >= MOST:
        known.clear()
    known[key] = value
    return value


def differentiated(
    operator: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    others: tuple[torch.Tensor | None, ...] = (),
) -> bool:
    """Whether a derivative may be wanted: by autograd of q, k and v, or by a transform of
    torch.func.

    Raises RuntimeError for a forward-mode derivative, of any argument: PyTorch would drop it
    without a word.
    """
    if forward_ad._current_level >= 0 and any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in (q, k, v, *others)
    ):
        raise RuntimeError(
            f"{operator} has no forward-mode derivative; use the primal of its arguments"
        )
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None


def layout(x: torch.Tensor) -> tuple:
    """What a replay depends on of a tensor that is not among the facts."""
    return x.dtype, x.device, x.shape, x.stride()


def needed(gradients: tuple, needs: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
    """The gradients, None in place of those that nobody needs."""
    return tuple([x if need else None for x, need in zip(gradients, needs, strict=True)])


def apply_of(function: type[torch.autograd.Function]) -> Callable:
    """`function.apply` for tensors that no transform of torch.func has wrapped, which `facts`
    makes sure of: without the Python that looks for them."""
    return super(torch.autograd.Function, function).apply


_LIBRARY = torch.library.Library("gdpa_kernels", "FRAGMENT")  # the operators live as long as this


def define(
    name: str,
    schema: str,
    implementation: Callable,
    fake: Callable,
    backward: Callable,
    setup_context: Callable | None = None,
) -> torch._ops.OpOverload:
    """The operator `gdpa_kernels::name` with `schema`, as `torch.library` has its functions."""
    _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    # A compiled program that calls it must not have Dynamo look into the implementation.
    _LIBRARY.impl(name, torch._disable_dynamo(implementation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"gdpa_kernels::{name}", fake, lib=_LIBRARY)
    torch.library.register_autograd(
        f"gdpa_kernels::{name}", backward, setup_context=setup_context, lib=_LIBRARY
    )
    return getattr(torch.ops.gdpa_kernels, name).default


def autocast(*tensors: T) -> tuple[T, ...]:
    """The arguments as autocast has them, if it is on: tensors, fp64 excepted, in its dtype."""
    if not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")):
        return tensors
    kind = tensors[0].device.type if isinstance(tensors[0], torch.Tensor) else ""
    if kind not in ("cuda", "cpu") or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        x.to(dtype)
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64
        else x
        for x in tensors
    )


def check_impl(impl: object, impls: tuple[str, ...], name: str = "impl") -> None:
    """Raises ValueError unless `impl` is "auto" or one of `impls`."""
    if impl != "auto" and impl not in impls:
        raise ValueError(f"{name} must be 'auto' or one of {', '.join(impls)}, got {impl!r}")


def check_tensors(q: object, k: object, v: object) -> None:
    """Raises TypeError or ValueError unless q is `[total_q, num_heads_q, head_dim]`, k and v are
    `[total_k, num_heads_k, head_dim]`, of one floating-point dtype on one device, and num_heads_q
    is a multiple of num_heads_k."""
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


def check_offsets(name: str, cu_seqlens: object, device: torch.device) -> None:
    """Raises TypeError or ValueError unless cu_seqlens is a contiguous int32 tensor `[batch + 1]`
    on `device`. Its values are not read."""
    if not isinstance(cu_seqlens, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(cu_seqlens).__name__}")
    if (
        cu_seqlens.dtype != torch.int32
        or cu_seqlens.dim() != 1
        or cu_seqlens.numel() < 1
        or cu_seqlens.device != device
        or not cu_seqlens.is_contiguous()
    ):
        raise ValueError(
            f"{name} must be a contiguous int32 tensor of shape [batch + 1] on {device}, "
            f"got {cu_seqlens.dtype} of shape {list(cu_seqlens.shape)} on {cu_seqlens.device}"
        )


_checked: dict[int, tuple[weakref.ref, tuple, torch.UntypedStorage]] = {}


def _state(cu_seqlens: torch.Tensor, tensor: torch.Tensor, max_seqlen: int) -> tuple:
    """What a check of cu_seqlens, the offsets of `tensor`, depends on. Raises RuntimeError for a
    tensor of inference mode, which does not count its modifications."""
    return (
        cu_seqlens._version, cu_seqlens.data_ptr(), cu_seqlens.shape, cu_seqlens.dtype,
        cu_seqlens.is_contiguous(), tensor.device, tensor.shape[0], max_seqlen,
    )  # fmt: skip


def are_checked(cu_seqlens: object, tensor: torch.Tensor, max_seqlen: int) -> bool:
    """Whether `check_offsets` and `check_lengths` have passed cu_seqlens as offsets of `tensor`,
    and nothing has changed since, as `remembered.Remembered` understands it."""
    known = _checked.get(id(cu_seqlens))
    return (
        known is not None
        and known[0]() is cu_seqlens
        and known[1] == _state(cu_seqlens, tensor, max_seqlen)
    )


def check_lengths(
    name: str, cu_seqlens: torch.Tensor, tensor: torch.Tensor, max_seqlen: int
) -> None:
    """Raises ValueError unless cu_seqlens rises from 0 to the rows of `tensor` in steps of at most
    `max_seqlen`; `check_offsets` must have passed it.

    Reading the values waits for the device, so a tensor that passed is not read again until it is
    modified. A tensor without values (fake) or inside a CUDA graph's capture cannot be read. What
    was made in inference mode does not say when it was modified, and is read every time.
    """
    if are_checked(cu_seqlens, tensor, max_seqlen):
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
