"""How long the book is: lines of each chapter's source, hidden ones, words of each built page.

    python notebooks/lengths.py

Hidden: lines of code that a page does not show at once; blank lines, captions and the cell of
parameters aside. Words: of the article of a built page, code included, the lines under figures that
tell where their numbers come from aside.
"""

from __future__ import annotations

import re
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

from bs4 import BeautifulSoup

ROOT = Path(__file__).resolve().parents[1]
BUILT = ROOT / "book" / "_build" / "html"
NOTES = "notes"
MOST = {"hidden": 60, "words": 3500}
MEDIANS = {"words": 2500}
BOOK = 110_000
LATER = (
    "blackwell",
    "measuring/power_wall",
    "measuring/other_shapes",
    "measuring/production_gap",
    "measuring/got_wrong",
    "training/step",
    "training/ranks",
    "tools/found_bugs",
)
"""Chapters that came after the book's limit was set, and come on top of it."""
_HIDDEN = re.compile(r"remove-cell|remove-input|hide-input|hide-cell")


class Length(NamedTuple):
    """Of a chapter: lines of its source, hidden lines, words of its page (None: not built)."""

    slug: str
    lines: int
    hidden: int
    words: int | None


def hidden_lines(source: str) -> int:
    """Lines of code in cells of `source` (py:percent) whose input a page hides."""
    cells = re.split(r"^# %%", source, flags=re.M)[1:]
    kept = [cell.partition("\n") for cell in cells]
    return sum(
        bool(line.strip()) and not line.startswith("# |")
        for head, _, body in kept
        if "[markdown]" not in head and _HIDDEN.search(head)
        for line in body.splitlines()
    )


def words(page: Path) -> int:
    """Words of the article of a built page, code included, origins aside; 0 without one."""
    soup = BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")
    article = soup.select_one("article") or soup.new_tag("article")
    for part in article.select("svg, script, style, .headerlink, .provenance"):
        part.decompose()
    return len(article.get_text(" ").split())


def lengths() -> list[Length]:
    """Of every chapter, by name."""
    found = []
    for path in sorted((ROOT / "notebooks").glob("[!_]*/*.py")):
        slug = path.relative_to(ROOT / "notebooks").with_suffix("").as_posix()
        source, page = path.read_text(encoding="utf-8"), BUILT / "executed" / f"{slug}.html"
        count = words(page) if page.exists() else None
        found.append(Length(slug, len(source.splitlines()), hidden_lines(source), count))
    return found


def problems(found: list[Length]) -> list[str]:
    """What is longer than it may be."""
    read = [x for x in found if not x.slug.startswith(NOTES)]
    over = [
        f"{x.slug}: {getattr(x, what)} {what}, at most {most}"
        for x in read
        for what, most in MOST.items()
        if (getattr(x, what) or 0) > most
    ]
    for what, most in MEDIANS.items():
        middle = statistics.median(getattr(x, what) or 0 for x in read)
        over += [f"median of {what}: {middle:.0f}, at most {most}"] if middle > most else []
    total = sum(words(page) for page in BUILT.rglob("*.html") if _is_read(page))
    return over + ([f"the book: {total:,} words, at most {BOOK:,}"] if total > BOOK else [])


def _is_read(page: Path) -> bool:
    parts = page.relative_to(BUILT).parts
    slug = page.relative_to(BUILT).with_suffix("").as_posix().removeprefix("executed/")
    others = NOTES in parts or parts[0] in ("_static", "search.html", "genindex.html")
    return not others and not slug.startswith(LATER)


def main() -> int:
    found = lengths()
    for x in found:
        print(f"{x.slug:40} {x.lines:5} lines {x.hidden:5} hidden {x.words or 0:6} words")
    over = problems(found)
    print("\n".join(over) or "within all limits")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
