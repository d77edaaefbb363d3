"""What rungs whose tiles TMA loads need of a call."""

import torch

from gdpa_kernels.block_attention.batch import Batch
from gdpa_kernels.calling.rung import tma_problem

BLOCK = 64


def tiles_problem(batch: Batch, splits: bool = False) -> str | None:
    """What loading the tiles of a call by TMA needs beyond the fields of a rung and does not get,
    or None.

    splits: of a rung that pads tiles and splits heads, as `split` says.
    """
    if batch.block_size != BLOCK:
        return f"needs block_size {BLOCK}, got {batch.block_size}"
    if not splits and batch.head_dim not in (64, 128):
        return f"needs a head_dim of 64 or 128, got {batch.head_dim}"
    if splits and batch.head_dim not in range(64, 257, 8):
        return f"needs a head_dim of 64 to 256, a multiple of 8, got {batch.head_dim}"
    if splits and batch.head_dim > 128 and batch.group > 1:
        return (
            f"needs a key head for each query head where head_dim is above 128, got {batch.group} "
            f"query heads for one at head_dim {batch.head_dim}"
        )
    return None


def sin_cos_problem(rotary: tuple[torch.Tensor, torch.Tensor]) -> str | None:
    """What loading sin and cos by TMA needs and does not get, or None."""
    for name, turns in zip(("sin", "cos"), rotary, strict=True):
        if turns.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            dtype = str(turns.dtype).removeprefix("torch.")
            return f"needs {name} of dtype float32, bfloat16 or float16, got {dtype}"
        if tma_problem(turns[:, None]) is not None:
            return (
                f"needs {name} with contiguous rows whose address and stride are multiples of 16 "
                f"bytes, got strides {turns.stride()}"
            )
    return None
