"""The forward rungs for sm_100: any order of events; of those for pairs of CTAs edges of their own,
mistakes."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

import tritonemu
from _lib import studies
from emulator.tests.judging import SAMPLED, SCHEDULES, import_file, judge, surviving
from emulator.tests.mutants import Mutant, enumerate_mutants
from gdpa_kernels import Mask
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.device import pairs
from gdpa_kernels.gdpa.kernels import b6_pair_stream as b6
from gdpa_kernels.gdpa.kernels import b7_split_stream as b7
from gdpa_kernels.gdpa.ladder import b5_cta_pair as b5
from tests.budget import within_budget
from tests.gdpa.cases import DEVICE, Case, of_pytorch
from tests.gdpa.test_forward import check

RUNGS = {"b5_cta_pair": b5, "b6_pair_stream": b6, "b7_split_stream": b7}
KERNELS = {"b5_cta_pair": "cta_pair_kernel", "b6_pair_stream": "pair_stream_kernel"}
KERNELS |= {"b7_split_stream": "split_stream_kernel"}
BF16 = torch.bfloat16
emulated = pytest.mark.skipif(DEVICE == "cuda", reason="is about the emulator")

SINGLE = ("b1_tensor_memory", "b2_two_tiles", "b3_stream", "b4_mixed")
MODULES = RUNGS | {impl: ladder.rung(impl).module() for impl in SINGLE}
# Every slot is used several times over, by several items of different lengths; of one CTA tiles
# with one block of keys and with several, with one tile of queries and two.
ORDERS = {
    **dict.fromkeys(SINGLE, ((300, 0, 17, 129), (130, 40, 0, 200))),
    "b5_cta_pair": ((300, 5, 0, 17, 520, 9), (200, 256, 40, 130, 0, 256)),
    "b6_pair_stream": ((17, 5, 0, 600, 9, 3), (300, 0, 40, 130, 400, 260)),
    "b7_split_stream": ((17, 5, 0, 300, 9, 3), (300, 0, 40, 130, 700, 260)),
}


def run(
    impl: str, module: ModuleType, schedule: str | int = "modelled", clusters: int = 1, **options
) -> torch.Tensor:
    """The output of `ORDERS[impl]` on this many pairs."""
    given = studies.batch(*ORDERS[impl], **{"head_dim": 64, **options})
    gpu = {"multiprocessors": 2 * clusters, "schedule": schedule, "max_steps": 50_000}
    with tritonemu.enabled("sm_100", **gpu) as reports:
        out = module.forward(given)
    assert reports[-1].checks["race"] > 0 and reports[-1].dots > 0
    return out


@emulated
@SCHEDULES
@pytest.mark.parametrize("impl", MODULES)
def test_any_schedule_gives_the_same_result(impl, seeds):
    """Bitwise, in all orders of the roles, without a race."""
    options = {"heads": 1 + (impl in SINGLE), "head_dim": 64}
    given = studies.batch(*ORDERS[impl], **options)
    out = run(impl, MODULES[impl], **options)
    within_budget(lambda _: ([out], *of_pytorch(given)), ["out"], most=1)
    for seed in seeds:
        found = run(impl, MODULES[impl], seed, clusters=1 + seed % 2, **options)
        assert torch.equal(found, out), seed


CAUSAL = {"causal": "upper_left"}
OWN_CASES = [
    ("b5_cta_pair", Case("all_keys", (257, 1, 513), (256, 255, 129), 1, 1, head_dim=128)),
    ("b5_cta_pair", Case("shared", (300, 300), (129, 0), 2, 2, 64, shared_q=True)),
    ("b6_pair_stream", Case("rows", (511, 512, 513), (129, 128, 127), 1, 1, head_dim=128)),
    ("b6_pair_stream", Case("masked", (1100,), None, 1, 1, 128, options={"window": 70})),
    ("b6_pair_stream", Case("causal", (600, 40), (700, 300), 2, 1, options=CAUSAL)),
    ("b6_pair_stream", Case("shared", (300, 300), (500, 0), 2, 1, 64, shared_q=True)),
    ("b7_split_stream", Case("rows", (255, 256, 257), (129, 128, 127), 1, 1, head_dim=128)),
    ("b7_split_stream", Case("masked", (700,), None, 1, 1, 128, options={"window": 70})),
    ("b7_split_stream", Case("causal", (600, 40), (700, 300), 2, 1, options=CAUSAL)),
    ("b7_split_stream", Case("shared", (300, 300), (500, 0), 2, 1, 64, shared_q=True)),
]  # fmt: skip


@emulated
@pytest.mark.parametrize("impl, case", OWN_CASES, ids=str)
def test_own_edges(impl, case):
    """Of an item of 256 or 512 rows, of keys that stay, of masks that skip blocks."""
    check(impl, case, BF16)


# -- Mistakes --------------------------------------------------------------------------------------


def launch(
    impl: str, expected: torch.Tensor, module: ModuleType, schedule: str | int, **options
) -> None:
    assert torch.equal(run(impl, module, schedule, **options), expected)


PAIRS = Path(pairs.__file__)
PARTS = ("fetch_part", "scores", "weighted_sum", "put_scaled")
SUM = {"out_dtype": torch.float32}


def calls_of(impl: str, *options: dict) -> list:
    """Launches for `judge`: without options, and of what any number of keys takes with each."""
    found = ({}, *options) if impl != "b5_cta_pair" else ({},)
    return [partial(launch, impl, run(impl, RUNGS[impl], **each), **each) for each in found]


def with_parts(module: ModuleType, file: Path) -> ModuleType:
    """A copy of a rung with what it shares taken from `file`."""
    made, shared = import_file(Path(module.__file__)), import_file(file)
    for name in PARTS:
        if hasattr(module, name):
            setattr(made, name, getattr(shared, name))
    return made


@emulated
@SAMPLED
@pytest.mark.parametrize("impl", RUNGS)
def test_every_mistake_in_synchronisation_is_found(impl, every):
    module = RUNGS[impl]
    launches = calls_of(impl, SUM)
    judged = surviving(module, KERNELS[impl], launches, every)
    assert judged.executed == len(enumerate_mutants(Path(module.__file__), KERNELS[impl])) > 80
    assert judged.survivors == []
    parts = [name for name in PARTS[1:] if hasattr(module, name)]
    shared = [x for name in parts for x in enumerate_mutants(PAIRS, name)]
    assert len(shared) > 2
    assert [
        x.what for x in shared if not judge(x, partial(with_parts, module), launches).error
    ] == []


# What is said to both CTAs, or to the leader alone; each CTA's half.
OF_A_PAIR = {", two_ctas=True": "", ", remote_cta_rank=0": "", ", pred=rank == 0": ""}
OF_A_PAIR |= {"rank *": "0 *", "+ rank)": "+ 0)"}


def mutants_of_a_pair(path: Path) -> list[Mutant]:
    """Each such place of a file, left out."""
    text, mutants = path.read_text(), []
    for place in re.finditer("|".join(map(re.escape, OF_A_PAIR)), text):
        line = text[: place.start()].count("\n") + 1
        edit = (place.start(), place.end(), OF_A_PAIR[place[0]])
        mutants.append(Mutant(path, "drop", (line, line), f"{line}: {place[0]}", (edit,)))
    return mutants


@emulated
@pytest.mark.sweep
@pytest.mark.parametrize("impl", RUNGS)
def test_every_mistake_of_a_pair_is_found(impl):
    """A commit, an arrival or bytes in the wrong CTA, the other one's half."""
    module = RUNGS[impl]
    mutants = mutants_of_a_pair(Path(module.__file__))
    launched = calls_of(impl, {"mask": Mask(causal=True)}, SUM)
    assert len(mutants) > 10
    assert [m.what for m in mutants if not judge(m, import_file, launched).error] == []
    # The first one is its docstring's, the last one put_scaled's.
    shared = mutants_of_a_pair(PAIRS)[1 : None if hasattr(module, "put_scaled") else -1]
    assert len(shared) == 3 + hasattr(module, "put_scaled")
    assert [
        m.what for m in shared if not judge(m, partial(with_parts, module), launched).error
    ] == []


@emulated
@pytest.mark.parametrize(
    "rung", (*ladder.BLACKWELL_RUNGS, *ladder.BLACKWELL_BACKWARD_RUNGS), ids=lambda r: r.impl
)
def test_the_last_commit_is_awaited(rung):
    """A CTA may end before one that nobody waits for arrives in its memory."""
    given, module = studies.batch((300, 40), (200, 256), head_dim=64), rung.module()
    with tritonemu.enabled("sm_100", multiprocessors=2, trace=True) as reports:
        if "backward" in rung.directions:
            module.backward(studies.gradient(given), given)
        else:
            module.forward(given)
    (line,) = (r.timeline for r in reports if r.dots)
    for cta in range(2):
        commits = [e.target for e in line.events if is_commit(e, cta)]
        assert "full" in commits[-1], commits[-3:]


def is_commit(event, cta: int) -> bool:
    return event.cta == cta and event.kind == "arrive" and event.lane == "tensor core"


def test_ctas_come_in_pairs():
    for impl, module in RUNGS.items():
        given = studies.batch((300, 40), (200, 256), heads=2)
        with launches(run=False) as seen:
            module.forward(given)
        assert seen[-1].options["ctas_per_cga"] == (2, 1, 1), impl
        assert seen[-1].grid[0] % 2 == 0, impl


def test_b5_says_what_it_needs():
    given = studies.batch((40,), (257,))
    assert b5.call_problem(given) == "needs a max_seqlen_k of at most 256, got 257"
    assert b5.call_problem(replace(given, max_seqlen_k=256)) is None
