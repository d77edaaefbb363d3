"""Distribution of a Gluon program over CTAs: the part each of them has, and who acts.

One instruction stream stands for all CTAs: they take each operation in turn, as the lanes of a role
(`scheduler.Role.lanes`), each with a clock, barriers and memory of its own. So what orders them is
known exactly, while the order in which they get there is not varied. If the condition of an
`if` differs between CTAs (`ByCta`), those take the branch for which it holds, and the others wait.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ..assembly import short
from ..errors import Unsupported, current_location
from ..launch import current
from ..scheduler import Role
from ..tile import Tile, scalar


def in_ctas() -> Iterator[Role]:
    """Yield the running role of each CTA that takes this branch of the program."""
    return current().role.in_step()


def all_here(what: str) -> Role:
    """Return the running role; raises Unsupported in a branch that only some CTAs take."""
    role = current().role
    if role.leader.branch is not role.leader.lanes:
        raise Unsupported(f"{what} in a branch that only some CTAs take")
    return role


class ByCta(Tile):
    """A scalar whose value may differ between CTAs: `values`, by rank.

    Where all CTAs agree that take the branch, it is that one. Elsewhere it can be compared,
    computed with, and be the condition of an `if`. entered: the branches around those.
    """

    __slots__ = ("entered", "values")

    def __init__(self, values: Sequence[Tile]):
        self.values, self.entered, self.exact = tuple(values), [], None

    @property
    def one(self) -> Tile:
        first, *rest = (self.values[lane.cta.rank] for lane in current().role.leader.branch)
        if any(each.base is not first.base or each.data != first.data for each in rest):
            raise Unsupported("a value that CTAs have several of, but for the condition of an `if`")
        return first

    @property
    def data(self) -> Any:
        return self.one.data

    @property
    def dtype(self) -> Any:
        return self.values[0].dtype

    @property
    def base(self) -> Any:
        return self.one.base

    def enter(self, otherwise: bool) -> bool:
        """Begin the branch of the CTAs for which the condition holds; False if there is none."""
        leader = current().role.leader
        self.entered.append(leader.branch)
        here = [lane for lane in leader.branch if bool(self.values[lane.cta.rank])]
        if here and len(here) < len(leader.branch):
            if otherwise:
                raise Unsupported("`else` of a condition that CTAs have several values of")
            leader.branch = here
        return bool(here)

    def end(self) -> None:
        """Check a return in the branch; raises Unsupported if some CTAs do not take it."""
        if self.entered[-1] is not current().role.leader.branch:
            raise Unsupported("a return in a branch that only some CTAs take")

    def leave(self) -> None:
        current().role.leader.branch = self.entered.pop()


def _each(name: str) -> Any:
    def apply(self: ByCta, other: Any) -> Any:
        pairs = zip(self.values, getattr(other, "values", (other,) * len(self.values)), strict=True)
        return ByCta([getattr(Tile, name)(a, b) for a, b in pairs])

    return apply


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"):
    setattr(ByCta, f"__{_name}__", _each(f"__{_name}__"))
    setattr(ByCta, f"__r{_name}__", _each(f"__r{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(ByCta, f"__{_name}__", _each(f"__{_name}__"))


def cta_rank(dtype: Any) -> Tile:
    """Read %cluster_ctarank."""
    return ByCta([scalar(rank, dtype) for rank in range(current().num_ctas)])


def others(rank: int, bits: int) -> list[int]:
    """List the CTAs whose rank differs from this one in these bits only, itself first."""
    ranks = [rank]
    for bit in (1 << i for i in range(bits.bit_length()) if bits >> i & 1):
        ranks += [each ^ bit for each in ranks]
    return ranks


Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Sharding:
    """Bases of a `cga_layout`, over the last dimensions of a shape.

    Bit i of a CTA's rank moves its part by `bases[i]`, in parts; a basis of zeros means that CTAs
    which differ in that bit have the same part.
    """

    bases: tuple[tuple[int, ...], ...] = ()

    @property
    def free(self) -> int:
        """Bits of the rank in which CTAs with the same part differ."""
        return sum(1 << i for i, basis in enumerate(self.bases) if not any(basis))

    def parts(self, rank: int) -> tuple[int, ...]:
        """Number of parts along each dimension of a shape with this rank."""
        largest = [max(2 * size, 1) for size in map(max, zip(*self.bases, strict=True))]
        return (*(1,) * (rank - len(largest)), *largest)

    def local(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of a part."""
        return tuple(n // p for n, p in zip(shape, self.parts(len(shape)), strict=True))

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(n * p for n, p in zip(shape, self.parts(len(shape)), strict=True))

    def box(self, shape: Sequence[int], cta: int) -> Box:
        """Start and size of the CTA's part, along each dimension of the whole shape."""
        starts = [0] * len(shape)
        for i, basis in enumerate(self.bases):
            if cta >> i & 1:
                for d, step in enumerate(basis, len(shape) - len(basis)):
                    starts[d] ^= step
        return tuple((i * size, size) for i, size in zip(starts, self.local(shape), strict=True))

    def permuted(self, order: Sequence[int]) -> "Sharding":
        full = ((*(0,) * (len(order) - len(basis)), *basis) for basis in self.bases)
        return Sharding(tuple(tuple(basis[d] for d in order) for basis in full))


def sharding_of(layout: Any, shape: Sequence[int]) -> Sharding | None:
    """Return the sharding of a layout for this shape; None if unknown or not in whole parts."""
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


def registers(shape: Sequence[int]) -> Sharding:
    """Return how the CTAs share the register operand of the memory operation at this location.

    The compiler knows; raises Unsupported if it says nothing, or several things.
    """
    if current().num_ctas == 1:
        return Sharding()
    layouts = current().registers().get(short(current_location()), ())
    shardings = {sharding_of(SimpleNamespace(**dict(each)), shape) for each in layouts}
    if len(shardings) != 1 or None in shardings:
        raise Unsupported(f"registers of {len(layouts)} layouts in one line, or none that is known")
    return shardings.pop()


def required(layout: Any, shape: Sequence[int]) -> Sharding:
    """Return `sharding_of`; raises Unsupported instead of None."""
    sharding = sharding_of(layout, shape)
    if sharding is None:
        raise Unsupported(f"memory of {layout!r} in a program of {current().num_ctas} CTAs")
    return sharding


def common(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes."""
    ends = [(max(x, y), min(x + n, y + m)) for (x, n), (y, m) in zip(a, b, strict=True)]
    return None if any(x >= y for x, y in ends) else tuple((x, y - x) for x, y in ends)


def shifted(box: Box, origin: Box) -> Box:
    """Return the box in coordinates that count from the start of another one."""
    return tuple((x - y, size) for (x, size), (y, _) in zip(box, origin, strict=True))


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in box)


def cut(tile: Any, box: Box) -> Any:
    """Cut the box out of a tile; scalars and other values stay whole."""
    if not isinstance(tile, Tile) or tuple(tile.shape) in ((), tuple(size for _, size in box)):
        return tile
    return tile.like(tile.data[slices(box)])
