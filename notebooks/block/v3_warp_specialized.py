# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # Is warp specialization worth it here?
#
# The bound of this operator is bytes, and roles for warps save none. What can they buy?
#
# :::{admonition} In this chapter
# - A role that does nothing but ask for tiles keeps loads under way while another computes.
#   Backward at head_dim 128, where one program fills an SM, v3 takes
#   {glue:text}`roles_v2_backward_128:.2f` times the time of {doc}`v2 <v2_slab>` and
#   {glue:text}`roles_v1_backward_128:.2f` times that of {doc}`v1 <v1_one_tile>`. It moves its
#   bytes at {glue:text}`roles_share_backward_128:.0f` % of the rate of a copy.
# - Forward at head_dim 128 v3 reaches {glue:text}`roles_share_forward_128:.0f` % of the copy, v1,
#   which has no roles, {glue:text}`roles_share_v1_forward_128:.0f` %: v3 is
#   {glue:text}`roles_standing_forward_128`.
# - One math role, four warps, computes for a whole SM. A second one changes the best time by
#   {glue:text}`roles_second_min` to {glue:text}`roles_second_max` %, a third slot by
#   {glue:text}`roles_third_min` to {glue:text}`roles_third_max` %.
# :::

# %% tags=["remove-cell"]
import inspect
import math
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch
import triton
from IPython.display import SVG, Markdown, display

from gdpa_kernels import emulator
from gdpa_kernels.block_attention import reference, slots, v1_one_tile, v3_warp_specialized
from gdpa_kernels.block_attention.batch import Batch
from gdpa_kernels.block_attention.v3_warp_specialized import Config
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.emulator.timeline import Timeline
from gdpa_kernels.measuring import compile_check, system, testing
from gdpa_kernels.measuring.inputs import cu_seqlens
from gdpa_kernels.measuring.workload import workload
from gdpa_kernels.report import figures, results
from gdpa_kernels.report.house import INK
from gdpa_kernels.report.studies import changed

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
IMPL, BEFORE, SIMPLE, BLOCK = "v3_warp_specialized", "v2_slab", "v1_one_tile", 64
NAMES = {128: "block-fill70-2000", 64: "block-fill70-2000-d64"}
DIRECTIONS = ("forward", "backward")
SHAPES = [(direction, head_dim) for direction in DIRECTIONS for head_dim in NAMES]
TILES = {"forward": 3, "backward": 4}  # that an item loads
VERDICT = {True: "kept", False: "broken"}


def glue(name: str, value: float) -> None:
    figures.glue_number(f"roles_{name}", value)


def glue_word(name: str, value: str) -> None:
    figures.glue_text(f"roles_{name}", value)


def code(text: str, language: str = "python") -> Markdown:
    return Markdown(f"```{language}\n{text.rstrip()}\n```")


# %% [markdown]
# This cell measures; it runs with `make measure NOTEBOOKS=block/v3_warp_specialized`, on a GPU.

# %% tags=["hide-input"]
SHARED = 227 * 1024


def cases(direction: str, head_dim: int) -> list[tuple[int, int]]:
    """(math roles, slots) that fit a program."""
    slot = (3 if direction == "forward" else 4) * 64 * head_dim * 2
    own = 0 if direction == "forward" else 64 * 64 * 2
    return [
        (roles, slots)
        for roles in (1, 2)
        for slots in (1, 2, 3, 4, 6)
        if slots % roles == 0 and slots * slot + roles * own + 1024 <= SHARED
    ]


def bundles(direction: str, head_dim: int) -> list[tuple[int, int, int]]:
    """(math roles, slots, heads whose loads are issued together) that fit a program."""
    most = max(slots for _, slots in cases(direction, head_dim))
    alone = [(1, slots, n) for n in (2, 4) for slots in range(n + 1, most + 1)]
    return alone + ([(2, 6, 2)] if head_dim == 64 else [])


def label(roles: int, slots: int, together: int = 1) -> str:
    """The variant's name in the record."""
    bundle = f", {together} heads together" if together > 1 else ""
    return f"{roles} math role{'s' * (roles > 1)}, {slots} slot{'s' * (slots > 1)}{bundle}"


if mode == "measure":
    from gdpa_kernels.block_attention import v3_warp_specialized
    from gdpa_kernels.measuring.session import Session
    from gdpa_kernels.measuring.workload import workload

    session = Session("notebooks/block/v3_warp_specialized.py", device)
    for name in ("block-fill70-2000", "block-fill70-2000-d64"):
        head_dim = workload(name).head_dim
        for direction in ("backward", "forward"):
            listed = [(impl, "default", {}) for impl in ("v1_one_tile", "v2_slab")]
            for case in [*cases(direction, head_dim), *bundles(direction, head_dim)]:
                config = v3_warp_specialized.Config(*case)
                listed.append(("v3_warp_specialized", label(*case), {"config": config}))
            session.measure(workload(name), listed, direction=direction)
    print(session.write(data_dir))

# %% [markdown]
# ## What stays, what changes
#
# | | {doc}`v2 <v2_slab>` | v3 |
# |:--|:--|:--|
# | work of a program | blocks, head after head | the same |
# | who asks for tiles | a thread of the warps that compute, between two items | a role of its own |
# | barriers | made by the compiler | two arrays, made by us |
# | results | through buffers of their own | through the tiles that they came by |
# | bytes, arithmetic | | the same |
#
# An *item* is one head of one block. Its tiles come to a *slot*: Q, K and V forward, grad_out
# besides backward. v2 ended with a loop that waits, computes, stores and only then asks again.
#
# ## Prediction
#
# Written before anything of block attention had been measured:
#
# > The bytes are v2's, 4 tensors forward and 7 backward, with 32 and 46 FLOP for each byte, and an
# > H200 could do 184. Specialization saves none; it keeps more of them under way. To fill 4.3 TB/s
# > takes 26 to 33 KB in flight on each SM, and two slots of 48 KB forward or 64 backward are asked
# > for without a pause. Predicted: forward within 5 % of v2, which keeps the loads of two programs
# > in flight; backward at head_dim 64 within 5 % too; backward at head_dim 128, where v2 has one
# > program on an SM and nothing but loads beside its softmax, 5 to 15 % less time.
#
# Why so modest? In {doc}`../forward/v4_warp_specialized` roles were a step to products and
# activations that overlap. Here the tensor cores are idle most of the time whoever asks for the
# tiles. All that can be gained is the time in which nothing is on the way. Little's law
# ({doc}`counting_bytes`), with 1 µs of latency (an assumption) and the copies of the record
# below, says how much must be on the way to each SM; beside it, what can be on the way while one
# slot is being computed on:

# %% tags=["remove-cell"]
NOTEBOOK = "notebooks/block/v3_warp_specialized.py"
LATENCY = 1e-6
run_record = results.latest_record(data_dir, notebook=NOTEBOOK, system="h200")
limits = results.ceilings(run_record)
machine = system.load(Path(data_dir) / "systems" / f"{run_record.system}.json")
WORK = {head_dim: workload(name) for head_dim, name in NAMES.items()}
RATE = {
    (d, h): limits.gbytes_per_s(WORK[h].bytes_read(d), WORK[h].bytes_written(d)) for d, h in SHAPES
}


def slot_bytes(direction: str, head_dim: int) -> int:
    return TILES[direction] * BLOCK * head_dim * 2


def needed(direction: str, head_dim: int) -> float:
    """Bytes of loads that must be on the way to an SM, by Little's law."""
    read = WORK[head_dim].bytes_read(direction) / WORK[head_dim].bytes(direction)
    return RATE[direction, head_dim] * 1e9 * read * LATENCY / machine.num_sms


little = pd.DataFrame(
    {
        "direction": d, "head_dim": h, "needed (KB)": needed(d, h) / 1e3,
        "slot (KB)": slot_bytes(d, h) / 1e3,
        **{f"with {n} slots (KB)": (n - 1) * slot_bytes(d, h) / 1e3 for n in (2, 3)},
    }
    for d, h in SHAPES
)  # fmt: skip
glue("needed_min", little["needed (KB)"].min())
glue("needed_max", little["needed (KB)"].max())
ENOUGH = {(d, h): 1 + math.ceil(needed(d, h) / slot_bytes(d, h)) for d, h in SHAPES}
assert set(ENOUGH.values()) <= {2, 3}, "the text: two slots, here and there three"
short = [f"{d} at head_dim {h}" for (d, h), n in ENOUGH.items() if n > 2]
glue_word("short", " and ".join(short) if short else "nowhere")

# %% tags=["remove-input"]
figures.show_table(little.round(1))

# %% tags=["remove-input"]
figures.source(
    "modelled", "Little's law at 1 µs and the measured copy rates; tiles of 64 rows, two bytes each"
)

# %% [markdown]
# So the count asks for two slots; for a third only {glue:text}`roles_short`. Further predictions
# (2026-11-21). Scripts without a record had timed variants of v3 by then, with two and more slots;
# one slot they had not tried.
#
# 2. *One slot is v2 again.* With one math role and one slot nothing is on the way during the
#    products: at least 25 % more time than with two slots, in all four cases.
# 3. *Two slots are enough.* A third changes the time by at most 5 %. More says that the latency is
#    longer than 1 µs, or that the time of an item varies.
# 4. *One math role is enough.* A second one, with as many slots in all as fit, is nowhere more than
#    3 % faster. Otherwise four warps are too slow for an SM.
#
# ## What changed in the code
#
# The load role, whole, and the loop of the math role, forward:

# %% tags=["remove-input"]
code(inspect.getsource(v3_warp_specialized.load.fn))

# %% tags=["remove-input"]
body = inspect.getsource(v3_warp_specialized.math_forward.fn)
code(inspect.cleandoc("\n" + body[body.index("        for head in tl.range") :]))

# %% [markdown]
# Which slot an item takes, and how it is given back, is in `slots.py`, for the next rungs too:

# %% tags=["remove-input"]
code("\n\n".join(inspect.getsource(f.fn) for f in (slots.slot_of, slots.release)))

# %% [markdown]
# Roles and barriers, from the head of the file:

# %% tags=["remove-input"]
tables = re.findall(r"(?:^\|.*\n)+", inspect.getdoc(v3_warp_specialized) + "\n", flags=re.MULTILINE)
Markdown("\n".join(tables))

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

# %% [markdown]
# ### The life of a slot
#
# Results need room in shared memory, since TMA stores from there. v3 has none of its own for them:
# when a result is ready, some tile of its item is no longer needed, and has the same shape. Forward
# O takes the place of Q. Backward, for a slot of four tiles:
#
# | when | grad_out | Q | K | V | 8 KB beside |
# |:--|:--|:--|:--|:--|:--|
# | the loads have landed | grad_out | Q | K | V | |
# | $S = Q K^T$ and $dP = dO\, V^T$ are done | grad_out | Q | K | *dead* | |
# | softmax | grad_out | Q | K | P | dS |
# | $dV = P^T dO$ is done | *dead* | Q | K | **dV** | dS |
# | $dQ = dS\, K$ is done | **dQ** | Q | *dead* | **dV** | dS |
# | $dK = dS^T Q$ is done | **dQ** | *dead* | **dK** | **dV** | *dead* |
# | the stores have read | free | free | free | free | |
#
# Bold: on its way out. dK could as well take the place of Q: when it is done, both are dead.
#
# The last line costs something. A store has to have read its tile before the tile may be filled
# again, so somebody waits for it. `release` makes this wait one item later, beside the first
# products of the next item, which are asked for before it. With a single slot there is no next item
# to begin with (`LATER`), and the role waits on the spot.
#
# ### A slot has one owner
#
# With two math roles, three slots would fit at head_dim 128 forward, and each would go from one
# role to the other. `Config` refuses:

# %%
try:
    Config(math_roles=2, num_stages=3)
except ValueError as error:
    print(error)

# %% [markdown]
# A wait on a barrier knows whether the number of completed phases is even or odd, no more. A role
# that takes over a slot whose previous filling it has not seen cannot tell "not yet filled" from
# "filled twice". Variants of this kernel that shared slots failed on the H200 in some of many
# launches. {doc}`../tools/emulator`, under "A parity knows only even and odd", has the smallest
# example, and the check that finds it in every schedule.
#
# ## A timeline
#
# Backward with one math role, two blocks of two heads, four items, in the emulator. First with two
# slots:


# %% tags=["remove-cell"]
def problem(lengths, head_dim=128) -> tuple[torch.Tensor, Batch]:
    """(the gradient of the output, the batch)."""
    make = torch.Generator().manual_seed(2025)
    shape = (sum(lengths), 2, head_dim)
    grad_out, *tensors = (torch.randn(shape, generator=make).bfloat16() for _ in range(4))
    return grad_out, Batch(*tensors, cu_seqlens(lengths, "cpu"), head_dim**-0.5)


def run(module, direction: str, grad_out, batch, **options) -> tuple[torch.Tensor, ...]:
    """The results of a pass."""
    if direction == "forward":
        return (module.forward(batch, **options)[0],)
    return module.backward(grad_out, batch, **options)


def emulated(module, direction: str, config, given: tuple, **how) -> tuple:
    """(results of a pass, the report of its own kernel); `how` goes to the emulator."""
    with emulator.enabled(**how) as reports:
        found = run(module, direction, *given, config=config)
    return found, reports[-1]


def named(timeline: Timeline) -> Timeline:
    """The lane of the math role under its name; only the first program's."""
    (task,) = set(timeline.lanes()) - {"load", "TMA", "tensor core"}

    def lane(name: str) -> str:
        return "math" if name == task else name

    return Timeline(
        timeline.file,
        [replace(e, lane=lane(e.lane)) for e in timeline.events if e.cta == 0],
        [
            replace(a, source=lane(a.source), target=lane(a.target))
            for a in timeline.arrows
            if a.cta == 0
        ],
    )


FIVE_BLOCKS = problem((5 * BLOCK,))  # two for the first of the emulator's three programs
lines = {
    slots: named(
        emulated(v3_warp_specialized, "backward", Config(1, slots), FIVE_BLOCKS, trace=True)[
            1
        ].timeline
    )
    for slots in (1, 2)
}
cycles = {slots: max(e.end for e in line.events) for slots, line in lines.items()}
stored = [event.target for event in lines[2].events if event.kind == "store"]
assert len(stored) == 4 * 3, "the text: four items"
assert [name.split("[")[0] for name in stored[:3]] == ["v", "grad", "k"], "the slot's life"


def uncovered(line: Timeline) -> float:
    """Share of the cycles in which no load is on the way."""
    spans = sorted((e.start, e.end) for e in line.events if e.kind == "copy")
    covered, reached = 0.0, 0.0
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1 - covered / max(e.end for e in line.events)


glue("cycles_1", cycles[1])
glue("cycles_2", cycles[2])
glue("cycles_ratio", cycles[1] / cycles[2])
for n, line in lines.items():
    glue(f"uncovered_{n}", 100 * uncovered(line))
assert cycles[1] > 1.2 * cycles[2] and uncovered(lines[1]) > uncovered(lines[2])

# %% tags=["remove-input"]
# | name: fig-roles-two-slots
# | caption: >
# |   v3 backward, one math role, two slots, four items. Roles above, engines below; an arrow leads
# |   from the arrival that completed a phase to the wait that it ended. Modelled cycles.
# | alt: >
# |   Four lanes. load asks for two slots at once and then waits. TMA loads the second slot while
# |   math computes on the first; the three stores of the first item run beside the first products
# |   of the second, and the loads of the third item begin as soon as they have ended.
display(SVG(lines[2].svg(width=760)))

# %% tags=["remove-input"]
figures.source(
    "emulated",
    "gdpa_kernels/block_attention/v3_warp_specialized.py, modelled schedule; cycles are modelled",
)

# %% [markdown]
# And with one:

# %% tags=["remove-input"]
# | name: fig-roles-one-slot
# | caption: >
# |   The same with one slot: loads, products, stores, and again.
# | alt: >
# |   The same four lanes. Loads, then computation, then stores follow each other four times, with
# |   nothing beside them.
display(SVG(lines[1].svg(width=760)))

# %% tags=["remove-input"]
figures.source(
    "emulated",
    "gdpa_kernels/block_attention/v3_warp_specialized.py, modelled schedule; cycles are modelled",
)

# %% [markdown]
# With one slot no load is on the way for {glue:text}`roles_uncovered_1:.0f` % of the modelled
# cycles, with two for {glue:text}`roles_uncovered_2:.0f` %, and the four items take
# {glue:text}`roles_cycles_ratio:.2f` times as long. The cycles are those of a model: the picture is
# about order.
#
# ## What the compiler made of it


# %% tags=["remove-cell"]
def blank(head_dim: int) -> Batch:
    """One sequence of four heads, with nothing in it."""
    q = torch.zeros(BLOCK + 3, 4, head_dim, dtype=torch.bfloat16)
    return Batch(q, q, q, cu_seqlens((len(q),), "cpu"), head_dim**-0.5)


def default_config(direction: str, head_dim: int) -> Config:
    return v3_warp_specialized.default_config(direction, blank(head_dim))


def compiled(direction: str, head_dim: int, config) -> compile_check.Compiled:
    """The kernel of a launch on four heads, compiled for sm_90a."""
    batch, blocks = blank(head_dim), torch.zeros(3, 2, dtype=torch.int32)
    with launches(run=False) as seen:
        run(v3_warp_specialized, direction, batch.q, batch, config=config, schedule=(blocks,))
    (only,) = seen
    return compile_check.read(compile_check.build_launch(only))


def tile_bytes(direction: str, head_dim: int, config) -> int:
    """What all slots take, and a tile dS for each role."""
    own = config.math_roles * BLOCK * BLOCK * 2 if direction == "backward" else 0
    return config.num_stages * slot_bytes(direction, head_dim) + own


LOOKED_AT = [
    ("forward", 128, default_config("forward", 128)),
    ("backward", 128, default_config("backward", 128)),
    ("backward", 128, Config(math_roles=2, num_stages=2)),
]
facts = []
for direction, head_dim, config in LOOKED_AT:
    made = compiled(direction, head_dim, config)
    held = tile_bytes(direction, head_dim, config)
    assert held < made.shared_bytes < held + 1024, "the rest is barriers"
    assert made.spill_bytes == 0 and not made.serialised
    facts.append(
        {
            "direction": direction, "head_dim": head_dim, "math roles": config.math_roles,
            "slots": config.num_stages, "registers at the start": made.registers,
            "spilled": made.spill_bytes, "shared (KB)": made.shared_bytes / 1e3,
            **{name: made.instructions[name] for name in ("HGMMA", "UTMALDG", "UTMASTG")},
            "changes of registers": made.instructions["USETMAXREG"],
        }
    )  # fmt: skip
assert facts[0]["UTMALDG"] % 3 == 0 and facts[1]["UTMALDG"] % 4 == 0
glue("left_over", facts[1]["shared (KB)"] * 1e3 - tile_bytes(*LOOKED_AT[1]))

# %% tags=["remove-input"]
figures.show_table(pd.DataFrame(facts))

# %% tags=["remove-input"]
figures.source(
    "modelled", f"ptxas and nvdisasm on kernels compiled for sm_90a, triton {triton.__version__}"
)

# %% [markdown]
# Shared memory holds the slots, dS for each math role, and {glue:text}`roles_left_over:.0f` bytes
# besides, the barriers among them. One program takes the registers of an SM: no second one covers
# for it, and the slots must do.
#
# ## Is it right?
#
# A ragged batch, with lengths on both sides of a block, in the emulator, in its modelled order and
# in random ones, against fp64:

# %%
RAGGED = problem((0, 1, 63, 64, 65, 130), head_dim=64)
NAMES_OF = {"forward": ("out",), "backward": ("dq", "dk", "dv")}


def defined(direction: str, dtype) -> tuple[torch.Tensor, ...]:
    grad_out, batch = RAGGED
    batch = replace(batch, **{name: getattr(batch, name).to(dtype) for name in "qkv"})
    return run(reference, direction, grad_out.to(dtype), batch)


closest = 0.0
for direction in DIRECTIONS:
    exact, plain = (defined(direction, dtype) for dtype in (torch.float64, torch.bfloat16))
    for config in (Config(1, 1), Config(1, 2), Config(1, 3), Config(2, 2), Config(2, 4)):
        for schedule in ("modelled", 0, 1):
            found, _ = emulated(v3_warp_specialized, direction, config, RAGGED, schedule=schedule)
            for name, actual, right, other in zip(
                NAMES_OF[direction], found, exact, plain, strict=True
            ):
                error = testing.compare(name=name, actual=actual, expected=right, baseline=other)
                assert error.passed, f"{config}, {schedule}: {error}"
                closest = max(closest, error.max_abs / error.max_abs_budget)
    simple, _ = emulated(v1_one_tile, direction, None, RAGGED)
    same = sum(map(torch.equal, found, simple))
    print(f"{direction}: {same} of {len(found)} results have the bits of v1")
print(f"every error is at most {100 * closest:.0f} % of its budget")

# %% [markdown]
# No race, no wait that could be taken for an earlier one, no deadlock. Now one line less: `release`
# without its wait, so that a slot goes back while its stores may still read it:

# %% tags=["remove-cell"]
STORE_WAIT = "    tlx.async_descriptor_store_wait(0)\n"
HASTY = changed(v3_warp_specialized)
HASTY.release = changed(slots, (STORE_WAIT, "")).release


def finding(module, direction: str, config, schedule="modelled") -> str:
    """What the emulator says about a launch, without paths."""
    try:
        emulated(module, direction, config, FIVE_BLOCKS, schedule=schedule)
    except emulator.EmulatorError as error:
        text = re.sub(r"/\S*/(?=[\w-]+\.py:\d)", "", str(error))
        return f"{type(error).__name__}: {text}"
    return "nothing found"


said = finding(HASTY, "backward", Config(1, 2))
assert said.startswith("Race"), said

# %% tags=["remove-input"]
code(said.replace("; ", ";\n  "), "text")

# %% [markdown]
# ## Measurement
#
# The record holds v1 and v2 with their defaults, and v3 with one and two math roles and as many
# slots as fit into the 227 KB that a program may have.

# %% tags=["remove-cell"]
everything = results.table(data_dir, system="h200", latest=False)
own = everything[(everything["record"] == run_record.id) & (everything["scope"] == "kernel")]
own = own.drop_duplicates(["workload", "direction", "impl", "variant"])
own = own.assign(
    head_dim=own["workload"].map({name: d for d, name in NAMES.items()}),
    case=[
        variant if impl == IMPL else impl
        for impl, variant in zip(own["impl"], own["variant"], strict=True)
    ],
)
KEYS = ["direction", "head_dim", "case"]
share, time, low, high = (
    own.set_index(KEYS)[column].sort_index()
    for column in ("percent_of_roofline", "time_us_p50", "time_us_p20", "time_us_p80")
)
CASES = {shape: cases(*shape) for shape in SHAPES}
BUNDLES = {shape: bundles(*shape) for shape in SHAPES}
for d, h in SHAPES:
    wanted = {SIMPLE, BEFORE, *(label(*case) for case in [*CASES[d, h], *BUNDLES[d, h]])}
    missing = sorted(wanted - set(time[d, h].index))
    assert not missing, f"the record lacks {missing} on {d}, {h}"
failed = own[own["failure"] != ""]
passed = own[own["failure"] == ""]
assert passed["correct"].astype(bool).all(), "timed without a passed check"
glue("checked", len(passed))
glue("failed", len(failed))
DEFAULT = {shape: default_config(*shape) for shape in SHAPES}


def standing(value: float) -> str:
    """How a ratio of times reads; runs differ by a few percent."""
    if abs(value - 1) <= 0.03:
        return "level with it"
    return "ahead of it" if value < 1 else "behind it"


def change(name: str, ratio: float) -> None:
    """What a ratio of times adds, in percent, with its sign."""
    text = f"{100 * (ratio - 1):+.1f}"
    glue_word(name, "0.0" if text in ("-0.0", "+0.0") else text)


def v3_time(shape: tuple[str, int], roles: int, slots: int) -> float:
    """Microseconds; LookupError where the record has a failure."""
    found = float(time[(*shape, label(roles, slots))])
    if not found > 0:
        raise LookupError(f"{shape} must have a time with {label(roles, slots)}, got a failure")
    return found


chosen = {
    s: label(config.math_roles, config.num_stages, config.heads_together)
    for s, config in DEFAULT.items()
}
best = {
    s: min((case for case in [*CASES[s], *BUNDLES[s]] if time[(*s, label(*case))] > 0),
           key=lambda case, s=s: time[(*s, label(*case))])
    for s in SHAPES
}  # fmt: skip
over = {
    (name, *s): time[(*s, chosen[s])] / time[(*s, impl)]
    for name, impl in (("v1", SIMPLE), ("v2", BEFORE))
    for s in SHAPES
}
for d, h in SHAPES:
    glue(f"share_{d}_{h}", share[d, h, chosen[d, h]])
    glue(f"share_v1_{d}_{h}", share[d, h, SIMPLE])
    glue(f"share_v2_{d}_{h}", share[d, h, BEFORE])
    for name in ("v1", "v2"):
        glue(f"{name}_{d}_{h}", over[name, d, h])
        change(f"{name}_change_{d}_{h}", over[name, d, h])
    glue_word(f"standing_{d}_{h}", standing(over["v1", d, h]))
assert over["v2", "backward", 128] < 0.97, "the chapter says that roles pay backward at 128"
assert share["backward", 128, chosen["backward", 128]] < 100

# %% tags=["remove-input"]
# | name: fig-roles-slots
# | caption: >
# |   v3 with one math role (filled) and two (hollow) by the number of slots: percent of the rate of
# |   the best copy with the same mix of reads and writes, measured in the same run. Lines: v1
# |   (solid) and v2 (dashed) with their defaults.
# | alt: >
# |   Four small charts, forward and backward, head_dim 128 and 64, from one to six slots. What they
# |   show is said in the text below.
with figures.style():
    chart, axes = figures.subplots(2, 2, width=7.6, height=5.6, sharex=True, sharey=True)
    for axis, (d, h) in zip(axes.flat, SHAPES, strict=True):
        for impl, dashes, name in ((SIMPLE, "-", "v1"), (BEFORE, (0, (4, 2)), "v2")):
            axis.axhline(
                share[d, h, impl], color=figures.colour(impl), linestyle=dashes, linewidth=1.4,
                label=name,
            )  # fmt: skip
        for roles in (1, 2):
            drawn = [
                (n, share[d, h, label(r, n)]) for r, n in CASES[d, h]
                if r == roles and time[d, h, label(r, n)] > 0
            ]  # fmt: skip
            axis.plot(
                *zip(*drawn, strict=True), "o-" if roles == 1 else "o:", markersize=6,
                color=figures.colour(IMPL), markerfacecolor=None if roles == 1 else "none",
                label=f"v3, {roles} math role{'s' * (roles > 1)}",
            )  # fmt: skip
        axis.axhline(100, color=INK, linewidth=1)
        axis.set_title(f"{d}, head_dim {h}")
        axis.set_xticks(range(1, 7))
        axis.set_ylim(0, 108)
    for axis in axes[1]:
        axis.set_xlabel("slots")
    for axis in axes[:, 0]:
        axis.set_ylabel("% of the copy")
    axes[1][0].legend(loc="upper left", bbox_to_anchor=(-0.1, -0.2), ncols=2, fontsize=8.5)
display(chart)

# %% tags=["remove-input"]
figures.save_csv(own.drop(columns="case"), "roles-slots")
figures.provenance(own, csv="roles-slots", data_dir=Path(data_dir))

# %% tags=["remove-input"]
figures.show_table(
    pd.DataFrame(
        {
            "": f"{d}, head_dim {h}", "v1, %": share[d, h, SIMPLE], "v2, %": share[d, h, BEFORE],
            "v3, %": share[d, h, chosen[d, h]], "v3 with": chosen[d, h],
            "time / v1": over["v1", d, h], "time / v2": over["v2", d, h],
            "best of v3": label(*best[d, h]), "best, %": share[d, h, label(*best[d, h])],
        }
        for d, h in SHAPES
    ).round(2)
)  # fmt: skip

# %% tags=["remove-input"]
figures.provenance(own, csv="roles-slots", data_dir=Path(data_dir))

# %% tags=["remove-input"]
if len(failed):
    display(figures.show_table(failed[["workload", "direction", "case", "failure"]]))

# %% tags=["remove-cell"]
verdict_v2 = {
    ("forward", 128): abs(over["v2", "forward", 128] - 1) <= 0.05,
    ("forward", 64): abs(over["v2", "forward", 64] - 1) <= 0.05,
    ("backward", 64): abs(over["v2", "backward", 64] - 1) <= 0.05,
    ("backward", 128): 0.85 <= over["v2", "backward", 128] <= 0.95,
}
for (d, h), kept in verdict_v2.items():
    glue_word(f"verdict_1_{d}_{h}", VERDICT[bool(kept)])


def spread(name: str, ratios: dict) -> None:
    values = sorted(ratios.values())
    change(f"{name}_min", values[0])
    change(f"{name}_max", values[-1])


one_slot = {s: v3_time(s, 1, 1) / v3_time(s, 1, 2) for s in SHAPES}
third = {s: v3_time(s, 1, 3) / v3_time(s, 1, 2) for s in SHAPES}


def fastest(shape: tuple[str, int], roles: int) -> float:
    found = [time[(*shape, label(r, n))] for r, n in CASES[shape] if r == roles]
    return min(t for t in found if t > 0)


second = {s: fastest(s, 2) / fastest(s, 1) for s in SHAPES}
spread("one", one_slot)
spread("third", third)
spread("second", second)
glue_word("verdict_2", VERDICT[min(one_slot.values()) >= 1.25])
glue_word("verdict_3", VERDICT[all(abs(r - 1) <= 0.05 for r in third.values())])
glue_word("verdict_4", VERDICT[min(second.values()) >= 0.97])
helped = [f"{d} at head_dim {h}" for (d, h), r in third.items() if r < 0.97]
glue_word("third_helps", "; ".join(helped) if helped else "nowhere")
hurt = [f"{d} at head_dim {h}" for (d, h), r in third.items() if r > 1.03]
glue_word("third_hurts", "; ".join(hurt) if hurt else "nowhere")

# %% [markdown]
# All {glue:text}`roles_checked:.0f` rows with a time passed the check on their own inputs before
# they were timed; {glue:text}`roles_failed:.0f` failed.
#
# 1. *Against v2*, with the defaults of both. Forward within 5 %: at head_dim 128
#    {glue:text}`roles_v2_change_forward_128` %, **{glue:text}`roles_verdict_1_forward_128`**; at 64
#    {glue:text}`roles_v2_change_forward_64` %, **{glue:text}`roles_verdict_1_forward_64`**.
#    Backward at head_dim 64 within 5 %: {glue:text}`roles_v2_change_backward_64` %,
#    **{glue:text}`roles_verdict_1_backward_64`**. Backward at 128, 5 to 15 % less:
#    {glue:text}`roles_v2_change_backward_128` %, **{glue:text}`roles_verdict_1_backward_128`**.
# 2. *One slot*: {glue:text}`roles_one_min` to {glue:text}`roles_one_max` % against two,
#    **{glue:text}`roles_verdict_2`**.
# 3. *A third slot*: {glue:text}`roles_third_min` to {glue:text}`roles_third_max` %,
#    **{glue:text}`roles_verdict_3`**. More than 3 % faster: {glue:text}`roles_third_helps`; more
#    than 3 % slower: {glue:text}`roles_third_hurts`. The count asked for it
#    {glue:text}`roles_short`.
# 4. *A second math role*, best against best: {glue:text}`roles_second_min` to
#    {glue:text}`roles_second_max` %, **{glue:text}`roles_verdict_4`**.
#
# Against v1, which is the one to beat: {glue:text}`roles_v1_change_forward_128` and
# {glue:text}`roles_v1_change_forward_64` % forward at head_dim 128 and 64,
# {glue:text}`roles_v1_change_backward_128` and {glue:text}`roles_v1_change_backward_64` % backward.
# FlashAttention-2 and the other peers are in {doc}`results`.
#
# ## Where the time goes
#
# If the memory ran at the rate of the copy, an SM would have the budget of the second column for an
# item; what an item takes is the time of the record, spread over the items of an SM.

# %% tags=["remove-cell"]
DRAWN = WORK[128]
items = DRAWN.blocks * DRAWN.num_heads_q


def of_an_item(us: float) -> float:
    return us * machine.num_sms / items


budget = {(d, h): of_an_item(WORK[h].bytes(d) / RATE[d, h] / 1e3) for d, h in SHAPES}
steps = pd.DataFrame(
    {
        "": f"{d}, head_dim {h}", "budget (us)": budget[d, h],
        "v1 (us)": of_an_item(time[d, h, SIMPLE]), "v2 (us)": of_an_item(time[d, h, BEFORE]),
        "v3, 1 slot (us)": of_an_item(v3_time((d, h), 1, 1)),
        "v3, 2 slots (us)": of_an_item(v3_time((d, h), 1, 2)),
        "hidden by the second (us)": of_an_item(v3_time((d, h), 1, 1) - v3_time((d, h), 1, 2)),
    }
    for d, h in SHAPES
)  # fmt: skip
by_shape = steps.set_index("")
for d in DIRECTIONS:
    row = by_shape.loc[f"{d}, head_dim 128"]
    glue(f"item_{d}", row["v3, 2 slots (us)"])
    glue(f"item_one_{d}", row["v3, 1 slot (us)"])
    glue(f"budget_{d}", row["budget (us)"])
per_program = math.ceil(DRAWN.blocks / machine.num_sms)
glue("tail", 100 * (per_program * machine.num_sms / DRAWN.blocks - 1))
ends = 2 * LATENCY * 1e6  # a first load that nothing covers, and a last store, in us
glue("ends", 100 * ends / time["forward", 128, chosen["forward", 128]])
gap = over["v1", "forward", 128] - 1
glue_word(
    "gap",
    f"{100 * abs(gap):.1f} % {'slower' if gap > 0 else 'faster'} than v1",
)
glue_word(
    "puzzle",
    "The count has no explanation for it."
    if gap > 0.03
    else "That is hardly more than runs differ by."
)  # fmt: skip
flat = max(
    abs(v3_time(("forward", 128), 1, n) / v3_time(("forward", 128), 1, 2) - 1) for n in (3, 4)
)
glue("flat", 100 * flat)
glue_word(
    "more_slots",
    "It is not loads that are too few:" if flat <= 0.03 else "More slots do make a difference:",
)
glue("item_v1_forward", by_shape.loc["forward, head_dim 128", "v1 (us)"])
assert over["v1", "forward", 128] > 0.97, "the text: forward there is nothing left to buy"

# %% tags=["remove-input"]
figures.show_table(steps.round(2))

# %% tags=["remove-input"]
figures.save_csv(steps, "roles-items")
figures.source(
    "modelled",
    "budget: bytes of an item at the measured copy rate; the others: measured times of the record "
    "above, by items and SMs",
    csv="roles-items",
)

# %% [markdown]
# - *Backward* at head_dim 128 an item with one slot takes {glue:text}`roles_item_one_backward:.2f`
#   µs: load, compute, store, in a row. With two it takes {glue:text}`roles_item_backward:.2f`, and
#   the budget is {glue:text}`roles_budget_backward:.2f`. v1 and v2 have no way to that: registers
#   hold few programs of v1, shared memory one of v2, and what they overlap is too little
#   ({doc}`v2_slab`).
# - *Forward* an item takes {glue:text}`roles_item_forward:.2f` µs of
#   {glue:text}`roles_budget_forward:.2f`, and {glue:text}`roles_item_v1_forward:.2f` in v1, which
#   has nothing but many programs on an SM that load while others compute.
#
# What is left of the forward gap? v3 is {glue:text}`roles_gap` at head_dim 128. It is not the tail:
# the unluckiest program has {glue:text}`roles_tail:.1f` % more blocks than the mean. It is not the
# start and the end of the persistent programs: two latencies are {glue:text}`roles_ends:.2f` % of
# the time. {glue:text}`roles_more_slots` with three and four slots the time changes by at most
# {glue:text}`roles_flat:.1f` %. {glue:text}`roles_puzzle` One thing that differs is the order in
# which memory sees reads and writes: each SM of v3 has one item after the other, an SM of v1
# several at a time.
#
# ## The order in which memory is asked
#
# A row of a tile is one head of one token: 256 bytes at head_dim 128, 128 bytes at 64. The heads of
# a token lie side by side, 1,024 and 512 bytes. DRAM serves such neighbours from one open row
# (a *page*) of its cells; opening a row costs more than reading from it. v3 asks for all rows of
# one head and, when a slot is free, for all rows of the next: by then somebody else may have closed
# the page. `heads_together` asks for the tiles of several heads at once, tensor by tensor, as soon
# as that many slots are free. Nothing else changes, not a byte.
#
# *Predicted* on 2026-11-21, before it was tried: if open rows are what head_dim 64 lacks, several
# heads together gain there, and less at 128, where a row of a tile is twice as long; if loads on
# the way are too few, they lose, since slots are given back later. The same slots, measured, one
# head at a time and several:

# %% tags=["remove-cell"]
together = pd.DataFrame(
    {
        "": f"{d}, head_dim {h}", "slots": n, "heads together": k,
        "alone, %": share[d, h, label(r, n)] if (r, n) in CASES[d, h] else float("nan"),
        "together, %": share[d, h, label(r, n, k)],
    }
    for d, h in SHAPES
    for r, n, k in BUNDLES[d, h]
    if r == 1
)  # fmt: skip
gained = {}
for d, h in SHAPES:
    alone = min(v3_time((d, h), 1, n) for r, n in CASES[d, h] if r == 1)
    bundled = min(float(time[d, h, label(*case)]) for case in BUNDLES[d, h] if case[0] == 1)
    gained[d, h] = 100 * (1 - bundled / alone)
    glue(f"together_{d}_{h}", gained[d, h])
at_64 = [gained[d, 64] for d in DIRECTIONS]
at_128 = [gained[d, 128] for d in DIRECTIONS]
glue_word("verdict_5", VERDICT[min(at_64) > 1 and max(at_128) < min(at_64)])
glue("best_64", share["backward", 64, chosen["backward", 64]])

# %% tags=["remove-input"]
figures.show_table(together.round(1))

# %% tags=["remove-input"]
figures.provenance(own, csv="roles-slots", data_dir=Path(data_dir))

# %% [markdown]
# Best against best, several heads together gain {glue:text}`roles_together_forward_64:.1f` %
# forward and {glue:text}`roles_together_backward_64:.1f` % backward at head_dim 64, and
# {glue:text}`roles_together_forward_128:.1f` and {glue:text}`roles_together_backward_128:.1f` % at
# 128: **{glue:text}`roles_verdict_5`**. Backward at head_dim 64, where no number of slots or roles
# moved the time, v3 is now at {glue:text}`roles_best_64:.1f` % of the copy. Where slots alone were
# not measured the table has no number.
#
# ## The surprise: what four warps can do

# %% tags=["remove-cell"]
FLOPS = DRAWN.flops("backward")
glue("tflops", FLOPS / time["backward", 128, chosen["backward", 128]] / 1e6)
glue("of_peak", 100 * FLOPS / time["backward", 128, chosen["backward", 128]] / 1e6 / limits.tflops)
assert DEFAULT["backward", 128].math_roles == 1
ones = [f"{d} at head_dim {h}" for (d, h), (roles, *_) in best.items() if roles == 1]
glue("ones", len(ones))
glue("second_gain", 100 * max(0.0, 1 - min(second.values())))
assert 100 * FLOPS / time["backward", 128, chosen["backward", 128]] / 1e6 / limits.tflops < 50

# %% [markdown]
# A math role is four warps, 128 of the 2,048 threads that an SM can hold. In
# {doc}`../forward/v4_warp_specialized` two such roles were the least: one would leave the tensor
# cores idle half the time. Here one role computes softmax, five products and three conversions for
# the SM. The fastest variant has one role in {glue:text}`roles_ones:.0f` of the four cases; the
# most that a second one gains is {glue:text}`roles_second_gain:.1f` %. Backward at head_dim 128 one
# role makes {glue:text}`roles_tflops:.0f` TFLOP/s, {glue:text}`roles_of_peak:.0f` % of what matrix
# products reach on this machine.
#
# So specialization is worth it, but not for what it is known for. It is not that products overlap
# with softmax: inside the role they follow each other. It is that *asking* no longer waits for
# computing. Where the hardware's own scheduler gets the same from many small programs, as forward,
# there is nothing left to buy, and the barriers are a price for nothing.
#
# ## Exercises
#
# :::{exercise} Tiles of their own
# :label: ex-roles-own
#
# Give the results tiles of their own in each slot: O forward; dQ, dK, dV and P backward. How many
# slots fit into 227 KB at head_dim 128? What would the figure above say about such a kernel?
# *(paper, ten minutes)*
# :::

# %% tags=["remove-cell"]
tile = BLOCK * 128 * 2
own_forward = SHARED // (4 * tile)
own_backward = (SHARED - BLOCK * BLOCK * 2) // (7 * tile + BLOCK * BLOCK * 2)
assert (own_forward, own_backward) == (3, 1)
glue("own_forward", own_forward)
glue("own_backward", own_backward)
glue("own_kb", (7 * tile + BLOCK * BLOCK * 2) / 1024)

# Exercise 2: dead and not dead.
TAKEN = "dead = grad[stage] if GROUP == 1"
DQ_OVER_Q = changed(v3_warp_specialized, (TAKEN, TAKEN.replace("grad[stage]", "tiles.q[stage]")))
PUT_DV = "put(dv_desc, tiles.v[stage], block, head_k, dv)"
DV_OVER_Q = changed(v3_warp_specialized, (PUT_DV, PUT_DV.replace("tiles.v", "tiles.q")))
assert finding(DQ_OVER_Q, "backward", Config(1, 2)).startswith("Race")
assert all(
    finding(DV_OVER_Q, "backward", Config(1, 2), s) == "nothing found" for s in ("modelled", 0, 1)
)
right, _ = emulated(v3_warp_specialized, "backward", Config(1, 2), FIVE_BLOCKS)
wrong, _ = emulated(DV_OVER_Q, "backward", Config(1, 2), FIVE_BLOCKS)
assert [torch.equal(a, b) for a, b in zip(wrong, right, strict=True)] == [True, False, True]

# Exercise 3: a B200.
B200_SMS, B200_RATE = 148, 8e12
reads = {"forward": 3 / 4, "backward": 4 / 7}
for d in DIRECTIONS:
    kb = B200_RATE * reads[d] * LATENCY / B200_SMS / 1e3
    glue(f"b200_{d}", kb)
    for h in NAMES:
        glue(f"b200_slots_{d}_{h}", 1 + math.ceil(kb * 1e3 / slot_bytes(d, h)))

# %% [markdown]
# :::{solution} ex-roles-own
# :class: dropdown
#
# Forward 64 KB a slot, {glue:text}`roles_own_forward:.0f` slots: no harm. Backward
# {glue:text}`roles_own_kb:.0f` KB and dS: {glue:text}`roles_own_backward:.0f` slot, with which
# nothing is on the way during the products. Without the dead tiles there would be no reason to have
# roles.
# :::
#
# :::{exercise} Dead or not
# :label: ex-roles-dead
#
# In a copy of the file let dQ leave by the place of Q, and in another one dV. What does the
# emulator say about each, and what do the results say? *(code, ten minutes, no GPU)*
# :::
#
# :::{solution} ex-roles-dead
# :class: dropdown
#
# dQ over Q is a race: the product dK, which is under way, still reads Q. dV over Q is none, under
# any schedule: dK is asked for after dV has been written, and reads it in good order. But what it
# reads is dV and not Q, so dK is wrong and dQ and dV are right. A checker of races finds what has
# no order. That the order is the wrong one, only a comparison with the reference can tell.
# :::
#
# :::{exercise} Slots for a B200
# :label: ex-roles-b200
#
# A B200 has 148 SMs and a nominal 8 TB/s {cite}`nvidiablackwell`. How many KB must be on the way to
# an SM at a latency of 1 µs, and how many slots does each of the four cases need? *(paper, five
# minutes)*
# :::
#
# :::{solution} ex-roles-b200
# :class: dropdown
#
# {glue:text}`roles_b200_forward:.0f` KB forward and {glue:text}`roles_b200_backward:.0f` KB
# backward, besides the slot that is computed on: {glue:text}`roles_b200_slots_forward_128:.0f`
# slots forward at head_dim 128, {glue:text}`roles_b200_slots_forward_64:.0f` at 64,
# {glue:text}`roles_b200_slots_backward_128:.0f` and {glue:text}`roles_b200_slots_backward_64:.0f`
# backward. Slots are not the problem. An item must become faster as well, and then one math role
# may no longer be enough.
# :::
#
# ## Takeaways
#
# - A role that only asks keeps memory busy where one program fills an SM. Where many programs fit,
#   they do the same without a barrier.
# - Count what must be on the way and what can be. Beyond that, slots are just shared memory.
# - Shared memory is found by asking of every tile when it is dead.
