"""`HSTULayer`: the layers of three HSTU code bases on `gdpa` and `norm_mul`.

y = x + W_out dropout(concat(u, a, u norm(a))), a = gdpa(q, k, v) / N, u, q, k, v = W norm(x).
`Form` says what the code bases do differently; weights.py reads and writes their state dicts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from gdpa_kernels.calling import checks, jagged
from gdpa_kernels.calling.jagged import Jagged
from gdpa_kernels.calling.sequences import with_max_seqlen
from gdpa_kernels.gdpa.api import gdpa
from gdpa_kernels.gdpa.mask import Mask
from gdpa_kernels.hstu.thresholds import thresholds_of
from gdpa_kernels.layers.bias import BiasTables
from gdpa_kernels.layers.gdpa import Options
from gdpa_kernels.norms.norm_mul import norm_mul

CAUSAL = Mask(causal=True)


@dataclass(frozen=True)
class Form:
    """Differences between the code bases.

    Args:
        silu: SiLU of "u" alone, of all four ("uvqk"), or of "none".
        concat: what W_out takes, as `norm_mul` has it.
        group_norm: the output norm is of each head, with one weight and one bias a head.
        input_affine, output_affine: whether the norms have a weight and a bias.
        uvqk_bias, output_bias: whether the projections have a bias.
        residual: whether x is added.
        eps: of both norms.
    """

    silu: str = "u"
    concat: tuple[str, ...] = ("u", "a", "un")
    group_norm: bool = False
    input_affine: bool = True
    output_affine: bool = True
    uvqk_bias: bool = True
    output_bias: bool = False
    residual: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        checks.check_choice("silu", self.silu, ("u", "uvqk", "none"))


STU = Form()
"""generative-recommenders, modules/stu.py."""
RESEARCH = Form(
    "uvqk", ("un",), input_affine=False, output_affine=False, uvqk_bias=False, output_bias=True
)
"""generative-recommenders, research: its scale is 1. With concat_ua: concat=("u", "n", "un")."""
RECSYS_EXAMPLES = Form("uvqk", ("un",), eps=1e-5)
"""recsys-examples: the fused, native, debug and paged layers."""


class HSTULayer(BiasTables):
    """A layer of HSTU, on a jagged batch.

    The columns of `uvqk` are u, q, k, v: q, k and v are one tensor for `gdpa` where attention_dim
    equals hidden_dim, and have one gradient. Weights are cast to x's dtype.

    Args:
        embed_dim: features of a token.
        num_heads: heads.
        hidden_dim: of each head of u and v; None for embed_dim // num_heads.
        attention_dim: of each head of q and k; None for hidden_dim.
        form: `Form`, of which `STU`, `RESEARCH` and `RECSYS_EXAMPLES` are the published ones.
        mask: `Mask`, without the numbers of targets and contexts; causal by default.
        divisor: N, by which the sum over keys is divided; None for the call's, or its max_seqlen.
        dropout: the probability that an input of W_out is 0 in training.
        position_bias, time_bias, next_time: as `GDPASelfAttention`.
        bucketization: the function of a trained model from times to buckets, whose thresholds time
            differences are compared with (`thresholds_of`); None for HSTU's, computed exactly.
        options: of `Options`, but for qk_norm, fused_qk_norm, bias and output_scale.

    Raises:
        TypeError, ValueError: an argument is wrong: its name, what is expected, what was received.

    Source: HSTU (arXiv 2402.17152), and the public code that `Form` names.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        hidden_dim: int | None = None,
        attention_dim: int | None = None,
        *,
        form: Form = STU,
        mask: Mask = CAUSAL,
        divisor: int | None = None,
        dropout: float = 0.0,
        position_bias: int | None = None,
        time_bias: int | None = None,
        next_time: bool = True,
        bucketization: Callable[[torch.Tensor], torch.Tensor] | None = None,
        **options: object,
    ):
        super().__init__()
        checks.check_positive(embed_dim=embed_dim, num_heads=num_heads)
        hidden_dim = embed_dim // num_heads if hidden_dim is None else hidden_dim
        attention_dim = hidden_dim if attention_dim is None else attention_dim
        checks.check_positive(hidden_dim=hidden_dim, attention_dim=attention_dim)
        if divisor is not None:
            checks.check_positive(divisor=divisor)
        checks.check_float("dropout", dropout)
        refused = {"qk_norm", "fused_qk_norm", "bias", "output_scale"} & options.keys()
        if refused:
            raise TypeError(f"options must not have {', '.join(sorted(refused))}")
        self.options = Options(**{"activation": "silu"} | options)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.hidden_dim, self.attention_dim = hidden_dim, attention_dim
        self.form, self.mask, self.divisor, self.dropout = form, mask, divisor, dropout
        self.bucketization, self.rotary = bucketization, None
        factory, wide = self.options.factory, num_heads * hidden_dim
        self.make_tables(position_bias, time_bias, next_time, **factory)
        self.input_norm = nn.LayerNorm(embed_dim, form.eps, form.input_affine, **factory)
        columns = 2 * num_heads * (hidden_dim + attention_dim)
        self.uvqk = nn.Linear(embed_dim, columns, form.uvqk_bias, **factory)
        entries = num_heads if form.group_norm else wide
        self.output_weight = self.output_bias = None
        if form.output_affine:
            self.output_weight = nn.Parameter(torch.ones(entries, **factory))
            self.output_bias = nn.Parameter(torch.zeros(entries, **factory))
        self.out = nn.Linear(wide * len(form.concat), embed_dim, form.output_bias, **factory)

    def forward(
        self,
        x: torch.Tensor | Jagged,
        max_seqlen: int | None = None,
        *,
        divisor: int | torch.Tensor | None = None,
        num_targets: torch.Tensor | None = None,
        num_contexts: torch.Tensor | int | None = None,
        timestamps: torch.Tensor | None = None,
        query_timestamps: torch.Tensor | None = None,
    ) -> torch.Tensor | Jagged:
        """The layer's output, of the kind and shape of x.

        x, max_seqlen, num_targets, num_contexts, timestamps: as `GDPASelfAttention.forward`.
        query_timestamps: as `RelativeBias`. divisor: of this batch, in place of the layer's; of a
        tensor of one number, and in a compiled model of any, the kernels give the sum alone, and
        `norm_mul` divides it: one graph for all N.
        """
        longest = self.options.max_seqlen if max_seqlen is None else max_seqlen
        validate = self.options.validate
        values, sequences = jagged.read_jagged(
            x, self.embed_dim, longest, validate, allow_padding=True
        )
        sequences = with_max_seqlen("offsets", sequences)
        divisor = self.divisor if divisor is None else divisor
        divisor = sequences.max_seqlen if divisor is None else divisor
        u, *qkv = self.project(values)
        output_scale, scale = self._divided(divisor, values)
        counted = any(isinstance(x, torch.Tensor) for x in (num_targets, num_contexts))
        attention = gdpa(
            *qkv, sequences, sequences, mask=self.mask.of_batch(num_targets, num_contexts),
            relative_bias=self.relative_bias(timestamps, query_timestamps),
            validate=validate and counted,
            **self.options.of_gdpa | {"scale": self.scale, "output_scale": output_scale},
        )  # fmt: skip
        return jagged.like(x, self.finish(values, u, attention.flatten(1), scale), sequences)

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        scale = self.options.scale
        return self.attention_dim**-0.5 if scale is None else scale

    def thresholds(self, device: torch.device | str | None) -> torch.Tensor:
        if self.bucketization is None:
            return super().thresholds(device)
        return thresholds_of(self.bucketization, len(self.time_bias), device)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """u `[tokens, heads * hidden_dim]`, before SiLU if that is of u alone, and q, k and v
        `[tokens, heads, dim]`; k and v None where q holds all three."""
        heads, dim, hidden = self.num_heads, self.attention_dim, self.hidden_dim
        norm = self.input_norm
        weights = (w if w is None else w.to(x.dtype) for w in (norm.weight, norm.bias))
        mixed = _linear(self.uvqk, F.layer_norm(x, x.shape[1:], *weights, norm.eps))
        if self.form.silu == "uvqk":
            mixed = F.silu(mixed)
        u, qkv = mixed.split((heads * hidden, heads * (2 * dim + hidden)), dim=1)
        if dim == hidden:
            return u, qkv.unflatten(1, (3 * heads, dim)), None, None
        q, k, v = qkv.split((heads * dim, heads * dim, heads * hidden), dim=1)
        return u, *(each.unflatten(1, (heads, -1)) for each in (q, k, v))

    def finish(
        self, x: torch.Tensor, u: torch.Tensor, attention: torch.Tensor,
        scale: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """All that follows the attention `[tokens, heads * hidden_dim]`; rows do not see each
        other. scale: as `norm_mul`."""
        form = self.form
        y = norm_mul(
            attention, u.to(attention.dtype), self._output(self.output_weight, attention),
            self._output(self.output_bias, attention), concat=form.concat, silu=form.silu == "u",
            heads=self.num_heads if form.group_norm else None, scale=scale, eps=form.eps,
            dropout_p=self.dropout if self.training else 0.0,
        )  # fmt: skip
        y = _linear(self.out, y)
        return x + y if form.residual else y

    def _output(self, weight: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
        """The output norm's weight or bias: in fp64 for fp64, else as it is."""
        if weight is None or (weight.dtype == torch.float64) == (like.dtype == torch.float64):
            return weight
        return weight.to(like.dtype)

    def _divided(
        self, divisor: int | torch.Tensor, x: torch.Tensor
    ) -> tuple[float, torch.Tensor | None]:
        """output_scale of `gdpa` and scale of `norm_mul`."""
        if not isinstance(divisor, torch.Tensor) and not torch.compiler.is_compiling():
            return 1 / max(divisor, 1), None
        dtype = torch.promote_types(x.dtype, torch.float32)
        return 1.0, x.new_ones((), dtype=dtype) / divisor

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, hidden_dim={self.hidden_dim}, "
            f"attention_dim={self.attention_dim}, form={self.form}, mask={self.mask}"
        )


def _linear(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """The linear layer, its weights cast to x's dtype if they have another, as autocast does."""
    if layer.weight.dtype == x.dtype or torch.is_autocast_enabled(x.device.type):
        return layer(x)
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    return F.linear(x, layer.weight.to(x.dtype), bias)
