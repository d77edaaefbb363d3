"""Nearly every mistake in the synchronisation of three pipelines in Gluon is found.

Those that nothing notices must be the ones listed in HARMLESS.
"""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from emulator.tests.checking import everywhere, normal
from emulator.tests.judging import import_file, judge
from tritonemu import run
from tritonemu.compiler import asm_of
from tritonemu.gpu import has_gluon

pytestmark = pytest.mark.gluon
if not has_gluon():
    pytest.skip(
        "needs the Gluon of Triton 3.9, and this Triton has another", allow_module_level=True
    )

from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: E402

from emulator.tests import gluon_pipelines as pipelines  # noqa: E402
from emulator.tests.gluon_mutants import enumerate_mutants  # noqa: E402

PATH = Path(pipelines.__file__)
MAX_STEPS = 5_000


def boxed(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    dtype = {torch.float32: gl.float32, torch.float16: gl.float16}[tensor.dtype]
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return TensorDescriptor.from_tensor(tensor, [rows, columns], layout)


def matmul(rows: int, tiles: int, steps: int) -> list[TensorDescriptor]:
    a, b = normal(rows * tiles, 64 * steps), normal(64 * steps, 64, seed=1)
    c = torch.zeros(rows * tiles, 64)
    return [boxed(a, rows, 64), boxed(b, 64, 64), boxed(c, rows, 64)]


def doubling(tiles: int) -> list[TensorDescriptor]:
    source = normal(32 * tiles, 32, dtype=torch.float32)
    return [boxed(source, 32, 32), boxed(torch.zeros(32 * tiles, 32), 32, 32)]


def product(a: TensorDescriptor, b: TensorDescriptor, c: TensorDescriptor) -> torch.Tensor:
    return a.base.double() @ b.base.double()


class Subject(NamedTuple):
    """A kernel, the functions that it uses, its arguments, what it gives, constants, options."""

    kernel: str
    functions: tuple[str, ...]
    arguments: Callable[[], list[TensorDescriptor]]
    gives: Callable[..., torch.Tensor]
    constants: dict[str, int]
    arch: str = "sm_90"

    def launch(self, module: ModuleType, schedule: str | int) -> None:
        values = self.arguments()
        options: dict[str, Any] = {"schedule": schedule, "max_steps": MAX_STEPS}
        kernel = getattr(module, self.kernel)
        run(kernel, (1,), *values, arch=self.arch, **self.constants, **options)
        result = values[-1].base.double()
        torch.testing.assert_close(result, self.gives(*values), rtol=1e-3, atol=1e-3)


SUBJECTS = {
    "hopper": Subject(
        "hopper_kernel",
        ("hopper_kernel", "multiply", "load_operands"),
        lambda: matmul(64, 2, 5),
        product,
        {"TILES": 2, "STEPS": 5, "STAGES": 3},
    ),
    "blackwell": Subject(
        "blackwell_kernel",
        (
            *("blackwell_kernel", "multiply_in_tensor_memory", "store_accumulators"),
            "load_operands",
        ),
        lambda: matmul(128, 5, 3),
        product,
        {"TILES": 5, "STEPS": 3, "STAGES": 2},
        "sm_100",
    ),
    "doubling": Subject(
        "doubling_kernel",
        ("doubling_kernel", "load_tiles", "double_tiles", "store_tiles"),
        lambda: doubling(7),
        lambda source, target: 2 * source.base.double(),
        {"TILES": 7, "STAGES": 3},
    ),
}
# The compiler puts a fence between a store and a TMA store of one partition by itself.
HARMLESS = {
    "hopper": {
        "multiply: drop fence_async_shared()",
        "multiply: fence_async_shared() before out.store(acc)",
    },
    "blackwell": {
        "store_accumulators: drop fence_async_shared()",
        "store_accumulators: fence_async_shared() before out.store(value)",
    },
    "doubling": set(),
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_right(name):
    subject = SUBJECTS[name]
    options = subject.constants | {"arch": subject.arch}
    kernel = getattr(pipelines, subject.kernel)
    everywhere(kernel, (1,), subject.arguments, subject.gives, 1e-3, **options)
    run(kernel, (1,), *subject.arguments(), compile=True, **options)


@pytest.mark.parametrize(("name", "number"), (("hopper", 35), ("blackwell", 47), ("doubling", 47)))
def test_mutants(name, number):
    subject = SUBJECTS[name]
    mutants = enumerate_mutants(PATH, subject.functions)
    errors = {m.what: judge(m, import_file, [subject.launch]).error for m in mutants}
    assert len(errors) == number
    assert {what for what, error in errors.items() if not error} == HARMLESS[name]
    # A value that is used while its matmul is in flight; other mutants must be valid kernels.
    invalid = [what for what, error in errors.items() if error == "InvalidKernel"]
    assert all("acc = warpgroup_mma_wait(0, deps=[acc]) -> " in what for what in invalid)


@pytest.mark.parametrize("name", ("hopper", "blackwell"))
def test_the_compiler_puts_the_fence_that_a_harmless_mutant_drops(name, tmp_path):
    subject = SUBJECTS[name]
    mutants = enumerate_mutants(PATH, subject.functions)
    (dropped,) = (m for m in mutants if m.what in HARMLESS[name] and m.kind == "drop")
    path = tmp_path / "dropped.py"
    path.write_text(dropped.source)
    kernel = getattr(import_file(path), subject.kernel)
    arguments = dict(zip(kernel.arg_names, subject.arguments(), strict=False)) | subject.constants
    ptx = asm_of(kernel, subject.arch, arguments, {"num_warps": 4})["ptx"]
    store = ptx.index("cp.async.bulk.tensor.2d.global")
    stored = max(ptx.rfind(f"st.shared.{kind}", 0, store) for kind in ("v4", "b32", "v2"))
    assert "fence.proxy.async" in ptx[stored:store]
