"""For all tests: what they draw, and what keeps thousands of small ones quick."""

import gc
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
    parser.addoption("--nightly", action="store_true", help="only the long tests, marked nightly")
    parser.addoption(
        "--threads", type=int, default=1, metavar="N", help="threads of PyTorch (default 1)"
    )


@pytest.hookimpl(tryfirst=True)  # before the plugin of hypothesis reads its own options
def pytest_configure(config):
    """Examples depend on the test's code, with --seed N on N, and on no earlier run.

    Tensors are small, and `pytest -n` runs a process per core: more threads than one only wait.
    """
    torch.set_num_threads(config.option.threads)
    config.addinivalue_line("markers", "nightly: takes minutes; runs with --nightly alone")
    seed = config.option.seed
    if seed and config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = seed
    hypothesis.settings.register_profile("seeded", derandomize=not seed, database=None)
    hypothesis.settings.load_profile("seeded")


def pytest_collection_modifyitems(config, items):
    chosen, others = [], []
    for item in items:
        nightly = item.get_closest_marker("nightly") is not None
        (chosen if nightly == config.option.nightly else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = chosen


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
