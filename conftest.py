"""For all tests: their tiers, what they draw, and what keeps thousands of small ones quick.

Without an option the quick tier runs, which is `make test`. `--sweeps` runs what that leaves out:
every promise compiled, many random cases, the mutants of the fixed samples. `--nightly` runs what
takes too long for that. A test whose node id the command line spells out runs whatever its tier.
"""

import gc
import os
import zlib

import hypothesis
import pytest
import torch


def pytest_addoption(parser):
    parser.addoption(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="draw other tensors and examples (default 0)",
    )
    tier = parser.getgroup("tiers").addoption
    tier(
        "--sweeps", action="store_true", help="only tests marked sweep, and all that draw examples"
    )
    tier("--nightly", action="store_true", help="only the long tests, marked nightly")
    parser.addoption(
        "--threads", type=int, default=1, metavar="N", help="threads of PyTorch (default 1)"
    )


@pytest.hookimpl(tryfirst=True)  # before the plugin of hypothesis reads its own options
def pytest_configure(config):
    """Examples depend on the test's code, with --seed N on N, and on no earlier run.

    Tensors are small, and `pytest -n` runs a process per core: more threads than one only wait.
    """
    torch.set_num_threads(config.option.threads)
    seed = config.option.seed
    if seed and config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = seed
    count = 100 if config.option.sweeps or config.option.nightly else 25
    hypothesis.settings.register_profile(
        "seeded", derandomize=not seed, database=None, max_examples=count
    )
    hypothesis.settings.load_profile("seeded")


def pytest_collection_modifyitems(config, items):
    named, chosen, others = _named(config), [], []
    for item in items:
        if item.get_closest_marker("nightly"):
            runs = config.option.nightly
        elif item.get_closest_marker("sweep"):
            runs = config.option.sweeps
        elif config.option.sweeps:  # a drawn test once more, of more examples
            runs = hypothesis.is_hypothesis_test(getattr(item, "obj", None))
        else:
            runs = not config.option.nightly
        (chosen if runs or item.nodeid in named else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = chosen


def _named(config) -> set[str]:
    """The node ids that the command line spells out."""
    ids = set()
    for path, colons, name in (argument.partition("::") for argument in config.args):
        if colons:
            path = os.path.relpath(config.invocation_params.dir / path, config.rootpath)
            ids.add(f"{path}::{name}")
    return ids


@pytest.fixture(autouse=True)
def _seeded(request):
    """A test draws the same numbers in any order and any process: its name and --seed decide."""
    name = f"{request.config.option.seed} {request.node.nodeid}"
    torch.manual_seed(zlib.crc32(name.encode()))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is collected stays: no need to look for garbage in it on the way."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _settled():
    """What is there before a module stays too: `gc.collect()` in its tests takes milliseconds, and
    not the seconds that it takes to go through all of it."""
    gc.collect()
    gc.freeze()
