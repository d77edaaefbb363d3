"""A module with pieces of its source replaced, and such a module measured in a rung's place."""

import linecache
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

import tritonemu
from _lib import studies
from gdpa_kernels.block_attention.kernels import v1_one_tile
from gdpa_kernels.gdpa.device import tensor_memory
from gdpa_kernels.gdpa.kernels import b1_tensor_memory_backward as b1
from gdpa_kernels.gdpa.kernels import v1_tiled, v4_warp_specialized_backward, v5_short_kv_backward
from gdpa_kernels.gdpa.ladder import v2_fused_backward
from gdpa_lab.measuring import measure, timing
from gdpa_lab.measuring.inputs import make_inputs
from gdpa_lab.measuring.length_distributions import Full
from gdpa_lab.measuring.workload import Workload
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import style

SMALL = replace(
    workload("gdpa-self-half-jagged-256"), name="small", batch=2, max_seqlen_q=9, max_seqlen_k=9
)

BLOCKS = Workload(
    name="blocks", operator="block_attention", batch=2, num_heads_q=2, num_heads_k=2, head_dim=32,
    max_seqlen_q=70, max_seqlen_k=70, lengths_q=Full(), block_size=32,
)  # fmt: skip


def test_every_change_is_made_and_the_module_stays_as_it_is():
    text = style.__doc__
    made = studies.changed(style, (f'"""{text}"""', '"""One."""'), ('"""One."""', '"""Two."""'))
    assert made.__doc__ == "Two." and style.__doc__ == text


def test_what_modules_share_is_changed_for_one_of_them():
    change = ("p.buffer[2 * role]", "p.buffer[role]")
    made = studies.changed(b1, change, shared=tensor_memory)
    assert change[1] in made.store_p.src and change[0] in b1.store_p.src
    assert made.math.src == b1.math.src
    assert made.math.fn.__globals__["store_p"] is made.store_p
    with pytest.raises(ValueError, match="old must occur once in .*tensor_memory_backward"):
        studies.changed(b1, change)


def test_a_finding_names_a_file_without_its_folder_and_quotes_the_line_of_a_cell(monkeypatch):
    cell, lines = "/tmp/ipykernel_1/42.py", ["k = 1\n", "    tlx.barrier_wait(empty[k], 1)\n"]
    monkeypatch.setitem(linecache.cache, cell, (1, None, lines, cell))

    def call():
        raise tritonemu.EmulatorError(f"{cell}:2: a wait, see {style.__file__}:7")

    (text,) = studies.findings(call, ["modelled"])
    assert text == "EmulatorError: `tlx.barrier_wait(empty[k], 1)`: a wait, see style.py:7"


@pytest.mark.parametrize("old", ("no such line of it", "\n"))
def test_what_does_not_occur_once_is_refused(old):
    with pytest.raises(ValueError, match="old must occur once in gdpa_lab.report.style, got"):
        studies.changed(style, (old, "new"))


@pytest.mark.parametrize("given", ({}, {"config": v1_tiled.Config(BLOCK_M=16, BLOCK_N=16)}))
def test_a_changed_module_is_checked_and_timed_like_the_rung(monkeypatch, given):
    timed = []

    def sample(functions, device, protocol):
        timed.extend(functions)
        return dict.fromkeys(functions, [1.0])

    monkeypatch.setattr(measure, "run_once", lambda ready: (ready.call(), 0))
    monkeypatch.setattr(timing, "sample_kernels", sample)
    same = studies.changed(v1_tiled)
    wrong = studies.changed(v1_tiled, ("return out", "return -out"))
    listed = [
        ("v1_tiled", "as it is", {**given, "module": None}),
        ("v1_tiled", "a copy", {**given, "module": same}),
        ("v1_tiled", "wrong", {**given, "module": wrong}),
    ]
    with tritonemu.enabled():
        rows = measure.measure(SMALL, listed, device=torch.device("cpu"), log=lambda text: None)
    right = [row for row in rows if row.failure is None]
    assert [row.variant for row in right] == ["as it is", "a copy"]
    own = v1_tiled.Config()
    assert all(row.config == asdict(given.get("config", own)) for row in right)
    assert timed == ["v1_tiled as it is", "v1_tiled a copy"]


@pytest.mark.parametrize("rung", (v4_warp_specialized_backward, v5_short_kv_backward))
def test_a_changed_backward_gets_a_schedule_of_its_own(rung):
    made_for = []

    def backward(grad_out, batch, **given):
        return grad_out, batch, given

    def work_list_recipe(batch, config):
        made_for.append((batch, config))
        return SimpleNamespace(make=lambda *offsets: ("its own",))

    module = SimpleNamespace(backward=backward, work_list_recipe=work_list_recipe)
    inputs, config = make_inputs(SMALL, device="cpu"), rung.Config()
    impl, options = rung.__name__.split(".")[-1], {"direction": "backward", "config": config}
    with tritonemu.enabled():
        made = measure.candidate(impl, inputs, module=module, variant="changed", **options)
    grad_out, batch, given = made.call()
    assert (made.impl, made.variant, made.config) == (impl, "changed", asdict(config))
    assert grad_out is inputs.grad_out and batch.q is inputs.q
    assert given == {"config": config, "work_list": ("its own",)}
    assert made_for == [(batch, config)]


@pytest.mark.parametrize("direction", ("forward", "backward"))
def test_a_changed_module_of_block_attention(direction):
    inputs = make_inputs(BLOCKS, device="cpu")
    change = ("return dq, dk, dv", "return dq, dk, -dv")
    text = "return out, ()", "return -out, ()"
    module = studies.changed(v1_one_tile, change if direction == "backward" else text)
    with tritonemu.enabled():
        made = [
            measure.candidate("v1_one_tile", inputs, direction=direction, **options).call()
            for options in ({}, {"module": module})
        ]
    last = [results if direction == "forward" else results[-1] for results in made]
    assert torch.equal(last[0], -last[1]) and last[0].any()


@pytest.mark.parametrize("rung", (v2_fused_backward, v5_short_kv_backward))
def test_a_backward_in_the_emulator_says_what_it_launched_and_is_compared(rung):
    given = studies.batch((65,), (130,), head_dim=128)
    found = studies.backward(rung, given, multiprocessors=2)
    assert set(found.reports) <= set(found.launched)
    assert all(report.dots >= 0 for report in found.reports.values())
    errors = studies.compare_gradients(found.gradients, given)
    assert list(errors.index) == list(studies.GRADIENTS)
    assert (errors["% of allowed"] <= 100).all()
    wrong = (-found.gradients[0], *found.gradients[1:])
    with pytest.raises(AssertionError, match="dq"):
        studies.compare_gradients(wrong, given)


def test_kernels_of_a_backward_are_compiled_by_name():
    given = studies.batch((64,), head_dim=64)
    kernel = studies.build_backward(v2_fused_backward, "fused_kernel", inputs=given)
    facts = studies.facts({"v2": kernel}, ("HGMMA",))
    assert facts["HGMMA"][0] > 0 and facts["kernel"][0] == "v2"
    with pytest.raises(ValueError, match="kernel must be one of .*fused_kernel.*, got 'none'"):
        studies.build_backward(v2_fused_backward, "none", inputs=given)


def test_a_piece_of_a_source_ends_before_the_next_one():
    found = studies.piece(v1_tiled, "@triton.jit", "\n\n\n")
    assert found.startswith("@triton.jit(") and "\n\n\n" not in found
    studies.changed(v1_tiled, (studies.piece(v1_tiled, '"""v1', '"""\n'), '"""'))
    with pytest.raises(ValueError, match="substring not found"):
        studies.piece(v1_tiled, "no such text", "")


def a_session(**parts):
    """A session that launches whatever it is asked to."""

    def launch(name, work, rungs, run, direction="forward"):
        run(make_inputs(work, device="cpu"))

    return SimpleNamespace(device="cpu", protocol=None, launch=launch, **parts)


def test_measure_lists_adds_a_row_for_each_clock(monkeypatch):
    def sample(makers, device, protocol):
        return {name: [1.0, 2.0] for name in makers}

    monkeypatch.setattr(timing, "sample_kernels", sample)
    monkeypatch.setattr(timing, "sample_ops", sample)
    rows = []
    session = a_session(add=lambda work, *added: rows.extend(added))
    studies.measure_lists(session, SMALL, "v3_persistent", {"zigzag": id})
    assert [row.variant for row in rows] == ["zigzag, device time", "zigzag, host time"]
    assert {(row.scope, row.impl, len(row.samples_us)) for row in rows} == {
        ("schedule", "v3_persistent", 2)
    }


def test_runs_of_a_backward_are_compared_with_the_first():
    results = iter([torch.zeros(3, 2)] * 3 for _ in range(2))
    moved = [torch.zeros(3, 2), torch.zeros(3, 2), torch.tensor([[0, 0], [0, 0.5], [0, 0]])]
    returned = [next(results), moved, next(results)]
    found = studies.differences(lambda: returned.pop(0), 3)
    assert [row for row in found if row[2]] == [("dv", 1, 1, 6, 0.5)]
    assert len(found) == 2 * 3


def test_rungs_are_repeated_into_a_table_of_the_session():
    session = a_session(tables={})
    listed = [("v1_tiled_backward", "default", {})]
    with tritonemu.enabled():
        for _ in range(2):
            studies.repeat_backward(session, SMALL, listed, runs=2)
    table = session.tables["bits"]
    assert [row[:5] for row in table.rows[:3]] == [
        ("small", "v1_tiled_backward", "default", name, 1) for name in studies.GRADIENTS
    ]
    assert len(table.rows) == 2 * 3
    assert all(row[table.columns.index("different")] == 0 for row in table.rows)
