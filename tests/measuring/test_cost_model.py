"""The unit ledger against counts by hand."""

import subprocess
import sys
from dataclasses import replace

import pytest

from gdpa_lab.measuring import cost_model
from gdpa_lab.measuring.length_distributions import Full, Uniform
from gdpa_lab.measuring.roofline import Ceilings
from gdpa_lab.measuring.workload import Workload
from gdpa_lab.measuring.workloads import workload

CHIP = cost_model.Chip("a chip", sms=4, flops=1024)
SLOW_MATMUL = Ceilings(0.8192, ((1.0, 40000.0),))  # 4 SMs x 1024 FLOPs at 0.2 GHz
WORK = Workload(
    name="two", batch=2, num_heads_q=3, num_heads_k=3, head_dim=128, max_seqlen_q=256,
    max_seqlen_k=384, lengths_q=Full(), lengths_k=Full(),
)  # fmt: skip


def test_the_clock_is_that_of_the_matmul_ceiling():
    assert CHIP.clock_ghz(0.8192) == pytest.approx(0.2)
    assert cost_model.H200.clock_ghz(132 * 4096 * 1.5e-3) == pytest.approx(1.5)


def test_clocks_are_those_counted_by_hand():
    design = cost_model.Design(
        "d", CHIP, {"mma": 10.0, "smem": 4.0}, {"smem": 7.0}, {"smem": 5.0, "issue": 1.0}
    )
    found = cost_model.cost(WORK, design, SLOW_MATMUL)
    tiles, queries, keys = 2 * 3 * 2 * 3, 2 * 3 * 2, 2 * 3 * 3
    assert found.clocks == {
        "mma": 10 * tiles / 4, "smem": (4 * tiles + 7 * queries + 5 * keys) / 4, "issue": keys / 4,
    }  # fmt: skip
    assert (found.unit, found.bound) == ("mma", "mma")
    assert found.unit_us == pytest.approx(10 * tiles / 4 / 0.2 / 1e3)
    moved = 2 * 128 * 3 * 2 * (256 + 2 * 384 + 256)
    assert found.memory_us == pytest.approx(moved / 40000 / 1e3)
    assert found.tflops == pytest.approx(WORK.flops("forward") / found.us / 1e6)


def test_units_in_turns_add_up_and_a_start_comes_on_top():
    loop = {"mma": 10.0, "mufu": 8.0, "smem": 15.0}
    design = cost_model.Design("d", CHIP, loop)
    assert cost_model.cost(WORK, design, SLOW_MATMUL).unit == "smem"
    serial = cost_model.cost(WORK, replace(design, in_turns=("mma", "mufu")), SLOW_MATMUL)
    assert serial.unit == "mma+mufu"
    assert serial.unit_us == pytest.approx(18 * 36 / 4 / 0.2 / 1e3)
    begun = cost_model.cost(
        WORK, replace(design, in_turns=("mma", "mufu"), start_us=2.0), SLOW_MATMUL
    )
    assert begun.unit_us - serial.unit_us == pytest.approx(2.0 * 12 / 4)
    with pytest.raises(ValueError, match="in_turns must be among .*'mufu'.* got \\('tanh',\\)"):
        replace(design, in_turns=("tanh",))


def test_a_slow_memory_is_the_bound_and_kernels_around_add_to_either():
    design = cost_model.Design("d", CHIP, {"mma": 10.0})
    slow = Ceilings(0.8192, ((1.0, 0.5),))
    found = cost_model.cost(WORK, design, slow)
    assert found.bound == "memory" and found.us == found.memory_us > found.unit_us
    more = cost_model.cost(WORK, replace(design, row_bytes=100), slow)
    assert more.us - found.us == pytest.approx(100 * 2 * 256 * 3 / 0.5 / 1e3)


def test_lengths_are_padded_to_the_tile_of_the_design():
    jagged = replace(WORK, name="jagged", lengths_q=Uniform(0.5), batch=9)
    queries, keys, pairs = cost_model.counts(jagged, (256, 128))
    assert queries == 3 * 9 * 2, "every length of 1 to 256 takes a tile of 256"
    assert keys == 3 * 9 * 3 and pairs == 3 * 9 * 6
    narrow = sum(-(-n // 128) for n in jagged.seqlens_q)
    assert cost_model.counts(jagged)[0] == 3 * narrow < queries


def test_the_rows_of_the_table_of_the_study():
    """Clocks of a tile of pairs: MMA 2048 on Hopper and 1024 on Blackwell; shared memory as counted
    there from the operands."""
    assert cost_model.V8_STREAM.pairs["mma"] == 2048 and cost_model.PUBLISHED.pairs["mma"] == 1024
    assert (
        cost_model.V8_STREAM.pairs["smem"] == 1792 and cost_model.V8_RESIDENT.pairs["smem"] == 1280
    )
    assert (
        cost_model.PUBLISHED.pairs["smem"] == 1024 and cost_model.PUBLISHED.queries["smem"] == 768
    )
    assert cost_model.V8_STREAM.pairs["mufu"] == 1024
    backward = cost_model.backward("b", cost_model.B200, 448, 192)
    assert backward.pairs == {"mma": 2560, "smem": 3584} and backward.keys == {"smem": 1536}


@pytest.mark.parametrize(
    "work",
    [workload("block-fill70-2000"),
     *(replace(WORK, **change) for change in ({"causal": True}, {"window": 3}, {"head_dim": 64}))],
)  # fmt: skip
def test_what_it_cannot_count_it_refuses(work):
    with pytest.raises(ValueError, match="work must be GDPA of head_dim 128 without a mask, got"):
        cost_model.counts(work)


def test_it_needs_no_triton():
    code = "import sys; sys.modules['triton'] = None; import gdpa_lab.measuring.cost_model"
    subprocess.run([sys.executable, "-c", code], check=True)
