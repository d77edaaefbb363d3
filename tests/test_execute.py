"""notebooks/execute.py: what it accepts, what it leaves behind, and that runs repeat exactly."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]

HEADER = """# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # A page

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

"""
FIGURE = """# %% tags=["remove-input"]
# | name: fig-a
# | caption: >
# |   One: two,
# |   three.
# | alt: A line that rises.
value = 1
"""


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """The module, with its folders in `tmp_path` and what it sets in the environment undone."""
    monkeypatch.syspath_prepend(ROOT / "notebooks")
    spec = importlib.util.spec_from_file_location("execute", ROOT / "notebooks" / "execute.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, folder in (("SOURCES", "notebooks"), ("EXECUTED", "executed"), ("FIGURES", "csv")):
        monkeypatch.setattr(module, name, tmp_path / folder)
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(module, "CONTENTS", tmp_path / "_toc.yml")
    changed = ("JUPYTER_PATH", "IPYTHONDIR", "PYTHONPATH", "PYTHONHASHSEED", "OMP_NUM_THREADS")
    for name in changed:
        monkeypatch.setenv(name, os.environ.get(name, ""))
    return module


def write(runner, name: str, text: str) -> Path:
    path = runner.SOURCES / "part" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    with runner.CONTENTS.open("a", encoding="utf-8") as contents:
        contents.write(f"      - file: executed/part/{path.stem}\n")
    return path


def test_options_become_a_captioned_figure(runner):
    notebook = runner.read(write(runner, "a.py", HEADER + FIGURE))
    cell = notebook.cells[-1]
    assert cell.metadata["mystnb"] == {
        "figure": {"name": "fig-a", "caption": "One: two, three."},
        "image": {"alt": "A line that rises."},
    }
    assert cell.source == "value = 1"
    assert cell.metadata["tags"] == ["remove-input"]


@pytest.mark.parametrize("line", ["# | name: fig-a", "# | label: fig-a", "# | only words"])
def test_incomplete_options_are_refused(runner, line):
    path = write(runner, "a.py", f"{HEADER}# %%\n{line}\nvalue = 1\n")
    with pytest.raises(runner.NotebookError, match=r"a\.py: # \| lines must set"):
        runner.read(path)


def test_parameters_are_the_names_assigned_in_their_cell(runner):
    path = write(runner, "a.py", HEADER.replace('mode = "replay"', 'mode: str = "replay"'))
    found = runner.declared_parameters(runner.read(path), path)
    assert found == {"mode", "device", "data_dir"}
    path = write(runner, "b.py", "# %%\nvalue = 1\n")
    with pytest.raises(runner.NotebookError, match="one parameters cell, got 0"):
        runner.declared_parameters(runner.read(path), path)


def test_measuring_selects_the_notebooks_that_measure(runner):
    other = write(runner, "b.py", HEADER.replace("# measures: true\n", ""))
    measuring = write(runner, "a.py", HEADER)
    assert runner.select("replay", []) == [other, measuring], "the order of _toc.yml"
    assert runner.select("measure", []) == runner.select("measure", ["part"]) == [measuring]
    assert [cell.cell_type for cell in runner.read(measuring).cells] == ["markdown", "code"]
    assert runner.select("measure", ["part/b"]) == [other]
    with pytest.raises(runner.NotebookError, match="among part/b, part/a, or a part, got c"):
        runner.select("replay", ["part/a", "c"])
    (runner.SOURCES / "part" / "c.py").write_text(HEADER)
    with pytest.raises(runner.NotebookError, match="_toc.yml must name every notebook"):
        runner.select("replay", [])


def run(runner, monkeypatch, capfd, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["execute.py", *arguments])
    return runner.main(), capfd.readouterr().out


def test_a_chapter_that_reads_the_others_runs_after_them_and_again(runner, monkeypatch, capfd):
    code = "# %%\nfrom pathlib import Path\nprint(len(list(Path({!r}).glob('part/*.ipynb'))))\n"
    header = HEADER.replace("measures: true", "reads: chapters")
    write(runner, "a.py", header + code.format(str(runner.EXECUTED)))
    other = write(runner, "b.py", HEADER)
    status, out = run(runner, monkeypatch, capfd)
    ran = [line.split()[0] for line in out.splitlines()[1:]]
    assert status == 0 and ran == ["part/b", "part/a"]
    page = nbformat.read(runner.EXECUTED / "part" / "a.ipynb", as_version=4)
    assert page.cells[-1].outputs[0].text == "1\n", "the other chapter was there"
    assert run(runner, monkeypatch, capfd)[1] == "2 of 2 chapters are as they were\n"
    other.write_text(HEADER + "# %%\nnew = 1\n", encoding="utf-8")
    out = run(runner, monkeypatch, capfd)[1]
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["part/b", "part/a"]


def test_two_runs_write_the_same_bytes_and_keep_the_origin(runner, monkeypatch, capfd):
    text = HEADER + '# %%\nimport sys\nprint(mode, device, sys.executable)\n{1: "a"}\n'
    text += "# %%\nimport time\nprint(1, flush=True)\ntime.sleep(0.5)\nprint(2)\n"
    write(runner, "a.py", text)
    (runner.EXECUTED / "part").mkdir()
    (runner.EXECUTED / "part" / "removed.ipynb").write_text("{}")
    (runner.FIGURES / "removed.csv").write_text("")
    status, out = run(runner, monkeypatch, capfd)
    assert status == 0
    assert out.splitlines()[0] == "0 of 1 chapters are as they were"
    assert out.splitlines()[1].split()[0] == "part/a"
    assert out.split()[-1] == "ok"
    page = runner.EXECUTED / "part" / "a.ipynb"
    first = page.read_bytes()
    said = nbformat.reads(first.decode(), as_version=4).cells[-1].outputs
    assert [output.text for output in said] == ["1\n2\n"], "one output, whenever it was flushed"
    page.unlink()
    assert run(runner, monkeypatch, capfd)[0] == 0
    assert page.read_bytes() == first
    assert [path.name for path in runner.EXECUTED.glob("*/*.ipynb")] == ["a.ipynb"]
    assert list(runner.FIGURES.iterdir()) == []

    notebook = nbformat.reads(first.decode(), as_version=4)
    assert notebook.metadata["provenance"] == {
        "notebook": "notebooks/part/a.py",
        "mode": "replay",
        "device": "cpu",
        "data_dir": "data",
        "inputs": runner.inputs(runner.SOURCES / "part" / "a.py"),
    }
    printed = notebook.cells[-2].outputs[0].text
    assert printed.split() == ["replay", "cpu", sys.executable]
    shown = [c for c in notebook.cells if c.cell_type == "code"]
    assert ["remove-cell" in c.metadata.get("tags", []) for c in shown] == [
        True,
        True,
        False,
        False,
    ]
    assert json.loads(first)["cells"][0]["id"] == "cell-000"


def test_the_caption_is_of_the_picture_alone(runner, monkeypatch, capfd):
    shown = (
        "from IPython.display import SVG\nprint('before')\ndisplay(SVG('<svg/>'))\nprint('after')\n"
    )
    write(runner, "a.py", HEADER + FIGURE.replace("value = 1\n", shown))
    assert run(runner, monkeypatch, capfd)[0] == 0
    notebook = nbformat.read(runner.EXECUTED / "part" / "a.ipynb", as_version=4)
    figure, rest = notebook.cells[-2:]
    assert "mystnb" in figure.metadata and "mystnb" not in rest.metadata
    assert [list(x["data"]) for x in figure.outputs] == [["image/svg+xml", "text/plain"]]
    assert [x["text"] for x in rest.outputs] == ["before\n", "after\n"]
    assert rest.metadata["tags"] == ["remove-input"] and rest.source  # or it is not rendered


@pytest.mark.parametrize("text", ["", "# %% [markdown]\n# Text.\n"], ids=["plain", "led to"])
def test_the_figure_comes_before_the_promise_and_imports_unless_text_leads_to_it(
    runner, monkeypatch, capfd, text
):
    question = "# # A page\n#\n# Why?\n#\n# :::{admonition} In this chapter (5 minutes)\n# :::\n"
    header = HEADER.replace("# # A page\n", question)
    drawn = "from IPython.display import SVG\ndisplay(SVG('<svg/>'))\nprint('besides')\n"
    write(runner, "a.py", header + text + FIGURE.replace("value = 1\n", drawn))
    assert run(runner, monkeypatch, capfd)[0] == 0
    cells = nbformat.read(runner.EXECUTED / "part" / "a.ipynb", as_version=4).cells
    figure = next(i for i, cell in enumerate(cells) if "mystnb" in cell.metadata)
    if text:
        assert figure == len(cells) - 2 and "In this chapter" in cells[0].source
        return
    assert cells[0].source == "# A page\n\nWhy?" and figure == 1
    assert cells[2].outputs[0].text == "besides\n", "what belongs to the figure goes with it"
    assert cells[3].source == ":::{admonition} In this chapter (5 minutes)\n:::"
    assert all(cell.cell_type == "code" for cell in cells[4:]) and len(cells) > 4


def test_a_chapter_is_replayed_again_only_if_something_changed(runner, monkeypatch, capfd):
    first, other = (write(runner, f"{name}.py", HEADER) for name in "ab")
    assert run(runner, monkeypatch, capfd)[0] == 0
    status, out = run(runner, monkeypatch, capfd)
    assert (status, out) == (0, "2 of 2 chapters are as they were\n")
    other.write_text(HEADER + "# %%\n1\n")
    status, out = run(runner, monkeypatch, capfd)
    assert status == 0 and "1 of 2" in out and "part/b" in out and "part/a" not in out
    (runner.EXECUTED / "part" / "a.ipynb").unlink()
    assert "part/a" in run(runner, monkeypatch, capfd)[1]
    assert "part/a" in run(runner, monkeypatch, capfd, "--notebooks", "part/a")[1]  # named


def test_a_module_beside_chapters_is_none_and_counts_as_their_source(runner, monkeypatch, capfd):
    write(runner, "a.py", HEADER)
    module = runner.SOURCES / "part" / "_shared.py"
    module.write_text("VALUE = 1\n")
    assert [path.name for path in runner.chapters()] == ["a.py"]
    assert run(runner, monkeypatch, capfd)[0] == 0
    assert run(runner, monkeypatch, capfd)[1] == "1 of 1 chapters are as they were\n"
    module.write_text("VALUE = 2\n")
    assert run(runner, monkeypatch, capfd)[1].startswith("0 of 1 chapters")


def test_a_failed_notebook_leaves_no_page(runner, monkeypatch, capfd):
    write(runner, "a.py", HEADER + "# %%\nprint(undefined_name)\n")
    write(runner, "b.py", HEADER.replace("device =", "devices ="))
    (runner.EXECUTED / "part").mkdir()
    for name in ("a", "b"):
        (runner.EXECUTED / "part" / f"{name}.ipynb").write_text("{}")
    status, out = run(runner, monkeypatch, capfd, "--notebooks", "part/a part/b")
    assert status == 1
    assert "cell 3: NameError: name 'undefined_name' is not defined" in out
    assert "b.py: the parameters cell must assign mode, device, data_dir, got no device" in out
    assert list(runner.EXECUTED.glob("*/*.ipynb")) == []
    assert [p.name for p in (runner.EXECUTED / "failed" / "part").iterdir()] == ["a.ipynb"]


def test_what_a_measuring_run_logs_is_seen_while_it_runs(runner, monkeypatch, capfd):
    logs = "# %%\nimport sys\nprint('so far', file=sys.stderr)\n1 / 0\n"
    write(runner, "a.py", HEADER + logs)
    for mode, seen in (("replay", False), ("measure", True)):
        monkeypatch.setattr(sys, "argv", ["execute", "--mode", mode, "--device", "cpu"])
        assert runner.main() == 1
        assert ("so far" in capfd.readouterr().err) is seen


def test_without_a_gpu_measuring_names_the_command_that_says_why(runner, monkeypatch, capfd):
    write(runner, "a.py", HEADER)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["execute", "--mode", "compare"])
    with pytest.raises(SystemExit):
        runner.main()
    said = capfd.readouterr().err
    assert "--device must be a GPU that PyTorch sees, got 'cuda:0'" in said
    assert "-m gdpa_lab doctor" in said


def test_comparing_ends_with_one_table_of_all_chapters(runner, monkeypatch, capfd):
    shows = "# %%\nfrom IPython.display import Markdown\ndisplay(Markdown({!r}), metadata={})\n"
    for name in ("a", "b"):
        table = f"| x | rate |\n| --- | --- |\n| {name} | 1 |"
        write(runner, f"{name}.py", HEADER + shows.format(table, {"compared": True}))
    monkeypatch.setattr(sys, "argv", ["execute", "--mode", "compare", "--device", "cpu"])
    assert runner.main() == 0
    end = "\n\n| x | rate |\n| --- | --- |\n| a | 1 |\n| b | 1 |\n"
    assert capfd.readouterr().out.endswith(end)
