"""The reading path as one PDF: the built pages, joined into one and printed by Chromium.

    python notebooks/pdf.py

Writes book/_build/book.pdf. Links between pages become links inside the PDF, others lead to the
site. Collapsed cells and what needs a reader's hand are left out; answers are open.
"""

from __future__ import annotations

import posixpath
import shutil
import sys
from urllib.parse import urldefrag, urljoin

import yaml
from bs4 import BeautifulSoup, Tag
from playwright.sync_api import sync_playwright

from lengths import BUILT, ROOT, reading_path

PDF = ROOT / "book" / "_build" / "book.pdf"
JOINED = BUILT / "_static" / "print.html"
LEFT_OUT = "script, button, .headerlink, .stepper, .widget, .cell details, .pst-js-only"
ARGUMENTS = ["--no-sandbox", "--disable-gpu"]
MARGINS = {"top": "18mm", "bottom": "18mm", "left": "16mm", "right": "16mm"}
FOOTER = (
    '<div style="width: 100%; font-size: 8px; text-align: center; color: #555">'
    '<span class="pageNumber"></span></div>'
)


def prefix(name: str) -> str:
    return f"{name.replace('/', '-')}--"


def article(name: str, names: list[str], site: str) -> Tag:
    """The article of a built page, its ids and links made for a place among `names`.

    `site`: the address that links to other files lead to.
    """
    soup = BeautifulSoup((BUILT / f"{name}.html").read_text(encoding="utf-8"), "lxml")
    body = soup.select_one("article")
    for part in body.select(LEFT_OUT):
        part.decompose()
    here = prefix(name)
    for tag in body.find_all(id=True):
        tag["id"] = here + tag["id"]
    for tag in body.find_all(True):
        for attribute, value in tag.attrs.items():
            if isinstance(value, str) and "url(#" in value:
                tag[attribute] = value.replace("url(#", f"url(#{here}")
    for tag in body.find_all("style"):
        tag.string = tag.get_text().replace("url(#", f"url(#{here}")
    for tag in body.find_all(href=True):
        file, fragment = urldefrag(tag["href"])
        page = posixpath.normpath(posixpath.join(posixpath.dirname(name), file)) if file else name
        if "://" in file or file.startswith("mailto:"):
            continue
        if page.removesuffix(".html") in names:
            tag["href"] = f"#{prefix(page.removesuffix('.html'))}{fragment}"
        elif page != name:
            tag["href"] = urljoin(f"{site}/", page) + (f"#{fragment}" if fragment else "")
        else:
            tag["href"] = f"#{here}{fragment}"
    for tag in body.find_all(src=True):
        if not tag["src"].startswith("data:"):
            path = posixpath.join(posixpath.dirname(name), tag["src"])
            tag["src"] = posixpath.relpath(path, "_static")
    body["id"] = here
    return body


def head() -> str:
    """Style sheets of the pages."""
    name = reading_path()[0]
    soup = BeautifulSoup((BUILT / f"{name}.html").read_text(encoding="utf-8"), "lxml")
    sheets = soup.select("link[rel=stylesheet]")
    for tag in sheets:
        path = posixpath.join(posixpath.dirname(name), tag["href"])
        tag["href"] = posixpath.relpath(path, "_static")
    return "".join(map(str, sheets))


def joined() -> str:
    """All pages of the reading path as one. FileNotFoundError if the book is not built."""
    settings = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    names, site = reading_path(), settings["html"]["baseurl"]
    pages = "".join(
        f'<div style="break-before: page">{article(name, names, site)}</div>' for name in names
    )
    return (
        f'<!doctype html><html lang="en" data-theme="light"><head><meta charset="utf-8">'
        f"<title>{settings['title']}</title>{head()}</head><body>{pages}</body></html>"
    )


def main() -> int:
    if not (BUILT / "index.html").exists():
        sys.exit(f"{BUILT} holds no built book: run `make book`")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("chromium or google-chrome must be on the PATH, got neither")
    JOINED.write_text(joined(), encoding="utf-8")
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        page = browser.new_page()
        page.set_default_timeout(600_000)
        page.goto(JOINED.as_uri(), wait_until="load")
        page.pdf(
            path=PDF, format="A4", margin=MARGINS, print_background=True, tagged=True, outline=True,
            display_header_footer=True, header_template="<span></span>", footer_template=FOOTER,
        )  # fmt: skip
        browser.close()
    JOINED.unlink()
    print(f"The reading path is in {PDF.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
