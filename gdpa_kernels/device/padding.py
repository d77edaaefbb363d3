"""Offsets that the host has not read: checked on their GPU, without waiting for it, and rows
behind the last sequence, which no kernel writes, cleared.

A GPU stops at the first assertion that does not hold, as for an index of PyTorch out of range: it
prints the sentence, and the next call that waits for it raises RuntimeError.
"""

import torch

from gdpa_kernels.calling.launch import cdiv, launch, multiprocessors


def assert_offsets(
    ends_q: torch.Tensor | None,
    ends_k: torch.Tensor,
    segments: torch.Tensor | None,
    rows: tuple[int, int],
    max_seqlens: tuple[int, int],
    *,
    name: str = "cu_seqlens",
    aligned: bool = False,
    equal: bool = False,
    allow_padding: bool = True,
) -> None:
    """Assert on the device that int32 offsets `[sequences + 1]` are those of tensors with `rows`;
    with `allow_padding` rows may follow the last sequence.

    ends_q None: a q that is shared, of max_seqlens[0] rows. segments: int32 `[sequences, 2]`,
    targets and contexts, which must fit. aligned: no sequence has fewer queries than keys. equal:
    each has as many.
    """
    from gdpa_kernels.device.offsets import check_kernel  # only here Triton is needed

    sequences, block = ends_k.numel() - 1, 512
    launch(
        check_kernel, (cdiv(max(sequences, 1), block),), ends_k.device,
        ends_q, ends_k, segments, sequences, *rows, *max_seqlens,
        NAME=name, ALIGNED=aligned, EQUAL=equal, PADDING=allow_padding, BLOCK=block, num_warps=4,
    )  # fmt: skip


def clear_padding(
    x: torch.Tensor | None,
    ends: torch.Tensor | None,
    other: torch.Tensor | None = None,
    add_to: torch.Tensor | None = None,
) -> None:
    """Set the rows of x and of `other` behind the last sequence to 0, those of x to what add_to has
    there; without waiting for the device.

    x, other: `[rows, heads, head_dim]` of one shape, the heads of a row side by side; None: nothing
    to clear. ends: their offsets; None: every row is of a sequence.
    """
    tensors = [each for each in (x, other) if each is not None and each.numel()]
    if ends is None or not tensors:
        return
    if not ends.is_cuda:
        last = int(ends[-1])
        for each in tensors:
            each[last:] = add_to[last:] if each is x and add_to is not None else 0
    elif len(tensors) == 2 and x.stride() != other.stride():
        for each in tensors:
            clear_on_device([each], ends, None, multiprocessors(ends.device))
    else:
        clear_on_device(tensors, ends, add_to, multiprocessors(ends.device))


def clear_on_device(
    tensors: list[torch.Tensor], ends: torch.Tensor, add_to: torch.Tensor | None, programs: int
) -> None:
    """`clear_padding` of one tensor or two with the same strides."""
    from gdpa_kernels.device.offsets import clear_kernel

    x, *others = tensors
    launch(
        clear_kernel, (programs,), ends.device,
        x, others[0] if others else None, None if add_to is None else add_to.contiguous(), ends,
        x.shape[0], ends.numel() - 1, WIDTH=x.shape[1] * x.shape[2], STRIDE=x.stride(0), BLOCK=1024,
    )  # fmt: skip
