"""Gluon's wgmma, tcgen05 and older MMAs."""

from typing import Any

import torch
import triton.language as tl

from ..errors import InvalidKernel
from ..language import OPERATIONS as LANGUAGE
from ..launch import current
from ..machine import mma
from ..machine.table import point
from ..tile import Tile, to_tile
from .barriers import barriers_of, performed
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
    acc = acc if performed(use_acc) else None
    if isinstance(b, Sharded):
        result = _warpgroup_mma_of_ctas(a, b, acc)
    else:
        result = mma.async_dot(a, b, acc)
    return result if is_async else warpgroup_mma_wait(0, [result])


def _warpgroup_mma_of_ctas(a: Any, b: Sharded, acc: Any) -> Any:
    """Multiply the rows of A that a CTA has (all if they are in registers) by its columns of B."""
    previous = acc
    if acc is not None:
        previous = acc.result if isinstance(acc, mma.Pending) else to_tile(acc).data
    m, n = a.shape[0], b.shape[1]
    result = torch.empty(m, n)

    def act(lane: Any) -> Any:
        rows = a.box(lane.cta)[0] if isinstance(a, Sharded) else (0, m)
        box = rows, b.box(lane.cta)[1]
        local_acc = None if previous is None else Tile(previous[slices(box)], tl.float32)
        pending = mma.async_dot(part(a, lane.cta), part(b, lane.cta), local_acc)
        result[slices(box)] = pending.result
        return pending

    first = in_ctas(act)[0]
    return mma.Pending(result, first.dtype, first.operation)


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Any = None) -> Any:
    if deps is None:
        raise InvalidKernel("warpgroup_mma_wait needs deps")

    def wait(value: Any) -> Any:
        return in_ctas(lambda _: mma.async_dot_wait(num_outstanding, value))[0]

    waited = tuple(map(wait, deps))
    return waited[0] if len(waited) == 1 else waited


HOPPER = {f.__name__: f for f in (warpgroup_mma_init, warpgroup_mma, warpgroup_mma_wait)}


def _completing(mbarriers: Any, preds: Any, descs: Any) -> Any:
    """Return a function that commits the MMAs of a CTA to the barriers whose predicates hold."""
    mbarriers = tuple(mbarriers or ())
    preds = tuple(preds) if preds else (True,) * len(mbarriers)
    pairs = zip(mbarriers, preds, strict=True)
    chosen = [barriers_of(barrier) for barrier, pred in pairs if performed(pred)]

    def commit(lane: Any) -> None:
        for barriers in chosen:
            mma.commit(lane, [barriers.of(r) for r in _commit_targets(lane.cta.rank, descs)])

    return commit


def _commit_targets(rank: int, descs: Any) -> list[int]:
    """List the CTAs that a commit of this one arrives in: its pair, and all with these operands."""
    pair = int(current().pairs)
    masks = [free(desc) | pair for desc in descs] or [pair]
    return sorted({each for mask in masks for each in others(rank, mask)})


def _issue(act: Any) -> None:
    """Issue an MMA in each CTA; of a pair of CTAs, the first one issues for both."""
    in_ctas(lambda lane: lane.cta.rank & int(current().pairs) or act(lane))


def tcgen05_mma(
    a: Any, b: Any, acc: Any, *, use_acc: Any = True, pred: Any = True, multicast: bool = False,
    mbarriers: Any = None, mbarrier_preds: Any = None,
) -> None:  # fmt: skip
    """Issue an MMA, which is asynchronous even without barriers."""
    commit = _completing(mbarriers, mbarrier_preds, (a, b) if multicast else ())

    def act(lane: Any) -> None:
        operands = (part(each, lane.cta) for each in (a, b, acc))
        mma.async_dot(*operands, use_acc, two_ctas=current().pairs, force_async=True)
        commit(lane)

    mma.blackwell_only("tcgen05_mma")
    if performed(pred):
        _issue(act)


def tcgen05_commit(barrier: Any, pred: Any = True, descs: Any = ()) -> None:
    mma.blackwell_only("tcgen05_commit")
    commit = _completing([barrier], [pred], descs)

    def act(lane: Any) -> None:
        point()
        commit(lane)

    _issue(act)


def tcgen05_mma_scaled(
    a: Any, b: Any, acc: Any, a_scale: Any, b_scale: Any, a_type: str, b_type: str, *,
    use_acc: Any = True, pred: Any = True, multicast: bool = False, mbarriers: Any = None,
    mbarrier_preds: Any = None,
) -> None:  # fmt: skip
    commit = _completing(mbarriers, mbarrier_preds, (a, b) if multicast else ())

    def act(lane: Any) -> None:
        operands = (part(each, lane.cta) for each in (a, b, acc, a_scale, b_scale))
        mma.scaled_mma(*operands, a_type, b_type, use_acc, current().pairs)
        commit(lane)

    if performed(pred):
        _issue(act)


def tcgen05_copy(src: Any, dst: Any) -> None:
    def act(lane: Any) -> None:
        target = part(dst, lane.cta)
        scales = isinstance(target, Scales)
        mma.tmem_copy(part(src, lane.cta), target, scales, two_ctas=current().pairs)

    _issue(act)


BLACKWELL = {f.__name__: f for f in (tcgen05_mma, tcgen05_mma_scaled, tcgen05_commit, tcgen05_copy)}
