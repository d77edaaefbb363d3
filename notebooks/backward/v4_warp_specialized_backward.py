# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # v4 backward: roles, and what a role does all day
#
# With roles the tensor cores should be busy while others evaluate and add. They were busy half of
# the time. Who kept them waiting?
#
# :::{admonition} In this chapter
# - One role loads, two own 64 keys each. P and dS are operands where they lie, in registers; only
#   dQ needs dS in shared memory. Products and shared memory bound a step of 64 rows and 128 keys at
#   {glue:text}`bw4_products:,.0f` and {glue:text}`bw4_shared:,.0f` clocks (modelled).
# - Without the ideas below it took about {glue:text}`bw4_step_none:,.0f` clocks a step, from
#   measured times; the bound was not a unit of the SM but the instructions of a role, one after the
#   other.
# - Six small ideas against that: {glue:text}`bw4_gain_1024` % of time on full batches of 1,024
#   tokens, {glue:text}`bw4_gain_512` % on half-full ones of 512. The largest single share:
#   {glue:text}`bw4_largest`.
# - Against v2 that is {glue:text}`bw4_over_v2_1024:.2f` times the rate on full batches of 1,024,
#   without the six {glue:text}`bw4_none_over_v2_1024:.2f` times.
# :::

# %% tags=["remove-cell"]
import inspect
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
import triton
from IPython.display import SVG, Markdown, display

from gdpa_kernels import emulator
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.device import rows as tiles
from gdpa_kernels.gdpa import derivatives, reference, v4_warp_specialized_backward
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.v4_warp_specialized_backward import Config
from gdpa_kernels.measuring import compile_check, system, testing
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
NOTEBOOK = "notebooks/backward/v4_warp_specialized_backward.py"
V2, V4 = "v2_fused_backward", "v4_warp_specialized_backward"
ROWS, KEYS, TILE, HEAD_DIM = 64, 64, 128, 128
GRADIENTS = ("dq", "dk", "dv")
VERDICT = {True: "kept", False: "broken"}


def glue(name: str, value: float) -> None:
    figures.glue_number(f"bw4_{name}", value)


def glue_word(name: str, value: str) -> None:
    figures.glue_text(f"bw4_{name}", value)


def code(text: str, language: str = "python") -> Markdown:
    return Markdown(f"```{language}\n{text.rstrip()}\n```")


# %% [markdown]
# ## What stays, what changes
#
# | | {doc}`v2 <v2_fused_backward>` | v4 |
# |:--|:--|:--|
# | work of a program | 128 keys of one head, all rows | a list of such tiles; programs stay |
# | who computes | all warps, on the whole tile | two roles of four warps, 64 keys each |
# | S and dP | [keys, rows] | the same |
# | loads | by a thread of those warps | by a role of its own |
# | dQ | added up by TMA, waited for | added up by TMA, sent one step later |
# | products, bytes | | the same |
#
# The forward rungs took this road step by step, from {doc}`../forward/v4_warp_specialized` to
# {doc}`../forward/v8_own_waits`; here it is taken in one. The list is forward's with queries and
# keys exchanged: tiles with the most queries come first. Roles and barriers, from the head of the
# file:

# %% tags=["remove-input"]
tables = re.findall(
    r"(?:^\|.*\n)+", inspect.getdoc(v4_warp_specialized_backward) + "\n", flags=re.MULTILINE
)
Markdown("\n".join(tables))

# %% tags=["remove-input"]
Markdown(
    "\n".join(
        (
            f"````{{admonition}} From {V2}.py to {V4}.py: "
            f"{ladder.changed_lines(V4, 'gdpa_backward')} changed lines of code",
            ":class: dropdown",
            "```diff",
            ladder.diff(V4, context=1, operator="gdpa_backward").rstrip(),
            "```",
            "````",
        )
    )
)

# %% [markdown]
# ### Five products, and where their operands lie
#
# A wgmma reads its B operand from shared memory, its A operand from there or from registers, and
# leaves its result in registers. A role computes S transposed, so that a thread's part of P^T is
# laid out as the A operand of the next product wants it. The same holds for dS^T and dK. For dQ the
# sum runs over keys, and half of them belong to the other role: there dS has to go through shared
# memory. What the emulator saw as operands in one step, for both roles:


# %% tags=["remove-cell"]
def problem(lengths, lengths_k=None, heads=1, heads_k=1, head_dim=128, seed=2025) -> tuple:
    """(grad_out, batch), the arguments of a backward rung: a ragged batch from N(0, 1), bf16."""
    make = torch.Generator().manual_seed(seed)
    keys = lengths if lengths_k is None else lengths_k

    def draw(rows: int, count: int) -> torch.Tensor:
        return torch.randn(rows, count, head_dim, generator=make).bfloat16()

    return draw(sum(lengths), heads), Batch(
        draw(sum(lengths), heads), draw(sum(keys), heads_k), draw(sum(keys), heads_k),
        cu_seqlens(lengths, "cpu"), cu_seqlens(keys, "cpu"), max(lengths), max(keys),
        activation=("gelu_tanh",), scale=head_dim**-0.5,
    )  # fmt: skip


def emulated(module, given: tuple, *, programs: int, config=None, **how) -> tuple:
    """(gradients, the main kernel's report) of v4; `how` goes to the emulator."""
    with emulator.enabled(multiprocessors=programs, **how) as reports:
        found = module.backward(*given, config=config)
    return found, next(report for report in reports if report.kernel == "backward_kernel")


STEPS = 8
one_tile = problem((ROWS * STEPS,), (TILE,))
(dq, *_), report = emulated(v4_warp_specialized_backward, one_tile, programs=1, trace=True)
timeline = report.timeline
products = [event for event in timeline.events if event.kind == "mma"]
assert timeline.lanes() == ["load", "math[0]", "math[1]", "TMA", "tensor core"]


def product_of(event) -> str:
    """Which of the five products an event of the tensor core belongs to."""
    a, b = event.name.split(" @ ")
    pairs = {
        ("k", "q"): "S", ("v", "g"): "dP", ("registers", "g"): "dV", ("registers", "q"): "dK",
        ("ds", "k"): "dQ",
    }  # fmt: skip
    return pairs[a.split("[")[0], b.split("[")[0]]


SHAPES = {  # of one role's product: A, B; bytes of an operand that a product reads
    "S": ("K, [64 keys, 128]", "Q, transposed"),
    "dP": ("V, [64 keys, 128]", "dO, transposed"),
    "dV": ("P, registers", "dO"),
    "dK": ("dS, registers", "Q"),
    "dQ": ("dS of all keys, transposed", "K, 64 of the columns"),
}
HALF_TILE = ROWS * HEAD_DIM * 2
READ = {"S": 4 * HALF_TILE, "dP": 4 * HALF_TILE, "dV": 2 * HALF_TILE, "dK": 2 * HALF_TILE}
READ["dQ"] = 2 * (2 * KEYS * ROWS * 2 + 2 * KEYS * 64 * 2)
counted = Counter(product_of(event) for event in products)
clocks = Counter()
for event in products:
    clocks[product_of(event)] += event.end - event.start
# S of the last step is computed twice by both roles.
computed = {name: STEPS + (name == "S") for name in READ}
handed = pd.DataFrame(
    {
        "product": name, "A": SHAPES[name][0], "B": SHAPES[name][1],
        "clocks of the tensor cores": clocks[name] / computed[name],
        "read of shared memory (KB)": READ[name] / 1024,
    }
    for name in SHAPES
)  # fmt: skip
per_step = sum(handed["clocks of the tensor cores"])
written = 2 * KEYS * ROWS * 2  # dS
passing = 2 * ROWS * HEAD_DIM * 4  # dQ, in and out
landing = 2 * ROWS * HEAD_DIM * 2  # Q and dO
shared = (sum(READ.values()) + written + passing + landing) / 128
assert per_step == 2560 and 2900 <= shared <= 2950, "the counts of the prediction"
assert all(counted[n] == 2 * computed[n] * (2 if n == "dQ" else 1) for n in READ)
glue("products", per_step)
glue("shared", shared)
glue("read_kb", sum(READ.values()) / 1024)
glue("moved_kb", (sum(READ.values()) + written + passing + landing) / 1024)
glue("shared_share", 100 * shared / 5200)

# %% tags=["remove-input"]
figures.show_table(handed.round(0))

# %% tags=["remove-input"]
figures.source(
    "emulated", "one tile of 128 keys, clocks of a step; operands and bytes counted by hand, "
    "compared with the trace"
)  # fmt: skip

# %% [markdown]
# Each role computes half of the columns of dQ, from the dS of both. The alternative, each role the
# part of its own keys, would add to dQ twice as often. At head_dim 64 half of the columns would be
# 32 wide, and v4 does add twice.
#
# ## Prediction
#
# Written before any run on a GPU (2026-11-21):
#
# > A step is 5 products, 2,560 clocks of the tensor cores for 64 rows and 128 keys of head_dim 128;
# > activation and derivative are about 12 instructions for each of 8,192 scores, 770 clocks. One
# > role's activation runs beside the other's products. What it costs: the reads and writes of
# > shared memory take about 2,900 clocks, more than the products: the bound of this design.
#
# Products read {glue:text}`bw4_read_kb:.0f` KB of shared memory in a step; with dS, dQ and the
# loads {glue:text}`bw4_moved_kb:.0f` KB pass it, at 128 bytes a clock {glue:text}`bw4_shared:,.0f`
# clocks. From that, in the lab notes of the same day:
#
# 1. *A step* takes 3,400 to 3,900 clocks at about 1.55 GHz, 550 to 630 TFLOP/s in the steady state.
#    Steps of less than 3,000 clocks would refute it: shared memory cannot do that.
# 2. *The pass*, in TFLOP/s on full batches: 480 to 540 with 2,048 tokens, 430 to 480 with 1,024,
#    360 to 420 with 512, 270 to 310 with 256. Refuted if 2,048 stays under 430.
# 3. *dP before the activation* instead of after it gains less than 3 %: the other role fills the
#    gap.
#
# These were written for v4 without the six ideas below. The variant *none of the six* comes close
# to what it was then.
#
# ## A timeline

# %% tags=["remove-cell"]
ends = [e.end for e in products if product_of(e) == "dK"]
inner = (ends[5], ends[9])  # two steps of both roles
step_emulated = (ends[-3] - ends[3]) / ((len(ends) - 6) / 2)
busy = [e for e in products if inner[0] <= e.start < inner[1]]
glue("emulated_step", step_emulated)
glue("emulated_busy", 100 * sum(e.end - e.start for e in busy) / (inner[1] - inner[0]))
assert step_emulated < 1.15 * per_step, "the text: in the model the tensor cores are the bound"

# %% tags=["remove-input"]
# | name: fig-bw4-timeline
# | caption: >
# |   v4 in the middle of a tile of 128 keys, two steps of 64 rows. Roles above, engines below; an
# |   arrow leads from the arrival that completed a phase to the wait that it ended. Modelled
# |   cycles.
# | alt: >
# |   Five lanes. load waits for slots and asks for Q and dO. The math roles alternate: while one
# |   evaluates the activation, products of the other run. The tensor core has almost no gap. TMA
# |   copies Q and dO in, and dQ out.
display(SVG(timeline.svg(start=inner[0], end=inner[1], width=760)))

# %% tags=["remove-input"]
figures.source("emulated", f"gdpa_kernels/gdpa/{V4}.py, modelled schedule; cycles are modelled")

# %% [markdown]
# In the model a step takes {glue:text}`bw4_emulated_step:,.0f` cycles and the tensor core is busy
# for {glue:text}`bw4_emulated_busy:.0f` % of them. The roles have fallen out of step by themselves,
# and one evaluates while the other multiplies. So much for a model without issue slots and without
# a bandwidth of shared memory. It tells whether the barriers are right, and who *could* overlap
# with whom. How long a role takes to issue what it does it cannot tell.
#
# ## Half of the clocks
#
# On a GPU v4, as first written, was far from prediction 1. It was profiled once
# (2026-11-21; Nsight Compute, full batches of 1,024, 132 sequences; without a record, so these are
# notes and no measurements of this book):
#
# - a step took about 5,200 clocks; the tensor pipe was active for 49.5 % of them, as 2,560 of 5,200
#   want it;
# - 33 % of the issue slots were used;
# - of its loop a role spent 13 % waiting for products, 31 % in activation and derivative, 12 %
#   with fences and writing dQ to shared memory;
# - of the 805 instructions of that loop 62 were R2UR, which moves a number from a thread's register
#   to one of the warp.
#
# No unit is the bound: shared memory, by the count above, was busy for
# {glue:text}`bw4_shared_share:.0f` % of the clocks. A role is a chain: issue a product, wait, 300
# instructions of arithmetic, store, fence, issue, wait. Each of the four schedulers of an SM has
# one warp of each role, so there are two warps to choose from, and most of the time one of them
# waits. If a step has two chains of $t$ clocks each, and they overlap but are not shorter for it,
# then a step takes $t$, and any instruction less in the chain counts. Hence six ideas, all of one
# kind: *shorten the chain*.
#
# ### 1. Factors go to the sums
#
# GELU by tanh is $\tfrac{x}{2}(1 + t)$ with $x = s \cdot scale$ and $t = \tanh u(x)$; its
# derivative is $\tfrac12(1 + t) + \tfrac{x}{2}\,u'(x)(1 - t^2)$. With $c = t + x\,u'(x)(1 - t^2)$
#
# $$
# \mathrm{act} = \tfrac{scale}{2} \cdot s(1 + t), \qquad \mathrm{act}' = \tfrac12 (1 + c), \qquad
# dS = dP \odot \mathrm{act}' = \tfrac12 (dP + c\, dP).
# $$
#
# The constants $\tfrac{scale}{2}$ and $\tfrac12$ are the same for all scores. They can be left out
# of P and dS and multiplied into dV, dK and dQ, once for a tile and not once for a score. SiLU is
# of the same form with $t = \tanh \tfrac{x}{2}$.

# %% tags=["remove-input"]
code(inspect.getsource(derivatives.value_and_slope_folded.fn))

# %% [markdown]
# That it is the same function, in double precision, on scores from -8 to 8:

# %%
s = torch.linspace(-8, 8, 4001, dtype=torch.float64, requires_grad=True)
scale = 0.7
linear, cubic = 0.7978845608028654 * scale, 0.7978845608028654 * 0.044715 * scale**3
t = torch.tanh(s * (linear + cubic * s * s))
y, c = s + s * t, t + s * (linear + 3 * cubic * s * s) * (1 - t * t)
gelu = torch.nn.functional.gelu(scale * s, approximate="tanh")
(slope,) = torch.autograd.grad(gelu.sum(), s)
print(f"value {(scale / 2 * y - gelu).abs().max():.1e}", end=", ")
print(f"slope {((1 + c) / 2 - slope / scale).abs().max():.1e}")
assert torch.allclose(scale / 2 * y, gelu) and torch.allclose((1 + c) / 2, slope / scale)

# %% [markdown]
# In fp16 the left-out factor may overflow, so only bf16 is folded.
#
# ### 2. A number that all threads share
#
# The number of steps comes from a list in memory. The compiler does not know that every thread of a
# warp has loaded the same number; so it keeps slot numbers and addresses in every thread, and wgmma
# and TMA want them in registers of the warp. R2UR moves them there, before each product. A shuffle
# from lane 0 changes nothing, except what the compiler knows:

# %% tags=["remove-input"]
code(inspect.getsource(tiles.uniform.fn))

# %% [markdown]
# ### 3. K of the next tile is on its way
#
# K is needed by the first product of a tile and by the last. With one slot the load role cannot ask
# for the next tile's K before the last dQ of this one is done, and then everybody waits for memory.
# A second slot costs as much as one slot of Q and one of dO: `k_stages=2` leaves two of those
# instead of three.
#
# ### 4. dQ is put aside
#
# What a thread writes to shared memory is seen by TMA only behind a fence, at which all threads of
# the role wait for their writes. dS needs a fence in each step anyway. So dQ is written, and sent
# off behind *the next step's* fence for dS.
#
# ### 5. One wait for two products
#
# dQ of the step before has to be waited for, and so has S of this step. If S of the *next* step is
# issued before dQ of the *last*, one wait serves both. In the last step there is no next S; it
# computes its own once more, since a product that is sometimes issued would cost more than one that
# is useless: of {glue:text}`bw4_waste_steps:.0f` steps one S too many,
# {glue:text}`bw4_waste_1024:.1f` % of the tensor cores' work with 1,024 rows.
#
# ### 6. Addresses where they are used
#
# The addresses of V, of the staging buffer and, with one slot, of K are the same in all steps. A
# good compiler computes what stays the same once, before the loop. wgmma takes each address as a
# descriptor of 64 bits, another one for every 16 columns, and there are more of them than
# registers. So they wait in memory, spilled, and each product waits for a load and for R2UR. What
# the compiler does not know to stay the same it cannot take out of the loop:

# %% tags=["remove-input"]
code(inspect.getsource(tiles.nothing.fn))

# %% [markdown]
# The assembler, which translates later, sees that `xor` of a number with itself is 0, and computes
# the descriptors in registers of the warp, at the price of a few more instructions. This idea came
# last, from the next chapter: there it decides ({doc}`v5_short_kv_backward`).
#
# Ideas 4 to 6 make the loop:

# %% tags=["remove-cell"]
glue("waste_steps", 1024 / ROWS)
glue("waste_1024", 100 * 512 / per_step / (1024 / ROWS))

# %% tags=["remove-input"]
body = inspect.getsource(v4_warp_specialized_backward.math.fn)
loop = body[body.index("        for step in tl.range(1,") : body.index("        count += steps")]
code(inspect.cleandoc("\n" + loop))

# %% [markdown]
# ## The ideas, one by one
#
# `Config` switches fold and K ahead. The others are undone by replacing pieces of the source:

# %% tags=["hide-input"]
NOT_UNIFORM = (("        steps = uniform(steps)\n", ""),)
KEPT = (("            zero = nothing(step)\n", "            zero = 0\n"),)
SEND_LATER = """            if step > 1:
                head, row = place(step - 2, steps, start, head_k, GROUP)
                add_rows(gradients.dq, staging[role + zero], start_out, len_q, head, row, COLUMN)
"""
PUT = "            put_aside(staging[role + zero], dq)\n"
SEND_NOW = """            tlx.fence("async_shared")
            head, row = place(step - 1, steps, start, head_k, GROUP)
            add_rows(gradients.dq, staging[role + zero], start_out, len_q, head, row, COLUMN)
"""
SEND_LAST = """        tlx.fence("async_shared")
        if steps * GROUP > 1:
            head, row = place(steps * GROUP - 2, steps, start, head_k, GROUP)
            add_rows(gradients.dq, staging[role], start_out, len_q, head, row, COLUMN)
"""
DQ_AT_ONCE = ((SEND_LATER, ""), (PUT, PUT + SEND_NOW), (SEND_LAST, ""))

FIRST_NEXT = """        s = scores(k.buffer[k_at + role], q, tl.minimum(count + 1, last), Q_STAGES)
        s = tlx.async_dot_wait(0, s)
        tlx.barrier_arrive(q.empty"""
NEXT = """\
            s = scores(k.buffer[k_at + role + zero], q, tl.minimum(now + 1, last), Q_STAGES)
"""
BOTH = "            s = tlx.async_dot_wait(0, s)\n            dq = tlx.async_dot_wait"
ZERO = "            zero = nothing(step)\n"
OWN = """            s = scores(k.buffer[k_at + role + zero], q, now, Q_STAGES)
            s = tlx.async_dot_wait(0, s)
"""
S_AFTER_DQ = (
    (FIRST_NEXT, "        tlx.barrier_arrive(q.empty"),
    (NEXT, ""),
    (BOTH, "            dq = tlx.async_dot_wait"),
    (ZERO, ZERO + OWN),
)

DK = "            dk = tlx.async_dot(d, q.buffer[now % Q_STAGES], dk)\n"
DONE = """            dv = tlx.async_dot_wait(0, dv)
            dk = tlx.async_dot_wait(0, dk)
            tlx.barrier_arrive(g.empty[now % options.G_STAGES])
"""
DQ = "            dq = dq_product(role, ds, k, k_at + zero, now - 1, HEAD_DIM)\n"
S_BESIDE_DK = ((DK + DONE + NEXT, DK + NEXT + DONE.replace("wait(0", "wait(1")),)
BOTH_BESIDE_DK = ((DK + DONE + NEXT + DQ, DK + NEXT + DQ + DONE),)

SOURCE = inspect.getsource(v4_warp_specialized_backward)
DP = "    tlx.barrier_wait(g.full[at]"
ACTIVATION = SOURCE[SOURCE.index("    p, slope = value_and_factor(") : SOURCE.index(DP)]
ISSUE = SOURCE[SOURCE.index(DP) : SOURCE.index("    dv = tlx.async_dot(p.to(options.DTYPE)")]
DP_FIRST = ((ACTIVATION + ISSUE, ISSUE + ACTIVATION),)

THREE = {"q_stages": 3, "g_stages": 3, "k_stages": 1}
BEFORE = (*KEPT, *NOT_UNIFORM)
ALL, NONE = "all six", "none of the six"
VARIANTS = {
    ALL: ((), Config()),
    NONE: ((*DQ_AT_ONCE, *S_AFTER_DQ, *BEFORE), Config(fold=False, **THREE)),
    "fold": ((*DQ_AT_ONCE, *S_AFTER_DQ, *BEFORE), Config(**THREE)),
    "fold, K ahead": ((*DQ_AT_ONCE, *S_AFTER_DQ, *BEFORE), Config()),
    "fold, K ahead, dQ put aside": ((*S_AFTER_DQ, *BEFORE), Config()),
    "fold, K ahead, dQ put aside, S first": (BEFORE, Config()),
    "without late addresses": (KEPT, Config()),
    "without S first": (S_AFTER_DQ, Config()),
    "without fold": ((), Config(fold=False)),
    "without uniform": (NOT_UNIFORM, Config()),
    "without K ahead": ((), Config(**THREE)),
    "without K ahead, 2 slots": ((), Config(k_stages=1)),
    "without dQ put aside": (DQ_AT_ONCE, Config()),
    "S beside dK": (S_BESIDE_DK, Config()),
    "dP first": (DP_FIRST, Config()),
    "232 registers": ((), Config(registers=232)),
}
LADDER = [
    NONE, "fold", "fold, K ahead", "fold, K ahead, dQ put aside",
    "fold, K ahead, dQ put aside, S first", "without late addresses", ALL,
]  # fmt: skip

# %% [markdown]
# *Without K ahead* has three slots of Q and dO, since there is room. In *S beside dK* the next S is
# issued while dK is still under way: the next link of the same chain. What the compiler makes of
# them, with the instructions of the loop over steps, for one math role:


# %% tags=["remove-cell"]
def built(module, config):
    """The main kernel of v4 for four heads of 128, compiled; nothing runs."""
    no_list = (torch.zeros(5, 8, dtype=torch.int32),)
    with launches(run=False) as seen:
        module.backward(*problem((130,), heads=4, heads_k=4), config=config, schedule=no_list)
    return compile_check.build_launch(seen[0])


def loop_of(binary, steps: int = 1) -> list[str]:
    """The mnemonics of the shortest loop with the activations of `steps` steps of a math role."""
    per_step = KEYS * ROWS // 128  # scores of a thread, each with one MUFU
    return compile_check.shortest_loop(binary, "MUFU", steps * per_step)


ELEMENTS = KEYS * ROWS // 128  # scores of a thread
LOOKED_AT = (
    NONE, "fold", "fold, K ahead", "fold, K ahead, dQ put aside, S first",
    "without late addresses", ALL, "without uniform", "without K ahead", "S beside dK",
)  # fmt: skip
bodies, lines = {}, []
for name in (*LOOKED_AT, "S and dQ beside dK"):
    changes, config = VARIANTS.get(name, (BOTH_BESIDE_DK, Config()))
    binary = built(changed(v4_warp_specialized_backward, *changes), config)
    made, bodies[name] = compile_check.read(binary), loop_of(binary)
    count = Counter(bodies[name])
    fp32 = count["FMUL"] + count["FFMA"] + count["FADD"]
    lines.append(
        {
            "variant": name, "serialised": "yes" if made.serialised else "no",
            "spilled (bytes)": made.spill_bytes, "loop": count.total(),
            "fp32 of a score": fp32 / ELEMENTS, "R2UR": count["R2UR"],
            "LDL, STL": count["LDL"] + count["STL"],
        }
    )  # fmt: skip
facts = pd.DataFrame(lines).set_index("variant")
assert (facts.drop("S and dQ beside dK")["serialised"] == "no").all()
assert facts["serialised"]["S and dQ beside dK"] == "yes", "the text: too many registers"
assert facts["fp32 of a score"][NONE] > 11.5 and facts["fp32 of a score"][ALL] < 9.5
EARLY = "fold, K ahead, dQ put aside, S first"
assert facts["R2UR"]["fold, K ahead"] < facts["R2UR"]["fold"] / 2, "the text: K ahead, at first"
assert facts["R2UR"]["fold, K ahead"] < facts["R2UR"][EARLY], "the text: come back"
assert facts["R2UR"]["without late addresses"] < facts["R2UR"][EARLY] / 2, "the text: uniform"
assert facts["R2UR"][ALL] < facts["R2UR"]["without late addresses"] / 2, "the text: the sixth"
assert facts["spilled (bytes)"][[ALL, "without uniform", "S beside dK"]].max() == 0, "the text"
glue("loop_none", facts["loop"][NONE])
glue("loop_all", facts["loop"][ALL])
glue("fp32_none", facts["fp32 of a score"][NONE])
glue("fp32_all", facts["fp32 of a score"][ALL])
for key, name in (
    ("all", ALL), ("uniform", "without uniform"), ("late", "without late addresses"),
    ("five", EARLY),
):  # fmt: skip
    glue(f"r2ur_{key}", facts["R2UR"][name])
    glue(f"spilled_{key}", facts["spilled (bytes)"][name])
glue("r2ur_fold", facts["R2UR"]["fold"])
glue("r2ur_early", facts["R2UR"]["fold, K ahead"])

# %% tags=["remove-input"]
figures.show_table(facts.reset_index().round(2))

# %% tags=["remove-input"]
figures.source(
    "modelled",
    f"ptxas and nvdisasm on kernels compiled for sm_90a, triton {triton.__version__}; serialised: "
    "ptxas makes products wait for each other; loop: instructions of a step of one role",
)

# %% [markdown]
# - The loop went from {glue:text}`bw4_loop_none:.0f` instructions to {glue:text}`bw4_loop_all:.0f`.
#   Folding takes floating-point instructions of a score from {glue:text}`bw4_fp32_none:.0f` to
#   {glue:text}`bw4_fp32_all:.0f`: nearly all of the difference.
# - R2UR are {glue:text}`bw4_r2ur_fold:.0f` with one slot of K and {glue:text}`bw4_r2ur_early:.0f`
#   with two. Ideas 4 and 5 bring them back, {glue:text}`bw4_r2ur_five:.0f`, `uniform` leaves
#   {glue:text}`bw4_r2ur_late:.0f`, late addresses {glue:text}`bw4_r2ur_all:.0f`. Spills go with
#   them: {glue:text}`bw4_spilled_five:.0f`, {glue:text}`bw4_spilled_late:.0f` and
#   {glue:text}`bw4_spilled_all:.0f` bytes. And the sixth idea makes the second one superfluous:
#   without `uniform` the loop has {glue:text}`bw4_r2ur_uniform:.0f` R2UR as well.
# - S beside dK compiles without spills. S *and* dQ beside dK is too much: three results under way
#   and no registers left, so ptxas makes all products wait for each other (its warning C7512).
#
# And prediction 3, dP before the activation? In the code of the compiler:

# %%
order = {}
dp_first = loop_of(built(changed(v4_warp_specialized_backward, *DP_FIRST), Config()))
for title, names in {"after": bodies[ALL], "before": dp_first}.items():
    first = names.index("HGMMA")
    order[title] = (names[:first].count("MUFU"), names[first:].count("MUFU"))
    print(f"dP {title:6} the activation: MUFU before the first HGMMA {order[title][0]}, after it "
          f"{order[title][1]}")  # fmt: skip

# %% [markdown]
# The variant *dP first* is measured below.
#
# Tried as well (2026-11-21, without a record): to let tiles of one head begin at different rows, so
# that they do not add to the same rows of dQ at the same time. It gained nothing.
#
# ## Is it right?
#
# A ragged batch with grouped heads and several tiles of keys, in the emulator, with the variants
# that replace source:

# %%
given = problem((0, 1, 63, 130), (3, 70, 129, 257), heads=2)
grad_out, batch = given
wide = {name: getattr(batch, name).double() for name in ("q", "k", "v")}
exact = reference.backward(grad_out.double(), replace(batch, **wide))
plain = reference.backward(grad_out, batch)
CHECKED = (ALL, NONE, "without dQ put aside", "without S first", "S beside dK")
for name in CHECKED:
    changes, config = VARIANTS[name]
    module = changed(v4_warp_specialized_backward, *changes)
    found, _ = emulated(module, given, config=config, programs=2)
    shares = []
    for gradient, actual, right, other in zip(GRADIENTS, found, exact, plain, strict=True):
        error = testing.compare(name=gradient, actual=actual, expected=right, baseline=other)
        assert error.passed, f"{name}: {error}"
        shares.append(f"{gradient} {100 * error.max_abs / error.max_abs_budget:.0f} %")
    print(f"{name:21} largest error, share of its budget: {', '.join(shares)}")

# %% [markdown]
# And three mistakes that the ideas invite. The last step asks for the S of a next one that does not
# exist; dQ is put aside without waiting until TMA has read the one before; and dS is written
# without asking whether the other role has read the one of two steps ago:

# %% tags=["remove-cell"]
MISTAKES = {
    "S of a step that does not exist": ("tl.minimum(now + 1, last)", "now + 1"),
    "dQ over dQ": (
        "    tlx.async_descriptor_store_wait(0)\n    tlx.local_store(buffer, x)",
        "    tlx.local_store(buffer, x)",
    ),
    "dS over dS": ("    tlx.barrier_wait(ds.empty[at], ((count // 2) & 1) ^ 1)\n", ""),
}
SCHEDULES = ("modelled", 0, 1)


def found_in(module, schedule) -> emulator.EmulatorError | None:
    """What the emulator says about a launch."""
    try:
        emulated(module, problem((192,), (512,)), programs=1, schedule=schedule, max_steps=100_000)
    except emulator.EmulatorError as error:
        return error
    return None


said = {
    name: [found_in(changed(v4_warp_specialized_backward, change), s) for s in SCHEDULES]
    for name, change in MISTAKES.items()
}
kinds = {name: {type(error).__name__ for error in errors} for name, errors in said.items()}
assert list(kinds.values()) == [{"Deadlock"}, {"Race"}, {"Race"}]
glue("schedules", len(SCHEDULES))

# %% tags=["remove-input"]
lines = []
for name, errors in said.items():
    text = re.sub(r"/\S*/(?=[\w-]+\.py:\d)", "", str(errors[0]))
    lines.append(f"{name}: {type(errors[0]).__name__}")
    lines += ["  " + line.strip() for line in re.split(r"\n|; ", text)]
code("\n".join(lines), "text")

# %% [markdown]
# All three are found under each of {glue:text}`bw4_schedules:.0f` schedules. What the emulator does
# not check is the fence itself: it takes for granted that TMA sees what was written before it.
# Idea 4 rests on that fence, and on the GPU's own check of the results below.
#
# ## Measurement
#
# This cell measures; it runs with `make measure NOTEBOOKS=backward/v4_warp_specialized_backward`,
# on a GPU. A variant whose source is changed stands in for the rung in a call with the same
# arguments; all pass the check first.

# %% tags=["hide-input"]
FULL = {n: f"gdpa-self-full-{n}" for n in (256, 512, 1024, 2048)}
HALF = "gdpa-self-half-jagged-512"
LONG = (FULL[1024], HALF)


def listed(name: str) -> list[str]:
    """The variants of v4 that are timed on a workload."""
    return list(VARIANTS) if name in LONG else [ALL, NONE]


if mode == "measure":
    from gdpa_kernels.measuring.session import Session

    modules = {
        name: changed(v4_warp_specialized_backward, *changes) if changes else None
        for name, (changes, _) in VARIANTS.items()
    }
    session = Session(NOTEBOOK, device)
    for name in (*LONG, FULL[256], FULL[512], FULL[2048]):
        entries = [
            (V4, variant, {"config": VARIANTS[variant][1], "module": modules[variant]})
            for variant in listed(name)
        ]
        session.measure(workload(name), [(V2, "default", {}), *entries], direction="backward")
    print(session.write(data_dir))

# %% tags=["remove-cell"]
NAMES = (*FULL.values(), HALF)
TITLES = {FULL[n]: f"self, full, {n:,}" for n in FULL} | {HALF: "self, half, jagged, 512"}
run_record = results.latest_record(data_dir, notebook=NOTEBOOK, system="h200")
limits = results.ceilings(run_record)
machine = system.load(Path(data_dir) / "systems" / f"{run_record.system}.json")
copy_rate = limits.gbytes_per_s(1, 1)
everything = results.table(data_dir, system="h200", latest=False)
own = everything[(everything["record"] == run_record.id) & (everything["scope"] == "kernel")]
own = own.drop_duplicates(["workload", "impl", "variant"])
failed = own[own["failure"] != ""]
passed = own[own["failure"] == ""]
assert passed["correct"].astype(bool).all(), "timed without a passed check"
time = passed.set_index(["workload", "impl", "variant"])["time_us_p50"]
rate = passed.set_index(["workload", "impl", "variant"])["tflops"]
needed = [(n, V2, "default") for n in NAMES] + [(n, V4, v) for n in NAMES for v in (ALL, NONE)]
missing = [key for key in needed if key not in time.index]
assert not missing, f"the record lacks {missing}"
assert all((name, V4, step) in time.index for name in LONG for step in LADDER)
glue("checked", len(passed))


def of(name: str, variant: str) -> float:
    """Time of a variant of v4 in µs; NaN if it failed."""
    return float(time.get((name, V4, variant), float("nan")))


def percent(ratio: float) -> str:
    """A change with its sign; a variant that failed has none."""
    return "(no time)" if ratio != ratio else f"{100 * (ratio - 1):+.1f}"


WITHOUT = {
    "fold": "without fold", "uniform": "without uniform", "K ahead": "without K ahead",
    "dQ put aside": "without dQ put aside", "S first": "without S first",
    "late addresses": "without late addresses",
}  # fmt: skip
lost = {
    (name, idea): of(name, variant) / of(name, ALL) - 1
    for name in LONG
    for idea, variant in WITHOUT.items()
}
for key, name in (("1024", FULL[1024]), ("512", HALF)):
    glue_word(f"gain_{key}", f"{100 * (of(name, ALL) / of(name, NONE) - 1):+.0f}")
    for idea, word in zip(
        WITHOUT,
        (
            "fold",
            "uniform",
            "ahead",
            "aside",
            "first",
            "late",
        ),
        strict=True,
    ):
        glue_word(f"lost_{word}_{key}", percent(1 + lost[name, idea]))
    for word, variant in (
        ("beside", "S beside dK"), ("232", "232 registers"), ("two", "without K ahead, 2 slots"),
        ("dp", "dP first"),
    ):  # fmt: skip
        glue_word(f"{word}_{key}", percent(of(name, variant) / of(name, ALL)))
glue("over_v2_1024", time[FULL[1024], V2, "default"] / of(FULL[1024], ALL))
glue("none_over_v2_1024", time[FULL[1024], V2, "default"] / of(FULL[1024], NONE))
at_1024 = {idea: lost[FULL[1024], idea] for idea in WITHOUT}
largest = max(at_1024, key=at_1024.get)
glue_word(
    "largest",
    f"{largest}, without which v4 takes {100 * at_1024[largest]:.1f} % more time"
    if at_1024[largest] > 0.01
    else "none of them takes more than 1 % alone",
)
alone = sum(value for value in at_1024.values())
glue_word("sum", f"{100 * alone:.0f}")
glue_word("all_lost", f"{100 * (of(FULL[1024], NONE) / of(FULL[1024], ALL) - 1):.0f}")
useless = [idea for idea in WITHOUT if max(lost[name, idea] for name in LONG) < 0.01]
glue_word(
    "useless",
    "Each of the six is worth more than 1 % of time on one of the two batches"
    if not useless
    else f"Alone worth less than 1 % on both batches: {', '.join(useless)}",
)

# %% [markdown]
# ### From none to six

# %% tags=["remove-input"]
# | name: fig-bw4-ladder
# | caption: >
# |   Left: full batches of 1,024, right: half-full ones of 512. Filled: the ideas added one after
# |   the other. Hollow: all but one. Line: v2.
# | alt: >
# |   Two bar charts of TFLOP/s. Seven filled bars, from none of the six ideas to all of them, and
# |   six hollow bars for all but one. A line marks v2. The values are in the table below.
SHORT = {
    "fold": "+ fold", "fold, K ahead": "+ K ahead",
    "fold, K ahead, dQ put aside": "+ dQ put aside",
    "fold, K ahead, dQ put aside, S first": "+ S first", "without late addresses": "+ uniform",
    ALL: "+ late addresses: all",
}  # fmt: skip
with figures.style():
    chart, axes = figures.subplots(1, 2, width=8.6, height=3.9)
    for axis, name in zip(axes, LONG, strict=True):
        bars = [(SHORT.get(v, "none"), v, True) for v in LADDER]
        bars += [(v, v, False) for v in WITHOUT.values()]
        for row, (_, variant, filled) in enumerate(bars):
            axis.barh(
                row, rate.get((name, V4, variant), 0.0), 0.65,
                color=figures.colour(V4) if filled else "none", edgecolor=figures.colour(V4),
            )  # fmt: skip
        axis.axvline(rate[name, V2, "default"], color=INK, linewidth=1)
        axis.set_yticks(range(len(bars)), [bar[0] for bar in bars])
        axis.invert_yaxis()
        axis.grid(visible=False, axis="y")
        axis.set_title(TITLES[name])
        axis.set_xlabel("TFLOP/s")
display(chart)

# %% tags=["remove-input"]
figures.save_csv(own, "gdpa-backward-roles")
figures.provenance(own, csv="gdpa-backward-roles", data_dir=Path(data_dir))

# %% tags=["remove-input"]
figures.show_table(
    pd.DataFrame(
        {
            "variant": variant,
            **{
                f"{TITLES[name]} ({unit})": value
                for name in LONG
                for unit, value in (
                    ("ms", of(name, variant) / 1e3),
                    ("of v4", of(name, variant) / of(name, ALL)),
                )
            },
        }
        for variant in VARIANTS
    ).round(3)
)

# %% tags=["remove-input"]
if len(failed):
    display(figures.show_table(failed[["workload", "impl", "variant", "failure"]]))

# %% [markdown]
# All {glue:text}`bw4_checked:.0f` variants with a time passed the check. One idea taken away, time
# on full batches of 1,024 and on half-full ones of 512:
#
# | without | 1,024, % | 512, % |
# |:--|--:|--:|
# | fold | {glue:text}`bw4_lost_fold_1024` | {glue:text}`bw4_lost_fold_512` |
# | uniform | {glue:text}`bw4_lost_uniform_1024` | {glue:text}`bw4_lost_uniform_512` |
# | K ahead | {glue:text}`bw4_lost_ahead_1024` | {glue:text}`bw4_lost_ahead_512` |
# | dQ put aside | {glue:text}`bw4_lost_aside_1024` | {glue:text}`bw4_lost_aside_512` |
# | S first | {glue:text}`bw4_lost_first_1024` | {glue:text}`bw4_lost_first_512` |
# | late addresses | {glue:text}`bw4_lost_late_1024` | {glue:text}`bw4_lost_late_512` |
#
# {glue:text}`bw4_useless`. On the long batch these six losses add up to {glue:text}`bw4_sum` %;
# taken away together they cost {glue:text}`bw4_all_lost` %. If the two were equal the ideas would
# be independent; the compiler's table has shown some that are not.
#
# *S beside dK* changes the time by {glue:text}`bw4_beside_1024` and {glue:text}`bw4_beside_512` %,
# 232 registers instead of 240 by {glue:text}`bw4_232_1024` and {glue:text}`bw4_232_512` %, one slot
# of K with two of Q and dO by {glue:text}`bw4_two_1024` and {glue:text}`bw4_two_512` %.
#
# ### Was the prediction right?
#
# Take zero fill and rounding of dQ at the rate of a copy off the measured time, spread the rest
# over the tiles of an SM, and assume that a tile takes a constant and a time for each step. From
# 1,024 to 2,048 rows only the steps grow.

# %% tags=["remove-cell"]
CLOCK = 1.55  # GHz, assumed by the notes


def of_a_tile(n: int, variant: str) -> float:
    """Time of an SM for a tile of 128 keys on a full batch, in clocks of `CLOCK`."""
    given = workload(FULL[n])
    elements = given.total_q * given.num_heads_q * given.head_dim
    us = of(FULL[n], variant) - 10 * elements / copy_rate / 1e3
    tiles_ = given.batch * given.num_heads_k * -(-given.max_seqlen_k // TILE)
    return 1e3 * us * CLOCK * machine.num_sms / tiles_


fits = []
for variant in (NONE, ALL):
    step = (of_a_tile(2048, variant) - of_a_tile(1024, variant)) / (1024 / ROWS)
    ends_of = of_a_tile(1024, variant) - step * (1024 / ROWS)
    flops = 5 * 2 * ROWS * TILE * HEAD_DIM
    fits.append(
        {
            "v4 with": variant, "a step (clocks)": step, "besides, a tile (clocks)": ends_of,
            "steady state (TFLOP/s)": flops / step * CLOCK * machine.num_sms / 1e3,
            "products, % of a step": 100 * per_step / step,
        }
    )  # fmt: skip
fits = pd.DataFrame(fits).set_index("v4 with")
step_none, step_all = fits["a step (clocks)"][NONE], fits["a step (clocks)"][ALL]
glue("step_none", step_none)
glue("step_all", step_all)
glue("tensor_none", 100 * per_step / step_none)
glue("tensor_all", 100 * per_step / step_all)
glue("ends_none", fits["besides, a tile (clocks)"][NONE])
glue("ends_all", fits["besides, a tile (clocks)"][ALL])
glue_word(
    "ends_word",
    "Less than nothing cannot be: the long launches ran at a lower clock, and the line puts that "
    "into the steps."
    if fits["besides, a tile (clocks)"].min() < 0
    else "What a tile begins and ends with is hidden in part."
    if fits["besides, a tile (clocks)"].max() < 6000
    else "What a tile begins and ends with is not hidden.",
)
glue_word("verdict_1_none", VERDICT[bool(3400 <= step_none <= 3900)])
glue_word("verdict_1_all", VERDICT[bool(3400 <= step_all <= 3900)])
glue_word("refuted_1", "and refuted, below" if step_all < 3000 else "not below")
EXPECTED = {2048: (480, 540), 1024: (430, 480), 512: (360, 420), 256: (270, 310)}
judged = pd.DataFrame(
    {
        "full batches of": f"{n:,}", "predicted": f"{low} to {high}",
        **{
            f"{variant}": f"{rate[FULL[n], V4, variant]:.0f}, "
            f"{VERDICT[bool(low <= rate[FULL[n], V4, variant] <= high)]}"
            for variant in (NONE, ALL)
        },
        "v2": f"{rate[FULL[n], V2, 'default']:.0f}",
    }
    for n, (low, high) in EXPECTED.items()
)  # fmt: skip
inside = {
    v: sum(low <= rate[FULL[n], V4, v] <= high for n, (low, high) in EXPECTED.items())
    for v in (NONE, ALL)
}
glue("inside_none", inside[NONE])
glue("inside_all", inside[ALL])
at_2048 = {v: rate[FULL[2048], V4, v] for v in (NONE, ALL)}
glue("rate_none_2048", at_2048[NONE])
glue("rate_all_2048", at_2048[ALL])
glue_word(
    "verdict_3",
    VERDICT[max(1 - of(name, "dP first") / of(name, ALL) for name in LONG) < 0.03],
)
glue_word("refuted_2", "refuted" if at_2048[NONE] < 430 else "not refuted")
glue_word("refuted_2_all", "above" if at_2048[ALL] >= 430 else "still below")

# %% tags=["remove-input"]
figures.show_table(judged)

# %% tags=["remove-input"]
figures.provenance(own, csv="gdpa-backward-roles", data_dir=Path(data_dir))

# %% tags=["remove-input"]
figures.show_table(fits.round(0).reset_index())

# %% tags=["remove-input"]
figures.source(
    "modelled",
    "a line through the measured times of full batches of 1,024 and 2,048, less zero fill and "
    "rounding at the measured copy rate; clocks of 1.55 GHz, assumed",
)

# %% [markdown]
# 1. *A step*: {glue:text}`bw4_step_none:,.0f` clocks without the six ideas, for which the
#    prediction was made, **{glue:text}`bw4_verdict_1_none`**; {glue:text}`bw4_step_all:,.0f` with
#    them, **{glue:text}`bw4_verdict_1_all`**, {glue:text}`bw4_refuted_1` the 3,000 that shared
#    memory allows.
# 2. *The pass*: of four ranges {glue:text}`bw4_inside_none:.0f` without the ideas and
#    {glue:text}`bw4_inside_all:.0f` with them. At 2,048 v4 without them makes
#    {glue:text}`bw4_rate_none_2048:.0f` TFLOP/s, so the design was **{glue:text}`bw4_refuted_2`**
#    by its own test; with them {glue:text}`bw4_rate_all_2048:.0f`,
#    {glue:text}`bw4_refuted_2_all` the 430.
# 3. *dP first*: {glue:text}`bw4_dp_1024` % of time with 1,024 tokens, {glue:text}`bw4_dp_512` % on
#    half-full batches of 512, **{glue:text}`bw4_verdict_3`**.
#
# The line leaves {glue:text}`bw4_ends_none:,.0f` and {glue:text}`bw4_ends_all:,.0f` clocks for a
# tile besides its steps, where the notes had said 6,000. {glue:text}`bw4_ends_word` All of this
# assumes one clock rate; the record has no clock of each launch.
#
# ## The surprise: a bound that no count contains
#
# The prediction counts products, instructions and bytes of shared memory, and takes the largest for
# the bound. That is a roofline of a unit, and it is right when there are enough independent chains
# to keep the unit fed. Here are two. In a chain the terms do not compete, they *add*. With
# the six ideas products take {glue:text}`bw4_tensor_all:.0f` % of a step, before
# {glue:text}`bw4_tensor_none:.0f` %. Of what is left no unit can be blamed.
#
# A third math role would be a third chain. It does not fit: dK and dV of 64 keys take 128 registers
# of each thread, and 65,536 are all that an SM has.
#
# The whole ladder, with peers, is in {doc}`results`. With 256 keys or fewer the price
# of dQ stays what it was, and {doc}`v5_short_kv_backward` gets rid of it.
#
# ## Exercises
#
# :::{exercise} Fold hardswish
# :label: ex-bw4-fold
#
# Hardswish is $x \cdot \min(\max(x + 3, 0), 6) / 6$. Which factor of value and
# derivative can be left to the sums? And why would ReLU gain next to nothing? *(paper, ten
# minutes)*
# :::

# %% tags=["remove-cell"]
x = torch.linspace(-5, 5, 1001, dtype=torch.float64, requires_grad=True)
hard = torch.nn.functional.hardswish(x)
(hard_slope,) = torch.autograd.grad(hard.sum(), x)
clamped = torch.clamp(x + 3, 0, 6)
inner_part = (x > -3) & (x < 3)
assert torch.allclose(hard, x * clamped / 6)
assert torch.allclose(hard_slope, torch.where(inner_part, clamped + x, clamped) / 6)

glue("three_roles", (65536 - 128 * 24) // (3 * 128) // 8 * 8)
glue("accumulators", 2 * KEYS * HEAD_DIM // 128)
per_role = KEYS * ROWS // 128
glue("tile_registers", per_role)

# %% [markdown]
# :::{solution} ex-bw4-fold
# :class: dropdown
#
# With $m = \min(\max(x + 3, 0), 6)$ the value is $\tfrac16 x m$ and the derivative
# $\tfrac16 (m + x)$ between -3 and 3 and $\tfrac16 m$ beyond. Both have $\tfrac16$ in common, so it
# can go to the sums, and with it one power of the scale in the value. ReLU has no constant: value
# $x$ or 0, derivative 1 or 0. Only the scale could be left out, one instruction.
# :::
#
# :::{exercise} A third role
# :label: ex-bw4-third
#
# Suppose three math roles of 64 keys and a load role with 24 registers a thread. How many registers
# can a thread of a math role have? What does it need? *(paper, five minutes)*
# :::
#
# :::{solution} ex-bw4-third
# :class: dropdown
#
# {glue:text}`bw4_three_roles:.0f`. dK and dV take {glue:text}`bw4_accumulators:.0f` of them, one
# tile of scores in fp32 {glue:text}`bw4_tile_registers:.0f` more, and S or its slope, dP and dQ are
# never alone: nothing would be left for addresses. Smaller roles, of 32 keys, do not exist: a wgmma
# has 64 rows.
# :::
#
# :::{exercise} The useless product
# :label: ex-bw4-useless
#
# In a copy of the file, let the last step leave the loop before it computes S again, by a branch
# around the product. Compile it. What do you expect of its registers, and of the loop? *(code,
# twenty minutes, no GPU)*
# :::

# %% tags=["remove-cell"]
GUARDED = (
    NEXT,
    "            if now < last:\n    " + NEXT.replace("tl.minimum(now + 1, last)", "now + 1"),
)
try:
    guarded = compile_check.read(built(changed(v4_warp_specialized_backward, GUARDED), Config()))
    glue_word(
        "guarded",
        f"ptxas reports {guarded.spill_bytes} bytes of spills "
        + ("and makes all products wait for each other" if guarded.serialised
           else "and leaves the products as they are"),
    )  # fmt: skip
except Exception as error:  # what the compiler says is the answer
    glue_word("guarded", f"the compiler gives up ({type(error).__name__})")

# %% [markdown]
# :::{solution} ex-bw4-useless
# :class: dropdown
#
# A product under way behind a branch is a result that exists on one path only, and the wait for it
# stands on both. The compiler has to make the accumulator whole where the paths meet. Here:
# {glue:text}`bw4_guarded`.
# :::
#
# ## Takeaways
#
# - Count units first. If none of them is busy, look for a chain, and count how many there are.
# - In a chain every instruction counts, those that move addresses too. Tell the compiler what you
#   know: a number that all threads share is not known to be one.
# - An optimisation can be worth nothing alone and something beside another. Take ideas away one by
#   one as well as adding them.
