"""The timeline as data, as a figure and as a page, from a two-stage pipeline written by hand."""

import json
import re
import shutil
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from tritonemu.stepper import barrier_states, buffer_states, interactive
from tritonemu.timeline import Arrow, Event, Timeline

SVG = "{http://www.w3.org/2000/svg}"
SOURCE = '''"""A module."""

import triton


@triton.jit
def pipeline_kernel(
    k_desc, out_ptr, length, NUM_BUFFERS: tl.constexpr
):  # fmt: skip
    k_full, k_empty = tlx.alloc_barriers(NUM_BUFFERS), tlx.alloc_barriers(NUM_BUFFERS)
    with tlx.async_tasks():
        with tlx.async_task("load"):
            for block in range(length):
                stage, phase = block % NUM_BUFFERS, block // NUM_BUFFERS & 1
                tlx.barrier_wait(k_empty[stage], phase ^ 1)
                tlx.barrier_expect_bytes(k_full[stage], BYTES)
                tlx.async_descriptor_load(k_desc, k[stage], [block, 0], k_full[stage])
        with tlx.async_task("math[0]"):
            for block in range(length):
                stage, phase = block % NUM_BUFFERS, block // NUM_BUFFERS & 1
                tlx.barrier_wait(k_full[stage], phase)
                s = tlx.async_dot(q, k[stage].T)
                s = tlx.async_dot_wait(0, s)
                tlx.barrier_arrive(k_empty[stage])
                p = activation(s)
                acc += p


def other():
    return 0
'''
LINE = {
    text: number
    for number, line in enumerate(SOURCE.splitlines(), 1)
    for text in ("wait(k_empty", "expect", "load(k_desc", "wait(k_full", "async_dot(", "arrive(k",
                 "activation(", "acc +=", "dot_wait")
    if text in line
}  # fmt: skip
BYTES = 16384


def pipeline(blocks: int = 6, guard: bool = True) -> Timeline:
    """A load role and a math role over `k` with two buffers; without `guard` nobody waits."""
    timeline = Timeline("pipeline.py")
    landed, released, load, free_math = [], [], 0.0, 0.0

    def add(lane, kind, name, start, end, line, target="", **state):
        timeline.events.append(Event(0, lane, kind, name, start, end, LINE[line], target, **state))

    for block in range(blocks):
        stage, phase = block % 2, block // 2
        full, empty, buffer = f"k_full[{stage}]", f"k_empty[{stage}]", f"k[{stage}]"
        if guard:
            free = max(load, released[block - 2]) if block >= 2 else load
            add("load", "wait", f"wait {empty}", load, free, "wait(k_empty", empty, phase=phase - 1)
            if block >= 2:
                timeline.arrows.append(
                    Arrow(0, empty, phase - 1, "math[0]", released[block - 2], "load", free)
                )
            load = free
        state = {"phase": phase, "bytes": BYTES}
        add("load", "arrive", f"expect {full}", load, load + 20, "expect", full, **state)
        add("load", "compute", "coordinates", load + 20, load + 60, "load(k_desc")
        landed.append(load + 520)
        add("TMA", "copy", f"load {buffer}", load + 60, load + 520, "load(k_desc", buffer,
            bytes=BYTES)  # fmt: skip
        add("TMA", "arrive", f"arrive {full}", load + 520, load + 520, "load(k_desc", full,
            phase=phase)  # fmt: skip
        load += 60
        ready = max(free_math, landed[block])
        add("math[0]", "wait", f"wait {full}", free_math, ready, "wait(k_full", full, phase=phase)
        timeline.arrows.append(Arrow(0, full, phase, "TMA", landed[block], "math[0]", ready))
        add("tensor core", "mma", "q k.T", ready + 10, ready + 300, "async_dot(", buffer)
        add("math[0]", "compute", "issue", ready, ready + 10, "async_dot(")
        add("math[0]", "wait", "wait for the product", ready + 10, ready + 300, "dot_wait")
        add("math[0]", "arrive", f"arrive {empty}", ready + 300, ready + 300, "arrive(k", empty,
            phase=phase)  # fmt: skip
        released.append(ready + 300)
        add("math[0]", "compute", "activation", ready + 300, ready + 480, "activation(")
        add("math[0]", "compute", "add to acc", ready + 480, ready + 520, "acc +=")
        free_math = ready + 520
        if not guard and load > 500:
            break
    if not guard:
        timeline.events = [e for e in timeline.events if e.start <= 700]
    return timeline


OUTCOMES = {
    "correct": "6 blocks, nothing found.",
    "without k_empty": "Race: TMA fills k[0] while math[0] reads it </script><b>",
}
CORRECT, BROKEN = OUTCOMES


def page() -> str:
    return interactive(
        {CORRECT: pipeline(), BROKEN: pipeline(guard=False)},
        dict.fromkeys(OUTCOMES, SOURCE),
        title="A pipeline & its barriers",
        outcomes=OUTCOMES,
    )


def picture(timeline: Timeline, **options) -> ET.Element:
    return ET.fromstring(timeline.svg(**options))


def group(root: ET.Element, kind: str) -> list[ET.Element]:
    return [g for g in root.iter(f"{SVG}g") if g.get("class") == kind]


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?[\d.]+", text)]


# The figure.


def test_a_lane_per_role_and_then_the_engines():
    timeline = pipeline()
    assert timeline.lanes() == ["load", "math[0]", "TMA", "tensor core"]
    timeline.events.reverse()
    assert timeline.lanes()[2:] == ["TMA", "tensor core"]
    (names,) = group(picture(pipeline()), "names")
    texts = list(names.iter(f"{SVG}text"))
    assert [text.text for text in texts[:4]] == ["load", "math[0]", "TMA", "tensor core"]
    tops = [float(text.get("y")) for text in texts[:4]]
    assert tops == sorted(tops)


def test_svg_says_what_it_shows():
    root = picture(pipeline())
    assert root.get("role") == "img"
    assert root.find(f"{SVG}title").text == "Timeline of CTA 0"
    assert root.find(f"{SVG}desc").text == (
        "CTA 0, modelled cycles 0 to 3640. Lanes: load, math[0], TMA, tensor core. Boxes: "
        "18 compute, 6 MMA, 6 TMA load, 18 wait, 18 arrive. "
        "10 arrows from an arrival to a wait."
    )
    words = [text.text for text in root.iter(f"{SVG}text")]
    for word in ("cycles (modelled)", "500", "MMA", "TMA load", "wait k_empty[0]"):
        assert word in words
    copies = [box.find(f"{SVG}title").text for box in group(root, "copy")]
    assert copies[0] == f"load k[0]: cycles 60 to 520, line {LINE['load(k_desc']}"


def test_adjacent_compute_events_are_one_box():
    root = picture(pipeline())
    boxes = [box.find(f"{SVG}title").text for box in group(root, "compute")]
    assert "activation, add to acc: cycles 820 to 1040, lines 25 to 26" in boxes
    assert len(boxes) == 6 + 6 + 6


def test_an_unnamed_box_is_called_by_its_kind():
    root = picture(Timeline("f.py", [Event(0, "load", "compute", "", 0, 90, 3)]))
    (box,) = group(root, "compute")
    assert box.find(f"{SVG}title").text == "compute: cycles 0 to 90, line 3"
    assert box.find(f"{SVG}text") is None


def test_arrows_go_from_the_arrival_to_the_end_of_the_wait():
    timeline = pipeline()
    root = picture(timeline)
    origin, scale = float(root.get("data-x")), float(root.get("data-scale"))
    drawn = group(root, "release")
    assert len(drawn) == len(timeline.arrows) == 10
    lanes = [float(text.get("y")) for text in group(root, "names")[0].iter(f"{SVG}text")]
    for arrow, curve in zip(timeline.arrows, drawn, strict=True):
        points = numbers(curve.find(f"{SVG}path").get("d"))
        assert points[0] == pytest.approx(origin + arrow.left * scale, abs=0.06)
        assert points[-2] == pytest.approx(origin + arrow.right * scale, abs=0.06)
        load, math, tma = lanes[:3]
        if arrow.source == "TMA":
            assert points[1] > tma - 18 and points[-1] > math and points[1] > points[-1]
        else:
            assert math > points[1] > points[-1] > load


def test_copies_in_flight_together_have_rows_of_their_own():
    root = picture(pipeline())
    places = [box.find(f"{SVG}rect").attrib for box in group(root, "copy")]
    spans = [(float(p["y"]), float(p["x"]), float(p["x"]) + float(p["width"])) for p in places]
    assert len({y for y, _, _ in spans}) == 2
    for y in {y for y, _, _ in spans}:
        row = sorted(span[1:] for span in spans if span[0] == y)
        assert all(a[1] <= b[0] for a, b in pairwise(row))
    pins = [numbers(pin.find(f"{SVG}path").get("d"))[1] for pin in group(root, "arrive")]
    assert spans[1][0] - 5 in pins, "an arrival of TMA stands at the end of its copy"


def test_a_window_clips_and_leaves_out():
    root = picture(pipeline(), start=1000, end=2000)
    origin = float(root.get("data-x"))
    for rect in root.iter(f"{SVG}rect"):
        if rect.get("stroke"):
            assert float(rect.get("x")) + float(rect.get("width")) <= 720
    assert all(float(r.get("x")) >= origin for box in group(root, "wait") for r in box[1:2])
    assert 0 < len(group(root, "release")) < 10
    with pytest.raises(ValueError, match="got no event"):
        pipeline().svg(start=9000, end=9500)
    with pytest.raises(ValueError, match="CTA 3"):
        pipeline().svg(3)


def test_svg_is_the_same_every_time_self_contained_and_small():
    svg = pipeline().svg()
    assert svg == pipeline().svg()
    assert re.findall(r"https?://[^\"]+", svg) == ["http://www.w3.org/2000/svg"]
    assert len(list(ET.fromstring(pipeline(blocks=40).svg()).iter())) < 45 * 40


# States for the page.


def test_barrier_states_count_phases_arrivals_and_bytes():
    states = barrier_states(pipeline().events)
    assert list(states) == ["k_empty[0]", "k_empty[1]", "k_full[0]", "k_full[1]"]
    assert states["k_full[0]"][:4] == [
        (None, 0, 1, 0),
        (20, 0, 0, BYTES),
        (520, 1, 1, 0),
        (840, 1, 0, BYTES),
    ]
    assert [phase for _, phase, _, _ in states["k_empty[1]"]] == [0, 1, 2, 3]


def test_an_incomplete_phase_stays():
    arrive = Event(0, "math[0]", "arrive", "arrive k_empty[0]", 5, 5, 1, "k_empty[0]", 0, 1)
    assert barrier_states([arrive]) == {"k_empty[0]": [(None, 0, 2, 0), (5, 0, 1, 0)]}


def test_buffer_states_of_the_correct_pipeline():
    events = pipeline().events
    states = buffer_states(events, barrier_states(events))
    assert list(states) == ["k[0]", "k[1]"]
    assert states["k[0]"][:6] == [
        (None, "empty", ""),
        (60, "filling", "TMA"),
        (520, "full", ""),
        (530, "being read", "tensor core"),
        (820, "released", ""),
        (880, "filling", "TMA"),
    ]
    seen = {state for changes in states.values() for _, state, _ in changes}
    assert not any(state.startswith("over") for state in seen)


def test_buffer_states_without_the_wait():
    events = pipeline(guard=False).events
    states = buffer_states(events, barrier_states(events))
    assert (530, "overwritten while read", "TMA over tensor core") in states["k[0]"]


def test_a_buffer_filled_before_its_release():
    events = [
        Event(0, "TMA", "copy", "k[0]", 0, 10, 1, "k[0]"),
        Event(0, "load", "wait", "wait k_empty[0]", 10, 10, 1, "k_empty[0]", -1),
        Event(0, "TMA", "copy", "k[0]", 20, 30, 1, "k[0]"),
    ]
    states = buffer_states(events, barrier_states(events))
    assert states["k[0]"][-1] == (20, "overwritten before its release", "TMA")


def test_the_operands_of_a_product_are_read():
    states = buffer_states([Event(0, "tensor core", "mma", "", 1, 2, 1, "registers @ v[1]")], {})
    assert states == {"v[1]": [(None, "empty", ""), (1, "being read", "tensor core"),
                               (2, "empty", "")]}  # fmt: skip


# The page.


def test_page_is_self_contained_and_holds_its_data():
    text = page()
    assert re.sub(r"http://www.w3.org/2000/svg", "", text).count("://") == 0
    assert text.count("</script>") == 2, "data must not end the script"
    assert "<title>A pipeline &amp; its barriers</title>" in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert list(data) == [CORRECT, BROKEN]
    assert data[CORRECT]["first"] == 6 and data[CORRECT]["lines"][0] == "@triton.jit"
    assert data[CORRECT]["lines"][-1].strip() == "acc += p"
    assert data[BROKEN]["outcome"] == OUTCOMES[BROKEN]
    assert text == page()


def test_page_wants_the_same_variants_everywhere():
    with pytest.raises(ValueError, match="same variants"):
        interactive({"a": pipeline()}, {"a": SOURCE}, title="t", outcomes={})


def test_page_draws_all_variants_on_one_axis():
    data = json.loads(re.search(r'id="data">(.*?)</script>', page(), re.DOTALL)[1])
    for drawing in ("svg", "wide"):
        axes = {
            tuple(ET.fromstring(data[name][drawing]).get(f"data-{x}") for x in ("start", "scale"))
            for name in OUTCOMES
        }
        assert len(axes) == 1, "the longer one decides"


def test_page_wants_a_cta_that_does_something():
    with pytest.raises(ValueError, match=r"CTA 3 .* got no event of \['a'\]"):
        interactive({"a": pipeline()}, {"a": SOURCE}, title="t", outcomes={"a": ""}, cta=3)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """The page in a browser from the disk, with what went wrong in `errors`."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("chromium is not on the PATH")
    path = tmp_path_factory.mktemp("page") / "pipeline.html"
    path.write_text(page(), encoding="utf-8")
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    arguments += [f"--disable-{name}" for name in ("background-networking", "component-update")]
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=chromium, args=[*arguments, "--disable-sync"]
        )
        tab = browser.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
        tab.errors = []
        tab.on("pageerror", lambda error: tab.errors.append(error.message))
        tab.on("request", lambda r: tab.errors.append(r.url) if "file:" not in r.url else None)
        tab.goto(path.as_uri())
        yield tab
        assert tab.errors == []
        browser.close()


def step_of(tab) -> int:
    return int(tab.locator("#slider").input_value())


def begin(tab, variant: str) -> None:
    tab.get_by_role("button", name=variant).click()
    tab.keyboard.press("Home")


def test_page_steps_with_keys_and_buttons(opened):
    begin(opened, CORRECT)
    assert step_of(opened) == 0
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        opened.keyboard.press(key)
    opened.get_by_role("button", name="One step forward").click()
    assert step_of(opened) == 3
    cycle = float(re.search(r"cycle ([\d.]+)", opened.locator("#place").inner_text())[1])
    assert cycle == 80
    assert opened.locator("#source .current").count() == 2
    assert "async_descriptor_load" in opened.locator("#source .current").first.inner_text()
    assert opened.locator("#now li").all_inner_texts()[0].split()[:2] == ["●", "load"]
    assert "filling" in opened.locator("#buffers .cell").first.inner_text()
    assert "lacks 16,384 bytes" in opened.locator("#barriers").inner_text()


def test_page_ends_with_the_outcome(opened):
    begin(opened, BROKEN)
    assert opened.locator("#outcome").is_hidden()
    opened.keyboard.press("End")
    assert opened.locator("#outcome").inner_text() == OUTCOMES[BROKEN]
    assert opened.locator("#buffers .overwritten").count() > 0
    opened.keyboard.press("ArrowLeft")
    assert opened.locator("#outcome").is_hidden()


def test_page_keeps_the_cycle_when_the_variant_changes(opened):
    def cycle() -> float:
        return float(re.search(r"cycle ([\d.]+)", opened.locator("#place").inner_text())[1])

    begin(opened, CORRECT)
    for _ in range(5):
        opened.keyboard.press("ArrowRight")
    before, at = cycle(), opened.locator("#cursor").get_attribute("style")
    opened.get_by_role("button", name=BROKEN).click()
    assert before > 0 and cycle() == before
    assert opened.locator("#cursor").get_attribute("style") == at, "on one axis"
    line, box = (opened.locator(x).bounding_box() for x in (".current >> nth=0", "#source"))
    assert box["y"] <= line["y"] <= box["y"] + box["height"]
    opened.keyboard.press("End")
    opened.get_by_role("button", name=CORRECT).click()
    assert opened.locator("#outcome").inner_text() == OUTCOMES[CORRECT]


@pytest.mark.parametrize("width", [736, 1280])
def test_page_shows_timeline_and_whole_lines_of_source_on_one_screen(opened, width):
    opened.set_viewport_size({"width": width, "height": 900})
    begin(opened, CORRECT)
    opened.keyboard.press("ArrowRight")
    boxes = [opened.locator(x).bounding_box() for x in ("#lanes", "#source", ".current >> nth=0")]
    lanes, source, line = ((box["y"], box["y"] + box["height"]) for box in boxes)
    assert lanes[0] >= 0 and lanes[1] <= source[0] and source[1] <= 900
    assert source[0] <= line[0] and line[1] <= source[1]
    cut = "box => box.scrollWidth > box.clientWidth"
    assert not opened.locator("#source").evaluate(cut)
    assert not any(row.evaluate(cut) for row in opened.locator("#source code").all())


def test_page_plays_and_pauses(opened):
    begin(opened, CORRECT)
    opened.keyboard.press(" ")
    opened.wait_for_function("document.getElementById('slider').value > 0")
    opened.get_by_role("button", name="Pause").click()
    assert opened.get_by_role("button", name="Play").is_visible()


def test_page_goes_where_the_timeline_is_clicked(opened):
    begin(opened, CORRECT)
    opened.locator("#lanes").click(position={"x": 400, "y": 20})
    assert step_of(opened) > 0


def test_page_zooms_into_the_timeline_where_it_is(opened):
    opened.set_viewport_size({"width": 700, "height": 844})
    begin(opened, CORRECT)
    lanes, zoom = opened.locator("#lanes"), opened.get_by_role("button", name="Zoom")
    assert lanes.evaluate("box => box.scrollWidth <= box.clientWidth"), "the whole timeline"
    opened.keyboard.press("ArrowRight")
    zoom.click()
    assert zoom.get_attribute("aria-pressed") == "true" and step_of(opened) == 1
    assert lanes.evaluate("box => box.scrollWidth > box.clientWidth")
    opened.keyboard.press("End")
    assert lanes.evaluate("box => box.scrollLeft") > 0
    lanes.click(position={"x": 400, "y": 20})
    assert step_of(opened) > 1
    zoom.click()
    assert lanes.evaluate("box => box.scrollWidth <= box.clientWidth")


def test_page_in_a_frame_tells_its_height_and_takes_the_theme(opened, tmp_path):
    (tmp_path / "steps.html").write_text(page(), encoding="utf-8")
    around = tmp_path / "around.html"
    around.write_text(
        "<script>addEventListener('message', e => { window.told = e.data.stepper;"
        " e.source.postMessage({theme: 'dark'}, '*'); });</script>"
        '<iframe src="steps.html" width="600"></iframe>'
    )
    tab = opened.context.browser.new_page()
    tab.goto(around.as_uri())
    tab.wait_for_function("window.told > 400")
    inside = tab.frames[1]
    inside.wait_for_function("document.documentElement.dataset.theme === 'dark'")
    assert inside.locator("h1").is_hidden(), "the page around has said it"
    tab.close()


@pytest.mark.parametrize("width", [390, 1280])
def test_page_fits_its_window(opened, width):
    opened.set_viewport_size({"width": width, "height": 844})
    for variant in OUTCOMES:
        opened.get_by_role("button", name=variant).click()
        for key in ("ArrowRight", "End"):
            opened.keyboard.press(key)
            assert opened.evaluate("document.documentElement.scrollWidth") <= width
