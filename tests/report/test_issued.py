"""Instructions of a role, read from SASS."""

from __future__ import annotations

import pytest

from gdpa_kernels.block_attention import v3_warp_specialized
from gdpa_kernels.report import block_studies, issued


def test_of_an_item_counts_the_loop_over_heads():
    made = block_studies.built(v3_warp_specialized, "forward", given=block_studies.blank(64))
    found = issued.of_an_item(made["forward_kernel"])
    assert found["HGMMA"] == 8  # S and P V, 64 columns of each operand in steps of 16
    assert 100 < found["for an item"] < 2000 and found["for a block"] > 0
    with pytest.raises(ValueError, match="must have a role with matmuls False"):
        issued.of_an_item(made["forward_kernel"], matmuls=False)
