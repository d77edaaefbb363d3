"""The programs of the how-to page run as they stand, each in a process of its own."""

import os
import re
import subprocess
import sys

import pytest

from gdpa_lab.measuring.record import ROOT

PAGE = (ROOT / "book" / "how_to.md").read_text(encoding="utf-8")
PROGRAMS = {
    section.partition("\n")[0]: re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    for section in PAGE.split("\n## ")[1:]
}


@pytest.mark.parametrize(
    "task", [pytest.param(x, marks=pytest.mark.sweep if x == "Compile" else ()) for x in PROGRAMS]
)
def test_a_program_runs(task, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAMS[task], encoding="utf-8")
    command = [sys.executable]
    if "init_process_group" in PROGRAMS[task]:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, str(program)], env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
