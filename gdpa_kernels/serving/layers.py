"""`GDPASelfAttention` and `HSTULayer` over cached histories: `extend` for new tokens, `candidates`
for candidates.

An application calls one of them for each layer of its model, with the page tables of one
`PagedCache.append` or `pages`; see examples/serve.py. Both give the rows that the layer itself
gives in a call on whole histories.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn import functional as F

from gdpa_kernels.calling import checks, packed
from gdpa_kernels.calling.lengths import Lengths
from gdpa_kernels.calling.sequences import token_positions
from gdpa_kernels.gdpa.api import gdpa
from gdpa_kernels.gdpa.bias import check_times
from gdpa_kernels.hstu.layer import HSTULayer
from gdpa_kernels.layers import common
from gdpa_kernels.layers.gdpa import GDPASelfAttention
from gdpa_kernels.layers.rotary import sin_cos_at
from gdpa_kernels.serving.cache import PagedCache
from gdpa_kernels.serving.common import join_copies
from gdpa_kernels.serving.pages import Pages, check_whole
from gdpa_kernels.serving.scores import Candidates, candidate_sequences, score, score_gathered

Served = GDPASelfAttention | HSTULayer


@torch.no_grad()
def extend(
    layer: Served,
    x: torch.Tensor,
    cache: PagedCache,
    index: int,
    new: Pages,
    whole: Pages,
) -> torch.Tensor:
    """The layer's output for new tokens of histories, whose keys and values it stores.

    Args:
        layer: causal, without full_rows; with rotary under rules of positions="index"; with
            time_bias over a cache with times, and next_time=False, since the next event is not
            known; an `HSTULayer` with a divisor.
        x: the new tokens, `[tokens, embed_dim]`.
        index: which layer of the cache this is.
        new: what `cache.append` gave for them. whole: `cache.pages` of the same users, in the same
            order, after this append and before the next one.

    Returns:
        `[tokens, embed_dim]`: the rows that `layer` gives for them in a call on whole histories,
        with the num_contexts of cache.rules.

    Raises:
        NotImplementedError, ValueError: the layer cannot be served so, or is not as cache.rules;
            or an argument is wrong.
    """
    _check(layer, cache, index)
    asked, received = (
        [(span.user, span.entry.epoch, span.end) for span in pages.spans] for pages in (new, whole)
    )
    begins = [span.begin for span in whole.spans]
    if asked != received or any(begins):
        raise ValueError(
            "whole must be the pages of users and epochs up to their new rows, "
            f"{asked}, from the start, got {received} from {begins}"
        )
    (q, k, v), finish = _project(layer, x, new.positions, cache)
    cache.write(index, new, k, v)
    mask = replace(cache.rules.mask, causal="lower_right")  # the new tokens are the last ones
    times = None if layer.time_bias is None else (cache.read_times(whole), cache.read_times(new))
    out = gdpa(
        q, *cache.read(index, whole), new.sequences, whole.sequences, mask=mask, validate=False,
        relative_bias=layer.relative_bias(*times or (None,)), **_options(layer),
    )  # fmt: skip
    return finish(out)


@torch.no_grad()
def candidates(
    layer: Served,
    x: torch.Tensor,
    cu_seqlens: torch.Tensor | Lengths,
    max_seqlen: int,
    cache: PagedCache,
    index: int,
    whole: Pages,
    timestamps: torch.Tensor | None = None,
) -> torch.Tensor:
    """The layer's output for candidates `[tokens, embed_dim]`, of offsets `[batch + 1]`.

    These are the rows that `layer` gives for them behind their histories, with `num_targets`.
    timestamps: with time_bias, int32 or int64 `[tokens]`, when each is shown. Nothing is stored.
    With a window or a bias they are one call over [history; candidates]; else `score`. The
    offsets are checked, which waits for the device, unless they are `Lengths` or the layer does not
    validate. The other arguments, and the errors: as `extend`; and rules by which a history depends
    on its candidates are refused (`HistoryRules.check_candidates`).
    """
    _check(layer, cache, index)
    cache.rules.check_candidates()
    check_whole("whole", whole)
    max_seqlen = checks.check_max_seqlen("max_seqlen", max_seqlen)
    sequences = candidate_sequences(x, cu_seqlens, max_seqlen, whole, layer.options.validate)
    positions = None
    if layer.rotary is not None:  # the only one that asks for them
        sequence, position = token_positions(x.shape[0], sequences.cu_seqlens)
        positions = position + whole.cu_seqlens.diff()[sequence]
    (q, k, v), finish = _project(layer, x, positions, cache)
    options = _options(layer) | {"validate": False}
    if timestamps is not None and layer.time_bias is not None:
        check_times("timestamps", timestamps, "time_bias")
        ends = whole.cu_seqlens, sequences.cu_seqlens
        keys = join_copies(cache.read_times(whole), timestamps.long(), *ends)
        bias = layer.relative_bias(keys, timestamps)
    else:
        bias = layer.relative_bias(timestamps)
    if layer.mask.window is None and bias is None:
        options["target_group_size"] = layer.mask.target_group_size
        out = score(q, k, v, sequences, max_seqlen, cache, index, whole, **options)
    else:
        mask = replace(layer.mask, num_contexts=cache.rules.mask.num_contexts)
        tokens = Candidates(q, k, v, sequences, cache, index, whole)
        out = score_gathered(tokens, mask, relative_bias=bias, **options)
    return finish(out)


def _check(layer: Served, cache: PagedCache, index: int) -> None:
    """Raises NotImplementedError or ValueError unless the layer can be that one of the cache."""
    rules = cache.rules
    if checks.check_count("index", index) >= rules.num_layers:
        raise ValueError(
            f"index must be below num_layers of cache.rules, {rules.num_layers}, got {index}"
        )
    if layer.time_bias is not None and layer.next_time:
        raise NotImplementedError(
            "next_time of layer must be False: the time of the event after the last one is not "
            "known, got True"
        )
    if layer.time_bias is not None and cache.times is None:
        raise ValueError("cache must have times (with_times=True) for a layer with time_bias")
    if isinstance(layer, HSTULayer) and layer.divisor is None:
        raise ValueError(
            "divisor of layer must be given: the longest sequence of a call is not that of "
            "training, got None"
        )
    if layer.mask.full_rows:  # an append limits rows that saw everything
        raise NotImplementedError(f"full_rows of layer must be 0, got {layer.mask.full_rows}")
    if layer.rotary is not None and rules.positions != "index":
        raise ValueError(
            "positions of cache.rules must be 'index' for a layer with rotary, which counts its "
            f"rows from the start, got {rules.positions!r}"
        )
    if layer.mask.causal not in (True, "upper_left"):
        raise ValueError(f"causal of layer must be True or 'upper_left', got {layer.mask.causal!r}")
    expected, mask = ((bool(x.causal), x.window) for x in (rules.mask, layer.mask))
    if mask != expected:
        raise ValueError(
            f"layer must have the mask of cache.rules, (causal, window) {expected}, got "
            f"{(layer.mask.causal, layer.mask.window)}"
        )


def _options(layer: Served) -> dict[str, object]:
    """What the layer asks of `gdpa`, but for mask, bias and validate."""
    options = layer.options.of_gdpa
    if isinstance(layer, HSTULayer):
        options |= {"scale": layer.scale, "output_scale": 1 / layer.divisor}
    return options


def _project(
    layer: Served, x: torch.Tensor, positions: torch.Tensor | None, cache: PagedCache
) -> tuple[tuple[torch.Tensor, ...], Callable[[torch.Tensor], torch.Tensor]]:
    """q, k and v `[tokens, heads, head_dim]`, normalised and rotated as the layer has it, and what
    makes the layer's output of the attention's.

    positions: of the tokens in their sequences; None will do without rotary.
    """
    if isinstance(layer, HSTULayer):
        u, *qkv = layer.project(x)
        qkv = packed.unpack(*qkv, layer.num_heads)
        most = cache.data.shape[-1]  # q and k may be narrower than v, or wider
        qkv = tuple(F.pad(each, (0, most - each.shape[2])) for each in qkv)
        wide = layer.hidden_dim
        return qkv, lambda out: layer.finish(x, u, out[..., :wide].flatten(1))
    qkv = layer.qkv(x).unflatten(1, (-1, layer.head_dim))
    rotation = None
    if layer.rotary is not None:
        dtype = torch.promote_types(x.dtype, torch.float32)
        rotation = sin_cos_at(layer.rotary, layer.head_dim, positions, dtype)
    q, k, v = packed.unpack(qkv, None, None, layer.num_kv_heads)
    norms = layer.q_norm, layer.k_norm
    qkv = common.norm_and_rotate(q, k, v, layer.num_kv_heads, *norms, rotation)
    return qkv, lambda out: layer.out(out.flatten(1))
