"""`Lengths`: the lengths of a jagged batch, checked once and shared by the layers of a model.

Public calls and layers take them in place of a tensor of offsets. Invariants: the offsets are right
for `total` rows, and nobody has written to them since (`offsets_for` refuses them otherwise); what
`once` keeps depends on nothing but the offsets, the recipe and the `LaunchState`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from gdpa_kernels.calling import checks, launches
from gdpa_kernels.calling.private import unseen, version
from gdpa_kernels.calling.recipe import Recipe, T


class LaunchState(NamedTuple):
    """How a device launches now. What is made serves the same `stream` and `launched` alone.

    capturing: a CUDA graph captures the current stream. stream: that stream, None without CUDA.
    launched: False where `launches(run=False)` leaves kernels out, so that nothing fills a list.
    """

    capturing: bool
    stream: int | None
    launched: bool


def launch_state(device: torch.device) -> LaunchState:
    """The state of a device and the current thread."""
    launched = not launches.recorders or launches.are_made()
    if device.type != "cuda":
        return LaunchState(False, None, launched)
    stream = torch.cuda.current_stream(device).cuda_stream
    return LaunchState(checks.is_capturing(device), stream, launched)


class Lengths:
    """The offsets of a jagged batch, checked, with the work lists that kernels make of them.

    It stands wherever the operators and layers take `cu_seqlens`, and brings `max_seqlen`:

    >>> lengths = Lengths(cu_seqlens)                       # doctest: +SKIP
    >>> for layer in layers:
    ...     x = layer((x, lengths))[0]

    Making one waits for the device; calls that are given it wait only to check values of
    other arguments, as of num_targets. The offsets are copied: a later write to `cu_seqlens`
    changes nothing here. A work list is made by the first call that needs it, on the stream of that
    call, and serves all later ones there. In the capture of a CUDA graph none is kept; the graph
    repeats these lengths, which must live as long as it. A graph that is to read new offsets takes
    a tensor.

    Args:
        cu_seqlens: int32 or int64 `[batch + 1]`: sequence i holds the rows cu_seqlens[i] up to, not
            including, cu_seqlens[i + 1].
        max_seqlen: at least the longest sequence, in tokens; None for the longest itself. Kernels
            are chosen and launched for it, and `torch.compile` specializes on it.
        device: where the offsets go; None leaves them where they are. From the CPU to a GPU
            nothing waits.

    Attributes: cu_seqlens int32 `[batch + 1]`, device, max_seqlen, total (rows), batch (sequences).

    Raises:
        TypeError, ValueError: an argument is wrong: its name, what is expected, what was received.
    """

    def __init__(
        self,
        cu_seqlens: torch.Tensor,
        max_seqlen: int | None = None,
        *,
        device: torch.device | str | None = None,
    ):
        checks.check_offsets_tensor("cu_seqlens", cu_seqlens)
        if not checks.is_readable(cu_seqlens):
            raise ValueError(
                "cu_seqlens must have values to read, got a fake tensor, one that is being traced "
                "or one in the capture of a CUDA graph: make Lengths before"
            )
        if max_seqlen is not None:
            max_seqlen = checks.check_max_seqlen("max_seqlen", max_seqlen)
        total = _checked_total(int(cu_seqlens[-1]))
        longest, _ = checks.check_offset_values("cu_seqlens", cu_seqlens, total, max_seqlen)
        with torch.inference_mode(False):  # training may follow an evaluation
            # Copied before it goes to a device: a copy from pinned memory only joins the queue.
            offsets = cu_seqlens.to(torch.int32, copy=True)
            offsets = offsets.to(device, non_blocking=offsets.device.type == "cpu")
        self._set(offsets, total, longest if max_seqlen is None else max_seqlen)

    def _set(self, cu_seqlens: torch.Tensor, total: int, max_seqlen: int) -> Lengths:
        """Itself, with all attributes set, of offsets that are right."""
        if not torch.compiler.is_compiling() and cu_seqlens.is_inference():  # a copy made there
            with torch.inference_mode(False):
                cu_seqlens = cu_seqlens.clone()
        self.cu_seqlens, self.total, self.max_seqlen = cu_seqlens, total, max_seqlen
        self.device, self._version = cu_seqlens.device, version(cu_seqlens)
        # By the other Lengths that it was made with, or itself, which it does not keep alive.
        self._cached: WeakKeyDictionary[Lengths, dict[Hashable, object]] = WeakKeyDictionary()
        return self

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__:
            raise AttributeError(f"{name} of Lengths must stay as it is: make new ones")
        super().__setattr__(name, value)

    def __reduce__(self):
        self.check_unmodified("Lengths")
        return unchecked_lengths, (type(self), self.cu_seqlens, self.total, self.max_seqlen)

    @classmethod
    def uniform(cls, batch: int, length: int, device: torch.device | str) -> Lengths:
        """`batch` sequences of `length` rows on `device`; waits for nothing."""
        batch = checks.check_max_seqlen("batch", batch)
        length = checks.check_max_seqlen("length", length)
        total = _checked_total(batch * length)
        with torch.inference_mode(False):
            offsets = torch.arange(batch + 1, dtype=torch.int32, device=device) * length
        return unchecked_lengths(cls, offsets, total, length)

    def extended(self, count: int) -> Lengths:
        """The Lengths of the same sequences, `count` rows longer each; made once, without waiting
        for the device."""
        self.check_unmodified("Lengths")
        count = checks.check_max_seqlen("count", count)
        total = _checked_total(self.total + count * self.batch)
        return self.once(_Extended(type(self), total, self.max_seqlen + count, count))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Lengths:
        """These Lengths on a device, themselves if they are there; work lists are made anew there.
        `non_blocking`: as for a tensor, from the memory of `pin_memory`."""
        if not isinstance(device, torch.device | str | int):
            raise TypeError(f"device must be a torch.device, its name or index, got {device!r}")
        with torch.inference_mode(False):
            return self._moved(self.cu_seqlens.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Lengths:
        """These Lengths in pinned memory, themselves if they are there; a `DataLoader` with
        `pin_memory=True` calls it."""
        with torch.inference_mode(False):
            return self._moved(self.cu_seqlens.pin_memory())

    def _moved(self, cu_seqlens: torch.Tensor) -> Lengths:
        self.check_unmodified("Lengths")
        if cu_seqlens is self.cu_seqlens:
            return self
        return unchecked_lengths(type(self), cu_seqlens, self.total, self.max_seqlen)

    @property
    def batch(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    def check_unmodified(self, name: str) -> None:
        """Raises ValueError if the offsets of the argument `name` were written to."""
        if not torch.compiler.is_compiling() and version(self.cu_seqlens) != self._version:
            raise ValueError(
                f"{name} must not be modified after the check, got Lengths whose cu_seqlens were "
                "written to: make new ones"
            )

    def offsets_for(
        self,
        name: str,
        rows: int,
        device: torch.device,
        max_seqlen: int | None = None,
        *,
        allow_padding: bool = False,
    ) -> tuple[torch.Tensor, int]:
        """(cu_seqlens, max_seqlen) for a tensor of `rows` rows on `device`; these Lengths are the
        argument `name`. Raises ValueError unless they fit; with `allow_padding` rows may follow the
        last sequence."""
        self.check_unmodified(name)
        if self.total != rows and not (allow_padding and self.total < rows):
            most = "at most " * allow_padding
            raise ValueError(f"{name} must be of {most}{rows} rows as its tensor, got {self!r}")
        if self.device != device:
            raise ValueError(f"{name} must be on its tensor's device {device}, got {self!r}")
        if max_seqlen is not None and max_seqlen < self.max_seqlen:
            maximum = checks.max_seqlen_name(name)
            raise ValueError(f"{maximum} must be at least {self.max_seqlen}, got {max_seqlen}")
        return self.cu_seqlens, self.max_seqlen if max_seqlen is None else max_seqlen

    def once(
        self, recipe: Recipe[T], others: Lengths | None = None, state: LaunchState | None = None
    ) -> T:
        """What `recipe` makes of these offsets and of `others`, made once for equal recipes and
        each stream, and kept as long as both. A compiled program makes it each time; what the
        capture of a CUDA graph makes is not kept, and what `launches(run=False)` leaves unmade
        serves such calls alone. state: of the device, if that is known.
        """
        offsets = self.cu_seqlens, None if others is None else others.cu_seqlens
        if torch.compiler.is_compiling():
            return recipe.make(*offsets)
        capturing, stream, launched = state or launch_state(self.device)
        cached = self._cached.setdefault(self if others is None else others, {})
        key = recipe, others is None, stream, launched
        if key in cached:
            return cached[key]
        # Training may follow an evaluation. A mode that counts or replays operators must not see
        # what is made the first time alone, and a fake one would make it fake.
        with torch.inference_mode(False), unseen():
            result = recipe.make(*offsets)
        if not capturing:
            cached[key] = result
        return result

    def __repr__(self) -> str:
        return f"Lengths({self.batch} sequences of {self.total} rows on {self.device})"


@dataclass(frozen=True)
class _Extended(Recipe[Lengths]):
    """How `Lengths.extended` is made."""

    kind: type[Lengths]
    total: int
    max_seqlen: int
    count: int

    def make(self, cu_seqlens, others=None):
        offsets = extended_offsets(cu_seqlens, self.count)
        return unchecked_lengths(self.kind, offsets, self.total, self.max_seqlen)


def unchecked_lengths(
    kind: type[Lengths], cu_seqlens: torch.Tensor, total: int, max_seqlen: int
) -> Lengths:
    """Lengths of offsets that are known to be right."""
    return object.__new__(kind)._set(cu_seqlens, total, max_seqlen)


def _checked_total(total: int) -> int:
    if not 0 <= total < 2**31:
        raise ValueError(f"cu_seqlens must end below 2**31, got {total}")
    return total


def extended_offsets(cu_seqlens: torch.Tensor, count: int) -> torch.Tensor:
    """Offsets of the same sequences, `count` rows longer each."""
    index = torch.arange(len(cu_seqlens), dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return cu_seqlens + count * index
