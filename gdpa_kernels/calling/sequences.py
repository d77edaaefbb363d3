"""`Sequences`: the offsets of one tensor of a call, read and checked once.

Operators, layers, `jagged` and `score` read offsets by `read_sequences`. `gdpa` takes the
`Sequences` of a caller as they are, so that nobody checks them twice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gdpa_kernels.calling import checks
from gdpa_kernels.calling.checks import INT32_MAX
from gdpa_kernels.calling.lengths import Lengths
from gdpa_kernels.calling.recipe import Recipe, T


class Sequences(NamedTuple):
    """The sequences of a tensor.

    cu_seqlens: int32 `[batch + 1]`, contiguous; None of a q that all sequences share. max_seqlen:
    at least the longest sequence, None if unknown. may_have_padding: rows may follow the last
    sequence. check_values: the host could not read the offsets, and a kernel is to check them.
    lengths: the `Lengths` that they come from, if any.
    """

    cu_seqlens: torch.Tensor | None
    max_seqlen: int | None = None
    may_have_padding: bool = False
    check_values: bool = False
    lengths: Lengths | None = None

    @property
    def batch(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    def once(self, recipe: Recipe[T]) -> T:
        """The result of a recipe, made once for all users of `Lengths`."""
        return recipe.make(self.cu_seqlens) if self.lengths is None else self.lengths.once(recipe)


def read_sequences(
    name: str,
    offsets: object,
    rows: int,
    device: torch.device,
    max_seqlen: int | None = None,
    *,
    validate: bool = True,
    allow_padding: bool = True,
) -> Sequences:
    """The sequences of a tensor of `rows` rows on `device`, from the argument `name`: offsets
    `[batch + 1]`, `Lengths` or `Sequences`.

    validate: check the values, which waits for the device, unless they are `Lengths` or
    `Sequences`. allow_padding: rows may follow the last sequence. Raises TypeError or ValueError:
    what is expected, what was received.
    """
    if max_seqlen is not None and not (type(max_seqlen) is int and 0 <= max_seqlen <= INT32_MAX):
        max_seqlen = checks.check_max_seqlen(checks.max_seqlen_name(name), max_seqlen)
    if isinstance(offsets, Sequences):
        return offsets if max_seqlen is None else offsets._replace(max_seqlen=max_seqlen)
    if isinstance(offsets, Lengths):
        known = offsets.offsets_for(name, rows, device, max_seqlen, allow_padding=allow_padding)
        return Sequences(*known, offsets.total < rows, False, offsets)
    checks.check_offsets_tensor(name, offsets, device)
    may_have_padding, unread = allow_padding, validate and not checks.is_readable(offsets)
    if validate and not unread:
        longest, end = checks.check_offset_values(
            name, offsets, rows, max_seqlen, allow_padding=allow_padding
        )
        max_seqlen = longest if max_seqlen is None else max_seqlen
        may_have_padding = end < rows
    if offsets.dtype != torch.int32 or not offsets.is_contiguous():
        offsets = checks.to_int32(offsets, unread)
    return Sequences(offsets, max_seqlen, may_have_padding, unread)


def with_max_seqlen(name: str, sequences: Sequences) -> Sequences:
    """The sequences with a max_seqlen: the longest itself where none is known, which waits for the
    device. Raises TypeError where the offsets `name` cannot be read."""
    if sequences.max_seqlen is not None:
        return sequences
    if not (torch.compiler.is_compiling() or checks.is_readable(sequences.cu_seqlens)):
        raise TypeError(
            f"{checks.max_seqlen_name(name)} must be given where {name} cannot be read, of a fake "
            "tensor or in the capture of a CUDA graph, got None"
        )
    return sequences._replace(max_seqlen=longest_sequence(sequences.cu_seqlens))


def longest_sequence(cu_seqlens: torch.Tensor) -> int:
    """The longest sequence, in tokens; waits for the device."""
    longest = cu_seqlens.diff(prepend=cu_seqlens[:1]).max().item()
    torch._check(longest >= 0)
    return longest


def token_positions(total: int, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequence of each of `total` tokens, and its position in that sequence; waits for no
    device."""
    tokens = torch.arange(total, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    # The last sequence that starts at or before a token holds it; empty ones start there too.
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)
    return sequence, tokens - cu_seqlens[sequence]
