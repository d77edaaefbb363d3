"""Compares published claims with our own records.

`data/claims.yml` lists every published claim with its source. A claim may carry a selector (`ours`)
of the rows of the results table that answer it; `judged` evaluates the selectors. A claim is
`measured` only while correct rows exist, and a published number never becomes ours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from gdpa_lab.measuring import refusals
from gdpa_lab.measuring.record import DATA_DIR
from gdpa_lab.report import stand_ins

SCHEMA_VERSION = 1
_YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TIME = "time_us_p50"
PUBLISHED_HARDWARE = "NVIDIA B200"
_WHERE = ("gpu", "system", "workload", "impl", "baseline")
_RESULT_COLUMNS = (
    "figure", "workload", "direction", "impl", "scope", "variant", "system", "gpu", "record",
    "time_us_p50", "tflops", "correct", "failure", "stale",
)  # fmt: skip


class ClaimError(ValueError):
    """Raised if claims.yml does not describe claims; names the file, the claim and the field."""


@dataclass(frozen=True)
class Source:
    """Source of a claim: `bib` is a key of book/references.bib, `where` the place in it."""

    bib: str
    where: str

    def __str__(self) -> str:
        return f"{self.bib}: {self.where}"


@dataclass(frozen=True)
class Evidence:
    """Answer of the results table to a claim.

    `value` is TFLOP/s for best_rate, milliseconds for best_time and dimensionless for max_ratio,
    which alone has a `baseline`. `impl` and `baseline` name one implementation, or one for each
    direction. `records` names every record that `value` comes from; `stale` is True if one
    of its rows is.
    """

    value: float
    workload: str
    impl: str
    baseline: str
    gpu: str
    system: str
    records: tuple[str, ...]
    stale: bool


@dataclass(frozen=True)
class Selector:
    """Selector of the rows of the results table that answer a claim.

    `best_rate` is the highest tflops over the selected workloads and the impls matching `impl`,
    `best_time` the lowest time_us_p50, in milliseconds. `max_ratio` is the highest, over the
    selected workloads, of time_us_p50 of the fastest impl matching `baseline` divided by that of
    the fastest other impl matching `impl`, in one record, if possible without a stale row, that
    which compares most of them; with several of `direction`, of the sums over them. Rows are picked
    by `figure`, or by `workload` and `direction` where there is no figure. Patterns are shell
    globs. Only times of the kernels alone (variant "") count: sustained or, with `scope`
    "kernel", isolated.
    """

    kind: str
    impl: tuple[str, ...]
    scope: str
    figure: tuple[str, ...] = ()
    baseline: tuple[str, ...] = ()
    workload: tuple[str, ...] = ("*",)
    direction: tuple[str, ...] = ()

    def evaluate(self, results: pd.DataFrame) -> Evidence | None:
        """Return the evidence in `results` (columns of results.table), or None if it holds none."""
        missing = [name for name in _RESULT_COLUMNS if name not in results.columns]
        if missing:
            raise ValueError(
                f"results must have the columns of results.table, got none named {missing}"
            )
        rows = results[_usable(results) & (results["scope"] == self.scope)]
        for column in ("workload", "figure", "direction"):
            if getattr(self, column):
                rows = rows[_matches(rows[column], getattr(self, column))]
        if self.kind == "max_ratio":
            return self._max_ratio(rows)
        rows = rows.drop_duplicates(
            ["figure", "system", "workload", "direction", "impl"], keep="last"
        )
        is_rate = self.kind == "best_rate"
        rows = _positive(rows[_matches(rows["impl"], self.impl)], "tflops" if is_rate else _TIME)
        if rows.empty:
            return None
        best = rows.loc[rows["tflops"].idxmax() if is_rate else rows[_TIME].idxmin()].to_frame().T
        return _evidence(best["tflops"].item() if is_rate else best[_TIME].item() / 1e3, best)

    def _max_ratio(self, rows: pd.DataFrame) -> Evidence | None:
        is_baseline = _matches(rows["impl"], self.baseline)
        rows = rows[is_baseline | _matches(rows["impl"], self.impl)]
        rows = _positive(rows.assign(is_baseline=is_baseline), _TIME)
        answers = []
        for _, group in rows.groupby(["system", "workload"]):
            compared = []
            for record, run in group.groupby("record"):
                fastest = run.loc[run.groupby(["direction", "is_baseline"])[_TIME].idxmin()]
                fastest = fastest.set_index("direction")
                slow, fast = (fastest[fastest["is_baseline"] == which] for which in (True, False))
                directions = [*(self.direction or sorted({*run["direction"]}))]
                if {*directions} <= {*slow.index} & {*fast.index}:
                    slow, fast = slow.loc[directions], fast.loc[directions]
                    evidence = _evidence(slow[_TIME].sum() / fast[_TIME].sum(), fast, slow)
                    compared.append((not evidence.stale, len(run), record, evidence))
            if compared:
                answers.append(max(compared, key=lambda each: each[:-1])[-1])
        return max(answers, key=lambda evidence: evidence.value, default=None)


@dataclass(frozen=True)
class Claim:
    """A published statement, in our words.

    `value` (in `unit`) is the published number and belongs to `hardware`; None for a statement
    without one. `tolerance` is the relative difference a rerun on that hardware may show.
    `figure` is our figure id, `ours` the rows that answer the claim. `data` says how `value`
    follows from a CSV of data/published: rows equal to `where` are reduced over `column`, with
    `over` each first divided by the row that differs from it only by the columns named there.
    `status` is what the author of the entry decided; see `judged`. `answer` is what the chapter
    `answered_in` ("": the page of claims itself) says of a claim without a selector, with names of
    `answers.numbers` in braces.
    """

    id: str
    operator: str
    claim: str
    value: float | None
    unit: str | None
    sources: tuple[Source, ...]
    hardware: str
    kind: str
    how_to_check: str
    figure: str | None
    ours: Selector | None
    tolerance: float | None
    status: str
    note: str
    answer: str = ""
    answered_in: str = ""
    data: Mapping[str, Any] | None = None

    @property
    def chapter(self) -> str:
        """The chapter that `how_to_check` measures, "" if it names none."""
        named = re.search(r"NOTEBOOKS=([\w/]+)$", self.how_to_check)
        return named[1] if named else ""


def load(data_dir: str | Path = DATA_DIR) -> tuple[Claim, ...]:
    """Read and validate `data_dir`/claims.yml; ClaimError names the claim and the field."""
    path = Path(data_dir) / "claims.yml"
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_YAML_LOADER)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ClaimError(f"{path}: must be a readable YAML file, got {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("claims"), list):
        raise ClaimError(f"{path}: must be a mapping with a list named claims")
    version = content.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ClaimError(f"{path}: schema_version must be {SCHEMA_VERSION}, got {version!r}")
    claims: dict[str, Claim] = {}
    for position, entry in enumerate(content["claims"], start=1):
        name = entry.get("id") if isinstance(entry, dict) else None
        try:
            claim = _parse_claim(entry)
            if claim.id in claims:
                raise ClaimError(f"id must be unique, got {claim.id!r}")
        except ClaimError as error:
            raise ClaimError(f"{path}: claim {position} ({name}): {error}") from None
        claims[claim.id] = claim
    return tuple(claims.values())


def judged(
    results: pd.DataFrame,
    *,
    claims: Sequence[Claim] | None = None,
    chapters: Mapping[str, str] | None = None,
) -> pd.DataFrame:
    """Judge each claim: one row with what was published and what the records say.

    `results` is the table of results.table; a time ratio is taken within one system, and the
    system with the highest value answers. `claims` defaults to `load()`. `chapters`: the chapter
    of each record; if given, those of `Claim.chapter` alone answer a claim. Columns:
    id, operator, kind, figure, claim, published, unit, hardware (where `published` was measured);
    ours (NaN if nothing was measured), ours_gpu, ours_system, ours_workload, ours_impl,
    ours_baseline, ours_record, ours_scope, stale; ratio = ours / published; within_tolerance (None
    unless ours was measured on `hardware`); status, how_to_check, source, note, answer,
    answered_in, chapter.
    A claim is "measured" if its selector finds correct rows; a rate or a time of another GPU than
    `hardware` is "not_comparable" then. Without any it is what its author decided, "open" instead
    of "measured". ClaimError for a baseline that stands in for one that has times in `results`.
    """
    claims = load() if claims is None else claims
    for stand_in in stand_ins.outlived(results):
        for claim in claims:
            if claim.ours is not None and {*claim.ours.baseline} & {*stand_in.impls}:
                raise ClaimError(
                    f"{claim.id}: baseline must be {', '.join(stand_in.originals)}, which has "
                    f"times, got {stand_in}"
                )
    of = results["record"].map(chapters) if chapters is not None else None
    rows = [
        _judged_row(claim, results if of is None or not claim.chapter else
                    results[of == claim.chapter])
        for claim in claims
    ]  # fmt: skip
    return pd.DataFrame(rows)


def published_figures(data_dir: str | Path = DATA_DIR) -> pd.DataFrame:
    """Read the published GDPA charts, one row per bar, with their reading errors (TFLOP/s).

    Columns of gdpa_figures.csv, and: `workload` (our name for the same problem), `hardware`,
    `suspect` (the FA4 bars of the cross backward chart, which repeat the forward chart).
    Source: README of facebookresearch/ads_model_kernel_library/gdpa, read from the bars.
    """
    table = pd.read_csv(Path(data_dir) / "published" / "gdpa_figures.csv")
    table["workload"] = [
        f"gdpa-{bar.attention}-{'full' if bar.fill == 1 else 'half-dense'}-{bar.length}"
        for bar in table.itertuples()
    ]
    table["hardware"] = PUBLISHED_HARDWARE
    table["suspect"] = (table["figure"] == "gdpa-cross-bwd-full") & (
        table["kernel"] == "cutedsl_fa4"
    )
    return table


def _judged_row(claim: Claim, results: pd.DataFrame) -> dict[str, Any]:
    evidence = claim.ours.evaluate(results) if claim.ours is not None else None
    unmeasured = "open" if claim.status == "measured" else claim.status
    status = unmeasured if evidence is None else "measured"
    if evidence and claim.kind == "rate" and not _same_hardware(claim.hardware, evidence.gpu):
        status = "not_comparable"
    answer = evidence or Evidence(math.nan, "", "", "", "", "", (), False)
    published = math.nan if claim.value is None else claim.value
    ratio, within = answer.value / published, None
    if claim.tolerance is not None and _same_hardware(claim.hardware, answer.gpu):
        within = abs(ratio - 1) <= claim.tolerance
    return {
        **{name: getattr(claim, name) or "" for name in ("id", "operator", "kind", "figure")},
        "claim": claim.claim,
        "published": published,
        "unit": claim.unit or "",
        "hardware": claim.hardware,
        "ours": answer.value,
        **{f"ours_{x}": getattr(answer, x) for x in _WHERE},
        "ours_record": ", ".join(answer.records),
        "ours_scope": claim.ours.scope if evidence is not None else "",
        "stale": answer.stale,
        "ratio": ratio,
        "within_tolerance": within,
        "status": status,
        "how_to_check": claim.how_to_check,
        "source": "; ".join(map(str, claim.sources)),
        **{name: getattr(claim, name) for name in ("note", "answer", "answered_in", "chapter")},
    }


def _same_hardware(published: str, gpu: str) -> bool:
    """Return True if `gpu` is the model named in `published` before the first comma."""
    model = published.split(",")[0].strip().lower()
    return bool(model) and gpu.strip().lower().startswith(model)


def _usable(results: pd.DataFrame) -> pd.Series:
    """Select the rows with default constants that passed their check."""
    passed = results["correct"].eq(True).fillna(False).astype(bool)
    return passed & results["failure"].fillna("").eq("") & results["variant"].fillna("").eq("")


def _positive(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """Select the rows with a positive, finite number in `column`."""
    numbers = pd.to_numeric(rows[column], errors="coerce")
    return rows.assign(**{column: numbers})[(numbers > 0) & (numbers < math.inf)]


def _matches(column: pd.Series, patterns: Sequence[str]) -> pd.Series:
    """Match each value against shell globs."""
    hits = [any(fnmatchcase(str(value), pattern) for pattern in patterns) for value in column]
    return pd.Series(hits, index=column.index, dtype=bool)


def _evidence(value: float, ours: pd.DataFrame, baseline: pd.DataFrame | None = None) -> Evidence:
    """Build evidence from rows of one workload and system."""
    rows, first = pd.concat([ours, baseline]), ours.iloc[0]
    return Evidence(
        value=float(value),
        **{name: str(first[name]) for name in ("workload", "gpu", "system")},
        impl=", ".join(ours["impl"].unique()),
        baseline="" if baseline is None else ", ".join(baseline["impl"].unique()),
        records=tuple(rows["record"].unique()),
        stale=bool(rows["stale"].eq(True).any()),
    )


def _parse_claim(entry: Any) -> Claim:
    problem = refusals.unlike(Path(__file__).with_name("claim.schema.json"), entry)
    if problem is not None:
        raise ClaimError(problem)
    value, answer = entry["value"], entry.get("answer", {"text": ""})
    if value is not None and not math.isfinite(value):
        raise ClaimError(f"value: must be finite, got {value}")
    entry = {name: entry[name] for name in entry if name not in ("source", "answer")} | {
        "value": None if value is None else float(value),
        "sources": tuple(Source(**source) for source in _listed(entry["source"])),
        "ours": entry["ours"] and _selector(entry["ours"]),
        "answer": answer["text"],
        "answered_in": answer.get("in", ""),
    }
    texts = {name: (entry[name] or "").strip() for name in ("claim", "how_to_check", "note")}
    return Claim(**entry | texts)


def _selector(entry: Mapping[str, Any]) -> Selector:
    whole = ("kind", "scope")
    return Selector(**{k: v if k in whole else tuple(_listed(v)) for k, v in entry.items()})


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
