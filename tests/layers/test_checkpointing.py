"""What the layers of both operators share: the same gradients under any activation checkpoint."""

import contextlib
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import tritonemu
from gdpa_kernels import BlockAttention, GDPASelfAttention, Lengths
from tests.tiers import swept

ATEN = torch.ops.aten
ENDS = [0, 3, 3, 20]


def saving(which: Callable[[object], bool]) -> Callable:
    """The contexts of a policy that keeps the results of some operators."""

    def policy(context, op, *args, **kwargs):
        kept = which(op)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return lambda: create_selective_checkpoint_contexts(policy)


def torchtitan():
    """As `torchtitan/distributed/activation_checkpoint.py`: attention, collectives, maxima and
    every second matmul."""
    kept = {
        ATEN.mm.default, ATEN.linear.default, ATEN.max.default,
        ATEN._scaled_dot_product_efficient_attention.default,
        ATEN._scaled_dot_product_flash_attention.default,
        torch.ops.gdpa_kernels.gdpa_forward.default,
        torch.ops.gdpa_kernels.block_attention_forward.default,
    }  # fmt: skip
    seen = {True: 0, False: 0}

    def policy(context, op, *args, **kwargs):
        seen[context.is_recompute] += op is ATEN.mm.default
        if op in kept and not (op is ATEN.mm.default and seen[context.is_recompute] % 2 == 0):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def is_ours(op: object) -> bool:
    return getattr(op, "namespace", "") == "gdpa_kernels"


def is_matmul(op: object) -> bool:
    return op in (ATEN.mm.default, ATEN.addmm.default, ATEN.bmm.default)


CHECKPOINTS = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    **{
        name: {"use_reentrant": False, "context_fn": contexts}
        for name, contexts in {
            "saves matmuls": saving(is_matmul),
            "saves custom operators": saving(is_ours),
            "saves both": saving(lambda op: is_matmul(op) or is_ours(op)),
            "saves everything": saving(lambda op: True),
            "saves nothing": saving(lambda op: False),
            "torchtitan": torchtitan,
        }.items()
    },
}
KINDS = {
    "rotary": {"rotary": 1e4},
    "fused": {"qk_norm": True, "fused_qk_norm": True},
    "fused, rotary": {"qk_norm": True, "fused_qk_norm": True, "rotary": 1e4},
}


CASES = [
    *(("eager", kind, how) for kind in KINDS for how in CHECKPOINTS),
    *(("compiled", "fused, rotary", how) for how in CHECKPOINTS if how != "reentrant"),
    *(("kernels", kind, "saves everything") for kind in ("fused", "fused, rotary")),
]


@pytest.mark.parametrize(
    "run, kind, how",
    swept(CASES, lambda run, kind, how: kind == "fused, rotary" and run != "compiled"),
)
@pytest.mark.parametrize("layer", (GDPASelfAttention, BlockAttention))
def test_checkpoints_change_nothing(layer, kind, how, run):
    """Their tables and lists are made while the checkpointed region runs first, or before it."""
    torch.manual_seed(0)
    layer, ends = layer(32, 2, bias=kind != "rotary", **KINDS[kind]), torch.tensor(ENDS)
    x = torch.randn(20, 32, requires_grad=True)
    leaves, options = [x, *layer.parameters()], CHECKPOINTS[how]

    def gradients(call) -> list[torch.Tensor]:
        for leaf in leaves:
            leaf.grad = None
        call(x).square().sum().backward()
        return [leaf.grad for leaf in leaves]

    def region(lengths: Lengths, x: torch.Tensor) -> torch.Tensor:
        return layer((x, lengths))[0] + x

    def checked(lengths: Lengths, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(partial(region, lengths), x, **options)

    if run == "compiled":
        torch._dynamo.reset()
        checked = torch.compile(checked, backend="aot_eager", fullgraph=True)
    with tritonemu.enabled() if run == "kernels" else contextlib.nullcontext():
        expected = gradients(partial(region, Lengths(ends)))
        lengths = Lengths(ends)
        for found in (gradients(partial(checked, lengths)) for _ in range(2)):
            for actual, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(actual, wanted)
