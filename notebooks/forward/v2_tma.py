# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# ---

# %% [markdown]
# # v2: let the copy engine do the addressing
#
# What does a kernel gain when it stops computing addresses?
#
# :::{admonition} In this chapter (25 minutes)
# You will make one TMA descriptor clip at the end of every sequence of a packed tensor, count what
# it saves in SASS, and separate what a tile costs once from what it costs per key. With the same
# tile, TMA is {glue:text}`gain_min:.2f` to {glue:text}`gain_max:.2f` times as fast as pointers.
# :::

# %%
from dataclasses import replace

import pandas as pd
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from gdpa_kernels import emulator
from gdpa_kernels.device import ragged
from gdpa_kernels.device.ragged import load_rows, ragged_descriptor, store_rows
from gdpa_kernels.gdpa import v1_tiled, v2_tma
from gdpa_kernels.measuring import compile_check
from gdpa_kernels.report import charts, results, studies
from gdpa_kernels.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("forward/v2_tma", mode=mode, device=device, data_dir=data_dir)
SELF, V2 = "gdpa-self-full-1024", "v2_tma"
RUNGS = {"v1_tiled": v1_tiled, V2: v2_tma}
sweep = chapter.rows("forward/v1_tiled", variant=None)
times = sweep.pivot_table(index=["workload", "variant"], columns="impl", values="time_us_p50")
gain = (times["v1_tiled"] / times[V2]).unstack("workload").loc[list(sweep["variant"].unique())]
us = chapter.times("forward/results", direction="forward")
dense = (us["cudnn"] / us[V2]).dropna()
jagged = us.drop(dense.index)
peers = jagged.drop(columns=[name for name in us if name.startswith("v")])
ahead = peers.min(axis=1) / jagged[V2]
assert (gain > 1).all(axis=None) and (dense < 1).all() and sum(ahead < 1) == 1, "the text says so"
chapter.glue(
    gain_min=gain.min(axis=None), gain_max=gain.max(axis=None), any=ragged.ANY,
    dense=len(dense), cudnn_least=1 / dense.max(), cudnn_most=1 / dense.min(),
    jagged=len(jagged), ahead_least=ahead.min(), ahead_most=ahead.max(),
    behind=ahead.idxmin(), peer=peers.loc[ahead.idxmin()].idxmin(),
)  # fmt: skip

# %% tags=["remove-input"]
# | name: fig-v2-ladder-self
# | caption: >
# |   The ladder up to v2 on gdpa-self-full-1024, forward, kernel alone.
# | alt: >
# |   Horizontal bars of TFLOP/s. v2 is somewhat faster than v1 and than every other kernel except
# |   cuDNN, which lies between v2 and the dashed line of the roofline.
chapter.ladder(V2, SELF)

# %% [markdown]
# ## What changes
#
# | | {doc}`v1 <v1_tiled>` | v2 |
# |:--|:--|:--|
# | work split | a program owns `BLOCK_M` rows of one head | the same |
# | data path | every thread computes pointers and predicates | one thread asks for a tile |
# | synchronisation | `cp.async` groups, then block-wide barriers | barriers that count bytes |
#
# The tensor memory accelerator (TMA) of Hopper copies a box of a tensor between global and shared
# memory. What it has to know about the tensor stands in a descriptor of 128 bytes: the address, up
# to five sizes and strides, and the shape of the box {cite}`nvidiaptx`. The host makes it once,
# before the launch. Afterwards one thread issues one instruction with the coordinates of a box. The
# unit computes all addresses, writes the box in the order that the tensor cores want, and reports
# the bytes to a barrier. Elements outside the sizes read as zero and are not written, and no
# predicate was computed.
#
# ## The tail of a sequence
#
# Our tensors are packed, `[total, num_heads, head_dim]`, and an obvious descriptor has exactly
# these sizes. It clips at `total`. A sequence of three rows, loaded in a box of eight, then brings
# five rows of its neighbours. Below, every row but the sequence's own is NaN, and the kernel runs
# in the emulator:

# %%
total, start, length = 16, 5, 3
packed = torch.full((total, 1, 16), float("nan"), dtype=torch.bfloat16)
packed[start : start + length] = torch.tensor([1.0, 2.0, 3.0]).reshape(3, 1, 1)


@triton.jit
def load_both(plain, ragged, start, length, plain_ptr, ragged_ptr):
    at = tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(plain_ptr + at, tl.reshape(plain.load([start, 0, 0]), [8, 16]))
    tl.store(ragged_ptr + at, load_rows(ragged, start, length, 0, 0))


plain = TensorDescriptor(packed, list(packed.shape), list(packed.stride()), [8, 1, 16])
from_plain, from_ragged = torch.empty(8, 16), torch.empty(8, 16)
emulator.run(
    load_both, (1,), plain, ragged_descriptor(packed, 8), start, length, from_plain, from_ragged
)
print("descriptor of the tensor:", from_plain[:, 0].tolist())
print("descriptor of this book: ", from_ragged[:, 0].tolist())

# %% [markdown]
# The activation cannot repair this. A key row that does not exist gives a probability of 0 at best,
# and the second matmul multiplies it by a row of V: 0 x NaN = NaN. A descriptor for each sequence
# would clip rightly, but the device would have to make one before each tile.
#
# ## Five dimensions
#
# The way out is that of Triton's `ragged_tma` {cite}`fbtriton`: put the end of *every* sequence at
# the same bound. The descriptor clips in a dimension of size $B = 2^{30}$, and row $i$ of a
# sequence of $n$ rows has the coordinate $B - n + i$ there: inside for $i < n$, outside from
# $i = n$ on, whatever $n$ is. The address is now wrong, and two more dimensions put it right. One
# adds the end of the sequence, $\text{start} + n$ rows. The other has the stride $2^{34} - s$,
# where $s$ is the stride of a row, and always the coordinate $B$. Since $B \cdot 2^{34} = 2^{64}$
# and addresses have 64 bits, it subtracts $B s$:
#
# $$
# (\text{start} + n)\,s + (B - n + i)\,s + B\,(2^{34} - s)
# \equiv (\text{start} + i)\,s \pmod{2^{64}}.
# $$
#
# Python integers do not wrap, so one can watch it happen. The sequence from above, four heads of
# 128:

# %%
BOUND, ROW = 2**30, 4 * 128
for i in range(4):
    clipped = BOUND - length + i
    offset = 2 * ((start + length) * ROW + clipped * ROW + BOUND * (2**34 - ROW))  # 2 bytes
    found = offset % 2**64 // (2 * ROW)
    print(f"row {i}: {offset:,} mod 2**64 = row {found} of the tensor, inside: {clipped < BOUND}")

# %% [markdown]
# Row 3 would be row 8 of the tensor, the neighbour's, but its coordinate is outside. With the head
# and the position inside the head, that makes five dimensions, all that a descriptor has. The price
# is a limit: a packed tensor may have at most {glue:text}`any:,.0f` rows. The manual does not
# promise that the hardware wraps; the check before every timing would notice if it did not. This is
# all of the device code; the same coordinates store:

# %% tags=["remove-input"]
chapter.code(load_rows)
chapter.code(store_rows)

# %% [markdown]
# And this is the loop. No mask and no pointer is left; everything around it is v1's.

# %% tags=["remove-input"]
chapter.code(v2_tma.tma_kernel, "q = load_rows")

# %% tags=["remove-input"]
chapter.roles(V2)

# %% [markdown]
# ## Prediction
#
# TMA moves no byte less and saves no FLOP. What may change is what the warps do besides, and that
# can be counted without a GPU, in SASS. A shape is `BLOCK_M` x `BLOCK_N` x `num_warps` x
# `num_stages`:


# %%
def counted(impl: str, shape: str) -> dict:
    """What the compiled kernel needs, and the cycles of an SM for one block of keys."""
    block_m, block_n, num_warps, _ = constants = tuple(map(int, shape.split("x")))
    mmas = block_m // (16 * num_warps) * (8 + block_n // 16)  # HGMMAs of a warp group
    built = compile_check.build_rung(RUNGS[impl], config=RUNGS[impl].Config(*constants))
    made = compile_check.read(built)
    loop = len(compile_check.shortest_loop(built, "HGMMA", mmas))
    return {
        "shape": shape, "impl": impl, "registers": made.registers, "spilled (B)": made.spill_bytes,
        "loop": loop, "issue": loop * num_warps // 4, "tensor": 4 * block_m * block_n * 128 // 4096,
    }  # fmt: skip


COUNTED = OURS, WIDE, SMALL = "128x32x8x4", "128x64x4x2", "64x64x4x2"
counts = pd.DataFrame([counted(impl, shape) for shape in COUNTED for impl in RUNGS])

# %% tags=["remove-input"]
chapter.table(
    counts,
    modelled="compiled for sm_90a. loop: instructions of a warp for one block of keys; issue: "
    "cycles of the four schedulers for them; tensor: cycles of the tensor cores.",
)
count = counts.set_index(["impl", "shape"])
bracket = (count["tensor"] + count["issue"])["v1_tiled"] / (count["tensor"] + count["issue"])[V2]
wide = count.xs(WIDE, level="shape")
chapter.glue(spilled=wide["spilled (B)"]["v1_tiled"], loop_v1=wide["loop"]["v1_tiled"],
             loop_v2=wide["loop"][V2])  # fmt: skip

# %% [markdown]
# At 128x64x4x2 the accumulator and the scores take 192 registers of each thread. v1 keeps its
# pointers as well, and spills {glue:text}`spilled:.0f` bytes. v2 fits, and its loop has
# {glue:text}`loop_v2:.0f` instructions instead of {glue:text}`loop_v1:.0f`. At v1's own shape there
# was room, and hardly an instruction goes.
#
# Two programs share an SM. If they overlap perfectly, the tensor cores are the limit and fewer
# instructions gain nothing. If nothing overlaps, issue and tensor cycles add up. More than the
# ratio of these sums would mean that issue slots are not what TMA saves:

# %% tags=["remove-input"]
for shape in COUNTED:
    text = f"The largest gain at {shape}, v1 / v2."
    chapter.predict(text, gain.loc[shape].max(), least=1, most=bracket[shape])

# %% [markdown]
# ## Is it right?
#
# Three short sequences in the emulator. Then everything that does not belong to the one in the
# middle becomes NaN:

# %%
given = studies.batch((37, 50, 9), head_dim=32)
own = slice(37, 37 + 50)
poisoned = {x: torch.full_like(getattr(given, x), float("nan")) for x in "qkv"}
for x, tensor in poisoned.items():
    tensor[own] = getattr(given, x)[own]
studies.comparison(v2_tma, given)  # against fp64; raises if a sequence is wrong
with emulator.enabled():
    out, among_nan = (v2_tma.forward(b) for b in (given, replace(given, **poisoned)))
print("bitwise equal among NaN:", torch.equal(out[own], among_nan[own]))

# %% [markdown]
# ## Measurement

# %% tags=["remove-input"]
# | name: fig-v2-shapes
# | caption: >
# |   How many times as fast as v1 v2 is with the same tile (BLOCK_M x BLOCK_N x warps x stages),
# |   forward, kernel alone.
# | alt: >
# |   A dot plot with eight rows, one for each shape, and three marks a row, one for each workload.
# |   All marks lie right of 1, those of 128x64x4x2 furthest, at up to 1.3.
chapter.figure(charts.dots(gain, xlabel="time of v1 / time of v2"), measured=sweep)

# %% [markdown]
# Every shape gains, on every workload, most of all 128x64x4x2, where v1 spills;
# {numref}`ex-v2-shape` asks about 64x128x4x2. All three brackets are exceeded: issue slots are not
# what TMA saves, or not all of it.
#
# On all {glue:text}`dense:.0f` dense workloads cuDNN is {glue:text}`cudnn_least:.2f` to
# {glue:text}`cudnn_most:.2f` times as fast as v2, and it computes a softmax as well. Its source is
# closed; open kernels of its class, such as FlashAttention-3, give different warps different jobs
# {cite}`shah2024flashattention3`, and so do our rungs from {doc}`v4_warp_specialized` on. On the
# {glue:text}`jagged:.0f` half-full workloads this cuDNN kernel cannot run. There v2 is
# {glue:text}`ahead_least:.2f` to {glue:text}`ahead_most:.2f` times as fast as the best peer that
# can; it is behind on {glue:text}`behind` alone, behind {glue:text}`peer`.
#
# ## The surprise: time follows instructions, and a tile has ends
#
# gdpa-self-full-256 and gdpa-self-full-1024 have the same tiles with four times the keys, so what a
# tile costs once can be told from what it costs per key. 264 programs are resident, two on each SM,
# and a line through the two workloads gives:


# %%
def line(impl: str, shape: str) -> tuple[float, float]:
    """us that a tile costs once, and per 64 keys, while 264 programs run."""
    rows = int(shape.split("x")[0])
    short, long = (
        264 * times.loc[(f"gdpa-self-full-{n}", shape), impl] / (1152 * 4 * n / rows)
        for n in (256, 1024)
    )
    slope = (long - short) / (1024 - 256) * 64
    return short - slope * 256 / 64, slope


parts = pd.DataFrame({(s, impl): line(impl, s) for s in COUNTED for impl in RUNGS}).T
once, per_key = parts[0].unstack(), parts[1].unstack()
parts = pd.DataFrame({
    "once, v1 (us)": once["v1_tiled"], "once, v2": once[V2],
    "per 64 keys, v1 (us)": per_key["v1_tiled"], "per 64 keys, v2": per_key[V2],
    "times as fast": per_key["v1_tiled"] / per_key[V2],
    "times the instructions": count["loop"]["v1_tiled"] / count["loop"][V2],
}).loc[list(COUNTED)]  # fmt: skip

# %% tags=["remove-input"]
chapter.table(parts.reset_index(names="shape"), measured=sweep)

# %% tags=["remove-cell"]
follows = parts["times as fast"] / parts["times the instructions"]
assert follows.between(0.92, 1.08).all(), "the text says that time follows instructions"
limits = results.ceilings(chapter.record("forward/results"))
least_us = 264 * 4 * 128 * 64 * 128 / (limits.tflops * 1e6)
chapter.glue(
    once_v1=once["v1_tiled"][OURS], once_v2=once[V2][OURS], least_us=least_us,
    slope=per_key[V2][WIDE], endless=100 * least_us / per_key[V2][WIDE],
    crossing=64 * (once[V2][WIDE] - once[V2][OURS]) / (per_key[V2][OURS] - per_key[V2][WIDE]),
)  # fmt: skip

# %% [markdown]
# The last two columns agree. Per key, v2 is as many times faster as its loop has fewer
# instructions, as if the tensor cores took no time at all. The likely reason: only two warps share
# a scheduler in the shapes with four warps, and while one waits for a result there is rarely
# another to take the slot.
#
# At v1's own shape the loop gained nothing, as its count said, and *all* of the gain is at the two
# ends of a tile: {glue:text}`once_v1:.1f` µs become {glue:text}`once_v2:.1f` µs. v1 carries Q
# through registers into shared memory and shuffles the output back into rows before every thread
# stores its part; v2 asks for either in one instruction. With 64 rows the ends did not become
# shorter; why not, the record does not say.
#
# The lines also explain the two defaults. 128x64x4x2 costs more per tile and less per key; they
# cross at {glue:text}`crossing:.0f` keys, and `default_config` changes at 512. Each line goes
# through two points only.
#
# For 64 keys of a tile the measured matmul rate would need {glue:text}`least_us:.2f` µs; v2 takes
# {glue:text}`slope:.2f`, so even an endless sequence would stay at {glue:text}`endless:.0f` %. The
# same warps wait for a copy, issue the MMAs and evaluate the activation, one after the other. And
# in a half-full batch nearly half of the programs find that their rows do not exist;
# {doc}`v3_persistent` asks what these cost.
#
# ## Exercises
#
# :::{exercise} The wrong bound
# :label: ex-v2-bound
#
# `BOUND` is $2^{30}$ and the stride $2^{34} - s$ elements. Why not $2^{31}$ and $2^{33} - s$?
# *(paper, five minutes)*
# :::
#
# :::{solution} ex-v2-bound
# :class: dropdown
#
# The product of the two is the same, so the addresses would be right. But coordinates are signed
# 32-bit integers, and `BOUND` itself is used as one: $2^{31}$ does not fit. In the other direction
# $2^{29}$ and $2^{35} - s$ elements of two bytes are fine; the stride of a TMA dimension must stay
# below $2^{40}$ bytes.
# :::
#
# :::{exercise} A shape of your own
# :label: ex-v2-shape
#
# Call `counted` with 64x128x4x2 for both kernels. Does the loop explain why this shape gains so
# much? *(code, ten minutes, no GPU)*
# :::
#
# :::{solution} ex-v2-shape
# :class: dropdown
#
# v1 spills here too, and its loop lost even more instructions than at 128x64x4x2. The bracket, with
# the tensor cycles of 64 x 128 keys, is exceeded again, and the ratio of the instructions is again
# the better guess.
# :::
#
# :::{exercise} A tensor that is too long
# :label: ex-v2-long
#
# A packed tensor may have at most {glue:text}`any:,.0f` rows, and 2 GB is reached much earlier.
# Which part of the kernel would need 64-bit integers in v1 and does not in v2? Which limit is
# reached first in v2, and how would you lift it? *(paper and source, half an hour)*
# :::
#
# :::{solution} ex-v2-long
# :class: dropdown
#
# v1 must multiply row numbers by strides in 64 bits (`tile` casts them); v2 passes coordinates, and
# the copy engine multiplies. The first limit is the coordinate `start + length`, which must stay
# below `ANY`, a little before the int32 offsets in `cu_seqlens` overflow. A longer batch can be cut
# in two at the end of a sequence, with descriptors that start there.
# :::
#
# ## Takeaways
#
# - A descriptor can clip at the end of every sequence, if the end of every sequence has the same
#   coordinate.
# - The time per key fell with the number of instructions, and by more than their issue slots.
# - Freed registers pay where they allow another tile: short keys and long keys now have different
#   best shapes.
