"""Runs unmodified Triton and TLX kernels on CPU tensors, and checks what they do.

    report = run(kernel, (programs,), x, y, n, BLOCK=128)

Arithmetic is done in the real dtypes with Triton's promotion rules. Warp-specialized kernels run as
written: every task is a role of its own, with barriers, asynchronous copies and MMAs between them.
Reported are races, deadlocks, barrier misuse, waits that may pass a phase too early, uninitialized
reads, stores of undefined values, missing fences, CTAs that end too early, out-of-bounds accesses
and invalid descriptors; `errors` lists the kinds. An operation the emulator does not know raises
`Unsupported`; it never guesses. Registers, layouts and real time are not modelled.
Needs torch, triton and greenlet, and no GPU.
"""

from .errors import (
    AliasedWait,
    BarrierMisuse,
    Deadlock,
    DescriptorError,
    DeviceAssertion,
    EarlyExit,
    EmulatorError,
    InvalidKernel,
    MissingFence,
    OutOfBounds,
    Race,
    ResourceLimit,
    UndefinedValue,
    UninitializedRead,
    Unsupported,
    WrongResult,
    line_in,
)
from .gpu import fake_gpu
from .launch import BarrierUse, Report
from .launch_hooks import (
    MULTIPROCESSORS,
    Reports,
    current_arch,
    current_multiprocessors,
    enabled,
    is_enabled,
    run,
    run_enabled,
)
from .search import Search
from .stepper import interactive
from .timeline import Timeline
from .verdict import Verdict, check

__all__ = [
    "AliasedWait",
    "BarrierMisuse",
    "BarrierUse",
    "Deadlock",
    "DescriptorError",
    "DeviceAssertion",
    "EarlyExit",
    "EmulatorError",
    "InvalidKernel",
    "MULTIPROCESSORS",
    "MissingFence",
    "OutOfBounds",
    "Race",
    "Report",
    "Reports",
    "ResourceLimit",
    "Search",
    "Timeline",
    "UndefinedValue",
    "UninitializedRead",
    "Unsupported",
    "Verdict",
    "WrongResult",
    "check",
    "current_arch",
    "current_multiprocessors",
    "enabled",
    "fake_gpu",
    "interactive",
    "is_enabled",
    "line_in",
    "run",
    "run_enabled",
]

__version__ = "0.1.0"
