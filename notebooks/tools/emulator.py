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
# :::{admonition} In this chapter (25 minutes)
# You will read the barriers of a small kernel from its timeline, run it under schedules of your
# choice, and know why a race is found even when the result is right. All
# {glue:text}`small:.0f` mistakes put into the kernel's synchronisation are found. On the H200 all
# {glue:text}`outputs:.0f` outputs that were compared agree within one rounding.
# :::

# %%
from pathlib import Path

import torch

from gdpa_kernels import emulator, gdpa
from gdpa_kernels.emulator import clocks
from gdpa_kernels.measuring.inputs import cu_seqlens
from gdpa_kernels.report import emulated, studies
from gdpa_kernels.report.chapter import Chapter
from notebooks.tools.kernels import deadlock, phase, pipeline, race, turns

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
from tests.emulator import hardware, mutants, test_mutants, test_tutorials  # noqa: E402
from tests.emulator.tutorials import blackwell, cases, hopper  # noqa: E402

chapter = Chapter("tools/emulator", mode=mode, device=device, data_dir=data_dir)
chapter.measure(hardware.measure)

# %% tags=["remove-input"]
# | name: fig-emulator-pipeline
# | caption: >
# |   A pipeline of two roles, five blocks of keys. Above the roles, below them the engines; arrows
# |   lead from the arrival that completed a phase to the wait that it ended. Modelled cycles.
# | alt: >
# |   Four lanes over time. TMA fills the two buffers at once, then math waits for the first, the
# |   tensor core multiplies, and an arrow from math to load ends the wait of load, which asks TMA
# |   for the next block. From then on the roles take turns, buffer by buffer.
trace = emulated.run(pipeline, trace=True).timeline
chapter.figure(trace, emulated="notebooks/tools/kernels/pipeline.py under the modelled schedule")

# %% [markdown]
# ## A kernel of two roles
#
# A warp-specialized kernel splits a program into roles. One warp only asks the copy engine, TMA,
# for tiles; four warps only issue matmuls to the tensor core; between them lie buffers in shared
# memory, and barriers that say when a buffer is full and when it is empty. After a mistake there
# the kernel hangs, or is wrong once in a thousand launches, or is right on this GPU with this
# compiler.
#
# This one, `notebooks/tools/kernels/pipeline.py`, finds the largest score over all keys for each of
# 64 queries. `load` fills two buffers in turn, `math` drains them:

# %% tags=["remove-input"]
chapter.code(pipeline.load, "for i in")
chapter.code(pipeline.math, "for i in", "tl.store")

# %% [markdown]
# | barrier | arrivals | who fills | who drains |
# |:--|:--|:--|:--|
# | `k_full[i]` | 1, and the bytes | `load` announces, TMA does | `math` waits |
# | `k_empty[i]` | 1 | `math` | `load` waits |
#
# The emulator runs this source on CPU tensors. Tiles become tensors, and the body of each
# `async_task` becomes a greenlet, a function that can be left in the middle and resumed there.
# Exactly one runs at a time, up to the next operation that another role can notice. There the
# *schedule* decides who goes on. "modelled" gives every role and engine a clock in cycles and lets
# whoever is behind go first. An integer seeds random choices, which reach orders that a GPU would
# show once in years.

# %%
offsets = cu_seqlens([70, 0, 33], "cpu")
q = torch.randn(103, 1, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
with emulator.enabled(schedule=7) as reports:  # for this package's operators
    out = gdpa(q, q, q, offsets, offsets, 70, 70, impl="v4_warp_specialized")
print(reports[-1].kernel, reports[-1].warps)
with emulator.intercept(schedule=7) as reports:  # for host code that launches kernel[grid]
    pipeline.main()

# %% [markdown]
# Both raise an error at the first finding, with the kernel's file and line. `python -m
# gdpa_kernels.emulator FILE.py:FUNCTION` does the same from a shell, under the modelled schedule
# and four random ones; `--svg` draws the figure above.
#
# ## A barrier is two counters and a parity
#
# An mbarrier of the hardware {cite}`nvidiaptx` counts down the arrivals that its current phase
# still lacks, and the bytes that were announced and have not come. At zero of both the phase is
# over and the next begins. A wait does not name a phase. It names a parity, and passes if the phase
# of that parity is the last one completed:


# %%
class Barrier:
    def __init__(self, count):
        self.count = self.pending = count
        self.phase = self.bytes = 0

    def arrive(self, count=1, expect=0, deliver=0):
        self.pending -= count
        self.bytes += expect - deliver
        if self.pending == self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count

    def passes(self, parity):
        return self.phase % 2 != parity


empty, full = Barrier(1), Barrier(1)
print("a fresh barrier passes parity 0, 1:", empty.passes(0), empty.passes(1))
full.arrive(expect=16384)
print("announced:", full.passes(0))
full.arrive(count=0, deliver=16384)
print("delivered:", full.passes(0))
two = Barrier(2)
two.arrive()
print("one of two readers has released:", two.passes(0))

# %% [markdown]
# A fresh barrier lets a wait for parity 1 pass. That is why `load` waits with `phase ^ 1`: it finds
# its buffers empty without anybody having released them.
#
# *Two readers.* Let two math roles, A and B, read every buffer. `k_full` stays as it is: a wait
# takes nothing from a barrier, so both wait for the same phase. `k_empty` now needs two arrivals
# for each phase. Follow one buffer over time:
#
# 1. `load` passes the fresh `k_empty` and fills. Phase 0 of `k_full` ends, and A and B both pass.
# 2. A is fast. It reads and arrives on `k_empty`, which still lacks one arrival. `load`, back for
#    the second filling, waits.
# 3. A comes back and waits for phase 1 of `k_full`. That cannot end before `load` fills again, and
#    `load` waits for B. So A is never more than one phase ahead and never arrives twice in one.
# 4. B arrives. Phase 0 of `k_empty` is over, `load` fills, and both go on.
#
# With a count of 1, A's arrival alone would end the phase: `load` would overwrite what B reads, and
# B's arrival would count for the next phase.
#
# ## Before and after, as integers
#
# A copy writes its buffer some time after it was asked for. The emulator moves the bytes at once
# and remembers that nobody knows it yet: every asynchronous operation is one bit, and a role
# *knows* the operation when the bit is in its set. An arrival leaves at the barrier what the
# arriving role knows, and a wait that passes takes it over. What a role did itself is a number, its
# *epoch*. Numbers and bits together are a vector clock, which computes the relation "happened
# before" {cite}`lamport1978time`.
#
# Two accesses to the same bytes, one of them a write, race if the later side does not know the
# earlier one. The classes that do this in the emulator, used alone on two fillings of buffer
# `k[0]`, copies A and B:

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
# Nothing here asks *when* something happened. Whether a chain of arrivals and waits leads from one
# access to another follows from the program, not from the order in which the roles ran. So a race
# is found under any schedule that performs both accesses. Below, `math` releases its buffer before
# it multiplies:

# %%
RELEASE = "        tlx.barrier_arrive(k_empty[stage])\n"
WAIT = "        tlx.barrier_wait(k_full[stage], phase)\n"
early = studies.changed(pipeline, (RELEASE, ""), (WAIT, WAIT + RELEASE))
races = sum(text.startswith("Race") for text in emulated.findings(early.main))
wrong = emulated.wrong_results(early)
print(f"of {len(emulated.SCHEDULES)} schedules: a race under {races}, a wrong result under {wrong}")

# %% [markdown]
# ## Step through it
#
# The kernel as it is, and with one statement broken in four ways. Step with the buttons or the
# arrow keys; after the last step the page says what the emulator found.

# %%
FREE = "        tlx.barrier_wait(k_empty[stage], phase ^ 1)\n"
BROKEN = {
    "correct": [],
    "no wait on k_empty": [(FREE, "        pass\n")],
    "flipped parity": [(WAIT, WAIT.replace("phase)", "phase ^ 1)"))],
    "wrong byte count": [("(k_full[stage], BYTES)", "(k_full[stage], BYTES * 2)")],
    "released too early": [(RELEASE, ""), (WAIT, WAIT + RELEASE)],
}
found = emulated.step_page(pipeline, BROKEN, "emulator-pipeline.html", "Two roles, step by step")
print("; ".join(f"{name}: {text.split(':')[0] or 'nothing'}" for name, text in found.items()))

# %% [markdown]
# <iframe src="../../figures/emulator-pipeline.html" title="The pipeline, step by step"
# style="width:100%;height:46rem;border:1px solid #787878;border-radius:6px"></iframe>
#
# <p><a href="../../figures/emulator-pipeline.html">Open it as a page of its own.</a></p>
#
# ## A parity knows only even and odd
#
# In `notebooks/tools/kernels/turns.py` `load` fills a ring of three slots with rows of a matrix,
# and two roles `add` take every second row, so a slot goes from one role to the other. The second
# wait of `add[1]` is for row 3, the second filling of slot 0. Whether row 0 has come is the other
# role's business. If it has not, `full[0]` has completed no phase, and a wait for parity 1 passes
# at once, as on a fresh barrier. All it takes is a copy that lands late.
#
# Our variants of a kernel for block attention did this. On the H200 they failed with "unspecified
# launch failure" or hung, some only after many launches, and the emulator had seen nothing: its
# schedules hardly ever made a copy late enough. The cure is a proof. When a wait passes for phase
# $k$, the role must have known, as it began to wait, that phase $k - 1$ was over:

# %%
SIZES = [(slots, roles) for slots in range(3, 7) for roles in (1, 2, 3)]
rings = {size: emulated.findings(lambda size=size: turns.main(*size, 2 * size[0]), ["modelled"])
         for size in SIZES}  # fmt: skip
print("AliasedWait with (slots, roles):", *(size for size, (text,) in rings.items() if text))
assert all((text == "") == (slots % roles == 0) for (slots, roles), (text,) in rings.items())

# %% [markdown]
# Where the slots are a multiple of the roles, a slot has one owner, whose last wait is the proof.
#
# ## Evidence
#
# An emulator is a claim about a machine and can be wrong in both directions.

# %%
first = {}
for case in (*hopper.CASES, *blackwell.CASES):
    first.setdefault(case.name.split()[0], case)
del first["blackwell-multi-cta-layernorm_test"]  # slow to import
alarms = [name for name, case in first.items()  # run_case compares outputs with fp64
          if studies.findings(lambda case=case: cases.run_case(case), ["modelled"])[0]]  # fmt: skip

broken = mutants.enumerate_mutants(Path(pipeline.__file__), "pipeline_kernel")
judged = [mutants.judge(mutant, mutants.import_file, [emulated.run]) for mutant in broken]
missed = [mutant for mutant, verdict in zip(broken, judged, strict=True) if not verdict.error]

# %% tags=["remove-input"]
agreement, said = chapter.recorded("agreement"), chapter.recorded("sanitizer")
chapter.predict("No false alarm: tutorials of fbtriton run as they are. Alarms in one launch of "
                f"each of {len(first)}:", len(alarms), most=0, form=".0f")  # fmt: skip
chapter.predict("Few misses: mutants of `pipeline.py`, one statement broken in each, are found.",
                100 * (1 - len(missed) / len(broken)), least=95, form=".0f", unit=" %")  # fmt: skip
chapter.predict("The same numbers: a GPU's outputs differ by one rounding at most.",
                agreement["roundings"].max(), most=1)  # fmt: skip
by = agreement.groupby("dtype")[["elements", "different"]].sum().reset_index()
chapter.table(by, measured=[chapter.record().id])
products = agreement[agreement["kernel"].str.contains("gemm")]
raced = said[(said["tool"] == "racecheck") & (said["errors"] > 0)]
assert (said[said["tool"] != "racecheck"]["errors"] == 0).all() and (raced["elsewhere"] == 0).all()
chapter.glue(
    small=len(broken), outputs=len(agreement), launches=len(hopper.CASES) + len(blackwell.CASES),
    random=test_tutorials.RANDOM_SCHEDULES, subjects=len(test_mutants.SUBJECTS),
    harmless=sum(map(len, test_mutants.HARMLESS.values())),
    gemm=100 * products["different"].sum() / products["elements"].sum(),
    runs=len(said), unfinished=int(said["failure"].notna().sum()), raced=len(raced),
)  # fmt: skip

# %% [markdown]
# *Kernels that others wrote.* The tests launch the tutorials of fbtriton {cite}`fbtriton`,
# unmodified, {glue:text}`launches:.0f` launches under the modelled and {glue:text}`random:.0f`
# random schedules each. For those that need Blackwell this is the only execution we have. Three
# more launches fail: two of gdpa, and cross-attention without keys, where a role waits for a matmul
# that no key asks for. Five kernels read tensor memory that nobody wrote, which the tests allow.
#
# *Mistakes made on purpose.* The tests break {glue:text}`subjects:.0f` kernels of the tutorials and
# of this book in the same way. They fail if a mutant goes unnoticed that is not listed with the
# reason why the kernel is still right; {glue:text}`harmless:.0f` are. One reason is a limit of the
# model: whether a CTA may end while a TMA store still reads its shared memory is not asked.
#
# *A GPU.* Hopper tutorials and rungs of this book ran on both. A rounding is the spacing of the
# dtype at the output's largest value. Of the elements of plain matmuls {glue:text}`gemm:.2f` %
# differ: the tensor core adds in an order that nobody documents.
#
# *NVIDIA's tools.* [compute-sanitizer](https://docs.nvidia.com/compute-sanitizer/) ran on the
# rungs; {glue:text}`unfinished:.0f` of {glue:text}`runs:.0f` runs did not end. *memcheck* and
# *synccheck* find nothing. *racecheck* reports {glue:text}`raced:.0f` kernels with tasks, each at
# its `def`. One is a control whose tasks share no data: the pair is a byte of the compiler's own.
# The tool has no notion of tasks, and the emulator does not see what the compiler adds.
#
# ## The surprise: what it found without being asked
#
# For a while each alarm was a bug of ours. These two were in the tutorials.

# %%
(case,) = (case for case in blackwell.CASES if case.name == "blackwell_fa_ws small")
made = case.build()
options = made.kwargs | {"uninitialized": "error", "arch": case.arch}
print(*emulated.findings(lambda: emulator.run(made.kernel, made.grid, *made.args, **options), [0]))

# %% [markdown]
# *Unwritten tensor memory.* One role rescales the accumulator before each matmul, also before the
# first, when nobody has written it. The first matmul overwrites what it stores, so the output is
# right. The next author who lets the first matmul accumulate gets garbage.
#
# *An output that nobody waits for.* TLX refuses `blackwell-gdpa` for a request for registers.
# Without the request it races under every schedule that the tests try: the role that computes the
# activation reads the accumulator of the output, and no barrier lies between that and the matmul
# that completes it. A comment above the line says that the wait is still to be written.
#
# ## What it proves, and what it cannot
#
# A run without findings says, for *these* inputs and launch parameters: no two accesses race,
# whatever the order; no barrier gets an arrival or a byte too many; no wait can miss its phase or
# take an earlier one for it; nothing is read that nobody wrote, and nothing lies out of bounds;
# under the schedules that were tried the kernel ends with this result. It does not say:
#
# - *how long it takes.* Bank conflicts, caches, issue slots and latencies are not modelled.
# - *that the compiler agrees.* Layouts, register spills and fences between generic and asynchronous
#   accesses (the "proxies" of PTX) are not modelled: a missing fence is not found.
# - *what other clusters do meanwhile.* Clusters run one after the other; a kernel that waits for a
#   flag of a later one does not end here.
# - *anything about paths that were not taken.* Random schedules help, and prove nothing.
#
# ## Exercises
#
# Each kernel in `notebooks/tools/kernels/` is a page of code with one mistake.

# %%
for module in (deadlock, race, phase):
    print(emulated.findings(module.main, ["modelled"])[0], end="\n\n")

# %% [markdown]
# :::{exercise} It hangs
# :label: ex-emulator-deadlock
#
# `deadlock.py` adds up the columns of 100 rows, 32 rows at a time. What must change? Why did its
# author, who tested with 64 and 128 rows, not notice? *(code, ten minutes)*
# :::
#
# :::{solution} ex-emulator-deadlock
# :class: dropdown
#
# Nobody has announced the copy that the message names. `load` makes `rows // BLOCK` copies, `add`
# waits for `tl.cdiv(rows, BLOCK)`, and the two are equal for multiples of 32. `load` needs
# `tl.cdiv` as well; TMA fills the rows beyond the end with zeros, which a sum does not mind.
# :::
#
# :::{exercise} The result is right
# :label: ex-emulator-race
#
# `race.py` multiplies two matrices, and its result is right under every schedule. Which statement
# is wrong, and which buffer may it release instead? *(code, fifteen minutes)*
# :::
#
# :::{solution} ex-emulator-race
# :class: dropdown
#
# Each `async_dot` is a commit group, and `async_dot_wait(1, acc)` is PTX's `wait_group 1`: it
# returns while one group is in flight, and that is the one just issued, which still reads
# `a[stage]` and `b[stage]`. What is complete is the matmul before it, so the release belongs to the
# previous buffer: `if i > 0: tlx.barrier_arrive(empty[(i + 1) % 2])`. The result was right because
# the emulator moves data when an operation is issued; a GPU has its own reasons to be lucky.
# :::
#
# :::{exercise} Predict the phase
# :label: ex-emulator-phase
#
# `phase.py` handles several tiles in one persistent program, each of `BLOCKS` blocks, and both
# roles count the blocks of every tile from zero. For which values of `BLOCKS` is this kernel right?
# Predict, then try 1 to 12. *(paper, then one constant)*
# :::
#
# :::{solution} ex-emulator-phase
# :class: dropdown
#
# Use $k$ of a buffer, counted from zero over all tiles, has parity $k \bmod 2$. The kernel is right
# if every tile uses each of the two buffers an even number of times: if `BLOCKS` is a multiple of
# 4. A counter that runs on over the tiles, `use = tile * blocks + i`, repairs it for every number.
# :::
#
# ## Takeaways
#
# - Order decides whether a kernel is right, and order can be computed on a CPU. A race is a missing
#   path from one access to another.
# - A right result is weak evidence: the early release showed in the clocks under every schedule.
# - Test the tester. Kernels broken on purpose say what it finds, a GPU says whether it computes the
#   same, and its limits are part of the result.
