"""Layers of public HSTU code bases and calls of FBGEMM's function, small, whose results are in
recorded.npz: of these weights and inputs, drawn so that they never change. upstream.py makes the
file from clones, and compares."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from gdpa_kernels.gdpa.mask import Mask
from gdpa_kernels.hstu import RECSYS_EXAMPLES, RESEARCH, STU, Form, HSTULayer, save_weights
from gdpa_kernels.hstu.adapters import counts_of_stu, hstu_attn_varlen_func
from gdpa_kernels.hstu.thresholds import jagged_times

RECORDED = Path(__file__).with_name("recorded.npz")
EMBED, HEADS, N = 8, 2, 14
CONCAT_UA = "u", "n", "un"


@dataclass(frozen=True)
class Layer:
    """One layer of a code base: the kind of its weights, and what differs between them."""

    kind: str
    form: Form
    hidden: int = 4
    attention: int = 4
    lengths: tuple[int, ...] = (9, 5, 0, 11)
    targets: tuple[int, ...] | None = None
    contexts: int | tuple[int, ...] = 0
    window: int | None = None
    group: int = 1
    bias: bool = False
    scaling: int = N

    def generator(self) -> np.random.RandomState:
        return np.random.RandomState(len(str(self)))  # noqa: NPY002  its stream is frozen


ONE = 2, 1, 0, 4
LAYERS = {
    "stu": Layer("stu", STU, targets=ONE),
    "stu_heads_window": Layer("stu", replace(STU, group_norm=True), targets=ONE, window=3),
    "stu_contexts": Layer("stu", STU, lengths=(9, 4, 1, 11), targets=ONE, contexts=3),
    "stu_wide": Layer("stu", STU, hidden=6, attention=2, targets=ONE),
    "research": Layer("research", RESEARCH, bias=True),
    "research_concat": Layer("research", replace(RESEARCH, concat=CONCAT_UA), bias=True),
    "research_plain": Layer("research", replace(RESEARCH, silu="none")),
    "recsys_groups": Layer("debug", RECSYS_EXAMPLES, targets=(4, 2, 0, 5), group=3, scaling=20),
    "recsys_contexts": Layer("debug", RECSYS_EXAMPLES, targets=ONE, contexts=(2, 0, 0, 3)),
}  # fmt: skip


def bucketization(times: torch.Tensor) -> torch.Tensor:
    """That of the research code."""
    return (torch.log(times.abs().clamp(min=1)) / 0.301).long()


def layer_of(case: Layer, dtype: torch.dtype = torch.float64) -> HSTULayer:
    ranks = {"target_ranks": "own"} if case.kind == "debug" else {}
    mask = Mask(causal=True, window=case.window, target_group_size=case.group, **ranks)
    tables = {"position_bias": N, "time_bias": 129} if case.bias else {}
    return HSTULayer(
        EMBED, HEADS, case.hidden, case.attention, form=case.form, mask=mask, dtype=dtype,
        scale=1.0 if case.kind == "research" else None, divisor=case.scaling, **tables,
        bucketization=bucketization,
    )  # fmt: skip


def weights_of(case: Layer) -> dict[str, torch.Tensor]:
    """A state dict of the code base."""
    draw = case.generator()
    shapes = save_weights(layer_of(case), case.kind)
    return {
        name: torch.from_numpy(0.3 * draw.standard_normal(tuple(x.shape)) + (x.dim() == 1) * 0.2)
        for name, x in sorted(shapes.items())
    }


def inputs_of(case: Layer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, the gradient of the result, and padded times."""
    draw = case.generator()
    x, grad = (torch.from_numpy(draw.standard_normal((sum(case.lengths), EMBED))) for _ in "xg")
    steps = draw.randint(0, 10**5, (len(case.lengths), N))
    return x, grad, torch.from_numpy(steps.cumsum(1))


def offsets_of(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor((0, *lengths)).cumsum(0)


def call_of(case: Layer) -> dict[str, torch.Tensor]:
    """What the layer's forward takes beside x, as the code base means it."""
    offsets = offsets_of(case.lengths)
    targets = None if case.targets is None else torch.tensor(case.targets)
    if case.bias:
        names = "timestamps", "query_timestamps"
        return dict(zip(names, jagged_times(inputs_of(case)[2], offsets), strict=True))
    if case.kind == "stu":
        return counts_of_stu(offsets, targets, case.contexts)
    contexts = None if not case.contexts else torch.tensor(case.contexts)
    return {"num_targets": targets, "num_contexts": contexts}


@dataclass(frozen=True)
class Attention:
    """One call of FBGEMM's function: the rows of each sequence, contexts and targets among them.

    queries: of each sequence so many last rows; None for all. divisor: scaling_seqlen.
    """

    lengths: tuple[int, ...] = (9, 5, 0, 11)
    queries: tuple[int, ...] | None = None
    contexts: tuple[int, ...] | None = None
    targets: tuple[int, ...] | None = None
    group: int = 1
    window: tuple[int, int] = (-1, 0)
    divisor: int = N
    alpha: float = 0.4
    head_dim: int = 4

    def generator(self) -> np.random.RandomState:
        return np.random.RandomState(len(str(self)))  # noqa: NPY002  its stream is frozen


ATTENTION = {
    "fbgemm_causal": Attention(),
    "fbgemm_full": Attention(window=(-1, -1)),
    "fbgemm_window": Attention(window=(3, 3)),
    "fbgemm_targets": Attention((9, 5, 1, 11), targets=ONE, contexts=(2, 0, 0, 3)),
    "fbgemm_groups": Attention((9, 5, 1, 11), targets=(4, 2, 0, 5), group=3),
    "fbgemm_delta": Attention((9, 5, 1, 11), queries=(2, 5, 1, 4)),
}


def attention_inputs_of(case: Attention) -> tuple[torch.Tensor, ...]:
    """q, k, v, and the gradient of the result."""
    draw = case.generator()
    rows = sum(case.queries or case.lengths), sum(case.lengths), sum(case.lengths)
    sizes = *rows, rows[0]
    return tuple(
        torch.from_numpy(draw.standard_normal((size, HEADS, case.head_dim))) for size in sizes
    )


def attention_of(case: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    """Our call of a case, its arguments those of FBGEMM."""
    contexts, targets = (
        None if counts is None else torch.tensor(counts, dtype=torch.int32)
        for counts in (case.contexts, case.targets)
    )
    rows = case.queries or case.lengths
    return hstu_attn_varlen_func(
        q, k, v, offsets_of(rows).int(), offsets_of(case.lengths).int(), None, None, max(rows),
        max(case.lengths), case.divisor, contexts, targets, case.group, case.window, case.alpha,
    )  # fmt: skip
