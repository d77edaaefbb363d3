from functools import partial

import torch

from exercises.cases import EDGES, Case, jagged, rows_of, unwritten
from exercises.grading import Exercise
from exercises.hints import Rule, like
from gdpa_kernels.calling.launch import launch

DIM = 64


def case(module, *lengths: int) -> Case:
    offsets = jagged(lengths)
    x = torch.randn(sum(lengths), DIM, generator=torch.Generator().manual_seed(0)).bfloat16()

    def call(module):
        out = unwritten(x, len(lengths), DIM)
        launch(
            module.kernel, (len(lengths),), x.device, x, out, offsets, DIM=DIM, BLOCK=module.BLOCK
        )
        return {"out": out}

    def sums(dtype=torch.float64, last=lambda rows: rows.stop):
        parts = [x[rows.start : last(rows)].to(dtype).sum(0) for rows in rows_of(offsets)]
        return {"out": torch.stack(parts)}

    block = module.BLOCK

    def up_to_length(rows):
        """Where a loop ends whose bound is a length instead of an end."""
        turns = max(0, -(-(rows.stop - 2 * rows.start) // block))
        return min(rows.stop, rows.start + turns * block)

    return Case(
        f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)} rows", call, (x,), sums,
        lambda: {"out": sums(torch.float32)["out"].bfloat16()},
        [(f"{n} rows", slice(i, i + 1)) for i, n in enumerate(lengths)],
        {
            "first-block": partial(sums, last=lambda rows: min(rows.stop, rows.start + block)),
            "length-for-end": partial(sums, last=up_to_length),
        },
    )  # fmt: skip


EXERCISE = Exercise(
    cases=lambda module: {
        "one sequence": case(module, 3 * module.BLOCK),
        "edges": case(module, *EDGES, 2 * module.BLOCK - 1, 0),
    },
    rules=[
        Rule(
            "first-block", like("first-block"),
            "Your sums are those of the first BLOCK rows of each sequence.",
            "A sequence may have more rows than a block, and another number each.",
            "A loop: tl.range(start, end, BLOCK).", "operator/workloads",
        ),
        Rule(
            "length-for-end", like("length-for-end"),
            "Your loop ends at the sequence's length, and it counts rows of the whole batch.",
            "Offsets count from the first row of the batch, lengths from that of the sequence.",
            "From start to end.", "operator/workloads",
        ),
    ],
)  # fmt: skip
