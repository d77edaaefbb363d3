import torch

from exercises.cases import EDGES, Case, jagged, unwritten
from exercises.grading import Exercise
from exercises.hints import Rule, like
from gdpa_kernels.calling.launch import launch

HEAD_DIM = 64


def case(lengths, heads: int, block: int, spread: float) -> Case:
    """spread: what q is multiplied by, and the scores with it."""
    generator = torch.Generator().manual_seed(0)
    shape = sum(lengths), heads, HEAD_DIM
    q, k, v = (torch.randn(shape, generator=generator).bfloat16() for _ in range(3))
    q *= spread
    scale = HEAD_DIM**-0.5
    ends = jagged(lengths).tolist()
    blocks = [
        (first, min(block, end - first))
        for start, end in zip(ends[:-1], ends[1:], strict=True)
        for first in range(start, end, block)
    ]
    first, rows = torch.tensor(blocks, dtype=torch.int32).T.contiguous()

    def call(module):
        out = unwritten(q)
        launch(
            module.kernel, (len(blocks) * heads,), q.device, q, k, v, out, first, rows, scale,
            HEADS=heads, HEAD_DIM=HEAD_DIM, BLOCK=module.BLOCK, num_warps=4,
        )  # fmt: skip
        return {"out": out}

    def attended(weights, dtype=torch.float64):
        """The output of weights(scores, keys that do not exist)."""
        parts = []
        for start, number in blocks:
            x, y, z = (t[start : start + number].to(dtype).transpose(0, 1) for t in (q, k, v))
            parts.append((weights(x @ y.mT * scale, block - number).to(dtype) @ z).transpose(0, 1))
        return {"out": torch.cat(parts)}

    def softmax(scores, _):
        return scores.softmax(-1)

    def unmasked(scores, missing):
        """Keys that do not exist have scores of 0."""
        zeros = scores.new_zeros(*scores.shape[:-1], missing)
        return torch.cat([scores, zeros], -1).softmax(-1)[..., : scores.shape[-1]]

    return Case(
        f"{len(blocks)} blocks of {min(n for _, n in blocks)} to {block} tokens", call, (q, k, v),
        lambda: attended(softmax), lambda: attended(softmax, torch.bfloat16),
        [(f"{n} tokens", slice(start, start + n)) for start, n in blocks],
        {
            "unmasked": lambda: attended(unmasked),
            "no-sum": lambda: attended(lambda s, _: (s - s.amax(-1, keepdim=True)).exp()),
            "no-softmax": lambda: attended(lambda s, _: s),
        },
    )  # fmt: skip


def overflowed(failure):
    """Fit NaN of a kernel that takes no maximum."""
    line = failure.find(r"tl\.exp")
    overflows = failure.kind == "unwritten" and line and not failure.find(r"tl\.max\(")
    return {"line": line} if overflows else None


EXERCISE = Exercise(
    cases=lambda module: {
        "one block": case((module.BLOCK,), 1, module.BLOCK, 1.0),
        "edges": case(EDGES, 2, module.BLOCK, 1.0),
        "large scores": case((module.BLOCK - 1,), 1, module.BLOCK, 64.0),
    },
    must={"HGMMA": 2},
    rules=[
        Rule(
            "no-maximum", overflowed, "Line {line} overflows: the output is NaN where scores are "
            "large.",
            "exp(89) exceeds fp32, and infinity / infinity is NaN; softmax does not change if all "
            "scores of a row do by the same number.",
            "Subtract the maximum of each row.", "block/block_attention",
        ),
        Rule(
            "unmasked", like("unmasked"), "Keys that do not exist get weight: wrong are {where}.",
            "Rows that do not exist load as 0, their scores are 0, and exp(0) is 1.",
            "Scores of -inf for them, before the softmax.", "block/v1_one_tile",
        ),
        Rule(
            "no-sum", like("no-sum"), "The weights of a row do not sum up to 1.",
            "softmax is exp(s) / sum(exp(s)).", "Divide by tl.sum(p, 1)[:, None].",
            "block/block_attention",
        ),
        Rule(
            "no-softmax", like("no-softmax"), "Your output is S V, without a softmax.",
            "P = softmax of each row of S.", "exp, and divide by the row's sum.",
            "block/block_attention",
        ),
    ],
)  # fmt: skip
