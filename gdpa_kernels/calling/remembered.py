"""What is made on a GPU from tensors of offsets, used again as long as nothing has changed.

The layers of a model share their offsets, and a backward pass shares its forward's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from gdpa_kernels.calling.launch import current_device, current_stream, recorder

T = TypeVar("T")


class Remembered(Generic[T]):
    """The results of `make`, each kept for the tensors that it was made from.

    A result is used again for the same tensors, unmodified, with equal sizes, on the same stream:
    another stream would not wait for it. "Unmodified": the modifications that PyTorch counts
    (`Tensor._version`), the address and the number of elements are what they were. What
    `tensor.data = other` does is not counted, but gives another address; it is another one because
    the memory of the tensors is kept with their result, and memory in use is not handed out again.
    What writes to the address without PyTorch goes unnoticed.

    Never remembered, and made in every call:

    - in the capture of a CUDA graph, which has to read the offsets on each replay. PyTorch tells of
      a capture on the current device alone, so on another device nothing is remembered either;
    - for a tensor made in inference mode, which does not count its modifications;
    - without a GPU: the emulator is to execute what it is asked for.

    A result goes with its tensors. Beyond `most` results the oldest goes first.
    """

    def __init__(self, make: Callable[..., T], most: int = 64) -> None:
        self.make = make
        self.most = most
        self.known: dict[tuple, tuple] = {}  # two weak references, stamp, result, memory

    def of(self, tensor: torch.Tensor, other: torch.Tensor | None, sizes: tuple) -> T:
        """`make(tensor, other, *sizes)`, or what it returned for the same before.

        `other` is a second tensor, on the device of the first, or None. `make` must depend on
        nothing else but its arguments, the device and the stream.
        """
        if recorder.now is not None:
            return recorder.now.asked(self, tensor, other, sizes)
        if (
            not tensor.is_cuda
            or (index := tensor.device.index) != current_device()
            or torch.cuda.is_current_stream_capturing()
        ):
            return self.make(tensor, other, *sizes)
        key = id(tensor), id(other), current_stream(index), index, sizes
        known = self.known.get(key)
        if known is not None:
            ref, other_ref, stamp, result, _ = known
            if (
                ref() is tensor
                and (other is None or other_ref() is other)
                and stamp == _stamp(tensor, other)
            ):
                return result
        if tensor.is_inference() or (other is not None and other.is_inference()):
            return self.make(tensor, other, *sizes)
        # Before the result is made: what modifies them meanwhile must not go unnoticed.
        stamp = _stamp(tensor, other)
        result = self.make(tensor, other, *sizes)
        self._keep(key, tensor, other, stamp, result)
        return result

    def _keep(self, key, tensor, other, stamp: tuple, result: T) -> None:
        while len(self.known) >= self.most:
            self.known.pop(next(iter(self.known)), None)

        def forget(_):
            self.known.pop(key, None)

        other_ref, memory = None, [tensor.untyped_storage()]
        if other is not None:
            other_ref = weakref.ref(other, forget)
            memory.append(other.untyped_storage())
        self.known[key] = weakref.ref(tensor, forget), other_ref, stamp, result, memory


def _stamp(tensor: torch.Tensor, other: torch.Tensor | None) -> tuple:
    """Another one once a tensor was modified, resized or given other memory."""
    if other is None:
        return tensor._version, tensor.data_ptr(), tensor.numel()
    return (
        tensor._version, tensor.data_ptr(), tensor.numel(),
        other._version, other.data_ptr(), other.numel(),
    )  # fmt: skip
