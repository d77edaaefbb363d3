"""The definition of GDPA in PyTorch: the mathematics, one sequence after another.

For each sequence and head, with queries Q [len_q, head_dim] and keys and
values K, V [len_k, head_dim]:

    S = scale Q K^T + B,   P = activation(S) where the pair counts and 0 elsewhere,
    O = output_scale P V.

Backward, with the gradient dO of the output:

    dP = dO V^T,   dS = activation'(S) * dP where the pair counts and 0 elsewhere,
    dV = output_scale P^T dO,   dK = scale output_scale dS^T Q,   dQ = scale output_scale dS K.

B is the relative bias (bias.py), if there is one. Of its tables an entry's gradient is output_scale
times the sum of dS over the pairs, and over the heads if they share it, that take the entry.

A pair that does not count adds 0 times finite values. 0 times NaN or infinity is NaN: such a value
may reach any row of its own sequence, and never another sequence.

`forward` and `backward` compute in fp32, in fp64 of fp64 tensors, and round once: fp64 tensors make
them the oracle. `forward_in_dtype` and `backward_in_dtype` do every step in the dtype of the
arguments: the honest low-precision baseline that the error budget of `testing` is computed from. No
kernel imports this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from gdpa_kernels.gdpa import bias, mask

if TYPE_CHECKING:
    from gdpa_kernels.gdpa.batch import Batch


@dataclass(frozen=True)
class Activation:
    """An element-wise activation and its derivative, on tensors of any shape and floating dtype."""

    name: str
    function: Callable[[torch.Tensor], torch.Tensor]
    derivative: Callable[[torch.Tensor], torch.Tensor]


def _gelu_derivative(x: torch.Tensor) -> torch.Tensor:
    cdf = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
    return cdf + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _gelu_tanh_derivative(x: torch.Tensor) -> torch.Tensor:
    root = math.sqrt(2 / math.pi)
    t = torch.tanh(root * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * root * (1 + 3 * 0.044715 * x * x)


def _silu_derivative(x: torch.Tensor) -> torch.Tensor:
    sigmoid = torch.sigmoid(x)
    return sigmoid * (1 + x * (1 - sigmoid))


def _hardswish_derivative(x: torch.Tensor) -> torch.Tensor:
    inner = torch.where(x >= 3, torch.ones_like(x), x / 3 + 0.5)
    return torch.where(x <= -3, torch.zeros_like(x), inner)


_TAYLOR = (
    1 / math.sqrt(2 * math.pi),
    -1 / (6 * math.sqrt(2 * math.pi)),
    1 / (40 * math.sqrt(2 * math.pi)),
)


def _gelu_taylor6(x: torch.Tensor) -> torch.Tensor:
    c2, c4, c6 = _TAYLOR
    return 0.5 * x + x * x * (c2 + x * x * (c4 + x * x * c6))


def _gelu_taylor6_derivative(x: torch.Tensor) -> torch.Tensor:
    c2, c4, c6 = _TAYLOR
    return 0.5 + x * (2 * c2 + x * x * (4 * c4 + x * x * 6 * c6))


ACTIVATIONS: dict[str, Activation] = {
    activation.name: activation
    for activation in (
        Activation("identity", lambda x: x, torch.ones_like),
        Activation("relu", F.relu, lambda x: (x > 0).to(x.dtype)),
        Activation("relu_squared", lambda x: F.relu(x).square(), lambda x: 2 * F.relu(x)),
        Activation(
            "leaky_relu",
            lambda x: F.leaky_relu(x, 0.01),
            lambda x: torch.where(x > 0, torch.ones_like(x), torch.full_like(x, 0.01)),
        ),
        Activation("gelu", F.gelu, _gelu_derivative),
        Activation("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), _gelu_tanh_derivative),
        Activation("silu", F.silu, _silu_derivative),
        Activation("hardswish", F.hardswish, _hardswish_derivative),
        Activation("gelu_taylor6", _gelu_taylor6, _gelu_taylor6_derivative),
    )
}


def visible(
    len_q: int, len_k: int, *, causal: bool | str, window: int | None,
    device: torch.device | None = None,
) -> torch.Tensor:  # fmt: skip
    """Which pairs count, bool [len_q, len_k]; positions start with their sequence, and end with it
    where causal is "lower_right".

    causal keeps keys at or before the query's position, window those at most `window` positions
    away.
    """
    distance = (
        torch.arange(len_q, device=device)[:, None] - torch.arange(len_k, device=device)[None]
    )
    if causal == "lower_right":
        distance += len_k - len_q
    keep = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        keep &= distance >= 0
    if window is not None:
        keep &= distance.abs() <= window
    return keep


def _counts(batch: Batch, sequence: int, len_q: int, len_k: int) -> torch.Tensor:
    """Which pairs of a sequence of the batch count, bool [len_q, len_k]."""
    device = batch.q.device
    if batch.segments is None:
        return visible(len_q, len_k, causal=batch.causal, window=batch.window, device=device)
    i = torch.arange(len_k - len_q, len_k, device=device)[:, None]
    j = torch.arange(len_k, device=device)[None]
    num_targets, num_contexts = batch.segments[sequence].tolist()
    return mask.visible(i, j, num_targets, num_contexts, len_k, batch.mask)


def _positions(
    batch: Batch, sequence: int, len_q: int, len_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions by which a bias counts a sequence's queries, `[len_q, 1]`, and its keys,
    `[1, len_k]`."""
    shift = len_k - len_q if batch.lower_right else 0
    i = torch.arange(shift, shift + len_q, device=batch.device)[:, None]
    j = torch.arange(len_k, device=batch.device)[None]
    if batch.shares_positions:
        history = len_k - int(batch.segments[sequence, 0])
        i, j = i.clamp(max=history), j.clamp(max=history)
    return i, j


def _scores(
    q: torch.Tensor, k: torch.Tensor, batch: Batch, sequence: int, rows: slice, keys: slice
) -> torch.Tensor:
    """S `[num_heads, len_q, len_k]` of one sequence's q and k `[num_heads, length, head_dim]`."""
    scores = q @ k.transpose(1, 2) * batch.scale
    if batch.bias.is_given:
        positions = _positions(batch, sequence, q.shape[1], k.shape[1])
        scores = scores + bias.of_sequence(batch.bias, *positions, rows, keys, scores.dtype)
    return scores


def activate_heads(scores: torch.Tensor, activation: tuple[str, ...]) -> torch.Tensor:
    """Apply one activation, or one per head, to scores whose head dimension is the third from
    last."""
    if len(activation) == 1:
        return ACTIVATIONS[activation[0]].function(scores)
    heads = [ACTIVATIONS[name].function(scores.select(-3, i)) for i, name in enumerate(activation)]
    return torch.stack(heads, dim=-3)


def derive_heads(scores: torch.Tensor, activation: tuple[str, ...]) -> torch.Tensor:
    """The derivatives of `activate_heads`, element by element."""
    if len(activation) == 1:
        return ACTIVATIONS[activation[0]].derivative(scores)
    heads = [ACTIVATIONS[n].derivative(scores.select(-3, i)) for i, n in enumerate(activation)]
    return torch.stack(heads, dim=-3)


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype that the definition computes in."""
    return x if x.dtype == torch.float64 else x.float()


def _widened(batch: Batch) -> Batch:
    return replace(batch, q=wide(batch.q), k=wide(batch.k), v=wide(batch.v))


def forward(batch: Batch) -> torch.Tensor:
    """The output, `[total_q, num_heads, head_dim]`, rounded once."""
    out = forward_in_dtype(_widened(batch))
    if batch.add_to is not None:
        out = out + batch.add_to
    return out.to(batch.out_dtype or batch.dtype)


def backward(
    grad_out: torch.Tensor, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv), shaped as q, k and v, rounded once.

    The gradients of a key head are summed over its query heads, those of a shared q over the batch.
    """
    gradients = backward_in_dtype(wide(grad_out).contiguous(), _widened(batch))
    return tuple(x.to(batch.dtype) for x in gradients)


def bias_backward(
    grad_out: torch.Tensor, batch: Batch, needs: tuple[bool, bool] = (True, True)
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of batch.bias's tables of positions and of times, shaped and rounded as they
    are; None for a table that is absent or not needed. The same bits in every run."""
    sums = bias_backward_in_dtype(wide(grad_out).contiguous(), _widened(batch))
    tables = batch.bias.position_table, batch.bias.time_table
    parts = zip(sums, tables, needs, strict=True)
    return tuple(x.to(table.dtype) if x is not None and need else None for x, table, need in parts)


def forward_in_dtype(batch: Batch) -> torch.Tensor:
    """`forward` by PyTorch's operators in the dtype of the arguments, rounded in every step."""
    q, k, v = batch.q, batch.k, batch.v
    ends_k = batch.cu_seqlens_k.tolist()
    ends_q = batch.cu_seqlens_q.tolist() if batch.cu_seqlens_q is not None else None
    outputs = []
    for i in range(batch.sequences):
        rows = slice(None) if ends_q is None else slice(ends_q[i], ends_q[i + 1])
        keys = slice(ends_k[i], ends_k[i + 1])
        q_b = q[rows].transpose(0, 1)
        k_b = k[keys].transpose(0, 1).repeat_interleave(batch.group, dim=0)
        v_b = v[keys].transpose(0, 1).repeat_interleave(batch.group, dim=0)
        p = activate_heads(_scores(q_b, k_b, batch, i, rows, keys), batch.activation)
        if batch.masked:
            keep = _counts(batch, i, p.shape[1], p.shape[2])
            p = p.masked_fill(~keep, 0)
        outputs.append((p @ v_b * batch.output_scale).transpose(0, 1))
    rows = batch.rows - sum(map(len, outputs))  # behind the last sequence
    return torch.cat((*outputs, q.new_zeros(rows, q.shape[1], v.shape[2])))


def backward_in_dtype(
    grad_out: torch.Tensor, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`backward` by PyTorch's operators in the dtype of the arguments, rounded in every step."""
    q, k, v = batch.q, batch.k, batch.v
    dq, dk, dv = q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    for _, rows, keys, q_b, k_b, grad_b, p, ds in _differentiated(grad_out, batch):
        heads = (batch.num_heads_k, batch.group, -1, q.shape[2])
        dq[rows] += (ds @ k_b * (batch.scale * batch.output_scale)).transpose(0, 1)
        dk_b = (ds.transpose(1, 2) @ q_b * (batch.scale * batch.output_scale)).reshape(heads).sum(1)
        dv_b = (p.transpose(1, 2) @ grad_b * batch.output_scale).reshape(heads).sum(1)
        dk[keys], dv[keys] = dk_b.transpose(0, 1), dv_b.transpose(0, 1)
    return dq, dk, dv


def bias_backward_in_dtype(
    grad_out: torch.Tensor, batch: Batch
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """`bias_backward` by PyTorch's operators in the dtype of the arguments."""
    tables = batch.bias.position_table, batch.bias.time_table
    sums = [None if x is None else grad_out.new_zeros(x.shape) for x in tables]
    for part in _differentiated(grad_out, batch):
        if 0 in part.ds.shape:
            continue
        i, j = _positions(batch, part.sequence, *part.ds.shape[1:])
        for kind, table in enumerate(tables):
            if table is None:
                continue
            ds = part.ds * batch.output_scale
            ds = ds if len(table) > 1 else ds.sum(0, keepdim=True)
            if kind == 0:
                if batch.shares_positions:
                    index = bias.index_of(j - i, table.shape[1])
                    sums[0] += bias.by_bucket(ds, index, table.shape[1])
                    continue
                first = int(j[0, 0] - i[-1, 0])
                sums[0] += bias.onto_table(bias.by_distance(ds), first, table.shape[1])
            else:
                buckets = bias.buckets_of_sequence(batch.bias, part.rows, part.keys)
                sums[1] += bias.by_bucket(ds, buckets, table.shape[1])
    return sums[0], sums[1]


class _Part(NamedTuple):
    """What backward has of a sequence: its number, its rows of q and of k, and by heads,
    `[num_heads, ...]`, q, k, grad_out, P and dS."""

    sequence: int
    rows: slice
    keys: slice
    q: torch.Tensor
    k: torch.Tensor
    grad: torch.Tensor
    p: torch.Tensor
    ds: torch.Tensor


def _differentiated(grad_out: torch.Tensor, batch: Batch) -> Iterator[_Part]:
    """The sequences one after another."""
    q, k, v, group = batch.q, batch.k, batch.v, batch.group
    ends_k = batch.cu_seqlens_k.tolist()
    ends_q = batch.cu_seqlens_q.tolist() if batch.cu_seqlens_q is not None else None
    for i in range(batch.sequences):
        rows = slice(None) if ends_q is None else slice(ends_q[i], ends_q[i + 1])
        out_rows = slice(i * q.shape[0], (i + 1) * q.shape[0]) if ends_q is None else rows
        keys = slice(ends_k[i], ends_k[i + 1])
        q_b, grad_b = q[rows].transpose(0, 1), grad_out[out_rows].transpose(0, 1)
        k_b = k[keys].transpose(0, 1).repeat_interleave(group, dim=0)
        v_b = v[keys].transpose(0, 1).repeat_interleave(group, dim=0)
        scores = _scores(q_b, k_b, batch, i, rows, keys)
        p, slope = activate_heads(scores, batch.activation), derive_heads(scores, batch.activation)
        if batch.masked:
            keep = _counts(batch, i, p.shape[1], p.shape[2])
            p, slope = p.masked_fill(~keep, 0), slope.masked_fill(~keep, 0)
        yield _Part(i, rows, keys, q_b, k_b, grad_b, p, slope * (grad_b @ v_b.transpose(1, 2)))
