"""Global memory that `torch.empty` and its kin made, and that nothing has written since.

`fake_gpu` names what they make; kernels note, byte by byte, what they write to it, and so does a
call of PyTorch's that changes its first argument, or `out=`, of which the version tells. Another
write is taken for one of all of the storage, and so is what lets others write unseen (`x.data`,
`x.numpy()`). Tensors of inference mode have no version: not known.

PyTorch reads it, too: to compare or to sum up what kernels have written in part is a finding, also
after a copy. Other operations may well have results that nobody looks at, in padding.
"""

import contextvars
import mmap
import os
import sys
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from . import suppressions
from .errors import Location, UninitializedRead, option
from .launch import Report

_SKIPPED = tuple(os.path.join(os.path.dirname(file), "") for file in (__file__, torch.__file__))
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # that of Linux


def zeros(size: int, dtype: Any) -> torch.Tensor:
    """Allocate a one-dimensional tensor of a NumPy dtype; the system makes its pages once they are
    touched.

    torch.zeros writes them, and NumPy's are counted against the memory of the machine.
    """
    num_bytes = size * np.dtype(dtype).itemsize
    if num_bytes < 2**30 or not _NO_RESERVE:
        return torch.from_numpy(np.zeros(size, dtype))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    return torch.from_numpy(np.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype))


@dataclass(eq=False)
class Fresh:
    """A storage without values: where it was made, the version of its tensors then, its size in
    bytes.

    report: of the last launch that got it, None before one has.
    """

    storage: StorageWeakRef
    location: Location
    version: int
    num_bytes: int
    report: Report | None = None
    _bytes: list[torch.Tensor] = field(default_factory=list)

    def written(self, itemsize: int) -> torch.Tensor:
        """Return an integer for each element of that size: -1 once all of it is written."""
        if not self._bytes:
            self._bytes.append(zeros(max(self.num_bytes, 1), np.int8))  # no stride is 0
        whole = self.num_bytes // itemsize * itemsize
        return self._bytes[0][:whole].view(_INTEGERS[itemsize])


_KNOWN: dict[int, Fresh] = {}  # by the address of the storage, which a weak reference keeps
_SWEEP = [64]  # at how many of them those that are gone are looked for


def _functions(names: str) -> set[Any]:
    every = product((torch, torch.Tensor), names.split())
    return {getattr(*each) for each in every if callable(getattr(*each, None))}


# Functions that depend on every element, and those whose result has the same elements.
READS = {torch.testing.assert_close} | _functions(
    "allclose equal isclose sum mean amax amin max min argmax argmin any all norm item"
)
COPIES = _functions("clone contiguous to float double half bfloat16 int long")
JUDGED: contextvars.ContextVar[bool] = contextvars.ContextVar("judged", default=False)


def read(func: Any, tensor: torch.Tensor) -> None:
    """Raise UninitializedRead if PyTorch reads what kernels have left out, and it is judged."""
    fresh = of(tensor)  # forgets it after a write that nobody has seen
    written = _elements(tensor) if fresh and func in READS and JUDGED.get() else None
    if written is None or bool(written.all()):
        return
    missing = int((~written).sum())
    file, line = fresh.location
    finding = UninitializedRead(
        f"{func.__name__} of PyTorch reads {missing} of {written.numel()} elements that no kernel "
        f"has written; the memory is made, without values, at {file}:{line}; write "
        f"to it first, or allow it with {option('uninitialized', 'allow')}",
        _caller(),
        other=fresh.location,
        report=fresh.report,
    )
    suppressions.judge(finding, fresh.report)


def copied(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    """Record that this copy has the elements of the tensor, including unwritten ones."""
    written = _elements(tensor) if _KNOWN else None
    if written is None or copy.shape != tensor.shape or bool(written.all()):
        return
    if of(copy) is None:
        note(copy, of(tensor).location)
        if (fresh := of(copy)) is not None:
            fresh.report = of(tensor).report
            _marks(fresh, copy).copy_(-written.to(torch.int8))


def written(func: Any, args: Any, out: Any, inputs: list[torch.Tensor]) -> None:
    """Record what this call of PyTorch's has written of these tensors."""
    changed = (*args[:1], *(out if isinstance(out, tuple) else (out,)))
    for tensor in inputs:
        fresh = _noted(tensor)
        if fresh is None or tensor.is_inference() or fresh.version == tensor._version:
            continue
        if any(tensor is each for each in changed):
            _marks(fresh, tensor)[args[1] if func is torch.Tensor.__setitem__ else ...] = -1
            fresh.version = tensor._version


def _elements(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return which elements are written; None if that is not known, or no kernel got it yet."""
    fresh = of(tensor)
    return None if fresh is None or fresh.report is None else _marks(fresh, tensor) == -1


def _marks(fresh: Fresh, tensor: torch.Tensor) -> torch.Tensor:
    table = fresh.written(tensor.itemsize)
    return table.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _caller() -> Location:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def note(tensor: torch.Tensor, location: Location | None = None) -> None:
    """Record that this tensor is fresh; location: where it was made, None for here."""
    if tensor.is_inference() or tensor.layout != torch.strided or tensor.device.type != "cpu":
        return
    if len(_KNOWN) >= _SWEEP[0]:
        for address in [a for a, fresh in _KNOWN.items() if fresh.storage.expired()]:
            del _KNOWN[address]
        _SWEEP[0] = 64 + 2 * len(_KNOWN)
    storage = tensor.untyped_storage()
    reference = StorageWeakRef(storage)
    location = location or _caller()
    _KNOWN[reference.cdata] = Fresh(reference, location, tensor._version, storage.nbytes())


def forget(tensor: torch.Tensor) -> None:
    """Forget a tensor that something may write to unseen."""
    if _KNOWN and tensor.layout == torch.strided:
        _KNOWN.pop(tensor.untyped_storage()._cdata, None)


def _noted(tensor: torch.Tensor) -> Fresh | None:
    strided = _KNOWN and tensor.layout == torch.strided
    return _KNOWN.get(tensor.untyped_storage()._cdata) if strided else None


def of(tensor: Any) -> Fresh | None:
    """Return the record of the storage of a tensor that may be partly unwritten."""
    fresh = _noted(tensor)
    if fresh is None or tensor.is_inference():
        return None
    if (fresh.version, fresh.num_bytes) != (tensor._version, tensor.untyped_storage().nbytes()):
        forget(tensor)
        return None
    return fresh
