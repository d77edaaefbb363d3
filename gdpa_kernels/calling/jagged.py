"""Jagged batches, as layers take and return them: a pair (values, offsets) or (values, `Lengths`),
or a nested tensor of layout torch.jagged.

Models call the public functions between layers. Layers read a batch by `read_jagged` and return one
by `like`; operators take nested tensors apart by `unnest`.
"""

from __future__ import annotations

import torch

from gdpa_kernels.calling import checks, private
from gdpa_kernels.calling.lengths import Lengths, extended_offsets
from gdpa_kernels.calling.sequences import (
    Sequences,
    read_sequences,
    token_positions,
    with_max_seqlen,
)

Offsets = torch.Tensor | Lengths | Sequences
Jagged = tuple[torch.Tensor, Offsets]


def to_padded_tensor(
    x: torch.Tensor | Jagged,
    padding: float = 0.0,
    max_seqlen: int | None = None,
    *,
    validate: bool = True,
) -> torch.Tensor:
    """The sequences one above the other, `[batch, max_seqlen, ...]`, `padding` beyond their ends.

    Args:
        x: a pair (values `[total_tokens, ...]`, offsets `[batch + 1]` or `Lengths`), or a nested
            tensor `[batch, jagged, ...]` of layout torch.jagged.
        max_seqlen: at least the longest sequence, in tokens; None for what `Lengths` or the nested
            tensor know, or else the longest itself, which waits for the device.
        validate: check the values of the offsets, which waits for the device; `Lengths` have been.
            A compiled program cannot, nor the capture of a CUDA graph.

    Raises:
        TypeError, ValueError: an argument is wrong: its name, what is expected, what was received.
    """
    values, sequences = read_jagged(x, max_seqlen=max_seqlen, validate=validate)
    cu_seqlens, longest, *_ = with_max_seqlen("offsets", sequences)
    sequence, position = token_positions(values.shape[0], cu_seqlens)
    padded = values.new_full((sequences.batch * longest, *values.shape[1:]), padding)
    padded.index_copy_(0, sequence * longest + position, values)
    return padded.view(sequences.batch, longest, *values.shape[1:])


def from_padded_tensor(
    padded: torch.Tensor, offsets: torch.Tensor | Lengths, *, validate: bool = True
) -> tuple[torch.Tensor, torch.Tensor | Lengths]:
    """The inverse of `to_padded_tensor`: (values `[total_tokens, ...]`, offsets) of padded
    `[batch, max_seqlen, ...]`. A tensor of offsets is read, which waits for the device.

    Raises TypeError, ValueError: as `to_padded_tensor`.
    """
    _check_padded("padded", "[batch, max_seqlen, ...]", padded)
    batch, most = padded.shape[:2]
    if not isinstance(offsets, Lengths):
        checks.check_offsets_tensor("offsets", offsets, padded.device)
    total = offsets.total if isinstance(offsets, Lengths) else max(int(offsets[-1]), 0)
    x = padded.new_empty(total, 0), offsets
    _, sequences = read_jagged(x, validate=validate)
    longest = sequences.max_seqlen or 0
    if batch != sequences.batch or most < longest:
        raise ValueError(
            f"padded must be of {sequences.batch} sequences, of up to {longest} tokens, got "
            f"{batch} of {most}"
        )
    sequence, position = token_positions(total, sequences.cu_seqlens)
    values = padded.flatten(0, 1).index_select(0, sequence * most + position)
    return like(x, values, sequences)


def mean(x: torch.Tensor | Jagged, *, validate: bool = True) -> torch.Tensor:
    """The mean of each sequence, `[batch, ...]`, summed in at least fp32; 0 without tokens.

    Arguments and errors: as `to_padded_tensor`; and TypeError for values that are no floating-point
    numbers.
    """
    values, sequences = read_jagged(x, validate=validate)
    if not values.is_floating_point():
        raise TypeError(f"x must have a floating-point dtype, got {values.dtype}")
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    means = torch.segment_reduce(wide, "mean", offsets=sequences.cu_seqlens, initial=0)
    return means.to(values.dtype)


def append(
    x: torch.Tensor | Jagged, tokens: torch.Tensor, *, validate: bool = True
) -> torch.Tensor | Jagged:
    """A batch of x's kind, `tokens` `[batch, count, ...]`, in x's dtype, at the ends of its
    sequences.

    The other arguments, and errors: as `to_padded_tensor`. The offsets of a pair come back as
    int32; from `Lengths` come `Lengths`, the same ones in each call.
    """
    values, sequences = read_jagged(x, validate=validate)
    batch, total, rest = sequences.batch, values.shape[0], values.shape[1:]
    _check_padded("tokens", "[batch, count, ...]", tokens)
    if (tokens.shape[0], *tokens.shape[2:]) != (batch, *rest):
        shape = ", ".join(map(str, (batch, "count", *rest)))
        raise ValueError(f"tokens must have shape [{shape}], got {list(tokens.shape)}")
    if tokens.is_floating_point() and not values.is_floating_point():
        raise TypeError(f"tokens must be of a kind with x's {values.dtype}, got {tokens.dtype}")
    count, (sequence, position) = tokens.shape[1], token_positions(total, sequences.cu_seqlens)
    longer = None if sequences.lengths is None else sequences.lengths.extended(count)
    ends = longer.cu_seqlens if longer else extended_offsets(sequences.cu_seqlens, count)
    appended = ends[1:, None] - count + torch.arange(count, device=ends.device)
    y = values.new_empty(total + batch * count, *rest)
    y.index_copy_(0, (ends[sequence] + position).long(), values)
    y.index_copy_(0, appended.flatten(), tokens.flatten(0, 1).to(y.dtype))
    if isinstance(x, torch.Tensor):
        return torch.nested.nested_tensor_from_jagged(y, extended_offsets(x.offsets(), count))
    return y, ends if longer is None else longer


def _check_padded(name: str, shape: str, x: object) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.is_nested or x.dim() < 2:
        got = "a nested tensor" if x.is_nested else list(x.shape)
        raise ValueError(f"{name} must have shape {shape}, got {got}")


def read_jagged(
    x: torch.Tensor | Jagged,
    embed_dim: int | None = None,
    max_seqlen: int | None = None,
    validate: bool = True,
    *,
    allow_padding: bool = False,
) -> tuple[torch.Tensor, Sequences]:
    """The values of a batch of any kind, `[total_tokens, embed_dim]`, or of any trailing shape with
    embed_dim None, and its sequences, as `read_sequences` has them.

    Raises TypeError, ValueError: x is wrong: what is expected, what was received.
    """
    checks.check_bool(validate=validate)
    values, offsets, longest = _parts(x)
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"values must be a tensor, got {type(values).__name__}")
    shape, wanted = values.shape, "..." if embed_dim is None else embed_dim
    if len(shape) < 1 or (embed_dim is not None and shape[1:] != (embed_dim,)):
        raise ValueError(f"values must have shape [total_tokens, {wanted}], got {list(shape)}")
    longest = longest if max_seqlen is None else max_seqlen
    options = {"validate": validate, "allow_padding": allow_padding}
    return values, read_sequences("offsets", offsets, shape[0], values.device, longest, **options)


def _parts(x: torch.Tensor | Jagged) -> tuple[object, object, int | None]:
    """Values, offsets and, if x knows it, at least the longest sequence."""
    if isinstance(x, tuple | list) and len(x) == 2:
        return *x, None
    kind = type(x).__name__
    if isinstance(x, torch.Tensor):
        if x.is_nested and x.layout == torch.jagged:
            return _parts_of_nested("x", x)
        kind = f"a tensor of layout {x.layout}{', nested' * x.is_nested}"
    raise TypeError(
        f"x must be a pair (values, offsets) or a nested tensor of layout torch.jagged, got {kind}"
    )


def _parts_of_nested(name: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
    """`_parts` of a nested tensor of layout torch.jagged, the argument `name`."""
    jagged, holes = private.jagged_dim(x), x.lengths() is not None
    if jagged != 1 or holes:
        raise ValueError(
            f"{name} must be a nested tensor [batch, jagged, ...] without holes between its "
            f"sequences, got {x.dim()} dimensions, of which {jagged} is jagged, "
            f"with{'' if holes else 'out'} holes"
        )
    return x.values(), x.offsets(), private.known_lengths(x)["max_seqlen"]


def is_nested(*arguments: object) -> bool:
    """Whether one of the arguments of an operator is a nested tensor."""
    # A list: a generator counts as a call for each argument.
    return True in [isinstance(x, torch.Tensor) and x.is_nested for x in arguments]


def unnest(
    tensors: dict[str, object], offsets: object, longest: int | None, letter: str
) -> tuple[list, object, int | None]:
    """(tensors, cu_seqlens, max_seqlen) of the arguments of an operator that have one set of
    offsets, those of `letter`: of nested tensors their values and the offsets that they bring.

    Raises ValueError for nested ones beside `offsets`, with holes, or beside others.
    """
    nested = {
        name: x
        for name, x in tensors.items()
        if isinstance(x, torch.Tensor) and x.is_nested and x.layout == torch.jagged
    }
    if not nested:
        return [*tensors.values()], offsets, longest
    first = next(iter(nested))
    if offsets is not None:
        raise ValueError(
            f"cu_seqlens_{letter} must be None where {first} is a nested tensor, which has its "
            f"offsets, got {type(offsets).__name__}"
        )
    parts = {name: _parts_of_nested(name, x) for name, x in nested.items()}
    _, offsets, known = parts[first]
    for name, x in tensors.items():
        if x is not None and (name not in parts or parts[name][1] is not offsets):
            kind = "other offsets" if name in parts else f"a {type(x).__name__} that is not nested"
            raise ValueError(f"{name} must be nested with the offsets of {first}, got {kind}")
    values = [parts[name][0] if name in parts else x for name, x in tensors.items()]
    return values, offsets, known if longest is None else longest


def like(
    x: torch.Tensor | Jagged, y: torch.Tensor, sequences: Sequences | None
) -> torch.Tensor | Jagged:
    """y `[total_tokens, ...]` as a jagged batch of x's kind, with x's sequences, which are None of
    a nested x."""
    if isinstance(x, torch.Tensor):
        return torch.nested.nested_tensor_from_jagged(y, x.offsets(), **private.known_lengths(x))
    return y, sequences.cu_seqlens if sequences.lengths is None else sequences.lengths
