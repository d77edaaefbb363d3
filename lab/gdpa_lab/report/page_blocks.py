"""Blocks of a page made of text and marks: the table of predictions, an annotated kernel."""

from __future__ import annotations

import html
import inspect
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gdpa_lab.report import registered

MOST_SHOWN = 3
"""Maximum number of predictions on a page."""
_WIDTH, _HEIGHT, _EDGE = 180, 22, 10
"""Size of the picture of an interval and its margins on both sides, px."""


@dataclass(frozen=True)
class Prediction:
    """A prediction of a chapter with its result; `of` says which value it is, and of how many."""

    id: str
    text: str
    result: float
    of: str
    least: float
    most: float
    form: str
    unit: str
    shown: bool

    @property
    def limits(self) -> str:
        if math.isinf(self.most):
            return f"at least {self.least:{self.form}}{self.unit}"
        high = f"{self.most:{self.form}}{self.unit}"
        return (
            f"at most {high}" if math.isinf(self.least) else f"{self.least:{self.form}} to {high}"
        )

    @property
    def value(self) -> str:
        return f"{self.result:{self.form}}{self.unit}"

    @property
    def verdict(self) -> registered.Verdict:
        return registered.verdict(self.result, self.least, self.most)

    def fact(self) -> dict[str, Any]:
        """Metadata that `registered.collected` reads from the executed chapter."""
        return {"id": self.id, "text": self.text, "limits": self.limits,
                "found": f"{self.value}{self.of}", **self.verdict._asdict(), "value": self.result,
                **{name: float(x) if math.isfinite(x) else None
                   for name, x in (("least", self.least), ("most", self.most))}}  # fmt: skip

    def interval(self) -> str:
        """Draw the limits as a bar and the result as a dot, or a diamond outside; each on its own
        scale, with an arrow where there is no limit."""
        ends = [x for x in (self.least, self.most) if math.isfinite(x)]
        low, high = min(*ends, self.result), max(*ends, self.result)
        pad = 0.25 * (high - low) or 0.25 * abs(high) or 1.0
        low, high = low - pad, high + pad

        def x(value: float) -> float:
            inner = (value - low) / (high - low) * (_WIDTH - 2 * _EDGE)
            return round(min(max(_EDGE + inner, _EDGE), _WIDTH - _EDGE), 1)

        left, right, centre, y = x(self.least), x(self.most), x(self.result), _HEIGHT / 2
        arrows = [f'<path class="interval" d="M{end:g} {y - 8:g}L{end + 8 * sign:g} {y:g}'
                  f'L{end:g} {y + 8:g}z"/>'
                  for end, sign, open_ in ((left, -1, math.isinf(self.least)),
                                          (right, 1, math.isinf(self.most))) if open_]  # fmt: skip
        dot = f'<circle class="confirmed" cx="{centre:g}" cy="{y:g}" r="5"/>'
        if self.verdict.word == "refuted":
            dot = f'<path class="refuted" d="M{centre:g} {y - 7:g}l7 7l-7 7l-7 -7z"/>'
        label = html.escape(f"Interval {self.limits}; found {self.value}, {self.verdict.word}")
        return (
            f'<svg class="limits" role="img" aria-label="{label}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
            f'width="{_WIDTH}" height="{_HEIGHT}"><path class="scale" d="M0 {y:g}H{_WIDTH}"/>'
            f'<rect class="interval" x="{left:g}" y="{y - 4:g}" width="{right - left:g}" '
            f'height="8"/>{"".join(arrows)}{dot}</svg>'
        )


def predicted(slug: str, predictions: Sequence[Prediction]) -> str:
    """Format a chapter's `shown` predictions as a MyST table. ValueError unless one to three."""
    shown = [one for one in predictions if one.shown]
    if not 1 <= len(shown) <= MOST_SHOWN:
        raise ValueError(
            f"{slug} must show one to {MOST_SHOWN} predictions (shown=False for the others), "
            f"got {len(shown)}"
        )
    rows = []
    for one in shown:
        line, says = registered.line(one.id, one.limits), one.verdict
        cell = f"{one.text}<br><small>{registered.message(line)}</small>"
        if says.word == "refuted" and line is not None and line["lesson"]:
            cell += f"<br><small>**What the model left out:** {line['lesson']}</small>"
        sign = "✓" if says.word == "confirmed" else "✗"
        verdict = str(says).replace("**", f'<b class="{says.word}">{sign}&nbsp;', 1)
        verdict = verdict.replace("**", "</b>")
        result = f"{one.limits}<br>found **{one.value}**{one.of}"
        rows.append([cell, f"{one.interval()}<br>{result}", verdict])
    caption = f"**Confirmed: {_confirmed(shown)} of {len(shown)} predictions.** Bar: the interval, "
    caption += "on its own scale; dot: found in it; diamond: outside."
    if others := [one for one in predictions if not one.shown]:
        link = f"{{doc}}`What we got wrong <{'../' * slug.count('/')}measuring/got_wrong>`"
        count = f"{_confirmed(others)} of {len(others)} confirmed"
        caption += f" Others: {count} ({link})."
    head = [["What we predicted", "Interval and found", "Verdict"], [":--"] * 3]
    return "\n".join([
        f"::::{{table}} {caption}", ":class: exhibit predictions",
        f":name: predictions-{slug.replace('/', '-')}", "",
        *(f"| {' | '.join(map(_in_a_cell, row))} |" for row in head + rows),
        "::::",
    ])  # fmt: skip


def _in_a_cell(text: str) -> str:
    """Escape text for a cell of a table: one line, no end of the cell."""
    return " ".join(text.split()).replace("|", r"\|")


def _confirmed(predictions: Sequence[Prediction]) -> int:
    return sum(one.verdict.word == "confirmed" for one in predictions)


def source_of(source: Any) -> str:
    """Return the source of a function, of a list of them, or the text itself."""
    if isinstance(source, (list, tuple)):
        return "\n\n".join(source_of(one).rstrip() + "\n" for one in source)
    text = source if isinstance(source, str) else inspect.getsource(getattr(source, "fn", source))
    return textwrap.dedent(text).replace("  # fmt: skip", "")


def annotated(source: Any, notes: Mapping[str, str], folded: str = "") -> str:
    """Format code with notes beside its lines, as MyST: each piece of code is followed by the notes
    of its last line. `notes`: by words of exactly one line; ValueError otherwise. `folded`: label
    of the button that opens the code, empty if it is shown."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    text = source_of(source)
    notes_by_line: dict[int, list[str]] = {}
    for words, note in notes.items():
        matches = [n for n, line in enumerate(text.splitlines()) if words in line]
        if len(matches) != 1:
            raise ValueError(f"one line of the source must have {words!r}, got {len(matches)}")
        notes_by_line.setdefault(matches[0], []).append(note)
    lines = highlight(text, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)).splitlines()
    lines = [line or "<span></span>" for line in lines]  # a blank one would end the block of HTML
    pieces, first, count = ['<div class="annotated highlight">'], 0, 0
    for last in sorted({*notes_by_line, len(lines) - 1}):
        noted = list(enumerate(notes_by_line.get(last, ()), count + 1))
        marks = "".join(f' <b class="mark">{n}</b>' for n, _ in noted)
        code = "\n".join(lines[first : last + 1])
        pieces.append(f"<pre>{code}{marks}</pre>")
        for n, note in noted:
            pieces.append(
                f'<div class="beside" role="note">\n\n<b class="mark">{n}</b> {note}\n\n</div>'
            )
        first, count = last + 1, count + len(noted)
    shown = "\n".join([*pieces, "</div>"])
    if not folded:
        return shown
    summary = f"<summary>{html.escape(folded)}</summary>"
    return f'<details class="stepper">{summary}\n\n{shown}\n\n</details>'
