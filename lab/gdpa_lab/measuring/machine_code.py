"""Hashes the machine code of launches, and recompiles their kernels without a GPU.

The hash covers instructions, constants, resources and shared memory of a cubin, but no symbols,
line numbers or PTX, so renaming kernels, variables or files does not change it.

As a program (`python machine_code.py < questions > answers`) this compiles what measured rows
launch with the package on PYTHONPATH, however old; hence it imports nothing of the package itself.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import struct
import subprocess
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import ModuleType, NoneType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from triton.compiler import CompiledKernel

    from gdpa_kernels.calling.launches import Launch

_SECTIONS = (".text.", ".nv.info.", ".nv.constant", ".nv.shared.")
_NO_BITS = 8
_LISTS = re.compile("(list|order)_kernel$")  # kernels that make a work list
_SMS = 132  # of an H200
STUDIES = {"gdpa_kernels.block_attention.eliminations": "notebooks.block._eliminations"}
"""Modules that stand beside a chapter, by the names that records know them by."""
_MOVED = {"order_kernel": "gdpa_kernels.gdpa.device.longest_first"}
"""Modules of kernels that left the one by which records know them."""


def digest(cubin: bytes) -> str:
    """Hash the machine code of a cubin, 16 hex digits. Source: ELF-64, section headers."""
    start = struct.unpack_from("<Q", cubin, 40)[0]
    count, names = struct.unpack_from("<HH", cubin, 60)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, start + 64 * i) for i in range(count)]
    parts = []
    for name, kind, _, _, offset, size, _, info, _, _ in headers:
        begin = headers[names][4] + name
        section = cubin[begin : cubin.index(b"\0", begin)].decode()
        prefix = next((prefix for prefix in _SECTIONS if section.startswith(prefix)), None)
        if prefix is not None:
            bits = b"" if kind == _NO_BITS else cubin[offset : offset + size]
            parts.append((prefix, size, info >> 24, bits))  # the top byte of .text's: registers
    return hashlib.sha256(repr(sorted(parts)).encode()).hexdigest()[:16]


def compiler() -> str:
    """Name the installed Triton, e.g. "fbtriton 3.7.4", or "none"; with the version of ptxas if
    another than Triton's own is set, as TorchInductor does."""
    return _compiler(os.environ.get("TRITON_PTXAS_PATH", ""))


@functools.cache
def _compiler(ptxas: str) -> str:
    for name in ("fbtriton", "triton"):
        with suppress(metadata.PackageNotFoundError):
            root = Path(metadata.distribution(name).locate_file("triton"))
            others = ptxas and root not in Path(ptxas).parents
            more = f", {ptxas_version(ptxas)}" if others else ""
            return f"{name} {metadata.version(name)}{more}"
    return "none"


def ptxas_version(path: str) -> str:
    """Return the version of a ptxas: "ptxas V13.0.88"."""
    printed = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    return f"ptxas {re.search(r'V[0-9.]+', printed)[0]}"


def describe(launch: Launch) -> dict[str, Any]:
    """Describe a launch on a GPU as plain values: the kernel, its code, and all that
    `compile_again` needs.

    ValueError for a constant that is no plain value.
    """
    arguments = launch.arguments | launch.constants | launch.options
    compiled = launch.kernel.run(grid=launch.grid, warmup=True, **arguments)  # as it was launched
    source, names = compiled.src, launch.kernel.arg_names
    constants = {names[index]: value for (index,), value in source.constants.items()}
    for name, value in constants.items():
        if not isinstance(value, bool | int | float | str | tuple | NoneType):
            raise ValueError(f"{name} must be a plain value, got {value!r}")
        constants[name] = list(value) if isinstance(value, tuple) else value
    return {
        "kernel": f"{source.fn.__module__}:{source.fn.__name__}",
        "code": digest(compiled.asm["cubin"]),
        "compiler": compiler(),
        "arch": compiled.metadata.target.arch,
        "signature": dict(source.signature),
        "attributes": {names[index]: x for (index,), x in source.attrs.items() if x},
        "constants": constants,
        "options": dict(launch.options),
    }


def places(module: str) -> tuple[str, ...]:
    """Where a module may be in today's package that a record knows by its name then."""
    folder, _, name = module.rpartition(".")
    if module in STUDIES:
        return module, STUDIES[module]
    folder = folder.removesuffix(".kernels")
    return module, *(f"{folder}.{room}.{name}" for room in ("kernels", "ladder", "device"))


def is_ours(module: str) -> bool:
    """Whether a module is of the package or a study of a chapter."""
    return module.startswith("gdpa_kernels.") or module in STUDIES.values()


def _imported(module: str) -> ModuleType:
    name = next(filter(importlib.util.find_spec, places(module)), module)
    return importlib.import_module(name)


def compile_again(launch: Mapping[str, Any]) -> CompiledKernel:
    """Compile today's kernel with the options that `describe` stored.

    Constants and specializations that the kernel no longer takes are left out, and new arguments
    get their defaults: the code tells whether they matter. LookupError if there is no such kernel,
    ValueError if it takes other arguments.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    module, name = launch["kernel"].split(":")
    try:
        home = _imported(module)
        kernel = getattr(home if hasattr(home, name) else _imported(_MOVED[name]), name)
    except (ImportError, KeyError) as error:
        raise LookupError(f"kernel must be of this package, got {launch['kernel']}") from error
    positions = {argument: (i,) for i, argument in enumerate(kernel.arg_names)}
    signature = {
        argument: kind
        for argument, kind in launch["signature"].items()
        if kind != "constexpr" or argument in positions
    }
    defaults = {
        name: parameter.default
        for name, parameter in kernel.signature.parameters.items()
        if parameter.default is not parameter.empty and name not in signature
    }
    signature |= dict.fromkeys(defaults, "constexpr")
    if set(kernel.arg_names) != set(signature):
        raise ValueError(f"{name} must take {list(launch['signature'])}, got {kernel.arg_names}")
    constants = defaults | launch["constants"]
    plain = {p.name for p in kernel.params if p.do_not_specialize}
    ones = {name for name in plain & constants.keys() if constants[name] == 1}
    signature |= dict.fromkeys(ones, "i32")  # a constant where Triton specializes
    signature = {argument: signature[argument] for argument in kernel.arg_names}
    values = {
        positions[key]: tuple(value) if isinstance(value, list) else value
        for key, value in constants.items()
        if key in positions.keys() - ones
    }
    attributes = {
        positions[key]: value for key, value in launch["attributes"].items() if key not in plain
    }
    source = triton.compiler.ASTSource(kernel, signature, values, attributes)
    target = GPUTarget("cuda", launch["arch"], 32)
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in launch["options"].items()}
    return triton.compile(source, target=target, options=options)


def pretend(arch: int) -> None:
    """Make Triton compile its launches for sm_<arch>, as on a device of that number."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: arch,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("cuda", arch, 32),
        )
    )


def _patch(launch: Callable[..., None]) -> None:
    """Let `launch` stand in for that of every module of the package, on a GPU of `_SMS`."""
    for name, loaded in list(sys.modules.items()):
        if name == "gdpa_kernels" or is_ours(name):
            for function, other in (("launch", launch), ("multiprocessors", lambda device: _SMS)):
                if callable(getattr(loaded, function, None)):
                    setattr(loaded, function, other)


def _prepared(question: Mapping[str, Any]) -> tuple[Callable[[], Any], list[CompiledKernel]]:
    """Build the call of a row on two of its longest sequences, and the list that collects what it
    launches, compiled as on a GPU. Its config decides what is compiled, lengths do not."""
    pretend(question["arch"])
    operator, impl = question["operator"], question["impl"]
    module = _imported(f"gdpa_kernels.{operator}.{impl}")
    listed, saving, compiled = question["scope"] == "schedule", False, []

    def launch(kernel: Any, grid: tuple[int, ...], device: object, *args: object, **more: object):
        if bool(_LISTS.search(kernel.__name__)) is listed and not saving:
            compiled.append(kernel.run(*args, grid=grid, warmup=True, **more))

    _patch(launch)
    device = "cpu" if hasattr(module, "launch") else "meta"  # where PyTorch computes, nothing does
    values, grad_out = _arguments(question["workload"], device)
    if impl == "rotary":
        v = values["v"] if values["rotate_v"] else None
        transposed = question["direction"] == "backward"
        turn = functools.partial(module.rotary, values["q"], values["k"], v, values["rotary"])
        return functools.partial(turn, transposed=transposed), compiled
    run = getattr(module, question["direction"])
    names = inspect.signature(run).parameters
    if "batch" in names:
        batch = importlib.import_module(f"gdpa_kernels.{operator}.batch").Batch
        values = {"batch": batch(**_known(batch, values))}
    elif "activation" in names and "tuple" not in str(names["activation"].annotation):
        values["activation"] = ",".join(values["activation"])
    arguments = _known(run, values)
    if "config" in names:
        config_type = getattr(module, f"{question['direction'].capitalize()}Config", None)
        arguments["config"] = _config(config_type or module.Config, question["config"])
        if config_type is None:
            values = values | {"config": arguments["config"]}  # of forward too
    if question["direction"] == "backward":
        if "saved" in names:
            saving = True
            arguments["saved"] = module.forward(**_known(module.forward, values))[1]
            saving = False
        arguments[next(iter(names))] = grad_out
    return functools.partial(run, **arguments), compiled


def _arguments(workload: Mapping[str, Any], device: str) -> tuple[dict[str, Any], torch.Tensor]:
    """Build the arguments of a call, by name, and a gradient of the output, without data."""
    import torch

    rows_q, rows_k, head_dim = (workload[n] for n in ("max_seqlen_q", "max_seqlen_k", "head_dim"))
    dtype, shared = getattr(torch, workload["dtype"]), workload.get("shared_q", False)

    def make(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def ends(length: int) -> torch.Tensor:
        return torch.arange(3, dtype=torch.int32, device=device) * length

    heads_q, heads_k = workload["num_heads_q"], workload["num_heads_k"]
    values = {
        "q": make(rows_q if shared else 2 * rows_q, heads_q, head_dim),
        **{name: make(2 * rows_k, heads_k, head_dim) for name in "kv"},
        "scale": workload["scale"] or head_dim**-0.5,
    }
    if workload["operator"] == "block_attention":
        options = ("block_size", "rotate_v")
        turns = (make(2 * rows_q, head_dim // 2), make(2 * rows_q, head_dim // 2))
        values |= {"cu_seqlens": ends(rows_q), "rotary": turns if workload["rotary"] else None}
    else:
        options = ("max_seqlen_q", "max_seqlen_k", "output_scale", "causal", "window")
        values["cu_seqlens_q"] = None if shared else ends(rows_q)
        values["cu_seqlens_k"] = ends(rows_k)
        names = workload["activation"]
        values["activation"] = (names,) if isinstance(names, str) else tuple(names)
    values |= {name: workload[name] for name in options}
    with suppress(ImportError):  # older packages' batches take its fields
        mask = importlib.import_module("gdpa_kernels.gdpa.mask").Mask
        values["mask"] = mask(values.get("causal", False), values.get("window"))
        if workload.get("target_share"):
            values["segments"] = torch.zeros((2, 2), dtype=torch.int32, device=device)
    return values, make(2 * rows_q, heads_q, head_dim)


def _known(function: Callable, values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if k in inspect.signature(function).parameters}


def _config(kind: type, values: Mapping[str, Any]) -> Any:
    """Rebuild a config, nested ones included, from the fields that exist today."""
    kinds = typing.get_type_hints(kind)  # inherited fields too
    return kind(
        **{
            name: _config(kinds[name], value) if isinstance(value, dict) else value
            for name, value in values.items()
            if name in kinds
        }
    )


def _operations(call: Callable[[], Any]) -> list[str]:
    """List the PyTorch operations of a call: the code of a row that launches no kernel."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        names: list[str] = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            self.names.append(f"{function} {getattr(result, 'shape', '')}")
            return result

    with Seen() as seen:
        call()
    return seen.names


def answer(question: Mapping[str, Any]) -> str:
    """Return one hash of the code that a row launches, or the reason why there is none.

    question: "launches", a list of what `describe` stored; or a call, by "operator", "impl",
    "direction", "scope" ("kernel" or "schedule"), "config" (the rung's constants), "workload"
    (`Workload.to_dict` but for its name, batch, lengths and seed) and "arch" (90).
    """
    try:
        if "launches" in question:
            parts = [digest(compile_again(each).asm["cubin"]) for each in question["launches"]]
        else:
            call, compiled = _prepared(question)
            call()  # the first call also makes what PyTorch caches
            parts = [digest(each.asm["cubin"]) for each in compiled] or _operations(call)
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        reason = " ".join(str(error).split())
        return f"{type(error).__name__}: {reason[-200:]}"
    return combined(parts)


def is_code(text: str | None) -> bool:
    """Return whether an answer is a hash, not one digit repeated, and not a reason."""
    return text is not None and re.fullmatch(r"(?!(.)\1*$)[0-9a-f]{16}", text) is not None


def combined(codes: Sequence[str]) -> str:
    """Combine the codes of several launches, in order, into one hash."""
    return hashlib.sha256(" ".join(codes).encode()).hexdigest()[:16]


def _main() -> None:
    package = importlib.import_module("gdpa_kernels")
    request = json.load(sys.stdin)
    if not Path(package.__file__).is_relative_to(request["root"]):
        raise RuntimeError(f"gdpa_kernels must be in {request['root']}, got {package.__file__}")
    json.dump([answer(question) for question in request["questions"]], sys.stdout)


if __name__ == "__main__":
    _main()
