"""What the tests of the built site share: where it is, its pages (`page_name`, from _toc.yml), and
a tab of a browser.

`make book` runs them after building; `make test` does not.
"""

import re
import shutil
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "book" / "_build" / "html"
ASSETS = ROOT / "book" / "assets"
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run",
]  # fmt: skip
KNOWN_ERRORS = re.compile(
    r"file:.*fontawesome.*\.woff2"  # preloaded by the theme for Python 3.10, then loaded normally
    r"|failed: file:.*/favicon\.svg"  # when the next page is opened at once
)


def pages() -> list[str]:
    """Pages of _toc.yml, as paths inside the site."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    chapters = [chapter["file"] for part in toc["parts"] for chapter in part["chapters"]]
    return [f"{name}.html" for name in (toc["root"], *chapters)]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", metavar="DIR", help="keep a picture of every page in DIR")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "page_name" in metafunc.fixturenames:
        metafunc.parametrize("page_name", pages())


@pytest.fixture(scope="session")
def toc() -> list[str]:
    return pages()


@pytest.fixture(scope="session")
def site() -> Path:
    if not (SITE / "index.html").exists():
        pytest.fail(f"{SITE} holds no built book: run `make book`", pytrace=False)
    return SITE


@pytest.fixture(scope="session")
def browser():
    """The system's Chromium; skips without it."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("needs chromium on the PATH (apt-get install chromium)")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def shared_tab(browser):
    tab = browser.new_context(viewport=WIDE, color_scheme="light").new_page()
    tab.set_default_timeout(90_000)  # formulas of a long page on a busy machine
    tab.errors, tab.requests = [], []
    tab.on("pageerror", lambda error: tab.errors.append(error.message))
    tab.on("console", lambda m: tab.errors.append(_told(m)) if m.type == "error" else None)
    tab.on("requestfailed", lambda request: tab.errors.append(f"failed: {request.url}"))
    tab.on("request", lambda request: tab.requests.append(request.url))
    return tab


def _told(message) -> str:
    return f"{message.text} ({message.location.get('url')})"


@pytest.fixture
def tab(shared_tab):
    """The tab of all tests, wide and light: it keeps what it asked for (`requests`) and what went
    wrong (`errors`, none of which may be left at the end)."""
    shared_tab.errors.clear()
    shared_tab.requests.clear()
    shared_tab.set_viewport_size(WIDE)
    shared_tab.emulate_media(color_scheme="light", media="screen")
    yield shared_tab
    assert [error for error in shared_tab.errors if not KNOWN_ERRORS.search(error)] == []
