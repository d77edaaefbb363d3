"""Studies of a rung: small batches, findings of the emulator, changed copies.

For block attention: `block_studies`.
"""

from __future__ import annotations

import html
import importlib.util
import linecache
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
import torch
from IPython.display import HTML
from triton.compiler import CompiledKernel

import tritonemu
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import Launch, launches
from gdpa_kernels.calling.recipe import Recipe
from gdpa_kernels.gdpa import reference
from gdpa_kernels.gdpa.batch import Batch
from gdpa_lab.measuring import compile_check, measure, record, system, testing, timing
from gdpa_lab.measuring.inputs import Inputs, cu_seqlens
from gdpa_lab.report import page

if TYPE_CHECKING:
    from gdpa_lab.measuring.session import Session
    from gdpa_lab.measuring.workload import Workload

SCHEDULES = ("modelled", *range(8))
MAX_STEPS = 100_000
EDGES = (0, 1, 63, 64, 65, 127, 128, 129)
"""Lengths around the edges of a role's 64 rows and of a tile of 128."""
GRADIENTS = ("dq", "dk", "dv")
BITS = (
    "workload", "impl", "variant", "gradient", "run", "different", "elements", "most_apart",
)  # fmt: skip
POWER = ("impl", "activation", "sample", "sm_clock_mhz", "power_w", "throttle_reasons")


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


def timeline(
    module: ModuleType, inputs: Batch, config: object = None, arch: str = "sm_90", **options: Any
) -> tritonemu.Timeline:
    """The timeline of a rung's forward in the emulator; `options`: of `tritonemu.enabled`."""
    with tritonemu.enabled(arch, trace=True, **options) as reports:
        module.forward(inputs, config=config)
    return reports[-1].timeline


def tensor_core(of: tritonemu.Timeline) -> pd.Series:
    """Measure the tensor core between its first and its last MMA: `busy` (%), and the modelled
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
    call: Callable[[], object],
    schedules: Sequence[str | int] = ("modelled", 0, 1, 2),
    **how: object,
) -> list[str]:
    """Run a call in the emulator under each schedule: kind and text of its error, or "".

    `how`: of `tritonemu.enabled`, e.g. arch.
    """
    texts = []
    for schedule in schedules:
        text = ""
        try:
            with tritonemu.enabled(schedule=schedule, max_steps=MAX_STEPS, **how):
                call()
        except tritonemu.EmulatorError as error:
            text = f"{type(error).__name__}: {error}"
        texts.append(re.sub(r"(/\S*/)([\w-]+\.py):(\d+)", _place, text))
    return texts


def _place(location: re.Match) -> str:
    """A file without its folder and a line; of a cell, which has no file, the text of the line."""
    folder, name, line = location.groups()
    text = linecache.getline(folder + name, int(line)).strip()
    return f"{name}:{line}" if Path(folder, name).exists() or not text else f"`{text}`"


def in_fp64(inputs: Any) -> Any:
    """A batch with q, k and v in fp64."""
    return replace(inputs, **{name: getattr(inputs, name).double() for name in "qkv"})


def compared(
    what: str,
    names: Sequence[str | int],
    results: Sequence[torch.Tensor],
    exact: Sequence[torch.Tensor],
    same: Sequence[torch.Tensor],
) -> pd.DataFrame:
    """Errors of tensors against fp64, a row for each: its name, in the column `what`, elements,
    largest error, what is allowed. `same`: the same mathematics in PyTorch in the same dtype.

    Raises AssertionError if one of them fails `testing.compare`.
    """
    rows = []
    for name, actual, expected, baseline in zip(names, results, exact, same, strict=True):
        error = testing.compare(name=str(name), actual=actual, expected=expected, baseline=baseline)
        assert error.passed, error
        rows.append((name, error.elements, error.max_abs, error.max_abs_budget))
    return pd.DataFrame(rows, columns=[what, "elements", "largest error", "allowed"])


def comparison(
    module: ModuleType, inputs: Batch, config: object = None, arch: str = "sm_90"
) -> pd.DataFrame:
    """Errors of a rung's forward in the emulator against fp64, a row for each sequence.

    Raises AssertionError if a sequence fails `testing.compare`.
    """
    with tritonemu.enabled(arch):
        out = module.forward(inputs, **({} if config is None else {"config": config}))
    tensors = out, reference.forward(in_fp64(inputs)), reference.forward_in_dtype(inputs)
    lengths = inputs.cu_seqlens_q.diff().tolist()
    return compared("length", lengths, *(x.split(lengths) for x in tensors))


def gradient(inputs: Batch) -> torch.Tensor:
    """A seeded gradient of a batch's output."""
    make = torch.Generator().manual_seed(2026)
    shape = inputs.rows, *inputs.q.shape[1:]
    return torch.randn(shape, generator=make).to(inputs.q.dtype)


class Backward(NamedTuple):
    """Results of a backward in the emulator: (dq, dk, dv), None where it was not asked for; by the
    name of a kernel, the report of its last launch and the launch itself."""

    gradients: tuple[torch.Tensor | None, ...]
    reports: dict[str, tritonemu.Report]
    launched: dict[str, Launch]


def backward(
    module: ModuleType,
    inputs: Batch,
    config: object = None,
    *,
    grad_out: torch.Tensor | None = None,
    needs: tuple[bool, bool, bool] | None = None,
    **how: Any,
) -> Backward:
    """A rung's backward in the emulator, of `gradient(inputs)` unless `grad_out` is given.

    needs: for rungs that take it. `how`: of `tritonemu.enabled`, e.g. trace, schedule, max_steps,
    multiprocessors.
    """
    grad_out = gradient(inputs) if grad_out is None else grad_out
    asked = {} if needs is None else {"needs": needs}
    with tritonemu.enabled(**how) as reports, launches() as seen:
        computed = module.backward(grad_out, inputs, config=config, **asked)
    return Backward(computed, {r.kernel: r for r in reports}, {x.name: x for x in seen})


def compare_gradients(results: Sequence[torch.Tensor], inputs: Batch) -> pd.DataFrame:
    """`compared` for (dq, dk, dv) of `gradient(inputs)`, and errors in percent of the allowed."""
    grad_out = gradient(inputs)
    exact = reference.backward(grad_out.double(), in_fp64(inputs))
    errors = compared(
        "gradient", GRADIENTS, results, exact, reference.backward_in_dtype(grad_out, inputs)
    )
    share = 100 * errors["largest error"] / errors["allowed"]
    return errors.assign(**{"% of allowed": share}).set_index("gradient")


def differences(
    run: Callable[[], Sequence[torch.Tensor]], runs: int
) -> list[tuple[str, int, int, int, float]]:
    """Compare a backward with its first run, bit by bit: gradient, run, elements that differ,
    elements, the most that two are apart. `run` returns (dq, dk, dv)."""
    first = [x.clone() for x in run()]
    rows = []
    for number in range(1, runs):
        for name, one, two in zip(GRADIENTS, first, run(), strict=True):
            pieces = zip(one.split(2**16), two.split(2**16), strict=True)
            most = max(float((a.float() - b.float()).abs().max()) for a, b in pieces)
            rows.append((name, number, int((one != two).sum()), one.numel(), most))
    return rows


def repeat_backward(
    session: Session, work: Workload, listed: Sequence[tuple[str, str, dict]], runs: int = 5
) -> None:
    """Run backward rungs, as (impl, variant, options), `runs` times each on the same inputs: their
    `differences` join the table "bits" of the session's record."""

    def compare(inputs: Inputs) -> None:
        rows = list(session.tables["bits"].rows) if "bits" in session.tables else []
        for impl, variant, options in listed:
            module = ladder.rung(impl).module()
            run = partial(module.backward, inputs.grad_out, inputs.batch(), **options)
            rows += [(work.name, impl, variant, *row) for row in differences(run, runs)]
        session.tables["bits"] = record.Table(BITS, tuple(rows))

    session.launch("bits", work, [impl for impl, *_ in listed], compare, direction="backward")


def build_backward(
    module: ModuleType,
    kernel: str = "backward_kernel",
    *,
    inputs: Batch | None = None,
    needs: tuple[bool, bool, bool] | None = None,
) -> CompiledKernel:
    """A kernel that a rung's backward launches, compiled for sm_90a; nothing runs. `inputs`: None
    for 130 tokens and four heads of 128. ValueError if it launches none of that name."""
    inputs = batch((130,), heads=4) if inputs is None else inputs
    asked = {} if needs is None else {"needs": needs}
    with launches(run=False) as seen:
        module.backward(gradient(inputs), inputs, **asked)
    matching = [launch for launch in seen if launch.name == kernel]
    if not matching:
        raise ValueError(f"kernel must be one of {[x.name for x in seen]}, got {kernel!r}")
    return compile_check.build_launch(matching[-1])


def facts(built: dict[str, CompiledKernel], mnemonics: Sequence[str] = ()) -> pd.DataFrame:
    """Read compiled kernels, by label: registers, spills, whether wgmma is serialised, and counts
    of `mnemonics`."""
    rows = []
    for label, kernel in built.items():
        resources = compile_check.read(kernel)
        row = {"kernel": label, "registers": resources.registers}
        row["spilled (B)"] = resources.spill_bytes
        row["serialised"] = "yes" if resources.serialised else "no"
        rows.append(row | {name: resources.instructions[name] for name in mnemonics})
    return pd.DataFrame(rows)


def compiled(
    modules: dict[str, tuple[str | ModuleType, object]], mnemonics: Sequence[str] = ()
) -> pd.DataFrame:
    """`facts` of forward kernels for sm_90a; `modules`: (rung or changed copy, config) by label."""
    built = {
        label: compile_check.build_rung(module, config=config)
        for label, (module, config) in modules.items()
    }
    return facts(built, mnemonics)


def measure_lists(
    session: Session, work: Workload, impl: str, recipes: dict[str, Callable[[Batch], Recipe]]
) -> None:
    """Time what makes work lists, on the device and on the host: rows of scope "schedule" in the
    session's record, variants "<name>, device time" and "<name>, host time"."""

    def sample(inputs: Inputs) -> None:
        batch = inputs.batch()
        calls = {
            name: lambda recipe=recipe: recipe(batch).make(*batch.offsets)
            for name, recipe in recipes.items()
        }
        for how, sampler in (("device", timing.sample_kernels), ("host", timing.sample_ops)):
            for name, times in sampler(calls, session.device, session.protocol).items():
                row = record.Row.of(
                    work, "forward", impl=impl, math="activation", scope="schedule",
                    variant=f"{name}, {how} time", samples_us=times,
                    flops=0, bytes_read=0, bytes_written=0,
                )  # fmt: skip
                session.add(work, row)

    session.launch("lists", work, [impl], sample)


def snapshots(session: Session, work: Workload, kernels: Sequence[tuple[str, str]]) -> None:
    """Clock and power, three times while each (impl, activation) runs `work` again and again on the
    same inputs: the table "power" of the session's record. A hundred calls must last longer than
    the snapshots take."""

    def sample(inputs: Inputs) -> None:
        rows = []
        for impl, activation in kernels:
            variant = replace(work, name=f"power-{activation}", activation=activation)
            candidate = measure.candidate(impl, replace(inputs, workload=variant))
            for _ in range(100):
                candidate.call()
            for number in range(3):
                time.sleep(0.35)
                now = system.state(session.device.index)
                load = now["sm_clock_mhz"], now["power_w"], ", ".join(now["throttle_reasons"] or ())
                rows.append((impl, activation, number, *load))
            torch.cuda.synchronize()
            session.log(f"  {impl} {activation}: clock and power")
        session.tables["power"] = record.Table(POWER, rows)

    session.launch("power", work, [impl for impl, _ in kernels], sample)


@cache
def _folder() -> tempfile.TemporaryDirectory:
    """Where changed sources lie until the process ends: Triton reads them when it compiles."""
    return tempfile.TemporaryDirectory()


def piece(module: ModuleType, begin: str, end: str) -> str:
    """The source of `module` from `begin` to before `end`, for `changed`. ValueError if they are
    not in it."""
    text = Path(module.__file__).read_text(encoding="utf-8")
    start = text.index(begin)
    return text[start : text.index(end, start)]


def changed(
    module: ModuleType, *changes: tuple[str, str], shared: ModuleType | None = None
) -> ModuleType:
    """A copy of `module`, pieces of its source replaced: (old, new), one after the other; in place
    of its own source that of `shared`, a module that it imports functions of.

    `measure.measure`, as the option `module` of a rung, and `compile_check` take it for the rung.
    Raises ValueError unless each `old` occurs once.
    """
    if shared is not None:
        copied, parts = changed(module), vars(changed(shared, *changes))
        for name, value in vars(shared).items():
            if vars(module).get(name) is value:
                setattr(copied, name, parts[name])
        return copied
    text = Path(module.__file__).read_text(encoding="utf-8")
    for old, new in changes:
        if text.count(old) != 1:
            raise ValueError(f"old must occur once in {module.__name__}, got {old!r}")
        text = text.replace(old, new)
    path = Path(tempfile.mkdtemp(dir=_folder().name)) / Path(module.__file__).name
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"changed_{path.parent.name}", path)
    copied = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = copied
    spec.loader.exec_module(copied)
    return copied


def run_main(
    module: ModuleType, schedule: str | int = "modelled", **options: object
) -> tritonemu.Report:
    """The first launch of a module's `main`, which launches a kernel and checks the result, in the
    emulator. `options`: of `tritonemu.enabled`.

    Raises EmulatorError for a finding, AssertionError for a wrong result.
    """
    with tritonemu.enabled(schedule=schedule, max_steps=MAX_STEPS, **options) as reports:
        module.main()
    return reports[0]


def wrong_results(module: ModuleType, schedules: Sequence[str | int] = SCHEDULES) -> int:
    """Under how many schedules `main` finds its result wrong, races not being looked for."""
    wrong = 0
    for schedule in schedules:
        try:
            run_main(module, schedule, races=False)
        except AssertionError:
            wrong += 1
    return wrong


def step_page(
    module: ModuleType, changes: Mapping[str, Sequence[tuple[str, str]]], file: str, title: str
) -> dict[str, str]:
    """Write the page `file` that steps through `main` of each changed copy of `module`, and return
    what is found in each, "" for nothing. `changes`: of `changed`, by name. `framed` shows it."""
    timelines, errors = {}, {}
    for name, pieces in changes.items():
        copy = changed(module, *pieces)
        (errors[name],) = findings(copy.main, ["modelled"])
        try:
            timelines[name] = run_main(copy, trace=True).timeline
        except tritonemu.EmulatorError as error:
            timelines[name] = error.report.timeline
    outcomes = {
        name: text or "Nothing found, and the right result." for name, text in errors.items()
    }
    _write_steps(timelines, file, title, outcomes)
    return errors


def stepper(timelines: Mapping[str, tritonemu.Timeline], name: str, *, title: str) -> HTML:
    """A button under a figure that opens a page to step through `timelines`, by label, the kernel
    of each beside it; several share one axis and are toggled.

    `name`: of the page, the chapter's slug with a hyphen for the slash and a word:
    "forward-v5_pingpong-steps".
    """
    ends = {label: max(e.end for e in of.events if e.cta == 0) for label, of in timelines.items()}
    outcomes = {
        label: f"CTA 0 has ended after {end:,.0f} modelled cycles." for label, end in ends.items()
    }
    _write_steps(timelines, f"{name}.html", title, outcomes)
    return framed(f"{name}.html", title)


def framed(file: str, title: str, *, opened: bool = False) -> HTML:
    """The button that opens a page of `step_page` in place; `opened`: as if it had been pressed."""
    label, is_open = html.escape(title), " open" if opened else ""
    return HTML(
        f'<details class="stepper"{is_open}><summary>Step through it</summary>'
        f'<iframe data-src="../../figures/{file}" title="{label}"></iframe>'
        f'<p><a href="../../figures/{file}">Open it as a page of its own.</a></p></details>'
    )


def _write_steps(
    timelines: Mapping[str, tritonemu.Timeline],
    file: str,
    title: str,
    outcomes: dict[str, str],
) -> None:
    sources = {name: Path(of.file).read_text(encoding="utf-8") for name, of in timelines.items()}
    text = tritonemu.interactive(dict(timelines), sources, title=title, outcomes=outcomes)
    page.CSV_DIR.mkdir(parents=True, exist_ok=True)
    (page.CSV_DIR / file).write_text(text, encoding="utf-8")
