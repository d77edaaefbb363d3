"""Every option of `gdpa`, and every form of its tensors: in every product against fp64, unless it
refuses what it does not declare; by finite differences, opcheck and torch.compile."""

import inspect
from collections.abc import Callable

import pytest
import torch

import tritonemu
from gdpa_kernels import Lengths, RelativeBias, gdpa
from gdpa_kernels.calling import ladder
from gdpa_kernels.gdpa import api
from gdpa_kernels.gdpa.mask import FIELDS
from gdpa_lab.measuring.inputs import cu_seqlens
from tests.calls import assert_same_bits, emulated, opcheck
from tests.gdpa.test_registration import registered_activations
from tests.test_fuzz import check_one

FP64, LENGTHS, SHORT = torch.float64, (70, 0, 33), (12, 0, 5)
TARGETS = {"causal": True, "num_targets": torch.tensor((9, 0, 3), dtype=torch.int32)}
CALLS = {
    "forms": ((), {"activation": ("sigmoid", "gelu_tanh"), "scale": 0.1, "output_scale": 0.5,
                   "precise": True, "causal": "upper_left", "window": 9}),
    "nested": ((), {"num_kv_heads": 1, "causal": True}),
    "shared": ((), {"cu_seqlens_q": None, "max_seqlen_q": 40}),
    "last rows": (("causal",), {"causal": "lower_right", "window": 9}),
    "groups": (("targets",), TARGETS | {"target_group_size": 2, "target_ranks": "own"}),
    "full rows": (("targets",), TARGETS | {"num_contexts": 2, "full_rows": 17, "window": 5}),
    "sums": (("out_dtype", "add_to"), {"out_dtype": torch.float32, "add_to": True}),
    "bias": (("bias",), {"relative_bias": True, "causal": True}),
}  # fmt: skip
"""By name: what a rung must declare to take it (`Requires.extras`); options."""
OF_THE_DEFINITION = {"impl": "reference", "backward_impl": "reference"}
TAKEN = dict.fromkeys(CALLS, {"v8_own_waits", "v6_one_tile_backward"})
TAKEN |= {
    "shared": {"v8_own_waits", "v4_warp_specialized_backward"},
    "last rows": {"v8_own_waits", "v4_warp_specialized_backward"},
    "groups": {"v8_own_waits", "v4_warp_specialized_backward"},
    "full rows": {"v8_own_waits", "v4_warp_specialized_backward"},
    "bias": {"v1_tiled", "v1_tiled_backward"},
}
"""By name: what "auto" takes in each direction."""
NEEDS = {
    "last rows": "needs causal False, True or 'upper_left', got 'lower_right'",
    "groups": "needs num_targets and",
    "full rows": "needs num_targets and",
    "sums": "needs out_dtype None",
    "bias": "needs relative_bias None, got a RelativeBias",
}
"""By name: what a lesson says."""
ELSEWHERE = {"q", "k", "v", "cu_seqlens_k", "max_seqlen_k", "impl", "backward_impl", "validate"}
PRODUCTS = [(way, x) for x in ladder.LADDERS["gdpa"][1:] if not x.is_lesson for way in x.directions]


@pytest.fixture(autouse=True)
def registered():
    with registered_activations():
        yield


def attention(
    name: str, dtype: torch.dtype, kind: torch.dtype = FP64, dim: int = 24,
    keys: tuple[int, ...] = LENGTHS, **impls,
) -> tuple[Callable[..., torch.Tensor], list[torch.Tensor]]:  # fmt: skip
    """A call as a function of its leaves, and these: numbers of dtype `kind`, in `dtype`."""
    make, options = torch.Generator().manual_seed(1), dict(CALLS[name][1])
    lengths = (keys[0] // 2, *keys[1:]) if name == "last rows" else keys
    rows, total = min(40, keys[0]) if name == "shared" else sum(lengths), sum(keys)
    sizes = [(rows, 2, dim), (total, 1, dim), (total, 1, 40 if name == "forms" else dim)]
    sizes += [(sum(lengths), 2, dim), (2, 39), (9,)]
    drawn = [torch.randn(*n, generator=make).to(kind).to(dtype) for n in sizes]
    leaves = {n: x.requires_grad_() for n, x in zip("qkv", drawn, strict=False)}
    ends = [cu_seqlens(n, "cpu").long() for n in (lengths, keys)]
    if name in ("full rows", "bias"):
        ends = [Lengths(ends[1])] * 2
    given = {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]} | options | impls
    if name == "nested":
        leaves, given = {"q": torch.cat(drawn[:3], 1).detach().requires_grad_()}, options | impls
    if name == "shared":
        given["max_seqlen_q"] = rows
    if name == "sums":
        leaves["add_to"] = drawn[3].requires_grad_()
        given["out_dtype"] = None if dtype == FP64 else torch.float32
    if name == "bias":
        leaves |= {"position": drawn[4].requires_grad_(), "time": drawn[5].requires_grad_()}

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        call = given | dict(zip(leaves, tensors, strict=True))
        if name == "nested":
            call["q"] = torch.nested.nested_tensor_from_jagged(call["q"], ends[0])
        if name == "bias":
            tables = call.pop("position"), call.pop("time")
            call["relative_bias"] = RelativeBias(*tables, torch.arange(total) * 7)
        out = gdpa(**call)
        return out.values() if out.is_nested else out

    return attend, [*leaves.values()]


def computed(name: str, way: str, dtype: torch.dtype, kind: torch.dtype, dim: int, **impls):
    """The output, or the gradients, of `attention`."""
    attend, leaves = attention(name, dtype, kind, dim, **impls)
    out = attend(*leaves)
    if way == "forward":
        return (out.detach(),)
    grad = torch.randn(*out.shape, generator=torch.Generator().manual_seed(2)).to(kind)
    return torch.autograd.grad(out, leaves, grad.to(out.dtype))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("way, rung", PRODUCTS, ids=lambda x: getattr(x, "impl", x))
def test_every_option_in_every_product(way, rung, name):
    kind = torch.float32 if rung.impl == "v0_eager" else torch.bfloat16
    how = {"kind": kind, "dim": 136 if "wide" in rung.impl else 128}
    impls = {"impl": "v1_tiled", "backward_impl": "v1_tiled_backward"}
    impls["impl" if way == "forward" else "backward_impl"] = rung.impl
    missing = set(CALLS[name][0]) - {*rung.requires.extras}
    missing -= set() if way == "forward" else {"out_dtype", "add_to"}
    with emulated(rung.impl):
        try:
            found = computed(name, way, kind, **how, **impls)
        except NotImplementedError as error:
            assert " needs " in str(error) and (missing or "a shared q" in str(error))
            return
    assert not missing
    of = dict.fromkeys(impls, "reference")
    wanted, low = (computed(name, way, dtype, **how, **of) for dtype in (FP64, kind))
    for i, three in enumerate(zip(found, wanted, low, strict=True)):
        check_one(f"{name} {i}", kind, *three)


@pytest.mark.parametrize("name", CALLS)
def test_auto_takes_a_product_and_lessons_say_what_they_need(name, monkeypatch):
    chosen, resolve = [], api.resolve
    monkeypatch.setattr(api, "resolve", lambda *call: chosen.append(resolve(*call)) or chosen[-1])
    needs, extras = NEEDS.get(name), {*CALLS[name][0]}
    with tritonemu.enabled():
        computed(name, "backward", torch.bfloat16, torch.bfloat16, 128)
        assert {rung.impl for rung in chosen} == TAKEN[name]
        for rung in ladder.RUNGS[1:] if extras else ():
            if not extras & {*rung.requires.extras}:
                with pytest.raises(NotImplementedError, match=f"impl '{rung.impl}' needs .*, got"):
                    computed(name, "forward", *[torch.bfloat16] * 2, 128, impl=rung.impl)
        if extras:
            with pytest.raises(NotImplementedError, match=f"impl 'v6_short_kv' {needs}"):
                computed(name, "forward", *[torch.bfloat16] * 2, 128, impl="v6_short_kv")


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_finite_differences(name):
    attend, leaves = attention(name, FP64, dim=3, keys=SHORT)
    assert torch.autograd.gradcheck(attend, leaves, fast_mode=True)


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name):
    attend, leaves = attention(name, torch.bfloat16, **OF_THE_DEFINITION)
    operators = ["gdpa_forward", "gdpa_backward"] + ["gdpa_bias_backward"] * (name == "bias")
    for first in (0, len(leaves) - 1):
        given = [x.detach() for x in leaves[:first]] + leaves[first:]
        opcheck(lambda given=given: attend(*given).sum().backward(), operators)


@pytest.mark.parametrize("name", CALLS)
def test_one_graph_is_compiled(name):
    attend, leaves = attention(name, torch.bfloat16, **OF_THE_DEFINITION)
    torch._dynamo.reset()
    found = []
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for function in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
            out = function(*leaves)
            found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    assert_same_bits(*found)


def test_no_option_is_left_out():
    """One that a rung declares, or that `gdpa` takes, needs a call of its own above; a history is
    of `score` (tests/serving/test_pages.py)."""
    assert {x for _, rung in PRODUCTS for x in rung.requires.extras} - {"paged_kv"} == {
        x for extras, _ in CALLS.values() for x in extras
    }
    taken = {x for _, options in CALLS.values() for x in options}
    names = {*inspect.signature(gdpa).parameters, *FIELDS}
    assert taken | ELSEWHERE == names - {"dropout_p", "mask", "mask_fields"}


def test_which_kernels_take_masks_of_the_last_rows():
    known = {"v1_tiled", "v8_own_waits", "b6_pair_stream", "b7_split_stream"}
    known |= {"v1_tiled_backward", "v4_warp_specialized_backward", "v7_wide_backward"}
    known |= {"b5_stream_backward", "b6_dq_once_backward"}
    for option in ("causal", "targets"):
        assert {x.impl for _, x in PRODUCTS if option in x.requires.extras} == known
