"""Compile for sm_90a what a launcher would launch, and read what the compiler made of it."""

from __future__ import annotations

from unittest import mock

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from gdpa_kernels.compile_check import Compiled, build, read

_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32",
}  # fmt: skip


def launches(module, call) -> list[tuple]:
    """(kernel, arguments, options) of every launch of `call`, which run nothing.

    module: the one that `call` belongs to.
    """
    seen = []

    def record(kernel, grid, device, *args, **options):
        seen.append((kernel, args, options))

    with mock.patch.object(module, "launch", record):
        call()
    return seen


def _type(value: object) -> str:
    if isinstance(value, TensorDescriptor):
        shape = ", ".join(map(str, value.block_shape))
        return f"tensordesc<{_TYPES[value.base.dtype]}[{shape}]>"
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def compile_launch(kernel, args: tuple, options: dict) -> Compiled:
    """One launch compiled for sm_90a; tensors are taken to be aligned to 16 bytes."""
    given = dict(zip(kernel.arg_names, args, strict=False))
    types = {name: _type(value) for name, value in given.items() if value is not None}
    launch_options = {n: v for n, v in options.items() if n not in kernel.arg_names}
    built = build(kernel, types, given | options, options=launch_options)
    return read(built)
