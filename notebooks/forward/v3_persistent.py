# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # Forward v3: persistent
#
# In a half-full batch nearly half of forward v2's programs find nothing to do. What is gained by
# launching only as many programs as the device holds, and giving them a list of the tiles that
# exist?
#
# :::{admonition} In this chapter (20 minutes)
# You will make a kernel persistent, model how a list of tiles falls on its programs, and find which
# number of programs to avoid. All times of this chapter are {ref}`in bursts <rule-scope>`.
# :::

# %% tags=["hide-input"]
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd

from _lib import drawings, studies
from gdpa_kernels.gdpa import list_model
from gdpa_kernels.gdpa.ladder import v2_tma, v3_persistent
from gdpa_kernels.gdpa.ladder.v3_persistent import Config
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts
from gdpa_lab.report.chapter import Chapter

UNIFORM = ["full-1024", "half-dense-512", "half-dense-1024"]
UNIFORM += ["half-jagged-512", "half-jagged-1024", "half-jagged-2048"]
FOUR = ["ml1m-1024", "ml20m-2048", "ml25m-1024", "kuairandpure-512"]
LISTS = ["valid", "longest_first", "zigzag"]
NAMES = [*UNIFORM, *FOUR, "kuairand1k-4096"]  # each gdpa-self-...

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("forward/v3_persistent", mode=mode, device=device, data_dir=data_dir)


@chapter.measure
def _(session):
    orders = {order: Config(order=order) for order in list_model.ORDERS}
    fewer = {f"padded, {n} programs": Config(order="padded", num_programs=n) for n in (131, 132)}
    listed = [("v2_tma", "hardware", {"config": v2_tma.Config()})]
    listed += [("v3_persistent", name, {"config": c}) for name, c in (orders | fewer).items()]
    for work in (workload(f"gdpa-self-{name}") for name in NAMES):
        session.measure(work, listed)
        recipe = v3_persistent.work_list_recipe
        recipes = {order: partial(recipe, config=config) for order, config in orders.items()}
        studies.measure_lists(session, work, "v3_persistent", recipes)


# %% tags=["remove-input"]
# | name: fig-v3-ladder
# | caption: >
# |   **Forward v3 on the ladder.** Time of each rung on gdpa-self-full-1024, back to back; each
# |   tick leads to its chapter. Dashed: libraries.
# | alt: >
# |   An axis of milliseconds with a tick for each rung, that of v3 thick, and dashed lines for the
# |   libraries.
chapter.ladder("v3_persistent")

# %% tags=["remove-input"]
# | name: fig-v3-times
# | caption: >
# |   **Only the batches with real lengths gain from the list, and only in a good order.** Time of
# |   forward v3 over that of forward v2 with the same tile, in bursts, by order of the list, on
# |   batches of real lengths.
# | alt: >
# |   A line for each of five batches of real lengths, from the order valid to the order zigzag.
# |   Four lines cross 1 from above; on them longest_first lies below 1 too.
times = chapter.times(columns="variant", variant=None)
times.index = times.index.str.removeprefix("gdpa-self-")
ratio = times.div(times["hardware"], axis=0).loc[NAMES]
uniform = ratio.index.str.match("full|half")
even, real = ratio[LISTS][uniform], ratio[LISTS][~uniform]
chart = charts.dumbbells(
    {"": real[["valid", "longest_first", "zigzag"]]}, xlabel="time / time of forward v2, in bursts",
    levels={"forward v2": 1.0},
    finding=f"Lengths of real histories: sorting turns a loss into a gain. The {len(even)} uniform "
    f"batches gain nothing: {even.min(axis=None):.2f} to {even.max(axis=None):.2f} in any order.",
)  # fmt: skip
chapter.figure(chart, measured=chapter.rows(variant=["hardware", *LISTS]))

# %% [markdown]
# ## What changes
#
# v3 computes a tile as {doc}`forward v2 <v2_tma>` does. What differs is who decides where and when.
# v2's grid has 36,864 programs for 1,152 sequences of up to 1,024 tokens; when one ends, the
# hardware starts the next. v3 is persistent: two programs on each SM, 264 in all, and program $p$
# of $P$ takes the entries $p, p + P, p + 2P, \ldots$ of a list. In any order of the list the output
# has the same bits. A loop goes around v2's body:

# %% tags=["remove-input"]
chapter.code(v3_persistent.persistent_kernel, "num_tiles = tl.load", "start_q, start_out")

# %% [markdown]
# The list is made from the lengths alone, on the device, in one of four orders:
#
# - **padded**: the whole grid, empty tiles included;
# - **valid**: the tiles that hold rows, in the same order;
# - **longest_first**: these, sorted by their number of keys;
# - **zigzag**: the same, with every second row of $P$ entries reversed, so that the program with
#   the longest tile of one row gets the shortest of the next.
#
# The hardware gives the next tile of a grid to the program that is free first (second panel):


# %% tags=["hide-input"]
def placed(tiles: list_model.ModelledList, dynamic: bool = False) -> pd.DataFrame:
    """Program, start, time and row block of every tile; no label where it is empty."""
    free, bars = [0.0] * tiles.num_programs, []
    for index, time in enumerate(tiles.work()):  # key blocks plus one; 0.15 for an empty tile
        program = free.index(min(free)) if dynamic else index % tiles.num_programs
        label = "" if tiles.empty[index] else str(tiles.tile_block[index])
        bars.append((program, free[program], time, label))
        free[program] += time
    return pd.DataFrame(bars, columns=["lane", "start", "time", "label"])


LENGTHS = (1, 2, 1, 4, 1, 4, 2, 1, 2)  # in blocks
options = {"num_heads": 1, "block_m": 1, "block_n": 1, "max_seqlen_q": 4, "fastest": "block"}
build = partial(list_model.build, num_programs=4, **options)
padded, zigzag = (build(order, LENGTHS, LENGTHS) for order in ("padded", "zigzag"))
shown = {
    "padded": (padded, False),
    "padded, by the hardware": (padded, True),
    "padded, 3 programs": (replace(padded, num_programs=3), False),
    "zigzag": (zigzag, False),
}
panels = {f"{name}: {p.imbalance(dynamic=d):.2f}": placed(p, d) for name, (p, d) in shown.items()}

# %% tags=["remove-input"]
# | name: fig-v3-orders
# | caption: >
# |   **The padded order gives one program all the first blocks; zigzag balances.** Nine sequences
# |   of one to four blocks on programs (rows). Numbers: row blocks; thin bars: empty tiles. Above:
# |   the slowest program against the mean of useful work.
# | alt: >
# |   Four timelines. In the padded order on four programs the first has all tiles of block 0 and
# |   runs far longer than the mean. The others are better balanced, zigzag best.
chart = drawings.gantt(panels, xlabel="time, in blocks of keys", hue="v3_persistent")
chapter.figure(chart, modelled="gdpa_kernels.gdpa.list_model")

# %% [markdown]
# ## Prediction
#
# The same arithmetic on the real batches, with tiles of 128 rows and blocks of 64 keys; a perfect
# balance is 1:


# %% tags=["hide-input"]
def model(name: str) -> dict:
    """Imbalance of v2's grid and of the orders; makespan by programs."""
    work = workload(f"gdpa-self-{name}")
    options = {"num_heads": 4, "block_m": 128, "block_n": 64, "num_programs": 264}
    options |= {"max_seqlen_q": work.max_seqlen_q, "fastest": "block"}
    lengths = work.seqlens_q, work.seqlens_k
    orders = list_model.ORDERS
    work_lists = {order: list_model.build(order, *lengths, **options) for order in orders}
    imbalances = {order: tiles.imbalance() for order, tiles in work_lists.items()}
    imbalances["v2"] = work_lists["padded"].imbalance(dynamic=True)
    few = {n: replace(work_lists["padded"], num_programs=n) for n in (147, 148)}
    return imbalances | {n: tiles.makespan() for n, tiles in few.items()}


modelled = pd.DataFrame({name: model(name) for name in NAMES}).T

# %% tags=["remove-input"]
promised = 100 * (1 - modelled["zigzag"] / modelled["v2"])[FOUR]
saved = 100 * (1 - ratio["zigzag"])[FOUR]
best = ratio.loc[UNIFORM, LISTS].min(axis=1)
half_empty = [name for name in NAMES if workload(f"gdpa-self-{name}").fill < 0.6]
alias = (times["padded, 132 programs"] / times["padded, 131 programs"])[half_empty]
table = modelled.loc[["full-1024", "half-jagged-1024", *FOUR], ["v2", *LISTS]]
chapter.table(
    table.round(2).reset_index(names="workload"),
    caption="**On uniform lengths the grid is balanced already; on real ones zigzag could save a "
    "few per cent.** Slowest program over the mean of useful work.",
    modelled="list_model.build, 264 programs",
)
text = "On uniform lengths v2 is nearly perfect, so no list gains much: the best list over v2."
chapter.predict(text, best, least=1 / modelled["v2"][UNIFORM].max(), shown=False)
text = (
    "On the four length distributions v2 may start a heavy tile last, so a zigzag list saves "
    "time: the smallest saving."
)
chapter.predict(text, saved, least=promised.min(), form=".0f", unit=" %")
text = "131 programs beat 132 on a padded list wherever tiles are empty: the smallest ratio."
chapter.predict(text, alias, least=1, shown=False)
chapter.predictions()

# %% tags=["remove-cell"]
assert (saved > 0).all() and (ratio["valid"][FOUR] > 1).all(), "the text says so"
assert (ratio.loc[UNIFORM, LISTS] > 1).all(axis=None), "the caption: real lengths alone gain"
lists = chapter.times(columns="variant", variant=None, scope="schedule").median()
launches = lists["zigzag, host time"] / (times["hardware"] - times["zigzag"])[FOUR]
assert launches.min() <= 12, "the text: twelve layers are enough"
chapter.glue(
    uniform_min=best.min(), uniform_max=best.max(), real_min=saved.min(), real_max=saved.max(),
    promised_min=promised.min(), promised_max=promised.max(), lost=100 * best["full-1024"] - 100,
    valid_loss=100 * (ratio["valid"][FOUR].max() - 1), alias_max=alias.max(),
    device=lists["zigzag, device time"], host=lists["zigzag, host time"],
    few=np.ceil(launches.min()), many=np.ceil(launches.max()),
    b200=(modelled[148] / modelled[147])["half-jagged-1024"],
)  # fmt: skip

# %% [markdown]
# On a padded list 131 programs are up to {glue:text}`alias_max:.2f` times as fast as 132. Entry $i$
# is row block $i$ modulo the blocks of a sequence. With eight blocks, $\gcd(132, 8) = 4$: program 0
# gets only blocks 0 and 4, and a block 0 is never empty. 131 is prime, so all programs see all
# blocks.
#
# ## The surprise: the hardware's queue is hard to beat
#
# **Uniform lengths.** The best list takes {glue:text}`uniform_min:.2f` to
# {glue:text}`uniform_max:.2f` times the time of v2. Leaving out empty tiles gains nothing, because
# an empty program loads its offsets, compares, and is gone. On the full batch v3 loses
# {glue:text}`lost:.0f` %, the price of the loop: a tile waits for three numbers of the list, then
# for the offsets, then for Q, and its copies wait for the store of the tile before.
#
# **Real lengths.** Zigzag saves {glue:text}`real_min:.0f` to {glue:text}`real_max:.0f` % on the
# four distributions, where the model promised {glue:text}`promised_min:.0f` to
# {glue:text}`promised_max:.0f`. The natural order loses up to {glue:text}`valid_loss:.0f` %: it
# assigns tiles before it is known which program will be free. (The hardware's queue is list
# scheduling {cite}`graham1969bounds`.)
#
# **The list** costs {glue:text}`device:.0f` µs on the device and {glue:text}`host:.0f` µs on the
# host. If the host waits for it, it pays for itself after {glue:text}`few:.0f` launches on the best
# of the four distributions and after {glue:text}`many:.0f` on the worst. Twelve layers
# that share it are enough on the best.
#
# A persistent kernel is worth its list when the next tile's first loads run during this one's last
# MMA, and that needs the warps of {doc}`v4_warp_specialized` that only load. {doc}`v6_short_kv`
# takes up the list, {doc}`../measuring/masked_batches` orders it under a mask.

# %% tags=["remove-input"]
chapter.profile("v2_tma", "v3_persistent", workload="gdpa-self-full-512")

# %% [markdown]
# ## Exercises
#
# {doc}`Write it </exercises>`: `make exercise NAME=list`.
#
# :::{exercise} A device with 148 SMs
# :label: ex-v3-148
#
# A B200 has 148 SMs. One program per SM, a padded list, at most 1,024 tokens in blocks of 128 rows:
# how many programs would you start, and what do you lose with 148? *(paper, ten minutes)*
# :::
#
# :::{solution} ex-v3-148
# :class: dropdown
#
# $\gcd(148, 8) = 4$: the same trouble as with 132. Any odd number shares no factor with eight
# blocks; 147 is the largest. By the model 148 programs take {glue:text}`b200:.2f` times as long as
# 147 on gdpa-self-half-jagged-1024.
# :::
#
# ## Takeaways
#
# - The hardware's scheduler is dynamic and its empty programs are nearly free.
# - With real lengths the order of work is worth a few per cent. A list pays when it is used often.
# - A number of programs that shares a factor with the grid can undo any saving.
