"""`score`: attention of candidates over cached histories.

Each candidate sees its user's history and its own group: one call over [history; candidates], or
two whose results add up (`_choose`). A kernel that takes the call reads keys and values in their
pages; else they are gathered, copied out of the pages, first.

|                | one call                    | the sum of two                                    |
|----------------|-----------------------------|---------------------------------------------------|
| in their pages | `_in_pages` of `_over_both` | `_in_pages` of `_over_history`, `_add_candidates` |
| gathered       | `score_gathered`            | `gdpa` over `PagedCache.read`, `_add_candidates`  |

Applications call `score`; layers.py as well, and `candidate_sequences` and `score_gathered`.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Literal, NamedTuple

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
from gdpa_kernels.serving import common
from gdpa_kernels.serving.cache import PagedCache
from gdpa_kernels.serving.pages import Pages, check_whole

(_PAGED,) = (rung for rung in ladder.RUNGS if "paged_kv" in rung.requires.extras)
"""The implementation that reads pages where they are."""
Way = Literal["one, in pages", "one, gathered", "two, in pages", "two, gathered"]
"""Cells of the table above."""


class Candidates(NamedTuple):
    """Candidates behind cached histories: the tensors `[tokens, heads, head_dim]` of a layer, their
    sequences by user, and which layer of the cache and which page table have the histories."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sequences: Sequences
    cache: PagedCache
    layer: int
    history: Pages


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
    model share the work list of histories that two calls read in their pages, but in a graph. Small
    batches are bound by the host: capture the call in a CUDA graph.

    Args:
        q, k, v: of the candidates, `[tokens, heads, head_dim]`, with offsets cu_seqlens
            `[batch + 1]`, int32 or `Lengths`, and max_seqlen.
        cache, layer, history: what holds the histories, of which layer, and their page table, of
            the same users in the same order (`PagedCache.pages`), whole.
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
    group = checks.check_count("target_group_size", target_group_size, least=1)
    q, k, v = checks.autocast(q, k, v)
    _check_tensors(q, k, v, cache)
    options["out_dtype"] = api.check_sum(q, q.shape, options.get("out_dtype"), None)
    validate = options.pop("validate", True)
    sequences = candidate_sequences(q, cu_seqlens, max_seqlen, history, validate)
    options["validate"] = False  # the sequences have been read
    tokens = Candidates(q, k, v, sequences, cache, layer, history)

    impl, launches = options.get("impl", "auto"), common.can_launch(q, k, v)
    by_diagonal = launches and impl == "auto" and group == 1
    in_pages = launches and impl in ("auto", _PAGED.impl)
    # From the check of the pages until what reads them is launched.
    with cache.exclusive if in_pages else nullcontext():
        way, batch = _choose(tokens, in_pages, group, in_one_call, **options)
        if way == "one, in pages":
            return _in_pages(batch)
        if way == "two, in pages":
            lists = _shared_lists(sequences, history)
            over_history = _in_pages(batch, lists, partial_sums=by_diagonal)
    if way == "one, gathered":
        return score_gathered(tokens, Mask(True, target_group_size=group), **options)
    if way == "two, gathered":
        summed = options | {"out_dtype": None if q.dtype == torch.float64 else torch.float32}
        over_history = gdpa(q, *cache.read(layer, history), sequences, history.sequences, **summed)
    return _add_candidates(tokens, over_history, group, by_diagonal, **options)


def candidate_sequences(
    x: torch.Tensor, cu_seqlens: object, max_seqlen: int, history: Pages, validate: bool
) -> Sequences:
    """The sequences of candidates x behind these histories; waits for the device where their
    offsets are a tensor and `validate`, but in a capture, where the device checks them. In a
    compiled program `gdpa` checks them."""
    checks.check_bool(validate=validate)
    rows = x.shape[0]
    options = {"validate": validate, "allow_padding": False}
    sequences = read_sequences("cu_seqlens", cu_seqlens, rows, x.device, max_seqlen, **options)
    if sequences.cu_seqlens.shape != history.cu_seqlens.shape:
        raise ValueError(
            f"cu_seqlens must have shape {list(history.cu_seqlens.shape)}, as the histories, got "
            f"{list(sequences.cu_seqlens.shape)}"
        )
    if sequences.check_values and not checks.is_fake(x):
        sizes = (rows, rows), (max_seqlen, max_seqlen)
        padding.assert_offsets(None, sequences.cu_seqlens, None, *sizes, allow_padding=False)
        sequences = sequences._replace(check_values=False)
    return sequences


def score_gathered(tokens: Candidates, mask: Mask, **options) -> torch.Tensor:
    """One call of `gdpa`, over [history; candidates] copied out of the pages."""
    q, k, v, sequences, cache, layer, history = tokens
    cu_seqlens, max_seqlen, *_ = sequences
    keys, values = cache.read_before(layer, history, k, v, cu_seqlens, max_seqlen)
    both = Sequences(history.cu_seqlens + cu_seqlens, history.max_seqlen + max_seqlen)
    mask = replace(mask, causal="lower_right", num_targets=cu_seqlens.diff())
    return gdpa(q, keys, values, sequences, both, mask=mask, **options)


def _add_candidates(
    tokens: Candidates, over_history: torch.Tensor, group: int, by_diagonal: bool, **options
) -> torch.Tensor:
    """The attention over the groups, added to that over the histories. by_diagonal: each candidate
    is a group, and a kernel of its own adds it to the result, or to the partial sums of it."""
    q, k, v, sequences, *_ = tokens
    if by_diagonal:
        from gdpa_kernels.serving import diagonal  # only here Triton is needed

        names = "activation", "scale", "output_scale", "out_dtype"
        known = {name: options[name] for name in names if name in options}
        return diagonal.add_diagonal(q, k, v, over_history, **known)
    mask = Mask(True, window=0)  # itself alone
    if group > 1:
        counts = sequences.cu_seqlens.diff()
        mask = Mask(True, num_targets=counts, target_group_size=group)
    return gdpa(q, k, v, sequences, sequences, mask=mask, add_to=over_history, **options)


def _choose(
    tokens: Candidates, in_pages: bool, group: int, in_one_call: bool | None, **options
) -> tuple[Way, Batch | None]:
    """How `score` computes these candidates, and the call for the kernel that reads pages, None if
    they are gathered, as they are unless `in_pages`."""
    over_history = _over_history(tokens, **options) if in_pages else None
    if over_history is None or _PAGED.device_problem(over_history.device):
        return "one, gathered" if in_one_call else "two, gathered", None
    if in_one_call or (in_one_call is None and _PAGED.config(over_history, "forward").splits == 1):
        both = _over_both(over_history, tokens, group, options["out_dtype"])
        if in_one_call or api.resolve("auto", "forward", replace(both, paged_kv=None)) is _PAGED:
            return ("one, gathered", None) if _PAGED.call_problem(both) else ("one, in pages", both)
    if _PAGED.call_problem(over_history):
        return "two, gathered", None
    return "two, in pages", over_history


def _over_history(
    tokens: Candidates, *, activation: str | tuple[str, ...] | list[str] = "gelu_tanh",
    scale: float | None = None, output_scale: float = 1.0, precise: bool = False, **_,
) -> Batch:  # fmt: skip
    """The call over the histories alone, in their pages, with a result in fp32; checked."""
    q, k, v, sequences, cache, layer, history = tokens
    names = tuple(check_activation(activation, q.shape[1]))
    api.check_scalars(scale, output_scale)
    checks.check_bool(precise=precise)
    return Batch(
        q, k[:0], v[:0], sequences.cu_seqlens, history.cu_seqlens, sequences.max_seqlen,
        history.max_seqlen, names,
        q.shape[2] ** -0.5 if scale is None else float(scale), float(output_scale),
        precise=precise, out_dtype=torch.float32,
        paged_kv=cache.paged_kv(layer, history, k, v, sequences.cu_seqlens),
    )  # fmt: skip


def _over_both(
    batch: Batch, tokens: Candidates, group: int, out_dtype: torch.dtype | None
) -> Batch:
    """The call over [history; candidates], of that over the histories."""
    counts = batch.cu_seqlens_q.diff()
    return replace(
        batch, k=tokens.k, v=tokens.v, cu_seqlens_k=batch.cu_seqlens_k + batch.cu_seqlens_q,
        max_seqlen_k=batch.max_seqlen_k + batch.max_seqlen_q, out_dtype=out_dtype,
        segments=F.pad(counts[:, None], (0, 1)),
        mask=Mask("lower_right", target_group_size=group),
    )  # fmt: skip


def _shared_lists(sequences: Sequences, history: Pages) -> CallWorkLists | None:
    """Work lists that keep that of the histories for all layers. None for offsets in a tensor, and
    in the capture of a CUDA graph, which may be replayed when others stand in these pages."""
    ends = history.cu_seqlens
    if sequences.lengths is None or _is_captured(ends):
        return None
    history.lengths.check_unmodified("history")
    return CallWorkLists((ends, sequences.cu_seqlens), history.lengths, sequences.lengths)


def _is_captured(x: torch.Tensor) -> bool:
    return x.is_cuda and checks.is_capturing(x.device)


def _in_pages(
    batch: Batch, lists: CallWorkLists | None = None, *, partial_sums: bool = False
) -> torch.Tensor:
    """The output of the implementation that reads pages, or the partial sums that add up to it.
    lists: of the call, None for one that is made here."""
    prove(batch.activation, batch.device)
    config = _PAGED.config(batch, "forward")
    recipe = _PAGED.recipe(batch, config)
    work_list = None if lists is None else lists.once(recipe, "forward")
    module = _PAGED.module()
    run = module.partial_sums if partial_sums else module.forward
    return run(batch, config=config, work_list=work_list)


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: PagedCache) -> None:
    """Raises TypeError or ValueError unless each candidate has a row of q, and of k and v as the
    cache holds them."""
    checks.check_tensors(q, k, v)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k must have q's {q.shape[0]} rows, got {k.shape[0]}")
    if k.shape[1:] != cache.data.shape[-2:]:
        raise ValueError(
            f"k must have the cache's {list(cache.data.shape[-2:])} heads and head_dim, got "
            f"{list(k.shape[1:])}"
        )
