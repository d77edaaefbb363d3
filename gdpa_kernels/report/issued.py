"""How many instructions a warp of a role issues for an item: a head of a block, in SASS."""

from __future__ import annotations

import re

import pandas as pd
from triton.compiler import CompiledKernel

from gdpa_kernels.measuring import compile_check

_LABEL = re.compile(r"(\.L\w*):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(.*?);")
_BRANCH = re.compile(r"BRA\S*\s.*`\((\.L\w*)\)")


def _loops(built: CompiledKernel) -> tuple[list[range], list[str]]:
    """The loops of a kernel's SASS, each from its label to the branch back, shortest first, and its
    instructions."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in map(str.strip, compile_check.disassemble(built.asm["cubin"]).splitlines()):
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif instruction := _INSTRUCTION.match(line):
            code.append(instruction[1])
    found = []
    for end, line in enumerate(code, 1):
        back = _BRANCH.search(line)
        if back and labels.get(back[1], end) < end:
            found.append(range(labels[back[1]], end))
    return sorted(found, key=len), code


def of_an_item(built: CompiledKernel, *, matmuls: bool = True) -> pd.Series:
    """Instructions in the loop over heads of the first role that has one: `for an item`, `for a
    block` (those of the loop around it, besides), and of an item `shared memory` (LDS, STS, LDSM,
    STSM) and `HGMMA`.

    matmuls: of a role with HGMMA; else of one that applies rotary and has none. ValueError if there
    is none of that kind.
    """
    found, code = _loops(built)

    def count(loop: range, names: str) -> int:
        return sum(bool(re.search(rf"\b(?:{names})\b", code[i])) for i in loop)

    for item in found:
        busy = count(item, "HGMMA") > 0
        if busy == matmuls and (busy or count(item, "FFMA") > 50):
            around = next(x for x in found if x.start <= item.start < item.stop < x.stop)
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
