"""mbarriers, warp barriers, named barriers and the cluster barrier, rightly used and misused."""

import re
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from emulator.tests import handover_rings
from emulator.tests.checking import (
    DEFAULT,
    PAIR,
    SCHEDULES,
    TASK,
    box,
    boxes,
    build,
    everywhere,
    found,
    ints,
    misused,
    of_first,
    place,
    raced,
    refused,
    stuck,
    tlx,
)
from tritonemu import (
    AliasedWait,
    BarrierMisuse,
    Deadlock,
    EarlyExit,
    EmulatorError,
    InvalidKernel,
    OutOfBounds,
    Race,
    ResourceLimit,
    UninitializedRead,
    run,
)

pytestmark = pytest.mark.tlx


def arrivals(report, barrier, kind="arrive"):
    """(lane, phase, pending arrivals, missing bytes) of the events of a barrier, in their order."""
    events = (e for e in report.timeline.events if e.kind == kind and e.target == barrier)
    return [(e.lane, e.phase, e.pending, e.bytes) for e in events]


@triton.jit
def fresh_kernel(phase, ARRIVALS: tl.constexpr):
    bar = tlx.alloc_barriers(1)
    for _ in tl.static_range(ARRIVALS):
        tlx.barrier_arrive(bar)
    tlx.barrier_wait(bar, phase)


@pytest.mark.parametrize("number", range(6))
def test_a_wait_passes_if_the_last_completed_phase_has_its_parity(number):
    # Phase -1 counts as completed: a fresh barrier lets parity 1 pass.
    parity = (number - 1) % 2
    run(fresh_kernel, (1,), parity, ARRIVALS=number)
    for error in found(Deadlock, fresh_kernel, (1,), lambda: (1 - parity,), ARRIVALS=number):
        (wait,) = error.waits
        assert (wait.phase, wait.arrivals, wait.bytes) == (number, 1, 0)
        over = f"phase {number - 2} of that parity is over, and {number - 1} too"
        assert wait.note == (over if number >= 2 else "")


def test_deadlock_says_where_who_and_what():
    location = place(fresh_kernel, "barrier_wait")
    message = r"misses 1 arrival\n"
    error = refused(Deadlock, message, fresh_kernel, 0, ARRIVALS=0, line="barrier_wait")
    (wait,) = error.waits
    assert (wait.role, wait.location, wait.barrier) == (DEFAULT, location, "bar of CTA 0")
    assert (
        f"default of CTA 0 at {location[0]}:{location[1]} waits for phase 0 of bar of CTA 0"
        in str(error)
    )


def test_a_phase_is_a_parity():
    run(fresh_kernel, (1,), True, ARRIVALS=0)
    for phase in (2, -1):
        keywords = {"ARRIVALS": 0, "line": "barrier_wait"}
        message = f"takes phase 0 or 1, got {phase}"
        assert refused(BarrierMisuse, message, fresh_kernel, phase, **keywords).barrier == "bar"


@triton.jit
def count_kernel(COUNT: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    bar = tlx.alloc_barriers(1, arrive_count=COUNT)
    tlx.barrier_arrive(bar, FIRST)
    tlx.barrier_arrive(bar, SECOND)  # second
    tlx.barrier_wait(bar, 0)


def test_counts():
    report = run(count_kernel, (1,), COUNT=3, FIRST=1, SECOND=2, trace=True)
    assert arrivals(report, "bar") == [("default", 0, 2, 0), ("default", 0, 0, 0)]
    assert arrivals(report, "bar", "wait") == [("default", 0, 0, 0)]

    stuck([(DEFAULT, "bar of CTA 0", 0, 1, 0)], count_kernel, (1,), COUNT=4, FIRST=1, SECOND=2)
    message = "2 arrivals in phase 0, which expects 1 more of 3"
    keywords = {"COUNT": 3, "FIRST": 2, "SECOND": 2, "line": "# second"}
    misused("bar", message, count_kernel, (1,), role=DEFAULT, **keywords)


@triton.jit
def crowd_kernel(COUNT: tl.constexpr, REPLICAS: tl.constexpr):
    bar = tlx.alloc_barriers(1, arrive_count=COUNT)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_wait(bar, 0)
        with tlx.async_task(num_warps=1, replicate=REPLICAS):
            tlx.barrier_arrive(bar)


def test_arrivals_of_several_roles():
    everywhere(crowd_kernel, (1,), COUNT=3, REPLICAS=3)
    stuck([(DEFAULT, "bar of CTA 0", 0, 1, 0)], crowd_kernel, (1,), COUNT=3, REPLICAS=2)
    # An arrival that may count in either of two phases.
    misused("bar", None, crowd_kernel, (1,), COUNT=1, REPLICAS=2, line="barrier_arrive")


@triton.jit
def missed_kernel(ORDERED: tl.constexpr):
    bar = tlx.alloc_barriers(1)
    seen = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_arrive(bar)
            if ORDERED:
                tlx.barrier_wait(seen, 0)
            tlx.barrier_arrive(bar)  # second
        with tlx.async_task(num_warps=4):
            tlx.barrier_wait(bar, 0)
            tlx.barrier_arrive(seen)
            if ORDERED:
                tlx.barrier_wait(bar, 1)


def test_a_missed_phase():
    everywhere(missed_kernel, (1,), ORDERED=True)
    errors = found((BarrierMisuse, Deadlock), missed_kernel, (1,), ORDERED=False)
    # Early, the waiter has been overtaken; late, it sleeps.
    assert {type(error) for error in errors} == {BarrierMisuse, Deadlock}
    for error in errors:
        if isinstance(error, BarrierMisuse):
            assert (error.file, error.line) == place(missed_kernel, "# second")
            assert "phase 1 can complete before task0 of CTA 0" in str(error)
            assert "a missed phase" in str(error)
        else:
            (wait,) = error.waits
            assert wait.role == TASK and wait.note.startswith("phase 0")


# A ring of slots: pipelines, and waits that a late copy lets pass a phase too early.


@triton.jit
def ring_kernel(
    desc, out_ptr, n,
    SLOTS: tl.constexpr, PRODUCERS: tl.constexpr, SHIFT: tl.constexpr, CONSUMERS: tl.constexpr,
    EVERY: tl.constexpr, COPY: tl.constexpr, TELL: tl.constexpr,
):  # fmt: skip
    """Producers fill a ring in turn, SHIFT on with each round; consumers read it in turn, or each
    reads EVERY item. TELL: a consumer tells the next one that its item has come."""
    ring = tlx.local_alloc((16,), tl.float32, SLOTS)
    full = tlx.alloc_barriers(SLOTS)
    empty = tlx.alloc_barriers(SLOTS, arrive_count=CONSUMERS if EVERY else 1)
    told = tlx.alloc_barriers(CONSUMERS)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            pass
        with tlx.async_task(num_warps=1, replicate=PRODUCERS):
            for i in range(n):
                stage, phase = i % SLOTS, i // SLOTS & 1
                if (i + i // SLOTS * SHIFT) % PRODUCERS == tlx.async_task_replica_id():
                    tlx.barrier_wait(empty[stage], phase ^ 1)  # empty
                    if COPY:
                        tlx.barrier_expect_bytes(full[stage], 64)
                        tlx.async_descriptor_load(desc, ring[stage], [i * 16], full[stage])
                    else:
                        tlx.local_store(ring[stage], tl.full((16,), i, tl.float32))
                        tlx.barrier_arrive(full[stage])
        with tlx.async_task(num_warps=1, replicate=CONSUMERS):
            role = tlx.async_task_replica_id()
            for i in range(0 if EVERY else role, n, 1 if EVERY else CONSUMERS):
                stage, phase = i % SLOTS, i // SLOTS & 1
                if TELL and i > 0:
                    tlx.barrier_wait(told[role], ((i - 1) // CONSUMERS) & 1)
                tlx.barrier_wait(full[stage], phase)  # full
                if TELL:
                    tlx.barrier_arrive(told[(role + 1) % CONSUMERS])
                x = tlx.local_load(ring[stage])
                tlx.barrier_arrive(empty[stage])
                if not EVERY or role == 0:
                    tl.store(out_ptr + i * 16 + tl.arange(0, 16), x)


LATE = ("modelled", *range(20))


def take_turns(schedule, slots, consumers, n=9, ctas=1, **options):
    x, out = torch.arange(n + 1.0).repeat_interleave(16), torch.full((n * 16 + 1,), -1.0)
    usual = {"PRODUCERS": 1, "SHIFT": 0, "EVERY": False, "COPY": True, "TELL": False}
    keywords = {"SLOTS": slots, "CONSUMERS": consumers, **usual, **options}
    report = run(ring_kernel, (ctas,), box(x, 16), out, n, **keywords, schedule=schedule)
    assert torch.equal(out[:-1], x[:-16]) and out[-1] == -1
    return report


@pytest.mark.parametrize("stages", (1, 2, 3))
@pytest.mark.parametrize("n", (0, 1, 7))
def test_a_pipeline(n, stages):
    """The programs store the same bits, which is no race."""
    for schedule in SCHEDULES:
        take_turns(schedule, stages, 1, n, ctas=2, COPY=False)


def test_a_pipeline_in_the_trace():
    report = take_turns("modelled", 2, 1, 5, COPY=False, trace=True)
    for barrier, kind, role, phases in (
        ("full[0]", "arrive", "task0", (0, 1, 2)),
        ("full[1]", "arrive", "task0", (0, 1)),
        ("full[0]", "wait", "task1", (0, 1, 2)),
        # The first wait of the producer passes before anything has arrived.
        ("empty[0]", "wait", "task0", (-1, 0, 1)),
    ):
        events = arrivals(report, barrier, kind)
        assert [event[:2] for event in events] == [(role, phase) for phase in phases]
        assert kind == "wait" or {event[2:] for event in events} == {(0, 0)}
    arrows = [
        (a.source, a.phase, a.target) for a in report.timeline.arrows if a.barrier[:4] == "full"
    ]
    assert set(arrows) <= {("task0", phase, "task1") for phase in (0, 1, 2)} and arrows
    assert all(a.left <= a.right for a in report.timeline.arrows)
    assert report.barriers == 5 and report.checks["barrier"] == 10


def test_an_event_of_a_helper_has_the_line_of_the_kernel_that_called_it():
    report = run(
        handover_rings.handover_kernel, (1,), box(torch.arange(48.0), 16), torch.zeros(48),
        16, 3, False, trace=True,
    )  # fmt: skip
    lines = Path(handover_rings.__file__).read_text().splitlines()
    called = {
        (event.kind, event.target[:-3]): lines[event.line - 1].strip()
        for event in report.timeline.events
        if event.kind in ("wait", "arrive") and event.line
    }
    assert called["wait", "tiles.empty"] == "stage = tiles.acquire(i)"
    assert called["wait", "tiles.full"] == "stage = tiles.wait(i)"
    assert called["arrive", "tiles.empty"] == "tiles.release(i)"


@pytest.mark.parametrize("slots, consumers", ((3, 2), (5, 2), (4, 3)))
@pytest.mark.parametrize("schedule", LATE)
def test_slots_that_go_from_role_to_role(schedule, slots, consumers):
    with pytest.raises((AliasedWait, Race, BarrierMisuse, UninitializedRead)) as caught:
        take_turns(schedule, slots, consumers)
    error = caught.value
    if schedule == "modelled":
        assert isinstance(error, AliasedWait)
    if isinstance(error, AliasedWait):
        assert (error.file, error.line) == place(ring_kernel, "# full")
        # The first role to be ahead: the second filling of the first slot, and no role saw both.
        assert error.barrier.startswith("full[") and error.phase == 1
        assert error.role.startswith("task1[") and error.role.endswith("of CTA 0")
        assert "full[" in str(error) and "nothing proves that phase 0 was over" in str(error)
        assert "parity 1 passes at once, as on a fresh barrier" in str(error)


@pytest.mark.parametrize(
    "slots, consumers, options",
    (
        (2, 2, {}),
        (4, 2, {}),
        (6, 3, {}),
        (3, 1, {}),
        (3, 2, {"n": 3}),  # no slot is used twice
        (3, 2, {"EVERY": True}),
        (3, 2, {"COPY": False}),  # the stores of one role land in their order
        (3, 2, {"TELL": True}),  # a role has heard that the phase before is over
        (4, 3, {"TELL": True}),
        # The consumer releases slots in order: one release proves all earlier ones.
        (3, 1, {"PRODUCERS": 2}),
    ),
)
def test_turns_that_are_right(slots, consumers, options):
    for schedule in LATE:
        take_turns(schedule, slots, consumers, **options)


def test_a_producer_that_may_find_its_buffer_empty_too_early():
    """Each consumer owns a slot, and nothing orders their releases; the producers swap slots."""
    kinds = set()
    for schedule in LATE:
        with pytest.raises((AliasedWait, Race, BarrierMisuse)) as caught:
            take_turns(schedule, 2, 2, PRODUCERS=2, SHIFT=1)
        kinds.add(type(caught.value))
        if isinstance(caught.value, AliasedWait):
            location = caught.value.file, caught.value.line
            assert location == place(ring_kernel, "# empty") and caught.value.phase == 1
            assert caught.value.barrier.startswith("empty[")
    assert AliasedWait in kinds


@triton.jit
def later_phase_kernel(PHASES: tl.constexpr, PROOF: tl.constexpr):
    bar = tlx.alloc_barriers(1)
    done = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            for i in tl.static_range(PHASES):
                tlx.barrier_arrive(bar)
                if i == PROOF:
                    tlx.barrier_arrive(done)
        with tlx.async_task(num_warps=1):
            if PROOF >= 0:
                tlx.barrier_wait(done, 0)
            tlx.barrier_wait(bar, (PHASES - 1) % 2)  # wait


@pytest.mark.parametrize(
    "phases, proof", ((1, -1), (1, 0), (2, 0), (2, 1), (3, 1), (3, 2), (4, 2), (4, 3))
)
def test_what_proves_that_the_phase_before_is_over(phases, proof):
    """The end of that phase, or something after it; phase 0 has none before it."""
    everywhere(later_phase_kernel, (1,), PHASES=phases, PROOF=proof)


@pytest.mark.parametrize("phases, proof", ((2, -1), (3, -1), (3, 0), (4, -1), (4, 0), (4, 1)))
def test_what_does_not(phases, proof):
    errors = found(
        (AliasedWait, BarrierMisuse), later_phase_kernel, (1,), PHASES=phases, PROOF=proof
    )
    aliased = [error for error in errors if isinstance(error, AliasedWait)]
    assert errors[0] in aliased
    location = place(later_phase_kernel, "# wait")
    for error in aliased:
        assert (error.file, error.line, error.barrier, error.role) == (*location, "bar", TASK)
        assert error.phase in range(phases - 1, 0, -2)


@triton.jit
def late_copies_kernel(desc, STEPS: tl.constexpr):
    ring = tlx.local_alloc((16,), tl.float32, 4)
    landed = tlx.alloc_barriers(4)
    fresh = tlx.alloc_barriers(1)
    marker = tlx.alloc_barriers(1)
    for i in tl.static_range(4):
        tlx.barrier_expect_bytes(landed[i], 64)
        tlx.async_descriptor_load(desc, ring[i], [i * 16], landed[i])
    for _ in tl.static_range(STEPS):
        tlx.barrier_wait(fresh, 1)
    tlx.barrier_arrive(marker)
    for i in tl.static_range(4):
        tlx.barrier_wait(landed[i], 0)


def test_copies_complete_in_any_order_under_random_schedules():
    def order(schedule):
        desc = box(torch.zeros(64), 16)
        report = run(late_copies_kernel, (1,), desc, STEPS=40, schedule=schedule, trace=True)
        events = (e for e in report.timeline.events if e.kind == "arrive")
        return [e.target for e in events if e.lane == "TMA" or e.target == "marker"]

    copies = [f"landed[{i}]" for i in range(4)]
    assert [name for name in order("modelled") if name != "marker"] == copies
    orders = [order(seed) for seed in range(60)]
    landings = {tuple(name for name in names if name != "marker") for names in orders}
    assert {names[0] for names in landings} == {names[-1] for names in landings} == set(copies)
    # Some copy is late by more than chance would allow, but not in most of the schedules.
    late = sum(names[-1] != "marker" for names in orders)
    assert 5 < late < 55


# Bytes.


@triton.jit
def bytes_kernel(desc, out_desc, BYTES: tl.constexpr, LATE: tl.constexpr, WAIT: tl.constexpr):
    buffer = tlx.local_alloc((8, 16), tl.float32, 1)
    bar = tlx.alloc_barriers(1)
    if LATE:
        tlx.async_descriptor_load(desc, buffer[0], [0, 0], bar)
        for _ in tl.static_range(4):
            tlx.barrier_wait(bar, 1)  # passes at once; the copy may land meanwhile
        tlx.barrier_expect_bytes(bar, BYTES)
    else:
        tlx.barrier_expect_bytes(bar, BYTES)
        tlx.async_descriptor_load(desc, buffer[0], [0, 0], bar)
    if WAIT:
        tlx.barrier_wait(bar, 0)
        out_desc.store([0, 0], tlx.local_load(buffer[0]))


def test_bytes_in_the_trace():
    report = run(bytes_kernel, (1,), *boxes()(), BYTES=512, LATE=False, WAIT=True, trace=True)
    (expect, deliver) = arrivals(report, "bar")
    assert expect == ("default", 0, 0, 512)
    assert deliver[0] == "TMA" and deliver[3] == 0
    (copy,) = (e for e in report.timeline.events if e.kind == "copy")
    assert copy.bytes == 512 and copy.target == "buffer[0]"
    assert report.bytes_loaded == report.bytes_stored == 512


@pytest.mark.parametrize("late", (False, True))
def test_bytes(late):
    everywhere(bytes_kernel, (1,), boxes(), of_first, BYTES=512, LATE=late, WAIT=True)
    message = "phase 0 receives 16 bytes more than expected"
    misused("bar", message, bytes_kernel, (1,), boxes(), BYTES=496, LATE=late, WAIT=True)
    keywords = {"BYTES": 528, "LATE": late, "WAIT": True, "match": "misses 0 arrivals and 16 bytes"}
    stuck([(DEFAULT, "bar of CTA 0", 0, 0, 16)], bytes_kernel, (1,), boxes(), **keywords)


@pytest.mark.parametrize("late", (False, True))
@pytest.mark.parametrize(
    "count, what", ((528, "still expecting 16"), (496, "16 bytes more|excess 16"))
)
def test_wrong_bytes_that_nobody_waits_for(count, what, late):
    keywords = {"BYTES": count, "LATE": late, "WAIT": False}
    found((BarrierMisuse, EarlyExit), bytes_kernel, (1,), boxes(), **keywords)
    misused("bar", what, bytes_kernel, (1,), boxes(), races=False, **keywords)


@triton.jit
def early_bytes_kernel(desc, out_desc):
    buffer = tlx.local_alloc((8, 16), tl.float32, 1)
    bar = tlx.alloc_barriers(1)
    other = tlx.local_alloc((8, 16), tl.float32, 1)
    landed = tlx.alloc_barriers(1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.async_descriptor_load(desc, buffer[0], [0, 0], bar)
            tlx.barrier_expect_bytes(landed, 512)
            tlx.async_descriptor_load(desc, other[0], [0, 0], landed)
        with tlx.async_task(num_warps=4):
            tlx.barrier_wait(landed, 0)
            tlx.barrier_expect_bytes(bar, 512)
            tlx.barrier_wait(bar, 0)
            out_desc.store([0, 0], tlx.local_load(buffer[0]))


def test_bytes_may_come_before_they_are_expected():
    everywhere(early_bytes_kernel, (1,), boxes(), of_first)
    report = run(early_bytes_kernel, (1,), *boxes()(), trace=True)
    assert [event[3] for event in arrivals(report, "bar")] == [-512, 0]


# Warp barriers: every thread arrives.


@triton.jit
def warps_kernel(WARPS: tl.constexpr, ARRIVALS: tl.constexpr, OWN: tl.constexpr):
    bar = tlx.alloc_warp_barrier(num_barriers=2, num_warps=WARPS, num_arrivals=ARRIVALS)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.barrier_wait(bar[1], 0)
        with tlx.async_task(num_warps=OWN, replicate=2):
            tlx.barrier_arrive(bar[1])


def test_warp_barriers():
    everywhere(warps_kernel, (1,), WARPS=4, ARRIVALS=2, OWN=4)
    everywhere(warps_kernel, (1,), WARPS=8, ARRIVALS=1, OWN=4)
    report = run(warps_kernel, (1,), WARPS=4, ARRIVALS=2, OWN=4, trace=True)
    assert [event[2] for event in arrivals(report, "bar[1]")][0] == 128


def test_a_warp_barrier_counts_the_threads_of_the_role():
    lacks = (DEFAULT, "bar[1] of CTA 0", 0, 256 - 64, 0)
    stuck([lacks], warps_kernel, (1,), WARPS=4, ARRIVALS=2, OWN=1)
    message = "128 arrivals in phase 0, which expects 64 more of 64"
    misused("bar[1]", message, warps_kernel, (1,), WARPS=2, ARRIVALS=1, OWN=4)


# Predicates, indices, other CTAs.


@triton.jit
def predicate_kernel(yes, WHAT: tl.constexpr):
    bar = tlx.alloc_barriers(1)
    if WHAT == "wait":
        tlx.barrier_wait(bar, 0, pred=yes != 0)
    if WHAT == "arrive":
        tlx.barrier_arrive(bar, pred=yes != 0)
        tlx.barrier_wait(bar, 0)
    if WHAT == "expect":
        tlx.barrier_expect_bytes(bar, 16, pred=yes != 0)


def test_predicates():
    for yes, what in ((0, "wait"), (2, "arrive"), (0, "expect")):
        run(predicate_kernel, (1,), yes, WHAT=what)
        error = refused((Deadlock, BarrierMisuse), None, predicate_kernel, 2 - yes, WHAT=what)
        text = "still expecting 16 bytes" if what == "expect" else "deadlock"
        assert text in str(error)


@triton.jit
def index_kernel(i, WHOLE: tl.constexpr):
    bars = tlx.alloc_barriers(3)
    if WHOLE:
        tlx.barrier_arrive(bars)
    else:
        tlx.barrier_arrive(tlx.local_view(bars, i))


def test_indices():
    run(index_kernel, (1,), 2, WHOLE=False)
    for i in (3, -1):
        refused(OutOfBounds, f"bars has 3 barriers, got index {i}", index_kernel, i, WHOLE=False)
    refused(InvalidKernel, "bars is 3 barriers; index it", index_kernel, 0, WHOLE=True)


@triton.jit
def remote_kernel(out_ptr, PEERS: tl.constexpr, COUNT: tl.constexpr):
    bar = tlx.alloc_barriers(1, arrive_count=COUNT)
    rank = tlx.cluster_cta_rank()
    for peer in tl.static_range(PEERS):
        tlx.barrier_arrive(bar, 1, remote_cta_rank=peer, pred=rank != peer)
    tlx.barrier_wait(bar, 0)
    tl.store(out_ptr + tl.program_id(0), rank)


def test_remote_arrivals():
    keywords = {"PEERS": 4, "COUNT": 3, "ctas_per_cga": (4, 1, 1)}
    everywhere(remote_kernel, (8,), ints(8), [0, 1, 2, 3, 0, 1, 2, 3], **keywords)


def test_remote_arrivals_that_miss():
    waits = [(f"default of CTA {i}", f"bar of CTA {i}", 0, 1, 0) for i in (0, 1)]
    stuck(waits, remote_kernel, (2,), ints(2), PEERS=2, COUNT=2, **PAIR)


def test_an_arrival_outside_of_the_cluster():
    with pytest.raises(EmulatorError, match=r"CTA rank must be in \[0, 2\)"):
        run(remote_kernel, (2,), torch.zeros(2), PEERS=3, COUNT=1, **PAIR)


@triton.jit
def remote_wait_kernel():
    bar = tlx.alloc_barriers(1)
    tlx.barrier_wait(tlx.remote_view(bar, 1 - tlx.cluster_cta_rank()), 1)


def test_a_wait_is_for_a_barrier_of_the_own_cta():
    refused(InvalidKernel, "own CTA", remote_wait_kernel, grid=(2,), **PAIR)


@triton.jit
def remote_excess_kernel():
    bar = tlx.alloc_barriers(1, arrive_count=2)
    tlx.cluster_barrier()
    if tlx.cluster_cta_rank() == 1:
        tlx.barrier_arrive(bar, 3, remote_cta_rank=0)
    tlx.cluster_barrier()


def test_a_remote_arrival_too_many():
    keywords = {"line": "barrier_arrive", "role": "default of CTA 1", **PAIR}
    misused("bar", "bar of CTA 0", remote_excess_kernel, (2,), **keywords)


# Named barriers.


@triton.jit
def turns_kernel(n, out_ptr, ORDERED: tl.constexpr):
    cell = tlx.local_alloc((32,), tl.int32, 1)
    tlx.local_store(cell[0], tl.zeros((32,), tl.int32))
    with tlx.async_tasks():
        with tlx.async_task("default"):
            for _ in range(n):
                x = tlx.local_load(cell[0])
                tlx.local_store(cell[0], x * 2 + 1)
                tlx.named_barrier_arrive(9, 256)
                if ORDERED:
                    tlx.named_barrier_wait(10, 256)
        with tlx.async_task(num_warps=4):
            for _ in range(n):
                if ORDERED:
                    tlx.named_barrier_wait(9, 256)
                x = tlx.local_load(cell[0])
                tlx.local_store(cell[0], x * 3)
                tlx.named_barrier_arrive(10, 256)
            tl.store(out_ptr + tl.arange(0, 32), tlx.local_load(cell[0]))


def test_named_barriers_take_turns():
    def arguments():
        return 5, *ints(32)()

    expected = 0
    for _ in range(5):
        expected = (expected * 2 + 1) * 3
    everywhere(turns_kernel, (2,), arguments, expected, ORDERED=True)
    for error in found(Race, turns_kernel, (1,), arguments, ORDERED=False):
        assert error.buffer == "cell[0]"


@triton.jit
def named_kernel(FIRST: tl.constexpr, SECOND: tl.constexpr, NUMBER: tl.constexpr):
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.named_barrier_wait(NUMBER, FIRST)
        with tlx.async_task(num_warps=1):
            tlx.named_barrier_arrive(NUMBER, SECOND)


def test_named_barriers_count_threads():
    everywhere(named_kernel, (1,), FIRST=160, SECOND=160, NUMBER=2)
    everywhere(named_kernel, (1,), FIRST=288, SECOND=288, NUMBER=15, num_warps=8)
    keywords = {"FIRST": 256, "SECOND": 256, "NUMBER": 3, "line": "barrier_wait"}
    stuck([(DEFAULT, "named barrier 3 of CTA 0", 0, 96, 0)], named_kernel, (1,), **keywords)


@pytest.mark.parametrize(
    "first, second, number, error, message",
    (
        (160, 192, 3, BarrierMisuse, "waits for (160|192) threads, but .* says (192|160)"),
        (144, 144, 3, InvalidKernel, "a multiple of 32 threads, got 144"),
        (160, 160, 16, ResourceLimit, "named barriers are 0 to 15, got 16"),
        (160, 160, -1, ResourceLimit, "named barriers are 0 to 15, got -1"),
    ),
)
def test_wrong_named_barriers(first, second, number, error, message):
    keywords = {"FIRST": first, "SECOND": second, "NUMBER": number}
    for each in found(error, named_kernel, (1,), match=message, **keywords):
        assert getattr(each, "barrier", "") in ("", f"named barrier {number}")


@triton.jit
def compilers_kernel(x_ptr, out_ptr, NUMBER: tl.constexpr):
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tl.store(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, 512))))
            tlx.named_barrier_wait(NUMBER, 320)
        with tlx.async_task(num_warps=1):
            tl.store(out_ptr + 1, tl.sum(tl.load(x_ptr + tl.arange(0, 512))))
        with tlx.async_task(num_warps=2, replicate=3):
            offsets = 2 + tlx.async_task_replica_id()
            tl.store(out_ptr + offsets, tl.sum(tl.load(x_ptr + tl.arange(0, 512))))
            tlx.named_barrier_wait(NUMBER, 320)


USES = {
    0: "the warps of the default task",
    1: "the start and end of tasks",
    **{3 + i: f"the warps of task1[{i}]" for i in range(3)},
}


def test_the_code_of_a_kernel_has_barriers_of_the_compilers():
    types = {"x_ptr": "*fp32", "out_ptr": "*fp32"}
    compiled = build(compilers_kernel, types, {"NUMBER": 15})
    used = re.findall(r"\b(?:bar|barrier)\.sync\s+(\d+)", compiled.asm["ptx"])
    assert set(map(int, used)) == {*USES, 15}


@pytest.mark.parametrize("number", (0, 1, 2, 3, 4, 5, 6, 15))
def test_a_kernel_leaves_those_alone(number):
    def arguments():
        return torch.zeros(512), torch.zeros(5)

    if number not in USES:
        everywhere(compilers_kernel, (1,), arguments, NUMBER=number)
        return
    text = f"named barrier {number} is the compiler's, for {USES[number]}; take another, say 15"
    found(BarrierMisuse, compilers_kernel, (1,), arguments, match=re.escape(text), NUMBER=number)


@triton.jit
def alone_kernel(THREADS: tl.constexpr, WAITS: tl.constexpr, ARRIVALS: tl.constexpr):
    for _ in tl.static_range(WAITS):
        tlx.named_barrier_wait(10, THREADS)  # wait
    for _ in tl.static_range(ARRIVALS):
        tlx.named_barrier_arrive(11, 2 * THREADS)  # arrive


def test_a_role_alone_may_leave_a_named_barrier_incomplete_at_the_end():
    run(alone_kernel, (1,), THREADS=256, WAITS=3, ARRIVALS=1, num_warps=8)
    for error, message, threads, waits, arrivals in (
        (Deadlock, None, 256, 1, 0),
        (BarrierMisuse, "128 threads arrive, 64 are expected", 64, 1, 0),
        (BarrierMisuse, "arrives twice before 256 threads", 128, 1, 2),
    ):
        keywords = {"THREADS": threads, "WAITS": waits, "ARRIVALS": arrivals, "num_warps": 4}
        line = "# arrive" if arrivals else "# wait"
        refused(error, message, alone_kernel, line=line, **keywords)


@triton.jit
def named_reuse_kernel(ORDERED: tl.constexpr):
    cell = tlx.local_alloc((32,), tl.int32, 1)
    tlx.local_store(cell[0], tl.zeros((32,), tl.int32))
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.named_barrier_wait(9, 256)
            tlx.local_load(cell[0])
            if ORDERED:
                tlx.named_barrier_arrive(10, 256)
            tlx.named_barrier_wait(9, 256)
        with tlx.async_task(num_warps=4):
            tlx.named_barrier_arrive(9, 256)
            if ORDERED:
                tlx.named_barrier_wait(10, 256)
            tlx.local_store(cell[0], tl.full((32,), 1, tl.int32))
            tlx.named_barrier_arrive(9, 256)


def test_a_named_barrier_passes_on_only_what_came_before_it():
    everywhere(named_reuse_kernel, (1,), ORDERED=True)
    errors = found((Race, BarrierMisuse), named_reuse_kernel, (1,), ORDERED=False)
    for error in errors:
        if isinstance(error, Race):
            assert error.buffer == "cell[0]"
        else:
            assert "task0 of CTA 0 arrives twice" in str(error)
    assert {type(error) for error in errors} == {Race, BarrierMisuse}


# The barrier of a cluster.


@triton.jit
def cluster_kernel(out_ptr, TIMES: tl.constexpr, LAZY: tl.constexpr):
    cell = tlx.local_alloc((16,), tl.int32, 1)
    rank = tlx.cluster_cta_rank()
    for i in tl.static_range(TIMES):
        value = tl.full((16,), i * 10, tl.int32) + rank
        tlx.remote_shmem_store(cell[0], value, 1 - rank)
        if i != LAZY:
            tlx.cluster_barrier()
        x = tlx.local_load(cell[0])
        tlx.cluster_barrier()
        tl.store(out_ptr + (tl.program_id(0) * TIMES + i) * 16 + tl.arange(0, 16), x)


def test_cluster_barrier():
    expected = torch.tensor([[1, 11, 21], [0, 10, 20]])[:, :, None]
    everywhere(cluster_kernel, (2,), ints(2, 3, 16), expected, TIMES=3, LAZY=-1, **PAIR)


def test_a_missing_cluster_barrier_is_a_race():
    finding = {"buffer": "cell[0]", "between": ("remote_shmem_store", "local_load")}
    raced(cluster_kernel, (2,), ints(2, 3, 16), TIMES=3, LAZY=1, **finding, **PAIR)


@triton.jit
def lonely_cluster_kernel():
    if tlx.cluster_cta_rank() == 0:
        tlx.cluster_barrier()


def test_a_cluster_barrier_that_one_cta_leaves_out():
    lacks = (DEFAULT, "cluster barrier", 0, 3, 0)
    stuck([lacks], lonely_cluster_kernel, (4,), ctas_per_cga=(4, 1, 1))
