"""The PTX of the Blackwell rungs: fences, scopes and addresses, which the emulator does not see."""

import re
from functools import cache
from types import ModuleType

import pytest
import torch

from _lib import block_studies, studies
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import launches
from gdpa_lab.measuring import compile_check
from tests import ptx
from tests.tiers import sweep

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="is compiled on a CPU")
PAIRS = ("b5_cta_pair", "b6_pair_stream", "b7_split_stream")
FORWARD = ("b1_tensor_memory", "b2_two_tiles", "b3_stream", "b4_mixed", *PAIRS)
BACKWARD = ("b1_tensor_memory_backward", "b2_short_kv_backward", "b3_dk_first_backward")
PAIRS_BACKWARD = ("b4_pair_backward", "b5_stream_backward")  # MMAs of a pair
BLOCKS = ("b1_warp_specialized forward", "b1_warp_specialized backward")  # with rotary
KERNELS = (*FORWARD, *BACKWARD, *PAIRS_BACKWARD, *BLOCKS)


def module_of(kernel: str) -> ModuleType:
    impl, _, blocks = kernel.partition(" ")
    return ladder.rung(impl, "block_attention" if blocks else "gdpa").module()


@cache
def compiled(kernel: str, changed: ModuleType | None = None, rotary: bool = True) -> str:
    """The PTX of a kernel for head_dim 128, of its rung or of a changed copy of that."""
    module = changed or module_of(kernel)
    if kernel in FORWARD:
        keys = 256 if kernel == "b5_cta_pair" else 1024
        return compile_check.build_rung(module, capability=100, max_seqlen_k=keys).asm["ptx"]
    if kernel in BLOCKS:
        direction = kernel.partition(" ")[2]
        blank = block_studies.blank(128, rotary=torch.float32 if rotary else None)
        built = block_studies.built(module, direction, None, blank, capability=100)
        return built[f"{direction}_kernel"].asm["ptx"]
    given = studies.batch((130,), heads=4)
    with launches(run=False) as seen:
        module.backward(studies.gradient(given), given)
    (launch,) = (x for x in seen if x.name == "backward_kernel")
    return compile_check.build_launch(launch, capability=100).asm["ptx"]


@pytest.mark.parametrize(
    "kernel, rotary", [*((x, True) for x in KERNELS), *(sweep(x, False) for x in BLOCKS)]
)
def test_every_stored_tile_is_fenced(kernel, rotary):
    """Nor do arrivals release to the cluster, which faults among launches back to back:
    facebookexperimental/triton#3492."""
    text = compiled(kernel, rotary=rotary)
    assert ptx.STORED.search(text) and ptx.unfenced(text) == []
    arrivals = re.findall(r"mbarrier\.arrive\S*", text)
    assert arrivals and not [x for x in arrivals if "release.cluster" in x]


# Whether PTX shows that a fence is missing, those of its own source first; of blocks those of
# `turn`, P and the output forward, of dS and the gradients backward. Where the same role of gdpa
# hands the tile to TMA, this compiler puts a fence before it in any case.
SHOWN = {
    **dict.fromkeys(PAIRS, [False]),
    **dict.fromkeys(BACKWARD, [True, False, False]),
    BLOCKS[0]: [True, True, True, False, False],
    BLOCKS[1]: [True, False, False, True, True],
}


@pytest.mark.sweep
@pytest.mark.parametrize("kernel", SHOWN)
def test_a_fence_that_is_left_out_is_missed_or_put_back(kernel):
    count = len(ptx.FENCE.findall(compiled(kernel)))
    shown = []
    for wrong in ptx.without_fence(module_of(kernel)):
        text = compiled(kernel, wrong)
        shown.append(bool(ptx.unfenced(text)))
        # A fence of blocks may be of the other direction's kernel.
        assert shown[-1] or kernel in BLOCKS or len(ptx.FENCE.findall(text)) == count
    assert shown == SHOWN[kernel]


OF_A_PAIR = {("A", 0): 128, ("B", 0): 64, ("B", 1): 128}
"""A CTA has 64 rows of K, and 128 of V, in 64 columns."""
ROWS = {
    **dict.fromkeys(FORWARD, {("A", 0): 128, ("B", 0): 128, ("B", 1): 128}),
    **dict.fromkeys(PAIRS, OF_A_PAIR),
    **dict.fromkeys(BACKWARD, {(name, along): 128 for name in "AB" for along in (0, 1)}),
    **dict.fromkeys(PAIRS_BACKWARD, {("A", 0): 128, ("A", 1): 128, ("B", 0): 64, ("B", 1): 128}),
    BLOCKS[0]: {("A", 0): 64, ("B", 0): 64, ("B", 1): 64},
    BLOCKS[1]: {(name, along): 64 for name in "AB" for along in (0, 1)},
}


@pytest.mark.parametrize("kernel", ROWS)
def test_operands_are_where_their_buffers_are(kernel):
    """Slices of buffers too, such as the halves of dO that dV reads."""
    counts = ptx.check_operands(compiled(kernel), ROWS[kernel])
    for name, along in ROWS[kernel]:
        if not along:  # 128 columns in two blocks of 64
            begins = counts["B" if kernel in BLOCKS else name, along, "begins"]
            assert counts[name, along, "behind"] >= begins > 0


def test_operands_of_another_buffer_are_found():
    text, rows = compiled("b4_mixed"), ROWS["b4_mixed"]
    with pytest.raises(AssertionError):
        ptx.check_operands(text, rows | {("B", 1): 64})
    assert ptx.check_operands(text, rows | {("A", 0): 64})["A", 0, "behind"] == 0


@pytest.mark.parametrize(
    "kernel, tiles", [("b5_cta_pair", 2), *zip(BACKWARD, (10, 7, 10), strict=True)]
)
def test_swizzled_stores_reach_every_place_once(kernel, tiles):
    ptx.check_stores(compiled(kernel), tiles)


DQ = range(16), range(16, 32)  # which stores are its


@pytest.mark.parametrize("kernel, of_dq", list(zip(PAIRS_BACKWARD, DQ, strict=True)))
def test_stores_to_a_peer_reach_every_place_once(kernel, of_dq):
    """dS of half of the rows, here and there, dV and dK; of dQ, 64 rows of fp32, others."""
    text = compiled(kernel)
    ptx.check_stores(text, 6, skipped=of_dq)
    ptx.check_stores(text, 2, kind="async")
