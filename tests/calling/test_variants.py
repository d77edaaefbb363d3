"""A stream of batches, each of its own lengths, compiles a kernel once: a step never waits for the
compiler because of what its batch holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest
import torch

import tritonemu
from gdpa_kernels import block_attention, gdpa
from gdpa_kernels.calling.launches import Launch, launches
from gdpa_kernels.norms.api import add_rms_norm
from gdpa_kernels.norms.norm_mul import norm_mul
from gdpa_kernels.serving import score
from tests.calls import pretended
from tests.serving import test_pages
from tests.tiers import sweep

BATCHES, SEQUENCES, HEADS, DIM = 24, 64, 2, 128
Call = Callable[[np.random.Generator], torch.Tensor]


def specialized(launch: Launch, binders: dict) -> dict[str, str]:
    """What Triton compiles a launch's kernel for: by argument, its type and what is known of it."""
    kernel = launch.kernel
    if kernel not in binders:
        binders[kernel] = kernel.create_binder()[-1]
    given = launch.arguments | launch.constants | launch.options
    _, found, options = binders[kernel](**given)
    return dict(zip(kernel.arg_names, map(str, found), strict=True)) | {"options": str(options)}


def apart(call: Call, arch: int = 90) -> dict[str, set[str]]:
    """By kernel, the arguments in which its launches for a stream of batches on an sm_<arch>
    differ; of a kernel that a call launches twice, those of the first launches and those of the
    second."""
    random, binders, seen = np.random.default_rng(5), {}, defaultdict(list)
    with pretended(arch):
        for _ in range(BATCHES):
            with tritonemu.enabled(f"sm_{arch}", multiprocessors=132), launches(run=False) as made:
                out = call(random)
                if out.requires_grad:
                    out.sum().backward()
            for place, launch in enumerate(made):
                seen[place, launch.name].append(specialized(launch, binders))
    assert seen and all(len(each) == BATCHES for each in seen.values())
    found = defaultdict(set)
    for (_, kernel), each in seen.items():
        found[kernel] |= {name for x in each for name in x if x[name] != each[0][name]}
    return {kernel: names for kernel, names in found.items() if names}


def offsets(random: np.random.Generator, sequences: int) -> tuple[torch.Tensor, int]:
    """Those of a batch, and its longest sequence."""
    lengths = random.integers(1, 1025, sequences)
    ends = np.concatenate([[0], lengths.cumsum()])
    return torch.tensor(ends, dtype=torch.int32), int(lengths.max())


def rows(count: int, dim: int = DIM) -> torch.Tensor:
    return torch.zeros(count, HEADS, dim, dtype=torch.bfloat16, requires_grad=True)


def attention(
    impl: str, backward_impl: str, *, seeds: int = 0, keys: int = 0, dim: int = DIM,
    sequences: tuple[int, int] = (SEQUENCES, SEQUENCES + 1), **options: object,
) -> Call:  # fmt: skip
    """`gdpa` on self-attention; on `seeds` shared queries; on `keys` keys of every sequence."""

    def call(random: np.random.Generator) -> torch.Tensor:
        ends, most = offsets(random, int(random.integers(*sequences)))
        q = k = rows(int(ends[-1]), dim)
        sides = ends, ends, most, most
        if seeds:
            q, sides = rows(seeds, dim), (None, ends, None, most)
        elif keys:
            k = rows(keys * (len(ends) - 1), dim)
            sides = ends, torch.arange(len(ends), dtype=torch.int32) * keys, most, keys
        return gdpa(q, k, k, *sides, impl=impl, backward_impl=backward_impl, **options)

    return call


def blocks(impl: str, turned: bool) -> Call:
    def call(random: np.random.Generator) -> torch.Tensor:
        ends, _ = offsets(random, SEQUENCES)
        q = rows(int(ends[-1]))
        turns = torch.zeros(int(ends[-1]), DIM // 2)
        return block_attention(q, q, q, ends, impl=impl, rotary=(turns, turns) if turned else None)

    return call


def norms(random: np.random.Generator) -> torch.Tensor:
    count = int(random.integers(1_000, 2_000))
    x, weight = torch.zeros(count, 512, requires_grad=True), torch.ones(512, requires_grad=True)
    y, stream = add_rms_norm(x, x, weight)
    return norm_mul(y, stream, weight, weight)


def served(shown: int, page: int, group: int = 1) -> Call:
    """`score` of up to `shown` groups of candidates for eight users."""

    def call(random: np.random.Generator) -> torch.Tensor:
        histories, groups = (random.integers(1, most, 8) for most in (2_000, shown))
        kept = test_pages.served(
            histories.tolist(), (group * groups).tolist(), page, kv_heads=HEADS, head_dim=DIM
        )
        return score(*kept, target_group_size=group)

    return call


HOPPER = {
    "v8, v4": attention("v8_own_waits", "v4_warp_specialized_backward"),
    "v8, v4, causal": attention("v8_own_waits", "v4_warp_specialized_backward", causal=True),
    "v8, v4, window": attention("v8_own_waits", "v4_warp_specialized_backward", window=99),
    "v8, v4, seeds": attention("v8_own_waits", "v4_warp_specialized_backward", seeds=64),
    "v8, v5": attention("v8_own_waits", "v5_short_kv_backward", keys=256),
    "v8, v6": attention("v8_own_waits", "v6_one_tile_backward", keys=64),
    "v8, v7": attention("v8_own_waits", "v7_wide_backward", dim=256),
    "v7, v2": attention("v7_packed", "v2_fused_backward"),
    "v6, v2a": attention("v6_short_kv", "v2a_ordered_backward", keys=256),
    "v1": attention("v1_tiled", "v1_tiled_backward"),
    "v1, seeds": attention("v1_tiled", "v1_tiled_backward", seeds=64),
    "lessons": attention("v5_pingpong", "v2_fused_backward"),
    **{f"blocks, {impl}": blocks(impl, turned=False)
       for impl in ("v1_one_tile", "v2_slab", "v3_warp_specialized")},
    **{f"rotary, {impl}": blocks(impl, turned=True) for impl in ("v1_one_tile", "v4_rotary")},
    "norms": norms,
}  # fmt: skip
BLACKWELL = {
    "b7, b4": attention("b7_split_stream", "b4_pair_backward"),
    "b6, b5": attention("b6_pair_stream", "b5_stream_backward"),
    "b5, b2": attention("b5_cta_pair", "b2_short_kv_backward", keys=256),
    "b2, b3": attention("b2_two_tiles", "b3_dk_first_backward"),
    "b1": attention("b1_tensor_memory", "b1_tensor_memory_backward"),
}


@pytest.mark.parametrize("what", HOPPER)
def test_lengths_compile_nothing_on_hopper(what):
    assert apart(HOPPER[what]) == {}


@pytest.mark.parametrize("what", BLACKWELL)
def test_lengths_compile_nothing_on_blackwell(what):
    assert apart(BLACKWELL[what], 100) == {}


@pytest.mark.parametrize("page", [128, sweep(16)])
@pytest.mark.parametrize(("shown", "group"), [(200, 1), sweep(3_000, 1), sweep(15, 8)])
def test_requests_compile_a_sum_for_each_power_of_two_alone(shown, group, page):
    """Of the parts in which the keys of few rows are added up."""
    assert apart(served(shown, page, group)) in ({}, {"sum_kernel": {"MOST"}})


def test_the_number_of_sequences_compiles_lists_alone():
    """Whether it is a multiple of 16 makes the loads of a list wide or not: two small kernels."""
    several = {"sequences": (63, 66), "keys": 256}
    found = apart(attention("v8_own_waits", "v5_short_kv_backward", **several))
    assert found == {"work_list_kernel": {"batch"}, "order_kernel": {"batch"}}
