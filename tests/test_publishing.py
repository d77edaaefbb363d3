"""What a release needs: one address, one version, and workflows that try what is declared."""

import re
import subprocess
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from tests.test_pins import PYTHONS, project

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = ROOT / ".github" / "workflows"
PLACEHOLDERS = {
    "CITATION.cff": 1,
    "_config.yml": 2,
    "emulator/docs/limits.md": 1,
    "emulator/docs/use.md": 1,
    "emulator/pyproject.toml": 2,
    "pyproject.toml": 2,
}
"""Addresses by file, which change together; CONTRIBUTING.md has the command."""


def test_one_address_stands_in_these_files_alone():
    address = project()["urls"]["Repository"]
    host = re.match(r"https://[^/]+", address)[0]
    found = subprocess.run(
        ["git", "grep", "-oF", host, "--", ":!tests", ":!data"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    files = [line.partition(":")[0] for line in found]
    assert {name: files.count(name) for name in files} == PLACEHOLDERS
    for name in PLACEHOLDERS:
        for url in re.findall(rf"{re.escape(host)}[^\s\")>]*", (ROOT / name).read_text()):
            assert url.startswith(address), name


def test_a_release_has_one_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == project()["version"] == project("emulator")["version"]


def test_the_matrix_tries_what_is_declared():
    """Each Python, the least PyTorch and those after it, with fbtriton and without."""
    jobs = yaml.safe_load((WORKFLOWS / "install.yml").read_text())["jobs"]
    matrix = jobs["nightly"]["strategy"]["matrix"]
    assert {*matrix["python"]} == {python.rpartition(".")[0] for python in PYTHONS}
    assert matrix["compiler"] == ["fbtriton", "none"]
    (torch,) = (r for r in map(Requirement, project()["dependencies"]) if r.name == "torch")
    assert f"torch>={min(map(Version, matrix['torch']))}".startswith(str(torch))
    assert all(map(torch.specifier.contains, matrix["torch"]))
    for cell in jobs["change"]["strategy"]["matrix"]["include"]:
        assert all(cell[name] in matrix[name] for name in ("python", "torch", "compiler"))


def test_publishing_asks_for_no_secret():
    text = (WORKFLOWS / "release.yml").read_text()
    publish = yaml.safe_load(text)["jobs"]["publish"]
    assert "secrets." not in text and publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == "build" and publish["if"] == "github.ref_type == 'tag'"
