"""SARIF: what code hosts read of a report."""

import json

import pytest

from tritonemu.__main__ import main

PROGRAM = """
import torch, triton
import triton.language as tl

@triton.jit
def add(ptr, value):
    tl.store(ptr, tl.load(ptr) + value)

@triton.jit
def sum_kernel(out_ptr):
    add(out_ptr, 1.0)
    tl.store(out_ptr + 1, 0.0)

def total():
    sum_kernel[(3,)](torch.zeros(2, device="cuda"))
"""


@pytest.fixture
def report(tmp_path, monkeypatch):
    """The one run that the command writes about a program in a folder under the present one."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "kernels" / "program.py"
    path.parent.mkdir()

    def written(text: str) -> dict:
        path.write_text(text)
        main(["--schedules", "1", "--sarif", "found.sarif", "kernels/program.py:total"])
        said = json.loads((tmp_path / "found.sarif").read_text())
        (run,) = said["runs"]
        assert said["version"] == "2.1.0" and run["tool"]["driver"]["name"] == "tritonemu"
        assert {rule["id"] for rule in run["tool"]["driver"]["rules"]} == {
            result["ruleId"] for result in run["results"]
        }
        return run

    return written


def place(location: dict) -> tuple[str, int]:
    inner = location["physicalLocation"]
    return inner["artifactLocation"]["uri"], inner["region"]["startLine"]


def test_a_finding_stands_at_its_line_with_the_earlier_access(report):
    run = report(PROGRAM)
    (result,) = run["results"]
    assert (result["ruleId"], result["level"]) == ("Race", "error")
    assert "nothing orders the two" in result["message"]["text"]
    (here,), (earlier,) = result["locations"], result["relatedLocations"]
    assert place(here) == place(earlier) == ("kernels/program.py", 7)
    assert earlier["message"]["text"] == "earlier"
    (rule,) = run["tool"]["driver"]["rules"]
    assert rule["shortDescription"]["text"].startswith("Two accesses to the same memory")


def test_what_a_comment_allows_is_suppressed_and_notes_are_notifications(report):
    run = report(PROGRAM.replace("+ value)", "+ value)  # tritonemu: allow(Race) a test"))
    (result,) = run["results"]
    assert place(result["locations"][0]) == ("kernels/program.py", 7)
    assert result["suppressions"] == [{"kind": "inSource", "justification": "a test"}]
    (note,) = run["invocations"][0]["toolExecutionNotifications"]
    assert note["level"] == "note" and "store the same value" in note["message"]["text"]


def test_a_right_program_has_no_result(report):
    right = "def sum_kernel(out_ptr):\n    tl.atomic_add(out_ptr, 1.0)\n\n"
    head, _, tail = PROGRAM.partition("def sum_kernel")
    assert report(f"{head}{right}{tail[tail.index('def total') :]}")["results"] == []
