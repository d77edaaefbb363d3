"""What the layers of both operators share: checks of their sizes, and a jagged batch as they take
it, a pair (values, offsets) or (values, Lengths), or a nested tensor of layout torch.jagged."""

from __future__ import annotations

import torch

from gdpa_kernels.calling.lengths import Lengths

Offsets = torch.Tensor | Lengths
Jagged = tuple[torch.Tensor, Offsets]


def check_positive(**sizes: object) -> None:
    """Raises ValueError unless every size is an integer of at least 1."""
    for name, value in sizes.items():
        if not _is_positive(value):
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def check_heads(embed_dim: object, num_heads: object, num_kv_heads: object) -> None:
    """Raises ValueError unless they are positive integers, each a divisor of the one before."""
    check_positive(embed_dim=embed_dim)
    whole, of = embed_dim, "embed_dim"
    for name, value in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if not _is_positive(value) or whole % value:
            raise ValueError(f"{name} must be a positive divisor of {of} {whole}, got {value!r}")
        whole, of = value, name


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def read(x: torch.Tensor | Jagged, embed_dim: int) -> Jagged:
    """values `[total_tokens, embed_dim]` and offsets `[batch + 1]` or Lengths, as they came, of a
    batch of any kind.

    Raises TypeError, ValueError: x is wrong: what is expected, what was received. What the offsets
    hold is not read.
    """
    values, offsets = _parts(x)
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"values must be a tensor, got {type(values).__name__}")
    if values.dim() != 2 or values.shape[1] != embed_dim:
        raise ValueError(
            f"values must have shape [total_tokens, {embed_dim}], got {list(values.shape)}"
        )
    if isinstance(offsets, Lengths):
        offsets.of("offsets", values.shape[0], values.device)
        return values, offsets
    if not isinstance(offsets, torch.Tensor):
        raise TypeError(f"offsets must be a tensor or Lengths, got {type(offsets).__name__}")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"offsets must be int32 or int64, got {offsets.dtype}")
    if offsets.dim() != 1 or offsets.numel() < 1 or offsets.device != values.device:
        raise ValueError(
            f"offsets must have shape [batch + 1] on {values.device}, "
            f"got {list(offsets.shape)} on {offsets.device}"
        )
    return values, offsets


def _parts(x: torch.Tensor | Jagged) -> Jagged:
    if isinstance(x, torch.Tensor):
        if not x.is_nested or x.layout != torch.jagged:
            raise TypeError(
                "x must be a pair (values, offsets) or a nested tensor of layout torch.jagged, "
                f"got a tensor of layout {x.layout}" + (", nested" if x.is_nested else "")
            )
        if x.dim() != 3 or x._ragged_idx != 1 or x.lengths() is not None:
            raise ValueError(
                "x must be a nested tensor [batch, jagged, embed_dim] without holes between its "
                f"sequences, got {x.dim()} dimensions, of which {x._ragged_idx} is jagged, "
                + ("with holes" if x.lengths() is not None else "without holes")
            )
        return x.values(), x.offsets()
    if not isinstance(x, tuple | list) or len(x) != 2:
        raise TypeError(
            "x must be a pair (values, offsets) or a nested tensor of layout torch.jagged, "
            f"got {type(x).__name__}"
        )
    return tuple(x)


def like(x: torch.Tensor | Jagged, y: torch.Tensor, offsets: Offsets) -> torch.Tensor | Jagged:
    """y `[total_tokens, features]` as a jagged batch of x's kind."""
    if isinstance(x, torch.Tensor):
        return torch.nested.nested_tensor_from_jagged(y, offsets)
    return y, offsets


def cu_seqlens(offsets: Offsets) -> Offsets:
    """The offsets as the operators have them; the same object if it is one already."""
    if isinstance(offsets, Lengths):
        return offsets
    return offsets.to(torch.int32).contiguous()


def batch_size(offsets: Offsets) -> int:
    """How many sequences there are."""
    return offsets.batch if isinstance(offsets, Lengths) else offsets.shape[0] - 1
