"""Diagnoses an installation: what runs here, why the rest does not, and the commands that repair.

`python -m gdpa_kernels` prints the findings; the lab's doctor adds its own. Whatever a broken
installation could break is imported inside the checks.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from gdpa_kernels.calling import compiler

TORCH = "torch==2.13.0"
RUNGS = "implementations of "
_SMI_SECONDS = 20


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


def findings() -> list[Finding]:
    """Collect every finding about this machine: GPU, torch, triton, implementations."""
    return [check_gpu(), check_torch(), check_triton(), *check_implementations()]


def report(findings: Iterable[Finding], first: str | None = None) -> str:
    """Format `first`, by default the verdict, then the findings: those with the same reason
    together, by group."""
    findings = list(findings)
    reasons: dict[tuple[bool, str], dict[str, list[str]]] = {}
    for finding in findings:
        groups = reasons.setdefault((finding.ok, finding.detail), {})
        groups.setdefault(finding.group, []).append(finding.name)
    lines = [first or verdict(findings)]
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


NO_GPU = (
    "PyTorch sees no GPU: calls take the definition. Inside `tritonemu.enabled()` every kernel "
    "runs on the CPU."
)


def verdict(findings: Iterable[Finding], verb: str = "runs", without_gpu: str = NO_GPU) -> str:
    """State the repairs to run or, if there are none, what this machine does."""
    findings = list(findings)
    commands = repairs(findings)
    if commands:
        things = "1 thing" if len(commands) == 1 else f"{len(commands)} things"
        return "\n".join([f"{things} to repair:", *(f"  {command}" for command in commands)])
    if not any(f.name == "gpu" and f.ok for f in findings):
        return without_gpu
    last = {
        f.group.removeprefix(RUNGS): f.name
        for f in findings
        if f.group.startswith(RUNGS) and f.ok and f.name != "reference"
    }
    reach = ", ".join(f"{operator} up to {impl}" for operator, impl in last.items())
    return f"This machine {verb} {reach or 'nothing'}."


def repairs(findings: Iterable[Finding]) -> list[str]:
    """List the repair commands, each once, in the order to run them.

    fbtriton comes last: installing torch with CUDA installs triton over its files.
    """
    commands = list(dict.fromkeys(f.repair for f in findings if f.repair is not None))
    return sorted(commands, key=lambda command: compiler.FBTRITON in command)


def check_gpu() -> Finding:
    """Report the GPU torch sees, with its compute capability, or why it sees none."""
    torch = module("torch")
    if isinstance(torch, Exception):
        return Finding("machine", "gpu", False, f"unknown without torch ({torch})")
    if torch.cuda.is_available():
        index = torch.cuda.current_device()
        major, minor = torch.cuda.get_device_capability(index)
        detail = f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"
        return Finding("machine", "gpu", True, detail)
    listed = gpu_names()
    return judge_missing_gpu(listed, torch.version.cuda, os.environ.get("CUDA_VISIBLE_DEVICES"))


def judge_missing_gpu(listed: list[str], cuda: str | None, visible: str | None) -> Finding:
    """Explain why torch sees no GPU: `listed` by nvidia-smi, torch's CUDA, CUDA_VISIBLE_DEVICES."""
    detail, repair = "nvidia-smi lists no GPU", None
    if listed:
        names = ", ".join(sorted(set(listed)))
        if cuda is None:
            detail = f"{names}, but this torch is built without CUDA"
            repair = compiler.pip(f"--force-reinstall {TORCH}")
        elif visible is not None:
            detail = f"{names}, but CUDA_VISIBLE_DEVICES={visible!r} hides it from torch"
            repair = "unset CUDA_VISIBLE_DEVICES"
        else:
            detail = f"{names}, but its driver does not run torch's CUDA {cuda}"
    return Finding("machine", "gpu", False, detail, repair)


def gpu_names() -> list[str]:
    """GPUs that nvidia-smi lists, whether or not torch can use them; [] without nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [] if done.returncode else list(filter(None, map(str.strip, done.stdout.splitlines())))


def check_torch() -> Finding:
    """Report the torch that Python imports."""
    torch = module("torch")
    if isinstance(torch, Exception):
        detail = f"cannot be imported ({torch})"
        return Finding(
            "machine", "torch", False, detail, compiler.pip(f"--force-reinstall {TORCH}")
        )
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return Finding("machine", "torch", True, f"{torch.__version__}, {cuda}")


def check_triton() -> Finding:
    """Check that the Triton that Python imports can compile every kernel."""
    problem = compiler.problem(tlx=True)
    if problem is not None:
        return Finding("machine", "triton", False, problem, compiler.repair())
    return Finding("machine", "triton", True, f"{module('triton').__version__}, with TLX")


def check_implementations() -> list[Finding]:
    """Check the reference and every rung on this machine."""
    ladder = module("gdpa_kernels.calling.ladder")
    if isinstance(ladder, Exception):
        return [Finding("implementations", "ladder", False, f"cannot be imported: {ladder}")]
    return [
        ask(group_of(operator, rung), rung.impl, ladder.availability, rung.impl, None, operator)
        for operator, rungs in ladder.LADDERS.items()
        for rung in rungs
    ]


def group_of(operator: str, rung: Any) -> str:
    """The group of findings that a rung of an operator belongs to."""
    return RUNGS + (operator if "forward" in rung.directions else f"{operator} backward")


def ask(group: str, name: str, availability: Callable, *arguments: Any) -> Finding:
    """What an `availability` answers, or the error that it raises."""
    try:
        answer = availability(*arguments)
    except Exception as error:
        return Finding(group, name, False, compiler.text_of(error))
    return Finding(group, name, answer.ok, answer.reason)


def module(name: str) -> ModuleType | Exception:
    """A module, or the error of its import."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        return RuntimeError(compiler.text_of(error))
