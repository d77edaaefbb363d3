"""What a name in a chart looks like: one display name, one colour, one dash, one mark.

A rung has its own hue on every page and in both directions. A baseline has one of three greys: of
FlashAttention, of cuDNN and PyTorch, of those that compute the same function; its dash says which
of them. A direction is a shape, and what was published is hollow. Hues of `SERIES` are of no
kernel: they tell the lines of one chart apart, and those of `SHARED` those of several.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from gdpa_lab.measuring.baselines import BASELINES, BLOCK_BASELINES
from gdpa_lab.report import style

MOST_COLOURED = 3
PUBLISHED = {
    "cutedsl_gdpa": "published kernel", "triton_gdpa": "published Triton GDPA",
    "cutlass_fmha": "CUTLASS FMHA", "cutedsl_fa4": "FlashAttention-4",
}  # fmt: skip
"""Names of the kernels of the published charts."""
SHARED = {
    "valid": 2, "zigzag": 1, "padded": 3, "longest_first": 4,
    "head_dim 64": 1, "head_dim 128": 0,
    **{f"{stem}self-full-{n}": i for stem in ("", "gdpa-") for i, n in
       enumerate((256, 512, 1024, 2048))},
    "gdpa-cross-full-1024": 4,
}  # fmt: skip
"""Position in `SERIES` of names that are no kernel and stand in several charts, or that a chart
must not colour by their order."""
_RUNG = re.compile(r"(?:(?:blackwell|forward|backward|block) )*[bv](\d+)(?!\d)", re.IGNORECASE)
_GREYS = (
    ("fa2", "fa3", "fa4", "flashattention", "best baseline"),
    ("cudnn", "torch", "flex", "cutlass fmha", "cutlass_fmha", "eager"),
    ("flashinfer", "gdpa_triton", "hstu", "published triton", "published kernel", "triton_gdpa",
     "cutedsl", "our rotary", "rotary_kernel"),
)  # fmt: skip
_DASHES = ((), (5, 2), (2, 1.5), (6, 1.5, 1.5, 1.5), (1, 1))
_LIBRARIES = ("3", "cudnn", "flashinfer", "4", "triton", "hstu", "2", "flex")


def display_name(impl: str, direction: str = "") -> str:
    """Return the name of an implementation on a page: "forward v8", "v8" without a direction,
    "Blackwell forward b3", or the title of a baseline or of a published kernel."""
    if style.is_rung(impl):
        number = impl.partition("_")[0]
        blackwell = "Blackwell " * (number.startswith("b") and bool(direction))
        return f"{blackwell}{direction} {number}".strip()
    known = BASELINES.get(impl) or BLOCK_BASELINES.get(impl)
    return known.title if known else PUBLISHED.get(impl, impl)


def rung_number(name: str) -> int | None:
    """Return the number of the rung that a label begins with, None if it is of none."""
    match = _RUNG.match(name)
    return int(match[1]) if match else None


def role_colour(name: str) -> str:
    """Return the colour of whatever has this name, an implementation or a label; INK if it is
    neither a kernel nor shared by several charts."""
    name = str(name)
    number, low = rung_number(name), name.lower()
    if number is not None:
        return style.RUNG_COLOURS[number % len(style.RUNG_COLOURS)]
    if name in SHARED:
        return style.SERIES[SHARED[name]]
    for grey, beginnings in zip(style.GREYS, _GREYS, strict=True):
        if low.startswith(beginnings):
            return grey
    return style.INK


def palette(names: Iterable[str], hue: str = "") -> dict[str, str]:
    """Assign a colour to each name: `role_colour`, or where that is INK the one of the
    implementation `hue`, or without one the next of `SERIES`, if no name is a kernel."""
    names = [*dict.fromkeys(names)]
    shades = {name: role_colour(name) for name in names}
    plain = [name for name in names if shades[name] == style.INK]
    if hue:
        return shades | dict.fromkeys(plain, role_colour(hue))
    plain = [name for name in plain if name not in ("forward", "backward")]
    if len(plain) < 2 or any(rung_number(str(name)) is not None for name in names):
        return shades
    taken = {SHARED[name] for name in names if name in SHARED}
    free = [shade for n, shade in enumerate(style.SERIES) if n not in taken]
    return shades | dict(zip(plain, free, strict=False))


def dash(name: str) -> Any:
    """Return the line style of a baseline."""
    if role_colour(name) not in style.GREYS:
        return "-"
    low = name.lower()
    number = next((n for n, part in enumerate(_LIBRARIES) if part in low), 0)
    pattern = _DASHES[number % len(_DASHES)]
    return (0, pattern) if pattern else "-"


def marks(names: Sequence[str]) -> list[dict[str, Any]]:
    """Return how the points of each name are drawn: a direction as a triangle that points its way,
    the others by their order; hollow if published."""
    looks = []
    for name, free in zip(names, "os^Dvph"[: len(names)].ljust(len(names), "o"), strict=True):
        low = str(name).lower()
        shape = ">" if low == "forward" else "<" if low == "backward" else free
        looks.append({"marker": shape, "fillstyle": "none" if "published" in low else "full"})
    return looks


def form_of(values: Any) -> str:
    """Return the format of the labels in one column: the same decimals for all of them, at most
    three digits of the largest unless the smallest needs more to have two. Beyond a factor of a
    thousand each has its own."""
    sizes = np.abs(np.asarray(values, float).ravel())
    sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
    if not len(sizes):
        return ",.0f"
    high, low = (math.floor(math.log10(float(f"{x:.2g}"))) for x in (sizes.max(), sizes.min()))
    if high - low > 2:
        return ",.0f" if low >= 0 else "#.3g"
    return f",.{min(3, max(0, 2 - high, 1 - low))}f"
