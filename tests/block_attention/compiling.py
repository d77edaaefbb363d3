"""Compile for sm_90a what a launcher would launch, and read what the compiler made of it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32",
}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """What one kernel became: per-thread registers, bytes spilled, bytes of shared memory, and how
    often each SASS mnemonic occurs."""

    kernel: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    serialised: bool
    instructions: Counter


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
    """Compile one launch; tensors are taken to be aligned to 16 bytes."""
    options = dict(options)
    constants = dict(zip(kernel.arg_names, args, strict=False)) | options
    signature, values, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = constants[name]
        if index >= len(args) or value is None:
            signature[name], values[(index,)] = "constexpr", value
            continue
        signature[name] = _type(value)
        if signature[name].startswith("*"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    launch_options = {name: options[name] for name in options.keys() - set(kernel.arg_names)}
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes),
        target=GPUTarget("cuda", 90, 32),
        options=launch_options,
    )
    tools = triton.knobs.nvidia
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder) / "kernel.cubin", Path(folder) / "kernel.ptx"
        cubin.write_bytes(compiled.asm["cubin"])
        ptx.write_text(compiled.asm["ptx"])
        report = _run(tools.ptxas.path, "-arch=sm_90a", "-v", str(ptx), "-o", "/dev/null")
        sass = _run(tools.nvdisasm.path, "-c", str(cubin))
    spilled = re.search(r"(\d+) bytes spill stores", report)
    mnemonics = re.findall(
        r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9]+(?:\.128)?)", sass, re.M
    )
    wide = re.findall(r"\b(LDG|STG)\.E(?:\.\w+)*\.128\b", sass)
    return Compiled(
        kernel=kernel.__name__,
        registers=int(re.search(r"Used (\d+) registers", report).group(1)),
        spill_bytes=int(spilled.group(1)) if spilled else 0,
        shared_bytes=compiled.metadata.shared,
        serialised="serialized" in report,
        instructions=Counter(mnemonics) + Counter(f"{name}.128" for name in wide),
    )


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
