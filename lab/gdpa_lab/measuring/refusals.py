"""Validates records: syntax, schema, and contradictions between values.

Contradictions are, among others, a wrong digest, a row that counts other FLOPs or bytes than its
workload has, and one that is faster than the ceilings of the same record allow.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from functools import cache
from pathlib import Path
from typing import Any

import fastjsonschema
import jsonschema
import numpy as np

from gdpa_lab.measuring import files
from gdpa_lab.measuring.roofline import Ceilings
from gdpa_lab.measuring.rows import Ceiling, work
from gdpa_lab.measuring.workload import Workload

SCHEMA_VERSION = 1
CREATED = "%Y-%m-%dT%H:%M:%SZ"
STAMP = "%Y%m%dT%H%M%SZ"
MOST_PERCENT = 105
"""Of the roofline, at the median. Kernels and ceilings are timed minutes apart, at clocks that
differ by a few percent; the records of an H200 reach 100.6."""

_MOST_SEQUENCES = 1 << 20
_ODD = re.compile(r"\d{19}|\\u[dD][89a-fA-F]")  # integers of over 63 bits, halves of a character
_LONGEST_REASON = 300


def parse(text: bytes) -> Any:
    """The values in the text of a record; ValueError if it is not JSON."""
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON, or cut short: {error}") from error
    except RecursionError as error:
        raise ValueError("not a record: nested too deeply") from error


def digest(data: Mapping[str, Any]) -> str:
    """SHA-256 of everything but the key "digest": of its JSON with sorted keys and no spaces."""
    rest = {key: value for key, value in data.items() if key != "digest"}
    return files.digest(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())


def refusal(data: Any) -> str | None:
    """Why `data` is no valid record, None if it is one."""
    try:
        return next(_reasons(data), None)
    except RecursionError:
        return "not a record: nested too deeply"


def _reasons(data: Any) -> Iterator[str]:
    """Reasons to refuse `data`; a later one may need that there is no earlier one."""
    version = data.get("schema_version") if isinstance(data, Mapping) else None
    if type(version) is not int:
        yield "not a record: it has no schema_version"
    elif version > SCHEMA_VERSION:
        yield f"schema_version must be at most {SCHEMA_VERSION}, got the newer {version}"
    if not _is_json(data):
        yield from _not_json(data, "")
    if not _is_as_in_schema(data) and (mismatch := unlike(_validator(), data)) is not None:
        yield mismatch
    yield from _wrong_time(data["id"], data["created"])
    yield from _contradictions(data)
    yield from _wrong_work(data)
    yield from _too_fast(data)
    if "digest" in data and data["digest"] != (sha256 := digest(data)):
        yield f"digest must be {sha256}, that of the contents, got {data['digest']}"


def unlike(schema: jsonschema.protocols.Validator, data: Any) -> str | None:
    """Where `data` is not as a schema has it, and how; None if it is."""
    error = jsonschema.exceptions.best_match(schema.iter_errors(data))
    if error is None:
        return None
    where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in error.absolute_path)
    reason = error.message
    if isinstance(error.schema, Mapping):
        reason = error.schema.get("$comment", reason)
    if len(reason) > _LONGEST_REASON:
        reason = f"{reason[:_LONGEST_REASON]}..."
    return f"{where.lstrip('.') or schema.schema['title'].split()[0]}: {reason}"


def _unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    repeated = sorted(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
    if repeated:
        raise ValueError(f"every key of an object must be unique, got {repeated} twice")
    return dict(pairs)


@cache
def _schema() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("record.schema.json").read_text(encoding="utf-8"))


@cache
def _validator() -> jsonschema.protocols.Validator:
    return jsonschema.Draft202012Validator(_schema())


@cache
def _quick() -> Callable[[Any], Any]:
    # Its last draft is 7; the schema has no keyword that this draft reads in another way.
    draft = {**_schema(), "$schema": "http://json-schema.org/draft-07/schema#"}
    return fastjsonschema.compile(draft)


def _is_as_in_schema(data: Any) -> bool:
    """Whether `data` fits the schema, for a thirtieth of the time that `unlike` takes to say how
    it does not."""
    try:
        _quick()(data)
    except fastjsonschema.JsonSchemaValueException:
        return False
    return True


def _is_json(data: Any) -> bool:
    """Whether `data` comes back from a JSON file as it is, in a tenth of the time that `_not_json`
    takes; False where that must decide."""
    try:
        text = json.dumps(data, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return _ODD.search(text) is None and json.loads(text) == data


def _not_json(value: Any, where: str) -> Iterator[str]:
    """Reasons why `value`, found at `where`, would not come back from a JSON file as it is."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                yield f"{where} must have strings as keys, got {key!r}"
            yield from _not_json(key, f"a key of {where}")
            yield from _not_json(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _not_json(item, f"{where}[{i}]")
    elif isinstance(value, str):
        if not value.isascii() and value.encode(errors="ignore").decode() != value:
            yield f"{where} must be text, got {value!r}"
    elif isinstance(value, int):
        if value.bit_length() > 63:
            yield f"{where} must be an integer of at most 63 bits, got {value.bit_length()} bits"
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield f"{where} must be a finite number, got {value}"
    elif value is not None:
        yield f"{where} must be a JSON value, got {value!r} of type {type(value).__name__}"


def _wrong_time(name: str, created: str) -> Iterator[str]:
    try:
        when = datetime.strptime(created, CREATED).replace(tzinfo=timezone.utc)
    except ValueError:
        yield f"created must be a date and time, got {created!r}"
        return
    stamp = when.strftime(STAMP)
    if not name.startswith(f"{stamp}-"):
        yield f"id must begin with the time of created, {stamp}-, got {name!r}"
    if when > datetime.now(timezone.utc) + timedelta(days=1):
        yield f"created must be in the past of this machine's clock, got {created}"


def _contradictions(data: Mapping[str, Any]) -> Iterator[str]:
    """Rows, workloads and tables that do not fit each other."""
    for name, values in data["workloads"].items():
        try:
            workload = Workload.from_dict(values)
        except (TypeError, ValueError) as error:
            yield f"workloads.{name}: {error}"
        else:
            if workload.name != name:
                yield f"workloads.{name}: name must be its key, got {workload.name!r}"
    seen: dict[tuple[str, ...], int] = {}
    for i, row in enumerate(data["rows"]):
        if row["workload"] not in data["workloads"]:
            known = sorted(data["workloads"])
            yield f"rows[{i}].workload must be one of {known}, got {row['workload']!r}"
        count = len(data.get("launches", ()))
        if any(index >= count for index in row.get("launches") or ()):
            yield f"rows[{i}].launches must be below {count}, of launches, got {row['launches']}"
        error = row["error"] or {"passed": False}
        if error["passed"] and (error["max_abs"] is None or error["max_abs"] > error["budget"]):
            yield (
                f"rows[{i}].error: max_abs must be at most the budget {error['budget']} to pass, "
                f"got {error['max_abs']}"
            )
        key = tuple(row[name] for name in ("workload", "direction", "impl", "scope", "variant"))
        if key in seen:
            yield f"rows[{i}] must differ from rows[{seen[key]}], got {'/'.join(key)} twice"
        seen[key] = i
    for key in map(tuple, data.get("plan") or ()):
        if key not in seen:
            yield f"rows must hold {'/'.join(key)}, which the run planned, if only its failure"
    for name, table in data["tables"].items():
        columns = len(table["columns"])
        for i, row in enumerate(table["rows"]):
            if len(row) != columns:
                yield f"tables.{name}.rows[{i}] must have {columns} values, got {len(row)}"


def _wrong_work(data: Mapping[str, Any]) -> Iterator[str]:
    """Rows whose operator, FLOPs or bytes are not those of their workload."""
    workloads = {name: Workload.from_dict(values) for name, values in data["workloads"].items()}
    for i, row in enumerate(data["rows"]):
        workload = workloads[row["workload"]]
        if workload.batch > _MOST_SEQUENCES:  # its lengths are drawn one by one
            yield f"workloads.{workload.name}.batch must be at most {_MOST_SEQUENCES}"
        kind = {name: row[name] for name in ("scope", "variant", "math")}
        try:
            expected = work(workload, row["direction"], **kind)
        except (ArithmeticError, ValueError) as error:
            yield f"rows[{i}]: the work of {workload.name!r} cannot be counted: {error}"
            continue
        for name, value in {"operator": workload.operator, **expected}.items():
            if row[name] != value:
                yield f"rows[{i}].{name} must be {value!r}, its workload's, got {row[name]!r}"


def _too_fast(data: Mapping[str, Any]) -> Iterator[str]:
    """Rows above the roofline of their own record."""
    measured = [Ceiling(**ceiling) for ceiling in data["ceilings"]]
    scopes = {c.scope for c in measured} | {"kernel"}
    by_scope = {scope: Ceilings.measured(measured, scope) for scope in scopes}
    for i, row in enumerate(data["rows"]):
        limits = by_scope.get("sustained" if row["scope"] == "sustained" else "kernel")
        if limits is None or not row["samples_us"] or not row["flops"]:
            continue
        floor = limits.floor_us(row["flops"], row["bytes_read"], row["bytes_written"])
        percent = 100 * floor / float(np.median(row["samples_us"]))
        if percent > MOST_PERCENT:
            yield (
                f"rows[{i}].samples_us must be at most {MOST_PERCENT} % of the roofline that the "
                f"ceilings make, got {percent:.0f} %"
            )
