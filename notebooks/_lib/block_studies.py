"""Studies of a rung of block attention: small batches, counts and findings of the emulator,
compiled code. `studies` does the same for gdpa, and changes copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import pandas as pd
import torch
from triton.compiler import CompiledKernel

import tritonemu
from _lib import studies
from gdpa_kernels.block_attention import reference
from gdpa_kernels.block_attention.batch import Batch
from gdpa_kernels.calling.launches import launches
from gdpa_lab.measuring import compile_check
from gdpa_lab.measuring.inputs import cu_seqlens

RESULTS = ("out", "dq", "dk", "dv")
"""Results of a pass forward and backward of block attention."""


def batch(
    lengths: Sequence[int],
    *,
    heads: int = 2,
    heads_k: int | None = None,
    head_dim: int = 64,
    block_size: int = 64,
    rotary: torch.dtype | None = None,
    rotate_v: bool = False,
) -> Batch:
    """A seeded batch of block attention in bf16 on the CPU; heads_k None: as many as of q.

    rotary: the dtype of sin and cos, drawn from N(0, 1), so that they lie on no circle.
    """
    make = torch.Generator().manual_seed(2025)
    heads_k = heads_k or heads
    q, k, v = (
        torch.randn(sum(lengths), n, head_dim, generator=make).bfloat16()
        for n in (heads, heads_k, heads_k)
    )
    turns = None
    if rotary is not None:
        sin, cos = (torch.randn(sum(lengths), head_dim // 2, generator=make) for _ in range(2))
        turns = sin.to(rotary), cos.to(rotary)
    ends = cu_seqlens(lengths, "cpu")
    return Batch(q, k, v, ends, head_dim**-0.5, block_size, turns, rotate_v)


def gradient(inputs: Batch) -> torch.Tensor:
    """A seeded gradient of the output."""
    make = torch.Generator().manual_seed(2026)
    return torch.randn(inputs.q.shape, generator=make).to(inputs.dtype)


def run_pass(
    module: ModuleType,
    inputs: Batch,
    direction: str = "both",
    grad_out: torch.Tensor | None = None,
    **options: object,
) -> tuple[torch.Tensor, ...]:
    """Run a pass of a rung, or of `reference`; its results: out; dq, dk, dv; or all four.

    Backward alone is for those that keep nothing of forward. `options`: config, work_list.
    """
    grad_out = gradient(inputs) if grad_out is None else grad_out
    if direction == "backward":
        return module.backward(grad_out, inputs, **options)
    out, saved = module.forward(inputs, **options)
    if direction == "forward":
        return (out,)
    return out, *module.backward(grad_out, inputs, saved, **options)


def emulated(
    module: ModuleType,
    inputs: Batch,
    direction: str = "both",
    *,
    grad_out: torch.Tensor | None = None,
    config: object = None,
    **how: object,
) -> tuple[tuple[torch.Tensor, ...], list[tritonemu.Report]]:
    """`run_pass` in the emulator, and the report of each launch, without that of the list of
    blocks. `how` goes to `tritonemu.enabled`: schedule, trace, ..."""
    with tritonemu.enabled(**how) as reports:
        results = run_pass(module, inputs, direction, grad_out, config=config)
    return results, [report for report in reports if report.kernel != "block_list_kernel"]


def traffic(module: ModuleType, inputs: Batch) -> pd.DataFrame:
    """Count what each kernel of a pass forward and backward loads and stores, in tensors of q's
    size, in the emulator: without caches."""
    _, reports = emulated(module, inputs)
    unit = inputs.q.nbytes
    rows = [(x.kernel, x.bytes_loaded / unit, x.bytes_stored / unit) for x in reports]
    table = pd.DataFrame(rows, columns=["kernel", "read", "written"])
    return table.groupby("kernel", sort=False, as_index=False).sum()


def comparison(
    module: ModuleType, inputs: Batch, config: object = None, **how: object
) -> pd.DataFrame:
    """Errors of out, dq, dk and dv in the emulator against fp64.

    Raises AssertionError if one of them fails `testing.compare`.
    """
    actual, _ = emulated(module, inputs, config=config, **how)
    wide, grad_out = studies.in_fp64(inputs), gradient(inputs)
    if inputs.rotary is not None:
        wide = replace(wide, rotary=tuple(x.double() for x in inputs.rotary))
    exact = run_pass(reference, wide, grad_out=grad_out.double())
    same = (
        reference.forward_in_dtype(inputs)[0],
        *reference.backward_in_dtype(grad_out, inputs),
    )
    return studies.compared("tensor", RESULTS, actual, exact, same)


def timeline(
    module: ModuleType,
    inputs: Batch,
    direction: str = "forward",
    config: object = None,
    *,
    program: int = 0,
    lanes: dict[str, str] | None = None,
    **how: object,
) -> tritonemu.Timeline:
    """The timeline of one program of the last kernel of a pass; `lanes`: other names for roles.
    `how`: as for `emulated`."""
    _, reports = emulated(module, inputs, direction, config=config, trace=True, **how)
    whole, lanes = reports[-1].timeline, lanes or {}
    events = [replace(e, lane=lanes.get(e.lane, e.lane)) for e in whole.events if e.cta == program]
    arrows = [
        replace(a, source=lanes.get(a.source, a.source), target=lanes.get(a.target, a.target))
        for a in whole.arrows
        if a.cta == program
    ]
    return tritonemu.Timeline(whole.file, events, arrows)


def blank(head_dim: int, *, heads: int = 4, rotary: torch.dtype | None = None) -> Batch:
    """One sequence of 67 tokens, to compile for and to get constants from."""
    inputs = batch((67,), heads=heads, head_dim=head_dim, rotary=rotary)
    return replace(inputs, rotate_v=rotary is not None)


def built(
    module: ModuleType,
    direction: str,
    config: object = None,
    inputs: Batch | None = None,
    capability: int = 90,
) -> dict[str, CompiledKernel]:
    """The kernels of a pass by name, compiled for sm_<capability>a; inputs None: `blank(128)`."""
    inputs = inputs or blank(128)
    saved = (inputs.q, torch.zeros(inputs.q.shape[1], inputs.total))
    work_list = (torch.zeros(3, 2, dtype=torch.int32),)
    with launches(run=False) as seen:
        if direction == "forward":
            module.forward(inputs, config=config, work_list=work_list)
        else:
            module.backward(inputs.q, inputs, saved, config=config, work_list=work_list)
    return {
        launch.name: compile_check.build_launch(launch, capability=capability) for launch in seen
    }


def compiled(cases: dict[str, tuple], mnemonics: Sequence[str] = ()) -> pd.DataFrame:
    """Compile each kernel of each case: registers, spills, shared memory, how many programs fit on
    an SM, counts of `mnemonics`. `cases`: arguments of `built`."""
    rows = []
    for label, arguments in cases.items():
        for name, kernel in built(*arguments).items():
            facts = compile_check.read(kernel)
            row = {"case": label, "kernel": name, "registers": facts.registers}
            row |= {"spilled (B)": facts.spill_bytes, "shared (KiB)": facts.shared_bytes / 1024}
            row["programs on an SM"] = programs_on_an_sm(facts, kernel.metadata.num_warps)
            rows.append(row | {mnemonic: facts.instructions[mnemonic] for mnemonic in mnemonics})
    return pd.DataFrame(rows)


def programs_on_an_sm(facts: compile_check.Compiled, num_warps: int) -> int:
    """Number of programs of a kernel without roles that fit on an SM of sm_90: 64 Ki registers,
    228 KiB of shared memory, 64 warps."""
    registers = -(-facts.registers * 32 // 256) * 256 * num_warps
    return min(65536 // registers, 228 * 1024 // (facts.shared_bytes + 1024), 64 // num_warps)
