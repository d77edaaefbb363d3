"""`GDPASelfAttention`, `PMA` and `PFFN`: the uses of GDPA as layers, with their projections.

| layer               | queries                        | keys and values              |
|---------------------|--------------------------------|------------------------------|
| `GDPASelfAttention` | W_q x of each token            | W_kv x of the same tokens    |
| `PMA`               | seeds, shared by all sequences | W_kv x of each token         |
| `PFFN`              | W_q x of each token            | W_kv summary of each sample  |

Each projects what `_checked_input` gives and calls `_attend`, which calls `gdpa` once and mixes the
heads. serving/layers.py runs a `GDPASelfAttention` over cached histories, by its parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from gdpa_kernels.calling import checks, jagged
from gdpa_kernels.calling.jagged import Jagged
from gdpa_kernels.calling.lengths import Lengths
from gdpa_kernels.calling.recipe import Recipe
from gdpa_kernels.calling.sequences import Sequences, with_max_seqlen
from gdpa_kernels.gdpa import api
from gdpa_kernels.gdpa.api import gdpa
from gdpa_kernels.gdpa.mask import ALL, FIELDS, Mask, mask_of
from gdpa_kernels.gdpa.registration import check_activation
from gdpa_kernels.layers import common
from gdpa_kernels.layers.bias import BiasTables
from gdpa_kernels.layers.rotary import check_rotary, sin_cos
from gdpa_kernels.norms.api import head_norm

Activation = str | tuple[str, ...] | list[str]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `GDPASelfAttention`, `PMA` and `PFFN`, which take them as keywords.

    Args:
        activation: a name, as `gdpa` takes it, or one per query head.
        scale: multiplies the scores before the activation; None means head_dim ** -0.5.
        output_scale: multiplies the attention's result, before the output projection.
        precise, impl, backward_impl: as `gdpa`.
        qk_norm: RMSNorm of each head's rows of q and of k, with learned weights w_q and w_k that
            start at 1. A score is then at most `scale * head_dim * max(abs(w_q * w_k))` in size:
            scale=1 / head_dim makes it a cosine at first, where the polynomial "gelu_taylor6" is
            accurate; the other activations need no bound. With it q and k are copies, only v is
            read in place, and PyTorch concatenates their gradients. False: the operator alone.
        fused_qk_norm: qk_norm and rotary by `norms.api.head_norm`, over what the linear layers
            made, which no hook may keep, and with packed gradients. The same function but for
            roundings; the modules q_norm and k_norm hold the weights and are not called. Selective
            checkpointing costs a copy of what the linear layers made.
        bias: whether the projections have one.
        max_seqlen: at least the longest sequence, in tokens. None takes that of the call, of
            `Lengths` or of a nested tensor that knows its own, or reads it from the offsets in each
            call, which waits for the device; a CUDA graph's capture needs one of the others.
        validate: check the values of the offsets, and of num_targets and num_contexts; as `gdpa`.
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: an argument is wrong: its name, what is expected, what was received.
    """

    activation: Activation = "gelu_tanh"
    scale: float | None = None
    output_scale: float = 1.0
    precise: bool = False
    impl: str = "auto"
    backward_impl: str = "auto"
    qk_norm: bool = False
    fused_qk_norm: bool = False
    bias: bool = True
    max_seqlen: int | None = None
    validate: bool = True
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        api.check_scalars(self.scale, self.output_scale)
        checks.check_bool(precise=self.precise, validate=self.validate, bias=self.bias)
        checks.check_impl(self.impl, api.IMPLS)
        checks.check_impl(self.backward_impl, api.BACKWARD_IMPLS, "backward_impl")
        common.check_fused(self.qk_norm, self.fused_qk_norm)
        longest = checks.check_count("max_seqlen", self.max_seqlen, optional=True)
        object.__setattr__(self, "max_seqlen", checks.clamped_to_int32(longest))
        if isinstance(self.activation, list):
            object.__setattr__(self, "activation", tuple(self.activation))

    @property
    def of_gdpa(self) -> dict[str, object]:
        """Those that `gdpa` takes, but for validate."""
        return {name: getattr(self, name) for name in api.SHARED_OPTIONS}

    @property
    def factory(self) -> dict[str, object]:
        """Device and dtype, as parameters take them."""
        return {"device": self.device, "dtype": self.dtype}


class _GDPALayer(nn.Module):
    """The options of the layers, the reading of a jagged batch, the call of `gdpa`.

    A subclass makes the projections, `out` among them.
    """

    out: nn.Linear

    def __init__(
        self, embed_dim: int, num_heads: int, num_kv_heads: int | None, options: dict[str, object]
    ):
        super().__init__()
        embed_dim, num_heads, num_kv_heads = common.check_heads(embed_dim, num_heads, num_kv_heads)
        self.embed_dim, self.head_dim = embed_dim, embed_dim // num_heads
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.options = Options(**options)
        check_activation(self.options.activation, num_heads)
        self.q_norm, self.k_norm = common.head_norms(
            self.options.qk_norm, self.head_dim, self.options.factory
        )

    def _linear(self, in_features: int, out_features: int) -> nn.Linear:
        return nn.Linear(in_features, out_features, self.options.bias, **self.options.factory)

    def _checked_input(
        self, x: torch.Tensor | Jagged, max_seqlen: int | None
    ) -> tuple[torch.Tensor, Sequences]:
        """The values of a jagged batch and its sequences, checked, with a max_seqlen."""
        longest = self.options.max_seqlen if max_seqlen is None else max_seqlen
        validate = self.options.validate
        values, sequences = jagged.read_jagged(
            x, self.embed_dim, longest, validate, allow_padding=True
        )
        return values, with_max_seqlen("offsets", sequences)

    def _attend(
        self, q: torch.Tensor, kv: torch.Tensor | None, sequences_q: Sequences | None,
        sequences_k: Sequences, rotation: tuple[torch.Tensor, torch.Tensor] | None = None,
        validate: bool = False, **options,
    ) -> torch.Tensor:  # fmt: skip
        """W_out gdpa(q, k, v), `[rows, embed_dim]`.

        q, kv: `[..., heads * head_dim]`, as linear layers make them, kv keys before values; kv
        None: q holds all three. sequences_q None: q is a parameter, shared by all sequences.
        """
        fused, shared = self.options.fused_qk_norm, sequences_q is None
        if fused:
            q, kv = self._norm_heads(q, kv, rotation, shared)
        q, k = (
            x if x is None else x.reshape(-1, x.shape[-1] // self.head_dim, self.head_dim)
            for x in (q, kv)
        )
        v = None  # in k, or with it in q
        if not fused:
            norms = self.q_norm, self.k_norm
            q, k, v = common.norm_and_rotate(q, k, v, self.num_kv_heads, *norms, rotation)
        elif shared:
            q = self.q_norm(q)
        out = gdpa(
            q, k, v, sequences_q, sequences_k,
            num_kv_heads=self.num_kv_heads if k is None else None,
            validate=validate, **self.options.of_gdpa, **options,
        )  # fmt: skip
        return self.out(out.flatten(1))

    def _norm_heads(
        self, q: torch.Tensor, kv: torch.Tensor | None,
        rotation: tuple[torch.Tensor, torch.Tensor] | None, shared: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """q and kv of `_attend`, their queries and keys normalised and rotated by `head_norm`,
        which writes over them, and over the gradients that `gdpa` makes for it. So a shared q, a
        parameter, is left."""
        options = {"eps": common.EPSILON, "overwrite_gradient": True}
        weights = self.q_norm.weight, self.k_norm.weight
        heads = self.num_heads, self.num_kv_heads
        if kv is None:
            return head_norm(q, weights, heads, rotation, **options), None
        if not shared:
            q = head_norm(q, weights[:1], heads[:1], **options)
        return q, head_norm(kv, weights[1:], heads[1:], **options)

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"activation={self.options.activation!r}, scale={self.options.scale}, "
            f"output_scale={self.options.output_scale}"
        )


class GDPASelfAttention(BiasTables, _GDPALayer):
    """Self-attention with an element-wise activation for softmax, on a jagged batch.

    One linear layer makes q, k and v, which the kernels read where they lie; another one mixes the
    heads: y = W_out gdpa(W_qkv x). Nothing is added to y: a residual is the caller's. Under
    autocast the layer follows its linear layers.

    No row is normalised, so a row's size grows with its number of keys. Kunlun divides the scores
    by the longest sequence: scale=1 / max_seqlen; output_scale=1 / max_seqlen divides the sum.

    Args:
        embed_dim: features of a token.
        num_heads: query heads; must divide embed_dim. head_dim is embed_dim // num_heads.
        num_kv_heads: key and value heads; must divide num_heads. None means num_heads.
        mask: `Mask`, the tokens that a token sees, without the numbers of targets and contexts,
            which come with each batch.
        rotary: the base of a rotary embedding of q and k, or None for none; interleaved, as
            `BlockAttention` describes it, and after qk_norm. The kernels do not rotate: PyTorch's
            operators do, and q and k are copies.
        position_bias: the longest distance of positions plus 1 for a learned relative bias of them,
            a parameter `[2 * position_bias - 1]` for all heads; None for none.
        time_bias: entries, at most 146, of a learned relative bias of times, a parameter
            `[time_bias]`: HSTU's is 129. With it `forward` takes timestamps. None for none. Both as
            `RelativeBias` has them, drawn from N(0, 0.02) as in HSTU.
        next_time: a row's bias takes the time of the event after it; as `RelativeBias`.
        options: of `Options`; and, in place of mask, the fields of one as keywords (causal=True),
            which go with version 0.3.

    Raises:
        TypeError, ValueError: an argument is wrong: its name, what is expected, what was received.

    Source: GDPA of Kunlun (arXiv 2602.10016); see the chapter "What GDPA computes". That its
    q and k are normalised is published, in which way is not: RMSNorm per head is our choice.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        mask: Mask = ALL,
        rotary: float | None = None,
        position_bias: int | None = None,
        time_bias: int | None = None,
        next_time: bool = True,
        **options: object,
    ):
        mask_fields = {name: options.pop(name) for name in FIELDS & options.keys()}
        super().__init__(embed_dim, num_heads, num_kv_heads, options)
        check_rotary(rotary, self.head_dim)
        self.mask, self.rotary = mask_of(mask, mask_fields), rotary
        if self.mask.num_targets is not None or self.mask.num_contexts is not None:
            raise ValueError(
                "num_targets and num_contexts of mask must be None, they come with each batch, got "
                f"{self.mask}"
            )
        self.make_tables(position_bias, time_bias, next_time, **self.options.factory)
        heads = num_heads + 2 * self.num_kv_heads
        self.qkv = self._linear(embed_dim, heads * self.head_dim)
        self.out = self._linear(embed_dim, embed_dim)

    def forward(
        self,
        x: torch.Tensor | Jagged,
        max_seqlen: int | None = None,
        *,
        num_targets: torch.Tensor | None = None,
        num_contexts: torch.Tensor | int | None = None,
        timestamps: torch.Tensor | None = None,
    ) -> torch.Tensor | Jagged:
        """The layer's output, of the kind and shape of x.

        x: a pair (values `[total_tokens, embed_dim]`, offsets `[batch + 1]` or `Lengths`), or a
        nested tensor `[batch, jagged, embed_dim]` of layout torch.jagged. A pair's int64 offsets
        come back as int32; a nested tensor's are converted in each call, `Lengths` once. Rows that
        follow the last sequence attend to nothing, and pass the projections as all rows do.
        max_seqlen: of this batch, in place of the layer's. num_targets, num_contexts: as `gdpa`.
        timestamps: with time_bias, of the tokens, as `RelativeBias`.

        Raises TypeError, ValueError: x is wrong: what is expected, what was received.
        """
        values, sequences = self._checked_input(x, max_seqlen)
        counted = any(isinstance(x, torch.Tensor) for x in (num_targets, num_contexts))
        rotation = sin_cos(self.rotary, self.head_dim, values, sequences)
        y = self._attend(
            self.qkv(values), None, sequences, sequences, rotation,
            self.options.validate and counted,
            mask=self.mask.of_batch(num_targets, num_contexts),
            relative_bias=self.relative_bias(timestamps),
        )  # fmt: skip
        return jagged.like(x, y, sequences)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mask={self.mask}, rotary={self.rotary}"


class PMA(_GDPALayer):
    """Pooling by multi-head attention: a jagged batch to `num_seeds` rows per sequence.

    The queries are learned seeds, the same for every sequence; keys and values are projections of
    its tokens: y = W_out gdpa(seeds, W_kv x). The seeds are held once, not once per sequence, and
    have no projection: a matrix times learned rows is learned rows. A sequence without tokens pools
    to zeros, to which the output projection adds its bias.

    Args:
        num_seeds: rows that a sequence is pooled to; their seeds are drawn from N(0, 1).

        options: of `Options`.

    embed_dim, num_heads, num_kv_heads: as `GDPASelfAttention`.

    Raises:
        TypeError, ValueError: an argument is wrong: its name, what is expected, what was received.

    Source: Set Transformer (arXiv 1810.00825), which has softmax; with GDPA in Kunlun
    (arXiv 2602.10016). See the chapter "What GDPA computes".
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_seeds: int,
        num_kv_heads: int | None = None,
        **options: object,
    ):
        super().__init__(embed_dim, num_heads, num_kv_heads, options)
        checks.check_positive(num_seeds=num_seeds)
        self.num_seeds = num_seeds = int(num_seeds)
        self.seeds = nn.Parameter(torch.empty(num_seeds, embed_dim, **self.options.factory))
        self.reset_parameters()
        self.kv = self._linear(embed_dim, 2 * self.num_kv_heads * self.head_dim)
        self.out = self._linear(embed_dim, embed_dim)

    def forward(self, x: torch.Tensor | Jagged, max_seqlen: int | None = None) -> torch.Tensor:
        """The pooled rows, `[batch, num_seeds, embed_dim]`, for both kinds of x.

        x, max_seqlen: as `GDPASelfAttention.forward`, and so the errors.
        """
        values, sequences = self._checked_input(x, max_seqlen)
        y = self._attend(self.seeds, self.kv(values), None, sequences)
        return y.unflatten(0, (sequences.batch, self.num_seeds))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the seeds; needed after `to_empty`."""
        self.seeds.normal_()

    def extra_repr(self) -> str:
        return f"num_seeds={self.num_seeds}, {super().extra_repr()}"


class PFFN(_GDPALayer):
    """A feed-forward layer whose weights belong to the sample: personalised feed-forward network.

    Queries are projections of the tokens; keys and values, `num_keys` per sample and kv head, come
    from the sample's summary: y = W_out gdpa(W_q x, W_kv summary). For each head this is a
    perceptron with num_keys hidden units: K^T is its first matrix, V its second. With
    activation="identity" it is one matrix per sample and head, K^T V.

    A summary vector is projected to all keys and values at once, which takes a W_kv of summary_dim
    x 2 num_keys num_kv_heads head_dim weights, 134 million for 512 features and 256 keys. Summary
    tokens, `PMA`'s rows for example, are projected one by one, and W_mix `[num_keys,
    summary_tokens]` combines their keys and values: y = W_out gdpa(W_q x, W_mix W_kv summary), with
    0.5 million weights in W_kv.

    Nothing is added to y: a residual is the caller's. Under autocast the layer follows its linear
    layers.

    Args:
        summary_dim: features of a sample's summary, or of each of its tokens.
        num_keys: hidden units per sample and head; max_seqlen_k of `gdpa`.
        summary_tokens: tokens of a summary; None for a summary that is one vector.

        options: of `Options`.

    embed_dim, num_heads, num_kv_heads: as `GDPASelfAttention`.

    Raises:
        TypeError, ValueError: an argument is wrong: its name, what is expected, what was received.

    Source: InterFormer (arXiv 2411.09852), which has no activation; with one in Kunlun
    (arXiv 2602.10016). See the chapter "What GDPA computes".
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        summary_dim: int,
        num_keys: int,
        num_kv_heads: int | None = None,
        *,
        summary_tokens: int | None = None,
        **options: object,
    ):
        super().__init__(embed_dim, num_heads, num_kv_heads, options)
        checks.check_positive(summary_dim=summary_dim, num_keys=num_keys)
        self.summary_dim, self.num_keys = int(summary_dim), int(num_keys)
        self.summary_tokens, self.mix = summary_tokens, None
        self.q = self._linear(embed_dim, embed_dim)
        features = 2 * self.num_kv_heads * self.head_dim
        if summary_tokens is None:
            features *= num_keys
        else:
            checks.check_positive(summary_tokens=summary_tokens)
            self.mix = nn.Linear(summary_tokens, num_keys, bias=False, **self.options.factory)
        self.kv = self._linear(summary_dim, features)
        self.out = self._linear(embed_dim, embed_dim)

    def forward(
        self, x: torch.Tensor | Jagged, summary: torch.Tensor, max_seqlen: int | None = None
    ) -> torch.Tensor | Jagged:
        """The layer's output, of the kind and shape of x.

        x, max_seqlen: as `GDPASelfAttention.forward`, and so the errors. summary: `[batch,
        summary_dim]`, or `[batch, summary_tokens, summary_dim]`.
        """
        values, sequences = self._checked_input(x, max_seqlen)
        batch = sequences.batch
        if not isinstance(summary, torch.Tensor):
            raise TypeError(f"summary must be a tensor, got {type(summary).__name__}")
        tokens = () if self.summary_tokens is None else (self.summary_tokens,)
        shape = batch, *tokens, self.summary_dim
        if summary.is_nested or summary.shape != shape:
            raise ValueError(
                f"summary must have shape {list(shape)}, one summary per sequence, "
                + ("got a nested tensor" if summary.is_nested else f"got {list(summary.shape)}")
            )
        kv = self.kv(summary)
        if self.mix is None:
            kv = kv.view(batch, self.num_keys, 2 * self.num_kv_heads * self.head_dim)
        else:
            kv = torch.bmm(self.mix.weight.to(kv.dtype).expand(batch, -1, -1), kv)
        y = self._attend(self.q(values), kv, sequences, self._key_sequences(sequences))
        return jagged.like(x, y, sequences)

    def _key_sequences(self, sequences: Sequences) -> Sequences:
        """The sequences of the keys; with `Lengths` made once for all layers."""
        length, lengths, cu_seqlens = self.num_keys, sequences.lengths, sequences.cu_seqlens
        if lengths is not None and not torch.compiler.is_compiling():
            lengths = lengths.once(_KeyLengths(length))
            return Sequences(lengths.cu_seqlens, length, lengths=lengths)
        steps = torch.arange(len(cu_seqlens), dtype=torch.int32, device=cu_seqlens.device)
        return Sequences(steps * length, length)

    def extra_repr(self) -> str:
        return (
            f"summary_dim={self.summary_dim}, num_keys={self.num_keys}, "
            f"summary_tokens={self.summary_tokens}, {super().extra_repr()}"
        )


@dataclass(frozen=True)
class _KeyLengths(Recipe[Lengths]):
    """`Lengths` of as many sequences, of `length` keys each."""

    length: int

    def make(self, cu_seqlens, beside=None):
        return Lengths.uniform(cu_seqlens.shape[0] - 1, self.length, cu_seqlens.device)
