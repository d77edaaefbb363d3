"""`replace_stu`: every STULayer of a model of generative-recommenders becomes an `HSTULayer`."""

from __future__ import annotations

import torch
from torch import nn

from gdpa_kernels.gdpa.mask import Mask
from gdpa_kernels.hstu.adapters import counts_of_stu
from gdpa_kernels.hstu.layer import Form, HSTULayer
from gdpa_kernels.hstu.weights import load_weights


class STULayer(HSTULayer):
    """`HSTULayer` with the arguments of generative-recommenders' `STULayer.forward`.

    contexts: contextual_seq_len; target_aware: whether num_targets are used.
    """

    contexts, target_aware = 0, True

    def forward(
        self,
        x: torch.Tensor,
        x_lengths: torch.Tensor,
        x_offsets: torch.Tensor,
        max_seq_len: int,
        num_targets: torch.Tensor,
        max_kv_caching_len: int = 0,
        kv_caching_lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`[tokens, embed_dim]`. Raises NotImplementedError for kv_caching_lengths: histories are
        kept by `gdpa_kernels.serving`."""
        if kv_caching_lengths is not None:
            raise NotImplementedError(
                "kv_caching_lengths must be None: histories are kept by gdpa_kernels.serving"
            )
        counts = counts_of_stu(x_offsets, num_targets if self.target_aware else None, self.contexts)
        y, _ = super().forward((x, x_offsets), max_seq_len, **counts)
        return y


def replace_stu(model: nn.Module, **options: object) -> int:
    """Put a `STULayer` with the same weights in the place of every STULayer of a model, and return
    how many there were. options: of `HSTULayer` (impl, precise, validate, ...).

    The modules are known by the name of their class: nothing of theirs is imported. The new
    parameters are copies: make the optimizer afterwards.
    """
    pairs = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if type(layer).__name__ == "STULayer" and not isinstance(layer, STULayer)
    ]
    for parent, name, layer in pairs:
        setattr(parent, name, _replaced(layer, options))
    return len(pairs)


def _replaced(layer: nn.Module, options: dict[str, object]) -> STULayer:
    """The layer, whose attributes of one underscore are all that it says about itself."""
    known = vars(layer)
    weight = dict(layer.named_parameters())["_uvqk_weight"]
    replaced = STULayer(
        known["_embedding_dim"], known["_num_heads"], known["_hidden_dim"], known["_attention_dim"],
        form=Form(group_norm=known["_use_group_norm"]), scale=known["_attn_alpha"],
        dropout=known["_output_dropout_ratio"],
        mask=Mask(causal=True, window=known["_max_attn_len"] or None), device=weight.device,
        dtype=weight.dtype, **options,
    )  # fmt: skip
    replaced.contexts, replaced.target_aware = known["_contextual_seq_len"], known["_target_aware"]
    load_weights(replaced, "stu", layer.state_dict())
    return replaced.train(layer.training)
