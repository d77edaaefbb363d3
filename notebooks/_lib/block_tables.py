"""The four published tables of block attention beside a record of ours: a frame for each.

`rows` are those of `Chapter.rows` with kernel times; published numbers are of an NVIDIA B200.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from gdpa_lab.measuring.workload import DIRECTIONS, Workload
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import peers
from gdpa_lab.report.style import is_rung

NOMINAL = {"H200": 4.8e9, "B200": 8e9}
"""Bytes per ms, data sheets."""
PEER = "fa2_varlen"


def printed(name: str, data_dir: str | Path) -> pd.DataFrame:
    """A published file: "times", "speedups" or "accuracy"."""
    return pd.read_csv(Path(data_dir) / "published" / f"block_attention_{name}.csv")


def printed_times(data_dir: str | Path) -> pd.Series:
    """Published ms by table, direction and kernel."""
    return printed("times", data_dir).set_index(["table", "direction", "kernel"])["time_ms"]


def by_impl(rows: pd.DataFrame, value: str = "time_us_p50") -> pd.DataFrame:
    """A row for each workload and direction, a column for each implementation; times in ms."""
    table = rows.pivot(index=["workload", "direction"], columns="impl", values=value)
    return table / 1e3 if value.startswith("time_us") else table


def duels(rows: pd.DataFrame, works: Sequence[Workload], rungs: Sequence[str]) -> pd.DataFrame:
    """The best rung against the best of all others by time, for each workload and direction."""
    ms, share = by_impl(rows), by_impl(rows, "percent_of_roofline")
    lines = []
    for work in works:
        for way in DIRECTIONS:
            times, shares = (x.loc[(work.name, way)].dropna() for x in (ms, share))
            ours = times.index.isin(rungs)
            rung, peer = times[ours].idxmin(), times[~ours].idxmin()
            line = {"head_dim": work.head_dim, "direction": way, "best rung": rung}
            line |= {"ms": times[rung], "% of copy": shares[rung], "best peer": peer}
            line |= {"its ms": times[peer], "its %": shares[peer]}
            ratio = peers.checked(times[peer] / times[rung], peer, work.name, way)
            lines.append(line | {"peer / rung": ratio})
    return pd.DataFrame(lines)


def machine_rates(rows: pd.DataFrame, work: Workload, data_dir: str | Path) -> pd.DataFrame:
    """Percent of the nominal rate of its machine at which the fastest rung, FlashAttention-2 and
    the published kernels of table 5 move their bytes, by direction."""
    ms, theirs = by_impl(rows).loc[work.name].T, printed_times(data_dir)["table5"].unstack()
    ours = {"our kernel, H200": ms[ms.index.map(is_rung)].min()}
    ours["FlashAttention-2, H200"] = ms.loc[PEER]
    published = {"published kernel, B200": theirs["tlx_block_attention"]}
    published["published baseline, B200"] = theirs["fa2_jfa"]
    size = pd.Series({way: 100.0 * work.bytes(way) for way in DIRECTIONS})
    both = {"H200": ours, "B200": published}
    shares = {of: size / NOMINAL[gpu] / t for gpu, times in both.items() for of, t in times.items()}
    return pd.DataFrame(shares).T[list(DIRECTIONS)]


def lengths(rows: pd.DataFrame, impls: Sequence[str]) -> pd.DataFrame:
    """Table 6 of a record: for each batch and direction FlashAttention-2 over the fastest of
    `impls` ("quotient", NaN if it failed), the share of the latter, and how many blocks there are.
    """
    rows = rows[rows["workload"].str.fullmatch(r"block-fill\d+-\d+")]
    ms, share = by_impl(rows), by_impl(rows, "percent_of_roofline")
    others = [impl for impl in impls if impl != PEER]
    table = pd.DataFrame({"quotient": ms[PEER] / ms[others].min(axis=1)})
    table = table.assign(share=share[others].max(axis=1)).reset_index()
    parts = table["workload"].str.extract(r"fill(\d+)-(\d+)").astype(int)
    table["fill"], table["length"] = parts[0] / 100, parts[1]
    blocks = {x: sum(-(-n // 64) for n in workload(x).seqlens_q) for x in set(table["workload"])}
    return table.assign(blocks=table["workload"].map(blocks))


def by_length(quotients: pd.DataFrame, value: str) -> pd.DataFrame:
    """A column for each direction and fill over lengths."""
    table = quotients.pivot(index="length", columns=["direction", "fill"], values=value)
    table = table[[key for way in DIRECTIONS for key in table if key[0] == way]]
    return table.set_axis([f"{way}, fill {fill}" for way, fill in table], axis=1)


def rotary(rows: pd.DataFrame, names: tuple[str, str], fused: str, data_dir: Path) -> pd.DataFrame:
    """Table 7, backward in ms: published; ours with rotary in PyTorch, and in a kernel. `names`: of
    the workloads without rotary and with it; what was not timed is NaN."""
    back = by_impl(rows[rows["direction"] == "backward"]).droplevel("direction").reindex(names)
    plain, back = back.loc[names[0]].min(), back.loc[names[1]]
    table = pd.DataFrame(
        {
            "published, B200": printed_times(data_dir)["table7"].to_numpy(),
            "rotary in PyTorch": [plain, *back.reindex(["rotary_eager", "eager_rotary", fused])],
            "rotary kernel": [plain, *back.reindex(["rotary", "rotary_kernel", fused])],
        },
        index=["attention", "rotary", "one after the other", "fused"],
    )
    table.loc["one after the other / fused"] = table.iloc[2] / table.iloc[3]
    return table


def roundings(accuracy: pd.DataFrame, data_dir: str | Path) -> pd.DataFrame:
    """Table 8: errors with two roundings over those with one; `accuracy`: a record's table."""
    accuracy = accuracy.astype({"roundings": int}).set_index(["roundings", "gradient"])
    accuracy = accuracy[["mean_abs", "max_abs"]]
    ratio = accuracy.loc[2] / accuracy.loc[1]
    old = printed("accuracy", data_dir).set_index(["gradient", "statistic"])
    old = (old["fa2_jfa"] / old["tlx_block_attention"]).unstack()
    table = ratio.set_axis(["mean", "largest"], axis=1).loc[["dq", "dk", "dv"]]
    table["mean, published"] = old["mean_abs_error"]
    return table.assign(**{"largest, published": old["max_abs_error"]})
