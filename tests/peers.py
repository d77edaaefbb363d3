"""A stand-in for a peer that runs on a GPU alone."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def varlen_attn(
    q, k, v, cu_q, cu_k, longest_q, longest_k, *, scale, window_size=(-1, -1), enable_gqa=False
):
    """What PyTorch documents of its own one, sequence by sequence."""
    assert q.dtype == k.dtype == v.dtype
    assert cu_q.diff().max() <= longest_q and cu_k.diff().max() <= longest_k
    found = []
    for i in range(len(cu_q) - 1):
        own = [x[a[i] : a[i + 1]].transpose(0, 1) for x, a in ((q, cu_q), (k, cu_k), (v, cu_k))]
        n, m = own[0].shape[1], own[1].shape[1]
        left, right = (side if side >= 0 else n + m for side in window_size)
        distance = torch.arange(m) - torch.arange(n)[:, None]
        seen = (-left <= distance) & (distance <= right)
        out = scaled_dot_product_attention(*own, seen, scale=scale, enable_gqa=enable_gqa)
        found.append(out.transpose(0, 1) if m else torch.zeros_like(own[0].transpose(0, 1)))
    return torch.cat(found)
