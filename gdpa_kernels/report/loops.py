"""What became of a consumer loop: MMAs, waits and activations in order, in Triton IR and SASS."""

from __future__ import annotations

import re
from itertools import groupby

from triton.compiler import CompiledKernel

from gdpa_kernels.measuring import compile_check

_WAIT = re.compile(r"pendings = (\d+)")
_LABEL = re.compile(r"\.(L_x_\d+):")
_SASS = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?);")
_BRANCH = re.compile(r"BRA.*?(L_x_\d+)")


def in_ir(built: CompiledKernel) -> list[str]:
    """The steps of the loop of the first consumer warp group of a forward rung, in Triton's GPU IR:
    "S", "PV", "wait n", "activation". ValueError if it has no loop."""
    text = built.asm["ttgir"]
    text = text[text.index("partition0(") :]
    loop = re.search(r"scf\.(for|while) ", text)
    if loop is None:
        raise ValueError("built must have a loop in its first consumer warp group, got none")
    found = []
    for line in text[loop.start() :].splitlines():
        if "ttng.warp_group_dot_wait" in line:
            found.append(f"wait {_WAIT.search(line)[1]}")
        elif "ttng.warp_group_dot" in line:
            found.append("S" if re.search(r": !ttg\.memdesc<.* \* ", line) else "PV")
        elif "tanh.approx" in line:
            found.append("activation")
        elif "scf.yield" in line:
            break
    return found


def in_sass(built: CompiledKernel, mmas: int) -> list[str]:
    """The same of the shortest SASS loop with `mmas` HGMMA instructions, one entry each: "S", "PV",
    "wait n", "tanh", "arrive" (a named barrier). ValueError if there is none."""
    bodies = [body for body in _loops(built) if sum("HGMMA" in i for i in body) == mmas]
    if not bodies:
        raise ValueError(f"built must have a loop with {mmas} HGMMA, got none")
    found, mma = [], "S"
    for instruction in min(bodies, key=len):
        if "HGMMA" in instruction:
            found.append(mma)
            if "gsb0" in instruction:  # the last of a matmul
                mma = "PV" if mma == "S" else "S"
        elif "WARPGROUP.DEPBAR" in instruction:
            found.append(f"wait {int(re.search(r'0x(.)', instruction)[1], 16)}")
        elif "MUFU.TANH" in instruction:
            found.append("tanh")
        elif "BAR.ARV" in instruction:
            found.append("arrive")
    return found


def overlapped(steps: list[str]) -> int:
    """How many tanh stand between the first instruction of PV and the wait that completes it."""
    start = steps.index("PV")
    return steps[start : steps.index("wait 0", start)].count("tanh")


def shown(steps: list[str]) -> str:
    """The steps on one line, runs counted: "S x8 | wait 0 | PV x8"."""
    runs = ((step, len(list(run))) for step, run in groupby(steps))
    return " | ".join(f"{step} x{count}" if count > 1 else step for step, count in runs)


def _loops(built: CompiledKernel) -> list[list[str]]:
    """The instructions from each label of the SASS to a branch back to it."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    bodies = []
    for line in compile_check.disassemble(built.asm["cubin"]).splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label[1]] = len(instructions)
        elif instruction := _SASS.search(line):
            instructions.append(instruction[1])
            back = _BRANCH.search(instruction[1])
            if back and back[1] in labels:
                bodies.append(instructions[labels[back[1]] :])
    return bodies
