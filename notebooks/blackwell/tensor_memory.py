# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: false
# ---

# %% [markdown]
# # Blackwell b1 to b4
#
# A Blackwell tensor core is twice as fast as a Hopper one, and its accumulators no longer live in
# registers. What must a kernel change to keep it busy?
#
# :::{admonition} In this chapter (50 minutes)
# You will be able to place S, P and O in {glue:text}`columns:.0f` columns of {term}`tensor memory`,
# give all {term}`MMAs <MMA>` to one thread, and break up a chain of waits in three steps. Nothing
# of ours for Blackwell is measured, since we have no B200: the kernels are compiled and emulated.
# :::

# %% tags=["hide-input"]
import re

import pandas as pd
import torch

from _lib import drawings, studies
from gdpa_kernels.gdpa.device.polynomial import POLYNOMIALS
from gdpa_kernels.gdpa.ladder import b1_tensor_memory, b2_two_tiles, b3_stream, b4_mixed
from gdpa_lab.measuring import compile_check
from gdpa_lab.report import charts
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("blackwell/tensor_memory", mode=mode, device=device, data_dir=data_dir)
RUNGS = {"b1": b1_tensor_memory, "b2": b2_two_tiles, "b3": b3_stream, "b4": b4_mixed}
BLACKWELL = {"arch": "sm_100", "multiprocessors": 1}
chapter.glue(columns=compile_check.TENSOR_COLUMNS)

# %% tags=["remove-input"]
# | name: fig-tm-columns
# | caption: >
# |   **With two tiles, S, P and O fill tensor memory.** What lies in the 512 columns when the
# |   scores S of a block are complete, and when the activation has put P over them. b1 has one tile
# |   of 128 queries, b2 to b4 have two.
# | alt: >
# |   Four rows of 512 columns. b1 uses the left half: S in 0 to 127, later P in 0 to 63, and O in
# |   128 to 255. In b2 to b4 S 0 and S 1 fill the left half, later P 0 and P 1 the first half of
# |   each, and O 0 and O 1 the right half.
ONE, TWO = [(128, 256, "O", "O")], [(256, 384, "O 0", "O"), (384, 512, "O 1", "O")]
chapter.figure(
    drawings.segments(
        {
            "forward b1: S complete": [(0, 128, "S", "S"), *ONE],
            "forward b1: P stored": [(0, 64, "P", "P"), *ONE],
            "forward b2 to b4: S complete": [(0, 128, "S 0", "S"), (128, 256, "S 1", "S"), *TWO],
            "forward b2 to b4: P stored": [(0, 64, "P 0", "P"), (128, 192, "P 1", "P"), *TWO],
        },
        ["O", "S", "P"], xlabel="column of tensor memory",
        ticks={n: str(n) for n in range(0, 513, 128)},
    ),
    computed="the allocations in the source of the four kernels, head_dim 128",
)  # fmt: skip

# %% [markdown]
# ## Accumulators leave the registers
#
# | | {doc}`forward v8 <../forward/v8_own_waits>`, Hopper | b1 to b4, Blackwell |
# |:--|:--|:--|
# | MMA of an SM | 4,096 FLOPs a clock | 8,192 |
# | issued by | each consumer, four warps together | one thread, for the whole CTA |
# | rows of an MMA | 64 a consumer | 128: one for each lane of tensor memory |
# | accumulator | registers of the consumer | tensor memory |
# | A of P V | registers | tensor memory |
# | completion | `wait_group`, in order | a *commit* arrives on an mbarrier |
# | `tanh` | 16 a clock | 16 a clock |
#
# Tensor memory is 128 lanes of 512 columns ({ref}`columns <rule-columns>`), and a thread of `math`
# holds one lane, a row. P in bf16 needs half the columns of S in fp32. It may overwrite its own S
# ({numref}`fig-tm-columns`), since a row of S is read before the same row of P is stored.
#
# The MMAs of 128 x 128 pairs take 1,024 clocks at head_dim 128, half of Hopper's. {term}`MUFU`
# still takes 1,024 for their `tanh`, and so does the port of shared memory ({doc}`model`).
#
# ## Blackwell forward b1: one thread issues the MMAs
#
# In b1 there are three roles: `load` copies, `mma` issues, and `math` evaluates the activation. The
# last two wait for each other, block after block:

# %% tags=["remove-input"]
chapter.code(b1_tensor_memory.mma, "for block in")

# %% tags=["remove-input"]
chapter.code(b1_tensor_memory.math, "for block in", "if blocks > 0")

# %% [markdown]
# `mBarriers` is a commit: when this MMA and all before it have completed, the hardware arrives on
# these barriers ({term}`mbarrier`). A complete S thus returns K's buffer to `load` and hands S to
# `math`. `math` answers with 128 arrivals: P is stored, hence S was read.

# %% tags=["remove-input"]
chapter.roles("b1_tensor_memory")

# %% tags=["remove-input"]
# | name: fig-b1-timeline
# | caption: >
# |   **In Blackwell forward b1 the tensor core waits for every activation; two tiles close the
# |   gaps, one stream those between items.** Modelled cycles of the tensor core, idle shaded: b1
# |   has one tile of 128 queries and three blocks of keys, b2 two tiles, b3 two items of two
# |   tiles each.
# | alt: >
# |   Three lanes of MMAs on one axis. In b1 short MMAs alternate with long gaps. In b2 gaps are
# |   left at both ends alone, in b3 the two items meet in the middle with a short one.
picture = studies.batch((256,), (384,), heads=2)
traces = {name: studies.timeline(module, picture, **BLACKWELL) for name, module in RUNGS.items()}
drawn = {f"Blackwell forward {name}": traces[name] for name in ("b1", "b2", "b3")}
chapter.figure(
    drawings.timelines(drawn, core_alone=True), emulated="b1 to b3 for sm_100, modelled cycles"
)

# %% tags=["remove-input"]
studies.stepper(
    {f"Blackwell forward {name}": trace for name, trace in traces.items()},
    "blackwell-tensor_memory-steps",
    title="Blackwell forward b1 to b4, step by step",
)

# %% [markdown]
# The chain S, activation, P V is serial, and there is only one tile to work on. Two such programs
# would hide each other's waits; at 160 KiB of shared memory an SM has room for one.
#
# ## Blackwell forward b2: one tile's activation runs beside the other tile's MMAs
#
# A program takes two tiles of 128 queries, with an S, an O and a math role for each. One `mma` role
# serves both, in an order that lets one tile's activation run beside the other tile's MMAs:

# %% tags=["remove-input"]
chapter.code(b2_two_tiles.mma, "for block in")

# %% [markdown]
# P is handed over in slices of 64 columns, each with a barrier, so that P V starts while the second
# half of the activation runs.

# %% [markdown]
# S of the next block is issued while P V that reads the P under it may still run. No barrier is
# needed: MMAs of one thread run in the order of their issue.
#
# No other work overlaps the ends: Q, K and the first S; the last P V, O and the store.
#
# ## Blackwell forward b3: one stream of MMAs hides the ends of tiles
#
# b3 makes the programs {term}`persistent <persistent kernel>`, with the work list of forward v8:
# after the last P V of a tile comes the first S of the next item, for which `mma` waits for its Q.
# `load` overwrites Q after `q.empty`, on which the commit of the item's last S arrives.

# %% [markdown]
# The next item's P V overwrites O, and no barrier tells `mma` that the old O was read. None is
# needed: `mma` waits for `p.full` first, and the math role that arrives there has already read its
# O, in program order. Where a role of its own stores O, as in {doc}`pairs_and_columns`, that order
# is gone. That role must tell `mma`: it arrives on `o.empty` once O is in its registers, and `mma`
# waits for that before the first P V that overwrites this O.
#
# ## The second tile brings most on long keys, the stream on short ones

# %% tags=["remove-cell"]
KEYS = (256, 1024)


def busy(module, keys, head_dim=128, config=None):
    """Percent of an SM's time with an MMA running: four items, or as many tiles as they have."""
    inputs = studies.batch((512,), (keys,), heads=2, head_dim=head_dim)
    events = pd.DataFrame(studies.timeline(module, inputs, config, **BLACKWELL).events)
    mmas = events[events["kind"] == "mma"]
    return 100 * (mmas["end"] - mmas["start"]).sum() / events.groupby("cta")["end"].max().sum()


share = pd.DataFrame({n: [busy(m, keys) for keys in KEYS] for n, m in RUNGS.items()}, index=KEYS)

# %% tags=["remove-input"]
chapter.table(
    share.round(0).add_prefix("forward ").rename_axis("keys").reset_index(),
    caption="**Each step from Blackwell forward b1 to b3 keeps the tensor cores busier.** Percent "
    "of the time of one SM with an MMA running.",
    name="tab-tm-busy",
    emulated="512 queries, 2 heads, head_dim 128, modelled cycles of sm_100",
)

# %% tags=["remove-cell"]
assert (share[["b2", "b3"]].values > share[["b1", "b2"]].values + 5).all(), "each step helps"
assert ((share["b4"] - share["b3"]).abs() < 5).all(), "the text: no difference at head_dim 128"
for name in ("b1", "b2", "b3"):
    chapter.glue(**{f"busy_{name}": share.loc[1024, name], f"short_{name}": share.loc[256, name]})

# %% [markdown]
# A formula says why. Let an MMA of 128 x 128 pairs take M clocks and their activation X. In b1 a
# block takes 2 M + X, since S, activation and P V follow each other. In b2 and b3 two blocks, one
# of each tile, take max(4 M, 2 M + X): either the tensor core is the limit or the chain of one tile
# is. At head_dim 128 M is 512 clocks and X at least 1,024, so the tensor core could be busy half of
# the time in b1 and always in b2.
#
# The emulator ranks orders of events; {doc}`model` predicts TFLOP/s.
#
# ## Blackwell forward b4: a quarter of the scores without MUFU
#
# GELU and SiLU are x / 2 (1 + t(x)) with t odd and between -1 and 1. Since {doc}`forward v7
# <../forward/v7_packed>` t is one `tanh` of MUFU. For two of eight scores b4 evaluates a polynomial
# instead, on pairs of fp32 in one instruction that sm_100 adds, `fma.rn.f32x2`. That leaves 768
# clocks to MUFU. FlashAttention-4 does the same with softmax's `exp2`
# {cite}`zadouri2026flashattention4`.
#
# The published kernel's Maclaurin polynomial departs from GELU beyond 1.2
# ({doc}`../operator/activations`). Ours is clamped: v = x / (2 LIMIT) is limited to -1/2 .. 1/2 by
# the `.sat` of one FMA, and t = v (c₀ + c₁v² + ...). Within the limit the error is that of the fit.
# Beyond it, the polynomial stays constant and t only rises to 1, so the error is largest at the
# limit or at infinity: one number bounds it for every score.

# %% tags=["remove-cell"]
x = torch.linspace(0.01, 8, 800, dtype=torch.float64)
GELU = POLYNOMIALS["gelu"]
v = (x / (2 * GELU.limit)).clamp(max=0.5)
t = sum(c * v ** (2 * k + 1) for k, c in enumerate(GELU.coefficients))
exact = (1 + torch.erf(x / 2**0.5)) / 2
maclaurin = 0.5 + 0.3989422804 * x - 0.0664903801 * x**3 + 0.0099735570 * x**5
CLAMPED = "clamped, degree 9 (b4)"
curves = {CLAMPED: (1 + t) / 2, "Maclaurin, degree 6": maclaurin}
error = pd.DataFrame({n: (y - exact).abs().numpy() for n, y in curves.items()}, index=x.numpy())

# %% tags=["remove-input"]
# | name: fig-b4-error
# | caption: >
# |   **The clamped polynomial stays below its bound for every score.** Error of GELU over the
# |   score, 0 to 8. Dashed: the bound of Blackwell forward b4's polynomial, for all scores.
# | alt: >
# |   Two curves on a logarithmic axis. The clamped polynomial waves below the dashed line and falls
# |   to nothing. The Maclaurin polynomial crosses the line near 1 and grows without end.
chapter.figure(
    charts.lines(error, xlabel="score x", ylabel="error / x", highlight=[CLAMPED],
                  levels={"bound": GELU.error / 2}, log="y", ylim=(1e-6, 1)),
    modelled="both polynomials in fp64",
)  # fmt: skip

# %% tags=["remove-input"]
lines = [(n, 2 * len(c) - 1, limit, e / 2) for n, (limit, c, e) in POLYNOMIALS.items()]
heads = ["activation", "degree", "limit", "error / x, at most"]
chapter.table(
    pd.DataFrame(lines, columns=heads),
    caption="**The error has a bound for every score.** The polynomials of Blackwell forward b4, "
    "and the largest error of the activation over the score.",
    name="tab-tm-polynomials", digits={"limit": 3}, computed="the bounds that the tests prove",
)  # fmt: skip

# %% [markdown]
# The test takes error, slope and a bound of the curvature at 262,145 points, which covers every
# score between them, and adds the rounding of every step.
#
# In {numref}`tab-tm-busy` b4 is no better than b3: at head_dim 128 b3 does not wait for MUFU, or
# not for it alone. The third exercise has a case where it does.
#
# ## What we know without a B200, and what we do not
#
# All four kernels compile for sm_100a without a {term}`spill`, and no role asks for more registers
# than its even share: a math role keeps 64 scores at a time, never a tile. In b1's machine code the
# copies to and from tensor memory are at columns 0, 0, 64 and 32: S read, P stored, twice, as the
# plan says. In the emulator all four agree with fp64 on lengths around every edge of a tile. The
# tests run every case of the forward ladder in 20 random orders of events, and they break each file
# on purpose: a barrier left out, a parity flipped, an arrival too early.

# %% tags=["remove-cell"]
built = {n: compile_check.build_rung(m, capability=100) for n, m in RUNGS.items()}
facts = studies.facts(built, ("STL",))
assert (facts["STL"] == 0).all() and not facts["spilled (B)"].any(), "the text: nothing spills"
code = compile_check.disassemble(built["b1"])
places = re.findall(r"(LDTM|STTM)\S+ .*?tmem\[UR\d+\+?(\w*)\]", code)[:4]
assert places == [("LDTM", ""), ("STTM", ""), ("LDTM", "0x40"), ("STTM", "0x20")], "the text"
chapter.glue(ptx_fences=built["b3"].asm["ptx"].count("tcgen05.fence"))
inputs = studies.batch(studies.EDGES, studies.EDGES[::-1], head_dim=64)
for module in RUNGS.values():
    studies.comparison(module, inputs, arch="sm_100")

# %% [markdown]
# Five things remain unproved. (1) Any rate. (2) That MMAs of one thread run in order also when
# their accumulators differ: PTX promises it for one accumulator, the emulator assumes it, and
# published kernels rely on it. (3) The order of `tcgen05` operations across threads: emulated
# barriers order all memory, while the PTX has {glue:text}`ptx_fences:.0f` `tcgen05.fence`. (4) The
# lanes of tensor memory: the emulator has buffers, no layouts. (5) Resources that block: in the
# emulator every CTA has 512 columns of its own.
#
# ## Exercises
#
# {doc}`Write it </exercises>`: `make exercise NAME=tensor_memory`.
#
# :::{exercise} A second S
# :label: ex-tm-columns
#
# FA4 and b2 keep one S for each tile. Two of them would let `mma` run a block ahead. Does that fit
# for two tiles, at head_dim 128 and at 64? For one tile? *(paper, five minutes)*
# :::

# %% tags=["remove-cell"]
need = {(tiles, dim): tiles * (2 * 128 + dim) for tiles in (1, 2) for dim in (64, 128)}
assert need[2, 64] > 512 > need[1, 128], "the answer"
chapter.glue(two_128=need[2, 128], two_64=need[2, 64], one_128=need[1, 128])

# %% [markdown]
# :::{solution} ex-tm-columns
# :class: dropdown
#
# Two tiles need {glue:text}`two_128:.0f` columns at head_dim 128 and {glue:text}`two_64:.0f` at 64,
# of 512: no. One tile needs {glue:text}`one_128:.0f` and fits, but then each block of K and V
# serves 128 queries instead of 256. Blocks of 64 keys would also make room, but an MMA with 64
# columns of B waits for shared memory.
# :::
#
# :::{exercise} A wait too few
# :label: ex-tm-wait
#
# Leave out `barrier_wait(p.full[0], ...)` in b1. What goes wrong, and does every order of events
# show it? *(emulator)*
# :::

# %% tags=["remove-cell"]
broken = studies.changed(b1_tensor_memory, ("        tlx.barrier_wait(p.full[0], block & 1)\n", ""))
small = studies.batch((130,), (200,), head_dim=64)
texts = studies.findings(lambda: broken.forward(small), arch="sm_100")
assert all(text.startswith("Race") for text in texts), "the answer"
chapter.glue(finding=texts[0], orders=len(texts))

# %% [markdown]
# :::{solution} ex-tm-wait
# :class: dropdown
#
# P V reads columns that `math` is about to write, and the next S overwrites scores that it may not
# have read. The emulator reports it in all {glue:text}`orders:.0f` orders, even where the numbers
# happen to be right: "{glue:text}`finding`".
# :::
#
# :::{exercise} Where the polynomial pays
# :label: ex-tm-64
#
# At head_dim 64 the MMAs of 128 x 128 pairs take 512 clocks and their `tanh` still 1,024. What
# share of the time can the tensor cores be busy at most, in b3 and in b4? Which share of the scores
# should the polynomial take there? *(paper, ten minutes; then emulator)*
# :::

# %% tags=["remove-cell"]
at_64 = {n: busy(RUNGS[n], 1024, 64) for n in ("b3", "b4")}
assert at_64["b3"] <= 50 and at_64["b3"] + 5 < at_64["b4"] <= 100 * 512 / 768, at_64
half_64 = busy(b3_stream, 1024, 64, b3_stream.Config(share=0.5))
assert half_64 > at_64["b4"] + 5, half_64
chapter.glue(b3_64=at_64["b3"], b4_64=at_64["b4"], half_64=half_64, most_b4=100 * 512 / 768)

# %% [markdown]
# :::{solution} ex-tm-64
# :class: dropdown
#
# b3: 512 of 1,024, or 50 %. b4: 512 of 768, or {glue:text}`most_b4:.0f` %. Emulated, with 1,024
# keys: {glue:text}`b3_64:.0f` and {glue:text}`b4_64:.0f` %. With half of the scores,
# `Config(share=0.5)`, MUFU takes 512 clocks, as the MMAs do: {glue:text}`half_64:.0f` %. More buys
# nothing, and each further pair costs issue slots.
# :::
#
# ## Takeaways
#
# - Two tiles hide the activation. A stream across items hides the ends of tiles.
# - A polynomial that replaces a function needs a proven bound for every argument.
