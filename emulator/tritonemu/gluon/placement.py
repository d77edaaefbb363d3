"""Placement of shared memory by the compiler: buffers with disjoint lifetimes may share bytes."""

import re
import tempfile
from collections.abc import Mapping
from typing import Any

from triton._C.libtriton import ir, nvidia

from ..compiler import target_of
from ..ttgir import calls, names

_PTX_VERSION = 80  # the allocator's alone, whose result does not depend on it
Calls = tuple[tuple[str, int], ...]
"""File name, without folders, and line of an allocation and of the calls that lead there, innermost
first."""


def places(asm: Mapping[str, Any], arch: str) -> list[tuple[Calls, int]]:
    """Locate a compiled kernel's allocations, with offsets in bytes."""
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
    known = names(text)
    form = r"local_alloc .*allocation\.offset = (\d+) .*loc\((#loc\d*)\)$"
    allocations = re.findall(form, text, re.MULTILINE)
    return [(tuple(calls(loc, known)), int(offset)) for offset, loc in allocations]


Bases = tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]
"""`cga_layout` or `block_bases` of a layout, by that name; nothing of one that has neither."""


def registers(asm: Mapping[str, Any]) -> dict[tuple[str, int], set[Bases]]:
    """Collect the CTA layouts of registers in lines that move them to or from shared memory."""
    text = asm["ttgir"]
    known = names(text)
    layouts: dict[tuple[str, int], set[Bases]] = {}
    operation = r" t\w+\.(?:async_shared_store|local_store|local_gather|local_scatter) "
    for types, loc in re.findall(operation + r"(.*) loc\((.*)\)$", text, re.MULTILINE):
        for layout in re.findall(r"tensor<[^,>]*, (#[\w.]+(?:<\{.*?\}>)?)>", types):
            location = next(calls(loc, known), ("", 0))
            layouts.setdefault(location, set()).add(_bases(layout, known))
    return layouts


def _bases(layout: str, known: Mapping[str, str]) -> Bases:
    text = known.get(layout, layout)
    if part := re.match(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}>$", text):
        dim = int(part[1])
        return tuple(
            (name, tuple(basis[:dim] + basis[dim + 1 :] for basis in bases))
            for name, bases in _bases(part[2], known)
        )
    for written, name in (("CGALayout", "cga_layout"), ("block", "block_bases")):
        if match := re.search(written + r" = \[((?:\[[\d, ]*\](?:, )?)*)\]", text):
            bases = re.findall(r"\[([\d, ]*)\]", match[1])
            return ((name, tuple(tuple(map(int, basis.split(","))) for basis in bases)),)
    return ()
