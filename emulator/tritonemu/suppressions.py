"""Findings that a comment in the kernel allows: `# tritonemu: allow(Race) and why it is right`.

It stands on the line that the finding or its earlier access names, or alone on the line above. The
kernel then goes on as if nothing had been found, and the report counts it with its reason.
"""

import linecache
import re

from .errors import EmulatorError, InvalidKernel, Location
from .launch import Report

# Findings after which a kernel can go on.
KINDS = ("Race", "MissingFence", "UninitializedRead", "UndefinedValue")
_COMMENT = re.compile(r"#\s*tritonemu:(.*)")
_ALLOW = re.compile(r"\s*allow\(([\w\s,]*)\)[\s:]*(.*)")


def parse(line: str) -> tuple[tuple[str, ...], str] | None:
    """Parse the kinds that a line of source allows, and why; None without such a comment.

    Raises ValueError if it is not of this form, names another kind, or gives no reason.
    """
    comment = _COMMENT.search(line)
    if comment is None:
        return None
    match = _ALLOW.fullmatch(comment[1].rstrip())
    kinds = tuple(re.findall(r"\w+", match[1])) if match else ()
    if not kinds or not set(kinds) <= set(KINDS) or not match[2]:
        raise ValueError(
            f"a comment for tritonemu must read '# tritonemu: allow(KIND) REASON', KIND among "
            f"{', '.join(KINDS)}, got {comment[0].rstrip()!r}"
        )
    return kinds, match[2]


def check(source: str, file: str, first: int) -> None:
    """Raise InvalidKernel if a comment of this source, from line `first` on, is wrong."""
    for number, line in enumerate(source.splitlines(), first):
        try:
            parse(line)
        except ValueError as error:
            raise InvalidKernel(str(error), (file, number)) from None


def judge(error: EmulatorError, report: Report) -> None:
    """Raise a finding, or count it in the report if its line, or the earlier one, allows it."""
    kind = type(error).__name__
    for location in (error.location, getattr(error, "other", None)):
        reason = _reason(kind, location) if location else None
        if reason is not None:
            key = kind, *location[:2], reason
            report.allowed[key] = report.allowed.get(key, 0) + 1
            return
    raise error


def _reason(kind: str, location: Location) -> str | None:
    """Return why findings of this kind are allowed at a line; None if they are not."""
    file, line = location[:2]
    above = linecache.getline(file, line - 1).strip()
    for text in (linecache.getline(file, line), above if above.startswith("#") else ""):
        try:
            kinds, reason = parse(text) or ((), "")
        except ValueError:  # outside of the kernel, where memory is made; `check` tells of others
            continue
        if kind in kinds:
            return reason
    return None
