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
# You will read a small kernel's barriers from its timeline, run it under schedules of your choice,
# and learn why a race is found even when the result is right. All {glue:text}`small:.0f` mistakes
# planted in the kernel's synchronisation are found. On the H200 all {glue:text}`outputs:.0f`
# outputs that were compared agree within one rounding.
# :::

# %%
from pathlib import Path

import tritonemu
from _lib import studies
from gdpa_kernels import gdpa
from gdpa_lab.report.chapter import Chapter
from notebooks.tools.kernels import deadlock, phase, pipeline, race, turns
from tritonemu import clocks

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
from _lib import hardware  # noqa: E402
from emulator.tests import judging, mutants, test_tutorials  # noqa: E402
from emulator.tests.tutorials import blackwell, hopper  # noqa: E402
from tests.emulator import test_mutants  # noqa: E402

chapter = Chapter("tools/emulator", mode=mode, device=device, data_dir=data_dir)
chapter.measure(hardware.measure)

# %% tags=["remove-input"]
# | name: fig-emulator-pipeline
# | caption: >
# |   A pipeline of two roles, five blocks of keys. Above the roles, below them the engines; arrows
# |   lead from the arrival that completed a phase to the wait that it ended. Modelled cycles.
# | alt: >
# |   Four lanes over time. TMA fills both buffers at once, math waits for the first, the tensor
# |   core multiplies, and an arrow from math to load ends the wait of load for a free buffer.
trace = studies.run_main(pipeline, trace=True).timeline
chapter.figure(trace, emulated="notebooks/tools/kernels/pipeline.py under the modelled schedule")

# %% [markdown]
# ## A kernel of two roles
#
# A warp-specialized kernel splits a program into roles. One warp only asks the copy engine, TMA,
# for tiles; four warps only issue MMAs; between them lie buffers in shared memory, and barriers
# that say when a buffer is full or empty. A mistake there hangs the kernel, or makes it wrong once
# in a thousand launches. This one, `notebooks/tools/kernels/pipeline.py`, finds the largest score
# over all keys for each of 64 queries:

# %% tags=["remove-input"]
chapter.code(pipeline.load, "for i in")
chapter.code(pipeline.math, "for i in", "tl.store")

# %% [markdown]
# | barrier | arrivals | who fills | who drains |
# |:--|:--|:--|:--|
# | `k_full[i]` | 1, and the bytes | `load` announces, TMA does | `math` waits |
# | `k_empty[i]` | 1 | `math` | `load` waits |
#
# The emulator runs this source on CPU tensors. The body of each `async_task` becomes a greenlet, a
# function that can pause and resume. One runs at a time, up to the next operation that another role
# can notice. There the *schedule* decides who goes on. "modelled" gives every role and engine a
# clock in cycles and runs the one furthest behind; roles share the tensor core, the ports of both
# memories, the {term}`MUFU` and the issue slots. An integer seeds random choices, which reach
# orders that a GPU would show once in years. A finding is raised as an error, with file and line:

# %%
given = studies.batch((70, 0, 33))
q, ends = given.q, given.cu_seqlens_q
with tritonemu.enabled(schedule=7):
    gdpa(q, q, q, ends, ends, 70, 70, impl="v4_warp_specialized")  # an operator of this package
    pipeline.main()  # any host code that launches kernel[grid]

# %% [markdown]
# `python -m tritonemu FILE.py:FUNCTION` does it under five schedules; `--svg` draws the figure
# above. `python -m tritonemu FILE.py` runs a program that was written for a GPU, unedited.
#
# ## A barrier is two counters and a parity
#
# An {term}`mbarrier` {cite}`nvidiaptx` counts down the arrivals and announced bytes that its
# current phase still lacks. At zero the next phase begins. A wait names no phase, only a parity,
# and passes if the last completed phase has that parity:


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

# %% [markdown]
# A fresh barrier lets a wait for parity 1 pass. That is why `load` waits with `phase ^ 1`: it finds
# its buffers empty without anybody having released them.
#
# If two math roles read every buffer, `k_empty` needs two arrivals for each phase, and a fast role
# cannot give both: before it reads again it waits for a copy that waits for the slow role.
#
# ## Before and after, as integers
#
# A copy lands some time after it is issued. The emulator moves the bytes at once and remembers that
# no role knows it yet: every asynchronous operation is one bit, and a role *knows* the operation
# when the bit is in its set. A role counts its own steps, its *epoch*. An arrival leaves at the
# barrier what the arriving role knows, and a wait that passes takes it over. Together they are a
# vector clock, which computes "happened before" {cite}`lamport1978time`. Two accesses to the same
# bytes, one of them a write, race if the later side does not know the earlier one. The emulator's
# own classes on two copies to `k[0]`, A and B:

# %%
BYTES, AT = 2**16 - 1, ("pipeline.py", 0)
LOAD, MATH, A, B = 0, 1, 0b01, 0b10
load, math = clocks.Clock({LOAD: 1}), clocks.Clock({MATH: 1})
k0 = clocks.Shadow()
k0.record(clocks.Access(LOAD, 1, A, True, BYTES, AT, "copy A"), load)
math.join(clocks.Clock({LOAD: 1}, operations=A))  # math waits for k_full[0]
read = clocks.Access(MATH, 1, 0, False, BYTES, AT, "math")
print("math reads:", k0.record(read, math))
copy_b = clocks.Access(LOAD, 2, B, True, BYTES, AT, "copy B")
print("copy B, without a wait: races with", k0.record(copy_b, load).who)
load.join(math)  # load waits for k_empty[0]
print("copy B, after a wait:", k0.record(copy_b, load))

# %% [markdown]
# Nothing here asks *when* something happened. The program decides whether a chain of arrivals and
# waits leads from one access to another, so any schedule that performs both accesses shows the
# race. Below, `math` releases its buffer before it multiplies:

# %%
RELEASE = "        tlx.barrier_arrive(k_empty[stage])\n"
WAIT = "        tlx.barrier_wait(k_full[stage], phase)\n"
early = studies.changed(pipeline, (RELEASE, ""), (WAIT, WAIT + RELEASE))
found = studies.findings(early.main, studies.SCHEDULES)
races, wrong = sum(text.startswith("Race") for text in found), studies.wrong_results(early)
print(f"of {len(found)} schedules: a race under {races}, a wrong result under {wrong}")

# %% [markdown]
# ## Step through it
#
# The kernel as it is, and with one statement broken in four ways; the arrow keys step:

# %%
FREE = "        tlx.barrier_wait(k_empty[stage], phase ^ 1)\n"
BROKEN = {
    "correct": [],
    "no wait on k_empty": [(FREE, "        pass\n")],
    "flipped parity": [(WAIT, WAIT.replace("phase)", "phase ^ 1)"))],
    "wrong byte count": [("(k_full[stage], BYTES)", "(k_full[stage], BYTES * 2)")],
    "released too early": [(RELEASE, ""), (WAIT, WAIT + RELEASE)],
}
found = studies.step_page(pipeline, BROKEN, "emulator-pipeline.html", "Two roles, step by step")
print("; ".join(f"{name}: {text.split(':')[0] or 'nothing'}" for name, text in found.items()))

# %% [markdown]
# <iframe src="../../figures/emulator-pipeline.html" title="The pipeline, step by step"
# style="width:100%;height:46rem;border:1px solid #787878;border-radius:6px"></iframe>
# <p><a href="../../figures/emulator-pipeline.html">Open it as a page of its own.</a></p>
#
# ## A parity knows only even and odd
#
# In `turns.py`, `load` fills a ring of three slots and two `add` roles take every other fill, so a
# slot passes from one role to the other:

# %%
print(studies.findings(lambda: turns.main(slots=3, roles=2, rows=6), ["modelled"])[0])

# %% [markdown]
# One of our block attention kernels did this. On the H200 some variants failed only after many
# launches; the emulator had seen nothing, since it hardly ever made a copy late enough. So it no
# longer tries to hit the bad order. It demands proof of the right one.
#
# ## Evidence
#
# An emulator is a claim about a machine and can be wrong in both directions.

# %% tags=["remove-input"]
broken = mutants.enumerate_mutants(Path(pipeline.__file__), "pipeline_kernel")
judged = [judging.judge(mutant, judging.import_file, [studies.run_main]) for mutant in broken]
found = sum(bool(verdict.error) for verdict in judged)
agreement = chapter.recorded("agreement")
text = "Mutants of `pipeline.py`, one statement broken in each, are found."
chapter.predict(text, 100 * found / len(broken), least=95, form=".0f", unit=" %")
text = "A GPU's outputs differ by one rounding at most."
chapter.predict(text, agreement["roundings"].max(), most=1)
chapter.glue(
    small=len(broken), outputs=len(agreement), launches=len(hopper.CASES) + len(blackwell.CASES),
    random=test_tutorials.RANDOM_SCHEDULES, subjects=len(test_mutants.SUBJECTS),
    harmless=sum(map(len, test_mutants.HARMLESS.values())), of=chapter.record().id,
)  # fmt: skip

# %% [markdown]
# The tests break {glue:text}`subjects:.0f` kernels of fbtriton's tutorials {cite}`fbtriton` and of
# this book likewise; {glue:text}`harmless:.0f` mutants may go unnoticed, each listed with the
# reason why it is still right. They also run the tutorials as they are, {glue:text}`launches:.0f`
# launches under {glue:text}`random:.0f` random schedules each; tutorials for Blackwell have run
# nowhere else here. The outputs of a GPU are measured (record {glue:text}`of`); a rounding is the
# spacing of the dtype at the output's largest value.
#
# ## The surprise: what it found without being asked
#
# For a while each alarm was a bug of ours. This one was in a tutorial:

# %%
(case,) = (case for case in blackwell.CASES if case.name == "blackwell_fa_ws small")
made = case.build()
options = made.kwargs | {"uninitialized": "error", "arch": case.arch}
print(*studies.findings(lambda: tritonemu.run(made.kernel, made.grid, *made.args, **options), [0]))

# %% [markdown]
# One role rescales the accumulator even before the first MMA, when it is uninitialized. That MMA
# overwrites it, so the output is right, until someone lets the first MMA accumulate.
#
# ## What it proves, and what it cannot
#
# A run without findings says, for *these* inputs and launch parameters: no two accesses race,
# whatever the order; no barrier gets an arrival or a byte too many; no wait takes another phase for
# its own; nothing is read that nobody wrote or that lies out of bounds; under the schedules that
# were tried the kernel ends with this result. It does not say:
#
# - *how long it takes.* Bank conflicts, caches and the latency of an instruction are not
#   modelled, and instructions are counted as the source has them.
# - *that the compiler agrees.* Layouts, spills and fences between generic and asynchronous accesses
#   (the "proxies" of PTX) are not modelled.
# - *anything about paths that were not taken,* or about clusters that wait for each other.
#
# ## Exercises
#
# Each kernel in `notebooks/tools/kernels/` is a page of code with one mistake.

# %%
for module in (deadlock, race, phase):
    print(studies.findings(module.main, ["modelled"])[0], end="\n\n")

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
# `load` makes `rows // BLOCK` copies, `add` waits for `tl.cdiv(rows, BLOCK)`. The two are equal for
# multiples of 32. `load` needs `tl.cdiv` as well; TMA fills the rows beyond the end with zeros.
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
# Each `async_dot` is a commit group. `async_dot_wait(1, acc)`, PTX's `wait_group 1`, returns while
# the one just issued is in flight and still reads `a[stage]` and `b[stage]`. The MMA before it is
# complete, so the previous buffer may go: `if i > 0: tlx.barrier_arrive(empty[(i + 1) % 2])`. The
# result was right because the emulator moves data when an operation is issued.
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
# - Order decides whether a kernel is right, and order can be computed on a CPU.
# - A right result is weak evidence: the early release showed in the clocks under every schedule.
# - Test the tester: kernels broken on purpose say what it finds.
