"""Steps on shared objects, each judged by the same call on fresh ones.

A shared object never changes an answer: the same call on fresh objects gives the same bits, or the
shared one is refused by the name of an argument. No tolerance, and no reference beside the library.

A step is data, so that a sequence that shows a fault is a test as it is printed. Hypothesis' state
machines are not used: steps trace their own lines (to fail, or to let a second thread run, between
any two of them), which its engine does too, what two threads do is not the same in each run, and
thousands of steps a minute on objects that live on need no database of examples.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

import gdpa_kernels

PACKAGE = str(Path(gdpa_kernels.__file__).parent)
REFUSALS = TypeError, ValueError, LookupError, RuntimeError, MemoryError
FAILING = 0.15
"""The share of steps that fail on their way, in a third of all walks."""
LINES = 1000
"""The library's lines of a step, at most, before it fails."""
LINES_OF_TWO = tuple(range(1, 400))
"""Of a step of two threads, before the second one runs."""
WAITS = 0.05
"""Seconds that a second thread may take before the first goes on: it may wait for it."""
PATIENCE = 10.0
"""Seconds after which threads are held to wait for each other."""
CONTEXTS = ("__enter__", "__exit__")
MODES = ("grad", "no_grad", "inference", "autocast", "deterministic")


class Interruption(MemoryError):
    """What a step raises between two lines of the library."""


class Step:
    """An operation with its arguments; those that are left out are the first of their domains.

    fail: the library's line at which it is interrupted.
    """

    def __init__(self, name: str, /, *, fail: int | None = None, **arguments: object):
        self.name, self.fail, self.arguments = name, fail, arguments

    def __repr__(self) -> str:
        arguments = self.arguments | ({} if self.fail is None else {"fail": self.fail})
        words = [repr(self.name), *(f"{name}={value!r}" for name, value in arguments.items())]
        return f"Step({', '.join(words)})"


@dataclass(frozen=True)
class Fault:
    """A wrong answer: of which operation, of what kind, and what there is to say."""

    operation: str
    kind: str
    note: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.operation, self.kind


def operation(weight: float, **domains: Sequence[object]) -> Callable[[Callable], Callable]:
    """A method as an operation that is drawn with this weight, with arguments of these domains."""

    def marked(method: Callable) -> Callable:
        method.weight, method.domains = weight, domains
        return method

    return marked


class Refusal(Exception):
    """The library refused a call by the name of an argument."""


class Machine:
    """The shared objects, and what a plain model knows of them."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.answered: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.step = Step("")
        self.lines: Lines | None = None

    @classmethod
    def operations(cls) -> dict[str, Callable]:
        return {
            name: method
            for name, method in inspect.getmembers(cls, inspect.isfunction)
            if hasattr(method, "domains")
        }

    def run(self, step: Step) -> None:
        """One step. What the library raises by mistake is a fault."""
        method, self.step = self.operations()[step.name], step
        arguments = {name: domain[0] for name, domain in method.domains.items()} | step.arguments
        try:
            method(self, **arguments)
        except (Interruption, Refusal):
            pass
        except Exception as error:
            self.fault(f"raised {type(error).__name__}", f"{error}"[:300])
        self.check()

    def check(self) -> None:
        """What holds after each step."""

    def fault(self, kind: str, note: str = "") -> None:
        self.faults.append(Fault(self.step.name, kind, note))

    def attempt(self, call: Callable[[], object]) -> object:
        """What a shared call returns. Raises Refusal where it is refused, Interruption at the line
        where the step fails."""
        try:
            with interrupted(self.step.fail) as self.lines:
                return call()
        except Exception as error:
            if is_interruption(error):
                raise Interruption from error
            if not is_refusal(error):
                raise
            self.refused[self.step.name] += 1
            raise Refusal(str(error)) from error

    def judge(
        self, shared: Callable[[], object], fresh: Callable[[], object] | None, what: str = "answer"
    ) -> bool:
        """Whether a shared call answers, and then as the fresh one. fresh None: no answer is
        right."""
        try:
            actual = self.attempt(shared)
        except Refusal:
            return False
        self.answered[self.step.name] += 1
        return self.compare(actual, fresh, what)

    def compare(
        self, actual: object, fresh: Callable[[], object] | None, what: str = "answer"
    ) -> bool:
        if fresh is None:
            self.fault(f"{what} where none is right")
            return True
        try:
            expected = fresh()
        except Exception as error:
            if not is_refusal(error):
                raise
            self.fault(f"{what} where fresh objects refuse", str(error)[:300])
            return True
        different = difference(actual, expected)
        if different:
            self.fault(f"other {what}", different)
        return True


def is_interruption(error: BaseException | None) -> bool:
    """Whether it came of an Interruption, as the emulator's errors do in a kernel's lines."""
    return error is not None and (
        isinstance(error, Interruption) or is_interruption(error.__cause__ or error.__context__)
    )


def is_refusal(error: BaseException) -> bool:
    """Whether the library raised it and names an argument."""
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    raised_here = last.tb_frame.f_code.co_filename.startswith(PACKAGE)
    return (
        isinstance(error, REFUSALS)
        and raised_here
        and re.search(r"\b(must|needs?)\b", str(error)) is not None
    )


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().view(torch.uint8) if x.dim() else bits(x[None])


def difference(actual: object, expected: object) -> str:
    """How two answers differ in their bits, in words."""
    pairs = [tree_leaves(x) for x in (actual, expected)]
    if len(pairs[0]) != len(pairs[1]):
        return f"{len(pairs[0])} values for {len(pairs[1])}"
    for i, (one, other) in enumerate(zip(*pairs, strict=True)):
        if not isinstance(one, torch.Tensor):
            if one != other:
                return f"value {i}: {one!r} for {other!r}"
        elif (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"value {i}: {one.dtype} {[*one.shape]} for {other.dtype} {[*other.shape]}"
        elif not torch.equal(bits(one), bits(other)):
            apart = (one.detach().double() - other.detach().double()).abs().max().item()
            return f"value {i}: {apart:.3g} apart, of {other.detach().double().abs().max():.3g}"
    return ""


# -- What a step runs in -----------------------------------------------------------------------


@contextlib.contextmanager
def mode_of(name: str) -> Iterator[None]:
    """One of MODES; "deterministic" fills new memory as PyTorch does."""
    strict = torch.are_deterministic_algorithms_enabled()
    context = {
        "grad": torch.enable_grad,
        "no_grad": torch.no_grad,
        "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "deterministic": lambda: contextlib.nullcontext(),
    }[name]
    try:
        torch.use_deterministic_algorithms(name == "deterministic")
        with context():
            yield
    finally:
        torch.use_deterministic_algorithms(strict)


def _poison(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        if x.dtype.is_floating_point:
            return x.fill_(torch.nan)
        return x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).max)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Within it new memory holds NaN or the largest integer. PyTorch does so for deterministic
    algorithms alone, which choose other kernels."""

    def of(function: Callable) -> Callable:
        def empty(*arguments, **options):
            x = function(*arguments, **options)
            return _poison(x) if type(x) is torch.Tensor and x.device.type == "cpu" else x

        return empty

    names = (torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")
    with contextlib.ExitStack() as stack:
        for holder, name in names:
            stack.enter_context(mock.patch.object(holder, name, of(getattr(holder, name))))
        yield


class Lines:
    """A trace function that counts the library's lines, and calls `act` before the `line`-th.

    Not those in which a context is entered or left: no computation fails there, only a signal
    could, of which Python says that nothing can be done about it.
    """

    def __init__(self, line: int, act: Callable[[], None]):
        self.line, self.act, self.count = line, act, 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> Callable | None:
        code = frame.f_code
        counts = code.co_filename.startswith(PACKAGE) and code.co_name not in CONTEXTS
        return self._local if counts else None

    def _local(self, frame: FrameType, event: str, argument: object) -> Callable:
        if event == "line":
            self.count += 1
            if self.count == self.line:
                self.act()
        return self._local


@contextlib.contextmanager
def interrupted(line: int | None) -> Iterator[Lines | None]:
    """Within it the library's `line`-th line raises Interruption."""
    if line is None:
        yield None
        return

    def act() -> None:
        raise Interruption(f"line {line} must not run")

    before, lines = sys.gettrace(), Lines(line, act)
    sys.settrace(lines)
    try:
        yield lines
    finally:
        sys.settrace(before)


def interleaved(
    first: Callable[[], object], second: Callable[[], object], line: int
) -> list[object]:
    """What two calls return or raise, the second made before the library's `line`-th line of the
    first, in another thread."""
    results: list[object] = []
    at_line, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        at_line.set()
        go_on.wait(PATIENCE)

    def keep(i: int, call: Callable[[], object]) -> None:
        try:
            results[i] = call()
        except Exception as error:
            results[i] = error

    def traced() -> None:
        sys.settrace(Lines(line, pause))
        try:
            keep(0, first)
        finally:
            sys.settrace(None)
            at_line.set()

    results[:] = (TimeoutError(f"a thread waits for more than {PATIENCE} s") for _ in range(2))
    threads = [
        threading.Thread(target=traced, daemon=True),
        threading.Thread(target=keep, args=(1, second), daemon=True),
    ]
    threads[0].start()
    at_line.wait(PATIENCE)
    threads[1].start()
    threads[1].join(WAITS)
    go_on.set()
    for thread in threads:
        thread.join(PATIENCE)
    return [*results]


# -- Sequences ---------------------------------------------------------------------------------


class Drawing:
    """Steps of one walk: a part of all operations and arguments, which then come more often."""

    def __init__(self, machine: type[Machine], seed: str, only: Sequence[str] = ()):
        self.random = random.Random(seed)
        operations = machine.operations()
        self.names = [name for name in operations if name in only or not only]
        self.weights = [
            operations[name].weight * self.random.choice((0.1, 1, 1, 4)) for name in self.names
        ]
        self.domains = {name: self._some(operations[name].domains) for name in self.names}
        self.failing = self.random.choice((0, 0, FAILING))

    def _some(self, domains: dict[str, Sequence[object]]) -> dict[str, list[object]]:
        sizes = {n: self.random.choice((2, 4, len(domain))) for n, domain in domains.items()}
        return {n: self.random.choices(domain, k=sizes[n]) for n, domain in domains.items()}

    def step(self) -> Step:
        (name,) = self.random.choices(self.names, self.weights)
        arguments = {n: self.random.choice(some) for n, some in self.domains[name].items()}
        fails = self.random.random() < self.failing
        line = int(LINES ** self.random.random())  # most calls have fewer
        return Step(name, fail=line if fails else None, **arguments)


def faults_of(
    machine: type[Machine], steps: Iterable[Step], key: tuple[str, str] | None = None
) -> list[Fault]:
    """What a sequence shows on new objects, up to the first of this key."""
    with poisoned():
        world = machine()
        for step in steps:
            world.run(step)
            if any(fault.key == key for fault in world.faults):
                break
    return world.faults


def lines_of(machine: type[Machine], steps: Sequence[Step], step: Step) -> int:
    """The library's lines in a step behind others."""
    with poisoned():
        world = machine()
        for each in (*steps, Step(step.name, fail=sys.maxsize, **step.arguments)):
            world.run(each)
    return world.lines.count


def shrunk(machine: type[Machine], steps: Sequence[Step], key: tuple[str, str]) -> list[Step]:
    """A shorter sequence, of simpler arguments, that shows the same fault."""
    steps = [*steps]

    def shows(some: list[Step]) -> bool:
        return any(fault.key == key for fault in faults_of(machine, some, key))

    size = len(steps)
    while size:
        for first in range(len(steps) - size, -1, -size):
            fewer = steps[:first] + steps[first + size :]
            if shows(fewer):
                steps = fewer
        size //= 2
    for i in range(len(steps)):
        for name in (*steps[i].arguments, "fail"):
            old = steps[i]
            rest = {n: x for n, x in old.arguments.items() if n != name}
            steps[i] = Step(old.name, fail=None if name == "fail" else old.fail, **rest)
            if not shows(steps):
                steps[i] = old
    return steps
