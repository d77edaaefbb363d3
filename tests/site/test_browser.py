"""The built pages in a browser, from the disk: wide and narrow, light and dark, and on paper."""

import json
from pathlib import Path

import pytest

from tests.site.conftest import ASSETS, PHONE, WIDE

LOOK = Path(__file__).with_name("look.js").read_text(encoding="utf-8")
HEAD = """() => {
  const text = (e) => e?.innerText.replace(/^[\\d.]+\\.\\s+/, "").replace("#", "").trim();
  const heading = document.querySelector("article h1"), style = getComputedStyle(heading);
  const figure = document.querySelector("article figure");
  const bars = [...document.querySelectorAll("article details.above-input")];
  return {
    lines: Math.round(heading.getBoundingClientRect().height / parseFloat(style.lineHeight)),
    heading: text(heading),
    tab: document.title.split(" \u2014 ")[0].replace(/^[\\d.]+\\.\\s+/, ""),
    sidebar: text(document.querySelector(".bd-sidebar-primary li.current.active > a")),
    bottom: figure && figure.getBoundingClientRect().bottom + scrollY,
    bars: figure && bars.some((e) => e.compareDocumentPosition(figure) & 4),
  };
}"""
WHOLE_FIRST_FIGURES = 45
"""At least so many chapters show their first figure, with its caption, on the first screen."""
SHEET = {"width": 700, "height": 990}
"""What is left of a sheet of A4 between its margins."""
PHONES = ("page", "exhibits", "contrasts", "texts", "broken", "formulas", "unshaded", "cards")
WALK = {
    "wide-light": (WIDE, "light", ("page", "tables", "code", "contrasts", "texts")),
    "wide-dark": (WIDE, "dark", ("page", "contrasts")),
    "phone": (PHONE, "light", PHONES),
}


def open_page(tab, path: Path) -> None:
    tab.goto(path.as_uri(), wait_until="load")


def test_page_can_be_read(site, page_name, tab, request):
    open_page(tab, site / page_name)
    tab.add_style_tag(content="* { transition: none !important; }")  # colours as they end up
    folder = request.config.getoption("--screenshots")
    found = []
    for walk, (size, scheme, asked) in WALK.items():
        tab.set_viewport_size(size)
        tab.emulate_media(color_scheme=scheme)
        tab.wait_for_function(f"document.documentElement.dataset.theme === '{scheme}'")
        wrong = tab.evaluate(LOOK)
        found += [f"{walk}, {what}: {item}" for what in asked for item in wrong[what]]
        if folder:
            name = f"{page_name.removesuffix('.html').replace('/', '-')}-{walk}.png"
            tab.screenshot(path=Path(folder) / name, full_page=True)
    tab.set_viewport_size(SHEET)
    tab.emulate_media(media="print")
    found += [f"paper, code: {item}" for item in tab.evaluate(LOOK)["code"]]
    assert not found, "\n".join(found)

    broken = "[...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)"
    assert tab.evaluate(broken) == []
    plain = "[...document.querySelectorAll('article .math')]"
    plain += ".filter(m => !m.querySelector('svg.formula')).map(m => m.textContent)"
    assert tab.evaluate(plain) == [], "formulas are not typeset"
    assert [url for url in tab.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_titles_are_short_and_first_figures_on_the_first_screen(site, toc, tab):
    """At 1280 x 900. A page is called the same in its heading, its tab and the sidebar."""
    whole, wrong = [], []
    for name in toc:
        open_page(tab, site / name)
        seen = tab.evaluate(HEAD)
        sidebar = seen["heading"] if name == "index.html" else seen["sidebar"]
        sidebar = "Lab notes: " * name.startswith("notes/") + sidebar
        if seen["lines"] > 2 or seen["heading"] != sidebar or seen["tab"] != sidebar:
            wrong.append((name, seen))
        if seen["bars"]:
            wrong.append((name, "code stands above the first figure"))
        if name.startswith("executed/") and seen["bottom"] and seen["bottom"] <= WIDE["height"]:
            whole.append(name)
    assert not wrong
    assert len(whole) >= WHOLE_FIRST_FIGURES, f"{len(whole)}: {whole}"


def test_steppers_show_timeline_and_source_on_one_screen_as_wide_as_the_text(site, tab):
    tab.set_viewport_size({"width": 736, "height": WIDE["height"]})
    paths = sorted((site / "figures").glob("*.html"))
    assert len(paths) >= 8
    for path in paths:
        open_page(tab, path)
        tab.evaluate("document.documentElement.classList.add('framed')")
        for button in tab.locator("#variants button").all():
            button.click()
            box = tab.locator("#source").bounding_box()
            assert box["y"] + box["height"] <= WIDE["height"], (path.name, button.inner_text())
            cut = tab.locator("#source code").evaluate_all(
                "all => all.filter(e => e.scrollWidth > e.clientWidth).map(e => e.textContent)"
            )
            assert cut == [], path.name


def test_menu_opens_on_a_phone_and_its_parts_unfold(site, tab):
    tab.set_viewport_size(PHONE)
    open_page(tab, site / "index.html")
    part = tab.locator(".sidebar-primary-item .toctree-l0").last
    chapter = part.locator("a.reference.internal").first
    buttons = [button for button in tab.locator(".primary-toggle").all() if button.is_visible()]
    assert len(buttons) == 1
    assert not part.is_visible()
    buttons[0].click()
    part.wait_for(state="visible")
    assert not chapter.is_visible(), "parts are folded"
    part.locator("summary").click()
    chapter.wait_for(state="visible")


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_one_search_field(site, tab, size):
    tab.set_viewport_size(size)
    open_page(tab, site / "index.html")
    fields = tab.locator("input[type=search], .search-button-field, .search-button__button")
    assert sum(field.is_visible() for field in fields.all()) == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_origins_and_warnings_can_be_read(site, tab, tmp_path, scheme):
    """With the styles of the theme and ours; no page of the book need have a stale figure."""
    theme = site / "_static" / "styles"
    styles = [theme / "theme.css", theme / "pydata-sphinx-theme.css", ASSETS / "book.css"]
    links = "".join(f'<link rel="stylesheet" href={json.dumps(x.as_uri())}>' for x in styles)
    line = '<p class="provenance">On <a href="#">a GPU</a>. <span class="stale">Old.</span></p>'
    box = '<div class="admonition warning"><p class="admonition-title">Note</p><p>Text.</p></div>'
    page = tmp_path / "page.html"
    begin = f'<html data-theme="{scheme}"><head>{links}</head><body><article class="bd-article">'
    page.write_text(f"{begin}{line}{box}</article></body></html>")
    tab.goto(page.as_uri(), wait_until="load")
    assert tab.evaluate(LOOK)["contrasts"] == []


def test_a_faint_text_a_wide_block_and_texts_on_one_another_are_found(tab, tmp_path):
    """The look itself: what it must find, and what it must leave alone."""
    page = tmp_path / "page.html"
    page.write_text(
        "<article style='width: 300px; background: #fff'><p style='color: #888'>faint</p>"
        "<p>dark</p><p style='color: #888; font-size: 24px'>large</p>"
        f"<pre style='overflow: auto'>{'x' * 99}</pre><pre>short</pre>"
        f"<div style='overflow: auto'><table><tr><td>{'y' * 99}</td></tr></table></div>"
        "<table><tr><td><code><span class=pre style='overflow-wrap: anywhere; display: inline'>"
        "a_name</span></code></td></tr></table><style>table:last-of-type td { max-width: 2em }"
        "</style>"
        "<svg width=200 height=60><rect width=100 height=60 fill='#007a63'/>"
        "<text x=20 y=30 fill='#fff'>on green</text><text x=120 y=30 fill='#fff'>on white</text>"
        "<text x=0 y=50 fill='#fff'>below</text><text x=9 y=52 fill='#fff'>under</text>"
        "<text x=170 y=12>cut off</text></svg>"
        "<details><summary>more</summary><p style='color: #eee'>folded</p></details>"
        "</article>"
    )
    tab.goto(page.as_uri())
    found = tab.evaluate(LOOK)
    assert [text.split(":")[0] for text in found["contrasts"]] == ["<p> faint", "<text> on white"]
    assert [len(found["code"]), len(found["tables"])] == [1, 1]
    assert found["broken"] == ["<span> a_name"]
    assert found["texts"] == ["<text> cut off is cut", "<text> below on <text> under"]


def test_small_formulas_unshaded_blocks_and_names_without_a_value_are_found(tab, tmp_path):
    page = tmp_path / "page.html"
    formula = "<div class=math style='{}'><svg class=formula style='width: 30em; {}'></svg></div>"
    style = "td { display: block } td:not(:first-child)::before { content: attr(data-column) }"
    cards = "<table class=cards><tr><td>a<td data-column=b>1<td data-column=c>{}</table>"
    page.write_text(
        f"<style>{style}</style><article style='width: 300px'>{formula.format('', '')}"
        f"{formula.format('overflow: auto; background-attachment: local', '')}"
        f"{formula.format('', 'max-width: 100%')}"
        f"<div class=highlight><pre style='overflow: auto'>{'x' * 99}</pre><pre>short</pre></div>"
        f"{cards.format('2')}{cards.format('')}</article>"
    )
    tab.goto(page.as_uri())
    found = tab.evaluate(LOOK)
    assert len(found["formulas"]) == 2, "one is cut, one is small; one scrolls"
    assert len(found["unshaded"]) == 2, "the one that is cut, and code"
    assert found["cards"] == ["<td> "]


def test_a_card_shows_its_answer_second_and_big(site, tab):
    tab.set_viewport_size(PHONE)
    open_page(tab, site / "executed" / "forward" / "results.html")
    row = tab.locator("table.cards tbody tr").first
    cells = row.locator("td").evaluate_all(
        "all => all.map(e => [e.dataset.column, e.getBoundingClientRect().top,"
        " parseFloat(getComputedStyle(e).fontSize)])"
    )
    (_, first, size), *others, (answer, second, big) = cells
    assert answer == "times as fast" and big >= 1.25 * size
    assert first < second < min(top for _, top, _ in others)
