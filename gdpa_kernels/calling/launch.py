"""One place where a kernel meets a device.

Tensors on a CUDA device: the compiled kernel runs there. Tensors on the CPU: the same kernel runs
in the emulator, but only inside `with emulator.enabled(...)`; otherwise this raises. Nothing falls
back silently.
"""

import functools
import threading

import torch

from gdpa_kernels.calling import launches
from gdpa_kernels.calling.relaunch import relaunch, remember

# PyTorch's C functions, where its build has them (one for CUDA): the public ones run Python first.
_device = getattr(torch._C, "_cuda_getDevice", None)
_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class _OfThread(threading.local):
    """What writes down this thread's launches (`replay`), or None."""

    now = None


recorder = _OfThread()


def current_device() -> int:
    """`torch.cuda.current_device()`; there must be a tensor on a GPU."""
    return torch.cuda.current_device() if _device is None else _device()


def current_stream(device: int) -> int:
    """The handle of the stream that is current on a device."""
    if _stream is None:
        return torch.cuda.current_stream(device).cuda_stream
    return _stream(device)


def launch(kernel, grid: tuple[int, ...], device: torch.device, *args, **options) -> None:
    """Run `kernel` on `grid` programs; `options` are its constexprs, num_warps and num_stages.

    A grid without programs (an empty batch) launches nothing.
    Raises RuntimeError for CPU tensors outside `emulator.enabled()`.
    """
    if 0 in grid:
        return
    if device.type == "cuda":
        current, index = current_device(), device.index
        if index is not None and index != current:
            with torch.cuda.device(device):
                launch(kernel, grid, device, *args, **options)
            return
    if launches.recorders and not launches.note(kernel, grid, args, options):
        return
    if device.type == "cuda":
        if not relaunch(kernel, grid, current, args, options):
            remember(kernel, current, args, options, kernel[grid](*args, **options))
        if recorder.now is not None:
            recorder.now.launched(kernel, grid, current, args, options)
        return
    from gdpa_kernels import emulator

    if emulator.is_enabled():
        emulator.run_enabled(kernel, grid, *args, **options)
    else:
        raise RuntimeError(
            f"{kernel.__name__} needs tensors on a CUDA device, got tensors on {device}; to "
            "execute the kernel on the CPU use `with gdpa_kernels.emulator.enabled():`"
        )


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of `device`, or of the one emulated."""
    if device.type != "cuda":
        from gdpa_kernels import emulator

        return emulator.current_multiprocessors()
    index = device.index
    return _multiprocessors(torch.cuda.current_device() if index is None else index)


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
