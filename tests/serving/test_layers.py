"""What is served is what was trained: layers over kept histories against their own forward."""

import pytest
import torch
import torch.nn.functional as F

from gdpa_kernels import GDPASelfAttention, Lengths
from gdpa_kernels.serving import PagedCache
from gdpa_kernels.serving.layers import candidates, extend
from tests.models import rules_of

FP64 = torch.float64
WIDTH, USERS = 32, ["a", "b", "c"]
HISTORY, TARGETS = (7, 0, 4), (2, 3, 1)


def ends(counts) -> torch.Tensor:
    return torch.tensor((0, *counts)).cumsum(0).int()


def stack(seed: int = 0, **options) -> list[GDPASelfAttention]:
    torch.manual_seed(seed)
    given = {"activation": "silu", "output_scale": 0.1, "causal": True, "dtype": FP64} | options
    return [GDPASelfAttention(WIDTH, 4, 2, **given) for _ in range(3)]


def cache(**rules) -> PagedCache:
    return PagedCache(rules_of(3, **rules), 9, 4, 2, WIDTH // 4, dtype=FP64)


def rules_for(options: dict) -> dict:
    """What `HistoryRules` are told of layers with these options."""
    positions = "index" if "rotary" in options else None
    return {"window": options.get("window"), "positions": positions}


def run(layers: list, x: torch.Tensor, attend) -> torch.Tensor:
    """The model: before each layer a norm of the row, behind it the residual."""
    for index, layer in enumerate(layers):
        x = x + attend(index, layer, F.layer_norm(x, (WIDTH,)))
    return x


def served(layers: list, kept: PagedCache, x: torch.Tensor, counts: tuple) -> torch.Tensor:
    """The model's output for counts[i] new tokens of each user."""
    new, whole = kept.append(USERS, counts), kept.pages(USERS)
    return run(layers, x, lambda i, layer, z: extend(layer, z, kept, i, new, whole))


@pytest.mark.parametrize(
    "options",
    [
        {}, {"window": 2}, {"qk_norm": True}, {"qk_norm": True, "fused_qk_norm": True},
        {"rotary": 100.0}, {"rotary": 9.0, "qk_norm": True, "fused_qk_norm": True, "window": 3},
    ],
    ids=str,
)  # fmt: skip
def test_appends_give_the_rows_of_one_forward(options):
    layers, kept = stack(**options), cache(**rules_for(options))
    x = torch.randn(sum(HISTORY), WIDTH, dtype=FP64).split(HISTORY)
    whole = ends(HISTORY)
    wanted = run(layers, torch.cat(x), lambda i, layer, z: layer((z, whole))[0])
    parts = []
    for begin, end in ((0, 3), (3, 4), (4, 7)):
        rows = [one[begin:end] for one in x]
        parts.append(
            served(layers, kept, torch.cat(rows), tuple(map(len, rows))).split([*map(len, rows)])
        )
    found = torch.cat([torch.cat(pieces) for pieces in zip(*parts, strict=True)])
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"target_group_size": 2}, {"rotary": 100.0}, {"window": 2}, {"window": 0},
        {"window": 3, "target_group_size": 2, "rotary": 9.0, "qk_norm": True},
        {"window": 1, "target_ranks": "own"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("contexts", (0, 2))
def test_candidates_are_scored_as_trained(options, contexts):
    layers, kept = stack(**options), cache(num_contexts=contexts, **rules_for(options))
    x = torch.randn(sum(HISTORY), WIDTH, dtype=FP64)
    shown = torch.randn(sum(TARGETS), WIDTH, dtype=FP64)
    served(layers, kept, x, HISTORY)
    before = kept.data.clone()
    table, some = kept.pages(USERS), ends(TARGETS)
    found = run(layers, shown, lambda i, layer, z: candidates(layer, z, some, 3, kept, i, table))
    assert torch.equal(kept.data, before)
    pairs = zip(x.split(HISTORY), shown.split(TARGETS), strict=True)
    lengths = [h + t for h, t in zip(HISTORY, TARGETS, strict=True)]
    both, number = ends(lengths), torch.tensor(TARGETS).int()
    wanted = run(
        layers,
        torch.cat([part for pair in pairs for part in pair]),
        lambda i, layer, z: layer((z, both), num_targets=number, num_contexts=contexts)[0],
    )
    last = [y[-n:] for y, n in zip(wanted.split(lengths), TARGETS, strict=True)]
    torch.testing.assert_close(found, torch.cat(last), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("window", (None, 2))
def test_contexts_see_their_whole_history(window):
    layers, kept = stack(window=window), cache(window=window, num_contexts=2)
    x = torch.randn(sum(HISTORY), WIDTH, dtype=FP64)
    whole = ends(HISTORY)
    wanted = run(layers, x, lambda i, layer, z: layer((z, whole), num_contexts=2)[0])
    torch.testing.assert_close(served(layers, kept, x, HISTORY), wanted, rtol=1e-11, atol=1e-11)
    with pytest.raises(ValueError, match="contexts see the new rows, and old rows see the cont"):
        served(layers, kept, x[:1], (1, 0, 0))


@pytest.mark.parametrize("options", [{}, {"rotary": 100.0}], ids=str)
def test_a_deletion_is_served_after_its_suffix_is_computed_again(options):
    layers, kept = stack(**options), cache(**rules_for(options))
    x = torch.randn(7, WIDTH, dtype=FP64)
    served(layers, kept, x, (7, 0, 0))
    rows = kept.edit("a", 3, epoch=1, added=False)
    left = torch.cat((x[:3], x[4:]))
    new, whole = kept.append(["a"], [6 - rows], [1]), kept.pages(["a"], [1])
    found = run(layers, left[rows:], lambda i, layer, z: extend(layer, z, kept, i, new, whole))
    wanted = run(layers, left, lambda i, layer, z: layer((z, ends([6])))[0])
    torch.testing.assert_close(found, wanted[rows:], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "error, told, options",
    [
        (ValueError, "'index' for a layer with rotary, .* got None", {"rotary": 100}),
        (NotImplementedError, "full_rows of layer must be 0, got 2", {"full_rows": 2, "window": 3}),
        (NotImplementedError, "next_time of layer must be False: the time", {"time_bias": 9}),
        (ValueError, "cache must have times", {"time_bias": 9, "next_time": False}),
        (
            ValueError,
            "causal of layer must be True or 'upper_left', got False",
            {"causal": False},
        ),
        (ValueError, r"got \(True, 5\)", {"window": 5}),
    ],
)
def test_a_layer_that_cannot_be_served_is_refused(error, told, options):
    kept = cache()
    new = kept.append(["a"], [1])
    with pytest.raises(error, match=told):
        extend(
            stack(**options)[0], torch.zeros(1, WIDTH, dtype=FP64), kept, 0, new, kept.pages(["a"])
        )
    for index, layers in ((3, 3), (-1, "an integer of at least 0")):
        with pytest.raises(ValueError, match=f"index must be .*{layers}, got {index}"):
            extend(
                stack()[0], torch.zeros(1, WIDTH, dtype=FP64), kept, index, new, kept.pages(["a"])
            )
    kept = cache(next_time=True)
    kept.append(["a"], [0])
    with pytest.raises(ValueError, match="but the last row's bias takes the time of the first"):
        candidates(stack()[0], torch.zeros(1, WIDTH, dtype=FP64), ends([1]), 1, kept, 0,
                   kept.pages(["a"]))  # fmt: skip


def test_pages_of_others_or_of_before_are_refused():
    layer, kept = stack()[0], cache()
    served([layer], kept, torch.zeros(sum(HISTORY), WIDTH, dtype=FP64), HISTORY)
    before, new = kept.pages(USERS), kept.append(USERS, (1, 0, 2))
    other = kept.pages(USERS, [1, 0, 0], missing="empty")
    for whole in (before, new, kept.pages(USERS[::-1]), other):
        with pytest.raises(ValueError, match="whole must be the pages of users and epochs .* got"):
            extend(layer, torch.zeros(3, WIDTH, dtype=FP64), kept, 0, new, whole)
    with pytest.raises(ValueError, match="whole must be PagedCache.pages of whole histories"):
        candidates(layer, torch.zeros(3, WIDTH, dtype=FP64), ends((1, 1, 1)), 1, kept, 0, new)


@pytest.mark.parametrize("options", [{}, {"rotary": 100.0}, {"window": 2}], ids=str)
def test_offsets_of_candidates_are_checked(options):
    layers, kept = stack(**options), cache(**rules_for(options))
    served(layers, kept, torch.randn(sum(HISTORY), WIDTH, dtype=FP64), HISTORY)
    shown, whole = torch.randn(sum(TARGETS), WIDTH, dtype=FP64), kept.pages(USERS)

    def call(offsets, longest=3, layer=layers[0]):
        return candidates(layer, shown, offsets, longest, kept, 0, whole)

    for given in (ends(TARGETS).long(), Lengths(ends(TARGETS))):
        assert torch.equal(call(given), call(ends(TARGETS)))
    for wrong, told in (
        ((ends((2, 3, 0)),), "cu_seqlens must run from 0 to the 6 rows .* got 0 to 5"),
        ((ends((2, 3, 1)) + 1,), "cu_seqlens must run from 0 .* got 1 to 7"),
        ((ends((3, 4, -1)), 4), "cu_seqlens must not decrease, got 7 followed by 6"),
        ((ends(TARGETS), 2), "max_seqlen must be at least the longest sequence, 3 .*, got 2"),
        ((ends(TARGETS), None), "max_seqlen must be an integer of at least 0, got None"),
        ((ends((3, 3)),), r"cu_seqlens must have shape \[4\], as the histories, got \[3\]"),
    ):
        error = TypeError if None in wrong else ValueError
        with pytest.raises(error, match=told):
            call(*wrong)
    trusting = stack(**options, validate=False)[0]
    assert call(ends(TARGETS), 3, trusting).shape == shown.shape
