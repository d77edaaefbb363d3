"""Histories in pages, found again or not at all; candidates over them are those of one call."""

import copy
import itertools
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch

import tritonemu
from gdpa_kernels import Lengths, gdpa
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.serving import PagedCache, Pages, score
from gdpa_kernels.serving import cache as caches
from gdpa_kernels.serving.validity import HistoryRules
from gdpa_lab.measuring.compile_check import build_launch, read
from tests.calls import assert_same_bits, full_of_nan
from tests.models import rules_of
from tests.serving.test_validity import ALONE, COMBINED, LAYERS, ROWS, WIDTH, inputs
from tests.stateful.machine import Interruption, interrupted

HEADS, DIM, PAGE = 2, 16, 4
FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16


def ends(*lengths: int) -> torch.Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).int()


def draw(n: int, seed: int, dtype: torch.dtype = FP64) -> torch.Tensor:
    make = torch.Generator().manual_seed(seed)
    return torch.randn(n, HEADS, DIM, generator=make).to(dtype)


def cache(num_pages: int = 6, dtype: torch.dtype = FP64, **rules) -> PagedCache:
    return PagedCache(rules_of(**rules), num_pages, PAGE, HEADS, DIM, dtype=dtype)


def filled(kept: PagedCache, users: list, counts: list[int], seed: int = 0, epochs=None):
    """The keys and values that were appended, of the last layer."""
    table = kept.append(users, counts, epochs)
    for layer in range(kept.rules.num_layers):
        k, v = (draw(sum(counts), 10 * seed + 2 * layer + i, kept.data.dtype) for i in range(2))
        kept.write(layer, table, k, v)
    return k, v


def test_what_was_appended_is_read_in_order():
    kept = cache()
    first, second = filled(kept, ["a", "b"], [5, 2]), filled(kept, ["b", "a"], [3, 4], 1)
    table = kept.pages(["b", "nobody", "a"], missing="empty")
    assert table.cu_seqlens.tolist() == [0, 5, 5, 14] and table.max_seqlen == 9
    for x, y, found in zip(first, second, kept.read(1, table), strict=True):
        assert torch.equal(found, torch.cat((x[5:], y[:3], x[:5], y[3:])))


def test_the_pages_are_those_of_the_field():
    """A page of keys and values, found as FlashInfer's documentation describes it."""
    kept = cache()
    k, v = filled(kept, ["a", "b"], [9, 4])
    table = kept.pages(["a", "nobody", "b"], missing="empty")
    assert table.last_page_len.tolist() == [1, 0, 4] and table.kv_indptr.tolist() == [0, 3, 3, 4]
    tokens = []
    for i, last in enumerate(table.last_page_len.tolist()):
        pages = table.kv_indices[table.kv_indptr[i] : table.kv_indptr[i + 1]].tolist()
        full = [kept.data[1, page] for page in pages]
        tokens += [x if x is not full[-1] else x[:, :last] for x in full]
    assert torch.equal(torch.cat(tokens, 1), torch.stack((k, v)))


def test_an_edited_history_is_never_found():
    kept = cache()
    filled(kept, ["a"], [7], epochs=["before"])
    assert [kept.length("a", x) for x in ("before", "after")] == [7, 0]
    assert kept.pages(["a"], ["after"], missing="empty").slots.numel() == 0
    with pytest.raises(
        LookupError, match="users must have a history of their epoch .* none of .'a"
    ):
        kept.pages(["a"], ["after"])
    k, _ = filled(kept, ["a"], [3], 1, epochs=["after"])
    assert kept.length("a", "before") == 0
    assert torch.equal(kept.read(1, kept.pages(["a"], ["after"]))[0], k)


@pytest.mark.parametrize("rules, rows", [({}, 5), ({"causal": False}, 0), ({"num_layers": 1}, 5)])
def test_an_edit_keeps_what_the_rules_keep(rules, rows):
    kept = cache(**rules)
    k, _ = filled(kept, ["a"], [9])
    assert kept.edit("a", 5, epoch=1, added=False) == kept.length("a", 1) == rows
    assert torch.equal(kept.read(kept.rules.num_layers - 1, kept.pages(["a"], [1]))[0], k[:rows])
    filled(kept, ["b"], [4 * (6 - -(-rows // PAGE))])  # all pages that this leaves
    assert kept.length("a", 1) == rows
    assert kept.edit("nobody", 0, epoch=1, added=True) == 0


@pytest.mark.parametrize("options", COMBINED + ALONE, ids=str)
def test_an_edit_keeps_no_row_that_changed(options):
    """At every place an event is deleted, and one is added; the rows are computed again."""
    rules = rules_of(LAYERS, **options)
    longer = torch.randn(ROWS + 1, WIDTH, generator=torch.Generator().manual_seed(1), dtype=FP64)
    times = torch.arange(ROWS + 1) * 2
    for at in range(ROWS + 1):
        others = [i for i in range(ROWS + 1) if i != at]
        rows = [inputs(rules, longer, times), inputs(rules, longer[others], times[others])]
        for before, after in (rows, rows[::-1]):
            kept = PagedCache(rules, 4, PAGE, 1, WIDTH, dtype=FP64)
            new = kept.append(["a"], [len(before[0])])
            for layer, x in enumerate(before):
                kept.write(layer, new, x[:, None], x[:, None])
            added = len(after[0]) > len(before[0])
            if at > len(before[0]) - (not added):
                continue
            count = kept.edit("a", at, epoch=1, added=added)
            rest = kept.append(["a"], [len(after[0]) - count], [1])  # refused for no model
            for layer, x in enumerate(after):
                kept.write(layer, rest, x[count:, None], x[count:, None])
                found = kept.read(layer, kept.pages(["a"], [1]))[0][:, 0]
                torch.testing.assert_close(found, x, rtol=0, atol=1e-12)


def test_after_an_edit_other_appends_are_checked_as_before():
    """Of a model whose rows know the last event's time."""
    for counts in ([5], [3, 3], [2], [4, 1]):
        kept = cache(query_time=True)
        filled(kept, ["a"], [7])
        assert kept.edit("a", 2, epoch=1, added=False) == 2
        whole = counts[0] == 4
        if whole:
            filled(kept, ["a"], [4], epochs=[1])
        with pytest.raises(ValueError, match="the time until the query changes"):
            kept.append(["a"], [counts[whole]], [1])
    kept = cache(causal=False)
    filled(kept, ["a"], [5])
    assert kept.edit("a", 4, epoch=1, added=True) == 0
    with pytest.raises(ValueError, match="with causal=False old rows see the new ones"):
        kept.append(["a"], [2], [1])  # rows that have not seen the other four
    filled(kept, ["a"], [6], epochs=[1])


def test_a_second_edit_before_the_rows_are_there_again():
    kept = cache(query_time=True)
    filled(kept, ["a"], [7])
    kept.edit("a", 5, epoch=1, added=False)
    assert kept.edit("a", 3, epoch=2, was=1, added=True) == 3
    with pytest.raises(ValueError, match="the time until the query changes"):
        kept.append(["a"], [3], [2])
    filled(kept, ["a"], [4], epochs=[2])
    assert kept.length("a", 2) == 7


def test_the_least_recently_used_users_go_first():
    kept = cache()
    for user in "abc":
        filled(kept, [user], [8])
    kept.pages(["a"])
    filled(kept, ["c", "d"], [1, 1])
    assert [kept.length(user) for user in "abcd"] == [8, 0, 9, 1]
    before = kept.data.clone()
    with pytest.raises(MemoryError, match="must fit 6 pages of 4 tokens, got .* need 7"):
        kept.append(["d", "e"], [4, 17])
    assert [kept.length(user) for user in "abcd"] == [8, 0, 9, 1]
    assert torch.equal(kept.data, before)


def test_users_of_one_call_are_used_in_their_order():
    kept = cache()
    for user in "abc":
        filled(kept, [user], [8])
    kept.pages(["c", "a"])
    for new, left in (("d", [8, 0, 8]), ("e", [8, 0, 0]), ("f", [0, 0, 0])):
        filled(kept, [new], [5])
        assert [kept.length(user) for user in "abc"] == left


def test_an_empty_history_has_no_page_to_give():
    kept = cache()
    kept.append(["empty"], [0])
    filled(kept, ["a"], [24])
    filled(kept, ["b"], [1])
    assert [kept.length(user) for user in "ab"] == [0, 1]


def test_tables_of_pages_are_made_on_a_cpu_whatever_the_default_device_is():
    held = cache()
    with torch.device("meta"):
        assert held.append(["a"], [3]).slots.is_cpu and held.pages(["a"]).kv_indptr.is_cpu


@pytest.mark.parametrize("edited", (False, True))
def test_an_append_that_fails_changes_nothing(monkeypatch, edited):
    held = cache()
    filled(held, ["a"], [5])
    if edited:
        held.edit("a", 2, epoch=1, added=False)
    length = held.length("a", int(edited))

    def fails(*_):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(caches, "page_table", fails)
        with pytest.raises(torch.OutOfMemoryError):
            held.append(["a"], [2], [int(edited)])
    assert held.length("a", int(edited)) == length
    whole = held.pages(["a"], [int(edited)])
    assert len(held.read(0, whole)[0]) == length and whole.is_whole != edited
    assert len(whole.kv_indices) == -(-length // held.page_size)


def test_pages_of_an_append_that_failed_are_free_for_others(monkeypatch):
    held = cache()
    pages = held.data.shape[1]
    with monkeypatch.context() as patch:
        patch.setattr(caches, "page_table", None)
        with pytest.raises(TypeError):
            held.append(["a"], [(pages - 1) * held.page_size])
    assert held.pages(["a"]).kv_indptr.tolist() == [0, 0]
    both = held.append(["a", "b"], [1, (pages - 1) * held.page_size])
    assert sorted(both.kv_indices.tolist()) == [*range(pages)]


def test_an_append_that_is_interrupted_after_one_that_failed_loses_no_page():
    """It frees the pages that the other one had taken, at any line all of them or none."""
    for line in itertools.count(1):
        held = cache()
        with mock.patch.object(caches, "page_table", None), pytest.raises(TypeError):
            held.append(["a"], [9])
        try:
            with interrupted(line):
                held.append(["a"], [1])
        except Interruption:
            pass
        pages = [page for entry in held._entries.values() for page in entry.page_ids]
        assert sorted(pages + held._free) == [*range(6)], line
        if held.length("a"):
            break
    assert line > 50


def test_rules_that_appends_would_break_are_refused():
    kept = cache(positions="from_end", query_time=True)
    filled(kept, ["a"], [3])
    filled(kept, ["a"], [0])
    with pytest.raises(ValueError, match="positions from_end change .*; the time until the query"):
        kept.append(["b", "a"], [1, 1])
    assert kept.length("b") == 0


def test_former_names_of_arguments_are_taken_until_0_3():
    filled(kept := cache(), ["a"], [3])
    pages = kept.pages(["a"])
    for former, now in zip(kept.read(0, at=pages), kept.read(0, pages=pages), strict=True):
        assert torch.equal(former, now)
    assert kept.edit("a", at=2, epoch=1, added=True) == 2
    with pytest.raises(TypeError, match="'at'"):
        kept.read(0, at=pages, pages=pages)


def edited(kept: PagedCache) -> None:
    kept.edit("a", 2, epoch=1, added=True)


def grown(kept: PagedCache) -> None:
    filled(kept, ["b"], [24])


@pytest.mark.parametrize("change", (edited, grown, lambda kept: kept.append(["a"], [1], [2])))
def test_pages_that_others_may_have_are_refused(change):
    kept = cache()
    filled(kept, ["a"], [3])
    table = kept.pages(["a"])
    filled(kept, ["a"], [2])
    assert kept.read(0, table)[0].shape[0] == 3, "an append leaves them where they were"
    change(kept)
    told = "pages must be pages that their users still have, got those of 'a' before"
    with pytest.raises(ValueError, match=told):
        kept.read(0, table)
    with pytest.raises(ValueError, match=told):
        kept.write(0, table, draw(3, 0), draw(3, 0))


def nobody(kept: PagedCache) -> Pages:
    """An empty history."""
    return kept.pages(["a"], missing="empty")


WRONG = (
    (TypeError, "rules must be HistoryRules, got int", lambda: PagedCache(2, 1, 1, 1, 1)),
    (ValueError, "page_size must be an integer of at least 1, got 0",
     lambda: PagedCache(HistoryRules(1), 1, 0, 1, 1)),
    *((TypeError, r"users? must be a number .*use tolist., got tensor.7.", call) for call in (
        lambda: cache().append(torch.tensor([7]), [1]), lambda: cache().pages(torch.tensor([7])),
        lambda: cache().edit(torch.tensor(7), 0, 1, added=True),
        lambda: cache().evict(torch.tensor(7)),
    )),
    (ValueError, "users must be distinct", lambda: cache().append(["a", "a"], [1, 1])),
    (ValueError, "counts must have one entry a user, 1, got 0", lambda: cache().append(["a"], [])),
    (TypeError, "users must be .* one entry a user, got {'a'}", lambda: cache().append({"a"}, [1])),
    (TypeError, "counts must be .*, got {'a': 1}", lambda: cache().append(["a"], {"a": 1})),
    (ValueError, "epochs must have one entry a user, 1, got 0", lambda: cache().pages(["a"], [])),
    (ValueError, r"k must be \[3, 2, 16\] in torch.float64 on cpu, got \[2, 2, 16\]",
     lambda: (c := cache()).write(0, c.append(["a"], [3]), draw(2, 0), draw(3, 0))),
    (TypeError, "v must be a tensor, got NoneType",
     lambda: (c := cache()).write(0, c.append(["a"], [3]), draw(3, 0), None)),
    (ValueError, "v must be .* in torch.float64 on cpu, got .* in torch.float64 on meta",
     lambda: (c := cache()).write(0, c.append(["a"], [3]), draw(3, 0), draw(3, 0).to("meta"))),
    (ValueError, "layer must be below num_layers, 2, got 2",
     lambda: (c := cache()).read(2, nobody(c))),
    (ValueError, "layer must be an integer of at least 0, got -1",
     lambda: (c := cache()).write(-1, c.append(["a"], [1]), draw(1, 0), draw(1, 0))),
    (ValueError, "epoch must differ from that before the edit, got 0",
     lambda: cache().edit("a", 0, epoch=0, added=True)),
    (ValueError, "position must be at most 2 in a history of 3 events where one is deleted, got 3",
     lambda: (filled(c := cache(), ["a"], [3]), c.edit("a", 3, 1, added=False))),
    (ValueError, "position must be at most 3 in a history of 3 events where one is added, got 4",
     lambda: (filled(c := cache(), ["a"], [3]), c.edit("a", 4, 1, added=True))),
    (TypeError, "added must be a bool", lambda: cache().edit("a", 0, 1, added=1)),
    (TypeError, "options must be of activation, .*, got causal",
     lambda: score(*[draw(1, 0)] * 3, ends(1), 1, c := cache(), 0, nobody(c), causal=True)),
    (TypeError, "in_one_call must be a bool, got 1",
     lambda: score(*[draw(1, 0)] * 3, ends(1), 1, c := cache(), 0, nobody(c), in_one_call=1)),
    (ValueError, "k must have q's 1 rows, got 2", lambda: score(
        draw(1, 0), *[draw(2, 0)] * 2, ends(1), 1, c := cache(), 0, nobody(c))),
    (ValueError, r"k must have the cache's \[2, 16\] heads and head_dim, got \[1, 16\]",
     lambda: score(draw(1, 0), *[draw(1, 0)[:, :1]] * 2, ends(1), 1, c := cache(), 0, nobody(c))),
    (ValueError, "cu_seqlens must run from 0 to the 1 rows .*, got 0 to 2", lambda: score(
        *[draw(1, 0)] * 3, ends(2), 2, c := cache(), 0, nobody(c))),
    (ValueError, "max_seqlen must be at least 1, got 0", lambda: score(
        *[draw(1, 0)] * 3, Lengths(ends(1)), 0, c := cache(), 0, nobody(c))),
    (ValueError, r"cu_seqlens must have shape .2., as the histories, got .3.",
     lambda: (c := cache()).read_before(0, nobody(c), *[draw(2, 0)] * 2, ends(1, 1), 1)),
    (ValueError, r"v must be \[1, 2, 16\] in torch.float64 on cpu, got \[1, .* in torch.bfloat16",
     lambda: (c := cache()).read_before(0, nobody(c), draw(1, 0), draw(1, 0, BF16), ends(1), 1)),
)  # fmt: skip


@pytest.mark.parametrize("error, told, call", WRONG)
def test_wrong_arguments(error, told, call):
    with pytest.raises(error, match=told):
        call()


USERS, LENGTHS, SHOWN = ["a", "new", "b", "c"], (9, 0, 4, 2), (3, 2, 0, 5)


def candidates(group: int, impl: str, dtype: torch.dtype, **options) -> tuple:
    """The scores of candidates over histories, and their rows of one call in fp64."""
    kept = cache(num_pages=8, dtype=dtype)
    history = filled(kept, USERS, [*LENGTHS])
    q, packed = draw(sum(SHOWN), 50, dtype), torch.stack(
        [draw(sum(SHOWN), seed, dtype) for seed in (51, 52)], 2
    )  # fmt: skip
    k, v = packed.unbind(2)
    own = {"activation": "silu", "output_scale": 0.25}
    with tritonemu.enabled():
        found = score(
            q, k, v, ends(*SHOWN), 5, kept, 1, kept.pages(USERS), target_group_size=group,
            impl=impl, **own, **options,
        )  # fmt: skip
    old = [x.split(LENGTHS) for x in (torch.zeros_like(history[0]), *history)]
    new = [x.split(SHOWN) for x in (q, k, v)]
    whole = [
        torch.cat([x for pair in zip(a, b, strict=True) for x in pair]).double()
        for a, b in zip(old, new, strict=True)
    ]
    both = ends(*(n + m for n, m in zip(LENGTHS, SHOWN, strict=True)))
    wanted = gdpa(
        *whole, both, both, 12, 12, causal=True, num_targets=torch.tensor(SHOWN).int(),
        target_group_size=group, impl="reference", **own,
    )  # fmt: skip
    rows = [row for i, m in enumerate(SHOWN) for row in range(both[i + 1] - m, both[i + 1])]
    return found, wanted[rows]


@pytest.mark.parametrize("in_one_call", (False, True, None))
@pytest.mark.parametrize("group", (1, 2))
@pytest.mark.parametrize(
    "impl, dtype",
    (("reference", FP64), ("v1_tiled", BF16), ("v8_own_waits", BF16), ("auto", FP32)),
)
def test_scores_are_those_of_one_call_with_targets(impl, dtype, group, in_one_call):
    """[history; candidates] in one call, of which the candidates' rows are compared."""
    found, wanted = candidates(group, impl, dtype, in_one_call=in_one_call)
    error = (found.double() - wanted).norm() / wanted.norm()
    assert found.dtype == dtype and error < {FP64: 1e-12, FP32: 1e-6, BF16: 5e-3}[dtype]


def test_a_sum_in_fp32_of_one_call():
    options = {"in_one_call": True, "precise": True}
    found, wanted = candidates(1, "auto", BF16, out_dtype=FP32, **options)
    assert found.dtype == FP32 and (found.double() - wanted).norm() < 2e-3 * wanted.norm()
    assert torch.equal(found.bfloat16(), candidates(1, "auto", BF16, **options)[0])


def of_sizes(users: int, heads: int, head_dim: int, history: int, shown: int) -> tuple:
    """q, k, v and the other arguments of `score`: as many events, and as many candidates, each."""
    kept = PagedCache(HistoryRules(1), users * -(-history // 64), 64, heads, head_dim)
    none = torch.zeros(users * history, heads, head_dim, dtype=BF16)
    kept.write(0, kept.append([*range(users)], [history] * users), none, none)
    x = torch.zeros(users * shown, heads, head_dim, dtype=BF16)
    both = torch.arange(users + 1, dtype=torch.int32) * shown
    return x, x, x, both, shown, kept, 0, kept.pages([*range(users)])


@pytest.mark.parametrize(
    "sizes, multiprocessors, one",
    [
        ((10, 4, 128, 640, 2048), 132, True), ((2, 4, 128, 4096, 100), 132, False),
        ((2, 4, 128, 4096, 100), 10, True), ((1, 4, 128, 300, 100), 132, True),
        ((1, 2, 256, 4096, 100), 132, True),
    ],
)  # fmt: skip
def test_many_candidates_are_one_call(sizes, multiprocessors, one):
    """Where no keys are split: tiles for all multiprocessors, few keys, or wide heads."""
    given, names = of_sizes(*sizes), [set(), set()]
    for calls, options in zip(names, ({}, {"target_group_size": 3}), strict=True):
        with tritonemu.enabled(multiprocessors=multiprocessors), launches(run=False) as seen:
            score(*given, validate=False, activation="silu", **options)
        calls |= {launch.name for launch in seen}
    for calls in names:
        assert "own_waits_kernel" in calls and "join_kernel" not in calls
    assert one != ("diagonal_kernel" in names[0]) and one == (len(names[1]) == 2)


@contextmanager
def unread():
    """Refuses what would wait for a device: reading a value."""

    def read(*_):
        raise AssertionError("a value was read")

    with ExitStack() as stack:
        for name in ("tolist", "item", "__bool__", "__int__", "__index__", "nonzero", "cpu"):
            stack.enter_context(mock.patch.object(torch.Tensor, name, read))
        yield


@pytest.mark.parametrize("kind", (Lengths, lambda x: x))
@pytest.mark.parametrize("options", ({}, {"in_one_call": False}, {"target_group_size": 2}), ids=str)
def test_nothing_waits_for_the_device(kind, options):
    q, k, v, both, *given = of_sizes(10, 4, 128, 256, 256)
    shared = kind(both)
    validate = {"validate": isinstance(shared, Lengths)}
    with tritonemu.enabled(), launches(run=False) as seen, unread():
        score(q, k, v, shared, *given, **validate, **options)
    assert "own_waits_kernel" in {launch.name for launch in seen}
    checked = pytest.raises(AssertionError, match="a value was read")
    with tritonemu.enabled(), launches(run=False), unread(), checked:
        score(q, k, v, both, *given, **options)


@pytest.mark.parametrize("dim, dtype", ((16, BF16), (100, FP32), (256, torch.float16)))
@pytest.mark.parametrize("rows", ((70, 0, 1), (0, 0, 0)))
def test_the_kernel_joins_what_pytorch_joins(dim, dtype, rows):
    """Of pages that lie apart, and of strided candidates; memory around is not written."""
    kept = PagedCache(HistoryRules(2), 40, 3, 2, dim, dtype=dtype)
    for counts in ([5, 0, 31], [8, 0, 2], [20, 0, 7]):
        table = kept.append(USERS[:3], counts)
        shape = sum(counts), 2, dim
        kept.write(1, table, torch.randn(shape).to(dtype), torch.randn(shape).to(dtype))
    k, v = torch.randn(sum(rows), 2, 2, dim + 3).to(dtype)[..., 3:].unbind(1)
    for each in (kept.pages(USERS[:3]), table):  # of the whole histories, and of the last tokens
        given = 1, each, k, v, ends(*rows), max(rows)
        wanted = kept.read_before(*given)
        with tritonemu.enabled(), launches() as seen, full_of_nan():
            found = kept.read_before(*given)
        assert [launch.name for launch in seen] == ["join_kernel"]
        assert_same_bits(found, wanted)


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("capability", (80, 90, 100))
def test_the_kernel_moves_16_bytes_at_once(capability, head_dim):
    """Keys and values of pages and candidates; what says where they lie is read in words."""
    _, k, v, both, shown, kept, layer, table = of_sizes(2, 4, head_dim, 100, 30)
    with tritonemu.enabled(), launches(run=False) as seen:
        kept.read_before(layer, table, k, v, both, shown)
    code = read(build_launch(seen[-1], capability=capability))
    assert code.spill_bytes == 0 and code.wide["LDG"] and code.wide["STG"]
    assert code.wide["STG"] == code.instructions["STG"]
    assert 2 * code.wide["STG"] == code.wide["LDG"]


@pytest.mark.parametrize("in_one_call", (True, False))
def test_autocast_is_that_of_gdpa(in_one_call):
    kept = cache(dtype=BF16)
    filled(kept, ["a"], [7])
    x = draw(5, 1, FP32)
    some = ends(5), 5, kept, 0, kept.pages(["a"])
    with torch.autocast("cpu", BF16):
        found = score(x, x, x, *some, in_one_call=in_one_call)
    x = x.to(BF16)
    assert torch.equal(found, score(x, x, x, *some, in_one_call=in_one_call))


def test_queries_may_have_more_heads():
    kept = cache(num_pages=8, dtype=BF16)
    filled(kept, USERS, [*LENGTHS])
    q = torch.cat([draw(sum(SHOWN), seed, BF16) for seed in (50, 51)], 1)
    k, v = draw(sum(SHOWN), 52, BF16), draw(sum(SHOWN), 53, BF16)
    given = q, k, v, ends(*SHOWN), 5, kept, 1, kept.pages(USERS)
    with tritonemu.enabled():
        one, two = (score(*given, in_one_call=x, precise=True) for x in (True, False))
    plain = score(*(x.double() for x in (q, k, v)), *given[3:5], doubled(kept), *given[6:])
    for found in (one, two):
        assert (found - plain).norm() < 4e-3 * plain.norm()


def doubled(kept: PagedCache) -> PagedCache:
    """The same cache in fp64, for the definition."""
    wide = copy.copy(kept)
    wide.data = kept.data.double()
    return wide
