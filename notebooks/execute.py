"""Execute notebooks/<part>/<slug>.py with papermill, into book/executed/<part>/<slug>.ipynb.

A file whose name begins with an underscore is no chapter: it is a module of the chapters beside it.

    python notebooks/execute.py --mode replay
    python notebooks/execute.py --mode measure --notebooks "forward/results block" --device cuda:0

A notebook that fails leaves its output in book/executed/failed/ and none elsewhere, so the book
never shows it. Ids of cells are deterministic and timestamps are dropped: two runs that
compute the same write the same bytes. A replay of all leaves out the chapters whose source, data,
package and pins are those of their last run; `make clean` forgets them. A chapter whose header says
`reads: chapters` runs after the others, and again when one of them has changed.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import json
import os
import re
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import jupytext
import nbformat
import papermill
import yaml
from papermill.exceptions import PapermillExecutionError
from traitlets.config import Config

import forks

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "notebooks"
EXECUTED = ROOT / "book" / "executed"
FIGURES = ROOT / "book" / "extra" / "figures"
CONTENTS = ROOT / "_toc.yml"
WORKERS = {"replay": 2, "measure": 1, "compare": 1}
INPUTS = ("data", "gdpa_kernels", "lab/gdpa_lab", "emulator/tritonemu", "notebooks/_lib")
OPTIONS = {"name", "caption", "alt"}
PROMISE = ":::{admonition} In this chapter"
BESIDES = "# what the cell above shows besides"  # a cell without source is not rendered
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


class NotebookError(ValueError):
    """A notebook that cannot be executed as it is written."""


def read(path: Path) -> nbformat.NotebookNode:
    """The notebook in `path` (py:percent), its header and `# |` lines turned into metadata."""
    notebook = jupytext.read(path, fmt="py:percent")
    if notebook.cells and notebook.cells[0].cell_type == "raw":
        notebook.metadata.update(yaml.safe_load(notebook.cells.pop(0).source.strip("-\n")))
    notebook.metadata["kernelspec"] = dict(KERNEL)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            take_options(cell, path)
    return notebook


def take_options(cell: nbformat.NotebookNode, path: Path) -> None:
    """Make a captioned figure of a cell that begins with `# |` lines: YAML, name, caption, alt."""
    lines = cell.source.splitlines()
    count = next((i for i, line in enumerate(lines) if not line.startswith("# |")), len(lines))
    if count == 0:
        return
    options = yaml.safe_load("\n".join(line[3:] for line in lines[:count]))
    if not isinstance(options, dict) or set(options) != OPTIONS:
        raise NotebookError(f"{path.name}: # | lines must set {sorted(OPTIONS)}, got {options!r}")
    name, caption, alt = (" ".join(str(options[o]).split()) for o in ("name", "caption", "alt"))
    cell.metadata["mystnb"] = {"figure": {"name": name, "caption": caption}, "image": {"alt": alt}}
    cell.source = "\n".join(lines[count:])


def declared_parameters(notebook: nbformat.NotebookNode, path: Path) -> set[str]:
    """Names assigned in the one cell tagged `parameters`."""
    cells = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(cells) != 1:
        raise NotebookError(f"{path.name}: must have one parameters cell, got {len(cells)}")
    body = ast.parse(cells[0].source).body
    targets = [target for s in body if isinstance(s, ast.Assign) for target in s.targets]
    targets += [s.target for s in body if isinstance(s, ast.AnnAssign)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def slug(path: Path) -> str:
    """The name of a notebook: part and file, e.g. "forward/results"."""
    return path.relative_to(SOURCES).with_suffix("").as_posix()


def chapters() -> list[Path]:
    """All notebooks, in the order of _toc.yml, which must name each of them."""
    named = re.findall(r"file: executed/(\S+)", CONTENTS.read_text(encoding="utf-8"))
    there = {slug(path): path for path in sorted(SOURCES.glob("[!_]*/[!_]*.py"))}
    if not there or set(named) != set(there):
        raise NotebookError(
            f"_toc.yml must name every notebook: {', '.join(there) or 'none is there'}; "
            f"got {', '.join(named)}"
        )
    return [there[name] for name in named]


def select(mode: str, names: list[str]) -> list[Path]:
    """The notebooks with these names, a part standing for all in it; without any, those of `mode`.

    For replay all of them; for measure and compare those whose header says `measures: true`.
    """
    paths = chapters()
    slugs = [slug(path) for path in paths]
    known = {*slugs, *(name.partition("/")[0] for name in slugs)}
    if unknown := [name for name in names if name not in known]:
        raise NotebookError(
            f"--notebooks must be among {', '.join(slugs)}, or a part, got {' '.join(unknown)}"
        )

    def is_meant(path: Path, name: str) -> bool:
        if name in names:
            return True
        if names and name.partition("/")[0] not in names:
            return False
        return mode == "replay" or read(path).metadata.get("measures") is True

    return [path for path, name in zip(paths, slugs, strict=True) if is_meant(path, name)]


@functools.cache
def shared_inputs() -> str:
    """A hash of what every chapter depends on: data, package, tools, pins and this interpreter."""
    digest = hashlib.sha256(sys.version.encode())
    files = [Path(__file__), ROOT / "constraints.txt"]
    for folder in (*INPUTS, "notebooks/tools/kernels"):
        files += (file for file in (ROOT / folder).rglob("*") if file.is_file())
    for file in sorted(file for file in files if file.suffix != ".pyc"):
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def inputs(path: Path) -> str:
    """A hash of what decides the output of a replay: a chapter, its part's modules, the rest."""
    digest = hashlib.sha256(path.read_bytes() + shared_inputs().encode())
    for module in sorted(path.parent.glob("_*.py")):
        digest.update(module.read_bytes())
    if reads_chapters(path):
        target = EXECUTED / f"{slug(path)}.ipynb"
        for other in sorted(set(EXECUTED.glob("*/*.ipynb")) - {target}):
            digest.update(other.read_bytes())
    return digest.hexdigest()


def reads_chapters(path: Path) -> bool:
    """Say whether a notebook shows what the others have displayed."""
    return read(path).metadata.get("reads") == "chapters"


def is_current(path: Path) -> bool:
    """Say whether the page is what a replay of this source would give."""
    target = EXECUTED / f"{slug(path)}.ipynb"
    if not target.exists():
        return False
    metadata = json.loads(target.read_text(encoding="utf-8")).get("metadata", {})
    return metadata.get("provenance", {}).get("inputs") == inputs(path)


def part_captions(notebook: nbformat.NotebookNode) -> None:
    """Leave a captioned cell its picture; what else it shows goes to a cell behind it, since every
    output of such a cell would get the caption."""
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        if "mystnb" not in cell.metadata:
            continue
        pictures = [x for x in cell.outputs if "image/svg+xml" in x.get("data", {})]
        rest = [x for x in cell.outputs if x not in pictures[:1]]
        if pictures and rest:
            cell.outputs = pictures[:1]
            hidden = {"tags": ["remove-input"]}
            cells.append(nbformat.v4.new_code_cell(BESIDES, outputs=rest, metadata=hidden))
    notebook.cells = cells


def figure_first(notebook: nbformat.NotebookNode) -> None:
    """Move the figure that answers a chapter's question to right behind it: before what the reader
    will do, and before imports. A figure that text leads to stays."""
    head, *rest = notebook.cells
    question, mark, promise = head.source.partition(PROMISE)
    first = next((i for i, cell in enumerate(rest) if "mystnb" in cell.metadata), None)
    if first is None or not mark or any(c.cell_type == "markdown" for c in rest[:first]):
        return
    end = first + 1 + any(cell.source == BESIDES for cell in rest[first + 1 : first + 2])
    head.source = question.rstrip()
    promised = nbformat.v4.new_markdown_cell(mark + promise)
    notebook.cells = [head, *rest[first:end], promised, *rest[:first], *rest[end:]]


def join_streams(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Join what is printed in a row into one output: how much of it arrives at a time differs."""
    joined: list[nbformat.NotebookNode] = []
    for output in outputs:
        last = joined[-1] if joined else {}
        if output.get("name") and output.get("name") == last.get("name"):  # a stream has a name
            last.text += output.text
        else:
            joined.append(output)
    return joined


def finish(notebook: nbformat.NotebookNode, path: Path, parameters: dict[str, str]) -> None:
    """Drop what differs from run to run; keep where the notebook comes from."""
    for cell in notebook.cells:
        if "outputs" in cell:
            cell.outputs = join_streams(cell.outputs)
    part_captions(notebook)
    figure_first(notebook)
    for index, cell in enumerate(notebook.cells):
        cell.id = f"cell-{index:03d}"
        for name in ("papermill", "execution"):
            cell.metadata.pop(name, None)
        cell.source = cell.source.replace("  # fmt: skip", "")  # is of the source, not of the page
        tags = cell.metadata.get("tags", [])
        if {"parameters", "injected-parameters"} & set(tags):
            cell.metadata["tags"] = sorted({*tags, "remove-cell"})
    notebook.metadata.pop("papermill")
    notebook.metadata["provenance"] = {"notebook": f"notebooks/{slug(path)}.py", **parameters}
    if parameters["mode"] == "replay":
        notebook.metadata["provenance"]["inputs"] = inputs(path)


def execute(path: Path, parameters: dict[str, str]) -> tuple[str, float, str]:
    """Run one notebook; its name, the seconds it took, and what went wrong ("" if nothing did)."""
    start = time.perf_counter()
    name = slug(path)
    target = EXECUTED / f"{name}.ipynb"
    failed = EXECUTED / "failed" / f"{name}.ipynb"
    for old in (target, failed):
        old.parent.mkdir(parents=True, exist_ok=True)
        old.unlink(missing_ok=True)
    for old in FIGURES.glob(f"{name.replace('/', '-')}-*.csv"):
        old.unlink()
    problem = ""
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "source.ipynb", Path(folder) / "output.ipynb"
        sockets = {
            "transport": "ipc",
            "ip": f"{folder}/kernel",
        }  # TCP ports of two kernels can clash
        try:
            notebook = read(path)
            if missing := sorted(set(parameters) - declared_parameters(notebook, path)):
                raise NotebookError(
                    f"{path.name}: the parameters cell must assign {', '.join(parameters)}, "
                    f"got no {', '.join(missing)}"
                )
            nbformat.write(notebook, source)
            papermill.execute_notebook(
                source,
                output,
                parameters=parameters,
                cwd=ROOT,
                progress_bar=False,
                stderr_file=None if parameters["mode"] == "replay" else sys.stderr,  # as it comes
                config=Config({"KernelManager": sockets}),
            )
            notebook = nbformat.read(output, as_version=4)
            finish(notebook, path, parameters)
            nbformat.write(notebook, target)
        except PapermillExecutionError as error:
            problem = f"cell {error.cell_index}: {error.ename}: {error.evalue}\n{error.source}"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem and output.exists():
            failed.write_bytes(output.read_bytes())
    return name, time.perf_counter() - start, problem


def remove_strangers(paths: list[Path]) -> None:
    """Remove pages and data of figures that belong to no chapter."""
    slugs = {slug(path) for path in paths}
    for old in EXECUTED.glob("*/*.ipynb"):
        if old.relative_to(EXECUTED).with_suffix("").as_posix() not in slugs:
            old.unlink()
    for old in FIGURES.glob("*.csv"):
        if old.stem.rpartition("-")[0] not in {name.replace("/", "-") for name in slugs}:
            old.unlink()


def use_this_interpreter(folder: Path, mode: str) -> None:
    """Make `python3` mean sys.executable with the repository on its path, whatever is installed."""
    kernel = folder / "kernels" / "python3"
    kernel.mkdir(parents=True)
    folders = (ROOT, ROOT / "emulator", ROOT / "lab", ROOT / "notebooks")
    path = os.pathsep.join(filter(None, (*map(str, folders), os.environ.get("PYTHONPATH"))))
    environment = {"PYTHONPATH": path, "PYTHONHASHSEED": "0"}
    if mode == "replay":
        environment["OMP_NUM_THREADS"] = "1"
    # Jupyter interrupts a kernel before it ends it, and one that has not quite finished logs that
    # as an error. What goes wrong in a cell is not logged: it comes back as the cell's answer.
    quiet = "--log-level=CRITICAL"
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", quiet]
    spec = {"argv": argv, "env": environment, **KERNEL}
    if mode == "replay":
        os.environ.update(environment)
        spec["metadata"] = forks.METADATA
    (kernel / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
    os.environ["JUPYTER_PATH"] = str(folder)
    os.environ["IPYTHONDIR"] = str(folder / "ipython")


def missing_device(device: str) -> str | None:
    """Why nothing can be measured on this device, or None."""
    if not device.startswith("cuda"):
        return None
    import torch

    if torch.cuda.is_available():
        return None
    command = f"{os.path.relpath(sys.executable)} -m gdpa_lab doctor"
    return f"--device must be a GPU that PyTorch sees, got {device!r} and none; why: {command}"


def compared(paths: list[Path]) -> list[str]:
    """Lines of one table, in Markdown: this machine's rates beside ours, of all these chapters."""
    lines: list[str] = []
    for path in paths:
        target = EXECUTED / f"{slug(path)}.ipynb"
        cells = nbformat.read(target, as_version=4).cells if target.exists() else []
        for output in (output for cell in cells for output in cell.get("outputs", [])):
            if output.get("metadata", {}).get("compared"):
                table = output.data["text/markdown"].splitlines()
                lines += table[2:] if lines else table
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=sorted(WORKERS), default="replay")
    parser.add_argument("--notebooks", default="", help='names, such as "forward/results block"')
    parser.add_argument("--device", help="default: cpu for replay, otherwise cuda:0")
    parser.add_argument("--data-dir", default="data", help="relative to the repository")
    options = parser.parse_args()
    device = options.device or ("cpu" if options.mode == "replay" else "cuda:0")
    parameters = {"mode": options.mode, "device": device, "data_dir": options.data_dir}
    try:
        paths = select(options.mode, options.notebooks.split())
    except NotebookError as error:
        parser.error(str(error))
    if problem := missing_device(device):
        parser.error(problem)
    if not options.notebooks:
        remove_strangers(chapters())
        if options.mode == "replay":
            known, paths = paths, [path for path in paths if not is_current(path)]
            if paths:
                paths += [x for x in known if reads_chapters(x) and x not in paths]
            print(
                f"{len(known) - len(paths)} of {len(known)} chapters are as they were", flush=True
            )
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        use_this_interpreter(Path(folder), options.mode)
        for late in (False, True):
            with ThreadPoolExecutor(WORKERS[options.mode]) as pool:
                now = [path for path in paths if reads_chapters(path) == late]
                runs = [pool.submit(execute, path, parameters) for path in now]
                for run in as_completed(runs):
                    name, seconds, problem = run.result()
                    failures += bool(problem)
                    said = "failed" if problem else "ok"
                    print(f"{name:<40} {seconds:7.1f} s  {said}", flush=True)
                    if problem:
                        print(textwrap.indent(problem, "    "), flush=True)
    if options.mode == "compare":
        print("\n".join(["", *compared(paths)]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
