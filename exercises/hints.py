"""From a failure to a hint: what happened, why that is wrong, and what to change.

`RULES` are tried in order, those of an exercise before them. A rule speaks only of what the finding
shows: accesses, waits, what barriers did. Without a rule the emulator's own words stand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tritonemu import EmulatorError, line_in

Facts = dict[str, Any]

SYNCHRONISATION = ("UninitializedRead", "Race", "Deadlock", "BarrierMisuse", "AliasedWait")


@dataclass(eq=False)
class Failure(Exception):
    """What ended a grading.

    kind: the class of a finding, or a word of `grading`. source: lines of the reader's file. lines:
    (what, line) in it, the most telling first. facts: for the texts of hints. error: the finding,
    in `file`. roles: what the reader calls them. drawing: of the finding, as SVG.
    """

    stage: str
    kind: str
    message: str
    source: list[str] = field(default_factory=list)
    lines: list[tuple[str, int]] = field(default_factory=list)
    facts: Facts = field(default_factory=dict)
    error: EmulatorError | None = None
    file: str = ""
    roles: dict[str, str] = field(default_factory=dict)
    drawing: str = ""

    def __str__(self) -> str:
        return f"{self.stage}: {self.kind}: {self.message}"

    @property
    def first(self) -> int:
        """The line of the failure, 0 if it has none."""
        return self.lines[0][1] if self.lines else 0

    def line_of(self, what: str) -> int:
        """The line of the part of the finding that begins so, or 0."""
        return next((line for each, line in self.lines if each.startswith(what)), 0)

    def find(self, pattern: str, start: int = 1) -> int:
        """The first line of the file from `start` on that has this pattern outside of comments."""
        code = ((i, text.partition("#")[0]) for i, text in enumerate(self.source, 1) if i >= start)
        return next((i for i, text in code if re.search(pattern, text)), 0)

    def line_with(self, pattern: str) -> int:
        """The first line of the finding that has this pattern, or 0."""
        lines = (n for _, n in self.lines)
        return next((n for n in lines if re.search(pattern, self.source[n - 1])), 0)

    def name(self, role: str) -> str:
        """The reader's name of a role."""
        role = role.partition(" of CTA")[0]
        for emulators, readers in self.roles.items():
            role = re.sub(rf"^{emulators}\b", readers, role)
        return role


@dataclass(frozen=True)
class Rule:
    """when: failure -> facts for the texts, with the "line" to show, or None. what, why, change:
    the three levels of a hint. chapter: where it is told."""

    name: str
    when: Callable[[Failure], Facts | None]
    what: str
    why: str
    change: str
    chapter: str


@dataclass(frozen=True)
class Hint:
    """rule: "" where none fits. texts: the three levels, one without a rule."""

    rule: str
    line: int
    texts: Sequence[str]
    chapter: str = ""


def is_kind(kind: str, pattern: str = "", **facts: Any) -> Callable[[Failure], Facts | None]:
    """Fit failures of a kind with such facts, of which a line has a pattern."""

    def when(failure: Failure) -> Facts | None:
        if failure.kind != kind or any(failure.facts.get(k) != v for k, v in facts.items()):
            return None
        line = failure.line_with(pattern) if pattern else failure.first
        return {"line": line} if line or not pattern else None

    return when


def like(mistake: str) -> Callable[[Failure], Facts | None]:
    """Fit wrong outputs that are what this mistake of the case gives."""
    return is_kind("wrong", like=mistake)


def hint_of(failure: Failure, rules: Sequence[Rule] = ()) -> Hint:
    for rule in (*rules, *RULES):
        facts = rule.when(failure)
        if facts is not None:
            facts = {"kind": failure.kind, **failure.facts, **facts}
            texts = [text.format(**facts) for text in (rule.what, rule.why, rule.change)]
            texts[0] = texts[0][:1].upper() + texts[0][1:]
            return Hint(rule.name, facts.get("line", 0), texts, rule.chapter)
    text = GENERAL.get(failure.kind, "").format(**failure.facts)
    return Hint("", failure.first, [text] if text else [])


def base_of(name: str) -> str:
    """The array that a barrier or a buffer is of."""
    return name.partition("[")[0].partition(" ")[0]


def role_of(label: str) -> str:
    return label.partition(" of CTA")[0]


class Barriers:
    """What barriers of one array did before a finding: the most arrivals, by role, and waits."""

    def __init__(self, failure: Failure):
        self.uses: dict[str, list] = {}
        for name, use in failure.error.report.barrier_use.items():
            self.uses.setdefault(base_of(name), []).append(use)

    def arrivals(self, array: str) -> set[str]:
        """Who arrived on it."""
        return {role for use in self.uses.get(array, ()) for role in use.arrivals}

    def waiters(self, array: str) -> set[str]:
        return {role for use in self.uses.get(array, ()) for role, _ in use.waits}


def _announced(failure: Failure) -> set[str]:
    """Arrays that a line of the file announces bytes on, by its text."""
    calls = (re.findall(r"(?:fetch\w*|expect_bytes)\((.*)\)", text) for text in failure.source)
    return {name for call in calls for text in call for name in re.findall(r"\b(\w+)\[", text)}


def _is_only_waited_for(failure: Failure, array: str) -> bool:
    """Whether no line names an array but where it is made, and waits for it."""
    others = rf"^(?!\s*{array} = )(?!.*barrier_wait\(\s*{array}\b).*\b{array}\b"
    return not Barriers(failure).arrivals(array) and not failure.find(others)


def _copy_and_reader(failure: Failure) -> tuple[Any, Any] | None:
    """The copy of a race, which writes, and the access that reads what it writes."""
    accesses = failure.error.accesses if failure.kind == "Race" else ()
    for copy, reader in (accesses, accesses[::-1]) if len(accesses) == 2 else ():
        if copy.kind == "copy" and copy.write and not reader.write:
            return copy, reader
    return None


def _own_wait(failure: Failure) -> Any:
    """The wait of the reader of a race for the barrier that the copy arrives on, or None."""
    copy, reader = _copy_and_reader(failure)
    after = (x for x in failure.error.orderings if x.kind == "arrival" and x.role == copy.actor)
    full = next((x.barrier for x in after if x.when == "after"), "")
    waits = (x for x in failure.error.orderings if x.kind == "wait" and x.role == reader.actor)
    return next((x for x in waits if x.barrier == full), None)


def _is_read_late(failure: Failure) -> bool:
    """Whether the later access of a race reads what a copy writes."""
    pair = _copy_and_reader(failure)
    return pair is not None and pair[1] is failure.error.accesses[1]


def _line(failure: Failure, access: Any) -> int:
    """The reader's line of an access, or 0."""
    return line_in(access.location, failure.file)


def _end_of(failure: Failure, line: int) -> int:
    """The wait for the result of the MMA of a line."""
    result = re.match(r"\s*(\w+) = ", failure.source[line - 1]) if line else None
    named = rf"async_dot_wait\(.*\b{result[1]}\b" if result else "async_dot_wait"
    return failure.find(named, line)


def _guard(failure: Failure, copy: Any) -> str:
    """The array that is waited for last above a copy, in a function that leads to it."""
    for file, line, _ in getattr(copy.location, "chain", ()):
        above = failure.source[: line - 1] if file == failure.file else []
        waits = (re.match(r"\s*tlx\.barrier_wait\(\s*(\w+)", text) for text in reversed(above))
        if array := next((each[1] for each in waits if each), ""):
            return array
    return ""


def _released_early(failure: Failure) -> Facts | None:
    """The reader of a buffer arrives, where its copy's role waits, before the read has ended."""
    pair = _copy_and_reader(failure)
    if pair is None or (_is_read_late(failure) and _own_wait(failure) is None):
        return None
    copy, reader = pair
    read, barriers, array = _line(failure, reader), Barriers(failure), _guard(failure, copy)
    ended = _end_of(failure, read) if reader.kind == "async_dot" else read
    line = failure.find(rf"barrier_arrive\(\s*{array}\b") if array else 0
    waits = role_of(copy.actor) in barriers.waiters(array)
    arrives = role_of(reader.actor) in barriers.arrivals(array)
    if not (waits and arrives and 0 < line < (ended or len(failure.source))):
        return None
    reads = f"the MMA of line {read}" if reader.kind == "async_dot" else f"line {read}"
    end = f"(line {ended})" if ended else "(no line waits for it)"
    return {"line": line, "buffer": reader.name, "reads": reads, "end": end}


def _stuck(failure: Failure) -> list[tuple[Any, str, int]]:
    """The waits of a deadlock on mbarriers, the array and the line of each."""
    if failure.kind != "Deadlock":
        return []
    waits = [each for each in failure.error.waits if getattr(each, "parity", -1) >= 0]
    lines = [failure.line_of(failure.name(each.role)) for each in waits]
    return [(w, base_of(w.barrier), line) for w, line in zip(waits, lines, strict=True)]


def _never_released(failure: Failure) -> Facts | None:
    """A role waits again for an array that nobody ever arrives on."""
    for wait, array, line in _stuck(failure):
        if wait.passed and _is_only_waited_for(failure, array):
            return {"line": line, "barrier": array, "who": failure.name(wait.role)}
    return None


def _never_filled(failure: Failure) -> Facts | None:
    """A role waits for the first time for an array that nobody ever arrives on."""
    for wait, array, line in _stuck(failure):
        if not wait.passed and _is_only_waited_for(failure, array):
            return {"line": line, "barrier": array, "who": failure.name(wait.role)}
    return None


def _first_wait(failure: Failure) -> Facts | None:
    """The first wait on a barrier that no copy lands on is for its phase 0, and nobody arrived."""
    for wait, array, line in _stuck(failure):
        nobody = not Barriers(failure).arrivals(array) and array not in _announced(failure)
        if nobody and wait.passed == wait.phase == 0:
            facts = {"line": line, "barrier": array, "who": failure.name(wait.role)}
            return facts if failure.find(rf"barrier_arrive\(\s*{array}\b") else None
    return None


def _arrival_count(failure: Failure) -> Facts | None:
    """Several roles arrived on a barrier whose phase one of them completes."""
    if failure.kind not in ("Race", "BarrierMisuse", "AliasedWait") or failure.error is None:
        return None
    report, pair = failure.error.report, _copy_and_reader(failure)
    reader = role_of(pair[1].actor) if pair else ""
    waited = {x.barrier for x in failure.error.orderings if x.kind == "wait"}
    for name, use in report.barrier_use.items():
        array, roles = base_of(name), [role for role in use.arrivals if role != "TMA"]
        arrives = failure.find(rf"barrier_arrive\(\s*{array}\b")
        # An arrival counts 1, or every thread of its role.
        threads = 32 * max((report.warps.get(role, 1) for role in roles), default=0)
        alike = {role for role in report.warps if base_of(role) in map(base_of, roles)}
        # The others completed the phase after which the copy overwrites what this role reads.
        without = name in waited and use.phases and reader in alike - {*roles}
        if arrives and use.count in (1, threads) and (len(roles) > 1 or without):
            arrivals = f"{use.count} arrival{'s' * (use.count != 1)}"
            facts = {"barrier": array, "count": arrivals, "roles": max(len(roles), len(alike))}
            return facts | {"line": failure.find(rf"\b{array} = tlx\.alloc"), "arrives": arrives}
    return None


def _short_phase(failure: Failure) -> Facts | None:
    """A phase of a barrier got some arrivals, and takes more."""
    for wait, array, _ in _stuck(failure):
        uses = Barriers(failure).uses.get(array, ())
        count = max((use.count for use in uses), default=0)
        if 0 < wait.arrivals < count and not any(use.phases for use in uses):
            line = failure.find(rf"\b{array} = tlx\.alloc")
            return {"line": line, "barrier": array, "count": count, "came": count - wait.arrivals}
    return None


def _read_early(failure: Failure) -> Facts | None:
    """The reader of a copied buffer has not waited for the barrier that the copy arrives on."""
    if _is_read_late(failure) and _own_wait(failure) is None:
        reader = failure.error.accesses[1]
        line, buffer = _line(failure, reader), reader.name
    elif failure.kind == "UninitializedRead" and failure.find(
        rf"(fetch\w*|async_descriptor_load)\(.*\b{base_of(failure.error.buffer)}\b"
    ):
        line, buffer = failure.first, failure.error.buffer
    else:
        return None
    return {"line": line, "buffer": buffer, "base": base_of(buffer)} if line else None


def _stale_phase(failure: Failure) -> Facts | None:
    """The reader has waited for an earlier phase of the copy's barrier, or a role has waited for
    one parity of a barrier again and again."""
    if failure.kind not in SYNCHRONISATION:
        return None
    wait = _own_wait(failure) if _is_read_late(failure) else None
    names = [wait.barrier] if wait else []
    for name, use in failure.error.report.barrier_use.items():
        passed = [
            (use.waits.get((role, 0), 0), use.waits.get((role, 1), 0)) for role, _ in use.waits
        ]
        names += [name] * any(min(each) == 0 and max(each) > 1 for each in passed)
    array = base_of(names[0]) if names else ""
    line = failure.find(rf"barrier_wait\(\s*{array}\b") if array else 0
    return {"line": line, "barrier": array} if line else None


def _passed_unfilled(failure: Failure) -> Facts | None:
    """The first wait on a barrier that copies land on asks for the phase before the first."""
    if failure.kind not in SYNCHRONISATION:
        return None
    early = {
        base_of(name): role
        for name, use in failure.error.report.barrier_use.items()
        for (role, parity), passed in use.waits.items()
        if parity == 1 and passed and use.phases < 2
    }
    early |= {
        array: role_of(wait.role)
        for wait, array, _ in _stuck(failure)
        if wait.parity == 1 and not wait.passed
    }
    for array in _announced(failure) & early.keys():
        line = failure.find(rf"barrier_wait\(\s*{array}\b")
        return {"line": line, "barrier": array, "who": failure.name(early[array])}
    return None


def _phase_per_turn(failure: Failure) -> Facts | None:
    """The phase is that of a block, where each stage has a barrier of its own."""
    if failure.kind not in SYNCHRONISATION or failure.facts.get("stages", 0) < 2:
        return None
    line = failure.find(r"phase = \(?\w+\)? ?(& ?1|% ?2)\s*$")
    return {"line": line} if line else None


def _filled_twice(failure: Failure) -> Facts | None:
    arrivals = re.search(r"arrivals? in phase (\d+), which expects 0 more", failure.message)
    twice = failure.kind == "BarrierMisuse" and arrivals
    barrier = failure.error.barrier if twice else ""
    return {"line": failure.first, "barrier": barrier, "phase": arrivals[1]} if twice else None


def _endless(failure: Failure) -> Facts | None:
    spins = failure.kind == "Deadlock" and " spins " in failure.message
    return {"line": failure.first} if failure.kind == "time" or spins else None


RULES = [
    Rule(
        "blank", is_kind("empty"), "Nothing is stored yet.",
        "Every row of the output must be written once, also where there is nothing to sum up.",
        "Begin with the hole in line {open}.", "forward/v1_tiled",
    ),
    Rule(
        "zeros", is_kind("zeros"), "{output} is 0 everywhere.",
        "What begins as 0 must get its parts.",
        "Look at what {output} is made of; the next hole is in line {open}.",
        "forward/v1_tiled",
    ),
    Rule(
        "predict-first", is_kind("predict"), "Predict before you look: {name} is still None.",
        "A prediction that is wrong teaches more than a number that was read.",
        "A number of cycles, or an expression for it.", "measuring/roofline",
    ),
    Rule(
        "endless", _endless, "A loop does not end: line {line}.",
        "Nothing that it tests changes from turn to turn.",
        "A loop over rows is tl.range(first, last, BLOCK).", "forward/v1_tiled",
    ),
    Rule(
        "too-much-changed", is_kind("changed"),
        "It passes, but {changed} lines differ from the file you got, and the bug is in {most}.",
        "The exercise is to find the cause, not to write another kernel.",
        "Undo changes one by one until only the cure is left.", "tools/emulator",
    ),
    Rule(
        "released-too-early", _released_early,
        "Line {line} lets go of {buffer} before {reads}, which reads it, has ended {end}.",
        "An MMA is only issued; the tensor core reads until its wait returns. An arrival says: "
        "nothing of mine reads this any more.",
        "Move the arrival behind that end.", "forward/first_tlx_kernel",
    ),
    Rule(
        "never-released", _never_released,
        "{who} waits for ever in line {line}: no line ever arrives on {barrier}.",
        "A stage is filled again only after those who read it have let go of it: that shows at "
        "the block after the last stage, and a test with fewer blocks passes.",
        "Who reads a stage arrives on its empty barrier once per block, when it is done with it.",
        "forward/first_tlx_kernel",
    ),
    Rule(
        "arrival-count", _arrival_count,
        "A phase of {barrier} takes {count} (line {line}), and {roles} roles arrive (line "
        "{arrives}): the first lets go for all.",
        "alloc_barriers counts one for each barrier_arrive of a role; alloc_warp_barrier counts "
        "threads, 32 for each warp.",
        "alloc_barriers with an arrive_count of all roles, or alloc_warp_barrier with them all.",
        "forward/first_tlx_kernel",
    ),
    Rule(
        "phase-per-turn", _phase_per_turn,
        "Line {line} changes the phase with every block; the barriers of a stage change theirs "
        "once per turn of the ring.",
        "Block j takes stage j % STAGES, whose barriers have then completed j // STAGES phases.",
        "phase = (block // STAGES) & 1.", "forward/first_tlx_kernel",
    ),
    Rule(
        "first-wait-parity", _first_wait,
        "{who} never passes line {line}: its first wait on {barrier} is for phase 0, which only "
        "those who wait for it could complete.",
        "Stages begin empty. The parity of the phase before the first passes a fresh barrier.",
        "Wait for empty with the other parity: phase ^ 1.", "forward/first_tlx_kernel",
    ),
    Rule(
        "passed-unfilled", _passed_unfilled,
        "The first wait of {who} on {barrier} (line {line}) asks for the phase before the first.",
        "Stages begin empty, not full. The other parity passes a fresh barrier, a phase too early.",
        "Wait for full with phase, for empty with phase ^ 1.", "forward/first_tlx_kernel",
    ),
    Rule(
        "never-filled", _never_filled,
        "{who} waits in line {line} on {barrier}, and no line ever arrives on it.",
        "Who fills a buffer arrives on its full barrier: a copy with the bytes that it announces.",
        "Copy with that barrier (fetch_rows announces, too), or arrive on it.",
        "forward/first_tlx_kernel",
    ),
    Rule(
        "count-too-high", _short_phase,
        "A phase of {barrier} takes {count} arrivals (line {line}), and only {came} ever come.",
        "alloc_barriers counts one for each barrier_arrive of a role; alloc_warp_barrier counts "
        "threads, 32 for each warp.",
        "Count who arrives once per phase.", "forward/first_tlx_kernel",
    ),
    Rule(
        "filled-twice", _filled_twice,
        "Line {line} arrives on {barrier} again in phase {phase}, which had all its arrivals.",
        "Nobody waited until the stage was empty, or two copies share a barrier that counts one, "
        "or the stage or the phase does not advance.",
        "Per block: one wait for empty, one announcement on each full barrier.",
        "forward/first_tlx_kernel",
    ),
    Rule(
        "read-before-full", _read_early,
        "Line {line} reads {buffer}, and its copy may still be under way.",
        "Only a wait on the full barrier of this very buffer, for this block's phase, says that a "
        "copy is there.",
        "Wait for the barrier that it is fetched with, before it is read.",
        "forward/first_tlx_kernel",
    ),
    Rule(
        "stale-phase", _stale_phase,
        "The wait of line {line} asks for a phase of {barrier} that is over, and passes at once.",
        "A wait names a parity. If that of the last phase is asked for again, it passes at once.",
        "Each time that a barrier is waited for, the phase is the other one.",
        "forward/first_tlx_kernel",
    ),
    Rule(
        "v-is-k", like("v-is-k"), "Your output is what you get with K in the place of V.",
        "S = Q K^T, O = P V.", "Look at what is loaded as V, and what the second MMA reads.",
        "operator/gdpa",
    ),
    Rule(
        "last-block-only", like("last-block-only"),
        "Your output is that of the last block of keys alone.",
        "GDPA has no softmax: blocks of keys simply add up.", "Hand acc to the second MMA.",
        "operator/gdpa",
    ),
    Rule(
        "last-keys", like("last-keys"),
        "Your output is what you get without the keys behind the last whole block: wrong are "
        "{where}.",
        "A length is rarely a multiple of BLOCK_N.", "Round the number of blocks up (tl.cdiv).",
        "forward/v1_tiled",
    ),
    Rule(
        "scale", like("scale"), "Your output is what you get with scale = 1.",
        "GDPA is activation(scale * Q K^T) V.", "Multiply S by scale before the activation.",
        "operator/gdpa",
    ),
    Rule(
        "activation", like("activation"), "Your output is what you get without the activation.",
        "P = activation(scale * S).", "Apply it before P is rounded to bf16.", "operator/gdpa",
    ),
    Rule(
        "unmasked-load", is_kind("OutOfBounds", r"tl\.load\("),
        "Line {line} loads elements that do not exist.",
        "The sequences lie one behind the other: behind the last row of one is the first row of "
        "the next, and behind the last there is nothing.",
        "A mask for the rows that are this sequence's, and other=0.0.", "forward/v1_tiled",
    ),
    Rule(
        "unmasked-store", is_kind("OutOfBounds", r"tl\.store\("),
        "Line {line} stores to elements that do not exist.",
        "The last block is rarely whole.", "Mask the store.", "operator/gdpa",
    ),
    Rule(
        "undefined-lanes", is_kind("UndefinedValue", r"tl\.load\("),
        "Line {line} leaves lanes undefined where its mask is off, and they reach the output.",
        "Triton promises nothing about such lanes; often they are 0 on an NVIDIA GPU.",
        "other=0.0 in that load.", "tools/emulator",
    ),
    Rule(
        "foreign-rows", is_kind("Race", r"tl\.store\(|store_rows\("),
        "Two programs store to the same elements (line {line}).",
        "A block may be longer than what is left of a sequence; which program comes last is left "
        "to chance.",
        "Mask the store, or give each program rows of its own.", "forward/v1_tiled",
    ),
    Rule(
        "unwritten", is_kind("unwritten"),
        "Some rows of {output} are NaN, or never written: {where}.",
        "Every row must be written once, also those of sequences without keys.",
        "Look at which programs return early, and at the masks.", "forward/v1_tiled",
    ),
]  # fmt: skip


GENERAL = {
    "time": "It was still in this line: a loop that does not end, or far too many turns.",
    "Race": "Two accesses to the same memory, one of them a write, that nothing orders.",
    "Deadlock": "No role can go on; each of these lines waits for an arrival that never comes.",
    "BarrierMisuse": "The arrivals, waits and phases of this barrier do not fit together.",
    "AliasedWait": "A wait names a parity only: this one may also pass for an earlier phase.",
    "UninitializedRead": "This is read before anything was written there.",
    "OutOfBounds": "An index lies outside of what it is an index of.",
    "wrong": "Wrong are {where}.",
    "parities": "Of each barrier both parities must be used, or a test proves little.",
}
