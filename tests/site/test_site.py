"""The built pages: complete, self-contained, described, and every figure with its origin."""

import re
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup, Tag

from gdpa_lab.measuring import files, record
from gdpa_lab.measuring.record import ROOT
from gdpa_lab.report import page

GENERATED = {"genindex.html", "search.html"}
ORIGIN = "figure, .provenance"
LOADED = {
    "link": "href", "object": "data",
    **dict.fromkeys(("script", "img", "source", "iframe", "embed", "video", "audio"), "src"),
}  # fmt: skip
FETCHED_RELATIONS = {"stylesheet", "preload", "modulepreload", "icon", "shortcut", "manifest"}
POINTS = re.compile(r"(?<![\d.,\u2212-])(\d[\d,]*(?:\.\d+)?) to \1(?![\d]|[.,]\d)")
HEAVIEST = 1_500_000
"""Bytes of a page with all that a browser fetches for it."""
UNRENDERED = re.compile(r"\{(glue|numref|eq|ref|cite|doc)\b[^}]*\}|\[\[|undefined reference")


@cache
def soup(path: Path) -> BeautifulSoup:
    return BeautifulSoup(path.read_text(encoding="utf-8"), "lxml")


def article(path: Path) -> Tag:
    found = soup(path).select_one("article")
    assert found is not None, f"{path.name} has no article"
    return found


def target(source: Path, url: str) -> Path:
    """The file that a relative `url` on page `source` means."""
    path = unquote(urlsplit(url).path)
    return (source.parent / path).resolve() if path else source


def loaded(path: Path) -> list[str]:
    """What a browser fetches to render the page."""
    urls = []
    for name, attribute in LOADED.items():
        for tag in soup(path).find_all(name):
            if name == "link" and not FETCHED_RELATIONS & set(tag.get("rel", [])):
                continue
            if tag.get(attribute):
                urls.append(tag[attribute])
    return urls


def test_every_chapter_is_a_page_and_every_page_a_chapter(site, toc):
    built = {str(path.relative_to(site)) for path in site.rglob("*.html")}
    static = {name for name in built if name.startswith(("_static/", "figures/"))}
    assert built - static - GENERATED == set(toc)


def test_nothing_is_loaded_from_another_site(site, page_name):
    urls = loaded(site / page_name)
    assert [
        url for url in urls if urlsplit(url).scheme not in ("", "data") or url[:2] == "//"
    ] == []
    missing = [
        u for u in urls if not urlsplit(u).scheme and not target(site / page_name, u).exists()
    ]
    assert missing == []


def test_no_stylesheet_loads_from_another_site(site):
    remote = re.compile(r"""(?:url\(|@import)\s*["']?(?:https?:)?//""")
    sheets = list(site.rglob("*.css"))
    assert sheets
    assert [s.name for s in sheets if remote.search(s.read_text(encoding="utf-8"))] == []


def test_every_image_is_described(site, page_name):
    for image in article(site / page_name).find_all("img"):
        alt = image.get("alt", "")
        assert len(alt.split()) >= 3, f"alt text of {image['src']} must be a sentence, got {alt!r}"
        assert Path(alt).suffix not in (".svg", ".png", ".jpg"), f"alt text is a file name: {alt}"


def test_every_internal_link_resolves(site, page_name):
    source = site / page_name
    broken = []
    for link in soup(source).find_all("a", href=True):
        url = urlsplit(link["href"])
        if url.scheme or url.netloc or link["href"] == "#":
            continue
        file = target(source, link["href"])
        if not file.is_file():
            broken.append(link["href"])
        elif url.fragment and file.suffix == ".html":
            anchor = unquote(url.fragment)
            if not soup(file).find(lambda tag, a=anchor: a in (tag.get("id"), tag.get("name"))):
                broken.append(link["href"])
    assert broken == []


def test_every_figure_says_where_its_values_come_from(site, page_name):
    source = site / page_name
    marks = article(source).select(ORIGIN)
    for figure, origin in pairwise([*marks, None]):
        if figure.name != "figure":
            continue
        name = figure.get("id") or figure.get_text(" ", strip=True)[:60]
        assert origin is not None and origin.name != "figure", (
            f"figure {name} has no provenance line"
        )
        assert origin.get("data-kind") in page.KINDS, f"figure {name}: kind must be {page.KINDS}"
        if origin["data-kind"] == "measured":
            links = [target(source, a["href"]) for a in origin.find_all("a", href=True)]
            files = [link for link in links if link.parent.name == "records"]
            assert files, f"figure {name} is measured and links no record"
            for file in files:
                record.load(file)


def test_every_figure_has_a_number_and_a_caption(site, page_name):
    for figure in article(site / page_name).find_all("figure"):
        assert figure.select_one("figcaption .caption-number"), f"no number: {figure.get('id')}"
        assert figure.select_one("figcaption .caption-text"), f"no caption: {figure.get('id')}"


def test_no_role_is_left_unrendered(site, page_name):
    text = BeautifulSoup(str(article(site / page_name)), "lxml")
    for tag in text.find_all(["pre", "code"]):
        tag.decompose()
    assert UNRENDERED.findall(text.get_text()) == []


def test_no_range_ends_where_it_begins(site, page_name):
    """Such as "1.7 to 1.7 times": it needs another digit, or one number."""
    text = BeautifulSoup(str(article(site / page_name)), "lxml")
    for tag in text.find_all(["pre", "svg", "script", "style"]):
        tag.decompose()
    assert POINTS.findall(" ".join(text.get_text(" ").split())) == []


def test_no_parameters_cell_and_no_error_is_shown(site, page_name):
    hidden = ".tag_parameters, .tag_injected-parameters, .output.traceback, .output.stderr"
    assert article(site / page_name).select(hidden) == []


def test_a_link_in_a_sentence_has_at_most_five_words(site, page_name):
    links = article(site / page_name).select("p:not(.admonition-title) > a.internal")
    texts = [" ".join(a.get_text(" ").split()) for a in links]
    assert [text for text in texts if len(text.split()) > 5 + text.startswith("Lab notes:")] == []


def test_one_search_field_and_one_menu_button(site, page_name):
    assert len(soup(site / page_name).select(".primary-toggle")) == 1
    assert len(soup(site / page_name).select(".sidebar-primary-item .search-button-field")) <= 1


def test_every_page_tells_others_what_it_is(site, page_name):
    head = soup(site / page_name).head
    tags = head.find_all("meta", content=True)
    said = {tag.get("property") or tag.get("name"): tag["content"] for tag in tags}
    assert said["og:site_name"] == "Attention without softmax"
    assert 20 <= len(said["description"]) <= 202 and said["og:description"] == said["description"]
    heading = BeautifulSoup(str(article(site / page_name).h1), "lxml")
    for mark in heading.select(".section-number, .headerlink"):
        mark.decompose()
    assert said["og:title"] == heading.get_text().strip()
    assert head.title.text.count("Attention without softmax") == 1
    assert said["og:url"].endswith(f"/{page_name}")
    card = site / urlsplit(said["og:image"]).path.rpartition("/")[2]
    assert card.read_bytes().startswith(b"\x89PNG") and head.select_one("link[rel=icon]")
    assert not [s for s in soup(site / page_name).find_all("script") if "THEBE_JS" in s.text]


def test_one_link_leads_to_the_code(site, page_name):
    (button,) = soup(site / page_name).select("a.btn-source-repository-button")
    assert button["href"].startswith("https://")


def test_the_data_is_part_of_the_site(site):
    for path in record.DATA_DIR.rglob("*"):
        name = path.relative_to(record.DATA_DIR)
        if path.is_file() and name.parts[0] not in (files.COMMUNITY, files.PARTIAL):
            assert (site / "data" / name).read_bytes() == path.read_bytes(), name


def test_the_front_page_says_how_long_its_routes_are(site):
    sys.path.insert(0, str(ROOT / "notebooks"))
    import lengths

    pages = {name: lengths.length(name, site / f"{name}.html") for name in lengths.reading_path()}
    table = soup(site / "index.html").select_one("article section#two-routes table")
    weekend = [a["href"].removesuffix(".html") for a in table.select("a.reference.internal")]
    text = article(site / "index.html").get_text(" ")
    said = re.findall(r"about (\d+,000) words, ([\d.]+) hours", text)
    for (words, hours), route in zip(said, (weekend, pages), strict=True):
        route = [pages[name] for name in route]
        assert abs(int(words.replace(",", "")) - sum(page.words for page in route)) < 1000
        assert abs(float(hours) - sum(page.minutes for page in route) / 60) <= 0.25


def test_a_page_is_light(site, page_name):
    path = site / page_name
    files = {target(path, url) for url in loaded(path) if not urlsplit(url).scheme}
    weight = sum(file.stat().st_size for file in {path, *files})
    assert weight <= HEAVIEST, f"{weight:,} bytes"
