"""The timers, on a GPU: a pause of known length is measured, and launch overhead is not."""

import contextlib
import time
from types import SimpleNamespace

import pytest
import torch

import tritonemu
from gdpa_lab.measuring import copies, sustained, timing

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
def test_host_time_ends_when_the_call_returns():
    calls = {"waits": torch.cuda.synchronize, "returns": lambda: None}
    late = {n: lambda f=f: (torch.cuda._sleep(20_000_000), f()) for n, f in calls.items()}
    samples = timing.sample_hosts(late, torch.device("cuda:0"), FEW)
    assert min(samples["waits"]) > 8000 > 1000 > sorted(samples["returns"])[2]


@needs_gpu
def test_functions_take_turns():
    order: list[str] = []
    functions = {name: lambda name=name: order.append(name) for name in "abc"}
    timing.sample_kernels(functions, torch.device("cuda:0"), FEW)
    measured = order[-15:]
    rounds = [sorted(measured[i : i + 3]) for i in range(0, 15, 3)]
    assert rounds == [["a", "b", "c"]] * 5


class Gpu:
    """`torch.cuda` of a device that is always done; in mode "error" a wait is one."""

    def __init__(self) -> None:
        self.mode = "default"
        self.device = lambda device: contextlib.nullcontext()
        self.synchronize = lambda *_: None
        self.Event = lambda enable_timing: SimpleNamespace(
            record=lambda: None, query=lambda: False, elapsed_time=lambda end: 1.0
        )

    def set_sync_debug_mode(self, mode: str) -> None:
        self.mode = mode

    def wait(self) -> None:
        if self.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")


CUDA = SimpleNamespace(type="cuda")


@pytest.fixture
def gpu(monkeypatch):
    found, silent = Gpu(), lambda: None
    buffer = SimpleNamespace(zero_=silent)
    fake = SimpleNamespace(cuda=found, int8=None, empty=lambda *_, **__: buffer)
    meter = SimpleNamespace(energy_j=silent, clock_mhz=silent, throttle_reasons=silent)
    for module in (timing, sustained):
        monkeypatch.setattr(module, "torch", fake)
    monkeypatch.setattr(timing.private, "sleep", lambda cycles: None)
    monkeypatch.setattr(sustained, "Meter", lambda device: meter)
    return found


def back_to_back(functions, device, protocol):
    """`sample_each`, with the error of a call raised, as the other timers do."""
    found = sustained.sample_each(functions, device, protocol, seconds=0.05)
    for result in found.values():
        if isinstance(result, Exception):
            raise result
    return found


@pytest.mark.parametrize(
    "sampler",
    (timing.sample_kernels, timing.sample_ops, timing.sample_hosts, back_to_back,
     lambda functions, device, _: timing.sample_calls(functions, device, rounds=1)),
)  # fmt: skip
def test_no_timed_call_may_wait_for_the_device(gpu, sampler):
    modes = []
    sampler({"quick": lambda: modes.append(gpu.mode)}, CUDA, FEW)
    assert modes.count("error") >= FEW.samples and gpu.mode == "default"
    with pytest.raises(timing.WaitsForDevice, match="not wait for the device, got one of slow"):
        sampler({"quick": lambda: None, "slow": gpu.wait}, CUDA, FEW)
    assert gpu.mode == "default"


def test_another_error_of_a_timed_call_is_its_own(gpu):
    with pytest.raises(RuntimeError, match="out of memory"), timing.no_waiting(CUDA, "x"):
        raise RuntimeError("out of memory")
    assert gpu.mode == "default"


def test_calls_in_a_row_take_turns_and_the_first_turn_warms_up(monkeypatch):
    order: list[str] = []
    now = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def call(name: str) -> None:
        order.append(name)
        # A second each in the first turn of both.
        now[0] += 1 if len(order) <= 8 else {"slow": 0.002, "fast": 0.001}[name]

    functions = {name: lambda name=name: call(name) for name in ("slow", "fast")}
    samples = timing.sample_calls(functions, torch.device("cpu"), in_a_row=4, rounds=3)
    assert order == (["slow"] * 4 + ["fast"] * 4) * 4
    assert samples == {"slow": pytest.approx([2000] * 12), "fast": pytest.approx([1000] * 12)}


@needs_gpu
def test_calls_in_a_row_do_not_wait_and_must_not():
    device, x = torch.device("cuda:0"), torch.ones(3, device="cuda:0")
    calls = {"long": lambda: torch.cuda._sleep(2_000_000)}
    samples = timing.sample_calls(calls, device, in_a_row=5, rounds=2)["long"]
    assert sorted(samples)[5] < 500
    with pytest.raises(timing.WaitsForDevice, match="one of waits"):
        timing.sample_calls({"waits": lambda: x[0].item()}, device, in_a_row=5, rounds=2)
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.parametrize(("reads", "writes"), ((3, 1), (4, 3)))
def test_copies_of_our_own_read_and_write_everything(reads, writes):
    size = 300  # no multiple of the block
    x = [torch.randn(size) for _ in range(reads)]
    y = [torch.full((size,), torch.nan) for _ in range(writes)]
    with tritonemu.enabled():
        copies.copy(tuple(x), tuple(y), block=128)
    expected = [x[0] + x[1] + x[2]] if writes == 1 else [x[i] + x[3] for i in range(3)]
    for got, right in zip(y, expected, strict=True):
        torch.testing.assert_close(got, right)
    with pytest.raises(ValueError, match="reads and writes must be 3 and 1 or 4 and 3 tensors"):
        copies.copy(tuple(x), (y[0], y[0]))


def test_attention_copies_have_its_mixes(monkeypatch):
    def sample(functions, device, protocol):
        with tritonemu.enabled():
            for function in functions.values():
                function()
        return {name: [1.0, 2.0, 3.0] for name in functions}

    monkeypatch.setattr(timing, "sample_kernels", sample)
    limits = timing.attention_copies(torch.device("cpu"), length=1500)
    found = timing.measure_ceilings(limits, torch.device("cpu"))
    assert len({ceiling.shape for ceiling in found}) == len(found) == 2 * len(timing.COPY_BLOCKS)
    moved = {(c.kind, c.flops, c.bytes_read, c.bytes_written) for c in found}
    assert moved == {("copy", 0, 9000, 3000), ("copy", 0, 12000, 9000)}
