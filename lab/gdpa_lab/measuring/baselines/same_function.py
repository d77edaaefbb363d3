"""Peers that compute the same function: an element-wise activation where softmax would be.

HSTU (arXiv 2402.17152) divides by the longest length what SiLU gives: `output_scale` = 1 / length.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import triton

from gdpa_lab.measuring.baselines import peer
from gdpa_lab.measuring.baselines.peer import (
    Baseline,
    Call,
    both,
    needs_module,
    no_window,
    own_q,
)
from gdpa_lab.measuring.inputs import Inputs
from gdpa_lab.measuring.workload import STEP, Workload

HSTU = "generative_recommenders.ops.triton.triton_hstu_attention"
HSTU_CUDNN = "cudnn.hstu.hstu_attention"
GDPA = "ads_mkl.ops.oss.gdpa.triton.triton_generalized_dot_product_attention"
HSTU_HEAD_DIMS = 32, 64, 128, 256
"""Those of cuDNN's kernels."""
GDPA_NAMES = {
    "identity": "raw", "relu": "relu", "relu_squared": "relu_square", "leaky_relu": "leaky_relu",
    "gelu": "gelu", "gelu_tanh": "fast_gelu", "silu": "fast_silu", "hardswish": "hardswish",
}  # fmt: skip
"""Names of its activations by ours, those with the hardware's tanh or exp where they exist."""
GDPA_TECHNIQUES = {
    "persistent": "enable_persistent", "tma": "enable_tma", "ws": "enable_ws",
    "dq_atomic_add": "use_dq_atomic_add",
}  # fmt: skip
"""Its options by their names in bwd_opt_tech, which switches them on in the backward pass too."""
TUNED_ON = 128
"""Sequences of a batch on which the published Triton GDPA chooses its tiles: enough of them for
several on each SM."""
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


def hstu_triton(
    inputs: Inputs, direction: str = "forward", tma: bool = True, is_sorted: bool = False
) -> Call:
    """Call the Triton kernels of generative-recommenders. `tma`: use descriptors, and with fbtriton
    let it also choose its warp-specialized kernel; `is_sorted`: go by falling length, which each
    call sorts.

    It remembers what it tuned without asking for either, so every call tunes anew. fbtriton 3.7.4
    does not compile num_stages=0, which the warp-specialized kernel asks for: it gets 1, which
    means the same, since it fills its buffers itself.
    """
    module = importlib.import_module(HSTU)
    fixed = {"N": inputs.max_seqlen_q, "alpha": inputs.scale(), "enable_tma": tma}
    fixed |= {"seq_offsets": inputs.cu_seqlens_q, "num_targets": inputs.num_targets}
    fixed["sort_by_length"] = is_sorted
    tuners = [getattr(module, name) for name in ("_hstu_attn_fwd", "_hstu_attn_bwd")]
    states = [(tuner, {"cache": {}, "configs": [*map(_staged, tuner.configs)]}) for tuner in tuners]
    return _with(
        states, inputs, direction, lambda q, k, v: module.triton_hstu_mha(q=q, k=k, v=v, **fixed)
    )


def _staged(config: triton.Config) -> triton.Config:
    """Replace num_stages=0 in a configuration of Triton."""
    staged = copy.copy(config)
    staged.num_stages = config.num_stages or 1
    return staged


def hstu_configurations(direction: str) -> peer.Configurations:
    return {"TMA": {}, "no TMA": {"tma": False}, "TMA, sorted": {"is_sorted": True}}


def hstu_cutlass(inputs: Inputs, direction: str = "forward") -> Call:
    """Call the CUTLASS kernels of FBGEMM."""
    attention = importlib.import_module("hstu").hstu_attn_varlen_func
    fixed = peer.ragged_options(inputs)
    fixed |= dict.fromkeys(("seqused_q", "seqused_k", "num_contexts", "num_targets"))
    fixed |= {"alpha": inputs.scale(), "window_size": peer.window_size(inputs.workload)}
    fixed["scaling_seqlen"] = round(1 / inputs.workload.output_scale)
    return peer.differentiate(lambda q, k, v: attention(q, k, v, **fixed), inputs, direction)


def hstu_cudnn(inputs: Inputs, direction: str = "forward") -> Call:
    """Call cuDNN's HSTU kernels for Blackwell."""
    hstu = importlib.import_module(HSTU_CUDNN)
    tensors = {f"{name}_tensor": getattr(inputs, name) for name in "qkv"}
    fixed = tensors | {
        "cu_seqlens_q_tensor": inputs.cu_seqlens_q, "cu_seqlens_k_tensor": inputs.cu_seqlens_k,
        "max_seqlen_q": inputs.max_seqlen_q, "max_seqlen_k": inputs.max_seqlen_k,
        "window_size": peer.window_size(inputs.workload), "alpha": inputs.scale(),
        "scaling_seqlen": 1 / inputs.workload.output_scale,
    }  # fmt: skip

    def forward() -> torch.Tensor:
        return hstu.hstu_attention_forward(**fixed)["o_tensor"]

    def backward() -> tuple[torch.Tensor, ...]:
        gradients = hstu.hstu_attention_backward(do_tensor=inputs.grad_out, **fixed)
        return tuple(gradients[f"d{name}_tensor"] for name in "qkv")

    def step() -> tuple[torch.Tensor, ...]:
        forward()
        return backward()

    return {"forward": forward, STEP: step}.get(direction, backward)


def needs_hstu_cudnn() -> str | None:
    problem = needs_module(HSTU_CUDNN, "cuDNN's frontend 1.29 or newer")()
    if problem is None and torch.cuda.get_device_capability()[0] != 10:
        name = torch.cuda.get_device_name()
        problem = f"needs a Blackwell GPU of compute capability 10, got {name}"
    return problem


def gdpa_triton(
    inputs: Inputs, direction: str = "forward", techniques: str = "", tuning: str = "default"
) -> Call:
    """Call the published Triton GDPA. `techniques`: those of `GDPA_TECHNIQUES` to switch on,
    separated by commas, in the direction that is called and those before it; `tuning`: its set of
    tiles to tune over, `GDPA_AUTOTUNE_CONFIG_SET`.

    It tunes for each longest query alone, whatever else a batch has, so every call tunes anew, on
    the batch's first `TUNED_ON` sequences: some of its tiles take seconds on a whole one. Its
    qk_scale multiplies what the activation gives; the scale before it is in q already, where a
    model has it in a projection, and nothing here is timed for that.
    """
    module = importlib.import_module(GDPA)
    module.object = triton.language  # Triton looks annotations up, and knows no such builtin
    attention, used = module.generalized_dot_product_attention, techniques.split(",")
    fixed = {
        "max_seq_len_q": inputs.max_seqlen_q, "max_seq_len_kv": inputs.max_seqlen_k,
        "activation": GDPA_NAMES[inputs.workload.activation],
        "qk_scale": inputs.workload.output_scale, "bwd_opt_tech": techniques or "base",
        "window_size": inputs.workload.window,
        **{option: name in used for name, option in GDPA_TECHNIQUES.items()},
    }  # fmt: skip
    state = {"AUTOTUNE_CONFIG_SET": tuning}
    for name in ("get_autotune_fwd_kernel", "get_autotune_bwd_kernel"):
        state[name] = functools.cache(getattr(module, name).__wrapped__)

    def call(of: Inputs) -> Call:
        offsets = {"query_offset": of.cu_seqlens_q, "key_offset": of.cu_seqlens_k}
        return _with(
            [(module, state)], replace(of, q=of.q * of.scale()), direction,
            lambda q, k, v: attention(query=q, key=k, value=v, **fixed, **offsets),
        )  # fmt: skip

    if len(inputs.cu_seqlens_k) > TUNED_ON + 1:
        call(_first(inputs, TUNED_ON))()
    return call(inputs)


def _first(inputs: Inputs, count: int) -> Inputs:
    """Keep the first `count` sequences, and the longest lengths of all."""
    rows, keys = int(inputs.cu_seqlens_q[count]), int(inputs.cu_seqlens_k[count])
    return replace(
        inputs, q=inputs.q[:rows], k=inputs.k[:keys], v=inputs.v[:keys],
        cu_seqlens_q=inputs.cu_seqlens_q[: count + 1],
        cu_seqlens_k=inputs.cu_seqlens_k[: count + 1], grad_out=inputs.grad_out[:rows],
    )  # fmt: skip


def _with(
    states: Sequence[tuple[object, Mapping[str, object]]],
    inputs: Inputs,
    direction: str,
    function: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> Call:
    """Differentiate a function that runs with other attributes of some objects, such as a memory of
    its own for what was tuned: (object, values by attribute)."""

    @contextlib.contextmanager
    def changed() -> Iterator[None]:
        previous = [(owner, {name: getattr(owner, name) for name in new}) for owner, new in states]
        try:
            for owner, new in states:
                vars(owner).update(new)
            yield
        finally:
            for owner, old in previous:
                vars(owner).update(old)

    with changed():
        call = peer.differentiate(function, inputs, direction)

    def with_changes() -> object:
        with changed():
            return call()

    return with_changes


def gdpa_configurations(direction: str) -> peer.Configurations:
    """Its two sets of tiles, the second with its techniques too; warp specialization has tiles of
    its own, and fbtriton 3.7.4 does not compile them.

    What is wrong is left out: TMA in persistent programs, wrong where keys are dense, and TMA in
    the backward pass, which adds dQ to memory without values, or, with atomic sums, overwrites it.
    """
    few = {"tuning": "omnifm_v2"}
    if direction == "forward":
        combined = ("persistent", "tma")
    else:
        combined = ("persistent", "dq_atomic_add", "persistent,dq_atomic_add")
    tuned = {f"{techniques} omnifm_v2": {"techniques": techniques} | few for techniques in combined}
    specialized = {techniques: {"techniques": techniques} for techniques in ("ws", "tma,ws")}
    return {"default": {}, "omnifm_v2": few, **tuned, **specialized}


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


def _is_hstu(workload: Workload, direction: str) -> str | None:
    if workload.activation != "silu" or workload.num_heads_q != workload.num_heads_k:
        heads = f"{workload.num_heads_q} and {workload.num_heads_k} heads"
        return f"needs silu and as many key heads, got {workload.activation}, {heads}"
    return own_q(workload, direction)


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


def _is_hstu_of_cudnn(workload: Workload, direction: str) -> str | None:
    if workload.head_dim not in HSTU_HEAD_DIMS or workload.output_scale <= 0:
        dims = ", ".join(map(str, HSTU_HEAD_DIMS))
        received = f"{workload.head_dim} and {workload.output_scale}"
        return f"needs a head_dim among {dims} and a positive output_scale, got {received}"
    if workload.max_seqlen_q > workload.max_seqlen_k:
        return "needs at least as many keys as queries"
    return _is_hstu(workload, direction)


def _is_published(workload: Workload, direction: str) -> str | None:
    if workload.activation not in GDPA_NAMES or workload.causal:
        known = f"an activation among {', '.join(GDPA_NAMES)} without a causal mask"
        return f"needs {known}, got {workload.activation}, causal={workload.causal}"
    return own_q(workload, direction)


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
        needs_module(GDPA, "the published GDPA"), gdpa_triton, _is_published,
        f"clone {LIBRARY} as ads_mkl/ops/oss in a folder on PYTHONPATH", LIBRARY,
        checked=of_scaled_q, configurations=gdpa_configurations,
    ),
    Baseline(
        "hstu_triton", "HSTU, Triton", "activation",
        needs_module(HSTU, "generative-recommenders"), hstu_triton,
        both(_is_hstu, _scaled_by_length, no_window),
        f"clone {RECOMMENDERS} and put it on PYTHONPATH", RECOMMENDERS, takes_targets=True,
        configurations=hstu_configurations,
    ),
    Baseline(
        "hstu_cutlass", "HSTU, CUTLASS", "activation", needs_module("hstu", "FBGEMM's HSTU"),
        hstu_cutlass, both(_is_hstu, _scaled_by_whole, no_window),
        f"build it as its README says, {FBGEMM}", FBGEMM,
    ),
    Baseline(
        "hstu_cudnn", "HSTU, cuDNN", "activation", needs_hstu_cudnn, hstu_cudnn,
        _is_hstu_of_cudnn, "pip install nvidia-cudnn-frontend==1.32.0",
        "https://github.com/NVIDIA/cudnn-frontend",
    ),
    Baseline(
        "flashinfer", "FlashInfer, element-wise", "activation", needs_flashinfer, flashinfer,
        both(_forward_of, no_window), "pip install flashinfer-python, and CUDA's nvcc on PATH",
        "https://github.com/flashinfer-ai/flashinfer",
    ),
)  # fmt: skip
