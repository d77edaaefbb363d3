"""What tests of both operators do to the tensors of a call, and how they compare results."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from triton.runtime import driver

import tritonemu
from gdpa_lab.measuring import machine_code

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TENSORS = ("grad_out", "q", "k", "v")


def emulated(impl: str, **options):
    """The context in which an implementation runs on the CPU; those of Blackwell begin with b."""
    return tritonemu.enabled("sm_100" if impl.startswith("b") else "sm_90", **options)


@contextlib.contextmanager
def pretended(arch: int) -> Iterator[None]:
    """Within it Triton compiles what it is told to run, for sm_<arch>."""
    before = driver._active
    machine_code.pretend(arch)
    try:
        yield
    finally:
        driver._active = before


def kernels_run(impl: str = ""):
    """The context in which kernels of an implementation run on DEVICE."""
    return contextlib.nullcontext() if DEVICE == "cuda" else emulated(impl)


def ends(*values: int) -> torch.Tensor:
    """cu_seqlens of these values, right or wrong."""
    return torch.tensor(values, dtype=torch.int32)


def required(call: dict, names: str = "qkv") -> dict:
    """The same call, of leaves that require gradients."""
    return call | {name: call[name].detach().clone().requires_grad_() for name in names}


def cast(call: dict, dtype: torch.dtype) -> dict:
    """The same call, q, k and v in `dtype`."""
    return call | {name: call[name].detach().to(dtype) for name in "qkv"}


def saved_by(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The result of a call, and what it saves for backward."""
    saved: list[torch.Tensor] = []
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with keep:
        return call(), saved


def assert_same_bits(
    found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor], note: object = None
) -> None:
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), (i, note)


class Seen(TorchDispatchMode):
    """The operators that are called, with their arguments."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[torch._ops.OpOverload, tuple, dict]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def names(self, namespace: str = "gdpa_kernels") -> list[str]:
        return [op._opname for op, *_ in self.calls if op.namespace == namespace]


def opcheck(call: Callable[[], object], expected: Iterable[str], **options) -> None:
    """`torch.library.opcheck` of our operators, `expected`, in the order in which a call calls
    them, on its arguments."""
    with Seen() as seen:
        call()
    assert seen.names() == [*expected]
    for op, args, kwargs in seen.calls:
        if op.namespace == "gdpa_kernels":
            args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
            torch.library.opcheck(op, args, kwargs, **options)


@contextlib.contextmanager
def new_memory(made: Callable[[torch.Tensor], object]) -> Iterator[None]:
    """`made` is called on what `new_empty` gives."""
    empty = torch.Tensor.new_empty

    def new_empty(self, *shape, **options):
        memory = empty(self, *shape, **options)
        made(memory)
        return memory

    with mock.patch.object(torch.Tensor, "new_empty", new_empty):
        yield


def full_of_nan() -> contextlib.AbstractContextManager[None]:
    """New memory is full of NaN, which shows what a kernel does not write."""
    return new_memory(lambda memory: memory.fill_(float("nan")))


def at_an_odd_address(x: torch.Tensor) -> torch.Tensor:
    """x, contiguous, but at an address that is no multiple of 16 bytes."""
    moved = x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    assert moved.is_contiguous() and moved.data_ptr() % 16
    return moved


GRADIENTS = {
    "sum": lambda x: x[:1, :1, :1].expand_as(x),
    "mean of heads": lambda x: x[:, :1].expand_as(x),
    "one row": lambda x: x[:1].expand_as(x),
    "reversed": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "odd address": at_an_odd_address,
}
"""What autograd may hand over: `out.sum().backward()` gives strides (0, 0, 0), others repeat a head
or a row or have rows that are not contiguous, or TMA cannot read what is contiguous."""


def readable(call: dict) -> dict:
    """Other strides that TMA can read: wider rows, heads before tokens; a grad_out that it
    cannot."""
    q, v, grad = call["q"], call["v"], call["grad_out"]
    wide = q.new_full((q.shape[0], q.shape[1] + 1, q.shape[2] + 8), float("nan"))
    wide[:, 1:, 8:] = q
    return call | {
        "q": wide[:, 1:, 8:],
        "k": call["k"].transpose(0, 1).contiguous().transpose(0, 1),
        "v": torch.stack((v, v.flip(0)), 1)[:, 0],
        "grad_out": grad.transpose(1, 2).contiguous().transpose(1, 2),
    }


def unreadable(call: dict) -> dict:
    """Strides between columns too, and an address that is no multiple of 16 bytes."""
    q, k = call["q"], call["k"]
    return call | {
        "q": q.transpose(0, 2).contiguous().transpose(0, 2),
        "k": torch.stack((k, k), -1).flatten(-2)[..., ::2],
        "v": at_an_odd_address(call["v"]),
    }
