# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # v2: all heads of a block
#
# What does a kernel gain when its programs walk from head to head and from block to block, and the
# copy engine does the addressing?
#
# :::{admonition} In this chapter
# - The prediction was less time than {doc}`v1 <v1_one_tile>` needs. That is
#   **{glue:text}`slab_verdict_1`**. Forward, the best of {glue:text}`slab_variants:.0f` variants of
#   v2 runs at {glue:text}`slab_best_forward_128:.0f` % of a copy at head_dim 128 and
#   {glue:text}`slab_best_forward_64:.0f` % at 64, v1 at {glue:text}`slab_v1_forward_128:.0f` and
#   {glue:text}`slab_v1_forward_64:.0f` %. Backward: {glue:text}`slab_best_backward_128:.0f` and
#   {glue:text}`slab_best_backward_64:.0f` %, v1 {glue:text}`slab_v1_backward_128:.0f` and
#   {glue:text}`slab_v1_backward_64:.0f` %.
# - With `num_stages=2` or 3 a program has two heads' tiles in shared memory and none on the way
#   while it computes. The copies for a head are asked for after the results of the one before have
#   left. It takes 5 stages to ask a head earlier.
# - A slab is contiguous in memory. Walked head after head, by all programs at the same time, it is
#   not contiguous in time.
# :::

# %% tags=["remove-cell"]
import inspect
import math
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
import triton
from IPython.display import Markdown, display

from gdpa_kernels import emulator
from gdpa_kernels.block_attention import reference, v1_one_tile, v2_slab
from gdpa_kernels.block_attention.batch import Batch
from gdpa_kernels.block_attention.v2_slab import Config
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.device import ragged
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
IMPL, BEFORE, BLOCK = "v2_slab", "v1_one_tile", 64
NAMES = {128: "block-fill70-2000", 64: "block-fill70-2000-d64"}
DIRECTIONS = ("forward", "backward")
SHAPES = [(direction, head_dim) for direction in DIRECTIONS for head_dim in NAMES]
VERDICT = {True: "kept", False: "broken"}


def glue(name: str, value: float) -> None:
    figures.glue_number(f"slab_{name}", value)


def glue_word(name: str, value: str) -> None:
    figures.glue_text(f"slab_{name}", value)


def code(text: str, language: str = "python") -> Markdown:
    return Markdown(f"```{language}\n{text.rstrip()}\n```")


def docstring_tables(module) -> list[str]:
    """The Markdown tables of a module's docstring: roles, barriers."""
    return re.findall(r"(?:^\|.*\n)+", inspect.getdoc(module) + "\n", flags=re.MULTILINE)


# %% [markdown]
# ## What stays, what changes
#
# | | {doc}`v1 <v1_one_tile>` | v2 |
# |:--|:--|:--|
# | work of a program | one block of one head | all heads of a block, then another block |
# | programs | as many as there is work, short | as few as one likes, long |
# | data path | every thread computes pointers and masks | one thread asks for a tile, TMA |
# | synchronisation | none but the end of a program | barriers made by the compiler |
# | arithmetic | | the same |
#
# The bytes are the same as well: four tensors forward, seven backward ({doc}`counting_bytes`).
#
# ## A slab
#
# The tensors are `[total, num_heads, head_dim]`: the heads of a token lie side by side. The tile of
# one head is {glue:text}`slab_tile_rows:.0f` pieces of {glue:text}`slab_piece:.0f` bytes (head_dim
# 128, bf16), {glue:text}`slab_stride:,.0f` bytes apart. The tiles of all four heads together, a
# *slab*, are {glue:text}`slab_slab:,.0f` bytes without a gap. So v2 gives slabs to its programs.
# Slab $p$, $p + P$, $p + 2P$, ... belong to program $p$ of $P$; one step of a program is one head
# of one slab.

# %% tags=["remove-cell"]
glue("tile_rows", BLOCK)
glue("piece", 2 * 128)
glue("stride", 2 * 128 * 4)
glue("slab", 2 * 128 * 4 * BLOCK)

# %% tags=["remove-input"]
# | name: fig-slab-order
# | caption: >
# |   Twelve programs that run at the same time, on four heads (rows) and sixteen blocks (columns).
# |   The number is the step in which a tile is worked on; the dark tiles are those of the first
# |   step.
# | alt: >
# |   Three grids of four by sixteen tiles. In the first the dark tiles are the first twelve of the
# |   top row. In the second they fill three columns of four. In the third they are again twelve of
# |   the top row, and the rows below follow in steps two, three and four.
HEADS, BLOCKS, TOGETHER = 4, 16, 12
ORDERS = {
    "v1, blocks follow": lambda block, head: (head * BLOCKS + block) // TOGETHER,
    "v1, heads follow": lambda block, head: (block * HEADS + head) // TOGETHER,
    "v2, slabs": lambda block, head: block // TOGETHER * HEADS + head,
}
with figures.style():
    chart, axes = figures.subplots(3, 1, width=6.6, height=4.6, sharex=True, sharey=True)
    for axis, (title, order) in zip(axes, ORDERS.items(), strict=True):
        shown = figures.colour(IMPL if title.startswith("v2") else BEFORE)
        for head in range(HEADS):
            for block in range(BLOCKS):
                step = order(block, head)
                axis.barh(
                    head, 0.94, 0.9, left=block, color=shown, alpha=1.0 if step == 0 else 0.25,
                    linewidth=0,
                )  # fmt: skip
                axis.annotate(
                    str(step + 1), (block + 0.47, head), ha="center", va="center",
                    color="white" if step == 0 else INK,
                )  # fmt: skip
        axis.set_title(title)
        axis.set_ylim(HEADS - 0.4, -0.6)
        axis.set_yticks(range(HEADS))
        axis.tick_params(axis="both", length=0)
        axis.grid(visible=False)
        axis.set_ylabel("head")
    axes[-1].set_xlabel("block")
display(chart)

# %% tags=["remove-input"]
figures.source("modelled", "the orders of v1_one_tile.place and v2_slab.place, programs in step")

# %% [markdown]
# The picture holds a doubt already. In memory a column is a contiguous piece. In the third grid
# the programs own columns, but in any one step they stand in one row, as in the first.
#
# ## One descriptor for every block
#
# A block of a sequence may be cut short, and the rows behind it belong to somebody else. The
# descriptors are those of {doc}`../forward/v2_tma`: five dimensions, of which one is clipped at a
# bound that the last row of *every* block is put at, and two lead the address back, one of them by
# way of the wrap-around at $2^{64}$. Here the box is 64 rows of one head, and the coordinates
# follow from two numbers of the block list, `first_row` and `rows`. For a block of 3 rows at row
# 128, head 1:

# %% tags=["remove-input"]
first_row, rows, head = 128, 3, 1
BOUND = ragged.BOUND.value
figures.show_table(
    pd.DataFrame(
        [
            ("wrap", "2^30", f"{BOUND:,}", "leads the address back"),
            ("end", "first_row + rows", f"{first_row + rows:,}", "the row where the block ends"),
            ("head", "head", f"{head}", "which of the heads"),
            ("row", "2^30 - rows", f"{BOUND - rows:,}", f"clipped at 2^30: after {rows} rows"),
            ("column", "0", "0", "head_dim columns"),
        ],
        columns=["dimension", "coordinate", "here", "what it does"],
    )
)

# %% tags=["remove-input"]
code(inspect.getsource(ragged.load_rows.fn) + "\n\n" + inspect.getsource(v2_slab.place.fn))

# %% [markdown]
# One descriptor for each tensor serves all blocks, all heads and, with the same coordinates, the
# stores. No thread computes a pointer or a mask.
#
# ## Prediction
#
# Three promises, written before the kernel had run:
#
# > The heads of a token lie side by side, so a slab [64, num_heads * head_dim] is contiguous
# > memory, and its rows of sin and cos come from memory once: the other heads find them in cache. A
# > program of v1 has loads in flight only until its products start; here they are in flight all the
# > time. TMA needs no pointers and no masks: the registers go to the tiles.
#
# 1. So v2 should take less time than v1, in both directions and at both sizes of a head. It is kept
#    if the best variant does so by more than the 3 % that runs differ by, in all four cases.
#
# The other predictions of this chapter come from what the compiler made of the kernel.
#
# ## What changed in the code
#
# The loop of the forward kernel. `load_rows` and `store_rows` are TMA, `tl.range` is asked for
# `num_stages` stages:

# %% tags=["remove-input"]
body = inspect.getsource(v2_slab.forward_kernel.fn)
code(inspect.cleandoc("\n" + body[body.index("    for step in tl.range") :]))

# %% tags=["remove-input"]
Markdown("\n".join(docstring_tables(v2_slab)))

# %% tags=["remove-input"]
Markdown(
    "\n".join(
        (
            f"````{{admonition}} From v1_one_tile.py to v2_slab.py: "
            f"{ladder.changed_lines(IMPL, 'block_attention')} changed lines of code",
            ":class: dropdown",
            "```diff",
            ladder.diff(IMPL, context=1, operator="block_attention").rstrip(),
            "```",
            "````",
        )
    )
)

# %% [markdown]
# ## What the compiler made of it
#
# Nothing below has run: both kernels are compiled for sm_90a when this page is built. First the
# order of things in the loop, from Triton's own intermediate form. *ask* is the start of a TMA
# copy, *here* the wait for tiles, *stored* the wait until a TMA store has read shared memory,
# *list* a load from the block list.


# %% tags=["remove-cell"]
def blank(head_dim: int) -> Batch:
    """One sequence of four heads, with nothing in it."""
    q = torch.zeros(BLOCK + 3, 4, head_dim, dtype=torch.bfloat16)
    return Batch(q, q, q, cu_seqlens((len(q),), "cpu"), head_dim**-0.5)


def built(module, direction: str, head_dim: int, config):
    """The kernel of a launch on four heads, compiled for sm_90a."""
    batch = blank(head_dim)
    options = {"config": config, "schedule": (torch.zeros(3, 2, dtype=torch.int32),)}
    with launches(run=False) as seen:
        if direction == "forward":
            module.forward(batch, **options)
        else:
            module.backward(batch.q, batch, **options)
    (only,) = seen
    return compile_check.build_launch(only)


STEPS = (
    (r"async_tma_copy_global_to_local %(\w)", "ask "),
    (r"async_tma_copy_local_to_global", "store"),
    (r"async_tma_store_token_wait", "stored"),
    (r"ttng\.wait_barrier", "here"),
    (r"ttng\.warp_group_dot ", "product"),
    (r"tt\.load|ttg\.async_copy_global_to_local", "list"),
)


def order_of(text: str) -> list[str]:
    """What a piece of Triton's GPU IR asks for, waits for and computes, in program order."""
    steps = []
    for line in text.splitlines():
        for pattern, name in STEPS:
            if found := re.search(pattern, line):
                steps.append(name + (found[1] if found.groups() else ""))
                break
    return steps


def loop_of(made) -> tuple[list[str], int, int]:
    """(the loop's steps; copies of q asked for before the loop; tiles of q that have room)."""
    text = made.asm["ttgir"]
    start = text.index("scf.for ")
    head_dim = re.search(r"tensordesc<tensor<1x1x1x64x(\d+)xbf16", text)[1]
    room = re.findall(rf"memdesc<(\d+)x64x{head_dim}xbf16", text[:start])
    before = sum("global_to_local %q_desc" in line for line in text[:start].splitlines())
    return order_of(text[start:]), before, max(map(int, room), default=1)


SHOWN = (1, 2, 3, 5)
builds = {n: built(v2_slab, "forward", 128, Config(num_stages=n)) for n in SHOWN}
orders, ahead, room = ({n: loop_of(made)[i] for n, made in builds.items()} for i in range(3))
for n in SHOWN[1:]:
    assert orders[n][0] == "here", "the text: the loop begins with the wait for tiles"
    assert min(i for i, s in enumerate(orders[n]) if s.startswith("ask")) > orders[n].index(
        "stored"
    ), "the text: the copies are asked for after the store"
assert orders[1][orders[1].index("ask q") + 1] == "here", "the text: one stage waits tile by tile"
assert [ahead[n] for n in SHOWN] == [0, 1, 1, 2] and [room[n] for n in SHOWN] == [1, 2, 2, 3]
glue("ahead_5", ahead[5] - 1)
for n in SHOWN[1:]:
    glue(f"room_{n}", room[n])

# %% tags=["remove-input"]
code("\n".join(f"num_stages={n}  {' | '.join(steps)}" for n, steps in orders.items()), "text")

# %% tags=["remove-input"]
figures.source(
    "modelled", f"Triton's GPU IR of the forward loop at head_dim 128, triton {triton.__version__}"
)

# %% [markdown]
# - *One stage* asks for q and waits for it, then for k, then for v: three latencies in a row.
# - *Two stages* ask for the three tiles together, one head ahead, and there is room for
#   {glue:text}`slab_room_2:.0f` of each. But look where: at the **end** of the loop, after the
#   store of this head has been waited for. The next thing that the loop does is to wait for them.
#   While the program multiplies, nothing is on the way.
# - *Three stages* have room for {glue:text}`slab_room_3:.0f` tiles as well. The address of a tile
#   depends on a load from the block list, so there are two loads to be run ahead, one behind the
#   other, and the compiler shares the stages between them. The third one goes to the list.
# - *Five stages* are the first to ask two heads ahead: with room for {glue:text}`slab_room_5:.0f`
#   tiles, {glue:text}`slab_ahead_5:.0f` head is on the way while another is computed.
#
# The machine code has the same order. From the loop with three stages, backward:

# %% tags=["remove-cell"]
MACHINE = {
    "UTMALDG": "ask", "UTMASTG": "store", "SYNCS.PHASECHK": "here", "HGMMA": "product",
    "MUFU.EX2": "exp2", "LDG": "list",
}  # fmt: skip


def machine_order(made) -> list[str]:
    """Runs of the instructions of MACHINE in the loop, in program order."""
    labels, instructions, bodies = {}, [], []
    for line in compile_check.disassemble(made.asm["cubin"]).splitlines():
        if label := re.match(r"\.(L_x_\d+):", line.strip()):
            labels[label[1]] = len(instructions)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(instruction[1])
            back = re.search(r"BRA.*?(L_x_\d+)", instruction[1])
            if back and back[1] in labels:
                bodies.append(instructions[labels[back[1]] :])
    body = max(bodies, key=lambda b: (sum("HGMMA" in i for i in b), -len(b)))
    words = [re.sub(r"^@!?U?P\w+ ", "", i) for i in body]
    steps = [name for word in words for key, name in MACHINE.items() if word.startswith(key)]
    return [s for i, s in enumerate(steps) if i == 0 or s != steps[i - 1]]


backward_3 = machine_order(built(v2_slab, "backward", 128, Config(num_stages=3)))
assert backward_3.count("store") == 3
last_store = max(i for i, s in enumerate(backward_3) if s == "store")
assert backward_3.index("ask") > last_store, "the text: the same order in machine code"

# %% tags=["remove-input"]
code(" | ".join(backward_3), "text")

# %% tags=["remove-input"]
figures.source(
    "modelled", f"nvdisasm of the backward kernel at head_dim 128, triton {triton.__version__}"
)

# %% [markdown]
# So of the three promises one is broken before anything has run: the loads are *not* in flight all
# the time. With two or three stages a program is as serial as one of v1: ask, wait, compute, store.
# What overlaps is again the programs that share an SM. How many do?

# %% tags=["remove-cell"]
SMEM_OF_AN_SM, REGISTERS_OF_AN_SM = 228 * 1024, 64 * 1024


def fit(made: compile_check.Compiled, num_warps: int) -> int:
    """How many programs registers and shared memory of an SM admit."""
    per_warp = (made.registers * 32 + 255) // 256 * 256
    by_registers = REGISTERS_OF_AN_SM // (per_warp * num_warps)
    return min(by_registers, SMEM_OF_AN_SM // (made.shared_bytes + 1024))


def v1_config(direction: str, head_dim: int):
    return v1_one_tile.default_config(direction, blank(head_dim))


def stages(n: int) -> str:
    return f"{n} stage{'s' if n > 1 else ''}"


READS = {"forward": 3, "backward": 4}
found = []
for direction, head_dim in SHAPES:
    config = v1_config(direction, head_dim)
    made = compile_check.read(built(v1_one_tile, direction, head_dim, config))
    found.append((direction, head_dim, "v1", made, config.num_warps, 1))
    for n in SHOWN:
        one = built(v2_slab, direction, head_dim, Config(num_stages=n))
        made, early = compile_check.read(one), loop_of(one)[1]
        found.append(
            (direction, head_dim, f"v2, {stages(n)}", made, 4, early or 1 / READS[direction])
        )
resources = pd.DataFrame(
    {
        "direction": direction, "head_dim": head_dim, "kernel": kernel,
        "registers": made.registers, "spilled": made.spill_bytes,
        "shared (KB)": made.shared_bytes / 1e3, "fit an SM": fit(made, num_warps),
        "on the way (KB)": fit(made, num_warps) * steps * READS[direction]
        * BLOCK * head_dim * 2 / 1e3,
    }
    for direction, head_dim, kernel, made, num_warps, steps in found
)  # fmt: skip
fits = resources.set_index(["direction", "head_dim", "kernel"])["fit an SM"]
registers = resources.set_index(["direction", "head_dim", "kernel"])["registers"]
for direction, head_dim in SHAPES:
    glue(f"fit_v1_{direction}_{head_dim}", fits[direction, head_dim, "v1"])
    glue(f"fit_v2_{direction}_{head_dim}", fits[direction, head_dim, "v2, 3 stages"])
for label, kernel in (("v1", "v1"), ("v2", "v2, 3 stages")):
    glue_word(f"registers_{label}", ", ".join(f"{registers[d, h, kernel]:.0f}" for d, h in SHAPES))
assert all(fits[d, h, "v2, 3 stages"] < fits[d, h, "v1"] for d, h in SHAPES), "the text: fewer fit"
assert all(registers[d, h, "v2, 3 stages"] > 0.9 * registers[d, h, "v1"] for d, h in SHAPES), (
    "the text: TMA saves no registers worth speaking of"
)
three_fit = sum(fits[d, h, "v2, 3 stages"] >= 3 for d, h in SHAPES)
glue("three_fit", three_fit)

# %% tags=["remove-input"]
figures.show_table(resources)

# %% tags=["remove-input"]
figures.source(
    "modelled",
    f"compiled for sm_90a by triton {triton.__version__}; fit: 65,536 registers and 228 KB of "
    "shared memory of an SM. on the way: the most bytes of q, k, v (and the gradient) that the "
    "programs of an SM can have asked for, all of them at that point of the loop at once",
)

# %% [markdown]
# No registers are set free to speak of. In these four cases v1 needs
# {glue:text}`slab_registers_v1`, v2 with three stages {glue:text}`slab_registers_v2`. And the
# second buffer of each tile takes room away: {glue:text}`slab_fit_v1_forward_128:.0f` programs of
# v1 share an SM forward at head_dim 128, {glue:text}`slab_fit_v2_forward_128:.0f` of v2; at 64,
# {glue:text}`slab_fit_v1_forward_64:.0f` and {glue:text}`slab_fit_v2_forward_64:.0f`; backward
# {glue:text}`slab_fit_v1_backward_128:.0f` and {glue:text}`slab_fit_v2_backward_128:.0f`,
# {glue:text}`slab_fit_v1_backward_64:.0f` and {glue:text}`slab_fit_v2_backward_64:.0f`.
#
# {doc}`counting_bytes` has the number of bytes that must be on the way, by Little's law: at a
# latency of 1 µs (an assumption) and the ceiling of the record below, {glue:text}`slab_little:.0f`
# KB for each SM forward. All kernels *can* have that, by the last column. What they lack is
# somebody who asks for it at all times. In v1 that comes for free: while one program computes, the
# others wait for their tiles, and where one has ended, the hardware starts another.

# %% tags=["remove-input"]
# | name: fig-slab-steps
# | caption: >
# |   One SM, forward. The order of asking (light), computing (dark) and storing (grey) in each
# |   program is the compiled one; the lengths are drawn, not measured.
# | alt: >
# |   Three groups of lanes. Four programs of v1, one below the other: at any time some of them
# |   load and some compute. Two programs of v2 with three stages: each loads, computes, stores and
# |   loads again, with nothing beside. One program of v2 with five stages: the load of the next
# |   step runs below the computation of this one.
LOAD, WORK, STORE = 1.0, 1.3, 0.4
WHOLE = LOAD + WORK + STORE
with figures.style():
    chart, axis = figures.subplots(width=7.2, height=3.4)
    lanes, place = [], 0

    def bar(lane: float, start: float, length: float, kind: str, shown: str) -> None:
        end = min(start + length, 9.5)
        if end > max(start, 0):
            axis.barh(
                lane, end - max(start, 0), 0.36 if kind == "load" else 0.72, left=max(start, 0),
                color=INK if kind == "store" else shown, alpha=0.4 if kind == "load" else 1.0,
                linewidth=0,
            )  # fmt: skip

    for count, label, shown in (
        (4, "v1", figures.colour(BEFORE)),
        (2, "v2, 3 stages", figures.colour(IMPL)),
    ):
        for program in range(count):
            start = -WHOLE * program / count
            while start < 9.5:
                bar(place, start, LOAD, "load", shown)
                bar(place, start + LOAD, WORK, "work", shown)
                bar(place, start + LOAD + WORK, STORE, "store", shown)
                start += WHOLE
            lanes.append((place, label if program == 0 else ""))
            place += 1
        place += 0.6
    start = -0.5
    while start < 9.5:
        bar(place, start, WORK, "work", figures.colour(IMPL))
        bar(place, start + WORK, STORE, "store", figures.colour(IMPL))
        bar(place + 0.6, start - STORE + 0.4, LOAD, "load", figures.colour(IMPL))
        start += WORK + STORE
    lanes.append((place, "v2, 5 stages"))
    axis.set_yticks([p for p, _ in lanes], [label for _, label in lanes])
    axis.set_ylim(place + 1.1, -0.7)
    axis.set_xticks([])
    axis.set_xlim(0, 9.5)
    axis.grid(visible=False)
    axis.tick_params(axis="y", length=0)
    axis.set_xlabel("time")
display(chart)

# %% tags=["remove-input"]
figures.source("modelled", "the order of the loop as compiled; durations are drawn")

# %% [markdown]
# Predictions from the compiled kernels (2026-11-21). Scripts without a record had shown v2 behind
# v1 forward by then, and about level backward at head_dim 128. They had tried one to three stages,
# but not five, no grid that does not fit, and no heads side by side.
#
# 2. *A third stage buys next to nothing*: with one slab per program, three stages take the time of
#    two within 5 %, in all four cases. More would mean that the list, not the tiles, is waited for.
# 3. *The fifth stage is the one that counts*: one persistent program on an SM with five stages
#    takes at least 10 % less time than with three, in all four cases. Otherwise a copy is no part
#    of a step worth hiding.
# 4. *Heads side by side*: with `heads_per_program=1`, programs that follow each other hold heads of
#    the same block at the same time. Two persistent programs per SM should then take less time
#    forward, at both sizes of a head. Otherwise the order does not matter to a persistent grid.
# 5. *A program that does not fit waits for a place.* Three per SM with three stages are
#    {glue:text}`slab_three:.0f` programs; where two fit, two thirds of the work run at the rate of
#    two per SM and one third at the rate of one. The time should be two thirds of that of two per
#    SM and one third of that of one, within 10 %.

# %% tags=["remove-cell"]
PARTIAL = [(d, h) for d, h in SHAPES if fits[d, h, "v2, 3 stages"] == 2]
assert PARTIAL, "the text: there are cases in which two programs fit"

# %% [markdown]
# ## Is it right?
#
# A ragged batch, with lengths on both sides of a block, in the emulator. How programs walk must not
# change a bit, and v2 must give what v1 gives:

# %%
lengths = (0, 1, 63, 64, 65, 130)
make = torch.Generator().manual_seed(2025)
q, k, v, grad_out = (torch.randn(sum(lengths), 2, 64, generator=make).bfloat16() for _ in range(4))
batch = Batch(q, k, v, cu_seqlens(lengths, "cpu"), scale=64**-0.5)
walks = {
    "as many slabs as it takes": Config(),
    "two slabs": Config(slabs_per_program=2),
    "one head of one slab": Config(heads_per_program=1, slabs_per_program=1),
}


def run(module, batch, grad_out=grad_out, **more):
    return module.forward(batch, **more)[0], *module.backward(grad_out, batch, **more)


with emulator.enabled():
    expected = run(v1_one_tile, batch)
    for name, config in walks.items():
        results_of = run(v2_slab, batch, config=config)
        same = all(map(torch.equal, results_of, expected))
        print(f"{name:26} equal to v1: {same}")
        assert same

# %% [markdown]
# Against double precision, and with NaN in all rows that do not belong to the last sequence:

# %%
exact = replace(batch, q=q.double(), k=k.double(), v=v.double())
oracle = run(reference, exact, grad_out.double())
plain = run(reference, batch)
comparisons = [
    testing.compare(name=name, actual=a, expected=e, baseline=b)
    for name, a, e, b in zip(("out", "dq", "dk", "dv"), expected, oracle, plain, strict=True)
]
for comparison in comparisons:
    print(comparison)

own = slice(sum(lengths[:-1]), None)
poisoned = [torch.full_like(t, float("nan")) for t in (q, k, v)]
for alone, tensor in zip(poisoned, (q, k, v), strict=True):
    alone[own] = tensor[own]
with emulator.enabled():
    among_nan = run(v2_slab, replace(batch, **dict(zip("qkv", poisoned, strict=True))))
alone = all(torch.equal(a[own], b[own]) for a, b in zip(among_nan, expected, strict=True))
print("the last sequence, bitwise equal among NaN:", alone)

# %% tags=["remove-cell"]
assert alone and all(c.passed for c in comparisons)

# %% [markdown]
# ## Measurement
#
# This cell measures; it runs with `make measure NOTEBOOKS=block/v2_slab`, on a GPU. *1 head* is v1
# with TMA in the place of pointers and nothing else: one head of one block per program, one stage.
# Then the program grows: all heads of a block, two slabs, a persistent grid. The backward of v1 has
# the constants of its default.

# %% tags=["hide-input"]
CASES = {
    "1 head, 1 stage": {"heads_per_program": 1, "slabs_per_program": 1, "num_stages": 1},
    "1 slab, 1 stage": {"slabs_per_program": 1, "num_stages": 1},
    "1 slab, 2 stages": {"slabs_per_program": 1, "num_stages": 2},
    "1 slab, 3 stages": {"slabs_per_program": 1, "num_stages": 3},
    "2 slabs, 3 stages": {"slabs_per_program": 2, "num_stages": 3},
    "1 per SM, 3 stages": {"programs_per_sm": 1, "num_stages": 3},
    "2 per SM, 3 stages": {"programs_per_sm": 2, "num_stages": 3},
    "3 per SM, 3 stages": {"programs_per_sm": 3, "num_stages": 3},
    "2 per SM, 3 stages, 1 head": {
        "heads_per_program": 1, "programs_per_sm": 2, "num_stages": 3,
    },
    "1 per SM, 5 stages": {"programs_per_sm": 1, "num_stages": 5},
    "2 per SM, 5 stages": {"programs_per_sm": 2, "num_stages": 5},
}  # fmt: skip
V1_CASES = {"blocks follow": False, "heads follow": True}
if mode == "measure":
    from dataclasses import replace

    from gdpa_kernels.block_attention import v1_one_tile, v2_slab
    from gdpa_kernels.measuring.inputs import make_inputs
    from gdpa_kernels.measuring.session import Session
    from gdpa_kernels.measuring.workload import workload

    session = Session("notebooks/block/v2_slab.py", device)
    walking = [
        ("v2_slab", case, {"config": v2_slab.Config(**constants)})
        for case, constants in CASES.items()
    ]
    for name in ("block-fill70-2000", "block-fill70-2000-d64"):
        small = make_inputs(replace(workload(name), batch=1), device=device).batch()
        for direction in ("forward", "backward"):
            usual = v1_one_tile.default_config(direction, small)
            short = [
                ("v1_one_tile", case, {"config": replace(usual, heads_inner=inner)})
                for case, inner in V1_CASES.items()
            ]
            session.measure(workload(name), [*short, *walking], direction=direction)
    print(session.write(data_dir))

# %% tags=["remove-cell"]
run_record = results.latest_record(data_dir, notebook="notebooks/block/v2_slab.py", system="h200")
everything = results.table(data_dir, system="h200", latest=False)
own = everything[(everything["record"] == run_record.id) & (everything["scope"] == "kernel")]
own = own.drop_duplicates(["workload", "direction", "impl", "variant"])
own = own.assign(
    head_dim=own["workload"].map({name: d for d, name in NAMES.items()}),
    case=own["impl"].map({IMPL: "v2, ", BEFORE: "v1, "}) + own["variant"],
)
machine = system.load(Path(data_dir) / "systems" / f"{run_record.system}.json")
limits = results.ceilings(run_record)
KEYS = ["direction", "head_dim", "case"]
share, time, low, high = (
    own.set_index(KEYS)[column]
    for column in ("percent_of_roofline", "time_us_p50", "time_us_p20", "time_us_p80")
)
share, time, low, high = (values.sort_index() for values in (share, time, low, high))
V1 = [f"v1, {case}" for case in V1_CASES]
V2 = [f"v2, {case}" for case in CASES]
V1_BEST = "v1, heads follow"
for direction, head_dim in SHAPES:
    measured = set(share[direction, head_dim].index)
    assert measured >= {*V1, *V2}, f"the record lacks cases: {sorted({*V1, *V2} - measured)}"
    assert time[direction, head_dim, V1_BEST] > 0, "v1 failed"
failed = own[own["failure"] != ""]
passed = own[own["failure"] == ""]
assert passed["correct"].astype(bool).all()
glue("variants", len(V2))
glue("checked", len(passed))
glue("three", 3 * machine.num_sms)
DRAWN = workload(NAMES[128])
items = DRAWN.blocks * DRAWN.num_heads_q
glue("blocks", DRAWN.blocks)
glue("items", items)
rate = {
    direction: limits.gbytes_per_s(
        DRAWN.bytes_read(direction), DRAWN.bytes_written(direction)
    )
    for direction in DIRECTIONS
}  # fmt: skip
glue("rate_forward", rate["forward"])
glue("rate_backward", rate["backward"])
read = DRAWN.bytes_read("forward") / DRAWN.bytes("forward")
glue("little", rate["forward"] * 1e9 * read * 1e-6 / machine.num_sms / 1e3)
best = {
    (d, h): min((c for c in V2 if time[d, h, c] > 0), key=lambda c: time[d, h, c])
    for d, h in SHAPES
}
ratio = {(d, h): time[d, h, best[d, h]] / time[d, h, V1_BEST] for d, h in SHAPES}


def standing(value: float) -> str:
    """How a ratio of times reads; runs differ by a few percent."""
    if abs(value - 1) <= 0.03:
        return "level"
    return "ahead" if value < 1 else "behind"


for direction, head_dim in SHAPES:
    key = f"{direction}_{head_dim}"
    glue(f"best_{key}", share[direction, head_dim, best[direction, head_dim]])
    glue(f"v1_{key}", share[direction, head_dim, V1_BEST])
glue_word("verdict_1", VERDICT[all(r < 0.97 for r in ratio.values())])

# %% tags=["remove-input"]
# | name: fig-slab-shares
# | caption: >
# |   v1 and the variants of v2: percent of the rate of the best copy with the same mix of reads and
# |   writes, measured in the same run. Error bars: p20 to p80. The line at 100 is the copy, the
# |   other one v1 with its heads side by side.
# | alt: >
# |   Four dot plots, forward and backward, head_dim 128 and 64, with a row for each of thirteen
# |   cases. What they show is said in the text below.
ORDER = [*V1, *V2]
with figures.style():
    chart, axes = figures.subplots(2, 2, width=8.4, height=7.0, sharex=True, sharey=True)
    for axis, (direction, head_dim) in zip(axes.flat, SHAPES, strict=True):
        for place, case in enumerate(ORDER):
            here = (direction, head_dim, case)
            if not time[here] > 0:
                axis.annotate("failed", (20, place), va="center")
                continue
            middle = share[here]
            axis.errorbar(
                middle, place,
                xerr=[[middle - middle * time[here] / high[here]],
                      [middle * time[here] / low[here] - middle]],
                fmt="o", markersize=6, elinewidth=1,
                color=figures.colour(BEFORE if case in V1 else IMPL),
            )  # fmt: skip
        axis.axvline(100, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
        axis.axvline(
            share[direction, head_dim, V1_BEST], color=figures.colour(BEFORE), linewidth=1.0
        )
        axis.set_title(f"{direction}, head_dim {head_dim}")
        axis.set_yticks(range(len(ORDER)), ORDER)
        axis.set_ylim(len(ORDER) - 0.4, -0.6)
        axis.set_xlim(0, 108)
        axis.grid(visible=False, axis="y")
        axis.grid(visible=True, axis="x")
        axis.tick_params(axis="y", length=0)
    for axis in axes[1]:
        axis.set_xlabel("% of the copy")
display(chart)

# %% tags=["remove-input"]
figures.save_csv(own.drop(columns="case"), "slab-shares")
figures.provenance(own, csv="slab-shares", data_dir=Path(data_dir))

# %% tags=["remove-input"]
if len(failed):
    display(figures.show_table(failed[["workload", "direction", "case", "failure"]]))

# %% [markdown]
# {glue:text}`slab_blocks:,.0f` blocks of four heads, {glue:text}`slab_items:,.0f` tiles' worth of
# work. All {glue:text}`slab_checked:.0f` rows with a time passed the check on their own inputs
# before they were timed. The copies: {glue:text}`slab_rate_forward:,.0f` GB/s with three bytes read
# for each one written, {glue:text}`slab_rate_backward:,.0f` GB/s with four for three. Peers are in
# {doc}`results`.
#
# The first prediction is **{glue:text}`slab_verdict_1`**. The best variants:

# %% tags=["remove-input"]
figures.show_table(
    pd.DataFrame(
        {
            "": f"{d}, head_dim {h}", "best variant of v2": best[d, h].removeprefix("v2, "),
            "% of the copy": share[d, h, best[d, h]], "v1, % of the copy": share[d, h, V1_BEST],
            "time / v1": ratio[d, h], "v2 is": standing(ratio[d, h]),
        }
        for d, h in SHAPES
    ).round(2)
)  # fmt: skip

# %% tags=["remove-input"]
figures.provenance(own, csv="slab-shares", data_dir=Path(data_dir))

# %% [markdown]
# ### One change at a time

# %% tags=["remove-cell"]
CHANGES = {
    "TMA for pointers": ("v1, heads follow", "v2, 1 head, 1 stage"),
    "all heads in a program": ("v2, 1 head, 1 stage", "v2, 1 slab, 1 stage"),
    "two stages": ("v2, 1 slab, 1 stage", "v2, 1 slab, 2 stages"),
    "three stages": ("v2, 1 slab, 2 stages", "v2, 1 slab, 3 stages"),
    "two slabs": ("v2, 1 slab, 3 stages", "v2, 2 slabs, 3 stages"),
    "persistent, 2 per SM": ("v2, 2 slabs, 3 stages", "v2, 2 per SM, 3 stages"),
    "heads side by side": ("v2, 2 per SM, 3 stages", "v2, 2 per SM, 3 stages, 1 head"),
    "five stages, 1 per SM": ("v2, 1 per SM, 3 stages", "v2, 1 per SM, 5 stages"),
    "five stages, 2 per SM": ("v2, 2 per SM, 3 stages", "v2, 2 per SM, 5 stages"),
    "for comparison: v1, heads follow": ("v1, blocks follow", "v1, heads follow"),
}
effects = pd.DataFrame(
    {
        "change": change, "from": before.removeprefix("v2, "), "to": after.removeprefix("v2, "),
        **{
            f"{d} {h}": 100 * (time[d, h, after] / time[d, h, before] - 1) for d, h in SHAPES
        },
    }
    for change, (before, after) in CHANGES.items()
)  # fmt: skip
effect = effects.set_index("change")[[f"{d} {h}" for d, h in SHAPES]]


def spread(name: str, values: pd.Series) -> None:
    """Glue the least and the most of some changes in percent, with signs."""
    found = values.dropna()
    if found.empty:
        raise LookupError(f"the record must hold a time for {name!r}, got failures only")
    glue_word(f"{name}_min", f"{found.min():+.1f}")
    glue_word(f"{name}_max", f"{found.max():+.1f}")


spread("third", effect.loc["three stages"])
spread("fifth", effect.loc["five stages, 1 per SM"])
forward = [f"forward {h}" for h in NAMES]
spread("side", effect.loc["heads side by side", forward])
spread("v1_order", effect.loc["for comparison: v1, heads follow", forward])
spread("tma", effect.loc["TMA for pointers"])
spread("walk", effect.loc["persistent, 2 per SM"])
glue_word("verdict_2", VERDICT[bool(effect.loc["three stages"].abs().max() <= 5)])
glue_word("verdict_3", VERDICT[bool(effect.loc["five stages, 1 per SM"].max() <= -10)])
glue_word("verdict_4", VERDICT[bool(effect.loc["heads side by side", forward].max() < 0)])
waiting = pd.DataFrame(
    {
        "direction": d, "head_dim": h,
        "1 per SM (us)": time[d, h, "v2, 1 per SM, 3 stages"],
        "2 per SM (us)": time[d, h, "v2, 2 per SM, 3 stages"],
        "3 per SM, modelled (us)": (
            2 * time[d, h, "v2, 2 per SM, 3 stages"] + time[d, h, "v2, 1 per SM, 3 stages"]
        ) / 3,
        "3 per SM, measured (us)": time[d, h, "v2, 3 per SM, 3 stages"],
    }
    for d, h in PARTIAL
)  # fmt: skip
off = (waiting["3 per SM, measured (us)"] / waiting["3 per SM, modelled (us)"] - 1).abs()
glue("wave_off", 100 * off.max())
glue_word("verdict_5", VERDICT[bool(off.max() <= 0.10)])

# %% tags=["remove-input"]
figures.show_table(effects.round(1))

# %% tags=["remove-input"]
figures.save_csv(effects, "slab-effects")
figures.provenance([run_record.id], csv="slab-effects", data_dir=Path(data_dir))

# %% [markdown]
# Change of the time in percent, less is better. The first six rows follow each other; TMA alone
# changes the time by {glue:text}`slab_tma_min` to {glue:text}`slab_tma_max` %, the step to
# persistent programs by {glue:text}`slab_walk_min` to {glue:text}`slab_walk_max` %.
#
# - *A third stage*: {glue:text}`slab_third_min` to {glue:text}`slab_third_max` %. The second
#   prediction is **{glue:text}`slab_verdict_2`**.
# - *Five stages*, one program per SM: {glue:text}`slab_fifth_min` to {glue:text}`slab_fifth_max` %.
#   The third prediction is **{glue:text}`slab_verdict_3`**. Where only one program fits, two per SM
#   run one after the other.
# - *Heads side by side*, forward: {glue:text}`slab_side_min` to {glue:text}`slab_side_max` %. The
#   fourth is **{glue:text}`slab_verdict_4`**. The same change of order in v1:
#   {glue:text}`slab_v1_order_min` to {glue:text}`slab_v1_order_max` %.
#
# A partial wave, three per SM where two fit:

# %% tags=["remove-input"]
figures.show_table(waiting.round(0))

# %% tags=["remove-input"]
figures.provenance([run_record.id], data_dir=Path(data_dir))

# %% [markdown]
# The model is off by {glue:text}`slab_wave_off:.0f` % at most: the fifth prediction is
# **{glue:text}`slab_verdict_5`**.
#
# ## Where the time goes
#
# A step is one head of one block. If $R$ programs share an SM and the memory runs at the rate of
# the copy, a program may take $R$ times the bytes of a step over the rate of an SM. That is its
# budget. What a step takes follows from the record: $R$ times the SMs times the time, over all
# steps.

# %% tags=["remove-cell"]
LOOKED_AT = {
    V1_BEST: "v1",
    "v2, 1 slab, 3 stages": "v2, 3 stages",
    "v2, 1 per SM, 3 stages": "v2, 3 stages",
    "v2, 2 per SM, 3 stages": "v2, 3 stages",
    "v2, 1 per SM, 5 stages": "v2, 5 stages",
    "v2, 2 per SM, 5 stages": "v2, 5 stages",
}


def at_a_time(direction: str, head_dim: int, case: str) -> int:
    """How many programs of a case run on an SM at the same time."""
    room = int(fits[direction, head_dim, LOOKED_AT[case]])
    asked = re.search(r"(\d) per SM", case)
    return min(room, int(asked[1])) if asked else room


steps = pd.DataFrame(
    {
        "direction": d, "head_dim": h, "case": case, "programs on an SM": at_a_time(d, h, case),
        "budget of a step (us)": at_a_time(d, h, case) * machine.num_sms
        * workload(NAMES[h]).bytes(d) / items / rate[d] / 1e3,
        "a step takes (us)": at_a_time(d, h, case) * machine.num_sms * time[d, h, case] / items,
    }
    for d, h in SHAPES
    for case in LOOKED_AT
    if time[d, h, case] > 0
)  # fmt: skip
step = steps.set_index(["direction", "head_dim", "case"])
took, budget = step["a step takes (us)"], step["budget of a step (us)"]
ALONE = "v2, 1 per SM, 3 stages"
for label, case in (("v1", V1_BEST), ("alone", ALONE)):
    glue(f"step_{label}", took["forward", 128, case])
    glue(f"budget_{label}", budget["forward", 128, case])
    assert share["backward", 128, case] < 93, "the text: both leave the memory idle"
shorter = [took[d, h, ALONE] / took[d, h, V1_BEST] for d, h in SHAPES]
glue("shorter_min", min(shorter))
glue("shorter_max", max(shorter))
two_fit = [h for h in NAMES if fits["forward", h, "v2, 3 stages"] >= 2]
gain_two = [
    time["forward", h, "v2, 2 per SM, 3 stages"] / time["forward", h, ALONE] for h in two_fit
]
glue("two_min", min(gain_two))
glue("two_max", max(gain_two))
glue_word(
    "two_word",
    "That is latency, not bandwidth: a second program runs in the gaps of the first."
    if max(gain_two) < 0.75
    else "A second program finds few gaps to run in.",
)

# %% tags=["remove-input"]
figures.show_table(steps.round(2))

# %% tags=["remove-input"]
figures.save_csv(steps, "slab-budget")
figures.source(
    "modelled",
    "budget: bytes of a step at the measured copy rate, by programs and SMs; a step takes: "
    "measured times of the record above, by the programs that fit an SM as compiled",
    csv="slab-budget",
)

# %% [markdown]
# - *Steps are not slow.* A step of v2 alone on its SM takes {glue:text}`slab_shorter_min:.2f` to
#   {glue:text}`slab_shorter_max:.2f` times as long as a program of v1 among its neighbours: forward
#   at head_dim 128 {glue:text}`slab_step_alone:.1f` µs against {glue:text}`slab_step_v1:.1f`. But
#   alone it has a budget of {glue:text}`slab_budget_alone:.1f` µs, and
#   {glue:text}`slab_fit_v1_forward_128:.0f` programs of v1 have {glue:text}`slab_budget_v1:.1f`. A
#   step is a chain of latencies (ask, wait, S, softmax, P V, convert, store). Where it is longer
#   than the budget of one, several have to be under way at once.
# - *Several times at once* costs v1 nothing: no barrier, no buffer, no line of code. A second
#   persistent program of v2 brings the forward time to {glue:text}`slab_two_min:.2f` to
#   {glue:text}`slab_two_max:.2f` of that of one. {glue:text}`slab_two_word` A third fits in
#   {glue:text}`slab_three_fit:.0f` of the four cases: the second buffer of every tile takes the
#   room, and holds nothing that helps.
# - *Backward* the chain has five products and three stores, and shared memory holds
#   {glue:text}`slab_fit_v2_backward_128:.0f` program of v2 at head_dim 128. Registers hold
#   {glue:text}`slab_fit_v1_backward_128:.0f` of v1. Both leave the memory idle part of the time,
#   and in the end they are {glue:text}`slab_backward_word`.
# - *Waves* are small change, unless one makes them. In a persistent grid of
#   {glue:text}`slab_grid:.0f` programs the last step of the unluckiest program is one of
#   {glue:text}`slab_steps:.0f`; v1 has {glue:text}`slab_waves:.0f` waves of programs. Only a grid
#   larger than the device, as in the table above, shows its edge.

# %% tags=["remove-cell"]
grid = 2 * machine.num_sms
glue("grid", grid)
glue("steps", math.ceil(DRAWN.blocks / grid) * 4)
glue("waves", items / (fits["forward", 128, "v1"] * machine.num_sms))
backward_gap = abs(ratio["backward", 128] - 1)
glue_word(
    "backward_word",
    "level"
    if backward_gap <= 0.03
    else f"{100 * backward_gap:.0f} % apart, v2 {standing(ratio['backward', 128])}",
)

# %% [markdown]
# ## The surprise: stages are not buffers
#
# The first sweep over `num_stages`, by script, went from 1 to 3, and each value promised something.
# From its times one would have said that a third stage brings little because two are enough. The
# compiled loop says something else: neither has a copy on the way while it computes, and the third
# is not a buffer at all. The sweep ended before the first value that tests the idea of this
# chapter. Compiling all of them takes seconds on a laptop, and the order of a dozen instructions is
# readable.
#
# With five stages the idea was tested at last. One program on an SM, the copy of the next head
# below the products of this one: the time changes by {glue:text}`slab_fifth_min` to
# {glue:text}`slab_fifth_max` %. The price is the third buffer of each tile: at head_dim 128 a
# program fills the SM, and its products wait for each other with nothing beside them. The
# persistent grid with five stages takes {glue:text}`slab_five_forward_128:.2f` times the time of v1
# forward and {glue:text}`slab_five_backward_128:.2f` times backward at head_dim 128,
# {glue:text}`slab_five_forward_64:.2f` and {glue:text}`slab_five_backward_64:.2f` times at 64 (the
# better of one and two programs per SM).
#
# ## Limits of this rung
#
# The loop of one kind of warp asks, waits, computes and stores, in the order that the compiler
# chose. To have copies on the way at all times, somebody must ask for them who does nothing else,
# and results must leave without being waited for. {doc}`v3_warp_specialized` gives that to a role
# of its own. The slab returns in {doc}`v4_rotary`, where it pays for another reason: sin and cos
# are the same for all heads.

# %% tags=["remove-cell"]
assert all(fits[d, 128, "v2, 5 stages"] == 1 for d in DIRECTIONS), "the text: it fills the SM"
for d, h in SHAPES:
    five = [time[d, h, f"v2, {n} per SM, 5 stages"] for n in (1, 2)]
    glue(f"five_{d}_{h}", min(t for t in five if t > 0) / time[d, h, V1_BEST])
counted = {}
for n in range(2, 8):
    made = built(v2_slab, "forward", 64, Config(num_stages=n))
    counted[n] = loop_of(made)[2]
assert list(counted.values()) == [2, 2, 2, 3, 3, 4], "the answer names these numbers"
NO_LIST = changed(
    v2_slab,
    (
        "    first_row, rows = block_entry(blocks_ptr, slab // SLABS)\n",
        "    first_row, rows = slab // SLABS * 64, 64\n",
    ),
)
unlisted = {n: loop_of(built(NO_LIST, "forward", 128, Config(num_stages=n))) for n in (2, 3)}
assert unlisted[2][2] == 2 and unlisted[3][2] == 3, "the answer: three stages, three tiles"
assert unlisted[3][1] == 2 and "list" not in unlisted[3][0]
B200_SMS, B200_RATE = 148, 8e12
for h in NAMES:
    glue(f"b200_{h}", 2 * 4 * BLOCK * h * 2 * B200_SMS / B200_RATE * 1e6)
    glue(f"h200_{h}", 2 * workload(NAMES[h]).bytes("forward") / items * machine.num_sms
         / rate["forward"] / 1e3)  # fmt: skip

# %% [markdown]
# ## Exercises
#
# :::{exercise} A budget for a B200
# :label: ex-slab-b200
#
# A B200 has 148 SMs and a nominal 8 TB/s {cite}`nvidiablackwell`. Two programs of v2 share an SM.
# What is the budget of a step forward at head_dim 128 and at 64, for full blocks? Is it easier or
# harder to keep than on the H200 of the record? *(paper, five minutes)*
# :::
#
# :::{solution} ex-slab-b200
# :class: dropdown
#
# Four tiles of 64 × head_dim × 2 bytes per step, 148 SMs, two programs:
# {glue:text}`slab_b200_128:.2f` µs and {glue:text}`slab_b200_64:.2f` µs. The H200 allows
# {glue:text}`slab_h200_128:.2f` and {glue:text}`slab_h200_64:.2f` µs. A step that is a chain of
# latencies does not become shorter on the newer machine, so more steps must be under way at once.
# :::
#
# :::{exercise} How many stages for three tiles?
# :label: ex-slab-stages
#
# Compile the forward kernel at head_dim 64 with `num_stages` from 2 to 7, and count the tiles of q
# that have room (`loop_of`). Find the rule. *(code, ten minutes, no GPU)*
# :::
#
# :::{solution} ex-slab-stages
# :class: dropdown
#
# 2, 2, 2, 3, 3, 4. Two loads hang on each other, the list's and TMA's, and the compiler gives each
# half of num_stages − 1, rounded down but at least one step where there is a step to give. Room is
# needed for one tile more than the steps that TMA is ahead.
# :::
#
# :::{exercise} Without the list
# :label: ex-slab-list
#
# If all lengths are multiples of 64, the place of a block is its number times 64, and no list is
# needed. Change `place` in a copy of the file, compile with two and three stages, and say what the
# loop does now. Is it the kernel that the prediction promised? *(code, half an hour, no GPU)*
# :::
#
# :::{solution} ex-slab-list
# :class: dropdown
#
# `first_row, rows = slab // SLABS * 64, 64`. With two stages nothing changes but the missing list:
# the copies are still asked for at the end of the loop and awaited at once. With three there is
# room for three tiles, and one head is on the way during the products, as with five stages before.
# So it is, from three stages on. A list whose entries are fetched by something else than the loop
# (a role, or a register that holds the next entry) would have done the same for ragged batches.
# :::
#
# ## Takeaways
#
# - Many small programs overlap with each other for nothing. A persistent program starts without
#   that and has to earn it back.
# - `num_stages` counts stages of a loop, shared by all loads that depend on each other. Read the
#   loop: what is asked for between the last wait and the first product?
# - Contiguous in memory is not contiguous in time. What counts is what the programs that run
#   together ask for together.
