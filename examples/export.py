"""A layer as a program without its Python: torch.export, then a package of AOTInductor.

python examples/export.py --package layer.pt2

Tokens and batch are dynamic: one program takes every batch. The operators of gdpa_kernels are calls
in that program, and their kernels are launched from Python: a process that runs it, or loads the
package, imports gdpa_kernels first. A server in C++ without Python cannot run it: it ends in "Could
not find schema for gdpa_kernels::gdpa_forward".
"""

from __future__ import annotations

import argparse
from itertools import accumulate

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from gdpa_kernels import GDPASelfAttention, Mask

DIM, HEADS, MAX_SEQLEN = 64, 4, 64


class Block(nn.Module):
    """A residual layer. Its max_seqlen is fixed: an exported program cannot read offsets."""

    def __init__(self) -> None:
        super().__init__()
        options = {"mask": Mask(True), "activation": "silu", "max_seqlen": MAX_SEQLEN}
        self.norm, self.attention = nn.RMSNorm(DIM), GDPASelfAttention(DIM, HEADS, **options)

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        return x + self.attention((self.norm(x), cu_seqlens))[0]


def batch(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and offsets of sequences of these lengths."""
    ends = [0, *accumulate(lengths)]
    return torch.randn(ends[-1], DIM), torch.tensor(ends, dtype=torch.int32)


@torch.no_grad()
def export(model: nn.Module, sequences: int = 1) -> ExportedProgram:
    """The model as a program of any number of tokens, from 2 on, and of at least so many sequences;
    a model with `PMA` needs 2."""
    tokens, offsets = Dim("tokens", min=2), Dim("offsets", min=sequences + 1)
    shapes = {"x": {0: tokens}, "cu_seqlens": {0: offsets}}
    return torch.export.export(model, batch(3, 0, 5), dynamic_shapes=shapes)


@torch.no_grad()
def main(argv: list[str] | None = None) -> float:
    """The largest difference to the model, of a batch of another shape."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--package", metavar="FILE", help="compile to a package too; needs g++")
    o = parser.parse_args(argv)
    model, other = Block().eval(), batch(7, 1, 0, 20, 4)
    program = export(model)
    run = program.module()
    if o.package:
        file = torch._inductor.aoti_compile_and_package(program, package_path=o.package)
        run = torch._inductor.aoti_load_package(file)
    difference = (run(*other) - model(*other)).abs().max().item()
    print(f"{o.package or 'torch.export'}: differs by at most {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
