"""Constants and launch of the forward rungs for CTA pairs whose K and V stream by, b6 and b7."""

import torch
import triton
import triton.language as tl

from gdpa_kernels.calling.launch import launch, multiprocessors
from gdpa_kernels.device.pairs import CTAS
from gdpa_kernels.device.ragged import ragged_descriptor
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.device.activations import foldable
from gdpa_kernels.gdpa.device.segments import entry_mask
from gdpa_kernels.gdpa.device.sums import add_up
from gdpa_kernels.gdpa.device.work_list import entry


@triton.aggregate
class Options:
    """The constants that the roles share."""

    GROUP: tl.constexpr
    ACTIVATION: tl.constexpr
    PACKED: tl.constexpr
    CAUSAL: tl.constexpr
    WINDOW: tl.constexpr
    DTYPE: tl.constexpr
    BLOCK_N: tl.constexpr
    BLOCK_D: tl.constexpr
    NUM_STAGES: tl.constexpr
    SLICES: tl.constexpr
    COLUMNS: tl.constexpr
    SHARE: tl.constexpr
    LOWER_RIGHT: tl.constexpr
    SEGMENTS: tl.constexpr
    TARGET_GROUP: tl.constexpr
    FULL_ROWS: tl.constexpr
    OWN_RANKS: tl.constexpr


@triton.jit
def keys_of(list_ptr, segments_ptr, item, options):
    """(first row, number of keys, mask) of an entry, which `query_tiles.span_of` takes."""
    _, _, len_q, _, len_k, _, first = entry(list_ptr, item)
    return first, len_k, entry_mask(list_ptr, segments_ptr, item, len_q, len_k, options)


def launch_forward_pairs(
    kernel: triton.JITFunction, batch: Batch, config: object, entries: torch.Tensor, rows: int
) -> torch.Tensor:
    """The output, `[total_q, num_heads, head_dim]`, by `kernel`, in one cluster of two CTAs for
    each pair of multiprocessors but no more clusters than `entries` of the work list.

    config: the launch constants of the rung. rows: query rows of a CTA's tile.
    """
    out = batch.new_out()
    packed = not batch.precise and foldable(batch.activation, batch.dtype)
    clusters = min(max(multiprocessors(batch.device) // CTAS.value, 1), len(entries) - 1)
    factor = batch.output_scale * batch.scale / 2 if packed else batch.output_scale
    kernel_out = out
    if batch.add_to is not None:
        kernel_out = out.new_empty(1, *out.shape, dtype=torch.float32)
    q_desc = ragged_descriptor(batch.q, rows, min_width=64)
    width = q_desc.block_shape[-1]
    out_width = width * batch.q.element_size() // kernel_out.element_size()
    launch(
        kernel, (CTAS.value * clusters,), batch.device,
        q_desc,
        ragged_descriptor(batch.k, config.BLOCK_N // CTAS.value, min_width=64),
        ragged_descriptor(batch.v, config.BLOCK_N, width=width // CTAS.value),
        ragged_descriptor(kernel_out.view(out.shape), rows, width=out_width),
        entries, batch.scale, factor,
        GROUP=batch.group, ACTIVATION=batch.names, PACKED=packed, CAUSAL=bool(batch.causal),
        WINDOW=batch.window, LOWER_RIGHT=batch.lower_right, **batch.segment_options,
        BLOCK_N=config.BLOCK_N, BLOCK_D=width, NUM_STAGES=config.num_stages,
        SLICES=config.slices, COLUMNS=config.columns, SHARE=config.share,
        REGISTERS=config.registers, num_warps=4, ctas_per_cga=(CTAS.value, 1, 1),
    )  # fmt: skip
    if kernel_out is not out:
        add_up(kernel_out, batch.add_to, out)
    return out
