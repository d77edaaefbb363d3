"""The backward rungs in plain Triton against the definition: on the GPU if there is one, else in
the emulator."""

from __future__ import annotations

import math
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.calling.rung import Requires
from gdpa_kernels.gdpa import reference
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.kernels import v1_tiled_backward, v2a_ordered_backward
from gdpa_kernels.gdpa.ladder import v2_fused_backward
from gdpa_lab.measuring.inputs import cu_seqlens
from gdpa_lab.measuring.testing import assert_close
from tests.gdpa.cases import CASES, DEVICE, Case
from tests.gdpa.test_forward import kernels_run
from tritonemu import execution

RUNGS = {
    "v1_tiled_backward": v1_tiled_backward,
    "v2_fused_backward": v2_fused_backward,
    "v2a_ordered_backward": v2a_ordered_backward,
}
FUSED = ("v2_fused_backward", "v2a_ordered_backward")
BY_TMA = Requires(capability=(9, 0), head_dim_multiple=8, head_dim_max=128, aligned=True)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = ("dq", "dk", "dv")
TENSORS = ("grad_out", "q", "k", "v")


def call_of(case: Case, dtype: torch.dtype, seed: int = 0) -> dict:
    """grad_out from N(0, 1), and the fields of a rung's batch."""
    options = {
        "activation": ("gelu_tanh",), "scale": case.head_dim**-0.5, "output_scale": 1.0,
        "causal": False, "window": None,
    }  # fmt: skip
    call = options | case.arguments(dtype, seed)
    if isinstance(call["activation"], str):
        call["activation"] = (call["activation"],)
    q, batch = call["q"], call["cu_seqlens_k"].numel() - 1
    rows = q.shape[0] * (batch if call["cu_seqlens_q"] is None else 1)
    make = torch.Generator().manual_seed(seed + 1000)
    return {"grad_out": torch.randn(rows, *q.shape[1:], generator=make).to(q), **call}


def batch_of(call: dict) -> Batch:
    """The batch of a rung's call, without its grad_out."""
    return Batch(**{name: value for name, value in call.items() if name != "grad_out"})


def gradients(impl: str, call: dict, **more) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv) of a rung; `more` are options that only some rungs have."""
    with kernels_run():
        return RUNGS[impl].backward(call["grad_out"], batch_of(call), **more)


def defined(call: dict, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv) of the definition, computed in `dtype`."""
    cast = {name: x.to(dtype) if name in TENSORS else x for name, x in call.items()}
    return reference.backward_in_dtype(cast["grad_out"], batch_of(cast))


def check(
    impl: str, case: Case, dtype: torch.dtype, seed: int = 0,
    change: Callable[[dict], dict] = lambda call: call, **more,
) -> None:  # fmt: skip
    """Hold the gradients to the error budget; small ones are drawn several times over.

    change: what is done to the call first.
    """
    found: list[list[tuple]] = []
    while sum(drawn[0][0].numel() for drawn in found) < 4096 and len(found) < 8:
        call = change(call_of(case, dtype, seed + len(found)))
        results = gradients(impl, call, **more), defined(call, torch.float64), defined(call, dtype)
        found.append(list(zip(*results, strict=True)))
    for i, name in enumerate(NAMES):
        actual, expected, baseline = (torch.cat([drawn[i][j] for drawn in found]) for j in range(3))
        assert_close(name=name, actual=actual, expected=expected, baseline=baseline)


def takes(impl: str, case: Case, dtype: torch.dtype) -> bool:
    call = call_of(case, dtype)
    return impl not in FUSED or BY_TMA.of_call(*(call[name] for name in "qkv")) is None


OWN_CASES = [
    Case("blocks_of_keys", (70, 5, 0), (300, 130, 257), num_heads=1, num_heads_k=1),
    Case("grouped_causal_window", (150, 64, 3), num_heads=4, options={"causal": True, "window": 9}),
    Case("grouped_causal_cross", (40, 9, 0), (150, 3, 8), 4, 2, options={"causal": True}),
    Case("shared_q_grouped", (70, 70), (130, 9), num_heads=4, shared_q=True),
    Case("head_dim_24", (70, 5), (9, 130), head_dim=24),
]
OTHER_DTYPES = ("key_edges", "empty_sequences", "shared_q", "grouped_causal_window", "per_head")
ORDERED = (*OTHER_DTYPES, "no_tokens", "no_keys_at_all", "empty_batch", "blocks_of_keys")


@pytest.mark.parametrize(
    "impl, case, dtype",
    [
        (impl, case, dtype)
        for impl in RUNGS
        for case in (*CASES, *OWN_CASES)
        for dtype in (BF16, FP16, FP32)
        if (dtype == BF16 or case.name in OTHER_DTYPES)
        and (impl != "v2a_ordered_backward" or case.name in ORDERED)
        and takes(impl, case, dtype)
    ],
    ids=str,
)
def test_matches_the_definition(impl, case, dtype):
    check(impl, case, dtype)


@pytest.mark.parametrize("impl, dtype", [("v1_tiled_backward", FP32), *((i, BF16) for i in RUNGS)])
def test_every_activation(impl, dtype):
    names = tuple(reference.ACTIVATIONS)
    heads = {"num_heads": len(names), "num_heads_k": len(names)}
    call = call_of(Case("all", (33, 0, 70), **heads, options={"activation": names}), dtype)
    found = gradients(impl, call), defined(call, torch.float64), defined(call, dtype)
    for name, *results in zip(NAMES, *found, strict=True):
        for head, activation in enumerate(names):
            actual, expected, baseline = (result[:, head] for result in results)
            assert_close(
                name=f"{name} of {activation}", actual=actual, expected=expected, baseline=baseline
            )


@pytest.mark.parametrize("scale", (1e-6, 30.0, 1e4))
@pytest.mark.parametrize("impl", ("v1_tiled_backward", "v2_fused_backward"))
def test_any_logits(impl, scale):
    """Saturated and vanishing logits: finite, and right."""
    options = {"activation": ("gelu", "gelu_tanh", "silu", "hardswish"), "scale": scale}
    check(impl, Case("logits", (40, 9), num_heads=4, num_heads_k=4, options=options), BF16)


def tma_readable(call: dict) -> dict:
    """Other strides that TMA can read: wider rows, heads before tokens; a grad_out that it
    cannot."""
    q, v, grad = call["q"], call["v"], call["grad_out"]
    wide = q.new_full((q.shape[0], q.shape[1] + 1, q.shape[2] + 8), float("nan"))
    wide[:, 1:, 8:] = q
    return call | {
        "q": wide[:, 1:, 8:],
        "k": call["k"].transpose(0, 1).contiguous().transpose(0, 1),
        "v": torch.stack((v, v.flip(0)), 1)[:, 0],
        "grad_out": grad.transpose(1, 2).contiguous().transpose(1, 2),
    }


def any_strides(call: dict) -> dict:
    """Strides between columns too, and an address that is no multiple of 16 bytes."""
    q, k, v = (call[name] for name in "qkv")
    shifted = v.new_full((v.numel() + 1,), float("nan"))[1:].view(v.shape)
    shifted.copy_(v)
    return call | {
        "q": q.transpose(0, 2).contiguous().transpose(0, 2),
        "k": torch.stack((k, k), -1).flatten(-2)[..., ::2],
        "v": shifted,
    }


@pytest.mark.parametrize("change", (tma_readable, any_strides))
@pytest.mark.parametrize("impl", RUNGS)
def test_strided_arguments(impl, change):
    case = Case("strided", (65, 0, 40))
    if impl in FUSED and change is any_strides:
        tensors = [change(call_of(case, BF16))[name] for name in "qkv"]
        assert BY_TMA.of_call(*tensors).startswith("needs q with contiguous rows")
        return
    check(impl, case, BF16, change=change)


@pytest.mark.parametrize("kind", ("sum", "mean_of_heads", "one_row", "misaligned"))
@pytest.mark.parametrize("impl", RUNGS)
def test_any_strides_of_the_gradient(impl, kind):
    """`out.sum().backward()` gives strides (0, 0, 0); others repeat a head or a row."""
    call = call_of(Case("expanded", (65, 0, 40)), BF16)
    grad = call["grad_out"]
    if kind == "misaligned":
        strange = grad.new_empty(grad.numel() + 3)[3:].view(grad.shape).copy_(grad)
    else:
        part = {"sum": grad[:1, :1, :1], "mean_of_heads": grad[:, :1], "one_row": grad[:1]}[kind]
        strange = part.expand_as(grad)
    found = gradients(impl, call | {"grad_out": strange})
    plain = gradients(impl, call | {"grad_out": strange.clone()})
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize("impl", RUNGS)
def test_a_gradient_of_one_head_and_one_token(impl):
    """Dimensions of size 1 may have any stride, and are contiguous all the same."""
    call = call_of(Case("one", (1,), num_heads=1, num_heads_k=1), BF16)
    strange = call["grad_out"].as_strided((1, 1, 64), (5, 3, 1))
    assert strange.is_contiguous()
    found = gradients(impl, call | {"grad_out": strange})
    assert all(torch.equal(a, b) for a, b in zip(found, gradients(impl, call), strict=True))


@pytest.mark.parametrize("impl", RUNGS)
def test_neighbours_do_not_leak(impl):
    """Other sequences hold NaN, infinities, large values: this one's gradients are bitwise
    equal."""
    call = call_of(Case("grouped", (5, 70, 64), (100, 3, 128), num_heads_k=1), BF16)
    before = gradients(impl, call)
    ends = [call[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k")]
    for own in range(len(ends[0]) - 1):
        rows, keys = (slice(values[own], values[own + 1]) for values in ends)
        for poison in (float("nan"), float("inf"), -3e38):

            def poisoned(name, rows=rows, keys=keys, poison=poison):
                part = keys if name in ("k", "v") else rows
                changed = torch.full_like(call[name], poison)
                changed[part] = call[name][part]
                return changed

            after = gradients(impl, call | {name: poisoned(name) for name in TENSORS})
            for name, part, a, b in zip(NAMES, (rows, keys, keys), after, before, strict=True):
                assert torch.equal(a[part], b[part]), (name, own, poison)


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("impl", RUNGS)
def test_own_nan_stays_visible(impl, name):
    """A NaN of the sequence's own reaches what depends on it, and nothing else."""
    call = call_of(Case("nan", (6, 70)), BF16)
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


@pytest.mark.parametrize("lengths", [((), ()), ((0, 0), (0, 0)), ((3, 4), (0, 0)), ((0,), (3,))])
@pytest.mark.parametrize("impl", RUNGS)
def test_without_queries_or_keys_gradients_are_zero(impl, lengths):
    call = call_of(Case("none", *lengths), BF16)
    for name, result in zip("qkv", poisoned_gradients(impl, call), strict=True):
        assert result.shape == call[name].shape and not result.any()


def poisoned_gradients(impl: str, call: dict, **more) -> tuple[torch.Tensor, ...]:
    """`gradients` where new memory is full of NaN."""
    empty = torch.Tensor.new_empty
    poisoned = lambda self, *shape, **o: empty(self, *shape, **o).fill_(float("nan"))  # noqa: E731
    with mock.patch.object(torch.Tensor, "new_empty", poisoned):
        return gradients(impl, call, **more)


@pytest.mark.parametrize(
    "case",
    (
        Case("cross", (5, 130, 0, 4), (300, 0, 7, 65), num_heads_k=1),
        Case("masked", (5, 130), (300, 40), options={"causal": True, "window": 3}),
        Case("shared", (40, 40), (9, 140), shared_q=True),
    ),
    ids=str,
)
@pytest.mark.parametrize("impl", RUNGS)
def test_gradients_are_written_whole(impl, case):
    for name, result in zip(NAMES, poisoned_gradients(impl, call_of(case, BF16)), strict=True):
        assert result.isfinite().all() and result.is_contiguous(), name


NEEDS = [(a, b, c) for a in (True, False) for b in (True, False) for c in (True, False)]


@pytest.mark.parametrize("shared_q", (False, True))
@pytest.mark.parametrize("impl", RUNGS)
def test_only_what_is_needed(impl, shared_q):
    """The others are None; what is needed is what it is when all are. (In one block of keys, v2
    adds once to each row, unless q is shared.)"""
    batch = 1 if impl == "v2_fused_backward" else 2
    case = Case("needs", (20,) * batch, (30, 90)[:batch], num_heads_k=1, shared_q=shared_q)
    call = call_of(case, BF16)
    full = gradients(impl, call)
    assert ladder.rung(impl).takes("backward", "needs")
    for needs in NEEDS:
        found = gradients(impl, call, needs=needs)
        for need, a, b in zip(needs, found, full, strict=True):
            assert torch.equal(a, b) if need else a is None, needs


@pytest.mark.parametrize("needs", NEEDS[1:])
@pytest.mark.parametrize("impl", RUNGS)
def test_what_is_not_needed_is_not_allocated(impl, needs):
    call = call_of(Case("needs", (20,), (30,)), BF16)
    shapes = [call[name].shape for name, need in zip("qkv", needs, strict=True) if need]
    made = []
    empty = torch.Tensor.new_empty

    def counted(self, *shape, **options):
        made.append(empty(self, *shape, **options))
        return made[-1]

    with mock.patch.object(torch.Tensor, "new_empty", counted):
        gradients(impl, call, needs=needs)
    # v1 makes dk and dv together, in one kernel.
    most = len(shapes) + (impl == "v1_tiled_backward" and needs[1] != needs[2])
    assert len(made) == most


CONFIGS = [
    *(("v2_fused_backward", {"by_tma": by_tma, "BLOCK_N": n}) for by_tma, n in
      ((False, 128), (False, 64), (True, 64))),
    *(("v2a_ordered_backward", {"slices": slices, "BLOCK_N": 32}) for slices in (1, 2, 20)),
    ("v2_fused_backward", {"BLOCK_M": 128, "num_warps": 4, "num_stages": 1}),
]  # fmt: skip


@pytest.mark.parametrize(
    "case",
    (
        Case("cross", (70, 5, 0), (150, 130, 57), 2, 1, head_dim=24),
        Case("shared", (70, 70), (130, 9), 2, 2, shared_q=True, options={"causal": True}),
    ),
    ids=str,
)
@pytest.mark.parametrize("impl, config", CONFIGS, ids=str)
def test_any_config(impl, config, case):
    check(impl, case, BF16, config=RUNGS[impl].Config(**config))


def cancelling() -> dict:
    """A call whose dQ depends visibly on the order of additions: of three blocks of 128 keys, the
    second takes away what the first gives, and the third is small."""
    options = {"activation": "identity", "scale": 1.0}
    call = call_of(Case("order", (70, 3), (384, 384), 1, 1, options=options), BF16)
    for keys in (slice(0, 128), slice(384, 512)):
        after = slice(keys.start + 128, keys.stop + 128)
        call["k"][keys] *= 2.0**20
        call["k"][after] = -call["k"][keys]
        call["v"][after] = call["v"][keys]
    return call


@pytest.mark.parametrize("config", ({}, {"slices": 1}, {"slices": 2}), ids=str)
@pytest.mark.parametrize("impl", ("v1_tiled_backward", "v2a_ordered_backward"))
def test_deterministic(impl, config):
    """The same bits in every run; the emulator runs the programs of a launch forwards and
    backwards."""
    if config and impl == "v1_tiled_backward":
        return
    call = cancelling()
    more = {"config": RUNGS[impl].Config(**config)} if config else {}
    first = gradients(impl, call, **more)
    for _ in range(1 if DEVICE == "cpu" else 20):
        with backwards():
            again = gradients(impl, call, **more)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def backwards():
    """The emulator takes the programs of every launch in reverse."""
    run = execution.run_clusters

    def reversed_(launch, numbers, body):
        run(launch, [math.prod(launch.grid) - 1 - number for number in numbers], body)

    return mock.patch.object(execution, "run_clusters", reversed_)


@pytest.mark.skipif(DEVICE != "cpu", reason="orders the emulator's programs")
def test_the_order_of_additions_shows():
    """The test above can fail: v2 adds in the order of its programs, but only to dQ."""
    call = cancelling()
    dq, *others = gradients("v2_fused_backward", call)
    with backwards():
        other_dq, *again = gradients("v2_fused_backward", call)
    assert not torch.equal(dq, other_dq)
    assert all(torch.equal(a, b) for a, b in zip(others, again, strict=True))


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
    call = call_of(Case("launches", (9,), (min(max_seqlen_k, 100),)), BF16)
    call["max_seqlen_k"] = max_seqlen_k
    config = v2a_ordered_backward.Config(slices=slices)
    with launches(run=False) as seen:
        v2a_ordered_backward.backward(call["grad_out"], batch_of(call), config=config)
    assert len(seen) == count + 1


@settings(deadline=None, max_examples=5)
@given(data=st.data())
@pytest.mark.parametrize("impl", RUNGS)
def test_random_batches_and_options(impl, data):
    lengths = st.lists(st.integers(0, 140), min_size=1, max_size=3)
    seqlens_q = data.draw(lengths)
    shared_q = data.draw(st.booleans())
    if shared_q:
        seqlens_q = seqlens_q[:1] * len(seqlens_q)
    group, heads_k = data.draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (3, 1)]))
    case = Case(
        "random",
        tuple(seqlens_q),
        tuple(data.draw(st.integers(0, 200)) for _ in seqlens_q),
        num_heads=group * heads_k,
        num_heads_k=heads_k,
        head_dim=data.draw(st.sampled_from([16, 24, 64, 80])),
        shared_q=shared_q,
        options={
            "activation": data.draw(st.sampled_from(sorted(reference.ACTIVATIONS))),
            "causal": data.draw(st.booleans()),
            "window": data.draw(st.none() | st.integers(0, 150)),
            "output_scale": data.draw(st.sampled_from([1.0, 1 / 128])),
        },
    )
    # Not fp32: the smooth slopes are within 2e-6 there (derivatives.py), PyTorch's within rounding,
    # and of a few small sequences the largest error may be more than twice PyTorch's.
    dtype = data.draw(st.sampled_from((BF16, FP16)))
    check(impl, case, dtype, seed=data.draw(st.integers(0, 2**16)))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device and 40 GB")
@pytest.mark.parametrize("long", ("queries", "keys"))
@pytest.mark.parametrize("impl", RUNGS)
def test_offsets_beyond_32_bits(impl, long):
    """A first sequence so long that the second one starts beyond 2**31 elements."""
    tokens = 2**31 // 256 + 1000
    seqlens_q, seqlens_k = ((tokens, 5), (8, 100)) if long == "queries" else ((1, 5), (tokens, 100))
    last = call_of(Case("last", (5,), (100,), head_dim=128), BF16)
    expected = gradients(impl, last)
    far = last | {
        "cu_seqlens_q": cu_seqlens(seqlens_q, DEVICE),
        "cu_seqlens_k": cu_seqlens(seqlens_k, DEVICE),
        "max_seqlen_q": max(seqlens_q),
        "max_seqlen_k": max(seqlens_k),
    }
    lengths = {"grad_out": seqlens_q, "q": seqlens_q, "k": seqlens_k, "v": seqlens_k}
    for name, rows in lengths.items():
        far[name] = torch.zeros(sum(rows), 2, 128, dtype=BF16, device=DEVICE)
        far[name][rows[0] :] = last[name]
    found = gradients(impl, far)
    for name, rows, a, b in zip(
        NAMES, (seqlens_q, seqlens_k, seqlens_k), found, expected, strict=True
    ):
        assert torch.equal(a[rows[0] :], b), name
