# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# ---

# %% [markdown]
# # v2: let the copy engine do the addressing
#
# What does a kernel gain when it stops computing addresses?
#
# :::{admonition} In this chapter
# - A TMA descriptor clips at the end of a tensor, not at the end of a sequence. Five dimensions and
#   an address that wraps make one that clips at both.
# - With the same tile, TMA is {glue:text}`v2_gain_min:.2f` to {glue:text}`v2_gain_max:.2f` times as
#   fast as pointers. The time per key falls as the instructions of the loop do, by more than their
#   issue slots; tiles of 128 rows also begin and end sooner.
# - cuDNN is still ahead on dense batches: {glue:text}`v2_over_cudnn_self:.2f` times as fast on
#   1,024 tokens.
# :::

# %% tags=["remove-cell"]
import inspect
import re
import subprocess
import tempfile
from itertools import product
from pathlib import Path

import pandas as pd
import torch
import triton
import triton.language as tl
from IPython.display import Markdown, display
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from gdpa_kernels import emulator, gdpa
from gdpa_kernels.calling import ladder
from gdpa_kernels.device import ragged
from gdpa_kernels.device.ragged import load_rows, ragged_descriptor, store_rows
from gdpa_kernels.gdpa import v1_tiled, v2_tma
from gdpa_kernels.measuring import record, roofline, system, testing
from gdpa_kernels.measuring.inputs import cu_seqlens, make_inputs
from gdpa_kernels.measuring.workload import workload
from gdpa_kernels.report import figures, results

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
SELF_256, SELF, CROSS = "gdpa-self-full-256", "gdpa-self-full-1024", "gdpa-cross-full-1024"
WORKLOADS = (SELF_256, SELF, CROSS)
COUNTED = OURS, WIDE, SMALL = "128x32x8x4", "128x64x4x2", "64x64x4x2"
MODULES = {"v1_tiled": v1_tiled, "v2_tma": v2_tma}

everything = results.table(data_dir, system="h200", latest=False)
everything = everything.drop_duplicates(["workload", "impl", "scope", "variant", "record"])
newest = everything.groupby(everything["record"].str.extract(r"-(\d\d)-")[0])["record"].max()
sweep = everything[everything["record"] == newest["07"]]
ladders = everything[everything["record"] == newest["10"]]
SHAPES = list(dict.fromkeys(sweep["variant"]))
times = sweep.pivot_table(
    index=["workload", "variant"], columns="impl", values="time_us_p50", sort=False
)
times["gain"] = times["v1_tiled"] / times["v2_tma"]
assert len(times) == len(SHAPES) * len(WORKLOADS), "the sweep lacks a shape"
assert (times["gain"] > 1).all(), "the text says that every shape gains"
figures.glue_number("v2_gain_min", times["gain"].min())
figures.glue_number("v2_gain_max", times["gain"].max())


def kernel_us(impl: str, name: str) -> float:
    return results.one(ladders, impl=impl, workload=name, scope="kernel")["time_us_p50"]


figures.glue_number("v2_over_cudnn_self", kernel_us("v2_tma", SELF) / kernel_us("cudnn", SELF))


def code(text: str, language: str = "python") -> Markdown:
    return Markdown(f"```{language}\n{text.rstrip()}\n```")


def docstring_tables(module) -> list[str]:
    """The Markdown tables of a module's docstring: roles, barriers."""
    return re.findall(r"(?:^\|.*\n)+", inspect.getdoc(module) + "\n", flags=re.MULTILINE)


# %% [markdown]
# ## What stays, what changes
#
# | | {doc}`v1 <v1_tiled>` | v2 |
# |:--|:--|:--|
# | work split | a program owns `BLOCK_M` rows of one head | the same |
# | data path | every thread computes pointers and predicates | one thread asks for a tile |
# | synchronisation | groups of copies, then block-wide barriers | barriers that count bytes |
#
# ## A descriptor
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

# %% tags=["remove-cell"]
assert from_plain[length:].isnan().all()
assert from_ragged[:, 0].tolist() == [1.0, 2.0, 3.0, 0, 0, 0, 0, 0]

# %% [markdown]
# The activation cannot repair this. A key row that does not exist gives a probability of 0 at best,
# and the second product multiplies it by a row of V: 0 × NaN = NaN. A descriptor for each sequence
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
# Python integers do not wrap, so one can watch it happen. Two bytes per element, four heads of 128,
# the sequence from above:

# %%
BOUND, ELEMENT, ROW = 2**30, 2, 4 * 128
addresses = []
for i in (0, 1, 2, 3):
    clipped = BOUND - length + i
    offset = ELEMENT * ((start + length) * ROW + clipped * ROW + BOUND * (2**34 - ROW))
    addresses.append(
        {
            "row": i,
            "coordinate": f"{clipped:,}",
            "inside": clipped < BOUND,
            "sum": f"{offset:,}",
            "modulo 2^64": offset % 2**64,
            "row of the tensor": offset % 2**64 // (ELEMENT * ROW),
        }
    )
figures.show_table(pd.DataFrame(addresses).astype(str))

# %% tags=["remove-cell"]
assert [int(a["row of the tensor"]) for a in addresses] == [5, 6, 7, 8]
assert [a["inside"] for a in addresses] == [True, True, True, False]
assert ragged.BOUND.value == BOUND
figures.glue_number("v2_any", ragged.ANY)

# %% [markdown]
# Row 3 would be row 8 of the tensor, the neighbour's, but its coordinate is outside. With the head
# and the position inside the head, that makes five dimensions, all that a descriptor has. The price
# is a limit: a packed tensor may have at most {glue:text}`v2_any:,.0f` rows. That the hardware
# wraps is an observation, not a promise of the manual; the check before every timing would notice
# if it did not.
#
# This is all of the device code:

# %% tags=["remove-input"]
code(inspect.getsource(load_rows.fn) + "\n\n" + inspect.getsource(store_rows.fn))

# %% [markdown]
# The same coordinates store. Eight rows of 7, written to the sequence of three:


# %%
@triton.jit
def store_tail(desc, start, length):
    store_rows(desc, start, length, 0, 0, tl.full([8, 16], 7.0, tl.bfloat16))


target = torch.zeros(total, 1, 16, dtype=torch.bfloat16)
emulator.run(store_tail, (1,), ragged_descriptor(target, 8), start, length)
print(target[:, 0, 0].int().tolist())

# %% tags=["remove-cell"]
assert target[:, 0, 0].tolist() == [7.0 if start <= i < start + length else 0 for i in range(total)]

# %% [markdown]
# ## Prediction
#
# TMA moves no byte less and saves no FLOP. The bracket of {doc}`../measuring/roofline` stays where
# it was: {glue:text}`v2_lower_us:,.0f` to {glue:text}`v2_upper_us:,.0f` µs for gdpa-self-full-1024
# (modelled, from measured ceilings). What may change is what the warps do besides, and that can be
# counted without a GPU, in the machine code:


# %% tags=["hide-input"]
def compile_for_hopper(impl: str, shape: str):
    """`impl` at BLOCK_M x BLOCK_N x num_warps x num_stages, as gdpa-self launches it."""
    block_m, block_n, num_warps, num_stages = map(int, shape.split("x"))
    kernel = v1_tiled.tiled_kernel if impl == "v1_tiled" else v2_tma.tma_kernel
    strides = dict.fromkeys(("Q_STRIDES", "K_STRIDES", "V_STRIDES", "OUT_STRIDES"), (512, 128, 1))
    constants = {
        "NUM_HEADS": 4, "GROUP": 1, "HEAD_DIM": 128, "ACTIVATION": "gelu_tanh", "CAUSAL": False,
        "WINDOW": None, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": 128, **strides,
    }  # fmt: skip
    types = {"max_seqlen_q": "i32", "scale": "fp32", "output_scale": "fp32"}
    for name in kernel.arg_names:
        if name.endswith("_desc"):
            rows = block_m if name in ("q_desc", "out_desc") else block_n
            types[name] = f"tensordesc<bf16[1, 1, 1, {rows}, 128]>"
        elif name.endswith("_ptr"):
            types[name] = "*i32" if name.startswith("cu_") else "*bf16"
    place = {name: i for i, name in enumerate(kernel.arg_names)}
    aligned = [n for n in place if n.endswith("_ptr") or n == "max_seqlen_q"]
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in place},
        constexprs={(place[name],): v for name, v in constants.items() if name in place},
        attrs={(place[name],): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


# %% tags=["hide-input"]
def machine_code(impl: str, shape: str) -> dict:
    """What the compiled kernel needs, counted in its instructions; nothing runs."""
    block_m, block_n, num_warps, _ = map(int, shape.split("x"))
    compiled = compile_for_hopper(impl, shape)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        usage, sass = (
            subprocess.run(
                [tools / tool, *options, file.name], capture_output=True, text=True, check=True
            ).stdout
            for tool, *options in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c", "-ndf"))
        )
    registers, stack = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))
    labels, instructions, loops = {}, [], []
    for line in sass.splitlines():
        if label := re.match(r"\.(L_x_\d+):", line.strip()):
            labels[label[1]] = len(instructions)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(instruction[1])
            back = re.search(r"BRA.*?(L_x_\d+)", instruction[1])
            if back and back[1] in labels:
                loops.append(instructions[labels[back[1]] :])
    loop = max(loops, key=lambda body: (sum("HGMMA" in i for i in body), -len(body)))
    return {
        "impl": impl,
        "shape": shape,
        "registers": registers,
        "spilled": stack,
        "loop": len(loop),
        "issue_cycles": len(loop) * num_warps // 4,
        "tensor_cycles": 4 * block_m * block_n * 128 // 4096,
        "resident": min(
            65536 // (32 * num_warps * -(-registers // 8) * 8),
            228 * 1024 // (compiled.metadata.shared + 1024),
        ),
    }


compiled = pd.DataFrame(
    machine_code(impl, shape) for shape in COUNTED for impl in ("v1_tiled", "v2_tma")
)
columns = ["shape", "impl", "registers", "spilled", "loop", "issue_cycles", "tensor_cycles"]
figures.show_table(compiled[columns])

# %% tags=["remove-cell"]
count = compiled.set_index(["impl", "shape"])
machine = system.load(Path(data_dir) / "systems" / f"{sweep['system'].iloc[0]}.json")
assert (count["resident"] == 2).all(), "the text says that two programs share an SM"
RESIDENT = 2 * machine.num_sms


def most(shape: str) -> float:
    """The gain if copies were all that differs and nothing overlapped on an SM."""
    before, after = count.loc["v1_tiled", shape], count.loc["v2_tma", shape]
    busy = before["tensor_cycles"]
    return (busy + before["issue_cycles"]) / (busy + after["issue_cycles"])


for key, shape in zip(("ours", "wide", "small"), COUNTED, strict=True):
    figures.glue_number(f"v2_most_{key}", most(shape))
    for impl, column in product(MODULES, ("registers", "spilled", "loop")):
        figures.glue_number(f"v2_{column}_{impl[:2]}_{key}", count.loc[(impl, shape), column])
assert most(OURS) < 1.02 < most(WIDE) < most(SMALL) < 1.2, "the counts have changed"
assert count.loc[("v1_tiled", WIDE), "spilled"] > 0, "the text says that v1 spills here"
assert (count.drop(("v1_tiled", WIDE))["spilled"] == 0).all(), "the text says that only v1 spills"
run = record.load(Path(data_dir) / "records" / f"{newest['10']}.json")
ceilings = results.ceilings(run)
bracket = roofline.bracket(workload(SELF), "forward", ceilings)
figures.glue_number("v2_lower_us", bracket.lower_us)
figures.glue_number("v2_upper_us", bracket.upper_us)
inside = times["gain"].unstack("workload")
for key, shape in zip(("ours", "wide", "small"), COUNTED, strict=True):
    assert inside.loc[shape].min() > most(shape), "the text says that the bracket is exceeded"
    figures.glue_number(f"v2_gain_{key}_min", inside.loc[shape].min())
    figures.glue_number(f"v2_gain_{key}_max", inside.loc[shape].max())

# %% tags=["remove-input"]
figures.source(
    "modelled",
    f"compiled for sm_90a by triton {triton.__version__} when this page was built, and counted. "
    "spilled: bytes of stack per thread; loop: instructions of a warp for one block of keys; "
    "issue_cycles: loop x num_warps / 4 schedulers; tensor_cycles: 4 x BLOCK_M x BLOCK_N x 128 "
    "FLOPs at 4,096 per cycle.",
)

# %% [markdown]
# A shape is `BLOCK_M` × `BLOCK_N` × `num_warps` × `num_stages`. At 128x64x4x2 the accumulator and
# the scores take 192 registers of each thread, and v1 keeps its pointers beside them: it needs
# {glue:text}`v2_registers_v1_wide:.0f`, the most there are, and {glue:text}`v2_spilled_v1_wide:.0f`
# bytes of stack. v2 fits, and its loop has {glue:text}`v2_loop_v2_wide:.0f` instructions instead of
# {glue:text}`v2_loop_v1_wide:.0f`. At v1's own shape, 128x32x8x4, there was room:
# {glue:text}`v2_loop_v1_ours:.0f` instructions become {glue:text}`v2_loop_v2_ours:.0f`.
#
# An SM has four schedulers, each issues one instruction per cycle, and two programs share it. If
# these two overlap perfectly, the tensor cores are the limit and fewer instructions gain nothing.
# If nothing overlaps, the cycles add up. So v2 should be between 1.00 and
# {glue:text}`v2_most_wide:.2f` times as fast at 128x64x4x2, between 1.00 and
# {glue:text}`v2_most_small:.2f` at 64x64x4x2, and just as fast at 128x32x8x4. More would mean that
# issue slots are not what TMA saves.
#
# ## What changed in the code

# %% tags=["remove-input"]
body = inspect.getsource(v2_tma.tma_kernel.fn)
code(inspect.cleandoc(body[body.index("    q = load_rows") :]))

# %% tags=["remove-input"]
Markdown(
    "\n".join(
        (
            "````{admonition} The whole difference between v1_tiled.py and v2_tma.py",
            ":class: dropdown",
            "```diff",
            ladder.diff("v2_tma", context=1).rstrip(),
            "```",
            "````",
        )
    )
)

# %% tags=["remove-input"]
Markdown("\n".join(docstring_tables(v2_tma)))

# %% [markdown]
# No mask and no pointer is left. Everything around the loop, one row block of one head per program,
# is v1's.
#
# ## Is it right?
#
# Here runs the whole kernel, in the emulator, on three short sequences. Then everything that does
# not belong to the one in the middle becomes NaN:

# %%
lengths = (37, 50, 9)
make = torch.Generator().manual_seed(2025)
q, k, v = (torch.randn(sum(lengths), 1, 32, generator=make).bfloat16() for _ in range(3))
ends = cu_seqlens(lengths, "cpu")
own = slice(lengths[0], lengths[0] + lengths[1])


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    alone = torch.full_like(tensor, float("nan"))
    alone[own] = tensor[own]
    return alone


with emulator.enabled():
    out = gdpa(q, k, v, ends, ends, 50, 50, impl="v2_tma")
    among_nan = gdpa(*map(poisoned, (q, k, v)), ends, ends, 50, 50, impl="v2_tma")
exact = gdpa(q.double(), k.double(), v.double(), ends, ends, 50, 50, impl="reference")
same = gdpa(q, k, v, ends, ends, 50, 50, impl="reference")
comparison = testing.compare(name="out", actual=out, expected=exact, baseline=same)
print(comparison)
print("bitwise equal among NaN:", torch.equal(out[own], among_nan[own]))

# %% tags=["remove-cell"]
assert torch.equal(out[own], among_nan[own]) and comparison.passed
checked = next(r for r in run.rows if (r.workload, r.impl, r.scope) == (SELF, "v2_tma", "kernel"))
figures.glue_number("v2_error", checked.error.max_abs)
figures.glue_number("v2_budget", checked.error.budget)
figures.glue_number("v2_elements", checked.error.elements / 1e6)

# %% [markdown]
# The test is `test_neighbours_do_not_leak` in `tests/gdpa/test_forward.py`, with infinities and
# very large values as well. On the GPU the record of gdpa-self-full-1024 says: largest error
# {glue:text}`v2_error:.2f` against double precision, allowed {glue:text}`v2_budget:.2f`, over
# {glue:text}`v2_elements:.0f` million elements (measured). Nothing normalises the sum over 1,024
# keys, which is why these numbers are large.
#
# ## Measurement: the same tile, with pointers and with TMA

# %% tags=["remove-input"]
# | name: fig-v2-shapes
# | caption: >
# |   v1 and v2 with equal tiles (BLOCK_M x BLOCK_N x num_warps x num_stages), forward. Dashed: the
# |   roofline of the workload. Error bars: p20 to p80. Numbers: how many times as fast v2 is.
# | alt: >
# |   Three panels of paired horizontal bars, TFLOP/s, one panel for each workload. In all 24 pairs
# |   v2 is faster than v1; the largest ratios are at 128x64x4x2 and 64x128x4x2. All bars stay well
# |   below the dashed roofline.
with figures.style():
    chart, axes = figures.subplots(1, 3, width=8.4, height=4.8, sharey=True)
    for axis, name in zip(axes, WORKLOADS, strict=True):
        rows = sweep[sweep["workload"] == name].set_index(["variant", "impl"])
        ceiling = float((100 * rows["tflops"] / rows["percent_of_roofline"]).iloc[0])
        for place, shape in enumerate(SHAPES):
            for shift, impl in ((-0.2, "v1_tiled"), (0.2, "v2_tma")):
                row = rows.loc[(shape, impl)]
                rate = row["tflops"]
                low, high = (
                    rate * row["time_us_p50"] / row[f"time_us_{q}"] for q in ("p80", "p20")
                )
                axis.barh(
                    place + shift,
                    rate,
                    0.36,
                    color=figures.colour(impl),
                    xerr=[[rate - low], [high - rate]],
                    error_kw={"ecolor": "#787878", "elinewidth": 1, "capsize": 1.5},
                )
                if place == 0:
                    axis.annotate(impl, (6, place + shift), color="white", va="center", fontsize=8)
            axis.annotate(
                f"{inside.loc[shape, name]:.2f}",
                (high, place + 0.2),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
            )
        axis.axvline(ceiling, color="#787878", linewidth=1.2, linestyle=(0, (4, 2)))
        axis.set_xlim(0, ceiling * 1.05)
        axis.set_title(name)
        axis.set_xlabel("TFLOP/s")
        axis.grid(visible=False, axis="y")
        axis.grid(visible=True, axis="x")
        axis.tick_params(axis="y", length=0)
    axes[0].set_yticks(range(len(SHAPES)), SHAPES)
    axes[0].set_ylim(len(SHAPES) - 0.4, -0.6)
display(chart)

# %% tags=["remove-input"]
figures.save_csv(sweep, "v2-shapes")
figures.provenance(sweep, csv="v2-shapes")

# %% tags=["remove-cell"]
average = inside.mean(axis=1).sort_values(ascending=False)
figures.glue_text("v2_most_gain_1", average.index[0])
figures.glue_text("v2_most_gain_2", average.index[1])
assert set(average.index[:2]) == {WIDE, "64x128x4x2"}, "the text names the shapes that gain most"
best = times.groupby("workload", sort=False)[["v1_tiled", "v2_tma"]].idxmin()
for name in WORKLOADS:
    default = v2_tma.default_config(make_inputs(workload(name), device="meta").batch())
    shape = f"{default.BLOCK_M}x{default.BLOCK_N}x{default.num_warps}x{default.num_stages}"
    assert best.loc[name, "v2_tma"][1] == shape, f"the default for {name} is not the fastest"
fastest = times.groupby("workload", sort=False)[["v1_tiled", "v2_tma"]].min()
gain_best = fastest["v1_tiled"] / fastest["v2_tma"]
figures.glue_number("v2_gain_best_min", gain_best.min())
figures.glue_number("v2_gain_best_max", gain_best.max())

# %% [markdown]
# Every shape gains, on every workload. The two that gain most are {glue:text}`v2_most_gain_1` and
# {glue:text}`v2_most_gain_2`; at the first of them the count found that v1 spills, and
# {numref}`ex-v2-shape` asks about the second. Each kernel at its best shape:
# {glue:text}`v2_gain_best_min:.2f` to {glue:text}`v2_gain_best_max:.2f`.
#
# All three brackets are exceeded: {glue:text}`v2_gain_ours_min:.2f` to
# {glue:text}`v2_gain_ours_max:.2f` at 128x32x8x4, {glue:text}`v2_gain_wide_min:.2f` to
# {glue:text}`v2_gain_wide_max:.2f` at 128x64x4x2, {glue:text}`v2_gain_small_min:.2f` to
# {glue:text}`v2_gain_small_max:.2f` at 64x64x4x2. Issue slots are not what TMA saves, or not all of
# it.
#
# ## The surprise: an instruction costs more than a cycle, and a tile has ends
#
# gdpa-self-full-256 and gdpa-self-full-1024 have the same tiles with four times the keys, so what a
# tile costs once can be told from what it costs per key. {glue:text}`v2_resident:.0f` programs are
# resident, a tile takes {glue:text}`v2_resident:.0f` × time / tiles, and a line through the two
# workloads gives:

# %% tags=["remove-input"]
figures.glue_number("v2_resident", RESIDENT)


def tile_us(impl: str, shape: str, name: str) -> float:
    """Time of one tile while RESIDENT programs run."""
    work = workload(name)
    block_m = int(shape.split("x")[0])
    tiles = work.num_heads_q * sum(-(-length // block_m) for length in work.seqlens_q)
    return RESIDENT * times.loc[(name, shape), impl] / tiles


def line(impl: str, shape: str) -> tuple[float, float]:
    """(us per tile, us per 64 keys): the line through 256 and 1,024 keys."""
    short, long = (tile_us(impl, shape, name) for name in (SELF_256, SELF))
    slope = (long - short) / (1024 - 256) * 64
    return short - slope * 256 / 64, slope


lines = {(shape, impl): line(impl, shape) for shape in COUNTED for impl in MODULES}
parts = []
for shape in COUNTED:
    (once_1, slope_1), (once_2, slope_2) = (lines[shape, impl] for impl in MODULES)
    loop_1, loop_2 = (count.loc[(impl, shape), "loop"] for impl in MODULES)
    parts.append(
        {
            "shape": shape,
            "us per tile, v1": once_1,
            "v2": once_2,
            "us per 64 keys, v1": slope_1,
            "v2 ": slope_2,
            "times as fast": slope_1 / slope_2,
            "times the instructions, v1": loop_1 / loop_2,
        }
    )
parts = pd.DataFrame(parts)
figures.show_table(parts)

# %% tags=["remove-input"]
figures.provenance(sweep)

# %% tags=["remove-cell"]
faster, fewer = parts["times as fast"], parts["times the instructions, v1"]
assert (abs(faster / fewer - 1) < 0.08).all(), "the text says that time follows instructions"
once = parts.set_index("shape")[["us per tile, v1", "v2"]].set_axis(["v1", "v2"], axis=1)
assert (once.loc[[OURS, WIDE], "v2"] < 0.8 * once.loc[[OURS, WIDE], "v1"]).all()
assert abs(once.loc[SMALL, "v2"] / once.loc[SMALL, "v1"] - 1) < 0.2, "small tiles: no gain"
for key, shape in (("ours", OURS), ("wide", WIDE)):
    for name in ("v1", "v2"):
        figures.glue_number(f"v2_once_{name}_{key}", once.loc[shape, name])
figures.glue_number("v2_follow_small", faster.iloc[2])
figures.glue_number("v2_fewer_small", fewer.iloc[2])
for key, shape in (("wide", WIDE), ("small", SMALL)):
    saved_us = lines[shape, "v1_tiled"][1] - lines[shape, "v2_tma"][1]
    loops = [count.loc[(impl, shape), "loop"] for impl in MODULES]
    cycles = saved_us * machine.max_sm_clock_mhz / (2 * (loops[0] - loops[1]))
    figures.glue_number(f"v2_cycles_{key}", cycles)
    assert cycles > 1.4, "the text says that an instruction costs more than its issue slot"
(once_2, slope_2), (once_4, slope_4) = lines[OURS, "v2_tma"], lines[WIDE, "v2_tma"]
figures.glue_number("v2_slope_v2_wide", slope_4)
crossing = 64 * (once_4 - once_2) / (slope_2 - slope_4)
figures.glue_number("v2_crossing", crossing)
assert 256 < crossing < 1024, "neither shape may win everywhere"
spread = sweep[(sweep["workload"] == SELF) & sweep["variant"].isin((OURS, WIDE))]
figures.glue_number("v2_spread", 50 * (spread["time_us_p80"] / spread["time_us_p20"] - 1).max())
flops_of_block = 4 * 128 * 64 * 128
floor = RESIDENT * flops_of_block / (ceilings.tflops * 1e6)
figures.glue_number("v2_floor", floor)
figures.glue_number("v2_floor_share", 100 * floor / slope_4)
other = everything[everything["record"] == newest["09"]]
by_record = [
    kernel_us("v2_tma", name)
    / results.one(other, impl="v2_tma", variant="hardware", workload=name)["time_us_p50"]
    for name in ("gdpa-self-half-dense-512", "gdpa-self-half-jagged-512")
]
figures.glue_number("v2_at_512", 100 * (1 - max(by_record)))
assert max(by_record) < 1, "the text says that 128x32x8x4 is faster at 512 keys"
same = [results.one(ladders, impl="v2_tma", workload=SELF, scope="kernel"), None]
same[1] = results.one(sweep, impl="v2_tma", workload=SELF, variant=WIDE)
figures.glue_number("v2_drift", 100 * (same[1]["time_us_p50"] / same[0]["time_us_p50"] - 1))

# %% [markdown]
# The last two columns agree. Per key, v2 is as many times faster as its loop has fewer
# instructions, at 64x64x4x2 {glue:text}`v2_follow_small:.2f` with {glue:text}`v2_fewer_small:.2f`,
# as if the tensor cores took no time at all. An instruction that went saved its scheduler
# {glue:text}`v2_cycles_wide:.1f` cycles at 128x64x4x2 and {glue:text}`v2_cycles_small:.1f` at
# 64x64x4x2, counted at the highest clock. The likely reason: only two warps share a scheduler in
# these shapes, and while one waits for a result there is rarely another to take the slot.
#
# At v1's own shape the loop gained nothing, as its count said, and *all* of the gain is at the two
# ends of a tile: {glue:text}`v2_once_v1_ours:.1f` µs become {glue:text}`v2_once_v2_ours:.1f` µs,
# and {glue:text}`v2_once_v1_wide:.1f` become {glue:text}`v2_once_v2_wide:.1f` at 128x64x4x2. There,
# v1 carries Q through registers into shared memory and shuffles the output back into rows before
# every thread stores its part; v2 asks for either in one instruction. With 64 rows the ends did not
# become shorter; why not, the record does not say.
#
# The lines also explain the two defaults. 128x64x4x2 costs more per tile and less per key; they
# cross at {glue:text}`v2_crossing:.0f` keys, and `default_config` changes at 512. (At 512 keys
# 128x32x8x4 is still at least {glue:text}`v2_at_512:.1f` % faster, comparing two records.) Do not
# read more into them: each goes through two points, and the times at 1,024 tokens scatter by
# ±{glue:text}`v2_spread:.0f` %. The same kernel was {glue:text}`v2_drift:.0f` % slower in this
# sweep than in the record of the ladder below, among other neighbours; {doc}`../measuring/protocol`
# shows that a long kernel remembers its company. Times are compared within one record.
#
# ## Measurement: the ladder so far

# %% tags=["remove-input"]
# | name: fig-v2-ladder-self
# | caption: >
# |   The ladder up to v2 on gdpa-self-full-1024, forward. Hollow bars: what could be installed
# |   instead.
# | alt: >
# |   Horizontal bars of TFLOP/s. v2 is somewhat faster than v1 and than every other kernel except
# |   cuDNN, which lies between v2 and the dashed line of the roofline. Eager PyTorch and
# |   torch.compile are far behind.
RUNGS = ["v0_eager", "v1_tiled", "v2_tma"]
SHOWN = ladders[~ladders["impl"].isin(["v3_persistent"])]
figures.figure_ladder(SHOWN, SELF, RUNGS, "v2_tma")

# %% tags=["remove-input"]
shown = SHOWN[(SHOWN["workload"] == SELF) & (SHOWN["scope"] == "kernel")]
figures.save_csv(shown, "v2-ladder-self")
figures.provenance(shown, csv="v2-ladder-self")

# %% tags=["remove-input"]
# | name: fig-v2-ladder-cross
# | caption: >
# |   The ladder up to v2 on gdpa-cross-full-1024 (256 keys for 1,024 queries), forward.
# | alt: >
# |   Horizontal bars of TFLOP/s. All kernels are further from the dashed roofline than in the
# |   figure before; cuDNN is again the only one ahead of v2.
figures.figure_ladder(SHOWN, CROSS, RUNGS, "v2_tma")

# %% tags=["remove-input"]
shown = SHOWN[(SHOWN["workload"] == CROSS) & (SHOWN["scope"] == "kernel")]
figures.save_csv(shown, "v2-ladder-cross")
figures.provenance(shown, csv="v2-ladder-cross")

# %% tags=["remove-cell"]
kernels = ladders[(ladders["scope"] == "kernel") & (ladders["failure"] == "")]
wide_table = kernels.pivot_table(index="workload", columns="impl", values="time_us_p50")
dense = wide_table.dropna(subset="cudnn")
jagged = wide_table[wide_table["cudnn"].isna()]
behind = dense["v2_tma"] / dense["cudnn"]
peers = ["fa2_varlen", "cudnn_varlen", "torch_compile"]
ahead = jagged[peers].min(axis=1) / jagged["v2_tma"]
assert (behind > 1).all(), "the text says that cuDNN is ahead on all dense batches"
assert (ahead > 1).all(), "the text says that v2 is ahead on all jagged batches"
for name, values in (("v2_behind", behind), ("v2_ahead", ahead)):
    figures.glue_number(f"{name}_min", values.min())
    figures.glue_number(f"{name}_max", values.max())
figures.glue_number("v2_dense", len(dense))
figures.glue_number("v2_jagged", len(jagged))
v2_self = results.one(kernels, impl="v2_tma", workload=SELF)
figures.glue_number("v2_self_us", v2_self["time_us_p50"])
figures.glue_number("v2_self_percent", v2_self["percent_of_roofline"])
figures.glue_number(
    "v2_cudnn_percent", results.one(kernels, impl="cudnn", workload=SELF)["percent_of_roofline"]
)

# %% [markdown]
# v2 takes {glue:text}`v2_self_us:,.0f` µs on gdpa-self-full-1024,
# {glue:text}`v2_self_percent:.0f` % of the roofline. cuDNN reaches
# {glue:text}`v2_cudnn_percent:.0f` %, and it computes a softmax besides. On all
# {glue:text}`v2_dense:.0f` dense workloads it is ahead,
# {glue:text}`v2_behind_min:.2f` to {glue:text}`v2_behind_max:.2f` times as fast as v2. Its source
# is closed; open kernels of its class, such as FlashAttention-3, give different warps different
# jobs {cite}`shah2024flashattention3`. That is the gap that the later rungs have to close, from
# `v4_warp_specialized` on ({doc}`results`). On the {glue:text}`v2_jagged:.0f` jagged workloads
# this cuDNN kernel cannot run, and v2 is {glue:text}`v2_ahead_min:.2f` to
# {glue:text}`v2_ahead_max:.2f` times as fast as the best peer that can.
#
# ## Limits of this rung
#
# For 64 keys of a tile the measured matrix rate would need {glue:text}`v2_floor:.2f` µs; v2 takes
# {glue:text}`v2_slope_v2_wide:.2f` µs, so even an endless sequence would stay at
# {glue:text}`v2_floor_share:.0f` %. The same warps wait for a copy, issue the products and evaluate
# the activation, one after the other. Only a second program on the SM fills the gaps, and nobody
# arranges that it does so at the right time. And in a half-full batch nearly half of the programs
# find that their rows do not exist. {doc}`v3_persistent` asks what these cost.
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
# The product is the same, so the addresses would be right. But coordinates are signed 32-bit
# integers, and `BOUND` itself is used as one: $2^{31}$ does not fit. In the other direction
# $2^{29}$ and $2^{35} - s$ elements of two bytes are fine; the stride of a TMA dimension must stay
# below $2^{40}$ bytes.
# :::
#
# :::{exercise} A shape of your own
# :label: ex-v2-shape
#
# Call `machine_code` with 64x128x4x2 for both kernels. Does the loop explain why this shape gains
# so much? *(code, ten minutes, no GPU)*
# :::
#
# :::{solution} ex-v2-shape
# :class: dropdown
#
# v1 spills here too, and its loop lost even more instructions than at 128x64x4x2. The bracket, with
# the tensor cycles of 64 × 128 keys, is exceeded again, and the ratio of the instructions is again
# the better guess.
# :::
#
# :::{exercise} A tensor that is too long
# :label: ex-v2-long
#
# A packed tensor may have at most {glue:text}`v2_any:,.0f` rows, and 2 GB is reached much earlier.
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
# - With the same tile TMA gained {glue:text}`v2_gain_min:.2f` to {glue:text}`v2_gain_max:.2f`. The
#   time per key fell with the number of instructions, not with the issue slots that they take.
# - Freed registers pay where they allow another tile: short keys and long keys now have different
#   best shapes.
