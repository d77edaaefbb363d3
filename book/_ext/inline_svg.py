"""SVG pictures stand in the page itself: their text is text, in the page's font and colours.

A picture with a form for a phone (`gdpa_lab.report.style.both`) becomes two; the page's style shows
the one that fits. Ids get a prefix, since all pictures of a page share one space of names.
"""

from __future__ import annotations

import html
import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

_NARROW = re.compile(r'<svg data-form="narrow" display="none".*?</svg>', re.DOTALL)


def inlined(svg: str, alt: str, prefix: str) -> str:
    """The picture as HTML: one element, or a wide and a narrow one."""
    svg = svg[svg.index("<svg") :]
    narrow = _NARROW.search(svg)
    forms = {"wide": _NARROW.sub("", svg)}
    if narrow:
        forms["narrow"] = narrow[0].replace(' data-form="narrow" display="none"', "", 1)
    return "".join(_element(form, text, alt, f"{prefix}{form}-") for form, text in forms.items())


def _element(form: str, svg: str, alt: str, prefix: str) -> str:
    body = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # The styles of matplotlib and of `report.style` are for a file alone; the page has its own.
    body = re.sub(r"<style[^>]*>\s*(\*|svg)\s*\{.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="', f'id="{prefix}', body)
    body = re.sub(r"url\(#", f"url(#{prefix}", body)
    body = re.sub(r'href="#', f'href="#{prefix}', body)
    kind = re.search(r'^<svg[^>]*class="([^"]*)"', body)
    body = re.sub(r'^<svg([^>]*?) class="[^"]*"', r"<svg\1", body)
    body = re.sub(r'^<svg([^>]*?) role="img"', r"<svg\1", body)
    classes = f"chart {form}{f' {kind[1]}' if kind else ''}"
    role = "group" if "<a " in body else "img"  # what is in an image cannot be reached
    label = f'class="{classes}" role="{role}" aria-label="{html.escape(alt)}"'
    # A blank line or a line of its own changes nothing in SVG, and readers of the page want few.
    return re.sub(r"\s*\n\s*", "\n", body).replace("<svg", f"<svg {label}", 1).strip()


def visit_image(self: HTML5Translator, node: nodes.image) -> None:
    path = Path(self.builder.env.srcdir, node["uri"])
    if path.suffix != ".svg" or not path.exists():
        return HTML5Translator.visit_image(self, node)
    self.pictures = getattr(self, "pictures", 0) + 1
    text = path.read_text(encoding="utf-8")
    self.body.append(inlined(text, node.get("alt", ""), f"p{self.pictures}-"))
    raise nodes.SkipNode


def depart_image(self: HTML5Translator, node: nodes.image) -> None:
    HTML5Translator.depart_image(self, node)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_node(nodes.image, override=True, html=(visit_image, depart_image))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
