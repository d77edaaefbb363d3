"""What this machine can run, and the command that repairs what is missing.

Findings are plain data; `python -m gdpa_lab doctor` prints them. Nothing is imported here that
a broken installation could break.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

TORCH = "torch==2.13.0"
FBTRITON = "fbtriton==3.7.4"
RUNGS = "implementations of "
UNPROVEN = "unproven here: measured in a child process first"
KEEP = "python -m gdpa_lab keep"


@dataclass(frozen=True)
class Finding:
    """One answer: does `name` work here (`ok`), why (`detail`), and what repairs it (`repair`).

    `repair` is a shell command, None if nothing is broken: a CPU is no damage.
    """

    group: str
    name: str
    ok: bool
    detail: str
    repair: str | None = None


def findings(data_dir: str | Path | None = None) -> list[Finding]:
    """Every finding about this machine: GPU, torch, triton, implementations, baselines, records."""
    return [
        check_gpu(),
        check_torch(),
        check_triton(),
        *check_implementations(data_dir),
        *check_baselines(),
        check_records(data_dir),
    ]


def report(found: Iterable[Finding]) -> str:
    """The findings as text: by group, those of one reason on one line, then the verdict."""
    found = list(found)
    lines = []
    for group in dict.fromkeys(f.group for f in found):
        names: dict[tuple[bool, str], list[str]] = {}
        for finding in found:
            if finding.group == group:
                names.setdefault((finding.ok, finding.detail), []).append(finding.name)
        lines.append(group)
        for (ok, detail), alike in names.items():
            line = f"  {'yes' if ok else 'no ':3}  {', '.join(alike)}: {detail}"
            lines += textwrap.wrap(
                line, 100, subsequent_indent=" " * 7, break_on_hyphens=False, break_long_words=False
            )
    return "\n".join([*lines, "", verdict(found)]) + "\n"


def verdict(found: Iterable[Finding]) -> str:
    """What to do next or, with nothing to repair, what this machine is good for."""
    found = list(found)
    commands = repairs(found)
    if commands:
        things = "1 thing" if len(commands) == 1 else f"{len(commands)} things"
        said = "\n".join([f"{things} to repair:", *(f"  {command}" for command in commands)])
    elif any(f.name == "gpu" and f.ok for f in found):
        last = {
            f.group.removeprefix(RUNGS): f.name
            for f in found
            if f.group.startswith(RUNGS) and f.ok and f.name != "reference"
        }
        reach = ", ".join(f"{operator} up to {impl}" for operator, impl in last.items())
        said = f"This machine measures {reach or 'nothing'}."
    else:
        said = (
            "No usable GPU: the book builds, the tests run, the kernels run in the emulator; "
            "nothing can be measured."
        )
    if any(f.group == "data" and not f.ok for f in found):
        said += "\nThe records need attention: see data."
    return said


def repairs(found: Iterable[Finding]) -> list[str]:
    """The repair commands, each once, in the order to run them.

    fbtriton comes last: installing torch with CUDA installs triton over its files.
    """
    commands = list(dict.fromkeys(f.repair for f in found if f.repair is not None))
    return sorted(commands, key=lambda command: FBTRITON in command)


def check_gpu() -> Finding:
    """The GPU torch sees, with its compute capability, or why it sees none."""
    try:
        import torch

        from gdpa_lab.measuring import system
    except Exception as error:
        return Finding("machine", "gpu", False, f"unknown without torch ({_name(error)})")
    if torch.cuda.is_available():
        index = torch.cuda.current_device()
        major, minor = torch.cuda.get_device_capability(index)
        detail = f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"
        return Finding("machine", "gpu", True, detail)
    return judge_missing_gpu(
        system.gpu_names(), torch.version.cuda, os.environ.get("CUDA_VISIBLE_DEVICES")
    )


def judge_missing_gpu(listed: list[str], cuda: str | None, visible: str | None) -> Finding:
    """Why torch sees no GPU: `listed` by nvidia-smi, torch's CUDA, CUDA_VISIBLE_DEVICES."""
    detail, repair = "nvidia-smi lists no GPU: records are read, none can be measured", None
    if listed:
        names = ", ".join(sorted(set(listed)))
        if cuda is None:
            detail = f"{names}, but this torch is built without CUDA"
            repair = _pip(f"--force-reinstall {TORCH}")
        elif visible is not None:
            detail = f"{names}, but CUDA_VISIBLE_DEVICES={visible!r} hides it from torch"
            repair = "unset CUDA_VISIBLE_DEVICES"
        else:
            detail = f"{names}, but its driver does not run torch's CUDA {cuda}"
    return Finding("machine", "gpu", False, detail, repair)


def check_torch() -> Finding:
    """The torch that Python imports."""
    try:
        import torch

        cuda = torch.version.cuda
        detail = f"{torch.__version__}, {f'CUDA {cuda}' if cuda else 'without CUDA'}"
    except Exception as error:
        detail = f"cannot be imported ({_name(error)})"
        return Finding("machine", "torch", False, detail, _pip(f"--force-reinstall {TORCH}"))
    return Finding("machine", "torch", True, detail)


def check_triton() -> Finding:
    """Whether Python imports an intact fbtriton, with TLX.

    triton and fbtriton install the same files and pip does not notice: whichever is installed last
    wins, and removing one removes files of the other.
    """
    ours, other = _distribution("fbtriton"), _distribution("triton")
    try:
        module = importlib.import_module("triton")
        version, folder = module.__version__, Path(module.__file__).resolve().parents[1]
        importlib.import_module("triton.language.extra.tlx")
        problem = f"{version}, but fbtriton is not installed: other builds of TLX lack features"
    except Exception as error:
        version, ours, problem = "", None, f"cannot be imported with TLX ({_name(error)})"
    if ours is not None:
        home = Path(str(ours.locate_file(""))).resolve()
        files = [f for f in ours.files or () if f.parts[0] == "triton" and f.size is not None]
        broken = sum(not _has(home / file, file.size) for file in files)
        problem = None
        if folder != home:
            problem = f"{version}, imported from another folder than fbtriton {ours.version}"
        elif broken or "+fb" not in version:
            problem = f"{version}: {broken} files of fbtriton {ours.version} are not as installed"
            problem += f", and triton {other.version} is installed too" if other else ""
    if problem is not None:
        repair = _pip(f"--force-reinstall --no-deps {FBTRITON}")
        return Finding("machine", "triton", False, problem, repair)
    detail = f"{version}, from fbtriton {ours.version}, with TLX"
    if other is not None:
        detail += f", over triton {other.version}; installing triton again would overwrite it"
    return Finding("machine", "triton", True, detail)


def check_implementations(data_dir: str | Path | None = None) -> list[Finding]:
    """The reference and every rung of each ladder: can it run here, and why; and whether a record
    in `data_dir` has it right on such a GPU (`probe`)."""
    ladder = _module("gdpa_kernels.calling.ladder")
    if isinstance(ladder, Exception):
        return [Finding("implementations", "ladder", False, f"cannot be imported: {ladder}")]
    unproven = _unproven(data_dir)
    found = []
    for operator, rungs in ladder.LADDERS.items():
        for rung in rungs:
            group = operator if "forward" in rung.directions else f"{operator} backward"
            answer = _ask(RUNGS + group, rung.impl, ladder.availability, rung.impl, None, operator)
            if answer.ok and unproven(rung):
                answer = replace(answer, detail=f"{answer.detail}, {UNPROVEN}")
            found.append(answer)
    return found


def _unproven(data_dir: str | Path | None) -> Callable[[Any], bool]:
    """Whether a rung has kernels that run on the first GPU and no record proves."""
    probe, record = _module("gdpa_lab.measuring.probe"), _module("gdpa_lab.measuring.record")
    try:
        import torch

        device = torch.device("cuda", 0)
        capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
        known = probe.proven(record.DATA_DIR if data_dir is None else data_dir, capability)
    except Exception:  # no GPU, or what the other findings name
        return lambda rung: False
    return lambda rung: any(
        probe.is_unproven(rung.impl, rung.operator, direction, device, known)
        for direction in rung.directions
    )


def check_baselines() -> list[Finding]:
    """Every baseline of both operators: can it run here, and why."""
    found = _module("gdpa_lab.measuring.baselines")
    if isinstance(found, Exception):
        return [Finding("baselines", "baselines", False, f"cannot be imported: {found}")]
    tables = {"gdpa": found.BASELINES, "block_attention": found.BLOCK_BASELINES}
    return [
        _ask(f"baselines of {operator}", name, baseline.availability)
        for operator, table in tables.items()
        for name, baseline in table.items()
    ]


def no_records(data_dir: str | Path | None) -> str | None:
    """Why `data_dir` cannot hold a record, or None; None is the repository's own folder."""
    if data_dir is None or (Path(data_dir) / "records").is_dir():
        return None
    return f"--data-dir must be a folder that holds records/, got {str(data_dir)!r}"


def check_records(data_dir: str | Path | None = None) -> Finding:
    """How many records load, and which are refused and why."""
    problem = no_records(data_dir)
    if problem is not None:
        return Finding("data", "records", False, problem)
    record = _module("gdpa_lab.measuring.record")
    if isinstance(record, Exception):
        return Finding("data", "records", False, f"cannot be read: {record}")
    data_dir = Path(record.DATA_DIR if data_dir is None else data_dir)
    records, errors = record.survey(data_dir)
    found = [f"{len(records)} read, {len(errors)} refused", *map(str, errors)]
    if not (data_dir / record.manifest.NAME).exists():
        found.append(f"no {record.manifest.NAME} to hold them to")
    if not data_dir.is_dir():
        found.append(f"{data_dir} is no folder")
    for handle, folder in record.communities(data_dir).items():
        guests, refused = record.survey(folder)
        found.append(f"community/{handle}: {len(guests)} read, {len(refused)} refused")
        found += map(str, refused)
        errors += refused
    left = [x for x in (data_dir, *record.communities(data_dir).values()) for x in _left(x, record)]
    found += [f"{path} is of a run that did not end: {KEEP} {path}" for path in left]
    good = data_dir.is_dir() and not errors and not left
    return Finding("data", "records", good, "; ".join(found))


def _left(folder: Path, record: Any) -> list[Path]:
    return sorted((folder / record.manifest.PARTIAL).glob("*.json"))


def _ask(group: str, name: str, availability: Any, *arguments: Any) -> Finding:
    try:
        answer = availability(*arguments)
    except Exception as error:
        return Finding(group, name, False, _name(error))
    return Finding(group, name, answer.ok, answer.reason)


def _module(name: str) -> ModuleType | Exception:
    try:
        return importlib.import_module(name)
    except Exception as error:
        return RuntimeError(_name(error))


def _distribution(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _name(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _pip(arguments: str) -> str:
    """A pip command for this Python, whose path is relative inside the working directory."""
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    return f"{python} -m pip install {arguments}"
