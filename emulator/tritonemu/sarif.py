"""The report of `--json` as SARIF 2.1.0, which code hosts show beside the lines of a change.

Source: OASIS, Static Analysis Results Interchange Format (SARIF) 2.1.0.
"""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import __version__, errors
from .messages import unjudged_line, unwrapped_line

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_sarif(
    reports: Sequence[dict[str, Any]], folder: Path, unchecked: Sequence[str] = ()
) -> dict[str, Any]:
    """Format one run of the tool. Files under `folder` are named from there, others in full.

    A finding is an error, one that a comment allows a suppressed error with its reason; notes and
    what was not judged are notifications of the run; unchecked: programs that are told of there,
    too. What several reports have in common stands once.
    """
    results: list[dict[str, Any]] = []
    remarks: dict[str, None] = {}
    for report in reports:
        findings = [_finding(report["found"], folder)] if report["found"] else []
        findings += [_allowed(each, folder) for each in report.get("allowed", ())]
        results += [each for each in findings if each not in results]
        remarks |= dict.fromkeys(report.get("notes", ()))
        remarks |= {unjudged_line(**each): None for each in report.get("unjudged", ())}
        remarks |= {unwrapped_line(**each): None for each in report.get("unwrapped", ())}
    notifications = [{"level": "note", "message": {"text": text}} for text in remarks]
    for program in unchecked:
        text = f"{program} was not checked"
        notifications.append({"level": "error", "message": {"text": text}})
    kinds = sorted({result["ruleId"] for result in results})
    driver = {"name": "tritonemu", "version": __version__, "rules": [*map(_rule, kinds)]}
    run = {
        "tool": {"driver": driver},
        "invocations": [
            {"executionSuccessful": not unchecked, "toolExecutionNotifications": notifications}
        ],
        "results": results,
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(kind: str) -> dict[str, Any]:
    meaning = " ".join(inspect.getdoc(getattr(errors, kind)).split("\n\n")[0].split())
    return {"id": kind, "shortDescription": {"text": meaning}}


def _finding(finding: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Format a finding: its location is the innermost call; the other ones are related."""
    here, *others = finding["places"] or [None]
    last = [statement["calls"][-1] for statement in others]
    return {
        "ruleId": finding["kind"],
        "level": "error",
        "message": {"text": f"{finding['message']}\n{finding['replay']}"},
        "locations": [_location(folder, here["calls"][-1])] if here else [],
        "relatedLocations": [
            _location(folder, call) | {"message": {"text": statement["what"]}}
            for statement, call in zip(others, last, strict=True)
        ],
    }


def _allowed(each: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {
        "ruleId": each["kind"],
        "level": "error",
        "message": {"text": f"found {each['times']} times"},
        "locations": [_location(folder, each)],
        "suppressions": [{"kind": "inSource", "justification": each["reason"]}],
    }


def _location(folder: Path, call: dict[str, Any]) -> dict[str, Any]:
    path, folder = Path(call["file"]).resolve(), folder.resolve()
    inside = path.is_relative_to(folder)
    uri = path.relative_to(folder).as_posix() if inside else path.as_uri()
    return {
        "physicalLocation": {
            "artifactLocation": {"uri": uri},
            "region": {"startLine": call["line"]},
        }
    }
