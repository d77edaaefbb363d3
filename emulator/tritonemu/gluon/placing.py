"""Where the compiler puts shared memory: buffers whose lives do not overlap may share bytes."""

import re
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from triton._C.libtriton import ir, nvidia

from ..compiling import target_of

_PTX_VERSION = 80  # the allocator's alone, whose result does not depend on it
Calls = tuple[tuple[str, int], ...]
"""File and line of an allocation and of the calls that lead there, innermost first."""


def places(asm: Mapping[str, Any], arch: str) -> list[tuple[Calls, int]]:
    """Where each allocation of a compiled kernel is made, and its offset in bytes; none if there is
    no such kernel."""
    if "ttgir" not in asm:
        return []
    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(asm["ttgir"])
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    passes = ir.pass_manager(context)
    capability = target_of(arch).arch
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(passes, capability, _PTX_VERSION)
    passes.run(module, "allocate")
    text = str(module)
    known = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", text, re.MULTILINE))
    found = re.findall(r"local_alloc .*allocation\.offset = (\d+) .*loc\((#loc\d*)\)$", text, re.M)
    return [(tuple(_calls(loc, known)), int(offset)) for offset, loc in found]


def _calls(loc: str, known: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """What a location of MLIR stands for."""
    text = known.get(loc, loc)
    if place := re.match(r'"([^"]*)":(\d+):\d+$', text):
        yield place[1], int(place[2])
    for inner in re.findall(r"#loc\d*", text):
        yield from _calls(inner, known)
