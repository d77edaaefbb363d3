"""Compiled loops: their steps in Triton's GPU IR and in SASS, their loads, their instructions."""

from __future__ import annotations

import re
from itertools import groupby
from typing import NamedTuple

import pandas as pd
from triton.compiler import CompiledKernel

from gdpa_lab.measuring import compile_check

_WAIT = re.compile(r"pendings = (\d+)")
_STEPS = (
    (r"async_tma_copy_global_to_local %([a-z]+)", "ask "),
    (r"async_tma_copy_local_to_global", "store"),
    (r"async_tma_store_token_wait", "stored"),
    (r"ttng\.wait_barrier", "wait"),
    (r"ttng\.warp_group_dot ", "MMA"),
    (r"tt\.load|ttg\.async_copy_global_to_local", "list"),
)


def in_ir(built: CompiledKernel) -> list[str]:
    """The steps of the loop of the first consumer warp group of a forward rung, in Triton's GPU IR:
    "S", "PV", "wait n", "activation". ValueError if it has no loop."""
    text = built.asm["ttgir"]
    text = text[text.index("partition0(") :]
    loop = re.search(r"scf\.(for|while) ", text)
    if loop is None:
        raise ValueError("built must have a loop in its first consumer warp group, got none")
    steps = []
    for line in text[loop.start() :].splitlines():
        if "ttng.warp_group_dot_wait" in line:
            steps.append(f"wait {_WAIT.search(line)[1]}")
        elif "ttng.warp_group_dot" in line:
            steps.append("S" if re.search(r": !ttg\.memdesc<.* \* ", line) else "PV")
        elif "tanh.approx" in line:
            steps.append("activation")
        elif "scf.yield" in line:
            break
    return steps


def in_sass(built: CompiledKernel, mmas: int) -> list[str]:
    """The same of the shortest SASS loop with `mmas` HGMMA instructions, one entry each: "S", "PV",
    "wait n", "tanh", "arrive" (a named barrier). ValueError if there is none."""
    code, loops = compile_check.sass(built)
    bodies = ([code[i] for i in loop] for loop in loops)
    body = next((body for body in bodies if sum("HGMMA" in i for i in body) == mmas), None)
    if body is None:
        raise ValueError(f"built must have a loop with {mmas} HGMMA, got none")
    steps, mma = [], "S"
    for instruction in body:
        if "HGMMA" in instruction:
            steps.append(mma)
            if "gsb0" in instruction:  # the last of a matmul
                mma = "PV" if mma == "S" else "S"
        elif "WARPGROUP.DEPBAR" in instruction:
            steps.append(f"wait {int(re.search(r'0x(.)', instruction)[1], 16)}")
        elif "MUFU.TANH" in instruction:
            steps.append("tanh")
        elif "BAR.ARV" in instruction:
            steps.append("arrive")
    return steps


def overlapped(steps: list[str]) -> int:
    """Number of tanh between the first instruction of PV and the wait that completes it."""
    start = steps.index("PV")
    return steps[start : steps.index("wait 0", start)].count("tanh")


def shown(steps: list[str]) -> str:
    """The steps on one line, runs counted: "S x8 | wait 0 | PV x8"."""
    runs = ((step, len(list(run))) for step, run in groupby(steps))
    return " | ".join(f"{step} x{count}" if count > 1 else step for step, count in runs)


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


def pipeline(built: CompiledKernel) -> Pipeline:
    """The first loop of a kernel that loads tiles of q by TMA, in Triton's GPU IR. ValueError if it
    has no loop."""
    text = built.asm["ttgir"]
    if "scf.for " not in text:
        raise ValueError(f"built must have a loop, got {built.name} without one")
    start = text.index("scf.for ")
    steps = []
    for line in text[start:].splitlines():
        for pattern, name in _STEPS:
            if match := re.search(pattern, line):
                steps.append(name + (match[1] if match.groups() else ""))
                break
    rows, width = re.search(r"tensordesc<tensor<1x1x1x(\d+)x(\d+)xbf16", text).groups()
    room = re.findall(rf"memdesc<(\d+)x{rows}x{width}xbf16", text[:start])
    ahead = sum("global_to_local %q_desc" in line for line in text[:start].splitlines())
    return Pipeline(steps, ahead, max(map(int, room), default=1))


def of_an_item(built: CompiledKernel, *, matmuls: bool = True) -> pd.Series:
    """Instructions in the loop over heads of the first role that has one: `for an item`, `for a
    block` (those of the loop around it, besides), and of an item `shared memory` (LDS, STS, LDSM,
    STSM) and `HGMMA`.

    matmuls: of a role with HGMMA; else of one that applies rotary and has none. ValueError if there
    is none of that kind.
    """
    code, loops = compile_check.sass(built)

    def count(loop: range, names: str) -> int:
        return sum(bool(re.search(rf"\b(?:{names})\b", code[i])) for i in loop)

    for item in loops:
        busy = count(item, "HGMMA") > 0
        if busy == matmuls and (busy or count(item, "FFMA") > 50):
            around = next(x for x in loops if x.start <= item.start < item.stop < x.stop)
            break
    else:
        raise ValueError(f"built must have a role with matmuls {matmuls}, got {built.name}")
    return pd.Series(
        {
            "for an item": len(item),
            "for a block": len(around) - len(item),
            "shared memory": count(item, "LDS|STS|LDSM|STSM"),
            "HGMMA": count(item, "HGMMA"),
        }
    )
