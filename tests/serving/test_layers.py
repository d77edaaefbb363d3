"""What is served is what was trained: layers over kept histories against their own forward."""

import pytest
import torch
import torch.nn.functional as F

from gdpa_kernels import GDPASelfAttention
from gdpa_kernels.serving.cache import Model, PagedCache
from gdpa_kernels.serving.layers import candidates, extend

FP64 = torch.float64
WIDTH, USERS = 32, ["a", "b", "c"]
HISTORY, TARGETS = (7, 0, 4), (2, 3, 1)


def ends(counts) -> torch.Tensor:
    return torch.tensor((0, *counts)).cumsum(0).int()


def stack(seed: int = 0, **options) -> list[GDPASelfAttention]:
    torch.manual_seed(seed)
    given = {"activation": "silu", "output_scale": 0.1, "causal": True, "dtype": FP64} | options
    return [GDPASelfAttention(WIDTH, 4, 2, **given) for _ in range(3)]


def cache(**model) -> PagedCache:
    return PagedCache(Model(3, **model), 9, 4, 2, WIDTH // 4, dtype=FP64)


def modelled(options: dict) -> dict:
    """What `Model` is told of layers with these options."""
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
    layers, kept = stack(**options), cache(**modelled(options))
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
    layers, kept = stack(**options), cache(num_contexts=contexts, **modelled(options))
    x = torch.randn(sum(HISTORY), WIDTH, dtype=FP64)
    shown = torch.randn(sum(TARGETS), WIDTH, dtype=FP64)
    served(layers, kept, x, HISTORY)
    before = kept.data.clone()
    at, some = kept.pages(USERS), ends(TARGETS)
    found = run(layers, shown, lambda i, layer, z: candidates(layer, z, some, 3, kept, i, at))
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
    layers, kept = stack(**options), cache(**modelled(options))
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
        (
            NotImplementedError,
            "position_bias and time_bias of layer must be None",
            {"time_bias": 9},
        ),
        (NotImplementedError, "position_bias and .* got one of them", {"position_bias": 9}),
        (
            ValueError,
            r"mask of cache.model, .causal, window. \(True, None\), got \(False, None\)",
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
    kept = cache(next_time=True)
    with pytest.raises(ValueError, match="but the last row's bias takes the time of the first"):
        candidates(stack()[0], torch.zeros(1, WIDTH, dtype=FP64), ends([1]), 1, kept, 0,
                   kept.pages(["a"]))  # fmt: skip
