"""Kernels that check offsets, and clear what lies behind the last sequence; see padding.py."""

import triton
import triton.language as tl


@triton.jit
def _assert_offsets(
    ends_ptr, i, sequences, rows, most, NAME: tl.constexpr, PADDING: tl.constexpr
):  # fmt: skip
    """Assert that offsets rise from 0 to `rows`, or with PADDING to at most as many, in steps of at
    most `most`; of the sequences at i."""
    tl.device_assert(tl.load(ends_ptr) == 0, NAME + " must start at 0")
    last = tl.load(ends_ptr + sequences)
    if PADDING:
        tl.device_assert(last <= rows, NAME + " must end at or before the rows of its tensor")
    else:
        tl.device_assert(last == rows, NAME + " must end at the rows of its tensor")
    start = tl.load(ends_ptr + i, mask=i < sequences, other=0)
    end = tl.load(ends_ptr + i + 1, mask=i < sequences, other=0)
    tl.device_assert(start <= end, NAME + " must not decrease")
    tl.device_assert(end - start <= most, NAME + " must have no sequence beyond its max_seqlen")


@triton.jit(
    debug=True,
    do_not_specialize=["sequences", "rows_q", "rows_k", "max_seqlen_q", "max_seqlen_k"],
)
def check_kernel(
    ends_q_ptr, ends_k_ptr, segments_ptr, sequences, rows_q, rows_k, max_seqlen_q, max_seqlen_k,
    NAME: tl.constexpr, ALIGNED: tl.constexpr, EQUAL: tl.constexpr, PADDING: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`padding.assert_offsets` of BLOCK sequences a program."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < sequences
    if ends_q_ptr is None:
        _assert_offsets(ends_k_ptr, i, sequences, rows_k, max_seqlen_k, NAME, PADDING)
    else:
        _assert_offsets(ends_q_ptr, i, sequences, rows_q, max_seqlen_q, NAME + "_q", PADDING)
        _assert_offsets(ends_k_ptr, i, sequences, rows_k, max_seqlen_k, NAME + "_k", PADDING)
    if ALIGNED or EQUAL or segments_ptr is not None:
        start_k = tl.load(ends_k_ptr + i, mask=inside, other=0)
        keys = tl.load(ends_k_ptr + i + 1, mask=inside, other=0) - start_k
    if segments_ptr is not None:
        targets = tl.load(segments_ptr + 2 * i, mask=inside, other=0)
        contexts = tl.load(segments_ptr + 2 * i + 1, mask=inside, other=0)
        fits = (targets >= 0) & (contexts >= 0) & (targets <= keys) & (contexts <= keys - targets)
        tl.device_assert(fits, "num_targets and num_contexts must fit their sequence")
    if ALIGNED or EQUAL:
        rows = max_seqlen_q
        if ends_q_ptr is not None:
            start_q = tl.load(ends_q_ptr + i, mask=inside, other=0)
            rows = tl.load(ends_q_ptr + i + 1, mask=inside, other=0) - start_q
        if ALIGNED:
            enough = (rows >= keys) | ~inside
            tl.device_assert(enough, "causal must be named where a sequence has fewer queries")
        if EQUAL:
            equal = (rows == keys) | ~inside
            tl.device_assert(equal, "causal must be 'lower_right' where queries are the last")


@triton.jit(do_not_specialize=["rows", "sequences"])
def clear_kernel(
    x_ptr, other_ptr, add_ptr, ends_ptr, rows, sequences,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`padding.clear_padding` of rows of WIDTH elements, STRIDE apart; at add_ptr they lie side by
    side."""
    start = tl.load(ends_ptr + sequences).to(tl.int64) * WIDTH
    end = rows.to(tl.int64) * WIDTH
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for first in tl.range(start + tl.program_id(0).to(tl.int64) * BLOCK, end, step):
        i = first.to(tl.int64) + tl.arange(0, BLOCK)
        element = (i // WIDTH).to(tl.int64) * STRIDE + i % WIDTH
        value = tl.zeros([BLOCK], x_ptr.dtype.element_ty)
        if other_ptr is not None:
            tl.store(other_ptr + element, value, mask=i < end)
        if add_ptr is not None:
            value = tl.load(add_ptr + i, mask=i < end, other=0).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + element, value, mask=i < end)
