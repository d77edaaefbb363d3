"""Nearly every mistake in the synchronisation of a kernel is found; the others have a reason.

For every kernel mutants (see `mutants`) of the lines that its launches execute are run: a sample,
and all by `make mutants` and at night. Those that nothing notices must be the ones listed in
HARMLESS, each with the reason why the kernel still computes the same, without a race.
`pytest -s` prints how many of each kind were found, and how.
"""

import sys
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch

import tritonemu
from emulator.tests.judging import SAMPLED, executed, judge, sampled
from emulator.tests.mistakes import KINDS
from emulator.tests.mutants import Mutant
from emulator.tests.test_search import explored
from emulator.tests.tutorials import cases, hopper
from emulator.tests.tutorials.cases import Case, run_case
from gdpa_kernels.calling import ladder
from gdpa_kernels.gdpa import reference
from gdpa_kernels.gdpa.batch import Batch
from gdpa_lab.measuring.inputs import cu_seqlens

SMALLEST_SHARE = 0.95
# More than any of the launches takes.
MAX_STEPS = 50_000


@dataclass(frozen=True)
class Subject:
    """A kernel under mutation: its file and name, and the launches that execute it."""

    path: Path
    kernel: str
    launches: "tuple[Case | RungLaunch, ...]"


def _import(path: Path) -> ModuleType:
    with mock.patch.dict(sys.modules):
        return cases.load.__wrapped__(str(path))


@dataclass(frozen=True)
class RungLaunch:
    """One call of a rung of ours on a jagged batch, with these constants of its Config."""

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    config: tuple[tuple[str, int], ...]
    arch: str = "sm_90"
    head_dim: int = 32
    activation: str = "relu"

    def run(self, module: ModuleType, schedule: str | int) -> None:
        generator = torch.Generator().manual_seed(0)

        def tokens(lengths: tuple[int, ...]) -> torch.Tensor:
            shape = sum(lengths), 2, self.head_dim
            return torch.randn(shape, generator=generator).bfloat16()

        q, k, v = tokens(self.lengths_q), tokens(self.lengths_k), tokens(self.lengths_k)
        ends = [cu_seqlens(list(n), "cpu") for n in (self.lengths_q, self.lengths_k)]
        sizes = max(self.lengths_q), max(self.lengths_k)
        batch = Batch(q, k, v, *ends, *sizes, (self.activation,), scale=self.head_dim**-0.5)
        with tritonemu.enabled(self.arch, schedule=schedule, max_steps=MAX_STEPS):
            config = module.Config(**dict(self.config))
            out = module.forward(batch, config=config)
        same = reference.forward_in_dtype(batch)
        exact = reference.forward(replace(batch, q=q.double(), k=k.double(), v=v.double()))
        cases.assert_near("out", out, exact, same)


def _launch(case: Case | RungLaunch, module: ModuleType, schedule: str | int) -> None:
    """Run a rung, or a case of the tutorials with `module` in place of the tutorial's own."""
    if isinstance(case, RungLaunch):
        case.run(module, schedule)
        return
    with mock.patch.object(hopper, "load", lambda file: module):
        run_case(case, schedule, max_steps=MAX_STEPS)


def _case(name: str, build, *args, **kwargs) -> Case:
    return Case(name, "sm_90", partial(build, *args, **kwargs))


def _listed(*names: str) -> tuple[Case, ...]:
    return tuple(case for case in hopper.CASES if case.name in names)


def _attention(file: str, kernel: str, *launches: Case) -> Subject:
    return Subject(cases.FOLDER / f"{file}.py", kernel, launches)


def _rung(impl: str, kernel: str, *launches: RungLaunch) -> Subject:
    return Subject(ladder.rung(impl).path, kernel, launches)


def _blocks(stages: int, **config: int) -> tuple[tuple[str, int], ...]:
    return tuple({"BLOCK_N": 64, "num_stages": stages, **config}.items())


LONG = ((200, 0, 130), (300, 17, 200))
SHORT = ((200, 0, 130, 300), (250, 17, 200, 256))
SINGLE = ((300, 0, 130, 200), (60, 17, 64, 50))  # one block of keys: Q is what orders the roles
# On sm_100: one block of keys, two and three; two tiles of queries, and one of them empty.
TILES = ((300, 0, 100, 260), (300, 17, 200, 50))
PERSISTENT = partial(
    hopper.attention, f"{hopper.LOOPING[0]}.py", hopper.LOOPING[1],
    head_dim=64, dtype=torch.float16, sms=1, **hopper.PERSISTENT | {"BLOCK_N": 128},
)  # fmt: skip
PINGPONG = partial(hopper.gemm_persistent, f"{hopper.ALTERNATING}.py", BM=64)
GEMM = cases.FOLDER / "hopper_gemm_ws.py"

SUBJECTS = {
    "attention": _attention(*hopper.WS, *_listed("hopper_fa_ws two groups, fp16")),
    "attention, pipelined": _attention(
        *hopper.PIPELINED,
        *_listed(
            "hopper_fa_ws_pipelined two groups, fp16", "hopper_fa_ws_pipelined three buffers, fp16"
        ),
    ),
    "attention, ping-pong": _attention(
        *hopper.PINGPONG, *_listed("hopper_fa_ws_pipelined_pingpong fp16")
    ),
    # With as many blocks of keys as buffers, the first K of a tile has no older V to be ordered by;
    # with an odd number, tiles start in different buffers.
    "attention, ping-pong, persistent": _attention(
        *hopper.LOOPING,
        _case("two blocks of keys", PERSISTENT, heads=2, rows=256),
        _case("three blocks", PERSISTENT, NUM_BUFFERS_Q=2, heads=1, rows=384),
    ),
    "GEMM, pipelined": Subject(
        cases.FOLDER / "hopper_gemm_pipelined.py",
        "matmul_kernel_pipelined_hopper",
        _listed("hopper_gemm_pipelined"),
    ),
    "GEMM, skinny": Subject(GEMM, "_skinny_matmul_kernel", _listed("hopper_gemm_ws skinny")),
    "GEMM, skinny, TMA": Subject(GEMM, "_skinny_tma_kernel", _listed("hopper_gemm_ws skinny TMA")),
    "GEMM, specialized": Subject(
        GEMM,
        "matmul_kernel_tlx_ws",
        _listed(
            "hopper_gemm_ws",
            "hopper_gemm_ws A transposed",
            "hopper_gemm_ws 2 CTAs, ragged, B transposed",
        ),
    ),
    "GEMM, cooperative": Subject(
        cases.FOLDER / f"{hopper.COOPERATIVE}.py",
        "matmul_kernel_tlx_ws_persistent",
        _listed(hopper.COOPERATIVE),
    ),
    # 11 tiles on 2 SMs: the consumers of one have three tiles each, those of the other three and
    # two, so that neither kind of imbalance goes unnoticed.
    "GEMM, ping-pong": Subject(
        cases.FOLDER / f"{hopper.ALTERNATING}.py",
        "matmul_kernel_tlx_ws_persistent",
        (
            _case("mbarriers", PINGPONG, (704, 64, 264), sms=2, USE_NAMED_BARRIER=False),
            _case("named barriers", PINGPONG, (200, 128, 264), sms=1, USE_NAMED_BARRIER=True),
        ),
    ),
    "v4_warp_specialized": _rung(
        "v4_warp_specialized", "specialized_kernel", RungLaunch(*LONG, _blocks(2))
    ),
    "v5_pingpong": _rung(
        "v5_pingpong", "pipelined_kernel", RungLaunch(*LONG, _blocks(2, turns=True))
    ),
    "v6a_persistent": _rung(
        "v6a_persistent",
        "persistent_pipeline_kernel",
        RungLaunch(*LONG, _blocks(2)),
        RungLaunch(*SINGLE, _blocks(2)),
    ),
    "v6b_stream": _rung(
        "v6b_stream",
        "stream_kernel",
        RungLaunch(*LONG, _blocks(2)),
        RungLaunch(*SINGLE, _blocks(2)),
    ),
    "v6_short_kv": _rung(
        "v6_short_kv",
        "short_kv_kernel",
        RungLaunch(*LONG, _blocks(2)),
        RungLaunch(*SHORT, _blocks(4, resident=True)),
    ),
    "v8_own_waits": _rung(
        "v8_own_waits",
        "own_waits_kernel",
        RungLaunch(*LONG, _blocks(2)),
        RungLaunch(*SHORT, _blocks(4, resident=True)),
        RungLaunch(*LONG, _blocks(2, q_slots=1)),
        RungLaunch(*LONG, _blocks(2, ahead=True)),
        RungLaunch(*SINGLE, _blocks(2, q_slots=1), head_dim=256),
    ),
    **{
        impl: _rung(impl, kernel, RungLaunch(*TILES, _blocks(3), "sm_100", 64, "gelu_tanh"))
        for impl, kernel in (
            ("b1_tensor_memory", "tensor_memory_kernel"),
            ("b2_two_tiles", "two_tiles_kernel"),
            ("b3_stream", "stream_kernel"),
        )
    },
}

_IMPLIED_BY_V = (
    "With n buffers, K[j] is overwritten by K[j + n]. Before it loads that, the producer waits for "
    "V[j - 1], to be replaced by V[j + n - 1], and a consumer releases V[j - 1] in the step that "
    "multiplies by K[j], after async_dot_wait(0): that product is complete by then."
)
_LAST_V = "It is the release of the last V: the producer has loaded everything, and nobody waits."
_SAME_BYTES = (
    "The two loads of Q swap the expectations, which come from the same role and are equal: each "
    "barrier still gets one expectation and the bytes of one load, and has a single phase."
)
_ORDERED_BY_PINGPONG = (
    "A consumer learns of the other's half of Q instead of its own; but before its first product "
    "it passes a named barrier that the other reaches after waiting for its half."
)
_NOTHING_IN_FLIGHT = (
    "Only the product P @ V is in flight here, since the one with K has been waited for: at most "
    "one remains in flight without waiting."
)
_IMPLIED_BY_B = (
    "Each consumer releases B of a stage after its half of A, and the producer has just waited for "
    "B to be released by both."
)

_OWN_BUFFERS = "Each role always takes the other's buffer for its output: they trade places."

# Kernel -> mutants that nothing notices -> why they are harmless.
HARMLESS = {
    "attention, pipelined": {
        "barrier_arrive(k_empty, 1) before qk = async_dot_wait(1, qk)": _IMPLIED_BY_V,
        "drop barrier_arrive(v_empty, 1) (2)": _LAST_V,
        "barrier_arrive(v_empty, 1) before acc = async_dot_wait(0, acc) (2)": _LAST_V,
    },
    "attention, ping-pong": {
        "q_fulls[cid] -> next": _SAME_BYTES,
        "q_fulls[cid] -> next (2)": _ORDERED_BY_PINGPONG,
        "q_fulls[cid] -> next (3)": _ORDERED_BY_PINGPONG,
        "barrier_arrive(k_empties[k_buf_id], 1) before qk = async_dot_wait(1, qk)": _IMPLIED_BY_V,
        "drop barrier_arrive(v_empties[v_buf_id], 1) (2)": _LAST_V,
        "barrier_arrive(v_empties[v_buf_id], 1) before acc = async_dot_wait(0, acc) (2)": _LAST_V,
    },
    "attention, ping-pong, persistent": {
        "barrier_arrive(k_empties[k_bufIdx], 1) before qk = async_dot_wait(1, qk)": _IMPLIED_BY_V,
        "drop async_dot_wait(1, acc)": _NOTHING_IN_FLIGHT,
        "async_dot_wait(acc): pendings=2": _NOTHING_IN_FLIGHT,
        "barrier_arrive(q_empties[q_bufIdx + cid * NUM_BUFFERS_Q], 1) before acc = "
        "async_dot_wait(1, acc)": _NOTHING_IN_FLIGHT,
    },
    "GEMM, specialized": {
        "local_view(cta_bars, buf) -> next": (
            "Both arrivals and the wait use this view, in both CTAs: the barriers trade places."
        ),
        "drop barrier_wait(bar=empty_a_2nd, phase=p ^ 1)": _IMPLIED_BY_B,
    },
    "GEMM, cooperative": {"drop barrier_wait(bar=empty_a_2nd, phase=p)": _IMPLIED_BY_B},
    "v5_pingpong": {
        "math: barrier_arrive(k.empty[stage]) before s = async_dot_wait(1, s)": _IMPLIED_BY_V
    },
    "v6a_persistent": {
        "math: barrier_arrive(k.empty[stage]) before s = async_dot_wait(1, s)": _IMPLIED_BY_V,
        "math: out[role] -> next": _OWN_BUFFERS,
    },
    "v6b_stream": {
        "load: k.acquire(kv): drop barrier_wait(self.empty[stage], "
        "count // self.STAGES & 1 ^ 1)": _IMPLIED_BY_V,
        "math: barrier_arrive(k.empty[stage]) before s = async_dot_wait(1, s)": _IMPLIED_BY_V,
        "math: barrier_arrive(k.empty[stage]) before s = async_dot_wait(1, s) (2)": _IMPLIED_BY_V,
        "math: out[role] -> next": _OWN_BUFFERS,
    },
    "v6_short_kv": {"math: out[role] -> next": _OWN_BUFFERS},
    "v8_own_waits": {
        "math: out[role] -> next": _OWN_BUFFERS,
        "math: out[role] -> next (2)": _OWN_BUFFERS,
    },
    "b3_stream": {"math: out[role] -> next": _OWN_BUFFERS},
}


@cache
def _executed(name: str) -> list[tuple[Mutant, list[partial]]]:
    """All mutants, each with the launches that execute what it changes."""
    subject = SUBJECTS[name]
    launches = [partial(_launch, case) for case in subject.launches]
    return executed(subject.path, subject.kernel, _import(subject.path), launches)


@SAMPLED
@pytest.mark.parametrize("name", SUBJECTS)
def test_what_is_not_found_is_harmless(name, every):
    used = {mutant: launches for mutant, launches in _executed(name) if launches}
    tested = list(used) if every else sampled(list(used))
    verdicts = {mutant: judge(mutant, _import, used[mutant]).error for mutant in tested}
    errors = Counter(filter(None, verdicts.values()))
    total = Counter(mutant.kind for mutant in tested)
    found = Counter(mutant.kind for mutant, error in verdicts.items() if error)
    shares = ", ".join(f"{kind} {found[kind]}/{total[kind]}" for kind in KINDS if total[kind])
    by = ", ".join(f"{error} {count}" for error, count in errors.most_common())
    print(f"\n{name}: {found.total()} of {len(tested)} found: {shares}; by {by}")
    for mutant, launches in _executed(name):
        if not launches:
            print(f"  not executed: {mutant.lines[0]}: {mutant.what}")
    names = {mutant.what for mutant in tested}
    survivors = {mutant.what for mutant, error in verdicts.items() if not error}
    assert survivors == HARMLESS.get(name, {}).keys() & names


@pytest.mark.nightly
def test_nearly_all_are_found():
    """The exceptions are tested above; it remains to count them."""
    assert HARMLESS.keys() <= SUBJECTS.keys()
    tested = {name: sum(bool(launches) for _, launches in _executed(name)) for name in SUBJECTS}
    lost = {name: len(HARMLESS.get(name, {})) for name in SUBJECTS}
    for name in SUBJECTS:
        print(f"{name:34}{tested[name] - lost[name]:4} of {tested[name]:4}")
    total = sum(tested.values())
    share = 1 - sum(lost.values()) / total
    print(f"{'all':34}{total - sum(lost.values()):4} of {total:4}, {share:.1%}")
    assert share >= SMALLEST_SHARE


@pytest.mark.parametrize("name", ("GEMM, specialized", "GEMM, ping-pong", "v6b_stream"))
def test_large_pipelines_have_one_class(name):
    """Clusters, named barriers and a persistent attention kernel: all orders are equivalent."""
    subject = SUBJECTS[name]
    module = _import(subject.path)
    for launch in subject.launches:
        _, tree = explored(lambda order, launch=launch: _launch(launch, module, order))
        assert (tree.classes, tree.useless) == (1, 0)
