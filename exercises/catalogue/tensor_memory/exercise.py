import triton

from exercises.cases import EDGES, descriptors, gdpa_batch, gdpa_case
from exercises.grading import Beside, Exercise
from exercises.hints import Barriers, Rule, base_of
from gdpa_kernels.calling.launch import launch
from gdpa_kernels.gdpa.ladder import b1_tensor_memory as b1

ROWS = 128


def launched(module, batch, out):
    tiles = triton.cdiv(batch.max_seqlen_q, ROWS)
    launch(
        module.kernel, (tiles * batch.num_heads * batch.sequences,), batch.device,
        *descriptors(module, batch, out, ROWS), batch.cu_seqlens_q, batch.cu_seqlens_k, tiles,
        batch.scale, HEADS=batch.num_heads, HEAD_DIM=batch.head_dim, BLOCK_N=module.BLOCK_N,
        STAGES=module.STAGES, num_warps=4,
    )  # fmt: skip


def cases(module):
    keys = module.BLOCK_N * (2 * module.STAGES + 1)
    edges = gdpa_batch((*EDGES, 128), (*EDGES[::-1], keys - 5))
    return {
        "one tile": gdpa_case(gdpa_batch((128,), (keys,)), launched, module.BLOCK_N),
        "edges": gdpa_case(edges, launched, module.BLOCK_N),
    }


def race_of_scores(failure):
    """Whether accesses to S, or to P over it, race."""
    return failure.kind == "Race" and base_of(failure.error.buffer) in "sp"


def p_unguarded(failure):
    """Fit P V that is issued by a role that never waits for P."""
    if race_of_scores(failure) and "task1" not in Barriers(failure).waiters("p_full"):
        return {"line": failure.find(r"\bp\[0\], v\[")}
    return None


def said_early(failure):
    """Fit an arrival on p_full above the line that stores P."""
    line = failure.find(r"barrier_arrive\(p_full")
    early = race_of_scores(failure) and 0 < line < failure.find(r"local_store\(p\b")
    return {"line": line} if early else None


def nothing_written(failure):
    """Fit a read of tensor memory that no MMA has written."""
    fits = failure.kind == "UninitializedRead" and failure.error.buffer in ("s[0]", "p[0]", "o[0]")
    return {"line": failure.first, "buffer": failure.error.buffer} if fits else None


LONG = gdpa_batch((128,), (512,))
EXERCISE = Exercise(
    cases=cases,
    beside=Beside(
        "b1", gdpa_case(LONG, launched), lambda: b1.forward(LONG, config=b1.Config(BLOCK_N=64))
    ),
    arch="sm_100",
    must={"UTCHMMA": 2, "LDTM": 1, "UTMALDG": 3},
    roles={"default": "the activation", "task0": "the producer", "task1": "the MMA role"},
    parities=True,
    once=("q_full", "o_full"),
    rules=[
        Rule(
            "nothing-written",
            nothing_written,
            "Line {line} reads {buffer}, into which nothing was written.",
            "Tensor memory does not begin as 0: an MMA with use_acc=False writes it first.",
            "Issue the MMA that writes it, and let the reader wait for its end.",
            "blackwell/tensor_memory",
        ),
        Rule(
            "p-unguarded",
            p_unguarded,
            "P V is issued (line {line}), and its role never waits for P.",
            "The MMA role and the activation share tensor memory, and nothing else orders them.",
            "Wait for p_full before P V.",
            "blackwell/tensor_memory",
        ),
        Rule(
            "said-early",
            said_early,
            "Line {line} says that P is there, and it is stored below.",
            "An arrival hands over what its role has done before it.",
            "Arrive behind the store.",
            "blackwell/tensor_memory",
        ),
    ],
)
