"""The published charts and tables, each beside ours: what one machine's kernels gain over its
baselines, drawn small, and what holds and what differs in a sentence each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from _lib import block_tables, ratios
from gdpa_lab.measuring.workload import DIRECTIONS
from gdpa_lab.measuring.workloads import FIGURES, WORKLOADS, figure_direction
from gdpa_lab.report import style
from gdpa_lab.report.chapter import Chapter
from gdpa_lab.report.style import DASHED, SERIES, SMALL, Figure, canvas

SOURCES = {"measured, H200": "full", "published, B200": "none"}
"""Fill of the marks of what was measured here, and of what was published."""
BLOCKS = [f"block-fill{fill}-{n}000" for fill in (70, 100) for n in range(1, 9)]
SWEPT = ["v0_flash", "v1_one_tile", "v3_warp_specialized", block_tables.PEER]
MAIN, PLAIN, ROTARY = "block-fill70-2000", "block-plain-1735537", "block-rotary-1735537"


@dataclass(frozen=True)
class Exhibit:
    """A published chart or table beside ours.

    `target`: the chapter and the name of its figure or table, "forward/results#fig-x". `measured`,
    `published`: factors, a row for each tick and a column for each line. `holds`, `differs`: a
    sentence each. `records`: what was measured.
    """

    title: str
    target: str
    measured: pd.DataFrame
    published: pd.DataFrame
    holds: str
    differs: str
    records: tuple[str, ...]

    @property
    def url(self) -> str:
        chapter, _, name = self.target.partition("#")
        return f"../{chapter}.html#{name}"


def exhibits(chapter: Chapter) -> list[Exhibit]:
    """All six charts and four tables, in the order of their publications."""
    return [*map(Charts(chapter).exhibit, FIGURES), *tables(chapter)]


class Charts:
    """The charts of GDPA: the best kernel over the best baseline, by length."""

    def __init__(self, chapter: Chapter):
        self.standing, self.rows = {}, {}
        for way in DIRECTIONS:
            rows = chapter.rows(f"{way}/results", direction=way, scope="sustained")
            elsewhere = ratios.sustained(chapter)
            standing = ratios.best(rows[rows["figure"] != ""], elsewhere)
            timed = rows[rows["time_us_p50"].notna()]
            self.rows[way] = ratios.behind(timed, standing, elsewhere)
            lead = ratios.beside_published(chapter, standing, way)
            is_open = standing["open"].rename(ratios.row)[lead.index]
            assert (is_open != "by bursts alone").all(), f"{way}: a lead by bursts alone"
            self.standing[way] = lead

    def exhibit(self, figure: str) -> Exhibit:
        way = figure_direction(figure)
        names = [n for n in FIGURES[figure] if ratios.row(n) in self.standing[way].index]
        lead = self.standing[way].loc[[*map(ratios.row, names)]]
        lead.index = [WORKLOADS[name].max_seqlen_q for name in names]
        _, kind, short, fill = figure.split("-")
        rows = self.rows[way][self.rows[way]["workload"].isin(names)]
        holds, differs = compared(*(lead[x] for x in lead))
        return Exhibit(
            f"{kind} {way}, {fill}", f"{way}/results#fig-self-{short}-full",
            *(lead[[x]].set_axis(["lead"], axis=1) for x in lead), holds, differs,
            tuple(dict.fromkeys(rows["record"])),
        )  # fmt: skip


def compared(ours: pd.Series, theirs: pd.Series) -> tuple[str, str]:
    """Say what holds and what differs of two leads over the best baseline, by length: where the
    kernel is ahead in both, where it is most ahead if that is one length, and by how much."""
    ahead = ours.index[(ours >= 1) & (theirs >= 1)]
    behind = ours.index[(ours < 1) & (theirs >= 1)]
    where = "at every length" if len(ahead) == len(ours) else f"at {_numbers(ahead)}"
    most = f", most at {_numbers([ours.idxmax()])}" if ours.idxmax() == theirs.idxmax() else ""
    lost = f"Behind at {_numbers(behind)}; " if len(behind) else ""
    ends = [f"{x.min():.2f} to {x.max():.2f}" for x in (ours, theirs)]
    return (
        f"Ahead of every baseline {where}{most}." if len(ahead) else "Nothing.",
        f"{lost}{ends[0]} times as fast, not {ends[1]}.",
    )


def _numbers(values: Sequence[int]) -> str:
    return ratios.listed([f"{n:,}" for n in values])


def tables(chapter: Chapter) -> list[Exhibit]:
    """The tables of block attention. AssertionError if a sentence does not hold."""
    of = "block/results"
    rows = chapter.rows(of, scope="sustained", direction=DIRECTIONS)
    ms, errors = block_tables.by_impl(rows), chapter.recorded("accuracy", of)
    main = rows[rows["workload"] == MAIN]
    records = tuple(dict.fromkeys(main[main["time_us_p50"].notna()]["record"]))

    best = ms[[x for x in ms if style.is_rung(x)]].min(axis=1)
    theirs = block_tables.printed_times(chapter.data_dir)["table5"].unstack()
    both = [(ms[block_tables.PEER] / best)[MAIN], theirs["fa2_jfa"] / theirs["tlx_block_attention"]]
    ours5, theirs5 = (x.loc[list(DIRECTIONS)].to_frame("lead") for x in both)
    (forward, backward), printed = ours5["lead"], theirs5["lead"]
    assert backward > forward and printed["backward"] > printed["forward"], "table 5"
    five = Exhibit(
        "table 5: over FlashAttention-2", f"{of}#tab-block-best", ours5, theirs5,
        "The backward pass gains more than the forward pass.",
        f"Forward {forward:.2f} times, not {printed['forward']:.2f}; backward {backward:.2f}, not "
        f"{printed['backward']:.2f}: another FlashAttention-2 is the baseline.", records,
    )  # fmt: skip

    swept = rows[rows["workload"].isin(BLOCKS) & rows["impl"].isin(SWEPT)]
    lengths = block_tables.lengths(swept, SWEPT)
    bars = block_tables.printed("speedups", chapter.data_dir)
    bars = bars[bars["direction"].isin(DIRECTIONS)].rename(columns={"max_seqlen": "length"})
    ours6 = block_tables.by_length(lengths, "quotient")
    theirs6 = block_tables.by_length(bars, "speedup_vs_fa2_jfa")[list(ours6)]
    within = [_spread(x, column) for x, column in
              ((lengths, "quotient"), (bars, "speedup_vs_fa2_jfa"))]  # fmt: skip
    failed = lengths[lengths["quotient"].isna()]["workload"].nunique()
    assert 0 < failed < len(BLOCKS) and within[0] < within[1] < 30, "table 6"
    six = Exhibit(
        "table 6: over FlashAttention-2", f"{of}#fig-tables-lengths",
        *(_thousands(x) for x in (ours6, theirs6)),
        f"The gain hardly depends on the length, within {within[0]:.0f} % (theirs "
        f"{within[1]:.0f} %).",
        f"PyTorch's FlashAttention-2 fails on {failed} of {len(BLOCKS)} batches.", records,
    )  # fmt: skip

    rotary = ms.loc[ROTARY, "backward"]
    fused = rotary[[x for x in rotary.index if style.is_rung(x)]].idxmin()
    seven = block_tables.rotary(rows, (PLAIN, ROTARY), fused, chapter.data_dir)
    published, eager, kernel = seven.loc["one after the other / fused"]
    assert 1 < kernel < published < eager, "table 7"
    ticks = {"rotary kernel": (kernel, published), "PyTorch": (eager, np.nan)}
    ours7, theirs7 = (pd.DataFrame({"gain": {x: y[n] for x, y in ticks.items()}}) for n in (0, 1))
    seven = Exhibit(
        "table 7: fused over apart", f"{of}#fig-tables-rotary", ours7, theirs7,
        "One fused pass is faster than rotary and attention.",
        f"{kernel:.2f} times over a rotary kernel and {eager:.0f} over PyTorch, not "
        f"{published:.2f}: the baseline decides.", records,
    )  # fmt: skip

    eight = block_tables.roundings(errors, chapter.data_dir)
    ours8, theirs8 = (eight[[x]].set_axis(["error"], axis=1) for x in ("mean", "mean, published"))
    (dq, *_), printed = ours8["error"], theirs8.loc["dq", "error"]
    assert (ours8["error"] > 1).all() and dq < printed, "table 8"
    eight = Exhibit(
        "table 8: error, twice over once", f"{of}#tab-block-roundings", ours8, theirs8,
        "Two roundings cost more mean error than one.",
        f"{dq:.2f} times for dq, not {printed:.2f}; shape and inputs are unpublished.",
        tuple(chapter.holders("accuracy", of)),
    )  # fmt: skip
    return [five, six, seven, eight]


def _spread(table: pd.DataFrame, column: str) -> float:
    """By how many percent the largest factor of one direction exceeds its smallest, the worse."""
    ends = table.groupby("direction")[column].agg(["min", "max"])
    return 100 * (ends["max"] / ends["min"] - 1).max()


def _thousands(table: pd.DataFrame) -> pd.DataFrame:
    return table.set_axis([f"{n // 1000}k" for n in table.index])


@style.drawn
def small_multiples(shown: Sequence[Exhibit], columns: int = 3) -> Figure:
    """Draw a small chart of each exhibit, its title a link to the chapter's figure or table.

    Marks: the factors of `SOURCES`; a gap has no value. Dashed: 1. Several lines of an exhibit are
    named, once each. ValueError without an exhibit.
    """
    if not shown:
        raise ValueError("shown must hold an exhibit, got none")
    columns = 1 if style.is_narrow() else columns
    rows = -(-len(shown) // columns)
    with canvas(rows, columns, width=7.4, height=1.5 * rows, squeeze=False) as (chart, axes):
        for axis, exhibit in zip(axes.flat, shown, strict=False):
            _draw(axis, exhibit)
        for axis in axes.flat[len(shown) :]:
            axis.remove()
        handles, labels = axes.flat[0].get_legend_handles_labels()
        chart.legend(handles, labels, loc="outside lower right", ncols=2)
        return chart


def _draw(axis: style.Axes, exhibit: Exhibit) -> None:
    ticks = list(exhibit.measured.index)
    is_row = str(ticks[0])[0].isdigit()  # lengths; names are no line
    sources = zip(SOURCES.items(), (exhibit.published, exhibit.measured)[::-1], strict=True)
    for (source, fill), table in sources:
        for number, name in enumerate(table):
            values = table[name].reindex(ticks)
            axis.plot(
                range(len(ticks)), values, marker="o", color=SERIES[0], markersize=4,
                fillstyle=fill, markeredgewidth=0.9, linewidth=1.2 if is_row else 0,
                label="" if number else source,
            )  # fmt: skip
    axis.axhline(1, **DASHED)
    top = max(exhibit.measured.max().max(), exhibit.published.max().max())
    axis.set(ylim=(0, 1.18 * top), xlim=(-0.35, len(ticks) - 0.65))
    axis.set_xticks(range(len(ticks)), [str(x) for x in ticks])
    axis.tick_params(labelsize=8)
    axis.set_title(exhibit.title, loc="left").set_url(exhibit.url)
    if len(exhibit.measured.columns) > 1:
        for name, text in _short_names(exhibit.measured).items():
            first = exhibit.measured[name].dropna().iloc[0]
            style.note(axis, text, (0, first), (2, 5), fontsize=SMALL - 1)


def _short_names(table: pd.DataFrame) -> Mapping[str, str]:
    """The first column of each kind, by what stands before the comma."""
    kinds: dict[str, str] = {}
    for name in table:
        kinds.setdefault(name.partition(",")[0], name)
    return {name: kind for kind, name in kinds.items()}
