"""Runs unmodified Triton and TLX kernels on CPU tensors, and checks what they do.

    report = run(kernel, (programs,), x, y, n, BLOCK=128)

Arithmetic is done in the real dtypes with Triton's promotion rules. Warp-specialized kernels run as
written: every task is a role of its own, with barriers, asynchronous copies and MMAs between them.
Reported are races, deadlocks, barrier misuse, waits that may pass a phase too early, uninitialized
reads, stores of undefined values, missing fences, CTAs that end too early, out-of-bounds accesses
and invalid descriptors; `errors` lists the kinds. An operation the emulator does not know raises
`Unsupported`; it never guesses. Registers, layouts and real time are not modelled.

`rewrite` turns the kernel's source into Python on tiles, and `aggregates` its classes; `scopes`
checks variables in loops and branches; `tile` has the arithmetic, `language`, `tlx` and `gluon` the
operations, `instructions` inline PTX. `memory` is global memory, `unwritten` its unwritten part,
`undefined` the values of masked-off lanes, `buffers` shared and tensor memory. `clocks` tells what
happens before what; `barriers`, `tasks` and `scheduler` decide who runs when; `spinning` finds
loops that never end; `engines` are the units that roles share; `timeline` is the trace and its
figure, `stepper` a page of it. `launch` is the state of a launch, `execution` runs it,
`launch_hooks` takes over the launches of a program, and `compiled_kernel` is what they return.
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
