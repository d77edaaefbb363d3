"""The library's doctor (`gdpa_kernels.doctor`), and what measuring needs: baselines, records, GPUs.

`python -m gdpa_lab doctor` prints the findings. Whatever a broken installation could break is
imported inside the checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gdpa_kernels import doctor
from gdpa_kernels.calling import compiler
from gdpa_kernels.doctor import RUNGS, TORCH, Finding, module, repairs

__all__ = ["RUNGS", "TORCH", "Finding", "findings", "repairs", "report", "verdict"]
FBTRITON = compiler.FBTRITON
UNVERIFIED = "unverified here: measured in a child process first"
KEEP = "python -m gdpa_lab keep"


def findings(data_dir: str | Path | None = None) -> list[Finding]:
    """Collect every finding about this machine: GPU, torch, triton, implementations, baselines,
    records; and what is known of other GPUs."""
    return [
        doctor.check_gpu(),
        doctor.check_torch(),
        check_triton(),
        *check_implementations(data_dir),
        *check_other_gpus(),
        *check_baselines(),
        check_records(data_dir),
    ]


WITHOUT_GPU = (
    "Here you can read the book and run every kernel in the emulator. To measure you need an "
    "NVIDIA GPU that PyTorch sees."
)


def report(findings: Iterable[Finding]) -> str:
    """Format the verdict, then the findings: those with the same reason together, by group."""
    findings = list(findings)
    return doctor.report(findings, verdict(findings))


def verdict(findings: Iterable[Finding]) -> str:
    """State the repairs to run or, if there are none, what this machine can measure."""
    findings = list(findings)
    text = doctor.verdict(findings, "measures", WITHOUT_GPU)
    if any(f.group == "data" and not f.ok for f in findings):
        text += "\nThe records need attention: see data."
    return text


def check_triton() -> Finding:
    """Check that Python imports a whole fbtriton, which a record names by its version."""
    finding = doctor.check_triton()
    if not finding.ok:
        return finding
    from gdpa_lab.measuring import system

    version, fbtriton = system.triton_versions()
    if fbtriton is None:
        detail = f"{version}, which is not of an fbtriton that is installed there"
        return replace(finding, ok=False, detail=detail, repair=compiler.repair())
    return replace(finding, detail=f"{version}, from fbtriton {fbtriton}, with TLX")


def check_implementations(data_dir: str | Path | None = None) -> list[Finding]:
    """Check every implementation here, and whether a record in `data_dir` verifies the rung on such
    a GPU (`probe`)."""
    answers = doctor.check_implementations()
    ladder, unverified = module("gdpa_kernels.calling.ladder"), _unverified(data_dir)
    if isinstance(ladder, Exception):
        return answers
    news = {
        (doctor.group_of(operator, rung), rung.impl)
        for operator, rungs in ladder.LADDERS.items()
        for rung in rungs
        if unverified(rung)
    }
    return [
        replace(x, detail=f"{x.detail}, {UNVERIFIED}") if x.ok and (x.group, x.name) in news else x
        for x in answers
    ]


def check_other_gpus() -> list[Finding]:
    """Report the GPUs that run the products in plain Triton without a measurement, with the
    compiled resources (data/every_gpu.csv)."""
    group, answers = "GPUs without a record", []
    try:
        from gdpa_lab.measuring import every_gpu

        known = every_gpu.table()
    except Exception as error:
        return [
            Finding(group, "every_gpu.csv", False, f"cannot be read: {compiler.text_of(error)}")
        ]
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
    probe, record = module("gdpa_lab.measuring.probe"), module("gdpa_lab.measuring.record")
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
    baselines = module("gdpa_lab.measuring.baselines")
    if isinstance(baselines, Exception):
        return [Finding("baselines", "baselines", False, f"cannot be imported: {baselines}")]
    tables = {"gdpa": baselines.BASELINES, "block_attention": baselines.BLOCK_BASELINES}
    return [
        doctor.ask(f"baselines of {operator}", name, baseline.availability)
        for operator, table in tables.items()
        for name, baseline in table.items()
    ]


def check_records(data_dir: str | Path | None = None) -> Finding:
    """Count the records that load, and name the refused ones with the reason."""
    from gdpa_lab.measuring import git

    record = module("gdpa_lab.measuring.record")
    if isinstance(record, Exception):
        return Finding("data", "records", False, f"cannot be read: {record}")
    problem = record.no_records(data_dir)
    if problem is not None:
        return Finding("data", "records", False, problem)
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
