"""Options that a project sets once, in `[tool.tritonemu]` of its pyproject.toml.

    [tool.tritonemu]
    masked = "zero"
    allow-uninitialized = true

A key is the name of an option of the command; the command line comes after it and wins. The pytest
plugin takes those that it has. The file is the nearest one above that has the table.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OPTIONS = (
    *("arch", "search", "schedules", "multiprocessors", "all-configs"),
    *("allow-uninitialized", "allow-unguarded", "compile", "masked", "strict", "bounds"),
    *("resident", "benchmarks"),
)


def flags(start: str | Path, begin: str = "--", known: Sequence[str] = OPTIONS) -> list[str]:
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
