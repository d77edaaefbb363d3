"""The emulator against a GPU: the same kernels on the same inputs, compared element by element.

What may differ: the order of fp32 sums inside an MMA, and approximate instructions. So
outputs must agree within one rounding of the output's dtype, beside the rounding of fp32 sums.
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

import tritonemu
from emulator.tests.tutorials import hopper
from emulator.tests.tutorials.cases import Case, Prepared
from gdpa_kernels import gdpa
from gdpa_kernels.calling import ladder
from gdpa_lab.measuring import record
from gdpa_lab.measuring.inputs import cu_seqlens
from gdpa_lab.measuring.session import Session
from notebooks.tools import _sanitizer


@dataclass(frozen=True)
class Agreement:
    """One output of one kernel on both: elements, those that differ, and the largest distance.

    roundings: the distance in units of one rounding of the output's largest value: the spacing of
    its dtype there. Smaller elements are sums of terms of that size, and so are their errors.
    """

    kernel: str
    output: str
    dtype: str
    elements: int
    different: int
    roundings: float


def compare(kernel: str, output: str, here: torch.Tensor, there: torch.Tensor) -> Agreement:
    """`here` from the emulator, `there` from the GPU; NaN must be where NaN is."""
    a, b = here.double().flatten(), there.double().flatten()
    if not torch.equal(a.isnan(), b.isnan()):
        raise AssertionError(f"{kernel}, {output}: NaN in different places")
    a, b = a[~a.isnan()], b[~b.isnan()]
    largest = float(torch.maximum(a.abs(), b.abs()).max()) if a.numel() else 1.0
    spacing = torch.finfo(here.dtype).eps * 2.0 ** math.floor(math.log2(largest))
    distance = (a - b).abs() / spacing
    dtype = str(here.dtype).removeprefix("torch.")
    worst = float(distance.max()) if distance.numel() else 0.0
    return Agreement(kernel, output, dtype, a.numel(), int((a != b).sum()), worst)


class _Moved:
    """CPU tensors and descriptors as copies on a device; those on one storage stay together."""

    def __init__(self, device: torch.device):
        self.device, self.storages = device, {}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, TensorDescriptor):
            return TensorDescriptor(
                self(value.base), value.shape, value.strides, value.block_shape, value.padding
            )
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        key = storage.data_ptr()
        if key not in self.storages:
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.storages[key] = flat.to(self.device)
        moved = self.storages[key].view(value.dtype)
        return moved.as_strided(value.shape, value.stride(), value.storage_offset())


def _launch(prepared: Prepared, device: torch.device) -> list[tuple[str, torch.Tensor]]:
    """Run on the device; the tensors among the arguments by name, on the CPU again."""
    kernel, kwargs = prepared.kernel, dict(prepared.kwargs)
    names = kernel.arg_names
    moved = _Moved(device)
    args = [moved(value) for value in prepared.args]
    if hasattr(kernel, "configs"):
        config = kernel.configs[0]
        kwargs |= config.all_kwargs()
        if config.pre_hook is not None:
            config.pre_hook({**dict(zip(names, args, strict=False)), **kwargs})
        kernel = kernel.fn
    kernel[prepared.grid](*args, **kwargs)
    torch.cuda.synchronize(device)
    arguments = [
        (name, getattr(value, "base", value)) for name, value in zip(names, args, strict=False)
    ]
    return [(name, value.cpu()) for name, value in arguments if isinstance(value, torch.Tensor)]


def compare_case(case: Case, device: torch.device) -> Iterator[Agreement]:
    """One tutorial kernel: every floating-point argument that it changes."""
    untouched, here, there = case.build(), case.build(), case.build()
    tritonemu.run(here.kernel, here.grid, *here.args, arch=case.arch, **here.kwargs)
    here.check()
    on_device = dict(_launch(there, device))
    for name, old, new in zip(here.kernel.arg_names, untouched.args, here.args, strict=False):
        old, new = getattr(old, "base", old), getattr(new, "base", new)
        changed = isinstance(old, torch.Tensor) and not torch.equal(old, new)
        if changed and new.dtype.is_floating_point:
            yield compare(case.name, name, new, on_device[name])


def compare_rung(impl: str, dtype: torch.dtype, device: torch.device) -> Iterator[Agreement]:
    """One rung on a jagged batch: grouped heads, an empty sequence, tails of every kind."""
    lengths_q, lengths_k = (130, 0, 1, 77, 257), (64, 31, 200, 0, 129)
    generator = torch.Generator().manual_seed(0)

    def tokens(lengths: tuple[int, ...], heads: int) -> torch.Tensor:
        return torch.randn(sum(lengths), heads, 64, generator=generator).to(dtype)

    q, k, v = tokens(lengths_q, 4), tokens(lengths_k, 2), tokens(lengths_k, 2)
    ends = [cu_seqlens(list(lengths), "cpu") for lengths in (lengths_q, lengths_k)]
    for activation in ("gelu_tanh", "silu", "relu"):
        options = {"activation": activation, "output_scale": 0.125, "impl": impl}
        sizes = (max(lengths_q), max(lengths_k))
        with tritonemu.enabled():
            here = gdpa(q, k, v, *ends, *sizes, **options)
        moved = [x.to(device) for x in (q, k, v, *ends)]
        there = gdpa(*moved, *sizes, **options).cpu()
        yield compare(f"{impl}, {activation}", "out", here, there)


def everything(device: torch.device | str) -> list[Agreement]:
    """All Hopper tutorials, and all rungs that are kernels, in bf16 and fp16."""
    device = torch.device(device)
    agreements = [
        a for case in hopper.CASES if case.arch == "sm_90" for a in compare_case(case, device)
    ]
    for rung in ladder.RUNGS:
        if rung.impl == "v0_eager":
            continue
        for dtype in (torch.bfloat16, torch.float16):
            agreements += compare_rung(rung.impl, dtype, device)
    return agreements


def measure(session: Session) -> None:
    """Measure for the chapter on the emulator: the tables "agreement" and "sanitizer"."""
    kernels = _sanitizer.newest_first([*_sanitizer.CONTROLS, *_sanitizer.rungs()])
    with ThreadPoolExecutor(1) as other:  # nothing here is timed
        said = other.submit(_sanitizer.findings, kernels, seconds=400)
        agreement = everything(session.device)
    for name, rows in {"agreement": agreement, "sanitizer": said.result()}.items():
        columns = [field.name for field in fields(rows[0])]
        session.tables[name] = record.Table(columns, [list(asdict(row).values()) for row in rows])
