import torch
import triton

from exercises.cases import EDGES, descriptors, gdpa_batch, gdpa_case
from exercises.grading import Beside, Exercise
from exercises.hints import Rule, like
from gdpa_kernels.calling.launch import launch
from gdpa_kernels.gdpa.ladder import v2_tma


def launched(module, batch, out):
    blocks = triton.cdiv(batch.max_seqlen_q, module.BLOCK_M)
    launch(
        module.kernel, (blocks * batch.num_heads * batch.sequences,), batch.device,
        *descriptors(module, batch, out, module.BLOCK_M), batch.cu_seqlens_q, batch.cu_seqlens_k,
        blocks, batch.scale, HEADS=batch.num_heads, HEAD_DIM=batch.head_dim,
        BLOCK_M=module.BLOCK_M, BLOCK_N=module.BLOCK_N, num_warps=4, num_stages=2,
    )  # fmt: skip


def cases(module):
    one, edges = gdpa_batch((64,), (4 * module.BLOCK_N,)), gdpa_batch(EDGES, EDGES[::-1])
    rows = gdpa_case(edges, launched, module.BLOCK_N)

    def first_tile():
        """The output if each tile has the rows of its sequence's first one."""
        exact = rows.exact()["out"]
        parts = [exact[part][torch.arange(part.stop - part.start) % module.BLOCK_M]
                 for _, part in rows.parts]  # fmt: skip
        return {"out": torch.cat(parts)}

    rows.mistakes["first-rows"] = first_tile
    return {"one tile": gdpa_case(one, launched, module.BLOCK_N), "edges": rows}


LONG = gdpa_batch((128,), (512,), head_dim=128)
EXERCISE = Exercise(
    cases=cases,
    must={"HGMMA": 2, "UTMALDG": 3},
    most={"LDGSTS": 0},
    beside=Beside(
        "forward v2", gdpa_case(LONG, launched),
        lambda: v2_tma.forward(LONG, config=v2_tma.Config(64, 64, 4, 2)), bytes=True,
    ),
    rules=[
        Rule(
            "first-rows", like("first-rows"),
            "Each tile has the rows of its sequence's first tile.",
            "A program's rows begin at first_row of the sequence.",
            "Load Q from first_row on.", "forward/v2_tma",
        ),
    ],
)  # fmt: skip
