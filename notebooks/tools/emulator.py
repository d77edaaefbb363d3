# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # The emulator
#
# Can a laptop without a GPU tell whether a warp-specialized kernel is right, and where it is not?
#
# :::{admonition} In this chapter (50 minutes)
# You will step through a kernel of two {term}`roles <role>`, build the barriers between them in ten
# lines, and see why a race is found even when the result is right. You need {term}`TLX`,
# {term}`TMA` and the {term}`mbarrier` of {doc}`../operator/machine`.
# :::

# %% tags=["hide-input"]
from copy import deepcopy
from functools import partial
from pathlib import Path

import pandas as pd
import triton

import tritonemu
from _lib import studies
from gdpa_kernels import gdpa
from gdpa_lab.measuring import compile_check
from gdpa_lab.report.chapter import Chapter
from notebooks.tools.kernels import deadlock, fences, phase, pipeline, race, turns
from tritonemu import clocks

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
from emulator.tests import judging, mutants, test_tutorials  # noqa: E402
from emulator.tests.tutorials import blackwell, hopper  # noqa: E402
from notebooks.tools import _hardware  # noqa: E402
from tests.emulator import test_mutants  # noqa: E402

chapter = Chapter("tools/emulator", mode=mode, device=device, data_dir=data_dir)
chapter.measure(_hardware.measure)

# %% tags=["remove-input"]
# | name: fig-emulator-pipeline
# | caption: >
# |   **Two buffers let the copies run ahead of the matmuls.** A pipeline of two roles, five blocks
# |   of keys. Above the roles, below them the engines; arrows lead from the arrival that completed
# |   a phase to the wait that it ended. Modelled cycles.
# | alt: >
# |   Four lanes over time. TMA fills both buffers at once, math waits for the first, the tensor
# |   core multiplies, and an arrow from math to load ends the wait of load for a free buffer.
trace = studies.run_main(pipeline, trace=True).timeline
chapter.figure(trace, emulated="notebooks/tools/kernels/pipeline.py under the modelled schedule")

# %% [markdown]
# ## A kernel of two roles
#
# This kernel finds, for each of 64 queries, the largest score over all keys. One warp, `load`, only
# asks TMA for blocks of keys. Four warps, `math`, only multiply. Between them lie two buffers in
# shared memory, and barriers that say when a buffer is full or empty:

# %% tags=["remove-input"]
chapter.code(pipeline.load, "for i in")
chapter.code(pipeline.math, "for i in", "tl.store")

# %% [markdown]
# | barrier | arrivals | who fills | who drains |
# |:--|:--|:--|:--|
# | `k_full[i]` | 1, and the bytes | `load` announces, TMA does | `math` waits |
# | `k_empty[i]` | 1 | `math` | `load` waits |
#
# (break-a-kernel)=
# ## Step through it
#
# The arrow keys step through the kernel as it is, and with one statement broken in four ways. Watch
# the two barriers and the two buffers below the timeline:

# %% tags=["remove-cell"]
RELEASE = "        tlx.barrier_arrive(k_empty[stage])\n"
WAIT = "        tlx.barrier_wait(k_full[stage], phase)\n"
FREE = "        tlx.barrier_wait(k_empty[stage], phase ^ 1)\n"
BROKEN = {
    "correct": [],
    "no wait on k_empty": [(FREE, "        pass\n")],
    "flipped parity": [(WAIT, WAIT.replace("phase)", "phase ^ 1)"))],
    "wrong byte count": [("(k_full[stage], BYTES)", "(k_full[stage], BYTES * 2)")],
    "released too early": [(RELEASE, ""), (WAIT, WAIT + RELEASE)],
}
errors = studies.step_page(pipeline, BROKEN, "emulator-pipeline.html", "Two roles, step by step")

# %% tags=["remove-input"]
print("; ".join(f"{name}: {text.split(':')[0] or 'nothing'}" for name, text in errors.items()))

# %% tags=["remove-input"]
studies.framed("emulator-pipeline.html", "Two roles, step by step", opened=True)

# %% [markdown]
# ## A barrier is two counters and a parity
#
# The mbarrier of {doc}`../operator/machine`, in Python:


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
print("new, parity 0 and 1:", empty.passes(0), empty.passes(1))
full.arrive(expect=16384)
print("announced:", full.passes(0))
full.arrive(count=0, deliver=16384)
print("delivered:", full.passes(0))

# %% [markdown]
# {doc}`../forward/first_tlx_kernel` derives from this which {ref}`phase <rule-phases>` a role waits
# for and how many {ref}`arrivals <rule-arrivals>` a barrier needs.
#
# ## How it runs
#
# The emulator runs the kernel's source on CPU tensors. The body of each `async_task` becomes a
# greenlet, a function that can pause and resume. One of them runs at a time, up to the next
# operation that another role can notice. There the *schedule* decides who goes on:
#
# - `modelled` gives every role and every engine a clock in cycles and runs the one furthest behind.
#   Roles share the tensor core, both memory ports, the {term}`MUFU` and the issue slots.
# - An integer seeds random choices, which reach orders that a GPU would show once in years.
#
# A finding is raised as an error, with file and line:

# %%
inputs = studies.batch((70, 0, 33))
q, ends = inputs.q, inputs.cu_seqlens_q
with tritonemu.enabled(schedule=7):
    gdpa(q, q, q, ends, ends, 70, 70, impl="v4_warp_specialized")
    pipeline.main()  # any host code that launches kernel[grid]

# %% [markdown]
# `python -m tritonemu FILE.py:FUNCTION` does it under five schedules, and `--svg` draws the figure
# above. `python -m tritonemu FILE.py` runs a program that was written for a GPU, unedited.
#
# ## Who knows what: vector clocks
#
# A copy lands some time after it is issued. The emulator moves its bytes at once, and it remembers
# that no role *knows* yet that they are there. Each role keeps a list: how far have I got, and how
# far, as far as I know, have the others? Arriving copies the list to the barrier. Passing a wait
# merges the barrier's list into one's own, entry by entry, the larger number winning. Such a list
# is a vector clock, and it computes "happened before" {cite}`lamport1978time`.
#
# Three lines show it. Each list is (steps of `load`, steps of `math`, copies known to have landed):
#
# | | `load` | `math` | reason |
# |:--|:--|:--|:--|
# | `math` passes `k_full[0]` | (1, 0, none) | (1, 1, A) | copy A had arrived there |
# | `math` reads `k[0]` in its step 1 | (1, 0, none) | (1, 1, A) | A is known: ordered |
# | `load` passes `k_empty[0]` | (1, 1, A) | (1, 2, A) | it took over the list of `math` |
#
# Now `load` wants to overwrite `k[0]` by copy B. Before the third line it knows neither that copy A
# has landed nor step 1 of `math`, so copy B **races** with both. After the third line it knows
# both. The rule: two accesses to the same bytes, one of them a write, race if the later side does
# not know the earlier one. The emulator's own classes say the same:

# %% tags=["hide-input"]
BYTES, AT = 2**16 - 1, ("pipeline.py", 0)
LOAD, MATH, A, B = 0, 1, 0b01, 0b10
load, math = clocks.Clock({LOAD: 1}), clocks.Clock({MATH: 1})
k0 = clocks.Shadow()
k0.record(clocks.Access(LOAD, 1, A, True, BYTES, AT, "copy A"), load)
math.join(clocks.Clock({LOAD: 1}, operations=A))  # passes k_full[0]
read = clocks.Access(MATH, 1, 0, False, BYTES, AT, "math")
print("math reads: races with", k0.record(read, math))
copy_b = clocks.Access(LOAD, 2, B, True, BYTES, AT, "copy B")
races = deepcopy(k0).record(copy_b, load)
print("copy B, no wait: races with", [access.who for access in races])
load.join(math)  # passes k_empty[0]
print("copy B, after the wait: races with", k0.record(copy_b, load))

# %% [markdown]
# Nothing here asks *when* something happened, so any schedule that performs both accesses shows the
# race. In the variant "released too early" above, `math` releases its buffer before it multiplies:

# %% tags=["remove-input"]
early = studies.changed(pipeline, *BROKEN["released too early"])
errors = studies.findings(early.main, studies.SCHEDULES)
races, wrong = sum(text.startswith("Race") for text in errors), studies.wrong_results(early)
print(f"of {len(errors)} schedules: a race under {races}, a wrong result under {wrong}")

# %% [markdown]
# (rule-fences)=
# ## Proxies and fences
#
# Threads reach shared memory through the generic **proxy**; TMA, tensor cores and bulk copies
# through the asynchronous one. The two do not see each other's writes by themselves. A **fence**,
# `tlx.fence("async_shared")` after the stores and before the arrival, makes them visible
# {cite}`nvidiaptx`. Who puts it there? `fences.py` has none: one role stores a tile and arrives,
# another waits and reads the tile in one of six ways:

# %% tags=["remove-input"]
TYPES = {"x_ptr": "*bf16", "desc": "tensordesc<bf16[64, 64]>", "y_ptr": "*bf16"}
answers = []
for reader in fences.READERS:
    constants = {"READER": reader, "FENCE": False}
    arch = fences.ARCHITECTURES.get(reader, 90)
    built = compile_check.build(
        fences.fence_kernel, TYPES, constants, capability=arch, options={"num_warps": 4}
    )
    (said,) = studies.findings(partial(fences.main, reader), ["modelled"], arch=f"sm_{arch}")
    added = built.asm["ptx"].count("fence.proxy.async")
    name = reader if "TMA" in reader else f"`{reader}`"
    answers.append((name, added, f"`{said.partition(':')[0]}`" if said else "–"))
    assert bool(added) != bool(said), "the text: it asks where the compiler adds none"
chapter.table(
    pd.DataFrame(answers, columns=["reader", "fences in PTX", "the emulator says"]),
    caption="**The compiler adds the fence for MMAs and TMA stores, and leaves it out for bulk "
    "copies.** Readers of a tile that another role has stored.",
    name="tab-emulator-fences", emulated="fences.py, modelled schedule",
    compiled=f"fences.py by fbtriton {triton.__version__.partition('+')[0]} for sm_90a, tcgen05 "
    "for sm_100a, when this page was built",
)  # fmt: skip

# %% [markdown]
# The compiler's fence stands behind the wait of the role that reads. Before bulk copies the
# emulator demands one: a second clock records the last store that a fence has covered. Write it
# yourself all the same. Gluon's compiler, in Triton 3.9, adds none between two roles, and there the
# emulator demands it before every reader.
#
# ## A parity knows only even and odd
#
# In `turns.py`, `load` fills a ring of three slots and two `add` roles take every other fill, so a
# slot passes from one role to the other:

# %% tags=["remove-input"]
print(studies.findings(lambda: turns.main(slots=3, roles=2, rows=6), ["modelled"])[0])

# %% [markdown]
# One of our block attention kernels did this. On the H200 some variants failed only after many
# launches; the emulator had seen nothing, since it hardly ever made a copy late enough. So it
# demands proof of the right order.
#
# ## Evidence

# %% tags=["remove-input"]
broken = mutants.enumerate_mutants(Path(pipeline.__file__), "pipeline_kernel")
judged = [judging.judge(mutant, judging.import_file, [studies.run_main]) for mutant in broken]
detected = sum(bool(verdict.error) for verdict in judged)
agreement = chapter.recorded("agreement")
text = "Mutants of `pipeline.py`, one statement broken in each, are found."
chapter.predict(text, 100 * detected / len(broken), least=95, form=".0f", unit=" %")
text = "A GPU's outputs differ by one rounding at most."
chapter.predict(text, agreement["roundings"].max(), most=1)
chapter.glue(
    launches=len(hopper.CASES) + len(blackwell.CASES),
    random=test_tutorials.RANDOM_SCHEDULES, subjects=len(test_mutants.SUBJECTS),
    harmless=sum(map(len, test_mutants.HARMLESS.values())), of=chapter.record().id,
)  # fmt: skip
chapter.predictions()

# %% [markdown]
# The tests break {glue:text}`subjects:.0f` kernels of fbtriton's tutorials {cite}`fbtriton` and of
# this book likewise; {glue:text}`harmless:.0f` mutants may go unnoticed, each listed with the
# reason why it is still right. They also run the tutorials as they are, {glue:text}`launches:.0f`
# launches under {glue:text}`random:.0f` random schedules each. The outputs of a GPU are measured
# (record {glue:text}`of`); a rounding is the spacing of the dtype at the output's largest value.
#
# ## It found a bug that nobody had planted
#
# Until then every alarm had been our own bug. This one was in a tutorial:

# %% tags=["remove-input"]
(case,) = (case for case in blackwell.CASES if case.name == "blackwell_fa_ws small")
tutorial = case.build()
options = tutorial.kwargs | {"uninitialized": "error", "arch": case.arch}
print(
    *studies.findings(
        lambda: tritonemu.run(tutorial.kernel, tutorial.grid, *tutorial.args, **options), [0]
    )
)

# %% [markdown]
# One role rescales the accumulator even before the first MMA, when it is uninitialized. That MMA
# overwrites it, so the output is right, until someone lets the first MMA accumulate.
#
# ## What it proves, and what it cannot
#
# A run without findings says, for *these* inputs and launch parameters: no two accesses race,
# whatever the order; no barrier gets an arrival or a byte too many; no wait takes another phase for
# its own; nothing is read that nobody wrote or that lies out of bounds; under the schedules that
# were tried the kernel ends with this result.
#
# Its blind spots:
#
# | not modelled | so it does not see |
# |:--|:--|
# | waits for {ref}`registers <rule-registers>`, {ref}`columns <rule-columns>`, an SM | who hangs |
# | loads before stores of one role | a store before another of its threads has loaded |
# | layouts, bank conflicts, caches, latency | how long anything takes |
# | what the compiler does | spills, serialised wgmma, moved waits |
# | paths that were not taken | anything about them |
#
# ## Exercises
#
# {doc}`Write it </exercises>`: `make exercise NAME=phases`.
#
# Each kernel in `notebooks/tools/kernels/` is a page of code with one mistake.

# %% tags=["remove-input"]
for module in (deadlock, race, phase):
    print(studies.findings(module.main, ["modelled"])[0], end="\n\n")

# %% [markdown]
# :::{exercise} It hangs
# :label: ex-emulator-deadlock
#
# `deadlock.py` adds up the columns of 100 rows, 32 rows at a time. What must change? Why did its
# author, who tested with 64 and 128 rows, not notice? *(emulator, ten minutes)*
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
# is wrong, and which buffer may it release instead? *(emulator, fifteen minutes)*
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
# Predict, then try 1 to 12. *(paper, then the emulator)*
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
# :::{exercise} A kernel that runs
# :label: ex-emulator-planted
#
# `planted.py` is GDPA with ReLU for several tiles of queries. Its author ran it with four blocks of
# keys: the result is right, and the emulator finds nothing. Read its three kinds of barriers.
# *(a)* What never tells `load` that a slot of Q is free? *(b)* Why is it right with four blocks all
# the same? Prove it from the barriers that exist. *(c)* For which numbers of blocks is it wrong?
# *(d)* Repair it, and say what your repair costs. *(paper, thirty minutes; then the emulator, with
# `planted.main(blocks)`)*
# :::
#
# :::{solution} ex-emulator-planted
# :class: dropdown
#
# *(a)* There is no `q_empty`. *(b)* When `load` comes to tile $t + 2$, which reuses the slot of
# tile $t$, it has issued all $(t + 2)\,n$ steps of earlier tiles, $n$ blocks each. Each step waited
# for the release of the step two before it, so steps up to $(t + 2)\,n - 3$ are known to be
# released. Tile $t$ ends with step $(t + 1)\,n - 1$. It is over if $(t + 1)\,n - 1 \le (t + 2)\,n -
# 3$, that is $n \ge 2$. *(c)* With one block it is wrong, and with none: the emulator reports an
# arrival on `q_full` that may come too early. *(d)* `q_empty` with one arrival: `math` arrives
# after the last S of a tile, and `load` waits with `tile // 2 % 2 ^ 1` before it announces Q. It
# costs an arrival and a wait a tile; the wait never blocks for $n \ge 2$. The tests of this chapter
# make that repair.
# :::
#
# ## Takeaways
#
# - Order decides whether a kernel is right, and order can be computed on a CPU.
# - A right result is weak evidence: the early release showed in the clocks under every schedule.
