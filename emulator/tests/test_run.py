"""Whole kernels through `run`: attention, a persistent matmul, and the launch itself."""

import time

import pytest
import torch
import triton
import triton.language as tl

import tritonemu
from emulator.tests.checking import refused
from tritonemu import InvalidKernel, run


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, stride, length, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, HEAD_DIM)
    offsets = rows[:, None] * stride + dims[None, :]
    q = tl.load(q_ptr + offsets, mask=rows[:, None] < length, other=0.0)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in tl.range(0, length, BLOCK_N, num_stages=3):
        keys = start + tl.arange(0, BLOCK_N)
        place = keys[:, None] * stride + dims[None, :]
        k = tl.load(k_ptr + place, mask=keys[:, None] < length, other=0.0)
        v = tl.load(v_ptr + place, mask=keys[:, None] < length, other=0.0)
        s = tl.dot(q, k.T, input_precision=PRECISION) * scale
        s = tl.where(keys[None, :] < length, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.exp(s - new_top[:, None])
        decay = tl.exp(top - new_top)
        total = total * decay + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
        top = new_top
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offsets, out, mask=rows[:, None] < length)


def attention(q, k, v, out, precision="ieee"):
    length, head_dim = q.shape
    return run(
        attention_kernel, lambda meta: (triton.cdiv(length, meta["BLOCK_M"]),),
        q, k, v, out, q.stride(0), length, head_dim**-0.5,
        HEAD_DIM=head_dim, BLOCK_M=64, BLOCK_N=32, PRECISION=precision, num_warps=4, num_stages=2,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
@pytest.mark.parametrize("length", (1, 64, 150))
def test_attention(dtype, length):
    q, k, v, out = torch.randn(length, 4, 32, dtype=dtype).unbind(1)
    attention(q, k, v, out.fill_(torch.nan))

    def reference(q, k, v):
        p = (q @ k.T * 32**-0.5).softmax(-1)
        return p @ v

    exact = reference(q.double(), k.double(), v.double())
    same = reference(q.float(), k.float(), v.float()).to(dtype)
    rounding = torch.finfo(dtype).eps * exact.abs().max()
    assert (out - exact).abs().max() <= 2 * (same - exact).abs().max() + rounding


def test_report():
    q, k, v = (torch.randn(128, 64).bfloat16() for _ in range(3))
    report = attention(q, k, v, torch.empty_like(q))
    tile_bytes = 128 * 64 * 2
    assert report.programs == 2
    assert report.dots == 2 * 4 * 2
    assert report.bytes_stored == tile_bytes
    assert report.bytes_loaded == tile_bytes + 2 * 2 * tile_bytes
    accesses = 2 * (2 + 4 * 2)
    expected = {"bounds": accesses, "race": accesses, "descriptor": 0, "shared": 0, "barrier": 0}
    assert report.checks == expected


def test_one_head_of_512_takes_less_than_half_a_second():
    q, k, v = (torch.randn(512, 128).bfloat16() for _ in range(3))
    times = []
    for _ in range(5):
        start = time.process_time()
        out = torch.empty_like(q)
        run(
            attention_kernel, (4,), q, k, v, out, 128, 512, 0.1,
            HEAD_DIM=128, BLOCK_M=128, BLOCK_N=128, PRECISION="ieee",
        )  # fmt: skip
        times.append(time.process_time() - start)
    assert min(times) < 0.5


@triton.jit
def persistent_kernel(
    a_ptr, b_ptr, out_ptr, tiles_ptr, columns, inner,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    num_tiles = tl.load(tiles_ptr)
    per_row = tl.cdiv(columns, BLOCK)
    for tile in tl.range(tl.program_id(0), num_tiles, tl.num_programs(0), flatten=True):
        rows = tile // per_row * BLOCK + tl.arange(0, BLOCK)
        cols = tile % per_row * BLOCK + tl.arange(0, BLOCK)
        acc = tl.zeros([BLOCK, BLOCK], tl.float32)
        for k in range(0, inner, BLOCK_K):
            ks = k + tl.arange(0, BLOCK_K)
            a = tl.load(a_ptr + rows[:, None] * inner + ks[None, :])
            b = tl.load(b_ptr + ks[:, None] * columns + cols[None, :])
            acc = tl.dot(a, b, acc)
        tl.store(out_ptr + rows[:, None] * columns + cols[None, :], acc)


def test_persistent_matrix_product():
    a, b = torch.randn(96, 64).half(), torch.randn(64, 64).half()
    out, tiles = torch.zeros(96, 64), torch.tensor([6], dtype=torch.int32)
    report = run(persistent_kernel, (4,), a, b, out, tiles, 64, 64, BLOCK=32, BLOCK_K=16)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
    assert report.programs == 4 and report.dots == 6 * 4


@triton.jit
def ids_kernel(out_ptr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = (z * tl.num_programs(1) + y) * tl.num_programs(0) + x
    tl.store(out_ptr + place, x * 100 + y * 10 + z)


def test_grid():
    out = torch.zeros(24, dtype=torch.int32)
    assert run(ids_kernel, (4, 3, 2), out).programs == 24
    assert out[4 * 3 + 4 * 2 + 3] == 321
    assert run(ids_kernel, (0,), out).programs == 0
    refused(ValueError, "one to three sizes", ids_kernel, out, grid=(1, 1, 1, 1))


@triton.autotune(configs=[triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], key=[])
@triton.heuristics({"EVEN": lambda args: args["n"] % 16 == 0})
@triton.jit
def tuned_kernel(out_ptr, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), n + EVEN)


def test_autotuned_kernels_take_their_first_configuration():
    out = torch.zeros(32, dtype=torch.int32)
    run(tuned_kernel, (1,), out, n=32)
    assert out.tolist() == [33] * 16 + [0] * 16

    assert tuned_kernel.best_config is tuned_kernel.configs[0]


def small_enough(configs, named, **kwargs):
    return [config for config in configs if config.kwargs["BLOCK"] <= named["n"] + kwargs["more"]]


@triton.autotune(
    configs=[triton.Config({"BLOCK": block}) for block in (64, 8, 4)],
    key=[],
    prune_configs_by={"early_config_prune": small_enough},
)
@triton.heuristics({"TWICE": lambda args: 2 * args["BLOCK"], "LAST": lambda a: a["TWICE"] + a["n"]})
@triton.jit
def pruned_kernel(out_ptr, n, more, BLOCK: tl.constexpr, TWICE: tl.constexpr, LAST: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), LAST)


def test_the_first_configuration_that_pruning_leaves():
    """Heuristics know the configuration, and each of them those before it."""
    out = torch.zeros(8, dtype=torch.int32)
    run(pruned_kernel, (1,), out, 5, more=3)
    assert out.tolist() == [2 * 8 + 5] * 8
    assert pruned_kernel.best_config.kwargs == {"BLOCK": 8}


def test_arguments_are_checked():
    refused(TypeError, "num_wraps", ids_kernel, torch.zeros(1), num_wraps=4)
    refused(ValueError, "out_ptr must be a CPU tensor", ids_kernel, torch.zeros(1, device="meta"))
    refused(ValueError, "arch must be one of", ids_kernel, torch.zeros(1), arch="sm_70")
    refused(TypeError, "must be a @triton.jit function", len)


@triton.jit
def shape_kernel(n):
    tl.device_print("n", n.no_such_attribute)


def test_a_python_error_in_a_kernel_points_into_it():
    error = refused(InvalidKernel, "has no attribute no_such_attribute in program", shape_kernel, 3)
    assert error.file == __file__


def test_enabled():
    assert not tritonemu.is_enabled()
    with tritonemu.enabled("sm_100"):
        assert tritonemu.is_enabled() and tritonemu.current_arch() == "sm_100"
        with tritonemu.enabled():
            assert tritonemu.current_arch() == "sm_90"
        assert tritonemu.current_arch() == "sm_100"
    with pytest.raises(RuntimeError, match="no open context"):
        tritonemu.current_arch()
    with pytest.raises(RuntimeError, match="no open context"):
        tritonemu.run_enabled(ids_kernel, (1,), torch.zeros(1))
    with pytest.raises(ValueError, match="arch must be one of"), tritonemu.enabled("sm_80"):
        pass
