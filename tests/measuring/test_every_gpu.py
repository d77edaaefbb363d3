"""Products in plain Triton for GPUs that nobody measured: what they compile to, and AMD's form."""

from dataclasses import replace

import pandas as pd
import pytest
import torch
from triton.backends.compiler import GPUTarget

import tritonemu
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.gdpa import reference
from gdpa_kernels.gdpa.device import activations, derivatives
from gdpa_kernels.gdpa.kernels import v1_tiled
from gdpa_kernels.serving import diagonal
from gdpa_lab.measuring import compile_check, every_gpu
from gdpa_lab.measuring.private import compiling_for
from tests.budget import within_budget
from tests.gdpa.cases import Case, batch_of, check_gradients, gradients, of_pytorch

BF16, FP64 = torch.bfloat16, torch.float64
AMD = GPUTarget("hip", "gfx942", 64)
COLUMNS = ["registers", "spill_bytes", "shared_bytes"]


def name_of(target: int | str) -> str:
    return f"sm_{target}" if isinstance(target, int) else target


def test_the_table_holds_every_kernel_on_every_gpu():
    known = every_gpu.table()
    assert [*known.columns] == every_gpu.KEY + COLUMNS
    wanted = {
        (*of, head_dim, name_of(target), launch.name)
        for head_dim in every_gpu.HEAD_DIMS
        for of, call in every_gpu.calls(head_dim).items()
        for target in every_gpu.TARGETS
        for launch in every_gpu.launched(call, target)
    }
    found = [*known[every_gpu.KEY].itertuples(index=False, name=None)]
    assert set(found) == wanted and len(found) == len(wanted)
    most = {name_of(target): n for target, n in compile_check.SHARED_BYTES.items()}
    assert (known["shared_bytes"] <= known["target"].map(most)).all()


def compared() -> list:
    """One GPU of each maker in the sweeps, the others at night."""
    marks = pytest.mark.nightly, pytest.mark.sweep
    return [
        pytest.param(target, n, marks=marks[(target, n) in ((86, 64), ("gfx942", 64))])
        for target in every_gpu.TARGETS
        for n in every_gpu.HEAD_DIMS
    ]


@pytest.mark.parametrize("target, head_dim", compared())
def test_the_table_is_what_the_kernels_compile_to(target, head_dim):
    """python -m gdpa_lab maintain every-gpu"""
    known = every_gpu.table()
    known = known[(known["target"] == name_of(target)) & (known["head_dim"] == head_dim)]
    made = pd.DataFrame(every_gpu.rows((target,), (head_dim,)))
    pd.testing.assert_frame_equal(made, known.reset_index(drop=True))


@pytest.mark.parametrize("target", ("gfx942", "gfx950"))
def test_amd_multiplies_matrices_and_has_no_instruction_for_tanh(target):
    (launch,) = every_gpu.launched(every_gpu.calls(64)["v1_tiled", "forward"], target)
    made = compile_check.read(compile_check.build_launch(launch, capability=target))
    assert sum(n for name, n in made.instructions.items() if name.startswith("v_mfma")) > 0
    assert made.instructions["v_exp_f32_e32"] > 0


@pytest.mark.parametrize("name", ("silu", "gelu_tanh", "gelu"))
def test_tanh_by_exp_is_within_its_bound(name):
    """The bound is to the function that the kernel computes: `gelu` is a fit."""
    x = torch.cat((torch.linspace(-30, 30, 20_001), torch.tensor([0.0, -1e4, 1e4, 1e-30])))
    wide = x.double()
    linear, cubic = {
        "silu": (0.5, 0.0), "gelu_tanh": (0.7978845608028654, 0.7978845608028654 * 0.044715),
        "gelu": (0.798801444, 0.0352820472),
    }[name]  # fmt: skip
    t = (wide * (linear + cubic * wide.square())).tanh()
    wanted = 0.5 * wide * (1 + t)
    with tritonemu.enabled():
        other = activations.evaluate(x, name)
        with compiling_for(AMD):
            found, both = activations.evaluate(x, name), derivatives.evaluate_both(x, name)
    bound = 0.5 * wide.abs() * 2**-21 + wanted.abs() * 2**-23
    assert ((found - wanted).abs() <= bound).all()
    assert ((both[:2] - wanted).abs() <= bound).all()
    assert ((other - wanted).abs() > bound).any(), "that was NVIDIA's"


CASE = Case("jagged", (70, 129, 0, 5), (130, 1, 33, 200), 4, 2)


@pytest.mark.parametrize("names", (("silu",), ("gelu", "gelu_tanh", "relu", "silu")), ids=str)
@pytest.mark.parametrize("direction", ("forward", "backward"))
def test_products_are_right_in_amds_form(direction, names):
    case = replace(CASE, options={"activation": names, "causal": "upper_left"})

    def draw(i: int) -> tuple:
        batch = batch_of(case.arguments(BF16, i))
        with tritonemu.enabled(), compiling_for(AMD):
            out = v1_tiled.forward(batch)
        return [out], *of_pytorch(batch)

    if direction == "forward":
        within_budget(draw, ["out"], least=8192)
        return
    with compiling_for(AMD):
        check_gradients(lambda call: gradients("v1_tiled_backward", call), case, BF16)


def test_the_candidates_term_is_right_in_amds_form():
    q, k, v = torch.randn(3, 40, 2, 64).bfloat16()
    with tritonemu.enabled(), compiling_for(AMD), launches() as seen:
        found = diagonal.add_diagonal(q, k, v, torch.zeros(40, 2, 64), activation="silu")
    assert [launch.name for launch in seen] == ["diagonal_kernel"]
    s = (q.double() * k.double()).sum(-1, keepdim=True) / 8
    wanted = reference.activate_heads(s.permute(1, 0, 2), ("silu",)).permute(1, 0, 2) * v.double()
    assert (found.double() - wanted).norm() < 3e-3 * wanted.norm()
