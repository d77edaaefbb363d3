"""What a call costs the host, in calls of Python and of C: the same on every machine, as times are
not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import pytest
import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

import gdpa_kernels
import tritonemu
from gdpa_kernels import Lengths, block_attention, gdpa
from gdpa_kernels.calling.launch import launch
from gdpa_kernels.calling.launches import Launch, launches
from gdpa_kernels.serving import HistoryRules, PagedCache, score

PACKAGE, EMULATOR, TRITON = (
    str(Path(each.__file__).parent) for each in (gdpa_kernels, tritonemu, triton)
)
OFFSETS = torch.arange(0, 65 * 4, 4, dtype=torch.int32)
LONGEST = 256


class Cost(NamedTuple):
    """own: functions of ours that are called; calls: all calls of Python and of C, outside of
    launches and of the emulator; launches of kernels, and descriptors that they take."""

    own: int
    calls: int
    launches: int
    descriptors: int


BUDGET = {
    "new offsets": Cost(100, 282, 2, 4),
    "Lengths": Cost(102, 279, 1, 4),
    "mask": Cost(123, 325, 1, 4),
    "backward": Cost(84, 268, 2, 7),
    "blocks": Cost(68, 179, 2, 0),
    "score": Cost(140, 326, 2, 4),
}
"""More calls make every call of every user slower: look for a cheaper way before raising one, and
if there is none say what it buys. Launches and descriptors cost most."""
SLACK = 1.05
"""How many more calls other versions of Python and PyTorch may make: counted with 3.11 and 2.13."""


def seen_in(call: Callable[[], object]) -> tuple[list[tuple[str, CodeType]], list[Launch]]:
    """The functions of Python that `call` enters ("call") or that call one of C ("c_call"), once
    everything is warm and not of what happens in a launch; and its launches."""
    found: list[tuple[str, CodeType]] = []
    launching = 0

    def see(frame, event, _) -> None:
        nonlocal launching
        is_launch = frame.f_code is launch.__code__
        if event in ("call", "c_call") and not launching:
            found.append((event, frame.f_code))
        if event == "call":
            launching += is_launch
        elif event == "return":
            launching -= is_launch

    with tritonemu.enabled(multiprocessors=132), launches(run=False) as made:
        for _ in range(2):
            call()
        made.clear()
        before = sys.getprofile()
        sys.setprofile(see)
        try:
            call()
        finally:
            sys.setprofile(before)
    return found, [*made]


def cost_of(call: Callable[[], object]) -> Cost:
    found, made = seen_in(call)
    outside = [(event, code) for event, code in found if EMULATOR not in code.co_filename]
    arguments = [x for each in made for x in each.arguments.values()]
    return Cost(
        sum(event == "call" and is_own(code) for event, code in outside),
        len(outside),
        len(made),
        sum(isinstance(x, TensorDescriptor) for x in arguments),
    )


def is_own(code: CodeType) -> bool:
    """Whether it is a function of ours; comprehensions are calls in some versions of Python."""
    return code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<")


def calls_of(what: str) -> Callable[[], object]:
    q = torch.zeros(int(OFFSETS[-1]), 2, 128, dtype=torch.bfloat16, requires_grad=True)
    if what == "score":
        return scoring()
    if what == "blocks":
        return lambda: block_attention(q, q, q, OFFSETS, validate=False)
    if what == "new offsets":
        return lambda: gdpa(q, q, q, OFFSETS, OFFSETS, LONGEST, LONGEST, validate=False)
    if what == "mask":  # of so many tiles that programs take them by tickets
        uneven = Lengths(torch.tensor([0, 3000, 3010], dtype=torch.int32))
        x = torch.zeros(3010, 8, 128, dtype=torch.bfloat16, requires_grad=True)
        return lambda: gdpa(x, x, x, uneven, uneven, causal=True)
    kept = Lengths(OFFSETS, LONGEST)
    if what == "Lengths":
        return lambda: gdpa(q, q, q, kept, kept, validate=False)
    with tritonemu.enabled(), launches(run=False):
        out = gdpa(q, q, q, OFFSETS, OFFSETS, LONGEST, LONGEST, validate=False)
    grad = torch.zeros_like(out)
    return lambda: torch.autograd.grad(out, q, grad, retain_graph=True)


def scoring() -> Callable[[], object]:
    """Few users with long histories, whose keys are split."""
    cache = PagedCache(HistoryRules(1), 40, 128, 2, 128)
    users, x = list(range(8)), torch.zeros(8 * 512, 2, 128, dtype=torch.bfloat16)
    with tritonemu.enabled():
        cache.write(0, cache.append(users, [512] * 8), x, x)
        pages = cache.pages(users)
    q, kept = torch.zeros(8 * 64, 2, 128, dtype=torch.bfloat16), Lengths.uniform(8, 64, "cpu")
    return lambda: score(q, q, q, kept, 64, cache, 0, pages)


@pytest.mark.parametrize("what", BUDGET)
def test_a_call_stays_within_its_budget(what: str) -> None:
    cost, budget = cost_of(calls_of(what)), BUDGET[what]
    assert cost[2:] == budget[2:]
    assert cost.own <= budget.own and cost.calls <= SLACK * budget.calls, cost


@pytest.mark.parametrize("what", BUDGET)
def test_the_host_runs_nothing_of_triton_but_launches(what: str) -> None:
    """`triton.cdiv` on the host is a kernel's function called from Python."""
    found, _ = seen_in(calls_of(what))
    assert not [code for _, code in found if code.co_filename.startswith(TRITON)]
