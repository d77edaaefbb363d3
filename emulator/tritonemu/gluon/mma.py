"""Gluon's wgmma, tcgen05 and older MMAs."""

from collections.abc import Iterator
from typing import Any

import torch
import triton.language as tl

from ..errors import InvalidKernel
from ..language import OPERATIONS as LANGUAGE
from ..launch import current
from ..machine import mma
from ..machine.table import point
from ..scheduler import Role
from ..tile import Tile, to_tile
from .barriers import performed
from .ctas import in_ctas, others, slices
from .memory import Scales, Sharded, free, part


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
    previous = None
    if performed(use_acc):
        previous = acc.result if isinstance(acc, mma.Pending) else to_tile(acc).data
    m, n = a.shape[0], b.shape[1]
    result, issued = torch.empty(m, n), []
    for lane in in_ctas():
        # The rows of A that the CTA has (all if they are in registers), its columns of B.
        rows = a.box(lane.cta)[0] if isinstance(a, Sharded) else (0, m)
        box = rows, b.box(lane.cta)[1]
        local_acc = None if previous is None else Tile(previous[slices(box)], tl.float32)
        issued.append(mma.async_dot(part(a, lane.cta), part(b, lane.cta), local_acc))
        result[slices(box)] = issued[-1].result
    pending = mma.Pending(result, tl.float32, issued[0].operation)
    return pending if is_async else warpgroup_mma_wait(0, [pending])


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Any = ()) -> Any:
    waited = []
    for each in deps:
        for _ in in_ctas():  # what was issued for all of them is one object
            result = mma.async_dot_wait(num_outstanding, each)
        waited.append(result)
    return waited[0] if len(waited) == 1 else tuple(waited)


HOPPER = {f.__name__: f for f in (warpgroup_mma_init, warpgroup_mma, warpgroup_mma_wait)}


def _commit(lane: Role, mbarriers: Any, preds: Any, descs: Any) -> None:
    """Commit the MMAs of a CTA to the barriers whose predicates hold: in its pair of CTAs, and in
    all that have these operands."""
    mbarriers, pair = tuple(mbarriers or ()), int(current().pairs)
    masks = [free(desc) | pair for desc in descs] or [pair]
    ranks = sorted({each for mask in masks for each in others(lane.cta.rank, mask)})
    preds = tuple(preds) if preds else (True,) * len(mbarriers)
    for barrier, pred in zip(mbarriers, preds, strict=True):
        if performed(pred):
            mma.commit(lane, [barrier.barrier_of(rank) for rank in ranks])


def _issuing(name: str, pred: Any) -> Iterator[Role]:
    """Yield the role of each CTA that issues an MMA; of a pair of CTAs, the first one does."""
    mma.blackwell_only(name)
    for lane in in_ctas() if performed(pred) else ():
        if not lane.cta.rank & int(current().pairs):
            yield lane


def tcgen05_mma(
    a: Any, b: Any, acc: Any, *, use_acc: Any = True, pred: Any = True, multicast: bool = False,
    mbarriers: Any = None, mbarrier_preds: Any = None,
) -> None:  # fmt: skip
    """Issue an MMA, which is asynchronous even without barriers."""
    for lane in _issuing("tcgen05_mma", pred):
        operands = (part(each, lane.cta) for each in (a, b, acc))
        mma.async_dot(*operands, use_acc, two_ctas=current().pairs, force_async=True)
        _commit(lane, mbarriers, mbarrier_preds, (a, b) if multicast else ())


def tcgen05_commit(barrier: Any, pred: Any = True, descs: Any = ()) -> None:
    for lane in _issuing("tcgen05_commit", True):
        point()
        _commit(lane, [barrier], [pred], descs)


def tcgen05_mma_scaled(
    a: Any, b: Any, acc: Any, a_scale: Any, b_scale: Any, a_type: str, b_type: str, *,
    use_acc: Any = True, pred: Any = True, multicast: bool = False, mbarriers: Any = None,
    mbarrier_preds: Any = None,
) -> None:  # fmt: skip
    for lane in _issuing("tcgen05_mma_scaled", pred):
        operands = (part(each, lane.cta) for each in (a, b, acc, a_scale, b_scale))
        mma.scaled_mma(*operands, a_type, b_type, use_acc, current().pairs)
        _commit(lane, mbarriers, mbarrier_preds, (a, b) if multicast else ())


def tcgen05_copy(src: Any, dst: Any) -> None:
    for lane in _issuing("tcgen05_copy", True):
        target = dst.of(lane.cta)
        scales = isinstance(target, Scales)
        mma.tmem_copy(src.of(lane.cta), target, scales, two_ctas=current().pairs)


BLACKWELL = {f.__name__: f for f in (tcgen05_mma, tcgen05_mma_scaled, tcgen05_commit, tcgen05_copy)}
