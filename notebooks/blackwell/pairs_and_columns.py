# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: false
# ---

# %% [markdown]
# # Pairs and columns
#
# A B200 does twice Hopper's FLOPs a clock, but the port of its {term}`shared memory` still moves
# 128 bytes a clock. In {doc}`Blackwell forward b4 <tensor_memory>` it is as busy as the tensor
# cores, and in the backward pass it is the bound. Which bytes can it be spared?
#
# :::{admonition} In this chapter (50 minutes)
# You will be able to let two CTAs, a {term}`CTA pair`, share one {term}`MMA`, to plan {ref}`512
# columns <rule-columns>` of {term}`tensor memory` for five accumulators, and to count bytes until
# the count explains the emulated time. Nothing here is measured.
# :::

# %% tags=["hide-input"]
import re
import textwrap
from functools import partial

import numpy as np
import pandas as pd
import torch

from _lib import block_studies, drawings, studies
from gdpa_kernels.block_attention.kernels import b1_warp_specialized, v1_one_tile
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.gdpa.device import pair_steps
from gdpa_kernels.gdpa.kernels import b1_tensor_memory_backward as b1
from gdpa_kernels.gdpa.kernels import b2_short_kv_backward as b2
from gdpa_kernels.gdpa.kernels import b3_dk_first_backward as b3
from gdpa_kernels.gdpa.kernels import b4_pair_backward as b4
from gdpa_kernels.gdpa.kernels import b5_stream_backward as b5
from gdpa_kernels.gdpa.kernels import b6_dq_once_backward as b6
from gdpa_kernels.gdpa.kernels import b6_pair_stream, b7_split_stream
from gdpa_kernels.gdpa.ladder import b4_mixed, b5_cta_pair
from gdpa_lab.measuring import compile_check, cost_model
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts, clock_free, predictions
from gdpa_lab.report.chapter import Chapter
from notebooks.blackwell import _protocol

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("blackwell/pairs_and_columns", mode=mode, device=device, data_dir=data_dir)
FORWARD = {"b4": b4_mixed, "b5": b5_cta_pair, "b6": b6_pair_stream, "b7": b7_split_stream}
BACKWARD = {"b1": b1, "b2": b2, "b3": b3, "b4": b4, "b5": b5, "b6": b6}
B200 = {"arch": "sm_100", "multiprocessors": 2}
TILE = 128 * 128 * 2 / 1024  # KiB: 128 rows of Q, K or V in bf16
MMA = cost_model.mma(cost_model.B200, 1)  # clocks of one of 128 x 128 x 128


def port(ctas, tiles_of_queries=None):
    """KiB that pass a CTA's port for a tile of pairs, forward. tiles_of_queries: for which K and V
    are loaded, None where they stay."""
    reads = TILE + TILE / ctas + TILE / ctas
    fills = 2 * TILE / ctas / tiles_of_queries if tiles_of_queries else 0
    return reads + fills


forward = {"b4": port(1, 2), "b5": port(2), "b6": port(2, 2), "b7": port(2, 1)}
# Of a step of 128 rows. b2: 64 columns of dQ arrive and are read, and leave in bf16.
alone = {"S, dP, dQ": 6 * TILE, "dV, dK": 3 * TILE, "dS in": TILE, "Q, dO in": 2 * TILE}
pair = {"S, dP, dQ": 5 * TILE, "dV, dK": TILE, "dS in": TILE, "Q, dO in": 2 * TILE}
steps = pd.DataFrame({
    "b1": alone | {"dQ out": 4 * TILE},
    "b2": alone | {"dQ out": 3 * TILE},
    "b3": alone | {"dV, dK": 2 * TILE, "dQ out": 4 * TILE},
    "b4": pair | {"dQ out": 2 * TILE},
    "b6": pair | {"dQ out": TILE},
})  # fmt: skip
clocks = pd.concat({
    "forward": pd.Series(forward).map(cost_model.kibibytes),
    "backward": steps.sum().map(cost_model.kibibytes),
})  # fmt: skip
share = pd.concat({"forward": 100 * clocks["forward"] / (2 * MMA),
                   "backward": 100 * clocks["backward"] / (5 * MMA)})  # fmt: skip
for way in ("forward", "backward"):
    for x in predictions.EXPECTED[way]:
        if (way, x.impl[:2]) in clocks.index:
            assert x.design.pairs["smem"] == clocks[way, x.impl[:2]], "one ledger, two chapters"

# %% tags=["remove-input"]
# | name: fig-pairs-port
# | caption: >
# |   **Pairs take the port below the MMAs in the forward pass, and down to them in the backward
# |   pass.** Clocks for which the port of shared memory is busy, in percent of those of the MMAs,
# |   for a tile of 128 queries and 128 keys at head_dim 128. Dashed: the MMAs.
# | alt: >
# |   Horizontal bars. Forward b4 reaches the dashed line of the MMAs, b7, b6 and b5 end below it.
# |   Backward b1 and b3 pass it by half or more, b4 by a tenth, b6 ends at it.
NAMES = {
    ("forward", "b4"): "one CTA", ("forward", "b7"): "pair, 256 rows",
    ("forward", "b6"): "pair, 512 rows", ("forward", "b5"): "pair, keys stay",
    ("backward", "b1"): "one CTA", ("backward", "b3"): "dS in tensor memory",
    ("backward", "b4"): "pair", ("backward", "b6"): "pair, dQ once",
}  # fmt: skip
titles = {key: f"{key[0]} {key[1]}: {text}" for key, text in NAMES.items()}
bars = share.loc[list(NAMES)].set_axis(titles.values())
assert bars.iloc[1:4].max() < 100 == bars.iloc[7], "the caption"
chapter.figure(
    charts.bars(bars, xlabel="% of the clocks of the MMAs", highlight=[*bars.index[[2, 3, 7]]],
                levels={"MMAs": 100}),
    data=bars.rename_axis("kernel").rename("percent").reset_index(),
    modelled="operands of a tile, 128 bytes a clock",
)  # fmt: skip

# %% [markdown]
# ## One MMA of two CTAs reads half of B from each
#
# K and V are the same for all queries of a head, and the SM beside this one reads them too. tcgen05
# has MMAs of a CTA pair, `cta_group::2`: 256 rows, 128 in each of two CTAs of a {term}`cluster`.
# Each CTA holds its rows of A, the left operand, and of the accumulator, and half of the *columns*
# of B; the hardware brings it the other half.
#
# | operand | of it, a CTA holds |
# |---|---|
# | Q, P, S, O | its 128 rows |
# | Kᵀ in S = Q Kᵀ | 64 of 128 keys |
# | V in P V | 64 of 128 columns |
#
# In *b5* K and V of at most 256 keys stay while Q streams by. In *b6* blocks of 128 keys stream by,
# each for two tiles of queries a CTA: an item of work has 512 rows. In *b7* it has 256, and two
# math roles take blocks in turn.

# %% tags=["remove-cell"]
PICTURES = {"b4": ((256,), (1024,)), "b5": ((1024,), (256,)), "b6": ((512,), (1024,)),
            "b7": ((512,), (1024,))}  # fmt: skip
books = {}
for name, (rows, keys) in PICTURES.items():
    line = studies.timeline(FORWARD[name], studies.batch(rows, keys), **B200)
    queries = rows[0] / 128 / (1 if name == "b4" else 2)  # tiles of one CTA
    tiles = queries * keys[0] / 128  # of pairs
    core = [e for e in line.events if e.kind == "mma" and e.cta == 0]
    busy, span = line.busy[0], core[-1].end - core[0].start
    books[name] = {
        "counted": forward[name],
        "emulated": (busy["shared memory"] / cost_model.kibibytes(1) - 96 * queries) / tiles,
        "clocks": span / tiles, "busy, %": 100 * busy["tensor core"] / span,
    }  # fmt: skip
books = pd.DataFrame(books).T

# %% tags=["remove-input"]
chapter.table(
    books.reset_index(names="forward"),
    caption="**A tile takes fewer clocks in a pair.** KiB through the port of a CTA for a tile of "
    "pairs, counted and emulated; clocks from the first MMA to the end of the last, and how busy "
    "the tensor cores are.",
    name="tab-pairs-books", digits=dict.fromkeys(books, 0),
    emulated="one item, 1,024 keys (b5: 256), modelled schedule, sm_100",
)  # fmt: skip
above, clocks_of = books["emulated"] - books["counted"], books["clocks"]
assert clocks_of.drop("b4").max() < clocks_of["b4"], "the caption"
chapter.predict(
    "The emulator counts as many bytes as the ledger for Blackwell forward b4 and b6 (the largest "
    "difference).",
    above[["b4", "b6"]].abs(), most=0, form=".1f", unit=" KiB", shown=False,
    registered="blackwell/cta_pair#1",
)  # fmt: skip
chapter.predict(
    "A tile of Blackwell forward b4 takes at least 1.05 times the emulated clocks of one of b6.",
    clocks_of["b4"] / clocks_of["b6"], least=1.05, registered="blackwell/cta_pair#2",
)  # fmt: skip


# %% tags=["remove-cell"]
def real(length, rows):
    """Percent of the pairs that are computed with items of `rows` rows."""
    work = workload(f"gdpa-self-half-jagged-{length}")
    q, k = np.array(work.seqlens_q), np.array(work.seqlens_k)
    return 100 * (q * k).sum() / (-(-q // rows) * rows * -(-k // 128) * 128).sum()


chapter.glue(lost=100 * (1 - real(512, 512) / real(512, 256)))

# %% [markdown]
# b5's emulated item includes K and V, loaded once. On half-full batches of 512 tokens,
# {glue:text}`lost:.0f` % fewer of b6's computed pairs are real than of b4's or b7's. That is
# what b7 is for.
#
# ## Five accumulators need 640 columns, and there are 512
#
# In the backward pass a {term}`CTA` owns 128 keys and walks over the rows of Q, 128 a step. A step
# is five MMAs:
#
# | accumulator | A | B | lives |
# |:--|:--|:--|:--|
# | Sᵀ = K Qᵀ | K | Q | one step |
# | dPᵀ = V dOᵀ | V | dO | one step |
# | dV += Pᵀ dO | Pᵀ | dO | all steps |
# | dK += dSᵀ Q | dSᵀ | Q | all steps |
# | dQ = dS K | dS | K | one step |
#
# Each has 128 columns at head_dim 128, and dV and dK stay, so dQ must take the columns of S or dP.
# Operand A may come from tensor memory if its rows are lanes. Lanes are keys, so Pᵀ and dSᵀ may, in
# 64 columns each. In dQ the rows of A are queries, so there dS comes from shared memory.

# %% tags=["remove-input"]
# | name: fig-pairs-columns
# | caption: >
# |   **dQ takes the columns of dP once dK has read dS there.** Blackwell backward b3: what lies in
# |   the 512 columns while the MMA of each row runs, from one S to the next.
# | alt: >
# |   Five rows of 512 columns: MMA of S, dK, dQ, dV and dP. Columns 0 to 127 hold S, then P; 128 to
# |   255 hold dP, dS, dQ and the next dP; the right half holds the sums dV and dK throughout.
STAYS, MATH, WRITTEN = "kept or read by an MMA", "with math or output", "written by the MMA"
dv, dk = (256, 384, "dV", STAYS), (384, 512, "dK", STAYS)
ROWS = {
    "S of step i+1": [(0, 128, "S(i+1)", WRITTEN), (128, 256, "dP(i) → dS(i)", MATH), dv, dk],
    "dK of step i": [(0, 128, "S → P(i+1)", MATH), (128, 256, "dS(i)", STAYS), dv,
                     (384, 512, "dK +=", WRITTEN)],
    "dQ of step i": [(0, 128, "S → P(i+1)", MATH), (128, 256, "dQ(i)", WRITTEN), dv, dk],
    "dV of step i+1": [(0, 128, "P(i+1)", STAYS), (128, 256, "dQ(i) leaves", MATH),
                       (256, 384, "dV +=", WRITTEN), dk],
    "dP of step i+1": [(0, 128, "free", STAYS), (128, 256, "dP(i+1)", WRITTEN), dv, dk],
}  # fmt: skip
chapter.figure(
    drawings.segments(
        ROWS, [STAYS, MATH, WRITTEN], xlabel="column of tensor memory",
        ticks={n: str(n) for n in range(0, 513, 128)},
    ),
    computed="the order of MMAs in the source of b3, head_dim 128",
)  # fmt: skip

# %% [markdown]
# MMAs of one thread run in the order of their issue, so most waits can be left out:
#
# - S overwrites P of the step before. dV, which read it, is earlier in the queue.
# - dQ overwrites dS. dK, which read it, is earlier too.
# - Math overwrites dS in shared memory. It has waited for dP, which is later in the queue than dQ.
#
# One wait remains, `dq.empty`: dP may not be written before the role `output` has dQ in registers.
# dV runs in between.
#
# ## Three remedies take the backward pass down to its MMAs
#
# All reads and writes of a step:

# %% tags=["remove-cell"]
STEPS, ONCE = 4, 2 * TILE + 4 * TILE  # once in a tile: K and V in, dV and dK through
took, lines = {}, {}
for name in steps:
    keys = 256 if BACKWARD[name] in (b2, b4, b6) else 128
    inputs = studies.batch((STEPS * 128,), (keys,))
    run = studies.backward(BACKWARD[name], inputs, trace=True, **B200)
    line = lines[name] = run.reports["backward_kernel"].timeline
    mmas = [e for e in line.events if e.cta == 0 and e.kind == "mma"]
    of_dp = [e.start for e in mmas if e.name.startswith("v[0]")]
    took[name] = (of_dp[-1] - of_dp[1]) / (STEPS - 2)
    once = ONCE + TILE * (name in ("b4", "b6"))  # K in two forms
    moved = STEPS * clocks["backward", name] + cost_model.kibibytes(once)
    assert line.busy[0]["shared memory"] == moved, "the text: to the clock"
took = pd.Series(took)

# %% tags=["remove-input"]
sums = {"together": steps.sum(), "clocks of the port": clocks["backward"],
        "clocks, emulated": took}  # fmt: skip
shown = ["b1", "b3", "b4", "b6"]
chapter.table(
    pd.concat([steps, pd.DataFrame(sums).T])[shown].round(0).rename_axis("backward").reset_index(),
    caption="**The port explains the emulated step until it is no longer the bound.** KiB through "
    "the port of shared memory in a step of 128 rows, and clocks.",
    name="tab-pairs-steps", data=pd.concat([steps, pd.DataFrame(sums).T]).reset_index(),
    modelled="128 keys a CTA, head_dim 128; 128 bytes a clock",
    emulated=f"{STEPS} steps of one item, modelled schedule, sm_100",
)  # fmt: skip
over = took / clocks["backward"]
assert over[["b1", "b3", "b4"]].between(1, 1.1).all() and over["b6"] > 1.1, "the caption"
ends = {}
for name in ("b4", "b5"):
    both = []
    for items in (2, 3):
        inputs = studies.batch((256,) * items, (256,) * items)
        run = studies.backward(BACKWARD[name], inputs, trace=True, **B200)
        both.append(max(e.end for e in run.reports["backward_kernel"].timeline.events))
    ends[name] = both[1] - both[0]
chapter.glue(
    mma=5 * MMA, b1_most=500 * MMA / clocks["backward", "b1"], b4_item=ends["b4"],
    b5_item=ends["b5"], b2_clocks=clocks["backward", "b2"],
)  # fmt: skip

# %% [markdown]
# The five MMAs take {glue:text}`mma:,.0f` clocks, so b1 keeps the tensor cores busy
# {glue:text}`b1_most:.0f` % of the time at most. P comes from tensor memory in all four. What
# spares the port more:
#
# - *dS from tensor memory* ({numref}`fig-pairs-columns`). In b1 dK and dQ read dS from shared
#   memory; in b3 only dQ does, and so dK comes first.
# - *Pairs.* Two CTAs own 256 keys, and every MMA reads half of B from each. But dQ sums over the
#   keys of both, so in b4 halves of dS change hands, and each CTA has 64 of the 128 rows of dQ.
# - *dQ once.* With at most 256 keys a pair has all of them, so in b6 dQ leaves in bf16, with no sum
#   in memory.
#
# Two kernels stand beside these. In *b2* two CTAs without MMAs of a pair exchange halves of dQ in
# fp32: {glue:text}`b2_clocks:,.0f` clocks. *b5* is b4, but issues S of the next item before the
# last dK and dQ of this one: an item of 256 queries takes {glue:text}`b5_item:,.0f` emulated clocks
# instead of {glue:text}`b4_item:,.0f`.

# %% tags=["remove-input"]
studies.stepper(
    {f"Blackwell backward {name}": lines[name] for name in shown},
    "blackwell-pairs_and_columns-steps",
    title="Blackwell backward b1, b3, b4 and b6, step by step",
)

# %% [markdown]
# ## Whoever waits is told: the protocol of two CTAs
#
# One thread, of the even CTA, issues the MMAs of both. A CTA can only wait on its own
# {term}`mbarriers <mbarrier>`, so bytes of loads and arrivals go to this leader, commits to both
# CTAs, and dS to the CTA that has its rows of dQ.

# %% tags=["remove-input"]
# | name: fig-pairs-protocol
# | caption: >
# |   **Half of each CTA's dS crosses, and the leader is told of all that the MMAs need.** A step of
# |   Blackwell backward b4. Math 0 has rows 0 to 63, math 1 rows 64 to 127, of its CTA's keys. The
# |   numbers are those of the code below.
# | alt: >
# |   Two boxes, the leader and its peer. In each, two math roles above two buffers of dS, a role of
# |   the MMAs and output. Two green arrows cross from one CTA into the other, from math to dS. Dark
# |   arrows with numbered dots lead to the leader's MMAs, and from there to both outputs and back.
chapter.figure(_protocol.two_ctas(), computed="the barriers in the source of backward b4")

# %% tags=["remove-input"]
PIECES = {
    "math, in both CTAs": (pair_steps, "    tlx.barrier_arrive(p.full[0]", "\n\n\ndef pair_desc"),
    "mma, in the peer": (b4, "                tlx.barrier_wait(ds.peer.full[0], (count",
                         "        count += steps"),
    "output, in both CTAs": (b4, "            tlx.barrier_wait(dq.full[0]",
                             "            tlx.async_descriptor_store_wait"),
}  # fmt: skip
NOTES = {
    "tlx.barrier_arrive(p.full[0]": "P is in tensor memory.",
    "tlx.barrier_arrive(ds.for_dk.full[0]": "So is dS: the leader may issue dK.",
    "exchange_ds(role, 0":
        "dS goes to the CTA whose rank is the role's number. If that is the other one, bytes count "
        "on `ds.peer.full` over there.",
    "    tlx.barrier_arrive(ds.for_dq.full[0]": "The half that stays here is stored.",
    "tlx.barrier_wait(ds.peer.full[0], (count":
        "The leader cannot wait for what arrives here. This thread does, and tells it.",
    "tlx.barrier_wait(dq.full[0]":
        "The leader waits for 4, 5 and its own 3, and issues dQ. One commit arrives in both CTAs.",
    "tlx.barrier_arrive(dq.empty[0]": "dQ is in registers: the next dP may be written.",
}  # fmt: skip
pieces = [
    f"# {who}\n{textwrap.dedent(studies.piece(*where))}".rstrip() for who, where in PIECES.items()
]
assert len(NOTES) == 7, "the numbers of the picture"
chapter.annotated("\n\n".join(pieces), NOTES)

# %% [markdown]
# The forward kernels have the same rules: `o.empty` is to O what `dq.empty` is to dQ, and a buffer
# goes back {ref}`after its store <rule-stores>`. Forget a message, and the emulator finds it:

# %% tags=["remove-input"]
CHANGES = {
    "forward b5, o.full committed to the leader alone":
        ("b5", "tlx.tcgen05_commit(o.full[out], two_ctas=True)",
         "tlx.tcgen05_commit(o.full[out])"),
    "backward b4, dS of the leader not awaited in the peer":
        (b4, "                tlx.barrier_wait(ds.peer.full[0], (count + step) & 1)\n", ""),
    "backward b4, dq.empty told to the CTA itself":
        (b4, "dq.empty[0], 1, remote_cta_rank=0", "dq.empty[0], 1"),
    "backward b3, dP over a dQ that has not left":
        (b3, "            tlx.barrier_wait(dq.empty[0], (now & 1) ^ 1)\n", ""),
}  # fmt: skip
short = studies.batch((300,), (256,), head_dim=64)
for what, (module, *change) in CHANGES.items():
    wrong = studies.changed(FORWARD.get(module, module), tuple(change))
    call = partial(wrong.forward, short) if module == "b5" else partial(
        wrong.backward, studies.gradient(short), short
    )  # fmt: skip
    (says,) = studies.findings(call, ["modelled"], **B200)
    assert says, "the text says so"
    print(f"{what}: {says.partition(':')[0]}")

# %% [markdown]
# The tests do this to every operation on a barrier. As they stand, all kernels agree with fp64.

# %% tags=["remove-cell"]
lengths = (0, 1, 127, 257, 40, 513)
ragged = studies.batch(lengths, [min(n, 256) for n in lengths[::-1]], head_dim=64)
for name in ("b5", "b6", "b7"):
    studies.comparison(FORWARD[name], ragged, arch="sm_100")
ragged = studies.batch(studies.EDGES, studies.EDGES[::-1], head_dim=64)
for module in BACKWARD.values():
    studies.compare_gradients(studies.backward(module, ragged, arch="sm_100").gradients, ragged)


def built(module):
    """A backward kernel for sm_100a, of 130 tokens and four heads of 128."""
    inputs = studies.batch((130,), heads=4)
    with launches(run=False) as seen:
        module.backward(studies.gradient(inputs), inputs)
    (launch,) = (x for x in seen if x.name == "backward_kernel")
    return compile_check.build_launch(launch, capability=100)


kernels = {
    "forward b5": compile_check.build_rung(b5_cta_pair, capability=100, max_seqlen_k=256),
    "forward b6": compile_check.build_rung(b6_pair_stream, capability=100),
    **{f"backward {name}": built(BACKWARD[name]) for name in ("b1", "b3", "b4", "b6")},
}
PAIRS = ["forward b5", "forward b6", "backward b4", "backward b6"]
assert all(kernel.metadata.tmem_size == 512 for kernel in kernels.values()), "the text"
for name, kernel in kernels.items():
    groups = set(re.findall(r"cta_group::\d", kernel.asm["ptx"]))
    assert groups == {"cta_group::2" if name in PAIRS else "cta_group::1"}, "the text"
facts = studies.facts(kernels, ("UTCHMMA", "UTCBAR", "LDTM", "STTM", "STAS", "UTMALDG"))

# %% tags=["remove-input"]
chapter.table(
    facts.drop(columns=["registers", "serialised"])[~facts["kernel"].str.contains("b6")],
    caption="**The machine code has what the plans say.** Spills; then MMAs, commits, loads and "
    "stores of tensor memory, remote stores and TMA loads.",
    name="tab-pairs-sass", data=facts, compiled="SASS for sm_100a, head_dim 128",
)  # fmt: skip
by = facts.set_index("kernel")
assert by["STTM"]["backward b3"] == 2 * by["STTM"]["backward b1"], "the text"
chapter.glue(sent=by["STAS"]["backward b4"] - by["STAS"]["forward b5"])

# %% [markdown]
# From b1 to b3 `STTM` doubles: dS joins P in tensor memory. In b4 {glue:text}`sent:.0f` of the
# remote stores, `STAS`, are dS. Every kernel takes all 512 columns.
#
# ## Columns leave block attention two programs an SM
#
# On sm_100 `tl.dot` becomes tcgen05, and a program takes a power of two of the 512 columns.
# {doc}`Block v1 <../block/v1_one_tile>` needs {glue:text}`columns:.0f` for S and O, so an SM holds
# {glue:text}`v1_programs:.0f` programs, where one of Hopper holds {glue:text}`v1_hopper:.0f`. With
# {term}`rotary` their instructions fill {glue:text}`v1_share:.0f` % of the issue slots in the time
# that memory takes, {glue:text}`budget:,.0f` clocks for a block of a head (modelled). Two programs
# hardly overlap that well.
#
# *Block b1* gives every step a warp role: load, rotate, MMA, softmax, output, store. TMA computes
# addresses, few tiles change layout, and {glue:text}`b1_share:.0f` % of the slots are enough.

# %% tags=["remove-cell"]
blank = block_studies.blank(128, rotary=torch.float32)
turning = {
    name: block_studies.built(module, "forward", None, blank, capability=100)["forward_kernel"]
    for name, module in (("v1", v1_one_tile), ("b1", b1_warp_specialized))
}
plain = block_studies.built(v1_one_tile, "forward", None, block_studies.blank(128), capability=100)
columns = plain["forward_kernel"].metadata.tmem_size
hopper = block_studies.compiled({"v1": (v1_one_tile, "forward")})["programs on an SM"].iloc[0]
ROLES = {  # what only its loop holds (None: all there are of these), and what it does not hold
    "turn": (r"\bF(?:FMA|MUL)\b", 100, "LDTM|MUFU"), "softmax": (r"\bMUFU\.EX2", 32, "$^"),
    "output": (r"\bLDTM", 2, "MUFU"), "mma": (r"\bUTCHMMA", None, "$^"),
    "load": (r"\bUTMALDG", None, "$^"), "store": (r"\bUTMASTG", None, "$^"),
}  # fmt: skip
code, loops = compile_check.sass(turning["b1"])
issued = 0
for mnemonic, least, absent in ROLES.values():  # four warps, or one
    least_of = least or len(re.findall(mnemonic, "\n".join(code)))
    bodies = ("\n".join(code[i] for i in loop) for loop in loops)
    bodies = (x for x in bodies if len(re.findall(mnemonic, x)) >= least_of)
    body = next(x for x in bodies if not re.search(absent, x))
    issued += (body.count("\n") + 1) / (1 if least else 4)
GHZ, BLOCK = 1.965, 64 * 128 * 2  # the highest clock; bytes of a tensor, a block and a head
rate = cost_model.ASSUMED.gbytes_per_s(3, 1) / cost_model.B200.sms  # bytes a nanosecond
budget = 4 * BLOCK / rate * GHZ
chapter.glue(
    columns=columns, v1_programs=compile_check.TENSOR_COLUMNS // columns, v1_hopper=hopper,
    v1_share=100 * len(compile_check.sass(turning["v1"])[0]) / budget,
    b1_share=100 * issued / budget, budget=budget,
)  # fmt: skip

first = "        stage, phase = ring_slot(item, options.NUM_STAGES)\n        tlx."
inner = studies.piece(b1_warp_specialized, first, "\n\n@triton.jit\ndef softmax_forward")
loop, wait = "* options.NUM_HEADS, num_stages=0):\n" + inner, "        tlx.barrier_wait(p_full"
scores, outputs = inner.split(wait)
previous_turn = """            stage, _ = ring_slot(item - 1, options.NUM_STAGES)
            slot, phase = ring_slot(item - 1, ACCUMULATORS)
"""
ahead = "* options.NUM_HEADS + 1, num_stages=0):\n        if item < count_units(blocks_ptr) * "
ahead += "options.NUM_HEADS:\n" + textwrap.indent(scores, "    ") + "        if item > 0:\n"
ahead += previous_turn + textwrap.indent(wait + outputs, "    ")
looking = studies.changed(b1_warp_specialized, (loop, ahead))
three = block_studies.batch((192,), head_dim=128, rotary=torch.float32, rotate_v=True)


def held(module):
    """Mean cycles from the start of S to the end of the store, of an item."""
    line = block_studies.timeline(module, three, arch="sm_100", multiprocessors=1)
    of_q = [e for e in line.events if e.name.startswith("q[")]
    begun = [e.start for e in of_q if e.kind == "mma"]
    return (sum(e.end for e in of_q if e.kind == "store") - sum(begun)) / len(begun)


in_order, with_next = held(b1_warp_specialized), held(looking)
assert with_next > 1.5 * in_order, "the heading"
chapter.glue(in_order=in_order, looking=with_next)
block_studies.comparison(
    b1_warp_specialized,
    block_studies.batch((0, 1, 63, 64, 65), rotary=torch.float32, rotate_v=True), arch="sm_100",
)  # fmt: skip

# %% [markdown]
# ### Surprise: looking ahead makes items late
#
# Every fast kernel of GDPA issues S of the next tile before it waits for P of this one
# ({doc}`../forward/v5_pingpong`), and so did the first block b1. An item then took
# {glue:text}`looking:,.0f` emulated cycles from its S to the end of its store; in order it takes
# {glue:text}`in_order:,.0f`. Where memory or rotary is the bound, an output that waits for the next
# item holds a slot that a load could use.
#
# ## What each kernel predicts for a B200
#
# Registered before any measurement ({doc}`model`): ratios of forward kernels at one clock, rates of
# backward ones, times of block b1.

# %% tags=["remove-cell"]
second = clock_free.judged(data_dir)
ratios = second[~second["other"].isin(["", "b3_stream"])]
ratios = ratios.drop_duplicates(["impl", "other", "expected"])
first_set = predictions.registered()
rates = first_set[(first_set["direction"] == "backward") & (first_set["unit"] == "TFLOP/s")]
rates = rates.set_index(["workload", rates["impl"].str[:2]])["predicted"]
of_block = first_set[first_set["workload"] == "block-fill70-2000"].set_index("direction")
published = pd.read_csv(chapter.data_dir / "published" / "block_attention_times.csv")
published = published.query("kernel == 'tlx_block_attention' and table == 'table5'")
published = published.set_index("direction")["time_ms"]
chapter.glue(
    **{f"rate_{n}": rates["gdpa-self-full-2048", n] for n in ("b1", "b3", "b4", "b5")},
    **{f"short_{n}": rates["gdpa-cross-full-2048", n] for n in ("b2", "b6")},
    **{f"{way}_{x}": of_block.loc[way, x]
       for way in ("forward", "backward") for x in ("predicted", "from", "to")},
    forward_published=published["forward"], backward_published=published["backward"],
    num_pairs=cost_model.B200.sms // 2,
)  # fmt: skip
low, high = of_block.loc["forward", ["from", "to"]]
assert low < published["forward"] < high < published["backward"], "the text"
assert of_block.loc["backward", "to"] < published["backward"], "the text"

# %% tags=["remove-input"]
ratios["workload"] = ratios["workload"].str.removeprefix("gdpa-")
for column in ("impl", "other"):
    ratios[column] = ratios["direction"] + " " + ratios[column].str[:2]
chapter.table(
    ratios[["workload", "impl", "other", "expected", "low", "high"]].rename(
        columns={"impl": "kernel", "other": "over"}
    ),
    caption="**Pairs should gain most where keys are few.** Registered ratios of rates on a B200 "
    "and the intervals that they must lie in.",
    name="tab-pairs-ratios", digits={"expected": 2, "low": 2, "high": 2}, data=second,
    modelled="registered 2026-11-23, b7 2026-11-27; all rows in the data",
)  # fmt: skip
assert ratios.set_index("impl")["expected"].groupby(level=0).max().idxmax() == "forward b5"

# %% [markdown]
# - *Backward.* With 2,048 full tokens b1, b3, b4 and b5 should reach {glue:text}`rate_b1:.0f`,
#   {glue:text}`rate_b3:.0f`, {glue:text}`rate_b4:.0f` and {glue:text}`rate_b5:.0f` TFLOP/s; with
#   2,048 queries on 256 keys, b2 and b6 {glue:text}`short_b2:.0f` and {glue:text}`short_b6:.0f`.
# - *Block b1.* {glue:text}`forward_predicted:.2f` ms forward ({glue:text}`forward_from:.2f` to
#   {glue:text}`forward_to:.2f`) and {glue:text}`backward_predicted:.2f` backward
#   ({glue:text}`backward_from:.2f` to {glue:text}`backward_to:.2f`), where published kernels
#   {cite}`siso2026block` take {glue:text}`forward_published:.2f` and
#   {glue:text}`backward_published:.2f`.
#
# Only a B200 can tell whether the other half of an operand costs neither port anything, whether
# MMAs with 64 rows a CTA run at the full rate, whether a remote arrival or store orders what the
# MMA then reads, and whether all {glue:text}`num_pairs:.0f` pairs fit at once. A compiler whose
# arrivals had the scope of a cluster made a pair's matmul fail, and only in launches back to back
# ([#3492](https://github.com/facebookexperimental/triton/pull/3492)).

# %% tags=["remove-input"]
chapter.predictions()

# %% [markdown]
# ## Exercises
#
# :::{exercise} Four CTAs
# :label: ex-pairs-four
#
# Suppose MMAs of four CTAs, each with a quarter of K and of V. How many KiB pass a port for a tile
# of pairs, with K and V streaming and two tiles of queries a CTA? What limits the gain? *(paper,
# five minutes)*
# :::

# %% tags=["remove-cell"]
chapter.glue(four=port(4, 2), again=100 * (port(2, 2) - port(4, 2)) / (port(1, 2) - port(2, 2)))

# %% [markdown]
# :::{solution} ex-pairs-four
# :class: dropdown
#
# {glue:text}`four:.0f` KiB; the second step brings {glue:text}`again:.0f` % of the first one's
# gain. Q stays: 32 KiB that no partner can give. And the port is below the MMAs already at two.
# :::
#
# :::{exercise} head_dim 64
# :label: ex-pairs-64
#
# How many columns do the five accumulators need at head_dim 64? Must dQ share any? Which wait
# changes? *(paper, five minutes)*
# :::
#
# :::{solution} ex-pairs-64
# :class: dropdown
#
# S and dP have 128 each, dV, dK and dQ 64: 448. dQ could have columns of its own, and dP of the
# next step would not have to wait. `dq.empty` would guard the next dQ, a step later.
# :::
#
# ## Takeaways
#
# - Count the bytes of each operand. What two SMs read twice can be read once.
# - Plan tensor memory as a table of columns over time; what is never alive at once may share.
# - In a pair every message goes to the one who waits for it.
