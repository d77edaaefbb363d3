"""Triton's own front end, or all of its compiler, on a launch, without a GPU.

What is compiled here is kept in Triton's cache under keys of its own: Triton's do not name the
files of the source, and the lines of a compiled kernel do (triton-lang/triton#11817).
"""

import contextlib
import inspect
import io
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import triton
from triton._C.libtriton import nvidia
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import ir, make_backend
from triton.compiler.errors import CompilationError
from triton.runtime.jit import JITFunction, create_function_from_signature

from .errors import InvalidKernel, Location, ResourceLimit
from .launch import SHARED_BYTES, TENSOR_COLUMNS

_PTX_VERSION = 80  # of the allocator alone, whose result does not depend on it


def signature_of(kernel: JITFunction) -> inspect.Signature:
    """Build the signature of the kernel's parameters; its Python function's may differ."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature(
        [inspect.Parameter(p.name, kind, default=p.default) for p in kernel.params]
    )


def _source(kernel: JITFunction, backend: BaseBackend, arguments: Mapping[str, Any]) -> ASTSource:
    """Specialize a kernel for these arguments, as Triton does at a launch."""
    bind = create_function_from_signature(signature_of(kernel), kernel.params, backend)
    bound, specialization, _ = bind(**arguments)
    packed = kernel._pack_args(backend, {}, bound, specialization, {})
    _, signature, constants, attributes = packed
    kind = ASTSource
    if getattr(kernel, "is_gluon", bool)():
        from triton.experimental.gluon._runtime import GluonASTSource as kind
    source = kind(kernel, signature, constants, attributes)
    source.hash = lambda: f"{kind.hash(source)}-{'-'.join(_files(kernel, *constants.values()))}"
    return source


def _files(*values: Any) -> list[str]:
    """List the names, without folders, of the files of these functions and of what they call."""
    todo, seen = list(values), {}
    while todo:
        value = todo.pop()
        if not isinstance(value, JITFunction) or id(value) in seen:
            continue
        seen[id(value)] = os.path.basename(value.fn.__code__.co_filename)
        names = inspect.getclosurevars(value.fn)
        for each in [*names.globals.values(), *names.nonlocals.values()]:
            if isinstance(each, ModuleType) and not each.__name__.startswith("triton."):
                todo += [getattr(each, name, None) for name in names.unbound]
            todo += vars(each).values() if inspect.isclass(each) else [each]
    return sorted(set(seen.values()))


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
    with _refusals(kernel, (CompilationError, RuntimeError)):  # of its parser: invalid IR
        _source(kernel, backend, arguments).make_ir(target, parsed, functions, modules, context)


def _compiled(
    kernel: JITFunction, arch: str, arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> Any:
    with _refusals(kernel, Exception):
        target = target_of(arch)
        source = _source(kernel, make_backend(target), arguments)
        return triton.compile(source, target=target, options=dict(options))


def asm_of(
    kernel: JITFunction, arch: str, arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Compile a launch to Triton's `asm`: "ttgir", "ptx", ...; raises InvalidKernel if Triton
    refuses it."""
    return _compiled(kernel, arch, arguments, options).asm


def allocated(asm: Mapping[str, Any], arch: str) -> str:
    """Let the compiler place the shared memory of a compiled Gluon kernel; returns the module."""
    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(asm["ttgir"])
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    passes = ir.pass_manager(context)
    capability = target_of(arch).arch
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(passes, capability, _PTX_VERSION)
    passes.run(module, "allocate")
    return str(module)


def compile_launch(
    kernel: JITFunction, arch: str, arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Compile a launch.

    Raises InvalidKernel if Triton refuses it, and ResourceLimit if it needs more shared or tensor
    memory than a CTA has. Warns if the compiler drops the `registers=` of tasks.
    """
    compiled = _compiled(kernel, arch, arguments, options)
    columns = getattr(compiled.metadata, "tmem_size", 0) or 0
    for needs, size, memory, unit in (
        (compiled.metadata.shared, SHARED_BYTES, "shared", "bytes per CTA"),
        (columns, TENSOR_COLUMNS, "tensor", "columns"),
    ):
        if needs > size:
            limit = f"{memory} memory has {size} {unit}, and the compiled kernel needs {needs}"
            raise ResourceLimit(limit, ("", 0))
    asked = "requestedRegisters = array<i32: " in compiled.asm.get("ttgir", "")
    if asked and "setmaxnreg" not in compiled.asm["ptx"]:
        warnings.warn(
            f"the compiler drops the registers= of the tasks of {kernel.fn.__name__}",
            UserWarning,
            stacklevel=2,
        )


@contextlib.contextmanager
def _refusals(kernel: JITFunction, kinds: Any) -> Iterator[None]:
    """Turn errors of the compiler into InvalidKernel, with the reason alone of what it prints."""
    with tempfile.TemporaryFile() as file, contextlib.redirect_stdout(io.StringIO()):
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        except kinds as error:
            file.seek(0)
            reason = _reason(error, file.read().decode(errors="replace"))
            message = f"Triton refuses this kernel: {reason}"
            raise InvalidKernel(message, _location(kernel, error)) from error
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def _reason(error: BaseException, printed: str) -> str:
    """Find the reason in an error of the compiler and what it printed."""
    while isinstance(error.__cause__, CompilationError):
        error = error.__cause__
    text = error.error_message if isinstance(error, CompilationError) else f"{error}\n{printed}"
    text = text or str(error.__cause__ or error)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for form in (r"ptxas\S* .*(?:error|fatal)", r"(?i)error\b"):
        if known := [line for line in lines if re.search(form, line)]:
            return known[0]
    return next(filter(None, lines), type(error).__name__)


def _location(kernel: JITFunction, error: BaseException) -> Location:
    """Locate the statement of the kernel that its front end refuses; line 0 for other errors."""
    line = getattr(getattr(error, "node", None), "lineno", 0)
    if not line or error.src != kernel.src:
        return "", 0
    starts = (text.lstrip().startswith("def ") for text in kernel.raw_src)
    first = kernel.starting_line_number + [*starts].index(True)
    return kernel.fn.__code__.co_filename, first + line - 1
