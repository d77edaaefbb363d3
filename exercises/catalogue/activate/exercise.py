import math

import torch
import triton
from torch.nn.functional import gelu

from exercises.cases import Case, unwritten
from exercises.grading import Exercise
from exercises.hints import Rule, like
from gdpa_kernels.calling.launch import launch

BLOCK = 1024


def special(failure):
    """Fit a kernel of too many MUFU."""
    return {"line": 0} if failure.kind == "compiled" and "MUFU" in failure.message else None


def case(n: int) -> Case:
    x = (3 * torch.randn(n, generator=torch.Generator().manual_seed(0))).bfloat16()

    def call(module):
        out = unwritten(x)
        programs = triton.cdiv(n, BLOCK)
        launch(module.kernel, (programs,), x.device, x, out, n, BLOCK=BLOCK)
        return {"out": out}

    wide = x.double()
    return Case(
        f"{n} elements", call, (x,), lambda: {"out": gelu(wide, approximate="tanh")},
        lambda: {"out": gelu(x.float(), approximate="tanh").bfloat16()},
        mistakes={
            "activation": lambda: {"out": wide},
            "no-cubic": lambda: {
                "out": 0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * wide))
            },
            "no-half": lambda: {"out": 2 * gelu(wide, approximate="tanh")},
        },
    )  # fmt: skip


EXERCISE = Exercise(
    cases=lambda module: {"one block": case(BLOCK), "edges": case(2 * BLOCK + 1)},
    most={"MUFU": BLOCK // 128},  # of a thread
    rules=[
        Rule(
            "more-than-one-function", special,
            "It is right, and takes more than one MUFU an element.",
            "A multiprocessor does 16 of them a cycle, and they would take longer than the MMAs.",
            "Use tanh, which is one; multiply by constants instead of dividing.",
            "operator/activations",
        ),
        Rule(
            "no-cubic", like("no-cubic"), "Your output is what you get without the cubic term.",
            "The cubic term brings tanh close to the error function.",
            "u = sqrt(2 / pi) (x + 0.044715 x^3).", "operator/activations",
        ),
        Rule(
            "no-half", like("no-half"), "Your output is twice GELU.",
            "1 + tanh(u) lies between 0 and 2.", "Multiply by 0.5.", "operator/activations",
        ),
    ],
)  # fmt: skip
