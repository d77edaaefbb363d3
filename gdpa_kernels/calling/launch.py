"""`launch`, by which every kernel of the package runs, and what the host asks of a device before.

Tensors on a CUDA device: the compiled kernel runs there. Tensors on the CPU: the same kernel runs
in the emulator, but only inside `with tritonemu.enabled(...)`; otherwise this raises. Nothing falls
back silently.
"""

import functools
import sys
from typing import Any

import torch

from gdpa_kernels.calling import launches


def launch(kernel, grid: tuple[int, ...], device: torch.device, *args, **options) -> None:
    """Run `kernel` on `grid` programs; `options` are its constexprs, num_warps and num_stages.

    A grid without programs launches nothing, and must come from an empty batch: one of the tensors
    has no elements. Raises ValueError where none is, RuntimeError for CPU tensors outside
    `tritonemu.enabled()`.
    """
    if 0 in grid:
        if not any(map(_is_empty, args)):
            raise ValueError(
                f"grid must have programs unless the batch is empty, got {grid} for "
                f"{kernel.__name__}"
            )
        return
    if launches.recorders and not launches.note(kernel, grid, args, options):
        return
    if device.type == "cuda":
        if device.index is None or device.index == torch.cuda.current_device():
            _run(kernel, grid, args, options)
        else:
            with torch.cuda.device(device):
                _run(kernel, grid, args, options)
        return
    emulator = sys.modules.get("tritonemu")  # who enables it has imported it
    if emulator is None or not emulator.is_enabled():
        raise RuntimeError(
            f"{kernel.__name__} needs tensors on a CUDA device, got tensors on {device}; to "
            "execute the kernel on the CPU use `with tritonemu.enabled():`"
        )
    emulator.run_enabled(kernel, grid, *args, **options)


def _is_empty(argument: object) -> bool:
    """Whether it is a tensor without elements, or a `ragged_descriptor` of one."""
    if isinstance(argument, torch.Tensor):
        return argument.numel() == 0
    return getattr(argument, "is_empty", False)


def _run(kernel, grid: tuple[int, ...], args: tuple, options: dict) -> None:
    """All arguments by position, defaults too, without options that are Triton's own: its C paths
    take nothing else (TRITON_ENABLE_C_CACHE, TRITON_USE_C_DISPATCHER)."""
    fixed = dict(options)
    if fixed.get("num_warps") == 4:
        del fixed["num_warps"]
    parameters = kernel.params[len(args) :]  # of which Triton looks a default up by `inspect`
    rest = [fixed.pop(p.name) if p.name in fixed else p.default for p in parameters]
    kernel[grid](*args, *rest, **fixed)


def cdiv(a: int, b: int) -> int:
    """a / b rounded up; on the host `triton.cdiv` takes twenty times as long."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n, of n >= 1; see `cdiv`."""
    return 1 << (n - 1).bit_length()


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of `device`, or of the one emulated."""
    if device.type != "cuda":
        import tritonemu

        return tritonemu.current_multiprocessors()
    return _properties(device).multi_processor_count


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have on `device`; elsewhere as on an H200."""
    if device.type != "cuda":
        return 232_448
    return _properties(device).shared_memory_per_block_optin


def _properties(device: torch.device) -> Any:
    return _properties_of(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _properties_of(index: int) -> Any:
    return torch.cuda.get_device_properties(index)
