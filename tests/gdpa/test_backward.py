"""Every backward rung against the definition: on the GPU if there is one, else in the emulator."""

import math
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gdpa_kernels.calling.launches import launches
from gdpa_kernels.gdpa import reference
from gdpa_kernels.gdpa.kernels import v2a_ordered_backward
from tests.calls import (
    GRADIENTS,
    TENSORS,
    assert_same_bits,
    full_of_nan,
    new_memory,
    readable,
    unreadable,
)
from tests.gdpa.cases import (
    BACKWARD,
    CASES,
    DEVICE,
    NAMES,
    Case,
    batch_of,
    check_gradients,
    drawn,
    gradients,
)
from tests.tiers import examples, sweep, swept
from tritonemu import execution

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
every = pytest.mark.parametrize("impl", BACKWARD)
products = pytest.mark.parametrize(
    "impl", swept(BACKWARD, lambda impl: not BACKWARD[impl].is_lesson)
)
"""Every rung: lessons in the sweeps alone."""
PLAIN = [impl for impl in BACKWARD if impl.startswith(("v1", "v2"))]
ROLES = [impl for impl in BACKWARD if impl not in PLAIN]
# That a test takes which is not about head_dim.
HEAD_DIM = dict.fromkeys(BACKWARD, 64)
HEAD_DIM |= {impl: 128 for impl in BACKWARD if impl.startswith(("v4", "v5", "v6"))}
HEAD_DIM |= {"v7_wide_backward": 256}
PAIRS = ("b4_pair_backward", "b5_stream_backward")
MOST_KEYS = {"v5_short_kv_backward": 256, "v6_one_tile_backward": 128, "b2_short_kv_backward": 256}
MOST_KEYS |= {"b6_dq_once_backward": 256}


def check(impl: str, case: Case, dtype: torch.dtype = BF16, **more) -> None:
    """Hold a rung to its error budget; `more`: of `check_gradients`."""
    least = 4096 if impl in PLAIN else 2048
    check_gradients(partial(gradients, impl), case, dtype, least=least, **more)


def problem(impl: str, call: dict) -> str | None:
    """Why a rung cannot take a call, or None."""
    return BACKWARD[impl].call_problem(batch_of(call))


def config_of(impl: str, **options) -> object:
    return BACKWARD[impl].module().Config(**options)


OWN_CASES = [
    Case("three_tiles_of_keys", (70, 5, 0), (300, 130, 257), num_heads=1, num_heads_k=1),
    Case("all_keys_of_v5", (70, 5, 0, 129), (256, 129, 255, 1), num_heads=1, num_heads_k=1),
    Case("grouped_causal_window", (150, 64, 3), num_heads=4, options={"causal": True, "window": 9}),
    Case("grouped_causal_cross", (40, 9, 0), (150, 3, 8), 4, 2, options={"causal": True}),
    Case("shared_q_grouped", (70, 70), (130, 9), num_heads=4, shared_q=True),
    Case("one_item", (7,), num_heads=1, num_heads_k=1),
    Case("head_dim_24", (70, 5), (9, 130), head_dim=24),
    Case("head_dim_200", (70, 5), (64, 130), head_dim=200),
    Case("wide", (140, 0, 129, 5), (256, 130, 0, 1), num_heads=1, num_heads_k=1, head_dim=128),
    Case("wide_grouped", (130, 9), (40, 250), 2, 1, 128, options={"causal": True, "window": 70}),
    Case("wide_per_head", (60,), None, 2, 2, 128, options={"activation": ("gelu", "silu")}),
]
ALL_CASES = [*CASES, *OWN_CASES]
EVERY = {case.name for case in ALL_CASES if case.head_dim == 64}
OTHER_DTYPES = {
    "key_edges", "empty_sequences", "shared_q", "grouped_causal_window", "per_head", "wide",
    "all_keys_of_v5",
}  # fmt: skip
OF_PRODUCTS = (
    *("empty_sequences", "shared_q", "grouped_causal_window", "lower_right_window", "per_head"),
    *("wide", "wide_grouped", "head_dim_200"),
)
QUICK = [{(True, name) for name in names} for names in (OF_PRODUCTS, ("empty_sequences", "wide"))]
"""What the quick tier has of products and of lessons: whether in bf16, and the case."""
SOME = {"empty_sequences", "packed_qkv", "grouped_heads"} | {case.name for case in OWN_CASES}
# At which other head_dims a rung takes which of the cases of 64.
WIDTHS = {
    "v4_warp_specialized_backward": {128: SOME, 72: SOME},
    "v5_short_kv_backward": {128: EVERY},
    "v6_one_tile_backward": {128: EVERY},
    "v7_wide_backward": {256: EVERY, 136: OTHER_DTYPES},
}


def cases_of(impl: str) -> list[Case]:
    wider = [
        replace(case, head_dim=dim, **({"num_heads": 1, "num_heads_k": 1} if alone else {}))
        for dim, names in WIDTHS.get(impl, {}).items()
        for case in ALL_CASES
        if case.head_dim == 64 and case.name in names
        for alone in [case.num_heads == case.num_heads_k == 2]
    ]
    return [*ALL_CASES, *wider]


@pytest.mark.parametrize(
    "impl, case, dtype",
    swept(
        (
            (impl, case, dtype)
            for impl in BACKWARD
            for case in cases_of(impl)
            for dtype in (BF16, FP16, FP32)
            if (dtype == BF16 or case.name in OTHER_DTYPES)
            and problem(impl, case.call(dtype)) is None
        ),
        lambda impl, case, dtype: (
            (dtype == BF16, case.name) in QUICK[BACKWARD[impl].is_lesson]
            or (impl, case.name) == ("v1_tiled_backward", "per_head")
        ),
    ),
    ids=lambda value: f"{value}_{value.head_dim}" if isinstance(value, Case) else str(value),
)
def test_matches_the_definition(impl, case, dtype):
    check(impl, case, dtype)


@pytest.mark.parametrize(
    "impl, dtype",
    swept(
        [("v1_tiled_backward", FP32), *((i, BF16) for i in BACKWARD)],
        lambda impl, dtype: not BACKWARD[impl].is_lesson,
    ),
)
def test_every_activation(impl, dtype):
    names = tuple(reference.ACTIVATIONS)
    heads = {"num_heads": len(names), "num_heads_k": len(names)}
    case = Case("all", (33, 0, 70), head_dim=HEAD_DIM[impl], **heads, options={"activation": names})
    check(impl, case, dtype, heads=names)


@pytest.mark.parametrize("scale", (sweep(1e-6), 30.0, sweep(1e4)))
@products
def test_any_logits(impl, scale):
    """Saturated and vanishing logits: finite, and right."""
    heads = {"num_heads": 4, "num_heads_k": 4}
    options = {"activation": ("gelu", "gelu_tanh", "silu", "hardswish"), "scale": scale}
    check(impl, Case("logits", (40, 9), head_dim=HEAD_DIM[impl], **heads, options=options))


@pytest.mark.parametrize("change", (readable, unreadable))
@products
def test_strided_arguments(impl, change):
    case = Case("strided", (65, 0, 40), head_dim=HEAD_DIM[impl])
    if BACKWARD[impl].requires.aligned and change is unreadable:
        assert problem(impl, change(case.call(BF16))).startswith("needs q with contiguous rows")
        return
    check(impl, case, change=change)


@pytest.mark.parametrize("kind", swept(GRADIENTS, ("sum",)))
@products
def test_any_strides_of_the_gradient(impl, kind):
    call = Case("expanded", (65, 0, 40), head_dim=HEAD_DIM[impl]).call(BF16)
    strange = GRADIENTS[kind](call["grad_out"])
    plain = strange.clone(memory_format=torch.contiguous_format)
    found, plain = (gradients(impl, call | {"grad_out": g}) for g in (strange, plain))
    assert_same_bits(found, plain)


@products
def test_a_gradient_of_one_head_and_one_token(impl):
    """Dimensions of size 1 may have any stride, and are contiguous all the same."""
    case = Case("one", (1,), num_heads=1, num_heads_k=1, head_dim=HEAD_DIM[impl])
    call = case.call(BF16)
    strange = call["grad_out"].as_strided((1, 1, case.head_dim), (5, 3, 1))
    assert strange.is_contiguous()
    assert_same_bits(gradients(impl, call | {"grad_out": strange}), gradients(impl, call))


GROUPED = Case("grouped", (5, 64, 70), (100, 3, 128), num_heads_k=1)
NEIGHBOURS = [
    *((impl, GROUPED) for impl in BACKWARD if not impl.startswith(("v5", "b"))),
    *((impl, Case("self", (5, 70, 64, 3))) for impl in BACKWARD if impl.startswith(("v4", "v6"))),
    *((impl, Case("all_keys", (5, 130, 64), (200, 3, 256), num_heads_k=1))
      for impl in BACKWARD if impl.startswith(("v5", "b"))),
]  # fmt: skip


@pytest.mark.parametrize(
    "impl, case", swept(NEIGHBOURS, lambda impl, case: not BACKWARD[impl].is_lesson), ids=str
)
def test_neighbours_do_not_leak(impl, case):
    """Other sequences hold NaN and infinities, or large values: this one's gradients are bitwise
    equal. Roles meet one kind in a sequence."""
    call = replace(case, head_dim=HEAD_DIM[impl]).call(BF16)
    before = gradients(impl, call)
    ends = [call[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k")]
    parts = [[slice(*pair) for pair in zip(x, x[1:], strict=False)] for x in ends]
    for own, (rows, keys) in enumerate(zip(*parts, strict=True)):
        for finite in (False, True) if impl in PLAIN else (own % 2 == 1,):
            changed = {name: call[name].clone() for name in TENSORS}
            for name, tensor in changed.items():
                for other, part in enumerate(parts[name in "kv"]):
                    strange = float(("nan", "inf")[other % 2])
                    tensor[part] = -3e38 if finite else strange
                part = keys if name in "kv" else rows
                tensor[part] = call[name][part]
            after = gradients(impl, call | changed)
            for part, a, b in zip((rows, keys, keys), after, before, strict=True):
                assert torch.equal(a[part], b[part]), (own, finite)


@pytest.mark.parametrize("name", TENSORS)
@products
def test_own_nan_stays_visible(impl, name):
    """A NaN of the sequence's own reaches what depends on it, and nothing else."""
    call = Case("nan", (6, 70), head_dim=HEAD_DIM[impl]).call(BF16)
    call[name][2, 0, 3] = float("nan")
    dq, dk, dv = gradients(impl, call)
    reached = {
        "grad_out": (dq[2, 0], dk[:6, 0], dv[:6, 0, 3]),
        "q": (dq[2, 0], dk[:6, 0], dv[:6, 0]),
        "k": (dq[:6, 0], dk[2, 0], dv[2, 0]),
        "v": (dq[:6, 0], dk[2, 0]),
    }[name]
    assert all(part.isnan().all() for part in reached)
    nans = sum(part.numel() for part in reached)
    assert sum(int(result.isnan().sum()) for result in (dq, dk, dv)) == nans


@products
def test_one_token(impl):
    """Of the identity and ones, dv = s grad_out and dq = dk = (grad_out v) scale, rounded once."""
    case = Case("one", (1,), head_dim=HEAD_DIM[impl], options={"activation": "identity"})
    call = case.call(BF16)
    call |= {name: torch.ones_like(call[name]) for name in TENSORS}
    expected = torch.tensor(case.head_dim**0.5).bfloat16()
    assert all((result == expected).all() for result in gradients(impl, call))


NONE = [((), ()), ((0, 0), (0, 0)), ((3, 4), (0, 0)), ((0, 0), (3, 4))]
CROSS = Case("cross", (5, 130, 0, 4), (300, 0, 7, 65), num_heads_k=1)
MASKED = Case("masked", (5, 130), (300, 40), options={"causal": True, "window": 3})
# What a rung writes whole beside NONE, by how its name begins.
WHOLE = {
    ("v1", "v2"): (CROSS, MASKED, Case("shared", (40, 40), (9, 140), shared_q=True)),
    "v4": (CASES[0], CROSS),
    "v6": (
        Case("one_tile", (5, 130, 0, 300), (128, 0, 7, 0)),
        Case("no_keys", (130, 300, 0), (0, 0, 7), 4, 2),
    ),
    "v7": (CROSS,),
    ("v5", "b"): (
        Case("grouped", (5, 300, 0, 130), (256, 40, 7, 0), 4, 2, options={"causal": True}),
    ),
}


@pytest.mark.parametrize(
    "impl, case",
    swept(
        (
            (impl, case)
            for impl in BACKWARD
            for begins, cases in WHOLE.items()
            if impl.startswith(begins)
            for case in (*(Case("none", *lengths) for lengths in NONE), *cases)
        ),
        lambda impl, case: not BACKWARD[impl].is_lesson,
    ),
    ids=str,
)
def test_gradients_are_written_whole(impl, case):
    """Memory is full of NaN before the call, and every element is finite after it: without keys dQ
    is zero, and without queries dK and dV are."""
    call = replace(case, head_dim=HEAD_DIM[impl]).call(BF16)
    with full_of_nan():
        found = gradients(impl, call)
    lengths_k = call["cu_seqlens_k"].diff().cpu()
    lengths_q = lengths_k if case.shared_q else call["cu_seqlens_q"].diff().cpu()
    for name, of, result in zip(NAMES, "qkv", found, strict=True):
        assert result.isfinite().all() and result.is_contiguous(), name
        assert result.shape == call[of].shape
        own, other = (lengths_q, lengths_k) if name == "dq" else (lengths_k, lengths_q)
        if not case.shared_q:
            alone = (other == 0).repeat_interleave(own)
            assert not result.cpu()[alone].any(), name


NEEDS = [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)]


@pytest.mark.parametrize("shared_q", (False, True))
@pytest.mark.parametrize("impl", PLAIN)
def test_only_what_is_needed(impl, shared_q):
    """The others are None; what is needed is what it is when all are. (In one block of keys, v2
    adds once to each row, unless q is shared.)"""
    batch = 1 if impl == "v2_fused_backward" else 2
    case = Case("needs", (20,) * batch, (30, 90)[:batch], num_heads_k=1, shared_q=shared_q)
    call = case.call(BF16)
    full = gradients(impl, call)
    assert BACKWARD[impl].takes("backward", "needs")
    for needs in NEEDS:
        found = gradients(impl, call, needs=needs)
        for need, a, b in zip(needs, found, full, strict=True):
            assert torch.equal(a, b) if need else a is None, needs


@pytest.mark.parametrize("needs", NEEDS[1:])
@pytest.mark.parametrize("impl", PLAIN)
def test_what_is_not_needed_is_not_allocated(impl, needs):
    call, made = Case("needs", (20,), (30,)).call(BF16), []
    with new_memory(made.append):
        gradients(impl, call, needs=needs)
    # v1 makes dk and dv together, in one kernel.
    assert len(made) == sum(needs) + (impl == "v1_tiled_backward" and needs[1] != needs[2])


NARROW = Case("narrow", (70, 5, 0), (150, 130, 57), 2, 1, head_dim=24)
SHARED = Case("shared", (70, 70), (130, 9), 2, 2, shared_q=True, options={"causal": True})
OF_ROLES = Case("config", (300, 7), (70, 1))
CONFIGS = [
    *((impl, config, case) for case in (NARROW, SHARED) for impl, config in (
        ("v2_fused_backward", {"by_tma": False, "BLOCK_N": 128}),
        ("v2_fused_backward", {"by_tma": False, "BLOCK_N": 64}),
        ("v2_fused_backward", {"by_tma": True, "BLOCK_N": 64}),
        ("v2_fused_backward", {"BLOCK_M": 128, "num_warps": 4, "num_stages": 1}),
        *(("v2a_ordered_backward", {"slices": n, "BLOCK_N": 32}) for n in (1, 2, 20)),
    )),
    *((impl, config, OF_ROLES) for impl in BACKWARD if impl.startswith("b")
      for config in ({"q_stages": 3, "g_stages": 2}, {"fold": False})
      if impl not in (*PAIRS, "b6_dq_once_backward") or "fold" in config),
]  # fmt: skip


@pytest.mark.parametrize(
    "impl, config, case", swept(CONFIGS, lambda impl, config, case: case is not NARROW), ids=str
)
def test_any_config(impl, config, case):
    compute = partial(gradients, impl, config=config_of(impl, **config))
    check_gradients(compute, case, BF16)


def backwards():
    """The emulator takes the programs of every launch in reverse."""
    run = execution.run_clusters

    def reversed_(launch, numbers, body):
        run(launch, [math.prod(launch.grid) - 1 - number for number in numbers], body)

    return mock.patch.object(execution, "run_clusters", reversed_)


# (rung, its config, head_dim, keys, rows of a block of keys)
ADDED = [
    ("v1_tiled_backward", {}, 64, 384, 128),
    *(("v2a_ordered_backward", {"slices": n} if n else {}, 64, 384, 128) for n in range(3)),
    ("v2_fused_backward", {}, 64, 384, 128),
    *(("v4_warp_specialized_backward", {}, dim, *keys)
      for dim in (64, 128) for keys in ((256, 64), (384, 128))),
]  # fmt: skip


@pytest.mark.skipif(DEVICE != "cpu", reason="orders the emulator's programs")
@pytest.mark.parametrize("impl, config, head_dim, keys, block", ADDED, ids=str)
def test_additions_in_another_order(impl, config, head_dim, keys, block):
    """The same bits, of dQ where the rung says so. Of the blocks of keys the second takes away what
    the first gives to dQ, and the rest is small: with three the order of the programs shows."""
    options = {"activation": "identity", "scale": 1.0}
    call = Case("order", (70, 3), (keys, keys), 1, 1, head_dim, options=options).call(BF16)
    for first in (0, keys):
        own, after = slice(first, first + block), slice(first + block, first + 2 * block)
        call["k"][own] *= 2.0**20
        call["k"][after] = -call["k"][own]
        call["v"][after] = call["v"][own]
    more = {"config": config_of(impl, **config)} if config else {}
    dq, *others = gradients(impl, call, **more)
    with backwards():
        other_dq, *again = gradients(impl, call, **more)
    same = impl in ("v1_tiled_backward", "v2a_ordered_backward") or keys == 256
    assert torch.equal(dq, other_dq) == BACKWARD[impl].is_deterministic(batch_of(call)) == same
    assert_same_bits(others, again)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("impl", ("v1_tiled_backward", "v2a_ordered_backward"))
def test_the_same_bits_in_every_run(impl):
    call = Case("order", (70, 3), (384, 384), 1, 1).call(BF16)
    first = gradients(impl, call)
    for _ in range(20):
        assert_same_bits(gradients(impl, call), first)


def test_which_results_are_deterministic():
    def of(impl, **change):
        call = Case("bits", (5,), head_dim=HEAD_DIM[impl]).call(BF16) | change
        return BACKWARD[impl].is_deterministic(batch_of(call))

    up_to = {"v4_warp_specialized_backward": 256, "v7_wide_backward": 128}
    if DEVICE == "cpu":
        up_to |= dict.fromkeys(("b1_tensor_memory_backward", "b3_dk_first_backward"), 256)
        up_to |= dict.fromkeys(PAIRS, 512)
    for impl, keys in up_to.items():
        assert of(impl, max_seqlen_k=keys) and not of(impl, max_seqlen_k=keys + 1)
        assert not of(impl, cu_seqlens_q=None)
    always = set(ROLES) - set(up_to)
    assert always <= {*MOST_KEYS} and all(of(impl) for impl in always)


def test_slices_of_the_ordered_rung():
    """As many as fill a launch, never more than there are blocks, and within the limit."""
    count, limit = v2a_ordered_backward.count_slices, v2a_ordered_backward.MOST_BYTES
    assert count(4608, 16, 2**30) == 1
    assert count(16, 128, 2**20) == 33
    assert count(16, 20, 2**20) == 20
    assert count(16, 128, limit // 3) == 1 + 3
    assert count(1, 128, 2 * limit) == 1
    assert count(0, 0, 0) == 1


@pytest.mark.parametrize("max_seqlen_k, slices, count", ((0, 0, 0), (1, 1, 1), (1000, 1, 8)))
def test_launches_of_the_ordered_rung(max_seqlen_k, slices, count):
    """Each takes `slices` blocks of keys, whatever the lengths."""
    call = Case("launches", (9,), (min(max_seqlen_k, 100),)).call(BF16)
    batch = batch_of(call | {"max_seqlen_k": max_seqlen_k})
    config = v2a_ordered_backward.Config(slices=slices)
    with launches(run=False) as seen:
        v2a_ordered_backward.backward(call["grad_out"], batch, config=config)
    assert len(seen) == count + 1


BLACKWELL = [impl for impl in BACKWARD if impl.startswith("b")]
SHARED_Q = "needs cu_seqlens_q, got None: a shared q"
# (rung, head_dim, change of the call, what it says)
NEEDED = [
    ("v4_warp_specialized_backward", 16, {}, "needs a head_dim over 16, got 16"),
    ("v4_warp_specialized_backward", 24, {}, None),
    ("v7_wide_backward", 136, {}, None),
    ("v7_wide_backward", 128, {}, "needs a head_dim over 128, got 128"),
    *((impl, dim, {}, None) for impl in BLACKWELL for dim in (64, 128)),
    *((impl, dim, {}, f"needs a head_dim of at most 128 that is a multiple of 64, got {dim}")
      for impl in BLACKWELL for dim in (16, 96, 256)),
    *((impl, 128, change, text) for impl in MOST_KEYS if impl in BACKWARD for change, text in (
        ({}, None),
        ({"max_seqlen_k": 1000}, "needs a max_seqlen_k of at most {most}, got 1000"),
        ({"cu_seqlens_q": None}, SHARED_Q),
    )),
]  # fmt: skip


@pytest.mark.parametrize("impl, head_dim, change, text", NEEDED, ids=str)
def test_says_what_it_needs(impl, head_dim, change, text):
    most = MOST_KEYS.get(impl, 9)
    call = Case("needs", (most,), head_dim=head_dim).call(BF16) | change
    assert problem(impl, call) == (text and text.format(most=most))
    assert impl not in MOST_KEYS or problem(impl, call | {"max_seqlen_k": most + 1})


DIMS = {
    **dict.fromkeys(PLAIN, (16, 24, 64, 80)),
    **dict.fromkeys(ROLES, (64, 128)),
    "v4_warp_specialized_backward": (24, 32, 64, 96, 128),
    "v5_short_kv_backward": (128,),
    "v7_wide_backward": (136, 248, 256),
}


@examples(5)
@given(data=st.data())
@products
def test_random_batches_and_options(impl, data):
    keys = MOST_KEYS.get(impl, 300)
    case = drawn(data, DIMS[impl], keys=keys, shared_q=impl in PLAIN)
    # Not fp32: the smooth slopes are within 2e-6 there (derivatives.py), PyTorch's within rounding,
    # and of a few small sequences the largest error may be more than twice PyTorch's.
    dtype = data.draw(st.sampled_from((BF16, FP16)))
    check(impl, case, dtype, seed=data.draw(st.integers(0, 2**16)))
