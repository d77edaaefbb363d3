"""The built pages in a browser, from the disk: wide and narrow, light and dark."""

import json
import re
import shutil
from itertools import product
from pathlib import Path

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run",
]  # fmt: skip
KNOWN_ERRORS = re.compile(
    "'THEBE_JS_URL' has already been declared"  # the theme writes the same line twice
    r"|file:.*fontawesome.*\.woff2"  # preloaded by the theme for Python 3.10, then loaded normally
)
SIZES = {"desktop": {"width": 1280, "height": 900}, "phone": {"width": 390, "height": 844}}
SCHEMES = ("light", "dark")

LEAST_CONTRAST = 4.5
"""Of text on its background, WCAG 2.2, level AA."""
CONTRASTS = """selector => [...document.querySelectorAll(selector)].filter(e => e.checkVisibility())
.map(element => {
  const rgba = colour => colour.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].map(x => x / 255)
    .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
    .reduce((sum, x, i) => sum + [0.2126, 0.7152, 0.0722][i] * x, 0);
  const layers = [];
  for (let behind = element; behind && layers.at(-1)?.[3] !== 1; behind = behind.parentElement) {
    const [r, g, b, alpha = 1] = rgba(getComputedStyle(behind).backgroundColor);
    layers.push([r, g, b, alpha]);
  }
  const ground = layers.reduceRight((under, [r, g, b, alpha]) =>
    [r, g, b].map((x, i) => alpha * x + (1 - alpha) * under[i]), [255, 255, 255]);
  const pair = [rgba(getComputedStyle(element).color), ground].map(luminance).sort((a, b) => b - a);
  return [element.className + ' ' + element.textContent.slice(0, 40),
          (pair[0] + 0.05) / (pair[1] + 0.05)];
})"""
READ = "p.provenance, p.provenance a, p.provenance .stale, .admonition p, .admonition-title"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not on the PATH")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture
def tab(browser):
    """A browser tab that keeps what went wrong (`errors`) and what it asked for (`requests`)."""
    context = browser.new_context(viewport=SIZES["desktop"], color_scheme="light")
    tab = context.new_page()
    tab.errors, tab.requests = [], []
    tab.on("pageerror", lambda error: tab.errors.append(error.message))
    tab.on("console", lambda m: tab.errors.append(message(m)) if m.type == "error" else None)
    tab.on("request", lambda request: tab.requests.append(request.url))
    yield tab
    context.close()


def message(console) -> str:
    return f"{console.text} ({console.location.get('url')})"


def open_page(tab, path: Path) -> None:
    tab.goto(path.as_uri(), wait_until="load")
    tab.evaluate("async () => { await window.MathJax?.startup?.promise; }")


def test_page_renders(site, page_name, tab, request):
    open_page(tab, site / page_name)
    folder = request.config.getoption("--screenshots")
    for (size, viewport), scheme in product(SIZES.items(), SCHEMES):
        tab.set_viewport_size(viewport)
        tab.emulate_media(color_scheme=scheme)
        tab.wait_for_function(f"document.documentElement.dataset.theme === '{scheme}'")
        too_wide = f"{size}: the page scrolls sideways"
        assert tab.evaluate("document.documentElement.scrollWidth") <= viewport["width"], too_wide
        assert [x for x in tab.evaluate(CONTRASTS, READ) if x[1] < LEAST_CONTRAST] == []
        if folder:
            name = f"{page_name.removesuffix('.html').replace('/', '-')}-{size}-{scheme}.png"
            tab.screenshot(path=Path(folder) / name, full_page=True)

    broken = "[...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src)"
    assert tab.evaluate(broken) == []
    plain = "[...document.querySelectorAll('article .math')]"
    plain += ".filter(m => !m.querySelector('mjx-container')).map(m => m.textContent)"
    assert tab.evaluate(plain) == [], "formulas are not typeset"
    assert tab.locator("mjx-merror, [data-mjx-error]").count() == 0
    assert [error for error in tab.errors if not KNOWN_ERRORS.search(error)] == []
    assert [url for url in tab.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_menu_opens_on_a_phone(site, tab):
    tab.set_viewport_size(SIZES["phone"])
    open_page(tab, site / "index.html")
    chapter = tab.locator(".sidebar-primary-item a.reference.internal").last
    buttons = [button for button in tab.locator(".primary-toggle").all() if button.is_visible()]
    assert len(buttons) == 1
    assert not chapter.is_visible()
    buttons[0].click()
    playwright.expect(chapter).to_be_visible()


@pytest.mark.parametrize("size", SIZES)
def test_one_search_field(site, tab, size):
    tab.set_viewport_size(SIZES[size])
    open_page(tab, site / "index.html")
    fields = tab.locator("input[type=search], .search-button-field, .search-button__button")
    assert sum(field.is_visible() for field in fields.all()) == 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_origins_and_warnings_can_be_read(tab, tmp_path, scheme):
    """With the styles of the theme and ours; no page of the book need have a stale figure."""
    import pydata_sphinx_theme

    theme = Path(pydata_sphinx_theme.__file__).parent / "theme/pydata_sphinx_theme/static/styles"
    styles = [theme / "theme.css", theme / "pydata-sphinx-theme.css"]
    styles.append(Path(__file__).resolve().parents[2] / "book" / "assets" / "book.css")
    links = "".join(f'<link rel="stylesheet" href={json.dumps(x.as_uri())}>' for x in styles)
    line = '<p class="provenance">On <a href="#">a GPU</a>. <span class="stale">Old.</span></p>'
    box = '<div class="admonition warning"><p class="admonition-title">Note</p><p>Text.</p></div>'
    page = tmp_path / "page.html"
    begin = f'<html data-theme="{scheme}"><head>{links}</head><body>'
    page.write_text(f"{begin}{line}{box}</body></html>")
    tab.goto(page.as_uri(), wait_until="load")
    found = tab.evaluate(CONTRASTS, READ)
    assert len(found) == 5
    assert [x for x in found if x[1] < LEAST_CONTRAST] == []
