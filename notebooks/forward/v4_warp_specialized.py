# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # v4: roles for warps
#
# What does a kernel gain when the warps that compute no longer ask for their data?
#
# :::{admonition} In this chapter
# - One role copies, two compute, and the barriers between them are ours. Forget one arrival and the
#   kernel hangs; arrive too early and it races. The emulator shows both on a laptop.
# - A block of 128 keys takes {glue:text}`v4_block_v4:.2f` µs of an SM, {glue:text}`v4_block_v2:.2f`
#   in v2. But a tile takes {glue:text}`v4_ends_v4:.1f` µs besides, {glue:text}`v4_ends_v2:.1f` in
#   v2: a program that fills an SM has nobody to cover its beginning and its end. With 256 keys v4
#   takes {glue:text}`v4_ratio_256:.2f` times the time of v2, with 1,024
#   {glue:text}`v4_ratio_1024:.2f`.
# - The math roles ask for 240 registers each. They need {glue:text}`v4_enough:.0f`, which they had.
# :::

# %% tags=["remove-cell"]
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
from gdpa_kernels.gdpa import activations, reference, v2_tma, v4_warp_specialized
from gdpa_kernels.gdpa.v4_warp_specialized import Config
from gdpa_kernels.measuring import compile_check, record, system, testing
from gdpa_kernels.measuring.inputs import cu_seqlens
from gdpa_kernels.measuring.workload import workload
from gdpa_kernels.report import figures, results
from gdpa_kernels.report.house import INK
from gdpa_kernels.report.studies import changed

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
HEAD_DIM, ROWS, KEYS = 128, 128, 128
IMPL = "v4_warp_specialized"
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
    figures.glue_number(f"v4_{name}", value)


def glue_word(name: str, value: str) -> None:
    figures.glue_text(f"v4_{name}", value)


def code(text: str, language: str = "python") -> Markdown:
    return Markdown(f"```{language}\n{text.rstrip()}\n```")


def docstring_tables(module) -> list[str]:
    """The Markdown tables of a module's docstring: roles, barriers."""
    return re.findall(r"(?:^\|.*\n)+", inspect.getdoc(module) + "\n", flags=re.MULTILINE)


# %% [markdown]
# ## What stays, what changes
#
# | | {doc}`v2 <v2_tma>` | v4 |
# |:--|:--|:--|
# | work split | four or eight warps own 128 rows | two roles of four warps own 64 rows each |
# | data path | TMA, asked for by a thread of those warps | TMA, asked for by a role of its own |
# | synchronisation | barriers made by the compiler | five arrays of barriers, made by us |
# | programs on an SM | two | one |
#
# The predecessor is v2, not {doc}`v3 <v3_persistent>`: the list of tiles comes back later. Up to
# here all warps of a program ran the same code, and the compiler decided when to copy. Now the
# program is split with `tlx.async_tasks` {cite}`guan2026tlx`: each task is a stream of
# instructions of its own, with its own warps and its own number of registers. What one role writes
# and another reads has to be handed over explicitly.
#
# ## Prediction
#
# What one block of 128 keys asks of an SM, for the 128 rows of a tile:

# %% tags=["remove-cell"]
TENSOR, FP32, MUFU = 4096, 128, 16
fp32, mufu = activations.INSTRUCTIONS["gelu_tanh"]
elements = ROWS * KEYS
cycles = {
    "tensor": 4 * elements * HEAD_DIM / TENSOR,
    "mufu": mufu * elements / MUFU,
    "issue": (fp32 + mufu + 0.5) * elements / FP32,
}
block_bytes = 2 * KEYS * HEAD_DIM * 2
alone = cycles["tensor"] + cycles["mufu"]
for name in ("tensor", "mufu"):
    glue(f"{name}_cycles", cycles[name])
glue("block_bytes", block_bytes)
glue("worst_share", 100 * cycles["tensor"] / alone)

# %% tags=["remove-input"]
figures.show_table(
    pd.DataFrame(
        [
            ("matrix products", f"4 x 128 x 128 x 128 FLOPs / {TENSOR:,}", cycles["tensor"]),
            ("MUFU", f"{mufu} x 128 x 128 / {MUFU}", cycles["mufu"]),
            (
                "issue slots of the activation",
                f"({fp32} FP32 + {mufu} MUFU + 1/2 conversion) x 128 x 128 / {FP32}",
                cycles["issue"],
            ),
        ],
        columns=["what", "count / rate of an SM", "cycles"],
    )
)

# %% tags=["remove-input"]
figures.source(
    "modelled",
    "counts of gdpa_kernels/gdpa/activations.py for gelu_tanh; rates of a Hopper SM per cycle",
)

# %% [markdown]
# Besides, TMA brings {glue:text}`v4_block_bytes:,.0f` bytes of K and V, as much per row and key as
# in v2.
#
# *What can overlap, and what cannot.* Copies overlap with everything: they did in v2, and here they
# also start without waiting for a warp that is busy. Inside a math role nothing changes: product,
# activation, product, each waits for the one before. Only between the two roles can a product run
# beside an activation, and nothing makes them do so. If both are always in step, a block takes
# {glue:text}`v4_tensor_cycles:,.0f` + {glue:text}`v4_mufu_cycles:,.0f` cycles,
# {glue:text}`v4_worst_share:.0f` % of the peak; if one always multiplies while the other evaluates,
# {glue:text}`v4_tensor_cycles:,.0f`. For the two programs of v2 on an SM the same bracket holds. So
# counting gives no reason to expect more than from v2, and one to expect less: when a program of v2
# begins or ends, its neighbour has the SM; a program of v4 is alone there.
#
# Predictions (2026-11-21):
#
# 1. From 1,024 keys on, v4 takes the time of v2 within 10 %. A larger difference, either way,
#    would mean that who asks for copies matters by itself.
# 2. With 256 keys, self or cross, v4 is slower than v2. If it is not, something hides its ends.
# 3. The scores of a role are 64 x 128 values, 64 registers in each of its 128 threads; the
#    accumulator takes 64 more and the probabilities, in bf16, 32: {glue:text}`v4_needed:.0f` in
#    all. 384 threads share 65,536 registers, so each may have {glue:text}`v4_even:.0f` without
#    asking anybody. `setmaxnreg`, the instruction that moves registers between roles, should buy
#    nothing here. If the variant with {glue:text}`v4_even:.0f` registers is more than 5 % slower,
#    the count forgot something.
#
# Prototypes had shown the first two before they were written down; the third was written before its
# variants were measured.

# %% tags=["remove-cell"]
needed = 64 * KEYS // 128 + 64 * HEAD_DIM // 128 + 64 * KEYS // 128 // 2
even = 65536 // 384 // 8 * 8
assert (needed, even) == (160, 168)
glue("needed", needed)
glue("even", even)

# %% [markdown]
# ## What changed in the code
#
# The loop of a math role. `barrier_wait` on a full barrier replaces the load; an arrival on an
# empty one says that the buffer may be filled again.

# %% tags=["remove-input"]
body = inspect.getsource(v4_warp_specialized.math.fn)
code(textwrap.dedent(body[body.index("    acc = tl.zeros") :]))

# %% tags=["remove-input"]
body = inspect.getsource(v4_warp_specialized.load.fn)
code(textwrap.dedent(body[body.index("    for block in") :]))

# %% [markdown]
# `load` waits with the other parity, `phase ^ 1`, which a fresh barrier lets pass: the buffers are
# empty at first and nobody has to say so ({doc}`../tools/emulator`). Roles and barriers, from the
# head of the file:

# %% tags=["remove-input"]
Markdown("\n".join(docstring_tables(v4_warp_specialized)))

# %% tags=["remove-input"]
Markdown(
    "\n".join(
        (
            "````{admonition} The whole difference between v2_tma.py and v4_warp_specialized.py",
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
# One tile of 128 rows and 512 keys, four blocks, in the emulator:


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


def spans(timeline: emulator.Timeline) -> dict[str, float]:
    """Modelled cycles: until the first product, of products, until the end."""
    products = [event for event in timeline.events if event.kind == "mma"]
    return {
        "first": min(event.start for event in products),
        "last": max(event.end for event in products),
        "busy": sum(event.end - event.start for event in products),
        "end": max(event.end for event in timeline.events),
    }


timeline = traced(v4_warp_specialized, one_tile(128, 512), Config())
long, brief = spans(timeline), spans(traced(v4_warp_specialized, one_tile(128, 256), Config()))
assert timeline.lanes() == ["load", "math[0]", "math[1]", "TMA", "tensor core"]
assert long["busy"] / (long["last"] - long["first"]) > 0.9, "the text says: almost always busy"
glue("first_product", long["first"])
glue("inside_busy", 100 * long["busy"] / (long["last"] - long["first"]))
glue("ends_256", 100 * (1 - brief["busy"] / brief["end"]))
glue("ends_512", 100 * (1 - long["busy"] / long["end"]))

# %% tags=["remove-input"]
# | name: fig-v4-timeline
# | caption: >
# |   v4 on one tile of 128 rows and 512 keys. Roles above, engines below; an arrow leads from the
# |   arrival that completed a phase to the wait that it ended. Modelled cycles.
# | alt: >
# |   Five lanes. load asks for Q and for two blocks of K and V and then waits. TMA copies. math[0]
# |   waits for Q and K, then waits for a product, evaluates the activation, waits for a product,
# |   and so on; math[1] does the same about five hundred cycles later. The tensor core begins late
# |   and then has almost no gap.
display(SVG(timeline.svg(width=760)))

# %% tags=["remove-input"]
figures.source(
    "emulated", "gdpa_kernels/gdpa/v4_warp_specialized.py, modelled schedule; cycles are modelled"
)

# %% [markdown]
# The first product begins after {glue:text}`v4_first_product:,.0f` cycles; from then on the tensor
# core is busy for {glue:text}`v4_inside_busy:.0f` % of them. In the model it serves one product
# after the other, so the second role starts half a block late and stays there: one evaluates while
# the other multiplies. That is the luck that the prediction speaks of, and a model that has no
# noise has it always. Look at one role alone: between its two products there is its activation,
# each time.
#
# The beginning and the end of this tile, when no product runs, are {glue:text}`v4_ends_512:.0f` %
# of its time, and {glue:text}`v4_ends_256:.0f` % of that of a tile with 256 keys. In v2 a second
# program would fill them.
#
# ## Two ways to get it wrong
#
# One line of the loop forgotten, `tlx.barrier_arrive(k.empty[stage])`, and one moved up by a line,
# before the wait for the product that reads the buffer:

# %% tags=["remove-cell"]
WAIT = "        s = tlx.async_dot_wait(0, s)\n"
ARRIVE = "        tlx.barrier_arrive(k.empty[stage])\n"
MISTAKES = {
    "forgotten": changed(v4_warp_specialized, (WAIT + ARRIVE, WAIT)),
    "too early": changed(v4_warp_specialized, (WAIT + ARRIVE, ARRIVE + WAIT)),
}
SCHEDULES = ("modelled", 0, 1, 2)


def shorten(text: str) -> str:
    """Paths of files as the names of these files."""
    return re.sub(r"/\S*/(?=[\w-]+\.py:\d)", "", text)


def found(module, schedule) -> emulator.EmulatorError | None:
    """What the emulator says about a launch."""
    try:
        with emulator.enabled(schedule=schedule, max_steps=100_000):
            module.forward(**one_tile(128, 512), config=Config())
    except emulator.EmulatorError as error:
        return error
    return None


reports = {name: [found(module, s) for s in SCHEDULES] for name, module in MISTAKES.items()}
assert {type(e).__name__ for e in reports["forgotten"]} == {"Deadlock"}
assert {type(e).__name__ for e in reports["too early"]} == {"Race"}
with emulator.enabled(races=False):
    unchanged = v4_warp_specialized.forward(**one_tile(128, 512))
    lucky = MISTAKES["too early"].forward(**one_tile(128, 512))
assert torch.equal(lucky, unchanged), "the text says that the result is right"
glue("schedules", len(SCHEDULES))

# %% tags=["remove-input"]
lines = []
for name, errors in reports.items():
    lines.append(f"{name}: {type(errors[0]).__name__}")
    lines += ["  " + line for line in re.split(r"\n|; ", shorten(str(errors[0])))]
code("\n".join(lines), "text")

# %% tags=["remove-input"]
figures.source("emulated", "v4_warp_specialized.py with one line changed, modelled schedule")

# %% [markdown]
# Without the arrival all three roles wait, and the report says for what: `load` for 256 threads
# that never say that K is free, the math roles for a copy that `load` therefore never asks for. It
# takes a third block to see it, since there are two buffers; a test with 256 keys would pass. With
# the arrival moved up, TMA may overwrite K while a product reads it. With the search for races
# switched off the result is right to the last bit: in the model the data have been read by then.
# The emulator reports both under each of the {glue:text}`v4_schedules:.0f` schedules tried.
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
    out = v4_warp_specialized.forward(**call)
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

# %% [markdown]
# On the GPU, gdpa-self-full-1024: largest error {glue:text}`v4_error:.2f`, allowed
# {glue:text}`v4_budget:.2f`, over {glue:text}`v4_elements:.0f` million elements (measured).
#
# ## What the compiler made of it

# %% tags=["remove-cell"]
SHOWN = ("HGMMA", "UTMALDG", "UTMASTG", "SYNCS", "BAR", "USETMAXREG", "MUFU")


def row_of(impl: str, label: str, config) -> dict:
    """What `compile_check` says about one rung with one config."""
    made = compile_check.compile_rung(impl, config=config)
    return {
        "kernel": label, "registers": made.registers, "spilled": made.spill_bytes,
        "serialised": "yes" if made.serialised else "no",
        "shared": made.shared_bytes, **{name: made.instructions[name] for name in SHOWN},
    }  # fmt: skip


built = pd.DataFrame(
    [
        row_of("v2_tma", "v2, 128x64, 4 warps", v2_tma.Config()),
        row_of("v2_tma", "v2, 128x128, 4 warps", v2_tma.Config(BLOCK_N=128)),
        row_of(IMPL, "v4", Config()),
    ]
)
asked = pd.DataFrame(
    row_of(IMPL, f"{registers}", Config(registers=registers))
    for registers in (240, 208, 168, 160, 152)
)
ours, wide = built.set_index("kernel").loc["v4"], built.iloc[1]
assert ours["spilled"] == 0 and ours["serialised"] == "no" and ours["USETMAXREG"] > 0
assert wide["spilled"] > 0, "the text says that one warp group cannot hold 128 x 128 scores"
fits = asked[(asked["spilled"] == 0) & (asked["serialised"] == "no")]
enough = fits["kernel"].astype(int).min()
least = asked[asked["kernel"] == "152"].iloc[0]
assert enough <= even, "the text says that an even share is enough"
assert least["spilled"] > 0 and least["serialised"] == "yes"
glue("enough", enough)
glue("launch_registers", ours["registers"])
glue("all_registers", ours["registers"] * 384)
glue("shared", ours["shared"])
glue("wide_spilled", wide["spilled"])
glue("least_spilled", least["spilled"])

# %% tags=["remove-input"]
figures.show_table(built)

# %% tags=["remove-input"]
figures.source(
    "modelled",
    f"compiled for sm_90a by triton {triton.__version__} when this page was built, and counted. "
    "registers: per thread at the launch; spilled: bytes; serialised: ptxas makes products wait "
    "for each other; HGMMA: matrix product, UTMALDG and UTMASTG: TMA load and store, SYNCS: "
    "barrier in shared memory, BAR: barrier of warps, USETMAXREG: registers given or taken",
)

# %% [markdown]
# 384 threads with {glue:text}`v4_launch_registers:.0f` registers take
# {glue:text}`v4_all_registers:,.0f` of the 65,536, and the buffers {glue:text}`v4_shared:,.0f`
# bytes: one program on an SM, whatever the stages. One warp group with all 128 rows has no room for
# 128 keys: v2 spills {glue:text}`v4_wide_spilled:.0f` bytes there. Two roles of 64 rows have.
#
# And `setmaxnreg`? The registers that a math role asks for, and what becomes of v4:

# %% tags=["remove-input"]
figures.show_table(
    asked.rename(columns={"kernel": "registers of a math role"})[
        ["registers of a math role", "spilled", "serialised"]
    ]
)

# %% tags=["remove-input"]
figures.source("modelled", f"compiled for sm_90a by triton {triton.__version__}")

# %% [markdown]
# {glue:text}`v4_enough:.0f` are enough, no more than an even share. With 152 the kernel spills
# {glue:text}`v4_least_spilled:,.0f` bytes and its products wait for each other. So what makes room
# for 128 keys is the split into two roles, not the registers taken from the load role. Whether the
# clock agrees is measured next.
#
# ## Measurement
#
# This cell measures variants of v4; it runs with
# `make measure NOTEBOOKS=forward/v4_warp_specialized`, on a GPU. The variant *early return* leaves
# a tile without rows before it starts its roles, by two lines put into the source.

# %% tags=["hide-input"]
EARLY = (
    "    q = tlx.local_alloc(",
    "    if first_row >= len_q:\n        return\n    q = tlx.local_alloc(",
)
VARIANTS = {
    "128 keys": Config(),
    "128 keys, 168 registers": Config(registers=168),
    "128 keys, 152 registers": Config(registers=152),
    "64 keys, 4 stages": Config(BLOCK_N=64, num_stages=4),
    "64 keys, 2 stages": Config(BLOCK_N=64, num_stages=2),
}
MEASURED = ("gdpa-self-full-512", "gdpa-self-full-2048", "gdpa-cross-full-1024")
EMPTY = "gdpa-self-half-dense-512"
if mode == "measure":
    from gdpa_kernels.measuring.session import Session

    session = Session("notebooks/forward/v4_warp_specialized.py", device)
    early = {"config": Config(), "module": changed(v4_warp_specialized, EARLY)}
    for name in MEASURED:
        listed = [(IMPL, variant, {"config": c}) for variant, c in VARIANTS.items()]
        session.measure(workload(name), [("v2_tma", "default", {}), *listed])
    listed = [(IMPL, "128 keys", {"config": Config()}), (IMPL, "early return", early)]
    session.measure(workload(EMPTY), [("v2_tma", "default", {}), *listed])
    print(session.write(data_dir))

# %% [markdown]
# First the default, beside the best peers and the earlier rungs:

# %% tags=["remove-input"]
# | name: fig-v4-ladder
# | caption: >
# |   The ladder up to v4 on gdpa-self-full-1024, forward, kernel alone.
# | alt: >
# |   Horizontal bars of TFLOP/s. v4 is next to v2, both are below cuDNN, and all are below the
# |   dashed line of the roofline.
RUNGS = ["v0_eager", "v1_tiled", "v2_tma", "v3_persistent", IMPL]
figures.figure_ladder(ladders, FULL[1024], RUNGS, IMPL)

# %% tags=["remove-input"]
shown = ladders[(ladders["workload"] == FULL[1024]) & (ladders["scope"] == "kernel")]
figures.save_csv(shown, "v4-ladder")
figures.provenance(shown, csv="v4-ladder", data_dir=Path(data_dir))

# %% tags=["remove-cell"]
COMPARED = [*FULL.values(), *CROSS.values(), *(n for n in kernel_us.index if "-half-" in n)]
PEERS = ("v2_tma", "v3_persistent", IMPL, "fa2_varlen", "cudnn")
rates = ladders[(ladders["scope"] == "kernel") & (ladders["variant"] == "")].pivot_table(
    index="workload", columns="impl", values="tflops", sort=False
)
roof = ladders[(ladders["impl"] == IMPL) & (ladders["scope"] == "kernel")].set_index("workload")
table = rates.loc[COMPARED, list(PEERS)].round(0)
table["% of roofline"] = roof.loc[COMPARED, "percent_of_roofline"].round(0)
table["time / v2"] = (kernel_us[IMPL] / kernel_us["v2_tma"]).loc[COMPARED].round(2)
ratio = kernel_us[IMPL] / kernel_us["v2_tma"]
for n in (256, 1024):
    glue(f"ratio_{n}", ratio[FULL[n]])
glue("ratio_cross_min", ratio[list(CROSS.values())].min())
glue("ratio_cross_max", ratio[list(CROSS.values())].max())
near = abs(ratio[[FULL[1024], FULL[2048]]] - 1).max()
short_loses = min(ratio[FULL[256]], ratio[list(CROSS.values())].min()) > 1
glue("near", 100 * near)
glue_word("kept_1", "kept" if near < 0.10 else "broken")
glue_word("kept_2", "kept" if short_loses else "broken")
cudnn = (kernel_us[IMPL] / kernel_us["cudnn"])[[*FULL.values(), *CROSS.values()]]
assert cudnn.min() > 1, "the text says that cuDNN is ahead"
glue("cudnn_min", cudnn.min())
glue("cudnn_max", cudnn.max())

# %% tags=["remove-input"]
figures.show_table(table.reset_index().rename(columns={IMPL: "v4", "v3_persistent": "v3"}))

# %% tags=["remove-input"]
shown = ladders[ladders["workload"].isin(COMPARED) & ladders["impl"].isin(PEERS)]
shown = shown[shown["scope"] == "kernel"]
figures.save_csv(shown, "v4-rates")
figures.provenance(shown, csv="v4-rates", data_dir=Path(data_dir))

# %% [markdown]
# TFLOP/s, each implementation with its own constants; FA2 and cuDNN compute softmax, and cuDNN does
# not take every batch.
# The first prediction is {glue:text}`v4_kept_1`: with 1,024 and 2,048 keys v4 is within
# {glue:text}`v4_near:.0f` % of v2. The second is {glue:text}`v4_kept_2`: with 256 keys v4 takes
# {glue:text}`v4_ratio_256:.2f` times the time of v2 in self-attention and
# {glue:text}`v4_ratio_cross_min:.2f` to {glue:text}`v4_ratio_cross_max:.2f` times in
# cross-attention. cuDNN is ahead everywhere that it runs: v4 takes {glue:text}`v4_cudnn_min:.2f` to
# {glue:text}`v4_cudnn_max:.2f` times its time.
#
# ### What a block costs, and what a tile costs besides
#
# On the full self-attention batches the tiles are alike, with 2, 4, 8 or 16 blocks of 128 keys.
# The time of a launch, times the SMs, over the tiles, is the time that a tile has an SM for itself:

# %% tags=["remove-cell"]
BLOCKS = {name: n // KEYS for n, name in FULL.items()}


def tiles(name: str) -> int:
    work = workload(name)
    return work.batch * work.num_heads_q * -(-work.max_seqlen_q // ROWS)


on_sm = pd.DataFrame(
    {
        impl: [kernel_us.loc[name, impl] * machine.num_sms / tiles(name) for name in BLOCKS]
        for impl in ("v2_tma", IMPL, "cudnn")
    },
    index=list(BLOCKS.values()),
)
block = (on_sm.loc[4] - on_sm.loc[2]) / 2
besides = on_sm.loc[2] - 2 * block
ideal = 4 * elements * HEAD_DIM * machine.num_sms / (ceilings.tflops * 1e6)
for label, impl in (("v2", "v2_tma"), ("v4", IMPL), ("cudnn", "cudnn")):
    glue(f"block_{label}", block[impl])
    glue(f"ends_{label}", besides[impl])
later = (on_sm.loc[16] - on_sm.loc[8]) / 8
glue("later_v2", later["v2_tma"])
glue("later_v4", later[IMPL])
line = (besides + 16 * block)[IMPL] / (besides + 16 * block)["v2_tma"]
assert later[IMPL] > 1.05 * block[IMPL], "the text says that the line of v4 is not straight"
glue("line", line)
glue("ratio_2048", ratio[FULL[2048]])
glue_word(
    "line_word",
    "That is as the line says."
    if ratio[FULL[2048]] < line + 0.015
    else "The gain with many keys is smaller than that."
    if ratio[FULL[2048]] < 0.985
    else "There is no such gain.",
)
assert besides[IMPL] > 1.2 * besides["v2_tma"], "the text says that the ends cost more"
glue("ideal", ideal)
glue_word("block_word", "less" if block[IMPL] < block["v2_tma"] else "no less")
glue("fabric", block_bytes * machine.num_sms / block[IMPL] / 1e6)

# %% tags=["remove-input"]
# | name: fig-v4-blocks
# | caption: >
# |   Time of a tile on its SM, per block of 128 keys, on gdpa-self-full-256 to 2048. Dashed: a
# |   block at the rate of the measured matrix product.
# | alt: >
# |   Three lines over 2, 4, 8 and 16 blocks, all above the dashed line. They fall up to 8 blocks
# |   and are nearly level from there. v4 starts highest and meets v2 with more blocks; cuDNN lies
# |   lowest.
with figures.style():
    chart, axis = figures.subplots(width=6.6, height=3.9)
    axis.axhline(ideal, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
    axis.annotate("matrix product 8192", (16, ideal), xytext=(0, -12), ha="right",
                  textcoords="offset points")  # fmt: skip
    for impl, label in (("v2_tma", "v2"), (IMPL, "v4"), ("cudnn", "cuDNN")):
        per_block = on_sm[impl] / on_sm.index
        axis.plot(on_sm.index, per_block, "o-", color=figures.colour(impl), label=label,
                  linewidth=1.8 if impl != "cudnn" else 1.0)  # fmt: skip
        axis.annotate(label, (2, per_block[2]), xytext=(-8, 0), ha="right", va="center",
                      textcoords="offset points", color=figures.colour(impl))  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(on_sm.index), [str(n) for n in on_sm.index])
    axis.set_xlim(1.45, 17)
    axis.set_ylim(0, 1.1 * (on_sm[IMPL] / on_sm.index).max())
    axis.set_xlabel("blocks of 128 keys")
    axis.set_ylabel("µs per block")
display(chart)

# %% tags=["remove-input"]
shown = ladders[ladders["workload"].isin(list(BLOCKS)) & (ladders["scope"] == "kernel")]
shown = shown[shown["impl"].isin(["v2_tma", IMPL, "cudnn"])]
figures.save_csv(shown, "v4-blocks")
figures.provenance(shown, csv="v4-blocks", data_dir=Path(data_dir))

# %% [markdown]
# A line through the first two points: a block takes {glue:text}`v4_block_v4:.2f` µs in v4,
# {glue:text}`v4_block_word` than the {glue:text}`v4_block_v2:.2f` in v2
# ({glue:text}`v4_block_cudnn:.2f` in cuDNN). But each tile takes {glue:text}`v4_ends_v4:.1f` µs
# besides, in v2 {glue:text}`v4_ends_v2:.1f` (its two programs share the SM, and one covers the ends
# of the other), in cuDNN {glue:text}`v4_ends_cudnn:.1f`. With two blocks that decides. With many it
# should matter less: by these lines v4 would take {glue:text}`v4_line:.2f` times the time of v2
# with 2,048 keys. It takes {glue:text}`v4_ratio_2048:.2f` times. {glue:text}`v4_line_word` The line
# of v4 is not straight: from 1,024 to 2,048 keys a further block takes
# {glue:text}`v4_later_v4:.2f` µs ({glue:text}`v4_later_v2:.2f` in v2). A long launch runs into the
# power limit, and the roles may fall into step; the record cannot tell the two apart, since it does
# not hold the clock of each launch. (At the measured rate of the matrix product a block would take
# {glue:text}`v4_ideal:.2f` µs. In v4 the SMs together draw {glue:text}`v4_fabric:.1f` TB/s of K and
# V, most of it from L2.)
#
# ### Variants

# %% tags=["remove-cell"]
everything, newest = measured()
if "13" not in newest:
    raise LookupError(f"{data_dir}/records must hold a record of this chapter, got none")
own = everything[(everything["record"] == newest["13"]) & (everything["scope"] == "kernel")]
own = own.assign(case=own["impl"].where(own["impl"] == "v2_tma", own["variant"]))
p50, p20, p80 = (
    own.pivot_table(index="case", columns="workload", values=f"time_us_{q}", sort=False)
    for q in ("p50", "p20", "p80")
)
assert set(MEASURED) | {EMPTY} <= set(p50.columns), "the record lacks a workload"
assert p50.loc["128 keys"].notna().all() and p50.loc["v2_tma"].notna().all()
failed = own[own["failure"] != ""]
MARKS = {MEASURED[0]: "o", MEASURED[1]: "s", MEASURED[2]: "^"}
ORDER = [case for case in ("v2_tma", *VARIANTS) if case in p50.index]

# %% tags=["remove-input"]
# | name: fig-v4-variants
# | caption: >
# |   Time of the variants of v4 and of v2, divided by the time of v4 with 128 keys and 240
# |   registers; less is better. Error bars: p20 to p80.
# | alt: >
# |   A dot plot with a row for v2 and for each variant of v4, three marks a row, one for each
# |   workload. The line at 1 is v4 as it is. What the rows show is said in the text below.
with figures.style():
    chart, axis = figures.subplots(width=7.2, height=3.6)
    axis.axvline(1, color=figures.colour(IMPL), linewidth=1.2)
    for shift, (name, mark) in zip((-0.2, 0.0, 0.2), MARKS.items(), strict=True):
        base = p50.loc["128 keys", name]
        some = p50.loc[ORDER, name] / base
        axis.errorbar(
            some,
            [place + shift for place in range(len(ORDER))],
            xerr=[
                some - p20.loc[ORDER, name] / base,
                p80.loc[ORDER, name] / base - some,
            ],
            fmt=mark, color=figures.colour(IMPL), markersize=6, elinewidth=1, linestyle="none",
            label=name, markerfacecolor="none" if mark == "s" else None,
        )  # fmt: skip
    axis.set_yticks(range(len(ORDER)), ["v2" if c == "v2_tma" else c for c in ORDER])
    axis.set_ylim(len(ORDER) - 0.4, -0.6)
    axis.grid(visible=False, axis="y")
    axis.grid(visible=True, axis="x")
    axis.tick_params(axis="y", length=0)
    axis.set_xlabel("time / time of v4")
    axis.legend(loc="upper center", bbox_to_anchor=(0.4, -0.18), ncols=3, fontsize=8.5)
display(chart)

# %% tags=["remove-input"]
figures.save_csv(own.drop(columns="case"), "v4-variants")
figures.provenance(own, csv="v4-variants", data_dir=Path(data_dir))

# %% tags=["remove-input"]
if len(failed):
    display(figures.show_table(failed[["workload", "impl", "variant", "failure"]]))

# %% tags=["remove-cell"]
to_v4 = p50.div(p50.loc["128 keys"], axis=1)


def change(case: str) -> pd.Series:
    """Time of a variant over the time of v4 on the measured workloads, failures left out."""
    found = to_v4.reindex([case]).loc[case, list(MEASURED)].dropna()
    if found.empty:
        raise LookupError(f"the record must hold a time of {case!r}, got failures only")
    return found


def slower(values: pd.Series) -> str:
    """'a to b times' of ratios."""
    return f"{values.min():.2f} to {values.max():.2f}"


given, taken = change("128 keys, 168 registers"), change("128 keys, 152 registers")
narrow, shallow = change("64 keys, 4 stages"), change("64 keys, 2 stages")
glue_word("given", slower(given))
glue_word("taken", slower(taken))
glue_word("narrow", slower(narrow))
glue_word("shallow", slower(shallow))
glue_word("kept_3", "kept" if given.max() < 1.05 else "broken")
glue_word(
    "taken_word", "as the remark warns" if taken.min() > 1.05 else "less than the remark says"
)
best = to_v4.loc[[c for c in VARIANTS if c in to_v4.index], list(MEASURED)].idxmin()
if best.nunique() == 1:
    glue_word("best", f"{best.iloc[0]}, on all three")
else:
    glue_word("best", "; ".join(f"{name}: {case}" for name, case in best.items()))

# %% [markdown]
# Times of the variants over the time of v4, smallest and largest of the three workloads (measured):
#
# - 168 registers for a math role: {glue:text}`v4_given`. The third prediction is
#   {glue:text}`v4_kept_3`.
# - 152 registers, where the kernel spills: {glue:text}`v4_taken`, {glue:text}`v4_taken_word`.
# - Blocks of 64 keys in four stages, as many bytes in flight: {glue:text}`v4_narrow`. A block half
#   as long arrives sooner at the beginning of a tile, and the barriers are waited for twice as
#   often. In two stages: {glue:text}`v4_shallow`.
#
# The smallest median: {glue:text}`v4_best`. Variants that differ by less than their error bars are
# not apart.
#
# ## The surprise: empty programs are not free any more
#
# In a half-full batch many programs find no row to compute. In v2 they load their offsets,
# compare, and are gone; {doc}`v3_persistent` found that a list without them saves next to
# nothing. A program of v4 sets up an SM before it asks: three tasks to start, barriers to make, two
# boxes of Q to fetch, which are all zeros. Take the cost of a block and of a tile from above for
# all tiles with rows, and charge what is left of the measured time to the empty ones:


# %% tags=["remove-cell"]
def left_for_empty(impl: str, name: str) -> dict:
    """Time of an SM that a launch has left for each tile without rows."""
    work = workload(name)
    total = work.batch * work.num_heads_q * -(-work.max_seqlen_q // ROWS)
    full = [(-(-n // ROWS), -(-m // KEYS)) for n, m in
            zip(work.seqlens_q, work.seqlens_k, strict=True)]  # fmt: skip
    used = work.num_heads_q * sum(rows for rows, _ in full)
    inner = work.num_heads_q * sum(rows * keys for rows, keys in full)
    counted = besides[impl] * used + block[impl] * inner
    left = kernel_us.loc[name, impl] * machine.num_sms - counted
    return {
        "tiles": total, "empty": total - used,
        "tiles with rows (us)": round(counted / machine.num_sms),
        "measured (us)": round(kernel_us.loc[name, impl]),
        "an empty tile (us of an SM)": left / (total - used),
        "if all else costs 2 % more": (left - 0.02 * counted) / (total - used),
    }  # fmt: skip


guesses = pd.DataFrame(
    {"kernel": label, "workload": name, **left_for_empty(impl, name)}
    for label, impl in (("v2", "v2_tma"), ("v4", IMPL))
    for name in HALF.values()
)
price = guesses.groupby("kernel")["an empty tile (us of an SM)"]
glue("price_v2_min", price.min()["v2"])
glue("price_v2_max", price.max()["v2"])
glue("price_v4_min", price.min()["v4"])
glue("price_v4_max", price.max()["v4"])
doubt = guesses.groupby("kernel")["if all else costs 2 % more"]
glue("doubt_v2_min", doubt.min()["v2"])
glue("doubt_v2_max", doubt.max()["v2"])
glue("price_share", 100 * price.mean()["v4"] / besides[IMPL])
assert price.min()["v4"] > price.max()["v2"] + 0.4, "the text says that those of v4 cost more"
if "early return" in to_v4.index:
    early_us = p50.loc["early return", EMPTY]
    gained = p50.loc["128 keys", EMPTY] - early_us
    empty = guesses.set_index(["kernel", "workload"]).loc[("v4", EMPTY)]
    saved = gained * machine.num_sms / empty["empty"]
    share = 100 * saved / empty["an empty tile (us of an SM)"]
    glue_word(
        "early",
        f"It takes {100 * abs(1 - to_v4.loc['early return', EMPTY]):.0f} % "
        f"{'less' if gained > 0 else 'more'} time than v4, and "
        f"{early_us / p50.loc['v2_tma', EMPTY]:.2f} times the time of v2: for each empty tile "
        f"{abs(saved):.1f} µs of an SM {'less' if gained > 0 else 'more'}"
        + (f", {share:.0f} % of its price." if gained > 0 else "."),
    )
    glue_word(
        "rest",
        "Nearly all of the price was the set-up."
        if share > 80
        else "The rest is probably the price of a program as such: it needs a whole SM, and cannot "
        "start there before the one before it has left.",
    )
else:
    glue_word("early", "It failed; the table above says why.")
    glue_word("rest", "")

# %% tags=["remove-input"]
figures.show_table(guesses.round(2))

# %% tags=["remove-input"]
figures.source(
    "modelled",
    "costs of a block and of a tile from the two shortest full batches; measured: record above. "
    "An empty tile: what is left of the measured time, over the empty tiles",
)

# %% [markdown]
# In v2 an empty tile costs {glue:text}`v4_price_v2_min:.1f` to {glue:text}`v4_price_v2_max:.1f` µs
# of an SM; if all else costs 2 % more than counted, {glue:text}`v4_doubt_v2_min:.1f` to
# {glue:text}`v4_doubt_v2_max:.1f`. In v4 it costs {glue:text}`v4_price_v4_min:.1f` to
# {glue:text}`v4_price_v4_max:.1f` µs, on average {glue:text}`v4_price_share:.0f` % of the ends of a
# full one. Two lines in front of the tasks let it leave at once, `if first_row >= len_q: return`,
# and the record has this variant for gdpa-self-half-dense-512. {glue:text}`v4_early`
# {glue:text}`v4_rest` The rung stays as it is: the next chapters come to lists of tiles that have
# rows.
#
# ## Exercises
#
# :::{exercise} Half the head
# :label: ex-v4-head-dim
#
# Repeat the count of this chapter for head_dim 64. Between which two shares of the peak must v4
# lie, and what would you rather optimise there? *(paper, five minutes)*
# :::

# %% tags=["remove-cell"]
half_head = 4 * elements * 64 / TENSOR
glue("half_head", half_head)
glue("half_head_share", 100 * half_head / (half_head + cycles["mufu"]))
assert half_head == cycles["mufu"]

# %% [markdown]
# :::{solution} ex-v4-head-dim
# :class: dropdown
#
# The products halve to {glue:text}`v4_half_head:,.0f` cycles, the activation does not: MUFU needs
# {glue:text}`v4_mufu_cycles:,.0f` as before. In step that is {glue:text}`v4_half_head_share:.0f` %
# of the peak; with perfect overlap tensor cores and MUFU are both busy all the time, and any other
# instruction is too many. Fewer instructions for each activation would then be worth more than a
# better overlap.
# :::
#
# :::{exercise} How many stages?
# :label: ex-v4-stages
#
# What happens with `num_stages=1`: does it deadlock, does it race, or does it only wait? Predict
# for blocks of 128 and of 64 keys, then run both in the emulator and compare the modelled cycles
# with those of two stages. *(code, ten minutes)*
# :::

# %% tags=["remove-cell"]
STAGES = {
    (keys, stages): spans(
        traced(v4_warp_specialized, one_tile(128, 512), Config(BLOCK_N=keys, num_stages=stages))
    )["end"]
    for keys in (64, 128)
    for stages in (1, 2)
}
for (keys, stages), value in STAGES.items():
    glue(f"stage_{keys}_{stages}", value)
assert STAGES[128, 1] < 1.05 * STAGES[128, 2], "the answer says that 128 keys hide the copy"
assert STAGES[64, 1] > 1.10 * STAGES[64, 2], "the answer says that 64 keys do not"

# %% [markdown]
# :::{solution} ex-v4-stages
# :class: dropdown
#
# It only waits. `block % 1` is 0 and `block // 1 & 1` alternates, so stage and phase are right for
# any number of stages. K and V have buffers of their own, so the next K is fetched during the
# activation and P V of this block. With 128 keys these last longer than the copy:
# {glue:text}`v4_stage_128_1:,.0f` modelled cycles, {glue:text}`v4_stage_128_2:,.0f` with two
# stages. With 64 keys they do not: {glue:text}`v4_stage_64_1:,.0f` and
# {glue:text}`v4_stage_64_2:,.0f`. The model has an idle memory; on a busy GPU a copy takes longer.
# :::
#
# :::{exercise} Leave early
# :label: ex-v4-early
#
# Put the two lines of *early return* into a copy of the rung. Why must they stand before
# `tlx.async_tasks`? Check that the output does not change and that nothing spills.
# *(code, half an hour)*
# :::

# %% tags=["remove-cell"]
leaving = changed(v4_warp_specialized, EARLY)
with emulator.enabled():
    assert torch.equal(leaving.forward(**call), out), "the answer says that nothing changes"
compiled = compile_check.compile_rung(leaving)
assert compiled.spill_bytes == 0 and not compiled.serialised
glue("leaving_registers", compiled.registers)

# %% [markdown]
# :::{solution} ex-v4-early
# :class: dropdown
#
# A role that leaves while the others wait for its arrivals is a deadlock, so all must leave, before
# they are split. In the emulator the ragged batch of this chapter gives the same bits, and the
# compiled kernel has {glue:text}`v4_leaving_registers:.0f` registers, no spills, and no products
# that wait for each other. All threads of the program take the same branch, since `first_row` and
# `len_q` are the same for all.
# :::
#
# ## Takeaways
#
# - Roles separate what a kernel does from when it asks for data. They do not by themselves put a
#   product beside an activation; inside a role everything still follows everything.
# - A program that fills an SM pays for its own beginning and end, and for its empty tiles. Count
#   what a tile costs besides its blocks before you make it bigger.
# - Count registers before you move them, and let the compiler confirm it. Here the split made the
#   room.
