"""v0: what one would write first in PyTorch.

Predecessor: none. Pad the jagged batch to [batch, heads, max_seqlen, head_dim]; matmul, activation,
matmul; unpad. Three library calls do the arithmetic, each as fast as the library can make it.

Why it cannot be fast: the scores go through memory. For each of the batch * heads * max_seqlen_q *
max_seqlen_k scores the first matmul writes 2 bytes, the activation reads and writes them, the mask
and the second matmul read them: at least 8 bytes a score against 4 * head_dim FLOPs. At head_dim
128 that is 64 FLOP per byte, about a third of what keeps the tensor cores of an H200 busy; and
half-full batches pay for padding.

Roles and barriers: none; the library's kernels run one after another. The padded scores take memory
twice.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from gdpa_kernels.gdpa import bias
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.device.custom import CUSTOM

C2, C4, C6 = 0.3989422804014327, -0.06649038006690545, 0.009973557010035818  # of the polynomial
ACTIVATIONS = {
    "identity": lambda x: x,
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "leaky_relu": F.leaky_relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "hardswish": F.hardswish,
    "gelu_taylor6": lambda x: 0.5 * x + x * x * (C2 + x * x * (C4 + x * x * C6)),
}


def pad(packed: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
    """[total, heads, dim] -> [batch, heads, max_seqlen, dim], zeros beyond each sequence's end."""
    starts, lengths = cu_seqlens[:-1, None], cu_seqlens.diff()[:, None]
    position = torch.arange(max_seqlen, device=packed.device)
    exists = position < lengths
    if packed.shape[0] == 0:
        return packed.new_zeros(lengths.shape[0], packed.shape[1], max_seqlen, packed.shape[2])
    rows = (starts + position).clamp(max=packed.shape[0] - 1)
    return packed[rows].masked_fill(~exists[..., None, None], 0).transpose(1, 2)


def unpad(
    padded: torch.Tensor, cu_seqlens: torch.Tensor, total: int, may_have_padding: bool = False
) -> torch.Tensor:
    """[batch, heads, max_seqlen, dim] -> [total, heads, dim], without waiting for the device;
    anything in rows behind the last sequence."""
    row = torch.arange(total, device=padded.device, dtype=cu_seqlens.dtype)
    batch = torch.searchsorted(cu_seqlens[1:], row, right=True)
    position = row - cu_seqlens[batch]
    if may_have_padding:
        if 0 in padded.shape:
            return padded.new_zeros(total, padded.shape[1], padded.shape[3])
        batch = batch.clamp(max=padded.shape[0] - 1)
        position = position.clamp(max=padded.shape[2] - 1)
    return padded[batch, :, position]


def _function(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return CUSTOM[name].definition if name in CUSTOM else ACTIVATIONS[name]


def padded_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    activation: tuple[str, ...],
    scale: float,
    output_scale: float,
    causal: bool,
    window: int | None,
    added: torch.Tensor | None = None,
) -> torch.Tensor:
    """output_scale * activation(scale q k^T + added) v on padded [batch, heads, length, dim]
    tensors; added: `[batch, heads, rows, keys]`, any of the first two 1."""
    s = q @ k.transpose(-1, -2) * scale
    if added is not None:
        s = s + added
    if len(activation) == 1:
        p = _function(activation[0])(s)
    else:
        p = torch.stack([_function(name)(s[:, i]) for i, name in enumerate(activation)], dim=1)
    rows, keys = (torch.arange(length, device=q.device) for length in p.shape[-2:])
    if causal:
        p = p.masked_fill(rows[:, None] < keys, 0)
    if window is not None:
        p = p.masked_fill((rows[:, None] - keys).abs() > window, 0)
    return p @ v * output_scale


def relative_bias(batch: Batch) -> torch.Tensor:
    """The bias [batch or 1, heads or 1, max_seqlen_q, max_seqlen_k] in the dtype of the scores."""
    tables = batch.bias.position_table, batch.bias.time_table
    position, time = (x if x is None else x.to(batch.dtype) for x in tables)
    rows = torch.arange(batch.max_seqlen_q, device=batch.device)
    keys = torch.arange(batch.max_seqlen_k, device=batch.device)
    total = torch.zeros((), dtype=batch.dtype, device=batch.device)
    if position is not None:
        total = total + position[None, :, bias.index_of(keys - rows[:, None], position.shape[1])]
    if time is not None:
        query_times = pad(batch.bias.times_q[:, None, None], batch.cu_seqlens_q, batch.max_seqlen_q)
        key_times = pad(batch.bias.times_k[:, None, None], batch.cu_seqlens_k, batch.max_seqlen_k)
        difference = (query_times - key_times.transpose(-1, -2))[:, 0]
        total = total + time[:, bias.bucket(difference, batch.bias.thresholds)].transpose(0, 1)
    return total


def workspace(batch: Batch) -> int:
    """Bytes of the padded scores, which are written twice, and of the padded tensors."""
    scores = batch.max_seqlen_q * batch.max_seqlen_k
    tokens = batch.max_seqlen_q + batch.max_seqlen_k
    padded = batch.sequences * batch.num_heads * 2 * (scores + tokens * batch.head_dim)
    return padded * batch.q.element_size()


def forward(batch: Batch) -> torch.Tensor:
    """The output, `[total_q, num_heads, head_dim]`."""
    if batch.shared_q:
        q = batch.q.transpose(0, 1).expand(batch.sequences, -1, -1, -1)
    else:
        q = pad(batch.q, batch.cu_seqlens_q, batch.max_seqlen_q)
    k, v = (
        pad(x, batch.cu_seqlens_k, batch.max_seqlen_k).repeat_interleave(batch.group, dim=1)
        for x in (batch.k, batch.v)
    )
    out = padded_attention(
        q,
        k,
        v,
        activation=batch.activation,
        scale=batch.scale,
        output_scale=batch.output_scale,
        causal=batch.causal,
        window=batch.window,
        added=relative_bias(batch) if batch.bias.is_given else None,
    )
    if batch.shared_q:
        return out.transpose(1, 2).reshape(-1, *batch.q.shape[1:])
    return unpad(out, batch.cu_seqlens_q, batch.q.shape[0], batch.may_have_padding)
