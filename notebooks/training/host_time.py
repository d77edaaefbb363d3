# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# measures: true
# ---

# %% [markdown]
# # Host time
#
# A training step enqueues kernels, and the device works through them. What does a call cost the
# host, and when is the host too slow?
#
# :::{admonition} In this chapter (25 minutes)
# You will measure the host's time for a call, share offsets between layers with `Lengths`, and know
# when a CUDA graph is worth its trouble. On the H200's host a forward and a backward pass take
# {glue:text}`step_least:,.0f` to {glue:text}`step_most:,.0f` µs, the replay of a CUDA graph of both
# at most {glue:text}`graph_most:.1f` µs.
# :::

# %% tags=["hide-input"]
import pandas as pd
import torch
from torch.overrides import TorchFunctionMode

import tritonemu
from _lib import drawings
from gdpa_kernels import GDPASelfAttention, Lengths, gdpa
from gdpa_lab.measuring import record
from gdpa_lab.measuring.inputs import cu_seqlens
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts
from gdpa_lab.report.chapter import Chapter
from notebooks.training import _host as hosts

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("training/host_time", mode=mode, device=device, data_dir=data_dir)


@chapter.measure
def _(session):
    names = ("gdpa-self-half-jagged-256", "gdpa-cross-full-512", "block-fill70-2000-d64")
    session.workloads |= {name: workload(name) for name in names}
    rows = [
        (launcher, *row)
        for launcher in hosts.LAUNCHERS
        for row in hosts.measure(names, device, launcher)
    ]
    session.tables["host"] = record.Table(("launcher", *hosts.COLUMNS), rows)


host = chapter.recorded("host")
host = host.replace({"call": {"gdpa": "ours", "block_attention": "ours"}})
us = host.pivot(index=["launcher", "workload"], columns=["call", "what"], values="median_us")
FORWARD, STEP_OF = (f"{call}, {hosts.NEW}" for call in (hosts.FORWARD, hosts.STEP))
default, in_c = us.loc["default"], us.loc["C"]
ours = default["ours"]
new, step, shared = ours[FORWARD], ours[STEP_OF], ours[f"{hosts.STEP}, {hosts.SHARED}"]
graph, exp = ours[f"{hosts.STEP}, {hosts.GRAPH}"], default["exp"]
begins, itself, returns = (ours[part] for part in hosts.PARTS)
in_exp = new / exp[FORWARD]
assert in_exp.max() > 120 / 6 and in_exp.min() > 10, "the caption: more than ten times"
assert (step / exp[STEP_OF] > 350 / 65).all(), "the text: missed in units of exp too"
v5_in_c = (in_c["ours", hosts.PARTS[1]] / itself).filter(like="gdpa")
assert v5_in_c.min() > 0.9, "the text: backward v5 gains nothing in C"
chapter.glue(
    step_least=step.min(), step_most=step.max(),
    step_c_least=in_c["ours", STEP_OF].min(), step_c_most=in_c["ours", STEP_OF].max(),
    around=(begins + returns).median(), graph_most=graph.max(),
    exp_least=in_exp.min(), exp_most=in_exp.max(), steps_least=(step / exp[STEP_OF]).min(),
    steps_most=(step / exp[STEP_OF]).max(),
    exp_forward=exp[FORWARD].median(), exp_step=exp[STEP_OF].median(),
    eight_new=8 * step.min() / 1e3, eight_shared=8 * shared.min() / 1e3,
)  # fmt: skip
US = {"form": ",.0f", "unit": " µs"}
chapter.predict(
    "A forward call with new offsets takes 75 to 120 µs of host time: the slowest workload.",
    new.max(), least=75, most=120, shown=False, **US,
)  # fmt: skip
chapter.predict(
    "A forward and a backward pass with new offsets take 200 to 350 µs of host time.",
    step.max(), least=200, most=350, **US,
)  # fmt: skip
chapter.predict(
    "`Lengths` saves 15 to 40 µs of a forward and a backward pass.",
    (step - shared).max(), least=15, most=40, shown=False, **US,
)  # fmt: skip
chapter.predict(
    "The replay of a CUDA graph of a forward and a backward pass takes at most 15 µs.",
    graph, most=15, form=".1f", unit=" µs",
)  # fmt: skip
ratio = (in_c["ours"][FORWARD] / new).median()
chapter.predict(
    "Launched in C, a forward call takes at most 0.75 times its usual host time: the median.",
    ratio, most=0.75, shown=False,
)  # fmt: skip
of = {"of": "backward/results", "direction": "backward"}
kernel, back = chapter.times(**of) / 1e3, chapter.times(**of, scope="op") / 1e3
more = 100 * (back / kernel - 1).stack().dropna()  # where a call was timed
chapter.predict(
    "From the call, a backward pass takes at most 5 % more than its kernels.",
    more, most=5, form=".1f", unit=" %", shown=False,
)  # fmt: skip

# %% tags=["remove-input"]
# | name: fig-host-calls
# | caption: >
# |   **A call costs the host more than ten times as much as a PyTorch kernel, and the replay of a
# |   CUDA graph next to nothing.** Host time on gdpa-cross-full-512, median of calls in a row.
# |   "Step": a forward and a backward pass.
# | alt: >
# |   Bars in microseconds. A forward call takes a few hundred, a step more than a thousand; exp
# |   takes less than a tenth of that, the replay of a CUDA graph next to nothing.
one = us.xs("gdpa-cross-full-512", level="workload")
bars = {"exp, forward": one.loc["default", ("exp", FORWARD)], "CUDA graph of a step": graph.max()}
for what, name in ((FORWARD, "forward"), (STEP_OF, "step")):
    bars |= {name: one.loc["default", ("ours", what)]}
    bars |= {f"{name}, launched in C": one.loc["C", ("ours", what)]}
bars = pd.Series(bars | {"exp, step": one.loc["default", ("exp", STEP_OF)]}).sort_values()
chart = charts.bars(bars, xlabel="µs", highlight=["forward", "step"])
chapter.figure(chart, measured=chapter.holders("host"), data=host)

# %% [markdown]
# ## When the host is the limit

# %% tags=["remove-input"]
# | name: fig-host-queue
# | caption: >
# |   **With short kernels the device waits for the host; with long ones the host's time is free.**
# |   Five calls on the host (row 0) and their kernels on the device (row 1), modelled with the host
# |   time of a forward call above.
# | alt: >
# |   Two panels of two lanes. Left, the host's bars touch and the device's short bars have gaps
# |   between them. Right, the host is done early and the device's long bars touch.


def queue(call_us: float, kernel_us: float, count: int = 5) -> pd.DataFrame:
    """Calls on lane 0, one after another, and the kernel of each on lane 1."""
    bars, free = [], 0.0
    for n in range(count):
        start = max(free, (n + 1) * call_us)
        bars += [(0, n * call_us, call_us, f"{n + 1}"), (1, start, kernel_us, f"{n + 1}")]
        free = start + kernel_us
    return pd.DataFrame(bars, columns=["lane", "start", "time", "label"])


call_us = new["gdpa-cross-full-512"]
panels = {"kernels half as long as calls": queue(call_us, call_us / 2),
          "kernels twice as long as calls": queue(call_us, 2 * call_us)}  # fmt: skip
chart = drawings.gantt(panels, xlabel="µs")
chapter.figure(chart, modelled="a queue between host and device")

# %% [markdown]
# If kernels are shorter than calls, the queue runs dry: the step is *host-bound*, and a faster
# kernel gains nothing.
#
# ## What a call costs
#
# We time calls in a row, while the device is still busy with earlier ones; a call that waits for
# the device counts as an error. Only benchmarks repeat offsets, so each batch is the one before
# without its last token. Hosts of the same kind differ by a factor of three, and one host changes
# from minute to minute, so we also time a unit: `exp` of q, one kernel that PyTorch launches, and a
# *step of `exp`*, its forward and backward pass by autograd. On this host they take
# {glue:text}`exp_forward:.0f` and {glue:text}`exp_step:.0f` µs.

# %% tags=["remove-input"]
short = {"gdpa-self-half-jagged-256": "half jagged 256", "gdpa-cross-full-512": "cross 512",
         "block-fill70-2000-d64": "blocks of 64"}  # fmt: skip
shown = ours.T.rename(columns=short).rename_axis(columns=None)
offsets = new - ours[f"{hosts.FORWARD}, {hosts.SHARED}"]
assert offsets.max() < (begins + returns).min(), "the caption says so"
chapter.table(
    shown.round(0).reset_index(names="host time, µs"), name="tab-host-calls",
    caption="**New offsets cost a forward call less than a backward pass loses on the way to "
    "autograd's thread and back.** Host time in µs, by workload.", measured=chapter.holders("host"),
)  # fmt: skip

# %% [markdown]
# A forward call takes as long as {glue:text}`exp_least:.0f` to {glue:text}`exp_most:.0f` `exp`, a
# step {glue:text}`steps_least:.0f` to {glue:text}`steps_most:.0f` steps of `exp`. The step pays for
# autograd, which runs the backward pass of tensors on a GPU in a thread of its own. Before the
# operator's backward begins there, and after its end, {glue:text}`around:.0f` µs pass (median of
# the workloads): two threads wake each other, and each takes Python's lock. A sum of parts that we
# had timed on another host has no term for that, and misses in units of `exp` too ({doc}`lab notes
# <../../notes/host>`):

# %% tags=["remove-input"]
chapter.predictions()

# %% [markdown]
# *Launching in C.* With `TRITON_ENABLE_C_CACHE=1` and `TRITON_USE_C_DISPATCHER=1`, Triton launches
# in C where a kernel allows it. A step then takes {glue:text}`step_c_least:,.0f` to
# {glue:text}`step_c_most:,.0f` µs. (Backward v5 gains nothing: it has 77 arguments, and the C
# dispatcher takes 62.) Both are off by default, because the C cache compares the globals of a
# kernel after it has launched it.
#
# ## `Lengths`: what many layers share
#
# Offsets live on the GPU, and reading them on the host waits for everything enqueued before. Unless
# told not to, `gdpa` reads them in each call, to check them. `Lengths(cu_seqlens)` copies the
# offsets, checks them once, and keeps the lists of work that kernels make of them:
#
# ```python
# lengths = Lengths(cu_seqlens)  # reads the offsets, once
# for layer in layers:
#     x, _ = layer((x, lengths))
# ```


# %% tags=["remove-cell"]
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
counts = {}
with Reads() as reads, tritonemu.enabled():
    for what, (offsets, options) in ways.items():
        reads_so_far = reads.count
        for _ in range(4):
            gdpa(*few, *offsets, impl="v1_tiled", **options)
        counts[what] = reads.count - reads_so_far
assert counts["offsets"] > 0 == counts["validate=False"] == counts["Lengths"], "the text says so"

# %% [markdown]
# ## CUDA graphs
#
# A CUDA graph records the launches of a step once and replays them without Python. Whatever the
# host decided during capture stays decided:
#
# | what is needed | why |
# |:--|:--|
# | longest sequences as numbers, and `validate=False` | to read them is to wait |
# | fixed rows, batch, longest sequence | they are recorded; *lengths* may change between replays |
# | offsets written in place, not `Lengths`, a copy | the recorded kernels read that address |
# | an ordinary call or two before | it compiles the kernels, and checks what a replay cannot |

# %% tags=["hide-input"]
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
# :::{exercise} Draw the two timelines
# :label: ex-host-timeline
#
# A model has four layers. In each, the host needs 300 µs for the forward pass, and for the backward
# pass 100 µs to wake autograd's thread (once a step), then 350 µs. Kernels of a layer take 200 µs
# in the forward and 500 µs in the backward pass. (a) Draw the host and the device on one axis for
# one step that starts with both idle. When does the device wait, and when does the step end? (b)
# Repeat with sequences twice as long, whose kernels take 800 and 2,000 µs. (c) Up to which length
# of kernels does the host matter, and which of `Lengths`, C launches and a CUDA graph is worth its
# trouble in (a) and in (b)? *(paper, thirty minutes, as in an exam)*
# :::
#
# :::{solution} ex-host-timeline
# :class: dropdown
#
# (a) The host enqueues forward kernels at 300, 600, 900 and 1,200 µs; each runs 200 µs, so the
# device waits 100 µs before each next one. The backward kernels are enqueued at 1,650, 2,000, 2,350
# and 2,700. The device is idle from 1,400 to 1,650, and then each kernel takes 500: they end at
# 2,150, 2,650, 3,150 and 3,650 µs, of which 2,800 are kernels. (b) The forward kernels run from 300
# to 3,500 without a gap, the backward kernels are all enqueued by 2,700, and the step ends at
# 11,500: 300 µs more than its kernels. (c) The forward pass is host-bound while a layer's kernels
# take less than 300 µs, the backward pass below 350. In (a) a graph saves nearly all of the 850 µs,
# `Lengths` and C launches a part; in (b) none is worth anything, since 300 µs remain at the start
# of the first step only.
# :::
#
# ## Takeaways
#
# - Measure host time on calls in a row, with fresh inputs, in units of a PyTorch call. Microseconds
#   belong to one host.
# - Remember nothing that somebody else can change. Let the caller hold what is shared.
# - Where the host is the limit, use CUDA graphs.
