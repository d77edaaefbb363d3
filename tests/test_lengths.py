"""notebooks/lengths.py: what counts as shown, as collapsed, as code above a figure, as too much."""

import importlib.util

import pytest

from gdpa_lab.measuring.record import ROOT

spec = importlib.util.spec_from_file_location("lengths", ROOT / "notebooks" / "lengths.py")
lengths = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lengths)

PAGE = """<p>menu</p><article><h1>One<a class="headerlink">#</a></h1>
<div class="cell"><details><summary>Show code</summary><pre>import this</pre></details></div>
<div class="cell_output"><div class="output stream"><pre>printed words</pre></div></div>
{above}
<figure><svg><text>no</text></svg><figcaption>two words</figcaption></figure>
<p class="provenance">measured: a GPU</p>
<div class="cell"><pre>x = 3</pre></div>
<div class="tag_ledger"><table><tr><td>claim</td></tr></table></div>
<div class="predictions"><table><thead><tr><th>said</th></tr></thead>
<tbody><tr><td>a</td></tr><tr><td>b</td></tr></tbody></table></div></article>"""


@pytest.fixture
def measured(tmp_path):
    def measure(above: str) -> lengths.Length:
        page = tmp_path / "a.html"
        page.write_text(PAGE.format(above=above))
        return lengths.length("executed/a/b", page)

    return measure


def test_words_are_those_that_are_shown_and_collapsed_ones_are_apart(measured):
    found = measured("")
    # One, printed words, two words, x = 3, said, a, b
    assert (found.words, found.collapsed, found.predictions) == (11, 4, 2)
    folded = "<details><summary>An answer</summary><p>of prose</p></details>"
    assert measured(folded).words == 15, "prose cannot be folded away from the count"
    hidden = "<div class='solution dropdown admonition'><p>of an exercise</p></div>"
    found = measured(hidden)
    assert (found.words, found.collapsed) == (11, 7), "but hidden answers are apart"


def test_code_above_the_first_figure_is_what_one_sees(measured):
    assert measured("").above == 0
    assert measured("<div class='highlight'><pre>a = 1\n\nb = 2\n</pre></div>").above == 2
    assert measured("<figure></figure><pre>a = 1</pre>").above == 0


def test_a_page_without_an_article_is_refused(tmp_path):
    (tmp_path / "a.html").write_text("<p>no article</p>")
    with pytest.raises(ValueError, match="must have an article"):
        lengths.length("a", tmp_path / "a.html")


def test_what_is_too_much_is_named():
    made = [
        lengths.Length("executed/a/long", 4001, 0, 2, 4),
        lengths.Length("executed/a/bare", 10, 9000, None, 0),
        lengths.Length("index", 4000, 0, None, 0),
    ]
    assert lengths.problems(made) == [
        "executed/a/long: 4,001 words, at most 4,000",
        "executed/a/long: 4 predictions, at most 3",
        "executed/a/long: 2 lines of code above the first figure, none is allowed",
        "executed/a/bare: no figure",
    ]
    many = [lengths.Length("executed/a/fits", 4000, 0, 0, 3)] * 26
    assert lengths.problems(many) == ["the book: 104,000 words, at most 92,000"]
    assert lengths.problems(many[:23]) == []


def test_the_reading_path_leaves_out_appendices_alone(monkeypatch):
    path = lengths.reading_path()
    assert path[0] == "index" and "executed/forward/results" in path
    assert not [name for name in path if name.startswith("notes/") or name == "glossary"]
    monkeypatch.setattr(lengths, "APPENDICES", {"Cellar": ""})
    with pytest.raises(ValueError, match="got no Cellar"):
        lengths.reading_path()
