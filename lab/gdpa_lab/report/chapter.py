"""`Chapter`: the numbers of a chapter and their way to the page.

One call shows one exhibit: a chart or a table, its data as a download, and the line that says
whether it was measured, profiled, published, modelled or emulated. A prediction comes with its
verdict.
"""

from __future__ import annotations

import ast
import difflib
import math
import re
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from IPython.display import SVG, Markdown, display

from gdpa_kernels.calling import ladder
from gdpa_lab.measuring import record as records
from gdpa_lab.report import lessons, page, page_blocks, profiles, results, strip, style
from gdpa_lab.report import registered as register
from gdpa_lab.report.roles import display_name
from gdpa_lab.report.style import Figure
from tritonemu import Timeline

CHANGES_DIR = records.ROOT / "book" / "extra" / "changes"
LADDER = "gdpa-self-full-1024"
LADDERS = {
    "forward": ("forward/results", ladder.RUNGS, LADDER, "forward"),
    "backward": ("backward/results", ladder.BACKWARD_RUNGS, LADDER, "backward"),
    "block": ("block/results", ladder.BLOCK_RUNGS, "block-fill70-2000", "backward"),
}
"""Chapter with sustained times of each ladder, its rungs, the workload and the direction."""
_CALL = ["record", "workload", "direction", "impl", "variant"]
MOST_CHANGED = 60
"""Maximum lines of a difference on a page; the whole of it is a download."""


class Chapter:
    """A chapter as its source sees it.

    Args:
        slug: its file without the ending, such as "forward/v5_pingpong".
        mode: "replay", "measure" or "compare"; device, data_dir: as papermill gives them.
        gpu: exact name of the GPU whose records it quotes.
    """

    def __init__(
        self,
        slug: str,
        *,
        mode: str = "replay",
        device: str = "cpu",
        data_dir: str | Path = records.DATA_DIR,
        gpu: str = "NVIDIA H200",
    ):
        self.slug, self.mode, self.device, self.gpu = slug, mode, device, gpu
        self.data_dir = Path(data_dir)
        self._tables = self._counted = 0
        self._predictions: tuple[page_blocks.Prediction, ...] = ()
        self._runs: dict[str, results.Run] = {}
        self._rows: dict[str, pd.DataFrame] = {}
        self._history: dict[str, pd.DataFrame] = {}

    # Records.

    def measure(self, run: Callable[[Any], None]) -> None:
        """Run `run(session)` in mode "measure", then write the record, even if that raises.
        RuntimeError if a part of the run failed, so that no record lacks it silently.

        >>> @chapter.measure                                            # doctest: +SKIP
        ... def _(session):
        ...     session.measure(workload("gdpa-self-full-1024"), ["v4_warp_specialized"])
        """
        if self.mode == "measure":
            session = self._session()
            session.begin(self.data_dir)
            try:
                run(session)
            finally:
                print(session.write(self.data_dir))
                self._runs.clear()
            if session.broken:
                raise RuntimeError(f"the record lacks {'; '.join(session.broken)}")

    def compare(self, run: Callable[[Any], None]) -> Any:
        """Run `run(session)` in mode "compare", without a record; return the session, or None."""
        if self.mode != "compare":
            return None
        session = self._session()
        run(session)
        return session

    def _session(self) -> Any:
        from gdpa_lab.measuring.session import Session

        return Session(f"notebooks/{self.slug}.py", self.device)

    def record(self, of: str | None = None) -> records.Record:
        """Return the whole record of a chapter's run, by default this one's, or the record of that
        id. LookupError if there is none."""
        return self._run(of).whole

    def _run(self, of: str | None) -> results.Run:
        slug = of or self.slug
        if slug not in self._runs:
            path, notebook = self.data_dir / "records" / f"{slug}.json", f"notebooks/{slug}.py"
            if path.exists():
                self._runs[slug] = results.Run(records.load(path))
            else:
                self._runs[slug] = results.run_of(self.data_dir, notebook=notebook, gpu=self.gpu)
        return self._runs[slug]

    def recorded(self, table: str, of: str | None = None) -> pd.DataFrame:
        """Return a table of that run. LookupError naming those there are."""
        run = self._run(of)
        tables = [each.tables[table] for each in run.records if table in each.tables]
        if not tables:
            known = sorted(run.whole.tables)
            raise LookupError(f"table must be one of {run.whole.id} ({known}), got {table!r}")
        frame = pd.DataFrame(list(tables[0].rows), columns=list(tables[0].columns))
        for piece in tables[1:]:
            newer = pd.DataFrame(list(piece.rows), columns=list(piece.columns))
            if "workload" in newer:
                frame = pd.concat([frame[~frame["workload"].isin(newer["workload"])], newer])
        return frame.reset_index(drop=True)

    def holders(self, table: str, of: str | None = None) -> list[str]:
        """List the ids of the records that `recorded` takes a table from."""
        return [each.id for each in self._run(of).records if table in each.tables]

    def rows(self, of: str | None = None, **filters: Any) -> pd.DataFrame:
        """Return the rows of that run, as `results.table` has them, each once, by workload in the
        order of the whole record.

        `filters`: a value or a list of values for a column; `scope="kernel"` and `variant=""`
        unless they are among them, None for any. An isolated time whose calls the host enqueues
        too slowly is host time, and counts as failed. LookupError if nothing is left.
        """
        of = of or self.slug
        if of not in self._rows:
            run = self._run(of)
            rows = run.select(self._tables_of(run.records))
            self._rows[of] = rows.drop_duplicates([*_CALL, "scope"])
        return self._filtered(self._rows[of], of, filters)

    def together(self, of: str, impls: Collection[str], **filters: Any) -> pd.DataFrame:
        """Return rows as `rows` does, of each workload, direction and scope all those of the newest
        record of the chapter `of` that times all `impls`: what is compared comes from one run.
        LookupError if no record does."""
        if of not in self._history:
            runs = results.runs(self.data_dir, notebook=f"notebooks/{of}.py", gpu=self.gpu)
            self._history[of] = self._tables_of(runs)
        rows = self._filtered(self._history[of], of, filters)
        timed = rows[rows["impl"].isin(impls) & rows["time_us_p50"].notna()]
        part = ["workload", "direction", "scope"]
        whole = timed.groupby([*part, "record"])["impl"].nunique() == len(set(impls))
        newest = whole[whole].reset_index().groupby(part)["record"].max()
        if newest.empty:
            raise LookupError(f"a record of {of} must time {', '.join(impls)} together, got none")
        wanted = rows[part].apply(tuple, axis=1).map(newest.to_dict())
        return rows[rows["record"] == wanted].drop_duplicates([*_CALL, "scope"])

    def _tables_of(self, runs: Sequence[records.Record]) -> pd.DataFrame:
        """All rows of some records, by workload in the order of the first one that has it."""
        tables = [
            results.table(self.data_dir, gpu=self.gpu, record=run.id, latest=False) for run in runs
        ]
        rows = pd.concat(tables, ignore_index=True)
        order = [*dict.fromkeys(rows["workload"])]
        rows = rows.sort_values("workload", kind="stable", key=lambda x: x.map(order.index))
        return _without_host_time(rows)

    def _filtered(self, rows: pd.DataFrame, of: str, filters: Mapping[str, Any]) -> pd.DataFrame:
        for column, values in ({"scope": "kernel", "variant": ""} | filters).items():
            if values is not None:
                values = [values] if isinstance(values, str) else list(values)
                rows = rows[rows[column].isin(values)]
        if rows.empty:
            raise LookupError(f"{of} must hold rows of {filters}, got none")
        return rows.copy()

    def times(
        self,
        of: str | None = None,
        value: str = "time_us_p50",
        columns: str = "impl",
        together: Collection[str] = (),
        **filters: Any,
    ) -> pd.DataFrame:
        """Pivot `rows`, or `together` of these implementations: a row per workload, a column per
        value of `columns`, in record order."""
        rows = self.together(of, together, **filters) if together else self.rows(of, **filters)
        frame = rows.pivot_table(index="workload", columns=columns, values=value, sort=False)
        return frame[[name for name in dict.fromkeys(rows[columns]) if name in frame]]

    def scope(self, of: str | None = None, **filters: Any) -> str:
        """Choose the scope to show for some rows: sustained, unless the record lacks sustained
        times for some isolated ones. `results.TIMED` is the text for the axis."""
        rows = self.rows(of, scope=list(results.TIMED), **filters)
        calls = {scope: {*group[_CALL].itertuples(index=False)}
                 for scope, group in rows.groupby("scope")}  # fmt: skip
        whole = calls.get("kernel", set()) <= calls.get("sustained", set())
        return "sustained" if whole else "kernel"

    # Exhibits.

    def figure(
        self, chart: Figure | Timeline | str, *, data: pd.DataFrame | None = None, **origin: Any
    ) -> None:
        """Show a chart, a timeline or SVG text, in a cell whose `# |` lines name and describe it.

        `origin`: the source of each kind of number in it: measured= (rows of `results.table`, or
        ids of records), profiled= (ids), and in a sentence published=, modelled=, emulated=,
        compiled=, computed=, and measured= for numbers in no record. `data`: the reader's download;
        None: measured rows.
        """
        if isinstance(chart, Timeline):
            chart = style.both(chart.svg(width=720), chart.svg(width=380))
        display(SVG(chart) if isinstance(chart, str) else chart)
        display(self._origin(data, origin))

    def table(
        self,
        frame: pd.DataFrame,
        *,
        caption: str | None = None,
        name: str | None = None,
        data: pd.DataFrame | None = None,
        digits: Mapping[str, int] | None = None,
        missing: str | None = None,
        **origin: Any,
    ) -> None:
        """Show a table as `page.show_table` has it; the rest as for `figure`. `missing`: what
        stands for no number, "not timed" if all of it is measured."""
        if missing is None:
            missing = "not timed" if set(origin) == {"measured"} else ""
        display(page.show_table(frame, caption, name, digits, missing))
        display(self._origin(data, origin))

    def ladder(self, impl: str, name: str = "forward") -> None:
        """Show the times back to back of one of `LADDERS` as a strip, this rung lit, and those of
        the peers: the fastest form of each."""
        of, listed, batch, direction = LADDERS[name]
        rows = self.rows(of, workload=batch, direction=direction, scope="sustained")
        ms = rows.set_index("impl")["time_us_p50"].dropna() / 1e3
        rungs = {rung: ms[rung.impl] for rung in listed if rung.impl in ms}
        best: dict[str, float] = {}
        for peer, time in ms.items():
            if not style.is_rung(peer):
                title = display_name(peer).partition(",")[0].removesuffix(" (torch)")
                best[title] = min(time, best.get(title, math.inf))
        folder = of.partition("/")[0]
        self.figure(strip.draw(rungs, best, impl, folder, self.slug), measured=rows)

    def profile(self, *impls: str, workload: str, direction: str = "forward") -> None:
        """Show the counters of the launches of `impls` on a workload, behind a button."""
        all_rows = self.recorded("profiles", profiles.CHAPTER)
        call = (all_rows["workload"] == workload) & (all_rows["direction"] == direction)
        rows = all_rows[call & all_rows["impl"].isin(impls)]
        records_of = self.holders("profiles", profiles.CHAPTER)
        parts = (
            f"<details><summary>Profile: {direction} on {workload}</summary>",
            page.show_table(profiles.beside(rows)).data,
            self._origin(rows, {"profiled": records_of}).data,
            "</details>",
        )
        display(Markdown("\n\n".join(parts)))

    def _origin(self, data: pd.DataFrame | None, origin: dict[str, Any]) -> Markdown:
        if not origin or not set(origin) <= set(page.KINDS):
            raise TypeError(f"origin must be among {', '.join(page.KINDS)}, got {list(origin)}")
        if data is None and isinstance(origin.get("measured"), pd.DataFrame):
            data = origin["measured"]
        csv = None
        if data is not None:
            self._tables += 1
            csv = f"{self.slug.replace('/', '-')}-{self._tables}"
            page.save_csv(data, csv)
        lines = []
        for kind, values in origin.items():
            of = None if lines else csv
            if kind in page.RECORDED and not isinstance(values, str):
                lines.append(page.provenance(values, of, kind, data_dir=self.data_dir))
            else:
                lines.append(page.source(kind, values, of))
        return Markdown("\n".join(line.data for line in lines))

    def code(
        self, source: Any, begin: str = "", end: str = "", *, language: str = "python"
    ) -> None:
        """Show a function of a kernel, or text, from the line with `begin` to before that with
        `end`. ValueError if they are not in it."""
        text = page_blocks.source_of(source)
        lines = text.splitlines()
        first = _line_of(begin, lines, 0)
        last = _line_of(end, lines, first + 1) if end else len(lines)
        shown = textwrap.dedent("\n".join(lines[first:last])).rstrip().replace("  # fmt: skip", "")
        display(Markdown(f"```{language}\n{shown}\n```"))

    def annotated(self, source: Any, notes: Mapping[str, str], folded: str = "") -> None:
        """Show functions of a kernel, or text, in full, each of `notes` beside the one line that
        has its key; behind a button that says `folded`, if given. ValueError if no line has a
        key, or several."""
        display(Markdown(page_blocks.annotated(source, notes, folded)))

    def roles(self, impl: str, operator: str = "gdpa") -> None:
        """Show the tables of roles and barriers in the docstring of a rung."""
        text = ast.get_docstring(ast.parse(ladder.rung(impl, operator).lesson.read_text())) or ""
        display(Markdown("\n".join(re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE))))

    def changes(self, impl: str, operator: str = "gdpa") -> None:
        """Show what a rung changes in the functions of its predecessor's kernel: at most
        `MOST_CHANGED` lines, function by function; the whole difference is a download."""
        rung = ladder.rung(impl, operator)
        predecessor = ladder.rung(rung.predecessor, operator).lesson
        lines: list[str] = []
        left_out: list[str] = []
        old = {node.name: lines for node, lines in lessons.jit_functions(predecessor)}
        for node, source in lessons.jit_functions(rung.lesson):
            name = node.name
            change = list(difflib.unified_diff(old.get(name, []), source, n=1, lineterm=""))[2:]
            change = [f"@@ {name} @@" if line.startswith("@@") else line for line in change]
            if change and len(lines) + len(change) <= MOST_CHANGED:
                lines += change
            elif change:
                left_out.append(f"<code>{name}</code>")
        CHANGES_DIR.mkdir(parents=True, exist_ok=True)
        file = f"{operator}-{impl}.diff"
        (CHANGES_DIR / file).write_text(lessons.file_diff(rung), encoding="utf-8")
        rest = f", {', '.join(left_out)} among it" if left_out else ""
        link = f'<a href="../../changes/{file}">The whole difference of the two files</a>'
        if lines:
            self.code("\n".join(lines), language="diff")
        display(Markdown(f'<p class="provenance">{link}{rest}.</p>'))

    # Numbers and sentences.

    def glue(self, **values: float | str) -> None:
        """Pass numbers and words to the text: {glue:text}`name:.1f`."""
        for name, value in values.items():
            page.glue(name, value)

    def glue_origin(self, name: str, rows: pd.DataFrame) -> None:
        """Pass the line under a figure of measured rows to a page at the root of the book."""
        line = page.provenance(rows, data_dir=self.data_dir).data
        page.glue_html(name, line.replace('href="../../', 'href="'))

    def predict(
        self,
        text: str,
        result: float | pd.Series,
        *,
        least: float = -math.inf,
        most: float = math.inf,
        form: str = ".2f",
        unit: str = "",
        shown: bool = True,
        registered: str | None = None,
    ) -> None:
        """Store a prediction with its limits, its result, and the verdict with its margin;
        `predictions` shows those that are `shown`.

        Its id is `registered`, or the slug and a number by the order of the calls without it. In a
        series the value that is farthest outside the limits, or nearest to one, decides. ValueError
        without a limit, since it could not fail, and naming what is missing in `result`.
        """
        if math.isinf(least) and math.isinf(most):
            raise ValueError("least or most must be given, got neither")
        of = ""
        if isinstance(result, pd.Series):
            if result.empty or not np.isfinite(result.to_numpy(float)).all():
                self._missing(text, list(result.index[~np.isfinite(result.to_numpy(float))]))
            label, count = register.decisive(result, least, most), len(result)
            result, of = result[label], f" ({_named(label)}, of {count})"
        elif not math.isfinite(result):
            self._missing(text, [result])
        name = registered or f"{self.slug}#{self._counted + 1}"
        self._counted += registered is None
        if name in {one.id for one in self._predictions}:
            raise ValueError(f"a prediction must have its own id, got {name} twice")
        one = page_blocks.Prediction(name, text, float(result), of, least, most, form, unit, shown)
        self._predictions += (one,)
        display({"text/markdown": ""}, raw=True, metadata={"prediction": one.fact()})

    def predictions(self) -> None:
        """Show the table of the predictions. ValueError unless one to three are to be shown."""
        display(Markdown(page_blocks.predicted(self.slug, self._predictions)))

    def _missing(self, text: str, where: list[Any]) -> None:
        raise ValueError(
            f"{self.slug}, prediction {len(self._predictions) + 1} ({text}): result must be "
            f"finite, got no value for {', '.join(map(_named, where)) or 'anything'}"
        )


def _named(label: Any) -> str:
    return " ".join(map(str, label)) if isinstance(label, tuple) else str(label)


def _without_host_time(rows: pd.DataFrame) -> pd.DataFrame:
    """Drop isolated times whose sustained calls the same record refused as bound by the host."""
    slow = rows[(rows["scope"] == "sustained") & rows["failure"].str.startswith("HostTooSlow")]
    slow = slow.set_index(_CALL)["failure"]
    calls = pd.MultiIndex.from_frame(rows[_CALL])
    bound = (rows["scope"] == "kernel") & calls.isin(slow.index)
    rows.loc[bound, list(results.NUMBERS)] = math.nan
    rows.loc[bound, "failure"] = slow.reindex(calls)[bound.to_numpy()].to_numpy()
    return rows


def _line_of(marker: str, lines: list[str], first: int) -> int:
    for number, line in enumerate(lines[first:], first):
        if marker in line:
            return number
    raise ValueError(f"the source must have a line with {marker!r} from line {first}, got none")
