# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # v7 backward: wide heads
#
# With head_dim 256, dK and dV of 64 keys take 256 registers per thread, one more than a thread may
# have. How do you divide five matmuls when two accumulators do not fit?
#
# :::{admonition} In this chapter (20 minutes)
# You will divide a backward pass by product instead of by keys, compare divisions by the bytes that
# shared memory moves, and knock out parts of a kernel to find what it waits for. With head_dim 256
# v7 runs {glue:text}`over_v1:.1f` times as fast as v1 on the H200, and {glue:text}`over_peer:.2f`
# times as fast as the best peer. Its prediction was higher.
# :::

# %%
from dataclasses import replace
from functools import partial

from gdpa_kernels.gdpa.kernels import v7_wide_backward as v7
from gdpa_kernels.gdpa.kernels.v7_wide_backward import Config
from gdpa_lab.measuring import timing
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import studies
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
V1, V7, V3, V8 = "v1_tiled_backward", "v7_wide_backward", "v3_persistent", "v8_own_waits"
PEERS = "fa2_varlen", "cudnn"
chapter = Chapter(f"backward/{V7}", mode=mode, device=device, data_dir=data_dir)

# %% [markdown]
# ## What stays, what changes
#
# | | {doc}`v4 <v4_warp_specialized_backward>` | v7 |
# |:--|:--|:--|
# | head_dim; keys of a tile | up to 128; 128 | 136 to 256; 64 |
# | one consumer | S, dP, dK, dV of 64 keys, half of dQ | `scores`: S, dP, activation, dV |
# | the other | the same, 64 other keys | `sums`: dK, dQ in halves |
# | crosses between them | dS, both ways | dS, one way |

# %% tags=["remove-input"]
chapter.roles(V7)

# %% [markdown]
# ## Three divisions
#
# A step of 64 keys and 64 rows has as many FLOPs as one of v4, 2,560 cycles of the tensor cores,
# but dQ is twice as wide. KiB through {term}`shared memory` per step, and cycles at 128 bytes each:
#
# | | S, dP | dV, dK | dQ | exchange | sum | cycles |
# |:--|--:|--:|--:|--:|--:|--:|
# | columns of dV and dK; each S and dP of 32 rows | 192 | 88 | 48 | 16 | 536 | 4,288 |
# | columns of dV and dK; S and dP of steps in turn | 128 | 80 | 48 | 16 | 464 | 3,712 |
# | by product: v7 | 128 | 72 | 48 | 8 | 448 | 3,584 |
#
# All sums contain 64 for {term}`TMA` loads and 128 for dQ: fp32, written by threads, read by TMA.
# By product P stays in registers. The second line does not fit: it needs P and dS of two steps. v7
# holds K and V (64 KiB), two slots of Q and one of dO (96), two of dS (16) and half of dQ (32), 208
# of 227. Shared memory is the bound, it seems. The emulator, which models units and queues, agrees:

# %% tags=["remove-input"]
# | name: fig-bw7-timeline
# | caption: >
# |   A tile of 64 keys and four steps of v7. Emulated: modelled cycles.
# | alt: >
# |   A timeline. From the second step on the tensor core has no gap; score_role mostly waits.
given = studies.batch((256,), (64,), head_dim=256)
traced = studies.backward(v7, given, trace=True).reports["backward_kernel"].timeline
ends = [e.end for e in traced.events if e.kind == "mma" and e.name.startswith("registers")]  # dV
chapter.glue(emulated=(ends[-1] - ends[0]) / (len(ends) - 1))
chapter.figure(traced, emulated="v7_wide_backward, one program, modelled schedule")

# %% [markdown]
# Shared memory slows MMAs: a step takes {glue:text}`emulated:,.0f` cycles.
#
# ## The lines that matter
#
# **`scores`.** `differentiate` evaluates the activation, issues dP and dV, and returns dS. S of the
# next step is issued after dV, which is still in flight:

# %% tags=["remove-input"]
chapter.code(v7.score_role, "d, dv = diff", "count += last")

# %% [markdown]
# **`sums`.** Half of dQ leaves through staging while dK's {term}`MMAs <MMA>` run:

# %% tags=["remove-input"]
chapter.code(v7.sum_role, "dq = dq_product", "count += steps")

# %% [markdown]
# ## Is it right?
#
# A ragged batch with 200 of the 256 columns in use, in the emulator, against fp64. Then `sums`
# writes a half of dQ to staging before TMA has read the other:

# %%
ragged = studies.batch((0, 1, 63, 130), (3, 70, 65, 129), heads=2, head_dim=200)
errors = studies.compare_gradients(studies.backward(v7, ragged).gradients, ragged)
print(f"largest error: {errors['% of allowed'].max():.0f} % of what is allowed")
READ = "    tlx.async_descriptor_store_wait(0)\n    tlx.local_store(buffer, x)\n"
wrong = studies.changed(v7, (READ, READ.partition("\n")[2]))
small = studies.batch((200,), (64,), head_dim=256)
print(studies.findings(lambda: wrong.backward(studies.gradient(small), small), [0])[0])

# %% [markdown]
# ## Measurement
#
# 256 full sequences of 512 tokens, 4 heads; and 64 of 2,048, as many rows in four times the steps;
# {term}`back to back <sustained scope>`. *Knock-outs*, wrong on purpose, in {term}`bursts <burst>`:
# *identity* evaluates no activation, *not sent* leaves dQ in staging.

# %%
WIDE = workload("gdpa-self-full-512-b256-d256")
LONG = replace(WIDE, name="gdpa-self-full-2048-b64-d256", batch=64, max_seqlen_q=2048,
               max_seqlen_k=2048)  # fmt: skip
SEND = '    tlx.async_descriptor_store(desc, buffer, at, store_reduce="add")\n'
UNSENT = studies.changed(v7, (SEND, ""))


def knocked_out(inputs) -> dict:
    batch, plain = inputs.batch(), replace(inputs.batch(), activation=("identity",))
    run = {"v7": (v7, batch), "identity": (v7, plain),
           "not sent": (UNSENT, batch), "both": (UNSENT, plain)}  # fmt: skip
    listed = {"schedule": v7.make_schedule(batch, Config())}
    return {x: partial(m.backward, inputs.grad_out, b, **listed) for x, (m, b) in run.items()}


@chapter.measure
def _(session):
    how = {"scopes": ("sustained",), "seconds": 0.75}
    listed = [V1, V7, (V7, "not folded", {"config": Config(fold=False)}), *PEERS]
    session.measure(WIDE, listed, direction="backward", **how)
    session.measure(LONG, [V7, "cudnn"], direction="backward", **how)
    session.measure(WIDE, [V3, V8, *PEERS], **how)

    def time_parts(inputs):
        timed = timing.sample_kernels(knocked_out(inputs), session.device, session.protocol)
        session.tabulate("parts", ("part",), {(part,): times for part, times in timed.items()})

    session.launch("parts", WIDE, [V7], time_parts, direction="backward")


# %% tags=["remove-cell"]
rows = chapter.rows(scope="sustained", direction=None, variant=None)
found = rows.set_index(["direction", "workload", "impl", "variant"]).sort_index()
rate, forward = found["tflops"]["backward"], found["tflops"]["forward", WIDE.name]
us = found["time_us_p50"]["backward"]
steps = {x.name: x.batch * x.num_heads_k * (x.max_seqlen_k // 64) ** 2 for x in (WIDE, LONG)}
wide, long = (us[x, V7, ""] * found.loc[("backward", x, V7, ""), "sm_clock_mhz"] for x in steps)
more = steps[LONG.name] - steps[WIDE.name]
step = 132 * (long - wide) / more  # on 132 SMs
added = more * 64 * 256 * 4 / (us[LONG.name, V7, ""] - us[WIDE.name, V7, ""]) / 1e6
parts = chapter.recorded("parts").groupby("part", sort=False)["time_us"].median()
share = 100 * parts / parts["v7"]
assert share["identity"] > 97 and share["not sent"] < 85, "the text says what saves nothing"
chapter.glue(
    over_v1=rate[WIDE.name, V7, ""] / rate[WIDE.name, V1, ""], step=step,
    over_peer=rate[WIDE.name, V7, ""] / max(rate[WIDE.name, peer, ""] for peer in PEERS),
    unfolded=100 * (us[WIDE.name, V7, "not folded"] / us[WIDE.name, V7, ""] - 1),
    sent=100 - share["not sent"], together=100 - share["both"], added=added,
)  # fmt: skip

# %% tags=["remove-input"]
shown = rows[["direction", "workload", "impl", "variant", "tflops", "sm_clock_mhz"]].replace(
    {"workload": {WIDE.name: "512", LONG.name: "2,048"}}
)
chapter.table(shown.rename(columns={"workload": "tokens"}), measured=rows)

# %% [markdown]
# FA2 and cuDNN compute softmax attention. v8 takes wide heads with one slot of Q. Four predictions
# come from the counts, before any run; two followed a first run of v7, before any knock-out:

# %% tags=["remove-input"]
RATE = {"form": ".0f", "unit": " TFLOP/s"}
chapter.predict("A step takes 3,900 to 4,400 cycles.", step, least=3900, most=4400, form=",.0f")
chapter.predict("v7 with 512 tokens.", rate[WIDE.name, V7, ""], least=370, most=430, **RATE)
chapter.predict("v7 with 2,048 tokens.", rate[LONG.name, V7, ""], least=420, most=480, **RATE)
chapter.predict("v8, forward.", forward[V8, ""], least=520, most=600, **RATE)
text = "With identity v7 takes 80 to 95 % of its time: `scores` is a chain of instructions."
chapter.predict(text, share["identity"], least=80, most=95, form=".0f", unit=" %")
text = "Without sending dQ v7 takes 75 to 92 % of its time: each half waits for the one before."
chapter.predict(text, share["not sent"], least=75, most=92, form=".0f", unit=" %")

# %% [markdown]
# ## The surprise: the way out
#
# A step takes {glue:text}`step:,.0f` cycles, by the difference between the two lengths: more than
# shared memory needs. We suspected `scores`. {doc}`v4 <v4_warp_specialized_backward>` has two
# chains, and one evaluates while the other's MMAs run; in v7 every activation is on one chain.
# Knocked out:

# %% tags=["remove-input"]
chapter.table(share.rename("% of v7's time").reset_index(), measured=[chapter.record().id])

# %% [markdown]
# *Identity* saves nothing, as in the emulator: the chain has slack. *Not folded*, more
# instructions in `scores`, costs {glue:text}`unfolded:.1f` %; not sending dQ saves
# {glue:text}`sent:.0f` %, both {glue:text}`together:.0f` %. A step adds 64 KiB to the sums in
# memory, {glue:text}`added:.1f` TB/s from all SMs: the count sees dQ leave shared memory, not
# arrive in L2.
#
# ## Exercises
#
# :::{exercise} head_dim 192
# :label: ex-bw7-192
#
# What share of v7's MMAs is useful with head_dim 192? What would 192 columns save? *(paper)*
# :::
#
# :::{solution} ex-bw7-192
# :class: dropdown
#
# Three quarters. dK and dV would take 96 registers instead of 128, and all tiles but dS 144 KiB
# instead of 192: room for a second slot of K and one of dO.
# :::
#
# :::{exercise} A cluster of two
# :label: ex-bw7-cluster
#
# Two CTAs of 64 keys exchange dS, and each adds half of the columns of dQ, as in
# {doc}`v5_short_kv_backward`. What do 448 KiB become, and what has to fit? *(paper, ten minutes)*
# :::
#
# :::{solution} ex-bw7-cluster
# :class: dropdown
#
# dQ takes 64 KiB of 128; dS is read once more and comes in, 16: 400, 3,200 cycles. Two slots of the
# other's dS and half of its K, 32 KiB, fit only if dQ leaves in pieces of 64 columns.
# :::
#
# :::{exercise} One slot of Q
# :label: ex-bw7-slots
#
# `Config(q_stages=1, g_stages=2)` needs as much shared memory. Predict a step, then ask the
# emulator. *(`studies.backward(v7, given, config, trace=True)`, fifteen minutes)*
# :::
#
# :::{solution} ex-bw7-slots
# :class: dropdown
#
# S needs the next Q, which is loaded when dK has read this one: the roles take turns, with a load
# between them. About 4,900 cycles instead of 3,600; nobody waits for a second dO.
# :::
#
# ## Takeaways
#
# - If accumulators do not fit, divide by product: what crosses is one operand.
# - A count of units is a lower bound: look for the unit that it leaves out.
# - Knock out one part at a time. What saves nothing has slack, however long its chain looks.
