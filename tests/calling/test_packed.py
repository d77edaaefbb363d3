"""q, k and v, or k and v, side by side in one tensor: results, one gradient, who writes it."""

import pytest
import torch

import tritonemu
from gdpa_kernels import Lengths, block_attention, gdpa
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import launches
from gdpa_lab.measuring.inputs import cu_seqlens
from tests.calls import Seen, emulated
from tests.tiers import sweep, swept

LENGTHS = [4, 0, 17]
TOTAL = sum(LENGTHS)
HEADS = {"equal": (2, 2), "grouped": (4, 2), "one key head": (3, 1)}


def ends() -> torch.Tensor:
    return cu_seqlens(LENGTHS, "cpu")


def turns(head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.randn(TOTAL, head_dim // 2)
    return angles.sin(), angles.cos()


OPERATORS = {
    "gdpa": lambda q, k, v, **o: gdpa(q, k, v, ends(), ends(), 17, 17, **o),
    "block": lambda q, k, v, **o: block_attention(q, k, v, ends(), **{"block_size": 16} | o),
}


def leaves(heads: tuple[int, int], head_dim: int = 16, dtype=torch.float64) -> list[torch.Tensor]:
    """q, k and v that want gradients."""
    numbers = heads[0], heads[1], heads[1]
    tensors = [torch.randn(TOTAL, n, head_dim).to(dtype) for n in numbers]
    return [x.requires_grad_() for x in tensors]


def side_by_side(tensors: list[torch.Tensor], count: int) -> list[torch.Tensor | None]:
    """Leaves: the last `count` of q, k and v as one, then None."""
    alone, together = tensors[: 3 - count], tensors[3 - count :]
    whole = torch.cat(together, 1).detach().requires_grad_()
    return [*(x.detach().requires_grad_() for x in alone), whole, *[None] * (count - 1)]


def compare(call, heads, count, whole=lambda x: x, **options) -> None:
    """A packed call and the call of three, in values and in every gradient."""
    tensors = options.pop("tensors", None) or leaves(HEADS[heads])
    given = side_by_side(tensors, count)
    number = HEADS[heads][1] if count == 3 and heads != "equal" else None
    options["num_kv_heads"] = number
    changed = [x if x is None or i != 3 - count else whole(x) for i, x in enumerate(given)]
    out = call(*changed, **options)
    expected = call(*tensors, **options | {"num_kv_heads": None})
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(expected)
    out.backward(weights)
    expected.backward(weights)
    grads = [x.grad for x in tensors]
    wanted = [*grads[: 3 - count], torch.cat(grads[3 - count :], 1)]
    for x, grad in zip(given, wanted, strict=False):
        assert x.grad.is_contiguous() and grad.abs().max() > 0
        torch.testing.assert_close(x.grad, grad)


@pytest.mark.parametrize("count", (2, 3))
@pytest.mark.parametrize("heads", (*HEADS, "of each in a dimension of their own"))
@pytest.mark.parametrize("operator", OPERATORS)
def test_is_the_call_of_three(operator, heads, count):
    if heads in HEADS:
        compare(OPERATORS[operator], heads, count)
    else:
        compare(OPERATORS[operator], "equal", count, lambda x: x.unflatten(1, (count, -1)))


@pytest.mark.parametrize("operator", OPERATORS)
def test_torch_compile(operator):
    torch._dynamo.reset()
    compiled = torch.compile(OPERATORS[operator], fullgraph=True, backend="aot_eager")
    for count in (2, 3):
        compare(compiled, "grouped", count)


def test_a_shared_q_with_packed_keys():
    seeds, kv = torch.randn(3, 4, 16), torch.randn(TOTAL, 4, 16)
    given = [x.double().requires_grad_() for x in (seeds, kv)]
    lengths = Lengths(ends())
    out = gdpa(*given, None, None, lengths)
    expected = gdpa(given[0], *given[1].chunk(2, 1), None, lengths)
    torch.testing.assert_close(out, expected)
    assert out.shape == (9, 4, 16)
    found, wanted = (torch.autograd.grad(x.square().sum(), given) for x in (out, expected))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("wanted", ("q", "kv"))
def test_only_what_is_asked_for(wanted):
    for call in OPERATORS.values():
        q, kv, _ = side_by_side(leaves(HEADS["grouped"]), 2)
        expected = torch.autograd.grad(call(q, kv, None).sum(), (q, kv))
        other = kv if wanted == "q" else q
        other.requires_grad_(False)
        call(q, kv, None).sum().backward()
        assert other.grad is None
        grad, other = (q.grad, expected[0]) if wanted == "q" else (kv.grad, expected[1])
        assert torch.equal(grad, other)


HEAD_DIM = {"block": 64, "gdpa": 128}
RUNGS_OF = {"block": "block_attention", "gdpa": "gdpa"}
IN_PLACE = [("block", rung.impl) for rung in ladder.LADDERS["block_attention"]]
IN_PLACE += [
    ("gdpa", rung.impl) for rung in (*ladder.BACKWARD_RUNGS[3:], *ladder.BLACKWELL_BACKWARD_RUNGS)
]


@pytest.mark.parametrize("count", (sweep(2), 3))
@pytest.mark.parametrize(
    "operator, impl",
    swept(
        [(operator, impl) for operator, impl in IN_PLACE if impl != "reference"],
        lambda operator, impl: not ladder.rung(impl, RUNGS_OF[operator]).is_lesson,
    ),
)
def test_kernels_write_the_gradient_where_it_lies(operator, impl, count):
    heads = "equal" if impl == "v2_slab" else "grouped"
    head_dim = 256 if "wide" in impl else HEAD_DIM[operator]
    tensors = leaves(HEADS[heads], head_dim, torch.bfloat16)
    options = {"impl": "reference", "backward_impl": impl}
    if operator == "block":
        options = {"impl": impl, "block_size": 64}
        options |= {} if impl.startswith("v3") else {"rotary": turns(64)}
    with emulated(impl):
        compare(OPERATORS[operator], heads, count, tensors=tensors, **options)
        given = side_by_side(tensors, count)
        number = 2 if count == 3 else None
        out = OPERATORS[operator](*given, **options, num_kv_heads=number)
        with launches() as seen, Seen() as operators:
            found = torch.autograd.grad(out, given[: 4 - count], torch.ones_like(out))
    packed = found[3 - count].untyped_storage().data_ptr()
    arguments = [getattr(x, "base", x) for launch in seen for x in launch.arguments.values()]
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    assert sum(x.untyped_storage().data_ptr() == packed for x in tensors) >= count
    assert not {*operators.names("aten")} & {"cat", "stack", "copy_", "slice_backward"}


@pytest.mark.parametrize("count", (2, 3))
def test_kernels_that_write_gradients_of_their_own(count):
    with tritonemu.enabled():
        compare(
            OPERATORS["gdpa"], "grouped", count, tensors=leaves((4, 2), 128, torch.bfloat16),
            impl="v1_tiled", backward_impl="v1_tiled_backward",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "options", "message"),
    (
        (((9, 4, 16), None, None), {}, "q must have shape .* multiple of 3 heads, .*got .9, 4, 16"),
        (((9, 64), None, None), {}, r"q must have shape .*got \[9, 64\]"),
        (((9, 2, 4, 16), None, None), {}, r"q must have shape .*\[total, 3, num_heads, head_dim\]"),
        (((9, 4, 16), (9, 3, 16), None), {}, "k must have shape .* multiple of 2 heads"),
        (((9, 6, 16), None, None), {"num_kv_heads": 3}, "from 1 to a third of q's 6 heads, got 3"),
        (((9, 6, 16), None, None), {"num_kv_heads": 0}, "from 1 to a third of q's 6 heads, got 0"),
        (((9, 6, 16), None, None), {"num_kv_heads": True}, "must be an integer .*, got True"),
        (((9, 3, 4, 16), None, None), {"num_kv_heads": 2}, "num_kv_heads must be None or 4 with"),
        (((9, 7, 16), None, None), {"num_kv_heads": 2}, "q must have a multiple of k's 2 heads"),
        (((9, 4, 16),) * 3, {"num_kv_heads": 4}, "num_kv_heads must be None unless .*, got 4"),
        (((9, 4, 16), None, (9, 4, 16)), {}, "k must be a tensor, got NoneType"),
    ),
)  # fmt: skip
def test_wrong_arguments_say_what_is_wrong(given, options, message):
    tensors = [None if shape is None else torch.ones(shape) for shape in given]
    lengths = cu_seqlens([4, 5], "cpu")
    with pytest.raises((TypeError, ValueError), match=message):
        gdpa(*tensors, lengths, lengths, 5, 5, **options)
    with pytest.raises((TypeError, ValueError), match=message):
        block_attention(*tensors, lengths, **options)
