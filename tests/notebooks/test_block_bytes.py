"""Bytes of kernels of block attention by the names of their tensors."""

from dataclasses import replace

import pandas as pd
import pytest

from _lib import block_bytes
from gdpa_lab.measuring.roofline import Ceilings
from gdpa_lab.measuring.workloads import workload

WORK = workload("block-fill70-2000")
ONE_TILE = {"forward": [("q k v", "out")], "backward": [("q k v dO", "dq dk dv")]}


@pytest.mark.parametrize("work", (WORK, replace(WORK, name="grouped", num_heads_k=1)))
@pytest.mark.parametrize("direction", ("forward", "backward"))
def test_one_tile_moves_what_the_workload_counts(work, direction):
    counted = work.bytes_read(direction), work.bytes_written(direction)
    assert block_bytes.moved(ONE_TILE[direction], work) == counted


def test_rows_of_four_bytes_and_kernels_add_up():
    kernels = [("dO out", "D"), *ONE_TILE["backward"]]
    assert block_bytes.tensors(kernels, WORK) == 9 + 4 / (2 * WORK.head_dim)
    limits = Ceilings(tflops=700.0, copies=((1.0, 4000.0), (3.0, 4500.0)))
    parts = [block_bytes.floor_us([kernel], WORK, limits) for kernel in kernels]
    assert block_bytes.floor_us(kernels, WORK, limits) == pytest.approx(sum(parts))
    read, written = block_bytes.moved(kernels[:1], WORK)
    assert parts[0] == (read + written) / 4500.0 / 1e3


def test_the_charts_are_drawn():
    drawn = block_bytes.boxes({"a": ONE_TILE["forward"], "b": ONE_TILE["backward"]}, WORK, "a")
    assert len(drawn.axes[0].patches) == 11
    grid = pd.DataFrame([[0.0, 1.0], [0.5, 0.0]])
    drawn = block_bytes.cells(
        {"x": grid}, xlabel="key", ylabel="query", frames=[(0, 2, "all")], numbers={"x": grid}
    )
    assert len(drawn.axes[0].patches) == 5
