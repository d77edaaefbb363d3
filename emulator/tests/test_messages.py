"""Content of findings: source, calls, names, how to see them again; reports of the command."""

import json
import re
import shlex
import textwrap

import pytest

from tritonemu.__main__ import main

SCRIPT = """
    import torch, triton
    import triton.language as tl
    import triton.language.extra.tlx as tlx

    @triton.jit
    def publish(ptr, value):
        tl.atomic_xchg(ptr, value)

    @triton.jit
    def order_kernel(flag_ptr, out_ptr):
        cell = tlx.local_alloc((16,), tl.int32, 1)
        other = tlx.local_alloc((16,), tl.int32, 1, reuse=cell)
        with tlx.async_tasks():
            with tlx.async_task("default"):
                publish(flag_ptr, 1)
                fill(cell)
            with tlx.async_task(num_warps=4):
                if tl.atomic_or(flag_ptr, 0) == WANTED:
                    fill(other)

    @triton.jit
    def fill(cell):
        tlx.local_store(cell[0], tl.zeros((16,), tl.int32))

    WANTED = tl.constexpr(0)

    def early():
        order_kernel[(1,)](torch.zeros(1, dtype=torch.int32), None)

    @triton.jit
    def wait_kernel():
        done = tlx.alloc_barriers(1)
        tlx.barrier_wait(done, 0)

    def waiting():
        wait_kernel[(1,)]()

    @triton.jit
    def handed_kernel(x_ptr, WRITE: tl.constexpr):
        cell = tlx.local_alloc((16,), tl.float32, 1)
        full = tlx.alloc_barriers(1)
        with tlx.async_tasks():
            with tlx.async_task("default"):
                if WRITE:
                    tlx.local_store(cell[0], tl.full((16,), 1, tl.float32))
                tlx.barrier_arrive(full)
            with tlx.async_task(num_warps=4):
                tlx.barrier_wait(full, 0)
                tl.store(x_ptr + tl.arange(0, 16), tlx.local_load(cell[0]))

    def handed():
        handed_kernel[(2,)](torch.zeros(16), WRITE=True)

    def unwritten():
        handed_kernel[(1,)](torch.zeros(16), WRITE=False)

    @triton.jit
    def alone_kernel(out_ptr):
        tl.store(out_ptr, 1)

    def right():
        alone_kernel[(1,)](torch.zeros(1, dtype=torch.int32))

    def wrong():
        value = right()
        assert value
"""
BARRIERS = """
    import torch, triton
    import triton.language as tl
    import triton.language.extra.tlx as tlx

    @triton.jit
    def barrier_kernel(ARRIVALS: tl.constexpr, COUNT: tl.constexpr, WAITS: tl.constexpr):
        full = tlx.alloc_barriers(1, arrive_count=COUNT)
        with tlx.async_tasks():
            with tlx.async_task("default"):
                if WAITS:
                    tlx.barrier_wait(full, 0)
                else:
                    tlx.barrier_arrive(full, 2)
            with tlx.async_task(num_warps=4):
                for _ in tl.static_range(ARRIVALS):
                    tlx.barrier_arrive(full)

    def too_few():
        barrier_kernel[(1,)](1, 2, True)

    def too_many():
        barrier_kernel[(1,)](0, 1, False)

    def missed():
        barrier_kernel[(1,)](2, 1, True)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "messages_script.py"
    path.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    return path


@pytest.mark.tlx
@pytest.mark.parametrize("search", ("random", "exhaustive"))
def test_a_finding_of_a_search(script, tmp_path, capsys, search):
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "html", "svg")}
    arguments = [f"--{kind}={path}" for kind, path in files.items()]
    options = ["--search", search, "--schedules", "60"]
    assert main([f"{script}:early", *options, *arguments]) == 1
    printed = capsys.readouterr().err
    assert "tlx.local_store(cell[0], tl.zeros((16,), tl.int32))" in printed
    assert "called from" in printed and "fill(other)" in printed and "fill(cell)" in printed

    report = json.loads(files["json"].read_text())
    finding = report["found"]
    assert (finding["kind"], finding["kernel"]) == ("Race", "order_kernel")
    assert {finding["buffer"], "cell[0]", "other[0]"} == {"cell[0]", "other[0]"}
    assert " as cell[0] at " in finding["message"] or " as other[0] at " in finding["message"]
    here, earlier = finding["places"]
    assert (here["what"], earlier["what"]) == ("here", "earlier")
    for location in (here, earlier):
        outer, inner = location["calls"]
        assert (outer["function"], inner["function"]) == ("", "fill")
        assert inner["source"].startswith("tlx.local_store(cell[0]")
    assert {location["calls"][0]["source"] for location in (here, earlier)} == {
        "fill(cell)", "fill(other)",
    }  # fmt: skip
    assert report["covered"]["search"] == search and report["covered"]["schedules"] > 1
    assert finding["replay"] in printed and finding["schedule"] != "modelled"

    # The pictures are of the failing schedule; the command shows the finding again.
    assert files["svg"].read_text().startswith("<svg")
    assert "Race in order_kernel" in files["html"].read_text()
    assert finding["message"].split()[0] in files["html"].read_text()
    _, _, module, *rest = shlex.split(finding["replay"])
    assert module == "tritonemu"
    assert main(rest) == 1
    assert capsys.readouterr().err == printed


@pytest.mark.tlx
def test_a_deadlock_shows_the_source_of_each_wait(script, tmp_path, capsys):
    assert main([f"{script}:waiting", "--json", str(tmp_path / "r.json")]) == 1
    assert "default of CTA 0: " in capsys.readouterr().err
    finding = json.loads((tmp_path / "r.json").read_text())["found"]
    assert finding["kind"] == "Deadlock"
    *_, waits, allocation = finding["places"]
    assert (waits["what"], allocation["what"]) == ("default of CTA 0", "barrier")
    assert waits["calls"][-1]["source"] == "tlx.barrier_wait(done, 0)"
    assert allocation["calls"][-1]["source"] == "done = tlx.alloc_barriers(1)"


@pytest.mark.tlx
@pytest.mark.parametrize(
    "function, kind, wanted",
    [
        ("too_few", "Deadlock", {"arrival of task0 of CTA 0": "tlx.barrier_arrive(full)"}),
        (
            "too_many",
            "BarrierMisuse",
            {"arrival of default of CTA 0": "tlx.barrier_arrive(full, 2)"},
        ),
        ("missed", "BarrierMisuse", {"wait of default of CTA 0": "tlx.barrier_wait(full, 0)"}),
    ],
)
def test_a_barrier_shows_where_it_is_made_and_who_comes(function, kind, wanted, tmp_path):
    path = tmp_path / "barriers.py"
    path.write_text(textwrap.dedent(BARRIERS))
    assert main([f"{path}:{function}", "--json", str(tmp_path / "r.json")]) == 1
    finding = json.loads((tmp_path / "r.json").read_text())["found"]
    assert finding["kind"] == kind
    shown = {location["what"]: location["calls"][-1]["source"] for location in finding["places"]}
    wanted = wanted | {"barrier": "full = tlx.alloc_barriers(1, arrive_count=COUNT)"}
    assert wanted.items() <= shown.items()


@pytest.mark.tlx
def test_unwritten_memory_may_be_allowed(script, capsys):
    assert main([f"{script}:unwritten"]) == 1
    assert capsys.readouterr().err.startswith("UninitializedRead (schedule modelled): ")
    assert main([f"{script}:unwritten", "--allow-uninitialized"]) == 0


@pytest.mark.tlx
def test_a_timeline(script, tmp_path, capsys):
    drawing = tmp_path / "drawing.svg"
    assert main([f"{script}:handed", "--svg", str(drawing)]) == 0
    out = capsys.readouterr().out
    assert "warps: default 4, task0 4; shared memory 72 bytes, tensor memory 0 columns" in out
    assert drawing.read_text().startswith("<svg")
    for name in ("local_load cell[0]", "wait full", "arrive full"):
        assert f"<title>{name}: cycles " in drawing.read_text()


@pytest.mark.tlx
def test_a_report_without_a_finding(script, tmp_path, capsys):
    files = tmp_path / "r.json", tmp_path / "r.html"
    options = ["--search", "exhaustive", "--json", str(files[0]), "--html", str(files[1])]
    assert main([f"{script}:right", *options]) == 0
    assert json.loads(files[0].read_text()) == {
        "found": None,
        "notes": [],
        "allowed": [],
        "unjudged": [],
        "unwrapped": [],
        "covered": {
            "search": "exhaustive", "schedules": 2, "exhausted": True, "classes": 1,
            "redundant": 0,
        },
    }  # fmt: skip
    assert "1 class of interleavings, in 2 executions" in capsys.readouterr().out


@pytest.mark.tlx
def test_a_program_that_fails_names_its_schedule(script, capsys):
    assert main([f"{script}:wrong"]) == 3
    *_, error, again = capsys.readouterr().err.splitlines()
    assert error == "AssertionError" and again.endswith(f"--schedule modelled {script}:wrong")


LOST = """
    import torch, triton
    import triton.language as tl

    @triton.jit
    def kernel(sum_ptr):
        for i in range(4 * tl.program_id(0)):  # under the modelled schedule it comes later
            tl.atomic_add(sum_ptr, 0)
        before = tl.atomic_add(sum_ptr, 0)
        tl.atomic_xchg(sum_ptr, before + 1)

    def main():
        total = torch.zeros(1, dtype=torch.int32)
        kernel[(2,)](total)
        assert int(total) == 2, f"the sum is {int(total)}"

    @triton.jit
    def broken_kernel(sum_ptr):
        tl.store(sum_ptr, undefined_name)

    def broken():
        broken_kernel[(1,)](torch.zeros(1))
"""


@pytest.mark.parametrize("search", ("random", "exhaustive"))
def test_a_result_that_depends_on_the_schedule_is_a_finding(tmp_path, capsys, search):
    path, report = tmp_path / "lost.py", tmp_path / "report.json"
    path.write_text(textwrap.dedent(LOST), encoding="utf-8")
    arguments = ["--resident", "2", "--search", search, "--schedules", "20"]
    assert main([*arguments, "--json", str(report), f"{path}:main"]) == 1
    assert "the sum is 1" in capsys.readouterr().err
    finding = json.loads(report.read_text())["found"]
    assert (finding["kind"], finding["kernel"]) == ("WrongResult", "kernel")
    assert main(shlex.split(finding["replay"])[3:]) == 1
    assert "the sum is 1" in capsys.readouterr().err


def test_a_kernel_that_fails_names_its_schedule_too(tmp_path, capsys):
    path, report = tmp_path / "lost.py", tmp_path / "report.json"
    path.write_text(textwrap.dedent(LOST), encoding="utf-8")
    assert main(["--json", str(report), f"{path}:broken"]) == 1
    finding = json.loads(report.read_text())["found"]
    assert (finding["kind"], finding["schedule"]) == ("InvalidKernel", "modelled")
    assert finding["places"][0]["calls"][-1]["source"] == "tl.store(sum_ptr, undefined_name)"


DRAWN = """
    import torch, triton
    import triton.language as tl
    import triton.language.extra.tlx as tlx
    from triton.tools.tensor_descriptor import TensorDescriptor

    @triton.jit
    def kernel(desc, y, EARLY: tl.constexpr, COUNT: tl.constexpr):
        tiles = tlx.local_alloc((64,), tl.float32, 2)
        full = tlx.alloc_barriers(2, arrive_count=COUNT)
        empty = tlx.alloc_barriers(2)
        with tlx.async_tasks():
            with tlx.async_task("default"):
                for i in tl.range(12):
                    tlx.barrier_wait(empty[i % 2], (i // 2 + 1) % 2)
                    tlx.barrier_expect_bytes(full[i % 2], 4 * 64)
                    tlx.async_descriptor_load(desc, tiles[i % 2], [i * 64], full[i % 2])
            with tlx.async_task(num_warps=4):
                for i in tl.range(12):
                    tlx.barrier_wait(full[i % 2], i // 2 % 2)
                    if EARLY:
                        tlx.barrier_arrive(empty[i % 2])
                    tile = tlx.local_load(tiles[i % 2])
                    if not EARLY:
                        tlx.barrier_arrive(empty[i % 2])
                    tl.store(y + i * 64 + tl.arange(0, 64), tile)

    def launch(early, count):
        x = TensorDescriptor.from_tensor(torch.ones(64 * 12), [64])
        kernel[(1,)](x, torch.zeros(64 * 12), early, count)

    def early():
        launch(True, 1)

    def count():
        launch(False, 2)

    @triton.jit
    def last(y):
        tl.store(y + tl.arange(0, 4), tl.program_id(0))

    def last_one():
        last[(3,)](torch.zeros(4))
"""


def _figure(tmp_path, function):
    """(description, what its pins are at, the drawing) of the finding of a function."""
    path, drawing = tmp_path / "drawn.py", tmp_path / "drawn.svg"
    path.write_text(textwrap.dedent(DRAWN), encoding="utf-8")
    assert main([f"{path}:{function}", "--svg", str(drawing)]) == 1
    svg = drawing.read_text()
    description = re.search(r"<desc>(.*)</desc>", svg)[1]
    return description, re.findall(r'<circle class="mark" cx="([\d.]+)" cy="([\d.]+)"', svg), svg


@pytest.mark.tlx
def test_the_figure_of_a_race_marks_both_accesses_and_what_is_missing(tmp_path):
    description, pins, svg = _figure(tmp_path, "early")
    lines = DRAWN.splitlines()
    load, read = (
        next(i for i, line in enumerate(lines, 1) if text in line)
        for text in ("async_descriptor_load(", "local_load(")
    )
    assert f"1: task0 of CTA 0 reads tiles[0], line {read}." in description
    assert f"2: copy issued by default of CTA 0 writes tiles[0], line {load}." in description
    assert description.endswith("Nothing orders 1 and 2.") and svg.count('class="unordered"') == 1
    lanes = dict(re.findall(r'<text x="0" y="([\d.]+)">([\w ]+)</text>', svg))
    lanes = {name: float(y) for y, name in lanes.items()}
    (x1, y1), (x2, y2), *legend = [tuple(map(float, pin)) for pin in pins]
    assert len(legend) == 2 and all(x == 9 for x, _ in legend)
    assert abs(y1 - lanes["task0"]) < 6 and y2 > lanes["TMA"] - 6
    copy = re.findall(r"<title>tiles\[0\]: cycles ([\d.]+) to ([\d.]+)", svg)[-1]
    start, scale = (float(re.search(rf'data-{x}="([\d.]+)"', svg)[1]) for x in ("start", "scale"))
    origin = float(re.search(r'data-x="([\d.]+)"', svg)[1])
    left, right = (origin + (float(cycle) - start) * scale for cycle in copy)
    assert left <= x2 <= right, "the second pin is in the copy that overwrites the buffer"


@pytest.mark.tlx
def test_the_figure_of_a_race_of_two_programs_shows_both(tmp_path):
    description, pins, svg = _figure(tmp_path, "last_one")
    assert description.startswith("CTAs 0 and 1, modelled cycles")
    assert "Lanes: CTA 0 default, CTA 1 default." in description
    assert (
        "1: default of CTA 0 writes y" in description
        and "2: default of CTA 1 writes y" in description
    )
    assert len({y for _, y in pins[:2]}) == 2 and "nothing orders 1 and 2</title>" in svg


@pytest.mark.tlx
def test_the_figure_of_a_deadlock_marks_each_wait(tmp_path):
    description, pins, svg = _figure(tmp_path, "count")
    assert "1: default of CTA 0 waits for phase 0 of empty[0]" in description
    assert (
        "2: task0 of CTA 0 waits for phase 0 of full[0] of CTA 0, which misses 1 arr" in description
    )
    assert len(pins) == 4 and svg.count('<rect class="missing"') == 2
