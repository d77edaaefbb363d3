"""Turns tests that need a GPU into race tests on a CPU: `pytest -p tritonemu.pytest_plugin`.

With `--fake-gpu` every test runs as if there were a GPU, with its kernels in the emulator: under
the modelled schedule and `--emulated-schedules` random ones, each a test of its own, as in
`test_add[modelled]`. Without it only tests that ask for the fixture `emulated` do; its value is the
list of reports of the kernels launched so far. A finding is an exception in the launch, so the test
fails with it; what is launched in fixtures of modules and sessions runs as modelled.
"""

import contextlib
import os
import shlex
import sys

import pytest

from . import Unsupported, enabled, fake_gpu, settings
from .errors import PYTEST, flags
from .execution import BOUNDS
from .gpu import ARCHITECTURES, BENCHMARKS, FAKE_MULTIPROCESSORS
from .messages import (
    allowed,
    allowed_messages,
    barriers,
    notes,
    tested,
    unjudged,
    unjudged_messages,
    unwrapped,
    unwrapped_messages,
)
from .undefined import MODES

_DEFAULTS = {
    **{"--emulated-arch": "sm_90", "--emulated-schedules": 2, "--emulated-masked": "nan"},
    **{"--emulated-all-configs": False, "--emulated-strict": False, "--emulated-bounds": "tensor"},
    **{"--emulated-benchmarks": "skip", "--emulated-multiprocessors": FAKE_MULTIPROCESSORS},
    **{"--emulated-allow-uninitialized": False, "--emulated-allow-unguarded": False},
}
_NOTES = pytest.StashKey()  # of all launches, and the first test of each
_SETTINGS = [flag.removeprefix(PYTEST) for flag in _DEFAULTS]
_TIMES = pytest.StashKey()  # of each of _COUNTED how many there are of all launches
_TESTS = pytest.StashKey()  # of each of those the first test
_BARRIERS = pytest.StashKey()  # what mbarriers did in all launches
_COUNTED = ((allowed, allowed_messages), (unjudged, unjudged_messages))


def pytest_addoption(parser):
    group = parser.getgroup("tritonemu", "Triton kernels in the emulator")

    def add(name, help, **how):
        flag = f"{PYTEST}{name}"
        how |= {"default": _DEFAULTS[flag]} if how else {"action": "store_true"}
        group.addoption(flag, help=help, **how)

    group.addoption("--fake-gpu", action="store_true", help="run all tests without a GPU")
    add("arch", "architecture of that GPU", choices=ARCHITECTURES)
    add("schedules", "random schedules for each test (default 2)", type=int, metavar="N")
    few = f"multiprocessors of that GPU (default {FAKE_MULTIPROCESSORS})"
    add("multiprocessors", few, type=int, metavar="N")
    add("all-configs", "run every configuration of autotuned kernels, not the first that fits")
    add("masked", "lanes off without `other`", choices=MODES)
    add("benchmarks", "of triton.testing: none, or the smallest size", choices=BENCHMARKS)
    add("strict", "stores race that change no bit, too")
    add("bounds", "or the memory around tensors, too", choices=BOUNDS)
    add("allow-uninitialized", "let pass reads of such memory")
    add("allow-unguarded", "warps of a program need no barrier of their own")
    unknown = "skip tests whose kernels use an operation that the emulator does not know"
    group.addoption("--skip-unsupported", action="store_true", help=unknown)


def pytest_load_initial_conftests(early_config, args):
    try:
        args[:] = [*settings.flags(early_config.rootpath, PYTEST, _SETTINGS), *args]
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def _command(config):
    """Build the command that runs one test as it runs now, up to its name."""
    command = ["pytest", "-p", __name__, *["--fake-gpu"] * config.option.fake_gpu]
    for flag, default in _DEFAULTS.items():
        value = getattr(config.option, flag[2:].replace("-", "_"))
        if value != default:
            command += [flag] if value is True else [flag, str(value)]
    folder = os.path.relpath(config.rootpath, config.invocation_params.dir)
    return f"{shlex.join(command)} {'' if folder == '.' else shlex.quote(folder + os.sep)}"


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
    named = flags(PYTEST, _command(config))
    count = options.emulated_multiprocessors
    gpu = fake_gpu(arch, multiprocessors=count, benchmarks=options.emulated_benchmarks)
    with named, gpu, enabled(arch, schedule=schedule, **how) as reports:
        yield reports
        test = tested()
        barriers(reports, config.stash[_BARRIERS])
        for note in notes(reports):
            config.stash[_NOTES].setdefault(note, test)
        for times, (count, _) in zip(config.stash[_TIMES], _COUNTED, strict=True):
            for key in (now := count(reports)):
                config.stash[_TESTS].setdefault(key, test)
            times.update(now)


def pytest_terminal_summary(terminalreporter, config):
    first = config.stash.get(_NOTES, {})
    lines = [f"note: {note}{_first(test)}" for note, test in first.items()]
    for times, (_, messages) in zip(config.stash.get(_TIMES, ()), _COUNTED, strict=False):
        for line, key in zip(messages(times), times, strict=True):
            lines.append(f"{line}{_first(config.stash[_TESTS][key])}")
    lines += unwrapped_messages(unwrapped(config.stash.get(_BARRIERS, {})))
    if lines:
        terminalreporter.section("tritonemu")
        for line in lines:
            terminalreporter.write_line(line)


def _first(test):
    return f" (first in {test})" if test else ""


def pytest_configure(config):
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "tritonemu":
            module.__tracebackhide__ = True
    config.stash[_NOTES], config.stash[_TESTS], config.stash[_BARRIERS] = {}, {}, {}
    config.stash[_TIMES] = [count([]) for count, _ in _COUNTED]
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
    """Reports of a test that is emulated, else None."""
    if not hasattr(request, "param"):
        yield None
        return
    with _emulated(request.config, request.param) as reports:
        yield reports


@pytest.fixture
def emulated(_schedule):
    """Run the test without a GPU, its kernels emulated; yields the reports of their launches."""
    return _schedule


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    unsupported = call.excinfo is not None and call.excinfo.errisinstance(Unsupported)
    if unsupported and item.config.option.skip_unsupported:
        report.outcome = "skipped"
        error = call.excinfo.value
        report.longrepr = (error.file, error.line, f"Skipped: {error.args[0]}")
    return report
