# ---
# jupyter:
#   kernelspec: {name: python3, display_name: Python 3}
# measures: true
# ---

# %% [markdown]
# # What does training ask of an operator?
#
# A kernel computes a function or its gradients. A model wants more: to be differentiated, compiled,
# cast, captured, fed with users who have no history, and stopped when it is called wrongly.
#
# :::{admonition} In this chapter
# - `gdpa` keeps its arguments for the gradients and nothing else. The same function in padded
#   PyTorch keeps {glue:text}`train_eager_times:.0f` times as many bytes in a small example.
# - It is an operator of PyTorch: one node each way in a compiled graph, only the gradients that are
#   asked for, and an error where it has no answer.
# - Three layers on top of it follow their references in plain PyTorch through
#   {glue:text}`train_steps:.0f` steps of training: losses differ by at most
#   {glue:text}`train_fp32_percent:.5f` %.
# - A model of user histories, one in five of them empty, comes within
#   {glue:text}`train_excess_sum:.3f` of the best loss that is possible. The same model with
#   averages instead of sums stays {glue:text}`train_excess_mean:.3f` above it.
# - A whole step on `gdpa-self-full-1024` takes {glue:text}`train_step_ms:.1f` ms on an H200 and
#   needs {glue:text}`train_step_gib:.2f` GiB beside its inputs (measured).
# :::

# %% tags=["remove-cell"]
import logging
import math
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from IPython.display import Markdown, display
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from gdpa_kernels import PFFN, PMA, GDPASelfAttention, Lengths, emulator, gdpa
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.gdpa import api, reference
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.measuring import baselines, record
from gdpa_kernels.measuring.inputs import cu_seqlens
from gdpa_kernels.measuring.workload import workload
from gdpa_kernels.report import figures, results
from gdpa_kernels.report.house import INK, RUNG_COLOURS

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
logging.getLogger("torch.fx").setLevel(logging.ERROR)  # a warning of torch.nested's own
STEP = baselines.STEP
BACKWARD = [rung.impl for rung in ladder.BACKWARD_RUNGS]
VERDICT = {True: "kept", False: "broken"}


def glue(name: str, value: float) -> None:
    figures.glue_number(f"train_{name}", value)


def glue_word(name: str, value: str) -> None:
    figures.glue_text(f"train_{name}", value)


def code(text: str, language: str = "text") -> Markdown:
    return Markdown(f"```{language}\n{text.rstrip()}\n```")


# %% [markdown]
# This cell measures what a call costs the host, with
# `make measure NOTEBOOKS=training/op_in_a_model`, on a GPU; what it finds is shown further below.
# It fails if a call waits for the device.

# %% tags=["hide-input"]
FORWARD, STEP_OF = "forward", "forward + backward"
NEW, SHARED, GRAPH = "new offsets", "Lengths", "CUDA graph"
HOST = ("workload", "call", "what", "median_us", "p20_us", "p80_us")
TRIED = 1100  # batches: no call sees one again


def batches(inputs) -> Iterator[dict]:
    """The batch without its last tokens, one token less each time, as leaves; the offsets are
    trusted, since to check them is to wait for the device."""
    arguments = inputs.arguments()
    rows = {name: len(arguments[name]) for name in "qkv"}
    rows |= {"cu_seqlens": rows["k"], "cu_seqlens_q": rows["q"], "cu_seqlens_k": rows["k"]}
    for n in range(1, TRIED):
        shorter = {}
        for name, x in arguments.items():
            if name in "qkv":
                shorter[name] = x[: rows[name] - n].detach().requires_grad_()
            elif name in rows and x is not None:
                shorter[name] = x.clamp(max=rows[name] - n)
        yield arguments | shorter | {"validate": False}


def step_of(function: Callable, call: dict, grad_out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = function(**call)
    leaves = [call[name] for name in "qkv"]
    return torch.autograd.grad(out, leaves, grad_out[: len(out)], allow_unused=True)


def host_calls(function: Callable, inputs) -> dict[str, Callable[[], object]]:
    """Calls of a function of an operator's arguments, by what they are given."""
    new = {what: list(batches(inputs)) for what in (FORWARD, STEP_OF)}
    first = new[FORWARD][0]
    lengths = {name: Lengths(x) for name, x in first.items() if name.startswith("cu_seqlens")}
    shared = first | lengths

    def forward(call: dict) -> torch.Tensor:
        with torch.no_grad():
            return function(**call)

    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step_of(function, first, inputs.grad_out)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        step_of(function, first, inputs.grad_out)
    return {
        f"{FORWARD}, {NEW}": lambda: forward(new[FORWARD].pop()),
        f"{FORWARD}, {SHARED}": lambda: forward(shared),
        f"{STEP_OF}, {NEW}": lambda: step_of(function, new[STEP_OF].pop(), inputs.grad_out),
        f"{STEP_OF}, {SHARED}": lambda: step_of(function, shared, inputs.grad_out),
        f"{STEP_OF}, {GRAPH}": graph.replay,
    }


if mode == "measure":
    from gdpa_kernels import block_attention
    from gdpa_kernels.measuring import timing
    from gdpa_kernels.measuring.inputs import make_inputs
    from gdpa_kernels.measuring.session import Session

    session, lines = Session("notebooks/training/op_in_a_model.py", device), []
    for name in ("gdpa-self-half-jagged-256", "gdpa-cross-full-512", "block-fill70-2000-d64"):
        session.workloads[name] = workload(name)
        inputs = make_inputs(workload(name), device=session.device)
        operator = block_attention if name.startswith("block") else gdpa
        ways = {
            (call, what): way
            for call, function in ((operator.__name__, operator), ("exp", lambda q, **_: q.exp()))
            for what, way in host_calls(function, inputs).items()
        }
        for way, times in timing.sample_calls(ways, session.device).items():
            at = [sorted(times)[int(share * len(times))] for share in (0.5, 0.2, 0.8)]
            lines.append((name, *way, *at))
            print(*lines[-1][:3], *(f"{t:.0f}" for t in at))
        del inputs, ways, way
    session.tables["host"] = record.Table(HOST, lines)
    print(session.write(data_dir))

# %% [markdown]
# ## Predictions
#
# Of 2026-11-21, before the cells below and the record of {doc}`../backward/results` existed.
# Scripts without a record had by then timed backward kernels alone, and read their memory.
#
# 1. *Training*: over {glue:text}`train_steps:.0f` steps in fp32 the losses of a layer and of its
#    reference differ by less than 0.01 %. In bf16, by emulated kernels, by less than 3 %. More
#    would mean another function and not another rounding.
# 2. *Memory*: beside q, k, v and the gradient of the output, a step needs the output and three
#    gradients in bf16, and for the rungs that add up dQ in memory one dQ in fp32. Within 3 %.
# 3. *Host*: autograd's backward of the operator takes at most 5 % more than its kernels alone, on
#    the published batches.
# 4. *Forward*: it takes 18 to 28 % of the step on `gdpa-self-full-1024`. It has 2 of the 7
#    necessary products, and its kernels reach a higher rate than those of the backward pass.
#
# ## What autograd keeps
#
# The gradients are functions of q, k, v, the offsets and the incoming gradient
# ({doc}`../backward/by_hand`). PyTorch reports what is packed away for the backward pass through
# `saved_tensors_hooks`. The function below lists it, tensors that were given and others apart.

# %%
torch.manual_seed(0)
LENGTHS = [40, 0, 7, 90, 23]
ENDS = cu_seqlens(LENGTHS, "cpu")
CALL = (ENDS, ENDS, max(LENGTHS), max(LENGTHS))


def leaves(dim: int = 64, heads: int = 2, dtype=torch.float32) -> list[torch.Tensor]:
    """q, k and v of the batch above."""
    shape = sum(LENGTHS), heads, dim
    return [torch.randn(shape).to(dtype).requires_grad_() for _ in range(3)]


def kept(function: Callable, *given: torch.Tensor) -> tuple[int, int]:
    """(tensors, bytes) that autograd keeps for `function`, beside those given."""
    memory = {}
    own = {x.untyped_storage().data_ptr() for x in given}

    def pack(x: torch.Tensor) -> torch.Tensor:
        memory[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = function()
    assert out.requires_grad
    extra = {at: size for at, size in memory.items() if at not in own}
    return len(extra), sum(extra.values())


q, k, v = leaves()


def eager() -> torch.Tensor:
    """The same function from PyTorch's own operators, padded."""
    padded = [
        nn.utils.rnn.pad_sequence(x.split(LENGTHS), batch_first=True).transpose(1, 2)
        for x in (q, k, v)
    ]
    s = padded[0] @ padded[1].mT * 64**-0.5
    p = F.gelu(s, approximate="tanh")
    return p @ padded[2]


ours, theirs = kept(lambda: gdpa(q, k, v, *CALL), q, k, v, ENDS), kept(eager, q, k, v)
print(f"gdpa: {ours[0]} tensors, {ours[1]} bytes; padded PyTorch: {theirs[0]}, {theirs[1]} bytes")

# %% tags=["remove-cell"]
assert ours == (0, 0), "the text: its arguments and nothing else"
given_bytes = sum(x.nbytes for x in (q, k, v))
glue("eager_times", (theirs[1] + given_bytes) / given_bytes)
assert theirs[1] > 4 * given_bytes
BIG = workload("gdpa-self-full-1024")
tensor_gib = BIG.total_q * BIG.num_heads_q * BIG.head_dim * 2 / 2**30
scores = BIG.batch * BIG.num_heads_q * BIG.max_seqlen_q * BIG.max_seqlen_k
glue("tensor_gib", tensor_gib)
glue("softmax_kept_gib", tensor_gib + BIG.total_q * BIG.num_heads_q * 4 / 2**30)
glue("scores_gib", 2 * scores * 2 / 2**30)

# %% [markdown]
# At the size of `gdpa-self-full-1024` (modelled): q, k and v have {glue:text}`train_tensor_gib:.3f`
# GiB each. A softmax operator of FlashAttention's kind keeps the output and a log-sum-exp too,
# {glue:text}`train_softmax_kept_gib:.2f` GiB; PyTorch's operators keep the scores before and after
# the activation, {glue:text}`train_scores_gib:.0f` GiB.
#
# A model does not always save that much. The linear layer after the attention needs its own input,
# the output, for the gradient of its weight. Then the output stays in memory whether or not the
# attention asks for it. What is always saved is the log-sum-exp, and the reads and the extra kernel
# that the row sum of $dO \odot O$ would cost.
#
# What is kept must not change before it is used. Autograd checks the version of the offsets as it
# does that of any tensor:

# %%
moved = ENDS.clone()
out = gdpa(q, k, v, moved, moved, *CALL[2:])
moved[1] = 30
try:
    out.sum().backward()
except RuntimeError as error:
    print(str(error).split(":")[0])

# %% [markdown]
# ## An operator of PyTorch
#
# `gdpa` checks its arguments and calls one operator; its gradients come from a second one. Both are
# registered with `torch.library`, with a schema and a *fake kernel* that knows shapes and no
# values. An `autograd.Function` of a few lines makes them one differentiable function.

# %% tags=["remove-input"]
OPERATORS = torch.ops.gdpa_kernels.gdpa_forward, torch.ops.gdpa_kernels.gdpa_backward
code("\n".join(textwrap.fill(str(op.default._schema), 90) for op in OPERATORS))

# %% [markdown]
# `SymInt` says that a compiled program need not be compiled again for another longest sequence. The
# fake kernel is what tools run that want shapes without work. `opcheck` holds schema and fake
# kernel against the real ones:

# %%
with FakeTensorMode() as fake:
    shapes = [fake.from_tensor(x) for x in (*leaves(), ENDS)]
    print("fake:", gdpa(*shapes[:3], shapes[3], shapes[3], *CALL[2:]))

tensors = (*(x.detach() for x in leaves(16)), *CALL[:2], [])
options = (*CALL[2:], "gelu_tanh", 0.25, 1.0, False, None, "v0_eager", "reference")
arguments = (*tensors, *options)
for name, verdict in torch.library.opcheck(OPERATORS[0].default, arguments).items():
    print(f"{name}: {verdict}")

# %% [markdown]
# `torch.compile(fullgraph=True)` refuses any break in the graph. The back end below compiles
# nothing: it notes what it is given, forward and backward, over batches of different sizes.

# %%
graphs: list[tuple[str, list[str]]] = []


def noting(name: str) -> Callable:
    def compiler(module, _):
        called = [node for node in module.graph.nodes if node.op == "call_function"]
        graphs.append((name, [str(n.target) for n in called if "getitem" not in str(n.target)]))
        return make_boxed_func(module.forward)

    return compiler


def loss_of(q, k, v, ends, longest):
    return (2 * gdpa(q, k, v, ends, ends, longest, longest)).sum()


torch._dynamo.reset()
compiled = torch.compile(
    loss_of, fullgraph=True, dynamic=True,
    backend=aot_autograd(fw_compiler=noting("forward"), bw_compiler=noting("backward")),
)  # fmt: skip
for lengths in ([5, 0, 17, 6], [11, 3, 0, 0, 9, 2], [30] * 9):
    tensors = [torch.randn(sum(lengths), 2, 16, requires_grad=True) for _ in range(3)]
    compiled(*tensors, cu_seqlens(lengths, "cpu"), max(lengths)).backward()
for name, targets in graphs:
    print(f"{name}: {', '.join(targets)}")

# %% tags=["remove-cell"]
assert [name for name, _ in graphs] == ["forward", "backward"], "the text: one graph each way"
assert sum("gdpa" in target for _, targets in graphs for target in targets) == 2
glue("graphs", len(graphs) // 2)

# %% [markdown]
# Three batches, {glue:text}`train_graphs:.0f` graph each way, and in each the operator is one node:
# the compiler fuses what is around it and does not look inside. One thing is different in a
# compiled program: it does not read the values of the offsets, so it does not check them either.
# Shapes and types it does.
#
# ## Only what is asked for
#
# A frozen embedding needs no gradient, a frozen query tower neither. Autograd says so in
# `needs_input_grad`, and the operator passes it on. Which kernels of each rung run then? In the
# emulator, with head_dim 128 and bf16:


# %%
def launched(impl: str, needs: str) -> list[str]:
    """Kernels that the backward pass launches if the arguments in `needs` want a gradient."""
    half = leaves(128, 1, torch.bfloat16)
    for name, x in zip("qkv", half, strict=True):
        x.requires_grad_(name in needs)
    with emulator.enabled():
        out = gdpa(*half, *CALL, impl="v1_tiled", backward_impl=impl).sum()
        with launches() as seen:
            out.backward()
    assert [x.grad is not None for x in half] == [name in needs for name in "qkv"]
    return [launch.name.removesuffix("_kernel") for launch in seen]


NEEDED = {"q": "S, dP, dQ", "k": "S, dP, dK", "v": "S, dV", "qkv": "S, dP, dV, dK, dQ"}
found = {impl: {needs: launched(impl, needs) for needs in NEEDED} for impl in BACKWARD}

# %% tags=["remove-input"]
figures.show_table(
    pd.DataFrame(
        {
            "gradients of": ", ".join(needs), "products needed": products,
            **{impl.removesuffix("_backward"): ", ".join(found[impl][needs]) for impl in BACKWARD},
        }
        for needs, products in NEEDED.items()
    )
)  # fmt: skip

# %% tags=["remove-input"]
figures.source("emulated", "kernels launched by the backward pass of a batch of five sequences")

# %% tags=["remove-cell"]
assert found["v1_tiled_backward"]["q"] == ["queries"]
assert found["v1_tiled_backward"]["v"] == ["keys"]
takes = {impl: "needs" in ladder.rung(impl, api.BACKWARD).has for impl in BACKWARD}
glue_word("thrifty", ", ".join(f"`{impl}`" for impl in BACKWARD if takes[impl]))
rest = " and ".join(f"`{impl}`" for impl in BACKWARD if not takes[impl])
rest = f"With {rest} all three are computed, and the operator drops what nobody wants."
glue_word("wasteful", "" if all(takes.values()) else rest)
assert takes["v1_tiled_backward"]

# %% [markdown]
# The wish reaches the kernels of {glue:text}`train_thrifty`: v1 leaves out a whole one, the fused
# ones the products, the dQ in fp32 and its conversion. {glue:text}`train_wasteful` Where only dQ or
# only dV is trained, compare with `backward_impl="v1_tiled_backward"`; no record of ours does.
#
# ## Gradients of any strides
#
# A kernel is tested with a gradient that is contiguous. The first one that a user sends is not:

# %%
seen = []
out = gdpa(q, k, v, *CALL)
out.register_hook(lambda grad: seen.append(tuple(grad.stride())))
out.sum().backward()
(expanded,) = seen
print(f"out.sum() sends back a gradient of shape {list(out.shape)} and strides {expanded}")

# %% tags=["remove-cell"]
assert expanded == (0, 0, 0)
half, same = leaves(128, 1, torch.bfloat16), []
for impl in BACKWARD:
    with emulator.enabled():
        out = gdpa(*half, *CALL, impl="v1_tiled", backward_impl=impl)
        dense = torch.randn(*out.shape[::-1]).bfloat16()
        for grad in (out.detach()[:1, :, :1].expand_as(out), dense.permute(2, 1, 0)):
            one, other = (
                torch.autograd.grad(out, half, given, retain_graph=True)
                for given in (grad, grad.contiguous())
            )
            same.append(all(map(torch.equal, one, other)))
assert all(same)
glue("strided", len(same))

# %% [markdown]
# One number for all of them, read again and again. A kernel that took the rows as adjacent would
# read beyond it. v1 has the strides of all its arguments as constants; the others make a copy of a
# gradient that TMA cannot read, and of nothing else. Expanded and transposed gradients give the
# bits of their contiguous copies on every rung ({glue:text}`train_strided:.0f` comparisons in the
# emulator). q, k and v may be strided too: slices of one packed projection are read where they
# lie.
#
# ## What is refused
#
# A second derivative would need kernels of its own. An operator that lacks them can return zeros,
# or nothing, or say so. A gradient penalty asks for one:


# %%
def refusal(call: Callable[[], object]) -> str:
    """What a call raises, on lines of 90 characters."""
    try:
        call()
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        return textwrap.fill(f"{type(error).__name__}: {error}", 90, subsequent_indent="    ")
    raise AssertionError("must be refused")


(dq,) = torch.autograd.grad(gdpa(q, k, v, *CALL).sum(), q, create_graph=True)
print(refusal(lambda: dq.square().sum().backward()))
directional = (lambda x: gdpa(x, k, v, *CALL), (q.detach(),), (q.detach(),))
print(refusal(lambda: torch.func.jvp(*directional)))

# %% [markdown]
# The first comes when the second derivative is used, not when `create_graph=True` allows it: much
# code sets that flag and never differentiates. The forward-mode derivative of the second line is
# one that PyTorch would otherwise drop without a word.
#
# An explicit `backward_impl` that cannot take the call is refused when the *output* is computed,
# even if no gradient is wanted yet: an hour later, inside `backward()`, nobody would know which
# call it was. Layers check what they are given as well:

# %% tags=["hide-input"]
layer = GDPASelfAttention(32, 4, max_seqlen=90)
rows = torch.randn(sum(LENGTHS), 32)
wrong = {
    "a rung that needs a GPU": lambda: gdpa(q, k, v, *CALL, backward_impl="v1_tiled_backward"),
    "a forward rung": lambda: gdpa(q, k, v, *CALL, backward_impl="v2_tma"),
    "not a jagged batch": lambda: layer(rows),
    "wrong width": lambda: layer((rows[:, :16], ENDS)),
    "rows without an owner": lambda: layer((rows, ENDS[:-1])),
    "longer than max_seqlen": lambda: GDPASelfAttention(32, 4, max_seqlen=64)((rows, ENDS)),
    "a summary too few": lambda: PFFN(32, 4, 8, 6)((rows, ENDS), torch.randn(4, 8)),
    "heads that do not divide": lambda: PMA(32, 5, 3),
}
display(code("\n".join(f"{name}:\n  {refusal(call)}" for name, call in wrong.items())))

# %% [markdown]
# ## Autocast
#
# Under autocast q, k and v are cast as PyTorch's own attention casts them, and the gradients come
# back in the type of the leaves. Inside a rung autocast is off: a definition made of PyTorch's
# operators must not be cast a second time.

# %%
single = leaves()
with torch.autocast("cpu", dtype=torch.bfloat16):
    out = gdpa(*single, *CALL)
out.float().sum().backward()
print(f"out {out.dtype}, gradients {[str(x.grad.dtype) for x in single]}")

# %% [markdown]
# ## Without waiting for the device
#
# Offsets live on the GPU. Whoever reads them on the host waits until everything before them has
# run, and the queue of kernels runs dry. Unless it is told not to, `gdpa` reads them in each call,
# to check them. It could remember which tensor it has checked, but a tensor says only of some of
# its writers that they wrote: a collective, a CUDA graph or another library goes unnoticed, and old
# lengths give wrong results. So nothing is remembered behind the caller's back. Whoever calls many
# layers holds what they share: `Lengths(cu_seqlens)` copies the offsets, checks them once, and
# keeps the lists of work that kernels make of them. The cell counts how often the host reads:


# %%
class Reads(TorchFunctionMode):
    """Counts how often the host asks for the numbers of a tensor."""

    count = 0

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        self.count += function is torch.Tensor.tolist
        return function(*arguments, **(keywords or {}))


few = [x.detach() for x in leaves(16, dtype=torch.bfloat16)]
reading = {}
with Reads() as reads, emulator.enabled():

    def read(what: str, *offsets, **options) -> None:
        before = reads.count
        for _ in range(4):
            gdpa(*few, *offsets, impl="v1_tiled", **options)
        reading[what] = reads.count - before

    read("offsets", *CALL)
    read("offsets, validate=False", *CALL, validate=False)
    lengths = Lengths(ENDS)
    read("Lengths", lengths, lengths)
print(f"four calls: {reading}")

# %% tags=["remove-cell"]
assert list(reading.values()) == [8, 0, 0], reading

# %% [markdown]
# The layers take `Lengths` in place of offsets, and need one more number, the longest sequence:
# that of `Lengths`, or `max_seqlen=` of the layer, or they read it from the offsets in each call.
#
# A **CUDA graph** records launches and replays them without Python. Whatever the host decided while
# it was captured stays decided:
#
# | what is needed | why |
# |:--|:--|
# | longest sequences as numbers, and `validate=False` | to read them is to wait |
# | fixed rows, batch, longest sequence | they are recorded; *lengths* may change between replays |
# | offsets that are written in place, no `Lengths` | the recorded kernels read that address |
# | offsets that are right | a replay cannot check them: an ordinary call before can |
# | an ordinary call or two before | kernels are compiled and loaded at the first of their kind |
#
# The cell below needs a GPU, and does nothing without one. It fails if a step waits for the device,
# or if a replay with other lengths is not what an ordinary step gives.

# %%
if torch.device(device).type == "cuda":
    layer = GDPASelfAttention(
        256, 2, max_seqlen=90, device=device, dtype=torch.bfloat16, validate=False,
        backward_impl="v1_tiled_backward",  # deterministic
    )  # fmt: skip
    rows = torch.randn(sum(LENGTHS), 256, device=device).bfloat16().requires_grad_()
    ends = ENDS.to(device)
    leaves_of_step = [rows, *layer.parameters()]

    def step() -> tuple[torch.Tensor, ...]:
        y, _ = layer((rows, ends))
        return y, *torch.autograd.grad(y.square().sum(), leaves_of_step)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
        torch.cuda.set_sync_debug_mode("error")
        step()
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    ends.copy_(cu_seqlens(LENGTHS[::-1], device))
    graph.replay()
    for one, other in zip(recorded, step(), strict=True):
        torch.testing.assert_close(one, other)
    print("a replay with other lengths is an ordinary step")

# %% [markdown]
# ## What a call costs the host
#
# A program that trains enqueues kernels, and the device works them off. As long as the host is
# ahead its time costs nothing. So what counts is the host's time for a call among calls, with the
# device still busy with those before, and without ever waiting for it.
#
# Each call runs Python: checks, the choice of a rung, its constants, TMA descriptors, a kernel that
# makes the list of work, then Triton's launcher, which specializes every argument again. The cell
# at the top measures it on batches whose offsets no call has seen before, as training on jagged
# data has them; with `Lengths` that many layers share; and as a CUDA graph.
#
# An earlier version of this package remembered lists, launched kernels through Triton's internals
# and replayed whole calls; a repeated call took 32 to 45 µs and a call with new lengths 99 to 115
# (record `20261122T023917Z`). Only benchmarks repeat calls, and what was remembered could be wrong.
#
# Predictions (2026-11-22, from a script that timed the parts: an empty operator 7 µs, an
# `autograd.Function` 10, a launch of the list 17 and of the main kernel 32, a descriptor 5; on that
# host `exp` took 6 µs and its gradient 59):
#
# 1. *Forward, new offsets*: 75 to 120 µs. More would mean that users miss the removed machinery.
# 2. *Forward + backward, new offsets*: 200 to 350 µs, autograd's own 60 among them.
# 3. *`Lengths`* save the launch of the list in each direction: 15 to 40 µs of a step.
# 4. *CUDA graph*: less than 15 µs for all kernels of a step.

# %% tags=["remove-cell"]
host_record = results.latest_record(
    data_dir, notebook="notebooks/training/op_in_a_model.py", system="h200"
)
host = results.notebook_table(host_record, "host")
median = host.pivot(index=["workload", "call"], columns="what", values="median_us")
ours = median[median.index.get_level_values("call") != "exp"]
floor = median.xs("exp", level="call")
spared = ours[f"{STEP_OF}, {NEW}"] - ours[f"{STEP_OF}, {SHARED}"]
ratios = {
    what: ours[f"{what}, {NEW}"].droplevel("call") / floor[f"{what}, {NEW}"]
    for what in (FORWARD, STEP_OF)
}
for key, values in (
    ("new", ours[f"{FORWARD}, {NEW}"]), ("shared", ours[f"{FORWARD}, {SHARED}"]),
    ("step", ours[f"{STEP_OF}, {NEW}"]), ("step_shared", ours[f"{STEP_OF}, {SHARED}"]),
    ("graph", ours[f"{STEP_OF}, {GRAPH}"]), ("spared", spared),
    ("exp", floor[f"{FORWARD}, {NEW}"]), ("exp_step", floor[f"{STEP_OF}, {NEW}"]),
    ("ratio", ratios[FORWARD]), ("steps", ratios[STEP_OF]),
):  # fmt: skip
    glue(f"host_{key}_least", values.min())
    glue(f"host_{key}_most", values.max())
for key, values, low, high in (
    ("1", ours[f"{FORWARD}, {NEW}"], 75, 120), ("2", ours[f"{STEP_OF}, {NEW}"], 200, 350),
    ("3", spared, 15, 40), ("4", ours[f"{STEP_OF}, {GRAPH}"], 0, 15),
):  # fmt: skip
    inside, less = values.between(low, high).all(), values.max() <= high
    glue_word(f"host_verdict_{key}", "kept" if inside else "broken" + ": less" * bool(less))

# %% tags=["remove-input"]
spread = host.assign(
    text=[
        f"{middle:.0f} ({low:.0f} to {high:.0f})"
        for middle, low, high in host[["median_us", "p20_us", "p80_us"]].to_numpy()
    ]
)
figures.show_table(
    spread.pivot(index=["workload", "call"], columns="what", values="text")[
        list(dict.fromkeys(host["what"]))
    ].reset_index()
)

# %% tags=["remove-input"]
figures.provenance([host_record.id], data_dir=Path(data_dir))

# %% [markdown]
# Microseconds, median (p20 to p80). No call waited for the device.
#
# 1. *Forward, new offsets*: {glue:text}`train_host_new_least:.0f` to
#    {glue:text}`train_host_new_most:.0f` µs, **{glue:text}`train_host_verdict_1`**, where PyTorch
#    takes {glue:text}`train_host_exp_most:.0f` for `exp`, one kernel.
# 2. *Forward + backward, new offsets*: {glue:text}`train_host_step_least:.0f` to
#    {glue:text}`train_host_step_most:.0f` µs, **{glue:text}`train_host_verdict_2`**; `exp` takes
#    {glue:text}`train_host_exp_step_most:.0f`, nearly all of it autograd's own.
# 3. *`Lengths`* save {glue:text}`train_host_spared_least:.0f` to
#    {glue:text}`train_host_spared_most:.0f` µs of a step: **{glue:text}`train_host_verdict_3`**.
# 4. *CUDA graph*: at most {glue:text}`train_host_graph_most:.1f` µs for a step,
#    **{glue:text}`train_host_verdict_4`**.
#
# The predictions are of a host that takes 6 µs for `exp`; hosts of one kind of machine differ by a
# factor of three. Counted in `exp`, forward is what was predicted: 13 to 20 of them, and it is
# {glue:text}`train_host_ratio_least:.0f` to {glue:text}`train_host_ratio_most:.0f`. Forward +
# backward is not: 3 to 5 steps of `exp` were predicted, and it is
# {glue:text}`train_host_steps_least:.0f` to {glue:text}`train_host_steps_most:.0f`. Autograd runs
# the backward of tensors on a GPU in a thread of its own, where the same Python takes far longer: a
# script without a record had 943 to 1,142 µs for a step, and 620 to 690 with
# `torch.autograd.set_multithreading_enabled(False)`.
#
# A layer whose kernels take less than its calls leaves the device waiting. Then the graph is worth
# its trouble: it is the documented way to spare the host, and it is PyTorch's own.

# %% [markdown]
# ## Which backward
#
# `backward_impl="auto"` takes the first rung that can compute the call, in the order that was
# measured at the nearest shape on this kind of device; where nothing was measured come the rungs
# that run anywhere. It is resolved by type, head_dim, longest sequences and layout, not by looking
# at lengths. What it takes on a Hopper GPU, and which others could be named:

# %% tags=["hide-input"]
ASKED = {
    "256 keys": {"keys": 256},
    "1,024 keys": {"keys": 1024},
    "1,024 keys, head_dim 64": {"keys": 1024, "dim": 64},
    "1,024 keys, head_dim 72": {"keys": 1024, "dim": 72},
    "PMA, 256 keys": {"keys": 256, "shared": True},
    "grouped heads, 256 keys": {"keys": 256, "kv_heads": 1},
    "fp32, 256 keys": {"keys": 256, "dtype": torch.float32},
    "fp64, 256 keys": {"keys": 256, "dtype": torch.float64},
}


def choice(
    impl: str, keys: int, dim: int = 128, shared: bool = False, kv_heads: int = 4,
    dtype: torch.dtype = torch.bfloat16,
) -> str:  # fmt: skip
    """The rung that takes the call, or "" if `impl` does not."""
    q = torch.empty(8, 4, dim, dtype=dtype)
    k, v = (torch.empty(8, kv_heads, dim, dtype=dtype) for _ in range(2))
    lengths = None if shared else ENDS, ENDS, 8 if shared else keys, keys
    try:
        return api.resolve_backward(impl, Batch(q, k, v, *lengths, ("gelu_tanh",), 1.0)).impl
    except NotImplementedError:
        return ""


with emulator.enabled():
    chosen = pd.DataFrame(
        {
            "call": name,
            "auto": choice("auto", **call),
            "could be named": ", ".join(i.split("_")[0] for i in BACKWARD if choice(i, **call)),
        }
        for name, call in ASKED.items()
    )
figures.show_table(chosen)

# %% tags=["remove-cell"]
auto = chosen.set_index("call")["auto"]
assert auto["fp64, 256 keys"] == "reference" and auto["fp32, 256 keys"] == "v1_tiled_backward"
assert (auto != "").all()

# %% [markdown]
# Name a rung for two reasons: to compare, and for results that repeat bit for bit. Beyond 256 keys
# (128 at head_dim 64) dQ of `v2_fused_backward` and of `v4_warp_specialized_backward` is added up
# in an order that differs from run to run; all other gradients are deterministic
# ({doc}`../backward/v2_fused_backward`). A rung that is named never hands the work to another one.
#
# ## Jagged batches in, jagged batches out
#
# `gdpa` takes packed rows and int32 offsets. The layers take what models hold: a pair
# `(values, offsets)`, as TorchRec's jagged tensors have it, or a nested tensor of layout
# `torch.jagged`. Both are the same rows in memory.

# %%
layer = GDPASelfAttention(32, 4)
rows = torch.randn(sum(LENGTHS), 32)
pair, _ = layer((rows, ENDS))
nested = layer(torch.nested.nested_tensor_from_jagged(rows, ENDS.long()))
print(f"nested: {nested.layout}, lengths {nested.offsets().diff().tolist()}")
assert torch.equal(nested.values(), pair)

x = torch.nested.nested_tensor_from_jagged(rows.clone().requires_grad_(), ENDS.long())
heads = x.values().unflatten(1, (4, 8))  # gdpa itself, from a nested tensor
out = gdpa(heads, heads, heads, x.offsets().int(), x.offsets().int(), 90, 90)
print(f"gdpa on its values: {list(out.shape)}, with a gradient: {out.requires_grad}")

# %% [markdown]
# Offsets of a nested tensor are int64, and the layers convert them at each call. int32 offsets that
# several layers share are used as they are; checks and lists of work are then made once for all of
# them.
#
# ## Three layers
#
# With $g$ for `gdpa`, x for tokens, e for learned seeds and s for a summary of each sample; each
# layer ends with a projection $W_o$:
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
# The operator is Kunlun's {cite}`hou2026kunlun`; pooling by seeds comes from Set Transformer
# {cite}`lee2019settransformer`, the feed-forward layer whose weights are data from InterFormer
# {cite}`zeng2024interformer`. Projections of the same input are one matrix product, and the kernels
# read its slices where they lie; the seeds are in memory once.
#
# None of them adds a residual or normalises its input: those are the caller's. Their references
# are plain PyTorch, one sequence after another, without padding and without an operator of ours:


# %%
def attend(layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One sequence, `[rows or keys, heads * head_dim]` each -> `[rows, embed_dim]`."""
    q, k, v = (x.unflatten(1, (-1, layer.head_dim)).transpose(0, 1) for x in (q, k, v))
    p = F.gelu(layer.head_dim**-0.5 * q @ k.mT, approximate="tanh")
    return layer.out((layer.output_scale * p @ v).transpose(0, 1).flatten(1))


def plain(layer, rows: torch.Tensor, summary: torch.Tensor) -> torch.Tensor:
    """What the layer computes, from PyTorch's parts."""
    found = []
    for tokens, own in zip(rows.split(LENGTHS), summary, strict=True):
        if isinstance(layer, GDPASelfAttention):
            found.append(attend(layer, *layer.qkv(tokens).chunk(3, 1)))
        elif isinstance(layer, PMA):
            found.append(attend(layer, layer.seeds, *layer.kv(tokens).chunk(2, 1)))
        else:
            hidden = layer.kv(own).view(layer.num_keys, -1)
            found.append(attend(layer, layer.q(tokens), *hidden.chunk(2, 1)))
    return torch.cat(found)


def by_layer(layer, rows: torch.Tensor, summary: torch.Tensor) -> torch.Tensor:
    """The same from the layer."""
    if isinstance(layer, PMA):
        return layer((rows, ENDS)).flatten(0, 1)
    return layer((rows, ENDS), *([summary] if isinstance(layer, PFFN) else []))[0]


# %% [markdown]
# Each layer learns what a teacher of the same form, with other weights, computes: plain PyTorch and
# the layer in fp32, from the same start; and the layer in bf16 under autocast, forward by
# `v1_tiled` and backward by `v1_tiled_backward`, both executed by the emulator.

# %%
STEPS, EMULATED_STEPS, SUMMARY = 40, 12, 8
MADE = {
    "GDPASelfAttention": lambda **o: GDPASelfAttention(32, 2, output_scale=1 / 16, **o),
    "PMA": lambda **o: PMA(32, 2, 4, output_scale=1 / 16, **o),
    "PFFN": lambda **o: PFFN(32, 2, SUMMARY, 12, output_scale=1 / 4, **o),
}
KERNELS = {"impl": "v1_tiled", "backward_impl": "v1_tiled_backward"}


def curve(kind: str, call: Callable, steps: int, **options) -> list[float]:
    """Losses of training `call` of a layer, relative to the size of the target."""
    torch.manual_seed(1)
    student, teacher = MADE[kind](**options), MADE[kind]()
    rows, summary = torch.randn(sum(LENGTHS), 32), torch.randn(len(LENGTHS), SUMMARY)
    with torch.no_grad():
        target = plain(teacher, rows, summary)
    optimizer = torch.optim.Adam(student.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        loss = F.mse_loss(call(student, rows, summary).float(), target) / target.var()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def in_bf16(*given) -> torch.Tensor:
    """`by_layer` under autocast."""
    with torch.autocast("cpu", dtype=torch.bfloat16):  # keeps its casts of weights: one a step
        return by_layer(*given)


curves = {}
for kind in MADE:
    curves[kind, "plain"] = curve(kind, plain, STEPS)
    curves[kind, "gdpa"] = curve(kind, by_layer, STEPS)
    with emulator.enabled():
        curves[kind, "bf16"] = curve(kind, in_bf16, EMULATED_STEPS, **KERNELS)

# %% tags=["remove-cell"]
apart = {
    (kind, how): max(
        abs(a / b - 1) for a, b in zip(curves[kind, how], curves[kind, "plain"], strict=False)
    )
    for kind in MADE
    for how in ("gdpa", "bf16")
}
worst = {how: max(apart[kind, how] for kind in MADE) for how in ("gdpa", "bf16")}
fell = {kind: curves[kind, "plain"][-1] / curves[kind, "plain"][0] for kind in MADE}
assert max(fell.values()) < 0.7, fell
assert worst["gdpa"] < 1e-3 and worst["bf16"] < 0.1, worst
glue("steps", STEPS)
glue("emulated_steps", EMULATED_STEPS)
glue("fp32_percent", 100 * worst["gdpa"])
glue("bf16_percent", 100 * worst["bf16"])
glue_word("verdict_fp32", VERDICT[worst["gdpa"] < 1e-4])
glue_word("verdict_bf16", VERDICT[worst["bf16"] < 0.03])

# %% tags=["remove-input"]
# | name: fig-train-layers
# | caption: >
# |   Loss over the step, relative to the variance of the target. Wide line: plain PyTorch, fp32.
# |   Thin line: the layer, fp32. Circles: the layer in bf16 by emulated kernels.
# | alt: >
# |   Three charts of falling losses. In each a thin line lies in the middle of a wide one, and
# |   circles along its beginning lie on it.
COLOURS = {kind: RUNG_COLOURS[i] for kind, i in zip(MADE, (1, 3, 2), strict=True)}
with figures.style():
    chart, axes = figures.subplots(1, 3, width=8.4, height=3.0, sharey=True)
    for axis, kind in zip(axes, MADE, strict=True):
        axis.semilogy(curves[kind, "plain"], color=INK, linewidth=5, alpha=0.45)
        axis.semilogy(curves[kind, "gdpa"], color=COLOURS[kind], linewidth=1.2)
        axis.semilogy(
            curves[kind, "bf16"], "o", color=COLOURS[kind], markerfacecolor="none", markersize=4.5
        )
        axis.set_title(kind)
        axis.set_xlabel("step")
    axes[0].set_ylabel("loss / variance")
display(chart)

# %% tags=["remove-input"]
figures.save_csv(
    pd.DataFrame(
        {"layer": kind, "by": how, "step": step, "loss": loss}
        for (kind, how), losses in curves.items()
        for step, loss in enumerate(losses)
    ),
    "train-layers",
)
figures.source("emulated", "CPU; bf16 by the emulator, fp32 by PyTorch", csv="train-layers")

# %% [markdown]
# Over {glue:text}`train_steps:.0f` steps the fp32 losses differ by at most
# {glue:text}`train_fp32_percent:.5f` %: **{glue:text}`train_verdict_fp32`**. Over
# {glue:text}`train_emulated_steps:.0f` steps the bf16 losses by at most
# {glue:text}`train_bf16_percent:.1f` %: **{glue:text}`train_verdict_bf16`**. A loss that falls
# proves little: training forgives wrong gradients as long as they point downhill. The same curve,
# step by step, does not.
#
# ## A model of histories
#
# A recommendation model, as small as it can be: a user has a history of events and is shown
# something. Will there be a click? Here the answer is known, because we make it. An event is of one
# of three kinds, so is what is shown; with $n$ events of the shown kind in the history, a click
# has the probability $\sigma(0.8\, n - 1.5)$. One user in five has no history at all; the other
# lengths are uniform from 1 to {glue:text}`train_longest:.0f`.

# %%
KINDS, LONGEST, WIDTH, SEEDS, DIVISOR = 3, 15, 16, 4, 5


def users(count: int, seed: int):
    """(events, offsets, shown, number of events of the shown kind, true logit, clicked)."""
    make = torch.Generator().manual_seed(seed)
    some = torch.rand(count, generator=make) >= 0.2
    lengths = torch.randint(1, LONGEST + 1, (count,), generator=make) * some
    ends = F.pad(lengths.cumsum(0), (1, 0)).int()
    events = torch.randint(0, KINDS, (int(ends[-1]),), generator=make)
    shown = torch.randint(0, KINDS, (count,), generator=make)
    owner = torch.repeat_interleave(torch.arange(count), lengths)
    same = torch.zeros(count).index_add_(0, owner, (events == shown[owner]).float())
    logit = 0.8 * same - 1.5
    clicked = (torch.rand(count, generator=make) < torch.sigmoid(logit)).float()
    return events, ends, shown, same, logit, clicked


# %% [markdown]
# The model has one of each layer. Events attend to each other, PMA pools them into four rows, PFFN
# sends these through a perceptron made from what is shown, and a linear layer makes a logit. The
# offsets of the pooled rows are multiples of four, whatever the histories are. With `average=True`
# the sums of the first two layers are divided by the length of each history; without it by 5, a
# constant.


# %%
class Clicks(nn.Module):
    """The logit of a click from (events, offsets, shown)."""

    def __init__(self, average: bool = False):
        super().__init__()
        self.average = average
        self.event, self.shown = nn.Embedding(KINDS, WIDTH), nn.Embedding(KINDS, WIDTH)
        common = {"output_scale": 1 / DIVISOR, "max_seqlen": LONGEST}
        self.mix = GDPASelfAttention(WIDTH, 2, **common)
        self.pool = PMA(WIDTH, 2, SEEDS, **common)
        self.personal = PFFN(WIDTH, 2, WIDTH, 8, max_seqlen=SEEDS)
        self.logit = nn.Linear(SEEDS * WIDTH, 1)

    def by_length(self, layer, y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """y as if output_scale had been 1 / length for each of its rows."""
        if not self.average:
            return y
        factor = (DIVISOR / lengths.clamp(min=1)).view(-1, *[1] * (y.dim() - 1))
        return factor * (y - layer.out.bias) + layer.out.bias

    def forward(self, events, ends, shown):
        lengths, x = ends.diff(), self.event(events)
        mixed = self.mix((x, ends))[0]
        x = x + self.by_length(self.mix, mixed, torch.repeat_interleave(lengths, lengths))
        pooled = self.by_length(self.pool, self.pool((x, ends)), lengths).flatten(0, 1)
        rows = torch.arange(len(shown) + 1, dtype=torch.int32) * SEEDS
        pooled = pooled + self.personal((pooled, rows), self.shown(shown))[0]
        return self.logit(pooled.view(len(shown), -1))[:, 0]


BATCHES, USERS, RATE = 180, 64, 6e-3


def train(average: bool) -> tuple[Clicks, list[float]]:
    """A model and its losses; each batch is new."""
    torch.manual_seed(0)
    model = Clicks(average)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, BATCHES)
    losses = []
    for batch in range(BATCHES):
        *given, _, _, clicked = users(USERS, 1000 + batch)
        loss = F.binary_cross_entropy_with_logits(model(*given), clicked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return model, losses


trained = {"sums": train(False), "averages": train(True)}

# %% [markdown]
# No model can know more than the probability of a click. So the smallest possible loss is the mean
# entropy of the true probabilities, which we can compute. For the model of averages there is a
# larger one: from averages one can know the *shares* of the three kinds in a history, not the
# counts. Two of four are as good as five of ten. The best loss from shares is a sum over all
# histories that there are:


# %%
def entropy(p: float) -> float:
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


def clicks(n: int) -> float:
    return 1 / (1 + math.exp(1.5 - 0.8 * n))


histories = [(0, 0, 0, 0.2)]  # events of the shown kind, of the two others, probability
for length in range(1, LONGEST + 1):
    for a in range(length + 1):
        for b in range(length - a + 1):
            ways = math.comb(length, a) * math.comb(length - a, b)
            histories.append((a, b, length - a - b, 0.8 / LONGEST * ways / KINDS**length))
best = {"sums": sum(weight * entropy(clicks(a)) for a, _, _, weight in histories)}
shares: dict[tuple, list[float]] = {}
for a, b, c, weight in histories:
    common = max(math.gcd(a, b, c), 1)
    known = shares.setdefault((a // common, b // common, c // common), [0.0, 0.0])
    known[0] += weight
    known[1] += weight * clicks(a)
best["averages"] = sum(weight * entropy(hits / weight) for weight, hits in shares.values())
rate = sum(weight * clicks(a) for a, _, _, weight in histories)
best["neither"] = entropy(rate)  # who knows nothing about the user
print({name: round(loss, 4) for name, loss in best.items()})

# %% tags=["remove-cell"]
assert abs(sum(weight for *_, weight in histories) - 1) < 1e-12
glue("longest", LONGEST)
*test, same, logit, _ = users(4000, 1)
said, excess = {}, {}
with torch.no_grad():
    for name, (model, _) in trained.items():
        said[name] = model(*test)
        true = torch.sigmoid(logit)
        loss = -(true * F.logsigmoid(said[name]) + (1 - true) * F.logsigmoid(-said[name])).mean()
        least = -(true * F.logsigmoid(logit) + (1 - true) * F.logsigmoid(-logit)).mean()
        excess[name] = (loss - least).item()
empty = test[1].diff() == 0
at_empty = {name: torch.sigmoid(said[name][empty]).mean().item() for name in said}
assert empty.sum() > 600 and abs(at_empty["sums"] - clicks(0)) < 0.08
assert excess["sums"] < 0.03 and excess["averages"] > 1.5 * excess["sums"], excess
assert best["sums"] < best["averages"] < best["neither"]
glue("excess_sum", excess["sums"])
glue("excess_mean", excess["averages"])
glue("bound_gap", best["averages"] - best["sums"])
glue("best", best["sums"])
glue("neither", best["neither"])
glue("empty_true", clicks(0))
glue("empty_said", at_empty["sums"])
many = same >= 5
glue("many_true", torch.sigmoid(logit[many]).mean().item())
for name in said:
    glue(f"many_{name}", torch.sigmoid(said[name][many]).mean().item())

# %% tags=["remove-input"]
# | name: fig-train-clicks
# | caption: >
# |   Left: loss over the batch, mean of 20 batches; dashed: the best possible from counts, from
# |   shares, and without the history. Right: what the trained models say on 4,000 new users, by the
# |   number of events of the shown kind, mean and p20 to p80; the line is the truth.
# | alt: >
# |   Left, two curves fall from the upper dashed line; that of the sums ends at the lowest dashed
# |   line, the other one above it. Right, the points of the sums follow a straight line upwards;
# |   those of the averages rise more slowly and spread more.
LOOKS = {"sums": (RUNG_COLOURS[1], -0.1), "averages": (RUNG_COLOURS[3], 0.1)}
with figures.style():
    chart, axes = figures.subplots(1, 2, width=8.4, height=3.6)
    for name, (colour, shift) in LOOKS.items():
        smooth = pd.Series(trained[name][1]).rolling(20).mean()
        axes[0].plot(smooth, color=colour, label=name)
        counted_said = [said[name][same == n] for n in range(8)]
        middle = torch.stack([x.mean() for x in counted_said])
        low, high = (torch.stack([x.quantile(p) for x in counted_said]) for p in (0.2, 0.8))
        axes[1].errorbar(
            torch.arange(8) + shift, middle,
            [(middle - low).clamp(min=0), (high - middle).clamp(min=0)],
            fmt="o", color=colour, elinewidth=1, capsize=2, label=name,
        )  # fmt: skip
    for name, level in best.items():
        axes[0].axhline(level, color=INK, linewidth=1, linestyle=(0, (4, 2)))
        words = {"sums": "counts", "averages": "shares", "neither": "no history"}[name]
        axes[0].annotate(
            words, (0, level), xytext=(2, 2), textcoords="offset points", va="bottom", fontsize=8.5
        )  # fmt: skip
    axes[1].plot(range(8), [0.8 * n - 1.5 for n in range(8)], color=INK, linewidth=1)
    axes[0].set_xlim(0, BATCHES)
    axes[0].set_xlabel(f"batch of {USERS} users")
    axes[0].set_ylabel("cross entropy")
    axes[1].set_xlabel("events of the shown kind")
    axes[1].set_ylabel("logit")
    axes[1].legend(loc="upper left")
display(chart)

# %% tags=["remove-input"]
figures.save_csv(
    pd.DataFrame(
        {"model": name, "batch": batch, "loss": loss}
        for name, (_, losses) in trained.items()
        for batch, loss in enumerate(losses)
    ),
    "train-clicks",
)
figures.source("emulated", "trained on a CPU in fp32; bounds computed exactly", csv="train-clicks")

# %% [markdown]
# The model of sums ends {glue:text}`train_excess_sum:.3f` above the best loss on these users, which
# is about {glue:text}`train_best:.2f`; without the history it would be
# {glue:text}`train_neither:.2f`. To users without a history it gives a click with probability
# {glue:text}`train_empty_said:.2f`; the truth is {glue:text}`train_empty_true:.2f`. They have no
# row in any tensor but the pooled ones: PMA gives them zeros, the bias goes on, and the batch needs
# no special case.
#
# ### The surprise: an average cannot count
#
# It is tempting to divide by the length of each history. The rows of softmax attention are averages
# too, and averages do not grow. But then two events of four and five of ten are the same. To users
# with five events or more of the shown kind, who click with probability
# {glue:text}`train_many_true:.2f`, the model of averages gives {glue:text}`train_many_averages:.2f`
# and the model of sums {glue:text}`train_many_sums:.2f`. Of the {glue:text}`train_excess_mean:.3f`
# that it loses, {glue:text}`train_bound_gap:.3f` are out of reach of any training; the rest this
# training left. The authors of HSTU gave up softmax for this reason, among others: how many events
# match is itself a signal {cite}`zhai2024hstu`. A constant divisor keeps it.
#
# ## What naive implementations do
#
# The pooling layer of the trained model again, padded, with five ways to deal with what is not
# there; then the jagged layer. A user's result should not depend on who else is in the batch. The
# gradients are those of a loss that leaves out, by `where`, the user without a history. In the last
# column NaN fills the padding, and a neighbour's rows where there is none.

# %%
GELU = reference.ACTIVATIONS["gelu_tanh"].function
WAYS = {
    "no mask": lambda s, there: GELU(s),
    "score = -inf": lambda s, there: GELU(s.masked_fill(~there, -torch.inf)),
    "softmax, score = -inf": lambda s, there: s.masked_fill(~there, -torch.inf).softmax(-1),
    "P times mask": lambda s, there: GELU(s) * there,
    "P = 0 by where": lambda s, there: GELU(s).masked_fill(~there, 0),
}


def pool_padded(layer: PMA, x: torch.Tensor, there: torch.Tensor, way: str) -> torch.Tensor:
    """PMA of padded rows x `[users, longest, width]`, of which `there` `[users, longest]` exist."""
    k, v = layer.kv(x).unflatten(2, (-1, layer.head_dim)).transpose(1, 2).chunk(2, 1)
    q = layer.seeds.unflatten(1, (layer.num_heads, -1)).transpose(0, 1)
    p = WAYS[way](layer.head_dim**-0.5 * q @ k.mT, there[:, None, None])
    return layer.out((layer.output_scale * p @ v).transpose(1, 2).flatten(2))


# %% tags=["hide-input"]
pool = trained["sums"][0].pool
HISTORY = [3, 0, 15, 6]
THERE = torch.arange(15) < torch.tensor(HISTORY)[:, None]
packed = torch.randn(sum(HISTORY), WIDTH)
padded = torch.zeros(4, 15, WIDTH).masked_scatter(THERE[..., None], packed)
poisoned = padded.masked_fill(~THERE[..., None], torch.nan)
ill = packed.clone()
ill[3:18] = torch.nan  # all of the third user


def jagged(rows: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    return pool((rows, cu_seqlens(lengths, "cpu")))


def finite(*tensors: torch.Tensor) -> str:
    return "finite" if all(x.isfinite().all() for x in tensors) else "NaN"


def line(name: str, y: torch.Tensor, alone: torch.Tensor, ill: torch.Tensor) -> dict[str, str]:
    """What is said of results: of all users, of the first alone, of the first beside NaN."""
    error = (y[:1] - alone).abs().max().item()
    loss = torch.where(torch.tensor(HISTORY)[:, None, None] > 0, y, 0).square().sum()
    return {
        "pooling with": name,
        "depends on the batch": "no"
        if error < 1e-5
        else f"by {error:.2g}".replace("by nan", "NaN"),
        "user without history": finite(y[1]),
        "gradients": finite(*torch.autograd.grad(loss, list(pool.parameters()))),
        "beside NaN": finite(ill),
    }


naive = [
    line(
        way,
        pool_padded(pool, padded, THERE, way),
        pool_padded(pool, packed[None, :3], THERE[:1, :3], way),
        pool_padded(pool, poisoned, THERE, way)[0],
    )
    for way in WAYS
]
right = jagged(packed, HISTORY)
naive.append(line("gdpa, jagged", right, jagged(packed[:3], [3]), jagged(ill, HISTORY)[[0, 1, 3]]))
figures.show_table(pd.DataFrame(naive))

# %% tags=["remove-cell"]
table = pd.DataFrame(naive).set_index("pooling with").T
assert table["no mask"].iloc[0].startswith("by 0")
assert table["score = -inf"].tolist() == ["NaN"] * 4
assert table["softmax, score = -inf"].tolist()[1:3] == ["NaN", "NaN"]
for way in ("P times mask", "P = 0 by where"):
    assert table[way].tolist() == ["no", "finite", "finite", "NaN"]
    assert torch.allclose(pool_padded(pool, padded, THERE, way), right, atol=1e-5)
assert table["gdpa, jagged"].tolist() == ["no", "finite", "finite", "finite"]

# %% [markdown]
# - *No mask*: padding is zeros, but a projection has a bias, so padded keys and values are not
#   zeros, and a user's result depends on the longest history in the batch.
# - *Score −∞*: the habit from softmax. GELU of −∞ is not a number ({doc}`../operator/gdpa`).
# - *Softmax*: a user without a history is 0/0. The loss leaves that user out and is finite, and
#   still the gradients of the weights are NaN: zero times NaN on the way back. The first step of
#   the optimizer ends the training.
# - *A mask on P* is right as long as padding holds numbers. Memory from `torch.empty` need not, and
#   zero times NaN is NaN. The values must be cleaned too.
#
# In a jagged tensor there is no padding, but a tile of a kernel still reaches beyond the end of its
# sequence, into the next one. A mask on the scores alone is the same mistake as above:


# %%
def in_tiles(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: int = 16) -> torch.Tensor:
    """One head; tiles of keys that mask scores and load what lies there."""
    out = torch.zeros_like(q)
    for start, end in zip(ENDS.tolist(), ENDS.tolist()[1:], strict=False):
        for first in range(start, end, tile):
            keys = torch.arange(first, min(first + tile, len(k)))
            p = GELU(q[start:end] @ k[keys].T * q.shape[1] ** -0.5)
            out[start:end] += p.masked_fill(keys >= end, 0) @ v[keys]
    return out


healthy = [x.detach() for x in leaves(128, 1)]
ill = healthy[2].clone()
ill[47:137] = torch.nan  # the fourth sequence, of 90 tokens
naive_rows = in_tiles(*(x[:, 0] for x in healthy[:2]), ill[:, 0]).isnan().any(1)
spared = torch.cat((torch.arange(47), torch.arange(137, 160)))
spread = {}
for impl in BACKWARD:
    tensors = [x.bfloat16().requires_grad_() for x in (*healthy[:2], ill)]
    with emulator.enabled():
        out = gdpa(*tensors, *CALL, impl="v1_tiled", backward_impl=impl)
        out.sum().backward()
    found = [out.detach(), *(x.grad for x in tensors)]
    spread[impl] = sum(int(x[spared].isnan().any(2).any(1).sum()) for x in found)
print(f"tiles that mask scores alone: NaN in {int(naive_rows[spared].sum())} rows of neighbours")
print(f"rungs, output and gradients: {spread}")

# %% tags=["remove-cell"]
glue("naive_rows", int(naive_rows[spared].sum()))
glue("spared", len(spared))
assert int(naive_rows[spared].sum()) > 0 and not any(spread.values())

# %% [markdown]
# {glue:text}`train_naive_rows:.0f` of {glue:text}`train_spared:.0f` rows of other sequences are
# poisoned. Our rungs load zeros beyond the end: by a predicate on each load, or by descriptors that
# end where the sequence ends ({doc}`../forward/v2_tma`). A NaN stays with the user who brought it,
# forward and backward. It is found there, too: nothing replaces it.
#
# ## Choosing the activation and the scales
#
# A row of softmax attention is an average. A row of GDPA is a sum, and how large it becomes is the
# caller's business. The root mean square of a row, by the number of keys, with q, k from N(0, 1)
# and head_dim 64, for values of mean 0 and of mean 1:

# %%
MAX = 2048
COUNTS = [2**i for i in range(12)]


def row_size(keys: int, mean: float, act: Callable, scale: float, output_scale: float) -> float:
    """Root mean square of 64 rows over `keys` keys."""
    make = torch.Generator().manual_seed(keys)
    q, k, v = (torch.randn(n, 64, generator=make).double() for n in (64, keys, keys))
    out = output_scale * act(scale * q @ k.T) @ (v + mean)
    return out.square().mean().sqrt().item()


SCALES = {
    "output_scale=1": (GELU, 1 / 8, 1.0),
    f"output_scale=1/{MAX}": (GELU, 1 / 8, 1 / MAX),
    f"scale=1/{MAX}": (GELU, 1 / MAX, 1.0),
    "softmax": (lambda s: s.softmax(-1), 1 / 8, 1.0),
}
sizes = {
    (name, mean): [row_size(n, mean, *how) for n in COUNTS]
    for name, how in SCALES.items()
    for mean in (0.0, 1.0)
}
SPREADS = [2.0**i for i in range(-2, 6)]
make = torch.Generator().manual_seed(0)
normal = torch.randn(200_000, generator=make, dtype=torch.float64)
dead = {}
for name in ("relu", "gelu_tanh", "silu", "hardswish", "leaky_relu"):
    slopes = (reference.ACTIVATIONS[name].derivative(std * normal).abs() for std in SPREADS)
    dead[name] = [(slope < 0.01).double().mean().item() for slope in slopes]

# %% tags=["remove-cell"]
growth = {
    (name, mean): math.log2(values[-1] / values[5]) / 6 for (name, mean), values in sizes.items()
}
assert 0.35 < growth["output_scale=1", 0.0] < 0.65 and 0.85 < growth["output_scale=1", 1.0] < 1.15
glue("growth_0", growth["output_scale=1", 0.0])
glue("growth_1", growth["output_scale=1", 1.0])
glue("at_max", sizes["output_scale=1", 1.0][-1])
small = torch.randn(4096, dtype=torch.float64, generator=make) * 8 / MAX
glue("linear", 100 * ((GELU(small) - small / 2).norm() / (small / 2).norm()).item())
for std in (1.0, 8.0):
    glue(f"dead_{std:.0f}", 100 * dead["gelu_tanh"][SPREADS.index(std)])
assert dead["gelu_tanh"][-1] > 0.4 and dead["leaky_relu"][-1] == 0


def overflow(name: str) -> float:
    """The least whole score at which the activation is beyond fp16."""
    scores = torch.arange(70_000.0, dtype=torch.float64)
    return scores[reference.ACTIVATIONS[name].function(scores) > 65504].min().item()


for name in ("gelu_tanh", "relu_squared", "gelu_taylor6"):
    glue(f"overflow_{name}", overflow(name))

# %% tags=["remove-input"]
# | name: fig-train-scales
# | caption: >
# |   Left: root mean square of an output row, values of mean 0 (solid) and 1 (dashed). Right: share
# |   of scores whose slope is below 0.01, by the standard deviation of the scores.
# | alt: >
# |   Left, on logarithmic axes, lines that rise with the number of keys, for output_scale the
# |   dashed ones twice as steeply as the solid ones; only softmax falls or stays. Right, curves
# |   that rise with the standard deviation; ReLU is at one half from the start, the others come
# |   close to it, leaky ReLU stays at zero.
with figures.style():
    chart, axes = figures.subplots(1, 2, width=8.4, height=3.8)
    for i, name in enumerate(SCALES):
        colour = INK if name == "softmax" else RUNG_COLOURS[(1, 2, 3)[i]]
        axes[0].loglog(COUNTS, sizes[name, 0.0], color=colour, label=name)
        axes[0].loglog(COUNTS, sizes[name, 1.0], "--", color=colour)
    axes[0].set_xlabel("keys")
    axes[0].set_ylabel("root mean square of a row")
    axes[0].legend(loc="upper left", fontsize=8.5)
    for i, name in enumerate(dead):
        axes[1].semilogx(SPREADS, dead[name], "o-", color=RUNG_COLOURS[i], label=name)
    axes[1].set_xlabel("standard deviation of the scores")
    axes[1].set_ylabel("share with slope < 0.01")
    axes[1].legend(loc="center left", fontsize=8.5)
display(chart)

# %% tags=["remove-input"]
figures.source("modelled", "fp64 on a CPU, random inputs as described")

# %% [markdown]
# **The scale of the output.** With `output_scale=1` a row grows with the number of keys to the
# power {glue:text}`train_growth_0:.2f` if values have mean 0, and to the power
# {glue:text}`train_growth_1:.2f` if it is 1; trained values seldom have mean 0. At 2,048 keys it is
# {glue:text}`train_at_max:.0f`. Divide by a constant, the longest sequence of the *model*: Kunlun
# and HSTU do, on different sides of the activation ({doc}`../operator/gdpa`). Not by each
# sequence's own length, unless counts must not matter. Not by the longest sequence of the *batch*:
# then a user's result depends on the others again. `max_seqlen` may follow the batch;
# `output_scale` must not.
#
# **The scale of the scores.** $1/\sqrt{d}$ gives scores of about 1, where GELU bends. With
# `scale=1/2048` and q, k from N(0, 1) scores are so small that GELU is $x/2$ but for
# {glue:text}`train_linear:.1g` %: the layer is linear attention that costs what attention costs.
# Whoever scales inside needs q and k that grow, by training or by a norm with a learned weight
# (`qk_norm=True`).
#
# **Large scores.** GELU's slope is below 0.01 for {glue:text}`train_dead_1:.1f` % of scores of
# standard deviation 1, and for {glue:text}`train_dead_8:.0f` % at 8: those pairs learn nothing, and
# to most others GELU is a straight line. A ReLU is there from the start; a leaky ReLU keeps a
# slope. Softmax answers large scores by choosing one key; here nothing answers, and twice the q is
# about twice the output. `qk_norm=True` bounds scores. Otherwise watch them: the largest of each
# head, from q and k of a few users, in fp32, now and then.
#
# **Types.** bf16 has the range of fp32. fp16 ends at 65,504, and P is rounded to it between the two
# products: GELU is infinite from a score of {glue:text}`train_overflow_gelu_tanh:,.0f` on, squared
# ReLU from {glue:text}`train_overflow_relu_squared:.0f`, the polynomial from
# {glue:text}`train_overflow_gelu_taylor6:.0f`. `gelu_taylor6` approximates GELU for scores below
# 1.2 and nothing beyond ({doc}`../operator/activations`): use it with `qk_norm=True` and
# `scale=1 / head_dim`, or not at all.
#
# ## What a step costs
#
# From the record of {doc}`../backward/results`: kernels of the backward pass alone; autograd's
# backward of the operator, by the host's clock from call to completion; and a whole step, forward
# and backward, also by the host's clock.

# %% tags=["remove-cell"]
RECORD = "notebooks/backward/results.py"
run_record = results.latest_record(data_dir, notebook=RECORD, system="h200")
everything = results.table(data_dir, system="h200", latest=False)
rows = everything[
    (everything["record"] == run_record.id) & (everything["direction"] == "backward")
].drop_duplicates(["workload", "impl", "scope", "variant"])
timed = rows[rows["failure"] == ""].set_index(["scope", "variant", "workload", "impl"])
assert timed["correct"].astype(bool).all(), "timed without a passed check"
ms = timed["time_us_p50"].sort_index() / 1e3
kernel, back, whole = ms["kernel", ""], ms["op", ""], ms["op", STEP]
costs = pd.DataFrame(
    {
        "workload": name, "impl": impl, "kernels (ms)": kernel[name, impl],
        "backward (ms)": back[name, impl], "step (ms)": time,
        "host, %": 100 * (back[name, impl] / kernel[name, impl] - 1),
        "forward, %": 100 * (1 - back[name, impl] / time),
    }
    for (name, impl), time in whole.items()
)  # fmt: skip
assert BIG.name in set(costs["workload"]), f"{run_record.id} has no step on {BIG.name}"
forward_of_step = {
    (row.workload, row.impl): row.config.get("forward", "auto")
    for row in run_record.rows
    if row.variant == STEP
}

memory = results.notebook_table(run_record, "memory")
SUMS_IN_FP32 = ("v2_fused_backward", "v2a_ordered_backward", "v4_warp_specialized_backward")


def predicted(name: str, impl: str) -> float:
    """GiB of the output, three gradients, and a dQ in fp32 where it is added up in memory."""
    if impl not in BACKWARD:
        return math.nan
    given = workload(name)
    q = given.total_q * given.num_heads_q * given.head_dim * 2
    k = given.total_k * given.num_heads_k * given.head_dim * 2
    return (2 * q + 2 * k + (2 * q if impl in SUMS_IN_FP32 else 0)) / 2**30


memory = memory.assign(
    measured=[size / 2**30 if size == size and size else math.nan for size in memory["bytes"]],
    predicted=[predicted(*row) for row in zip(memory["workload"], memory["impl"], strict=True)],
).drop(columns="bytes")
memory["ratio"] = memory["measured"] / memory["predicted"]
of_rungs = memory.dropna(subset=["ratio"])
best_step = costs[costs["workload"] == BIG.name].sort_values("step (ms)").iloc[0]
of_best = of_rungs.set_index(["workload", "impl"])["measured"]
glue("step_ms", best_step["step (ms)"])
glue("back_ms", best_step["backward (ms)"])
glue_word("step_impl", best_step["impl"])
glue_word("step_forward", forward_of_step[BIG.name, best_step["impl"]])
glue("step_gib", of_best[BIG.name, best_step["impl"]])
glue("step_tflops", timed.loc[("op", STEP, BIG.name, best_step["impl"]), "tflops"])
glue("forward_share", best_step["forward, %"])
glue("host_most", costs["host, %"].max())
hosted = costs.loc[costs["host, %"].idxmax()]
glue_word("host_where", f"`{hosted['impl']}` on `{hosted['workload']}`")
glue("memory_off", 100 * (of_rungs["ratio"] - 1).abs().max())
glue_word("verdict_memory", VERDICT[bool(((of_rungs["ratio"] - 1).abs() <= 0.03).all())])
glue_word("verdict_host", VERDICT[bool((costs["host, %"] <= 5).all())])
glue_word("verdict_forward", VERDICT[18 <= best_step["forward, %"] <= 28])

# %% tags=["remove-input"]
# | name: fig-train-step
# | caption: >
# |   A step on gdpa-self-full-1024 with each rung of the backward ladder. Left: time by the
# |   host's clock; filled, autograd's backward; hollow, the rest of the step. Right: memory beside
# |   q, k, v and the gradient of the output; the strokes are the prediction.
# | alt: >
# |   Two charts of horizontal bars, a row for each rung. What they show is said in the text below.
shown = costs[costs["workload"] == BIG.name].set_index("impl")
gib = memory[memory["workload"] == BIG.name].set_index("impl")
held = gib[gib["measured"] > 0]
names = list(dict.fromkeys((*(i for i in BACKWARD if i in shown.index), *held.index)))
with figures.style():
    chart, axes = figures.subplots(1, 2, width=8.4, height=1.0 + 0.36 * len(names), sharey=True)
    for place, impl in enumerate(names):
        colour = figures.colour(impl)
        if impl in shown.index:
            axes[0].barh(place, shown.loc[impl, "backward (ms)"], 0.6, color=colour)
            axes[0].barh(place, shown.loc[impl, "step (ms)"], 0.6, color="none", edgecolor=colour)
        if impl in held.index:
            filled = colour if impl in BACKWARD else "none"
            axes[1].barh(place, held["measured"][impl], 0.6, color=filled, edgecolor=colour)
            axes[1].plot([held["predicted"][impl]] * 2, [place - 0.42, place + 0.42], color=INK)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    axes[0].set_xlabel("ms a step")
    axes[1].set_xlabel("GiB")
    for axis in axes:
        axis.grid(visible=False, axis="y")
        axis.grid(visible=True, axis="x")
display(chart)

# %% tags=["remove-input"]
figures.save_csv(costs, "train-steps")
figures.provenance(rows[rows["scope"] == "op"], csv="train-steps", data_dir=Path(data_dir))

# %% tags=["remove-input"]
figures.show_table(costs.round(2))

# %% tags=["remove-input"]
figures.show_table(
    memory.round(3).rename(columns={"measured": "measured (GiB)", "predicted": "predicted (GiB)"})
)

# %% tags=["remove-input"]
figures.provenance([run_record.id], data_dir=Path(data_dir))

# %% [markdown]
# The fastest step on `gdpa-self-full-1024` takes {glue:text}`train_step_ms:.1f` ms: forward by
# {glue:text}`train_step_forward`, backward by {glue:text}`train_step_impl` in
# {glue:text}`train_back_ms:.1f` ms. That is {glue:text}`train_step_tflops:.0f` TFLOP/s over both
# directions.
#
# 2. *Memory*: the rungs need what was counted, within {glue:text}`train_memory_off:.1f` %:
#    **{glue:text}`train_verdict_memory`**. Peers compute softmax, and no prediction was made for
#    them.
# 3. *Host*: the operator's backward takes at most {glue:text}`train_host_most:.1f` % more than its
#    kernels ({glue:text}`train_host_where`): **{glue:text}`train_verdict_host`**. Beside
#    milliseconds that is little. On small batches the host decides, and a CUDA graph takes it out
#    of the way.
# 4. *Forward*: {glue:text}`train_forward_share:.0f` % of this step:
#    **{glue:text}`train_verdict_forward`**.
#
# Prediction 1 was judged above. A model has more than attention: projections, norms, embeddings,
# an optimizer. What a faster operator gives a whole model is at most its share of the step.
#
# ## Exercises
#
# :::{exercise} What is kept by two layers
# :label: ex-train-kept
#
# A `GDPASelfAttention` of bf16, width 512, and no bias is applied to 1,000,000 tokens. Which
# tensors of a million rows does autograd keep, and how many GiB? What would a softmax layer of
# FlashAttention's kind add? *(paper, ten minutes)*
# :::
#
# :::{solution} ex-train-kept
# :class: dropdown
#
# The input x, for the gradient of the first projection; q, k and v, which are slices of one tensor
# of width 1,536; and the output of `gdpa`, which is the input of the second projection. That is
# 512 + 1,536 + 512 numbers a row, {glue:text}`train_ex_kept:.2f` GiB. Softmax adds a log-sum-exp:
# 4 bytes for each head and row, with 4 heads {glue:text}`train_ex_lse:.3f` GiB. The difference
# between the two operators is small here; it is the row sum of $dO \odot O$, and reading the output
# for it, that GDPA does not need.
# :::

# %% tags=["remove-cell"]
glue("ex_kept", 1e6 * (512 + 1536 + 512) * 2 / 2**30)
glue("ex_lse", 1e6 * 4 * 4 / 2**30)
small_layer = GDPASelfAttention(512, 4, bias=False, dtype=torch.bfloat16)
leaf = torch.randn(sum(LENGTHS), 512).bfloat16().requires_grad_()
count, size = kept(lambda: small_layer((leaf, ENDS))[0], leaf, ENDS, *small_layer.parameters())
assert size == sum(LENGTHS) * (1536 + 512) * 2, (count, size)

# Exercise 2: own lengths, by the op.
some = [x.detach().double() for x in leaves(16)]
each = ENDS.diff().clamp(min=1).repeat_interleave(ENDS.diff())[:, None, None]
outside = gdpa(*some, *CALL) / each
inside = gdpa(*some[:2], some[2] / each, *CALL)
assert torch.allclose(outside, inside)

# Exercise 3: the wrong mask backward.
scores = torch.zeros(3, 2, dtype=torch.float64)  # three pairs that are masked by s = 0
slope = reference.ACTIVATIONS["gelu_tanh"].derivative(scores)
assert (slope == 0.5).all()

# %% [markdown]
# :::{exercise} Averages after all
# :label: ex-train-average
#
# A model is to have averages: the output of each sequence divided by its own length. Do it in two
# ways without changing the operator, one after it and one before it. Which one changes dK? *(code,
# ten minutes)*
# :::
#
# :::{solution} ex-train-average
# :class: dropdown
#
# Divide the rows of the output by the length of their sequence; or the rows of v, since the output
# is linear in v. Both give the same output and the same gradients: autograd carries the factor
# through either, to dQ, dK and dV. What must not be divided are the scores: inside the activation a
# factor makes another function ({doc}`../operator/gdpa`). An empty sequence has no rows to divide;
# with a shared q it has, and its length must be taken as 1.
# :::
#
# :::{exercise} Right forward, wrong backward
# :label: ex-train-mask
#
# Somebody masks padded pairs by setting their *scores* to 0 before GELU, and writes the backward
# pass by hand from the same masked scores. Which gradients are wrong, for padding that is zeros and
# for padding that is not? Why do tests of the output and of dV not find it? *(paper, fifteen
# minutes)*
# :::
#
# :::{solution} ex-train-mask
# :class: dropdown
#
# GELU(0) = 0, so the output is right, and dV = PᵀdO too. But GELU'(0) = 0.5: dS of a masked pair is
# half of dP, not 0. dQ adds dS K, so it is wrong by the masked keys; dK of real keys by the masked
# queries. If padded K, V and dO are zeros, dP and K vanish there, and everything is right by luck.
# With a causal mask, where masked keys exist, or with tiles that reach into the neighbour, it is
# wrong. Our rungs mask P and the slope ({doc}`../backward/by_hand`).
# :::
#
# ## Takeaways
#
# - An operator is ready for training when it has answers for what nobody thinks of: an expanded
#   gradient, a user without a history, a neighbour's NaN, offsets that change, a second derivative.
# - Nothing is kept but the arguments. What a step needs beside them can be counted, and was.
# - Sums count and averages do not. Divide by a constant of the model, not by a length of the batch.
# - A falling loss proves little. A loss that follows the reference's, step by step, does.
