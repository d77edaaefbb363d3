"""Validates the structure of a record: syntax, schema, digest and date.

What values of the right structure cannot say is in bounds.py.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from functools import cache
from pathlib import Path
from typing import Any

from gdpa_lab.measuring import files

SCHEMA_VERSION = 1
CREATED = "%Y-%m-%dT%H:%M:%SZ"
STAMP = "%Y%m%dT%H%M%SZ"


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
    """Why `data` has not the structure of a record, None if it has."""
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
    yield from _not_json(data, "")
    if (mismatch := unlike(Path(__file__).with_name("record.schema.json"), data)) is not None:
        yield mismatch
    yield from _wrong_time(data["id"], data["created"])
    count = len(data.get("launches", ()))
    for i, row in enumerate(data["rows"]):
        if any(index >= count for index in row.get("launches") or ()):
            yield f"rows[{i}].launches must be below {count}, of launches, got {row['launches']}"
    if "digest" in data and data["digest"] != (sha256 := digest(data)):
        yield f"digest must be {sha256}, that of the contents, got {data['digest']}"


def unlike(schema: Path, data: Any) -> str | None:
    """Where `data` is not as a file with a schema has it, and how; None if it is."""
    import fastjsonschema

    try:
        _validator(schema)(data)
    except fastjsonschema.JsonSchemaValueException as error:
        comment = error.definition.get("$comment")
        reason = f"{error.name} {comment}" if comment else error.message
        received = "" if isinstance(error.value, Mapping) else f", got {error.value!r:.60}"
        return reason.removeprefix("data").lstrip(" .") + received
    return None


@cache
def _validator(schema: Path) -> Callable[[Any], Any]:
    import fastjsonschema

    return fastjsonschema.compile(json.loads(schema.read_text(encoding="utf-8")))


def _unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        repeated = sorted(key for key, count in counts.items() if count > 1)
        raise ValueError(f"every key of an object must be unique, got {repeated} twice")
    return values


def _not_json(value: Any, where: str) -> Iterator[str]:
    """Reasons why `value`, found at `where`, would not come back from a JSON file as it is."""
    items = value.items() if isinstance(value, Mapping) else ()
    if isinstance(value, list):
        items = ((f"[{i}]", item) for i, item in enumerate(value))
    elif not isinstance(value, Mapping) or not all(map(_is_plain, map(str, value))):
        kinds = "a finite number, an integer of at most 63 bits, text, or null"
        yield f"{where} must be {kinds}, got {type(value).__name__} {value!r:.60}"
    for key, item in items:
        if not isinstance(key, str):
            yield f"{where} must have text as keys, got {key!r}"
        if not _is_plain(item):
            dot = "." if where and isinstance(value, Mapping) else ""
            yield from _not_json(item, f"{where}{dot}{key}")


def _is_plain(value: Any) -> bool:
    """Whether a value is no list or object, and comes back from a JSON file."""
    if isinstance(value, str):
        return value.isascii() or value.encode(errors="ignore").decode() == value
    if isinstance(value, int):
        return value.bit_length() < 64
    return value is None or (isinstance(value, float) and math.isfinite(value))


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
