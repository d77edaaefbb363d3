"""Offsets that the host has not read: checked on their GPU, without waiting for it, and rows
behind the last sequence, which no kernel writes, cleared.

A GPU stops at the first assertion that does not hold, as for an index of PyTorch out of range: it
prints the sentence, and the next call that waits for it raises RuntimeError.
"""

from collections.abc import Sequence

import torch

from gdpa_kernels.calling.launch import cdiv, launch, multiprocessors


def check_offsets(
    ends_q: torch.Tensor | None,
    ends_k: torch.Tensor,
    segments: torch.Tensor | None,
    rows: tuple[int, int],
    max_seqlens: tuple[int, int],
    *,
    name: str = "cu_seqlens",
    aligned: bool = False,
    equal: bool = False,
) -> None:
    """Assert on the device that int32 offsets `[sequences + 1]` are those of tensors with `rows`.

    ends_q None: a q that is shared, of max_seqlens[0] rows. segments: int32 `[sequences, 2]`,
    targets and contexts, which must fit. aligned: no sequence has fewer queries than keys. equal:
    each has as many.
    """
    from gdpa_kernels.device.offsets import check_kernel  # only here Triton is needed

    sequences, block = ends_k.numel() - 1, 512
    launch(
        check_kernel, (cdiv(max(sequences, 1), block),), ends_k.device,
        ends_q, ends_k, segments, sequences, *rows, *max_seqlens,
        NAME=name, ALIGNED=aligned, EQUAL=equal, BLOCK=block, num_warps=4,
    )  # fmt: skip


def clear_padding(
    tensors: Sequence[torch.Tensor | None],
    ends: Sequence[torch.Tensor | None],
    add_to: torch.Tensor | None = None,
) -> None:
    """Set the rows of up to three tensors behind their last sequence to 0, those of the first to
    what add_to has there; without waiting for the device.

    tensors: `[rows, heads, head_dim]`, the heads of a row side by side; None or without offsets:
    left as they are. ends: their offsets.
    """
    pairs = zip(tensors, ends, strict=True)
    pairs = [(x, e) for x, e in pairs if x is not None and e is not None and x.numel()]
    if not pairs:
        return
    device = pairs[0][0].device
    if device.type != "cuda":
        for i, (x, e) in enumerate(pairs):
            last = int(e[-1])
            x[last:] = 0 if add_to is None or i else add_to[last:]
        return
    clear_on_device(pairs, add_to, multiprocessors(device))


def clear_on_device(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], add_to: torch.Tensor | None, programs: int
) -> None:
    """`clear_padding` of tensors that there are, with their offsets."""
    from gdpa_kernels.device.offsets import clear_kernel

    arguments, constants = [], {}
    for i in range(3):
        x, e = pairs[i] if i < len(pairs) else (None, None)
        arguments += [x, e, 0 if x is None else x.shape[0]]
        constants[f"WIDTH_{i}"] = 0 if x is None else x.shape[1] * x.shape[2]
        constants[f"STRIDE_{i}"] = 0 if x is None else x.stride(0)
    add_to = None if add_to is None else add_to.contiguous()
    launch(
        clear_kernel, (programs,), pairs[0][0].device,
        *arguments, add_to, pairs[0][1].numel() - 1, **constants, BLOCK=1024, num_warps=4,
    )  # fmt: skip
