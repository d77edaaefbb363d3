"""Diagnoses an installation: what this machine can run, and the commands that repair the rest.

`python -m gdpa_lab doctor` prints the findings. Whatever a broken installation could break is
imported inside the checks.
"""

from __future__ import annotations

import importlib
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
UNVERIFIED = "unverified here: measured in a child process first"
KEEP = "python -m gdpa_lab keep"


@dataclass(frozen=True)
class Finding:
    """A finding: whether `name` works here (`ok`), why (`detail`), and how to repair it (`repair`).

    `repair` is a shell command, None if nothing is broken: a CPU is no damage.
    """

    group: str
    name: str
    ok: bool
    detail: str
    repair: str | None = None


def findings(data_dir: str | Path | None = None) -> list[Finding]:
    """Collect every finding about this machine: GPU, torch, triton, implementations, baselines,
    records; and what is known of other GPUs."""
    return [
        check_gpu(),
        check_torch(),
        check_triton(),
        *check_implementations(data_dir),
        *check_other_gpus(),
        *check_baselines(),
        check_records(data_dir),
    ]


def report(findings: Iterable[Finding]) -> str:
    """Format the verdict, then the findings: those with the same reason together, by group."""
    findings = list(findings)
    reasons: dict[tuple[bool, str], dict[str, list[str]]] = {}
    for finding in findings:
        groups = reasons.setdefault((finding.ok, finding.detail), {})
        groups.setdefault(finding.group, []).append(finding.name)
    lines = [verdict(findings)]
    for ok, title in ((True, "What works here"), (False, "What does not, and why")):
        alike = {detail: groups for (is_ok, detail), groups in reasons.items() if is_ok is ok}
        lines += ["", title] if alike else []
        for detail, groups in alike.items():
            names = "; ".join(f"{group}: {', '.join(of)}" for group, of in groups.items())
            lines += textwrap.wrap(
                f"{names}: {detail}" if ok else f"{detail}: {names}", 100, initial_indent="  ",
                subsequent_indent="    ", break_on_hyphens=False, break_long_words=False,
            )  # fmt: skip
    return "\n".join(lines) + "\n"


def verdict(findings: Iterable[Finding]) -> str:
    """State the repairs to run or, if there are none, what this machine can measure."""
    findings = list(findings)
    commands = repairs(findings)
    if commands:
        things = "1 thing" if len(commands) == 1 else f"{len(commands)} things"
        text = "\n".join([f"{things} to repair:", *(f"  {command}" for command in commands)])
    elif any(f.name == "gpu" and f.ok for f in findings):
        last = {
            f.group.removeprefix(RUNGS): f.name
            for f in findings
            if f.group.startswith(RUNGS) and f.ok and f.name != "reference"
        }
        reach = ", ".join(f"{operator} up to {impl}" for operator, impl in last.items())
        text = f"This machine measures {reach or 'nothing'}."
    else:
        text = (
            "Here you can read the book and run every kernel in the emulator. To measure you need "
            "an NVIDIA GPU that PyTorch sees."
        )
    if any(f.group == "data" and not f.ok for f in findings):
        text += "\nThe records need attention: see data."
    return text


def repairs(findings: Iterable[Finding]) -> list[str]:
    """List the repair commands, each once, in the order to run them.

    fbtriton comes last: installing torch with CUDA installs triton over its files.
    """
    commands = list(dict.fromkeys(f.repair for f in findings if f.repair is not None))
    return sorted(commands, key=lambda command: FBTRITON in command)


def check_gpu() -> Finding:
    """Report the GPU torch sees, with its compute capability, or why it sees none."""
    torch = _module("torch")
    if isinstance(torch, Exception):
        return Finding("machine", "gpu", False, f"unknown without torch ({torch})")
    if torch.cuda.is_available():
        index = torch.cuda.current_device()
        major, minor = torch.cuda.get_device_capability(index)
        detail = f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"
        return Finding("machine", "gpu", True, detail)
    listed = _module("gdpa_lab.measuring.system").gpu_names()
    return judge_missing_gpu(listed, torch.version.cuda, os.environ.get("CUDA_VISIBLE_DEVICES"))


def judge_missing_gpu(listed: list[str], cuda: str | None, visible: str | None) -> Finding:
    """Explain why torch sees no GPU: `listed` by nvidia-smi, torch's CUDA, CUDA_VISIBLE_DEVICES."""
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
    """Report the torch that Python imports."""
    torch = _module("torch")
    if isinstance(torch, Exception):
        detail = f"cannot be imported ({torch})"
        return Finding("machine", "torch", False, detail, _pip(f"--force-reinstall {TORCH}"))
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return Finding("machine", "torch", True, f"{torch.__version__}, {cuda}")


def check_triton() -> Finding:
    """Check that Python imports fbtriton, with TLX.

    triton and fbtriton install the same files and pip does not notice: whichever is installed last
    wins, and removing one removes files of the other.
    """
    repair = _pip(f"--force-reinstall --no-deps {FBTRITON}")
    try:
        from gdpa_lab.measuring import system

        importlib.import_module("triton.language.extra.tlx")
    except Exception as error:
        detail = f"cannot be imported with TLX ({_name(error)})"
        return Finding("machine", "triton", False, detail, repair)
    version, fbtriton = system.triton_versions()
    if fbtriton is None:
        detail = f"{version}, which is not of an fbtriton that is installed there"
        return Finding("machine", "triton", False, detail, repair)
    return Finding("machine", "triton", True, f"{version}, from fbtriton {fbtriton}, with TLX")


def check_implementations(data_dir: str | Path | None = None) -> list[Finding]:
    """Check the reference and every rung on this machine, and whether a record in `data_dir`
    verifies the rung on such a GPU (`probe`)."""
    ladder = _module("gdpa_kernels.calling.ladder")
    if isinstance(ladder, Exception):
        return [Finding("implementations", "ladder", False, f"cannot be imported: {ladder}")]
    unverified = _unverified(data_dir)
    answers = []
    for operator, rungs in ladder.LADDERS.items():
        for rung in rungs:
            group = operator if "forward" in rung.directions else f"{operator} backward"
            answer = _ask(RUNGS + group, rung.impl, ladder.availability, rung.impl, None, operator)
            if answer.ok and unverified(rung):
                answer = replace(answer, detail=f"{answer.detail}, {UNVERIFIED}")
            answers.append(answer)
    return answers


def check_other_gpus() -> list[Finding]:
    """Report the GPUs that run the products in plain Triton without a measurement, with the
    compiled resources (data/every_gpu.csv)."""
    group, answers = "GPUs without a record", []
    try:
        from gdpa_lab.measuring import every_gpu

        known = every_gpu.table()
    except Exception as error:
        return [Finding(group, "every_gpu.csv", False, f"cannot be read: {_name(error)}")]
    for target, rows in known.groupby("target", sort=False):
        is_amd = not target.startswith("sm_")
        spills = [
            f"{product} at head_dim {', '.join(map(str, sorted(set(each['head_dim']))))}"
            for product, each in rows[rows["spill_bytes"] > 0].groupby("product", sort=False)
        ]
        detail = (
            f"{', '.join(rows['product'].unique())}: compiled and emulated, not measured"
            + (f"; registers spill in {', in '.join(spills)}" if spills else "")
            + ("; calls are refused there, eager PyTorch runs" if is_amd else "")
        )
        answers.append(Finding(group, target, not is_amd, detail))
    return answers


def _unverified(data_dir: str | Path | None) -> Callable[[Any], bool]:
    """Return a predicate: the rung runs on the first GPU and no record verifies it."""
    probe, record = _module("gdpa_lab.measuring.probe"), _module("gdpa_lab.measuring.record")
    try:
        import torch

        device = torch.device("cuda", 0)
        capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
        known = probe.verified(record.DATA_DIR if data_dir is None else data_dir, capability)
    except Exception:  # no GPU, or what the other findings name
        return lambda rung: False
    return lambda rung: any(
        probe.is_unverified(rung.impl, rung.operator, direction, device, known)
        for direction in rung.directions
    )


def check_baselines() -> list[Finding]:
    """Check every baseline of both operators on this machine."""
    baselines = _module("gdpa_lab.measuring.baselines")
    if isinstance(baselines, Exception):
        return [Finding("baselines", "baselines", False, f"cannot be imported: {baselines}")]
    tables = {"gdpa": baselines.BASELINES, "block_attention": baselines.BLOCK_BASELINES}
    return [
        _ask(f"baselines of {operator}", name, baseline.availability)
        for operator, table in tables.items()
        for name, baseline in table.items()
    ]


def no_records(data_dir: str | Path | None) -> str | None:
    """Return why `data_dir` cannot hold a record, or None; None is the repository's own folder."""
    if data_dir is None or (Path(data_dir) / "records").is_dir():
        return None
    return f"--data-dir must be a folder that holds records/, got {str(data_dir)!r}"


def check_records(data_dir: str | Path | None = None) -> Finding:
    """Count the records that load, and name the refused ones with the reason."""
    problem = no_records(data_dir)
    if problem is not None:
        return Finding("data", "records", False, problem)
    from gdpa_lab.measuring import git

    record = _module("gdpa_lab.measuring.record")
    if isinstance(record, Exception):
        return Finding("data", "records", False, f"cannot be read: {record}")
    data_dir = Path(record.DATA_DIR if data_dir is None else data_dir)
    details, good = [], data_dir.is_dir()
    guests = {f"community/{name}: ": path for name, path in record.communities(data_dir).items()}
    for whose, folder in ({"": data_dir} | guests).items():
        records, errors = record.survey(folder)
        details += [f"{whose}{len(records)} read, {len(errors)} refused", *map(str, errors)]
        left = sorted((folder / record.files.PARTIAL).glob("*.json"))
        details += [f"{path} is of a run that did not end: {KEEP} {path}" for path in left]
        good = good and not errors and not left
    if not data_dir.is_dir():
        details.append(f"{data_dir} is no folder")
    elif git.answer(data_dir, "rev-parse", "HEAD") is None:
        details.append("no history in git to hold them to")
    return Finding("data", "records", good, "; ".join(details))


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


def _name(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _pip(arguments: str) -> str:
    """Format a pip command for this Python, whose path is relative inside the working directory."""
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    return f"{python} -m pip install {arguments}"
