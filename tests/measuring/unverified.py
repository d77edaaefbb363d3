"""Rungs that do what a kernel may do on a GPU where nobody has run it, for a child process.

`b94_wrong_5000` is wrong at launch 5,000 and at no other; launch 1 is the first on a jagged batch,
and the last ones are timed.
"""

import faulthandler
import os
import signal
import sys
import time
from collections import Counter
from types import ModuleType
from unittest import mock

import torch

import tritonemu
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.rung import Requires, Rung
from gdpa_kernels.gdpa.kernels import v0_eager
from gdpa_lab.measuring import probe, sustained, timing
from gdpa_lab.measuring.rows import Load

LOAD = Load(1500.0, 700.0, 0.35, ())
LAUNCHES = Counter()


def _crashes(right):
    faulthandler.disable()  # pytest's, which a forked child has
    os.kill(os.getpid(), signal.SIGSEGV)


def _raises(right):
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")


DEEDS = {
    "right": lambda right: right,
    "hangs": lambda right: time.sleep(600),
    "exits": lambda right: os._exit(3),
    "crashes": _crashes,
    "wrong": lambda right: right + 1,
    "raises": _raises,
}
TIMED = probe.LAUNCHES + 3
"""The first launch that is timed: two are on the workload, before its check."""
FORWARDS = {"b90_right": ("right", 1), "b91_refuses": ("right", 1)}
FORWARDS |= {
    f"b92_{deed}_{launch}": (deed, launch)
    for deed in ("raises", "hangs", "wrong", "crashes", "exits")
    for launch in (1, 2, 5000, TIMED)
    if (deed, launch) != ("wrong", TIMED)  # nobody looks at it
}


def _forward(impl):
    deed, launch = FORWARDS[impl]
    rights = {}

    def forward(batch):
        LAUNCHES[impl] += 1
        if id(batch.q) not in rights:
            rights[id(batch.q)] = batch.q, v0_eager.forward(batch)
        right = rights[id(batch.q)][1].clone()
        return DEEDS[deed](right) if LAUNCHES[impl] == launch else right

    return forward


RUNGS = tuple(
    Rung(impl, "a stand-in", "It has no kernel.", None, Requires((10, 0), only_major=True))
    for impl in FORWARDS
)
MODULES = {f"gdpa_kernels.gdpa.{impl}": ModuleType(impl) for impl in FORWARDS}
for impl, made in zip(FORWARDS, MODULES.values(), strict=True):
    made.forward = _forward(impl)
    if "refuses" in impl:
        made.call_problem = lambda batch: "needs other lengths"


def _sample(functions, device, protocol):
    for call in functions.values():
        call()
    return {name: [1.0, 2.0, 3.0] for name in functions}


def _sample_each(functions, device, protocol, *, seconds):
    return {name: (times, LOAD) for name, times in _sample(functions, device, protocol).items()}


CUDA = ("synchronize", "reset_peak_memory_stats", "memory_allocated", "max_memory_allocated")


def trial(*args, **options):
    """`probe.trial` on the CPU, where these rungs are known and the CUDA device is a fake."""
    sys.modules.update(MODULES)
    ladder._BY_IMPL.update({(rung.operator, rung.impl): rung for rung in RUNGS})
    timing.sample_kernels, sustained.sample_each = _sample, _sample_each
    LAUNCHES.clear()
    fakes = dict.fromkeys(CUDA, lambda: 0)
    with mock.patch.multiple(torch.cuda, **fakes), tritonemu.enabled("sm_100"):
        return probe.trial(*args, **options)


def report(entry, workload, **how):
    """Raise an error that describes the entry as it arrived."""
    module, config = entry[2]["module"], entry[2]["config"]
    whose = "its own" if isinstance(config, module.Config) else "another"
    name = module.__file__.rpartition("/")[2]
    raise ValueError(f"{name}, {whose} Config with BLOCK_N {config.BLOCK_N}")
