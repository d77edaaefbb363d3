# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # Tickets and masks
#
# A causal mask lets query i see keys 0 to i, a window of w only the last w of them. So the last
# tile of a sequence sees all keys and the first one a single block. What does a list cost that
# counts both alike?
#
# :::{admonition} In this chapter (25 minutes)
# You will count the cost of a tile under a mask, and predict from the counts what a balanced
# schedule gains. On the H200 tickets make forward v8 {glue:text}`forward_gain` times as fast on
# causal batches of long or uneven sequences, and the backward kernels {glue:text}`backward_gain`
# times.
# :::

# %% tags=["hide-input"]
from functools import partial

import numpy as np
import pandas as pd

from _lib import drawings, ratios, studies
from gdpa_kernels.calling import ladder
from gdpa_kernels.gdpa import list_model
from gdpa_kernels.gdpa.device import tickets
from gdpa_lab.measuring.baselines import taking
from gdpa_lab.measuring.workloads import MASKED, UNMASKED, workload
from gdpa_lab.report import style
from gdpa_lab.report.chapter import Chapter
from gdpa_lab.report.roles import display_name

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("measuring/masked_batches", mode=mode, device=device, data_dir=data_dir)
FIXED = "fixed list"


def rung_on(of, way):
    if way == "forward":
        return "v8_own_waits"
    return "v4_warp_specialized_backward" if of.head_dim <= 128 else "v7_wide_backward"


def without_tickets(impl):
    """The rung with the fixed list that it had before tickets."""
    module = studies.changed(
        ladder.rung(impl).module(), ("uses_tickets(batch", "False and uses_tickets(batch")
    )
    return impl, FIXED, {"module": module}


def with_tickets(impl):
    """The rung with the tickets that it leaves out where nothing is masked."""
    options = {"q_slots": 1} if impl == "v8_own_waits" else {}
    config = ladder.rung(impl).module().Config(tickets=True, **options)
    return impl, "tickets", {"config": config}


@chapter.measure
def _(session):
    for way in ("forward", "backward"):
        for of in (*map(workload, MASKED), UNMASKED):
            impl = rung_on(of, way)
            other = without_tickets(impl) if of.causal else with_tickets(impl)
            peers = ["hstu_triton"] if of.target_share else ["fa3", "fa4"]
            cudnn = {"cudnn" if of.fill == 1 else "cudnn_varlen"} & {*taking(of, way)}
            impls = [impl, other, *peers, *cudnn]
            session.measure(of, impls, direction=way, scopes=("sustained",), seconds=0.5)


# %% tags=["hide-input"]
def placed(tiles: list_model.ModelledList, dynamic: bool) -> pd.DataFrame:
    """Program, start, time and cost of every tile."""
    free, bars = [0.0] * tiles.num_programs, []
    for index, time in enumerate(tiles.work(prologue=0.5)):
        program = free.index(min(free)) if dynamic else index % tiles.num_programs
        bars.append((program, free[program], time, str(tiles.costs[index])))
        free[program] += time
    return pd.DataFrame(bars, columns=["lane", "start", "time", "label"])


small = {"num_heads": 2, "num_programs": 4}
fixed = list_model.build("zigzag", [9], [9], block_m=1, block_n=1, fastest="block", **small)
fixed = list_model.with_masked_costs(fixed, [9], [9], block=1)
by_tickets = list_model.build_tickets([9], [9], block=1, **small)
panels = {
    f"{name}: {tiles.imbalance(prologue=0.5, dynamic=dynamic):.2f}": placed(tiles, dynamic)
    for name, tiles, dynamic in (("fixed list", fixed, False), ("tickets", by_tickets, True))
}

# %% tags=["remove-input"]
# | name: fig-masked-lists
# | caption: >
# |   **Programs that take the next tile when they are free end together.** Two heads of nine tiles
# |   under a causal mask on four programs (rows). Numbers: the cost of a tile in blocks of keys.
# |   Above: the slowest program against the mean.
# | alt: >
# |   Two timelines. With the fixed list one program ends long after the others; with tickets all
# |   four end at nearly the same time, the costly tiles first.
chart = drawings.gantt(panels, xlabel="time, in blocks of keys", hue="v8_own_waits")
chapter.figure(chart, modelled="gdpa_kernels.gdpa.list_model")

# %% [markdown]
# ## What a tile costs
#
# In the forward pass under a causal mask tile $r$ of a head, 128 rows, sees $r$ blocks of 128 keys;
# in the backward pass, where a tile is 128 keys, the first is seen by all rows and the last by its
# own. A window ends the growth. So the tiles of 16,384 tokens cost 1 to 128 blocks.
#
# So far program $p$ of $P$ took every $P$-th entry of a list ({doc}`../forward/v3_persistent`),
# sorted by the keys of a sequence, the same for all its tiles.
#
# ## Tickets
#
# A ticket is a number from an atomic counter in global memory: the next entry of the list, for
# whoever asks. The producer draws it and hands it to its consumers through shared memory:

# %% tags=["remove-input"]
chapter.code(tickets.take)

# %% [markdown]
# It draws late, when all loads of its tile are issued: a ticket drawn a tile ahead binds a program
# while others are free. Who takes which tile now depends on time, and so does the order in which
# tiles add to dQ.
#
# ## In which order
#
# Sorted by falling cost over all sequences the list was balanced best, and slow: on 16,384 tokens
# with 32 query heads on 8, backward v4 moved 24.5 GB through DRAM instead of 3.3 (profiled,
# {doc}`lab notes <../../notes/at_the_wall>`), since tiles that are taken together no longer read
# the same rows. So the list goes by sequences, longest first, then heads, then falling cost. Only
# its last heads are sorted by cost, as many as hold the work of all programs during the most costly
# tile.
#
# ## Sorted, or cut into runs
#
# A list can also be *cut*: each program gets a run of neighbouring tiles, as many as others or as
# much work, by the running sum of costs. Tiles of a head share K and V. A program that keeps them
# ({doc}`forward v6 <../forward/v6_short_kv>`) fetches them once in a run, but for each tile if
# every 132nd is its own:


# %% tags=["hide-input"]
def owners(costs: np.ndarray, way: str, programs: int = 132) -> np.ndarray:
    """The program of each tile of a list."""
    if way == "equal counts":
        return np.arange(len(costs)) * programs // len(costs)
    if way == "equal work":
        middles = costs.cumsum() - costs / 2
        return (middles * programs / costs.sum()).astype(int)
    if way == "dealt":
        return np.arange(len(costs)) % programs
    free, taken = np.zeros(programs), []
    for cost in costs:
        taken.append(free.argmin())
        free[taken[-1]] += cost
    return np.array(taken)


def split(name: str, way: str) -> tuple[float, float]:
    """The slowest program over the mean, and how often a head's K and V are fetched."""
    of = workload(name)
    order = {"dealt": "zigzag", "next free": "longest_first"}.get(way, "valid")
    lengths, options = (of.seqlens_q, of.seqlens_k), {"num_heads": of.num_heads_q}
    tiles = list_model.build(
        order, *lengths, block_m=128, block_n=128, num_programs=132, fastest="block", **options
    )
    if of.causal and way == "next free":
        tiles = list_model.build_tickets(*lengths, block=128, num_programs=132, **options)
    elif of.causal:
        tiles = list_model.with_masked_costs(tiles, *lengths, block=128)
    costs = np.array(tiles.work(prologue=0.5))
    program = owners(costs, way)
    loads = np.bincount(program, costs)
    by_program = np.argsort(program, kind="stable")
    heads = np.stack([program, tiles.tile_batch, tiles.tile_head])[:, by_program]
    fetched = 1 + (np.diff(heads) != 0).any(0).sum()
    return loads.max() / loads.mean(), fetched / len({*map(tuple, heads[1:].T)})


BATCHES = ("gdpa-cross-full-1024", "gdpa-self-half-jagged-1024", "gdpa-self-ml20m-2048",
           "gdpa-self-one-long-32768-b201-causal")  # fmt: skip
SPLITS = ("equal counts", "equal work", "dealt", "next free")
cuts = pd.DataFrame({ratios.row(name): {way: split(name, way) for way in SPLITS}
                     for name in BATCHES}).T  # fmt: skip
slowest, fetches = (cuts.map(lambda pair, i=i: pair[i]) for i in (0, 1))

# %% tags=["remove-input"]
shown = slowest.assign(**{"fetched: runs": fetches["equal work"], "dealt ": fetches["dealt"]})
chapter.table(
    shown.reset_index(names="batch"), name="tab-masked-cuts", digits=dict.fromkeys(shown, 2),
    caption="**Runs of equal work fetch keys once and lose where single tiles are large.** Slowest "
    "of 132 programs over the mean, then fetches of a head's K and V. Dealt: every 132nd of a "
    "sorted list; next free: by tickets.",
    modelled="gdpa_kernels.gdpa.list_model, half a block to begin a tile",
)  # fmt: skip
equal, uniform, real, long = slowest.index
assert slowest.loc[equal].max() < 1.01 and 7 < fetches.loc[equal, "dealt"] <= 8, "the text"
assert fetches["equal work"].max() < 1.2 and slowest.loc[:real, "equal work"].max() < 1.04
assert slowest.loc[long, "equal work"] > 1.1 > 1.03 > slowest["next free"].max(), "the text"
cross = workload(BATCHES[0])
chapter.glue(
    counted=slowest["equal counts"].max(),
    at_once=132 * 2 * 2048 * cross.head_dim * 2 / 2**20,
)  # fmt: skip

# %% [markdown]
# - *Small, equal items that wait for memory*: cut. Such a list is balanced anyway, and saves seven
#   of eight fetches. (Where matmuls are the limit, forward v6 gains little.)
# - *Uneven items, many a program*: cut by work. Equal counts reach {glue:text}`counted:.1f` times
#   the mean.
# - *Few large items*: sort, and take the next when free, also where an SM is slow or taken. The
#   ends of a run miss by up to half an item.
#
# A cut gives up L2 where keys do not fit on an SM: 132 programs on as many heads of 2,048 keys want
# {glue:text}`at_once:.0f` MiB at a time, while neighbours that are dealt out meet on few heads.
#
# ## Prediction
#
# If nothing but balance changed, the quotient of both lists' slowest programs would be the gain.


# %% tags=["hide-input"]
def model(name: str, way: str) -> dict[str, float]:
    """Imbalance of both lists for the rung that takes the call."""
    of = workload(name)
    block = 64 if way == "backward" and of.head_dim > 128 else 128
    heads = of.num_heads_q if way == "forward" else of.num_heads_k
    max_cost = list_model.window_cost(of.window, block)
    lengths, falling = (of.seqlens_q, of.seqlens_k), way == "forward"
    options = {"num_heads": heads, "num_programs": 132}
    fixed = list_model.build(
        "zigzag", *lengths, block_m=block, block_n=block, fastest="block", **options
    )
    costs = {"block": block, "falling": falling, "max_cost": max_cost}
    by_tickets = list_model.build_tickets(*lengths, **costs, **options)
    fixed, by_tickets = (
        list_model.with_masked_costs(tiles, *lengths, num_targets=of.num_targets, **costs)
        for tiles in (fixed, by_tickets)
    )
    imbalance = partial(list_model.ModelledList.imbalance, prologue=0.5)
    return {
        FIXED: imbalance(fixed),
        "tickets": imbalance(by_tickets, dynamic=True),
    }


# %% tags=["remove-cell"]
rows = {way: chapter.rows(direction=way, scope="sustained", variant=None)
        for way in ("forward", "backward")}  # fmt: skip


def compared(way: str) -> pd.DataFrame:
    """The modelled gain and the one in clocks, rates in TFLOP/s with both lists and of the best
    baseline."""
    of = rows[way]
    lines = {}
    for name, group in of[of["workload"] != UNMASKED.name].groupby("workload", sort=False):
        ours = group[group["impl"] == rung_on(workload(name), way)].set_index("variant")
        peers = group[~group["impl"].map(style.is_rung)]
        peer = ratios.best_peer(group) if peers["tflops"].notna().any() else None
        balance = model(name, way)
        assert balance["tickets"] < 1.04, "the text: within 4 %"
        cycles = ours["sm_clock_mhz"] / ours["tflops"]
        lines[ratios.row(name).removesuffix("-causal").replace("-b48", "")] = {
            "promised": balance[FIXED] / balance["tickets"],
            "clocks": cycles[FIXED] / cycles[""],
            FIXED: ours["tflops"][FIXED],
            "tickets": ours["tflops"][""],
            "baseline": np.nan if peer is None else peer["tflops"],
            "which": "none" if peer is None else display_name(peer["impl"], way),
        }
    table = pd.DataFrame(lines).T.infer_objects()
    table["which"] = table["which"].str.replace("FlashAttention-", "FA")
    return table


both = {way: compared(way) for way in rows}
gains = {way: of["tickets"] / of[FIXED] for way, of in both.items()}
ahead = {  # with targets one baseline alone is timed, which is no "best"
    way: (of["tickets"] / of["baseline"]).filter(regex="^(?!.*targets)").dropna()
    for way, of in both.items()
}


def together(of: dict[str, pd.Series]) -> pd.Series:
    """Both directions in one series, whose labels name them."""
    return pd.concat([x.rename(index=lambda n, way=way: f"{n}, {way}") for way, x in of.items()])


def unmasked(way: str) -> pd.Series:
    """Rates of a batch with its mask, without it, and without it by tickets, in TFLOP/s."""
    of = rows[way][rows[way]["impl"] == rung_on(UNMASKED, way)]
    of = of.set_index(["workload", "variant"])["tflops"]
    name = UNMASKED.name
    return pd.Series({"masked": of[f"{name}-causal", ""], "not": of[name, ""],
                      "tickets": of[name, "tickets"]})  # fmt: skip


whole = pd.DataFrame({way: unmasked(way) for way in rows}).T
promised, gained, in_clocks = map(together, (
    {way: of["promised"] for way, of in both.items()}, gains,
    {way: of["clocks"] for way, of in both.items()},
))  # fmt: skip
large = promised > 1.1
share = ((gained - 1) / (promised - 1))[large]
clocks = (in_clocks / promised)[large]
chapter.glue(
    **{f"{way}_gain": ratios.spread(of) for way, of in gains.items()},
    **{f"{way}_ahead": ratios.spread(of) for way, of in ahead.items()},
    behind=float((ahead["backward"] < 1).sum()), batches=float(len(ahead["backward"])),
    clocks=ratios.spread(clocks), of_unmasked=ratios.spread(whole["masked"] / whole["not"]),
    share=f"{100 * share.min():.0f} to {100 * share.max():.0f} %",
)  # fmt: skip
chapter.predict(
    "Tickets never cost more than 3 %: the least gain, both directions.",
    gained, least=0.97,
)  # fmt: skip
chapter.predict(
    "Where the model promises more than 1.1 times, at least half of what it promises is measured.",
    share, least=0.5,
)  # fmt: skip
chapter.predict(
    "Of its rate without a mask, a batch of 8,192 tokens with 32 heads on 8 keeps at least 0.9.",
    whole["masked"] / whole["not"], least=0.9,
)  # fmt: skip

# %% tags=["remove-input"]
chapter.predictions()

# %% [markdown]
# ## Measurement
#
# Causal batches of 4 heads of 128 columns, unless the name says otherwise: `h16` is 16 query heads
# on 4, `h32` 32 on 8, `one-long` one sequence of 32,768 tokens and 200 of 256. `targets`: SiLU, and
# the last 30 % of each sequence see its history and themselves, as in HSTU, whose Triton kernel,
# without TMA, is the one baseline there; its dQ fails our check.

# %% tags=["remove-input"]
short = {"forward": "fwd", "backward": "bwd"}
quotients = pd.concat([
    pd.DataFrame({f"{to}: promised": both[way]["promised"], f"{to}: gain": gains[way],
                  f"{to}: over best": both[way]["tickets"] / both[way]["baseline"]})
    for way, to in short.items()
], axis=1)  # fmt: skip
chapter.table(
    quotients.round(2).reset_index(names="batch"), measured=pd.concat(rows.values()),
    name="tab-masked", data=pd.concat(both).reset_index(names=["direction", "batch"]),
    caption="**Backward, tickets gain most where few long sequences hold the work.** Rates over "
    "those with the fixed list, promised and measured, and over the best baseline's, back to back "
    "on the H200.",
)  # fmt: skip
most = {"one-long-32768-b201", "full-32768-b2-h32", "full-16384-b1"}
assert {*gains["backward"].nlargest(3).index} == most, "the caption"

# %% [markdown]
# Where the model promises more than a tenth, {glue:text}`share` of it arrives. A balanced list
# keeps all SMs busy to the end, and near the power limit the clock falls ({doc}`power_wall`).
# Counted in clocks the gain is {glue:text}`clocks` times the promised one.
#
# Without the row of targets, which has one baseline, forward v8 with tickets is
# {glue:text}`forward_ahead` times as fast as the best baseline. In the backward pass it is
# {glue:text}`backward_ahead` times as fast, and {glue:text}`behind:.0f` of {glue:text}`batches:.0f`
# batches are behind, not by balance: the slowest program is within 4 % of the mean.
#
# ## Where the fixed list stays
#
# `ticket_list.uses_tickets` leaves tickets out where they gain nothing: without a mask, where tiles
# are no more than programs or a window makes them alike, or the model finds the fixed list
# balanced.
#
# With its mask `b8-h32` keeps {glue:text}`of_unmasked` of its rate: half of each tile on the
# diagonal is computed for nothing, 1.5 % here, and what a tile loads serves half as many keys.
#
# ## Exercises
#
# :::{exercise} How long a tail
# :label: ex-masked-tail
#
# Why do the sorted heads hold 132 times the most costly tile, and not, say, a fixed number of
# tiles? *(paper)*
# :::
#
# :::{solution} ex-masked-tail
# :class: dropdown
#
# When the first sorted tile is taken, every program is busy with at most one tile, and none of
# those costs more than the most costly one. What is left must fill up that difference for all 132
# programs, so it has to hold that much work. A shorter tail may end with one costly tile; a longer
# one gives up reuse in L2 for nothing.
# :::
#
# :::{exercise} Which split?
# :label: ex-masked-split
#
# For (a) 27,000 blocks of block attention whose three heads share sin and cos; (b) four causal
# sequences of 65,536 tokens; (c) 50,000 tiles of a PFFN beside NCCL, which holds 8 SMs half of the
# time? *(paper)*
# :::
#
# :::{solution} ex-masked-split
# :class: dropdown
#
# (a) Runs of three heads, so that sin and cos are fetched once, as our kernels do. (b) Tickets:
# tiles cost 1 to 512 blocks. (c) Tickets for runs: an item holds the tiles of one head, and whoever
# is free takes the next.
# :::
#
# ## Takeaways
#
# - A schedule needs each tile's cost, which a mask decides.
# - The order serves the caches; only the end of the list must serve the balance.
