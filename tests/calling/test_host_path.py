"""What a call costs the host, in calls of Python: the same on every machine, as times are not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import gdpa_kernels
import tritonemu
from gdpa_kernels import Lengths, block_attention, gdpa
from gdpa_kernels.calling.launch import launch
from gdpa_kernels.calling.launches import launches

PACKAGE = str(Path(gdpa_kernels.__file__).parent)
OFFSETS = torch.arange(0, 65 * 4, 4, dtype=torch.int32)
LONGEST = 256
BUDGET = {"new offsets": 98, "Lengths": 121, "backward": 81, "blocks": 67}
"""Calls of our functions. More make every call of every user slower: look for a cheaper way before
raising one, and if there is none say what it buys."""


def python_calls(call: Callable[[], object]) -> list[str]:
    """The files of the named functions that `call` calls, once everything is warm; not of what
    happens in a launch."""
    found: list[str] = []
    launching = 0

    def see(frame, event, _) -> None:
        nonlocal launching
        is_launch = frame.f_code is launch.__code__
        if event == "call":
            if not launching and not frame.f_code.co_name.startswith("<"):
                found.append(frame.f_code.co_filename)
            launching += is_launch
        elif event == "return":
            launching -= is_launch

    with tritonemu.enabled(), launches(run=False):
        for _ in range(2):
            call()
        before = sys.getprofile()
        sys.setprofile(see)
        try:
            call()
        finally:
            sys.setprofile(before)
    return found


def calls_of(what: str) -> Callable[[], object]:
    q = torch.zeros(int(OFFSETS[-1]), 2, 128, dtype=torch.bfloat16, requires_grad=True)
    if what == "blocks":
        return lambda: block_attention(q, q, q, OFFSETS, validate=False)
    if what == "new offsets":
        return lambda: gdpa(q, q, q, OFFSETS, OFFSETS, LONGEST, LONGEST, validate=False)
    kept = Lengths(OFFSETS, LONGEST)
    if what == "Lengths":
        return lambda: gdpa(q, q, q, kept, kept, validate=False)
    with tritonemu.enabled(), launches(run=False):
        out = gdpa(q, q, q, OFFSETS, OFFSETS, LONGEST, LONGEST, validate=False)
    grad = torch.zeros_like(out)
    return lambda: torch.autograd.grad(out, q, grad, retain_graph=True)


@pytest.mark.parametrize("what", BUDGET)
def test_a_call_stays_within_its_budget(what: str) -> None:
    own = [name for name in python_calls(calls_of(what)) if name.startswith(PACKAGE)]
    assert len(own) <= BUDGET[what]


@pytest.mark.parametrize("what", BUDGET)
def test_the_host_runs_nothing_of_triton_but_launches(what: str) -> None:
    """`triton.cdiv` on the host is a kernel's function called from Python."""
    import triton

    folder = str(Path(triton.__file__).parent)
    assert not [name for name in python_calls(calls_of(what)) if name.startswith(folder)]
