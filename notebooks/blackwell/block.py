# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: false
# ---

# %% [markdown]
# # Blackwell block b1: tensor memory leaves block v1 too few programs, and small roles help
#
# Bytes are the bound of block attention, and a B200 has more bandwidth than an H200. What keeps the
# simplest kernel that saturates an H200 from saturating a B200?
#
# :::{admonition} In this chapter (45 minutes)
# You will be able to compare a kernel's instructions with the time that memory gives them, and to
# divide the work among five or six warp roles. They need {glue:text}`b1_share:.0f` % of the issue
# slots where {doc}`block v1 <../block/v1_one_tile>` needs {glue:text}`v1_share:.0f` %, in the
# forward pass with {term}`rotary`. Nothing here is measured.
# :::

# %% tags=["hide-input"]
import re
import textwrap

import pandas as pd
import torch

from _lib import block_studies, studies
from gdpa_kernels.block_attention.kernels import b1_warp_specialized as b1
from gdpa_kernels.block_attention.kernels import v1_one_tile
from gdpa_lab.measuring import compile_check, cost_model
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("blackwell/block", mode=mode, device=device, data_dir=data_dir)
KERNELS = {}
for module in (v1_one_tile, b1):
    for turns in (None, torch.float32):
        blank = block_studies.blank(128, rotary=turns)
        for direction in ("forward", "backward"):
            kernels = block_studies.built(module, direction, None, blank, capability=100)
            name = module.__name__.split(".")[-1][:2], direction, turns is not None
            KERNELS[name] = kernels[f"{direction}_kernel"]
READ = {name: compile_check.read(kernel) for name, kernel in KERNELS.items()}


def titled(name):
    return " ".join(name[:2]) + ", rotary" * name[2]


# %% tags=["remove-cell"]
first = "        stage, phase = ring_slot(item, options.NUM_STAGES)\n        tlx."
inner = studies.piece(b1, first, "\n\n@triton.jit\ndef softmax_forward")
loop, wait = "* options.NUM_HEADS, num_stages=0):\n" + inner, "        tlx.barrier_wait(p_full"
scores, outputs = inner.split(wait)
previous_turn = """            stage, _ = ring_slot(item - 1, options.NUM_STAGES)
            slot, phase = ring_slot(item - 1, ACCUMULATORS)
"""
ahead = "* options.NUM_HEADS + 1, num_stages=0):\n        if item < count_units(blocks_ptr) * "
ahead += "options.NUM_HEADS:\n" + textwrap.indent(scores, "    ") + "        if item > 0:\n"
ahead += previous_turn + textwrap.indent(wait + outputs, "    ")
looking = studies.changed(b1, (loop, ahead))

# %% tags=["remove-cell"]
three = block_studies.batch((192,), head_dim=128, rotary=torch.float32, rotate_v=True)
ONE = {"arch": "sm_100", "multiprocessors": 1}  # one program has all blocks
lanes = {f"{role}_forward": role for role in ("mma", "softmax", "output")}
line, other = (block_studies.timeline(x, three, lanes=lanes, **ONE) for x in (b1, looking))


def held(timeline):
    """Mean cycles from the start of S to the end of the store, of an item."""
    of_q = [e for e in timeline.events if e.name.startswith("q[")]
    begun = [e.start for e in of_q if e.kind == "mma"]
    return (sum(e.end for e in of_q if e.kind == "store") - sum(begun)) / len(begun)


assert held(other) > 1.5 * held(line)
chapter.glue(in_order=held(line), looking=held(other))

# %% tags=["remove-input"]
# | name: fig-b200-block
# | caption: >
# |   **Every step of an item has a warp role of its own, and rotary is the longest.** Blackwell
# |   block b1 forward with rotary, three blocks of two heads. The role `rotate` applies rotary to
# |   the next item while `softmax` and `output` work. Modelled cycles.
# | alt: >
# |   Eight lanes. The role rotate is always busy; MMA, softmax, MMA, output and store follow it.
chapter.figure(line, emulated="b1_warp_specialized forward, modelled schedule, sm_100")

# %% tags=["remove-input"]
studies.stepper(
    {"in order": line, "looking ahead": other},
    "blackwell-block-steps",
    title="Blackwell block b1, in order and looking ahead",
)

# %% [markdown]
# ## Columns of tensor memory limit the programs of block v1
#
# On sm_100 `tl.dot` becomes tcgen05, whose accumulators are in {term}`tensor memory`: 512 columns
# per SM, of which a program takes a power of two. So columns limit programs too:

# %% tags=["remove-cell"]
programs = []
for name, kernel in KERNELS.items():
    if name[0] == "v1":
        facts, columns = READ[name], kernel.metadata.tmem_size
        others = block_studies.programs_on_an_sm(facts, kernel.metadata.num_warps)
        row = {"kernel": titled(name).removeprefix("v1 "), "registers": facts.registers}
        row |= {"shared (KiB)": facts.shared_bytes / 1024, "columns": columns}
        row |= {"fit by columns": compile_check.TENSOR_COLUMNS // columns}
        programs.append(row | {"by the rest": others})
programs = pd.DataFrame(programs).set_index("kernel")

# %% tags=["remove-input"]
chapter.table(
    programs.reset_index(),
    caption="**In the forward pass tensor memory decides how many programs of block v1 fit.** What "
    "a program takes of an SM, and how many fit.",
    name="tab-b200-programs",
    digits={"shared (KiB)": 0},
    compiled="what the compiler allocates for sm_100a, head_dim 128; an SM has 64 Ki registers, "
    "228 KiB of shared memory, 512 columns",
)
hopper = block_studies.compiled({"v1": (v1_one_tile, "forward")})["programs on an SM"]
assert programs["fit by columns"]["forward"] < programs["by the rest"]["forward"], "the caption"
chapter.glue(v1_programs=programs["fit by columns"]["forward"], v1_hopper=hopper.iloc[0])

# %% [markdown]
# In the forward pass S and O take, rounded up, half of them. Of {glue:text}`v1_hopper:.0f` programs
# on a Hopper SM {glue:text}`v1_programs:.0f` remain. Is that enough? Little's law again
# ({doc}`../block/counting_bytes`): only reads count, and the latency is an assumption, 1 µs. So is
# the bandwidth, {glue:text}`gbytes:,.0f` GB/s in the forward pass, an H200's share of a B200's
# nominal rate ({doc}`model`).

# %% tags=["remove-input"]
TILE = 64 * 128 * 2  # bytes: one tensor, one block, one head
MOVED = {"forward": (3, 1), "backward": (4, 3)}  # tiles read, written
CLOCK = 1.965  # GHz, the highest
budget = {}
for direction, (read, written) in MOVED.items():
    of_an_sm = (
        cost_model.ASSUMED.gbytes_per_s(read, written) / cost_model.B200.sms
    )  # bytes a nanosecond
    needed = of_an_sm * 1000 * read / (read + written) / 1024
    budget[direction] = (read + written) * TILE / of_an_sm * CLOCK
    loads = f"{needed:.0f} KiB in flight, a program loads {read * TILE / 1024:.0f}"
    print(f"{direction:8} {loads}; {budget[direction]:,.0f} clocks for a block of a head")

# %% tags=["remove-cell"]
chapter.glue(gbytes=cost_model.ASSUMED.gbytes_per_s(3, 1), budget=budget["forward"])

# %% [markdown]
# Four programs hid each other's computing; two do only if they happen to take turns.
#
# ## With rotary block v1 needs more issue slots than Blackwell block b1
#
# Memory takes {glue:text}`budget:,.0f` clocks for a block of a head in the forward pass, and each
# of an SM's four schedulers issues one instruction a clock. Block v1's code runs once per block and
# head, one warp on each scheduler: its instructions are its clocks. For Blackwell block b1 we count
# each role's loop:

# %% tags=["remove-cell"]
ROLES = {  # what only its loop holds (None: all there are of these), and what it does not hold
    "turn": (r"\bF(?:FMA|MUL)\b", 100, "LDTM|MUFU"), "softmax": (r"\bMUFU\.EX2", 32, "$^"),
    "output": (r"\bLDTM", 2, "MUFU"), "mma": (r"\bUTCHMMA", None, "$^"),
    "load": (r"\bUTMALDG", None, "$^"), "store": (r"\bUTMASTG", None, "$^"),
}  # fmt: skip


def of_roles(kernel):
    """Instructions of a warp in the shortest such loop of each role."""
    code, loops = compile_check.sass(kernel)
    lengths = {}
    for role, (mnemonic, least, absent) in ROLES.items():
        least = least or len(re.findall(mnemonic, "\n".join(code)))
        for loop in loops:
            body = "\n".join(code[i] for i in loop)
            if len(re.findall(mnemonic, body)) >= least and not re.search(absent, body):
                lengths[role] = len(loop)
                break
    return lengths


issued = []
for (rung, direction, rotary), kernel in KERNELS.items():
    if rung == "v1":
        parts = {"one program": len(compile_check.sass(kernel)[0])}
        clocks = parts["one program"]
    else:
        parts = of_roles(kernel)
        clocks = sum(parts[r] / (1 if ROLES[r][1] else 4) for r in parts)  # four warps, or one
    row = {"kernel": titled((rung, direction, rotary)), "clocks": clocks}
    issued.append(row | {"%": 100 * clocks / budget[direction]} | parts)
issued = pd.DataFrame(issued).set_index("kernel")

# %% tags=["remove-input"]
chapter.table(
    issued[["clocks", "%"]].reset_index(),
    caption="**With rotary Blackwell block b1 issues fewer instructions than block v1.** Clocks "
    "for which a scheduler issues, for a block of a head, and their share of the memory's time.",
    name="tab-b200-issue", digits={"clocks": 0, "%": 0}, data=issued.reset_index(),
    compiled="SASS for sm_100a, head_dim 128, sin and cos in fp32, v rotated too; loops that the "
    "compiler has unrolled are counted whole, so b1's clocks are at most these",
)  # fmt: skip
share = issued["%"]
assert share["b1 forward, rotary"] < share["v1 forward, rotary"], "the caption says so"
assert share["b1 backward, rotary"] < share["v1 backward, rotary"], "the caption says so"
chapter.glue(
    v1_share=share["v1 forward, rotary"], b1_share=share["b1 forward, rotary"],
    v1_back=share["v1 backward, rotary"], b1_back=share["b1 backward, rotary"],
    matmuls=100 * 2 * 2 * 64 * 64 * 128 / (cost_model.B200.flops / 2) / budget["forward"],
)  # fmt: skip

# %% [markdown]
# Without rotary block v1 has slots to spare. With it block v1 needs {glue:text}`v1_share:.0f` and
# {glue:text}`v1_back:.0f` % of them, hardly achievable for two programs. b1 needs
# {glue:text}`b1_share:.0f` and {glue:text}`b1_back:.0f` %: TMA computes addresses, few tiles change
# layout, and sin and cos are read once per block.
#
# ## One thread issues, and every other step has a role
#
# In Blackwell block b1 one thread issues all MMAs and goes on, with two accumulators of each kind,
# and every other step has a role of its own:

# %% tags=["remove-input"]
chapter.roles("b1_warp_specialized", "block_attention")

# %% [markdown]
# The role `mma` shows the schedule, S of an item and then its O:

# %% tags=["remove-input"]
chapter.code(b1.mma_forward, "    for item")

# %% [markdown]
# Two waits are missing on purpose. S may overwrite the scores of two items ago: their P has been
# waited for. P may overwrite K: S, which read K, is complete when softmax runs.
#
# ### Stacking two blocks to 128 rows would gain nothing
#
# Blackwell's tensor cores have their full rate at 128 rows, and half of it at 64. So why not stack
# two blocks and mask the scores between them? For an item of the forward pass:

# %% tags=["remove-input"]
flops, rows = cost_model.B200.flops, ["MMA, clocks", "scores for exp2", "words from tensor memory"]
alone = [4 * 64 * 64 * 128 / (flops / 2), 64 * 64, 64 * 64 + 64 * 128]
stacked = [4 * 128**3 / flops / 2, 128**2 / 2, (128**2 + 128**2) / 2]
assert stacked[0] == alone[0], "the caption says so"
shapes = pd.DataFrame({"of an item": rows, "64 rows": alone, "two blocks, 128 rows": stacked})
chapter.table(
    shapes,
    caption="**Stacking saves no MMA clocks and adds words to read.** What an item costs alone and "
    "as half of a stacked pair, if each warp takes all 128 columns.",
    name="tab-b200-stacked", modelled="tiles of head_dim 128; a stacked pair is two items",
)  # fmt: skip

# %% [markdown]
# Half of what the stacked MMA computes is thrown away, which cancels its higher rate. The MMAs take
# {glue:text}`matmuls:.0f` % of the budget either way. b1 has 64 rows, and the compiler packs two
# such accumulators into the two halves of the lanes.
#
# ### Shared memory decides the number of slots
#
# A program may have 232,448 bytes of shared memory: four slots of 48 KiB in the forward pass and
# three of 64 KiB in the backward pass, with rotary and without. That leaves one slot of sin and
# cos, 32 KiB, which roles read into registers as soon as they reach a block. In the backward pass P
# and dS overwrite the two halves of V, and all 512 columns are taken: S, dP, dQ, dK and dV, twice,
# of 64 rows each.

# %% tags=["remove-cell"]
for name in [name for name in KERNELS if name[0] == "b1"]:
    blank = block_studies.blank(128, rotary=torch.float32 if name[2] else None)
    slots = b1.default_config(name[1], blank).num_stages
    assert slots == (4 if name[1] == "forward" else 3), "the text says so"
    assert name[1] == "forward" or KERNELS[name].metadata.tmem_size == 512, "the text says so"

# %% [markdown]
# ## Surprise: looking ahead makes items late
#
# Every fast kernel of GDPA issues S of the next tile before it waits for P of this one, so that the
# tensor cores never idle ({doc}`../forward/v5_pingpong`). The first version of b1 did that too.
# In the emulator an item then takes {glue:text}`looking:,.0f` cycles from its S to the end of its
# store, where it takes {glue:text}`in_order:,.0f` in order.
#
# Where memory is the bound, or here rotary, an output that waits for the next item holds a slot
# that a load could use. In the backward pass looking ahead could even deadlock, as the emulator
# reported.
#
# ## The emulator finds every mistake in a barrier

# %% tags=["remove-cell"]
ragged = block_studies.batch((0, 1, 63, 64, 65), rotary=torch.float32, rotate_v=True)
block_studies.comparison(b1, ragged, arch="sm_100")

# %% [markdown]
# The tests leave out each operation on a barrier, flip each phase, and change each count and buffer
# by one. The emulator finds all of these mistakes.
#
# *Not proved*: what {doc}`tensor_memory` lists, above all fences, for which TLX has no call.
#
# ## A prediction for the first B200
#
# From bytes, assumed copy rates and a margin, registered before any measurement ({doc}`model`):

# %% tags=["remove-cell"]
rows = pd.read_csv(chapter.data_dir / "predictions" / "b200.csv")
rows = rows[rows["impl"] == "b1_warp_specialized"].set_index(["workload", "direction"])
floor = {}
for name, way in rows.index:
    work = workload(name)
    rate = cost_model.ASSUMED.gbytes_per_s(work.bytes_read(way), work.bytes_written(way))
    floor[name, way] = work.bytes(way) / rate / 1e6
published = pd.read_csv(chapter.data_dir / "published" / "block_attention_times.csv")
alone = published.query("kernel == 'tlx_block_attention' and table == 'table5'")
alone = alone.set_index("direction")["time_ms"]

# %% tags=["remove-input"]
shown = rows[["from", "predicted", "to"]].assign(floor=pd.Series(floor)).add_suffix(" (ms)")
chapter.table(
    shown.reset_index(),
    caption="**Predicted times lie a margin above the floor.** Times of Blackwell block b1 on a "
    "B200, the interval they must lie in, and the time of the fewest bytes.",
    name="tab-b200-predicted",
    digits=dict.fromkeys(shown, 2),
    modelled="data/predictions/b200.csv; floor: fewest bytes at the assumed copy rates",
)
assert (shown["predicted (ms)"] > shown["floor (ms)"]).all(), "the caption says so"
predicted = rows["predicted"].loc["block-fill70-2000"]
chapter.glue(published=alone["forward"], back=alone["backward"] / predicted["backward"])

# %% [markdown]
# The published forward kernel takes {glue:text}`published:.2f` ms on the first workload
# {cite}`siso2026block`, so we expect no gain there; the published backward kernel takes
# {glue:text}`back:.2f` times the predicted time. The prediction fails if b1 is outside its interval
# on a B200 whose copies run at the assumed rates.
#
# ## Exercises
#
# :::{exercise} Heads of 64
# :label: ex-b200-slots
#
# How many slots fit at head_dim 64 in the backward pass, with sin and cos in fp32? V's tile has
# room for P alone, so two tiles of dS come on top. *(paper, five minutes)*
# :::
#
# :::{solution} ex-b200-slots
# :class: dropdown
#
# A slot is 32 KiB, sin and cos 16, dS 2 × 8. That leaves 194 of 226 KiB: six slots.
# :::
#
# :::{exercise} Grouped heads, stacked
# :label: ex-b200-stack
#
# Two query heads that share a key head make 128 rows of Q against 64 keys, and nothing is masked.
# What does that save of MMA clocks and of bytes loaded, forward? *(paper, ten minutes)*
# :::
#
# :::{solution} ex-b200-stack
# :class: dropdown
#
# Half of the MMA clocks, for which no role waits. b1 loads K and V for every query head, 6 tiles
# for the two; stacked they are 4. The second read of K and V may hit the L2 cache: measure it.
# :::
#
# :::{exercise} A wait that is missing
# :label: ex-b200-wait
#
# Drop the wait for `o.empty[at]` in a copy of the file. What does the emulator say? Would results
# be wrong? *(emulator, ten minutes)*
# :::
#
# :::{solution} ex-b200-wait
# :class: dropdown
#
# With four slots, a `Race`: `output` may still read O of two items ago when the MMA overwrites it.
# With races allowed, `o_full` may complete twice before `output` looks, and it waits for ever. With
# two slots it finds no fault: an item is loaded only when the one two before has left its slot.
# :::
#
# ## Takeaways
#
# - For a memory-bound kernel tcgen05 brings no rate; it brings smaller roles.
# - Looking ahead pays where a unit must not idle. Where memory is the bound it holds a slot.
