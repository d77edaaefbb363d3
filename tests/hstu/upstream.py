"""The public HSTU code bases beside ours: record what they give, or compare with them.

python -m tests.hstu.upstream GENERATIVE_RECOMMENDERS RECSYS_EXAMPLES FBGEMM [--record]

The arguments are clones. Their PyTorch paths run on a CPU, of FBGEMM the reference that its test
holds the kernels to. Stand-ins are three operators of FBGEMM, a function of torchrec, one of
einops, and what the debug layer of recsys-examples and that test import and do not call. Norms
there compute in fp32 whatever the input: here `torch.float32` of those modules means float64.
"""

import argparse
import importlib.util
import random
import sys
import types

import numpy as np
import torch

import tritonemu
from gdpa_kernels.gdpa.bias import RelativeBias
from gdpa_kernels.hstu import adapters, jagged_times, replace_stu, thresholds_of
from gdpa_kernels.serving import HistoryRules, PagedCache, candidates, extend
from tests.hstu.cases import (
    ATTENTION,
    EMBED,
    HEADS,
    LAYERS,
    RECORDED,
    Attention,
    Layer,
    N,
    attention_inputs_of,
    attention_of,
    bucketization,
    inputs_of,
    offsets_of,
    weights_of,
)  # fmt: skip

FBGEMM = torch.library.Library("fbgemm", "FRAGMENT")
MOST = {torch.float64: 1e-12, torch.float32: 2e-4}


def _place(offsets, total):
    rows = torch.arange(total)
    sequence = torch.searchsorted(offsets[1:].contiguous(), rows, right=True)
    return sequence, rows - offsets[sequence]


def _cumsum(lengths):
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0).to(lengths.dtype)])


def _to_padded(values, offsets, max_lengths, padding_value=0.0):
    sequence, position = _place(offsets[0], values.shape[0])
    keep = position < max_lengths[0]
    shape = offsets[0].numel() - 1, max_lengths[0], values.shape[1]
    padded = values.new_full(shape, padding_value)
    return padded.index_put((sequence[keep], position[keep]), values[keep])


def _to_jagged(dense, offsets, total=None):
    sequence, position = _place(offsets[0], int(offsets[0][-1]))
    return dense[sequence, position], offsets


OPERATORS = {
    "asynchronous_complete_cumsum(Tensor t_in) -> Tensor": _cumsum,
    "jagged_to_padded_dense(Tensor values, Tensor[] offsets, SymInt[] max_lengths, "
    "float padding_value=0.0) -> Tensor": _to_padded,
    "dense_to_jagged(Tensor dense, Tensor[] x_offsets, SymInt? total_L=None) "
    "-> (Tensor, Tensor[])": _to_jagged,
}


class Wide:
    """`torch`, in which float32 is float64."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


class Anything(types.ModuleType):
    """A module with every name, for what is imported and not called."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Clones:
    """The modules of the three clones."""

    def __init__(self, gr: str, nv: str, fbgemm: str):
        for schema, function in OPERATORS.items():
            FBGEMM.define(schema)
            FBGEMM.impl(schema.split("(")[0], function, "CompositeImplicitAutograd")
        selects = "torchrec.modules.sorted_index_select"
        for name in ("torchrec", "torchrec.modules", selects, "fbgemm_gpu"):
            sys.modules.setdefault(name, types.ModuleType(name))
        sys.modules[selects].maybe_sorted_index_select = torch.Tensor.index_select
        sys.path.insert(0, gr)
        from generative_recommenders.common import HammerKernel
        from generative_recommenders.modules import stu
        from generative_recommenders.ops import hstu_attention
        from generative_recommenders.ops.pytorch import pt_hstu_linear, pt_layer_norm
        from generative_recommenders.research.modeling.sequential import hstu

        pt_hstu_linear.torch = pt_layer_norm.torch = Wide()
        self.stu, self.research, self.gr, self.pytorch = stu, hstu, hstu_attention, HammerKernel
        self.nv = _module(f"{nv}/examples/hstu/ops/pt_ops/pt_hstu_attention.py")
        self.debug = _debug_layer(nv)
        sys.modules["hstu"] = Anything("hstu")
        sys.modules["einops"] = types.ModuleType("einops")
        sys.modules["einops"].rearrange = _split_rows
        self.fbgemm = _module(f"{fbgemm}/fbgemm_gpu/experimental/hstu/test/hstu_test.py")

    def layer(self, case: Layer) -> torch.nn.Module:
        """The code base's own layer of a case."""
        if case.kind == "stu":
            config = self.stu.STULayerConfig(
                embedding_dim=EMBED, num_heads=HEADS, hidden_dim=case.hidden,
                attention_dim=case.attention, output_dropout_ratio=0.0, max_attn_len=case.window,
                use_group_norm=case.form.group_norm, contextual_seq_len=case.contexts,
            )  # fmt: skip
            layer = self.stu.STULayer(config)
            layer._hammer_kernel = self.pytorch.PYTORCH
            return layer
        if case.kind == "research":
            bias = self.research.RelativeBucketedTimeAndPositionBasedBias(N, 128, bucketization)
            return self.research.SequentialTransductionUnitJagged(
                EMBED, case.hidden, case.attention, 0.0, 0.0, HEADS,
                "silu" if case.form.silu == "uvqk" else "none", bias,
                concat_ua="n" in case.form.concat,
            )  # fmt: skip
        config = types.SimpleNamespace(
            hstu_layer_type=1, hidden_size=EMBED, kv_channels=case.hidden, hidden_dropout=0.0,
            num_attention_heads=HEADS, residual=True, learnable_input_layernorm=True,
            learnable_output_layernorm=True, add_uvqk_bias=True, layernorm_epsilon=1e-5,
            target_group_size=case.group, kernel_backend=2, is_causal=True,
            fuse_norm_mul_dropout=False, disable_contextual_mask=False,
        )  # fmt: skip
        return self.debug.HSTULayer(config)

    def results(self, case: Layer) -> dict[str, torch.Tensor]:
        """The output, and the gradients of x and of every weight."""
        layer = self.layer(case).double()
        layer.load_state_dict(weights_of(case), strict=False)
        x, grad, times = inputs_of(case)
        x.requires_grad_()
        out = self.call(case, layer, x, times)
        out.backward(grad)
        named = {n: p.grad for n, p in layer.named_parameters() if n in weights_of(case)}
        return {"out": out.detach(), "x": x.grad, **named}

    def call(self, case: Layer, layer, x, times) -> torch.Tensor:
        lengths, offsets = torch.tensor(case.lengths), offsets_of(case.lengths)
        targets = None if case.targets is None else torch.tensor(case.targets)
        if case.kind == "stu":
            return layer(x, lengths, offsets, case.scaling, targets)
        if case.kind == "research":
            mask = torch.tril(torch.ones(N, N, dtype=x.dtype))
            return layer(x, offsets, times if case.bias else None, mask)[0]
        batch = types.SimpleNamespace(
            seqlen_offsets=offsets, num_candidates=targets, max_seqlen=max(case.lengths),
            contextual_seqlen=torch.tensor(case.contexts) if case.contexts else None, values=x,
            scaling_seqlen=case.scaling, copy_others_but_set_values=lambda values: values,
        )  # fmt: skip
        return layer(batch)

    def attention(self, case: Attention, q, k, v) -> torch.Tensor:
        """Results of FBGEMM's reference for a call."""
        rows, none = case.queries or case.lengths, (0,) * len(case.lengths)
        contexts, targets = (
            torch.tensor(counts or none, dtype=torch.int32)
            for counts in (case.contexts, case.targets)
        )
        # The mask's lengths are those of the histories, its size the sum of three longest.
        histories = torch.tensor(case.lengths) - contexts - targets
        most = int(contexts.max()), int(histories.max()), int(targets.max())
        ends = _cumsum(histories)
        mask = self.fbgemm.construct_mask(
            most[0], case.divisor - most[0] - most[2], most[2], case.group, case.window,
            cu_seqlens_q=ends, cu_seqlens_k=ends, num_contexts=contexts, num_targets=targets,
            device="cpu",
        )  # fmt: skip
        if case.window[0] >= 0 and case.window[1] == 0:
            mask = mask.tril()  # its kernels end a row there, its mask takes 0 for no end
        return self.fbgemm._hstu_attention_maybe_from_cache(
            q.shape[1], q.shape[2], v.shape[2], case.divisor, case.divisor, q, k, v,
            offsets_of(rows), offsets_of(case.lengths), None, None, None, mask, case.alpha,
            upcast=False, is_delta_q=case.queries is not None,
        )  # fmt: skip

    def attention_results(self, case: Attention) -> dict[str, torch.Tensor]:
        """The output, and the gradients of q, k and v."""
        *inputs, grad = attention_inputs_of(case)
        out = self.attention(case, *(x.requires_grad_() for x in inputs))
        gradients = torch.autograd.grad(out, inputs, grad)
        return dict(zip(("out", "q", "k", "v"), (out.detach(), *gradients), strict=True))

    def recorded(self) -> dict[str, dict[str, torch.Tensor]]:
        """Contents of recorded.npz, by the names of the cases."""
        layers = {name: self.results(case) for name, case in LAYERS.items()}
        return layers | {name: self.attention_results(case) for name, case in ATTENTION.items()}


def _split_rows(x: torch.Tensor, _: str, b: int) -> torch.Tensor:
    """einops.rearrange(x, "(b s) ... -> b s ...", b=b)."""
    return x.unflatten(0, (b, -1))


def _module(path: str):
    spec = importlib.util.spec_from_file_location("theirs", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _debug_layer(nv: str):
    sys.path[:0] = [nv + "/examples", nv + "/examples/hstu"]
    names = """megatron megatron.core megatron.core.parallel_state megatron.core.transformer
    megatron.core.transformer.module megatron.core.tensor_parallel nvtx hstu commons.utils.nvtx_op
    megatron.core.tensor_parallel.mappings commons.ops.collective_ops ops.triton_ops
    commons.utils.distributed_utils commons.utils.attn_perf_tracker
    ops.triton_ops.triton_norm_mul_dropout modules.jagged_data modules.utils configs
    configs.hstu_config"""
    for name in names.split():
        sys.modules[name] = Anything(name)

    class Module(torch.nn.Module):
        def __init__(self, config):
            super().__init__()

    class Range:
        def __init__(self, *_, **__): ...
        def __enter__(self): ...
        def __exit__(self, *_): ...

    modules = sys.modules
    modules["nvtx"].annotate = Range
    modules["megatron.core.transformer.module"].MegatronModule = Module
    modules["megatron.core"].parallel_state = types.SimpleNamespace(
        get_tensor_model_parallel_rank=lambda: 0, get_tensor_model_parallel_world_size=lambda: 1
    )
    modules["commons.utils.nvtx_op"].output_nvtx_hook = lambda **_: lambda f: f
    modules["commons.utils.attn_perf_tracker"].PRINT_HSTU_PERF = False
    modules["modules.utils"].init_mlp_weights_optional_bias = lambda module: None
    for name in ("modules", "modules.debug", "ops", "ops.pt_ops"):
        modules[name] = types.ModuleType(name)
        modules[name].__path__ = [f"{nv}/examples/hstu/{name.replace('.', '/')}"]
    kinds = types.SimpleNamespace(DEBUG=1, PYTORCH=2, CUTLASS=3, TRITON=4)
    modules["configs"].KernelBackend = modules["configs.hstu_config"].HSTULayerType = kinds
    torch.cuda.current_device = lambda: "cpu"
    from modules.debug import debug_hstu_layer
    from ops.pt_ops import pt_norm_mul_dropout

    pt_norm_mul_dropout.torch = Wide()
    return debug_hstu_layer


def compare_recorded(clones: Clones) -> None:
    known = np.load(RECORDED)
    for name, results in clones.recorded().items():
        for key, x in results.items():
            torch.testing.assert_close(
                x, torch.from_numpy(known[f"{name}/{key}"]), rtol=1e-11, atol=1e-11,
                msg=lambda text, at=(name, key): f"{at}: {text}",
            )  # fmt: skip
        print(f"{name}: as recorded")


def compare_stack(clones: Clones) -> None:
    """A stack of generative-recommenders: replaced in place, and served from pages."""
    history, count, n = torch.tensor([17, 9, 5, 24]), 4, 40
    config = clones.stu.STULayerConfig(24, 2, 8, 8, output_dropout_ratio=0.0)
    stack = clones.stu.STUStack([clones.stu.STULayer(config) for _ in range(3)])
    for weight in stack.parameters():
        weight.data = (weight.data + 0.2 * torch.randn_like(weight)).double()
    stack.set_hammer_kernel(clones.pytorch.PYTORCH)
    for layer in stack._stu_layers:
        layer._hammer_kernel = clones.pytorch.PYTORCH
    lengths, targets = history + count, torch.full((4,), count)
    x = torch.randn(int(lengths.sum()), 24, dtype=torch.float64)
    with torch.no_grad():
        wanted = stack(x, lengths, _cumsum(lengths), n, targets)
        assert replace_stu(stack) == 3
        replaced = stack(x, lengths, _cumsum(lengths), n, targets)
        torch.testing.assert_close(replaced, wanted, rtol=0, atol=1e-12)
        sizes = [size for h in history.tolist() for size in (h, count)]
        old, new = (torch.cat(x.split(sizes)[part::2]) for part in (0, 1))
        cache = PagedCache(HistoryRules(3), 64, 4, 2, 8, dtype=torch.float64)
        users, ends = [7, 3, 11, 5], (torch.arange(5) * count).int()
        pages = cache.append(users, history.tolist())
        whole = cache.pages(users)
        for index, layer in enumerate(stack._stu_layers):
            layer.divisor = n
            old = extend(layer, old, cache, index, pages, whole)
            new = candidates(layer, new, ends, count, cache, index, whole)
    torch.testing.assert_close(new, torch.cat(wanted.split(sizes)[1::2]), rtol=0, atol=1e-12)
    print("a stack, replaced and served: as theirs")


def compare_triton() -> None:
    """The Triton kernels of generative-recommenders, in the emulator."""
    with tritonemu.fake_gpu("sm_90"):
        from generative_recommenders.ops.triton import triton_hstu_attention as theirs
    targets = torch.tensor((5, 2, 0, 33))
    for name, lengths, options in (
        ("causal", (40, 7, 0, 65), {}),
        ("targets", (40, 7, 0, 65), {"num_targets": targets}),
        ("contexts", (40, 7, 9, 65), {"num_targets": targets, "contextual_seq_len": 3}),
        ("window", (40, 7, 0, 65), {"num_targets": targets.clamp(max=9), "max_attn_len": 10}),
    ):
        ends = offsets_of(lengths)
        q, k, v = (torch.randn(int(ends[-1]), 2, 32, requires_grad=True) for _ in "qkv")
        call = 65, 32**-0.5, q, k, v, ends
        ours = adapters.hstu_mha(*call, **options)
        with tritonemu.fake_gpu("sm_90"), tritonemu.enabled("sm_90"):
            out = theirs.triton_hstu_mha(*call, **options, enable_tma=False)
            grad = torch.randn_like(out)
            found = out, *torch.autograd.grad(out, (q, k, v), grad)
        wanted = ours, *torch.autograd.grad(ours, (q, k, v), grad)
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)
        print(f"Triton, {name}: as ours")


def compare_functions(clones: Clones, calls: int) -> None:
    """Random calls of each function, the result and every gradient."""
    worst: dict[tuple, float] = {}
    thresholds = thresholds_of(bucketization, 129)
    for number in range(calls):
        dtype = (torch.float64, torch.float32)[number % 2]
        for kind, ours, theirs, inputs in _calls(clones, dtype, thresholds):
            grad = torch.randn_like(theirs)
            pairs = zip(
                (ours, *torch.autograd.grad(ours, inputs, grad)),
                (theirs, *torch.autograd.grad(theirs, inputs, grad)),
                strict=True,
            )
            error = max(float((a - b).detach().abs().max()) for a, b in pairs if a.numel())
            assert error <= MOST[dtype], f"call {number} of {kind}: {error}"
            worst[kind, dtype] = max(error, worst.get((kind, dtype), 0.0))
    for (kind, dtype), error in sorted(worst.items(), key=str):
        print(f"{kind:18} {dtype} {error:.1e}")


def _calls(clones: Clones, dtype: torch.dtype, thresholds: torch.Tensor):
    pick, number = random.choice, random.randint

    def batch(least=0, same=False):
        heads, dim, wide = number(1, 3), pick((4, 8)), pick((4, 8, 12))
        lengths = torch.tensor([number(least, 24) for _ in range(number(1, 4))])
        lengths[0] = max(int(lengths[0]), 1, least)
        ends = _cumsum(lengths)
        sizes = dim, dim, dim if same else wide
        qkv = [torch.randn(int(ends[-1]), heads, n, dtype=dtype).requires_grad_() for n in sizes]
        return *qkv, lengths, ends

    def counts(lengths, least):
        return torch.tensor([number(0, min(8, max(int(n) - least, 0))) for n in lengths])

    contexts = pick((0, 0, 1, 3))
    q, k, v, lengths, ends = batch()  # histories shorter than the contexts among them
    n, window = int(lengths.max()) + pick((0, 5)), pick((0, 0, 1, 3, 7))
    scale = pick((None, torch.tensor(0.3, dtype=dtype), torch.rand(len(q), dtype=dtype)))
    options = {
        "num_targets": pick((None, counts(lengths, 0))), "attn_scale": scale,
        "max_attn_len": window, "contextual_seq_len": contexts,
        "min_full_attn_seq_len": pick((0, 2, 5)) if window else 0,
    }  # fmt: skip
    inputs = [q, k, v] if scale is None else [q, k, v, scale.requires_grad_()]
    both = (f(n, 0.37, q, k, v, ends, **options) for f in (adapters.hstu_mha, clones.gr.hstu_mha))
    yield "hstu_mha", *both, inputs

    delta = number(1, 5)
    q, k, v, lengths, ends = batch(contexts + delta)
    rows = torch.randn(len(lengths) * delta, *q.shape[1:], dtype=dtype).requires_grad_()
    given = (int(lengths.max()) + 2, 0.37, rows, k, v, ends,
             pick((None, counts(lengths, contexts))), pick((0, 3)), contexts)  # fmt: skip
    both = (f(*given) for f in (adapters.delta_hstu_mha, clones.gr.delta_hstu_mha))
    yield "delta_hstu_mha", *both, [rows, k, v]

    q, k, v, lengths, ends = batch(3, same=True)
    of_users = torch.tensor([number(0, 3) for _ in lengths])
    pairs = zip(lengths, of_users, strict=True)
    targets = pick((None, torch.cat([counts(n[None], int(least)) for n, least in pairs])))
    of_users, window, scaling = pick((None, of_users)), pick((-1, -1, 2, 5)), pick((-1, 50))
    group, n = pick((1, 2, 3)) if targets is not None else 1, int(lengths.max())
    theirs = clones.nv.pytorch_hstu_mha(
        n, 0.37, q, k, v, ends, True, num_targets=targets, num_contextuals=of_users,
        max_attn_len=None if window < 0 else window, target_group_size=group,
        scaling_seqlen=scaling,
    )  # fmt: skip
    ours = adapters.hstu_attn_varlen_func(
        q, k, v, ends, ends, None, None, n, n, scaling, of_users, targets, group, (window, 0), 0.37
    )
    yield "recsys-examples", ours, theirs, [q, k, v]
    theirs = clones.nv.pytorch_hstu_mha(n, 0.37, q, k, v, ends, False, scaling_seqlen=scaling)
    ours = adapters.hstu_attention_forward(
        q, k, v, ends, ends, n, n, (-1, -1), 0.37, None if scaling == -1 else scaling
    )
    yield "not causal", ours, theirs, [q, k, v]

    kind, case = _attention(pick, number)
    *inputs, _ = (x.to(dtype).requires_grad_() for x in attention_inputs_of(case))
    yield f"FBGEMM, {kind}", attention_of(case, *inputs), clones.attention(case, *inputs), inputs

    q, k, v, lengths, ends = batch()
    n = int(lengths.max()) + 2  # of N = 1 theirs is empty
    bias = clones.research.RelativeBucketedTimeAndPositionBasedBias(n, 128, bucketization)
    bias = bias.to(dtype)
    times = torch.randint(0, 10**6, (len(lengths), n)).cumsum(1)
    theirs, _, _ = clones.research._hstu_attention_maybe_from_cache(
        q.shape[1], q.shape[2], v.shape[2], q.flatten(1), k.flatten(1), v.flatten(1), None, None,
        None, ends, times, torch.tril(torch.ones(n, n, dtype=dtype)), bias,
    )  # fmt: skip
    stamps = jagged_times(times, ends)
    tables = RelativeBias(bias._pos_w, bias._ts_w, *stamps, time_thresholds=thresholds)
    ours = adapters.hstu_mha(n, 1.0, q, k, v, ends, relative_bias=tables)
    yield "research", ours, theirs.view(ours.shape), [q, k, v, bias._pos_w, bias._ts_w]


def _attention(pick, number) -> tuple[str, Attention]:
    """A call of FBGEMM's function, and what kind of call it is."""
    kind = pick(("causal", "targets", "full", "window", "last queries", "last queries, window"))
    sequences, width, more = number(1, 4), number(1, 6), {}

    def counts(most):
        return tuple(number(0, most) for _ in range(sequences))

    lengths = tuple(number(1, 12) for _ in range(sequences))
    if kind == "targets":
        more = {"contexts": counts(3), "targets": counts(6), "group": number(1, 3)}
        columns = zip(lengths, more["contexts"], more["targets"], strict=True)
        lengths = tuple(map(sum, columns))
    if "queries" in kind:
        more = {"queries": tuple(number(1, n) for n in lengths)}
    windows = {"full": (-1, -1), "window": (width, width), "last queries, window": (width, 0)}
    window, divisor = windows.get(kind, (-1, 0)), 21 + number(0, 5)  # 21 rows are the most
    case = Attention(lengths, window=window, divisor=divisor, head_dim=pick((4, 8)), **more)
    return kind, case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gr")
    parser.add_argument("nv")
    parser.add_argument("fbgemm")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--calls", type=int, default=300)
    options = parser.parse_args()
    clones = Clones(options.gr, options.nv, options.fbgemm)
    torch.manual_seed(0)
    random.seed(0)
    if options.record:
        results = {f"{name}/{key}": x.numpy() for name, results in clones.recorded().items()
                   for key, x in results.items()}  # fmt: skip
        np.savez_compressed(RECORDED, **results)
    compare_recorded(clones)
    compare_stack(clones)
    compare_functions(clones, options.calls)
    compare_triton()


if __name__ == "__main__":
    main()
