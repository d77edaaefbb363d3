# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # Forward v6: short K/V
#
# A CTA of forward v5 fills an SM, computes one tile and exits. What is gained if it stays?
#
# :::{admonition} In this chapter (20 minutes)
# You will make a warp-specialized kernel persistent and tell a gap worth closing from one that is
# already filled. Back to back at 1,024 tokens, persistent CTAs (`v6a_persistent`) are
# {glue:text}`stay_loop:.0f` % faster than forward v5, in bursts up to {glue:text}`stay_half:.1f`
# times as fast on half-full batches.
# :::

# %% tags=["hide-input"]
from functools import partial
from itertools import pairwise

import pandas as pd

from _lib import rare_charts, studies
from gdpa_kernels.gdpa.ladder import v6_short_kv, v6a_persistent, v6b_stream
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("forward/v6_short_kv", mode=mode, device=device, data_dir=data_dir)
NARROW = {"BLOCK_N": 64, "num_stages": 4}
V5, V6A, V6B, V6 = "v5_pingpong", "v6a_persistent", "v6b_stream", "v6_short_kv"
RUNGS = [V5, V6A, V6B, V6]
us = chapter.times("forward/results", together=RUNGS, direction="forward")
steps = pd.DataFrame(
    {"v6a / v5": us[V5] / us[V6A], "v6b / v6a": us[V6A] / us[V6B], "v6 / v6b": us[V6B] / us[V6]}
)
stay, stream, short = (steps[name] for name in steps)
steady = chapter.rows(
    "forward/results", scope="sustained", workload="gdpa-self-full-1024", impl=[V5, V6A]
).set_index("impl")["time_us_p50"]
chapter.glue(stay_loop=100 * (steady[V5] / steady[V6A] - 1))

EMPTY, V4 = "gdpa-self-half-dense-512", "v4_warp_specialized"
work = workload(EMPTY)
tiles = -(-pd.DataFrame({"rows": work.seqlens_q, "keys": work.seqlens_k}) // 128)
with_rows = work.num_heads_q * tiles["rows"].sum()
without = work.batch * work.num_heads_q * work.max_seqlen_q // 128 - with_rows
assert set(tiles["keys"]) == {4}, "its tiles are those of gdpa-self-full-512"
of_v4 = chapter.times("forward/results", together=["v2_tma", V4], direction="forward")[V4]
counted = of_v4["gdpa-self-full-512"] * 132 / (1152 * 4 * 4) * with_rows
variants = chapter.times(f"forward/{V4}", columns="variant", impl=V4, variant=None).loc[EMPTY]
price = (variants["128 keys"] * 132 - counted) / without
doubt = (variants["128 keys"] * 132 - 1.02 * counted) / without  # if all else costs 2 % more
saved = (variants["128 keys"] - variants["early return"]) * 132 / without
assert doubt > 0 and 0 < saved < price, "the text says so"
chapter.glue(price=price, saved=saved)

# %% tags=["remove-input"]
# | name: fig-v6-ladder
# | caption: >
# |   **Forward v6 on the ladder.** Time of each rung on gdpa-self-full-1024, back to back; each
# |   tick leads to its chapter. Dashed: libraries.
# | alt: >
# |   An axis of milliseconds with a tick for each rung, that of v6 thick, and dashed lines for the
# |   libraries.
chapter.ladder("v6_short_kv")

# %% tags=["remove-input"]
# | name: fig-v6-steps
# | caption: >
# |   **Only the first step pays.** Rate of each step over the rate of
# |   the step before, in bursts.
# | alt: >
# |   A heat map, a row for each workload and a column for each step. The column of v6a over v5 is
# |   blue, most with 256 keys and on half-full batches; the other two columns are almost white.
shown = steps[~steps.index.str.contains("dense|cross-full-256")]
rest = shown[["v6b / v6a", "v6 / v6b"]]
chapter.figure(
    rare_charts.heat(
        shown.rename(lambda x: x.removeprefix("gdpa-")),
        label="rate / rate before, in bursts",
        low=0.6,
        high=1.4,
        cmap="vlag_r",
        form=".2f",
        finding=f"v6a gains {stay[shown.index].min():.2f} to {stay[shown.index].max():.2f} times; "
        f"v6b and v6 gain nothing ({rest.min(axis=None):.2f} to {rest.max(axis=None):.2f}).",
    ),
    measured=chapter.together("forward/results", RUNGS, impl=RUNGS, direction="forward"),
)

# %% [markdown]
# ## What changes
#
# | | forward v5 | forward v6a | forward v6b | forward v6 |
# |:--|:--|:--|:--|:--|
# | a CTA | one tile | walks a list of tiles | as v6a | as v6a |
# | overlapped with a tile's last P V | – | – | the next tile's first S | as v6b |
# | K and V are fetched | per tile | per tile | per tile | once per head, if they fit |
#
# Inside a tile nothing changes. {doc}`forward v3 <v3_persistent>` was persistent too and gained
# nothing on full batches, because two of its CTAs shared an SM and each hid the other's prologue
# and epilogue. A CTA of v4 or v5 fills an SM, which stands still while it starts or stores.
#
# Nor are empty tiles free any longer. In a half-full batch many CTAs find no row to compute. A CTA
# of v2 reads its offsets and exits; a CTA of v4 first starts three roles, makes barriers and
# fetches two boxes of zeros for Q. On gdpa-self-half-dense-512, in bursts, an empty CTA costs
# {glue:text}`price:.1f` µs of an SM, of which an exit before the roles saves
# {glue:text}`saved:.1f`.
#
# ## Prediction
#
# In v6a a consumer is idle twice a tile, before its first S and during its last P V, together for
# about one block. The *stream* (v6b) pipelines tiles as v5 pipelines blocks, and should save that
# block. *Resident K and V* (v6) spare L2 128 KiB per tile of 256 keys. With more keys v6 does the
# same as v6b, which makes a control.

# %% tags=["remove-cell"]
keys = pd.Series([256, 512, 1024, 2048], [f"gdpa-self-full-{n}" for n in (256, 512, 1024, 2048)])
grows = 0.8 * keys / 512  # of the time of a tile with 512 keys in v5
blocks = keys / keys.map(lambda n: 64 if n <= 640 else 128)  # as default_config
stay_share = (stay[keys.index] - 1) / (0.2 / grows)  # of the predicted gain
stream_share = (stream[keys.index] - 1) * blocks
long = [name for name in us.index if workload(name).max_seqlen_k > 256]
noise = 100 * (short[long] - 1).abs().max()

# %% tags=["remove-input"]
chapter.predict(
    "Persistent CTAs save a fifth of a tile of 512 keys, on every tile: the share of the predicted "
    "gain that is farthest off.", stay_share, least=0.5, most=1.5, shown=False,
)  # fmt: skip
chapter.predict(
    "Pipelining across tiles saves one block of every tile: the smallest share of the predicted "
    "gain with 256 and 512 keys.", stream_share.iloc[:2], least=0.5,
)  # fmt: skip
chapter.predict(
    "Resident K and V gain 3 % on gdpa-cross-full-1024: v6 over v6b.",
    short["gdpa-cross-full-1024"], least=1.03, form=".3f", shown=False,
)  # fmt: skip
chapter.predict(
    "With more than 256 keys v6 does what v6b does: the largest difference.",
    noise, most=3, form=".1f", unit=" %",
)  # fmt: skip
chapter.predictions()

# %% [markdown]
# The control that failed is the most useful result: two kernels that do the same work differ by
# {glue:text}`noise:.1f` %, the noise here. Half-full batches gain most from v6a, since tiles
# without rows vanish too.
#
# ## Persistent CTAs: a list, read ahead
#
# As in v3, a list made from the lengths says which tiles exist. An entry now holds all that a tile
# needs, so no lookup in `cu_seqlens` follows, and is read one tile ahead. The small kernel that
# makes the list takes {glue:text}`list_share:.1f` % of v6's time on gdpa-self-full-256.
#
# (rule-stores)=
# O has a buffer of its own, which {term}`TMA` drains during the next tile. A buffer belongs to its
# TMA store until `async_descriptor_store_wait`: only behind that may a role write it again or
# release it. Here the wait comes a whole tile later. {doc}`v8_own_waits` has the whole kernel.
#
# ## The surprise: the other consumer had filled the gap already

# %% tags=["remove-cell"]
picture = studies.batch([128] * 12, [256] * 12)
v6a_trace = studies.timeline(v6a_persistent, picture, v6a_persistent.Config())
of_consumer = [e for e in v6a_trace.events if (e.cta, e.lane) == (0, "math[0]") and e.end > e.start]
of_consumer.sort(key=lambda e: (e.start, e.end))
idle = [y for x, y in pairwise(of_consumer) if (x.kind, y.kind) == ("write", "wait")]
idle = [wait for wait in idle if wait.end - wait.start > 100]
core = [e for e in v6a_trace.events if e.cta == 0 and e.kind == "mma"]
busy = sum(max(0, min(e.end, w.end) - max(e.start, w.start)) for w in idle for e in core)
waited = sum(wait.end - wait.start for wait in idle)


@chapter.measure
def _(session):
    listed = []
    for keys, size in ((64, NARROW), (128, {})):
        for name, resident in (("fetched", False), ("stay", True)):
            config = v6_short_kv.Config(**size, resident=resident)
            listed.append((V6, f"{keys} keys, {name}", {"config": config}))
    for name in ("gdpa-self-full-256", "gdpa-cross-full-1024"):
        session.measure(workload(name), listed)
    recipe = partial(v6b_stream.work_list_recipe, config=v6b_stream.Config(**NARROW))
    studies.measure_lists(session, workload("gdpa-self-full-256"), V6, {"list": recipe})


times = chapter.times(columns="variant", impl=V6, variant=None)
stay_gain = pd.DataFrame(
    {n: times[f"{n} keys, fetched"] / times[f"{n} keys, stay"] for n in (64, 128)}
)
stay_gain = stay_gain.unstack()  # by keys of a block and workload
lists = chapter.times(columns="variant", scope="schedule", variant=None)["list, device time"]
assert 100 * max((stream - 1).abs().max(), short.max() - 1) < noise, "the text says so"
assert [*stay_gain[100 * (stay_gain - 1) > noise].index] == [(64, "gdpa-cross-full-1024")], (
    "the text"
)
assert 1 - short["gdpa-self-half-jagged-256"] > noise / 100, "the text: beyond noise"
chapter.glue(
    stay_half=stay.max(), noise=noise,
    resident_costs=100 * (1 - short["gdpa-self-half-jagged-256"]),
    idle=waited / len(idle), busy=100 * busy / waited,
    list_share=(100 * lists / us[V6])["gdpa-self-full-256"],
)  # fmt: skip

# %% tags=["remove-input"]
# | name: fig-v6a-timeline
# | caption: >
# |   **While one consumer waits at the boundary, the tensor core works for the other.** Forward v6a
# |   on tiles of 256 keys. After writing its output (magenta) a consumer waits for the first scores
# |   of its next tile. Modelled cycles.
# | alt: >
# |   Five lanes. Each math role writes its output, waits, then evaluates the activation. The lane
# |   of the tensor core is nearly full, also while a role waits.
chapter.figure(v6a_trace.svg(width=760, start=6000, end=13000), emulated="v6a, 12 tiles on 3 CTAs")

# %% tags=["remove-input"]
after = studies.timeline(v6b_stream, picture, v6b_stream.Config())
studies.stepper(
    {"forward v6a": v6a_trace, "forward v6b": after}, "forward-v6_short_kv-steps",
    title="Forward v6a and v6b at the boundary of two tiles, step by step",
)  # fmt: skip

# %% [markdown]
# The stream gains nothing beyond noise on any workload. The prediction counted what one consumer
# waits for, {glue:text}`idle:,.0f` modelled cycles at each boundary. But the tensor core does not
# care which consumer feeds it, and meanwhile it is busy {glue:text}`busy:.0f` % of the time, for
# the other one. The gap between two CTAs of v5 stopped both consumers and the copies.
#
# Resident K and V save L2 bandwidth that was hardly short. Only with blocks of 64 keys and 1,024
# queries do they gain more than noise, and v6 takes blocks of 128. On gdpa-self-half-jagged-256
# they cost {glue:text}`resident_costs:.0f` %. Both steps stay because {doc}`forward v7 <v7_packed>`
# makes a score cheaper, and cheaper scores leave longer gaps.

# %% tags=["remove-input"]
chapter.profile("v6a_persistent", "v6b_stream", "v6_short_kv", workload="gdpa-self-full-512")

# %% [markdown]
# ## Exercises
#
# {doc}`Write it </exercises>`: `make exercise NAME=bug`.
#
# :::{exercise} A buffer given back too early
# :label: ex-v6-release
#
# Before its loop over tiles a consumer releases `k[0]` if `steps == 1`. Drop the condition. For
# which batches is the kernel still right? Try 128 and 129 query rows on 200 resident keys.
# *(emulator, fifteen minutes)*
# :::

# %% tags=["remove-cell"]
AT_ONCE = ("release(k.empty[0], steps == 1, options.RESIDENT)", "tlx.barrier_arrive(k.empty[0])")
early, stays = studies.changed(v6_short_kv, AT_ONCE), v6_short_kv.Config(resident=True)
calls = {n: partial(early.forward, studies.batch((n,), (200,)), config=stays) for n in (128, 129)}
assert not any(studies.findings(calls[128])) and all(studies.findings(calls[129])), "the answer"
one_slot = studies.changed(v6_short_kv, ("Q_SLOTS = tl.constexpr(2)", "Q_SLOTS = tl.constexpr(1)"))
both = [studies.timeline(m, picture, v6_short_kv.Config()) for m in (one_slot, v6_short_kv)]
slower, as_is = (max(event.end for event in trace.events) for trace in both)
chapter.glue(one_slot=100 * (slower / as_is - 1))

# %% [markdown]
# :::{solution} ex-v6-release
# :class: dropdown
#
# With one tile in an entry `steps == 1` is true, and the kernel is the same. From 129 rows on the
# buffer is released again at the entry's last tile. The emulator reports a misused barrier or a
# race: the surplus arrivals complete a later phase too early, and new keys overwrite those still in
# use.
# :::
#
# :::{exercise} One slot of Q
# :label: ex-v6-slots
#
# With one slot of Q for each consumer 32 KiB are free. What do you lose? Set `Q_SLOTS` to 1 and
# compare timelines. *(emulator, an hour)*
# :::
#
# :::{solution} ex-v6-slots
# :class: dropdown
#
# The next Q can be fetched only after this tile's last scores, so its latency is exposed at every
# boundary: {glue:text}`one_slot:.0f` % more modelled cycles in the launch of
# {numref}`fig-v6a-timeline`. Both consumers wait for a copy, so this gap stays open.
# :::
#
# ## Takeaways
#
# - A CTA that fills an SM should not exit: its prologue and epilogue stall the SM.
# - Before closing a gap in one warp group, see whether another one fills it.
# - Put a control beside small gains, such as two kernels that do the same.
