# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # v6: the pipeline never drains
#
# A program of v5 fills an SM alone, computes one tile, and ends. What is gained if programs stay,
# if the products run on from one tile into the next, and if short K and V stay as well?
#
# :::{admonition} In this chapter
# - Programs that stay (`v6a_persistent`) run at {glue:text}`v6_stay_min:.2f` to
#   {glue:text}`v6_stay_max:.2f` times the rate of v5 on full batches of
#   {glue:text}`v6_shortest:.0f` to {glue:text}`v6_longest:.0f` tokens. The time saved is
#   {glue:text}`v6_saved_256:.1f` µs for a tile of 256 keys and {glue:text}`v6_saved_2048:.1f` µs
#   for one of 2,048, so short keys gain most.
# - One stream of products (`v6b_stream`) was to save a block's time on each tile. It changes the
#   rate by {glue:text}`v6_stream_min` to {glue:text}`v6_stream_max` %. The gap that it closes was
#   already filled.
# - K and V that stay (`v6_short_kv`) change it by {glue:text}`v6_resident_min` to
#   {glue:text}`v6_resident_max` % where no sequence has more than 256 keys, least where a head has
#   few tiles.
# :::

# %% tags=["remove-cell"]
import inspect
import math
import re

import pandas as pd
import torch
from IPython.display import SVG, Markdown, display

from gdpa_kernels import emulator
from gdpa_kernels.calling import ladder
from gdpa_kernels.emulator.launch import SHARED_BYTES
from gdpa_kernels.gdpa import (
    reference,
    schedule,
    v5_pingpong,
    v6_short_kv,
    v6a_persistent,
    v6b_stream,
)
from gdpa_kernels.measuring import testing
from gdpa_kernels.measuring.compile_check import compile_rung
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
NOTEBOOK = "notebooks/forward/v6_short_kv.py"
STEPS = ("v6a_persistent", "v6b_stream", "v6_short_kv")
MODULES = {
    "v5_pingpong": v5_pingpong,
    "v6a_persistent": v6a_persistent,
    "v6b_stream": v6b_stream,
    "v6_short_kv": v6_short_kv,
}
LENGTHS = (256, 512, 1024, 2048)
FULL = [f"gdpa-self-full-{length}" for length in LENGTHS]
CROSS = [f"gdpa-cross-full-{length}" for length in LENGTHS]
HALF = [f"gdpa-self-half-{kv}-{n}" for kv in ("dense", "jagged") for n in LENGTHS]
VERDICT = {True: "kept", False: "broken"}


def measured() -> pd.DataFrame:
    """Rows of all records."""
    rows = results.table(data_dir, system="h200", latest=False)
    return rows.drop_duplicates(["workload", "impl", "scope", "variant", "record"])


found = results.latest_record(data_dir, notebook="notebooks/forward/results.py", system="h200")
everything = measured()
ladders = everything[everything["record"] == found.id]
kernels = ladders[(ladders["scope"] == "kernel") & (ladders["variant"] == "")]
time = kernels.pivot(index="workload", columns="impl", values="time_us_p50")
rate = kernels.pivot(index="workload", columns="impl", values="tflops")


def glue(name: str, value: float) -> None:
    figures.glue_number(f"v6_{name}", value)


def signed(name: str, value: float) -> None:
    """A change in percent, with its sign."""
    figures.glue_text(f"v6_{name}", f"{value:+.1f}")


def short(name: str) -> str:
    return name.removeprefix("gdpa-")


def code(text: str) -> Markdown:
    return Markdown(f"```python\n{inspect.cleandoc(text)}\n```")


def difference(impl: str) -> Markdown:
    """The diff from the predecessor's file, folded away."""
    before = ladder.rung(impl).predecessor
    return Markdown(
        "\n".join(
            (
                f"````{{admonition}} From {before}.py to {impl}.py: "
                f"{ladder.changed_lines(impl)} changed lines of code",
                ":class: dropdown",
                "```diff",
                ladder.diff(impl, context=1).rstrip(),
                "```",
                "````",
            )
        )
    )


def emulated(module, call: dict, **options) -> emulator.Report:
    """The report of the kernel's own launch; the one before it makes the list."""
    config = options.pop("config", None)
    with emulator.enabled(**options) as reports:
        module.forward(**call, config=config)
    return reports[-1]


def problem(seqlens_q, seqlens_k, *, num_heads: int = 1, head_dim: int = 32) -> dict:
    """Seeded arguments of a rung's `forward`, on the CPU."""
    make = torch.Generator().manual_seed(2025)
    rows, keys = sum(seqlens_q), sum(seqlens_k)
    q, k, v = (
        torch.randn(n, num_heads, head_dim, generator=make).bfloat16() for n in (rows, keys, keys)
    )
    return {
        "q": q, "k": k, "v": v,
        "cu_seqlens_q": cu_seqlens(seqlens_q, "cpu"), "cu_seqlens_k": cu_seqlens(seqlens_k, "cpu"),
        "max_seqlen_q": max(seqlens_q), "max_seqlen_k": max(seqlens_k),
        "activation": ("gelu_tanh",), "scale": head_dim**-0.5, "output_scale": 1.0,
        "causal": False, "window": None,
    }  # fmt: skip


# %% [markdown]
# ## What stays, what changes
#
# | | v5 | v6a | v6b | v6 |
# |:--|:--|:--|:--|:--|
# | a program | one tile | walks a list of tiles | as v6a | as v6a |
# | next to a tile's last product | nothing | nothing | the next tile's first scores | as v6b |
# | K and V | fetched for each tile | as v5 | as v5 | fetched once for a head, if they fit |
# | the store of O | awaited | runs beside the next tile | as v6a | as v6a |
# | inside a tile | $Q K^T$ of one block beside $P V$ of the last | as v5 | as v5 | as v5 |
#
# What a role does within a tile has not changed since v5. All three steps are about what lies
# between two tiles. v3 had resident programs and a list already, and gained nothing by them
# ({doc}`v3_persistent`). Two of its programs shared an SM, so that one covered the beginning and
# the end of the other. A program of v4 or v5 takes all shared memory of an SM. While it starts or
# stores, that SM does nothing.
#
# ## Prediction
#
# Three predictions, one for each step, and a control (2026-11-21). Scripts had timed prototypes by
# then, but the records that judge them below did not exist.
#
# 1. *Resident programs save the same time on every tile*, a fifth of a tile with 512 keys: the
#    first copies, the set-up of barriers, the store. If a tile takes that constant plus a time
#    proportional to its keys, v6a runs at {glue:text}`v6_p1_256:.2f`, {glue:text}`v6_p1_512:.2f`,
#    {glue:text}`v6_p1_1024:.2f` and {glue:text}`v6_p1_2048:.2f` times the rate of v5 at 256, 512,
#    1024 and 2048 keys. A gain that differs from its prediction by more than half falsifies it.
# 2. *The stream saves one block's time on every tile.* v6a waits twice for each tile with empty
#    hands, for its first scores and for its last $P V$. A tile of $n$ blocks would take $n$ instead
#    of $n + 1$: {glue:text}`v6_p2_256:.0f`, {glue:text}`v6_p2_512:.1f`, {glue:text}`v6_p2_1024:.1f`
#    and {glue:text}`v6_p2_2048:.1f` %. Less than half of it at 256 or 512 keys falsifies it.
# 3. *K and V that stay are worth 3 to 6 %.* Every tile of v6b with 256 keys fetches
#    {glue:text}`v6_kv_kib:.0f` KiB of K and V. At 600 TFLOP/s that is {glue:text}`v6_kv_tb:.1f`
#    TB/s from the L2 cache (modelled). Less than 3 % on gdpa-cross-full-1024 falsifies it.
# 4. *Control.* With more than 256 keys v6 does what v6b does. If their times differ by more than
#    3 % there, the differences above mean little.

# %% tags=["remove-cell"]
CONSTANT = 0.2  # of the time of a tile of 512 keys in v5
TILE_FLOPS = 4 * 128 * 128  # of a tile of 128 rows, per key, at head_dim 128


def predicted_stay(keys: int) -> float:
    """Rate of v6a over v5: a constant and a part proportional to the keys, less the constant."""
    part = (1 - CONSTANT) * keys / 512
    return (CONSTANT + part) / part


def blocks(keys: int) -> int:
    config = v6b_stream.default_config(128, torch.bfloat16, keys)
    return math.ceil(keys / config.BLOCK_N)


def predicted_stream(keys: int) -> float:
    """Rate of v6b over v6a: n blocks' time instead of n + 1."""
    return (blocks(keys) + 1) / blocks(keys)


for length in LENGTHS:
    glue(f"p1_{length}", predicted_stay(length))
    glue(f"p2_{length}", 100 * (predicted_stream(length) - 1))
KV_BYTES = 2 * 256 * 128 * 2
glue("kv_kib", KV_BYTES / 1024)
glue("kv_tb", 600e12 / (TILE_FLOPS * 256) * KV_BYTES / 1e12)
glue("shortest", LENGTHS[0])
glue("longest", LENGTHS[-1])

# %% [markdown]
# ## The list, and the entry that says everything
#
# As in v3, a list made from the lengths says which tiles exist. v3's list held three numbers for a
# tile: sequence, head and row block. With these a program went to `cu_seqlens`, and only then knew
# where its rows lie: two trips to memory, the second waiting for the first, before the first copy
# of a tile could start. Here an entry is eight numbers, and no second trip follows:

# %% tags=["remove-cell"]
TOY = (300, 0, 70, 513, 128, 40)
CROSS_KEYS = 256
FIELDS = ("start_q", "start_out", "len_q", "start_k", "len_k", "head", "first_row", "unused")


def entries_of(seqlens_q, seqlens_k, config) -> pd.DataFrame:
    """The list that the kernel of work_list.py makes, in the emulator."""
    arguments = problem(seqlens_q, seqlens_k)
    with emulator.enabled():
        made = v6_short_kv.make_schedule(
            arguments["q"], arguments["cu_seqlens_q"], arguments["cu_seqlens_k"],
            max(seqlens_q), config,
        )  # fmt: skip
    count = int(made.entries[0, 0])
    table = pd.DataFrame(made.entries[1 : 1 + count].tolist(), columns=FIELDS)
    ends = [0]
    for length in seqlens_q:
        ends.append(ends[-1] + length)
    held = {start: i for i, (start, n) in enumerate(zip(ends, seqlens_q, strict=False)) if n}
    table.insert(0, "sequence", [held[start] for start in table["start_q"]])
    rows = config.rows_per_item(max(seqlens_q))
    left = (table["len_q"] - table["first_row"]).clip(upper=rows)
    table["tiles"] = [math.ceil(n / 128) for n in left]
    table["blocks"] = [math.ceil(n / config.BLOCK_N) for n in table["len_k"]]
    return table


PROGRAMS = 3  # what the emulator has for multiprocessors
TILES = v6_short_kv.Config()
HEADS = v6_short_kv.Config(resident=True)
self_list = entries_of(TOY, TOY, TILES)
expected = schedule.build(
    "zigzag", TOY, TOY, num_heads=1, block_m=128, block_n=128, num_programs=PROGRAMS,
    fastest="block",
)  # fmt: skip
assert list(zip(self_list["sequence"], self_list["first_row"] // 128, strict=True)) == [
    (sequence, block) for sequence, _, block in expected.tiles()
]
short_keys = [CROSS_KEYS if n else 0 for n in TOY]
tile_list = entries_of(TOY, short_keys, TILES)
head_list = entries_of(TOY, short_keys, HEADS)
assert tile_list["tiles"].sum() == head_list["tiles"].sum() == len(tile_list)
assert not head_list["sequence"].duplicated().any()

# %% tags=["remove-input"]
shown = self_list[["sequence", *FIELDS[:-1]]].head(6).copy()
shown.insert(0, "program", [i % PROGRAMS for i in shown.index])
figures.show_table(shown)

# %% tags=["remove-input"]
figures.source(
    "emulated",
    f"the first entries that work_list_kernel makes of self-attention over {len(TOY)} sequences of "
    f"{', '.join(map(str, TOY))} tokens, for {PROGRAMS} programs",
)


# %% tags=["remove-input"]
# | name: fig-v6-list
# | caption: >
# |   Three lists made by the list's kernel in the emulator, drawn as what each of three programs
# |   computes (rows); the number is the sequence, a bar its blocks of keys, thin lines divide
# |   tiles. Left: self-attention, an entry is a tile. Middle: 256 keys for all. Right: the same,
# |   but an entry is a whole sequence. Above: the slowest program over the mean.
# | alt: >
# |   Three small timelines of three programs. In the first, the long sequence comes first on all
# |   programs and they end at nearly the same time. In the second, tiles of equal length are dealt
# |   evenly. In the third one program has a sequence of five tiles and ends long after another.
def loads(table: pd.DataFrame) -> list[float]:
    cost = table["tiles"] * table["blocks"]
    return [float(cost[table.index % PROGRAMS == p].sum()) for p in range(PROGRAMS)]


def imbalance(table: pd.DataFrame) -> float:
    return max(loads(table)) / (sum(loads(table)) / PROGRAMS)


PANELS = {
    "self, tiles": self_list, "cross, tiles": tile_list, "cross, sequences": head_list
}  # fmt: skip
with figures.style():
    chart, axes = figures.subplots(1, 3, width=8.0, height=2.3, sharey=True)
    for axis, (title, table) in zip(axes, PANELS.items(), strict=True):
        free = [0.0] * PROGRAMS
        for item, row in table.iterrows():
            program = item % PROGRAMS
            for tile in range(row["tiles"]):
                axis.barh(
                    program, row["blocks"], 0.72, left=free[program] + tile * row["blocks"],
                    color=figures.colour("v6_short_kv"), edgecolor="#505050", linewidth=0.5,
                )  # fmt: skip
            took = row["tiles"] * row["blocks"]
            axis.annotate(
                str(row["sequence"]), (free[program] + took / 2, program), color="white",
                ha="center", va="center",
            )  # fmt: skip
            free[program] += took
        axis.set_title(f"{title}: {imbalance(table):.2f}")
        axis.set_xticks(range(0, int(max(loads(table))) + 1, 2))
        axis.set_ylim(PROGRAMS - 0.4, -0.6)
        axis.set_yticks(range(PROGRAMS))
        axis.grid(visible=False)
        axis.set_xlabel("blocks of 128 keys")
display(chart)

# %% tags=["remove-input"]
figures.source("emulated", "the lists of work_list_kernel; a tile takes its blocks of keys")

# %% tags=["remove-cell"]
assert imbalance(head_list) > imbalance(tile_list), "the text says that sequences balance worse"
glue("toy_tiles", imbalance(tile_list))
glue("toy_heads", imbalance(head_list))
whole = workload("gdpa-self-full-256")
for name, rows in (("tiles", 128), ("heads", 256)):
    items = whole.batch * whole.num_heads_q * math.ceil(256 / rows)
    glue(f"real_{name}", 100 * (math.ceil(items / 132) * 132 / items - 1))
    glue(f"items_{name}", items)

# %% [markdown]
# The order is v3's zigzag: the tiles with most keys first, every second round of programs in
# reverse. One small kernel makes it (`work_list.py`), where v3 needed dozens of PyTorch operations.
# Each of its programs ranks eight sequences by comparing them with all others.
#
# The right panel shows the price of the third step. When K and V stay, an entry is a whole head of
# a sequence, and there is less to balance with: {glue:text}`v6_toy_heads:.2f` instead of
# {glue:text}`v6_toy_tiles:.2f` in this toy. On gdpa-self-full-256 the difference is small, because
# {glue:text}`v6_items_heads:,.0f` equal entries on 132 programs leave
# {glue:text}`v6_real_heads:.1f` % idle at the end, and {glue:text}`v6_items_tiles:,.0f` tiles
# {glue:text}`v6_real_tiles:.1f` % (modelled).
#
# ## Step one: programs that stay
#
# An entry is loaded one tile ahead. It is needed only after the blocks of this tile, so memory has
# a tile's time to answer:

# %% tags=["remove-input"]
body = inspect.getsource(v6a_persistent.math.fn)
code("    " + body[body.index("        _, start_out") : body.index("            start, blocks =")])

# %% tags=["remove-input"]
difference("v6a_persistent")

# %% [markdown]
# The store of O has a buffer of its own. The copy engine drains it while the next tile is computed,
# and `async_descriptor_store_wait(0)` comes a whole tile later, before the buffer is written again.
#
# ## Step two: one stream
#
# v6b turns the loop over tiles as v5 turned the loop over blocks. At the boundary a role issues the
# first scores of the next tile, then the last $P V$ of this one, and evaluates the activation of
# the new scores while the old product runs:

# %% tags=["remove-input"]
body = inspect.getsource(v6b_stream.math.fn)
start, end = (
    body.index(text) for text in ("            mine = role * Q_SLOTS + tile % Q_SLOTS\n"
                                  "            stage = kv", "            start_out, len_q, head")
)  # fmt: skip
code(body[start:end].rstrip())

# %% tags=["remove-input"]
difference("v6b_stream")

# %% [markdown]
# After the last tile a role multiplies scores that nobody wants. The load role supplies zeros for
# them, which is cheaper than a second copy of the loop's body without them.
#
# ## Step three: K and V that stay
#
# An entry becomes a (sequence, head) with all its query rows. The load role fetches K and V with
# the first tile only, and a math role gives a buffer back only after the last:

# %% tags=["remove-input"]
code(inspect.getsource(v6_short_kv.release.fn))

# %% tags=["remove-input"]
difference("v6_short_kv")

# %% [markdown]
# Roles and barriers of v6; v6a and v6b differ only where it says *resident*:

# %% tags=["remove-input"]
tables = re.findall(r"(?:^\|.*\n)+", inspect.getdoc(v6_short_kv) + "\n", flags=re.MULTILINE)
Markdown("\n".join(tables))

# %% [markdown]
# ## The boundary of two tiles, emulated
#
# Both kernels on tiles of 128 rows and 256 keys, head_dim 128, one program in the middle of its
# list, in modelled cycles.

# %% tags=["remove-cell"]
PICTURE = problem([128] * 12, [256] * 12, head_dim=128)
WIDE = {name: MODULES[name].Config() for name in STEPS[:2]}
traces = {
    name: emulated(MODULES[name], PICTURE, config=WIDE[name], trace=True).timeline for name in WIDE
}
WINDOW = (6000.0, 13000.0)


def busy(events, lane: str, kinds: tuple[str, ...], left: float, right: float) -> float:
    """Share of the time from left to right that `lane` spends in events of `kinds`."""
    spent = sum(
        max(0.0, min(e.end, right) - max(e.start, left))
        for e in events
        if e.cta == 0 and e.lane == lane and e.kind in kinds
    )
    return spent / (right - left)


# %% tags=["remove-input"]
# | name: fig-v6a-timeline
# | caption: >
# |   v6a at the boundary of two tiles of 256 keys. After writing its output (violet) a math role
# |   waits for the first scores of its next tile with nothing else to do.
# | alt: >
# |   Five lanes over modelled cycles: load, two math roles, TMA, tensor core. Each math role writes
# |   its output, waits, then evaluates the activation. The tensor core's row is full of products
# |   nearly all the time, also while a role waits.
SVG(traces["v6a_persistent"].svg(width=720, start=WINDOW[0], end=WINDOW[1]))

# %% tags=["remove-input"]
figures.source(
    "emulated",
    "v6a_persistent, 12 sequences of 128 rows and 256 keys on 3 programs, CTA 0; cycles are "
    "modelled",
)

# %% tags=["remove-input"]
# | name: fig-v6b-timeline
# | caption: >
# |   v6b at the same place. The first scores of the next tile are issued with the last product of
# |   this one, and the activation follows at once; the output is written afterwards.
# | alt: >
# |   The same five lanes. The order within a math role has changed, the row of the tensor core is
# |   as full as before.
SVG(traces["v6b_stream"].svg(width=720, start=WINDOW[0], end=WINDOW[1]))

# %% tags=["remove-input"]
figures.source(
    "emulated",
    "v6b_stream, 12 sequences of 128 rows and 256 keys on 3 programs, CTA 0; cycles are modelled",
)


# %% tags=["remove-cell"]
def boundary_waits(timeline) -> list[tuple[float, float]]:
    """Waits of math[0] from the end of a tile's output to the scores of the next."""
    mine = [e for e in timeline.events if (e.cta, e.lane) == (0, "math[0]")]
    mine = sorted((e for e in mine if e.end > e.start), key=lambda e: (e.start, e.end))
    writes = [i for i, e in enumerate(mine) if e.kind == "write"]
    return [
        (mine[i + 1].start, mine[i + 1].end)
        for i in writes
        if i + 1 < len(mine) and mine[i + 1].kind == "wait"
    ]


events = traces["v6a_persistent"].events
idle = [w for w in boundary_waits(traces["v6a_persistent"]) if w[1] - w[0] > 100]
assert len(idle) >= 2, "the text says that a role waits at the boundary"
overlap = [busy(events, "tensor core", ("mma",), left, right) for left, right in idle]
glue("idle_cycles", sum(right - left for left, right in idle) / len(idle))
glue("idle_busy", 100 * sum(overlap) / len(overlap))
for name, timeline in traces.items():
    length = max(e.end for e in timeline.events)
    glue(f"core_{name}", 100 * busy(timeline.events, "tensor core", ("mma",), 2000, length - 2000))
cycles = {name: max(e.end for e in timeline.events) for name, timeline in traces.items()}
glue("emulated_ratio", cycles["v6b_stream"] / cycles["v6a_persistent"])
emulated_core = busy(events, "tensor core", ("mma",), 2000, cycles["v6a_persistent"] - 2000)
assert emulated_core > 0.8, "the text says that the tensor core hardly rests"
assert sum(overlap) / len(overlap) > 0.7, "the text says that the other role fills the gap"

few = problem([512], [256], head_dim=64)
moved = {
    resident: emulated(v6_short_kv, few, config=v6_short_kv.Config(resident=resident)).bytes_loaded
    for resident in (False, True)
}
glue("moved_tiles", moved[False] / 1024)
glue("moved_heads", moved[True] / 1024)
assert moved[True] < 0.6 * moved[False]

# %% [markdown]
# In v6a a math role does wait at the boundary, as predicted: {glue:text}`v6_idle_cycles:.0f` cycles
# after it has written its output. But look at the row of the tensor core. During these waits it is
# busy {glue:text}`v6_idle_busy:.0f` % of the time, for the other math role. Over the whole launch,
# its beginning and end left out, it works {glue:text}`v6_core_v6a_persistent:.0f` % of the time in
# v6a and {glue:text}`v6_core_v6b_stream:.0f` % in v6b; the launch of v6b, with its unwanted scores
# after only four tiles, takes {glue:text}`v6_emulated_ratio:.2f` times the modelled cycles of
# v6a's. The model says what the prediction did not: two roles out of step already fill each other's
# gaps.
#
# For the third step the emulator counts bytes. A sequence of 512 rows and 256 keys at head_dim 64
# loads {glue:text}`v6_moved_tiles:.0f` KiB if every tile fetches K and V, and
# {glue:text}`v6_moved_heads:.0f` KiB if they stay.
#
# ## Is it right?
#
# A batch with an empty sequence, a single row, rows and keys around the edges of tiles and blocks,
# and a sequence with queries but no keys, against the fp64 reference. The budget is computed from
# what PyTorch makes of the same mathematics in bf16.

# %%
call = problem((200, 0, 1, 131, 17), (70, 33, 5, 260, 0), num_heads=2)
exact = {name: call[name].double() for name in ("q", "k", "v")}
expected, baseline = reference.forward(**{**call, **exact}), reference.forward(**call)
CONFIGS = {
    "v5_pingpong": v5_pingpong.Config(),
    "v6a_persistent": v6a_persistent.Config(),
    "v6b_stream": v6b_stream.Config(),
    "v6_short_kv": v6_short_kv.Config(),
    "v6_short_kv, 64 keys": v6_short_kv.Config(BLOCK_N=64, num_stages=4),
}
outputs = {}
with emulator.enabled():
    for name, config in CONFIGS.items():
        out = MODULES[name.split(",")[0]].forward(**call, config=config)
        found_error = testing.compare(
            name=name, actual=out, expected=expected, baseline=baseline
        )  # fmt: skip
        outputs[name] = out
        print(found_error)
        assert found_error.passed

# %% tags=["remove-cell"]
for name in ("v6a_persistent", "v6b_stream", "v6_short_kv"):
    assert torch.equal(outputs[name], outputs["v5_pingpong"]), "the text says: the same bits"
stays = problem((200, 0, 1, 131, 17), (70, 33, 5, 256, 0), num_heads=2)
kept = {}
for seed in ("modelled", 0, 1):
    with emulator.enabled(schedule=seed):
        kept[seed] = v6_short_kv.forward(**stays, config=v6_short_kv.Config(resident=True))
with emulator.enabled():
    fetched = v6_short_kv.forward(**stays, config=v6_short_kv.Config())
assert all(torch.equal(out, fetched) for out in kept.values()), "the text says: the same bits"
glue("random", len(kept) - 1)

# %% [markdown]
# With blocks of 128 keys v5 and the three steps give the same bits: they add the same numbers in
# the same order. So does v6 with K and V that stay (on a batch with at most 256 keys, also under
# {glue:text}`v6_random:.0f` random schedules of the roles). And nobody sees a neighbour's values:

# %%
poisoned = dict(stays)
for name, ends in (("q", "cu_seqlens_q"), ("k", "cu_seqlens_k"), ("v", "cu_seqlens_k")):
    start, end = stays[ends][3:5].tolist()
    poisoned[name] = stays[name].clone()
    poisoned[name][start:end] = float("nan")
with emulator.enabled():
    out = v6_short_kv.forward(**poisoned, config=v6_short_kv.Config(resident=True))
start, end = stays["cu_seqlens_q"][3:5].tolist()
others = torch.ones(len(out), dtype=torch.bool)
others[start:end] = False
print("sequence 3 is NaN:", bool(out[start:end].isnan().all()))
print("all others keep their bits:", torch.equal(out[others], fetched[others]))

# %% tags=["remove-cell"]
assert out[start:end].isnan().all() and torch.equal(out[others], fetched[others])
checked = kernels[kernels["impl"].isin(STEPS)]
assert checked["correct"].fillna(False).astype(bool).all(), "a step failed its check on the GPU"
glue("checked", len(checked))

# %% [markdown]
# On the GPU all {glue:text}`v6_checked:.0f` rows of the three steps in the record below passed the
# same check on their own inputs before they were timed.
#
# ## What the compiler made of it
#
# Compiled for sm_90a at head_dim 128, GELU in its tanh form:

# %% tags=["remove-cell"]
COMPILED = {name: compile_rung(name) for name in MODULES}
COMPILED["v6_short_kv, K and V stay"] = compile_rung(
    "v6_short_kv", config=v6_short_kv.Config(resident=True)
)
assert all(c.spill_bytes == 0 and not c.serialised for c in COMPILED.values())
assert all(c.shared_bytes <= SHARED_BYTES for c in COMPILED.values())
MNEMONICS = ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG", "MUFU", "LDG")
listing = pd.DataFrame(
    {
        "rung": name,
        "bytes spilled": c.spill_bytes,
        "shared memory (bytes)": c.shared_bytes,
        "instructions": sum(c.instructions.values()),
        **{mnemonic: c.instructions[mnemonic] for mnemonic in MNEMONICS},
    }
    for name, c in COMPILED.items()
)
mufu = listing.set_index("rung")["MUFU"]
glue("copies_before", round(mufu["v6a_persistent"] / 128))
glue("copies_after", round(mufu["v6b_stream"] / 128))
glue("smem_most", listing["shared memory (bytes)"].max())
glue("smem_limit", SHARED_BYTES)
assert mufu["v6b_stream"] > 1.3 * mufu["v6a_persistent"]

# %% tags=["remove-input"]
figures.show_table(listing)

# %% tags=["remove-input"]
figures.source("modelled", "ptxas and nvdisasm on the kernels compiled for sm_90a")

# %% [markdown]
# No spills, and no wgmma that waits for another. `UTMALDG` and `UTMASTG` are the copies by TMA,
# `USETMAXREG` is the hand-over of registers from the load role to the math roles. The activation
# stands {glue:text}`v6_copies_before:.0f` times in v6a (before the loop over blocks, and in it) and
# {glue:text}`v6_copies_after:.0f` times in v6b, which has it at the boundary as well. Code that is
# there twice costs nothing as long as the instruction cache holds it. Shared memory is full:
# {glue:text}`v6_smem_most:,.0f` of {glue:text}`v6_smem_limit:,.0f` bytes.
#
# ## Measurement
#
# The ladder on all forward workloads comes from {doc}`results`. This cell measures what is this
# chapter's own: block sizes, K and V that stay or do not, and the list. It runs with
# `make measure NOTEBOOKS=forward/v6_short_kv`, on a GPU.

# %% tags=["hide-input"]
if mode == "measure":
    import functools

    from gdpa_kernels.gdpa import v6_short_kv, v6a_persistent, v6b_stream, work_list
    from gdpa_kernels.gdpa.schedule import max_tiles
    from gdpa_kernels.measuring import record, timing
    from gdpa_kernels.measuring.inputs import make_inputs
    from gdpa_kernels.measuring.session import Session
    from gdpa_kernels.measuring.workload import workload

    session = Session("notebooks/forward/v6_short_kv.py", device)
    blocks_of_keys = {64: {"BLOCK_N": 64, "num_stages": 4}, 128: {}}
    stream = [
        (impl, f"{keys} keys", {"config": module.Config(**constants)})
        for impl, module in (("v6a_persistent", v6a_persistent), ("v6b_stream", v6b_stream))
        for keys, constants in blocks_of_keys.items()
    ]
    resident = [
        (
            "v6_short_kv",
            f"{keys} keys, {'stay' if stay else 'fetched'}",
            {"config": v6_short_kv.Config(**constants, resident=stay)},
        )
        for stay in (False, True)
        for keys, constants in blocks_of_keys.items()
    ]
    for name in ("gdpa-self-full-512", "gdpa-self-full-1024", "gdpa-self-half-jagged-1024"):
        session.measure(workload(name), stream)
    for name in ("gdpa-self-full-256", "gdpa-cross-full-1024"):
        session.measure(workload(name), [*stream, *resident])
    for name in ("gdpa-self-full-256", "gdpa-self-full-1024", "gdpa-self-half-jagged-1024"):
        work = workload(name)
        inputs = make_inputs(work, device=session.device)
        rows, heads, _ = inputs.q.shape
        makers = {
            "list": functools.partial(
                work_list.work_list,
                inputs.cu_seqlens_q,
                inputs.cu_seqlens_k,
                max_tiles=max_tiles(rows, work.batch, inputs.max_seqlen_q, 128),
                max_seqlen_q=inputs.max_seqlen_q,
                num_heads=heads,
                rows_per_item=128,
                block_n=64,
                num_programs=session.system.num_sms,
            ),
            "remembered": functools.partial(
                v6b_stream.make_schedule,
                inputs.q,
                inputs.cu_seqlens_q,
                inputs.cu_seqlens_k,
                inputs.max_seqlen_q,
                v6b_stream.Config(BLOCK_N=64, num_stages=4),
            ),
        }
        timed = [
            ("list", "device", timing.sample_kernels),
            ("list", "host", timing.sample_ops),
            ("remembered", "host", timing.sample_ops),
        ]
        for maker, how, sampler in timed:
            common = {
                "impl": "v6_short_kv", "math": "activation", "scope": "schedule",
                "variant": f"{maker}, {how} time", "flops": 0, "bytes_read": 0, "bytes_written": 0,
            }  # fmt: skip
            try:
                taken = sampler({maker: makers[maker]}, session.device, session.protocol)
                row = record.Row.of(work, "forward", **common, samples_us=taken[maker])
            except Exception as error:
                text = f"{type(error).__name__}: {str(error)[:200]}"
                row = record.Row.of(work, "forward", **common, failure=text)
            session.add(work, row)
        del inputs, makers
    print(session.write(data_dir))


# %% tags=["remove-cell"]
def gain(after: str, before: str, names) -> pd.Series:
    """Rate of `after` over the rate of `before`, by workload."""
    return time.loc[list(names), before] / time.loc[list(names), after]


own = results.latest_record(data_dir, notebook=NOTEBOOK, system="h200")
everything = measured()
ablation = everything[everything["record"] == own.id]
judged = []
stay, stream = gain("v6a_persistent", "v5_pingpong", FULL), gain("v6b_stream", STEPS[0], FULL)
for name, length in zip(FULL, LENGTHS, strict=True):
    judged.append(
        {
            "workload": short(name),
            "v6a / v5, predicted": predicted_stay(length),
            "v6a / v5": stay[name],
            "v6b / v6a, predicted": predicted_stream(length),
            "v6b / v6a": stream[name],
            "v6 / v6b": gain("v6_short_kv", "v6b_stream", [name])[name],
        }
    )
judged = pd.DataFrame(judged)
TAKES_SHORT = [n for n in time.index if workload(n).max_seqlen_k <= 256]
LONG = [n for n in time.index if n not in TAKES_SHORT]
resident = gain("v6_short_kv", "v6b_stream", TAKES_SHORT)
control = gain("v6_short_kv", "v6b_stream", LONG)
all_stream = gain("v6b_stream", "v6a_persistent", time.index)
part = (judged["v6a / v5"] - 1) / (judged["v6a / v5, predicted"] - 1)
half = (judged["v6b / v6a"] - 1) / (judged["v6b / v6a, predicted"] - 1)
saved = {}
for name in FULL:
    work = workload(name)
    tiles = work.batch * work.num_heads_q * work.max_seqlen_q / 128
    saved[name] = (time.loc[name, "v5_pingpong"] - time.loc[name, STEPS[0]]) * 132 / tiles
    glue(f"saved_{work.max_seqlen_k}", saved[name])
figures.glue_text("v6_verdict_1", VERDICT[bool(((part > 0.5) & (part < 1.5)).all())])
figures.glue_text("v6_verdict_2", VERDICT[bool((half[:2] >= 0.5).all())])
figures.glue_text("v6_verdict_3", VERDICT[bool(resident["gdpa-cross-full-1024"] >= 1.03)])
figures.glue_text("v6_verdict_4", VERDICT[bool(((control - 1).abs() <= 0.03).all())])
glue("stay_min", stay.min())
glue("stay_max", stay.max())
even = min(saved.values()) > 0.7 * max(saved.values())
figures.glue_text(
    "v6_saved_word",
    "about the same for all"
    if even
    else "less for more keys, so that the constant is not one"
    if saved[FULL[-1]] < saved[FULL[0]]
    else "more for more keys, so that the constant is not one",
)
signed("stream_min", 100 * (all_stream.min() - 1))
signed("stream_max", 100 * (all_stream.max() - 1))
glue("stream_half", 100 * half[:2].max())
signed("resident_min", 100 * (resident.min() - 1))
signed("resident_max", 100 * (resident.max() - 1))
signed("resident_cross", 100 * (resident["gdpa-cross-full-1024"] - 1))
glue("resident_count", len(resident))
glue("control", 100 * (control - 1).abs().max())
stay_half = gain("v6a_persistent", "v5_pingpong", HALF)
glue("stay_half_min", stay_half.min())
glue("stay_half_max", stay_half.max())
assert (stay > 0.97).all() and stay[FULL[0]] > 1.2, "the text says that resident programs pay"
assert stay[FULL[0]] > stay[FULL[-1]], "the text says that short keys gain most"
assert (half[:2] < 0.6).all(), "the surprise is that the stream gains little"
assert stream.max() < stay.max() - 0.2, "the text says that the first step matters"
TILES_OF_A_HEAD = {n: math.ceil(workload(n).max_seqlen_q / 128) for n in TAKES_SHORT}
many = resident[[n for n in TAKES_SHORT if TILES_OF_A_HEAD[n] >= 8]]
few_tiles = resident[[n for n in TAKES_SHORT if TILES_OF_A_HEAD[n] <= 2]]
assert len(many) == 2 and len(many) + len(few_tiles) + 1 == len(resident)
assert many.min() > few_tiles.min() + 0.03, "the text says that few tiles gain least"
for label, values in (("many", many), ("few", few_tiles)):
    signed(f"resident_{label}_min", 100 * (values.min() - 1))
    signed(f"resident_{label}_max", 100 * (values.max() - 1))
figures.glue_text("v6_least", short(few_tiles.idxmin()))
noise = (control - 1).abs().max()
within = [str(n) for n, name in zip(LENGTHS, FULL, strict=True) if stay[name] - 1 <= noise]
figures.glue_text(
    "v6_within",
    f"the gain of v6a on full batches with {' and '.join(within)} keys is no larger"
    if within
    else "the gains of v6a on full batches are all larger",
)
figures.glue_text(
    "v6_stream_word", "more than" if (all_stream - 1).abs().max() > noise else "no more than"
)
figures.glue_text(
    "v6_third_word",
    "That is worth nothing that this record can tell from noise: with this arithmetic nobody was "
    "short of it."
    if resident.max() - 1 < noise
    else f"That is worth {100 * (resident.max() - 1):.1f} % at most.",
)

# %% tags=["remove-input"]
# | name: fig-v6-steps
# | caption: >
# |   What each step changes in the rate of the one before, forward, kernel alone. Filled: measured.
# |   Hollow: predicted, for full batches.
# | alt: >
# |   Three dot plots over the workloads. Resident programs gain much at 256 keys and little at
# |   2048, close to the hollow predicted dots. The stream's measured dots lie near zero, far below
# |   the predicted ones. For K and V that stay some dots lie left of zero and some right of it; the
# |   lowest are those of half-full batches with 256 tokens.
SHOWN = [*FULL, *CROSS, *HALF]
STEP_OF = (
    ("v6a / v5: programs stay", "v6a_persistent", "v5_pingpong", predicted_stay),
    ("v6b / v6a: one stream", "v6b_stream", "v6a_persistent", predicted_stream),
    ("v6 / v6b: K and V stay", "v6_short_kv", "v6b_stream", None),
)
drawn = pd.DataFrame(
    {
        "step": title,
        "workload": short(name),
        "measured (%)": 100 * (gain(after, before, [name])[name] - 1),
        "predicted (%)": (
            100 * (model(workload(name).max_seqlen_k) - 1)
            if model and "-full-" in name
            else math.nan
        ),
    }
    for title, after, before, model in STEP_OF
    for name in SHOWN
)
with figures.style():
    chart, axes = figures.subplots(1, 3, width=8.4, height=4.4, sharey=True)
    for axis, (title, after, *_) in zip(axes, STEP_OF, strict=True):
        some = drawn[drawn["step"] == title].reset_index(drop=True)
        axis.axvline(0, color=INK, linewidth=1)
        axis.plot(
            some["predicted (%)"], some.index, "o", markersize=8, markerfacecolor="none",
            markeredgecolor=INK, linestyle="none",
        )  # fmt: skip
        axis.plot(
            some["measured (%)"], some.index, "o", markersize=5.5, color=figures.colour(after)
        )  # fmt: skip
        axis.set_yticks(some.index, list(some["workload"]))
        axis.set_ylim(len(some) - 0.4, -0.6)
        axis.grid(visible=False, axis="y")
        axis.grid(visible=True, axis="x")
        axis.set_title(title)
        left, right = axis.get_xlim()
        axis.set_xlim(min(left, -5), max(right, 5))
        axis.set_xlabel("change of the rate (%)")
display(chart)

# %% tags=["remove-input"]
figures.save_csv(drawn, "v6-steps")
shown = kernels[kernels["impl"].isin(["v5_pingpong", *STEPS])]
figures.provenance(shown, csv="v6-steps", data_dir=data_dir)

# %% [markdown]
# 1. *The same time on every tile*: **{glue:text}`v6_verdict_1`**. On full batches v6a runs at
#    {glue:text}`v6_stay_min:.2f` to {glue:text}`v6_stay_max:.2f` times the rate of v5. The time
#    saved for a tile of 256, 512, 1024 and 2048 keys is {glue:text}`v6_saved_256:.1f`,
#    {glue:text}`v6_saved_512:.1f`, {glue:text}`v6_saved_1024:.1f` and
#    {glue:text}`v6_saved_2048:.1f` µs: {glue:text}`v6_saved_word`. On half-full batches, where
#    tiles without rows vanish too, v6a runs at {glue:text}`v6_stay_half_min:.2f` to
#    {glue:text}`v6_stay_half_max:.2f` times the rate of v5.
# 2. *One block's time*: **{glue:text}`v6_verdict_2`**. Of the gain predicted for 256 and 512 keys
#    at most {glue:text}`v6_stream_half:.0f` % is there; over all workloads the stream changes the
#    rate by {glue:text}`v6_stream_min` to {glue:text}`v6_stream_max` %.
# 3. *K and V that stay*: **{glue:text}`v6_verdict_3`**. On gdpa-cross-full-1024 they change the
#    rate by {glue:text}`v6_resident_cross` %, on all {glue:text}`v6_resident_count:.0f` workloads
#    with at most 256 keys by {glue:text}`v6_resident_min` to {glue:text}`v6_resident_max` %: by
#    {glue:text}`v6_resident_many_min` to {glue:text}`v6_resident_many_max` % where a head has eight
#    tiles or more, by {glue:text}`v6_resident_few_min` to {glue:text}`v6_resident_few_max` % where
#    it has one or two. Here v6b computes blocks of 64 keys and v6 blocks of 128; the next section
#    holds the size fixed.
# 4. *Control*: **{glue:text}`v6_verdict_4`**. Where both do the same, their times differ by at most
#    {glue:text}`v6_control:.1f` %. A change of that size in the points above may be noise;
#    {glue:text}`v6_within`.
#
# The numbers behind the first two:

# %% tags=["remove-input"]
figures.show_table(judged.round(3))

# %% tags=["remove-input"]
figures.provenance(shown[shown["workload"].isin(FULL)], data_dir=data_dir)

# %% [markdown]
# ### Blocks of 64 or of 128 keys
#
# A block of 64 keys wastes less at the end of a sequence, and its first scores come sooner. A block
# of 128 reads Q from shared memory half as often. `default_config` takes 64 up to a mean of 640
# keys. The same choice in one run, and K and V that stay with either:

# %% tags=["remove-cell"]
mine = ablation[ablation["scope"] == "kernel"]
variants = mine.pivot(index="workload", columns=["impl", "variant"], values="tflops")
sizes = []
for impl in ("v6a_persistent", "v6b_stream"):
    for name in variants.index:
        small, large = (variants.loc[name, (impl, f"{n} keys")] for n in (64, 128))
        work = workload(name)
        mean = sum(work.seqlens_k) / work.batch
        rule = v6b_stream.default_config(128, torch.bfloat16, work.max_seqlen_k, mean).BLOCK_N
        sizes.append(
            {
                "workload": short(name),
                "impl": impl,
                "64 keys": small,
                "128 keys": large,
                "64 over 128 (%)": 100 * (small / large - 1),
                "default": rule,
            }
        )
sizes = pd.DataFrame(sizes)
timed_sizes = sizes.dropna()
right = (timed_sizes["64 over 128 (%)"] > 0) == (timed_sizes["default"] == 64)
loss = timed_sizes["64 over 128 (%)"].abs()[~right]
glue("rule_right", int(right.sum()))
glue("rule_all", len(timed_sizes))
glue("rule_loss", loss.max() if len(loss) else 0.0)
glue("large_wins", int((timed_sizes["64 over 128 (%)"] < 0).sum()))
KEPT_IN = ("gdpa-self-full-256", "gdpa-cross-full-1024")
same_size = []
for name in KEPT_IN:
    for keys in (64, 128):
        fetched_rate, kept_rate = (
            variants.loc[name, ("v6_short_kv", f"{keys} keys, {how}")]
            for how in ("fetched", "stay")
        )
        same_size.append(
            {
                "workload": short(name),
                "block": keys,
                "fetched": fetched_rate,
                "stay": kept_rate,
                "stay over fetched (%)": 100 * (kept_rate / fetched_rate - 1),
            }
        )
same_size = pd.DataFrame(same_size)
stayed = same_size["stay over fetched (%)"].dropna()
signed("stayed_min", stayed.min())
signed("stayed_max", stayed.max())
beside = [
    variants.loc[name, ("v6b_stream", f"{n} keys")]
    / variants.loc[name, ("v6a_persistent", f"{n} keys")]
    for name in variants.index
    for n in (64, 128)
]
beside = [value for value in beside if value == value]
signed("beside_min", 100 * (min(beside) - 1))
signed("beside_max", 100 * (max(beside) - 1))

# %% tags=["remove-input"]
figures.show_table(sizes.round(1))

# %% tags=["remove-input"]
figures.show_table(same_size.round(1))

# %% tags=["remove-input"]
figures.save_csv(sizes, "v6-block-sizes")
figures.provenance(mine, csv="v6-block-sizes", data_dir=data_dir)

# %% [markdown]
# Rates in TFLOP/s. The rule comes from prototypes. Here 128 keys are faster in
# {glue:text}`v6_large_wins:.0f` of {glue:text}`v6_rule_all:.0f` cases; the rule takes the faster
# size in {glue:text}`v6_rule_right:.0f`, and where it does not, it loses at most
# {glue:text}`v6_rule_loss:.1f` %. With the block size held fixed the stream changes the rate by
# {glue:text}`v6_beside_min` to {glue:text}`v6_beside_max` %, and K and V that stay change it by
# {glue:text}`v6_stayed_min` to {glue:text}`v6_stayed_max` %.
#
# ### The ladder so far

# %% tags=["remove-input"]
# | name: fig-v6-ladder
# | caption: >
# |   The ladder up to v6 on gdpa-self-full-512, forward, kernel alone.
# | alt: >
# |   Horizontal bars of TFLOP/s for v1 to v6 and the peers, with the dashed line of the roofline.
# |   The three steps of v6 are close to each other and well ahead of v5.
SHOW = "gdpa-self-full-512"
ALL_RUNGS = [r.impl for r in ladder.RUNGS]
LAST = ALL_RUNGS.index("v6_short_kv") + 1
RUNGS = [impl for impl in ALL_RUNGS[:LAST] if impl != "v0_eager"]
upto = kernels[~kernels["impl"].isin(ALL_RUNGS[LAST:])]
figures.figure_ladder(upto, SHOW, RUNGS, "v6_short_kv")

# %% tags=["remove-input"]
ladder_rows = upto[upto["workload"] == SHOW]
figures.save_csv(ladder_rows, "v6-ladder")
figures.provenance(ladder_rows, csv="v6-ladder", data_dir=data_dir)

# %% tags=["remove-cell"]
best_v6 = rate[list(STEPS)].max(axis=1)
over = {peer: (best_v6 / rate[peer]).dropna() for peer in ("fa2_varlen", "cudnn")}
for peer, ratios in over.items():
    glue(f"{peer}_min", ratios.min())
    glue(f"{peer}_max", ratios.max())
share = kernels[kernels["impl"].isin(STEPS)].groupby("workload")["percent_of_roofline"].max()
glue("share_min", share.min())
glue("share_max", share.max())
figures.glue_text("v6_share_least", short(share.idxmin()))
figures.glue_text("v6_share_most", short(share.idxmax()))
earlier = rate[[r.impl for r in ladder.RUNGS if r.impl[:2] in ("v1", "v2", "v3", "v4", "v5")]]
lead = best_v6 / earlier.max(axis=1)
glue("lead_min", lead.min())
glue("lead_max", lead.max())


def wanted(name: str, block_n: int) -> float:
    """Share of the scores of a batch in what its tiles multiply, in percent."""
    pairs = list(zip(workload(name).seqlens_q, workload(name).seqlens_k, strict=True))
    held = sum(
        math.ceil(n / 128) * 128 * math.ceil(m / block_n) * block_n for n, m in pairs
    )  # fmt: skip
    return 100 * sum(n * m for n, m in pairs) / held


glue("share_held", wanted(share.idxmin(), 64))
assert v6b_stream.default_config(128, torch.bfloat16, 256).BLOCK_N == 64, "the text says so"
assert v6_short_kv.default_config(128, torch.bfloat16, 256).BLOCK_N == 128, "the text says so"
glue("fill_64", wanted(few_tiles.idxmin(), 64))
glue("fill_128", wanted(few_tiles.idxmin(), 128))
next_rungs = {
    "packed": rate["v7_packed"] / best_v6, "waits": rate["v8_own_waits"] / rate["v7_packed"]
}  # fmt: skip
for name, ratios in next_rungs.items():
    glue(f"{name}_min", ratios.min())
    glue(f"{name}_max", ratios.max())

# %% [markdown]
# The best of the three steps runs at {glue:text}`v6_lead_min:.2f` to {glue:text}`v6_lead_max:.2f`
# times the rate of the best earlier rung, over all {glue:text}`v6_workloads:.0f` forward workloads.
# Against FlashAttention-2 it is {glue:text}`v6_fa2_varlen_min:.2f` to
# {glue:text}`v6_fa2_varlen_max:.2f` times, against cuDNN on the batches that cuDNN takes without
# padding {glue:text}`v6_cudnn_min:.2f` to {glue:text}`v6_cudnn_max:.2f` times. Both compute a
# softmax. It reaches {glue:text}`v6_share_min:.0f` % of the roofline on {glue:text}`v6_share_least`
# and {glue:text}`v6_share_max:.0f` % on {glue:text}`v6_share_most`.
#
# ### What the list costs

# %% tags=["remove-cell"]
glue("workloads", len(rate))
costs = ablation[ablation["scope"] == "schedule"]
assert len(costs), "the record must hold the times of the list"
old = everything[(everything["impl"] == "v3_persistent") & (everything["scope"] == "schedule")]
old = old[old["record"] == old["record"].max()]
listed = []
for name in dict.fromkeys(costs["workload"]):
    some = costs[costs["workload"] == name].set_index("variant")["time_us_p50"]
    kernel_us = time.loc[name, "v6_short_kv"]
    past = old[(old["workload"] == name) & (old["variant"] == "zigzag, device time")]
    listed.append(
        {
            "workload": short(name),
            "v6 (us)": kernel_us,
            "list, device (us)": some["list, device time"],
            "% of v6": 100 * some["list, device time"] / kernel_us,
            "list, host (us)": some["list, host time"],
            "remembered, host (us)": some["remembered, host time"],
            "v3's list, device (us)": past["time_us_p50"].iloc[0] if len(past) else math.nan,
        }
    )
listed = pd.DataFrame(listed)
glue("list_min", listed["list, device (us)"].min())
glue("list_max", listed["list, device (us)"].max())
glue("list_share_min", listed["% of v6"].min())
glue("list_share_max", listed["% of v6"].max())
glue("list_remembered", listed["remembered, host (us)"].max())
glue("list_old", (listed["v3's list, device (us)"] / listed["list, device (us)"]).median())

# %% tags=["remove-input"]
figures.show_table(listed.round(1))

# %% tags=["remove-input"]
figures.save_csv(listed, "v6-list")
figures.provenance(costs, csv="v6-list", data_dir=data_dir)

# %% [markdown]
# The list takes {glue:text}`v6_list_min:.1f` to {glue:text}`v6_list_max:.1f` µs of device time,
# {glue:text}`v6_list_share_min:.1f` to {glue:text}`v6_list_share_max:.1f` % of the kernel that
# reads it. v3's list takes {glue:text}`v6_list_old:.0f` times as long (median). All layers of a
# model see the same offsets, so a list made from the same tensors is used again, after at most
# {glue:text}`v6_list_remembered:.0f` µs on the host (a remembered list needs no device).
#
# ## The surprise: the gap was filled already
#
# We were so sure of the stream that it was written before v6a was timed by itself. It is the harder
# half of this kernel: a loop turned twice, a tile that nobody wants, an activation compiled a third
# time. It is worth {glue:text}`v6_stream_min` to {glue:text}`v6_stream_max` %.
#
# The prediction counted what one role waits for. The tensor core does not care which role feeds it.
# Two math roles drift apart until one multiplies while the other evaluates, and then a role's wait
# at the boundary is time in which the other one gets the tensor core alone. The emulated timeline
# above shows that in a page, and we drew it only afterwards. A gap is worth closing if nobody else
# is in it. The gap between two programs of v5 was such a gap, since it stopped both roles and the
# copies at once.
#
# The third step saves bandwidth of the L2 cache. {glue:text}`v6_third_word` And it has a price,
# most of all on {glue:text}`v6_least` ({glue:text}`v6_resident_few_min` %): an entry is a whole
# head, and v6 computes short keys in blocks of 128, where v6b takes 64. On that batch
# {glue:text}`v6_fill_64:.0f` % of what v6b multiplies is wanted, {glue:text}`v6_fill_128:.0f` % of
# what v6 does. The table above, with equal blocks, has no half-full batch of 256 tokens, so the two
# causes are not told apart.
#
# What the kernel is short of, the next chapters tell. {doc}`activation_arithmetic` measures what
# an activation costs inside it. {doc}`v7_packed` computes GELU of two scores in one instruction;
# in the record of the ladder it runs at {glue:text}`v6_packed_min:.2f` to
# {glue:text}`v6_packed_max:.2f` times the rate of the best of the three steps.
# {doc}`v8_own_waits` takes away waits that the compiler adds to the loop
# ({doc}`v5_pingpong`), for {glue:text}`v6_waits_min:.2f` to {glue:text}`v6_waits_max:.2f` times
# the rate of v7.
#
# ## Limits of these rungs, and the verdict
#
# - `v6a_persistent`: {glue:text}`v6_verdict_1`, and the step that matters.
# - `v6b_stream`: {glue:text}`v6_verdict_2`. It changes times by {glue:text}`v6_stream_word` the
#   control does. It stays, because a kernel with fewer instructions for a score leaves longer gaps.
# - `v6_short_kv`: {glue:text}`v6_verdict_3` with this arithmetic. It stays, as
#   {doc}`v7 <v7_packed>` builds on it.
#
# All three spend a whole SM on one program, and 128 rows on a tile. Sequences that end inside a
# tile leave rows empty, and keys in their last block: on {glue:text}`v6_share_least`, where the
# rate is {glue:text}`v6_share_min:.0f` % of the roofline, only {glue:text}`v6_share_held:.0f` % of
# what is multiplied is wanted (blocks of 64 keys). The entry that holds all about its tile, and the
# one that is loaded ahead, have no row of their own here. They were measured by script only, with
# the result that is in the lab notes.
#
# ## Exercises
#
# :::{exercise} Where 224 KiB go
# :label: ex-v6-memory
#
# At head_dim 128 in bf16: how much shared memory do two slots of Q for each role, K and V in two
# stages of 128 keys, and the output take? How many keys can stay at most? *(paper, five minutes)*
# :::

# %% tags=["remove-cell"]
Q_KIB, KV_KIB, OUT_KIB = 2 * 2 * 64 * 256 / 1024, 2 * 2 * 128 * 256 / 1024, 2 * 64 * 256 / 1024
glue("kib_q", Q_KIB)
glue("kib_kv", KV_KIB)
glue("kib_out", OUT_KIB)
glue("kib", Q_KIB + KV_KIB + OUT_KIB)
glue("kib_limit", SHARED_BYTES / 1024)
left = COMPILED["v6_short_kv"].shared_bytes - 1024 * (Q_KIB + KV_KIB + OUT_KIB)
assert 0 <= left < 1024, "the rest is barriers"

# %% [markdown]
# :::{solution} ex-v6-memory
# :class: dropdown
#
# A row is 256 bytes. Q: 2 roles × 2 slots × 64 rows, {glue:text}`v6_kib_q:.0f` KiB. K and V: 2 × 2
# × 128 rows, {glue:text}`v6_kib_kv:.0f` KiB. Output: 2 × 64 rows, {glue:text}`v6_kib_out:.0f` KiB.
# Together {glue:text}`v6_kib:.0f` KiB and a few barriers, of {glue:text}`v6_kib_limit:.0f`. All
# buffers of K hold 256 keys, and that is what can stay; another 64 would need 32 KiB more. With one
# slot of Q instead of two there would be room.
# :::
#
# :::{exercise} A buffer given back too early
# :label: ex-v6-release
#
# Before its loop over tiles a math role releases `k[0]` with `steps == 1`. Let it release the
# buffer without a condition. For which batches is the kernel still right? Predict, then try it in
# the emulator with 100, 128, 129 and 300 query rows and 200 keys that stay. *(emulator, fifteen
# minutes)*
# :::


# %% tags=["remove-cell"]
AT_ONCE = ("release(k.empty[0], steps == 1, options.RESIDENT)", "tlx.barrier_arrive(k.empty[0])")
early = changed(v6_short_kv, AT_ONCE)
outcomes = {}
for rows in (100, 128, 129, 300):
    arguments = problem([rows], [200])
    try:
        with emulator.enabled(max_steps=100_000):
            early.forward(**arguments, config=early.Config(resident=True))
        outcomes[rows] = ""
    except emulator.EmulatorError as error:
        outcomes[rows] = type(error).__name__
assert outcomes[100] == outcomes[128] == "" and outcomes[129] and outcomes[300], outcomes
figures.glue_text("v6_early", " and ".join(dict.fromkeys(filter(None, outcomes.values()))))

one_slot = changed(v6_short_kv, ("Q_SLOTS = tl.constexpr(2)", "Q_SLOTS = tl.constexpr(1)"))
slots = {
    count: max(
        event.end
        for event in emulated(module, PICTURE, config=module.Config(), trace=True).timeline.events
    )
    for count, module in ((1, one_slot), (2, v6_short_kv))
}
glue("one_slot", 100 * (slots[1] / slots[2] - 1))
assert slots[1] > 1.02 * slots[2], "the text says that one slot is slower"

# %% [markdown]
# :::{solution} ex-v6-release
# :class: dropdown
#
# With one tile in an entry (100 and 128 rows) `steps == 1` is true, and nothing changes. From 129
# rows on the same buffer is given back again at the entry's last tile. The emulator finds
# {glue:text}`v6_early` at 129 and at 300 rows: more arrivals than the phase counts. On a GPU the
# surplus would complete a later phase too early, and the copy of the next keys would meet a tile
# that still reads the old ones.
# :::
#
# :::{exercise} One slot of Q
# :label: ex-v6-slots
#
# With one slot of Q for each role instead of two, 32 KiB are free, enough for a fifth stage of 64
# keys. What do you lose? Set `Q_SLOTS` to 1, and compare emulated timelines at the boundary of two
# tiles. Then decide whether you would measure it. *(code, an hour; measuring needs a GPU)*
# :::
#
# :::{solution} ex-v6-slots
# :class: dropdown
#
# The next tile's Q can be fetched only after the last scores of this tile are computed. The copy's
# latency then lies open at every boundary, where v6b wants the next scores at once: in the launch
# of {numref}`fig-v6b-timeline` {glue:text}`v6_one_slot:.0f` % more modelled cycles. Both roles wait
# for a copy, so no other role fills this gap. It may still pay where tiles have many blocks; the
# modelled copy latency is that of an idle machine.
# :::
#
# ## Takeaways
#
# - A program that fills an SM must not end: what it does at its beginning and its end is time of
#   the whole SM, once for each tile.
# - Before closing a gap of one role, look at the resource. If another role uses it meanwhile,
#   nothing is gained.
# - A list entry that holds everything, loaded a tile ahead, makes the price of a schedule a few
#   bytes for a tile.
