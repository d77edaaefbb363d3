import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from exercises.cases import Case, unwritten
from exercises.grading import Exercise
from gdpa_kernels.calling.launch import launch

DIM = 64


def case(rows: int, *blocks: int) -> Case:
    generator = torch.Generator().manual_seed(0)
    inputs = {
        f"{n} blocks": torch.randn(n * rows, DIM, generator=generator).bfloat16() for n in blocks
    }

    def call(module):
        outputs = {name: unwritten(x) for name, x in inputs.items()}
        for name, x in inputs.items():
            desc = TensorDescriptor.from_tensor(x, [rows, DIM])
            launch(
                module.kernel, (1,), x.device, desc, outputs[name], len(x) // rows,
                DIM=DIM, ROWS=rows, num_warps=4,
            )  # fmt: skip
        return outputs

    return Case(
        ", ".join(inputs), call, tuple(inputs.values()),
        lambda: {name: 2 * x.double() for name, x in inputs.items()},
        lambda: {name: 2 * x for name, x in inputs.items()},
    )  # fmt: skip


EXERCISE = Exercise(
    cases=lambda module: {
        "five blocks": case(module.ROWS, 5), "edges": case(module.ROWS, 1, 2, 3, 12)
    },
    must={"UTMALDG": 1},
    roles={"default": "the producer", "task0": "the consumer"},
    parities=True,
)  # fmt: skip
