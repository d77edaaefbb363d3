"""Triton's own front end, or all of its compiler, on a launch, without a GPU."""

import contextlib
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import ir, make_backend
from triton.compiler.errors import CompilationError
from triton.runtime.jit import JITFunction, mangle_type

from .errors import InvalidKernel, ResourceLimit
from .launch import SHARED_BYTES, TENSOR_COLUMNS


def _source(kernel: JITFunction, arguments: Mapping[str, Any]) -> ASTSource:
    signature, attributes = {}, {}
    for index, p in enumerate(kernel.params):
        if p.is_constexpr:
            signature[p.name] = "constexpr"
            continue
        kind = p.annotation_type or mangle_type(arguments[p.name], not p.do_not_specialize)
        signature[p.name] = kind
        if isinstance(kind, str) and kind.startswith("*"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    constants = {name: arguments[name] for name, kind in signature.items() if kind == "constexpr"}
    if not getattr(kernel, "is_gluon", bool)():
        return ASTSource(kernel, signature, constants, attributes)
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource(kernel, signature, constants, attributes)


def target_of(arch: str) -> GPUTarget:
    return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)


def ask_front_end(
    kernel: JITFunction, arch: str, arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Raise InvalidKernel with Triton's words if its front end refuses the kernel."""
    target = target_of(arch)
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    parsed = backend.parse_options(dict(options))
    functions, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
    try:
        _source(kernel, arguments).make_ir(target, parsed, functions, modules, context)
    except (CompilationError, RuntimeError) as error:  # of its parser: the IR does not verify
        raise InvalidKernel(f"Triton refuses this kernel: {error}", ("", 0)) from error


def compile_launch(
    kernel: JITFunction, arch: str, arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Compile a launch, with pointers aligned to 16 bytes.

    Raises InvalidKernel if the compiler refuses it, and ResourceLimit if it needs more shared or
    tensor memory than a CTA has. Warns if the compiler drops the `registers=` of tasks.
    """
    with _diagnostics() as diagnostics:
        try:
            compiled = triton.compile(
                _source(kernel, arguments), target=target_of(arch), options=dict(options)
            )
        except Exception as error:
            lines = [line.strip() for line in f"{error}\n{diagnostics()}".splitlines()]
            known = [line for line in lines if re.search(r"\berror\b", line, re.IGNORECASE)]
            reason = next(iter(known or filter(None, reversed(lines))), type(error).__name__)
            raise InvalidKernel(f"the compiler refuses this kernel: {reason}", ("", 0)) from error
    columns = getattr(compiled.metadata, "tmem_size", 0) or 0
    for needs, has, what in (
        (
            compiled.metadata.shared,
            SHARED_BYTES,
            f"shared memory has {SHARED_BYTES} bytes per CTA, and",
        ),
        (columns, TENSOR_COLUMNS, f"tensor memory has {TENSOR_COLUMNS} columns, and"),
    ):
        if needs > has:
            raise ResourceLimit(f"{what} the compiled kernel needs {needs}", ("", 0))
    registers = re.search(r"requestedRegisters = array<i32: (\d+)", compiled.asm.get("ttgir", ""))
    if registers and "setmaxnreg" not in compiled.asm["ptx"]:
        warnings.warn(
            f"the compiler drops the registers= of the tasks of {kernel.fn.__name__}",
            UserWarning,
            stacklevel=2,
        )


def asm_of(
    kernel: JITFunction, arch: str, arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Compile a launch to Triton's `asm`: "ttgir", "ptx", ...; empty if it is refused."""
    source = _source(kernel, arguments)
    with _diagnostics():
        try:
            return triton.compile(source, target=target_of(arch), options=dict(options)).asm
        except Exception:  # `compile_launch` tells of these
            return {}


@contextlib.contextmanager
def _diagnostics() -> Iterator[Any]:
    """Capture the compiler's standard error output as text."""
    with tempfile.TemporaryFile() as file:

        def text() -> str:
            file.seek(0)
            return file.read().decode(errors="replace")

        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield text
        finally:
            os.dup2(saved, 2)
            os.close(saved)
