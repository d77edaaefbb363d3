from exercises.cases import EDGES, gdpa_batch, gdpa_case, launch_roles
from exercises.grading import Beside, Exercise
from gdpa_kernels.gdpa.ladder import v4_warp_specialized as v4

TURNS = 2  # of the ring, and a block: both parities of every barrier, whatever STAGES is


def cases(module):
    keys = module.BLOCK_N * (TURNS * module.STAGES + 1)
    edges = gdpa_batch((*EDGES, 128), (*EDGES[::-1], keys - 5))
    return {
        "one tile": gdpa_case(gdpa_batch((128,), (keys,)), launch_roles, module.BLOCK_N),
        "edges": gdpa_case(edges, launch_roles, module.BLOCK_N),
    }


LONG = gdpa_batch((128,), (512,), head_dim=128)
EXERCISE = Exercise(
    cases=cases,
    must={"HGMMA": 2, "UTMALDG": 3},
    roles={"default": "the producer", "task0": "consumer"},
    parities=True,
    once=("q_full",),
    beside=Beside(
        "forward v4", gdpa_case(LONG, launch_roles),
        lambda: v4.forward(LONG, config=v4.Config(BLOCK_N=64, num_stages=2)),
    ),
)  # fmt: skip
