import torch
import triton

from exercises.cases import Case
from exercises.grading import Exercise
from exercises.hints import Rule, is_kind
from gdpa_kernels.calling.launch import launch

HEAD_DIM = 32


def case(rows: int, keys: int) -> Case:
    generator = torch.Generator().manual_seed(0)
    ds = torch.randn(rows, keys, generator=generator).bfloat16()
    k = torch.randn(keys, HEAD_DIM, generator=generator).bfloat16()

    def call(module):
        dq = torch.zeros(rows, HEAD_DIM)
        launch(
            module.kernel, (triton.cdiv(keys, module.BLOCK),), k.device, ds, k, dq, rows, keys,
            HEAD_DIM=HEAD_DIM, BLOCK=module.BLOCK, num_warps=4,
        )  # fmt: skip
        return {"dq": dq}

    def rounded():
        """In fp32, from products of bf16 that are rounded to fp32 block by block."""
        parts = (ds[:, i : i + 32].float() @ k[i : i + 32].float() for i in range(0, keys, 32))
        return {"dq": sum(parts, torch.zeros(rows, HEAD_DIM))}

    return Case(
        f"{rows} rows x {keys} keys", call, (ds, k), lambda: {"dq": ds.double() @ k.double()},
        rounded,
    )  # fmt: skip


EXERCISE = Exercise(
    cases=lambda module: {"four programs": case(64, 128), "edges": case(33, 95)},
    options={"resident": 4},
    same_bits=lambda module: module.SAME_BITS,
    rules=[
        Rule(
            "lost-update", is_kind("Race", r"dq_ptr"),
            "Line {line}: two programs read, add to and write the same rows of dQ.",
            "Between the load and the store of one program another may store: its part is lost.",
            "tl.atomic_add; or programs that have rows of their own.",
            "backward/v2_fused_backward",
        ),
        Rule(
            "unsaid", is_kind("unsaid"), "It is right. Now say: SAME_BITS = True or False.",
            "fp32 sums depend on the order of their parts.", "Who decides that order?",
            "backward/v2_fused_backward",
        ),
        Rule(
            "order-of-sums", is_kind("bits"),
            "SAME_BITS is True, and another order of the programs gives other bits.",
            "Atomics make each addition whole, and leave the order of the parts to chance.",
            "False; or let one program add up all parts of a row.", "backward/v2_fused_backward",
        ),
        Rule(
            "no-chance", is_kind("same-bits"),
            "SAME_BITS is False, and every order that was tried gives the same bits.",
            "If one program adds up all parts of a row, their order is that of its loop.", "True.",
            "backward/v2_fused_backward",
        ),
    ],
)  # fmt: skip
