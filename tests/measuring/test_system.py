import getpass
import json
import os
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gdpa_lab.measuring import system
from tests.records import STATE

PROPERTIES = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=150_110_011_392,
    L2_cache_size=62_914_560,
    uuid="12345678-9abc-def0-1234-56789abcdef0",
)


@pytest.fixture
def gpu(monkeypatch):
    """torch sees one H200."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: PROPERTIES)


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A stand-in for nvidia-smi: answers from `values`, and refuses a field it does not know."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    calls = tmp_path / "calls"

    def install(values: dict[str, str], pids: str = "") -> list[list[str]]:
        script = folder / "nvidia-smi"
        script.write_text(
            "#!/usr/bin/env python3\n"
            "import sys\n"
            f"values, pids = {values!r}, {pids!r}\n"
            f"open({str(calls)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
            "if '--query-compute-apps=pid' in sys.argv:\n"
            "    print(pids)\n"
            "    sys.exit()\n"
            "fields = sys.argv[1].removeprefix('--query-gpu=').split(',')\n"
            "unknown = [f for f in fields if f not in values]\n"
            "if unknown:\n"
            "    print(f'Field \"{unknown[0]}\" is not a valid field to query.')\n"
            "    sys.exit(2)\n"
            "print(', '.join(values[f] for f in fields))\n"
        )
        script.chmod(0o755)
        return calls

    return install


@pytest.fixture
def no_smi(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))


NOW = {
    "clocks.sm": "1980",
    "clocks.mem": "3201",
    "temperature.gpu": "41",
    "power.draw": "123.45",
    "clocks_event_reasons.active": "0x0000000000000004",
}
STATIC = {
    "clocks.max.sm": "1980",
    "clocks.max.mem": "3201",
    "power.limit": "700.00",
    "driver_version": "580.159.03",
}


def test_a_machine_without_gpu(no_smi):
    found = system.describe()
    assert found.id.startswith("cpu-")
    assert (found.gpu, found.driver, found.power_limit_w, found.num_sms) == (None,) * 4
    assert found.torch == torch.__version__
    assert system.state() == STATE
    assert system.gpu_names() == []


def test_a_gpu(gpu, smi):
    smi(STATIC)
    found = system.describe()
    assert found.id.startswith("nvidia-h200-")
    assert found.compute_capability == "9.0"
    assert (found.num_sms, found.l2_bytes) == (132, 62_914_560)
    assert (found.max_sm_clock_mhz, found.max_memory_clock_mhz) == (1980.0, 3201.0)
    assert (found.power_limit_w, found.driver) == (700.0, "580.159.03")


def test_a_gpu_without_nvidia_smi(gpu, no_smi):
    found = system.describe()
    assert found.gpu == "NVIDIA H200"
    assert (found.driver, found.power_limit_w) == (None, None)
    assert system.state() == STATE


def test_state_asks_for_the_gpu_of_torch(gpu, smi):
    calls = smi(NOW, pids=str(os.getpid()))
    assert system.state() == {
        "sm_clock_mhz": 1980.0,
        "memory_clock_mhz": 3201.0,
        "temperature_c": 41.0,
        "power_w": 123.45,
        "throttle_reasons": ["sw_power_cap"],
        "other_processes": 0,
    }
    lines = calls.read_text().splitlines()
    assert all(f"--id=GPU-{PROPERTIES.uuid}" in line for line in lines)
    assert not any(option in line for line in lines for option in ("-pm", "-pl", "-lgc", "-ac"))


def test_state_under_an_older_driver(gpu, smi):
    values = dict(NOW)
    values["clocks_throttle_reasons.active"] = values.pop("clocks_event_reasons.active")
    smi(values)
    assert system.state()["throttle_reasons"] == ["sw_power_cap"]


def test_what_nvidia_smi_cannot_read_is_none(gpu, smi):
    smi(NOW | {"power.draw": "[N/A]", "clocks_event_reasons.active": "[Not Supported]"})
    found = system.state()
    assert (found["power_w"], found["throttle_reasons"]) == (None, None)
    assert found["sm_clock_mhz"] == 1980.0


def test_a_failing_nvidia_smi_gives_none(gpu, smi):
    smi({})
    assert system.state() == STATE


@pytest.mark.parametrize(
    ("mask", "reasons"),
    [
        ("0x0000000000000000", []),
        ("0x0000000000000001", ["gpu_idle"]),
        ("0x0000000000000024", ["sw_power_cap", "sw_thermal_slowdown"]),
        ("0x0000000000000400", ["0x400"]),
    ],
)
def test_throttle_reasons(mask, reasons):
    assert system.throttle_reasons(int(mask, 16)) == reasons


@pytest.mark.parametrize(
    ("pids", "initialized", "others"),
    [
        ("", True, 0),
        (f"{os.getpid()}\n999999", True, 1),
        ("999999", True, 0),  # this process under a translated id
        ("999999", False, 1),
        ("999998\n999999", True, 1),
    ],
    ids=("none", "own and another", "own, translated", "another", "two"),
)
def test_other_processes(gpu, smi, monkeypatch, pids, initialized, others):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    smi(NOW, pids)
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


def test_the_id_follows_the_content(gpu, smi):
    smi(STATIC)
    first = system.describe()
    smi(STATIC | {"power.limit": "600.00"})
    assert system.describe().id != first.id
    smi(STATIC)
    assert system.describe().id == first.id


def test_boards_and_counts_of_gpus_are_told_apart(gpu, smi, monkeypatch, tmp_path):
    smi(STATIC)
    one = system.describe()
    assert not {"gpus", "board"} & one.to_dict().keys()
    monkeypatch.setenv(system.BOARD_VARIABLE, "left")
    left = system.describe()
    two = replace(one, gpus=2)
    assert len({one.id, left.id, two.id}) == 3
    for made in (one, left, two):
        assert system.load(system.save(made, tmp_path)) == made
    old = system.manifest.DATA_DIR / "systems" / "nvidia-h200-62ac9e84.json"
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
