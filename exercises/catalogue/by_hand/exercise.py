import torch

from exercises.cases import Case, gdpa_batch, rows_of, unwritten, widened
from exercises.grading import Exercise
from exercises.hints import Rule, like
from gdpa_kernels.calling.launch import launch
from gdpa_kernels.gdpa import reference

NAMES = "dq", "dk", "dv"


def case(lengths, heads: int) -> Case:
    batch = gdpa_batch(lengths, heads=heads, activation="relu_squared")
    grad = torch.randn(batch.q.shape, generator=torch.Generator().manual_seed(1)).bfloat16()

    def call(module):
        gradients = [unwritten(batch.q) for _ in NAMES]
        launch(
            module.kernel, (batch.sequences * heads,), batch.device,
            batch.q, batch.k, batch.v, grad, *gradients, batch.cu_seqlens_q, batch.scale,
            HEADS=heads, HEAD_DIM=batch.head_dim, BLOCK=module.BLOCK, num_warps=4,
        )  # fmt: skip
        return dict(zip(NAMES, gradients, strict=True))

    def exact():
        gradients = reference.backward(grad.double(), widened(batch))
        return dict(zip(NAMES, gradients, strict=True))

    def mistaken(step):
        """The gradients where dS and the scale of dQ and dK are step(dP, relu(S))."""
        outputs = {name: torch.zeros_like(batch.q, dtype=torch.float64) for name in NAMES}
        for rows in rows_of(batch.cu_seqlens_q):
            q, k, v, g = (
                x[rows].double().transpose(0, 1) for x in (batch.q, batch.k, batch.v, grad)
            )
            positive = (batch.scale * q @ k.mT).relu()
            ds, scale, p = step(g @ v.mT, positive)
            parts = scale * ds @ k, scale * ds.mT @ q, p.mT @ g
            for name, part in zip(NAMES, parts, strict=True):
                outputs[name][rows] = part.transpose(0, 1)
        return outputs

    scale = batch.scale
    return Case(
        f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)} rows", call,
        (batch.q, batch.k, batch.v, grad), exact,
        lambda: dict(zip(NAMES, reference.backward_in_dtype(grad, batch), strict=True)),
        [(f"{n} rows", rows) for n, rows in zip(lengths, rows_of(batch.cu_seqlens_q), strict=True)],
        {
            "no-derivative": lambda: mistaken(lambda dp, r: (dp, scale, r * r)),
            "no-scale": lambda: mistaken(lambda dp, r: (2 * dp * r, 1.0, r * r)),
            "half-derivative": lambda: mistaken(lambda dp, r: (dp * r, scale, r * r)),
            "untransposed": lambda: mistaken(lambda dp, r: (2 * dp * r, scale, (r * r).mT)),
        },
    )  # fmt: skip


def rule(name, what, why, change):
    return Rule(name, like(name), what, why, change, "backward/by_hand")


EXERCISE = Exercise(
    cases=lambda module: {
        "one tile": case((module.BLOCK,), 1), "edges": case((0, 1, 31, 32, 33, 63, 64), 2)
    },
    must={"HGMMA": 5},
    rules=[
        rule(
            "no-derivative", "dQ and dK are what you get with dS = dP.",
            "S reaches O by the activation: the chain rule brings its derivative.",
            "dS = dP * 2 relu(S).",
        ),
        rule(
            "half-derivative", "dQ and dK are half of what they should be.",
            "The derivative of x^2 is 2 x.", "dS = dP * 2 relu(S).",
        ),
        rule(
            "no-scale", "dQ and dK lack the factor scale.",
            "S = scale Q K^T, so a step of Q moves S by scale times K.", "dQ = scale dS K.",
        ),
        rule(
            "untransposed", "dV is P dO; of P its transpose is needed.",
            "A key's gradient sums over the queries: down the columns of P.", "p.T.",
        ),
    ],
)  # fmt: skip
