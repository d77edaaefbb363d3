"""The warp-specialized backward rungs: any schedule and configuration, and mistakes in them."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import tritonemu
from emulator.tests.judging import SAMPLED, SCHEDULES, import_file, judge, surviving
from emulator.tests.mutants import Mutant, enumerate_mutants
from gdpa_kernels.gdpa.device import (
    pair_steps,
    single_cta,
    tensor_memory,
    tickets,
    two_consumers,
)
from tests.calls import assert_same_bits
from tests.gdpa.cases import BACKWARD, DEVICE, Case, batch_of, check_gradients
from tests.gdpa.test_blackwell import mutants_of_a_pair
from tests.tiers import swept

BF16 = torch.bfloat16
V4, V5, V6, V7 = (impl for impl in BACKWARD if impl.startswith(("v4", "v5", "v6", "v7")))
B1, B2, B3, B4, B5, B6 = BLACKWELL = tuple(impl for impl in BACKWARD if impl.startswith("b"))
pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="is about the emulator")


def scheduled(impl: str, call: dict, schedule: str | int, module=None, config=None, **gpu) -> tuple:
    """(dq, dk, dv), the roles ordered by `schedule`. module: in place of the rung's own. config:
    its fields. gpu: of `tritonemu.enabled`."""
    module, arch = module or BACKWARD[impl].module(), "sm_100" if impl in BLACKWELL else "sm_90"
    more = {"config": module.Config(**config)} if config else {}
    with tritonemu.enabled(arch, schedule=schedule, max_steps=100_000, **gpu):
        return module.backward(call["grad_out"], batch_of(call), **more)


# Slots are used several times over, by several items; the last round of items is not full.
ORDERS = {
    "v4, one tile of keys": (V4, Case("orders", (300, 0, 70, 64, 1), (128, 5, 100, 0, 7))),
    "v4, several tiles": (V4, Case("orders", (300, 0, 70, 1), (300, 5, 129, 64), 1, 1)),
    "v4, head_dim 128": (V4, Case("orders", (130, 0, 70, 1), (128, 5, 100, 7), 2, 1, 128)),
    "v6": (V6, Case("orders", (130, 0, 70, 1, 64), (128, 5, 100, 7, 0), 2, 1, 128)),
    "v6, head_dim 64": (V6, Case("orders", (300, 0, 70, 64, 1), (128, 5, 100, 0, 7))),
    "v5": (V5, Case("orders", (130, 0, 70, 1), (256, 5, 129, 70), 2, 1, 128)),
    "v7, one tile of keys": (V7, Case("orders", (130, 0, 70, 1), (64, 5, 60, 7), 2, 1, 256)),
    "v7, several tiles": (V7, Case("orders", (70, 0, 64), (200, 5, 129), 1, 1, 136)),
}
# Other launch constants; in v5 a step of a pair has its own slots.
OTHERS = {V7: [{"q_stages": 1, "g_stages": 2}], V5: []}
OTHERS |= dict.fromkeys((V4, V6), [{"q_stages": 3, "g_stages": 1}])


@pytest.mark.parametrize(
    "name", swept(ORDERS, ("v4, head_dim 128", "v6", "v5", "v7, several tiles"))
)
def test_any_schedule_and_config_gives_the_same_result(name):
    """Bitwise; a dQ that several tiles of keys add to keeps its error budget."""
    impl, case = ORDERS[name]
    expected = scheduled(impl, case.call(BF16), "modelled")
    runs = [(0, {}), (1, {})]
    runs += [(schedule, config) for config in OTHERS[impl] for schedule in ("modelled", 0, 1)]
    for schedule, config in runs:
        compute = partial(scheduled, impl, schedule=schedule, config=config)
        found = compute(case.call(BF16))
        if "several tiles" in name:
            check_gradients(compute, case, BF16, least=2048)
        else:
            assert torch.equal(found[0], expected[0]), (schedule, config)
        assert_same_bits(found[1:], expected[1:], (schedule, config))


# On two CTAs: items follow each other there, and the last round is not full.
BLACKWELL_ORDERS = {
    "b1, one tile of keys": (B1, Case("orders", (260, 0, 9, 1), (128, 5, 100, 0), 1, 1, 128)),
    "b1, two tiles of keys": (B1, Case("orders", (130, 0, 70), (256, 5, 129), 1, 1)),
    "b3, one tile of keys": (B3, Case("orders", (260, 0, 9, 1), (128, 5, 100, 0), 1, 1, 128)),
    "b3, two tiles of keys": (B3, Case("orders", (130, 0, 70), (256, 5, 129), 1, 1)),
    "b4, one tile of keys": (B4, Case("orders", (260, 0, 9, 1), (256, 5, 130, 0), 1, 1, 128)),
    "b4, two tiles of keys": (B4, Case("orders", (130, 0, 70), (300, 5, 129), 1, 1)),
    "b5, one tile of keys": (B5, Case("orders", (260, 0, 9, 1), (256, 5, 130, 0), 1, 1, 128)),
    "b5, two tiles of keys": (B5, Case("orders", (130, 0, 70), (300, 5, 129), 1, 1)),
    "b6": (B6, Case("orders", (260, 0, 9, 1), (256, 5, 130, 0), 1, 1, 128)),
    "b6, grouped": (B6, Case("orders", (130, 0, 9), (256, 5, 129), 2, 1)),
    "b2": (B2, Case("orders", (260, 0, 9), (256, 5, 129), 1, 1, 128)),
    "b2, grouped": (B2, Case("orders", (130, 0, 9), (256, 5, 129), 2, 1)),
}


@SCHEDULES
@pytest.mark.parametrize("name", BLACKWELL_ORDERS)
def test_any_schedule_gives_the_same_bits(name, seeds):
    """No race, no deadlock; at most two tiles of keys add to a row of dQ, and two commute."""
    impl, case = BLACKWELL_ORDERS[name]
    call = case.call(BF16) | {"activation": "relu"}
    expected = scheduled(impl, call, "modelled", multiprocessors=2)
    for seed in seeds:
        assert_same_bits(scheduled(impl, call, seed, multiprocessors=2), expected, seed)


@pytest.mark.parametrize("impl", (B1, B3))
def test_three_tiles_of_keys_keep_the_budget_in_any_order(impl):
    case = Case("orders", (130, 0, 70), (300, 5, 129), 1, 1)
    for schedule in range(2):
        check_gradients(partial(scheduled, impl, schedule=schedule), case, BF16, least=2048)


# One program, or cluster, with two tiles of keys, or items: every slot is used several times over.
THREE = Case("three", (130, 65, 1), (64, 60, 5), 1, 1, 136)
# More entries than slots of tickets.
TICKETS = Case("tickets", (65, 3, 64, 1), (65, 70, 5, 64), 1, 1, options={"causal": True})
OF_TILES = (
    (Case("wide", (130, 65, 64, 1), (128, 70, 5, 64), 1, 1, 128), {}),
    (Case("narrow", (300, 5), (70, 64), 1, 1), {}),
    (TICKETS, {"tickets": True}),
)
SMALL = {
    V4: OF_TILES,
    V6: OF_TILES,
    V5: ((Case("short", (130, 65), (256, 130), 1, 1, 128), {}),),
    V7: (
        (THREE, {}),
        *((THREE, config) for config in OTHERS[V7]),
        (replace(TICKETS, head_dim=136), {"tickets": True}),
    ),
    B1: (
        (Case("narrow", (260, 130), (128, 130), 1, 1), {}),
        (Case("wide", (300, 5), (128, 130), 1, 1, 128), {}),
    ),
    B2: (
        (Case("narrow", (260, 130), (200, 5), 1, 1), {}),
        (Case("wide", (300, 5), (256, 130), 1, 1, 128), {}),
    ),
}

# Why it is no mistake: what nothing notices.
COVERED = "Another wait of the same role, beside it, lets nothing pending pass either."
READ = {
    "All loads of an entry are issued: consumers have given back K and V of the entry before, which"
    " the ticket named that this slot held.": (
        "take: tickets.ring.acquire(tile): "
        "drop barrier_wait(self.empty[stage], count // self.STAGES & 1 ^ 1)",
    ),
}
SURVIVORS = {
    V4: READ
    | {
        COVERED: (
            "math: drop async_dot_wait(0, dv)",
            "math: async_dot_wait(dv): pendings=1",
            "math: drop async_dot_wait(0, dk)",
            "math: async_dot_wait(dk): pendings=1",
            "math: barrier_arrive(g.empty[count % options.G_STAGES]) before "
            "dk = async_dot_wait(0, dk)",
            "math: drop async_dot_wait(0, dv) (2)",
            "math: async_dot_wait(dv): pendings=1 (2)",
            "math: drop async_dot_wait(0, dk) (2)",
            "math: async_dot_wait(dk): pendings=1 (2)",
            "math: barrier_arrive(g.empty[now % options.G_STAGES]) before "
            "dk = async_dot_wait(0, dk)",
            "math: drop async_dot_wait(0, s) (3)",
            "math: async_dot_wait(s): pendings=1 (3)",
            "math: drop async_dot_wait(0, dq)",
            "math: async_dot_wait(dq): pendings=1",
            "math: barrier_arrive(q.empty[now % Q_STAGES]) before dq = async_dot_wait(0, dq)",
            "math: barrier_arrive(ds.empty[now - 1 & 1]) before dq = async_dot_wait(0, dq)",
        ),
        "With as many slots of Q, q_empty says it: awaited before, given later.": (
            "load: drop barrier_wait(g.empty[stage], (count + step) // options.G_STAGES & 1 ^ 1)",
        ),
        "Both roles give V back at the end of a tile, and its next load is awaited before all of"
        " these are used again.": (
            "load: drop barrier_wait(k.empty[stage], tile // options.K_STAGES & 1 ^ 1)",
            "math: barrier_arrive(k.empty[tile % K_STAGES]) before dq = async_dot_wait(0, dq)",
            "math: barrier_arrive(q.empty[count % Q_STAGES]) before s = async_dot_wait(0, s)",
            "math: barrier_arrive(ds.empty[count - 1 & 1]) before dq = async_dot_wait(0, dq)",
        ),
        "The roles trade slots of V: ds_full of the last step says that both have read theirs.": (
            "math: v.buffer[role] -> next (2)",
        ),
    },
    V5: {
        COVERED: (
            "math: drop async_dot_wait(0, dv)",
            "math: async_dot_wait(dv): pendings=1",
            "math: drop async_dot_wait(0, dk_local)",
            "math: async_dot_wait(dk_local): pendings=1",
            "math: drop async_dot_wait(0, dk_peer)",
            "math: async_dot_wait(dk_peer): pendings=1",
            "math: barrier_arrive(q.empty[stage]) before dk_peer = async_dot_wait(0, dk_peer)",
            "math: barrier_arrive(g.empty[stage]) before dk_peer = async_dot_wait(0, dk_peer)",
        ),
        "At the end both are awaited, in whatever order.": ("math: ds.empty[stage] -> next",),
    },
    V7: READ
    | {
        "The next tile's first dO is loaded after its V, which this role gives back later.": (
            "score_role: barrier_arrive(g.empty[count % G_STAGES]) before "
            "dv = async_dot_wait(0, dv)",
        ),
        "ds_full says that the other role has waited for it.": (
            "sum_role: drop barrier_wait(k.full[0], tile & 1)",
            "sum_role: drop barrier_wait(q.full[q_stage], now // Q_STAGES & 1)",
        ),
    },
}
# The same protocol.
SMALL[B3] = SMALL[B1]
SMALL[B4] = (
    (Case("narrow", (260, 130), (256, 260), 1, 1), {}),
    (Case("wide", (300, 5), (256, 260), 1, 1, 128), {}),
)
# b6 is b5 with a constant.
SMALL[B5] = (*SMALL[B4], (Case("short", (300, 5), (130, 0), 1, 1), {"once": True}))
SURVIVORS[V6] = SURVIVORS[V4]

SHARED = (pair_steps, single_cta, tensor_memory, tickets, two_consumers)


def whole(impl: str, folder: Path) -> Path:
    """The file of a rung in `folder`, with what it shares in place of the imports: mistakes in that
    are its own, too."""
    text = BACKWARD[impl].path.read_text()
    for module in SHARED:
        lines = re.compile(rf"^from {module.__name__} import (?:\([^)]*\)|.*)\n", re.MULTILINE)
        if found := lines.search(text):
            rest = lines.sub("", text[found.end() :])
            text = text[: found.start()] + Path(module.__file__).read_text() + rest
    path = folder / BACKWARD[impl].path.name
    path.write_text(text)
    return path


def _launch(
    impl: str, case: Case, config: dict, expected: tuple | None, module, schedule: str | int
) -> tuple:
    """(dq, dk, dv) of a changed rung on one program or cluster: AssertionError if not `expected`.

    relu is cheap, and a dQ is a sum of at most two: every order gives the same bits.
    """
    call, programs = case.call(BF16) | {"activation": "relu"}, 2 if impl in (V5, B2, B4, B5) else 1
    found = scheduled(impl, call, schedule, module, config, multiprocessors=programs)
    if expected is not None:
        assert_same_bits(found, expected)
    return found


@SAMPLED
@pytest.mark.parametrize("impl", SMALL)
def test_every_harmful_mistake_in_synchronisation_is_found(impl, every, tmp_path):
    path = whole(impl, tmp_path)
    module = import_file(path)
    launched = [
        partial(_launch, impl, *small, _launch(impl, *small, None, module, "modelled"))
        for small in SMALL[impl]
    ]
    judged = surviving(module, "backward_kernel", launched, every)
    known = [what for reason in SURVIVORS.get(impl, {}).values() for what in reason]
    assert judged.executed == len(enumerate_mutants(path, "backward_kernel")) > 100
    assert judged.survivors == judged.known(known)


@pytest.mark.sweep
@pytest.mark.parametrize("impl", (B4, B5))
def test_every_mistake_of_a_pair_is_found(impl, tmp_path):
    """A commit, an arrival or bytes in the wrong CTA, the other one's half."""
    mutants = mutants_of_a_pair(whole(impl, tmp_path))
    masked = Case("masked", (300, 5), (256, 260), 1, 1, options={"causal": True})
    launched = [
        partial(_launch, impl, *small, _launch(impl, *small, None, None, "modelled"))
        for small in (*SMALL[impl], (masked, {}))
    ]
    assert len(mutants) > 15
    assert [m.what for m in mutants if not judge(m, import_file, launched).error] == []


def without(path: Path, line: str) -> Mutant:
    """The file without a line; line: its text, and of the next ones what tells it from others."""
    text = path.read_text()
    begin = text.index(line)
    end = begin + len(line.partition("\n")[0])
    edit = (len(text[:begin].encode()), len(text[:end].encode()), "pass")
    number = text.count("\n", 0, begin) + 1
    return Mutant(path, "drop", (number, number), line, (edit,))


def test_v5_needs_its_fence_and_its_last_wait():
    """Before dS goes to the other program, and while that one still arrives."""
    path, (small,) = BACKWARD[V5].path, SMALL[V5]
    launched = [partial(_launch, V5, *small, None)]
    lines = (
        'tlx.fence("async_shared")\n    tlx.async_remote_shmem_copy',
        "tlx.barrier_wait(ds.empty[stage], (count & 1) ^ 1)",
    )
    found = [judge(without(path, line), import_file, launched).error for line in lines]
    assert found == ["MissingFence", "EarlyExit"]


@pytest.mark.parametrize("impl", swept((V4, V6, V7), (V4,)))
def test_every_line_of_tickets_is_needed(impl, tmp_path):
    """But for one wait, which others imply."""
    path, small = whole(impl, tmp_path), SMALL[impl][-1]
    expected = _launch(impl, *small, None, import_file(path), "modelled")
    launched = [partial(_launch, impl, *small, expected)]
    mutants = [
        mutant
        for mutant in enumerate_mutants(path, "backward_kernel")
        if mutant.what.startswith(("tickets_of: ", "take: ", "follow: "))
    ]
    assert len(mutants) == 17
    store = "tlx.local_store(tickets.ring.buffer[stage], tl.full([1], 0, tl.int32) + following)"
    mutants.append(without(path, store))
    found = [each.what for each in mutants if not judge(each, import_file, launched).error]
    assert found == [what for harmless in READ.values() for what in harmless]
