"""Scores of candidates over histories in pages.

|                      | one call, over both            | the sum of two                         |
|----------------------|--------------------------------|----------------------------------------|
| pages where they are | `_in_pages` of one batch       | `_in_pages` of the histories, then     |
|                      |                                | `_add_candidates`                      |
| pages gathered       | `over_both`                    | `gdpa` over the histories, then        |
|                      |                                | `_add_candidates`                      |
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from gdpa_kernels.calling import checks, ladder
from gdpa_kernels.calling.handover import CallWorkLists
from gdpa_kernels.calling.lengths import Lengths
from gdpa_kernels.calling.sequences import Sequences, read_sequences
from gdpa_kernels.device import padding
from gdpa_kernels.gdpa import api
from gdpa_kernels.gdpa.api import gdpa
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.mask import Mask
from gdpa_kernels.gdpa.registration import check_activation, prove
from gdpa_kernels.serving import common, diagonal
from gdpa_kernels.serving.cache import PagedCache
from gdpa_kernels.serving.pages import Pages, check_whole

(_PAGED,) = (rung for rung in ladder.RUNGS if "history" in rung.requires.extras)
"""The implementation that reads pages where they are."""


def score(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | Lengths,
    max_seqlen: int,
    cache: PagedCache,
    layer: int,
    history: Pages,
    *,
    target_group_size: int = 1,
    in_one_call: bool | None = None,
    **options,
) -> torch.Tensor:
    """Attention of candidates, each over its user's history and its own group up to itself.

    What one call of `gdpa` over [history; candidates] gives for the candidates' rows, with
    `num_targets` and "lower_right": in one call, or as the sum of two, over the history, kept in
    fp32, and over the candidates, added to it before the one rounding. Of candidates that see
    themselves alone the second is a kernel of its own with impl="auto" (`diagonal`).

    On Hopper a kernel reads the pages where they are, if page_size is a multiple of 64, without
    gradients, autocast or `torch.compile`; at head_dim 128 it takes tiles of 128 keys if 128
    divides page_size, else of 64. Every other call gathers the pages first (`read`, `read_before`):
    on other devices, of other dtypes and implementations, and of smaller pages.

    Nothing waits for the device with `Lengths`, or validate=False; with `Lengths` the layers of a
    model share one work list, but in a graph. Small batches are bound by the host: capture the call
    in a CUDA graph.

    Args:
        q, k, v: of the candidates, `[tokens, heads, head_dim]`, with offsets cu_seqlens
            `[batch + 1]`, int32 or `Lengths`, and max_seqlen.
        cache, layer, history: what keeps the histories, of which layer, and where they lie, of the
            same users in the same order (`PagedCache.pages`), whole.
        target_group_size: candidates of a group, as `gdpa`.
        in_one_call: True or False. None for one call where that kernel takes it, "auto" would
            choose it, and tiles of 128 candidates, of all users and heads, fill the device without
            the histories' keys being split between multiprocessors.
        options: of `gdpa`, those in `gdpa.api.SHARED_OPTIONS`, validate and out_dtype. A mask is
            not among them: a history that a window limits is for one call of `gdpa`.

    Returns:
        `[tokens, heads, head_dim]`.

    Raises:
        TypeError, ValueError: an argument is wrong: its name, what is expected, what was received.
        NotImplementedError: as `gdpa`.

    Source of the rule: measured on an H200 with pages gathered before, 4 heads, head_dim 128: 10
    users of 6,300 events with 2,048 candidates each take 389 us in one call, and 442 in two calls
    of `gdpa` or 424 with `diagonal`; 32 of 1,024 with 2,048 take 247, and 389 in two of `gdpa`; 4
    of 4,096 with 100 take 56 and 29, since two split the keys. See the lab notes on serving.
    """
    api.check_shared_options(options, "validate", "out_dtype")
    checks.check_impl(options.get("backward_impl", "auto"), api.BACKWARD_IMPLS, "backward_impl")
    if in_one_call is not None:
        checks.check_bool(in_one_call=in_one_call)
    check_whole("history", history)
    max_seqlen = checks.check_max_seqlen("max_seqlen", max_seqlen)
    target_group_size = checks.check_count("target_group_size", target_group_size, least=1)
    q, k, v = checks.autocast(q, k, v)
    checks.check_tensors(q, k, v)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k must have q's {q.shape[0]} rows, got {k.shape[0]}")
    if k.shape[1:] != cache.data.shape[-2:]:
        raise ValueError(
            f"k must have the cache's {list(cache.data.shape[-2:])} heads and head_dim, got "
            f"{list(k.shape[1:])}"
        )
    options["out_dtype"] = api.check_sum(q, q.shape, options.get("out_dtype"), None)
    validate = options.pop("validate", True)
    of_q = read_candidates(q, cu_seqlens, max_seqlen, history, validate)
    options["validate"] = False  # the sequences have been read
    impl, call = options.get("impl", "auto"), (q, k, v, of_q, cache, layer, history)
    launches = common.can_launch(q, k, v)
    alone = launches and impl == "auto" and target_group_size == 1
    out = over_history = None
    if launches and impl in ("auto", _PAGED.impl):
        with cache.exclusive:  # from the check of the pages until what reads them is launched
            batch = _history_batch(*call, **options)
            if in_one_call is None:
                in_one_call = _is_one_call(batch, k, v, options["out_dtype"])
            if in_one_call:
                batch = _with_candidates(batch, k, v, target_group_size, options["out_dtype"])
                out = _in_pages(batch)
            else:
                over_history = _in_pages(batch, _lists(of_q, history), in_parts=alone)
    if in_one_call:
        mask = Mask(True, target_group_size=target_group_size)
        return over_both(*call, mask, **options) if out is None else out
    if over_history is None:
        summed = options | {"out_dtype": None if q.dtype == torch.float64 else torch.float32}
        over_history = gdpa(q, *cache.read(layer, history), of_q, history.sequences, **summed)
    return _add_candidates(q, k, v, of_q, over_history, target_group_size, alone, **options)


def read_candidates(
    x: torch.Tensor, cu_seqlens: object, max_seqlen: int, history: Pages, validate: bool
) -> Sequences:
    """The sequences of candidates x behind these histories; waits for the device where their
    offsets are a tensor and `validate`, but in a capture, where the device checks them. In a
    compiled program `gdpa` checks them."""
    checks.check_bool(validate=validate)
    rows = x.shape[0]
    options = {"validate": validate, "allow_padding": False}
    known = read_sequences("cu_seqlens", cu_seqlens, rows, x.device, max_seqlen, **options)
    if known.cu_seqlens.shape != history.cu_seqlens.shape:
        raise ValueError(
            f"cu_seqlens must have shape {list(history.cu_seqlens.shape)}, as the histories, got "
            f"{list(known.cu_seqlens.shape)}"
        )
    if known.check_values and not checks.is_fake(x):
        sizes = (rows, rows), (max_seqlen, max_seqlen)
        padding.assert_offsets(None, known.cu_seqlens, None, *sizes, allow_padding=False)
        known = known._replace(check_values=False)
    return known


def over_both(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of_q: Sequences, cache: PagedCache,
    layer: int, history: Pages, mask: Mask, **options,
) -> torch.Tensor:  # fmt: skip
    """One call of `gdpa`, over [history; candidates] copied out of the pages."""
    cu_seqlens, max_seqlen, *_ = of_q
    keys, values = cache.read_before(layer, history, k, v, cu_seqlens, max_seqlen)
    offsets, longest = history.cu_seqlens + cu_seqlens, history.max_seqlen + max_seqlen
    of_k, counts = Sequences(offsets, longest), cu_seqlens.diff()
    mask = replace(mask, causal="lower_right", num_targets=counts)
    return gdpa(q, keys, values, of_q, of_k, mask=mask, **options)


def _add_candidates(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of_q: Sequences, over_history: torch.Tensor,
    target_group_size: int, alone: bool, **options,
) -> torch.Tensor:  # fmt: skip
    """The call over the groups, added to that over the histories; `alone`: each candidate is one,
    and a kernel of its own adds it to the result, or to the parts of it."""
    if alone:
        names = "activation", "scale", "output_scale", "out_dtype"
        known = {name: options[name] for name in names if name in options}
        return diagonal.add_diagonal(q, k, v, over_history, **known)
    mask = Mask(True, window=0)
    if target_group_size > 1:
        counts = of_q.cu_seqlens.diff()
        mask = Mask(True, num_targets=counts, target_group_size=target_group_size)
    return gdpa(q, k, v, of_q, of_q, mask=mask, add_to=over_history, **options)


def _history_batch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of_q: Sequences, cache: PagedCache,
    layer: int, history: Pages, *,
    activation: str | tuple[str, ...] | list[str] = "gelu_tanh", scale: float | None = None,
    output_scale: float = 1.0, precise: bool = False, **_,
) -> Batch:  # fmt: skip
    """The call over the histories alone, in their pages, with a result in fp32; checked."""
    names = tuple(check_activation(activation, q.shape[1]))
    api.check_scalars(scale, output_scale)
    checks.check_bool(precise=precise)
    return Batch(
        q, k[:0], v[:0], of_q.cu_seqlens, history.cu_seqlens, of_q.max_seqlen, history.max_seqlen,
        names,
        q.shape[2] ** -0.5 if scale is None else float(scale), float(output_scale),
        precise=precise, out_dtype=torch.float32,
        history=cache.history(layer, history, k, v, of_q.cu_seqlens),
    )  # fmt: skip


def _with_candidates(
    batch: Batch, k: torch.Tensor, v: torch.Tensor, group: int, out_dtype: torch.dtype | None
) -> Batch:
    """The call over [history; candidates], of that over the histories."""
    counts = batch.cu_seqlens_q.diff()
    return replace(
        batch, k=k, v=v, cu_seqlens_k=batch.cu_seqlens_k + batch.cu_seqlens_q,
        max_seqlen_k=batch.max_seqlen_k + batch.max_seqlen_q, out_dtype=out_dtype,
        segments=F.pad(counts[:, None], (0, 1)),
        mask=Mask("lower_right", target_group_size=group),
    )  # fmt: skip


def _is_one_call(
    batch: Batch, k: torch.Tensor, v: torch.Tensor, out_dtype: torch.dtype | None
) -> bool:
    """The rule of `score`, of the call over the histories."""
    if _PAGED.device_problem(batch.device) or _PAGED.config(batch, "forward").splits > 1:
        return False
    whole = replace(
        batch, k=k, v=v, max_seqlen_k=batch.max_seqlen_k + batch.max_seqlen_q, out_dtype=out_dtype,
        mask=Mask("lower_right"), history=None,
        segments=batch.cu_seqlens_q,  # whichever: only that there are some is asked
    )  # fmt: skip
    return api.resolve("auto", "forward", whole) is _PAGED


def _lists(of_q: Sequences, history: Pages) -> CallWorkLists | None:
    """Work lists that keep that of the histories for all layers. None for offsets in a tensor, and
    in the capture of a CUDA graph, which may be replayed when others stand in these pages."""
    if of_q.lengths is None:
        return None
    ends = history.cu_seqlens
    if _is_captured(ends):
        return None
    history.lengths.check_unmodified("history")
    return CallWorkLists((ends, of_q.cu_seqlens), history.lengths, of_q.lengths)


def _is_captured(x: torch.Tensor) -> bool:
    return x.is_cuda and checks.is_capturing(x.device)


def _in_pages(
    batch: Batch, lists: CallWorkLists | None = None, *, in_parts: bool = False
) -> torch.Tensor | None:
    """The output of the implementation that reads pages, or the parts whose sum it is; None where
    it does not take the call. lists: of the call, None for one that is made here."""
    if _PAGED.device_problem(batch.device) or _PAGED.call_problem(batch):
        return None
    prove(batch.activation, batch.device)
    config = _PAGED.config(batch, "forward")
    recipe = _PAGED.recipe(batch, config)
    work_list = None if lists is None else lists.once(recipe, "forward")
    module = _PAGED.module()
    run = module.partial_sums if in_parts else module.forward
    return run(batch, config=config, work_list=work_list)
