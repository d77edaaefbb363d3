"""Sequences of calls on one cache: each answer is that of fresh objects, or refused by name."""

import copy
import pickle
import random
import sys
import threading
import weakref
from unittest import mock

import numpy as np
import pytest
import torch

from gdpa_kernels import GDPASelfAttention
from gdpa_kernels.calling.rung import Rung
from gdpa_kernels.serving import HistoryRules, PagedCache, score, scores
from gdpa_kernels.serving.exclusive import Exclusive
from gdpa_kernels.serving.layers import candidates, extend
from tests.models import rules_of

FP64 = torch.float64
HEADS, DIM, PAGE = 2, 4, 4
WIDTH = HEADS * DIM


def cache(pages: int = 8, **rules) -> PagedCache:
    kept = PagedCache(rules_of(**{"num_layers": 1} | rules), pages, PAGE, HEADS, DIM, dtype=FP64)
    kept.data.fill_(torch.nan)
    return kept


def rows(n: int, value: float | None = None) -> torch.Tensor:
    return torch.randn(n, HEADS, DIM, dtype=FP64) if value is None else torch.full(
        (n, HEADS, DIM), value, dtype=FP64
    )  # fmt: skip


def fill(kept: PagedCache, user, count: int, epoch=0, value: float | None = None) -> torch.Tensor:
    """Keys, which are the values, of every layer."""
    table, x = kept.append([user], [count], [epoch]), rows(count, value)
    for layer in range(kept.rules.num_layers):
        kept.write(layer, table, x, x)
    return x


def ends(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def layer() -> GDPASelfAttention:
    torch.manual_seed(0)
    return GDPASelfAttention(WIDTH, HEADS, causal=True, dtype=FP64)


@pytest.fixture
def events() -> torch.Tensor:
    return torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(1), dtype=FP64)


def whole(layer: GDPASelfAttention, events: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return layer((events, ends(0, len(events))))[0]


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def test_pages_of_two_appends_serve_the_last_alone(layer, events):
    """Two requests of one user: the first one's rows are not the last of these pages."""
    kept = cache()
    first, second = kept.append(["u"], [6]), kept.append(["u"], [4])
    table = kept.pages(["u"])
    with pytest.raises(
        ValueError, match=r"up to their new rows, \[\('u', 0, 6\)\], from the start"
    ):
        extend(layer, events[:6], kept, 0, first, table)
    told = (
        "pages must follow rows that are written, got rows 6 up to 10 of 'u', of whom layer 0 has 0"
    )
    with pytest.raises(ValueError, match=told):
        extend(layer, events[6:], kept, 0, second, table)


def test_requests_of_one_user_may_overlap(layer, events):
    kept = cache()
    asked = [(kept.append(["u"], [count]), kept.pages(["u"])) for count in (6, 4)]
    found = [
        extend(layer, x, kept, 0, *table)
        for x, table in zip(events.split([6, 4]), asked, strict=True)
    ]  # fmt: skip
    close(torch.cat(found), whole(layer, events))


def test_what_an_edit_left_is_no_history(layer, events):
    kept = cache()
    extend(layer, events, kept, 0, kept.append(["u"], [10]), kept.pages(["u"]))
    count = kept.edit("u", 3, epoch=1, added=False)
    x, table = rows(2), kept.pages(["u"], [1])
    assert count == 3 and not table.is_whole and len(kept.read(0, table)[0]) == 3
    told = "must be PagedCache.pages of whole histories, got rows 0 up to 3 of 'u', who has 9"
    with pytest.raises(ValueError, match=f"history {told}"):
        score(x, x, x, ends(0, 2), 2, kept, 0, table)
    with pytest.raises(ValueError, match=f"whole {told}"):
        candidates(layer, events[:2], ends(0, 2), 2, kept, 0, table)
    left, found = torch.cat((events[:3], events[4:])), []
    for x in left[count:].split([2, 4]):  # in two steps, of which the first is not whole either
        new = kept.append(["u"], [len(x)], [1])
        found.append(extend(layer, x, kept, 0, new, kept.pages(["u"], [1])))
    close(torch.cat(found), whole(layer, left)[count:])
    assert kept.pages(["u"], [1]).is_whole


def test_an_edit_of_no_rows_leaves_what_is_expected():
    """Of a model of which an edit keeps nothing, twice in a row."""
    kept = cache(num_layers=2, causal=False)
    fill(kept, "u", 5)
    for epoch in (1, 2):
        assert kept.edit("u", 4, epoch, was=epoch - 1, added=True) == 0
    with pytest.raises(ValueError, match="with causal=False old rows see the new ones"):
        kept.append(["u"], [2], [2])
    fill(kept, "u", 7, epoch=2)
    assert kept.pages(["u"], [2]).is_whole


def test_an_edit_keeps_no_row_that_was_not_written():
    kept = cache(num_layers=2)
    x = fill(kept, "u", 3)
    table = kept.append(["u"], [4])
    kept.write(0, table, rows(4), rows(4))  # and not the second layer
    assert kept.edit("u", 6, epoch=1, added=True) == 3
    assert torch.equal(kept.read(1, kept.pages(["u"], [1]))[0], x)


def test_rows_that_were_never_written_are_refused(layer, events):
    """Their pages hold another user's former rows."""
    kept = cache(pages=2, num_layers=2)
    fill(kept, "secret", 8, value=7.0)
    kept.evict("secret")
    kept.write(0, kept.append(["u"], [4]), rows(4), rows(4))
    table, x = kept.pages(["u"]), rows(1)
    kept.read(0, table)
    told = "pages must be rows that are written, got rows 0 up to 4 of 'u', of whom layer 1 has 0"
    for call in (
        lambda: kept.read(1, table),
        lambda: kept.read_before(1, table, x, x, ends(0, 1), 1),
        lambda: kept.paged_kv(1, table, x, x, ends(0, 1)),
        lambda: score(x, x, x, ends(0, 1), 1, kept, 1, table),
        lambda: candidates(layer, events[:1], ends(0, 1), 1, kept, 1, table),
    ):
        with pytest.raises(ValueError, match=told):
            call()


def test_an_extension_that_is_refused_has_written_nothing(layer, events):
    """Of two users, of one of whom there is nothing new, and rows that were never written."""
    kept = cache()
    kept.append(["u"], [4])
    new, table = kept.append(["u", "w"], [0, 1]), kept.pages(["u", "w"])
    told = "got rows 4 up to 4 of 'u', of whom layer 0 has 0: write the others first, or evict"
    with pytest.raises(ValueError, match=told):
        extend(layer, events[:1], kept, 0, new, table)
    with pytest.raises(ValueError, match="got rows 0 up to 1 of 'w', of whom layer 0 has 0"):
        kept.read(0, kept.pages(["w"]))


def test_a_write_that_fails_has_written_nothing():
    kept = cache()
    x = fill(kept, "u", 3)
    table, copies = kept.append(["u"], [2]), iter((torch.Tensor.index_copy_, None))
    new = rows(2)

    def copied(*args):
        return next(copies)(*args)

    with mock.patch.object(torch.Tensor, "index_copy_", copied), pytest.raises(TypeError):
        kept.write(0, table, new, new)
    with pytest.raises(ValueError, match="got rows 0 up to 5 of 'u', of whom layer 0 has 3: write"):
        kept.read(0, kept.pages(["u"]))
    kept.write(0, table, new, new)
    for y in kept.read(0, kept.pages(["u"])):
        assert torch.equal(y, torch.cat((x, new)))


def test_an_evicted_user_is_named():
    kept = cache(pages=2)
    fill(kept, "u", 5)
    fill(kept, "w", 8)
    with pytest.raises(LookupError, match=r"or missing be 'empty', got none of \['u'\]"):
        kept.pages(["w", "u"])
    assert kept.pages(["w", "u"], missing="empty").cu_seqlens.tolist() == [0, 8, 8]
    with pytest.raises(TypeError, match="missing must be one of raise, empty, got None"):
        kept.pages(["w"], missing=None)
    kept.append(["new"], [0])  # known to have none
    assert len(kept.pages(["new"]).slots) == 0


def test_an_append_begins_where_its_caller_knows():
    kept = cache()
    fill(kept, "u", 5)
    assert kept.append(["u"], [2], begins=[5]).positions.tolist() == [5, 6]
    kept.evict("u")
    with pytest.raises(ValueError, match="begins must be where the histories end, 0 of 'u', got 7"):
        kept.append(["w", "u"], [1, 1], begins=[0, 7])
    assert kept.length("w") == 0
    assert kept.append(["u"], [2]).positions.tolist() == [0, 1], "begun anew, for who gives none"


def test_a_write_joins_no_graph():
    kept = cache()
    table, x = kept.append(["u"], [4]), rows(4).requires_grad_()
    k = x * 2
    graph = weakref.ref(k)
    kept.write(0, table, k, k)
    assert not kept.data.requires_grad and kept.data.grad_fn is None
    del k
    assert graph() is None


def test_what_was_made_in_inference_mode_serves_gradients():
    with torch.inference_mode():
        kept = PagedCache(HistoryRules(1), 8, PAGE, HEADS, DIM, dtype=FP64)
        x = fill(kept, "u", 3)
        table = kept.pages(["u"])
        new = kept.append(["u"], [1])
    q = rows(2).requires_grad_()
    (found,) = torch.autograd.grad(score(q, q, q, ends(0, 2), 2, kept, 0, table).sum(), q)
    fresh = cache()
    y = fresh.append(["u"], [3])
    fresh.write(0, y, x, x)
    out = score(q, q, q, ends(0, 2), 2, fresh, 0, fresh.pages(["u"]))
    assert torch.equal(found, torch.autograd.grad(out.sum(), q)[0])
    kept.write(0, new, rows(1), rows(1))


def test_a_compiled_call_sees_what_changed():
    kept, q = cache(), rows(1)
    fill(kept, "u", 3)
    table = kept.pages(["u"])
    call = torch.compile(
        lambda q: score(q, q, q, ends(0, 1), 1, kept, 0, table, validate=False),
        backend="eager",
    )  # fmt: skip
    assert torch.equal(call(q), score(q, q, q, ends(0, 1), 1, kept, 0, table))
    kept.evict("u")
    fill(kept, "w", 3)
    with pytest.raises(ValueError, match="pages must be pages that their users still have"):
        call(q)


def test_integers_of_numpy_are_integers():
    kept = PagedCache(
        rules_of(np.int64(1), window=np.int32(3)), np.int64(8), np.int16(PAGE), HEADS, DIM
    )
    table = kept.append(np.array([1, 2]), np.array([3, 1]))
    x = torch.zeros(4, HEADS, DIM, dtype=torch.bfloat16)
    kept.write(np.int64(0), table, x, x)
    assert kept.length(1) == 3 and kept.edit(np.int64(1), np.int64(2), 1, added=False) == 2
    out = score(x[:1], x[:1], x[:1], ends(0, 1), np.int64(1), kept, np.int64(0), kept.pages([2]),
                target_group_size=np.int64(1))  # fmt: skip
    assert out.shape == (1, HEADS, DIM)


@pytest.mark.parametrize(
    "told, call",
    [
        ("users must be a sequence, .* got the string 'e'", lambda x: x.append("e", [1])),
        ("users must be a sequence, .* got 3", lambda x: x.pages(3)),
        (r"each of users must be hashable, got \['e'\]", lambda x: x.append([["e"]], [1])),
        ("epochs must be a sequence, .* the string 'e'", lambda x: x.append(["e"], [1], "e")),
        ("each of epochs must be a number or a name, not a tensor",
         lambda x: x.pages(["e"], [torch.tensor(1)])),
        ("^user must be hashable", lambda x: x.length(["e"])),
        ("^epoch must be a number or a name, not", lambda x: x.length("e", torch.tensor(1))),
        ("^user must be hashable", lambda x: x.edit(["u"], 0, 1, added=True)),
        ("^epoch must be hashable", lambda x: x.edit("u", 0, [1], added=True)),
        ("^was must be hashable", lambda x: x.edit("u", 0, 1, [0], added=True)),
        ("^user must be hashable", lambda x: x.evict(["u"])),
        ("counts must be an integer of at least 0, got '1'", lambda x: x.append(["e"], ["1"])),
        ("counts must be an integer of at least 0, got True", lambda x: x.append(["e"], [True])),
        ("counts must be an integer of at least 0, got 1.0", lambda x: x.append(["e"], [1.0])),
        ("counts must be a sequence, .* got 1", lambda x: x.append(["e"], 1)),
        ("begins must be an integer .* '0'", lambda x: x.append(["e"], [1], begins=["0"])),
        ("position must be an integer of .* '0'", lambda x: x.edit("u", "0", 1, added=True)),
        ("layer must be an integer .* '0'", lambda x: x.read("0", x.pages(["u"]))),
        ("pages must be Pages, got list", lambda x: x.read(0, ["u"])),
        ("history must be Pages, got NoneType",
         lambda x: score(*[rows(1)] * 3, ends(0, 1), 1, x, 0, None)),
        ("num_layers must be an integer of at least 1, got '1'", lambda x: HistoryRules("1")),
        ("window must be None or an integer of at least 0, got 1.5",
         lambda x: rules_of(1, window=1.5)),
        ("page_size must be an integer of at least 1, got '4'",
         lambda x: PagedCache(HistoryRules(1), 1, "4", 1, 1)),
        ("rows must be an integer of at least 0, got '3'", lambda x: x.rules.changed("3", 0)),
    ],
)  # fmt: skip
def test_wrong_types(told, call):
    kept = cache()
    fill(kept, "u", 3)
    with pytest.raises(TypeError, match=told):
        call(kept)
    assert kept.length("u") == 3 and kept.length("e") == 0


def test_threads_take_turns():
    """Between the check of a read and its copies another thread gives the pages away."""
    kept = cache(pages=1)
    x = fill(kept, "u", 4)
    table, reads, given = kept.pages(["u"]), threading.Event(), threading.Event()
    copied, found = torch.Tensor.index_select, []

    def slow(*args):
        reads.set()
        given.wait(0.2)
        return copied(*args)

    with mock.patch.object(torch.Tensor, "index_select", slow):
        reader = threading.Thread(target=lambda: found.extend(kept.read(0, table)))
        reader.start()
        reads.wait()
        fill(kept, "w", 4, value=7.0)
        given.set()
        reader.join()
    assert all(torch.equal(y, x) for y in found) and len(found) == 2


def test_pages_stay_until_the_kernel_that_reads_them_is_launched():
    kept = cache(pages=1)
    fill(kept, "u", 4)
    table, q = kept.pages(["u"]), rows(1)
    held = []

    def by_v8(batch, *_, **__):
        other = threading.Thread(target=kept.evict, args=("u",))
        other.start()
        other.join(0.1)
        held.append((other, kept.length("u")))
        return q

    with (
        mock.patch.object(scores.common, "can_launch", lambda *_: True),
        mock.patch.multiple(Rung, device_problem=lambda *_: None, call_problem=lambda *_: None),
        mock.patch.object(scores, "_in_pages", by_v8),
    ):
        score(q, q, q, ends(0, 1), 1, kept, 0, table, in_one_call=True)
    ((other, length),) = held
    other.join()
    assert length == 4 and kept.length("u") == 0


def test_an_answer_among_threads_is_right_or_refused(layer, events):
    """Three threads, each with users of its own, share pages for fewer."""
    kept, wrong, refused = cache(pages=7), [], []
    wanted = whole(layer, events)
    before = sys.getswitchinterval()

    def run(number: int) -> None:
        draw = random.Random(number)
        for _ in range(150):
            user = number, draw.randrange(3)
            try:
                begin = kept.length(user)
                if begin == len(events):
                    kept.evict(user)
                    continue
                count = draw.randint(1, len(events) - begin)
                new = kept.append([user], [count], begins=[begin])
                x = events[begin : begin + count]
                found = extend(layer, x, kept, 0, new, kept.pages([user]))
                if not torch.allclose(found, wanted[begin : begin + count], rtol=1e-9):
                    wrong.append(user)
            except Exception as error:  # judged below
                refused.append(str(error))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    try:
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong
    assert all(x.startswith(("pages must be pages", "users must", "begins must")) for x in refused)
    held = [page for entry in kept._entries.values() for page in entry.page_ids] + kept._free
    assert sorted(held) == [*range(7)]


def test_a_cache_is_copied_with_its_pages():
    kept = cache()
    x = fill(kept, "u", 3)
    for other, table in (
        copy.deepcopy((kept, kept.pages(["u"]))),
        pickle.loads(pickle.dumps((kept, kept.pages(["u"])))),
    ):
        kept.evict("u")
        assert torch.equal(other.read(0, table)[0], x)
        kept = other


class Stream:
    """What `Exclusive` asks of a stream and of its events."""

    def __init__(self, name: str, log: list):
        self.name, self.log = name, log

    def wait_event(self, event) -> None:
        self.log.append((self.name, event.at))


class Event:
    table: str

    def record(self, stream: Stream) -> None:
        self.at = stream.name


def test_streams_follow_each_other():
    log: list[tuple[str, str]] = []
    one, two = Stream("one", log), Stream("two", log)
    shared = Exclusive(torch.device("cuda"))

    def use(stream: Stream, captured: bool = False, then: Stream | None = None) -> None:
        with (
            mock.patch.object(torch.cuda, "current_stream", lambda _: stream),
            mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: captured),
            mock.patch.object(torch.cuda, "Event", Event),
            mock.patch.object(torch.cuda, "current_device", lambda: 0),
            shared, shared,
        ):  # fmt: skip
            if then is not None:
                use(then)

    for stream in (one, one, two):
        use(stream)
    assert log == [("two", "one")]
    use(one, captured=True)
    use(two)
    assert log == [("two", "one")]
    # Of two streams in one context the second waits for the first, and the first, when the inner
    # context ends, for the second.
    use(one, then=two)
    assert log == [("two", "one"), ("one", "two"), ("two", "one"), ("one", "two")]
    use(two)
    assert log[4:] == [("two", "one")]
