"""Findings, what barriers did, and checks under many schedules, as data."""

import time

import pytest
import torch
import triton
import triton.language as tl

from emulator.tests.checking import box, grid2, place, refused, tlx
from tritonemu import Deadlock, EmulatorError, InvalidKernel, Race, Search, check, line_in, run

pytestmark = pytest.mark.tlx


@triton.jit
def fetch(desc, tile, full, i):
    tlx.barrier_expect_bytes(full, 8 * 16 * 4)
    tlx.async_descriptor_load(desc, tile, [8 * i, 0], full)


@triton.jit
def ring_kernel(desc, out_ptr, FAULT: tl.constexpr):
    """One buffer, filled three times."""
    tiles = tlx.local_alloc((8, 16), tl.float32, 1)
    full = tlx.alloc_barriers(1)
    empty = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            for i in tl.range(0, 3):
                tlx.barrier_wait(empty[0], i & 1 if FAULT == "parity" else i & 1 ^ 1)
                fetch(desc, tiles[0], full[0], i)
        with tlx.async_task(num_warps=4):
            for i in tl.range(0, 3):
                tlx.barrier_wait(full[0], i & 1)
                if FAULT == "early":
                    tlx.barrier_arrive(empty[0])
                tl.store(out_ptr + 128 * i + grid2(8, 16), tlx.local_load(tiles[0]))
                if FAULT != "early" and FAULT != "kept":
                    tlx.barrier_arrive(empty[0])


def ring():
    return box(torch.arange(384.0).view(24, 16), 8, 16), torch.zeros(384)


def test_a_report_says_what_barriers_did():
    report = run(ring_kernel, (1,), *ring(), FAULT="")
    full, empty = report.barrier_use["full"], report.barrier_use["empty"]
    assert (full.count, full.phases, full.arrivals) == (1, 3, {"default": 3})
    assert full.waits == {("task0", 0): 2, ("task0", 1): 1}
    assert (empty.phases, empty.arrivals) == (3, {"task0": 3})
    # The first wait is for the phase of a fresh barrier.
    assert empty.waits == {("default", 1): 2, ("default", 0): 1}


@pytest.mark.parametrize("fault, parity, passed", [("parity", 0, 0), ("kept", 0, 1)])
def test_a_wait_says_its_parity_and_whether_it_is_the_first(fault, parity, passed):
    error = refused(Deadlock, "phase 0 of empty", ring_kernel, *ring(), FAULT=fault)
    producer = next(wait for wait in error.waits if "empty" in wait.barrier)
    assert (producer.phase, producer.parity, producer.passed) == (0, parity, passed)
    assert error.report.barrier_use["empty"].waits["default", 0] == 0
    assert error.report.barrier_use["empty"].arrivals.get("task0", 0) == 0


def test_a_race_names_its_accesses_and_what_might_have_ordered_them():
    error = refused(Race, None, ring_kernel, *ring(), FAULT="early")
    read, copy = sorted(error.accesses, key=lambda each: each.write)
    assert (read.kind, read.actor, read.name) == ("", "task0 of CTA 0", "tiles[0]")
    assert (copy.kind, copy.actor, copy.name) == ("copy", "default of CTA 0", "tiles[0]")
    assert line_in(copy.location, __file__) == place(fetch, "async_descriptor_load")[1]
    wait = error.orderings[0]
    assert (wait.kind, wait.role, wait.when) == ("wait", error.accesses[1].actor, "before")
    assert error.related == tuple((each.what, each.location) for each in error.orderings)


@triton.jit
def helper(ptr):
    tl.store(ptr + 8, 1.0)


def test_the_line_of_a_finding_in_a_file_is_that_of_its_innermost_call_there():
    @triton.jit
    def caller_kernel(ptr):
        helper(ptr)

    error = refused(EmulatorError, "must stay", caller_kernel, torch.zeros(4))
    assert error.line_in(__file__) == error.line == place(helper, "tl.store")[1]
    assert error.line_in("elsewhere.py") == 0


@triton.jit
def endless_kernel(out_ptr):
    for i in tl.range(0, 100_000_000):
        total = i + 1
    tl.store(out_ptr, total)


def test_a_timeout_ends_a_loop_that_does_nothing():
    begin = time.monotonic()
    error = refused(EmulatorError, "within its timeout", endless_kernel, ring()[1], timeout=0.1)
    assert time.monotonic() - begin < 5 and type(error) is EmulatorError
    assert error.line_in(__file__) == place(endless_kernel, "tl.range")[1]
    run(ring_kernel, (1,), *ring(), FAULT="", timeout=60)


@triton.jit
def last_kernel(out_ptr):
    tl.atomic_xchg(out_ptr, tl.program_id(0))


def test_a_check_says_what_it_covered_and_which_order_gives_other_bits():
    def right():
        desc, out = ring()
        ring_kernel[(1,)](desc, out, FAULT="")
        return [out]

    def last():
        out = torch.zeros(1, dtype=torch.int32)
        last_kernel[(2,)](out)
        return [out]

    checked = check(right, search=(Search("exhaustive", schedules=8), 0, 1))
    assert checked.finding is None and checked.differs == ""
    assert checked.covered["exhausted"] and checked.covered["classes"] == 1
    checked = check(last, search=range(8), resident=2)
    assert checked.finding is None and checked.differs in map(str, range(1, 8))

    def stuck():
        ring_kernel[(1,)](*ring(), FAULT="kept")

    assert isinstance(check(stuck, search=[0]).finding, Deadlock)


@triton.jit
def unbound_kernel(INDEX: tl.constexpr):
    tiles = tlx.local_alloc((16, 16), tl.float32, 2)
    bars = tlx.alloc_barriers(2)
    for i in tl.range(0, 2):
        if INDEX:
            tlx.local_store(tiles[stage], tl.zeros([16, 16], tl.float32))  # noqa: F821
        else:
            tlx.barrier_wait(bars[0], stage)  # noqa: F821
        stage = i  # noqa: F841


@pytest.mark.parametrize("index", (True, False))
def test_a_variable_without_a_value_is_named_where_an_integer_is_needed(index):
    refused(InvalidKernel, "^[^ ]* .*stage is not defined here", unbound_kernel, INDEX=index)


@triton.jit
def stuck_kernel(x_ptr, out_ptr):
    x = tl.load(x_ptr + 3)
    i = 0
    while i >= 0:
        i += 0
    tl.store(out_ptr, x)


def test_a_loop_that_reads_no_memory_does_not_spin_on_what_was_read_before_it():
    refused(Deadlock, "reads no memory", stuck_kernel, torch.ones(8), torch.zeros(1))


@triton.jit
def undefined_kernel(out_ptr):
    tl.store(out_ptr, nowhere + 1)  # noqa: F821


def test_a_launch_that_fails_before_its_first_event_has_a_drawing():
    error = refused(InvalidKernel, "nowhere", undefined_kernel, torch.zeros(1), trace=True)
    assert not error.report.timeline.events
    assert "InvalidKernel" in error.report.timeline.finding()


@triton.jit
def fresh_kernel():
    bar = tlx.alloc_barriers(1)
    tlx.barrier_arrive(bar)
    tlx.barrier_wait(bar, 0)


def test_what_barriers_did_is_that_of_one_of_them():
    use = run(fresh_kernel, (3,)).barrier_use["bar"]
    assert (use.phases, use.arrivals, use.waits) == (1, {"default": 1}, {("default", 0): 1})
