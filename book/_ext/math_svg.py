"""Formulas are set at build time, by ziamath: SVG in the page, in the colour of its text."""

from __future__ import annotations

import html
import re
from functools import cache

import ziamath
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.math import get_node_equation_number
from sphinx.writers.html5 import HTML5Translator

SIZE, SMALLEST = 16, 0.85
ziamath.config.svg2 = False  # every picture of a page whole: no names that two could share
ziamath.config.precision = 1


@cache
def svg(tex: str, inline: bool) -> str:
    """Set TeX as an SVG element as tall as the text around it, on its baseline; a display shrinks
    to `SMALLEST` of its size at most."""
    picture = ziamath.Latex(tex, size=SIZE, inline=inline, color="currentColor").svg()
    left, top, width, height = map(float, re.search(r'viewBox="([^"]+)"', picture)[1].split())
    least = SMALLEST * width / SIZE
    below = round(-(top + height) / SIZE, 3)
    head = (
        f'<svg class="formula" role="img" aria-label="{html.escape(tex)}" '
        f'viewBox="{left:g} {top:g} {width:g} {height:g}" '
        f'style="width:{width / SIZE:.3f}em;'
        + (f'vertical-align:{below:g}em">' if inline else f'min-width:{least:.3f}em">')
    )
    return head + picture[picture.index(">") + 1 :]


def visit_inline(self: HTML5Translator, node: nodes.math) -> None:
    self.body.append(f'<span class="math notranslate">{svg(node.astext(), True)}</span>')
    raise nodes.SkipNode


def visit_block(self: HTML5Translator, node: nodes.math_block) -> None:
    self.body.append(self.starttag(node, "div", CLASS="math notranslate"))
    if node["number"]:
        self.body.append(f'<span class="eqno">({get_node_equation_number(self, node)})')
        self.add_permalink_ref(node, "Link to this equation")
        self.body.append("</span>")
    self.body.append(f"{svg(node.astext(), False)}</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("svg", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
