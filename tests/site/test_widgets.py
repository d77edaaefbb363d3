"""What a reader can turn on a page, in a browser: lengths, filters, frames that step."""

import json

import pytest

from _lib import studies
from notebooks.measuring import _widgets
from tests.site.conftest import ASSETS, PHONE, WIDE
from tritonemu import interactive
from tritonemu.timeline import Event, Timeline

FITS = {"fast": (10.0, 1.0), "slow": (20.0, 4.0)}
SIZES = {"fast": (128, 64), "slow": (64, 64)}


@pytest.fixture
def shown(tab, tmp_path):
    """Opens a page of a chapter with this HTML in it."""
    (tmp_path / "_static").symlink_to(ASSETS)
    (tmp_path / "figures").mkdir()
    path = tmp_path / "executed" / "part" / "page.html"
    path.parent.mkdir(parents=True)

    def show(body: str, scripts: str = "") -> None:
        path.write_text(
            '<!doctype html><html data-theme="light"><head><meta charset="utf-8">'
            '<link rel="stylesheet" href="../../_static/book.css"></head><body>'
            f'<article class="bd-article">{body}</article>{scripts}</body></html>',
            encoding="utf-8",
        )
        tab.goto(path.as_uri())

    return show


def gap(name: str, lengths: list[int]) -> float:
    """By the formula of the chapter."""
    (c0, c1), (rows, keys) = FITS[name], SIZES[name]

    def per_pair(lengths):
        tiles = [-(-n // rows) for n in lengths]
        blocks = [t * -(-n // keys) for t, n in zip(tiles, lengths, strict=True)]
        return (c0 * sum(tiles) + c1 * sum(blocks)) / sum(n * n for n in lengths)

    return per_pair(lengths) / per_pair([2048])


def test_the_calculator_tells_fill_waste_and_gaps(shown, tab):
    example = [2048, 2048]
    made = _widgets.padding(FITS, SIZES, longest=2048, lengths=example, origin="Of a test.")
    shown(made.data)
    assert "fill 100.0 %" in tab.locator(".widget p").first.inner_text()
    assert tab.locator(".widget td:last-child").all_inner_texts() == ["1.00×", "1.00×"]

    lengths = [0, 70, 129, 512, 33]
    tab.locator("textarea").fill(", ".join(map(str, lengths)))
    said = tab.locator(".widget p").first.inner_text()
    fill = sum(lengths) / len(lengths) / max(lengths)
    assert f"fill {100 * fill:.1f} %" in said and f"{100 - 100 * fill:.1f} % of the tokens" in said
    pairs = sum(n * n for n in lengths) / len(lengths) / max(lengths) ** 2
    assert f"{100 - 100 * pairs:.1f} % of the pairs" in said
    for name, row in zip(FITS, tab.locator(".widget tbody tr").all(), strict=True):
        cells = row.locator("td").all_inner_texts()
        short, partial, total = (float(cell.rstrip("×")) for cell in cells[1:])
        assert cells[0] == name and total == pytest.approx(gap(name, lengths[1:]), abs=0.005)
        assert short * partial == pytest.approx(total, rel=0.01)
    tab.set_viewport_size(PHONE)
    assert tab.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


@pytest.mark.parametrize("written", ["[1024, 512, 7]", "(1024, 512, 7)", "1024 512;7"])
def test_the_calculator_takes_a_list_as_it_is_copied(shown, tab, written):
    made = _widgets.padding(FITS, SIZES, longest=2048, lengths=[5], origin="Of a test.")
    shown(made.data)
    tab.locator("textarea").fill(written)
    assert "3 sequences, the longest of 1,024" in tab.locator(".widget p").first.inner_text()


def test_the_calculator_says_what_it_cannot_read(shown, tab):
    made = _widgets.padding(FITS, SIZES, longest=2048, lengths=[5], origin="Of a test.")
    shown(made.data)
    for written, told in {"12 x7": "whole numbers, got “x7”", "0 0": "at least one length"}.items():
        tab.locator("textarea").fill(written)
        assert told in tab.locator(".widget p").first.inner_text()
        assert tab.locator(".widget table").is_hidden()


def test_claims_are_filtered_by_words_and_status_which_the_address_keeps(shown, tab):
    rows = [("measured", "TMA a<br>b"), ("measured", "c"), ("open", "d TMA")]
    lines = "".join(f"<tr><td>{status}</td><td>{text}</td></tr>" for status, text in rows)
    table = f'<div class="tag_ledger"><table><tbody>{lines}</tbody></table></div>'
    shown(table, '<script src="../../_static/claims.js"></script>')
    buttons, field = tab.locator(".filter button"), tab.get_by_role("searchbox")

    def visible():
        return [row.is_visible() for row in tab.locator("tr").all()]

    def pressed():
        return tab.locator(".filter [aria-pressed=true]").all_inner_texts()

    assert buttons.all_inner_texts() == ["all (4)", "measured (3)", "open (1)"]
    assert visible() == [True] * 3 and pressed() == ["all (4)"]
    tab.get_by_role("button", name="open").click()
    assert visible() == [False, False, True] and pressed() == ["open (1)"]
    field.fill("tma ")
    assert buttons.all_inner_texts() == ["all (3)", "measured (2)", "open (1)"]
    assert tab.url.endswith("#status=open&q=tma")

    tab.reload()
    assert visible() == [False, False, True] and pressed() == ["open (1)"]
    assert field.input_value() == "tma"
    tab.get_by_role("button", name="measured").click()
    assert visible() == [True, False, False]
    tab.evaluate("location.hash = 'q=c'")
    tab.wait_for_function("document.querySelector('.filter input').value === 'c'")
    assert visible() == [False, True, False]
    field.fill("")
    assert visible() == [True] * 3


def test_a_button_opens_the_page_that_steps_whole_and_in_the_theme(shown, tab, tmp_path):
    events = [Event(0, "load", "compute", "work", 10 * i, 10 * i + 8, 1) for i in range(5)]
    traces = {"one": Timeline("f.py", events), "two": Timeline("f.py", events[:3])}
    sources = dict.fromkeys(traces, "def f():\n    pass\n")
    outcomes = dict.fromkeys(traces, "The end.")
    shown(
        studies.framed("steps.html", "Steps").data,
        '<script src="../../_static/stepper.js"></script>',
    )
    (tmp_path / "figures" / "steps.html").write_text(
        interactive(traces, sources, title="Steps", outcomes=outcomes), encoding="utf-8"
    )
    assert not [url for url in tab.requests if url.endswith("steps.html")], "not before it is asked"
    tab.get_by_text("Step through it").click()
    frame = tab.locator("iframe").element_handle().content_frame()
    frame.wait_for_url("**/steps.html")
    for size in (WIDE, PHONE):
        tab.set_viewport_size(size)
        frame.wait_for_selector("#lanes svg")
        tab.wait_for_function("document.querySelector('iframe').style.height.endsWith('px')")
        whole = "document.documentElement.scrollHeight <= innerHeight + 1"
        frame.wait_for_function(whole)
        assert frame.evaluate("document.documentElement.scrollWidth <= innerWidth")
    tab.evaluate("document.documentElement.dataset.theme = 'dark'")
    frame.wait_for_function("document.documentElement.dataset.theme === 'dark'")
    frame.get_by_role("button", name="two").click()
    assert frame.locator("#variants [aria-pressed=true]").inner_text() == "two"


def test_data_of_a_widget_cannot_end_its_script():
    made = _widgets.widget("gap", {"a": "</script><b>"}, "A & B").data
    kept = made.split('<script type="application/json">')[1].split("</script>")[0]
    assert json.loads(kept) == {"a": "</script><b>"} and 'aria-label="A &amp; B"' in made
