"""Which shared memory a later allocation may get, as Triton's allocator goes by the program text.

A buffer is alive up to the last operation on it, or on a view of it, in the text; a value that a
variable still holds may be dead. Read from the bytecode: a variable is dead if no way from here
reads it before it is assigned again. What a loop reads, it may read in its next turn. So less is
dead here than there, where loops may be unrolled and branches on constants are gone.
"""

import dis
import sys
from collections.abc import Iterator
from functools import cache
from types import CodeType, FrameType
from typing import Any

from ..aggregates import Aggregate
from ..errors import MARK


@cache
def _instructions(code: CodeType) -> tuple[list[dis.Instruction], dict[int, int]]:
    found = list(dis.get_instructions(code))
    return found, {each.offset: i for i, each in enumerate(found)}


@cache
def _is_read(code: CodeType, after: int, name: str) -> bool:
    """Whether a way from the instruction behind offset `after` reads the variable."""
    if name in code.co_cellvars + code.co_freevars:
        return True
    found, numbers = _instructions(code)
    todo, seen = [next(i for i, each in enumerate(found) if each.offset > after)], set()
    while todo:
        at = todo.pop()
        if at in seen or at >= len(found):
            continue
        seen.add(at)
        each = found[at]
        if "FAST" in each.opname and name in (each.argval, *_several(each.argval)):
            if "LOAD" in each.opname or "DELETE" in each.opname:
                return True
            continue
        if each.opcode in dis.hasjrel or each.opcode in dis.hasjabs:
            todo.append(numbers[each.argval])
        if not each.opname.startswith(("RETURN", "RAISE", "RERAISE", "JUMP_")):
            todo.append(at + 1)
    return False


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else ()


def _views(value: Any, kind: type) -> Iterator[Any]:
    """The buffers in a value."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, Aggregate):
        for name in value.fields:
            yield from _views(getattr(value, name), kind)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _views(each, kind)


def dying(kind: type, of_task: bool) -> set[int]:
    """The ids of buffers that only variables hold which are dead in the running role.

    of_task: whether the role is a task, whose parameters belong to the kernel around it, too.
    """
    frames: list[FrameType] = []
    frame = sys._getframe(1)
    while frame is not None:
        if MARK in frame.f_globals:
            frames.append(frame)
        frame = frame.f_back
    dead: set[int] = set()
    alive: set[int] = set()
    for each in frames:
        code = each.f_code
        shared = code.co_varnames[: code.co_argcount] if of_task and each is frames[-1] else ()
        held = each.f_locals
        values = dict(held)
        if isinstance(held, dict):  # Python before 3.13: it would keep the buffers
            held.clear()
        for name, value in values.items():
            used = name in shared or _is_read(code, each.f_lasti, name)
            (alive if used else dead).update(map(id, _views(value, kind)))
    return dead - alive
