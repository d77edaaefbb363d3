"""Peers that compute the same function: an element-wise activation where softmax would be.

HSTU (arXiv 2402.17152) divides by the longest length what SiLU gives: `output_scale` = 1 / length.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import ModuleType

import torch
import triton

from gdpa_lab.measuring.baselines import peer
from gdpa_lab.measuring.baselines.peer import Baseline, Call, both, needs_module, no_window
from gdpa_lab.measuring.inputs import Inputs
from gdpa_lab.measuring.workload import Workload

HSTU = "generative_recommenders.ops.triton.triton_hstu_attention"
GDPA = "ads_mkl.ops.oss.gdpa.triton.triton_generalized_dot_product_attention"
GDPA_NAMES = {
    "identity": "raw", "relu": "relu", "relu_squared": "relu_square", "gelu": "gelu",
    "gelu_tanh": "fast_gelu", "silu": "fast_silu", "hardswish": "hardswish",
}  # fmt: skip
"""Names of its activations by ours, those with the hardware's tanh or exp where they exist."""
GDPA_TECHNIQUES = {
    "persistent": "enable_persistent", "tma": "enable_tma", "ws": "enable_ws",
    "dq_atomic_add": "use_dq_atomic_add",
}  # fmt: skip
"""Its options by their names in bwd_opt_tech, which switches them on in the backward pass too."""
GDPA_TUNINGS = "default", "omnifm_v2"
"""Its sets of tiles, the second for half-full batches."""
FLASHINFER = {
    "silu": "h * (1.f + math::tanh(h))",
    "gelu_tanh": "h * (1.f + math::tanh(x * (0.7978845608f + 0.0356774081f * x * x)))",
}
"""Activations in its C++, as functions of x and of h = x / 2."""
VARIANT = """
struct ElementWise : AttentionVariantBase {
  float scale, output_scale;

  template <typename MainloopParams, typename BlockCoord>
  __device__ __host__ ElementWise(const MainloopParams& params, const BlockCoord&)
      : scale(params.additional_params.logits_scale),
        output_scale(params.additional_params.output_scale) {}

  template <int NUM_ROWS_PER_THREAD>
  __device__ auto GetAttentionUpdater() { return DefaultUpdater<NUM_ROWS_PER_THREAD>(); }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const float x = float(logits) * scale, h = 0.5f * x;
    return output_scale * (%s);
  });
};
"""


def hstu_triton(inputs: Inputs, direction: str = "forward", tma: bool = True) -> Call:
    """Call the Triton kernels of generative-recommenders. `tma`: use descriptors, and with fbtriton
    let it also choose its warp-specialized kernel."""
    attention = importlib.import_module(HSTU).triton_hstu_mha
    fixed = {"N": inputs.max_seqlen_q, "alpha": inputs.scale(), "enable_tma": tma}
    fixed |= {"seq_offsets": inputs.cu_seqlens_q, "num_targets": inputs.num_targets}
    return peer.differentiate(lambda q, k, v: attention(q=q, k=k, v=v, **fixed), inputs, direction)


def hstu_cutlass(inputs: Inputs, direction: str = "forward") -> Call:
    """Call the CUTLASS kernels of FBGEMM."""
    attention = importlib.import_module("hstu").hstu_attn_varlen_func
    fixed = peer.ragged_options(inputs)
    fixed |= dict.fromkeys(("seqused_q", "seqused_k", "num_contexts", "num_targets"))
    fixed |= {"alpha": inputs.scale(), "window_size": peer.window_size(inputs.workload)}
    fixed["scaling_seqlen"] = round(1 / inputs.workload.output_scale)
    return peer.differentiate(lambda q, k, v: attention(q, k, v, **fixed), inputs, direction)


def gdpa_triton(
    inputs: Inputs, direction: str = "forward", techniques: str = "", tuning: str = "default"
) -> Call:
    """Call the published Triton GDPA. `techniques`: those of `GDPA_TECHNIQUES` to switch on,
    separated by commas, in the direction that is called and those before it; `tuning`: its set of
    tiles to tune over, `GDPA_AUTOTUNE_CONFIG_SET`.

    It tunes for each longest query alone, whatever else a batch has, so every call tunes anew. Its
    qk_scale multiplies what the activation gives; the scale before it is in q already, where a
    model has it in a projection, and nothing here is timed for that.
    """
    module = importlib.import_module(GDPA)
    module.object = triton.language  # Triton looks annotations up, and knows no such builtin
    attention, used = module.generalized_dot_product_attention, techniques.split(",")
    fixed = {
        "query_offset": inputs.cu_seqlens_q, "key_offset": inputs.cu_seqlens_k,
        "max_seq_len_q": inputs.max_seqlen_q, "max_seq_len_kv": inputs.max_seqlen_k,
        "activation": GDPA_NAMES[inputs.workload.activation],
        "qk_scale": inputs.workload.output_scale, "bwd_opt_tech": techniques or "base",
        **{option: name in used for name, option in GDPA_TECHNIQUES.items()},
    }  # fmt: skip
    scaled = replace(inputs, q=inputs.q * inputs.scale())
    state = {"AUTOTUNE_CONFIG_SET": tuning}
    for name in ("get_autotune_fwd_kernel", "get_autotune_bwd_kernel"):
        state[name] = functools.cache(getattr(module, name).__wrapped__)
    with _holding(module, state):
        call = peer.differentiate(
            lambda q, k, v: attention(query=q, key=k, value=v, **fixed), scaled, direction
        )

    def tuned() -> object:
        with _holding(module, state):
            return call()

    return tuned


@contextlib.contextmanager
def _holding(module: ModuleType, values: Mapping[str, object]) -> Iterator[None]:
    """Give a module other global values within this context."""
    previous = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(previous)


def gdpa_configurations(direction: str) -> peer.Configurations:
    """Combine its techniques with its two sets of tiles; warp specialization has tiles of its own,
    and fbtriton 3.7.4 does not compile them.

    TMA in the backward pass is left out: it adds dQ to memory without values, or, with atomic sums,
    overwrites it.
    """
    name = "tma" if direction == "forward" else "dq_atomic_add"
    tiled = {
        " ".join(filter(None, (techniques, tuning))): {"techniques": techniques, "tuning": tuning}
        for techniques in ("", "persistent", name, f"persistent,{name}")
        for tuning in GDPA_TUNINGS
    }
    return tiled | {techniques: {"techniques": techniques} for techniques in ("ws", "tma,ws")}


def of_scaled_q(inputs: Inputs, results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Scale the gradient of the scaled q; leave an output as it is."""
    first, *others = results
    return (first * inputs.scale(), *others) if others else results


def flashinfer(inputs: Inputs, direction: str = "forward") -> Call:
    """Call a variant of FlashInfer's kernels for Hopper, compiled on construction."""
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

    q, k, name = inputs.q, inputs.k, inputs.workload.activation
    dtypes, head_dim = [q.dtype] * 3, q.shape[-1]
    parameters = "logits_scale", "output_scale"
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(
        torch.empty(2**27, dtype=torch.uint8, device=q.device), "NHD", backend="fa3",
        jit_args=(
            f"element_wise_{name}_{head_dim}_{q.dtype}".replace(".", "_"), *dtypes, torch.int32,
            head_dim, head_dim, [], [], [*parameters], ["double"] * 2, "ElementWise",
            VARIANT % FLASHINFER[name],
        ),
    )  # fmt: skip
    ends_q, ends_k = inputs.cu_seqlens_q.cpu(), inputs.cu_seqlens_k.cpu()
    options = {"causal": inputs.workload.causal, "q_data_type": q.dtype, "kv_data_type": k.dtype}
    wrapper.plan(ends_q, ends_k, q.shape[1], k.shape[1], head_dim, **options)
    factors = inputs.scale(), inputs.workload.output_scale
    return peer.differentiate(lambda q, k, v: wrapper.run(q, k, v, *factors), inputs, direction)


def needs_flashinfer() -> str | None:
    if not peer.is_importable("flashinfer"):
        return "needs FlashInfer, which is not installed"
    return peer.needs_cuda() if shutil.which("nvcc") else "needs nvcc, which compiles FlashInfer's"


def _own_q(workload: Workload, direction: str) -> str | None:
    return "needs a q of its own for each sequence" if workload.shared_q else None


def _is_hstu(workload: Workload, direction: str) -> str | None:
    if workload.activation != "silu" or workload.num_heads_q != workload.num_heads_k:
        heads = f"{workload.num_heads_q} and {workload.num_heads_k} heads"
        return f"needs silu and as many key heads, got {workload.activation}, {heads}"
    return _own_q(workload, direction)


def _scaled_by_length(workload: Workload, direction: str) -> str | None:
    if workload.lengths_k is not None or not workload.causal:
        return "needs causal self-attention"
    if workload.output_scale * workload.max_seqlen_q != 1:
        return f"needs output_scale 1 / {workload.max_seqlen_q}, got {workload.output_scale}"
    return None


def _scaled_by_whole(workload: Workload, direction: str) -> str | None:
    if workload.max_seqlen_q > workload.max_seqlen_k:
        return "needs at least as many keys as queries"
    divisor = 1 / workload.output_scale if workload.output_scale else 0
    whole = divisor == round(divisor) > 0
    return None if whole else f"needs output_scale 1 / n, got {workload.output_scale}"


def _is_published(workload: Workload, direction: str) -> str | None:
    if workload.activation not in GDPA_NAMES or workload.causal:
        known = f"an activation among {', '.join(GDPA_NAMES)} without a causal mask"
        return f"needs {known}, got {workload.activation}, causal={workload.causal}"
    return _own_q(workload, direction)


def _forward_of(workload: Workload, direction: str) -> str | None:
    if direction != "forward":
        return "needs the forward direction: FlashInfer has no gradients"
    known = workload.activation in FLASHINFER
    return None if known else f"needs {' or '.join(FLASHINFER)}, got {workload.activation}"


RECOMMENDERS = "https://github.com/meta-recsys/generative-recommenders"
LIBRARY = "https://github.com/facebookresearch/ads_model_kernel_library"
FBGEMM = "https://github.com/pytorch/FBGEMM/tree/main/fbgemm_gpu/experimental/hstu"
PEERS = (
    Baseline(
        "gdpa_triton", "published Triton GDPA", "activation",
        needs_module(GDPA, "the published GDPA"), gdpa_triton, both(_is_published, no_window),
        f"clone {LIBRARY} as ads_mkl/ops/oss in a folder on PYTHONPATH", LIBRARY,
        checked=of_scaled_q, configurations=gdpa_configurations,
    ),
    Baseline(
        "hstu_triton", "HSTU, Triton", "activation",
        needs_module(HSTU, "generative-recommenders"), hstu_triton,
        both(_is_hstu, _scaled_by_length, no_window),
        f"clone {RECOMMENDERS} and put it on PYTHONPATH", RECOMMENDERS, takes_targets=True,
    ),
    Baseline(
        "hstu_cutlass", "HSTU, CUTLASS", "activation", needs_module("hstu", "FBGEMM's HSTU"),
        hstu_cutlass, both(_is_hstu, _scaled_by_whole, no_window),
        f"build it as its README says, {FBGEMM}", FBGEMM,
    ),
    Baseline(
        "flashinfer", "FlashInfer, element-wise", "activation", needs_flashinfer, flashinfer,
        both(_forward_of, no_window), "pip install flashinfer-python, and CUDA's nvcc on PATH",
        "https://github.com/flashinfer-ai/flashinfer",
    ),
)  # fmt: skip
