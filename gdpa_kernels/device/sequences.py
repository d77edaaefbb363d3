"""Offsets of a sequence in the packed tensors."""

import triton
import triton.language as tl


@triton.jit
def sequence(cu_seqlens_q_ptr, cu_seqlens_k_ptr, batch, max_seqlen_q):
    """(start_q, start_out, len_q, start_k, len_k) of a sequence, in rows of the packed tensors.

    cu_seqlens_q_ptr None: one q for all sequences.
    """
    start_k = tl.load(cu_seqlens_k_ptr + batch)
    len_k = tl.load(cu_seqlens_k_ptr + batch + 1) - start_k
    if cu_seqlens_q_ptr is None:
        start_q, start_out, len_q = 0, batch * max_seqlen_q, max_seqlen_q
    else:
        start_q = tl.load(cu_seqlens_q_ptr + batch)
        len_q = tl.load(cu_seqlens_q_ptr + batch + 1) - start_q
        start_out = start_q
    return start_q, start_out, len_q, start_k, len_k
