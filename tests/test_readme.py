"""README.md: its results are the records', its commands are the ones CI runs."""

from __future__ import annotations

import re

from gdpa_kernels import readme, record
from gdpa_kernels.__main__ import main

README = (record.ROOT / "README.md").read_text(encoding="utf-8")


def test_results_are_the_records():
    block = README.split(readme.BEGIN)[1].split(readme.END)[0].strip()
    assert block == readme.ladder_block(), "run `python -m gdpa_kernels readme`"


def test_commands_exist_and_ci_runs_them():
    commands = re.findall(r"^make (\w+)", README, flags=re.MULTILINE)
    makefile = (record.ROOT / "Makefile").read_text(encoding="utf-8")
    assert {"book", "test", "measure"} <= set(commands)
    for command in commands:
        assert re.search(f"^{command}:", makefile, flags=re.MULTILINE)
    ci = (record.ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make test" in ci and "make book" in ci


def test_python_example_runs():
    example = README.split("```python\n")[1].split("```")[0]
    scope: dict = {}
    exec(compile(example, "README.md", "exec"), scope)
    assert scope["out"].shape == (8, 4, 64)


def test_results_command_prints_the_ladder(capsys):
    assert (
        main(["results", "--format", "csv", "--system", "h200", "--workload", readme.WORKLOAD]) == 0
    )
    printed = capsys.readouterr().out
    assert printed.startswith("figure,workload,direction,impl,")
    assert "v1_tiled" in printed and "fa2_varlen" in printed
