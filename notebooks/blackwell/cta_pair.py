# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: false
# ---

# %% [markdown]
# # Blackwell forward b5 and b6: a pair of CTAs halves the traffic that limits b4
#
# In {doc}`Blackwell forward b4 <tensor_memory>` the port of {term}`shared memory` is as busy as the
# tensor cores. Which bytes can it be spared?
#
# :::{admonition} In this chapter (50 minutes)
# You will be able to let two CTAs, a {term}`CTA pair`, share one {term}`MMA`, each with half of K
# and of V, which cuts a tile's port traffic from {glue:text}`b4:.0f` KiB to {glue:text}`b5:.0f` or
# {glue:text}`b6:.0f`. Nothing here is measured.
# :::

# %% tags=["hide-input"]
import numpy as np
import pandas as pd

from _lib import studies
from gdpa_kernels.gdpa.kernels import b6_pair_stream
from gdpa_kernels.gdpa.ladder import b4_mixed, b5_cta_pair
from gdpa_lab.measuring import compile_check, cost_model
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts, predictions
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("blackwell/cta_pair", mode=mode, device=device, data_dir=data_dir)
RUNGS = {"b4": b4_mixed, "b5": b5_cta_pair, "b6": b6_pair_stream}
TILE = 128 * 128 * 2 / 1024  # KiB: 128 rows of Q, K or V in bf16


def port(ctas, tiles_of_queries=None):
    """KiB that pass a CTA's port for a tile of pairs. tiles_of_queries: None where K and V stay."""
    reads = TILE + TILE / ctas + TILE / ctas
    fills = 2 * TILE / ctas / tiles_of_queries if tiles_of_queries else 0
    return reads + fills


counted = {"b4": port(1, 2), "b5": port(2), "b6": port(2, 2)}
clocks = {name: cost_model.kibibytes(size) for name, size in counted.items()}
mma_clocks = cost_model.mma(cost_model.B200, 2)
designs = {x.impl[:2]: x.design.pairs["smem"] for x in predictions.EXPECTED["forward"]}
assert all(designs[name] == value for name, value in clocks.items()), "one ledger, two chapters"
assert designs["b7"] == cost_model.kibibytes(port(2, 1)), "the same"
chapter.glue(**counted, mma_clocks=mma_clocks)

# %% tags=["remove-input"]
# | name: fig-pair-port
# | caption: >
# |   **A pair of CTAs takes the port below the MMAs.** Clocks for which the port of shared memory
# |   is busy for a tile of 128 queries and 128 keys at head_dim 128. Dashed: the clocks of its
# |   MMAs.
# | alt: >
# |   Three bars: Blackwell forward b4, b5 and b6. That of b4 reaches the dashed line of the MMAs,
# |   those of b5 and b6 end well before it.
full = {f"Blackwell forward {name}": each for name, each in clocks.items()}
chapter.figure(
    charts.bars(pd.Series(full), xlabel="clocks of the port for a tile of pairs",
                highlight=list(full)[1:], levels={"MMAs": mma_clocks}),
    data=pd.Series(clocks, name="clocks").rename_axis("kernel").reset_index(),
    modelled="operands of a tile of 128 x 128 pairs, 128 bytes a clock",
)  # fmt: skip

# %% [markdown]
# ## K and V are the same for two neighbouring SMs
#
# Take a tile of 128 queries and 128 keys at head_dim 128. S = Q Kᵀ reads Q and K from shared
# memory, P V reads V, and P is in tensor memory. Before that {term}`TMA` writes K and V, once for
# all tiles of queries. At 32 KiB a tile of a tensor, that is the bar of b4.
#
# So b4 needs the port for every clock of its MMAs, and then again for Q and O ({doc}`model`). But K
# and V are the same for all queries of a head, and the SM beside this one reads them too.
#
# ## One MMA of two CTAs reads half of K and V from each
#
# tcgen05 has MMAs of a *CTA pair*, `cta_group::2`: 256 rows, 128 in each of two CTAs of a
# {term}`cluster`. Each CTA holds its own rows of the left operand and of the accumulator, and
# *half of the columns* of the right one; the hardware brings it the other half.
#
# | operand of a pair | this CTA holds | the other CTA holds |
# |---|---|---|
# | Q, P, S, O | its 128 rows | the next 128 rows |
# | Kᵀ in S = Q Kᵀ | 64 of 128 keys | the other 64 keys |
# | V in P V | 64 of 128 columns | the other 64 columns |
#
# ## Blackwell forward b5: short keys stay in shared memory
#
# Half of K and V of 256 keys is {glue:text}`stay:.0f` KiB. That fits twice, so the next item's can
# load ahead, and short K and V are loaded once per item, as in {doc}`forward v6
# <../forward/v6_short_kv>`.
#
# S of 256 keys takes 256 columns of tensor memory, as S of two tiles of queries does in b4. So a
# math role owns 128 *keys*, for the same rows as the other. Both add to the same O, and a separate
# role of four warps stores it through a buffer. The roles and barriers:

# %% tags=["remove-input", "hide-output"]
chapter.roles("b5_cta_pair")
chapter.glue(stay=2 * 2 * TILE / 2)

# %% [markdown]
# ## Messages cross in three ways: bytes, arrivals, commits
#
# One thread, of the even CTA, issues the MMAs of both. A CTA can only wait on its own
# {term}`mbarriers <mbarrier>`, so every message goes to the waiter:
#
# - *Bytes.* A load with `two_ctas=True` counts its bytes on the leader's barrier, wherever it
#   writes. The leader's `load` role announces the bytes of both CTAs.
# - *Arrivals.* `p.full` and `o.empty` of the leader expect two: `remote_cta_rank=0` sends the
#   other CTA's there.
# - *Commits.* A commit with `two_ctas=True` arrives in both CTAs: scores for two math roles, free
#   buffers for two `load` roles.
#
# This is the loop of the `mma` role:

# %% tags=["remove-input", "hide-output"]
chapter.code(b5_cta_pair.mma, "out = tile", "tile += 1")

# %% [markdown]
# Leave one of these out, and the emulator finds it:

# %% tags=["remove-input"]
inputs = studies.batch((300, 20, 600), (200, 256, 40), head_dim=64)
how = {"arch": "sm_100", "multiprocessors": 2}
BROKEN = {
    "commit to the leader alone": (
        "tlx.tcgen05_commit(o.full[out], two_ctas=True)", "tlx.tcgen05_commit(o.full[out])",
    ),
    "arrivals stay at home": ("o.empty[slot], 1, remote_cta_rank=0", "o.empty[slot], 1"),
    "both announce the bytes": ("k.full[stage], BYTES, pred=rank == 0", "k.full[stage], BYTES"),
}  # fmt: skip
for what, change in BROKEN.items():
    broken = studies.changed(b5_cta_pair, change)
    says = studies.findings(lambda to=broken: to.forward(inputs), ["modelled"], **how)[0]
    first, *waits = says.splitlines()
    print(f"{what}: {first.split(':')[0]}\n    {(waits or [first])[0].strip()[:110]}")

# %% [markdown]
# The tests do this to every barrier operation of both kernels. All are found.
#
# ## Blackwell forward b6: long keys stream through
#
# More than 256 keys do not fit. In b6 K and V stream in blocks of 128. To use a block for more than
# one MMA the CTA has two tiles of queries, as in b4, and a math role owns a tile again. An item of
# the list has 2 × 2 × 128 rows, and b5's loop over tiles becomes one over blocks.

# %% tags=["remove-input"]
B6_NOTES = {
    "tlx.barrier_expect_bytes(q.full[slot], Q_BYTES, pred=rank == 0)":
        "*Bytes*: the leader announces those of both CTAs, since both loads count on its barrier.",
    "cta_key = key + rank * (options.BLOCK_N // CTAS)": "Of K this CTA loads half of the rows ...",
    "column = rank * (options.BLOCK_D // CTAS)": "... and of V half of the columns.",
    "if (tlx.cluster_cta_rank() == 0) & (item < num_items):":
        "Only the even CTA issues MMAs, those of both.",
    "tlx.tcgen05_commit(k.empty[0], two_ctas=True)":
        "*Commit*: when S is complete, both CTAs may overwrite their half of K.",
    "# The next item's, loaded an item ahead.":
        "The stream goes on across items, so the next item's lengths are needed early.",
    "weighted_sum(role, p, v.buffer[v_stage], o.buffer[role], count, continued, options)":
        "O += P V of this tile; it waits for P of both CTAs.",
    "scores(role, q.buffer[slot], k.buffer[stage], s)":
        "Then S of the next block, perhaps of the next item.",
    "x = mixed_probabilities(x, scale, head, row, key + part * WIDTH, options)":
        "The activation of b4, a quarter by polynomial.",
    "tlx.barrier_arrive(p.full[role * options.SLICES + part], 1, remote_cta_rank=0)":
        "*Arrival*: P of this CTA is stored, said to the leader.",
}  # fmt: skip
KERNEL_NOTES = {
    "out_desc, o.buffer[role], out[slot], o.empty[role], output_scale, start_out, len_q,":
        "O leaves through the slot of its Q, so that two items fit.",
    "p = tlx.local_alloc((ROWS, BLOCK_N), DTYPE, 2 * ROLES, tlx.storage_kind.tmem, reuse=s)":
        "P lies over S in {term}`tensor memory`.",
    "p = OneWay(p, tlx.alloc_barriers(ROLES * SLICES, arrive_count=CTAS))":
        "Two arrivals, one of each CTA, complete a slice of P.",
}  # fmt: skip
b6 = b6_pair_stream
chapter.annotated(
    [b6.load, b6.mma, b6.math], B6_NOTES, folded="The three roles of the loop, with notes"
)
chapter.annotated(
    [b6.output, b6.pair_stream_kernel], KERNEL_NOTES,
    folded="The role that stores, and the kernel that starts all roles",
)  # fmt: skip

# %% [markdown]
# ## The emulator counts the same bytes, and finds Blackwell forward b6 faster than b4
#
# One item of each kernel, with 1,024 keys in b4 and b6, and with 256 keys and four tiles in b5:

# %% tags=["remove-cell"]
PICTURES = {"b4": ((256,), (1024,)), "b5": ((1024,), (256,)), "b6": ((512,), (1024,))}
lines, books = {}, {}
for name, (rows, keys) in PICTURES.items():
    inputs = studies.batch(rows, keys)
    lines[name] = studies.timeline(RUNGS[name], inputs, arch="sm_100", multiprocessors=2)
    queries = rows[0] / 128 / (1 if name == "b4" else 2)  # tiles of one CTA
    tiles = queries * keys[0] / 128  # of pairs
    core = [e for e in lines[name].events if e.kind == "mma" and e.cta == 0]
    busy, span = lines[name].busy[0], core[-1].end - core[0].start
    books[name] = {
        "port (KiB)": (busy["shared memory"] / cost_model.kibibytes(1) - 96 * queries) / tiles,
        "ledger (KiB)": counted[name],
        "clocks": span / tiles,
        "MMA busy (%)": 100 * busy["tensor core"] / span,
    }
books = pd.DataFrame(books).T

# %% tags=["remove-input"]
chapter.table(
    books.set_axis("forward " + books.index).reset_index(names="kernel"),
    caption="**A tile of Blackwell forward b6 takes fewer clocks than one of b4.** KiB through the "
    "port of a CTA for a tile of pairs, as emulated and by the ledger, and clocks from the first "
    "MMA to the end of the last.",
    name="tab-pair-books", digits={"clocks": 0, "MMA busy (%)": 0},
    emulated="Blackwell forward b4, b5 and b6, one item, modelled schedule, sm_100",
)  # fmt: skip
above, clocks_of = books["port (KiB)"] - books["ledger (KiB)"], books["clocks"]
gain = clocks_of["b4"] / clocks_of["b6"]
assert gain > 1, "the title: faster"
chapter.predict(
    "The emulator counts as many bytes as the ledger for Blackwell forward b4 and b6 (the largest "
    "difference).",
    above[["b4", "b6"]].abs(), most=0, form=".1f", unit=" KiB", shown=False,
)  # fmt: skip
chapter.predict(
    "A tile of Blackwell forward b4 takes at least 1.05 times the emulated clocks of one of b6.",
    gain, least=1.05,
)  # fmt: skip
chapter.glue(b5_more=above["b5"])

# %% [markdown]
# b5 moves {glue:text}`b5_more:.0f` KiB more than its loop, for K and V. The MMAs alone take
# {glue:text}`mma_clocks:,.0f` clocks.

# %% tags=["remove-input"]
# | name: fig-pair-leader
# | caption: >
# |   **In Blackwell forward b5 the MMAs follow each other with short gaps.** The leader's CTA, four
# |   tiles of queries with 256 keys. Modelled cycles.
# | alt: >
# |   A timeline with lanes for output, two math roles, mma, load, TMA and the tensor core. MMAs
# |   follow each other with short gaps; math works beside them, output beside the next tile's.
chapter.figure(lines["b5"], emulated="b5_cta_pair, CTA 0 of a pair, 1,024 rows and 256 keys")

# %% tags=["remove-input"]
studies.stepper(
    {"Blackwell forward b5": lines["b5"]},
    "blackwell-cta_pair-steps",
    title="Blackwell forward b5, step by step",
)

# %% [markdown]
# Compiled for sm_100a both kernels use all 512 columns of tensor memory, no register spills, and
# every tensor core operation in the PTX is for a pair. In the emulator they agree with fp64.

# %% tags=["remove-cell"]
built = {
    "b5": compile_check.build_rung(b5_cta_pair, capability=100, max_seqlen_k=256),
    "b6": compile_check.build_rung(b6_pair_stream, capability=100),
}
assert all(kernel.metadata.tmem_size == 512 for kernel in built.values()), "the text says so"
assert not studies.facts(built, ())["spilled (B)"].any(), "the text says so"
assert not any("cta_group::1" in kernel.asm["ptx"] for kernel in built.values()), "the text too"
lengths = (0, 1, 127, 257, 40, 513)
inputs = studies.batch(lengths, [min(n, 256) for n in lengths[::-1]], head_dim=64)
for name in built:
    studies.comparison(RUNGS[name], inputs, arch="sm_100")

# %% [markdown]
# ## Blackwell forward b6 pays for 512 rows on short sequences
#
# b6 computes 512 rows for every item, however few are left, and b4 256.


# %% tags=["remove-cell"]
def real(length, rows):
    """Percent of the pairs that are computed with items of `rows` rows."""
    work = workload(f"gdpa-self-half-jagged-{length}")
    q, k = np.array(work.seqlens_q), np.array(work.seqlens_k)
    return 100 * (q * k).sum() / (-(-q // rows) * rows * -(-k // 128) * 128).sum()


real_of = {n: real(n, 512) / real(n, 256) for n in (512, 2048)}
chapter.glue(lost=100 * (1 - real_of[512]), net_512=gain * real_of[512],
             net_2048=gain * real_of[2048], num_pairs=cost_model.B200.sms // 2)  # fmt: skip

# %% [markdown]
# Of the pairs that b6 computes on half-full batches of 512, {glue:text}`lost:.0f` % fewer are real
# than in b4 (modelled from the lengths). With the emulated clocks of a tile it runs at
# {glue:text}`net_512:.2f` times the rate of b4, and at 2,048 at {glue:text}`net_2048:.2f` times.
#
# ## What only a B200 can tell
#
# To be measured first: that the other half of an operand costs neither port anything; that a remote
# arrival, which the compiler gives the scope of one CTA, orders what the MMA then reads; and that
# all {glue:text}`num_pairs:.0f` pairs fit at once. A compiler that gave arrivals the cluster's
# scope made a pair's matmul fail, and only in launches back to back
# ([#3492](https://github.com/facebookexperimental/triton/pull/3492)).

# %% tags=["remove-input"]
chapter.predictions()

# %% [markdown]
# ## Exercises
#
# :::{exercise} Why halves of K by rows, and of V by columns?
# :label: ex-pair-halves
#
# An MMA takes half of the *columns* of its right operand from each CTA. Derive from that which part
# of K and of V a CTA loads. Why not the same keys of both? *(paper, ten minutes)*
# :::
#
# :::{solution} ex-pair-halves
# :class: dropdown
#
# The right operand of S = Q Kᵀ is Kᵀ: its columns are keys, so a CTA has 64 keys of K. That of P V
# is V: its columns are those of head_dim, so a CTA has 64 columns of V *for all 128 keys*. The rows
# of V are the inner dimension of the product, which a pair does not divide.
# :::
#
# :::{exercise} Four CTAs
# :label: ex-pair-four
#
# Suppose MMAs of four CTAs, each with a quarter of K and of V. How many KiB pass a port for a tile
# of pairs, with K and V streaming and two tiles of queries a CTA? How large is the second step's
# gain, as a share of the first's? *(paper, five minutes)*
# :::

# %% tags=["remove-cell"]
chapter.glue(four=port(4, 2), again=100 * (port(2, 2) - port(4, 2)) / (port(1, 2) - port(2, 2)))

# %% [markdown]
# :::{solution} ex-pair-four
# :class: dropdown
#
# {glue:text}`four:.0f` KiB; the next step brings {glue:text}`again:.0f` % of the first one's gain.
# Q stays: 32 KiB that no partner can give. And the port is below the MMAs already at two.
# :::
#
# :::{exercise} A wait that is not there
# :label: ex-pair-wait
#
# The loop of b5's `mma` role issues S of the next tile into the columns that hold P of this one.
# Which wait makes sure that P V has read P? *(paper: the code of `mma`, ten minutes)*
# :::
#
# :::{solution} ex-pair-wait
# :class: dropdown
#
# There is no such wait. MMAs of one thread run in the order in which they were issued, and P V is
# issued before S. What needs a wait is that math has *read* S and written P: `p.full`, from both
# CTAs.
# :::
#
# ## Takeaways
#
# - Count the bytes of each operand. The ones that two SMs read twice can be read once.
# - In a pair every message has a direction: bytes and arrivals go to the leader, commits to both.
# - A larger item reads less for a pair and computes more pairs that no query needs. Count both.
