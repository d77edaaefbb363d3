"""The attention functions of public HSTU code, with their names and arguments, by `gdpa`.

What `gdpa` does not compute raises NotImplementedError with the arguments' names. `options` are
those of `gdpa` that they have no argument for: impl, precise, relative_bias, validate, ...
"""

from __future__ import annotations

import torch

from gdpa_kernels.gdpa.api import gdpa
from gdpa_kernels.gdpa.mask import Mask


def counts_of_stu(
    seq_offsets: torch.Tensor, num_targets: torch.Tensor | None, contextual_seq_len: int
) -> dict[str, torch.Tensor]:
    """num_targets and num_contexts of `Mask`, of generative-recommenders' numbers: of a sequence
    with less history than contextual_seq_len each row sees itself alone, as a target does."""
    if not contextual_seq_len:
        return {} if num_targets is None else {"num_targets": num_targets}
    lengths = seq_offsets.diff()
    targets = torch.zeros_like(lengths) if num_targets is None else num_targets.to(lengths.dtype)
    short = lengths - targets < contextual_seq_len
    return {
        "num_targets": torch.where(short, lengths, targets),
        "num_contexts": torch.where(short, 0, contextual_seq_len),
    }


def hstu_mha(
    max_seq_len: int,
    alpha: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_offsets: torch.Tensor,
    causal: bool = True,
    dropout_pr: float = 0.0,
    training: bool = True,
    num_targets: torch.Tensor | None = None,
    attn_scale: torch.Tensor | None = None,
    max_attn_len: int = 0,
    contextual_seq_len: int = 0,
    min_full_attn_seq_len: int = 0,
    sort_by_length: bool = False,
    kernel: object = None,
    enable_tma: bool = False,
    **options: object,
) -> torch.Tensor:
    """generative-recommenders, ops/hstu_attention.py. sort_by_length, kernel and enable_tma choose
    a schedule there and nothing here."""
    _refuse(dropout_pr=bool(dropout_pr) and training, causal=not causal)
    window = max_attn_len or None
    mask = Mask(
        causal=True, window=window, full_rows=min_full_attn_seq_len if window else 0,
        **counts_of_stu(seq_offsets, num_targets, contextual_seq_len),
    )  # fmt: skip
    out = _divided(
        max_seq_len if attn_scale is None else 1, q, k, v, seq_offsets, seq_offsets, max_seq_len,
        max_seq_len, scale=alpha, mask=mask, **options,
    )  # fmt: skip
    if attn_scale is None:
        return out
    return out * (attn_scale if attn_scale.dim() == 0 else attn_scale[:, None, None])


def delta_hstu_mha(
    max_seq_len: int,
    alpha: float,
    delta_q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_offsets: torch.Tensor,
    num_targets: torch.Tensor | None = None,
    max_attn_len: int = 0,
    contextual_seq_len: int = 0,
    kernel: object = None,
    enable_tma: bool = False,
    **options: object,
) -> torch.Tensor:
    """generative-recommenders, ops/hstu_attention.py: the last rows of each sequence, as many of
    all. Raises ValueError if delta_q has no such number of rows."""
    sequences = seq_offsets.shape[0] - 1
    rows, rest = divmod(delta_q.shape[0], max(sequences, 1))
    if rest or (rows and not sequences):
        raise ValueError(
            f"delta_q must have as many rows for each of {sequences} sequences, got "
            f"{delta_q.shape[0]} rows"
        )
    offsets = torch.arange(sequences + 1, dtype=torch.int32, device=k.device) * rows
    mask = Mask(
        causal="lower_right", window=max_attn_len or None,
        **counts_of_stu(seq_offsets, num_targets, contextual_seq_len),
    )  # fmt: skip
    return _divided(
        max_seq_len, delta_q, k, v, offsets, seq_offsets, rows, max_seq_len, scale=alpha, mask=mask,
        **options,
    )  # fmt: skip


def hstu_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scaling_seqlen: int,
    num_contexts: torch.Tensor | None,
    num_targets: torch.Tensor | None,
    target_group_size: int = 1,
    window_size: tuple[int, int] = (-1, -1),
    alpha: float = 1.0,
    rab: torch.Tensor | None = None,
    has_drab: bool = False,
    kv_cache: torch.Tensor | None = None,
    page_offsets: torch.Tensor | None = None,
    page_ids: torch.Tensor | None = None,
    last_page_lens: torch.Tensor | None = None,
    func: torch.Tensor | None = None,
    quant_mode: int = -1,
    **options: object,
) -> torch.Tensor:
    """FBGEMM, from which recsys-examples imports it. A rab that comes from tables is a
    `relative_bias` in options, its tables multiplied by alpha; pages are for
    `gdpa_kernels.serving`."""
    # No sequence has more queries than keys, so as many rows are the same sequences.
    same = q.shape[0] == k.shape[0]
    left, right = window_size
    causal, limited = right == 0, left >= 0
    _refuse(
        seqused_q=seqused_q is not None, seqused_k=seqused_k is not None, rab=rab is not None,
        kv_cache=kv_cache is not None, func=func is not None, quant_mode=quant_mode != -1,
        window_size=not causal and (left != right or (limited and not same)),
    )  # fmt: skip
    targets = {}
    if num_targets is not None:
        targets = {"num_targets": num_targets, "target_ranks": "own"}
        targets["target_group_size"] = target_group_size
    mask = Mask(
        causal=causal if same or not causal else "lower_right", window=left if limited else None,
        num_contexts=num_contexts, **targets,
    )  # fmt: skip
    return _divided(
        max_seqlen_q if scaling_seqlen == -1 else scaling_seqlen, q, k, v,
        cu_seqlens_k if same else cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        scale=alpha, mask=mask, **options,
    )  # fmt: skip


def hstu_attention_forward(
    q_tensor: torch.Tensor,
    k_tensor: torch.Tensor,
    v_tensor: torch.Tensor,
    cu_seqlens_q_tensor: torch.Tensor,
    cu_seqlens_k_tensor: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    window_size: tuple[int, int] = (-1, -1),
    alpha: float = 1.0,
    scaling_seqlen: int | None = None,
    func_tensor: torch.Tensor | None = None,
    paged_kv_tensor: torch.Tensor | None = None,
    page_ids_tensor: torch.Tensor | None = None,
    page_indptrs_tensor: torch.Tensor | None = None,
    stream: object = None,
    **options: object,
) -> torch.Tensor:
    """cudnn-frontend, `cudnn.hstu`, whose backward is a second function; this one is
    differentiable."""
    return hstu_attn_varlen_func(
        q_tensor, k_tensor, v_tensor, cu_seqlens_q_tensor, cu_seqlens_k_tensor, None, None,
        max_seqlen_q, max_seqlen_k, -1 if scaling_seqlen is None else scaling_seqlen, None, None,
        window_size=window_size, alpha=alpha, kv_cache=paged_kv_tensor, func=func_tensor,
        **options,
    )  # fmt: skip


def _divided(divisor: int, *tensors: object, **options: object) -> torch.Tensor:
    """`gdpa` with SiLU, divided: by the kernel, or after it in a compiled program, where
    output_scale is a constant of the graph."""
    compiling = torch.compiler.is_compiling()
    output_scale = 1.0 if compiling else 1 / divisor
    out = gdpa(*tensors, activation="silu", output_scale=output_scale, **options)
    return out / divisor if compiling else out


def _refuse(**arguments: bool) -> None:
    """Raises NotImplementedError with the names of arguments whose values `gdpa` does not take."""
    names = [name for name, refused in arguments.items() if refused]
    if names:
        raise NotImplementedError(
            f"{', '.join(names)} must have a value that gdpa computes: see 'Coming from HSTU'"
        )
