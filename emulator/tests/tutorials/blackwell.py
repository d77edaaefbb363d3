"""The tutorial kernels for Blackwell, and in FAULTY those launches of them that must fail."""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import triton
import triton.language as tl

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
    hidden,
    load,
    matrices,
    normal,
    scores,
    unwritten,
)
from .hopper import ONE_STAGE, attention

BLOCKS = {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64}
GEMM = BLOCKS | {"GROUP_SIZE_M": 8}
BUFFERS = {"NUM_SMEM_BUFFERS": 2, "NUM_TMEM_BUFFERS": 2}


def gemm_pipelined(shape: Shape, *, stages: int) -> Prepared:
    a, b, c = matrices(shape)
    return Prepared(
        load("blackwell_gemm_pipelined.py").matmul_kernel_tma_pipelined_blackwell.fn,
        (count_tiles(shape, 128, 128),),
        (a, b, c, *shape, *a.stride(), *b.stride(), *c.stride()),
        {**GEMM, "NUM_STAGES": stages, "num_warps": 4},
        functools.partial(check_product, a, b, c),
    )


def gemm_2cta(shape: Shape) -> Prepared:
    """Clusters of 4 x 2 CTAs, so rows are a multiple of 512 and columns of 256."""
    a, b, c = matrices(shape)
    sizes = dict(zip("MNK", shape, strict=True))
    blocks = {"BLOCK_M": 128, "BLOCK_K": 128, "BLOCK_N": 128, "OUT_DTYPE": tl.float32}
    return Prepared(
        load("blackwell_gemm_2cta.py").tcgen5_dot_kernel2cta_tma,
        (shape[0] // 128, shape[1] // 128),
        (a, *a.stride(), b, *b.stride(), c, *c.stride()),
        {**blocks, **sizes, "num_stages": 1, "ctas_per_cga": (4, 2, 1)},
        functools.partial(check_product, a, b, c),
    )


def gemm_clc(shape: Shape, *, sms: int, **overrides: Any) -> Prepared:
    """One CTA for each tile; CTAs that run steal the tiles of those that have not started."""
    module = load("blackwell_gemm_clc.py")
    config = GEMM | BUFFERS | {"EPILOGUE_SUBTILE": True, "USE_WARP_BARRIER": False} | overrides
    a, b, c = matrices(shape)
    tensors = {"a_desc": describe(a), "b_desc": describe(b), "c_desc": describe(c)}
    module.matmul_tma_set_block_size_hook({**config, **tensors})
    return Prepared(
        module.matmul_kernel_tma_ws_blackwell_clc.fn,
        (count_tiles(shape, config["BLOCK_SIZE_M"], config["BLOCK_SIZE_N"]),),
        (*tensors.values(), *shape),
        {"NUM_SMS": sms, "NUM_CLC_STAGES": 1, **config, **ONE_STAGE},
        functools.partial(check_product, a, b, c),
    )


def gemm_ws(
    shape: Shape,
    *,
    sms: int,
    dtype: torch.dtype = torch.float16,
    transposed: str = "",
    **overrides: int,
) -> Prepared:
    """The persistent kernel.

    transposed: which of "a" and "b" are stored with the first dimension contiguous.
    overrides: of the configuration. With SPLIT_K > 1 each split writes a product of its own.
    """
    module = load("blackwell_gemm_ws.py")
    config = {
        **GEMM, **BUFFERS, "NUM_MMA_GROUPS": 1, "EPILOGUE_SUBTILE": 1, "NUM_CTAS": 1, "SPLIT_K": 1,
        "INTERLEAVE_EPILOGUE": 0, "USE_WARP_BARRIER": False, **overrides,
    }  # fmt: skip
    rows, columns, depth = shape
    ctas, splits = config["NUM_CTAS"], config["SPLIT_K"]
    a, b, c = matrices(shape, dtype)
    tensors = {
        "a_desc": describe(a.T.contiguous() if "a" in transposed else a),
        "b_desc": describe(b.T.contiguous() if "b" in transposed else b),
        "c_desc": describe(c),
        "workspace_desc": describe(c),
    }
    major = {"A_ROW_MAJOR": "a" not in transposed, "B_ROW_MAJOR": "b" not in transposed}
    sizes = dict(zip("MNK", shape, strict=True))
    module.matmul_tma_set_block_size_hook({**config, **tensors, **major, **sizes})
    workspace = tensors["workspace_desc"].base  # C, or with split-K a new tensor from the hook
    workspace.fill_(torch.nan)
    blocks = triton.cdiv(depth, config["BLOCK_SIZE_K"])
    part = triton.cdiv(blocks, splits) * config["BLOCK_SIZE_K"]
    tile_rows = triton.cdiv(triton.cdiv(rows, config["BLOCK_SIZE_M"]), ctas) * ctas
    tiles = tile_rows * triton.cdiv(columns, config["BLOCK_SIZE_N"]) * splits
    cluster = {"ctas_per_cga": (ctas, 1, 1) if ctas > 1 else None}
    return Prepared(
        module.matmul_kernel_tma_ws_blackwell.fn,
        (min(sms, tiles),),
        (*tensors.values(), *shape),
        {**major, "NUM_SMS": sms, **config, **ONE_STAGE, **cluster},
        functools.partial(check_splits, a, b, workspace.view(splits, rows, columns), part),
    )


def reduce_splits(rows: int, columns: int, splits: int) -> Prepared:
    """The sum over the splits of split-K, the second launch of that path."""
    workspace = normal(0, splits, rows, columns, dtype=torch.float16)
    c = unwritten(rows, columns, dtype=torch.float16)

    def check() -> None:
        assert_near("C", c, workspace.double().sum(0), workspace.float().sum(0).half())

    blocks = {"BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 32}
    return Prepared(
        load("blackwell_gemm_ws.py")._reduce_k_kernel,
        (triton.cdiv(rows, 32), triton.cdiv(columns, 32)),
        (workspace.view(splits * rows, columns), c, rows, columns),
        {"SPLIT_K": splits, **blocks, "OUTPUT_DTYPE": tl.float16, "num_warps": 4},
        check,
    )


def gemm_grouped(problems: Iterable[Shape], *, sms: int, ctas: int) -> Prepared:
    """Products of several sizes (rows, columns, depth); pointers to the operands are in memory."""
    operands = [
        (
            normal(2 * i, rows, depth, dtype=torch.float16),
            normal(2 * i + 1, depth, columns, dtype=torch.float16),
            unwritten(rows, columns, dtype=torch.float16),
        )
        for i, (rows, columns, depth) in enumerate(problems)
    ]
    pointers = [torch.tensor([x.data_ptr() for x in xs]) for xs in zip(*operands, strict=True)]
    sizes = torch.tensor(problems, dtype=torch.int32)
    strides = torch.tensor([[x.stride(0) for x in xs] for xs in operands], dtype=torch.int32)

    def check() -> None:
        for a, b, c in operands:
            check_product(a, b, c)

    config = {"EPILOGUE_SUBTILE": 2, "FP8": False, "NUM_CTAS": ctas, "ctas_per_cga": (ctas, 1, 1)}
    return Prepared(
        load("blackwell-grouped-gemm_test.py").grouped_matmul_tlx_kernel.fn,
        (sms,),
        (*pointers, sizes.flatten(), strides.flatten(), len(operands)),
        {"NUM_SM": sms, **BLOCKS, **BUFFERS, **config, **ONE_STAGE},
        check,
    )


PERSISTENT = "blackwell_fa_ws_pipelined_persistent.py"


def unpack(packed: torch.Tensor, block: int) -> torch.Tensor:
    """The dQ of the backward kernel, [batch, heads, rows, head_dim], from its packed form.

    Packed, `block` rows of the left half of head_dim come before those rows of its right half.
    """
    batch, heads, rows, head_dim = packed.shape
    halves = packed.view(batch, heads, rows // block, 2, block, head_dim // 2)
    return halves.transpose(3, 4).reshape(packed.shape)


def backward(heads: int, rows: int, *, causal: bool, config: int, batch: int = 1) -> Prepared:
    """The gradients; config: the number of the autotuner's configuration."""
    module = load(PERSISTENT)
    tuned = module._attn_bwd_ws
    config = tuned.configs[config]
    head_dim, dtype = 128, torch.bfloat16
    shape = (batch, heads, rows, head_dim)
    q, k, v, do = (normal(seed, *shape, dtype=dtype) for seed in range(4))
    scale = head_dim**-0.5
    s = scores(q, k, scale, causal)
    lse = (s.logsumexp(-1) * LOG2_E).float()
    out = (s.softmax(-1) @ v.double()).to(dtype)
    delta = (out.float() * do.float()).sum(-1)
    scaled_k = k * (scale * LOG2_E)
    dq = torch.zeros(shape)
    dk, dv = (unwritten(*shape, dtype=dtype) for _ in range(2))
    arguments = {
        "desc_q": describe(q), "desc_k": describe(scaled_k), "desc_v": describe(v),
        "sm_scale": scale, "desc_do": describe(do),
        "desc_dq": describe(dq.view(batch, heads, 2 * rows, head_dim // 2)),
        "desc_dk": describe(dk), "desc_dv": describe(dv), "desc_m": describe(lse.flatten()),
        "desc_delta": describe(delta.flatten()), "M_ptr": lse, "delta_ptr": delta,
        "H": heads, "Z": batch, "N_CTX": rows,
        "desc_kt": describe(scaled_k), "desc_qt": describe(q), "desc_dot": describe(do),
    }  # fmt: skip
    stage = 3 if causal else 1
    kwargs = {"BLK_SLICE_FACTOR": 2, "HEAD_DIM": head_dim, "STAGE": stage, **config.kwargs}
    config.pre_hook({**arguments, **kwargs})
    ctas = config.kwargs["NUM_CTAS"]
    blocks = triton.cdiv(rows, config.kwargs["BLOCK_N1"])

    def gradients(q, k, v, do, scaled_k, p, delta, round_):
        ds = round_(p * (do @ v.mT - delta[..., None]))
        dq = ds @ scaled_k * math.log(2)
        return dq, ds.mT @ q * scale, round_(p).mT @ do

    def check() -> None:
        inputs = [x.double() for x in (q, k, v, do)]
        p = s.softmax(-1)
        others = inputs[1] * (scale * LOG2_E), p, (p @ inputs[2] * inputs[3]).sum(-1)
        exact = gradients(*inputs, *others, lambda x: x)
        inputs = [x.float() for x in (q, k, v, do, scaled_k)]
        logits = inputs[0] @ inputs[4].mT - lse[..., None]
        if causal:
            logits = logits.masked_fill(hidden(rows), -torch.inf)
        same = gradients(*inputs, logits.exp2(), delta, lambda x: x.to(dtype).float())
        results = (unpack(dq, config.kwargs["BLOCK_M1"] // ctas), dk, dv)
        for what, result, good, near in zip(("dQ", "dK", "dV"), results, exact, same, strict=True):
            assert_near(what, result, good, near.to(result.dtype))

    return Prepared(
        tuned.fn,
        (triton.cdiv(blocks, ctas) * ctas, heads, batch),
        tuple(arguments.values()),
        kwargs | {n: getattr(config, n) for n in ("num_warps", "num_stages", "ctas_per_cga")},
        check,
    )


def backward_before(heads: int, rows: int) -> Prepared:
    """Delta, the row sums of O * dO."""
    head_dim = 64
    out, do = (normal(seed, heads, rows, head_dim, dtype=torch.bfloat16) for seed in range(2))
    delta = unwritten(heads, rows, dtype=torch.float32)

    def check() -> None:
        exact = (out.double() * do.double()).sum(-1)
        assert_near("Delta", delta, exact, (out.float() * do.float()).sum(-1))

    return Prepared(
        load(PERSISTENT)._attn_bwd_preprocess,
        (rows // 128, heads),
        (out, do, delta, rows),
        {"BLOCK_M": 128, "HEAD_DIM": head_dim},
        check,
    )


def backward_after(heads: int, rows: int, block: int) -> Prepared:
    """The packed dQ, in row order."""
    head_dim = 64
    packed = normal(0, 1, heads, rows, head_dim, dtype=torch.float32)
    dq = unwritten(*packed.shape, dtype=torch.float32)

    def check() -> None:
        assert torch.equal(dq, unpack(packed, block))

    return Prepared(
        load(PERSISTENT)._attn_bwd_dq_postprocess,
        (rows // 128, heads),
        (packed, dq, rows),
        {"BLK": block, "HALF_HD": head_dim // 2, "BLOCK_M": 128, "HEAD_DIM": head_dim},
        check,
    )


# Attention over jagged sequences, with an activation in place of the softmax


def offsets(lengths: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=dtype).cumsum(0).to(dtype)


def activated(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_offsets: torch.Tensor,
    kv_offsets: torch.Tensor,
    attend: Callable[..., torch.Tensor],
) -> None:
    """Check `out`, [rows, heads, head_dim], sequence by sequence and head by head.

    attend: of the q, k, v, [rows, head_dim], of one sequence and head, and the dtype of P.
    """
    for z in range(len(q_offsets) - 1):
        rows, keys = (slice(*x[z : z + 2].tolist()) for x in (q_offsets, kv_offsets))
        if rows.start == rows.stop:
            continue
        for h in range(q.shape[1]):
            inputs = (q[rows, h], k[keys, h], v[keys, h])
            exact = attend(*(x.double() for x in inputs), torch.float64)
            same = attend(*(x.float() for x in inputs), v.dtype).to(out.dtype)
            assert_near(f"O of sequence {z}, head {h}", out[rows, h], exact, same)


def cross_attention(
    kernel: str,
    q_lengths: tuple[int, ...],
    kv_lengths: tuple[int, ...],
    *,
    heads: int = 1,
    head_dim: int = 64,
    hook: str = "_host_descriptor_pre_hook",
    **config: Any,
) -> Prepared:
    """SiLU attention, divided by the longest sequence; lengths: rows of each sequence."""
    module = load("blackwell-cross-attention.py")
    q, k, v = (
        normal(seed, sum(lengths), heads, head_dim, dtype=torch.bfloat16)
        for seed, lengths in enumerate((q_lengths, kv_lengths, kv_lengths))
    )
    out = unwritten(*q.shape, dtype=torch.bfloat16)
    q_offsets, kv_offsets = (offsets(x, torch.int64) for x in (q_lengths, kv_lengths))
    longest, alpha = max(kv_lengths), head_dim**-0.5
    tensors = {
        name: describe(x.view(-1, heads * head_dim))
        for name, x in {"desc_q": q, "desc_k": k, "desc_v": v}.items()
    }
    if "BLOCK_M1" in config:  # those of full blocks have a configuration of their own
        tensors |= {f"{name}1": describe(x.base) for name, x in tensors.items()}
    sizes = {"HEAD_DIM": head_dim, "BLOCK_D_V": head_dim}
    num_warps = config.pop("num_warps", 4)
    getattr(module, hook)({**config, **sizes, **tensors})

    def attend(q, k, v, p_dtype):
        p = torch.nn.functional.silu(q @ k.mT * alpha).to(p_dtype)
        return p.to(q.dtype) @ v / longest

    return Prepared(
        getattr(module, kernel).fn,
        (triton.cdiv(max(q_lengths), config["BLOCK_M"]), len(q_lengths) * heads),
        (),
        {
            "alpha": alpha, "Z": len(q_lengths), "H": heads, **tensors, "Out": out,
            "stride_qh": q.stride(1), "stride_kh": k.stride(1), "stride_vh": v.stride(1),
            "stride_om": out.stride(0), "stride_oh": out.stride(1),
            "seq_offsets_q": q_offsets, "seq_offsets": kv_offsets, "max_seq_len": longest,
            "AUTOTUNE_MAX_Q_LEN": triton.next_power_of_2(max(q_lengths)),
            **sizes, **config, "num_warps": num_warps, "num_stages": 1,
        },
        functools.partial(activated, out, q, k, v, q_offsets, kv_offsets, attend),
    )  # fmt: skip


def gdpa(
    q_lengths: tuple[int, ...], kv_rows: int, *, sms: int, heads: int = 1, **overrides: Any
) -> Prepared:
    """GELU attention over `kv_rows` keys of each sequence.

    The kernel multiplies Q with blocks of 128 keys that are not transposed, so head_dim is 128.
    """
    tuned = load("blackwell-gdpa.py").gdpa_kernel_tma_ws_blackwell
    config = {**tuned.configs[0].kwargs, **overrides}
    head_dim, batch = 128, len(q_lengths)
    q = 0.1 * normal(0, sum(q_lengths), heads, head_dim, dtype=torch.bfloat16)
    k, v = (normal(seed, batch * kv_rows, heads, head_dim, dtype=torch.bfloat16) for seed in (1, 2))
    out = unwritten(*q.shape, dtype=torch.bfloat16)
    q_offsets = offsets(q_lengths, torch.int32)
    kv_offsets = offsets([kv_rows] * batch, torch.int32)

    def attend(q, k, v, p_dtype):
        total = torch.zeros_like(q)
        for keys, values in zip(k.split(128), v.split(128), strict=True):
            x = q @ keys
            p = x + x * torch.tanh(x * (0.7978845608 + 0.0356774081 * x * x))
            total = total + p.to(p_dtype).to(q.dtype) @ values
        return total

    tiles = triton.cdiv(max(q_lengths), config["BLOCK_M"]) * batch * heads
    return Prepared(
        tuned.fn,
        (min(sms, tiles), 1, 1),
        (
            q, q_offsets, k, kv_offsets, v, out, q_offsets, None, None,
            *q.stride(), *k.stride(), *v.stride(), *out.stride(), batch, heads, 1,
        ),
        {
            "N_CTX": max(q_lengths), "N_CTX_KV": kv_rows, "qk_scale": 1.0, "is_predict": False,
            "Q_SHAPE_0": q.shape[0], "FUSED_QKV": False, "FUSED_KV": False,
            "SORT_BY_SEQ_LENGTH": False, "HEAD_DIM": head_dim, "BLOCK_D": head_dim, "STAGE": 1,
            "USE_START_END_OFFSETS": False, "WINDOW_SIZE": None, "BROADCAST_Q": False,
            "IS_DENSE_KV": True, "activation_enum_int": 3, "USE_ON_DEVICE_TMA": True,
            "MERGE_EPI": False, "ENABLE_PROTON": False, "PROTON_TILE": 10, **config, **ONE_STAGE,
        },
        functools.partial(activated, out, q, k, v, q_offsets, kv_offsets, attend),
    )  # fmt: skip


def _case(name: str, build: Callable[..., Prepared], *args: Any, **kwargs: Any) -> Case:
    return case(f"blackwell_{name}".strip(), "sm_100", build, *args, **kwargs)


def _attention(file: str, name: str, *, kernel: str = "_attn_fwd_ws", **kwargs: Any) -> Case:
    # The first correction scales an accumulator that no product has written yet; the first product
    # then overwrites it.
    options = {"uninitialized": "allow"}
    arguments = attention, f"blackwell_{file}.py", kernel
    return _case(f"{file} {name}", *arguments, options=options, **kwargs)


def _gemm(name: str, shape: Shape, **kwargs: Any) -> Case:
    return _case(f"gemm_ws {name}", gemm_ws, shape, **kwargs)


def _clc(name: str, **kwargs: Any) -> Case:
    more = {"kernel": "_attn_fwd_clc", "clc": True, "stages": True, "rows": 512, "heads": 2}
    return _attention("fa_clc", name, **more, **kwargs)


def _forward(name: str, **kwargs: Any) -> Case:
    return _attention("fa_ws_pipelined_persistent", f"forward{name}", clc=True, **kwargs)


def _backward(name: str, *args: Any, **kwargs: Any) -> Case:
    return _case(f"fa_ws_pipelined_persistent backward{name}", backward, *args, **kwargs)


def _cross(name: str, kernel: str, *args: Any, **kwargs: Any) -> Case:
    return _case(f"cross_attention {name}", cross_attention, f"_attn_fwd_{kernel}", *args, **kwargs)


RESCALE = {"GROUP_SIZE_N": 4, "RESCALE_OPT": True}
WARP_BARRIERS = {"USE_WARP_BARRIER": True}
RESCALE_WARPS = {**RESCALE, **WARP_BARRIERS, "USE_WHERE": True}
TWO_GROUPS = {"BLOCK_SIZE_M": 256, "NUM_MMA_GROUPS": 2, "NUM_TMEM_BUFFERS": 1}
INTERLEAVED = TWO_GROUPS | {"INTERLEAVE_EPILOGUE": 1}
PAIR = {"NUM_CTAS": 2, "EPILOGUE_SUBTILE": 2}
PROBLEMS = ((256, 128, 128), (200, 136, 192), (128, 256, 64))
PIPELINE = {"BLOCK_M": 128, "BLOCK_N": 64, "NUM_BUFFERS_KV": 2, "NUM_MMA_GROUPS": 2}
HOOK = "_host_descriptor_pre_hook_ws"
SINGLE_Q = PIPELINE | {"BLOCK_M": 64, "NUM_BUFFERS_KV": 3, "hook": HOOK}
WIDE = PIPELINE | {"BLOCK_M": 256, "BLOCK_N": 128, "head_dim": 128}
PLAIN = {
    "BLOCK_M": 64, "BLOCK_N": 64, "NUM_MMA_GROUPS": 1, "REMAT_OFF": False, "OPT_MASK": True,
    "TMA_STORE": False, "NUM_STAGES": 2,
}  # fmt: skip
STORED = PLAIN | {"TMA_STORE": True, "heads": 2}
SECOND = {"BLOCK_M1": 32, "BLOCK_N1": 32, "NUM_STAGES1": 2}
TWO = PLAIN | SECOND | {"hook": "_host_descriptor_pre_hook_spec"}
JAGGED = ((70, 0, 40), (150, 64, 70))

CASES = (
    _case("gemm_2cta", gemm_2cta, (512, 256, 384)),
    _case("gemm_clc", gemm_clc, (384, 256, 192), sms=2),
    _case(
        "gemm_clc warp barriers", gemm_clc, (384, 256, 192), sms=2,
        **WARP_BARRIERS, NUM_TMEM_BUFFERS=3,
    ),
    _case("gemm_clc whole tiles, ragged", gemm_clc, (200, 136, 136), sms=2, EPILOGUE_SUBTILE=False),
    _gemm("", (256, 256, 256), sms=3),
    _gemm("ragged, bf16", (200, 136, 168), sms=2, dtype=torch.bfloat16),
    _gemm("columns first", (256, 128, 192), sms=2, transposed="ab"),
    _gemm("groups of 64 rows", (256, 128, 192), sms=1, NUM_MMA_GROUPS=2),
    _gemm(
        "two groups, subtiles, warp barriers", (512, 256, 192), sms=2,
        **TWO_GROUPS, **WARP_BARRIERS, EPILOGUE_SUBTILE=4,
    ),
    _gemm("interleaved", (512, 256, 192), sms=2, **INTERLEAVED, EPILOGUE_SUBTILE=4),
    _gemm("split-K", (128, 256, 320), sms=3, SPLIT_K=2),
    _case("gemm_ws sum of splits", reduce_splits, 72, 40, 3),
    _gemm("two CTAs", (512, 256, 192), sms=4, **PAIR),
    _gemm("two CTAs, columns first", (256, 256, 192), sms=2, transposed="ab", **PAIR),
    _gemm(
        "two CTAs, interleaved, warp barriers", (512, 256, 192), sms=2,
        **INTERLEAVED, **PAIR, **WARP_BARRIERS,
    ),
    _gemm("two CTAs, split-K", (256, 128, 256), sms=4, SPLIT_K=2, **PAIR),
    _case("grouped_gemm", gemm_grouped, PROBLEMS, sms=2, ctas=1),
    _case("grouped_gemm two CTAs", gemm_grouped, PROBLEMS, sms=4, ctas=2),
    _attention("fa_ws", "", heads=1, rows=512),
    _attention("fa_ws", "small", heads=2, rows=256, head_dim=64, BLOCK_N=64, dtype=torch.half),
    _attention("fa_ws_pipelined", "", heads=1, rows=512, causal=False),
    _attention("fa_ws_pipelined", "causal", heads=1, rows=512, causal=True),
    _attention("fa_ws_persistent", "", heads=2, rows=512, causal=False, sms=3),
    _attention("fa_ws_persistent", "causal", heads=2, rows=512, causal=True, sms=3),
    _clc("", causal=False),
    _clc("causal, rescaled where needed", causal=True, **RESCALE),
    _clc("causal, warp barriers", causal=True, **RESCALE_WARPS),
    _forward("", heads=2, rows=512, causal=False),
    _forward(" causal, rescaled where needed", heads=2, rows=512, causal=True, **RESCALE),
    _forward(" causal, warp barriers", heads=2, rows=512, causal=True, **RESCALE_WARPS),
    _forward(" groups of 64 rows", heads=1, rows=256, causal=True, BLOCK_M=128, **RESCALE),
    _forward(" head_dim 64", heads=2, rows=256, causal=False, head_dim=64, NUM_BUFFERS_KV=6),
    _backward("", 2, 256, causal=False, config=0),
    _backward(", causal, warp barriers", 1, 384, causal=True, config=1),
    _backward(", two CTAs", 1, 512, causal=False, config=2),
    _backward(", two CTAs, causal", 2, 256, causal=True, config=2),
    _case("fa_ws_pipelined_persistent before the backward", backward_before, 2, 256),
    _case("fa_ws_pipelined_persistent after the backward", backward_after, 2, 256, 64),
    _cross("one Q", "single_q", *JAGGED, **SINGLE_Q),
    _cross(
        "one Q, 128 rows", "single_q", (130, 70), (200, 40), heads=2, **SINGLE_Q | {"BLOCK_M": 128}
    ),
    _cross("pipeline", "pipeline", *JAGGED, **PIPELINE),
    _cross("pipeline, 256 rows", "pipeline", (260, 70), (300, 40), **WIDE),
    _cross("Triton", "triton", *JAGGED, TRANS=True, **PLAIN),
    _cross("Triton, descriptor for the output", "triton", *JAGGED, TRANS=False, **STORED),
    _cross(
        "Triton, two configurations", "triton_spec", (70, 0, 30), JAGGED[1], TRANS=False, **TWO
    ),
)  # fmt: skip

# gdpa gives registers to the default task, which fbtriton 3.7.4 refuses; and its activation tasks
# read O without waiting for the last P @ V.
GDPA_ERRORS = ("InvalidKernel", "Race", "UninitializedRead")

# Launches that the tutorial gets wrong, and the errors, by name, of which a run must raise one.
FAULTY = (
    (_case("gdpa", gdpa, (300, 200), 256, sms=2), GDPA_ERRORS),
    (_case("gdpa no ping-pong", gdpa, (256,), 128, sms=1, PINGPONG=False), GDPA_ERRORS),
    # Ends beside the store of its tile, which reads shared memory.
    (_case("gemm_pipelined", gemm_pipelined, (256, 256, 256), stages=2), ("EarlyExit",)),
    (_case("gemm_pipelined ragged", gemm_pipelined, (200, 136, 168), stages=4), ("EarlyExit",)),
    # Without keys no role writes the P that the MMA role waits for.
    (_cross("no keys", "single_q", (40, 30), (0, 70), **SINGLE_Q), ("Deadlock",)),
)
