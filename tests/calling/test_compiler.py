"""What Triton of this environment cannot compile is named, repaired by a command, and warned of."""

import subprocess
import sys
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import gdpa_kernels
from gdpa_kernels import __main__, doctor
from gdpa_kernels.block_attention import api as blocks
from gdpa_kernels.block_attention.batch import Batch as Blocks
from gdpa_kernels.calling import compiler, ladder, rung
from gdpa_kernels.gdpa import api
from gdpa_kernels.gdpa.batch import Batch
from tests.test_rooms import FILES, imported

MIXED = "libtriton lacks 79 of the 85 operations that TLX calls"


@pytest.fixture
def h100(monkeypatch):
    """A GPU that nothing runs on, and a process that has not warned."""
    monkeypatch.setattr(rung, "_gpu_capability", lambda index: (9, 0))
    monkeypatch.setattr(compiler, "_has_warned", False)


@pytest.fixture
def mixed(monkeypatch, h100):
    """Triton over fbtriton's files."""
    monkeypatch.setattr(compiler, "tlx_problem", lambda: MIXED)


@pytest.fixture
def no_triton(monkeypatch, h100):
    """No Triton at all."""
    missing = ModuleNotFoundError("No module named 'triton'")
    monkeypatch.setattr(compiler, "_triton", lambda: missing)

    def module(impl, operator):
        raise missing

    there = rung._module
    monkeypatch.setattr(
        rung,
        "_module",
        lambda impl, operator: (
            module(impl, operator)
            if ladder.rung(impl, operator).requires.capability
            else there(impl, operator)
        ),
    )


def call(head_dim: int = 128, dtype=torch.bfloat16) -> Batch:
    q = torch.empty(128, 2, head_dim, dtype=dtype, device="cuda:0")
    ends = torch.empty(3, dtype=torch.int32, device="cuda:0")
    return Batch(q, q, q, ends, ends, 64, 64, ("gelu_tanh",), 0.1, 1.0)


def taken(direction: str, **options: object) -> tuple[str, list[str]]:
    """What "auto" takes on the H100, and what it warns of."""
    with FakeTensorMode(), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        impl = api.resolve("auto", direction, call(**options)).impl
    kind = gdpa_kernels.CompilerWarning
    return impl, [str(each.message) for each in seen if issubclass(each.category, kind)]


def uses_tlx(name: str, seen: set[str]) -> bool:
    seen.add(name)
    if "import triton.language.extra.tlx" in FILES[name].read_text():
        return True
    return any(uses_tlx(x, seen) for x in imported(name, at_import=True) - seen)


def test_what_is_written_in_tlx_says_so():
    for rungs in ladder.LADDERS.values():
        for each in rungs:
            assert each.requires.tlx == uses_tlx(each.module().__name__, set()), each.impl


def test_a_whole_compiler_takes_what_is_fastest_and_warns_of_nothing(h100):
    assert compiler.problem(tlx=True) is None
    assert taken("forward") == ("v8_own_waits", [])
    assert taken("backward") == ("v6_one_tile_backward", [])


def test_auto_warns_once_of_what_the_environment_costs(mixed):
    impl, (said,) = taken("forward")
    assert impl == "v1_tiled"
    assert said.startswith(
        f"impl=\"auto\" takes a slower implementation than 'v8_own_waits': {MIXED}"
    )
    assert compiler.repair() in said and "python -m gdpa_kernels" in said
    assert taken("forward") == ("v1_tiled", [])
    assert taken("backward") == ("v2a_ordered_backward", [])


def test_auto_does_not_warn_of_what_the_call_rules_out(mixed):
    assert taken("forward", dtype=torch.float32) == ("v1_tiled", [])
    assert taken("forward", head_dim=512) == ("reference", [])


def test_without_triton_auto_warns_before_it_takes_the_definition(no_triton):
    impl, (said,) = taken("backward")
    assert impl == "reference" and "Triton cannot be imported (ModuleNotFoundError" in said


def test_blocks_warn_too(mixed):
    with FakeTensorMode(), pytest.warns(gdpa_kernels.CompilerWarning, match="v3_warp_specialized"):
        batch = call()
        batch = Blocks(batch.q, batch.q, batch.q, batch.cu_seqlens_q, 0.1)
        assert blocks.resolve("auto", "backward", batch).impl == "v1_one_tile"


def test_an_explicit_impl_is_refused_with_the_reason(mixed):
    with FakeTensorMode(), pytest.raises(NotImplementedError, match=MIXED):
        api.resolve("v8_own_waits", "forward", call())
    with FakeTensorMode():
        assert api.resolve("v2_tma", "forward", call()).impl == "v2_tma"


def test_availability_says_why(mixed):
    assert ladder.availability("v8_own_waits", "cuda:0") == (False, MIXED)
    assert ladder.availability("v1_tiled", "cuda:0") == (True, "runs on cuda:0")


PLUGIN = "triton/language/extra/tlx/mem_ops.py"
LIBRARY = "class ir:\n    class builder:\n        create_local_alloc = create_barrier_wait = None\n"
CALLS = "def f(_semantic):\n    _semantic.builder.create_local_alloc()\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({PLUGIN: CALLS, "triton/_C/libtriton.py": LIBRARY}, "None"),
        ({PLUGIN: CALLS, "triton/_C/libtriton.py": LIBRARY.replace("local_alloc", "for")},
         "libtriton lacks 1 of the 1 operations that TLX calls, create_local_alloc for one"),
        ({"triton/_C/libtriton.py": LIBRARY}, "TLX, which fbtriton has, cannot be imported"),
        ({"triton/language/__init__.py": "raise OSError('damaged')"},
         "Triton cannot be imported (OSError: damaged)"),
    ],
)  # fmt: skip
def test_triton_is_judged_by_what_its_library_has(tmp_path, files, expected):
    names = ["triton/__init__.py", "triton/language/__init__.py"]
    names += ["triton/language/extra/__init__.py", "triton/_C/__init__.py"]
    files = dict.fromkeys(names, "__version__ = '3.8.0'\n") | files
    if PLUGIN in files:
        files[PLUGIN.replace("mem_ops", "__init__")] = ""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    program = (
        f"import sys, torch; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from gdpa_kernels.calling import compiler; print(compiler.problem(tlx=True))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert expected in ran.stdout, ran.stderr


def test_the_command_prints_the_verdict_the_rungs_and_the_cure(capsys, mixed):
    assert __main__.main() == 1
    said = capsys.readouterr().out
    assert said.startswith(f"1 thing to repair:\n  {compiler.repair()}\n")
    assert MIXED in " ".join(said.split()) and "v8_own_waits" in said


def test_the_command_finds_nothing_to_repair_here(capsys):
    assert __main__.main() == 0
    assert capsys.readouterr().out.startswith(doctor.verdict(doctor.findings()))


def test_where_fbtriton_has_no_wheel_no_command_is_given(monkeypatch, mixed):
    monkeypatch.setattr(sys, "platform", "darwin")
    _, (said,) = taken("forward")
    assert "pip install" not in said
