# ---
# jupyter:
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # The operator in a model
#
# A kernel computes a function or its gradients. A model wants more: an operator that can be
# differentiated, compiled and cast, and that stops when it is called wrongly. What does that take?
#
# :::{admonition} In this chapter (15 minutes)
# You will count what autograd keeps, see a custom operator as `torch.compile` does, and know which
# questions to ask of any operator before you train with it.
# :::

# %% tags=["hide-input"]
from collections.abc import Callable

import pandas as pd
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

import tritonemu
from gdpa_kernels import PMA, GDPASelfAttention, gdpa
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.gdpa.batch import Batch
from gdpa_lab.measuring.inputs import cu_seqlens
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report import charts
from gdpa_lab.report.chapter import Chapter

# %% tags=["parameters"]
mode = "replay"
device = "cpu"
data_dir = "data"

# %% tags=["remove-cell"]
chapter = Chapter("training/op_in_a_model", mode=mode, device=device, data_dir=data_dir)
BACKWARD = [rung.impl for rung in ladder.BACKWARD_RUNGS]
BIG = workload("gdpa-self-full-1024")
rows = BIG.total_q * BIG.num_heads_q
held = {
    "gdpa": 0, "fused softmax: output, log-sum-exp": rows * (BIG.head_dim * 2 + 4),
    "PyTorch: scores, activations": 2 * 2 * rows * BIG.max_seqlen_k,
}  # fmt: skip
kept_gib = pd.Series(held) / 2**30
assert kept_gib["gdpa"] == 0 < kept_gib.iloc[1] < kept_gib.iloc[2], "the caption says so"

# %% tags=["remove-input"]
# | name: fig-train-kept
# | caption: >
# |   **GDPA leaves nothing behind for its backward pass; softmax leaves a tensor, and padded
# |   PyTorch all scores.** What autograd keeps for one call on full batches of 1,024 tokens, beside
# |   q, k and v.
# | alt: >
# |   Three horizontal bars in GiB: nothing for gdpa, a little more than one tensor for a fused
# |   softmax operator, by far the most for padded PyTorch.
chart = charts.bars(kept_gib, xlabel="GiB", highlight=["gdpa"], form=".2f")
chapter.figure(chart, modelled="bytes of the tensors, bf16", data=kept_gib.reset_index())

# %% [markdown]
# ## What autograd keeps
#
# The gradients are functions of the arguments and the incoming gradient
# ({doc}`../backward/by_hand`), so the forward pass need not save anything else.
# `saved_tensors_hooks` calls a function of yours for every tensor that autograd saves. These lines
# count the bytes of all that are not arguments:


# %%
def kept(function: Callable, *inputs: torch.Tensor) -> int:
    """Bytes that autograd keeps for `function`, beside those given."""
    of_inputs = {x.untyped_storage().data_ptr() for x in inputs}
    memory = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        memory[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        function()
    return sum(size for address, size in memory.items() if address not in of_inputs)


# %% tags=["remove-cell"]
torch.manual_seed(0)
LENGTHS = [40, 0, 7, 90, 23]
ENDS = cu_seqlens(LENGTHS, "cpu")
CALL = (ENDS, ENDS, max(LENGTHS), max(LENGTHS))


def leaves(dim: int = 64, heads: int = 2, dtype=torch.float32) -> list[torch.Tensor]:
    """q, k and v of the batch above."""
    shape = sum(LENGTHS), heads, dim
    return [torch.randn(shape).to(dtype).requires_grad_() for _ in range(3)]


def eager() -> torch.Tensor:
    """The same function from PyTorch's own operators, padded."""
    pad = nn.utils.rnn.pad_sequence
    q_, k_, v_ = (pad(x.split(LENGTHS), batch_first=True).transpose(1, 2) for x in (q, k, v))
    return F.gelu(q_ @ k_.mT * 64**-0.5, approximate="tanh") @ v_


def refusal(call: Callable[[], object]) -> str:
    """Error that a call raises, as a line."""
    try:
        call()
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    raise AssertionError("must be refused")


q, k, v = leaves()
ours, theirs = kept(lambda: gdpa(q, k, v, *CALL), q, k, v, ENDS), kept(eager, q, k, v)
assert ours == 0 and theirs > 4 * 3 * q.nbytes, "the text: its arguments and nothing else"
moved = ENDS.clone()
out = gdpa(q, k, v, moved, moved, *CALL[2:])
moved[1] = 30
changed = refusal(lambda: out.sum().backward()).split(":")[1].strip()
assert "modified by an inplace operation" in changed, "the text says so"
chapter.glue(theirs=theirs, given=3 * q.nbytes)

# %% [markdown]
# On {glue:text}`given:,.0f` bytes of q, k and v, `gdpa` keeps 0 bytes more, and padded PyTorch
# {glue:text}`theirs:,.0f`. A model may still keep the output, which the next linear layer needs for
# the gradient of its weight.
#
# If offsets are overwritten between the forward and the backward pass, `backward` raises an error
# instead of computing with the wrong lengths.
#
# ## An operator of PyTorch
#
# `gdpa` checks its arguments and calls one operator; its gradients come from a second one. Both are
# registered with `torch.library`, each with a schema and a *fake kernel* that knows shapes and no
# values. One call checks both against the real kernel:
#
# ```python
# torch.library.opcheck(torch.ops.gdpa_kernels.gdpa_forward.default, arguments)
# ```

# %% tags=["remove-cell"]
OPERATORS = torch.ops.gdpa_kernels.gdpa_forward, torch.ops.gdpa_kernels.gdpa_backward
with FakeTensorMode() as fake:
    shapes = [fake.from_tensor(x) for x in (*leaves(), ENDS)]
    assert gdpa(*shapes[:3], shapes[3], shapes[3], *CALL[2:]).shape == q.shape
tensors = (*(x.detach() for x in leaves(16)), *CALL[:2])
options = (None, *CALL[2:], "gelu_tanh", 0.25, 1.0, "", False, "v0_eager", "reference")
verdicts = torch.library.opcheck(OPERATORS[0].default, (*tensors, *options))
assert set(verdicts.values()) == {"SUCCESS"}, "the text says so"
graphs: list[tuple[str, list[str]]] = []


def noting(name: str) -> Callable:
    def compiler(module, _):
        called = [str(n.target) for n in module.graph.nodes if n.op == "call_function"]
        graphs.append((name, [target for target in called if "getitem" not in target]))
        return make_boxed_func(module.forward)

    return compiler


def loss_of(q, k, v, ends, longest):
    return (2 * gdpa(q, k, v, ends, ends, longest, longest)).sum()


torch._dynamo.reset()
backend = aot_autograd(fw_compiler=noting("forward"), bw_compiler=noting("backward"))
compiled = torch.compile(loss_of, fullgraph=True, dynamic=True, backend=backend)
for lengths in ([5, 0, 17, 6], [11, 3, 0, 0, 9, 2], [30] * 9):
    tensors = [torch.randn(sum(lengths), 2, 16, requires_grad=True) for _ in range(3)]
    compiled(*tensors, cu_seqlens(lengths, "cpu"), max(lengths)).backward()
assert [name for name, _ in graphs] == ["forward", "backward"], "the text: one graph each way"
assert sum("gdpa" in target for _, targets in graphs for target in targets) == 2
chapter.glue(checks=len(verdicts))

# %% [markdown]
# All {glue:text}`checks:.0f` of its tests pass. Under `torch.compile(fullgraph=True)`, which
# refuses any break in the graph, three batches of different sizes made one graph for the forward
# and one for the backward pass, each with the operator as a single node: new lengths compile
# nothing again. The host of a compiled program never reads the values of the offsets. A small
# kernel does, on the device and without waiting: offsets that do not fit stop the GPU with a
# sentence that names the argument. (For an exception that a program survives, check outside the
# compiled region: `Lengths(cu_seqlens)` does so once for all layers, {doc}`host_time`.)
#
# ## Only what is asked for
#
# A frozen embedding needs no gradient, and the operator passes `needs_input_grad` on. The kernels
# that each backward pass launches:

# %% tags=["remove-cell"]
half = leaves(128, 1, torch.bfloat16)


def launched(impl: str, needs: str) -> str:
    """Kernels that the backward pass launches if the arguments in `needs` want a gradient."""
    inputs = [x.detach().requires_grad_(n in needs) for n, x in zip("qkv", half, strict=True)]
    with tritonemu.enabled():
        out = gdpa(*inputs, *CALL, impl="v1_tiled", backward_impl=impl).sum()
        with launches() as seen:
            out.backward()
    return ", ".join(launch.name.removesuffix("_kernel") for launch in seen)


MATMULS = {"q": "S, dP, dQ", "k": "S, dP, dK", "v": "S, dV", "qkv": "S, dP, dV, dK, dQ"}
SHOWN = ("v1_tiled_backward", "v2_fused_backward", "v4_warp_specialized_backward")
kernels_run = {needs: [launched(impl, needs) for impl in SHOWN] for needs in MATMULS}
takes = [impl for impl in BACKWARD if ladder.rung(impl).takes("backward", "needs")]
*first, last = (impl.split("_")[0] for impl in takes)
chapter.glue(thrifty=f"backward {', '.join(first)} and {last}")
assert kernels_run["q"][0] == "queries" and kernels_run["v"][0] == "keys", "the text says so"
assert len({kernels[-1] for kernels in kernels_run.values()}) == 1, "the caption: v4 nothing"

# %% tags=["remove-input"]
frame = pd.DataFrame(kernels_run, index=[f"backward {impl.split('_')[0]}" for impl in SHOWN]).T
frame.insert(0, "matmuls needed", MATMULS)
chapter.table(
    frame.reset_index(names="gradients of"), name="tab-train-needs",
    caption="**Backward v1 leaves out a whole kernel, v4 nothing.** Kernels that a backward pass "
    "launches, by the arguments that need a gradient.",
    emulated="kernels of a backward pass",
)  # fmt: skip

# %% [markdown]
# The request reaches the kernels of {glue:text}`thrifty`. The others compute all three gradients,
# and the operator drops the rest.
#
# ## Gradients of any strides
#
# A kernel is tested with a contiguous gradient. The first one that a user sends is not:

# %%
seen = []
out = gdpa(q, k, v, *CALL)
out.register_hook(lambda grad: seen.append(grad.stride()))
out.sum().backward()
print(f"shape {list(out.shape)}, strides {seen[0]}")

# %% tags=["remove-cell"]
same = []
call = Batch(*half, *CALL, ("gelu_tanh",), 1.0)
for impl in (rung.impl for rung in ladder.BACKWARD_RUNGS if rung.call_problem(call) is None):
    with tritonemu.enabled():
        out = gdpa(*half, *CALL, impl="v1_tiled", backward_impl=impl)
        dense = torch.randn(*out.shape[::-1]).bfloat16()
        for grad in (out.detach()[:1, :, :1].expand_as(out), dense.permute(2, 1, 0)):
            one, other = (
                torch.autograd.grad(out, half, grad_out, retain_graph=True)
                for grad_out in (grad, grad.contiguous())
            )
            same.append(all(map(torch.equal, one, other)))
assert all(same), "the text: the bits of the contiguous copy"
single = leaves()
with torch.autocast("cpu", dtype=torch.bfloat16):
    out = gdpa(*single, *CALL)
out.float().sum().backward()
assert out.dtype == torch.bfloat16 and {x.grad.dtype for x in single} == {torch.float32}
chapter.glue(cases=len(same))

# %% [markdown]
# The gradient of a sum is one number, expanded to the shape of the output with strides of zero. A
# kernel that assumed contiguous rows would read beyond that number. In the emulator, an expanded
# and a transposed gradient give the bits of the contiguous copy in all {glue:text}`cases:.0f`
# cases. Backward v1 takes any strides; the others copy a gradient that {term}`TMA` cannot read, and
# nothing else. q, k and v may be strided too, so slices of one packed projection are read where
# they are. Under autocast they are cast as PyTorch's own attention casts them, and gradients come
# back in the type of the leaves.
#
# ## What is refused
#
# A call that cannot be computed can fail in `backward()`, an hour later, or at once:

# %% tags=["remove-cell"]
(dq,) = torch.autograd.grad(gdpa(q, k, v, *CALL).sum(), q, create_graph=True)
layer = GDPASelfAttention(32, 4, max_seqlen=90)
tokens = torch.randn(sum(LENGTHS), 32)
WRONG = {
    "second derivative": lambda: dq.square().sum().backward(),
    "GPU kernel on a CPU": lambda: gdpa(q, k, v, *CALL, backward_impl="v1_tiled_backward"),
    "not a jagged batch": lambda: layer(tokens),
    "longer than allowed": lambda: GDPASelfAttention(32, 4, max_seqlen=64)((tokens, ENDS)),
    "heads do not divide": lambda: PMA(32, 5, 3),
}
says = {name: refusal(call) for name, call in WRONG.items()}
refusal(lambda: torch.func.jvp(lambda x: gdpa(x, k, v, *CALL), (q.detach(),), (q.detach(),)))

# %% tags=["remove-input"]
shown = pd.DataFrame({"wrong": list(says), "error": [f"``{text}``" for text in says.values()]})
chapter.table(
    shown, name="tab-train-refused",
    caption="**Each wrong call names what must be given and what it got.** Errors of `gdpa` and of "
    "the layers.", computed="calls on a CPU",
)  # fmt: skip

# %% [markdown]
# The first error comes when the second derivative is *used*, not when `create_graph=True` allows
# it, since much code sets that flag and never differentiates. Forward-mode differentiation is
# refused by PyTorch itself.
#
# ## Exercises
#
# :::{exercise} What is kept by two layers
# :label: ex-train-kept
#
# A `GDPASelfAttention` of bf16, width 512, and no bias is applied to 1,000,000 tokens. Which
# tensors of a million rows does autograd keep, and how many GiB? What would a fused softmax layer
# with 4 heads add? *(paper, ten minutes)*
# :::

# %% tags=["remove-cell"]
small = GDPASelfAttention(512, 4, bias=False, dtype=torch.bfloat16)
leaf = torch.randn(sum(LENGTHS), 512).bfloat16().requires_grad_()
size = kept(lambda: small((leaf, ENDS)), leaf, ENDS, *small.parameters())
assert size == sum(LENGTHS) * (1536 + 512) * 2, "the answer says so"

# %% [markdown]
# :::{solution} ex-train-kept
# :class: dropdown
#
# The input x, for the gradient of the first projection; q, k and v, slices of one tensor of width
# 1,536; and the output of `gdpa`, which is the input of the second projection. That is 512 +
# 1,536 + 512 numbers a row, 4.77 GiB. Softmax adds a log-sum-exp, 4 bytes per head and row: 0.015
# GiB. GDPA's real saving is the row sum of $dO \odot O$, and reading the output for it.
# :::
#
# :::{exercise} Only the queries are trained
# :label: ex-train-frozen
#
# k and v come from a frozen tower. Which of the five matmuls of the backward pass are needed, and
# what share of its FLOPs? What remains of it in backward v1, and in v4? *(paper, with
# {numref}`tab-train-needs`; five minutes)*
# :::
#
# :::{solution} ex-train-frozen
# :class: dropdown
#
# S, dP and dQ, three of five, 60 %. Backward v1 launches the kernel over queries alone. Backward v4
# launches the same kernels as ever and computes all five.
# :::
#
# ## Takeaways
#
# - An operator is ready for training when it can answer for an expanded gradient, offsets that
#   change, a second derivative, a frozen input.
# - Count what autograd keeps before you optimise it.
# - Refuse early: an error belongs to the call that caused it.
