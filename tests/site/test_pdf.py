"""notebooks/pdf.py: the pages of the reading path as one, which `make pdf` prints."""

import sys
from collections import Counter

import pytest
from bs4 import BeautifulSoup

from tests.site.conftest import ROOT

sys.path.insert(0, str(ROOT / "notebooks"))


@pytest.fixture(scope="module")
def joined(site):
    import pdf

    return BeautifulSoup(pdf.joined(), "lxml")


def test_links_inside_lead_to_one_place(joined):
    ids = Counter(tag["id"] for tag in joined.find_all(id=True))
    inside = {a["href"][1:] for a in joined.select("article [href]") if a["href"].startswith("#")}
    assert inside - set(ids) == set()
    assert [name for name in inside if ids[name] > 1] == []
    assert [a["href"] for a in joined.select("article [href]") if a["href"].startswith("..")] == []


def test_pictures_and_styles_are_where_it_looks_for_them(joined, site):
    files = [tag["src"] for tag in joined.find_all(src=True) if not tag["src"].startswith("data:")]
    files += [tag["href"] for tag in joined.find_all("link", href=True)]
    missing = [file for file in files if not (site / "_static" / file.partition("?")[0]).exists()]
    assert files and missing == []
