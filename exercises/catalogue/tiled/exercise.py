from exercises.cases import EDGES, gdpa_batch, gdpa_case, launch_tiled
from exercises.grading import Beside, Exercise
from gdpa_kernels.gdpa.kernels import v1_tiled


def cases(module):
    one = gdpa_batch((module.BLOCK_M,), (4 * module.BLOCK_N,), activation="silu")
    edges = gdpa_batch(EDGES, EDGES[::-1], heads=2, activation="silu")
    return {
        "one tile": gdpa_case(one, launch_tiled, module.BLOCK_N),
        "edges": gdpa_case(edges, launch_tiled, module.BLOCK_N),
    }


LONG = gdpa_batch((128,), (512,), head_dim=128, activation="silu")
EXERCISE = Exercise(
    cases=cases,
    must={"HGMMA": 2},
    beside=Beside(
        "forward v1", gdpa_case(LONG, launch_tiled),
        lambda: v1_tiled.forward(LONG, config=v1_tiled.Config(64, 32, 4, 2)), bytes=True,
    ),
)  # fmt: skip
