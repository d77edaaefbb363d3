"""The backward rungs for sm_100: under several schedules, and as sm_100a code.

`test_backward_roles` holds them against the definition, and makes mistakes in them.
"""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from triton.compiler import CompiledKernel

import tritonemu
from _lib.compile_check import (
    SHARED_BYTES,
    TENSOR_COLUMNS,
    Compiled,
    build_launch,
    read,
    shortest_loop,
)
from gdpa_kernels.calling.launches import Launch, launches
from gdpa_kernels.gdpa.kernels import b1_tensor_memory_backward as b1
from gdpa_kernels.gdpa.kernels import b2_short_kv_backward as b2
from tests.gdpa.cases import DEVICE, Case
from tests.gdpa.test_backward_roles import BLACKWELL as RUNGS
from tests.gdpa.test_backward_roles import batch_of, call_of, check, problem

BF16, FP16 = torch.bfloat16, torch.float16
pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="sm_100 is emulated, and compiled")


def gradients(module, call: dict, schedule: str | int = "modelled", **more) -> tuple:
    """(dq, dk, dv) of a rung, emulated."""
    with tritonemu.enabled("sm_100", schedule=schedule, max_steps=100_000):
        return module.backward(call["grad_out"], batch_of(call), **more)


# -- Schedules -------------------------------------------------------------------------------------

# On two CTAs: items follow each other there, and the last round is not full.
ORDERS = {
    "b1, one tile of keys": (b1, Case("orders", (260, 0, 9, 1), (128, 5, 100, 0), 1, 1, 128)),
    "b1, two tiles of keys": (b1, Case("orders", (130, 0, 70), (256, 5, 129), 1, 1)),
    "b2": (b2, Case("orders", (260, 0, 9), (256, 5, 129), 1, 1, 128)),
    "b2, grouped": (b2, Case("orders", (130, 0, 9), (256, 5, 129), 2, 1)),
}


@pytest.mark.parametrize("name", ORDERS)
def test_twenty_schedules_give_the_same_bits(name):
    """No race, no deadlock; at most two tiles of keys add to a row of dQ, and two commute."""
    module, case = ORDERS[name]
    call = call_of(case, BF16) | {"activation": ("relu",)}
    with tritonemu.enabled("sm_100", multiprocessors=2, max_steps=100_000):
        expected = module.backward(call["grad_out"], batch_of(call))
    for seed in range(20):
        with tritonemu.enabled("sm_100", multiprocessors=2, schedule=seed, max_steps=100_000):
            found = module.backward(call["grad_out"], batch_of(call))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), seed


def test_three_tiles_of_keys_keep_the_budget_in_any_order():
    case = Case("orders", (130, 0, 70), (300, 5, 129), 1, 1)
    for schedule in range(2):
        check(partial(gradients, b1, schedule=schedule), case, BF16)


@pytest.mark.parametrize("config", ({"q_stages": 3, "g_stages": 2}, {"fold": False}), ids=str)
@pytest.mark.parametrize("impl", RUNGS)
def test_any_config(impl, config):
    config = RUNGS[impl].Config(**config)
    check(partial(gradients, RUNGS[impl], config=config), Case("config", (300, 7), (70, 1)), BF16)


@pytest.mark.parametrize("impl", RUNGS)
def test_of_head_dims_64_and_128_alone(impl):
    for head_dim in (64, 128):
        assert problem(impl, call_of(Case("dim", (5,), head_dim=head_dim), BF16)) is None
    for head_dim in (16, 96, 256):
        assert "head_dim" in problem(impl, call_of(Case("dim", (5,), head_dim=head_dim), BF16))


# -- Code for sm_100a ------------------------------------------------------------------------------


@cache
def compiled(
    impl: str,
    dtype: torch.dtype = BF16,
    head_dim: int = 128,
    heads_k: int = 4,
    activation: str = "gelu_tanh",
    **options,
) -> tuple[CompiledKernel, Compiled, Launch]:
    """The main kernel of a rung for 4 query heads, what became of it, and its launch."""
    options["activation"] = activation
    call = call_of(Case("compiled", (64, 3), None, 4, heads_k, head_dim, options=options), dtype)
    with launches(run=False) as seen:
        RUNGS[impl].backward(call["grad_out"], batch_of(call))
    (launched,) = (launch for launch in seen if launch.name == "backward_kernel")
    built = build_launch(launched, capability=100)
    return built, read(built), launched


# Bytes that are spilled: constants that roles carry into their loops, and outside of these.
MOST_SPILLED = 64
LOCAL = ("LDL", "STL")


@pytest.mark.parametrize(
    "options",
    (
        {},
        {"head_dim": 64},
        {"heads_k": 2, "causal": True, "window": 40},
        {"dtype": FP16, "activation": "gelu", "window": 40},
    ),
    ids=str,
)
@pytest.mark.parametrize("impl", RUNGS)
def test_fits_and_does_not_spill_in_loops(impl, options):
    built, made, _ = compiled(impl, **options)
    assert made.shared_bytes <= SHARED_BYTES[100]
    assert built.metadata.tmem_size == TENSOR_COLUMNS
    assert made.registers == 65536 // 512 and made.spill_bytes <= MOST_SPILLED
    for loop in (shortest_loop(built, "MUFU", 64), shortest_loop(built, "UTCHMMA", 24)):
        assert not [name for name in loop if name in LOCAL]


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("impl", RUNGS)
def test_instructions_that_make_the_rung(impl, head_dim):
    """An MMA instruction sums over 16; dQ and dK stand behind the loop over steps once more. No
    commit is the compiler's own, which pipelines loops with MMAs unless it is told not to."""
    _, made, _ = compiled(impl, head_dim=head_dim)
    count = made.instructions
    over_dim, over_128 = head_dim // 16, 128 // 16
    assert count["UTCHMMA"] == 2 * over_dim + over_128 + 2 * 2 * over_128
    assert count["UTCBAR"] == 3 + 2 * 2 + 2  # S, dP, dV; dQ, dK twice; the tile's end
    assert count["UTMALDG"] == (head_dim // 64) * (2 + 2 * 2)  # the first step is peeled
    assert count["STTM"] == 2 * 2  # P of two roles in two parts
    assert count["USETMAXREG"] > 0
    assert not {"RED", "REDG", "ATOM", "ATOMG"} & set(count)
    epilogue = 2 * head_dim // 64
    if impl == "b1_tensor_memory_backward":
        assert count["LDTM"] == 2 * 4 + epilogue + head_dim // 32
        assert (count["UTMAREDG"], count["UTMASTG"], count["STAS"]) == (head_dim // 32, 2, 0)
    else:
        assert count["LDTM"] == 2 * 4 + epilogue + 2
        # 4 bytes of fp32 for each of 128 rows and half of the columns, 16 bytes a thread.
        stores = 128 * (head_dim // 2) * 4 // (128 * 16)
        assert (count["UTMAREDG"], count["UTMASTG"], count["STAS"]) == (0, 3, stores)


def test_ctas_of_b2_come_in_clusters_of_two():
    """Each MMA is of one CTA all the same."""
    built, made, launched = compiled("b2_short_kv_backward")
    assert launched.options["ctas_per_cga"] == (2, 1, 1) and launched.grid[0] % 2 == 0
    assert made.instructions["UCGABAR"] >= 2 and "cta_group::2" not in built.asm["ptx"]
    assert compiled("b1_tensor_memory_backward")[1].instructions["UCGABAR"] == 0
