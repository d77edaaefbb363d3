"""The compiler of the kernels: whether the Triton that Python imports is whole, and its cure.

`fbtriton`, whose Triton has TLX, and `triton` install the same files, and pip does not notice: what
came last wins, and TLX's Python files may stay behind without the library that they call.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import warnings
from pathlib import Path
from types import ModuleType

from gdpa_kernels.calling import private

FBTRITON = "fbtriton==3.7.4"
_CALLED = re.compile(r"\bbuilder\.((?:create|make)_\w+)\(")


class CompilerWarning(UserWarning):
    """`impl="auto"` passes over an implementation that may be faster, since the Triton of this
    environment cannot compile it. It comes once in a process."""


def pip(arguments: str) -> str:
    """A pip command for this Python, whose path is relative inside the working directory."""
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    return f"{python} -m pip install {arguments}"


def repair() -> str | None:
    """The command that puts fbtriton's files back; None where it has no wheel."""
    if not sys.platform.startswith("linux"):
        return None
    return pip(f"--force-reinstall --no-deps {FBTRITON}")


def problem(tlx: bool) -> str | None:
    """What is wrong with Triton for kernels that are written in it alone, or in TLX too; or None.
    Asked once in a process, which keeps the library of Triton that it has loaded."""
    triton = _triton()
    if isinstance(triton, Exception):
        return f"Triton cannot be imported ({text_of(triton)})"
    return tlx_problem() if tlx else None


def warn(impl: str, reason: str) -> None:
    """Warn, the first time in a process, that "auto" passes over `impl` for this reason."""
    global _has_warned
    if _has_warned:
        return
    _has_warned = True
    cure = repair()
    warnings.warn(
        f'impl="auto" takes a slower implementation than {impl!r}: {reason}. '
        + (f"To repair it: {cure}; then start Python again. " if cure else "")
        + "`python -m gdpa_kernels` lists what runs here.",
        CompilerWarning,
        stacklevel=2,
    )


_has_warned = False


@functools.cache
def _triton() -> ModuleType | Exception:
    try:
        triton = importlib.import_module("triton")
        importlib.import_module("triton.language")
        return triton
    except Exception as error:
        return error


@functools.cache
def tlx_problem() -> str | None:
    """What is wrong with TLX, or None."""
    try:
        tlx = importlib.import_module("triton.language.extra.tlx")
        builder = private.triton_builder()
    except Exception as error:
        return f"TLX, which fbtriton has, cannot be imported ({text_of(error)})"
    called: set[str] = set()
    for folder in getattr(tlx, "__path__", ()):
        for path in Path(folder).glob("*.py"):
            called.update(_CALLED.findall(path.read_text(encoding="utf-8")))
    missing = sorted(name for name in called if not hasattr(builder, name))
    if missing:
        return (
            f"TLX is not fbtriton's, or triton {_triton().__version__} came over fbtriton's files: "
            f"libtriton lacks {len(missing)} of the {len(called)} operations that TLX calls, "
            f"{missing[0]} for one"
        )
    return None


def text_of(error: Exception) -> str:
    """Its type and message."""
    return f"{type(error).__name__}: {error}"
