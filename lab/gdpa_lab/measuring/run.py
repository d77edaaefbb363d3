"""One run, as its record holds it: raw quantities and where they came from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from gdpa_lab.measuring.refusals import SCHEMA_VERSION
from gdpa_lab.measuring.rows import Ceiling, Error, Load, Protocol, Row, Table
from gdpa_lab.measuring.sources import Package
from gdpa_lab.measuring.workload import Workload


@cache
def renames() -> Mapping[str, str]:
    """Current paths of notebooks by the paths that older records have."""
    return json.loads(Path(__file__).with_name("renames.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Record:
    """One run. `created` is UTC, ISO 8601. `system` is the id of a file in data/systems.

    `state` has the GPU's state `before` and `after` the measurement, as `system.state` returns it.
    `workloads` holds `Workload.to_dict()` by name. `plan`: keys of the rows that the run set out to
    measure in the scopes kernel and sustained, each of which has a row; None in older records.
    """

    id: str
    created: str
    command: str
    notebook: str | None
    package: Package
    system: str
    state: Mapping[str, Mapping[str, Any]]
    protocol: Protocol
    ceilings: tuple[Ceiling, ...]
    workloads: Mapping[str, Mapping[str, Any]]
    rows: tuple[Row, ...]
    tables: Mapping[str, Table] = field(default_factory=dict)
    plan: tuple[tuple[str, ...], ...] | None = None

    def __post_init__(self) -> None:
        plan = None if self.plan is None else map(tuple, self.plan)
        for name, value in {"ceilings": self.ceilings, "rows": self.rows, "plan": plan}.items():
            object.__setattr__(self, name, None if value is None else tuple(value))

    @property
    def chapter(self) -> str | None:
        """Current path of its notebook."""
        return renames().get(self.notebook, self.notebook)

    def workload(self, name: str) -> Workload:
        """Return the workload `name` as this record measured it; LookupError if there is none."""
        if name not in self.workloads:
            raise LookupError(f"name must be one of {sorted(self.workloads)}, got {name!r}")
        if name not in self._built:
            self._built[name] = Workload.from_dict(self.workloads[name])
        return self._built[name]

    @cached_property
    def _built(self) -> dict[str, Workload]:
        return {}

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values; launches shared by several rows are stored once."""
        data = {"schema_version": SCHEMA_VERSION, **_plain(self)}
        launches: list[dict[str, Any]] = []
        for row in data["rows"]:
            for launch in row["launches"] or ():
                if launch not in launches:
                    launches.append(launch)
            row["launches"] = row["launches"] and [*map(launches.index, row["launches"])]
        return {**data, "launches": launches}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Record:
        """Rebuild a record from `to_dict`, whose structure was checked: see `record.checked`."""
        values = dict(data)
        launches = values.pop("launches", ())
        for added in ("schema_version", "digest"):
            values.pop(added, None)
        values |= {
            "package": Package(**data["package"]),
            "protocol": Protocol(**data["protocol"]),
            "ceilings": [_rebuilt(Ceiling, ceiling) for ceiling in data["ceilings"]],
            "rows": [_rebuilt(Row, row, launches) for row in data["rows"]],
            "tables": {name: Table(**table) for name, table in data["tables"].items()},
        }
        return Record(**values)


def _rebuilt(kind: type, values: Mapping[str, Any], launches: Sequence[Any] = ()) -> Any:
    """Rebuild a row or a ceiling from its JSON values; a row refers to its launches by index."""
    values, parts = dict(values), {"error": Error, "load": Load}
    for name in parts.keys() & values.keys():
        values[name] = values[name] and parts[name](**values[name])
    if values.get("launches") is not None:
        values["launches"] = tuple(launches[index] for index in values["launches"])
    return kind(**values)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
