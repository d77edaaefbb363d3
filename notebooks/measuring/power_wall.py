# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # The power wall
#
# A training loop does not rest as a {term}`burst` does. What is left of a fast kernel back to back,
# and which saving counts then, cycles or energy?
#
# :::{admonition} In this chapter (30 minutes)
# You will run kernels {ref}`back to back <rule-scope>`, see their clock fall until the board
# draws {glue:text}`watts:.0f` W, and use a law with one measured exponent. On the H200 the matmul
# keeps {glue:text}`kept_matmul:.0f` % of its burst rate and forward v8 {glue:text}`kept_low:.0f` to
# {glue:text}`kept_high:.0f` %.
# :::

# %% tags=["hide-input"]
import functools
from dataclasses import replace

import pandas as pd
import torch

from gdpa_kernels.gdpa.kernels.v8_own_waits import Config
from gdpa_lab.measuring import cost_model, record, sustained
from gdpa_lab.measuring import system as systems
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts, results
from gdpa_lab.report.chapter import Chapter
from notebooks.measuring import _energy

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
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
        session.measure(workload(name), [(V8, "behind", {"config": Config()})], scopes=BOTH)
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
run, mm = chapter.record(), chapter.recorded("matmuls").set_index("data")
limit = systems.load(chapter.data_dir / "systems" / f"{run.system}.json").power_limit_w
top = {scope: results.ceilings(run, scope) for scope in BOTH}
rates = {s: chapter.times(value="tflops", direction="forward", scope=s) for s in BOTH}
share = {s: chapter.times(value="percent_of_roofline", direction="forward", scope=s) for s in BOTH}
retained = rates["sustained"] / rates["kernel"]
load = _energy.counted(chapter.rows(scope="sustained"), run)
load["busy"] = _energy.busy_share(load, cost_model.H200)
strong, of_v8 = load[load["tflops"] >= 400], load[load["impl"] == V8].set_index("workload")
EACH = [*sorted(FULL, key=lambda name: -workload(name).max_seqlen_q), CROSS, *HALF]
SHORT = {name: name.removeprefix("gdpa-") for name in EACH}
assert retained.loc[EACH, V8].between(0.8, 0.9).all(), "the caption: between a tenth and a fifth"

# %% tags=["remove-input"]
# | name: fig-wall-rates
# | caption: >
# |   **Back to back forward v8 loses between a tenth and a fifth of its burst rate.** The baseline
# |   is the fastest of cuDNN, FlashAttention-2 and -4. Dashed: a matmul of 8,192.
# | alt: >
# |   A dot plot over eight workloads. Each mark back to back lies left of that in bursts, by a
# |   tenth to a fifth. v8 lies right of the baseline in both. Two dashed lines stand right
# |   of most marks.
both = {"burst": rates["kernel"], "back to back": rates["sustained"]}
drawn = {"forward v8": {name: each[V8] for name, each in both.items()}}
drawn["best baseline"] = {name: each[PEERS].max(axis=1) for name, each in both.items()}
drawn = {way: pd.DataFrame(each).loc[EACH].rename(SHORT) for way, each in drawn.items()}
lost = 100 * (1 - drawn["forward v8"]["back to back"] / drawn["forward v8"]["burst"])
chart = charts.dumbbells(
    drawn, xlabel="TFLOP/s, from bursts (small dot) to back to back (large dot)", change=True,
    levels={f"matmul, {results.TIMED[scope]}": top[scope].tflops for scope in BOTH},
    finding=f"Back to back forward v8 loses {lost.min():.0f} to {lost.max():.0f} %.",
)  # fmt: skip
chapter.figure(chart, measured=chapter.rows(scope=BOTH, direction="forward", impl=[V8, *PEERS]))

# %% [markdown]
# ## A slow kernel draws as much power as a fast one
#
# Back to back each kernel ran for {glue:text}`seconds:.1f` s after {glue:text}`warm:.1f` s of
# warming up, while NVML, NVIDIA's monitoring library, gave clock and energy. Power limits
# {glue:text}`limited:.0f` of {glue:text}`rows:.0f` such rows: the driver gives `sw_power_cap` as
# its reason for lowering the clock.
#
# A slow kernel does not draw less. It gets a higher clock for the same {glue:text}`watts:.0f` W, up
# to the highest that the chip has. What FlashAttention-2 loses in waiting, it partly regains in
# clock.

# %% tags=["remove-cell"]
EXPONENT, WORK = 2.4, ["workload", "direction"]
capped = load[load["limited"]]
law = _energy.law(capped, WORK)
wall = _energy.fit_wall(capped, limit, EXPONENT)
others = [_energy.fit_wall(capped, limit, p).rms_percent for p in (1.6, 3.0)]
busy = capped["busy"].median()
by_model = 1 - wall.full * busy / (wall.base + wall.full * busy) / EXPONENT
saved = [100 * (1 - 0.9**p) for p in law.exponents]
assert all(round(x) == 7 for x in saved), "the title, at both ends of the interval"
assert round(law.exponent, 1) == 0.7, "the glossary, and an exercise of training/step"
assert law.high < by_model < 0.85, "the text: the model's exponent is larger"
assert max(others) < wall.rms_percent + 0.5, "the text: other exponents fit as well"
assert len(law.each) >= 8 and law.each.between(0.6, 0.85).all(), "the text: each workload"

# %% tags=["remove-input"]
# | name: fig-wall-clocks
# | caption: >
# |   **The more cycles a kernel uses, the lower its clock, and the rate rises by less than the
# |   cycles in use.** Back to back, all workloads and directions. Right: rows that power limits,
# |   with the law and its interval; dashed: the clock does not answer.
# | alt: >
# |   Left, a scatter that falls: few cycles in use at a high clock, many at a low one. Right, on
# |   logarithmic axes, points along a line that is flatter than the dashed diagonal.
ours = ~load["impl"].isin([V8, *PEERS])
groups = {"forward v8": load[load["impl"] == V8], "baselines": load[load["impl"].isin(PEERS)],
          "our other kernels": load[ours]}  # fmt: skip
chapter.figure(_energy.at_the_wall(groups, law), measured=load)

# %% [markdown]
# ## One law: time follows cycles to a power below one
#
# Let $u$ be the share of the tensor cores' cycles in use and $f$ the clock. A rate is $u f$ times a
# constant. If a kernel wastes fewer cycles, $u$ rises and $f$ falls, by less. In the rows of one
# workload, which differ only in their kernels, this becomes
#
# $$
# \frac{\text{time after}}{\text{time before}} =
# \left(\frac{\text{cycles after}}{\text{cycles before}}\right)^{p},
# $$ (eq-wall-exponent)
#
# with $p$ = {glue:text}`p:.2f`, and {glue:text}`p_low:.2f` to {glue:text}`p_high:.2f` if the
# workloads are drawn again with replacement (95 %). Single workloads have {glue:text}`each_low:.2f`
# to {glue:text}`each_high:.2f`. Of all {glue:text}`fitted:.0f` rows the law misses the worst by
# {glue:text}`law_most:.0f` % of its rate ({glue:text}`law_rms:.1f` % root mean square).
#
# *An example.* A change saves 10 % of a kernel's cycles. In a short burst, before power limits
# anything, it saves 10 % of the time, back to back {glue:text}`saved:.1f` %.
#
# **Where it comes from.** A chip draws a base power and a power for what it does, and both rise
# steeply with the clock, because a higher clock needs a higher voltage. At the wall the sum, with
# $B$ bytes a second, is the limit:
#
# $$
# \left(\frac{f}{1500\,\mathrm{MHz}}\right)^{2.4} (P_0 + P_1 u) + e\,B = 700\,\mathrm{W} .
# $$ (eq-wall)
#
# Fitted to the {glue:text}`capped:.0f` rows at the limit, $P_0 =$ {glue:text}`base:.0f` W, $P_1 =$
# {glue:text}`full:.0f` W and $e =$ {glue:text}`byte:.0f` pJ a byte; the clocks follow within
# {glue:text}`rms:.1f` % (root mean square), at worst {glue:text}`most:.0f` %. Exponents from 1.6 to
# 3.0 fit as well, so do not read the constants as physics. The model has $p$ =
# {glue:text}`by_model:.2f`, more than the rows: use it for what the law leaves out, a limit or a
# clock that changes.
#
# **Cycles are worth more than joules.** At constant power a rate is power over energy per call, so
# one could think that only energy counts. But the energy of a call falls with the clock. We ran
# forward v8 at 2,048 tokens on 120 of the 132 SMs. If the energy of a call were constant, it would
# lose nothing, or 2 % for the idle SMs' static power. By the law it loses {glue:text}`fewer:.1f` %
# of its rate, and it lost most of that ({doc}`../../notes/at_the_wall`).
#
# **All else equal.** Rows of different kernels prove no cause. One of our experiments saved cycles
# and lost rate: its programs drifted apart and read far more from memory.
#
# ## Locked clocks, and steps that are not capped
#
# *Below a locked clock* $f$ does not answer, and each cycle saved counts in full.
#
# *A mixed step* may not meet the wall at all. The limit holds for an average over some tens of
# milliseconds, and other parts of a step draw less. By {eq}`eq-wall` forward v8 would draw about
# {glue:text}`free_w:,.0f` W at the highest clock. If the rest draws 450 W, the average stays under
# the limit as long as attention takes less than {glue:text}`mixed:.0f` % of the time (modelled).
# So the truth for a model lies between burst and back to back ({doc}`../training/step`).
#
# ## A fleet gains work per joule
#
# A data centre may run out of watts before it runs out of boards. Its rate is then its power over
# the joules of a call, and its gain the ratio of joules:
#
# $$
# \frac{\text{joules before}}{\text{joules after}} =
# \frac{\text{time before}}{\text{time after}} \cdot
# \frac{\text{power before}}{\text{power after}} .
# $$ (eq-wall-fleet)
#
# Between two kernels at the wall that is the speedup of a board. But a kernel that waits so much
# that it meets the highest clock first draws less. On {glue:text}`fleet_work` FlashAttention-4
# draws {glue:text}`fleet_watts:.0f` W and forward v8 {glue:text}`fleet_watts_v8:.0f` W: on a board
# v8 is {glue:text}`fleet_speed:.2f` times as fast, and it does {glue:text}`fleet_joules:.2f` times
# the work per joule. A fleet that is short of power gains the latter.

# %% tags=["remove-cell"]
mhz = systems.load(chapter.data_dir / "systems" / f"{run.system}.json").max_sm_clock_mhz
long = of_v8.loc[FULL[1]]
hot = wall.power(long["busy"], long["gbytes_per_s"], mhz)
COOL = 450.0
of_calls = load.set_index(["workload", "direction", "impl"])
slow, fast = (of_calls.loc[(CROSS, "forward", impl)] for impl in ("fa4", V8))
OTHERS = 300.0  # watts of a server beside its boards, for each
fleet_speed, fleet_joules = slow["seconds"] / fast["seconds"], slow["joules"] / fast["joules"]
assert not slow["limited"] and fast["limited"], "the text: below the limit, and at it"
assert fleet_joules < 0.9 * fleet_speed, "the text: less"
chapter.glue(
    fleet_work=CROSS, fleet_watts=slow["power_w"], fleet_watts_v8=fast["power_w"],
    fleet_speed=fleet_speed, fleet_joules=fleet_joules,
    fleet_others=fleet_speed * (slow["power_w"] + OTHERS) / (fast["power_w"] + OTHERS),
    capped=len(capped), base=wall.base, full=wall.full, byte=1e3 * wall.byte, rms=wall.rms_percent,
    most=wall.most_percent, p=law.exponent, p_low=law.low, p_high=law.high, by_model=by_model,
    each_low=law.each.min(), each_high=law.each.max(), fitted=len(law.residuals),
    law_most=100 * law.residuals.abs().max(), law_rms=100 * (law.residuals**2).mean() ** 0.5,
    saved=saved[1], fewer=100 * (1 - (120 / 132) ** law.exponent),
    free_w=hot, mixed=100 * (limit - COOL) / (hot - COOL),
)  # fmt: skip
assert wall.byte * 1e3 < 200 and hot > limit > COOL, "the text says so"

# %% [markdown]
# ## What we had predicted
#
# These predictions stood in the {doc}`lab notes <../../notes/measuring>` before the record.

# %% tags=["remove-input"]
full, identity = retained.loc[FULL, V8], f"{FULL[0]}-identity"
matmul, zeros = top["sustained"].tflops / top["kernel"].tflops, mm.loc["random"] / mm.loc["zeros"]
joules = chapter.times(value="joules", direction="forward", scope="sustained").loc[FULL[:2]]
margin = (joules[V8] / joules[["v6_short_kv", "v7_packed", *PEERS]].min(axis=1)).max()
points, rate = share["sustained"][V8] - share["kernel"][V8], rates["sustained"][V8]
off = 100 * (strong["power_w"] / limit - 1).abs().max()
plain = 100 * (rate[identity] / rate[FULL[0]] - 1)
longest, say = FULL[1], chapter.predict
also = functools.partial(say, shown=False)
say("Back to back the matmul keeps this share of its burst rate.", matmul, least=0.82, most=0.88)
say("Forward v8 keeps at least this share of its burst rate on full batches.", full.min(),
    least=0.83, most=0.97)  # fmt: skip
say("Forward v8 keeps most at 2,048 tokens: its share there over its largest.",
    full[longest] / full.max(), least=1)  # fmt: skip
also("From 400 TFLOP/s on power is within 3 % of its limit: the largest distance, %.", off, most=3)
also(
    "v8 stands higher under its own ceilings at 2,048, in points.",
    points[longest],
    least=1,
    most=12,
)
also("A call of v8 takes least energy from 1,024 on: over the next best.", margin, most=1)
also("Without an activation v8 is faster at 1,024, in %.", plain, least=2, most=10)
also("A matmul of zeros is faster, in %.", 100 * (zeros["time_us"] - 1), least=15)
also("Its clock is higher: that of random numbers over it.", zeros["sm_clock_mhz"], most=1)
chapter.predictions()

# %% [markdown]
# Forward v8 keeps the largest share at 256 tokens, not at 2,048. At 256 memory is part of the
# limit, and copies do not meet the wall: they run as fast back to back as in a burst.
#
# ## Energy and clock are coarse readings
#
# A clock is a momentary reading in steps of 15 MHz, one per cent. Kernels from 400 TFLOP/s on, all
# at the limit of {glue:text}`watts:.0f` W, read {glue:text}`read_low:.0f` to
# {glue:text}`read_high:.0f` W. So the law was fitted to many rows, and this book compares times.

# %% tags=["remove-cell"]
v8 = of_v8.drop(HALF)
kind = pd.Series({name: run.workload(name).activation for name in v8.index})
v8["gelu"] = v8["pairs"] * kind.isin(["gelu", "gelu_tanh"])
v8["silu"] = v8["pairs"] * (kind == "silu")
naive = _energy.fit(v8, ["seconds", "flops", "bytes", "gelu", "silu"])
static = naive.terms.loc["seconds"]
v8_share = share["sustained"][V8]
assert static["value"] > limit and naive.terms["value"]["flops"] < 0
assert strong["limited"].all(), "the text says so"
assert (2 * capped["sm_clock_mhz"] % 15 == 0).all(), "the text: steps, and the mean of two"
assert strong["power_w"].max() / strong["power_w"].min() > 1.05, "the title: coarse"
assert full.idxmax() == FULL[3] and top["sustained"].copies[0][1] > top["kernel"].copies[0][1]
data = mm["joules"]
chapter.glue(
    **{f"{s}_{peer}": rates[s][V8][longest] / rates[s][peer][longest]
       for s in BOTH for peer in PEERS},
    kept_matmul=100 * matmul, kept_low=100 * retained[V8][EACH].min(),
    kept_high=100 * retained[V8][EACH].max(), limited=load["limited"].sum(), watts=limit,
    seconds=sustained.SECONDS, warm=sustained.WARM_S,
    rows=len(load),
    read_low=strong["power_w"].min(), read_high=strong["power_w"].max(),
    **{x: 100 * (1 - data[x] / data["random"]) for x in ("ones", "zeros")},
    share_burst=share["kernel"][V8][longest], share_own=v8_share[longest],
    lost_256=-points[FULL[3]], cap_rate=rate[longest],
    capped_500=rate[longest] * (500 / limit) ** (1 / EXPONENT),
    capped_joules=rate[longest] * 500 / limit,
)  # fmt: skip

# %% [markdown]
# On ones the matmul of 8,192 takes {glue:text}`ones:.0f` % less energy, and on zeros
# {glue:text}`zeros:.0f` % less: benchmark with real data.
#
# ## A share of the roofline needs a ceiling of its own scope
#
# Against {ref}`ceilings <rule-ceiling>` of the same {ref}`scope <rule-scope>`, forward v8 reaches
# {glue:text}`share_burst:.0f` % of the roofline in a burst of 2,048 tokens and
# {glue:text}`share_own:.0f` % back to back: the matmul is at the wall, too. At 256 tokens v8 loses
# {glue:text}`lost_256:.1f` points, because the ceiling
# there is the copy, which keeps its rate.
#
# In a burst kernels take turns at one average clock, which flatters the faster one: at 2,048 tokens
# v8's rate is {glue:text}`kernel_fa2_varlen:.2f` times that of FlashAttention-2 in bursts, and back
# to back {glue:text}`sustained_fa2_varlen:.2f` times.
#
# ## Exercises
#
# :::{exercise} A lower cap
# :label: ex-wall-cap
#
# A board is capped at 500 W. What rate does forward v8 reach at 2,048 tokens? Compare two answers:
# a call keeps its energy, and {eq}`eq-wall` without its bytes. *(paper, ten minutes)*
# :::
#
# :::{solution} ex-wall-cap
# :class: dropdown
#
# With constant energy 500 / 700 of its rate, {glue:text}`capped_joules:.0f` TFLOP/s. By the model
# the clock falls by (500 / 700) to the power of 1 / 2.4, to 87 %, while $u$ stays:
# {glue:text}`capped_500:.0f` of {glue:text}`cap_rate:.0f` TFLOP/s. A lower cap makes FLOPs cheaper,
# which is why data centres set one.
# :::
#
# :::{exercise} The rest of the server
# :label: ex-wall-fleet
#
# Beside each board a server draws 300 W for CPUs, fans and network. What is the gain of the fleet
# above now? And with more power than boards? *(paper, five minutes)*
# :::
#
# :::{solution} ex-wall-fleet
# :class: dropdown
#
# Add 300 W to both powers in {eq}`eq-wall-fleet`: {glue:text}`fleet_others:.2f` times the work. The
# rest of the server draws its power per second, whatever the kernel is, so the more it draws, the
# nearer the gain comes to the board's {glue:text}`fleet_speed:.2f`. If boards are what is short,
# the gain is just that.
# :::
#
# :::{exercise} Two changes
# :label: ex-wall-two
#
# Change A saves 6 % of a kernel's cycles. Change B leaves the cycles alone and saves 6 % of the
# power that depends on work, $P_1$. Which is worth more back to back, at $u = 0.8$? And with a
# clock that is locked below the wall? *(paper, fifteen minutes)*
# :::
#
# :::{solution} ex-wall-two
# :class: dropdown
#
# A: by the law $0.94^{-p}$, {glue:text}`change_a:.1f` % more rate. B: $P_1 u$ is about
# {glue:text}`dynamic:.0f` % of the switched power, so the clock rises by 6 % of that, over 2.4:
# about {glue:text}`change_b:.1f` %. A is worth more than twice as much. With a locked clock A gives
# 6.4 % and B nothing but a lower bill.
# :::
#
# ## Takeaways
#
# - Back to back the clock takes back three tenths of what fewer cycles gain: time follows cycles to
#   the power of {glue:text}`p:.2f`, give or take 0.03.
# - A fleet short of power gains work per joule: less than a board, if the slow kernel drew less.

# %% tags=["remove-cell"]
part = wall.full * 0.8 / (wall.base + wall.full * 0.8)
change_b = 0.06 * part / EXPONENT
change_a = 0.94**-law.exponent - 1
assert change_a > 2 * change_b, "the text: worth more than twice as much"
assert max(law.high - law.exponent, law.exponent - law.low) < 0.035, "the takeaway: 0.03"
assert 0.25 < 1 - law.exponent < 0.35, "the takeaway: three tenths"
chapter.glue(dynamic=100 * part, change_a=100 * change_a, change_b=100 * change_b)
