"""Shared by the lists of tutorial kernels: how to import one, what a case is, how it is run.

The kernels are those of the installed fbtriton, unmodified, from its folder of TLX tutorials. A
case builds the launch that the tutorial's own host function makes, in small, on CPU tensors.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import triton
import triton.language.extra.tlx as tlx
from triton.backends.compiler import GPUTarget

import tritonemu

FOLDER = Path(tlx.__file__).parent / "tutorials"


class _Driver:
    """What the tutorials ask of the active driver while they are imported."""

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 32)

    def get_current_device(self) -> int:
        return 0


@functools.cache
def load(file: str) -> ModuleType:
    """The tutorial `file`, a path below the folder of tutorials, as a module; needs no GPU.

    While it is imported, triton has a driver that names the CPU.
    """
    path = FOLDER / file
    name = "tlx_tutorial_" + path.stem.replace("-", "_")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with mock.patch.object(triton.runtime.driver, "_active", _Driver()):
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


def run_case(case: Case, schedule: str | int = "modelled", **options: Any) -> tritonemu.Report:
    """Build, run and check `case`; `options` go to `tritonemu.run`."""
    launch = case.build()
    report = tritonemu.run(
        launch.kernel,
        launch.grid,
        *launch.args,
        arch=case.arch,
        schedule=schedule,
        **options,
        **launch.kwargs,
    )
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
