"""What threads and streams share, one after another."""

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
    """

    def __init__(self, device: torch.device):
        self._lock, self._depth, self._device = threading.RLock(), 0, device
        self._stream: torch.cuda.Stream | None = None  # of the last that was ordered
        self._event: torch.cuda.Event | None = None  # behind all that it enqueued
        self._ordered = False  # work may have been enqueued since the last event

    def __reduce__(self):
        return type(self), (self._device,)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        try:
            self._order()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_) -> None:
        self._depth -= 1
        try:
            if not self._depth:
                self._record()
        finally:
            self._lock.release()

    def _order(self) -> None:
        """Let the current stream wait for the last one."""
        if self._device.type != "cuda" or torch.compiler.is_compiling():
            return
        if checks.is_capturing(self._device):
            return
        stream = torch.cuda.current_stream(self._device)
        if stream != self._stream:
            self._record()
            if self._event is not None:
                stream.wait_event(self._event)
        self._stream, self._ordered = stream, True

    def _record(self) -> None:
        if self._ordered:
            self._ordered = False
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
