"""Options that decide what a launch does and what is judged: of the command, pytest and projects.

A project sets them once, in `[tool.tritonemu]` of its pyproject.toml:

    [tool.tritonemu]
    masked = "zero"
    allow-uninitialized = true

A key is the name of an option of the command; the command line comes after it and wins. The pytest
plugin takes those that it has. The file is the nearest one above that has the table.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .execution import BOUNDS
from .gpu import ARCHITECTURES, FAKE_MULTIPROCESSORS
from .undefined import MODES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def positive(text: str) -> int:
    """Parse an integer of at least 1; ArgumentTypeError for others."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


_FLAG: dict[str, Any] = {"action": "store_true", "default": False}
JUDGED: dict[str, dict[str, Any]] = {
    "arch": {"choices": ARCHITECTURES, "default": "sm_90", "help": "of the GPU (default sm_90)"},
    "multiprocessors": {
        "type": positive, "metavar": "N", "default": FAKE_MULTIPROCESSORS,
        "help": f"of that GPU, for persistent programs (default {FAKE_MULTIPROCESSORS})",
    },
    "all-configs": _FLAG | {
        "help": "run every configuration of an autotuned kernel, not the first that fits",
    },
    "allow-uninitialized": _FLAG | {"help": "reads of unwritten memory yield NaN"},
    "allow-unguarded": _FLAG | {"help": "warps of a program need no barrier of their own"},
    "compile": _FLAG | {"help": "compile each launch, too, and say what is refused"},
    "masked": {
        "choices": MODES, "default": "nan", "help": "lanes off without `other` (default nan)",
    },
    "strict": _FLAG | {"help": "stores race that change no bit, too"},
    "bounds": {
        "choices": BOUNDS, "default": "tensor",
        "help": "or the memory around it, too, where a tensor is a part (default tensor)",
    },
    "resident": {
        "type": positive, "metavar": "N", "default": 1, "help": "clusters that run together",
    },
}  # fmt: skip
"""Options of `enabled` by their names, as `argparse` and pytest define them."""

OPTIONS = (*JUDGED, "search", "schedules")


def _values(options: argparse.Namespace, begin: str) -> dict[str, Any]:
    names = {name: f"{begin}{name}".removeprefix("--").replace("-", "_") for name in JUDGED}
    return {name: getattr(options, attribute) for name, attribute in names.items()}


def keywords(options: argparse.Namespace, begin: str = "--") -> dict[str, Any]:
    """Collect the keywords of `enabled` from parsed options, whose flags have this prefix."""
    keywords = {}
    for name, value in _values(options, begin).items():
        if name.startswith("allow-"):
            keywords[name.removeprefix("allow-")] = "allow" if value else "error"
        else:
            keywords[name.replace("-", "_")] = value
    return keywords


def repeated(
    options: argparse.Namespace, begin: str = "--", always: Iterable[str] = ()
) -> list[str]:
    """List the flags with this prefix that are not what they are by default, and those of
    `always`."""
    words = []
    for name, value in _values(options, begin).items():
        if name in always or value != JUDGED[name]["default"]:
            words += [f"{begin}{name}"] if value is True else [f"{begin}{name}", str(value)]
    return words


def flags(start: str | Path, begin: str = "--", known: Iterable[str] = OPTIONS) -> list[str]:
    """Read the settings of this folder as flags with this prefix, without those not in `known`.

    Raises ValueError if the file is no TOML, the table none, or a key or a value not possible.
    """
    path, table = _table(Path(start).resolve())
    if not isinstance(table, dict):
        raise ValueError(f"tool.tritonemu of {path} must be a table, got {table!r}")
    arguments: list[str] = []
    for key, value in table.items():
        name, where = key.replace("_", "-"), f"in [tool.tritonemu] of {path}"
        if name not in OPTIONS:
            raise ValueError(f"keys {where} must be among {', '.join(OPTIONS)}, got {key!r}")
        if not isinstance(value, str | int):
            raise ValueError(f"{key} {where} must be a string, integer or bool, got {value!r}")
        if name in known and value is not False:
            arguments.append(f"{begin}{name}" if value is True else f"{begin}{name}={value}")
    return arguments


def _table(folder: Path) -> tuple[Path | None, object]:
    for path in (each / "pyproject.toml" for each in (folder, *folder.parents)):
        if not path.is_file():
            continue
        try:
            tools = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {})
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} must be TOML: {error}") from None
        if "tritonemu" in tools:
            return path, tools["tritonemu"]
    return None, {}
