"""The three lists of versions agree: lab/pyproject.toml decides, the others repeat."""

import re
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import gdpa_kernels

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10.13", "3.11.0", "3.11.7", "3.12.1", "3.13.0", "3.14.0")


def pins(lines: list[str], python: str) -> dict[str, str]:
    """Name -> "==version" of the requirements that hold for `python` on Linux."""
    environment = {
        "python_version": ".".join(python.split(".")[:2]),
        "python_full_version": python,
        "sys_platform": "linux",
        "platform_machine": "x86_64",
        "implementation_name": "cpython",
    }
    found = {}
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{name} is pinned twice for Python {python}"
            found[name] = str(requirement.specifier)
    return found


def project(folder: str = ".") -> dict:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def declared() -> list[str]:
    lab = project("lab")
    lines = [*lab["dependencies"], *(x for xs in lab["optional-dependencies"].values() for x in xs)]
    return [line for line in lines if not line.startswith(("tritonemu==", "gdpa-kernels=="))]


def constrained() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_every_version_is_exact():
    for line in (*declared(), *constrained()):
        requirement = Requirement(line)
        assert re.fullmatch(r"==[0-9][0-9a-z.]*", str(requirement.specifier)), line
        assert requirement.url is None, line


def test_the_library_takes_ranges_that_hold_the_pinned_versions():
    exact = pins(declared(), "3.11.7")
    needed = [*project()["dependencies"], *project()["optional-dependencies"]["examples"]]
    ranges = {r.name: r.specifier for r in map(Requirement, needed)}
    assert set(ranges) == {"torch", "fbtriton", "numpy", "pandas", "tqdm"}
    for name, allowed in ranges.items():
        assert allowed.contains(exact[name].removeprefix("==")) and "==" not in str(allowed)


@pytest.mark.parametrize(
    ("system", "expected"), [("linux", True), ("darwin", False), ("win32", False)]
)
def test_fbtriton_is_asked_for_where_it_has_wheels(system, expected):
    (fbtriton,) = (r for r in map(Requirement, project()["dependencies"]) if r.name == "fbtriton")
    assert fbtriton.marker.evaluate({"sys_platform": system}) is expected


def test_what_users_install_names_no_package_that_a_stranger_could_publish():
    """The lab does: it is installed from a checkout, beside both."""
    for folder in (".", "emulator"):
        listed = project(folder)
        extras = [x for xs in listed.get("optional-dependencies", {}).values() for x in xs]
        names = {canonicalize_name(Requirement(x).name) for x in (*listed["dependencies"], *extras)}
        assert not names & {"tritonemu", "gdpa-kernels", "gdpa-lab"}


def test_the_packages_are_those_of_this_repository():
    emulator = f"tritonemu=={project('emulator')['version']}"
    library = f"gdpa-kernels=={project()['version']}"
    assert {emulator, library} < {*project("lab")["dependencies"]}


def test_the_library_its_citation_and_its_changes_are_of_one_version():
    version = project()["version"]
    assert gdpa_kernels.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("python", PYTHONS)
def test_constraints_repeat_pyproject(python):
    ours, all_of_them = pins(declared(), python), pins(constrained(), python)
    assert {name: all_of_them.get(name) for name in ours} == ours


def test_environment_repeats_pyproject():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    python = next(entry.removeprefix("python=") for entry in conda if entry.startswith("python="))
    (pip,) = (entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    assert pip[0] == "--constraint=constraints.txt"
    assert pins(pip[1:], f"{python}.9") == pins(declared(), f"{python}.9")


@pytest.mark.parametrize(
    "path", ["Makefile", "book/reproduce.md", "gdpa_kernels/calling/compiler.py"]
)
def test_the_repair_command_installs_the_pinned_fbtriton(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    written = re.findall(r"fbtriton(==[0-9.]*[0-9])", text)
    assert set(written) <= {pins(declared(), "3.11.7")["fbtriton"]}
    assert written


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=str)
def test_actions_are_pinned_by_commit(path):
    uses = re.findall(r"uses: (.*)", path.read_text(encoding="utf-8"))
    assert uses
    for action in uses:
        assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action
