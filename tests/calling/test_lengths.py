"""`Lengths`, and that nothing is remembered behind the caller's back."""

import contextlib
import contextvars
import copy
import gc
import importlib
import inspect
import pickle
import threading
import typing
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import gdpa_kernels
import tritonemu
from gdpa_kernels import (
    PFFN,
    PMA,
    BlockAttention,
    GDPASelfAttention,
    Lengths,
    block_attention,
    gdpa,
    jagged,
)
from gdpa_kernels.block_attention import api as block_api
from gdpa_kernels.block_attention import block_list
from gdpa_kernels.calling import handover
from gdpa_kernels.calling.handover import CallWorkLists
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.calling.recipe import Recipe
from gdpa_kernels.calling.sequences import Sequences
from gdpa_kernels.gdpa import api as gdpa_api
from gdpa_kernels.gdpa import reference
from gdpa_kernels.gdpa.device import work_list
from gdpa_kernels.layers import rotary
from gdpa_kernels.layers.rotary import sin_cos
from tests.calls import Seen, assert_same_bits

PACKAGE = Path(gdpa_kernels.__file__).parent
FIRST, SECOND = [0, 40, 40, 47], [0, 7, 20, 47]


def offsets(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def leaves(dtype: torch.dtype = torch.bfloat16, head_dim: int = 64) -> list[torch.Tensor]:
    return [torch.randn(47, 2, head_dim, dtype=dtype).requires_grad_() for _ in range(3)]


def gradients(out: torch.Tensor, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return out, *torch.autograd.grad(out, tensors, torch.ones_like(out))


@dataclass(frozen=True)
class Ones(Recipe[torch.Tensor]):
    count: int

    def make(self, cu_seqlens, beside=None):
        return torch.ones(self.count)


# -- What it holds -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_holds_checked_offsets(dtype):
    given = offsets(FIRST, dtype)
    lengths = Lengths(given)
    assert lengths.cu_seqlens.dtype == torch.int32 and lengths.cu_seqlens.tolist() == FIRST
    assert (lengths.max_seqlen, lengths.total, lengths.batch) == (40, 47, 3)
    given[1] = 3
    assert lengths.cu_seqlens.tolist() == FIRST, "a later write changes nothing"
    assert Lengths(given, 64).max_seqlen == 64
    assert repr(lengths) == "Lengths(3 sequences of 47 rows on cpu)"
    assert Lengths.uniform(3, 5, "cpu").cu_seqlens.tolist() == [0, 5, 10, 15]
    assert Lengths(offsets([0])).max_seqlen == 0


@pytest.mark.parametrize("given, error, text", (
    ([0, 3], TypeError, "cu_seqlens must be a tensor, got list"),
    (offsets([0, 3]).float(), TypeError, "cu_seqlens must be int32 or int64, got torch.float32"),
    (offsets([[0, 3]]), ValueError, r"cu_seqlens must have shape \[batch \+ 1\], got \[1, 2\]"),
    (offsets([0, 2**40], torch.int64), ValueError, "must end below 2.*31, got 1099511627776"),
    (offsets([0, 2**40, 9], torch.int64), ValueError, "must not decrease"),
    (offsets([3, 2, 3]), ValueError, r"must run from 0 to the 3 rows .*\(lengths.cumsum\(0\), "),
    (offsets([0, -3]), ValueError, "must end below 2.*31, got -3"),
    (offsets([0, 3]).to("meta"), ValueError, "must have values to read"),
), ids=str)  # fmt: skip
def test_wrong_offsets_say_what_is_wrong(given, error, text):
    with pytest.raises(error, match=text):
        Lengths(given)


def test_wrong_uses_say_what_is_wrong():
    q, k, v = leaves()
    lengths, long = Lengths(offsets(FIRST)), Lengths(offsets([0, 40, 48]))
    with pytest.raises(ValueError, match="max_seqlen must be at least the longest .* 40 .*got 8"):
        Lengths(offsets(FIRST), 8)
    with pytest.raises(ValueError, match="cu_seqlens_q must be of at most 47 rows .*got .*48 rows"):
        gdpa(q, k, v, long, lengths)
    with pytest.raises(ValueError, match="cu_seqlens must be of at most 47 rows .*got .*48 rows"):
        block_attention(q, k, v, long)
    with pytest.raises(ValueError, match="max_seqlen_k must be at least 40, got 39"):
        gdpa(q, k, v, lengths, lengths, None, 39)
    with pytest.raises(TypeError, match="device must be a torch.device, .* got torch.int64"):
        lengths.to(torch.int64)
    with pytest.raises(ValueError, match="count must be an integer of at least 0, got -2"):
        lengths.extended(-2)
    with pytest.raises(TypeError, match="batch must be an integer of at least 0, got 2.5"):
        Lengths.uniform(2.5, 2, "cpu")
    with pytest.raises(ValueError, match="length must be an integer of at least 0, got -3"):
        Lengths.uniform(2, -3, "cpu")
    with pytest.raises(ValueError, match="cu_seqlens_q must be on its tensor's device cpu"):
        gdpa(q, k, v, Lengths(offsets(FIRST), device="meta"), lengths)


@pytest.mark.parametrize("copied", (copy.deepcopy, pickle.dumps, lambda x: x.extended(0),
                                    lambda x: x.to("meta")))  # fmt: skip
def test_written_offsets_are_not_copied(copied):
    lengths = Lengths(offsets(FIRST))
    lengths.cu_seqlens[1] = 3
    with pytest.raises(ValueError, match="Lengths must not be modified after the check"):
        copied(lengths)


@pytest.mark.parametrize("given", (Lengths, lambda ends: ends))
def test_a_list_that_was_not_made_serves_no_backward(given):
    """Forward was asked for its launches alone."""
    tensors, ends = leaves(), given(offsets(FIRST))
    with tritonemu.enabled():
        wanted = gradients(block_attention(*tensors, ends, impl="v1_one_tile"), tensors)[1:]
        with launches(run=False):
            out = block_attention(*tensors, given(offsets(FIRST)), impl="v1_one_tile")
        found = torch.autograd.grad(out, tensors, torch.ones_like(out))
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("copied", (lambda x: x, copy.deepcopy, lambda x: x.extended(0)))
def test_a_write_to_the_offsets_is_noticed(copied):
    """Lists were made of them as they were."""
    tensors, lengths = leaves(), copied(Lengths(offsets(FIRST)))
    gdpa(*tensors, lengths, lengths)
    lengths.cu_seqlens[1] = 3
    for call in (gdpa, block_attention):
        with pytest.raises(ValueError, match="must not be modified after .*, got Lengths whose"):
            call(*tensors, *(lengths,) * (2 if call is gdpa else 1))


@pytest.mark.parametrize("name", ("cu_seqlens", "total", "max_seqlen"))
def test_what_was_checked_cannot_be_set(name):
    with pytest.raises(AttributeError, match=f"{name} of Lengths must stay as it is"):
        setattr(Lengths(offsets(FIRST)), name, None)


@pytest.mark.parametrize("copied", (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))))
def test_a_copy_that_is_made_in_inference_mode_trains(copied):
    tensors, lengths = leaves(), Lengths(offsets(FIRST))
    with torch.inference_mode():
        lengths = copied(lengths)
    assert not lengths.cu_seqlens.is_inference()
    gdpa(*tensors, lengths, lengths).sum().backward()


# -- Calls -------------------------------------------------------------------------------------


def test_calls_give_what_they_give_with_offsets():
    plain, lengths, tensors = offsets(FIRST), Lengths(offsets(FIRST)), leaves()
    with tritonemu.enabled():
        expected = gradients(gdpa(*tensors, plain, plain, 40, 40), tensors)
        for given in ((lengths, lengths), (lengths, lengths), (plain, lengths, 40)):
            assert_same_bits(gradients(gdpa(*tensors, *given), tensors), expected)
        expected = gradients(block_attention(*tensors, plain), tensors)
        for _ in range(2):
            assert_same_bits(gradients(block_attention(*tensors, lengths), tensors), expected)


@pytest.fixture
def made(monkeypatch) -> list[str]:
    """The kernels that made lists of work."""
    seen = []
    for module in (work_list, block_list):

        def watched(kernel, *arguments, launch=module.launch, **options):
            seen.append(kernel.__name__)
            return launch(kernel, *arguments, **options)

        monkeypatch.setattr(module, "launch", watched)
    return seen


def test_a_list_is_made_once_for_lengths_and_in_each_call_for_offsets(made):
    """Of gdpa forward's and backward's; of blocks backward has forward's."""
    impls = {"impl": "v8_own_waits", "backward_impl": "v4_warp_specialized_backward"}
    tensors, lengths, plain = leaves(head_dim=128), Lengths(offsets(FIRST)), offsets(FIRST)
    of_gdpa, of_blocks = partial(gdpa, **impls), partial(block_attention, impl="v1_one_tile")
    with tritonemu.enabled():
        for call, given, times, expected in (
            (of_gdpa, (lengths, lengths), 2, ["work_list_kernel"] * 2),
            (of_gdpa, (plain, plain, 40, 40), 2, ["work_list_kernel"] * 4),
            (of_blocks, (lengths,), 2, ["block_list_kernel"]),
            (of_blocks, (plain,), 1, ["block_list_kernel"]),
        ):
            for _ in range(times):
                gradients(call(*tensors, *given), tensors)
            assert made == expected
            made.clear()


def test_lists_are_told_apart(made):
    """By heads, by the other lengths and by launch constants."""
    lengths, others = Lengths(offsets(FIRST)), Lengths(offsets(SECOND))
    q, k, v = leaves(head_dim=128)
    with tritonemu.enabled(), torch.no_grad():
        for of_q in (lengths, others):
            for heads in (1, 2):
                call = (q[:, :heads], k[:, :heads], v[:, :heads])
                found = gdpa(*call, of_q, lengths, impl="v8_own_waits")
                ends = of_q.cu_seqlens, lengths.cu_seqlens
                assert torch.equal(found, gdpa(*call, *ends, 40, 40, impl="v8_own_waits"))
    assert len(made) == 8


HOPPER = {"impl": "v8_own_waits", "backward_impl": "v4_warp_specialized_backward"}
CALLS = {
    "gdpa": lambda tensors, ends: gdpa(*tensors, ends, ends, 40, 40, **HOPPER),
    "blocks": lambda tensors, ends: block_attention(*tensors, ends, impl="v1_one_tile"),
}
KIND = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


class Twice(TorchDispatchMode):
    """Before each of our operators runs it with other offsets of as many sequences."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "gdpa_kernels":
            changed = [
                offsets(SECOND) if isinstance(x, torch.Tensor) and x.dtype == torch.int32 else x
                for x in args
            ]
            self.found = func(*changed, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@KIND
@pytest.mark.parametrize("kind", (Lengths, lambda ends: ends))
def test_an_operator_that_runs_inside_of_a_call_makes_lists_of_its_own(call, kind):
    tensors, ends = leaves(head_dim=128), kind(offsets(FIRST))
    with tritonemu.enabled():
        expected = gradients(call(tensors, ends), tensors)
        others = gradients(call(tensors, offsets(SECOND)), tensors)
        for _ in range(2):
            with Twice() as mode:
                out = call(tensors, ends)
                inside = mode.found[0] if isinstance(mode.found, tuple) else mode.found
                found = gradients(out, tensors)
            assert_same_bits(found, expected)
            assert_same_bits((inside, *mode.found), others)


@KIND
def test_a_call_that_fails_leaves_nothing_behind(call, made):
    tensors, lengths = leaves(head_dim=128), Lengths(offsets(FIRST))
    with pytest.raises(NotImplementedError, match="needs tensors on a CUDA device"):
        call(tensors, lengths)
    assert handover._HANDED_OVER.work_lists is None


def in_threads(*functions: Callable[[], object]) -> None:
    """Each function in a thread of its own, with the emulator as it is here."""
    contexts = [contextvars.copy_context() for _ in functions]
    pairs = zip(contexts, functions, strict=True)
    threads = [threading.Thread(target=context.run, args=(each,)) for context, each in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@KIND
def test_backward_in_another_thread_finds_the_lists_of_its_call(call, made):
    """Where hooks copy what is saved, too."""
    tensors, lengths = leaves(head_dim=128), Lengths(offsets(FIRST))
    with tritonemu.enabled():
        expected = gradients(call(tensors, lengths), tensors)
        made.clear()
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            out = call(tensors, lengths)
        found = []
        in_threads(lambda: found.extend(gradients(out, tensors)))
    assert_same_bits(found, expected)
    assert not made


@KIND
def test_threads_do_not_meet(call, made):
    """Each has handed its lists before the first implementation runs; each finds its own."""
    tensors, found = leaves(head_dim=128), [None, None]
    given = [Lengths(offsets(ends)) for ends in (FIRST, SECOND)]
    barrier, lock, own = threading.Barrier(2, timeout=60), threading.Lock(), []
    with_work_lists = handover.with_work_lists

    def meeting(lists, operator, *arguments, **named):
        def both(*arguments, **named):
            barrier.wait()
            own.append(handover._HANDED_OVER.work_lists is lists)
            barrier.wait()
            with lock:
                return operator(*arguments, **named)

        return with_work_lists(lists, both, *arguments, **named)

    with tritonemu.enabled():
        expected = [call(tensors, lengths).detach() for lengths in given]
        made.clear()

        def run(i):
            with torch.no_grad():
                found[i] = call(tensors, given[i])

        module = gdpa_api if "gdpa" in call.__code__.co_names else block_api
        with mock.patch.object(module, "with_work_lists", meeting):
            in_threads(partial(run, 0), partial(run, 1))
    assert_same_bits(found, expected)
    assert own == [True, True] and not made


PLAIN = (int, float, str, bool, torch.dtype)


def recipes() -> Iterator[type]:
    """Every `Recipe` of the package."""
    for path in PACKAGE.rglob("*.py"):
        if "(Recipe" in path.read_text():
            name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            module = vars(importlib.import_module(name)).values()
            yield from (x for x in module if isinstance(x, type) and x.__module__ == name)


@pytest.mark.parametrize("kind", [x for x in recipes() if Recipe in x.__mro__[1:]])
def test_what_lengths_keep_is_made_from_a_record_of_plain_values(kind):
    """There is no key beside what makes it: the record is both, and no `Batch` reaches it."""
    assert kind.__dataclass_params__.frozen and kind.__dataclass_params__.eq
    for annotation in typing.get_type_hints(kind).values():
        types = typing.get_args(annotation) or (annotation,)
        assert typing.get_origin(annotation) is type or all(issubclass(x, PLAIN) for x in types)
    made = inspect.getclosurevars(kind.make)
    assert not made.nonlocals and len(inspect.signature(kind.make).parameters) == 3


def test_layers_share_the_sines_of_rotary(monkeypatch):
    calls, sin_cos_at = [], rotary.sin_cos_at
    monkeypatch.setattr(rotary, "sin_cos_at", lambda *a: calls.append(a) or sin_cos_at(*a))
    x, lengths = torch.randn(47, 32), Lengths(offsets(FIRST))
    layers = GDPASelfAttention(32, 2, rotary=1e4), BlockAttention(32, 2, rotary=1e4)
    for layer in (*layers, *layers):
        layer((x, lengths))
    assert len(calls) == 1
    BlockAttention(32, 2, rotary=100.0)((x, lengths))
    assert len(calls) == 2


def test_layers_share_the_offsets_of_keys(monkeypatch):
    made, uniform = [], Lengths.uniform
    monkeypatch.setattr(Lengths, "uniform", lambda *a: made.append(a) or uniform(*a))
    x, lengths, summary = torch.randn(47, 32), Lengths(offsets(FIRST)), torch.randn(3, 8)
    for layer in (PFFN(32, 2, 8, 5), PFFN(32, 2, 8, 5), PFFN(32, 2, 8, 7)):
        layer((x, lengths), summary)
    assert [length for _, length, _ in made] == [5, 7]


def test_compiled_calls_take_lengths():
    tensors, lengths = leaves(torch.float32, 16), Lengths(offsets(FIRST))
    for function in (gdpa, block_attention):
        arguments = (lengths,) * (2 if function is gdpa else 1)
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        expected = gradients(function(*tensors, *arguments), tensors)
        assert_same_bits(gradients(compiled(*tensors, *arguments), tensors), expected)


def test_compiled_autograd_takes_lengths():
    """It compiles what an eager forward recorded; a list is then made inside the operator."""
    tensors, lengths = leaves(head_dim=128), Lengths(offsets(FIRST))
    options = {"impl": "reference", "backward_impl": "v4_warp_specialized_backward"}
    torch._dynamo.reset()
    compiled = torch.compile(backend="aot_eager")
    with tritonemu.enabled():
        expected = gradients(gdpa(*tensors, lengths, lengths, **options), tensors)
        with torch._dynamo.compiled_autograd._enable(compiled):
            out = gdpa(*tensors, lengths, lengths, **options)
            out.backward(torch.ones_like(out))
    assert_same_bits((out, *(x.grad for x in tensors)), expected)


def test_one_tensor_for_several_arguments_compiles():
    torch._dynamo.reset()  # it explains a recompilation by arguments that only Lengths have
    x, ends = torch.randn(47, 2, 16, requires_grad=True), offsets(FIRST)
    compiled = torch.compile(gdpa, fullgraph=True, backend="aot_eager")
    expected = gradients(gdpa(x, x, x, ends, ends, 40, 40), [x])
    found = gradients(compiled(x, x, x, ends, ends, 40, 40), [x])
    assert all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))


# -- Nothing is remembered ---------------------------------------------------------------------


def collective(ends: torch.Tensor) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.scatter(ends, [offsets(SECOND)], src=0)
    finally:
        dist.destroy_process_group()


WRITES = {
    "copy_": lambda ends: ends.copy_(offsets(SECOND)),
    "data": lambda ends: ends.data.copy_(offsets(SECOND)),
    "dlpack": lambda ends: torch.from_dlpack(ends.__dlpack__()).copy_(offsets(SECOND)),
    "alias": lambda ends: (
        ends.new_empty(0).set_(ends.untyped_storage(), 0, (4,)).copy_(offsets(SECOND))
    ),
    "another library": lambda ends: np.asarray(ends).__setitem__(slice(None), SECOND),
    "collective": collective,
}


@pytest.mark.parametrize("write", WRITES)
def test_offsets_written_in_any_way_are_read_anew(write):
    q, k, v = (t.detach() for t in leaves())
    ends, after = offsets(FIRST), offsets(SECOND)
    impls = {"impl": "v8_own_waits"}
    with tritonemu.enabled(), torch.no_grad():
        gdpa(q, k, v, ends, ends, 47, 47, **impls)
        block_attention(q, k, v, ends, impl="v3_warp_specialized")
        WRITES[write](ends)
        found = gdpa(q, k, v, ends, ends, 47, 47, **impls)
        assert torch.equal(found, gdpa(q, k, v, after, after, 47, 47, **impls))
        found = block_attention(q, k, v, ends, impl="v3_warp_specialized")
        assert torch.equal(found, block_attention(q, k, v, after, impl="v3_warp_specialized"))


@pytest.mark.parametrize("window", (2**31 - 1, 2**31 - 64, 2**40, 46, 47, 200))
@pytest.mark.parametrize("impl", ("v1_tiled", "v8_own_waits"))
def test_a_window_of_any_size_masks_what_is_outside(impl, window):
    tensors, ends = leaves(), offsets([0, 47])
    backward = {"v1_tiled": "v1_tiled_backward", "v8_own_waits": "v4_warp_specialized_backward"}
    impls = {"impl": impl, "backward_impl": backward[impl]}
    with tritonemu.enabled():
        found = gradients(gdpa(*tensors, ends, ends, 47, 47, window=window, **impls), tensors)
        expected = gradients(gdpa(*tensors, ends, ends, 47, 47, **impls), tensors)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7)


def negative(x: torch.Tensor) -> torch.Tensor:
    """-x as a tensor with the negative bit."""
    found = torch.complex(torch.zeros_like(x), x).conj().imag
    assert found.is_neg()
    return found


def test_tensors_with_the_negative_bit_are_negated():
    q, k, v = (torch.randn(47, 2, 16) for _ in range(3))
    ends = offsets(FIRST)
    found = gdpa(negative(q), k, negative(v), ends, ends, 40, 40)
    assert torch.equal(found, gdpa(-q, k, -v, ends, ends, 40, 40))
    found = block_attention(negative(q), k, negative(v), ends)
    assert torch.equal(found, block_attention(-q, k, -v, ends))


def test_deterministic_algorithms_are_asked_for():
    q, k, v = leaves()
    ends = offsets([0, 47])
    torch.use_deterministic_algorithms(True)
    try:
        with tritonemu.enabled(), pytest.raises(RuntimeError, match="must be deterministic"):
            out = gdpa(q, k, v, ends, ends, 47, 300, backward_impl="v2_fused_backward")
        with tritonemu.enabled():
            out = gdpa(q, k, v, ends, ends, 47, 300)
            out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert q.grad is not None


# -- What is kept, and how long ----------------------------------------------------------------


@pytest.fixture
def listed(monkeypatch) -> None:
    """Every call of `gdpa` needs a work list, as a kernel would, and is computed on the CPU."""
    module = SimpleNamespace(
        forward=lambda batch, config, work_list: reference.forward(batch),
        backward=lambda grad, batch, config, work_list: reference.backward(grad, batch),
    )
    rung = SimpleNamespace(
        operator="gdpa", impl="listed", config=lambda batch, direction, module: None,
        recipe=lambda batch, config, module: Ones(3), module=lambda: module,
        takes=lambda direction, name: name == "work_list",
    )  # fmt: skip
    monkeypatch.setattr(gdpa_api.Options, "rung", lambda *call: rung)


def test_lengths_go_with_their_last_reference(listed):
    """Not with the cyclic collector, which large trainers switch off."""
    layers = GDPASelfAttention(32, 2, rotary=1e4), BlockAttention(32, 2, block_size=16, rotary=1e4)
    pffn, tensors = PFFN(32, 2, 8, 5), leaves()
    gdpa(*tensors, *[Lengths(offsets(FIRST))] * 2)  # imports what keeps the first call's frames
    collects = gc.isenabled()
    gc.disable()
    try:
        first, second = Lengths(offsets(FIRST)), Lengths(offsets(SECOND))
        x = torch.randn(47, 32)
        for layer in layers:
            layer((x, first))[0].sum().backward()
        pffn((x, first), torch.randn(3, 8))[0].sum().backward()
        jagged.append((x, first), torch.randn(3, 2, 32))
        for pair in ((first, first), (first, second), (second, first)):
            gradients(gdpa(*tensors, *pair), tensors)
        assert set(first._cached) == {first, second} and set(second._cached) == {first}
        gone = [weakref.ref(lengths) for lengths in (first, second, first.extended(2))]
        del first, pair
        assert [ref() for ref in gone] == [None, second, None]
        assert not second._cached, "lists that were made with others go with them"
        del second
        assert gone[1]() is None
    finally:
        if collects:
            gc.enable()


@pytest.mark.parametrize("copied", (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))))
def test_a_copy_holds_the_same_offsets_and_makes_its_own_lists(copied):
    lengths = Lengths(offsets(FIRST), 64)
    lengths.once(Ones(3))
    found = copied(lengths)
    assert found.cu_seqlens.tolist() == FIRST and found.cu_seqlens is not lengths.cu_seqlens
    assert (found.max_seqlen, found.total, len(found._cached)) == (64, 47, 0)


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_what_goes_to_a_device_is_a_copy(dtype, monkeypatch):
    """A copy from pinned memory waits in the device's queue, and its source may change by then."""
    given, queued, to = offsets(FIRST, dtype), [], torch.Tensor.to

    def watched(x, device=None, *args, **options):
        if device == "meta":
            queued.append((x, options))
        return to(x, device, *args, **options)

    monkeypatch.setattr(torch.Tensor, "to", watched)
    Lengths(given, device="meta")
    given.copy_(offsets(SECOND))
    ((source, options),) = queued
    assert source.dtype == torch.int32 and source.tolist() == FIRST
    assert options == {"non_blocking": True}


def test_lengths_move_as_tensors_do(monkeypatch):
    lengths = Lengths(offsets(FIRST), 64)
    lengths.once(Ones(3))
    assert lengths.to("cpu") is lengths
    found = lengths.to("meta", non_blocking=True)
    assert (found.device.type, found.max_seqlen, found.total) == ("meta", 64, 47)
    assert len(found._cached) == 0 and len(lengths._cached) == 1
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x, *_: x + 0)
    pinned = torch.utils.data._utils.pin_memory.pin_memory([lengths])[0]
    assert isinstance(pinned, Lengths) and pinned is not lengths
    assert (pinned.cu_seqlens.tolist(), pinned.max_seqlen, pinned.total) == (FIRST, 64, 47)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x, *_: x)
    assert lengths.pin_memory() is lengths


def layer_calls() -> dict[str, Callable[[torch.Tensor, Lengths], torch.Tensor]]:
    torch.manual_seed(0)
    own, block = GDPASelfAttention(32, 2, rotary=1e4), BlockAttention(32, 2, rotary=1e4)
    pma, pffn, summary = PMA(32, 2, 3), PFFN(32, 2, 8, 5), torch.randn(3, 8)
    return {
        "self": lambda x, lengths: own((x, lengths))[0],
        "block": lambda x, lengths: block((x, lengths))[0],
        "pma": lambda x, lengths: pma((x, lengths)),
        "pffn": lambda x, lengths: pffn((x, lengths), summary)[0],
        "append": lambda x, lengths: jagged.append((x, lengths), torch.ones(3, 2, 32))[0],
    }


@pytest.mark.parametrize("name", layer_calls())
@pytest.mark.parametrize("kernels", (False, True))
@pytest.mark.parametrize("made_there", (False, True))
def test_training_may_follow_an_evaluation(name, kernels, made_there):
    call, x = layer_calls()[name], torch.randn(47, 32)
    x = (x.bfloat16() if kernels else x).requires_grad_()
    if kernels:
        bound = [cell.cell_contents for cell in call.__closure__ or ()]
        for module in (m for m in bound if isinstance(m, torch.nn.Module)):
            module.bfloat16()
        if name == "pffn":
            call = lambda x, n, f=bound: f[0]((x, n), f[1].bfloat16())[0]  # noqa: E731
    with tritonemu.enabled() if kernels else contextlib.nullcontext():
        lengths = None if made_there else Lengths(offsets(FIRST))
        with torch.inference_mode():
            lengths = Lengths(offsets(FIRST)) if made_there else lengths
            evaluated = call(x, lengths)
        trained = call(x, lengths)
        assert torch.equal(trained, evaluated)
        (dx,) = torch.autograd.grad(trained.sum(), x)
        (expected,) = torch.autograd.grad(call(x, Lengths(offsets(FIRST))).sum(), x)
    assert torch.equal(dx, expected)


@pytest.mark.parametrize("name", layer_calls())
def test_nothing_fake_is_kept(name):
    x, lengths, call = torch.randn(47, 32), Lengths(offsets(FIRST)), layer_calls()[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(call(x, lengths), FakeTensor)
    assert torch.equal(call(x, lengths), call(x, Lengths(offsets(FIRST))))


@pytest.mark.parametrize("kernels", (False, True))
def test_no_kernel_meets_fake_tensors(kernels, made):
    mode = FakeTensorMode()
    tensors = [mode.from_tensor(t.detach()).requires_grad_() for t in leaves(head_dim=128)]
    ends = mode.from_tensor(offsets(FIRST))
    with tritonemu.enabled() if kernels else contextlib.nullcontext():
        for out in (gdpa(*tensors, ends, ends, 40, 40), block_attention(*tensors, ends)):
            found = gradients(out, tensors)
            assert all(isinstance(x, FakeTensor) and x.shape == (47, 2, 128) for x in found)
    with mode, pytest.raises(ValueError, match="must have values to read, got a fake tensor"):
        Lengths(ends)
    assert not made


@pytest.fixture
def capturing(monkeypatch):
    """A function that begins the capture of a graph of a pretended GPU, on its current stream."""
    device = property(lambda _: torch.device("cuda"), lambda *_: None)
    monkeypatch.setattr(Lengths, "device", device, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Mock(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return lambda: monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_a_capture_finds_what_was_made_before_and_keeps_nothing(capturing):
    lengths = Lengths(offsets(FIRST))
    before = lengths.once(Ones(2))
    capturing()
    assert lengths.once(Ones(2)) is before
    assert lengths.once(Ones(3)) is not lengths.once(Ones(3))


def test_backward_takes_what_forward_made_in_a_capture(capturing):
    """And nothing else of it: what backward makes there is nothing outside of the graph."""
    lengths = Lengths(offsets(FIRST))
    lists = CallWorkLists((lengths.cu_seqlens,), lengths)
    capturing()
    of_backward = lists.once(Ones(2), "backward")
    of_forward = lists.once(Ones(2), "forward")
    assert lists.once(Ones(2), "backward") is of_forward is not of_backward
    assert lists.once(Ones(3), "backward") is not lists.once(Ones(3), "backward")
    assert lengths.once(Ones(2)) is not of_forward


def test_the_offsets_of_keys_can_be_made_in_a_capture(capturing):
    """On the device: a capture refuses a copy from memory that is not pinned."""
    lengths, layer = Lengths(offsets(FIRST)), PFFN(32, 2, 8, 5)
    capturing()
    with Seen() as seen:
        keys = layer._key_sequences(Sequences(lengths.cu_seqlens, lengths=lengths))
        longer = lengths.extended(2)
    assert not {*seen.names("aten")} & {"_to_copy", "copy_"}
    made = keys.lengths
    assert (made.device.type, made.total, keys.max_seqlen) == ("cuda", 15, 5)
    assert keys.cu_seqlens.tolist() == [0, 5, 10, 15]
    assert longer.cu_seqlens.tolist() == [0, 42, 44, 53]


# -- A default dtype ---------------------------------------------------------------------------


@pytest.mark.parametrize("default", (torch.bfloat16, torch.float16, torch.float64))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
def test_the_default_dtype_changes_nothing(default, dtype):
    """Positions of 700 need fp32's digits; neither this call nor a later one may lack them."""
    ends, x = offsets([0, 700]), torch.randn(700, 32, dtype=dtype)
    fused = {"qk_norm": True, "fused_qk_norm": True}
    for layer in (
        BlockAttention(32, 1, rotary=1e4), GDPASelfAttention(32, 1, rotary=1e4, window=9),
        BlockAttention(32, 1, rotary=1e4, **fused),
        GDPASelfAttention(32, 1, rotary=1e4, window=9, **fused), PMA(32, 2, 3),
    ):  # fmt: skip
        layer = layer.to(dtype)
        expected, lengths = layer((x, Lengths(ends))), Lengths(ends)
        torch.set_default_dtype(default)
        try:
            found = layer((x, lengths))
        finally:
            torch.set_default_dtype(torch.float32)
        for y in (found, layer((x, lengths))):
            pair = (y, expected) if isinstance(layer, PMA) else (y[0], expected[0])
            assert pair[0].dtype == dtype and torch.equal(*pair)


def test_angles_have_the_layers_precision():
    x, lengths = torch.randn(3000, 32), Lengths(offsets([0, 3000]))
    for dtype in (torch.float32, torch.float64, torch.float32):
        sin, cos = sin_cos(1e4, 16, x.to(dtype), lengths)
        exact = torch.arange(3000.0).double()[:, None] * 1e4 ** (-torch.arange(8).double() / 8)
        assert sin.dtype == cos.dtype == dtype
        for found, wanted in ((sin, exact.sin()), (cos, exact.cos())):
            assert (found - wanted).abs().max() < 3000 * 2 * torch.finfo(dtype).eps
    assert sin_cos(1e4, 16, x.bfloat16(), lengths)[0].dtype == torch.float32
