"""What the compiler makes of the backward rungs: the instructions that make each what it is, and no
spills."""

from functools import cache

import pytest
import torch
from triton.compiler import CompiledKernel

from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import Launch, launches
from gdpa_kernels.gdpa.device import gradients
from gdpa_kernels.gdpa.ladder import v2_fused_backward
from gdpa_lab.measuring.compile_check import (
    SHARED_BYTES,
    TENSOR_COLUMNS,
    Compiled,
    build,
    build_launch,
    read,
    shortest_loop,
)
from tests.block_attention.compiling import compile_launch, read_once
from tests.gdpa.cases import Case, batch_of
from tests.tiers import sweep, swept

PLAIN = ("v1_tiled_backward", "v2_fused_backward", "v2a_ordered_backward")
V4, V5, V6, V7 = (
    "v4_warp_specialized_backward", "v5_short_kv_backward", "v6_one_tile_backward",
    "v7_wide_backward",
)  # fmt: skip
B1, B2, B3, *PAIRS = BLACKWELL = (
    "b1_tensor_memory_backward", "b2_short_kv_backward", "b3_dk_first_backward", "b4_pair_backward",
    "b5_stream_backward", "b6_dq_once_backward",
)  # fmt: skip
BF16, FP16 = torch.bfloat16, torch.float16
KNOWN_SPILLS_OF_V1 = {("keys_kernel", 128): 20}


@cache
def launched(
    impl: str, head_dim: int = 128, dtype: torch.dtype = BF16, heads_k: int = 4,
    needs: tuple[bool, bool, bool] | None = None, config: object = None, **options,
) -> dict[str, Launch]:  # fmt: skip
    """The launches of a call with 4 query heads, by name; nothing runs."""
    case = Case("compiled", (64, 3), None, 4, heads_k, head_dim, options=options)
    call = {n: t.cpu() if isinstance(t, torch.Tensor) else t for n, t in case.call(dtype).items()}
    more = {"needs": needs, "config": config}
    more = {name: value for name, value in more.items() if value is not None}
    module = ladder.rung(impl).module()
    with launches(run=False) as seen:
        module.backward(call["grad_out"], batch_of(call), **more)
    return {launch.name: launch for launch in seen if "list" not in launch.name}


def compiled(impl: str, **options) -> Compiled:
    """What the compiler makes of the main kernel of a warp-specialized rung."""
    return compile_launch(launched(impl, **options)["backward_kernel"])


# -- Plain Triton ----------------------------------------------------------------------------------


def of_all(impl: str, **options) -> dict[str, Compiled]:
    """The kernels of a rung by name."""
    return {name: compile_launch(launch) for name, launch in launched(impl, **options).items()}


def fused(impl: str = "v2_fused_backward", **options) -> Compiled:
    """The kernel of a fused rung; what rounds dQ aside."""
    (made,) = (m for name, m in of_all(impl, **options).items() if name != "round_kernel")
    return made


@pytest.mark.parametrize("head_dim, dtype", (sweep(64, FP16), (128, BF16)), ids=str)
@pytest.mark.parametrize("impl", PLAIN)
def test_hopper_code_of_the_measured_shapes(impl, head_dim, dtype):
    for name, made in of_all(impl, head_dim=head_dim, dtype=dtype).items():
        assert made.spill_bytes <= KNOWN_SPILLS_OF_V1.get((name, head_dim), 0), name
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


@pytest.mark.sweep
@pytest.mark.parametrize(
    "options",
    (
        {"head_dim": 64},
        {"dtype": FP16},
        {"causal": True},
        {"window": 100},
        {"heads_k": 2},
        {"activation": ("gelu", "silu", "relu", "gelu_tanh")},
    ),
    ids=str,
)
def test_options_of_the_fused_rung_do_not_spill(options):
    made = fused(**options)
    assert made.spill_bytes == 0 and not made.serialised


@pytest.mark.sweep
def test_known_spills_of_the_fused_rung_do_not_grow():
    made = fused(causal=True, heads_k=2)
    assert 0 < made.spill_bytes <= 180 and not made.serialised


@pytest.mark.sweep
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


@pytest.mark.sweep
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


# -- Roles on Hopper -------------------------------------------------------------------------------


# Bytes that are spilled. Once a tile: fields of its entry in the list and addresses of its stores,
# for which there is no register during its first step.
ONCE_A_TILE = (
    (V4, {"head_dim": 64}, 64),
    (V6, {"head_dim": 64, "activation": "silu"}, 104),
)
# By v5 outside the loop over steps, or for a mask.
SEGMENTS = torch.zeros(2, 2, dtype=torch.int32)
KNOWN_SPILLS = (
    *ONCE_A_TILE,
    (V4, {"causal": True}, 8),
    (V4, {"head_dim": 64, "heads_k": 2, "causal": True}, 132),
    (V4, {"heads_k": 2, "causal": True, "dtype": FP16}, 12),
    (V4, {"window": 40}, 8),
    (V4, {"causal": "lower_right", "segments": SEGMENTS}, 12),
    (V4, {"causal": True, "segments": SEGMENTS, "head_dim": 64}, 136),
    (V4, {"head_dim": 32, "causal": True, "segments": SEGMENTS}, 136),
    (V7, {"head_dim": 256, "causal": True, "window": 9, "segments": SEGMENTS}, 44),
    (V7, {"head_dim": 256, "causal": "lower_right", "segments": SEGMENTS}, 28),
    (V5, {}, 120),
    (V5, {"heads_k": 2, "causal": True, "dtype": FP16}, 668),
)


def check_instructions(impl: str, made: Compiled) -> None:
    """What makes the rung what it is: roles, TMA, and how dQ gets to memory."""
    assert not made.serialised and made.shared_bytes <= 227 * 1024
    for instruction in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"):
        assert made.instructions[instruction] > 0, instruction
    assert (made.instructions["UTMAREDG"] > 0) == (impl in (V4, V7))
    assert (made.instructions["UBLKCP"] > 0) == (impl == V5)  # dS to the other program
    atomics = {n: x for n, x in made.instructions.items() if n.startswith(("RED", "ATOM"))}
    assert atomics in ({}, {"ATOMG": 1})  # that of a ticket
    assert made.wide["LDG"] == made.wide["STG"] == 0


@pytest.mark.parametrize(
    "impl, options",
    [
        (V4, {}),
        (V6, {}),
        (V7, {"head_dim": 256}),
        sweep(V4, {"causal": "lower_right"}),
        sweep(V6, {"head_dim": 64}),
        sweep(V6, {"head_dim": 64, "heads_k": 2, "causal": True}),
        sweep(V6, {"window": 40, "dtype": FP16}),
        sweep(V7, {"head_dim": 256, "heads_k": 2}),
        sweep(V7, {"head_dim": 200, "heads_k": 2, "causal": True, "dtype": FP16}),
        sweep(V7, {"head_dim": 256, "window": 40}),
        sweep(V7, {"head_dim": 256, "causal": True, "segments": SEGMENTS}),
    ],
    ids=str,
)
def test_it_does_not_spill(impl, options):
    made = compiled(impl, **options)
    check_instructions(impl, made)
    assert made.spill_bytes == 0


@pytest.mark.parametrize(
    "impl, options, most", swept(KNOWN_SPILLS, lambda impl, options, most: options == {}), ids=str
)
def test_known_spills_do_not_grow(impl, options, most):
    made = compiled(impl, **options)
    check_instructions(impl, made)
    assert 0 < made.spill_bytes <= most


@pytest.mark.sweep
@pytest.mark.parametrize("impl, options", [known[:2] for known in ONCE_A_TILE], ids=str)
def test_the_loop_over_steps_does_not_spill(impl, options):
    """128 rows of 64 keys are 64 scores of a thread, each with an instruction of the MUFU."""
    loop = shortest_loop(build_launch(launched(impl, **options)["backward_kernel"]), "MUFU", 64)
    assert not {"LDL", "STL"} & set(loop)


def test_programs_of_v5_come_in_clusters_of_two():
    """The hardware launches both together, and each waits until the other has its barriers."""
    launch = launched(V5)["backward_kernel"]
    assert launch.options["ctas_per_cga"] == (2, 1, 1) and launch.grid[0] % 2 == 0
    assert compiled(V5).instructions["UCGABAR"] >= 2
    assert compiled(V4).instructions["UCGABAR"] == 0


# -- Blackwell -------------------------------------------------------------------------------------


@cache
def for_blackwell(impl: str, **options) -> tuple[CompiledKernel, Compiled, Launch]:
    """The main kernel of a rung, what became of it, and its launch."""
    launch = launched(impl, **options)["backward_kernel"]
    built = build_launch(launch, capability=100)
    return built, read_once(built), launch


# Bytes that are spilled: constants that roles carry into their loops, and outside of these; in b4
# most are addresses of a tile's end.
MOST_SPILLED = dict.fromkeys(BLACKWELL, 64) | {PAIRS[0]: 168}
LOCAL = ("LDL", "STL")


@pytest.mark.parametrize(
    "options",
    (
        {},
        sweep({"head_dim": 64}),
        sweep({"heads_k": 2, "causal": True, "window": 40}),
        sweep({"dtype": FP16, "activation": "gelu", "window": 40}),
    ),
    ids=str,
)
@pytest.mark.parametrize("impl", BLACKWELL)
def test_fits_and_does_not_spill_in_loops(impl, options):
    built, made, _ = for_blackwell(impl, **options)
    assert made.shared_bytes <= SHARED_BYTES[100]
    assert built.metadata.tmem_size == TENSOR_COLUMNS
    assert made.registers == 65536 // 512 and made.spill_bytes <= MOST_SPILLED[impl]
    for loop in (shortest_loop(built, "MUFU", 64), shortest_loop(built, "UTCHMMA", 24)):
        assert not [name for name in loop if name in LOCAL]


@pytest.mark.sweep
@pytest.mark.parametrize("impl, reads", (("b5_stream_backward", 0), ("b6_dq_once_backward", 1)))
def test_with_targets_at_most_one_value_is_read_back_in_a_loop(impl, reads):
    built, made, _ = for_blackwell(impl, causal=True, segments=SEGMENTS)
    assert made.shared_bytes <= SHARED_BYTES[100] and made.spill_bytes <= MOST_SPILLED[impl]
    for loop in (shortest_loop(built, "MUFU", 64), shortest_loop(built, "UTCHMMA", 24)):
        assert [name for name in loop if name in LOCAL] in ([], ["LDL"] * reads)


@pytest.mark.parametrize("head_dim", (sweep(64), 128))
@pytest.mark.parametrize("impl", BLACKWELL)
def test_instructions_that_make_the_rung(impl, head_dim):
    """An MMA instruction sums over 16; dQ and dK stand behind the loop over steps once more. No
    commit is the compiler's own, which pipelines loops with MMAs unless it is told not to."""
    _, made, _ = for_blackwell(impl, head_dim=head_dim)
    count = made.instructions
    over_dim, over_128 = head_dim // 16, 128 // 16
    of_dq = 2 * over_128 if impl in PAIRS else over_128  # of all keys
    assert count["UTCHMMA"] == 2 * over_dim + over_128 + 2 * (over_128 + of_dq)
    # S, dP, dV; dQ, dK twice; the tile's end. In pairs two more for the rows of Q and dO; in b5 the
    # end has one, twice, and three when the last S, dP and dV of an item are complete.
    of_ends = 2 + 3 * (impl in PAIRS[1:])
    assert count["UTCBAR"] == 3 + 2 * 2 + of_ends + 2 * (impl in PAIRS)
    if impl not in PAIRS:  # the first step is peeled
        assert count["UTMALDG"] == (head_dim // 64) * (2 + 2 * 2)
    assert count["STTM"] == 2 * 2 * (1 + (impl in (B3, *PAIRS)))  # P, dS of two roles in two parts
    assert count["USETMAXREG"] > 0
    assert not {"RED", "REDG", "ATOM", "ATOMG"} & set(count)
    epilogue = 2 * head_dim // 64
    if impl in PAIRS:  # dQ is read whole; dS goes to the peer in two parts of each role
        assert count["LDTM"] == 2 * 4 + epilogue + 1
        assert (count["UTMAREDG"], count["UTMASTG"]) == ((0, 3) if impl == PAIRS[2] else (1, 2))
        assert count["STAS"] >= 2 * 2 * 4
    elif impl != B2:
        assert count["LDTM"] == 2 * 4 + epilogue + head_dim // 32
        assert (count["UTMAREDG"], count["UTMASTG"], count["STAS"]) == (head_dim // 32, 2, 0)
    else:
        assert count["LDTM"] == 2 * 4 + epilogue + 2
        # 4 bytes of fp32 for each of 128 rows and half of the columns, 16 bytes a thread.
        stores = 128 * (head_dim // 2) * 4 // (128 * 16)
        assert (count["UTMAREDG"], count["UTMASTG"], count["STAS"]) == (0, 3, stores)


def test_ctas_of_b2_come_in_clusters_of_two():
    """Each MMA is of one CTA all the same."""
    built, made, launched = for_blackwell(B2)
    assert launched.options["ctas_per_cga"] == (2, 1, 1) and launched.grid[0] % 2 == 0
    assert made.instructions["UCGABAR"] >= 2 and "cta_group::2" not in built.asm["ptx"]
    assert for_blackwell(B1)[1].instructions["UCGABAR"] == 0


@pytest.mark.parametrize("impl", PAIRS)
def test_all_mmas_are_of_a_pair(impl):
    built, _, launched = for_blackwell(impl)
    assert launched.options["ctas_per_cga"] == (2, 1, 1) and launched.grid[0] % 2 == 0
    assert "cta_group::1" not in built.asm["ptx"]
    assert "tcgen05.mma.cta_group::2" in built.asm["ptx"]
