from exercises.cases import EDGES, gdpa_batch, gdpa_case, launch_roles
from exercises.grading import Exercise
from exercises.hints import SYNCHRONISATION, Rule


def launched(module, batch, out):
    launch_roles(module, batch, out, programs=2)


def cases(module):
    one = gdpa_batch((128, 128), (256, 256))
    n = module.BLOCK_N
    edges = gdpa_batch((*EDGES, 128), (*EDGES[::-1], 5 * n))
    return {"one tile": gdpa_case(one, launched, n), "edges": gdpa_case(edges, launched, n)}


def counts(sides):
    """Fit a ring that fails where so many sides count the blocks that it has carried."""

    def when(failure):
        if failure.kind not in SYNCHRONISATION:
            return None
        first = failure.find(r"used \+= ")
        lines = [line for line in (first, failure.find(r"used \+= ", first + 1)) if line]
        wrong = [line for line in lines if "used += blocks" not in failure.source[line - 1]]
        if sides == "wrong" and len(lines) == 2 and wrong:
            return {"line": wrong[0]}
        return {"line": failure.first} if sides == len(lines) < 2 else None

    return when


EXERCISE = Exercise(
    cases=cases,
    must={"HGMMA": 2, "UTMALDG": 3},
    roles={"default": "the producer", "task0": "consumer"},
    parities=True,
    changes=1,
    rules=[
        Rule(
            "out-of-step", counts(1),
            "The first tile of a program is right, and a later one ends in {kind}: line {line}.",
            "The roles share no variable. What tells each which stage and phase come next, and do "
            "both sides agree after an odd number of blocks?",
            "Compare what producer and consumer do at the end of a tile.", "forward/v6_short_kv",
        ),
        Rule(
            "ring-restarts", counts(0),
            "Both sides agree now, and it still fails (line {line}): each tile begins at stage 0, "
            "phase 0.",
            "The barriers do not begin again: an mbarrier keeps its phase from tile to tile.",
            "Let the counters run on, on both sides.", "forward/v6_short_kv",
        ),
        Rule(
            "wrong-step", counts("wrong"),
            "Line {line} counts on, but not by what the ring has carried.",
            "After a tile of n blocks the ring stands n stages further.", "used += blocks.",
            "forward/v6_short_kv",
        ),
    ],
)  # fmt: skip
