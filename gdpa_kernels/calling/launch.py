"""One place where a kernel meets a device.

Tensors on a CUDA device: the compiled kernel runs there. Tensors on the CPU: the same kernel runs
in the emulator, but only inside `with emulator.enabled(...)`; otherwise this raises. Nothing falls
back silently.
"""

import functools

import torch

from gdpa_kernels.calling import launches


def launch(kernel, grid: tuple[int, ...], device: torch.device, *args, **options) -> None:
    """Run `kernel` on `grid` programs; `options` are its constexprs, num_warps and num_stages.

    A grid without programs (an empty batch) launches nothing.
    Raises RuntimeError for CPU tensors outside `emulator.enabled()`.
    """
    if 0 in grid:
        return
    if launches.recorders and not launches.note(kernel, grid, args, options):
        return
    if device.type == "cuda":
        with torch.cuda.device(device):
            kernel[grid](*args, **options)
        return
    from gdpa_kernels import emulator

    if not emulator.is_enabled():
        raise RuntimeError(
            f"{kernel.__name__} needs tensors on a CUDA device, got tensors on {device}; to "
            "execute the kernel on the CPU use `with gdpa_kernels.emulator.enabled():`"
        )
    emulator.run_enabled(kernel, grid, *args, **options)


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
