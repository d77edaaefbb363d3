"""Tables of the published claims, each with our answer and where it stands.

Records answer a claim through its selector (`claims.judged`). Statements about mathematics, design
or causes have none; chapters answer some of them, as the claim's `answer` says.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pandas as pd

from _lib import approximations
from _lib.ratios import counted
from gdpa_lab.measuring.baselines import BASELINES
from gdpa_lab.measuring.workloads import FIGURES
from gdpa_lab.report.results import TIMED

if TYPE_CHECKING:
    from gdpa_lab.report.chapter import Chapter

HALF = "half-full 1,024"
"""A law of training/step."""
SERIES = {"over Triton": "over-triton", "over FMHA": "over-fmha", "over FA4": "over-fa4"}
_BLOCK = ("forward", "backward", "total")
_TABLES = {"table 5": "over-fa2", "table 6, fill 0.7": "scaling-fill-07",
           "table 6, fill 1.0": "scaling-fill-10"}  # fmt: skip


def numbers(chapter: Chapter) -> dict[str, str]:
    """The numbers that the answers of claims quote, from the newest records of their chapters."""
    rungs = ["v5_pingpong", "v6a_persistent", "v6b_stream"]
    us = chapter.times("forward/results", together=rungs, direction="forward")
    gap, options = "measuring/production_gap", {"value": "tflops", "scope": "sustained"}
    forward = chapter.times(gap, direction="forward", **options)
    forward = forward.loc["gdpa-self-full-2048"] / forward
    others = forward.loc["gdpa-cross-full-2048"].dropna()
    others = others[[x for x in others.index if x in BASELINES and x != "fa4"]]
    assert others.max() < forward["fa4"]["gdpa-cross-full-2048"], "the answer: other kernels less"
    one_board = chapter.record("backward/results").id  # as the chapter has it
    backward = chapter.times(one_board, direction="backward", **options)["fa4"]
    backward = backward["gdpa-self-full-2048"] / backward
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
    stay_gain = chapter.times(
        "forward/v6_short_kv", columns="variant", impl="v6_short_kv", variant=None
    )
    stay_gain = pd.concat(
        [stay_gain[f"{n} keys, fetched"] / stay_gain[f"{n} keys, stay"] for n in (64, 128)]
    )
    batches = [f"block-fill{fill}-{n}000" for fill in (70, 100) for n in range(1, 9)]
    rungs = ["v0_flash", "v1_one_tile", "v3_warp_specialized"]
    of = {"workload": batches, "direction": ("forward", "backward"), "impl": [*rungs, "fa2_varlen"]}
    table6_timed = chapter.scope("block/results", **of)
    table6 = chapter.rows("block/results", scope=table6_timed, **of)
    ms = table6.pivot(index=["workload", "direction"], columns="impl", values="time_us_p50")
    over = (ms["fa2_varlen"] / ms[rungs].min(axis=1)).groupby("direction")
    how_many, over = over.count(), over.agg(["min", "max"])
    errors = chapter.recorded("accuracy", "block/results").astype({"roundings": int})
    errors = errors.set_index(["gradient", "roundings"])["mean_abs"]
    steps = chapter.recorded("steps", "training/step").set_index(["law", "way", "kernel"])
    seconds = steps["step_s"].unstack("way")
    v1, step = seconds.xs("v1", level="kernel"), seconds.xs("gdpa", level="kernel")
    kinds = steps.filter(like="_kind_s").xs("gdpa", level="kernel").loc[HALF]
    norm = (100 * kinds["norm_kind_s"] / kinds.sum(axis=1)).map("{:.0f}".format)
    return {
        "gap_forward": counted(forward["fa4"][cross]),
        "gap_backward": counted(backward[cross]),
        "gap_worst": f"{forward['fa4']['gdpa-self-half-jagged-256']:.1f}",
        "stay": counted((us["v5_pingpong"] / us["v6a_persistent"])[short]),
        "stream": counted((us["v6a_persistent"] / us["v6b_stream"])[short]),
        "zigzag_real": counted(lists["zigzag"][four]),
        "zigzag_uniform": counted(lists["zigzag"][uniform]),
        "valid": counted(lists["valid"][lists.index.str.contains("half-dense")]),
        "kept": counted(stay_gain),
        "added": counted(back["v2_fused_backward"] / back["v1_tiled_backward"]),
        "spread": f"{100 * (over['max'] / over['min'] - 1).max():.0f}",
        "spread_of": f"{how_many.min()} of {len(batches)}",
        "spread_timed": TIMED[table6_timed],
        "gap_many": f"{edits['gdpa-self-ml25m-events-1024']:.2f}",
        "gap_few": f"{edits['gdpa-edit-batch-128']:.2f}",
        "unmasked": f"{masked['masks every block'] / masked['']:.2f}",
        "taylor": f"{approximations.within(approximations.taylor6, 4e-3):.2f}",
        "ulp": f"{100 * 2**-8:.2f}",
        "step_attention": counted(v1["compiled"] / step["compiled"]),
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
    """'published → ours', or why there is none; 'published; ours here' of two machines."""
    theirs, stale = amount(row["published"], row["unit"]), " (stale)" if row["stale"] else ""
    ours = amount(row["ours"], row["unit"])
    status = row["status"].replace("_by_arithmetic", "").replace("_", " ")
    if row["status"] == "not_comparable" and row["ours"] == row["ours"]:
        return f"{theirs}; {ours} here{stale}"
    return f"{theirs} → {ours if status == 'measured' else status}{stale}"


def plotted(judged: pd.DataFrame, value: str = "") -> pd.DataFrame:
    """The claims of the six charts: a row for each, `SERIES` and the rate as columns. `value`: a
    column of `claims.judged` instead of `both`."""
    by_id = judged.set_index("id")
    series = SERIES if value else {**SERIES, "rate, TFLOP/s": "rate"}
    table = {}
    for figure in FIGURES:
        rows = {name: by_id.loc[f"{figure}-{end}"] for name, end in series.items()}
        _, kind, way, fill = figure.split("-")
        title = f"{kind}, {fill}, {'forward' if way == 'fwd' else 'backward'}"
        table[title] = {n: row[value] if value else both(row) for n, row in rows.items()}
    table = pd.DataFrame(table).T
    return table if value else table.replace(" TFLOP/s", "", regex=True)


def tabulated(judged: pd.DataFrame) -> pd.DataFrame:
    """The quotients of tables 5 and 6 of block attention: a row for each direction."""
    by_id = judged.set_index("id")
    return pd.DataFrame(
        {name: [both(by_id.loc[f"block-{way}-{end}"]) for way in _BLOCK]
         for name, end in _TABLES.items()}, index=pd.Index(_BLOCK, name="direction"),
    )  # fmt: skip


def in_tables(name: str) -> bool:
    """Say whether `plotted` or `tabulated` shows a claim."""
    ends = "|".join([*SERIES.values(), "rate"])
    block = rf"block-({'|'.join(_BLOCK)})-({'|'.join(_TABLES.values())})"
    return bool(re.fullmatch(rf"({'|'.join(FIGURES)})-({ends})|{block}", name))


def sources(judged: pd.DataFrame) -> dict[str, str]:
    """A letter for the first source of each claim, by its key in the bibliography."""
    first = dict.fromkeys(source.split(":")[0] for source in judged["source"])
    return dict(zip(first, "abcdefghijklmnopqrstuvwxyz", strict=False))


def answered(judged: pd.DataFrame, values: dict[str, str]) -> pd.DataFrame:
    """Every other claim as the page shows it: status, claim, ours, where; a letter of `sources`
    stands behind the claim.

    `values`: of `numbers`. A claim that a chapter answers has the status "answered".
    """
    letters = sources(judged)
    rows = []
    for row in judged[~judged["id"].map(in_tables)].itertuples():
        status = row.status.replace("_by_arithmetic", "").replace("_", " ")
        where = _link(row.chapter) if row.chapter else row.how_to_check.partition(";")[0]
        ours = ""
        if row.answer:
            status = "answered" if status == "open" else status
            where = _link(row.answered_in or "tools/refuted")
            ours = row.answer.format(**values)
        elif row.ours == row.ours:
            against = f" over {row.ours_baseline}" if row.ours_baseline else ""
            ours = f"{amount(row.ours, row.unit)}{' (stale)' if row.stale else ''}: "
            ours += f"{row.ours_impl}{against}, {row.ours_workload}, {TIMED[row.ours_scope]}"
            ours += "" if status == "measured" else f", {row.ours_gpu}"
        claim = f"{row.claim}<sup>{letters[row.source.split(':')[0]]}</sup>"
        rows.append((row.id, row.operator, status, claim, ours, where))
    return pd.DataFrame(rows, columns=["id", "operator", "status", "claim", "ours", "where"])


def told(judged: pd.DataFrame, shown: pd.DataFrame) -> pd.DataFrame:
    """`judged` with the statuses that the page shows, `answered`'s: what the reader downloads."""
    table = judged.set_index("id")
    table.update(shown.set_index("id")[["status"]])
    return table.reset_index()


def _link(slug: str) -> str:
    return f"{{doc}}`{slug} <../{slug}>`"
