"""Tables of many columns are cards on a phone: a card a row, a value with the name of its column.

The names come from here, the form from exhibits.css.
"""

from __future__ import annotations

import html

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.writers.html5 import HTML5Translator

LEAST_COLUMNS = 3
"""A table of two fits a phone."""


class Named(SphinxPostTransform):
    """Notes the name of its column in each cell of a table that will be cards."""

    default_priority = 800

    def run(self) -> None:
        for group in self.document.findall(nodes.tgroup):
            heads = [entry.astext() for entry in group.findall(nodes.entry)][: group["cols"]]
            if group["cols"] < LEAST_COLUMNS or "predictions" in group.parent["classes"]:
                continue
            group.parent["classes"].append("cards")
            for row in next(group.findall(nodes.tbody)).findall(nodes.row):
                for head, entry in zip(heads, row, strict=False):
                    entry["column"] = head


def visit_entry(self: HTML5Translator, node: nodes.entry) -> None:
    HTML5Translator.visit_entry(self, node)
    if node.get("column"):
        name = html.escape(node["column"])
        self.body[-1] = self.body[-1].replace("<td", f'<td data-column="{name}"', 1)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_post_transform(Named)
    app.add_node(nodes.entry, override=True, html=(visit_entry, HTML5Translator.depart_entry))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
