"""Acceptance test of a new kernel: checks, each with a fault that it finds and full tiles miss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

import tritonemu
from _lib import studies
from gdpa_kernels.gdpa import reference
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.kernels import v1_tiled, v1_tiled_backward
from gdpa_kernels.gdpa.ladder import v5_pingpong
from gdpa_kernels.gdpa.mask import Mask


@dataclass(frozen=True)
class Kernel:
    """A forward pass, batch -> out, and a backward pass, (grad_out, batch) -> (dq, dk, dv)."""

    forward: Callable[[Batch], torch.Tensor]
    backward: Callable[[torch.Tensor, Batch], tuple[torch.Tensor, ...]]

    def results(self, batch: Batch, grad_out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(out, dq, dk, dv) in the emulator, in memory that was full of NaN."""
        with new_memory_of_nan(), tritonemu.enabled():
            return self.forward(batch), *self.backward(grad_out, batch)


@contextlib.contextmanager
def new_memory_of_nan() -> Iterator[None]:
    """Within it PyTorch fills what `torch.empty` returns with NaN."""
    was_on = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on)


def right(kernel: Kernel, batch: Batch, grad_out: torch.Tensor | None = None) -> None:
    """Raise AssertionError unless output and gradients are within twice PyTorch's error and one
    rounding of fp64."""
    grad_out = studies.gradient(batch) if grad_out is None else grad_out
    wide = studies.in_fp64(batch)
    exact = reference.forward(wide), *reference.backward(grad_out.double(), wide)
    same = reference.forward_in_dtype(batch), *reference.backward_in_dtype(grad_out, batch)
    names = "out", *studies.GRADIENTS
    studies.compared("tensor", names, kernel.results(batch, grad_out), exact, same)


def alone(kernel: Kernel, batch: Batch) -> None:
    """Raise AssertionError unless NaN in all other sequences leaves the bits of each."""
    inputs = batch.q, batch.k, batch.v, studies.gradient(batch)
    clean = kernel.results(batch, inputs[3])
    row = torch.arange(batch.rows)[:, None, None]
    for first, last in pairwise(batch.cu_seqlens_q.tolist()):
        outside = (row < first) | (row >= last)
        *qkv, grad_out = (x.masked_fill(outside, torch.nan) for x in inputs)
        hurt = kernel.results(replace(batch, **dict(zip("qkv", qkv, strict=True))), grad_out)
        for one, other in zip(clean, hurt, strict=True):
            assert torch.equal(one[first:last], other[first:last]), "a neighbour's NaN"


def batch(*lengths: Sequence[int], heads: int = 2, head_dim: int = 32, **fields: object) -> Batch:
    """A batch of these lengths of queries, and of keys if they differ."""
    return replace(studies.batch(*lengths, heads=heads, head_dim=head_dim), **fields)


def packed() -> Batch:
    """q, k and v as slices of one tensor."""
    dense = batch((40, 70))
    parts = torch.cat([dense.q, dense.k, dense.v], dim=1).split(2, dim=1)
    return replace(dense, **dict(zip("qkv", parts, strict=True)))


def grouped() -> Batch:
    """Two query heads to a key head."""
    four = batch((40, 70), heads=4)
    return replace(four, k=four.k[:, :2].contiguous(), v=four.v[:, :2].contiguous())


def around(score: float) -> Batch:
    """Scores of about `score`, all of one sign."""
    drawn = batch((64, 70))
    q, k = (0.3 * x.float() + 32**-0.25 * abs(score) ** 0.5 for x in (drawn.q, drawn.k))
    return replace(drawn, q=q.bfloat16(), k=-k.bfloat16())


@dataclass(frozen=True)
class Check:
    """A check by its inputs, and a fault that it finds: what it is, and the kernel that has it."""

    inputs: str
    run: Callable[[Kernel], None]
    fault: str = ""
    wrong: Callable[[], Kernel] = lambda: RIGHT


RIGHT = Kernel(v1_tiled.forward, v1_tiled_backward.backward)


def forward(*changes: tuple[str, str]) -> Kernel:
    """Forward v1 with pieces of its source replaced."""
    return replace(RIGHT, forward=studies.changed(v1_tiled, *changes).forward)


def backward(*changes: tuple[str, str]) -> Kernel:
    """Backward v1, likewise."""
    return replace(RIGHT, backward=studies.changed(v1_tiled_backward, *changes).backward)


FREE = (
    "        tlx.barrier_arrive(k.empty[stage])\n",
    "        tlx.barrier_arrive(v.empty[v_stage])\n",
)
LATER = (
    "        p = activate(s, scale, options.ACTIVATION, True)\n"
    "        acc = tlx.async_dot_wait(0, acc)\n"
)
EARLY = FREE[0] + LATER + FREE[1], FREE[0] + FREE[1] + LATER
FULL = Check("full tiles", lambda kernel: right(kernel, batch((128, 128), head_dim=64)))
CHECKS = [
    Check(
        "lengths of 0, 1 and around each edge of a tile",
        lambda kernel: right(kernel, batch(studies.EDGES)),
        "the last, partial block of keys is left out",
        lambda: forward(("(start, end, BLOCK_N):", "(start, end // BLOCK_N * BLOCK_N, BLOCK_N):")),
    ),
    Check(
        "more keys than queries, or fewer",
        lambda kernel: right(kernel, batch((5, 70, 9), (65, 3, 31))),
        "K is read at the offset of Q",
        lambda: forward(("k_ptr += tl.cast(start_k", "k_ptr += tl.cast(start_q")),
    ),
    Check(
        "no keys; new memory full of NaN",
        lambda kernel: right(kernel, batch((5, 70), (65, 0))),
        "a program without keys returns early and writes nothing",
        lambda: forward(("if first_row >= len_q:", "if (first_row >= len_q) | (len_k == 0):")),
    ),
    Check(
        "NaN in all other sequences",
        lambda kernel: alone(kernel, batch((40, 70, 128))),
        "K is loaded without a mask, since V's zeros cancel it",
        lambda: forward(("k = tl.load(k_ptrs, mask=mask, other=0.0)", "k = tl.load(k_ptrs)")),
    ),
    Check(
        "slices of a packed tensor",
        lambda kernel: right(kernel, packed()),
        "the strides of Q are taken from the output",
        lambda: forward(("Q_STRIDES=q.stride()", "Q_STRIDES=out.stride()")),
    ),
    Check(
        "the gradient of `out.sum()`, of strides 0",
        lambda kernel: right(
            kernel, batch((40, 70)), torch.ones((), dtype=torch.bfloat16).expand(110, 2, 32)
        ),
        "the strides of dO are taken from Q",
        lambda: backward(('"GRAD_STRIDES": grad_out.stride()', '"GRAD_STRIDES": q.stride()')),
    ),
    Check(
        "two query heads to a key head",
        lambda kernel: right(kernel, grouped()),
        "dK and dV add up the first query head alone",
        lambda: backward(("in range(GROUP):", "in range(1):")),
    ),
    Check(
        "a head_dim that is no power of two",
        lambda kernel: right(kernel, batch((40, 70), head_dim=24)),
        "a tile's last columns are those of the next head",
        lambda: forward(
            ("BLOCK_M, Q_STRIDES, HEAD_DIM, BLOCK_D)", "BLOCK_M, Q_STRIDES, BLOCK_D, BLOCK_D)")
        ),
    ),
    Check(
        "both scales, one of them negative",
        lambda kernel: right(kernel, batch((40, 70), scale=-0.3, output_scale=1 / 64)),
        "dV lacks `output_scale`",
        lambda: backward(("(dv * output_scale)", "dv")),
    ),
    Check(
        "a mask, with gradients",
        lambda kernel: right(kernel, batch((70, 5), mask=Mask(causal=True))),
        "the slope is not masked",
        lambda: backward(
            ("slope = mask_transposed(slope, position, first_key, CAUSAL, WINDOW)", "pass")
        ),
    ),
    Check(
        "4,096 keys with values of one sign",
        lambda kernel: right(
            kernel, batch((16,), (4096,), heads=1, v=batch((4096,), heads=1).v.abs())
        ),
        "the sum is rounded to bf16 after each block",
        lambda: forward(
            ("v, acc, input_precision=PRECISION)",
             "v, acc, input_precision=PRECISION).to(v.dtype).to(tl.float32)"),
        ),
    ),
    Check(
        "all scores negative",
        lambda kernel: right(kernel, around(-2.0)),
        "the activation of scores below -2 is taken for 0",
        lambda: forward(
            ("        if segments_ptr is None:\n            p = mask",
             "        p = tl.where(s * factor < -2.0, 0.0, p)\n"
             "        if segments_ptr is None:\n            p = mask"),
        ),
    ),
    Check(
        "more blocks of keys than slots; races are looked for",
        lambda kernel: right(kernel, batch((128,), (512,), heads=1, head_dim=64)),
        "V's slot is given back before the MMA has read it",
        lambda: replace(RIGHT, forward=studies.changed(v5_pingpong, EARLY).forward),
    ),
]  # fmt: skip


def failure(check: Check, kernel: Kernel = RIGHT) -> str:
    """Describe what a check finds in a kernel; "" for nothing."""
    try:
        check.run(kernel)
    except (AssertionError, tritonemu.EmulatorError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
