"""Widgets of a page: HTML that a script of book/assets fills, with its data in it.

A page from the disk may not fetch a file, so the data are part of it. Without scripts a widget
shows nothing, and the static figure above it stays.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd
from IPython.display import HTML

from gdpa_lab.measuring.roofline import Ceilings
from gdpa_lab.measuring.workloads import workload

BATCH, HEADS, HEAD_DIM = 1152, 4, 128
"""Sequences, heads and head dimension of the published charts."""
WHOLE = 128
"""Rows of a whole tile, as in the edits of the chapter on the gap."""


def widget(script: str, data: Mapping[str, Any], title: str) -> HTML:
    """A box that book/assets/`script`.js fills from `data`; `title` is for screen readers."""
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    return HTML(
        f'<div class="widget" role="group" aria-label="{html.escape(title)}">'
        f'<script type="application/json">{text}</script></div>'
        f'<script src="../../_static/{script}.js" defer></script>'
    )


def roofline(ceilings: Ceilings, rows: pd.DataFrame, impls: Sequence[str], origin: str) -> HTML:
    """The roofline with sliders for tokens and keys, and measured kernels as ghosts.

    `rows`: of `results.table`, forward passes; drawn are those of `impls` on full batches in the
    published heads.
    `origin`: where ceilings and rates come from.
    """
    kernels = []
    for row in rows[rows["impl"].isin(impls)].itertuples():
        work = workload(row.workload)
        heads = work.num_heads_q, work.num_heads_k, work.head_dim
        if heads != (HEADS, HEADS, HEAD_DIM) or work.masked or work.fill < 1:
            continue
        kernels.append({
            "impl": row.impl, "workload": row.workload, "tflops": float(row.tflops),
            "intensity": work.flops("forward") / work.bytes("forward"),
            "queries": work.max_seqlen_q, "keys": work.max_seqlen_k,
        })  # fmt: skip
    if not kernels:
        raise ValueError(f"rows must hold published forward rows of {list(impls)}, got none")
    data = asdict(ceilings) | {
        "batch": BATCH, "heads": HEADS, "head_dim": HEAD_DIM,
        "queries": 1024, "keys": 1024, "kernels": kernels,
        "note": f"Dots: kernels as measured. Dot with a line: the bracket of the shape. {origin}",
    }  # fmt: skip
    return widget("roofline", data, "A roofline with sliders for tokens and keys")


def padding(
    fits: Mapping[str, Sequence[float]],
    sizes: Mapping[str, tuple[int, int]],
    *,
    longest: int,
    lengths: Sequence[int],
    origin: str,
) -> HTML:
    """A calculator of fill, padding and the gap of each kernel from a reader's own lengths.

    fits: by kernel, what a tile and a block of keys cost. sizes: by kernel, rows of a tile and keys
    of a block. longest: the length that a gap compares with. lengths: an example. origin: of fits.
    """
    data = {
        "kernels": [
            {"name": name, "c0": float(c0), "c1": float(c1)}
            | dict(zip(("rows", "keys"), sizes[name], strict=True))
            for name, (c0, c1) in fits.items()
        ],
        "longest": longest,
        "whole": WHOLE,
        "lengths": [int(n) for n in lengths],
        "note": f"{origin} Bytes, which limit the shortest histories, are left out.",
    }
    return widget("gap", data, "A calculator of padding and gaps")
