"""What a reader of the ledger sees: published claims with our answer and where it stands.

Records answer a claim through its selector (`claims.ledger`). Statements about mathematics, design
or causes have none; chapters answer some of them, and `ANSWERS` says which and how.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pandas as pd

from gdpa_lab.measuring.workloads import FIGURES
from gdpa_lab.report import approximations
from gdpa_lab.report.results import TIMED
from gdpa_lab.report.standings import spread

if TYPE_CHECKING:
    from gdpa_lab.report.chapter import Chapter

ANSWERS: dict[str, tuple[str, str]] = {
    "gdpa-production-gap-forward": (
        "measuring/production_gap",
        "FlashAttention-4 on an H200, 256 keys: {gap_forward}. One kernel on one shape.",
    ),
    "gdpa-production-gap-worst": (
        "measuring/production_gap",
        "FlashAttention-4 on an H200: {gap_worst}, on half-full batches of 256.",
    ),
    "gdpa-production-gap-backward": (
        "measuring/production_gap",
        "FlashAttention-4 on an H200, 256 keys: {gap_backward}.",
    ),
    "gdpa-production-gap-causes": (
        "measuring/production_gap",
        "The start of a tile over its keys, times partial tiles; and batches that are small, not "
        "large: FlashAttention-2's gap is {gap_many} with 1,152 sequences, {gap_few} with 8.",
    ),
    "gdpa-training-throughput": (
        "training/step",
        "A model of ours on an H200, compiled, over v1: attention {step_attention} times. With "
        "fused norms too {step_fused}, in bf16 on both sides {step_bf16}, half-full at 1,024.",
    ),
    "kunlun-normalisation-share": (
        "training/step",
        "A model of ours: {norm_eager} % in eager mode, {norm_compiled} compiled, "
        "{norm_fused} fused and in bf16.",
    ),
    "gdpa-one-operator": ("operator/gdpa", "Only lengths and origins differ."),
    "gdpa-no-row-statistics": ("operator/gdpa", "True, up to rounding."),
    "gdpa-backward-five-products": ("backward/by_hand", "Derived."),
    "gdpa-scale-inside": ("operator/gdpa", "Our `scale`."),
    "gdpa-scale-outside": ("operator/gdpa", "Our `output_scale`."),
    "gdpa-outer-loop-pipelining": (
        "forward/v6_short_kv",
        "{stay} times the rate if copies and stores cross tiles, times {stream} if MMAs do.",
    ),
    "gdpa-correction-stage-removed": (
        "blackwell/tensor_memory",
        "No rung from b1 to b6 has such a role; what it gains has no record.",
    ),
    "jfa-mask-instructions": (
        "measuring/other_shapes",
        "v8 asks first whether a block needs its mask: {unmasked} times the rate with causal.",
    ),
    "gdpa-zigzag-skew": (
        "forward/v3_persistent",
        "{zigzag_real} of the time in the hardware's order on four laws of real histories, "
        "{zigzag_uniform} on uniform lengths.",
    ),
    "gdpa-empty-tiles-skipped": (
        "forward/v3_persistent",
        "{valid} of the time on half-dense batches.",
    ),
    "gdpa-taylor-gelu-range": (
        "operator/activations",
        "Within 4e-3 below {taylor}. Scores of standard deviation 1 leave it.",
    ),
    "gdpa-role-swap-short-keys": (
        "forward/v6_short_kv",
        "{kept} times the rate with 256 keys.",
    ),
    "jfa-split-dq": (
        "backward/v2_fused_backward",
        "GDPA, the reverse: adding dQ in memory takes {added} of the time.",
    ),
    "block-speedup-constant": (
        "block/results",
        "Within {spread} % on the {spread_of} batches that FlashAttention-2 takes, {spread_timed}.",
    ),
    "block-five-eliminations": ("block/v1_one_tile", "True."),
    "block-threads": ("tools/claims", "Compiled, they have 640 and 768."),
    "block-tensor-memory": ("tools/claims", "Compiled, it takes all 512 columns."),
    "block-pinned-compiler": ("tools/claims", "It does not compile with that version."),
    "block-arithmetic-intensity": ("block/counting_bytes", "32 by count."),
    "block-rounding-twice": (
        "block/backward_alone",
        "At most {ulp} %. Rounding twice: mean error of dQ times {twice}.",
    ),
    "gdpa-benchmark-computes-gelu": ("", "A polynomial outside its range is timed."),
    "gdpa-half-fill-is-jagged": ("", "Keys are dense: half the scores, not a third."),
    "gdpa-cross-bwd-full-over-fa4": ("", "The bars of FA4 are those of the forward chart."),
    "block-lse-round-trip": ("", "That tensor is 0.2 % of the bytes."),
    "block-forward-registers": ("", "71,168 of 65,536 registers."),
    "block-backward-registers": ("", "88,064 of 65,536 registers."),
    "block-shared-memory": ("", "An SM has 228 KB; 256 is its tensor memory."),
    "block-seventy-percent-sparsity": ("", "More than 95 % of the scores; 0.7 is a fill."),
}
"""By id: the chapter ("": the ledger's own) and the answer, with names of `numbers`."""

HALF = "half-full 1,024"
"""A law of training/step."""
SERIES = {"over Triton": "over-triton", "over FMHA": "over-fmha", "over FA4": "over-fa4"}
_BLOCK = ("forward", "backward", "total")
_TABLES = {"table 5": "over-fa2", "table 6, fill 0.7": "scaling-fill-07",
           "table 6, fill 1.0": "scaling-fill-10"}  # fmt: skip


def numbers(chapter: Chapter) -> dict[str, str]:
    """The measured numbers that `ANSWERS` quotes, from the newest records of their chapters."""
    rungs = ["v5_pingpong", "v6a_persistent", "v6b_stream"]
    whole = chapter.holding("forward/results", rungs, "gdpa-cross-full-1024")
    us = chapter.times(whole, direction="forward")
    gaps = {}
    for way in ("forward", "backward"):
        options = {"value": "tflops", "direction": way, "scope": "sustained"}
        rates = chapter.times(f"{way}/results", **options)["fa4"]
        gaps[way] = rates["gdpa-self-full-2048"] / rates
    edits = {"direction": "forward", "scope": "sustained", "impl": "fa2_varlen"}
    edits = chapter.times("measuring/production_gap", "tflops", **edits)["fa2_varlen"]
    edits = edits["gdpa-self-full-2048"] / edits
    causal = {"workload": "gdpa-self-full-1024-causal", "impl": "v8_own_waits"}
    masked = chapter.times(
        "measuring/other_shapes", columns="variant", scope="sustained", variant=None, **causal
    ).iloc[0]
    cross = [f"gdpa-cross-full-{n}" for n in (512, 1024, 2048)]
    short = [name for name in us.index if re.search("cross-full|self-full-256$", name)]
    lists = chapter.times("forward/v3_persistent", columns="variant", variant=None)
    lists = lists.div(lists["hardware"], axis=0)
    uniform = lists.index.str.contains("full|half")
    four = [n for n in lists.index[~uniform] if "kuairand1k" not in n]
    back = chapter.times("backward/results", direction="backward")
    kept = chapter.times("forward/v6_short_kv", columns="variant", impl="v6_short_kv", variant=None)
    kept = pd.concat([kept[f"{n} keys, fetched"] / kept[f"{n} keys, stay"] for n in (64, 128)])
    batches = [f"block-fill{fill}-{n}000" for fill in (70, 100) for n in range(1, 9)]
    rungs = ["v0_flash", "v1_one_tile", "v3_warp_specialized"]
    of = {"workload": batches, "direction": ("forward", "backward"), "impl": [*rungs, "fa2_varlen"]}
    table6_timed = chapter.scope("block/results", **of)
    table6 = chapter.rows("block/results", scope=table6_timed, **of)
    ms = table6.pivot(index=["workload", "direction"], columns="impl", values="time_us_p50")
    over = (ms["fa2_varlen"] / ms[rungs].min(axis=1)).groupby("direction")
    counted, over = over.count(), over.agg(["min", "max"])
    errors = chapter.recorded("accuracy", "block/results").astype({"roundings": int})
    errors = errors.set_index(["gradient", "roundings"])["mean_abs"]
    steps = chapter.recorded("steps", "training/step").set_index(["law", "way", "kernel"])
    seconds = steps["step_s"].unstack("way")
    v1, step = seconds.xs("v1", level="kernel"), seconds.xs("gdpa", level="kernel")
    kinds = steps.filter(like="_kind_s").xs("gdpa", level="kernel").loc[HALF]
    norm = (100 * kinds["norm_kind_s"] / kinds.sum(axis=1)).map("{:.0f}".format)
    return {
        "gap_forward": spread(gaps["forward"][cross]),
        "gap_backward": spread(gaps["backward"][cross]),
        "gap_worst": f"{gaps['forward']['gdpa-self-half-jagged-256']:.1f}",
        "stay": spread((us["v5_pingpong"] / us["v6a_persistent"])[short]),
        "stream": spread((us["v6a_persistent"] / us["v6b_stream"])[short]),
        "zigzag_real": spread(lists["zigzag"][four]),
        "zigzag_uniform": spread(lists["zigzag"][uniform]),
        "valid": spread(lists["valid"][lists.index.str.contains("half-dense")]),
        "kept": spread(kept),
        "added": spread(back["v2_fused_backward"] / back["v1_tiled_backward"]),
        "spread": f"{100 * (over['max'] / over['min'] - 1).max():.0f}",
        "spread_of": f"{counted.min()} of {len(batches)}",
        "spread_timed": TIMED[table6_timed],
        "gap_many": f"{edits['gdpa-self-ml25m-events-1024']:.2f}",
        "gap_few": f"{edits['gdpa-edit-batch-8']:.2f}",
        "unmasked": f"{masked['masks every block'] / masked['']:.2f}",
        "taylor": f"{approximations.within(approximations.taylor6, 4e-3):.2f}",
        "ulp": f"{100 * 2**-8:.2f}",
        "step_attention": spread(v1["compiled"] / step["compiled"]),
        "step_fused": f"{(v1['compiled'] / step['fused norms'])[HALF]:.2f}",
        "step_bf16": f"{(v1['compiled, bf16'] / step['fused, bf16'])[HALF]:.2f}",
        "norm_eager": norm["eager"],
        "norm_compiled": norm["compiled"],
        "norm_fused": norm["fused, bf16"],
        "twice": f"{errors['dq', 2] / errors['dq', 1]:.2f}",
    }


def amount(value: float, unit: str) -> str:
    """A number and its unit."""
    if unit == "x":
        return f"{value:.2f}×" if value < 10 else f"{value:.1f}×"
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def both(row: pd.Series) -> str:
    """'published → ours', or why there is none."""
    theirs = amount(row["published"], row["unit"])
    ours = {"measured": amount(row["ours"], row["unit"]) if row["ours"] == row["ours"] else ""}
    stale = " (stale)" if row["stale"] else ""
    status = row["status"].replace("_by_arithmetic", "").replace("_", " ")
    return f"{theirs} → {ours.get(status, status)}{stale}"


def plotted(ledger: pd.DataFrame, value: str = "") -> pd.DataFrame:
    """The claims of the six charts: a row for each, `SERIES` and the rate as columns. `value`: a
    column of the ledger instead of `both`."""
    by_id = ledger.set_index("id")
    series = SERIES if value else {**SERIES, "rate, TFLOP/s": "rate"}
    made = {}
    for figure in FIGURES:
        rows = {name: by_id.loc[f"{figure}-{end}"] for name, end in series.items()}
        _, kind, way, fill = figure.split("-")
        title = f"{kind}, {fill}, {'forward' if way == 'fwd' else 'backward'}"
        made[title] = {n: row[value] if value else both(row) for n, row in rows.items()}
    made = pd.DataFrame(made).T
    return made if value else made.replace(" TFLOP/s", "", regex=True)


def tabulated(ledger: pd.DataFrame) -> pd.DataFrame:
    """The quotients of tables 5 and 6 of block attention: a row for each direction."""
    by_id = ledger.set_index("id")
    return pd.DataFrame(
        {name: [both(by_id.loc[f"block-{way}-{end}"]) for way in _BLOCK]
         for name, end in _TABLES.items()}, index=pd.Index(_BLOCK, name="direction"),
    )  # fmt: skip


def in_tables(name: str) -> bool:
    """Whether `plotted` or `tabulated` shows a claim."""
    ends = "|".join([*SERIES.values(), "rate"])
    block = rf"block-({'|'.join(_BLOCK)})-({'|'.join(_TABLES.values())})"
    return bool(re.fullmatch(rf"({'|'.join(FIGURES)})-({ends})|{block}", name))


def sources(ledger: pd.DataFrame) -> dict[str, str]:
    """A letter for the first source of each claim, by its key in the bibliography."""
    first = dict.fromkeys(source.split(":")[0] for source in ledger["source"])
    return dict(zip(first, "abcdefghijklmnopqrstuvwxyz", strict=False))


def answered(ledger: pd.DataFrame, found: dict[str, str]) -> pd.DataFrame:
    """Every other claim as the page shows it: status, claim, ours, where; a letter of `sources`
    stands behind the claim.

    `found`: of `numbers`. A claim that a chapter answers has the status "answered".
    """
    letters = sources(ledger)
    rows = []
    for row in ledger[~ledger["id"].map(in_tables)].itertuples():
        status = row.status.replace("_by_arithmetic", "").replace("_", " ")
        slug = re.search(r"NOTEBOOKS=([\w/]+)$", row.how_to_check)
        ours, where = "", _link(slug[1]) if slug else row.how_to_check.partition(";")[0]
        if row.id in ANSWERS:
            place, sentence = ANSWERS[row.id]
            status = "answered" if status == "open" else status
            ours, where = sentence.format(**found), _link(place) if place else "below"
        elif status == "measured":
            against = f" over {row.ours_baseline}" if row.ours_baseline else ""
            ours = f"{amount(row.ours, row.unit)}{' (stale)' if row.stale else ''}: "
            ours += f"{row.ours_impl}{against}, {row.ours_workload}, {TIMED[row.ours_scope]}"
        claim = f"{row.claim}<sup>{letters[row.source.split(':')[0]]}</sup>"
        rows.append((row.id, row.operator, status, claim, ours, where))
    return pd.DataFrame(rows, columns=["id", "operator", "status", "claim", "ours", "where"])


def told(ledger: pd.DataFrame, shown: pd.DataFrame) -> pd.DataFrame:
    """The ledger with the statuses that the page shows, `answered`'s: what the reader downloads."""
    made = ledger.set_index("id")
    made.update(shown.set_index("id")[["status"]])
    return made.reset_index()


def _link(slug: str) -> str:
    return f"{{doc}}`{slug} <../{slug}>`"
