"""The sources of the chapters: what the build would let pass in silence."""

import ast
import json
import re
from pathlib import Path

import jupytext
import pytest
from papermill.utils import nb_kernel_name, nb_language

from gdpa_lab.measuring import record

PAGES = sorted((record.ROOT / "notebooks").glob("[!_]*/[!_]*.py"))
PAGES += sorted((record.ROOT / "book").glob("*.md"))
TEXT_OF = {page.relative_to(record.ROOT): page.read_text(encoding="utf-8") for page in PAGES}
LAUNCHING = [page for page in PAGES if page.suffix == ".py"]
BESIDE = sorted((record.ROOT / "notebooks").glob("[!_]*/_*.py"))
"""Modules of the chapters of one part."""
STUDIES = [*BESIDE, *sorted((record.ROOT / "notebooks" / "_lib").glob("*.py"))]
STUDIES.remove(record.ROOT / "notebooks" / "training" / "_host.py")  # runs in a process of its own
ROLE = re.compile(r"\{glue:text\}`([^`]*)`")
READ = re.compile(r"\{glue:\w*\}\s*`([^`]*)`|\{glue\} (\w+)(?:\s+:doc: (\S+)\.ipynb)?")


def test_there_are_chapters():
    assert len(PAGES) >= 12


@pytest.mark.parametrize("page", LAUNCHING, ids=str)
def test_papermill_runs_what_jupytext_makes_of_a_chapter(page):
    """Without `execute.py`: the header must name the kernel and its language."""
    notebook = jupytext.read(page, fmt="py:percent")
    assert (nb_kernel_name(notebook), nb_language(notebook)) == ("python3", "python")


@pytest.mark.parametrize("page", LAUNCHING, ids=str)
def test_no_text_stands_where_jupytext_drops_it(page):
    """Behind the mark of a cell only its tags may follow."""
    lines = page.read_text(encoding="utf-8").splitlines()
    marks = [line for line in lines if line.startswith("# %%")]
    assert [x for x in marks if not re.fullmatch(r"# %%( \[markdown\])?( tags=\[.*\])?", x)] == []


def test_glued_numbers_have_formats_that_format():
    for page, text in TEXT_OF.items():
        for quoted in ROLE.findall(text):
            name, _, spec = quoted.split("::")[-1].partition(":")
            assert re.fullmatch(r"[\w.-]+", name), (page, quoted)
            if spec:
                assert re.fullmatch(r"[\d.,]*[fdegs%]", spec), (page, quoted)
                assert spec[-1] in "ds" or format(1.0, spec)


def test_reproduce_lists_every_chapter_that_measures_in_the_order_of_the_book():
    said = (record.ROOT / "book" / "reproduce.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \{doc\}`(\S+) <", said, flags=re.MULTILINE)
    toc = (record.ROOT / "_toc.yml").read_text(encoding="utf-8")
    every = re.findall(r"file: executed/(\S+)", toc)
    header = "\n# measures: true\n"
    assert listed == [x for x in every if header in (record.ROOT / f"notebooks/{x}.py").read_text()]


def test_glued_values_are_not_quoted_as_code():
    """Between backticks a role is text, and the reader sees it."""
    assert not [page for page, text in TEXT_OF.items() if "`{glue:" in text]


def read_by(page: Path) -> set[tuple[str, str]]:
    """(chapter, name) of the glued values that a page shows."""
    own = page.relative_to(page.parents[1]).with_suffix("").as_posix()
    found = set()
    for role, directive, doc in READ.findall(re.sub(r"\n#[ |]*", "\n", page.read_text())):
        of, _, key = (role or directive).rpartition("::")
        chapter = (of or doc or own).removesuffix(".ipynb").removeprefix("executed/")
        found.add((chapter, key.partition(":")[0]))
    return found


def test_each_number_that_a_chapter_glues_is_read():
    checked = json.loads((record.ROOT / "tests/site/formulas.json").read_text())["glued"]
    read = set().union(*map(read_by, PAGES)) | {(chapter, name) for chapter, name, *_ in checked}
    for page in LAUNCHING:
        chapter = page.relative_to(record.ROOT / "notebooks").with_suffix("").as_posix()
        calls = [x for x in ast.walk(ast.parse(page.read_text())) if isinstance(x, ast.Call)]
        glued = [x for x in calls if ast.unparse(x.func) == "chapter.glue"]
        names = {each.arg for x in glued for each in x.keywords if each.arg}
        assert {name for name in names if (chapter, name) not in read} == set(), chapter


def test_exercises_have_answers():
    for page, text in TEXT_OF.items():
        labels = re.findall(r":label: (ex-[\w-]+)", text)
        assert sorted(labels) == sorted(re.findall(r"\{solution\} (ex-[\w-]+)", text)), page


def test_no_line_of_text_is_taken_for_a_comment():
    """MyST drops a line of prose that begins with a per cent sign, without a word."""
    for page, text in TEXT_OF.items():
        cells = re.split(r"^# %%", text, flags=re.M)
        prose = [cell for cell in cells if cell.startswith(" [markdown]")]
        lines = [line for cell in prose for line in cell.splitlines()[1:]]
        assert not [line for line in lines if re.match(r"#\s*%", line)], page


EXHIBIT = re.compile(r"(# \| name: \S+\n(?:# \|[^\n]*\n)+)(.*?)(?=\n# %%|\Z)", re.S)
# Lengths, head sizes, fills and lines at a fixed value describe an axis; all else was measured.
OF_AN_AXIS = {
    "0", "1", "32", "64", "100", "128", "256", "512", "1,024", "2,048", "8000", "0.5", "0.7",
}  # fmt: skip


def test_no_text_for_a_measured_picture_types_what_was_measured():
    for head, code in (pair for text in TEXT_OF.values() for pair in EXHIBIT.findall(text)):
        alt = " ".join(line[4:].strip() for line in head.partition("# | alt:")[2].splitlines())
        if "measured=" in code or "chapter.ladder" in code or "redrawn" in code:
            numbers = set(re.findall(r"(?<![\w.,-])\d[\d,.]*\d|(?<![\w.,-])\d(?![\w-])", alt))
            assert numbers <= OF_AN_AXIS, alt


def _on_the_device(tree: ast.AST) -> list[str]:
    """Calls that make inputs anywhere but on the CPU: a kernel launched on them might run where
    nobody has seen it right."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("make_inputs"):
            devices = [ast.unparse(k.value) for k in node.keywords if k.arg == "device"]
            if devices not in (["'cpu'"], ["'meta'"]):
                found.append(ast.unparse(node))
    return found


def test_inputs_on_the_device_are_found():
    told = _on_the_device(ast.parse("make_inputs(x, device=session.device)\ninputs.make_inputs(x)"))
    assert told == ["make_inputs(x, device=session.device)", "inputs.make_inputs(x)"]
    assert _on_the_device(ast.parse("make_inputs(x, device='cpu')")) == []


def test_rungs_run_on_the_device_through_the_session_alone():
    """`Session.launch` hands inputs over where its rungs may run; `Session.measure` runs them."""
    for page in (*LAUNCHING, *STUDIES):
        assert _on_the_device(ast.parse(page.read_text(encoding="utf-8"))) == [], page


def title_of(chapter: Path) -> str:
    return re.search("^# # (.+)$", chapter.read_text(encoding="utf-8"), re.MULTILINE)[1]


def test_a_chapter_of_a_rung_has_its_kernel_s_name():
    def plain(text: str) -> str:
        return re.sub(r"[\W_]", "", text).lower()

    named = 0
    for page in LAUNCHING:
        if rung := re.fullmatch(r"v(\d)_(\w+?)(?:_backward)?", page.stem):
            which, _, name = title_of(page).partition(": ")
            assert which.startswith(page.parent.name.title()) and f"v{rung[1]}" in which
            assert plain(rung[2]) in plain(name), page
            named += 1
    assert named >= 17


def test_code_names_chapters_by_the_titles_that_they_have():
    titles = {title_of(page) for page in LAUNCHING}
    named = set()
    for house in ("gdpa_kernels", "lab", "emulator"):
        for source in (record.ROOT / house).rglob("*.py"):
            said = " ".join(source.read_text(encoding="utf-8").split())
            named |= set(re.findall(r'the chapter "([^"]+)"', said))
    assert named and named <= titles


@pytest.mark.sweep
def test_the_chapter_that_the_book_shows_as_an_example_runs(monkeypatch, tmp_path):
    text = (record.ROOT / "book" / "built.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    monkeypatch.setattr("gdpa_lab.report.page.CSV_DIR", tmp_path)
    monkeypatch.chdir(record.ROOT)
    exec(compile(example, "built.md", "exec"), {})
    assert (tmp_path / "forward-v1_tiled-1.csv").exists()
