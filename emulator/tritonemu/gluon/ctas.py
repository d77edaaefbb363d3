"""How a Gluon program is spread over CTAs: which CTA has which part, and who acts.

One instruction stream stands for all CTAs: they take each operation in turn, as the lanes of a role
(`scheduler.Role.lanes`), each with a clock, barriers and memory of its own. So what orders them is
known exactly, while the order in which they get there is not varied.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import Unsupported
from ..launch import current
from ..scheduler import Role
from ..tile import Tile


def in_ctas(act: Callable[[Role], Any]) -> list[Any]:
    """Perform `act` as the running role of each CTA of the program."""
    return current().role.in_step(act)


def others(rank: int, bits: int) -> list[int]:
    """The CTAs whose rank is this one but for some of these bits, itself first."""
    ranks = [rank]
    for bit in (1 << i for i in range(bits.bit_length()) if bits >> i & 1):
        ranks += [each ^ bit for each in ranks]
    return ranks


Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Sharding:
    """The bases of a `cga_layout`, over the last dimensions of a shape.

    Bit i of a CTA's rank moves its part by `bases[i]`, in parts; a basis of zeros means that CTAs
    which differ in that bit have the same part.
    """

    bases: tuple[tuple[int, ...], ...] = ()

    @property
    def free(self) -> int:
        """The bits of the rank in which CTAs differ that have the same part."""
        return sum(1 << i for i, basis in enumerate(self.bases) if not any(basis))

    def parts(self, rank: int) -> tuple[int, ...]:
        """Parts along each dimension of a shape of this rank."""
        largest = [max(2 * size, 1) for size in map(max, zip(*self.bases, strict=True))]
        return (*(1,) * (rank - len(largest)), *largest)

    def local(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a part."""
        return tuple(n // p for n, p in zip(shape, self.parts(len(shape)), strict=True))

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(n * p for n, p in zip(shape, self.parts(len(shape)), strict=True))

    def box(self, shape: Sequence[int], cta: int) -> Box:
        """Start and size, along each dimension of the whole shape, of what the CTA has."""
        at = [0] * len(shape)
        for i, basis in enumerate(self.bases):
            if cta >> i & 1:
                for d, step in enumerate(basis, len(shape) - len(basis)):
                    at[d] ^= step
        return tuple((each * size, size) for each, size in zip(at, self.local(shape), strict=True))

    def permuted(self, order: Sequence[int]) -> "Sharding":
        full = ((*(0,) * (len(order) - len(basis)), *basis) for basis in self.bases)
        return Sharding(tuple(tuple(basis[d] for d in order) for basis in full))


def sharding_of(layout: Any, shape: Sequence[int]) -> Sharding | None:
    """That of a layout for this shape; None if it does not say, or not in whole parts."""
    if current().num_ctas == 1:
        return Sharding()
    bases = getattr(layout, "cga_layout", None)
    if bases is None:
        bases = getattr(layout, "block_bases", None)
        if bases is None:
            return None
        # Steps in elements; a part must be one piece.
        columns = list(zip(*bases, strict=True))
        last = shape[len(shape) - len(columns) :]
        sizes = [n >> sum(map(bool, c)) for n, c in zip(last, columns, strict=True)]
        if any(step % size for c, size in zip(columns, sizes, strict=True) for step in c):
            return None
        bases = [[step // size for step, size in zip(b, sizes, strict=True)] for b in bases]
    if len(bases) != current().num_ctas.bit_length() - 1:
        return None
    return Sharding(tuple(tuple(int(step) for step in basis) for basis in bases))


def required(layout: Any, shape: Sequence[int]) -> Sharding:
    """As `sharding_of`; raises Unsupported instead of None."""
    found = sharding_of(layout, shape)
    if found is None:
        raise Unsupported(f"memory of {layout!r} in a program of {current().num_ctas} CTAs")
    return found


def common(a: Box, b: Box) -> Box | None:
    """Where two boxes meet."""
    ends = [(max(x, y), min(x + n, y + m)) for (x, n), (y, m) in zip(a, b, strict=True)]
    return None if any(x >= y for x, y in ends) else tuple((x, y - x) for x, y in ends)


def at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in box)


def cut(tile: Any, box: Box) -> Any:
    """The part of a tile; of what is none, and of a scalar, all."""
    return tile.like(tile.data[at(box)]) if isinstance(tile, Tile) and tile.shape else tile
