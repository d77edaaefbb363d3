"""`norm_mul`: against fp64 and PyTorch, in the emulator or on a GPU, compiled and as operators."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gdpa_kernels.calling.launches import launches
from gdpa_kernels.norms import gated
from gdpa_kernels.norms.common import Form
from gdpa_kernels.norms.norm_mul import CONCATS, norm_mul
from gdpa_lab.measuring.compile_check import build_launch, read
from tests.budget import within_budget
from tests.norms.test_norms import (
    BF16,
    DEVICE,
    EPS,
    FP16,
    FP32,
    FP64,
    against_fp64,
    by_both,
    by_three,
    draw,
    kernels_run,
    run_by,
)  # fmt: skip
from tests.tiers import sweep

NAMES = ["y", "grad x", "grad u", "grad weight", "grad bias"]


def defined(heads, concat, norm="layer", silu=False, scale=None):
    """The parts by PyTorch's operators."""

    def definition(x, u, weight=None, bias=None):
        dtype = x.dtype
        a = x if scale is None else x * scale.to(dtype)
        gate = F.silu(u) if silu else u
        rows = a.unflatten(1, (heads or 1, -1))
        by_name = {"layer": F.layer_norm, "rms": F.rms_norm}
        n = by_name[norm](rows, rows.shape[2:], eps=EPS)
        if weight is not None:
            n = n * weight.to(dtype).view(1, heads or 1, -1)
        if bias is not None:
            n = n + bias.to(dtype).view(1, heads or 1, -1)
        n = n.flatten(1)
        parts = {"u": gate, "a": a, "n": n, "un": n * gate}
        return (torch.cat([parts[name].to(dtype) for name in concat], 1),)

    return definition


def ours(heads, concat, **options):
    return lambda *tensors: (norm_mul(*tensors, heads=heads, concat=concat, eps=EPS, **options),)


@by_both
@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=str)
@pytest.mark.parametrize(
    "heads, concat, width, options",
    (
        (None, ("un",), 64, {}),
        (None, ("u", "a", "un"), 96, {"silu": True}),
        (3, ("u", "a", "un"), 96, {"silu": True}),
        (None, ("u", "n", "un"), 40, {}),
        (11, ("un",), 33, {"norm": "rms", "silu": True}),
    ),
    ids=str,
)
def test_every_form_of_the_layers(heads, concat, width, options, dtype, kernel):
    options = options | {"scale": torch.tensor(0.03, device=DEVICE)}
    functions = ours(heads, concat, **options), defined(heads, concat, **options)

    def drawn(_):
        x, u = 30 * draw(19, width, dtype=dtype), draw(19, width, dtype=dtype)
        weight, bias = 0.5 + torch.rand(heads or width, device=DEVICE), draw(heads or width)
        grad = draw(19, width * len(concat), dtype=dtype)
        return by_three(*functions, (x, u, weight, bias), (grad,), run_by(kernel))

    # Gradients of few weights are few elements.
    within_budget(drawn, NAMES, least=19 * width * len(concat) * (8 if heads else 1))


@pytest.mark.parametrize("rows, width", ((7, 1), (5, 512), (2, 8192)))
def test_other_widths_without_weights(rows, width):
    x, u = draw(2, rows, width, dtype=FP32)
    grad = draw(rows, width)
    form = None, ("un",)
    against_fp64(NAMES[:3], ours(*form), defined(*form), (x, u), (grad,), kernels_run())


@by_both
def test_a_slice_of_wider_rows_is_read_where_it_lies(kernel):
    wide, x = draw(9, 3 * 64, dtype=BF16), draw(9, 64, dtype=BF16)
    with run_by(kernel), launches() as seen:
        found = norm_mul(x, wide[:, 64:128])
        assert not kernel or len(seen) == 1
    assert torch.equal(found, run(kernel, x, wide[:, 64:128].contiguous()))
    apart = draw(64, 9, dtype=BF16).T
    assert torch.equal(run(kernel, x, apart), run(kernel, x, apart.contiguous()))


def run(kernel, *tensors, **options):
    with run_by(kernel):
        return norm_mul(*tensors, **options)


def test_one_over_n_is_a_scale_or_a_part_of_eps():
    """norm(a / N) with eps is norm(a) with eps N ** 2."""
    x, u = 1e-4 * draw(5, 32, dtype=FP64), draw(5, 32, dtype=FP64)
    scaled = norm_mul(x, u, scale=torch.tensor(1 / 300, device=DEVICE, dtype=FP64))
    torch.testing.assert_close(scaled, norm_mul(x, u, eps=EPS * 300**2), rtol=1e-13, atol=0)
    assert not torch.allclose(scaled, norm_mul(x, u), rtol=0.1)


@by_both
@pytest.mark.parametrize("concat", CONCATS, ids=str)
def test_dropout_drops_the_same_elements_in_both_directions(concat, kernel):
    x, u = (draw(50, 64).requires_grad_() for _ in range(2))
    torch.manual_seed(3)
    with run_by(kernel):
        y = norm_mul(x, u, concat=concat, dropout_p=0.25)
        whole = norm_mul(x, u, concat=concat)
        keep = (y != 0).float()
        torch.testing.assert_close(y, whole * keep / 0.75)
        assert 0.7 < keep.mean() < 0.8
        grad = draw(*y.shape)
        found = torch.autograd.grad(y, (x, u), grad)
        wanted = torch.autograd.grad(whole, (x, u), grad * keep / 0.75)
    torch.testing.assert_close(found, wanted)
    torch.manual_seed(3)
    assert torch.equal(run(kernel, x, u, concat=concat, dropout_p=0.25), y)


def test_gradients_have_the_same_bits_in_every_run():
    x, u = (draw(300, 64, dtype=BF16) for _ in range(2))
    weight = torch.ones(64, device=DEVICE, requires_grad=True)
    with kernels_run():
        y = norm_mul(x, u, weight, weight * 2)
        grads = [torch.autograd.grad(y, weight, x, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*grads)


@by_both
def test_no_rows(kernel):
    weight = torch.ones(32, device=DEVICE, requires_grad=True)
    x = draw(0, 32).requires_grad_()
    with run_by(kernel):
        y = norm_mul(x, x, weight, concat=("u", "a", "un"))
        assert y.shape == (0, 96)
        grads = torch.autograd.grad(y.sum(), (x, weight))
    assert torch.equal(grads[1], torch.zeros_like(weight))


def test_autocast_takes_its_dtype():
    x = draw(5, 32)
    with torch.autocast(DEVICE, BF16):
        assert norm_mul(x, x).dtype == BF16 and norm_mul(x.double(), x.double()).dtype == FP64


def step(x, u, weight, scale):
    y = norm_mul(x, u, weight, weight, concat=("u", "a", "un"), silu=True, scale=scale)
    return y.square().sum() + norm_mul(u, u, norm="rms").sum()


def test_compiled_checkpointed_and_eager_are_the_same():
    x, u = (draw(12, 32).requires_grad_() for _ in range(2))
    weight, scale = draw(32).requires_grad_(), torch.tensor(0.1, device=DEVICE)
    found = []
    for call in (
        step,
        torch.compile(step, backend="aot_eager", fullgraph=True),
        lambda *each: checkpoint(step, *each, use_reentrant=False),
    ):
        out = call(x, u, weight, scale)
        found.append([out, *torch.autograd.grad(out, (x, u, weight))])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b)


def test_one_graph_for_any_number_of_rows_and_any_n():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    counts = []
    for rows in (5, 7, 30):
        x, weight = draw(rows, 32).requires_grad_(), draw(32)
        scale = torch.tensor(1 / rows, device=DEVICE)
        grads = [torch.autograd.grad(f(x, x, weight, scale), x)[0] for f in (compiled, step)]
        torch.testing.assert_close(*grads)
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1, counts


def test_opcheck():
    ops, rows = torch.ops.gdpa_kernels, torch.ones(6, device=DEVICE)
    x, u, keep = draw(3, 64), draw(3, 128)[:, 64:], torch.ones(3, 192, dtype=torch.uint8).to(DEVICE)
    weight, scale = torch.ones(2, device=DEVICE), torch.tensor(0.1, device=DEVICE)
    full = "u,a,un", True, True, 2, EPS, 1.25
    plain = "un", False, False, 0, EPS, 1.0
    calls = (
        (ops.norm_mul_forward, (x, u, scale, weight, weight, keep, *full, BF16)),
        (ops.norm_mul_forward, (x, u, None, None, None, None, *plain, FP32)),
        (ops.norm_mul_backward, (draw(3, 192), x, u, scale, weight, weight, keep, rows, rows,
                                 *full)),
        (ops.norm_mul_backward, (x, x, u, None, None, None, None, rows[:0], rows[:3], *plain)),
    )  # fmt: skip
    for op, arguments in calls:
        torch.library.opcheck(op.default, arguments)


def test_a_second_derivative_is_refused():
    x = draw(3, 64).requires_grad_()
    (grad,) = torch.autograd.grad(norm_mul(x, x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="norm_mul has no second derivative"):
        grad.sum().backward()


X = torch.zeros(3, 64)


@pytest.mark.parametrize(
    "error, message, tensors, options",
    (
        (ValueError, "x must have shape [tokens, width], got [64]", (X[0], X[0]), {}),
        (ValueError, "u must have shape [3, 64], got [2, 64]", (X, X[:2]), {}),
        (ValueError, "weight must have shape [64], got [3]", (X, X, X[:, 0]), {}),
        (ValueError, "weight must have shape [4], got [64]", (X, X, X[0]), {"heads": 4}),
        (ValueError, "heads must divide x's width 64, got 3", (X, X), {"heads": 3}),
        (TypeError, "u must be float64 like x or neither, got torch.float64", (X, X.double()), {}),
        (ValueError, "concat must be one of ('un',), ('u', 'a', 'un'), ('u', 'n', 'un'), got 'un'",
         (X, X), {"concat": "un"}),
        (ValueError, "norm must be one of layer, rms, got 'group'", (X, X), {"norm": "group"}),
        (ValueError, "scale must hold one number on cpu, got [3] on cpu", (X, X),
         {"scale": X[:, 0]}),
        (ValueError, "dropout_p must be at least 0 and less than 1, got 1.0", (X, X),
         {"dropout_p": 1.0}),
        (TypeError, "silu must be a bool, got 'u'", (X, X), {"silu": "u"}),
    ),
)  # fmt: skip
def test_errors(error, message, tensors, options):
    with pytest.raises(error) as raised:
        norm_mul(*tensors, **options)
    assert str(raised.value) == message


FORMS = {
    "STU": (Form(u=True, a=True, silu=True), 512),
    "STU of heads": (
        Form(u=True, a=True, silu=True, heads=4, weights_of_heads=True, dropout_scale=1.25),
        512,
    ),
    "recsys-examples": (Form(), 1024),
}


@pytest.mark.parametrize("capability", (sweep(80), 90, sweep(100)))
@pytest.mark.parametrize("name", FORMS)
def test_rows_move_in_wide_accesses(name, capability):
    """16 bytes a thread; in backward of several parts 8, which is faster."""
    form, width = FORMS[name]
    x = torch.zeros(64, width, dtype=BF16)
    u = torch.zeros(64, 4 * width, dtype=BF16)[:, :width]
    parts = torch.zeros(64, form.parts * width, dtype=BF16)
    weight = torch.zeros(form.heads if form.weights_of_heads else width)
    keep = parts.to(torch.uint8) if form.dropout_scale != 1 else None
    rows, scale = torch.zeros(64 * form.heads), torch.ones(())
    with launches(run=False) as seen:
        gated.forward(x, u, scale, weight, weight, keep, form, BF16)
        gated.backward(parts, x, u, scale, weight, weight, keep, rows, rows, form)
    for launch in seen:
        built = read(build_launch(launch, capability=capability))
        assert built.spill_bytes == 0, launch.name
        others = built.instructions["LDG"] - built.wide["LDG"]
        narrow = 4 + form.weights_of_heads * 8  # the mask's bytes, and numbers of rows and heads
        if launch.name == "norm_mul_backward_kernel" and form.parts > 1:
            assert others <= 5 + narrow and built.instructions["STG"] <= 4, launch.name
            continue
        assert built.wide["LDG"] >= 2 and others <= narrow, launch.name
        assert built.instructions["STG"] - built.wide["STG"] <= 2, launch.name
