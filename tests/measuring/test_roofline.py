"""Roofline: hand-computed brackets and the interpolation of copy rates."""

import math

import pytest

from gdpa_lab.measuring.roofline import Ceilings, bracket
from gdpa_lab.measuring.workloads import BLOCK_WORKLOADS, WORKLOADS, workload
from tests.records import SHORT

CEILINGS = Ceilings(tflops=800.0, copies=((1.0, 4000.0), (3.0, 4400.0)))


def test_copy_rate_is_linear_between_mixes_and_clamped_outside():
    rates = {
        (100, 100): 4000, (300, 100): 4400,
        (200, 100): 4200,  # halfway between 1:1 and 3:1
        (125, 100): 4050, (0, 100): 4000, (50, 100): 4000, (400, 100): 4400, (100, 0): 4400,
    }  # fmt: skip
    assert {mix: CEILINGS.gbytes_per_s(*mix) for mix in rates} == pytest.approx(rates)
    assert Ceilings(1.0, ((1.0, 7.0),)).gbytes_per_s(9, 1) == 7


MIXED = Ceilings(800.0, ((1.0, 4000.0), (4 / 3, 4500.0), (2.0, 4200.0), (3.0, 4400.0)))
OWN = Ceilings(800.0, ((1.0, 4000.0), (4 / 3, 4100.0), (2.0, 4200.0)))
FILL70, CROSS = workload("block-fill70-2000"), workload("gdpa-cross-full-2048")


@pytest.mark.parametrize(
    ("work", "direction", "ceilings", "expected"),
    [
        # 154,618,822,656 FLOPs / 800e12 per s; 3 tensors read per one written: 1,207,959,552 bytes
        # / 4400e9 per s
        (SHORT, "forward", CEILINGS,
         {"compute_us": 193.27352832, "memory_us": 274.53626182, "lower_us": 274.53626182,
          "bound": "memory", "upper_us": 467.80979014, "tflops_at_lower": 563.2}),
        # 10 x 4 x 128 x 1152 x 2048^2 = 24,739,011,624,960 FLOPs / 800e12; 4 tensors read per 3
        # written: mix 4/3, so 4000 + 400 x (1/3) / 2 = 4066.667 GB/s; 7 x 2,415,919,104 bytes
        (workload("gdpa-self-full-2048"), "backward", CEILINGS,
         {"compute_us": 30_923.7645312, "memory_us": 16_911_433_728 / 4_066_666.6667,
          "lower_us": 30_923.7645312, "bound": "compute", "tflops_at_lower": 800.0}),
        # a copy of the same mix; seven tensors of 1,609,664 rows x 4 heads x 128 x 2 bytes
        (FILL70, "backward", MIXED, {"memory_us": 7 * 1_609_664 * 1024 / 4.5e6, "bound": "memory"}),
        (FILL70, "forward", MIXED, {"memory_us": 4 * 1_609_664 * 1024 / 4.4e6}),
        # a record from before has no such copy: between its neighbours
        (FILL70, "backward", CEILINGS, {"memory_us": 7 * 1_609_664 * 1024 / 4_066_666.6667}),
        # 2.5 x 154,618,822,656 FLOPs / 800e12; 7 tensors of 301,989,888 bytes, 4 read, 3 written
        (SHORT, "backward", OWN,
         {"compute_us": 483.1838208, "memory_us": 7 * 301_989_888 / 4.1e6, "bound": "memory"}),
        # 10 x 4 x 128 x 1152 x 2048 x 256 FLOPs; read Q, dO (2048 rows), K, V (256); written dQ,
        # dK, dV: 18 : 10 eighths, a mix of 1.8, which is 0.7 of the way from 4 : 3 to 2 : 1; a row
        # is 1152 x 4 x 128 x 2 bytes
        (CROSS, "backward", OWN,
         {"compute_us": 3_092_376_453_120 / 800e6,
          "memory_us": 1_179_648 * (2 * 2048 + 2 * 256 + 2048 + 2 * 256) / 4.17e6,
          "bound": "compute", "tflops_at_lower": 800.0}),
    ],
)  # fmt: skip
def test_brackets_by_hand(work, direction, ceilings, expected):
    found = bracket(work, direction, ceilings)
    for name, value in expected.items():
        right = value if name == "bound" else pytest.approx(value)
        assert getattr(found, name) == right, name
    assert found.percent_of_roofline(2 * found.lower_us) == pytest.approx(50)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_bracket_is_ordered(direction):
    for name in (*WORKLOADS, *BLOCK_WORKLOADS):
        b = bracket(workload(name), direction, CEILINGS)
        assert 0 < b.lower_us < b.upper_us <= 2 * b.lower_us, name
        assert b.tflops_at_lower <= CEILINGS.tflops * (1 + 1e-12), name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ceilings(0.0, ((1.0, 1.0),)), "tflops must be a positive number, got 0.0"),
        (lambda: Ceilings(math.nan, ((1.0, 1.0),)), "tflops must be a positive number, got nan"),
        (lambda: Ceilings(1.0, ()), r"copies must be a non-empty tuple .*, got \(\)"),
        (lambda: Ceilings(1.0, ((1.0, -1.0),)), "copies must be a non-empty tuple"),
        (lambda: Ceilings(1.0, ((1.0,),)), "copies must be a non-empty tuple"),
        (lambda: Ceilings(1.0, ((3.0, 1.0), (1.0, 2.0))), "copies must have strictly rising"),
        (lambda: CEILINGS.gbytes_per_s(0, 0), "read and written must be .*, got 0 and 0"),
        (lambda: CEILINGS.gbytes_per_s(-1, 2), "read and written must be .*, got -1 and 2"),
        (lambda: bracket(SHORT, "forward", CEILINGS).percent_of_roofline(0),
         "time_us must be a positive number, got 0"),
        (lambda: bracket(SHORT, "up", CEILINGS), "direction must be one of .*, got 'up'"),
    ],
)  # fmt: skip
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
