"""Workloads: hand-computed counts, length laws, closed forms, round trips, errors."""

import json
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gdpa_kernels.gdpa.mask import Mask, visible
from gdpa_lab.measuring.length_distributions import (
    KUAIRAND,
    MOVIELENS,
    Between,
    Events,
    Full,
    LengthDistribution,
    LogNormal,
    Quantiles,
    Rounded,
    Sorted,
    Uniform,
)
from gdpa_lab.measuring.workload import Workload, visible_pairs
from gdpa_lab.measuring.workloads import (
    BLOCK_TABLES,
    BLOCK_WORKLOADS,
    FIGURES,
    WORKLOADS,
    figure_direction,
    figures_of,
    workload,
)

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Fixed(LengthDistribution):
    lengths: tuple[int, ...]

    kind = "fixed"

    def sample(self, batch, max_seqlen, rng):
        return list(self.lengths)


SMALL = Workload(
    name="small", batch=2, num_heads_q=4, num_heads_k=2, head_dim=8, max_seqlen_q=5,
    max_seqlen_k=4, lengths_q=Fixed((3, 5)), lengths_k=Fixed((2, 4)),
)  # fmt: skip
BLOCKS = Workload(
    name="blocks", operator="block_attention", batch=3, num_heads_q=4, num_heads_k=2, head_dim=8,
    max_seqlen_q=70, max_seqlen_k=70, lengths_q=Fixed((5, 32, 70)), block_size=32,
)  # fmt: skip


def rng(seed=0):
    return np.random.Generator(np.random.PCG64(seed))


POOLING = replace(SMALL, shared_q=True, lengths_q=Full())
TURNED = replace(BLOCKS, rotary=True, rotate_v=True)
ROTARY = workload("block-rotary-1735537")
DIRECTIONS = ("forward", "backward")


@pytest.mark.parametrize(
    ("of", "values", "counts"),
    [
        # 3 x 2 + 5 x 4 pairs; 2 products x 2 FLOPs x 4 heads x 8 dims x 26 pairs, backward 5
        # products; q and o: 8 rows x 4 heads x 8 dims x 2 bytes = 512; k and v: 6 x 2 x 8 x 2 = 192
        # each; backward reads q, k, v and the gradient of o, writes the gradients of q, k and v
        (SMALL, {"total_q": 8, "rows_q": 8, "total_k": 6, "fill": 8 / (2 * 5), "pairs": 26},
         {"flops": (3328, 8320), "bytes": (1408, 2304),
          "bytes_read": (512 + 192 + 192, 512 + 192 + 192 + 512),
          "bytes_written": (512, 512 + 192 + 192)}),
        # keys seen by each query of (3 x 2) and (5 x 4): causal 1,2,2 and 1,2,3,4,4; FLOPs follow
        # the visible pairs: 4 x 4 heads x 8 dims x 19
        (replace(SMALL, causal=True), {"pairs": 5 + 14}, {"flops": (2432, 6080)}),
        # window 1: 2,2,1 and 2,3,3,2,1; both: 1,2,1 and 1,2,2,2,1
        (replace(SMALL, window=1), {"pairs": 5 + 11}, {}),
        (replace(SMALL, causal=True, window=1), {"pairs": 4 + 8}, {}),
        # window 0 is the diagonal: min(lq, lk) pairs
        (replace(SMALL, window=0), {"pairs": 2 + 4}, {}),
        (replace(SMALL, window=10**30), {"pairs": 26}, {}),
        (replace(SMALL, dtype="float32"), {}, {"bytes": (2 * 1408, 2 * 2304)}),
        # q: 5 rows x 64 bytes = 320; o: 10 rows x 64 = 640; k, v: 192 each
        (POOLING, {"seqlens_q": (5, 5), "rows_q": 5, "total_q": 10, "pairs": 5 * 2 + 5 * 4},
         {"bytes_read": (320 + 192 + 192, 320 + 192 + 192 + 640),
          "bytes_written": (640, 320 + 192 + 192)}),
        # 5; 32; 32 + 32 + 6; 107 rows of 16 bytes: q and o 4 heads, k and v 2
        (BLOCKS, {"blocks": 5, "pairs": 25 + 1024 + 2 * 1024 + 36},
         {"flops": (4 * 4 * 8 * 3133, 10 * 4 * 8 * 3133),
          "bytes_read": (107 * 16 * (4 + 2 + 2), 107 * 16 * (4 + 2 + 2 + 4)),
          "bytes_written": (107 * 16 * 4, 107 * 16 * (4 + 2 + 2))}),
        # sin and cos: 107 rows of 4 values of 2 bytes each, once
        (TURNED, {},
         {"flops": (4 * 4 * 8 * 3133, 10 * 4 * 8 * 3133),
          "bytes_read": (107 * 16 * 8 + 2 * 107 * 4 * 2, 107 * 16 * 12 + 2 * 107 * 4 * 2),
          "bytes_written": (107 * 16 * 4, 107 * 16 * (4 + 2 + 2))}),
        # 1,735,537 rows x 3 heads x 128 x 2 bytes = 1,332,892,416; sin and cos 444,297,472
        (ROTARY, {"total_q": 1_735_537},
         {"bytes": (4 * 1_332_892_416 + 444_297_472, 7 * 1_332_892_416 + 444_297_472)}),
        # 1152 x 256 x 256 pairs; 4 x 4 heads x 128 FLOPs each; each tensor: 1152 x 256 rows x 4 x
        # 128 x 2 bytes = 301,989,888; forward 4, backward 7
        (workload("gdpa-self-full-256"), {"pairs": 75_497_472},
         {"flops": (154_618_822_656, 386_547_056_640), "bytes": (1_207_959_552, 2_113_929_216)}),
        # 1152 x 2048 x 256 pairs; q, o: 1152 x 2048 x 1024 bytes = 2,415,919,104; k, v: 301,989,888
        (workload("gdpa-cross-full-2048"), {"pairs": 603_979_776},
         {"flops": (1_236_950_581_248, 3_092_376_453_120),
          "bytes_read": (2_415_919_104 + 2 * 301_989_888, 2 * 2_415_919_104 + 2 * 301_989_888),
          "bytes_written": (2_415_919_104, 2_415_919_104 + 2 * 301_989_888)}),
    ],
)  # fmt: skip
def test_counts_by_hand(of, values, counts):
    assert {name: getattr(of, name) for name in values} == values
    for name, both in counts.items():
        assert tuple(getattr(of, name)(direction) for direction in DIRECTIONS) == both, name


def test_named_block_workloads_are_the_published_ones():
    assert max(ROTARY.seqlens_q) <= ROTARY.max_seqlen_q
    assert len(BLOCK_WORKLOADS) == 8 * 2 * 2 + 1 + 2 * 2
    assert not set(BLOCK_WORKLOADS) & set(WORKLOADS)
    for name, w in BLOCK_WORKLOADS.items():
        assert w.name == name and workload(name) is w and w.block_size == 64
        assert w.batch == (1152 if w.max_seqlen_q <= 7000 else 768)
        if "-fill70-" in name:
            assert w.fill == pytest.approx(0.7, rel=0.02)
            assert min(w.seqlens_q) >= 0.4 * w.max_seqlen_q and max(w.seqlens_q) < w.max_seqlen_q
        if "-fill100-" in name:
            assert set(w.seqlens_q) == {w.max_seqlen_q}
    for names in BLOCK_TABLES.values():
        assert set(names) <= set(BLOCK_WORKLOADS)
    for plain in ("block-fill70-2000", "block-rotary-1735537"):
        for head_dim in (96, 256):
            w = workload(f"{plain}-d{head_dim}")
            assert w == replace(workload(plain), name=w.name, head_dim=head_dim)


def test_block_tables_match_the_published_data():
    speedups = (REPOSITORY / "data/published/block_attention_speedups.csv").read_text().split()
    published = set()
    for row in speedups[1:]:
        _, _, fill, longest, batch, *_ = row.split(",")
        w = workload(f"block-fill{round(100 * float(fill))}-{longest}")
        assert w.batch == int(batch)
        published.add(w.name)
    assert published == set(BLOCK_TABLES["table6"])


def test_old_records_keep_their_workloads_byte_for_byte():
    paths = sorted((REPOSITORY / "data" / "records").glob("*.json"))
    assert paths
    for path in paths:
        for name, stored in json.loads(path.read_text())["workloads"].items():
            restored = Workload.from_dict(stored)
            assert restored.name == name
            assert json.dumps(restored.to_dict()) == json.dumps(stored)


def test_between_is_the_published_law():
    lengths = Between(0.4, 1.0).sample(20_000, 10, rng())
    assert set(lengths) == {4, 5, 6, 7, 8, 9}
    assert statistics.mean(lengths) == pytest.approx(6.5, abs=0.05)
    moved = Between(0.4, 1.0, total=130_001).sample(20_000, 11, rng())
    assert sum(moved) == 130_001
    with pytest.raises(ValueError, match=r"total must leave every length in 1 .. 10, got 200000"):
        Between(0.4, 1.0, total=200_000).sample(20_000, 10, rng())


def test_half_dense_keeps_keys_dense():
    dense, jagged = workload("gdpa-self-half-dense-512"), workload("gdpa-self-half-jagged-512")
    assert set(dense.seqlens_k) == {512}
    assert jagged.seqlens_k == jagged.seqlens_q == dense.seqlens_q
    assert dense.pairs == 512 * dense.total_q
    assert jagged.pairs == sum(n * n for n in jagged.seqlens_q)


def test_lengths_are_fixed_for_ever():
    # a change here changes the meaning of every record
    expected = {
        "gdpa-self-half-dense-1024": (1019, 392, 847, 858, 1000, 80),
        "gdpa-self-ml1m-1024": (1024, 62, 267, 281, 1024, 27),
        "gdpa-self-ml20m-2048": (2048, 46, 216, 229, 1051, 23),
        "gdpa-self-kuairand1k-4096": (4096, 4096, 4096, 4096, 4096, 1774),
        "gdpa-self-kuairandpure-512": (429, 27, 92, 95, 209, 7),
    }
    assert {name: workload(name).seqlens_q[:6] for name in expected} == expected
    totals = {
        "gdpa-self-half-dense-2048": 1_175_891, "gdpa-self-ml25m-1024": 157_823,
        "block-fill70-2000": 1_609_664,
    }  # fmt: skip
    assert {name: workload(name).total_q for name in totals} == totals
    assert workload("block-fill70-2000").blocks == 25_716


def test_seed_changes_lengths_and_streams_differ():
    w = workload("gdpa-self-half-jagged-256")
    assert replace(w, seed=1).seqlens_q != w.seqlens_q
    independent = replace(w, lengths_k=Uniform(0.5))
    assert independent.seqlens_q == w.seqlens_q
    assert independent.seqlens_k != w.seqlens_q


def test_uniform_is_the_published_generator():
    half = Uniform(0.5).sample(20_000, 16, rng())
    assert (min(half), max(half)) == (1, 16)
    assert statistics.mean(half) == pytest.approx(8.5, abs=0.1)
    # 2 x 0.7 - 1 is just below 0.4 in fp64: 399 .. 1000
    dense = Uniform(0.7).sample(20_000, 1000, rng())
    assert min(dense) == 399 and statistics.mean(dense) == pytest.approx(700, abs=5)
    # 1 .. floor(0.4 x 1000)
    sparse = Uniform(0.2).sample(20_000, 1000, rng())
    assert max(sparse) == 400 and statistics.mean(sparse) == pytest.approx(200.5, abs=3)
    assert Uniform(1.0).sample(3, 7, rng()) == [7, 7, 7]
    assert Uniform(0.01).sample(3, 7, rng()) == [1, 1, 1]


def test_log_normal_has_its_quantiles():
    law = MOVIELENS["ml20m"]
    lengths = sorted(law.sample(40_001, 10**9, rng()))
    # the median is loc + scale; the P90 is loc + scale x exp(1.2816 sigma)
    assert lengths[20_000] == pytest.approx(law.loc + law.scale, rel=0.03)
    p90 = law.loc + law.scale * math.exp(1.2815515655 * law.sigma)
    assert lengths[36_000] == pytest.approx(p90, rel=0.03)
    assert lengths[0] >= 20


@pytest.mark.parametrize("name", sorted(KUAIRAND))
def test_quantiles_pass_through_the_published_table(name):
    law = KUAIRAND[name]
    for level, length in zip(law.levels, law.lengths, strict=True):
        assert law.inverse_cdf(level) == pytest.approx(length)
    # halfway between two levels: the geometric mean of their lengths
    assert law.inverse_cdf(0.375) == pytest.approx(math.sqrt(law.lengths[2] * law.lengths[3]))
    lengths = sorted(law.sample(20_001, 10**9, rng()))
    assert lengths[10_000] == pytest.approx(law.lengths[3], rel=0.03)
    assert lengths[18_000] == pytest.approx(law.lengths[5], rel=0.03)
    assert law.lengths[0] <= lengths[0] and lengths[-1] <= law.lengths[-1]


laws = st.one_of(
    st.just(Full()),
    st.builds(Uniform, st.floats(0.001, 1.0)),
    st.builds(Between, st.floats(0.001, 0.5), st.floats(0.6, 1.0)),
    st.builds(LogNormal, st.floats(0.1, 3), st.floats(-50, 50), st.floats(0.1, 1e4)),
    st.sampled_from(sorted(KUAIRAND)).map(KUAIRAND.get),
)


@given(law=laws, batch=st.integers(0, 20), cap=st.integers(1, 5000), seed=st.integers(0, 2**64))
def test_lengths_stay_between_one_and_the_cap(law, batch, cap, seed):
    lengths = law.sample(batch, cap, rng(seed))
    assert len(lengths) == batch
    assert all(type(n) is int and 1 <= n <= cap for n in lengths)
    assert law.sample(batch, cap, rng(seed)) == lengths


@given(law=laws)
def test_laws_round_trip_through_json(law):
    assert LengthDistribution.from_dict(json.loads(json.dumps(law.to_dict()))) == law


lengths_pairs = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=4)


@given(lengths=lengths_pairs, causal=st.booleans(), window=st.none() | st.integers(0, 15))
def test_visible_pairs_match_enumeration(lengths, causal, window):
    def seen(i, j):
        return (not causal or j <= i) and (window is None or abs(i - j) <= window)

    expected = sum(seen(i, j) for lq, lk in lengths for i in range(lq) for j in range(lk))
    seqlens_q = tuple(lq for lq, _ in lengths)
    seqlens_k = tuple(lk for _, lk in lengths)
    assert visible_pairs(seqlens_q, seqlens_k, Mask(causal, window)) == expected


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4), share=st.floats(0, 0.99),
       window=st.none() | st.integers(0, 15))  # fmt: skip
def test_pairs_with_targets_match_the_mask(lengths, share, window):
    w = replace(
        SMALL, batch=len(lengths), causal=True, window=window, target_share=share,
        lengths_q=Fixed(tuple(lengths)), lengths_k=None, max_seqlen_q=40, max_seqlen_k=40,
    )  # fmt: skip
    expected = 0
    for n, targets in zip(lengths, w.num_targets, strict=True):
        assert targets <= share * n < targets + 1
        i, j = torch.arange(n)[:, None], torch.arange(n)[None]
        expected += int(visible(i, j, targets, 0, n, w.mask).sum())
    assert w.pairs == expected and w.masked


def test_visible_pairs_do_not_overflow():
    n = 2**31 - 1
    assert visible_pairs((n,) * 3, (n,) * 3) == 3 * n * n > 2**63
    assert visible_pairs((n,) * 3, (n,) * 3, Mask()) == 3 * n * n
    assert visible_pairs((n,) * 5, (n,) * 5, Mask(causal=True)) == 5 * n * (n + 1) // 2 > 2**63


OPTIONS = {
    "activation": ("gelu", "silu", "relu", "identity"), "scale": 0.5, "output_scale": 0.25,
    "causal": True, "window": 17, "dtype": "float16",
}  # fmt: skip


@pytest.mark.parametrize(
    "w",
    [*WORKLOADS.values(), *BLOCK_WORKLOADS.values(),
     replace(workload("gdpa-self-half-jagged-256"), name="options", **OPTIONS)],
    ids=lambda w: w.name,
)  # fmt: skip
def test_workloads_round_trip(w):
    assert w.name == "options" or workload(w.name) is w
    restored = Workload.from_dict(json.loads(json.dumps(w.to_dict())))
    assert restored == w
    assert restored.seqlens_q == w.seqlens_q and restored.seqlens_k == w.seqlens_k


def test_figures_are_the_published_ones():
    assert {"gdpa-self-fwd-full", "gdpa-self-fwd-half", "gdpa-cross-fwd-full"} <= set(FIGURES)
    for figure, names in FIGURES.items():
        assert set(names) <= set(WORKLOADS)
        assert figure_direction(figure) in ("forward", "backward")
    assert len(FIGURES["gdpa-self-fwd-half"]) == 8
    assert figures_of("gdpa-self-full-512", "forward") == ("gdpa-self-fwd-full",)
    assert figures_of("gdpa-self-full-512", "backward") == ("gdpa-self-bwd-full",)
    assert figures_of("gdpa-self-ml1m-1024", "forward") == ()


def test_events_come_from_users_in_proportion_to_what_they_did():
    """Half of the users have one event, half have three: of four events two are a user's first."""
    law = Events(Quantiles((0.0, 0.5, 0.5001, 1.0), (1, 1, 3, 3)))
    lengths = law.sample(20_000, 2048, np.random.Generator(np.random.PCG64(1)))
    shares = np.bincount(lengths, minlength=4)[1:] / len(lengths)
    assert shares == pytest.approx([0.5, 0.25, 0.25], abs=0.015)
    assert max(law.sample(500, 2, np.random.Generator(np.random.PCG64(1)))) == 2
    users, events = (workload(f"gdpa-self-ml25m-{x}1024") for x in ("", "events-"))
    assert events.fill > 2 * users.fill


def test_edits_of_a_law():
    of = replace(workload("gdpa-self-ml1m-1024"), name="edited")
    rounded = replace(of, lengths_q=Rounded(of.lengths_q, 128)).seqlens_q
    assert rounded == tuple(min(-(-n // 128) * 128, 1024) for n in of.seqlens_q)
    law = Sorted(Rounded(of.lengths_q, 128))
    assert replace(of, lengths_q=law).seqlens_q == tuple(sorted(rounded, reverse=True))
    assert LengthDistribution.from_dict(law.to_dict()) == law
    for made in (lambda: Sorted(128), lambda: Rounded("full", 128), lambda: Events(None)):
        with pytest.raises(ValueError, match="law must be a LengthDistribution, got"):
            made()
    with pytest.raises(ValueError, match="multiple must be an integer of at least 1, got 0"):
        Rounded(Full(), 0)


def test_shapes_that_no_figure_has_differ_as_named():
    assert figures_of("gdpa-self-full-640", "backward") == ()
    assert workload("gdpa-self-full-1024-gqa").num_heads_q == 8
    assert workload("gdpa-self-full-1024-causal").pairs == 1152 * 1024 * 1025 // 2
    assert workload("gdpa-cross-full-2048-kv320").pairs == 1152 * 2048 * 320
    assert (workload("gdpa-self-full-8192-b8").batch, workload("gdpa-self-full-640").fill) == (8, 1)
    narrow = workload("gdpa-self-half-jagged-800-d64")
    assert narrow.head_dim == 64 and 0.45 < narrow.fill < 0.55


def test_figure_ids_match_the_published_data():
    rows = (REPOSITORY / "data/published/gdpa_figures.csv").read_text().splitlines()
    column = rows[0].split(",").index("figure")
    assert {row.split(",")[column] for row in rows[1:]} == set(FIGURES)


SHARED = {"shared_q": True, "lengths_q": Full()}
BLOCK = {"operator": "block_attention", "max_seqlen_k": 5, "lengths_k": None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, "name must be a non-empty string, got ''"),
        ({"batch": 0}, "batch must be an integer of at least 1, got 0"),
        ({"head_dim": 8.0}, "head_dim must be an integer of at least 1, got 8.0"),
        ({"num_heads_q": True}, "num_heads_q must be an integer of at least 1, got True"),
        ({"num_heads_q": 3}, r"num_heads_q must be a multiple of num_heads_k \(2\), got 3"),
        ({"max_seqlen_k": 0}, "max_seqlen_k must be an integer of at least 1, got 0"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"operator": "conv"}, r"operator must be one of \('gdpa', 'block_attention'\), got 'conv"),
        ({"block_size": 32}, "block_size must be 64 with operator 'gdpa', got 32"),
        ({"rotary": True}, "rotary must be False with operator 'gdpa', got True"),
        ({"dtype": "int8"}, "dtype must be one of .*, got 'int8'"),
        ({"dtype": ["bfloat16"]}, "dtype must be one of .*, got"),
        ({"causal": 1}, "causal must be a bool, got 1"),
        ({"window": -1}, "window must be an integer of at least 0, got -1"),
        ({"scale": math.nan}, "scale must be a finite number or None, got nan"),
        ({"output_scale": None}, "output_scale must be a finite number, got None"),
        ({"activation": ()}, r"activation must have one name per head \(4\), got 0"),
        ({"activation": 3}, "activation must be a name or a tuple of names, got 3"),
        ({"lengths_q": None}, "lengths_q must be a LengthDistribution, got None"),
        ({"lengths_k": 3}, "lengths_k must be a LengthDistribution or None, got 3"),
        ({"lengths_k": None}, r"max_seqlen_k must equal max_seqlen_q \(5\)"),
        ({"shared_q": True}, r"lengths_q must be Full\(\) with shared_q, got Fixed"),
        (
            SHARED | {"lengths_k": None},
            "lengths_k must be a LengthDistribution with shared_q, got None",
        ),
        ({**BLOCK, "block_size": 48}, r"block_size must be one of \(16, 32, 64, 128\), got 48"),
        ({**BLOCK, "rotate_v": True}, "rotate_v must be False without rotary, got True"),
        ({**BLOCK, "rotary": 1}, "rotary must be a bool, got 1"),
        ({**BLOCK, "rotary": True, "head_dim": 7}, "head_dim must be even with rotary, got 7"),
        (
            {**BLOCK, "causal": True},
            "causal must be False with operator 'block_attention', got True",
        ),
        ({**BLOCK, "window": 3}, "window must be None with operator 'block_attention', got 3"),
        ({**BLOCK, "lengths_k": Full()}, "lengths_k must be None with operator 'block_attention'"),
        ({**BLOCK, "activation": "relu"}, "activation must be 'gelu_tanh' with operator"),
    ],
)
def test_workload_errors_name_argument_expectation_and_value(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Uniform(0.0), r"fill must be a number in \(0, 1\], got 0.0"),
        (lambda: Uniform("x"), r"fill must be a number in \(0, 1\], got 'x'"),
        (lambda: Between(0.0, 1.0), r"low must be a number in \(0, 1\], got 0.0"),
        (lambda: Between(0.5, 0.5), r"high must be a number in \(0.5, 1\], got 0.5"),
        (lambda: Between(0.4, 1.0, 0), "total must be an integer of at least 1, got 0"),
        (lambda: LogNormal(0, 1, 1), "sigma must be a positive number, got 0"),
        (lambda: LogNormal(1, math.inf, 1), "loc must be a finite number, got inf"),
        (lambda: LogNormal(1, 1, -1), "scale must be a positive number, got -1"),
        (lambda: LogNormal(1, 1, 1, 0), "minimum must be an integer of at least 1, got 0"),
        (lambda: Quantiles((0.1, 1.0), (1, 2)), "levels must be a tuple rising strictly"),
        (lambda: Quantiles((0.0, 1.0), (1,)), "lengths must be a tuple of 2, one per level"),
        (lambda: Quantiles((0.0, 1.0), (2, 1)), "lengths must be non-decreasing"),
        (lambda: Quantiles((0.0, 1.0), (0, 1)), "every length must be an integer of at least 1"),
        (
            lambda: MOVIELENS["ml1m"].sample(1, 19, rng()),
            "max_seqlen must be at least .* minimum, 20",
        ),
        (
            lambda: LengthDistribution.from_dict({"kind": "zipf"}),
            "kind must be one of .*, got 'zipf'",
        ),
        (lambda: LengthDistribution.from_dict({"kind": []}), r"kind must be one of .*, got \[\]"),
        (
            lambda: LengthDistribution.from_dict("full"),
            "length distribution must be a mapping with a kind",
        ),
        (lambda: LengthDistribution.from_dict({"kind": "full", "x": 1}), "must have fields among"),
        (
            lambda: LengthDistribution.from_dict({"kind": "uniform"}),
            r"must have the fields \['fill'\]",
        ),
        (lambda: Workload.from_dict({}), "workload must have the fields"),
        (lambda: Workload.from_dict([]), r"workload must be a mapping, got \[\]"),
        (lambda: SMALL.flops("both"), "direction must be one of .*, got 'both'"),
        (lambda: SMALL.bytes("fwd"), "direction must be one of .*, got 'fwd'"),
        (lambda: workload("gdpa"), "name must be one of gdpa-cross-full-1024, .*, got 'gdpa'"),
        (lambda: figure_direction("x"), "figure must be one of .*, got 'x'"),
        (lambda: visible_pairs((1,), (1, 2)), "seqlens_k must have the 1 entries of seqlens_q"),
        (lambda: visible_pairs((1,), (1,), Mask("lower_right")), "mask must count from the start"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
