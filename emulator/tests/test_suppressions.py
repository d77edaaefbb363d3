"""Findings that a comment with a reason allows; everything else is reported as before."""

import json

import pytest

from tritonemu.__main__ import main
from tritonemu.suppressions import KINDS, parse

PLAIN = """
import torch, triton
import triton.language as tl

@triton.jit
def sum_kernel(x_ptr, out_ptr):
    part = tl.sum(tl.load(x_ptr + tl.program_id(0) * 16 + tl.arange(0, 16)))
    tl.store(out_ptr, tl.load(out_ptr) + part)  # RACE

def race():
    sum_kernel[(3,)](torch.ones(48, device="cuda"), torch.zeros(1, device="cuda"))

@triton.jit
def copy_kernel(x_ptr, out_ptr, n):
    i = tl.arange(0, 16)
    # EMPTY
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(out_ptr + i, x)  # UNDEFINED

def empty():
    copy_kernel[(1,)](torch.empty(16, device="cuda"), torch.zeros(16, device="cuda"), 16)

def undefined():
    copy_kernel[(1,)](torch.zeros(16, device="cuda"), torch.zeros(16, device="cuda"), 9)
"""
TLX = """
import torch, triton
import triton.language as tl
import triton.language.extra.tlx as tlx

@triton.jit
def shared_kernel(out_ptr):
    cell = tlx.local_alloc((16,), tl.float32, 1)
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tlx.local_store(cell[0], tl.full((16,), 1, tl.float32))  # SHARED
        with tlx.async_task(num_warps=4):
            tlx.local_store(cell[0], tl.full((16,), 1, tl.float32))

def shared():
    shared_kernel[(1,)](None)

@triton.jit
def fence_kernel(out_ptr):
    tile = tlx.local_alloc((256,), tl.float32, 1)
    tlx.local_store(tile[0], tl.full((256,), 1, tl.float32))  # FENCE
    tlx.async_store(out_ptr, tile[0], 1024)
    tlx.async_descriptor_store_wait(0)

def fence():
    fence_kernel[(1,)](torch.zeros(256, device="cuda"))

@triton.jit
def unwritten_kernel(out_ptr):
    cell = tlx.local_alloc((16,), tl.float32, 1)
    x = tlx.local_load(cell[0])  # SHARED EMPTY
    tl.store(out_ptr + tl.arange(0, 16), x)

def unwritten():
    unwritten_kernel[(1,)](torch.zeros(16, device="cuda"))
"""
tlx = pytest.mark.tlx
CASES = (
    (PLAIN, "race", "RACE", "Race"),
    (PLAIN, "empty", "EMPTY", "UninitializedRead"),
    (PLAIN, "undefined", "UNDEFINED", "UndefinedValue"),
    pytest.param(TLX, "shared", "SHARED", "Race", marks=tlx),
    pytest.param(TLX, "unwritten", "SHARED EMPTY", "UninitializedRead", marks=tlx),
    pytest.param(TLX, "fence", "FENCE", "MissingFence", marks=tlx),
)


def allows(text: str, place: str, comment: str) -> str:
    return text.replace(f"# {place}\n", f"# tritonemu: {comment}\n")


@pytest.mark.parametrize("text, function, place, kind", CASES)
def test_a_comment_allows_one_kind_at_one_line(text, function, place, kind, tmp_path, capsys):
    program, report = tmp_path / "program.py", tmp_path / "report.json"
    command = ["--schedules", "1", "--json", str(report), f"{program}:{function}"]

    def ends(source: str) -> int:
        program.write_text(source)
        return main(command)

    others = next(each for each in KINDS if each != kind)
    for source in (text, allows(text, place, f"allow({others}) another reason")):
        assert ends(source) == 1
        assert json.loads(report.read_text())["found"]["kind"] == kind
    capsys.readouterr()
    assert ends(allows(text, place, f"allow({others}, {kind}) a test asks for it")) == 0
    (allowed,) = json.loads(report.read_text())["allowed"]
    assert (allowed["kind"], allowed["reason"]) == (kind, "a test asks for it")
    assert allowed["file"] == str(program) and allowed["times"] >= 1
    assert f"allowed: {kind} at {program}:{allowed['line']}, found" in capsys.readouterr().out


@pytest.mark.parametrize(
    "comment", ("allow(Race)", "allow(Rase) it is fine", "allow() why", "alow(Race) why", "ok")
)
def test_a_wrong_comment_is_named_though_nothing_is_found(comment, tmp_path, capsys):
    program = tmp_path / "program.py"
    program.write_text(allows(PLAIN, "UNDEFINED", comment))
    assert main([f"{program}:race"]) == 1  # of another kernel
    assert "InvalidKernel" not in capsys.readouterr().err
    program.write_text(allows(PLAIN, "RACE", comment))
    assert main([f"{program}:race"]) == 1
    said = capsys.readouterr().err
    assert "InvalidKernel" in said and f"got '# tritonemu: {comment}'" in said
    assert f"{program}:8: " in said


def test_a_comment_of_another_tool_is_none():
    assert parse("x = 1  # noqa: E501") is None
    assert parse("x = 1  # tritonemu: allow(Race): all store 1") == (("Race",), "all store 1")
