"""Rungs that do what a kernel may do on a GPU where nobody has run it, for a child process."""

import faulthandler
import os
import signal
import sys
import time
from types import ModuleType

import tritonemu
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.rung import Requires, Rung
from gdpa_kernels.gdpa import v0_eager
from gdpa_kernels.measuring import measure


def _crashes(batch):
    faulthandler.disable()  # pytest's, which a forked child has
    os.kill(os.getpid(), signal.SIGSEGV)


def _fails(batch):
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")


FORWARDS = {
    "b90_right": v0_eager.forward,
    "b91_hangs": lambda batch: time.sleep(600),
    "b92_exits": lambda batch: os._exit(3),
    "b93_crashes": _crashes,
    "b94_wrong": lambda batch: v0_eager.forward(batch) + 1,
    "b95_raises": _fails,
}
RUNGS = tuple(
    Rung(impl, "a stand-in", "It has no kernel.", None, Requires((10, 0), only_major=True))
    for impl in FORWARDS
)
MODULES = {f"gdpa_kernels.gdpa.{impl}": ModuleType(impl) for impl in FORWARDS}
for made, forward in zip(MODULES.values(), FORWARDS.values(), strict=True):
    made.forward = forward


def attempt(entry, operator, ran):
    """`measure.attempt` on the CPU, where these rungs are known."""
    sys.modules.update(MODULES)
    ladder._BY_IMPL.update({(rung.operator, rung.impl): rung for rung in RUNGS})
    measure.run_once = lambda ready: (ready.call(), 0)
    with tritonemu.enabled("sm_100"):
        return measure.attempt(entry, operator, ran)


def report(entry, operator, ran):
    """What arrived of an entry, as a failure."""
    module, config = entry[2]["module"], entry[2]["config"]
    whose = "its own" if isinstance(config, module.Config) else "another"
    name = module.__file__.rpartition("/")[2]
    return measure.Attempt(failure=f"{name}, {whose} Config with BLOCK_N {config.BLOCK_N}")
