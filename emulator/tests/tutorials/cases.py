"""Shared by the lists of tutorial kernels: how to import one, what a case is, how it is run.

The kernels are those of the installed fbtriton, unmodified, from its folder of TLX tutorials. A
case builds the launch that the tutorial's own host function makes, in small, on CPU tensors.
"""

import functools
import importlib.util
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.tools.tensor_descriptor import TensorDescriptor

import tritonemu
from emulator.tests.checking import allocate

triton.set_allocator(allocate)  # some tutorials make descriptors on the device
FOLDER = Path(triton.__file__).parent / "language/extra/tlx/tutorials"
LOG2_E = 1 / math.log(2)

Shape = tuple[int, int, int]
"""Shape of a product: rows, columns, and the depth that is summed over."""


class _Driver:
    """Stand-in for the active driver while the tutorials are imported."""

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 32)

    def get_current_device(self) -> int:
        return 0


@functools.cache
def load(file: str) -> ModuleType:
    """The tutorial `file`, a path below the folder of tutorials, as a module; needs no GPU.

    While it is imported, triton has a driver that names the CPU, and old calls are not warned of.
    """
    path = FOLDER / file
    name = "tlx_tutorial_" + path.stem.replace("-", "_")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with mock.patch.object(triton.runtime.driver, "_active", _Driver()), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        spec.loader.exec_module(module)
    return module


@dataclass
class Prepared:
    """One launch: the arguments of `tritonemu.run`, and `check`, which inspects the outputs."""

    kernel: Any
    grid: Any
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    check: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Case:
    """A launch to build afresh for every run; `arch` is what the tutorial's guard asks for."""

    name: str
    arch: str
    build: Callable[[], Prepared]


def case(name: str, arch: str, build: Callable[..., Prepared], *args: Any, **kwargs: Any) -> Case:
    return Case(name, arch, functools.partial(build, *args, **kwargs))


def run_case(case: Case, schedule: str | int = "modelled", **options: Any) -> tritonemu.Report:
    """Build, run and check `case`; `options` go to `tritonemu.run`."""
    launch = case.build()
    report = tritonemu.run(
        launch.kernel, launch.grid, *launch.args,
        arch=case.arch, schedule=schedule, **options, **launch.kwargs,
    )  # fmt: skip
    launch.check()
    return report


def normal(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Standard normal numbers of shape `shape`, the same in every run."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def unwritten(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """An output of NaN, so that an element which the kernel leaves out is found."""
    return torch.full(shape, torch.nan, dtype=dtype)


def assert_near(what: str, result: torch.Tensor, exact: torch.Tensor, same: torch.Tensor) -> None:
    """Raise AssertionError where `result` is further from `exact` than its dtype explains.

    exact: the mathematics in fp64. same: the same mathematics in PyTorch with the kernel's dtypes.
    Allowed are twice the largest error of `same`, and one rounding to the dtype of `result`.
    """
    error = (result.double() - exact).abs()
    allowed = 2 * (same.double() - exact).abs().max()
    allowed = allowed + torch.finfo(result.dtype).eps / 2 * exact.abs()
    wrong = ~(error <= allowed)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are wrong; the first, {at}, "
            f"is {result[at].item():.6g}, expected {exact[at].item():.6g} "
            f"+- {allowed[at].item():.2g}"
        )


def describe(x: torch.Tensor, block: list[int] | None = None) -> TensorDescriptor:
    """A descriptor of all of `x`; block None: the configuration's hook sets it."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block or [1] * x.dim())


def matrices(
    shape: Shape, dtype: torch.dtype = torch.float16, out: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A [rows, depth], B [depth, columns] and an unwritten C [rows, columns]; out: dtype of C."""
    rows, columns, depth = shape
    a, b = normal(0, rows, depth, dtype=dtype), normal(1, depth, columns, dtype=dtype)
    return a, b, unwritten(rows, columns, dtype=out or dtype)


def count_tiles(shape: Shape, block_m: int, block_n: int) -> int:
    return triton.cdiv(shape[0], block_m) * triton.cdiv(shape[1], block_n)


def check_product(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    assert_near("C", c, a.double() @ b.double(), (a.float() @ b.float()).to(c.dtype))


def check_splits(a: torch.Tensor, b: torch.Tensor, splits: torch.Tensor, part: int) -> None:
    """Check that each of the products `splits` is over the next `part` of the depth."""
    for i, result in enumerate(splits):
        keys = slice(i * part, (i + 1) * part)
        check_product(a[:, keys], b[keys], result)


def hidden(rows: int) -> torch.Tensor:
    """Mask of the keys (columns) that a causal query (row) must not see."""
    return torch.ones(rows, rows, dtype=torch.bool).triu(1)


def scores(q: torch.Tensor, k: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    """The logits, [batch, heads, queries, keys], in fp64."""
    s = q.double() @ k.double().mT * scale
    return s.masked_fill(hidden(q.shape[2]), -torch.inf) if causal else s


def online_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over `block` keys at a time in fp32, with P rounded to the dtype of V.

    q, k, v: [batch, heads, rows, head_dim]. Returns the output and the log2 of the softmax sums.
    """
    rows = q.shape[2]
    top = torch.full(q.shape[:3], -torch.inf)
    total = torch.zeros(q.shape[:3])
    acc = torch.zeros(q.shape)
    for start in range(0, rows, block):
        keys, values = (x[:, :, start : start + block].float() for x in (k, v))
        s = q.float() @ keys.mT * (scale * LOG2_E)
        if causal:
            s = s.masked_fill(hidden(rows)[:, start : start + block], -torch.inf)
        new_top = torch.maximum(top, s.amax(-1))
        p = torch.exp2(s - new_top[..., None])
        decay = torch.exp2(top - new_top)
        total = total * decay + p.sum(-1)
        acc = acc * decay[..., None] + p.to(v.dtype).float() @ values
        top = new_top
    return (acc / total[..., None]).to(q.dtype), top + total.log2()
