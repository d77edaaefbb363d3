"""The picture that a link to the book shows: the ladder of the front page.

python notebooks/card.py
"""

from __future__ import annotations

import sys

import pandas as pd
import yaml
from matplotlib.figure import Figure

from gdpa_lab.measuring.record import ROOT
from gdpa_lab.report import charts, style
from gdpa_lab.report.readme import GPU, ladder_times

CARD = ROOT / "book" / "extra" / "card.png"
PIXELS = 1200, 630
SUBTITLE = "Fast GPU kernels for recommendation models, measured step by step"


def draw(title: str, rungs: pd.Series, peers: pd.Series, date: str) -> Figure:
    """Title, subtitle and the ladder of the front page; of `ladder_times`."""
    with style.context():
        figure = Figure(figsize=[x / 100 for x in PIXELS], dpi=100, facecolor=style.PAGE)
        figure.text(0.04, 0.91, title, size=34, weight="bold", va="center")
        figure.text(0.04, 0.825, SUBTITLE, size=18, color=style.GREY, va="center")
        axes = figure.add_axes((0.04, 0.12, 0.885, 0.51))
        charts.draw_ladder(axes, rungs, peers, size=13)
        timed = f"Milliseconds back to back, forward pass, 1,024 tokens, {GPU}, {date}"
        figure.text(0.04, 0.03, timed, size=13, color=style.GREY)
        return figure


def main() -> int:
    title = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["title"]
    CARD.parent.mkdir(parents=True, exist_ok=True)
    draw(title, *ladder_times()).savefig(CARD, metadata={"Software": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
