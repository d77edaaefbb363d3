"""What is not worth a look is refused: kernels that do not fit, and kernels that do nothing."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.runtime.errors import OutOfResources

import tritonemu
from gdpa_kernels.block_attention import batch as block_batch
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.calling.rung import Rung
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.measuring import compile_check


@triton.jit
def shared_kernel(x_ptr, KIBIBYTES: tl.constexpr, WRITES: tl.constexpr):
    buffers = tlx.local_alloc((256,), tl.float32, KIBIBYTES)
    at = x_ptr + tl.arange(0, 256)
    if WRITES:
        tlx.local_store(buffers[1], tl.load(at))
        tl.store(at, tlx.local_load(buffers[1]))


@triton.jit
def tensor_kernel(x_ptr, COLUMNS: tl.constexpr, COUNT: tl.constexpr):
    buffers = tlx.local_alloc((128, COLUMNS), tl.float32, COUNT, tlx.storage_kind.tmem)
    at = x_ptr + tl.arange(0, 128)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    for i in tl.static_range(COUNT):
        tlx.local_store(buffers[i], tl.load(at + i))
    for i in tl.static_range(COUNT):
        tl.store(at, tlx.local_load(buffers[i]))


def build(kernel, capability: int = 90, **constants):
    return compile_check.build(
        kernel, {"x_ptr": "*fp32"}, constants, capability=capability, options={"num_warps": 4}
    )


def test_shared_memory_has_an_end():
    assert build(shared_kernel, KIBIBYTES=128, WRITES=True).metadata.shared >= 2**17
    with pytest.raises(OutOfResources, match="shared memory, Required: .*limit: 232448"):
        build(shared_kernel, KIBIBYTES=256, WRITES=True)
    with pytest.raises(OutOfResources, match="shared memory, Required: .*limit: 166912"):
        build(shared_kernel, 80, KIBIBYTES=164, WRITES=True)


def test_tensor_memory_has_an_end():
    assert build(tensor_kernel, 100, COLUMNS=128, COUNT=4).metadata.tmem_size == 512
    with pytest.raises(OutOfResources, match="tensor memory, Required: 640, Hardware limit: 512"):
        build(tensor_kernel, 100, COLUMNS=128, COUNT=5)


def test_a_kernel_that_does_nothing_is_refused():
    with pytest.raises(ValueError, match="must write to memory, got shared_kernel, which does not"):
        build(shared_kernel, KIBIBYTES=2, WRITES=False)


def test_a_device_without_limits_is_refused():
    with pytest.raises(ValueError, match=r"one of \(80, 90, 100\), got 70"):
        build(shared_kernel, 70, KIBIBYTES=2, WRITES=True)


def test_a_module_stands_for_its_rung():
    rung = ladder.rung("v1_tiled")
    options = {"head_dim": 64, "dtype": torch.float16, "max_seqlen_k": 100}
    built = [compile_check.build_rung(impl, **options) for impl in ("v1_tiled", rung.module())]
    assert built[0].hash == built[1].hash
    other = compile_check.build_rung("v1_tiled", **options | {"activation": "relu"})
    assert other.hash != built[0].hash


def launched(rung: Rung, head_dim: int) -> list:
    """What forward, backward or both of a rung launch on 130 tokens with 4 heads in bf16."""
    module, ends = rung.module(), torch.tensor([0, 130], dtype=torch.int32)
    x = torch.zeros(130, 4, head_dim, dtype=torch.bfloat16)
    with launches(run=False) as seen:
        if rung.operator == "block_attention":
            batch = block_batch.Batch(x, x, x, ends, 1.0)
            blocks = (torch.zeros(3, 2, dtype=torch.int32),)
            _, saved = module.forward(batch, schedule=blocks)
            module.backward(x, batch, saved, schedule=blocks)
            return seen
        batch = Batch(x, x, x, ends, ends, 130, 130, ("gelu_tanh",), 1.0)
        if rung.operator == "gdpa":
            module.forward(batch)
        else:
            module.backward(x, batch)
    return seen


ON_BLACKWELL = [
    rung
    for rungs in ladder.LADDERS.values()
    for rung in rungs
    if rung.requires.capability and not rung.requires.only_major
]


@pytest.mark.parametrize("head_dim", (64, 128, 256))
@pytest.mark.parametrize("rung", ON_BLACKWELL, ids=lambda rung: rung.impl)
def test_rungs_fit_on_blackwell_where_they_say_so(rung, head_dim):
    x = torch.zeros(1, 4, head_dim, dtype=torch.bfloat16)
    if rung.requires.of_call(x, x, x) is not None:
        pytest.skip(f"{rung.impl} takes no head_dim {head_dim} anywhere")
    with tritonemu.enabled("sm_100"):
        problem = rung.requires.of_call(x, x, x)
    if problem is None:
        for launch in launched(rung, head_dim):
            compile_check.build_launch(launch, capability=100)
        return
    most = rung.requires.head_dim_max_of[10]
    assert problem == (
        f"needs a head_dim of at most {most} on sm_100 that is a multiple of 8, got {head_dim}"
    )
    with pytest.raises(OutOfResources):
        for launch in launched(rung, head_dim):
            compile_check.build_launch(launch, capability=100)
