# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # One pass, five products: who adds up dQ?
#
# A kernel that owns keys has everything that dQ needs, except dQ's rows. What does it cost to add
# to rows that belong to nobody?
#
# :::{admonition} In this chapter
# - `v2_fused_backward` computes S and dP once, five products instead of
#   {doc}`seven <v1_tiled_backward>`, and takes {glue:text}`five_v2_of_v1_long:.2f` of v1's time on
#   full batches of 1,024 tokens, {glue:text}`five_v2_of_v1_cross:.2f` with 256 keys. Products alone
#   would give {glue:text}`five_count:.2f`.
# - The difference is dQ in fp32: a zero fill, an addition for every 128 keys, a rounding.
#   The same kernel without dQ takes {glue:text}`five_without_long:.0f` and
#   {glue:text}`five_without_cross:.0f` % of the time.
# - Additions by TMA and by the threads themselves are {glue:text}`five_threads_word`.
# - Up to 256 keys the order of additions does not matter at all: two summands commute. With more,
#   {glue:text}`five_differ_long` of the elements of dQ differed between two runs (measured).
# - `v2a_ordered_backward` gives the same bits in every run, for {glue:text}`five_price_long` %
#   of time on the long batch and {glue:text}`five_price_small` % on a small one.
# :::

# %% tags=["remove-cell"]
import inspect
import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
import triton
from IPython.display import Markdown, display

from gdpa_kernels import emulator
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.gdpa import (
    gradients,
    reference,
    v1_tiled_backward,
    v2_fused_backward,
    v2a_ordered_backward,
)
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.measuring import compile_check, testing
from gdpa_kernels.measuring.inputs import cu_seqlens
from gdpa_kernels.measuring.workload import Workload, workload
from gdpa_kernels.report import figures, results
from gdpa_kernels.report.house import INK, RUNG_COLOURS
from gdpa_kernels.report.studies import changed

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
NOTEBOOK = "notebooks/backward/v2_fused_backward.py"
V1, V2, V2A = "v1_tiled_backward", "v2_fused_backward", "v2a_ordered_backward"
GRADIENTS = ("dq", "dk", "dv")
VERDICT = {True: "kept", False: "broken"}


def glue(name: str, value: float) -> None:
    figures.glue_number(f"five_{name}", value)


def glue_word(name: str, value: str) -> None:
    figures.glue_text(f"five_{name}", value)


def code(text: str, language: str = "python") -> Markdown:
    return Markdown(f"```{language}\n{text.rstrip()}\n```")


# %% [markdown]
# ## What stays, what changes
#
# | | {doc}`v1 <v1_tiled_backward>` | v2 | v2a |
# |:--|:--|:--|:--|
# | kernels | one owns keys, one owns queries | one owns keys | the same |
# | launches | two | one | one for some blocks of keys |
# | products of a tile | 4 and 3 | 5 | 5 |
# | dK, dV | written once | the same | the same |
# | dQ | written once, by its owner | added up in fp32, then rounded | the same, in order |
# | copies | cp.async | TMA | TMA |
# | same bits in every run | yes | no, beyond two blocks of keys | yes |
#
# The program of a block of keys has dS in registers, [keys, rows]. v1 multiplies it by Q for dK and
# forgets it; another kernel computes it again, for dQ. v2 multiplies it by K where it is. But a row
# of dQ is a sum over *all* keys, and the programs of its sequence each hold a part of it. So they
# add to memory, at the end of the loop:

# %% tags=["remove-input"]
body = inspect.getsource(v2_fused_backward.fused_kernel.fn)
loop = body[body.index("        dk = tl.dot(ds, q, dk)") : body.index("    if dk_desc is not None")]
code(inspect.cleandoc("\n" + loop))

# %% [markdown]
# The first way is a copy by TMA that adds: the tile goes through shared memory, and the copy engine
# sends it to L2, which adds. The second is an instruction of each thread, `red.global.add.f32`, on
# four elements at a time. Both are atomic for each element; neither says when. The walk over the
# query heads of a key head is one loop with that over their rows, so that copies run ahead across
# heads.

# %% tags=["remove-input"]
Markdown(
    "\n".join(
        (
            f"````{{admonition}} From {V1}.py to {V2}.py: "
            f"{ladder.changed_lines(V2, 'gdpa_backward')} changed lines of code",
            ":class: dropdown",
            "```diff",
            ladder.diff(V2, context=1, operator="gdpa_backward").rstrip(),
            "```",
            "````",
        )
    )
)

# %% tags=["remove-input"]
Markdown(
    "\n".join(
        (
            f"````{{admonition}} From {V2}.py to {V2A}.py: "
            f"{ladder.changed_lines(V2A, 'gdpa_backward')} changed lines of code",
            ":class: dropdown",
            "```diff",
            ladder.diff(V2A, context=1, operator="gdpa_backward").rstrip(),
            "```",
            "````",
        )
    )
)

# %% [markdown]
# ## Counting
#
# Of each element of dQ, v1 writes 2 bytes. v2 fills 4 with zero, adds 4 for each block of 128 keys
# that sees the row, reads 4 and writes 2. The emulator counts what kernels load and store; here for
# one head, 128 rows and 256 keys of dimension 128, in units of q. An addition loads and stores.


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


def emulated(module, given: tuple, schedule="modelled", **more) -> tuple:
    """(gradients, dQ in fp32 before it is rounded or None, reports of the launches) of a rung."""
    with emulator.enabled(schedule=schedule) as reports, launches() as seen:
        found = module.backward(*given, **more)
    rounded = [launch.arguments["sums_ptr"] for launch in seen if launch.name == "round_kernel"]
    return found, rounded[0] if rounded else None, reports


MODULES = {V1: v1_tiled_backward, V2: v2_fused_backward, V2A: v2a_ordered_backward}
one_head = problem((128,), (256,))
unit = one_head[1].q.nbytes
counted = []
for impl, module in MODULES.items():
    _, _, reports = emulated(module, one_head)
    zero = 0 if impl == V1 else 2
    counted += [("zero fill", impl, 0.0, float(zero))] if zero else []
    counted += [(r.kernel, impl, r.bytes_loaded / unit, r.bytes_stored / unit) for r in reports]
counted = pd.DataFrame(counted, columns=["kernel", "rung", "loaded", "stored"])
moved = counted.groupby("rung")[["loaded", "stored"]].sum()
fused = counted.set_index(["rung", "kernel"]).loc[V2, "fused_kernel"]
assert round(fused["loaded"]) == 4 + 4 + 4 and round(fused["stored"]) == 4 + 4
assert round(moved["stored"][V1]) == 5 and round(moved["stored"][V2]) == 11

# %% tags=["remove-input"]
figures.show_table(counted[["rung", "kernel", "loaded", "stored"]].round(2))

# %% tags=["remove-input"]
figures.source(
    "emulated", "bytes that the kernels load and store; the zero fill is PyTorch's, counted by hand"
)

# %% [markdown]
# v1 loads Q and dO in both kernels, twice in the first, once for each block of keys, and K and V
# once in each. v2 has no second kernel, and stores more than twice as much. Not all of that reaches
# memory: L2 has 50 MB (nominal) and adds by itself. Whether a row of dQ is still there when the
# next block of keys comes to it depends on who runs when.
#
# And in time? For the published shapes, beside the five products at the measured rate: what must
# pass through memory, at the rate of a copy, and how fast L2 has to add for the additions to hide
# behind the products:

# %% tags=["remove-cell"]
COUNTED = (
    "gdpa-self-full-256", "gdpa-self-full-512", "gdpa-self-full-1024", "gdpa-self-full-2048",
    "gdpa-self-half-jagged-1024", "gdpa-cross-full-512", "gdpa-cross-full-1024",
    "gdpa-cross-full-2048",
)  # fmt: skip
BLOCK = v2_fused_backward.Config().BLOCK_N
before = results.latest_record(data_dir, notebook="notebooks/forward/results.py", system="h200")
limits = results.ceilings(before)  # this chapter's own record does not exist before it is measured
copy_rate = limits.gbytes_per_s(1, 1)


def elements(given: Workload) -> int:
    """Elements of dQ."""
    return given.total_q * given.num_heads_q * given.head_dim


def additions(given: Workload) -> int:
    """Elements that are added, over all blocks of keys."""
    lengths = zip(given.seqlens_q, given.seqlens_k, strict=True)
    return sum(q * -(-k // BLOCK) for q, k in lengths) * given.num_heads_q * given.head_dim


costs = pd.DataFrame(
    {
        "workload": given.name.removeprefix("gdpa-"),
        "products (ms)": given.flops("backward") / limits.tflops / 1e9,
        "fewest bytes (GB)": given.bytes("backward") / 1e9,
        "zero fill (GB)": 4 * elements(given) / 1e9,
        "rounding reads (GB)": 4 * elements(given) / 1e9,
        "both (ms)": 8 * elements(given) / copy_rate / 1e6,
        "additions (GB)": 4 * additions(given) / 1e9,
        "rate to hide them (TB/s)": 4 * additions(given) * limits.tflops / given.flops("backward"),
    }
    for given in map(workload, COUNTED)
)
by_name = costs.set_index("workload")
share = by_name["both (ms)"] / by_name["products (ms)"]
glue("count", 5 / 7)
glue("share_long", 100 * share["self-full-2048"])
glue("share_256", 100 * share["self-full-256"])
glue("rate_least", by_name["rate to hide them (TB/s)"].min())
glue("rate_most", by_name["rate to hide them (TB/s)"].max())
glue("copy_tb", copy_rate / 1e3)
assert share["self-full-2048"] < 0.2 < share["self-full-256"], "the text"

# %% tags=["remove-input"]
figures.show_table(costs.round(2))

# %% tags=["remove-input"]
figures.save_csv(costs, "gdpa-dq-costs")
figures.source(
    "modelled",
    "bytes by the counts above; rates of a product and a copy: the record of the forward results",
    csv="gdpa-dq-costs",
)

# %% [markdown]
# Zero fill and rounding are {glue:text}`five_share_long:.0f` % of the products' time for 2,048 keys
# and {glue:text}`five_share_256:.0f` % for 256, whatever the number of queries: products grow with
# keys, dQ does not. The additions are {glue:text}`five_rate_least:.1f` to
# {glue:text}`five_rate_most:.1f` TB/s at full speed of the tensor cores; a copy moves
# {glue:text}`five_copy_tb:.1f` TB/s between memory and the SMs, both directions together. Each
# addition is a read and a write inside L2.

# %% tags=["remove-input"]
# | name: fig-five-bytes
# | caption: >
# |   Bytes that one element of dQ costs, by who makes it. v2a with one slice has the bars of v2.
# | alt: >
# |   Horizontal stacked bars. v1 has 2 bytes. v2 has 18 at two blocks of keys and 42 at eight, most
# |   of them additions. v2a with two slices and eight blocks has 58.
PIECES = {
    "zero fill": RUNG_COLOURS[1], "additions": RUNG_COLOURS[3], "sum of slices": RUNG_COLOURS[4],
    "rounding reads": RUNG_COLOURS[0], "written": RUNG_COLOURS[2],
}  # fmt: skip
TWO_SLICES = {"zero fill": 8, "additions": 32, "sum of slices": 12}
BARS = {
    "v1": {"written": 2},
    "v2, 256 keys": {"zero fill": 4, "additions": 8, "rounding reads": 4, "written": 2},
    "v2, 1,024 keys": {"zero fill": 4, "additions": 32, "rounding reads": 4, "written": 2},
    "v2a, 1,024 keys, 2 slices": {**TWO_SLICES, "rounding reads": 4, "written": 2},
}
with figures.style():
    chart, axis = figures.subplots(width=7.6, height=2.8)
    for row, pieces in enumerate(BARS.values()):
        left = 0
        for piece, value in pieces.items():
            axis.barh(row, value, 0.6, left=left, color=PIECES[piece], label=piece)
            left += value
        axis.annotate(f"{left}", (left, row), xytext=(4, 0), textcoords="offset points",
                      va="center")  # fmt: skip
    axis.set_yticks(range(len(BARS)), list(BARS))
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    axis.set_xlabel("bytes for each element of dQ")
    handles = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    axis.legend(handles.values(), handles, loc="upper right", fontsize=8.5)
display(chart)

# %% tags=["remove-input"]
figures.source("modelled", "bytes of an element: the counts of this section")

# %% tags=["remove-cell"]
assert [sum(pieces.values()) for pieces in BARS.values()] == [2, 18, 42, 58]

# %% [markdown]
# ## Predictions
#
# Written on 2026-11-21. A first run without a record had timed v1, v2 in both ways and v2a on full
# batches by then; the parts, the slices, small batches and the bits nobody had looked at.
#
# 1. *The parts alone.* Zero fill and rounding take what their bytes take at the rate of a copy,
#    within 20 %.
# 2. *Without dQ*, four products and nothing to add, v2 takes 60 to 75 % of its time on full batches
#    of 1,024.
# 3. *Stored instead of added*, which is wrong but the same traffic from the SMs, changes the time
#    by less than 5 %: what costs is the way to L2, not the addition in it.
# 4. *Two slices* instead of one cost v2a 8 to 18 % on full batches of 1,024: 16 bytes more for each
#    element, and half of the launches.
# 5. *A small batch*, 8 sequences of 2,048 tokens: with one slice 16 launches of 32 programs on 132
#    SMs, at least twice the time of v2; with the slices that it chooses at most 1.8 times.
# 6. *Bits.* With 256 keys dQ of v2 is the same in every run, with 1,024 it is not, and v2a's always
#    is. Of the elements at 1,024 keys at most as many differ as random orders of eight summands
#    would give, which is simulated below.
#
# ## The order of additions
#
# Addition in floating point is commutative but not associative. dQ begins as 0. With two blocks of
# keys it becomes $(0 + a) + b$ or $(0 + b) + a$, the same number. With three there are
# $(a + b) + c$ and $(a + c) + b$, which round differently. So v2 should be deterministic up to 256
# keys, by no effort of its own.
#
# The emulator runs programs one after another, in the order of their numbers. Any other order is
# legal; we get one by renumbering them, one line of the kernel changed. Over all rotations and the
# reverse, how many elements of the fp32 sums, and of the rounded dQ, differ from those of the plain
# order?


# %%
def in_orders(module, blocks: int) -> list:
    """The module with its programs renumbered: rotated by 1, 2, .., and reversed."""
    line = "    pid = tl.program_id(0)\n"
    other = [f"(tl.program_id(0) + {i}) % tl.num_programs(0)" for i in range(1, blocks)]
    other.append("tl.num_programs(0) - 1 - tl.program_id(0)")
    return [changed(module, (line, f"    pid = {number}\n")) for number in other]


lines = []
for keys in (128, 256, 384, 1024):
    given = problem((256,), (keys,), head_dim=64)
    for impl, module in MODULES.items():
        if impl == V1:
            continue
        (dq, *_), sums, _ = emulated(module, given)
        runs = [emulated(other, given) for other in in_orders(module, -(-keys // 128))]
        fp32 = [(sums != other).float().mean().item() for _, other, _ in runs]
        rounded = [(dq != found[0]).float().mean().item() for found, _, _ in runs]
        lines.append((keys, impl, len(runs), 100 * max(fp32), 1e6 * max(rounded)))
orders = pd.DataFrame(
    lines,
    columns=["keys", "rung", "orders", "fp32 sums that differ (%)", "dQ that differs (ppm)"],
)

# %% tags=["remove-input"]
figures.show_table(orders.round(1))

# %% tags=["remove-input"]
figures.source("emulated", "one sequence of 256 rows, one head of dimension 64")

# %% tags=["remove-cell"]
differs = orders.set_index(["rung", "keys"])["fp32 sums that differ (%)"]
assert (differs[V2A] == 0).all() and (differs[V2][[128, 256]] == 0).all()
assert (differs[V2][[384, 1024]] > 10).all(), "the text: from three blocks on the sums differ"
glue("emulated_384", differs[V2][384])
glue("emulated_1024", differs[V2][1024])

# %% [markdown]
# With two blocks nothing differs, in any order. With three, {glue:text}`five_emulated_384:.0f` % of
# the fp32 sums do, with eight {glue:text}`five_emulated_1024:.0f` %. Rounding to bf16 hides nearly
# all of it: a sum moves by about one unit in its 24th bit, and crosses a boundary between two bf16
# numbers, which lie 65,536 times farther apart, about once in some ten thousand times. How
# often, for eight summands from N(0, 1) in two random orders?

# %%
make = torch.Generator().manual_seed(7)


def summed(parts: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, each column in a random order of its own, then rounded."""
    order = torch.rand(parts.shape, generator=make).argsort(0)
    total = torch.zeros(parts.shape[1])
    for part in parts.gather(0, order):
        total += part
    return total.bfloat16()


drawn, flipped, far = 0, 0, 0
for _ in range(8):
    parts = torch.randn(8, 2**19, generator=make)
    one, two = summed(parts), summed(parts)
    steps = (one.view(torch.int16).int() - two.view(torch.int16).int()).abs()
    drawn, flipped = drawn + steps.numel(), flipped + int((steps > 0).sum())
    far += int((steps > 1).sum())
expected = flipped / drawn
print(f"{flipped} of {drawn:,} differ ({1e6 * expected:.0f} ppm), {far} by more than one step")

# %% tags=["remove-cell"]
assert 1e-6 < expected < 1e-3
glue("simulated_ppm", 1e6 * expected)

# %% [markdown]
# ### An order for everybody: v2a
#
# If no two programs of a launch add to the same element, a launch has no order to lose. v2a gives
# each launch one block of keys of every sequence; launches follow each other. That is v2's work
# with barriers across the whole device. Where a launch would have few programs it takes several
# blocks and gives each a *slice*, a dQ of its own, and PyTorch adds up the slices in a fixed order.
# How many is decided by the shapes of the call alone, so that another GPU makes the same sums:

# %% tags=["remove-input"]
code(inspect.getsource(v2a_ordered_backward.count_slices))

# %% [markdown]
# The published batches have 4,608 programs for a block of keys and get one slice. In the emulator
# above, one head and one sequence, every block had its own.
#
# ## What the compiler made of it


# %% tags=["remove-cell"]
def compiled(module, name: str, **more) -> compile_check.Compiled:
    """The kernel of that name in a call with four heads of 128."""
    with launches(run=False) as seen:
        module.backward(*problem((130,), heads=4, heads_k=4), **more)
    (launch,) = (launch for launch in seen if launch.name == name)
    return compile_check.read(compile_check.build_launch(launch))


LOOKED_AT = (
    ("v1, keys", v1_tiled_backward, "keys_kernel", {}),
    ("v1, queries", v1_tiled_backward, "queries_kernel", {}),
    ("v2, by TMA", v2_fused_backward, "fused_kernel", {}),
    ("v2, by threads", v2_fused_backward, "fused_kernel",
     {"config": v2_fused_backward.Config(by_tma=False)}),
    ("v2 without dQ", v2_fused_backward, "fused_kernel", {"needs": (False, True, True)}),
    ("v2a", v2a_ordered_backward, "ordered_kernel", {}),
)  # fmt: skip
facts = []
for title, module, name, more in LOOKED_AT:
    made = compiled(module, name, **more)
    assert not made.serialised, title
    facts.append(
        {
            "kernel": title, "registers": made.registers, "spilled (bytes)": made.spill_bytes,
            "shared (KB)": made.shared_bytes / 1e3,
            **{n: made.instructions[n] for n in ("HGMMA", "MUFU", "UTMALDG", "UTMAREDG", "REDG")},
        }
    )  # fmt: skip
facts = pd.DataFrame(facts).set_index("kernel")
assert facts["UTMAREDG"]["v2, by TMA"] > 0 == facts["REDG"]["v2, by TMA"]
assert facts["REDG"]["v2, by threads"] > 0 == facts["UTMAREDG"]["v2, by threads"]
assert facts["spilled (bytes)"][["v2, by TMA", "v2a"]].max() == 0
products = facts["HGMMA"]
assert products["v2 without dQ"] < products["v2, by TMA"]
glue("spilled_threads", facts["spilled (bytes)"]["v2, by threads"])
glue("hgmma_v2", products["v2, by TMA"])
glue("hgmma_without", products["v2 without dQ"])
glue("redg", facts["REDG"]["v2, by threads"])

# %% tags=["remove-input"]
figures.show_table(facts.reset_index().round(1))

# %% tags=["remove-input"]
figures.source(
    "modelled", f"ptxas and nvdisasm on kernels compiled for sm_90a, triton {triton.__version__}"
)

# %% [markdown]
# UTMAREDG is the copy that adds. By threads it is {glue:text}`five_redg:.0f` REDG instructions for
# a step, each with an address of its own, and {glue:text}`five_spilled_threads:.0f` bytes of a
# thread's registers no longer fit. `needs` says which gradients are wanted, and the compiler drops
# the rest: without dQ {glue:text}`five_hgmma_without:.0f` of the {glue:text}`five_hgmma_v2:.0f`
# HGMMA are left. That is the kernel of prediction 2.
#
# ## Is it right?
#
# A ragged batch with grouped heads, lengths on both sides of a block, in the emulator, against
# fp64:

# %%
given = problem((0, 1, 63, 65, 130), (3, 0, 128, 129, 257), heads=4, heads_k=2, head_dim=64)
grad_out, batch = given
wide = {name: getattr(batch, name).double() for name in ("q", "k", "v")}
exact = reference.backward(grad_out.double(), replace(batch, **wide))
plain = reference.backward(grad_out, batch)
variants = {
    "v2, by TMA": (v2_fused_backward, v2_fused_backward.Config()),
    "v2, by threads": (v2_fused_backward, v2_fused_backward.Config(by_tma=False)),
    "v2a, 1 slice": (v2a_ordered_backward, v2a_ordered_backward.Config(slices=1)),
    "v2a, 2 slices": (v2a_ordered_backward, v2a_ordered_backward.Config(slices=2)),
}
for title, (module, config) in variants.items():
    found, _, _ = emulated(module, given, config=config)
    shares = []
    for name, actual, right, other in zip(GRADIENTS, found, exact, plain, strict=True):
        error = testing.compare(name=name, actual=actual, expected=right, baseline=other)
        assert error.passed, f"{title}: {error}"
        shares.append(f"{name} {100 * error.max_abs / error.max_abs_budget:.0f} %")
    print(f"{title:15} largest error, share of its budget: {', '.join(shares)}")

# %% [markdown]
# And dQ that was not filled with zeros first? The sums begin with whatever was there:

# %%
hasty = changed(v2_fused_backward, ("q.new_zeros(q.shape", "q.new_full(q.shape, 1e3"))
(dq, *_), _, _ = emulated(hasty, given)
print(testing.compare(name="dq", actual=dq, expected=exact[0], baseline=plain[0]))

# %% tags=["remove-cell"]
assert not testing.compare(name="dq", actual=dq, expected=exact[0], baseline=plain[0]).passed

# %% [markdown]
# And a tile that is stored instead of added? With more than one block of keys the last one wins.
# The emulator does not wait for a wrong number:

# %%
ADD, STORE = "            add_rows(dq_desc,", "            store_rows(dq_desc,"
try:
    emulated(changed(v2_fused_backward, (ADD, STORE)), one_head)
except emulator.Race as error:
    print(re.sub(r"/\S*/(?=[\w-]+\.py:\d)", "", str(error)).replace("; ", ";\n"))
    caught = True

# %% tags=["remove-cell"]
assert caught

# %% [markdown]
# ## Measurement
#
# This cell measures; it runs with `make measure NOTEBOOKS=backward/v2_fused_backward`, on a GPU.
# The variants pass the check before they are timed. The *parts* are timed by the same clock and
# belong to no rung: the zero fill, the rounding, v2 without dQ, and v2 with its tiles stored
# instead of added, whose dQ is wrong on purpose. At last every variant runs
# {glue:text}`five_runs:.0f` times on the same inputs, and its gradients are compared with those of
# its first run, bit by bit.

# %% tags=["hide-input"]
LONG, CROSS = "gdpa-self-full-1024", "gdpa-cross-full-2048"
SMALL = replace(workload("gdpa-self-full-2048"), name="gdpa-self-full-2048-batch8", batch=8)
SLICES = {LONG: (1, 2, 4), CROSS: (1, 2), SMALL.name: (1, 4, 16)}
RUNS = 5


def slices_label(count: int) -> str:
    return f"{count} slice{'s' * (count > 1)}"


def listed(name: str) -> list[tuple]:
    """(rung, variant, options) to be timed on a workload."""
    ordered = [
        (V2A, slices_label(n), {"config": v2a_ordered_backward.Config(slices=n)})
        for n in SLICES[name]
    ]
    return [
        (V1, "default", {}),
        (V2, "by TMA", {"config": v2_fused_backward.Config()}),
        (V2, "by threads", {"config": v2_fused_backward.Config(by_tma=False)}),
        *ordered,
    ]


if mode == "measure":
    from gdpa_kernels.calling.launch import launch
    from gdpa_kernels.measuring import record, timing
    from gdpa_kernels.measuring.inputs import make_inputs
    from gdpa_kernels.measuring.session import Session

    session = Session(NOTEBOOK, device)
    stored = changed(v2_fused_backward, (ADD, STORE))
    samples, bits = {}, []
    for given in (workload(LONG), workload(CROSS), SMALL):
        session.measure(given, listed(given.name), direction="backward")
        inputs = make_inputs(given, device=session.device)
        batch, q, grad = inputs.batch(), inputs.q, inputs.grad_out
        sums, dq = q.new_zeros(q.shape, dtype=torch.float32), torch.empty_like(q)
        factor = batch.scale * batch.output_scale

        def zero(q=q):
            return q.new_zeros(q.shape, dtype=torch.float32)

        def rounding(sums=sums, dq=dq, factor=factor):
            programs = triton.cdiv(dq.numel(), 4096)
            launch(
                gradients.round_kernel, (programs,), dq.device, sums, dq, factor, dq.numel(),
                BLOCK=4096,
            )  # fmt: skip

        def without(grad=grad, batch=batch):
            return v2_fused_backward.backward(grad, batch, needs=(False, True, True))

        def wrongly(grad=grad, batch=batch):
            return stored.backward(grad, batch)

        parts = {"zero fill": zero, "rounding": rounding, "without dQ": without, "stored": wrongly}
        timed = timing.sample_kernels(parts, session.device, session.protocol)
        samples |= {(given.name, part): times for part, times in timed.items()}
        del sums, dq, parts, zero, rounding
        for impl, variant, options in listed(given.name):
            module = MODULES[impl]
            first = [g.clone() for g in module.backward(grad, batch, **options)]
            for run in range(1, RUNS):
                again = module.backward(grad, batch, **options)
                for name, one, two in zip(GRADIENTS, first, again, strict=True):
                    pieces = zip(one.split(2**16), two.split(2**16), strict=True)
                    most = max(float((a.float() - b.float()).abs().max()) for a, b in pieces)
                    count = int((one != two).sum())
                    bits.append((given.name, impl, variant, name, run, count, one.numel(), most))
            del first, again, one, two
    session.tabulate("parts", ("workload", "part"), samples)
    session.tables["bits"] = record.Table(
        ("workload", "impl", "variant", "gradient", "run", "different", "elements", "most_apart"),
        bits,
    )
    print(session.write(data_dir))

# %% tags=["remove-cell"]
TITLES = {LONG: "self, full, 1,024", CROSS: "cross, 2,048 on 256 keys", SMALL.name: "8 x 2,048"}
run_record = results.latest_record(data_dir, notebook=NOTEBOOK, system="h200")
limits = results.ceilings(run_record)
copy_rate = limits.gbytes_per_s(1, 1)
GIVEN = {name: run_record.workload(name) for name in SLICES}
everything = results.table(data_dir, system="h200", latest=False)
own = everything[(everything["record"] == run_record.id) & (everything["scope"] == "kernel")]
own = own.drop_duplicates(["workload", "impl", "variant"])
failed = own[own["failure"] != ""]
passed = own[own["failure"] == ""]
assert passed["correct"].astype(bool).all(), "timed without a passed check"
time = passed.set_index(["workload", "impl", "variant"])["time_us_p50"]
for name in SLICES:
    missing = [e[:2] for e in listed(name) if (name, *e[:2]) not in time.index]
    assert not missing, f"the record lacks {missing} on {name}"
parts = results.notebook_table(run_record, "parts")
part = parts.groupby(["workload", "part"])["time_us"].median()
bits = results.notebook_table(run_record, "bits")
glue("runs", RUNS)
glue("checked", len(passed))


def of(name: str, impl: str, variant: str) -> float:
    return float(time[name, impl, variant])


base = {name: of(name, V2, "by TMA") for name in SLICES}
v2_of_v1 = {name: base[name] / of(name, V1, "default") for name in SLICES}
threads = {name: of(name, V2, "by threads") / base[name] for name in SLICES}
without = {name: part[name, "without dQ"] / base[name] for name in SLICES}
stored_of = {name: part[name, "stored"] / base[name] for name in SLICES}
one_slice = {name: of(name, V2A, "1 slice") / base[name] for name in SLICES}
chosen_slices = {
    name: v2a_ordered_backward.count_slices(
        given.num_heads_k * given.batch, -(-given.max_seqlen_k // BLOCK), 4 * elements(given)
    )
    for name, given in GIVEN.items()
}
assert chosen_slices[LONG] == chosen_slices[CROSS] == 1 < chosen_slices[SMALL.name]
assert chosen_slices[SMALL.name] in SLICES[SMALL.name], "the text: the default is among them"
ordered = {name: of(name, V2A, slices_label(chosen_slices[name])) / base[name] for name in SLICES}
for key, name in (("long", LONG), ("cross", CROSS), ("small", SMALL.name)):
    glue(f"v2_of_v1_{key}", v2_of_v1[name])
    glue(f"without_{key}", 100 * without[name])
    glue_word(f"stored_{key}", f"{100 * (stored_of[name] - 1):+.1f}")
    glue_word(f"threads_{key}", f"{100 * (threads[name] - 1):+.1f}")
    glue_word(f"price_{key}", f"{100 * (ordered[name] - 1):+.0f}")
    glue(f"ordered_{key}", ordered[name])
    glue(f"one_slice_{key}", one_slice[name])
big = {LONG: threads[LONG], CROSS: threads[CROSS]}
glue_word(
    "threads_word",
    "level on both long batches, within 3 %" if max(abs(r - 1) for r in big.values()) <= 0.03
    else "not the same: by threads the time changes by "
    + " and ".join(f"{100 * (r - 1):+.1f} % ({TITLES[n]})" for n, r in big.items()),
)  # fmt: skip
two_slices = of(LONG, V2A, "2 slices") / of(LONG, V2A, "1 slice") - 1
glue_word("two_slices", f"{100 * two_slices:+.1f}")
glue("small_slices", chosen_slices[SMALL.name])
alone = {
    (name, what): part[name, what] / (size * elements(GIVEN[name]) / copy_rate / 1e3)
    for name in (LONG, CROSS)
    for what, size in (("zero fill", 4), ("rounding", 6))
}
glue("alone_least", min(alone.values()))
glue("alone_most", max(alone.values()))
glue_word("verdict_1", VERDICT[all(abs(r - 1) <= 0.2 for r in alone.values())])
glue_word("verdict_2", VERDICT[0.60 <= without[LONG] <= 0.75])
glue_word("verdict_3", VERDICT[all(abs(stored_of[n] - 1) < 0.05 for n in (LONG, CROSS))])
glue_word("verdict_4", VERDICT[0.08 <= two_slices <= 0.18])
glue_word("verdict_5", VERDICT[one_slice[SMALL.name] >= 2 and ordered[SMALL.name] <= 1.8])

share_of = bits.assign(share=bits["different"] / bits["elements"])
most = share_of.groupby(["workload", "impl", "variant", "gradient"])["share"].max()
apart = share_of.groupby(["workload", "impl", "variant", "gradient"])["most_apart"].max()


def same(name: str, impl: str, gradient: str = "dq") -> bool:
    """Whether all runs of all variants of a rung had the same bits."""
    return bool((most[name, impl].xs(gradient, level="gradient") == 0).all())


two_blocks_same, long_same = same(CROSS, V2), same(LONG, V2)
ordered_same = all(same(name, V2A, g) for name in SLICES for g in GRADIENTS)
others_same = all(same(name, V2, g) for name in SLICES for g in ("dk", "dv"))
differ_long = most[LONG, V2].xs("dq", level="gradient").max()
kept_6 = two_blocks_same and not long_same and ordered_same and differ_long <= expected
glue_word("verdict_6", VERDICT[kept_6])
glue_word("differ_long", f"{1e6 * differ_long:.3g} in a million")
apart_long = apart[LONG, V2].xs("dq", level="gradient").max()
errors = {(r.workload, r.impl, r.variant): r.error for r in run_record.rows if r.error}
error_long = errors[LONG, V2, "by TMA"]
glue("apart_long", apart_long)
glue("error_long", error_long.max_abs)
glue_word("two_blocks", "no bit of dQ differed" if two_blocks_same else "dQ differed all the same")
glue_word("ordered_bits", "none" if ordered_same else "some, which it must not")
glue_word("dk_dv", "never differed" if others_same else "differed too, which they must not")
assert ordered_same and others_same, "v2a, and dK and dV of v2, are documented as deterministic"

# %% tags=["remove-input"]
# | name: fig-five-variants
# | caption: >
# |   Time of the pass, three ways of making dQ. Filled: whole passes that passed the check. Hollow:
# |   parts, and v2 with one thing left out. Line: v2 by TMA.
# | alt: >
# |   Three small bar charts, one for each workload, with a bar for each variant of v1, v2 and v2a
# |   and hollow bars for v2 stored instead of added, v2 without dQ, rounding and zero fill. Their
# |   lengths are in the table below.
with figures.style():
    chart, axes = figures.subplots(1, 3, width=9.0, height=3.8)
    for axis, name in zip(axes, SLICES, strict=True):
        bars = [
            (f"{impl.split('_')[0]}, {variant}".replace(", default", ""),
             of(name, impl, variant), figures.colour(impl), True)
            for impl, variant, _ in listed(name)
        ]  # fmt: skip
        bars += [
            (what, part[name, what], INK, False)
            for what in ("stored", "without dQ", "rounding", "zero fill")
        ]
        for row, (_, us, shade, whole) in enumerate(bars):
            axis.barh(row, us / 1e3, 0.65, color=shade if whole else "none", edgecolor=shade)
        axis.axvline(base[name] / 1e3, color=INK, linewidth=1)
        axis.set_yticks(range(len(bars)), [bar[0] for bar in bars])
        axis.invert_yaxis()
        axis.grid(visible=False, axis="y")
        axis.set_title(TITLES[name])
        axis.set_xlabel("time (ms)")
display(chart)

# %% tags=["remove-input"]
figures.save_csv(own, "gdpa-five-variants")
figures.provenance(own, csv="gdpa-five-variants", data_dir=Path(data_dir))

# %% tags=["remove-input"]
figures.show_table(
    pd.DataFrame(
        [
            {
                "workload": TITLES[name], "what": what, "time (ms)": us / 1e3,
                "of v2 by TMA": us / base[name],
            }
            for name in SLICES
            for what, us in [
                *((f"{i.split('_')[0]}, {v}", of(name, i, v)) for i, v, _ in listed(name)),
                *((w, part[name, w]) for w in ("stored", "without dQ", "rounding", "zero fill")),
            ]
        ]
    ).round(3)
)  # fmt: skip

# %% tags=["remove-input"]
if len(failed):
    display(figures.show_table(failed[["workload", "impl", "variant", "failure"]]))

# %% [markdown]
# All {glue:text}`five_checked:.0f` variants with a time passed the check. The whole ladder, with
# peers and all published shapes, is in {doc}`results`.
#
# 1. *The parts alone* take {glue:text}`five_alone_least:.2f` to {glue:text}`five_alone_most:.2f`
#    times what their bytes take at the rate of a copy. **{glue:text}`five_verdict_1`**.
# 2. *Without dQ* v2 takes {glue:text}`five_without_long:.0f` % of its time on full batches of
#    1,024, **{glue:text}`five_verdict_2`**, and {glue:text}`five_without_cross:.0f` % with 256
#    keys.
# 3. *Stored instead of added*: {glue:text}`five_stored_long` % on the long batch,
#    {glue:text}`five_stored_cross` % with 256 keys. **{glue:text}`five_verdict_3`**.
# 4. *Two slices*: {glue:text}`five_two_slices` % against one. **{glue:text}`five_verdict_4`**.
# 5. *A small batch*: one slice takes {glue:text}`five_one_slice_small:.2f` times v2's time, the
#    {glue:text}`five_small_slices:.0f` slices that it chooses {glue:text}`five_ordered_small:.2f`
#    times. **{glue:text}`five_verdict_5`**.
# 6. *Bits*: below. **{glue:text}`five_verdict_6`**.
#
# By threads instead of by TMA: {glue:text}`five_threads_long` % on the long batch,
# {glue:text}`five_threads_cross` % with 256 keys, {glue:text}`five_threads_small` % on the small
# batch. The copy engine saves instructions and registers, but additions are additions, whoever
# sends them.
#
# ## Where the time of dQ goes

# %% tags=["remove-cell"]
FIFTH = 1 / 5


def split_of(name: str) -> dict[str, float]:
    """v2's time in ms: what is left without dQ, its fixed passes, and the rest."""
    fixed = part[name, "zero fill"] + part[name, "rounding"]
    rest = base[name] - part[name, "without dQ"] - fixed
    product = FIFTH * GIVEN[name].flops("backward") / limits.tflops / 1e6
    return {
        "v2 (ms)": base[name] / 1e3,
        "without dQ (ms)": part[name, "without dQ"] / 1e3,
        "zero fill and rounding (ms)": fixed / 1e3,
        "the rest (ms)": rest / 1e3,
        "fifth product at best (ms)": product / 1e3,
        "additions over the rest (TB/s)": 4 * additions(GIVEN[name]) / 1e6 / max(rest, 1e-3),
    }


split = pd.DataFrame({"workload": TITLES[name], **split_of(name)} for name in (LONG, CROSS))
at = split.set_index("workload")
for key, name in (("long", LONG), ("cross", CROSS)):
    row = at.loc[TITLES[name]]
    glue(f"fixed_{key}", 100 * row["zero fill and rounding (ms)"] / row["v2 (ms)"])
    glue(f"rest_{key}", 100 * row["the rest (ms)"] / row["v2 (ms)"])
    glue(f"product_{key}", row["fifth product at best (ms)"] / row["the rest (ms)"])
glue_word(
    "more_than_product",
    "so most of it is the way to L2 and what waits for it"
    if at["fifth product at best (ms)"].div(at["the rest (ms)"]).max() < 0.5
    else "which leaves the additions no more than a part of it",
)

# %% tags=["remove-input"]
figures.show_table(split.round(2))

# %% tags=["remove-input"]
figures.provenance(own, data_dir=Path(data_dir))

# %% [markdown]
# Zero fill and rounding are {glue:text}`five_fixed_long:.0f` % of v2's time on the long batch and
# {glue:text}`five_fixed_cross:.0f` % with 256 keys. *The rest*, {glue:text}`five_rest_long:.0f` and
# {glue:text}`five_rest_cross:.0f` %, is the fifth product with its additions. The product alone, at
# the rate of large matrix products, would be {glue:text}`five_product_long:.2f` and
# {glue:text}`five_product_cross:.2f` of that, {glue:text}`five_more_than_product`. v4 lets the
# additions run beside the products of the next step ({doc}`v4_warp_specialized_backward`); v5 makes
# them superfluous ({doc}`v5_short_kv_backward`).
#
# ## The surprise: bits
#
# {glue:text}`five_runs:.0f` runs each, on the same inputs:

# %% tags=["remove-input"]
figures.show_table(
    pd.DataFrame(
        {
            "workload": TITLES[name], "rung": impl.split("_")[0], "variant": variant,
            "gradient": gradient, "elements that differ (ppm)": 1e6 * value,
            "most apart": apart[name, impl, variant, gradient],
        }
        for (name, impl, variant, gradient), value in most.items()
        if gradient == "dq"
    ).round(4)
)  # fmt: skip

# %% tags=["remove-input"]
figures.provenance([run_record.id], data_dir=Path(data_dir))

# %% [markdown]
# With two blocks of keys {glue:text}`five_two_blocks`, in any run of v2. With eight
# {glue:text}`five_differ_long` did, where random orders would give
# {glue:text}`five_simulated_ppm:.0f` in a million (simulated). Of v2a's
# {glue:text}`five_ordered_bits` did. dK and dV of v2 {glue:text}`five_dk_dv`.
#
# Two runs of v2 are at most {glue:text}`five_apart_long:.2g` apart. Both are up to
# {glue:text}`five_error_long:.2g` from the exact gradient. So the spread is no question of
# accuracy. It is one of debugging: a training run that cannot be repeated bit by bit cannot be
# bisected. The price of the other choice is {glue:text}`five_price_long` % on the long batch,
# {glue:text}`five_price_cross` % with 256 keys, where it buys nothing, and
# {glue:text}`five_price_small` % on the small batch.
#
# ## Exercises
#
# :::{exercise} Three blocks
# :label: ex-five-three
#
# With two blocks of keys there is one result, whatever the order. How many different results can
# three blocks give at most, how many eight? *(paper, ten minutes)*
# :::

# %% tags=["remove-cell"]
# Sequential sums that begin with a commuting pair: orders of n summands over 2.
hard = torch.tensor([1.0, 2.0**-24, 2.0**-24 * 1.5])
outcomes = set()
for order in itertools.permutations(range(3)):
    total = torch.zeros(())
    for i in order:
        total = total + hard[i]
    outcomes.add(total.item())
assert 1 < len(outcomes) <= math.factorial(3) // 2
glue("orders_8", math.factorial(8) // 2)

# Adding in bf16, against fp32 sums that are rounded once.
make = torch.Generator().manual_seed(11)


def narrow_over_wide(blocks: int) -> float:
    """RMS error of sums of `blocks` summands from N(0, 1): rounded to bf16 at each addition, over
    that of one rounding."""
    summands = torch.randn(blocks, 2**18, generator=make)
    right = summands.double().sum(0)
    narrow = torch.zeros(2**18, dtype=torch.bfloat16)
    for line in summands:
        narrow = (narrow.float() + line.bfloat16().float()).bfloat16()
    wide = summands.sum(0).bfloat16()
    errors = [(x.double() - right).square().mean() for x in (narrow, wide)]
    return math.sqrt(errors[0] / errors[1])


narrow = {blocks: narrow_over_wide(blocks) for blocks in (2, 8, 16)}
for blocks, value in narrow.items():
    glue(f"narrow_{blocks}", value)
assert 1 < narrow[2] < narrow[8] < narrow[16]

# An fp32 dQ beside what a layer holds.
given = workload("gdpa-self-full-2048")
glue("dq_gb", 4 * elements(given) / 2**30)
glue("slices_gb", 4 * 4 * elements(given) / 2**30)

# %% [markdown]
# :::{solution} ex-five-three
# :class: dropdown
#
# Three: the first two summands commute, so of the 3! orders two at a time agree, and it only
# matters which block comes last. In general n!/2, for eight {glue:text}`five_orders_8:,.0f`. Most
# of them round to the same few numbers.
# :::
#
# :::{exercise} No fp32 at all
# :label: ex-five-bf16
#
# The published kernel adds into dQ in bf16 {cite}`adsmodelkernellibrary`, which saves the rounding
# pass and half of the additions' bytes. Simulate eight summands from N(0, 1): by what factor does
# the root mean square error of the sum grow, against fp32 sums that are rounded once? *(code, ten
# minutes, no GPU)*
# :::
#
# :::{solution} ex-five-bf16
# :class: dropdown
#
# By {glue:text}`five_narrow_8:.1f`: each summand and each sum on the way is rounded to eight bits.
# With two blocks of keys it is {glue:text}`five_narrow_2:.1f`, with sixteen
# {glue:text}`five_narrow_16:.1f`. And up to two blocks the order still does not matter.
# :::
#
# :::{exercise} When is v1 the better choice?
# :label: ex-five-memory
#
# How many GB does the fp32 dQ of full batches of 2,048 tokens take, and how many would four slices?
# Name two situations in which seven products are better than five. *(paper, five minutes)*
# :::
#
# :::{solution} ex-five-memory
# :class: dropdown
#
# {glue:text}`five_dq_gb:.1f` GiB, with four slices {glue:text}`five_slices_gb:.1f`. v1 wins where
# memory is short; and where the same bits are wanted with few programs, so that v2a needs many
# launches or many slices. v1 also takes what v2 does not: fp32, other strides, head_dim 256.
# :::
#
# ## Takeaways
#
# - A sum whose parts live in different programs has a price in bytes: a zero fill, an addition for
#   each part, a rounding. Count them before counting products.
# - Products grow with keys, dQ does not. The fewer keys, the more of the pass is dQ.
# - Not deterministic begins at three summands. Two commute.
