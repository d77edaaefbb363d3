"""Requirements on a reader's GPU: those of rungs, and the memory of a call and of its check."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from gdpa_kernels.calling import ladder
from gdpa_lab.measuring import operators
from gdpa_lab.measuring.record import Record
from gdpa_lab.measuring.workloads import WORKLOADS, workload


def support() -> str:
    """Table of what each rung of the forward ladder requires of the GPU and of the call, in HTML
    that scrolls on a phone."""
    rows = []
    for rung in (*ladder.RUNGS, *ladder.BLACKWELL_RUNGS):
        wants = rung.requires
        devices = "sm_{}{}".format(*wants.capability) if wants.capability else "any"
        if wants.capability and not wants.only_major:
            devices += " or newer"
        dims = "any" if wants.head_dim_max > 1024 else f"up to {wants.head_dim_max}"
        if wants.head_dim_multiple > 1:
            dims += f", multiples of {wants.head_dim_multiple}"
        strides = "multiples of 16 bytes" if wants.aligned else "any"
        rows.append((f"<code>{rung.impl}</code>", devices, ", ".join(wants.dtypes), dims, strides))
    table = pd.DataFrame(rows, columns=["impl", "device", "dtypes", "head_dim", "strides"])
    text = table.to_html(index=False, border=0, classes="table", escape=False, justify="left")
    return f'<div style="overflow-x: auto">{text}</div>'


def check_bytes(name: str) -> int:
    """Device memory while the oracle is computed: bf16 inputs, output and its gradient; of a part
    of the batch, at most `Gdpa.PART` tokens, fp64 inputs and output, and the output's pieces before
    they are joined."""
    work = workload(name)
    row = work.num_heads_q * work.head_dim
    query, keys = work.total_q * row, work.total_k * row
    part = min(operators.Gdpa.PART, max(work.total_q, work.total_k)) * row
    return (3 * query + 2 * keys) * 2 + 5 * part * 8


def heaviest(runs: Sequence[Record]) -> str:
    """The workload of `gdpa` in `runs` whose check needs most memory."""
    names = sorted({row.workload for run in runs for row in run.rows} & WORKLOADS.keys())
    return max(names, key=check_bytes)


def gigabytes(run: Record, runs: Sequence[Record]) -> dict[str, float]:
    """Memory that book/reproduce.md states, in GB: of a call on the longest published shape in
    `run`, alone and with its inputs, and of the checks of all `runs`."""
    name = "gdpa-self-full-2048"
    held = workload(name).bytes_read("forward")
    peaks = {
        row.impl: row.peak_bytes
        for row in run.rows
        if row.workload == name and row.scope == "kernel" and row.samples_us and not row.variant
    }
    fused = (size for impl, size in peaks.items() if impl[0] == "v" and impl != "v0_eager")
    sizes = {
        "v0_peak_gb": peaks["v0_eager"],
        "inputs_gb": held,
        "rung_peak_gb": max(fused),
        "v0_total_gb": peaks["v0_eager"] + held,
        "compile_total_gb": peaks["torch_compile"] + held,
        "check_gb": check_bytes(heaviest(runs)),
        "check_2048_gb": check_bytes(name),
    }
    return {key: size / 1e9 for key, size in sizes.items()}
