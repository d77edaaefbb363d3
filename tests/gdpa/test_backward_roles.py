"""The warp-specialized backward rungs: against the definition and under mistakes; those for Hopper
under several schedules and as code too, those for Blackwell in `test_tensor_memory_backward`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tritonemu
from _lib.compile_check import Compiled, build_launch, shortest_loop
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import Launch, launches
from gdpa_kernels.gdpa import reference
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.kernels import b1_tensor_memory_backward as b1
from gdpa_kernels.gdpa.kernels import b2_short_kv_backward as b2
from gdpa_kernels.gdpa.kernels import v4_warp_specialized_backward as v4
from gdpa_kernels.gdpa.kernels import v5_short_kv_backward as v5
from gdpa_kernels.gdpa.kernels import v6_one_tile_backward as v6
from gdpa_kernels.gdpa.kernels import v7_wide_backward as v7
from gdpa_lab.measuring.testing import assert_close
from tests.block_attention.compiling import compile_launch
from tests.emulator.mutants import Mutant, enumerate_mutants, import_file, judge, surviving
from tests.gdpa.cases import CASES, DEVICE, Case
from tests.gdpa.test_backward import backwards
from tests.gdpa.test_forward import kernels_run

HOPPER = {
    "v4_warp_specialized_backward": v4, "v5_short_kv_backward": v5, "v6_one_tile_backward": v6,
    "v7_wide_backward": v7,
}  # fmt: skip
BLACKWELL = {"b1_tensor_memory_backward": b1, "b2_short_kv_backward": b2}
EMULATED = BLACKWELL if DEVICE == "cpu" else {}
RUNGS = HOPPER | EMULATED
# That a test takes which is not about head_dim.
HEAD_DIM = {**dict.fromkeys(HOPPER, 128), "v7_wide_backward": 256, **dict.fromkeys(BLACKWELL, 64)}
BF16, FP16 = torch.bfloat16, torch.float16
NAMES = ("dq", "dk", "dv")
TENSORS = ("grad_out", "q", "k", "v")
emulated = pytest.mark.skipif(DEVICE == "cuda", reason="is about the emulator")


def call_of(case: Case, dtype: torch.dtype, seed: int = 0) -> dict:
    """grad_out from N(0, 1), and the fields of a rung's batch."""
    options = {
        "activation": ("gelu_tanh",), "scale": case.head_dim**-0.5, "output_scale": 1.0,
        "causal": False, "window": None,
    }  # fmt: skip
    found = options | case.arguments(dtype, seed)
    if isinstance(found["activation"], str):
        found["activation"] = (found["activation"],)
    q, batch = found["q"], found["cu_seqlens_k"].numel() - 1
    rows = q.shape[0] * (batch if found["cu_seqlens_q"] is None else 1)
    make = torch.Generator().manual_seed(seed + 1000)
    grad_out = torch.randn(rows, *q.shape[1:], generator=make).to(q)
    return {"grad_out": grad_out, **found}


def batch_of(call: dict) -> Batch:
    """The batch of a rung's call, without its grad_out."""
    return Batch(**{name: value for name, value in call.items() if name != "grad_out"})


def problem(impl: str, call: dict) -> str | None:
    """Why a rung cannot take a call, or None."""
    return ladder.rung(impl, "gdpa_backward").problem(batch_of(call))


def gradients(module, call: dict, **more) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of a rung."""
    with kernels_run("b1_tensor_memory" if module in BLACKWELL.values() else ""):
        return module.backward(call["grad_out"], batch_of(call), **more)


def defined(call: dict, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of the definition, computed in `dtype`."""
    cast = {name: t.to(dtype) if name in TENSORS else t for name, t in call.items()}
    return reference.backward_in_dtype(cast["grad_out"], batch_of(cast))


def check(
    compute: Callable[[dict], tuple], case: Case, dtype: torch.dtype, seed: int = 0,
    change: Callable[[dict], dict] = lambda call: call,
) -> None:  # fmt: skip
    """Hold the gradients to the error budget; small ones are drawn several times over.

    compute: (dq, dk, dv) of a call. change: what is done to the call first.
    """
    found: list[list[tuple]] = []
    while not found or 0 < sum(f[0][0].numel() for f in found) < 2048 and len(found) < 6:
        call = change(call_of(case, dtype, seed + len(found)))
        results = compute(call), defined(call, torch.float64), defined(call, dtype)
        found.append(list(zip(*results, strict=True)))
    for i, name in enumerate(NAMES):
        actual, expected, baseline = (torch.cat([f[i][j] for f in found]) for j in range(3))
        assert_close(name=name, actual=actual, expected=expected, baseline=baseline)


MOST_KEYS = {"v5_short_kv_backward": 256, "v6_one_tile_backward": 128, "b2_short_kv_backward": 256}
OWN_CASES = [
    Case("three_tiles_of_keys", (70, 5, 0), (300, 130, 257), num_heads=1, num_heads_k=1),
    Case("all_keys_of_v5", (70, 5, 0, 129), (256, 129, 255, 1), num_heads=1, num_heads_k=1),
    Case("grouped_causal_window", (150, 64, 3), num_heads=4, options={"causal": True, "window": 9}),
    Case("shared_q_grouped", (70, 70), (130, 9), num_heads=4, shared_q=True),
    Case("one_item", (7,), num_heads=1, num_heads_k=1),
]
ALL_CASES = [*CASES, *OWN_CASES]
ALSO_WIDE = ("empty_sequences", "packed_qkv", "grouped_heads", *(case.name for case in OWN_CASES))
HALF = ("empty_sequences", "grouped_causal_window", "all_keys_of_v5", "per_head", "wide")
WIDE = [
    replace(
        case, head_dim=128, **({"num_heads": 1, "num_heads_k": 1} if case.num_heads == 2 else {})
    )
    for case in ALL_CASES
    if case.head_dim == 64
]
WIDE_BLACKWELL = [
    Case("wide", (140, 0, 129, 5), (256, 130, 0, 1), num_heads=1, num_heads_k=1, head_dim=128),
    Case("wide_grouped", (130, 9), (40, 250), 2, 1, 128, options={"causal": True, "window": 70}),
    Case("wide_per_head", (60,), None, 2, 2, 128, options={"activation": ("gelu", "silu")}),
]
TAKEN = [
    *(("v4_warp_specialized_backward", case) for case in ALL_CASES),
    *(("v4_warp_specialized_backward", case) for case in WIDE if case.name in ALSO_WIDE),
    *(("v5_short_kv_backward", case) for case in (*ALL_CASES, *WIDE)),
    *(("v6_one_tile_backward", case) for case in (*ALL_CASES, *WIDE)),
    *(("v7_wide_backward", replace(case, head_dim=256)) for case in WIDE),
    *(("v7_wide_backward", replace(case, head_dim=136)) for case in WIDE if case.name in HALF),
    ("v7_wide_backward", Case("head_dim_200", (70, 5), (64, 130), head_dim=200)),
    *((impl, case) for impl in EMULATED for case in (*ALL_CASES, *WIDE_BLACKWELL)),
]


@pytest.mark.parametrize(
    "impl, case, dtype",
    [
        (impl, case, dtype)
        for impl, case in TAKEN
        for dtype in (BF16, FP16)
        if problem(impl, call_of(case, dtype)) is None and (dtype == BF16 or case.name in HALF)
    ],
    ids=lambda value: f"{value}_{value.head_dim}" if isinstance(value, Case) else str(value),
)
def test_matches_the_definition(impl, case, dtype):
    check(partial(gradients, RUNGS[impl]), case, dtype)


@pytest.mark.parametrize("impl", RUNGS)
def test_every_activation(impl):
    names = tuple(reference.ACTIVATIONS)
    heads = {"num_heads": len(names), "num_heads_k": len(names)}
    case = Case("all", (33, 0, 70), head_dim=HEAD_DIM[impl], **heads, options={"activation": names})
    call = call_of(case, BF16)
    found = gradients(RUNGS[impl], call), defined(call, torch.float64), defined(call, BF16)
    for name, *results in zip(NAMES, *found, strict=True):
        for head, activation in enumerate(names):
            actual, expected, baseline = (result[:, head] for result in results)
            assert_close(
                name=f"{name} of {activation}", actual=actual, expected=expected, baseline=baseline
            )


@pytest.mark.parametrize("scale", (1e-6, 30.0, 1e4))
@pytest.mark.parametrize("impl", RUNGS)
def test_any_logits(impl, scale):
    """Saturated and vanishing logits: finite, and right."""
    heads = {"num_heads": 4, "num_heads_k": 4}
    options = {"activation": ("gelu", "gelu_tanh", "silu", "hardswish"), "scale": scale}
    case = Case("logits", (40, 9), head_dim=HEAD_DIM[impl], **heads, options=options)
    check(partial(gradients, RUNGS[impl]), case, BF16)


def scheduled(impl: str, call: dict, schedule: str | int, config: dict) -> tuple:
    """(dq, dk, dv), the roles ordered by `schedule`."""
    with tritonemu.enabled(schedule=schedule, max_steps=100_000):
        config = RUNGS[impl].Config(**config)
        return RUNGS[impl].backward(call["grad_out"], batch_of(call), config=config)


# Slots are used several times over, by several items; the last round of items is not full.
ORDERS = {
    "v4, one tile of keys": (
        "v4_warp_specialized_backward", Case("orders", (300, 0, 70, 64, 1), (128, 5, 100, 0, 7)),
    ),
    "v4, several tiles": (
        "v4_warp_specialized_backward", Case("orders", (300, 0, 70, 1), (300, 5, 129, 64), 1, 1),
    ),
    "v4, head_dim 128": (
        "v4_warp_specialized_backward",
        Case("orders", (130, 0, 70, 1), (128, 5, 100, 7), 2, 1, head_dim=128),
    ),
    "v6": (
        "v6_one_tile_backward",
        Case("orders", (130, 0, 70, 1, 64), (128, 5, 100, 7, 0), 2, 1, head_dim=128),
    ),
    "v6, head_dim 64": (
        "v6_one_tile_backward", Case("orders", (300, 0, 70, 64, 1), (128, 5, 100, 0, 7)),
    ),
    "v5": (
        "v5_short_kv_backward",
        Case("orders", (130, 0, 70, 1), (256, 5, 129, 70), 2, 1, head_dim=128),
    ),
    "v7, one tile of keys": (
        "v7_wide_backward", Case("orders", (130, 0, 70, 1), (64, 5, 60, 7), 2, 1, head_dim=256),
    ),
    "v7, several tiles": (
        "v7_wide_backward", Case("orders", (70, 0, 64), (200, 5, 129), 1, 1, head_dim=136),
    ),
}  # fmt: skip


OTHERS = {  # in v5 a step of a pair has its own slots
    "v4_warp_specialized_backward": ({"q_stages": 3, "g_stages": 1},),
    "v5_short_kv_backward": (),
    "v6_one_tile_backward": ({"q_stages": 3, "g_stages": 1},),
    "v7_wide_backward": ({"q_stages": 1, "g_stages": 2},),
}


@emulated
@pytest.mark.parametrize("name", ORDERS)
def test_any_schedule_and_config_gives_the_same_result(name):
    """Bitwise; a dQ that several tiles of keys add to keeps its error budget."""
    impl, case = ORDERS[name]
    expected = scheduled(impl, call_of(case, BF16), "modelled", {})
    runs = [(0, {}), (1, {})]
    runs += [(schedule, config) for config in OTHERS[impl] for schedule in ("modelled", 0, 1)]
    for schedule, config in runs:
        compute = partial(scheduled, impl, schedule=schedule, config=config)
        if "several tiles" in name:
            check(compute, case, BF16)
        found = compute(call_of(case, BF16))
        equal = [torch.equal(a, b) for a, b in zip(found, expected, strict=True)]
        assert equal[1:] == [True, True], (schedule, config)
        assert equal[0] or "several tiles" in name, (schedule, config)


@emulated
@pytest.mark.parametrize("keys, block", ((256, 64), (384, 128)))
@pytest.mark.parametrize("head_dim", (64, 128))
def test_two_tiles_of_v4_may_add_in_any_order(head_dim, keys, block):
    """Keys of which the second `block` takes away what the first gives to dQ, and the rest is
    small: with three tiles of keys the order of the programs shows."""
    options = {"activation": "identity", "scale": 1.0}
    case = Case("order", (70,), (keys,), 1, 1, head_dim=head_dim, options=options)
    call = call_of(case, BF16)
    call["k"][:block] *= 2.0**20
    call["k"][block : 2 * block] = -call["k"][:block]
    call["v"][block : 2 * block] = call["v"][:block]
    dq, *others = gradients(v4, call)
    with backwards():
        other_dq, *again = gradients(v4, call)
    assert torch.equal(dq, other_dq) == v4.is_deterministic(batch_of(call)) == (keys == 256)
    assert all(torch.equal(a, b) for a, b in zip(others, again, strict=True))


def test_which_results_are_deterministic():
    def of(impl, **change):
        call = call_of(Case("bits", (5,), head_dim=HEAD_DIM[impl]), BF16) | change
        return ladder.rung(impl, "gdpa_backward").is_deterministic(batch_of(call))

    up_to = {"v4_warp_specialized_backward": 256, "v7_wide_backward": 128,
             "b1_tensor_memory_backward": 256}  # fmt: skip
    for impl, keys in up_to.items():
        assert of(impl, max_seqlen_k=keys) and not of(impl, max_seqlen_k=keys + 1)
        assert not of(impl, cu_seqlens_q=None)
    always = (HOPPER | BLACKWELL).keys() - up_to
    assert always == {*MOST_KEYS} and all(of(impl) for impl in always)


@pytest.mark.parametrize("impl", RUNGS)
def test_strided_arguments(impl):
    def change(call):
        q, v, grad = call["q"], call["v"], call["grad_out"]
        wide = q.new_full((q.shape[0], q.shape[1] + 1, q.shape[2] + 8), float("nan"))
        wide[:, 1:, 8:] = q
        return call | {
            "q": wide[:, 1:, 8:],
            "k": call["k"].transpose(0, 1).contiguous().transpose(0, 1),
            "v": torch.stack((v, v.flip(0)), 1)[:, 0],
            "grad_out": grad.transpose(1, 2).contiguous().transpose(1, 2),
        }

    case = Case("strided", (65, 0, 40), head_dim=HEAD_DIM[impl])
    check(partial(gradients, RUNGS[impl]), case, BF16, change=change)


@pytest.mark.parametrize("impl", RUNGS)
def test_a_gradient_that_tma_cannot_read(impl):
    """Contiguous, but at an address that is no multiple of 16 bytes."""
    call = call_of(Case("shifted", (65, 0, 40), head_dim=HEAD_DIM[impl]), BF16)
    grad = call["grad_out"]
    shifted = torch.cat((grad.new_zeros(1), grad.flatten()))[1:].view(grad.shape)
    assert shifted.is_contiguous() and shifted.data_ptr() % 16 == 2
    found, plain = (gradients(RUNGS[impl], call | {"grad_out": g}) for g in (shifted, grad))
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize("kind", ("sum", "mean_of_heads", "one_row"))
@pytest.mark.parametrize("impl", RUNGS)
def test_expanded_gradients(impl, kind):
    """`out.sum().backward()` gives strides (0, 0, 0); others repeat a head or a row."""
    call = call_of(Case("expanded", (65, 0, 40), head_dim=HEAD_DIM[impl]), BF16)
    grad = call["grad_out"]
    part = {"sum": grad[:1, :1, :1], "mean_of_heads": grad[:, :1], "one_row": grad[:1]}[kind]
    expanded = part.expand_as(grad)
    found = gradients(RUNGS[impl], call | {"grad_out": expanded})
    plain = gradients(RUNGS[impl], call | {"grad_out": expanded.contiguous()})
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


NEIGHBOURS = {
    "v4_warp_specialized_backward": (
        Case("self", (5, 70, 64, 3)),
        Case("grouped", (5, 64, 70), (100, 3, 128), num_heads_k=1, head_dim=128),
    ),
    "v5_short_kv_backward": (
        Case("grouped", (5, 70, 64), (200, 3, 256), num_heads_k=1, head_dim=128),
    ),
    "v6_one_tile_backward": (
        Case("self", (5, 70, 64, 3)),
        Case("grouped", (5, 64, 70), (100, 3, 128), num_heads_k=1, head_dim=128),
    ),
    "v7_wide_backward": (Case("grouped", (5, 70, 64), (100, 3, 64), num_heads_k=1, head_dim=256),),
    **dict.fromkeys(EMULATED, (Case("grouped", (5, 130, 64), (200, 3, 256), num_heads_k=1),)),
}


@pytest.mark.parametrize(
    "impl, case", [(impl, case) for impl, cases in NEIGHBOURS.items() for case in cases], ids=str
)
def test_neighbours_do_not_leak(impl, case):
    """Other sequences hold NaN, or large values: this one's gradients are bitwise equal."""
    call = call_of(case, BF16)
    before = gradients(RUNGS[impl], call)
    ends = [call[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k")]
    for own in range(len(ends[0]) - 1):
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
    call = call_of(Case("nan", (6, 70), head_dim=HEAD_DIM[impl]), BF16)
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


@pytest.mark.parametrize("impl", RUNGS)
def test_one_token(impl):
    """Of the identity and ones, dv = s grad_out and dq = dk = (grad_out v) scale, rounded once."""
    case = Case("one", (1,), head_dim=HEAD_DIM[impl], options={"activation": "identity"})
    call = call_of(case, BF16)
    call |= {name: torch.ones_like(call[name]) for name in TENSORS}
    expected = torch.tensor(HEAD_DIM[impl] ** 0.5).bfloat16()
    for result in gradients(RUNGS[impl], call):
        assert (result == expected).all()


@pytest.mark.parametrize(
    "lengths", [((), ()), ((0, 0), (0, 0)), ((3, 4), (0, 0)), ((0, 0), (3, 4))], ids=str
)
@pytest.mark.parametrize("impl", RUNGS)
def test_without_queries_or_keys_gradients_are_zero(impl, lengths, monkeypatch):
    case = Case("none", *lengths, head_dim=HEAD_DIM[impl])
    call = call_of(case, BF16)
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor,
        "new_empty",
        lambda self, *shape, **options: empty(self, *shape, **options).fill_(float("nan")),
    )
    found = gradients(RUNGS[impl], call)
    for name, result in zip("qkv", found, strict=True):
        assert result.shape == call[name].shape and not result.any()


@pytest.mark.parametrize(
    "impl, case",
    [
        ("v4_warp_specialized_backward", CASES[0]),
        ("v4_warp_specialized_backward", Case("whole", (5, 130, 0), (300, 0, 7), head_dim=128)),
        ("v5_short_kv_backward", Case("whole", (5, 130, 0), (256, 0, 7), head_dim=128)),
        (
            "v5_short_kv_backward",
            Case("whole", (5, 300, 0), (256, 40, 7), 4, 2, 128, options={"causal": True}),
        ),
        ("v6_one_tile_backward", Case("whole", (5, 130, 0, 300), (128, 0, 7, 0), head_dim=128)),
        ("v6_one_tile_backward", Case("whole", (130, 300, 0), (0, 0, 7), 4, 2)),
        ("v7_wide_backward", Case("whole", (5, 130, 0), (200, 0, 7), head_dim=160)),
        *(
            (impl, Case("whole", (5, 300, 0), (256, 40, 7), 4, 2, options={"causal": True}))
            for impl in EMULATED
        ),
    ],
    ids=str,
)
def test_gradients_are_written_whole(impl, case, monkeypatch):
    """Memory is full of NaN before the call, and every element is finite after it: without keys dQ
    is zero, and without queries dK and dV are."""
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor,
        "new_empty",
        lambda self, *shape, **options: empty(self, *shape, **options).fill_(float("nan")),
    )
    call = call_of(case, BF16)
    lengths_q, lengths_k = (call[name].diff().cpu() for name in ("cu_seqlens_q", "cu_seqlens_k"))
    for name, result in zip(NAMES, gradients(RUNGS[impl], call), strict=True):
        assert result.isfinite().all() and result.is_contiguous(), name
        own, other = (lengths_q, lengths_k) if name == "dq" else (lengths_k, lengths_q)
        alone = (other == 0).repeat_interleave(own)
        assert not result.cpu()[alone].any(), name


DIMS = {
    "v4_warp_specialized_backward": (64, 128),
    "v5_short_kv_backward": (128,),
    "v6_one_tile_backward": (64, 128),
    "v7_wide_backward": (136, 248, 256),
    **dict.fromkeys(BLACKWELL, (64, 128)),
}


@settings(deadline=None, max_examples=4)
@given(data=st.data())
@pytest.mark.parametrize("impl", RUNGS)
def test_random_batches_and_options(impl, data):
    lengths_q = data.draw(st.lists(st.integers(0, 140), min_size=1, max_size=4))
    lengths_k = [data.draw(st.integers(0, MOST_KEYS.get(impl, 300))) for _ in lengths_q]
    group, heads_k = data.draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (3, 1)]))
    case = Case(
        "random",
        tuple(lengths_q),
        tuple(lengths_k),
        num_heads=group * heads_k,
        num_heads_k=heads_k,
        head_dim=data.draw(st.sampled_from(DIMS[impl])),
        options={
            "activation": data.draw(st.sampled_from(sorted(reference.ACTIVATIONS))),
            "causal": data.draw(st.booleans()),
            "window": data.draw(st.none() | st.integers(0, 300)),
            "output_scale": data.draw(st.sampled_from([1.0, 1 / 128])),
        },
    )
    dtype = data.draw(st.sampled_from((BF16, FP16)))
    check(partial(gradients, RUNGS[impl]), case, dtype, seed=data.draw(st.integers(0, 99)))


# -- Mistakes --------------------------------------------------------------------------------------

# One program, or cluster, with two tiles of keys, or items: every slot is used several times over.
THREE = Case("three", (130, 65, 1), (64, 60, 5), 1, 1, head_dim=136)
SMALL = {
    "v4_warp_specialized_backward": (
        (Case("wide", (130, 65, 64, 1), (128, 70, 5, 64), 1, 1, head_dim=128), {}),
        (Case("narrow", (300, 5), (70, 64), 1, 1, head_dim=64), {}),
    ),
    "v6_one_tile_backward": (
        (Case("wide", (130, 65, 64, 1), (128, 70, 5, 64), 1, 1, head_dim=128), {}),
        (Case("narrow", (300, 5), (70, 64), 1, 1, head_dim=64), {}),
    ),
    "v5_short_kv_backward": ((Case("short", (130, 65), (256, 130), 1, 1, head_dim=128), {}),),
    "v7_wide_backward": ((THREE, {}), *((THREE, config) for config in OTHERS["v7_wide_backward"])),
    "b1_tensor_memory_backward": (
        (Case("narrow", (260, 130), (128, 130), 1, 1), {}),
        (Case("wide", (300, 5), (128, 130), 1, 1, head_dim=128), {}),
    ),
    "b2_short_kv_backward": (
        (Case("narrow", (260, 130), (200, 5), 1, 1), {}),
        (Case("wide", (300, 5), (256, 130), 1, 1, head_dim=128), {}),
    ),
}

# Why it is no mistake: what nothing notices.
COVERED = "Another wait of the same role, beside it, lets nothing pending pass either."
SURVIVORS = {
    "v4_warp_specialized_backward": {
        COVERED: (
            "math: drop async_dot_wait(0, dv)",
            "math: async_dot_wait(dv): pendings=1",
            "math: drop async_dot_wait(0, dk)",
            "math: async_dot_wait(dk): pendings=1",
            "math: barrier_arrive(g.empty[count % options.G_STAGES]) before "
            "dk = async_dot_wait(0, dk)",
            "math: drop async_dot_wait(0, dv) (2)",
            "math: async_dot_wait(dv): pendings=1 (2)",
            "math: drop async_dot_wait(0, dk) (2)",
            "math: async_dot_wait(dk): pendings=1 (2)",
            "math: barrier_arrive(g.empty[now % options.G_STAGES]) before "
            "dk = async_dot_wait(0, dk)",
            "math: drop async_dot_wait(0, s) (3)",
            "math: async_dot_wait(s): pendings=1 (3)",
            "math: drop async_dot_wait(0, dq)",
            "math: async_dot_wait(dq): pendings=1",
            "math: barrier_arrive(q.empty[now % Q_STAGES]) before dq = async_dot_wait(0, dq)",
            "math: barrier_arrive(ds.empty[now - 1 & 1]) before dq = async_dot_wait(0, dq)",
        ),
        "With as many slots of Q, q_empty says it: awaited before, given later.": (
            "load: drop barrier_wait(g.empty[at], (count + step) // options.G_STAGES & 1 ^ 1)",
        ),
        "Both roles give V back at the end of a tile, and its next load is awaited before all of"
        " these are used again.": (
            "load: drop barrier_wait(k.empty[at], tile // options.K_STAGES & 1 ^ 1)",
            "math: barrier_arrive(k.empty[tile % K_STAGES]) before dq = async_dot_wait(0, dq)",
            "math: barrier_arrive(q.empty[count % Q_STAGES]) before s = async_dot_wait(0, s)",
            "math: barrier_arrive(ds.empty[count - 1 & 1]) before dq = async_dot_wait(0, dq)",
        ),
        "The roles trade slots of V: ds_full of the last step says that both have read theirs.": (
            "math: v.buffer[role] -> next (2)",
        ),
    },
    "v5_short_kv_backward": {
        COVERED: (
            "math: drop async_dot_wait(0, dv)",
            "math: async_dot_wait(dv): pendings=1",
            "math: drop async_dot_wait(0, dk_own)",
            "math: async_dot_wait(dk_own): pendings=1",
            "math: drop async_dot_wait(0, dk_other)",
            "math: async_dot_wait(dk_other): pendings=1",
            "math: barrier_arrive(q.empty[at]) before dk_other = async_dot_wait(0, dk_other)",
            "math: barrier_arrive(g.empty[at]) before dk_other = async_dot_wait(0, dk_other)",
        ),
        "At the end both are awaited, in whatever order.": ("math: ds.empty[at] -> next",),
    },
    "v7_wide_backward": {
        "The next tile's first dO is loaded after its V, which this role gives back later.": (
            "score_role: barrier_arrive(g.empty[count % G_STAGES]) before "
            "dv = async_dot_wait(0, dv)",
        ),
        "ds_full says that the other role has waited for it.": (
            "sum_role: drop barrier_wait(k.full[0], tile & 1)",
            "sum_role: drop barrier_wait(q.full[q_at], now // Q_STAGES & 1)",
        ),
    },
}
# The same protocol.
SURVIVORS["v6_one_tile_backward"] = SURVIVORS["v4_warp_specialized_backward"]


def _launch(
    impl: str, case: Case, config: dict, expected: tuple | None, module, schedule: str | int
) -> tuple:
    """(dq, dk, dv) of a changed rung on one program or cluster: AssertionError if not `expected`.

    relu is cheap, and a dQ is a sum of at most two: every order gives the same bits.
    """
    call = call_of(case, BF16) | {"activation": ("relu",)}
    gpu = {"arch": "sm_100" if impl in BLACKWELL else "sm_90",
           "multiprocessors": 2 if "short_kv" in impl else 1}  # fmt: skip
    with tritonemu.enabled(**gpu, schedule=schedule, max_steps=50_000):
        options = {"config": module.Config(**config)} if config else {}
        found = module.backward(call["grad_out"], batch_of(call), **options)
    if expected is not None:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return found


@emulated
@pytest.mark.parametrize("impl", RUNGS)
def test_every_harmful_mistake_in_synchronisation_is_found(impl):
    module = RUNGS[impl]
    launched = [
        partial(_launch, impl, *small, _launch(impl, *small, None, module, "modelled"))
        for small in SMALL[impl]
    ]
    tested, found = surviving(module, "backward_kernel", launched)
    known = [what for reason in SURVIVORS.get(impl, {}).values() for what in reason]
    every = enumerate_mutants(Path(module.__file__), "backward_kernel")
    assert tested == len(every) > 100
    assert sorted(mutant.what for mutant in found) == sorted(known)


@emulated
def test_v5_needs_its_fence_and_its_last_wait():
    """Before dS goes to the other program, and while that one still arrives."""
    impl, module = "v5_short_kv_backward", RUNGS["v5_short_kv_backward"]
    path, (small,) = Path(module.__file__), SMALL[impl]
    text, launched = path.read_text(), [partial(_launch, impl, *small, None)]
    found = []
    for protection in (
        'tlx.fence("async_shared")\n    tlx.async_remote_shmem_copy',
        "tlx.barrier_wait(ds.empty[at], (count & 1) ^ 1)",
    ):
        begin = text.index(protection)
        end = begin + len(protection.partition("\n")[0])
        edit = (len(text[:begin].encode()), len(text[:end].encode()), "pass")
        line = text.count("\n", 0, begin) + 1
        mutant = Mutant(path, "drop", (line, line), protection, (edit,))
        found.append(judge(mutant, import_file, launched).error)
    assert found == ["MissingFence", "EarlyExit"]


# -- Hopper code -----------------------------------------------------------------------------------


@cache
def launched(
    impl: str,
    dtype: torch.dtype = BF16,
    head_dim: int = 128,
    heads_k: int = 4,
    activation: str = "gelu_tanh",
    **options,
) -> Launch:
    """The launch of the main kernel of a rung for 4 query heads; nothing runs."""
    options["activation"] = activation
    case = Case("compiled", (64, 3), None, 4, heads_k, head_dim, options=options)
    call = {
        n: t.cpu() if isinstance(t, torch.Tensor) else t for n, t in call_of(case, dtype).items()
    }
    schedule = (torch.zeros(2, dtype=torch.int32),)
    if impl in LISTS_TILES:
        schedule = (torch.zeros(5, 8, dtype=torch.int32),)
    with launches(run=False) as seen:
        RUNGS[impl].backward(call["grad_out"], batch_of(call), schedule=schedule)
    return seen[0]


def compiled(impl: str, **options) -> Compiled:
    """What the compiler makes of `launched`."""
    return compile_launch(launched(impl, **options))


SMEM_OF_A_PROGRAM = 227 * 1024
ADDS_BY_TMA = ("v4_warp_specialized_backward", "v7_wide_backward")
IN_CLUSTERS = ("v5_short_kv_backward",)
LISTS_TILES = (*ADDS_BY_TMA, "v6_one_tile_backward")

# Bytes that are spilled. Once a tile: fields of its entry in the list and addresses of its stores,
# for which there is no register during its first step.
ONCE_A_TILE = (
    ("v4_warp_specialized_backward", {"head_dim": 64}, 64),
    ("v4_warp_specialized_backward", {"head_dim": 64, "heads_k": 2, "causal": True}, 24),
    ("v6_one_tile_backward", {"head_dim": 64, "activation": "silu"}, 104),
)
# By v5 outside the loop over steps, or for a mask.
KNOWN_SPILLS = (
    *ONCE_A_TILE,
    ("v5_short_kv_backward", {}, 120),
    ("v5_short_kv_backward", {"heads_k": 2, "causal": True, "dtype": FP16}, 668),
)


def check_instructions(impl: str, made: Compiled) -> None:
    """What makes the rung what it is: roles, TMA, and how dQ gets to memory."""
    assert not made.serialised and made.shared_bytes <= SMEM_OF_A_PROGRAM
    for instruction in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"):
        assert made.instructions[instruction] > 0, instruction
    assert (made.instructions["UTMAREDG"] > 0) == (impl in ADDS_BY_TMA)
    assert (made.instructions["UBLKCP"] > 0) == (impl in IN_CLUSTERS)  # dS to the other program
    assert not [name for name in made.instructions if name.startswith(("RED", "ATOM"))]
    assert made.wide["LDG"] == made.wide["STG"] == 0


@pytest.mark.parametrize(
    "impl, options",
    [
        ("v4_warp_specialized_backward", {}),
        ("v4_warp_specialized_backward", {"heads_k": 2, "causal": True, "dtype": FP16}),
        ("v4_warp_specialized_backward", {"window": 40}),
        ("v6_one_tile_backward", {}),
        ("v6_one_tile_backward", {"head_dim": 64}),
        ("v6_one_tile_backward", {"head_dim": 64, "heads_k": 2, "causal": True}),
        ("v6_one_tile_backward", {"window": 40, "dtype": FP16}),
        ("v7_wide_backward", {"head_dim": 256}),
        ("v7_wide_backward", {"head_dim": 256, "heads_k": 2}),
        ("v7_wide_backward", {"head_dim": 200, "heads_k": 2, "causal": True, "dtype": FP16}),
        ("v7_wide_backward", {"head_dim": 256, "window": 40}),
    ],
    ids=str,
)
def test_it_does_not_spill(impl, options):
    made = compiled(impl, **options)
    check_instructions(impl, made)
    assert made.spill_bytes == 0


@pytest.mark.parametrize("impl, options, most", KNOWN_SPILLS, ids=str)
def test_known_spills_do_not_grow(impl, options, most):
    made = compiled(impl, **options)
    check_instructions(impl, made)
    assert 0 < made.spill_bytes <= most


@pytest.mark.parametrize("impl, options", [known[:2] for known in ONCE_A_TILE], ids=str)
def test_the_loop_over_steps_does_not_spill(impl, options):
    """128 rows of 64 keys are 64 scores of a thread, each with an instruction of the MUFU."""
    loop = shortest_loop(build_launch(launched(impl, **options)), "MUFU", 64)
    assert not {"LDL", "STL"} & set(loop)


def test_programs_of_v5_come_in_clusters_of_two():
    """The hardware launches both together, and each waits until the other has its barriers."""
    launch = launched("v5_short_kv_backward")
    assert launch.options["ctas_per_cga"] == (2, 1, 1) and launch.grid[0] % 2 == 0
    assert compiled("v5_short_kv_backward").instructions["UCGABAR"] >= 2
    assert compiled("v4_warp_specialized_backward").instructions["UCGABAR"] == 0


@pytest.mark.parametrize("head_dim, text", [(136, None), (128, "over 128, got 128")])
def test_v7_says_what_it_needs(head_dim, text):
    found = problem("v7_wide_backward", call_of(Case("needs", (9,), head_dim=head_dim), BF16))
    assert found == (text and f"needs a head_dim {text}")


@pytest.mark.parametrize(
    "change, text",
    [
        ({}, None),
        ({"max_seqlen_k": 1000}, "needs a max_seqlen_k of at most {most}, got 1000"),
        ({"cu_seqlens_q": None}, "needs cu_seqlens_q, got None: a shared q"),
    ],
    ids=str,
)
@pytest.mark.parametrize("impl, most", MOST_KEYS.items())
def test_what_has_all_keys_says_what_it_needs(impl, most, change, text):
    call = call_of(Case("needs", (most,), head_dim=128), BF16) | change
    assert RUNGS[impl].requires(batch_of(call)) == (text and text.format(most=most))
    assert RUNGS[impl].requires(batch_of(call | {"max_seqlen_k": most + 1}))
