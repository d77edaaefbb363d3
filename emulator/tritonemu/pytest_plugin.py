"""Turns tests that need a GPU into race tests on a CPU: `pytest -p tritonemu.pytest_plugin`.

With `--fake-gpu` every test runs as if there were a GPU, with its kernels in the emulator: under
the modelled schedule and `--emulated-schedules` random ones, each a test of its own, as in
`test_add[modelled]`. Without it only tests that ask for the fixture `emulated` do; its value is the
list of reports of the kernels launched so far. A finding is an exception in the launch, so the test
fails with it; what is launched in fixtures of modules and sessions runs as modelled.
"""

import contextlib
import sys

import pytest

from . import Unsupported, enabled, fake_gpu, settings
from .errors import PYTEST, flags
from .execution import BOUNDS
from .gpu import ARCHITECTURES
from .messages import allowed, tested, told
from .undefined import MODES

_NOTES = pytest.StashKey()  # of all launches, and the first test of each
_SETTINGS = (
    *("arch", "schedules", "all-configs", "masked", "strict", "bounds"),
    *("allow-uninitialized", "allow-unguarded"),
)
_ALLOWED = pytest.StashKey()  # how many findings of all launches comments allow
_TESTS = pytest.StashKey()  # of each of those the first test


def pytest_addoption(parser):
    group = parser.getgroup("tritonemu", "Triton kernels in the emulator")
    add = group.addoption
    add("--fake-gpu", action="store_true", help="run all tests without a GPU")
    add("--emulated-arch", choices=ARCHITECTURES, default="sm_90")
    several = "random schedules for each test (default 2)"
    add("--emulated-schedules", type=int, default=2, metavar="N", help=several)
    every = "run every configuration of autotuned kernels, not the first that fits"
    add("--emulated-all-configs", action="store_true", help=every)
    add("--emulated-masked", choices=MODES, default="nan", help="lanes off without `other`")
    values = "stores race that change no bit, too"
    add("--emulated-strict", action="store_true", help=values)
    around = "or the memory around tensors, too"
    add("--emulated-bounds", choices=BOUNDS, default="tensor", help=around)
    add("--emulated-allow-uninitialized", action="store_true", help="let pass reads of such memory")
    warps = "warps of a program need no barrier of their own"
    add("--emulated-allow-unguarded", action="store_true", help=warps)
    unknown = "skip tests whose kernels use an operation that the emulator does not know"
    add("--skip-unsupported", action="store_true", help=unknown)


def pytest_load_initial_conftests(early_config, args):
    try:
        args[:] = [*settings.flags(early_config.rootpath, PYTEST, _SETTINGS), *args]
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


@contextlib.contextmanager
def _emulated(config, schedule):
    options = config.option
    arch = options.emulated_arch
    how = {
        "all_configs": options.emulated_all_configs,
        "masked": options.emulated_masked,
        "strict": options.emulated_strict,
        "bounds": options.emulated_bounds,
        "uninitialized": "allow" if options.emulated_allow_uninitialized else "error",
        "unguarded": "allow" if options.emulated_allow_unguarded else "error",
    }
    with flags(PYTEST), fake_gpu(arch), enabled(arch, schedule=schedule, **how) as reports:
        yield reports
        test, passed = tested(), allowed(reports)
        for note in (note for report in reports for note in report.notes):
            config.stash[_NOTES].setdefault(note, test)
        for key in passed:
            config.stash[_TESTS].setdefault(key, test)
        config.stash[_ALLOWED].update(passed)


def pytest_terminal_summary(terminalreporter, config):
    notes, passed = config.stash.get(_NOTES, {}), config.stash.get(_ALLOWED, {})
    if notes or passed:
        terminalreporter.section("tritonemu")
        for note, test in notes.items():
            terminalreporter.write_line(f"note: {note}{_first(test)}")
        for line, key in zip(told(passed), passed, strict=True):
            terminalreporter.write_line(f"{line}{_first(config.stash[_TESTS][key])}")


def _first(test):
    return f" (first in {test})" if test else ""


def pytest_configure(config):
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "tritonemu":
            module.__tracebackhide__ = True
    config.stash[_NOTES], config.stash[_TESTS], config.stash[_ALLOWED] = {}, {}, allowed([])
    if config.option.fake_gpu:  # from here on: modules ask for a GPU when they are imported
        stack = contextlib.ExitStack()
        stack.enter_context(_emulated(config, "modelled"))
        config.add_cleanup(stack.close)


def pytest_generate_tests(metafunc):
    if metafunc.config.option.fake_gpu or "emulated" in metafunc.fixturenames:
        schedules = ["modelled", *range(metafunc.config.option.emulated_schedules)]
        metafunc.parametrize("_schedule", schedules, indirect=True, ids=str)


@pytest.fixture(autouse=True)
def _schedule(request):
    """The reports of a test that is emulated, else None."""
    if not hasattr(request, "param"):
        yield None
        return
    with _emulated(request.config, request.param) as reports:
        yield reports


@pytest.fixture
def emulated(_schedule):
    """The test runs without a GPU, its kernels in the emulator; the reports of their launches."""
    return _schedule


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    unsupported = call.excinfo is not None and call.excinfo.errisinstance(Unsupported)
    if unsupported and item.config.option.skip_unsupported:
        report.outcome = "skipped"
        at = call.excinfo.value
        report.longrepr = (at.file, at.line, f"Skipped: {at.args[0]}")
    return report
