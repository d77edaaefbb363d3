"""What a page tells others: a description, a card for links to it, words by which it is found.

`page_words` in _config.yml: words by page, entries of its index, which the search ranks as titles.
"""

from __future__ import annotations

import html
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform

CARD = "card.png"
LONGEST = 200


class Words(SphinxTransform):
    """Enters the words of a page in the index, with its title as the target."""

    default_priority = 700  # before the domains collect what is entered

    def apply(self, **kwargs: Any) -> None:
        section = next(iter(self.document.findall(nodes.section)), None)
        words = self.config.page_words.get(self.env.docname)
        if words and section is not None:
            entries = [("single", word, section["ids"][0], "main", None) for word in words]
            section.insert(1, addnodes.index(entries=entries))


def with_entries(
    app: Sphinx, env: BuildEnvironment, added: set[str], changed: set[str], removed: set[str]
) -> list[str]:
    """The pages to read again when any page is: of a page that it leaves as it was, Sphinx's search
    forgets the entries of the index."""
    if not added | changed | removed:
        return []
    return [page for page, entries in env.get_domain("index").entries.items() if entries]


def description(doctree: nodes.document) -> str:
    """The first paragraph of a page that stands in no box, up to a full word."""
    for paragraph in doctree.findall(nodes.paragraph):
        if isinstance(paragraph.parent, nodes.section):
            text = " ".join(paragraph.astext().split())
            if len(text) > LONGEST:
                text = text[:LONGEST].rpartition(" ")[0].rstrip(",;:") + " …"
            return text
    return ""


def describe(
    app: Sphinx, pagename: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Add the tags of a page; leave out the scripts of Thebe, which fail and which no page uses."""
    scripts = context["script_files"]
    context["script_files"] = [s for s in scripts if "thebe" not in f"{s.filename}{s.attributes}"]
    if pagename == app.config.root_doc:
        context["docstitle"] = ""  # which is its own title
    if doctree is None:
        return
    base, title = app.config.html_baseurl.rstrip("/"), app.env.titles[pagename].astext()
    said = description(doctree) or f"{title}. {app.config.html_title}"
    tags = {
        "og:title": title,
        "og:description": said,
        "og:type": "website",
        "og:site_name": app.config.html_title,
        "og:url": f"{base}/{pagename}.html",
        "og:image": f"{base}/{CARD}",
    }
    made = [f'<meta name="description" content="{html.escape(said)}"/>']
    made += [f'<meta property="{k}" content="{html.escape(v)}"/>' for k, v in tags.items()]
    words = ", ".join(app.config.page_words.get(pagename, ()))
    made += [f'<meta name="keywords" content="{html.escape(words)}"/>'] if words else []
    context["metatags"] = "\n".join([context.get("metatags", ""), *made])


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("page_words", {}, "env")
    app.add_transform(Words)
    app.connect("env-get-outdated", with_entries)
    app.connect("html-page-context", describe)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
