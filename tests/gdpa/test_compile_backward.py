"""What the compiler makes of the backward rungs in plain Triton, on Hopper: the instructions that
make each what it is, and no spills."""

import functools

import pytest
import torch

from _lib.compile_check import Compiled, build, read
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.gdpa import gradients
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.kernels import v1_tiled_backward, v2a_ordered_backward
from gdpa_kernels.gdpa.ladder import v2_fused_backward
from tests.block_attention.compiling import compile_launch

RUNGS = {
    "v1_tiled_backward": v1_tiled_backward,
    "v2_fused_backward": v2_fused_backward,
    "v2a_ordered_backward": v2a_ordered_backward,
}
BF16, FP16 = torch.bfloat16, torch.float16
KNOWN_SPILLS = {("keys_kernel", 128): 20}


@functools.cache
def compiled(
    impl: str, head_dim: int = 128, dtype: torch.dtype = BF16, num_heads_k: int = 4,
    activation: tuple[str, ...] = ("gelu_tanh",), causal: bool = False, window: int | None = None,
    needs: tuple[bool, bool, bool] = (True, True, True), config: object = None,
) -> dict[str, Compiled]:  # fmt: skip
    """The kernels of a call with 4 query heads, by name."""
    q = torch.zeros(130, 4, head_dim, dtype=dtype)
    k = torch.zeros(130, num_heads_k, head_dim, dtype=dtype)
    ends = torch.tensor([0, 130], dtype=torch.int32)
    more = {} if config is None else {"config": config}

    batch = Batch(q, k, k, ends, ends, 130, 130, activation, 0.1, 1.0, causal, window)
    with launches(run=False) as seen:
        RUNGS[impl].backward(q, batch, needs=needs, **more)

    return {launch.name: compile_launch(launch) for launch in seen}


def fused(impl: str = "v2_fused_backward", **options) -> Compiled:
    """The kernel of a fused rung; what rounds dQ aside."""
    (made,) = (m for name, m in compiled(impl, **options).items() if name != "round_kernel")
    return made


@pytest.mark.parametrize("head_dim, dtype", ((64, FP16), (128, BF16)), ids=str)
@pytest.mark.parametrize("impl", RUNGS)
def test_hopper_code_of_the_measured_shapes(impl, head_dim, dtype):
    for name, made in compiled(impl, head_dim=head_dim, dtype=dtype).items():
        assert made.spill_bytes <= KNOWN_SPILLS.get((name, head_dim), 0), name
        assert not made.serialised, name
        assert made.shared_bytes <= 227 * 1024, name
        if name == "round_kernel":
            continue
        assert made.instructions["HGMMA"] > 0 and made.instructions["MUFU"] > 0, name
        by_tma = impl != "v1_tiled_backward"
        assert (made.instructions["LDGSTS"] > 0) != by_tma
        for mnemonic in ("UTMALDG", "UTMASTG", "UTMAREDG"):
            assert (made.instructions[mnemonic] > 0) == by_tma, mnemonic
        assert not any(m.startswith(("RED", "ATOM")) for m in made.instructions), name


@pytest.mark.parametrize("head_dim, dtype", ((64, BF16), (128, FP16)), ids=str)
def test_the_other_dtypes_do_not_spill(head_dim, dtype):
    made = fused(head_dim=head_dim, dtype=dtype)
    assert made.spill_bytes == 0 and not made.serialised


@pytest.mark.parametrize(
    "options",
    (
        {"causal": True},
        {"window": 100},
        {"num_heads_k": 2},
        {"activation": ("gelu", "silu", "relu", "gelu_tanh")},
    ),
    ids=str,
)
def test_options_of_the_fused_rung_do_not_spill(options):
    made = fused(**options)
    assert made.spill_bytes == 0 and not made.serialised


def test_known_spills_of_the_fused_rung_do_not_grow():
    made = fused(causal=True, num_heads_k=2)
    assert 0 < made.spill_bytes <= 180 and not made.serialised


def test_five_products_and_only_those_that_are_needed():
    """In wgmma of 16 along the sum: S, dP and dQ have 8 each, dV and dK 4."""
    products = {
        (True, True, True): 32,
        (True, False, False): 24,
        (False, True, True): 24,
        (False, False, True): 12,
    }
    for needs, count in products.items():
        assert fused(needs=needs).instructions["HGMMA"] == count, needs


def test_threads_add_where_tma_does_not():
    made = fused(config=v2_fused_backward.Config(by_tma=False))
    assert made.instructions["REDG"] > 0 and made.instructions["UTMAREDG"] == 0
    assert made.spill_bytes <= 40 and not made.serialised


@pytest.mark.parametrize("places", ({}, {"WIDTH": 512, "STRIDE": 1536}), ids=("alone", "packed"))
def test_rounding_moves_16_bytes_at_a_time(places):
    """head_dim is a multiple of 8, and so is the number of elements; by 16 it is nearly always."""
    types = {"sums_ptr": "*fp32", "out_ptr": "*bf16", "factor": "fp32", "count": "i32"}
    made = read(
        build(
            gradients.round_kernel, types, {"BLOCK": 4096, "WIDTH": 1, "STRIDE": 1} | places,
            multiples_of_16=("count",), options={"num_warps": 4},
        )
    )  # fmt: skip
    assert made.wide["LDG"] == 8 and made.wide["STG"] == 4
