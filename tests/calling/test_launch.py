"""Where a kernel meets a device."""

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

import tritonemu
from gdpa_kernels.calling import launch as launching


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
    launching.launch(store_kernel, (0, 3), torch.device("cpu"), None, 0, VALUE=0, BLOCK=32)
