"""`launches`, which records what calls launch: on a GPU, in the emulator, or where nothing runs.

`launch` tells each launch to `note`. The lab, tests and chapters read kernels, arguments and
constants of a call from here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from triton import JITFunction


@dataclass(frozen=True, eq=False)
class Launch:
    """A launch of a kernel.

    arguments: what it computes on, by name: tensors, descriptors, numbers, None. constants: its
    constexprs by name. Both with what it has by default. options: num_warps and the like.
    """

    kernel: JITFunction
    grid: tuple[int, ...]
    arguments: dict[str, object]
    constants: dict[str, object]
    options: dict[str, object]

    @property
    def name(self) -> str:
        """The name of the kernel."""
        return self.kernel.__name__


class _Recorder(NamedTuple):
    seen: list[Launch]
    run: bool


# Of the process, not of a thread or a context: autograd launches what backward needs from a thread
# of its own for each GPU, which knows nothing of the caller's. Replaced, never changed, so that a
# launch reads it without the lock.
recorders: tuple[_Recorder, ...] = ()
_lock = threading.Lock()


@contextmanager
def launches(*, run: bool = True) -> Iterator[list[Launch]]:
    """Within this context every launch of this package, in any thread, joins the list that it
    yields, before it is made.

        >>> with launches(run=False) as seen:
        ...     module.forward(batch)

    run=False: none is made; results are what memory held. A rung's own `forward` and `backward`
    then take tensors on the CPU; public calls look at the device first, and need
    `tritonemu.enabled()` around them. Contexts nest: each sees all, and one without `run` is enough
    for nothing to run. The list keeps tensors alive.
    """
    global recorders
    recorder = _Recorder([], run)
    with _lock:
        recorders = (*recorders, recorder)
    try:
        yield recorder.seen
    finally:
        with _lock:
            recorders = tuple(each for each in recorders if each is not recorder)


def note(kernel: JITFunction, grid: tuple[int, ...], args: tuple, options: dict) -> bool:
    """Tell the open contexts of a launch; whether it is to be made."""
    open_recorders = recorders
    defaults = {p.name: p.default for p in kernel.params if p.has_default}
    bound = defaults | dict(zip(kernel.arg_names, args, strict=False)) | options
    constants = {p.name for p in kernel.params if p.is_constexpr}
    launch = Launch(
        kernel,
        grid,
        {name: bound[name] for name in kernel.arg_names if name in bound.keys() - constants},
        {name: value for name, value in bound.items() if name in constants},
        {name: value for name, value in options.items() if name not in kernel.arg_names},
    )
    for recorder in open_recorders:
        recorder.seen.append(launch)
    return all(recorder.run for recorder in open_recorders)


def are_made() -> bool:
    """True unless an open context leaves launches out."""
    return all(recorder.run for recorder in recorders)
