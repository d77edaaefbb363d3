"""For all tests: what keeps thousands of small ones quick."""

import gc

import pytest
import torch

# Tensors are small here, and `pytest -n` runs a process per core: more threads only wait.
torch.set_num_threads(1)


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
