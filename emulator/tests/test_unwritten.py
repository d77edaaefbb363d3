"""Memory of `torch.empty` is unwritten until somebody writes to it."""

import contextlib

import pytest
import torch
import triton
import triton.language as tl

from emulator.tests.checking import box, place
from tritonemu import UninitializedRead, enabled, fake_gpu


@pytest.fixture(autouse=True)
def gpu():
    with fake_gpu():
        yield


@triton.jit
def read_kernel(x, y, n, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(y + i, tl.load(x + i, mask=i < n, other=0.0))


@triton.jit
def write_kernel(x, n, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(x + i, i, mask=i < n)


@triton.jit
def atomic_kernel(x, KIND: tl.constexpr):
    if KIND == "add":
        tl.atomic_add(x + tl.arange(0, 8), 1)
    elif KIND == "cas":
        tl.atomic_cas(x, 0, 1)
    else:
        tl.atomic_xchg(x, 1)
        tl.atomic_add(x, 1)


@triton.jit
def box_kernel(x, KIND: tl.constexpr):
    if KIND == "load":
        x.store([0, 0], x.load([0, 0]))
    elif KIND == "add":
        x.atomic_add([0, 0], tl.zeros([8, 16], tl.float32))
    else:
        x.store([0, 0], tl.zeros([8, 16], tl.float32))
        x.atomic_add([0, 0], x.load([0, 0]))


def empty(*shape, **options):
    return torch.empty(*(shape or (8,)), device="cuda", **options)


MADE = {
    "empty": empty,
    "like": lambda: torch.empty_like(torch.ones(8, device="cuda")),
    "new": lambda: torch.ones(2, device="cuda").new_empty(8),
    "strided": lambda: torch.empty_strided((4, 2), (2, 1), device="cuda"),
    "default": lambda: torch.empty(8),
    "view": lambda: empty(2, 8)[1],
    "bits": lambda: empty(dtype=torch.int32).view(torch.float32),
    "parameter": lambda: torch.nn.Parameter(empty(), requires_grad=False),
}


@pytest.mark.parametrize("name", MADE)
def test_it_is_read_unwritten(name):
    with torch.device("cuda"):
        x = MADE[name]()
    match = r"load of x reads 8 of 8 elements .* made, without values, at .*test_unwritten.py:"
    with enabled(), pytest.raises(UninitializedRead, match=match) as caught:
        read_kernel[(1,)](x, empty(), 8, 8)
    assert (caught.value.file, caught.value.line) == place(read_kernel, "tl.load")
    assert caught.value.buffer == "x"
    with open(__file__) as file:
        assert "empty" in file.readlines()[caught.value.other[1] - 1]


def filled(write):
    x = empty()
    write(x)
    return x


def initialised():
    parameter = torch.nn.Parameter(empty())
    torch.nn.init.uniform_(parameter)
    return parameter.detach()


def by_numpy(x):
    x.numpy()[:] = 1


WRITTEN = {
    "zero_": lambda: filled(lambda x: x.zero_()),
    "item": lambda: filled(lambda x: x.__setitem__(slice(None), 1)),
    "halves": lambda: filled(lambda x: (x.view(2, 4)[0].fill_(1), x[4:].zero_())),
    "mask": lambda: filled(lambda x: x.__setitem__(torch.ones(8, device="cuda") > 0, 1)),
    "foreach": lambda: filled(lambda x: torch._foreach_zero_([x])),
    "data": lambda: filled(lambda x: x.data.fill_(1)),
    "out": lambda: filled(lambda x: torch.add(torch.ones(8, device="cuda"), 1, out=x)),
    "numpy": lambda: filled(by_numpy),
    "kernel": lambda: filled(lambda x: write_kernel[(1,)](x, 8, 8)),
    "bits": lambda: filled(lambda x: write_kernel[(1,)](x.view(torch.int16), 16, 16)),
    "parameter": initialised,
    "zeros": lambda: torch.zeros(8, device="cuda"),
    "host": lambda: torch.empty(8).cuda(),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_may_be_read(name):
    with enabled() as reports:
        x = WRITTEN[name]()
        read_kernel[(1,)](x, empty(), 8, 8)
    assert reports[-1].uninitialized == 0


def test_kernels_write_element_by_element():
    x = empty()
    with enabled():
        write_kernel[(1,)](x, 5, 8)
        read_kernel[(1,)](x, empty(), 5, 8)
        with pytest.raises(UninitializedRead, match="reads 3 of 8 elements"):
            read_kernel[(1,)](x, empty(), 8, 8)
        half = x.view(torch.float16)
        with pytest.raises(UninitializedRead, match="reads 2 of 12 elements"):
            read_kernel[(1,)](half, empty(16), 12, 16)


PARTS = {
    "zero_": lambda x: x[:5].zero_(),
    "item": lambda x: x.__setitem__(slice(5), 1),
    "index": lambda x: x.__setitem__(torch.arange(5, device="cuda"), 1.0),
    "out": lambda x: torch.ones(5, device="cuda", out=x[:5]),
    "copy": lambda x: x[:5].copy_(torch.ones(5)),
}


@pytest.mark.parametrize("part", PARTS)
def test_pytorch_writes_element_by_element(part):
    with enabled():
        x = filled(PARTS[part])
        read_kernel[(1,)](x, empty(), 5, 8)
        with pytest.raises(UninitializedRead, match="reads 3 of 8 elements"):
            read_kernel[(1,)](x, empty(), 8, 8)


def test_a_write_that_was_not_seen_is_one_of_all():
    with enabled():
        x = empty()
        with torch._C.DisableTorchFunction():
            x.zero_()
        x[:5] = 1
        read_kernel[(1,)](x, empty(), 8, 8)


def test_it_may_be_allowed():
    with enabled(uninitialized="allow") as reports:
        read_kernel[(1,)](empty(), empty(), 8, 8)
    assert reports[0].uninitialized == 1


@pytest.mark.parametrize("kind", ("add", "cas"))
def test_atomics_read(kind):
    with enabled(), pytest.raises(UninitializedRead, match="atomic of x reads"):
        atomic_kernel[(1,)](empty(dtype=torch.int32), kind)


def test_an_exchange_writes():
    x = empty(dtype=torch.int32)
    with enabled():
        atomic_kernel[(1,)](x, "xchg")
    assert x[0] == 2


@pytest.mark.parametrize("kind, what", (("load", "load"), ("add", "reduction")))
def test_descriptors_read(kind, what):
    with enabled(), pytest.raises(UninitializedRead, match=f"descriptor {what} of x reads 128"):
        box_kernel[(1,)](box(empty(8, 16), 8, 16), kind)
    with enabled():
        box_kernel[(1,)](box(empty(8, 16), 8, 16), "store")


def test_memory_that_is_used_again_is_not_what_it_was():
    for _ in range(200):
        x = empty(1 << 16)
        with enabled():
            del x
            read_kernel[(1,)](torch.ones(1 << 16, device="cuda"), empty(), 8, 8)


def test_the_versions_of_tensors_do_not_tell_of_kernels():
    """A kernel may write what autograd has saved, as on a GPU."""
    x = torch.ones(8, device="cuda")
    with enabled():
        write_kernel[(1,)](x, 8, 8)
    assert x._version == 0


def as_halves(n=8):
    """A kernel writes the first n of 8 elements that `torch.empty` made."""
    x = empty()
    write_kernel[(1,)](x, n, 8)
    return x


READS = {
    "sum": lambda x: x.sum(),
    "function": lambda x: torch.sum(x),
    "max": lambda x: x.max(dim=0),
    "equal": lambda x: torch.equal(x, torch.zeros(8, device="cuda")),
    "close": lambda x: torch.testing.assert_close(x, torch.arange(8.0, device="cuda")),
    "copy": lambda x: x.double().norm(),
    "host": lambda x: x.cpu().sum(),
    "clone": lambda x: x.view(2, 4).clone().t().contiguous().sum(),
    "view": lambda x: x[3:].sum(),
}


@pytest.mark.parametrize("name", READS)
def test_pytorch_reads_it(name):
    with enabled():
        x = as_halves(5)
        with pytest.raises(UninitializedRead, match=r"of PyTorch reads 3 of \d elements that no"):
            READS[name](x)
    with enabled():
        READS[name](as_halves())
    with enabled(uninitialized="allow"), contextlib.suppress(AssertionError):
        READS[name](as_halves(5))


def test_pytorch_reads_it_under_two_pretended_gpus():
    """Two checkers nest, as under the pytest plugin: one for imported modules, one for the test."""
    with fake_gpu(), enabled(), pytest.raises(UninitializedRead, match="reads 3 of 8"):
        READS["equal"](as_halves(5))


def test_what_pytorch_may_do():
    """It may read what is written, compute with all of it, and write to it."""
    with enabled():
        x = as_halves(5)
        assert x[:5].sum() == 10 and (x * 2)[:5].sum() == 20 and x.cpu()[:5].sum() == 10
        x[5:] = 0
        assert x.sum() == 10
        empty().sum()
    x.sum()


@triton.jit
def selected_kernel(x_ptr, out_ptr, chosen):
    i = tl.arange(0, 8)
    tl.store(out_ptr + i, tl.load(x_ptr + i), mask=i < chosen)


def test_memory_without_elements():
    with fake_gpu(), enabled():
        selected_kernel[(1,)](torch.ones(8, device="cuda"), torch.empty(0, device="cuda"), 0)
