# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Formulas
#
# Each line links the page that derives it.

# %% tags=["remove-cell"]
import pandas as pd

from _lib import activation_sequences as sequences
from gdpa_lab.measuring import compile_check, cost_model
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import results
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("tools/formulas", mode=mode, device=device, data_dir=data_dir)
SAME = workload("gdpa-self-full-1024")
each = 2 * SAME.num_heads_q * SAME.head_dim * SAME.total_q  # bytes of a tensor
assert SAME.flops("forward") == 4 * SAME.num_heads_q * SAME.head_dim * SAME.pairs, "the table"
assert 2 * SAME.flops("backward") == 5 * SAME.flops("forward"), "the table"
assert (SAME.bytes("forward"), SAME.bytes("backward")) == (4 * each, 7 * each), "the table"

# %% [markdown]
# ## Symbols
#
# | | is | shape, type |
# |:--|:--|:--|
# | $n, m$ | queries and keys of a sequence | |
# | $h, d$ | query heads, head_dim | |
# | $s, c$ | `scale`, `output_scale` | |
# | $\alpha, \alpha'$ | activation, its slope | |
# | $\mu_{ij}$ | 1 where query $i$ sees key $j$, else 0 | $n \times m$ |
# | $Q, O$, their gradients | of one head | $n \times d$, bf16 |
# | $K, V$, their gradients | of one head | $m \times d$, bf16 |
# | $T, S, dP$ | in registers or tensor memory | $n \times m$, fp32 |
# | $P, dS$ | rounded for the next MMA | $n \times m$, bf16 |
#
# ## The operators
#
# | | |
# |:--|:--|
# | {doc}`forward <../operator/gdpa>` | $T = QK^{\mathsf T},\quad S = sT$ |
# | | $P = \mu \odot \alpha(S),\quad O = c\,PV$ |
# | {doc}`sets of keys <../serving/adds_up>` | $O(A \cup B) = O(A) + O(B)$ |
# | {doc}`backward <../backward/by_hand>` | $T = QK^{\mathsf T}$ again, $dP = dO\,V^{\mathsf T}$ |
# | | $dS = \mu \odot \alpha'(S) \odot dP$ |
# | | $dV = c\,P^{\mathsf T} dO$ |
# | | $dK = sc\,dS^{\mathsf T} Q,\quad dQ = sc\,dS\,K$ |
# | {doc}`learned scales <../backward/by_hand>` | $s\,ds = \sum Q \odot dQ$ |
# | | $c\,dc = \sum O \odot dO$ |
# | {doc}`bias <../serving/own_operator>` | $S = sT + B,\quad dB = c\,dS$, summed by entry |
# | {doc}`softmax <../backward/by_hand>` | $dS = P \odot (dP - D)$ |
# | | $D_i = \sum_j P_{ij} dP_{ij} = \sum_k O_{ik} dO_{ik}$ |
# | {doc}`rotary <../block/block_attention>` | $dq_i = R_i^{\mathsf T}\,s \sum_j dS_{ij} R_j k_j$ |
# | {doc}`causal <../serving/own_operator>` | $\mu_{ij} = 1$ for $j \le i$ |
# | {doc}`lower right <../serving/own_operator>` | $\mu_{ij} = 1$ for $j \le i + m - n$ |
# | {doc}`window <../serving/own_operator>` $w$ | $\mu_{ij} = 1$ for $\lvert i - j \rvert \le w$ |
# | {doc}`tanh GELU <../operator/activations>` | $\tfrac12 x\,(1 + \tanh u)$ |
# | | $u = \sqrt{2/\pi}\,(x + 0.044715\,x^3)$ |
# | {doc}`its slope <../backward/by_hand>` | $\tfrac12 (1 + t) + \tfrac12 x\,u' (1 - t^2)$ |
# | | $t = \tanh u$ |
# | {doc}`SiLU <../operator/activations>` | $\tfrac{x}{2} (1 + \tanh \tfrac{x}{2})$ |
# | {doc}`condition <../operator/activations>` | $\kappa(s) = s\,\alpha'(s) / \alpha(s)$ |
#
# ## Work and bounds
#
# $C$ and $W$ are the {ref}`ceilings <rule-ceiling>` (measured, medians): in bursts
# {glue:text}`../measuring/roofline.ipynb::burst_median:.0f` TFLOP/s and, for a 1:1 copy,
# {glue:text}`../measuring/roofline.ipynb::copies_median:,.0f` GB/s; back to back
# {glue:text}`../measuring/roofline.ipynb::sustained_median:.0f` TFLOP/s.
#
# | | forward | backward |
# |:--|:--|:--|
# | {doc}`useful FLOPs <../measuring/roofline>` | $4hd \sum nm$ | $10hd \sum nm$ |
# | {doc}`fewest bytes <../backward/by_hand>`, bf16 | $2hd \sum (2n + 2m)$ | $2hd \sum (3n + 4m)$ |
# | {doc}`intensity <../measuring/roofline>`, FLOP/byte | $nm / (n + m)$ | $5nm / (3n + 4m)$ |
#
# | | |
# |:--|:--|
# | {doc}`fill <../operator/workloads>` | mean length / largest length |
# | {doc}`bracket <../measuring/roofline>` | $\max(\text{FLOPs}/C,\ \text{bytes}/W)$ to their sum |
# | {doc}`% of roofline <../measuring/roofline>` | its lower end / measured time |
# | {doc}`ridge <../measuring/roofline>` | $C / W$ |
# | {doc}`period <../forward/planning>` | the largest of the units' sums and of the chain |
# | {doc}`chain <../forward/planning>` | serial $2M + A$, pipelined $M + \max(M, A)$ |
# | | $M$: cycles of one MMA, $A$: of the activation |
# | {doc}`slots <../forward/planning>` | at least (latency + transfer + hold) / period |
# | {doc}`power law <../measuring/power_wall>` | time after / before = (cycles after / before)$^p$ |
# | | $p$ = {glue:text}`../measuring/power_wall.ipynb::p:.2f` |
# | {doc}`fleet <../measuring/power_wall>` | work after / before = joules before / after |
#
# ## Barriers
#
# | | |
# |:--|:--|
# | {doc}`use <../forward/planning>` $j$ of $z$ slots | slot $j \bmod z$ |
# | | phase $\lfloor j / z \rfloor \bmod 2$ |
# | {doc}`consumer <../forward/planning>` | waits for *full* with the phase, arrives at *empty* |
# | {doc}`producer <../forward/planning>` | waits for *empty* with 1 − phase, announces, copies |
# | {doc}`arrive <../operator/machine>` | missing arrivals − 1 |
# | {ref}`expect_tx <rule-expect-tx>` | missing bytes + announced; TLX: and arrives |
# | {doc}`copy lands <../operator/machine>` | missing bytes − those of the whole box |
# | {doc}`phase ends <../operator/machine>` | both are 0; the next one misses all arrivals again |
# | {doc}`wait <../operator/machine>` (parity) | passes if the last phase to end has it; fresh: 1 |
#
# ## Rates of an SM
#
# From {doc}`../operator/machine` and {doc}`../forward/planning`.

# %% tags=["remove-input"]
burst = results.ceilings(chapter.record("measuring/roofline"))
H200, B200, size = cost_model.H200, cost_model.B200, cost_model.TILE
clock = H200.clock_ghz(burst.tflops)
rows = {
    "bf16 MMA, FLOPs": (H200.flops, B200.flops),
    "shared-memory port, bytes": (cost_model.SMEM_BYTES,) * 2,
    "HBM at our fastest copy rate, 1:1, bytes": (
        f"{burst.gbytes_per_s(1, 1) / clock / H200.sms:.0f}", "not measured"),
    "MUFU, results": (cost_model.MUFU_LANES,) * 2,
    "issue slots, fp32 results": (sequences.ISSUE_RATE,) * 2,
    f"cycles of an MMA of {size}³": [cost_model.mma(chip, 1) for chip in (H200, B200)],
    "its A and B through the port, cycles": [
        cost_model.kibibytes(kib) for kib in (96, 64)],
    "B alone, A from registers or tensor memory": [cost_model.kibibytes(kib) for kib in (64, 32)],
    "its scores through MUFU, cycles": (size**2 / cost_model.MUFU_LANES,) * 2,
    "shared memory of a program, KiB": [
        compile_check.SHARED_BYTES[arch] / 1024 for arch in (90, 100)],
}  # fmt: skip
rates = pd.DataFrame(rows, index=["H200", "B200"]).T
rates = rates.map(lambda x: x if isinstance(x, str) else f"{x:,.0f}")
chapter.table(
    rates.rename_axis("per cycle, or cycles").reset_index(),
    caption="**Rates to plan with.** Per cycle of an SM, and cycles of one.",
    published="NVIDIA's CUDA programming guide; FlashAttention-4 paper",
    measured=[chapter.record("measuring/roofline").id],
)
