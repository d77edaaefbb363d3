"""Calls back to back: how many there are, what the GPU reports meanwhile, and an idle device."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pynvml
import pytest
import torch

from gdpa_lab.measuring import record, sustained, timing
from gdpa_lab.measuring.rows import Ceiling, Load
from gdpa_lab.report import results
from tests.measuring.test_record import a_record
from tests.measuring.test_refusals import refusal
from tests.records import LOAD

DEVICE = torch.device("cuda:0")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Clocks:
    """A device and a host in microseconds; a call takes `device_us` of one, `host_us` of both."""

    def __init__(self, device_us: float, host_us: float) -> None:
        self.device = self.host = 0.0
        self.each, self.calls = (device_us, host_us), 0

    def call(self) -> None:
        self.calls += 1
        self.host += self.each[1]
        self.device = max(self.device, self.host) + self.each[0]

    def event(self, enable_timing: bool) -> SimpleNamespace:
        made = SimpleNamespace(at=0.0, query=lambda: made.at <= self.host)
        made.record = lambda: setattr(made, "at", self.device)
        made.elapsed_time = lambda end: (end.at - made.at) / 1e3
        return made

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)


class FakeMeter:
    """400 W, a clock that falls, a cap that comes and goes."""

    def __init__(self, clocks: Clocks) -> None:
        self.clocks, self.asked = clocks, 0

    def energy_j(self) -> float:
        return 400 * self.clocks.device / 1e6

    def clock_mhz(self) -> float:
        self.asked += 1
        return 2000.0 - self.asked

    def throttle_reasons(self) -> set[str]:
        return {"sw_power_cap"} if self.asked % 2 else set()


def sampled(monkeypatch, device_us: float, host_us: float, meter=FakeMeter):
    clocks = Clocks(device_us, host_us)
    cuda = SimpleNamespace(
        device=lambda device: contextlib.nullcontext(), Event=clocks.event,
        synchronize=clocks.synchronize, set_sync_debug_mode=lambda mode: None,
    )  # fmt: skip
    for module in (sustained, timing):
        monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=cuda))
    return clocks, sustained.sample(clocks.call, DEVICE, meter(clocks))


def test_a_sample_is_the_mean_of_a_chunk_and_the_load_belongs_to_a_call(monkeypatch):
    clocks, (times, load) = sampled(monkeypatch, device_us=500, host_us=20)
    assert len(times) == 75 and times == pytest.approx([500] * 75, rel=2e-3)  # 1.5 s by 40 calls
    assert clocks.calls == 1 + 6 + 25 * 40 + 75 * 40
    assert load.joules == pytest.approx(0.2, rel=1e-3) and load.power_w == pytest.approx(400)
    assert load.sm_clock_mhz == 2000 - 38 and load.throttle_reasons == ("sw_power_cap",)


def test_a_device_that_waits_for_the_host_is_no_sustained_load(monkeypatch):
    with pytest.raises(sustained.HostTooSlow, match="got one in 30 us: the device was not busy"):
        sampled(monkeypatch, device_us=10, host_us=30)
    monkeypatch.setattr(sustained, "Meter", lambda device: None)

    def sample(function, device, meter, *, seconds, name):
        assert seconds == sustained.SECONDS
        if function == "waits":
            raise timing.WaitsForDevice(name)
        if function == "slow":
            raise sustained.HostTooSlow("why")
        return [1.0], None

    monkeypatch.setattr(sustained, "sample", sample)
    found = sustained.sample_each({"a": "slow", "b": "quick", "c": "waits"}, DEVICE)
    assert isinstance(found["c"], timing.WaitsForDevice) and found["c"].name == "c"
    assert isinstance(found["a"], sustained.HostTooSlow) and found["b"] == ([1.0], None)


def test_what_the_driver_does_not_tell_is_none(monkeypatch):
    def refuse(*arguments):
        raise pynvml.NVMLError_NotSupported()

    for name in ("TotalEnergyConsumption", "ClockInfo", "CurrentClocksThrottleReasons"):
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", refuse)
    silent = object.__new__(sustained.Meter)
    silent._handle = None
    _, (times, load) = sampled(monkeypatch, 500, 20, meter=lambda clocks: silent)
    assert len(times) == 75 and load == Load(None, None, None, None)


def test_a_record_holds_rows_of_both_scopes_each_against_its_own_ceilings(tmp_path):
    made = a_record()
    burst = made.rows[0]
    slower = tuple(2 * x for x in burst.samples_us)
    joules = 700.0 * sum(slower) / len(slower) / 1e6
    load = replace(LOAD, power_w=700.0, joules=joules)
    rows = burst, replace(burst, scope="sustained", samples_us=slower, load=load)
    loops = {"scope": "sustained", "load": LOAD}
    twice = [replace(c, samples_us=[4 * x for x in c.samples_us], **loops) for c in made.ceilings]
    made = replace(made, rows=rows, ceilings=(*made.ceilings, *twice))
    record.systems.save(record.systems.describe(), tmp_path)
    assert record.load(record.write(made, tmp_path)) == made
    table = results.table(tmp_path).set_index("scope")
    share = table["percent_of_roofline"]
    assert share["sustained"] == pytest.approx(2 * share["kernel"])
    told = table[["sm_clock_mhz", "power_w", "joules"]]
    assert told.loc["sustained"].tolist() == [1500, 700, joules] and told.loc["kernel"].isna().all()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"scope": "sustained"}, "load must say what the GPU reported while it ran back to back"),
        ({"scope": "kernel", "load": LOAD}, "load must be null, or of samples of scope sustained"),
        ({"scope": "sustained", "samples_us": (), "failure": "HostTooSlow: ..."}, None),
    ],
)
def test_a_load_belongs_to_sustained_samples_alone(values, reason):
    made = a_record()
    found = refusal(of=replace(made, rows=(replace(made.rows[0], **values),)))
    assert found is None if reason is None else reason in found


@needs_gpu
def test_a_matmul_back_to_back():
    a = torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)
    times, load = sustained.sample(lambda: a @ a, DEVICE, seconds=0.5, warm_s=0.2)
    assert sum(times) / len(times) < 1000 and load.power_w > 100 and load.sm_clock_mhz > 500


def test_a_ceiling_back_to_back_is_the_fastest_of_its_mix(monkeypatch):
    monkeypatch.setattr(sustained, "Meter", lambda device: None)
    monkeypatch.setattr(sustained, "sample", lambda call, *_: ([call], LOAD))
    sizes = {"bytes_read": 3, "bytes_written": 1}
    kinds = [Ceiling("matmul", "mm", flops=8), Ceiling("copy", "slow", **sizes)]
    kinds += [Ceiling("copy", "fast", **sizes), Ceiling("copy", "other", bytes_read=1)]
    bursts = [replace(c, samples_us=(us,)) for c, us in zip(kinds, (5, 9, 7, 8), strict=True)]
    found = sustained.measure_ceilings([(c, 10.0) for c in kinds], bursts, DEVICE)
    assert [c.shape for c in found] == ["mm", "fast", "other"]
    assert {(c.scope, c.load, c.samples_us) for c in found} == {("sustained", LOAD, (10.0,))}
