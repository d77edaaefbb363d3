"""Both packages as others get them: built, installed in a fresh environment, used there.

Each environment holds what the metadata of its packages asks for, linked from this one, and nothing
else: pip refuses what is missing, and Python what is not declared. Only `make packages` runs this.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]

BUILD = "import sys, setuptools.build_meta as build; build.build_sdist(sys.argv[1])"


def run(*command: object, cwd: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run without this environment's variables of Python."""
    clean = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
    ran = subprocess.run(
        list(map(str, command)), cwd=cwd, env=clean, capture_output=True, text=True
    )
    assert ran.returncode == status, f"{ran.stdout}\n{ran.stderr}"
    return ran


def pip(*arguments: object, cwd: Path) -> None:
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, cwd=cwd)


@dataclass(frozen=True)
class Package:
    sdist: Path
    wheel: Path

    def files(self) -> tuple[set[str], set[str]]:
        """Names in the sdist, below its folder, and in the wheel."""
        with tarfile.open(self.sdist) as packed:
            inside = {name.partition("/")[2] for name in packed.getnames()}
        return inside, set(zipfile.ZipFile(self.wheel).namelist())

    def metadata(self) -> str:
        with zipfile.ZipFile(self.wheel) as packed:
            (name,) = (n for n in packed.namelist() if n.endswith(".dist-info/METADATA"))
            return packed.read(name).decode()


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Package]:
    """Sdists of a copy of what git tracks, and wheels of these sdists."""
    folder = tmp_path_factory.mktemp("built")
    tracked = run("git", "ls-files", "-z", cwd=ROOT).stdout.split("\0")[:-1]
    for name in tracked:
        if name.startswith(("gdpa_kernels/", "emulator/")) or "/" not in name:
            copy = folder / "source" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy)
    packages = {}
    for name, source in (("gdpa_kernels", "source"), ("tritonemu", "source/emulator")):
        run(sys.executable, "-c", BUILD, folder, cwd=folder / source)
        (sdist,) = folder.glob(f"{name}-*.tar.gz")
        pip("wheel", "--no-deps", "--no-build-isolation", "-w", folder, sdist, cwd=folder)
        (wheel,) = folder.glob(f"{name}-*.whl")
        packages[name] = Package(sdist, wheel)
    return packages


def needed(*requirements: str) -> set[str]:
    """The distributions of this environment that requirements ask for, and what those ask for."""
    found, todo = set(), [Requirement(line) for line in requirements]
    while todo:
        requirement = todo.pop()
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name not in found:
            found.add(requirement.name)
            todo += map(Requirement, distribution(requirement.name).requires or ())
    return found


@dataclass(frozen=True)
class Environment:
    """A fresh environment elsewhere."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def execute(self, code: str) -> str:
        return run(self.python, "-c", code, cwd=self.folder).stdout


def environment(folder: Path, built: dict[str, Package], wanted: str, *roots: str) -> Environment:
    """`wanted`, names with blanks between, installed beside links to what `roots` need."""
    venv.create(folder, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    for name in needed(*roots):
        there = distribution(name)
        for part in {file.parts[0] for file in there.files} - {"..", "__pycache__"}:
            if not (site / part).exists():
                (site / part).symlink_to(there.locate_file(part))
    made = Environment(folder)
    wheels = built["gdpa_kernels"].wheel.parent
    # No index: a dependency that is not declared in `roots` too ends this with pip's message.
    options = ("--no-index", "--find-links", wheels)
    pip("--python", made.python, "install", *options, *wanted.split(), cwd=folder)
    return made


LIBRARY = ("torch", "fbtriton", "numpy")


@pytest.fixture(scope="module")
def library(tmp_path_factory, built) -> Environment:
    return environment(tmp_path_factory.mktemp("library"), built, "gdpa-kernels", *LIBRARY)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory, built) -> Environment:
    folder = tmp_path_factory.mktemp("emulator")
    return environment(
        folder, built, "gdpa-kernels tritonemu", *LIBRARY, "greenlet", "pytest", "pip"
    )


@pytest.mark.parametrize("name", ["gdpa_kernels", "tritonemu"])
def test_licence_types_and_data_are_inside(built, name):
    package = built[name]
    sdist, wheel = package.files()
    metadata = package.metadata()
    for file in ("LICENSE", "NOTICE"):
        assert file in sdist and f"License-File: {file}\n" in metadata
        assert any(re.fullmatch(rf"{name}-[^/]*\.dist-info/licenses/{file}", n) for n in wheel)
    folder = ROOT / ("." if name == "gdpa_kernels" else "emulator")
    tracked = run("git", "ls-files", name, cwd=folder).stdout.split()
    assert f"{name}/py.typed" in tracked
    assert set(tracked) <= sdist and set(tracked) <= wheel
    assert "CHANGELOG.md" in sdist
    tops = {n.partition("/")[0] for n in wheel}
    assert tops == {name, package.sdist.name.replace(".tar.gz", ".dist-info")}


@pytest.mark.parametrize("name", ["gdpa_kernels", "tritonemu"])
def test_the_metadata_says_whose_and_where(built, name):
    metadata = built[name].metadata()
    address = re.search(r"^repository-code: (\S+)", (ROOT / "CITATION.cff").read_text(), re.M)[1]
    for line in (
        "Author: The gdpa-kernels authors",
        "License-Expression: Apache-2.0",
        "Classifier: Typing :: Typed",
        f"Project-URL: Repository, {address}",
    ):
        assert f"{line}\n" in metadata


IMPORTED = """
import sys, torch
before = set(sys.modules)
import gdpa_kernels
found = {name: getattr(sys.modules[name], "__file__", None) for name in set(sys.modules) - before}
print(*{name.partition(".")[0] for name in found if "site-packages" in str(found[name])})
print(gdpa_kernels.__file__)
"""


def test_importing_the_library_imports_torch_triton_and_numpy_alone(library):
    packages, file = library.execute(IMPORTED).splitlines()
    assert set(packages.split()) <= {"gdpa_kernels", "torch", "triton", "numpy"}
    assert file.startswith(str(library.folder))


EVERY_MODULE = """
import importlib, pkgutil, gdpa_kernels
for module in pkgutil.walk_packages(gdpa_kernels.__path__, "gdpa_kernels."):
    importlib.import_module(module.name)
    print(module.name)
"""


def test_no_module_of_the_library_needs_more_than_it_declares(library):
    modules = library.execute(EVERY_MODULE).split()
    assert "gdpa_kernels.gdpa.api" in modules and "gdpa_kernels.norms.api" in modules
    missing = library.execute(
        "from importlib.util import find_spec\n"
        "names = 'pandas matplotlib jsonschema yaml pynvml tritonemu'\n"
        "print(*[name for name in names.split() if find_spec(name)])"
    )
    assert missing == "\n"


def test_what_it_promises_on_a_cpu_holds(library):
    smoke = ROOT / "tests" / "packages" / "smoke.py"
    assert run(library.python, smoke, "fbtriton", cwd=library.folder).stdout.endswith(" runs\n")


def test_the_example_of_the_readme_runs(library):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert library.execute(f"{example}\nprint(*out.shape)") == "8 4 64\n"


def test_the_examples_run_with_their_extra(tmp_path, built):
    roots = *LIBRARY, "pandas", "tqdm"
    made = environment(tmp_path / "examples", built, "gdpa-kernels[examples]", *roots)
    script, quick = ROOT / "examples" / "train.py", ROOT / "examples" / "quick.txt"
    run(made.python, script, f"@{quick}", "--steps", "2", "--eval-every", "2", cwd=tmp_path)
    run(made.python, ROOT / "examples" / "torchrec_embeddings.py", "--help", cwd=tmp_path)


def test_the_examples_of_the_emulator_run(emulator):
    """Its own tests of its README, on the installed package, and the command as installed."""
    folder = emulator.folder / "elsewhere"
    (folder / "tests").mkdir(parents=True)
    (folder / "pytest.ini").write_text("[pytest]\n")  # no other project's
    shutil.copy(ROOT / "emulator" / "README.md", folder)
    shutil.copy(ROOT / "emulator" / "tests" / "test_readme.py", folder / "tests")
    ran = run(emulator.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=folder)
    assert re.search(r"^\d+ passed in", ran.stdout, re.M)

    program, _, fixture = re.findall(
        r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL
    )
    (folder / "racy.py").write_text(program)
    found = run(emulator.folder / "bin" / "tritonemu", "racy.py", cwd=folder, status=1)
    assert found.stderr.startswith("Race (schedule modelled): racy.py:10:")

    mended = "tl.atomic_add(sum_ptr, part)"
    kernel = program.partition("if __name__")[0]
    right = kernel.replace("tl.store(sum_ptr, tl.load(sum_ptr) + part)", mended)
    for definition, status, seen in ((kernel, 1, "errors.Race"), (right, 0, "3 passed")):
        (folder / "test_fixture.py").write_text(f"{definition}\n{fixture}")
        asked = ("--fake-gpu", "-p", "no:cacheprovider", "test_fixture.py")
        plugin = ("-m", "pytest", "-p", "tritonemu.pytest_plugin")
        assert seen in run(emulator.python, *plugin, *asked, cwd=folder, status=status).stdout


def test_the_steps_of_the_action_run(emulator, built):
    """As GitHub runs them, with the wheel in place of the action's folder."""
    action = yaml.safe_load((ROOT / "emulator" / "action.yml").read_text())
    folder = emulator.folder / "action"
    folder.mkdir()
    program = re.findall(r"```python\n(.*?)```", (ROOT / "emulator/README.md").read_text(), re.S)[0]
    (folder / "racy.py").write_text(program)
    right = program.replace(
        "tl.store(sum_ptr, tl.load(sum_ptr) + part)", "tl.atomic_add(sum_ptr, part)"
    )
    (folder / "right.py").write_text(f"import sys\n{right}\nsys.stdin.read()\n")  # not the list

    def steps(programs: str) -> list[subprocess.CompletedProcess[str]]:
        given = {"programs": programs, "triton": "", "sarif": "found"}
        assert given.keys() == action["inputs"].keys()
        ran = []
        for step in action["runs"]["steps"]:
            texts = {
                name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda found: given[found[1]], text)
                for name, text in step["env"].items()
            }
            path = f"{emulator.folder / 'bin'}:{os.environ['PATH']}"
            variables = {"PATH": path, "GITHUB_ACTION_PATH": str(built["tritonemu"].wheel)}
            ran.append(
                subprocess.run(
                    ["bash", "-eo", "pipefail", "-c", step["run"]],
                    cwd=folder,
                    text=True,
                    env=variables | {"PIP_NO_INDEX": "1"} | texts,
                    capture_output=True,
                )  # fmt: skip
            )
        return ran

    for programs, status in (
        ("right.py\n", 0),
        ("\nright.py\n--arch sm_100 racy.py\n", 1),
        ("", 2),
    ):
        installed, ended = steps(programs)
        assert installed.returncode == 0, installed.stderr
        assert ended.returncode == status, ended.stdout + ended.stderr
    (run_,) = json.loads((folder / "found" / "2.sarif").read_text())["runs"]
    (result,) = run_["results"]
    place = result["locations"][0]["physicalLocation"]
    assert (result["ruleId"], place["artifactLocation"]["uri"]) == ("Race", "racy.py")
    assert place["region"]["startLine"] == 10
    assert json.loads((folder / "found" / "1.sarif").read_text())["runs"][0]["results"] == []
