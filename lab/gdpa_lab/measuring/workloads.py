"""The named workloads: those of the published figures and tables, and others."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from gdpa_lab.measuring.length_distributions import (
    KUAIRAND,
    MOVIELENS,
    Between,
    Events,
    Full,
    LengthDistribution,
    LogNormal,
    OneLong,
    Uniform,
)
from gdpa_lab.measuring.require import require
from gdpa_lab.measuring.workload import Workload, check_direction

_PUBLISHED = {"batch": 1152, "num_heads_q": 4, "num_heads_k": 4, "head_dim": 128}
_LENGTHS = (256, 512, 1024, 2048)


def _of(name: str, n: int, law: LengthDistribution, **options: Any) -> Workload:
    sizes = _PUBLISHED | {"max_seqlen_q": n, "max_seqlen_k": n}
    return Workload(name=name, lengths_q=law, **sizes | options)


def _self(kind: str, n: int, law: LengthDistribution, **options: Any) -> Workload:
    return _of(f"gdpa-self-{kind}-{n}", n, law, **options)


def _full(suffix: str, n: int = 1024, keys: int | None = None, **options: Any) -> Workload:
    name = f"gdpa-{'self' if keys is None else 'cross'}-full-{n}{suffix}"
    law = None if keys is None else Full()
    return _of(name, n, Full(), max_seqlen_k=keys or n, lengths_k=law, **options)


def _workloads() -> dict[str, Workload]:
    workloads = [_self("full", n, Full()) for n in _LENGTHS]
    workloads += [_self("half-dense", n, Uniform(0.5), lengths_k=Full()) for n in _LENGTHS]
    workloads += [_self("half-jagged", n, Uniform(0.5)) for n in _LENGTHS]
    workloads += [_full("", n, 256) for n in _LENGTHS]
    workloads += [
        _self("ml1m", 1024, MOVIELENS["ml1m"]),
        _self("ml20m", 2048, MOVIELENS["ml20m"]),
        _self("ml25m", 1024, MOVIELENS["ml25m"]),
        _self("ml25m-events", 1024, Events(MOVIELENS["ml25m"])),
        _self("kuairandpure", 512, KUAIRAND["kuairandpure"]),
        _self("kuairand1k", 4096, KUAIRAND["kuairand1k"]),
    ]
    return {w.name: w for w in (*workloads, *_other_shapes(), *_masked(), UNMASKED, *_hstu())}


def of_hstu(batch: Workload, causal: bool) -> Workload:
    """A batch with the function of HSTU, SiLU over the longest length, as no published figure."""
    kind = f"-{'causal-' * causal}hstu"
    options = {"activation": "silu", "output_scale": 1 / batch.max_seqlen_q, "causal": causal}
    return replace(batch, name=f"{batch.name}{kind}", **options)


def _hstu() -> list[Workload]:
    batches = _self("full", 1024, Full()), _self("half-jagged", 1024, Uniform(0.5))
    return [of_hstu(batch, causal) for batch in batches for causal in (True, False)]


def _other_shapes() -> list[Workload]:
    """What no published figure shows; full batches of 1152, 4 heads, head_dim 128, GELU by tanh,
    but for what the name says."""
    return [
        _full("-h3", num_heads_q=3, num_heads_k=3),
        _full("-kv192-h6", keys=192, num_heads_q=6, num_heads_k=6),
        _full("-gqa", num_heads_q=8, num_heads_k=2),
        _full("-causal", causal=True),
        _full("-window128", window=128),
        _full("-gelu", activation="gelu"),
        _full("", 384),
        _full("", 640),
        _full("-kv320", 2048, 320),
        _full("-b64", 4096, batch=64),
        _full("-b8", 8192, batch=8),
        _full("-b256-d256", 512, batch=256, head_dim=256),
        _full("-kv128-d64", keys=128, head_dim=64),
        replace(_self("half-jagged", 800, Uniform(0.5)), name="gdpa-self-half-jagged-800-d64",
                head_dim=64),
    ]  # fmt: skip


UNMASKED = _full("-b8-h32", 8192, batch=8, num_heads_q=32, num_heads_k=8)
"""One of the batches of `MASKED` without its mask."""


def _masked() -> list[Workload]:
    """Causal batches whose sequences are long or uneven."""
    uneven = _self("lognormal", 6000, LogNormal(1.0, 0, 1200), batch=48)
    heavy = _self("lognormal", 16384, LogNormal(1.4, 0, 600), batch=64)
    kuairand = _self("kuairand1k", 4096, KUAIRAND["kuairand1k"], batch=256)
    one_long = _self("one-long", 32768, OneLong(256), batch=201)
    targets = replace(uneven, target_share=0.3, causal=True, num_heads_q=8, num_heads_k=8)
    targets = replace(targets, activation="silu", output_scale=1 / targets.max_seqlen_q)
    grouped = {"num_heads_q": 32, "num_heads_k": 8}
    batches = [
        _full("-b1", 16384, batch=1),
        _full("-b2-h32", 32768, batch=2, **grouped),
        _full("-b4-h32", 16384, batch=4, **grouped),
        _full("-b6", 5000, batch=6),
        _full("-b8-h16", 8192, batch=8, num_heads_q=16),
        UNMASKED,
        replace(uneven, name=f"{uneven.name}-b48"),
        replace(uneven, name=f"{uneven.name}-b48-window1024", window=1024),
        replace(uneven, name=f"{uneven.name}-b48-d64", head_dim=64),
        replace(uneven, name=f"{uneven.name}-b48-d256", head_dim=256),
        replace(targets, name=f"{uneven.name}-b48-h8-silu-targets"),
        replace(heavy, name=f"{heavy.name}-b64"),
        replace(one_long, name=f"{one_long.name}-b201"),
        replace(kuairand, name=f"{kuairand.name}-b256"),
        _self("half-jagged", 1024, Uniform(0.5)),
        replace(
            _self("uniform", 1024, Uniform(0.5), batch=512), name="gdpa-self-uniform-1024-b512"
        ),
    ]
    return [replace(batch, name=f"{batch.name}-causal", causal=True) for batch in batches]


WORKLOADS: dict[str, Workload] = _workloads()
"""Every named workload of GDPA. The published ones: batch 1152, 4 heads, head_dim 128, bfloat16."""

MASKED: tuple[str, ...] = tuple(workload.name for workload in _masked())
"""Names of the causal batches whose sequences are long or uneven."""

HSTU: tuple[str, ...] = tuple(name for name in WORKLOADS if name.endswith("-hstu"))
"""Names of the workloads with the function of HSTU."""

BLOCK_MAX_SEQLENS = (1000, 2000, 3000, 4000, 5000, 6000, 7000, 8000)


def _block(name: str, n: int, law: LengthDistribution, **options: Any) -> Workload:
    batch = 1152 if n <= 7000 else 768
    return _of(name, n, law, operator="block_attention", batch=batch, **options)


def _block_workloads() -> dict[str, Workload]:
    laws = {"fill70": Between(0.4, 1.0), "fill100": Full()}
    workloads = [
        _block(f"block-{fill}-{n}{suffix}", n, law, head_dim=head_dim)
        for head_dim, suffix in ((128, ""), (64, "-d64"))
        for fill, law in laws.items()
        for n in BLOCK_MAX_SEQLENS
    ]
    workloads += [
        _block(f"block-fill70-2000-d{head_dim}", 2000, laws["fill70"], head_dim=head_dim)
        for head_dim in (96, 256)
    ]
    tokens = 1_735_537
    law = Between(0.4, 1.0, total=tokens)
    rotated = {"num_heads_q": 3, "num_heads_k": 3, "rotary": True, "rotate_v": True}
    workloads += [
        _block(f"block-rotary-{tokens}{suffix}", 2200, law, head_dim=head_dim, **rotated)
        for head_dim, suffix in ((128, ""), (96, "-d96"), (256, "-d256"))
    ]
    return {w.name: w for w in workloads}


BLOCK_WORKLOADS: dict[str, Workload] = _block_workloads()
"""Every named workload of block attention: batch 1152 (768 above 7000), bfloat16, blocks of 64.

fill70: lengths uniform in [0.4, 1.0) of the maximum; fill100: every length is the maximum. Of the
rotary one only the tokens, batch, heads and head_dim are published; its law of lengths is ours.
-d64, -d96, -d256: the same lengths at another head_dim; none at 96 or 256 is published.
"""

BLOCK_TABLES: dict[str, tuple[str, ...]] = {
    "table5": ("block-fill70-2000",),
    "table6": tuple(
        f"block-{fill}-{n}" for fill in ("fill70", "fill100") for n in BLOCK_MAX_SEQLENS
    ),
    "table7": ("block-rotary-1735537",),
}
"""Table of data/published/block_attention_*.csv -> names of the workloads that it shows."""


def _family(*stems: str) -> tuple[str, ...]:
    return tuple(f"{stem}-{n}" for stem in stems for n in _LENGTHS)


FIGURES: dict[str, tuple[str, ...]] = {
    "gdpa-self-fwd-full": _family("gdpa-self-full"),
    "gdpa-self-fwd-half": _family("gdpa-self-half-dense", "gdpa-self-half-jagged"),
    "gdpa-cross-fwd-full": _family("gdpa-cross-full"),
    "gdpa-self-bwd-full": _family("gdpa-self-full"),
    "gdpa-self-bwd-half": _family("gdpa-self-half-dense", "gdpa-self-half-jagged"),
    "gdpa-cross-bwd-full": _family("gdpa-cross-full"),
}
"""Published figure -> names of the workloads that it shows, shortest first within a family."""


def figure_direction(figure: str) -> str:
    """The direction, "forward" or "backward", of a name in FIGURES; ValueError for any other."""
    require(figure in FIGURES, "figure", f"one of {sorted(FIGURES)}", figure)
    return "forward" if "-fwd-" in figure else "backward"


@cache
def figures_of(name: str, direction: str) -> tuple[str, ...]:
    """Figures that show workload `name` in `direction`; empty if none does."""
    check_direction(direction)
    return tuple(
        f for f, names in FIGURES.items() if name in names and figure_direction(f) == direction
    )


def workload(name: str) -> Workload:
    """The workload called `name`; ValueError listing the names if there is none."""
    known = WORKLOADS | BLOCK_WORKLOADS
    names = ", ".join((*sorted(WORKLOADS), *sorted(BLOCK_WORKLOADS)))
    require(name in known, "name", f"one of {names}", name)
    return known[name]
