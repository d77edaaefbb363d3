"""Calls a page by its title in the sidebar, _toc.yml, where a link to it has no other words."""

from __future__ import annotations

from pathlib import Path

import yaml
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment


def shorten(app: Sphinx, env: BuildEnvironment) -> None:
    """Replace the titles that links print; lab notes say that they are some."""
    toc = yaml.safe_load(Path(app.srcdir, app.config.external_toc_path).read_text("utf-8"))
    for part in toc["parts"]:
        for page in part["chapters"]:
            if "title" in page:
                notes = "Lab notes: " * page["file"].startswith("notes/")
                env.titles[page["file"]] = nodes.title("", notes + page["title"])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("env-updated", shorten)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
