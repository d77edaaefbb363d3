"""v3: a persistent kernel: as many programs as fit on the device walk a list of tiles.

Changes from v2_tma: the grid no longer covers (sequence, head, block of max_seqlen_q). A tile
scheduler lists the tiles that exist, in an order of our choice; program p takes the entries p, p +
P, p + 2 P, ...

Why it should help: on a half-full batch nearly half of v2's programs find nothing to do, and with
real length distributions the heaviest tile may be started last. A list has no empty tiles and can
start with the longest.
Why it may not: an empty program of v2 costs one load and one comparison, the hardware gives the
next program to the first free slot, and a loop over tiles drains the software pipeline at every
tile, as a launch does.

| role      | warps     | registers | work                                                       |
|-----------|-----------|-----------|------------------------------------------------------------|
| all warps | num_warps | up to 255 | MMAs of one tile after another; thread 0 issues TMA copies |

| barrier       | arrivals    | filled by -> drained by                                |
|---------------|-------------|--------------------------------------------------------|
| one per stage | 1 and bytes | TMA load of K or V, num_stages - 1 blocks ahead -> MMA |

The compiler makes the barriers. The list is an argument: its cost is measured apart from the
kernel's.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gdpa_kernels.calling.launch import launch, multiprocessors
from gdpa_kernels.device.ragged import load_rows, ragged_descriptor, store_rows
from gdpa_kernels.device.sequences import sequence
from gdpa_kernels.gdpa.batch import Batch, WorkList
from gdpa_kernels.gdpa.device.activations import activate
from gdpa_kernels.gdpa.list_model import TileOrderRecipe, max_tiles
from gdpa_kernels.gdpa.published_form import call_problem as call_problem


@dataclass(frozen=True)
class Config:
    """Launch constants of v2, the order of the tiles, and the number of programs.

    `num_programs` 0 means `programs_per_sm` on every SM.
    """

    BLOCK_M: int = 128
    BLOCK_N: int = 64
    num_warps: int = 4
    num_stages: int = 2
    programs_per_sm: int = 2
    num_programs: int = 0
    order: str = "longest_first"

    def programs(self, device: torch.device) -> int:
        """The number of programs launched on `device`, unless there are fewer tiles."""
        return self.num_programs or multiprocessors(device) * self.programs_per_sm


def default_config(batch: Batch) -> Config:
    """The fastest of the swept constants at head_dim 128; smaller tiles where registers run out."""
    if batch.head_dim > 128:
        return Config(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2)
    if batch.max_seqlen_k <= 512:
        return Config(BLOCK_N=32, num_warps=8, num_stages=4)
    return Config()


def work_list_recipe(batch: Batch, config: Config) -> TileOrderRecipe:
    """The list of tiles of these sequences."""
    bound = max_tiles(batch.rows, batch.sequences, batch.max_seqlen_q, config.BLOCK_M)
    return TileOrderRecipe(
        config.order, batch.sequences, bound, batch.max_seqlen_q, batch.num_heads,
        config.BLOCK_M, config.BLOCK_N, config.programs(batch.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["max_seqlen_q"])
def persistent_kernel(
    q_desc, k_desc, v_desc, out_desc, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
    tile_batch_ptr, tile_head_ptr, tile_block_ptr, num_tiles_ptr,
    max_seqlen_q, scale, output_scale,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """output_scale * activation(scale * Q K^T) V for every listed tile of this program.

    cu_seqlens_q_ptr None: one q for all sequences.
    """
    num_tiles = tl.load(num_tiles_ptr)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        first_row = tl.load(tile_block_ptr + tile) * BLOCK_M
        head = tl.load(tile_head_ptr + tile)
        batch = tl.load(tile_batch_ptr + tile)
        start_q, start_out, len_q, start_k, len_k = sequence(
            cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, max_seqlen_q
        )

        q = load_rows(q_desc, start_q, len_q, head, first_row)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        end = tl.where(first_row < len_q, len_k, 0)  # an empty tile of order "padded"
        for first_key in tl.range(0, end, BLOCK_N):
            k = load_rows(k_desc, start_k, len_k, head, first_key)
            s = tl.dot(q, k.T)
            p = activate(s, scale, ACTIVATION, True)
            v = load_rows(v_desc, start_k, len_k, head, first_key)
            acc = tl.dot(p.to(v.dtype), v, acc)

        store_rows(out_desc, start_out, len_q, head, first_row, (acc * output_scale).to(q.dtype))


def forward(
    batch: Batch, *, config: Config | None = None, work_list: WorkList | None = None
) -> torch.Tensor:
    """The output, `[total_q, num_heads, head_dim]`."""
    out = batch.new_out()
    config = config or default_config(batch)
    tiles = work_list or work_list_recipe(batch, config).make(*batch.offsets)
    programs = min(config.programs(batch.device), len(tiles[0]))
    launch(
        persistent_kernel, (programs,), batch.device,
        ragged_descriptor(batch.q, config.BLOCK_M), ragged_descriptor(batch.k, config.BLOCK_N),
        ragged_descriptor(batch.v, config.BLOCK_N), ragged_descriptor(out, config.BLOCK_M),
        batch.cu_seqlens_q, batch.cu_seqlens_k, *tiles,
        batch.max_seqlen_q, batch.scale, batch.output_scale,
        ACTIVATION=batch.names, BLOCK_M=config.BLOCK_M, BLOCK_N=config.BLOCK_N,
        BLOCK_D=triton.next_power_of_2(batch.head_dim),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out
