import torch
import triton

from exercises.cases import EDGES, Case, jagged, rows_of, unwritten
from exercises.grading import Exercise
from exercises.hints import Rule, is_kind
from gdpa_kernels.calling.launch import launch

HEADS, DIM = 2, 16


def case(lengths, *programs: int) -> Case:
    offsets = jagged(lengths)
    x = torch.randn(sum(lengths), HEADS, DIM, generator=torch.Generator().manual_seed(0)).bfloat16()

    def call(module):
        outputs = {f"out of {n} programs": unwritten(x) for n in programs}
        blocks = triton.cdiv(max(lengths), module.BLOCK)
        for n, out in zip(programs, outputs.values(), strict=True):
            launch(
                module.kernel, (n,), x.device, x, out, offsets, blocks,
                blocks * HEADS * len(lengths), HEADS=HEADS, DIM=DIM, BLOCK=module.BLOCK,
            )  # fmt: skip
        return outputs

    def every(out):
        return {f"out of {n} programs": out for n in programs}

    silu = torch.nn.functional.silu
    return Case(
        f"{len(lengths)} sequences, by {', '.join(map(str, programs))} programs", call, (x,),
        lambda: every(silu(x.double())), lambda: every(silu(x.float()).bfloat16()),
        [(f"{n} rows", rows) for n, rows in zip(lengths, rows_of(offsets), strict=True)],
    )  # fmt: skip


EXERCISE = Exercise(
    cases=lambda module: {"two tiles": case((64,), 2), "edges": case(EDGES[::-1], 1, 2, 5)},
    options={"strict": True},
    rules=[
        Rule(
            "twice", is_kind("Race", r"tl\.store\(|compute\("),
            "Two programs compute the same tile: line {line}.",
            "Program p of n takes tiles p, p + n, p + 2 n, ...: together they take each once.",
            "tl.range(tl.program_id(0), tiles, tl.num_programs(0)).", "forward/v3_persistent",
        ),
        Rule(
            "left-out", is_kind("unwritten"), "Tiles are left out of {output}: {where}.",
            "A persistent program goes on until the list has ended, and there are fewer programs "
            "than tiles.",
            "tl.range(tl.program_id(0), tiles, tl.num_programs(0)).", "forward/v3_persistent",
        ),
    ],
)  # fmt: skip
