"""Error types of the emulator, which carry the kernel's file and line.

Lowered functions keep the file name and line numbers of their source, so the frames on the Python
stack are the kernel's own. Triton's library functions (`tl.sum`, `tl.cdiv`, ...) are lowered too;
an error inside one is reported at the line of the kernel that called it.
"""

import contextlib
import contextvars
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import triton

# Every lowered function has this name among its globals.
MARK = "__emulated__"
_LIBRARY = os.path.join(os.path.dirname(triton.__file__), "language", "")

Location = tuple[str, int]


class TracedLocation(Location):
    """File and line. chain: (file, line, function) of the calls that lead there, outermost first;
    those of a task begin in it."""

    chain: tuple[tuple[str, int, str], ...] = ()


def calls_to(location: Location) -> tuple[tuple[str, int, str], ...]:
    """List (file, line, function) of the calls that lead to a location, outermost first."""
    return getattr(location, "chain", ()) or ((*location, ""),)


def line_in(location: Location, file: str) -> int:
    """Return the line of the innermost call in `file` that leads to a location; 0 if none does."""
    return next((line for name, line, _ in reversed(calls_to(location)) if name == file), 0)


def _innermost(frames: Iterable[tuple[FrameType, int]]) -> TracedLocation:
    """Return the last of these frames and lines of kernel code, outermost first, library
    excluded."""
    chain: list[tuple[str, int, str]] = []
    for frame, line in frames:
        code = frame.f_code
        if not (chain and code.co_filename.startswith(_LIBRARY)):
            chain.append((code.co_filename, line, code.co_name))
    location = TracedLocation(chain[-1][:2] if chain else ("<no kernel>", 0))
    location.chain = tuple(chain)
    return location


def current_location() -> Location:
    """Return file and line of the kernel statement being executed."""
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        if MARK in frame.f_globals:
            frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return _innermost(reversed(frames))


def location_of(error: BaseException) -> Location:
    """Return file and line of the kernel statement that raised `error`; line 0 if none did."""
    frames = traceback.walk_tb(error.__traceback__)
    return _innermost((frame, line) for frame, line in frames if MARK in frame.f_globals)


# Prefixes of flags of the tool in use; that of Python is empty: it takes keywords.
COMMAND, PYTEST = "--", "--emulated-"


class Tool(NamedTuple):
    """begin: the prefix of its flags. command: of pytest, up to the name of a test and the folder
    that it is in."""

    begin: str = ""
    command: str = ""


_PYTHON = Tool()
TOOL: contextvars.ContextVar[Tool] = contextvars.ContextVar("tool", default=_PYTHON)


@contextlib.contextmanager
def flags(begin: str, command: str = "") -> Iterator[None]:
    """Spell options as this tool's flags in messages within this context."""
    token = TOOL.set(Tool(begin, command))
    try:
        yield
    finally:
        TOOL.reset(token)


def option(name: str, value: str | int) -> str:
    """Format an option of `execution.execute` as the tool in use takes it."""
    begin = TOOL.get().begin
    if not begin:
        return f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}"
    if value == "allow":
        return f"{begin}{value}-{name}"
    return f"{begin}{name}" if value is True else f"{begin}{name} {value}"


class EmulatorError(Exception):
    """Base of all findings. `file` and `line` point into the kernel; line 0: before it started.

    location: the same, a `TracedLocation` if the call chain is known. role: the role that
    failed, with its CTA; empty outside of roles. report: what the launch had done by then, with
    its timeline if it was traced. schedule: the order that shows it, for `run(schedule=...)`.
    marks: `timeline.Mark`s of it, the earlier of two accesses first. missing: what there should
    be between those two. related: what else has to do with it, and where, such as the other
    arrivals of a phase. barriers: those that it is about, or that might have ordered two
    accesses: name, where it was made, and the arrivals of a phase. accesses: the two, or the one,
    that it is about, as `clocks.Access`, the earlier one first. orderings: what might have ordered
    them. unfit: autotuning goes on with the next configuration. What else a subclass names is given
    by keyword.
    """

    report: Any = None
    schedule: str = ""
    role: str = ""
    marks: tuple[Any, ...] = ()
    missing: str = ""
    related: tuple[tuple[str, Location], ...] = ()
    barriers: tuple[tuple[str, Location, int], ...] = ()
    accesses: tuple[Any, ...] = ()
    orderings: "tuple[Ordering, ...]" = ()
    unfit: bool = False

    def __init__(self, message: str, location: Location | None = None, **facts: Any):
        self.file, self.line = self.location = location or current_location()
        self.__dict__.update(facts)
        super().__init__(message)

    def line_in(self, file: str) -> int:
        """Return the line of the innermost call in `file` that leads to the statement, or 0."""
        return line_in(self.location, file)

    def __str__(self) -> str:
        prefix = f"{self.file}:{self.line}: " if self.line else ""
        return f"{prefix}{f'[{self.role}] ' if self.role else ''}{self.args[0]}"


class Unsupported(EmulatorError):
    """The kernel uses something the emulator does not implement; it never guesses a result."""


class InvalidKernel(EmulatorError):
    """Triton would refuse this program (types, shapes, constants), or it fails in Python."""


class OutOfBounds(EmulatorError):
    """An active lane, or a box of a descriptor, touches memory outside its tensor."""


class DescriptorError(EmulatorError):
    """A tensor descriptor or its coordinates break a rule of the TMA hardware."""


class DeviceAssertion(EmulatorError):
    """A `tl.device_assert` or `tl.assume`, or an `assert` in the kernel, does not hold."""


class Race(EmulatorError):
    """Two accesses to the same memory, one of them a write, that nothing orders.

    buffer: the memory. other: file and line of the earlier access. programs: for global memory,
    the program ids of both, earlier first.
    """

    missing = "nothing orders 1 and 2"
    programs: tuple[tuple[int, ...], ...] = ()


class MissingFence(EmulatorError):
    """A copy reads shared memory that a role stored to, and no fence lies between the two.

    buffer: the memory. other: file and line of the store.
    """

    missing = "no fence lies between 1 and 2"


class EarlyExit(EmulatorError):
    """A CTA may end before the last use of its shared or tensor memory, or of its barriers.

    what: the buffer or the barrier. `file` and `line` are those of its use.
    """

    missing = "2 does not wait for 1"


class UninitializedRead(EmulatorError):
    """A buffer is read where nothing has been written. `buffer` names it.

    other: file and line of the `torch.empty` that made it, for global memory.
    """


class UndefinedValue(EmulatorError):
    """A value stored to global memory comes from a lane that the mask of a load turned off.

    Or from a bin of a histogram of values that it has no bins for, or from a reduction whose result
    depends on the order of its lanes; and of integers also an address, a mask, or a branch. buffer:
    the memory, if any. other: file and line of the load, or of the histogram.
    """


class BarrierMisuse(EmulatorError):
    """A barrier gets more arrivals or other bytes than it waits for, or runs ahead of a waiter.

    `barrier` names it.
    """


class AliasedWait(EmulatorError):
    """A wait that passes for one phase here, and in another order of events for an earlier one.

    It names a parity only. `barrier` names the barrier, `phase` is the one it passes for here.
    """


class ResourceLimit(EmulatorError):
    """More shared or tensor memory, named barriers or warps than the hardware has."""

    unfit = True


@dataclass(frozen=True)
class Ordering:
    """A wait or an arrival of a role that might have ordered two accesses.

    kind: "wait", for a phase of the barrier, or "arrival", in it. when: "before" or "after" the
    access of that role.
    """

    role: str
    kind: str
    barrier: str
    phase: int
    when: str
    location: Location

    @property
    def what(self) -> str:
        return f"{self.kind} of {self.role} {self.when}"


@dataclass(frozen=True)
class Wait:
    """A waiting role. phase, arrivals, bytes: of the barrier, and what is missing. related: the
    arrivals in that phase. barriers: as in `EmulatorError`, this one. parity: that it asked an
    mbarrier for, else -1. passed: its earlier waits on that mbarrier, which all passed."""

    role: str
    location: Location
    barrier: str
    phase: int
    arrivals: int
    bytes: int
    note: str = ""
    related: tuple[tuple[str, Location], ...] = ()
    barriers: tuple[tuple[str, Location, int], ...] = ()
    parity: int = -1
    passed: int = 0

    @property
    def what(self) -> str:
        missing = f"{self.arrivals} arrival{'s' * (self.arrivals != 1)}"
        if self.bytes > 0:
            missing += f" and {self.bytes} bytes"
        if self.bytes < 0:
            missing += f", and got {-self.bytes} bytes that nobody announced"
        note = f"; {self.note}" if self.note else ""
        return f"waits for phase {self.phase} of {self.barrier}, which misses {missing}{note}"


@dataclass(frozen=True)
class Spin:
    """A spinning role, the element of memory it reads, its value, and the last writer."""

    role: str
    location: Location
    buffer: str = ""
    element: int = 0
    value: Any = None
    writer: tuple[str, Location] | None = None

    @property
    def what(self) -> str:
        if not self.buffer:
            return "spins in a loop that reads no memory"
        start = f"spins on element {self.element} of {self.buffer}, which holds {self.value}"
        if self.writer is None:
            return f"{start}; no program wrote it"
        who, (file, line) = self.writer
        return f"{start}, last written by {who} at {file}:{line}"


class Deadlock(EmulatorError):
    """No role can continue: each is blocked, or spins on memory that nobody will change.

    `waits` says of each where it waits and for what. stuck: roles, and theirs.
    """

    def __init__(self, stuck: list[tuple[Any, Wait | Spin]]):
        waits = self.waits = [wait for _, wait in stuck]
        barriers = (each for wait in waits for each in getattr(wait, "barriers", ()))
        self.barriers = tuple(dict.fromkeys(barriers))
        self.marks = tuple(role.mark(wait.location[1], wait.what, True) for role, wait in stuck)
        lines = (f"  {x.role} at {x.location[0]}:{x.location[1]} {x.what}" for x in waits)
        super().__init__("\n".join(["deadlock:", *lines]), waits[0].location)


class WrongResult(EmulatorError):
    """The program itself fails under this schedule, which is not the modelled one."""
