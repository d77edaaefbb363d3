"""The rungs of the ladder as data: order, idea, predecessor, needs; and the diffs between them.

The number of a rung is its file, its `impl`, its chapter and its row in every table.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

PACKAGE = Path(__file__).parents[1]


@functools.cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _of_gpu(device: torch.device) -> tuple[int, int]:
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


def capability(device: torch.device) -> int | None:
    """The major compute capability of a device, or of the one emulated; None without a GPU."""
    if device.type == "cuda":
        return _of_gpu(device)[0]
    emulator = sys.modules.get("gdpa_kernels.emulator")  # not imported: not enabled
    if device.type == "cpu" and emulator is not None and emulator.is_enabled():
        return int(emulator.current_arch().removeprefix("sm_")) // 10
    return None


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """As records and rankings name it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def _module(impl: str, operator: str = "gdpa") -> ModuleType:
    """The module of an implementation; an import that failed is tried again."""
    return importlib.import_module(f"gdpa_kernels.{operator.removesuffix('_backward')}.{impl}")


def unreadable(tensor: torch.Tensor) -> str | None:
    """What a TMA descriptor needs of `tensor` `[total, num_heads, head_dim]` and does not get, or
    None."""
    if tensor.numel() == 0:
        return None
    row_stride, head_stride, stride = tensor.stride()
    units = 16 // tensor.element_size()
    if stride != 1 or min(row_stride, head_stride) < 1 or row_stride % units or head_stride % units:
        return (
            "with contiguous rows whose strides are positive multiples of 16 bytes, "
            f"got strides {tensor.stride()}"
        )
    if tensor.data_ptr() % 16:
        return f"at a multiple of 16 bytes, got an address {tensor.data_ptr() % 16} bytes beyond"
    return None


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
        """Why `device` cannot run it, or None. The CPU counts inside `emulator.enabled()`."""
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
            from gdpa_kernels import emulator  # needs triton, which the doctor must survive without

            if emulator.is_enabled():
                arch = emulator.current_arch()
                wrong = self.only_major and arch != name
                return f"needs {name}, got an emulated {arch}" if wrong else None
            return (
                f"needs tensors on a CUDA device of {name}{newer}, got tensors on the CPU "
                "(inside `gdpa_kernels.emulator.enabled()` the kernel runs on the CPU)"
            )
        return f"needs a CUDA device of {name}{newer}, got {device}"

    def of_call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
        """Why it cannot take these tensors `[total, num_heads, head_dim]`, or None."""
        dtype = dtype_name(q.dtype)
        if dtype not in self.dtypes:
            return f"needs dtype {' or '.join(self.dtypes)}, got {dtype}"
        head_dim, head_dim_max, where = q.shape[-1], self.head_dim_max, ""
        if self.head_dim_max_of and (major := capability(q.device)) in self.head_dim_max_of:
            head_dim_max, where = self.head_dim_max_of[major], f" on sm_{major}0"
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
    - "schedule": `make_schedule(batch, config)`, a list of work that it takes as `schedule=`;
    - "requires": `requires(batch)`, what a call must have that the field `requires` cannot say;
    - "needs": `backward` computes only what `needs=` asks for of dq, dk and dv;
    - "saved": `forward` keeps tensors for `backward`, `empty_saved(batch)` in shape and dtype;
    - "is_deterministic": `is_deterministic(batch)`; without it the rung always is.

    The ladder "gdpa_backward" lives in gdpa's folder, beside the forward rungs.
    """

    impl: str
    title: str
    idea: str
    predecessor: str | None
    requires: Requires
    operator: str = "gdpa"
    has: frozenset[str] = frozenset()

    @property
    def path(self) -> Path:
        """Its source file."""
        return PACKAGE / self.operator.removesuffix("_backward") / f"{self.impl}.py"

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
        """Its list of work for a call, made on the device; None if it needs none."""
        if "schedule" not in self.has:
            return None
        return (module or self.module()).make_schedule(batch, config)

    def problem(self, batch: Any) -> str | None:
        """Why it cannot take a call, or None; the device aside."""
        found = self.requires.of_call(batch.q, batch.k, batch.v)
        if found is None and "requires" in self.has:
            found = self.module().requires(batch)
        return found

    def is_deterministic(self, batch: Any) -> bool:
        """Whether its results for a call are the same, bit for bit, in every run."""
        return "is_deterministic" not in self.has or self.module().is_deterministic(batch)


_CONFIG = frozenset(("config",))
_LISTED = frozenset(("config", "schedule"))
_ALL_DTYPES = ("bfloat16", "float16", "float32")
_TMA = Requires(capability=(9, 0), head_dim_multiple=8, aligned=True)
_WGMMA = Requires(
    capability=(9, 0), only_major=True, head_dim_multiple=8, head_dim_max=128, aligned=True
)

REFERENCE = Rung(
    "reference",
    "the definition",
    "One sequence after another, in the dtype of its arguments.",
    None,
    Requires(dtypes=(*_ALL_DTYPES, "float64"), head_dim_max=2**31 - 1),
)

RUNGS: tuple[Rung, ...] = (
    Rung(
        "v0_eager",
        "eager PyTorch",
        "Pad the batch; two matrix products around an activation.",
        None,
        Requires(dtypes=(*_ALL_DTYPES, "float64"), head_dim_max=2**31 - 1),
    ),
    Rung(
        "v1_tiled",
        "one fused kernel",
        "Scores stay in registers; the batch stays jagged.",
        "v0_eager",
        Requires(capability=(8, 0), dtypes=_ALL_DTYPES),
        has=_CONFIG,
    ),
    Rung(
        "v2_tma",
        "copies by TMA",
        "The copy engine addresses and clips.",
        "v1_tiled",
        _TMA,
        has=_CONFIG,
    ),
    Rung(
        "v3_persistent",
        "a list of tiles",
        "Resident programs walk a schedule of real tiles.",
        "v2_tma",
        _TMA,
        has=_LISTED,
    ),
    Rung(
        "v4_warp_specialized",
        "roles for warps",
        "One role copies, two roles compute, barriers between them.",
        "v2_tma",
        _WGMMA,
        has=_CONFIG,
    ),
    Rung(
        "v5_pingpong",
        "products beside activations",
        "The next block's scores are issued before this block's P V.",
        "v4_warp_specialized",
        _WGMMA,
        has=_CONFIG,
    ),
    Rung(
        "v6a_persistent",
        "resident programs",
        "Programs walk a list; copies run ahead, stores run behind.",
        "v5_pingpong",
        _WGMMA,
        has=_LISTED,
    ),
    Rung(
        "v6b_stream",
        "one stream of tiles",
        "The next tile's first scores are issued before this one's last P V.",
        "v6a_persistent",
        _WGMMA,
        has=_LISTED,
    ),
    Rung(
        "v6_short_kv",
        "short K and V stay",
        "K and V that fit are fetched once; Q streams by.",
        "v6b_stream",
        _WGMMA,
        has=_LISTED,
    ),
    Rung(
        "v7_packed",
        "two scores in one instruction",
        "GELU and SiLU in pairs of bf16; their factor moves to the output.",
        "v6_short_kv",
        _WGMMA,
        has=_LISTED,
    ),
    Rung(
        "v8_own_waits",
        "waits as written",
        "The compiler adds no wait of its own to the loop.",
        "v7_packed",
        _WGMMA,
        has=_LISTED,
    ),
)


BLOCK_REFERENCE = Rung(
    "reference",
    "the definition",
    "Whole blocks at once, in the dtype of its arguments.",
    None,
    Requires(dtypes=(*_ALL_DTYPES, "float64"), head_dim_max=2**31 - 1),
    operator="block_attention",
)

BLOCK_RUNGS: tuple[Rung, ...] = (
    Rung(
        "v0_flash",
        "FlashAttention-2 on this mask",
        "Key loop, online softmax, log-sum-exp, delta, two backward kernels.",
        None,
        Requires(capability=(8, 0), head_dim_multiple=16),
        operator="block_attention",
        has=_LISTED | {"saved"},
    ),
    Rung(
        "v1_one_tile",
        "a block is one tile",
        "Nothing is left to carry from tile to tile, nor to save for backward.",
        "v0_flash",
        Requires(capability=(8, 0), dtypes=_ALL_DTYPES, head_dim_multiple=16),
        operator="block_attention",
        has=_LISTED,
    ),
    Rung(
        "v2_slab",
        "all heads of a block",
        "Programs walk slabs of memory; the copy engine addresses and clips.",
        "v1_one_tile",
        Requires(capability=(9, 0), head_dim_multiple=8, head_dim_max=128, aligned=True),
        operator="block_attention",
        has=_LISTED | {"requires"},
    ),
    Rung(
        "v3_warp_specialized",
        "roles for warps",
        "One role copies, math roles compute; results leave through dead input slots.",
        "v2_slab",
        _WGMMA,
        operator="block_attention",
        has=_LISTED | {"requires"},
    ),
    Rung(
        "v4_rotary",
        "rotary in the kernels",
        "Tiles are turned in shared memory, gradients in registers on their way out.",
        "v3_warp_specialized",
        _WGMMA,
        operator="block_attention",
        has=_LISTED | {"requires"},
    ),
    Rung(
        "v4a_turning_role",
        "a role that turns",
        "Tiles of one item are turned while another's are multiplied.",
        "v4_rotary",
        _WGMMA,
        operator="block_attention",
        has=_LISTED | {"requires"},
    ),
)

STUDIES = {
    "eliminations": Rung(
        "eliminations",
        "what v1_one_tile leaves out",
        "Each piece of the general kernel, put back.",
        "v1_one_tile",
        Requires(capability=(8, 0)),
        operator="block_attention",
        has=_LISTED | {"requires"},
    )
}
"""What is measured like a rung of block attention and stands on no ladder."""

_PASS = dataclasses.replace(_TMA, head_dim_max=128, head_dim_max_of={10: 64})

BACKWARD_REFERENCE = dataclasses.replace(REFERENCE, operator="gdpa_backward")

BACKWARD_RUNGS: tuple[Rung, ...] = (
    Rung(
        "v1_tiled_backward",
        "two fused kernels",
        "One owns keys, the other queries; nothing is read but q, k, v and the gradient.",
        None,
        Requires(capability=(8, 0), dtypes=_ALL_DTYPES),
        operator="gdpa_backward",
        has=frozenset(("config", "needs")),
    ),
    Rung(
        "v2_fused_backward",
        "one pass over the keys",
        "The owner of the keys multiplies dS by K too; the copy engine adds up dQ.",
        "v1_tiled_backward",
        _PASS,
        operator="gdpa_backward",
        has=frozenset(("config", "needs", "is_deterministic")),
    ),
    Rung(
        "v2a_ordered_backward",
        "additions in order",
        "One launch after another, each for some blocks of keys: deterministic.",
        "v2_fused_backward",
        _PASS,
        operator="gdpa_backward",
        has=frozenset(("config", "needs")),
    ),
    Rung(
        "v4_warp_specialized_backward",
        "roles for warps",
        "dK and dV stay in registers; dS is shared; each math role computes half of dQ.",
        "v2_fused_backward",
        dataclasses.replace(_WGMMA, head_dim_multiple=64),
        operator="gdpa_backward",
        has=_LISTED | {"is_deterministic"},
    ),
    Rung(
        "v5_short_kv_backward",
        "two programs own all keys",
        "dS crosses a cluster; dQ is complete where it is computed.",
        "v4_warp_specialized_backward",
        dataclasses.replace(_WGMMA, head_dim_multiple=128),
        operator="gdpa_backward",
        has=_LISTED | {"requires"},
    ),
)

LADDERS = {
    "gdpa": (REFERENCE, *RUNGS),
    "gdpa_backward": (BACKWARD_REFERENCE, *BACKWARD_RUNGS),
    "block_attention": (BLOCK_REFERENCE, *BLOCK_RUNGS),
}
_BY_IMPL = {(rung.operator, rung.impl): rung for rungs in LADDERS.values() for rung in rungs}


def impls(operator: str = "gdpa") -> list[str]:
    """The names that an operator accepts as `impl=` besides "auto"."""
    return [rung.impl for rung in LADDERS[operator]]


def rung(impl: str, operator: str = "gdpa") -> Rung:
    """The rung of that name. Raises ValueError naming the ones there are."""
    found = _BY_IMPL.get((operator, impl))
    if found is not None:
        return found
    known = ", ".join(impls(operator))
    raise ValueError(f"impl must be 'auto' or one of {known}, got {impl!r}")


class Availability(NamedTuple):
    """Whether this machine can run an implementation, and why or why not."""

    ok: bool
    reason: str


def availability(
    impl: str, device: torch.device | str | None = None, operator: str = "gdpa"
) -> Availability:
    """Whether `impl` runs on `device`: by default the first GPU, or the CPU where there is none."""
    if device is None:
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    requires = rung(impl, operator).requires
    problem = requires.of_device(device)
    if problem is not None:
        return Availability(False, problem)
    if requires.capability is not None:
        try:
            rung(impl, operator).module()
        except Exception as error:
            return Availability(False, f"importing it failed: {type(error).__name__}: {error}")
    where = "in the emulator" if requires.capability and device.type == "cpu" else f"on {device}"
    return Availability(True, f"runs {where}")


def diff(impl: str, context: int = 2, operator: str = "gdpa") -> str:
    """What changed from the predecessor's file to this rung's, as a unified diff."""
    current = rung(impl, operator)
    if current.predecessor is None:
        raise ValueError(f"impl must have a predecessor to differ from, got {impl!r}")
    before = rung(current.predecessor, operator)
    return "".join(
        difflib.unified_diff(
            before.path.read_text().splitlines(keepends=True),
            current.path.read_text().splitlines(keepends=True),
            fromfile=before.path.relative_to(PACKAGE).as_posix(),
            tofile=current.path.relative_to(PACKAGE).as_posix(),
            n=context,
        )
    )


def changed_lines(impl: str, operator: str = "gdpa") -> int:
    """Lines of code added plus removed against the predecessor, docstrings and blank lines
    aside."""
    current = rung(impl, operator)
    if current.predecessor is None:
        return 0
    before, after = (
        _code_lines(path) for path in (rung(current.predecessor, operator).path, current.path)
    )
    changes = difflib.ndiff(before, after)
    return sum(line[:2] in ("+ ", "- ") for line in changes)


def _code_lines(path: Path) -> list[str]:
    """The lines of a module after its opening docstring, blank ones dropped."""
    body = path.read_text().split('"""', 2)[2]
    return [line for line in body.splitlines() if line.strip()]
