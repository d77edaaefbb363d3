"""The front door: arguments, errors, the choice of implementation, torch.compile."""

import contextlib

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode

import tritonemu
from gdpa_kernels import gdpa
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling import rung as rungs
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.calling.lengths import Lengths
from gdpa_kernels.gdpa import api, choices
from gdpa_kernels.gdpa.batch import Batch
from gdpa_lab.measuring.inputs import cu_seqlens
from gdpa_lab.report import lessons
from tests.calls import cast, ends, required, saved_by

BF16, FP32 = torch.bfloat16, torch.float32


def arguments(**changes) -> dict:
    q, k, v = torch.randn(3, 9, 4, 16)
    both = {"cu_seqlens_q": ends(0, 4, 4, 9), "cu_seqlens_k": ends(0, 4, 4, 9)}
    return {"q": q, "k": k, "v": v, **both, "max_seqlen_q": 5, "max_seqlen_k": 5} | changes


NESTED = torch.nested.nested_tensor([torch.randn(9, 4, 16)], layout=torch.jagged)
OTHER = torch.nested.nested_tensor([torch.randn(9, 4, 16)], layout=torch.jagged)
WRONG = (
    (ValueError, "activation must be one of identity, .*, got 'softmax'",
     {"activation": "softmax"}),
    (ValueError, r"activation must be one name or one per query head \(4\), got 2",
     {"activation": ("relu", "silu")}),
    (ValueError, "backward_impl must be 'auto' or one of reference, v1_tiled_.*, got 'v1_tiled'",
     {"backward_impl": "v1_tiled"}),
    (ValueError, "q must have a head_dim of at least 1, got 0",
     {name: torch.randn(9, 4, 0) for name in "qkv"}),
    (TypeError, "k must be a dense tensor, got", {"k": torch.randn(9, 4, 16).to_sparse()}),
    *((TypeError, f"{name} must be a dense tensor, got a nested one",
       {name: torch.nested.nested_tensor([torch.randn(9, 4, 16)], layout=torch.strided)})
      for name in "qkv"),
    (ValueError, "cu_seqlens_q must be None where q is a nested tensor", {"q": NESTED}),
    (ValueError, "v must be nested with the offsets of k, got a Tensor that is not nested",
     {"k": NESTED, "cu_seqlens_k": None}),
    (ValueError, "v must be nested with the offsets of k, got other offsets",
     {"k": NESTED, "v": OTHER, "cu_seqlens_k": None}),
    (ValueError, r"q must be a nested tensor \[batch, jagged, ...\] without holes",
     {"q": NESTED.transpose(1, 2), "cu_seqlens_q": None}),
    (TypeError, "activation must be a name or .*got None", {"activation": None}),
    (TypeError, "activation must be a name or a tuple .*got 5", {"activation": 5}),
    (TypeError, "activation must be a name", {"activation": (("relu",),)}),
    (TypeError, "scale must be a float, got bool", {"scale": True}),
    (ValueError, "output_scale must be a finite number in fp32, got inf",
     {"output_scale": float("inf")}),
    (ValueError, "window must be None or an integer .* got -1", {"window": -1}),
    (ValueError, "causal must be a bool, 'upper_left' or 'lower_right', got 'bottom_right'",
     {"causal": "bottom_right"}),
    (TypeError, "causal must be a bool, 'upper_left' or 'lower_right', got 1", {"causal": 1}),
    (TypeError, "precise must be a bool, got 'yes'", {"precise": "yes"}),
    (TypeError, "validate must be a bool, got None", {"validate": None}),
    (TypeError, "cu_seqlens_k must be the offsets .* of k's 12 rows, .* got None",
     {"k": torch.randn(12, 4, 16), "v": torch.randn(12, 4, 16), "cu_seqlens_k": None}),
    (TypeError, "cu_seqlens_k must be the offsets .* of k's 9 rows, .* got None",
     {"cu_seqlens_q": None, "cu_seqlens_k": None, "max_seqlen_q": None}),
    (ValueError, "cu_seqlens_k must run from 0 to at most the 8 rows of its tensor, got 0 to 9",
     {"k": torch.randn(8, 4, 16), "v": torch.randn(8, 4, 16)}),
    (ValueError, "cu_seqlens_q must have cu_seqlens_k's",
     {"cu_seqlens_q": ends(0, 9), "max_seqlen_q": 9}),
    (ValueError, "max_seqlen_q must be at least the longest sequence, 5 tokens, got 4",
     {"max_seqlen_q": 4}),
    (ValueError, "max_seqlen_k must be an integer of at least 0", {"max_seqlen_k": -1}),
    (ValueError, "max_seqlen_q must equal the 9 rows of a shared q, got 5",
     {"cu_seqlens_q": None, "max_seqlen_q": 5}),
)  # fmt: skip


@pytest.mark.parametrize("error, message, changes", WRONG)
def test_wrong_arguments_say_what_is_wrong(error, message, changes):
    with pytest.raises(error, match=message):
        gdpa(**arguments(**changes))


def resolved(impl: str, **call) -> str:
    return api.resolve(impl, "forward", Batch(**call, activation=("gelu_tanh",), scale=1.0)).impl


@pytest.mark.parametrize(
    ("allowed", "refused"), [({"precise": True}, {"precise": 1}), ({"window": 1}, {"window": True}),
                             ({"window": 1}, {"window": [1]}), ({"scale": 1.0}, {"scale": "1.0"})]
)  # fmt: skip
def test_what_was_allowed_once_allows_nothing_that_equals_it(allowed, refused):
    for _ in range(2):
        gdpa(**arguments(**allowed))
        with pytest.raises((TypeError, ValueError), match=f"{next(iter(refused))} must be"):
            gdpa(**arguments(**refused))


def test_auto_on_a_cpu_is_the_definition_and_an_explicit_kernel_is_refused():
    call = arguments()
    assert resolved("auto", **call) == "reference"
    for impl in ("v1_tiled", "v2_tma", "v7_packed"):
        with pytest.raises(NotImplementedError, match=f"impl '{impl}' needs .*CUDA.*got .*CPU"):
            gdpa(**call, impl=impl)


def test_auto_prefers_the_first_kernel_that_supports_the_call():
    longest = {name: value for name, value in arguments().items() if name not in "qkv"}
    longest |= {"max_seqlen_q": 9, "max_seqlen_k": 9}
    single, half, odd, wide = (
        dict(zip("qkv", torch.randn(3, 9, 4, head_dim).to(dtype), strict=True))
        for head_dim, dtype in ((16, FP32), (16, BF16), (20, BF16), (136, BF16))
    )
    with tritonemu.enabled():
        first = choices.order((9, 0), "forward", "bfloat16", 16, 9, 9)[0]
        assert resolved("auto", **half, **longest) == first
        assert resolved("auto", **wide, **longest) == "v8_own_waits"
        assert resolved("auto", **odd, **longest) == "v1_tiled"
        assert resolved("auto", **single, **longest) == "v1_tiled"
        with pytest.raises(NotImplementedError, match="v8_own_waits' needs dtype bfloat16 or"):
            resolved("v8_own_waits", **single, **longest)
        with pytest.raises(NotImplementedError, match="multiple of 8, got 20"):
            resolved("v8_own_waits", **odd, **longest)
        flipped = half | {"k": torch.randn(16, 4, 9).bfloat16().permute(2, 1, 0)}
        with pytest.raises(NotImplementedError, match="needs k with contiguous rows"):
            resolved("v8_own_waits", **flipped, **longest)
        with pytest.raises(NotImplementedError, match="v7_packed' needs a head_dim of at most 128"):
            resolved("v7_packed", **wide, **longest)
    with tritonemu.enabled(arch="sm_100"):
        assert resolved("auto", **half, **longest) == "v1_tiled"
        with pytest.raises(NotImplementedError, match="needs sm_90, got an emulated sm_100"):
            resolved("v8_own_waits", **half, **longest)


def test_any_strides_reach_the_general_kernel():
    call = arguments()
    for name in "qkv":
        call[name] = call[name].permute(2, 0, 1).contiguous().permute(1, 2, 0)
    with tritonemu.enabled():
        out = gdpa(**call, impl="v1_tiled")
    torch.testing.assert_close(out, gdpa(**call, impl="reference"))


@pytest.mark.parametrize("operator", ladder.LADDERS)
def test_a_row_that_stands_for_many_is_not_read_by_tma(operator):
    tensor, row = torch.randn(9, 4, 128).bfloat16(), torch.randn(1, 1, 128).bfloat16()
    for expanded in (row.expand(9, 4, -1), tensor[:, :1].expand_as(tensor)):
        for rung in ladder.LADDERS[operator]:
            problem = rung.requires.tensors_problem(tensor, tensor, expanded)
            if rung.requires.aligned:
                wanted = "needs v with contiguous rows whose strides are positive multiples of 16"
                assert problem.startswith(wanted) and "got strides" in problem, rung.impl
            else:
                assert problem is None, rung.impl


def test_an_expanded_tensor_reaches_the_general_kernel():
    call = cast(arguments(), BF16)
    call["v"] = call["v"][:1].expand(9, 4, 16)
    with tritonemu.enabled():
        assert torch.equal(gdpa(**call), gdpa(**call, impl="v1_tiled"))
        with pytest.raises(NotImplementedError, match="impl 'v8_own_waits' needs v with contig"):
            gdpa(**call, impl="v8_own_waits")


def test_double_precision_runs_everywhere():
    call = cast(arguments(), torch.float64)
    torch.testing.assert_close(gdpa(**call), gdpa(**call, impl="v0_eager"))


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
    *tensors, longest_q, longest_k = call.values()
    options = "gelu_tanh", 0.25, 1.0, "", False, "v0_eager", "auto"
    call = (*tensors, None, longest_q, longest_k, *options)
    counter = CompileCounter()
    compiled = torch.compile(lambda: forward(*call) * 2, backend=counter)
    torch.testing.assert_close(compiled(), api._FORWARD(*call) * 2)
    assert counter.op_count == 1  # the product by 2


@pytest.mark.parametrize("validate", (False, True))
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_the_longest_sequence_is_read_where_it_is_not_given(dtype, validate):
    call = arguments()
    expected = gdpa(**call)
    call |= {name: call[name].to(dtype) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    seen, make = [], api._batch

    def watched(*given, **more):
        seen.append(make(*given, **more))
        return seen[-1]

    unknown = call | {"max_seqlen_q": None, "max_seqlen_k": None, "validate": validate}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "_batch", watched)
        assert torch.equal(gdpa(**unknown), expected)
    assert {(b.max_seqlen_q, b.max_seqlen_k, b.cu_seqlens_k.dtype) for b in seen} == {
        (5, 5, torch.int32)
    }
    with FakeTensorMode() as mode:
        fake = {n: mode.from_tensor(x) for n, x in call.items() if isinstance(x, torch.Tensor)}
        with pytest.raises(TypeError, match="max_seqlen_q must be given where cu_seqlens_q cannot"):
            gdpa(**unknown | fake)
        assert gdpa(**call | fake).shape == expected.shape


def test_a_compiled_program_reads_the_longest_sequence():
    call = arguments(max_seqlen_q=None, max_seqlen_k=None)
    call |= {name: call[name].long() for name in ("cu_seqlens_q", "cu_seqlens_k")}
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(gdpa, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(**call), gdpa(**call))


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
    rungs._gpu_capability.cache_clear()
    asked = []

    def capability(index):
        asked.append(index)
        return ((9, 0), (10, 0))[index]

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    requires = ladder.rung("v6_short_kv").requires
    for _ in range(2):
        assert requires.device_problem(torch.device("cuda:0")) is None
        for name in ("cuda:1", "cuda"):
            assert requires.device_problem(torch.device(name)) == "needs sm_90, got sm_100"
    assert ladder.rung("v2_tma").requires.device_problem(torch.device("cuda:1")) is None
    assert asked == [0, 1]
    rungs._gpu_capability.cache_clear()


def test_a_gpu_of_amd_is_none_of_nvidia(monkeypatch):
    """It says 9.4, which is no Hopper: some kernels hold PTX, and none has run there."""
    rungs._gpu_capability.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 4))
    device = torch.device("cuda:0")
    kernels = [rung.requires for rung in ladder.RUNGS if rung.requires.capability]
    assert kernels and all("got a GPU of AMD" in each.device_problem(device) for each in kernels)
    assert ladder.rung("v0_eager").requires.device_problem(device) is None
    rungs._gpu_capability.cache_clear()


# -- Alignment of the causal mask ------------------------------------------------------------------


def crossed(lengths_q: list[int], lengths_k: list[int], shared: bool = False, **options) -> dict:
    """A call of fp64."""
    make = torch.Generator().manual_seed(0)
    rows = lengths_q[0] if shared else sum(lengths_q)
    q, k, v = (
        torch.randn(n, 2, 8, generator=make, dtype=torch.float64)
        for n in (rows, sum(lengths_k), sum(lengths_k))
    )
    ends_q = None if shared else cu_seqlens(lengths_q, "cpu")
    longest = {"max_seqlen_q": max(lengths_q), "max_seqlen_k": max(lengths_k)}
    both = {"cu_seqlens_q": ends_q, "cu_seqlens_k": cu_seqlens(lengths_k, "cpu")}
    return {"q": q, "k": k, "v": v, **both, **longest, **options}


def with_lengths(call: dict) -> dict:
    names = "cu_seqlens_q", "cu_seqlens_k"
    return call | {n: Lengths(call[n]) for n in names if call[n] is not None}


@pytest.mark.parametrize("shared", (False, True))
@pytest.mark.parametrize("given", (dict, with_lengths))
def test_a_plain_causal_mask_of_fewer_queries_than_keys_is_refused(given, shared):
    call = given(crossed([4, 4], [4, 6], shared, causal=True))
    message = "'upper_left' .* or 'lower_right' .* got True with 4 queries and 6 keys"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            gdpa(**call)
    aligned = gdpa(**call | {"causal": "upper_left"})
    assert torch.equal(gdpa(**call, validate=False), aligned)
    enough = given(crossed([4, 6], [4, 4], causal=True))
    assert torch.equal(gdpa(**enough), gdpa(**enough | {"causal": "upper_left"}))


def test_new_queries_over_a_cache_are_the_last_rows_of_self_attention():
    """In values and gradients, by the definition and by the plain kernels."""
    lengths, new = [70, 3, 1], [5, 3, 1]
    whole = crossed(lengths, lengths, causal=True)
    rows = torch.cat([torch.arange(e - n, e) for n, e in zip(new, (70, 73, 74), strict=True)])
    delta = whole | {"q": whole["q"][rows], "cu_seqlens_q": cu_seqlens(new, "cpu")}
    delta |= {"max_seqlen_q": 5, "causal": "lower_right"}
    grad = torch.randn(len(rows), 2, 8, dtype=torch.float64)

    def results(call, rows=slice(None)):
        call = required(call)
        out = gdpa(**call)[rows]
        dq, dk, dv = torch.autograd.grad(out, [call[n] for n in "qkv"], grad.to(out.dtype))
        return out.detach(), dq[rows], dk, dv

    expected = results(whole, rows)
    for found, wanted in zip(results(delta), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)
    with tritonemu.enabled(), launches() as seen:
        found = results(cast(delta, FP32))
    names = {"tiled_kernel", "keys_kernel", "queries_kernel"}
    assert {launch.name for launch in seen} == names
    for one, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), wanted, rtol=1e-5, atol=1e-5)


def test_where_q_and_k_have_the_same_offsets_there_is_one_alignment():
    call = wide()
    call["cu_seqlens_k"] = call["cu_seqlens_q"]
    with tritonemu.enabled():
        out = gdpa(**call, causal="lower_right", impl="v8_own_waits")
        assert torch.equal(out, gdpa(**call, causal=True, impl="v8_own_waits"))


# -- Gradients -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation": ("silu", "gelu"), "scale": -0.7, "output_scale": 0.3},
        {"causal": "upper_left", "activation": "relu_squared"},
        {"causal": "lower_right"},
        {"window": 1, "causal": "lower_right"},
        {"window": 1, "causal": "upper_left"},
        {"window": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("shared", (False, True))
def test_gradients_are_those_of_finite_differences(shared, options):
    """Grouped heads; sequences without queries, without keys, of one token."""
    make = torch.Generator().manual_seed(0)
    lengths_q, lengths_k = [3, 0, 1, 2], [2, 4, 0, 1]
    q, k, v = (
        torch.randn(rows, heads, 3, generator=make, dtype=torch.float64, requires_grad=True)
        for rows, heads in ((3 if shared else 6, 2), (7, 1), (7, 1))
    )
    ends_q, ends_k = (cu_seqlens(lengths, "cpu") for lengths in (lengths_q, lengths_k))

    def attend(q, k, v):
        return gdpa(q, k, v, None if shared else ends_q, ends_k, 3, 4, **options)

    assert torch.autograd.gradcheck(attend, (q, k, v))


def wide(head_dim: int = 128, dtype: torch.dtype = torch.bfloat16, longest: int = 5) -> dict:
    """A call that every backward rung can take: grouped heads, long rows."""
    make = torch.Generator().manual_seed(0)
    lengths = cu_seqlens([4, 0, longest], "cpu")
    q, k, v = (torch.randn(4 + longest, heads, head_dim, generator=make) for heads in (4, 2, 2))
    call = arguments(q=q, k=k, v=v, cu_seqlens_q=lengths, cu_seqlens_k=lengths.clone())
    return cast(call, dtype) | {"max_seqlen_q": longest, "max_seqlen_k": longest}


NEEDS = {"q": ["queries_kernel"], "k": ["keys_kernel"], "v": ["keys_kernel"]}


@pytest.mark.parametrize("names", ["q", "k", "v", "qk", "qv", "kv", "qkv"])
def test_only_what_needs_a_gradient_is_computed(names):
    with tritonemu.enabled():
        out = gdpa(**required(wide(64), names), backward_impl="v1_tiled_backward").sum()
        with launches() as seen:
            out.backward()
    launched = [launch.name for launch in seen]
    assert set(launched) == {kernel for name in names for kernel in NEEDS[name]}
    assert len(launched) == len(set(launched))


UNSUITED = {
    "no GPU": (wide(), "v1_tiled_backward", "needs tensors on a CUDA device of sm_80 .* got .*CPU"),
    "dtype": (wide(dtype=torch.float64), "v1_tiled_backward", "needs dtype .*, got float64"),
    "head_dim": (wide(76), "v4_warp_specialized_backward", "multiple of 8, got 76"),
    "narrow": (wide(), "v7_wide_backward", "needs a head_dim over 128, got 128"),
    "long keys": (wide(longest=257), "v5_short_kv_backward", "at most 256, got 257"),
    "shared q": (
        wide() | {"cu_seqlens_q": None, "max_seqlen_q": 9},
        "v5_short_kv_backward",
        "needs cu_seqlens_q, got None: a shared q",
    ),
}  # fmt: skip


@pytest.mark.parametrize("grad", (False, True))
@pytest.mark.parametrize("case", UNSUITED)
def test_an_explicit_backward_that_cannot_take_the_call_is_refused_at_once(case, grad):
    call, impl, message = UNSUITED[case]
    call = required(call) if grad else call
    inside = contextlib.nullcontext() if case == "no GPU" else tritonemu.enabled()
    with inside, pytest.raises(NotImplementedError, match=f"backward_impl '{impl}' .*{message}"):
        gdpa(**call, impl="reference", backward_impl=impl)


def test_auto_takes_the_first_backward_that_supports_the_call(monkeypatch):
    order = ("v5_short_kv_backward", "v4_warp_specialized_backward")
    order += tuple(choices.UNMEASURED["backward"])
    monkeypatch.setattr(choices, "order", lambda *call: order)

    def of(call):
        batch = Batch(**call, activation=("gelu_tanh",), scale=1.0)
        return api.resolve("auto", "backward", batch).impl

    assert of(wide()) == "reference"
    with tritonemu.enabled():
        assert of(wide()) == "v5_short_kv_backward"
        for call in (wide(64), wide(72), wide(longest=257)):
            assert of(call) == "v4_warp_specialized_backward"
        assert of(wide() | {"cu_seqlens_q": None}) == "v4_warp_specialized_backward"
        for call in (wide(16), wide(76), wide(dtype=torch.float32)):
            assert of(call) == "v1_tiled_backward"
        assert of(wide(264)) == of(wide(dtype=torch.float64)) == "reference"
        with pytest.raises(NotImplementedError, match="backward_impl 'auto' needs dtype bfloat16"):
            of(wide(dtype=torch.float8_e5m2))
    with tritonemu.enabled(arch="sm_100"):
        assert of(wide()) == "v1_tiled_backward"


@pytest.mark.parametrize("shared", (False, True))
def test_what_is_saved(shared):
    """q, k, v and the offsets themselves, and nothing else."""
    call = required(arguments())
    if shared:
        call |= {"cu_seqlens_q": None, "max_seqlen_q": 9}
    _, saved = saved_by(lambda: gdpa(**call))
    given = [value for value in call.values() if isinstance(value, torch.Tensor)]
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in given]


@pytest.mark.parametrize("precise", (False, True))
def test_torch_compile_hands_precise_to_the_kernel(precise):
    torch._dynamo.reset()
    compiled = torch.compile(gdpa, fullgraph=True, backend="aot_eager")
    call = wide() | {"impl": "v8_own_waits", "precise": precise}
    with tritonemu.enabled(), launches() as seen:
        out, expected = compiled(**call), gdpa(**call)
    assert torch.equal(out, expected)
    pairs = [launch.constants["PAIRS"] for launch in seen if "PAIRS" in launch.constants]
    assert pairs == [not precise] * 2


def test_ladders_list_every_rung_file():
    files = {path.stem for path in (rungs.PACKAGE / "gdpa").rglob("[bv][0-9]*_*.py")}
    backward = {name for name in files if name.endswith("_backward")}
    assert set(api.BACKWARD_IMPLS) == backward | {"reference"}
    assert set(api.IMPLS) == files - backward | {"reference"}


@pytest.mark.parametrize("direction", rungs.DIRECTIONS)
def test_every_rung_names_its_predecessor(direction):
    _, first, *others = api.IMPLS if direction == "forward" else api.BACKWARD_IMPLS
    assert ladder.rung(first).predecessor is None
    known = [first]
    for rung in map(ladder.rung, others):
        assert rung.predecessor in known
        assert f"Changes from {rung.predecessor}" in rung.path.read_text()
        text = lessons.file_diff(rung)
        before, after, *_ = text.splitlines()
        assert before.startswith("--- gdpa/") and before.endswith(f"/{rung.predecessor}.py")
        assert after.startswith("+++ gdpa/") and after.endswith(f"/{rung.impl}.py")
        known.append(rung.impl)


OF_A_CONSTANT = {"b4_mixed": {"b3_stream"}, "b6_dq_once_backward": {"b5_stream_backward"}}


def test_no_rung_but_a_constant_of_one_imports_another_and_no_kernel_imports_the_definition():
    impls = {rung.impl for rung in ladder.LADDERS["gdpa"]}
    for path in (rungs.PACKAGE / "gdpa").rglob("*.py"):
        if path.stem in ("api", "registration", "__init__"):
            continue
        source = path.read_text()
        others = impls - {path.stem} - OF_A_CONSTANT.get(path.stem, set())
        assert not [impl for impl in others if f"import {impl}" in source or f".{impl} " in source]
