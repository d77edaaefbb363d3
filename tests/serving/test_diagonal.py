"""The candidates' own term: its kernel against fp64, and who gets it."""

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import tritonemu
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.gdpa.device.sums import add_up
from gdpa_kernels.gdpa.reference import activate_heads
from gdpa_kernels.serving import PagedCache, diagonal, score
from gdpa_kernels.serving.validity import HistoryRules

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def draw(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wanted(q, k, v, add_to, names=("gelu_tanh",), scale=None, output_scale=1.0) -> torch.Tensor:
    """The term in fp64."""
    q, k, v, add_to = (x.double() for x in (q, k, v, add_to))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    s = (q * k).sum(2, keepdim=True) * (q.shape[2] ** -0.5 if scale is None else scale)
    p = activate_heads(s.permute(1, 0, 2), tuple(names)).permute(1, 0, 2)
    return add_to + output_scale * p * v


@pytest.mark.parametrize("dtype, bound", ((BF16, 4e-3), (FP16, 6e-4), (FP32, 1e-6)))
@pytest.mark.parametrize("head_dim", (16, 100, 128, 256))
@pytest.mark.parametrize("heads", ((2, 2), (4, 1)))
def test_it_is_the_term(dtype, bound, head_dim, heads):
    """At 33 rows, more than a tile of the wider heads; k and v lie in one tensor."""
    q, add_to = draw(33, heads[0], head_dim, dtype=dtype), draw(33, heads[0], head_dim, dtype=FP32)
    k, v = draw(33, 2 * heads[1], head_dim, dtype=dtype, seed=1).split(heads[1], dim=1)
    with tritonemu.enabled():
        found = diagonal.add_diagonal(q, k, v, add_to)
    assert found.dtype == dtype
    exact = wanted(q, k, v, add_to)
    assert (found.double() - exact).norm() < bound * exact.norm()


@pytest.mark.parametrize("names", ("silu", ("relu", "silu", "identity"), "gelu", "hardswish"))
def test_options(names):
    given = {"scale": 1, "output_scale": 3, "activation": names}
    q, k, v = (draw(9, 3, 32, dtype=FP32, seed=seed) for seed in range(3))
    add_to = draw(9, 3, 64, dtype=BF16)[:, :, ::2]
    with tritonemu.enabled():
        found = diagonal.add_diagonal(q, k, v, add_to, **given)
        rounded = diagonal.add_diagonal(q, k, v, add_to, out_dtype=BF16, **given)
    exact = wanted(q, k, v, add_to, (names,) if isinstance(names, str) else names, 1, 3)
    assert (found.double() - exact).norm() < 1e-3 * exact.norm()
    assert torch.equal(rounded, found.to(BF16))


@pytest.mark.parametrize("addends", (1, 2, 3, 5))
def test_partial_sums_give_the_bits_of_their_sum(addends):
    q, k, v = (draw(33, 2, 64, seed=seed) for seed in range(3))
    sums = draw(addends, 33, 2, 64, dtype=FP32)
    with tritonemu.enabled():
        found = diagonal.add_diagonal(q, k, v, sums)
        total = add_up(sums, None, torch.empty_like(sums[0]))
        assert torch.equal(found, diagonal.add_diagonal(q, k, v, total))


@pytest.fixture
def kept() -> tuple:
    cache = PagedCache(HistoryRules(1), 8, 4, 2, 32, dtype=BF16)
    table = cache.append(["a", "b"], [5, 3])
    cache.write(0, table, draw(8, 2, 32), draw(8, 2, 32, seed=1))
    whole = cache.pages(["a", "b"])
    return cache, 0, whole


ENDS = torch.tensor([0, 2, 5], dtype=torch.int32)


def kernels(kept: tuple, q=None, **options) -> tuple[set[str], torch.Tensor]:
    """The kernels that a call of `score` launches, and its result."""
    q = draw(5, 2, 32, seed=2) if q is None else q
    with tritonemu.enabled(), launches() as seen:
        out = score(q, draw(5, 2, 32, seed=3), draw(5, 2, 32, seed=4), ENDS, 3, *kept, **options)
    return {launched.kernel.__name__ for launched in seen}, out


@pytest.mark.parametrize("out_dtype", (None, FP32))
def test_candidates_that_see_themselves_alone_get_it(kept, out_dtype):
    given = {"activation": "silu", "output_scale": 0.5, "out_dtype": out_dtype}
    names, found = kernels(kept, in_one_call=False, **given)
    assert "diagonal_kernel" in names
    plain, other = kernels(kept, impl="v1_tiled", in_one_call=False, **given)
    assert plain == {"tiled_kernel"} and other.dtype == found.dtype == (out_dtype or BF16)
    assert (found - other).norm() < 5e-3 * other.norm()


def test_others_get_the_second_call(kept):
    q = draw(5, 2, 32).requires_grad_()
    two = {"in_one_call": False}
    for names, _ in (kernels(kept, q, **two), kernels(kept, target_group_size=2, **two)):
        assert "diagonal_kernel" not in names
    with torch.no_grad():
        assert "diagonal_kernel" in kernels(kept, q, **two)[0]


def test_wrong_arguments(kept):
    q, k = draw(5, 2, 32), draw(4, 2, 32)
    with tritonemu.enabled():
        with pytest.raises(ValueError, match="k must have q's 5 rows, got 4"):
            score(q, k, k, ENDS, 3, *kept)
        with pytest.raises(TypeError, match="k must be a tensor, got list"):
            score(q, [0.0], q, ENDS, 3, *kept)
        with pytest.raises(
            TypeError, match="out_dtype must be None or torch.bfloat16 or torch.float"
        ):
            score(q, q, q, ENDS, 3, *kept, out_dtype=FP16, in_one_call=False)


@pytest.mark.parametrize("arch", (80, 90, 100))
@pytest.mark.parametrize("head_dim", (64, 128, 256))
@pytest.mark.parametrize("most", (1, 4))
def test_it_loads_whole_vectors(most, arch, head_dim):
    names = diagonal.diagonal_kernel.arg_names
    strides = (4 * head_dim, head_dim, 1)
    constants = {name: strides for name in names if name.endswith("STRIDES")} | {
        "NUM_HEADS": 4, "GROUP": 1, "HEAD_DIM": head_dim, "ACTIVATION": "silu",
        "ROWS": diagonal.ELEMENTS // head_dim, "WIDTH": head_dim, "MOST_ADDENDS": most,
    }  # fmt: skip
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), "*bf16") | {"add_ptr": "*fp32"}
    types |= dict.fromkeys(("total", "addends", "size"), "i32")
    types |= dict.fromkeys(("scale", "output_scale"), "fp32")
    signature = {name: types.get(name, "constexpr") for name in names}
    wide = [i for i, n in enumerate(names) if n.endswith("ptr") or n == "size"]
    aligned = {(i,): [["tt.divisibility", 16]] for i in wide}
    source = ASTSource(
        diagonal.diagonal_kernel, signature,
        {(names.index(name),): value for name, value in constants.items()}, aligned,
    )  # fmt: skip
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4})
    loads = [line for line in made.asm["ptx"].splitlines() if "ld.global" in line]
    assert loads and all(".v4" in line or ".v8" in line for line in loads)
