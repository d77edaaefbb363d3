import ast
import base64
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gdpa_kernels import doctor as library
from gdpa_kernels.calling import compiler, ladder, rung
from gdpa_kernels.calling.rung import Requires, Rung
from gdpa_lab import __main__
from gdpa_lab.measuring import baselines, every_gpu
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import doctor
from gdpa_lab.report.doctor import Finding
from tests.records import a_row, a_system

ROOT = Path(__file__).parents[2]
CURE = "pip install --force-reinstall --no-deps fbtriton==3.7.4"


def test_this_machine(tmp_path):
    (tmp_path / "records").mkdir()
    found = doctor.findings(tmp_path)
    names = [f.name for f in found]
    assert names[:3] == ["gpu", "torch", "triton"] and set(ladder.impls()) <= set(names)
    of_blocks = [f.name for f in found if f.group == "baselines of block_attention"]
    assert of_blocks == list(baselines.BLOCK_BASELINES)
    assert all(f.detail for f in found)
    text = " ".join(doctor.report(found).split())
    assert all(f.name in text and " ".join(f.detail.split()) in text for f in found)
    assert "0 read, 0 refused" in text


def test_other_gpus_run_what_compiles_and_amds_nothing():
    found = {f.name: f for f in doctor.check_other_gpus()}
    assert [*found] == ["sm_80", "sm_86", "sm_89", "sm_120", "gfx942", "gfx950"]
    assert [f.ok for f in found.values()] == [True] * 4 + [False] * 2
    assert all("score: compiled and emulated, not measured" in f.detail for f in found.values())
    assert "registers spill in v1_tiled_backward at head_dim 64, 128" in found["gfx942"].detail
    assert found["gfx942"].detail.endswith("calls are refused there, eager PyTorch runs")


def test_a_table_that_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(every_gpu.table, "__defaults__", (tmp_path,))
    (found,) = doctor.check_other_gpus()
    assert not found.ok and "cannot be read: FileNotFoundError" in found.detail


def rungs(**reasons: str) -> list[Finding]:
    """Rungs of an operator that run, where there is no reason against it."""
    group = f"{doctor.RUNGS}gdpa"
    return [Finding(group, name, not why, why or "runs on cuda:0") for name, why in reasons.items()]


def test_what_has_one_reason_stands_together():
    found = rungs(reference="", v0="", v1="needs sm_80", v2="needs sm_90", v3="needs sm_90")
    found.append(Finding("baselines of gdpa", "fa3", False, "needs sm_90"))
    assert doctor.report(found).splitlines()[1:] == [
        "",
        "What works here",
        "  implementations of gdpa: reference, v0: runs on cuda:0",
        "",
        "What does not, and why",
        "  needs sm_80: implementations of gdpa: v1",
        "  needs sm_90: implementations of gdpa: v2, v3; baselines of gdpa: fa3",
    ]
    wide = doctor.report(rungs(**{f"v{i}_of_a_long_name": "needs sm_90" for i in range(9)}))
    assert max(map(len, wide.splitlines()[1:])) <= 100
    assert wide.splitlines()[-1].startswith("    v")


GPU, NO_GPU = (Finding("machine", "gpu", ok, "x") for ok in (True, False))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([GPU, *rungs(reference="", v1="", v2="", v3="no"),
          Finding(f"{doctor.RUNGS}block_attention", "v0", True, "x")],
         "This machine measures gdpa up to v2, block_attention up to v0."),
        ([GPU, *rungs(reference="", v1="no")], "This machine measures nothing."),
        ([NO_GPU, *rungs(reference="", v0="")],
         "Here you can read the book and run every kernel in the emulator. To measure you need an "
         "NVIDIA GPU that PyTorch sees."),
        ([replace(NO_GPU, repair="cure")], "1 thing to repair:\n  cure"),
        ([GPU, *rungs(v1=""), Finding("data", "records", False, "x")],
         "This machine measures gdpa up to v1.\nThe records need attention: see data."),
    ],
)  # fmt: skip
def test_the_verdict_comes_first(found, said):
    assert doctor.verdict(found) == said
    assert doctor.report(found).startswith(f"{said}\n\n")


def test_fbtriton_is_intact_here():
    finding = doctor.check_triton()
    assert finding.ok, finding
    assert f"from fbtriton {importlib.metadata.version('fbtriton')}, with TLX" in finding.detail


def distribution(folder: Path, name: str, version: str, files: dict[str, str]) -> None:
    """Install a stand-in for a distribution as pip does: files, METADATA and RECORD."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    record = []
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode()
        record.append(f"{path},sha256={digest.rstrip('=')},{len(text)}")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("\n".join([*record, f"{info.name}/RECORD,,"]) + "\n")


LANGUAGE = [f"triton/language/{folder}__init__.py" for folder in ("", "extra/", "extra/tlx/")]
LIBRARY = {
    "triton/_C/__init__.py": "", "triton/_C/libtriton.py": "class ir:\n    builder = object\n"
}  # fmt: skip
FBTRITON = {
    "triton/__init__.py": "__version__ = '3.7.4+fb'\n", **dict.fromkeys(LANGUAGE, ""), **LIBRARY,
    "triton/core.py": "fbtriton = True\n",
}  # fmt: skip
VERSIONS = {"triton": "3.7.1", "fbtriton": "3.7.4"}
TRITON = {
    "triton/__init__.py": "__version__ = '3.7.1'\n", "triton/core.py": "fbtriton = False\n",
    **LIBRARY,
}  # fmt: skip


def check_in(folder: Path, monkeypatch) -> Finding:
    """Return the finding of `check_triton` with `folder` first on the path."""
    monkeypatch.syspath_prepend(folder)
    kept = {n: m for n, m in sys.modules.items() if n == "triton" or n.startswith("triton.")}
    for name in kept:
        monkeypatch.delitem(sys.modules, name)
    for name in ("_triton", "tlx_problem"):  # asked anew
        monkeypatch.setattr(compiler, name, getattr(compiler, name).__wrapped__)
    try:
        return doctor.check_triton()
    finally:
        for name in [n for n in sys.modules if n == "triton" or n.startswith("triton.")]:
            del sys.modules[name]


def test_fbtriton_installed_last_is_sound(tmp_path, monkeypatch):
    distribution(tmp_path, "triton", "3.7.1", TRITON)
    distribution(tmp_path, "fbtriton", "3.7.4", FBTRITON)
    finding = check_in(tmp_path, monkeypatch)
    assert finding.ok and finding.repair is None
    assert finding.detail == "3.7.4+fb, from fbtriton 3.7.4, with TLX"


TLX = TRITON | dict.fromkeys(LANGUAGE, "")
"""Files of a triton with TLX as a plugin."""
OTHER = "3.7.1, which is not of an fbtriton that is installed there"


@pytest.mark.parametrize(
    ("installed", "detail"),
    [
        ([("", "triton", TLX)], OTHER),
        # TLX still imports, from the files left over
        ([("", "fbtriton", FBTRITON), ("", "triton", TRITON)], OTHER),
        ([("other", "fbtriton", FBTRITON), ("", "triton", TLX)], OTHER),
        ([("", "triton", TRITON)],
         "Triton cannot be imported (ModuleNotFoundError: No module named 'triton.language')"),
    ],
)  # fmt: skip
def test_broken_triton_is_named_and_repaired(installed, detail, tmp_path, monkeypatch):
    for folder, name, files in installed:
        distribution(tmp_path / folder, name, VERSIONS[name], files)
    inside = [tmp_path, tmp_path / "other"]

    def find(name):  # none of this Python's own
        found = importlib.metadata.distributions(name=name, path=list(map(str, inside)))
        if (first := next(iter(found), None)) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return first

    monkeypatch.setattr(importlib.metadata, "distribution", find)
    finding = check_in(tmp_path, monkeypatch)
    assert (finding.ok, finding.detail) == (False, detail)
    assert finding.repair.endswith(f"-m {CURE}")


def test_fbtriton_on_the_path_before_another_triton_is_sound(tmp_path, monkeypatch):
    distribution(tmp_path / "venv", "triton", "3.6.0", TRITON)
    distribution(tmp_path / "bundle", "fbtriton", "3.7.4", FBTRITON)
    (tmp_path / "bundle" / "fbtriton-3.7.4.dist-info" / "RECORD").unlink()
    monkeypatch.syspath_prepend(tmp_path / "venv")
    assert check_in(tmp_path / "bundle", monkeypatch).ok


@pytest.mark.parametrize(
    ("listed", "cuda", "visible", "detail", "repair"),
    [
        ([], "13.0", None, "nvidia-smi lists no GPU", None),
        (["NVIDIA H200"] * 2, None, None, "NVIDIA H200, but this torch is built without CUDA",
         "-m pip install --force-reinstall torch==2.13.0"),
        (["NVIDIA H200"], "13.0", "", "CUDA_VISIBLE_DEVICES='' hides it", "unset CUDA_VISIBLE"),
        (["NVIDIA H200"], "13.0", None, "its driver does not run torch's CUDA 13.0", None),
    ],
)  # fmt: skip
def test_why_there_is_no_gpu(listed, cuda, visible, detail, repair):
    finding = library.judge_missing_gpu(listed, cuda, visible)
    assert not finding.ok and detail in finding.detail
    assert (finding.repair is None) if repair is None else (repair in finding.repair)


def test_repairs_come_once_and_fbtriton_last():
    fb = compiler.pip(f"--force-reinstall --no-deps {doctor.FBTRITON}")
    torch = compiler.pip(f"--force-reinstall {doctor.TORCH}")
    found = [replace(NO_GPU, repair=cure) for cure in (fb, torch, torch)]
    assert doctor.repairs(found) == [torch, fb]
    assert doctor.verdict(found) == f"2 things to repair:\n  {torch}\n  {fb}"


def test_a_repair_uses_this_python(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    assert compiler.pip("x") == ".venv/bin/python -m pip install x"
    monkeypatch.chdir(tmp_path.parent)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert compiler.pip("x") == f"{tmp_path}/.venv/bin/python -m pip install x"


def test_implementations_and_baselines_answer_for_themselves(monkeypatch):
    def crash():
        raise OSError("no libcudart")

    fine, runs, too_old = (
        SimpleNamespace(ok=ok, reason=reason)
        for ok, reason in (
            (True, "fine"), (True, "runs on cuda:0"), (False, "needs sm_90 or newer, got sm_80")
        )
    )  # fmt: skip
    rungs = SimpleNamespace(
        LADDERS={
            "one": [SimpleNamespace(impl=x, directions=("forward",)) for x in "ab"],
            "other": [SimpleNamespace(impl="a", directions=("backward",))],
        },
        availability=lambda impl, device, operator: {"a": fine, "b": too_old}[impl],
    )  # fmt: skip
    fa2, fa3 = SimpleNamespace(availability=lambda: runs), SimpleNamespace(availability=crash)
    peers = SimpleNamespace(BASELINES={"fa2": fa2, "fa3": fa3}, BLOCK_BASELINES={"fa2": fa2})
    modules = {"gdpa_kernels.calling.ladder": rungs}
    for house in (library, doctor):
        monkeypatch.setattr(house, "module", lambda name: modules.get(name, peers))
    assert doctor.check_implementations() == [
        Finding("implementations of one", "a", True, "fine"),
        Finding("implementations of one", "b", False, "needs sm_90 or newer, got sm_80"),
        Finding("implementations of other backward", "a", True, "fine"),
    ]
    assert doctor.check_baselines() == [
        Finding("baselines of gdpa", "fa2", True, "runs on cuda:0"),
        Finding("baselines of gdpa", "fa3", False, "OSError: no libcudart"),
        Finding("baselines of block_attention", "fa2", True, "runs on cuda:0"),
    ]


def test_a_folder_without_records_is_refused(tmp_path, capsys):
    for folder in (tmp_path, tmp_path / "nowhere"):
        said = f"--data-dir must be a folder that holds records/, got {str(folder)!r}"
        assert __main__.main(["doctor", "--data-dir", str(folder)]) == 1
        assert said in " ".join(capsys.readouterr().out.split())
        assert __main__.main(["results", "--data-dir", str(folder)]) == 1
        assert capsys.readouterr() == ("", f"{said}\n")


def test_refused_records_are_named(tmp_path, capsys):
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "cut.json").write_text("{")
    finding = doctor.check_records(tmp_path)
    assert not finding.ok
    assert finding.detail.startswith("0 read, 1 refused; records/cut.json: not JSON")
    assert __main__.main(["doctor", "--data-dir", str(tmp_path)]) == 1
    assert "records/cut.json" in capsys.readouterr().out


@pytest.mark.parametrize("triton", ["raise ImportError('damaged')\n", ""])
def test_doctor_answers_when_triton_is_broken(tmp_path, triton):
    (tmp_path / "records").mkdir()
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(triton)
    path = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "lab")])
    command = [sys.executable, "-m", "gdpa_lab", "doctor", "--data-dir", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert CURE in done.stdout and "cannot be imported" in done.stdout


def test_reading_and_diagnosing_imports_no_torch_or_triton_first():
    names = "report/doctor", "report/results", "measuring/record", "measuring/system", "__main__"
    for name in names:
        tree = ast.parse((ROOT / "lab" / "gdpa_lab" / f"{name}.py").read_text())
        imported = {a.name for n in tree.body if isinstance(n, ast.Import) for a in n.names}
        imported |= {n.module for n in tree.body if isinstance(n, ast.ImportFrom)}
        assert not {m for m in imported if m.split(".")[0] in ("torch", "triton")}, name


def test_the_pins_are_those_of_the_environment():
    for name in ("lab/pyproject.toml", "environment.yml"):
        text = (ROOT / name).read_text()
        assert doctor.TORCH in text and doctor.FBTRITON in text, name


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="has an NVIDIA driver")
def test_no_gpu_is_no_damage(capsys, tmp_path):
    (tmp_path / "records").mkdir()
    assert __main__.main(["doctor", "--data-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("Here you can read the book and run every kernel")


@pytest.mark.parametrize(("capability", "gpu"), [((10, 0), "B200"), ((9, 0), "H200")])
def test_a_gpu_of_another_architecture(add, tmp_path, monkeypatch, capability, gpu):
    """A pretended GPU, and records that prove two rungs on a B200 and one in a direction of two."""
    stand_in = Rung("b90_stand_in", "", "", None, Requires((10, 0), only_major=True))
    monkeypatch.setitem(ladder.LADDERS, "gdpa", (*ladder.LADDERS["gdpa"], stand_in))
    monkeypatch.setitem(ladder._BY_IMPL, ("gdpa", stand_in.impl), stand_in)
    there = rung._module

    def own(impl, operator):
        return sys if impl == stand_in.impl else there(impl, operator)

    monkeypatch.setattr(rung, "_module", own)
    device = {
        "is_available": True, "current_device": 0, "get_device_name": f"NVIDIA {gpu}",
        "get_device_capability": capability,
    }  # fmt: skip
    for name, value in device.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(rung, "_gpu_capability", lambda index: capability)
    blocks = workload("block-fill70-2000")
    add(
        a_row(impl="v2_tma"), a_row(impl="v1_tiled_backward", direction="backward"),
        a_row(blocks, impl="v1_one_tile", math="softmax"),
        on=a_system(gpu="NVIDIA B200", compute_capability="10.0"),
        workloads={work.name: work.to_dict() for work in (workload("gdpa-self-full-1024"), blocks)},
    )  # fmt: skip
    found = doctor.findings(tmp_path)
    said = {(f.group.removeprefix(doctor.RUNGS), f.name): (f.ok, f.detail) for f in found}
    new = (True, f"runs on cuda:0, {doctor.UNVERIFIED}")
    assert said["gdpa", "v1_tiled"] == said["block_attention", "v1_one_tile"] == new
    assert said["gdpa", "v0_eager"] == said["gdpa", "reference"] == (True, "runs on cuda:0")
    if gpu == "B200":
        assert said["gdpa", "b90_stand_in"] == new
        assert said["gdpa", "v2_tma"] == (True, "runs on cuda:0")
        assert said["gdpa backward", "v1_tiled_backward"] == (True, "runs on cuda:0")
        assert said["gdpa", "v8_own_waits"] == (False, "needs sm_90, got sm_100")
        assert "gdpa up to b90_stand_in" in doctor.verdict(found)
    else:
        assert said["gdpa", "v8_own_waits"] == said["gdpa", "v2_tma"] == new
        assert said["gdpa", "b90_stand_in"] == (False, "needs sm_100, got sm_90")
    assert any(f.ok for f in found if f.group.startswith("baselines"))
