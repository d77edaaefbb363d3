"""Text of a page about its figures: origin of values, downloads, glued numbers."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from gdpa_lab.measuring import record as records
from gdpa_lab.measuring import system as systems
from gdpa_lab.report import doctor, results

if TYPE_CHECKING:
    from IPython.display import Markdown

KINDS = ("measured", "profiled", "published", "modelled", "emulated", "compiled", "computed")
"""Kinds of numbers; every figure names its own. "profiled": counters of launches in
a record. "computed": by PyTorch on a CPU, or from other numbers of the book."""
RECORDED = ("measured", "profiled")

CSV_DIR = records.ROOT / "book" / "extra" / "figures"


def provenance(
    rows: pd.DataFrame | Sequence[str],
    csv: str | None = None,
    kind: str = "measured",
    *,
    data_dir: Path = records.DATA_DIR,
) -> Markdown:
    """Format the line under a figure of one of `RECORDED`: machine, date, number of records and a
    stale warning; folded versions other than the pinned ones, commit, local changes, the records,
    timing, the matmul ceiling of the record and scope, data.

    `rows`: the rows of `results.table` that were drawn, or ids of records. `csv`: the name given to
    `save_csv`. Paths are relative to a page of book/executed/<part>. RecordError if a record is
    missing.
    """
    stale: list[str] = []
    ids, scopes = list(rows), {}
    if isinstance(rows, pd.DataFrame):
        scopes = rows.groupby("record", sort=False)["scope"].agg(set)
        ids = list(scopes.index)
        stale = sorted(set(rows["impl"][rows["stale"]]))
    if not ids:
        raise ValueError("rows must name at least one record, got none")
    runs, machines, gpus, dates = [], set(), [], []
    for name in ids:
        run = records.load(Path(data_dir) / "records" / f"{name}.json")
        machine = systems.by_id(run.system, data_dir)
        gpus.append(machine.gpu or run.system)
        dates.append(run.created[:10])
        held = run.package.committed()
        name_of_commit = held or run.package.commit
        commit = f"commit <code>{name_of_commit[:10]}</code>" if name_of_commit else "no commit"
        if held == "" or (held is None and run.package.dirty):
            commit += " with local changes"
        versions = "" if run.system in machines else _versions(machine)
        machines.add(run.system)
        runs.append(
            f"{_link(f'data/systems/{run.system}.json', machine.gpu or run.system)}{versions}, "
            f"{html.escape(run.created[:10])}, {commit}, "
            f"record {_link(f'data/records/{name}.json', name)}{_timed(run, scopes.get(name, ()))}"
        )
    warning = ""
    if stale:
        warning = (
            ' <span class="stale">The machine code of '
            + ", ".join(f"<code>{html.escape(impl)}</code>" for impl in stale)
            + " has changed since: <code>make measure</code> records it again.</span>"
        )
    count = "1 record" if len(ids) == 1 else f"{len(ids)} records"
    when = " to ".join(sorted({min(dates), max(dates)}))
    line = f"{html.escape(', '.join(dict.fromkeys(gpus)))}, {when}, {count}{warning}"
    return _provenance(kind, line, csv, folded="; ".join(runs) + ".")


def _timed(run: records.Record, scopes: Collection[str]) -> str:
    parts = []
    for scope in (scope for scope in results.TIMED if scope in scopes):
        limit = results.ceilings(run, scope)
        under = f" (matmul {limit.tflops:.0f} TFLOP/s)" if limit else ""
        parts.append(f"{results.TIMED[scope]}{under}")
    return f", timed {' and '.join(parts)}" if parts else ""


def _versions(machine: systems.System) -> str:
    """Format the versions of the software that ran, in parentheses; "" for the pinned ones."""
    pins = (doctor.TORCH, doctor.FBTRITON)
    torch, fbtriton = (pin.partition("==")[2] for pin in pins)
    differences = []
    if machine.torch.partition("+")[0] != torch:
        differences.append(f"torch {machine.torch}, not {torch}")
    if machine.fbtriton != fbtriton:
        differences.append(f"Triton {machine.triton}, not fbtriton {fbtriton}")
    if not differences:
        return ""
    return html.escape(f" ({'; '.join([*differences, f'driver {machine.driver}'])})")


def source(kind: str, text: str, csv: str | None = None) -> Markdown:
    """Format the line under a figure for values that no record holds, of one of `KINDS`.

    `text`: where they come from (a publication and its machine, a formula, a program).
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    return _provenance(kind, html.escape(text), csv)


def show_table(
    table: pd.DataFrame,
    caption: str | None = None,
    name: str | None = None,
    digits: Mapping[str, int] | None = None,
    missing: str = "",
) -> Markdown:
    """Format a table for the page. Columns of numbers have the same decimals (`digits`, or those
    that give the median three significant digits) and are aligned right; `missing` replaces NaN.

    With `caption`, which begins with the finding in bold, it is numbered, and {numref}`name` cites
    it. ValueError for another caption and for digits of no column.
    """
    from IPython.display import Markdown

    if unknown := set(digits or ()) - set(table.columns):
        raise ValueError(f"digits must be of columns of the table, got {sorted(unknown)}")
    numeric = {x for x in table.columns if pd.api.types.is_numeric_dtype(table[x])}
    numeric -= set(table.select_dtypes(bool).columns)
    columns = [
        _numbers(table[x], (digits or {}).get(x), missing) if x in numeric else map(_cell, table[x])
        for x in table.columns
    ]
    sides = ["--:" if x in numeric else ":--" for x in table.columns]
    rows = [[_cell(x) for x in table.columns], sides, *zip(*columns, strict=True)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if caption is None:
        return Markdown("\n".join(lines))
    if not caption.startswith("**"):
        raise ValueError(f"caption must begin with the finding in bold, got {caption!r}")
    label = [f":name: {name}"] if name else []
    head = [f"::::{{table}} {' '.join(caption.split())}", ":class: exhibit", *label, ""]
    return Markdown("\n".join([*head, *lines, "::::"]))


def _numbers(column: pd.Series, digits: int | None, missing: str) -> list[str]:
    """Format numbers with the same decimals, no more than they have; tiny ones as powers of ten."""
    size = column.abs().where(lambda x: x > 0).median()
    form = ",.0f"
    if digits is not None:
        form = f",.{digits}f"
    elif size < 1e-3:
        form = ".2e"
    elif math.isfinite(size):
        most = max(0, 2 - math.floor(math.log10(size)))
        form = next(
            f",.{n}f" for n in range(most + 1) if n == most or column.round(n).equals(column)
        )
    return [missing if pd.isna(x) else f"{x:{form}}" for x in column]


def _cell(value: object) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.3g}"
    return (
        "" if value is None or value is pd.NA else " ".join(str(value).split()).replace("|", "\\|")
    )


def save_csv(table: pd.DataFrame, name: str) -> Path:
    """Write the data of a figure to book/extra/figures/`name`.csv, which the site offers."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
        raise ValueError(f"name must be lower-case letters, digits, - and _, got {name!r}")
    CSV_DIR.mkdir(parents=True, exist_ok=True)
    path = CSV_DIR / f"{name}.csv"
    table.to_csv(path, index=False, float_format="%.6g", lineterminator="\n")
    return path


def glue(key: str, value: float | str) -> None:
    """Pass a number or a word to the text: {glue:text}`key:.1f`. ValueError unless the number is
    finite and the word not empty."""
    if isinstance(value, str):
        if not value:
            raise ValueError(f"value of {key!r} must be a word, got {value!r}")
    elif not math.isfinite(value := float(value)):
        raise ValueError(f"value of {key!r} must be a finite number, got {value}")
    _display("text/plain", key, repr(value))


def glue_html(key: str, text: str) -> None:
    """Pass HTML to the text, for example a table that another page shows: ```{glue} key```."""
    _display("text/html", key, text)


def _display(kind: str, key: str, value: str) -> None:
    """Display as `myst_nb.glue(key, value, display=False)` does, which may not be installed."""
    from IPython.display import display

    prefix = "application/papermill.record/"
    display(
        {f"{prefix}{kind}": value},
        raw=True,
        metadata={"scrapbook": {"name": key, "mime_prefix": prefix}},
    )


def _link(path: str, text: str) -> str:
    return f'<a href="../../{html.escape(path)}">{html.escape(text)}</a>'


def _provenance(kind: str, text: str, csv: str | None, folded: str = "") -> Markdown:
    """Format a line of origin; `folded`: what it shows when it is opened."""
    from IPython.display import Markdown

    data = ""
    if csv is not None:
        if not (CSV_DIR / f"{csv}.csv").exists():
            raise ValueError(f"csv must be a name that save_csv was given, got {csv!r}")
        data = f"{_link(f'figures/{csv}.csv', 'Data of this figure (CSV)')}."
    tag = f'class="provenance" data-kind="{kind}"'
    if folded:
        line = f"<summary><b>{kind}</b>: {text}</summary>{folded} {data}".rstrip()
        return Markdown(f"<details {tag}>{line}</details>")
    stop = "" if text.endswith(".") or not data else ". "
    return Markdown(f"<p {tag}><b>{kind}</b>: {text}{stop}{data}</p>")
