"""The pytest plugin: tests that need a GPU, on a CPU."""

import shlex

import pytest

import tritonemu.pytest_plugin  # noqa: F401 (pytester forgets what is imported during its runs)

pytest_plugins = "pytester"

TESTS = """
import pytest
import torch
import triton
import triton.language as tl

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@triton.jit
def sum_kernel(x_ptr, sum_ptr, ATOMIC: tl.constexpr, SORT: tl.constexpr = False):
    part = tl.sum(tl.load(x_ptr + tl.program_id(0) * 32 + tl.arange(0, 32)))
    if SORT:
        part = tl.inline_asm_elementwise("unknown $0;", "=r,r", [part], tl.float32, True, 1)
    if ATOMIC:
        tl.atomic_add(sum_ptr, part)
    else:
        tl.store(sum_ptr, tl.load(sum_ptr) + part)


def total(**options):
    x, total = torch.ones(128, device="cuda"), torch.zeros(1, device="cuda")
    sum_kernel[(4,)](x, total, **options)
    return total.item()


@needs_gpu
@pytest.mark.parametrize("atomic", (True, False))
def test_sum(atomic):
    assert total(ATOMIC=atomic) == 128


@needs_gpu
def test_unsupported():
    total(ATOMIC=True, SORT=True)


def test_fixture(emulated):
    assert total(ATOMIC=True) == 128
    assert [report.programs for report in emulated] == [4] and torch.cuda.is_available()
"""


@pytest.fixture
def run(pytester):
    pytester.makepyfile(test_on_gpu=TESTS)
    return lambda *options: pytester.runpytest_inprocess(
        "-p", "tritonemu.pytest_plugin", "-p", "no:cacheprovider", "-v", *options
    )


def test_options_of_pytest_and_comments_that_allow(run, pytester):
    path = pytester.path / "test_on_gpu.py"
    racy = "tl.store(sum_ptr, tl.load(sum_ptr) + part)"
    path.write_text(path.read_text().replace(racy, f"{racy}  # tritonemu: allow(Race) a test"))
    options = "--emulated-schedules 0 --emulated-resident 2"
    pytester.makepyprojecttoml(f"[tool.pytest.ini_options]\naddopts = '{options}'\n")
    result = run("--fake-gpu", "-k", "sum or fixture")
    result.assert_outcomes(passed=3)
    allowed = r"allowed: Race at .*:17, found \d+ times: a test"
    first = r" \(first in test_on_gpu.py::test_sum\[modelled-False\]\)"
    result.stdout.re_match_lines([allowed + first])
    run("--fake-gpu", "-k", "fixture", "--emulated-schedules", "3").assert_outcomes(
        passed=4, deselected=3 * 4
    )


def test_without_the_option_the_fixture_alone_emulates(run):
    result = run("--emulated-schedules", "1")
    result.assert_outcomes(passed=2, skipped=3)
    result.stdout.fnmatch_lines(["*test_fixture?modelled? PASSED*", "*test_fixture?0? PASSED*"])


def test_every_test_is_emulated(run):
    result = run("--fake-gpu", "--emulated-schedules", "1")
    result.assert_outcomes(passed=4, failed=4)
    result.stdout.fnmatch_lines(
        [
            "*test_sum?modelled-True? PASSED*",
            "*test_sum?0-False? FAILED*",
            ">*tl.store(sum_ptr, tl.load(sum_ptr) + part)",
            "E*Race: *nothing orders the two*",
            "E*Unsupported: *",
        ]
    )
    assert "emulator/tritonemu/" not in result.stdout.str()


MASKED = """
import torch
import triton
import triton.language as tl


@triton.jit
def masked_kernel(x, y):
    lanes = tl.arange(0, 16)
    tl.store(x + lanes, tl.load(x + lanes, mask=lanes < 5))


@triton.jit
def same_kernel(x):
    tl.store(x, 1.0)


def test_masked():
    masked_kernel[(1,)](torch.zeros(16, device="cuda"), 1)


def test_same():
    same_kernel[(2,)](torch.zeros(1, device="cuda"))
"""


def test_messages_name_flags_of_pytest_and_the_test(pytester):
    pytester.makepyfile(test_masked=MASKED)
    options = ("-p", "tritonemu.pytest_plugin", "-p", "no:cacheprovider", "--fake-gpu")
    result = pytester.runpytest_inprocess(*options, "--emulated-schedules", "0")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*allow it with --emulated-masked zero*",
            "*again with pytest -p tritonemu.pytest_plugin --fake-gpu --emulated-schedules 0 "
            "'test_masked.py::test_masked[[]modelled]'*",
            "note: programs (0, 0, 0), *--emulated-strict* (first in *::test_same?modelled?)",
        ]
    )
    strict = ("--emulated-strict", "--emulated-masked", "zero", "--emulated-schedules", "0")
    result = pytester.runpytest_inprocess(*options, *strict)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["E*Race: *nothing orders the two*"])


def test_a_finding_names_the_command_that_repeats_it(pytester, monkeypatch):
    """The options reach it from another folder than that of the settings, too."""
    folder = pytester.mkdir("a folder")
    (folder / "test_masked.py").write_text(MASKED)
    pytester.makepyprojecttoml("")
    monkeypatch.chdir(folder)
    options = ("-p", "tritonemu.pytest_plugin", "-p", "no:cacheprovider", "--fake-gpu")
    strict = ("--emulated-strict", "--emulated-masked=zero", "--emulated-schedules=9")
    result = pytester.runpytest_inprocess(*options, *strict, "-k", "same")
    result.assert_outcomes(failed=10, deselected=10)
    replays = (line for line in result.outlines if "again with pytest" in line and "[8]" in line)
    name, *arguments = shlex.split(next(replays).partition("again with ")[2])
    assert name == "pytest" and "--emulated-strict" in arguments
    again = pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)
    again.assert_outcomes(failed=1)
    again.stdout.fnmatch_lines(["E*Race: *nothing orders the two*"])
