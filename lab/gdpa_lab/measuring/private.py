"""Undocumented names of PyTorch and Triton, each with its use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch._functorch import config

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget


def sleep(cycles: int) -> None:
    """Make the current stream wait for this many clocks of the device."""
    torch.cuda._sleep(cycles)


def without_donated_buffers() -> contextlib.AbstractContextManager[None]:
    """Context in which a compiled backward does not overwrite what forward saved for it."""
    return config.patch(donated_buffer=False)


@contextlib.contextmanager
def compiling_for(target: GPUTarget) -> Iterator[None]:
    """Report this target to kernels that ask for their GPU (`triton.language.target_info`)."""
    from triton.runtime import driver

    previous = driver._active
    driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    try:
        yield
    finally:
        driver._active = previous
