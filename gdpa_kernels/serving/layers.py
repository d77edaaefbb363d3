"""`GDPASelfAttention` over cached histories: `extend` for new tokens, `candidates` for candidates.

An application calls one of them for each layer of its model, with the page tables of one
`PagedCache.append` or `pages`; see examples/serve.py. Both give the rows that the layer itself
gives in a call on whole histories.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from gdpa_kernels.calling import checks, packed
from gdpa_kernels.calling.lengths import Lengths
from gdpa_kernels.calling.sequences import token_positions
from gdpa_kernels.gdpa.api import gdpa
from gdpa_kernels.layers import common
from gdpa_kernels.layers.gdpa import GDPASelfAttention
from gdpa_kernels.layers.rotary import sin_cos_at
from gdpa_kernels.serving.cache import PagedCache
from gdpa_kernels.serving.pages import Pages, check_whole
from gdpa_kernels.serving.scores import Candidates, candidate_sequences, score, score_gathered


@torch.no_grad()
def extend(
    layer: GDPASelfAttention,
    x: torch.Tensor,
    cache: PagedCache,
    index: int,
    new: Pages,
    whole: Pages,
) -> torch.Tensor:
    """The layer's output for new tokens of histories, whose keys and values it stores.

    Args:
        layer: causal, without full_rows; with rotary under rules of positions="index".
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
    q, k, v = _project(layer, x, new.positions)
    cache.write(index, new, k, v)
    mask = replace(cache.rules.mask, causal="lower_right")  # the new tokens are the last ones
    out = gdpa(
        q, *cache.read(index, whole), new.sequences, whole.sequences, mask=mask, validate=False,
        **layer.options.of_gdpa,
    )  # fmt: skip
    return layer.out(out.flatten(1))


@torch.no_grad()
def candidates(
    layer: GDPASelfAttention,
    x: torch.Tensor,
    cu_seqlens: torch.Tensor | Lengths,
    max_seqlen: int,
    cache: PagedCache,
    index: int,
    whole: Pages,
) -> torch.Tensor:
    """The layer's output for candidates `[tokens, embed_dim]`, of offsets `[batch + 1]`.

    These are the rows that `layer` gives for them behind their histories, with `num_targets`.
    Nothing is stored. With a window they are one call over [history; candidates]; else `score`. The
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
    q, k, v = _project(layer, x, positions)
    options = layer.options.of_gdpa | {"validate": False}
    if layer.mask.window is None:
        options["target_group_size"] = layer.mask.target_group_size
        out = score(q, k, v, sequences, max_seqlen, cache, index, whole, **options)
    else:
        mask = replace(layer.mask, num_contexts=cache.rules.mask.num_contexts)
        tokens = Candidates(q, k, v, sequences, cache, index, whole)
        out = score_gathered(tokens, mask, **options)
    return layer.out(out.flatten(1))


def _check(layer: GDPASelfAttention, cache: PagedCache, index: int) -> None:
    """Raises NotImplementedError or ValueError unless the layer can be that one of the cache."""
    rules = cache.rules
    if checks.check_count("index", index) >= rules.num_layers:
        raise ValueError(
            f"index must be below num_layers of cache.rules, {rules.num_layers}, got {index}"
        )
    if layer.position_bias is not None or layer.time_bias is not None:
        raise NotImplementedError(
            "position_bias and time_bias of layer must be None: the calls over a cached history "
            "take no times, and candidates behind it no distances; got one of them"
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


def _project(
    layer: GDPASelfAttention, x: torch.Tensor, positions: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """q, k and v `[tokens, heads, head_dim]`, normalised and rotated as the layer has it.

    positions: of the tokens in their sequences; None will do without rotary.
    """
    qkv = layer.qkv(x).unflatten(1, (-1, layer.head_dim))
    rotation = None
    if layer.rotary is not None:
        dtype = torch.promote_types(x.dtype, torch.float32)
        rotation = sin_cos_at(layer.rotary, layer.head_dim, positions, dtype)
    q, k, v = packed.unpack(qkv, None, None, layer.num_kv_heads)
    return common.norm_and_rotate(q, k, v, layer.num_kv_heads, layer.q_norm, layer.k_norm, rotation)
