# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Forward v2: TMA
#
# What does a kernel gain when it stops computing addresses?
#
# :::{admonition} In this chapter (35 minutes)
# You will make one TMA descriptor clip at the end of every sequence of a packed tensor, count what
# it saves in SASS, and separate what a tile costs once from what it costs per key. With the same
# tile, forward v2 is {glue:text}`gain_min:.2f` to {glue:text}`gain_max:.2f` times as fast as
# forward v1 (all times of this chapter are {ref}`in bursts <rule-scope>`).
# :::

# %% tags=["hide-input"]
from itertools import product

import pandas as pd
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import tritonemu
from _lib import drawings
from gdpa_kernels.device import ragged
from gdpa_kernels.device.ragged import load_rows, ragged_descriptor
from gdpa_kernels.gdpa.kernels import v1_tiled
from gdpa_kernels.gdpa.ladder import v2_tma
from gdpa_lab.measuring import compile_check
from gdpa_lab.report import charts
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("forward/v2_tma", mode=mode, device=device, data_dir=data_dir)
V2, RUNGS = "v2_tma", {"v1_tiled": v1_tiled, "v2_tma": v2_tma}
sweep = chapter.rows("forward/v1_tiled", variant=None)
times = sweep.pivot_table(index=["workload", "variant"], columns="impl", values="time_us_p50")
gain = (times["v1_tiled"] / times[V2]).unstack("workload").loc[list(sweep["variant"].unique())]
us = chapter.times("forward/results", direction="forward")
dense = (us["cudnn"] / us[V2]).dropna()
assert (gain > 1).all(axis=None) and (dense < 1).all(), "the text says so"
assert gain.max(axis=1).idxmax() == "128x64x4x2", "the text: most of all"
chapter.glue(
    gain_min=gain.min(axis=None), gain_max=gain.max(axis=None), any=ragged.ANY,
    cudnn_least=1 / dense.max(), cudnn_most=1 / dense.min(),
)  # fmt: skip

# %% tags=["remove-input"]
# | name: fig-v2-ladder
# | caption: >
# |   **Forward v2 on the ladder.** Time of each rung on gdpa-self-full-1024, back to back; each
# |   tick leads to its chapter. Dashed: libraries.
# | alt: >
# |   An axis of milliseconds with a tick for each rung, that of v2 thick, and dashed lines for the
# |   libraries.
chapter.ladder("v2_tma")

# %% tags=["remove-input"]
# | name: fig-v2-shapes
# | caption: >
# |   **TMA helps every tile shape on every workload, and most where pointers spill.** Speedup of
# |   forward v2 over forward v1 with the same tile (BLOCK_M x BLOCK_N x warps x stages), in bursts.
# | alt: >
# |   A dot plot with a row for each of eight shapes and a mark for each of three workloads. All
# |   marks lie right of 1, those of 128x64x4x2 furthest.
chapter.figure(
    charts.dots(gain, xlabel="time of forward v1 / forward v2, in bursts"), measured=sweep
)

# %% [markdown]
# ## What changes
#
# | | {doc}`forward v1 <v1_tiled>` | forward v2 |
# |:--|:--|:--|
# | data path | every thread computes pointers and predicates | one thread asks for a tile |
# | synchronisation | `cp.async` groups, then block-wide barriers | barriers that count bytes |
#
# A TMA descriptor has 128 bytes, with up to five sizes and strides {cite}`nvidiaptx`. One thread
# issues one instruction with the coordinates of a box. Elements out of bounds read as zero and are
# not written, without a predicate.
#
# (rule-masks)=
# ## The tail of a sequence, and when P needs a mask
#
# Our tensors are packed, `[total, num_heads, head_dim]`, and an obvious {term}`descriptor` has
# exactly these sizes. It clips at `total`. A sequence of three rows, loaded in a box of eight, then
# brings five rows of its neighbours:

# %% tags=["remove-input"]
# | name: fig-v2-boxes
# | caption: >
# |   **A descriptor of the whole tensor brings a neighbour's rows; the one of this book brings
# |   zeros.** Sixteen rows of a packed tensor, and the eight that two descriptors load from row 5.
# | alt: >
# |   Three strips. The first has rows 0 to 4, 5 to 7 and 8 to 15 of three sequences. In the second
# |   the box from row 5 has three rows of the sequence and five of its neighbour, in the third
# |   three rows of the sequence and five zeros.
OWN, OTHER = "the sequence", "its neighbours"
chapter.figure(
    drawings.segments(
        {
            "rows in memory": [(0, 5, "another", OTHER), (5, 8, "its rows", OWN),
                               (8, 16, "another", OTHER)],
            "box, of the tensor": [(5, 8, "its rows", OWN), (8, 13, "another's", OTHER)],
            "box, of this book": [(5, 8, "its rows", OWN), (8, 13, "zeros", "filled in")],
        },
        [OTHER, OWN, "filled in"], ticks={n: str(n) for n in (0, 5, 8, 13, 16)}, xlabel="row",
    ),
    computed="a batch of 16 rows; the table below runs both loads",
)  # fmt: skip

# %% [markdown]
# We load both ways in the emulator and compute an output, P V, from all eight:

# %% tags=["hide-input"]
total, start, length = 16, 5, 3


@triton.jit
def load_both(plain, ragged, start, length, plain_ptr, ragged_ptr):
    offsets = tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(plain_ptr + offsets, tl.reshape(plain.load([start, 0, 0]), [8, 16]))
    tl.store(ragged_ptr + offsets, load_rows(ragged, start, length, 0, 0))


def boxes(neighbour: float) -> torch.Tensor:
    """A column of the boxes that the two descriptors load, other rows being `neighbour`."""
    packed = torch.full((total, 1, 16), neighbour, dtype=torch.bfloat16)
    packed[start : start + length] = torch.tensor([1.0, 2.0, 3.0]).reshape(3, 1, 1)
    plain = TensorDescriptor(packed, list(packed.shape), list(packed.stride()), [8, 1, 16])
    loaded = torch.empty(2, 8, 16)
    tritonemu.run(load_both, (1,), plain, ragged_descriptor(packed, 8), start, length, *loaded)
    return loaded[:, :, 0]


def judged(v: torch.Tensor, masked: bool) -> str:
    """What P V is, with V in place of the scores; a mask on P keeps the rows of the sequence."""
    p = torch.nn.functional.gelu(v)
    exact = p[:length] @ v[:length]
    if masked:
        p[length:] = 0
    return "NaN" if (p @ v).isnan() else "right" if p @ v == exact else "wrong"


(numbers, zeros), (nans, again) = boxes(7.0), boxes(torch.nan)
assert torch.equal(zeros, again) and not zeros[length:].any(), "the table: zeros"
cases = {"a neighbour's numbers": numbers, "a neighbour's NaN": nans, "zeros": zeros}

# %% tags=["remove-input"]
ways = ["of the tensor", "of the tensor", "of this book"]
chapter.table(
    pd.DataFrame(
        [(way, rows, judged(v, False), judged(v, True))
         for way, (rows, v) in zip(ways, cases.items(), strict=True)],
        columns=["descriptor", "rows beyond the end", "without a mask on P", "with it"],
    ),
    caption="**Rows of zeros need no mask on P, and against a neighbour's NaN none helps.** The "
    "output of those eight rows.", name="tab-v2-masks",
    emulated="both loads; the output in PyTorch",
)  # fmt: skip

# %% [markdown]
# A mask makes P of a missing key 0, but 0 x NaN = NaN. Zeros are right for any activation, since
# the rows of V are zero too; softmax needs the mask, for a key of zeros adds $e^0$ to the sum. Only
# pairs of real rows need a mask, as under a causal one. A descriptor for each sequence would clip
# correctly, but the device must make it before each tile.
#
# ## Five dimensions
#
# Triton's `ragged_tma` {cite}`fbtriton` has the way out: put the end of *every* sequence at the
# same bound. The descriptor clips in a dimension of size $B = 2^{30}$, and row $i$ of a sequence of
# $n$ rows has the coordinate $B - n + i$ there: inside for $i < n$, outside from $i = n$ on. The
# clipping is right now, but the address is not. Let $s$ be the stride of a row in bytes. Two extra
# dimensions repair the address. The first adds $\text{start} + n$ rows. The second must subtract
# $B$ rows; a stride cannot be negative, but with stride $2^{34} - s$ and coordinate $B$ it adds
# $2^{64} - B s$, which in 64 bits is $-B s$:
#
# $$
# (\text{start} + n)\,s + (B - n + i)\,s + B\,(2^{34} - s)
# \equiv (\text{start} + i)\,s \pmod{2^{64}}.
# $$
#
# Row 3 of the sequence above has the coordinate $B$ and is not read. Together with the head and the
# position in it that makes five dimensions, all that a descriptor has. The price is a limit of
# {glue:text}`any:,.0f` rows. The manual does not promise that the hardware wraps; our checks would
# notice if it did not. A store uses the same coordinates as this load:

# %% tags=["remove-input"]
chapter.code(load_rows)

# %% [markdown]
# In the loop no mask and no pointer is left; everything around it is v1's:

# %% tags=["remove-input"]
chapter.code(v2_tma.tma_kernel, "q = load_rows")

# %% [markdown]
# ## Prediction
#
# Bytes and FLOPs stay the same. What else the warps do may change, and {term}`SASS`, the machine
# code, shows that without a GPU. We count the instructions between two passes of the loop. In it
# `HGMMA` is the instruction of an MMA, one for each 64 rows and 16 of the inner dimension. Two
# numbers say what a block of keys costs an SM. *Issue* is the time of its four schedulers, each of
# which starts one warp's instruction per cycle. *Tensor* is the time of the tensor cores, at 4,096
# FLOPs per cycle.


# %% tags=["hide-input"]
def counted(impl: str, shape: str) -> dict:
    """Resources of the compiled kernel, and the cycles of an SM for one block of keys."""
    block_m, block_n, num_warps, _ = constants = tuple(map(int, shape.split("x")))
    mmas = block_m // (16 * num_warps) * (8 + block_n // 16)  # HGMMAs of a warp group
    built = compile_check.build_rung(RUNGS[impl], config=RUNGS[impl].Config(*constants))
    facts = compile_check.read(built)
    loop = len(compile_check.shortest_loop(built, "HGMMA", mmas))
    return {
        "shape": shape, "impl": impl, "spilled (B)": facts.spill_bytes,
        "loop": loop, "issue": loop * num_warps // 4, "tensor": 4 * block_m * block_n * 128 // 4096,
    }  # fmt: skip


COUNTED = OURS, WIDE, SMALL = "128x32x8x4", "128x64x4x2", "64x64x4x2"
counts = pd.DataFrame([counted(impl, shape) for shape in COUNTED for impl in RUNGS])

# %% tags=["remove-input"]
chapter.table(
    counts.replace({"impl": {"v1_tiled": "forward v1", V2: "forward v2"}}),
    caption="**At the tile of forward v1 TMA removes hardly any instructions, elsewhere it does.** "
    "Of a block of keys: a warp's instructions, and cycles of an SM.",
    compiled="for sm_90a when this page was built",
)
count = counts.set_index(["impl", "shape"])
bracket = (count["tensor"] + count["issue"])["v1_tiled"] / (count["tensor"] + count["issue"])[V2]
assert 0.84 < count["loop"][V2][WIDE] / count["loop"]["v1_tiled"][WIDE] < 0.88, "by a seventh"

# %% [markdown]
# At 128x64x4x2 the {term}`accumulator` and the scores take 192 registers of each thread; with its
# pointers v1 {term}`spills <spill>`. v2 fits, and its loop is shorter by a seventh. At v1's own
# tile registers were not short, so almost nothing disappears.
#
# Two programs share an SM. If they overlap perfectly, fewer instructions gain nothing. If nothing
# overlaps, issue and tensor cycles add up. A gain above the ratio of these sums would mean that
# {term}`TMA` saves more than issue slots:

# %% tags=["remove-input"]
for shape in COUNTED:
    text = f"At {shape} v2 gains no more than its issue slots: the largest v1 / v2."
    chapter.predict(text, gain.loc[shape].max(), least=1, most=bracket[shape], form=".3f",
                    shown=shape != SMALL)  # fmt: skip
chapter.predictions()

# %% [markdown]
# ## Measurement
#
# Both intervals are exceeded ({numref}`fig-v2-shapes`): TMA saves more than issue slots.
#
# On full batches cuDNN is {glue:text}`cudnn_least:.2f` to {glue:text}`cudnn_most:.2f` times as fast
# as v2, softmax included. Open kernels of its class give different warps different jobs
# {cite}`shah2024flashattention3`, as {doc}`v4_warp_specialized` does.
#
# ## The surprise: time follows instructions, and a tile has ends
#
# gdpa-self-full-256 and gdpa-self-full-1024 differ only in length. A line through the two separates
# what a tile costs once from what it costs per key. Two points leave no residual, and a tile of the
# third batch, cross-full-1024 with 256 keys, takes {glue:text}`third` % less than the line says, so
# take what is paid *once* as a limit:


# %% tags=["remove-cell"]
def tile(name: str, impl: str, shape: str) -> float:
    """us that a tile takes while 264 programs run."""
    rows, queries = int(shape.split("x")[0]), int(name.rpartition("-")[2])
    return 264 * times.loc[(name, shape), impl] / (1152 * 4 * queries / rows)


def line(impl: str, shape: str) -> tuple[float, float]:
    """us that a tile costs once, and per 64 keys."""
    short, long = (tile(f"gdpa-self-full-{n}", impl, shape) for n in (256, 1024))
    slope = (long - short) / (1024 - 256) * 64
    return short - slope * 256 / 64, slope


parts = pd.DataFrame({(s, impl): line(impl, s) for s in COUNTED for impl in RUNGS}).T
once, per_key = parts[0].unstack(), parts[1].unstack()
parts = pd.DataFrame({
    "once, v1": once["v1_tiled"], "once, v2": once[V2],
    "per key, v1": per_key["v1_tiled"], "per key, v2": per_key[V2],
    "instructions": count["loop"]["v1_tiled"] / count["loop"][V2],
}).loc[list(COUNTED)]  # fmt: skip
faster = parts["per key, v1"] / parts["per key, v2"]
assert (faster / parts["instructions"]).between(0.92, 1.08).all(), "the text: nearly agree"
agree = 100 * (faster / parts["instructions"] - 1).abs().max()
third = [
    100 * (1 - tile("gdpa-cross-full-1024", *of) / tile("gdpa-self-full-256", *of))
    for of in product(RUNGS, COUNTED)
]
assert min(third) > 0 and max(third) < 15, "the text: less, not more"
chapter.glue(once_v1=once["v1_tiled"][OURS], once_v2=once[V2][OURS], agree=agree,
             third=f"{min(third):.0f} to {max(third):.0f}")  # fmt: skip

# %% tags=["remove-input"]
chapter.table(
    parts.round(2).reset_index(names="shape"),
    caption="**A tile's two ends and its loop gain for different reasons.** µs of a tile, once and "
    "per 64 keys; last: instructions of forward v1's loop over those of forward v2's.",
    measured=sweep, compiled="for sm_90a when this page was built",
)  # fmt: skip

# %% [markdown]
# The time per key falls in proportion to the instructions of the loop, within
# {glue:text}`agree:.0f` %. A likely reason is that with four warps per program only two share a
# scheduler.
#
# At v1's own shape the loop gained nothing, as its count said, and *all* of the gain is at the two
# ends of a tile: {glue:text}`once_v1:.1f` µs become {glue:text}`once_v2:.1f` µs. v1 carries Q
# through registers into {term}`shared memory` and shuffles the output back into rows before every
# thread stores its part, where v2 needs one instruction for each.

# %% tags=["remove-input"]
chapter.profile("v1_tiled", "v2_tma", workload="gdpa-self-full-512")

# %% [markdown]
# ## Exercises
#
# {doc}`Write it </exercises>`: `make exercise NAME=tma`.
#
# :::{exercise} The wrong bound
# :label: ex-v2-bound
#
# `BOUND` is $2^{30}$ and the stride $2^{34} - s$. Why not $2^{31}$ and $2^{33} - s$? *(paper)*
# :::
#
# :::{solution} ex-v2-bound
# :class: dropdown
#
# $2^{31} \cdot 2^{33}$ is the same, so the addresses would be right. But coordinates are signed
# 32-bit integers, and `BOUND` itself is used as one: $2^{31}$ does not fit.
# :::
#
# :::{exercise} A tensor that is too long
# :label: ex-v2-long
#
# Which limit of v2 does a packed tensor reach first, and how would you lift it? *(source, half an
# hour)*
# :::
#
# :::{solution} ex-v2-long
# :class: dropdown
#
# v1 multiplies row numbers by strides in 64 bits (`tile_pointers` casts them); in v2 the copy
# engine does. The coordinate `start + length` must stay below 2,147,418,112 (`ANY` in its source),
# a little before the int32 offsets in `cu_seqlens` overflow. A longer batch can be cut in two at
# the end of a sequence.
# :::
#
# ## Takeaways
#
# - A descriptor clips at the end of every sequence if all ends have the same coordinate.
# - The time per key fell with the number of instructions, and by more than their issue slots.
# - Freed registers pay where they allow another tile: 128x64x4x2 no longer spills.
