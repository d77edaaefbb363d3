"""`GDPASelfAttention` over histories that are kept: new tokens, and candidates."""

from __future__ import annotations

import torch

from gdpa_kernels.calling import packed
from gdpa_kernels.gdpa.api import gdpa
from gdpa_kernels.gdpa.modules import GDPASelfAttention
from gdpa_kernels.serving.cache import PagedCache, Pages, score


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
        layer: causal and without rotary, whose turns of new tokens would need their places.
        x: the new tokens, `[tokens, embed_dim]`.
        index: which layer of the cache this is.
        new: what `cache.append` gave for them. whole: `cache.pages` of the same users, in the same
            order, after the append.

    Returns:
        `[tokens, embed_dim]`: the rows that `layer` gives for them in a call on whole histories,
        with the num_contexts of cache.model.

    Raises:
        NotImplementedError, ValueError: the layer cannot be served so, or is not as cache.model.
    """
    _check(layer, cache)
    q, k, v = _project(layer, x)
    cache.write(index, new, k, v)
    out = gdpa(
        q, *cache.read(index, whole), new.cu_seqlens, whole.cu_seqlens, new.max_seqlen,
        whole.max_seqlen, causal="lower_right", window=layer.window,
        num_contexts=cache.model.num_contexts or None, **_options(layer),
    )  # fmt: skip
    return layer.out(out.flatten(1))


@torch.no_grad()
def candidates(
    layer: GDPASelfAttention,
    x: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    cache: PagedCache,
    index: int,
    whole: Pages,
) -> torch.Tensor:
    """The layer's output for candidates `[tokens, embed_dim]`, of offsets `[batch + 1]`.

    These are the rows that `layer` gives for them behind their histories, with `num_targets`.
    Nothing is stored. The other arguments, and the errors: as `extend`; and a layer with a window
    is refused, and a model whose history depends on its candidates (`Model.check_candidates`).
    """
    _check(layer, cache)
    cache.model.check_candidates()
    if layer.window is not None:
        raise NotImplementedError(f"layer must have no window for candidates, got {layer.window}")
    q, k, v = _project(layer, x)
    group = layer.targets["target_group_size"]
    out = score(
        q, k, v, cu_seqlens, max_seqlen, *cache.read(index, whole), whole,
        target_group_size=group, **_options(layer),
    )  # fmt: skip
    return layer.out(out.flatten(1))


def _check(layer: GDPASelfAttention, cache: PagedCache) -> None:
    if layer.rotary is not None or layer.targets["full_rows"]:
        told = f"rotary {layer.rotary}, full_rows {layer.targets['full_rows']}"
        raise NotImplementedError(f"layer must have neither rotary nor full_rows, got {told}")
    asked = bool(layer.causal), layer.window
    if not layer.causal or layer.causal == "lower_right" or asked != _mask_of(cache):
        raise ValueError(
            f"layer must have the mask of cache.model, (causal, window) {_mask_of(cache)}, "
            f"got {(layer.causal, layer.window)}"
        )


def _mask_of(cache: PagedCache) -> tuple[bool, int | None]:
    return cache.model.causal, cache.model.window


def _project(layer: GDPASelfAttention, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k and v `[tokens, heads, head_dim]`, normalised as the layer has it."""
    made = layer.qkv(x).unflatten(1, (-1, layer.head_dim))
    q, k, v = packed.unpack(made, None, None, layer.num_kv_heads)
    return (q, k, v) if layer.q_norm is None else (layer.q_norm(q), layer.k_norm(k), v)


def _options(layer: GDPASelfAttention) -> dict:
    names = "activation", "scale", "output_scale", "precise", "impl"
    return {name: getattr(layer, name) for name in names} | {"validate": False}
