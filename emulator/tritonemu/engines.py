"""The units of a multiprocessor that its roles share, and how fast each is, in modelled cycles.

| engine        | does, a clock and multiprocessor            | for |
|---------------|---------------------------------------------|-----|
| TMA           | asks for 64 bytes                           | copies, one after the other |
| tensor core   | 4096 FLOP on sm_90, 8192 on sm_100          | MMAs, one after the other |
| shared memory | reads or writes 128 bytes                   | copies, MMAs, roles |
| tensor memory | reads or writes 512 bytes                   | roles; MMAs have their own port |
| MUFU          | 16 results: tanh, exp2, 1/x, 1/sqrt(x), ... | roles |
| issue         | 4 warp instructions, of 32 results each     | roles |

What comes later is served later; on the last four it also fits into the gaps between earlier work
that is still to come, such as the bytes of a copy under way. Counts of instructions are estimates:
one for each result of an operation on tiles, and for inline assembly the instructions it has. One
CTA is taken to have the multiprocessor to itself. 512 is assumed: no figure is published.
"""

from dataclasses import dataclass, field

SHARED_BYTES = 128
TENSOR_BYTES = 512
COPY_BYTES = 64
MMA_FLOPS = {"sm_90": 4096, "sm_100": 8192}
MUFU_RESULTS = 16
ISSUED_RESULTS = 128
SCHEDULERS = 4

NAMES = ("TMA", "tensor core", "shared memory", "tensor memory", "MUFU", "issue")
# Intervals that an engine remembers; what lies before them is taken to be full.
_REMEMBERED = 64
# An MMA reads its operands in so many steps, those of 16 among 128.
_PARTS = 8


@dataclass(eq=False)
class Engine:
    """Busy intervals of a unit. `total`: cycles it has worked; `free`: end of its last work."""

    total: float = 0.0
    free: float = 0.0
    _floor: float = 0.0
    _busy: list[tuple[float, float]] = field(default_factory=list)

    def queue(self, start: float, cycles: float) -> tuple[float, float]:
        """Queue work after all earlier work, not before `start`; return when it begins and ends."""
        start = max(start, self.free)
        self.total += cycles
        self.free = start + cycles
        return start, self.free

    def fit(self, start: float, cycles: float) -> float:
        """Fit work from `start` on into the time that is left; return when it ends."""
        self.total += cycles
        start = max(start, self._floor)
        if cycles <= 0:
            return start
        index = len(self._busy)
        while index and self._busy[index - 1][1] >= start:
            index -= 1
        first, now, last = start, start, index
        while last < len(self._busy) and self._busy[last][0] < now + cycles:
            left, right = self._busy[last]
            cycles -= max(0.0, left - now)
            first, now, last = min(first, left), right, last + 1
        now += cycles
        self._busy[index:last] = [(first, now)]
        if len(self._busy) > _REMEMBERED:
            self._floor = self._busy.pop(0)[1]
        self.free = max(self.free, now)
        return now

    def share(self, start: float, cycles: float) -> float:
        """Fit work that gets at least half of the unit; the time this takes from others is not
        charged to them until a little later."""
        return min(self.fit(start, cycles), start + 2 * cycles)

    def spread(self, start: float, over: float, cycles: float) -> float:
        """Fit work in equal parts, which begin at equal distances `over` this many cycles."""
        end = start
        for i in range(_PARTS):
            end = self.fit(max(end, start + over * i / _PARTS), cycles / _PARTS)
        return end
