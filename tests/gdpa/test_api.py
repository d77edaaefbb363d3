"""The front door: arguments, errors, the choice of implementation, torch.compile, opcheck."""

from __future__ import annotations

import pytest
import torch

from gdpa_kernels import emulator, gdpa, ladder
from gdpa_kernels.gdpa import api
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
    assert api.resolve("auto", *(call[n] for n in "qkv")) == "v0_eager"
    for impl in ("v1_tiled", "v2_tma", "v3_persistent"):
        with pytest.raises(NotImplementedError, match=f"impl '{impl}' needs .*CUDA.*got .*CPU"):
            gdpa(**call, impl=impl)


def test_auto_prefers_the_first_kernel_that_supports_the_call():
    half = {name: torch.randn(9, 4, 16).bfloat16() for name in "qkv"}
    odd = {name: torch.randn(9, 4, 20).bfloat16() for name in "qkv"}
    single = {name: torch.randn(9, 4, 16) for name in "qkv"}
    with emulator.enabled():
        assert api.resolve("auto", **half) == "v6_short_kv"
        wide = {name: torch.randn(9, 4, 136).bfloat16() for name in "qkv"}
        assert api.resolve("auto", **wide) == "v2_tma"
        assert api.resolve("auto", **odd) == "v1_tiled"
        assert api.resolve("auto", **single) == "v1_tiled"
        with pytest.raises(NotImplementedError, match="v2_tma' needs dtype bfloat16 or float16"):
            api.resolve("v2_tma", **single)
        with pytest.raises(NotImplementedError, match="multiple of 8, got 20"):
            api.resolve("v2_tma", **odd)
        flipped = half | {"k": torch.randn(16, 4, 9).bfloat16().permute(2, 1, 0)}
        with pytest.raises(NotImplementedError, match="needs k with contiguous rows"):
            api.resolve("v2_tma", **flipped)
        with pytest.raises(
            NotImplementedError, match="v6_short_kv' needs a head_dim of at most 128"
        ):
            api.resolve("v6_short_kv", **wide)
    with emulator.enabled(arch="sm_100"):
        assert api.resolve("auto", **half) == "v2_tma"
        with pytest.raises(NotImplementedError, match="needs sm_90, got an emulated sm_100"):
            api.resolve("v6_short_kv", **half)


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


def test_backward_is_refused_clearly():
    call = arguments()
    call["q"].requires_grad_()
    with pytest.raises(RuntimeError, match="gdpa has no backward pass yet"):
        gdpa(**call).sum().backward()


def test_ladder_lists_every_rung_file_and_its_predecessor():
    files = sorted(path.stem for path in (ladder.PACKAGE / "gdpa").glob("v[0-9]*_*.py"))
    assert files == [rung.impl for rung in ladder.RUNGS]
    assert ladder.RUNGS[0].predecessor is None
    for index, rung in enumerate(ladder.RUNGS[1:], 1):
        assert rung.predecessor in files[:index]
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
