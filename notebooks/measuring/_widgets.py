"""Widgets of a page: HTML that a script of book/assets fills, with its data in it.

A page from the disk may not fetch a file, so the data are part of it. Without scripts a widget
shows nothing.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from IPython.display import HTML

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
