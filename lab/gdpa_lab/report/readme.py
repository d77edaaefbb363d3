"""Generates README.md's table and figure, from records and ladders.

`python -m gdpa_lab maintain readme` rewrites both; tests keep them equal to their sources. Results
are sustained times only. The book's results name the peers that have none.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pandas as pd

from gdpa_kernels.calling import ladder
from gdpa_lab.measuring import baselines, files, record
from gdpa_lab.report import charts, peers, results
from gdpa_lab.report.roles import display_name
from gdpa_lab.report.style import Figure

GPU = "NVIDIA H200"
FIGURE = Path("book/assets/ladder.svg")
WORKLOAD = "gdpa-self-full-1024"
PEERS = {
    "cuDNN": ("cudnn", "cudnn_varlen"),
    "FlashAttention-4": ("fa4", "fa4_dense"),
    "FlashAttention-3": ("fa3", "fa3_dense"),
    "FlashAttention-2": ("fa2_varlen",),
    "FlashInfer (GDPA)": ("flashinfer",),
    "published Triton (GDPA)": ("gdpa_triton",),
}
"""Libraries in the figure, each with its forms; the fastest one that takes the batch counts. Those
that compute GDPA itself say so."""


class Line(NamedTuple):
    """A row of the table: what is computed, the workload, and the chapter whose record has it."""

    title: str
    workload: str
    direction: str
    chapter: str

    @property
    def of_blocks(self) -> bool:
        return self.chapter.startswith("block")

    @property
    def rungs(self) -> tuple[str, ...]:
        """Rungs that compute it."""
        of_gdpa = {"forward": ladder.RUNGS, "backward": ladder.BACKWARD_RUNGS}
        rungs = ladder.BLOCK_RUNGS if self.of_blocks else of_gdpa[self.direction]
        return tuple(rung.impl for rung in rungs)


LINES = (
    Line("GDPA, 1,024 × 1,024", WORKLOAD, "forward", "forward/results"),
    Line("GDPA, 1,024 × 256", "gdpa-cross-full-1024", "forward", "forward/results"),
    Line("GDPA, 1,024 × 1,024", WORKLOAD, "backward", "backward/results"),
    Line("GDPA, 2,048 × 256", "gdpa-cross-full-2048", "backward", "backward/results"),
    Line("block attention", "block-fill70-2000", "forward", "block/results"),
    Line("block attention", "block-fill70-2000", "backward", "block/results"),
    Line("with rotary fused", "block-rotary-1735537", "forward", "block/results"),
    Line("with rotary fused", "block-rotary-1735537", "backward", "block/results"),
)


def spliced(page: str, name: str, text: str) -> str:
    """Return `page` with `text` between the markers of the block `name`."""
    begin, end = (f"<!-- {name}: {edge} -->" for edge in ("begin", "end"))
    head, rest = page.split(begin)
    return f"{head}{begin}\n{text}\n{end}{rest.split(end)[1]}"


def block(data_dir: Path = record.DATA_DIR) -> str:
    """Format the table of results, the best rung against the best peer, and its records.

    LookupError if a row has no record, no rung or no peer.
    """
    lines = [
        "| | time | rate, of ceiling | best peer | its time | faster |",
        "|---|--:|--:|---|--:|--:|",
    ]
    quoted: dict[str, str] = {}
    for line in LINES:
        rows = _rows(data_dir, line)
        ours = rows[rows["impl"].isin(line.rungs)].iloc[0]
        us = ours["time_us_p50"]
        lines.append(
            f"| {line.title}, {line.direction} | {us / 1e3:.2f} ms | {_rate(ours, line)}, "
            f"{ours['percent_of_roofline']:.0f} % | {_peer(rows, line, us)} |"
        )
        quoted[ours["record"]] = ours["date"][:10]
    places = (f"[{date}](data/records/{name}.json)" for name, date in quoted.items())
    return "\n".join(
        [*lines, "", f"Measured back to back on an {GPU}; records of {', '.join(places)}."]
    )


def _peer(rows: pd.DataFrame, line: Line, us: float) -> str:
    """Format the last three cells: the fastest peer, or why the first was not timed."""
    known = baselines.BLOCK_BASELINES if line.of_blocks else baselines.BASELINES
    theirs = rows[rows["impl"].isin(known)]
    if theirs.empty:
        raise LookupError(f"a record must hold a row of {line.workload}, a peer, got none")
    best = theirs.iloc[0]
    title, peer_us = known[best["impl"]].title, best["time_us_p50"]
    if pd.isna(peer_us):
        return f"{title} | not timed: {best['failure'].partition(':')[0]} | "
    ratio = peers.checked(peer_us / us, best["impl"], line.workload, line.direction)
    return f"{title} | {peer_us / 1e3:.2f} ms | {ratio:.2f}×"


def _rate(row: pd.Series, line: Line) -> str:
    return f"{row['gbytes_per_s']:,.0f} GB/s" if line.of_blocks else f"{row['tflops']:.0f} TFLOP/s"


def ladder_times(data_dir: Path = record.DATA_DIR) -> tuple[pd.Series, pd.Series, str]:
    """Collect the times back to back (ms) of the forward ladder, each rung with its idea, and of
    the best form of each peer; and the date of the newest."""
    rows = _rows(data_dir, LINES[0]).set_index("impl")
    ms = rows["time_us_p50"].dropna() / 1e3
    steps = {f"{display_name(rung.impl)}: {rung.title}": ms[rung.impl]
             for rung in ladder.RUNGS if rung.impl in ms}  # fmt: skip
    best = {title: ms[ms.index.isin(forms)].min() for title, forms in PEERS.items()}
    return pd.Series(steps), pd.Series(best).dropna().sort_values(), max(rows["date"])[:10]


def hero(data_dir: Path = record.DATA_DIR) -> Figure:
    """Draw the forward ladder."""
    *times, _ = ladder_times(data_dir)
    timed = f"milliseconds {results.TIMED['sustained']}"
    return charts.ladder(*times, xlabel=f"{timed}, {WORKLOAD}, forward, {GPU}")


def update(root: Path = record.ROOT) -> dict[Path, bool]:
    """Rewrite the figure and the table; return whether each file changed.

    Nothing is written if a record is refused: RecordError.
    """
    path = root / "README.md"
    text = spliced(path.read_text(encoding="utf-8"), "results", block(root / "data"))
    new = {root / FIGURE: hero(root / "data").to_svg(), path: text}
    return {path: files.rewrite(path, text) for path, text in new.items()}


def _rows(data_dir: Path, line: Line) -> pd.DataFrame:
    """Return the sustained rows of a line of the table, fastest first, with default constants, from
    the chapter's run; failed ones come last."""
    run = results.run_of(data_dir, notebook=f"notebooks/{line.chapter}.py", gpu=GPU)
    table = results.table(data_dir, gpu=GPU, workload=line.workload, latest=False)
    key = line.workload, line.direction, "sustained"
    keep = (table["record"] == run.of(key).id) & (table["direction"] == line.direction)
    keep &= (table["variant"] == "") & (table["scope"] == "sustained")
    rows = table[keep].drop_duplicates("impl").sort_values("time_us_p50", kind="stable")
    if not rows["impl"][rows["time_us_p50"].notna()].isin(line.rungs).any():
        raise LookupError(f"a record must hold a time of {line.workload}, a rung, got none")
    return rows
