"""The first screen of README.md, written from the records: ladders as tables, one as a figure.

`python -m gdpa_kernels readme` rewrites them; a test holds them equal to the records.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from gdpa_kernels.calling import ladder
from gdpa_kernels.measuring import baselines, record, system
from gdpa_kernels.report import figures, results

WORKLOAD = "gdpa-self-full-1024"
BACKWARD_WORKLOADS = {"gdpa-self-full-1024": "1,024 x 1,024", "gdpa-cross-full-2048": "2,048 x 256"}
BACKWARD_NOTEBOOK = "notebooks/backward/results.py"
BLOCK_TABLES = (
    (
        "block-fill70-2000",
        "Block attention, softmax inside blocks of 64 tokens",
        "batch 1152, lengths uniform in 800 .. 1999, 4 heads",
    ),
    (
        "block-rotary-1735537",
        "Block attention with rotary, q, k and v turned inside the kernels",
        "1,735,537 tokens in 1152 sequences, 3 heads, sin and cos in bf16",
    ),
)
BLOCK_NOTEBOOK = "notebooks/block/results.py"
SYSTEM = "h200"
DIRECTIONS = ("forward", "backward")
SHARE = "percent_of_roofline"
FIGURE = Path("book/assets/ladder.svg")
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def ladder_block(data_dir: Path = record.DATA_DIR) -> str:
    """The Markdown between the markers: tables of rungs and baselines, and their records."""
    table = _rows(data_dir)
    lines = [
        "| `impl` | idea | changed lines | time | TFLOP/s | % of roofline |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for rung in ladder.RUNGS:
        row = results.one(table, impl=rung.impl)
        changed = str(ladder.changed_lines(rung.impl)) if rung.predecessor else ""
        lines.append(_line(f"`{rung.impl}`", rung.idea, changed, row))
    peers = table[table["impl"].isin(baselines.BASELINES) & table["time_us_p50"].notna()]
    for _, row in peers.sort_values("time_us_p50", ascending=False).iterrows():
        peer = baselines.BASELINES[row["impl"]]
        lines.append(_line(f"`{peer.impl}`", f"{peer.title}; computes {peer.math}", "", row))
    row = results.one(table, impl=ladder.RUNGS[0].impl)
    machine = system.load(data_dir / "systems" / f"{row['system']}.json")
    lines += [
        "",
        f"Measured on one {machine.gpu}, {row['date'][:10]}: `{WORKLOAD}`, batch 1152, 4 heads, "
        f"head_dim 128, bf16, forward. Record: "
        f"[`{row['record']}`](data/records/{row['record']}.json).",
    ]
    return "\n".join((*lines, *_backward_lines(data_dir), *_block_lines(data_dir)))


def _kernel_rows(data_dir: Path, notebook: str) -> pd.DataFrame:
    """Kernel times of the newest record of a notebook, default constants; empty without one."""
    table = results.table(data_dir, system=SYSTEM, latest=False)
    try:
        found = results.latest_record(data_dir, notebook=notebook, system=SYSTEM).id
    except LookupError:
        return table.iloc[:0]
    keep = (table["record"] == found) & (table["scope"] == "kernel") & (table["variant"] == "")
    return table[keep & table["time_us_p50"].notna()]


def _backward_lines(data_dir: Path) -> list[str]:
    """The table of the gradients of GDPA and its record; nothing without a record."""
    table = _kernel_rows(data_dir, BACKWARD_NOTEBOOK)
    table = table[table["workload"].isin(BACKWARD_WORKLOADS)].drop_duplicates(["workload", "impl"])
    if table.empty:
        return []
    rows = {(row["impl"], row["workload"]): row for _, row in table.iterrows()}
    titles = " | ".join(f"{title} | TFLOP/s" for title in BACKWARD_WORKLOADS.values())
    lines = [
        "",
        "Backward, rows of Q by rows of K; all kernels of the pass, five products counted:",
        "",
        f"| `impl` | idea | changed lines | {titles} |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]

    present = {impl for impl, _ in rows}
    for rung in ladder.BACKWARD_RUNGS:
        if rung.impl in present:
            changed = ladder.changed_lines(rung.impl, "gdpa_backward") if rung.predecessor else ""
            lines.append(
                _pair(rung.impl, rung.idea, str(changed), rows, BACKWARD_WORKLOADS, "tflops")
            )
    for impl in baselines.BASELINES:
        if impl in present:
            peer = baselines.BASELINES[impl]
            idea = f"{peer.title}; computes {peer.math}"
            lines.append(_pair(impl, idea, "", rows, BACKWARD_WORKLOADS, "tflops"))
    row = next(iter(rows.values()))
    lines += [
        "",
        f"Measured on one {row['gpu']}, {row['date'][:10]}: batch 1152, 4 heads, head_dim 128, "
        f"bf16. Record: [`{row['record']}`](data/records/{row['record']}.json).",
    ]
    return lines


def _block_lines(data_dir: Path) -> list[str]:
    """The tables of block attention and their record; nothing without a record of its notebook."""
    table = _kernel_rows(data_dir, BLOCK_NOTEBOOK)
    lines = []
    for workload, title, batch in BLOCK_TABLES:
        of_it = table[table["workload"] == workload]
        rows = {(row["impl"], row["direction"]): row for _, row in of_it.iterrows()}
        if rows:
            lines += _block_table(rows, title, f"`{workload}`, {batch}")
    return lines


def _block_table(rows: dict[tuple[str, str], pd.Series], title: str, workload: str) -> list[str]:
    lines = [
        "",
        f"{title}:",
        "",
        "| `impl` | idea | changed lines | forward | % of copy | backward | % of copy |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for rung in ladder.BLOCK_RUNGS:
        if (rung.impl, "forward") in rows:
            changed = str(ladder.changed_lines(rung.impl, "block_attention") or "")
            lines.append(_pair(rung.impl, rung.idea, changed, rows, DIRECTIONS, SHARE))
    peers = [
        (rows[impl, "forward"]["time_us_p50"], impl)
        for impl in baselines.BLOCK_BASELINES
        if (impl, "forward") in rows
    ]
    for _, impl in sorted(peers, reverse=True):
        name = baselines.BLOCK_BASELINES[impl].title
        lines.append(_pair(impl, name, "", rows, DIRECTIONS, SHARE))
    row = next(iter(rows.values()))
    lines += [
        "",
        f"Measured on one {row['gpu']}, {row['date'][:10]}: {workload}, head_dim 128, bf16; 100 % "
        "is the fastest copy with as many bytes read for each one written. Record: "
        f"[`{row['record']}`](data/records/{row['record']}.json).",
    ]
    return lines


def update(root: Path = record.ROOT) -> bool:
    """Rewrite the block in README.md and the figure; whether anything changed.

    Nothing is written if a record is refused: RecordError.
    """
    readme = root / "README.md"
    old = readme.read_text(encoding="utf-8")
    new = re.sub(
        f"(?<={re.escape(BEGIN)}\n).*(?={re.escape(END)})",
        lambda _: ladder_block(root / "data") + "\n",
        old,
        flags=re.DOTALL,
    )
    rungs = [rung.impl for rung in ladder.RUNGS]
    drawn = figures.figure_ladder(_rows(root / "data"), WORKLOAD, rungs, None).to_svg()
    path = root / FIGURE
    changed = new != old or not path.exists() or path.read_text(encoding="utf-8") != drawn
    readme.write_text(new, encoding="utf-8")
    path.write_text(drawn, encoding="utf-8")
    return changed


def _rows(data_dir: Path) -> pd.DataFrame:
    table = results.table(data_dir, system=SYSTEM, workload=WORKLOAD)
    keep = (table["scope"] == "kernel") & (table["variant"] == "")
    keep &= (table["direction"] == "forward") & (table["figure"] == "gdpa-self-fwd-full")
    return table[keep]


def _line(impl: str, idea: str, changed: str, row: pd.Series) -> str:
    return (
        f"| {impl} | {idea.rstrip('.')} | {changed} | {row['time_us_p50'] / 1e3:.2f} ms | "
        f"{row['tflops']:.0f} | {row['percent_of_roofline']:.0f} |"
    )


def _pair(
    impl: str,
    idea: str,
    changed: str,
    rows: dict[tuple[str, str], pd.Series],
    keys: Iterable[str],
    number: str,
) -> str:
    """A line with time and `number` of (impl, key) for each key, empty where there is no row."""
    cells = []
    for key in keys:
        row = rows.get((impl, key))
        if row is None:
            cells += ("", "")
        else:
            cells += (f"{row['time_us_p50'] / 1e3:.2f} ms", f"{row[number]:.0f}")
    return f"| `{impl}` | {idea.rstrip('.')} | {changed} | {' | '.join(cells)} |"
