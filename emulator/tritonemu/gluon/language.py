"""Operations of `gl` that `tl` lacks, or has without a layout."""

import re
from typing import Any

import triton.experimental.gluon.language as gl

from ..errors import InvalidKernel
from ..language import OPERATIONS as LANGUAGE
from ..launch import current
from ..tasks import Region
from ..tile import Tile
from .barriers import barrier
from .ctas import all_here, cta_rank
from .memory import allocate_shared_memory
from .mma import mma_v2

_HINTS = ("layout", "cache_policy")


def _without_hints(name: str) -> Any:
    """Wrap an operation of `tl`, which ignores layouts and cache policies."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        named = {key: value for key, value in kwargs.items() if key not in _HINTS}
        return LANGUAGE[name](*args, **named)

    return apply


def inline_asm_elementwise(
    asm: str, constraints: str, args: Any, dtype: Any, **options: Any
) -> Any:
    """Implement that of `tl`, and the instruction that reads the rank of the CTA."""
    if re.fullmatch(r"\s*mov\.[bsu]32\s+\$0,\s*%cluster_ctarank;\s*", asm):
        return cta_rank(dtype)
    return LANGUAGE["inline_asm_elementwise"](asm, constraints, args, dtype, **options)


def warp_specialize(
    functions_and_args: Any, worker_num_warps: Any, worker_num_regs: Any = None
) -> Any:
    """Run partitions: the first function is the default one, whose results are returned; the others
    are workers."""
    workers, warps = functions_and_args[1:], tuple(worker_num_warps)
    all_here("warp_specialize")
    registers = (None,) * len(warps) if worker_num_regs is None else tuple(worker_num_regs)
    if current().role.task:
        raise InvalidKernel("warp_specialize must not stand inside another one")
    region, results = Region(), []

    def partition(function: Any, args: Any, keep: bool) -> Any:
        def body() -> None:
            result = function(*args)
            if keep:
                results.append(result)

        body.__name__ = getattr(function, "__name__", "partition")
        return body

    function, args = functions_and_args[0]
    region.add(partition(function, args, True), {}, "default")
    for (function, args), number, count in zip(workers, warps, registers, strict=True):
        tile = next((value for value in args if isinstance(value, Tile) and value.shape), None)
        if tile is not None:
            raise InvalidKernel(f"a worker of warp_specialize takes no tensor, got {tile!r}")
        # Upstream rounds what is asked for up to a multiple of 8.
        options = {} if count is None else {"registers": -(-count // 8) * 8}
        region.add(partition(function, args, False), {}, num_warps=number, **options)
    region.run()
    return results[0]


_OWN = (warp_specialize, barrier, allocate_shared_memory, inline_asm_elementwise)
OPERATIONS = {
    **{name: value for name, value in LANGUAGE.items() if hasattr(gl, name)},
    **{name: _without_hints(name) for name in ("load", "store", "histogram")},
    **{each.__name__: each for each in _OWN},
    "arange": lambda start, end, layout=None: LANGUAGE["arange"](start, end),
    "full": lambda shape, value, dtype, layout=None: LANGUAGE["full"](shape, value, dtype),
    "convert_layout": lambda value, layout, assert_trivial=False: value,
    "set_auto_layout": lambda value, layout: value,
    "num_warps": lambda: current().role.warps,
    "num_ctas": lambda: current().num_ctas,
    "dot_fma": mma_v2,
}
OPERATIONS.pop("zeros", None)
