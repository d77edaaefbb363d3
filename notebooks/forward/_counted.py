"""Bytes and FLOPs of an eager PyTorch program, counted without running it on data.

Tensors of the device `meta` have a shape and no contents, and a dispatch mode sees each operation.
So a program is executed on a full problem in milliseconds, and each of its steps is known by name,
shapes, bytes and FLOPs. `modelled_us` gives the time that they need at measured ceilings.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gdpa_lab.measuring.roofline import Ceilings


def account(name: str, inputs: list[torch.Tensor], result: torch.Tensor) -> tuple[int, int, int]:
    """Bytes read, bytes written and FLOPs of one step."""
    read, written = [t.nbytes for t in inputs], result.nbytes
    if name == "index":  # a gather reads no more rows than it writes
        read[0] = min(read[0], written)
    depth = inputs[0].shape[-1] if name == "bmm" else 0
    passes = 2 if name == "masked_fill" else 1  # copies, fills the copy
    return passes * sum(read), passes * written, 2 * result.numel() * depth


class Steps(TorchDispatchMode):
    """The steps that run inside the block, and the peak of the memory that they allocate."""

    def __init__(self, *inputs: torch.Tensor) -> None:
        super().__init__()
        self.steps: list[tuple] = []
        self.live: dict[StorageWeakRef, int] = {}
        self.given = {_storage(tensor) for tensor in inputs}
        self.peak_bytes = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        name, inputs = op.overloadpacket.__name__, _tensors(args, kwargs)
        if not op.is_view and name != "_unsafe_view":
            shapes = [tuple(t.shape) for t in (*inputs, result)]
            self.steps.append((name, shapes, *account(name, inputs, result)))
        if _storage(result) not in self.given:
            self.live[_storage(result)] = result.untyped_storage().nbytes()
        self.live = {s: n for s, n in self.live.items() if not s.expired()}
        self.peak_bytes = max(self.peak_bytes, sum(self.live.values()))
        return result


def count(run: Callable[[], object], *inputs: torch.Tensor) -> tuple[pd.DataFrame, int]:
    """The steps of `run()` and the peak of its memory in bytes; `inputs`: tensors that are not
    counted as allocated."""
    with Steps(*inputs) as seen:
        run()
    columns = ["op", "shapes", "bytes_read", "bytes_written", "flops"]
    return pd.DataFrame(seen.steps, columns=columns), seen.peak_bytes


def modelled_us(steps: pd.DataFrame, limits: Ceilings) -> np.ndarray:
    """The time of each step, in microseconds: of its bytes at the rate of a copy with the same mix
    of reads and writes, or of its FLOPs at the rate of a large matmul, whichever is longer."""
    counted = zip(steps["flops"], steps["bytes_read"], steps["bytes_written"], strict=True)
    return np.array([limits.floor_us(*one) if any(one[1:]) else 0.0 for one in counted])


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _tensors(args: tuple, kwargs: dict | None) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
