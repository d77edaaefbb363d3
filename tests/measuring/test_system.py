import getpass
import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gdpa_kernels import doctor
from gdpa_lab.measuring import system
from tests.records import STATE

PROPERTIES = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=150_110_011_392,
    L2_cache_size=62_914_560, uuid="12345678-9abc-def0-1234-56789abcdef0",
)  # fmt: skip


@pytest.fixture
def gpu(monkeypatch):
    """torch sees one H200."""
    device = {"is_available": True, "is_initialized": True, "current_device": 0}
    for name, value in (device | {"get_device_properties": PROPERTIES}).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A stand-in for nvidia-smi: answers from `values`, and refuses a field it does not know."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def install(values: dict[str, str], pids: str = "") -> Path:
        script, calls = folder / "nvidia-smi", tmp_path / "calls"
        made = {"VALUES": values, "PIDS": pids, "CALLS": str(calls)}
        script.write_text(SMI + "".join(f"{k} = {v!r}\n" for k, v in made.items()) + "main()\n")
        script.chmod(0o755)
        return calls

    return install


SMI = """#!/usr/bin/env python3
import sys


def main():
    open(CALLS, "a").write(" ".join(sys.argv[1:]) + "\\n")
    if "--query-compute-apps=pid" in sys.argv:
        sys.exit(print(PIDS))
    fields = sys.argv[1].removeprefix("--query-gpu=").split(",")
    for field in fields:
        if field not in VALUES:
            print(f'Field "{field}" is not a valid field to query.')
            sys.exit(2)
    print(", ".join(VALUES[field] for field in fields))


"""


@pytest.fixture
def no_smi(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))


REASONS = "clocks_event_reasons.active"
NOW = {
    "clocks.sm": "1980", "clocks.mem": "3201", "temperature.gpu": "41", "power.draw": "123.45",
    REASONS: "0x0000000000000004",
}  # fmt: skip
STATIC = {
    "clocks.max.sm": "1980", "clocks.max.mem": "3201", "power.limit": "700.00",
    "driver_version": "580.159.03",
}  # fmt: skip


def test_a_machine_without_gpu(no_smi):
    found = system.describe()
    assert found.id.startswith("cpu-")
    assert (found.gpu, found.driver, found.power_limit_w, found.num_sms) == (None,) * 4
    assert found.torch == torch.__version__
    assert system.state() == STATE
    assert doctor.gpu_names() == []


def test_a_gpu(gpu, smi):
    smi(STATIC)
    found = system.describe()
    assert found.id.startswith("nvidia-h200-") and found.compute_capability == "9.0"
    assert (found.num_sms, found.l2_bytes) == (132, 62_914_560)
    assert (found.max_sm_clock_mhz, found.max_memory_clock_mhz) == (1980.0, 3201.0)
    assert (found.power_limit_w, found.driver) == (700.0, "580.159.03")


def test_a_gpu_without_nvidia_smi(gpu, no_smi):
    found = system.describe()
    assert (found.gpu, found.driver, found.power_limit_w) == ("NVIDIA H200", None, None)
    assert system.state() == STATE


STATE_NOW = {
    "sm_clock_mhz": 1980.0, "memory_clock_mhz": 3201.0, "temperature_c": 41.0, "power_w": 123.45,
    "throttle_reasons": ["sw_power_cap"], "other_processes": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (NOW, STATE_NOW),
        # an older driver
        ({key.replace("_event_", "_throttle_"): value for key, value in NOW.items()}, STATE_NOW),
        (NOW | {"power.draw": "[N/A]", REASONS: "[Not Supported]"},
         STATE_NOW | {"power_w": None, "throttle_reasons": None}),
        ({}, STATE),
    ],
)  # fmt: skip
def test_state_is_what_nvidia_smi_says_of_the_gpu_of_torch(gpu, smi, values, expected):
    calls = smi(values, pids=str(os.getpid()))
    assert system.state() == expected
    lines = calls.read_text().splitlines()
    assert all(f"--id=GPU-{PROPERTIES.uuid}" in line for line in lines)
    assert not any(option in line for line in lines for option in ("-pm", "-pl", "-lgc", "-ac"))


@pytest.mark.parametrize(
    ("mask", "reasons"),
    [
        (0, []),
        (0x1, ["gpu_idle"]),
        (0x24, ["sw_power_cap", "sw_thermal_slowdown"]),
        (0x400, ["0x400"]),
    ],
)
def test_throttle_reasons(mask, reasons):
    assert system.throttle_reasons(mask) == reasons


@pytest.mark.parametrize(
    ("pids", "initialized", "others"),
    [
        ("", True, 0),
        ("own\n999999", True, 1),
        ("999999", True, 0),  # this process under a translated id
        ("999999", False, 1),
        ("999998\n999999", True, 1),
    ],
)
def test_other_processes(gpu, smi, monkeypatch, pids, initialized, others):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    smi(NOW, pids.replace("own", str(os.getpid())))
    assert system.state()["other_processes"] == others


def test_round_trip(tmp_path, gpu, smi):
    smi(STATIC)
    found = system.describe()
    path = system.save(found, tmp_path)
    assert path == tmp_path / "systems" / f"{found.id}.json"
    assert system.load(path) == found
    before = path.read_bytes()
    assert system.save(found, tmp_path) == path
    assert path.read_bytes() == before


def test_limits_boards_and_counts_of_gpus_are_told_apart(gpu, smi, monkeypatch, tmp_path):
    smi(STATIC | {"power.limit": "600.00"})
    limited = system.describe()
    smi(STATIC)
    one = system.describe()
    assert one.id == system.describe().id and not {"gpus", "board"} & one.to_dict().keys()
    monkeypatch.setenv(system.BOARD_VARIABLE, "left")
    left = system.describe()
    two = replace(one, gpus=2)
    assert len({limited.id, one.id, left.id, two.id}) == 4
    for made in (limited, one, left, two):
        assert system.load(system.save(made, tmp_path)) == made
    old = system.files.DATA_DIR / "systems" / "nvidia-h200-62ac9e84.json"
    assert system.load(old).board is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda d: d.pop("driver"), r"\['driver'\] missing"),
        (lambda d: d.update(hostname="x"), r"\['hostname'\] unknown"),
        (lambda d: d.update(num_sms="132"), r"num_sms must be of type int \| None, got '132'"),
        (lambda d: d.update(torch=None), "torch must be of type str, got None"),
        (lambda d: d.update(num_sms=131), "id must be"),
    ],
)
def test_damage_is_refused(tmp_path, change, reason):
    path = system.save(system.describe(), tmp_path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=reason) as caught:
        system.load(path)
    assert str(caught.value).startswith(f"systems/{path.name}")
    with pytest.raises(ValueError, match=reason):
        system.save(system.describe(), tmp_path)


def test_a_cut_or_renamed_file_is_refused(tmp_path):
    path = system.save(system.describe(), tmp_path)
    renamed = path.rename(path.with_name("other-01234567.json"))
    with pytest.raises(ValueError, match="must be named"):
        system.load(renamed)
    renamed.write_text(renamed.read_text()[:-20])
    with pytest.raises(ValueError, match=r"systems/other-01234567\.json must be JSON"):
        system.load(renamed)


def test_no_personal_data(gpu, smi):
    smi(STATIC)
    words = {str(value) for value in system.describe().to_dict().values()}
    assert not words & {socket.gethostname(), getpass.getuser(), PROPERTIES.uuid}
    assert not any(PROPERTIES.uuid in word for word in words)
