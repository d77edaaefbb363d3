"""The directive `rules`: a table of rules.yml that links each rule to the page that teaches it."""

from __future__ import annotations

from pathlib import Path

import yaml
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class Rules(SphinxDirective):
    """Takes nothing, and gives the table."""

    def run(self) -> list[nodes.Node]:
        path = Path(self.env.srcdir, "rules.yml")
        self.env.note_dependency(str(path))
        lines = ["| rule, and its page | in a line |", "|:--|:--|"]
        for rule in yaml.safe_load(path.read_text("utf-8")):
            name = f"{{ref}}`{rule['name']} <{rule['label']}>`, {{doc}}`/{rule['page']}`"
            lines.append(f"| {name} | {rule['rule']} |")
        table = nodes.container()
        self.state.nested_parse(StringList(lines, str(path)), self.content_offset, table)
        return table.children


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("rules", Rules)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
