"""What is made from offsets is remembered as long as nothing that it depends on changes: both
operators' lists, on a GPU that does not exist."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np
import pytest
import torch

from gdpa_kernels import emulator
from gdpa_kernels.block_attention import block_list as blocks
from gdpa_kernels.calling import launch as launching
from gdpa_kernels.calling import remembered as remembering
from gdpa_kernels.calling.remembered import Remembered
from gdpa_kernels.gdpa import work_list as works


def offsets(*values: int) -> torch.Tensor:
    return torch.tensor(values or (0, 4, 9), dtype=torch.int32)


@dataclass(frozen=True)
class User:
    """Who remembers lists made from `tensors` tensors of offsets, with `sizes`."""

    name: str
    module: ModuleType
    tensors: int
    sizes: dict

    def ask(self, *tensors: torch.Tensor) -> object:
        if self.module is blocks:
            return blocks.block_list_of(*tensors, **self.sizes)
        ends_k, *ends_q = reversed(tensors)
        both = {"cu_seqlens_q": ends_q[0] if ends_q else None, "cu_seqlens_k": ends_k}
        return works.work_list_of(**both, **self.sizes)

    def other(self, **sizes) -> User:
        return replace(self, sizes=self.sizes | sizes)

    @property
    def store(self) -> Remembered:
        return self.module._lists

    def draw(self) -> list[torch.Tensor]:
        return [offsets() for _ in range(self.tensors)]

    def __str__(self) -> str:
        return self.name


WORK = {"q": torch.zeros(9, 2, 16), "max_seqlen_q": 5, "rows_per_item": 128, "block_n": 64}
PAIR = User("work list", works, 2, WORK)
SHARED = User("work list of one q", works, 1, WORK)
BLOCKS = User("block list", blocks, 1, {"total": 9, "block_size": 64})
USERS = (PAIR, SHARED, BLOCKS)
TENSORS = [(user, which) for user in USERS for which in range(user.tensors)]

users = pytest.mark.parametrize("user", USERS, ids=str)
each_tensor = pytest.mark.parametrize("user, which", TENSORS, ids=str)


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
        fake.made.append(object())
        return fake.made[-1]

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(remembering, "current_device", lambda: fake.device)
    monkeypatch.setattr(remembering, "current_stream", lambda device: fake.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.capturing)
    monkeypatch.setattr(works, "work_list", make)
    monkeypatch.setattr(blocks, "make_block_list", make)
    for module in (works, blocks):
        monkeypatch.setattr(module._lists, "known", {})
    return fake


@users
def test_a_list_is_used_again(gpu, user):
    tensors = user.draw()
    first = user.ask(*tensors)
    assert user.ask(*tensors) is first
    if user is not BLOCKS:
        assert user.other(q=torch.zeros(9, 2, 64)).ask(*tensors) is first  # the next layer
    assert gpu.made == [first]


CHANGED_SIZES = [
    *(
        (user, change)
        for user in (PAIR, SHARED)
        for change in (
            {"q": torch.zeros(9, 3, 16)}, {"q": torch.zeros(8, 2, 16)}, {"max_seqlen_q": 6},
            {"rows_per_item": 64}, {"block_n": 128},
        )
    ),
    (BLOCKS, {"total": 8}), (BLOCKS, {"block_size": 32}),
]  # fmt: skip


@pytest.mark.parametrize("user, change", CHANGED_SIZES, ids=str)
def test_other_sizes_have_another_list(gpu, user, change):
    tensors, other = user.draw(), user.other(**change)
    first = user.ask(*tensors)
    second = other.ask(*tensors)
    assert second is not first
    assert other.ask(*tensors) is second and user.ask(*tensors) is first


def test_equal_tensors_are_not_the_same(gpu):
    one, two = offsets(), offsets()
    made = [PAIR.ask(a, b) for a in (one, two) for b in (one, two)]
    made += [user.ask(ends) for user in (SHARED, BLOCKS) for ends in (one, two)]
    assert len({id(a) for a in made}) == len(gpu.made) == 8
    assert PAIR.ask(one, one) is made[0]


CHANGES = {
    "an element": lambda ends: ends.__setitem__(1, 3),
    "copy_": lambda ends: ends.copy_(offsets(0, 3, 9)),
    "through a view": lambda ends: ends[1:].add_(1),
    "through detach": lambda ends: ends.detach().add_(1),
    "resize_": lambda ends: ends.resize_(2),
    "set_": lambda ends: ends.set_(offsets(0, 3, 9)),
    "data": lambda ends: setattr(ends, "data", offsets(0, 3, 9)),
    "shorter data": lambda ends: setattr(ends, "data", ends.data[:2]),
}


@pytest.mark.parametrize("inference", (False, True))
@each_tensor
@pytest.mark.parametrize("change", CHANGES)
def test_what_was_modified_has_a_new_list(gpu, change, user, which, inference):
    tensors = user.draw()
    first = user.ask(*tensors)
    with torch.inference_mode(inference):
        CHANGES[change](tensors[which])
        second = user.ask(*tensors)
    assert second is not first
    remembered = not tensors[which].is_inference()  # as it is once its data are
    assert (user.ask(*tensors) is second) is remembered


@each_tensor
def test_what_does_not_count_its_modifications_is_never_remembered(gpu, user, which):
    tensors = user.draw()
    with torch.inference_mode():
        tensors[which] = offsets()
        made = [user.ask(*tensors) for _ in range(2)]
    made += [user.ask(*tensors) for _ in range(2)]
    assert len({id(one) for one in made}) == 4 and not user.store.known


@each_tensor
def test_what_is_modified_while_a_list_is_made_is_noticed(gpu, user, which, monkeypatch):
    tensors = user.draw()
    make = user.store.make

    def slow(*args):
        tensors[which][1] = 3
        return make(*args)

    with monkeypatch.context() as patch:
        patch.setattr(user.store, "make", slow)
        first = user.ask(*tensors)
    assert user.ask(*tensors) is not first


@users
def test_a_capture_neither_uses_nor_leaves_a_list(gpu, user):
    tensors = user.draw()
    first = user.ask(*tensors)
    gpu.capturing = True  # even on the stream of the list
    captured = user.ask(*tensors)
    assert captured is not first
    gpu.capturing = False
    assert user.ask(*tensors) is first and len(user.store.known) == 1
    user.store.known.clear()
    gpu.capturing = True
    user.ask(*tensors)
    assert not user.store.known


@users
def test_a_list_stays_on_its_stream(gpu, user):
    tensors = user.draw()
    gpu.stream = 7
    first = user.ask(*tensors)
    gpu.stream = 8
    second = user.ask(*tensors)
    assert second is not first and user.ask(*tensors) is second
    gpu.stream = 7
    assert user.ask(*tensors) is first


@users
def test_nothing_is_remembered_where_a_capture_cannot_be_seen(gpu, user):
    """PyTorch tells of a capture on the current device alone."""
    tensors = user.draw()
    gpu.device = 1
    assert user.ask(*tensors) is not user.ask(*tensors) and not user.store.known


@users
def test_nothing_is_remembered_in_the_emulator(monkeypatch, user):
    monkeypatch.setattr(user.store, "known", {})
    tensors = user.draw()
    sizes = user.sizes | ({"max_seqlen_q": 9} if user is SHARED else {})
    with emulator.enabled():
        first, second = (user.other(**sizes).ask(*tensors) for _ in range(2))
    count = int(first.entries[0, 0])
    assert count == int(second.entries[0, 0]) == (2 if user is BLOCKS else 4)
    used = slice(1, 1 + count), slice(None, 7)
    assert torch.equal(first.entries[used], second.entries[used])
    assert first is not second and not user.store.known


@each_tensor
def test_the_memory_of_offsets_is_kept_so_that_its_address_stays_its_own(gpu, user, which):
    tensors = user.draw()
    array = np.array([0, 4, 9], np.int32)
    memory = weakref.ref(array)
    tensors[which] = torch.from_numpy(array)
    del array
    user.ask(*tensors)
    tensors[which].data = offsets()  # the version stays
    assert memory() is not None
    user.ask(*tensors)
    assert memory() is None


@each_tensor
def test_a_list_goes_with_its_offsets(gpu, user, which):
    tensors, kept = user.draw(), user.draw()
    other = user.other(**({"block_size": 32} if user is BLOCKS else {"block_n": 32}))
    user.ask(*tensors)
    other.ask(*tensors)
    user.ask(*kept)
    assert len(user.store.known) == 3
    tensors[which] = None
    gc.collect()
    assert len(user.store.known) == 1


@users
def test_lists_are_bounded_and_the_oldest_goes_first(gpu, user):
    many = [user.draw() for _ in range(70)]
    for tensors in many:
        user.ask(*tensors)
    assert len(user.store.known) == user.store.most == 64
    made = len(gpu.made)
    user.ask(*many[-64])
    assert len(gpu.made) == made
    user.ask(*many[0])
    assert len(gpu.made) == made + 1 and len(user.store.known) == 64
    del many, tensors
    gc.collect()
    assert not user.store.known


@users
def test_a_list_that_fails_leaves_nothing(gpu, user, monkeypatch):
    def fail(*args, **sizes):
        raise RuntimeError("no memory")

    monkeypatch.setattr(works, "work_list", fail)
    monkeypatch.setattr(blocks, "make_block_list", fail)
    tensors = user.draw()
    with pytest.raises(RuntimeError, match="no memory"):
        user.ask(*tensors)
    assert not user.store.known


def test_what_is_made_gets_the_tensors_and_the_sizes(gpu):
    store, (one, two) = Remembered(lambda *given: given, most=2), PAIR.draw()
    assert store.of(one, two, (3, "x")) == (one, two, 3, "x")
    assert store.of(one, None, ()) == (one, None)
    assert len(store.known) == 2
    gpu.capturing = True
    assert store.of(one, two, (4,)) == (one, two, 4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@users
def test_on_a_gpu(user):
    tensors = [ends.cuda() for ends in user.draw()]
    user = user if user is BLOCKS else user.other(q=user.sizes["q"].cuda())
    first = user.ask(*tensors)
    assert user.ask(*tensors) is first
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = user.ask(*tensors)
    assert captured is not first and user.ask(*tensors) is first
    with torch.cuda.stream(torch.cuda.Stream()):
        assert user.ask(*tensors) is not first
    torch.cuda.synchronize()
    tensors[-1][1] = 3
    second = user.ask(*tensors)
    assert second is not first and user.ask(*tensors) is second
    graph.replay()
    count = int(second.entries[0, 0])
    used = slice(1, 1 + count), slice(None, 7)
    assert torch.equal(captured.entries[used], second.entries[used])


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
    if torch.cuda.is_available():
        assert hasattr(torch._C, "_cuda_getDevice")
        assert hasattr(torch._C, "_cuda_getCurrentRawStream")
