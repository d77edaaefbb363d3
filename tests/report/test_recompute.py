"""The script that recomputes pages from raw samples finds a number that is off."""

import json
import re
import shutil
import subprocess
import sys

import pandas as pd
import pytest

from gdpa_lab.measuring import record
from gdpa_lab.report import results

SCRIPT = record.ROOT / "tests" / "site" / "recompute.py"
FORMULAS = json.loads(SCRIPT.with_name("formulas.json").read_text(encoding="utf-8"))
PAGES = ("forward/results", "block/results")


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """Files of a built book that the script reads: two figures' data, README.md, two notebooks."""
    root = tmp_path_factory.mktemp("book")
    (root / "data").mkdir()
    for name in ("records", "promoted.json"):
        (root / "data" / name).symlink_to(record.DATA_DIR / name)
    shutil.copy(record.ROOT / "README.md", root)
    figures, executed = root / "book/_build/html/figures", root / "book" / "executed"
    figures.mkdir(parents=True)
    table = results.table(gpu="NVIDIA H200", latest=False)
    for page in PAGES:
        run = results.run_of(record.DATA_DIR, notebook=f"notebooks/{page}.py", gpu="NVIDIA H200")
        rows = pd.concat(run.select(table[table["record"] == made.id]) for made in run.records)
        rows = rows[rows["scope"] != "op"]
        path = figures / f"{page.replace('/', '-')}-1.csv"
        rows.to_csv(path, index=False, float_format="%.6g", lineterminator="\n")
        rows = rows.drop_duplicates(["workload", "direction", "impl", "scope", "variant"])
        rows = rows[rows["variant"] == ""]
        rows = rows.set_index(["direction", "workload", "scope", "impl"])
        glued = {}
        for of, name, quantity, *keys in FORMULAS["glued"]:
            if of == page:
                found = [rows.loc[tuple(key.split()), quantity] for key in keys]
                glued[name] = float(found[0] / found[1] if keys[1:] else found[0])
        outputs = [
            {"metadata": {"scrapbook": {"name": name}},
             "data": {"application/papermill.record/text/plain": repr(number)}}
            for name, number in glued.items()
        ]  # fmt: skip
        notebook = executed / f"{page}.ipynb"
        notebook.parent.mkdir(parents=True)
        notebook.write_text(json.dumps({"cells": [{"outputs": outputs}]}))
    return root


def ran(root, count=40, seed=1):
    command = [sys.executable, "-I", SCRIPT, "--root", root, "--seed", seed, "--count", count]
    return subprocess.run([*map(str, command)], capture_output=True, text=True)


def test_it_needs_nothing_but_python():
    imported = re.findall(r"^(?:from|import) (\w+)", SCRIPT.read_text(), flags=re.MULTILINE)
    assert set(imported) - {"__future__"} <= set(sys.stdlib_module_names)


@pytest.mark.sweep
def test_forty_numbers_of_a_right_book(book):
    done = ran(book)
    assert done.returncode == 0 and "40 of 40 numbers are right" in done.stdout, done.stdout
    assert {"README.md", "forward/results", "forward-results-1.csv:"} <= {
        word if ".csv:" not in word else word.partition(":")[0] + ":"
        for word in done.stdout.split()
    }
    assert ran(book).stdout == done.stdout != ran(book, seed=2).stdout


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("README.md", r"\d+\.\d+(?= ms \| \d)"),
        ("README.md", r"\d+(?= TFLOP/s, \d)"),
        ("README.md", r"\d+(?= % \|)"),
        ("README.md", r"\d+\.\d+(?= ms \| \d+\.\d+×)"),
        ("README.md", r"\d+\.\d+(?=× \|)"),
        ("book/executed/block/results.ipynb", r"(?<=plain\": \")\d\.\d+"),
        ("book/_build/html/figures/forward-results-1.csv", r"(?<=h200-62ac9e84,)\d+\.\d+(?=,)"),
    ],
)
def test_a_number_that_is_off_is_found(book, tmp_path, file, pattern):
    root = shutil.copytree(book, tmp_path / "book", symlinks=True)
    path = root / file
    text = path.read_text()
    path.write_text(re.sub(pattern, lambda found: f"{1.03 * float(found[0]):.4g}", text))
    assert path.read_text() != text, "a number must be there to be changed"
    done = ran(root, count=200)
    assert done.returncode == 1 and "OFF" in done.stdout
