"""Accesses of one program's warps to global memory, and the points where they meet.

That a barrier lies between, or does not, is asked of the PTX that Triton makes of each for sm_90.
"""

import json
import re
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from emulator.tests.checking import place, refused
from tritonemu import InvalidKernel, Race, execution, processes, run
from tritonemu.__main__ import main
from tritonemu.assembly import Code
from tritonemu.compiler import asm_of
from tritonemu.ttgir import Module

B = 512
# Since triton-lang/triton#10816 warps meet before a release and after an acquisition.
ATOMICS_MEET = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
before_that = pytest.mark.skipif(ATOMICS_MEET, reason="this Triton puts barriers around atomics")


def zeros(*sizes):
    return [torch.zeros(size, dtype=torch.int32) for size in sizes]


@triton.jit
def read_back_kernel(x, y, HOW: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, i)  # stores
    if HOW == "barrier":
        tl.debug_barrier()
    if HOW == "sum":
        tl.store(y + BLOCK, tl.sum(tl.load(y + i)))
    if HOW == "counter":
        tl.store(y + BLOCK, tl.atomic_add(y + BLOCK, 1))
    j = i if HOW == "place" else BLOCK - 1 - i
    tl.store(y + i, tl.load(x + j))  # loads


@triton.jit
def masked_kernel(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, i, mask=i < n)
    tl.store(y + i, tl.load(x + i, mask=i < n, other=0))
    tl.store(y + i, tl.load(x + i, mask=i >= n, other=0))


@triton.jit
def sizes_kernel(x, y, BLOCK: tl.constexpr):
    i, j = tl.arange(0, BLOCK), tl.arange(0, BLOCK // 2)
    tl.store(x + i, i)  # stores
    tl.store(y + j, tl.load(x + j))  # loads


@triton.jit
def wide_kernel(x, y, z, HOW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    i = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(x + i, tl.full((ROWS, COLUMNS), 1.0, tl.float32))  # stores
    if HOW == "barrier":
        tl.debug_barrier()
    other = tl.load(y + i).to(tl.float32)
    tl.store(z + i, tl.load(x + i) + other)  # loads


@triton.jit
def repaired_kernel(x, HOW: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, i)  # stores
    if HOW == "barrier":
        tl.debug_barrier()
    tl.store(x + BLOCK - 1, BLOCK - 1 if HOW == "same" else -1)  # repairs


@triton.jit
def scratch_kernel(x, scratch, y, steps, SHIFT: tl.constexpr, HOW: tl.constexpr):
    """Rows change places through a scratch tile that is used again."""
    r, c = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    for k in range(steps):
        if HOW == "barrier":
            tl.debug_barrier()
        tl.store(scratch + r * 64 + c, tl.load(x + (k * 64 + r) * 64 + c))  # overwrites
        tl.debug_barrier()
        moved = tl.load(scratch + (r + SHIFT) % 64 * 64 + c)  # reads
        tl.store(y + (k * 64 + r) * 64 + c, moved)


@triton.jit
def swapped_kernel(x, BLOCK: tl.constexpr):
    """Values change places within a thread."""
    i = tl.arange(0, BLOCK)[:, None] * 2 + tl.arange(0, 2)[None, :]
    even, odd = tl.split(tl.load(x + i))
    tl.store(x + i, tl.join(odd, even))


@triton.jit
def scalar_kernel(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x, 5)
    tl.store(y, tl.load(x))
    tl.store(y + i, tl.load(x + i * 0))  # loads


@triton.jit
def converted_kernel(x, y, BLOCK: tl.constexpr):
    r, c = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    value = tl.load(x + r * BLOCK + c)
    tl.store(x + r * BLOCK + c, value + 1)
    turned = tl.trans(value) + 1
    tl.store(y + r * BLOCK + c, turned)  # through shared memory
    tl.store(y + r * BLOCK + c, tl.load(x + (BLOCK - 1 - r) * BLOCK + c))


@triton.jit
def locked_kernel(lock, x, HOW: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    if HOW == "scalar":
        tl.store(x, tl.load(x) + 1)
    else:
        tl.store(x + i, tl.load(x + i) + 1)  # stores
    if HOW == "barrier":
        tl.debug_barrier()
    tl.atomic_xchg(lock, 0)  # releases


@triton.jit
def last_kernel(parts, count, out, HOW: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    pid = tl.program_id(0)
    tl.store(parts + pid * BLOCK + i, i)  # stores
    if HOW == "barrier":
        tl.debug_barrier()
    before = tl.atomic_add(count, 1)  # counts
    if before == tl.num_programs(0) - 1:
        total = tl.zeros([BLOCK], tl.int32)
        for other in range(tl.num_programs(0)):
            total += tl.load(parts + other * BLOCK + i)  # gathers
        tl.store(out + i, total)


def meets(code, first, second):
    return code.meets(("store", first), second, ("load", "atomic"))


def code_of(kernel, *args, **constants):
    bound = dict(zip(kernel.arg_names, args, strict=False)) | constants
    return Code(asm_of(kernel, "sm_90", bound, {"num_warps": 4})["ptx"])


def test_a_load_at_another_place_of_the_block_needs_a_barrier():
    error = refused(Race, "warps of a program meet at", read_back_kernel, *zeros(B, B + 1), "", B)
    assert (error.file, error.line) == place(read_back_kernel, "# loads")
    assert error.other == place(read_back_kernel, "# stores") and error.buffer == "x"
    assert error.programs == ((0, 0, 0), (0, 0, 0))
    assert "tl.debug_barrier()" in str(error) and 'unguarded="allow"' in str(error)


@pytest.mark.parametrize("how", ("barrier", "sum", "counter", "place"))
def test_what_triton_guards_is_no_race(how):
    x, y = zeros(B, B + 1)
    run(read_back_kernel, (1,), x, y, how, B)
    expected = torch.arange(B) if how == "place" else torch.arange(B).flip(0)
    assert torch.equal(y[:B].long(), expected)


def test_one_warp_and_the_option_need_none():
    run(read_back_kernel, (1,), *zeros(B, B + 1), "", B, num_warps=1)
    run(read_back_kernel, (1,), *zeros(B, B + 1), "", B, unguarded="allow")
    run(read_back_kernel, (1,), *zeros(B, B + 1), "", B, races=False)
    with pytest.raises(ValueError, match=r"unguarded must be one of .*, got 3"):
        run(read_back_kernel, (1,), *zeros(B, B + 1), "", B, unguarded=3)


def test_lanes_that_are_off_touch_nothing():
    x, y = zeros(B, B)
    run(masked_kernel, (1,), x, y, 100, B)


def test_blocks_of_two_sizes_are_of_other_threads():
    refused(Race, "another one may", sizes_kernel, *zeros(B, B), B, line="# loads")


def test_two_layouts_of_one_block_are_of_other_warps():
    """A store of fp32 takes 4 elements a thread, and the load 8, as that of fp16 beside it."""

    def arguments(dtype):
        return torch.zeros(8, 256), torch.ones(8, 256, dtype=dtype), torch.zeros(8, 256)

    error = refused(
        Race, "gave the two blocks different layouts", wide_kernel,
        *arguments(torch.float16), "", 8, 256, line="# loads",
    )  # fmt: skip
    assert error.other == place(wide_kernel, "# stores")
    run(wide_kernel, (1,), *arguments(torch.float32), "", 8, 256)
    run(wide_kernel, (1,), *arguments(torch.float16), "barrier", 8, 256)
    run(wide_kernel, (1,), *arguments(torch.float16), "", 8, 256, num_warps=1)


TTGIR = """
#blocked = #ttg.blocked<{BLOCKED}>
#linear = #ttg.linear<{register = [[0, 1]], lane = [], warp = [], block = []}>
    tt.store %2, %1 : tensor<8x256x!tt.ptr<f32>, #blocked> loc(#loc5)
    %6 = tt.load %3, %m, %o : tensor<8x256x!tt.ptr<f32>, #linear> loc(#loc9)
    %7 = tt.load %4 {a = 1} : tensor<2048x!tt.ptr<f32>, #row> loc(#loc3)
#row = #ttg.blocked<{ROW}>
#loc1 = loc("/a/c.py":7:3)
#loc2 = loc("/a/c.py":30:3)
#loc3 = loc("x"(#loc8))
#loc5 = loc("/a/b/c.py":5:3)
#loc8 = loc(callsite(#loc1 at #loc2))
#loc9 = loc("y"(#loc5))
""".replace(
    "BLOCKED",
    "sizePerThread = [1, 4], threadsPerWarp = [2, 16], warpsPerCTA = [2, 2], order = [1, 0]",
).replace("ROW", "sizePerThread = [4], threadsPerWarp = [32], warpsPerCTA = [4], order = [0]")


def test_layouts_of_the_compiler_say_which_warp_has_what():
    module, size = Module(TTGIR), 2048
    store, row = (
        module.warps_of(step, size) for step in (("store", ("c.py", 5)), ("load", ("/x/c.py", 7)))
    )
    # Warps of the store: 0 and 1 have 64 columns each of two rows, by turns, 2 and 3 those below.
    # Of the load, warp w has elements 128 w to 128 w + 127 of every 512.
    expected = {0: (0, 0), 100: (1, 0), 128: (0, 1), 200: (1, 1), 256: (0, 2), 512: (2, 0)}
    expected |= {3 * 256 + 64: (3, 2), 1024 + 64: (1, 0), 5 * 256 + 130: (0, 3)}
    for position, warps in expected.items():
        assert (store[position], row[position]) == warps
    assert module.warps_of(("load", ("c.py", 5)), size) is None  # of an unknown kind
    assert module.warps_of(("store", ("c.py", 5)), 1024) is None
    assert module.warps_of(("load", ("d.py", 1)), size) is None


def test_a_store_to_another_thread_s_element_needs_a_barrier():
    error = refused(
        Race, "a thread stores to an", repaired_kernel, *zeros(B), "", B, line="# repairs"
    )
    assert error.other == place(repaired_kernel, "# stores")
    run(repaired_kernel, (1,), *zeros(B), "same", B)
    (x,) = zeros(B)
    run(repaired_kernel, (1,), x, "barrier", B)
    assert int(x[-1]) == -1


def scratch(dtype=torch.float32):
    x = torch.randn(2, 64, 64).to(dtype)
    return x, torch.zeros(64, 64, dtype=dtype), torch.zeros_like(x), 2


def test_a_store_over_what_another_warp_still_loads_needs_a_barrier():
    error = refused(
        Race, "a warp stores to an element of scratch that another one may not have loaded yet",
        scratch_kernel, *scratch(), 2, "", line="# overwrites",
    )  # fmt: skip
    assert error.other == place(scratch_kernel, "# reads")
    x, *others = scratch()
    report = run(scratch_kernel, (1,), x, *others, 2, "barrier")
    assert torch.equal(others[1], x.roll(-2, 1)) and not report.unjudged
    run(scratch_kernel, (1,), *scratch(), 2, "", num_warps=1)


def test_a_store_over_what_the_same_warp_has_loaded_needs_none():
    """Four warps have two rows each by turns, in which rows 32 apart are of one warp."""
    assert not run(scratch_kernel, (1,), *scratch(), 32, "").unjudged
    (x,) = zeros(2 * B)
    x += torch.arange(2 * B, dtype=torch.int32)
    assert not run(swapped_kernel, (1,), x, B).unjudged
    assert torch.equal(x.view(B, 2).flip(1).reshape(-1), torch.arange(2 * B, dtype=torch.int32))


def test_a_scalar_is_stored_by_one_thread():
    refused(Race, "another one may", scalar_kernel, *zeros(1, B), B, line="# loads")


def test_a_conversion_in_the_machine_code_is_a_barrier():
    run(converted_kernel, (1,), *zeros((32, 32), (32, 32)), 32)


@before_that
def test_a_lock_is_released_by_one_thread():
    error = refused(
        Race, "one of its threads released", locked_kernel, *zeros(1, B), "", B, grid=(3,)
    )
    assert (error.file, error.line) == place(locked_kernel, "# stores")
    assert error.other == place(locked_kernel, "# stores")
    line = place(locked_kernel, "# releases")[1]
    assert f"released at {error.file}:{line}" in str(error)
    assert error.programs == ((0, 0, 0), (1, 0, 0))


@pytest.mark.parametrize("how", ("barrier", "scalar", *[""] * ATOMICS_MEET))
def test_a_lock_that_all_warps_have_left_is_released(how):
    for schedule in ("modelled", 1, 2):
        lock, x = zeros(1, B)
        options = {"grid": (4,), "schedule": schedule, "resident": 4}
        run(locked_kernel, options.pop("grid"), lock, x, how, B, **options)
        assert int(x[0]) == 4
    run(locked_kernel, (3,), *zeros(1, B), "", B, num_warps=1)


@before_that
def test_the_last_program_sees_not_all_without_barriers():
    refused(
        Race, "one of its threads released", last_kernel, *zeros(3 * B, 1, B), "", B,
        grid=(3,), line="# gathers",
    )  # fmt: skip


@pytest.mark.parametrize("how", ("barrier", *[""] * ATOMICS_MEET))
def test_the_last_program_sees_all(how):
    parts, count, out = zeros(3 * B, 1, B)
    run(last_kernel, (3,), parts, count, out, how, B)
    assert torch.equal(out, 3 * torch.arange(B, dtype=torch.int32))


@pytest.mark.parametrize("how, answer", (("", False), ("barrier", True), ("counter", True)))
def test_the_machine_code_says_so(how, answer):
    code = code_of(read_back_kernel, *zeros(B, B + 1), HOW=how, BLOCK=B)
    stores, loads = (place(read_back_kernel, f"# {text}") for text in ("stores", "loads"))
    assert meets(code, stores, loads) is answer
    assert meets(code, stores, ("elsewhere.py", 1)) is None
    assert meets(code, ("elsewhere.py", 1), loads) is None


def test_a_scalar_atomic_gives_its_result_through_shared_memory():
    """So that warps meet after it; whether they do before is the version's."""
    code = code_of(last_kernel, *zeros(3 * B, 1, B), HOW="", BLOCK=B)
    stores, counts, gathers = (
        place(last_kernel, f"# {text}") for text in ("stores", "counts", "gathers")
    )
    assert meets(code, stores, counts) is ATOMICS_MEET and meets(code, stores, gathers)
    code = code_of(locked_kernel, *zeros(1, B), HOW="", BLOCK=B)
    released = [place(locked_kernel, f"# {text}") for text in ("stores", "releases")]
    assert meets(code, *released) is ATOMICS_MEET
    code = code_of(locked_kernel, *zeros(1, B), HOW="barrier", BLOCK=B)
    assert meets(code, *released)


PROGRAM = """
import torch, triton
import triton.language as tl

@triton.jit
def turn_kernel(x_ptr, kept_ptr, out_ptr, BLOCK: tl.constexpr):
    rows, columns = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    tl.store(kept_ptr + rows * BLOCK + columns, tl.load(x_ptr + rows * BLOCK + columns))
    tl.store(out_ptr + rows * BLOCK + columns, tl.load(kept_ptr + columns * BLOCK + rows))

def test_turn():
    x = torch.randn(32, 32, device="cuda")
    out = torch.empty_like(x)
    turn_kernel[(1,)](x, torch.empty_like(x), out, 32)
    assert torch.equal(out, x.T)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "test_turn.py"
    path.write_text(PROGRAM)
    return path


def test_the_command_and_a_project_let_it_pass(program, capsys):
    target = "test_turn.py:test_turn"
    assert main([target]) == 1
    assert "or allow it with --allow-unguarded" in capsys.readouterr().err
    assert main(["--allow-unguarded", target]) == 0


def test_a_program_under_another_name_is_judged_alike(program, monkeypatch, capsys):
    """Triton takes the code of both for one, in which the lines are those of the first file."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(program.parent / "cache"))
    program.with_name("copied.py").write_text(PROGRAM)
    for name in (program.name, "copied.py"):
        assert main([f"{name}:test_turn"]) == 1
        place = program.with_name(name)
        assert capsys.readouterr().err.startswith(f"Race (schedule modelled): {place}:9: ")


SILENT = "could not judge 1 access at {0}:9: the compiled code does not tell whether warps meet"


def test_what_the_code_does_not_tell_is_counted(program, monkeypatch, capsys):
    monkeypatch.setattr(execution, "asm_of", lambda *_: {"ptx": "", "ttgir": ""})
    files = [program.parent / name for name in ("r.json", "r.sarif")]
    name, options = str(program), [f"--{file.suffix[1:]}={file}" for file in files]
    assert main([*options, f"{name}:test_turn"]) == 0
    out = capsys.readouterr().out
    assert SILENT.format(name) in out
    assert out.startswith("nothing found under the modelled and 4 random schedules; 1 not judged\n")
    report, sarif = (json.loads(file.read_text()) for file in files)
    question = f"whether warps meet between it and {name}:8"
    told = {"file": name, "line": 9, "question": question, "times": 1}
    assert report["unjudged"] == [told] and report["found"] is None
    (invocation,) = (run["invocations"][0] for run in sarif["runs"])
    (notification,) = invocation["toolExecutionNotifications"]
    assert notification["level"] == "note"
    assert (
        notification["message"]["text"]
        == f"{SILENT.format(name).rpartition('whether')[0]}{question}"
    )
    ran = [{"program": name, "status": 0, "report": report}]
    assert processes.summary(ran) == "1 programs: 1 nothing found, not all judged"


def test_what_does_not_compile_is_not_judged_in_silence(capfd):
    wrong = {"ptx_options": "--no-such-option"}
    reason = r"Triton refuses this kernel: ptxas\S* fatal : Unknown option '-no-such-option'$"
    with pytest.raises(InvalidKernel) as caught:
        run(read_back_kernel, (1,), *zeros(B, B + 1), "", B, **wrong)
    assert re.search(reason, caught.value.args[0])
    assert capfd.readouterr() == ("", "")
    run(read_back_kernel, (1,), *zeros(B, B + 1), "barrier", B, **wrong)  # nobody asks


def test_a_comment_allows_it(program):
    program.write_text(
        PROGRAM.replace("BLOCK + rows))", "BLOCK + rows))  # tritonemu: allow(Race) ok")
    )
    assert main(["test_turn.py:test_turn"]) == 0


@pytest.mark.sweep
def test_the_plugin_lets_it_pass(program):
    def ends(*flags: str) -> int:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tritonemu.pytest_plugin"]
        return subprocess.run(
            [*command, "--fake-gpu", "-p", "no:cacheprovider", *flags, str(program)],
            capture_output=True,
        ).returncode

    assert ends() == 1
    assert ends("--emulated-allow-unguarded") == 0


PTX = """
	.file	1 "/a/b" "c.py"
	.loc	1 5 1
	st.global.b32 [%rd1], %r1;
	@%p1 bra $L__BB0_2;
	bar.sync 0;
$L__BB0_2:
	.loc	1 6 1
	ld.global.b32 %r2, [%rd1];
	{}
	.loc	1 7 1
	atom.global.add.u32 %r3, [%rd2], 1;
	ret;
	.loc	1 8 1
	ld.global.b32 %r2, [%rd1];
"""


@pytest.mark.parametrize(
    "between, answer",
    (
        ("bar.warp.sync 0xffffffff;", False),
        ("st.shared.b32 [%r1], %r2;", False),
        ("@%p3 bar.sync 0;", True),
        ("barrier.cta.sync.aligned 1, 64;", True),
        ("call.uni (_), f, (%r1);", True),
        ("bra.uni $L__BB0_2;", True),
    ),
)
def test_every_way_through_the_code_counts(between, answer):
    code = Code(PTX.replace("{}", between))
    assert meets(code, ("/x/c.py", 5), ("c.py", 6)) is False
    assert meets(code, ("c.py", 5), ("c.py", 7)) is answer
    assert meets(code, ("c.py", 5), ("c.py", 8))  # not reached
