"""`python -m tritonemu` on programs and functions: what it says, and how it ends."""

import json
import subprocess
import sys

import pytest

from tritonemu.__main__ import main

PROGRAM = """
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def sum_kernel(x_ptr, sum_ptr, n, ATOMIC: tl.constexpr, BLOCK: tl.constexpr = 32):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.sum(tl.load(x_ptr + i, mask=i < n, other=0.0))
    if ATOMIC:
        tl.atomic_add(sum_ptr, part)
    else:
        tl.store(sum_ptr, tl.load(sum_ptr) + part)


def total(atomic=True, grid=(4,)):
    x, total = torch.ones(100, device="cuda"), torch.zeros(1, device="cuda")
    sum_kernel[grid](x, total, 100, ATOMIC=atomic)
    torch.cuda.synchronize()
    return total.item()


@triton.jit
def masked_kernel(x_ptr):
    lanes = tl.arange(0, 16)
    tl.store(x_ptr + lanes, tl.load(x_ptr + lanes, mask=lanes < 5))


def masked():
    masked_kernel[(1,)](torch.zeros(16))


@triton.jit
def zero_kernel(x_ptr):
    tl.store(x_ptr, 0)


def several():
    for _ in range(3):
        total()
    zero_kernel[(1,)](torch.ones(1, device="cuda"))


def nothing():
    pass


def bad_grid():
    total(grid=4)


def endless():
    while True:
        pass


def shape():
    return torch.ones(3) @ torch.ones(4)


number = 3

if __name__ == "__main__":
    print("total", total(atomic="--race" not in sys.argv))
    if "--swallow" in sys.argv:
        try:
            total(atomic=False)
        except Exception:
            pass
    sys.exit(5 if "--fail" in sys.argv else 0)
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return str(path)


def test_a_program_runs_unedited(program, capsys):
    previous = sys.argv, sys.path[:]
    assert main([program, "--some", "argument"]) == 0
    assert (sys.argv, sys.path) == previous
    printed = capsys.readouterr()
    verdict = "nothing found under the modelled and 4 random schedules"
    assert printed.out.startswith(f"total 100.0\n{verdict}\n4 CTAs on sm_90: ") and not printed.err
    assert printed.out.count("total") == 1


@pytest.mark.parametrize("argument", ("--race", "--swallow"))
def test_a_race_in_a_program(program, capsys, argument):
    assert main(["--schedules", "1", program, argument]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"Race (schedule modelled): {program}:16: ")
    assert lines[-1] == (
        f"  python -m tritonemu --arch sm_90 --schedule modelled {program} {argument}"
    )


def test_a_function_takes_options_on_both_sides(program, capsys):
    assert main(["--arch", "sm_100", f"{program}:total", "--schedules", "2"]) == 0
    out = capsys.readouterr().out
    assert "on sm_100" in out and "the modelled and 2 random" in out


def test_a_program_that_fails_by_itself(program, capsys):
    assert main([program, "--fail"]) == 3
    assert capsys.readouterr().err.startswith(f"{program} ended with exit status 5\n")
    assert main([f"{program}:shape"]) == 3
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].startswith(f'  File "{program}", line ') and lines[1].endswith(" in shape")
    assert lines[-2].startswith("RuntimeError: ") and "tritonemu/" not in "".join(lines[:-1])


def test_masked_lanes_and_functions_without_a_kernel(program, capsys):
    assert main([f"{program}:masked"]) == 1
    assert capsys.readouterr().err.startswith("UndefinedValue (schedule modelled): ")
    assert main([f"{program}:masked", "--masked", "zero"]) == 0
    assert main([f"{program}:nothing"]) == 3
    assert capsys.readouterr().err.startswith(f"{program}:nothing launched no kernel\n")


def test_a_launch_that_is_refused_is_one_line(program, capsys):
    assert main([f"{program}:bad_grid"]) == 3
    first, _ = capsys.readouterr().err.splitlines()
    assert first == f"{program}:21: ValueError: grid must be a tuple of integers, got 4"


@pytest.mark.parametrize(
    "arguments, message",
    (
        ([], "the following arguments are required: FILE.py[:FUNCTION], ARGUMENT"),
        (["kernel.txt"], "target must be FILE.py or FILE.py:FUNCTION, got 'kernel.txt'"),
        (["{}:"], "target must be FILE.py or FILE.py:FUNCTION, got '{}:'"),
        (["missing.py"], "target must name an existing file, got 'missing.py'"),
        (["missing.py:f"], "target must name an existing file, got 'missing.py'"),
        (["{}:absent"], "{} must define a function 'absent', got none"),
        (["{}:number"], "{} must define a function 'number', got int"),
        (["{}:total", "3"], "{}:total takes no arguments, got '3'"),
        (["--schedules", "0", "{}"], "must be an integer of at least 1, got '0'"),
        (["--schedules", "x", "{}"], "must be an integer of at least 1, got 'x'"),
        (["--multiprocessors", "-1", "{}"], "must be an integer of at least 1, got '-1'"),
        (["--timeout", "0", "{}"], "must be a number of seconds above 0, got '0'"),
        (["--timeout", "soon", "{}"], "must be a number of seconds above 0, got 'soon'"),
    ),
)
def test_a_wrong_command_line_is_one_line(program, capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        main([argument.format(program) for argument in arguments])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(message.format(program))


def test_a_file_that_is_not_python(tmp_path, capsys):
    path = tmp_path / "broken.py"
    path.write_text("def right():\n    return (\n")
    assert main([str(path)]) == 3
    assert "SyntaxError: '(' was never closed" in capsys.readouterr().err


def test_an_endless_loop_ends(program, tmp_path):
    options = ["--timeout", "0.2", "--json", str(tmp_path / "report.json")]
    command = [sys.executable, "-m", "tritonemu", *options, f"{program}:endless"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 4
    loop = PROGRAM.splitlines().index("    while True:") + 1
    assert done.stderr in {
        f"tritonemu: timeout after 0.2 s at {program}:{line}\n" for line in (loop, loop + 1)
    }
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["found"] is None and report["timeout"]["seconds"] == 0.2
    assert f"at {report['timeout']['place']}\n" in done.stderr


def test_a_timeout_that_is_not_reached_is_forgotten(program, capsys):
    import signal

    assert main(["--timeout", "100", f"{program}:total", "--schedules", "1"]) == 0
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_launches_of_several_kernels_are_summed_up(program, capsys):
    assert main([f"{program}:several", "--schedules", "1"]) == 0
    out = capsys.readouterr().out
    assert out.partition("\n")[2].startswith("sum_kernel, the first of 3 launches:\n4 CTAs")
    assert "zero_kernel:\n1 " in out


SAME = """
import torch
import triton
import triton.language as tl


@triton.jit
def total_kernel(x, out, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out, tl.sum(tl.load(x + i)))


total_kernel[(4,)](torch.ones(64, device="cuda"), torch.zeros(1, device="cuda"), 16)
"""


def test_notes_are_said_and_written_and_strict_makes_them_findings(tmp_path, capsys):
    file, report = tmp_path / "same.py", tmp_path / "report.json"
    file.write_text(SAME)
    assert main(["--json", str(report), str(file)]) == 0
    said = capsys.readouterr().out
    assert said.count("note: programs (0, 0, 0), at ") == 1 and "(--strict)" in said
    (note,) = json.loads(report.read_text())["notes"]
    assert f"note: {note}" in said
    assert main(["--strict", str(file)]) == 1
    assert "--arch sm_90 --strict --schedule modelled" in capsys.readouterr().err


def test_a_message_names_flags_of_the_command(program, capsys):
    assert main([f"{program}:masked"]) == 1
    assert "allow it with --masked zero" in capsys.readouterr().err
    assert main(["--masked", "zero", f"{program}:masked"]) == 0


BENCHMARKED = """
import torch
import triton
import triton.language as tl


@triton.jit
def fill_kernel(y):
    tl.store(y + tl.program_id(0), tl.program_id(0))


sizes = {"x_names": ["n"], "x_vals": [4], "line_arg": "provider", "line_vals": [""]}


@triton.testing.perf_report(
    triton.testing.Benchmark(**sizes, line_names=[""], plot_name="fill", args={})
)
def bench(n, provider):
    raise AssertionError("a benchmark")


fill_kernel[(2,)](torch.zeros(2, device="cuda"))
bench.run(print_data=True)
"""


def test_benchmarks_are_skipped(tmp_path, capsys):
    path = tmp_path / "benchmarked.py"
    path.write_text(BENCHMARKED)
    assert main([str(path)]) == 0
    assert "tritonemu: a triton.testing benchmark is skipped\n" in capsys.readouterr().out


def test_what_pytorch_reads_is_a_finding_of_the_command(tmp_path, capsys):
    program = tmp_path / "half.py"
    program.write_text(
        "import torch\n"
        "from emulator.tests.test_unwritten import write_kernel\n"
        "x = torch.empty(8, device='cuda')  # made\n"
        "write_kernel[(1,)](x, 5, 8)\n"
        "assert x.sum() == 10\n"
    )
    assert main(["--schedule", "modelled", str(program)]) == 1
    said = capsys.readouterr().err
    assert "UninitializedRead (schedule modelled)" in said and "half.py:5: sum of PyTorch" in said
    assert "earlier: " in said and "half.py:3" in said
    assert main(["--schedule", "modelled", "--allow-uninitialized", str(program)]) in (0, 3)
    allowed = program.read_text().replace("# made", "# tritonemu: allow(UninitializedRead) padding")
    (other := tmp_path / "allowed.py").write_text(allowed)
    assert main(["--schedule", "modelled", str(other)]) in (0, 3)
