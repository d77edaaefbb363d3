# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Layers
#
# What do the sums of GDPA give a model that the averages of softmax do not? And how do you know
# that a layer is right?
#
# :::{admonition} In this chapter (20 minutes)
# You will train a small model of user histories, test layers against their references through whole
# training runs, and see what padding and masks do to gradients. The model comes within
# {glue:text}`excess_sums:.3f` of the best possible loss; with averages instead of sums it stays
# {glue:text}`excess_averages:.3f` above it.
# :::

# %% tags=["hide-input"]
from collections.abc import Callable

import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn

import tritonemu
from gdpa_kernels import PFFN, PMA, GDPASelfAttention
from gdpa_kernels.gdpa import reference
from gdpa_lab.measuring.inputs import cu_seqlens
from gdpa_lab.report import charts
from gdpa_lab.report.chapter import Chapter
from notebooks.training import _histories

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("training/layers", mode=mode, device=device, data_dir=data_dir)
LENGTHS, SUMMARY = [40, 0, 7, 90, 23], 8
ENDS = cu_seqlens(LENGTHS, "cpu")
GELU = reference.ACTIVATIONS["gelu_tanh"].function


def fit(model, loss_of: Callable, steps: int, rate: float, end: float = 1.0) -> pd.Series:
    """Losses of training a model on `loss_of(step)`; the rate falls to `end` times itself."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, end, steps)
    losses = []
    for step in range(steps):
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return pd.Series(losses)


WIDTH, SEEDS, DIVISOR = 16, 4, 5


class Clicks(nn.Module):
    """The logit of a click from (events, offsets, shown)."""

    def __init__(self, average: bool = False):
        super().__init__()
        self.average = average
        self.event, self.shown = (nn.Embedding(_histories.KINDS, WIDTH) for _ in range(2))
        common = {"output_scale": 1 / DIVISOR, "max_seqlen": _histories.LONGEST}
        self.mix = GDPASelfAttention(WIDTH, 2, **common)
        self.pool = PMA(WIDTH, 2, SEEDS, **common)
        self.personal = PFFN(WIDTH, 2, WIDTH, 8, max_seqlen=SEEDS)
        self.logit = nn.Linear(SEEDS * WIDTH, 1)

    def by_length(self, layer, y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """y, for averages as if output_scale had been 1 / length."""
        factor = (DIVISOR / lengths.clamp(min=1)).view(-1, *[1] * (y.dim() - 1))
        return factor * (y - layer.out.bias) + layer.out.bias if self.average else y

    def forward(self, events, ends, shown):
        lengths, x = ends.diff(), self.event(events)
        mixed = self.mix((x, ends))[0]
        x = x + self.by_length(self.mix, mixed, torch.repeat_interleave(lengths, lengths))
        pooled = self.by_length(self.pool, self.pool((x, ends)), lengths).flatten(0, 1)
        rows = torch.arange(len(shown) + 1, dtype=torch.int32) * SEEDS
        pooled = pooled + self.personal((pooled, rows), self.shown(shown))[0]
        return self.logit(pooled.view(len(shown), -1))[:, 0]


def train(average: bool) -> tuple[Clicks, pd.Series]:
    torch.manual_seed(0)
    model = Clicks(average)

    def loss_of(step: int) -> torch.Tensor:
        *inputs, _, _, clicked = _histories.users(64, 1000 + step)
        return F.binary_cross_entropy_with_logits(model(*inputs), clicked)

    return model, fit(model, loss_of, 120, 8e-3, end=0.05)


trained = {"sums": train(False), "averages": train(True)}
best = _histories.best_losses()
*test, same, logit, _ = _histories.users(4000, 1)
true, empty, many = torch.sigmoid(logit), test[1].diff() == 0, same >= 5
least = F.binary_cross_entropy(true, true)
excess = {}
with torch.no_grad():
    for name, (model, _) in trained.items():
        said = torch.sigmoid(model(*test))
        excess[name] = (F.binary_cross_entropy(said, true) - least).item()
        chapter.glue(**{f"excess_{name}": excess[name], f"many_{name}": said[many].mean().item(),
                        f"empty_{name}": said[empty].mean().item()})  # fmt: skip
assert excess["sums"] < best["shares"] - best["counts"] < excess["averages"], "the caption"
chapter.glue(best=best["counts"], neither=best["no history"],
             empty_true=true[empty][0].item(), many_true=true[many].mean().item())  # fmt: skip

# %% tags=["remove-input"]
# | name: fig-train-clicks
# | caption: >
# |   **The model of sums approaches the best possible loss; the model of averages stays above what
# |   even shares allow.** Loss above that of the true probabilities. Dashed: the least that shares
# |   allow.
# | alt: >
# |   Two curves fall. That of the sums ends near zero; that of the averages stays above the line.
seen = [_histories.users(64, 1000 + step) for step in range(120)]
true_losses = [F.binary_cross_entropy_with_logits(x.logit, x.clicked).item() for x in seen]
curve = pd.DataFrame({name: losses - true_losses for name, (_, losses) in trained.items()})
smooth = curve.rolling(20).mean().dropna()
chart = charts.lines(smooth, xlabel="batch of 64 users", ylabel="excess loss",
                      highlight=["sums", "averages"],
                      levels={"shares": best["shares"] - best["counts"]})  # fmt: skip
chapter.figure(chart, computed="trained on a CPU in fp32", data=curve)

# %% [markdown]
# ## A model of user histories
#
# A user has a history of events and is shown something. Will there be a click? The truth is made
# up, so the best answer is known. Events are of three kinds, and so is what is shown. With $n$
# events of the shown kind in the history, the click probability is $\sigma(0.8\, n - 1.5)$. One
# user in five has no history; the other lengths are uniform from 1 to 15.
#
# The model has one layer of each kind. Events attend to each other (`mix`), {term}`PMA` pools them
# into four rows (`pool`), {term}`PFFN` sends these through a perceptron made from what is shown
# (`personal`), and a linear layer makes a logit:

# %% tags=["remove-input"]
chapter.code(Clicks.forward)

# %% [markdown]
# `by_length` makes the two models of {numref}`fig-train-clicks`. For *averages* it divides the sums
# of the first two layers by the length of each history; for *sums* it leaves them divided by 5, a
# constant.
#
# The best loss on 4,000 new users is about {glue:text}`best:.2f`; without the history it would be
# {glue:text}`neither:.2f`. For users without a history the model of sums predicts a click with
# probability {glue:text}`empty_sums:.2f`, where the truth is {glue:text}`empty_true:.2f`. PMA gives
# them zeros, without a special case.
#
# ## An average cannot count
#
# The rows of softmax attention are averages. In an average two events of four look like five of
# ten: it knows the *shares* of the three kinds and not how many there were. Take users with five
# events or more of the shown kind, who click with probability {glue:text}`many_true:.2f`. The model
# of averages gives them {glue:text}`many_averages:.2f`, the model of sums
# {glue:text}`many_sums:.2f`. HSTU gave up softmax for this reason too {cite}`zhai2024hstu`.
#
# ## Three layers
#
# $g$ is `gdpa`, x tokens, e learned seeds, s a summary of each sample; $W_o$ projects the result:
#
# | | `GDPASelfAttention` | `PMA` | `PFFN` |
# |:--|:--|:--|:--|
# | before $W_o$ | $g(W_q x, W_k x, W_v x)$ | $g(e, W_k x, W_v x)$ | $g(W_q x, W_k s, W_v s)$ |
# | queries | a sample's tokens | `num_seeds`, the same for all | a sample's tokens |
# | keys | its tokens | its tokens | `num_keys`, made from s |
# | gives | `[tokens, embed_dim]` | `[batch, num_seeds, embed_dim]` | `[tokens, embed_dim]` |
# | dQ | per token | summed over the batch | per token |
# | without tokens | no rows | zeros, then the bias of $W_o$ | no rows |
#
# Layers take pairs `(values, offsets)` or nested tensors of layout `torch.jagged`. Residuals and
# norms are the caller's.
#
# A falling loss does not prove a layer right; matching another implementation step by step does.
# Each layer learns to imitate a teacher of the same form with other weights, three times: as plain
# PyTorch (one sequence at a time, without padding or our operators), as the layer in fp32 from the
# same start, and as the layer in bf16 on emulated kernels.


# %% tags=["remove-cell"]
def attend(layer, *qkv: torch.Tensor) -> torch.Tensor:
    """One sequence, `[rows or keys, heads * head_dim]` each -> `[rows, embed_dim]`."""
    q, k, v = (x.unflatten(1, (-1, layer.head_dim)).transpose(0, 1) for x in qkv)
    p = F.gelu(layer.head_dim**-0.5 * q @ k.mT, approximate="tanh")
    return layer.out((layer.options.output_scale * p @ v).transpose(0, 1).flatten(1))


def plain(layer, rows: torch.Tensor, summary: torch.Tensor) -> torch.Tensor:
    """The layer's output, from PyTorch's parts."""
    outputs = []
    for tokens, vector in zip(rows.split(LENGTHS), summary, strict=True):
        if isinstance(layer, GDPASelfAttention):
            outputs.append(attend(layer, *layer.qkv(tokens).chunk(3, 1)))
        elif isinstance(layer, PMA):
            outputs.append(attend(layer, layer.seeds, *layer.kv(tokens).chunk(2, 1)))
        else:
            hidden = layer.kv(vector).view(layer.num_keys, -1)
            outputs.append(attend(layer, layer.q(tokens), *hidden.chunk(2, 1)))
    return torch.cat(outputs)


def by_layer(layer, rows: torch.Tensor, summary: torch.Tensor) -> torch.Tensor:
    if isinstance(layer, PMA):
        return layer((rows, ENDS)).flatten(0, 1)
    return layer((rows, ENDS), *([summary] if isinstance(layer, PFFN) else []))[0]


MADE = {
    "GDPASelfAttention": lambda **o: GDPASelfAttention(32, 2, output_scale=1 / 16, **o),
    "PMA": lambda **o: PMA(32, 2, 4, output_scale=1 / 16, **o),
    "PFFN": lambda **o: PFFN(32, 2, SUMMARY, 12, output_scale=1 / 4, **o),
}


def learned(kind: str, call: Callable, steps: int, **options) -> pd.Series:
    torch.manual_seed(1)
    student, teacher = MADE[kind](**options), MADE[kind]()
    inputs = torch.randn(sum(LENGTHS), 32), torch.randn(len(LENGTHS), SUMMARY)
    target = plain(teacher, *inputs).detach()

    def loss_of(_) -> torch.Tensor:
        return F.mse_loss(call(student, *inputs).float(), target) / target.var()

    return fit(student, loss_of, steps, 0.01)


kernels = {"impl": "v1_tiled", "backward_impl": "v1_tiled_backward"}
in_bf16 = torch.autocast("cpu", dtype=torch.bfloat16)(by_layer)
apart = {}
for kind in MADE:
    right = learned(kind, plain, 40)
    assert right.iloc[-1] < 0.7 * right.iloc[0], "losses must fall"
    apart[f"{kind}, fp32"] = (learned(kind, by_layer, 40) / right - 1).abs()
    with tritonemu.enabled():
        apart[f"{kind}, bf16"] = (learned(kind, in_bf16, 12, **kernels) / right - 1).abs()
apart = pd.DataFrame(apart)
chapter.predict(
    "Over 40 steps in fp32, the losses of a layer and of plain PyTorch differ by less than 0.01 %, "
    "that is 100 millionths.",
    1e6 * apart[[f"{kind}, fp32" for kind in MADE]].max().max(), most=100, form=".1f",
)  # fmt: skip
chapter.predict(
    "Over 12 steps in bf16 on emulated kernels, the losses differ by less than 3 %.",
    100 * apart[[f"{kind}, bf16" for kind in MADE]].max().max(), most=3, form=".1f", unit=" %",
    shown=False,
)  # fmt: skip

# %% tags=["remove-input"]
# | name: fig-train-layers
# | caption: >
# |   **Layers follow plain PyTorch step by step, to rounding in fp32 and to a few thousandths in
# |   bf16.** Relative difference of the losses; below 1e-8 it is drawn at 1e-8.
# | alt: >
# |   Curves on a logarithmic axis. Those in bf16 stay between a ten-thousandth and a few
# |   thousandths; those in fp32 are grey and lie several powers of ten below.
bf16, fp32 = ([f"{kind}, {dtype}" for kind in MADE] for dtype in ("bf16", "fp32"))
assert apart[fp32].max(axis=None) < 1e-6 < 1e-3 < apart[bf16].max(axis=None) < 5e-3, "the caption"
chart = charts.lines(apart.clip(lower=1e-8), xlabel="step", ylabel="relative difference",
                      highlight=bf16, log="y", ylim=(1e-8, 1e-2))  # fmt: skip
chapter.figure(chart, emulated="bf16", computed="fp32 by PyTorch on a CPU", data=apart)

# %% tags=["remove-input"]
chapter.predictions()

# %% [markdown]
# ## What padding does
#
# We give the trained model's pooling layer four users with 3, 0, 15 and 6 events, padded, with four
# ways to treat the padding, and then the jagged layer. The loss leaves out the user without a
# history.

# %% tags=["remove-cell"]
WAYS = {
    "no mask": lambda s, there: GELU(s),
    "score = -inf": lambda s, there: GELU(s.masked_fill(~there, -torch.inf)),
    "softmax, score = -inf": lambda s, there: s.masked_fill(~there, -torch.inf).softmax(-1),
    "P = 0": lambda s, there: GELU(s).masked_fill(~there, 0),
}
pool, HISTORY = trained["sums"][0].pool, [3, 0, 15, 6]
there = torch.arange(15) < torch.tensor(HISTORY)[:, None]
packed = torch.randn(sum(HISTORY), WIDTH)
padded = torch.zeros(4, 15, WIDTH).masked_scatter(there[..., None], packed)


def padded_pool(x: torch.Tensor, there: torch.Tensor, way: str) -> torch.Tensor:
    """PMA of padded rows x `[users, longest, width]`, of which `there` `[users, longest]` exist."""
    k, v = pool.kv(x).unflatten(2, (-1, pool.head_dim)).transpose(1, 2).chunk(2, 1)
    q = pool.seeds.unflatten(1, (pool.num_heads, -1)).transpose(0, 1)
    p = WAYS[way](pool.head_dim**-0.5 * q @ k.mT, there[:, None, None])
    return pool.out((pool.options.output_scale * p @ v).transpose(1, 2).flatten(2))


def judged(y: torch.Tensor, alone: torch.Tensor) -> list[str]:
    """Results of all users, of the first alone."""
    depends = (y[:1] - alone).abs().max().item() > 1e-5 or y[0].isnan().any()
    loss = y[torch.tensor(HISTORY) > 0].square().sum()
    results = (
        y[1],
        torch.cat([x.flatten() for x in torch.autograd.grad(loss, [*pool.parameters()])]),
    )
    return [
        "yes" if depends else "no",
        *("finite" if x.isfinite().all() else "NaN" for x in results),
    ]


one = packed[None, :3], there[:1, :3]
naive = {way: judged(padded_pool(padded, there, way), padded_pool(*one, way)) for way in WAYS}
whole, alone = (pool((packed[: sum(n)], cu_seqlens(n, "cpu"))) for n in (HISTORY, [3]))
naive["gdpa, jagged"] = judged(whole, alone)

# %% tags=["remove-input"]
columns = ["depends on the batch", "user without history", "gradients"]
table = pd.DataFrame(naive, index=columns).T
chapter.table(
    table.reset_index(names="pooling with"), name="tab-train-padding",
    caption="**Of four ways to treat padding, only a mask on P is right.** Pooling of padded rows: "
    "whether a user's result depends on the batch, what the user without a history gets, and what "
    "the gradients of the weights are.", computed="fp32 on a CPU",
)  # fmt: skip
assert naive["P = 0"] == naive["gdpa, jagged"] == ["no", "finite", "finite"], "the caption"
assert all("NaN" in naive[way] for way in ("score = -inf", "softmax, score = -inf"))
assert naive["no mask"][0] == "yes", "the caption"

# %% [markdown]
# - *No mask*: a projection has a bias, so padded keys and values are not zeros, and a user's result
#   depends on the longest history in the batch.
# - *Score = -inf* is the habit from softmax. GELU of -inf is not a number.
# - *Softmax*: a user without a history is 0/0. The loss leaves that user out and is finite, and
#   still the gradients of the weights are NaN, because on the way back zero is multiplied by NaN.
# - *P = 0* is right as long as padding holds numbers, and {ref}`lets a NaN pass <rule-masks>`. Our
#   kernels load zeros beyond the end of a sequence.
#
# ## Choosing the scales
#
# **The output.** A row is a sum over $n$ keys and grows with $n$ ({doc}`../operator/activations`).
# Divide by a constant, the longest sequence of the *model*, as Kunlun and HSTU do
# ({doc}`../operator/gdpa`). Do not divide by each sequence's own length, unless counts must not
# matter, nor by the longest of the *batch*, which couples its users again.
#
# **The scores.** A scale of $1/\sqrt d$ gives scores of about 1, where GELU bends. With
# `scale=1/2048` GELU is $x/2$, which makes linear attention at the cost of attention. Large scores
# learn little: GELU's slope is within 0.01 of zero for {glue:text}`dead_8:.0f` % of scores of
# standard deviation 8. `qk_norm=True` bounds them, with a learned weight.
#
# ## Exercises
#
# :::{exercise} Averages after all
# :label: ex-train-average
#
# Divide the output of each sequence by its own length in two ways without changing the operator,
# one after it and one before it. Which one changes dK? *(paper, then code; ten minutes)*
# :::

# %% tags=["remove-cell"]
normal = torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
slope = reference.ACTIVATIONS["gelu_tanh"].derivative
dead = {f"dead_{std}": 100 * (slope(std * normal).abs() < 0.01).double().mean() for std in (1, 8)}
chapter.glue(**{name: share.item() for name, share in dead.items()})

# %% [markdown]
# :::{solution} ex-train-average
# :class: dropdown
#
# Divide the rows of the output by the length of their sequence; or the rows of v, since the output
# is linear in v. Both give the same output and gradients. Do not divide the scores: a factor inside
# the activation makes another function.
# :::
#
# :::{exercise} Scores in fp16
# :label: ex-train-fp16
#
# fp16 ends at 65,504, and P is rounded to it. From which score on is P infinite with GELU, from
# which with squared ReLU? *(paper, five minutes)*
# :::
#
# :::{solution} ex-train-fp16
# :class: dropdown
#
# GELU of a large score is the score: from 65,520 on, which rounds up to infinity. Squared ReLU:
# from its root on, just below 256.
# :::
#
# ## Takeaways
#
# - Sums count and averages do not. Divide by a constant of the model, not by a length of the batch.
# - A mask on scores is no mask.
