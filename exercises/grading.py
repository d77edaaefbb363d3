"""Judges a reader's kernel, stage after stage; the first stage that fails ends it.

| stage           | what must hold                                                         |
|-----------------|------------------------------------------------------------------------|
| reads           | the file is Python                                                     |
| one tile, edges | right against fp64, nothing found; the other calls of the exercise     |
| schedules       | nothing found, and the same bits, under other schedules                |
| parities        | each barrier went through both of its phases while it was judged       |
| changes         | few lines differ from the file that the reader got                     |
| compiled        | no spills, no serialised MMA, the instructions that make the kernel    |
| prediction      | there is one, of the modelled cycles                                   |
| beside the book | modelled cycles, or bytes, beside those of the book's own kernel       |

The compiler runs in a process of its own from the start.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import linecache
import multiprocessing
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import torch

import tritonemu
from exercises.blanks import open_lines
from exercises.cases import Case, Outputs
from exercises.catalogue import blank
from exercises.hints import Failure, Rule
from gdpa_kernels.calling.launches import Launch, launches
from gdpa_lab.measuring import compile_check, testing

LIMITS = {"max_steps": 100_000, "timeout": 10.0}
SEEDS = 0, 1


@dataclass(frozen=True)
class Beside:
    """The book's own kernel. name: of its rung. case: what both compute. ours: launches it.

    bytes: compare bytes loaded, where the model knows no cycles: of plain kernels, which the
    compiler pipelines. most: how many times ours the reader's may take.
    """

    name: str
    case: Case
    ours: Callable[[], object]
    bytes: bool = False
    most: float | None = None


@dataclass
class Exercise:
    """What is judged.

    cases: calls by the names of their stages, made of the reader's module; the first is a small
    one, also for the stage "schedules". must, most: mnemonics of the compiled kernel, and how many
    at least and at most. roles: what the reader calls roles that the emulator calls by number.
    parities: whether barriers are judged, but for those `once`. changes: the most lines that may
    differ from the blank, if any. predicted: judges instead of all stages but the first. rules: of
    hints, before those that all share.
    """

    cases: Callable[[ModuleType], Mapping[str, Case]] = field(default=lambda module: {})
    must: Mapping[str, int] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)
    arch: str = "sm_90"
    roles: Mapping[str, str] = field(default_factory=dict)
    parities: bool = False
    once: tuple[str, ...] = ()
    beside: Beside | None = None
    changes: int = 0
    same_bits: Callable[[ModuleType], bool | None] = field(default=lambda module: True)
    options: Mapping[str, object] = field(default_factory=dict)
    predicted: Callable[[ModuleType], str] | None = None
    rules: list[Rule] = field(default_factory=list)
    name: str = ""


@dataclass
class Passed:
    """A stage that held: what is said of it, in how many seconds; a page that it drew."""

    stage: str
    said: str
    seconds: float = 0.0
    page: str = ""


def load(path: Path) -> ModuleType:
    """Import a file anew."""
    linecache.checkcache(str(path))
    spec = importlib.util.spec_from_file_location(f"reader_{path.stem}_{time.monotonic_ns()}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exercise_of(name: str) -> Exercise:
    """Import what is judged in an exercise."""
    exercise = importlib.import_module(f"exercises.catalogue.{name}.exercise").EXERCISE
    exercise.name = name
    return exercise


def grade(exercise: Exercise, path: Path, *, quick: bool = False) -> Iterator[Passed]:
    """Yield the stages that hold; raises Failure. quick: neither other schedules nor compiled."""
    begin = time.perf_counter()
    grading = _Grading(exercise, path)
    try:
        for stage in grading.stages(quick):
            stage.seconds, begin = time.perf_counter() - begin, time.perf_counter()
            yield stage
    finally:
        grading.end()


class _Grading:
    """One grading. phases: the most that each barrier completed in a case, by its name."""

    def __init__(self, exercise: Exercise, path: Path):
        self.exercise, self.path = exercise, path
        self.text = path.read_text(encoding="utf-8")
        self.compiler: _Compiler | None = None
        self.phases: dict[str, int] = {}

    def end(self) -> None:
        if self.compiler is not None:
            self.compiler.stop()

    def fail(self, stage: str, kind: str, message: str, **facts: object) -> Failure:
        return Failure(stage, kind, message, self.text.splitlines(), facts=facts)

    def stages(self, quick: bool) -> Iterator[Passed]:
        exercise = self.exercise
        self.module = self._read()
        unsolved = self._open()
        yield Passed("reads", f"{len(unsolved)} places are open" if unsolved else "")
        if exercise.predicted:
            yield Passed("predicted", self._predicted())
            return
        cases = self._cases()
        first = next(iter(cases.values()))
        if not quick and not unsolved:
            self.compiler = self._compiler(first)
        for stage, case in cases.items():
            yield Passed(stage, self._judged(stage, case))
        if not quick:
            yield Passed("schedules", self._schedules(first))
        if exercise.parities:
            yield Passed("parities", self._parities())
        if exercise.changes:
            yield Passed("changes", self._changes())
        if not quick:
            self.compiler = self.compiler or self._compiler(first)
            result = self.compiler.result() if self.compiler else "nothing is launched"
            yield Passed("compiled", self._compiled(result))
        if exercise.beside is not None:
            if not exercise.beside.bytes:
                yield Passed("prediction", self._prediction())
            said, page = self._beside(exercise.beside)
            yield Passed("beside the book", said, page=page)

    def _read(self) -> ModuleType:
        try:
            return load(self.path)
        except SyntaxError as error:
            failure = self.fail("reads", "SyntaxError", error.msg)
            failure.lines = [("here", error.lineno or 0)]
            raise failure from None
        except Exception as error:
            raise self._failed("reads", error) from error

    def _failed(self, stage: str, error: Exception) -> Failure:
        """Python failed, in these lines of the file."""
        failure, file = self.fail(stage, type(error).__name__, str(error)), str(self.path)
        frames = traceback.extract_tb(error.__traceback__)[::-1]
        failure.lines = [("here", frame.lineno) for frame in frames if frame.filename == file]
        return failure

    def _predicted(self) -> str:
        try:
            return self.exercise.predicted(self.module)
        except Failure as failure:
            failure.source = self.text.splitlines()
            raise

    def _run(
        self, stage: str, case: Case, search: Sequence[object] = ("modelled",), **options: object
    ) -> tritonemu.Verdict:
        options = LIMITS | dict(self.exercise.options) | options
        try:
            verdict = tritonemu.check(
                lambda: case.call(self.module), search=search, arch=self.exercise.arch, **options
            )
        except Exception as error:
            raise self._failed(stage, error) from error
        if not verdict.clean:
            raise self._finding(stage, verdict.finding) from verdict.finding
        return verdict

    def _judged(self, stage: str, case: Case) -> str:
        inputs = [each.clone() for each in case.inputs]
        verdict = self._run(stage, case)
        outputs = verdict.outputs
        for (_, name), use in verdict.barriers.items():
            self.phases[name] = max(self.phases.get(name, 0), use.phases)
        if not all(map(torch.equal, inputs, case.inputs)):
            raise self.fail(stage, "inputs", "the kernel changed its inputs")
        if not sum(report.bytes_stored for report in verdict.reports):
            raise self.fail(stage, "empty", "nothing is stored", open=self._next_hole())
        exact, baseline = case.exact(), case.baseline()
        used = 0.0
        for name, actual in outputs.items():
            compared = testing.compare(
                name=name, actual=actual, expected=exact[name], baseline=baseline[name]
            )
            if not compared.passed:
                raise self._wrong(stage, case, name, outputs, exact, baseline, str(compared))
            used = max(used, compared.max_abs / (compared.max_abs_budget or 1.0))
        return f"{case.what}: error {used:.2f} of the allowed"

    def _open(self) -> list[int]:
        return open_lines(self.text, blank(self.exercise.name))

    def _next_hole(self) -> int:
        return next(iter(self._open()), 0)

    def _cases(self) -> Mapping[str, Case]:
        try:
            return self.exercise.cases(self.module)
        except AttributeError as error:
            raise self._failed("reads", error) from error

    def _compiler(self, first: Case) -> _Compiler | None:
        """Start the compiler; None if the launch fails, which the first case will tell."""
        case = self.exercise.beside.case if self.exercise.beside else first
        try:
            with launches(run=False) as seen:
                case.call(self.module)
        except Exception:
            return None
        return _Compiler(self.exercise.arch, seen[-1])

    def _finding(self, stage: str, error: tritonemu.EmulatorError) -> Failure:
        """A finding in the reader's lines: those of the innermost calls in his file."""
        places = [("here", error.location)]
        places += [("earlier", each.location) for each in error.accesses[:1]]
        places += [("earlier", error.other)] if hasattr(error, "other") else []
        waits = getattr(error, "waits", ())
        places += [(wait.role, wait.location) for wait in waits]
        places += [(each.what, each.location) for each in error.orderings]
        places += [("barrier", location) for _, location, _ in error.barriers]
        file = str(self.path)
        lines = [
            (self._named(what), tritonemu.line_in(location, file)) for what, location in places
        ]
        message = self._named(str(error.args[0]))
        if waits:
            stuck = ((w.role, tritonemu.line_in(w.location, file), w.what) for w in waits)
            message = "\n".join(self._named(f"{a} (line {line}) {what}") for a, line, what in stuck)
        kind = "time" if type(error) is tritonemu.EmulatorError else type(error).__name__
        failure = self.fail(stage, kind, message, stages=getattr(self.module, "STAGES", 0))
        failure.lines = list(dict.fromkeys(each for each in lines if each[1]))
        failure.error, failure.file = error, file
        failure.roles = dict(self.exercise.roles)
        timeline = error.report.timeline if error.report else None
        if timeline is not None and (timeline.events or timeline.marks):
            failure.drawing = timeline.finding()
        return failure

    def _named(self, text: str) -> str:
        """Put the reader's names of roles and lines into a message."""
        for emulators, readers in self.exercise.roles.items():
            text = re.sub(rf"\b{emulators}\b(?!\s*=)", readers, text)
        text = text.replace(f"{self.path}:", "line ").replace(" of CTA 0", "")
        return re.sub(r"(^|\s)/\S*/(\w+\.py:\d+)", r"\1\2", re.sub(r" of CTA \d+", "", text))

    def _wrong(
        self, stage: str, case: Case, name: str, outputs: Outputs, exact: Outputs,
        baseline: Outputs, message: str,
    ) -> Failure:  # fmt: skip
        """Which parts are wrong, and whether the outputs are what a known mistake gives."""
        actual = outputs[name]
        wrong = []
        for part, rows in case.parts:
            tensors = actual[rows], exact[name][rows], baseline[name][rows]
            names = ("actual", "expected", "baseline")
            compared = testing.compare(name="", **dict(zip(names, tensors, strict=True)))
            wrong += [part] * (not compared.passed)
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        where = f"{len(wrong)} of {len(case.parts)} ({', '.join(wrong[:4])}{more})"
        where = where if case.parts else name
        facts = {"where": where, "output": name, "open": self._next_hole()}
        if bool(actual.isnan().any()):
            return self.fail(stage, "unwritten", f"{name} is NaN, or never written", **facts)
        if not bool(actual.any()):
            return self.fail(stage, "zeros", f"{name} is 0 everywhere", **facts)
        facts["like"] = next(
            (rule for rule, make in case.mistakes.items() if _alike(outputs, make(), exact)), ""
        )
        return self.fail(stage, "wrong", message, **facts)

    def _schedules(self, case: Case) -> str:
        search = tritonemu.Search("exhaustive", schedules=8)
        checked = self._run("schedules", case, (search, *SEEDS))
        claimed = self.exercise.same_bits(self.module)
        if claimed is None:
            raise self.fail("schedules", "unsaid", "does every order give the same bits?")
        if claimed == bool(checked.differs):
            message = f"schedule {checked.differs} gives other bits" if claimed else "same bits"
            raise self.fail("schedules", "bits" if claimed else "same-bits", message)
        classes, every = checked.covered["classes"], checked.covered["exhausted"]
        kinds = f"{classes} class{'es' * (classes != 1)} of interleavings"
        end = "the bits differ, as you say" if checked.differs else "the same bits"
        return f"{kinds}, {'all there are' if every else 'and more'}; {len(SEEDS)} random: {end}"

    def _parities(self) -> str:
        ring = {n: p for n, p in self.phases.items() if not n.startswith(self.exercise.once or "@")}
        missed = [name for name, phases in ring.items() if phases < 2]
        if missed:
            raise self.fail("parities", "parities", f"one phase only of {', '.join(missed)}")
        counts = [f"{name} {phases}" for name, phases in sorted(ring.items())]
        return f"{', '.join(counts[:6])} phases"

    def _changes(self) -> str:
        lines = [_code(text) for text in (blank(self.exercise.name), self.text)]
        signs = [line[0] for line in difflib.ndiff(*lines)]
        changed, most = max(signs.count("+"), signs.count("-")), self.exercise.changes
        if changed > most:
            raise self.fail("changes", "changed", f"{changed} lines", changed=changed, most=most)
        return f"{changed} line{'s' * (changed != 1)} of code changed"

    def _compiled(self, result: compile_check.Compiled | str) -> str:
        if isinstance(result, str):
            raise self.fail("compiled", "refused", result)
        counts = result.instructions
        what = [f"{result.spill_bytes} bytes spilled"] * bool(result.spill_bytes)
        what += ["the MMAs are serialised"] * result.serialised
        for limits, word in ((self.exercise.must, "least"), (self.exercise.most, "most")):
            for name, number in limits.items():
                short = counts[name] < number if word == "least" else counts[name] > number
                what += [f"{counts[name]} {name}, at {word} {number} expected"] * short
        if what:
            raise self.fail("compiled", "compiled", "; ".join(what))
        named = (*self.exercise.must, *self.exercise.most)
        counted = "".join(f", {counts[name]} {name}" for name in dict.fromkeys(named))
        shared = f"{result.shared_bytes / 1024:.0f} KB shared"
        return f"{self.exercise.arch}a: {result.registers} registers, no spills, {shared}{counted}"

    def _prediction(self) -> str:
        cycles = getattr(self.module, "CYCLES", None)
        if not isinstance(cycles, int | float):
            raise self.fail("prediction", "predict", "CYCLES is no number", name="CYCLES")
        return f"{cycles:,.0f} cycles"

    def _beside(self, beside: Beside) -> tuple[str, str]:
        trace = not beside.bytes
        yours = self._run("beside the book", beside.case, trace=trace).reports[-1]
        arch = self.exercise.arch
        book = tritonemu.check(beside.ours, search=["modelled"], arch=arch, trace=trace).reports[-1]
        if beside.bytes:
            ratio = yours.bytes_loaded / book.bytes_loaded
            said = f"{yours.bytes_loaded:,} bytes loaded, {beside.name} {book.bytes_loaded:,}"
            said, page = f"{said}; {yours.dots} MMAs, {book.dots}", ""
        else:
            ends = [yours.cycles, book.cycles]
            busy = [
                100 * x.timeline.busy[0]["tensor core"] / end
                for x, end in zip((yours, book), ends, strict=True)
            ]
            ratio = ends[0] / ends[1]
            off = 100 * (self.module.CYCLES / ends[0] - 1)
            said = (
                f"{ends[0]:,.0f} modelled cycles ({off:+.0f} % predicted), {beside.name} "
                f"{ends[1]:,.0f}; tensor core busy {busy[0]:.0f} %, {busy[1]:.0f} %"
            )
            page = tritonemu.interactive(
                {"yours": yours.timeline, beside.name: book.timeline},
                {"yours": self.text, beside.name: Path(book.timeline.file).read_text()},
                title=f"yours and {beside.name}",
                outcomes={"yours": f"{ends[0]:,.0f} cycles", beside.name: f"{ends[1]:,.0f} cycles"},
            )
        if beside.most is not None and ratio > beside.most:
            facts = {"ratio": ratio, "most": beside.most, "book": beside.name}
            raise self.fail("beside the book", "slower", said, **facts)
        return said, page


def _alike(outputs: Outputs, others: Outputs, exact: Outputs) -> bool:
    """Whether outputs are these fp64 ones, but for roundings to bf16 on the way, and surely not
    the exact ones."""

    def distance(name: str, other: torch.Tensor) -> float:
        return float((outputs[name].double() - other).square().mean().sqrt())

    return all(
        distance(name, other) <= 2**-7 * float(other.square().mean().sqrt())
        for name, other in others.items()
    ) and any(4 * distance(name, others[name]) < distance(name, exact[name]) for name in exact)


def _code(text: str) -> list[str]:
    bare = (line.partition("#")[0].rstrip() for line in text.splitlines())
    return [line for line in bare if line]


class _Compiler:
    """Compiles a launch of the reader's kernel, in a process beside the emulator."""

    def __init__(self, arch: str, launch: Launch):
        context = multiprocessing.get_context("fork")
        self.pipe, end = context.Pipe(False)
        capability = int(arch.removeprefix("sm_"))
        self.process = context.Process(target=_compile, args=(end, launch, capability))
        self.process.start()
        end.close()  # so that the pipe ends with the process

    def result(self) -> compile_check.Compiled | str:
        """What the compiler made, or its complaint."""
        try:
            return self.pipe.recv()
        except EOFError:
            return "the compiler ended without a word"

    def stop(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


def _compile(pipe: Connection, launch: Launch, capability: int) -> None:
    """Send what the compiler made of a launch, or its complaint."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        built = compile_check.build_launch(launch, capability=capability)
        pipe.send(compile_check.read(built))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {str(error)[:300]}")
