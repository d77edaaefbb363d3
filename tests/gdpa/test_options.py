"""Every option of `gdpa`, and every form of its tensors, in every product against fp64; a product
that does not declare an option refuses it."""

import inspect

import pytest
import torch

from gdpa_kernels import RelativeBias, gdpa
from gdpa_kernels.calling import ladder
from gdpa_lab.measuring.inputs import cu_seqlens
from tests.calls import emulated
from tests.gdpa.test_registration import registered_activations
from tests.test_fuzz import check_one

FP64, LENGTHS, LAST = torch.float64, (70, 0, 33), (40, 0, 33)
TARGETS = {"causal": True, "num_targets": torch.tensor((9, 0, 3), dtype=torch.int32)}
CALLS = {
    "forms": ((), {"activation": ("sigmoid", "gelu_tanh"), "scale": 0.1, "output_scale": 0.5,
                   "precise": True, "causal": "upper_left", "window": 20}),
    "nested": ((), {"num_kv_heads": 1, "causal": True}),
    "shared": ((), {"cu_seqlens_q": None, "max_seqlen_q": 40}),
    "last rows": (("causal",), {"causal": "lower_right", "window": 20}),
    "groups": (("targets",), TARGETS | {"target_group_size": 2, "target_ranks": "own"}),
    "full rows": (("targets",), TARGETS | {"num_contexts": 2, "full_rows": 17, "window": 5}),
    "sums": (("out_dtype", "add_to"), {"out_dtype": torch.float32, "add_to": True}),
    "bias": (("bias",), {"relative_bias": True, "causal": True}),
}  # fmt: skip
"""By name: what a rung must declare to take it (`Requires.extras`); options."""
ELSEWHERE = {"q", "k", "v", "cu_seqlens_k", "max_seqlen_k", "impl", "backward_impl", "validate"}
PRODUCTS = [(way, x) for x in ladder.LADDERS["gdpa"][1:] if not x.is_lesson for way in x.directions]


def computed(
    name: str, way: str, dtype: torch.dtype, kind: torch.dtype, dim: int, **impls
) -> tuple:
    """The output, or the gradients, of a call on numbers of dtype `kind`, computed in `dtype`."""
    make, options = torch.Generator().manual_seed(1), dict(CALLS[name][1])
    lengths = LAST if name == "last rows" else LENGTHS
    rows, keys = 40 if name == "shared" else sum(lengths), sum(LENGTHS)
    sizes = [(rows, 2, dim), (keys, 1, dim), (keys, 1, 40 if name == "forms" else dim)]
    sizes += [(sum(lengths), 2, dim), (2, 39), (9,)]
    drawn = [torch.randn(*n, generator=make).to(kind).to(dtype) for n in sizes]
    q, k, v, added, *tables = [x.requires_grad_() for x in drawn]
    ends = [cu_seqlens(n, "cpu").long() for n in (lengths, LENGTHS)]
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}
    leaves = [q, k, v]
    if name == "nested":
        given = {"q": torch.nested.nested_tensor_from_jagged(torch.cat(leaves, 1), ends[0])}
    if name == "sums":
        options |= {"add_to": added, "out_dtype": None if dtype == FP64 else torch.float32}
        leaves.append(added)
    if name == "bias":
        options["relative_bias"] = RelativeBias(*tables, torch.arange(keys) * 7)
        leaves += tables
    with registered_activations():
        out = gdpa(**given | options, **impls)
        out = out.values() if out.is_nested else out
        if way == "forward":
            return (out.detach(),)
        grad = torch.randn(*out.shape, generator=make).to(kind)
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


def test_no_option_is_left_out():
    """One that a rung declares, or that `gdpa` takes, needs a call of its own above; a history is
    of `score` (tests/serving/test_pages.py)."""
    assert {x for _, rung in PRODUCTS for x in rung.requires.extras} - {"history"} == {
        x for extras, _ in CALLS.values() for x in extras
    }
    taken = {x for _, options in CALLS.values() for x in options}
    assert taken | ELSEWHERE == {*inspect.signature(gdpa).parameters} - {"dropout_p"}


def test_the_docstring_names_the_kernels_that_take_masks_of_the_last_rows():
    told = " ".join(gdpa.__doc__.split()).lower()
    assert told.count("of the kernels v8, backward v4 and the v1 take it") == 2
    known = {"v1_tiled", "v8_own_waits", "v1_tiled_backward", "v4_warp_specialized_backward"}
    for option in ("causal", "targets"):
        assert {x.impl for _, x in PRODUCTS if option in x.requires.extras} == known
