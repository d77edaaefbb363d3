"""notebooks/lengths.py: what counts as hidden, as words, and as too long."""

import importlib.util

from gdpa_lab.measuring.record import ROOT

spec = importlib.util.spec_from_file_location("lengths", ROOT / "notebooks" / "lengths.py")
lengths = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lengths)

SOURCE = """# ---
# ---

# %% [markdown] tags=["remove-cell"]
# text

# %%
shown = 1

# %% tags=["parameters"]
mode = "replay"

# %% tags=["remove-input"]
# | name: fig-a
hidden = 1

# a comment counts
also = 2
"""


def test_hidden_lines_are_code_that_is_not_shown():
    assert lengths.hidden_lines(SOURCE) == 3


def test_words_are_those_of_the_article(tmp_path):
    page = tmp_path / "a.html"
    page.write_text(
        "<p>menu</p><article>One <b>two</b> <svg><text>no</text></svg><pre>x = 3</pre>"
        '<a class="headerlink">#</a><p class="provenance">measured: a GPU</p></article>'
    )
    assert lengths.words(page) == 5
    page.write_text("<p>no article</p>")
    assert lengths.words(page) == 0


def test_what_is_too_long_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(lengths, "BUILT", tmp_path)
    made = [lengths.Length("a/long", 401, 61, 3501), lengths.Length("notes/long", 999, 999, 9999)]
    assert lengths.problems(made) == [
        "a/long: 61 hidden, at most 60",
        "a/long: 3501 words, at most 3500",
        "median of words: 3501, at most 2500",
    ]
    assert lengths.problems([lengths.Length("a/short", 300, 60, None)]) == []


def test_the_sources_keep_their_limits():
    found = [x._replace(words=None) for x in lengths.lengths()]
    assert [problem for problem in lengths.problems(found) if "words" not in problem] == []
