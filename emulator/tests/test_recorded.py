"""Parsers of recorded output of two compilers, and in that of the installed one."""

from pathlib import Path

import pytest
import torch

from tritonemu.assembly import Code
from tritonemu.compiler import asm_of
from tritonemu.ttgir import Module

from .recorded import kernels

FOLDER = Path(kernels.__file__).parent
LINES = ["", *Path(kernels.__file__).read_text().splitlines()]
COMPILERS = sorted({file.name.split(".", 1)[1].rpartition(".")[0] for file in FOLDER.glob("*.ptx")})
FLOATS, LOCK = torch.zeros(1024), torch.zeros(1, dtype=torch.int32)
KERNELS = {
    "lock": (
        kernels.lock_kernel,
        {"x_ptr": FLOATS, "lock_ptr": LOCK, "total_ptr": FLOATS, "rows": 8, "BLOCK": 128},
    ),
    "column": (
        kernels.column_kernel,
        {"x_ptr": FLOATS, "y_ptr": FLOATS, "ROWS": 32, "COLUMNS": 32},
    ),
}


def compiled(compiler, name):
    """Parsed PTX and TTGIR; compiler "" is the installed one."""
    if compiler:
        files = (FOLDER / f"{name}.{compiler}.{kind}" for kind in ("ptx", "ttgir"))
        ptx, ttgir = (file.read_text() for file in files)
    else:
        kernel, arguments = KERNELS[name]
        asm = asm_of(kernel, "sm_90", arguments, {"num_warps": 4})
        ptx, ttgir = asm["ptx"], asm["ttgir"]
    return Code(ptx), Module(ttgir)


def at(text):
    """Location of the only line with this text."""
    (line,) = (i for i, each in enumerate(LINES) if text in each)
    return "kernels.py", line


def test_there_are_two_compilers():
    assert COMPILERS == ["fbtriton-3.7.4", "triton-3.9.0"]


@pytest.mark.parametrize("compiler", ["", *COMPILERS])
def test_ptx_says_where_warps_meet(compiler):
    code, _ = compiled(compiler, "lock")
    total, store = at("total = tl.load(total_ptr"), at("tl.store(total_ptr")
    take, leave = at("tl.atomic_cas("), at("tl.atomic_xchg(")
    assert code.meets(("store", store), leave, ("atomic",)) is True  # tl.debug_barrier
    assert code.meets(("load", total), store, ("store",)) is False
    assert code.meets(("store", total), store, ("store",)) is None  # it stores nothing
    assert code.is_open([("load", total), ("store", store)]) is True
    assert code.is_open([("store", store), ("atomic", leave)]) is False
    assert code.is_open([("atomic", take), ("load", total)]) is False  # its result is shared
    assert code.is_open([("atomic", leave), ("load", total)]) is False  # no way leads back


@pytest.mark.parametrize("compiler", ["", *COMPILERS])
def test_ttgir_says_which_loads_come_early(compiler):
    _, module = compiled(compiler, "lock")
    loop, load, store = at("for row in"), at("x_ptr + row * BLOCK"), at("tl.store(x_ptr + (row")
    ahead = [module.issues_ahead(loop, load, store, distance) for distance in (1, 2, 3)]
    assert ahead == [True, False, False]  # two iterations ahead, behind the store of its own
    assert module.issues_ahead(load, load, store, 1) is None  # no loop there


@pytest.mark.parametrize("compiler", ["", *COMPILERS])
def test_ttgir_says_which_warp_has_an_element(compiler):
    _, module = compiled(compiler, "column")
    load, store = at("x = tl.load(x_ptr + rows"), at("tl.store(y_ptr + columns")
    for step in (("load", load), ("store", store)):
        warps = module.warps_of(step, 1024)
        assert warps.bincount().tolist() == [256] * 4
    assert module.warps_of(("load", store), 1024) is None  # a store
    assert module.warps_of(("load", load), 512) is None  # of another size
