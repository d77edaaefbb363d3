# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Bugs that were found
#
# What does a race look like in kernels that people use, and which tool would have told?
#
# :::{admonition} In this chapter (30 minutes)
# You will see seven mistakes that the emulator found in published kernels, each in a few lines of
# our own with the wrong number it leads to, and its fix. On ten mistakes put into two kernels, the
# emulator finds {glue:text}`emulator:.0f`; of the {glue:text}`plain:.0f` that they can run,
# Triton's interpreter finds {glue:text}`interpreter:.0f` and TileLens {glue:text}`tilelens:.0f`.
# :::

# %% tags=["hide-input"]
import inspect
import json
import re
from collections import Counter

import pandas as pd

import tritonemu
from _lib import rare_charts
from gdpa_lab.report.chapter import Chapter
from notebooks.tools.kernels import compare, published, seeded
from tritonemu.search import Search

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("tools/found_bugs", mode=mode, device=device, data_dir=data_dir)
SCHEDULES = ("modelled", *range(25))
ELSEWHERE = {"early": "fbtriton's tutorial", "ahead": "Triton's tutorials"}
mistakes = {name for name, function in inspect.getmembers(published, inspect.isfunction)
            if "mended" in inspect.signature(function).parameters}  # fmt: skip
assert len(mistakes) == 7 and len(mistakes - {*ELSEWHERE}) == 5, "the title, and the text: five"


def outcome(call, schedule, **options):
    """Outcome of a launch under a schedule: a finding, a wrong result, or "right"."""
    try:
        with tritonemu.enabled(schedule=schedule, **options):
            call()
    except tritonemu.EmulatorError as error:
        return re.sub(r"/\S*/(?=[\w-]+\.py:\d)", "", f"{type(error).__name__}: {error}")
    except AssertionError as error:
        return str(error)
    return "right"


def show(call, **options):
    """The finding, and what 26 schedules lead to with races not judged; fixed, all is right."""
    print(outcome(call, "modelled", **options))
    unjudged = options | {"races": False}
    results = Counter(outcome(call, schedule, **unjudged) for schedule in SCHEDULES)
    for text, count in results.most_common(3):
        print(f"{count} of {len(SCHEDULES)} schedules: {text}")
    mended = {outcome(lambda: call(mended=True), each, **options) for each in SCHEDULES}
    assert mended == {"right"}, mended


asked = json.loads(compare.FILE.read_text(encoding="utf-8"))
verdicts = pd.DataFrame(
    {
        name: [asked[name]["found"][fault]["verdict"] for fault in seeded.FAULTS]
        for name in compare.TOOLS
    },
    index=list(seeded.FAULTS),
)
verdicts.index.name = "mistake"
correct, ten = verdicts.loc[[*seeded.CORRECT]], verdicts.drop([*seeded.CORRECT])
assert correct.isin(["missed", "cannot run"]).all(axis=None), "the text: no false alarm"
where = {name: f"{name}: {each['machine']}, {each['date']}" for name, each in asked.items()}
on_gpu = "; ".join(text for text in where.values() if "NVIDIA" in text)
on_cpu = [text for name, text in where.items() if "NVIDIA" not in text and name != "tritonemu"]
names = {"tritonemu": "emulator", "TRITON_INTERPRET": "interpreter",
         "result on the GPU": "program"}  # fmt: skip
counts = ten.eq("found").sum()
assert (ten["tritonemu"] == "found").all(), "the caption: the emulator finds all"
assert (counts.drop("tritonemu") < len(ten)).all(), "the caption: each other tool"
caught = ten.isin(["found", "hangs", "crashes"]).sum()
assert caught.drop("tritonemu").idxmax() == "result on the GPU", "the text: the program tells most"
assert set(ten.index[ten["TileLens"] == "found"]) == {"no mask", "plain addition"}, "the text"
slow = max(each["seconds"] for each in asked["tritonemu"]["found"].values())
chapter.glue(
    emulator=int(counts["tritonemu"]), interpreter=int(counts["TRITON_INTERPRET"]),
    tilelens=int(counts["TileLens"]), consan=int(counts["ConSan"]), slow=slow,
    plain=len(seeded.SUM), roles=len(seeded.PIPELINE),
    seen=int(caught["result on the GPU"]),
)  # fmt: skip

# %% tags=["remove-input"]
# | name: fig-bugs-verdicts
# | caption: >
# |   **The emulator names every one of ten mistakes; each other tool misses some or cannot run
# |   them.** A row for each mistake put into a correct kernel, a column for each tool. *Program* is
# |   the kernel's own test on an H200. The authors of the emulator chose the mistakes.
# | alt: >
# |   A grid of coloured cells with a word in each. The column of the emulator says "found"
# |   throughout. Interpreter and TileLens mostly say "cannot run", the tools on a GPU say "found",
# |   "missed", "hangs" and "crashes" in turns.
shown = ten.drop(columns=["synccheck", "memcheck"]).rename(columns=names)
chapter.figure(
    rare_charts.verdicts(shown), data=verdicts.reset_index(), emulated=where["tritonemu"],
    computed="; ".join(on_cpu), measured=f"{on_gpu}; data/tools/seeded.json",
)  # fmt: skip

# %% [markdown]
# ## Seven mistakes, and where they are
#
# Five are in the published kernels of this book's operators, at commit
# [2c128ab](https://github.com/facebookresearch/ads_model_kernel_library/tree/2c128ab68cc82365c2b8a7db9366b54217b083fe)
# of their repository. Most of what they publish ran in the emulator without a finding. We quote
# lines by number and copy none. We saw the mistakes in the emulator and by reading, not on a B200.
# Findings in other public code: `emulator/COVERAGE.md`.
#
# ## One slot, and no signal that it is free
#
# Matmul and RMSNorm in one kernel: a row lies in several CTAs of a cluster, which exchange its
# partial sums of squares. Each stores its own into a slot of the others' shared memory, waits until
# theirs have come, and adds up
# ([`tlx_matmul_rmsnorm.py`](https://github.com/facebookresearch/ads_model_kernel_library/blob/2c128ab68cc82365c2b8a7db9366b54217b083fe/multi_cta_norm_fusion/src/tlx_matmul_rmsnorm.py#L374-L391),
# lines 374 to 391; the backward,
# [`tlx_matmul_rmsnorm_bwd.py`](https://github.com/facebookresearch/ads_model_kernel_library/blob/2c128ab68cc82365c2b8a7db9366b54217b083fe/multi_cta_norm_fusion/src/tlx_matmul_rmsnorm_bwd.py#L757-L790),
# lines 757 to 790). The next tile uses the same slot. The barrier says that a sum has come; nothing
# says that it has been read. A CTA that is a tile ahead overwrites what its neighbour has not added
# yet. The layer norm beside it has two slots and returns them, and has no such finding. In short:

# %% tags=["remove-input"]
chapter.code(published.slot_kernel, "    for i in")

# %%
show(published.slot)

# %% [markdown]
# The first sum of one CTA contains the other's second part. The fix (`MENDED`) is a second barrier:
# the reader signals the sender, which waits for it before overwriting.
#
# ## A sum on top of what was in memory
#
# The Triton backward can write dQ by TMA. It then *adds* to memory
# ([`triton_generalized_dot_product_attention.py`](https://github.com/facebookresearch/ads_model_kernel_library/blob/2c128ab68cc82365c2b8a7db9366b54217b083fe/gdpa/triton/triton_generalized_dot_product_attention.py#L2587-L2594),
# lines 2587 to 2594: `store_reduce="add"`), and on this path dQ comes from `torch.empty` (lines
# 3515 to 3523). The gradient is right as long as the allocator hands out zeros, which fresh pages
# are and a training step's are not. Here memory holds sevens:

# %%
show(published.add)

# %% [markdown]
# No order is wrong here, so no race detector can help, but poisoned memory tells. The tests of this
# repository fill every output with NaN first. The fix is `torch.zeros`, or a plain store, since
# each block of dQ has one program here. A test of OpenAI's `triton_kernels` takes an atomic maximum
# with `torch.empty` likewise (`test_reduce.py`, line 89, at commit 1d2da15d2b1f of
# triton-lang/triton).
#
# ## A store where an addition was meant: the last one wins
#
# The same file has a branch for atomics, where several programs hold parts of one block of dQ.
# Without TMA it uses `tl.atomic_add`, with TMA it stores
# ([lines 1635 to 1651](https://github.com/facebookresearch/ads_model_kernel_library/blob/2c128ab68cc82365c2b8a7db9366b54217b083fe/gdpa/triton/triton_generalized_dot_product_attention.py#L1635-L1651)):

# %%
show(published.last)

# %% [markdown]
# The fix is one argument, `store_reduce="add"`, onto zeros. The two branches have each other's
# store; in the defaults of the published benchmark both are off.
#
# ## Eight warps where the barrier counts four
#
# Two softmax roles take turns through named barriers of 256 threads, two groups of 128
# ([`tlx_gdpa_megakernel.py`](https://github.com/facebookresearch/ads_model_kernel_library/blob/2c128ab68cc82365c2b8a7db9366b54217b083fe/gdpa_megakernel/src/tlx_gdpa_megakernel.py#L1006-L1007),
# lines 1007, 1054, 1214 and 1275). The configurations with `PINGPONG` launch with `num_warps=8`
# (line 113), so that the default task alone is 256 threads: its wait is complete without the other
# role, and if that arrives first, 384 threads come to a barrier of 256. What happens then is not
# defined {cite}`nvidiaptx`. Whether the emulator sees it depends on who comes first, and the
# modelled schedule is the lucky one. So it takes a search:

# %%
search, errors = Search("exhaustive", schedules=100), []
for order in search:
    try:
        with tritonemu.enabled(schedule=order):
            published.threads()
    except tritonemu.EmulatorError as error:
        errors.append(f"schedule {error.schedule}: {error.args[0]}")
print(*errors, search, sep="\n")

# %% [markdown]
# The threads that arrive are $32 \times 8 + 32 \times 4 = 384$. The fix is that number, or a
# default task of four warps.
#
# ## A tile for a sequence without rows
#
# Block attention walks over tiles of 64 rows, sequence after sequence
# ([`tlx_block_attention.py`](https://github.com/facebookresearch/ads_model_kernel_library/blob/2c128ab68cc82365c2b8a7db9366b54217b083fe/block_attention/triton/tlx_block_attention.py#L223-L230),
# lines 223 to 230). The number of tiles is counted on the host,
# where an empty sequence has none; the walk goes on to the next sequence once for each tile, and
# spends one on the empty sequence. The last tile is then never reached:

# %%
show(published.walk)

# %% [markdown]
# Those rows keep what `torch.empty` found. The fix skips sequences that end where they begin, as
# `MENDED` does.
#
# ## A wait still to be written
#
# fbtriton's tutorial on this operator {cite}`fbtriton`, `tlx/tutorials/blackwell-gdpa.py` in the
# wheel of 3.7.4, reads the accumulator of the output when the last activation has been handed over
# (lines 432 to 435), without waiting for the matmul that uses it. A comment at that line says that
# the wait is missing, so its authors know. With two steps:

# %%
show(published.early, arch="sm_100")

# %% [markdown]
# One of two products is in the sum. The fix waits for the last `mBarriers`.
#
# ## A load too many
#
# The persistent matmul of Triton's Gluon tutorials starts to load its next tile while it ends this
# one, under a predicate that is false after the last. The last of these loads lacks it
# (`python/tutorials/gluon/07-persistence.py`, line 692, at the commit above; `09`, line 560): a
# program ends while a copy writes to its shared memory, which may be another CTA's by then. In
# `11`, line 1144, it is the copy of the scales. With one load for each tile:

# %%
show(published.ahead)

# %% [markdown]
# The fix is the predicate.
#
# ## Ten mistakes, and who notices
#
# `notebooks/tools/kernels/seeded.py` has two kernels: one of two roles, barriers and TMA in both
# directions, and a plain sum over programs. Each mistake of {numref}`fig-bugs-verdicts` is put in
# alone. The tools get the
# same file: the emulator with eight random schedules and six clusters at a time; Triton's own
# interpreter; [TileLens](https://github.com/Deep-Learning-Profiling-Tools/triton-viz), formerly
# triton-viz; on an H200 the program itself, NVIDIA's compute-sanitizer and Triton's ConSan. None
# raises a false alarm where no mistake was put in.

# %% [markdown]
# The interpreter knows no TLX, so it cannot run the {glue:text}`roles:.0f` mistakes of the
# pipeline. The {glue:text}`plain:.0f` others it runs in numpy, one program after the other, where
# neither a race nor a lost update can happen. The emulator took {glue:text}`slow:.1f` s at most for
# a mistake, the import of PyTorch included.
#
# TileLens is a visualizer that has grown a memory sanitizer and, on
# [a branch](https://github.com/Deep-Learning-Profiling-Tools/triton-viz/commit/4e2af488e91ac71e2672094d48cc339a1634bca5)
# not yet released, a race detector; the figure is of that branch. In the sum they find
# {glue:text}`tilelens:.0f` of {glue:text}`plain:.0f`: the store behind the end and the plain
# addition. It takes no TMA descriptors yet and knows no TLX.
#
# On the H200 the program tells most: {glue:text}`seen:.0f` of the ten make it hang, crash or fail
# its own test. ConSan names {glue:text}`consan:.0f`, all in the pipeline's barriers and buffers; it
# does not watch plain memory. Racecheck does not follow TMA's barriers, and its answers change from
# run to run ({doc}`lab notes <../../notes/emulator>`).
#
# Each of the ten breaks something that the emulator models. A tool on a GPU sees what none on a CPU
# does: the code that the compiler made, and the caches.
#
# Nine of the ten need no luck: the modelled schedule finds them. The tenth, an addition in two
# atomics, is no race of accesses: only a wrong sum tells, under an order that loses a part
# ({doc}`emulator`).
#
# ## Exercises
#
# :::{exercise} The cheapest fix
# :label: ex-found-bugs-slot
#
# The kernel with one slot already has a cluster barrier at its end. Would a second one in the loop
# fix it? Where must it stand, and what does it cost that the arrival does not? *(paper,
# then emulator)*
# :::
#
# :::{solution} ex-found-bugs-slot
# :class: dropdown
#
# Yes, anywhere between the read of a slot and the next store into it. But everybody in the CTA then
# waits for everybody else in every tile, where the arrival lets the reader go on at once, and the
# sender waits only if it is a whole tile ahead.
# :::
#
# ## Takeaways
#
# - A buffer needs two answers: it is full, and it is free again. These mistakes lack one, or assume
#   it: fresh memory is zero, no other program stores, no sequence is empty.
# - Tests on hardware sample the orders that are likely. These mistakes live in the others.
# - Poison what you allocate, and count your threads.
