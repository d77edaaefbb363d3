"""Random pipelines, right or with one fault, judged by the emulator and by a search of all orders.

A pipeline is a list of steps per role: producers fill parts of a ring of buffers, by stores or by
copies, an optional forwarder moves them to a second ring, and consumers read them, each all items
or all in turn. It is written to a file as a kernel. The search (`explore`) walks every interleaving
of the steps with its own small model of barriers, and needs no clocks: accesses race if in some
state both come next, and a wait is ambiguous if it passes in different phases.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from emulator.tests.checking import box
from emulator.tests.judging import import_file
from tritonemu import (
    AliasedWait,
    BarrierMisuse,
    Deadlock,
    EmulatorError,
    Race,
    UninitializedRead,
    run,
)

PART_BYTES = 16
MOST_STATES = 6000
SCHEDULES = ("modelled", 0, 1, 2, 3)


class Step(NamedTuple):
    """One operation of a role.

    wait: parity `number`. arrive: one arrival. expect: an arrival that announces `number` bytes.
    copy: the asynchronous write of part `part` of buffer `place`, awaited on `barrier`. write: the
    same by the role itself. read: all parts of `place`, for result `item`. forward: writes to
    `place` what was read last. `place` is (ring, stage), `barrier` is (name, stage).
    """

    kind: str
    barrier: tuple[str, int] | None = None
    number: int = 0
    place: tuple[str, int] | None = None
    part: int = 0
    item: int = 0


@dataclass
class Pipeline:
    """counts: name of an array of barriers -> arrivals per phase. turns: whether each item has one
    consumer, in turn, instead of all. roles: their steps."""

    stages: int
    parts: int
    items: int
    consumers: int
    rings: tuple[str, ...]
    counts: dict[str, int]
    turns: bool = False
    roles: list[list[Step]] = field(default_factory=list)

    @property
    def results(self) -> list[int]:
        """The item of each result: all items, for each consumer that reads all."""
        return list(range(self.items)) * (1 if self.turns else self.consumers)


def build(
    stages: int,
    copies: tuple[bool, ...],
    forward: bool,
    consumers: int,
    items: int,
    turns: bool = False,
) -> Pipeline:
    """A right pipeline; `copies` says of each producer whether it copies or stores.

    With `turns` it is right if `stages` is a multiple of `consumers`, or luck if it is not.
    """
    parts, readers = len(copies), 1 if turns else consumers
    counts = {"full": parts, "empty": 1 if forward else readers}
    last, filled, emptied = "ring", "full", "empty"
    if forward:
        counts |= {"ready": 1, "free": readers}
        last, filled, emptied = "second", "ready", "free"
    rings = ("ring", "second") if forward else ("ring",)
    pipeline = Pipeline(stages, parts, items, consumers, rings, counts, turns)
    uses = [(i, i % stages, i // stages % 2) for i in range(items)]
    for part, copy in enumerate(copies):
        steps = []
        for i, stage, phase in uses:
            full, slot = ("full", stage), ("ring", stage)
            steps.append(Step("wait", ("empty", stage), 1 - phase))
            if copy:
                steps += [Step("expect", full, PART_BYTES), Step("copy", full, 0, slot, part, i)]
            else:
                steps += [Step("write", None, 0, slot, part, i), Step("arrive", full)]
        pipeline.roles.append(steps)
    if forward:
        steps = []
        for i, stage, phase in uses:
            steps += [
                Step("wait", ("full", stage), phase),
                Step("read", None, 0, ("ring", stage), 0, -1),
                Step("arrive", ("empty", stage)),
                Step("wait", ("free", stage), 1 - phase),
                Step("forward", None, 0, ("second", stage), 0, i),
                Step("arrive", ("ready", stage)),
            ]
        pipeline.roles.append(steps)
    for consumer in range(consumers):
        steps = []
        for i, stage, phase in uses[consumer::consumers] if turns else uses:
            number = i if turns else consumer * items + i
            read = Step("read", None, 0, (last, stage), 0, number)
            steps += [Step("wait", (filled, stage), phase), read, Step("arrive", (emptied, stage))]
        pipeline.roles.append(steps)
    return pipeline


# Fault -> the kinds of steps that it befalls.
FAULTS = {
    "no wait": ("wait",),
    "no arrival": ("arrive", "expect"),
    "parity": ("wait",),
    "count": (),
    "bytes": ("expect",),
    "early release": ("read",),
    "stage": ("copy", "write", "read", "forward"),
}


def break_it(pipeline: Pipeline, fault: str, number: int) -> bool:
    """Apply one fault at a place that `number` chooses; False if there is none of the kind."""
    if fault == "count":
        name = sorted(pipeline.counts)[number % len(pipeline.counts)]
        pipeline.counts[name] += 1 if number % 3 or pipeline.counts[name] == 1 else -1
        return True
    places = [
        (role, i)
        for role in pipeline.roles
        for i in range(len(role))
        if role[i].kind in FAULTS[fault]
        and (fault != "early release" or role[i + 1].kind == "arrive")
    ]
    if not places or (fault == "stage" and pipeline.stages == 1):
        return False
    role, i = places[number % len(places)]
    if fault in ("no wait", "no arrival"):
        del role[i]
    elif fault == "parity":
        role[i] = role[i]._replace(number=1 - role[i].number)
    elif fault == "bytes":
        role[i] = role[i]._replace(number=(0, 8, 32)[number % 3])
    elif fault == "early release":
        role[i], role[i + 1] = role[i + 1], role[i]
    else:
        ring, stage = role[i].place
        role[i] = role[i]._replace(place=(ring, (stage + 1) % pipeline.stages))
    return True


# The search.


class State(NamedTuple):
    """at: the next step of each role. barriers: (phases, pending arrivals, missing bytes) of each.
    flying: steps of copies under way. cells: the item in each part of each buffer, None at first.
    held: what each role read last.
    """

    at: tuple[int, ...]
    barriers: tuple[tuple[int, int, int], ...]
    flying: tuple[Step, ...]
    cells: tuple[Any, ...]
    held: tuple[Any, ...]


class Search:
    """Every order of the steps of a pipeline; `findings` are the errors that some order meets."""

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline
        names = [(n, s) for n in pipeline.counts for s in range(pipeline.stages)]
        self.numbers = {name: i for i, name in enumerate(names)}
        self.counts = [pipeline.counts[name] for name, _ in names]
        places = itertools.product(pipeline.rings, range(pipeline.stages), range(pipeline.parts))
        self.cells = {cell: i for i, cell in enumerate(places)}
        self.findings: set[type[EmulatorError]] = set()
        self.outputs: dict[int, set[Any]] = {}
        self.phases: dict[tuple[int, int], int] = {}

    def explore(self) -> bool:
        """False if there are too many states."""
        roles = len(self.pipeline.roles)
        first = State(
            (0,) * roles, tuple((0, count, 0) for count in self.counts), (),
            (None,) * len(self.cells), (None,) * roles,
        )  # fmt: skip
        seen, todo = {first}, [first]
        while todo:
            state = todo.pop()
            self._races(state)
            following = [s for s in self._following(state) if s is not None]
            for new in following:
                if new not in seen:
                    seen.add(new)
                    todo.append(new)
            if len(seen) > MOST_STATES:
                return False
        return True

    def _steps(self, state: State) -> Iterator[tuple[int, Step]]:
        for role, (steps, position) in enumerate(zip(self.pipeline.roles, state.at, strict=True)):
            if position < len(steps):
                yield role, steps[position]

    def _touched(self, step: Step) -> range | tuple[int, ...]:
        first = self.cells[(*step.place, 0)]
        if step.kind in ("read", "forward"):
            return range(first, first + self.pipeline.parts)
        return (first + step.part,)

    def _races(self, state: State) -> None:
        kinds = ("read", "write", "forward")
        accesses = [s for _, s in self._steps(state) if s.kind in kinds] + list(state.flying)
        for one, other in itertools.combinations(accesses, 2):
            both_read = one.kind == other.kind == "read"
            if not both_read and set(self._touched(one)) & set(self._touched(other)):
                self.findings.add(Race)

    def _passes(self, state: State, step: Step) -> bool:
        return state.barriers[self.numbers[step.barrier]][0] % 2 != step.number

    def _signal(self, state: State, step: Step, arrivals: int, num_bytes: int) -> State | None:
        """Arrivals, and bytes that are announced (or have come, negative), on a barrier."""
        number = self.numbers[step.barrier]
        phase, pending, missing = state.barriers[number]
        pending, missing = pending - arrivals, missing + num_bytes
        if pending < 0 or (pending == 0 and missing < 0):
            self.findings.add(BarrierMisuse)
            return None
        if pending == missing == 0:
            # Whoever could have passed a wait, and cannot any more, has been overtaken.
            for _, waiting in self._steps(state):
                is_concerned = waiting.kind == "wait" and waiting.barrier == step.barrier
                if is_concerned and self._passes(state, waiting):
                    self.findings.add(BarrierMisuse)
            phase, pending = phase + 1, self.counts[number]
        barriers = list(state.barriers)
        barriers[number] = (phase, pending, missing)
        return state._replace(barriers=tuple(barriers))

    def _following(self, state: State) -> Iterator[State | None]:
        moved = False
        for i, copy in enumerate(state.flying):
            moved = True
            new = self._signal(state, copy, 0, -PART_BYTES)
            if new is not None:
                flying = state.flying[:i] + state.flying[i + 1 :]
                yield self._fill(new._replace(flying=flying), copy, copy.item)
        for role, step in self._steps(state):
            if step.kind == "wait" and not self._passes(state, step):
                continue
            moved = True
            new = self._perform(state, role, step)
            if new is not None:
                yield new._replace(at=tuple(n + (i == role) for i, n in enumerate(new.at)))
        if not moved:
            if any(True for _ in self._steps(state)):
                self.findings.add(Deadlock)
            elif any(missing for _, _, missing in state.barriers):
                self.findings.add(BarrierMisuse)

    def _fill(self, state: State, step: Step, value: Any) -> State:
        cells = list(state.cells)
        for i, cell in enumerate(self._touched(step)):
            cells[cell] = value[i] if isinstance(value, tuple) else (value, step.part)
        return state._replace(cells=tuple(cells))

    def _perform(self, state: State, role: int, step: Step) -> State | None:
        if step.kind in ("arrive", "expect", "wait"):
            # What happens in one phase or in another, by chance, is a mistake.
            phase = state.barriers[self.numbers[step.barrier]][0]
            if self.phases.setdefault((role, state.at[role]), phase) != phase:
                self.findings.add(AliasedWait if step.kind == "wait" else BarrierMisuse)
        if step.kind in ("arrive", "expect"):
            return self._signal(state, step, 1, step.number)
        if step.kind == "copy":
            return state._replace(flying=tuple(sorted((*state.flying, step))))
        if step.kind == "write":
            return self._fill(state, step, step.item)
        if step.kind == "forward":
            return self._fill(state, step, state.held[role])
        if step.kind == "read":
            value = tuple(state.cells[cell] for cell in self._touched(step))
            if None in value:
                self.findings.add(UninitializedRead)
                return None
            if step.item >= 0:
                self.outputs.setdefault(step.item, set()).add(value)
                return state
            held = tuple(value if i == role else old for i, old in enumerate(state.held))
            return state._replace(held=held)
        return state


# The kernel.

HEADER = """
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx


@triton.jit
def put(out_ptr, rows):
    lanes = tl.arange(0, rows.shape[0])[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(out_ptr + lanes, rows)


@triton.jit
def kernel(x_desc, out_ptr):
"""


def source(pipeline: Pipeline) -> str:
    """The pipeline as a kernel: x holds the parts of the items, out takes what is read."""
    lines = [HEADER]
    shape = f"({pipeline.parts}, 4), tl.float32, {pipeline.stages}"
    lines += [f"    {ring} = tlx.local_alloc({shape})" for ring in pipeline.rings]
    for name, count in pipeline.counts.items():
        lines.append(f"    {name} = tlx.alloc_barriers({pipeline.stages}, arrive_count={count})")
    lines.append("    with tlx.async_tasks():")
    for number, steps in enumerate(pipeline.roles):
        task = "num_warps=1" if number else '"default"'
        lines.append(f"        with tlx.async_task({task}):")
        statements = [_statement(pipeline, step) for step in steps] or ["pass"]
        lines += [f"            {statement}" for statement in statements]
    return "\n".join(lines) + "\n"


def _statement(pipeline: Pipeline, step: Step) -> str:
    barrier = "{}[{}]".format(*step.barrier) if step.barrier else ""
    buffer = "{}[{}]".format(*step.place) if step.place else ""
    part = f"tlx.local_slice({buffer}, [{step.part}, 0], [1, 4])"
    row = step.item * pipeline.parts + step.part
    load = f"tlx.local_load({buffer})"
    taken = step.item * pipeline.parts * 4
    return {
        "wait": f"tlx.barrier_wait({barrier}, {step.number})",
        "arrive": f"tlx.barrier_arrive({barrier})",
        "expect": f"tlx.barrier_expect_bytes({barrier}, {step.number})",
        "copy": f"tlx.async_descriptor_load(x_desc, {part}, [{row}, 0], {barrier})",
        "write": f"tlx.local_store({part}, tl.full((1, 4), {row + 1}, tl.float32))",
        "forward": f"tlx.local_store({buffer}, value)",
        "read": f"value = {load}" if step.item < 0 else f"put(out_ptr + {taken}, {load})",
    }[step.kind]


NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pipelines")


def emulate(pipeline: Pipeline, folder: Any) -> list[torch.Tensor | EmulatorError]:
    """The output, or the error, under each schedule."""
    path = folder / f"pipeline{next(NUMBERS)}.py"
    path.write_text(source(pipeline), encoding="utf-8")
    module = import_file(path)
    rows = pipeline.items * pipeline.parts
    x = torch.arange(1.0, rows + 1)[:, None].repeat(1, 4)
    results = []
    for schedule in SCHEDULES:
        out = torch.full((len(pipeline.results), pipeline.parts, 4), -1.0)
        try:
            run(module.kernel, (1,), box(x, 1, 4), out, schedule=schedule)
            results.append(out)
        except EmulatorError as error:
            assert error.file == str(path) or not error.line
            results.append(error)
    return results


def expected(pipeline: Pipeline, outputs: dict[int, set[Any]]) -> torch.Tensor:
    """Return the values read according to the search; only without findings."""
    out = torch.full((len(pipeline.results), pipeline.parts, 4), -1.0)
    for item, values in outputs.items():
        (value,) = values
        for part, (source_item, source_part) in enumerate(value):
            out[item, part] = source_item * pipeline.parts + source_part + 1
    return out


@st.composite
def pipelines(draw, lucky: bool = False) -> Pipeline:
    """Right ones; `lucky`: also such as are right only if copies complete in order."""
    stages, consumers = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    copies = tuple(draw(st.lists(st.booleans(), min_size=1, max_size=2)))
    # Mostly enough items to use every stage again.
    items = max(1, stages + draw(st.integers(-1, 3)))
    turns = draw(st.booleans()) and (lucky or stages % consumers == 0)
    return build(stages, copies, draw(st.booleans()), consumers, items, turns)


SETTINGS = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much],
}


@pytest.mark.tlx
@settings(**SETTINGS)
@given(pipelines())
def test_right_pipelines_are_accepted(folder, pipeline):
    out = torch.arange(1.0, pipeline.items * pipeline.parts + 1)
    out = out.view(pipeline.items, pipeline.parts, 1).expand(-1, -1, 4)
    for result in emulate(pipeline, folder):
        assert isinstance(result, torch.Tensor), result
        assert torch.equal(result, out[pipeline.results])


@settings(**SETTINGS)
@given(pipelines())
def test_the_search_finds_nothing_in_right_pipelines(pipeline):
    search = Search(pipeline)
    assume(search.explore())
    assert not search.findings
    for number, item in enumerate(pipeline.results):
        assert search.outputs[number] == {tuple((item, p) for p in range(pipeline.parts))}


def judge(pipeline: Pipeline, folder: Any) -> set[type[EmulatorError]] | None:
    """Compare the verdicts of the emulator with the findings of a search, which are returned.

    None: there are too many orders to search.
    """
    search = Search(pipeline)
    if not search.explore():
        return None
    names = sorted(kind.__name__ for kind in search.findings)
    for schedule, result in zip(SCHEDULES, emulate(pipeline, folder), strict=True):
        context = f"schedule {schedule}, findings {names}: {result}\n{source(pipeline)}"
        if search.findings:
            assert type(result) in search.findings, context
        else:
            assert isinstance(result, torch.Tensor), context
            assert torch.equal(result, expected(pipeline, search.outputs)), context
    return search.findings


@pytest.mark.sweep
@pytest.mark.tlx
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_unless_it_is_harmless(folder, fault):
    verdicts = []

    @settings(max_examples=25, **SETTINGS)
    @given(pipelines(lucky=True), st.integers(0, 1000))
    def check(pipeline, number):
        assume(break_it(pipeline, fault, number))
        findings = judge(pipeline, folder)
        assume(findings is not None)
        verdicts.append(findings)

    check()
    # Many of the faults are real ones.
    assert sum(map(bool, verdicts)) > len(verdicts) // 10


# For each kind of fault the smallest pipeline that shows it, and what must be found.
@pytest.mark.tlx
@pytest.mark.parametrize(
    "fault, number, kinds",
    (
        ("no wait", 0, set()),
        ("no wait", 1, {Race, BarrierMisuse, Deadlock}),
        ("no arrival", 0, {Deadlock}),
        ("early release", 0, {Race}),
        ("parity", 0, {Deadlock}),
        ("count", 1, {Deadlock}),
        ("bytes", 1, {BarrierMisuse}),
        ("bytes", 2, {Deadlock}),
    ),
)
def test_known_faults(folder, fault, number, kinds):
    copies = (fault == "bytes",)
    pipeline = build(1, copies, False, 1, 2)
    assert break_it(pipeline, fault, number)
    assert judge(pipeline, folder) == kinds


@pytest.mark.sweep
@pytest.mark.tlx
def test_turns_are_found_unless_they_are_right(folder):
    verdicts = []

    @settings(max_examples=40, **SETTINGS)
    @given(pipelines(lucky=True))
    def check(pipeline):
        assume(pipeline.turns and pipeline.stages % pipeline.consumers)
        findings = judge(pipeline, folder)
        assume(findings is not None)
        verdicts.append(bool(findings))

    check()
    # A part of the pipelines is right all the same: stores, or no stage used twice.
    assert len(verdicts) // 10 < sum(verdicts) < len(verdicts) * 9 // 10


# Consumers that take the stages in turn.
@pytest.mark.tlx
@pytest.mark.parametrize(
    "stages, consumers, items, copy, right",
    (
        (3, 2, 4, True, False),
        (3, 2, 3, True, True),  # no stage is used twice
        (2, 2, 5, True, True),
        (3, 1, 5, True, True),
        (3, 3, 5, True, True),
        (3, 2, 4, False, True),  # the stores of one role land in their order
        (2, 3, 4, False, False),  # the third consumer asks for a second filling first of all
    ),
)
def test_known_turns(folder, stages, consumers, items, copy, right):
    pipeline = build(stages, (copy,), False, consumers, items, turns=True)
    findings = judge(pipeline, folder)
    assert (not findings) == right == (AliasedWait not in findings)
    if not right and stages > consumers:
        assert isinstance(emulate(pipeline, folder)[0], AliasedWait)


def test_random_choices_reach_every_fault():
    generator = random.Random(0)
    done = set()
    for fault in FAULTS:
        for _ in range(20):
            copies = tuple(generator.choice((False, True)) for _ in range(2))
            pipeline = build(2, copies, generator.choice((False, True)), 2, 3)
            unbroken = source(pipeline)
            if break_it(pipeline, fault, generator.randrange(1000)):
                assert source(pipeline) != unbroken
                done.add(fault)
    assert done == set(FAULTS)
