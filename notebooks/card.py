"""The picture that a link to the book shows: the forward ladder of the newest record.

python notebooks/card.py
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import yaml
from matplotlib.figure import Figure

from gdpa_kernels.calling import ladder
from gdpa_lab.measuring.record import DATA_DIR, ROOT
from gdpa_lab.report import results
from gdpa_lab.report.readme import GPU, PEERS, WORKLOAD

CARD = ROOT / "book" / "extra" / "card.png"
PIXELS = 1200, 630
SUBTITLE = "Fast GPU kernels for recommendation models, measured step by step"
GROUND, TEXT, MUTED, BARS = "#101418", "#f2f2f2", "#a9b0b7", "#12a184"


def rates(data_dir: Path = DATA_DIR) -> tuple[dict[str, float], str]:
    """TFLOP/s of the fastest baseline and of every rung, back to back, and the date of the newest.

    LookupError if there is no rung or no baseline.
    """
    rows = results.table(data_dir, gpu=GPU, workload=WORKLOAD)
    rows = rows[(rows["scope"] == "sustained") & (rows["variant"] == "")]
    rows = rows[rows["direction"] == "forward"].dropna(subset=["tflops"]).set_index("impl")
    timed = rows["tflops"]
    rungs = {x.impl: timed[x.impl] for x in ladder.RUNGS if x.impl in timed}
    best = {
        name: max(timed[x] for x in impls if x in timed)
        for name, impls in PEERS.items()
        if set(impls) & set(timed.index)
    }
    if not rungs or not best:
        raise LookupError(
            f"a record of {WORKLOAD} on {GPU} must hold rungs and baselines, got none"
        )
    fastest = max(best, key=best.get)
    return {fastest: best[fastest]} | rungs, max(rows["date"])[:10]


def draw(title: str, shown: dict[str, float], date: str) -> Figure:
    """Title, subtitle and a bar for each implementation, the first of which is the baseline."""
    figure = Figure(figsize=[x / 100 for x in PIXELS], dpi=100, facecolor=GROUND)
    figure.text(0.05, 0.86, title, size=40, weight="bold", color=TEXT, va="center")
    figure.text(0.05, 0.70, textwrap.fill(SUBTITLE, 42), size=21, color=MUTED, va="center")
    axes = figure.add_axes((0.05, 0.16, 0.9, 0.40))
    bars = axes.bar(range(len(shown)), shown.values(), color=[MUTED, *[BARS] * (len(shown) - 1)])
    axes.bar_label(bars, fmt="%.0f", size=15, color=TEXT, padding=3)
    names = [name.partition("_")[0] for name in shown]
    axes.set_xticks(range(len(shown)), names, size=15, color=TEXT)
    axes.set_facecolor("none")
    axes.set_yticks([])
    axes.margins(x=0.01)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    caption = f"TFLOP/s back to back, forward, 1,024 tokens, {GPU}, {date}. "
    caption += f"{next(iter(shown))} computes softmax: the same FLOPs."
    figure.text(0.05, 0.045, caption, size=14, color=MUTED)
    return figure


def main() -> int:
    title = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["title"]
    CARD.parent.mkdir(parents=True, exist_ok=True)
    draw(title, *rates()).savefig(CARD, metadata={"Software": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
