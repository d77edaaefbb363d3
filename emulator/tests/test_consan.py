"""Findings of ConSan on a GPU in its own tests, for programs of one CTA, are found here.

The names are those of triton-lang/triton's python/test/gluon/test_consan.py (006f4959, 2026); the
kernels are others, of the same mistakes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from emulator.tests.checking import B200, everywhere, found, normal
from tritonemu import (
    BarrierMisuse,
    Deadlock,
    MissingFence,
    Race,
    UninitializedRead,
    run,
)
from tritonemu.gpu import has_gluon

pytestmark = pytest.mark.gluon
if not has_gluon():
    pytest.skip(
        "needs the Gluon of Triton 3.9, and this Triton has another", allow_module_level=True
    )

from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: E402

from emulator.tests import consan_kernels as kernels  # noqa: E402
from emulator.tests import gluon_kernels  # noqa: E402


def boxed(tensor, *shape):
    dtype = {torch.float32: gl.float32, torch.float16: gl.float16}[tensor.dtype]
    layout = gl.NVMMASharedLayout.get_default_for([*shape], dtype)
    return TensorDescriptor.from_tensor(tensor, [*shape], layout)


def source():
    return boxed(normal(32, 32, dtype=torch.float32), 32, 32)


def row():
    return [torch.zeros(128)]


def fetch():
    return [source(), torch.zeros(32, 32)]


def copies():
    return [normal(128, dtype=torch.float32), torch.zeros(128)]


def matrices():
    return [normal(128, 64), normal(64, 64), torch.zeros(128, 64)]


def small():
    return [normal(64, 64), normal(64, 64), torch.zeros(64, 64)]


def ring():
    return [boxed(normal(384, 64), 64, 64), torch.zeros(64, 64)]


EARLY = (Race, UninitializedRead)


class Case(NamedTuple):
    """A kernel, its arguments, constants with which it is right, and others with what is found."""

    kernel: str
    arguments: Callable[[], list]
    right: dict[str, Any]
    wrong: list[tuple[dict[str, Any], Any]]
    options: dict[str, Any] = {}


SUITE = {
    "consan_initializes_allocations_with_nan": [
        Case("unwritten", row, {"BUG": ""}, [({"BUG": "read"}, UninitializedRead)]),
    ],
    "async_tma_kernel": [
        Case("fetched", fetch, {"BUG": ""}, [({"BUG": "waits late"}, EARLY)]),
    ],
    "async_tma_expect_bytes_mismatch": [
        Case(
            "fetched", fetch, {"BUG": ""},
            [({"BUG": "16 bytes fewer"}, BarrierMisuse), ({"BUG": "16 bytes more"}, Deadlock)],
        ),
    ],
    "async_tma_kernel_2bufs_1bar": [
        Case("two_of_one_barrier", fetch, {"BUG": ""}, [({"BUG": "late"}, EARLY)]),
    ],
    "tma_interleave_kernel": [
        Case("two_barriers", fetch, {"BUG": ""}, [({"BUG": "the first only"}, EARLY)]),
    ],
    "tma_wait_tracks_only_waited_barrier": [
        Case("two_barriers", fetch, {"BUG": ""}, [({"BUG": "the second only"}, EARLY)]),
    ],
    "tma_wait_does_not_publish_overwritten_row": [
        Case("fetched_twice", fetch, {"BUG": ""}, [({"BUG": "waits for the first"}, Race)]),
    ],
    "async_copy": [
        Case("grouped", copies, {"BUG": ""}, [({"BUG": "two in flight"}, Race)]),
    ],
    "tma_store": [
        Case(
            "sent_twice", lambda: [boxed(torch.zeros(64, 32), 32, 32)], {"BUG": ""},
            [({"BUG": "one in flight"}, Race)],
        ),
    ],
    "tcgen5_mma": [
        Case(
            "mma_and_more", lambda: [boxed(normal(128, 64), 128, 64), *matrices()],
            {"KIND": kind, "BUG": ""}, [({"KIND": kind, "BUG": "no wait"}, EARLY)], B200,
        )
        for kind in ("TMA load", "store", "load of accumulator", "store to accumulator")
    ],
    "mma_read_async_copy_write": [
        Case(
            "mma_and_more", lambda: [boxed(normal(128, 64), 128, 64), *matrices()],
            {"KIND": "cp.async", "BUG": ""}, [({"KIND": "cp.async", "BUG": "no wait"}, Race)], B200,
        )
    ],
    "mma_read_local_alloc_write": [
        Case("allocated_again", matrices, {"BUG": ""}, [({"BUG": "no wait"}, Race)], B200),
    ],
    "tcgen5_copy": [
        Case(
            "copied_to_tensor_memory",
            lambda: [torch.arange(4096).view(128, 32).int(), torch.zeros(128, 32).int()],
            {"KIND": kind, "BUG": ""}, [({"KIND": kind, "BUG": "no wait"}, EARLY)], B200,
        )
        for kind in ("store", "load")
    ],
    "tcgen5_mma_multibar": [
        Case(
            "two_accumulators", matrices, {"USED": 0, "WAITED": waited},
            [({"USED": 1, "WAITED": 0}, Race)], B200,
        )
        for waited in (0, 1, 2)
    ],
    "multibuffered_loop": [
        Case(
            "rings", ring, {"STAGES": 3, "AHEAD": 1, "TENSOR": True},
            [({"STAGES": 2, "AHEAD": 1, "TENSOR": True}, Race)], B200,
        )
    ],
    "multibuffered_wgmma_loop": [
        Case(
            "rings", ring, {"STAGES": 3, "AHEAD": 1, "TENSOR": False},
            [({"STAGES": 2, "AHEAD": 1, "TENSOR": False}, Race)],
        )
    ],
    "warpgroup_mma": [
        Case("wgmmas", small, {"BUG": ""}, [({"BUG": "none done"}, Race)]),
    ],
    "warpgroup_mma2": [
        Case("wgmmas", small, {"BUG": ""}, [({"BUG": "one done"}, Race)]),
    ],
    "ws_store_wait_load": [
        Case("store_then_load", row, {"BUG": ""}, [({"BUG": "no wait"}, EARLY)]),
    ],
    "fence_async_shared_across_warp_specialize": [
        Case(
            "stored_and_sent",
            lambda: [boxed(torch.zeros(96, 32), 32, 32), normal(96, 32, dtype=torch.float32)],
            {"BUG": right},
            [({"BUG": wrong}, MissingFence) for wrong in ("no fence", "fence after arrive")],
        )
        for right in ("", "fence of consumer")
    ],
    "ws_load_wait_store": [
        Case("load_then_store", row, {"BUG": ""}, [({"BUG": "no wait"}, Race)]),
    ],
    "ws_two_loads_two_bars": [
        Case(
            "two_readers", row, {"WARPS": (4, 4), "BUG": ""},
            [({"WARPS": (4, 4), "BUG": f"not for the {n}"}, Race) for n in ("first", "second")],
        )
    ],
    "ws_different_warp_sizes": [
        Case(
            "two_readers", row, {"WARPS": (2, 8), "BUG": ""},
            [({"WARPS": (2, 8), "BUG": f"not for the {n}"}, Race) for n in ("first", "second")],
        )
    ],
    "ws_two_loads_one_bar": [
        Case("two_readers_of_one_barrier", row, {"BUG": ""}, [({"BUG": "no wait"}, Race)]),
    ],
    "ws_two_loads_two_bars_loop": [
        Case(
            "readers_in_loops", list, {"BUG": ""},
            [
                ({"BUG": f"not for {n}"}, (*EARLY, BarrierMisuse, Deadlock))
                for n in range(4)
            ],
        )
    ],
    "ws_load_ordering": [
        Case("in_order", list, {"BUG": ""}, [({"BUG": "the second"}, EARLY)]),
    ],
    "ws_two_producers_two_consumers": [
        Case(
            "two_producers", list, {"BUG": ""},
            [({"BUG": which}, (*EARLY, BarrierMisuse)) for which in ("first", "second")],
        )
    ],
    "ws_async_copy_commits": [
        Case(
            "copies_apart", lambda: [normal(128, dtype=torch.float32)], {"BUG": ""},
            [({"BUG": "the other's"}, EARLY)],
        )
    ],
    "ws_async_copy_wait_visibility": [
        Case(
            "copied_for_others", lambda: [normal(128, dtype=torch.float32)], {"BUG": ""},
            [({"BUG": "the second"}, EARLY)],
        )
    ],
    "ws_wgmma_wait_visibility": [
        Case("multiplied_for_others", list, {"BUG": ""}, [({"BUG": "the second"}, Race)]),
    ],
    "deadlock_two_partitions": [
        Case("meeting", list, {"BUG": ""}, [({"BUG": "nobody arrives"}, Deadlock)]),
    ],
    "deadlock_underarrival": [
        Case("meeting", list, {"BUG": ""}, [({"BUG": "counts of two"}, Deadlock)]),
    ],
    "deadlock_with_padded_warp_specialize_partition": [
        Case("three_of_one_warp", list, {"BUG": ""}, [({"BUG": "nobody arrives"}, Deadlock)]),
    ],
    "deadlock_after_other_partition_returns": [
        Case("left_alone", list, {"BUG": ""}, [({"BUG": "returned"}, Deadlock)]),
    ],
    "deadlock_overarrival": [
        Case("counted", list, {"BUG": ""}, [({"BUG": "two phases"}, Deadlock)]),
    ],
    "barrier_underflow": [
        Case("counted", list, {"BUG": ""}, [({"BUG": "two at once"}, BarrierMisuse)]),
    ],
    "deadlock_different_phases": [
        Case("phases", list, {"BUG": ""}, [({"BUG": "nobody arrives"}, Deadlock)]),
    ],
    "deadlock_exempt_when_tma_signals": [
        Case("fetching", lambda: [source()], {"BUG": ""}, [({"BUG": "counts"}, Deadlock)]),
    ],
    "barrier_reinit_requires_invalidate": [
        Case(
            "lifetime", list, {"USE": "", "BUG": ""},
            [({"USE": "", "BUG": "init twice"}, BarrierMisuse)],
        )
    ],
    "barrier_use_without_init": [
        Case(
            "lifetime", list, {"USE": "", "BUG": ""},
            [
                ({"USE": use, "BUG": "no init"}, BarrierMisuse)
                for use in ("", "wait", "arrive", "expect")
            ],
        )
    ],
    "barrier_use_after_invalidate": [
        Case(
            "lifetime", list, {"USE": "wait", "BUG": ""},
            [
                ({"USE": use, "BUG": "after invalidate"}, BarrierMisuse)
                for use in ("wait", "arrive", "expect")
            ],
        )
    ],
    "aliasing_shared_visibility_outstanding_write": [
        Case(
            "slices", list, {"OVERLAP": overlap, "WAITS": waits},
            [({"OVERLAP": True, "WAITS": False}, Race)],
        )
        for overlap, waits in ((True, True), (False, True), (False, False))
    ],
    "aliasing_tma_overwrite_clears_stale_write_visibility": [
        Case("refilled_slice", lambda: [source()], {"BUG": ""}, [({"BUG": "no wait"}, EARLY)]),
    ],
    "aliasing_tensor_visibility_outstanding_read": [
        Case("columns", list, {"BUG": ""}, [({"BUG": "no wait"}, Race)], B200),
    ],
    "aliasing_commit_tracking": [
        Case(
            "copied_slices", lambda: [normal(32, 64, dtype=torch.float32)],
            {"OVERLAP": overlap, "WAITS": waits}, [({"OVERLAP": True, "WAITS": False}, Race)],
        )
        for overlap, waits in ((True, True), (False, True), (False, False))
    ],
}  # fmt: skip
RIGHT = [(name, i) for name, cases in SUITE.items() for i in range(len(cases))]
WRONG = [
    (name, i, k) for name, i in RIGHT for k in range(len(SUITE[name][i].wrong))
]  # fmt: skip


def kernel_of(case):
    return getattr(kernels, case.kernel, None) or getattr(gluon_kernels, case.kernel)


def test_all_of_one_cta_are_here():
    """61 tests, of which 13 are of several CTAs or `clc`, and 3 of how ConSan is built in."""
    assert len(SUITE) == 61 - 13 - 3


@pytest.mark.parametrize(("name", "i"), RIGHT)
def test_right(name, i):
    case = SUITE[name][i]
    everywhere(kernel_of(case), (1,), case.arguments, **case.right, **case.options)


@pytest.mark.parametrize(("name", "i", "k"), WRONG)
def test_found(name, i, k):
    case = SUITE[name][i]
    constants, error = case.wrong[k]
    found(error, kernel_of(case), (1,), case.arguments, **constants, **case.options)


def test_two_copies_to_one_buffer_are_not_ordered_by_a_wait_for_the_second():
    """ConSan lets that pass: a copy that it knows of replaces the one before."""
    found(Race, kernels.fetched_twice, (1,), fetch, BUG="waits for the second")


@pytest.mark.parametrize(("name", "i"), RIGHT)
def test_compiles(name, i):
    case = SUITE[name][i]
    run(kernel_of(case), (1,), *case.arguments(), compile=True, **case.right, **case.options)
