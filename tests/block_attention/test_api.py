"""The front door: arguments, errors, the choice of implementation, gradients, torch.compile."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import tritonemu
from gdpa_kernels import block_attention
from gdpa_kernels.block_attention import api, choices
from gdpa_kernels.block_attention.batch import Batch
from gdpa_kernels.calling import ladder
from gdpa_lab.measuring.inputs import cu_seqlens
from tests.block_attention.cases import RUNGS, Case, kernels_run, results, suited
from tests.calls import assert_same_bits, ends, opcheck, required, saved_by

PLAIN = ("v0_flash", "v1_one_tile", "v2_slab")
DIRECTIONS = ("forward", "backward")


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def arguments(dtype=torch.float64, **changes) -> dict:
    """Two sequences of 4 and 17 tokens around an empty one; blocks of 16; grouped heads."""
    return {
        "q": draw(21, 4, 16, dtype=dtype),
        "k": draw(21, 2, 16, dtype=dtype, seed=1),
        "v": draw(21, 2, 16, dtype=dtype, seed=2),
        "cu_seqlens": cu_seqlens([4, 0, 17], "cpu"),
        "block_size": 16,
    } | changes


def turns(total: int = 21, pairs: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return draw(total, pairs, seed=3), draw(total, pairs, seed=4)


TURNS = draw(21, 8)
WRONG = (
    (ValueError, "k must have q's 21 tokens, got 20", {"k": draw(20, 2, 16), "v": draw(20, 2, 16)}),
    (TypeError, "rotate_v must be a bool, got 'no'", {"rotate_v": "no"}),
    (TypeError, "validate must be a bool, got 0", {"validate": 0}),
    (ValueError, "block_size must be one of 16, 32, 64, 128, got 48", {"block_size": 48}),
    (TypeError, "block_size must .* got 16.0", {"block_size": 16.0}),
    (TypeError, "block_size must .* got True", {"block_size": True}),
    (ValueError, "backward_impl must be 'auto' or one of reference, v0_flash, .*, got 'v9'",
     {"backward_impl": "v9"}),
    (ValueError, "backward_impl 'v0_flash' needs what impl 'v0_flash' saves, got 'auto'",
     {"backward_impl": "v0_flash"}),
    (TypeError, r"rotary must be None or a pair \(sin, cos\) of tensors, got Tensor",
     {"rotary": TURNS}),
    (ValueError, "rotary .* got 3 of them", {"rotary": (TURNS,) * 3}),
    (TypeError, "cos of rotary must be a tensor, got float", {"rotary": (TURNS, 1.0)}),
    (ValueError, r"cos of rotary must have shape .* = \[21, 8\], got \[21, 16\]",
     {"rotary": (TURNS, draw(21, 16))}),
    (TypeError, "sin of rotary must have a floating-point dtype, got torch.int32",
     {"rotary": (torch.ones(21, 8, dtype=torch.int32), TURNS)}),
    (ValueError, "sin of rotary must be on q's device cpu, got meta",
     {"rotary": (torch.empty(21, 8, device="meta"), TURNS)}),
    (ValueError, r"rotary must not require gradients.*got a cos that does: use cos.detach\(\)",
     {"rotary": (TURNS, draw(21, 8).requires_grad_())}),
    (ValueError, "q must have an even head_dim to be rotated, got 15",
     {name: draw(21, 2, 15) for name in "qkv"} | {"rotary": (draw(21, 7), draw(21, 7))}),
    (ValueError, "rotate_v must be False without rotary, got True", {"rotate_v": True}),
    (TypeError, "cu_seqlens must be a tensor or Lengths, got list", {"cu_seqlens": [0, 21]}),
)  # fmt: skip
ROTARY = pytest.mark.parametrize("rotary, rotate_v", [(False, False), (True, False), (True, True)])


@pytest.mark.parametrize("error, message, changes", WRONG)
def test_wrong_arguments_say_what_is_wrong(error, message, changes):
    with pytest.raises(error, match=message):
        block_attention(**arguments(**changes))


@pytest.fixture
def everything_measured(monkeypatch):
    """Tables in which the last rungs are the fastest."""
    order = ("v4_rotary", "v3_warp_specialized", "v2_slab", *choices.UNMEASURED)
    monkeypatch.setattr(choices, "order", lambda *call: order)


def test_auto_is_the_first_that_supports_the_call(everything_measured):
    def of(size=64, dim=64, dtype=torch.bfloat16, impl="auto", change=lambda q: q, turns=None):
        q = torch.zeros(9, 2, dim, dtype=dtype)
        batch = Batch(q, change(q), q, ends(0, 9), 1.0, size, turns)
        found = {api.resolve(impl, d, batch).impl for d in DIRECTIONS}
        assert len(found) == 1
        return found.pop()

    assert of() == "reference"  # on a CPU
    sin = torch.zeros(9, 32)
    with tritonemu.enabled():
        assert of() == of(dim=128) == of(dtype=torch.float16) == "v3_warp_specialized"
        assert of(dim=96) == of(dim=72) == of(dim=256) == "v3_warp_specialized"
        assert of(turns=(sin, sin)) == "v4_rotary"
        assert of(turns=(sin, sin.double())) == of(turns=(sin.mT.mT[:, :1].expand(9, 32), sin))
        assert of(turns=(sin, sin.double())) == "v2_slab"
        assert of(size=32) == of(dim=48) == of(dtype=torch.float32) == "v1_one_tile"
        assert of(change=lambda q: torch.cat([q, q], 1)[:, 2:]) == "v3_warp_specialized"
        assert of(change=lambda q: torch.zeros(9, 64, 2).bfloat16().mT) == "v1_one_tile"
        assert of(dim=40) == of(dtype=torch.float64) == "reference"
        with pytest.raises(NotImplementedError, match="'v2_slab' needs block_size 64, got 32"):
            of(size=32, impl="v2_slab")
        with pytest.raises(NotImplementedError, match="'v1_one_tile' needs .*multiple of 16, got"):
            of(dim=40, impl="v1_one_tile")
    with pytest.raises(NotImplementedError, match="'auto' needs dtype bfloat16"):
        of(dtype=torch.float8_e5m2)
    for impl in PLAIN:
        with pytest.raises(NotImplementedError, match=f"'{impl}' needs .*CUDA.*got .*CPU"):
            block_attention(**arguments(torch.bfloat16), impl=impl)


def test_the_directions_choose_for_themselves(monkeypatch):
    order = {"forward": ("v1_one_tile",), "backward": ("v3_warp_specialized",)}
    monkeypatch.setattr(choices, "order", lambda capability, dtype, direction, *_: order[direction])
    took = []
    for direction, (impl,) in order.items():
        module = ladder.rung(impl, "block_attention").module()
        function = getattr(module, direction)

        def spy(*arguments, of=function, impl=impl, **options):
            took.append(impl)
            return of(*arguments, **options)

        monkeypatch.setattr(module, direction, spy)
    q, k, v = (draw(21, 2, 64, dtype=torch.bfloat16, seed=seed) for seed in range(3))
    call = required({"q": q, "k": k, "v": v, "cu_seqlens": ends(0, 4, 4, 21)})
    with tritonemu.enabled():
        block_attention(**call).sum().backward()
    assert took == ["v1_one_tile", "v3_warp_specialized"]
    expected = required({n: t.detach() if n in "qkv" else t for n, t in call.items()})
    block_attention(**expected, impl="reference").sum().backward()
    for name in "qkv":
        assert torch.allclose(call[name].grad, expected[name].grad, atol=0.05, rtol=0.05)


# -- Gradients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", RUNGS)
def test_results_are_those_of_the_rung(impl):
    case = suited(impl, Case("rung", (65, 0, 9)))
    tensors, options = case.tensors(torch.bfloat16), case.options()
    leaves = [tensors[name].clone().requires_grad_() for name in "qkv"]
    with kernels_run(RUNGS[impl]):
        out = block_attention(*leaves, tensors["cu_seqlens"], **options, impl=impl)
        found = out, *torch.autograd.grad(out, leaves, tensors["grad_out"])
    assert_same_bits(found, results(RUNGS[impl], tensors, options))


@ROTARY
@pytest.mark.parametrize("impl", ("reference", *PLAIN))
def test_what_is_saved(impl, rotary, rotate_v):
    """q, k, v, cu_seqlens, sin and cos themselves, and of v0_flash what it computed besides."""
    dtype, dim = torch.bfloat16, 64
    keys = 2 if impl == "v2_slab" else 1  # heads of k: v2 takes no groups
    leaves = [draw(9, heads, dim, dtype=dtype).requires_grad_() for heads in (2, keys, keys)]
    lengths, pair = ends(0, 9), turns(9, dim // 2) if rotary else None
    options = {"rotary": pair, "rotate_v": rotate_v, "impl": impl}
    with tritonemu.enabled():
        out, saved = saved_by(lambda: block_attention(*leaves, lengths, **options))
    given = [*leaves, lengths, *(pair or ())]
    assert [t.data_ptr() for t in saved[: len(given)]] == [t.data_ptr() for t in given]
    own = saved[len(given) :]
    if impl != "v0_flash":
        assert own == []
        return
    rotated = leaves[: 3 if rotate_v else 2] if rotary else []
    assert own[0].data_ptr() == out.data_ptr()
    assert own[1].dtype == torch.float32 and own[1].shape == (2, 9)
    assert [t.shape for t in own[2:]] == [t.shape for t in rotated]


# -- The operators -----------------------------------------------------------------------------


@ROTARY
def test_opcheck_of_what_v0_saves(rotary, rotate_v):
    options = {"impl": "v0_flash", "rotary": turns() if rotary else None, "rotate_v": rotate_v}
    call = required(arguments(torch.bfloat16)) | options
    operators = ["block_attention_forward", "block_attention_backward"]
    with tritonemu.enabled():
        opcheck(
            lambda: block_attention(**call).sum().backward(), operators,
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip


def test_another_batch_is_not_another_program():
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(block_attention, fullgraph=True, backend=counter, dynamic=True)
    for lengths in ([4, 0, 17], [5, 9], [3, 2, 1, 30]):
        total = sum(lengths)
        q, k, v = (draw(total, 2, 16) for _ in range(3))
        compiled(q, k, v, cu_seqlens(lengths, "cpu"), block_size=16)
    assert counter.frame_count == 1
