"""The ladders: every rung in order (`LADDERS`), and the one that takes a call (`resolve`).

The number of a rung is its file, its `impl`, its chapter and its row in every table. A new rung is
a module (`Rung` says what it holds) and an entry here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch

from gdpa_kernels.calling.rung import DIRECTIONS, Requires, Rung

_ALL_DTYPES = ("bfloat16", "float16", "float32")
_SUMS = ("out_dtype", "add_to")
_EXTRAS = ("causal", *_SUMS, "targets")
_BIASED = (*_EXTRAS, "bias")

_ANYTHING = Requires(dtypes=(*_ALL_DTYPES, "float64"), head_dim_max=2**31 - 1)
# Plain Triton with TMA; the MMAs of warp groups on Hopper; those of Blackwell.
_TMA = Requires(capability=(9, 0), head_dim_multiple=8, aligned=True)
_WGMMA = dataclasses.replace(_TMA, only_major=True, head_dim_max=128, tlx=True)
_WGMMA_64 = dataclasses.replace(_WGMMA, head_dim_multiple=64)
_TCGEN05 = dataclasses.replace(_WGMMA, capability=(10, 0))
_TCGEN05_64 = dataclasses.replace(_TCGEN05, head_dim_multiple=64)
_TCGEN05_MASKS = dataclasses.replace(_TCGEN05_64, extras=("causal", "targets"))
_STREAM = dataclasses.replace(_TCGEN05, extras=_EXTRAS)
_PACKED_LESSON = dataclasses.replace(_TCGEN05_64, dtypes=("bfloat16",))

_backward = partial(Rung, directions=("backward",))
_of_blocks = partial(Rung, operator="block_attention", directions=DIRECTIONS)

REFERENCE = Rung(
    "reference", "the definition",
    "One sequence after another; in fp32, in fp64 of fp64.",
    None, dataclasses.replace(_ANYTHING, extras=_BIASED), directions=DIRECTIONS,
    batch_invariant=True,
)  # fmt: skip

RUNGS: tuple[Rung, ...] = (
    Rung(
        "v0_eager", "eager PyTorch",
        "Pad the batch; two matmuls around an activation.",
        None, dataclasses.replace(_ANYTHING, extras=("bias",)),
    ),
    Rung(
        "v1_tiled", "one fused kernel",
        "Scores stay in registers; the batch stays jagged.",
        "v0_eager", Requires(capability=(8, 0), dtypes=_ALL_DTYPES, extras=_BIASED),
        batch_invariant=True,
    ),
    Rung(
        "v2_tma", "copies by TMA",
        "The copy engine addresses and clips.",
        "v1_tiled", dataclasses.replace(_TMA, head_dim_multiple=64, head_dim_max=128),
    ),
    Rung(
        "v3_persistent", "a list of tiles",
        "Persistent programs walk a work list without empty tiles.",
        "v2_tma", dataclasses.replace(_TMA, head_dim_multiple=64, head_dim_max_of={12: 64}),
    ),
    Rung(
        "v4_warp_specialized", "warp specialization",
        "A producer copies, two consumers compute, mbarriers between them.",
        "v2_tma", _WGMMA_64,
    ),
    Rung(
        "v5_pingpong", "software pipelining",
        "The next block's Q K^T is issued before this block's P V.",
        "v4_warp_specialized", _WGMMA_64,
    ),
    Rung(
        "v6a_persistent", "persistent programs",
        "They walk a list of tiles; loads run ahead, stores are asynchronous.",
        "v5_pingpong", _WGMMA_64,
    ),
    Rung(
        "v6b_stream", "a pipeline across tiles",
        "The next tile's first Q K^T is issued before this one's last P V.",
        "v6a_persistent", _WGMMA_64,
    ),
    Rung(
        "v6_short_kv", "short K and V stay",
        "K and V that fit are loaded once; Q streams by.",
        "v6b_stream", _WGMMA_64,
    ),
    Rung(
        "v7_packed", "two scores in one instruction",
        "GELU and SiLU in packed bf16; their factor moves to the epilogue.",
        "v6_short_kv", _WGMMA_64,
    ),
    Rung(
        "v8_own_waits", "waits as written",
        "The compiler adds no wait of its own to the loop.",
        "v7_packed", dataclasses.replace(_WGMMA, head_dim_max=256, extras=(*_EXTRAS, "paged_kv")),
        batch_invariant=True,
    ),
)  # fmt: skip

BLACKWELL_RUNGS: tuple[Rung, ...] = (
    Rung(
        "b1_tensor_memory", "accumulators in tensor memory",
        "One thread issues the MMAs; the math role is left with the activation.",
        "v4_warp_specialized", _PACKED_LESSON,
    ),
    Rung(
        "b2_two_tiles", "two tiles of queries",
        "One tile's MMAs run beside the other's activation; P comes in slices.",
        "b1_tensor_memory", _PACKED_LESSON,
    ),
    Rung(
        "b3_stream", "one stream of MMAs",
        "The next item's first S is issued before this one's last P V.",
        "b2_two_tiles", _PACKED_LESSON,
    ),
    Rung(
        "b4_mixed", "a quarter by polynomial",
        "FMA units take over one score of four from MUFU, within a proven bound.",
        "b3_stream", _PACKED_LESSON,
    ),
    Rung(
        "b5_cta_pair", "CTA pairs, K and V stay",
        "Two CTAs hold halves of K and V that the MMAs of both read.",
        "b4_mixed", _PACKED_LESSON, is_rewrite=True,
    ),
    Rung(
        "b6_pair_stream", "CTA pairs, K and V stream",
        "Any number of keys; a block that is loaded once serves 512 queries.",
        "b5_cta_pair", _STREAM, batch_invariant=True,
    ),
    Rung(
        "b7_split_stream", "items of 256 queries",
        "The math roles take alternate blocks of keys.",
        "b6_pair_stream", _STREAM, batch_invariant=True,
    ),
)  # fmt: skip
"""For sm_100: accumulators in tensor memory. They follow `RUNGS` on the ladder "gdpa"."""

BLOCK_REFERENCE = _of_blocks(
    "reference", "the definition",
    "Whole blocks at once; in fp32, in fp64 of fp64.",
    None, _ANYTHING,
)  # fmt: skip

BLOCK_RUNGS: tuple[Rung, ...] = (
    _of_blocks(
        "v0_flash", "FlashAttention-2 on this mask",
        "Key loop, online softmax, log-sum-exp, delta, two backward kernels.",
        None, Requires(capability=(8, 0), head_dim_multiple=16), saves=True,
    ),
    _of_blocks(
        "v1_one_tile", "a block is one tile",
        "Nothing is left to carry from tile to tile, nor to save for backward.",
        "v0_flash", Requires(capability=(8, 0), dtypes=_ALL_DTYPES, head_dim_multiple=16),
        is_rewrite=True,
    ),
    _of_blocks(
        "v2_slab", "all heads of a block",
        "Programs walk slabs of memory; the copy engine addresses and clips.",
        "v1_one_tile",
        Requires(capability=(9, 0), head_dim_multiple=8, head_dim_max=128, aligned=True),
    ),
    _of_blocks(
        "v3_warp_specialized", "warp specialization",
        "A producer copies, consumers compute; results leave through dead input slots.",
        "v2_slab", dataclasses.replace(_WGMMA, head_dim_max=256), is_rewrite=True,
    ),
    _of_blocks(
        "v4_rotary", "rotary in the kernels",
        "Applied to tiles in shared memory, to gradients in registers on their way out.",
        "v3_warp_specialized", dataclasses.replace(_WGMMA, head_dim_max=256),
    ),
    _of_blocks(
        "v4a_turning_role", "a rotary role",
        "Rotary of one item is overlapped with the MMAs of another.",
        "v4_rotary", dataclasses.replace(_WGMMA, head_dim_max=256),
    ),
)  # fmt: skip

BLACKWELL_BLOCK_RUNGS: tuple[Rung, ...] = (
    _of_blocks(
        "b1_warp_specialized", "a role for every step",
        "Accumulators in tensor memory; rotary, softmax and output work on different items.",
        "v4_rotary", _TCGEN05, is_rewrite=True,
    ),
)  # fmt: skip

_PASS = dataclasses.replace(_TMA, head_dim_max=128, head_dim_max_of={10: 64, 12: 64})

BACKWARD_RUNGS: tuple[Rung, ...] = (
    _backward(
        "v1_tiled_backward", "two fused kernels",
        "One owns keys, the other queries; they read q, k, v and the gradient alone.",
        None, Requires(capability=(8, 0), dtypes=_ALL_DTYPES, extras=("causal", "targets", "bias")),
    ),
    _backward(
        "v2_fused_backward", "one pass over the keys",
        "The owner of the keys computes dS K too; TMA reduce-adds accumulate dQ.",
        "v1_tiled_backward", _PASS,
    ),
    _backward(
        "v2a_ordered_backward", "additions in order",
        "One launch after another, each for some blocks of keys: deterministic.",
        "v2_fused_backward", _PASS,
    ),
    _backward(
        "v4_warp_specialized_backward", "warp specialization",
        "dK and dV stay in registers; dS is shared; each consumer computes half of dQ.",
        "v2_fused_backward",
        dataclasses.replace(_WGMMA, extras=("causal", "targets")),
        is_rewrite=True,
    ),
    _backward(
        "v5_short_kv_backward", "two programs own all keys",
        "A cluster exchanges dS; dQ is complete where it is computed.",
        "v4_warp_specialized_backward", dataclasses.replace(_WGMMA, head_dim_multiple=128),
        is_rewrite=True,
    ),
    _backward(
        "v6_one_tile_backward", "a tile has all keys",
        "Up to 128 keys: dQ is complete where it is computed, without a cluster.",
        "v4_warp_specialized_backward", _WGMMA_64,
    ),
    _backward(
        "v7_wide_backward", "wide heads",
        "One consumer computes dS and dV, the other dK and dQ.",
        "v4_warp_specialized_backward",
        dataclasses.replace(_WGMMA, head_dim_max=256, extras=("causal", "targets")),
        is_rewrite=True,
    ),
)  # fmt: skip

BLACKWELL_BACKWARD_RUNGS: tuple[Rung, ...] = (
    _backward(
        "b1_tensor_memory_backward", "accumulators in tensor memory",
        "One thread issues five MMAs a step; dQ lies where dP was.",
        "v4_warp_specialized_backward", _TCGEN05_64,
        is_rewrite=True,
    ),
    _backward(
        "b2_short_kv_backward", "two CTAs own all keys",
        "They exchange halves of dQ, which is written once.",
        "b1_tensor_memory_backward", _TCGEN05_64,
    ),
    _backward(
        "b3_dk_first_backward", "dS in tensor memory",
        "dK reads it there; dQ takes its place.",
        "b1_tensor_memory_backward", _TCGEN05_64,
    ),
    _backward(
        "b4_pair_backward", "CTA pairs exchange dS",
        "Each holds half of Q and dO, and sums dQ of half of the rows.",
        "b3_dk_first_backward", _TCGEN05_64,
        is_rewrite=True,
    ),
    _backward(
        "b5_stream_backward", "one stream of MMAs across items",
        "An item begins while dV and dK of the last one leave.",
        "b4_pair_backward", _TCGEN05_MASKS,
    ),
    _backward(
        "b6_dq_once_backward", "a pair has all keys",
        "With at most 256 its dQ is complete and is written once.",
        "b5_stream_backward", _TCGEN05_MASKS,
    ),
)  # fmt: skip

LADDERS = {
    "gdpa": (REFERENCE, *RUNGS, *BLACKWELL_RUNGS, *BACKWARD_RUNGS, *BLACKWELL_BACKWARD_RUNGS),
    "block_attention": (BLOCK_REFERENCE, *BLOCK_RUNGS, *BLACKWELL_BLOCK_RUNGS),
}
_BY_IMPL = {(rung.operator, rung.impl): rung for rungs in LADDERS.values() for rung in rungs}


def impls(operator: str = "gdpa", direction: str = "forward") -> tuple[str, ...]:
    """The names that an operator accepts in a direction besides "auto"."""
    return tuple(rung.impl for rung in LADDERS[operator] if direction in rung.directions)


def rung(impl: str, operator: str = "gdpa", direction: str | None = None) -> Rung:
    """The rung of that name, of a direction if one is given. Raises ValueError naming those that
    there are."""
    known_rung = _BY_IMPL.get((operator, impl))
    if known_rung is not None and (direction is None or direction in known_rung.directions):
        return known_rung
    directions = DIRECTIONS if direction is None else (direction,)
    known = ", ".join(dict.fromkeys(name for each in directions for name in impls(operator, each)))
    raise ValueError(f"impl must be one of {known}, got {impl!r}")


class Availability(NamedTuple):
    """Whether this machine can run an implementation, and why or why not."""

    ok: bool
    reason: str


def availability(
    impl: str, device: torch.device | str | None = None, operator: str = "gdpa"
) -> Availability:
    """Whether `impl` runs on `device`: by default the first GPU, or the CPU where there is none."""
    if device is None:
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    device, candidate = torch.device(device), rung(impl, operator)
    problem = candidate.device_problem(device)
    if problem is not None:
        return Availability(False, problem)
    emulated = candidate.requires.capability and device.type == "cpu"
    return Availability(True, f"runs {'in the emulator' if emulated else f'on {device}'}")


def resolve(
    impl: str, operator: str, direction: str, batch: Any, order: Callable[[], Iterable[str]]
) -> Rung:
    """The rung that takes a call: an explicit one checked, "auto" the first of `order()` that can.

    `batch`: of the operator. Raises NotImplementedError if the device or the call is not supported;
    RuntimeError for an explicit one that is not deterministic for this call where
    `torch.use_deterministic_algorithms` asks for it.
    """
    strict = torch.are_deterministic_algorithms_enabled()
    name = "impl" if direction == "forward" else "backward_impl"
    if impl == "auto":
        for candidate in order():
            chosen = rung(candidate, operator)
            if chosen.suits(batch) and (not strict or chosen.is_deterministic(batch)):
                return chosen
        raise NotImplementedError(
            f"{name} 'auto' needs dtype bfloat16, float16, float32 or float64, "
            f"got {batch.dtype} on {batch.device}"
        )
    chosen = rung(impl, operator, direction)
    problem = chosen.requires.device_problem(batch.device)
    if problem is None and (reason := chosen.unavailable(batch.device)):
        problem = f"cannot run in this environment: {reason}; `python -m gdpa_kernels` says more"
    if problem is None:
        problem = chosen.call_problem(batch)
    if problem is not None:
        raise NotImplementedError(f"{name} {impl!r} {problem}")
    if strict and not chosen.is_deterministic(batch):
        raise RuntimeError(
            f"{name} must be deterministic under torch.use_deterministic_algorithms, got {impl!r}, "
            "which is not for this call"
        )
    return chosen
