"""What the compiler makes of each rung: the instructions that make it what it is, and no spills."""

import re
from functools import cache

import pytest
import torch

from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.mask import Mask
from gdpa_lab.measuring import compile_check
from tests.block_attention.compiling import read_once
from tests.tiers import sweep, swept


def compiled(impl: str, **options) -> compile_check.Compiled:
    """`compile_check.compile_rung`, read once where the options make no difference."""
    return read_once(compile_check.build_rung(impl, **options))


KERNELS = [rung.impl for rung in ladder.RUNGS if rung.requires.capability]
SPECIALIZED = [rung.impl for rung in ladder.RUNGS if rung.requires.only_major]


@pytest.mark.parametrize("max_seqlen_k", (sweep(256), 1024))
@pytest.mark.parametrize("impl", KERNELS)
def test_hopper_code_of_the_measured_shape(impl, max_seqlen_k):
    made = compiled(impl, max_seqlen_k=max_seqlen_k)
    assert made.instructions["HGMMA"] > 0 and made.instructions["MUFU"] > 0
    assert made.spill_bytes == 0 and not made.serialised
    assert (made.instructions["USETMAXREG"] > 0) == (impl in SPECIALIZED)
    programs = 1 if impl in SPECIALIZED else 2
    assert made.shared_bytes <= 227 * 1024 // programs - 1024 * (programs - 1)
    by_tma = impl != "v1_tiled"
    assert (made.instructions["UTMALDG"] > 0) == by_tma
    assert (made.instructions["UTMASTG"] > 0) == by_tma
    assert (made.instructions["LDGSTS"] > 0) != by_tma


FP16, SEGMENTS = torch.float16, torch.zeros(1, 2, dtype=torch.int32)
OPTIONS = [
    *((impl, {"head_dim": head_dim, "dtype": FP16}) for impl in KERNELS for head_dim in (64, 256)
      if head_dim <= ladder.rung(impl).requires.head_dim_max),
    *((impl, {"causal": True}) for impl in SPECIALIZED if not ladder.rung(impl).is_lesson),
    *((impl, options) for impl in SPECIALIZED for options in ({"activation": "silu"},
                                                              {"dtype": FP16})),
    # Of head_dim 64 the four consumers, of 112 registers, spill 176 bytes where they store fp32.
    ("v8_own_waits", {"out_dtype": torch.float32}),
    *(("v8_own_waits", {"head_dim": 200, **mask})
      for mask in ({}, {"causal": True, "window": 100})),
    *(("v8_own_waits", {"head_dim": head_dim, "causal": "lower_right", "segments": SEGMENTS})
      for head_dim in (64, 128)),
]  # fmt: skip


@pytest.mark.parametrize(
    "impl, options", swept(OPTIONS, [("v8_own_waits", {"causal": True})]), ids=str
)
def test_options_do_not_spill(impl, options):
    made = compiled(impl, **options)
    assert made.instructions["HGMMA"] > 0 and made.spill_bytes == 0 and not made.serialised
    assert made.shared_bytes <= 227 * 1024


@pytest.mark.parametrize("impl", (sweep("v2_tma"), "v3_persistent"))
def test_blackwell_code(impl):
    made = compiled(impl, capability=100)
    assert made.instructions["UTCHMMA"] > 0 and made.instructions["UTMALDG"] > 0


def test_ampere_code_of_the_general_rung():
    made = compiled("v1_tiled", capability=80)
    assert made.instructions["HMMA"] > 0 and made.instructions["LDGSTS"] > 0
    assert made.instructions["HGMMA"] == 0


def test_a_rung_without_a_kernel_is_refused():
    with pytest.raises(ValueError, match="impl must be a rung that launches .*, got 'v0_eager'"):
        compile_check.compile_rung("v0_eager")


# -- Blackwell -------------------------------------------------------------------------------------

ALONE = ("b1_tensor_memory", "b2_two_tiles", "b3_stream", "b4_mixed")
STREAMS = ("b6_pair_stream", "b7_split_stream")
PAIRS = ("b5_cta_pair", *STREAMS)
OF_LESSONS = ({}, {"head_dim": 64}, {"activation": "silu"})
MIXED = {"activation": "gelu,silu,relu,gelu_tanh"}
OF_BLACKWELL = [
    *((impl, options) for impl in (*ALONE, "b5_cta_pair") for options in OF_LESSONS),
    *((impl, options) for impl in STREAMS for options in (
        {}, {"causal": True}, {"head_dim": 64, "dtype": FP16, "window": 40}, MIXED,
        {"out_dtype": torch.float32}, {"out_dtype": torch.float32, "head_dim": 64},
        {"causal": True, "segments": SEGMENTS})),
]  # fmt: skip
# Of 16 keys or columns each, by rung MMAs and commits; more would be the compiler's own pipeline,
# which waits where the source does not. In a pair a role's first S, S in the loop and P V take 8;
# in b7 the first S is in the loop.
MMAS = {"b1_tensor_memory": 16, **dict.fromkeys((*ALONE[1:], *PAIRS), 48), "b7_split_stream": 32}
COMMITS = {"b1_tensor_memory": 4, "b2_two_tiles": 9, "b3_stream": 13, "b4_mixed": 13}
COMMITS |= {"b7_split_stream": 8}
# A box of 256 bytes a row takes two TMA loads: K and Q; V's halves have 128.
LOADS = {"b5_cta_pair": 8, "b6_pair_stream": 7, "b7_split_stream": 5}


@cache
def for_blackwell(impl: str, *, capability: int = 100, **options):
    """The kernel of a rung for sm_100a or sm_103a, and what the compiler made of it."""
    keys = 256 if impl == "b5_cta_pair" else 1024
    built = compile_check.build_rung(impl, capability=capability, max_seqlen_k=keys, **options)
    return built, read_once(built)


@pytest.mark.parametrize(
    "impl, options", swept(OF_BLACKWELL, lambda impl, options: options == {}), ids=str
)
def test_blackwell_code_of_the_specialized_rungs(impl, options):
    """MMAs, TMA, tensor memory; no more memory than there is, and as good as no spills.

    In the code itself, since Triton gives ptxas options that `read` does not. b6 keeps three
    scalars in memory with a causal mask, and one with four activations.
    """
    built, made = for_blackwell(impl, **options)
    counts = made.instructions
    for name in ("UTCHMMA", "UTCBAR", "LDTM", "STTM", "UTMALDG", "UTMASTG"):
        assert counts[name] > 0, name
    if impl in PAIRS:
        spills = {"causal": 12, "activation": 4} if impl == "b6_pair_stream" else {}
        assert made.spill_bytes <= max((spills.get(name, 0) for name in options), default=0)
        assert counts["UCGABAR"] > 0
        ptx = built.asm["ptx"]
        assert "cta_group::1" not in ptx
        for operation in ("tcgen05.mma.cta_group::2", "multicast::cluster", "bytes.cta_group::2"):
            assert operation in ptx, operation
    else:
        assert counts["STL"] == 0
    assert made.shared_bytes <= compile_check.SHARED_BYTES[100]
    assert built.metadata.tmem_size == (256 if impl == "b1_tensor_memory" else 512)
    if options == {}:
        assert counts["UTCHMMA"] == MMAS[impl]
        assert counts["UTCBAR"] == COMMITS.get(impl, counts["UTCBAR"])
        assert counts["UTMALDG"] == LOADS.get(impl, counts["UTMALDG"])
        if impl in ALONE:
            assert (counts["FFMA2"] > 0) == (impl == "b4_mixed")


@pytest.mark.sweep
@pytest.mark.parametrize("capability", (100, 103))
@pytest.mark.parametrize("impl", STREAMS)
def test_a_sum_leaves_in_halves(impl, capability):
    """Through the slot of its Q, in fp32: twice as many stores, of as many bytes each."""
    whole, sums = ({}, {"out_dtype": torch.float32})
    plain, made = (for_blackwell(impl, capability=capability, **x)[1] for x in (whole, sums))
    assert made.instructions["UTMASTG"] == 2 * plain.instructions["UTMASTG"]
    assert made.spill_bytes == 0 and made.shared_bytes == plain.shared_bytes


@pytest.mark.parametrize("impl", ALONE)
def test_the_loop_over_blocks(impl):
    """A block of a math role: S is read in two slices, P stored; MUFU for all scores, or 3 of 4."""
    built, _ = for_blackwell(impl)
    loop = compile_check.shortest_loop(built, "STTM", 2)
    assert loop.count("LDTM") == loop.count("STTM") == 2
    assert loop.count("MUFU") == (96 if impl == "b4_mixed" else 128)


@pytest.mark.sweep
@pytest.mark.parametrize("share", (0.125, 0.5))
@pytest.mark.parametrize("impl", ("b3_stream", *PAIRS))
def test_a_share_of_the_scores_needs_no_mufu(impl, share):
    config = ladder.rung(impl).module().Config(share=share)
    built, made = for_blackwell(impl, config=config)
    loop = compile_check.shortest_loop(built, "STTM", 2)
    assert loop.count("MUFU") == 128 * (1 - share) and made.spill_bytes == 0


@pytest.mark.parametrize("impl", ALONE)
def test_p_is_stored_over_the_s_that_was_read(impl):
    """64 scores are read from columns c .. c + 63; their P goes to 32 columns from c / 2 on."""
    built, _ = for_blackwell(impl)
    code = compile_check.disassemble(built)
    number = r"(LDTM\.x64|STTM\.x32)\D+?(?:\d+, )?tmem\[UR\d+(?:\+(0x[0-9a-f]+))?\]"
    seen = [(kind, int(at or "0", 16)) for kind, at in re.findall(number, code)]
    begin = seen.index(("STTM.x32", 0))
    first = [("LDTM.x64", 0), ("STTM.x32", 0), ("LDTM.x64", 64), ("STTM.x32", 32)]
    assert seen[begin - 1 : begin + 3] == first


@pytest.mark.parametrize("option", ("causal", sweep("out_dtype")))
@pytest.mark.parametrize("capability", (80, sweep(90)))
def test_what_only_the_plain_kernels_take_compiles(option, capability):
    """The emulator runs what Triton's compiler may refuse."""
    x, ends = torch.zeros(130, 2, 128).bfloat16(), torch.tensor([0, 64, 130], dtype=torch.int32)
    options = {
        "causal": {"mask": Mask("lower_right", window=40)},
        "out_dtype": {"out_dtype": torch.float32, "add_to": x},
    }
    batch = Batch(x, x, x, ends, ends, 66, 66, ("gelu_tanh",), 0.1, **options[option])
    with launches(run=False) as seen:
        ladder.rung("v1_tiled").module().forward(batch)
        if option == "causal":
            ladder.rung("v1_tiled_backward").module().backward(x, batch)
    assert len(seen) == (3 if option == "causal" else 1)
    for launch in seen:
        made = compile_check.build_launch(launch, capability=capability)
        assert made.metadata.shared <= 163_840
