# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Your own operator
#
# Your model needs an activation that this package does not have, hides other pairs, or adds
# something to the scores. What has to change, and how do you know that it is right?
#
# :::{admonition} In this chapter (30 minutes)
# You will register an activation with its derivative, choose among the masks that exist, add a
# relative bias with gradients, and hold a kernel of yours to inputs that find the usual errors.
# :::

# %% tags=["hide-input"]
import difflib
import textwrap

import pandas as pd
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

import tritonemu
from _lib import block_bytes, studies
from gdpa_kernels import Mask, RelativeBias, gdpa, register_activation
from gdpa_kernels.calling import ladder
from gdpa_kernels.gdpa import registration
from gdpa_kernels.gdpa.device import masks
from gdpa_kernels.gdpa.kernels import v1_tiled, v1_tiled_backward
from gdpa_lab.measuring.inputs import cu_seqlens
from gdpa_lab.report import style
from gdpa_lab.report.chapter import Chapter
from notebooks.serving import _acceptance as acceptance

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("serving/own_operator", mode=mode, device=device, data_dir=data_dir)
torch.manual_seed(0)
TOKENS, NEW = 10, 4


def shown(rows: int = TOKENS, **mask) -> pd.DataFrame:
    """Which pairs count: P of a call with V = identity, where every score is 1."""
    ones, identity = torch.ones(TOKENS, 1, 1), torch.eye(TOKENS)[:, None]
    ends = cu_seqlens([rows], "cpu"), cu_seqlens([TOKENS], "cpu")
    p = gdpa(ones[:rows], ones, identity, *ends, rows, TOKENS, activation="identity", **mask)
    return pd.DataFrame(p[:, 0].numpy())


targets = torch.tensor([3], dtype=torch.int32)
panels = {
    "causal": shown(causal=True),
    "window=2": shown(causal=True, window=2),
    "num_targets=3": shown(causal=True, num_targets=targets),
}
assert [int(x.to_numpy().sum()) for x in panels.values()] == [55, 27, 52], "the alt text"
late = shown(NEW, causal="lower_right")
assert late.to_numpy()[-1].all() and late.to_numpy()[0].sum() == TOKENS - NEW + 1, "the text"

# %% tags=["remove-input"]
# | name: fig-own-masks
# | caption: >
# |   **A mask is an argument, and the operator draws it itself.** Pairs that count in a sequence of
# |   ten tokens; right, the last three are candidates, which see the history and themselves.
# | alt: >
# |   Three squares of 10 by 10 cells. Left, everything on and below the diagonal is filled. Middle,
# |   a band of three cells along the diagonal. Right, the lower triangle again, but the last three
# |   rows are filled up to the seventh key and on their own diagonal alone.
chapter.figure(
    style.drawn(block_bytes.cells)(panels, xlabel="key", ylabel="query"),
    computed="gdpa with V = identity and all scores 1",
)

# %% [markdown]
# With the identity matrix for $V$ the output is $P$. Draw every mask that you use, before you trust
# it.
#
# ## What changes where
#
# Each kind of change touches the definition, the derivative, the kernel and the test:
#
# | | activation | mask | bias |
# |:--|:--|:--|:--|
# | definition | $P = f(S)$ | $P_{ij} = 0$ where hidden | $S = s\,QK^{\mathsf T} + B$ |
# | derivative | $dS = f'(S) \circ dP$ | $dS_{ij} = 0$ there, too | $dB = c\,dS$, summed by entry |
# | kernel | one function per element | blocks skipped, tiles masked | a load per pair |
# | test | value and slope against autograd | draw it | gradients of the tables |
# | you write | two `@triton.jit` functions | arguments, if one fits | a `RelativeBias` |
#
# ## An activation
#
# Softplus, $\ln(1 + e^x)$, is a smooth ReLU whose derivative is the sigmoid. It makes a good test,
# because it is *not* zero at zero. The forward pass needs the value of a tile of scores in fp32,
# the backward pass value and slope together, since the two usually share their expensive part:


# %%
@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def softplus_and_slope(x):
    e = tl.exp(-tl.abs(x))
    slope = tl.where(x > 0, 1.0, e) / (1.0 + e)
    return tl.maximum(x, 0.0) + tl.log(1.0 + e), slope


register_activation("softplus", softplus, softplus_and_slope, F.softplus)

# %% [markdown]
# The last argument is the definition in PyTorch, which autograd differentiates. Before the first
# kernel runs, both jit functions are evaluated at 5,097 points out to $2^{43}$. They must be within
# $2^{-10}(1 + |x|)$ of the definition and of its derivative, half of the rounding to bf16 that
# follows. From then on the name works in every product, in layers, under `torch.compile`, and for
# one head among others.
#
# What if the slope is wrong? In this copy someone pasted the slope of the sigmoid, `y * (1 - y)`:


# %%
@triton.jit
def pasted(x):
    y = softplus(x)
    return y, y * (1.0 - y)


register_activation("pasted", softplus, pasted, F.softplus)

# %% tags=["remove-input"]
q, k, v = (torch.randn(40, 2, 32).bfloat16() for _ in range(3))
ends = cu_seqlens([25, 15], "cpu")
for name in ("softplus", "pasted"):
    with tritonemu.enabled():
        try:
            gdpa(q, k, v, ends, ends, 25, 25, activation=name, impl="v1_tiled")
            print(f"{name}: accepted")
        except ValueError as error:
            print(error)

# %% tags=["remove-cell"]
for name, is_right in (("softplus", True), ("pasted", False)):
    try:
        with tritonemu.enabled():
            registration.prove((name,), torch.device("cpu"))
        assert is_right, "the text: refused"
    except ValueError as error:
        assert not is_right and "the slope of activation 'pasted'" in str(error), "the text"

# %% [markdown]
# Without the check, the forward pass would be right, and the model would only train badly.
#
# After this check both kernels of the operator run in the {doc}`emulator <../tools/emulator>` on
# lengths around the edges of a tile, against fp64:

# %% tags=["hide-input"]
inputs = studies.batch((1, 63, 0, 70), heads=2, head_dim=32, activation="softplus")
checked = studies.comparison(v1_tiled, inputs)
computed = studies.backward(v1_tiled_backward, inputs)
gradients = studies.compare_gradients(computed.gradients, inputs)
print(f"output: {100 * (checked['largest error'] / checked['allowed']).max():.0f} % of the allowed")
for name, share in gradients["% of allowed"].items():
    print(f"{name}:     {share:.0f} % of the allowed")

# %% [markdown]
# ## A mask
#
# In a kernel a mask has two halves. The *range* says which blocks of keys a tile of rows visits at
# all, and that saves the time. The *tile mask* clears single pairs in the blocks at the border:

# %% tags=["remove-input"]
chapter.code(masks.mask_probabilities)

# %% [markdown]
# It acts on $P$, after the activation; the planted error below shows why. `gdpa` has these
# arguments:
#
# | you want | argument |
# |:--|:--|
# | earlier tokens only | `causal=True`; for new queries over a cache `causal="lower_right"` |
# | the last w positions | `window=w` |
# | candidates that see the history and themselves | `num_targets`, `target_group_size` |
# | first tokens that see the whole history | `num_contexts` |
# | last rows of the history that a window spares | `full_rows` |
#
# With `"lower_right"` positions *end* with their sequence: of four new queries over ten keys, the
# last one sees all ten. A plain `causal=True` with fewer queries than keys could mean either
# alignment, so it is refused. A mask that is the *union* of two disjoint sets of pairs needs no new
# kernel: call once for each set, and add ({doc}`adds_up`).
#
# Forward v8 and backward v4 take all of these masks.
#
# ## A bias
#
# HSTU {cite}`zhai2024hstu` adds two learned numbers to each score, one for the distance of the two
# positions and one for the time between the two events, sorted into buckets. They are added
# *before* the activation, so $dB = c\,dS$, and the gradient of an entry is the sum over all pairs
# that read it:

# %% tags=["remove-cell"]
positions = torch.zeros(2 * 6 - 1, dtype=torch.float64).normal_(std=0.5).requires_grad_()
times = torch.zeros(32, dtype=torch.float64).normal_(std=0.5).requires_grad_()
seconds = torch.tensor([0, 40, 41, 3000, 3600, 90000])
q, k, v = (torch.randn(6, 1, 8, dtype=torch.float64) for _ in range(3))
ends = cu_seqlens([6], "cpu")


# %%
def biased(positions, times):
    bias = RelativeBias(positions, times, timestamps=seconds)
    options = {"activation": "softplus", "causal": True}
    return gdpa(q, k, v, ends, ends, relative_bias=bias, **options)


# %% tags=["remove-input"]
print("gradients of the tables:", torch.autograd.gradcheck(biased, (positions, times)))
read = torch.autograd.grad(biased(positions, times).sum(), (positions, times))
print("entries that got one:", [int((x != 0).sum()) for x in read], "of", [11, 32])

# %% [markdown]
# Two details are easy to get wrong. A bucket must be found by comparing whole numbers, because a
# rounded logarithm could put the same time into different buckets on two devices. And with HSTU's
# default a row takes the time of the *next* event, so an append changes the row before it, and a
# cache of the deeper layers is no longer valid ({doc}`adds_up`).
#
# ## A planted error that one activation hides
#
# Suppose your kernel clears the *scores* of hidden pairs, before the activation, as a softmax
# kernel does with $-\infty$. We plant this error in a copy of forward v1 and compare its causal
# output with fp64:

# %% tags=["remove-input"]
AFTER = """\
        p = activate_per_head(s, factor, head, ACTIVATION, not EXACT)
        if segments_ptr is None:
            p = mask_probabilities(p, position, first_key, CAUSAL, WINDOW)
        else:
"""
BEFORE = """\
        if segments_ptr is None:
            s = mask_probabilities(s, position, first_key, CAUSAL, WINDOW)
        p = activate_per_head(s, factor, head, ACTIVATION, not EXACT)
        if segments_ptr is not None:
"""
planted = studies.changed(v1_tiled, (AFTER, BEFORE))
lines = [textwrap.dedent(text).splitlines() for text in (AFTER, BEFORE)]
difference = [line for line in difflib.ndiff(*lines) if not line.startswith("?")]
chapter.code("\n".join(difference), language="diff")

# %% tags=["remove-input"]
for activation in ("gelu_tanh", "softplus"):
    inputs = studies.batch(
        (70, 5), head_dim=32, activation=activation, mask=Mask(causal=True)
    )  # fmt: skip
    try:
        studies.comparison(planted, inputs)
        print(f"{activation}: nothing found")
    except AssertionError as error:
        print(f"{activation}, sequence of {' '.join(str(error).split())}")

# %% tags=["remove-cell"]
studies.comparison(planted, studies.batch((70, 5), head_dim=32, mask=Mask(causal=True)))
try:
    studies.comparison(planted, inputs)
except AssertionError:
    pass
else:
    raise AssertionError("the text: softplus reveals it")
biased = {rung.impl for rung in ladder.LADDERS["gdpa"] if "bias" in rung.requires.extras}
plain = {"reference", "v0_eager", "v1_tiled", "v1_tiled_backward"}
assert biased == plain, "the text: only the plain kernels take a relative bias"

# %% [markdown]
# GELU hides the error. It is zero at zero, so clearing the score also clears $P$. Softplus is $\ln
# 2$ at zero, and every hidden pair adds $\ln 2$ of its value. So *test a mask with a function that
# is not zero at zero*, in both directions.
#
# ## The acceptance test
#
# Each line is an input for a kernel of yours, and a fault that we planted in a copy of ours. In the
# emulator the input finds the fault; full tiles, for which kernels are written first, find none:

# %% tags=["remove-cell"]
accepted = [acceptance.failure(check) for check in (acceptance.FULL, *acceptance.CHECKS)]
assert not any(accepted), f"the text: v1 passes, got {accepted}"
for check in acceptance.CHECKS:
    wrong = check.wrong()
    missed = acceptance.failure(acceptance.FULL, wrong)
    assert not missed, f"the text: full tiles find nothing, got {check.fault}: {missed}"
    assert acceptance.failure(check, wrong), f"the text: {check.inputs} finds {check.fault}"
lower = acceptance.Check("", lambda kernel: acceptance.right(kernel, acceptance.around(-4.0)))
assert "out: max error" in acceptance.failure(lower), "the text: ours fails at -4"

# %% tags=["remove-input"]
lines = [(check.inputs, check.fault) for check in acceptance.CHECKS]
chapter.table(
    pd.DataFrame(lines, columns=["give it", "and you find, for example"]),
    caption="**Full tiles find none of these faults.** Output and gradients are compared by name "
    "with fp64, within twice PyTorch's error and one rounding.",
    name="tab-own-acceptance",
    emulated="copies of forward v1 and v5 and backward v1",
)

# %% [markdown]
# To run it on your kernel:
#
# ```python
# from notebooks.serving import _acceptance as acceptance
#
# yours = acceptance.Kernel(forward, backward)
# print([check.inputs for check in acceptance.CHECKS if acceptance.failure(check, yours)])
# ```
#
# On a GPU add two runs with the same bits, a second call with other lengths, an empty batch, and
# more than $2^{31}$ elements, where 32-bit offsets overflow. And know how far a kernel goes: with
# all scores about −4 forward v1 fails, by the documented error of `tanh.approx`
# ({doc}`../operator/activations`).
#
# ## Limits
#
# - An activation takes one score, and constants. One that needs the whole row is another operator;
#   for learned scales see {doc}`../backward/by_hand`.
# - It must be finite at 0: keys beyond the end of a sequence have score 0, and a row of zeros in V.
# - The products run registered activations; the ladder's lessons run only the package's own.
# - Only the plain kernels take a relative bias.
# - A mask that no argument describes needs a kernel of its own, or several calls and additions.
#
# ## Exercises
#
# :::{exercise} Squared softplus
# :label: ex-own-squared
#
# Write value and slope of $\ln^2(1 + e^x)$ and register them. Which part do the two share? What
# does the check find at $x = 20$ if you forget the factor two? *(emulator, ten minutes)*
# :::


# %% tags=["remove-cell"]
@triton.jit
def squared(x):
    y = softplus(x)
    return y * y


@triton.jit
def squared_and_slope(x):
    y, slope = softplus_and_slope(x)
    return y * y, 2.0 * y * slope


register_activation("squared", squared, squared_and_slope, lambda x: F.softplus(x) ** 2)
with tritonemu.enabled():
    registration.prove(("squared",), torch.device("cpu"))

# %% [markdown]
# :::{solution} ex-own-squared
# :class: dropdown
#
# After `y, slope = softplus_and_slope(x)` return `y * y, 2 * y * slope`, so the exponential is
# computed once. At 20 the slope is about 40, without the factor about 20. The tolerance there is
# about 0.02, so it is refused. The message names the wrong point nearest to 0, which is 0 itself.
# :::
#
# :::{exercise} Three calls
# :label: ex-own-three
#
# Build the right panel of {numref}`fig-own-masks` from calls that know no targets. *(PyTorch, ten
# minutes)*
# :::

# %% tags=["remove-cell"]
x = torch.randn(TOKENS, 1, 4, dtype=torch.float64)
old, new = x[:7], x[7:]
h, t = cu_seqlens([7], "cpu"), cu_seqlens([3], "cpu")
history = gdpa(old, old, old, h, h, 7, 7, causal=True)
over = gdpa(new, old, old, t, h, 3, 7)
rest = gdpa(new, new, new, t, t, 3, 3, window=0, add_to=over)
ten = cu_seqlens([TOKENS], "cpu")
whole = gdpa(x, x, x, ten, ten, TOKENS, TOKENS, causal=True, num_targets=targets)
assert (torch.cat([history, rest]) - whole).abs().max() < 1e-14, "the solution"

# %% [markdown]
# :::{solution} ex-own-three
# :class: dropdown
#
# The history over itself with `causal=True`; the candidates over the history without a mask; the
# candidates over themselves with `window=0`, which is the diagonal, and `add_to=` the second. In
# fp64 the rows agree with one call to rounding.
# :::
#
# ## Takeaways
#
# - Write value and slope together, and let autograd differentiate the definition. Two derivatives
#   written by one person share their mistakes.
# - Mask after the activation and after its derivative, and draw every mask once.
# - Plant an error in a copy of your kernel: your test must find it. Full tiles would not.
