"""`HSTULayer` and the adapters: what public code gave (recorded.npz), weights both ways, graphs."""

import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from gdpa_kernels import Lengths, Mask, gdpa
from gdpa_kernels.gdpa.bias import hstu_thresholds
from gdpa_kernels.hstu import (
    RECSYS_EXAMPLES,
    RESEARCH,
    STU,
    Form,
    HSTULayer,
    STULayer,
    adapters,
    load_weights,
    replace_stu,
    save_weights,
    thresholds_of,
)
from tests.calls import DEVICE
from tests.hstu.cases import (
    ATTENTION,
    EMBED,
    HEADS,
    LAYERS,
    RECORDED,
    N,
    attention_inputs_of,
    attention_of,
    bucketization,
    call_of,
    inputs_of,
    layer_of,
    offsets_of,
    weights_of,
)

FP64 = torch.float64
KNOWN = np.load(RECORDED)


def recorded(name: str) -> dict[str, torch.Tensor]:
    keys = [key for key in KNOWN.files if key.startswith(f"{name}/")]
    return {key.partition("/")[2]: torch.from_numpy(KNOWN[key]) for key in keys}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_give_what_public_code_gave(name):
    """The result, and the gradients of x and of every weight, mapped back to their names."""
    case, wanted = LAYERS[name], recorded(name)
    layer = layer_of(case)
    assert load_weights(layer, case.kind, weights_of(case)) == []
    x, grad, _ = inputs_of(case)
    x.requires_grad_()
    out, _ = layer((x, offsets_of(case.lengths)), **call_of(case))
    out.backward(grad)
    found = {"out": out.detach(), "x": x.grad}
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(weight.grad)
    found |= save_weights(layer, case.kind)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-11, atol=1e-11, msg=key)


@pytest.mark.parametrize("name", ATTENTION)
def test_the_function_of_fbgemm_gives_what_its_reference_gave(name):
    """The result, and the gradients of q, k and v."""
    *inputs, grad = attention_inputs_of(ATTENTION[name])
    out = attention_of(ATTENTION[name], *(x.requires_grad_() for x in inputs))
    gradients = torch.autograd.grad(out, inputs, grad)
    found = dict(zip(("out", "q", "k", "v"), (out.detach(), *gradients), strict=True))
    assert found.keys() == recorded(name).keys()
    for key, value in recorded(name).items():
        torch.testing.assert_close(found[key], value, rtol=1e-11, atol=1e-11, msg=key)


@pytest.mark.parametrize("kind", ("stu", "fused", "native", "debug", "paged"))
def test_weights_come_back_as_they_were(kind):
    form = STU if kind == "stu" else RECSYS_EXAMPLES
    sizes = (3, 5) if kind == "stu" else (4, 4)
    layer = HSTULayer(EMBED, HEADS, *sizes, form=form)
    theirs = {f"layers.1.{n}": torch.randn_like(x) for n, x in save_weights(layer, kind).items()}
    more = {"layers.1._extra_state": torch.zeros(1), "layers.0._o.bias": torch.zeros(1)}
    assert load_weights(layer, kind, theirs | more, "layers.1.") == ["_extra_state"]
    back = save_weights(layer, kind)
    assert all(torch.equal(back[n.removeprefix("layers.1.")], x) for n, x in theirs.items())
    with pytest.raises(KeyError, match=f"{kind} weights must have all of the layer's, got none"):
        load_weights(layer, kind, theirs)
    *others, last = theirs
    wrong = {n: x + 1 for n, x in theirs.items()} | {last: torch.cat((theirs[last],) * 2)}
    with pytest.raises(ValueError, match="must have the shape of"):
        load_weights(layer, kind, wrong, "layers.1.")
    assert others and all(map(torch.equal, back.values(), save_weights(layer, kind).values()))


def test_columns_by_head_and_in_blocks_are_one_model():
    native = HSTULayer(EMBED, HEADS, 4, form=RECSYS_EXAMPLES, dtype=FP64)
    fused = HSTULayer(EMBED, HEADS, 4, form=RECSYS_EXAMPLES, dtype=FP64)
    load_weights(fused, "fused", save_weights(native, "fused"))
    x, ends = torch.randn(9, EMBED, dtype=FP64), torch.tensor([0, 4, 9])
    assert torch.equal(native((x, ends))[0], fused((x, ends))[0])
    columns = (save_weights(native, kind) for kind in ("native", "paged"))
    by_head, blocks = (x["_linear_uvqk.weight"] for x in columns)
    assert not torch.equal(by_head, blocks)


class Theirs(nn.Module):
    """What a STULayer of generative-recommenders says about itself, and its weights."""

    def __init__(self, name: str):
        super().__init__()
        case = LAYERS[name]
        self._embedding_dim, self._num_heads = EMBED, HEADS
        self._hidden_dim, self._attention_dim = case.hidden, case.attention
        self._use_group_norm, self._attn_alpha = case.form.group_norm, case.attention**-0.5
        self._output_dropout_ratio, self._max_attn_len = 0.0, case.window or 0
        self._contextual_seq_len, self._target_aware = case.contexts, True
        for key, weight in weights_of(case).items():
            self.register_parameter(key, nn.Parameter(weight))


Theirs.__name__ = "STULayer"


@pytest.mark.parametrize("name", [name for name in LAYERS if name.startswith("stu")])
def test_layers_are_replaced_in_place(name):
    model = nn.ModuleDict({"stack": nn.Sequential(Theirs(name)), "other": nn.Linear(2, 2)}).eval()
    assert replace_stu(model, impl="reference") == 1 and replace_stu(model) == 0
    layer, case = model["stack"][0], LAYERS[name]
    assert isinstance(layer, STULayer) and not layer.training
    lengths, offsets = torch.tensor(case.lengths), offsets_of(case.lengths)
    x, targets = inputs_of(case)[0], torch.tensor(case.targets)
    out = layer(x, lengths, offsets, N, targets)
    torch.testing.assert_close(out, recorded(name)["out"], rtol=1e-11, atol=1e-11)
    with pytest.raises(NotImplementedError, match="histories are kept by gdpa_kernels.serving"):
        layer(x, lengths, offsets, N, targets, kv_caching_lengths=lengths)


ARGUMENTS = {
    adapters.hstu_mha: "max_seq_len alpha q k v seq_offsets causal dropout_pr training num_targets "
    "attn_scale max_attn_len contextual_seq_len min_full_attn_seq_len sort_by_length kernel "
    "enable_tma",
    adapters.delta_hstu_mha: "max_seq_len alpha delta_q k v seq_offsets num_targets max_attn_len "
    "contextual_seq_len kernel enable_tma",
    adapters.hstu_attn_varlen_func: "q k v cu_seqlens_q cu_seqlens_k seqused_q seqused_k "
    "max_seqlen_q max_seqlen_k scaling_seqlen num_contexts num_targets target_group_size "
    "window_size alpha rab has_drab kv_cache page_offsets page_ids last_page_lens func quant_mode",
    STULayer.forward: "self x x_lengths x_offsets max_seq_len num_targets max_kv_caching_len "
    "kv_caching_lengths",
}


@pytest.mark.parametrize("function", ARGUMENTS, ids=lambda f: f.__qualname__)
def test_arguments_have_their_names_and_order(function):
    names = [*inspect.signature(function).parameters]
    assert [name for name in names if name != "options"] == ARGUMENTS[function].split()


def attention(lengths=(5, 0, 7), dim=4):
    offsets = offsets_of(lengths)
    q, k, v = torch.randn(3, int(offsets[-1]), 2, dim, dtype=FP64)
    return q, k, v, offsets


def test_the_functions_are_gdpa():
    q, k, v, ends = attention()
    options = {"activation": "silu", "scale": 0.3, "output_scale": 1 / 9}
    targets = torch.tensor([2, 0, 1])
    mask = Mask(causal=True, window=3, num_targets=targets, num_contexts=1)
    found = adapters.hstu_mha(
        9, 0.3, q, k, v, ends, num_targets=targets, max_attn_len=3, contextual_seq_len=1
    )
    full = gdpa(q, k, v, ends, ends, 9, 9, mask=mask, **options)
    torch.testing.assert_close(found, full, rtol=0, atol=1e-15)
    last = torch.cat([x[end - 2 : end] for x, end in ((full, 5), (full, 12))])
    two = ends[[0, 1, 3]]
    some = targets[[0, 2]]
    delta = torch.cat((q[3:5], q[10:12]))
    found = adapters.delta_hstu_mha(9, 0.3, delta, k, v, two, some, 3, 1)
    torch.testing.assert_close(found, last, rtol=0, atol=1e-14)
    assert adapters.delta_hstu_mha(9, 0.3, q[:0], k[:0], v[:0], ends[:1]).shape == v[:0].shape
    with pytest.raises(ValueError, match="delta_q must have as many rows for each of 2 sequences"):
        adapters.delta_hstu_mha(9, 0.3, q[:3], k, v, two)
    scale = torch.rand(len(q), dtype=FP64)
    found = adapters.hstu_mha(9, 0.3, q, k, v, ends, attn_scale=scale)
    causal = gdpa(q, k, v, ends, ends, 9, 9, causal=True, **options)
    torch.testing.assert_close(found, causal * 9 * scale[:, None, None], rtol=0, atol=1e-14)
    found = adapters.hstu_attn_varlen_func(
        q, k, v, ends, ends.clone(), None, None, 9, 9, -1, None, None, window_size=(-1, 0),
        alpha=0.3,
    )  # fmt: skip
    torch.testing.assert_close(found, causal, rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    "name, options",
    (
        ("rab", {"rab": torch.zeros(1)}), ("func", {"func": torch.zeros(1)}),
        ("kv_cache", {"kv_cache": torch.zeros(1)}), ("quant_mode", {"quant_mode": 0}),
        ("window_size", {"window_size": (3, 1)}),
    ),
)  # fmt: skip
def test_what_gdpa_does_not_compute_is_refused(name, options):
    q, k, v, ends = attention()
    with pytest.raises(NotImplementedError, match=f"^{name} must have a value"):
        adapters.hstu_attn_varlen_func(
            q, k, v, ends, ends, None, None, 7, 7, -1, None, None, **options
        )
    with pytest.raises(NotImplementedError, match="^dropout_pr must"):
        adapters.hstu_mha(7, 1.0, q, k, v, ends, dropout_pr=0.1)


def test_thresholds_are_found_by_bisection():
    steps = torch.tensor([0, 0, 1, 5, 5, 1000])
    found = thresholds_of(lambda x: torch.bucketize(x, steps, right=True), 8)
    assert found.tolist() == [0, 0, 1, 5, 5, 1000, 2**62]
    exact, theirs = hstu_thresholds(129), thresholds_of(bucketization, 129)
    assert (theirs != exact).any() and (theirs - exact).abs()[:40].max() <= 4
    below = bucketization(theirs[20:60] - 1)
    assert torch.equal(bucketization(theirs[20:60]), torch.arange(21, 61)) and (below < 61).all()


def layer_with_dropout(**options):
    torch.manual_seed(1)
    return HSTULayer(16, 2, device=DEVICE, **options), torch.randn(20, 16, device=DEVICE)


def test_dropout_is_of_training_alone():
    layer, x = layer_with_dropout(dropout=0.5)
    ends = torch.tensor([0, 8, 20], device=DEVICE)
    outs = [layer((x, ends))[0] for _ in range(2)]
    assert not torch.equal(*outs)
    layer.eval()
    assert torch.equal(layer((x, ends))[0], layer((x, ends))[0])


def test_weights_are_cast_to_the_input():
    layer, x = layer_with_dropout()
    ends = torch.tensor([0, 8, 20], device=DEVICE)
    wanted = layer((x, ends))[0]
    for out in (layer((x.bfloat16(), ends))[0], with_autocast(layer, (x, ends))):
        torch.testing.assert_close(out.float(), wanted, atol=0.05, rtol=0.05)


def with_autocast(layer, x):
    with torch.autocast(DEVICE, torch.bfloat16):
        return layer(x)[0]


def test_lengths_and_compiled_calls_give_the_same():
    layer, x = layer_with_dropout(position_bias=9, time_bias=20, next_time=False)
    ends = torch.tensor([0, 8, 20], device=DEVICE, dtype=torch.int32)
    times = {"timestamps": torch.arange(20, device=DEVICE)}
    wanted = layer((x, ends), 12, **times)[0]
    torch.testing.assert_close(layer((x, Lengths(ends)), **times)[0], wanted)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled((x, ends), 12, **times)[0], wanted)


@pytest.mark.parametrize("given", ("of the call", "a tensor"))
def test_one_graph_for_every_longest_sequence(given):
    layer, _ = layer_with_dropout(validate=False)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    counts = []
    for longest in (12, 15, 19, 23, 40):
        ends = torch.tensor([0, 5, 5 + longest], device=DEVICE, dtype=torch.int32)
        x = torch.randn(5 + longest, 16, device=DEVICE)
        divisor = {} if given == "of the call" else {"divisor": torch.tensor(float(longest))}
        out = compiled((x, ends), longest, **divisor)[0]
        torch.testing.assert_close(out, layer((x, ends), longest)[0])
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1, counts


def test_a_function_has_one_graph_for_every_longest_sequence():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        adapters.hstu_mha, backend=counter, fullgraph=True, dynamic=True
    )  # fmt: skip
    counts = []
    for longest in (7, 9, 12, 15):
        q, k, v, ends = attention((3, longest, 2))
        call = longest, 0.3, q, k, v, ends.int()
        torch.testing.assert_close(compiled(*call), adapters.hstu_mha(*call))
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1, counts


def test_what_a_layer_does_not_take_is_refused():
    with pytest.raises(TypeError, match="options must not have output_scale"):
        HSTULayer(16, 2, output_scale=0.1)
    with pytest.raises(ValueError, match="silu must be one of u, uvqk, none, got 'v'"):
        Form(silu="v")
    assert replace(RESEARCH, concat=("u", "n", "un")) in {case.form for case in LAYERS.values()}
