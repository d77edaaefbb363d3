# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # v6 backward: one tile has all keys
#
# With 128 keys or fewer, dQ is a single product. v4 still fills a buffer with zeros, adds once and
# rounds; the second CTA of v5's cluster multiplies zeros. What is left if neither happens?
#
# :::{admonition} In this chapter (15 minutes)
# You will remove a sum with one summand from a kernel, count the bytes and MMAs that saves, and
# find out what else the zero fill did. With 128 keys v6 runs {glue:text}`over_v4` times as fast as
# v4 on the H200, {glue:text}`over_v5` times as fast as v5, and {glue:text}`over_peer` times as fast
# as the best peer.
# :::

# %%
from dataclasses import replace
from functools import partial

import pandas as pd
import torch
import triton

from _lib import studies
from _lib.ratios import short, spread
from gdpa_kernels.calling.launch import launch
from gdpa_kernels.gdpa.gradients import round_kernel
from gdpa_kernels.gdpa.kernels import v4_warp_specialized_backward as v4
from gdpa_kernels.gdpa.kernels import v6_one_tile_backward as v6
from gdpa_lab.measuring import timing
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts, results
from gdpa_lab.report.chapter import Chapter
from gdpa_lab.report.house import RUNG_COLOURS

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
V4, V5, V6 = "v4_warp_specialized_backward", "v5_short_kv_backward", "v6_one_tile_backward"
PEERS = "fa2_varlen", "cudnn"
chapter = Chapter(f"backward/{V6}", mode=mode, device=device, data_dir=data_dir)

# %% [markdown]
# ## What stays, what changes
#
# | | {doc}`v4 <v4_warp_specialized_backward>` | {doc}`v5 <v5_short_kv_backward>` | v6 |
# |:--|:--|:--|:--|
# | keys | any number | up to 256 | up to 128 |
# | who has all keys of a sequence | nobody | a cluster of two CTAs | a CTA |
# | dQ leaves as | fp32, TMA reduce-add, then rounded | bf16, TMA store | bf16, TMA store |
# | launches | zero fill, main kernel, rounding | one | one |
# | tiles of a sequence without keys | none | one | one |
# | head_dim | 64, 128 | 128 | 64, 128 |
#
# Everything else is v4's: roles, barriers, the exchange of dS between the consumers, and the six
# ideas.
# ## What one summand costs
#
# At head_dim 128, per row: v4 reads Q and dO (512 bytes), fills dQ with zeros (512), adds (512),
# reads the sum (512) and writes it rounded (256). v6 reads Q and dO and writes dQ: 768 of 2,304
# bytes. Against the row's five matmuls, at the rates of a copy and of large matmuls:

# %%
limits = results.ceilings(chapter.record("backward/results"), "sustained")
moved = {"v4": 512 + 512 + 512 + 512 + 256, "v6": 512 + 256}
ns = {rung: count / limits.gbytes_per_s(2, 1) for rung, count in moved.items()}
for keys in (64, 128):
    matmuls = 5 * 2 * keys * 128 / limits.tflops / 1e3
    found = ", ".join(f"{rung} {time:.2f}" for rung, time in ns.items())
    print(f"{keys} keys, modelled ns a row: bytes of {found}; five matmuls {matmuls:.2f}")

# %% [markdown]
# v4 is bound by its bytes. v5 moves as many bytes as v6 but has twice the {term}`MMAs <MMA>`: its
# second CTA has no keys, but half of the columns of dQ.
#
# ## The lines that matter
#
# **dQ leaves.** A consumer has its half of dQ of a step in registers, from all keys. It multiplies
# by the factors that v4 leaves to the rounding kernel, rounds, and puts the half aside in shared
# memory. The store starts in the next step, after the fence that dS needs anyway:

# %% tags=["remove-input"]
chapter.code(v6.math, "if step > 1", "dk = tlx")
chapter.code(v6.math, "s = scores(k.buffer[k_at + role + zero]", "count += all_steps")

# %% [markdown]
# What is put aside has half as many bytes as in v4; it lies in dK's buffer.
#
# **Every row gets a tile.** In v4 a row that no tile adds to keeps the zeros of the fill. Here a
# tile has to write them. So a sequence without keys gets a tile too, `least=1`, and a tile walks
# all rows, even those whose keys are all masked: TMA fills keys beyond the end with zeros, and
# their product is the right dQ.

# %% tags=["remove-input"]
chapter.code(v6.make_schedule)
chapter.code(v6.steps_of)

# %% [markdown]
# ## Is it right?
#
# A ragged batch, in which one sequence has no keys and one no rows, in the emulator against fp64:

# %%
ragged = studies.batch((130, 70, 0, 1), (128, 0, 5, 63), heads=2)
gradients = studies.backward(v6, ragged).gradients
errors = studies.compare_gradients(gradients, ragged)
print(f"largest error: {errors['% of allowed'].max():.0f} % of what is allowed")
print(f"largest dQ of the sequence without keys: {float(gradients[0][130:200].abs().max())}")

# %% [markdown]
# Then a consumer does not wait for the other's dS; a consumer overwrites dS that the other may
# still read; a half of dQ is overwritten before {term}`TMA` has read it:

# %%
FULL = "    tlx.barrier_wait(ds.full[at], (count // 2) & 1)\n"
EMPTY = "    tlx.barrier_wait(ds.empty[at], ((count // 2) & 1) ^ 1)\n"
READ = "    tlx.async_descriptor_store_wait(0)\n    tlx.local_store(buffer, x)\n"
small = studies.batch((200,), (128,))
for change in ((FULL, ""), (EMPTY, ""), (READ, READ.partition("\n")[2])):
    wrong = studies.changed(v6, change)
    print(studies.findings(lambda to=wrong: to.backward(studies.gradient(small), small), [0])[0])

# %% [markdown]
# Last, the list has no tile for a sequence without keys:

# %%
wrong = studies.changed(v6, (", least=1", ""))
says = studies.findings(lambda: wrong.backward(studies.gradient(ragged), ragged), [0])[0]
torch.use_deterministic_algorithms(True)  # and torch.empty gives NaN
dq = studies.backward(wrong, ragged).gradients[0]
torch.use_deterministic_algorithms(False)
unwritten = int(dq.isnan().any(dim=(1, 2)).sum())
print(f"{says or 'nothing found'}; {unwritten} rows of dQ are not written")

# %% [markdown]
# No race and no deadlock: the emulator judges what programs do, and here none does anything. Only a
# comparison sees it, if the memory held something else before. So `measure` overwrites earlier
# results with NaN.
#
# ## Measurement
#
# Four workloads of at most 128 keys, {term}`back to back <sustained scope>`. Then, in
# {term}`bursts <burst>`, what v4 spends beside its main kernel, and v4 without its additions.

# %%
CROSS = replace(workload("gdpa-cross-full-2048"), name="gdpa-cross-full-2048-kv128",
                max_seqlen_k=128)  # fmt: skip
NARROW = workload("gdpa-cross-full-1024-kv128-d64")
SELF, JAGGED = (
    replace(workload(f"{name}-256"), name=f"{name}-128-b2304", batch=2304, max_seqlen_q=128,
            max_seqlen_k=128)
    for name in ("gdpa-self-full", "gdpa-self-half-jagged")
)  # fmt: skip
PLAN = {CROSS: [V4, V5, V6, *PEERS], NARROW: [V4, V6, *PEERS], SELF: [V4, V5, V6, "cudnn"],
        JAGGED: [V4, V5, V6, "fa2_varlen"]}  # fmt: skip
ADD = '    tlx.async_descriptor_store(desc, buffer, place, store_reduce="add")\n'
NOT_ADDED = studies.changed(v4, (ADD, ""))


def pieces(inputs) -> dict:
    batch = inputs.batch()
    sums = torch.zeros(batch.q.shape, dtype=torch.float32, device=batch.device)
    rounding = (sums, torch.empty_like(batch.q), 1.0, sums.numel())
    grid = (triton.cdiv(sums.numel(), 4096),)
    run = {
        name: partial(module.backward, inputs.grad_out, batch,
                      schedule=module.make_schedule(batch, module.default_config(batch)))
        for name, module in {"v4": v4, "v4, nothing added": NOT_ADDED, "v6": v6}.items()
    }  # fmt: skip
    run["zero fill"] = sums.zero_
    run["rounding"] = partial(launch, round_kernel, grid, batch.device, *rounding, BLOCK=4096)
    return run


@chapter.measure
def _(session):
    for work, impls in PLAN.items():
        session.measure(work, impls, direction="backward", scopes=("sustained",), seconds=0.75)

    def time_pieces(inputs):
        timed = timing.sample_kernels(pieces(inputs), session.device, session.protocol)
        session.tabulate("pieces", ("piece",), {(name,): us for name, us in timed.items()})

    session.launch("pieces", CROSS, [V4, V6], time_pieces, direction="backward")


# %% tags=["remove-cell"]
rows = chapter.rows(scope="sustained", direction="backward")
us = rows.pivot(index="workload", columns="impl", values="time_us_p50").loc[[x.name for x in PLAN]]
over = us.div(us[V6], axis=0)
rate = rows.pivot(index="workload", columns="impl", values="tflops")
row_ns = 1e3 * us.loc[CROSS.name] / (CROSS.total_q * CROSS.num_heads_q)
saved = row_ns[V4] - row_ns[V6]
parts = chapter.recorded("pieces").groupby("piece")["time_us"].median()
around = parts["zero fill"] + parts["rounding"]
peers = over[list(PEERS)].min(axis=1).dropna()
chapter.glue(
    over_v4=spread(over[V4]), over_v5=spread(over[V5].dropna()), over_peer=spread(peers),
    saved=saved, bytes=ns["v4"] - ns["v6"], twice=512 * 4 / limits.gbytes_per_s(2, 1),
    around=100 * around / parts["v4"], main=(parts["v4"] - around) / parts["v6"], v6=parts["v6"],
    added=parts["v4"] - parts["v4, nothing added"], left=parts["v4, nothing added"] - around,
)  # fmt: skip

# %% tags=["remove-input"]
# | name: fig-bw6-over
# | caption: >
# |   Backward pass with at most 128 keys, back to back: time over that of v6. FA2 and cuDNN compute
# |   softmax attention.
# | alt: >
# |   A dot plot, a row for each workload, a mark for each kernel, and a line at 1 for v6.
named = {V4: "v4", V5: "v5", "fa2_varlen": "FA2", "cudnn": "cuDNN"}
shown = over[list(named)].rename(columns=named, index=short)
colours = [RUNG_COLOURS[number] for number in (4, 5, 3, 1)]
chart = charts.dots(shown, xlabel="time over that of v6", colours=colours)
chapter.figure(chart, measured=rows)

# %% tags=["remove-input"]
columns = rate.loc[us.index, [V6, *named]].rename(columns=named | {V6: "v6"}, index=short)
shown = columns.round(0).rename_axis("TFLOP/s").reset_index()
chapter.table(shown, data=rows, measured=rows)

# %% [markdown]
# The first prediction is what head_dim 64 had to reach, set before v6 ran. The second follows from
# v5's record, in which a row saves 0.8 to 1.0 times the time of the bytes it no longer moves. The
# third comes from counting MMAs, after a trial run and before this record:


# %% tags=["remove-cell"]
def mmas(work) -> tuple[int, int]:
    """Products of 64 rows and 128 keys that v5 and v6 issue: v5 in pairs of steps, and two CTAs;
    v6 with one S too many for each tile."""
    steps = [max(-(-rows // 64), 1) for rows in work.seqlens_q]
    return sum(10 * (n + n % 2) for n in steps), sum(5 * n + 1 for n in steps)


counted = {x.name: mmas(x)[0] / mmas(x)[1] for x in PLAN if V5 in PLAN[x]}
compared = pd.DataFrame({"MMAs of v5 / v6": counted, "time of v5 / v6": over[V5]}).dropna()

# %% tags=["remove-input"]
text = "v6 with head_dim 64, 1,024 queries on 128 keys."
chapter.predict(text, rate[V6][NARROW.name], least=250, form=".0f", unit=" TFLOP/s")
text = "The time that a row of `2048-kv128` saves over v4, as a multiple of what the bytes take."
chapter.predict(text, saved / (ns["v4"] - ns["v6"]), least=0.8, most=1.0)
text = "v5 over v6: the factor of time is at most that of MMAs. Their largest quotient."
chapter.predict(text, compared.iloc[:, 1].div(compared.iloc[:, 0]), most=1.05)

# %% tags=["remove-input"]
chapter.table(compared.rename(index=short).rename_axis("workload").reset_index().round(2),
              measured=rows[rows["impl"].isin([V5, V6])])  # fmt: skip

# %% [markdown]
# In a sequence of 128 rows v5 and v6 walk two steps of 64; in one of 30 rows v5 walks two, v6 one.
# Where the two columns agree, a step costs both the same.
#
# ## The surprise: an addition moves more than it says
#
# A row of `2048-kv128` costs v6 {glue:text}`saved:.2f` ns less than v4. The 1,536 bytes it does not
# move take {glue:text}`bytes:.2f` ns at the rate of a copy. Where v4's time goes:

# %% tags=["remove-input"]
order = ["v4", "v4, nothing added", "zero fill", "rounding", "v6"]
chapter.table(parts[order].rename("us").reset_index(), measured=[chapter.record().id])

# %% [markdown]
# Zero fill and rounding are {glue:text}`around:.0f` % of v4. Its main kernel takes
# {glue:text}`main:.2f` times the time of v6, which does the same matmuls and stores half the bytes.
# The additions take {glue:text}`added:,.0f` µs; without them {glue:text}`left:,.0f` µs remain,
# where v6 takes {glue:text}`v6:,.0f`. An addition moves 512 bytes while the sum is in L2. Here the
# fill has written 4.8 GB before the first one: if L2 has to fetch the zeros and write the sum back
# later, an addition moves 1,024. Then a row saves 2,048 bytes, or {glue:text}`twice:.2f` ns.
#
# ## Exercises
#
# :::{exercise} Rows that see nothing
# :label: ex-bw6-window
#
# 1,024 queries on 128 keys with a window of 64: row i sees keys i - 64 to i + 64. How many steps of
# 64 rows does v4 walk, how many v6? Which bytes does v4 move for a row that sees nothing? *(paper)*
# :::
#
# :::{solution} ex-bw6-window
# :class: dropdown
#
# Rows from 192 on see nothing: v4 walks 3 steps, v6 all 16. For such a row v4 fills 512 bytes,
# reads 512 and writes 256, two thirds more than v6's 768. v6 also multiplies zeros; a loop that
# only stores them would be faster, and one more path to test.
# :::
#
# :::{exercise} 256 keys in one CTA
# :label: ex-bw6-four
#
# Four consumers of 64 keys each could hold 256 keys without a cluster. Count registers and
# {term}`shared memory`. *(paper, ten minutes)*
# :::
#
# :::{solution} ex-bw6-four
# :class: dropdown
#
# An SM has 65,536 registers, 128 for each thread of four consumers. dK and dV of 64 keys alone take
# 128. K and V take 128 KiB, two slots of dS 64, one of Q and of dO 32. These 224 KiB fit, but there
# is no room for dQ, and each step waits for its loads. So v5 is a cluster.
# :::
#
# :::{exercise} A shared Q
# :label: ex-bw6-shared
#
# `requires` refuses a q that all sequences share. Why, and what would v6 have to keep? *(paper)*
# :::
#
# :::{solution} ex-bw6-shared
# :class: dropdown
#
# dQ of a shared row is a sum over sequences, so no tile has all of it. A program could keep the sum
# of its own tiles in fp32, if the rows were few, and the programs would add theirs at the end.
# :::
#
# ## Takeaways
#
# - A sum with one summand needs no zeros, no addition and no rounding kernel.
# - A zero fill also promises that every row is written. Whoever removes it takes over the promise.
# - An atomic addition to memory that L2 no longer holds is a read and a write.
