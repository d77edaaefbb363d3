"""wgmma, tcgen05 and the older products of Gluon."""

from typing import Any

from ..errors import InvalidKernel
from ..language import OPERATIONS as LANGUAGE
from ..launch import current
from ..machine import products
from .barriers import barrier_of, performed
from .memory import Scales


def mma_v2(a: Any, b: Any, acc: Any, input_precision: Any = None) -> Any:
    return LANGUAGE["dot"](a, b, acc)


def warpgroup_mma_init(value: Any) -> Any:
    return value


def warpgroup_mma(
    a: Any, b: Any, acc: Any, *, use_acc: Any = True, precision: Any = None,
    max_num_imprecise_acc: Any = None, is_async: bool = False,
) -> Any:  # fmt: skip
    if current().arch != "sm_90":
        raise InvalidKernel(f"warpgroup_mma needs arch sm_90, got {current().arch}")
    result = products.async_dot(a, b, acc if performed(use_acc) else None)
    return result if is_async else products.async_dot_wait(0, result)


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Any = None) -> Any:
    if deps is None:
        raise InvalidKernel("warpgroup_mma_wait needs deps")
    waited = tuple(products.async_dot_wait(num_outstanding, value) for value in deps)
    return waited[0] if len(waited) == 1 else waited


HOPPER = {f.__name__: f for f in (warpgroup_mma_init, warpgroup_mma, warpgroup_mma_wait)}


def _chosen(barriers: Any, preds: Any) -> list[Any]:
    barriers = tuple(barriers or ())
    preds = tuple(preds) if preds else (True,) * len(barriers)
    pairs = zip(barriers, preds, strict=True)
    return [barrier_of(barrier) for barrier, pred in pairs if performed(pred)]


def tcgen05_mma(
    a: Any, b: Any, acc: Any, *, use_acc: Any = True, pred: Any = True, multicast: bool = False,
    mbarriers: Any = None, mbarrier_preds: Any = None,
) -> None:  # fmt: skip
    """Asynchronous, also without barriers."""
    if performed(pred):
        products.blackwell_only("tcgen05_mma")
        chosen = _chosen(mbarriers, mbarrier_preds)
        products.async_dot(a, b, acc, use_acc, mBarriers=chosen, force_async=True)


def tcgen05_commit(barrier: Any, pred: Any = True, descs: Any = ()) -> None:
    if performed(pred):
        products.tcgen05_commit(barrier_of(barrier))


def tcgen05_mma_scaled(
    a: Any, b: Any, acc: Any, a_scale: Any, b_scale: Any, a_type: str, b_type: str, *,
    use_acc: Any = True, pred: Any = True, multicast: bool = False, mbarriers: Any = None,
    mbarrier_preds: Any = None,
) -> None:  # fmt: skip
    if performed(pred):
        chosen = _chosen(mbarriers, mbarrier_preds)
        types = a_type, b_type
        products.scaled_mma(a, b, acc, a_scale, b_scale, *types, use_acc, chosen)


def tcgen05_copy(src: Any, dst: Any) -> None:
    products.tmem_copy(src, dst, scales=isinstance(dst, Scales))


BLACKWELL = {f.__name__: f for f in (tcgen05_mma, tcgen05_mma_scaled, tcgen05_commit, tcgen05_copy)}
