"""Leaves out of each page the scripts of the theme that it can do without.

Of Font Awesome a page has a dozen icons: they stand in it, drawn from the theme's own script of
all. The index of the search is loaded by the page of its results alone.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from sphinx.application import Sphinx

_ICON = re.compile(r'<i class="([^"]*\bfa-[^"]*)"([^>]*)></i>')
_SCRIPT = re.compile(r"<script[^>]*\bfontawesome\.js[^>]*></script>\n?")
_SEARCH = re.compile(
    r"<script[^>]*/?(?:searchtools|language_data|searchindex)\.js[^>]*></script>\n?"
)
_STYLES = {"fa-solid", "fas", "fa-brands", "fab", "fa-regular", "far", "fa-lg", "fa-fw"}


def drawing(name: str, script: str) -> tuple[int, int, str]:
    """Width, height and path of an icon. LookupError for one that the script lacks."""
    entry = re.search(
        rf'[{{,]"?{re.escape(name)}"?:(\[\d+,\d+,\[[^\]]*\],"[^"]*","[^"]+"\])', script
    )
    if entry is None:
        raise LookupError(f"fontawesome.js must have the icon {name}, got none")
    width, height, *_, path = json.loads(entry[1])
    return width, height, path


def drawn(page: str, script: str) -> str:
    """The page with its icons as SVG and without the script."""

    def svg(icon: re.Match[str]) -> str:
        (name,) = {x for x in icon[1].split() if x.startswith("fa-")} - _STYLES
        width, height, path = drawing(name.removeprefix("fa-"), script)
        hidden = "" if "aria-" in icon[2] else ' aria-hidden="true"'
        return (
            f'<svg class="{icon[1]} icon"{icon[2]}{hidden} viewBox="0 0 {width} {height}">'
            f'<path fill="currentColor" d="{path}"/></svg>'
        )

    return _SCRIPT.sub("", _ICON.sub(svg, page))


def draw(app: Sphinx, exception: Exception | None) -> None:
    if exception is not None or app.builder.format != "html":
        return
    path = Path(app.outdir, "_static", "scripts", "fontawesome.js")
    script = path.read_text(encoding="utf-8")
    for file in Path(app.outdir).rglob("*.html"):
        page = file.read_text(encoding="utf-8")
        new = drawn(page, script)
        if file.name != "search.html":
            new = _SEARCH.sub("", new)
        if new != page:
            file.write_text(new, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", draw)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
