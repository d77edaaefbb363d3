"""The built pages in a browser, from the disk: wide and narrow, light and dark, and on paper."""

import json
from pathlib import Path

import pytest

from tests.site.conftest import ASSETS, PHONE, WIDE

LOOK = Path(__file__).with_name("look.js").read_text(encoding="utf-8")
SHEET = {"width": 700, "height": 990}
"""What is left of a sheet of A4 between its margins."""
WALK = {
    "wide-light": (WIDE, "light", ("page", "tables", "code", "contrasts", "texts")),
    "wide-dark": (WIDE, "dark", ("page", "contrasts")),
    "phone": (PHONE, "light", ("page", "exhibits", "contrasts", "texts", "broken")),
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


SOUGHT = {
    "install": "reproduce.html", "how to use": "reproduce.html", "license": "index.html",
    "B200": "tensor_memory.html", "H200": "protocol.html",
}  # fmt: skip


@pytest.mark.parametrize("words", SOUGHT)
def test_the_search_finds_the_page_that_is_meant(site, tab, words):
    tab.goto(f"{(site / 'search.html').as_uri()}?q={words}")
    tab.get_by_text("Search finished").wait_for()
    pages = tab.locator("#search-results li > a").evaluate_all("all => all.map(a => a.href)")
    tab.errors.clear()  # from the disk the excerpts of pages cannot be fetched
    assert SOUGHT[words] in pages[0].partition("#")[0], pages[:5]
    are_notes = ["/notes/" in page for page in pages]
    assert are_notes == sorted(are_notes), "lab notes come last"


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
