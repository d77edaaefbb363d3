"""Engines: what they take, who waits for whom, and what a timeline says of it."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from emulator.tests.checking import B200, PAIR, tlx
from tritonemu import engines, run
from tritonemu.engines import Engine
from tritonemu.instructions import instruction_counts


def test_a_queue_serves_one_after_the_other():
    engine = Engine()
    assert engine.queue(10, 5) == (10, 15) and engine.queue(0, 5) == (15, 20)
    assert engine.queue(30, 5) == (30, 35) and engine.total == 15


def test_work_fits_into_gaps():
    engine = Engine()
    assert engine.fit(0, 10) == 10 and engine.fit(100, 10) == 110
    assert engine.fit(5, 50) == 60  # 10 to 60
    assert engine.fit(0, 45) == 115  # 60 to 100, and 5 after 110
    assert engine.fit(300, 0) == 300 and engine.total == 115


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 30)), max_size=40))
def test_no_cycle_is_given_twice(asked):
    """Whatever the order: work ends no earlier than it could alone, and the engine is busy for as
    many cycles as were asked for."""
    engine = Engine()
    for start, cycles in asked:
        end = engine.fit(start, cycles)
        assert end >= start + cycles
    spans = engine._busy
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
    assert sum(b - a for a, b in spans) == engine.total == sum(cycles for _, cycles in asked)


def test_what_is_forgotten_was_full():
    engine = Engine()
    for i in range(200):
        engine.fit(10 * i, 5)
    assert len(engine._busy) == engines._REMEMBERED
    assert engine.fit(0, 5) == 10 * (200 - engines._REMEMBERED)


def test_half_of_a_unit_at_least():
    engine = Engine()
    engine.fit(0, 1000)
    assert engine.share(0, 10) == 20 and engine.fit(0, 10) == 1020
    assert Engine().share(0, 10) == 10


def test_reading_is_spread_over_a_product():
    engine = Engine()
    assert engine.spread(0, 800, 400) == 750  # in each of 8 parts 50 of 100
    assert engine.fit(0, 100) == 200
    assert Engine().spread(0, 800, 1600) == 1600


def test_instructions_of_inline_assembly():
    packed = "{ .reg .b32 u; cvt.rn.bf16x2.f32 u, $3, $2; tanh.approx.bf16x2 $0, u; }"
    assert instruction_counts(packed) == (2, 2)
    fp32 = "mov.b64 a, {$2, $3}; mul.rn.f32x2 a, a, a; mov.b64 {$0, $1}, a;"
    assert instruction_counts(fp32) == (1, 0)


@triton.jit
def two_roles_kernel(out_ptr, TANH: tl.constexpr, BOTH: tl.constexpr):
    with tlx.async_tasks():
        with tlx.async_task("default"):
            x = tl.full((128, 128), 1.0, tl.float32)
            for _ in tl.static_range(8):
                x = tl.exp2(x) if TANH else x + 1.0
            tl.store(out_ptr, tl.max(tl.max(x, 0), 0))
        with tlx.async_task(num_warps=4):
            if BOTH:
                y = tl.full((128, 128), 1.0, tl.float32)
                for _ in tl.static_range(8):
                    y = tl.exp2(y) if TANH else y + 1.0
                tl.store(out_ptr + 1, tl.max(tl.max(y, 0), 0))


@pytest.mark.parametrize("tanh, least", ((True, 8 * 128 * 128 / 16), (False, 8 * 128 * 128 / 128)))
def test_roles_share_the_mufu_and_the_issue_slots(tanh, least):
    """Sixteen results of the MUFU a clock, 128 of everything, however many roles there are."""
    ends, busy = [], []
    for both in (False, True):
        out = torch.zeros(2)
        report = run(two_roles_kernel, (1,), out, TANH=tanh, BOTH=both, trace=True)
        ends.append(max(event.end for event in report.timeline.events))
        busy.append(report.timeline.busy[0]["MUFU" if tanh else "issue"])
    assert least <= busy[0] <= ends[0] < 1.6 * least
    assert busy[1] == 2 * busy[0] and ends[1] == pytest.approx(2 * ends[0], rel=0.01)


@triton.jit
def product_kernel(
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TENSOR: tl.constexpr, TWO: tl.constexpr
):  # fmt: skip
    b = tlx.local_alloc((128, COLUMNS // 2 if TWO else COLUMNS), tl.bfloat16, 1)
    acc = tlx.local_alloc((ROWS, COLUMNS), tl.float32, 1, tlx.storage_kind.tmem)
    if TENSOR:
        a = tlx.local_alloc((ROWS, 128), tl.bfloat16, 1, tlx.storage_kind.tmem)
    else:
        a = tlx.local_alloc((ROWS, 128), tl.bfloat16, 1)
    done = tlx.alloc_barriers(1)
    tlx.async_dot(a[0], b[0], acc[0], use_acc=False, mBarriers=[done[0]], two_ctas=TWO)
    tlx.barrier_wait(done[0], 0)


@pytest.mark.tlx
@pytest.mark.parametrize(
    "rows, columns, tensor, two, multiplies, reads",
    (
        (128, 128, False, False, 512, 64 * 8),
        (128, 128, True, False, 512, 32 * 8),
        (128, 64, False, False, 256, 48 * 8),  # waits for shared memory
        (64, 128, False, False, 512, 48 * 8),  # as long as 128 rows
        (128, 256, False, True, 1024, 64 * 8),  # A, and half of B
    ),
)
def test_a_product_takes_the_tensor_core_and_its_operands_the_port(
    rows, columns, tensor, two, multiplies, reads
):
    options = {"uninitialized": "allow", "trace": True, **B200, **(PAIR if two else {})}
    given_ = {"ROWS": rows, "COLUMNS": columns, "TENSOR": tensor, "TWO": two}
    trace = run(product_kernel, (1 + two,), **given_, **options).timeline
    (mma,) = (event for event in trace.events if event.kind == "mma")
    assert mma.end - mma.start == pytest.approx(max(multiplies, reads))
    for cta in range(1 + two):
        assert trace.busy[cta]["tensor core"] == multiplies
        assert trace.busy[cta]["shared memory"] == reads
