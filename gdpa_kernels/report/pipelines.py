"""What the compiler's software pipeliner made of a loop of TMA loads: which it issues, and when."""

from __future__ import annotations

import re
from itertools import groupby
from typing import NamedTuple

from triton.compiler import CompiledKernel

_STEPS = (
    (r"async_tma_copy_global_to_local %([a-z]+)", "ask "),
    (r"async_tma_copy_local_to_global", "store"),
    (r"async_tma_store_token_wait", "stored"),
    (r"ttng\.wait_barrier", "wait"),
    (r"ttng\.warp_group_dot ", "MMA"),
    (r"tt\.load|ttg\.async_copy_global_to_local", "list"),
)


class Pipeline(NamedTuple):
    """steps: in program order, "ask q" (the start of a TMA load), "wait" (for tiles), "MMA",
    "store" (the start of a TMA store), "stored" (the wait until it has read shared memory), "list"
    (a load by threads). ahead: how many iterations' tiles are loaded in the prologue. room: for
    how many iterations' tiles there are buffers."""

    steps: list[str]
    ahead: int
    room: int

    def shown(self) -> str:
        """The steps on one line, loads issued in a row together: "wait | MMA | ask q k v"."""
        runs = groupby(self.steps, key=lambda step: step.split()[0])
        parts = [(word, [step.split()[-1] for step in steps]) for word, steps in runs]
        return " | ".join(f"ask {' '.join(x)}" if word == "ask" else " | ".join(x)
                          for word, x in parts)  # fmt: skip


def of_loop(built: CompiledKernel) -> Pipeline:
    """The first loop of a kernel that loads tiles of q by TMA, in Triton's GPU IR. ValueError if it
    has no loop."""
    text = built.asm["ttgir"]
    if "scf.for " not in text:
        raise ValueError(f"built must have a loop, got {built.name} without one")
    start = text.index("scf.for ")
    steps = []
    for line in text[start:].splitlines():
        for pattern, name in _STEPS:
            if found := re.search(pattern, line):
                steps.append(name + (found[1] if found.groups() else ""))
                break
    rows, width = re.search(r"tensordesc<tensor<1x1x1x(\d+)x(\d+)xbf16", text).groups()
    room = re.findall(rf"memdesc<(\d+)x{rows}x{width}xbf16", text[:start])
    before = sum("global_to_local %q_desc" in line for line in text[:start].splitlines())
    return Pipeline(steps, before, max(map(int, room), default=1))
