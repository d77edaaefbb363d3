"""State dicts of the public HSTU code bases, as those of `HSTULayer`, both ways.

| kind              | code base                                                | columns |
|-------------------|----------------------------------------------------------|---------|
| "stu"             | generative-recommenders, `STULayer`                      | u v q k |
| "research"        | the same, `SequentialTransductionUnitJagged`             | u v q k |
| "fused", "paged"  | recsys-examples, `FusedHSTULayer`, `PagedHSTUInferLayer` | u v q k |
| "native", "debug" | recsys-examples, `HSTULayer`, native and debug           | by head |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from gdpa_kernels.calling import checks
from gdpa_kernels.hstu.layer import HSTULayer


class Entry(NamedTuple):
    """The name of a weight, theirs and ours; whether theirs is transposed, and whether its columns
    are those of uvqk."""

    theirs: str
    ours: str
    transposed: bool = False
    uvqk: bool = False


_NORMS = "input_norm.weight", "input_norm.bias", "output_weight", "output_bias"


def _norms(*theirs: str) -> tuple[Entry, ...]:
    return tuple(map(Entry, theirs, _NORMS[: len(theirs)]))


_INPUT = "_input_layernorm_weight", "_input_layernorm_bias"
_OUTPUT = "_output_layernorm_weight", "_output_layernorm_bias"
_LINEAR = (
    Entry("_linear_uvqk.weight", "uvqk.weight", uvqk=True),
    Entry("_linear_uvqk.bias", "uvqk.bias", uvqk=True),
    Entry("_linear_proj.weight", "out.weight"),
)
ENTRIES = {
    "stu": (
        *_norms("_input_norm_weight", "_input_norm_bias", "_output_norm_weight",
                "_output_norm_bias"),
        Entry("_uvqk_weight", "uvqk.weight", True, True),
        Entry("_uvqk_beta", "uvqk.bias", uvqk=True),
        Entry("_output_weight", "out.weight", True),
    ),
    "research": (
        Entry("_uvqk", "uvqk.weight", True, True),
        Entry("_o.weight", "out.weight"),
        Entry("_o.bias", "out.bias"),
        Entry("_rel_attn_bias._pos_w", "position_bias"),
        Entry("_rel_attn_bias._ts_w", "time_bias"),
    ),
    "fused": (
        *_norms(*_INPUT, *_OUTPUT),
        Entry("_linear_uvqk_weight", "uvqk.weight", True, True),
        Entry("_linear_uvqk_bias", "uvqk.bias", uvqk=True),
        Entry("_linear_proj_weight", "out.weight", True),
    ),
    "native": (
        *_norms(*_INPUT, "_output_ln_dropout_mul.weight", "_output_ln_dropout_mul.bias"), *_LINEAR,
    ),
    "debug": (*_norms(*_INPUT, *_OUTPUT), *_LINEAR),
    "paged": (*_norms(*_INPUT, *_OUTPUT), *_LINEAR),
}  # fmt: skip
BY_HEAD = "native", "debug"
"""Kinds whose uvqk has u v q k of each head."""


@torch.no_grad()
def load_weights(
    layer: HSTULayer, kind: str, theirs: Mapping[str, torch.Tensor], prefix: str = ""
) -> list[str]:
    """Copy the weights of another code base's layer.

    kind: of the table above. theirs: a state dict, in which the layer's names begin with prefix.
    Under tensor parallelism: that of a rank, for a layer of its heads.

    Returns the names behind the prefix that the layer has no place for, as `_extra_state` of
    TransformerEngine. Raises KeyError, ValueError: a weight is missing, or has another shape.
    """
    entries, weights = _entries(layer, kind), dict(layer.named_parameters())
    named = {n.removeprefix(prefix): x for n, x in theirs.items() if n.startswith(prefix)}
    missing = weights.keys() - {e.ours for e in entries if e.theirs in named}
    if missing:
        names = ", ".join(sorted(missing))
        raise KeyError(f"{kind} weights must have all of the layer's, got none for {names}")
    columns, copies = _columns(layer, kind), []
    for entry in entries:
        x, weight = named.pop(entry.theirs), weights[entry.ours]
        x = x.T if entry.transposed else x
        if x.shape != weight.shape:
            raise ValueError(
                f"{entry.theirs} must have the shape of {entry.ours}, {list(weight.shape)}"
                f"{', transposed' if entry.transposed else ''}, got {list(x.shape)}"
            )
        copies.append((weight, x[columns.to(x.device)] if entry.uvqk else x))
    for weight, x in copies:  # at last: a layer has all of them or none
        weight.copy_(x)
    return [*named]


@torch.no_grad()
def save_weights(layer: HSTULayer, kind: str) -> dict[str, torch.Tensor]:
    """The inverse of `load_weights`: copies under the names of another code base."""
    back, theirs, weights = _columns(layer, kind).argsort(), {}, layer.state_dict()
    for entry in _entries(layer, kind):
        x = weights[entry.ours]
        x = x[back.to(x.device)] if entry.uvqk else x
        theirs[entry.theirs] = (x.T if entry.transposed else x).clone().contiguous()
    return theirs


def _entries(layer: HSTULayer, kind: str) -> list[Entry]:
    """Those that the layer has."""
    checks.check_choice("kind", kind, tuple(ENTRIES))
    names = dict(layer.named_parameters()).keys()
    return [entry for entry in ENTRIES[kind] if entry.ours in names]


def _columns(layer: HSTULayer, kind: str) -> torch.Tensor:
    """Their column of each of ours, u q k v."""
    heads, sizes = layer.num_heads, [layer.hidden_dim] * 2 + [layer.attention_dim] * 2
    if kind in BY_HEAD:
        of_heads = torch.arange(heads * sum(sizes)).view(heads, -1).split(sizes, dim=1)
        u, v, q, k = (x.flatten() for x in of_heads)
    else:
        u, v, q, k = torch.arange(heads * sum(sizes)).split([heads * size for size in sizes])
    return torch.cat((u, q, k, v))
