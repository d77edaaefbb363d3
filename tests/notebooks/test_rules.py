"""One page owns each rule of book/rules.yml: others link to it and do not tell it again.

Read are the chapters and the glossary. Lab notes are records of what was done, and the hints in
`exercises` are printed where nothing can be linked.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RULES = yaml.safe_load((ROOT / "book" / "rules.yml").read_text(encoding="utf-8"))
ORIGINS = {"computed", "modelled", "emulated", "compiled", "published"}
"""Arguments of exhibits that say where values come from, in words that cannot be links."""
ROLE = re.compile(r"\{[\w:]+\}`([^`]*?)(?:\s*<[^>`]*>)?`")
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["label"])


@cache
def pages() -> dict[str, str]:
    """What each page says, roles included."""
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8"))
    names = [x["file"] for part in toc["parts"] for x in part["chapters"]]
    chapters = [name for name in names if name.startswith("executed/")]
    said = {name: read_chapter(name.partition("/")[2]) for name in chapters}
    return said | {"glossary": (ROOT / "book/glossary.md").read_text(encoding="utf-8")}


def read_chapter(name: str) -> str:
    """The Markdown and captions of a chapter, then the texts that its code shows."""
    source = (ROOT / "notebooks" / f"{name}.py").read_text(encoding="utf-8")
    lines = [line for line in source.splitlines() if line.startswith("#")]
    markdown = " ".join(line.lstrip("#| ") for line in lines if not line.startswith("# %%"))
    nodes = list(ast.walk(ast.parse(source)))
    of_origins = {
        id(part)
        for node in nodes
        if isinstance(node, ast.keyword) and node.arg in ORIGINS
        for part in ast.walk(node)
    }
    texts = [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if node.value.count(" ") > 3 and id(node) not in of_origins
    ]
    return " ".join(" ¶ ".join([markdown, *texts]).split())


def prose(page: str) -> str:
    """The words of a page, of a role only those that it shows."""
    return ROLE.sub(r"\1", pages()[page])


def others(rule: dict) -> list[str]:
    return [page for page in pages() if page != rule["page"]]


@each_rule
def test_its_page_teaches_it_under_its_label(rule):
    assert pages()[rule["page"]].count(f"({rule['label']})=") == 1
    for words in ("mentions", "restates"):
        assert re.search(rule[words], prose(rule["page"])), f"{words} must find its own page"


@each_rule
def test_others_link_to_it(rule):
    speak = {page for page in others(rule) if re.search(rule["mentions"], prose(page))}
    link = {page for page in speak if f"<{rule['label']}>`" in pages()[page]}
    assert speak - link == set()


@each_rule
def test_no_other_tells_it_again(rule):
    around = re.compile(rf".{{0,40}}(?:{rule['restates']}).{{0,40}}")
    told = {page: [found[0] for found in around.finditer(prose(page))] for page in others(rule)}
    assert {page: words for page, words in told.items() if words} == {}
