import torch
import triton

from exercises.cases import Case, unwritten
from exercises.grading import Exercise
from gdpa_kernels.calling.launch import launch


def case(*sizes: int) -> Case:
    generator = torch.Generator().manual_seed(0)
    inputs = {f"{n} elements": torch.randn(n, generator=generator) for n in sizes}

    def call(module):
        outputs = {name: unwritten(x) for name, x in inputs.items()}
        for name, x in inputs.items():
            programs = triton.cdiv(len(x), module.BLOCK)
            launch(
                module.kernel, (programs,), x.device, x, outputs[name], len(x), BLOCK=module.BLOCK
            )
        return outputs

    return Case(
        ", ".join(inputs), call, tuple(inputs.values()),
        lambda: {name: x.double().relu().square() for name, x in inputs.items()},
        lambda: {name: x.relu().square() for name, x in inputs.items()},
    )  # fmt: skip


EXERCISE = Exercise(cases=lambda module: {"one block": case(128), "edges": case(1, 127, 129, 1000)})
