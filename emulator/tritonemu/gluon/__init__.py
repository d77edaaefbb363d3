"""Replaces `triton.experimental.gluon` (Triton 3.9) in a lowered kernel.

Names, argument conventions and layouts only: what the operations do is `machine`'s, shared with
TLX. Where Gluon differs from TLX:

- Values do not depend on layouts here, and bank conflicts are not modelled. Whether a conversion is
  legal, and whether operands have the right types and shapes, Gluon's own front end says: every
  launch is shown to it first, and what it refuses is not checked here again.
- Fences that its compiler inserts within a partition are not demanded. Between two partitions that
  run concurrently they are: before a copy or an MMA that reads what another one stored, and before
  a copy that writes what another one read or stored. Fork and join of `warp_specialize` order.
- `tcgen05_mma` without barriers is asynchronous. A wgmma is waited for unless `is_async`.
- Shared and tensor memory that no value names any more is used again, as it stands.
- A program is a cluster of `num_ctas` CTAs (see `ctas`).
"""

import importlib
from typing import Any

import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental.gluon.language import _core, _layouts, _math, _standard, nvidia

from ..language import Namespace
from . import barriers, copies, language, layouts, memory, mma

__all__ = ["GL", "MODULES"]

_PACKAGE = gl.__name__
LAYOUTS = layouts.named(_layouts)
GL = Namespace("gl", {**language.OPERATIONS, **LAYOUTS}, gl, _core, _standard, _math, tl)


def _part(name: str, table: dict[str, Any]) -> Namespace:
    """Build the replacement of gl.nvidia's module `name`."""
    real = importlib.import_module(f"{_PACKAGE}.nvidia.{name}")
    return Namespace(f"gl.nvidia.{name}", {**layouts.named(real), **table}, real)


_MBARRIER = {name: _part(f"{name}.mbarrier", barriers.OPERATIONS) for name in ("ampere", "hopper")}
_COPY = _part("ampere.async_copy", copies.ASYNC_COPY)
_TMA = {
    name: _part(f"{name}.tma", table)
    for name, table in (("hopper", copies.TMA), ("blackwell", copies.BLACKWELL_TMA))
}
_CLC = _part("blackwell.clc", copies.CLC)
_CLUSTER = _part("hopper.cluster", {"barrier": barriers.cluster_barrier})
_COMMON = {"async_copy": _COPY, "mma_v2": mma.mma_v2}
_SINCE_HOPPER = {
    **_COMMON, "fence_async_shared": barriers.fence_async_shared, "cluster": _CLUSTER
}  # fmt: skip
_PACKAGES = {
    "ampere": {**_COMMON, "mbarrier": _MBARRIER["ampere"]},
    "hopper": {
        **_SINCE_HOPPER, **mma.HOPPER, "mbarrier": _MBARRIER["hopper"],
        "tma": _TMA["hopper"], "async_store": copies.store_async,
    },
    "blackwell": {
        **_SINCE_HOPPER, **mma.BLACKWELL, "mbarrier": _MBARRIER["hopper"],
        "tma": _TMA["blackwell"], "clc": _CLC,
        "allocate_tensor_memory": memory.allocate_tensor_memory,
    },
}  # fmt: skip
_NVIDIA = {name: _part(name, table) for name, table in _PACKAGES.items()}

# Triton's modules -> what a kernel sees in their place.
MODULES: dict[str, Any] = {
    **{f"{_PACKAGE}{part}": GL for part in ("", "._core", "._standard", "._math", "._layouts")},
    **{f"{_PACKAGE}.nvidia.{name}": part for name, part in _NVIDIA.items()},
    **{f"{_PACKAGE}.nvidia.{name}.mbarrier": part for name, part in _MBARRIER.items()},
    **{f"{_PACKAGE}.nvidia.{name}.tma": part for name, part in _TMA.items()},
    f"{_PACKAGE}.nvidia.ampere.async_copy": _COPY,
    f"{_PACKAGE}.nvidia.blackwell.clc": _CLC,
    f"{_PACKAGE}.nvidia.hopper.cluster": _CLUSTER,
}
GL.__dict__["nvidia"] = Namespace("gl.nvidia", _NVIDIA, nvidia)
