# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # v5: products beside activations
#
# Can one role multiply and evaluate the activation at the same time?
#
# :::{admonition} In this chapter
# - The loop is turned by half a block: the next scores are multiplied before this block's P V. On
#   paper, and in the emulator, that hides the activation: a role alone keeps the tensor core
#   {glue:text}`v5_busy_v5:.0f` % busy, in v4 {glue:text}`v5_busy_v4:.0f` %.
# - On the H200 v5 takes {glue:text}`v5_full_min:.2f` to {glue:text}`v5_full_max:.2f` times the time
#   of v4 on full batches, and {glue:text}`v5_half_min:.2f` to {glue:text}`v5_half_max:.2f` times on
#   half-full ones, where each empty tile now computes a block.
# - The machine code overlaps too, but not as the source does. The compiler put
#   {glue:text}`v5_added:.0f` waits into the loop that nobody wrote, and then moved the activation
#   between the instructions of P V. A `while` loop has no such waits, but its accumulator goes
#   through shared memory in each block; it takes {glue:text}`v5_loop` times the time of the `for`
#   loop. {doc}`v8_own_waits` is about a `for` loop without them.
# :::

# %% tags=["remove-cell"]
import functools
import inspect
import re
import textwrap
from pathlib import Path

import pandas as pd
import torch
import triton
from IPython.display import SVG, Markdown, display

from gdpa_kernels import emulator
from gdpa_kernels.calling import ladder
from gdpa_kernels.gdpa import activations, reference, v4_warp_specialized, v5_pingpong
from gdpa_kernels.gdpa.v5_pingpong import Config
from gdpa_kernels.measuring import compile_check, record, system, testing
from gdpa_kernels.measuring.inputs import cu_seqlens
from gdpa_kernels.measuring.workload import workload
from gdpa_kernels.report import figures, results
from gdpa_kernels.report.studies import changed

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
HEAD_DIM, ROWS, KEYS = 128, 128, 128
IMPL, BEFORE = "v5_pingpong", "v4_warp_specialized"
FULL = {n: f"gdpa-self-full-{n}" for n in (256, 512, 1024, 2048)}
CROSS = {n: f"gdpa-cross-full-{n}" for n in (256, 512, 1024, 2048)}
HALF = {n: f"gdpa-self-half-dense-{n}" for n in (512, 1024)}


def measured() -> tuple[pd.DataFrame, pd.Series]:
    """Rows of all records, and the newest record of each chapter."""
    rows = results.table(data_dir, system="h200", latest=False)
    rows = rows.drop_duplicates(["workload", "impl", "scope", "variant", "record"])
    return rows, rows.groupby(rows["record"].str.extract(r"-(\d\d)-")[0])["record"].max()


everything, newest = measured()
ladders = everything[everything["record"] == newest["10"]]
machine = system.load(Path(data_dir) / "systems" / f"{ladders['system'].iloc[0]}.json")
kernel_us = ladders[(ladders["scope"] == "kernel") & (ladders["variant"] == "")].pivot_table(
    index="workload", columns="impl", values="time_us_p50", sort=False
)
run = record.load(Path(data_dir) / "records" / f"{newest['10']}.json")
ceilings = results.ceilings(run)


def glue(name: str, value: float) -> None:
    figures.glue_number(f"v5_{name}", value)


def glue_word(name: str, value: str) -> None:
    figures.glue_text(f"v5_{name}", value)


def code(text: str, language: str = "python") -> Markdown:
    return Markdown(f"```{language}\n{text.rstrip()}\n```")


def docstring_tables(module) -> list[str]:
    """The Markdown tables of a module's docstring: roles, barriers."""
    return re.findall(r"(?:^\|.*\n)+", inspect.getdoc(module) + "\n", flags=re.MULTILINE)


# %% [markdown]
# ## What stays, what changes
#
# | | {doc}`v4 <v4_warp_specialized>` | v5 |
# |:--|:--|:--|
# | work split | a load role, two math roles of 64 rows | the same |
# | data path | K and V of one block after another | the same; V is held for one block longer |
# | order in a math role | S, activation, P V of one block | S of the next block, P V of this one |
# | synchronisation | barriers between roles | the same; turns between math roles, if asked for |
#
# In v4 a role issues a product and waits for it. `wgmma` does not ask for that: it is issued like a
# copy, and a role may go on until it needs the result {cite}`nvidiaptx`. All that is missing is
# something useful to do meanwhile. P V of a block needs the activation of that block, so it cannot
# run beside it; but it can run beside the activation of the *next* block, if the scores of that one
# have been multiplied before. FlashAttention-3 turns its loop in the same way to hide the softmax
# {cite}`shah2024flashattention3`.
#
# ## Prediction
#
# A role owns 64 rows. Per block of 128 keys its two products take 512 cycles each, if it has the
# tensor core for itself. Its activation takes at least {glue:text}`v5_act_least:.0f` cycles, those
# of MUFU, and at most {glue:text}`v5_act_most:.0f`, those of MUFU and of all other issue slots one
# after the other. In v4 the three add up. In v5 P V and the activation run side by side, and the
# longer one counts:

# %% tags=["remove-cell"]
TENSOR, FP32, MUFU = 4096, 128, 16
fp32, mufu = activations.INSTRUCTIONS["gelu_tanh"]
elements = 64 * KEYS
product = 2 * elements * HEAD_DIM / TENSOR
least = mufu * elements / MUFU
most = least + (fp32 + mufu + 0.5) * elements / FP32
assert product == 512, "the text says so"
glue("act_least", least)
glue("act_most", most)
alone = pd.DataFrame(
    {
        "activation (cycles)": round(act),
        "v4: S + activation + P V": round(2 * product + act),
        "of the peak (%)": round(100 * 2 * product / (2 * product + act)),
        "v5: S + max(activation, P V)": round(product + max(product, act)),
        "of the peak, v5 (%)": round(100 * 2 * product / (product + max(product, act))),
        "v4 / v5": round((2 * product + act) / (product + max(product, act)), 2),
    }
    for act in (least, (least + most) / 2, most)
)
glue("gain_most", alone["v4 / v5"].max())

# %% tags=["remove-input"]
figures.show_table(alone)

# %% tags=["remove-input"]
figures.source("modelled", "one role alone on an SM, 64 rows x 128 keys, head_dim 128, gelu_tanh")

# %% [markdown]
# With two roles v4 loses less than that, since one may fill the gaps of the other. How much of it
# happens by itself is what the comparison measures: v5 should take between
# 1 / {glue:text}`v5_gain_most:.2f` and all of the time of v4.
#
# Predictions:
#
# 1. v5 is not slower than v4 on any full batch (3 % allowed for noise), and gains more with more
#    keys: the ends of a tile stay what they were. A full batch on which it is slower falsifies it.
# 2. *Turns* gain at least 3 % from 512 keys on: a pair of named barriers lets one role issue its
#    products while the other evaluates. That was noted down as a fact after quick experiments with
#    a prototype of this rung (2026-11-21), and it did not hold in a prototype of the later rungs
#    (`notebooks/notes/v4_to_v6.md`). Here it is put to the rung itself.
# 3. Scores, probabilities in fp32 and the accumulator are alive together, 64 registers each, and 32
#    of converted probabilities: {glue:text}`v5_needed:.0f`. An even share of the register file is
#    {glue:text}`v5_even:.0f`. Now `setmaxnreg` must pay: with {glue:text}`v5_even:.0f` registers
#    the kernel has to spill.
# 4. (2026-11-21, before the variant was measured.) Written as a `while` loop the kernel is not
#    faster. Why anybody would ask is the surprise of this chapter.

# %% tags=["remove-cell"]
needed = 3 * 64 + 32
even = 65536 // 384 // 8 * 8
assert needed > even
glue("needed", needed)
glue("even", even)

# %% [markdown]
# ## What changed in the code
#
# The loop of a math role. Before it, the first block has its scores and its activation; after it,
# the last one gets its P V.

# %% tags=["remove-input"]
body = inspect.getsource(v5_pingpong.math.fn)
code(textwrap.dedent(body[body.index("    for block in") : body.index("    store_rows")]))

# %% [markdown]
# `async_dot_wait(1, s)` returns when at most one product is in flight. Products complete in order,
# so S is done and P V may still run.
#
# The probabilities wait in fp32 and are converted just before they are multiplied: registers that a
# `wgmma` reads must not be written while another one runs. Roles and barriers:

# %% tags=["remove-input"]
Markdown("\n".join(docstring_tables(v5_pingpong)))

# %% tags=["remove-input"]
Markdown(
    "\n".join(
        (
            "````{admonition} The whole difference between the files of v4 and v5",
            ":class: dropdown",
            "```diff",
            ladder.diff(IMPL, context=1).rstrip(),
            "```",
            "````",
        )
    )
)

# %% [markdown]
# ## A timeline
#
# To see what turning the loop does, look at one role alone. Below, `MATH_ROLES` is 1 in both
# rungs, and a tile has 64 rows; 256 keys in blocks of 64, four stages, so that no copy is waited
# for. First v4:


# %% tags=["remove-cell"]
def one_tile(queries: int, keys: int, head_dim: int = HEAD_DIM) -> dict:
    """Arguments of `forward` for one sequence with one head."""
    make = torch.Generator().manual_seed(2025)
    q, k, v = (
        torch.randn(rows, 1, head_dim, generator=make).bfloat16() for rows in (queries, keys, keys)
    )
    return {
        "q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens((queries,), "cpu"),
        "cu_seqlens_k": cu_seqlens((keys,), "cpu"), "max_seqlen_q": queries,
        "max_seqlen_k": keys, "activation": ("gelu_tanh",), "scale": head_dim**-0.5,
        "output_scale": 1.0, "causal": False, "window": None,
    }  # fmt: skip


def traced(module, call: dict, config) -> emulator.Timeline:
    """The timeline of a launch in the emulator."""
    with emulator.enabled(trace=True) as reports:
        module.forward(**call, config=config)
    return reports[0].timeline


def overlap(timeline: emulator.Timeline) -> dict[str, float]:
    """Modelled cycles of products, from the first to the last, and beside an activation."""
    products = [(e.start, e.end) for e in timeline.events if e.kind == "mma"]
    work = [(e.start, e.end) for e in timeline.events
            if e.kind == "compute" and e.lane.startswith("math")]  # fmt: skip
    return {
        "busy": sum(end - start for start, end in products),
        "span": products[-1][1] - products[0][0],
        "beside": sum(
            max(0, min(b, d) - max(a, c)) for a, b in products for c, d in work
        ),
    }  # fmt: skip


ONE_ROLE = ("MATH_ROLES = tl.constexpr(2)", "MATH_ROLES = tl.constexpr(1)")
SMALL = {"BLOCK_N": 64, "num_stages": 4}
single = {
    "v4": traced(
        changed(v4_warp_specialized, ONE_ROLE),
        one_tile(64, 256),
        v4_warp_specialized.Config(**SMALL),
    ),
    "v5": traced(changed(v5_pingpong, ONE_ROLE), one_tile(64, 256), Config(**SMALL)),
}
both = {
    "v4": traced(v4_warp_specialized, one_tile(128, 512), v4_warp_specialized.Config()),
    "v5": traced(v5_pingpong, one_tile(128, 512), Config()),
}
# A longer tile, so that the ends do not count.
longer = {
    "v4": traced(
        changed(v4_warp_specialized, ONE_ROLE),
        one_tile(64, 2048),
        v4_warp_specialized.Config(**SMALL),
    ),
    "v5": traced(changed(v5_pingpong, ONE_ROLE), one_tile(64, 2048), Config(**SMALL)),
}
for name in ("v4", "v5"):
    inside = overlap(longer[name])
    glue(f"busy_{name}", 100 * inside["busy"] / inside["span"])
    pair = overlap(both[name])
    glue(f"pair_{name}", 100 * pair["busy"] / pair["span"])
    glue(f"end_{name}", max(event.end for event in both[name].events))
assert overlap(single["v4"])["beside"] == 0 < overlap(single["v5"])["beside"]
glue("beside", overlap(single["v5"])["beside"])

# %% tags=["remove-input"]
# | name: fig-v5-alone-v4
# | caption: >
# |   v4, one math role alone: 64 rows, 256 keys in four blocks. Modelled cycles.
# | alt: >
# |   Lanes load, math, TMA and tensor core. The tensor core has a gap between each S and the P V
# |   that follows; in each gap math computes.
display(SVG(single["v4"].svg(width=760)))

# %% tags=["remove-input"]
figures.source(
    "emulated",
    "v4_warp_specialized.py with MATH_ROLES = 1, modelled schedule; cycles are modelled",
)

# %% tags=["remove-input"]
# | name: fig-v5-alone-v5
# | caption: >
# |   v5, the same role on the same inputs. Modelled cycles.
# | alt: >
# |   The same lanes. From the second block on the tensor core runs S and P V without a gap
# |   between them, and math computes beneath P V. The tile ends earlier.
display(SVG(single["v5"].svg(width=760)))

# %% tags=["remove-input"]
figures.source(
    "emulated",
    "v5_pingpong.py with MATH_ROLES = 1, modelled schedule; cycles are modelled",
)

# %% [markdown]
# In v4 no product runs beside an activation; in v5 for {glue:text}`v5_beside:,.0f` cycles of this
# short tile. On a tile with 2,048 keys the tensor core is busy for {glue:text}`v5_busy_v4:.0f` % of
# the time between the first and the last product in v4, and for {glue:text}`v5_busy_v5:.0f` % in
# v5. What is left is the activation minus P V, as predicted.
#
# Now both roles, with the inputs of {numref}`fig-v4-timeline`:

# %% tags=["remove-input"]
# | name: fig-v5-timeline
# | caption: >
# |   v5 on one tile of 128 rows and 512 keys, two math roles. Modelled cycles.
# | alt: >
# |   Lanes load, math[0], math[1], TMA, tensor core. Both math roles compute while products are in
# |   flight, and the tensor core has no gap from the second block on.
display(SVG(both["v5"].svg(width=760)))

# %% tags=["remove-input"]
figures.source("emulated", "gdpa_kernels/gdpa/v5_pingpong.py, modelled schedule")

# %% [markdown]
# {glue:text}`v5_end_v5:,.0f` cycles, {glue:text}`v5_end_v4:,.0f` in v4. In the model there was
# little left to gain, because its two roles fell into the right step by themselves:
# {glue:text}`v5_pair_v4:.0f` % busy in v4, {glue:text}`v5_pair_v5:.0f` % in v5. v5 does not depend
# on that luck.
#
# ## Two ways to get it wrong
#
# The two products issued in the other order, and, with `turns=True`, the first turn not given:

# %% tags=["remove-cell"]
S_FIRST = "        s = tlx.async_dot(q[role], tlx.local_trans(k.buffer[stage]))\n"
PV_NEXT = "        acc = tlx.async_dot(p, v.buffer[before], acc)\n"
FIRST_TURN = "    if role == 1:\n        pass_turn(role, options.TURNS)\n"
SCHEDULES = ("modelled", 0, 1, 2)


def shorten(text: str) -> str:
    """Paths of files as the names of these files."""
    return re.sub(r"/\S*/(?=[\w-]+\.py:\d)", "", text)


def found(module, config, schedule) -> emulator.EmulatorError | None:
    """What the emulator says about a launch."""
    try:
        with emulator.enabled(schedule=schedule, max_steps=100_000):
            module.forward(**one_tile(128, 512), config=config)
    except emulator.EmulatorError as error:
        return error
    return None


swapped = changed(v5_pingpong, (S_FIRST + PV_NEXT, PV_NEXT + S_FIRST))
stuck = changed(v5_pingpong, (FIRST_TURN, ""))
reports = {
    "other order": [found(swapped, Config(), schedule) for schedule in SCHEDULES],
    "no first turn": [found(stuck, Config(turns=True), schedule) for schedule in SCHEDULES],
}
assert {type(e).__name__ for e in reports["other order"]} == {"InvalidKernel"}
assert {type(e).__name__ for e in reports["no first turn"]} == {"Deadlock"}
assert found(v5_pingpong, Config(turns=True), "modelled") is None

# %% tags=["remove-input"]
lines = []
for name, errors in reports.items():
    lines.append(f"{name}: {type(errors[0]).__name__}")
    lines += ["  " + line for line in re.split(r"\n|; ", shorten(str(errors[0])))]
code("\n".join(lines), "text")

# %% tags=["remove-input"]
figures.source("emulated", "v5_pingpong.py with one change each, modelled schedule")

# %% [markdown]
# The number in `async_dot_wait` counts products from the last one back. In the other order the one
# that may still run is S, and the activation reads it. And a turn is a token: with none in the game
# each role waits for the other.
#
# ## Is it right?
#
# A ragged batch with lengths around the edges of a role (64 rows) and of a tile (128), in the
# emulator, against double precision:

# %%
lengths = (0, 1, 63, 64, 65, 127, 128, 129)
make = torch.Generator().manual_seed(2025)
q, k, v = (torch.randn(sum(lengths), 2, 128, generator=make).bfloat16() for _ in range(3))
ends = cu_seqlens(lengths, "cpu")
call = one_tile(1, 1) | {
    "q": q, "k": k, "v": v, "cu_seqlens_q": ends, "cu_seqlens_k": ends,
    "max_seqlen_q": 129, "max_seqlen_k": 129,
}  # fmt: skip
with emulator.enabled():
    out = v5_pingpong.forward(**call)
exact = reference.forward(**call | {name: call[name].double() for name in ("q", "k", "v")})
same = reference.forward(**call)
comparisons = [
    testing.compare(
        name=f"{length}",
        actual=out[start:end],
        expected=exact[start:end],
        baseline=same[start:end],
    )
    for length, start, end in zip(lengths, ends.tolist()[:-1], ends.tolist()[1:], strict=True)
]
figures.show_table(
    pd.DataFrame(
        {
            "length": c.name, "elements": c.elements, "largest error": c.max_abs,
            "allowed": c.max_abs_budget, "passed": str(c.passed),
        }
        for c in comparisons
    )
)  # fmt: skip

# %% tags=["remove-input"]
figures.source(
    "emulated",
    "two heads, head_dim 128, bf16; allowed: twice the error of PyTorch in bf16 and one rounding",
)

# %% tags=["remove-cell"]
assert all(c.passed for c in comparisons) and not out.isnan().any()
checked = next(r for r in run.rows if (r.workload, r.impl, r.scope) == (FULL[1024], IMPL, "kernel"))
assert checked.error.passed
glue("error", checked.error.max_abs)
glue("budget", checked.error.budget)
glue("elements", checked.error.elements / 1e6)
with emulator.enabled():
    turned = v5_pingpong.forward(**call, config=Config(turns=True))
    previous = v4_warp_specialized.forward(**call)
assert torch.equal(turned, out) and torch.equal(previous, out), "the text says: the same bits"

# %% [markdown]
# In the emulator v4, and v5 with turns, give the same bits: the order of the sum over keys has not
# changed. On the GPU, gdpa-self-full-1024: largest error {glue:text}`v5_error:.2f`, allowed
# {glue:text}`v5_budget:.2f`, over {glue:text}`v5_elements:.0f` million elements (measured).
#
# ## What the compiler made of it

# %% tags=["remove-cell"]
FOR = "    for block in tl.range(1, blocks):\n"
WHILE = "    block = 1\n    while block < blocks:\n"
LAST = "        tlx.barrier_arrive(v.empty[before])\n"
as_while = changed(v5_pingpong, (FOR, WHILE), (LAST, LAST + "        block += 1\n"))


@functools.cache
def built_for_hopper(module, config):
    """What Triton makes of the rung's module, or of a changed one."""
    return compile_check.build_rung(module, config=config)


@functools.cache
def compiled(module, config) -> compile_check.Compiled:
    """What `compile_check` reads from it."""
    return compile_check.read(built_for_hopper(module, config))


SHOWN = ("HGMMA", "WARPGROUP", "UTMALDG", "SYNCS", "BAR", "USETMAXREG", "MUFU")


def row_of(label: str, made: compile_check.Compiled) -> dict:
    return {
        "kernel": label, "registers": made.registers, "spilled": made.spill_bytes,
        "serialised": "yes" if made.serialised else "no",
        **{name: made.instructions[name] for name in SHOWN},
    }  # fmt: skip


CASES = {
    "128 keys": (v5_pingpong, Config()),
    "128 keys, turns": (v5_pingpong, Config(turns=True)),
    "64 keys, 4 stages": (v5_pingpong, Config(**SMALL)),
    "128 keys, while loop": (as_while, Config()),
    "64 keys, 4 stages, while loop": (as_while, Config(**SMALL)),
}
built = pd.DataFrame(
    [
        row_of("v4", compile_check.compile_rung(BEFORE)),
        *(row_of(f"v5, {case}", compiled(*of)) for case, of in CASES.items()),
    ]
)
asked = pd.DataFrame(
    row_of(f"{registers}", compiled(v5_pingpong, Config(registers=registers)))
    for registers in (240, 224, 216, even)
)
clean = (built["spilled"] == 0) & (built["serialised"] == "no")
assert clean.all(), "the text says that no case spills"
spills = asked.set_index("kernel")["spilled"]
enough = min(int(name) for name, spilled in spills.items() if spilled == 0)
glue("enough", enough)
glue("even_spilled", spills[f"{even}"])
glue_word("kept_3", "kept" if spills[f"{even}"] > 0 else "broken")

# %% tags=["remove-input"]
figures.show_table(built)

# %% tags=["remove-input"]
figures.source(
    "modelled",
    f"compiled for sm_90a by triton {triton.__version__} when this page was built, and counted. "
    "HGMMA: matrix product; WARPGROUP: beginning of products, and waits for them; the rest as in "
    "the chapter of v4",
)

# %% [markdown]
# No spills, no remark that products wait for each other. The registers of a math role:

# %% tags=["remove-input"]
figures.show_table(
    asked.rename(columns={"kernel": "registers of a math role"})[
        ["registers of a math role", "spilled", "serialised"]
    ]
)

# %% tags=["remove-input"]
figures.source("modelled", f"compiled for sm_90a by triton {triton.__version__}")

# %% [markdown]
# The third prediction is {glue:text}`v5_kept_3`: {glue:text}`v5_enough:.0f` are enough, and an even
# share spills {glue:text}`v5_even_spilled:.0f` bytes. Here the registers of the load role are worth
# asking for.
#
# ## Measurement
#
# This cell measures variants of v5; it runs with `make measure NOTEBOOKS=forward/v5_pingpong`, on a
# GPU. The *while loop* says `while block < blocks` instead of `for block in tl.range(1, blocks)`.

# %% tags=["hide-input"]
VARIANTS = {
    **CASES,
    "64 keys, 4 stages, turns": (v5_pingpong, Config(**SMALL, turns=True)),
    "128 keys, while loop, turns": (as_while, Config(turns=True)),
}
MEASURED = ("gdpa-self-full-512", "gdpa-self-full-2048", "gdpa-cross-full-1024")
if mode == "measure":
    from gdpa_kernels.measuring.session import Session

    session = Session("notebooks/forward/v5_pingpong.py", device)
    listed = [
        (IMPL, variant, {"config": config, "module": module})
        for variant, (module, config) in VARIANTS.items()
    ]
    for name in MEASURED:
        session.measure(workload(name), [(BEFORE, "v4", {}), *listed])
    print(session.write(data_dir))

# %% [markdown]
# First the default, beside the best peers and the earlier rungs:

# %% tags=["remove-input"]
# | name: fig-v5-ladder
# | caption: >
# |   The ladder up to v5 on gdpa-self-full-1024, forward, kernel alone.
# | alt: >
# |   Horizontal bars of TFLOP/s. The bar of v5 is a little longer than those of v4 and v2; that of
# |   cuDNN is longer still. All end below the dashed line of the roofline.
RUNGS = ["v0_eager", "v1_tiled", "v2_tma", "v3_persistent", BEFORE, IMPL]
figures.figure_ladder(ladders, FULL[1024], RUNGS, IMPL)

# %% tags=["remove-input"]
shown = ladders[(ladders["workload"] == FULL[1024]) & (ladders["scope"] == "kernel")]
figures.save_csv(shown, "v5-ladder")
figures.provenance(shown, csv="v5-ladder", data_dir=Path(data_dir))

# %% tags=["remove-cell"]
COMPARED = [*FULL.values(), *CROSS.values(), *(n for n in kernel_us.index if "-half-" in n)]
PEERS = ("v2_tma", BEFORE, IMPL, "fa2_varlen", "cudnn")
rates = ladders[(ladders["scope"] == "kernel") & (ladders["variant"] == "")].pivot_table(
    index="workload", columns="impl", values="tflops", sort=False
)
roof = ladders[(ladders["impl"] == IMPL) & (ladders["scope"] == "kernel")].set_index("workload")
ratio = kernel_us[IMPL] / kernel_us[BEFORE]
table = rates.loc[COMPARED, list(PEERS)].round(0)
table["% of roofline"] = roof.loc[COMPARED, "percent_of_roofline"].round(0)
table["time / v4"] = ratio.loc[COMPARED].round(2)
dense = ratio[[*FULL.values(), *CROSS.values()]]
half = ratio[[n for n in COMPARED if "-half-" in n]]
for name, values in (("full", dense), ("half", half), ("cross", ratio[list(CROSS.values())])):
    glue(f"{name}_min", values.min())
    glue(f"{name}_max", values.max())
for n in FULL:
    glue(f"self_{n}", ratio[FULL[n]])
more = ratio[FULL[2048]] < ratio[FULL[256]]
glue_word("kept_1", "kept" if dense.max() < 1.03 and more else "broken")
offered = 1 - 1 / alone["v4 / v5"].max()
assert offered > 0.3 and dense.min() > 0.75, "the text compares the gain with what was on offer"
glue("offered", 100 * offered)
glue("gained", 100 * (1 - dense.min()))
assert half.max() > 1.05, "the text says that v5 loses on half-full batches"
cudnn = (kernel_us[IMPL] / kernel_us["cudnn"])[dense.index]
glue("cudnn_min", cudnn.min())
glue("cudnn_max", cudnn.max())

# %% tags=["remove-input"]
figures.show_table(table.reset_index().rename(columns={IMPL: "v5", BEFORE: "v4"}))

# %% tags=["remove-input"]
shown = ladders[ladders["workload"].isin(COMPARED) & ladders["impl"].isin(PEERS)]
shown = shown[shown["scope"] == "kernel"]
figures.save_csv(shown, "v5-rates")
figures.provenance(shown, csv="v5-rates", data_dir=Path(data_dir))

# %% [markdown]
# TFLOP/s; FA2 and cuDNN compute softmax. The first prediction is {glue:text}`v5_kept_1`: on full
# batches v5 takes {glue:text}`v5_self_256:.2f`, {glue:text}`v5_self_512:.2f`,
# {glue:text}`v5_self_1024:.2f` and {glue:text}`v5_self_2048:.2f` times the time of v4 for 256 to
# 2,048 keys, and {glue:text}`v5_cross_min:.2f` to {glue:text}`v5_cross_max:.2f` times in
# cross-attention, with 256 keys. {glue:text}`v5_offered:.0f` % of the time of v4 was on offer, and
# at most {glue:text}`v5_gained:.0f` % is saved. Beside cuDNN v5 takes
# {glue:text}`v5_cudnn_min:.2f` to {glue:text}`v5_cudnn_max:.2f` times the time.
#
# ### A block and its ends, again

# %% tags=["remove-cell"]
BLOCKS = {name: n // KEYS for n, name in FULL.items()}


def tiles(name: str) -> int:
    work = workload(name)
    return work.batch * work.num_heads_q * -(-work.max_seqlen_q // ROWS)


on_sm = pd.DataFrame(
    {
        impl: [kernel_us.loc[name, impl] * machine.num_sms / tiles(name) for name in BLOCKS]
        for impl in ("v2_tma", BEFORE, IMPL, "cudnn")
    },
    index=list(BLOCKS.values()),
)
block = (on_sm.loc[4] - on_sm.loc[2]) / 2
besides = on_sm.loc[2] - 2 * block
for label, impl in (("v4", BEFORE), ("v5", IMPL)):
    glue(f"block_{label}", block[impl])
    glue(f"ends_{label}", besides[impl])
prices = {}
for label, impl in (("v4", BEFORE), ("v5", IMPL)):
    shares = []
    for name in HALF.values():
        work = workload(name)
        total = work.batch * work.num_heads_q * -(-work.max_seqlen_q // ROWS)
        held = [(-(-n // ROWS), -(-m // KEYS)) for n, m in
                zip(work.seqlens_q, work.seqlens_k, strict=True)]  # fmt: skip
        used = work.num_heads_q * sum(rows for rows, _ in held)
        inner = work.num_heads_q * sum(rows * keys for rows, keys in held)
        free = besides[impl] * used + block[impl] * inner
        spent = kernel_us.loc[name, impl] * machine.num_sms
        shares.append((spent - free) / (total - used))
    prices[label] = shares
    glue(f"empty_{label}_min", min(shares))
    glue(f"empty_{label}_max", max(shares))
assert min(prices["v5"]) > max(prices["v4"]), "the text says that empty tiles cost more"

# %% tags=["remove-input"]
# | name: fig-v5-blocks
# | caption: >
# |   Time of a tile on its SM, per block of 128 keys, on gdpa-self-full-256 to 2048.
# | alt: >
# |   Lines over 2, 4, 8 and 16 blocks for v2, v4, v5 and cuDNN. v5 starts where v4 starts, highest,
# |   falls most, and lies below v4 with more blocks, near cuDNN, which is lowest on the left.
with figures.style():
    chart, axis = figures.subplots(width=6.6, height=3.9)
    named = (("v2_tma", "v2", 6), (BEFORE, "v4", 6), (IMPL, "v5", -6), ("cudnn", "cuDNN", -2))
    for impl, label, shift in named:
        per_block = on_sm[impl] / on_sm.index
        axis.plot(
            on_sm.index, per_block, "o-", color=figures.colour(impl),
            linewidth=1.0 if impl == "cudnn" else 1.8,
        )  # fmt: skip
        axis.annotate(
            label, (2, per_block[2]), xytext=(-8, shift), ha="right", va="center",
            textcoords="offset points", color=figures.colour(impl),
        )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(on_sm.index), [str(n) for n in on_sm.index])
    axis.set_xlim(1.45, 17)
    axis.set_ylim(0, 1.1 * (on_sm[IMPL] / on_sm.index).max())
    axis.set_xlabel("blocks of 128 keys")
    axis.set_ylabel("µs per block")
display(chart)

# %% tags=["remove-input"]
shown = ladders[ladders["workload"].isin(list(BLOCKS)) & (ladders["scope"] == "kernel")]
shown = shown[shown["impl"].isin(on_sm.columns)]
figures.save_csv(shown, "v5-blocks")
figures.provenance(shown, csv="v5-blocks", data_dir=Path(data_dir))

# %% [markdown]
# A block takes {glue:text}`v5_block_v5:.2f` µs instead of {glue:text}`v5_block_v4:.2f`, and the
# ends of a tile {glue:text}`v5_ends_v5:.1f` instead of {glue:text}`v5_ends_v4:.1f`. On half-full
# batches v5 pays for its form: the products before and after the loop need at least one block, so a
# tile without rows gets one, fetches K and V for it, and multiplies zeros. Charged to the empty
# tiles, that makes {glue:text}`v5_empty_v5_min:.1f` to {glue:text}`v5_empty_v5_max:.1f` µs of an SM
# each, {glue:text}`v5_empty_v4_min:.1f` to {glue:text}`v5_empty_v4_max:.1f` in v4 (from the
# half-dense batches with 512 and 1,024 tokens).
#
# ## The surprise: waits that nobody wrote
#
# The emulator runs the source, and the source overlaps. This is the loop in the compiler's own
# intermediate form, after its passes; products, waits and activations only:


# %% tags=["remove-cell"]
def steps(module) -> list[str]:
    """Products, waits and activations in the loop of the first math role, in Triton's GPU IR."""
    text = built_for_hopper(module, module.Config()).asm["ttgir"]
    text = text[text.index("partition0(") :]
    text = text[re.search(r"scf\.(for|while) ", text).start() :]
    found = []
    for line in text.splitlines():
        if "ttng.warp_group_dot_wait" in line:
            found.append("wait " + re.search(r"pendings = (\d+)", line)[1])
        elif "ttng.warp_group_dot" in line:
            found.append("S" if re.search(r": !ttg\.memdesc<.* \* ", line) else "P V")
        elif "tanh.approx" in line:
            found.append("activation")
        elif "scf.yield" in line:
            return found
    raise ValueError("the loop must end with a yield, got none")


def loops(cubin: bytes) -> list[list[str]]:
    """The instructions between a label of the machine code and a branch back to it."""
    labels, instructions, bodies = {}, [], []
    for line in compile_check.disassemble(cubin).splitlines():
        if label := re.match(r"\.(L_x_\d+):", line.strip()):
            labels[label[1]] = len(instructions)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(instruction[1])
            back = re.search(r"BRA.*?(L_x_\d+)", instruction[1])
            if back and back[1] in labels:
                bodies.append(instructions[labels[back[1]] :])
    return bodies


def loop_of(module, turns: bool = False) -> list[str]:
    """The instructions of a math role's loop, blocks of 128 keys."""
    cubin = built_for_hopper(module, module.Config(turns=turns)).asm["cubin"]
    products = (HEAD_DIM + KEYS) // 16  # instructions of S and of P V
    return min(
        (body for body in loops(cubin) if sum("HGMMA" in i for i in body) == products), key=len
    )


def machine_steps(body: list[str]) -> list[tuple[str, int]]:
    """Products, waits and activations of these instructions, runs counted."""
    found: list[tuple[str, int]] = []
    name = "S"
    for instruction in body:
        if "HGMMA" in instruction:
            step = name
            if "gsb0" in instruction:  # the last of a product
                name = "P V" if name == "S" else "S"
        elif "WARPGROUP.DEPBAR" in instruction:
            step = f"wait {int(re.search(r'0x(.)', instruction)[1], 16)}"
        elif "MUFU.TANH" in instruction:
            step = "tanh"
        elif "BAR.ARV" in instruction:
            step = "pass turn"
        else:
            continue
        if found and found[-1][0] == step:
            found[-1] = (step, found[-1][1] + 1)
        else:
            found.append((step, 1))
    return found


def beside(order: list[tuple[str, int]]) -> int:
    """How many tanh stand between the first instruction of P V and the wait that completes it."""
    start = next(place for place, (step, _) in enumerate(order) if step == "P V")
    count = 0
    for step, times in order[start:]:
        if step == "wait 0":
            return count
        count += times if step == "tanh" else 0
    return count


as_is = changed(v5_pingpong, (FOR, FOR.replace("blocks)", "blocks, num_stages=0)")))
LOOPS = {"for loop": v5_pingpong, "while loop": as_while, "num_stages=0": as_is}
written = ["S", "P V", "wait 1", "activation", "wait 0"]
orders = {"source": written, **{name: steps(module) for name, module in LOOPS.items()}}
added = len(orders["for loop"]) - len(written)
assert orders["while loop"] == written, "the text says that a while loop stays as written"
assert orders["num_stages=0"] == written, "the text says the same of this loop"
assert orders["for loop"][:3] == ["S", "wait 0", "P V"], "the text says that S is awaited first"
assert added == orders["for loop"].count("wait 0") - 1 > 0
bodies = {name: loop_of(module) for name, module in LOOPS.items()}
bodies["for loop, turns"] = loop_of(v5_pingpong, turns=True)
codes = {name: machine_steps(body) for name, body in bodies.items()}
tanh = {sum(times for step, times in order if step == "tanh") for order in codes.values()}
assert tanh == {64}, "a thread evaluates 64 scores in each block"
hidden = {name: beside(order) for name, order in codes.items()}
assert hidden["for loop"] > 48 > 24 > hidden["while loop"], "the text compares them"
in_turn = [step for step, _ in codes["for loop, turns"]]
assert "tanh" not in in_turn[in_turn.index("pass turn") :], "the text says: within the turn"
through = {name: sum(bool(re.search(r"\b(STS|LDS)\b", i)) for i in body)
           for name, body in bodies.items()}  # fmt: skip
assert through["while loop"] >= 64 and not through["for loop"] and not through["num_stages=0"]
carried = built_for_hopper(as_while, Config()).asm["ttgir"]
carried = carried[carried.index("scf.while", carried.index("partition0(")) :]
carried = carried[: carried.index("scf.yield")]
assert re.search(r"convert_layout %acc\S* : tensor<64x128xf32", carried), "the accumulator moves"
tidy = compiled(as_is, Config())
assert tidy.spill_bytes == 0 and not tidy.serialised, "the text compares the loops"
glue("through_while", through["while loop"])
glue("longer_while", 100 * (len(bodies["while loop"]) / len(bodies["for loop"]) - 1))
glue("beside_as_is", hidden["num_stages=0"])
glue("added", added)
glue("tanh", max(tanh))
glue("beside_for", hidden["for loop"])
glue("beside_while", hidden["while loop"])

# %% tags=["remove-input"]
width = max(map(len, orders))
code("\n".join(f"{name:{width}}   {'  |  '.join(order)}" for name, order in orders.items()), "text")

# %% tags=["remove-input"]
figures.source("modelled", f"Triton's GPU IR of one math role, triton {triton.__version__}")

# %% [markdown]
# In the `for` loop a `wait 0` stands behind each product: everything must be complete before the
# role goes on. The wait for at most one, which the source asks for, comes when nothing is in flight
# any more. By this order nothing overlaps inside a role. The waits come from a pass that makes
# products of `for` loops asynchronous. It does not ask who wrote them, and puts a wait behind each
# that it cannot prove safe {cite}`fbtriton`. It leaves `while` loops alone, and `for` loops that
# say `num_stages=0`: the same statements there come out as written.
#
# So these two should be faster. But this is not the machine code yet:

# %% tags=["remove-input"]
lines = []
for name, order in codes.items():
    words = " | ".join(f"{step} x{n}" if n > 1 else step for step, n in order)
    lines += textwrap.wrap(f"{name}: {words}", 86, subsequent_indent="    ", break_on_hyphens=False)
code("\n".join(lines), "text")

# %% tags=["remove-input"]
figures.source(
    "modelled",
    f"machine code of one math role for sm_90a, triton {triton.__version__}: HGMMA instructions of "
    "S and P V, MUFU.TANH, and waits, in order; x8: eight in a row",
)

# %% [markdown]
# ptxas has moved things again. In the `for` loop S is complete when P V begins, so the activation
# depends on nothing that is in flight, and ptxas deals it out between the eight instructions of
# P V: {glue:text}`v5_beside_for:.0f` of the {glue:text}`v5_tanh:.0f` `tanh` of a thread stand
# there. The overlap that the source asks for is back, made by a scheduler that knows nothing of it;
# what it cannot give back is the time in which the role waits for S and has nothing else in flight.
# In the loops without the waits all products are issued first, as written; and then ptxas moves the
# last wait up, before most of the activation. {glue:text}`v5_beside_while:.0f` and
# {glue:text}`v5_beside_as_is:.0f` `tanh` are left beside P V.
#
# The `while` loop pays for something else besides. The compiler does not find it a good layout of
# its accumulator, and converts the accumulator before and after each P V: through shared memory,
# with {glue:text}`v5_through_while:.0f` loads and stores in each thread, and
# {glue:text}`v5_longer_while:.0f` % more instructions in a block. The fourth prediction was made
# from the place of the `tanh` and from additional barriers; these copies, of which the barriers are
# a part, were seen only after the measurement. They are reason enough for a slower loop, so its
# time says little about the waits.
#
# The last line tells what became of the turns. The source passes the turn as soon as both products
# are issued; in the machine code the role first waits for both, and its whole activation lies
# within its turn. Two roles with such turns run one after the other.

# %% tags=["remove-cell"]
everything, newest = measured()
if "14" not in newest:
    raise LookupError(f"{data_dir}/records must hold a record of this chapter, got none")
own = everything[(everything["record"] == newest["14"]) & (everything["scope"] == "kernel")]
p50, p20, p80 = (
    own.pivot_table(index="variant", columns="workload", values=f"time_us_{q}", sort=False)
    for q in ("p50", "p20", "p80")
)
assert set(MEASURED) <= set(p50.columns), "the record lacks a workload"
assert p50.loc["v4"].notna().all() and p50.loc["128 keys"].notna().all()
failed = own[own["failure"] != ""]
to_v4 = p50.div(p50.loc["v4"], axis=1)[list(MEASURED)]
LISTED = [
    "v4", "128 keys", "128 keys, turns", "64 keys, 4 stages", "64 keys, 4 stages, turns",
    "128 keys, while loop", "128 keys, while loop, turns", "64 keys, 4 stages, while loop",
]  # fmt: skip
assert set(LISTED) == {"v4", *VARIANTS}
ORDER = [case for case in LISTED if case in p50.index]
MARKS = dict(zip(MEASURED, "os^", strict=True))

# %% tags=["remove-input"]
# | name: fig-v5-variants
# | caption: >
# |   Time of the variants of v5 divided by the time of v4; less is better. Error bars: p20 to p80.
# | alt: >
# |   A dot plot with a row for v4 and for each variant of v5, three marks a row, one for each
# |   workload. The line at 1 is v4. What the rows show is said in the text below.
with figures.style():
    chart, axis = figures.subplots(width=7.6, height=4.4)
    axis.axvline(1, color=figures.colour(BEFORE), linewidth=1.2)
    for shift, (name, mark) in zip((-0.2, 0.0, 0.2), MARKS.items(), strict=True):
        base = p50.loc["v4", name]
        some = to_v4.loc[ORDER, name]
        axis.errorbar(
            some,
            [place + shift for place in range(len(ORDER))],
            xerr=[some - p20.loc[ORDER, name] / base, p80.loc[ORDER, name] / base - some],
            fmt=mark, color=figures.colour(IMPL), markersize=6, elinewidth=1, linestyle="none",
            label=name, markerfacecolor="none" if mark == "s" else None,
        )  # fmt: skip
    axis.set_yticks(range(len(ORDER)), ORDER)
    axis.set_ylim(len(ORDER) - 0.4, -0.6)
    axis.grid(visible=False, axis="y")
    axis.grid(visible=True, axis="x")
    axis.tick_params(axis="y", length=0)
    axis.set_xlabel("time / time of v4")
    axis.legend(loc="upper center", bbox_to_anchor=(0.4, -0.14), ncols=3, fontsize=8.5)
display(chart)

# %% tags=["remove-input"]
figures.save_csv(own, "v5-variants")
figures.provenance(own, csv="v5-variants", data_dir=Path(data_dir))

# %% tags=["remove-input"]
if len(failed):
    display(figures.show_table(failed[["workload", "impl", "variant", "failure"]]))


# %% tags=["remove-cell"]
def compare(case: str, base: str) -> pd.Series:
    """Time of one case over the time of another on the measured workloads, failures left out."""
    missing = [name for name in (case, base) if name not in to_v4.index]
    values = (to_v4.reindex([case]).loc[case] / to_v4.reindex([base]).loc[base]).dropna()
    if missing or values.empty:
        raise LookupError(f"the record must hold times of {case!r} and {base!r}, got failures only")
    return values


def spread(values: pd.Series, digits: int = 2) -> str:
    """'a to b' of ratios."""
    return f"{values.min():.{digits}f} to {values.max():.{digits}f}"


LONG = [name for name in MEASURED if "self" in name]  # 512 keys and more
turns, loop = compare("128 keys, turns", "128 keys"), compare("128 keys, while loop", "128 keys")
turned = compare("128 keys, while loop, turns", "128 keys, while loop")
glue_word("turns", spread(turns, 3))
glue_word("turns_while", spread(turned, 3))
glue_word("loop", spread(loop))
glue_word("while_range", spread(compare("128 keys, while loop", "v4")))
glue_word("narrow", spread(compare("64 keys, 4 stages", "128 keys")))
glue_word("narrow_while", spread(compare("64 keys, 4 stages, while loop", "128 keys, while loop")))
for name, values in (("kept_2", turns), ("kept_2_while", turned)):
    held = values.reindex(LONG).dropna()
    glue_word(name, "kept" if len(held) and held.max() < 0.97 else "broken")
best = to_v4.loc[[case for case in ORDER if case != "v4"]].idxmin()
if best.nunique() == 1:
    glue_word("best", f"{best.iloc[0]}, on all three")
else:
    glue_word("best", "; ".join(f"{name}: {case}" for name, case in best.items()))
glue_word("kept_4", "kept" if loop.min() > 0.97 else "broken")
if loop.min() > 1.03:
    verdict = "It is slower on all three."
elif loop.max() < 0.97:
    verdict = "It is faster on all three, whatever the order of its instructions suggests."
else:
    verdict = "The two are not apart on all three."
glue_word("verdict", verdict)
later = kernel_us["v8_own_waits"] / kernel_us["v7_packed"]
glue("later_min", later.min())
glue("later_max", later.max())
glue("later_full", later[FULL[2048]])

# %% [markdown]
# Measured on the three workloads, smallest and largest ratio of times:
#
# - the while loop against the for loop: {glue:text}`v5_loop`. {glue:text}`v5_verdict` The fourth
#   prediction is {glue:text}`v5_kept_4`.
# - turns against no turns: {glue:text}`v5_turns` in the for loop, {glue:text}`v5_turns_while` in
#   the while loop. The second prediction is {glue:text}`v5_kept_2` for the rung as it is, and
#   {glue:text}`v5_kept_2_while` for the while loop.
# - blocks of 64 keys in four stages against 128 in two: {glue:text}`v5_narrow` in the for loop,
#   {glue:text}`v5_narrow_while` in the while loop.
#
# The smallest median: {glue:text}`v5_best`. The while loop takes {glue:text}`v5_while_range` times
# the time of v4.
#
# A `while` loop trades the waits for copies of its accumulator, so it does not tell what the waits
# cost. `num_stages=0` tells, since nothing else changes. It was found only after these variants
# were chosen, and is a rung of its own, {doc}`v8_own_waits`, on top of those between. There it
# takes {glue:text}`v5_later_min:.2f` to {glue:text}`v5_later_max:.2f` times the time of its
# predecessor over all forward workloads, {glue:text}`v5_later_full:.2f` times on
# gdpa-self-full-2048 (record of the ladder above).
#
# ## Exercises
#
# :::{exercise} Which one is waited for?
# :label: ex-v5-wait
#
# In the loop, replace `async_dot_wait(1, s)` by `async_dot_wait(0, s)`, and then by
# `async_dot_wait(2, s)`. What does each do to the result and to the time? Predict, then ask the
# emulator. *(paper, then one digit)*
# :::

# %% tags=["remove-cell"]
ASK = "tlx.async_dot_wait(1, s)"
strict = traced(
    changed(v5_pingpong, ONE_ROLE, (ASK, ASK.replace("1", "0"))),
    one_tile(64, 2048),
    Config(**SMALL),
)
inside = overlap(strict)
assert inside["beside"] == 0, "the answer says that nothing overlaps"
glue("strict", 100 * inside["busy"] / inside["span"])
loose = found(changed(v5_pingpong, (ASK, ASK.replace("1", "2"))), Config(), "modelled")
assert type(loose).__name__ == "InvalidKernel"
glue_word("loose", shorten(loose.args[0]))

# %% [markdown]
# :::{solution} ex-v5-wait
# :class: dropdown
#
# With 0 both products must be complete before the activation begins. The result is right and the
# overlap is gone: a role alone keeps the tensor core {glue:text}`v5_strict:.0f` % busy, as in v4.
# With 2 nothing is waited for, and the activation reads scores that do not exist yet; the emulator
# says "{glue:text}`v5_loose`".
# :::
#
# :::{exercise} Registers of the other loop
# :label: ex-v5-registers
#
# How few registers can a math role have in the while loop before it spills? Is it as many as in the
# for loop? *(`compile_check`, ten minutes)*
# :::

# %% tags=["remove-cell"]
least_while = min(
    registers
    for registers in (224, 216, 208, 200)
    if (made := compiled(as_while, Config(registers=registers))).spill_bytes == 0
    and not made.serialised
)
glue("least_while", least_while)

# %% [markdown]
# :::{solution} ex-v5-registers
# :class: dropdown
#
# {glue:text}`v5_least_while:.0f`, in the for loop {glue:text}`v5_enough:.0f` (in steps of 8, the
# unit of `setmaxnreg`). What must be alive at the same time hardly depends on the waits: the source
# fixes it, by asking for the next scores before the old probabilities are used up.
# :::
#
# :::{exercise} The other order
# :label: ex-v5-order
#
# Issue P V before S and wait for both, `async_dot_wait(0, ...)`. What can still overlap inside a
# role? What is gained instead? *(emulator, half an hour)*
# :::

# %% tags=["remove-cell"]
reversed_order = traced(
    changed(
        v5_pingpong, ONE_ROLE, (S_FIRST + PV_NEXT, PV_NEXT + S_FIRST), (ASK, ASK.replace("1", "0"))
    ),
    one_tile(64, 2048),
    Config(**SMALL),
)
inside = overlap(reversed_order)
assert inside["beside"] == 0, "the answer says that nothing overlaps"
glue("reversed", 100 * inside["busy"] / inside["span"])

# %% [markdown]
# :::{solution} ex-v5-order
# :class: dropdown
#
# Nothing: both products are complete before the activation begins, {glue:text}`v5_reversed:.0f` %
# busy for a role alone. What is gained is one long piece of tensor work instead of two short ones,
# and V is free earlier. Two roles that take turns could then alternate: one multiplies for as long
# as the other evaluates.
# :::
#
# ## Takeaways
#
# - To overlap two dependent steps, take them from different blocks. The price is registers: both
#   blocks are alive.
# - Source, intermediate form and machine code can tell three stories. Overlap is decided in the
#   last: count what stands between the first instruction of a product and the wait for it, and
#   what a change of the loop brings in besides.
# - A form that needs at least one block makes every empty tile pay for one.
