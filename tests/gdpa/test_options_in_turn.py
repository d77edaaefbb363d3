"""Every option behind every other one on the same `Lengths`: a call gets the list that it would
make itself.

What a call leaves behind is its list of work alone. Calls that share one were told that they need
the same, whichever came first: so each group of them must make the same list on fresh lengths, with
what no kernel writes filled with the largest integer.
"""

import pytest
import torch

from gdpa_kernels.calling.launches import launches
from tests.stateful.batches import (
    LIST_KERNELS,
    OPTIONS,
    PRODUCTS,
    SIZES,
    Call,
    Lists,
    chosen_by,
    emulated,
    new_lengths,
)
from tests.stateful.machine import difference, poisoned

IMPLS = [rung.impl for rung in PRODUCTS if rung.takes(rung.directions[0], "work_list")]
IN_EACH_RUN = {"v8_own_waits", "v4_warp_specialized_backward"}
SHAPES = [(q, k, head_dim) for q, k in ((3, 3), (0, 4)) for head_dim in (64, 128, 256)]
TINY = [(0, 0, head_dim) for head_dim in (64, 128, 256)]
Key = tuple[str, tuple[int, int, int]]


def call_of(impl: str, options: str, shape: tuple[int, int, int]) -> Call:
    q, k, head_dim = shape
    call = Call(q, k, options, (2, 2), head_dim, False, torch.bfloat16)
    call.gradients = len(chosen_by(impl)) > 1
    return call


def fresh_pair(q: int, k: int) -> tuple:
    one = new_lengths(SIZES[q])
    return one, one if q == k else new_lengths(SIZES[k])


def groups(impl: str, shapes: list) -> list[list[Key]]:
    """Calls that share a list, of those that an implementation takes; no kernel runs."""
    pairs = {(q, k): fresh_pair(q, k) for q, k, _ in shapes}
    sharing: dict[int, list[Key]] = {}
    lists = []
    with emulated(impl), launches(run=False) as seen:
        for options in OPTIONS:
            for shape in shapes:
                seen.clear()
                try:
                    call_of(impl, options, shape)(*pairs[shape[:2]], **chosen_by(impl))
                except (
                    NotImplementedError,
                    ValueError,
                ):  # of this implementation, or these lengths
                    continue
                for launch in seen:
                    read = [launch.arguments.get(name) for name in ("list_ptr", "order_ptr")]
                    for entries in read if launch.name not in LIST_KERNELS else ():
                        if isinstance(entries, torch.Tensor):
                            lists.append(entries)
                            sharing.setdefault(entries.data_ptr(), []).append((options, shape))
    return [group for group in sharing.values() if len(group) > 1]


def lists_of(impl: str, options: str, shape: tuple[int, int, int]) -> list:
    with Lists().alone() as seen:
        call_of(impl, options, shape)(*fresh_pair(*shape[:2]), **chosen_by(impl))
    return [integers for _, integers in seen.launched]


@pytest.mark.parametrize("impl", IMPLS)
def test_calls_share_a_list_that_each_would_make(impl):
    for group in groups(impl, SHAPES):
        with emulated(impl), poisoned():
            first, *others = ((key, lists_of(impl, *key)) for key in group)
        for key, lists in others:
            assert not difference(lists, first[1]), (first[0], key)


def at_night(impl: str):
    return impl if impl in IN_EACH_RUN else pytest.param(impl, marks=pytest.mark.nightly)


def check_in_turn(impl: str, group: list[Key], firsts: list[Key]) -> None:
    """All calls of a group behind each of `firsts`, whose list they then share."""
    with emulated(impl), poisoned():

        def result(key: Key, pair: tuple) -> tuple[torch.Tensor, ...]:
            return call_of(impl, *key)(*pair, **chosen_by(impl))

        sizes = group[0][1][:2]
        expected = {key: result(key, fresh_pair(*sizes)) for key in group}
        for first in firsts:
            pair = fresh_pair(*sizes)
            for key in (first, *(key for key in group if key != first)):
                assert not difference(result(key, pair), expected[key]), (first, key)


@pytest.mark.parametrize("impl", [*map(at_night, IMPLS)])
def test_results_in_turn(impl):
    """Of one of the calls that share a list behind another one."""
    for group in groups(impl, TINY):
        check_in_turn(impl, [group[0], group[-1]], group[:1])


@pytest.mark.nightly
@pytest.mark.parametrize("impl", IMPLS)
def test_all_results_in_turn(impl):
    """Of each call behind each other one that shares its list."""
    for group in groups(impl, TINY):
        check_in_turn(impl, group, group)


def test_without_and_with_targets():
    """These shared a list, in which no kernel had written the numbers of sequences."""
    for impl, head_dim in (("v8_own_waits", 256), ("v4_warp_specialized_backward", 128)):
        group = [(name, (0, 0, head_dim)) for name in ("causal", "targets", "contexts", "groups")]
        check_in_turn(impl, group, group[:1])
