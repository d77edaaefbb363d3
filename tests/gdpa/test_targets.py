"""Contexts, history and targets: as the public definitions state them, in every kernel that takes
them."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from gdpa_kernels import GDPASelfAttention, Lengths, gdpa
from gdpa_kernels.gdpa import reference
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.mask import Mask
from gdpa_lab.measuring.inputs import cu_seqlens
from tests.budget import within_budget
from tests.calls import DEVICE, full_of_nan, kernels_run, required
from tests.fuzzing import meta, nvidia
from tests.gdpa.cases import Case, batch_of, of_pytorch
from tests.tiers import sweep, swept

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


SIZES = [(n, m, c) for n in (1, 2, 7, 12) for m in (0, 1, 3, 7) for c in (0, 1, 4) if m + c <= n]
STATED = [
    *(("shared", partial(meta, window=w, full=f), {"window": w, "full_rows": f})
      for w, f in ((None, 0), (0, 0), (2, 0), (2, 1), (3, 4), (30, 2))),
    *(("own", partial(nvidia, window=w, group=g), {"window": w, "target_group_size": g})
      for w in (None, 0, 2, 5) for g in (1, 2, 3)),
]  # fmt: skip


@pytest.mark.parametrize("ranks, stated, options", STATED)
def test_the_mask_is_the_one_that_its_library_states(ranks, stated, options):
    for n, m, c in SIZES:
        x = torch.zeros(n, 1, 1)
        ends = cu_seqlens((n,), "cpu")
        batch = Batch(
            x, x, x, ends, ends, n, n, ("silu",), 1.0,
            mask=Mask(True, target_ranks=ranks, **options),
            segments=torch.tensor([[m, c]], dtype=torch.int32),
        )  # fmt: skip
        keep = reference._counts(batch, 0, n, n)
        wanted = [[stated(i, j, n, m, c) for j in range(n)] for i in range(n)]
        assert keep.tolist() == wanted, (n, m, c)
        assert batch.pairs() == int(keep.sum())
        assert torch.equal(reference._counts(batch, 0, n // 2, n), keep[n - n // 2 :]), (
            "delta queries"
        )


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


LENGTHS = (200, 0, 70, 9, 131)
COUNTS = {"num_targets": int32(60, 0, 0, 9, 1), "num_contexts": int32(3, 0, 66, 0, 40)}
MASKS = {
    "targets": {"num_targets": COUNTS["num_targets"]},
    "contexts": {"num_contexts": COUNTS["num_contexts"]},
    "both": COUNTS,
    "groups": COUNTS | {"target_group_size": 7},
    "window": COUNTS | {"window": 20},
    "window_of_own": COUNTS | {"window": 20, "target_ranks": "own", "target_group_size": 30},
    "full_rows": COUNTS | {"window": 5, "full_rows": 17},
    "only_full_rows": {"window": 5, "full_rows": 17},
    "one_context_each": {"num_contexts": 2, "num_targets": COUNTS["num_targets"]},
}
QUICK = ("both", "groups", "window_of_own", "full_rows")


def case_of(mask: str, queries: tuple[int, ...] | None = None, **more) -> Case:
    causal = {"causal": True if queries is None else "lower_right"}
    return Case(
        mask, queries or LENGTHS, LENGTHS, options=MASKS_OF_GRADIENTS[mask] | causal, **more
    )


DELTA = (130, 0, 1, 9, 40)
BLACKWELL = {
    "forward": ("b6_pair_stream", "b7_split_stream"),
    "backward": ("b5_stream_backward", "b6_dq_once_backward"),
}
if DEVICE == "cuda":  # they are emulated alone
    BLACKWELL = dict.fromkeys(BLACKWELL, ())


@pytest.mark.parametrize("impl", ("v1_tiled", "v8_own_waits", *map(sweep, BLACKWELL["forward"])))
@pytest.mark.parametrize("queries", (None, DELTA), ids=("all", "delta"))
@pytest.mark.parametrize("mask", swept(MASKS, QUICK))
def test_forward(mask, queries, impl):
    check_forward(case_of(mask, queries, num_heads=4), impl)


@pytest.mark.parametrize("head_dim", (64, 200))
@pytest.mark.parametrize("mask", (sweep("both"), "full_rows"))
def test_forward_of_other_tiles(mask, head_dim):
    """Four consumers; one tile of Q, and an output that leaves in halves."""
    check_forward(case_of(mask, DELTA, num_heads=2, head_dim=head_dim), "v8_own_waits")


def check_forward(case: Case, impl: str) -> None:

    def draw(i: int) -> tuple:
        call = case.arguments(BF16, i)
        with kernels_run(impl), full_of_nan():
            out = gdpa(**call, impl=impl)
        return [out], *of_pytorch(prepared(call))

    within_budget(draw, ["out"], least=8192)


def prepared(call: dict) -> Batch:
    """The Batch of a call."""
    batch = batch_of(call)
    offsets = batch.cu_seqlens_q, batch.cu_seqlens_k
    return replace(batch, segments=batch.mask.segments(*offsets, batch.lower_right, True))


V4, V7 = "v4_warp_specialized_backward", "v7_wide_backward"
MASKS_OF_GRADIENTS = MASKS | {"none": {}, "window_alone": {"window": 20}}


@pytest.mark.parametrize(
    "impl, head_dim",
    [
        ("v1_tiled_backward", 64),
        (V4, 32),
        sweep(V4, 64),
        sweep(V4, 96),
        (V4, 128),
        (V7, 256),
        *(sweep(impl, dim) for impl in BLACKWELL["backward"] for dim in (64, 128)),
    ],  # fmt: skip
    ids=str,
)
@pytest.mark.parametrize("queries", (None, DELTA), ids=("all", "delta"))
@pytest.mark.parametrize("mask", swept(MASKS_OF_GRADIENTS, QUICK))
def test_gradients(mask, queries, impl, head_dim):
    heads = {"num_heads": 2, "num_heads_k": 1, "head_dim": head_dim}
    call = required(case_of(mask, queries, **heads).arguments(BF16))
    grad = torch.randn(call["q"].shape).to(call["q"])
    with kernels_run(impl):
        out = gdpa(**call, impl="v1_tiled", backward_impl=impl)
        found = torch.autograd.grad(out, [call[n] for n in "qkv"], grad)

    def defined(dtype: torch.dtype) -> list[torch.Tensor]:
        cast = {n: call[n].detach().to(dtype) for n in "qkv"}
        return list(reference.backward_in_dtype(grad.to(dtype), prepared(call | cast)))

    within_budget(lambda i: (list(found), defined(FP64), defined(BF16)), ["dq", "dk", "dv"])


def test_three_calls_are_one():
    """Attention over [A; B] is a sum: history, targets over history, targets over themselves."""
    n, m = 40, 12
    q, k, v = (torch.randn(n, 2, 8, dtype=FP64) for _ in range(3))
    h, whole, old, new = n - m, *(cu_seqlens((x,), "cpu") for x in (n, n - m, m))
    options = {"impl": "reference", "activation": "silu"}
    out = gdpa(q, k, v, whole, whole, n, n, causal=True, num_targets=torch.tensor([m]).int(),
               **options)  # fmt: skip
    history = gdpa(q[:h], k[:h], v[:h], old, old, h, h, causal=True, **options)
    across = gdpa(q[h:], k[:h], v[:h], new, old, m, h, **options)
    themselves = gdpa(q[h:], k[h:], v[h:], new, new, m, m, window=0, add_to=across, **options)
    torch.testing.assert_close(out, torch.cat((history, themselves)), rtol=0, atol=1e-14)


def test_a_layer_scores_each_candidate_as_if_it_were_alone():
    layer = GDPASelfAttention(16, 2, causal=True, window=9, full_rows=3, dtype=FP64)
    history, candidates = torch.randn(20, 16, dtype=FP64), torch.randn(3, 16, dtype=FP64)

    def scored(*chosen: int) -> torch.Tensor:
        x = torch.cat((history, candidates[[*chosen]]))
        ends = torch.tensor([0, len(x)], dtype=torch.int32)
        y, _ = layer((x, ends), num_targets=torch.tensor([len(chosen)]).int(), num_contexts=2)
        return y[len(history) :]

    alone = torch.cat([scored(i) for i in range(3)])
    torch.testing.assert_close(scored(0, 1, 2), alone, rtol=0, atol=1e-14)
    with pytest.raises(ValueError, match="causal must be True, .* got False"):
        GDPASelfAttention(16, 2, target_group_size=2)
    for ends in (torch.tensor([0, 20]), Lengths(torch.tensor([0, 20]))):
        with pytest.raises(ValueError, match="together at most the length, got 21 and 0 of 20"):
            layer((history, ends), num_targets=int32(21))
        with pytest.raises(ValueError, match="at least 0 and .*, got 0 and -1 of 20"):
            layer((history, ends), num_contexts=int32(-1))


WRONG = (
    (ValueError, "target_group_size must be an integer of at least 1, got 0",
     {"target_group_size": 0}),
    (TypeError, "full_rows must be an integer of at least 0, got True", {"full_rows": True}),
    (ValueError, "target_ranks must be one of shared, own, got 'mine'", {"target_ranks": "mine"}),
    (ValueError, "full_rows must be 0 without a window", {"full_rows": 3}),
    (ValueError, "must be 1 and 'shared' without num_targets, got 2 and 'shared'",
     {"target_group_size": 2}),
    (ValueError, "causal must be True, .* with num_targets, .* got False",
     {"num_targets": int32(1), "causal": False}),
    (TypeError, "num_targets must be an int32 or int64 tensor or None, got torch.int16",
     {"num_targets": int32(1).short()}),
    (TypeError, "num_targets must be an int32 or int64 tensor or None, got 2", {"num_targets": 2}),
    (ValueError, "num_contexts must be an integer of at least 0, got -1", {"num_contexts": -1}),
    (TypeError, "num_contexts must be an integer of at least 0, got 1.5", {"num_contexts": 1.5}),
    (ValueError, r"num_targets must have shape \[1\] on .*, got \[2\]",
     {"num_targets": int32(1, 1)}),
    (ValueError, "together at most the length, got 8 and 2 of 9 in sequence 0",
     {"num_targets": int32(8), "num_contexts": int32(2)}),
    (ValueError, "got -1 and 0 of 9 in sequence 0", {"num_targets": int32(-1)}),
)  # fmt: skip


@pytest.mark.parametrize("error, message, options", WRONG)
def test_what_does_not_fit_is_refused(error, message, options):
    call = Case("call", (9,), options={"causal": True} | options).arguments(BF16)
    with pytest.raises(error, match=message):
        gdpa(**call)


def test_queries_that_are_not_the_last_are_refused():
    call = Case("call", (9,), (5,), options={"causal": "upper_left", "num_targets": int32(1)})
    with pytest.raises(ValueError, match="causal must be 'lower_right' with num_targets, .* other"):
        gdpa(**call.arguments(BF16))
    shared = Case("call", (5, 5), (9, 9), shared_q=True,
                  options={"causal": "lower_right", "num_targets": int32(1, 1)})  # fmt: skip
    with pytest.raises(ValueError, match="cu_seqlens_q must be given with num_targets"):
        gdpa(**shared.arguments(BF16))
