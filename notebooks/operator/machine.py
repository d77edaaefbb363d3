# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # The machine in ten pages
#
# Which parts of a GPU decide how fast an attention kernel runs, and how much of each is there?
#
# :::{admonition} In this chapter (45 minutes)
# You will draw an {term}`SM` of an H200 (*Hopper*) and of a B200 (*Blackwell*, the next
# generation), share out its registers, count the cycles that one matmul costs each of its units,
# and follow a line of Python down to machine code.
# :::

# %% tags=["hide-input"]
import re

import pandas as pd

from gdpa_lab.measuring import compile_check, cost_model, roofline
from gdpa_lab.measuring import system as systems
from gdpa_lab.report.chapter import Chapter
from notebooks.operator import _machine_drawings as drawn
from notebooks.tools.kernels import pipeline

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("operator/machine", mode=mode, device=device, data_dir=data_dir)
run = chapter.record("measuring/roofline")
machine = systems.load(chapter.data_dir / "systems" / f"{run.system}.json")
ceilings = roofline.Ceilings.measured(run.ceilings)
FILE, THREAD = 64 * 1024, 255
SHARED, COLUMNS = compile_check.SHARED_BYTES[90], compile_check.TENSOR_COLUMNS
UNIT = drawn.Unit(
    registers=FILE, shared_kib=SHARED / 1024, port_bytes=cost_model.SMEM_BYTES,
    mufu=cost_model.MUFU_LANES, flops=cost_model.H200.flops, lanes=128,
)  # fmt: skip
assert machine.num_sms == cost_model.H200.sms

# One matmul of 128 x 128 x 128: KiB that its operands move through the port.
A, B = 32, 32
MOVED = {
    "Hopper, A from shared memory": (cost_model.H200, A + 2 * B),
    "Hopper, A from registers": (cost_model.H200, 2 * B),
    "Blackwell, A from shared memory": (cost_model.B200, A + B),
    "Blackwell, A from tensor memory": (cost_model.B200, B),
    "Blackwell, a pair of SMs shares B": (cost_model.B200, A + B // 2),
}
matmul = pd.DataFrame(
    {
        "tensor cores": cost_model.mma(chip, 1),
        "through the port, KiB": kib,
        "port": cost_model.kibibytes(kib),
        "port, %": 100 * cost_model.kibibytes(kib) / cost_model.mma(chip, 1),
    }
    for chip, kib in MOVED.values()
).set_axis(list(MOVED))
mufu = cost_model.TILE**2 / cost_model.MUFU_LANES
clock = cost_model.H200.clock_ghz(ceilings.tflops)
chapter.glue(
    mma_h200=cost_model.mma(cost_model.H200, 1), mma_b200=cost_model.mma(cost_model.B200, 1),
    port_h200=matmul["port"].iloc[0], port_registers=matmul["port"].iloc[1],
    flop=2 * cost_model.TILE**3, rate_h200=cost_model.H200.flops, rate_b200=cost_model.B200.flops,
    mufu=mufu, mufu_h200=100 * mufu / cost_model.mma(cost_model.H200, 2),
    mufu_b200=100 * mufu / cost_model.mma(cost_model.B200, 2),
    copy=ceilings.copies[0][1], clock=clock,
    hbm=ceilings.copies[0][1] / clock / cost_model.H200.sms,
)  # fmt: skip
assert matmul["port, %"].max() == 100, "the text: no room for anything else"

# %% tags=["remove-input"]
# | name: fig-machine-sm
# | caption: >
# |   **An SM is four small processors around one shared memory.** What is inside the frame exists
# |   once in each SM; L2 and HBM serve all of them. Sizes of an H200.
# | alt: >
# |   A frame, one SM, holds four equal columns. Each has a scheduler, registers, a tensor core,
# |   fp32 lanes and MUFU lanes. Four arrows lead down through one port to shared memory, beside
# |   which stands TMA. Right of the frame TMA reaches the L2 cache, and L2 reaches HBM.
chapter.figure(
    drawn.sm(UNIT, cost_model.H200.sms, machine.l2_bytes / 2**20),
    modelled="drawn from the facts in the last table of this chapter",
)

# %% [markdown]
# ## Threads come in warps of 32
#
# A GPU is a hundred or more processors, *streaming multiprocessors* or **SMs**, and a *kernel* is a
# function that runs on all of them, as many *programs*; Triton says program where CUDA says
# {term}`CTA` or thread block. A program runs on one SM from beginning to end. Its threads come in
# **warps** of 32 that execute the same instruction together. In every cycle each of an SM's four
# schedulers issues one instruction for one of its warps.
#
# Most kernels hide latency by many warps on an SM, or high {term}`occupancy`. The fast kernels of
# this book have few warps with many registers, and their copies and matmuls run *asynchronously*.
#
# Four neighbouring warps, 128 threads, form a **{term}`warp group`**, one warp on each scheduler.
# Hopper's tensor cores take their orders from a whole one. In a warp-specialized kernel each group
# has a **{term}`role`**: one only loads, two others only compute.
#
# ## Registers: 64 Ki to share out
#
# An SM has {glue:text}`file:,.0f` registers of 32 bits. A thread can address at most
# {glue:text}`thread:.0f` of them, and a program keeps what it was given until it ends. The more
# warps, the fewer registers for each ({numref}`fig-machine-registers`): with 12 warps a thread may
# have {glue:text}`share_12:.0f`, with 20 warps {glue:text}`share_20:.0f`, since shares are
# multiples of 8. A value that does not fit is a **{term}`spill`**: it goes to local memory and
# comes back, and it usually ruins a loop.
#
# Accumulators are what fills registers. The result of a matmul for 64 rows and 128 columns is 8,192
# numbers in fp32: in the 128 threads of a warp group, 64 registers each. A consumer of
# {doc}`forward v4 <../forward/v4_warp_specialized>` holds two of them, S and O, and P in bf16 takes
# another 32 registers: 160 before the first address, so it asks for {glue:text}`consumer:.0f`.

# %% tags=["remove-cell"]
built = compile_check.build_rung("v8_own_waits")
launched = int(re.search(r"\.maxnreg (\d+)", built.asm["ptx"])[1])
asked = [int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)",
                                    built.asm["ptx"])]  # fmt: skip
consumer, producer = max(n for n in asked if n <= THREAD), min(asked)


def share(warps: int) -> int:
    """Registers of a thread if all warps have as many: a multiple of 8."""
    return FILE // (32 * warps) // 8 * 8


assert launched == share(12), "the text: twelve warps start with equal shares"
assert (producer + 2 * consumer) * 128 <= launched * 384, "and share out what they had"
SPLITS = {
    "12 warps with equal shares": [("all", 12, share(12))],
    "20 warps with equal shares": [("all", 20, share(20))],
    "forward v8: 8 consumer warps, 4 producer warps": [
        ("consumers", 8, consumer), ("producer", 4, producer)
    ],
}  # fmt: skip
chapter.glue(
    file=FILE, thread=THREAD, share_12=share(12), share_20=share(20), consumer=consumer,
    producer=producer, launched=launched, freed=128 * (launched - producer),
    wanted=2 * 128 * (consumer - launched),
)  # fmt: skip

# %% tags=["remove-input"]
# | name: fig-machine-registers
# | caption: >
# |   **Roles of different size share the registers better than equal warps.** The register file of
# |   an SM three times, to scale; the number in a part is the registers of one thread.
# | alt: >
# |   Three horizontal bars of equal length. The first is filled by twelve warps, the second, with
# |   a gap at the end, by twenty. In the third two consumer groups take nine tenths and the
# |   producer a narrow part beside them.
chapter.figure(
    drawn.registers(SPLITS, FILE), compiled="forward v8 for sm_90a, its launch bound and setmaxnreg"
)

# %% [markdown]
# (rule-registers)=
# A role that only asks for copies needs few. **{term}`setmaxnreg`** moves registers between roles,
# in multiples of 8: forward v8 starts its 12 warps with {glue:text}`launched:.0f` a thread. Its
# producer puts all but {glue:text}`producer:.0f`, {glue:text}`freed:,.0f` in all, into a pool of
# the program, and its two consumers take {glue:text}`wanted:,.0f` out of it, to have
# {glue:text}`consumer:.0f` a thread. A role that asks for more than the pool holds waits.
#
# ## Shared memory and its port
#
# **{term}`Shared memory`** belongs to an SM and is managed by the program: up to
# {glue:text}`shared:.0f` KiB. Tiles of K and V lie there in {term}`slots <slot>`, with the barriers
# that guard them. One port moves {glue:text}`port:.0f` bytes a cycle, of what TMA writes, what the
# tensor cores read and what threads exchange. A tile of 128 × 128 in bf16 has 32 KiB and takes 256
# cycles of the port each time that it is written or read.
#
# The port is only that fast if an access touches all banks of the memory equally, for which tiles
# are stored *swizzled* ({doc}`layouts`).
#
# ## Tensor cores, and where their operands lie
#
# A tensor core multiplies small matrices and adds: an **{term}`MMA`**, D = A B + D. Where A, B and
# D may lie differs between the two generations ({numref}`fig-machine-operands`).

# %% tags=["remove-input"]
# | name: fig-machine-operands
# | caption: >
# |   **On Hopper results live in registers, on Blackwell in tensor memory.** Where the operands A
# |   and B and the result of an MMA may lie.
# | alt: >
# |   Two diagrams. Left, Hopper: registers exchange the result, or A, with the tensor cores; shared
# |   memory gives A and B. Right, Blackwell: shared memory gives A and B, tensor memory below the
# |   tensor cores holds the result, or A, and registers only copy to and from tensor memory.
chapter.figure(drawn.operands(), modelled="drawn from the PTX ISA's rules for wgmma and tcgen05")

# %% [markdown]
# **Hopper.** A warp group issues `wgmma` for 64 rows, M = 64, and up to 256 columns
# {cite}`nvidiaptx`. B comes from shared memory, A from shared memory or registers, and D is in
# registers. The instruction is asynchronous: MMAs are bundled into {term}`commit groups <commit
# group>`, and {term}`wait_group` waits until at most n of these are still running.
# Meanwhile the registers of D must not be touched. Where the compiler cannot prove that, it
# **serialises**: it waits after each `wgmma`, and the tensor cores run dry.
#
# **Blackwell.** One thread issues `tcgen05.mma` for the whole program. Its D lies in
# {term}`tensor memory`, B in shared memory, and A in either. With M = 128 a row of the result has a
# lane of tensor memory to itself. M = 64 is allowed, but runs at half the rate. Completion arrives
# on an {term}`mbarrier` (below).
#
# ## One matmul in cycles
#
# A matmul of 128 × 128 × 128 has 2 · 128³ = {glue:text}`flop:,.0f` FLOPs. An H200's SM does
# {glue:text}`rate_h200:,.0f` dense bf16 FLOPs a cycle, a multiply-add counting two, and a B200's
# {glue:text}`rate_b200:,.0f` {cite}`zadouri2026flashattention4`. That makes
# {glue:text}`mma_h200:,.0f` and {glue:text}`mma_b200:,.0f` cycles. What does the port do meanwhile?
#
# A is 32 KiB and B is 32 KiB. On Hopper two warp groups share the rows: each reads its own half of
# A, and *each reads all of B*. So 32 + 2 · 32 = 96 KiB pass through the port, in
# {glue:text}`port_h200:,.0f` cycles. If A is already in registers, as P is in P V, 64 KiB remain:
# {glue:text}`port_registers:,.0f` cycles. On Blackwell the 128 rows are one MMA that reads B once,
# but it must be done in half the time:

# %% tags=["remove-input"]
chapter.table(
    matmul.round(0).astype(int).reset_index(names="128 × 128 × 128"),
    caption="**Blackwell's tensor cores can use up the whole port.** Cycles of one SM for one "
    "matmul, and the share of these in which the port is busy.",
    modelled="counted from tile sizes and the rates in the table of facts",
)

# %% [markdown]
# At 100 % TMA cannot fill the next slot while such MMAs run. This is why Blackwell kernels keep P
# in tensor memory, and why pairs of SMs share B ({doc}`../blackwell/pairs_and_columns`).
#
# ## Special functions
#
# The **{term}`MUFU`** evaluates `tanh`, `ex2` and reciprocals: {glue:text}`mufu_rate:.0f` results
# per SM and cycle, on both chips. A tile of 128 × 128 scores with one `tanh` each takes
# {glue:text}`mufu:,.0f` cycles. In the forward pass that tile also costs two matmuls. So the MUFU
# is busy for {glue:text}`mufu_h200:.0f` % of the tensor cores' time on Hopper and
# {glue:text}`mufu_b200:.0f` % on Blackwell ({doc}`activations`).
#
# ## TMA, L2 and HBM
#
# **{term}`TMA`**, the tensor memory accelerator, copies a *box* of a tensor between global and
# shared memory. One thread starts it. A {term}`descriptor`, made by the host, holds address, shape,
# strides and box, so copying needs no address arithmetic and no registers.
#
# What TMA reads comes through the **L2 cache**, {glue:text}`l2:.0f` MiB for the whole H200, from
# **HBM**, the memory. Our copies reach {glue:text}`copy:,.0f` GB/s ({doc}`../measuring/roofline`).
# At {glue:text}`clock:.2f` GHz, the clock at which full tensor cores would equal our fastest
# matmul, this is only {glue:text}`hbm:.0f` bytes per SM and cycle, so each byte should be used many
# times.
#
# ## An mbarrier in words
#
# How does a role know that a tile has arrived? An **mbarrier** is a 64-bit word in shared memory
# that holds two counters and a phase {cite}`nvidiaptx`:
#
# - *Count.* It is created with a number of **arrivals** that it expects in each phase.
# - *Bytes.* A producer may announce bytes, `expect_tx`. A copy subtracts its own when they have
#   landed.
# - *Phase.* When both counters are at zero, the phase is complete. The next one begins at once with
#   the full count.
# - *Parity.* A wait names no phase but a parity, even or odd, and passes if the last completed
#   phase has it.

# %% tags=["remove-cell"]
BOX = 2 * 128 * 64
moments = [
    drawn.Moment("created for\none arrival", 1, 0, 0),
    drawn.Moment("K's box lands\nearly", 1, -BOX, 0),
    drawn.Moment("load announces\nboth boxes", 0, 2 * BOX - BOX, 0),
    drawn.Moment("V's box lands:\nphase complete", 1, 0, 1),
]

# %% tags=["remove-input"]
# | name: fig-machine-barrier
# | caption: >
# |   **A copy may land before its bytes are announced.** An mbarrier for two boxes of 128 × 64
# |   numbers in bf16. Bytes may be negative for a while, since the phase cannot end before the
# |   arrival.
# | alt: >
# |   Four states in a row. Created: one arrival missing. A box lands early: bytes below zero. The
# |   announcement: no arrival missing, the bytes of one box missing. The second box lands: phase 1
# |   begins, in another colour, with one arrival missing again.
chapter.figure(drawn.barrier(moments), modelled="counted by the rules of the text")

# %% [markdown]
# Which {ref}`phase <rule-phases>` to wait for, and how many {ref}`arrivals <rule-arrivals>` and
# {ref}`bytes <rule-expect-tx>` to count, {doc}`../forward/first_tlx_kernel` states and tries out.
#
# A *named barrier* is something else: each program has 16 of them, and they count threads, no
# bytes.
#
# Threads, and TMA or tensor cores, reach shared memory on different paths, and a {ref}`fence
# <rule-fences>` orders the two.
#
# ## Resources that block
#
# Three resources block whoever asks for them:
#
# | who waits | for what | hangs if |
# |:--|:--|:--|
# | `setmaxnreg.inc` | registers in the pool | roles ask for more than all gave back |
# | `tcgen05.alloc` | columns of tensor memory | their owner waits for this program |
# | a wait for another program | that it runs at all | it does not fit on the GPU beside this one |
#
# A launch promises only within a cluster that programs are **resident** together. In a grid of more
# programs than fit the first may occupy all SMs and wait for those that cannot start.
#
# (rule-columns)=
# ## Tensor memory
#
# A Blackwell SM has {glue:text}`columns:.0f` columns of tensor memory with 128 lanes of 4 bytes
# each, {glue:text}`tmem:.0f` KiB. A program allocates columns in powers of two, at least 32. A
# thread cannot compute on them: a warp copies columns to registers (`tcgen05.ld`) and back
# (`tcgen05.st`), and a warp reaches only the 32 lanes of its place in its warp group.
# {doc}`../blackwell/tensor_memory` shares out the columns.
#
# ## From Python to machine code
#
# A Triton kernel passes through five forms:

# %% tags=["remove-cell"]
types = {"q_ptr": "*bf16", "k_desc": "tensordesc<bf16[128, 64]>", "out_ptr": "*fp32",
         "blocks": "i32"}  # fmt: skip
constants = {"BLOCK_M": 64, "BLOCK_N": 128, "HEAD_DIM": 64}
small = compile_check.build(pipeline.pipeline_kernel, types, constants, options={"num_warps": 4})
sass = compile_check.disassemble(small)


def line(text: str, word: str, most: int = 78) -> str:
    """The first line with `word`, without its address, at most as long as the page is wide."""
    instruction = next(part for part in text.splitlines() if word in part)
    instruction = re.sub(r"/\*\w+\*/|loc\(.*|%\w+ = ", "", instruction).strip()
    instruction = re.sub(r"\{%r\d+,.*", "{64 registers}, ...", instruction)
    return instruction if len(instruction) <= most else f"{instruction[: most - 4]} ..."


SOURCE = "scores = tlx.async_dot(q, tlx.local_trans(k[stage]))"
assert SOURCE in open(pipeline.__file__).read()  # noqa: SIM115
STAGES = [
    ("Python", "what you write: tiles, buffers, barriers, roles", SOURCE),
    ("TTIR", "Triton's IR: operations on tiles, no threads yet",
     line(small.asm["ttir"], "ttng.warp_group_dot ")),
    ("TTGIR", "GPU IR: which thread holds what (layouts), waits, software pipelining",
     line(small.asm["ttgir"], "ttng.warp_group_dot ")),
    ("PTX", "virtual machine code: threads, unlimited registers",
     line(small.asm["ptx"], "wgmma.mma_async")),
    ("SASS", "machine code by ptxas: real registers, order of instructions, spills",
     line(sass, "HGMMA")),
]  # fmt: skip
hgmma = compile_check.read(small).instructions["HGMMA"]
chapter.glue(hgmma=hgmma)
assert hgmma * 16 == constants["HEAD_DIM"], "the text: 16 columns of head_dim each"

# %% tags=["remove-input"]
# | name: fig-machine-stages
# | caption: >
# |   **One line of Python becomes a few instructions.** The matmul of `pipeline.py` in the five
# |   forms of a kernel; arrows are compiler passes, the last one is ptxas.
# | alt: >
# |   Five boxes from top to bottom: Python, TTIR, TTGIR, PTX, SASS. Beside each stand what it
# |   decides and one line of code: async_dot, twice warp_group_dot, wgmma.mma_async, and HGMMA.
chapter.figure(drawn.stages(STAGES), compiled="notebooks/tools/kernels/pipeline.py for sm_90a")

# %% [markdown]
# In TTGIR, the second intermediate representation (**IR**), Triton may move or *add* waits
# ({doc}`../forward/v8_own_waits`). **PTX** is NVIDIA's portable assembly, and **ptxas** makes
# **{term}`SASS`** of it. Only SASS shows what runs: {glue:text}`hgmma:.0f` HGMMA, each for 16 of
# the 64 columns of head_dim.
#
# ## What TLX adds
#
# In plain Triton the compiler decides about warps, buffers and waits. **{term}`TLX`** (Triton
# low-level extensions, in the package `fbtriton`) lets the kernel decide
# {cite}`guan2026tlx,fbtriton`:
#
# | TLX | what it does | machine |
# |:--|:--|:--|
# | `async_task(num_warps, registers)` | a role, inside `async_tasks()` | warps, `setmaxnreg` |
# | `local_alloc(shape, dtype, n)` | n buffers in shared or tensor memory | slots |
# | `alloc_barriers(n, count)` | n mbarriers on which a role arrives once | `mbarrier.init` |
# | `alloc_warp_barrier(n, warps, roles)` | n on which each thread arrives | `mbarrier.init` |
# | `barrier_expect_bytes(b, bytes)` | announces bytes, and arrives | `expect_tx` |
# | `barrier_arrive(b)` | arrives | `mbarrier.arrive` |
# | `barrier_wait(b, parity)` | waits for a phase | `mbarrier.try_wait` |
# | `async_descriptor_load(desc, x, at, b)` | starts a TMA copy | UTMALDG |
# | `async_descriptor_store(desc, x, at)` | starts a TMA store, or a sum | UTMASTG, UTMAREDG |
# | `async_dot(a, b, acc)` | starts an MMA | HGMMA, UTCHMMA |
# | `async_dot_wait(n, acc)` | waits for all commit groups but n | `wgmma.wait_group` |
# | `local_load(x)`, `local_store(x, y)` | buffer to registers and back | LDS, STS, LDTM, STTM |
#
# ## The table of facts
#
# *guide* is the [CUDA programming guide](https://docs.nvidia.com/cuda/cuda-c-programming-guide/).

# %% tags=["remove-input"]
GUIDE, ISA = "guide", "PTX ISA"
FACTS = [
    ("SMs", cost_model.H200.sms, cost_model.B200.sms, "device query"),
    ("registers of 32 bits", FILE, FILE, GUIDE),
    ("registers of a thread, at most", THREAD, THREAD, GUIDE),
    ("shared memory of a program, KiB", SHARED // 1024,
     compile_check.SHARED_BYTES[100] // 1024, GUIDE),
    ("port, bytes a cycle", cost_model.SMEM_BYTES, cost_model.SMEM_BYTES, GUIDE),
    ("bf16 MMA, FLOPs a cycle", cost_model.H200.flops, cost_model.B200.flops, "FA4 paper"),
    ("MUFU results a cycle", cost_model.MUFU_LANES, cost_model.MUFU_LANES, GUIDE),
    ("rows M of an MMA", "64", "64, 128", ISA),
    ("tensor memory, columns", "none", f"{COLUMNS}", ISA),
    ("L2 cache, MiB", f"{machine.l2_bytes / 2**20:.0f}", "not measured", "device query"),
    ("matmul, TFLOP/s (burst)", f"{ceilings.tflops:.0f}", "not measured", "our record"),
    ("copy 1:1, GB/s", f"{ceilings.copies[0][1]:,.0f}", "not measured", "our record"),
]  # fmt: skip
facts = pd.DataFrame(FACTS, columns=["per SM, or GPU", "H200", "B200", "source"])
for name in ("H200", "B200"):
    facts[name] = [x if isinstance(x, str) else f"{x:,}" for x in facts[name]]
chapter.table(
    facts,
    caption="**What this book counts with.** The sizes and rates of the two chips.",
    published="NVIDIA's CUDA programming guide and PTX ISA; FlashAttention-4 paper; the SMs of a "
    "B200: github.com/pytorch/ao/issues/4002",
    measured=[run.id],
)
chapter.glue(
    shared=SHARED / 1024, port=cost_model.SMEM_BYTES, mufu_rate=cost_model.MUFU_LANES,
    l2=machine.l2_bytes / 2**20, columns=COLUMNS, tmem=128 * COLUMNS * 4 / 1024,
)  # fmt: skip

# %% [markdown]
# ## Exercise
#
# :::{exercise} Plan the registers and the columns
# :label: ex-machine-plan
#
# A kernel for Hopper has one producer role and three consumer roles of four warps each. A consumer
# holds 64 rows of S for 128 keys, 64 rows of O for head_dim 128, and P in bf16. *(a)* How many
# registers may a consumer thread have if the producer keeps 24? Is it enough? *(b)* Would it be
# with blocks of 64 keys? *(c)* Now on Blackwell: two tiles of 128 queries with head_dim 128 and
# blocks of 256 keys. Which columns do S and O need, and what can be done? *(paper, twenty minutes)*
# :::
#
# :::{solution} ex-machine-plan
# :class: dropdown
#
# *(a)* 16 warps start with 65,536 / 512 = 128 registers each. The producer gives (128 - 24) · 128 =
# 13,312 back, and three groups share them: 34 more for each of 384 threads, so 160 as a multiple of
# 8. S takes 64, O 64 and P 32: 160 without a single address. It spills. *(b)* S takes 32, O 64, P
# 16: 112, which fits. *(c)* S of 256 keys has 256 columns a tile, O 128: 768 for two tiles, where
# 512 exist. Share one S between the tiles (256 + 2 · 128 = 512), at the price that one tile's MMAs
# no longer run beside the other's activation; or stay with 128 keys.
# :::
#
# ## Takeaways
#
# - Count four things per tile: cycles of the tensor cores, of the port, of the MUFU, and issue
#   slots. The largest bounds the kernel.
# - An mbarrier counts arrivals and bytes; a wait passes when both of a phase are complete.
