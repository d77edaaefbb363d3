"""The timers, on a GPU: a pause of known length is measured, and launch overhead is not."""

import time

import pytest
import torch

from gdpa_kernels import timing

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
FEW = timing.Protocol(warmup=1, samples=5, l2_flush_bytes=2**20)


@needs_gpu
def test_device_time_leaves_the_host_out():
    def call() -> None:
        time.sleep(0.002)
        torch.cuda._sleep(2_000_000)

    samples = timing.sample_kernels({"call": call}, torch.device("cuda:0"), FEW)["call"]
    assert len(samples) == 5
    assert 800 < sorted(samples)[2] < 1900, "one to two million cycles a millisecond, no sleep"


@needs_gpu
def test_host_time_includes_everything():
    samples = timing.sample_ops({"call": lambda: time.sleep(0.002)}, torch.device("cuda:0"), FEW)
    assert min(samples["call"]) > 2000


@needs_gpu
def test_functions_take_turns():
    order: list[str] = []
    functions = {name: lambda name=name: order.append(name) for name in "abc"}
    timing.sample_kernels(functions, torch.device("cuda:0"), FEW)
    measured = order[-15:]
    rounds = [sorted(measured[i : i + 3]) for i in range(0, 15, 3)]
    assert rounds == [["a", "b", "c"]] * 5


def test_the_protocol_is_the_documented_one():
    assert timing.DEFAULT.samples >= 30 and timing.DEFAULT.interleaved
    assert timing.DEFAULT.l2_flush_bytes >= 2 * 60 * 2**20, "twice the largest L2 we know"
