"""Detection of loops that wait for memory that nobody will change.

A role at the test of a `while` loop whose variables are what they were one turn ago, while nobody
has changed anything since (`Scheduler.changes`), goes on so until somebody does. If all roles that
are not blocked do, nobody will: the next cluster of CTAs starts, as on a GPU with room for it, and
if there is none it is a `Deadlock`.
"""

import sys
from types import FrameType
from typing import Any

import torch

from .aggregates import Aggregate
from .errors import Deadlock, Spin, current_location
from .launch import Launch
from .tile import Tile, Unbound

# Last test of a role: its frame and instruction, the number of changes, and its variables then.
Turn = tuple[FrameType, int, int, dict[str, Any]]


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are equal for certain."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tile):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and _same_region(one.base, other.base) and torch.equal(one.data, other.data)
    if isinstance(one, Aggregate):
        return all(_same(getattr(one, name), getattr(other, name)) for name in one.fields)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, (bool, int, float, str)) and one == other or isinstance(one, Unbound)


def _same_region(one: Any, other: Any) -> bool:
    return one is other or (
        None not in (one, other)
        and one.shadow is other.shadow
        and (one.dtype, one.low, one.high) == (other.dtype, other.low, other.high)
    )


def turned(launch: Launch, depth: int) -> None:
    """Record a loop test by the running role, `depth` frames above the caller, which goes on."""
    role, scheduler = launch.role, launch.scheduler
    frame, previous = sys._getframe(depth + 1), role.turn
    values = {n: value for n, value in frame.f_locals.items() if not n.startswith("__")}
    role.turn = frame, frame.f_lasti, scheduler.changes, values
    role.spun, role.word = role.word, None
    if previous is None or previous[0] is not frame or previous[1:3] != role.turn[1:3]:
        return
    # Scalars first: a loop that counts differs there.
    names = sorted(values, key=lambda n: isinstance(values[n], Tile) and values[n].data.ndim)
    known = values.keys() == previous[3].keys()
    if not (known and all(_same(values[name], previous[3][name]) for name in names)):
        return
    role.spins, role.spins_at = scheduler.changes, current_location()
    spinning = [role, *scheduler.ready]
    if scheduler.queues or any(each.spins != scheduler.changes for each in spinning):
        return
    if launch.clusters:
        launch.start_next()
        return
    spins = [(r, _spin(launch, r)) for r in sorted(spinning, key=lambda each: each.index)]
    raise Deadlock([*spins, *scheduler.stuck()])


def _spin(launch: Launch, role: Any) -> Spin:
    if role.spun is None:
        return Spin(role.label, role.spins_at)
    region, element = role.spun
    value, writer = launch.memory.last(region, element)
    return Spin(role.label, role.spins_at, region.name, element - region.low, value, writer)
