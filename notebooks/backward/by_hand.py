# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: false
# ---

# %% [markdown]
# # The backward by hand
#
# What must a backward pass compute when softmax is gone, and what must forward leave behind?
#
# :::{admonition} In this chapter (20 minutes)
# You will derive the three gradients and check them against differences. The result: five MMAs,
# {glue:text}`flops_ratio:.1f` times the FLOPs of forward for {glue:text}`bytes_ratio:.2f` times its
# bytes, from q, k, v and dO alone. No output, no log-sum-exp, no row sums.
# :::

# %%
from dataclasses import replace

import pandas as pd
import torch
import torch.nn.functional as F

from gdpa_kernels import emulator, gdpa
from gdpa_kernels.gdpa import activations, derivatives, reference
from gdpa_kernels.measuring import roofline
from gdpa_kernels.measuring.inputs import cu_seqlens
from gdpa_kernels.measuring.workload import FIGURES, workload
from gdpa_kernels.report import charts, results, studies
from gdpa_kernels.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("backward/by_hand", mode=mode, device=device, data_dir=data_dir)
NAMES = list(dict.fromkeys(n for figure in FIGURES if "-bwd-" in figure for n in FIGURES[figure]))
SAME = workload("gdpa-self-full-1024")
limits = results.ceilings(chapter.record("forward/results"))
ratios = {x: getattr(SAME, x)("backward") / getattr(SAME, x)("forward") for x in ("flops", "bytes")}
chapter.glue(flops_ratio=ratios["flops"], bytes_ratio=ratios["bytes"], batch=SAME.batch)

# %% tags=["remove-input"]
# | name: fig-hand-owners
# | caption: >
# |   One tile of dS (full) and the gradients that it adds to. dQ of its queries is a sum along its
# |   row of tiles; dK and dV of its keys are sums down its column.
# | alt: >
# |   A grid of five by five tiles with one tile filled. Its row is shaded and leads to a filled
# |   part of a strip dQ at the left; its column is shaded and leads to filled parts of the strips
# |   dK and dV below.
cross = [(2, i) for i in range(5)] + [(i, 3) for i in range(5)]
strips = [("dQ", "left", True), ("dK", "below", True), ("dV", "below", True)]
chapter.figure(charts.tiles({"": charts.Tiles((2, 3), cross, strips)}), modelled="the five MMAs")

# %% [markdown]
# Forward is given q, k, v and offsets ({doc}`../operator/gdpa`); backward the same and the gradient
# of the output. Forward wants one tensor, backward three, and the derivative of the activation
# beside its value.
#
# ## One sequence, one head
#
# With $m_{ij}$ 1 where a pair counts and 0 elsewhere,
#
# $$
# T = Q K^{\mathsf T}, \qquad S = s\,T, \qquad P = m \odot \alpha(S), \qquad O = c\,P V,
# $$
#
# where $s$ is `scale`, $c$ is `output_scale` and $\alpha$ the activation. Given $dO$, the gradient
# of a loss $L$ with respect to $O$, we want $dQ$, $dK$ and $dV$. One rule does it. To first order
# $\delta L = \langle dO, \delta O \rangle$, and if $C = A B$, then
#
# $$
# dA = dC\,B^{\mathsf T}, \qquad dB = A^{\mathsf T} dC :
# $$ (eq-hand-product)
#
# a matmul forward becomes two backward, with its two operands. Three steps from the end:
#
# - Through $O = c\,P V$: $dP = c\,dO\,V^{\mathsf T}$ and $dV = c\,P^{\mathsf T} dO$.
# - Through the activation: $P_{ij}$ depends on $S_{ij}$ alone, so
#   $dS = m \odot \alpha'(S) \odot dP$.
# - Through $S = s\,Q K^{\mathsf T}$: $dQ = s\,dS\,K$ and $dK = s\,dS^{\mathsf T} Q$.
#
# In double precision against PyTorch's autograd, with a causal mask:

# %%
make = torch.Generator().manual_seed(2025)
rows, keys, s, c = 40, 30, 0.3, 1 / 50
sizes = rows, keys, keys, rows
Q, K, V, dO = (torch.randn(n, 16, generator=make, dtype=torch.float64) for n in sizes)
m = torch.ones(rows, keys, dtype=torch.float64).tril()
alpha = reference.ACTIVATIONS["gelu_tanh"]


def by_hand(Q, K, V, dO, m):
    S = s * Q @ K.T
    P = m * alpha.function(S)
    dP = dO @ V.T
    dS = m * alpha.derivative(S) * dP
    return s * c * dS @ K, s * c * dS.T @ Q, c * P.T @ dO


def gaps(found, expected):
    """Largest differences of dQ, dK, dV, relative to the largest number in each."""
    pairs = zip(found, expected, strict=True)
    return " ".join(f"{(a - b).abs().max() / b.abs().max():.1e}" for a, b in pairs)


q, k, v = (x.clone().requires_grad_() for x in (Q, K, V))
expected = torch.autograd.grad(c * (m * alpha.function(s * q @ k.T)) @ v, (q, k, v), dO)
print(gaps(by_hand(Q, K, V, dO, m), expected))

# %% [markdown]
# In the code $c$ has moved from $dP$ to the end. That saves a multiplication for each score, and it
# matters for accuracy: an MMA takes dS in 16 bits, and with `output_scale` 1 / 2048, as in Kunlun
# {cite}`hou2026kunlun`, small gradients underflow in fp16. Our rungs apply both factors at the end.
#
# `reference.backward` is the same with heads and a batch around it: in fp64 the oracle of all
# tests, in bf16 the base of a kernel's budget of errors ({doc}`../measuring/protocol`).
#
# ## Masks act twice
#
# $m$ stands in $P$ and in $dS$. The first looks superfluous: all our activations are 0 at 0, so one
# may as well set the masked *scores* to 0, and forward is right. Backward is not, because
# $\alpha'(0)$ of GELU is ½:


# %%
def mask_on_scores(Q, K, V, dO, m):
    """`by_hand` with the mask where it does forward no harm."""
    S = m * (s * Q @ K.T)
    dS = alpha.derivative(S) * (dO @ V.T)
    return s * c * dS @ K, s * c * dS.T @ Q, c * alpha.function(S).T @ dO


print(gaps(mask_on_scores(Q, K, V, dO, m), expected))

# %% [markdown]
# dV is right; dQ and dK lose large parts of themselves. A check of output or dV finds nothing.
#
# *Rows and keys that do not exist* need no mask, whatever the slope. Tails are loaded as zeros
# ({doc}`../forward/v1_tiled`). A query that does not exist has $dO = 0$, a key that does not exist
# has $V = 0$, so $dP = dO\,V^{\mathsf T} = 0$ either way, and $P = \alpha(0) = 0$. Both must be
# real zeros: behind a sequence in memory lies the next one, and $0 \cdot \text{NaN}$ is NaN.
#
# ## A batch, groups, and one q for all
#
# Sequences share nothing: the gradient of a packed batch is that of each sequence, put where its
# rows are. A tensor that is used several times gets a sum. With grouped heads
# {cite}`ainslie2023gqa` dK and dV are sums over the query heads of a group. With a shared q, the
# learned seeds of a pooling layer {cite}`lee2019settransformer`, dQ is a sum over the batch,
# {glue:text}`batch:,.0f` sequences at the published size. The order of such a sum decides whether
# two runs agree to the bit. {doc}`v1_tiled_backward` adds in a fixed order;
# {doc}`v2_fused_backward` shows what it costs when the order is free.
#
# ## Is it right?
#
# Autograd might share a mistake with us; differences of the forward pass cannot. Move q, k and v
# along one random direction by $h$ up and down: the difference quotient of $\langle dO, O \rangle$
# should be the inner product of the gradients with that direction. A definition that forgets the
# mask on the slope must fail:


# %%
def difference_error(given, h, backward=reference.backward) -> float:
    """Relative error of a central difference against the gradients, along one direction."""
    make = torch.Generator().manual_seed(11)
    grad, at = studies.gradient(given), {x: getattr(given, x) for x in "qkv"}
    along = {n: torch.randn(x.shape, generator=make, dtype=torch.float64) for n, x in at.items()}

    def loss(h):
        moved = {n: x + h * along[n] for n, x in at.items()}
        return (grad * reference.forward(replace(given, **moved))).sum()

    slope = sum((g * along[n]).sum() for n, g in zip(at, backward(grad, given), strict=True))
    return abs((loss(h) - loss(-h)) / (2 * h) / slope - 1).item()


def ragged(activation, **options):
    given = studies.batch((9, 14), (12, 7), heads=2, head_dim=8, activation=activation, **options)
    return replace(given, **{x: getattr(given, x).double() for x in "qkv"})


steps = [10.0**-e for e in range(1, 11)]
errors = pd.DataFrame({"h": [f"{h:.0e}" for h in steps]})
for name in ("gelu_tanh", "relu"):
    errors[name] = [difference_error(ragged(name), h) for h in steps]
forgot = studies.changed(reference, (", slope.masked_fill(~keep, 0)", ", slope"))
causal = ragged("gelu_tanh", causal=True)
print(f"no mask on the slope: {difference_error(causal, 1e-5, forgot.backward):.1f}")

# %% tags=["remove-input"]
chapter.table(errors, modelled="relative error of a central difference of the definition, in fp64")
gelu, relu = errors["gelu_tanh"], errors["relu"]
text = "The error of GELU falls as the square of $h$: from 0.1 to 0.001 by 10,000, within 2 times."
chapter.predict(text, gelu[0] / gelu[2], least=5e3, most=2e4, form=",.0f")
text = "ReLU falls too, but not smoothly: in all to less than a thousandth."
chapter.predict(text, relu.min() / relu[0], most=1e-3, form=".0e")

# %% [markdown]
# ReLU does not fall as a square: a score nearer to 0 than the step counts with the mean of its two
# slopes, and one such score is enough. Below some step none is left, and the error is gone at once.
# A difference in bf16 would be useless, since its rounding is $10^{-3}$ and not $10^{-16}$. So
# kernels are compared with the definition, and the definition with differences: here along one
# direction, in the tests by `gradcheck`, which moves every element.
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
# take {glue:text}`both:.0f` fp32 instructions, the value alone {glue:text}`alone:.0f`. SiLU
# {cite}`elfwing2017silu` is alike; the exact form, `gelu`, needs an exponential beside its error
# function. So MUFU, which takes half as long as the MMAs forward at head_dim 128, takes a fifth as
# long backward. The forward rungs fought for the activation
# ({doc}`../forward/activation_arithmetic`). Backward its share is smaller, and the fight will be
# for registers and shared memory.
#
# ## The surprise: memory is the easier part
#
# One expects backward to be the harder half, and for issue slots and registers it is. Five MMAs are
# *useful*, however many a kernel makes: four have operands that did not exist forward, and keeping
# $T$ costs more than it saves (the first exercise). At equal lengths backward moves seven tensors
# where forward moves four. So its intensity is 10/7 of forward's, and short batches may run faster.
# Forward {glue:text}`memory_forward:.0f` of {glue:text}`workloads:.0f` workloads are memory-bound,
# backward {glue:text}`memory_backward:.0f`; self-attention is compute-bound from
# {glue:text}`ridge_forward:.0f` tokens on forward, from {glue:text}`ridge_backward:.0f` backward
# (modelled).

# %% tags=["remove-input"]
# | name: fig-hand-roofline
# | caption: >
# |   The published workloads that are memory-bound in one direction or both. Dashed: the rate of
# |   large matmuls.
# | alt: >
# |   A dot plot with two marks a row. Backward lies right of forward in each row; in three of seven
# |   it has reached the dashed line.
brackets = {
    d: {n.removeprefix("gdpa-"): roofline.bracket(workload(n), d, limits) for n in NAMES}
    for d in ("forward", "backward")
}
roofs = pd.DataFrame({d: {n: b.tflops_at_lower for n, b in x.items()} for d, x in brackets.items()})
short = roofs[roofs.min(axis=1) < 0.999 * limits.tflops]
chart = charts.dots(short, xlabel="TFLOP/s at the roofline", baseline=limits.tflops)
chapter.figure(chart, data=roofs.reset_index(), modelled="from ceilings measured on the H200")

# %% tags=["remove-cell"]
bound = {d: sum(b.bound == "memory" for b in x.values()) for d, x in brackets.items()}
ridge = {d: limits.tflops * 1e3 / limits.gbytes_per_s(SAME.bytes_read(d), SAME.bytes_written(d))
         for d in bound}  # fmt: skip
chapter.glue(
    **{f"memory_{d}": n for d, n in bound.items()}, workloads=len(NAMES), ridge=ridge["backward"],
    ridge_forward=2 * ridge["forward"], ridge_backward=1.4 * ridge["backward"],
    alone=activations.INSTRUCTIONS["gelu_tanh"][0], both=derivatives.INSTRUCTIONS["gelu_tanh"][0],
)  # fmt: skip

# %% [markdown]
# These are the fewest bytes. A kernel that owns keys adds up dQ in memory, in fp32, and moves more.
#
# ## What forward must leave behind
#
# $Q$, $K$, $V$, $dO$, the mask, two numbers. Softmax attention needs more, and it is worth seeing
# where. With $P_{ij} = e^{S_{ij}} / Z_i$ each probability depends on its whole row, and
#
# $$
# dS_{ik} = P_{ik} \bigl( dP_{ik} - D_i \bigr), \qquad
# D_i = \sum_j P_{ij}\,dP_{ij} = \sum_c dO_{ic} O_{ic} .
# $$ (eq-hand-softmax)
#
# $Z_i$ and $D_i$ are sums over all keys, and a kernel that has a tile of keys cannot form them. It
# needs the log-sum-exp from forward, and $D_i$ before the first tile, which takes the output and a
# kernel of its own {cite}`dao2024flashattention2`. The Jacobian of an activation is diagonal. What
# autograd keeps between forward and backward, on 200 tokens, 2 heads of 64:


# %%
def kept_by(function, inputs) -> list:
    """Shapes of what autograd keeps beside the inputs."""
    kept, known = [], {x.data_ptr() for x in inputs}
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x)
    with hooks, emulator.enabled():
        out = function()  # held until all is seen: an address may be used again
    return [tuple(x.shape) for x in kept if x.data_ptr() not in known and out is not None]


ends = cu_seqlens((200,), "cpu")
qkv = [torch.randn(200, 2, 64, generator=make).bfloat16().requires_grad_() for _ in range(3)]
wide = [x.detach().transpose(0, 1)[None].contiguous().requires_grad_() for x in qkv]
print("gdpa:", kept_by(lambda: gdpa(*qkv, ends, ends, 200, 200), [*qkv, ends]) or "nothing")
print("softmax:", kept_by(lambda: F.scaled_dot_product_attention(*wide), wide))

# %% [markdown]
# The log-sum-exp is small, and the next layer may keep the output anyway. What counts is the kernel
# that forms $D$: it reads output and dO once more, two tensors beside the seven.
# {doc}`../block/backward_alone` has the third case, softmax on rows so short that they lie in one
# tile. The criterion is: *is everything that a score's derivative depends on in one tile?*
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
# and dV in registers and scatters dQ; one that walks along a row, the other way round.
# {doc}`v1_tiled_backward` has a kernel of each kind and computes $T$ and $dP$ twice.
# {doc}`v2_fused_backward` walks columns and adds up dQ in memory. {doc}`v5_short_kv_backward` gives
# all columns to one cluster.
#
# *Which way round.* What a Hopper tensor core leaves in registers can be the first operand of the
# next MMA as it stands, not transposed ({doc}`../forward/v4_warp_specialized`). With scores as
# $Q K^{\mathsf T}$, dQ needs no transpose, dV and dK one each, through shared memory. With
# $K Q^{\mathsf T}$ it is dQ alone. A kernel of all three gradients needs one transpose at least;
# two kernels, each with its own orientation, need none.
#
# ## Exercises
#
# :::{exercise} Keep P
# :label: ex-hand-keep
#
# Suppose forward wrote $P$ in bf16 and backward read it. For gdpa-self-full-1024: how many GB is
# that? How long do writing and reading take at the rate of a copy, and how long the MMA that they
# save? What would backward still lack? *(paper, ten minutes)*
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
# {glue:text}`mma_ms:.1f` ms at the rate of the ceiling. And GELU' cannot be had from GELU: two
# scores, left and right of its minimum, have the same value.
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
# :::{exercise} Where is the ridge?
# :label: ex-hand-ridge
#
# From which length is self-attention backward compute-bound, for any head_dim? *(paper)*
# :::
#
# :::{solution} ex-hand-ridge
# :class: dropdown
#
# $10 n^2 d$ FLOPs and seven tensors of $2 n d$ bytes: $5 n / 7$ FLOPs per byte, whatever $d$ is.
# The ridge of this machine is at {glue:text}`ridge:.0f` FLOPs per byte, so at
# {glue:text}`ridge_backward:.0f` tokens.
# :::
#
# ## Takeaways
#
# - A matmul forward is two matmuls backward. Two are four; with the scores computed again five.
# - What forward must leave behind depends on how far a derivative reaches. An activation's reaches
#   no further than its own score.
# - A mask belongs to the activation *and* to its derivative. Zeros that were loaded need no mask.
# - dK and dV are sums over queries, dQ is one over keys. No walk through the tiles suits both.
