"""Orders and searches: what exhaustive search leaves out does not matter, and mistakes of order."""

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from emulator.tests import handover, handover_rings
from emulator.tests.checking import box, ints, tlx
from emulator.tests.judging import executed_lines, import_file
from emulator.tests.mutants import enumerate_mutants
from tritonemu import EmulatorError, enabled, run
from tritonemu.orders import order_of
from tritonemu.search import Search, _Tree

pytestmark = pytest.mark.tlx

MAX_STEPS = 2000
# Of all interleavings, where there are more.
MOST = 400


def numbers(count):
    return ints(count, fill=0)()[0]


# Kernels whose mistakes show in some orders only. RIGHT: without the mistake.


@triton.jit
def count(count_ptr, RIGHT: tl.constexpr, TURNS: tl.constexpr):
    for _ in range(TURNS):
        if RIGHT:
            tl.atomic_add(count_ptr, 1)
        else:
            before = tl.atomic_or(count_ptr, 0)
            tl.atomic_xchg(count_ptr, before + 1)


@triton.jit
def count_kernel(count_ptr, out_ptr, RIGHT: tl.constexpr, TURNS: tl.constexpr):
    """Each of two roles adds TURNS; wrong: in two steps."""
    with tlx.async_tasks():
        with tlx.async_task("default"):
            count(count_ptr, RIGHT, TURNS)
        with tlx.async_task(num_warps=4):
            count(count_ptr, RIGHT, TURNS)


@triton.jit
def locks_kernel(lock_ptr, out_ptr, RIGHT: tl.constexpr, TURNS: tl.constexpr):
    """Two roles take two locks; wrong: in opposite order. Nobody waits: they give up, and tell."""
    with tlx.async_tasks():
        with tlx.async_task("default"):
            if tl.atomic_cas(lock_ptr, 0, 1) == 0:
                if tl.atomic_cas(lock_ptr + 1, 0, 1) == 0:
                    tl.atomic_xchg(lock_ptr + 1, 0)
                else:
                    tl.atomic_add(out_ptr, 1)
                tl.atomic_xchg(lock_ptr, 0)
        with tlx.async_task(num_warps=4):
            if tl.atomic_cas(lock_ptr + 1 - RIGHT, 0, 1) == 0:
                if tl.atomic_cas(lock_ptr + RIGHT, 0, 1) == 0:
                    tl.atomic_xchg(lock_ptr + RIGHT, 0)
                else:
                    tl.atomic_add(out_ptr, 1)
                tl.atomic_xchg(lock_ptr + 1 - RIGHT, 0)


@triton.jit
def named_kernel(count_ptr, out_ptr, RIGHT: tl.constexpr, TURNS: tl.constexpr):
    """Two pairs of roles meet; wrong: on one named barrier, where any two of them pass."""
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.named_barrier_wait(9, 256)
        with tlx.async_task(num_warps=4):
            tlx.named_barrier_wait(9, 256)
            tl.atomic_add(count_ptr, 1)
        with tlx.async_task(num_warps=4):
            tlx.named_barrier_wait(9 + RIGHT, 256)
            if tl.atomic_or(count_ptr, 0) == 1 and not RIGHT:
                tl.atomic_xchg(out_ptr, 1)
        with tlx.async_task(num_warps=4):
            tlx.named_barrier_wait(9 + RIGHT, 256)


@triton.jit
def delay_kernel(state_ptr, out_ptr, RIGHT: tl.constexpr, TURNS: tl.constexpr):
    """One role looks, then acts; wrong if all TURNS of the other fit in between."""
    with tlx.async_tasks():
        with tlx.async_task("default"):
            seen = tl.atomic_or(state_ptr, 0)
            now = tl.atomic_or(state_ptr, 0)
            if not RIGHT and (seen == 0) & (now == TURNS):
                tl.atomic_xchg(out_ptr, 1)
        with tlx.async_task(num_warps=4):
            for _ in range(TURNS):
                tl.atomic_add(state_ptr, 1)


@triton.jit
def threads_kernel(state_ptr, out_ptr, RIGHT: tl.constexpr, TURNS: tl.constexpr):
    """A role of 256 threads waits for one of 128; wrong: for 256 of both."""
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.named_barrier_wait(9, 256 + 128 * RIGHT)
        with tlx.async_task(num_warps=4):
            tlx.named_barrier_arrive(9, 256 + 128 * RIGHT)


def meet(order, right):
    """Run `threads_kernel`."""
    try:
        run(threads_kernel, (1,), None, None, int(right), 1, schedule=order, num_warps=8)
    except EmulatorError as error:
        return type(error).__name__


def test_arrivals_that_complete_a_phase_do_not_commute():
    """Two arrivals in one phase do, unless one of them is enough."""
    outcomes, tree = explored(lambda order: meet(order, False))
    assert set(outcomes) == {None, "BarrierMisuse"} and (tree.classes, tree.useless) == (2, 0)
    outcomes, tree = explored(lambda order: meet(order, True))
    assert outcomes == [None] and tree.classes == 1


@triton.jit
def perform(state_ptr, out_ptr, full, seen, PROGRAM: tl.constexpr, ROLE: tl.constexpr):
    """A random program: atomics on two elements, arrivals and waits of three kinds."""
    for i in tl.static_range(len(PROGRAM)):
        if PROGRAM[i] == 0:
            seen = seen * 7 + tl.atomic_add(state_ptr, 1)
        elif PROGRAM[i] == 1:
            seen = seen * 7 + tl.atomic_xchg(state_ptr + 1, ROLE + 1)
        elif PROGRAM[i] == 2:
            seen = seen * 7 + tl.atomic_or(state_ptr + 1, 0)
        elif PROGRAM[i] == 3:
            tlx.named_barrier_wait(9, 256)
        elif PROGRAM[i] == 4:
            tlx.named_barrier_arrive(9, 256)
        elif PROGRAM[i] == 5:
            tlx.barrier_arrive(full)
        else:
            tlx.barrier_wait(full, PROGRAM[i] - 6)
    tl.store(out_ptr + ROLE, seen)


@triton.jit
def random_kernel(
    state_ptr, out_ptr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, COUNT: tl.constexpr
):
    full = tlx.alloc_barriers(1, COUNT)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            perform(state_ptr, out_ptr, full[0], 1, A, 0)
        with tlx.async_task(num_warps=4):
            perform(state_ptr, out_ptr, full[0], 1, B, 1)
        with tlx.async_task(num_warps=4):
            perform(state_ptr, out_ptr, full[0], 1, C, 2)


@pytest.mark.sweep
def test_random_programs_lose_no_outcome():
    """Search finds something if any interleaving has a finding; if none has, all results."""
    choice, mixed, several = random.Random(7), 0, 0
    for _ in range(16):
        programs = [tuple(choice.choices(range(8), k=k)) for k in (2, 2, 1)]
        count = choice.randint(1, 2)

        def execute(order, programs=programs, count=count):
            state, out = numbers(2), numbers(3)
            run(random_kernel, (1,), state, out, *programs, count, schedule=order)
            return (*state.tolist(), *out.tolist())

        fewer, tree = explored(execute, most=3000)
        each, every = explored(execute, reduced=False, most=100)
        each += explored(execute, orders=map(order_of, range(20)))[0]
        findings = {isinstance(outcome, str) for outcome in each}
        if True in findings:
            assert any(isinstance(outcome, str) for outcome in fewer), (programs, count)
        else:
            assert set(each) <= set(fewer), (programs, count)
            assert not every.exhausted or set(each) == set(fewer), (programs, count)
        mixed += len(findings) == 2
        several += findings == {False} and len(set(fewer)) > 1
    assert mixed and several, (mixed, several)


KERNELS = {
    "count": (count_kernel, 2),
    "locks": (locks_kernel, 1),
    "named": (named_kernel, 1),
    "delay": (delay_kernel, 6),
}


def outcome(name, order, right=False, turns=None):
    """The results, and whether they are right."""
    kernel, usual = KERNELS[name]
    turns = turns or usual
    state, out = numbers(2), numbers(1)
    run(kernel, (1,), state, out, int(right), turns, schedule=order, max_steps=MAX_STEPS)
    results = (*state.tolist(), *out.tolist())
    expected = {"count": 2 * turns, "locks": 0, "named": 1, "delay": turns}
    return results, results == (expected[name], 0, 0)


def explored(execute, reduced=True, most=1000, orders=None):
    """Return the results of the executions of a tree, and the tree."""
    tree, outcomes = _Tree(reduced), []
    for order in orders or tree.executions(most):
        try:
            outcomes.append(execute(order))
        except EmulatorError as error:
            outcomes.append(type(error).__name__)
    assert tree.exhausted or orders or not reduced
    return outcomes, tree


@pytest.mark.parametrize("right", (True, False))
@pytest.mark.parametrize("name", KERNELS)
def test_reduction_loses_no_outcome(name, right):
    turns = {"count": 2, "delay": 3}.get(name)
    fewer, tree = explored(lambda order: outcome(name, order, right, turns))
    each = explored(lambda order: outcome(name, order, right, turns), reduced=False, most=MOST)
    assert set(fewer) == set(each[0]) if each[1].exhausted else set(fewer) >= set(each[0])
    assert tree.classes <= each[1].classes and tree.classes + tree.useless == len(fewer)
    assert all(good for _, good in fewer) == right


def test_independent_steps_have_one_order():
    for name, classes in (("count", 2), ("named", 3)):
        _, tree = explored(lambda order, name=name: outcome(name, order, False, 1))
        assert tree.classes >= classes
    for turns in (1, 2, 3):
        _, tree = explored(lambda order, turns=turns: outcome("count", order, True, turns))
        # The increments of two roles mix in C(2n, n) ways.
        assert tree.classes == {1: 2, 2: 6, 3: 20}[turns]


def hand_over(order, module=handover, steps=3):
    source, out = torch.arange(16.0 * steps), torch.zeros(16 * steps)
    arguments = box(source, 16), out, 16, steps, False
    run(module.handover_kernel, (1,), *arguments, schedule=order, max_steps=MAX_STEPS)
    assert torch.equal(out, source)


@pytest.mark.parametrize("steps", (1, 3, 8))
def test_a_pipeline_on_mbarriers_has_one_class(steps):
    _, tree = explored(lambda order: hand_over(order, steps=steps))
    assert (tree.classes, tree.useless) == (1, 0)


def test_one_class_stands_for_all_interleavings():
    outcomes, tree = explored(lambda order: hand_over(order, steps=1), reduced=False)
    assert set(outcomes) == {None} and tree.exhausted and tree.classes > 10


HANDOVER = """\
alloc_barriers: arrive_count=2
alloc_barriers: arrive_count=2 (2)
drop barrier_wait(empty[i % 2], (i // 2 + 1) % 2)
barrier_wait(empty[i % 2]): phase=(i // 2 + 1) % 2 ^ 1
empty[i % 2] -> next
drop barrier_expect_bytes(full[i % 2], 4 * SIZE)
barrier_expect_bytes(full[i % 2]): size=4 * SIZE * 2
barrier_expect_bytes(full[i % 2]): size=4 * SIZE // 2
full[i % 2] -> next
tiles[i % 2] -> next
full[i % 2] -> next (2)
drop barrier_arrive(full[i % 2])
barrier_arrive(full[i % 2]): arrive_count=2
full[i % 2] -> next (3)
drop barrier_wait(full[i % 2], i // 2 % 2)
barrier_wait(full[i % 2]): phase=i // 2 % 2 ^ 1
full[i % 2] -> next (4)
tiles[i % 2] -> next (2)
drop barrier_arrive(empty[i % 2])
barrier_arrive(empty[i % 2]): arrive_count=2
barrier_arrive(empty[i % 2]) before tile = local_load(tiles[i % 2])
empty[i % 2] -> next (2)
"""


def unnoticed(file, folder):
    """The mutants of `handover_kernel` in a file, and those of them that some order lets pass."""
    path, missed = Path(file.__file__), []
    mutants = enumerate_mutants(path, "handover_kernel")
    lines = executed_lines(path, lambda: hand_over("modelled", file))
    for i, mutant in enumerate(mutants):
        if lines.isdisjoint(range(*mutant.span)):
            continue
        changed = folder / f"mutant{i}.py"
        changed.write_text(mutant.source)
        module = import_file(changed)
        fewer = explored(lambda order, module=module: hand_over(order, module))[0]
        if not all(isinstance(each, str) for each in fewer):
            missed.append(mutant.what)
    return mutants, missed


def test_mutants_of_a_pipeline_are_found_whatever_the_order(tmp_path):
    """No order that search tries misses one."""
    mutants, missed = unnoticed(handover, tmp_path)
    assert [mutant.what for mutant in mutants] == HANDOVER.splitlines()
    text = Path(handover.__file__).read_text()
    assert all(mutant.source.count("\n") == text.count("\n") for mutant in mutants)
    assert missed == []


def test_methods_are_changed_for_one_call_at_a_time(tmp_path):
    """A ring's kernel has the mutants of the same kernel without; each changes one line, and what
    it adds stands at the end."""
    mutants, missed = unnoticed(handover_rings, tmp_path)
    inline = enumerate_mutants(Path(handover.__file__), "handover_kernel")
    assert Counter(x.kind for x in mutants) == Counter(x.kind for x in inline)
    text = Path(handover_rings.__file__).read_text().splitlines()
    for mutant in mutants:
        changed = zip(text, mutant.source.splitlines(), strict=False)
        lines = [n for n, (old, new) in enumerate(changed, 1) if old != new]
        assert len(lines) == 1 + (mutant.kind == "early") and mutant.lines[0] in lines, mutant.what
    assert missed == []


@pytest.mark.parametrize("name", KERNELS)
def test_search_finds_and_names_the_order(name):
    search = Search("exhaustive", schedules=400)
    wrong = next(order for order in search if not order.modelled and not outcome(name, order)[1])
    assert not search.exhausted
    assert not outcome(name, str(wrong))[1]
    assert outcome(name, str(wrong)) == outcome(name, str(wrong))


def test_search_says_what_it_covered():
    search = Search("exhaustive", 100)
    for order in search:
        hand_over(order)
    assert str(search) == "all interleavings: 1 class of interleavings, in 2 executions"
    assert search.as_json() == {
        "search": "exhaustive", "schedules": 2, "exhausted": True, "classes": 1, "redundant": 0,
    }  # fmt: skip
    search = Search("exhaustive", 3)
    for order in search:
        outcome("count", order, True, 3)
    assert str(search) == "3 classes of interleavings in 4 executions; there are more"
    search = Search("random", 2)
    for _ in range(2):
        assert [str(order) for order in search] == ["modelled", "0", "1"]
    assert str(search) == "the modelled and 2 random schedules"


def test_a_role_that_spins_does_not_starve_the_others():
    @triton.jit
    def spin_kernel(flag_ptr):
        with tlx.async_tasks():
            with tlx.async_task("default"):
                while tl.atomic_add(flag_ptr, 0) == 0:
                    pass
            with tlx.async_task(num_warps=4):
                tl.atomic_xchg(flag_ptr, 1)

    run(spin_kernel, (1,), numbers(1), schedule="choices:", max_steps=MAX_STEPS)
    search = Search("exhaustive", 40)
    for order in search:
        run(spin_kernel, (1,), numbers(1), schedule=order, max_steps=MAX_STEPS)
    assert not search.exhausted and search.tried == 41


def test_choices_hold_over_the_launches_of_a_function():
    def function():
        state, out = numbers(2), numbers(1)
        for _ in range(2):
            count_kernel[(1,)](state, out, 0, 1)
        assert state.tolist() == [4, 0], state.tolist()

    search = Search("exhaustive", 50)
    with pytest.raises(AssertionError) as caught:
        for order in search:
            with enabled(schedule=order):
                function()
    with pytest.raises(AssertionError) as again, enabled(schedule=str(order)):
        function()
    assert str(again.value) == str(caught.value)


@pytest.mark.parametrize("schedule", ("pct:1:3:20", "choices:1", "quick", None, 1.5, True))
def test_other_names_are_refused(schedule):
    with pytest.raises(ValueError, match="schedule must be"):
        order_of(schedule)


@pytest.mark.parametrize("name", ("modelled", "3", "choices:", "choices:0.3=1,1.0=2"))
def test_names_of_orders(name):
    assert order_of(name).name == ("choices:" if name.startswith("choices") else name)
