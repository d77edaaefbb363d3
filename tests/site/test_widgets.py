"""What a reader can turn on a page, in a browser: sliders, lengths, filters, frames that step."""

import json

import pandas as pd
import pytest

from _lib import studies
from gdpa_lab.measuring.roofline import Ceilings, bracket
from gdpa_lab.measuring.workloads import workload
from notebooks.measuring import _widgets
from tests.site.conftest import ASSETS, PHONE, WIDE
from tritonemu.timeline import Event, Timeline, interactive

CEILINGS = Ceilings(800.0, ((1.0, 4200.0), (3.0, 4400.0)))
ROWS = pd.DataFrame(
    [
        ("v8_own_waits", "gdpa-self-full-512", 500.0),
        ("v8_own_waits", "gdpa-cross-full-2048", 400.0),
        ("fa4", "gdpa-self-full-512", 450.0),
        ("v1_tiled", "gdpa-self-full-512", 300.0),
        ("fa4", "gdpa-self-half-jagged-512", 250.0),
    ],
    columns=["impl", "workload", "tflops"],
)
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


def slide(tab, name: str, value: int) -> None:
    tab.locator(f"input[name={name}]").evaluate(
        "(e, v) => { e.value = 4 * Math.log2(v); e.dispatchEvent(new Event('input')); }", value
    )


def test_the_dot_of_the_roofline_is_the_bracket_of_the_shape(shown, tab):
    made = _widgets.roofline(CEILINGS, ROWS, ["v8_own_waits", "fa4"], origin="Of a test.")
    shown(made.data)
    text = tab.locator(".widget p").first
    dot = tab.locator(".dot")
    for name in ("gdpa-self-full-1024", "gdpa-self-full-256", "gdpa-cross-full-2048"):
        work = workload(name)
        slide(tab, "queries", work.max_seqlen_q)
        slide(tab, "keys", work.max_seqlen_k)
        found = bracket(work, "forward", CEILINGS)
        low, high = (f"{us / 1e3:.2f} ms" for us in (found.lower_us, found.upper_us))
        said = text.inner_text()
        assert f"at least {low} ({found.tflops_at_lower:.0f} TFLOP/s), and {high}" in said
        assert f"{found.bound}-bound" in said
    before = float(dot.get_attribute("cx"))
    slide(tab, "keys", 64)
    assert float(dot.get_attribute("cx")) < before, "fewer keys, less intensity"


def test_the_roofline_has_kernels_of_the_record_as_ghosts(shown, tab):
    shown(_widgets.roofline(CEILINGS, ROWS, ["v8_own_waits", "fa4"], origin="Of a test.").data)
    named = tab.locator(".ghost title").all_text_contents()
    assert named == [
        "v8_own_waits, gdpa-self-full-512: 500 TFLOP/s",
        "v8_own_waits, gdpa-cross-full-2048: 400 TFLOP/s",
        "fa4, gdpa-self-full-512: 450 TFLOP/s",
    ]
    slide(tab, "queries", 512)
    slide(tab, "keys", 512)
    assert tab.locator(".ghost.here").count() == 2, "half-full batches are another shape"
    with pytest.raises(ValueError, match="got none"):
        _widgets.roofline(CEILINGS, ROWS, ["v9"], origin="")


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


def test_the_calculator_says_what_it_cannot_read(shown, tab):
    made = _widgets.padding(FITS, SIZES, longest=2048, lengths=[5], origin="Of a test.")
    shown(made.data)
    for written, told in {"12 x7": "whole numbers, got “x7”", "0 0": "at least one length"}.items():
        tab.locator("textarea").fill(written)
        assert told in tab.locator(".widget p").first.inner_text()
        assert tab.locator(".widget table").is_hidden()


def test_claims_are_filtered_by_status(shown, tab):
    rows = [("measured", "a<br>b"), ("measured", "c"), ("open", "d")]
    lines = "".join(f"<tr><td>{status}</td><td>{text}</td></tr>" for status, text in rows)
    table = f'<div class="tag_ledger"><table><tbody>{lines}</tbody></table></div>'
    shown(table, '<script src="../../_static/claims.js"></script>')
    names = tab.locator(".filter button").all_inner_texts()
    assert names == ["all (4)", "measured (3)", "open (1)"]
    tab.get_by_role("button", name="open").click()
    assert [row.is_visible() for row in tab.locator("tr").all()] == [False, False, True]
    tab.get_by_role("button", name="all").click()
    assert all(row.is_visible() for row in tab.locator("tr").all())


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
    made = _widgets.widget("roofline", {"a": "</script><b>"}, "A & B").data
    kept = made.split('<script type="application/json">')[1].split("</script>")[0]
    assert json.loads(kept) == {"a": "</script><b>"} and 'aria-label="A &amp; B"' in made
