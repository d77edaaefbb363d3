"""A rung: what an implementation is and needs, and why it cannot take a call."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

PACKAGE = Path(__file__).parents[1]
DIRECTIONS = ("forward", "backward")
_DEFAULTS: dict[str, Callable] = {
    "default_config": lambda *_: None,
    "plan_schedule": lambda *_: None,
    "requires": lambda _: None,
    "is_deterministic": lambda _: True,
    "workspace": lambda _: 0,
}
"""What stands in for a function that a rung's module lacks."""


MUCH = 16
"""Times the arguments' bytes: a padded batch of head_dim 128 takes them from 2,800 tokens a
sequence on, if all are as long."""

AMD = (0, 0)
"""Stands for the capability of AMD's GPUs, whose own, 9.4, would read as one of NVIDIA's."""


@functools.cache
def _capability(device: int) -> tuple[int, int]:
    return AMD if torch.version.hip else torch.cuda.get_device_capability(device)


def _of_gpu(device: torch.device) -> tuple[int, int]:
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a device, or of the one emulated; None without a GPU."""
    if device.type == "cuda":
        return _of_gpu(device)
    tritonemu = sys.modules.get("tritonemu")  # not imported: not enabled
    if device.type == "cpu" and tritonemu is not None and tritonemu.is_enabled():
        return divmod(int(tritonemu.current_arch().removeprefix("sm_")), 10)
    return None


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """As records and rankings name it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def _module(impl: str, operator: str) -> ModuleType:
    """The module of an implementation; an import that failed is tried again."""
    path = _path(impl, operator).relative_to(PACKAGE).with_suffix("")
    return importlib.import_module(".".join(("gdpa_kernels", *path.parts)))


@functools.cache
def _path(impl: str, operator: str) -> Path:
    places = [PACKAGE / operator / folder / f"{impl}.py" for folder in ("kernels", "ladder", "")]
    return next(filter(Path.exists, places), places[-1])


def unreadable(tensor: torch.Tensor) -> str | None:
    """What a TMA descriptor needs of `tensor` `[total, num_heads, head_dim]` and does not get, or
    None."""
    row_stride, head_stride, stride = tensor.stride()
    units, beyond = 16 // tensor.element_size(), tensor.data_ptr() % 16
    rows = stride == 1 and row_stride > 0 < head_stride
    if (rows and not (row_stride % units or head_stride % units or beyond)) or not tensor.numel():
        return None
    if beyond:
        return f"at a multiple of 16 bytes, got an address {beyond} bytes beyond"
    return (
        "with contiguous rows whose strides are positive multiples of 16 bytes, "
        f"got strides {tensor.stride()}"
    )


@dataclass(frozen=True)
class Requires:
    """What an implementation needs of the device and of the call.

    capability: the least compute capability; with only_major, no later major version will do.
    head_dim_max_of: the most head_dim on devices of a major compute capability, where its tiles
    fit in a program's memory only up to less than head_dim_max. extras: the options that it takes
    of those that few do (`Heads.extras`).
    """

    capability: tuple[int, int] | None = None
    only_major: bool = False
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    head_dim_multiple: int = 1
    head_dim_max: int = 256
    head_dim_max_of: Mapping[int, int] = field(default_factory=dict, hash=False)
    aligned: bool = False
    extras: tuple[str, ...] = ()

    @functools.cached_property
    def devices(self) -> str:
        """The devices that run it, in words: "sm_80 or newer", "sm_90", "any"."""
        if self.capability is None:
            return "any"
        return "sm_{}{}".format(*self.capability) + ("" if self.only_major else " or newer")

    def of_device(self, device: torch.device) -> str | None:
        """Why `device` cannot run it, or None. The CPU counts inside `tritonemu.enabled()`."""
        if self.capability is None:
            return None
        got = None
        if device.type == "cuda":
            got = _of_gpu(device)
            if got >= self.capability and not (self.only_major and got[0] != self.capability[0]):
                return None
        if got is not None:
            other = "a GPU of AMD" if got == AMD else "sm_{}{}".format(*got)
            return f"needs {self.devices}, got {other}"
        if device.type == "cpu":
            emulator = sys.modules.get("tritonemu")  # who enables it has imported it
            if emulator is not None and emulator.is_enabled():
                arch = emulator.current_arch()
                wrong = self.only_major and arch != self.devices
                return f"needs {self.devices}, got an emulated {arch}" if wrong else None
            return (
                f"needs tensors on a CUDA device of {self.devices}, got tensors on the CPU "
                "(inside `tritonemu.enabled()` the kernel runs on the CPU)"
            )
        return f"needs a CUDA device of {self.devices}, got {device}"

    def of_call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
        """Why it cannot take these tensors `[total, num_heads, head_dim]`, or None."""
        dtype = dtype_name(q.dtype)
        if dtype not in self.dtypes:
            return f"needs dtype {' or '.join(self.dtypes)}, got {dtype}"
        head_dim, head_dim_max, where = q.shape[-1], self.head_dim_max, ""
        got = capability(q.device) if self.head_dim_max_of else None
        if got is not None and got[0] in self.head_dim_max_of:
            head_dim_max, where = self.head_dim_max_of[got[0]], " on sm_{}{}".format(*got)
        if head_dim > head_dim_max or head_dim % self.head_dim_multiple:
            return (
                f"needs a head_dim of at most {head_dim_max}{where} that is a multiple of "
                f"{self.head_dim_multiple}, got {head_dim}"
            )
        if not self.aligned:
            return None
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            problem = unreadable(tensor)
            if problem is not None:
                return f"needs {name} {problem}"
        return None


@dataclass(frozen=True)
class Rung:
    """One implementation on the ladder of its operator.

    Its module has a function of each direction: `forward(batch)`, of the operator's `Batch`, and
    `backward(grad_out, batch)`; in block attention forward returns (out, saved), and backward takes
    `saved` too. It may have:

    - `default_config(batch)`: launch constants that a direction takes as `config=`; of a rung of
      both directions `default_config(direction, batch)`;
    - `plan_schedule(batch, config)`: the `Recipe` of a work list that it takes as `schedule=`,
      with that config;
    - `requires(batch)`: what a call must meet that the field `requires` cannot say;
    - `is_deterministic(batch)`: without it the rung always is;
    - `workspace(batch)`: bytes that a call takes beside its arguments and results; without it they
      are at most a few times those.

    A backward that takes `needs=` computes only what it asks for of dq, dk and dv. saves: forward
    keeps tensors for backward, `empty_saved(batch)` in shape and dtype. is_rewrite: it has a new
    structure, and its step from its predecessor may be larger than others. batch_invariant: what
    one key gives to the shared queries has the same bits alone and beside any others.
    """

    impl: str
    title: str
    idea: str
    predecessor: str | None
    requires: Requires
    operator: str = "gdpa"
    directions: tuple[str, ...] = ("forward",)
    saves: bool = False
    is_rewrite: bool = False
    batch_invariant: bool = False

    @property
    def path(self) -> Path:
        """Its source file."""
        return _path(self.impl, self.operator)

    @property
    def is_lesson(self) -> bool:
        """Whether it only teaches: "auto" takes it for no call."""
        return self.path.parent.name == "ladder"

    @property
    def lesson(self) -> Path:
        """The file that teaches it: the lesson view beside a product, else its own."""
        view = self.path.parents[1] / "ladder" / self.path.name
        return view if view.exists() else self.path

    def module(self) -> ModuleType:
        """Its module, imported when first asked for."""
        return _module(self.impl, self.operator)

    def takes(self, direction: str, name: str) -> bool:
        """Whether its function of a direction has an argument of that name."""
        return name in _parameters(getattr(self.module(), direction))

    def config(self, batch: Any, direction: str, module: ModuleType | None = None) -> Any:
        """Its launch constants for a call, a frozen dataclass; None if it has none. `module`: a
        changed one in place of its own."""
        choose = self._hook("default_config", module)
        return choose(direction, batch) if len(self.directions) > 1 else choose(batch)

    def schedule(
        self, batch: Any, config: Any, module: ModuleType | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Its work list for a call, made on the device; empty if it needs none."""
        plan = self._hook("plan_schedule", module)(batch, config)
        return () if plan is None else plan.make(*batch.offsets)

    def plan(self, batch: Any, config: Any) -> Any:
        """The `Recipe` of its work list for a call; None if it needs none."""
        return self._hook("plan_schedule")(batch, config)

    def unavailable(self, device: torch.device) -> str | None:
        """Why `device` cannot run it, or None; a module that cannot be imported included."""
        problem = self.requires.of_device(device)
        if problem is None and self.requires.capability is not None:
            try:
                self.module()
            except Exception as error:
                return f"importing it failed: {type(error).__name__}: {error}"
        return problem

    def problem(self, batch: Any) -> str | None:
        """Why it cannot take a call, or None; the device aside."""
        problem = self._problem(batch)
        return self._hook("requires")(batch) if problem is None else problem

    def _problem(self, batch: Any) -> str | None:
        """`problem`, but for what only its module can say."""
        problem = self.requires.of_call(batch.q, batch.k, batch.v)
        for option, needed in batch.extras.items():
            if problem is None and option not in self.requires.extras:
                problem = f"needs {needed}"
        return problem

    def suits(self, batch: Any) -> bool:
        """Whether it runs a call, and needs no memory that is out of proportion: `auto` asks all
        rungs that may be faster, so the questions that are quickly answered come first."""
        if self.requires.of_device(batch.device) is not None:
            return False
        try:
            module = self.module()
        except Exception:
            return False
        requires = getattr(module, "requires", None)
        if (requires is not None and requires(batch)) or self._problem(batch):
            return False
        return not hasattr(module, "workspace") or not self.needs_much_memory(batch)

    def needs_much_memory(self, batch: Any) -> bool:
        """Whether a call takes far more memory than its arguments have."""
        arguments = sum(x.numel() for x in (batch.q, batch.k, batch.v)) * batch.q.element_size()
        return self._hook("workspace")(batch) > MUCH * arguments

    def is_deterministic(self, batch: Any) -> bool:
        """Whether its results for a call are the same, bit for bit, in every run."""
        return self._hook("is_deterministic")(batch)

    def _hook(self, name: str, module: ModuleType | None = None) -> Callable:
        return getattr(module or self.module(), name, _DEFAULTS[name])


@functools.cache
def _parameters(function: Callable) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
