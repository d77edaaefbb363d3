"""The PTX of the Blackwell rung: fences and addresses, which the emulator does not see."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import pytest
import torch

from _lib import block_studies
from gdpa_kernels.block_attention.kernels import b1_warp_specialized as b1
from tests.gdpa import ptx

DIRECTIONS = ("forward", "backward")


@cache
def compiled(direction: str, module: ModuleType = b1, rotary: bool = True) -> str:
    """The PTX of a direction, head_dim 128."""
    blank = block_studies.blank(128, rotary=torch.float32 if rotary else None)
    built = block_studies.built(module, direction, None, blank, capability=100)
    return built[f"{direction}_kernel"].asm["ptx"]


@pytest.mark.parametrize("rotary", (True, False))
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_stored_tile_is_fenced(direction, rotary):
    text = compiled(direction, rotary=rotary)
    assert ptx.STORED.search(text) and ptx.unfenced(text) == []
    assert "mbarrier.arrive.release.cluster" not in text


SHOWN = {"forward": [True, True, True, False, False], "backward": [True, False, False, True, True]}
"""By direction, of which fences of the source, in its order, PTX shows that they are missing:
`turn`, P and the output forward; dS and the gradients backward."""


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_fence_that_is_left_out_is_found(direction):
    copies = ptx.without_fence(b1)
    assert [bool(ptx.unfenced(compiled(direction, x))) for x in copies] == SHOWN[direction]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_operands_are_where_their_buffers_are(direction):
    kinds = [("A", 0), ("B", 0), ("B", 1)] + [("A", 1)] * (direction == "backward")
    counts = ptx.check_operands(compiled(direction), dict.fromkeys(kinds, 64))
    assert counts["B", 0, "behind"] >= counts["B", 0, "begins"] > 0
    assert counts["A", 0, "behind"] >= counts["B", 0, "begins"]
