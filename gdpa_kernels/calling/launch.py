"""One place where a kernel meets a device.

Tensors on a CUDA device: the compiled kernel runs there. Tensors on the CPU: the same kernel runs
in the emulator, but only inside `with emulator.enabled(...)`; otherwise this raises. Nothing falls
back silently.
"""

import functools

import torch

EMULATED_MULTIPROCESSORS = 3


def launch(kernel, grid: tuple[int, ...], device: torch.device, *args, **options) -> None:
    """Run `kernel` on `grid` programs; `options` are its constexprs, num_warps and num_stages.

    A grid without programs (an empty batch) launches nothing.
    Raises RuntimeError for CPU tensors outside `emulator.enabled()`.
    """
    if 0 in grid:
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
    how = emulator.current_options()
    emulator.run(kernel, grid, *args, arch=emulator.current_arch(), **how, **options)


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of `device`; on the CPU a few, so that emulated programs share tiles."""
    if device.type != "cuda":
        return EMULATED_MULTIPROCESSORS
    index = device.index
    return _multiprocessors(torch.cuda.current_device() if index is None else index)


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
