"""What both operators promise PyTorch: gradients of any layout, autocast, torch.compile, modes."""

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad

import tritonemu
from gdpa_kernels import block_attention, gdpa
from gdpa_kernels.block_attention import reference as block_reference
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.lengths import Lengths
from gdpa_kernels.gdpa import reference
from gdpa_lab.measuring.inputs import cu_seqlens
from tests.calls import GRADIENTS, Seen, assert_same_bits, cast, ends, opcheck, required

OPERATORS = {"gdpa": gdpa, "block_attention": block_attention}
TOTAL = 21
both = pytest.mark.parametrize("operator", OPERATORS)


def arguments(operator: str, dtype=torch.float32, head_dim: int = 16, **changes) -> dict:
    """Two sequences of 4 and 17 tokens around an empty one; grouped heads; blocks of 16."""
    q, k, v = (torch.randn(TOTAL, heads, head_dim).to(dtype) for heads in (4, 2, 2))
    offsets = ends(0, 4, 4, 21)
    lengths = {"cu_seqlens": offsets, "block_size": 16}
    if operator == "gdpa":
        lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets.clone()}
        lengths |= {"max_seqlen_q": 17, "max_seqlen_k": 17}
    return {"q": q, "k": k, "v": v} | lengths | changes


def turned(operator: str) -> dict:
    """Rotary, where an operator has it."""
    angles = torch.randn(TOTAL, 8, dtype=torch.float64)
    return {} if operator == "gdpa" else {"rotary": (angles.sin(), angles.cos())}


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def assert_same_gradients(one: dict, other: dict) -> None:
    assert all(torch.equal(one[name].grad, other[name].grad) for name in "qkv")


def of(heads: int, dtype=torch.float32, head_dim: int = 16) -> torch.Tensor:
    return torch.ones(TOTAL, heads, head_dim, dtype=dtype)


WRONG = (
    ({"q": [1.0]}, TypeError, "q must be a tensor, got list"),
    ({"k": of(2)[:, 0]}, ValueError, r"k must have shape \[total, .*got \[21, 16\]"),
    ({"v": of(2).half()}, TypeError, "v must have q's dtype"),
    (
        dict.fromkeys("qkv", of(2, torch.int32)),
        TypeError,
        "q must have a floating-point dtype, got",
    ),
    ({"k": of(2).to("meta")}, ValueError, "k must be on q's device cpu, got meta"),
    ({"k": of(2, head_dim=8)}, ValueError, "k must have q's head_dim 16"),
    ({"v": of(4)}, ValueError, "v must have k's shape"),
    ({"v": of(2)[:20]}, ValueError, "v must have k's shape"),
    ({"k": of(3), "v": of(3)}, ValueError, "q must have a multiple of k's 3 heads, got 4 heads"),
    ({"impl": "v9"}, ValueError, r"impl must be 'auto' or one of reference, v0_\w+, .*, got 'v9'"),
    ({"scale": "1"}, TypeError, "scale must be a float, got str"),
)
WRONG_LENGTHS = (
    ([0, 4, 4, 2**32 + 21], torch.int64, "got 0 to 4294967317"),
    ([1, 4, 4, 21], torch.int32, "must run from 0 to at most the 21 rows"),
    ([0, 4, 4, 22], torch.int32, "got 0 to 22"),
    ([0, 6, 4, 21], torch.int32, "must not decrease, got 6 followed by 4 at index 1"),
)


@both
@pytest.mark.parametrize("changes, error, message", WRONG)
def test_wrong_arguments_say_what_is_wrong(operator, changes, error, message):
    with pytest.raises(error, match=message):
        OPERATORS[operator](**arguments(operator, **changes))


@both
@pytest.mark.parametrize("offsets, dtype, message", WRONG_LENGTHS)
def test_wrong_lengths_say_what_is_wrong(operator, offsets, dtype, message):
    names = ("cu_seqlens_q", "cu_seqlens_k") if operator == "gdpa" else ("cu_seqlens",)
    for name in names:
        wrong = torch.tensor(offsets, dtype=dtype)
        with pytest.raises(ValueError, match=f"{name} .*{message}"):
            OPERATORS[operator](**arguments(operator, **{name: wrong}))
        with pytest.raises(TypeError, match=f"{name} must be int32 or int64, got torch.int16"):
            OPERATORS[operator](**arguments(operator, **{name: wrong.to(torch.int16)}))


@both
def test_offsets_of_64_bits_or_other_strides_are_those_of_32(operator):
    call = required(arguments(operator))
    wide = {name: x.long() for name, x in call.items() if name.startswith("cu_seqlens")}
    strided = {name: x.repeat_interleave(2)[::2] for name, x in wide.items()}
    found = {}
    for name, changes in (("int32", {}), ("int64", wide), ("strided", strided)):
        out = OPERATORS[operator](**call | changes)
        found[name] = out, *torch.autograd.grad(out.square().sum(), [call[n] for n in "qkv"])
    assert_same_bits(found["int64"], found["int32"])
    assert_same_bits(found["strided"], found["int32"])


@both
def test_lengths_are_trusted_when_told_to_and_checked_in_each_call(operator):
    function, name = OPERATORS[operator], "cu_seqlens_k" if operator == "gdpa" else "cu_seqlens"
    wrong = arguments(operator, **{name: ends(0, 4, 4, 22)})
    with pytest.raises(ValueError, match=f"{name} must run from 0 to at most the 21 rows"):
        function(**wrong)
    if operator == "gdpa":
        assert function(**wrong, validate=False).shape == (TOTAL, 4, 16)
    call = arguments(operator)
    function(**call)
    call[name][1] = 7
    with pytest.raises(ValueError, match=f"{name} must not decrease"):
        function(**call)


BACKWARDS = [
    *(("gdpa", {"backward_impl": impl}) for impl in ("reference", "v1_tiled_backward")),
    *(("block_attention", {"impl": impl, "block_size": 64})
      for impl in ("reference", "v0_flash", "v1_one_tile")),
]  # fmt: skip


@pytest.mark.parametrize("operator, options", BACKWARDS, ids=str)
def test_expanded_and_strided_gradients(operator, options):
    """Autograd's reach the rung, of which `test_any_strides_of_the_gradient` says the rest."""
    call = required(arguments(operator, torch.bfloat16, 64) | options)
    leaves = [call[name] for name in "qkv"]
    with tritonemu.enabled():
        out = OPERATORS[operator](**call)
        for strided in (GRADIENTS[kind](torch.randn_like(out)) for kind in ("sum", "reversed")):
            one, other = (
                torch.autograd.grad(out, leaves, grad, retain_graph=True)
                for grad in (strided, strided.contiguous())
            )
            assert all(torch.equal(a, b) and a.any() for a, b in zip(one, other, strict=True))
        out.sum().backward()
    assert all(leaf.grad.any() for leaf in leaves[2 if operator == "block_attention" else 0 :])


@pytest.mark.parametrize("operator, options", BACKWARDS, ids=str)
def test_a_second_derivative_is_refused(operator, options):
    call = required(arguments(operator, torch.bfloat16, 64) | options)
    with tritonemu.enabled():
        out = OPERATORS[operator](**call)
        weight = torch.ones_like(out).requires_grad_()
        (dq,) = torch.autograd.grad(out, call["q"], weight, create_graph=True)
        for to in (call["q"], call["v"], weight):
            with pytest.raises(RuntimeError, match=f"{operator} has no second derivative"):
                torch.autograd.grad(dq.sum(), to, retain_graph=True)


@pytest.mark.parametrize("names", ["q", "k", "v", "qk", "qv", "kv"])
@both
def test_only_what_needs_a_gradient_gets_one(operator, names):
    given, found = arguments(operator), []
    for of in ("qkv", names):
        call = required(given, of)
        out = OPERATORS[operator](**call)
        out.square().sum().backward(retain_graph=True)
        (alone,) = torch.autograd.grad(out, call[of[0]], torch.ones_like(out))
        assert alone.shape == given[of[0]].shape
        found.append([call[name].grad for name in "qkv"])
    for name, everything, some in zip("qkv", *found, strict=True):
        assert torch.equal(some, everything) if name in names else some is None


IMPLS = [("gdpa", impl) for impl in ("reference", "v0_eager", "v1_tiled", "v8_own_waits")]
IMPLS += [("block_attention", impl) for impl in ("reference", "v0_flash", "v1_one_tile", "v2_slab")]


@pytest.mark.parametrize("lengths", ([], [0, 0], [1], [4, 0, 5]))
@pytest.mark.parametrize("operator, impl", IMPLS)
def test_results_of_few_tokens_are_tensors_of_their_own(operator, impl, lengths):
    total, offsets = sum(lengths), cu_seqlens(lengths, "cpu")
    leaves = [torch.randn(total, 2, 64).bfloat16().requires_grad_() for _ in range(3)]
    options = {"cu_seqlens": offsets}
    if operator == "gdpa":
        longest = dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), max(lengths, default=0))
        options = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, **longest}
        options["backward_impl"] = "reference"
    with tritonemu.enabled():
        out = OPERATORS[operator](*leaves, **options, impl=impl)
        out.sum().backward()
    assert out.shape == (total, 2, 64) and out.is_contiguous()
    if operator == "block_attention" and total < 2:
        assert torch.equal(out, leaves[2])
    for leaf in leaves:
        assert leaf.grad.shape == leaf.shape
        assert out._base is not leaf and out is not leaf
        assert total == 0 or out.untyped_storage()._cdata != leaf.untyped_storage()._cdata


@both
def test_lengths_modified_before_backward_are_noticed(operator):
    call = required(arguments(operator))
    out = OPERATORS[operator](**call)
    call["cu_seqlens_k" if operator == "gdpa" else "cu_seqlens"][1] = 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@both
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64))
def test_autocast_casts_as_pytorchs_attention_does(operator, dtype):
    call = required(arguments(operator, dtype) | turned(operator))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = OPERATORS[operator](**call)
        like = torch.nn.functional.scaled_dot_product_attention(*(call[n][:, :2] for n in "qkv"))
        out.sum().backward()  # an unusual place for it
    assert out.dtype == like.dtype == (torch.float64 if dtype == torch.float64 else torch.bfloat16)
    plain = required(cast(call, out.dtype))
    expected = OPERATORS[operator](**plain)
    expected.sum().backward()
    assert torch.equal(out, expected)
    for name in "qkv":
        assert call[name].grad.dtype == dtype
        assert torch.equal(call[name].grad, plain[name].grad.to(dtype))


@both
@pytest.mark.parametrize("direction", ("forward", "backward"))
def test_autocast_does_not_reach_into_an_implementation(operator, direction, monkeypatch):
    module = reference if operator == "gdpa" else block_reference
    function, products = getattr(module, direction), []

    def watched(*args, **options):
        products.append(torch.ones(2, 2) @ torch.ones(2, 2))
        return function(*args, **options)

    monkeypatch.setattr(module, direction, watched)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        OPERATORS[operator](**arguments(operator))
        OPERATORS[operator](**required(arguments(operator))).sum().backward()
    assert len(products) == (2 if direction == "forward" else 1)
    assert {product.dtype for product in products} == {torch.float32}


@both
@pytest.mark.parametrize("transform", (torch.func.grad, torch.vmap))
@pytest.mark.parametrize("fullgraph", (False, True))
def test_a_compiled_transform_is_refused(operator, transform, fullgraph):
    function, call = OPERATORS[operator], arguments(operator)
    compiled = torch.compile(
        transform(lambda q: function(**call | {"q": q}).sum()), backend="eager", fullgraph=fullgraph
    )
    q = call["q"] if transform is torch.func.grad else call["q"].expand(2, -1, -1, -1)
    with pytest.raises(Exception, match="must be called outside torch.func transforms"):
        compiled(q)


@both
def test_a_derivative_is_never_dropped(operator):
    function, call = OPERATORS[operator], arguments(operator)

    def loss(q):
        return function(**call | {"q": q}).sum()

    transforms = pytest.raises(RuntimeError, match="must be called outside torch.func transforms")
    with transforms:
        torch.func.grad(loss)(call["q"])
    with transforms:
        torch.func.jvp(loss, (call["q"],), (call["q"],))
    with transforms:
        torch.vmap(loss)(call["q"].expand(2, -1, -1, -1))
    with forward_ad.dual_level():
        expected = function(**call)
        dual = forward_ad.make_dual(call["q"], call["q"].clone())
        with pytest.raises(RuntimeError, match="forward mode AD|jvp"):
            loss(dual)
        assert torch.equal(function(**call | {"q": forward_ad.unpack_dual(dual).primal}), expected)
    with torch.no_grad():
        assert not function(**required(call)).requires_grad
        moving = {
            name: tuple(t.requires_grad_() for t in pair) for name, pair in turned(operator).items()
        }
        assert not function(**call, **moving).requires_grad
    assert function(**call | {"v": call["v"].clone().requires_grad_()}).requires_grad


@both
@pytest.mark.parametrize("rotary", (False, True))
def test_torch_compile_sees_one_graph_forward_and_backward(operator, rotary):
    function = OPERATORS[operator]
    call = arguments(operator) | (turned(operator) if rotary else {"impl": "reference"})
    ours, expected = required(call), required(call)
    twice = compiled(lambda **kw: function(**kw) * 2)
    assert torch.equal(twice(**call), function(**call) * 2)
    out = twice(**ours)
    out.square().sum().backward()
    right = function(**expected) * 2
    right.square().sum().backward()
    assert torch.equal(out, right)
    assert_same_gradients(ours, expected)


KERNELS = [
    ("gdpa", {"impl": "v1_tiled", "backward_impl": "v1_tiled_backward"}),
    ("block_attention", {"impl": "v0_flash"}),
    ("block_attention", {"impl": "v1_one_tile"}),
]


@pytest.mark.parametrize("operator, impls", KERNELS, ids=str)
def test_torch_compile_of_a_kernel(operator, impls):
    call = arguments(operator, torch.bfloat16) | turned(operator) | impls
    ours, expected = required(call), required(call)
    with tritonemu.enabled():
        compiled(OPERATORS[operator])(**ours).sum().backward()
        OPERATORS[operator](**expected).sum().backward()
    assert_same_gradients(ours, expected)


@both
def test_torch_compile_under_autocast(operator):
    call, function = arguments(operator), OPERATORS[operator]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(compiled(function)(**call), function(**call))


@both
@pytest.mark.parametrize("count", (1, 2, 3))
def test_opcheck(operator, count):
    """Of q, k and v in so many tensors, these with rotary unless they are three."""
    call = arguments(operator) | (turned(operator) if count < 3 else {})
    if count < 3:
        rest = "kv" if count == 2 else "qkv"
        call |= {rest[0]: torch.cat([call[name] for name in rest], 1), **dict.fromkeys(rest[1:])}
    call |= {"num_kv_heads": 2} if count == 1 else {}
    call = required(call, "qkv"[:count] if count > 1 else "q")
    expected = [f"{operator}_{way}" for way in ("forward", "backward")]
    opcheck(lambda: OPERATORS[operator](**call).sum().backward(), expected)


@both
def test_a_fake_call_has_a_shape_and_no_values(operator):
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        call = {
            name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for name, value in arguments(operator).items()
        }
        out = OPERATORS[operator](**call)
        assert isinstance(out, FakeTensor) and out.shape == (TOTAL, 4, 16)
        call = required(call)
        OPERATORS[operator](**call).sum().backward()
        assert [call[name].grad.shape[1] for name in "qkv"] == [4, 2, 2]
        if operator == "gdpa":
            call = required(call | {"q": call["q"][:4], "cu_seqlens_q": None, "max_seqlen_q": 4})
            out = gdpa(**call, precise=True)
            assert out.shape == (12, 4, 16)
            out.sum().backward()
            assert [call[name].grad.shape[0] for name in "qkv"] == [4, TOTAL, TOTAL]


@both
@pytest.mark.parametrize("grad", (False, True))
def test_modes_and_profilers_see_the_operators(operator, grad):
    call = required(arguments(operator)) if grad else arguments(operator)

    def run():
        out = OPERATORS[operator](**call)
        if grad:
            out.sum().backward()

    expected = [f"{operator}_{way}" for way in ("forward", "backward")][: 1 + grad]
    with Seen() as seen:
        run()
    assert seen.names() == expected
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    events = [event.name for event in profile.events()]
    assert [events.count(f"gdpa_kernels::{name}") for name in expected] == [1] * len(expected)


@both
@pytest.mark.parametrize("shared", [False, True])
def test_an_implementation_is_chosen_once_in_each_direction(operator, shared, monkeypatch):
    chosen, there = [], ladder.resolve
    monkeypatch.setattr(ladder, "resolve", lambda *call: chosen.append(call[2]) or there(*call))
    call = required(arguments(operator))
    if shared:
        lengths = Lengths(ends(0, 4, 4, 21))
        call |= {name: lengths for name in call if name.startswith("cu_seqlens")}
    OPERATORS[operator](**call).sum().backward()
    assert chosen == ["forward", "backward"]
