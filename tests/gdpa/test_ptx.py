"""The PTX of the Blackwell rungs: fences, scopes and addresses, which the emulator does not see."""

from __future__ import annotations

import re
from functools import cache
from types import ModuleType

import pytest

from _lib import compile_check, studies
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.gdpa.kernels import (
    b1_tensor_memory_backward,
    b2_short_kv_backward,
    b6_pair_stream,
)
from gdpa_kernels.gdpa.ladder import (
    b1_tensor_memory,
    b2_two_tiles,
    b3_stream,
    b4_mixed,
    b5_cta_pair,
)
from tests.gdpa import ptx
from tests.gdpa.cases import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="is compiled for sm_100 on a CPU")
FORWARD = (b1_tensor_memory, b2_two_tiles, b3_stream, b4_mixed, b5_cta_pair, b6_pair_stream)
BACKWARD = (b1_tensor_memory_backward, b2_short_kv_backward)
NAMES = {module: module.__name__.rpartition(".")[2] for module in (*FORWARD, *BACKWARD)}


@cache
def compiled(module: ModuleType, like: ModuleType | None = None) -> str:
    """The PTX of a rung's kernel for head_dim 128, or of a changed copy of one `like` that."""
    like = like or module
    if like in FORWARD:
        keys = 256 if like is b5_cta_pair else 1024
        return compile_check.build_rung(module, capability=100, max_seqlen_k=keys).asm["ptx"]
    given = studies.batch((130,), heads=4)
    with launches(run=False) as seen:
        module.backward(studies.gradient(given), given)
    (launch,) = (x for x in seen if x.name == "backward_kernel")
    return compile_check.build_launch(launch, capability=100).asm["ptx"]


@pytest.mark.parametrize("module", NAMES, ids=NAMES.get)
def test_every_stored_tile_is_fenced(module):
    assert ptx.STORED.search(compiled(module)) and ptx.unfenced(compiled(module)) == []


# By rung, whether PTX shows that a fence of its source is missing. Where the same role hands the
# tile to TMA, this compiler puts a fence before it in any case.
SHOWN = {
    b5_cta_pair: [False],
    b6_pair_stream: [False],
    b1_tensor_memory_backward: [False, True, False],
    b2_short_kv_backward: [False, True, False],
}


@pytest.mark.parametrize("module", SHOWN, ids=NAMES.get)
def test_a_fence_that_is_left_out_is_missed_or_put_back(module):
    count = len(ptx.FENCE.findall(compiled(module)))
    shown = []
    for wrong in ptx.without_fence(module):
        text = compiled(wrong, like=module)
        shown.append(bool(ptx.unfenced(text)))
        assert shown[-1] or len(ptx.FENCE.findall(text)) == count
    assert shown == SHOWN[module]


@pytest.mark.parametrize("module", NAMES, ids=NAMES.get)
def test_arrivals_do_not_release_to_the_cluster(module):
    """Such arrivals fault among launches back to back: facebookexperimental/triton#3492."""
    arrivals = re.findall(r"mbarrier\.arrive\S*", compiled(module))
    assert arrivals and not [x for x in arrivals if "release.cluster" in x]


PAIR = {("A", 0): 128, ("B", 0): 64, ("B", 1): 128}
"""Of a pair a CTA has 64 rows of K, and 128 of V, in 64 columns."""
ROWS = dict.fromkeys(FORWARD, {("A", 0): 128, ("B", 0): 128, ("B", 1): 128})
ROWS |= {b5_cta_pair: PAIR, b6_pair_stream: PAIR}
ROWS |= dict.fromkeys(BACKWARD, {(name, along): 128 for name in "AB" for along in (0, 1)})


@pytest.mark.parametrize("module", NAMES, ids=NAMES.get)
def test_operands_are_where_their_buffers_are(module):
    """Slices of buffers too, such as the halves of dO that dV reads."""
    counts = ptx.check_operands(compiled(module), ROWS[module])
    for name, along in ROWS[module]:
        if not along:  # 128 columns in two blocks of 64
            assert counts[name, along, "behind"] >= counts[name, along, "begins"] > 0


def test_operands_of_another_buffer_are_found():
    text, wrong = compiled(b4_mixed), ROWS[b4_mixed] | {("B", 1): 64}
    with pytest.raises(AssertionError):
        ptx.check_operands(text, wrong)
    counts = ptx.check_operands(text, ROWS[b4_mixed] | {("A", 0): 64})
    assert counts["A", 0, "behind"] == 0


@pytest.mark.parametrize(
    ("module", "tiles"), [(b5_cta_pair, 2), (b1_tensor_memory_backward, 10),
                          (b2_short_kv_backward, 7)], ids=str,
)  # fmt: skip
def test_swizzled_stores_reach_every_place_once(module, tiles):
    ptx.check_stores(compiled(module), tiles)
