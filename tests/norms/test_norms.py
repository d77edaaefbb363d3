"""`add_rms_norm` and `head_norm`: against fp64, in the emulator or on a GPU, and with PyTorch."""

import contextlib
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tritonemu
from gdpa_kernels import gdpa
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.layers.rotary import rotate
from gdpa_kernels.norms import heads, residual
from gdpa_kernels.norms.api import add_rms_norm, head_norm
from gdpa_lab.measuring.compile_check import build_launch, read
from tests.budget import within_budget
from tests.calls import assert_same_bits
from tests.tiers import sweep

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
EPS = 1e-6


def kernels_run():
    """The context in which kernels run on DEVICE."""
    return contextlib.nullcontext() if DEVICE == "cuda" else tritonemu.enabled(multiprocessors=1)


by_both = pytest.mark.parametrize("kernel", (True, False), ids=("kernel", "pytorch"))


def run_by(kernel: bool):
    return kernels_run() if kernel else contextlib.nullcontext()


def draw(*shape, dtype=FP32):
    return torch.randn(*shape).to(DEVICE, dtype)


def gradients(function, inputs, grads):
    """The results of function(*inputs) and the gradients of all inputs that are tensors."""
    given = [x if x is None else x.clone().requires_grad_() for x in inputs]
    out = function(*given)
    wanted = [x for x in given if x is not None]
    grads = [g.to(y.dtype) for g, y in zip(grads, out, strict=True)]
    found = torch.autograd.grad(out, wanted, grads)
    return [x.detach() for x in (*out, *found)]


def against_fp64(names, function, definition, inputs, grads, context):
    """Twice the error of PyTorch in these dtypes, of every result and gradient."""
    three = by_three(function, definition, inputs, grads, context)
    within_budget(lambda _: three, names, most=1)


def by_three(function, definition, inputs, grads, context):
    """Results and gradients of the function, of the definition in fp64, and of PyTorch."""
    with context:
        actual = gradients(function, inputs, grads)
    wide = [x if x is None else x.double() for x in inputs]
    expected = gradients(definition, wide, grads)
    baseline = gradients(definition, inputs, grads)
    assert [x.dtype for x in actual] == [x.dtype for x in baseline]
    return actual, expected, baseline


ADD = partial(add_rms_norm, eps=EPS)


def added(x, residual, weight):
    stream = x if residual is None else (x + residual).to(residual.dtype)
    y = F.rms_norm(stream, stream.shape[-1:], None, EPS)
    return (y if weight is None else y * weight.to(y.dtype)).to(x.dtype), stream


def names_of(residual, weight):
    names = ["y", "stream", "grad x", "grad residual", "grad weight"]
    return [n for n, there in zip(names, (1, 1, 1, residual, weight), strict=True) if there]


@by_both
@pytest.mark.parametrize("weighted", (True, False), ids=("weight", "plain"))
@pytest.mark.parametrize("second", (BF16, FP32, None), ids=("add bf16", "add fp32", "alone"))
def test_add_rms_norm(second, weighted, kernel):
    x = draw(2, 19, 96, dtype=BF16)
    r = None if second is None else draw(2, 19, 96, dtype=second)
    w = 0.5 + torch.rand(96, device=DEVICE) if weighted else None
    grads = draw(2, 2, 19, 96).unbind()
    names = names_of(r is not None, weighted)
    against_fp64(names, ADD, added, (x, r, w), grads, run_by(kernel))


@pytest.mark.parametrize("dtype", (FP16, FP32), ids=str)
@pytest.mark.parametrize("rows, width", ((7, 64), (3, 512), (2, 8192), (3, 1000)))
def test_add_rms_norm_of_other_widths(rows, width, dtype):
    x, r = draw(2, rows, width, dtype=dtype)
    w = 0.5 + torch.rand(width, device=DEVICE)
    grads = draw(2, rows, width).unbind()
    against_fp64(names_of(1, 1), ADD, added, (x, r, w), grads, kernels_run())


def normalised(counts, turns, head_dim):
    def definition(x, *weights):
        parts = x.unflatten(1, (-1, head_dim)) if x.dim() == 2 else x
        rest = parts.shape[1] - sum(counts)
        *normed, last = parts.split((*counts, rest), 1)
        normed = [
            F.rms_norm(part, (head_dim,), weight.to(part.dtype), EPS)
            for part, weight in zip(normed, weights, strict=True)
        ]
        if turns is not None:
            turned = (t.to(FP64) if x.dtype == FP64 else t for t in turns)
            sin, cos = turned
            normed = [rotate(part, sin, cos) for part in normed]
        return (torch.cat((*normed, last), 1).view(x.shape),)

    return definition


def turns_of(total, head_dim):
    angles = 6 * torch.rand(total, head_dim // 2, device=DEVICE)
    return angles.sin(), angles.cos()


@by_both
@pytest.mark.parametrize("rotary", (False, True), ids=("plain", "rotary"))
@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=str)
@pytest.mark.parametrize(
    "head_dim, counts, others, flat",
    ((128, (4, 4), 4, True), (48, (2, 1), 1, False), (16, (3,), 0, True), (64, (2,), 2, False)),
    ids=str,
)
def test_head_norm(head_dim, counts, others, flat, dtype, rotary, kernel):
    total, all_heads = 11, sum(counts) + others
    shape = (total, all_heads * head_dim) if flat else (total, all_heads, head_dim)
    x, grad = draw(2, *shape, dtype=dtype)
    weights = 0.5 + torch.rand(len(counts), head_dim, device=DEVICE)
    turns = turns_of(total, head_dim) if rotary else None
    function = lambda x, *w: (head_norm(x * 1, w, counts, turns, eps=EPS),)  # noqa: E731
    names = ["y", "grad x", "grad q weight", "grad k weight"][: 2 + len(counts)]
    definition = normalised(counts, turns, head_dim)
    against_fp64(names, function, definition, (x, *weights), (grad,), run_by(kernel))


@by_both
@pytest.mark.parametrize("rotary", (False, True), ids=("plain", "rotary"))
@pytest.mark.parametrize("small", (0.0, 1e-12, -1e-3, 30.0))
def test_weights_of_any_size_have_their_gradients(small, rotary, kernel):
    """From what is left in bf16 of rows that were normalised in place."""
    x, grad = draw(2, 9, 3 * 32, dtype=BF16)
    weights = torch.ones(2, 32, device=DEVICE)
    weights[0, ::3] = small
    turns, counts = turns_of(9, 32) if rotary else None, (1, 1)
    function = lambda x, *w: (head_norm(x * 1, w, counts, turns, eps=EPS),)  # noqa: E731
    definition, names = normalised(counts, turns, 32), ("y", "grad x", "grad q", "grad k")
    against_fp64(names, function, definition, (x, *weights), (grad,), run_by(kernel))


def test_in_place_and_nothing_else_is_touched():
    x = draw(10, 3, 64, dtype=BF16)
    wide = torch.full((10, 5, 64), torch.nan, dtype=BF16, device=DEVICE)
    wide[:, 1:4] = x
    with kernels_run(), launches() as seen:
        y = head_norm(wide[:, 1:4], (torch.ones(64, device=DEVICE),), (2,))
    assert y.data_ptr() == wide[:, 1].data_ptr() and len(seen) == 1
    assert torch.equal(y[:, 2], x[:, 2]) and not torch.equal(y[:, :2], x[:, :2])
    assert wide[:, [0, 4]].isnan().all() and not y.isnan().any()


def test_a_gradient_is_overwritten_only_where_it_may_be():
    weight, x = torch.ones(64, device=DEVICE), draw(10, 128, dtype=BF16).requires_grad_()
    for overwrite in (True, False):
        y = head_norm(x.clone(), (weight,), (2,), overwrite_gradient=overwrite)
        grad = draw(10, 128, dtype=BF16)
        before = grad.clone()
        with kernels_run():
            (found,) = torch.autograd.grad(y, x, grad)
        assert torch.equal(grad, before) is not overwrite
        assert (found.data_ptr() == grad.data_ptr()) is overwrite
        (again,) = torch.autograd.grad(head_norm(x * 1, (weight,), (2,)), x, before)
        torch.testing.assert_close(found, again, atol=0.02, rtol=0.02)


def test_what_was_saved_before_says_that_it_has_changed():
    x = draw(4, 64).requires_grad_()
    y = x.exp()  # saves its result
    head_norm(y, (torch.ones(64, device=DEVICE),), (1,)).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_gradients_have_the_same_bits_in_every_run():
    x, r = draw(2, 300, 64, dtype=BF16)
    weight = torch.ones(64, device=DEVICE)
    with kernels_run():
        _, stream, rstd = residual.forward(x, r, weight, EPS, BF16)
        runs = [residual.backward(x, r, stream, rstd, weight)[2] for _ in range(2)]
    assert torch.equal(*runs)


@by_both
def test_no_rows(kernel):
    with run_by(kernel):
        x, weight = draw(0, 64).requires_grad_(), torch.ones(64, device=DEVICE, requires_grad=True)
        y, stream = add_rms_norm(x, x * 2, weight)
        assert y.shape == stream.shape == (0, 64)
        out = head_norm(y * 1, (weight,), (1,))
        assert torch.equal(torch.autograd.grad(out.sum(), weight)[0], torch.zeros_like(weight))


def test_gradients_that_are_missing():
    x, r = (draw(5, 64, dtype=BF16).requires_grad_() for _ in range(2))
    weight = torch.ones(64, device=DEVICE)
    with kernels_run():
        y, stream = add_rms_norm(x, r, weight)
        grad = torch.ones_like(y)
        only_stream = torch.autograd.grad(stream, (x, r), grad, retain_graph=True)
        assert all(torch.equal(g, grad) for g in only_stream)
        only_y = torch.autograd.grad(y, (x, r), grad, retain_graph=True)
        both = torch.autograd.grad((y, stream), (x, r), (grad, grad))
        assert torch.equal(only_y[0], only_y[1]) and torch.equal(both[0], both[1])
        torch.testing.assert_close(both[0], only_y[0] + 1, atol=0.02, rtol=0.02)


def test_autocast_takes_its_dtype_and_leaves_the_stream():
    r, weight = draw(5, 64).requires_grad_(), torch.ones(64, device=DEVICE)
    with kernels_run(), torch.autocast(DEVICE, BF16):
        y, stream = add_rms_norm(r, None, weight)
        assert (y.dtype, stream.dtype) == (BF16, FP32)
        y, stream = add_rms_norm(y, stream, weight)
        assert (y.dtype, stream.dtype) == (BF16, FP32)
        assert head_norm(stream * 1, (weight,), (1,)).dtype == FP32
        y, stream = add_rms_norm(r.double(), None)
        assert (y.dtype, stream.dtype) == (FP64, FP64)


def model():
    linear = torch.nn.Linear(32, 96, device=DEVICE)
    weights = [0.5 + torch.rand(n, device=DEVICE) for n in (32, 8, 8)]
    parameters = [w.requires_grad_() for w in weights] + [linear.weight]
    ends = torch.tensor([0, 5, 12], dtype=torch.int32, device=DEVICE)

    def step(x, r):
        y, stream = add_rms_norm(x, r, weights[0])
        z, stream = add_rms_norm(stream, None, weights[0])
        qkv = head_norm(linear(y + z), weights[1:], (4, 4), overwrite_gradient=True)
        qkv = qkv.unflatten(1, (-1, 8))
        out = gdpa(qkv, None, None, ends, ends, 7, 7, impl="reference", validate=False)
        return out.flatten(1) + stream

    return step, parameters


def test_compiled_checkpointed_and_eager_are_the_same():
    step, parameters = model()
    x, r = draw(2, 12, 32)
    inputs = [t.clone().requires_grad_() for t in (x, r)]
    found = []
    for call in (
        step,
        torch.compile(step, backend="aot_eager", fullgraph=True),
        lambda *given: checkpoint(step, *given, use_reentrant=False),
    ):
        out = call(*inputs)
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs + parameters)])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b)


def test_one_graph_for_any_number_of_rows():
    linear, weight = torch.nn.Linear(32, 32, device=DEVICE), torch.ones(8, device=DEVICE)

    def norms(x, sin, cos):
        y, stream = add_rms_norm(x, None, torch.ones(32, device=DEVICE))
        y, stream = add_rms_norm(y, stream)
        return head_norm(linear(y), (weight, weight), (2, 1), (sin, cos)) + stream

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(norms, backend=counter, fullgraph=True, dynamic=True)
    counts = []
    for rows in (5, 7, 30):
        x, turns = draw(rows, 32).requires_grad_(), turns_of(rows, 8)
        given = [torch.autograd.grad(f(x, *turns).sum(), x)[0] for f in (compiled, norms)]
        torch.testing.assert_close(*given)
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1, counts


def test_opcheck():
    x, r, weight = draw(3, 64), draw(3, 64, dtype=BF16), torch.ones(64, device=DEVICE)
    rstd, ops = torch.ones(3, device=DEVICE), torch.ops.gdpa_kernels
    turns = turns_of(3, 16)
    calls = (
        (ops.add_rms_norm_forward, (x, r, weight, EPS, BF16)),
        (ops.add_rms_norm_forward, (x, None, None, EPS, FP32)),
        (ops.add_rms_norm_backward, (x, r, r, rstd, weight, FP32)),
        (ops.add_rms_norm_backward, (x, None, r, rstd, None, None)),
        (ops.head_norm_forward, (x, weight[:16], weight[:16], *turns, 2, 1, EPS)),
        (ops.head_norm_forward, (x, weight[:16], None, None, None, 2, 0, EPS)),
        (ops.head_norm_copy, (x, weight[:16], weight[:16], *turns, 2, 1, EPS)),
        (ops.head_norm_copy, (x.view(3, 4, 16)[:, :3], weight[:16], None, None, None, 2, 0, EPS)),
        (ops.head_norm_backward, (x, x * 2, rstd[:, None].expand(3, 2), weight[:16], None, None,
                                  None, 2, 0)),
    )  # fmt: skip
    for op, arguments in calls:
        torch.library.opcheck(op.default, arguments)


def test_one_row_alone():
    x, weight = draw(64), torch.rand(64, device=DEVICE)
    found, wanted = add_rms_norm(x, x, weight), add_rms_norm(x[None], x[None], weight)
    assert_same_bits(found, [y[0] for y in wanted])


def test_a_second_derivative_is_refused():
    x, weight = draw(3, 64).requires_grad_(), torch.ones(64, device=DEVICE)
    for y in (add_rms_norm(x, None, weight)[0], head_norm(x * 1, (weight,), (1,))):
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            grad.sum().backward()


X, W = torch.zeros(3, 64), torch.zeros(16)
ADD_ERRORS = (
    (TypeError, "x must be a tensor, got list", ([1], None)),
    (TypeError, "x must have a floating-point dtype, got torch.int64", (X.long(), None)),
    (ValueError, "x must have shape [..., width], got []", (X[0, 0], None)),
    (ValueError, "residual must have shape [3, 64], got [2, 64]", (X, X[:2])),
    (TypeError, "residual must be float64 like x or neither, got torch.float64", (X, X.double())),
    (ValueError, "weight must have shape [64], got [16]", (X, None, W)),
)
HEAD_ERRORS = (
    (TypeError, "weights must be a tuple of one or two tensors, got ()", (X, (), ())),
    (ValueError, "x must have shape [total, heads, 16] or [..., heads * 16], got [3, 60]",
     (X[:, :60], (W,), (1,))),
    (TypeError, "counts must be a tuple of 1 integers, got (1, 2)", (X, (W,), (1, 2))),
    (ValueError, "counts must be integers of at least 1, got (0,)", (X, (W,), (0,))),
    (ValueError, "counts must sum to at most x's 4 heads, got (4, 1)", (X, (W, W), (4, 1))),
    (ValueError, "weights[1] must have shape [16], got [8]", (X, (W, W[:8]), (1, 1))),
    (ValueError, "sin must have shape [3, 8], got [2, 8]",
     (X, (W,), (1,), (torch.zeros(2, 8), torch.zeros(3, 8)))),
    (ValueError, "turns must not require gradients, which they do not get; got a cos that does: "
     "use cos.detach()", (X, (W,), (1,), (torch.zeros(3, 8), torch.zeros(3, 8).requires_grad_()))),
    (ValueError, "weights[0] must have an even head_dim for turns, got 1",
     (X, (W[:1],), (1,), (X, X))),
)  # fmt: skip


@pytest.mark.parametrize("function", (add_rms_norm, head_norm))
@pytest.mark.parametrize("eps", (-1.0, float("nan"), float("inf")))
def test_errors_of_eps(function, eps):
    given = (X, None) if function is add_rms_norm else (X.clone(), (W,), (1,))
    with pytest.raises(ValueError, match="eps must be"):
        function(*given, eps=eps)


def test_a_flag_is_a_bool():
    with pytest.raises(TypeError, match="overwrite_gradient must be a bool, got 'no'"):
        head_norm(X.clone(), (W,), (1,), overwrite_gradient="no")


@pytest.mark.parametrize(
    "function, error, message, given",
    [(f, *e) for f, errors in ((add_rms_norm, ADD_ERRORS), (head_norm, HEAD_ERRORS))
     for e in errors],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_errors(function, error, message, given):
    with pytest.raises(error) as found:
        function(*given)
    assert str(found.value) == message


def compiled(capability, stream, turned):
    """The four kernels at a width of 512, as launched, compiled."""
    x, r = torch.zeros(64, 512, dtype=BF16), torch.zeros(64, 512, dtype=stream)
    qkv, rows = torch.zeros(64, 12, 128, dtype=BF16), torch.zeros(64)
    w, v = torch.zeros(512), torch.zeros(128)
    turns = (torch.zeros(64, 64),) * 2 if turned else (None, None)
    other = None if stream == BF16 else BF16
    with launches(run=False) as seen:
        residual.forward(x, r, w, EPS, BF16)
        residual.backward(x, r, r, rows, w, other)
        heads.forward(qkv, v, v, (4, 4), turns, EPS, 0.0)
        heads.backward(qkv, qkv, torch.zeros(64, 8), v, v, (4, 4), turns, 0.0)
    return {launch.name: read(build_launch(launch, capability=capability)) for launch in seen}


@pytest.mark.parametrize(
    "capability, stream, turned", (sweep(90, BF16, False), (90, FP32, True), sweep(100, BF16, True))
)
def test_rows_move_in_16_bytes_a_thread(capability, stream, turned):
    for name, made in compiled(capability, stream, turned).items():
        assert made.spill_bytes == 0, name
        other_loads = made.instructions["LDG"] - made.wide["LDG"]
        other_stores = made.instructions["STG"] - made.wide["STG"]
        assert made.wide["LDG"] >= 2 and made.wide["STG"] >= 1, name
        assert other_loads <= 4, f"{name}: of rstd and weights alone, got {other_loads}"
        assert other_stores <= 2, f"{name}: of rstd and partial sums alone, got {other_stores}"


def test_memory_that_elements_share_is_refused():
    weight = torch.ones(64, device=DEVICE)
    shared = (draw(1, 3, 64).expand(5, 3, 64), draw(5 * 64).as_strided((5, 1, 64), (32, 64, 1)))
    for x in shared:
        with pytest.raises(ValueError, match="x must have memory of its own for each element, got"):
            head_norm(x, (weight,), (1,))
    own = (draw(64, 3, 5).permute(2, 1, 0), draw(0, 3, 64), draw(5, 1, 128)[..., :64])
    for x in own:
        head_norm(x, (weight,), (1,))


@pytest.mark.parametrize("dtype, most", ((BF16, 2**-9), (torch.float16, 2**-12)), ids=str)
@by_both
def test_the_gradient_of_a_weight_is_as_good_as_the_rounding_of_x(kernel, dtype, most):
    x, weight = draw(300, 2, 64, dtype=dtype), torch.rand(64, device=DEVICE) + 0.5
    grad, exact = draw(300, 2, 64, dtype=dtype), x.double()
    normalised = exact * (exact.square().mean(2, keepdim=True) + EPS).rsqrt()
    wanted = (grad.double() * normalised).sum((0, 1))
    weight.requires_grad_()
    with run_by(kernel):
        y = head_norm(x.clone(), (weight,), (2,))
        (found,) = torch.autograd.grad(y, weight, grad)
    assert (found - wanted).norm() <= most * wanted.norm()
