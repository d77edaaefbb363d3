"""What the compiler makes of each rung: the instructions that make it what it is, and no spills."""

import pytest
import torch

from _lib import compile_check
from gdpa_kernels.calling import ladder
from tests.block_attention.compiling import read_once


def compiled(impl: str, **options) -> compile_check.Compiled:
    """`compile_check.compile_rung`, read once where the options make no difference."""
    return read_once(compile_check.build_rung(impl, **options))


KERNELS = [rung.impl for rung in ladder.RUNGS if rung.requires.capability]
SPECIALIZED = [rung.impl for rung in ladder.RUNGS if rung.requires.only_major]


@pytest.mark.parametrize("max_seqlen_k", (256, 1024))
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


@pytest.mark.parametrize(
    "impl, head_dim",
    [
        (impl, head_dim)
        for impl in KERNELS
        for head_dim in (64, 256)
        if head_dim <= ladder.rung(impl).requires.head_dim_max
    ],
)
def test_other_head_dims_do_not_spill(impl, head_dim):
    made = compiled(impl, head_dim=head_dim, dtype=torch.float16)
    assert made.instructions["HGMMA"] > 0 and made.spill_bytes == 0 and not made.serialised


@pytest.mark.parametrize(
    "impl, options",
    [
        (rung.impl, options)
        for rung in ladder.RUNGS
        for options in ({"causal": True}, {"activation": "silu"}, {"dtype": torch.float16})
        if rung.requires.only_major and not (rung.is_lesson and "causal" in options)
    ],
    ids=str,
)
def test_options_of_the_specialized_rungs_do_not_spill(impl, options):
    made = compiled(impl, **options)
    assert made.spill_bytes == 0 and not made.serialised


@pytest.mark.parametrize("options", ({}, {"causal": True, "window": 100}), ids=str)
def test_wide_heads_do_not_spill(options):
    made = compiled("v8_own_waits", head_dim=200, **options)
    assert made.spill_bytes == 0 and not made.serialised
    assert made.shared_bytes <= 227 * 1024


@pytest.mark.parametrize("impl", ("v2_tma", "v3_persistent"))
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
