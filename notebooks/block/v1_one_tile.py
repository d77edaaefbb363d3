# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # v1: a block is one tile
#
# The machinery of FlashAttention-2 exists because the scores of a sequence do not fit on the chip.
# Those of a block do. What can be left out, and what is each piece worth?
#
# :::{admonition} In this chapter
# - Without a loop there is nothing to rescale, to save or to sum up. Backward is one kernel that
#   moves {glue:text}`bv1_least:.0f` tensors instead of {glue:text}`bv1_before:.0f`. At head_dim 128
#   v0 takes {glue:text}`bv1_gain_forward_128:.2f` times as long forward and
#   {glue:text}`bv1_gain_backward_128:.2f` times as long backward.
# - Each piece is put back alone. In {glue:text}`bv1_priced:.0f` of {glue:text}`bv1_cases:.0f` cases
#   it costs what its bytes say, within 5 %. The log-sum-exp changes the time of the forward kernel
#   by {glue:text}`bv1_lse_forward` %. A piece that moves no byte changes a time by up to
#   {glue:text}`bv1_dearest` % ({glue:text}`bv1_dearest_name`).
# - The order of the programs moves no byte either. It changes the time of the forward kernel by
#   {glue:text}`bv1_order_128` % at head_dim 128 and {glue:text}`bv1_order_64` % at 64.
# :::

# %% tags=["remove-cell"]
import functools
import inspect
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
import triton
from IPython.display import Markdown, display
from matplotlib.patches import Rectangle

from gdpa_kernels import emulator
from gdpa_kernels.block_attention import eliminations, reference, v0_flash, v1_one_tile
from gdpa_kernels.block_attention.batch import Batch
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import Launch, launches
from gdpa_kernels.measuring import compile_check, system, testing
from gdpa_kernels.measuring.inputs import cu_seqlens
from gdpa_kernels.measuring.workload import workload
from gdpa_kernels.report import figures, results
from gdpa_kernels.report.house import INK

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% [markdown]
# This cell measures all variants of the chapter, with `make measure NOTEBOOKS=block/v1_one_tile` on
# a GPU.

# %% tags=["hide-input"]
if mode == "measure":
    from dataclasses import replace

    from gdpa_kernels.block_attention import eliminations, v0_flash, v1_one_tile
    from gdpa_kernels.measuring.inputs import make_inputs
    from gdpa_kernels.measuring.session import Session
    from gdpa_kernels.measuring.workload import workload

    switches = ("key_loop", "rescale", "accumulate", "lse", "delta", "two_passes")
    put_back = {"none": (), **{switch: (switch,) for switch in switches}, "all": switches}
    without_effect = {"forward": ("delta", "two_passes"), "backward": ("rescale",)}
    session = Session("notebooks/block/v1_one_tile.py", device)
    for name in ("block-fill70-2000", "block-fill70-2000-d64"):
        work = workload(name)
        small = make_inputs(replace(work, batch=1), device=device).batch()
        for direction in ("forward", "backward"):
            default = v1_one_tile.default_config(direction, small)
            listed = [("v1_one_tile", "default", {"config": default})]
            for order in ("inner", "outer"):
                for warps in (4, 8):
                    config = replace(
                        default, heads_inner=order == "inner", num_warps=warps, registers=None
                    )
                    variant = f"heads {order}, {warps} warps"
                    listed.append(("v1_one_tile", variant, {"config": config}))
            for case, pieces in put_back.items():
                if case not in without_effect[direction]:
                    config = eliminations.Config(**dict.fromkeys(pieces, True))
                    listed.append(("eliminations", case, {"config": config}))
            flash = v0_flash.default_config(direction, small)
            for stages, variant in ((1, "one stage"), (2, "two stages")):
                config = replace(flash, num_stages=stages)
                listed.append(("v0_flash", variant, {"config": config}))
            session.measure(work, listed, direction=direction)
    print(session.write(data_dir))

# %% tags=["remove-cell"]
IMPL, BEFORE, STUDY = "v1_one_tile", "v0_flash", "eliminations"
DIRECTIONS = ("forward", "backward")
NAMES = {128: "block-fill70-2000", 64: "block-fill70-2000-d64"}
WORK = {dim: workload(name) for dim, name in NAMES.items()}
SWITCHES = ("key_loop", "rescale", "accumulate", "lse", "delta", "two_passes")
CASES = {
    "forward": ("key_loop", "rescale", "accumulate", "lse", "all"),
    "backward": ("key_loop", "accumulate", "lse", "delta", "two_passes", "all"),
}
LABELS = {
    "key_loop": "key loop", "rescale": "rescale", "accumulate": "accumulate",
    "lse": "log-sum-exp", "delta": "delta kernel", "two_passes": "two passes", "all": "all",
}  # fmt: skip
VARIANTS = [f"heads {order}, {warps} warps" for order in ("inner", "outer") for warps in (4, 8)]
VERDICT = {True: "kept", False: "broken"}

run = results.latest_record(data_dir, notebook="notebooks/block/v1_one_tile.py", system="h200")
limits = results.ceilings(run)
machine = system.load(Path(data_dir) / "systems" / f"{run.system}.json")
everything = results.table(data_dir, system="h200", latest=False)
everything = everything.drop_duplicates(
    ["workload", "direction", "impl", "scope", "variant", "record"]
)
everything = everything[everything["workload"].isin(NAMES.values())]
everything = everything[everything["scope"] == "kernel"]
everything["head_dim"] = everything["workload"].map({name: dim for dim, name in NAMES.items()})
own = everything[everything["record"] == run.id]
assert own["time_us_p50"].notna().all(), "a row of this chapter's record failed"
p20, p50, p80, share = (
    own.pivot(index=["direction", "head_dim"], columns=["impl", "variant"], values=column)
    for column in ("time_us_p20", "time_us_p50", "time_us_p80", "percent_of_roofline")
)


def glue(name: str, value: float) -> None:
    figures.glue_number(f"bv1_{name}", value)


def glue_word(name: str, value: str) -> None:
    figures.glue_text(f"bv1_{name}", value)


def code(text: str) -> Markdown:
    text = inspect.cleandoc("\n" + text.replace("  # fmt: skip", ""))
    return Markdown(f"```python\n{text}\n```")


def percent(name: str, ratio: float) -> None:
    """What a ratio of times adds, in percent, with its sign."""
    glue_word(name, f"{100 * (ratio - 1):+.1f}".replace("-0.0", "0.0").replace("+0.0", "0.0"))


def study(case: str) -> eliminations.Config:
    """The study's constants with one piece put back, none or all."""
    pieces = {"none": (), "all": SWITCHES}.get(case, (case,))
    return eliminations.Config(**dict.fromkeys(pieces, True))


def span(values) -> str:
    """'a to b' of ratios, or one number where they do not differ."""
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def listed_words(words: list[str], nothing: str) -> str:
    return "; ".join(words) if words else nothing


# %% [markdown]
# ## What stays, what changes
#
# | | {doc}`v0 <v0_flash>` | v1 |
# |:--|:--|:--|
# | work split | 64 rows of one head, keys or queries in a loop | one block of one head, whole |
# | data path | 4 tensors forward, 13 backward, and log-sum-exps | 4 and 7 |
# | kernels | one forward, three backward | one and one |
# | order of programs | the blocks of a head follow each other | the heads of a block do |
#
# If a block is one tile, a program holds all its scores, and what FlashAttention-2 carries from
# step to step has nowhere to come from. Five things go. They are the five that the publication
# names {cite}`siso2026block`; it gives one speed-up for all of them together.
#
# 1. *The loop over keys*, forward, and over queries, backward.
# 2. *The rescaling*: the maximum of a row is known before anything is added up.
# 3. *The log-sum-exp*: backward has all scores of a row and computes P anew from them.
# 4. *The `delta` kernel*. dS needs $\delta_i = \sum_d \mathrm{dO}_{id} O_{id}$. With $O = P V$ and
#    $\mathrm{dP} = \mathrm{dO}\, V^T$ this is
#
#    $$\delta_i = \sum_d \mathrm{dO}_{id} \sum_j P_{ij} V_{jd}
#    = \sum_j P_{ij}\, \mathrm{dP}_{ij} ,$$
#
#    and P and dP are both at hand. So backward does not need the output.
# 5. *The accumulation* over tiles, which made two kernels of one: dQ is a sum over keys, dK and dV
#    are sums over queries. A program that has all keys and all queries of its block needs neither.
#
# ## Prediction
#
# From bytes alone, as in {doc}`counting_bytes`: what would it cost to put each piece back? The
# study in `eliminations.py` is v1's kernels with a switch for each.

# %% tags=["remove-input"]
tables = re.findall(r"(?:^\|.*\n)+", inspect.getdoc(eliminations) + "\n", flags=re.MULTILINE)
Markdown("\n".join(tables))


# %% tags=["remove-cell"]
def floor_us(read: float, written: float) -> float:
    """The time of a copy with as many bytes, at the measured rate of its mix."""
    return (read + written) / limits.gbytes_per_s(int(read), int(written)) / 1e3


def traffic(case: str, direction: str, work) -> list[tuple[float, float]]:
    """(bytes read, bytes written) of each kernel of the study."""
    on = study(case)
    tensor = work.total_q * work.num_heads_q * work.head_dim * 2
    lane = work.total_q * work.num_heads_q * 4
    if direction == "forward":
        return [(3 * tensor, tensor + lane * on.lse)]
    read = 4 * tensor + lane * (on.lse + on.delta)
    kernels = [(2 * tensor, lane)] if on.delta else []
    return kernels + [(read, n * tensor) for n in ((2, 1) if on.two_passes else (3,))]


predicted = pd.DataFrame(
    {
        "direction": direction, "case": case, "head_dim": dim,
        "tensors": sum(map(sum, traffic(case, direction, work)))
        / (work.bytes("forward") / 4),
        "by bytes": sum(floor_us(*k) for k in traffic(case, direction, work))
        / sum(floor_us(*k) for k in traffic("none", direction, work)),
    }
    for direction in DIRECTIONS
    for case in CASES[direction]
    for dim, work in WORK.items()
)  # fmt: skip
bytes_ratio = predicted.set_index(["direction", "case", "head_dim"])["by bytes"]
tensors = predicted.set_index(["direction", "case", "head_dim"])["tensors"]
assert round(tensors["backward", "all", 128]) == 13 and round(tensors["forward", "all", 128]) == 4
glue("before", round(tensors["backward", "all", 128]))
glue("least", WORK[128].bytes("backward") / (WORK[128].bytes("forward") / 4))
glue("by_delta", bytes_ratio["backward", "delta", 128])
glue("by_passes", bytes_ratio["backward", "two_passes", 128])
glue("by_lse_128", 100 * (bytes_ratio["forward", "lse", 128] - 1))
glue("by_lse_backward", 100 * (bytes_ratio["backward", "lse", 128] - 1))

# %% tags=["remove-input"]
wide = predicted.pivot(
    index=["direction", "case"], columns="head_dim", values=["tensors", "by bytes"]
)
wide = wide.loc[[(d, c) for d in DIRECTIONS for c in CASES[d]]]
figures.show_table(
    pd.DataFrame(
        {
            "direction": [d for d, _ in wide.index],
            "put back": [LABELS[c] for _, c in wide.index],
            "tensors moved": wide["tensors", 128].values,
            "time, none = 1, head_dim 128": wide["by bytes", 128].values,
            "time, none = 1, head_dim 64": wide["by bytes", 64].values,
        }
    ).round(3)
)

# %% tags=["remove-input"]
figures.source(
    "modelled",
    "bytes of each kernel if nothing is met again in a cache, at the measured rates of copies; the "
    "log-sum-exp and delta have 4 bytes for each row",
)

# %% [markdown]
# Predictions. The count stands in the files of the rungs, which were written before anything was
# measured. The thresholds were set with this page (2026-11-21), when first runs without a record
# had been seen.
#
# 1. *v1 is a copy.* It moves the least, so it should reach 90 % of the copy's rate, forward and
#    backward. Less says that bytes are not all that counts.
# 2. *A piece costs its bytes.* The second pass takes {glue:text}`bv1_by_passes:.2f` times the time,
#    the `delta` kernel {glue:text}`bv1_by_delta:.2f` times, the log-sum-exp
#    {glue:text}`bv1_by_lse_128:.1f` % forward and {glue:text}`bv1_by_lse_backward:.1f` % backward;
#    the loop, the rescaling and the accumulation, which move nothing, take nothing. Off by more
#    than 5 % falsifies it.
# 3. *The order of the programs does not matter.* It changes no byte. More than 2 % falsifies it.
#
# ## The code
#
# The forward kernel after its first lines, with its pieces of head_dim and its rotary (switched off
# here, see {doc}`v4_rotary`):

# %% tags=["remove-input"]
body = inspect.getsource(v1_one_tile.forward_kernel.fn)
body = body[body.index("    v = load_rotated(") :].rstrip()
assert body.count("\n") < 25
code(body)

# %% [markdown]
# And the middle of the backward kernel, from the scores to the gradients:

# %% tags=["remove-input"]
body = inspect.getsource(v1_one_tile.backward_kernel.fn)
body = body[body.index("        p, total = softmax_parts") :]
body = body[: body.index("    store_gradient(\n        dk_ptr")].rstrip()
assert body.count("\n") < 25
code(body)

# %% [markdown]
# The loop around these lines runs over the query heads of a group: once, unless heads share K and
# V. Its length is a constant, and the compiler removes it. The whole difference:

# %% tags=["remove-input"]
Markdown(
    "\n".join(
        (
            f"````{{admonition}} From {BEFORE}.py to {IMPL}.py: "
            f"{ladder.changed_lines(IMPL, 'block_attention')} changed lines of code",
            ":class: dropdown",
            "```diff",
            ladder.diff(IMPL, context=1, operator="block_attention").rstrip(),
            "```",
            "````",
        )
    )
)

# %% tags=["remove-input"]
tables = re.findall(r"(?:^\|.*\n)+", inspect.getdoc(v1_one_tile) + "\n", flags=re.MULTILINE)
Markdown("\n".join(tables))

# %% [markdown]
# ## What the compiler made of it
#
# The pieces that move no bytes, or hardly any, each put back alone and compiled for sm_90a here;
# *none* is v1's kernel:


# %% tags=["remove-cell"]
def blank(dim: int) -> Batch:
    """One sequence of four heads, with nothing in it."""
    q = torch.zeros(67, 4, dim, dtype=torch.bfloat16)
    return Batch(q, q, q, cu_seqlens((len(q),), "cpu"), dim**-0.5)


def launched(module, dim: int, direction: str, config) -> list[Launch]:
    """Every launch of one pass; nothing runs."""
    batch = blank(dim)
    options = {"config": config, "schedule": (torch.zeros(3, 2, dtype=torch.int32),)}
    with launches(run=False) as seen:
        if direction == "forward":
            module.forward(batch, **options)
        else:
            saved = (batch.q, torch.zeros(4, batch.total))
            module.backward(batch.q, batch, saved, **options)
    return seen


def first_batch(cubin: bytes) -> int:
    """Loads of 16 bytes in machine code before the first store to shared memory."""
    text = compile_check.disassemble(cubin)
    return text[: re.search(r"\bSTS\b", text).start()].count("LDG.E.128")


@functools.cache
def built(module, dim: int, direction: str, config) -> list[tuple]:
    """(compiled kernel, warps) of the kernels with products of one pass."""
    made = []
    for launch in launched(module, dim, direction, config):
        if launch.name != "delta_kernel":
            made.append((compile_check.build_launch(launch), launch.options["num_warps"]))
    return made


@functools.cache
def compiled(module, dim: int, direction: str, config) -> list[dict]:
    """What became of these kernels: registers, spills, programs on an SM."""
    made = []
    for kernel, warps in built(module, dim, direction, config):
        read = compile_check.read(kernel)
        of_a_program = -(-read.registers * 32 // 256) * 256 * warps
        by_shared = 228 * 1024 // (read.shared_bytes + 1024)
        made.append(
            {
                "registers": read.registers, "bytes spilled": read.spill_bytes,
                "shared (KiB)": read.shared_bytes / 1024,
                "programs on an SM": min(65536 // of_a_program, by_shared, 64 // warps),
                "loads": read.wide["LDG"],
            }
        )  # fmt: skip
        assert "HGMMA" in read.instructions
    return made


def v1_config(direction: str, dim: int, **changes) -> v1_one_tile.Config:
    return replace(v1_one_tile.default_config(direction, blank(dim)), **changes)


WITHOUT_BYTES = ("key_loop", "rescale", "accumulate", "lse")
facts = [
    {"direction": direction, "case": case, "head_dim": dim, **made}
    for direction in DIRECTIONS
    for dim in WORK
    for case in ("none", *WITHOUT_BYTES)
    if case in ("none", *CASES[direction])
    for made in compiled(eliminations, dim, direction, study(case))
]
facts = pd.DataFrame(facts)
by_case = facts.set_index(["direction", "case", "head_dim"])
assert by_case.index.is_unique
programs, registers = by_case["programs on an SM"], by_case["registers"]
spilled = by_case["bytes spilled"]
assert spilled["backward", "accumulate", 128] > 0, "the text says that it spills"
(eight_warps,) = compiled(
    v1_one_tile, 128, "forward", v1_config("forward", 128, num_warps=8, registers=None)
)
(default_backward,) = compiled(v1_one_tile, 128, "backward", v1_config("backward", 128))
glue("programs_backward_128", default_backward["programs on an SM"])
glue("programs_backward_64", programs["backward", "none", 64])
for case in ("none", "accumulate"):
    glue(f"registers_{case}", registers["forward", case, 128])
    glue(f"programs_{case}", programs["forward", case, 128])
assert registers["forward", "accumulate", 128] > registers["forward", "none", 128] + 32
assert programs["forward", "accumulate", 128] < programs["forward", "none", 128]
batch = {}
for case in ("none", "key_loop"):
    ((kernel, _),) = built(eliminations, 128, "forward", study(case))
    batch[case] = first_batch(kernel.asm["cubin"])
    glue(f"batch_{case}", batch[case])
loads = 3 * 64 * 128 * 2 // (128 * 16)
assert batch["none"] == loads > batch["key_loop"], "the text: all at once, and in two parts"
tile_registers = 3 * 64 * 128 * 2 // (128 * 4)
accumulator_registers = 64 * 128 * 4 // (128 * 4)
glue("tile_registers", tile_registers)
glue("accumulator_registers", accumulator_registers)

# %% tags=["remove-input"]
shown = facts.assign(case=facts["case"].map(lambda case: LABELS.get(case, case)))
figures.show_table(shown.drop(columns="loads"))

# %% tags=["remove-input"]
figures.source(
    "modelled",
    f"ptxas and nvdisasm on the kernels compiled for sm_90a, triton {triton.__version__}; "
    "programs: what registers, shared memory and warps of an SM admit",
)

# %% [markdown]
# A second count, then, and it disagrees with the first. Forward at head_dim 128 v1's kernel needs
# {glue:text}`bv1_registers_none:.0f` registers of a thread, and {glue:text}`bv1_programs_none:.0f`
# programs share an SM. With the accumulation it needs {glue:text}`bv1_registers_accumulate:.0f`,
# and there are {glue:text}`bv1_programs_accumulate:.0f`. The tiles of Q, K and V pass through
# registers on their way to shared memory, {glue:text}`bv1_tile_registers:.0f` a thread. An
# accumulator of a loop, {glue:text}`bv1_accumulator_registers:.0f` a thread, has to exist from
# before the loop, while the tiles are loaded. The output of one tile exists only after the scores,
# when the tiles are gone.
#
# The loop does something else: Q is loaded before it, K and V inside. In machine code a thread of
# v1 asks for all {glue:text}`bv1_batch_none:.0f` pieces of 16 bytes before it stores the first into
# shared memory. With the loop it asks for {glue:text}`bv1_batch_key_loop:.0f`, waits for them, and
# only then asks for the others.
#
# ## Is it right?
#
# In the emulator, on a ragged batch: v1 in both orders, and every case of the study.


# %%
def problem(lengths, num_heads=2, num_heads_k=2, head_dim=64):
    """(the gradient of the output, the batch)."""
    make = torch.Generator().manual_seed(2025)

    def draw(heads):
        return torch.randn(sum(lengths), heads, head_dim, generator=make).bfloat16()

    q, k, v = draw(num_heads), draw(num_heads_k), draw(num_heads_k)
    batch = Batch(q, k, v, cu_seqlens(lengths, "cpu"), scale=0.125)
    return draw(num_heads), batch


NAMES_OF = ("out", "dq", "dk", "dv")
RAGGED = problem((0, 1, 63, 64, 65, 0, 130))


def both(module, config=None) -> tuple[torch.Tensor, ...]:
    grad_out, batch = RAGGED
    with emulator.enabled():
        out, saved = module.forward(batch, config=config)
        return out, *module.backward(grad_out, batch, saved, config=config)


def defined(dtype) -> tuple[torch.Tensor, ...]:
    grad_out, batch = RAGGED
    batch = replace(batch, **{name: getattr(batch, name).to(dtype) for name in "qkv"})
    return reference.forward(batch)[0], *reference.backward(grad_out.to(dtype), batch)


exact, plain = defined(torch.float64), defined(torch.bfloat16)
inner, outer = (v1_one_tile.Config(WIDTH=64, heads_inner=x) for x in (True, False))
found = {"v0": both(v0_flash), "v1": both(v1_one_tile, inner)}
found |= {case: both(eliminations, study(case)) for case in ("none", *SWITCHES, "all")}
worst = 0.0
for case, tensors_of_case in found.items():
    for name, actual, right, other in zip(NAMES_OF, tensors_of_case, exact, plain, strict=True):
        error = testing.compare(name=name, actual=actual, expected=right, baseline=other)
        assert error.passed, f"{case}: {error}"
        worst = max(worst, error.max_abs / error.max_abs_budget)
print(f"{len(found)} implementations, each error at most {100 * worst:.0f} % of its budget")
same = all(map(torch.equal, found["v1"], both(v1_one_tile, outer)))
print(f"the other order gives the same bits: {same}")

# %% tags=["remove-cell"]
assert same and all(map(torch.equal, found["v1"], found["none"])), "the text says: the same bits"
rms = {
    case: [
        float((actual.double() - right).square().mean().sqrt())
        for actual, right in zip(found[case], exact, strict=True)
    ]
    for case in ("v0", "v1", "delta")
}
glue("rms_v0", 1e4 * rms["v0"][1])
glue("rms_v1", 1e4 * rms["v1"][1])
checked = everything[everything["record"] == run.id]
assert checked["correct"].fillna(False).astype(bool).all(), "a check on the GPU failed"
glue("checked", len(checked))


def asked(module, grad_out, batch, config=None) -> dict[str, float]:
    """Tensors of q's size that each kernel asks for and writes, in the emulator."""
    with emulator.enabled() as reports:
        _, saved = module.forward(batch, config=config)
        module.backward(grad_out, batch, saved, config=config)
    counts = Counter()
    for report in reports:
        if report.kernel != "block_list_kernel":
            moved = report.bytes_loaded + report.bytes_stored
            counts[report.kernel] += moved / batch.q.nbytes
    return counts


FULL_BLOCKS = problem((128, 64), head_dim=128)
once = asked(eliminations, *FULL_BLOCKS, study("none"))
assert abs(once["forward_kernel"] - 4) < 0.01 and abs(once["backward_kernel"] - 7) < 0.01
everything_back = asked(eliminations, *FULL_BLOCKS, study("all"))
moved_back = everything_back["delta_kernel"] + everything_back["backward_kernel"]
assert abs(moved_back - tensors["backward", "all", 128]) < 0.01
glue("emulated_forward", once["forward_kernel"])
glue("emulated_backward", once["backward_kernel"])
glue("emulated_all", moved_back)

# %% [markdown]
# The study with nothing put back gives the bits of v1. The emulator counts
# {glue:text}`bv1_emulated_forward:.2f` tensors forward and {glue:text}`bv1_emulated_backward:.2f`
# backward for it, and {glue:text}`bv1_emulated_all:.2f` backward with everything put back (head_dim
# 128, without caches): the model's numbers. (Of v1 itself it would count more; an exercise asks
# why.)
#
# One rounding goes with the `delta` kernel: it multiplies an output that was rounded to bf16, and
# v1 sums P ∘ dP in fp32. The rms error of dQ above is {glue:text}`bv1_rms_v0:.2f`·10⁻⁴ in v0 and
# {glue:text}`bv1_rms_v1:.2f`·10⁻⁴ in v1 (emulated).
#
# On the GPU all {glue:text}`bv1_checked:.0f` rows of the record below passed the check on their own
# inputs, all gradients of all tokens, before they were timed.
#
# ## Measurement

# %% tags=["remove-cell"]
variants = share[IMPL]
default = variants["default"]
base = p50[STUDY, "none"]
ratio = pd.Series(
    {
        (direction, case, dim): p50.loc[(direction, dim), (STUDY, case)] / base[direction, dim]
        for direction in DIRECTIONS
        for case in CASES[direction]
        for dim in WORK
    }
)
excess = ratio / bytes_ratio.loc[ratio.index]

# %% tags=["remove-input"]
# | name: fig-bv1-put-back
# | caption: >
# |   Time with one piece put back, divided by the time of the study with none; less is better.
# |   Filled: head_dim 128, hollow: 64. Ticks: what the bytes say. Error bars: p20 to p80.
# | alt: >
# |   Two panels, forward and backward, with a row for each piece and two marks a row. Forward all
# |   ticks lie at 1. Backward the ticks of the delta kernel, of two passes and of all lie to the
# |   right. Where the marks lie beside their ticks is said in the text below.
with figures.style():
    chart, axes = figures.subplots(1, 2, width=8.6, height=3.1)
    for axis, direction in zip(axes, DIRECTIONS, strict=True):
        axis.axvline(1, color=INK, linewidth=1)
        for place, case in enumerate(CASES[direction]):
            for shift, dim in ((-0.17, 128), (0.17, 64)):
                where = (direction, dim)
                middle = ratio[direction, case, dim]
                low, high = (q.loc[where, (STUDY, case)] / base[where] - middle for q in (p20, p80))
                axis.errorbar(
                    middle, place + shift, xerr=[[-low], [high]], fmt="o", markersize=6.5,
                    color=figures.colour(IMPL), elinewidth=1,
                    markerfacecolor=None if dim == 128 else "none",
                    label=f"head_dim {dim}" if place == 0 else None,
                )  # fmt: skip
                axis.plot(
                    bytes_ratio[direction, case, dim], place + shift, "|", color=INK,
                    markersize=12, markeredgewidth=1.8,
                    label="by bytes" if place == 0 and dim == 64 else None,
                )  # fmt: skip
        axis.set_yticks(range(len(CASES[direction])), [LABELS[c] for c in CASES[direction]])
        axis.set_ylim(len(CASES[direction]) - 0.5, -0.6)
        axis.grid(visible=False, axis="y")
        axis.grid(visible=True, axis="x")
        axis.tick_params(axis="y", length=0)
        axis.set_title(direction)
        axis.set_xlabel("time / time with none")
    axes[0].legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=3, fontsize=8.5)
display(chart)

# %% tags=["remove-input"]
shown = own[own["impl"] == STUDY]
figures.save_csv(shown, "block-v1-put-back")
figures.provenance(shown, csv="block-v1-put-back", data_dir=Path(data_dir))

# %% tags=["remove-cell"]
priced = [key for key in ratio.index if abs(excess[key] - 1) <= 0.05]
missed = {}
for direction, case, dim in ratio.index:
    if (direction, case, dim) not in priced:
        part = f"{ratio[direction, case, dim]:.2f} for {bytes_ratio[direction, case, dim]:.2f}"
        missed.setdefault((direction, case), []).append(f"{part} at {dim}")
glue("priced", len(priced))
glue("cases", len(ratio))
glue_word("verdict_2", VERDICT[len(priced) == len(ratio)])
glue_word(
    "missed",
    listed_words(
        [f"{LABELS[c]} {d} ({', '.join(parts)})" for (d, c), parts in missed.items()], "none"
    ),
)
for direction in DIRECTIONS:
    percent(f"lse_{direction}", ratio[direction, "lse", 128])
    percent(f"lse_{direction}_64", ratio[direction, "lse", 64])
for case in ("delta", "two_passes"):
    for dim in WORK:
        glue(f"{case}_{dim}", ratio["backward", case, dim])
bare = ratio[[key for key in ratio.index if key[1] in ("key_loop", "rescale", "accumulate")]]
dearest = bare.idxmax()
percent("dearest", bare[dearest])
glue_word("dearest_name", f"{LABELS[dearest[1]]}, {dearest[0]}, head_dim {dearest[2]}")
for case in ("accumulate", "key_loop", "rescale"):
    for dim in WORK:
        percent(f"{case}_{dim}", ratio["forward", case, dim])
for dim in WORK:
    assert ratio["forward", "accumulate", dim] > 1.05, "the text: the accumulation costs"
    assert ratio["forward", "rescale", dim] < 1.05, "the text: arithmetic does not"
same_order = "heads outer, 4 warps"
inner_study = "tl.program_id(1)" not in inspect.getsource(eliminations.forward_kernel.fn)
if inner_study:
    same_order = "heads inner, 4 warps"
glue_word(
    "study_order",
    "They run in v1's order, the heads of a block after each other."
    if inner_study
    else "They run in v0's order, the blocks of a head after each other; the surprise below is "
    "about that.",
)
agreement = base / p50[IMPL, same_order]
glue_word("agreement", span(agreement))
reached = [f"{d} at head_dim {dim}" for (d, dim), x in default.items() if x >= 90]
glue_word("verdict_1", VERDICT[len(reached) == len(default)])
glue_word("reached", listed_words(reached, "nowhere"))
cap = v1_config("backward", 128).registers
glue_word(
    "cap_note",
    f"(Backward at head_dim 128 v1 caps a thread at {cap} registers; an exercise shows what for.)"
    if cap
    else "(No cap on registers is set.)",
)
flash = {
    direction: "two stages"
    if v0_flash.default_config(direction, blank(128)).num_stages == 2
    else "one stage"
    for direction in DIRECTIONS
}
for direction, dim in default.index:
    glue(f"{direction}_{dim}", default[direction, dim])
    glue(f"misses_{direction}_{dim}", 100 - default[direction, dim])
    old = p50.loc[(direction, dim), (BEFORE, flash[direction])]
    glue(f"gain_{direction}_{dim}", old / p50.loc[(direction, dim), (IMPL, "default")])
    glue(f"pieces_{direction}_{dim}", old / p50.loc[(direction, dim), (IMPL, VARIANTS[2])])
assert VARIANTS[2] == "heads outer, 4 warps"
assert (
    min(
        p50.loc[key, (BEFORE, flash[key[0]])] / p50.loc[key, (IMPL, "default")]
        for key in default.index
    )
    > 1.05
), "the text says that v1 takes less time than v0"

# %% [markdown]
# Both sides of a ratio are kernels of the study. {glue:text}`bv1_study_order` With nothing put back
# they take {glue:text}`bv1_agreement` times the time of v1 with 4 warps in the same order.
#
# 1. *v1 is a copy*: **{glue:text}`bv1_verdict_1`**. At head_dim 128 it reaches
#    {glue:text}`bv1_forward_128:.1f` % of the copy's rate forward and
#    {glue:text}`bv1_backward_128:.1f` % backward, at 64 {glue:text}`bv1_forward_64:.1f` and
#    {glue:text}`bv1_backward_64:.1f` %. At least 90 %: {glue:text}`bv1_reached`.
#    {glue:text}`bv1_cap_note`
# 2. *A piece costs its bytes*: **{glue:text}`bv1_verdict_2`**. {glue:text}`bv1_priced:.0f` of
#    {glue:text}`bv1_cases:.0f` are within 5 %. Not within (time, then what the bytes say):
#    {glue:text}`bv1_missed`.
#
# *What has bytes* pays for them. The second pass takes {glue:text}`bv1_two_passes_128:.2f` times
# the time at head_dim 128 and {glue:text}`bv1_two_passes_64:.2f` times at 64, the `delta` kernel
# {glue:text}`bv1_delta_128:.2f` and {glue:text}`bv1_delta_64:.2f` times. The log-sum-exp, which is
# the best known of the five, takes {glue:text}`bv1_lse_forward` % forward and
# {glue:text}`bv1_lse_backward` % backward at head_dim 128, {glue:text}`bv1_lse_forward_64` and
# {glue:text}`bv1_lse_backward_64` % at 64.
#
# *What has none* does not come free. Forward at head_dim 128 the loop takes
# {glue:text}`bv1_key_loop_128` %, the rescaling {glue:text}`bv1_rescale_128` %, the accumulation,
# which needs the loop, {glue:text}`bv1_accumulate_128` %; at 64 {glue:text}`bv1_key_loop_64`,
# {glue:text}`bv1_rescale_64` and {glue:text}`bv1_accumulate_64` %.
#
# ### What the bytes leave open

# %% tags=["remove-cell"]
kept_programs = pd.Series(
    {
        key: programs[key] / programs[key[0], "none", key[2]]
        for key in ratio.index
        if key[1] in WITHOUT_BYTES
    }
)
sides = {}
for direction in DIRECTIONS:
    part = [key for key in kept_programs.index if key[0] == direction]
    fewer = excess[[key for key in part if kept_programs[key] < 1]]
    as_many = excess[[key for key in part if kept_programs[key] >= 1]]
    for label, values in (("fewer", fewer), ("as_many", as_many)):
        sides[direction, label] = values
        glue_word(f"{label}_{direction}", span(values) if len(values) else "no case")
        if direction == "forward":
            glue(f"{label}_{direction}_count", len(values))
apart = {
    direction: sides[direction, "as_many"].max() < sides[direction, "fewer"].min()
    for direction in DIRECTIONS
}
glue_word(
    "apart",
    "The two groups do not overlap."
    if apart["forward"]
    else "The two groups overlap, so programs are not the whole explanation.",
)
glue_word(
    "apart_backward",
    "Here they do not overlap." if apart["backward"] else "Here they overlap.",
)

# %% tags=["remove-input"]
# | name: fig-bv1-programs
# | caption: >
# |   Measured time over the time that the bytes say, and the programs that an SM holds over those
# |   of the study with none put back. One point for each piece that moves no bytes, or hardly any;
# |   filled: head_dim 128, hollow: 64. Circles: forward, squares: backward.
# | alt: >
# |   A scatter plot. The horizontal axis ends at the right with cases that keep their programs; to
# |   the left lie those with fewer. Forward, the fewer programs a case has, the higher it lies. The
# |   numbers are in the text.
with figures.style():
    chart, axis = figures.subplots(width=6.4, height=3.6)
    axis.axhline(1, color=INK, linewidth=1)
    for direction, mark in zip(DIRECTIONS, "os", strict=True):
        shade = figures.colour(IMPL) if direction == "forward" else figures.colour(BEFORE)
        for dim in WORK:
            some = [k for k in kept_programs.index if k[0] == direction and k[2] == dim]
            axis.plot(
                kept_programs[some], excess[some], mark, color=shade, markersize=7,
                markerfacecolor=None if dim == 128 else "none", linestyle="none",
                label=f"{direction}, {dim}",
            )  # fmt: skip
    for key in kept_programs.index:
        if kept_programs[key] < 1:
            axis.annotate(
                LABELS[key[1]], (kept_programs[key], excess[key]), xytext=(7, 0),
                textcoords="offset points", va="center", fontsize=8.5,
            )  # fmt: skip
    axis.set_xlabel("programs on an SM / with none put back (modelled)")
    axis.set_ylabel("time / time by bytes")
    axis.grid(visible=True, axis="both")
    axis.legend(loc="upper right", fontsize=8.5)
display(chart)

# %% tags=["remove-input"]
points = pd.DataFrame(
    {
        "direction": d, "put back": LABELS[c], "head_dim": dim,
        "programs on an SM": programs[d, c, dim], "time": ratio[d, c, dim],
        "by bytes": bytes_ratio[d, c, dim], "time / by bytes": excess[d, c, dim],
    }
    for d, c, dim in kept_programs.index
)  # fmt: skip
figures.save_csv(points, "block-v1-programs")
figures.provenance(shown, csv="block-v1-programs", data_dir=Path(data_dir))

# %% tags=["remove-cell"]
moving = 64 * 128 * 2 * 4 / 1024
per_sm = limits.gbytes_per_s(3, 1) / machine.num_sms
glue("bytes_of_a_program", moving)
glue("period", moving * 1024 / per_sm / 1e3)
glue("life", programs["forward", "none", 128] * moving * 1024 / per_sm / 1e3)
glue("life_accumulate", programs["forward", "accumulate", 128] * moving * 1024 / per_sm / 1e3)

# %% [markdown]
# Divide the measured ratio by that of the bytes: what remains has another cause. Take the pieces
# that move no bytes, or hardly any. Forward, the {glue:text}`bv1_as_many_forward_count:.0f` cases
# that keep their programs are at {glue:text}`bv1_as_many_forward`, the
# {glue:text}`bv1_fewer_forward_count:.0f` that lose some at {glue:text}`bv1_fewer_forward`.
# {glue:text}`bv1_apart` Backward it is {glue:text}`bv1_as_many_backward` and
# {glue:text}`bv1_fewer_backward`. {glue:text}`bv1_apart_backward` There, at head_dim 128, the
# accumulation keeps its programs but spills.
#
# Why programs? At the rate of a copy an SM moves the {glue:text}`bv1_bytes_of_a_program:.0f` KiB of
# a program's four tiles in {glue:text}`bv1_period:.1f` µs (head_dim 128). If
# {glue:text}`bv1_programs_none:.0f` programs share it, each may live for {glue:text}`bv1_life:.1f`
# µs without anybody noticing: ask, wait, compute, store. With
# {glue:text}`bv1_programs_accumulate:.0f` it has {glue:text}`bv1_life_accumulate:.1f` µs. Nothing
# in a program overlaps with itself, so what overlaps are programs, and registers decide how many.
#
# So the pieces that FlashAttention-2 needs cost in two currencies. The second pass and the `delta`
# kernel cost bytes. The loop and its accumulator cost registers, and through them programs. The
# rescaling, which is nothing but arithmetic, does not show.
#
# ### The ladder so far

# %% tags=["remove-cell"]
tables_run = results.latest_record(
    data_dir, notebook="notebooks/block/results.py", system="h200"
)  # fmt: skip
ladders = everything[(everything["record"] == tables_run.id) & (everything["variant"] == "")]
ORDER = [i for i in (BEFORE, IMPL, "fa2_varlen", "cudnn_varlen") if i in set(ladders["impl"])]
ladders = ladders[ladders["impl"].isin(ORDER)]
overview = ladders.pivot(
    index="impl", columns=["direction", "head_dim"], values="percent_of_roofline"
).loc[ORDER]
times_now = ladders.pivot(
    index="impl", columns=["direction", "head_dim"], values="time_us_p50"
).loc[ORDER]  # fmt: skip

# %% tags=["remove-input"]
table = pd.DataFrame({"impl": ORDER})
for direction in DIRECTIONS:
    for dim in WORK:
        table[f"{direction} {dim} (us)"] = times_now[direction, dim].round(0).values
        table[f"{direction} {dim} (% of the copy)"] = overview[direction, dim].round(1).values
figures.show_table(table)

# %% tags=["remove-input"]
figures.save_csv(ladders, "block-v1-ladder")
figures.provenance(ladders, csv="block-v1-ladder", data_dir=Path(data_dir))

# %% [markdown]
# From the record of {doc}`results`, with two peers that get a sequence for each block. In
# this chapter's own record v0 takes {glue:text}`bv1_gain_forward_128:.2f` times as long as v1
# forward and {glue:text}`bv1_gain_backward_128:.2f` times as long backward at head_dim 128,
# {glue:text}`bv1_gain_forward_64:.2f` and {glue:text}`bv1_gain_backward_64:.2f` times at 64. Of
# this, {glue:text}`bv1_pieces_forward_128:.2f`, {glue:text}`bv1_pieces_backward_128:.2f`,
# {glue:text}`bv1_pieces_forward_64:.2f` and {glue:text}`bv1_pieces_backward_64:.2f` times are the
# five pieces; the rest is the order of the programs.
#
# ## The surprise: the order of the programs
#
# A grid of programs is a list, and the hardware starts them in its order. With $n$ blocks and 4
# heads there are two natural ones. In v0 the blocks of a head follow each other: a program's number
# is $n \cdot \mathrm{head} + \mathrm{block}$. In v1 the heads of a block do:
# $4 \cdot \mathrm{block} + \mathrm{head}$. The other order is a variant, `heads_inner=False`. The
# kernel is the same, and so are its bytes.

# %% tags=["remove-input"]
# | name: fig-bv1-order
# | caption: >
# |   A tensor as it lies in memory: a row is a block of 64 tokens, a column a head; rows follow
# |   each other, and inside a row the heads alternate token by token. The number of the program
# |   that owns each tile; coloured: the first eight, which run at the same time.
# | alt: >
# |   Two grids of eight rows and four columns. On the left the numbers run down the columns, and
# |   the first eight programs are a column, one tile in four. On the right they run along the rows,
# |   and the first eight programs are two whole rows.
with figures.style():
    chart, axes = figures.subplots(1, 2, width=6.6, height=3.0)
    blocks, heads, running = 8, 4, 8
    for axis, (title, number) in zip(
        axes,
        (
            ("blocks of a head (heads outer)", lambda block, head: blocks * head + block),
            ("heads of a block (heads inner)", lambda block, head: heads * block + head),
        ),
        strict=True,
    ):
        for block in range(blocks):
            for head in range(heads):
                place = number(block, head)
                now = place < running
                axis.add_patch(
                    Rectangle(
                        (head, block), 1, 1, edgecolor=INK, linewidth=0.8,
                        facecolor=figures.colour(IMPL) if now else "none",
                    )
                )  # fmt: skip
                axis.text(
                    head + 0.5, block + 0.5, str(place), ha="center", va="center",
                    color="white" if now else INK,
                )  # fmt: skip
        axis.set_xlim(-0.02, heads + 0.02)
        axis.set_ylim(blocks + 0.05, -0.05)
        axis.set_xticks([h + 0.5 for h in range(heads)], range(heads))
        axis.set_yticks([b + 0.5 for b in range(blocks)], range(blocks))
        axis.tick_params(length=0)
        axis.grid(visible=False)
        for side in ("left", "bottom"):
            axis.spines[side].set_visible(False)
        axis.set_xlabel("head")
        axis.set_title(title)
    axes[0].set_ylabel("block")
display(chart)

# %% tags=["remove-input"]
figures.source("modelled", "drawn from place() of gdpa_kernels/block_attention/v1_one_tile.py")

# %% tags=["remove-cell"]
change = {
    (direction, dim, warps): p50.loc[(direction, dim), (IMPL, f"heads inner, {warps} warps")]
    / p50.loc[(direction, dim), (IMPL, f"heads outer, {warps} warps")]
    for direction in DIRECTIONS
    for dim in WORK
    for warps in (4, 8)
}
for direction in DIRECTIONS:
    for dim in WORK:
        if direction == "forward":
            percent(f"order_{dim}", change[direction, dim, 4])
        for order in ("inner", "outer"):
            glue(
                f"{order}_{direction}_{dim}",
                variants.loc[(direction, dim), f"heads {order}, 4 warps"],
            )
glue_word("verdict_3", VERDICT[max(abs(x - 1) for x in change.values()) <= 0.02])
glue_word(
    "order_word",
    "The heads of a block side by side are the faster order in every case."
    if max(change.values()) < 1
    else "Which order is the faster one depends on the case.",
)
eight = [
    p50.loc[key, (IMPL, "heads inner, 8 warps")] / p50.loc[key, (IMPL, "heads inner, 4 warps")]
    for key in default.index
]
glue_word("eight", span(eight))
glue_word(
    "eight_word",
    "More warps do not help:"
    if min(eight) > 1
    else "More warps do not help everywhere:"
    if max(eight) > 1
    else "More warps help:",
)
glue("programs_8", eight_warps["programs on an SM"])
resident = programs["forward", "none", 128] * machine.num_sms
glue("resident", resident)
glue("row_bytes", 4 * 128 * 2)
glue("piece_bytes", 128 * 2)
glue("span_inner", resident / 4 * 64 * 1024 / 1e6)
glue("span_outer", resident * 64 * 1024 / 1e6)
twice = p50[IMPL, "default"]["forward"] / p50[IMPL, "heads inner, 4 warps"]["forward"]
same_kernel = [
    dim for dim in WORK
    if v1_config("forward", dim) == v1_config(
        "forward", dim, heads_inner=True, num_warps=4, registers=None
    )
]  # fmt: skip
glue_word(
    "noise",
    "The record has the default kernel twice under two names; forward its times differ by "
    f"{100 * max(abs(twice[dim] - 1) for dim in same_kernel):.1f} %."
    if same_kernel
    else "",
)

# %% tags=["remove-input"]
# | name: fig-bv1-variants
# | caption: >
# |   v1 in both orders, with 4 and with 8 warps, in percent of the copy. Filled: head_dim 128,
# |   hollow: 64. Error bars: p20 to p80.
# | alt: >
# |   Two panels with four rows, two marks in each: heads inner and heads outer, with 4 and with 8
# |   warps. A dashed line at 100. The differences are in the text below.
with figures.style():
    chart, axes = figures.subplots(1, 2, width=8.4, height=2.5, sharey=True)
    for axis, direction in zip(axes, DIRECTIONS, strict=True):
        for place, variant in enumerate(VARIANTS):
            for shift, dim in ((-0.15, 128), (0.15, 64)):
                where = (direction, dim), (IMPL, variant)
                middle = share.loc[where]
                axis.errorbar(
                    middle, place + shift,
                    xerr=[
                        [middle - middle * p50.loc[where] / p80.loc[where]],
                        [middle * p50.loc[where] / p20.loc[where] - middle],
                    ],
                    fmt="o", markersize=6.5, color=figures.colour(IMPL), elinewidth=1,
                    markerfacecolor=None if dim == 128 else "none",
                    label=f"head_dim {dim}" if place == 0 else None,
                )  # fmt: skip
        axis.axvline(100, color=INK, linewidth=1.2, linestyle=(0, (4, 2)))
        axis.set_yticks(range(len(VARIANTS)), VARIANTS)
        axis.set_ylim(len(VARIANTS) - 0.5, -0.6)
        axis.set_xlim(0, 106)
        axis.grid(visible=False, axis="y")
        axis.grid(visible=True, axis="x")
        axis.tick_params(axis="y", length=0)
        axis.set_title(direction)
        axis.set_xlabel("% of the copy")
    axes[0].legend(loc="lower left", fontsize=8.5)
display(chart)

# %% tags=["remove-input"]
shown = own[own["impl"] == IMPL]
figures.save_csv(shown, "block-v1-variants")
figures.provenance(shown, csv="block-v1-variants", data_dir=Path(data_dir))

# %% [markdown]
# 3. *The order does not matter*: **{glue:text}`bv1_verdict_3`**. With 4 warps, heads inner, the
#    forward kernel goes from {glue:text}`bv1_outer_forward_128:.1f` to
#    {glue:text}`bv1_inner_forward_128:.1f` % of the copy at head_dim 128 and from
#    {glue:text}`bv1_outer_forward_64:.1f` to {glue:text}`bv1_inner_forward_64:.1f` % at 64; the
#    backward kernel from {glue:text}`bv1_outer_backward_128:.1f` to
#    {glue:text}`bv1_inner_backward_128:.1f` % and from {glue:text}`bv1_outer_backward_64:.1f` to
#    {glue:text}`bv1_inner_backward_64:.1f` %. {glue:text}`bv1_order_word` {glue:text}`bv1_noise`
#
# A token has {glue:text}`bv1_row_bytes:,.0f` bytes in q, and a head
# {glue:text}`bv1_piece_bytes:.0f` of them. A tile of one head is 64 pieces with gaps three times as
# long between them. The {glue:text}`bv1_resident:.0f` programs that the GPU holds at a time cover
# {glue:text}`bv1_span_inner:.1f` MB of q without a gap if the heads are inner. If they are outer,
# they take a quarter of each row in {glue:text}`bv1_span_outer:.1f` MB, and come back for the
# second quarter when all sequences are done with the first. All bytes arrive in whole sectors
# either way. But memory is organised in larger units than a sector, and to open one of them for a
# quarter of its bytes, four times, is dearer than once for all. That is our explanation; the record
# has times only, and no counter of the memory's pages. {doc}`v2_slab` takes the hint and makes
# all heads of a block the work of one program.
#
# {glue:text}`bv1_eight_word` with 8 the kernels take {glue:text}`bv1_eight` times the time of 4.
# Forward at head_dim 128 an SM then holds {glue:text}`bv1_programs_8:.0f` programs instead of
# {glue:text}`bv1_programs_none:.0f`.
#
# ## What is left
#
# Forward v1 misses {glue:text}`bv1_misses_forward_128:.1f` % of the copy's rate at head_dim 128 and
# {glue:text}`bv1_misses_forward_64:.1f` % at 64, backward {glue:text}`bv1_misses_backward_128:.1f`
# and {glue:text}`bv1_misses_backward_64:.1f` %. The simplest kernel of the ladder will be hard to
# beat forward. Backward a program has seven tiles to move and five products to compute, one after
# another, and an SM holds {glue:text}`bv1_programs_backward_128:.0f` of them at head_dim 128 and
# {glue:text}`bv1_programs_backward_64:.0f` at 64. If registers forbid more programs, a program has
# to overlap with itself. {doc}`backward_alone` takes that apart, and {doc}`v3_warp_specialized`
# gives the copies to a role of their own.
#
# ## Exercises
#
# :::{exercise} Other layouts
# :label: ex-bv1-layouts
#
# Which order would you choose if q, k and v were stored as `[num_heads, total_tokens, head_dim]`?
# And for a packed tensor `[total_tokens, 3 * num_heads, head_dim]` of which q, k and v are slices?
# What if there is one head? *(paper, five minutes)*
# :::
#
# :::{solution} ex-bv1-layouts
# :class: dropdown
#
# Heads first: then the blocks of a head lie side by side, and the blocks should be inner. Programs
# that run together should own what lies together. Packed: heads inner; the heads of q of a token
# are still neighbours, and what lies between them and the next token's is its k and v, which the
# same programs read. One head: both orders are the same list of programs.
# :::
#
# :::{exercise} Fewer registers by decree
# :label: ex-bv1-registers
#
# `Config.registers` caps what a thread may use. Compile v1's backward kernel at head_dim 128 with
# caps of 168 and of 128 registers. How many programs share an SM, what is spilled, and which would
# you measure first? *(code, ten minutes)*
# :::

# %% tags=["remove-cell"]
caps = {}
for cap in (None, 168, 128):
    config = v1_config("backward", 128, registers=cap)
    (caps[cap],) = (
        compiled(v1_one_tile, 128, "backward", config)
        if cap
        else compiled(eliminations, 128, "backward", study("none"))
    )
    glue(f"cap_{cap or 'free'}_programs", caps[cap]["programs on an SM"])
    if cap:
        glue(f"cap_{cap}_spilled", caps[cap]["bytes spilled"])
glue("cap_free_registers", caps[None]["registers"])
assert [made["programs on an SM"] for made in caps.values()] == [2, 3, 3], "the answer says so"
assert caps[None]["bytes spilled"] == 0 < caps[168]["bytes spilled"]
assert caps[128]["bytes spilled"] > 3 * caps[168]["bytes spilled"], "the answer says so"
chosen = v1_config("backward", 128)
capped = p50.loc[("backward", 128), (IMPL, "default")]
free = p50.loc[("backward", 128), (IMPL, "heads inner, 4 warps")]
glue_word(
    "capped",
    f"The default has the cap of {chosen.registers}: by the record it takes {capped / free:.3f} "
    "times the time of the kernel without one."
    if chosen.registers
    else "The default has no cap.",
)

# %% [markdown]
# :::{solution} ex-bv1-registers
# :class: dropdown
#
# Without a cap the compiler takes {glue:text}`bv1_cap_free_registers:.0f` registers, for
# {glue:text}`bv1_cap_free_programs:.0f` programs, and spills nothing. 168 make room for
# {glue:text}`bv1_cap_168_programs:.0f` and spill {glue:text}`bv1_cap_168_spilled:.0f` bytes of a
# thread. With 128 there are {glue:text}`bv1_cap_128_programs:.0f` as well, because now shared
# memory is full, and {glue:text}`bv1_cap_128_spilled:.0f` bytes are spilled for nothing. So 168 is
# worth a measurement, and 128 is not. {glue:text}`bv1_capped`
# :::
#
# :::{exercise} Asked for twice
# :label: ex-bv1-twice
#
# The source of v1's backward kernel loads q, k and dO twice. Why, and who pays for it? Look at
# head_dim 128 and at 256. *(the source, the emulator, the table above; fifteen minutes)*
# :::

# %% tags=["remove-cell"]
twice_128 = asked(v1_one_tile, *FULL_BLOCKS)["backward_kernel"]
twice_256 = asked(v1_one_tile, *problem((64,), num_heads=1, num_heads_k=1, head_dim=256))
assert abs(twice_128 - 10) < 0.02 and abs(twice_256["backward_kernel"] - 14) < 0.02
tile_loads = 64 * 128 * 2 // (128 * 16)
assert default_backward["loads"] == 4 * tile_loads, "the answer says so"
glue("twice_128", twice_128)
glue("twice_256", twice_256["backward_kernel"])
glue("machine_loads", default_backward["loads"])
glue("tile_loads", tile_loads)

# %% [markdown]
# :::{solution} ex-bv1-twice
# :class: dropdown
#
# A head wider than `WIDTH` is cut into pieces: scores are sums over all pieces, and the results of
# a program belong to one of them, whose columns it loads again. With one piece both loads are the
# same. The emulator executes the source and counts {glue:text}`bv1_twice_128:.0f` tensors at
# head_dim 128, but nobody pays: the compiler sees equal loads with no store between them and keeps
# the first. A thread loads {glue:text}`bv1_machine_loads:.0f` times 16 bytes in machine code, four
# tiles of {glue:text}`bv1_tile_loads:.0f`. At head_dim 256 there are two programs for each block
# and head. Each needs all of q, k, v and dO for the scores and half of three of them again:
# {glue:text}`bv1_twice_256:.0f` tensors where 7 are the least. L2 may catch what neighbours read
# together.
# :::
#
# ## Takeaways
#
# - A general algorithm carries its generality at run time. When the case is small enough, remove
#   the pieces, and measure each by putting it back.
# - Bytes price a pass over the data; registers price what has to stay alive while data arrive. A
#   kernel can pay in either.
# - Programs that run together should own what lies together in memory.
