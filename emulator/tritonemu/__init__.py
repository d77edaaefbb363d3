"""Runs unmodified Triton and TLX kernels on CPU tensors, and checks what they do.

    report = run(kernel, (programs,), x, y, n, BLOCK=128)

Arithmetic is done in the real dtypes with Triton's promotion rules. Warp-specialized kernels run as
written: every task is a role of its own, with barriers, asynchronous copies and MMAs between them.
Reported are races, deadlocks, barrier misuse, waits that may pass a phase too early, uninitialized
reads, stores of undefined values, missing fences, CTAs that end too early, out-of-bounds accesses
and invalid descriptors; `errors` lists the kinds. An operation the emulator does not know raises
`Unsupported`; it never guesses. Registers, layouts and real time are not modelled.

`rewrite` turns the kernel's source into Python on tiles, and `aggregates` its classes; `scopes`
watches variables; `tile` is the arithmetic; `language` and `tlx` the operations; `instructions`
inline PTX; `memory` global memory, `unwritten` which of it is not written, `undefined` what masks
turn off, `buffers` shared and tensor memory; `clocks` what happens before what; `barriers`, `tasks`
and `scheduler` who runs when, `spinning` who never will, `engines` the units that roles share;
`timeline` the trace; `launch` the state of a launch, `execution` its run, `launching` what launches
of a program do, `compiled` what they return. Needs torch, triton and greenlet, and no GPU.
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
)
from .execution import run
from .gpu import fake_gpu
from .launch import Report
from .launch_hooks import (
    MULTIPROCESSORS,
    Reports,
    current_arch,
    current_multiprocessors,
    enabled,
    is_enabled,
    run_enabled,
)
from .timeline import Timeline

__all__ = [
    "AliasedWait",
    "BarrierMisuse",
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
    "Timeline",
    "UndefinedValue",
    "UninitializedRead",
    "Unsupported",
    "WrongResult",
    "current_arch",
    "current_multiprocessors",
    "enabled",
    "fake_gpu",
    "is_enabled",
    "run",
    "run_enabled",
]

__version__ = "0.1.0"
