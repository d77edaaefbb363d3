"""The list made by one kernel is the list made with plain integers; a list is remembered as long
as nothing that it depends on changes."""

from __future__ import annotations

import gc
import itertools
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gdpa_kernels import emulator, schedule
from gdpa_kernels import launch as launching
from gdpa_kernels.gdpa import work_list as lists
from gdpa_kernels.inputs import cu_seqlens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(lengths_q, lengths_k, *, num_heads, rows_per_item, block_n, num_programs, shared=False):
    longest = max(lengths_q, default=0)
    expected = schedule.build(
        "zigzag", lengths_q, lengths_k, num_programs=num_programs, fastest="block",
        num_heads=num_heads, block_m=rows_per_item, block_n=block_n,
    )  # fmt: skip
    bound = schedule.max_tiles(sum(lengths_q), len(lengths_q), longest, rows_per_item)
    with emulator.enabled():
        made = lists.work_list(
            None if shared else cu_seqlens(list(lengths_q), DEVICE),
            cu_seqlens(list(lengths_k), DEVICE),
            max_tiles=bound, max_seqlen_q=longest, num_heads=num_heads,
            rows_per_item=rows_per_item, block_n=block_n, num_programs=num_programs,
        )  # fmt: skip
    entries = made.entries.tolist()
    count = entries[0][0]
    assert count == len(expected) <= made.max_items
    starts_q = [0, *itertools.accumulate(lengths_q)]
    starts_k = [0, *itertools.accumulate(lengths_k)]
    assert [tuple(row[:7]) for row in entries[1 : 1 + count]] == [
        (
            0 if shared else starts_q[i], starts_q[i], lengths_q[i], starts_k[i], lengths_k[i],
            head, block * rows_per_item,
        )
        for i, head, block in expected.tiles()
    ]  # fmt: skip


LENGTHS = st.lists(st.tuples(st.integers(0, 700), st.integers(0, 700)), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 9), st.sampled_from((64, 128, 1024)))
def test_any_lengths(lengths, num_heads, num_programs, rows_per_item):
    queries, keys = zip(*lengths, strict=True)
    check(
        queries, keys, num_heads=num_heads, num_programs=num_programs,
        rows_per_item=rows_per_item, block_n=128,
    )  # fmt: skip


@given(st.lists(st.integers(0, 700), min_size=1, max_size=20), st.sampled_from((1, 70, 300)))
def test_one_q_for_all_sequences(keys, rows):
    queries = [rows] * len(keys)
    check(
        queries, keys, num_heads=2, num_programs=3, rows_per_item=128, block_n=64, shared=True
    )  # fmt: skip


@pytest.mark.parametrize("batch", (1, 16, 17, 300, 1100))
def test_batches_of_many_programs(batch):
    generator = torch.Generator().manual_seed(batch)
    queries, keys = torch.randint(0, 900, (2, batch), generator=generator).tolist()
    check(queries, keys, num_heads=4, rows_per_item=128, block_n=128, num_programs=132)


def test_an_empty_batch_has_an_empty_list():
    none = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    made = lists.work_list(
        none, none, max_tiles=0, max_seqlen_q=0, num_heads=2, rows_per_item=128, block_n=128,
        num_programs=3,
    )  # fmt: skip
    assert int(made.entries[0, 0]) == 0 and made.max_items == 0


class Gpu:
    """A GPU without one: which stream is current, whether it captures, and the lists made."""

    def __init__(self):
        self.device = self.stream = None
        self.capturing = False
        self.made = []


@pytest.fixture
def gpu(monkeypatch):
    """CPU tensors are taken for tensors on a GPU, and lists are made of nothing."""
    fake = Gpu()

    def make(*args, **sizes):
        fake.made.append(lists.WorkList(torch.zeros(1, 8), 0))
        return fake.made[-1]

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(lists, "current_device", lambda: fake.device)
    monkeypatch.setattr(lists, "current_stream", lambda device: fake.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    monkeypatch.setattr(lists, "_remembered", {})
    monkeypatch.setattr(lists, "work_list", make)
    return fake


Q = torch.zeros(9, 2, 16)


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values or (0, 4, 9), dtype=torch.int32)


def ask(ends_q, ends_k, q=Q, max_seqlen_q=5, rows_per_item=128, block_n=64) -> lists.WorkList:
    return lists.work_list_of(q, ends_q, ends_k, max_seqlen_q, rows_per_item, block_n)


@pytest.mark.parametrize("shared", (False, True))
def test_a_list_is_used_again(gpu, shared):
    ends_q, ends_k = None if shared else offsets(), offsets()
    first = ask(ends_q, ends_k)
    assert ask(ends_q, ends_k) is first
    assert ask(ends_q, ends_k, q=torch.zeros(9, 2, 64)) is first  # the next layer
    assert len(gpu.made) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"q": torch.zeros(9, 3, 16)}, {"q": torch.zeros(8, 2, 16)}, {"max_seqlen_q": 6},
        {"rows_per_item": 64}, {"block_n": 128},
    ],
    ids=str,
)  # fmt: skip
def test_other_sizes_have_another_list(gpu, change):
    ends = offsets()
    first = ask(ends, ends)
    second = ask(ends, ends, **change)
    assert second is not first
    assert ask(ends, ends, **change) is second and ask(ends, ends) is first


def test_equal_tensors_are_not_the_same(gpu):
    one, two = offsets(), offsets()
    assert len({id(ask(a, b)) for a in (one, two, None) for b in (one, two)}) == 6


CHANGES = {
    "an element": lambda ends: ends.__setitem__(1, 3),
    "copy_": lambda ends: ends.copy_(offsets(0, 3, 9)),
    "through a view": lambda ends: ends[1:].add_(1),
    "through detach": lambda ends: ends.detach().add_(1),
    "resize_": lambda ends: ends.resize_(2),
    "set_": lambda ends: ends.set_(offsets(0, 3, 9)),
    "data": lambda ends: setattr(ends, "data", offsets(0, 3, 9)),
}


@pytest.mark.parametrize("inference", (False, True))
@pytest.mark.parametrize("which", (0, 1))
@pytest.mark.parametrize("change", CHANGES)
def test_what_was_modified_has_a_new_list(gpu, change, which, inference):
    pair = offsets(), offsets()
    first = ask(*pair)
    with torch.inference_mode(inference):
        CHANGES[change](pair[which])
        second = ask(*pair)
    assert second is not first
    remembered = not pair[which].is_inference()  # as it is once its data are
    assert (ask(*pair) is second) is remembered


@pytest.mark.parametrize("which", (0, 1))
def test_what_does_not_count_its_modifications_is_never_remembered(gpu, which):
    pair = [offsets(), offsets()]
    with torch.inference_mode():
        pair[which] = offsets()
        made = [ask(*pair) for _ in range(2)]
    made += [ask(*pair) for _ in range(2)]
    assert len({id(one) for one in made}) == 4 and not lists._remembered


def test_a_capture_neither_uses_nor_leaves_a_list(gpu):
    ends = offsets()
    first = ask(ends, ends)
    gpu.capturing = True  # even on the stream of the list
    captured = ask(ends, ends)
    assert captured is not first
    gpu.capturing = False
    assert ask(ends, ends) is first and len(lists._remembered) == 1
    lists._remembered.clear()
    gpu.capturing = True
    ask(ends, ends)
    assert not lists._remembered


def test_a_list_stays_on_its_stream(gpu):
    ends = offsets()
    gpu.stream = 7
    first = ask(ends, ends)
    gpu.stream = 8
    second = ask(ends, ends)
    assert second is not first and ask(ends, ends) is second
    gpu.stream = 7
    assert ask(ends, ends) is first


def test_nothing_is_remembered_where_a_capture_cannot_be_seen(gpu):
    """PyTorch tells of a capture on the current device alone."""
    ends = offsets()
    gpu.device = 1
    assert ask(ends, ends) is not ask(ends, ends) and not lists._remembered


def test_nothing_is_remembered_in_the_emulator(monkeypatch):
    monkeypatch.setattr(lists, "_remembered", {})
    ends = cu_seqlens([4, 5], "cpu")
    with emulator.enabled():
        first, second = (ask(ends, ends) for _ in range(2))
    assert int(first.entries[0, 0]) == int(second.entries[0, 0]) == 4
    assert torch.equal(first.entries[1:5, :7], second.entries[1:5, :7])
    assert first is not second and not lists._remembered


@pytest.mark.parametrize("which", (0, 1))
def test_the_memory_of_offsets_is_kept_so_that_its_address_stays_its_own(gpu, which):
    pair = [offsets(), offsets()]
    array = np.array([0, 4, 9], np.int32)
    memory = weakref.ref(array)
    pair[which] = torch.from_numpy(array)
    del array
    ask(*pair)
    pair[which].data = offsets()  # the version stays
    assert memory() is not None
    ask(*pair)
    assert memory() is None


@pytest.mark.parametrize("which", (0, 1))
def test_a_list_goes_with_its_offsets(gpu, which):
    pair = [offsets(), offsets()]
    ask(*pair)
    ask(*pair, block_n=32)
    kept = offsets()
    ask(kept, kept)
    assert len(lists._remembered) == 3
    pair[which] = None
    gc.collect()
    assert len(lists._remembered) == 1


def test_lists_are_bounded_and_the_oldest_goes_first(gpu):
    many = [offsets() for _ in range(70)]
    for ends in many:
        ask(ends, ends)
    assert len(lists._remembered) == lists._REMEMBERED == 64
    made = len(gpu.made)
    ask(many[-64], many[-64])
    assert len(gpu.made) == made
    ask(many[0], many[0])
    assert len(gpu.made) == made + 1 and len(lists._remembered) == 64
    del many, ends
    gc.collect()
    assert not lists._remembered


def test_a_list_that_fails_leaves_nothing(gpu, monkeypatch):
    def fail(*args, **sizes):
        raise RuntimeError("no memory")

    monkeypatch.setattr(lists, "work_list", fail)
    ends = offsets()
    with pytest.raises(RuntimeError, match="no memory"):
        ask(ends, ends)
    assert not lists._remembered


def test_the_current_stream_is_pytorchs(monkeypatch):
    """With and without the C functions of a build for CUDA."""
    monkeypatch.setattr(launching, "_device", lambda: 2)
    monkeypatch.setattr(launching, "_stream", lambda device: 70 + device)
    assert (launching.current_device(), launching.current_stream(1)) == (2, 71)
    monkeypatch.setattr(launching, "_device", None)
    monkeypatch.setattr(launching, "_stream", None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    stream = type("Stream", (), {"cuda_stream": 90})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    assert (launching.current_device(), launching.current_stream(1)) == (3, 90)
    if DEVICE == "cuda":
        assert hasattr(torch._C, "_cuda_getDevice")
        assert hasattr(torch._C, "_cuda_getCurrentRawStream")
