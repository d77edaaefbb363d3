"""`Rung`: an implementation of an operator, what it needs (`Requires`), and what calls it can take.

ladder.py lists all rungs; public calls, the lab and tests ask them. A function `..._problem` gives
None, or what is in the way: most say "needs X, got Y".
"""

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

from gdpa_kernels.calling import compiler
from gdpa_kernels.calling.recipe import WorkList

PACKAGE = Path(__file__).parents[1]
DIRECTIONS = ("forward", "backward")
_OPTIONAL: dict[str, Callable] = {
    "default_config": lambda *_: None,
    "work_list_recipe": lambda *_: None,
    "call_problem": lambda _: None,
    "is_deterministic": lambda _: True,
    "workspace": lambda _: 0,
}
"""Functions that the module of a rung may have, and what stands in for one that it lacks."""
MUCH_MEMORY = 16
"""Times the arguments' bytes: a padded batch of head_dim 128 takes them from 2,800 tokens a
sequence on, if all are as long."""
AMD = (0, 0)
"""Stands for the capability of AMD's GPUs, whose own, 9.4, would read as one of NVIDIA's."""


@functools.cache
def _gpu_capability(index: int) -> tuple[int, int]:
    return AMD if torch.version.hip else torch.cuda.get_device_capability(index)


def capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a device, or of the one emulated; None without a GPU."""
    if device.type == "cuda":
        index = device.index
        return _gpu_capability(torch.cuda.current_device() if index is None else index)
    emulator = sys.modules.get("tritonemu")  # who enables it has imported it
    if device.type == "cpu" and emulator is not None and emulator.is_enabled():
        return divmod(int(emulator.current_arch().removeprefix("sm_")), 10)
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
    paths = [PACKAGE / operator / folder / f"{impl}.py" for folder in ("kernels", "ladder", "")]
    return next(filter(Path.exists, paths), paths[-1])


def tma_problem(tensor: torch.Tensor) -> str | None:
    """What a TMA descriptor needs of `tensor` `[total, num_heads, head_dim]`, or None."""
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
    fit in a program's memory only up to less than head_dim_max. aligned: TMA reads q, k and v
    (`tma_problem`). extras: the options that it takes of those that few do (`Batch.extras`). tlx:
    it is written in TLX, which fbtriton's compiler has.
    """

    capability: tuple[int, int] | None = None
    only_major: bool = False
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    head_dim_multiple: int = 1
    head_dim_max: int = 256
    head_dim_max_of: Mapping[int, int] = field(default_factory=dict, hash=False)
    aligned: bool = False
    extras: tuple[str, ...] = ()
    tlx: bool = False

    @functools.cached_property
    def devices(self) -> str:
        """The devices that run it, in words: "sm_80 or newer", "sm_90", "any"."""
        if self.capability is None:
            return "any"
        return "sm_{}{}".format(*self.capability) + ("" if self.only_major else " or newer")

    def device_problem(self, device: torch.device) -> str | None:
        """What it needs of `device`, or None. The CPU counts inside `tritonemu.enabled()`."""
        if self.capability is None:
            return None
        if device.type == "cuda":
            got = capability(device)
            if got >= self.capability and not (self.only_major and got[0] != self.capability[0]):
                return None
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

    def tensors_problem(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
        """What it needs of these tensors `[total, num_heads, head_dim]`, or None."""
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
            problem = tma_problem(tensor)
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
    - `work_list_recipe(batch, config)`: the `Recipe` of the work list that a direction takes as
      `work_list=`, with that config; it makes the list itself where none is given;
    - `call_problem(batch)`: what it needs of a call that the field `requires` cannot say, or None;
    - `is_deterministic(batch)`: without it the rung always is;
    - `partial_sums(batch)`, of the one that reads pages: what forward adds up, of `config.splits`
      parts of the keys; takes `config=` and `work_list=`;
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
        choose = self._function("default_config", module)
        return choose(direction, batch) if len(self.directions) > 1 else choose(batch)

    def recipe(self, batch: Any, config: Any, module: ModuleType | None = None) -> Any:
        """The `Recipe` of its work list for a call; None if it needs none."""
        return self._function("work_list_recipe", module)(batch, config)

    def work_list(self, batch: Any, config: Any, module: ModuleType | None = None) -> WorkList:
        """Its work list for a call, made on the device; empty if it needs none."""
        recipe = self.recipe(batch, config, module)
        return () if recipe is None else recipe.make(*batch.offsets)

    def device_problem(self, device: torch.device) -> str | None:
        """Why `device` cannot run it, or None; Triton that cannot compile it, and a module that
        cannot be imported, included."""
        return self.requires.device_problem(device) or self.unavailable(device)

    def unavailable(self, device: torch.device) -> str | None:
        """Why this environment cannot run it on a device that could, or None."""
        if self.requires.capability is None:
            return None
        # The emulator asks Triton for names alone.
        problem = compiler.problem(self.requires.tlx) if device.type == "cuda" else None
        if problem is not None:
            return problem
        try:
            self.module()
        except Exception as error:
            return f"importing it failed: {type(error).__name__}: {error}"
        return None

    def call_problem(self, batch: Any) -> str | None:
        """What it needs of a call, or None; the device aside."""
        problem = self._requires_problem(batch)
        return self._function("call_problem")(batch) if problem is None else problem

    def _requires_problem(self, batch: Any) -> str | None:
        """`call_problem`, as far as `requires` says it."""
        problem = self.requires.tensors_problem(batch.q, batch.k, batch.v)
        for option, needed in batch.extras.items():
            if problem is None and option not in self.requires.extras:
                problem = f"needs {needed}"
        return problem

    def suits(self, batch: Any) -> bool:
        """Whether it runs a call, and needs no memory that is out of proportion: `auto` asks all
        rungs that may be faster, so the questions that are quickly answered come first."""
        if self.requires.device_problem(batch.device) is not None:
            return False
        try:
            if self.requires.tlx and batch.device.type == "cuda" and compiler.tlx_problem():
                return self._passed_over(batch)
            module = self.module()
        except Exception:
            return self._passed_over(batch)
        call_problem = getattr(module, "call_problem", None)
        if (call_problem is not None and call_problem(batch)) or self._requires_problem(batch):
            return False
        return not hasattr(module, "workspace") or not self.needs_much_memory(batch)

    def _passed_over(self, batch: Any) -> bool:
        """False; warned of where nothing but the environment is in the way of a call, as far as
        what can be imported tells."""
        try:
            problem = self.call_problem(batch)
        except Exception:
            problem = self._requires_problem(batch)
        if problem is None:
            compiler.warn(self.impl, self.unavailable(batch.device) or "")
        return False

    def needs_much_memory(self, batch: Any) -> bool:
        """Whether a call takes far more memory than its arguments have."""
        arguments = sum(x.numel() for x in (batch.q, batch.k, batch.v)) * batch.q.element_size()
        return self._function("workspace")(batch) > MUCH_MEMORY * arguments

    def is_deterministic(self, batch: Any) -> bool:
        """Whether its results for a call are the same, bit for bit, in every run."""
        return self._function("is_deterministic")(batch)

    def _function(self, name: str, module: ModuleType | None = None) -> Callable:
        return getattr(module or self.module(), name, _OPTIONAL[name])


@functools.cache
def _parameters(function: Callable) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
