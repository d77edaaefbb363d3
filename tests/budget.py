"""Results against the same mathematics in PyTorch: twice its error in their dtype, of enough
elements."""

from collections.abc import Callable, Sequence

import torch

from gdpa_lab.measuring.testing import assert_close

Tensors = Sequence[torch.Tensor]


def within_budget(
    draw: Callable[[int], tuple[Tensors, Tensors, Tensors]],
    names: Sequence[str],
    *,
    least: int = 2048,
    most: int = 8,
    heads: Sequence[str] = (),
) -> None:
    """Hold results to their error budget (`gdpa_lab.measuring.testing`).

    draw(i): the i-th call's results by `names`, the same in fp64, and what PyTorch makes of them in
    the dtype of the call. A small call is drawn up to `most` times, until the first result has
    `least` elements. heads: what each head computes, if each has a budget of its own.
    """
    drawn: list[tuple[Tensors, Tensors, Tensors]] = []
    while not drawn or 0 < sum(x[0][0].numel() for x in drawn) < least and len(drawn) < most:
        drawn.append(draw(len(drawn)))
    for i, name in enumerate(names):
        three = [torch.cat([x[kind][i] for x in drawn]) for kind in range(3)]
        for head, what in enumerate(heads) if heads else [(None, "")]:
            found = three if head is None else [x[:, head] for x in three]
            kinds = dict(zip(("actual", "expected", "baseline"), found, strict=True))
            assert_close(name=f"{name} {what}", **kinds)
