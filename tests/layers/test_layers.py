"""The layers of both operators against the same layers in plain PyTorch."""

import contextlib
import math
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tritonemu
from gdpa_kernels import PFFN, PMA, BlockAttention, GDPASelfAttention, Lengths
from gdpa_kernels.calling import packed, sequences
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.gdpa.bias import hstu_thresholds
from gdpa_kernels.layers import block_attention as block_modules
from gdpa_kernels.layers import common as layers
from gdpa_kernels.layers import gdpa as modules
from gdpa_lab.measuring.inputs import cu_seqlens
from tests.fuzzing import composed
from tests.tiers import sweep

LENGTHS = [0, 5, 9, 0, 1]
SUMMARY = 7
LAYERS = {
    "self": (GDPASelfAttention, (32, 4)),
    "pma": (PMA, (32, 4, 3)),
    "pffn": (PFFN, (32, 4, SUMMARY, 6)),
}
ALL = LAYERS | {"block": (BlockAttention, (32, 2))}
OPTIONS = {
    "plain": {},
    "grouped": {"num_kv_heads": 2, "bias": False, "max_seqlen": 20},
    "one kv head": {"num_kv_heads": 1, "activation": "silu", "scale": 0.7, "output_scale": -0.1},
    "per head": {"activation": ["gelu", "silu", "relu", "gelu_tanh"]},
    "identity": {"activation": "identity"},
    "qk_norm": {"num_kv_heads": 2, "qk_norm": True, "scale": 1 / 8, "activation": "gelu_taylor6"},
}
MASKS = {
    "causal": {"causal": True},
    "lower right": {"causal": "lower_right"},  # of self-attention: the same
    "causal window": {"causal": True, "window": 3, "qk_norm": True},
    "rotary": {"num_kv_heads": 2, "rotary": 100.0, "qk_norm": True},
}
TOKENS = {
    "summary tokens": {"summary_tokens": 2},
    "grouped tokens": {"summary_tokens": 3, "num_kv_heads": 2, "qk_norm": True, "bias": False},
}
BLOCKS = {
    "blocks": {"block_size": 16},
    "grouped blocks": {"block_size": 16, "num_kv_heads": 1, "bias": False},
    "rotary blocks": {"block_size": 16, "num_kv_heads": 1, "rotary": 1e4},
    "rotary blocks of v": {"block_size": 16, "rotary": 100.0, "rotate_v": True},
    "blocks, qk_norm": {"block_size": 16, "num_kv_heads": 1, "rotary": 1e4, "qk_norm": True},
}
KERNEL = {"impl": "v1_one_tile", "dtype": torch.float32}
BLOCKS |= {f"{name}, kernel": options | KERNEL for name, options in BLOCKS.items()}
EVERY = OPTIONS | MASKS | TOKENS | BLOCKS
CASES = [(kind, name) for kind in LAYERS for name in OPTIONS]
CASES += [("self", name) for name in MASKS] + [("pffn", name) for name in TOKENS]
CASES += [("block", name) for name in BLOCKS]

each = pytest.mark.parametrize("kind", ALL)
of_gdpa = pytest.mark.parametrize("kind", LAYERS)


@pytest.fixture
def calls(monkeypatch) -> list[tuple[tuple, dict]]:
    """The arguments and options of every call of `gdpa` by a layer."""
    seen, attend = [], modules.gdpa
    monkeypatch.setattr(modules, "gdpa", lambda *a, **o: seen.append((a, o)) or attend(*a, **o))
    return seen


def longest(calls) -> list[tuple[int, int]]:
    """max_seqlen_q and max_seqlen_k of the calls since the last time."""
    pairs = [
        (len(q) if of_q is None else of_q.max_seqlen, of_k.max_seqlen)
        for (q, _, _, of_q, of_k), _ in calls
    ]
    calls.clear()
    return pairs


def make(kind: str, **options):
    """A layer in fp64 with weights of its norms that are not all 1."""
    layer, sizes = ALL[kind]
    torch.manual_seed(0)
    made = layer(*sizes, **{"dtype": torch.float64} | options)
    for norm in (made.q_norm, made.k_norm):
        if norm is not None:
            torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    return made


def batch(lengths=LENGTHS, dtype=torch.float64, tokens=None):
    """values, offsets and a summary per sequence, of some tokens or one vector."""
    make = torch.Generator().manual_seed(1)
    values = torch.randn(sum(lengths), 32, generator=make).to(dtype)
    shape = (len(lengths), SUMMARY) if tokens is None else (len(lengths), tokens, SUMMARY)
    summary = torch.randn(shape, generator=make).to(dtype)
    return values, cu_seqlens(lengths, "cpu"), summary


def run(layer, values, offsets, summary, nested=False, call=None):
    """The dense rows of what the layer gives back, or `call` in its stead."""
    call = layer if call is None else call
    x = torch.nested.nested_tensor_from_jagged(values, offsets) if nested else (values, offsets)
    y = call(x, summary) if isinstance(layer, PFFN) else call(x)
    if isinstance(layer, PMA):
        count = offsets.batch if isinstance(offsets, Lengths) else len(offsets) - 1
        assert y.shape == (count, 3, 32)
        return y
    if nested:
        assert y.is_nested and y.layout == torch.jagged and y.shape == x.shape
        return y.values()
    assert y[1] is offsets and y[0].shape == values.shape
    return y[0]


def gradients(layer, loss, *others):
    return torch.autograd.grad(loss, [*layer.parameters(), *others])


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_is_the_layer_in_plain_pytorch(kind, options):
    options = EVERY[options]
    layer, exact = make(kind, **options), options.get("dtype") != torch.float32
    lengths = [5, 0, 20, 16, 1] if kind == "block" else LENGTHS
    dtype = layer.out.weight.dtype
    values, offsets, summary = batch(lengths, dtype, options.get("summary_tokens"))
    leaves = [values.requires_grad_()]
    if kind == "pffn":
        leaves.append(summary.requires_grad_())
    with contextlib.nullcontext() if exact else tritonemu.enabled():
        y = run(layer, values, offsets, summary)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
        actual = gradients(layer, (y * weights).sum(), *leaves)
    expected = composed(layer, values, lengths, summary)
    rtol, atol = (1e-9, 1e-12) if exact else (1e-4, 1e-5)
    torch.testing.assert_close(y, expected, rtol=rtol, atol=atol)
    names = [*dict(layer.named_parameters()), "values", "summary"]
    wanted = gradients(layer, (expected * weights).sum(), *leaves)
    for name, a, b in zip(names, actual, wanted, strict=False):
        assert b.abs().max() > 0, name
        close = {"rtol": rtol if exact else 1e-3, "atol": 10 * atol}
        torch.testing.assert_close(a, b, **close, msg=lambda m, n=name: f"{n}: {m}")


@each
def test_a_nested_tensor_and_lengths_are_the_same_batch(kind):
    layer = make(kind, num_kv_heads=2, **({"rotary": 1e4} if kind == "block" else {}))
    values, offsets, summary = batch()
    leaf = values.clone().requires_grad_()
    run(layer, leaf, offsets, summary).square().sum().backward()
    values.requires_grad_()
    y = run(layer, values, offsets.long(), summary, nested=True)
    lengths = Lengths(offsets.long())
    for given in (offsets, lengths, lengths):  # which the second time holds what the first made
        assert torch.equal(y, run(layer, leaf, given, summary))
    y.square().sum().backward()
    assert torch.equal(values.grad, leaf.grad)


@pytest.mark.parametrize("qk_norm", (False, True))
@of_gdpa
def test_the_kernels_read_the_projections_where_they_lie(kind, qk_norm, calls):
    layer = make(kind, num_kv_heads=2, qk_norm=qk_norm)
    values, offsets, summary = batch()
    run(layer, values, offsets, summary)
    (((q, k, v, ends_q, ends_k, *_), _),) = calls
    assert [x is None for x in (k, v)] == [kind == "self" and not qk_norm, not qk_norm]
    q, k, v = packed.unpack(q, k, v, layer.num_kv_heads)
    heads = 8 if kind == "self" else 4
    assert v.stride() == (heads * 8, 8, 1) and v.shape[1:] == (2, 8)
    if not qk_norm:
        assert k.stride() == v.stride()
        assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        if kind == "self":
            assert q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        elif kind == "pma":
            assert q.data_ptr() == layer.seeds.data_ptr()
    if kind == "pma":
        assert ends_q is None and q.shape == (3, 4, 8) and ends_k.cu_seqlens is offsets
    else:
        assert ends_q.cu_seqlens is offsets
    keys = [0, 6, 12, 18, 24, 30] if kind == "pffn" else offsets.tolist()
    assert ends_k.cu_seqlens.tolist() == keys


def test_the_kernels_of_blocks_read_the_packed_projection(monkeypatch):
    seen, attend = [], block_modules.block_attention
    monkeypatch.setattr(
        block_modules, "block_attention", lambda *a, **o: seen.append(a[:3]) or attend(*a, **o)
    )
    make("block", num_kv_heads=1)(batch()[:2])
    (((q, *others),),) = (seen,)
    assert others == [None, None]
    q, k, v = packed.unpack(q, None, None, 1)
    assert q.stride() == k.stride() == v.stride() == (4 * 16, 16, 1)
    assert q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()


def test_each_direction_of_blocks_by_the_kernel_asked_for():
    values, offsets, _ = batch(dtype=torch.bfloat16)
    impls = {"impl": "v1_one_tile", "backward_impl": "reference"}
    layer = make("block", rotary=1e4, dtype=torch.bfloat16, **impls)
    with tritonemu.enabled(), launches() as seen:
        layer((values, offsets))[0].sum().backward()
    assert [launch.name for launch in seen] == ["block_list_kernel", "forward_kernel"]
    layer = make("block", dtype=torch.bfloat16, backward_impl="v3_warp_specialized")
    with pytest.raises(NotImplementedError, match="backward_impl 'v3_warp_special.* needs .*sm_90"):
        layer((values, offsets))


@pytest.mark.parametrize("lengths", ([], [0, 0], [1]))
@each
def test_hardly_any_tokens(kind, lengths):
    layer = make(kind, qk_norm=True, **({"rotary": 1e4} if kind == "block" else {}))
    values, offsets, summary = batch(lengths)
    for nested in (False, True):
        y = run(layer, values, offsets, summary, nested)
        y.sum().backward()
        assert all(p.grad.isfinite().all() for p in layer.parameters())
    if lengths:
        torch.testing.assert_close(y, composed(layer, values, lengths, summary))


@each
def test_a_sample_sees_no_other(kind):
    layer = make(kind)
    values, offsets, summary = batch()
    poisoned, other = values.clone(), summary.clone()
    poisoned[5:14], other[2] = math.nan, math.nan  # sequence 2
    clean, y = (run(layer, a, offsets, b) for a, b in ((values, summary), (poisoned, other)))
    rows = [0, 1, 3, 4] if kind == "pma" else [*range(5), 14]
    assert torch.equal(y[rows], clean[rows])


def test_summary_tokens_take_few_weights():
    with torch.device("meta"):
        layer = PFFN(512, 4, 512, 256, summary_tokens=32)
    made = sum(p.numel() for part in (layer.kv, layer.mix) for p in part.parameters())
    assert made == 512 * 1024 + 1024 + 256 * 32


def test_parameters_are_drawn_after_to_empty():
    """As a model is made that is sharded before it has memory."""
    for kind, options in (("pma", {}), ("self", {"position_bias": 400, "time_bias": 99})):
        with torch.device("meta"):
            layer = make(kind, qk_norm=True, dtype=torch.float32, **options)
        for x in (layer := layer.to_empty(device="cpu")).parameters():
            x.data.fill_(math.nan)
        if kind == "self":
            assert torch.equal(layer.time_thresholds, hstu_thresholds(99))
        for part in layer.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
        assert all(x.isfinite().all() for x in layer.parameters())
        drawn = {"pma": ("seeds", 1)}.get(kind, ("position_bias", 0.02))
        assert 0.8 < getattr(layer, drawn[0]).std() / drawn[1] < 1.2


def test_seeds_of_pma_are_a_summary():
    pool, layer = make("pma", dtype=torch.float32), PFFN(32, 4, 32, 6, summary_tokens=3)
    x = batch(dtype=torch.float32)[:2]
    expected, _ = layer(x, pool(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, _ = layer(x, pool(x))
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.05)
    torch._dynamo.reset()
    step = torch.compile(lambda x: layer(x, pool(x, 9), 9)[0], fullgraph=True, backend="aot_eager")
    actual = gradients(layer, step(x).square().sum(), *pool.parameters())
    wanted = gradients(layer, expected.square().sum(), *pool.parameters())
    for a, b in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, b)


@of_gdpa
def test_qk_norm_bounds_the_scores(kind, calls):
    values, offsets, summary = batch()
    layer, options = LAYERS[kind][0], {"qk_norm": True, "scale": 1 / 8, "dtype": torch.float64}
    layer = layer(*LAYERS[kind][1], **options)
    run(layer, 1e3 * values, offsets, 1e3 * summary)
    (((q, k, *_), _),) = calls
    scores = torch.einsum("qhd,khd->hqk", q, k) * layer.options.scale
    assert 0.5 < scores.abs().max() <= 1


FUSED = {
    "self": ("self", {}),
    "rotary": ("self", {"num_kv_heads": 2, "rotary": 100.0, "causal": True}),
    "pma": ("pma", {"num_kv_heads": 2}),
    "pffn": ("pffn", {"num_kv_heads": 2}),
    "pffn of tokens": ("pffn", {"summary_tokens": 5}),
    "block": ("block", {"num_kv_heads": 1, "block_size": 16, "rotary": 100.0}),
}


def with_gradients(layer, lengths, tokens=None) -> dict[str, torch.Tensor]:
    """What the layer gives back, and all gradients by name."""
    values, offsets, summary = batch(lengths, tokens=tokens)
    y = run(layer, values.requires_grad_(), offsets, summary)
    found = gradients(layer, y.square().sum(), values)
    return {"y": y, **dict(zip([*dict(layer.named_parameters()), "values"], found, strict=True))}


@pytest.mark.parametrize("lengths", ([0, 5, 19, 0, 1], [0, 0]), ids=("jagged", "no tokens"))
@pytest.mark.parametrize("name", FUSED)
def test_fused_norms_are_the_same_function(name, lengths):
    kind, options = FUSED[name]
    eager, fused = (
        with_gradients(
            make(kind, qk_norm=True, fused_qk_norm=fuse, **options),
            lengths,
            options.get("summary_tokens"),
        )
        for fuse in (False, True)
    )
    for key, expected in eager.items():
        torch.testing.assert_close(fused[key], expected, atol=1e-12, rtol=1e-10, msg=key)


@pytest.mark.parametrize("kind", ("self", "block"))
def test_there_must_be_a_norm_to_fuse(kind):
    with pytest.raises(ValueError, match="fused_qk_norm must be False without qk_norm, got T"):
        make(kind, fused_qk_norm=True)


@each
@pytest.mark.parametrize("qk_norm", (False, True))
@pytest.mark.filterwarnings("error")
def test_autocast(kind, qk_norm):
    layer = make(kind, qk_norm=qk_norm, dtype=torch.float32)
    values, offsets, summary = batch(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = run(layer, values, offsets, summary)
    assert y.dtype == torch.bfloat16
    expected = run(layer, values, offsets, summary)
    error = (y.float() - expected).norm() / expected.norm()
    assert 1e-5 < error < 0.02
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


@pytest.fixture
def norms_of_a_gpu():
    """Autocast of the CPU makes rms_norm compute and return fp32, as that of CUDA does."""

    def in_fp32(x, shape, weight=None, eps=None):
        with torch.autocast("cpu", enabled=False):
            return F.rms_norm(x.float(), shape, None if weight is None else weight.float(), eps)

    library = torch.library.Library("aten", "IMPL")
    library.impl("rms_norm", in_fp32, "AutocastCPU")
    yield
    library._destroy()


def test_a_norm_keeps_its_dtype_under_autocast(norms_of_a_gpu):
    norm, x = layers.HeadNorm(8), torch.randn(5, 2, 8).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.nn.RMSNorm(8)(x).dtype == torch.float32, "or this test shows nothing"
        y = norm(x)
    assert y.dtype == torch.bfloat16 and torch.equal(y, norm(x))


@of_gdpa
def test_nothing_becomes_fp32_on_the_way_to_the_kernels(kind, norms_of_a_gpu, calls):
    options = {"rotary": 1e4} if kind == "self" else {}
    layer = make(kind, qk_norm=True, dtype=torch.float32, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run(layer, *batch(dtype=torch.float32))
    (((q, k, v, *_), _),) = calls
    assert k.dtype == v.dtype == torch.bfloat16
    assert q.dtype == (torch.float32 if kind == "pma" else torch.bfloat16)  # the seeds are weights


@pytest.mark.parametrize("form", (sweep("pair"), sweep("nested"), "fused"))
@each
def test_torch_compile_sees_one_graph(kind, form):
    nested, fused = form == "nested", form == "fused"
    # The nested one reads its longest sequence in the graph.
    longest = {"rotary": 1e4} if kind == "block" else {"max_seqlen": None if nested else 12}
    layer = make(kind, qk_norm=True, fused_qk_norm=fused, **longest)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=fused or None)
    for lengths in (LENGTHS, [9, 3, 5]) if fused else (LENGTHS,):
        values, offsets, summary = batch(lengths)
        offsets = offsets.long() if nested else offsets
        y, expected = (run(layer, values, offsets, summary, nested, f) for f in (compiled, layer))
        torch.testing.assert_close(y, expected)
        found, wanted = (gradients(layer, x.square().sum()) for x in (y, expected))
        torch.testing.assert_close(found, wanted)


@each
def test_a_state_dict_carries_the_layer(kind):
    layer = make(kind, qk_norm=True)
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    assert {"q_norm.weight", "k_norm.weight", "out.weight", "out.bias"} < set(state)
    assert ("seeds" in state) == (kind == "pma")
    torch.manual_seed(5)
    other = ALL[kind][0](*ALL[kind][1], qk_norm=True, dtype=torch.float64)
    assert not torch.equal(run(other, *batch()), run(layer, *batch()))
    other.load_state_dict(state)
    assert torch.equal(run(other, *batch()), run(layer, *batch()))
    plain = make(kind)
    assert not any("norm" in name for name in plain.state_dict())
    with pytest.raises(RuntimeError, match="q_norm.weight"):
        plain.load_state_dict(state)


SELF = {
    "embed_dim": (0, "embed_dim must be an integer of at least 1, got 0"),
    "num_heads": (5, "num_heads must be a positive divisor of embed_dim 32, got 5"),
    "num_kv_heads": (3, "num_kv_heads must be a positive divisor of num_heads 4, got 3"),
    "activation": ("softmax", "activation must be one of identity, .*, got 'softmax'"),
    "scale": ("1", "scale must be a float, got str"),
    "output_scale": ([], "output_scale must be a float, got list"),
    "max_seqlen": (-1, "max_seqlen must be None or an integer of at least 0, got -1"),
    "impl": ("v9", "impl must be 'auto' or one of reference, v0_eager, .*, got 'v9'"),
    "backward_impl": ("v0_eager", "backward_impl must be 'auto' or one of .*, got 'v0_eager'"),
    "precise": (1, "precise must be a bool, got 1"),
}
FLAGS = ("qk_norm", "fused_qk_norm", "bias", "validate")
WRONG = [
    *((kind, name, "yes", f"{name} must be a bool, got 'yes'") for kind in ALL for name in FLAGS),
    ("block", "rotate_v", 1, "rotate_v must be a bool, got 1"),
    ("self", "causal", "lower-right", "causal must be a bool, .*, got 'lower-right'"),
    ("self", "causal", 1, "causal must be a bool, 'upper_left' or 'lower_right', got 1"),
    *((kind, name, *case) for kind in LAYERS for name, case in SELF.items()),
    ("self", "num_heads", 0, "num_heads must be a positive divisor .* got 0"),
    ("self", "num_heads", 4.0, "num_heads must be a positive divisor .* got 4.0"),
    ("self", "num_kv_heads", True, "num_kv_heads must be a positive divisor .* got True"),
    ("self", "activation", ("relu",) * 3, r"one name or one per query head \(4\), got 3"),
    ("self", "window", True, "window must be None or an integer of at least 0, got True"),
    ("self", "rotary", 0, "rotary must be None or a base above 0, got 0"),
    ("self", "max_seqlen", True, "max_seqlen must be None or an integer .* got True"),
    ("pma", "num_seeds", 0, "num_seeds must be an integer of at least 1, got 0"),
    ("pffn", "num_keys", 2.0, "num_keys must be an integer of at least 1, got 2.0"),
    ("pffn", "summary_tokens", 0, "summary_tokens must be an integer of at least 1, got 0"),
    ("pffn", "summary_dim", True, "summary_dim must be an integer of at least 1, got True"),
    ("block", "num_heads", 5, "num_heads must be a positive divisor of embed_dim 32, got 5"),
    ("block", "num_heads", 0, "num_heads must be a positive divisor .* got 0"),
    ("block", "num_heads", 2.0, "num_heads must be a positive divisor .* got 2.0"),
    ("block", "embed_dim", 64.0, "embed_dim must be an integer of at least 1, got 64.0"),
    ("block", "embed_dim", 60, "embed_dim // num_heads must be even .* rotary embedding, got 15"),
    ("block", "num_kv_heads", 3, "num_kv_heads must be a positive divisor of num_heads 4, got 3"),
    ("block", "block_size", 48, "block_size must be one of 16, 32, 64, 128, got 48"),
    ("block", "block_size", 16.0, "block_size must be one of .*, got 16.0"),
    ("block", "impl", "nope", "impl must be 'auto' or one of reference, v0_flash, .*, got 'nope'"),
    ("block", "backward_impl", "v0_flash", "needs what impl 'v0_flash' saves, got 'auto'"),
    ("block", "rotary", "1e4", "rotary must be a float, got str"),
    ("block", "rotary", True, "rotary must be a float, got bool"),
    ("block", "rotary", -1.0, "rotary must be None or a base above 0, got -1.0"),
    ("block", "rotary", None, "rotate_v must be False without rotary, got True"),
]
SIZES = {
    "pma": {"num_seeds": 3}, "pffn": {"summary_dim": 7, "num_keys": 6},
    "block": {"rotary": 1e4, "rotate_v": True},
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "value", "message"), WRONG)
def test_wrong_arguments_say_what_is_wrong(kind, name, value, message):
    sizes = {"embed_dim": 32, "num_heads": 4} | SIZES.get(kind, {})
    with pytest.raises((TypeError, ValueError), match=message):
        ALL[kind][0](**sizes | {name: value})


@each
def test_wrong_inputs_say_what_is_wrong(kind):
    layer = make(kind)
    values, offsets, summary = batch()

    def call(x):
        return layer(x, summary) if kind == "pffn" else layer(x)

    with pytest.raises(TypeError, match="pair .values, offsets. or a nested .*got a tensor of lay"):
        call(values)
    with pytest.raises(TypeError, match="got a tensor of layout torch.strided, nested"):
        call(torch.nested.nested_tensor([values[:3], values[3:]], layout=torch.strided))
    with pytest.raises(TypeError, match="or a nested tensor of layout torch.jagged, got int"):
        call(3)
    with pytest.raises(ValueError, match=r"values must have shape \[total_tokens, 32\], got \[15,"):
        call((values[:, :16], offsets))
    with pytest.raises(TypeError, match="offsets must be int32 or int64, got torch.float32"):
        call((values, offsets.float()))
    with pytest.raises(TypeError, match="offsets must be a tensor or Lengths, got list"):
        call((values, offsets.tolist()))
    for wrong in (offsets[:0], offsets[None], offsets.to("meta")):
        with pytest.raises(ValueError, match=r"offsets must have shape \[batch \+ 1\] on cpu, got"):
            call((values, wrong))
    for wrong in (offsets * 2, offsets.long() + 1):
        with pytest.raises(ValueError, match="offsets must run from 0 to at most the 15 rows"):
            call((values, wrong))
    with pytest.raises(ValueError, match="offsets must not decrease, got 14 followed by 5"):
        call((values, offsets[[0, 1, 3, 2, 4, 5]]))
    with pytest.raises(ValueError, match=f"offsets must not decrease, got {2**40} followed by"):
        call((values, torch.tensor([0, 2, 2**40, 10, 12, 15])))  # 2**40 is 0 in int32
    if kind == "block":
        far = torch.tensor([0, 2**40, 15])
        assert make(kind, validate=False)((values, far))[0].isfinite().all()
    nested = torch.nested.nested_tensor_from_jagged(values, offsets.long())
    with pytest.raises(ValueError, match="got 3 dimensions, of which 2 is jagged"):
        call(nested.transpose(1, 2))
    holes = torch.nested.narrow(
        values[:14].view(2, 7, 32), 1, torch.tensor([0, 3]), torch.tensor([4, 2]), torch.jagged
    )
    with pytest.raises(ValueError, match="without holes between its sequences, .*, with holes"):
        call(holes)


def test_a_wrong_summary_says_what_is_wrong():
    layer = make("pffn")
    values, offsets, summary = batch()
    for wrong in (summary[:4], summary[:, :6], summary[None]):
        with pytest.raises(ValueError, match=r"summary must have shape \[5, 7\], .*, got \["):
            layer((values, offsets), wrong)
    with pytest.raises(ValueError, match="summary must have shape .* got a nested tensor"):
        layer((values, offsets), torch.nested.nested_tensor([summary[0]], layout=torch.jagged))
    with pytest.raises(TypeError, match="summary must be a tensor, got NoneType"):
        layer((values, offsets), None)
    with pytest.raises(ValueError, match=r"must have shape \[5, 2, 7\], .*, got \[5, 7\]"):
        make("pffn", summary_tokens=2)((values, offsets), summary)


def of_kind(kind: str, longest: int) -> list[tuple[int, int]]:
    """max_seqlen_q and max_seqlen_k of one call of a layer whose longest sequence is this."""
    return {"self": [(longest, longest)], "pma": [(3, longest)], "pffn": [(longest, 6)]}[kind]


@of_gdpa
def test_max_seqlen(kind, calls):
    """That of the layer, of the batch, or of the offsets."""
    values, offsets, summary = batch()
    expected = run(make(kind), values, offsets, summary)
    assert longest(calls) == of_kind(kind, 9)
    assert torch.equal(run(make(kind, max_seqlen=9), values, offsets, summary), expected)
    with pytest.raises(ValueError, match="max_seqlen must be at least the longest .* 9 .*got 8"):
        run(make(kind, max_seqlen=8), values, offsets, summary)
    calls.clear()
    layer = make(kind, max_seqlen=8)
    call = partial(layer, max_seqlen=12)
    torch.testing.assert_close(run(layer, values, offsets, summary, call=call), expected)
    assert longest(calls) == of_kind(kind, 12)
    for wrong, error, message in (
        (7, ValueError, "at least the longest .* 9 .*got 7"),
        (9.0, TypeError, "an integer of at least 0, got 9.0"),
    ):
        with pytest.raises(error, match=f"max_seqlen must be {message}"):
            run(layer, values, offsets, summary, call=partial(layer, max_seqlen=wrong))


@of_gdpa
def test_a_nested_tensor_knows_its_longest_sequence(kind, monkeypatch, calls):
    def waits(*_):
        raise AssertionError("the offsets were read")

    monkeypatch.setattr(sequences, "longest_sequence", waits)
    values, offsets, summary = batch()
    more = [summary] if kind == "pffn" else []
    x = torch.nested.nested_tensor_from_jagged(values, offsets.long(), max_seqlen=11)
    y = make(kind, validate=False)(x, *more)
    assert longest(calls) == of_kind(kind, 11)
    if kind != "pma":
        make("self", validate=False)(y)
        assert longest(calls) == [(11, 11)], "the next layer knows it too"
    wrong = torch.nested.nested_tensor_from_jagged(values, offsets.long(), max_seqlen=8)
    with pytest.raises(ValueError, match="max_seqlen must be at least the longest .* 9 .*got 8"):
        make(kind)(wrong, *more)


def test_offsets_of_a_pair_are_converted_once():
    values, offsets, _ = batch()
    layer = make("self")
    x = layer((values, offsets.long()))
    assert x[1].dtype == torch.int32 and layer(x)[1] is x[1]


def test_another_batch_is_not_another_program():
    torch._dynamo.reset()
    layer, counter = make("self"), CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for lengths in ([4, 0, 17], [5, 9], [3, 2, 1, 30]):
        values, offsets, _ = batch(lengths)
        y, _ = compiled((values, offsets), max_seqlen=max(lengths))
        torch.testing.assert_close(y, layer((values, offsets))[0])
    assert counter.frame_count == 1


@pytest.mark.parametrize("shared", (False, True), ids=("offsets", "Lengths"))
@each
def test_activation_checkpointing(kind, shared):
    values, offsets, summary = batch()
    offsets, layer, found = Lengths(offsets) if shared else offsets, make(kind), []
    for call in (layer, lambda *x: checkpoint(layer, *x, use_reentrant=False)):
        y = call((values, offsets), *([summary] if kind == "pffn" else []))
        y = y if kind == "pma" else y[0]
        found.append(torch.autograd.grad(y.square().sum(), list(layer.parameters())))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("options", ({}, {"precise": True}), ids=str)
@of_gdpa
def test_packed_arithmetic_is_the_callers_choice(kind, options, calls):
    run(make(kind, **options), *batch())
    assert [call["precise"] for _, call in calls] == [bool(options)]


@of_gdpa
def test_an_explicit_kernel_is_the_one_asked_for(kind):
    with pytest.raises(NotImplementedError, match="impl 'v1_tiled' needs .*CUDA"):
        run(make(kind, dtype=torch.float32, impl="v1_tiled"), *batch(dtype=torch.float32))
    layer = make(kind, dtype=torch.float32, backward_impl="v1_tiled_backward")
    with pytest.raises(NotImplementedError, match="backward_impl 'v1_tiled_backward' needs .*CUDA"):
        run(layer, *batch(dtype=torch.float32))


def curve(kind, step, steps=8, dtype=torch.float64, **options) -> torch.Tensor:
    """Losses of a layer that learns what another one, of other weights, computes."""
    layer = make(kind, qk_norm=True, dtype=dtype, **options)
    values, offsets, summary = batch(dtype=dtype)
    torch.manual_seed(7)
    teacher = ALL[kind][0](*ALL[kind][1], dtype=torch.float64)
    with torch.no_grad():
        target = composed(teacher, values.double(), LENGTHS, summary.double())
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        loss = F.mse_loss(step(layer, values, offsets, summary).double(), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def plain(layer, values, offsets, summary):
    return composed(layer, values, LENGTHS, summary)


@each
def test_training_follows_plain_pytorch(kind):
    losses, expected = curve(kind, run), curve(kind, plain)
    assert losses[-1] < 0.7 * losses[0]
    torch.testing.assert_close(losses, expected, rtol=1e-8, atol=0)


def test_training_by_a_kernel_of_blocks_follows_plain_pytorch():
    with tritonemu.enabled():
        losses = curve("block", run, **KERNEL, rotary=1e4)
    assert losses[-1] < 0.7 * losses[0]
    expected = curve("block", plain, dtype=torch.float32, rotary=1e4)
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-5)


def test_training_in_bf16_by_the_kernels_follows_plain_pytorch():
    def step(*arguments):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return run(*arguments)

    options = {"impl": "v1_tiled", "backward_impl": "v1_tiled_backward"}
    with tritonemu.enabled():
        losses = curve("pffn", step, 5, torch.float32, **options)
    expected = curve("pffn", plain, 5, torch.float32)
    assert losses[-1] < 0.8 * losses[0]
    torch.testing.assert_close(losses, expected, rtol=0.02, atol=0)
