# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # The power wall
#
# In a {term}`burst` kernels take turns, and the GPU rests between calls. A training loop does not
# rest. What is left of a fast kernel then?
#
# :::{admonition} In this chapter (20 minutes)
# You will run the same kernels {term}`back to back <sustained scope>`, read rate, clock and energy,
# and find out what each reading is worth. On the H200 the matmul ceiling falls to
# {glue:text}`kept_matmul:.0f` % of its burst rate and v8 to {glue:text}`kept_low:.0f` to
# {glue:text}`kept_high:.0f` %: both meet {glue:text}`watts:.0f` W. Then you will turn times into
# energy: {glue:text}`pj_flops:.2f` pJ a FLOP. A byte of memory takes as much as
# {glue:text}`byte_flops:.0f` FLOPs, a GELU as much as {glue:text}`gelu_flops:.0f`.
# :::
#
# Scope `kernel` is the burst of {doc}`protocol`. Scope `sustained`, in this record, ran one kernel
# for 1.5 s after 0.7 s of warming up, with clock and energy from NVML. The variant `alone` is a
# burst of v8 by itself.

# %%
import functools
from dataclasses import replace

import pandas as pd
import torch

from _lib import drawings, energy
from gdpa_lab.measuring import record, sustained, units
from gdpa_lab.measuring import system as systems
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts, claims, results
from gdpa_lab.report.chapter import Chapter
from gdpa_lab.report.house import INK, RUNG_COLOURS

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %%
chapter = Chapter("measuring/power_wall", mode=mode, device=device, data_dir=data_dir)
FULL = [f"gdpa-self-full-{n}" for n in (1024, 2048, 512, 256)]
HALF = [f"gdpa-self-half-jagged-{n}" for n in (1024, 512, 2048)]
CROSS, V8, PEERS = "gdpa-cross-full-2048", "v8_own_waits", ["fa2_varlen", "cudnn", "fa4"]
FORWARD = ["v1_tiled", "v4_warp_specialized", "v6_short_kv", "v7_packed", V8, *PEERS]
BACKWARD = [f"v{n}_backward" for n in ("1_tiled", "2_fused", "4_warp_specialized", "5_short_kv")]
BOTH = ("kernel", "sustained")


def matmuls(session):
    """Sustained matmuls of 8192^3 on other data."""
    rows = []
    for data in ("zeros", "ones", "random"):
        make = {"zeros": torch.zeros, "ones": torch.ones, "random": torch.randn}[data]
        a, b = (make(8192, 8192, device=session.device).bfloat16() for _ in range(2))
        call = functools.partial(torch.mm, a, b, out=torch.empty_like(a))
        times, load = sustained.sample(call, session.device)
        middle = sorted(times)[len(times) // 2]
        rows.append((data, middle, load.sm_clock_mhz, load.power_w, load.joules))
    columns = ("data", "time_us", "sm_clock_mhz", "power_w", "joules")
    session.tables["matmuls"] = record.Table(columns, rows)


def plan(session):
    for name in (*FULL, CROSS):
        session.measure(workload(name), FORWARD, scopes=BOTH)
    for name in FULL[:2]:
        session.measure(workload(name), [(V8, "alone", {})])
    matmuls(session)
    for name in (*FULL[:3], CROSS):
        session.measure(workload(name), BACKWARD + PEERS, direction="backward", scopes=BOTH)
    for activation in ("identity", "relu", "silu", "gelu"):
        work = replace(workload(FULL[0]), name=f"{FULL[0]}-{activation}", activation=activation)
        session.measure(work, [V8], scopes=BOTH)
    for name in HALF:
        session.measure(workload(name), FORWARD, scopes=BOTH)
    session.measure(workload(HALF[0]), BACKWARD + PEERS, direction="backward", scopes=BOTH)


chapter.measure(plan)

# %%
made, mm = chapter.record(), chapter.recorded("matmuls").set_index("data")
limit = systems.load(chapter.data_dir / "systems" / f"{made.system}.json").power_limit_w
top = {scope: results.ceilings(made, scope) for scope in BOTH}
rates = {s: chapter.times(value="tflops", direction="forward", scope=s) for s in BOTH}
share = {s: chapter.times(value="percent_of_roofline", direction="forward", scope=s) for s in BOTH}
kept = rates["sustained"] / rates["kernel"]
load = energy.counted(chapter.rows(scope="sustained"), made)
load["wall"] = limit * load["seconds"]
strong, of_v8 = load[load["tflops"] >= 400], load[load["impl"] == V8].set_index("workload")
EACH = [*sorted(FULL, key=lambda name: -workload(name).max_seqlen_q), CROSS, *HALF]

# %% tags=["remove-input"]
# | name: fig-wall-rates
# | caption: >
# |   Forward, in bursts and back to back: v8 and the fastest peer of each workload.
# |   Dashed: a matmul of 8,192.
# | alt: >
# |   A dot plot over eight workloads. Each mark back to back lies left of that in bursts, by a
# |   tenth to a sixth. v8 lies right of the peer in both. Two dashed lines stand right
# |   of most marks.
drawn = {"v8, burst": rates["kernel"][V8], "v8, back to back": rates["sustained"][V8]}
drawn["best peer, burst"] = rates["kernel"][PEERS].max(axis=1)
drawn["best peer, back to back"] = rates["sustained"][PEERS].max(axis=1)
chart = charts.dots(pd.DataFrame(drawn).loc[EACH], xlabel="TFLOP/s",
    levels={f"matmul, {results.TIMED[scope]}": top[scope].tflops for scope in BOTH}, form=".0f",
    colours=(*[RUNG_COLOURS[3]] * 2, INK, INK))  # fmt: skip
chapter.figure(chart, measured=chapter.rows(scope=BOTH, direction="forward", impl=[V8, *PEERS]))

# %% [markdown]
# ## Seven predictions
#
# They were in the {doc}`lab notes <../../notes/measuring>` before the record. Some hold two
# statements, each with its verdict:

# %%
full, identity, gelu = kept.loc[FULL, V8], f"{FULL[0]}-identity", f"{FULL[0]}-gelu"
matmul, zeros = top["sustained"].tflops / top["kernel"].tflops, mm.loc["random"] / mm.loc["zeros"]
joules = chapter.times(value="joules", direction="forward", scope="sustained").loc[FULL[:2]]
margin = (joules[V8] / joules[["v6_short_kv", "v7_packed", *PEERS]].min(axis=1)).max()
points, rate = share["sustained"][V8] - share["kernel"][V8], rates["sustained"][V8]
off = 100 * (strong["power_w"] / limit - 1).abs().max()
plain = 100 * (rate[identity] / rate[FULL[0]] - 1)
at, say = FULL[1], chapter.predict
say("The matmul keeps this share of its burst rate.", matmul, least=0.82, most=0.88)
say("v8 keeps this share on full batches, at least.", full.min(), least=0.83, most=0.97)
say("It keeps most at 2,048: that share over the largest.", full[at] / full.max(), least=1)
say("From 400 TFLOP/s on power is within 3 % of its limit: the largest distance, %.", off, most=3)
say("v8 stands higher under its own ceilings at 2,048, in points.", points[at], least=1, most=12)
say("A call of v8 takes least energy from 1,024 on: over the next best.", margin, most=1)
say("Without an activation v8 is faster at 1,024, in %.", plain, least=2, most=10)
say("A matmul of zeros is faster, in %.", 100 * (zeros["time_us"] - 1), least=15)
say("Its clock is higher: that of random numbers over it.", zeros["sm_clock_mhz"], most=1)

# %% [markdown]
# Three fail. *The order of lengths:* v8 keeps most at 256, where memory takes part in the limit.
# Copies do not meet the wall: they run as fast back to back as in a burst.
#
# *The power.* All {glue:text}`strong:.0f` rows of 400 TFLOP/s or more report the reason
# `sw_power_cap`: they *are* at the limit. The reading scatters, with a standard deviation of
# {glue:text}`power_sd:.1f` %. The record holds one matmul of random numbers twice, as a ceiling and
# in `matmuls`: the times agree within {glue:text}`apart_time:.3f` %, the energies differ by
# {glue:text}`apart_joules:.0f` % and the clocks by {glue:text}`apart_clock:.0f` %. The energy
# counter seems coarse for 1.5 s, and a clock is a momentary reading. So v8's
# {glue:text}`margin:.1f` % less energy than the next best, a confirmed prediction, proves little.
# *Time* repeats, and at the wall it measures energy: {glue:text}`watts:.0f` J a second.
#
# *The activation.* Without it v8 gains {glue:text}`plain:.1f` %, but hardly because of energy:
# before the wall, in the first five samples of a burst, identity is already
# {glue:text}`plain_first:.1f` % faster than `gelu`, and back to back {glue:text}`plain_gelu:.1f` %.

# %% tags=["remove-cell"]
bursts = {x.workload + x.variant: pd.Series(x.samples_us) for x in made.rows if x.impl == V8
          and (x.direction, x.scope) == ("forward", "kernel")}  # fmt: skip
first = {name: samples[:5].mean() for name, samples in bursts.items()}
ceiling = next(c for c in made.ceilings if c.scope == "sustained" and c.flops)
once, twice, needed = ceiling.load, mm.loc["random"], 1e3 * units.H200.clock_ghz(rate[identity])
assert of_v8["sm_clock_mhz"][identity] < needed and strong["limited"].all()
assert full.idxmax() == FULL[3] and top["sustained"].copies[0][1] > top["kernel"].copies[0][1]
chapter.glue(
    kept_matmul=100 * matmul, kept_low=100 * kept[V8][EACH].min(), limited=load["limited"].sum(),
    kept_high=100 * kept[V8][EACH].max(), strong=len(strong), watts=limit, rows=len(load),
    power_sd=100 * strong["power_w"].std() / limit, margin=100 * (1 - margin), plain=plain,
    apart_time=100 * abs(twice["time_us"] * top["sustained"].tflops * 1e6 / ceiling.flops - 1),
    apart_clock=100 * (twice["sm_clock_mhz"] / once.sm_clock_mhz - 1),
    apart_joules=100 * (twice["joules"] / once.joules - 1),
    plain_first=100 * (first[gelu] / first[identity] - 1),
    plain_gelu=100 * (rate[identity] / rate[gelu] - 1),
)  # fmt: skip

# %% [markdown]
# ## Slow kernels hit the wall too
#
# Power limits {glue:text}`limited:.0f` of {glue:text}`rows:.0f` rows. A slow kernel does not draw
# less: it gets a higher clock for the same {glue:text}`watts:.0f` W.

# %% tags=["remove-input"]
# | name: fig-wall-clocks
# | caption: >
# |   Clock over rate, back to back, all workloads, both directions. Dashed: the rate of tensor
# |   cores that never pause; nothing can lie below it.
# | alt: >
# |   A scatter that falls: the higher the rate, the lower the clock. Ours and peers follow one
# |   band. Two marks of v8 lie near the dashed line, one of them below it.
ours = ~load["impl"].isin([V8, *PEERS])
groups = {"v8": of_v8, "peers": load[load["impl"].isin(PEERS)], "our other kernels": load[ours]}
chart = energy.clocks(groups, busy=units.H200.sms * units.H200.flops / 1e6)
chapter.figure(chart, measured=load)

# %% [markdown]
# One mark lies *below* the line, v8 without an activation: a misreading again. *At the wall a rate
# is the limit over the energy per FLOP*: a rung that is faster back to back takes less energy. What
# FlashAttention-2 loses in waiting it regains in clock.
#
# ## Three ceilings in one roof

# %% tags=["remove-input"]
# | name: fig-wall-roof
# | caption: >
# |   v8 forward under the roofline of bursts: a mark for the burst, a line down to the rate back to
# |   back. Dotted: the matmul back to back. Copies have one slope, burst or not.
# | alt: >
# |   A roof with a flat top and a dotted line below it. Marks of v8 at high intensity lie between
# |   the two, and their lines end below the dotted one.
families = {s: text for s, text in drawings.FAMILIES.items() if s and "dense" not in s}
roof = pd.DataFrame({"high": rates["kernel"][V8], "low": rates["sustained"][V8]}).loc[EACH]
roof["intensity"] = of_v8["flops"] / of_v8["bytes"]
level = {f"back to back: {top['sustained'].tflops:.0f}": top["sustained"].tflops}
chart = drawings.roofline(roof, top["kernel"], level, {n: n[15:] for n in FULL[2:]}, families)
chapter.figure(chart, measured=chapter.rows(scope=BOTH, impl=V8, direction="forward"))

# %% [markdown]
# Against ceilings timed the same way v8 reaches {glue:text}`share_burst:.0f` % of the roofline in a
# burst of 2,048 tokens and {glue:text}`share_own:.0f` % back to back; without an activation, at
# 1,024, {glue:text}`share_identity:.0f` %. The matmul is at the wall too: a sustained share says
# how much more energy attention takes than a matmul of the same FLOPs. At 256 tokens v8 loses
# {glue:text}`lost_256:.1f` points. The ceiling there, the copy, keeps its rate; v8 pays for bytes
# *and* FLOPs from one budget.
#
# ## Where the joules go
#
# Static power × time, MMAs, bytes, activations: naive least squares over v8's rows, full batches:

# %%
v8 = of_v8.drop(HALF)
kind = pd.Series({name: made.workload(name).activation for name in v8.index})
v8["gelu"] = v8["pairs"] * kind.isin(["gelu", "gelu_tanh"])
v8["silu"] = v8["pairs"] * (kind == "silu")
counts = ["flops", "bytes", "gelu", "silu"]
naive = energy.fit(v8, ["seconds", *counts])
print(naive.terms, f"condition number {naive.condition:.0f}", sep="\n")

# %% [markdown]
# {glue:text}`static:,.0f` ± {glue:text}`static_error:.0f` W of static power, on a board that may
# draw {glue:text}`watts:.0f`, and FLOPs that *return* energy. The reason is the wall itself. Joules
# are {glue:text}`watts:.0f` W times seconds, up to the scatter of the meter: time alone fits them
# to {glue:text}`alone_rms:.1f` %. *A regulator that holds power constant hides the static power.*
# It lies somewhere between the {glue:text}`idle:.0f` W of the idle board and the
# {glue:text}`zeros_w:.0f` W that a matmul of zeros draws in all.
#
# So ask less: how much of {glue:text}`watts:.0f` W × time, static power included, goes with each
# FLOP, byte and activation?

# %%
fitted = energy.fit(v8, counts, of="wall")
print((1e12 * fitted.terms).round(2), f"condition number {fitted.condition:.1f}", sep="\n")

# %% tags=["remove-cell"]
pj, own, static = 1e12 * fitted.terms["value"], share["sustained"][V8], naive.terms.loc["seconds"]
assert static["value"] > limit and naive.terms["value"]["flops"] < 0 and fitted.rms_percent < 1
used = 100 * (v8.loc[FULL[2], counts] * pj).pipe(lambda x: x / x.sum())  # at 512 tokens
chapter.glue(
    **{f"pj_{term}": value for term, value in pj.items()}, rms=fitted.rms_percent, fitted=len(v8),
    static=static["value"], static_error=static["error"], idle=made.state["before"]["power_w"],
    byte_flops=pj["bytes"] / pj["flops"], alone_rms=energy.fit(v8, ["seconds"]).rms_percent,
    gelu_flops=pj["gelu"] / pj["flops"], gelu_share=100 * pj["gelu"] / (512 * pj["flops"]),
    share_burst=share["kernel"][V8][at], share_own=own[at], share_identity=own[identity],
    lost_256=-points[FULL[3]], most_residual=100 * fitted.residuals.abs().max(),
    zeros_w=mm["power_w"]["zeros"], capped=rate[at] * 500 / limit, own_512=own[FULL[2]],
    bytes_512=used["bytes"], gelu_512=used["gelu"], free=100 * own[FULL[2]] / (100 - used["gelu"]),
)  # fmt: skip

# %% [markdown]
# {glue:text}`fitted:.0f` rows, four constants, residuals of {glue:text}`rms:.1f` % (root mean
# square) and {glue:text}`most_residual:.1f` % at most. A GELU takes {glue:text}`pj_gelu:.0f` pJ, a
# SiLU, with the same tanh and fewer FMAs, {glue:text}`pj_silu:.0f` pJ; ReLU cannot be told from
# nothing. "FLOP" includes shared memory, registers, instructions. Pairs are a fixed multiple of
# FLOPs, so only identity and ReLU separate an activation from an {term}`MMA`, at one length; SiLU's
# constant comes from a single row; and energy depends on voltage, which follows the clock. At 512
# tokens {glue:text}`bytes_512:.0f` % of a call are bytes and {glue:text}`gelu_512:.0f` % GELU: with
# a free one v8 would reach {glue:text}`free:.0f` % of its roofline (modelled), instead of
# {glue:text}`own_512:.0f`.
#
# For other kernels the activation cannot be separated at all. Two constants each, forward:

# %%
split = {}
for impl in [*FORWARD[:5], "fa2_varlen", "cudnn"]:
    rows = load.query("impl == @impl and direction == 'forward' and limited")
    rows = rows[rows["workload"].isin([*FULL, CROSS])]
    two = energy.fit(rows, counts[:2], of="wall")
    split[impl] = (*1e12 * two.terms["value"], two.rms_percent, rows["sm_clock_mhz"].median())
columns = ["pJ per FLOP", "pJ per byte", "residuals, rms (%)", "clock, median (MHz)"]
split = pd.DataFrame(split, index=columns).T.rename_axis("forward").reset_index()
chapter.table(split, modelled=f"fits to times of record {made.id}, except for the clock")

# %% [markdown]
# From v1 to v8 a FLOP with its share of an activation became cheaper rung by rung. Where bytes seem
# dearer than v8's, a kernel moves extra bytes, or waits. v1 and v4 fit badly.
#
# Energy goes into bits that change, too. The matmul of 8,192:

# %% tags=["remove-input"]
chapter.table(mm.reset_index(), measured=[made.id])
b200 = claims.published_figures().query("kernel == 'cutedsl_gdpa' and direction == 'forward'")
b200 = b200.loc[~b200["suspect"], "tflops"].max()
ghz, data = units.B200.clock_ghz(b200 / 0.97), mm["joules"]
chapter.glue(ones=100 * (1 - data["ones"] / data["random"]), b200=b200, b200_pj=750 / b200,
             ghz=ghz, nominal=100 * ghz / 1.965, v8_pj=limit / rate[at])  # fmt: skip

# %% [markdown]
# On ones the same instructions take {glue:text}`ones:.0f` % less energy: benchmark with real data.
#
# The published B200 figures meet such a wall too: under a cap of 750 W {glue:text}`b200:,.0f`
# TFLOP/s back to back are {glue:text}`b200_pj:.2f` pJ per FLOP or less (modelled; v8 here:
# {glue:text}`v8_pj:.2f`). For "97 % busy" tensor cores, of active cycles, that would take
# {glue:text}`ghz:.2f` GHz, {glue:text}`nominal:.0f` % of nominal ({doc}`../blackwell/model`).
#
# ## The surprise: the wall in the middle of a burst
#
# Does a burst avoid the wall, then? Thirty samples of a few milliseconds each, with pauses:

# %%
shown = {"in company": FULL[0], "alone": f"{FULL[0]}alone", "gelu, alone": gelu}
samples = pd.DataFrame({text: bursts[name] for text, name in shown.items()})
samples = workload(FULL[0]).flops("forward") / samples.set_axis(range(1, 31)) / 1e6

# %% tags=["remove-input"]
# | name: fig-wall-burst
# | caption: >
# |   v8's burst at 1,024 tokens, taking turns with seven kernels or none. Dashed: back to back.
# | alt: >
# |   Three curves over thirty samples. In company: level but for one dip. Alone: falling in steps.
# |   With gelu, alone: level for more than half of the samples, then a fall.
chart = charts.lines(samples, xlabel="sample", ylabel="TFLOP/s", highlight=list(shown),
                      levels={"back to back": rate[FULL[0]]})  # fmt: skip
chapter.figure(chart, data=samples.reset_index(names="sample"), measured=[made.id])
alone = chapter.rows(variant="alone").set_index("workload")["percent_of_roofline"][at]
chapter.glue(fa2=100 * (kept["fa2_varlen"][at] - 1), alone=alone, **{
    f"{s}_{peer}": rates[s][V8][at] / rates[s][peer][at] for s in BOTH for peer in PEERS
})  # fmt: skip

# %% [markdown]
# Alone, v8 begins as fast as in turns with others. After some tens of milliseconds the regulator
# reacts, and the rest of the burst is at the wall. The median then depends on how many came before.
#
# In company kernels seem to *share a clock* (bursts read none), lower than a slow kernel's and
# higher than v8's own: at 2,048 FlashAttention-2 is {glue:text}`fa2:.0f` % *faster* back to back
# than in its burst. So turns bias a ratio: v8 has {glue:text}`kernel_fa2_varlen:.2f` times its rate
# in the burst there and {glue:text}`sustained_fa2_varlen:.2f` times back to back. For cuDNN it is
# {glue:text}`kernel_cudnn:.2f` and {glue:text}`sustained_cudnn:.2f`. v8's share of the roofline is
# {glue:text}`share_burst:.0f` % in company, {glue:text}`alone:.0f` % alone and
# {glue:text}`share_own:.0f` % back to back. So results and claims lead with times back to back.
#
# ## Exercises
#
# :::{exercise} A lower cap
# :label: ex-wall-cap
#
# A data centre caps the board at 500 W. What rate does v8 reach at 2,048 tokens if a call keeps its
# energy? Name one reason for more and one for less. *(paper, five minutes)*
# :::
#
# :::{solution} ex-wall-cap
# :class: dropdown
#
# 500 / 700 of its rate, {glue:text}`capped:.0f` TFLOP/s. More: a lower clock needs a lower voltage,
# so a FLOP takes less energy. Less: static power is paid for longer.
# :::
#
# :::{exercise} What an activation may cost
# :label: ex-wall-activation
#
# A pair of head_dim 128 has 512 FLOPs. By which share of its MMAs does GELU raise its energy? What
# is that share at head_dim 64, and what should the next rung do about it? *(paper)*
# :::
#
# :::{solution} ex-wall-activation
# :class: dropdown
#
# {glue:text}`pj_gelu:.0f` pJ on 512 × {glue:text}`pj_flops:.2f` pJ, {glue:text}`gelu_share:.0f` %,
# and twice that at 64, where a pair has half the FLOPs. Save instructions: SiLU's take half.
# :::
#
# :::{exercise} A watt that nobody sees
# :label: ex-wall-static
#
# Which measurement would separate static power, at the same limit? *(thought, five minutes)*
# :::
#
# :::{solution} ex-wall-static
# :class: dropdown
#
# Rows *below* the wall at a steady clock: one kernel on fewer and fewer SMs, or with growing pauses
# too short for the clock to change. Extrapolated to no work, power is the static power of that
# voltage.
# :::
#
# ## Takeaways
#
# - Back to back a rate is the power limit over the energy per FLOP.
# - Compare a rate with ceilings timed the same way. In a burst kernels share a clock, or hit the
#   wall.
# - Repeat a measurement before you fit it. At constant power joules and seconds are one column.
