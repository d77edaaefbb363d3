"""The published charts of rates, redrawn beside what was measured: shares of the own roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from gdpa_lab.measuring.require import require
from gdpa_lab.measuring.workloads import WORKLOADS, figure_direction
from gdpa_lab.report.charts import head
from gdpa_lab.report.roles import display_name, role_colour
from gdpa_lab.report.style import DASHED, GREY, GREYS, Figure, canvas, drawn, is_rung


@drawn
def shares(
    table: pd.DataFrame,
    titles: Mapping[str, str],
    *,
    rungs: Sequence[str],
    published: pd.DataFrame,
    roofs: Mapping[str, float],
    there: pd.DataFrame | None = None,
    finding: str = "",
) -> Figure:
    """Percent of the own roofline back to back by length, a panel for each published figure of
    `titles`: a line for each of `rungs` and one of the best baseline at each length, and hollow
    bars for the published kernel on its GPU.

    `table`: rows of `results.table` of one system. `published`: `claims.published_figures()`.
    `roofs`: the roofline of each workload on the GPU of the published bars (TFLOP/s). `there`: rows
    of another system, drawn dashed. A gap is not timed. ValueError without a row of one of `rungs`.
    """
    other = {} if there is None else {f", {there['gpu'].iloc[0].split()[-1]}": there}
    with canvas(1, len(titles), width=7.4, height=3.2, sharey=True, squeeze=False) as (chart, axes):
        for axis, (figure, title) in zip(axes[0], titles.items(), strict=True):
            way, theirs = figure_direction(figure), published[published["figure"] == figure]
            theirs = theirs[theirs["kernel"] == "cutedsl_gdpa"].sort_values("length")
            names = list(theirs["workload"])
            bars = 100 * theirs["tflops"] / theirs["workload"].map(roofs)
            axis.bar(range(len(names)), bars, 0.7, color="none", linewidth=1, gid="published",
                     edgecolor=GREYS[2], label="published kernel, B200")  # fmt: skip
            for suffix, rows in {"": table, **other}.items():
                timed = (rows["scope"] == "sustained") & (rows["variant"] == "")
                rows = rows[timed & (rows["direction"] == way) & rows["workload"].isin(names)]
                require(rows["system"].nunique() == 1, "table", "rows of one system", figure)
                share = rows.pivot_table(index="workload", columns="impl",
                                         values="percent_of_roofline").reindex(names)  # fmt: skip
                shown = [impl for impl in share if is_rung(impl)] if suffix else rungs
                lacking = [impl for impl in shown if impl not in share]
                require(not lacking, "table", f"sustained rows of {', '.join(lacking)}", figure)
                peers = share[[impl for impl in share if not is_rung(impl)]]
                looks = {"linestyle": "--" if suffix else "-", "marker": "o"}
                axis.plot(peers.max(axis=1).to_numpy(), color=GREY, label=f"best baseline{suffix}",
                          linewidth=1.1, **looks)  # fmt: skip
                for impl in share.columns.intersection(shown, sort=False):
                    axis.plot(share[impl].to_numpy(), color=role_colour(impl), **looks,
                              label=f"{display_name(impl, way)}{suffix}")  # fmt: skip
            lengths = [f"{WORKLOADS[name].max_seqlen_q:,}" for name in names]
            axis.set_xticks(range(len(names)), lengths)
            axis.set(
                title=title, ylim=(0, max(105, axis.get_ylim()[1])), xlim=(-0.5, len(names) - 0.5)
            )
            axis.axhline(100, **DASHED)
        axes[0, 0].set_ylabel("% of the own roofline")
        axes[0, -1].set_xlabel("queries (tokens)")
        head(axes[0, 0], finding, ncols=3)
        return chart
