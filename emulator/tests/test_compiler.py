"""Facts about a launch that only the compiler knows."""

import pytest
import torch
import triton
import triton.language as tl

from emulator.tests.checking import box, refused, tlx
from tritonemu import InvalidKernel, ResourceLimit, Unsupported, run
from tritonemu.__main__ import main


@triton.jit
def scratch_kernel(y_desc):
    big = tlx.local_alloc((128, 128), tl.bfloat16, 7)
    x = tl.arange(0, 128)[:, None] + tl.arange(0, 128)[None, :]
    for i in tl.static_range(7):
        tlx.local_store(big[i], x.to(tl.bfloat16))
    y_desc.store([0, 0], tlx.local_load(big[6]))


@pytest.mark.tlx
def test_shared_memory_that_the_compiler_adds():
    y = box(torch.zeros(128, 128).bfloat16(), 128, 128)
    run(scratch_kernel, (1,), y)
    refused(ResourceLimit, "compiled kernel needs 262144", scratch_kernel, y, compile=True)


@triton.jit
def refused_kernel(y_ptr, n):
    if n > 0:
        tl.store(y_ptr, 1.0)
    else:
        for i in range(n):
            if i == 2:
                break


def test_refusals_are_quoted():
    y = torch.zeros(1)
    refused(Unsupported, "Break", refused_kernel, y, 2)
    with pytest.raises(InvalidKernel, match="Triton refuses this kernel: .*Break"):
        run(refused_kernel, (1,), y, 2, compile=True)


@triton.jit
def registers_kernel(y_ptr):
    with tlx.async_tasks():
        with tlx.async_task("default"):
            tl.store(y_ptr, 1.0)
        with tlx.async_task(num_warps=8, registers=232):
            tl.store(y_ptr + 1, 2.0)
        with tlx.async_task(num_warps=4, registers=120):
            tl.store(y_ptr + 2, 3.0)


@pytest.mark.tlx
def test_registers_that_the_compiler_drops():
    with (
        pytest.warns(UserWarning, match="the compiler drops registers= of all tasks: 512 threads"),
        pytest.warns(UserWarning, match="drops the registers= of the tasks of registers_kernel"),
    ):
        run(registers_kernel, (1,), torch.zeros(3), compile=True)


def test_the_command_compiles(tmp_path, capsys):
    source = tmp_path / "kernel.py"
    source.write_text(
        "import torch, triton, triton.language as tl\n\n"
        "@triton.jit\ndef k(y_ptr, N: tl.constexpr):\n"
        "    x = tl.zeros((N,), tl.float32)\n"
        "    tl.store(y_ptr + tl.arange(0, N), tl.dot(x[None, :], x[:, None]).reshape(1))\n\n"
        "def fine():\n    k[(1,)](torch.zeros(1), N=1)\n"
    )
    assert main(["--compile", f"{source}:fine"]) != 0
    assert "InvalidKernel" in capsys.readouterr().err
