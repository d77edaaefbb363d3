"""Exported programs take other batches; so do packages, in a process that imports us."""

import shutil
import subprocess
import sys

import pytest
import torch
from export import Block, batch, export, main

from gdpa_kernels import PMA, BlockAttention

LOAD = """
import sys, torch
run = torch._inductor.aoti_load_package(sys.argv[1])
run(torch.randn(8, 64), torch.tensor([0, 3, 8], dtype=torch.int32))
"""


@pytest.mark.parametrize("lengths", [(7, 1, 0, 20, 4), (2,), (0, 0, 0, 3)], ids=str)
def test_one_program_takes_every_batch(lengths):
    torch.manual_seed(0)
    model, other = Block().eval(), batch(*lengths)
    with torch.no_grad():
        assert torch.equal(export(model).module()(*other), model(*other))


def test_an_exported_program_checks_offsets():
    model, (x, _) = Block().eval(), batch(3, 0, 5)
    wrong = torch.tensor([0, 9, 8], dtype=torch.int32)
    with torch.no_grad(), pytest.raises((ValueError, RuntimeError), match="cu_seqlens"):
        export(model).module()(x, wrong)


@pytest.mark.parametrize("layer", [
    BlockAttention(64, 4, qk_norm=True),
    PMA(64, 4, num_seeds=2, max_seqlen=64),
], ids=["BlockAttention", "PMA"])  # fmt: skip
def test_other_layers_export(layer):
    class Alone(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x, cu_seqlens):
            y = self.layer((x, cu_seqlens))
            return y[0] if isinstance(y, tuple) else y

    model, other = Alone().eval(), batch(7, 1, 0, 20, 4)
    with torch.no_grad():
        torch.testing.assert_close(export(model, 2).module()(*other), model(*other))


@pytest.mark.sweep
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles by g++")
def test_a_package_runs_where_we_are_imported_and_nowhere_else(tmp_path):
    package = tmp_path / "layer.pt2"
    assert main(["--package", str(package)]) < 1e-5
    for first, status in (("import gdpa_kernels", 0), ("", 1)):
        command = [sys.executable, "-c", f"{first}\n{LOAD}", str(package)]
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode == status, ran.stderr
    assert "Could not find schema for gdpa_kernels::gdpa_forward" in ran.stderr
