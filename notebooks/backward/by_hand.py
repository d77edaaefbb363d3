# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: false
# ---

# %% [markdown]
# # The backward by hand
#
# What must a backward pass compute when softmax is gone, and what must it have been given?
#
# :::{admonition} In this chapter
# - Five matrix products, {glue:text}`hand_flops_ratio:.1f` times the FLOPs of forward, for
#   {glue:text}`hand_bytes_ratio:.2f` times its bytes at equal lengths. Backward is the less
#   memory-bound half: its ridge lies at {glue:text}`hand_ridge_backward:.0f` tokens, that of
#   forward at {glue:text}`hand_ridge_forward:.0f` (modelled, from measured ceilings).
# - q, k, v and the offsets are all it needs: no output, no log-sum-exp, no row sums. The operator
#   keeps {glue:text}`hand_kept_own:.0f` bytes that were not there before; PyTorch's softmax
#   attention keeps its output and one number for each row.
# - Value and derivative of GELU, in its tanh form, come from one transcendental:
#   {glue:text}`hand_both_fp32:.0f` fp32 instructions and {glue:text}`hand_both_mufu:.0f` of the
#   MUFU unit.
# - The formulas pass PyTorch's gradcheck in double precision in all {glue:text}`hand_checks:.0f`
#   cases, and agree with differences of the forward pass to {glue:text}`hand_least_error:.0e`.
# :::

# %% tags=["remove-cell"]
import inspect
import math
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from IPython.display import Markdown, display
from matplotlib.patches import Rectangle

from gdpa_kernels import emulator, gdpa
from gdpa_kernels.gdpa import activations, derivatives, reference
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.measuring import compile_check, roofline, system
from gdpa_kernels.measuring.inputs import cu_seqlens
from gdpa_kernels.measuring.workload import FIGURES, Workload, workload
from gdpa_kernels.report import figures, results
from gdpa_kernels.report.house import INK
from gdpa_kernels.report.studies import changed

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
HEAD_DIM = 128
VERDICT = {True: "kept", False: "broken"}


def glue(name: str, value: float) -> None:
    figures.glue_number(f"hand_{name}", value)


def glue_word(name: str, value: str) -> None:
    figures.glue_text(f"hand_{name}", value)


def code(text: str, language: str = "python") -> Markdown:
    return Markdown(f"```{language}\n{text.rstrip()}\n```")


def gap(these, those) -> float:
    """The largest difference between tensors of two lists, over the largest number in them."""
    pairs = list(zip(these, those, strict=True))
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


# %% [markdown]
# ## What stays, what changes
#
# | | forward, {doc}`../operator/gdpa` | backward |
# |:--|:--|:--|
# | given | q, k, v, offsets | the same, and the gradient of the output |
# | wanted | one tensor | three |
# | matrix products | 2 | 5, of which the first is forward's |
# | per score | an activation | the activation and its derivative |
# | sums | over keys | over queries for dK and dV, over keys for dQ |
#
# ## One sequence, one head
#
# With $r$ queries and $n$ keys, and $m_{ij}$ 1 where a pair counts and 0 elsewhere,
#
# $$
# T = Q K^{\mathsf T}, \qquad S = s\,T, \qquad P = m \odot \alpha(S), \qquad O = c\,P V,
# $$
#
# where $s$ is `scale`, $c$ is `output_scale` and $\alpha$ the activation. Given $dO$, the gradient
# of a loss $L$ with respect to $O$, we want $dQ$, $dK$ and $dV$. One rule does it. To first order,
# $\delta L = \langle dO, \delta O \rangle$, the sum of the products of the elements; and if
# $C = A B$, then
#
# $$
# \langle dC, \delta A\,B \rangle = \langle dC\,B^{\mathsf T}, \delta A \rangle, \qquad
# \langle dC, A\,\delta B \rangle = \langle A^{\mathsf T} dC, \delta B \rangle ,
# $$ (eq-hand-product)
#
# since both sides are the same triple sum. So $dA = dC\,B^{\mathsf T}$ and
# $dB = A^{\mathsf T} dC$: a product forward becomes two products backward, with its two operands.
#
# *Through $O = c\,P V$.* By {eq}`eq-hand-product`, $dP = c\,dO\,V^{\mathsf T}$ and
# $dV = c\,P^{\mathsf T} dO$.
#
# *Through the activation.* $P_{ij}$ depends on $S_{ij}$ and on nothing else, so
# $\delta P = m \odot \alpha'(S) \odot \delta S$ and
#
# $$
# dS = m \odot \alpha'(S) \odot dP .
# $$ (eq-hand-activation)
#
# *Through $S = s\,Q K^{\mathsf T}$.* Again by {eq}`eq-hand-product`, $dQ = s\,dS\,K$ and
# $dK = s\,dS^{\mathsf T} Q$.
#
# That is all. In double precision, against PyTorch's autograd, with a causal mask and scales that
# are neither 1 nor alike:

# %%
make = torch.Generator().manual_seed(2025)
rows, keys, dim, s, c = 40, 30, 16, 0.3, 1 / 50
Q, K, V, dO = (
    torch.randn(n, dim, generator=make, dtype=torch.float64) for n in (rows, keys, keys, rows)
)
m = torch.ones(rows, keys, dtype=torch.float64).tril()
alpha = reference.ACTIVATIONS["gelu_tanh"]


def by_hand(Q, K, V, dO, m):
    """(dQ, dK, dV) by the formulas above."""
    S = s * Q @ K.T
    P = m * alpha.function(S)
    dP = dO @ V.T
    dS = m * alpha.derivative(S) * dP
    return s * c * dS @ K, s * c * dS.T @ Q, c * P.T @ dO


def by_autograd(Q, K, V, dO, m):
    """(dQ, dK, dV) by PyTorch, from the forward pass alone."""
    q, k, v = (x.clone().requires_grad_() for x in (Q, K, V))
    return torch.autograd.grad(c * (m * alpha.function(s * q @ k.T)) @ v, (q, k, v), dO)


found, expected = by_hand(Q, K, V, dO, m), by_autograd(Q, K, V, dO, m)
print(f"largest difference, relative: {gap(found, expected):.1e}")

# %% tags=["remove-cell"]
assert gap(found, expected) < 1e-12

# %% [markdown]
# The function `by_hand` differs from the derivation in one respect. $c$ belongs to $dP$, where it
# would be multiplied in once for each score. It is a factor of everything that follows, so it may
# as well wait for the end, where it is one multiplication for each element of the gradient and
# joins $s$. It is not only cheaper. With `output_scale` $1 / 2048$, as in Kunlun's normalisation by
# the length {cite}`hou2026kunlun`, a $dS$ that holds the factor is a small number, and a product on
# tensor cores takes its operands in 16 bits. The mean error of $dQ$, relative to its mean size,
# with $dS$ rounded once:

# %%
q, k, v, grad = (torch.randn(256, 64, generator=make, dtype=torch.float64) for _ in range(4))
t = q @ k.T / 8
exact_ds = alpha.derivative(t) * (grad @ v.T)
small, lost = 1 / 2048, {}
for dtype in (torch.bfloat16, torch.float16):
    for where, rounded in (
        ("after the product", exact_ds.to(dtype).double() * small),
        ("inside dS", (exact_ds * small).to(dtype).double()),
        ("inside dS, gradient / 1000", (exact_ds * small / 1000).to(dtype).double() * 1000),
    ):
        error = ((rounded - exact_ds * small) @ k).abs().mean()
        lost[dtype, where] = (error / (exact_ds * small @ k).abs().mean()).item()
        print(f"{dtype!s:15} factor {where:27} {lost[dtype, where]:.1e}")

# %% tags=["remove-cell"]
worst = lost[torch.float16, "inside dS, gradient / 1000"]
assert worst > 10 * lost[torch.float16, "after the product"], "the text: fp16 underflows"
bf16 = [e for (dtype, _), e in lost.items() if dtype == torch.bfloat16]
assert max(bf16) < 1.2 * min(bf16), "the text: bf16 does not mind"

# %% [markdown]
# bf16 does not mind: it has the exponents of fp32. fp16 ends near $6 \cdot 10^{-8}$, and with a
# gradient that is a thousandth, as the mean of a loss over a batch makes it, numbers are lost.
# Our rungs multiply by the factors at the end, in fp32.
#
# ## The reference, beside it
#
# `reference.backward` is the same text with heads and a batch around it. The part for one sequence:

# %% tags=["remove-input"]
body = inspect.getsource(reference.backward)
code(inspect.cleandoc("\n" + body[body.index("        scores =") : body.index("        heads =")]))

# %% [markdown]
# and the three products that end it:

# %% tags=["remove-input"]
code(inspect.cleandoc("\n" + body[body.index("        dq[rows]") : body.index("    return")]))

# %% [markdown]
# It runs in the dtype of its arguments. In fp64 it is the oracle of all our tests, in bf16 it says
# what error the mathematics makes in that dtype, from which the budget of a kernel follows
# ({doc}`../measuring/protocol`). No kernel imports it.
#
# ## Masks act twice
#
# $m$ stands in $P$ and in $dS$. The first one looks superfluous: all our activations are 0 at 0, so
# one may as well set the masked *scores* to 0, and forward would be right. Backward would not:
# GELU'(0) is {glue:text}`hand_slope_at_0`. The formulas with the mask on the scores only:


# %%
def mask_on_scores(Q, K, V, dO, m):
    """`by_hand` with the mask where it does forward no harm."""
    S = m * (s * Q @ K.T)
    dS = alpha.derivative(S) * (dO @ V.T)
    return s * c * dS @ K, s * c * dS.T @ Q, c * alpha.function(S).T @ dO


for name, a, b in zip(("dQ", "dK", "dV"), mask_on_scores(Q, K, V, dO, m), expected, strict=True):
    print(f"{name}: {gap([a], [b]):.2f}")

# %% tags=["remove-cell"]
forgotten = [gap([a], [b]) for a, b in zip(mask_on_scores(Q, K, V, dO, m), expected, strict=True)]
assert min(forgotten[:2]) > 0.2 and forgotten[2] < 1e-12, "the text: dV right, dQ and dK wrong"
glue_word("slope_at_0", str(alpha.derivative(torch.zeros(1)).item()))

# %% [markdown]
# dV is right to the last bit or two, dQ and dK are off by large parts of themselves. A check of the
# output finds nothing, nor does one of dV.
#
# *Rows and keys that do not exist.* A tile at the end of a sequence has rows that belong to nobody,
# and they are loaded as zeros. Forward needs no mask there ({doc}`../forward/v1_tiled`). Backward,
# with a slope of ½ at the padded scores? $dS$ has the factor $dP = dO\,V^{\mathsf T}$. A query that
# does not exist has $dO = 0$, a key that does not exist has $V = 0$: $dP = 0$ either way, and no
# mask is needed, whatever the slope. $P$ is $\alpha(0) = 0$. With 24 rows of zeros behind the
# queries and 34 behind the keys:

# %%
everyone = torch.ones(rows, keys, dtype=torch.float64)
padded = [F.pad(x, (0, 0, 0, 64 - len(x))) for x in (Q, K, V, dO)]
more = by_hand(*padded, torch.ones(64, 64, dtype=torch.float64))
whole = by_autograd(Q, K, V, dO, everyone)
kept = [x[:n] for x, n in zip(more, (rows, keys, keys), strict=True)]
beyond = max(x[n:].abs().max().item() for x, n in zip(more, (rows, keys, keys), strict=True))
print(f"real rows: {gap(kept, whole):.1e}, rows that do not exist: {beyond:.0f}")

# %% tags=["remove-cell"]
assert gap(kept, whole) < 1e-12 and beyond == 0

# %% [markdown]
# Both zeros must be real zeros. The rows behind a sequence in memory are the next sequence, and if
# that holds a NaN, $0 \cdot \text{NaN}$ is one too; hence loads that clip, not masks that multiply.
#
# ## A batch, groups, and one q for all
#
# *Jagged.* Sequences share nothing, so the gradient of a packed batch is that of each sequence, put
# where its rows are.
#
# *What is used several times gets a sum.* If $x$ enters a function in two places, the chain rule
# adds what comes back from both. Two options of `gdpa` use a tensor several times:
#
# | option | what is used, by whom | so |
# |:--|:--|:--|
# | grouped heads {cite}`ainslie2023gqa` | a key head, by a group | dK, dV are sums over the group |
# | shared q | one q, by every sequence | dQ is a sum over the batch |
#
# The second is pooling by learned seeds {cite}`lee2019settransformer`: the seeds are parameters,
# and their gradient is a sum over {glue:text}`hand_batch:,.0f` sequences on a batch of the
# published size. In which order such a sum is added decides whether two runs agree to the bit.
# {doc}`v1_tiled_backward` adds in a fixed order, {doc}`v2_fused_backward` pays for one. Both sums
# against autograd, which knows nothing of them and sees `repeat_interleave` and `expand`:


# %%
def copies_by_autograd(q, k, v, grad_out, lengths_k, group):
    """(dq, dk, dv) of a shared q and grouped heads by autograd, from copies of the tensors."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    every_k, every_v = (x.repeat_interleave(group, dim=1) for x in leaves[1:])
    batch = len(lengths_k)
    every_q = leaves[0].expand(batch, *q.shape).flatten(0, 1)
    out, start = [], 0
    for i, n in enumerate(lengths_k):
        rows = every_q[i * len(q) : (i + 1) * len(q)]
        score = torch.einsum("ihd,jhd->hij", rows, every_k[start : start + n]) * 0.25
        out.append(torch.einsum("hij,jhd->ihd", alpha.function(score), every_v[start : start + n]))
        start += n
    return torch.autograd.grad(torch.cat(out), leaves, grad_out)


lengths_k, group = (5, 0, 9), 3
q = torch.randn(7, 6, 16, generator=make, dtype=torch.float64)
k, v = (torch.randn(sum(lengths_k), 2, 16, generator=make, dtype=torch.float64) for _ in range(2))
grad_out = torch.randn(7 * len(lengths_k), 6, 16, generator=make, dtype=torch.float64)
ends = cu_seqlens(lengths_k, "cpu")
batch = Batch(q, k, v, None, ends, 7, 9, activation=("gelu_tanh",), scale=0.25)
found = reference.backward(grad_out, batch)
print(f"{gap(found, copies_by_autograd(q, k, v, grad_out, lengths_k, group)):.1e}")

# %% tags=["remove-cell"]
assert gap(found, copies_by_autograd(q, k, v, grad_out, lengths_k, group)) < 1e-12
glue("batch", workload("gdpa-self-full-1024").batch)

# %% [markdown]
# ## Is it right?
#
# Autograd might share a mistake with us. Differences of the forward pass cannot. PyTorch's
# `gradcheck` moves every single element of the inputs up and down and compares; here through the
# public operator, in fp64, with our formulas as its backward:

# %%
CHECKED = {
    **{f"{name}, plain": {"activation": name} for name in reference.ACTIVATIONS},
    "both scales": {"scale": -0.7, "output_scale": 3.0},
    "causal and window": {"causal": True, "window": 2},
    "one activation for each head": {"activation": ("silu", "relu", "gelu", "gelu_tanh")},
    "grouped heads": {"num_heads_k": 2},
    "shared q": {"shared_q": True},
    "all of it": {
        "activation": ("silu", "relu", "gelu", "hardswish"), "num_heads_k": 1, "shared_q": True,
        "scale": 0.9, "output_scale": -0.5, "causal": True, "window": 1,
    },
}  # fmt: skip


def call_of(lengths_q, lengths_k, *, num_heads_k=4, shared_q=False, **options):
    """(q, k, v), and `gdpa` of them by the definition, on a ragged batch with 4 heads of 3."""
    make = torch.Generator().manual_seed(3)
    total = max(lengths_q) if shared_q else sum(lengths_q)
    shapes = ((total, 4, 3), (sum(lengths_k), num_heads_k, 3), (sum(lengths_k), num_heads_k, 3))
    tensors = tuple(
        torch.randn(shape, generator=make, dtype=torch.float64).requires_grad_() for shape in shapes
    )
    ends_q = None if shared_q else cu_seqlens(lengths_q, "cpu")
    ends_k = cu_seqlens(lengths_k, "cpu")

    def function(q, k, v):
        return gdpa(
            q, k, v, ends_q, ends_k, max(lengths_q), max(lengths_k), impl="reference",
            backward_impl="reference", **options,
        )  # fmt: skip

    return tensors, function


passed, elements = [], 0
for how in CHECKED.values():
    lengths = ((4, 4, 4), (3, 0, 5)) if how.get("shared_q") else ((4, 0, 1), (3, 2, 5))
    tensors, function = call_of(*lengths, **how)
    passed.append(torch.autograd.gradcheck(function, tensors))
    elements += sum(x.numel() for x in tensors)
print(f"{sum(passed)} of {len(CHECKED)} cases pass, {elements:,} inputs moved one by one")

# %% tags=["remove-cell"]
assert all(passed)
glue("checks", sum(passed))

# %% [markdown]
# A check that cannot fail says nothing. The definition with one line changed, the mask left out of
# the slope:

# %%
FORGOT = changed(
    reference,
    (
        "p, slope = p.masked_fill(~keep, 0), slope.masked_fill(~keep, 0)",
        "p = p.masked_fill(~keep, 0)",
    ),
)


class Forgetful(torch.autograd.Function):
    """The definition forward, the changed one backward, causal."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return reference.forward(short(q, k, v))

    @staticmethod
    def backward(ctx, grad_out):
        return FORGOT.backward(grad_out, short(*ctx.saved_tensors))


def short(q, k, v) -> Batch:
    """Sequences of 4 and of 2 tokens under a causal mask."""
    ends = cu_seqlens((4, 2), "cpu")
    return Batch(q, k, v, ends, ends, 4, 4, activation=("gelu_tanh",), scale=0.25, causal=True)


small = tuple(
    torch.randn(6, 1, 3, generator=make, dtype=torch.float64).requires_grad_() for _ in range(3)
)
try:
    torch.autograd.gradcheck(Forgetful.apply, small)
    caught = ""
except RuntimeError as error:
    caught = str(error).splitlines()[0]
    print(caught)

# %% tags=["remove-cell"]
assert caught.startswith("Jacobian mismatch"), caught

# %% [markdown]
# ### How good can a difference be?
#
# Move q, k and v together along a random direction by a step $h$ up and down. The difference
# quotient of $\langle dO, O \rangle$ should be the inner product of the gradients with the
# direction.
#
# Predictions (2026-11-21, before the cell below had run):
#
# 1. For GELU the error of a central difference falls as $h^2$: between $h = 10^{-1}$ and $10^{-3}$
#    by a factor of $10^4$, within a factor of 2.
# 2. It is smallest between $h = 10^{-6}$ and $10^{-4}$, where the $h^2$ of the formula meets the
#    $10^{-16} / h$ of rounding, and then below $10^{-9}$ of the value.
# 3. For ReLU it falls too, but not smoothly: a kink counts only while some score crosses it within
#    the step.

# %%
STEPS = np.logspace(-1, -11, 41)


def difference_errors(activation: str, steps) -> list[float]:
    """Relative errors of central differences along one direction, for each step."""
    make = torch.Generator().manual_seed(11)
    lengths_q, lengths_k = (9, 0, 14), (12, 3, 7)
    at, along = (
        [torch.randn(n, 2, 8, generator=make, dtype=torch.float64)
         for n in (sum(lengths_q), sum(lengths_k), sum(lengths_k))]
        for _ in range(2)
    )  # fmt: skip
    grad_out = torch.randn(at[0].shape, generator=make, dtype=torch.float64)
    ends = cu_seqlens(lengths_q, "cpu"), cu_seqlens(lengths_k, "cpu")

    def moved(h: float) -> Batch:
        tensors = (x + h * direction for x, direction in zip(at, along, strict=True))
        return Batch(*tensors, *ends, 14, 12, activation=(activation,), scale=0.25)

    def loss(h: float) -> float:
        return (grad_out * reference.forward(moved(h))).sum().item()

    gradients = reference.backward(grad_out, moved(0))
    slope = sum((g * d).sum() for g, d in zip(gradients, along, strict=True)).item()
    return [abs((loss(h) - loss(-h)) / (2 * h) / slope - 1) for h in steps]


errors = pd.DataFrame(
    {"h": STEPS, **{name: difference_errors(name, STEPS) for name in ("gelu_tanh", "relu")}}
)

# %% tags=["remove-cell"]
by_step = errors.set_index("h")["gelu_tanh"]
coarse, fine = (by_step.iloc[np.abs(np.log10(STEPS) - e).argmin()] for e in (-1, -3))
fall = coarse / fine
best = by_step.idxmin()
glue("fall", fall)
glue_word("verdict_1", VERDICT[0.5e4 <= fall <= 2e4])
glue("best_step", best)
glue("least_error", by_step.min())
glue_word("verdict_2", VERDICT[1e-6 <= best <= 1e-4 and by_step.min() < 1e-9])
relu = errors.set_index("h")["relu"]
jumps = relu.iloc[:-1].to_numpy() / relu.iloc[1:].to_numpy()
drop = int(jumps.argmax())
glue("relu_before", 100 * relu.iloc[: drop + 1].mean())
glue("relu_step", STEPS[drop + 1])
glue_word("verdict_3", VERDICT[bool(relu.min() < 1e-3 * relu.iloc[0] and jumps.max() > 100)])
assert (relu.iloc[: drop + 1] > 0.01).all(), "the text: it stays where it is until the jump"
assert relu.iloc[drop + 1] < 2 * by_step.iloc[drop + 1], "the text: onto the curve of GELU"
assert by_step.min() < 1e-8

# %% tags=["remove-input"]
# | name: fig-hand-differences
# | caption: >
# |   Relative error of a central difference of the definition against the gradients by formula, by
# |   step, in double precision. Dashed: the slope of a square.
# | alt: >
# |   Two curves over steps from a tenth to ten to the minus eleven, on logarithmic axes. That of
# |   GELU runs along the dashed line down, and below some step rises again in zigzags as rounding
# |   takes over. That of ReLU stays near a tenth, drops onto the other at one step, and follows it.
with figures.style():
    chart, axis = figures.subplots(width=6.6, height=3.8)
    for name, impl in (("gelu_tanh", "v1_tiled"), ("relu", "v3_persistent")):
        axis.loglog(
            errors["h"], errors[name].clip(lower=1e-16), "o-", markersize=3.5, linewidth=1.2,
            color=figures.colour(impl), label=name,
        )  # fmt: skip
    guide = STEPS[STEPS >= 1e-5]
    axis.loglog(
        guide, coarse / 5 * (guide / 0.1) ** 2, color=INK, linewidth=1, linestyle=(0, (4, 2))
    )
    axis.set_xlim(0.2, 5e-12)
    axis.set_xlabel("step h")
    axis.set_ylabel("relative error")
    axis.legend(loc="upper center")
display(chart)

# %% tags=["remove-input"]
figures.save_csv(errors, "hand-differences")
figures.source(
    "modelled", "gdpa_kernels/gdpa/reference.py in fp64, along one direction", "hand-differences"
)

# %% [markdown]
# 1. From $10^{-1}$ to $10^{-3}$ the error of GELU falls by {glue:text}`hand_fall:,.0f`:
#    **{glue:text}`hand_verdict_1`**.
# 2. It is smallest at $h$ = {glue:text}`hand_best_step:.0e`, with
#    {glue:text}`hand_least_error:.0e`: **{glue:text}`hand_verdict_2`**.
# 3. ReLU: **{glue:text}`hand_verdict_3`**, in a way that we had not thought of. The error stays
#    near {glue:text}`hand_relu_before:.0f` % down to $h$ = {glue:text}`hand_relu_step:.0e` and then
#    drops onto the other curve at once. A score nearer to 0 than the step counts with the mean of
#    its two slopes, whatever the step; one such score is enough.
#
# A difference in bf16 would be useless: its rounding is $10^{-3}$, not $10^{-16}$. The kernels are
# therefore compared with the definition, and the definition with differences.
#
# ## Value and slope from one transcendental
#
# Forward needs $\alpha$ of a score, backward $\alpha$ and $\alpha'$ of the same one. For the tanh
# form of GELU {cite}`hendrycks2016gelu`, with $u(x) = \sqrt{2 / \pi}\,(x + 0.044715\,x^3)$ and
# $t = \tanh u$,
#
# $$
# \alpha = \tfrac12 x\,(1 + t), \qquad
# \alpha' = \tfrac12 (1 + t) + \tfrac12 x\,u'\,(1 - t^2) .
# $$
#
# The derivative of tanh is a polynomial in tanh, so one `tanh.approx` serves both
# ({doc}`../operator/activations` has its error). SiLU {cite}`elfwing2017silu` is the same:
# $g = \tfrac12 + \tfrac12 \tanh(x / 2)$, $\alpha = x g$ and $\alpha' = g + x g\,(1 - g)$. The code:

# %% tags=["remove-input"]
code(inspect.getsource(derivatives.gelu_tanh_and_slope.fn))

# %% [markdown]
# What does it cost? The files of the activations and of their derivatives say, and the compiler
# says whether they are right. A kernel that loads scores and stores value and slope, compiled for
# sm_90a, less one that only loads and stores:


# %%
@triton.jit
def both_kernel(s_ptr, y_ptr, slope_ptr, scale, NAME: tl.constexpr, BLOCK: tl.constexpr):
    """(value, slope) of BLOCK scores; NAME None only moves them."""
    at = tl.arange(0, BLOCK)
    s = tl.load(s_ptr + at)
    if NAME is None:
        y, slope = s, s
    else:
        y, slope = derivatives.value_and_slope(s, scale, NAME, True)
    tl.store(y_ptr + at, y)
    tl.store(slope_ptr + at, slope)


# %% tags=["remove-cell"]
ARITHMETIC = ("FADD", "FMUL", "FFMA", "FSEL", "SEL", "FSETP", "FMNMX")
A_THREAD = 16  # elements


def counted(name: str | None) -> dict[str, int]:
    types = {"s_ptr": "*fp32", "y_ptr": "*fp32", "slope_ptr": "*fp32", "scale": "fp32"}
    made = compile_check.build(
        both_kernel, types, {"NAME": name, "BLOCK": 32 * A_THREAD}, options={"num_warps": 1}
    )
    found = compile_check.read(made).instructions
    return {"fp32": sum(found[m] for m in ARITHMETIC), "MUFU": found["MUFU"]}


moved = counted(None)
costs = []
for name in reference.ACTIVATIONS:
    made = counted(name)
    here = {kind: (made[kind] - moved[kind]) / A_THREAD for kind in made}
    forward, both = activations.INSTRUCTIONS[name], derivatives.INSTRUCTIONS[name]
    assert here["MUFU"] == both[1] and 0 <= here["fp32"] - both[0] <= 0.5, name
    costs.append(
        {
            "activation": name, "forward, fp32": forward[0], "forward, MUFU": forward[1],
            "both, fp32": both[0], "both, MUFU": both[1],
            "compiled, fp32": here["fp32"], "compiled, MUFU": here["MUFU"],
        }
    )  # fmt: skip
costs = pd.DataFrame(costs)
gelu = costs.set_index("activation").loc["gelu_tanh"]
glue("both_fp32", gelu["both, fp32"])
glue("both_mufu", gelu["both, MUFU"])
glue("forward_fp32", gelu["forward, fp32"])
assert gelu["both, MUFU"] == gelu["forward, MUFU"] == 1, "the text: the same transcendental"
TENSOR, LANES, MUFU_LANES = 4096, 128, 16  # of an SM, each clock: FLOPs, fp32 lanes, MUFU lanes
clocks = {}
for direction, products, fp32, packs in (
    ("forward", 2, gelu["forward, fp32"], 0.5),
    ("backward", 5, gelu["both, fp32"] + 1, 1.0),
):
    clocks[direction] = {
        "products": 2 * products * HEAD_DIM / TENSOR,
        "MUFU": 1 / MUFU_LANES,
        "issue slots": (fp32 + 1 + packs) / LANES,
    }
for direction, found in clocks.items():
    glue(f"mufu_share_{direction}", 100 * found["MUFU"] / found["products"])
    glue(f"issue_share_{direction}", 100 * found["issue slots"] / found["products"])
assert clocks["backward"]["issue slots"] > clocks["backward"]["MUFU"], "the text: issue is more"

# %% tags=["remove-input"]
figures.show_table(costs)

# %% tags=["remove-input"]
figures.source(
    "modelled",
    "documented: activations.py and derivatives.py; compiled: sm_90a, 16 scores of a thread, by "
    f"triton {triton.__version__}; the excess are instructions that make constants",
)

# %% [markdown]
# With its slope GELU takes {glue:text}`hand_both_fp32:.0f` fp32 instructions instead of
# {glue:text}`hand_forward_fp32:.0f`, and no further transcendental. The exact form, `gelu`, is not
# so lucky: its value is an error function and its slope needs an exponential besides. Per score and
# clock of an SM, at head_dim 128, with the product of slope and dP and the conversions to bf16:

# %% tags=["remove-input"]
figures.show_table(pd.DataFrame(clocks).T.reset_index(names="clocks of an SM for a score"))

# %% tags=["remove-input"]
figures.source(
    "modelled",
    f"{TENSOR:,} FLOPs on tensor cores, {LANES} issue slots and {MUFU_LANES} MUFU results a clock",
)

# %% [markdown]
# Forward MUFU needs {glue:text}`hand_mufu_share_forward:.0f` % of the time of the products,
# backward {glue:text}`hand_mufu_share_backward:.0f` %; issue slots
# {glue:text}`hand_issue_share_forward:.0f` % and {glue:text}`hand_issue_share_backward:.0f` %. The
# chapters on forward rungs fought for the activation ({doc}`../forward/activation_arithmetic`).
# Backward it is not where the time can go; the fight will be for registers and for shared memory.
#
# ## Five products
#
# The definition uses $T$, $dP$, $dV$, $dK$ and $dQ$, each a product of $r \times n \times d$
# multiply-adds. Can one be saved? $T$ could be: it was computed forward. To keep it means to write
# and read a number for each score, and the exercises show what that would cost. The other four have
# operands that did not exist before. So five products are *useful*, 2.5 times forward's two, and
# we count them so for everybody, however many a kernel makes.
#
# Bytes: q, k, v and dO must be read, dq, dk and dv written. At equal lengths these are seven
# tensors, forward moves four. All published workloads, from `Workload.flops` and
# `Workload.bytes`, which this cell recounts from the lengths:

# %%
NAMES = list(dict.fromkeys(n for figure in FIGURES if "-bwd-" in figure for n in FIGURES[figure]))


def recounted(w: Workload) -> tuple[int, int]:
    """(FLOPs, bytes) of backward, written down from the five products and the seven tensors."""
    pairs = sum(a * b for a, b in zip(w.seqlens_q, w.seqlens_k, strict=True))
    row = w.num_heads_q * w.head_dim * 2
    tensors = {"q": w.total_q, "k": w.total_k, "v": w.total_k, "dO": w.total_q,
               "dq": w.total_q, "dk": w.total_k, "dv": w.total_k}  # fmt: skip
    return 5 * 2 * w.head_dim * w.num_heads_q * pairs, row * sum(tensors.values())


for name in NAMES:
    w = workload(name)
    assert recounted(w) == (w.flops("backward"), w.bytes("backward"))
    assert 2 * w.flops("backward") == 5 * w.flops("forward")

# %% tags=["remove-cell"]
run_record = results.latest_record(data_dir, notebook="notebooks/forward/results.py", system="h200")
limits = results.ceilings(run_record)
machine = system.load(Path(data_dir) / "systems" / f"{run_record.system}.json")
brackets = {
    (name, direction): roofline.bracket(workload(name), direction, limits)
    for name in NAMES
    for direction in ("forward", "backward")
}


def intensity(name: str, direction: str) -> float:
    w = workload(name)
    return w.flops(direction) / w.bytes(direction)


listed = pd.DataFrame(
    {
        "workload": name.removeprefix("gdpa-"),
        "TFLOP": workload(name).flops("backward") / 1e12,
        "GB": workload(name).bytes("backward") / 1e9,
        "FLOP/byte, forward": intensity(name, "forward"),
        "FLOP/byte": intensity(name, "backward"),
        "products (us)": brackets[name, "backward"].compute_us,
        "bytes (us)": brackets[name, "backward"].memory_us,
        "bound": brackets[name, "backward"].bound,
        "roofline (TFLOP/s)": brackets[name, "backward"].tflops_at_lower,
        "bound, forward": brackets[name, "forward"].bound,
    }
    for name in NAMES
)  # fmt: skip
SAME = workload("gdpa-self-full-1024")
glue("flops_ratio", SAME.flops("backward") / SAME.flops("forward"))
glue("bytes_ratio", SAME.bytes("backward") / SAME.bytes("forward"))
rate = {
    d: limits.gbytes_per_s(SAME.bytes_read(d), SAME.bytes_written(d)) * 1e9
    for d in ("forward", "backward")
}
ridge = {d: limits.tflops * 1e12 / rate[d] for d in rate}
# Equal lengths n: 4 n^2 d over 4 tensors of 2 n d bytes, 10 n^2 d over 7 of them.
glue("ridge_forward", 2 * ridge["forward"])
glue("ridge_backward", 1.4 * ridge["backward"])
glue("ridge_flops_backward", ridge["backward"])
memory_bound = {d: [n for n in NAMES if brackets[n, d].bound == "memory"] for d in rate}
glue("workloads", len(NAMES))
for d in rate:
    glue(f"memory_{d}", len(memory_bound[d]))
assert set(memory_bound["backward"]) <= set(memory_bound["forward"])
assert all(n.endswith("-256") for n in memory_bound["backward"]), "the text: all have 256 tokens"
glue("cross_limit", 10 * 256 / 6)

# %% tags=["remove-input"]
figures.show_table(listed)

# %% tags=["remove-input"]
figures.save_csv(listed, "hand-counts")
figures.source(
    "modelled",
    f"FLOPs and bytes of the workloads; ceilings measured on {machine.gpu} in {run_record.id}",
    csv="hand-counts",
)

# %% tags=["remove-input"]
# | name: fig-hand-roofline
# | caption: >
# |   Where the published workloads lie under the roofline: forward (hollow) and backward (filled),
# |   joined by a line. The two slopes are the copies with the mix of reads and writes of each
# |   direction.
# | alt: >
# |   A roofline: two slanted lines close together that end in one horizontal line. For each family
# |   of workloads hollow points lie to the left of filled ones by the same factor. Most filled
# |   points are on the horizontal part; a few short ones are still on the slope.
LOOKS = {
    "gdpa-self-full": ("o", "v1_tiled"), "gdpa-self-half-dense": ("s", "v3_persistent"),
    "gdpa-self-half-jagged": ("^", "v2_tma"), "gdpa-cross-full": ("D", "v4_warp_specialized"),
}  # fmt: skip
with figures.style():
    chart, axis = figures.subplots(width=7.2, height=4.2)
    x = np.logspace(np.log10(40), np.log10(1700), 200)
    for d, line in (("forward", (0, (1, 1.5))), ("backward", "-")):
        axis.loglog(
            x, np.minimum(x * rate[d] / 1e12, limits.tflops), color=INK, linewidth=1.2,
            linestyle=line, label=f"roofline, {d}",
        )  # fmt: skip
    for family, (marker, impl) in LOOKS.items():
        for name in NAMES:
            if name.rsplit("-", 1)[0] != family:
                continue
            points = [
                (intensity(name, d), brackets[name, d].tflops_at_lower)
                for d in ("forward", "backward")
            ]
            axis.plot(*zip(*points, strict=True), color=figures.colour(impl), linewidth=0.8)
            axis.plot(*points[0], marker, color=figures.colour(impl), markerfacecolor="none")
            axis.plot(
                *points[1], marker, color=figures.colour(impl),
                label=family.removeprefix("gdpa-") if name.endswith("-512") else None,
            )  # fmt: skip
    axis.set_xlabel("useful FLOPs per byte")
    axis.set_ylabel("TFLOP/s at the roofline")
    axis.set_xticks([64, 128, 256, 512, 1024], ["64", "128", "256", "512", "1024"])
    axis.set_yticks([200, 400, 800], ["200", "400", "800"])
    axis.minorticks_off()
    axis.legend(loc="lower right", fontsize=8.5)
display(chart)

# %% tags=["remove-input"]
figures.source(
    "modelled", f"the table above; ceilings measured on {machine.gpu} in {run_record.id}"
)

# %% [markdown]
# Forward {glue:text}`hand_memory_forward:.0f` of the {glue:text}`hand_workloads:.0f` workloads are
# memory-bound, backward {glue:text}`hand_memory_backward:.0f`. The reason is the quotient: 2.5
# times the FLOPs for 7/4 of the bytes, so 10/7 of the intensity. The ridge of the machine is at
# {glue:text}`hand_ridge_flops_backward:.0f` FLOPs per byte backward; a self-attention of $n$ tokens
# has $5 n / 7$. With 256 keys and many queries the intensity tends to
# {glue:text}`hand_cross_limit:.0f` and no further, since keys are few and Q, dO and dQ must move.
#
# These are the fewest bytes. A kernel may move more: dQ is a sum over *keys*, and whoever owns keys
# and not queries has to add it up in memory, in fp32 ({doc}`v2_fused_backward`).
#
# ## What forward must leave behind
#
# Look at the formulas again: $Q$, $K$, $V$, $dO$, the mask, two numbers. No $O$. No statistics of
# rows. Softmax attention is different, and it is worth seeing where.
#
# With $P_{ij} = e^{S_{ij}} / Z_i$ and $Z_i = \sum_k e^{S_{ik}}$ each probability depends on the
# whole row, $\partial P_{ij} / \partial S_{ik} = P_{ij} (\delta_{jk} - P_{ik})$, and
#
# $$
# dS_{ik} = \sum_j dP_{ij}\,P_{ij}\,(\delta_{jk} - P_{ik})
#         = P_{ik} \bigl( dP_{ik} - D_i \bigr), \qquad D_i = \sum_j P_{ij}\,dP_{ij} .
# $$ (eq-hand-softmax)
#
# Two numbers for each row appear, $Z_i$ and $D_i$, and both are sums over all keys. A kernel that
# has a tile of keys cannot form them. It needs $Z_i$ (or $\log Z_i$, the log-sum-exp) from forward,
# and $D_i$ before the first tile; the way out is
# $D_i = \sum_j P_{ij} \sum_c dO_{ic} V_{jc} = \sum_c dO_{ic} O_{ic}$, which takes the output, and a
# kernel of its own {cite}`dao2024flashattention2`. For an activation the Jacobian is diagonal:

# %% tags=["remove-input"]
# | name: fig-hand-jacobian
# | caption: >
# |   The derivatives of twelve outputs of one row by its twelve scores, softmax and GELU. The side
# |   of a square is proportional to the root of its number; hollow: negative.
# | alt: >
# |   Two grids of twelve by twelve. On the left all cells hold squares, filled ones on the diagonal
# |   and hollow ones beside it. On the right only the diagonal holds squares, two of them hollow.
row_scores = torch.randn(12, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
JACOBIANS = {
    "softmax": torch.autograd.functional.jacobian(lambda x: x.softmax(0), row_scores),
    "gelu_tanh": torch.autograd.functional.jacobian(alpha.function, row_scores),
}
with figures.style():
    chart, axes = figures.subplots(1, 2, width=6.4, height=3.3)
    for axis, (name, matrix) in zip(axes, JACOBIANS.items(), strict=True):
        largest = matrix.abs().max().item()
        for i in range(12):
            for j in range(12):
                side = 0.95 * math.sqrt(abs(matrix[i, j].item()) / largest)
                shown = figures.colour("v3_persistent" if name == "softmax" else "v1_tiled")
                axis.add_patch(
                    Rectangle(
                        (j - side / 2, i - side / 2), side, side, edgecolor=shown, linewidth=0.8,
                        facecolor=shown if matrix[i, j] > 0 else "none",
                    )
                )  # fmt: skip
        axis.set_xlim(-0.7, 11.7)
        axis.set_ylim(11.7, -0.7)
        axis.set_aspect("equal")
        axis.set_title(name)
        axis.set_xlabel("by the score of key")
        axis.grid(visible=False)
        axis.set_xticks([0, 11])
        axis.set_yticks([0, 11])
    axes[0].set_ylabel("output of key")
display(chart)

# %% tags=["remove-input"]
figures.source("modelled", "autograd of one row of twelve scores from N(0, 1)")

# %% [markdown]
# {doc}`../block/backward_alone` has the third case: softmax over blocks of 64 tokens, whose whole
# row lies in one tile. There {eq}`eq-hand-softmax` holds, with $Z$ and $D$, but both are sums over
# what is in registers, so nothing has to be kept either. The criterion is the same: *is everything
# that a score's derivative depends on in one tile?* An activation depends on one score, which is
# always in one tile; a softmax on a row, which is so only if rows are short.
#
# In numbers. What autograd keeps between forward and backward, ours and PyTorch's softmax
# attention, on 200 tokens, 2 heads of 64:


# %%
def kept_by(function) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(the output, what autograd keeps for its backward)."""
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x)
    with hooks:
        out = function()
    return out, kept


ends = cu_seqlens((200,), "cpu")
q, k, v = (torch.randn(200, 2, 64, generator=make).bfloat16().requires_grad_() for _ in range(3))
given = (q, k, v, ends)
with emulator.enabled():
    out, ours = kept_by(lambda: gdpa(q, k, v, ends, ends, 200, 200))
wide = [x.detach().transpose(0, 1)[None].contiguous().requires_grad_() for x in (q, k, v)]
_, theirs = kept_by(lambda: F.scaled_dot_product_attention(*wide))
for name, kept, known in (("gdpa", ours, given), ("softmax", theirs, wide)):
    places = {x.data_ptr() for x in known}
    new = [x for x in kept if x.data_ptr() not in places]
    shapes = ", ".join(f"{list(x.shape)} {str(x.dtype)[6:]}" for x in new) or "nothing"
    print(f"{name} keeps {len(kept)} tensors; beside its inputs {shapes}")

# %% tags=["remove-cell"]
places = {x.data_ptr() for x in given}
assert len(ours) == 5 and all(x.data_ptr() in places for x in ours)
glue("kept_own", sum(x.nbytes for x in ours if x.data_ptr() not in places))
new = [x for x in theirs if x.data_ptr() not in {y.data_ptr() for y in wide}]
assert sorted(x.numel() for x in new) == [400, 200 * 2 * 64], "softmax: log-sum-exp and output"

kept_rows = []
for name in ("gdpa-self-full-1024", "gdpa-cross-full-2048", "gdpa-self-half-jagged-1024"):
    w = workload(name)
    out_bytes = w.bytes_written("forward")
    lse = w.total_q * w.num_heads_q * 4
    kept_rows.append(
        {
            "workload": name.removeprefix("gdpa-"), "q, k, v (GB)": w.bytes_read("forward") / 1e9,
            "softmax: output (GB)": out_bytes / 1e9, "softmax: log-sum-exp (GB)": lse / 1e9,
            "D, written and read (GB)": 2 * lse / 1e9,
            "output and dO, read again (GB)": 2 * out_bytes / 1e9,
            "fewest bytes of backward (GB)": w.bytes("backward") / 1e9,
        }
    )  # fmt: skip
kept_rows = pd.DataFrame(kept_rows)
extra = kept_rows.set_index("workload").loc["self-full-1024"]
glue("extra_share", 100 * extra["output and dO, read again (GB)"]
     / extra["fewest bytes of backward (GB)"])  # fmt: skip

# %% tags=["remove-input"]
figures.show_table(kept_rows)

# %% tags=["remove-input"]
figures.source(
    "modelled", "tensors of the workloads; log-sum-exp and D are one fp32 a row and head"
)

# %% [markdown]
# The log-sum-exp is small. The output is not, though the layer behind it may keep it anyway. What
# counts for time is the kernel that forms $D$: it reads the output and dO once more,
# {glue:text}`hand_extra_share:.0f` % of the fewest bytes at equal lengths. Ours has no such kernel,
# and no value that forward must have computed in the same way as backward does.
#
# ## What P and dS need, and where
#
# The five products are not alike for a kernel. Each sums over one of three lengths, and each owner
# of a result wants its sum to stay in one place:
#
# | product | shape | summed over | computed operand | loaded operand |
# |:--|:--|:--|:--|:--|
# | $T = Q K^{\mathsf T}$ | queries × keys | head_dim | | Q, K |
# | $dP = dO\,V^{\mathsf T}$ | queries × keys | head_dim | | dO, V |
# | $dV = P^{\mathsf T} dO$ | keys × head_dim | **queries** | $P$, keys down | dO |
# | $dK = dS^{\mathsf T} Q$ | keys × head_dim | **queries** | $dS$, keys down | Q |
# | $dQ = dS\,K$ | queries × head_dim | **keys** | $dS$, queries down | K |
#
# Two conflicts follow.
#
# *Who owns what.* {numref}`fig-hand-owners`: a tile of $dS$ adds to a strip of dQ at its left and
# to strips of dK and dV below it. A program that walks down a column of tiles sums dK and dV in its
# registers and scatters dQ, one that walks along a row the other way round.
# {doc}`v1_tiled_backward` has a kernel of each kind and computes $T$ and $dP$ twice,
# {doc}`v2_fused_backward` walks columns and adds dQ up in memory, {doc}`v5_short_kv_backward` gives
# all columns to one cluster.

# %% tags=["remove-input"]
# | name: fig-hand-owners
# | caption: >
# |   One tile of scores and the gradients that it adds to. dQ of its queries is a sum along the row
# |   of tiles, dK and dV of its keys are sums down the column.
# | alt: >
# |   A grid of six by six tiles with one tile coloured. Its row is shaded and leads to a coloured
# |   tile of a strip dQ at the left; its column is shaded and leads to coloured tiles of the strips
# |   dK and dV below.
with figures.style():
    chart, axis = figures.subplots(width=4.6, height=4.6)
    side, tiles, mine = 1.0, 6, (2, 3)

    def cell(x: float, y: float, w: float, h: float, **style) -> None:
        style = {"facecolor": "none", "edgecolor": INK, "linewidth": 0.7} | style
        axis.add_patch(Rectangle((x, -y - h), w, h, **style))

    strong = {"facecolor": figures.colour("v1_tiled")}
    for i in range(tiles):
        for j in range(tiles):
            if (i, j) == mine:
                look = strong
            elif i == mine[0]:
                look = {"facecolor": figures.colour("v3_persistent"), "alpha": 0.3}
            elif j == mine[1]:
                look = {"facecolor": figures.colour("v2_tma"), "alpha": 0.3}
            else:
                look = {}
            cell(j, i, side, side, **look)
    for i in range(tiles):
        own = {"facecolor": figures.colour("v3_persistent")} if i == mine[0] else {}
        cell(-1.5, i, 1.0, side, **own)
    for j in range(tiles):
        own = {"facecolor": figures.colour("v2_tma")} if j == mine[1] else {}
        for y in (tiles + 0.5, tiles + 1.6):
            cell(j, y, side, 0.8, **own)
    for x, y, text in (
        (-1.0, -0.25, "dQ"), (tiles / 2, -0.25, "$dS$, queries down, keys to the right"),
        (-0.5, tiles + 0.95, "dK"), (-0.5, tiles + 2.05, "dV"),
    ):  # fmt: skip
        axis.text(x, -y, text, ha="center", va="center")
    axis.set_xlim(-1.8, tiles + 0.3)
    axis.set_ylim(-tiles - 2.7, 0.6)
    axis.set_aspect("equal")
    axis.set_axis_off()
display(chart)

# %% tags=["remove-input"]
figures.source("modelled", "drawn from the table of products above")

# %% [markdown]
# *Which way round.* What a Hopper tensor core leaves in registers can be the first operand of the
# next product as it stands, not transposed ({doc}`../forward/v4_warp_specialized`). If a kernel
# computes $T = Q K^{\mathsf T}$, queries down, then $dS$ is ready for dQ, but $P^{\mathsf T}$ and
# $dS^{\mathsf T}$ have to be turned, which means a trip through shared memory. If it computes
# $T^{\mathsf T} = K Q^{\mathsf T}$, keys down, $P^{\mathsf T}$ and $dS^{\mathsf T}$ are ready and
# only dQ wants a turn:

# %%
WANTED = {"dV": "keys", "dK": "keys", "dQ": "queries"}  # what must run down the first operand
turns = pd.DataFrame(
    {
        "scores computed with": f"{down} down",
        **{name: "ready" if side == down else "turn" for name, side in WANTED.items()},
        "turns, all three": sum(side != down for side in WANTED.values()),
        "turns, dK and dV only": sum(WANTED[name] != down for name in ("dV", "dK")),
        "turns, dQ only": int(WANTED["dQ"] != down),
    }
    for down in ("queries", "keys")
)
figures.show_table(turns)

# %% tags=["remove-cell"]
assert turns["turns, all three"].tolist() == [2, 1], "the text: one turn with keys down"
assert (turns[["turns, dK and dV only", "turns, dQ only"]] == 0).any().all()

# %% [markdown]
# A kernel of all three needs one turn at least; two kernels with an orientation each need none.
# That is the plan of {doc}`v1_tiled_backward`, and the one turn is a theme of all that follow.
#
# ## The surprise
#
# One expects backward to be the harder half, and for instruction slots and registers it is. For
# memory it is the easier one. At 256 tokens forward may reach
# {glue:text}`hand_roof_forward_256:.0f` TFLOP/s on this machine, backward
# {glue:text}`hand_roof_backward_256:.0f` (modelled). Two things that a softmax backward pays for
# are absent: a tensor kept for it and a kernel before it. If ours is slow, it will be for other
# reasons.

# %% tags=["remove-cell"]
for d in ("forward", "backward"):
    glue(f"roof_{d}_256", brackets["gdpa-self-full-256", d].tflops_at_lower)
assert (
    brackets["gdpa-self-full-256", "backward"].tflops_at_lower
    > 1.2 * brackets["gdpa-self-full-256", "forward"].tflops_at_lower
)

# Exercise 1: keep P instead of computing T again.
pairs = SAME.pairs * SAME.num_heads_q
stored = pairs * 2
glue("store_gb", stored / 1e9)
glue("store_ms", 2 * stored / (limits.gbytes_per_s(1, 1) * 1e9) * 1e3)
glue("product_ms", 2 * pairs * HEAD_DIM / (limits.tflops * 1e12) * 1e3)
glue("kept_times", stored / (3 * SAME.bytes_written("forward")))
assert 2 * stored / (limits.gbytes_per_s(1, 1) * 1e9) > 2 * pairs * HEAD_DIM / (
    limits.tflops * 1e12
)

# Exercise 2: the identity needs neither scores nor masks.
x = [torch.randn(20, 8, generator=make, dtype=torch.float64) for _ in range(4)]
leaves = [t.clone().requires_grad_() for t in x[:3]]
linear = torch.autograd.grad(0.5 * leaves[0] @ leaves[1].T @ leaves[2], leaves, x[3])
Q2, K2, V2, G2 = x
short_way = 0.5 * G2 @ (V2.T @ K2), 0.5 * V2 @ (G2.T @ Q2), 0.5 * K2 @ (Q2.T @ G2)
assert gap(short_way, linear) < 1e-12
glue("identity_times", 5 * 2 * 1024 * 1024 * HEAD_DIM / (5 * 2 * 1024 * HEAD_DIM * HEAD_DIM))

# Exercise 3: at which length a sequence is bound by products, for head_dim 64 too.
glue("ridge_tokens", 1.4 * ridge["backward"])
glue("ridge_cross_queries", next(n for n in range(1, 10_000) if 2560 * n / (6 * n + 2048)
                                 >= limits.tflops * 1e12 / rate["backward"]))  # fmt: skip

# %% [markdown]
# ## Exercises
#
# :::{exercise} Keep P
# :label: ex-hand-keep
#
# $T$ is computed again although forward had it. Suppose forward wrote $P$ in bf16 and backward
# read it. For gdpa-self-full-1024: how many GB is that, beside q, k and v? How long do writing and
# reading take at the rate of a copy, and how long the product that they save? What would backward
# still lack? *(paper, ten minutes)*
# :::
#
# :::{solution} ex-hand-keep
# :class: dropdown
#
# {glue:text}`hand_store_gb:.1f` GB, {glue:text}`hand_kept_times:.1f` times q, k and v together.
# Writing and reading take {glue:text}`hand_store_ms:.1f` ms, the product
# {glue:text}`hand_product_ms:.1f` ms at the rate of the ceilings. And GELU' cannot be had from
# GELU: two scores, left and right of its minimum, have the same value. The score itself, or both
# numbers, would have to be kept.
# :::
#
# :::{exercise} No activation at all
# :label: ex-hand-identity
#
# Let $\alpha$ be the identity, without a mask. Find dQ, dK and dV without forming a matrix of
# queries × keys, and count the FLOPs for 1,024 tokens and head_dim 128 against the five products.
# Check one of them in code. *(paper and five lines)*
# :::
#
# :::{solution} ex-hand-identity
# :class: dropdown
#
# With $O = s c\,Q (K^{\mathsf T} V)$: $dQ = s c\,dO\,(V^{\mathsf T} K)$,
# $dK = s c\,V (dO^{\mathsf T} Q)$ and $dV = s c\,K (Q^{\mathsf T} dO)$. The inner products are
# head_dim × head_dim; since $(V^{\mathsf T} K)$ is the transpose of $K^{\mathsf T} V$, and
# $dO^{\mathsf T} Q$ of $Q^{\mathsf T} dO$, five products remain even so if forward's is not kept,
# of $n d^2$ multiply-adds instead of $n^2 d$: {glue:text}`hand_identity_times:.0f` times fewer
# FLOPs. A cell of this chapter checks all three against autograd.
# :::
#
# :::{exercise} Where is the ridge?
# :label: ex-hand-ridge
#
# Derive the length from which self-attention backward is bound by products, for any head_dim. Then
# the number of queries from which cross-attention on 256 keys is. Take the rates of the copy and of
# the products from the table of your own machine, or ours. *(paper, ten minutes)*
# :::
#
# :::{solution} ex-hand-ridge
# :class: dropdown
#
# $10 n^2 d$ FLOPs and seven tensors of $2 n d$ bytes: $5 n / 7$ FLOPs per byte, whatever $d$ is.
# With our ceilings the ridge is at {glue:text}`hand_ridge_tokens:.0f` tokens. Cross: $10 \cdot 256
# \cdot n\,d$ FLOPs over $(3 n + 4 \cdot 256) \cdot 2 d$ bytes reach the same quotient from
# {glue:text}`hand_ridge_cross_queries:.0f` queries on (taking the same mix of reads and writes).
# :::
#
# ## Takeaways
#
# :::{admonition} What to remember
# :class: tip
#
# 1. A product forward is two products backward. Two are four; with the scores computed again they
#    are five, 2.5 times forward.
# 2. What forward must leave behind depends on how far a derivative reaches. An activation's reaches
#    no further than its own score.
# 3. A mask belongs to the activation *and* to its derivative. Zeros that were loaded need no mask,
#    because dO or V is zero with them.
# 4. dK and dV are sums over queries, dQ is one over keys. No walk through the tiles suits both.
# :::
