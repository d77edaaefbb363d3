"""Global memory that `torch.empty` and its kin made, and that nothing has written since.

`fake_gpu` names what they make; kernels note, byte by byte, what they write to it. A write of
PyTorch's, of which its version tells, is taken for one of all of the storage, and so is what lets
others write unseen (`x.data`, `x.numpy()`). Tensors of inference mode have no version: not known.
"""

import mmap
import os
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .errors import Location

_SKIPPED = tuple(os.path.join(os.path.dirname(file), "") for file in (__file__, torch.__file__))
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # that of Linux


def zeros(size: int, dtype: Any) -> torch.Tensor:
    """A one-dimensional tensor of a NumPy dtype; the system makes its pages once they are touched.

    torch.zeros writes them, and NumPy's are counted against the memory of the machine.
    """
    num_bytes = size * np.dtype(dtype).itemsize
    if num_bytes < 2**30 or not _NO_RESERVE:
        return torch.from_numpy(np.zeros(size, dtype))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype))


@dataclass(eq=False)
class Fresh:
    """Of a storage: where it was made, the version of its tensors then, its size in bytes."""

    storage: StorageWeakRef
    at: Location
    version: int
    num_bytes: int
    _bytes: list[torch.Tensor] = field(default_factory=list)

    def written(self, itemsize: int) -> torch.Tensor:
        """An integer for each element of that size: -1 once all of it is written."""
        if not self._bytes:
            self._bytes.append(zeros(self.num_bytes, np.int8))
        whole = self.num_bytes // itemsize * itemsize
        return self._bytes[0][:whole].view(_INTEGERS[itemsize])


_KNOWN: dict[int, Fresh] = {}  # by the address of the storage, which a weak reference keeps
_SWEEP = [64]  # at how many of them those that are gone are looked for


def note(tensor: torch.Tensor) -> None:
    """This tensor is fresh."""
    if tensor.is_inference() or tensor.layout != torch.strided or tensor.device.type != "cpu":
        return
    if len(_KNOWN) >= _SWEEP[0]:
        for address in [a for a, fresh in _KNOWN.items() if fresh.storage.expired()]:
            del _KNOWN[address]
        _SWEEP[0] = 64 + 2 * len(_KNOWN)
    storage, frame = tensor.untyped_storage(), sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    at = frame.f_code.co_filename, frame.f_lineno
    reference = StorageWeakRef(storage)
    _KNOWN[reference.cdata] = Fresh(reference, at, tensor._version, storage.nbytes())


def forget(tensor: torch.Tensor) -> None:
    """Something may write to it that is not seen."""
    if _KNOWN and tensor.layout == torch.strided:
        _KNOWN.pop(tensor.untyped_storage()._cdata, None)


def of(tensor: Any) -> Fresh | None:
    """What is known of the storage of a tensor that may be partly unwritten."""
    fresh = _KNOWN.get(tensor.untyped_storage()._cdata) if _KNOWN else None
    if fresh is None or tensor.is_inference():
        return None
    if (fresh.version, fresh.num_bytes) != (tensor._version, tensor.untyped_storage().nbytes()):
        forget(tensor)
        return None
    return fresh
