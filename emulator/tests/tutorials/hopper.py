"""The tutorial kernels for Hopper, and two on clusters whose guard asks for Blackwell."""

import functools
from typing import Any

import torch
import triton

from .cases import (
    LOG2_E,
    Case,
    Prepared,
    Shape,
    assert_near,
    case,
    check_product,
    check_splits,
    count_tiles,
    describe,
    load,
    matrices,
    normal,
    online_attention,
    scores,
    unwritten,
)

ONE_STAGE = {"num_warps": 4, "num_stages": 1}


def attention(
    file: str,
    kernel: str,
    *,
    heads: int,
    rows: int,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool | None = None,
    sms: int | None = None,
    tuned: bool = False,
    clc: bool = False,
    stages: bool = False,
    options: dict[str, Any] | None = None,
    **overrides: Any,
) -> Prepared:
    """Forward attention over one batch entry.

    causal: None for a kernel that has no mask. sms: what the host function of the persistent kernel
    would find. tuned: the autotuner makes the launch. clc: one CTA for each tile, in a
    one-dimensional grid. stages: whether the kernel takes NUM_SMS and NUM_CLC_STAGES. options: of
    the emulator. overrides: of the autotuner's first configuration.
    """
    module = load(file)
    autotuner = getattr(module, kernel)
    config = {**autotuner.configs[0].kwargs, **overrides}
    q, k, v = (normal(seed, 1, heads, rows, head_dim, dtype=dtype) for seed in range(3))
    out = unwritten(*q.shape, dtype=dtype)
    lse = unwritten(*q.shape[:3], dtype=torch.float32)
    scale = head_dim**-0.5
    tensors = {
        f"desc_{name}": describe(x.view(heads * rows, head_dim))
        for name, x in zip("qkvo", (q, k, v, out), strict=True)
    }
    kwargs = {"N_CTX": rows, "HEAD_DIM": head_dim}
    if causal is not None:
        kwargs["STAGE"] = 3 if causal else 1
    if not clc:
        kwargs["FP8_OUTPUT"] = False
    if stages:
        kwargs |= {"NUM_SMS": 2, "NUM_CLC_STAGES": 1}
    if not tuned:
        module._host_descriptor_pre_hook({**config, **kwargs, **tensors})
        kwargs |= config | ONE_STAGE

    tiles = triton.cdiv(rows, config["BLOCK_M"])
    if clc:
        grid = (tiles * heads,)
    else:
        grid = (tiles, heads, 1) if sms is None else (min(sms, tiles * heads), 1, 1)

    def check() -> None:
        s = scores(q, k, scale, bool(causal))
        same = online_attention(q, k, v, scale, bool(causal), config["BLOCK_N"])
        assert_near("O", out, s.softmax(-1) @ v.double(), same[0])
        assert_near("M", lse, s.logsumexp(-1) * LOG2_E, same[1])

    return Prepared(
        autotuner if tuned else autotuner.fn,
        grid,
        (scale, lse, 1, heads, *tensors.values()),
        {**kwargs, **(options or {})},
        check,
    )


def gemm_pointers(shape: Shape, stages: int) -> Prepared:
    a, b, c = matrices(shape)
    blocks = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8}
    return Prepared(
        load("hopper_gemm_pipelined.py").matmul_kernel_pipelined_hopper.fn,
        (count_tiles(shape, 64, 64),),
        (a, b, c, *shape, *a.stride(), *b.stride(), *c.stride()),
        {**blocks, "NUM_STAGES": stages, "num_warps": 8},
        functools.partial(check_product, a, b, c),
    )


def skinny(shape: Shape, split_k: int, stages: int, *, tma: bool) -> Prepared:
    """The kernels for few tiles: `split_k` programs of a tile write a product each."""
    module = load("hopper_gemm_ws.py")
    rows, columns, depth = shape
    a, b, c = matrices(shape)
    part = depth // split_k
    if split_k > 1:
        c = unwritten(split_k, rows, columns, dtype=torch.float16)
    strides_c = (rows * columns if split_k > 1 else 0, c.stride(-2), c.stride(-1))
    blocks = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_SIZE_M": 4, "NUM_STAGES": stages}
    kwargs = {"SPLIT_K": split_k, **blocks, **ONE_STAGE}
    if tma:
        descs = {"a_desc": describe(a), "b_desc": describe(b)}
        module._skinny_tma_set_block_hook({**blocks, **descs})
        kernel = module._skinny_tma_kernel.fn
        args = (*descs.values(), c, rows, columns, part, *strides_c)
        kwargs["K_START"] = 0
    else:
        kernel = module._skinny_matmul_kernel.fn
        args = (a, b, c, rows, columns, part, *a.stride(), *b.stride(), *strides_c)
    check = functools.partial(check_splits, a, b, c.view(split_k, rows, columns), part)
    return Prepared(kernel, (count_tiles(shape, 64, 64), split_k), args, kwargs, check)


PERSISTENT_GEMM = {
    "BM": 128, "BN": 64, "BK": 64, "GROUP_SIZE_M": 8, "NUM_MMA_WARPS": 8, "NUM_MMA_GROUPS": 2,
}  # fmt: skip


def gemm_ws(
    shape: Shape,
    *,
    sms: int,
    dtype: torch.dtype = torch.float16,
    transposed: str = "",
    ctas: int = 1,
    **config: int,
) -> Prepared:
    """The persistent kernel with one producer and two consumers.

    transposed: which of "a" and "b" are stored with the first dimension contiguous.
    ctas: 2 makes clusters of two CTAs that load half of B each, for both.
    config: overrides of the configuration.
    """
    config = {
        **PERSISTENT_GEMM, "NUM_STAGES": 2, "EPILOGUE_SUBTILE": False, "NUM_CTAS": ctas,
        "USE_WARP_BARRIER": False, **config,
    }  # fmt: skip
    a, b, c = matrices(shape, dtype, torch.float16)
    half = config["BM"] // config["NUM_MMA_GROUPS"]
    a_block, b_block = [half, config["BK"]], [config["BK"], config["BN"] // ctas]
    stored_a, stored_b = a, b
    if "a" in transposed:
        stored_a, a_block = a.T.contiguous(), a_block[::-1]
    if "b" in transposed:
        stored_b, b_block = b.T.contiguous(), b_block[::-1]
    c_block = [half, config["BN"] // (2 if config["EPILOGUE_SUBTILE"] else 1)]
    major = {"A_ROW_MAJOR": "a" not in transposed, "B_ROW_MAJOR": "b" not in transposed}
    descs = describe(stored_a, a_block), describe(stored_b, b_block), describe(c, c_block)
    return Prepared(
        load("hopper_gemm_ws.py").matmul_kernel_tlx_ws.fn,
        (min(sms, count_tiles(shape, config["BM"], config["BN"])),),
        (*descs, *shape),
        {**major, "NUM_SMS": sms, **config, **ONE_STAGE, "ctas_per_cga": (ctas, 1, 1)},
        functools.partial(check_product, a, b, c),
    )


def gemm_persistent(file: str, shape: Shape, *, sms: int, **config: int) -> Prepared:
    """The cooperative and the ping-pong kernel; config: overrides of the configuration."""
    module = load(file)
    config = {**PERSISTENT_GEMM, "NUM_STAGES": 3, "EPILOGUE_SUBTILE": True, **config}
    a, b, c = matrices(shape)
    tensors = {"a_desc": describe(a), "b_desc": describe(b), "c_desc": describe(c)}
    module.matmul_tma_set_block_size_hook({**config, **tensors})
    return Prepared(
        module.matmul_kernel_tlx_ws_persistent.fn,
        (min(sms, count_tiles(shape, config["BM"], config["BN"])),),
        (*tensors.values(), *shape),
        {"NUM_SMS": sms, **config, **ONE_STAGE},
        functools.partial(check_product, a, b, c),
    )


def add2(kernel: str, size: int, block: int) -> Prepared:
    x, y, a, b = (normal(seed, size, dtype=torch.float32) for seed in range(4))
    z, c = (unwritten(size, dtype=torch.float32) for _ in range(2))

    def check() -> None:
        assert torch.equal(z, x + y)
        assert torch.equal(c, a + b)

    return Prepared(
        getattr(load("vector-add2.py"), kernel),
        (triton.cdiv(size, block),),
        (x, y, z, a, b, c, size),
        {"BLOCK_SIZE": block},
        check,
    )


def layer_norm(
    file: str,
    kernel: str,
    rows: int,
    columns: int,
    *,
    block_m: int,
    ctas: int,
    num_warps: int = 4,
    clusters: int | None = None,
) -> Prepared:
    """LayerNorm whose rows are spread over the `ctas` CTAs of a cluster.

    clusters: how many clusters loop over the rows; without it there is one for every row block.
    """
    block_n, eps = triton.next_power_of_2(columns // ctas), 1e-5
    x = normal(0, rows, columns, dtype=torch.float16)
    weight, bias = (normal(seed, columns, dtype=torch.float16) for seed in (1, 2))
    out = unwritten(rows, columns, dtype=torch.float16)
    mean, rstd = (unwritten(rows, dtype=torch.float32) for _ in range(2))

    def reference(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        centre = x.to(dtype).mean(1)
        centred = x.to(dtype) - centre[:, None]
        scale = (centred.square().mean(1) + eps).rsqrt()
        y = centred * scale[:, None] * weight.to(dtype) + bias.to(dtype)
        return y if dtype == torch.float64 else y.to(out.dtype), centre, scale

    def check() -> None:
        both = reference(torch.float64), reference(torch.float32)
        results = zip(("Y", "mean", "rstd"), (out, mean, rstd), *both, strict=True)
        for what, result, exact, same in results:
            assert_near(what, result, exact, same)

    return Prepared(
        getattr(load(file), kernel).fn,
        (triton.cdiv(rows, block_m) if clusters is None else clusters, ctas),
        (),
        {
            "X": x, "Y": out, "W": weight, "B": bias, "Mean_out": mean, "Rstd_out": rstd,
            "row_stride": x.stride(0), "M": rows, "N": columns, "eps": eps,
            "BLOCK_SIZE_M": block_m, "BLOCK_SIZE_N": block_n, "num_reduction_ctas": ctas,
            "SHOULD_MASK_ROW": rows % block_m != 0, "SHOULD_MASK_COL": columns % block_n != 0,
            "num_warps": num_warps, "ctas_per_cga": (1, ctas, 1),
        },
        check,
    )  # fmt: skip


def _hopper(name: str, build, *args, **kwargs) -> Case:
    return case(name, "sm_90", build, *args, **kwargs)


def _attention(file: str, kernel: str, name: str, **kwargs) -> Case:
    return _hopper(f"{file} {name}", attention, f"{file}.py", kernel, **kwargs)


def _gemm(name: str, *args, **kwargs) -> Case:
    return _hopper(f"hopper_gemm_ws {name}".strip(), gemm_ws, *args, **kwargs)


def _persistent(file: str, name: str, *args, **kwargs) -> Case:
    return _hopper(f"{file} {name}".strip(), gemm_persistent, f"{file}.py", *args, **kwargs)


def _layer_norm(file: str, kernel: str, name: str, *args, **kwargs) -> Case:
    return case(f"{file} {name}", "sm_100", layer_norm, f"{file}.py", kernel, *args, **kwargs)


GROUPS = {"BLOCK_M": 128, "BLOCK_N": 64, "NUM_MMA_WARPS": 8, "NUM_MMA_GROUPS": 2}
TWO_GROUPS = GROUPS | {"NUM_BUFFERS": 2}
ONE_GROUP = TWO_GROUPS | {"BLOCK_M": 64, "NUM_MMA_WARPS": 4, "NUM_MMA_GROUPS": 1, "NUM_BUFFERS": 3}
PERSISTENT = GROUPS | {"NUM_BUFFERS_Q": 1, "NUM_BUFFERS_KV": 2}
SMALL = {"heads": 2, "rows": 256, "head_dim": 64, "dtype": torch.float16}
LARGE = {"heads": 1, "rows": 512, "tuned": True}

WS = ("hopper_fa_ws", "_attn_fwd_ws")
PIPELINED = ("hopper_fa_ws_pipelined", "_attn_fwd_ws_pipelined")
PINGPONG = ("hopper_fa_ws_pipelined_pingpong", "_attn_fwd_ws_pipelined_pingpong")
LOOPING = tuple(f"{name}_persistent" for name in PINGPONG)
COOPERATIVE = "hopper-persistent-gemm-ws-cooperative"
ALTERNATING = "hopper-persistent-gemm-ws-pingpong"
NORM = ("blackwell-multi-cta-layernorm_test", "kernel_layernorm_multi_cta")
NORM_WS = ("blackwell_multi_cta_layernorm_ws_test", "kernel_layernorm_multi_cta_ws")
RAGGED = {"transposed": "b", "EPILOGUE_SUBTILE": True, "USE_WARP_BARRIER": True}

CASES = (
    _attention(*WS, "autotuned, bf16", **LARGE),
    _attention(*WS, "two groups, fp16", **TWO_GROUPS, **SMALL),
    _attention(*WS, "three buffers, fp16", **ONE_GROUP, **SMALL),
    _attention(*PIPELINED, "autotuned, bf16", **LARGE),
    _attention(*PIPELINED, "two groups, fp16", **TWO_GROUPS, **SMALL),
    _attention(*PIPELINED, "three buffers, fp16", **ONE_GROUP, **SMALL),
    _attention(*PINGPONG, "autotuned, bf16", **LARGE),
    _attention(*PINGPONG, "fp16", **TWO_GROUPS, **SMALL),
    _attention(*LOOPING, "autotuned, bf16", **LARGE, sms=3),
    _attention(*LOOPING, "fp16", **PERSISTENT, **SMALL | {"heads": 3}, sms=4),
    _attention(*LOOPING, "two Q buffers", **PERSISTENT | {"NUM_BUFFERS_Q": 2}, **SMALL, sms=1),
    _hopper("hopper_gemm_pipelined", gemm_pointers, (128, 128, 256), 3),
    _hopper("hopper_gemm_pipelined ragged", gemm_pointers, (72, 80, 208), 4),
    _hopper("hopper_gemm_ws skinny", skinny, (128, 64, 512), 2, 3, tma=False),
    _hopper("hopper_gemm_ws skinny, ragged", skinny, (72, 80, 208), 1, 2, tma=False),
    _hopper("hopper_gemm_ws skinny TMA", skinny, (128, 64, 512), 2, 3, tma=True),
    _hopper("hopper_gemm_ws skinny TMA, ragged", skinny, (72, 80, 208), 1, 2, tma=True),
    _gemm("", (256, 128, 256), sms=2),
    _gemm(
        "ragged, subtile, bf16", (200, 136, 136), sms=2,
        NUM_STAGES=3, EPILOGUE_SUBTILE=True, dtype=torch.bfloat16,
    ),
    _gemm("warp barrier", (256, 128, 256), sms=2, USE_WARP_BARRIER=True),
    _gemm("A transposed", (200, 72, 136), sms=2, transposed="a"),
    _gemm("both transposed", (200, 72, 136), sms=2, transposed="ab"),
    _gemm("2 CTAs", (256, 384, 256), sms=4, ctas=2, BN=128),
    _gemm("2 CTAs, ragged, B transposed", (200, 200, 136), sms=2, ctas=2, BN=128, **RAGGED),
    _persistent(COOPERATIVE, "", (200, 136, 264), sms=2),
    _persistent(COOPERATIVE, "one store", (256, 128, 256), sms=2, EPILOGUE_SUBTILE=False),
    _persistent(
        ALTERNATING, "named barriers", (200, 136, 264), sms=2, BM=64, USE_NAMED_BARRIER=True
    ),
    _persistent(
        ALTERNATING, "mbarriers", (256, 128, 320), sms=2,
        BM=64, USE_NAMED_BARRIER=False, EPILOGUE_SUBTILE=False,
    ),
    _hopper("vector-add2", add2, "add2_kernel", 1000, 256),
    _hopper("vector-add2 two tasks", add2, "add2_warp_specialized_kernel", 1000, 256),
    _layer_norm(*NORM, "2 CTAs", 4, 512, block_m=2, ctas=2),
    _layer_norm(*NORM, "4 CTAs, ragged", 3, 992, block_m=2, ctas=4),
    _layer_norm(*NORM, "ragged rows", 3, 512, block_m=2, ctas=2),
    _layer_norm(*NORM_WS, "one cluster", 8, 1024, block_m=1, ctas=2, num_warps=8, clusters=1),
    _layer_norm(*NORM_WS, "ragged", 13, 992, block_m=2, ctas=2, num_warps=8, clusters=2),
)  # fmt: skip
