"""What the emulator reports: error types that carry the kernel's file and line.

Lowered functions keep the file name and line numbers of their source, so the frames on the Python
stack are the kernel's own. Triton's library functions (`tl.sum`, `tl.cdiv`, ...) are lowered too;
an error inside one is reported at the line of the kernel that called it.
"""

import os
import sys
import traceback
from collections.abc import Iterable
from types import FrameType

import triton

# Every lowered function has this name among its globals.
MARK = "__emulated__"
_LIBRARY = os.path.join(os.path.dirname(triton.__file__), "language", "")

Location = tuple[str, int]


def _innermost(frames: Iterable[tuple[FrameType, int]]) -> Location:
    """The last of (frame, line), outermost first, that runs kernel code."""
    found = ("<no kernel>", 0)
    for frame, line in frames:
        file = frame.f_code.co_filename
        if MARK in frame.f_globals and (found[1] == 0 or not file.startswith(_LIBRARY)):
            found = (file, line)
    return found


def location() -> Location:
    """File and line of the kernel statement being executed."""
    return _innermost(reversed(list(traceback.walk_stack(sys._getframe(1)))))


def location_of(error: BaseException) -> Location:
    """File and line of the kernel statement that raised `error`; line 0 if none did."""
    return _innermost(traceback.walk_tb(error.__traceback__))


class EmulatorError(Exception):
    """Base of all findings. `file` and `line` point into the kernel; line 0: before it started."""

    def __init__(self, message: str, at: Location | None = None):
        self.file, self.line = at or location()
        super().__init__(f"{self.file}:{self.line}: {message}" if self.line else message)


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
    """Two programs write the same element with plain stores; the result depends on timing.

    `other` is the location of the earlier store, `programs` the two program ids, earlier first.
    """

    def __init__(self, message: str, other: Location, programs: tuple[tuple[int, ...], ...]):
        self.other, self.programs = other, programs
        super().__init__(message)
