"""Kernels not worth a look are refused: those that do not fit, and those that do nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.runtime.errors import OutOfResources

import tritonemu
from _lib import studies
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.gdpa.mask import Mask
from gdpa_lab.measuring import compile_check
from tests.rungs import KERNELS, launched
from tests.tiers import sweep, swept


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


def test_memory_is_counted():
    assert build(shared_kernel, KIBIBYTES=128, WRITES=True).metadata.shared >= 2**17
    assert build(tensor_kernel, 100, COLUMNS=128, COUNT=4).metadata.tmem_size == 512


SHARED = "shared memory, Required: .*limit: "


@pytest.mark.parametrize(
    ("kernel", "capability", "constants", "error", "message"),
    [
        (shared_kernel, 90, {"KIBIBYTES": 256, "WRITES": True}, OutOfResources, f"{SHARED}232448"),
        (shared_kernel, 80, {"KIBIBYTES": 164, "WRITES": True}, OutOfResources, f"{SHARED}166912"),
        (tensor_kernel, 100, {"COLUMNS": 128, "COUNT": 5}, OutOfResources,
         "tensor memory, Required: 640, Hardware limit: 512"),
        (shared_kernel, 90, {"KIBIBYTES": 2, "WRITES": False}, ValueError,
         "must write to memory, got shared_kernel, which does not"),
        (shared_kernel, 70, {"KIBIBYTES": 2, "WRITES": True}, ValueError,
         r"one of \(86, 89, 120, 80, 90, 100, 103, 'gfx942', 'gfx950'\), got 70"),
    ],
)  # fmt: skip
def test_what_does_not_fit_or_does_nothing_is_refused(
    kernel, capability, constants, error, message
):
    with pytest.raises(error, match=message):
        build(kernel, capability, **constants)


def test_a_module_stands_for_its_rung():
    rung = ladder.rung("v1_tiled")
    options = {"head_dim": 64, "dtype": torch.float16, "max_seqlen_k": 100}
    built = [compile_check.build_rung(impl, **options) for impl in ("v1_tiled", rung.module())]
    assert built[0].hash == built[1].hash
    other = compile_check.build_rung("v1_tiled", **options | {"activation": "relu"})
    assert other.hash != built[0].hash
    with pytest.raises(TypeError, match="multiple values for keyword argument 'mask'"):
        compile_check.build_rung("v1_tiled", mask=Mask(causal=True))


ON_BLACKWELL = [rung for rung in KERNELS if not rung.requires.only_major]


@pytest.mark.parametrize("head_dim", (sweep(64), 128, sweep(256)))
@pytest.mark.parametrize(
    "rung",
    swept(ON_BLACKWELL, lambda rung: rung.impl in ("v1_tiled", "v3_persistent")),
    ids=lambda rung: rung.impl,
)
def test_rungs_fit_on_blackwell_where_they_say_so(rung, head_dim):
    x = torch.zeros(1, 4, head_dim, dtype=torch.bfloat16)
    if rung.requires.tensors_problem(x, x, x) is not None:
        pytest.skip(f"{rung.impl} takes no head_dim {head_dim} anywhere")
    with tritonemu.enabled("sm_100"):
        problem = rung.requires.tensors_problem(x, x, x)
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


def promised() -> Iterator:
    """Every call of a plain rung; in the sweeps wide heads in the least shared memory, where fp16
    takes as much as bf16, and of these one in the quick tier."""
    for rung in KERNELS:
        if rung.requires.capability == (8, 0):
            sizes = (64, 128) if rung.operator == "block_attention" else (64,)
            for call in itertools.product(
                (256, 16, 32, 64, 128), rung.requires.dtypes, sizes, (89, 80, 86, 90, 100, 120)
            ):
                by_day = call[0] == 256 and call[-1] == 89 and call[1] != "float16"
                quick = by_day and rung.impl == "v1_tiled" and call[1] == "bfloat16"
                marks = () if quick else pytest.mark.sweep if by_day else pytest.mark.nightly
                name = "-".join(map(str, (rung.impl, *call)))
                yield pytest.param(rung, *call, id=name, marks=marks)


@pytest.mark.parametrize("rung, head_dim, dtype, block_size, capability", [*promised()])
def test_plain_rungs_fit_on_every_gpu(rung, head_dim, dtype, block_size, capability, monkeypatch):
    most = compile_check.SHARED_BYTES[capability]
    monkeypatch.setattr(rung.module(), "shared_memory", lambda device: most, raising=False)
    for launch in launched(rung, head_dim, getattr(torch, dtype), block_size, turned=True):
        compile_check.build_launch(launch, capability=capability)  # raises OutOfResources


@pytest.mark.parametrize("impl", ("v3_persistent", "v2_fused_backward"))
def test_what_does_not_fit_on_sm_120_is_refused(impl, monkeypatch):
    monkeypatch.setattr("gdpa_kernels.calling.rung.capability", lambda device: (12, 0))
    (rung,) = (rung for rung in KERNELS if rung.impl == impl)
    fits, problem = (
        rung.requires.tensors_problem(*[torch.zeros(1, 4, head_dim, dtype=torch.bfloat16)] * 3)
        for head_dim in (64, 72)
    )
    assert fits is None
    assert problem.startswith("needs a head_dim of at most 64 on sm_120") and "got 72" in problem


@pytest.mark.parametrize("impl", ("v4_warp_specialized", "v8_own_waits"))
def test_the_emulator_counts_shared_memory_as_the_compiler_does(impl):
    with tritonemu.enabled() as reports, launches() as seen:
        ladder.rung(impl).module().forward(studies.batch((256,)))
    made = compile_check.build_launch(seen[-1])
    assert 0 < made.metadata.shared - reports[-1].shared_bytes < 256
