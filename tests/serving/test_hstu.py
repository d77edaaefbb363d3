"""HSTU over kept histories: a relative bias, its times in pages, and `HSTULayer`, against the
layers' own forward; candidates whose scores do not depend on each other."""

import pytest
import torch
import torch.nn.functional as F

from gdpa_kernels import GDPASelfAttention, Mask, RelativeBias, gdpa
from gdpa_kernels.hstu import RECSYS_EXAMPLES, RESEARCH, STU, HSTULayer
from gdpa_kernels.serving import PagedCache
from gdpa_kernels.serving.layers import candidates, extend
from tests.models import rules_of

FP64 = torch.float64
WIDTH, HEADS, USERS = 16, 2, ["a", "b", "c"]
HISTORY, FIRST, TARGETS = (7, 0, 4), (3, 0, 4), (2, 3, 1)
BOTH = {"position_bias": 6, "time_bias": 20, "next_time": False}


def ends(counts) -> torch.Tensor:
    return torch.tensor((0, *counts)).cumsum(0).int()


def interleaved(first, counts, second, others) -> torch.Tensor:
    """The rows of each user of both, one after another."""
    pairs = zip(first.split(list(counts)), second.split(list(others)), strict=True)
    return torch.cat([part for pair in pairs for part in pair])


def attentions(**options):
    return [
        GDPASelfAttention(
            WIDTH, HEADS, activation="silu", causal=True, output_scale=0.1, dtype=FP64, **options
        )
        for _ in range(3)
    ]


def hstu(form=STU, sizes=(8, 8), **options):
    return [HSTULayer(WIDTH, HEADS, *sizes, form=form, divisor=11, dtype=FP64, **options)
            for _ in range(3)]  # fmt: skip


LAYERS = {
    "positions": lambda: attentions(position_bias=6),
    "times": lambda: attentions(time_bias=20, next_time=False),
    "both, window": lambda: attentions(window=2, **BOTH),
    "groups": lambda: attentions(target_group_size=2, **BOTH),
    "own ranks": lambda: attentions(target_ranks="own", position_bias=6),
    "stu": hstu,
    "stu, v wider": lambda: hstu(sizes=(8, 4)),
    "stu, q and k wider": lambda: hstu(sizes=(4, 8)),
    "research, bias": lambda: hstu(RESEARCH, scale=1.0, **BOTH),
    "recsys-examples, window": lambda: hstu(
        RECSYS_EXAMPLES, mask=Mask(causal=True, window=3, target_ranks="own")
    ),
}  # fmt: skip


def run(layers, x, attend):
    for index, layer in enumerate(layers):
        x = attend(index, layer, F.layer_norm(x, (WIDTH,)))
    return x


@pytest.mark.parametrize("contexts", (0, 2))
@pytest.mark.parametrize("name", LAYERS)
def test_what_is_served_is_what_was_trained(name, contexts):
    """Histories in two appends, candidates behind them, three layers, beside one whole call."""
    torch.manual_seed(0)
    layers = LAYERS[name]()
    for weight in (weight for layer in layers for weight in layer.parameters()):
        weight.data += 0.3 * torch.randn_like(weight)
    timed, window = layers[0].time_bias is not None, layers[0].mask.window
    kept = PagedCache(
        rules_of(3, window=window, num_contexts=contexts), 9, 4, HEADS, 8, dtype=FP64,
        with_times=timed,
    )  # fmt: skip
    x, shown = (torch.randn(sum(n), WIDTH, dtype=FP64) for n in (HISTORY, TARGETS))
    times, asked = (torch.randint(0, 10**6, (sum(n),)) for n in (HISTORY, TARGETS))
    steps = [HISTORY] if contexts else [FIRST, [a - b for a, b in zip(HISTORY, FIRST, strict=True)]]
    outs, begin = [], (0, 0, 0)
    for counts in steps:
        rows = torch.cat([
            torch.arange(end + start, end + start + n)
            for end, start, n in zip(ends(HISTORY).tolist(), begin, counts, strict=False)
        ])  # fmt: skip
        new = kept.append(USERS, counts, timestamps=times[rows] if timed else None)
        whole = kept.pages(USERS)
        outs.append(run(layers, x[rows], lambda i, layer, z, new=new, whole=whole: extend(
            layer, z, kept, i, new, whole)))  # fmt: skip
        begin = counts
    table, before = kept.pages(USERS), kept.data.clone()
    given = {"timestamps": asked} if timed else {}
    found = run(layers, shown, lambda i, layer, z: candidates(
        layer, z, ends(TARGETS), 3, kept, i, table, **given))  # fmt: skip
    assert torch.equal(kept.data, before)

    both = ends([h + t for h, t in zip(HISTORY, TARGETS, strict=True)])
    options = {"num_targets": torch.tensor(TARGETS), "num_contexts": contexts or None}
    if timed:
        options["timestamps"] = interleaved(times, HISTORY, asked, TARGETS)
    with torch.no_grad():
        wanted = run(layers, interleaved(x, HISTORY, shown, TARGETS),
                     lambda _, layer, z: layer((z, both), **options)[0])  # fmt: skip
    parts = wanted.split([n for pair in zip(HISTORY, TARGETS, strict=True) for n in pair])
    torch.testing.assert_close(found, torch.cat(parts[1::2]), rtol=0, atol=1e-12)
    served = outs[0] if contexts else interleaved(outs[0], FIRST, outs[1], steps[1])
    torch.testing.assert_close(served, torch.cat(parts[::2]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("group", (1, 2))
def test_the_score_of_a_candidate_does_not_depend_on_others(group):
    torch.manual_seed(0)
    history, shown = 9, 4
    q, k, v = torch.randn(3, history + shown, 2, 8, dtype=FP64)
    bias = RelativeBias(torch.randn(63, dtype=FP64))

    def scored(rows, ranks):
        n = len(rows)
        mask = Mask(causal=True, num_targets=torch.tensor([n - history]), target_ranks=ranks,
                    target_group_size=group)  # fmt: skip
        call = ends([n]), ends([n]), n, n
        return gdpa(q[rows], k[rows], v[rows], *call, mask=mask, relative_bias=bias)[history:]

    for ranks, apart in (("shared", False), ("own", True)):
        together = scored([*range(history + shown)], ranks)
        groups = [[history + i + j for j in range(group)] for i in range(0, shown, group)]
        alone = torch.cat([scored([*range(history), *each], ranks) for each in groups])
        assert torch.allclose(together, alone, rtol=0, atol=1e-14) is not apart


def test_times_are_of_the_cache():
    kept = PagedCache(rules_of(1), 4, 4, 1, 8, dtype=FP64, with_times=True)
    kept.append(["a"], [3], timestamps=torch.tensor([5, 6, 7]))
    kept.append(["b", "a"], [1, 2], timestamps=torch.tensor([1, 8, 9], dtype=torch.int32))
    assert kept.read_times(kept.pages(["a", "b"])).tolist() == [5, 6, 7, 8, 9, 1]
    kept.edit("a", 1, epoch=1, added=False)
    for wrong, error, message in (
        (None, TypeError, "timestamps must be an int32 or int64 tensor with with_times"),
        (torch.zeros(2, dtype=torch.int64), ValueError, r"must have shape \[1\] on cpu, got \[2\]"),
    ):
        with pytest.raises(error, match=message):
            kept.append(["b"], [1], timestamps=wrong)
    assert kept.length("b") == 1
    plain = PagedCache(rules_of(1), 4, 4, 1, 8, dtype=FP64)
    with pytest.raises(ValueError, match="timestamps must be None without with_times"):
        plain.append(["a"], [1], timestamps=torch.tensor([1]))
    assert plain.read_times(plain.pages(["a"], missing="empty")) is None


def test_a_layer_without_a_divisor_is_refused():
    kept = PagedCache(rules_of(1), 4, 4, HEADS, 8, dtype=FP64)
    new = kept.append(["a"], [1])
    with pytest.raises(ValueError, match="divisor of layer must be given"):
        extend(HSTULayer(WIDTH, HEADS, dtype=FP64), torch.zeros(1, WIDTH, dtype=FP64), kept, 0,
               new, kept.pages(["a"]))  # fmt: skip
