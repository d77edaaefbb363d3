"""README.md: its results are the records', CI runs its commands, a stranger reads it."""

import math
import re
from dataclasses import replace

import pytest

from gdpa_lab.__main__ import main
from gdpa_lab.measuring import record
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import readme
from tests.records import CEILINGS, LOAD, a_row
from tritonemu.__main__ import main as emulate

README = (record.ROOT / "README.md").read_text(encoding="utf-8")


STALE = "run `python -m gdpa_lab maintain readme`"


@pytest.mark.parametrize("path", ["README.md", "emulator/README.md"])
def test_a_stranger_reads_it(path):
    """Short, its sentences too, and its tables fit the width that a code host gives them."""
    text = (record.ROOT / path).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 110
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert max(row.count("|") - 1 for row in rows) <= 6
    prose = re.sub(r"```.*?```|<!--.*?-->|^[|#!].*?$", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"\]\([^)]*\)", "]", prose)
    sentences = re.split(r"(?<=[.!?:])\s|\n\n|\n(?=- )", prose)
    assert [s for s in sentences if len(s.split()) > 25] == []


@pytest.mark.sweep
def test_results_are_the_records():
    assert readme.spliced(README, "results", readme.block()) == README, STALE
    assert (record.ROOT / readme.FIGURE).read_text(encoding="utf-8") == readme.hero().to_svg()


def test_commands_exist_and_ci_runs_them():
    commands = re.findall(r"^make (\w+)", README, flags=re.MULTILINE)
    makefile = (record.ROOT / "Makefile").read_text(encoding="utf-8")
    assert {"book", "compare"} <= set(commands)
    for command in commands:
        assert re.search(f"^{command}:", makefile, flags=re.MULTILINE)
    ci = (record.ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make test" in ci and "make book" in ci


def test_python_example_runs():
    example = README.split("```python\n")[1].split("```")[0]
    scope: dict = {}
    exec(compile(example, "README.md", "exec"), scope)
    assert scope["out"].shape == (8, 4, 64)


def test_the_picture_of_the_emulator_is_what_its_command_draws(tmp_path, monkeypatch):
    command = re.search(r"-m tritonemu (\S+) --svg", README)[1]
    monkeypatch.chdir(record.ROOT)
    assert emulate([command, "--svg", str(tmp_path / "drawn.svg")]) == 0
    drawn = record.ROOT / "book" / "assets" / "pipeline.svg"
    assert (tmp_path / "drawn.svg").read_text() == drawn.read_text()


LINE = next(line for line in readme.LINES if line.title == "block attention")


@pytest.fixture
def of_blocks(add, tmp_path, monkeypatch):
    """Write a record of block attention forward: microseconds back to back by implementation, NaN
    for a failure; and `bursts`. Return README.md's text and its line, that of these rows alone."""
    monkeypatch.setattr(readme, "LINES", (LINE,))
    blocks = workload(LINE.workload)
    twice = [
        replace(c, scope="sustained", load=LOAD, samples_us=[2 * x for x in c.samples_us])
        for c in CEILINGS
    ]
    failed = {"samples_us": (), "error": None, "failure": "HostTooSlow: one call in 4012 us"}

    def write(loops: dict[str, float], day: int = 1, bursts: dict[str, float] | None = None):
        rows = []
        for scope, load, times in (("kernel", None, bursts or {}), ("sustained", LOAD, loops)):
            for impl, us in times.items():
                timed = failed if math.isnan(us) else {"samples_us": (us,), "load": load}
                rows.append(a_row(blocks, impl=impl, math="softmax", scope=scope, **timed))
        made = add(
            *rows, day=day, notebook=f"notebooks/{LINE.chapter}.py", ceilings=(*CEILINGS, *twice),
            workloads={blocks.name: blocks.to_dict()},
        )  # fmt: skip
        text = readme.block(tmp_path)
        (line,) = (x for x in text.splitlines() if x.startswith("| block attention"))
        return made, text, line

    return write


def test_a_line_quotes_the_fastest_of_the_newest_record(of_blocks):
    of_blocks({"v0_flash": 9100.0, "v1_one_tile": 9300.0, "fa2_varlen": 9900.0})
    times = {"v0_flash": 4500.0, "v1_one_tile": 4000.0, "fa3": math.nan, "fa2_varlen": 6000.0}
    made, text, line = of_blocks(times, day=2)
    # 4 tensors of 1,609,664 rows of 1024 bytes in 4000 us, under the ceiling back to back
    percent = 100 * 4 * 1_609_664 * 1024 / (4e9 / 1860e-6) / 4000e-6
    assert "forward | 4.00 ms" in line and f", {percent:.0f} % |" in line
    assert "FlashAttention-2" in line and "6.00 ms | 1.50×" in line
    assert made.id in text and "20261101" not in text
    assert line.endswith(" 1.50× |")


def test_a_row_is_never_filled_with_bursts(of_blocks):
    bursts = {"v0_flash": 4000.0, "v1_one_tile": 4100.0, "fa2_varlen": 6000.0}
    loops = {"v0_flash": 9500.0, "v1_one_tile": 9000.0, "fa2_varlen": math.nan}
    _, text, line = of_blocks(loops, bursts=bursts)
    assert "forward | 9.00 ms" in line
    assert line.endswith("a sequence per block | not timed: HostTooSlow |  |")
    assert "6.00" not in text and "burst" not in text
    with pytest.raises(LookupError, match="must hold a time of block-fill70-2000, a rung"):
        of_blocks({"fa2_varlen": 18000.0}, day=2, bursts=bursts)


def test_a_line_without_a_peer_is_refused(of_blocks):
    with pytest.raises(LookupError, match="must hold a row of block-fill70-2000, a peer"):
        of_blocks({"v0_flash": 9000.0})


def test_nothing_is_written_beside_a_refused_record(tmp_path, monkeypatch, capsys):
    (tmp_path / "data" / "records").mkdir(parents=True)
    (tmp_path / "data" / "records" / "cut.json").write_text("{")
    (tmp_path / "README.md").write_text(README)
    monkeypatch.setattr(readme.update, "__defaults__", (tmp_path,))
    assert main(["maintain", "readme"]) == 1
    assert "refused records/cut.json: not JSON" in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == README
    assert not (tmp_path / readme.FIGURE).exists()
