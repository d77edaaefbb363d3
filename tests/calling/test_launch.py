"""A relaunch is the launch that Triton would make: same kernel, same arguments, or Triton's way.

The GPU is that of tests/driver.py.
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib.util
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from gdpa_kernels import emulator, gdpa
from gdpa_kernels.calling import ladder, relaunch, replay
from gdpa_kernels.calling import launch as launching
from gdpa_kernels.calling.descriptors import Descriptor, Layout
from gdpa_kernels.device import ragged
from gdpa_kernels.gdpa import api, v2_tma
from gdpa_kernels.measuring.inputs import cu_seqlens
from tests.calling.driver import CUDA, Driver, Launched, installed


@pytest.fixture
def driver(monkeypatch):
    kernels = (
        store_kernel, box_kernel, global_kernel, unspecialized_kernel, scratch_kernel,
        v2_tma.tma_kernel,
    )  # fmt: skip
    with installed(monkeypatch, kernels) as fake:
        yield fake


@triton.jit
def store_kernel(x_ptr, y_ptr, n, VALUE: tl.constexpr = 0, BLOCK: tl.constexpr = 32):
    at = tl.arange(0, BLOCK)
    if y_ptr is None:
        tl.store(x_ptr + at, VALUE, mask=at < n)
    else:
        tl.store(x_ptr + at, tl.load(y_ptr + at), mask=at < n)


@triton.jit
def box_kernel(desc, x_ptr, n):
    tl.store(x_ptr + tl.arange(0, 16), n + tl.sum(desc.load([0, 0]).to(tl.float32)))


@triton.jit(do_not_specialize=["n"])
def unspecialized_kernel(x_ptr, n):
    tl.store(x_ptr, n)


@triton.jit
def scratch_kernel(x_ptr, n):
    """Makes a descriptor on the device, for which Triton allocates memory at every launch."""
    desc = tl.make_tensor_descriptor(x_ptr, shape=[n, 16], strides=[16, 1], block_shape=[16, 16])
    desc.store([0, 0], desc.load([16, 0]))


GLOBAL = tl.constexpr(3)


@triton.jit
def global_kernel(x_ptr):
    tl.store(x_ptr, GLOBAL)


STORAGE = torch.zeros(64, dtype=torch.int32)
ALIGNED, NEXT, ODD = STORAGE[:32], STORAGE[16:], STORAGE[1:33]
assert STORAGE.data_ptr() % 16 == 0

# Calls of store_kernel of which no two may be taken for each other: (x, y, n), constexprs, options.
CALLS = {
    "plain": ((ALIGNED, ALIGNED, 7), {}),
    "x odd": ((ODD, ALIGNED, 7), {}),
    "y odd": ((ALIGNED, ODD, 7), {}),
    "y None": ((ALIGNED, None, 7), {}),
    "x float": ((ALIGNED.view(torch.float32), ALIGNED, 7), {}),
    "x bf16": ((ALIGNED.view(torch.bfloat16), ALIGNED, 7), {}),
    "n 1": ((ALIGNED, ALIGNED, 1), {}),
    "n 16": ((ALIGNED, ALIGNED, 16), {}),
    "n bool": ((ALIGNED, ALIGNED, True), {}),
    "n float": ((ALIGNED, ALIGNED, 7.0), {}),
    "n 2**31": ((ALIGNED, ALIGNED, 2**31), {}),
    "n 2**31 + 1": ((ALIGNED, ALIGNED, 2**31 + 1), {}),
    "n 2**63": ((ALIGNED, ALIGNED, 2**63), {}),
    "VALUE 1": ((ALIGNED, None, 7), {"VALUE": 1}),
    "VALUE 2": ((ALIGNED, None, 7), {"VALUE": 2}),
    "BLOCK 64": ((ALIGNED, ALIGNED, 7), {"BLOCK": 64}),
    "8 warps": ((ALIGNED, ALIGNED, 7), {"num_warps": 8}),
}
# Calls that Triton runs with the kernel of another: (the other, call).
ALIKE = {
    "another n": ("plain", ((ALIGNED, ALIGNED, 9), {})),
    "another address": ("plain", ((NEXT, ALIGNED, 2), {})),
    "n 32": ("n 16", ((ALIGNED, ALIGNED, 32), {})),
    "n 0": ("n 16", ((ALIGNED, ALIGNED, 0), {})),
    "n -1": ("plain", ((ALIGNED, ALIGNED, -1), {})),
    "n -2**31 - 1": ("n 2**31 + 1", ((ALIGNED, ALIGNED, -(2**31) - 1), {})),
    "n 2**31 - 1": ("plain", ((ALIGNED, ALIGNED, 2**31 - 1), {})),
    "n False": ("n bool", ((ALIGNED, ALIGNED, False), {})),
    "n 1.0": ("n float", ((ALIGNED, ALIGNED, 1.0), {})),
}


def last(driver, kernel, call, device=CUDA, grid=(3, 2)) -> Launched:
    args, options = call
    launching.launch(kernel, grid, device, *args, **options)
    return driver.launched[-1]


def by_triton(driver, kernel, call, grid=(3, 2)) -> Launched:
    args, options = call
    kernel[grid](*args, **options)
    return driver.launched[-1]


def test_every_kind_of_call_is_launched_as_triton_launches_it(driver):
    functions = {}
    for name, call in CALLS.items():
        first = last(driver, store_kernel, call)
        functions[name] = first.function
        # The kinds before this one are known by now: none may take this call.
        assert first == by_triton(driver, store_kernel, call), name
    assert len(set(functions.values())) == len(CALLS)
    slow = driver.slow
    for name, call in CALLS.items():
        assert last(driver, store_kernel, call).function == functions[name], name
    assert driver.slow == slow, "a known call took Triton's way"
    for name, (other, call) in ALIKE.items():
        fast = last(driver, store_kernel, call)
        assert driver.slow == slow and fast.function == functions[other], name
        assert fast == by_triton(driver, store_kernel, call), name
        slow = driver.slow


def test_a_constexpr_is_known_by_its_type_too(driver):
    for value in (1, True, 1.0, (3, 1), (3, 4)):
        before = driver.slow
        last(driver, store_kernel, ((ALIGNED, ALIGNED, 7), {"VALUE": value}))
        assert driver.slow == before + 1, value
        last(driver, store_kernel, ((ALIGNED, ALIGNED, 7), {"VALUE": value}))
        assert driver.slow == before + 1, value
    last(driver, store_kernel, ((ALIGNED, ALIGNED, 7), {"VALUE": (3, True)}))
    assert driver.slow == before + 2, "another kind than (3, 1)"


def test_a_grid_has_up_to_three_dimensions_and_may_be_empty(driver):
    for grid in ((5,), (5, 6), (5, 6, 7)):
        for _ in range(2):
            assert last(driver, store_kernel, CALLS["plain"], grid=grid).grid == (
                *grid, *(1,) * (3 - len(grid)),
            )  # fmt: skip
    assert driver.slow == 1
    count = len(driver.launched)
    launching.launch(store_kernel, (0, 3), CUDA, *CALLS["plain"][0])
    assert len(driver.launched) == count


def test_each_device_has_its_own_kernel_and_stream(driver):
    other = torch.device("cuda", 1)
    seen = [last(driver, store_kernel, CALLS["plain"], device) for device in (CUDA, other) * 2]
    assert driver.slow == 2 and seen[:2] == seen[2:]
    assert [launched.stream for launched in seen[:2]] == [70, 71]
    assert seen[0].function != seen[1].function
    assert driver.device == 0
    driver.device = 1  # "cuda" without a number is the current one
    assert last(driver, store_kernel, CALLS["plain"], torch.device("cuda")) == seen[1]
    assert driver.slow == 2


def descriptors(rows: int = 32, dtype=torch.bfloat16, block=(16, 16), stride: int = 64):
    """The same descriptor, made by Triton and by us."""
    base = torch.zeros(rows * stride, dtype=dtype)
    shape, strides = (rows, 16), (stride, 1)
    theirs = TensorDescriptor(base, list(shape), list(strides), list(block))
    return theirs, Descriptor(base, Layout(dtype, shape, strides, block))


@pytest.mark.parametrize("rows, dtype, block, stride", [
    (32, torch.bfloat16, (16, 16), 64), (32, torch.float16, (16, 16), 64),
    (32, torch.bfloat16, (32, 16), 64), (32, torch.bfloat16, (16, 16), 128),
    (48, torch.bfloat16, (16, 16), 64),
])  # fmt: skip
def test_descriptors_reach_the_kernel_as_tritons_do(driver, rows, dtype, block, stride):
    x = torch.zeros(16)
    known = descriptors()
    last(driver, box_kernel, ((known[1], x, 7), {}))
    theirs, ours = descriptors(rows, dtype, block, stride)
    expected = by_triton(driver, box_kernel, ((theirs, x, 7), {}))
    for descriptor in (ours, ours, theirs, theirs):
        assert last(driver, box_kernel, ((descriptor, x, 7), {})) == expected
    assert expected.arguments[0][:2] == ("map", theirs.base.data_ptr())


def test_a_descriptor_is_encoded_once_per_address_and_layout(driver):
    x = torch.zeros(16)
    (_, ours), (_, elsewhere) = descriptors(), descriptors()
    elsewhere = Descriptor(elsewhere.base, ours.layout)
    for descriptor in (ours, ours):  # Triton's way, then ours
        last(driver, box_kernel, ((descriptor, x, 7), {}))
    slow, encoded = driver.slow, driver.encoded
    for descriptor in (ours, elsewhere, ours, elsewhere):
        launched = last(driver, box_kernel, ((descriptor, x, 7), {}))
        assert launched.arguments[0][1] == descriptor.base.data_ptr()
    assert driver.slow == slow and driver.encoded == encoded + 1


def test_a_descriptor_of_a_tensor_that_moved_points_to_where_it_is(driver):
    x = torch.zeros(16)
    _, ours = descriptors()
    for _ in range(2):
        last(driver, box_kernel, ((ours, x, 7), {}))
    ours.base.set_(torch.zeros(2048, dtype=torch.bfloat16))
    launched = last(driver, box_kernel, ((ours, x, 7), {}))
    assert launched.arguments[0][1] == ours.base.data_ptr() and driver.slow == 1


def test_no_tensor_is_kept(driver):
    x, y = torch.zeros(16), torch.zeros(16, dtype=torch.int32)
    _, ours = descriptors()
    for _ in range(3):
        last(driver, box_kernel, ((ours, x, 7), {}))
        last(driver, store_kernel, ((y, y, 7), {}))
    driver.launched.clear()
    kept = [weakref.ref(tensor) for tensor in (ours.base, x, y)]
    del ours, x, y
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3


def test_caches_are_bounded(driver, monkeypatch):
    monkeypatch.setattr(relaunch, "MOST", 4)
    x = torch.zeros(16)
    base = torch.zeros(4096, dtype=torch.bfloat16)
    layout = Layout(torch.bfloat16, (32, 16), (64, 1), (16, 16))
    for start in range(0, 80, 8):
        call = (Descriptor(base[start:], layout), x, 7), {}
        assert last(driver, box_kernel, call) == by_triton(driver, box_kernel, call)
    for name, call in CALLS.items():
        assert last(driver, store_kernel, call) == by_triton(driver, store_kernel, call), name
    for known in relaunch._kernels.values():
        assert len(known.compiled) <= 4
        for compiled in known.compiled.values():
            assert all(len(encoder.known) <= 4 for _, encoder in compiled.descriptors)


@pytest.mark.parametrize("hook", ("launch_enter_hook", "launch_exit_hook"))
def test_launch_hooks_see_every_launch(driver, hook):
    seen = []
    last(driver, store_kernel, CALLS["plain"])
    last(driver, store_kernel, CALLS["plain"])
    assert driver.slow == 1
    chain = getattr(triton.knobs.runtime, hook)
    chain.add(seen.append)
    try:
        for _ in range(3):
            assert last(driver, store_kernel, CALLS["plain"]).hooks != (None, None)
    finally:
        chain.remove(seen.append)
    assert len(seen) == 3
    if hook == "launch_enter_hook":
        assert [metadata.get()["name"] for metadata in seen] == ["store_kernel"] * 3
    assert driver.slow == 4
    assert last(driver, store_kernel, CALLS["plain"]).metadata is None
    assert driver.slow == 4


def test_a_hook_before_the_run_sees_every_launch(driver):
    seen = []
    hook = lambda *args, **kwargs: seen.append(args)  # noqa: E731
    last(driver, store_kernel, CALLS["plain"])
    store_kernel.add_pre_run_hook(hook)
    try:
        last(driver, store_kernel, CALLS["plain"])
    finally:
        store_kernel.pre_run_hooks.remove(hook)
    assert len(seen) == 1 and driver.slow == 2


@pytest.mark.parametrize("knob", ("debug", "sanitize_overflow"))
def test_a_knob_that_changes_the_kernel_changes_the_launch(driver, knob):
    with triton.knobs.runtime.scope():
        setattr(triton.knobs.runtime, knob, False)
        plain = last(driver, store_kernel, CALLS["plain"])
        setattr(triton.knobs.runtime, knob, True)
        checked = last(driver, store_kernel, CALLS["plain"])
        assert checked.function != plain.function and driver.slow == 2
        assert last(driver, store_kernel, CALLS["plain"]) == checked
        setattr(triton.knobs.runtime, knob, False)
        assert last(driver, store_kernel, CALLS["plain"]) == plain
        assert driver.slow == 2


def test_a_changed_global_is_refused_as_triton_refuses_it(driver, monkeypatch):
    for _ in range(2):
        last(driver, global_kernel, ((ALIGNED,), {}))
    assert driver.slow == 1
    monkeypatch.setitem(globals(), "GLOBAL", tl.constexpr(4))
    with pytest.raises(RuntimeError, match="Global variable GLOBAL has changed"):
        last(driver, global_kernel, ((ALIGNED,), {}))


def test_a_cleared_cache_of_triton_is_cleared_here(driver):
    first = last(driver, store_kernel, CALLS["plain"])
    store_kernel.device_caches.clear()
    second = last(driver, store_kernel, CALLS["plain"])
    assert driver.slow == 2 and second.function != first.function
    assert last(driver, store_kernel, CALLS["plain"]) == second and driver.slow == 2


def test_another_driver_is_not_asked_to_run_the_kernels_of_this_one(driver, monkeypatch):
    last(driver, store_kernel, CALLS["plain"])
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    launching.launch(store_kernel, (1,), CUDA, *CALLS["plain"][0])
    assert driver.slow == 2


def test_an_instrumented_kernel_is_another(driver):
    last(driver, store_kernel, CALLS["plain"])
    (known,) = relaunch._kernels.values()
    key = known.key(*CALLS["plain"])
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.instrumentation_mode = "some"
        assert known.key(*CALLS["plain"]) != key
    assert known.key(*CALLS["plain"]) == key


def test_a_kernel_that_needs_memory_takes_tritons_way(driver):
    allocated = []

    def allocate(size, align, stream):
        allocated.append(size)
        return STORAGE

    before = triton.runtime._allocation._allocator.get()
    triton.set_allocator(allocate)
    try:
        for _ in range(3):
            launched = last(driver, scratch_kernel, ((ALIGNED, 32), {}))
            assert launched.scratch[0] is STORAGE
    finally:
        triton.set_allocator(before)
    assert len(allocated) == driver.slow == 3


def test_a_parameter_that_is_not_specialized_is_not_told_apart(driver):
    for n in (7, 16, 1):
        assert last(driver, unspecialized_kernel, ((ALIGNED, n), {})).arguments[1] == n
    assert driver.slow == 1


@pytest.mark.parametrize(
    "call",
    [
        ((ALIGNED, ALIGNED, 7, 3), {}),  # a constexpr by position
        ((ALIGNED, ALIGNED), {"n": 7}),  # an argument by name
        ((ALIGNED, ALIGNED, 7), {"VALUE": tl.constexpr(3)}),
        ((ALIGNED, ALIGNED, 7), {"VALUE": (3, True)}),
        ((ALIGNED, ALIGNED, 7), {"VALUE": (3, (4,))}),
    ],
)
def test_calls_of_another_kind_take_tritons_way(driver, call):
    launches = [last(driver, store_kernel, call) for _ in range(2)]
    assert driver.slow == 2 and launches[0] == launches[1]
    assert by_triton(driver, store_kernel, call) == launches[0]


def test_errors_are_tritons(driver):
    last(driver, store_kernel, CALLS["plain"])
    for args, options in [
        ((ALIGNED, ALIGNED, object()), {}),
        ((ALIGNED, ALIGNED), {}),
        ((ALIGNED, ALIGNED, 7), {"no_such_option": 1}),
    ]:
        with pytest.raises(Exception) as theirs:
            store_kernel[(1,)](*args, **options)
        with pytest.raises(type(theirs.value)) as ours:
            launching.launch(store_kernel, (1,), CUDA, *args, **options)
        assert str(ours.value) == str(theirs.value)


def test_another_triton_takes_tritons_way(driver, monkeypatch):
    monkeypatch.setattr(relaunch, "KNOWN", False)
    seen = [last(driver, store_kernel, CALLS["plain"]) for _ in range(3)]
    assert driver.slow == 3 and seen[0] == seen[1] == seen[2]


def test_the_known_triton_is_the_pinned_one_and_no_other(monkeypatch):
    assert relaunch.KNOWN and triton.__version__ == relaunch.KNOWN_TRITON
    pins = (Path(__file__).parents[2] / "constraints.txt").read_text()
    assert f"fbtriton=={relaunch.KNOWN_TRITON.removesuffix('+fb')}\n" in pins
    monkeypatch.setattr(triton, "__version__", "3.8.0")
    spec = importlib.util.spec_from_file_location("of_another_triton", relaunch.__file__)
    other = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    assert not other.KNOWN and not hasattr(other, "native_specialize_impl")


def test_the_insides_of_triton_are_imported_only_where_its_version_is_known():
    tree = ast.parse(Path(relaunch.__file__).read_text())
    top = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert not [module for module in top if "_C" in module or "nvidia" in module]


@pytest.mark.parametrize("block", (32, 64))
@pytest.mark.parametrize("head_dim", (8, 96, 128))
@pytest.mark.parametrize("rows", (0, 5))
def test_a_ragged_descriptor_is_tritons_with_the_same_fields(rows, head_dim, block):
    packed = torch.randn(rows, 3, 2, head_dim).bfloat16()[:, 1]
    ours = ragged.ragged_descriptor(packed, block, min_width=32)
    theirs = TensorDescriptor(
        ours.base, list(ours.shape), list(ours.strides), list(ours.block_shape)
    )
    stride = ours.base.stride(0)
    assert ours.shape == (ragged.ANY, ragged.ANY, 2, 2**30, head_dim)
    assert ours.strides == (2**34 - stride, stride, head_dim, stride, 1)
    assert ours.block_shape == (1, 1, 1, block, 128 if head_dim > 32 else 32)
    assert (theirs.padding, theirs.round_f32_to_tf32) == (ours.padding, ours.round_f32_to_tf32)
    assert ours.base is packed or rows == 0
    again = ragged.ragged_descriptor(packed, block, min_width=32)
    assert again.layout is ours.layout


def test_a_descriptor_refuses_what_tritons_refuses():
    layout = Layout(torch.bfloat16, (32, 16), (64, 1), (16, 16))
    base = torch.zeros(2048, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="base must be 16-byte aligned"):
        Descriptor(base[1:], layout)
    with pytest.raises(AssertionError, match="base must be torch.bfloat16, got torch.float16"):
        Descriptor(base.half(), layout)
    with pytest.raises(AssertionError, match="strides must be 16-byte aligned"):
        Layout(torch.bfloat16, (32, 16), (60, 1), (16, 16))
    with pytest.raises(ValueError, match="power of 2"):
        Layout(torch.bfloat16, (32, 16), (64, 1), (16, 12))


def calls_of(function) -> int:
    """Calls of Python functions while `function` runs: the fewest of three runs, since what others
    left behind may be collected during one."""
    counts = []

    def profile(frame, event, argument):
        counts[-1] += event == "call"

    for _ in range(3):
        counts.append(-1)
        sys.setprofile(profile)
        try:
            function()
        finally:
            sys.setprofile(None)
    return min(counts)


@pytest.fixture
def on_the_driver(driver, monkeypatch):
    """Rung v2 on CPU tensors, launched on the driver that stands for a GPU."""
    monkeypatch.setattr(
        v2_tma, "launch", lambda kernel, grid, device, *args, **options:
        launching.launch(kernel, grid, CUDA, *args, **options)
    )  # fmt: skip
    monkeypatch.setattr(ladder.Requires, "of_device", lambda self, device: None)
    return driver


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("shared", (False, True))
def test_a_rung_is_launched_as_triton_launches_it(on_the_driver, shared, dtype):
    lengths = cu_seqlens([4, 0, 5], "cpu")
    packed = torch.randn(9, 3, 4, 16).to(dtype)
    q, k, v = (packed[:4] if shared else packed)[:, 0].contiguous(), packed[:, 1], packed[:, 2]
    call = (q, k, v, None if shared else lengths, lengths, 4 if shared else 5, 5)
    seen = {}
    for way in ("first", "again"):
        assert gdpa(*call, impl="v2_tma").shape == (12 if shared else 9, 4, 16)
        seen[way] = on_the_driver.launched[-1]
    assert on_the_driver.slow == 1
    kernel = v2_tma.tma_kernel
    kernel.device_caches.clear()
    gdpa(*call, impl="v2_tma")
    assert on_the_driver.slow == 2
    seen["Triton"] = on_the_driver.launched[-1]
    for launched in seen.values():  # the output is another tensor, the kernel another handle
        out = next(a for a in launched.arguments[33:] if isinstance(a, tuple))
        at = launched.arguments.index(out)
        launched.arguments[at] = ("map", None, *out[2:])
    functions = [launched.function for launched in seen.values()]
    assert functions[0] == functions[1]
    same = [launched._replace(function=None) for launched in seen.values()]
    assert same[0] == same[1] == same[2]


def test_a_known_call_runs_little_python(on_the_driver, monkeypatch):
    lengths = cu_seqlens([4, 0, 5], "cpu")
    q, k, v = (torch.randn(9, 4, 16).bfloat16() for _ in range(3))

    def call():
        gdpa(q, k, v, lengths, lengths, 5, 5, impl="v2_tma")

    call()
    call()
    assert on_the_driver.slow == 1
    assert calls_of(call) <= 110  # 107 when last counted, by the operator as all CPU tensors go
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(api, "_resolved", {})
    monkeypatch.setattr(replay, "_known", {})
    call()
    assert on_the_driver.slow == 1 and len(api._resolved) == 1
    assert calls_of(call) <= 90  # 84 when last counted, as on a GPU; 20 of them in a triton.cdiv
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    for _ in range(replay.SEEN):
        call()
    assert calls_of(call) <= 45  # 42 when last counted, by a replay
    store = functools.partial(launching.launch, store_kernel, (1,), CUDA)
    args, options = CALLS["plain"]
    store(*args, **options)
    assert calls_of(lambda: store(*args, **options)) <= 20
    assert calls_of(lambda: store_kernel[(1,)](*args, **options)) > 20


def test_cpu_tensors_run_in_the_emulator_or_not_at_all():
    x = torch.zeros(32, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="store_kernel needs tensors on a CUDA device"):
        launching.launch(store_kernel, (1,), x.device, x, None, 7, VALUE=5)
    with emulator.enabled():
        launching.launch(store_kernel, (1,), x.device, x, None, 7, VALUE=5, BLOCK=32)
    assert x.tolist() == [5] * 7 + [0] * 25


def test_multiprocessors_of_each_device(monkeypatch):
    launching._multiprocessors.cache_clear()
    asked = []

    def properties(index):
        asked.append(index)
        return SimpleNamespace(multi_processor_count=100 + index)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    devices = ("cuda:0", "cuda:1", "cuda", "cuda:0")
    assert [launching.multiprocessors(torch.device(d)) for d in devices] == [100, 101, 101, 100]
    assert asked == [0, 1]
    assert launching.multiprocessors(torch.device("cpu")) == emulator.MULTIPROCESSORS
    launching._multiprocessors.cache_clear()
