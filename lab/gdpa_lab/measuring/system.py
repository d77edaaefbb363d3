"""Describes the machine behind a record, and the state of its GPU while measuring.

Nothing here sets a clock, a power limit or a mode. A system holds no host name, serial number, UUID
or user name.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from gdpa_lab.measuring import files
from gdpa_lab.measuring.require import require

THROTTLE_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""Names of the mask's bits in nvidia-smi (NVML reference, nvmlClocksEventReasons)."""

PROMOTED = "promoted.json"
_SMI_SECONDS = 20
_LATER = ("gpus", "board")
BOARD_VARIABLE = "GDPA_KERNELS_BOARD"


@dataclass(frozen=True)
class System:
    """One machine and its software; None where it cannot be known (no GPU, no nvidia-smi).

    `cuda` is the CUDA version torch was built with. `triton` is the version of the imported
    package, `fbtriton` that of the distribution that provides it, None if another one does. `gpus`:
    how many of them worked together, None for one. `board`: what those who measure call this one
    (environment variable GDPA_KERNELS_BOARD), None if they have one or do not say.
    """

    gpu: str | None
    compute_capability: str | None
    num_sms: int | None
    memory_bytes: int | None
    l2_bytes: int | None
    max_sm_clock_mhz: float | None
    max_memory_clock_mhz: float | None
    power_limit_w: float | None
    driver: str | None
    cuda: str | None
    torch: str
    triton: str | None
    fbtriton: str | None
    python: str
    platform: str
    cpu: str | None
    gpus: int | None = None
    board: str | None = None

    @property
    def id(self) -> str:
        """Slug of the GPU (without one: of the CPU) and 8 hex digits of the SHA-256 of the rest."""
        content = json.dumps(self._content(), sort_keys=True).encode()
        name = self.gpu or f"cpu {self.cpu or self.platform}"
        return f"{_slug(name)}-{files.digest(content)[:8]}"

    def to_dict(self) -> dict[str, Any]:
        """The system as JSON values, `id` first."""
        return {"id": self.id, **self._content()}

    def _content(self) -> dict[str, Any]:
        """Fields as JSON values, without unknown ones that older systems do not have."""
        return {k: v for k, v in asdict(self).items() if v is not None or k not in _LATER}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> System:
        """Rebuild a system from `to_dict`; ValueError if a key, a type or the id is wrong."""
        if not isinstance(data, Mapping):
            raise ValueError(f"system must be a JSON object, got {type(data).__name__}")
        values = {**dict.fromkeys(_LATER), **data}
        known, received = {"id", *(f.name for f in fields(System))}, {*values}
        if known != received:
            missing, unknown = sorted(known - received), sorted(received - known)
            expected = f"system must have the keys {sorted(known)}"
            raise ValueError(f"{expected}, got {missing} missing and {unknown} unknown")
        name = values.pop("id")
        for field in fields(System):
            value = values[field.name]
            kind = "None" if value is None else type(value).__name__
            require(kind in field.type.split(" | "), field.name, f"of type {field.type}", value)
        system = System(**values)
        if name != system.id:
            raise ValueError(f"id must be {system.id!r}, derived from the other keys")
        return system


def describe(device: int | None = None) -> System:
    """The system of CUDA device `device` (default: torch's current one), or of a machine without.

    Reads torch's device properties, nvidia-smi, the installed packages and /proc/cpuinfo.
    """
    import torch

    gpu = dict.fromkeys(("gpu", "compute_capability", "num_sms", "memory_bytes", "l2_bytes"))
    smi: dict[str, str | None] = {}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(_index(device))
        gpu = {
            "gpu": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "num_sms": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
        }
        query = ("clocks.max.sm", "clocks.max.mem", "power.limit", "driver_version")
        smi = _query_gpu(query, _smi_id(_index(device))) or {}
    triton, fbtriton = triton_versions()
    return System(
        **gpu,
        max_sm_clock_mhz=_number(smi.get("clocks.max.sm")),
        max_memory_clock_mhz=_number(smi.get("clocks.max.mem")),
        power_limit_w=_number(smi.get("power.limit")),
        driver=smi.get("driver_version"),
        cuda=torch.version.cuda,
        torch=str(torch.__version__),
        triton=triton,
        fbtriton=fbtriton,
        python=platform.python_version(),
        platform=f"{platform.system()}-{platform.machine()}".lower(),
        cpu=_cpu(),
        board=os.environ.get(BOARD_VARIABLE) or None,
    )


def state(device: int | None = None) -> dict[str, Any]:
    """Clocks, temperature, power, throttle reasons and other processes of the GPU now.

    `device` is torch's index (default: the current one); nvidia-smi is asked by that device's UUID,
    so CUDA_VISIBLE_DEVICES is followed. Units are in the keys: sm_clock_mhz, memory_clock_mhz,
    temperature_c, power_w. `throttle_reasons` names the active ones. `other_processes` counts
    compute processes on the GPU besides this one: where process ids are translated, so that this
    process cannot be identified, one is taken to be this one. Every value is None without a GPU or
    nvidia-smi.
    """
    import torch

    keys = ("sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_w")
    empty = dict.fromkeys((*keys, "throttle_reasons", "other_processes"))
    if not torch.cuda.is_available():
        return empty
    gpu = _smi_id(_index(device))
    query = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
    # Drivers before R535 know only the second name.
    for reasons in ("clocks_event_reasons.active", "clocks_throttle_reasons.active"):
        answer = _query_gpu((*query, reasons), gpu)
        if answer is not None:
            mask = answer[reasons]
            return {
                **{k: _number(answer[q]) for k, q in zip(keys, query, strict=True)},
                "throttle_reasons": None if mask is None else throttle_reasons(int(mask, 16)),
                "other_processes": _other_processes(gpu, torch.cuda.is_initialized()),
            }
    return empty


def save(system: System, data_dir: str | Path) -> Path:
    """Write `data_dir`/systems/<id>.json; return its path. An equal file is left as it is."""
    path = Path(data_dir) / "systems" / f"{system.id}.json"
    if path.exists():
        load(path)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(system.to_dict(), indent=2) + "\n", encoding="utf-8")
    return path


def load(path: str | Path) -> System:
    """Read a system file, <folder>/systems/<id>.json; ValueError if it cannot be read, is
    damaged, or its name is not its id."""
    return _parsed(Path(path).name, files.read(Path(path)))


@cache  # every record of a system asks for it
def _parsed(name: str, text: bytes) -> System:
    try:
        system = System.from_dict(json.loads(text.decode("utf-8")))
    except json.JSONDecodeError as error:
        raise ValueError(f"systems/{name} must be JSON, got {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"systems/{name}: {error}") from error
    if name != f"{system.id}.json":
        raise ValueError(f"systems/{name} must be named {system.id}.json, after its id")
    return system


def by_id(system_id: str, data_dir: str | Path) -> System:
    """The system of this id in a folder of data, as `load` reads it."""
    return load(Path(data_dir) / "systems" / f"{system_id}.json")


def promoted(data_dir: str | Path) -> dict[str, list[str]] | None:
    """The systems whose records a folder may hold: ids by name of the GPU. None: any.

    `data_dir`/promoted.json lists them, and is reviewed; the repository's folder must have one.
    RecordError if it cannot be read or is not such a list.
    """
    path = Path(data_dir) / PROMOTED
    if not path.exists() and path.parent.resolve() != files.DATA_DIR:
        return None
    try:
        listed = json.loads(files.read(path))
    except ValueError as error:
        raise files.RecordError(path, f"must be JSON, got {error}") from error
    lists = listed.values() if isinstance(listed, dict) else [None]
    if not all(isinstance(ids, list) and all(isinstance(x, str) for x in ids) for ids in lists):
        raise files.RecordError(path, f"must be lists of systems by GPU, got {listed!r:.120}")
    return listed


def is_promoted(system: System, data_dir: str | Path) -> bool:
    """Return whether a folder may hold records of a system: its id is listed under its GPU."""
    listed = promoted(data_dir)
    return listed is None or system.id in listed.get(system.gpu or "", ())


def triton_versions() -> tuple[str | None, str | None]:
    """(version of the triton that Python imports, version of the fbtriton that provides it)."""
    try:
        import triton

        version, folder = triton.__version__, Path(triton.__file__).parents[1]
    except Exception:
        # A triton whose files another distribution overwrote fails in any way; `doctor` says how.
        return None, None
    try:
        fbtriton = importlib.metadata.distribution("fbtriton")
    except importlib.metadata.PackageNotFoundError:
        return version, None
    same_folder = Path(str(fbtriton.locate_file(""))).resolve() == folder.resolve()
    return version, fbtriton.version if same_folder and "+fb" in version else None


def _slug(name: str) -> str:
    name = name.lower().replace("(r)", "").replace("(tm)", "")
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def _index(device: int | None) -> int:
    import torch

    return torch.cuda.current_device() if device is None else device


def _smi_id(index: int) -> str:
    """Return the name of torch's device `index` for `nvidia-smi --id`."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def _smi(*arguments: str) -> str | None:
    """Standard output of a query of nvidia-smi, None if it is missing, fails or hangs."""
    command = ["nvidia-smi", *arguments, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _query_gpu(names: Sequence[str], gpu: str) -> dict[str, str | None] | None:
    output = _smi(f"--query-gpu={','.join(names)}", f"--id={gpu}")
    values = [v.strip() for v in output.strip().split(",")] if output is not None else []
    if len(values) != len(names):
        return None
    # nvidia-smi writes [N/A], [Not Supported] or [Unknown Error] for what it cannot read.
    return {n: None if v.startswith("[") else v for n, v in zip(names, values, strict=True)}


def _number(value: str | None) -> float | None:
    try:
        return None if value is None else float(value)
    except ValueError:
        return None


def throttle_reasons(mask: int) -> list[str]:
    """Names of the bits that are set in a mask of NVML."""
    bits = [1 << i for i in range(64) if mask >> i & 1]
    return [THROTTLE_REASONS.get(bit, hex(bit)) for bit in bits]


def _other_processes(gpu: str, holds_context: bool) -> int | None:
    output = _smi("--query-compute-apps=pid", f"--id={gpu}")
    if output is None:
        return None
    pids = [int(line) for line in output.split() if line.isdigit()]
    if os.getpid() in pids:
        return len(pids) - 1
    return max(0, len(pids) - 1) if holds_context else len(pids)


def _cpu() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or None
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.processor() or None
