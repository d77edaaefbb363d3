# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: false
# ---

# %% [markdown]
# # v1 backward: seven products
#
# Five products are necessary. What do two more buy?
#
# :::{admonition} In this chapter
# - Two kernels. One owns keys and sums dK and dV, the other owns queries and sums dQ. Each writes
#   what it owns once: no atomics, no fp32 buffer, no pass over it, and the same bits in every run.
#   The price is that scores and dP are computed twice.
# - It is the rung for everything: masks, grouped heads, a shared q, one activation for each head,
#   head_dim 16 to 256, three dtypes, any strides.
# - On gdpa-self-full-1024 it makes {glue:text}`seven_rate:.0f` useful TFLOP/s,
#   {glue:text}`seven_percent:.0f` % of the roofline. We had predicted {glue:text}`seven_least:.0f`
#   to {glue:text}`seven_most:.0f`: **{glue:text}`seven_verdict_1`**. FlashAttention-2 takes
#   {glue:text}`seven_fa2_least:.2f` to {glue:text}`seven_fa2_most:.2f` times its time, over all
#   workloads.
# - Nothing is transposed in registers. Some compilers got that wrong, and the one that we use does
#   it slowly.
# :::

# %% tags=["remove-cell"]
import difflib
import inspect
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
import triton
from IPython.display import Markdown, display
from matplotlib.patches import Rectangle

from gdpa_kernels import emulator, gdpa
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.gdpa import derivatives, reference, v1_tiled, v1_tiled_backward
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.v1_tiled_backward import Config, Tile
from gdpa_kernels.measuring import baselines, compile_check, system, testing
from gdpa_kernels.measuring.inputs import cu_seqlens
from gdpa_kernels.measuring.record import ROOT
from gdpa_kernels.measuring.workload import FIGURES, workload
from gdpa_kernels.report import figures, results
from gdpa_kernels.report.house import INK
from gdpa_kernels.report.studies import changed

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
IMPL = "v1_tiled_backward"
SELF, CROSS = "gdpa-self-full-1024", "gdpa-cross-full-2048"
HEAD_DIM = 128
GRADIENTS = ("dq", "dk", "dv")
VERDICT = {True: "kept", False: "broken"}
PREDICTED = (200, 260)  # useful TFLOP/s on SELF
KEYS, QUERIES = Config().keys, Config().queries


def glue(name: str, value: float) -> None:
    figures.glue_number(f"seven_{name}", value)


def glue_word(name: str, value: str) -> None:
    figures.glue_text(f"seven_{name}", value)


def code(text: str, language: str = "python") -> Markdown:
    return Markdown(f"```{language}\n{text.rstrip()}\n```")


glue("keys_keys", KEYS.BLOCK_N)

# %% [markdown]
# ## What stays, what changes
#
# This is the first backward rung; what it stands on is {doc}`forward v1 <../forward/v1_tiled>`.
#
# | | forward v1 | backward v1 |
# |:--|:--|:--|
# | kernels | one | two |
# | a program owns | rows of Q | rows of K and V; rows of Q and dO |
# | it walks over | keys | queries, of all heads of the group; keys |
# | it sums | O | dK and dV; dQ |
# | products of tiles | 2 | 4 and 3 |
# | accumulators | 1 | 2 and 1 |
# | writes | once, what it owns | the same |
# | copies, masks, tails | `cp.async`, after the activation, zeros | the same |
#
# {doc}`by_hand` ends with a conflict: dK and dV are sums over queries, dQ is one over
# keys. v1 does not resolve it. It takes both walks, one after the other:

# %% tags=["remove-input"]
# | name: fig-seven-walks
# | caption: >
# |   One head, tiles of scores, queries down and keys to the right. Left: a program of the first
# |   kernel owns the keys of a column and walks down. Right: one of the second owns the queries of
# |   a row and walks along it. Pale: done; full: now. Around the tiles: what is held (framed) and
# |   what is summed (filled).
# | alt: >
# |   Two grids of tiles. In the left one a column is pale down to a coloured tile; strips above it
# |   show K and V of that column, strips below dK and dV filled. In the right one a row is pale up
# |   to a coloured tile; strips at its left show Q and dO of that row, one at its right dQ filled.
with figures.style():
    chart, axes = figures.subplots(1, 2, width=8.0, height=4.0)
    count, at = 5, (3, 2)

    def cell(axis, x: float, y: float, w: float, h: float, **style) -> None:
        style = {"facecolor": "none", "edgecolor": INK, "linewidth": 0.7} | style
        axis.add_patch(Rectangle((x, -y - h), w, h, **style))

    own = figures.colour(IMPL)
    framed = {"edgecolor": own, "linewidth": 1.8}
    for axis, walk in zip(axes, ("keys", "queries"), strict=True):
        for i in range(count):
            for j in range(count):
                along = (j == at[1] and i < at[0]) if walk == "keys" else (i == at[0] and j < at[1])
                now = {"facecolor": own} if (i, j) == at else {}
                cell(
                    axis, j, i, 1, 1, **(now or ({"facecolor": own, "alpha": 0.3} if along else {}))
                )
        if walk == "keys":
            strips = (("K", -1.3, framed), ("V", -0.7, framed))
            strips += (
                ("dK", count + 0.2, {"facecolor": own}),
                ("dV", count + 0.8, {"facecolor": own}),
            )
            for name, y, look in strips:
                for j in range(count):
                    cell(axis, j, y, 1, 0.5, **(look if j == at[1] else {}))
                axis.text(-0.15, -y - 0.25, name, ha="right", va="center")
        else:
            strips = (("Q", -1.3, framed), ("dO", -0.7, framed))
            for name, x, look in (*strips, ("dQ", count + 0.2, {"facecolor": own})):
                for i in range(count):
                    cell(axis, x, i, 0.5, 1, **(look if i == at[0] else {}))
                axis.text(x + 0.25, 0.15, name, ha="center", va="bottom")
        axis.set_title("owns keys: dK, dV" if walk == "keys" else "owns queries: dQ")
        axis.set_xlim(-1.5, count + 1)
        axis.set_ylim(-count - 1.5, 1.5)
        axis.set_aspect("equal")
        axis.set_axis_off()
display(chart)

# %% tags=["remove-input"]
figures.source("modelled", "drawn from the loops of keys_kernel and queries_kernel")

# %% [markdown]
# | product | keys kernel | queries kernel | necessary |
# |:--|:--|:--|:--|
# | scores | $K Q^{\mathsf T}$ | $Q K^{\mathsf T}$ | once |
# | dP | $V dO^{\mathsf T}$ | $dO\,V^{\mathsf T}$ | once |
# | dV | $P^{\mathsf T} dO$ | | once |
# | dK | $dS^{\mathsf T} Q$ | | once |
# | dQ | | $dS\,K$ | once |
# | activation, slope | both | slope | once |
#
# Two products of seven are repetitions, and so is the slope. The emulator counts the products of
# tiles that the kernels ask for:


# %% tags=["remove-cell"]
def call_of(
    lengths_q, lengths_k, *, heads=1, heads_k=1, head_dim=HEAD_DIM, dtype=torch.bfloat16, seed=2025,
    shared_q=False, **options,
) -> tuple[torch.Tensor, Batch]:  # fmt: skip
    """(grad_out, batch), the arguments of `backward`: N(0, 1), a ragged batch."""
    make = torch.Generator().manual_seed(seed)

    def draw(rows: int, count: int) -> torch.Tensor:
        return torch.randn(rows, count, head_dim, generator=make).to(dtype)

    return draw(sum(lengths_q), heads), Batch(
        draw(max(lengths_q) if shared_q else sum(lengths_q), heads),
        draw(sum(lengths_k), heads_k), draw(sum(lengths_k), heads_k),
        None if shared_q else cu_seqlens(lengths_q, "cpu"), cu_seqlens(lengths_k, "cpu"),
        max(lengths_q), max(lengths_k),
        **{"activation": ("gelu_tanh",), "scale": head_dim**-0.5} | options,
    )  # fmt: skip


def emulated(module, call: tuple[torch.Tensor, Batch], **how) -> tuple[tuple, dict]:
    """(gradients, reports of the launches by kernel) of a backward in the emulator."""
    with emulator.enabled(**how) as reports:
        gradients = module.backward(*call)
    return gradients, {report.kernel: report for report in reports}


TOKENS = 512
one_head = call_of((TOKENS,), (TOKENS,))
_, reports = emulated(v1_tiled_backward, one_head)
TILE = {"keys_kernel": KEYS, "queries_kernel": QUERIES}
tensor = TOKENS * HEAD_DIM * 2  # bytes of one of the seven
made = []
for name, report in reports.items():
    tiles = (TOKENS // TILE[name].BLOCK_M) * (TOKENS // TILE[name].BLOCK_N)
    blocks = TOKENS // (KEYS.BLOCK_N if name == "keys_kernel" else QUERIES.BLOCK_M)
    made.append(
        {
            "kernel": name, "tiles of scores": tiles, "products": report.dots,
            "products for each tile": report.dots / tiles,
            "loaded, in units of q": report.bytes_loaded / tensor,
            "2 held + 2 for each of its blocks": 2 + 2 * blocks,
            "stored, in units of q": report.bytes_stored / tensor,
        }
    )  # fmt: skip
    assert abs(report.bytes_loaded / tensor - (2 + 2 * blocks)) < 0.01, "the count of loads"
made = pd.DataFrame(made)
assert made["products for each tile"].tolist() == [4, 3]
assert made["stored, in units of q"].tolist() == [2, 1], "the text: each gradient once"

# %% tags=["remove-input"]
figures.show_table(made)

# %% tags=["remove-input"]
figures.source("emulated", f"one head of {TOKENS} tokens, head_dim {HEAD_DIM}, default tiles")

# %% [markdown]
# Each gradient is stored once. What is loaded grows with the length, since every block of keys
# reads all of Q and dO, and every block of queries all of K and V; neighbours in the grid read the
# same rows at about the same time, and the L2 cache should answer, as it does forward.
#
# ## Prediction
#
# Written when nothing had run on a GPU (2026-11-21): {glue:text}`seven_least:.0f` to
# {glue:text}`seven_most:.0f` useful TFLOP/s on gdpa-self-full-1024. It was a guess by analogy;
# outside that range it is broken. Two yardsticks, which are no predictions, since they were made
# after a first run on a GPU that left no record:
#
# - *Five sevenths.* If the seven products went as fast as the two of forward v1, the useful rate
#   would be 5/7 of forward's: {glue:text}`seven_five_sevenths:.0f` TFLOP/s at 1,024 tokens. More
#   than that would mean that backward keeps the tensor cores busier than forward.
# - *The sum.* Forward v1 takes about the sum of what memory, products and activation would take one
#   after another ({doc}`../forward/v1_tiled`). The same count backward has 11 tensors instead of 7,
#   since both kernels read all inputs; seven products; and the issue slots of the activation,
#   {glue:text}`seven_slots_keys:.1f` and {glue:text}`seven_slots_queries:.1f` for a score in the
#   two kernels. Less than the sum means that something overlaps, more that the count leaves
#   something out.

# %% tags=["remove-cell"]
NAMES = list(dict.fromkeys(n for figure in FIGURES if "-bwd-" in figure for n in FIGURES[figure]))
PEERS = ("fa2_varlen", "fa4", "cudnn", "cudnn_varlen")
run_record = results.latest_record(
    data_dir, notebook="notebooks/backward/results.py", system="h200"
)
limits = results.ceilings(run_record)
machine = system.load(Path(data_dir) / "systems" / f"{run_record.system}.json")
everything = results.table(data_dir, system="h200", latest=False)
kernels = everything[
    (everything["record"] == run_record.id)
    & (everything["direction"] == "backward")
    & (everything["scope"] == "kernel")
    & (everything["variant"] == "")
].drop_duplicates(["workload", "impl"])
times, rates, shares = (
    kernels.pivot(index="workload", columns="impl", values=column).reindex(NAMES)
    for column in ("time_us_p50", "tflops", "percent_of_roofline")
)
assert times[IMPL].notna().all(), f"{run_record.id} lacks times of {IMPL}"
v1_rows = kernels[kernels["impl"] == IMPL]
assert v1_rows["correct"].astype(bool).all(), "timed without a passed check"

earlier = results.latest_record(data_dir, notebook="notebooks/forward/results.py", system="h200")
ahead = everything[
    (everything["record"] == earlier.id)
    & (everything["direction"] == "forward")
    & (everything["scope"] == "kernel")
    & (everything["variant"] == "")
    & (everything["impl"] == "v1_tiled")
].drop_duplicates("workload")
forward_rate = ahead.set_index("workload")["tflops"].reindex(NAMES)
executed = 7 / 5 * rates[IMPL]

fp32, mufu = derivatives.INSTRUCTIONS["gelu_tanh"]
# Beside value and slope a product with dP; a pack of two for P and for dS. Without the value there
# is one instruction less, and one pack.
SLOTS = {"keys": fp32 + mufu + 1 + 1.0, "queries": fp32 - 1 + mufu + 1 + 0.5}
for name, slots in SLOTS.items():
    glue(f"slots_{name}", slots)
assert sum(SLOTS.values()) / 128 > 2 * mufu / 16, "the text: issue slots are the limit"


def costs_us(name: str) -> dict[str, float]:
    """What a workload pays for in v1, in us, if each were alone on the machine."""
    w = workload(name)
    read, written = 2 * w.bytes_read("backward"), w.bytes_written("backward")
    per_us = machine.num_sms * machine.max_sm_clock_mhz
    return {
        "memory": (read + written) / limits.gbytes_per_s(read, written) / 1e3,
        "tensor cores": 7 / 5 * w.flops("backward") / limits.tflops / 1e6,
        "activation": w.num_heads_q * w.pairs * sum(SLOTS.values()) / 128 / per_us,
    }


costs = pd.DataFrame({name: costs_us(name) for name in NAMES}).T
PARTS = list(costs.columns)
costs["sum"] = costs[PARTS].sum(axis=1)
costs["v1"] = times[IMPL]
relative = costs["v1"] / costs["sum"]
glue("five_sevenths", 5 / 7 * forward_rate[SELF])
full_equal = workload("gdpa-self-full-1024")
units = full_equal.bytes("backward") / 7
assert 2 * full_equal.bytes_read("backward") + full_equal.bytes_written("backward") == 11 * units

# %% [markdown]
# ## The code
#
# The loop of the first kernel. `member` counts the query heads that share a key head; with one
# each, it is a loop of one:

# %% tags=["remove-input"]
body = inspect.getsource(v1_tiled_backward.keys_kernel.fn)
code(inspect.cleandoc("\n" + body[body.index("    for member") : body.index("    dk_ptrs")]))

# %% [markdown]
# And of the second:

# %% tags=["remove-input"]
body = inspect.getsource(v1_tiled_backward.queries_kernel.fn)
code(inspect.cleandoc("\n" + body[body.index("    for first_key") : body.index("    dq_ptrs")]))

# %% [markdown]
# `value_and_slope_per_head` gives both from one transcendental; what is not used, the compiler
# drops. Both factors wait for the end and are applied in fp32 ({doc}`by_hand`). A tail
# is loaded as zeros and needs no mask, also in the slope. Roles and barriers, from the head of the
# file:

# %% tags=["remove-input"]
docstring = inspect.getdoc(v1_tiled_backward) + "\n"
Markdown("\n".join(re.findall(r"(?:^\|.*\n)+", docstring, flags=re.MULTILINE)))

# %% tags=["remove-cell"]
before, after = (Path(module.__file__) for module in (v1_tiled, v1_tiled_backward))
lines = [path.read_text().splitlines(keepends=True) for path in (before, after)]
diff = "".join(difflib.unified_diff(*lines, before.name, after.name, n=1))
bare = [[line for line in text if line.strip()] for text in lines]
common = sum(line.startswith("  ") for line in difflib.ndiff(*bare))
glue("common", common)
glue("after_lines", len(bare[1]))

# %% tags=["remove-input"]
Markdown(
    "\n".join(
        (
            f"````{{admonition}} From forward {before.name} to {after.name}",
            ":class: dropdown",
            "```diff",
            diff.rstrip(),
            "```",
            "````",
        )
    )
)

# %% [markdown]
# {glue:text}`seven_common:.0f` of its {glue:text}`seven_after_lines:.0f` lines stand in forward v1
# as well: addresses, ranges, and the shape of a launch.
#
# **Deterministic.** A row of a gradient belongs to one program, and that adds its tiles in the
# order of a loop. Grouped heads are added by the same program, in the order of heads. With a shared
# q the second kernel writes a dQ for each sequence, in fp32, and PyTorch adds them up; a sum over
# the batch inside the kernel would need atomics or a second stage of our own. The price is a buffer
# as large as the output in fp32, in the one case that asks for it.
#
# **Only what is needed.** `needs_input_grad` reaches the launcher. Where k and v want no gradient,
# as keys and values that come from a frozen part of a model, the first kernel is not launched, and
# the other way round.
#
# ## Nothing is turned in registers
#
# The tables above say $K Q^{\mathsf T}$ in one kernel and $Q K^{\mathsf T}$ in the other. The
# textbook writes $S = Q K^{\mathsf T}$ everywhere and then `tl.dot(tl.trans(p), grad)`. That is the
# same mathematics. This variant of the first kernel does it:

# %% tags=["remove-input"]
CHANGES = (
    ("s = tl.dot(k, q.T, input_", "s = tl.dot(q, k.T, input_"),
    ("p = mask_transposed(p,", "p = mask_probabilities(p,"),
    ("slope = mask_transposed(slope,", "slope = mask_probabilities(slope,"),
    ("dv = tl.dot(p.to(grad.dtype), grad,", "dv = tl.dot(tl.trans(p.to(grad.dtype)), grad,"),
    ("            dp = tl.dot(v, grad.T,", "            dp = tl.dot(grad, v.T,"),
    (
        "dk = tl.dot((slope * dp).to(q.dtype), q,",
        "dk = tl.dot(tl.trans((slope * dp).to(q.dtype)), q,",
    ),
)  # fmt: skip
TURNED = changed(v1_tiled_backward, *CHANGES)
pair = [Path(m.__file__).read_text().splitlines(keepends=True) for m in (v1_tiled_backward, TURNED)]
code("".join(list(difflib.unified_diff(*pair, n=0))[2:]), "diff")

# %% [markdown]
# In the emulator the two agree to the last bit:

# %%
found, _ = emulated(v1_tiled_backward, one_head)
turned, _ = emulated(TURNED, one_head)
print({name: torch.equal(a, b) for name, a, b in zip(GRADIENTS, found, turned, strict=True)})

# %% tags=["remove-cell"]
assert all(map(torch.equal, found, turned))
KINDS = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32",
}  # fmt: skip


def built(module, head_dim=HEAD_DIM, dtype=torch.bfloat16, **more) -> dict:
    """The kernels of a call with 4 heads, compiled for sm_90a, and their constants, by name."""
    call = call_of((130,), (130,), heads=4, heads_k=4, head_dim=head_dim, dtype=dtype)
    with launches(run=False) as seen:
        module.backward(*call, **more)
    return {
        launch.name: (compile_check.build_launch(launch), launch.constants | launch.options)
        for launch in seen
    }


def on_an_sm(made: compile_check.Compiled, warps: int) -> int:
    """Programs that an SM holds: 65,536 registers in steps of 8, 228 KiB of shared memory."""
    registers = -(-made.registers // 8) * 8 * 32 * warps
    return min(65536 // registers, 228 * 1024 // (made.shared_bytes + 1024))


NORMAL = built(v1_tiled_backward)
compared = []
for name, module in (("K Q^T (v1)", v1_tiled_backward), ("Q K^T, turned", TURNED)):
    compiled, _ = built(module, needs=(False, True, True))["keys_kernel"]
    facts = compile_check.read(compiled)
    compared.append(
        {
            "keys kernel": name,
            "tiles turned in registers": len(re.findall(r"\btt\.trans\b", compiled.asm["ttgir"])),
            "registers": facts.registers, "bytes spilled": facts.spill_bytes,
            "shared (KiB)": facts.shared_bytes / 1024,
            **{mnemonic: facts.instructions[mnemonic] for mnemonic in ("HGMMA", "STSM", "BAR")},
        }
    )  # fmt: skip
compared = pd.DataFrame(compared)
straight, around = compared.to_dict("records")
for name, kernel in NORMAL.items():
    assert "tt.trans" not in kernel[0].asm["ttgir"], name
assert around["tiles turned in registers"] == 2, "the text: P and dS"
assert around["bytes spilled"] > straight["bytes spilled"], "the text: it does not fit"
assert "tl.dot(ds.T, k)" in (ROOT / "gdpa_kernels/gdpa/v2_fused_backward.py").read_text()
assert around["shared (KiB)"] > straight["shared (KiB)"] and around["BAR"] > straight["BAR"]
glue("turned_spills", around["bytes spilled"])
glue("spills", straight["bytes spilled"])

# %% [markdown]
# The compiler does not see it that way:

# %% tags=["remove-input"]
figures.show_table(compared)

# %% tags=["remove-input"]
figures.source(
    "modelled",
    f"kernels compiled for sm_90a, head_dim {HEAD_DIM}, bf16, triton {triton.__version__}",
)

# %% [markdown]
# *It is slower.* A Hopper tensor core takes its first operand from registers, in the arrangement in
# which it leaves results, or from shared memory. P turned fits neither, so it is written to shared
# memory and read back between two barriers, and the registers that are live meanwhile do not fit:
# {glue:text}`seven_turned_spills:.0f` bytes are spilled instead of {glue:text}`seven_spills:.0f`.
# What is turned in v1 are *loaded* tiles, `q.T` and `grad.T`; those lie in shared memory, and the
# instruction reads them either way.
#
# *It was wrong.* On Hopper, Triton compiled exactly this pattern, `tl.dot(tl.trans(x), ...)` with
# an `x` that comes from another product, to code that gives wrong results. It was reported [for
# 3.2.0](https://github.com/triton-lang/triton/issues/6124), and a library of linear attention
# traced wrong gradients in its backward kernel, and not in its forward, [to such a
# line](https://github.com/fla-org/flash-linear-attention/pull/826). It now
# [refuses](https://github.com/fla-org/flash-linear-attention/pull/983) Hopper with Triton from
# 3.4.0 to before 3.7.1. No error, no warning, a plausible gradient.
#
# Nor is an operand in registers beyond suspicion: the assembler of CUDA 12.9 may hand out its
# registers again before the tensor core [has read
# them](https://github.com/triton-lang/triton/pull/11781). The Triton that we use brings the
# assembler {glue:text}`seven_ptxas`.
# All gradients that were timed have passed their checks, which is the evidence that we have.
#
# v1 can do without turns because it has two kernels. Whoever computes dQ beside dK has to turn dS
# once, so the next rung has this very pattern ({doc}`v2_fused_backward`), and depends on a compiler
# that gets it right.
#
# ### How gradients are checked, then
#
# | what | catches | misses |
# |:--|:--|:--|
# | differences of the definition ({doc}`by_hand`) | a wrong formula | the kernels |
# | the emulator, on every change | a wrong kernel, a race, a tail, a mask | the compiler |
# | reading what was compiled | turns, spills, serialised products | wrong code |
# | the same tests on a GPU | wrong code, on the shapes of the tests | other shapes |
# | the check before each timing | wrong code, on the shape that is timed | other shapes |
#
# The emulator runs the source and not the machine code: it can never see the third kind of mistake.
# So `tests/gdpa/test_backward.py` runs on a GPU where there is one, with the same cases, and
# nothing is timed whose three gradients have not just been compared, element by element, with fp64.
# The times of this chapter were taken with PyTorch {glue:text}`seven_torch` and Triton
# {glue:text}`seven_triton`; of the {glue:text}`seven_checked:.0f` workloads the closest has
# {glue:text}`seven_closest:.0f` % of its budget.

# %% tags=["remove-cell"]
glue_word("ptxas", f"of CUDA {triton.knobs.nvidia.ptxas.version}")
glue_word("torch", machine.torch)
glue_word("triton", machine.triton)
errors = {
    row.workload: row.error for row in run_record.rows
    if (row.impl, row.scope, row.variant, row.direction) == (IMPL, "kernel", "", "backward")
}  # fmt: skip
assert set(errors) == set(NAMES) and all(error.passed for error in errors.values())
glue("checked", len(errors))
glue("closest", 100 * max(error.max_abs / error.budget for error in errors.values()))

# %% [markdown]
# ## Is it right?
#
# In the emulator, a piece of each promise. The rule is that of {doc}`../measuring/protocol`: an
# error against fp64 of at most twice that of PyTorch in the same dtype, plus one rounding.

# %%
CASES = {
    "ragged": call_of((0, 1, 63, 130), (65, 1, 0, 129)),
    "grouped, causal, window": call_of(
        (150, 3), (150, 3), heads=4, heads_k=2, head_dim=64, causal=True, window=40
    ),
    "shared q": call_of((36, 36, 36), (50, 0, 129), heads=2, heads_k=2, head_dim=64, shared_q=True),
    "one activation each, scales": call_of(
        (70,), (90,), heads=3, heads_k=3, head_dim=32, output_scale=1 / 64, scale=-0.4,
        activation=("silu", "relu", "gelu"),
    ),
    "head_dim 256, fp16": call_of((70,), (40,), head_dim=256, dtype=torch.float16),
    "head_dim 24, fp32": call_of((20, 5), (9, 40), head_dim=24, dtype=torch.float32),
}  # fmt: skip


def defined(grad_out: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv) of the definition in fp64."""
    wide = {name: getattr(batch, name).double() for name in ("q", "k", "v")}
    return reference.backward(grad_out.double(), replace(batch, **wide))


for name, call in CASES.items():
    gradients, _ = emulated(v1_tiled_backward, call)
    exact, plain = defined(*call), reference.backward(*call)
    of_budget = []
    for label, a, e, b in zip(GRADIENTS, gradients, exact, plain, strict=True):
        comparison = testing.compare(name=label, actual=a, expected=e, baseline=b)
        assert comparison.passed, f"{name}: {comparison}"
        of_budget.append(f"{label} {100 * comparison.max_abs / comparison.max_abs_budget:.0f} %")
    print(f"{name:28} of the budget: {', '.join(of_budget)}")

# %% [markdown]
# Programs in other orders, and the bits stay; a neighbour full of NaN, and the bits stay:

# %%
calm = CASES["ragged"]
expected, _ = emulated(v1_tiled_backward, calm)
for seed in (0, 1, 2):
    assert all(map(torch.equal, emulated(v1_tiled_backward, calm, schedule=seed)[0], expected))
print("three random orders of programs: the same bits")

pair_of = call_of((65, 70), (66, 40))
clean, _ = emulated(v1_tiled_backward, pair_of)
grad_out, batch = pair_of
for tensor, rows in ((grad_out, 65), (batch.q, 65), (batch.k, 66), (batch.v, 66)):
    tensor[rows:] = torch.nan
poisoned, _ = emulated(v1_tiled_backward, pair_of)
same = [torch.equal(a[:n], b[:n]) for a, b, n in zip(poisoned, clean, (65, 66, 66), strict=True)]
print(f"beside a sequence of NaN: {'the same bits' if all(same) else 'other bits'}")

# %% tags=["remove-cell"]
assert all(same) and all(x[n:].isnan().all() for x, n in zip(poisoned, (65, 66, 66), strict=True))
for name, (compiled, _) in NORMAL.items():
    mnemonics = compile_check.read(compiled).instructions
    assert not any(m.startswith(("RED", "ATOM")) for m in mnemonics), name

# %% [markdown]
# The same through autograd, from `gdpa(...)` to `.grad`, with the gradient of `out.sum()`, whose
# strides are all 0:

# %%
q, k, v = (
    torch.randn(40, heads, 64, generator=torch.Generator().manual_seed(heads))
    .bfloat16()
    .requires_grad_()
    for heads in (4, 2, 2)
)
ends = cu_seqlens((33, 0, 7), "cpu")
with emulator.enabled():
    out = gdpa(q, k, v, ends, ends, 33, 33, impl="v1_tiled", backward_impl="v1_tiled_backward")
    out.sum().backward()
wide = (x.detach().double() for x in (q, k, v))
wanted = reference.backward(
    torch.ones(40, 4, 64, dtype=torch.float64),
    Batch(*wide, ends, ends, 33, 33, activation=("gelu_tanh",), scale=0.125),
)
for name, x, right in zip(GRADIENTS, (q, k, v), wanted, strict=True):
    print(f"{name}: {((x.grad - right).abs().max() / right.abs().max()).item():.1e}")

# %% tags=["remove-cell"]
assert all((x.grad - r).abs().max() < 0.02 * r.abs().max()
           for x, r in zip((q, k, v), wanted, strict=True))  # fmt: skip

# %% [markdown]
# ## Which tile
#
# The first kernel keeps two accumulators of keys × head_dim in fp32. With
# {glue:text}`seven_keys_keys:.0f` keys, head_dim 128 and {glue:text}`seven_keys_warps:.0f` warps
# they are {glue:text}`seven_accumulators:.0f` registers of each thread, half of what a thread may
# have, before a score is computed; scores, slope and dP are
# {glue:text}`seven_scores:.0f` more each. The second has one accumulator. Compiled, with the
# default constants:

# %% tags=["remove-cell"]
threads = 32 * KEYS.num_warps
glue("keys_warps", KEYS.num_warps)
glue("accumulators", 2 * KEYS.BLOCK_N * HEAD_DIM / threads)
glue("scores", KEYS.BLOCK_M * KEYS.BLOCK_N / threads)


def fact_row(name: str, compiled, options: dict) -> dict:
    facts = compile_check.read(compiled)
    return {
        "kernel": name.removesuffix("_kernel"),
        "rows x keys": f"{options['BLOCK_M']} x {options['BLOCK_N']}",
        "warps": options["num_warps"], "stages": options["num_stages"],
        "registers": facts.registers, "bytes spilled": facts.spill_bytes,
        "shared (KiB)": facts.shared_bytes / 1024, "HGMMA": facts.instructions["HGMMA"],
        "HMMA": facts.instructions["HMMA"], "MUFU": facts.instructions["MUFU"],
        "programs on an SM": on_an_sm(facts, options["num_warps"]),
        "waits between products": "yes" if facts.serialised else "no",
    }  # fmt: skip


shapes = []
for head_dim, dtype in ((128, torch.bfloat16), (64, torch.bfloat16), (256, torch.bfloat16),
                        (128, torch.float32)):  # fmt: skip
    kernel = NORMAL if (head_dim, dtype) == (HEAD_DIM, torch.bfloat16) else built(
        v1_tiled_backward, head_dim, dtype
    )  # fmt: skip
    for name, pair in kernel.items():
        shapes.append({"head_dim": head_dim, "dtype": KINDS[dtype]} | fact_row(name, *pair))
shapes = pd.DataFrame(shapes).drop(columns="waits between products")
measured = shapes[(shapes["head_dim"] == HEAD_DIM) & (shapes["dtype"] == "bf16")]
assert (measured["HGMMA"] > 0).all() and measured["bytes spilled"].max() < 100
assert (shapes[shapes["dtype"] == "fp32"][["HGMMA", "HMMA"]] == 0).all(axis=None)
held = dict(zip(measured["kernel"], measured["programs on an SM"], strict=True))
alone = set(held.values()) == {1}
glue_word(
    "held",
    "an SM holds one program of either kernel" if alone
    else f"an SM holds {held['keys']} programs of the first and {held['queries']} of the second",
)  # fmt: skip
glue_word(
    "gaps",
    "An SM has one program, so there is no other one that could fill the gaps." if alone
    else "Few programs share an SM and could fill the gaps.",
)  # fmt: skip
assert 120 <= 2 * KEYS.BLOCK_N * HEAD_DIM / threads <= 136, "the text: half of a thread's registers"

# %% tags=["remove-input"]
figures.show_table(shapes)

# %% tags=["remove-input"]
figures.source(
    "modelled", f"ptxas and nvdisasm, sm_90a, 4 heads, gelu_tanh, triton {triton.__version__}"
)

# %% [markdown]
# At head_dim 128 {glue:text}`seven_held`. fp32 multiplies without tensor cores, on purpose: their
# tf32 has ten bits. Other tiles of the same kernels; the first line of each is the default:

# %% tags=["remove-input"]
TRIED = {
    "keys": ((64, 128, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (32, 128, 8, 2), (128, 64, 8, 2),
             (64, 128, 4, 2)),
    "queries": ((128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3), (64, 128, 4, 2)),
}  # fmt: skip
variants = []
for kernel, tile in (("keys", KEYS), ("queries", QUERIES)):
    others = [Tile(*shape) for shape in TRIED[kernel] if Tile(*shape) != tile]
    for candidate in (tile, *others):
        needs = (kernel == "queries", kernel == "keys", kernel == "keys")
        made = built(v1_tiled_backward, needs=needs, config=Config(**{kernel: candidate}))
        variants.append(fact_row(f"{kernel}_kernel", *made[f"{kernel}_kernel"]))
variants = pd.DataFrame(variants).drop(columns=["HGMMA", "HMMA", "MUFU"])
figures.show_table(variants)

# %% tags=["remove-input"]
figures.source("modelled", f"as above, head_dim {HEAD_DIM}, bf16; compiled, not measured here")

# %% tags=["remove-cell"]
by_shape = variants.set_index(["kernel", "rows x keys", "warps", "stages"])
few = by_shape.loc["keys", "64 x 128", 4, 2]
assert few["bytes spilled"] > 1000 and few["waits between products"] == "yes"
glue("few_spills", few["bytes spilled"])
two = by_shape.loc["keys", "64 x 64", 4, 2]
assert two["programs on an SM"] == 2
groups = variants["programs on an SM"] * variants["warps"] / 4
assert groups.max() == 2, "the text: two warp groups at the most"
glue("two_spills", two["bytes spilled"])

# %% [markdown]
# The limit is the registers of the first kernel, in nearly every line. {doc}`../forward/v1_tiled`
# found that the number of warp groups on an SM orders the shapes of forward. Here it is two at the
# most: eight warps of one program, or four of each of two, with 64 keys and
# {glue:text}`seven_two_spills:.0f` bytes of spills. 128 keys with four warps do not compile to
# anything useful: {glue:text}`seven_few_spills:,.0f` bytes. What leads out of this corner is not a
# better constant but other roles for the warps ({doc}`v4_warp_specialized_backward`).
#
# ## Measurement
#
# This chapter measures nothing. The times are those of {doc}`results`, where all rungs
# and peers ran on all workloads.

# %% tags=["remove-cell"]
ALL_PEERS = [peer for peer in PEERS if peer in times and times[peer].notna().any()]
over = {peer: (times[peer] / times[IMPL]).dropna() for peer in ALL_PEERS}
assert len(over["fa2_varlen"]) == len(NAMES), "FlashAttention-2 has a time everywhere"
least, most = PREDICTED
rate = rates[IMPL][SELF]
glue("rate", rate)
glue("percent", shares[IMPL][SELF])
glue("least", least)
glue("most", most)
where = "" if least <= rate <= most else ", from above" if rate > most else ", from below"
glue_word("verdict_1", VERDICT[least <= rate <= most])
glue_word("verdict_1_where", VERDICT[least <= rate <= most] + where)
glue("fa2_least", over["fa2_varlen"].min())
glue("fa2_most", over["fa2_varlen"].max())
glue("share_least", shares[IMPL].min())
glue("share_most", shares[IMPL].max())
glue("us", times[IMPL][SELF])
share_of_forward = executed / forward_rate
glue("executed", executed[SELF])
glue("forward", forward_rate[SELF])
glue("of_forward_least", share_of_forward.min())
glue("of_forward_most", share_of_forward.max())
busier = [name.removeprefix("gdpa-") for name in NAMES if share_of_forward[name] > 1]
glue("sum_least", relative.min())
glue("sum_most", relative.max())
glue("above", (relative > 1).sum())
glue("workloads", len(NAMES))
glue("sum_self", relative[SELF])


def listed(items) -> str:
    """Items as a list in a sentence."""
    items = list(items)
    return " and ".join(filter(None, (", ".join(items[:-1]), items[-1]))) if items else "none"


def standing(ratios: pd.Series) -> str:
    """How often a peer is slower than v1, and by what."""
    slower = int((ratios > 1).sum())
    return (
        f"slower than v1 on {slower} of {len(ratios)} workloads "
        f"({ratios.min():.2f} to {ratios.max():.2f} times its time)"
    )


glue_word(
    "busier",
    f"Above 1 on {listed(busier) if len(busier) < 5 else f'{len(busier)} of them'}: there backward "
    "keeps the tensor cores busier than forward."
    if busier else "Nowhere is it above 1.",
)  # fmt: skip
TITLES = {peer: baselines.BASELINES[peer].title for peer in ALL_PEERS}
glue_word("peers", "; ".join(f"{TITLES[peer]} is {standing(over[peer])}" for peer in ALL_PEERS))
later = [rung.impl for rung in ladder.BACKWARD_RUNGS if rung.impl != IMPL]
best_later = times[[impl for impl in later if impl in times]].min(axis=1)
gain = times[IMPL] / best_later
glue("later_least", gain.min())
glue("later_most", gain.max())
assert gain.max() > 1, "some later rung is faster somewhere"

# %% tags=["remove-input"]
# | name: fig-seven-peers
# | caption: >
# |   v1 and the peers on two workloads, backward: useful TFLOP/s and percent of the roofline, p20
# |   to p80. Hollow: peers, which compute softmax. Pale: what v1 executes, with its two repeated
# |   products. Dashed: the roofline.
# | alt: >
# |   Two panels of horizontal bars, one for each workload. In each, the bar of v1 is continued by a
# |   pale one that is two fifths longer; the bars of the peers are below it, and none reaches the
# |   dashed line.
with figures.style():
    chart, axes = figures.subplots(2, 1, width=7.2, height=4.6, sharex=True)
    for axis, name in zip(axes, (SELF, CROSS), strict=True):
        timed = [peer for peer in ALL_PEERS if rates[peer].notna()[name]]
        order = [IMPL, *sorted(timed, key=lambda peer, name=name: rates[peer][name])]
        ceiling = 100 * rates[IMPL][name] / shares[IMPL][name]
        axis.axvline(ceiling, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
        axis.barh(0, executed[name], 0.62, color=figures.colour(IMPL), alpha=0.3)
        for place, impl in enumerate(order):
            row = results.one(kernels, workload=name, impl=impl)
            shown = figures.colour(impl)
            ends_of = [row["tflops"] * row["time_us_p50"] / row[f"time_us_p{p}"] for p in (80, 20)]
            axis.barh(
                place, row["tflops"], 0.62, edgecolor=shown,
                color=shown if impl == IMPL else "none",
                xerr=[[max(0, row["tflops"] - ends_of[0])], [max(0, ends_of[1] - row["tflops"])]],
                error_kw={"ecolor": INK, "elinewidth": 1.2, "capsize": 2},
            )  # fmt: skip
            right = executed[name] if impl == IMPL else row["tflops"]
            axis.annotate(
                f"{row['tflops']:.0f}  {row['percent_of_roofline']:.0f} %", (right, place),
                xytext=(7, 0), textcoords="offset points", va="center", color=shown,
            )  # fmt: skip
        axis.set_yticks(range(len(order)), order)
        axis.set_ylim(len(order) - 0.4, -0.6)
        axis.grid(visible=False, axis="y")
        axis.grid(visible=True, axis="x")
        axis.tick_params(axis="y", length=0)
        axis.set_title(name)
    axes[1].set_xlim(0, 1.1 * limits.tflops)
    axes[1].set_xlabel("TFLOP/s")
display(chart)

# %% tags=["remove-input"]
drawn = kernels[kernels["impl"].isin([IMPL, *ALL_PEERS])]
figures.save_csv(drawn, "seven-peers")
figures.provenance(drawn, csv="seven-peers", data_dir=Path(data_dir))

# %% tags=["remove-input"]
overview = pd.DataFrame(
    {
        "workload": [name.removeprefix("gdpa-") for name in NAMES],
        "v1 (us)": times[IMPL].to_numpy(),
        "TFLOP/s": rates[IMPL].to_numpy(),
        "% of roofline": shares[IMPL].to_numpy(),
        "executed / forward v1": share_of_forward.to_numpy(),
        "v1 / sum of costs": relative.to_numpy(),
        **{f"{peer} / v1": over[peer].reindex(NAMES).to_numpy() for peer in ALL_PEERS},
        "v1 / best later rung": gain.to_numpy(),
    }
).round(
    {"v1 (us)": 0, "TFLOP/s": 0, "% of roofline": 0, "executed / forward v1": 2,
     "v1 / sum of costs": 2, "v1 / best later rung": 2, **{f"{p} / v1": 2 for p in ALL_PEERS}}
)  # fmt: skip
figures.show_table(overview)

# %% tags=["remove-input"]
figures.save_csv(overview, "seven-overview")
figures.provenance(drawn, csv="seven-overview", data_dir=Path(data_dir))

# %% [markdown]
# *The prediction*: {glue:text}`seven_rate:.0f` TFLOP/s at 1,024 tokens, against
# {glue:text}`seven_least:.0f` to {glue:text}`seven_most:.0f`:
# **{glue:text}`seven_verdict_1_where`**.
#
# *Five sevenths*: with the repetitions v1 executes {glue:text}`seven_executed:.0f` TFLOP/s there,
# forward v1 {glue:text}`seven_forward:.0f`; over all workloads the quotient is
# {glue:text}`seven_of_forward_least:.2f` to {glue:text}`seven_of_forward_most:.2f`.
# {glue:text}`seven_busier`
#
# *The sum*: v1 takes {glue:text}`seven_sum_least:.2f` to {glue:text}`seven_sum_most:.2f` of it, and
# more than the sum on {glue:text}`seven_above:.0f` of {glue:text}`seven_workloads:.0f` workloads.
#
# Of the roofline v1 has {glue:text}`seven_share_least:.0f` to {glue:text}`seven_share_most:.0f` %,
# over all workloads, with two products of seven thrown away. {glue:text}`seven_peers`. The peers
# compute softmax, with five products. Later rungs take what is left: the best of them is
# {glue:text}`seven_later_least:.2f` to {glue:text}`seven_later_most:.2f` times as fast.
#
# ## The surprise: where the time goes

# %% tags=["remove-input"]
# | name: fig-seven-costs
# | caption: >
# |   What memory, tensor cores and activation need one after another in v1 backward, as parts of
# |   their sum (modelled), and its measured time in the same unit (dots).
# | alt: >
# |   Sixteen horizontal bars of equal length in three parts. Memory shrinks with length, and tensor
# |   cores are the largest part but for the shortest batches. One dot for each bar marks the
# |   measured time.
with figures.style():
    chart, axis = figures.subplots(width=7.6, height=5.4)
    looks = ({"color": "none"}, {"color": INK, "alpha": 0.45}, {"color": "none", "hatch": "/////"})
    start = pd.Series(0.0, index=costs.index)
    for part, look in zip(PARTS, looks, strict=True):
        share = costs[part] / costs["sum"]
        axis.barh(range(len(costs)), share, 0.66, left=start, edgecolor=INK, label=part, **look)
        start = start + share
    axis.plot(
        relative, range(len(costs)), "o", markersize=7, color=figures.colour(IMPL),
        label="v1, measured",
    )  # fmt: skip
    axis.set_yticks(range(len(costs)), costs.index.str.removeprefix("gdpa-"))
    axis.set_ylim(len(costs) - 0.4, -0.6)
    axis.set_xlim(0, max(1.15, 1.05 * relative.max()))
    axis.grid(visible=False, axis="y")
    axis.set_xlabel("time / sum of the three costs")
    axis.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=4, fontsize=8.5)
display(chart)

# %% tags=["remove-input"]
figures.save_csv(costs.reset_index(names="workload"), "seven-costs")
figures.provenance(v1_rows, csv="seven-costs", data_dir=Path(data_dir))

# %% tags=["remove-cell"]
w = workload(SELF)
loads = {
    "keys": 2 + 2 * w.max_seqlen_k / KEYS.BLOCK_N,
    "queries": 2 + 2 * w.max_seqlen_q / QUERIES.BLOCK_M,
}
loaded = sum(loads.values()) * units
glue("l2_gb", loaded / 1e9)
glue("l2_rate", loaded / times[IMPL][SELF] / 1e6)
glue("copy_rate", limits.gbytes_per_s(4, 3) / 1e3)
side = "above" if relative[SELF] > 1.03 else "below" if relative[SELF] < 0.97 else "at"
glue_word(
    "reading",
    {
        "above": "Whatever overlaps is less than what is not in the count.",
        "at": "About the sum: as forward, hardly anything overlaps.",
        "below": "Less than the sum: something overlaps.",
    }[side],
)
glue_word(
    "l2_reading",
    "so most of it came from the L2 cache" if loaded / times[IMPL][SELF] / 1e6
    > limits.gbytes_per_s(4, 3) / 1e3 else "which memory alone could have delivered",
)  # fmt: skip

# %% [markdown]
# At 1,024 tokens v1 takes {glue:text}`seven_sum_self:.2f` times the sum.
# {glue:text}`seven_reading` The count leaves out what lies between: the products hang on chains,
# the scores before the activation and that before dV, the slope and dP before dS, dS before dK.
# {glue:text}`seven_gaps` Addresses are missing too, which each thread computes in each turn
# ({doc}`../forward/v1_tiled`). The loads are not the reason: {glue:text}`seven_l2_gb:.0f` GB in
# {glue:text}`seven_us:,.0f` µs are {glue:text}`seven_l2_rate:.1f` TB/s, against
# {glue:text}`seven_copy_rate:.1f` for a copy, {glue:text}`seven_l2_reading`.
#
# Two products of seven look like the obvious waste, {glue:text}`seven_waste:.1f` ms of
# {glue:text}`seven_ms:.1f` at the rate of the ceiling. What would it take to have them back?
# Whoever owns keys has dS in hand and could multiply it by K too, but the result belongs to
# somebody else. That is {doc}`v2_fused_backward`.

# %% tags=["remove-cell"]
glue("waste", 2 / 5 * w.flops("backward") / limits.tflops / 1e9)
glue("ms", times[IMPL][SELF] / 1e3)

# Exercise 1: write dS to memory, then a product that reads it.
ds_bytes = 2 * w.pairs * w.num_heads_q
glue("ds_gb", ds_bytes / 1e9)
glue("ds_ms", 2 * ds_bytes / limits.gbytes_per_s(1, 1) / 1e6)
glue("ds_times", ds_bytes / (3 * units))
assert (
    2 * ds_bytes / limits.gbytes_per_s(1, 1) / 1e6
    > 2 / 5 * w.flops("backward") / limits.tflops / 1e9
)

# Exercise 2: a causal batch.
starts = [first // KEYS.BLOCK_M * KEYS.BLOCK_M for first in range(0, TOKENS, KEYS.BLOCK_N)]
by_hand = sum(TOKENS - start for start in starts) / (TOKENS * len(starts))
_, masked = emulated(v1_tiled_backward, (one_head[0], replace(one_head[1], causal=True)))
kept = {name: masked[name].dots / reports[name].dots for name in reports}
for name, part in kept.items():
    glue(f"causal_{name}", 100 * part)
assert abs(kept["keys_kernel"] - by_hand) < 1e-9
assert all(0.5 < part < 0.8 for part in kept.values())
glue("causal_useful", 100 * (512 * 513 / 2) / 512**2)

# Exercise 3: few programs.
few_batch, few_keys, few_queries = 8, 256, 4096
programs = {
    "keys": few_batch * -(-few_keys // KEYS.BLOCK_N),
    "queries": few_batch * 4 * -(-few_queries // QUERIES.BLOCK_M),
}  # 4 query heads share one key head
for name, count in programs.items():
    glue(f"programs_{name}", count)
glue("sms", machine.num_sms)
assert programs["keys"] < machine.num_sms < programs["queries"]

# %% [markdown]
# ## Exercises
#
# :::{exercise} Write dS down
# :label: ex-seven-ds
#
# Let the first kernel write dS in bf16, and a second one compute $dQ = dS\,K$ from it: five
# products, deterministic. For gdpa-self-full-1024, how many GB is dS, how long do writing and
# reading it take at the rate of a copy, and how long would the two repeated products take at the
# rate of the ceiling? *(paper, ten minutes)*
# :::
#
# :::{solution} ex-seven-ds
# :class: dropdown
#
# {glue:text}`seven_ds_gb:.1f` GB, {glue:text}`seven_ds_times:.1f` times q, k and v together, and
# {glue:text}`seven_ds_ms:.1f` ms there and back; the two products take
# {glue:text}`seven_waste:.1f` ms. To compute again is cheaper, even before the memory for dS has
# been found. With few keys it is closer: dS has as many columns as there are keys.
# :::
#
# :::{exercise} What a causal mask saves
# :label: ex-seven-causal
#
# Of 512 × 512 scores {glue:text}`seven_causal_useful:.0f` % count under a causal mask. Which share
# of its products does each kernel compute, with the default tiles? Work it out from `row_range` and
# `key_range` in `masks.py`; then let the emulator count. *(paper; code, ten minutes, no GPU)*
# :::
#
# :::{solution} ex-seven-causal
# :class: dropdown
#
# A block of keys skips the tiles of queries that end before its first key; a block of queries the
# tiles of keys that begin after its last row. `Report.dots` with `causal=True` against without:
# {glue:text}`seven_causal_keys_kernel:.1f` % and {glue:text}`seven_causal_queries_kernel:.1f` %.
# The excess over half is the diagonal, where tiles are computed whole and masked, and it shrinks
# with the length.
# :::
#
# :::{exercise} Who has work?
# :label: ex-seven-few
#
# A batch of 8 sequences, 4 query heads on one key head, 256 keys and 4,096 queries each. How many
# programs does each kernel have, and how many SMs has the machine? Which kernel suffers, and how
# could it be helped without atomics? *(paper, ten minutes)*
# :::
#
# :::{solution} ex-seven-few
# :class: dropdown
#
# {glue:text}`seven_programs_keys:.0f` programs of the first kernel, whose owner of keys walks over
# the queries of all four heads, and {glue:text}`seven_programs_queries:.0f` of the second, on
# {glue:text}`seven_sms:.0f` SMs. The first leaves most of the machine idle. Let several programs
# share a block of keys, each for a range of queries or for one head, write partial sums of dK and
# dV in fp32, and add them in a fixed order afterwards, as PyTorch does here for a shared q. With
# 1,152 sequences nobody needs it.
# :::
#
# ## Takeaways
#
# :::{admonition} What to remember
# :class: tip
#
# 1. If two owners disagree, compute twice. It is deterministic, needs no memory, and gives each
#    kernel its own order of operands.
# 2. Choose the orientation in which a result is the next operand. What is turned in registers costs
#    a trip, and has been compiled wrongly.
# 3. An emulator checks the source. Only a comparison on the machine checks the compiler, and it
#    must look at every gradient.
# 4. Count what a chain leaves idle before counting what it repeats.
# :::
