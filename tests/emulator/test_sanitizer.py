"""What compute-sanitizer prints is understood; the tool itself needs a GPU."""

import pytest

from gdpa_kernels import ladder
from tests.emulator import sanitizer

V4 = ladder.rung("v4_warp_specialized").path


def _race(line: int) -> str:
    return (
        f"========= Error: Race reported between Write access at x+0x1070 in {V4.name}:{line}\n"
        f"=========     and Read access at kernel+0x1110 in {V4.name}:{line} [27 hazards]\n"
    )


def _summary(errors: int, warnings: int = 0) -> str:
    total = errors + warnings
    return (
        f"========= RACECHECK SUMMARY: {total} hazards displayed "
        f"({errors} errors, {warnings} warnings)\n"
    )


def _line_of_kernel() -> int:
    lines = V4.read_text().splitlines()
    return 1 + next(i for i, text in enumerate(lines) if text.startswith("def specialized_kernel("))


def test_errors_of_memcheck_count():
    text = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 3 errors\n"
    found = sanitizer.parse("v2_tma", "memcheck", text)
    assert (found.errors, found.warnings, found.elsewhere) == (3, 0, 3)


def test_a_race_at_the_line_of_the_kernel_is_the_compilers():
    text = _race(_line_of_kernel()) * 2 + _summary(2)
    found = sanitizer.parse("v4_warp_specialized", "racecheck", text)
    assert (found.errors, found.elsewhere) == (2, 0)


@pytest.mark.parametrize(
    "text", (_race(_line_of_kernel()) + _race(80) + _summary(2), _race(80) + _summary(1, 4))
)
def test_a_race_in_the_body_is_ours(text):
    assert sanitizer.parse("v4_warp_specialized", "racecheck", text).elsewhere == 1


def test_a_race_that_was_not_displayed_counts_as_ours():
    text = _race(_line_of_kernel()) + _summary(3)
    assert sanitizer.parse("v4_warp_specialized", "racecheck", text).elsewhere == 2


def test_output_without_a_summary_is_no_success():
    with pytest.raises(ValueError, match="racecheck must print a summary, got .*no such device"):
        sanitizer.parse("v4_warp_specialized", "racecheck", "Error: no such device")
