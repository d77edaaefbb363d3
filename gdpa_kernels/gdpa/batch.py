"""The arguments of a call of `gdpa` as its implementations take them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from gdpa_kernels.calling import checks
from gdpa_kernels.calling.base_batch import BaseBatch, GradientTriple
from gdpa_kernels.calling.launch import next_power_of_2
from gdpa_kernels.calling.recipe import WorkList as WorkList
from gdpa_kernels.gdpa.bias import NONE, Bias
from gdpa_kernels.gdpa.device.custom import cache_key
from gdpa_kernels.gdpa.mask import ALL, Mask, segment_pairs


@dataclass(frozen=True)
class PagedKV:
    """Cached keys and values that each sequence begins with, in pages, for kernels that read them
    there: a page pool and a page table of the sequences.

    pool `[num_pages * 2 * page_size, num_heads_k, head_dim]`, contiguous, in the layout of
    device/page_layout.py. Sequence i has the pages kv_indices[kv_indptr[i]] up to, not including,
    kv_indices[kv_indptr[i + 1]], and cu_seqlens[i + 1] - cu_seqlens[i] tokens in them; all int32.
    tokens: those of all sequences.
    """

    pool: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    cu_seqlens: torch.Tensor
    page_size: int
    tokens: int


@dataclass(frozen=True)
class Batch(BaseBatch):
    """A jagged batch and what is to be computed of it; already validated.

    q `[total_q, num_heads, head_dim]`, or `[max_seqlen_q, num_heads, head_dim]` with cu_seqlens_q
    None: shared by all sequences; k, v `[total_k, num_heads_k, head_dim]`; cu_seqlens_q and
    cu_seqlens_k int32 `[sequences + 1]`; `activation`: one name, or one for each query head;
    `mask`: without counts of targets and contexts, which `segments`, int32 `[sequences, 2]`, has
    for each sequence; `precise`: not in packed arithmetic; `gradients`: where dq, dk and dv are to
    be written, of any strides, None for memory of their own; `out_dtype`: of the output, None for
    q's; `add_to`: of the output's shape, what the sum starts from; `bias`: what is added to the
    scores (bias.py), with a cu_seqlens_q; `paged_kv`: `PagedKV` that each sequence's keys begin
    with, which cu_seqlens_k and max_seqlen_k count; k and v are then those that follow, with q's
    offsets, or have no rows; `may_have_padding`: rows may follow the last sequence, of
    which the output needs no value. `causal`, False, True (positions start with their sequence) or
    "lower_right" (they end with it), and `window` are the mask's.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    activation: tuple[str, ...]
    scale: float
    output_scale: float = 1.0
    mask: Mask = ALL
    precise: bool = False
    gradients: GradientTriple = (None, None, None)
    out_dtype: torch.dtype | None = None
    add_to: torch.Tensor | None = None
    segments: torch.Tensor | None = None
    bias: Bias = NONE
    paged_kv: PagedKV | None = None
    may_have_padding: bool = False
    causal: bool | str = field(init=False)
    window: int | None = field(init=False)

    def __post_init__(self) -> None:
        mask, changed = self.mask, {}
        # A window that every pair is inside of masks nothing; kernels add to it in 32 bits.
        if mask.window is not None and mask.window >= max(self.q.shape[0], self.k.shape[0]):
            changed = {"window": None, "full_rows": 0}
        if self.segments is not None:  # likewise
            most = min(next_power_of_2(max(self.max_seqlen_k, 1)), 2**30)
            names = "full_rows", "target_group_size"
            changed = {x: most for x in names if getattr(mask, x) > most} | changed
        if changed:
            mask = replace(mask, **changed)
            object.__setattr__(self, "mask", mask)
        causal = mask.causal if mask.causal == "lower_right" else mask.causal is not False
        object.__setattr__(self, "causal", causal)
        object.__setattr__(self, "window", mask.window)

    @property
    def offsets(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """cu_seqlens_k and cu_seqlens_q, as a `Recipe` takes them."""
        return self.cu_seqlens_k, self.cu_seqlens_q

    @property
    def sequences(self) -> int:
        return self.cu_seqlens_k.shape[0] - 1

    @property
    def rows(self) -> int:
        """Rows of the output."""
        rows = self.q.shape[0]
        return rows * self.sequences if self.cu_seqlens_q is None else rows

    @property
    def mean_seqlen_k(self) -> float:
        paged = 0 if self.paged_kv is None else self.paged_kv.tokens
        return (self.k.shape[0] + paged) / (self.sequences or 1)

    @property
    def shared_q(self) -> bool:
        return self.cu_seqlens_q is None

    @property
    def masked(self) -> bool:
        return bool(self.causal) or self.window is not None

    @property
    def lower_right(self) -> bool:
        """Whether positions end, and do not start, with their sequence."""
        return self.causal == "lower_right"

    @property
    def shares_positions(self) -> bool:
        """Whether targets share the position after the history, where a bias counts them."""
        return self.segments is not None and self.mask.target_ranks == "shared"

    @property
    def extras(self) -> dict[str, str]:
        needed = {}
        if self.lower_right:
            needed["causal"] = "causal False, True or 'upper_left', got 'lower_right'"
        if self.out_dtype not in (None, self.dtype):
            needed["out_dtype"] = f"out_dtype None or {self.dtype}, got {self.out_dtype}"
        if self.add_to is not None:
            needed["add_to"] = f"add_to None, got a tensor of shape {list(self.add_to.shape)}"
        if self.segments is not None:
            needed["targets"] = "num_targets and num_contexts None and full_rows 0, got one of them"
        if self.bias.is_given:
            needed["bias"] = "relative_bias None, got a RelativeBias"
        if self.paged_kv is not None:
            needed["paged_kv"] = "all keys in k, got keys in pages"
        return needed

    @property
    def segment_options(self) -> dict[str, object]:
        """Arguments of kernels for contexts and targets."""
        return {
            "segments_ptr": self.segments, "TARGET_GROUP": self.mask.target_group_size,
            "FULL_ROWS": self.mask.full_rows, "OWN_RANKS": self.mask.target_ranks == "own",
        }  # fmt: skip

    @property
    def paged_kv_options(self) -> dict[str, object]:
        """What a kernel takes of keys in pages, beside a descriptor of the pool."""
        paged = self.paged_kv
        return {
            "kv_indices_ptr": paged and paged.kv_indices,
            "kv_indptr_ptr": paged and paged.kv_indptr,
            "paged_ends_ptr": paged and paged.cu_seqlens,
            "PAGE_SIZE": paged and paged.page_size,
            "HAS_PACKED": paged is not None and self.k.shape[0] > 0,
        }

    @property
    def bias_options(self) -> dict[str, object]:
        """What the plain kernels take of a bias: pointers, and of each table its entries and the
        entries between two heads (bias_tiles.py)."""
        tables, sizes = (self.bias.position_table, self.bias.time_table), ()
        for x in tables if self.bias.is_given else ():
            sizes += (0, 0) if x is None else (x.shape[1], x.shape[1] * (len(x) > 1))
        return {
            "position_ptr": tables[0], "time_ptr": tables[1], "times_q_ptr": self.bias.times_q,
            "times_k_ptr": self.bias.times_k, "thresholds_ptr": self.bias.thresholds,
            "BIAS": sizes or None,
        }  # fmt: skip

    @property
    def names(self) -> str:
        """The activations as one word for a kernel."""
        return ",".join(map(cache_key, self.activation))

    def pairs(self) -> int:
        """Pairs of a query and a key that count, of one head. Reads the offsets, which waits for
        the device; where they cannot be read, as in fake calls, every pair of sequences of the
        greatest lengths counts."""
        if not checks.is_readable(self.cu_seqlens_k):
            return self.sequences * self.max_seqlen_q * self.max_seqlen_k
        keys = np.diff(self.cu_seqlens_k.tolist())
        rows = np.full_like(keys, self.max_seqlen_q)
        if not self.shared_q:
            rows = np.diff(self.cu_seqlens_q.tolist())
        if self.segments is not None:
            return segment_pairs(rows, keys, self.segments.tolist(), self.mask)
        if not self.masked:
            return int(rows @ keys)
        position = np.arange(rows.sum()) - (rows.cumsum() - rows).repeat(rows)
        if self.lower_right:
            position += (keys - rows).repeat(rows)
        first, last = 0, keys.repeat(rows) - 1
        if self.window is not None:
            first = np.maximum(position - self.window, 0)
            last = np.minimum(last, position + self.window)
        if self.causal:
            last = np.minimum(last, position)
        return int(np.maximum(last - first + 1, 0).sum())

    def new_out(self) -> torch.Tensor:
        """Memory for the output."""
        return self.q.new_empty(self.rows, *self.q.shape[1:], dtype=self.out_dtype)
