"""The backward rungs for sm_100: against the definition, under several schedules, under mistakes,
and as sm_100a code."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.compiler import CompiledKernel

import tritonemu
from gdpa_kernels.calling.launches import Launch, launches
from gdpa_kernels.gdpa import b1_tensor_memory_backward as b1
from gdpa_kernels.gdpa import b2_short_kv_backward as b2
from gdpa_kernels.gdpa import reference
from gdpa_kernels.measuring.compile_check import (
    SHARED_BYTES,
    TENSOR_COLUMNS,
    Compiled,
    build_launch,
    read,
    shortest_loop,
)
from gdpa_kernels.measuring.testing import assert_close
from tests.emulator.mutants import enumerate_mutants, surviving
from tests.gdpa.cases import CASES, DEVICE, Case
from tests.gdpa.test_backward_roles import (
    HALF,
    NAMES,
    OWN_CASES,
    TENSORS,
    batch_of,
    call_of,
    check,
    defined,
    problem,
)

RUNGS = {"b1_tensor_memory_backward": b1, "b2_short_kv_backward": b2}
BF16, FP16 = torch.bfloat16, torch.float16
pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="sm_100 is emulated, and compiled")


def gradients(module, call: dict, schedule: str | int = "modelled", **more) -> tuple:
    """(dq, dk, dv) of a rung, emulated."""
    with tritonemu.enabled("sm_100", schedule=schedule, max_steps=100_000):
        return module.backward(call["grad_out"], batch_of(call), **more)


# -- The definition --------------------------------------------------------------------------------

ALL_CASES = [
    *CASES,
    *OWN_CASES,
    Case("wide", (140, 0, 129, 5), (256, 130, 0, 1), num_heads=1, num_heads_k=1, head_dim=128),
    Case("wide_grouped", (130, 9), (40, 250), 2, 1, 128, options={"causal": True, "window": 70}),
    Case("wide_per_head", (60,), None, 2, 2, 128, options={"activation": ("gelu", "silu")}),
]


@pytest.mark.parametrize(
    "impl, case, dtype",
    [
        (impl, case, dtype)
        for impl in RUNGS
        for case in ALL_CASES
        for dtype in (BF16, FP16)
        if problem(impl, call_of(case, dtype)) is None
        and (dtype == BF16 or case.name in (*HALF, "wide"))
    ],
    ids=str,
)
def test_matches_the_definition(impl, case, dtype):
    check(partial(gradients, RUNGS[impl]), case, dtype)


@pytest.mark.parametrize("impl", RUNGS)
def test_every_activation(impl):
    names = tuple(reference.ACTIVATIONS)
    heads = {"num_heads": len(names), "num_heads_k": len(names)}
    call = call_of(Case("all", (33, 70), **heads, options={"activation": names}), BF16)
    found = gradients(RUNGS[impl], call), defined(call, torch.float64), defined(call, BF16)
    for name, *results in zip(NAMES, *found, strict=True):
        for head, activation in enumerate(names):
            actual, expected, baseline = (result[:, head] for result in results)
            assert_close(
                name=f"{name} of {activation}", actual=actual, expected=expected, baseline=baseline
            )


@pytest.mark.parametrize("scale", (1e-6, 1e4))
@pytest.mark.parametrize("impl", RUNGS)
def test_any_logits(impl, scale):
    """Saturated and vanishing logits: finite, and right."""
    options = {"activation": ("gelu", "gelu_tanh", "silu", "hardswish"), "scale": scale}
    case = Case("logits", (40, 9), num_heads=4, num_heads_k=4, options=options)
    check(partial(gradients, RUNGS[impl]), case, BF16)


@pytest.mark.parametrize("impl", RUNGS)
def test_strided_and_expanded_arguments(impl):
    def change(call):
        q, v, grad = call["q"], call["v"], call["grad_out"]
        wide = q.new_full((q.shape[0], q.shape[1] + 1, q.shape[2] + 8), float("nan"))
        wide[:, 1:, 8:] = q
        return call | {
            "q": wide[:, 1:, 8:],
            "k": call["k"].transpose(0, 1).contiguous().transpose(0, 1),
            "v": torch.stack((v, v.flip(0)), 1)[:, 0],
            "grad_out": grad[:, :1].expand_as(grad),
        }

    check(partial(gradients, RUNGS[impl]), Case("strided", (65, 0, 40)), BF16, change=change)


@pytest.mark.parametrize("impl", RUNGS)
def test_neighbours_do_not_leak(impl):
    """Other sequences hold NaN, or large values: this one's gradients are bitwise equal."""
    call = call_of(Case("grouped", (5, 130, 64), (200, 3, 256), num_heads_k=1), BF16)
    before = gradients(RUNGS[impl], call)
    ends = [call[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k")]
    for own in range(3):
        rows, keys = (slice(values[own], values[own + 1]) for values in ends)
        poison = (float("nan"), -3e38)[own % 2]

        def poisoned(name, rows=rows, keys=keys, poison=poison):
            part = keys if name in ("k", "v") else rows
            changed = torch.full_like(call[name], poison)
            changed[part] = call[name][part]
            return changed

        after = gradients(RUNGS[impl], call | {name: poisoned(name) for name in TENSORS})
        for name, part, a, b in zip(NAMES, (rows, keys, keys), after, before, strict=True):
            assert torch.equal(a[part], b[part]), (name, own, poison)


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("impl", RUNGS)
def test_own_nan_stays_visible(impl, name):
    """A NaN of the sequence's own reaches what depends on it, and nothing else."""
    call = call_of(Case("nan", (6, 70)), BF16)
    call[name][2, 0, 3] = float("nan")
    dq, dk, dv = gradients(RUNGS[impl], call)
    reached = {
        "grad_out": (dq[2, 0], dk[:6, 0], dv[:6, 0, 3]),
        "q": (dq[2, 0], dk[:6, 0], dv[:6, 0]),
        "k": (dq[:6, 0], dk[2, 0], dv[2, 0]),
        "v": (dq[:6, 0], dk[2, 0]),
    }[name]
    assert all(part.isnan().all() for part in reached)
    nans = sum(part.numel() for part in reached)
    assert sum(int(result.isnan().sum()) for result in (dq, dk, dv)) == nans


@pytest.mark.parametrize(
    "case",
    (
        Case("causal", (5, 300, 0), (256, 40, 7), 4, 2, options={"causal": True}),
        Case("no_keys", (3, 4), (0, 0)),
        Case("no_queries", (0, 0), (3, 4), head_dim=128),
    ),
    ids=str,
)
@pytest.mark.parametrize("impl", RUNGS)
def test_gradients_are_written_whole(impl, case, monkeypatch):
    """Memory is full of NaN before the call, and every element is finite after it."""
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor,
        "new_empty",
        lambda self, *shape, **options: empty(self, *shape, **options).fill_(float("nan")),
    )
    for name, result in zip(NAMES, gradients(RUNGS[impl], call_of(case, BF16)), strict=True):
        assert result.isfinite().all() and result.is_contiguous(), name


@settings(deadline=None, max_examples=3)
@given(data=st.data())
@pytest.mark.parametrize("impl", RUNGS)
def test_random_batches_and_options(impl, data):
    lengths_q = data.draw(st.lists(st.integers(0, 200), min_size=1, max_size=3))
    most = 256 if impl == "b2_short_kv_backward" else 300
    lengths_k = [data.draw(st.integers(0, most)) for _ in lengths_q]
    group, heads_k = data.draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (3, 1)]))
    case = Case(
        "random",
        tuple(lengths_q),
        tuple(lengths_k),
        num_heads=group * heads_k,
        num_heads_k=heads_k,
        head_dim=data.draw(st.sampled_from([64, 128])),
        options={
            "activation": data.draw(st.sampled_from(sorted(reference.ACTIVATIONS))),
            "causal": data.draw(st.booleans()),
            "window": data.draw(st.none() | st.integers(0, 300)),
            "output_scale": data.draw(st.sampled_from([1.0, 1 / 128])),
        },
    )
    dtype = data.draw(st.sampled_from((BF16, FP16)))
    check(partial(gradients, RUNGS[impl]), case, dtype, seed=data.draw(st.integers(0, 99)))


# -- Schedules -------------------------------------------------------------------------------------

# On two CTAs: items follow each other there, and the last round is not full.
ORDERS = {
    "b1, one tile of keys": (b1, Case("orders", (260, 0, 9, 1), (128, 5, 100, 0), 1, 1, 128)),
    "b1, two tiles of keys": (b1, Case("orders", (130, 0, 70), (256, 5, 129), 1, 1)),
    "b2": (b2, Case("orders", (260, 0, 9), (256, 5, 129), 1, 1, 128)),
    "b2, grouped": (b2, Case("orders", (130, 0, 9), (256, 5, 129), 2, 1)),
}


@pytest.mark.parametrize("name", ORDERS)
def test_twenty_schedules_give_the_same_bits(name):
    """No race, no deadlock; at most two tiles of keys add to a row of dQ, and two commute."""
    module, case = ORDERS[name]
    call = call_of(case, BF16) | {"activation": ("relu",)}
    with tritonemu.enabled("sm_100", multiprocessors=2, max_steps=100_000):
        expected = module.backward(call["grad_out"], batch_of(call))
    for seed in range(20):
        with tritonemu.enabled("sm_100", multiprocessors=2, schedule=seed, max_steps=100_000):
            found = module.backward(call["grad_out"], batch_of(call))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), seed


def test_three_tiles_of_keys_keep_the_budget_in_any_order():
    case = Case("orders", (130, 0, 70), (300, 5, 129), 1, 1)
    for schedule in range(2):
        check(partial(gradients, b1, schedule=schedule), case, BF16)


@pytest.mark.parametrize("config", ({"q_stages": 3, "g_stages": 2}, {"fold": False}), ids=str)
@pytest.mark.parametrize("impl", RUNGS)
def test_any_config(impl, config):
    config = RUNGS[impl].Config(**config)
    check(partial(gradients, RUNGS[impl], config=config), Case("config", (300, 7), (70, 1)), BF16)


# -- What a call must meet -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "impl, change, text",
    [
        ("b2_short_kv_backward", {"max_seqlen_k": 257}, "a max_seqlen_k of at most 256, got 257"),
        ("b2_short_kv_backward", {"cu_seqlens_q": None}, "cu_seqlens_q, got None: a shared q"),
        ("b1_tensor_memory_backward", {"max_seqlen_k": 257}, None),
        ("b1_tensor_memory_backward", {"cu_seqlens_q": None}, None),
    ],
)
def test_rungs_say_what_they_need(impl, change, text):
    call = call_of(Case("needs", (256,), head_dim=128), BF16) | change
    assert problem(impl, call) == (text and f"needs {text}")


@pytest.mark.parametrize("impl", RUNGS)
def test_of_head_dims_64_and_128_alone(impl):
    for head_dim in (64, 128):
        assert problem(impl, call_of(Case("dim", (5,), head_dim=head_dim), BF16)) is None
    for head_dim in (16, 96, 256):
        assert "head_dim" in problem(impl, call_of(Case("dim", (5,), head_dim=head_dim), BF16))


def test_which_results_are_deterministic():
    def of(impl, **change):
        call = call_of(Case("bits", (5,)), BF16) | change
        return RUNGS[impl].is_deterministic(batch_of(call))

    assert of("b1_tensor_memory_backward", max_seqlen_k=256)
    assert not of("b1_tensor_memory_backward", max_seqlen_k=257)
    assert not of("b1_tensor_memory_backward", cu_seqlens_q=None)
    assert not hasattr(b2, "is_deterministic")  # always


# -- Mistakes --------------------------------------------------------------------------------------

# One CTA, or cluster, with several tiles of keys, or items: every slot is used several times over.
SMALL = {
    "b1_tensor_memory_backward": (
        Case("narrow", (260, 130), (128, 130), 1, 1),
        Case("wide", (300, 5), (128, 130), 1, 1, head_dim=128),
    ),
    "b2_short_kv_backward": (
        Case("narrow", (260, 130), (200, 5), 1, 1),
        Case("wide", (300, 5), (256, 130), 1, 1, head_dim=128),
    ),
}


def _launch(impl: str, case: Case, expected: tuple | None, module, schedule: str | int) -> tuple:
    """(dq, dk, dv) of a changed rung on one CTA or cluster: AssertionError if not `expected`.

    relu is cheap, and a dQ is a sum of at most two: every order gives the same bits.
    """
    call = call_of(case, BF16) | {"activation": ("relu",)}
    ctas = 2 if impl == "b2_short_kv_backward" else 1
    with tritonemu.enabled("sm_100", multiprocessors=ctas, schedule=schedule, max_steps=50_000):
        found = module.backward(call["grad_out"], batch_of(call))
    if expected is not None:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return found


@pytest.mark.parametrize("impl", RUNGS)
def test_every_harmful_mistake_in_synchronisation_is_found(impl):
    module = RUNGS[impl]
    launched = [
        partial(_launch, impl, case, _launch(impl, case, None, module, "modelled"))
        for case in SMALL[impl]
    ]
    tested, found = surviving(module, "backward_kernel", launched)
    every = enumerate_mutants(Path(module.__file__), "backward_kernel")
    assert tested == len(every) > 100
    assert [mutant.what for mutant in found] == []


# -- Code for sm_100a ------------------------------------------------------------------------------


@cache
def compiled(
    impl: str,
    dtype: torch.dtype = BF16,
    head_dim: int = 128,
    heads_k: int = 4,
    activation: str = "gelu_tanh",
    **options,
) -> tuple[CompiledKernel, Compiled, Launch]:
    """The main kernel of a rung for 4 query heads, what became of it, and its launch."""
    options["activation"] = activation
    call = call_of(Case("compiled", (64, 3), None, 4, heads_k, head_dim, options=options), dtype)
    with launches(run=False) as seen:
        RUNGS[impl].backward(call["grad_out"], batch_of(call))
    (launched,) = (launch for launch in seen if launch.name == "backward_kernel")
    built = build_launch(launched, capability=100)
    return built, read(built), launched


# Bytes that are spilled: constants that roles carry into their loops, and outside of these.
MOST_SPILLED = 64
LOCAL = ("LDL", "STL")


@pytest.mark.parametrize(
    "options",
    (
        {},
        {"head_dim": 64},
        {"heads_k": 2, "causal": True, "window": 40},
        {"dtype": FP16, "activation": "gelu", "window": 40},
    ),
    ids=str,
)
@pytest.mark.parametrize("impl", RUNGS)
def test_fits_and_does_not_spill_in_loops(impl, options):
    built, made, _ = compiled(impl, **options)
    assert made.shared_bytes <= SHARED_BYTES[100]
    assert built.metadata.tmem_size == TENSOR_COLUMNS
    assert made.registers == 65536 // 512 and made.spill_bytes <= MOST_SPILLED
    for loop in (shortest_loop(built, "MUFU", 64), shortest_loop(built, "UTCHMMA", 24)):
        assert not [name for name in loop if name in LOCAL]


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("impl", RUNGS)
def test_instructions_that_make_the_rung(impl, head_dim):
    """An MMA instruction sums over 16; dQ and dK stand behind the loop over steps once more. No
    commit is the compiler's own, which pipelines loops with MMAs unless it is told not to."""
    _, made, _ = compiled(impl, head_dim=head_dim)
    count = made.instructions
    over_dim, over_128 = head_dim // 16, 128 // 16
    assert count["UTCHMMA"] == 2 * over_dim + over_128 + 2 * 2 * over_128
    assert count["UTCBAR"] == 3 + 2 * 2 + 2  # S, dP, dV; dQ, dK twice; the tile's end
    assert count["UTMALDG"] == (head_dim // 64) * (2 + 2 * 2)  # the first step is peeled
    assert count["STTM"] == 2 * 2  # P of two roles in two parts
    assert count["USETMAXREG"] > 0
    assert not {"RED", "REDG", "ATOM", "ATOMG"} & set(count)
    epilogue = 2 * head_dim // 64
    if impl == "b1_tensor_memory_backward":
        assert count["LDTM"] == 2 * 4 + epilogue + head_dim // 32
        assert (count["UTMAREDG"], count["UTMASTG"], count["STAS"]) == (head_dim // 32, 2, 0)
    else:
        assert count["LDTM"] == 2 * 4 + epilogue + 2
        # 4 bytes of fp32 for each of 128 rows and half of the columns, 16 bytes a thread.
        stores = 128 * (head_dim // 2) * 4 // (128 * 16)
        assert (count["UTMAREDG"], count["UTMASTG"], count["STAS"]) == (0, 3, stores)


def test_ctas_of_b2_come_in_clusters_of_two():
    """Each MMA is of one CTA all the same."""
    built, made, launched = compiled("b2_short_kv_backward")
    assert launched.options["ctas_per_cga"] == (2, 1, 1) and launched.grid[0] % 2 == 0
    assert made.instructions["UCGABAR"] >= 2 and "cta_group::2" not in built.asm["ptx"]
    assert compiled("b1_tensor_memory_backward")[1].instructions["UCGABAR"] == 0
