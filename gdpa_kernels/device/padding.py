"""Offsets that the host has not read: checked on their GPU, without waiting for it, and rows
behind the last sequence, which no kernel writes, cleared.

A GPU stops at the first assertion that does not hold, as for an index of PyTorch out of range: it
prints the sentence, and the next call that waits for it raises RuntimeError.
"""

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
    x: torch.Tensor | None,
    ends: torch.Tensor | None,
    keys: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    ends_k: torch.Tensor | None = None,
    add_to: torch.Tensor | None = None,
) -> None:
    """Set the rows behind the last sequence to 0: those of x by the offsets `ends`, and of dk and
    dv, or of one gradient of both, by ends_k; all contiguous. x gets what add_to has there. Waits
    for no device."""
    k, v = keys
    x = None if ends is None else x
    tensors = [each for each in (x, k, v) if each is not None and each.numel()]
    if not tensors:
        return
    if tensors[0].device.type != "cuda":
        for each in tensors:
            last = int((ends if each is x else ends_k)[-1])
            each[last:] = 0 if each is not x or add_to is None else add_to[last:]
        return
    numel, numel_k, numel_v = (0 if each is None else each.numel() for each in (x, k, v))
    width, width_k = (0 if each is None else each[:1].numel() for each in (x, k))
    device, some = tensors[0].device, ends if ends_k is None else ends_k
    add_to = None if add_to is None or x is None else add_to.contiguous()
    from gdpa_kernels.device.offsets import clear_kernel

    launch(
        clear_kernel, (multiprocessors(device),), device,
        x, add_to, k, v, ends, ends_k, some.numel() - 1, numel, numel_k, numel_v,
        WIDTH=width, WIDTH_K=width_k, BLOCK=1024, num_warps=4,
    )  # fmt: skip
