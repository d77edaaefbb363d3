"""Peers behind the baselines' signature, with their libraries replaced by ones that note how they
were called, or in the emulator where their sources are on the path."""

import functools
import importlib
import math
import os
import re
import sys
from dataclasses import replace
from importlib import metadata
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.attention.flex_attention
import torch.nn.functional as F
import triton

import tritonemu
from gdpa_kernels.gdpa import reference
from gdpa_kernels.gdpa.kernels import v0_eager
from gdpa_lab.measuring import baselines, machine_code, operators, timing
from gdpa_lab.measuring.baselines import blocks, flash, peer, same_function, torch_peers
from gdpa_lab.measuring.inputs import make_inputs
from gdpa_lab.measuring.length_distributions import Between, Full, Uniform
from gdpa_lab.measuring.workload import STEP, Workload
from gdpa_lab.measuring.workloads import WORKLOADS
from tests.records import available

WORK = Workload(
    name="small", batch=3, num_heads_q=2, num_heads_k=2, head_dim=16, max_seqlen_q=8,
    max_seqlen_k=4, lengths_q=Full(), lengths_k=Full(), dtype="float32",
)  # fmt: skip
SELF = replace(WORK, max_seqlen_k=8, lengths_q=Uniform(0.5), lengths_k=None)
HSTU = replace(SELF, activation="silu", output_scale=1 / 8, causal=True)


def softmax(q, k, v, scale):
    """Compute softmax attention of dense [batch, length, heads, head_dim]."""
    p = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) * scale, -1)
    return torch.einsum("bhqk,bkhd->bqhd", p, v).contiguous()


@pytest.fixture(autouse=True)
def here(monkeypatch):
    available(monkeypatch)


@pytest.fixture
def library(monkeypatch):
    """A stand-in for flash_attn.cute: softmax on dense tensors, and the threshold of its search at
    each ragged call."""
    cute, interface = ModuleType("flash_attn.cute"), ModuleType("flash_attn.cute.interface")
    interface.BIN_BATCH_SEARCH_THRESH = 256
    interface.seen = []

    def varlen(q, k, v, **_):
        interface.seen.append(interface.BIN_BATCH_SEARCH_THRESH)
        return q, None

    def dense(q, k, v, softmax_scale):
        assert q.shape == (3, 8, 2, 16) and k.shape == v.shape == (3, 4, 2, 16)
        return softmax(q, k, v, softmax_scale), None

    cute.flash_attn_varlen_func, cute.flash_attn_func = varlen, dense
    cute.interface = interface
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    return interface


def test_scan_lifts_the_threshold_of_the_lookup_during_its_calls_alone(library):
    operator = operators.of(make_inputs(WORK, device="cpu"), "forward")
    looked_up = operator.candidate("fa4", "")
    scanning = operator.candidate("fa4", "scan", scan=True)
    assert (scanning.variant, scanning.config) == ("scan", {"scan": True})
    for made in (looked_up, scanning, looked_up):
        made.call()
    assert library.seen == [256, math.inf, 256] and library.BIN_BATCH_SEARCH_THRESH == 256
    del library.BIN_BATCH_SEARCH_THRESH
    with pytest.raises(AttributeError, match="BIN_BATCH_SEARCH_THRESH"):
        scanning.call()


WAYS = ("forward", "backward", STEP)


def tensors(found) -> tuple:
    return found if isinstance(found, tuple) else (found,)


def check(found, inputs, direction, math="activation", atol=1e-5):
    """Check that the output, or the gradients, are those in fp64."""
    operator = operators.of(inputs, "forward" if direction == "forward" else "backward")
    right = operator._compute(math, torch.float64, inputs)
    for got, expected in zip(tensors(found), right, strict=True):
        torch.testing.assert_close(got.double(), expected, atol=atol, rtol=atol)


def check_peer(impl, work, direction, math="activation", **options):
    """Check that a peer computes what it says."""
    inputs = make_inputs(work, device="cpu")
    check(baselines.BASELINES[impl].call(inputs, direction)(), inputs, direction, math, **options)


@pytest.mark.parametrize("direction", WAYS)
def test_dense_gives_the_rows_back_in_their_order(library, direction):
    check_peer("fa4_dense", WORK, direction, "softmax")


def ragged(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale):
    """Softmax of equally long sequences, and its weights."""
    shape = len(cu_seqlens_q) - 1, -1
    q, k, v = (x.unflatten(0, shape) for x in (q, k, v))
    assert (q.shape[1], k.shape[1]) == (max_seqlen_q, max_seqlen_k)
    return softmax(q, k, v, softmax_scale).flatten(0, 1)


def of_shape(q, k, v, *, softmax_scale, **lengths):
    """Softmax of dense tensors, or of ragged ones with their offsets."""
    assert bool(lengths) == (q.dim() == 3)
    function = ragged if lengths else softmax
    return function(q, k, v, **lengths, **{"softmax_scale" if lengths else "scale": softmax_scale})


FA3 = ("fa3", "fa3_dense")


@pytest.mark.parametrize("impl", FA3)
@pytest.mark.parametrize("direction", WAYS)
def test_flash_attention_3_of_its_own_package(monkeypatch, direction, impl):
    module = ModuleType("flash_attn_interface")

    def attention(q, k, v, *, causal, window_size, **options):
        assert (causal, window_size) == (False, (-1, -1))
        return of_shape(q, k, v, **options)

    name = "flash_attn_varlen_func" if impl == "fa3" else "flash_attn_func"
    setattr(module, name, attention)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    check_peer(impl, WORK, direction, "softmax")


SCHEMAS = {
    "fwd": "k_new v_new q_v out cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k "
    "max_seqlen_q max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin "
    "seqlens_rotary q_descale k_descale v_descale softmax_scale is_causal window_size_left "
    "window_size_right attention_chunk softcap is_rotary_interleaved scheduler_metadata "
    "num_splits pack_gqa sm_margin",
    "bwd": "dq dk dv cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k "
    "softmax_scale is_causal window_size_left window_size_right softcap deterministic sm_margin",
}
"""Optional arguments of the operators in xformers 0.0.34's library, in their order."""


@pytest.mark.parametrize("impl", FA3)
@pytest.mark.parametrize("direction", WAYS)
def test_flash_attention_3_of_the_library_in_xformers(monkeypatch, direction, impl):
    def fwd(q, k, v, *, is_causal, window_size_left, window_size_right, num_splits, **options):
        assert (is_causal, window_size_left, window_size_right, num_splits) == (False, -1, -1, 1)
        assert {*options} <= {*SCHEMAS["fwd"].split()}
        return of_shape(q, k, v, **options), "lse", None, None

    def bwd(grad, q, k, v, out, lse, dq, dk, dv, *, is_causal, window_size_left,
            window_size_right, **options):  # fmt: skip
        assert {*options} <= {*SCHEMAS["bwd"].split()}
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        assert lse == "lse" and torch.equal(out, of_shape(q, k, v, **options))
        found = torch.autograd.grad(of_shape(*leaves, **options), leaves, grad)
        for place, gradient in zip((dq, dk, dv), found, strict=True):
            place.copy_(gradient)

    monkeypatch.setattr(flash, "_operators", lambda: SimpleNamespace(fwd=fwd, bwd=bwd))
    check_peer(impl, WORK, direction, "softmax")


class CudnnTensor(SimpleNamespace):
    """A tensor of a graph, as the frontend has it."""

    __hash__ = object.__hash__

    def set_output(self, is_output):
        return self.set("is_output", is_output)

    def set_dim(self, dim):
        return self.set("dim", dim)

    def set_stride(self, stride):
        return self.set("stride", stride)

    def set_data_type(self, data_type):
        return self.set("data_type", data_type)

    def set_ragged_offset(self, offset):
        return self.set("offset", offset)

    def set(self, name, value):
        setattr(self, name, value)
        return self


class CudnnGraph:
    """One operation on ragged tensors: a result is only where its stride and offsets say."""

    planned = 0

    def __init__(self, handle, io_data_type, intermediate_data_type, compute_data_type):
        assert (handle, intermediate_data_type, compute_data_type) == ("handle", "float", "float")
        self.steps = []

    def tensor(self, name, dim, stride, data_type=None):
        return CudnnTensor(name=name, dim=dim, stride=stride, data_type=data_type)

    def sdpa(self, name, q, k, v, generate_stats, **how):
        self.inputs, self.how = (q, k, v), how
        self.results = [CudnnTensor(), CudnnTensor() if generate_stats else None]
        return self.results

    def sdpa_backward(self, name, q, k, v, o, dO, stats, max_total_seq_len_q,
                      max_total_seq_len_kv, **how):  # fmt: skip
        assert max_total_seq_len_q % 64 == max_total_seq_len_kv % 64 == 0
        self.inputs, self.how, self.saved = (q, k, v), how, (o, dO, stats)
        self.results = [CudnnTensor() for _ in range(3)]
        return self.results

    def validate(self):
        self.steps.append("validate")

    def build_operation_graph(self):
        self.steps.append("operations")

    def create_execution_plans(self, modes):
        self.steps.append(modes)

    def check_support(self):
        self.steps.append("support")

    def build_plans(self):
        assert self.steps == ["validate", "operations", ["A", "FALLBACK"], "support"]
        CudnnGraph.planned += 1

    def get_workspace_size(self):
        return 5

    def parts(self, tensor, buffers):
        """Views of each sequence, `[num_heads, length, head_dim]`, of a buffer."""
        offset = buffers[tensor.offset].flatten().tolist()
        side = "seq_len_q" if tensor.offset.name == "begin_q" else "seq_len_kv"
        lengths = buffers[self.how[side]].flatten().tolist()
        (batch, heads, longest, dim), stride = tensor.dim, tensor.stride
        assert len(lengths) == batch and max(lengths) <= longest
        for start, length in zip(offset, lengths, strict=False):
            yield buffers[tensor].as_strided((heads, length, dim), stride[1:], start)

    def execute(self, buffers, workspace, handle):
        assert workspace.dtype == torch.uint8 and len(workspace) == 5 and handle == "handle"
        assert self.how["use_padding_mask"] and not self.how["use_causal_mask"]
        sequences = zip(*(self.parts(x, buffers) for x in self.inputs), strict=True)
        outs = []
        for q, k, v in sequences:
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = F.scaled_dot_product_attention(
                *leaves, scale=self.how["attn_scale"], enable_gqa=True
            )
            outs.append((leaves, out))
        if len(self.results) == 2:
            for (_, out), place in zip(outs, self.parts(self.results[0], buffers), strict=True):
                place.copy_(out)
            if self.results[1] is not None:
                assert self.results[1].data_type == "float"
                buffers[self.results[1]].fill_(5)
            return
        o, grad_out, stats = self.saved
        assert (buffers[stats] == 5).all() and list(buffers[stats].shape) == stats.dim
        places = zip(*(self.parts(x, buffers) for x in (*self.results, o, grad_out)), strict=True)
        for (leaves, out), (*gradients, saved, grad) in zip(outs, places, strict=True):
            torch.testing.assert_close(out, saved)
            for place, found in zip(gradients, torch.autograd.grad(out, leaves, grad), strict=True):
                place.copy_(found)


@pytest.mark.parametrize("direction", WAYS)
@pytest.mark.parametrize("work", (SELF, replace(WORK, num_heads_q=4, lengths_q=Uniform(0.5))))
def test_ragged_cudnn_plans_its_graphs_once(monkeypatch, direction, work):
    module = ModuleType("cudnn")
    module.create_handle, module.pygraph = lambda: "handle", CudnnGraph
    module.set_stream = lambda handle, stream: None
    module.heur_mode = SimpleNamespace(A="A", FALLBACK="FALLBACK")
    module.data_type = SimpleNamespace(BFLOAT16="b", HALF="h", FLOAT="float", INT32="i", INT64="I")
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(CudnnGraph, "planned", 0)
    inputs = make_inputs(replace(work, dtype="bfloat16"), device="cpu")
    call = baselines.BASELINES["cudnn_varlen"].call(inputs, direction)
    for _ in range(2):
        check(call(), inputs, direction, "softmax", atol=2e-2)
    assert CudnnGraph.planned == (1 if direction == "forward" else 2)


def test_the_library_of_flash_attention_3_is_found_without_importing_xformers(
    tmp_path, monkeypatch
):
    folder = tmp_path / "xformers" / "flash_attn_3"
    folder.mkdir(parents=True)
    (tmp_path / "xformers" / "__init__.py").write_text("raise ImportError('another PyTorch')")
    monkeypatch.syspath_prepend(tmp_path)
    assert flash._library() is None and "not installed" in flash.needs_fa3()
    (folder / "_C.so").write_bytes(b"")
    assert flash._library() == folder / "_C.so"
    assert "not installed" not in (flash.needs_fa3() or "")


def stub(monkeypatch, name: str, function: str, attention) -> None:
    """A module with one function, and the packages that hold it."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
    setattr(sys.modules[name], function, attention)


def definition(inputs, **options):
    """The function of q, k and v that a same-function peer stands for."""

    def attention(q, k, v):
        batch = replace(inputs.batch(), q=q, k=k, v=v, **options)
        return reference.forward(batch)

    return attention


@pytest.mark.parametrize("direction", WAYS)
def test_hstu_of_generative_recommenders(monkeypatch, direction):
    inputs = make_inputs(HSTU, device="cpu")

    def attention(N, alpha, q, k, v, seq_offsets, num_targets, sort_by_length, enable_tma):
        assert N == 8 and seq_offsets is inputs.cu_seqlens_q
        assert num_targets is inputs.num_targets
        for tuner in (module._hstu_attn_fwd, module._hstu_attn_bwd):
            tuner.cache.setdefault("the longest query", (enable_tma, sort_by_length))
            assert tuner.cache["the longest query"] == (enable_tma, sort_by_length)
            assert [config.num_stages for config in tuner.configs] == [3, 1]
        return definition(inputs, scale=alpha, output_scale=1 / N)(q, k, v)

    stub(monkeypatch, same_function.HSTU, "triton_hstu_mha", attention)
    module = sys.modules[same_function.HSTU]
    stages = [triton.Config({}, num_stages=n) for n in (3, 0)]
    for name in ("_hstu_attn_fwd", "_hstu_attn_bwd"):
        setattr(module, name, SimpleNamespace(cache={"the longest query": None}, configs=stages))
    for options in same_function.hstu_configurations(direction).values():
        check(
            baselines.BASELINES["hstu_triton"].call(inputs, direction, **options)(), inputs,
            direction,
        )  # fmt: skip
    assert module._hstu_attn_fwd.cache == {"the longest query": None}
    assert [config.num_stages for config in module._hstu_attn_fwd.configs] == [3, 0]


@pytest.mark.parametrize("work", (HSTU, replace(HSTU, causal=False, window=3)))
def test_hstu_of_cudnn(monkeypatch, work):
    inputs = make_inputs(replace(work, head_dim=32), device="cpu")

    def forward(
        q_tensor, k_tensor, v_tensor, cu_seqlens_q_tensor, cu_seqlens_k_tensor, max_seqlen_q,
        max_seqlen_k, window_size=(-1, -1), alpha=1.0, scaling_seqlen=None,
    ):  # fmt: skip
        assert window_size == ((-1, 0) if work.causal else (3, 3))
        assert (max_seqlen_q, max_seqlen_k, scaling_seqlen) == (8, 8, 8)
        assert cu_seqlens_q_tensor is inputs.cu_seqlens_q
        assert cu_seqlens_k_tensor is inputs.cu_seqlens_k
        function = definition(inputs, scale=alpha, output_scale=1 / scaling_seqlen)
        return {"o_tensor": function(q_tensor, k_tensor, v_tensor)}

    def backward(do_tensor, q_tensor, k_tensor, v_tensor, *args, **options):
        leaves = [x.detach().requires_grad_() for x in (q_tensor, k_tensor, v_tensor)]
        out = forward(*leaves, *args, **options)["o_tensor"]
        found = torch.autograd.grad(out, leaves, do_tensor)
        return dict(zip(("dq_tensor", "dk_tensor", "dv_tensor"), found, strict=True))

    stub(monkeypatch, same_function.HSTU_CUDNN, "hstu_attention_forward", forward)
    sys.modules[same_function.HSTU_CUDNN].hstu_attention_backward = backward
    for direction in WAYS:
        check(baselines.BASELINES["hstu_cudnn"].call(inputs, direction)(), inputs, direction)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert same_function.needs_hstu_cudnn() is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert same_function.needs_hstu_cudnn().endswith("capability 10, got NVIDIA H200")


@pytest.mark.parametrize("work", (HSTU, replace(HSTU, causal=False)))
def test_hstu_of_fbgemm(monkeypatch, work):
    inputs = make_inputs(work, device="cpu")

    def attention(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k,
        scaling_seqlen, num_contexts, num_targets, window_size, alpha,
    ):  # fmt: skip
        assert seqused_q is seqused_k is num_contexts is num_targets is None
        assert window_size == (-1, 0 if work.causal else -1)
        assert (max_seqlen_q, max_seqlen_k, scaling_seqlen) == (8, 8, 8)
        assert cu_seqlens_q is inputs.cu_seqlens_q and cu_seqlens_k is inputs.cu_seqlens_k
        return definition(inputs, scale=alpha, output_scale=1 / scaling_seqlen)(q, k, v)

    stub(monkeypatch, "hstu", "hstu_attn_varlen_func", attention)
    for direction in WAYS:
        check(baselines.BASELINES["hstu_cutlass"].call(inputs, direction)(), inputs, direction)


@pytest.fixture
def published(monkeypatch):
    """A stand-in for the published GDPA, which remembers what it tuned: of each call its switches,
    bwd_opt_tech and what it tuned over."""
    calls = []

    def attention(
        query, key, value, query_offset, key_offset, max_seq_len_q, max_seq_len_kv, activation,
        qk_scale, bwd_opt_tech, window_size, **switches,
    ):  # fmt: skip
        assert (max_seq_len_q, max_seq_len_kv) == (8, 8) and activation == "fast_gelu"
        assert window_size == published.inputs.workload.window
        assert query_offset is key_offset or torch.equal(query_offset, key_offset)
        used = sorted(option for option, is_on in switches.items() if is_on)
        calls.append((used, bwd_opt_tech, module.get_autotune_fwd_kernel("kernel", False)))
        return definition(published.inputs, scale=1.0, output_scale=qk_scale)(query, key, value)

    def published(inputs):
        published.inputs = inputs
        return inputs

    stub(monkeypatch, same_function.GDPA, "generalized_dot_product_attention", attention)
    module = sys.modules[same_function.GDPA]
    module.AUTOTUNE_CONFIG_SET = "of the environment"
    tune = functools.lru_cache(lambda kernel, ws: [module.AUTOTUNE_CONFIG_SET])
    module.get_autotune_fwd_kernel = module.get_autotune_bwd_kernel = tune
    published.calls, published.module = calls, module
    return published


@pytest.mark.parametrize("direction", WAYS)
def test_the_published_gdpa(published, direction):
    inputs = published(make_inputs(replace(SELF, output_scale=0.5, window=3), device="cpu"))
    operator = operators.of(inputs, "forward" if direction == "forward" else "backward")
    how = {"techniques": "persistent,dq_atomic_add", "tuning": "omnifm_v2"}
    made = operator._peer("gdpa_triton", direction, **how)
    check(made.checked(tensors(made.call())), inputs, direction)
    assert made.config == how
    for call in published.calls:
        switches = ["enable_persistent", "use_dq_atomic_add"]
        assert call == (switches, how["techniques"], ["omnifm_v2"])
    assert published.module.AUTOTUNE_CONFIG_SET == "of the environment"


def test_every_call_of_the_published_gdpa_tunes_anew(published):
    """Its own tuning is remembered by the longest query, whatever other length a batch has."""
    inputs = published(make_inputs(SELF, device="cpu"))
    peer_of = baselines.BASELINES["gdpa_triton"]
    for _ in range(2):
        call = peer_of.call(inputs, "forward", tuning="omnifm_v2")
        call()
        call()
    first, second, third, fourth = (tuned for *_, tuned in published.calls)
    assert first is second and third is fourth and first is not third


@pytest.mark.parametrize("direction", WAYS)
def test_the_published_gdpa_tunes_on_few_sequences(published, monkeypatch, direction):
    monkeypatch.setattr(same_function, "TUNED_ON", 2)
    inputs = make_inputs(SELF, device="cpu")
    few, seen = same_function._first(inputs, 2), []
    module, attention = published.module, published.module.generalized_dot_product_attention

    def see(**arguments):
        seen.append((arguments["max_seq_len_q"], arguments["query_offset"].tolist()))
        published(few if len(arguments["query_offset"]) == 3 else inputs)
        return attention(**arguments)

    monkeypatch.setattr(module, "generalized_dot_product_attention", see)
    call = baselines.BASELINES["gdpa_triton"].call(inputs, direction, tuning="omnifm_v2")
    call()
    whole = (SELF.max_seqlen_q, inputs.cu_seqlens_q.tolist())
    assert seen == [(SELF.max_seqlen_q, whole[1][:3]), whole]
    assert published.calls[0][-1] is published.calls[-1][-1], "what was tuned is used"


BURSTS = {"default": 9.0, "right": 3.04, "wrong": 1.0, "slower": 4.0}


@pytest.fixture
def configured(monkeypatch):
    """A peer with configurations, of which one is wrong and one does not compile; `BURSTS` are the
    others' times."""
    names = {}

    def prepare(inputs, direction, kind="default"):
        if kind == "broken":
            raise RuntimeError("PassManager::run failed\nmore")
        right = definition(inputs)
        call = peer.differentiate(
            lambda *qkv: right(*qkv) * (3 if kind == "wrong" else 1), inputs, direction
        )
        names[call] = kind
        return call

    kinds = ("default", "broken", "right", "wrong", "slower")
    one = baselines.Baseline(
        "configured", "configured", "activation", lambda: None, prepare,
        configurations=lambda direction: {kind: {"kind": kind} for kind in kinds},
    )  # fmt: skip
    monkeypatch.setitem(baselines.BASELINES, "configured", one)
    monkeypatch.setattr(timing, "burst_us", lambda call, device: BURSTS[names[call]])
    return one


@pytest.mark.parametrize("direction", WAYS)
def test_a_peer_is_timed_in_its_fastest_configuration_that_is_right(configured, direction):
    inputs = make_inputs(SELF, device="cpu")
    operator = operators.of(inputs, "forward" if direction == "forward" else "backward")
    made = operator._peer("configured", direction)
    check(made.call(), inputs, direction)
    tried = made.config["tried"]
    assert made.config["configuration"] == "right"
    assert [*tried] == ["default", "broken", "right", "wrong", "slower"]
    assert (tried["default"], tried["right"], tried["slower"]) == (9.0, 3.0, 4.0)
    assert tried["broken"] == "RuntimeError: PassManager::run failed"
    assert tried["wrong"].startswith("ValueError: check failed: ")


def test_options_choose_a_configuration(configured):
    operator = operators.of(make_inputs(SELF, device="cpu"), "forward")
    made = operator.candidate("configured", "slow", kind="slower")
    assert (made.variant, made.config) == ("slow", {"kind": "slower"})


def test_a_peer_none_of_whose_configurations_is_right_says_why_of_each(configured, monkeypatch):
    only = replace(
        configured, configurations=lambda to: {k: {"kind": k} for k in ("wrong", "broken")}
    )
    monkeypatch.setitem(baselines.BASELINES, "configured", only)
    with pytest.raises(ValueError, match="fails: {'wrong': 'ValueError: ch.*'broken': 'RuntimeErr"):
        operators.of(make_inputs(SELF, device="cpu"), "forward").candidate("configured", "")


def test_a_batch_that_a_peer_does_not_take_is_refused_once(configured, monkeypatch):
    refusing = replace(configured, lacks=lambda workload, direction: "needs another batch")
    monkeypatch.setitem(baselines.BASELINES, "configured", refusing)
    with pytest.raises(baselines.Unsupported, match="^needs another batch$"):
        operators.of(make_inputs(SELF, device="cpu"), "forward").candidate("configured", "")


def test_flashinfer(monkeypatch):
    inputs, planned = make_inputs(SELF, device="cpu"), []

    class Wrapper:
        def __init__(self, workspace, layout, *, backend, jit_args):
            assert (layout, backend, workspace.dtype) == ("NHD", "fa3", torch.uint8)
            assert jit_args[1:10] == (
                *[torch.float32] * 3, torch.int32, 16, 16, [], [], ["logits_scale", "output_scale"]
            )  # fmt: skip
            assert jit_args[11] == "ElementWise" and "math::tanh(x * (0.797" in jit_args[12]

        def plan(self, ends_q, ends_k, heads_q, heads_k, head_dim, **options):
            planned.append((ends_q.tolist(), ends_k.tolist(), heads_q, heads_k, head_dim))
            assert not options["causal"] and options["q_data_type"] == torch.float32

        def run(self, q, k, v, scale, output_scale):
            return definition(inputs, scale=scale, output_scale=output_scale)(q, k, v)

    stub(monkeypatch, "flashinfer", "BatchPrefillWithRaggedKVCacheWrapper", Wrapper)
    check(baselines.BASELINES["flashinfer"].call(inputs, "forward")(), inputs, "forward")
    assert planned == [(*[inputs.cu_seqlens_q.tolist()] * 2, 2, 2, 16)]
    with pytest.raises(baselines.Unsupported, match="FlashInfer has no gradients"):
        baselines.BASELINES["flashinfer"].call(inputs, "backward")


@pytest.mark.parametrize("name", same_function.FLASHINFER)
def test_the_activations_given_to_flashinfer_are_the_definitions(name):
    text = re.sub(r"(\d)\.?f\b|math::", r"\1", same_function.FLASHINFER[name])
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    found = eval(text, {"x": x, "h": x / 2, "tanh": torch.tanh})
    torch.testing.assert_close(found, v0_eager.ACTIVATIONS[name](x), atol=1e-7, rtol=1e-7)


def flex(q, k, v, score_mod, *, scale, return_aux, enable_gqa=False):
    """FlexAttention by definition, which PyTorch differentiates on a GPU alone."""
    assert return_aux.lse and enable_gqa == (q.shape[1] != k.shape[1])
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = score_mod(q @ k.mT * scale, *[None] * 4)
    return torch.softmax(scores, -1) @ v, SimpleNamespace(lse=scores.logsumexp(-1))


@pytest.mark.parametrize("activation", torch_peers.OFFSETS)
@pytest.mark.parametrize("direction", (*WAYS, "PyTorch's own"))
def test_flex_attention_computes_the_activation(monkeypatch, direction, activation):
    if direction in WAYS:
        monkeypatch.setattr(torch.nn.attention.flex_attention, "flex_attention", flex)
    else:
        direction = "forward"
    compiled = torch.compile  # FlexAttention itself calls it, with a backend that compiles nothing

    def eager(function, **how):
        return compiled(function, **how) if "backend" in how else function

    monkeypatch.setattr(torch, "compile", eager)
    work = replace(WORK, activation=activation, output_scale=0.5, num_heads_q=4)
    check_peer("flex", work, direction, atol=3e-5)


BLOCKS = Workload(
    name="blocks", operator="block_attention", batch=6, num_heads_q=4, num_heads_k=2, head_dim=16,
    max_seqlen_q=90, max_seqlen_k=90, lengths_q=Between(0.01, 1.0), block_size=16, dtype="float32",
)  # fmt: skip


def tiled(q, k, v, *, block_mask, scale, enable_gqa):
    """FlexAttention by definition, of the tiles that its mask lists for queries and for keys."""
    (tile, _), (n, _) = block_mask.BLOCK_SIZE, block_mask.seq_lengths
    assert q.shape[2] == n and enable_gqa
    lists = (block_mask.kv_num_blocks, block_mask.kv_indices), (
        block_mask.q_num_blocks, block_mask.q_indices
    )  # fmt: skip
    of_queries, of_keys = (
        torch.stack(
            [
                torch.isin(torch.arange(n) // tile, row[:count])
                for count, row in zip(counts[0, 0], indices[0, 0], strict=True)
            ]
        ).repeat_interleave(tile, 0)[:n]
        for counts, indices in lists
    )
    assert torch.equal(of_queries, of_keys.T) and lists[0][0].dtype == torch.int32
    seen = block_mask.mask_mod(0, 0, torch.arange(n)[:, None], torch.arange(n)) & of_queries
    return F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)


@pytest.mark.parametrize("direction", ("forward", "backward"))
@pytest.mark.parametrize("longest", (90, 7, 64))
def test_flex_attention_inside_blocks(monkeypatch, direction, longest):
    """Each configuration lists the tiles of every block: what it leaves out, nothing sees. Jagged
    sequences, one of less than a block, and some of whole tiles."""
    compiled = []
    monkeypatch.setattr(torch.nn.attention.flex_attention, "flex_attention", tiled)
    monkeypatch.setattr(
        torch, "compile", lambda f, *, dynamic, options: compiled.append(options) or f
    )
    work = replace(BLOCKS, max_seqlen_q=longest, max_seqlen_k=longest)
    if longest != BLOCKS.max_seqlen_q:
        work = replace(work, lengths_q=Full(), batch=1 if longest == 7 else 3)
    inputs = make_inputs(work, device="cpu")
    for options in blocks.flex_configurations(direction).values():
        for tile in {options["tile"], 32}:
            call = baselines.BLOCK_BASELINES["flex"].call(
                inputs, direction, **options | {"tile": tile}
            )
            check(call(), inputs, direction, "softmax")
        assert compiled[-1]["max_autotune"] == (options["tile"] == 64)
        assert compiled[-1]["compile_threads"] == 1


def test_the_mask_of_blocks_is_what_pytorch_makes_of_its_definition():
    inputs = make_inputs(BLOCKS, device="cpu")
    mask, total = blocks.block_mask(inputs, 32), inputs.workload.total_q
    expected = torch.nn.attention.flex_attention.create_block_mask(
        mask.mask_mod, None, None, total, total, device="cpu", BLOCK_SIZE=32
    )
    partial, full = expected.kv_num_blocks, expected.full_kv_num_blocks
    assert torch.equal(mask.kv_num_blocks, partial + full)
    for count, row, right in zip(
        partial[0, 0], mask.kv_indices[0, 0], expected.kv_indices[0, 0], strict=True
    ):
        assert {*right[:count].tolist()} <= {*row.tolist()}
    assert mask.kv_indices.shape[-1] == 3 < expected.kv_indices.shape[-1]


def test_what_torch_compile_compiles_leaves_kernels_their_assembler(monkeypatch):
    """TorchInductor sets another ptxas for all of the process unless one is set."""
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    own = triton.knobs.nvidia.ptxas.path
    peer.by_inductor(torch.sin)
    importlib.import_module("torch._inductor.runtime.compile_tasks")._set_triton_ptxas_path()
    assert os.environ["TRITON_PTXAS_PATH"] == triton.knobs.nvidia.ptxas.path == own
    assert machine_code.compiler() == f"fbtriton {metadata.version('fbtriton')}"


def test_the_same_code_is_compiled_for_every_workload(monkeypatch):
    """Dynamo's own limit is of code, which all workloads of a peer share."""
    torch._dynamo.reset()
    compiled, graphs = torch.compile, []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(
        torch, "compile", lambda f, *, dynamic, options: compiled(f, dynamic=False, backend=backend)
    )
    for factor in range(12):
        function = peer.by_inductor(lambda x, factor=factor: x * factor)
        assert function(torch.ones(2)).tolist() == [factor] * 2
    assert len(graphs) == 12


def test_another_assembler_is_named(monkeypatch, tmp_path):
    other = tmp_path / "ptxas"
    other.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.88\n")
    other.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(other))
    assert machine_code.compiler().endswith(", ptxas V13.0.88")


@pytest.mark.parametrize(
    ("impl", "change", "reason"),
    [
        ("hstu_triton", {}, "needs silu and as many key heads, got gelu_tanh, 2 and 2 heads"),
        ("hstu_triton", {"activation": "silu"}, "needs causal self-attention"),
        ("hstu_triton", {"activation": "silu", "causal": True}, r"output_scale 1 / 8, got 1.0"),
        ("hstu_cutlass", {"activation": "silu", "output_scale": 0.3}, "1 / n, got 0.3"),
        ("hstu_cudnn", {"activation": "silu"}, "a head_dim among 32, 64, 128, 256 and .* got 16"),
        ("hstu_cudnn", {"head_dim": 64}, "needs silu and as many key heads"),
        ("gdpa_triton", {"causal": True}, "without a causal mask"),
        ("flashinfer", {"activation": "gelu"}, "needs silu or gelu_tanh, got gelu"),
        ("flex", {"activation": "identity", "lengths_q": Full()}, "needs an activation among"),
        *(
            (impl, {}, "sequences of one length, got a jagged batch")
            for impl in ("fa3_dense", "fa4_dense", "cudnn", "flex")
        ),
    ],
)
def test_what_a_peer_does_not_compute_is_refused_by_name(impl, change, reason):
    inputs = make_inputs(replace(SELF, **change), device="cpu")
    with pytest.raises(baselines.Unsupported, match=reason):
        baselines.BASELINES[impl].call(inputs, "forward")


def test_a_peer_that_is_not_here_says_how_to_get_it():
    for table in (same_function.PEERS, flash.PEERS):
        for baseline in table:
            assert baseline.install and baseline.source.startswith("https://github.com/")
            missing = replace(baseline, needs=lambda: "needs it")
            assert missing.availability().reason == f"needs it: {baseline.install}"


def test_every_peer_of_the_same_function_takes_a_named_workload():
    for baseline in (*same_function.PEERS, baselines.BASELINES["flex"]):
        taken = [name for name, w in WORKLOADS.items() if baseline.problem(w, "forward") is None]
        assert taken, baseline.impl


def sources(module: str):
    """The module, or skip: its sources are not on PYTHONPATH."""
    if not peer.is_importable(module):
        pytest.skip(f"needs {module} on PYTHONPATH")
    with tritonemu.fake_gpu("sm_90"):
        return pytest.importorskip(module)


EMULATED = {"head_dim": 16, "num_heads_q": 1, "num_heads_k": 1, "batch": 2, "dtype": "bfloat16"}


@pytest.mark.parametrize("direction", ("forward", "backward"))
def test_hstu_from_source_computes_the_definition(direction):
    sources(same_function.HSTU)
    work = replace(HSTU, max_seqlen_q=40, max_seqlen_k=40, output_scale=1 / 40, **EMULATED)
    emulated("hstu_triton", work, direction, tma=False)


@pytest.mark.parametrize("is_sorted", (False, True))
def test_the_warp_specialized_hstu_from_source_computes_the_definition(monkeypatch, is_sorted):
    tuner = sources(same_function.HSTU)._hstu_attn_fwd
    roles = [config for config in tuner.configs if config.kwargs["USE_TLX"]]
    assert roles and {config.num_stages for config in roles} == {0}
    monkeypatch.setattr(tuner, "configs", roles)
    longer = {"max_seqlen_q": 300, "max_seqlen_k": 300, "output_scale": 1 / 300}
    work = replace(HSTU, **EMULATED | longer | {"head_dim": 128})
    emulated("hstu_triton", work, "forward", is_sorted=is_sorted)


@pytest.fixture
def published_source(monkeypatch):
    """The published GDPA with one small tile to tune over; skips without its sources."""
    helpers = sources(same_function.GDPA.rpartition(".")[0] + ".register_helpers")
    # Its operator on a CPU is softmax; without one its kernels run there.
    monkeypatch.setattr(helpers, "custom_register_kernel", lambda *_: lambda function: function)
    module = sources(same_function.GDPA)
    monkeypatch.setattr(module, "is_tma_supported", lambda: True)
    forward = {"BLOCK_M": 32, "BLOCK_N": 32}
    backward = {"BLOCK_M1": 16, "BLOCK_N1": 32, "BLOCK_M2": 32, "BLOCK_N2": 16}
    for sets, tiles in (("fwd", forward), ("bwd", backward)):
        small = module.triton_config(tiles | {"NUM_CONSUMER_GROUPS": 1}, num_warps=4)
        of_sets = getattr(module, f"{sets}_autotune_configs")
        for tuning in ("default", "omnifm_v2"):
            assert tuning in of_sets
            monkeypatch.setitem(of_sets, tuning, (small,))
    return module


LONGER = {"max_seqlen_q": 70, "max_seqlen_k": 70}


@pytest.mark.parametrize("activation", same_function.GDPA_NAMES)
@pytest.mark.parametrize("direction", ("forward", "backward"))
def test_the_published_gdpa_from_source_computes_the_definition(
    published_source, direction, activation
):
    work = replace(SELF, activation=activation, **LONGER, **EMULATED)
    emulated("gdpa_triton", work, direction, tuning="default")


@pytest.mark.parametrize("direction", ("forward", "backward"))
def test_the_published_gdpa_from_source_in_each_configuration(published_source, direction):
    for name, options in same_function.gdpa_configurations(direction).items():
        options = options or {"tuning": "default"}
        for work in (SELF, replace(SELF, window=20, num_heads_q=2)) if "ws" not in name else ():
            work = replace(work, **EMULATED | LONGER | {"batch": 5})
            emulated("gdpa_triton", work, direction, **options)


@pytest.mark.parametrize("techniques", ("tma", "tma,dq_atomic_add"))
def test_tma_in_the_backward_pass_of_the_published_gdpa_is_wrong(published_source, techniques):
    """Why none of its configurations has it: it adds to memory without values, or overwrites."""
    work = replace(SELF, **LONGER, **EMULATED)
    with pytest.raises((tritonemu.InvalidKernel, tritonemu.Race)):
        emulated("gdpa_triton", work, "backward", techniques=techniques)


def test_tma_in_persistent_programs_of_the_published_gdpa_is_wrong(published_source):
    """Why no configuration has it: right on a jagged batch, wrong where all keys are there."""
    work = replace(SELF, **EMULATED | LONGER | {"batch": 5, "lengths_k": Full()})
    emulated("gdpa_triton", work, "forward", techniques="persistent", tuning="omnifm_v2")
    with pytest.raises(AssertionError, match="out: max error"):
        emulated("gdpa_triton", work, "forward", techniques="persistent,tma", tuning="omnifm_v2")


def emulated(impl, work, direction, **options):
    # What their loads leave undefined beyond a sequence's end does not reach what is stored.
    with tritonemu.fake_gpu("sm_90"), tritonemu.enabled("sm_90", masked="zero"):
        inputs = make_inputs(work, device="cuda")
        operator = operators.of(inputs, direction)
        made = operator.candidate(impl, "", **options)
        for comparison in operator.check("activation", made.checked(tensors(made.call()))):
            assert comparison.passed, str(comparison)
