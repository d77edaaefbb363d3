"""Pictures of the machine as SVG: an SM, its registers, where operands lie, banks of shared memory,
the stages of a compilation, an mbarrier.

Texts stay texts. Alone a picture is mid-grey; inlined in a page its texts take the page's colour.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gdpa_lab.report.style import INK, SERIES

WIDTH = 700
BLUE, GREEN, ORANGE, VIOLET = (SERIES[i] for i in (0, 2, 1, 3))
_STYLE = f"""
.gdpa-machine text {{ font: 12.5px "DejaVu Sans", Verdana, system-ui, sans-serif; fill: {INK} }}
.gdpa-machine .small {{ font-size: 11px }}
.gdpa-machine .code {{ font: 11px "DejaVu Sans Mono", ui-monospace, monospace }}
.gdpa-machine .strong {{ font-weight: bold }}
.gdpa-machine .line {{ stroke: {INK}; stroke-width: 1.4; fill: none }}
.gdpa-machine .head {{ fill: {INK} }}
html .gdpa-machine text {{ fill: currentColor }}
html .gdpa-machine .line {{ stroke: currentColor }}
html .gdpa-machine .head {{ fill: currentColor }}
"""


class Picture:
    """Boxes, texts and arrows at pixels; `svg` is the same text for the same calls."""

    def __init__(self, height: float, width: float = WIDTH):
        self.width, self.height = width, height
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, *lines: str, shade: str = INK,
        filled: float = 0.14, small: bool = False,
    ) -> None:  # fmt: skip
        """A box with centred lines of text, the first one bold if there are more."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" '
            f'fill="{shade}" fill-opacity="{filled:g}" stroke="{shade}" stroke-width="1.2"/>'
        )
        step = 14 if small else 16
        top = y + height / 2 + 4.5 - step * (len(lines) - 1) / 2
        for number, line in enumerate(lines):
            kinds = ["small"] * small + ["strong"] * (number == 0 and len(lines) > 1)
            self.text(x + width / 2, top + step * number, line, kinds, anchor="middle")

    def text(
        self, x: float, y: float, text: str, kinds: Sequence[str] = (), *, anchor: str = "start"
    ) -> None:
        """One line, its baseline at y; `kinds`: of "small", "code", "strong"."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{" ".join(kinds)}" '
            f'xml:space="preserve">{html.escape(text)}</text>'
        )

    def arrow(self, *points: tuple[float, float], both: bool = False) -> None:
        """A line through `points` along x or y, with a head at its end, or at both."""
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(f'<path class="line" d="M{path}"/>')
        ends = [(points[-2], points[-1])] + [(points[1], points[0])] * both
        for (x0, y0), (x, y) in ends:
            if abs(x - x0) > abs(y - y0):
                back = -6 if x > x0 else 6
                corners = f"{x:g} {y:g} L{x + back:g} {y - 4:g} L{x + back:g} {y + 4:g}"
            else:
                back = -6 if y > y0 else 6
                corners = f"{x:g} {y:g} L{x - 4:g} {y + back:g} L{x + 4:g} {y + back:g}"
            self.parts.append(f'<path class="head" d="M{corners} Z"/>')

    def svg(self) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="gdpa-machine" role="img" '
            f'width="{self.width:g}" height="{self.height:g}" '
            f'viewBox="0 0 {self.width:g} {self.height:g}"><style>{_STYLE}</style>'
            + "".join(self.parts)
            + "</svg>"
        )


class Unit(NamedTuple):
    """Numbers of an SM that the pictures show: per-cycle widths and sizes."""

    registers: int  # of 32 bits
    shared_kib: float
    port_bytes: int
    mufu: int
    flops: int
    lanes: int
    schedulers: int = 4


def sm(unit: Unit, sms: int, l2_mib: float) -> str:
    """One SM with its four quarters and what they share; then L2 and memory."""
    drawn = Picture(height=336)
    drawn.text(6, 16, f"one SM of {sms}", ["strong"])
    drawn.box(4, 24, 500, 306, filled=0.05)
    each = unit.schedulers
    for number in range(each):
        x = 14 + number * 122
        drawn.box(x, 34, 114, 172, filled=0.06)
        drawn.box(x + 6, 40, 102, 36, f"scheduler {number}", "1 warp a cycle", small=True)
        drawn.box(x + 6, 80, 102, 36, "registers", f"{unit.registers // each // 1024} Ki x 32 bits",
                  small=True, shade=BLUE)  # fmt: skip
        drawn.box(x + 6, 120, 102, 36, "tensor core", f"{unit.flops // each:,} FLOP/cycle",
                  small=True, shade=ORANGE)  # fmt: skip
        drawn.box(x + 6, 160, 48, 40, "fp32", f"x {unit.lanes // each}", small=True)
        drawn.box(x + 58, 160, 50, 40, "MUFU", f"x {unit.mufu // each}", small=True,
                  shade=VIOLET)  # fmt: skip
        drawn.arrow((x + 12, 206), (x + 12, 240), both=True)
    for x, text in ((32, "one port for all"), (154, f"{unit.port_bytes} bytes a cycle")):
        drawn.text(x, 227, text, ["small", "strong"])
    drawn.box(14, 240, 366, 40, "shared memory", f"{unit.shared_kib:g} KiB: tiles and barriers",
              shade=GREEN)  # fmt: skip
    drawn.box(14, 286, 366, 36, "L1 cache (the same memory; not used by TMA)", small=True)
    drawn.box(392, 240, 102, 82, "TMA", "copies a box", "of a tensor", shade=GREEN)
    drawn.arrow((380, 260), (392, 260), both=True)
    drawn.box(540, 120, 154, 76, "L2 cache", f"{l2_mib:g} MiB", "shared by all SMs")
    drawn.box(540, 246, 154, 70, "HBM", "the GPU's memory")
    drawn.arrow((494, 282), (520, 282), (520, 158), (540, 158), both=True)
    drawn.arrow((617, 196), (617, 246), both=True)
    return drawn.svg()


def registers(splits: Mapping[str, Sequence[tuple[str, int, int]]], size: int) -> str:
    """The register file as a bar for each title: parts of (name, warps, registers of a thread), to
    scale, the rest empty. ValueError if the parts do not fit into `size` registers."""
    drawn = Picture(height=12 + 62 * len(splits))
    for row, (title, parts) in enumerate(splits.items()):
        y, x = 8 + 62 * row, 4.0
        drawn.text(4, y + 10, title, ["small"])
        drawn.box(4, y + 18, WIDTH - 8, 28, filled=0.0)
        used = sum(32 * warps * each for _, warps, each in parts)
        if used > size:
            raise ValueError(f"{title}: parts must fit into {size} registers, got {used}")
        for (name, warps, each), shade in zip(parts, (BLUE, GREEN, ORANGE), strict=False):
            wide = (WIDTH - 8) * 32 * warps * each / size
            drawn.box(x, y + 18, wide, 28, f"{name}: {each}" if wide > 80 else f"{each}",
                      shade=shade, filled=0.25, small=True)  # fmt: skip
            x += wide
    return drawn.svg()


def operands() -> str:
    """Where A, B and the result of an MMA may lie: Hopper left, Blackwell right."""
    drawn = Picture(height=232)
    for x, chip, issued, rows in (
        (4, "Hopper: wgmma", "issued by a warp group, four warps", "64 rows"),
        (356, "Blackwell: tcgen05.mma", "issued by one thread", "64 or 128 rows"),
    ):
        drawn.text(x + 2, 14, chip, ["strong"])
        drawn.text(x + 2, 31, issued, ["small"])
        drawn.box(x, 42, 104, 84, "registers", shade=BLUE)
        drawn.box(x, 138, 104, 84, "shared", "memory", shade=GREEN)
        drawn.box(x + 200, 92, 134, 66, "tensor cores", rows, shade=ORANGE)
        drawn.text(x + 110, 172, "A, B", ["small"])
        if x > 4:
            drawn.box(x + 200, 170, 134, 52, "tensor memory", "result; or A", shade=VIOLET)
            drawn.arrow((x + 267, 158), (x + 267, 170), both=True)
            drawn.arrow((x + 104, 66), (x + 184, 66), (x + 184, 196), (x + 200, 196), both=True)
            drawn.text(x + 110, 60, "copies only", ["small"])
            drawn.arrow((x + 104, 178), (x + 160, 178), (x + 160, 126), (x + 200, 126))
        else:
            drawn.arrow((x + 104, 66), (x + 267, 66), (x + 267, 92), both=True)
            drawn.text(x + 110, 60, "result; or A", ["small"])
            drawn.arrow((x + 104, 178), (x + 267, 178), (x + 267, 158))
    return drawn.svg()


def banks(panels: Mapping[str, tuple[Sequence[Sequence[int]], int]], marked: int) -> str:
    """Rows of eight pieces of 16 bytes over the banks, panels side by side. Each: by title, the
    piece that lies at each place of each row, and the cycles that reading piece `marked` of all
    rows takes."""
    drawn = Picture(height=262)
    for number, (title, (rows, cycles)) in enumerate(panels.items()):
        left = 44 + 352 * number
        drawn.text(left, 14, title, ["strong"])
        for column in range(8):
            bank = f"{4 * column}–{4 * column + 3}"
            drawn.text(left + 18 + 37 * column, 34, bank, ["small"], anchor="middle")
        for row, pieces in enumerate(rows):
            drawn.text(left - 6, 56 + 24 * row, f"{row}", ["small"], anchor="end")
            for column, piece in enumerate(pieces):
                looks = {"shade": ORANGE, "filled": 0.5} if piece == marked else {"shade": BLUE}
                drawn.box(
                    left + 37 * column, 40 + 24 * row, 36, 23, f"{piece}", small=True, **looks
                )
        took = f"{cycles} cycles" if cycles > 1 else "1 cycle"
        drawn.text(left, 252, f"piece {marked} of eight rows: {took}", ["strong"])
    drawn.text(38, 34, "row", ["small"], anchor="end")
    return drawn.svg()


def stages(lines: Sequence[tuple[str, str, str]]) -> str:
    """A compilation, from the top: of each stage its name, what it decides, and a line of it."""
    drawn = Picture(height=58 * len(lines) - 6)
    for row, (name, what, line) in enumerate(lines):
        y = 4 + 58 * row
        drawn.box(4, y, 92, 42, name, shade=BLUE if row else ORANGE)
        drawn.text(110, y + 14, what, ["small"])
        drawn.text(110, y + 34, line, ["code"])
        if row + 1 < len(lines):
            drawn.arrow((50, y + 42), (50, y + 58))
    return drawn.svg()


class Moment(NamedTuple):
    """A state of an mbarrier after an event: arrivals and bytes that its phase still lacks."""

    event: str
    pending: int
    bytes: int
    phase: int


def barrier(moments: Sequence[Moment]) -> str:
    """States of an mbarrier from the left; a phase that has just begun is coloured."""
    wide = (WIDTH - 8) / len(moments)
    drawn = Picture(height=148)
    for column, now in enumerate(moments):
        x = 4 + column * wide
        begins = column > 0 and now.phase > moments[column - 1].phase
        shade = ORANGE if begins else BLUE
        for number, line in enumerate(now.event.split("\n")):
            drawn.text(x + 2, 14 + 14 * number, line, ["small", "strong"])
        drawn.box(x, 42, wide - 12, 98, f"phase {now.phase}", f"arrivals: {now.pending}",
                  f"bytes: {now.bytes:,}", f"parity done: {(now.phase - 1) % 2}", shade=shade,
                  filled=0.25 if begins else 0.12, small=True)  # fmt: skip
        if column:
            drawn.arrow((x - 11, 90), (x - 1, 90))
    return drawn.svg()
