# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # How the emulator works
#
# Can a laptop without a GPU tell whether a warp-specialized kernel is right, and where it is not?
#
# :::{admonition} In this chapter
# - A kernel becomes Python on tiles, its roles become greenlets, and "happens before" becomes
#   arithmetic on integers. A race is found even when the result is right.
# - {glue:text}`em_kernels:.0f` kernels that come with fbtriton run unmodified, the Blackwell ones
#   included. Of {glue:text}`em_mutants:.0f` mistakes put into the synchronisation of the Hopper
#   ones and of our rungs {glue:text}`em_found:.0f` are found; each of the other
#   {glue:text}`em_lost:.0f` is listed with its reason.
# - On the H200 all {glue:text}`em_outputs:.0f` outputs that we compared agree within one rounding.
#   What no emulator of this kind can tell is how long a kernel takes.
# :::

# %% tags=["remove-cell"]
import ast
import contextlib
import inspect
import io
import itertools
import json
import re
import tempfile
import textwrap
from collections import Counter
from pathlib import Path

import pandas as pd
import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from IPython.display import SVG, Markdown, display

from gdpa_kernels import emulator
from gdpa_kernels.emulator import __main__ as command
from gdpa_kernels.emulator import barriers, clocks, launch, rewrite, scheduler, timeline
from gdpa_kernels.report import figures, results
from gdpa_kernels.report.house import INK
from gdpa_kernels.report.page import CSV_DIR

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% [markdown]
# This cell compares the emulator with a GPU, with `make measure NOTEBOOKS=tools/emulator`; what it
# finds is shown further below.

# %% tags=["hide-input"]
if mode == "measure":
    from concurrent.futures import ThreadPoolExecutor
    from dataclasses import asdict, fields

    from gdpa_kernels.measuring import record
    from gdpa_kernels.measuring.session import Session
    from tests.emulator import hardware, sanitizer

    session = Session("notebooks/tools/emulator.py", device)
    kernels = sanitizer.newest_first([*sanitizer.CONTROLS, *sanitizer.rungs()])
    with ThreadPoolExecutor(1) as beside:  # nothing here is timed
        said = beside.submit(sanitizer.findings, kernels, seconds=400)
        compared = hardware.everything(session.device)
    found = {"agreement": compared, "sanitizer": said.result()}
    for name, kind in {"agreement": hardware.Agreement, "sanitizer": sanitizer.Finding}.items():
        session.tables[name] = record.Table(
            [field.name for field in fields(kind)],
            [list(asdict(each).values()) for each in found[name]],
        )
    print(session.write(data_dir))

# %% tags=["remove-cell"]
from tests.emulator import mutants, sanitizer, test_mutants, test_tutorials  # noqa: E402
from tests.emulator.tutorials import blackwell, cases, hopper  # noqa: E402

ROOT = Path.cwd()
KERNELS = ROOT / "notebooks" / "tools" / "kernels"
SCHEDULES = ("modelled", *range(test_tutorials.RANDOM_SCHEDULES))
MAX_STEPS = 100_000
SCRATCH = tempfile.TemporaryDirectory()


def code(text: str, language: str = "python") -> Markdown:
    return Markdown(f"```{language}\n{text.rstrip()}\n```")


def screen(text: str) -> Markdown:
    """What a command printed, long lines folded."""
    folded = (
        textwrap.fill(line, 74, break_on_hyphens=False, subsequent_indent="    ")
        for line in text.splitlines()
    )
    return code("\n".join(folded), "console")


def shorten(text: str) -> str:
    """Paths of files as the names of these files, and one line."""
    text = re.sub(r"/\S*/(?=[\w-]+\.py:\d)", "", str(text))
    return text.replace(":\n  ", ": ").replace("\n  ", "; ")


def glue(name: str, value: float) -> None:
    figures.glue_number(f"em_{name}", value)


def statement(error: emulator.EmulatorError, line: int) -> str:
    """The line of the kernel's file, without its comment."""
    return Path(error.file).read_text().splitlines()[line - 1].split("#")[0].strip()


glue("schedules", len(SCHEDULES))
glue("random", test_tutorials.RANDOM_SCHEDULES)
glue("share_least", 100 * test_mutants.SMALLEST_SHARE)

# %% [markdown]
# ## What is missing on a laptop
#
# Warp-specialized kernels split a program into roles. One warp only asks for copies, others
# only multiply, others only finish; between them lie buffers in shared and tensor memory, and
# barriers that say when a buffer is full and when it is empty. A mistake there does not look like a
# wrong formula. The kernel hangs, or gives wrong numbers once in a thousand launches, or gives
# right ones on this GPU with this compiler. And for Blackwell we have no machine at all.
#
# | | on the GPU | in the emulator |
# |:--|:--|:--|
# | program | machine code | the same Python source, on tiles |
# | a role | warps | a greenlet with its own variables |
# | copies, matrix products | engines that run beside the warps | operations that complete later |
# | who comes first | the hardware | a schedule: modelled, or drawn at random |
# | a missing wait | the right result, mostly | an error with two lines of the kernel |
#
# ## Prediction
#
# An emulator is a claim about a machine, and can be wrong in both directions. Three predictions,
# each with what would falsify it:
#
# 1. *No false alarm.* The kernels that come with fbtriton {cite}`fbtriton` run as they are, under
#    {glue:text}`em_schedules:.0f` schedules each, and give what PyTorch gives. One alarm that is
#    not a defect of the kernel falsifies it.
# 2. *Few misses.* Take a right kernel and break one statement of its synchronisation: at least
#    {glue:text}`em_share_least:.0f` % of such mutants are found, and each of the others can be
#    proved harmless.
# 3. *The same numbers.* On a GPU the same launch gives the same output up to one rounding of the
#    output's dtype. A matrix product may add in another order, and the special functions of a GPU
#    are approximations; nothing else may differ.
#
# ## From source to functions of tiles
#
# A `@triton.jit` function is Python, so Python can run it, if `tl.load` and its likes are replaced
# by functions of tensors and a few things mean what they mean in Triton. A role is the one thing
# that Python cannot run in this way: the bodies of all `async_task` blocks run at the same time,
# and each starts with its own copies of the values around it. So a body becomes a function of the
# names that it uses. Here `step` is 1 for both tasks, whatever the first does with it:


# %%
@triton.jit
def copies_kernel(out_ptr):
    step = 1
    with tlx.async_tasks():
        with tlx.async_task("default"):
            step += 1
            tl.store(out_ptr, step)
        with tlx.async_task(num_warps=1):
            tl.store(out_ptr + 1, step)


out = torch.zeros(2, dtype=torch.int32)
emulator.run(copies_kernel, (1,), out)
print(out.tolist())

# %% tags=["remove-cell"]
assert out.tolist() == [2, 1]

# %% [markdown]
# This is what the emulator executes:

# %% tags=["remove-input"]
source = ast.parse(textwrap.dedent(inspect.getsource(copies_kernel.fn)))
code(ast.unparse(rewrite._Rewriter("").function(source.body[0])))

# %% [markdown]
# The region starts its roles when its block ends. A role is a greenlet, a function that can be
# left in the middle and resumed there. Exactly one runs at a time, up to the next operation that
# another role can notice; there the scheduler decides who goes on. No thread and no lock is
# involved, and a run can be repeated exactly. Line numbers stay those of the file, so an error
# names the line of the kernel.
#
# ## Two roles and two buffers
#
# All further ideas can be seen in one small kernel, `notebooks/tools/kernels/pipeline.py`. For each
# of 64 queries it finds the largest score over all keys. `load` asks TMA for one block of keys
# after the other, into two buffers in turn; `math` multiplies.

# %% tags=["remove-input"]
PIPELINE = KERNELS / "pipeline.py"
pipeline = mutants.import_file(PIPELINE)
code(f"{inspect.getsource(pipeline.load.fn)}\n\n{inspect.getsource(pipeline.math.fn)}")

# %% tags=["remove-input"]
Markdown("\n".join(re.findall(r"(?:^\|.*\n)+", inspect.getdoc(pipeline), flags=re.MULTILINE)))


# %% tags=["remove-cell"]
def run_main(module, schedule="modelled", **options) -> emulator.Report:
    """The launch that main() makes, in the emulator; main() checks the result."""
    with emulator.intercept(schedule=schedule, max_steps=MAX_STEPS, **options) as reports:
        module.main()
    return reports[0]


correct = run_main(pipeline, trace=True)
trace = correct.timeline
waited = [event for event in trace.events if event.kind == "wait" and event.end > event.start]
assert {arrow.source for arrow in trace.arrows} == {"TMA", "math"}
glue("blocks", correct.dots)

# %% tags=["remove-input"]
# | name: fig-emulator-pipeline
# | caption: >
# |   The pipeline with five blocks of keys, one CTA. Above the roles, below them the engines; an
# |   arrow leads from the arrival that completed a phase to the wait that it ended. Modelled
# |   cycles.
# | alt: >
# |   Four lanes over time. TMA fills the two buffers at once, then math waits for the first, the
# |   tensor core multiplies, and an arrow from math to load ends the wait of load, which asks TMA
# |   for the next block. From then on the roles take turns, buffer by buffer.
display(SVG(trace.svg(width=720)))

# %% tags=["remove-input"]
figures.source(
    "emulated",
    "notebooks/tools/kernels/pipeline.py under the modelled schedule; cycles are modelled",
)

# %% [markdown]
# ## A barrier is two counters and a parity
#
# An mbarrier of the hardware {cite}`nvidiaptx` counts down the arrivals that its current phase
# still lacks, and the bytes that were announced and have not come. At zero of both the phase is
# over and the next begins. A wait does not name a phase, it names a parity, and passes if the phase
# of that parity is the last one completed. In ten lines:


# %%
class Barrier:
    def __init__(self, count):
        self.count = self.pending = count
        self.phase = self.bytes = 0

    def arrive(self, count=0, expect=0, deliver=0):
        self.pending -= count
        self.bytes += expect - deliver
        if self.pending == self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count

    def passes(self, parity):
        return self.phase % 2 != parity


fresh, k_full = Barrier(1), Barrier(1)
print("fresh:", fresh.passes(0), fresh.passes(1))
k_full.arrive(1, expect=16384)
print("announced:", k_full.passes(0), k_full.passes(1))
k_full.arrive(deliver=16384)
print("delivered:", k_full.passes(0), k_full.passes(1))

# %% tags=["remove-cell"]
assert (fresh.passes(0), fresh.passes(1)) == (False, True)
assert (k_full.passes(0), k_full.passes(1)) == (True, False)
assert all(e.bytes in (0, 16384) for e in trace.events if e.target == "k_full[0]")

# %% [markdown]
# A fresh barrier lets a wait for parity 1 pass. That is why `load` waits with `phase ^ 1`: it finds
# its buffers empty without anybody having released them. And since a parity cannot tell phase 0
# from phase 2, a role that is late by two phases sleeps for ever, and one that counts wrongly
# passes at once. The emulator keeps the number of the phase and can say so. What happened to the
# barriers of the first buffer:

# %% tags=["remove-input"]
rows = [
    {
        "cycle": f"{event.end:,.0f}",
        "who": event.lane,
        "what": f"{event.name}" + (f", parity {(event.phase & 1)}" if event.kind == "wait" else ""),
        "phase": event.phase,
        "arrivals missing": event.pending,
        "bytes missing": f"{event.bytes:,}",
    }
    for event in sorted(trace.events, key=lambda e: e.end)
    if event.target in ("k_full[0]", "k_empty[0]")
][:9]
figures.show_table(pd.DataFrame(rows).astype(str))

# %% tags=["remove-input"]
figures.source(
    "emulated", "the same launch; a wait for phase -1 is one that a fresh barrier lets pass"
)

# %% [markdown]
# ## Before and after, as integers
#
# A copy writes its buffer some time after it was asked for. The emulator moves the bytes at once
# and remembers that this is not known to anybody yet: every asynchronous operation is one bit, and
# a role *knows* the operation when the bit is in its set. It gets there when the role waits for the
# operation itself, or through a barrier: an arrival leaves there what the arriving side knows, and
# a wait that passes takes it over.
# What a role did itself is known as a number: it counts its own releases, its *epochs*, and
# "everything that `load` did up to its epoch 2" is one entry. Numbers and bits together are a
# vector clock, and what it computes is the relation "happened before" {cite}`lamport1978time`.

# %% tags=["remove-input"]
# | name: fig-emulator-clocks
# | caption: >
# |   Two uses of buffer k[0]. Arrows: what one side learns from another. In brackets what it knows
# |   then: the epoch of load, the epoch of math, the completed operations. Dashed: the wait on
# |   k_empty. Without it nothing leads from the read of math to copy B.
# | alt: >
# |   Three lanes. load asks for copy A, which ends in an arrow to math. math waits, reads, and
# |   arrives; a dashed arrow leads from there to the wait of load, which then asks for copy B. The
# |   clocks in brackets grow along the arrows.
LANES = {"load": 2, "TMA": 1, "math": 0}
POINTS = {
    "ask for A": ("load", 0.0, "1, 0, {}"),
    "A complete": ("TMA", 1.7, "1, 0, {A}"),
    "wait k_full[0]": ("math", 3.4, "1, 1, {A}"),
    "read k[0]": ("math", 5.4, "1, 1, {A}"),
    "arrive k_empty[0]": ("math", 7.5, "1, 1, {A}"),
    "wait k_empty[0]": ("load", 8.6, "2, 1, {A}"),
    "ask for B": ("load", 10.8, "2, 1, {A}"),
    "B complete": ("TMA", 12.5, "2, 1, {A, B}"),
}
STEPS = [
    ("ask for A", "A complete"),
    ("A complete", "wait k_full[0]"),
    ("arrive k_empty[0]", "wait k_empty[0]"),
    ("ask for B", "B complete"),
]
with figures.style():
    chart, axis = figures.subplots(width=7.2, height=3.8)
    for y in LANES.values():
        axis.axhline(y, color=INK, linewidth=0.6, alpha=0.5)
    for name, (lane, x, knows) in POINTS.items():
        above, below = (19, 8) if lane != "math" else (-18, -31)
        axis.plot(x, LANES[lane], "o", color=figures.colour("v2_tma"), markersize=6)
        for text, shift in ((name, above), (f"[{knows}]", below)):
            side = "center" if lane != "TMA" else "left"
            axis.annotate(
                text, (x, LANES[lane]), ha=side, fontsize=8.5,
                xytext=(0 if side == "center" else 8, shift), textcoords="offset points",
            )  # fmt: skip
    for start, end in STEPS:
        (lane, x, _), (other, right, _) = POINTS[start], POINTS[end]
        axis.annotate(
            "", (right, LANES[other]), (x, LANES[lane]),
            arrowprops={
                "arrowstyle": "-|>", "color": figures.colour("v1_tiled"), "linewidth": 1.4,
                "linestyle": "--" if start.startswith("arrive") else "-",
                "shrinkA": 6, "shrinkB": 6,
            },
        )  # fmt: skip
    axis.set_yticks(list(LANES.values()), list(LANES))
    axis.set_ylim(-0.62, 2.55)
    axis.set_xlim(-1.1, 14.6)
    axis.set_xticks([])
    axis.grid(visible=False)
    axis.set_xlabel("order of events, no time")
display(chart)

# %% tags=["remove-input"]
figures.source("modelled", "the rules of gdpa_kernels.emulator.clocks, applied by hand")

# %% [markdown]
# Two accesses to the same bytes, one of them a write, race if the later side does not know the
# earlier one. Which bytes: a mask, one bit for each byte of the buffer, so that overlap is `&`. The
# classes that do this in the emulator, used alone:

# %%
BYTES, AT = 2**16 - 1, ("pipeline.py", 0)
LOAD, MATH, A, B = 0, 1, 0b01, 0b10
load, math = clocks.Clock({LOAD: 1}), clocks.Clock({MATH: 1})
k0 = clocks.Shadow()

copy_a = clocks.Access(LOAD, 1, A, True, BYTES, AT, "copy A")
k0.record(copy_a, load)
math.join(clocks.Clock({LOAD: 1}, operations=A))  # math waits for k_full[0]
read = clocks.Access(MATH, 1, 0, False, BYTES, AT, "math")
print("math reads:", k0.record(read, math))

copy_b = clocks.Access(LOAD, 2, B, True, BYTES, AT, "copy B")
print("copy B, without a wait: races with", k0.record(copy_b, load).who)
load.join(math)  # load waits for k_empty[0]
print("copy B, after a wait:", k0.record(copy_b, load))

# %% [markdown]
# Without the wait `load` does not even know that its own copy A is over, let alone that `math` has
# read the buffer; the wait tells it both.
#
# Nothing here asks when something happened. Whether a chain of arrivals and waits leads from one
# access to another follows from the program, not from the order in which the emulator happened to
# run the roles. So a race between two accesses that take place is found under *any* schedule that
# performs them. Below, `math` releases its buffer at once, before it multiplies, in
# {glue:text}`em_schedules:.0f` schedules:

# %% tags=["hide-input"]
RELEASE = "        tlx.barrier_arrive(k_empty[stage])\n"
WAIT = "        tlx.barrier_wait(k_full[stage], phase)\n"


def imported(text: str, name: str):
    """The module of a file `name` with this text."""
    path = Path(tempfile.mkdtemp(dir=SCRATCH.name)) / name
    path.write_text(text)
    return mutants.import_file(path)


early = imported(
    PIPELINE.read_text().replace(RELEASE, "").replace(WAIT, WAIT + RELEASE), PIPELINE.name
)
lines, wrong = Counter(), 0
for schedule in SCHEDULES:
    try:
        run_main(early, schedule)
    except emulator.Race as error:
        lines[tuple(sorted((error.line, error.other[1])))] += 1
    try:
        run_main(early, schedule, races=False)
    except AssertionError:
        wrong += 1
for pair, times in lines.items():
    print(f"a race of lines {pair[0]} and {pair[1]} under {times} of {len(SCHEDULES)} schedules")
print(f"with the search for races switched off, wrong results under {wrong}")

# %% tags=["remove-cell"]
assert list(lines.values()) == [len(SCHEDULES)], "one race, under every schedule"
assert 0 < wrong < len(SCHEDULES), "the text says that results show it at times"
glue("wrong", wrong)
for name in ("COPY_LATENCY", "COPY_BYTES_PER_CYCLE", "SHARED_BYTES_PER_CYCLE"):
    glue(name.lower(), getattr(scheduler, name))
for arch, flops in scheduler.MMA_FLOPS_PER_CYCLE.items():
    glue(f"mma_{arch}", flops)

# %% [markdown]
# Looking at results alone, {glue:text}`em_wrong:.0f` of the {glue:text}`em_schedules:.0f` schedules
# would have shown the mistake.
#
# ## A parity knows only even and odd
#
# In `notebooks/tools/kernels/turns.py` two roles add up the rows of a matrix. `load` fills a ring
# of three slots in turn, and each role takes every second row:

# %% tags=["remove-input"]
turns = mutants.import_file(KERNELS / "turns.py")
code(inspect.getsource(turns.add.fn))

# %% [markdown]
# With three slots and two roles each slot goes from one role to the other. The first waits of
# `add[1]` are for row 1, in slot 1, and row 3, the second filling of slot 0. Whether the first
# filling, row 0, has come is the other role's business. If it has not, `full[0]` has completed no
# phase, and a wait for parity 1 passes at once, as on a fresh barrier. The role adds up what is not
# there, and then releases the slot in the other's place. All it takes is a copy that lands after
# one that was asked for later; the first access to a page, say, takes longer than the next.
#
# We built variants of a kernel for block attention in this way. On the H200 they failed with
# "unspecified launch failure" or hung, some at the first launch, some after many, most of them only
# when launches followed each other without a wait. The emulator had seen nothing: its modelled
# schedule completes copies in the order of their issue, and the random ones, which do not, hardly
# ever made one late enough.
#
# Now they let some copies be late. But the cure is a proof. When a wait passes for phase
# $k$, what the role knew as it began to wait must include the end of phase $k - 1$. If it does not,
# another order of events lets the wait begin earlier, and pass for phase $k - 2$. Like a race this
# follows from the program alone, so it is found where every copy is on time:


# %% tags=["remove-cell"]
def turn(slots: int, roles: int, schedule: str | int) -> emulator.EmulatorError | None:
    """What is found in a ring whose slots are used twice."""
    try:
        with emulator.intercept(schedule=schedule, max_steps=MAX_STEPS):
            turns.main(slots, roles, 2 * slots)
    except emulator.EmulatorError as error:
        return error


SLOTS, ROLES = range(3, 7), (1, 2, 3)
ring = {(s, r, at): turn(s, r, at) for s in SLOTS for r in ROLES for at in SCHEDULES}
kinds = {key: type(error).__name__ if error else "-" for key, error in ring.items()}
for (slots, roles, schedule), kind in kinds.items():
    assert (kind == "-") == (slots % roles == 0), (slots, roles, schedule, kind)
    assert schedule != "modelled" or kind in ("-", "AliasedWait"), (slots, roles, kind)
example = Counter(kinds[3, 2, schedule] for schedule in SCHEDULES)
assert example.keys() == {"AliasedWait", "Race"}, "the text names these two"
glue("aliased", example["AliasedWait"])

# %% tags=["remove-input"]
screen(f"{kinds[3, 2, 'modelled']}: {shorten(ring[3, 2, 'modelled'])}")

# %% [markdown]
# The same with other numbers of slots and roles, under the modelled schedule:

# %% tags=["remove-input"]
figures.show_table(
    pd.DataFrame(
        {"slots": slots} | {f"roles: {roles}": kinds[slots, roles, "modelled"] for roles in ROLES}
        for slots in SLOTS
    )
)

# %% tags=["remove-input"]
figures.source("emulated", "notebooks/tools/kernels/turns.py, each slot used twice")

# %% [markdown]
# Where the number of slots is a multiple of the number of roles, a slot has one owner, whose own
# last wait is the proof. All others are found, under each of the {glue:text}`em_schedules:.0f`
# schedules. Three slots and two roles show as this error under {glue:text}`em_aliased:.0f` of them;
# under the rest a copy was late indeed, and the race that follows is found. Not every ring of three
# slots is wrong for two roles: if `load` stored the rows itself, row 1 in its slot would prove that
# row 0 is there too, since the stores of one role land in its order. The emulator accepts that.
#
# ## Time, for the picture only
#
# The modelled schedule gives every role and engine a clock of another kind: cycles. A copy takes
# {glue:text}`em_copy_latency:.0f` cycles and moves {glue:text}`em_copy_bytes_per_cycle:.0f` bytes a
# cycle, a product {glue:text}`em_mma_sm_90:,.0f` FLOPs a cycle on Hopper and
# {glue:text}`em_mma_sm_100:,.0f` on Blackwell, shared memory moves
# {glue:text}`em_shared_bytes_per_cycle:.0f` bytes a cycle, and whoever is behind goes first. That
# makes a readable figure and one plausible order of events. It is no prediction of time; a number
# after the schedule seeds random choices instead, which reach orders that no GPU would show for
# years.
#
# ## Step through it
#
# The page below shows the same kernel five times: as it is, and with one statement broken. Step
# with the buttons or the arrow keys; after the last step it says what the emulator found.


# %% tags=["remove-cell"]
every = {m.what: m for m in mutants.enumerate_mutants(PIPELINE, "pipeline_kernel")}
VARIANTS = {
    "no wait on k_empty": "drop barrier_wait(k_empty[stage]",
    "flipped parity": "barrier_wait(k_full[stage]): phase=",
    "wrong byte count": "size=BYTES * 2",
    "released too early": "barrier_arrive(k_empty[stage]) before scores = async_dot_wait",
}
timelines, sources, outcomes = {"correct": trace}, {"correct": PIPELINE.read_text()}, {}
outcomes["correct"] = "Nothing found: no race, no misuse of a barrier, and the right result."
found = []
for name, what in VARIANTS.items():
    (mutant,) = (mutant for change, mutant in every.items() if what in change)
    try:
        run_main(imported(mutant.source, PIPELINE.name), trace=True)
        raise AssertionError(f"{name}: nothing was found")
    except emulator.EmulatorError as error:
        timelines[name], sources[name] = error.report.timeline, mutant.source
        outcomes[name] = f"{type(error).__name__}: {shorten(error)}"
        found.append({"variant": name, "found": type(error).__name__, "message": shorten(error)})
PAGE = CSV_DIR / "emulator-pipeline.html"
PAGE.parent.mkdir(parents=True, exist_ok=True)
PAGE.write_text(
    timeline.interactive(
        timelines, sources, title="A pipeline of two roles, step by step", outcomes=outcomes
    ),
    encoding="utf-8",
)
assert "/tmp" not in PAGE.read_text() and str(ROOT) not in PAGE.read_text()

# %% tags=["remove-input"]
Markdown(
    '<iframe src="../../figures/emulator-pipeline.html" title="The pipeline, step by step" '
    'style="width:100%;height:46rem;border:1px solid #787878;border-radius:6px">'
    "</iframe>\n\n"
    '<p><a href="../../figures/emulator-pipeline.html">Open it as a page of its own</a>; one file, '
    "which works from a disk.</p>"
)

# %% tags=["remove-input"]
figures.source(
    "emulated", "notebooks/tools/kernels/pipeline.py and four of its mutants, modelled schedule"
)

# %% tags=["remove-input"]
figures.show_table(pd.DataFrame(found))

# %% [markdown]
# Without the wait `load` announces bytes on a barrier whose phase is not over. With the flipped
# parity `math` passes a barrier that nobody has completed. With the wrong count both wait for bytes
# that nobody sends. And the early release gives the right result, a fine figure, and a race.
#
# ## Evidence 1: kernels that others wrote
#
# fbtriton ships kernels as tutorials. The emulator's tests launch them as their own host code does,
# on small inputs, and compare each output with the mathematics in double precision. The table is
# made from the list of these launches, `tests/emulator/tutorials`; one launch of each kernel ran
# just now, under the modelled schedule.

# %% tags=["remove-cell"]
FAULTY = {case.name: errors for case, errors in blackwell.FAULTY}
listed = [*hopper.CASES, *blackwell.CASES, *(case for case, _ in blackwell.FAULTY)]
kernels, last = {}, {}
for case in listed:
    prepared = case.build()
    function = prepared.kernel
    while hasattr(function, "fn"):
        function = function.fn
    key = (Path(function.__code__.co_filename).name, function.__name__)
    row = kernels.setdefault(key, {"arch": case.arch, "launches": 0})
    row["launches"] += 1
    last[key, case.name in FAULTY] = (case, prepared)
for (key, faulty), (case, prepared) in last.items():
    row = kernels[key]
    try:
        report = emulator.run(
            prepared.kernel, prepared.grid, *prepared.args, arch=case.arch, **prepared.kwargs
        )
        prepared.check()
        assert not faulty, case.name
        row |= {"roles": len(report.warps) or 1, "unwritten reads": report.uninitialized}
        row["result"] = "right"
    except emulator.EmulatorError as error:
        kind = type(error).__name__
        assert kind in FAULTY.get(case.name, ()), f"{case.name}: {error}"
        row["result"] = f"right; no keys: {kind}" if "result" in row else f"refused: {kind}"
        row["message"] = shorten(error)
table = pd.DataFrame(
    {"file": file.removesuffix(".py"), "kernel": name, **row}
    for (file, name), row in sorted(kernels.items())
)
glue("kernels", len(table) - 1)
glue("launches", len(listed) - len(FAULTY))
glue("faulty", len(FAULTY))
refused = table[table["result"].str.startswith("refused")]
assert list(refused["file"]) == ["blackwell-gdpa"], "the text says that only gdpa is refused"
allowed = table[table["unwritten reads"] > 0]
assert set(allowed["kernel"]) == {"_attn_fwd_ws", "_attn_fwd_clc"}
assert allowed["file"].str.startswith("blackwell_fa").all(), "the text says: Blackwell forwards"
glue("allowed", len(allowed))
glue("files", table["file"].nunique() - len(refused))
unlisted = {
    path.stem for path in cases.FOLDER.glob("*.py") if not path.name.startswith("amd_")
} - set(table["file"])
figures.glue_text("em_unlisted", ", ".join(sorted(unlisted)))
on_blackwell = table[table["arch"] == "sm_100"]
glue("blackwell", len(on_blackwell) - 1)

# %% tags=["remove-input"]
by_file = table.groupby("file")
figures.show_table(
    pd.DataFrame(
        {
            "result": by_file["result"].agg(lambda found: max(found, key=len)),
            "launches": by_file["launches"].sum(),
            "roles": by_file["roles"].max(),
            "unwritten": by_file["unwritten reads"].sum(),
        }
    ).reset_index()
)

# %% tags=["remove-input"]
figures.source(
    "emulated",
    f"fbtriton {triton.__version__}, executed when this page was built. launches: those of the "
    "tests; roles: instruction streams of a CTA; unwritten: reads of memory that nobody wrote",
)

# %% [markdown]
# {glue:text}`em_kernels:.0f` kernels of {glue:text}`em_files:.0f` files run and are right, in
# {glue:text}`em_launches:.0f` launches; `tests/emulator/test_tutorials.py` repeats each under
# {glue:text}`em_random:.0f` random schedules besides. {glue:text}`em_blackwell:.0f` of them are
# written for Blackwell, where for us this is the only execution there is. (Not in the list are the
# kernels for AMD, and {glue:text}`em_unlisted`.) Three things stand out.
#
# - *gdpa is refused.* It asks for a number of registers for its default task, and TLX itself does
#   not take that ("{glue:text}`em_gdpa_message`"). It also has a race; see below.
# - *{glue:text}`em_allowed:.0f` forward kernels for Blackwell read tensor memory that nobody
#   wrote.* The tests let that pass explicitly (`uninitialized="allow"`); such a read gives NaN.
# - *Cross-attention without keys hangs*: a role waits for a product that no key asks for.
#
# Each of these is a property of the kernel, so the first prediction holds: no false alarm.

# %% tags=["remove-cell"]
gdpa_row = table[table["file"] == "blackwell-gdpa"].iloc[0]
figures.glue_text("em_gdpa_message", gdpa_row["message"].split("] ")[1])
hanging = table[table["result"].str.contains("Deadlock")]
assert list(hanging["file"]) == ["blackwell-cross-attention"]

# %% [markdown]
# ## Evidence 2: mistakes made on purpose
#
# A checker that never complains would pass the first test. So the tests break kernels: they drop an
# operation, take the other parity, change a count of arrivals or of bytes, release a buffer too
# early, or take the next barrier. In the pipeline above, all of them:


# %% tags=["remove-input"]
def judge(mutant: mutants.Mutant) -> mutants.Verdict:
    return mutants.judge(mutant, mutants.import_file, [run_main])


verdicts = [(mutant, judge(mutant)) for mutant in every.values()]
figures.show_table(
    pd.DataFrame(
        {
            "kind": mutant.kind,
            "line": mutant.lines[0],
            "change": f"`{mutant.what}`",
            "found as": verdict.error or "-",
        }
        for mutant, verdict in verdicts
    )
)

# %% tags=["remove-cell"]
glue("small", len(verdicts))
missed = [mutant for mutant, verdict in verdicts if not verdict.error]
assert not missed, [mutant.what for mutant in missed]
subjects = {name: [m for m, _ in test_mutants._executed(name)[0]] for name in test_mutants.SUBJECTS}
counted = []
for name, tested in subjects.items():
    harmless = test_mutants.HARMLESS.get(name, {})
    assert set(harmless) <= {mutant.what for mutant in tested}
    row = {"kernel": name}
    for kind in mutants.KINDS:
        of_kind = [mutant for mutant in tested if mutant.kind == kind]
        lost = sum(mutant.what in harmless for mutant in of_kind)
        row[kind] = f"{len(of_kind) - lost}/{len(of_kind)}" if of_kind else ""
    row |= {"found": len(tested) - len(harmless), "mutants": len(tested)}
    counted.append(row)
counted = pd.DataFrame(counted)
total, found_all = int(counted["mutants"].sum()), int(counted["found"].sum())
glue("mutants", total)
glue("found", found_all)
glue("lost", total - found_all)
glue("share", 100 * found_all / total)
assert found_all / total >= test_mutants.SMALLEST_SHARE

# %% [markdown]
# All {glue:text}`em_small:.0f` are found. The tests do the same with the Hopper tutorials and with
# the rungs of this book that have barriers (found / made, by kind):

# %% tags=["remove-input"]
figures.show_table(counted)

# %% tags=["remove-input"]
figures.source(
    "emulated",
    "counted from tests/emulator/test_mutants.py, which runs every mutant and fails if one that it "
    "does not list with a reason is missed",
)

# %% [markdown]
# {glue:text}`em_found:.0f` of {glue:text}`em_mutants:.0f`, {glue:text}`em_share:.1f` %. The
# {glue:text}`em_lost:.0f` others are listed in the test, each with the reason why the kernel is
# still right. The last release of a buffer that nobody fills again is one; a wait that another wait
# implies is another. One reason is a limit of the model: the wait for the last TMA store keeps the
# shared memory alive that the store reads, and the end of a CTA is not modelled. A mutant that
# begins to be found, or to be missed, fails the test. So the second prediction holds for these
# kernels but for that wait, which is not proved harmless. Writing the mutants also found a mistake
# that the emulator missed at first: an arrival that is counted in the right phase only because a
# copy was quick. It has a check of its own now.
#
# ## Evidence 3: the same launches on a GPU
#
# Right results in the emulator would mean little if a GPU gave other ones. `make measure
# NOTEBOOKS=tools/emulator` launches the Hopper tutorials, and the rungs of this book in bf16 and
# fp16, on both and compares every output element by element. The unit is one rounding of the
# output's largest value: the distance between two neighbouring numbers of its dtype there. Smaller
# elements are sums of terms of that size, and their errors are too.

# %% tags=["remove-cell"]
SYSTEM = "h200"
recorded = results.latest_record(data_dir, notebook="notebooks/tools/emulator.py", system=SYSTEM)
agreement = results.notebook_table(recorded, "agreement")
assert list(agreement.columns) == [
    "kernel", "output", "dtype", "elements", "different", "roundings"
]  # fmt: skip
family = agreement["kernel"].str.split(r"[ ,]", regex=True).str[0]
agreement["family"] = family.str.removeprefix("hopper_").str.removeprefix("hopper-")
grouped = agreement.groupby(["family", "dtype"], sort=False)
summary = pd.DataFrame(
    {
        "elements": grouped["elements"].sum(),
        "differ (%)": (100 * grouped["different"].sum() / grouped["elements"].sum()).round(3),
        "roundings": grouped["roundings"].max(),
    }
).reset_index()
summary = summary.rename(columns={"family": "kernel"})
assert agreement["roundings"].max() <= 1, "the text says: within one rounding"
gemm = agreement[agreement["kernel"].str.contains("gemm")]
gemm_share = 100 * gemm["different"].sum() / gemm["elements"].sum()
assert gemm_share < 0.2, "the text says that products differ in few elements"
exact = agreement[agreement["different"] == 0]
assert len(exact) > 0, "the text says that some outputs are equal"
glue("outputs", len(agreement))
glue("elements", agreement["elements"].sum() / 1e6)
glue("worst", agreement["roundings"].max())
glue("gemm", gemm_share)
glue("different", 100 * agreement["different"].sum() / agreement["elements"].sum())
glue("equal", len(exact))

# %% tags=["remove-input"]
figures.show_table(summary)

# %% tags=["remove-input"]
figures.provenance([recorded.id], data_dir=Path(data_dir))

# %% [markdown]
# All {glue:text}`em_outputs:.0f` outputs, {glue:text}`em_elements:.1f` million elements, agree
# within one rounding; the largest distance is {glue:text}`em_worst:.2f`.
# {glue:text}`em_equal:.0f` outputs are equal in every bit. Of the elements of matrix products
# {glue:text}`em_gemm:.2f` % differ, of all elements {glue:text}`em_different:.2f` %. Where elements
# differ, a sum that lies between two bf16 or fp16 numbers was rounded up by one and down by the
# other: the tensor core adds in an order, and with an accumulator, that nobody documents, and the
# special functions of the GPU are approximations. The third prediction holds, on Hopper.
#
# ## Evidence 4: the hardware's own tools
#
# NVIDIA's [compute-sanitizer](https://docs.nvidia.com/compute-sanitizer/) watches a kernel on the
# GPU: *memcheck* its addresses, *synccheck* its barriers, *racecheck* its shared memory. `make
# measure
# NOTEBOOKS=tools/emulator` also runs all three on small ragged calls of the rungs that are kernels,
# and on controls, kernels of three tasks that do next to nothing. Racecheck counts pairs of
# accesses: as errors, or as warnings where it takes a pair to be possibly intended.

# %% tags=["remove-cell"]
tools = results.notebook_table(recorded, "sanitizer")
NUMBERS = ["errors", "warnings", "elsewhere"]
assert list(tools.columns.drop("calls", errors="ignore")) == ["impl", "tool", *NUMBERS, "failure"]
counts = tools.astype(dict.fromkeys(NUMBERS, float)).pivot(
    index="impl", columns="tool", values=NUMBERS
)
order = [name for name in (*sanitizer.CONTROLS, *sanitizer.rungs()) if name in counts.index]
assert set(order) == set(counts.index), "a rung of the record is gone"
lost = tools[tools["failure"].notna()]
failed = {(row.impl, row.tool): row.failure for row in lost.itertuples()}
SAID = {
    "memcheck": ("errors", "memcheck"),
    "synccheck": ("errors", "synccheck"),
    "racecheck": ("errors", "racecheck"),
    "of these in the body": ("elsewhere", "racecheck"),
    "warnings": ("warnings", "racecheck"),
}
ladder_of = {
    name: sanitizer.rung_of(name).operator for name in order if name not in sanitizer.CONTROLS
}
called = {name: len(sanitizer.calls(name, torch.device("cpu"))) for name in ladder_of}
with_tasks = [name for name in ladder_of if sanitizer.kernels_with_tasks(name)]


def passes(name: str) -> int:
    """Forward and backward calls of a rung, or the launch of a control."""
    if name in sanitizer.CONTROLS:
        return 1
    return called[name] * (2 if ladder_of[name] == "block_attention" else 1)


said = pd.DataFrame(
    {"kernel": order, "calls": [passes(name) for name in order]}
    | {name: [counts.loc[impl, key] for impl in order] for name, key in SAID.items()}
)
ZERO = ["memcheck", "synccheck", "of these in the body"]
assert (said[ZERO].fillna(0) == 0).all(axis=None), "the text: nothing found, and nothing in a body"
answered = said.set_index("kernel").dropna().astype(int)  # by all tools
pairs, warnings = answered["racecheck"], answered["warnings"]
assert all(pairs[name] == 0 for name in ladder_of if name in pairs and name not in with_tasks)
for control, function in sanitizer.CONTROLS.items():
    compiled = triton.compile(
        triton.compiler.ASTSource(fn=function, signature={"x_ptr": "*i32"}, constexprs={}),
        target=triton.backends.compiler.GPUTarget("cuda", 90, 32),
    )
    ptx = compiled.asm["ptx"]
    assert all(access in ptx for access in ("st.shared", "ld.shared.b8")), "the byte"
    assert ("mbarrier.try_wait" in ptx) == (control == sanitizer.WAITING)


def listing(items) -> str:
    """ "a, b and c" """
    *first, last = items
    return f"{', '.join(first)} and {last}" if first else last


def each(names) -> str:
    """The one number of calls of these rungs, or the least and the most."""
    least, most = min(called[name] for name in names), max(called[name] for name in names)
    return f"{least}" if least == most else f"{least} to {most}"


KINDS = {
    "gdpa": "forward calls of each rung of GDPA",
    "gdpa_backward": "backward calls of each rung of its backward pass",
    "block_attention": "calls, forward and backward, of each rung of block attention",
}
members = {kind: [name for name in ladder_of if ladder_of[name] == kind] for kind in KINDS}
launched = [f"{each(names)} {KINDS[kind]}" for kind, names in members.items() if names]
launched += [f"one launch of `{name}`" for name in order if name in sanitizer.CONTROLS]

# %% tags=["remove-input"]
about = f"In this record they ran on {listing(launched)}."
if failed:
    about += " Blank: there is no finding."
if "calls" not in tools:
    about += (
        " How many of the calls returned it does not hold: a tool that watches a program which "
        "fails reports what it has seen until then."
    )
Markdown(about)

# %% tags=["remove-input"]
figures.show_table(said)

# %% tags=["remove-input"]
figures.provenance([recorded.id], data_dir=Path(data_dir))

# %% tags=["remove-cell"]
asked = [name for name in with_tasks if name in pairs]
paired = [name for name in asked if pairs[name]]
launches, reports = sum(map(passes, asked)), sum(pairs[name] for name in asked)


def quoted(names) -> str:
    return listing([f"`{name}`" for name in names])


found_there = "No bad address, no misused barrier, and no error in the body of any kernel"
if failed:
    found_there += (
        f", as far as the tools came to an end; {len(failed)} of {len(tools)} runs did not"
    )
found_there += ". "
if paired:
    assert all(pairs[name] <= passes(name) for name in asked), "no more pairs than launches"
    found_there += (
        f"In {len(paired)} of {len(asked)} rungs with tasks racecheck reports pairs, {reports} in "
        f"{launches} launches of kernels with tasks and in no rung more than it has launches, all "
        "at the line of the kernel's `def`, where no statement of ours stands. In rungs without "
        "tasks it reports none. What the compiler adds to a kernel with tasks is one byte for "
        "each warp, which says which task the warp takes next. It is stored by one side and loaded "
        "by the other, and ordered by hardware barriers that the two sides reach at different "
        "instructions."
    )
unfinished = [f"No finding of {tool} for `{name}`: {why}." for (name, tool), why in failed.items()]
clusters = [
    name for name in ladder_of if "ctas_per_cga" in sanitizer.rung_of(name).path.read_text()
]
if failed and {name for name, _ in failed} == set(clusters):
    for name, schedule in itertools.product(clusters, SCHEDULES[:2]):
        with emulator.enabled(schedule=schedule):
            sanitizer.launch(name, torch.device("cpu"))
    unfinished.append(
        "No other rung works in clusters, where programs write into each other's shared memory. "
        "Whether that is the reason, or our patience, or a fault of the kernel, the record does "
        "not say. A script without a record narrows it: of small kernels in clusters of two "
        "programs, those without tasks end under racecheck within seconds; one of two tasks, one "
        "of which arrives on a barrier of the other program, does not within 60, and does without "
        "the tool. The emulator, which follows those writes, runs the same calls to their end "
        f"under {len(SCHEDULES[:2])} schedules and finds nothing."
    )


def control_text(empty: int, waiting: int | None) -> str:
    """What the controls say, from the pairs that racecheck reports of them; None: not measured."""
    silent = (
        "`empty_tasks` was written as a control, to show that pair alone. It does not: the "
        "compiler adds the same store and load to it, and the tool is silent. "
    )
    second = (
        "`waiting_tasks` is a second control, with the same store and load. Its first task arrives "
        "on an mbarrier and the others wait there, and, as in our kernels, they ask for registers; "
        "it touches no other shared memory. "
    )
    if empty:
        alone = f"`empty_tasks`, a control, shows that pair alone, {empty} times: "
        return f"{alone}its tasks touch no shared memory of ours, so the pair is the compiler's."
    if waiting is None:
        return silent + (
            "So the place of the report speaks for the compiler's own byte, and the control does "
            "not confirm it."
        )
    if waiting:
        return silent + second + (
            f"Of it racecheck reports {waiting} {'pair' if waiting == 1 else 'pairs'}, at the line "
            "of its `def` too. So the controls confirm whose the pair is: it is the compiler's own "
            "byte, without any data of ours. When the tool misses its order they do not settle."
        )  # fmt: skip
    return silent + second + (
        "The tool is silent here too. So the place of the report speaks for the compiler's own "
        "byte, and neither control confirms it."
    )  # fmt: skip


seen = [int(pairs[name]) if name in pairs else None for name in sanitizer.CONTROLS]
what_it_shows = control_text(*seen)
if paired and reports < launches and seen[1]:
    fewer = [name for name in asked if pairs[name] < passes(name)]
    assert all("tlx.barrier_wait" in sanitizer.rung_of(n).path.read_text() for n in fewer)
    provided = "" if "calls" in tools else ", provided that all calls returned"
    what_it_shows += (
        " That tasks wait on an mbarrier, which we took for the condition, is not enough"
        f"{provided}: those of {quoted(fewer)} do, and have {launches - reports} reports fewer "
        "than launches."
    )
if "calls" in tools:
    made = tools.dropna(subset="calls")
    assert all(row.calls == called.get(row.impl, 1) for row in made.itertuples())
warned = [name for name in pairs.index if warnings[name]]
if warned:
    what_it_shows += f" What the warnings of {quoted(warned)} are the record does not say"
    if set(warned) <= set(ladder_of) - set(with_tasks):
        what_it_shows += "; in these the compiler, not the source, places the barriers of copies"
    what_it_shows += "."
assert "confirm whose" in control_text(0, 4) and "is silent." in control_text(0, None)
assert "neither control" in control_text(0, 0) and "3 times" in control_text(3, None)

# %% tags=["remove-input"]
Markdown("\n\n".join([found_there, *([what_it_shows] if paired else []), " ".join(unfinished)]))

# %% [markdown]
# The tool has no notion of tasks. The emulator has nothing else, but cannot see what the compiler
# adds. Each covers the other's blind spot.
#
# ## The surprise: what it found without being asked
#
# These kernels are shipped as examples of how to do it. We ran them to test the emulator, and for a
# while each alarm was a bug of ours. These were not.

# %% tags=["remove-cell"]
by_name = {case.name: case for case in listed}
strict = by_name["blackwell_fa_ws small"].build()
try:
    emulator.run(
        strict.kernel, strict.grid, *strict.args, arch="sm_100",
        **strict.kwargs | {"uninitialized": "error"},
    )  # fmt: skip
    raise AssertionError("nothing was found")
except emulator.UninitializedRead as error:
    unwritten = error
scaled = Path(unwritten.file).read_text().splitlines()
assert "acc * alpha" in scaled[unwritten.line], "the text says that it is scaled next"
assert sum("use_acc=i > 0" in line for line in scaled) == 2, "the first product overwrites"

norm = by_name["blackwell-multi-cta-layernorm_test 2 CTAs"].build()
stored = emulator.run(norm.kernel, norm.grid, arch="sm_100", **norm.kwargs)
norm.check()
sizes = {name: norm.kwargs[name].nbytes for name in ("Y", "Mean_out", "Rstd_out")}
twice = stored.bytes_stored - sum(sizes.values())
ctas = norm.kwargs["num_reduction_ctas"]
assert twice == (ctas - 1) * (sizes["Mean_out"] + sizes["Rstd_out"])
glue("stored", stored.bytes_stored)
glue("outputs_bytes", sum(sizes.values()))
glue("statistics", sizes["Mean_out"] + sizes["Rstd_out"])
glue("norm_ctas", ctas)

GDPA = cases.FOLDER / "blackwell-gdpa.py"
asks = 'tlx.async_task("default", registers=ACT_REGS)'
assert GDPA.read_text().count(asks) == 1
alarms = []
with tempfile.TemporaryDirectory() as folder:
    repaired = Path(folder) / GDPA.name
    repaired.write_text(GDPA.read_text().replace(asks, 'tlx.async_task("default")'))
    kernel = test_mutants._import(repaired).gdpa_kernel_tma_ws_blackwell.fn
    for schedule in ("modelled", 0, 1, 2):
        prepared = by_name["blackwell_gdpa"].build()
        try:
            emulator.run(
                kernel, prepared.grid, *prepared.args, arch="sm_100", schedule=schedule,
                **prepared.kwargs,
            )  # fmt: skip
            raise AssertionError("nothing was found")
        except emulator.Race as error:
            alarms.append(error)
            pair = {error.line, error.other[1]}
            reads = [n for n in pair if "local_load(o0_view)" in statement(error, n)]
            assert len(reads) == 1, "the text says that the output is read"
            before = repaired.read_text().splitlines()[reads[0] - 4 : reads[0]]
            assert any("FIXME" in line for line in before), "the text says that a comment knows"
assert {alarm.buffer for alarm in alarms} == {alarms[0].buffer}
glue("alarms", len(alarms))

# %% tags=["remove-input"]
screen("\n".join(f"{type(e).__name__}: {shorten(e)}" for e in (unwritten, alarms[0])))

# %% [markdown]
# *Unwritten tensor memory.* In `blackwell_fa_ws` one role rescales the accumulator before each
# product, {glue:text}`em_unwritten`, also before the first, when nobody has written it. It
# multiplies what happens to lie there, stores it, and the first product overwrites it. The output
# is right, whatever lay there. It costs a load and a store of the whole accumulator, and the next
# author who lets the first product accumulate gets garbage. {glue:text}`em_allowed:.0f` forward
# kernels do it.
#
# *A mean stored twice.* LayerNorm over a cluster of {glue:text}`em_norm_ctas:.0f` CTAs stored
# {glue:text}`em_stored:,.0f` bytes, its outputs have {glue:text}`em_outputs_bytes:,.0f`. The
# difference is the {glue:text}`em_statistics:.0f` bytes of mean and standard deviation again: every
# CTA of the cluster stores them to the same address. Both store the same bits, so this is no error,
# and the emulator lets a store pass that changes nothing. If the CTAs ever summed in different
# orders, it would be a race.
#
# *An output that nobody waits for.* Without the refused registers, gdpa runs into a race under each
# of {glue:text}`em_alarms:.0f` schedules. The role that computes the activation reads the
# accumulator of the output after its last block. The product that completes this accumulator was
# issued by another role, and no barrier lies between them; a comment above the line says that the
# wait is still to be written. A GPU may well finish the product in time, every time; nothing says
# that it must.

# %% tags=["remove-cell"]
figures.glue_text("em_unwritten", statement(unwritten, unwritten.line))

# %% [markdown]
# ## What it proves, and what it cannot
#
# A run without findings says: for *these* inputs and launch parameters, no two accesses of shared,
# tensor or global memory race, whatever the order; no barrier got an arrival or a byte too many; no
# wait can miss its phase, or take an earlier one for it; nothing was read that nobody wrote;
# nothing lay out of bounds; and under the schedules that were tried the kernel ends, with this
# result. It does not say:
#
# - *how long it takes.* Modelled cycles order the figure. Bank conflicts, caches, issue slots and
#   the compiler's choices are not in them.
# - *that the compiler agrees.* Layouts, swizzles, spilled registers and the fences between generic
#   and asynchronous accesses (the "proxies" of PTX) are the compiler's work; the emulator runs the
#   source. {doc}`../forward/v2_tma` looks at machine code for that reason.
# - *that it fits.* Shared memory ({glue:text}`em_smem:,.0f` bytes), tensor memory
#   ({glue:text}`em_tmem:.0f` columns), named barriers ({glue:text}`em_named:.0f`), warps and the
#   registers that tasks ask for ({glue:text}`em_registers:,.0f` per SM) are counted. Registers that
#   the compiler needs are not.
# - *what other clusters do meanwhile.* Clusters run one after the other. Their accesses to global
#   memory are compared, but a kernel that waits for a flag of a later cluster does not end here,
#   and whether all of a grid is resident at once is not asked.
# - *anything about paths that were not taken.* If a race decides which branch a role takes, only
#   the branch that it took has been looked at. Random schedules help, and prove nothing.

# %% tags=["remove-cell"]
glue("smem", launch.SHARED_BYTES)
glue("tmem", launch.TENSOR_COLUMNS)
glue("named", barriers.NUM_NAMED_BARRIERS)
glue("registers", launch.REGISTERS)


# %% tags=["remove-cell"]
def shell(*arguments: str) -> tuple[int, str]:
    """What the command prints, with paths relative to the repository."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = command.main(list(arguments))
    return status, printed.getvalue().replace(f"{ROOT}/", "")


def session_of(*arguments: str, status: int = 0) -> Markdown:
    """A command and its output as a block for the page; its exit status must be `status`."""
    got, text = shell(*arguments)
    assert got == status, text
    shown = " ".join(a.replace(f"{SCRATCH.name}/", "") for a in arguments)
    return screen(f"$ python -m gdpa_kernels.emulator {shown}\n{text}")


# %% [markdown]
# ## Run your own kernel
#
# Any function without arguments will do that launches kernels on CPU tensors. The command runs
# them under the modelled schedule and four random ones:

# %% tags=["remove-input"]
session_of(
    "notebooks/tools/kernels/pipeline.py:main", "--svg", f"{SCRATCH.name}/pipeline.svg",
    "--trace", f"{SCRATCH.name}/pipeline.json",
)  # fmt: skip

# %% tags=["remove-cell"]
events = json.loads(Path(SCRATCH.name, "pipeline.json").read_text())["traceEvents"]
assert Path(SCRATCH.name, "pipeline.svg").read_text().startswith("<svg")
glue("slices", sum(event["ph"] == "X" for event in events))

# %% [markdown]
# `--svg` draws {numref}`fig-emulator-pipeline`. `--trace` writes the same events, here
# {glue:text}`em_slices:.0f`, for the trace viewers chrome://tracing and Perfetto. `--arch sm_100`
# means Blackwell, `--schedules 100` tries longer, and the exit status is 1 if something was found.
# In Python, `emulator.run(kernel, grid, ...)` does the same for one launch, and
# `with emulator.intercept():` for all launches of a piece of host code.
#
# ## Exercises
#
# Their three kernels lie in `notebooks/tools/kernels/` too. Each is a page of code with one
# mistake.
#
# :::{exercise} It hangs
# :label: ex-emulator-deadlock
#
# `deadlock.py` adds up the columns of a matrix of 100 rows, 32 rows at a time. What do you have to
# change? Why did its author, who tested with 64 and with 128 rows, not notice? *(code, ten
# minutes)*
# :::

# %% tags=["remove-input"]
session_of("notebooks/tools/kernels/deadlock.py:main", status=1)


# %% tags=["remove-cell"]
def changed(name: str, old: str, new: str):
    """The module notebooks/tools/kernels/`name`.py with one change."""
    text = (KERNELS / f"{name}.py").read_text()
    assert text.count(old) == 1, old
    return imported(text.replace(old, new), f"{name}.py")


def findings(module, *arguments, schedules=SCHEDULES[:5]) -> set[str]:
    """Names of what is found under the schedules; "" for nothing."""
    names = set()
    for schedule in schedules:
        try:
            with emulator.intercept(schedule=schedule, max_steps=MAX_STEPS):
                module.main(*arguments)
            names.add("")
        except emulator.EmulatorError as error:
            names.add(type(error).__name__)
    return names


deadlock = mutants.import_file(KERNELS / "deadlock.py")
assert findings(deadlock, 100) == {"Deadlock"}
assert findings(deadlock, 64) == findings(deadlock, 128) == {""}
answer = changed("deadlock", "tl.range(rows // BLOCK)", "tl.range(tl.cdiv(rows, BLOCK))")
assert all(findings(answer, rows) == {""} for rows in (1, 31, 64, 100, 128))

# %% [markdown]
# :::{solution} ex-emulator-deadlock
# :class: dropdown
#
# The message names the second buffer and a phase that lacks its only arrival: nobody has announced
# that copy. `load` makes `rows // BLOCK` copies, `add` waits for `tl.cdiv(rows, BLOCK)`. The two
# are equal for multiples of 32, and 64 and 128 are such. `load` needs `tl.cdiv` as well; TMA
# fills the rows beyond the end with zeros, which a sum does not mind.
# :::
#
# :::{exercise} The result is right
# :label: ex-emulator-race
#
# `race.py` multiplies two matrices, and its result is right under every schedule. Which statement
# is wrong, and which buffer may it release instead? *(code, fifteen minutes)*
# :::

# %% tags=["remove-input"]
session_of("notebooks/tools/kernels/race.py:main", status=1)

# %% tags=["remove-cell"]
race = mutants.import_file(KERNELS / "race.py")
assert findings(race, schedules=SCHEDULES) == {"Race"}
for schedule in SCHEDULES:
    run_main(race, schedule, races=False)  # main() checks the result
RELEASE = "        tlx.barrier_arrive(empty[stage])\n"
PREVIOUS = "        if i > 0:\n            tlx.barrier_arrive(empty[(i + 1) % 2])\n"
assert findings(changed("race", RELEASE, PREVIOUS)) == {""}
waits = changed("race", "acc = tlx.async_dot_wait(1, acc)", "acc = tlx.async_dot_wait(0, acc)")
assert findings(waits) == {""}

# %% [markdown]
# :::{solution} ex-emulator-race
# :class: dropdown
#
# `async_dot_wait(1, acc)` returns while one product is in flight, and this is the one just issued:
# it still reads `a[stage]` and `b[stage]`. What is complete is the product before it, so the
# release belongs to the previous buffer:
#
# ```python
# if i > 0:
#     tlx.barrier_arrive(empty[(i + 1) % 2])
# ```
#
# `async_dot_wait(0, acc)` would be right too, and would leave the tensor core idle between two
# products. The result was right all the same because the emulator moves data when an operation is
# issued; a GPU has its own reasons to be lucky.
# :::
#
# :::{exercise} Predict the phase
# :label: ex-emulator-phase
#
# `phase.py` handles several tiles in one persistent program, each of `BLOCKS` blocks, and both
# roles count the blocks of every tile from zero. Which phase does the `k`-th use of a buffer have,
# and for which values of `BLOCKS` is this kernel right? Predict, then try 1 to 12.
# *(paper, then one constant)*
# :::

# %% tags=["remove-input"]
session_of("notebooks/tools/kernels/phase.py:main", status=1)

# %% tags=["remove-cell"]
phase = mutants.import_file(KERNELS / "phase.py")
tried = {blocks: findings(phase, blocks) for blocks in range(1, 13)}
right = [blocks for blocks, names in tried.items() if names == {""}]
assert right == [4, 8, 12]
figures.glue_text("em_right", ", ".join(map(str, right)))
text = (KERNELS / "phase.py").read_text()
ROLL = "            stage, phase = i % 2, i // 2 % 2\n"
NEXT = "            use = tile * blocks + i\n            stage, phase = use % 2, use // 2 % 2\n"
assert text.count(ROLL) == 2
answer = imported(text.replace(ROLL, NEXT), "phase.py")
assert all(findings(answer, blocks) == {""} for blocks in range(1, 13))

# %% [markdown]
# :::{solution} ex-emulator-phase
# :class: dropdown
#
# Use $k$ of a buffer, counted from zero over all tiles, has phase $k$ and parity $k \bmod 2$. The
# kernel is right if every tile uses each of the two buffers an even number of times: if `BLOCKS` is
# a multiple of 4. Of 1 to 12 these are {glue:text}`em_right`; all others are found. A counter that
# runs on over the tiles, `use = tile * blocks + i`, repairs it for every number, with
# `stage, phase = use % 2, use // 2 % 2` in both roles.
# :::
#
# ## Takeaways
#
# - Order, not time, decides whether a kernel is right, and order can be computed on a CPU. A race
#   is a missing path from an access to another one.
# - A right result is weak evidence: a release that came too early showed in the output of
#   {glue:text}`em_wrong:.0f` of {glue:text}`em_schedules:.0f` schedules, and in the clocks of all.
# - Test the tester. Kernels broken on purpose say what it finds, a GPU says whether it computes the
#   same, and its limits are part of the result.
