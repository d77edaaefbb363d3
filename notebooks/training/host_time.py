# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # What does a call cost the host?
#
# A training step enqueues kernels, and the device works through them. When is the host too slow?
#
# :::{admonition} In this chapter (15 minutes)
# You will measure the host's time for a call without fooling yourself, share offsets between layers
# with `Lengths`, and know when a CUDA graph is worth its trouble. On the H200's host a forward call
# with new offsets takes {glue:text}`new_least:.0f` to {glue:text}`new_most:.0f` µs and a step
# {glue:text}`step_least:,.0f` to {glue:text}`step_most:,.0f`; the replay of a CUDA graph takes at
# most {glue:text}`graph_most:.1f` µs.
# :::

# %%
import pandas as pd
import torch
from torch.overrides import TorchFunctionMode

import tritonemu
from _lib import calls
from _lib import host as hosts
from gdpa_kernels import GDPASelfAttention, Lengths, gdpa
from gdpa_lab.measuring import record
from gdpa_lab.measuring.inputs import cu_seqlens
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("training/host_time", mode=mode, device=device, data_dir=data_dir)

# %% [markdown]
# ## How it is measured
#
# As long as the host is ahead, its time costs nothing. So we time a call in a row of calls, with
# the device still busy with earlier ones; a call that waits for the device is an error here. Only
# benchmarks repeat offsets, so each batch is the one before without its last token:

# %% tags=["remove-input"]
chapter.code(hosts.batches)


# %% tags=["hide-input"]
@chapter.measure
def _(session):
    names = ("gdpa-self-half-jagged-256", "gdpa-cross-full-512", "block-fill70-2000-d64")
    session.workloads |= {name: workload(name) for name in names}
    found = [
        (launcher, *row)
        for launcher in hosts.LAUNCHERS
        for row in hosts.measure(names, device, launcher)
    ]
    session.tables["host"] = record.Table(("launcher", *hosts.COLUMNS), found)


# %% [markdown]
# Each workload is also measured with `exp` of q in place of the operator, one kernel launched by
# PyTorch, and with a loop of plain Python. Hosts of the same kind differ by a factor of three, and
# one host changes from minute to minute, so compare with `exp`. `TRITON_ENABLE_C_CACHE=1
# TRITON_USE_C_DISPATCHER=1` makes Triton launch in C where a kernel allows it; both launchers are
# measured.
#
# ## What was found

# %%
host = chapter.recorded("host")
host = host.replace({"call": {"gdpa": "ours", "block_attention": "ours"}})
us = host.pivot(index=["launcher", "workload"], columns=["call", "what"], values="median_us")
FORWARD, STEP_OF = (f"{call}, {hosts.NEW}" for call in (hosts.FORWARD, hosts.STEP))
default, in_c = us.loc["default"], us.loc["C"]
ours = default["ours"]

# %% tags=["remove-cell"]
new, step, shared = ours[FORWARD], ours[STEP_OF], ours[f"{hosts.STEP}, {hosts.SHARED}"]
graph, exp = ours[f"{hosts.STEP}, {hosts.GRAPH}"], default["exp"]
begins, itself, returns = (ours[part] for part in hosts.PARTS)
chapter.glue(
    new_least=new.min(), new_most=new.max(), step_least=step.min(), step_most=step.max(),
    in_c_least=in_c["ours", FORWARD].min(), in_c_most=in_c["ours", FORWARD].max(),
    step_c_least=in_c["ours", STEP_OF].min(), step_c_most=in_c["ours", STEP_OF].max(),
    around=(begins + returns).median(), itself=itself.median(), graph_most=graph.max(),
    in_exp=(new / exp[FORWARD]).max(), in_steps=(step / exp[STEP_OF]).max(),
    eight_new=8 * step.min() / 1e3, eight_shared=8 * shared.min() / 1e3,
)  # fmt: skip

# %% tags=["remove-input"]
# | name: fig-host-calls
# | caption: >
# |   Host time of a call on gdpa-cross-full-512: median of calls in a row, µs.
# | alt: >
# |   Bars in microseconds. A forward call takes a few hundred, a step nearly a thousand; exp takes
# |   about a tenth of that, the replay of a CUDA graph next to nothing.
one = us.xs("gdpa-cross-full-512", level="workload")
bars = {"exp, forward": one.loc["default", ("exp", FORWARD)], "CUDA graph of a step": graph.max()}
for what, name in ((FORWARD, "forward"), (STEP_OF, "step")):
    bars |= {name: one.loc["default", ("ours", what)]}
    bars |= {f"{name}, launched in C": one.loc["C", ("ours", what)]}
bars = pd.Series(bars | {"exp, step": one.loc["default", ("exp", STEP_OF)]}).sort_values()
chart = charts.bars(bars, xlabel="µs", highlight=["forward", "step"])
chapter.figure(chart, measured=[chapter.record().id], data=host)

# %% tags=["remove-input"]
chapter.table(ours.T.round(0).reset_index(names="µs"), measured=[chapter.record().id])

# %% [markdown]
# The predictions of 2026-11-22 came from a script that timed the parts on a host where `exp` took 6
# µs and its gradient 59: an empty operator 7 µs, an `autograd.Function` 10, the launch of the list
# of work 17 and of the main kernel 32, a {term}`descriptor` 5.

# %% tags=["remove-input"]
US = {"form": ",.0f", "unit": " µs"}
chapter.predict("Forward with new offsets, slowest workload.", new.max(), least=75, most=120, **US)
chapter.predict("A step with new offsets.", step.max(), least=200, most=350, **US)
chapter.predict("What `Lengths` saves of a step.", (step - shared).max(), least=15, most=40, **US)
chapter.predict("The replay of a step's CUDA graph.", graph, most=15, form=".1f", unit=" µs")
ratio = (in_c["ours"][FORWARD] / new).median()
chapter.predict("Forward launched in C, share of its usual time (median).", ratio, most=0.75)

# %% [markdown]
# ## The surprise: the way to another thread and back
#
# Forward is {glue:text}`in_exp:.0f` times an `exp`, which is what its parts add up to. A step is
# {glue:text}`in_steps:.0f` steps of `exp`, where 3 to 5 were expected. Autograd runs the backward
# pass of tensors on a GPU in a thread of its own. Before the operator's backward begins there, and
# after its end, {glue:text}`around:.0f` µs pass (median of the workloads): two threads wake each
# other, and each takes Python's lock. Backward itself takes {glue:text}`itself:.0f` µs, with seven
# descriptors where forward has four.
#
# Launches in C bring forward to {glue:text}`in_c_least:.0f` to {glue:text}`in_c_most:.0f` µs and a
# step to {glue:text}`step_c_least:,.0f` to {glue:text}`step_c_most:,.0f`. `v5_short_kv_backward`
# gains nothing: the C dispatcher takes at most 62 arguments, and seven descriptors are 77. Both are
# off by default, since the C cache compares the globals of a kernel after it has launched it.
#
# ## `Lengths`: what many layers share
#
# Offsets live on the GPU. Reading them on the host waits for everything enqueued before, and the
# queue runs dry. Unless told not to, `gdpa` reads them in each call, to check them. It could
# remember which tensor it has checked, but a collective, a CUDA graph or another library can write
# to a tensor without leaving a trace. So it does not. `Lengths(cu_seqlens)` copies the offsets,
# checks them once, and keeps the lists of work that kernels make of them:


# %%
class Reads(TorchFunctionMode):
    """Counts how often the host asks for the numbers of a tensor."""

    count = 0

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        self.count += function is torch.Tensor.tolist
        return function(*arguments, **(keywords or {}))


LENGTHS = [40, 0, 7, 90, 23]
ENDS = cu_seqlens(LENGTHS, "cpu")
few = [torch.randn(sum(LENGTHS), 2, 16).bfloat16() for _ in range(3)]
lengths = Lengths(ENDS)
ways = {"offsets": ((ENDS, ENDS, 90, 90), {}), "validate=False": ((ENDS, ENDS, 90, 90),
        {"validate": False}), "Lengths": ((lengths, lengths), {})}  # fmt: skip
with Reads() as reads, tritonemu.enabled():
    for what, (offsets, options) in ways.items():
        before = reads.count
        for _ in range(4):
            gdpa(*few, *offsets, impl="v1_tiled", **options)
        print(f"{what}: {reads.count - before} reads in four calls")

# %% [markdown]
# Layers take `Lengths` in place of offsets, and the longest sequence from it.
#
# ## CUDA graphs
#
# A CUDA graph replays launches without Python. Whatever the host decided during capture stays
# decided:
#
# | what is needed | why |
# |:--|:--|
# | longest sequences as numbers, and `validate=False` | to read them is to wait |
# | fixed rows, batch, longest sequence | they are recorded; *lengths* may change between replays |
# | offsets that are written in place, no `Lengths` | the recorded kernels read that address |
# | offsets that are right | a replay cannot check them: an ordinary call before can |
# | an ordinary call or two before | kernels are compiled and loaded at the first of their kind |
#
# The next cell needs a GPU. It fails if a step waits for the device, or if a replay with other
# lengths differs from an ordinary step.

# %%
if torch.device(device).type == "cuda":
    layer = GDPASelfAttention(
        256, 2, max_seqlen=90, device=device, dtype=torch.bfloat16, validate=False,
        backward_impl="v1_tiled_backward",  # deterministic
    )  # fmt: skip
    rows = torch.randn(sum(LENGTHS), 256, device=device).bfloat16().requires_grad_()
    ends, leaves = ENDS.to(device), [rows, *layer.parameters()]

    def whole() -> tuple[torch.Tensor, ...]:
        y, _ = layer((rows, ends))
        return y, *torch.autograd.grad(y.square().sum(), leaves)

    whole()
    torch.cuda.set_sync_debug_mode("error")
    whole()
    torch.cuda.set_sync_debug_mode("default")
    recorded = []
    replay = hosts.graph_of(lambda: recorded.append(whole())).replay
    ends.copy_(cu_seqlens(LENGTHS[::-1], device))
    replay()
    for one, other in zip(recorded[-1], whole(), strict=True):
        torch.testing.assert_close(one, other)
    print("a replay with other lengths is an ordinary step")

# %% [markdown]
# ## Which backward, and a whole step
#
# `backward_impl="auto"` takes the first rung that can compute the call, in the order measured at
# the nearest shape on this kind of device; it does not look at lengths. Name a rung to compare, or
# for bit-identical results ({doc}`../backward/v2_fused_backward`): a named rung never hands the
# work to another one.
#
# {doc}`../backward/results` also times autograd's backward of the operator from the call, on an
# idle device, to completion.

# %% tags=["remove-input"]
of = {"of": "backward/results", "direction": "backward"}
kernel, back = chapter.times(**of) / 1e3, chapter.times(**of, scope="op") / 1e3
more = 100 * (back / kernel - 1).stack().dropna()  # where a call was timed
slow, impl = more.idxmax()
text = "From the call, backward takes so much more than its kernels."
chapter.predict(text, more, most=5, form=".1f", unit=" %")
chapter.glue(worst=f"{impl} on {slow}", worst_kernel=kernel[impl][slow],
             worst_more=(back - kernel)[impl][slow])  # fmt: skip

# %% [markdown]
# The largest difference is that of {glue:text}`worst`: its kernels take
# {glue:text}`worst_kernel:.2f` ms and the call {glue:text}`worst_more:.2f` ms more, since on an
# idle device the host's time comes first.
#
# ### Three costs of one call
#
# This book gives the cost of a forward call of v8 with new offsets in three ways:

# %% tags=["remove-input"]
costs, ids = calls.costs(chapter, new)
chapter.table(costs.reset_index(), measured=ids)

# %% [markdown]
# Only the first recurs in a training loop, and only where the host is behind.
#
# ## Exercises
#
# :::{exercise} Who waits for whom?
# :label: ex-host-ahead
#
# A model has eight attention layers. Take the host's time for a step with new offsets from the
# table, and assume that a layer's kernels take 0.3 ms forward and backward together. Is the device
# busy? What do `Lengths` change, what a CUDA graph? *(paper, five minutes)*
# :::
#
# :::{solution} ex-host-ahead
# :class: dropdown
#
# Eight layers are 2.4 ms of kernels and {glue:text}`eight_new:.1f` ms of host at the least: the
# device waits most of the time. With `Lengths` it is {glue:text}`eight_shared:.1f` ms, better and
# still not enough. One graph of the whole step takes microseconds, and the device is busy.
# :::
#
# :::{exercise} One user fewer
# :label: ex-host-fewer
#
# A graph was captured for 64 users and 8,000 rows. The next batch has 63 users and 7,950 rows. How
# can it be replayed? *(paper, five minutes)*
# :::
#
# :::{solution} ex-host-fewer
# :class: dropdown
#
# Batch and rows are recorded, lengths are not. The 64th user becomes the owner of the 50 rows that
# are left over: the last offset stays 8,000, every row has an owner, and the loss leaves that user
# out. Its length must not exceed the longest sequence of the capture.
# :::
#
# :::{exercise} `Lengths` in a graph
# :label: ex-host-lengths
#
# Why must a captured step not use `Lengths` if lengths change? *(paper, five minutes)*
# :::
#
# :::{solution} ex-host-lengths
# :class: dropdown
#
# `Lengths` holds a copy of the offsets: new ones written into the original tensor do not reach it,
# and the recorded kernels read the old list. With plain offsets the list is made in each replay.
# :::
#
# ## Takeaways
#
# - Measure host time on calls in a row, with fresh inputs, in units of a PyTorch call. An absolute
#   time is a property of that host.
# - Remember nothing that somebody else can change. Let the caller hold what is shared.
# - Where the host is the limit, PyTorch's own CUDA graphs are the way out.
