"""What the backward rungs share that compute dQ, dK and dV in one kernel: the rows of a step, dQ
added up in fp32 and rounded, and `launch_gradients`, which launches the warp-specialized ones.

dQ is complete where one program sees all keys of a row. Else programs add their parts to memory by
TMA reduce-adds, in any order, and `round_kernel` makes dQ of the sums.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from gdpa_kernels.calling.launch import cdiv, launch, multiprocessors
from gdpa_kernels.device.ragged import BOUND, ragged_descriptor, tma_readable
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.device.activations import foldable
from gdpa_kernels.gdpa.device.masks import row_range


def few_keys_problem(batch: Batch, most: int) -> str | None:
    """The reason why a rung that writes dQ once, from all of at most `most` keys, cannot take a
    call; None if it can."""
    if batch.shared_q:
        return "needs cu_seqlens_q, got None: a shared q"
    if batch.max_seqlen_k > most:
        return f"needs a max_seqlen_k of at most {most}, got {batch.max_seqlen_k}"
    return None


def sums_commute(batch: Batch, keys: int) -> bool:
    """True if reduce-adds of dQ give the same bits in any order: a tile of `keys` keys adds once,
    two additions to zero commute, and with a third their order shows."""
    return batch.max_seqlen_k <= 2 * keys and not batch.shared_q


@triton.aggregate
class Gradients:
    """TMA descriptors of dQ, or of the sum that becomes it, of dK and of dV."""

    dq: tl.tensor_descriptor
    dk: tl.tensor_descriptor
    dv: tl.tensor_descriptor


@triton.jit
def steps_of(key, len_q, ROWS: tl.constexpr, KEYS: tl.constexpr, options):
    """(first row, steps) of the tile of KEYS keys at `key`. Prologue and epilogue need a step:
    without rows it adds zero."""
    start, end = row_range(key, len_q, ROWS, KEYS, options.CAUSAL, options.WINDOW)
    return start, tl.maximum(tl.cdiv(end - start, ROWS), 1)


@triton.jit
def head_and_row(step, steps, start, head_k, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """(head, row) of a step: the rows from `start` on of the group's first head, in `steps` steps,
    then of the next."""
    if GROUP == 1:
        return head_k, start + step * ROWS
    return head_k * GROUP + step // steps, start + step % steps * ROWS


@triton.jit
def add_rows(desc, start, length, head, first_row, rows):
    """Add `rows` of one head at first_row, by a TMA reduce-add; rows from `length` on are dropped.

    Addressed as in `ragged.store_rows`. Each element is added atomically, in any order.
    """
    box = tl.reshape(rows, [1, 1, 1, desc.block_shape[3], desc.block_shape[4]])
    desc.atomic_add([BOUND, start + length, head, BOUND - length + first_row, 0], box)


@triton.jit
def round_kernel(
    sums_ptr, out_ptr, factor, count, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr = 1, STRIDE: tl.constexpr = 1,
):  # fmt: skip
    """out = factor * sums, `count` elements, rounded to out's dtype; rows of WIDTH elements, which
    start STRIDE apart in out."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    sums = tl.load(sums_ptr + offsets, mask=mask, other=0.0)
    if STRIDE != WIDTH:
        offsets = offsets // WIDTH * STRIDE + offsets % WIDTH
    tl.store(out_ptr + offsets, (factor * sums).to(out_ptr.dtype.element_ty), mask=mask)


def rounded_dq(sums: torch.Tensor, dq: torch.Tensor, factor: float, batch: Batch) -> torch.Tensor:
    """dq = factor * sums, fp32 `[rows, num_heads, head_dim]`; for a shared q the sum over the
    sequences, in new memory."""
    if batch.shared_q:
        return (sums.view(batch.sequences, *dq.shape).sum(0) * factor).to(dq.dtype)
    launch(
        round_kernel, (cdiv(dq.numel(), 4096),), batch.device,
        sums, dq, factor, dq.numel(), BLOCK=4096,
        WIDTH=dq.shape[1] * dq.shape[2], STRIDE=dq.stride(0),
    )  # fmt: skip
    return dq


def tile_descriptors(
    grad_out: torch.Tensor, batch: Batch, rows: int, keys: int, columns: int | None = None
) -> tuple[TensorDescriptor, ...]:
    """Descriptors of q, k, v and grad_out, which is copied where TMA cannot read it, in boxes of
    `rows` rows of q and grad_out and of `keys` rows of k and v. columns: `width` of
    `ragged_descriptor`."""
    tensors = (batch.q, rows), (batch.k, keys), (batch.v, keys), (tma_readable(grad_out), rows)
    return tuple([ragged_descriptor(*each, width=columns) for each in tensors])


def launch_gradients(
    kernel: triton.JITFunction, batch: Batch, config: object, loads: Sequence[TensorDescriptor],
    boxes: tuple[tuple[int, int | None], ...], work: tuple[object, ...], items: int,
    *, ctas: int = 1, adds: bool = True, **constants: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv) by `kernel`, in clusters of `ctas` programs, one for each multiprocessor but no
    more clusters than `items`.

    The kernel takes the descriptors `loads`; those of dq, dk and dv, in `boxes` of (rows, width,
    None for the whole head_dim); `work`; scale and output_scale; and those constants of `batch` and
    `config` that it has a parameter for, q_stages as Q_STAGES, and FOLD only where
    `foldable`; `constants` come before those.
    adds: dq is a sum in fp32, which starts from zero and is rounded by a kernel after this one.
    """
    fold = getattr(config, "fold", True) and foldable(batch.activation, batch.dtype)
    known = {
        "GROUP": batch.group, "NUM_HEADS_K": batch.num_heads_k, "SHARED_Q": batch.shared_q,
        "ACTIVATION": batch.names, "CAUSAL": bool(batch.causal), "WINDOW": batch.window,
        "LOWER_RIGHT": batch.lower_right, "HEAD_DIM": batch.head_dim, **batch.segment_options,
        **{name.upper(): value for name, value in vars(config).items()}, "FOLD": fold, **constants,
    }  # fmt: skip
    options = {name: known[name] for name in kernel.arg_names if name in known}
    if ctas > 1:
        options["ctas_per_cga"] = (ctas, 1, 1)
    dq, dk, dv = batch.new_gradients()
    stored = dq
    if adds:
        shape = batch.rows, *batch.q.shape[1:]
        stored = torch.zeros(shape, dtype=torch.float32, device=batch.device)
    stores = zip((stored, dk, dv), boxes, strict=True)
    clusters = min(max(multiprocessors(batch.device) // ctas, 1), items)
    launch(
        kernel, (ctas * clusters,), batch.device,
        *loads, *[ragged_descriptor(x, rows, width=width) for x, (rows, width) in stores],
        *work, batch.scale, batch.output_scale, **options, num_warps=4,
    )  # fmt: skip
    if not adds:
        return dq, dk, dv
    factor = (0.5 if fold else 1.0) * batch.scale * batch.output_scale
    return rounded_dq(stored, dq, factor, batch), dk, dv
