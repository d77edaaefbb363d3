"""What chapters do with a rung: small batches, what the emulator says of it, changed copies."""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

import pandas as pd
import torch

from gdpa_kernels import emulator
from gdpa_kernels.gdpa import reference
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.measuring import compile_check, testing
from gdpa_kernels.measuring.inputs import cu_seqlens

EDGES = (0, 1, 63, 64, 65, 127, 128, 129)
"""Lengths around the edges of a role's 64 rows and of a tile of 128."""


def batch(
    lengths_q: Sequence[int],
    lengths_k: Sequence[int] | None = None,
    *,
    heads: int = 1,
    head_dim: int = 128,
    activation: str = "gelu_tanh",
    **options: object,
) -> Batch:
    """A seeded batch in bf16 on the CPU; lengths_k None: as those of q. `options`: of `Batch`."""
    lengths_k = lengths_q if lengths_k is None else lengths_k
    make = torch.Generator().manual_seed(2025)
    q, k, v = (
        torch.randn(sum(lengths), heads, head_dim, generator=make).bfloat16()
        for lengths in (lengths_q, lengths_k, lengths_k)
    )
    ends = (cu_seqlens(lengths, "cpu") for lengths in (lengths_q, lengths_k))
    sizes = max(lengths_q), max(lengths_k)
    return Batch(q, k, v, *ends, *sizes, (activation,), head_dim**-0.5, **options)


def timeline(module: ModuleType, given: Batch, config: object = None) -> emulator.Timeline:
    """The timeline of a rung's forward in the emulator."""
    with emulator.enabled(trace=True) as reports:
        module.forward(given, config=config)
    return reports[-1].timeline


def tensor_core(of: emulator.Timeline) -> pd.Series:
    """What the tensor core does between its first and its last MMA: `busy` (%), and the modelled
    cycles in which an MMA is overlapped with work of a math role (`overlapped`)."""
    mmas = [(e.start, e.end) for e in of.events if e.kind == "mma"]
    math = [
        (e.start, e.end) for e in of.events if e.kind == "compute" and e.lane.startswith("math")
    ]
    both = (max(0, min(b, d) - max(a, c)) for a, b in mmas for c, d in math)
    span = mmas[-1][1] - mmas[0][0]
    busy = sum(end - start for start, end in mmas)
    return pd.Series({"busy": 100 * busy / span, "overlapped": sum(both), "span": span})


def findings(
    call: Callable[[], object], schedules: Sequence[str | int] = ("modelled", 0, 1, 2)
) -> list[str]:
    """What the emulator says of a call under each schedule: kind and text of its error, or ""."""
    found = []
    for schedule in schedules:
        text = ""
        try:
            with emulator.enabled(schedule=schedule, max_steps=100_000):
                call()
        except emulator.EmulatorError as error:
            text = f"{type(error).__name__}: {error}"
        found.append(re.sub(r"/\S*/(?=[\w-]+\.py:\d)", "", text))  # files without their folders
    return found


def comparison(module: ModuleType, given: Batch, config: object = None) -> pd.DataFrame:
    """Errors of a rung's forward in the emulator against fp64, a row for each sequence.

    Raises AssertionError if a sequence fails `testing.compare`.
    """
    with emulator.enabled():
        out = module.forward(given, config=config)
    exact = reference.forward(replace(given, **{x: getattr(given, x).double() for x in "qkv"}))
    same, ends = reference.forward(given), given.cu_seqlens_q.tolist()
    rows = []
    for start, end in zip(ends[:-1], ends[1:], strict=True):
        actual, expected, baseline = (x[start:end] for x in (out, exact, same))
        found = testing.compare(
            name=f"{end - start}", actual=actual, expected=expected, baseline=baseline
        )
        assert found.passed, found
        rows.append((end - start, found.elements, found.max_abs, found.max_abs_budget))
    return pd.DataFrame(rows, columns=["length", "elements", "largest error", "allowed"])


def compiled(
    modules: dict[str, tuple[str | ModuleType, object]], mnemonics: Sequence[str] = ()
) -> pd.DataFrame:
    """What the compiler makes of forward kernels for sm_90a: registers, spills, whether wgmma is
    serialised, and counts of `mnemonics`. `modules`: (rung or changed module, config) by label."""
    rows = []
    for label, (module, config) in modules.items():
        made = compile_check.compile_rung(module, **({"config": config} if config else {}))
        row = {"kernel": label, "registers": made.registers, "spilled (B)": made.spill_bytes}
        row["serialised"] = "yes" if made.serialised else "no"
        rows.append(row | {name: made.instructions[name] for name in mnemonics})
    return pd.DataFrame(rows)


@cache
def _folder() -> tempfile.TemporaryDirectory:
    """Where changed sources lie until the process ends: Triton reads them when it compiles."""
    return tempfile.TemporaryDirectory()


def changed(module: ModuleType, *changes: tuple[str, str]) -> ModuleType:
    """A copy of `module`, pieces of its source replaced: (old, new), one after the other.

    `measure.measure`, as the option `module` of a rung, and `compile_check` take it for the rung.
    Raises ValueError unless each `old` occurs once.
    """
    text = Path(module.__file__).read_text(encoding="utf-8")
    for old, new in changes:
        if text.count(old) != 1:
            raise ValueError(f"old must occur once in {module.__name__}, got {old!r}")
        text = text.replace(old, new)
    path = Path(tempfile.mkdtemp(dir=_folder().name)) / Path(module.__file__).name
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"changed_{path.parent.name}", path)
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made
