"""`Exclusive`: a lock for what threads share, which on a GPU orders their streams as well.

`PagedCache` and `StoredSums` have one, `exclusive`, and decorate their methods with `exclusively`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import torch

from gdpa_kernels.calling import checks


class Exclusive:
    """A context with a reentrant lock; a copied or unpickled one is new.

    On a GPU the streams follow each other, too: what is enqueued in the context waits for all that
    was enqueued in one before, on whatever stream. The capture of a CUDA graph is not ordered, nor
    are its replays: who shares what a graph reads orders them.

    An event stands behind what the last stream has enqueued. Say a context on stream A has another
    one on stream B inside of it. Where B's begins, the event is recorded on A, and B waits for it;
    where B's ends, it is recorded on B, and A, which is used again, waits for that. Contexts on one
    stream wait for nothing, and nested ones record nothing.
    """

    def __init__(self, device: torch.device):
        self._lock, self._device = threading.RLock(), device
        self._entered: list[torch.cuda.Stream | None] = []  # the stream of each open context
        self._stream: torch.cuda.Stream | None = None  # the last one that was used
        self._event: torch.cuda.Event | None = None  # behind what it had enqueued then
        self._unrecorded = False  # it may have enqueued more since

    def __reduce__(self):
        return type(self), (self._device,)

    def __enter__(self) -> None:
        self._lock.acquire()
        try:
            stream = self._current()
            if stream is not None:
                self._use(stream)
            self._entered.append(stream)
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, *_) -> None:
        self._entered.pop()
        try:
            if not self._entered:
                self._record()
            elif self._entered[-1] is not None:
                self._use(self._entered[-1])
        finally:
            self._lock.release()

    def _current(self) -> torch.cuda.Stream | None:
        """The current stream; None where nothing is to be ordered."""
        if self._device.type != "cuda" or torch.compiler.is_compiling():
            return None
        if checks.is_capturing(self._device):
            return None
        return torch.cuda.current_stream(self._device)

    def _use(self, stream: torch.cuda.Stream) -> None:
        """Let a stream wait for the last one that was used."""
        if stream != self._stream:
            self._record()
            if self._event is not None:
                stream.wait_event(self._event)
        self._stream, self._unrecorded = stream, True

    def _record(self) -> None:
        """Move the event behind what the last stream has enqueued by now."""
        if self._unrecorded:
            self._unrecorded = False
            self._event = self._event or torch.cuda.Event()
            self._event.record(self._stream)


def exclusively(method: Callable) -> Callable:
    """`method`, in the context `self.exclusive`; without it in a compiled program."""

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            return method(self, *args, **kwargs)
        with self.exclusive:
            return method(self, *args, **kwargs)

    return call
