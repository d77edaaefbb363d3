"""Reading PTX: what reaches the async proxy without a fence, and values that a thread computes."""

from __future__ import annotations

import re

STORE = re.compile(r"\bst\.shared\.v4\b")
FENCE = re.compile(r"\bfence\.proxy\.async\b")
BACK = re.compile(r"\bld\.shared\.v[24]\b")
READER = re.compile(
    r"\bmbarrier\.arrive\S*shared::cta\b|\bcp\.(?:reduce\.)?async\.bulk\S*\.global\.shared"
    r"|\btcgen05\.mma\b|\bbra\b(?!.*waitLoop)|\bret;"
)


def unfenced(ptx: str) -> list[str]:
    """What follows tiles stored by threads without a proxy fence between: TMA or an MMA that reads
    shared memory, an arrival that tells of the tile, or the end of the block. A tile that threads
    read back themselves needs none."""
    found, stored = [], False
    for line in ptx.splitlines():
        if STORE.search(line):
            stored = True
        elif FENCE.search(line) or BACK.search(line):
            stored = False
        elif stored and READER.search(line):
            found.append(line.strip())
            stored = False
    return found
