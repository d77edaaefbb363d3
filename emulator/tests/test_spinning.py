"""Programs and roles that wait for memory in loops: until somebody writes, or for ever."""

import pytest
import torch
import triton
import triton.language as tl

from emulator.tests.checking import everywhere, found, place, refused, tlx
from tritonemu import Deadlock, Unsupported, run
from tritonemu.messages import explain


@triton.jit
def lock_kernel(lock, x, RELEASES: tl.constexpr):
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(x, tl.load(x) + 1)
    if RELEASES:
        tl.atomic_xchg(lock, 0)


def locks():
    return torch.zeros(1, dtype=torch.int32), torch.zeros(1)


@pytest.mark.parametrize("resident", (1, 2, 4))
def test_a_lock_that_nobody_releases(resident):
    """Each but one spins on it, whether or not all were to run together."""
    loop = place(lock_kernel, "while")
    for error in found(
        Deadlock, lock_kernel, (4,), locks, line="while", RELEASES=False, resident=resident
    ):
        (holder,) = {f"default of CTA {i}" for i in range(4)} - {wait.role for wait in error.waits}
        assert len(error.waits) == 3
        for wait in error.waits:
            assert (wait.location, wait.buffer, wait.element, wait.value) == (loop, "lock", 0, 1)
            assert wait.writer == (holder, loop)
            spins = (
                f"{wait.role} at {loop[0]}:{loop[1]} spins on element 0 of lock, which holds 1, "
            )
            assert f"{spins}last written by {holder} at {loop[0]}:{loop[1]}" in str(error)
            assert f"  {wait.role}: {loop[0]}:{loop[1]} in lock_kernel" in explain(error)
    everywhere(lock_kernel, (4,), locks, 4, RELEASES=True, resident=resident)


@triton.jit
def barrier_kernel(count, x, EXTRA: tl.constexpr, PLAIN: tl.constexpr):
    pid = tl.program_id(0)
    tl.store(x + pid, pid)
    tl.atomic_add(count, 1)
    if PLAIN:
        while tl.load(count, volatile=True) < tl.num_programs(0) + EXTRA:
            pass
    else:
        while tl.atomic_add(count, 0) < tl.num_programs(0) + EXTRA:
            pass
        total = tl.sum(tl.load(x + tl.arange(0, 4)))
        tl.store(x + 4 + pid, total)


def counted():
    return torch.zeros(1, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)


def test_programs_that_have_not_started_do_so_when_all_others_spin():
    everywhere(barrier_kernel, (4,), counted, [0, 1, 2, 3, 6, 6, 6, 6], EXTRA=0, PLAIN=False)


def test_how_many_must_run_together_is_noted():
    def notes(kernel, make_arguments, **options):
        return run(kernel, (4,), *make_arguments(), **options).notes

    barrier = {"EXTRA": 0, "PLAIN": False}
    (note,) = notes(barrier_kernel, counted, **barrier)
    assert note.startswith("4 of 4 programs must run at the same time")
    assert len(notes(barrier_kernel, counted, resident=2, **barrier)) == 1
    assert not notes(barrier_kernel, counted, resident=4, **barrier)
    assert not notes(barrier_kernel, counted, launch_cooperative_grid=True, **barrier)
    assert not notes(lock_kernel, locks, RELEASES=True)


@pytest.mark.parametrize("plain", (False, True))
def test_a_barrier_that_expects_too_many(plain):
    for error in found(Deadlock, barrier_kernel, (4,), counted, EXTRA=1, PLAIN=plain):
        words = {(w.role, w.buffer, w.value) for w in error.waits}
        assert words == {(f"default of CTA {i}", "count", 4) for i in range(4)}


@triton.jit
def endless_kernel(n, flags, KIND: tl.constexpr):
    if KIND == "nothing":
        while n > 0:
            pass
    else:
        while tl.load(flags + 2, volatile=True) == 0:
            pass


def test_who_wrote_it_is_said_if_anybody_did():
    flags = torch.zeros(4)
    match = "deadlock:\n.* spins in a loop that reads no memory"
    refused(Deadlock, match, endless_kernel, 5, flags, line="while n", KIND="nothing")
    match = r"spins on element 2 of flags, which holds 0\.0; no program wrote it"
    refused(Deadlock, match, endless_kernel, 5, flags, KIND="word")


@triton.jit
def late_kernel(flag, x, TURNS: tl.constexpr):
    if tl.program_id(0) == 0:
        while tl.atomic_add(flag, 0) == 0:
            pass
        tl.store(x + 1, tl.load(x))
    else:
        i = 0
        while i < TURNS:
            i += 1
        tl.store(x, i)
        tl.atomic_xchg(flag, 1)


def test_somebody_who_counts_may_end_a_wait():
    def made():
        return torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)

    everywhere(late_kernel, (2,), made, [50, 50], TURNS=50)
    everywhere(late_kernel, (2,), made, [50, 50], TURNS=50, resident=2)


def test_a_loop_that_counts_is_not_known_to_wait(monkeypatch):
    monkeypatch.setattr("tritonemu.rewrite.MAX_TURNS", 20)
    counters = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    match = r"more than 20 turns .* unless resident=2 says"
    refused(Unsupported, match, late_kernel, *counters, grid=(2,), line="while i", TURNS=50)


@triton.jit
def timed_kernel(flag, x):
    end = tl.extra.cuda.globaltimer() + 5000
    while (tl.atomic_add(flag, 0) == 0) & (tl.extra.cuda.globaltimer() < end):
        pass
    tl.store(x, 1)


def test_time_ends_a_wait():
    everywhere(timed_kernel, (2,), lambda: [torch.zeros(1, dtype=torch.int32), torch.zeros(1)], 1)


@triton.jit
def shared_kernel(x, BARRIER: tl.constexpr):
    """The state of a loop may be in shared memory; a role may be blocked while another spins."""
    lanes = tl.arange(0, 16)
    buffer = tlx.local_alloc((16,), tl.int32, 1)
    full = tlx.alloc_barriers(1)
    tlx.local_store(buffer[0], lanes * 0)
    while tl.max(tlx.local_load(buffer[0]), 0) < 5:
        tlx.local_store(buffer[0], tlx.local_load(buffer[0]) + 1)
    tl.store(x + lanes, tlx.local_load(buffer[0]))
    if BARRIER:
        with tlx.async_tasks():
            with tlx.async_task("default"):
                while tl.atomic_add(x, 0) == 5:
                    pass
                tlx.barrier_arrive(full[0])
            with tlx.async_task(num_warps=1):
                tlx.barrier_wait(full[0], 0)


@pytest.mark.tlx
def test_roles():
    def made():
        return (torch.zeros(16, dtype=torch.int32),)

    everywhere(shared_kernel, (1,), made, 5, BARRIER=False)
    for error in found(Deadlock, shared_kernel, (1,), made, BARRIER=True):
        spin, wait = error.waits
        assert (spin.role, spin.buffer, spin.value) == ("default of CTA 0", "x", 5)
        assert (wait.role, wait.barrier, wait.arrivals) == ("task0 of CTA 0", "full of CTA 0", 1)
