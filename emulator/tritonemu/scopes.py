"""Variables in loops and branches, where the compiler demands more of them than Python does.

A loop or an `if` on runtime values becomes one operation, whatever it does at run time. So a
variable from before it keeps its type (dtype and shape; a constant is its own type), and one that
the loop, or one branch, assigns first ends with it. Loops over `tl.static_range` are unrolled, and
an `if` on constants is decided: they have no such rules.

A variable that both branches assign first gets one type from them. Only one of them runs here, so
it is Triton's own front end that is asked whether the types agree.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import ir, make_backend
from triton.compiler.errors import CompilationError
from triton.runtime.jit import JITFunction, mangle_type

from .aggregates import Aggregate
from .errors import InvalidKernel
from .launch import current
from .tile import Tile

# In the place of what a task reads, and the kernel around it has not assigned before.
UNBOUND = object()


class Scope:
    """A loop or an `if` on runtime values, while it runs.

    names: what it assigns. both: what both branches assign. variables: those that exist before.
    """

    def __init__(self, names: Iterable[str], both: Iterable[str], variables: dict[str, Any]):
        found = ((name, variables.get(name, UNBOUND)) for name in names)
        self.before = {name: _type(value) for name, value in found if value is not UNBOUND}
        self.ending = [name for name in names if name not in self.before and name not in both]
        current().undecided |= any(name not in self.before for name in both)

    def leave(self, what: str, variables: dict[str, Any]) -> list[str]:
        """After a turn or a branch: the variables that end. InvalidKernel if a type changes."""
        for name, before in self.before.items():
            after = _type(variables[name])
            if after != before and (what, before) != ("if", "None"):
                raise InvalidKernel(
                    f"{name} must keep its type in this {what}, which is on runtime values: "
                    f"{before} before, {after} after"
                )
        return [name for name in self.ending if name in variables]


def _type(value: Any) -> str:
    """A value's type, as messages name it."""
    if isinstance(value, Tile):
        return repr(value)
    if isinstance(value, Aggregate):
        value = tuple(getattr(value, field) for field in value.fields)
    if isinstance(value, tuple):
        return f"({', '.join(map(_type, value))})"
    constant = value is None or isinstance(value, (bool, int, float, str))
    return repr(value) if constant else type(value).__name__


def ask_front_end(
    kernel: JITFunction, arch: str, arguments: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Raise InvalidKernel with Triton's words if its front end refuses the kernel."""
    signature = {}
    for p in kernel.params:
        kind = p.annotation_type or mangle_type(arguments[p.name], not p.do_not_specialize)
        signature[p.name] = "constexpr" if p.is_constexpr else kind
    constants = {name: arguments[name] for name, kind in signature.items() if kind == "constexpr"}
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    parsed = backend.parse_options(dict(options))
    functions, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
    try:
        source = ASTSource(kernel, signature, constants)
        source.make_ir(target, parsed, functions, modules, context)
    except CompilationError as error:
        raise InvalidKernel(f"Triton refuses this kernel: {error}", ("", 0)) from error
