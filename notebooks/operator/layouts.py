# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Banks and layouts
#
# In which bank of shared memory, in which thread's registers does each number of a tile lie, and
# when does that cost cycles?
#
# :::{admonition} In this chapter (25 minutes)
# You will count bank conflicts, mend them with a swizzle, say which thread holds an element of an
# {term}`accumulator`, and see when the compiler moves a whole tile to rotate its pairs.
# :::

# %% tags=["hide-input"]
import numpy as np
import pandas as pd

import tritonemu
from gdpa_lab.measuring import compile_check
from gdpa_lab.report.chapter import Chapter
from notebooks.operator import _machine_drawings as drawn
from notebooks.operator import _rotary_pairs as pairs

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("operator/layouts", mode=mode, device=device, data_dir=data_dir)


def cycles(addresses):
    words = np.unique(addresses // 4)  # threads may share a word
    return np.bincount(words % 32).max()


def swizzled(address):
    return address ^ (address >> 7 & 7) << 4  # bits of the piece, bits of the row


def piece(row, column, stride=128):
    """Addresses of the four words of 16-byte piece `column` of rows."""
    return np.add.outer(row * stride + 16 * column, 4 * np.arange(4))


EIGHT, MARKED = np.arange(8), 2
places = np.add.outer(128 * EIGHT, 16 * EIGHT)
panels = {
    "as written, over banks": (np.tile(EIGHT, (8, 1)), cycles(piece(EIGHT, MARKED))),
    "swizzled, over banks": (swizzled(places) % 128 // 16, cycles(swizzled(piece(EIGHT, MARKED)))),
}

# %% tags=["remove-input"]
# | name: fig-layout-banks
# | caption: >
# |   **A swizzle spreads a column over all banks.** Eight rows of 128 bytes in shared memory, each
# |   of eight pieces of 16 bytes, over the banks that hold them.
# | alt: >
# |   Two grids of eight rows and eight columns. Left, as written, the marked piece of every row
# |   lies in banks 8 to 11: eight cycles. Right, swizzled, it lies in another column in each row:
# |   one cycle.
chapter.figure(drawn.banks(panels, MARKED), computed="the functions of this chapter")

# %% [markdown]
# ## Thirty-two banks
#
# {term}`Shared memory` consists of 32 *banks*. Each serves one word of 4 bytes a cycle, which makes
# the 128 bytes of the port ({doc}`machine`); the next word lies in the next bank. If threads want
# different words of one bank, they wait in turn: a **bank conflict**. An access takes the cycles of
# its busiest bank:

# %% tags=["remove-input"]
chapter.code(cycles)

# %% [markdown]
# A row of 64 numbers in bf16, 128 bytes, passes once through all banks, so a column lies in a
# single bank. An MMA reads its operands as pieces of 16 bytes of eight rows, which begin in the
# same bank: eight cycles instead of one. The **swizzle** of 128 bytes puts piece $c$ of row $r$ at
# place $c$ XOR $r \bmod 8$:

# %% tags=["remove-input"]
chapter.code(swizzled)
lines = np.arange(32)
ACCESSES = {
    "a row: its 8 pieces": lambda stride: piece(0, EIGHT, stride),
    "a piece of 8 rows": lambda stride: piece(EIGHT, MARKED, stride),
    "a word of 32 rows": lambda stride: lines * stride + 4 * MARKED,
}
conflicts = pd.DataFrame(
    {
        "as written": {name: cycles(words(128)) for name, words in ACCESSES.items()},
        "rows of 144 bytes": {name: cycles(words(144)) for name, words in ACCESSES.items()},
        "swizzled": {name: cycles(swizzled(words(128))) for name, words in ACCESSES.items()},
    }
)
assert conflicts.loc["a word of 32 rows"].tolist() == [32, 4, 4], "the text"
assert conflicts.iloc[:2, 1:].eq(1).all(axis=None), "the text: padding mends as much"
chapter.table(
    conflicts.rename_axis("access").reset_index(), name="tab-layout-banks",
    caption="**Swizzled, pieces of a column are as cheap as a row, and single words not quite.** "
    "Cycles of the port.",
    computed="the functions above",
)  # fmt: skip

# %% [markdown]
# Padded rows cure as much but waste shared memory, and TMA writes its box without gaps. In TLX
# `local_alloc` chooses the swizzle by the bytes of a row, and TMA, MMA and the reads of your
# threads follow it; a tile of 128 columns is stored as two of 64.
#
# ## Which thread holds what
#
# The result D of a `wgmma` lies in the registers of its four warps, 16 rows in each
# {cite}`nvidiaptx`:


# %%
def hopper(row, column):
    """(warp, lane) of an element of D."""
    return row // 16, row % 8 * 4 + column % 8 // 2


def blackwell(row, column):
    """The same, after a copy from tensor memory to registers by four warps."""
    return row // 32, row % 32


for row in (0, 1, 8):
    print(f"row {row}: lanes", *(hopper(row, column)[1] for column in range(10)), "...")

# %% tags=["remove-cell"]
DIM = 128
rows, columns = np.meshgrid(range(64), range(DIM), indexing="ij")
threads = np.stack(
    [32 * warp + lane for warp, lane in (hopper(rows, columns), blackwell(rows, columns))]
)
assert (np.bincount(threads[0].ravel()) == 64).all() and {*rows[threads[0] == 5]} == {1, 9}
assert [len({*of[3]}) for of in threads] == [4, 1], "the text: threads of a row"
assert (threads[..., ::2] == threads[..., 1::2]).all(), "the text: interleaved pairs"
assert (threads[..., : DIM // 2] == threads[..., DIM // 2 :]).all(), "the text: half-split pairs"

# %% [markdown]
# A thread of Hopper has two rows, $r$ and $r + 8$, and of each two neighbours out of eight columns,
# so a sum over a row takes four threads and two shuffles. On Blackwell a thread has a whole row.
#
# ## Pairs that rotate
#
# {term}`Rotary <rotary>` embeddings rotate pairs of columns, *interleaved* ($2i$, $2i + 1$) or
# *half-split* ($i$, $i + d/2$). If $d/2$ is a multiple of 8, either pair lies in one thread on both
# chips, so rotating an accumulator need not move it:

# %% tags=["remove-input"]
chapter.code(pairs.half_split, "    low, high")

# %% [markdown]
# But the compiler chooses the layouts. Sin and cos, loaded in pieces of 16 bytes, come in another
# one than the halves of `x`, and either must move. One MMA, rotated and stored, $d$ = 128:

# %% tags=["remove-input"]
FORMS = {
    "interleaved": ("interleaved", False), "half-split": ("half-split", False),
    "half-split, sines loaded first": ("half-split", True),
}  # fmt: skip
CHIPS = {"Hopper": 90, "Blackwell": 100}
moved = {}
for name, (pairing, first) in FORMS.items():
    for chip, capability in CHIPS.items():
        with tritonemu.enabled(f"sm_{capability}"):
            pairs.check(pairing, first, capability)
        built = pairs.build(pairing, first, capability)
        of_kernel = compile_check.read(built)
        moved.setdefault(name, {}).update({
            f"{chip}: moved": pairs.converted(built.asm["ttgir"]) / (pairs.ROWS[capability] * DIM),
            "registers" + " " * (capability > 90): of_kernel.registers,
            "spilled" + " " * (capability > 90): of_kernel.spill_bytes,
        })  # fmt: skip
moved = pd.DataFrame(moved).T
spilled = moved.pop("spilled "), moved.pop("spilled")
assert not spilled[1].any() and not spilled[0].iloc[1:].any(), "the text: one case"
chapter.glue(spilled=spilled[0].iloc[0])
assert moved.loc["half-split", ["Hopper: moved", "Blackwell: moved"]].tolist() == [2, 0], "the text"
assert moved.iloc[2][["Hopper: moved", "Blackwell: moved"]].eq(0).all(), "the caption"
assert moved.iloc[0][["Hopper: moved", "Blackwell: moved"]].eq(1).all(), "the text: the tile"
chapter.table(
    moved.rename_axis("pairs").reset_index(), name="tab-layout-pairs",
    digits=dict.fromkeys(moved, 0),
    caption="**Half-split pairs can stay where they are; interleaved ones move the whole tile.** "
    "Tiles that change layout through shared memory, and registers of a thread.",
    compiled="notebooks/operator/_rotary_pairs.py; its results are right in the emulator",
)  # fmt: skip

# %% [markdown]
# Interleaved pairs spill {glue:text}`spilled:.0f` bytes a thread on Blackwell, and on Hopper the
# order of two lines decides between two tiles and none. So look for `ttg.convert_layout` of a large
# tile in the TTGIR ({doc}`machine`). On Hopper load the small operand first; on Blackwell it
# costs registers and moves nothing less. Or choose the pairing: permuting
# the columns of the projections of q and k alike turns interleaved pairs into halves and leaves all
# scores as they are. Or rotate an operand in shared memory before its MMA, where any layout may
# read it ({doc}`../block/v4_rotary`).
#
# ## Exercises
#
# :::{exercise} Storing an accumulator
# :label: ex-layouts-store
#
# A warp of Hopper stores D as bf16 into rows of 128 bytes, each thread two neighbours as a word.
# How many cycles does such a store take, without and with the swizzle? *(paper)*
# :::

# %% tags=["remove-cell"]
stored = np.array([128 * row + 2 * column for row in range(8) for column in range(0, 8, 2)])
assert (cycles(stored), cycles(swizzled(stored))) == (8, 1), "the solution"

# %% [markdown]
# :::{solution} ex-layouts-store
# :class: dropdown
#
# The 32 threads write eight rows, four words each: one 16-byte piece of eight rows. As written all
# of them lie in four banks, eight cycles; swizzled, in all banks, one cycle.
# :::
#
# :::{exercise} Two warp groups, one accumulator
# :label: ex-layouts-groups
#
# On Blackwell two warp groups share the 128 rows of an accumulator, each with half of the columns.
# Which pairs are split between the groups, and how would you assign the columns instead? *(paper)*
# :::
#
# :::{solution} ex-layouts-groups
# :class: dropdown
#
# All half-split pairs: $i$ lies in one group and $i + d/2$ in the other. Give each group two
# slices, columns $0$ to $d/4 - 1$ and $d/2$ to $3d/4 - 1$ to the first. Two copies from tensor
# memory instead of one, and every pair is in one thread again.
# :::
#
# ## Takeaways
#
# - An access costs the cycles of its busiest bank. Swizzle, and read 16 bytes.
# - A row lies in four threads on Hopper, in one on Blackwell.
# - The compiler chooses layouts: read which tiles it converts.
