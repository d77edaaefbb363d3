"""Every implementation against the definition: on the GPU if there is one, else in the emulator."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gdpa_kernels import gdpa
from gdpa_kernels.calling import ladder
from gdpa_kernels.gdpa import reference
from gdpa_kernels.gdpa.device import masks
from gdpa_kernels.gdpa.ladder import v3_persistent
from tests.budget import within_budget
from tests.calls import full_of_nan
from tests.gdpa.cases import CASES, DEVICE, Case, batch_of, drawn, kernels_run, of_pytorch
from tests.tiers import examples, sweep, swept

BLACKWELL = [rung.impl for rung in ladder.BLACKWELL_RUNGS]
IMPLS = [rung.impl for rung in ladder.RUNGS] + (BLACKWELL if DEVICE == "cpu" else [])
LESSONS = [impl for impl in IMPLS if ladder.rung(impl).is_lesson]
"""They take the published form alone: no mask, no groups, one activation; Blackwell's a GELU or
SiLU of bf16."""
BF16 = torch.bfloat16
DTYPES = (BF16, torch.float16, torch.float32)
PRODUCTS = [impl for impl in IMPLS if impl not in LESSONS]
products = pytest.mark.parametrize("impl", swept(IMPLS, PRODUCTS))
"""Every rung: lessons in the sweeps alone."""


def supports(impl: str, arguments: dict) -> bool:
    """Whether a rung takes a call; where it only teaches, no option is among its arguments."""
    return ladder.rung(impl).call_problem(batch_of(arguments)) is None


def call(impl: str, arguments: dict) -> torch.Tensor:
    with kernels_run(impl):
        return gdpa(**arguments, impl=impl)


def check(impl: str, case: Case, dtype: torch.dtype, seed: int = 0, elements: int = 2048) -> None:
    """Hold `impl` to its error budget, heads of their own activation to one each.

    elements: at least as many, more of fp32, whose inputs are not rounded: its largest error is
    that of a few scores.
    """

    def draw(i: int) -> tuple:
        arguments = case.arguments(dtype, seed + i)
        return [call(impl, arguments)], *of_pytorch(batch_of(arguments))

    names = case.options.get("activation", "gelu_tanh")
    heads = names if isinstance(names, tuple) and len(names) > 1 else ()
    least = 8192 if dtype == torch.float32 else elements
    within_budget(draw, ["out"], least=least, most=64, heads=heads)


# All cases are tested in bf16, and in every dtype where that chooses other instructions. Elsewhere
# another dtype meets each mask, each edge of a tile and what its range matters to.
# Two elements an instruction: bf16, one GELU or SiLU.
PAIRED = ("v8_own_waits", "b6_pair_stream", "b7_split_stream")
DTYPE_MATTERS = ("v0_eager", "v1_tiled", *PAIRED)
OTHER_DTYPES = {
    *("tile_edges", "key_edges", "empty_sequences", "empty_batch", "one_token", "packed_qkv"),
    *("shared_q", "one_kv_head", "causal_cross", "causal_window", "scales", "per_head"),
    *("head_dim_96", "head_dim_128", "head_dim_256"),
}

OF_PRODUCTS = (
    *("tile_edges", "empty_sequences", "head_dim_128", "shared_q", "one_kv_head", "per_head"),
    *("lower_right_window", "negative_scale", "head_dim_256", "no_keys_at_all"),
)
OF_LESSONS = ("empty_sequences", "head_dim_128")
QUICK = [{(True, name) for name in names} for names in (OF_PRODUCTS, OF_LESSONS)]
QUICK[0].add((False, "per_head"))
"""What the quick tier has of products and of lessons: whether in bf16, and the case."""
DRAWN = [(case, dtype, case.arguments(dtype)) for case in CASES for dtype in DTYPES]
LISTED = [
    ((impl, case, dtype), supports(impl, arguments))
    for impl in IMPLS
    for case, dtype, arguments in DRAWN
    if dtype == BF16 or impl in DTYPE_MATTERS or case.name in OTHER_DTYPES
]
"""Calls, and whether their rung takes them."""


@pytest.mark.parametrize(
    "impl, case, dtype",
    swept(
        (call for call, taken in LISTED if taken),
        lambda impl, case, dtype: (dtype == BF16, case.name) in QUICK[impl in LESSONS],
    ),
    ids=str,
)
def test_matches_the_definition(impl, case, dtype):
    check(impl, case, dtype)


@pytest.mark.parametrize("impl", IMPLS)
def test_what_a_rung_does_not_take_is_refused(impl):
    for (rung, case, dtype), taken in LISTED:
        if rung == impl and not taken:
            says = f"{impl}.* needs .* got"
            with kernels_run(impl), pytest.raises(NotImplementedError, match=says):
                gdpa(**case.arguments(dtype), impl=impl)


# head_dim over 128: Q has one slot, the output leaves in halves, columns beyond head_dim are zero.
WIDE = {
    **dict.fromkeys(("empty_sequences", "no_keys_at_all", "packed_qkv", "shared_q"), 256),
    **{"grouped_heads": 136, "causal_window": 256, "window": 200, "per_head": 192},
}


@pytest.mark.parametrize(
    "case",
    [
        *(replace(case, head_dim=WIDE[case.name]) for case in CASES if case.name in WIDE),
        Case("several_tiles", (300, 0, 130), (200, 17, 129), 1, 1, head_dim=256),
    ],
    ids=str,
)
def test_wide_heads(case):
    check("v8_own_waits", case, torch.bfloat16)


@pytest.mark.sweep
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("impl", IMPLS)
def test_every_activation(impl, activation):
    case = Case("activation", seqlens_q=(33, 0, 70), options={"activation": activation})
    if supports(impl, case.arguments(torch.bfloat16)):
        check(impl, case, torch.bfloat16)


@pytest.mark.parametrize("dtype", swept(DTYPES, (BF16,)), ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_an_activation_per_head(impl, dtype):
    """All of them in one call."""
    names = tuple(reference.ACTIVATIONS)
    heads = {"num_heads": len(names), "num_heads_k": len(names)}
    case = Case("activations", seqlens_q=(33, 0, 70), **heads, options={"activation": names})
    if supports(impl, case.arguments(dtype)):
        check(impl, case, dtype)


SATURATING = ("gelu", "gelu_tanh", "silu", "hardswish")


@pytest.mark.parametrize("scale", (sweep(1e-6), 30.0, sweep(1e4)))
@pytest.mark.parametrize(
    "impl, activations",
    [
        *((impl, SATURATING) for impl in IMPLS if impl not in LESSONS),
        *(
            sweep(impl, (name,))
            for impl in IMPLS
            if impl in (*PAIRED, *LESSONS)
            for name in SATURATING
        ),
    ],
    ids=str,
)
def test_any_logits(impl, activations, scale):
    """Saturated and vanishing logits: finite, and right."""
    heads = {"num_heads": 4, "num_heads_k": 4}
    options = {"activation": activations, "scale": scale}
    case = Case("logits", (40, 9), **heads, options=options)
    if supports(impl, case.arguments(torch.bfloat16)):
        check(impl, case, torch.bfloat16)


@pytest.mark.parametrize("case", [CASES[0], sweep(CASES[2]), sweep(CASES[7])], ids=str)
@products
def test_neighbours_do_not_leak(impl, case):
    """Other sequences hold NaN, infinities, large values: this one's result is bitwise equal.

    Where none is empty, every third sequence is kept at a time, and two poisoned ones lie between.
    """
    arguments = case.arguments(torch.bfloat16)
    before = call(impl, arguments)
    ends_q, ends_k = (arguments[f"cu_seqlens_{x}"].tolist() for x in "qk")
    sequences = range(len(ends_q) - 1)
    apart = 3 if min(case.seqlens_q) else len(sequences)
    for first in range(apart):
        kept = sequences[first::apart]
        poisoned = dict(arguments)
        for name, ends in {"q": ends_q, "k": ends_k, "v": ends_k}.items():
            poisoned[name] = arguments[name].clone()
            for other in set(sequences) - set(kept):
                strange = (float("nan"), -3e38, float("inf"))[(first + other) % 3]
                poisoned[name][ends[other] : ends[other + 1]] = strange
        out = call(impl, poisoned)
        for i in kept:
            rows = slice(ends_q[i], ends_q[i + 1])
            assert torch.equal(out[rows], before[rows]), i


@pytest.mark.parametrize("impl", IMPLS)
def test_own_nan_stays_visible(impl):
    """A NaN of the sequence's own is not hidden, whatever the activation does to it."""
    for activation in reference.ACTIVATIONS:
        arguments = Case("nan", (6, 5)).arguments(torch.bfloat16)
        arguments["q"][2, 0, 3] = float("nan")
        arguments["activation"] = activation
        if not supports(impl, arguments):
            continue
        out = call(impl, arguments)
        assert out[2, 0].isnan().all()
        assert not out[2, 1].isnan().any() and not out[6:].isnan().any()


@pytest.mark.parametrize("impl", IMPLS)
def test_output_is_written_once_and_whole(impl):
    """Memory is full of NaN before the call, and every element is finite after it."""
    with full_of_nan():
        out = call(impl, CASES[0].arguments(torch.bfloat16))
    assert out.isfinite().all()


@pytest.mark.parametrize("order", ("padded", "valid", "zigzag", "longest_first"))
@pytest.mark.parametrize("programs_per_sm", (sweep(1), 5))
def test_any_schedule_gives_the_same_result(order, programs_per_sm):
    arguments = Case("schedule", (130, 0, 5, 200), (40, 3, 0, 70)).arguments(torch.bfloat16)
    plain = call("v2_tma", arguments)
    config = v3_persistent.Config(BLOCK_N=32, programs_per_sm=programs_per_sm, order=order)
    with kernels_run():
        out = v3_persistent.forward(batch_of(arguments), config=config)
    assert torch.equal(out, plain)


@examples(8)
@given(data=st.data())
@products
def test_random_batches_and_options(impl, data):
    narrow = impl in LESSONS
    case = drawn(data, [64, 128] if narrow else [16, 24, 32, 64, 80], same=True, narrow=narrow)
    # Not fp32: there is no rounding of inputs in its errors, and the largest of a few of them is
    # now and then more than twice PyTorch's.
    dtype = data.draw(st.sampled_from((torch.bfloat16, torch.float16)))
    if supports(impl, case.arguments(dtype)):
        check(impl, case, dtype, seed=data.draw(st.integers(0, 2**16)), elements=8192)


@given(
    st.integers(0, 20), st.integers(0, 20), st.integers(1, 6), st.integers(1, 6), st.booleans(),
    st.none() | st.integers(0, 20),
)  # fmt: skip
def test_all_visible_is_what_the_masks_say(row, key, rows, keys, causal, window):
    pairs = [(r, k) for r in range(row, row + rows) for k in range(key, key + keys)]
    seen = [(not causal or k <= r) and (window is None or abs(r - k) <= window) for r, k in pairs]
    assert masks.all_visible.fn(row, key, rows, keys, causal, window) == all(seen)
