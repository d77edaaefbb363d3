"""The Sphinx extension that tells what a page is found by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sphinx.application import Sphinx

EXTENSIONS = Path(__file__).parents[2] / "book" / "_ext"


@pytest.fixture
def pages(tmp_path, monkeypatch) -> Path:
    """A folder of two pages, of which the second is found by a word."""
    monkeypatch.syspath_prepend(EXTENSIONS)
    tmp_path.joinpath("index.rst").write_text("First\n=====\n\n.. toctree::\n\n   second\n")
    tmp_path.joinpath("second.rst").write_text("Second\n======\n")
    return tmp_path


def found_by(pages: Path) -> dict[str, list]:
    """The entries of the search after one more build."""
    given = {"extensions": ["page_heads"], "page_words": {"second": ["install"]}}
    Sphinx(pages, None, pages / "html", pages / "kept", "html", given, status=None).build()
    index = (pages / "html" / "searchindex.js").read_text()
    return json.loads(index.removeprefix("Search.setIndex(").removesuffix(")"))["indexentries"]


def test_a_page_is_found_by_its_words_after_another_page_changed(pages):
    first = found_by(pages)
    pages.joinpath("index.rst").write_text("Changed\n=======\n\n.. toctree::\n\n   second\n")
    assert list(first) == list(found_by(pages)) == ["install"]
