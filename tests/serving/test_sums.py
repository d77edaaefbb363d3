"""Stored sums: what comes and goes leaves what stayed, by one arithmetic or not at all."""

import copy
import sys
import threading
from unittest import mock

import numpy as np
import pytest
import torch

from gdpa_kernels import Lengths, gdpa
from gdpa_kernels.calling import ladder
from gdpa_kernels.serving import sums as stored_sums
from gdpa_kernels.serving.sums import TOLERATED, StoredSums
from tests.calls import emulated

ROWS, HEADS, DIM = 3, 2, 16
BF16, FP32 = torch.bfloat16, torch.float32


def ends(*lengths: int) -> torch.Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).int()


def draw(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    make = torch.Generator().manual_seed(seed)
    return torch.randn(n, HEADS, DIM, generator=make).to(dtype)


def stored(dtype: torch.dtype = FP32, **options) -> StoredSums:
    return StoredSums(
        draw(ROWS, dtype, 0), 4, **{"impl": "reference", "activation": "silu"} | options
    )


def whole(sums: StoredSums, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The attention over these events, in fp64."""
    q, k, v = (x.double() for x in (sums.q, k, v))
    return gdpa(q, k, v, None, ends(len(k)), ROWS, len(k), activation="silu", impl="reference")


@pytest.mark.parametrize("exact", (False, True))
@pytest.mark.parametrize("impl, dtype", (("reference", FP32), ("v1_tiled", BF16)))
def test_a_sum_is_the_attention_over_what_it_holds(impl, dtype, exact):
    sums = stored(dtype, impl=impl, exact=exact)
    k, v = draw(9, dtype, 1), draw(9, dtype, 2)
    with emulated(impl):
        sums.add(torch.tensor([2, 0]), k, v, ends(4, 5))
        sums.add(torch.tensor([0]), k[:3], v[:3], ends(3))
        sums.delete(torch.tensor([0, 2]), k[4:8], v[4:8], ends(4, 0))
    kept = torch.cat((k[8:], k[:3])), torch.cat((v[8:], v[:3]))
    assert sums.count.tolist() == [4, 0, 4, 0] and sums.updates.tolist() == [12, 0, 4, 0]
    for user, (keys, values) in ((0, kept), (2, (k[:4], v[:4]))):
        wanted = whole(sums, keys, values)
        found = sums.value(torch.tensor([user]))[0].double()
        assert (found - wanted).norm() < (1e-2 if dtype == BF16 else 1e-6) * wanted.norm()
    assert torch.equal(sums.value(sums.count > 0), sums.value(torch.tensor([0, 2])))
    assert not sums.value()[[1, 3]].any() and sums.value().dtype == dtype


@pytest.mark.parametrize("dtype", (BF16, torch.float16, FP32))
def test_an_exact_sum_is_rounded_once(dtype):
    """Beside the middle between two neighbours of the dtype, at a distance that fp32 rounds away,
    and fp64, too."""
    bits = 1 - int(torch.log2(torch.tensor(torch.finfo(dtype).eps)))
    user, sums = torch.tensor([0]), stored(dtype, exact=True)
    for exponent in (32, 45, 61):
        half = 2 ** (exponent - bits)
        for neighbour in (2**exponent, 2**exponent + 2 * half):
            for beside in (-1, 0, 1):
                units = neighbour + half + beside
                up = beside > 0 or beside == 0 and neighbour > 2**exponent
                wanted = torch.tensor((neighbour + 2 * half * up) * 2.0**-30).to(dtype)
                for sign in (1, -1):
                    sums.total.fill_(sign * units)
                    assert sums.value(user).unique().tolist() == [sign * wanted.item()]


def test_what_came_and_went_leaves_nothing_in_an_exact_sum():
    events = [(draw(1, BF16, 2 * i + 1), draw(1, BF16, 2 * i + 2)) for i in range(40)]
    user = torch.tensor([1])
    sums, other = (stored(BF16, exact=True) for _ in range(2))
    for k, v in events:
        sums.add(user, k, v, ends(1))
    for i in torch.randperm(30).tolist():
        sums.delete(user, *events[i], ends(1))
    held = [torch.cat(x) for x in zip(*events[30:], strict=True)]
    other.add(user, *held, ends(10))
    assert torch.equal(sums.total, other.total)
    assert not sums.stale().any()


def test_an_emptied_sum_is_zero():
    sums, user = stored(), torch.tensor([3])
    k, v = draw(5, FP32, 1), draw(5, FP32, 2)
    sums.add(user, k, v, ends(5))
    for i in range(5):
        sums.delete(user, k[i : i + 1], v[i : i + 1], ends(1))
    assert not sums.total.any() and not sums.peak.any() and not sums.stale().any()


def test_a_sum_says_when_its_rounding_counts():
    sums, user = stored(), torch.tensor([0])
    k, v = draw(2, FP32, 1), draw(2, FP32, 2)
    v[1] *= 1e8
    sums.add(user, k[:1], v[:1], ends(1))
    assert not sums.stale().any()
    sums.add(user, k[1:], v[1:], ends(1))
    sums.delete(user, k[1:], v[1:], ends(1))
    wanted = whole(sums, k[:1], v[:1])
    assert (sums.value(user)[0] - wanted).norm() > TOLERATED * wanted.norm()
    assert sums.stale().tolist() == [True, False, False, False]
    sums.clear(user)
    sums.add(user, k[:1], v[:1], ends(1))
    assert not sums.stale().any()


def test_sums_go_on_by_their_own_arithmetic_alone():
    sums, k = stored(), draw(5, FP32, 1)
    sums.add(torch.tensor([1]), k, k, ends(5))
    again = stored()
    again.load_state_dict(sums.state_dict())
    assert torch.equal(again.total, sums.total) and torch.equal(again.count, sums.count)
    for other in (
        stored(precise=True),
        stored(exact=True),
        stored(activation="gelu"),
        stored(BF16),
    ):
        with pytest.raises(
            ValueError, match="arithmetic of state must be gdpa_kernels .*, got gdpa"
        ):
            other.load_state_dict(sums.state_dict())
    fewer = StoredSums(sums.q, 3, impl="reference", activation="silu")
    with pytest.raises(
        ValueError, match=r"total of state must have shape \[3, 3, 2, 16\], got \[4, "
    ):
        fewer.load_state_dict(sums.state_dict())


def test_sums_of_another_kind_of_gpu_do_not_go_on(monkeypatch):
    """Its kernels may round otherwise."""
    state = stored().state_dict()
    for version in ((8, 0), (9, 0)):
        monkeypatch.setattr(stored_sums, "capability", lambda _, version=version: version)
        with pytest.raises(
            ValueError, match=rf"on cpu {version[0]}.0 by Triton 3.*, got .* on cpu"
        ):
            stored().load_state_dict(state)
        state = stored().state_dict()
        stored().load_state_dict(state)


Q, KV = draw(ROWS, FP32, 0), draw(5, FP32, 1)
USER = torch.tensor([0])
WRONG = (
    (ValueError, r"q must be \[rows, num_heads, head_dim\] up to fp32, got \[2, 16\] of",
     lambda: StoredSums(Q[0], 2)),
    (ValueError, "q must be .* up to fp32, got .* of torch.int32", lambda: StoredSums(Q.int(), 2)),
    (TypeError, "output_scale must be a float, got str", lambda: stored(output_scale="1")),
    (ValueError, "users must be an integer of at least 1, got 0", lambda: StoredSums(Q, 0)),
    (ValueError, "impl must be the name of one implementation, got 'auto'",
     lambda: StoredSums(Q, 2, impl="auto")),
    (TypeError, r"k must be a tensor of torch.float32, got \[5, 2, 16\] of torch.bfloat16",
     lambda: stored().add(USER, KV.bfloat16(), KV, ends(5))),
    *((TypeError, f"users must be an int64 or bool tensor, got {told}", call) for told, call in (
        (r"\[0\]", lambda: stored().value([0])), (r"\[0\]", lambda: stored().clear([0])),
        (r"\[1\] of torch.float32", lambda: stored().clear(USER.float())),
        (r"\[4\] of torch.uint8", lambda: stored().clear(torch.ones(4, dtype=torch.uint8))),
    )),
    (ValueError, r"users must be int64 .n. or bool \[4\], got \[1\] of torch.bool",
     lambda: stored().value(USER > 0)),
    (ValueError, r"users must be int64 .n. or bool .*, got \[1, 1\] of torch.int64",
     lambda: stored().clear(USER[None])),
    (TypeError, "users must be an integer of at least 1, got '2'", lambda: StoredSums(Q, "2")),
    (ValueError, "impl must be batch invariant for an exact sum, .*v1_tiled.*, got 'v0_eager'",
     lambda: stored(impl="v0_eager", exact=True)),
    (TypeError, r"users must be an int64 tensor, got \[0\]",
     lambda: stored().add([0], KV, KV, ends(5))),
    (ValueError, r"users must name each of 2 users once, got \[0, 0\]",
     lambda: stored().add(torch.tensor([0, 0]), KV, KV, ends(2, 3))),
    (ValueError, r"users must be from 0 to 3, got \[-1, 3\]",  # one and the same row
     lambda: stored().add(torch.tensor([-1, 3]), KV, KV, ends(2, 3))),
    (ValueError, r"users must be from 0 to 3, got \[4\]",
     lambda: stored().add(USER + 4, KV, KV, ends(5))),
    (ValueError, r"users must be from 0 to 3, got \[-1\]", lambda: stored().clear(USER - 1)),
    (IndexError, "out of range", lambda: stored().value(USER - 1)),
    (ValueError, "cu_seqlens must run from 0 to the 9 rows .*, got 4 to 9",
     lambda: stored(exact=True).add(USER, KV, KV, ends(5) + 4)),
    (TypeError, "cu_seqlens must be a tensor, got list",
     lambda: stored().add(USER, KV, KV, [0, 5])),
    (ValueError, "cu_seqlens must be of 5 rows .*, got Lengths.1 sequences of 4 rows",
     lambda: stored().add(USER, KV, KV, Lengths(ends(4)))),
    (ValueError, r"cu_seqlens must have no more events to delete than are held, \[0\], got \[5\]",
     lambda: stored().delete(USER, KV, KV, ends(5))),
)  # fmt: skip


@pytest.mark.parametrize("error, message, call", WRONG)
def test_what_is_wrong_is_said(error, message, call):
    with pytest.raises(error, match=message):
        call()


def test_sums_of_other_queries_are_refused():
    sums = stored()
    sums.add(USER, KV, KV, ends(5))
    other = StoredSums(sums.q + 1, 4, impl="reference", activation="silu")
    with pytest.raises(ValueError, match="q of state must be the queries of these"):
        other.load_state_dict(sums.state_dict())
    assert not other.total.any()


@pytest.mark.parametrize("value", (torch.inf, torch.nan))
def test_a_sum_that_is_not_finite_is_stale(value):
    sums, wild = stored(), KV[:1].clone()
    wild[0, 0, 0] = value
    sums.add(USER, KV, KV, ends(5))
    sums.add(USER, KV[:1], wild, ends(1))
    assert sums.stale().tolist() == [True, False, False, False]
    sums.delete(USER, KV[:1], wild, ends(1))
    assert sums.stale().tolist() == [True, False, False, False]


@pytest.mark.parametrize("value", (torch.inf, torch.nan, 1e12))
def test_an_exact_sum_refuses_what_it_cannot_hold_and_keeps_what_it_has(value):
    sums = stored(exact=True)
    sums.add(USER, KV, KV, ends(5))
    before = sums.total.clone()
    with pytest.raises(ValueError, match="terms of an exact sum, and the sum, must be below"):
        sums.add(USER, KV[:1], torch.full_like(KV[:1], value), ends(1))
    assert torch.equal(sums.total, before) and sums.count.tolist() == [5, 0, 0, 0]


def test_an_exact_sum_of_terms_that_fit_may_not_fit():
    sums, ones = stored(exact=True), torch.full((2, HEADS, DIM), 1.0)
    k = draw(1, FP32, 1)
    unit = sums._attention(k, ones[:1], ends(1), 1).abs().max().item()
    large = ones * (0.8 * 2.0**32 / unit)
    sums.add(USER, k, large[:1], ends(1))
    with pytest.raises(ValueError, match="and the sum, must be below"):
        sums.add(USER, k, large[:1], ends(1))


INVARIANT = [rung for rung in (ladder.REFERENCE, *ladder.LADDERS["gdpa"]) if rung.batch_invariant]
SIZES = [
    (rung, head_dim, rows)
    for rung in INVARIANT
    for head_dim, rows in ((64, 3), (128, 70), (33, 5))
    if head_dim % rung.requires.head_dim_multiple == 0
]


@pytest.mark.parametrize("rung, head_dim, rows", SIZES, ids=lambda x: getattr(x, "impl", x))
def test_an_event_has_the_same_bits_alone_and_in_any_batch(rung, head_dim, rows):
    """Of every rung that says so; of 33 columns at addresses that are no multiple of 16 bytes."""
    dtype = BF16 if rung.requires.aligned else FP32
    q, k, v = (torch.randn(n, 1, head_dim).to(dtype) for n in (rows, 9, 9))

    def terms(events: list[int], multiprocessors: int) -> torch.Tensor:
        each = torch.arange(len(events) + 1, dtype=torch.int32)
        with emulated(rung.impl, multiprocessors=multiprocessors):
            out = gdpa(q, k[events], v[events], None, each, rows, 1, activation="silu",
                       impl=rung.impl, out_dtype=FP32)  # fmt: skip
        return out.view(len(events), *q.shape)

    alone = terms([4], 132)[0]
    assert alone.any() and alone.isfinite().all()
    for events, multiprocessors in (([0, 4], 132), ([8, 3, 1, 0, 7, 2, 4, 5, 6], 2)):
        assert torch.equal(terms(events, multiprocessors)[events.index(4)], alone)


def test_sums_are_those_of_the_queries_that_they_were_made_with():
    """An optimizer's step changes the parameter in place."""
    q = torch.nn.Parameter(Q.clone())
    sums = StoredSums(q, 4, impl="reference", activation="silu")
    sums.add(USER, KV, KV, ends(5))
    with torch.no_grad():
        q.mul_(1.5)
    assert torch.equal(sums.q, Q)
    other = StoredSums(q, 4, impl="reference", activation="silu")
    with pytest.raises(ValueError, match="q of state must be the queries of these"):
        other.load_state_dict(sums.state_dict())
    sums.delete(USER, KV[:2], KV[:2], ends(2))
    wanted = whole(sums, KV[2:], KV[2:])
    assert (sums.value(USER)[0] - wanted).norm() < 1e-6 * wanted.norm()


def test_autocast_is_no_other_arithmetic():
    sums = stored()
    with torch.autocast("cpu", BF16):
        sums.add(USER, KV, KV, ends(5))
    sums.add(USER + 1, KV, KV, ends(5))
    assert torch.equal(sums.total[0], sums.total[1])


def test_a_value_stays():
    sums = stored()
    sums.add(USER, KV, KV, ends(5))
    value = sums.value()
    before = value.clone()
    sums.add(USER, KV, KV, ends(5))
    assert torch.equal(value, before)


def test_a_change_that_fails_has_changed_nothing():
    sums = stored()
    sums.add(USER, KV, KV, ends(5))
    before = copy.deepcopy(sums)
    with (
        mock.patch.object(torch.Tensor, "norm", side_effect=MemoryError),
        pytest.raises(MemoryError),
    ):
        sums.add(USER, KV[:2], KV[:2], ends(2))
    for name in ("total", "count", "updates", "peak"):
        assert torch.equal(getattr(sums, name), getattr(before, name))


def test_threads_share_sums():
    sums, parts = stored(exact=True), KV.split(1)
    before = sys.getswitchinterval()

    def add(mine) -> None:
        for _ in range(40):
            sums.add(USER, mine, mine, ends(1))

    threads = [threading.Thread(target=add, args=(x,)) for x in parts[:3]]
    try:
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    one = stored(exact=True)
    one.add(USER, KV[:3], KV[:3], ends(3))
    assert torch.equal(sums.total, 40 * one.total) and sums.count.tolist() == [120, 0, 0, 0]


def test_sums_made_in_inference_mode_go_on():
    with torch.inference_mode():
        sums = StoredSums(Q.clone(), np.int64(4), impl="reference", activation="silu")
        sums.add(USER, KV, KV, ends(5))
    sums.add(USER + 1, KV, KV, ends(5))
    assert torch.equal(*sums.value(torch.tensor([0, 1])))
    sums.clear(sums.count > 0)
    assert not sums.total.any()
