"""What is not worth a look is refused: kernels that do not fit, and kernels that do nothing."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.runtime.errors import OutOfResources

import tritonemu
from _lib import compile_check
from gdpa_kernels.calling import ladder
from tests.rungs import KERNELS, launched


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
    with pytest.raises(ValueError, match=r"one of \(86, 89, 120, 80, 90, 100, 103\), got 70"):
        build(shared_kernel, 70, KIBIBYTES=2, WRITES=True)


def test_a_module_stands_for_its_rung():
    rung = ladder.rung("v1_tiled")
    options = {"head_dim": 64, "dtype": torch.float16, "max_seqlen_k": 100}
    built = [compile_check.build_rung(impl, **options) for impl in ("v1_tiled", rung.module())]
    assert built[0].hash == built[1].hash
    other = compile_check.build_rung("v1_tiled", **options | {"activation": "relu"})
    assert other.hash != built[0].hash


ON_BLACKWELL = [rung for rung in KERNELS if not rung.requires.only_major]


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


PLAIN = [rung for rung in KERNELS if rung.requires.capability == (8, 0)]
OF_PLAIN = "rung, head_dim, dtype, block_size, capability"


def promised(capabilities: tuple[int, ...], head_dims: tuple[int, ...]) -> list:
    return [
        pytest.param(*call, id="-".join(map(str, (call[0].impl, *call[1:]))))
        for rung in PLAIN
        for call in itertools.product(
            (rung,),
            head_dims,
            rung.requires.dtypes,
            (64, 128) if rung.operator == "block_attention" else (64,),
            capabilities,
        )
    ]


def check_that_it_fits(rung, head_dim, dtype, block_size, capability, monkeypatch) -> None:
    most = compile_check.SHARED_BYTES[capability]
    monkeypatch.setattr(rung.module(), "shared_memory", lambda device: most, raising=False)
    seen = launched(rung, head_dim, getattr(torch, dtype), block_size, turned=True)
    for launch in seen:
        compile_check.build_launch(launch, capability=capability)  # raises OutOfResources


@pytest.mark.parametrize(OF_PLAIN, promised((89,), (256,)))
def test_wide_heads_fit_in_the_least_shared_memory(
    rung, head_dim, dtype, block_size, capability, monkeypatch
):
    check_that_it_fits(rung, head_dim, dtype, block_size, capability, monkeypatch)


@pytest.mark.nightly
@pytest.mark.parametrize(OF_PLAIN, promised((80, 86, 89, 90, 100, 120), (16, 32, 64, 128, 256)))
def test_plain_rungs_fit_on_every_gpu(rung, head_dim, dtype, block_size, capability, monkeypatch):
    check_that_it_fits(rung, head_dim, dtype, block_size, capability, monkeypatch)


@pytest.mark.parametrize("impl, most", (("v3_persistent", 64), ("v2_fused_backward", 64)))
def test_what_does_not_fit_on_sm_120_is_refused(impl, most, monkeypatch):
    monkeypatch.setattr("gdpa_kernels.calling.rung.capability", lambda device: (12, 0))
    (rung,) = (rung for rung in KERNELS if rung.impl == impl)
    for head_dim in (most, most + 8):
        x = torch.zeros(1, 4, head_dim, dtype=torch.bfloat16)
        problem = rung.requires.of_call(x, x, x)
        assert (problem is None) == (head_dim == most)
    assert problem.startswith("needs a head_dim of at most 64 on sm_120") and "got 72" in problem
