"""The command that runs the tutorials of a Triton repository, on a repository of our own."""

import subprocess
import sys
from pathlib import Path

import pytest
import triton

COMMAND = Path(__file__).parents[1] / "tutorials.py"

KERNEL = """
import torch
import triton
import triton.language as tl

@triton.jit
def kernel(x, n, BY: tl.constexpr):
    tl.store(x + tl.program_id(0) % n, BY * (tl.program_id(0) + 1))

def ones(n):
    x = torch.zeros(4, device="cuda", dtype=torch.int32)
    kernel[(4,)](x, n, 1)
    return x
"""
FILES = {
    "01-right.py": f"{KERNEL}\nassert ones(4).sum() == 10\n",
    "gluon/01-tests.py": f"""
import pytest
{KERNEL}
@pytest.mark.parametrize("n", (4, 2, 3, 5))
def test_both(n):
    if n == 5:
        pytest.skip("no such GPU")
    ones(n)

@pytest.mark.skipif(torch.cuda.get_device_capability()[0] < 10, reason="needs another GPU")
def test_blackwell():
    assert ones(4)[0] == 2
""",
}
ROWS = """
| tutorials/01-right.py | right | right |
| tutorials/gluon/01-tests.py | 1 right, 1 finding | 1 right, 1 finding, 1 fails |
"""


@pytest.fixture
def repository(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / "repository/python/tutorials" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    author = ("-c", "user.name=A", "-c", "user.email=a@b")
    for command in (["init", "-q"], ["add", "-A"], [*author, "commit", "-qm", "all"]):
        subprocess.run(["git", *command], cwd=tmp_path / "repository", check=True)
    return tmp_path / "repository"


def survey(*arguments):
    command = [sys.executable, str(COMMAND), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.sweep
def test_tables_of_tutorials(repository):
    table = repository / "table.md"
    version = f"Commit 0 under Triton {triton.__version__}:\n\n"
    wrong = ROWS.replace("| right |", "| finding |", 1).replace(" |\n", " | 1 |\n").lstrip()
    table.write_text(f"# Tables\n\n{version}| tutorial |\n|---|\n{wrong}\nMore.\n")
    done = survey(repository, "HEAD", "--known", table)
    outcomes = [row.rpartition("|")[0].rpartition("|")[0] for row in done.stdout.splitlines()[4:]]
    assert [f"{row}|" for row in outcomes] == ROWS.split("\n")[1:-1], done.stderr
    assert "test_both: Race" in done.stderr and "AssertionError" in done.stderr
    assert done.returncode == 1 and done.stderr.count("expected") == 1
    assert "01-right.py expected ['finding', 'right']" in done.stderr


def test_a_revision_that_is_not_there(repository):
    done = survey(repository, "v0")
    assert done.returncode == 2 and "has no commit v0" in done.stderr


PROGRAM = """
import torch
import triton
import triton.language as tl

@triton.autotune([triton.Config({}, num_warps=warps) for warps in (2, 4)], key=[])
@triton.jit
def behind_kernel(x):
    tl.store(x + 20, 1)

@triton.jit
def fill_kernel(x):
    tl.store(x + tl.program_id(0), 1)

x = torch.empty(20, device="cuda")
behind_kernel[(1,)](x)
fill_kernel[(20,)](x)
print(x.sum())
"""


def test_kernels_of_a_program(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(COMMAND.with_name("survey.py")), str(tmp_path / "program.py")]
    said = subprocess.run(command, capture_output=True, text=True).stdout
    assert "1 of 2 kernels ran to the end, of 1 programs" in said
    assert "program.py:behind_kernel: OutOfBounds" in said
    assert said.endswith("programs that ended early:\nnone\n")
