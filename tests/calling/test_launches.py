"""Where a kernel meets a device: launches run on a GPU or in the emulator, and are always seen."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

import tritonemu
from gdpa_kernels import gdpa
from gdpa_kernels.calling import launch as launching
from gdpa_kernels.calling import launches as recording
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.kernels import v8_own_waits
from gdpa_lab.measuring.inputs import cu_seqlens
from tests import rungs
from tests.calls import emulated
from tests.tiers import swept

CPU = torch.device("cpu")


@triton.jit
def add_kernel(x_ptr, none_ptr, n, VALUE: tl.constexpr, BLOCK: tl.constexpr = 16):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(x_ptr + i, VALUE, mask=i < n)


def launch(x: torch.Tensor, device: torch.device = CPU, value: int = 5) -> None:
    launching.launch(add_kernel, (2,), device, x, None, 7, VALUE=value, num_warps=2)


def made_of(x: torch.Tensor) -> int:
    """How many launches there were."""
    assert set(x[7:].tolist()) == {0} and len(set(x[:7].tolist())) == 1
    return x[0].item() // 10


@pytest.fixture
def x() -> torch.Tensor:
    return torch.zeros(16, dtype=torch.int32)


def test_everything_has_its_name(x):
    with launches(run=False) as seen:
        launch(x)
    (only,) = seen
    assert (only.kernel, only.name, only.grid) == (add_kernel, "add_kernel", (2,))
    assert only.arguments["x_ptr"] is x
    assert only.arguments == {"x_ptr": x, "none_ptr": None, "n": 7}
    assert only.constants == {"VALUE": 5, "BLOCK": 16}
    assert only.options == {"num_warps": 2}
    assert made_of(x) == 0 and not recording.recorders


def test_cpu_tensors_run_in_the_emulator_or_not_at_all(x):
    with pytest.raises(RuntimeError, match="add_kernel needs tensors on a CUDA device"):
        launch(x)
    with tritonemu.enabled():
        launch(x)
    assert x.tolist() == [2 * 5] * 7 + [0] * 9


def test_a_grid_without_programs_launches_nothing(x):
    with launches(run=False) as seen:
        launching.launch(add_kernel, (0, 3), CPU, x[:0], None, 7, VALUE=5)
    launching.launch(add_kernel, (0, 3), CPU, x[:0], None, 7, VALUE=5)
    assert not seen
    with pytest.raises(ValueError, match=r"grid must have programs .*, got \(0, 3\) for add_kern"):
        launching.launch(add_kernel, (0, 3), CPU, x, None, 7, VALUE=5)


def test_the_emulator_runs_what_is_seen(x):
    with launches() as seen, tritonemu.enabled() as reports:
        launch(x)
        assert made_of(x) == len(seen) == len(reports) == 1
    assert reports[0].kernel == "add_kernel" and reports[0].programs == 2
    with tritonemu.enabled():
        launch(x)
    assert len(seen) == len(reports) == 1 and made_of(x) == 2


def test_a_kernel_gets_everything_by_position(x, monkeypatch):
    """As Triton's paths in C need it: defaults too, and 4 warps unsaid."""
    got = []
    monkeypatch.setattr(type(add_kernel), "run", lambda *args, **given: got.append((args, given)))
    for warps in (2, 4):
        launching._run(add_kernel, (2,), (x, None, 7), {"VALUE": 5, "num_warps": warps})
    for (_, *args), given in got:
        assert args[0] is x and args[1:] == [None, 7, 5, 16]
        assert not given.keys() & set(add_kernel.arg_names)
    assert [given.get("num_warps") for _, given in got] == [2, None]


def test_contexts_nest(x):
    with tritonemu.enabled(), launches() as outer:
        launch(x)
        with launches(run=False) as inner, launches() as innermost:
            launch(x)
        launch(x)
    assert (len(outer), len(inner), len(innermost)) == (3, 1, 1)
    assert made_of(x) == 2


def test_contexts_need_not_end_in_order(x):
    first, second = launches(run=False), launches(run=False)
    seen = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    launch(x)
    second.__exit__(None, None, None)
    assert [len(each) for each in seen] == [0, 1] and not recording.recorders


def test_what_an_open_context_notes_it_leaves_out(x, monkeypatch):
    """Though another thread closes it before the launch is made."""
    context = launches(run=False)
    seen = context.__enter__()
    monkeypatch.setattr(recording, "Launch", lambda *_: context.__exit__(None, None, None))
    launch(x)
    assert len(seen) == 1 and not recording.recorders


def test_an_error_ends_the_context(x):
    with pytest.raises(RuntimeError, match="needs tensors on a CUDA device"), launches() as seen:
        launch(x)
    assert len(seen) == 1 and not recording.recorders


def test_other_threads_are_seen(x):
    """As autograd's, which launches the backward of tensors on a GPU."""
    with launches(run=False) as seen:
        thread = threading.Thread(target=launch, args=(x,))
        thread.start()
        thread.join()
    assert len(seen) == 1 and made_of(x) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("run", (True, False))
def test_on_a_gpu(run):
    x = torch.zeros(16, device="cuda")
    with launches(run=run) as seen:
        launch(x, x.device)
    (only,) = seen
    assert only.grid == (2,) and only.arguments["x_ptr"] is x
    assert x.tolist() == [10.0 * run] * 7 + [0.0] * 9


def call(requires_grad: bool) -> dict:
    ends = cu_seqlens([40, 70], "cpu")
    q, k, v = (torch.randn(110, 2, 128).bfloat16().requires_grad_(requires_grad) for _ in range(3))
    return {
        "q": q, "k": k, "v": v, "cu_seqlens_q": ends, "cu_seqlens_k": ends,
        "max_seqlen_q": 70, "max_seqlen_k": 70,
    }  # fmt: skip


def test_forward_and_backward_of_a_call():
    arguments = call(requires_grad=True)
    impls = {"impl": "v1_tiled", "backward_impl": "v1_tiled_backward"}
    with launches() as seen, tritonemu.enabled() as reports:
        gdpa(**arguments, **impls).sum().backward()
    names = ["tiled_kernel", "keys_kernel", "queries_kernel"]
    assert sorted(launch.name for launch in seen) == sorted(names)
    assert [launch.name for launch in seen] == [report.kernel for report in reports]
    assert seen[0].arguments["q_ptr"].data_ptr() == arguments["q"].data_ptr()


def test_a_rung_that_does_not_run_needs_no_device():
    batch = Batch(**call(requires_grad=False), activation=("relu",), scale=1.0)
    with launches(run=False) as seen:
        v8_own_waits.forward(batch)
    assert [launch.name for launch in seen] == ["work_list_kernel", "own_waits_kernel"]
    assert seen[1].constants["ACTIVATION"] == "relu" and seen[1].grid == (3,)
    with tritonemu.enabled(multiprocessors=2), launches(run=False) as seen:
        v8_own_waits.forward(batch)
    assert seen[-1].grid == (2,)


def test_multiprocessors_of_each_device(monkeypatch):
    launching._properties_of.cache_clear()
    asked = []

    def properties(index):
        asked.append(index)
        return SimpleNamespace(multi_processor_count=100 + index)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    devices = ("cuda:0", "cuda:1", "cuda", "cuda:0")
    assert [launching.multiprocessors(torch.device(d)) for d in devices] == [100, 101, 101, 100]
    assert asked == [0, 1]
    assert launching.multiprocessors(torch.device("cpu")) == tritonemu.MULTIPROCESSORS
    launching._properties_of.cache_clear()


@pytest.mark.parametrize(
    "rung", swept(rungs.KERNELS, lambda rung: not rung.is_lesson), ids=lambda rung: rung.impl
)
def test_one_multiprocessor_does_all_the_work(rung):
    head_dim, lengths = rungs.head_dim_of(rung), (5, 65)
    grad, *qkv = torch.randn(4, sum(lengths), 2, head_dim).bfloat16()
    turns = tuple(torch.randn(2, sum(lengths), head_dim // 2)) if rungs.takes_turns(rung) else None
    batch = rungs.batch_of(rung, qkv, turns, lengths)
    with emulated(rung.impl, multiprocessors=1):
        actual = rungs.results(rung, batch, grad)
    with emulated(rung.impl):
        expected = rungs.results(rung, batch, grad)
    for one, other in zip(actual, expected, strict=True):  # equal, but for the order of sums
        torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-7)


OF_GDPA = [rung for rung in rungs.KERNELS if rung.operator != "block_attention"]


@pytest.mark.parametrize("rung", OF_GDPA, ids=lambda rung: rung.impl)
def test_a_shared_q_of_no_rows(rung):
    k = torch.randn(5, 1, rungs.head_dim_of(rung)).bfloat16()
    batch = replace(rungs.batch_of(rung, (k[:0], k, k), None, (5,)), cu_seqlens_q=None)
    batch = replace(batch, max_seqlen_q=0)
    with emulated(rung.impl):
        if rung.call_problem(batch):
            pytest.skip("it takes no shared q")
        found = rungs.results(rung, batch, k[:0])
    assert found[0].shape == (0, *k.shape[1:])
    assert all(x.shape == k.shape and not x.any() for x in found[1:])
