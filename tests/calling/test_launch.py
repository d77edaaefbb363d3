"""Where a kernel meets a device."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

import tritonemu
from gdpa_kernels.calling import launch as launching
from tests import rungs


@triton.jit
def store_kernel(x_ptr, n, VALUE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, VALUE, mask=at < n)


def test_cpu_tensors_run_in_the_emulator_or_not_at_all():
    x = torch.zeros(32, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="store_kernel needs tensors on a CUDA device"):
        launching.launch(store_kernel, (1,), x.device, x, 7, VALUE=5, BLOCK=32)
    with tritonemu.enabled():
        launching.launch(store_kernel, (1,), x.device, x, 7, VALUE=5, BLOCK=32)
    assert x.tolist() == [5] * 7 + [0] * 25


def test_multiprocessors_of_each_device(monkeypatch):
    launching._multiprocessors.cache_clear()
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
    launching._multiprocessors.cache_clear()


def test_a_grid_without_programs_launches_nothing():
    cpu = torch.device("cpu")
    launching.launch(store_kernel, (0, 3), cpu, torch.empty(0), 0, VALUE=0, BLOCK=32)
    with pytest.raises(ValueError, match=r"grid must have programs .*, got \(0, 3\) for store_ke"):
        launching.launch(store_kernel, (0, 3), cpu, torch.empty(1), 1, VALUE=0, BLOCK=32)


@pytest.mark.parametrize("rung", rungs.KERNELS, ids=lambda rung: rung.impl)
def test_one_multiprocessor_does_all_the_work(rung):
    head_dim, lengths = rungs.head_dim_of(rung), (5, 65)
    grad, *qkv = torch.randn(4, sum(lengths), 2, head_dim).bfloat16()
    turns = tuple(torch.randn(2, sum(lengths), head_dim // 2)) if rungs.takes_turns(rung) else None
    batch = rungs.batch_of(rung, qkv, turns, lengths)
    with rungs.emulated(rung, multiprocessors=1):
        actual = rungs.results(rung, batch, grad)
    with rungs.emulated(rung):
        expected = rungs.results(rung, batch, grad)
    for one, other in zip(actual, expected, strict=True):  # equal, but for the order of sums
        torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-7)


OF_GDPA = [rung for rung in rungs.KERNELS if rung.operator != "block_attention"]


@pytest.mark.parametrize("rung", OF_GDPA, ids=lambda rung: rung.impl)
def test_a_shared_q_of_no_rows(rung):
    k = torch.randn(5, 1, rungs.head_dim_of(rung)).bfloat16()
    batch = replace(rungs.batch_of(rung, (k[:0], k, k), None, (5,)), cu_seqlens_q=None)
    batch = replace(batch, max_seqlen_q=0)
    with rungs.emulated(rung):
        if rung.problem(batch):
            pytest.skip("it takes no shared q")
        found = rungs.results(rung, batch, k[:0])
    assert found[0].shape == (0, *k.shape[1:])
    assert all(x.shape == k.shape and not x.any() for x in found[1:])
