"""The tutorial kernels for Hopper, and two on clusters whose guard asks for Blackwell."""

import functools
import math
from collections.abc import Iterator

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from .cases import Case, Prepared, assert_near, load, normal, unwritten

LOG2_E = 1 / math.log(2)


def online_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over `block` keys at a time in fp32, with P rounded to the dtype of V.

    q, k, v: [batch, heads, rows, head_dim]. Returns the output and the log2 of the softmax sums.
    """
    top = torch.full(q.shape[:3], -torch.inf)
    total = torch.zeros(q.shape[:3])
    acc = torch.zeros(q.shape)
    for keys, values in zip(k.split(block, 2), v.split(block, 2), strict=True):
        s = q.float() @ keys.float().mT * (scale * LOG2_E)
        new_top = torch.maximum(top, s.amax(-1))
        p = torch.exp2(s - new_top[..., None])
        decay = torch.exp2(top - new_top)
        total = total * decay + p.sum(-1)
        acc = acc * decay[..., None] + p.to(v.dtype).float() @ values.float()
        top = new_top
    return (acc / total[..., None]).to(q.dtype), top + total.log2()


def attention(
    file: str,
    kernel: str,
    config: dict[str, int] | None,
    *,
    heads: int,
    rows: int,
    head_dim: int,
    dtype: torch.dtype,
    sms: int | None = None,
) -> Prepared:
    """Forward attention over one batch entry; without a config the autotuner's first is taken.

    sms: multiprocessors that the host function of the persistent kernel would find.
    """
    module = load(file)
    q, k, v = (normal(seed, 1, heads, rows, head_dim, dtype=dtype) for seed in range(3))
    out = unwritten(*q.shape, dtype=dtype)
    lse = unwritten(*q.shape[:3], dtype=torch.float32)
    scale = head_dim**-0.5
    desc_q, desc_k, desc_v, desc_o = (
        TensorDescriptor(x, [heads * rows, head_dim], [head_dim, 1], [1, 1]) for x in (q, k, v, out)
    )
    tuned = getattr(module, kernel)
    meta = tuned.configs[0].kwargs if config is None else config
    kwargs = {"N_CTX": rows, "HEAD_DIM": head_dim, "FP8_OUTPUT": False}
    if config is not None:
        tensors = {"desc_q": desc_q, "desc_k": desc_k, "desc_v": desc_v, "desc_o": desc_o}
        module._host_descriptor_pre_hook({**config, **kwargs, **tensors})
        kwargs |= config | {"num_warps": 4, "num_stages": 1}

    tiles = triton.cdiv(rows, meta["BLOCK_M"])
    grid = (tiles, heads, 1) if sms is None else (min(sms, tiles * heads), 1, 1)

    def check() -> None:
        s = q.double() @ k.double().mT * scale
        same_out, same_lse = online_attention(q, k, v, scale, meta["BLOCK_N"])
        assert_near("O", out, s.softmax(-1) @ v.double(), same_out)
        assert_near("M", lse, s.logsumexp(-1) * LOG2_E, same_lse)

    return Prepared(
        tuned if config is None else tuned.fn,
        grid,
        (scale, lse, 1, heads, desc_q, desc_k, desc_v, desc_o),
        kwargs,
        check,
    )


def product(
    rows: int, columns: int, depth: int, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A [rows, depth], B [depth, columns] and an unwritten C [rows, columns]."""
    a = normal(0, rows, depth, dtype=dtype)
    b = normal(1, depth, columns, dtype=dtype)
    return a, b, unwritten(rows, columns, dtype=torch.float16)


def check_product(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    assert_near("C", c, a.double() @ b.double(), (a.float() @ b.float()).to(c.dtype))


def gemm_pointers(rows: int, columns: int, depth: int, config: dict[str, int]) -> Prepared:
    a, b, c = product(rows, columns, depth)
    grid = triton.cdiv(rows, config["BLOCK_SIZE_M"]) * triton.cdiv(columns, config["BLOCK_SIZE_N"])
    return Prepared(
        load("hopper_gemm_pipelined.py").matmul_kernel_pipelined_hopper.fn,
        (grid,),
        (a, b, c, rows, columns, depth, *a.stride(), *b.stride(), *c.stride()),
        {**config, "num_warps": 8},
        functools.partial(check_product, a, b, c),
    )


def skinny(
    rows: int, columns: int, depth: int, split_k: int, config: dict[str, int], *, tma: bool
) -> Prepared:
    """The kernels for few tiles: each of `split_k` programs of a tile writes a product of its own.

    config: BLOCK_M, BLOCK_N, BLOCK_K, GROUP_SIZE_M and NUM_STAGES.
    """
    module = load("hopper_gemm_ws.py")
    a, b, c = product(rows, columns, depth)
    part = depth // split_k
    if split_k > 1:
        c = unwritten(split_k, rows, columns, dtype=torch.float16)
    stride_ck = rows * columns if split_k > 1 else 0
    strides_c = (stride_ck, c.stride(-2), c.stride(-1))
    kwargs = {"SPLIT_K": split_k, **config, "num_warps": 4, "num_stages": 1}
    tiles = triton.cdiv(rows, config["BLOCK_M"]) * triton.cdiv(columns, config["BLOCK_N"])

    def check() -> None:
        for i, result in enumerate(c.view(split_k, rows, columns)):
            keys = slice(i * part, (i + 1) * part)
            check_product(a[:, keys], b[keys], result)

    if tma:
        a_desc = TensorDescriptor(a, [rows, depth], [depth, 1], [1, 1])
        b_desc = TensorDescriptor(b, [depth, columns], [columns, 1], [1, 1])
        module._skinny_tma_set_block_hook({**config, "a_desc": a_desc, "b_desc": b_desc})
        kernel = module._skinny_tma_kernel.fn
        args = (a_desc, b_desc, c, rows, columns, part, *strides_c)
        kwargs["K_START"] = 0
    else:
        kernel = module._skinny_matmul_kernel.fn
        args = (a, b, c, rows, columns, part, *a.stride(), *b.stride(), *strides_c)
    return Prepared(kernel, (tiles, split_k), args, kwargs, check)


def gemm_ws(
    rows: int,
    columns: int,
    depth: int,
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
        "BM": 128,
        "BN": 64,
        "BK": 64,
        "GROUP_SIZE_M": 8,
        "NUM_STAGES": 2,
        "NUM_MMA_WARPS": 8,
        "NUM_MMA_GROUPS": 2,
        "EPILOGUE_SUBTILE": False,
        "NUM_CTAS": ctas,
        "USE_WARP_BARRIER": False,
        **config,
    }
    a, b, c = product(rows, columns, depth, dtype)
    half = config["BM"] // config["NUM_MMA_GROUPS"]
    a_block, b_block = [half, config["BK"]], [config["BK"], config["BN"] // ctas]
    stored_a, stored_b = a, b
    if "a" in transposed:
        stored_a, a_block = a.T.contiguous(), a_block[::-1]
    if "b" in transposed:
        stored_b, b_block = b.T.contiguous(), b_block[::-1]
    c_block = [half, config["BN"] // (2 if config["EPILOGUE_SUBTILE"] else 1)]
    tiles = triton.cdiv(rows, config["BM"]) * triton.cdiv(columns, config["BN"])
    return Prepared(
        load("hopper_gemm_ws.py").matmul_kernel_tlx_ws.fn,
        (min(sms, tiles),),
        (
            TensorDescriptor(stored_a, stored_a.shape, stored_a.stride(), a_block),
            TensorDescriptor(stored_b, stored_b.shape, stored_b.stride(), b_block),
            TensorDescriptor(c, c.shape, c.stride(), c_block),
            rows,
            columns,
            depth,
        ),
        {
            "A_ROW_MAJOR": "a" not in transposed,
            "B_ROW_MAJOR": "b" not in transposed,
            "NUM_SMS": sms,
            **config,
            "num_warps": 4,
            "num_stages": 1,
            "ctas_per_cga": (ctas, 1, 1),
        },
        functools.partial(check_product, a, b, c),
    )


def gemm_persistent(
    file: str, rows: int, columns: int, depth: int, *, sms: int, **config: int
) -> Prepared:
    """The cooperative and the ping-pong kernel; config: overrides of the configuration."""
    module = load(file)
    config = {
        "BM": 128,
        "BN": 64,
        "BK": 64,
        "GROUP_SIZE_M": 8,
        "NUM_STAGES": 3,
        "NUM_MMA_WARPS": 8,
        "NUM_MMA_GROUPS": 2,
        "EPILOGUE_SUBTILE": True,
        **config,
    }
    a, b, c = product(rows, columns, depth)
    a_desc = TensorDescriptor(a, [rows, depth], [depth, 1], [1, 1])
    b_desc = TensorDescriptor(b, [depth, columns], [columns, 1], [1, 1])
    c_desc = TensorDescriptor(c, [rows, columns], [columns, 1], [1, 1])
    tensors = {"a_desc": a_desc, "b_desc": b_desc, "c_desc": c_desc}
    module.matmul_tma_set_block_size_hook({**config, **tensors})
    tiles = triton.cdiv(rows, config["BM"]) * triton.cdiv(columns, config["BN"])
    return Prepared(
        module.matmul_kernel_tlx_ws_persistent.fn,
        (min(sms, tiles),),
        (a_desc, b_desc, c_desc, rows, columns, depth),
        {"NUM_SMS": sms, **config, "num_warps": 4, "num_stages": 1},
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
    num_warps: int,
    clusters: int | None = None,
) -> Prepared:
    """LayerNorm whose rows are spread over the `ctas` CTAs of a cluster.

    clusters: how many clusters loop over the rows; without it there is one for every row block.
    """
    block_n = triton.next_power_of_2(columns // ctas)
    x = normal(0, rows, columns, dtype=torch.float16)
    weight, bias = (normal(seed, columns, dtype=torch.float16) for seed in (1, 2))
    out = unwritten(rows, columns, dtype=torch.float16)
    mean, rstd = (unwritten(rows, dtype=torch.float32) for _ in range(2))
    eps = 1e-5

    def check() -> None:
        def reference(dtype: torch.dtype) -> Iterator[torch.Tensor]:
            centre = x.to(dtype).mean(1)
            centred = x.to(dtype) - centre[:, None]
            scale = (centred.square().mean(1) + eps).rsqrt()
            y = centred * scale[:, None] * weight.to(dtype) + bias.to(dtype)
            return y if dtype == torch.float64 else y.to(out.dtype), centre, scale

        results = zip(
            ("Y", "mean", "rstd"),
            (out, mean, rstd),
            reference(torch.float64),
            reference(torch.float32),
            strict=True,
        )
        for what, result, exact, same in results:
            assert_near(what, result, exact, same)

    return Prepared(
        getattr(load(file), kernel).fn,
        (triton.cdiv(rows, block_m) if clusters is None else clusters, ctas),
        (),
        {
            "X": x,
            "Y": out,
            "W": weight,
            "B": bias,
            "Mean_out": mean,
            "Rstd_out": rstd,
            "row_stride": x.stride(0),
            "M": rows,
            "N": columns,
            "eps": eps,
            "BLOCK_SIZE_M": block_m,
            "BLOCK_SIZE_N": block_n,
            "num_reduction_ctas": ctas,
            "SHOULD_MASK_ROW": rows % block_m != 0,
            "SHOULD_MASK_COL": columns % block_n != 0,
            "num_warps": num_warps,
            "ctas_per_cga": (1, ctas, 1),
        },
        check,
    )


def _hopper(name: str, build, *args, **kwargs) -> Case:
    return Case(name, "sm_90", functools.partial(build, *args, **kwargs))


def _attention(file: str, kernel: str, name: str, config: dict | None, **shape) -> Case:
    return _hopper(f"{file} {name}", attention, f"{file}.py", kernel, config, **shape)


def _layer_norm(file: str, kernel: str, name: str, *args, **kwargs) -> Case:
    build = functools.partial(layer_norm, f"{file}.py", kernel, *args, **kwargs)
    return Case(f"{file} {name}", "sm_100", build)


TWO_GROUPS = {
    "BLOCK_M": 128,
    "BLOCK_N": 64,
    "NUM_BUFFERS": 2,
    "NUM_MMA_WARPS": 8,
    "NUM_MMA_GROUPS": 2,
}
ONE_GROUP = TWO_GROUPS | {"BLOCK_M": 64, "NUM_MMA_WARPS": 4, "NUM_MMA_GROUPS": 1}
PERSISTENT = {
    "BLOCK_M": 128,
    "BLOCK_N": 64,
    "NUM_BUFFERS_Q": 1,
    "NUM_BUFFERS_KV": 2,
    "NUM_MMA_WARPS": 8,
    "NUM_MMA_GROUPS": 2,
}
SMALL = {"heads": 2, "rows": 256, "head_dim": 64, "dtype": torch.float16}
LARGE = {"heads": 1, "rows": 512, "head_dim": 128, "dtype": torch.bfloat16}

WS = ("hopper_fa_ws", "_attn_fwd_ws")
PIPELINED = ("hopper_fa_ws_pipelined", "_attn_fwd_ws_pipelined")
PINGPONG = ("hopper_fa_ws_pipelined_pingpong", "_attn_fwd_ws_pipelined_pingpong")
LOOPING = (
    "hopper_fa_ws_pipelined_pingpong_persistent",
    "_attn_fwd_ws_pipelined_pingpong_persistent",
)
POINTERS = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8}
SKINNY = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_SIZE_M": 4}
COOPERATIVE = "hopper-persistent-gemm-ws-cooperative"
ALTERNATING = "hopper-persistent-gemm-ws-pingpong"
NORM = ("blackwell-multi-cta-layernorm_test", "kernel_layernorm_multi_cta")
NORM_WS = ("blackwell_multi_cta_layernorm_ws_test", "kernel_layernorm_multi_cta_ws")

CASES = (
    _attention(*WS, "autotuned, bf16", None, **LARGE),
    _attention(*WS, "two groups, fp16", TWO_GROUPS, **SMALL),
    _attention(*WS, "three buffers, fp16", ONE_GROUP | {"NUM_BUFFERS": 3}, **SMALL),
    _attention(*PIPELINED, "autotuned, bf16", None, **LARGE),
    _attention(*PIPELINED, "two groups, fp16", TWO_GROUPS, **SMALL),
    _attention(*PIPELINED, "three buffers, fp16", ONE_GROUP | {"NUM_BUFFERS": 3}, **SMALL),
    _attention(*PINGPONG, "autotuned, bf16", None, **LARGE),
    _attention(*PINGPONG, "fp16", TWO_GROUPS, **SMALL),
    _attention(*LOOPING, "autotuned, bf16", None, **LARGE, sms=3),
    _attention(*LOOPING, "fp16", PERSISTENT, **SMALL | {"heads": 3}, sms=4),
    _attention(*LOOPING, "two Q buffers", PERSISTENT | {"NUM_BUFFERS_Q": 2}, **SMALL, sms=1),
    _hopper("hopper_gemm_pipelined", gemm_pointers, 128, 128, 256, POINTERS | {"NUM_STAGES": 3}),
    _hopper(
        "hopper_gemm_pipelined ragged", gemm_pointers, 72, 80, 208, POINTERS | {"NUM_STAGES": 4}
    ),
    _hopper(
        "hopper_gemm_ws skinny", skinny, 128, 64, 512, 2, SKINNY | {"NUM_STAGES": 3}, tma=False
    ),
    _hopper(
        "hopper_gemm_ws skinny, ragged",
        skinny,
        72,
        80,
        208,
        1,
        SKINNY | {"NUM_STAGES": 2},
        tma=False,
    ),
    _hopper(
        "hopper_gemm_ws skinny TMA", skinny, 128, 64, 512, 2, SKINNY | {"NUM_STAGES": 3}, tma=True
    ),
    _hopper(
        "hopper_gemm_ws skinny TMA, ragged",
        skinny,
        72,
        80,
        208,
        1,
        SKINNY | {"NUM_STAGES": 2},
        tma=True,
    ),
    _hopper("hopper_gemm_ws", gemm_ws, 256, 128, 256, sms=2),
    _hopper(
        "hopper_gemm_ws ragged, subtile, bf16",
        gemm_ws,
        200,
        136,
        136,
        sms=2,
        NUM_STAGES=3,
        EPILOGUE_SUBTILE=True,
        dtype=torch.bfloat16,
    ),
    _hopper("hopper_gemm_ws warp barrier", gemm_ws, 256, 128, 256, sms=2, USE_WARP_BARRIER=True),
    _hopper("hopper_gemm_ws A transposed", gemm_ws, 200, 72, 136, sms=2, transposed="a"),
    _hopper("hopper_gemm_ws both transposed", gemm_ws, 200, 72, 136, sms=2, transposed="ab"),
    _hopper("hopper_gemm_ws 2 CTAs", gemm_ws, 256, 384, 256, sms=4, ctas=2, BN=128),
    _hopper(
        "hopper_gemm_ws 2 CTAs, ragged, B transposed",
        gemm_ws,
        200,
        200,
        136,
        sms=2,
        ctas=2,
        BN=128,
        transposed="b",
        EPILOGUE_SUBTILE=True,
        USE_WARP_BARRIER=True,
    ),
    _hopper(COOPERATIVE, gemm_persistent, f"{COOPERATIVE}.py", 200, 136, 264, sms=2),
    _hopper(
        f"{COOPERATIVE} one store",
        gemm_persistent,
        f"{COOPERATIVE}.py",
        256,
        128,
        256,
        sms=2,
        EPILOGUE_SUBTILE=False,
    ),
    _hopper(
        f"{ALTERNATING} named barriers",
        gemm_persistent,
        f"{ALTERNATING}.py",
        200,
        136,
        264,
        sms=2,
        BM=64,
        USE_NAMED_BARRIER=True,
    ),
    _hopper(
        f"{ALTERNATING} mbarriers",
        gemm_persistent,
        f"{ALTERNATING}.py",
        256,
        128,
        320,
        sms=2,
        BM=64,
        USE_NAMED_BARRIER=False,
        EPILOGUE_SUBTILE=False,
    ),
    _hopper("vector-add2", add2, "add2_kernel", 1000, 256),
    _hopper("vector-add2 two tasks", add2, "add2_warp_specialized_kernel", 1000, 256),
    _layer_norm(*NORM, "2 CTAs", 4, 512, block_m=2, ctas=2, num_warps=4),
    _layer_norm(*NORM, "4 CTAs, ragged", 3, 992, block_m=2, ctas=4, num_warps=4),
    _layer_norm(*NORM, "ragged rows", 3, 512, block_m=2, ctas=2, num_warps=4),
    _layer_norm(*NORM_WS, "one cluster", 8, 1024, block_m=1, ctas=2, num_warps=8, clusters=1),
    _layer_norm(*NORM_WS, "ragged", 13, 992, block_m=2, ctas=2, num_warps=8, clusters=2),
)
