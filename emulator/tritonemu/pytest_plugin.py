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

from . import enabled, fake_gpu, options
from .errors import PYTEST, flags
from .messages import Remarks, tested

_SCHEDULES = 2
_REMARKS = pytest.StashKey()  # on all launches
_FIRST = pytest.StashKey()  # of each the first test


def pytest_addoption(parser):
    group = parser.getgroup("tritonemu", "Triton kernels in the emulator")
    group.addoption("--fake-gpu", action="store_true", help="run all tests without a GPU")
    several = f"random schedules for each test (default {_SCHEDULES})"
    how = {"type": int, "metavar": "N", "default": _SCHEDULES, "help": several}
    group.addoption(f"{PYTEST}schedules", **how)
    options.add_options(group.addoption, PYTEST)


def _command(config):
    """Build the command that runs one test as it runs now, up to its name."""
    command = ["pytest", "-p", __name__, *["--fake-gpu"] * config.option.fake_gpu]
    if config.option.emulated_schedules != _SCHEDULES:
        command += [f"{PYTEST}schedules", str(config.option.emulated_schedules)]
    command += options.repeated(config.option, PYTEST)
    folder = os.path.relpath(config.rootpath, config.invocation_params.dir)
    return f"{shlex.join(command)} {'' if folder == '.' else shlex.quote(folder + os.sep)}"


@contextlib.contextmanager
def _emulated(config, schedule):
    how = options.keywords(config.option, PYTEST)
    gpu = fake_gpu(how["arch"], multiprocessors=how["multiprocessors"])
    with flags(PYTEST, _command(config)), gpu, enabled(**how, schedule=schedule) as reports:
        yield reports
        remarks = Remarks()
        remarks.add(reports)
        first = f" (first in {test})" if (test := tested()) else ""
        for key in (*remarks.notes, *remarks.allowed, *remarks.unjudged):
            config.stash[_FIRST].setdefault(key, first)
        config.stash[_REMARKS].add(reports)


def pytest_terminal_summary(terminalreporter, config):
    lines = config.stash[_REMARKS].lines(config.stash[_FIRST])
    if lines:
        terminalreporter.section("tritonemu")
        for line in lines:
            terminalreporter.write_line(line)


def pytest_configure(config):
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "tritonemu":
            module.__tracebackhide__ = True
    config.stash[_REMARKS], config.stash[_FIRST] = Remarks(), {}
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
