"""Checks that public calls make of their arguments; an error names the argument, what it must be,
and what was received. Calls and layers of all operators use them; only `check_offset_values` waits
for the device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from itertools import pairwise
from numbers import Integral, Real

import torch

from gdpa_kernels.calling import private

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST = torch.finfo(torch.float32).max
INT32_MAX = torch.iinfo(torch.int32).max
_UNCHANGED = contextlib.nullcontext()


def cached_check(check: Callable[..., None]) -> Callable[..., None]:
    """`check`, which raises or returns nothing and looks at nothing but its arguments, made once
    for arguments that are equal and of equal types."""
    passed = functools.lru_cache(maxsize=256, typed=True)(check)

    @functools.wraps(check)
    def checked(*arguments: object) -> None:
        try:
            seen = None if torch.compiler.is_compiling() else hash(arguments)
        except TypeError:  # what has no hash may still be what the check must refuse by name
            seen = None
        (check if seen is None else passed)(*arguments)

    return checked


def autocast(*tensors: object) -> tuple:
    """The arguments as autocast has them, if it is on: tensors, fp64 excepted, in its dtype."""
    dtype = _autocast_dtype(tensors[0])
    if dtype is None:
        return tensors
    return tuple(
        x.to(dtype)
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64
        else x
        for x in tensors
    )


def without_autocast(x: torch.Tensor) -> contextlib.AbstractContextManager:
    """A context in which operators of PyTorch compute in the dtypes of their arguments."""
    if _autocast_dtype(x) is None:
        return _UNCHANGED
    return torch.autocast(x.device.type, enabled=False)


def _autocast_dtype(x: object) -> torch.dtype | None:
    kind = x.device.type if isinstance(x, torch.Tensor) else ""
    if kind not in ("cuda", "cpu") or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def check_impl(impl: object, impls: tuple[str, ...], name: str = "impl") -> None:
    """Raises TypeError unless `impl` is a string, ValueError unless it is "auto" or one of
    `impls`."""
    if impl != "auto" and impl not in impls:
        error = ValueError if isinstance(impl, str) else TypeError
        raise error(f"{name} must be 'auto' or one of {', '.join(impls)}, got {impl!r}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises TypeError unless `value` is a string, ValueError unless it is one of `choices`."""
    if value not in choices:
        error = ValueError if isinstance(value, str) else TypeError
        raise error(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_float(name: str, value: object) -> None:
    """Raises TypeError or ValueError unless `value` is a number, finite in fp32, as which kernels
    take it, and no bool."""
    if isinstance(value, bool) or not isinstance(value, float | Real):
        raise TypeError(f"{name} must be a float, got {type(value).__name__}")
    if not torch.compiler.is_compiling() and not abs(value) <= LARGEST:
        raise ValueError(f"{name} must be a finite number in fp32, got {value!r}")


def check_bool(**flags: object) -> None:
    """Raises TypeError unless each is a bool: what is merely true may have been meant otherwise."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, got {value!r}")


def check_count(name: str, value: object, least: int = 0, *, optional: bool = False) -> int | None:
    """`value` as an integer of Python, which may be symbolic.

    Raises TypeError unless it is an integer, of Python or of NumPy, or `optional` and None;
    ValueError if it is below `least`.
    """
    if optional and value is None:
        return None
    integer = is_integer(value)
    if not integer or value < least:
        kind = f"{'None or ' * optional}an integer of at least {least}"
        error = ValueError if integer else TypeError
        raise error(f"{name} must be {kind}, got {value!r}")
    return value if isinstance(value, int | torch.SymInt) else int(value)


def is_integer(value: object) -> bool:
    """True for an integer of Python or of NumPy, which may be symbolic; False for a bool."""
    return isinstance(value, int | Integral | torch.SymInt) and not isinstance(value, bool)


def clamped_to_int32(value: int | None) -> int | None:
    """An integer of at least 0 as kernels take it: the largest one stands for what is above."""
    if value is None or torch.compiler.is_compiling():
        return value
    return min(int(value), INT32_MAX)


def check_positive(**sizes: object) -> None:
    """Raises TypeError or ValueError unless every size is an integer of at least 1."""
    for name, value in sizes.items():
        check_count(name, value, least=1)


def check_max_seqlen(name: str, value: object) -> int:
    """The value as a Python integer, or symbolic. Raises TypeError or ValueError unless it is one
    from 0 to INT32_MAX; of a symbolic one that is not asked."""
    if torch.compiler.is_compiling():
        return check_count(name, value)
    if type(value) is not int or value < 0:
        value = check_count(name, value)
    if value > INT32_MAX:
        raise ValueError(f"{name} must be at most {INT32_MAX}, got {value!r}")
    return value


def check_tensors(q: object, k: object, v: object) -> None:
    """Raises TypeError or ValueError unless q is `[total_q, num_heads_q, head_dim]`, k and v are
    `[total_k, num_heads_k, head_dim]`, of one floating-point dtype on one device, and num_heads_q
    is a multiple of num_heads_k."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise TypeError(f"{name} must be a dense tensor, got a {kind} one")
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
    if q.shape[2] < 1:
        raise ValueError(f"q must have a head_dim of at least 1, got {q.shape[2]}")
    if v.shape != k.shape:
        raise ValueError(f"v must have k's shape {list(k.shape)}, got {list(v.shape)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q must have a multiple of k's {k.shape[1]} heads, got {q.shape[1]} heads"
        )


def check_offsets_tensor(name: str, cu_seqlens: object, device: torch.device | None = None) -> None:
    """Raises TypeError or ValueError unless cu_seqlens is an int32 or int64 tensor `[batch + 1]`,
    on `device` if that is given. Its values are not read."""
    if not isinstance(cu_seqlens, torch.Tensor):
        kind = "a tensor" if device is None else "a tensor or Lengths"
        raise TypeError(f"{name} must be {kind}, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {cu_seqlens.dtype}")
    elsewhere = device is not None and cu_seqlens.device != device
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or elsewhere:
        where = "" if device is None else f" on {device}"
        got = "" if device is None else f" on {cu_seqlens.device}"
        raise ValueError(
            f"{name} must have shape [batch + 1]{where}, got {list(cu_seqlens.shape)}{got}"
        )


def to_int32(values: torch.Tensor, unread: bool = False) -> torch.Tensor:
    """Offsets or counts as kernels read them, contiguous int32. `unread`: nobody has seen that
    those of 64 bits fit; what does not becomes what fits no tensor."""
    if unread and values.dtype == torch.int64:
        values = values.clamp(-1, INT32_MAX)
    return values.to(torch.int32).contiguous()


def is_fake(*tensors: torch.Tensor) -> bool:
    """Whether no kernel can run: for fake or meta tensors, in a fake mode or while being traced."""
    if torch.compiler.is_compiling() or private.are_fake(*tensors):
        return True
    return True in [x.is_meta for x in tensors]


def is_readable(cu_seqlens: torch.Tensor) -> bool:
    """Whether the host can ask for values: not of fake tensors, nor in the capture of a graph."""
    if is_fake(cu_seqlens):
        return False
    return not (cu_seqlens.is_cuda and is_capturing(cu_seqlens.device))


def is_capturing(device: torch.device) -> bool:
    """True while the current stream of a CUDA device is being captured."""
    if device.index in (None, torch.cuda.current_device()):
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def max_seqlen_name(name: str) -> str:
    """The argument of the longest sequence that goes with the offsets `name`."""
    return f"max_seqlen{name.removeprefix('cu_seqlens')}" if "cu_" in name else "max_seqlen"


def check_offset_values(
    name: str,
    cu_seqlens: torch.Tensor,
    total: int,
    max_seqlen: int | None,
    *,
    allow_padding: bool = False,
) -> tuple[int, int]:
    """(longest sequence, end of the last one), in tokens. Raises ValueError unless cu_seqlens rises
    from 0 to `total`, or with `allow_padding` to less, in steps of at most `max_seqlen`, if that is
    given. Waits for the device."""
    values = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(values)]
    if values[0] != 0 or values[-1] > total or (values[-1] < total and not allow_padding):
        hint = ": of lengths, offsets are F.pad(lengths.cumsum(0), (1, 0))" if values[0] else ""
        raise ValueError(
            f"{name} must run from 0 to {'at most ' * allow_padding}the {total} rows of its "
            f"tensor, got {values[0]} to {values[-1]}{hint}"
        )
    if lengths and min(lengths) < 0:
        index = lengths.index(min(lengths))
        raise ValueError(
            f"{name} must not decrease, got {values[index]} followed by {values[index + 1]} at "
            f"index {index}"
        )
    longest = max(lengths, default=0)
    if max_seqlen is not None and longest > max_seqlen:
        raise ValueError(
            f"{max_seqlen_name(name)} must be at least the longest sequence, "
            f"{longest} tokens, got {max_seqlen}"
        )
    return longest, values[-1]
