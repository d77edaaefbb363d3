"""The front door: arguments, errors, the choice of implementation, torch.compile, opcheck."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gdpa_kernels import calls, emulator, gdpa, ladder
from gdpa_kernels.gdpa import api, choices, v0_eager
from gdpa_kernels.inputs import cu_seqlens


def arguments(**changes) -> dict:
    q, k, v = (torch.randn(9, 4, 16) for _ in range(3))
    ends = cu_seqlens([4, 0, 5], "cpu")
    return {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": ends,
        "cu_seqlens_k": ends.clone(),
        "max_seqlen_q": 5,
        "max_seqlen_k": 5,
    } | changes


def ends(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


WRONG = {
    "not a tensor": ({"q": [1.0]}, TypeError, "q must be a tensor, got list"),
    "rank": ({"k": torch.randn(9, 16)}, ValueError, r"k must have shape \[total, .*got \[9, 16\]"),
    "dtype differs": ({"v": torch.randn(9, 4, 16).half()}, TypeError, "v must have q's dtype"),
    "integers": (
        {name: torch.ones(9, 4, 16, dtype=torch.int32) for name in "qkv"},
        TypeError,
        "q must have a floating-point dtype, got torch.int32",
    ),
    "device differs": (
        {"k": torch.empty(9, 4, 16, device="meta")},
        ValueError,
        "k must be on q's device cpu, got meta",
    ),
    "head_dim differs": ({"k": torch.randn(9, 4, 8)}, ValueError, "k must have q's head_dim 16"),
    "v differs from k": ({"v": torch.randn(8, 4, 16)}, ValueError, "v must have k's shape"),
    "heads do not divide": (
        {"k": torch.randn(9, 3, 16), "v": torch.randn(9, 3, 16)},
        ValueError,
        "q must have a multiple of k's 3 heads, got 4 heads",
    ),
    "unknown activation": (
        {"activation": "softmax"},
        ValueError,
        "activation must be one of identity, .*, got 'softmax'",
    ),
    "too few activations": (
        {"activation": ("relu", "silu")},
        ValueError,
        r"activation must be one name or one per query head \(4\), got 2",
    ),
    "unknown impl": (
        {"impl": "v9"},
        ValueError,
        "impl must be 'auto' or one of reference, v0_eager, .*, got 'v9'",
    ),
    "scale": ({"scale": "1"}, TypeError, "scale must be a float, got str"),
    "window": ({"window": -1}, ValueError, "window must be None or an integer .* got -1"),
    "int64 lengths": (
        {"cu_seqlens_q": torch.tensor([0, 4, 4, 9])},
        ValueError,
        "cu_seqlens_q must be a contiguous int32 tensor .*got torch.int64 of shape .4.",
    ),
    "strided lengths": (
        {"cu_seqlens_k": ends(0, 0, 4, 4, 4, 4, 9, 9)[::2]},
        ValueError,
        "cu_seqlens_k must be a contiguous int32",
    ),
    "batches differ": (
        {"cu_seqlens_q": ends(0, 9)},
        ValueError,
        "cu_seqlens_q must have cu_seqlens_k's",
    ),
    "not from zero": (
        {"cu_seqlens_k": ends(1, 4, 4, 9)},
        ValueError,
        "must run from 0 to the 9 rows",
    ),
    "out of range": ({"cu_seqlens_k": ends(0, 4, 4, 12)}, ValueError, "got 0 to 12"),
    "decreasing": (
        {"cu_seqlens_k": ends(0, 6, 4, 9), "max_seqlen_k": 9},
        ValueError,
        "cu_seqlens_k must not decrease, got 6 followed by 4 at index 1",
    ),
    "longer than max": (
        {"max_seqlen_q": 4},
        ValueError,
        "max_seqlen_q must be at least the longest sequence, 5 tokens, got 4",
    ),
    "negative max": (
        {"max_seqlen_k": -1},
        ValueError,
        "max_seqlen_k must be an integer of at least 0",
    ),
    "shared q of another length": (
        {"cu_seqlens_q": None, "max_seqlen_q": 5},
        ValueError,
        "max_seqlen_q must equal the 9 rows of a shared q, got 5",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_say_what_is_wrong(case):
    changes, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        gdpa(**arguments(**changes))


def test_lengths_are_trusted_when_told_to():
    wrong = arguments(cu_seqlens_k=ends(0, 4, 4, 8))
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        gdpa(**wrong)
    assert gdpa(**wrong, validate=False).shape == (9, 4, 16)


def test_checked_lengths_are_checked_again_once_modified():
    call = arguments()
    gdpa(**call)
    call["cu_seqlens_k"][1] = 7
    with pytest.raises(ValueError, match="cu_seqlens_k must not decrease"):
        gdpa(**call)


def test_auto_on_a_cpu_is_eager_and_an_explicit_kernel_is_refused():
    call = arguments()
    assert api.resolve("auto", *(call[n] for n in "qkv"), 9, 9) == "v0_eager"
    for impl in ("v1_tiled", "v2_tma", "v3_persistent"):
        with pytest.raises(NotImplementedError, match=f"impl '{impl}' needs .*CUDA.*got .*CPU"):
            gdpa(**call, impl=impl)


def test_auto_prefers_the_first_kernel_that_supports_the_call():
    longest = {"max_seqlen_q": 9, "max_seqlen_k": 9}
    half = {name: torch.randn(9, 4, 16).bfloat16() for name in "qkv"}
    odd = {name: torch.randn(9, 4, 20).bfloat16() for name in "qkv"}
    single = {name: torch.randn(9, 4, 16) for name in "qkv"}
    with emulator.enabled():
        assert api.resolve("auto", **half, **longest) == choices.order(9, "bfloat16", 16, 9, 9)[0]
        wide = {name: torch.randn(9, 4, 136).bfloat16() for name in "qkv"}
        assert api.resolve("auto", **wide, **longest) == "v2_tma"
        assert api.resolve("auto", **odd, **longest) == "v1_tiled"
        assert api.resolve("auto", **single, **longest) == "v1_tiled"
        with pytest.raises(NotImplementedError, match="v2_tma' needs dtype bfloat16 or float16"):
            api.resolve("v2_tma", **single, **longest)
        with pytest.raises(NotImplementedError, match="multiple of 8, got 20"):
            api.resolve("v2_tma", **odd, **longest)
        flipped = half | {"k": torch.randn(16, 4, 9).bfloat16().permute(2, 1, 0)}
        with pytest.raises(NotImplementedError, match="needs k with contiguous rows"):
            api.resolve("v2_tma", **flipped, **longest)
        with pytest.raises(
            NotImplementedError, match="v6_short_kv' needs a head_dim of at most 128"
        ):
            api.resolve("v6_short_kv", **wide, **longest)
    with emulator.enabled(arch="sm_100"):
        assert api.resolve("auto", **half, **longest) == "v2_tma"
        with pytest.raises(NotImplementedError, match="needs sm_90, got an emulated sm_100"):
            api.resolve("v6_short_kv", **half, **longest)


def test_any_strides_reach_the_general_kernel():
    call = arguments()
    for name in "qkv":
        call[name] = call[name].permute(2, 0, 1).contiguous().permute(1, 2, 0)
    with emulator.enabled():
        out = gdpa(**call, impl="v1_tiled")
    torch.testing.assert_close(out, gdpa(**call, impl="reference"))


def test_double_precision_runs_everywhere():
    call = {n: t.double() if n in "qkv" else t for n, t in arguments().items()}
    assert torch.equal(gdpa(**call), gdpa(**call, impl="v0_eager"))


@pytest.mark.parametrize("shared", (False, True))
def test_opcheck(shared):
    q = torch.randn(4 if shared else 9, 4, 16)
    k, v = (torch.randn(9, 4, 16) for _ in range(2))
    lengths = cu_seqlens([4, 0, 5], "cpu")
    torch.library.opcheck(
        torch.ops.gdpa_kernels.gdpa_forward.default,
        (
            q, k, v, None if shared else lengths, lengths, 4 if shared else 5, 5,
            "gelu_tanh", 0.25, 1.0, False, None, "v0_eager",
        ),
    )  # fmt: skip


def test_torch_compile_sees_one_graph():
    call = arguments()
    compiled = torch.compile(lambda **kw: gdpa(**kw) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**call), gdpa(**call) * 2)


def test_a_compiled_program_does_not_look_into_the_operator():
    call = arguments()
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(lambda **kw: gdpa(**kw) * 2, backend=counter)
    for _ in range(2):
        torch.testing.assert_close(compiled(**call), gdpa(**call) * 2)
    assert counter.frame_count == 1
    # Nor does one that calls it from a function which is not compiled itself.
    torch._dynamo.reset()
    forward = torch._dynamo.disable(api._FORWARD, recursive=False)
    call = (*call.values(), "gelu_tanh", 0.25, 1.0, False, None, "v0_eager")
    counter = CompileCounter()
    compiled = torch.compile(lambda: forward(*call) * 2, backend=counter)
    torch.testing.assert_close(compiled(), api._FORWARD(*call) * 2)
    assert counter.op_count == 1  # the product by 2


class Seen(TorchDispatchMode):
    """The operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("grad", (False, True))
def test_modes_and_profilers_see_the_operator(grad):
    call = arguments()
    call["q"].requires_grad_(grad)
    with Seen() as seen:
        gdpa(**call)
    assert seen.names.count("gdpa_kernels::gdpa_forward") == 1
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gdpa(**call)
    events = [event.name for event in profile.events()]
    assert events.count("gdpa_kernels::gdpa_forward") == 1


def test_a_fake_call_has_a_shape_and_no_values():
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        call = {
            name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for name, value in arguments().items()
        }
        out = gdpa(**call)
        assert isinstance(out, FakeTensor) and out.shape == (9, 4, 16)
        call = call | {"q": call["q"][:4], "cu_seqlens_q": None, "max_seqlen_q": 4}
        assert gdpa(**call).shape == (12, 4, 16)


def test_a_derivative_is_never_dropped():
    call = arguments()

    def loss(q):
        return gdpa(**call | {"q": q}).sum()

    with pytest.raises(RuntimeError):
        torch.func.grad(loss)(call["q"])
    forward_mode = pytest.raises(RuntimeError, match="gdpa has no forward-mode derivative")
    with forward_mode:
        torch.func.jvp(loss, (call["q"],), (call["q"],))
    with forward_ad.dual_level():
        expected = gdpa(**call)
        dual = forward_ad.make_dual(call["q"], call["q"].clone())
        with forward_mode:
            gdpa(**call | {"q": dual})
        assert torch.equal(gdpa(**call | {"q": forward_ad.unpack_dual(dual).primal}), expected)
    with torch.no_grad():
        assert not gdpa(**call | {"q": call["q"].clone().requires_grad_()}).requires_grad
    assert gdpa(**call | {"v": call["v"].clone().requires_grad_()}).requires_grad


@pytest.mark.parametrize("impl", ("reference", "v0_eager", "v1_tiled", "v2_tma"))
@pytest.mark.parametrize("lengths", ([4, 0, 5], [0, 0], [9], []))
def test_the_output_is_a_tensor_of_its_own(impl, lengths):
    total = sum(lengths)
    q, k, v = (torch.randn(total, 4, 16).bfloat16() for _ in range(3))
    ends = cu_seqlens(lengths, "cpu")
    longest = max(lengths, default=0)
    with emulator.enabled():
        out = gdpa(q, k, v, ends, ends, longest, longest, impl=impl)
    assert out.shape == (total, 4, 16) and out.is_contiguous()
    for tensor in (q, k, v):
        assert out._base is not tensor and out is not tensor
        assert total == 0 or out.untyped_storage()._cdata != tensor.untyped_storage()._cdata


def test_tensors_of_inference_mode_are_ordinary():
    expected = gdpa(**(call := arguments()))
    with torch.inference_mode():
        inside = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in call.items()}
        assert torch.equal(gdpa(**inside), expected)
        assert torch.equal(gdpa(**call), expected)
        inside["cu_seqlens_k"][1] = 7
        with pytest.raises(ValueError, match="cu_seqlens_k must not decrease"):
            gdpa(**inside)


def test_the_capability_of_each_device_is_asked_once(monkeypatch):
    ladder._capability.cache_clear()
    asked = []

    def capability(index):
        asked.append(index)
        return ((9, 0), (10, 0))[index]

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    requires = ladder.rung("v6_short_kv").requires
    for _ in range(2):
        assert requires.of_device(torch.device("cuda:0")) is None
        for name in ("cuda:1", "cuda"):
            assert requires.of_device(torch.device(name)) == "needs sm_90, got sm_100"
    assert ladder.rung("v2_tma").requires.of_device(torch.device("cuda:1")) is None
    assert asked == [0, 1]
    ladder._capability.cache_clear()


def test_backward_is_refused_clearly():
    call = arguments()
    call["q"].requires_grad_()
    with pytest.raises(RuntimeError, match="gdpa has no backward pass yet"):
        gdpa(**call).sum().backward()


@pytest.fixture
def on_a_gpu(monkeypatch):
    """CPU tensors are taken for tensors on a GPU, eager PyTorch for all there is; the list of the
    ways that calls took, "rung" or "operator"."""
    ways = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(api, "_resolved", {})
    eager, operator = v0_eager.forward, api._FORWARD

    def forward(*args, **options):
        ways.append("rung")
        return eager(*args, **options)

    def dispatched(*args):
        ways.append("operator")
        return operator(*args)

    monkeypatch.setattr(v0_eager, "forward", forward)
    monkeypatch.setattr(api, "_FORWARD", torch.compiler.disable(dispatched))
    return ways


def test_a_call_that_nobody_can_see_goes_straight_to_the_rung(on_a_gpu):
    call = arguments()
    out = gdpa(**call)
    for _ in range(2):
        assert torch.equal(gdpa(**call), out)
    with torch.inference_mode():
        assert torch.equal(gdpa(**call), out)
    with torch.no_grad():
        parameter = torch.nn.Parameter(call["q"])
        again = gdpa(**call | {"q": parameter})
    assert torch.equal(again, out) and type(again) is torch.Tensor and not again.requires_grad
    assert on_a_gpu == ["rung"] * 5
    assert torch.equal(out, gdpa(**call, impl="v0_eager")) and len(api._resolved) == 2


class Subclass(torch.Tensor):
    """A tensor that may do anything when an operator sees it."""


class SeenFunctions(TorchFunctionMode):
    """As `Seen`, for functions."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


WATCHED = {
    "a dispatch mode": Seen,
    "a function mode": SeenFunctions,
    "a profiler": lambda: torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ),
}  # fmt: skip


@pytest.mark.parametrize("known", (False, True))
@pytest.mark.parametrize("watcher", WATCHED)
def test_a_call_that_somebody_can_see_is_the_operators(on_a_gpu, watcher, known):
    call = arguments()
    if known:
        gdpa(**call)
        on_a_gpu.clear()
    with WATCHED[watcher]():
        gdpa(**call)
    assert on_a_gpu == ["operator", "rung"]


def test_derivatives_subclasses_transforms_and_tracers_get_the_operator(on_a_gpu):
    call = arguments()
    gdpa(**call)
    gdpa(**call | {"v": call["v"].clone().requires_grad_()})
    gdpa(**call | {"q": call["q"].as_subclass(Subclass)})
    assert on_a_gpu == ["rung", *("operator", "rung") * 2]
    torch.func.vmap(lambda q: gdpa(**call | {"q": q}))(call["q"][None])
    assert on_a_gpu[5] == "operator"
    traced = make_fx(lambda q: gdpa(**call | {"q": q}))(call["q"])
    assert "gdpa_forward" in traced.code
    count = len(on_a_gpu)
    torch.jit.trace(lambda q: gdpa(**call | {"q": q}), (call["q"],), check_trace=False)
    assert on_a_gpu[count] == "operator"


def test_a_compiled_program_does_not_look_into_a_rung(on_a_gpu):
    """Not even if it calls `gdpa` from a function that is not compiled itself."""
    call = arguments()
    gdpa(**call)
    on_a_gpu.clear()
    torch._dynamo.reset()
    counter = CompileCounter()
    outside = torch._dynamo.disable(gdpa, recursive=False)
    torch.compile(lambda: outside(**call) * 2, backend=counter)()
    assert on_a_gpu == ["operator", "rung"]
    assert counter.op_count == 1  # the product by 2


def test_another_pytorch_has_the_operator_alone(on_a_gpu, monkeypatch):
    expected = gdpa(**(call := arguments()))
    monkeypatch.setattr(calls, "KNOWN", False)
    assert torch.equal(gdpa(**call), expected)
    assert on_a_gpu == ["rung", "operator", "rung"]


def test_the_pinned_pytorch_is_known():
    assert calls.KNOWN
    assert calls._len_torch_dispatch_stack() == calls._len_torch_function_stack() == 0
    assert calls.peek_interpreter_stack() is calls._get_tracing_state() is None
    assert calls.get_eval_frame_callback() is None and not calls._profiler_enabled()


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_say_so_after_a_right_call(on_a_gpu, case):
    changes, error, message = WRONG[case]
    call = arguments()
    gdpa(**call)
    with pytest.raises(error, match=message):
        gdpa(**call | changes)
    with pytest.raises(error, match=message):
        gdpa(**call | changes)


def test_an_integer_is_not_taken_for_a_known_bool_nor_a_list_for_a_hash(on_a_gpu):
    call = arguments(
        cu_seqlens_q=ends(*range(10)), cu_seqlens_k=ends(*range(10)),
        max_seqlen_q=1, max_seqlen_k=1,
    )  # fmt: skip
    out = gdpa(**call)
    with pytest.raises(ValueError, match="max_seqlen_k must be an integer"):
        gdpa(**call | {"max_seqlen_k": True})
    assert torch.equal(gdpa(**call, activation=["gelu_tanh"]), out)
    with pytest.raises(TypeError, match="unhashable"):
        gdpa(**call, activation=[["gelu_tanh"]])
    with pytest.raises(TypeError, match="not iterable"):
        gdpa(**call, activation=3)


def test_the_choice_is_made_again_for_what_it_depends_on(on_a_gpu, monkeypatch):
    def of_device(self, device):
        return None if self.capability in (None, (9, 0)) and not self.only_major else "is not there"

    monkeypatch.setattr(ladder.Requires, "of_device", of_device)
    took = []
    for impl in ("v0_eager", "v2_tma"):
        module = ladder.rung(impl).module()
        monkeypatch.setattr(
            module, "forward", lambda q, *a, impl=impl, **o: took.append(impl) or q.clone()
        )
    storage = torch.zeros(4096).bfloat16()
    aligned, odd = storage[: 9 * 64].view(9, 4, 16), storage[1 : 1 + 9 * 64].view(9, 4, 16)
    strided = torch.zeros(9, 4, 18).bfloat16()[..., :16]
    right = arguments(q=aligned, k=aligned, v=aligned)
    for _ in range(2):
        gdpa(**right)
        gdpa(**right, impl="v2_tma")
        for wrong in (odd, strided):
            for name in "qkv":
                gdpa(**right | {name: wrong}, validate=False)
                with pytest.raises(NotImplementedError, match=f"'v2_tma' needs {name} "):
                    gdpa(**right | {name: wrong}, impl="v2_tma")
    assert took == ["v2_tma", "v2_tma", *["v0_eager"] * 6] * 2


def test_what_was_checked_once_is_forgotten_in_time(on_a_gpu, monkeypatch):
    monkeypatch.setattr(calls, "MOST", 4)
    call = arguments()
    for longest in range(5, 15):
        gdpa(**call | {"max_seqlen_k": longest})
        assert len(api._resolved) <= 4
    assert on_a_gpu == ["rung"] * 10


@pytest.mark.parametrize("way", ("element", "view", "data", "resize_"))
def test_checked_lengths_are_checked_again_however_they_are_modified(on_a_gpu, way):
    call = arguments()
    gdpa(**call)
    gdpa(**call)
    lengths = call["cu_seqlens_k"]
    match way:
        case "element":
            lengths[1] = 7
        case "view":
            lengths[1:2].add_(3)
        case "data":
            lengths.data = ends(0, 7, 4, 9)
        case "resize_":
            lengths.resize_(3)
    with pytest.raises(ValueError, match="cu_seqlens_k must|must have cu_seqlens_k's"):
        gdpa(**call)


def test_the_memory_that_was_checked_is_kept_so_that_its_address_stays_its_own(on_a_gpu):
    array = np.array([0, 4, 4, 9], np.int32)
    memory = weakref.ref(array)
    call = arguments(cu_seqlens_k=torch.from_numpy(array))
    del array
    gdpa(**call)
    call["cu_seqlens_k"].data = ends(0, 5, 5, 9)  # the version stays
    assert memory() is not None
    gdpa(**call)
    assert memory() is None


def test_checked_lengths_go_with_their_tensor(on_a_gpu):
    before = len(calls._checked)
    call = arguments()
    gdpa(**call)
    assert len(calls._checked) == before + 2
    del call
    assert len(calls._checked) == before


def test_ladder_lists_every_rung_file_and_its_predecessor():
    files = sorted(path.stem for path in (ladder.PACKAGE / "gdpa").glob("v[0-9]*_*.py"))
    impls = [rung.impl for rung in ladder.RUNGS]
    assert files == sorted(impls)
    assert ladder.RUNGS[0].predecessor is None
    for index, rung in enumerate(ladder.RUNGS[1:], 1):
        assert rung.predecessor in impls[:index]
        assert f"Changes from {rung.predecessor}" in rung.path.read_text()
        assert ladder.diff(rung.impl).startswith(f"--- gdpa/{rung.predecessor}.py\n")
        assert 0 < ladder.changed_lines(rung.impl) < 350


def test_no_rung_imports_another_and_no_kernel_imports_the_definition():
    for path in (ladder.PACKAGE / "gdpa").glob("*.py"):
        if path.stem in ("api", "__init__"):
            continue
        source = path.read_text()
        others = [impl for impl in ladder.impls() if impl != path.stem]
        assert not [impl for impl in others if f"import {impl}" in source or f".{impl} " in source]
