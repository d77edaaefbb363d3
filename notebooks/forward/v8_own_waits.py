# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: false
# ---

# %% [markdown]
# # Forward v8: own waits
#
# Since {doc}`forward v5 <v5_pingpong>` the loop says: issue the next S, issue P V, wait for S only.
# Does the GPU obey?
#
# :::{admonition} In this chapter (35 minutes, with the whole kernel)
# You will find waits that the compiler added, keep them out with one argument, and read the whole
# kernel with notes. Back to back the rate rises by {glue:text}`loop_least:.1f` to
# {glue:text}`loop_most:.1f` % on full batches of 512 tokens and more, and forward v8 reaches 90 %
# of the roofline on {glue:text}`reached:.0f` of {glue:text}`all:.0f` published workloads.
# :::

# %% tags=["hide-input"]
import pandas as pd

from _lib import drawings, loops, studies
from gdpa_kernels.gdpa.kernels import v8_own_waits
from gdpa_kernels.gdpa.kernels.v8_own_waits import Config
from gdpa_kernels.gdpa.ladder import v4_warp_specialized, v7_packed
from gdpa_kernels.gdpa.ladder import v8_own_waits as lesson
from gdpa_lab.measuring import compile_check
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts, results
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("forward/v8_own_waits", mode=mode, device=device, data_dir=data_dir)
V6, V7, V8 = "v6_short_kv", "v7_packed", "v8_own_waits"
us = chapter.times("forward/results", together=[V6, V7, V8], direction="forward")
gain = us[V7] / us[V8]
FULL = {n: f"gdpa-self-full-{n}" for n in (256, 512, 1024, 2048)}
sustained = {"direction": "forward", "scope": "sustained"}
WALL = chapter.record("measuring/power_wall").id
loops_of = {"of": WALL, **sustained}
roof = chapter.times(value="percent_of_roofline", **loops_of)[[V6, V7, V8]].dropna()
steady = chapter.times(**loops_of)
wall = steady.loc[list(FULL.values())[1:]]
wall = 100 * (wall[V7] / wall[V8] - 1)
over = (roof[V8] / roof[V7]).sort_values()
assert over.index[0] == FULL[256] and over.iloc[0] > 0.99 and over.iloc[1] > 1, "the caption"
assert (roof[V7] > roof[V6]).all(), "the caption says so"
both = chapter.rows(WALL, impl=V8, variant=None, **sustained)
both = both.pivot(index="workload", columns="variant", values="time_us_p50").dropna()
ahead = both["behind"] / both[""]
RESULTS = chapter.record("forward/results").id
reached = chapter.times(RESULTS, "percent_of_roofline", **sustained).loc[us.index, V8]
chapter.glue(loop_least=wall.min(), loop_most=wall.max(), reached=(reached >= 90).sum(),
             all=len(us), ahead_least=ahead.min(), ahead_most=ahead.max())  # fmt: skip

# %% tags=["remove-input"]
# | name: fig-v8-ladder
# | caption: >
# |   **Forward v8 on the ladder.** Time of each rung on gdpa-self-full-1024, back to back; each
# |   tick leads to its chapter. Dashed: libraries.
# | alt: >
# |   An axis of milliseconds with a tick for each rung, that of v8 thick, and dashed lines for the
# |   libraries.
chapter.ladder("v8_own_waits")

# %% tags=["remove-input"]
# | name: fig-v8-rates
# | caption: >
# |   **Forward v8 is faster than forward v7 on every workload but full 256, where they are level;
# |   forward v7 is faster than forward v6.** Percent of each workload's roofline, back to back.
# |   Dashed: 90 %, the aim.
# | alt: >
# |   A dot plot over eight workloads. v8 lies right of v7 and v7 right of v6, but v7 and v8 meet on
# |   full 256. v8 passes the dashed line at 2,048 tokens; half-full batches stay below it.
chapter.figure(
    charts.dumbbells(
        {"forward v8": roof.set_axis(["forward v6", "forward v7", "forward v8"], axis=1)
         .sort_values("forward v8", ascending=False).rename(lambda x: x.removeprefix("gdpa-"))},
        xlabel="% of the roofline, back to back", levels={"aim": 90},
        finding=f"{(roof[V8] >= 90).sum()} of {len(roof)} workloads pass 90 %; "
        f"{(roof[V8] / roof[V6]).idxmin().removeprefix('gdpa-')} gains least.",
    ),
    measured=chapter.rows(WALL, impl=[V6, V7, V8], workload=list(roof.index), **sustained),
)  # fmt: skip

# %% [markdown]
# ## What changes
#
# v7 has the loop of {doc}`forward v6 <v6_short_kv>`, whose {term}`persistent <persistent kernel>`
# CTA starts the next tile's S with this one's last P V. Up to head_dim 128 v8 changes only the
# loop's head:
#
# ```diff
# -for block in tl.range(1, blocks):
# +for block in tl.range(1, blocks, num_stages=0):
# ```
#
# The kernel that `gdpa` runs adds masks, groups and wider heads, and with blocks of 128 keys it
# loads the next tile's Q during this one: {glue:text}`ahead_least:.2f` to
# {glue:text}`ahead_most:.2f` times as fast in this record. Without these extras both compile to the
# same code.
#
# ## What the compiler made of it
#
# The MMAs, waits and activations in a consumer's loop, in Triton's IR after its last GPU pass:

# %% tags=["hide-input"]
built = {
    "v7": compile_check.build_rung(v7_packed, config=v7_packed.Config()),
    "v8": compile_check.build_rung(v8_own_waits, config=Config()),
}
ir = {name: loops.in_ir(kernel) for name, kernel in built.items()}
sass = {name: loops.in_sass(kernel, 16) for name, kernel in built.items()}
print("\n".join(f"{name}: {loops.shown(steps)}" for name, steps in ir.items()))

# %% tags=["remove-cell"]
tanh, hidden = sass["v8"].count("tanh"), {x: loops.overlapped(steps) for x, steps in sass.items()}
assert ir["v7"][:4] == ["S", "wait 0", "PV", "wait 0"], "the text: S is awaited first in v7"
assert ir["v8"] == ["S", "PV", "wait 1", "activation", "wait 0"], "the text: as written"
assert hidden["v7"] == tanh == 64 and hidden["v8"] < 40, "the text compares them"
chapter.glue(tanh=tanh, hidden_v7=hidden["v7"], hidden_v8=hidden["v8"], after=tanh - hidden["v8"])

# %% [markdown]
# In v7 a `wait 0` follows each MMA, so the source's own `wait 1` has no group left to wait for. The
# compiler pass of {doc}`forward v5 <v5_pingpong>` adds them: it makes the MMAs of
# software-pipelined `for` loops asynchronous, and waits wherever it cannot prove that a result is
# not needed yet {cite}`fbtriton`. A loop counts as pipelined by its number of stages, a launch
# option unless the loop sets its own. With `num_stages=0`, or 1, the pass leaves the loop alone; 2
# brings the waits back. (`NUM_STAGES` counts K and V buffers.)
#
# ptxas then reorders the instructions. A wait is `WARPGROUP.DEPBAR` there:

# %% tags=["remove-input"]
# | name: fig-v8-strips
# | caption: >
# |   **In forward v7 the queue of MMAs runs empty twice a block, in forward v8 once.** A consumer's
# |   loop in SASS, in program order. A wait is labelled with the commit groups that may still be in
# |   flight.
# | alt: >
# |   Two strips. v7: eight cells of S, a wait for all, then cells of PV with groups of tanh between
# |   them, then waits. v8: eight cells of S and eight of PV, a wait for one, a short run of tanh, a
# |   wait for all, a long run of tanh.
chapter.figure(
    drawings.strips(
        sass, xlabel="place in the loop, these instructions only", highlight=["S", "PV", "tanh"]
    ),
    compiled="compiled for sm_90a when this page was built",
)

# %% [markdown]
# In v7 P V is issued with all {glue:text}`hidden_v7:.0f` `tanh` of a thread between its
# instructions. So v7 did overlap, though not as its source says. But while it waits for S it has
# nothing else in flight.
#
# In v8 both {term}`MMAs <MMA>` are issued back to back, and the consumer waits for S with P V
# queued. But ptxas has moved the *last* wait up: only {glue:text}`hidden_v8:.0f` of the
# {glue:text}`tanh:.0f` `tanh` come before it. During the other {glue:text}`after:.0f` this consumer
# has nothing in flight.
#
# ## Prediction and measurement
#
# S of 128 keys takes 512 cycles or more, and twice that when the other consumer holds the tensor
# core. P V queued behind S should gain where a tile has many blocks. With 256 keys the
# loop runs once. The predictions are about {ref}`bursts <rule-scope>`; the table is back to back.

# %% tags=["remove-input"]
few = gain[[name for name in gain.index if "full" in name and workload(name).max_seqlen_k == 256]]
chapter.predict(
    "Full batches of 512 tokens and more gain: the smallest v8 / v7.",
    gain[[FULL[n] for n in (512, 1024, 2048)]], least=1.03,
)  # fmt: skip
chapter.predict(
    "Full batches with 256 keys change by at most 3 %: the largest change.",
    100 * (few - 1).abs(), most=3, form=".1f", unit=" %",
)  # fmt: skip
chapter.predictions()

# %% tags=["remove-input"]
NAMES = {V6: "forward v6", V7: "forward v7", V8: "forward v8", "cudnn": "cuDNN", "fa4": "FA4"}
rates = chapter.times(value="tflops", **loops_of)
table = rates.loc[list(FULL.values()), list(NAMES)].round(0).rename(columns=NAMES)
chapter.table(
    table.set_axis(list(FULL)).rename_axis("tokens").reset_index(),
    caption="**Forward v8 is the fastest at every length, level with v7 at 256.** TFLOP/s back to "
    "back on full batches. FA4: FlashAttention-4.",
    measured=chapter.rows(WALL, workload=list(FULL.values()), impl=list(NAMES), **sustained),
)  # fmt: skip

# %% tags=["remove-cell"]
best = table.max(axis=1)
assert (table["forward v8"] >= 0.99 * best).all() and (table["forward v8"] == best)[1:].all()
steady_gain = 100 * (steady[V7] / steady[V8] - 1)
half = steady_gain[steady_gain.index.str.contains("half")].dropna()
chapter.glue(half_min=half.min(), half_max=half.max())

# %% [markdown]
# On half-full batches v8 is {glue:text}`half_min:.0f` to {glue:text}`half_max:.0f` % faster than v7
# back to back, and falls furthest short of 90 %: it computes whole tiles, and the roofline counts
# real pairs only.

# %% tags=["remove-cell"]
LEAST = "gdpa-self-half-jagged-512"
assert roof[V8].idxmin() == LEAST
work = workload(LEAST)
lengths = pd.DataFrame({"rows": work.seqlens_q, "keys": work.seqlens_k})
computed = -(-lengths["rows"] // 128) * 128 * -(-lengths["keys"] // 64) * 64
real = (lengths["rows"] * lengths["keys"]).sum() / computed.sum()
peak = results.ceilings(chapter.record(WALL), "sustained").tflops
chapter.glue(real=100 * real, of_computed=100 * rates.loc[LEAST, V8] / real / peak)
chapter.glue(least=roof.loc[LEAST, V8], at_512_roof=roof.loc[FULL[512], V8])

# %% [markdown]
# On gdpa-self-half-jagged-512, with blocks of 64 keys, {glue:text}`real:.0f` % of the computed
# pairs are real. v8 reaches {glue:text}`least:.0f` % of the roofline there, and
# {glue:text}`of_computed:.0f` % of the compute {ref}`ceiling <rule-ceiling>` if all computed pairs
# count. At 512 full tokens all computed pairs are real, and v8 reaches
# {glue:text}`at_512_roof:.0f` %.
#
# ## Is it right?
#
# In the emulator v8 agrees with fp64. The length of a tile in v7 and v8:

# %% tags=["hide-input"]
inputs = studies.batch(studies.EDGES, studies.EDGES[::-1], head_dim=64)
checked = studies.comparison(v8_own_waits, inputs, Config(BLOCK_N=64, num_stages=4))
print(f"largest error: {(checked['largest error'] / checked['allowed']).max():.2f} of the allowed")
tile = studies.batch((128,), (1024,))
for module in (v7_packed, v8_own_waits):
    events = studies.timeline(module, tile, Config()).events
    print(f"{module.__name__}: {max(event.end for event in events):,.0f} modelled cycles")

# %% [markdown]
# The emulator runs the source, so it sees no difference. It shows that the source's waits are
# *enough*; it cannot see that the compiler adds more.
#
# ## The whole kernel
#
# The consumer in full, with every idea of the ladder in its place; the rest is folded below it.

# %% tags=["remove-input"]
chapter.annotated(
    lesson.math,
    {
        "s = tlx.async_dot_wait(0, s)": "v5: the prologue. The first scores have no P V to hide "
        "under; this wait happens once per CTA.",
        "# Prefetched: the loop over blocks hides the latency.": "v6: the list is read one tile "
        "ahead.",
        "for block in tl.range(1, blocks, num_stages=0):": "v8: without `num_stages=0` the "
        "compiler adds a wait behind each MMA.",
        "v_stage = v.wait(kv + block - 1)": "v5: V of the block before, whose P V is issued "
        "in this iteration.",
        "tlx.barrier_arrive(q.empty[q_slot])": "Q is free after the tile's last scores, not at its "
        "end.",
        "# The first scores of the next tile, overlapped": "v6: the same steps as in the loop, but "
        "S belongs to the next tile.",
        "rows = (acc * output_scale).to(DTYPE)": "v7: `output_scale` holds the factor of the "
        "activation, once per output instead of once per score.",
    },
)
chapter.annotated(
    [lesson.load, lesson.fetch_q, lesson.release, lesson.own_waits_kernel, lesson.forward],
    {
        "blocks = tl.where(step == 0, blocks, 0)": "v6: where K and V stay, the producer fetches "
        "them with the first tile of an entry only.",
        "stage = k.acquire(kv + block)": "v4: the producer waits with the {ref}`other parity "
        "<rule-phases>`.",
        "k.full[stage], start_k, len_k, head, key)": "v2: one TMA load of a box, clipped at "
        "the end of the sequence.",
        "fetch_q(q_desc, q, tile, 0, 0, 0, 0, options)": "v6: after the last tile comes a dummy "
        "one of length zero, so that the consumers' loop needs no second copy.",
        "tlx.barrier_arrive(empty, pred=last)": "v6: resident buffers are given back after "
        "the last tile of the entry.",
        "k_empty = tlx.alloc_warp_barrier": "v4: {ref}`threads arrive <rule-arrivals>`, 256.",
        'with tlx.async_task("default"):': "v4: the producer. Its registers go to the consumers.",
        "out = batch.new_out()": "The host makes a descriptor for each tensor and a list of "
        "work on the device, and launches one CTA per SM, or fewer if the list is shorter.",
    },
    folded="The producer, what the roles call, the kernel that starts them, and the host side",
)

# %% [markdown]
# ## The surprise: source, IR and machine code had three different orders
#
# From v5 to v7 the source asked for one order, the compiler's waits for another, and SASS had
# neither. {doc}`v5_pingpong` tested the waits with the wrong instrument: a `while` loop has no
# added waits either, but it also converts its {term}`accumulator` through {term}`shared memory`:
# two changes.
#
# Nor does counting explain the gain, because v7 overlaps more `tanh` with P V. But in v7 the queue
# of MMAs runs empty twice a block, after S and after P V; in v8 once. Each time, the tensor core
# depends on the other consumer being ready. The profile agrees: in v8 warps wait less at barriers.

# %% tags=["remove-input"]
chapter.profile("v7_packed", "v8_own_waits", workload="gdpa-self-full-512")

# %% [markdown]
# ## Exercises
#
# :::{exercise} The loop of v4
# :label: ex-v8-v4
#
# v4 has a `for` loop over blocks without `num_stages=0`. Does the pass add waits to it? Do they
# matter? *(paper, then the compiler; five minutes)*
# :::

# %% tags=["remove-cell"]
HEAD = "    for block in tl.range(0, blocks):\n        stage = block % NUM_STAGES\n"
modified = studies.changed(
    v4_warp_specialized, (HEAD, HEAD.replace("blocks)", "blocks, num_stages=0)"))
)
plain, changed = (compile_check.build_rung(module) for module in (v4_warp_specialized, modified))
orders = [[x for x in loops.in_sass(kernel, 16) if "wait" not in x] for kernel in (plain, changed)]
assert orders[0] == orders[1], "the answer: the same order in SASS"
chapter.glue(v4_added=len(loops.in_ir(plain)) - len(loops.in_ir(changed)))

# %% [markdown]
# :::{solution} ex-v8-v4
# :class: dropdown
#
# It adds {glue:text}`v4_added:.0f`. They do not matter: v4 waits for each MMA itself before
# anything else. MMAs and `tanh` come in the same order in {term}`SASS` either way. Waits matter
# where a kernel issues one MMA before it waits for another, as v5 to v7 do.
# :::
#
# :::{exercise} Why the boundary was never affected
# :label: ex-v8-boundary
#
# Where one tile leads to the next, v7 has the loop's statements, and no added wait. Why? *(paper,
# with the listing above)*
# :::
#
# :::{solution} ex-v8-boundary
# :class: dropdown
#
# The boundary follows the `for` loop, in the `while` loop over the list, and the pass looks at
# `for` loops only. For the same reason 256 keys could not gain much: of two blocks one is the
# boundary.
# :::
#
# :::{exercise} The price of a wait moved up
# :label: ex-v8-price
#
# {term}`MUFU` takes 8 cycles for one `tanh` of a warp. In v8 {glue:text}`after:.0f` of
# {glue:text}`tanh:.0f` come after the wait for P V. For at least how many cycles of a block does a
# consumer have nothing in flight? What share of the block is that if it has the SM to itself, and
# how much must remain with two consumers? *(paper, ten minutes)*
# :::

# %% tags=["remove-cell"]
idle = 8 * (tanh - hidden["v8"])
assert idle < 1024, "the answer: the other consumer's MMAs are longer"
chapter.glue(idle=idle, alone=1024 + idle, idle_share=100 * idle / (1024 + idle))

# %% [markdown]
# :::{solution} ex-v8-price
# :class: dropdown
#
# {glue:text}`after:.0f` × 8 = {glue:text}`idle:.0f` cycles. A consumer alone would take 1,024
# cycles for its two MMAs and {glue:text}`idle:.0f` for these, {glue:text}`alone:,.0f` in all,
# {glue:text}`idle_share:.0f` % of them with nothing in flight. With two consumers none of it needs
# to remain: while one evaluates, the other has 1,024 cycles of MMAs to run. By this count the
# tensor core limits both v7 and v8, so only a measurement can tell them apart.
# :::
#
# ## Takeaways
#
# - The compiler must keep your waits, and may add more. Read the IR for waits and the SASS for
#   order.
# - An emulator shows that the source's waits are enough, not that the compiler adds none.
# - An experiment that changes two things answers no question.
