"""A rung: what an implementation is and needs, and why it cannot take a call."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

PACKAGE = Path(__file__).parents[1]


@functools.cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


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
def _module(impl: str, operator: str = "gdpa") -> ModuleType:
    """The module of an implementation; an import that failed is tried again."""
    path = _path(impl, operator).relative_to(PACKAGE).with_suffix("")
    return importlib.import_module(".".join(("gdpa_kernels", *path.parts)))


@functools.cache
def _path(impl: str, operator: str) -> Path:
    room = PACKAGE / operator.removesuffix("_backward")
    places = [room / folder / f"{impl}.py" for folder in ("kernels", "ladder", "")]
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
    fit in a program's memory only up to less than head_dim_max.
    """

    capability: tuple[int, int] | None = None
    only_major: bool = False
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    head_dim_multiple: int = 1
    head_dim_max: int = 256
    head_dim_max_of: Mapping[int, int] = field(default_factory=dict, hash=False)
    aligned: bool = False

    def of_device(self, device: torch.device) -> str | None:
        """Why `device` cannot run it, or None. The CPU counts inside `tritonemu.enabled()`."""
        if self.capability is None:
            return None
        got = None
        if device.type == "cuda":
            got = _of_gpu(device)
            if got >= self.capability and not (self.only_major and got[0] != self.capability[0]):
                return None
        name = "sm_{}{}".format(*self.capability)
        newer = "" if self.only_major else " or newer"
        if got is not None:
            return f"needs {name}{newer}, got {'sm_{}{}'.format(*got)}"
        if device.type == "cpu":
            emulator = sys.modules.get("tritonemu")  # who enables it has imported it
            if emulator is not None and emulator.is_enabled():
                arch = emulator.current_arch()
                wrong = self.only_major and arch != name
                return f"needs {name}, got an emulated {arch}" if wrong else None
            return (
                f"needs tensors on a CUDA device of {name}{newer}, got tensors on the CPU "
                "(inside `tritonemu.enabled()` the kernel runs on the CPU)"
            )
        return f"needs a CUDA device of {name}{newer}, got {device}"

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

    Its module has `forward(batch)` of the operator's `Batch`, or `backward(grad_out, batch)`, or
    both, and what `has` names:

    - "config": `default_config(batch)`, launch constants that a direction takes as `config=`; in
      block attention `default_config(direction, batch)`;
    - "schedule": `make_schedule(batch, config)`, a work list that it takes as `schedule=`;
    - "requires": `requires(batch)`, what a call must meet that the field `requires` cannot say;
    - "needs": `backward` computes only what `needs=` asks for of dq, dk and dv;
    - "saved": `forward` keeps tensors for `backward`, `empty_saved(batch)` in shape and dtype;
    - "is_deterministic": `is_deterministic(batch)`; without it the rung always is.

    The ladder "gdpa_backward" lives in gdpa's folder, next to the forward rungs. is_rewrite: it has
    a new structure, and its step from its predecessor may be larger than others.
    """

    impl: str
    title: str
    idea: str
    predecessor: str | None
    requires: Requires
    operator: str = "gdpa"
    has: frozenset[str] = frozenset()
    is_rewrite: bool = False

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

    def config(
        self, batch: Any, direction: str = "forward", module: ModuleType | None = None
    ) -> Any:
        """Its launch constants for a call, a frozen dataclass; None if it has none. `module`: a
        changed one in place of its own."""
        if "config" not in self.has:
            return None
        choose = (module or self.module()).default_config
        return choose(direction, batch) if self.operator == "block_attention" else choose(batch)

    def schedule(
        self, batch: Any, config: Any, module: ModuleType | None = None
    ) -> tuple[torch.Tensor, ...] | None:
        """Its work list for a call, made on the device; None if it needs none."""
        if "schedule" not in self.has:
            return None
        return (module or self.module()).make_schedule(batch, config)

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
        found = self.requires.of_call(batch.q, batch.k, batch.v)
        if found is None and "requires" in self.has:
            found = self.module().requires(batch)
        return found

    def is_deterministic(self, batch: Any) -> bool:
        """Whether its results for a call are the same, bit for bit, in every run."""
        return "is_deterministic" not in self.has or self.module().is_deterministic(batch)
