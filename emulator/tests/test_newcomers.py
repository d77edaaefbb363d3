"""Verdicts of one run on the mistakes of `newcomers`; docs/limits.md names those it misses."""

from pathlib import Path

import pytest
import torch

from emulator.tests.newcomers import CASES
from tritonemu import EmulatorError, enabled, fake_gpu

# Well defined, and wrong: only the program's own assertion fails.
MISSED = {"variance_of_padding", "view_taken_for_contiguous"}


def told(name: str, wrong: bool) -> str:
    """The finding or the note, "" for neither, and "assertion" if only that fails."""
    torch.manual_seed(0)
    with fake_gpu(), enabled() as reports:
        try:
            CASES[name](wrong)
        except EmulatorError as error:
            return type(error).__name__
        except AssertionError:
            return "assertion"
    return "note" if any(report.notes for report in reports) else ""


@pytest.mark.parametrize("name", CASES)
def test_one_run(name):
    assert told(name, False) == ""
    assert (told(name, True) in ("", "assertion")) == (name in MISSED)


def test_most_are_found():
    assert len(CASES) >= 40 and len(MISSED) <= 0.05 * len(CASES)
    limits = (Path(__file__).parents[1] / "docs" / "limits.md").read_text()
    assert all(f"`{name}`" in limits for name in MISSED)
    assert f"Of {len(CASES)} mistakes" in limits
