"""Compiles the products in plain Triton for GPUs that nobody measured: data/every_gpu.csv.

The kernels are compiled without a GPU and run in the emulator, not measured. AMD GPUs run none of
them yet: their kernels compile, and calls are refused (`rung.Requires`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pandas as pd
import torch

from gdpa_kernels.block_attention.batch import Batch as Blocks
from gdpa_kernels.block_attention.kernels import v1_one_tile
from gdpa_kernels.calling.launches import Launch, launches
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.kernels import v1_tiled, v1_tiled_backward
from gdpa_kernels.gdpa.mask import Mask
from gdpa_kernels.serving import diagonal, joined
from gdpa_lab.measuring import compile_check, files
from gdpa_lab.measuring.record import DATA_DIR

NAME = "every_gpu.csv"
TARGETS = (80, 86, 89, 120, "gfx942", "gfx950")
HEAD_DIMS = (64, 128, 256)
KEY = ["product", "direction", "head_dim", "target", "kernel"]
CONFIGURED = (v1_tiled_backward, v1_one_tile)  # by the shared memory that there is


def calls(head_dim: int) -> dict[tuple[str, str], Callable[[], object]]:
    """Build calls by product and direction, in bf16 with 4 heads, GELU and 1,024 tokens."""
    x, ends = torch.zeros(1024, 4, head_dim).bfloat16(), torch.tensor([0, 1024]).int()
    scale = head_dim**-0.5
    whole = partial(Batch, x, x, x, ends, ends, 1024, 1024, ("gelu_tanh",), scale)
    blocks, listed = Blocks(x, x, x, ends, scale), (torch.zeros(16, 2).int(),)
    scored, table = x[:64], (torch.arange(960), ends, 960)
    targets = {"mask": Mask("lower_right"), "segments": torch.tensor([[64, 0]]).int()}

    def candidates() -> None:
        joined.join(x.new_zeros(15, 2, 64, 4, head_dim), *table, scored, scored, ends, 64)
        v1_tiled.forward(whole(**targets))
        diagonal.add_diagonal(scored, scored, scored, scored.float())

    return {
        ("v1_tiled", "forward"): lambda: v1_tiled.forward(whole()),
        ("v1_tiled_backward", "backward"): lambda: v1_tiled_backward.backward(x, whole()),
        ("v1_one_tile", "forward"): lambda: v1_one_tile.forward(blocks, work_list=listed),
        ("v1_one_tile", "backward"): lambda: v1_one_tile.backward(x, blocks, (), work_list=listed),
        ("score", "forward"): candidates,
    }


def launched(call: Callable[[], object], target: int | str) -> list[Launch]:
    """Record what a call launches on a GPU with the shared memory of a target; nothing runs."""
    most = compile_check.SHARED_BYTES[target]
    with contextlib.ExitStack() as patches, launches(run=False) as seen:
        for module in CONFIGURED:
            patches.enter_context(mock.patch.object(module, "shared_memory", lambda device: most))
        call()
    return seen


def rows(
    targets: tuple[int | str, ...] = TARGETS, head_dims: tuple[int, ...] = HEAD_DIMS
) -> Iterator[dict]:
    """Yield the registers and spilled bytes per thread and the shared memory per program of each
    kernel. Raises OutOfResources for a kernel that does not fit."""
    for head_dim in head_dims:
        for (product, direction), call in calls(head_dim).items():
            for target in targets:
                for launch in launched(call, target):
                    compiled = compile_check.build_launch(launch, capability=target)
                    resources = compile_check.read(compiled)
                    name = f"sm_{target}" if isinstance(target, int) else target
                    key = product, direction, head_dim, name, launch.name
                    yield dict(zip(KEY, key, strict=True)) | {
                        "registers": resources.registers,
                        "spill_bytes": resources.spill_bytes,
                        "shared_bytes": resources.shared_bytes,
                    }


def table(data_dir: str | Path = DATA_DIR) -> pd.DataFrame:
    """Read the stored table."""
    return pd.read_csv(Path(data_dir) / NAME)


def update(data_dir: str | Path = DATA_DIR) -> bool:
    """Compile all kernels and write the table; return whether it changed."""
    text = pd.DataFrame(rows()).to_csv(index=False, lineterminator="\n")
    return files.rewrite(Path(data_dir) / NAME, text)
