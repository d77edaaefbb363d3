import importlib

import triton

from exercises.cases import EDGES, descriptors, gdpa_batch, gdpa_case
from exercises.grading import Beside, Exercise
from exercises.hints import Rule, is_kind, like
from gdpa_kernels.calling.launch import launch

ROWS = 128


def launched(module, batch, out):
    tiles = triton.cdiv(batch.max_seqlen_q, ROWS)
    launch(
        module.kernel, (tiles * batch.num_heads * batch.sequences,), batch.device,
        *descriptors(module, batch, out, ROWS), batch.cu_seqlens_q, batch.cu_seqlens_k, tiles,
        batch.scale, HEADS=batch.num_heads, HEAD_DIM=batch.head_dim, BLOCK_N=module.BLOCK_N,
        STAGES=module.STAGES, REGISTERS=240, num_warps=4,
    )  # fmt: skip


def cases(module):
    keys = module.BLOCK_N * (2 * module.STAGES + 1)
    one, edges = gdpa_batch((128,), (keys,)), gdpa_batch((*EDGES, 128), (*EDGES[::-1], keys))
    return {
        name: gdpa_case(batch, launched, module.BLOCK_N)
        for name, batch in (("one tile", one), ("edges", edges))
    }


LONG = gdpa_case(gdpa_batch((128,), (512,), head_dim=128), launched)
EXERCISE = Exercise(
    cases=cases,
    must={"HGMMA": 2, "UTMALDG": 3},
    roles={"default": "the producer", "task0": "the consumer"},
    parities=True,
    once=("q_full",),
    beside=Beside(
        "ours", LONG,
        lambda: LONG.call(importlib.import_module("exercises.catalogue.pingpong.solution")),
        most=1.05,
    ),
    rules=[
        Rule(
            "no-overlap", is_kind("slower"),
            "It is right, and takes {ratio:.2f} times the modelled cycles of {book}.",
            "If nothing is in flight while the activation runs, the tensor core rests.",
            "Wait for S alone, async_dot_wait(1, s), before the activation, and for P V behind it.",
            "forward/v5_pingpong",
        ),
        Rule(
            "last-block-missing", like("last-block-missing"),
            "Your output is what you get without the last block of keys.",
            "The loop adds P V of the block before its own: one is left when it ends.",
            "Behind the loop: wait for the last V, acc += P V.", "forward/v5_pingpong",
        ),
    ],
)  # fmt: skip
