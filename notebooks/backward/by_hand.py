# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: false
# ---

# %% [markdown]
# # The backward pass by hand
#
# What must the backward pass compute when softmax is gone, and what must the forward pass save for
# it?
#
# :::{admonition} In this chapter (30 minutes)
# You will derive three gradients, see where a mask must act, and decide who owns which sum.
# :::

# %% tags=["hide-input"]
import torch
import torch.nn.functional as F

import tritonemu
from _lib import drawings
from gdpa_kernels import gdpa
from gdpa_kernels.gdpa import reference
from gdpa_kernels.gdpa.device import activations, derivatives
from gdpa_lab.measuring import roofline
from gdpa_lab.measuring.inputs import cu_seqlens
from gdpa_lab.measuring.workloads import FIGURES, workload
from gdpa_lab.report import results
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("backward/by_hand", mode=mode, device=device, data_dir=data_dir)
NAMES = list(dict.fromkeys(n for figure in FIGURES if "-bwd-" in figure for n in FIGURES[figure]))
SAME = workload("gdpa-self-full-1024")
limits = results.ceilings(chapter.record("forward/results"), "sustained")
ridge = {}
for d in ("forward", "backward"):
    speed = limits.gbytes_per_s(SAME.bytes_read(d), SAME.bytes_written(d))
    ridge[d] = limits.tflops * 1e3 / speed
    bounds = [roofline.bracket(workload(name), d, limits).bound for name in NAMES]
    chapter.glue(**{f"memory_{d}": bounds.count("memory")})
chapter.glue(
    workloads=len(NAMES), ridge=ridge["backward"], ridge_backward=1.4 * ridge["backward"],
    alone=activations.INSTRUCTIONS["gelu_tanh"][0], both=derivatives.INSTRUCTIONS["gelu_tanh"][0],
)  # fmt: skip

# %% tags=["remove-input"]
# | name: fig-hand-owners
# | caption: >
# |   **No walk through the tiles suits all three gradients.** A tile of dS (filled) adds to dQ, a
# |   sum along its row of tiles, and to dK and dV, sums down its column.
# | alt: >
# |   A grid of five by five tiles with one tile filled. Its row is shaded and leads to a filled
# |   part of a strip dQ at the left; its column is shaded and leads to filled parts of the strips
# |   dK and dV below.
cross = [(2, i) for i in range(5)] + [(i, 3) for i in range(5)]
strips = [("dQ", "left", True), ("dK", "below", True), ("dV", "below", True)]
chapter.figure(drawings.tiles({"": drawings.Tiles((2, 3), cross, strips)}), modelled="five MMAs")

# %% [markdown]
# ## One sequence, one head
#
# Let $m_{ij}$ be 1 where a pair of query and key counts, and 0 elsewhere. The forward pass is
#
# $$
# T = Q K^{\mathsf T}, \qquad S = s\,T, \qquad P = m \odot \alpha(S), \qquad O = c\,P V,
# $$
#
# where $s$ is `scale`, $c$ is `output_scale` and $\alpha$ the activation. Given $dO$, the gradient
# of a loss with respect to $O$, we want $dQ$, $dK$ and $dV$. One rule is enough. If $C = A B$, then
#
# $$
# dA = dC\,B^{\mathsf T}, \qquad dB = A^{\mathsf T} dC ,
# $$ (eq-hand-product)
#
# so each matmul of the forward pass becomes two of the backward pass. From the end to the
# beginning:
#
# - Through $O = c\,P V$: $dP = c\,dO\,V^{\mathsf T}$ and $dV = c\,P^{\mathsf T} dO$.
# - Through the activation, score by score: $dS = m \odot \alpha'(S) \odot dP$.
# - Through $S = s\,Q K^{\mathsf T}$: $dQ = s\,dS\,K$ and $dK = s\,dS^{\mathsf T} Q$.
#
# $S$ was never written down, so it is computed again: five matmuls. In code, with a causal mask, in
# fp64:

# %% tags=["hide-input"]
make = torch.Generator().manual_seed(2025)
rows, keys, s, c = 40, 30, 0.3, 1 / 50
sizes = rows, keys, keys, rows
options = {"generator": make, "dtype": torch.float64}
Q, K, V, dO = (torch.randn(n, 16, **options) for n in sizes)
m = torch.ones(rows, keys, dtype=torch.float64).tril()
alpha = reference.ACTIVATIONS["gelu_tanh"]


# %%
def by_hand(Q, K, V, dO, m):
    S = s * Q @ K.T
    P = m * alpha.function(S)
    dP = dO @ V.T
    dS = m * alpha.derivative(S) * dP
    return s * c * dS @ K, s * c * dS.T @ Q, c * P.T @ dO


# %% tags=["remove-input"]
def gaps(actual, expected):
    """Largest differences of dQ, dK, dV, relative to the largest number in each."""
    pairs = zip(actual, expected, strict=True)
    return " ".join(f"{(a - b).abs().max() / b.abs().max():.1e}" for a, b in pairs)


q, k, v = (x.clone().requires_grad_() for x in (Q, K, V))
expected = torch.autograd.grad(c * (m * alpha.function(s * q @ k.T)) @ v, (q, k, v), dO)
print("dQ, dK, dV against autograd:", gaps(by_hand(Q, K, V, dO, m), expected))

# %% [markdown]
# In the code, as in our kernels, $c$ has moved from $dP$ to the end. That saves a multiplication
# per score and keeps fp16 accurate: an {term}`MMA` takes dS in 16 bits, and with `output_scale` 1 /
# 2048, as in Kunlun {cite}`hou2026kunlun`, small gradients would underflow.
#
# ## A learned scale needs no new kernel
#
# Let each head learn its $s$. Every score depends on it, $S_{ij} = s\,T_{ij}$, so
#
# $$
# ds = \sum_{ij} dS_{ij}\,T_{ij}, \qquad\text{the sum over } dS \odot Q K^{\mathsf T} .
# $$ (eq-hand-scale)
#
# No tile needs to be summed for it: $\sum Q \odot dQ = s \sum Q \odot (dS\,K) = s\,ds$. A sum
# over tensors that are in memory gives $ds$, and likewise $c\,dc = \sum O \odot dO$:


# %%
def of_scales(Q, K, V, dO, m):
    out = c * (m * alpha.function(s * Q @ K.T)) @ V
    return (Q * by_hand(Q, K, V, dO, m)[0]).sum() / s, (out * dO).sum() / c


# %% tags=["remove-input"]
learned = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (s, c)]
out = learned[1] * (m * alpha.function(learned[0] * Q @ K.T)) @ V
scales = torch.autograd.grad(out, learned, dO)
print("ds, dc against autograd:", gaps(of_scales(Q, K, V, dO, m), scales))

# %% [markdown]
# With `gdpa`, multiply q by the learned scale, pass `scale=1.0`, and autograd takes that sum.
#
# ## Masks act twice
#
# $m$ appears in $P$ and in $dS$. Setting masked *scores* to 0 is enough in the forward pass, since
# all our activations are 0 at 0. In the backward pass it is not, because GELU has the slope
# $\alpha'(0) = \tfrac12$ there:


# %%
def mask_on_scores(Q, K, V, dO, m):
    S = m * (s * Q @ K.T)
    dS = alpha.derivative(S) * (dO @ V.T)
    return s * c * dS @ K, s * c * dS.T @ Q, c * alpha.function(S).T @ dO


# %% tags=["remove-input"]
print("dQ, dK, dV against autograd:", gaps(mask_on_scores(Q, K, V, dO, m), expected))

# %% [markdown]
# dQ and dK are wrong by more than half of their largest element. A check of the output or of dV
# finds nothing.
#
# *Rows and keys beyond the end* need no mask. Tails are loaded as zeros
# ({doc}`../forward/v1_tiled`), so dO or V is 0 there, hence $dP = 0$. The
# zeros must be real. In memory the next sequence follows, and $0 \cdot \text{NaN}$ is NaN.
#
# *A tensor used several times* gets a sum. With {term}`grouped heads` {cite}`ainslie2023gqa`
# several query heads use one key head, so dK and dV are sums over the query heads of a group. With
# a q that all sequences share, dQ is a sum over the batch. If the order of such a sum is free, two
# runs may differ in bits ({doc}`v2_fused_backward`).
#
# ## Value and slope from one transcendental
#
# For the tanh form of GELU {cite}`hendrycks2016gelu`, with
# $u(x) = \sqrt{2 / \pi}\,(x + 0.044715\,x^3)$ and $t = \tanh u$,
#
# $$
# \alpha = \tfrac12 x\,(1 + t), \qquad
# \alpha' = \tfrac12 (1 + t) + \tfrac12 x\,u'\,(1 - t^2) .
# $$
#
# The derivative of tanh is a polynomial in tanh, so one `tanh.approx` serves both. Value and slope
# take {glue:text}`both:.0f` fp32 instructions, the value alone {glue:text}`alone:.0f`. At head_dim
# 128 the unit for tanh, {term}`MUFU`, needs half as long as the tensor cores in the forward pass
# and a fifth as long in the backward pass.
#
# ## Memory is the easier part
#
# The backward pass has 5 MMAs where the forward pass has 2, and at equal lengths it moves 7 tensors
# instead of 4: its {term}`arithmetic intensity` is 10/7 times as high. Of
# {glue:text}`workloads:.0f` workloads {glue:text}`memory_forward:.0f` are memory-bound in the
# forward pass, and {glue:text}`memory_backward:.0f` in the backward pass (modelled), by the fewest
# bytes: a kernel that accumulates dQ in fp32 in memory moves more.
#
# ## What the forward pass must leave behind
#
# Nothing: the gradients need its inputs, $dO$ and two numbers. Softmax attention needs more. With
# $P_{ij} = e^{S_{ij}} / Z_i$ and $Z_i = \sum_j e^{S_{ij}}$, changing one score $S_{ik}$ changes its
# own $e^{S_{ik}}$ and, through $Z_i$, *all* probabilities of the row: $\partial P_{ij} / \partial
# S_{ik} = P_{ij} (\delta_{jk} - P_{ik})$. Summed over the row,
#
# $$
# dS_{ik} = \sum_j dP_{ij}\,P_{ij} (\delta_{jk} - P_{ik}) = P_{ik} \bigl( dP_{ik} - D_i \bigr),
# \qquad D_i = \sum_j P_{ij}\,dP_{ij} .
# $$ (eq-hand-softmax)
#
# Since $dP_{ij} = \sum_c dO_{ic} V_{jc}$, exchanging the sums gives a second form,
# $D_i = \sum_c dO_{ic} \sum_j P_{ij} V_{jc} = \sum_c dO_{ic}\,O_{ic}$, the row sum of $dO \odot O$,
# which needs no keys at all.
#
# $Z_i$ and $D_i$ are sums over all keys, which a kernel that holds a tile of keys cannot form. So
# the forward pass leaves $\log Z_i$, the log-sum-exp, and a separate kernel computes $D_i$ from the
# output before the first tile {cite}`dao2024flashattention2`. With an activation, $dS_{ij}$ depends
# on $S_{ij}$ and $dP_{ij}$ alone. What autograd saves beside the inputs:


# %% tags=["remove-input"]
def kept_by(function, inputs) -> list:
    saved, known = [], {x.data_ptr() for x in inputs}
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x)
    with hooks, tritonemu.enabled():
        out = function()  # held until all is seen: an address may be used again
    return [tuple(x.shape) for x in saved if x.data_ptr() not in known and out is not None]


ends = cu_seqlens((200,), "cpu")
qkv = [torch.randn(200, 2, 64, generator=make).bfloat16().requires_grad_() for _ in range(3)]
wide = [x.detach().transpose(0, 1)[None].contiguous().requires_grad_() for x in qkv]
print("gdpa:", kept_by(lambda: gdpa(*qkv, ends, ends, 200, 200), [*qkv, ends]) or "nothing")
print("softmax:", kept_by(lambda: F.scaled_dot_product_attention(*wide), wide))

# %% [markdown]
# Ask of any attention: *does one tile hold everything that a score's derivative depends on?*
# {doc}`../block/backward_alone` has a softmax where it does.
#
# ## Who owns what, and which way round
#
# | MMA | shape | summed over | operand from registers | loaded operand |
# |:--|:--|:--|:--|:--|
# | $T = Q K^{\mathsf T}$ | queries × keys | head_dim | | Q, K |
# | $dP = dO\,V^{\mathsf T}$ | queries × keys | head_dim | | dO, V |
# | $dV = P^{\mathsf T} dO$ | keys × head_dim | **queries** | $P^{\mathsf T}$, keys down | dO |
# | $dK = dS^{\mathsf T} Q$ | keys × head_dim | **queries** | $dS^{\mathsf T}$, keys down | Q |
# | $dQ = dS\,K$ | queries × head_dim | **keys** | $dS$, queries down | K |
#
# *Who owns what.* A program that walks down a column of tiles in {numref}`fig-hand-owners` sums dK
# and dV in registers, but its contributions to dQ belong to other programs. One that walks along a
# row has the reverse problem:
#
# | | how dQ is summed |
# |:--|:--|
# | {doc}`backward v1 <v1_tiled_backward>` | two kernels, one for each direction; T and dP twice |
# | {doc}`backward v2 <v2_fused_backward>` | one kernel walks columns and adds dQ up in memory |
# | {doc}`backward v4 <v4_warp_specialized_backward>` | the same, with warp roles |
# | {doc}`backward v5 and v6 <v5_short_kv_backward>` | all keys of a sequence are in one place |
#
# *Which way round.* What a Hopper tensor core leaves in registers can be the first operand of the
# next MMA as it is, but not transposed. With scores as $Q K^{\mathsf T}$, dV and dK need a
# transpose each; with $K Q^{\mathsf T}$ only dQ does.
#
# ## Exercises
#
# {doc}`Write it </exercises>`: `make exercise NAME=by_hand`.
#
# :::{exercise} Keep P
# :label: ex-hand-keep
#
# Suppose the forward pass wrote $P$ in bf16 and the backward pass read it. On gdpa-self-full-1024,
# how many GB is that? How long do writing and reading take at the rate of a copy, and how long the
# MMA that they save? What would the backward pass still lack? *(paper, ten minutes)*
# :::

# %% tags=["remove-cell"]
stored = 2 * SAME.pairs * SAME.num_heads_q
there_and_back = 2 * stored / limits.gbytes_per_s(1, 1) / 1e6
mma = SAME.flops("backward") / 5 / limits.tflops / 1e9
assert there_and_back > mma, "the answer: it does not pay"
chapter.glue(store_gb=stored / 1e9, store_ms=there_and_back, mma_ms=mma)

# %% [markdown]
# :::{solution} ex-hand-keep
# :class: dropdown
#
# {glue:text}`store_gb:.1f` GB. Writing and reading take {glue:text}`store_ms:.1f` ms, the MMA
# {glue:text}`mma_ms:.1f` ms at the rate of the {ref}`ceiling <rule-ceiling>`. And GELU' does not
# follow from GELU: left and right of the minimum, two scores have the same value.
# :::
#
# :::{exercise} No activation at all
# :label: ex-hand-identity
#
# Let $\alpha$ be the identity, without a mask. Find dQ, dK and dV without forming a matrix of
# queries × keys, and count the FLOPs for 1,024 tokens and head_dim 128 against the five MMAs.
# *(paper; then five lines to check)*
# :::
#
# :::{solution} ex-hand-identity
# :class: dropdown
#
# $dQ = s c\,dO\,(V^{\mathsf T} K)$, $dK = s c\,V (dO^{\mathsf T} Q)$ and
# $dV = s c\,K (Q^{\mathsf T} dO)$. The inner matmuls are head_dim × head_dim, and
# $dO^{\mathsf T} Q$ is the transpose of $Q^{\mathsf T} dO$, so five matmuls remain, of $n d^2$
# multiply-adds instead of $n^2 d$: 8 times fewer FLOPs.
# :::
#
# :::{exercise} A learned activation
# :label: ex-hand-learned
#
# Let each head learn $\beta$ in $\alpha(S) = S\,\sigma(\beta S)$, which is Swish. Which sum is
# $d\beta$, and why is it no sum over tensors in memory? Find a call of SiLU that learns
# $\beta$ without a new kernel. *(paper, ten minutes)*
# :::
#
# :::{solution} ex-hand-learned
# :class: dropdown
#
# $d\beta = \sum dP \odot S^2 \odot \sigma'(\beta S)$: P and dP exist in tiles alone, so a kernel
# would have to add it up. But $\alpha(S) = \mathrm{SiLU}(\beta S) / \beta$. Multiply q by $\beta$
# and the output by $1/\beta$ outside of the operator: autograd sums over $Q \odot dQ$ and over
# $O \odot dO$.
# :::
#
# :::{exercise} Where is the ridge?
# :label: ex-hand-ridge
#
# From which length is the backward pass of self-attention compute-bound, for any head_dim?
# *(paper)*
# :::
#
# :::{solution} ex-hand-ridge
# :class: dropdown
#
# $10 n^2 d$ FLOPs and seven tensors of $2 n d$ bytes: $5 n / 7$ FLOPs per byte, whatever $d$ is.
# The ridge of this machine is at {glue:text}`ridge:.0f` FLOPs per byte back to back, so at
# {glue:text}`ridge_backward:.0f` tokens.
# :::
#
# ## Takeaways
#
# - Each matmul of the forward pass is two in the backward pass: two become four, and five with the
#   scores recomputed.
# - A mask belongs to the activation *and* to its derivative. Zeros that were loaded need no mask.
# - The gradient of a learned scale is a sum over tensors that are in memory.
# - dK and dV sum over queries, dQ over keys. No walk through the tiles suits both.
