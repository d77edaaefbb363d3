"""Print how long the reading path is: words, minutes, code before results, predictions by page.

    python notebooks/lengths.py

Words: of the article of a built page as it is shown, code included. Those of collapsed cells and of
hidden answers to exercises are counted apart; lines under figures that tell where numbers come
from, pictures and lists to look things up in (`LISTS`) not at all. Minutes: those that a page
states at its head. Pages of the parts in `APPENDICES` are not read through.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

import yaml
from bs4 import BeautifulSoup, Tag

ROOT = Path(__file__).resolve().parents[1]
BUILT = ROOT / "book" / "_build" / "html"
PAGE, BOOK = 4000, 80_000
"""Words shown at most, on one page and on all."""
PREDICTIONS = 3
APPENDICES = {
    "Reference": "claims, shapes, bugs, functions, terms and sources are looked up",
    "Lab notes": "what chapters left out is kept for who works on the kernels",
}
LISTS = ".tag_ledger, .tag_list"
"""Cells with every published claim, or every prediction: a reader looks one up."""
UNREAD = f"svg, script, style, .headerlink, .provenance, {LISTS}"
COLLAPSED = ".cell details, details.stepper, .solution.dropdown"
PRINTED = {"stream", "text_plain", "text_html"}
"""Classes of what a cell printed, which is no code."""


class Length(NamedTuple):
    """Length of a page: words shown and collapsed, minutes stated (0: none), lines of code shown
    above the first figure (None: it has no figure), predictions shown."""

    name: str
    words: int
    minutes: int
    collapsed: int
    above: int | None
    predictions: int

    @property
    def is_chapter(self) -> bool:
        return self.name.startswith("executed/")


def words(article: Tag) -> int:
    return len(article.get_text(" ").split())


def code_above(article: Tag) -> int | None:
    """Lines of code, blank ones aside, that stand above the first figure; None without a figure."""
    figure = article.find("figure")
    if figure is None:
        return None
    shown = [pre for pre in figure.find_all_previous("pre") if not pre.find_parent(_is_printed)]
    return sum(bool(line.strip()) for pre in shown for line in pre.get_text().splitlines())


def _is_printed(tag: Tag) -> bool:
    return bool(PRINTED & set(tag.get("class", ())))


def length(name: str, page: Path) -> Length:
    """Measure the built `page`. ValueError if it has no article."""
    article = BeautifulSoup(page.read_text(encoding="utf-8"), "lxml").select_one("article")
    if article is None:
        raise ValueError(f"{page} must have an article, got none")
    predictions = len(article.select(".predictions tbody tr"))
    stated = re.search(r"In this chapter \((\d+) minutes", article.get_text(" "))
    for part in article.select(UNREAD):
        part.decompose()
    every = words(article)
    for part in article.select(COLLAPSED):
        part.decompose()
    shown = words(article)
    minutes = int(stated[1]) if stated else 0
    return Length(name, shown, minutes, every - shown, code_above(article), predictions)


def reading_path() -> list[str]:
    """Pages in the order of _toc.yml, appendices left out. ValueError if one of those is gone."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    if gone := set(APPENDICES) - {part["caption"] for part in toc["parts"]}:
        raise ValueError(f"_toc.yml must have the parts in APPENDICES, got no {', '.join(gone)}")
    read = [part for part in toc["parts"] if part["caption"] not in APPENDICES]
    return [toc["root"], *(chapter["file"] for part in read for chapter in part["chapters"])]


def problems(pages: list[Length]) -> list[str]:
    """List what is longer than it may be, or comes too late."""
    over = []
    for x in pages:
        if x.words > PAGE:
            over.append(f"{x.name}: {x.words:,} words, at most {PAGE:,}")
        if x.predictions > PREDICTIONS:
            over.append(f"{x.name}: {x.predictions} predictions, at most {PREDICTIONS}")
        if x.is_chapter and x.above is None:
            over.append(f"{x.name}: no figure")
        elif x.is_chapter and x.above:
            over.append(
                f"{x.name}: {x.above} lines of code above the first figure, none is allowed"
            )
    total = sum(x.words for x in pages)
    return over + ([f"the book: {total:,} words, at most {BOOK:,}"] if total > BOOK else [])


def main() -> int:
    pages = [length(name, BUILT / f"{name}.html") for name in reading_path()]
    heads = f"{'words':>6} {'minutes':>7} {'collapsed':>9} {'code above':>10} {'predictions':>11}"
    print(f"{'':44} {heads}")
    for x in pages:
        above = "no figure" if x.above is None else x.above
        rest = f"{x.collapsed:9,} {above:>10} {x.predictions:11}"
        print(f"{x.name:44} {x.words:6,} {x.minutes:7,} {rest}")
    words, minutes, collapsed = (sum(x[i] for x in pages) for i in (1, 2, 3))
    print(f"{'the reading path':44} {words:6,} {minutes:7,} {collapsed:9,}")
    for part, why in APPENDICES.items():
        print(f"not of it: {part}, since {why}")
    over = problems(pages)
    print("\n".join(over) or "within all limits")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
