"""Needs of host code and kernels of plain Triton: names, types, results of launches."""

import importlib.util

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from emulator.tests.checking import refused
from tritonemu import InvalidKernel, OutOfBounds, Unsupported, enabled, fake_gpu, run
from tritonemu.execution import OPTIONS
from tritonemu.messages import explain

NAMED = """
import triton
import triton.language as tl


@triton.jit
def kernel(x, n, {name}, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(x + i, tl.load(x + i, mask=i < n, other=0.0) + {name}, mask=i < n)
"""


@pytest.mark.parametrize("launched", (True, False), ids=("launched", "run"))
@pytest.mark.parametrize(
    "name", (*sorted(OPTIONS), "seed", "timeline", "multiprocessors", "kernel", "grid_", "opened")
)
def test_a_parameter_may_have_any_name(name, launched, tmp_path):
    file = tmp_path / f"named_{name}.py"
    file.write_text(NAMED.format(name=name))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x = torch.zeros(10)
    if launched:
        with enabled():
            module.kernel[(1,)](x, 10, B=16, **{name: 2})
    else:
        run(module.kernel, (1,), x, 10, B=16, **{name: 2})
    assert x.eq(2).all()


@triton.jit
def add1(x, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)


def test_options_of_the_backend_are_not_the_emulators():
    x = torch.zeros(100)
    with enabled("sm_100") as reports:
        add1[(2,)](x, 100, 64, arch=None, maxnreg=64)
    assert x.eq(1).all() and reports[0].arch == "sm_100"


def test_an_option_that_there_is_not_is_refused():
    match = r"options must be among .* got \['shedule'\]"
    with pytest.raises(TypeError, match=match), enabled(shedule=3):
        pass


def test_a_warm_kernel_is_launched():
    x = torch.zeros(100)
    with enabled(), fake_gpu():
        warm = add1.warmup(x, 100, B=64, grid=(1,), num_warps=8)
        warm._init_handles()
        assert warm.n_regs > 0 and warm.metadata.shared > 0 and x.eq(0).all()
        warm[(2, 1, 1)](x, 100, 64)
        again = warm[(2, 1, 1)](x, 100)  # a constant of the warm-up
    assert x.eq(2).all() and again.metadata.num_warps == 8


def test_a_launch_returns_what_triton_does():
    with enabled() as reports:
        launched = add1[(2,)](torch.zeros(100), 100, 64, num_warps=2, num_stages=1)
    assert (launched.name, launched.n_regs, launched.n_spills) == ("add1", None, 0)
    assert launched.metadata.num_warps == 2 and launched.metadata._asdict()["name"] == "add1"
    assert launched.report is reports[0]
    with pytest.raises(KeyError, match="ptx: the emulator makes no code"):
        launched.asm["ptx"]


@triton.jit
def _descriptor(p, M, N, BM: tl.constexpr, BN: tl.constexpr):
    if isinstance(p, tl.tensor_descriptor):
        return p
    else:
        return tl.make_tensor_descriptor(p, [M, N], [N, 1], [BM, BN])


@triton.jit
def copy_kernel(a, b, M, N, BM: tl.constexpr, BN: tl.constexpr):
    source, target = _descriptor(a, M, N, BM, BN), _descriptor(b, M, N, BM, BN)
    row = tl.program_id(0) * BM
    target.store([row, 0], source.load([row, 0]))


def test_a_kernel_asks_whether_it_got_a_descriptor():
    a, b = torch.randn(64, 32), torch.zeros(64, 32)
    run(copy_kernel, (4,), a, b, 64, 32, 16, 32)
    assert a.equal(b)
    boxes = [TensorDescriptor.from_tensor(x, [16, 32]) for x in (a, b.zero_())]
    run(copy_kernel, (4,), *boxes, 64, 32, 16, 32)
    assert a.equal(b)


@triton.jit
def kinds_kernel(x, y, n, B: tl.constexpr, FLAG: tl.constexpr):
    kinds = 0
    if isinstance(x, tl.tensor):
        kinds += 1
    if isinstance(B, int):
        kinds += 2
    if isinstance(B, tl.constexpr):
        kinds += 4
    if isinstance(FLAG, (tl.tensor, tl.dtype)):
        kinds += 8
    if isinstance(n, int):
        kinds += 16
    tl.store(y, kinds)


def test_types_that_a_kernel_asks_for():
    y = torch.zeros(1, dtype=torch.int32)
    run(kinds_kernel, (1,), torch.zeros(1), y, 5, 16, tl.float32)
    assert y.item() == 1 + 2 + 8


@triton.jit
def bits_kernel(x, y, B: tl.constexpr):
    v = tl.load(x + tl.arange(0, B))
    idtype = tl.core.get_int_dtype(bitwidth=v.dtype.primitive_bitwidth, signed=True)
    tl.store(y + tl.arange(0, B), v.to(idtype, bitcast=True) ^ 1)


@triton.jit
def bits_of_value_kernel(x):
    tl.store(x, tl.core.get_int_dtype(tl.load(x), True))


def test_helpers_of_the_compiler():
    x, y = torch.randn(8), torch.zeros(8, dtype=torch.int32)
    run(bits_kernel, (1,), x, y, 8)
    assert y.equal(x.view(torch.int32) ^ 1)
    refused(InvalidKernel, "get_int_dtype needs constants", bits_of_value_kernel, y)


@triton.constexpr_function
def element_of(x):
    return x.dtype if isinstance(x, tl.tensor_descriptor) else x.dtype.element_ty


@triton.constexpr_function
def itself(x):
    return x


@triton.jit
def elements_kernel(x, desc, y, BUG: tl.constexpr):
    same: tl.constexpr = element_of(x) == element_of(desc)
    tl.static_assert(same)
    tl.store(y, itself(tl.load(y)) if BUG else 1)


def test_functions_of_the_compiler_see_types():
    x, y = torch.zeros(16, 32), torch.zeros(1)
    box = TensorDescriptor.from_tensor(x, [16, 32])
    run(elements_kernel, (1,), x, box, y, BUG=False)
    assert y.item() == 1
    refused(InvalidKernel, "itself needs constants", elements_kernel, x, box, y, BUG=True)


@triton.jit
def grouped_kernel(ptrs, n, B: tl.constexpr):
    p = tl.load(ptrs + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    i = tl.arange(0, B)
    tl.store(p + i, tl.load(p + i, mask=i < n) + 1, mask=i < n)


def test_addresses_in_memory_reach_every_tensor_that_lives():
    whole = torch.zeros(40)
    xs = [torch.zeros(10), whole[:10], whole[10:20]]
    pointers = torch.tensor([x.data_ptr() for x in xs])
    run(grouped_kernel, (3,), pointers, 10, 16)
    assert xs[0].eq(1).all() and whole[:20].eq(1).all() and whole[20:].eq(0).all()
    # A view that begins at the address bounds what it points to; the storage does not.
    refused(OutOfBounds, "elements", grouped_kernel, pointers[2:], 11, 16)
    refused(OutOfBounds, "lies in no tensor", grouped_kernel, torch.tensor([8]), 10, 16)
    refused(InvalidKernel, "aligned to 4 bytes", grouped_kernel, pointers + 2, 10, 16)
    run(grouped_kernel, (1,), torch.tensor([0]), 0, 16)  # a null pointer that nobody follows
    run(grouped_kernel, (3,), pointers.to(torch.uint64), 10, 16)
    assert xs[0].eq(2).all() and whole[:20].eq(2).all()


@triton.jit
def bytes_kernel(sources, target, n, B: tl.constexpr):
    i = tl.arange(0, B)
    p = (tl.load(sources) + i).to(tl.pointer_type(tl.uint8))
    q = (target.to(tl.int64) + i).to(tl.pointer_type(tl.uint8))
    tl.store(q, tl.load(p, mask=i < n), mask=i < 36)


@triton.jit
def several_kernel(sources, y, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(y + i, tl.load(tl.load(sources + i).to(tl.pointer_type(tl.float32))))


def test_blocks_of_addresses():
    """vLLM and SGLang copy their caches so."""
    x, y = torch.randn(10), torch.zeros(10)
    run(bytes_kernel, (1,), torch.tensor([x.data_ptr()]), y, 36, 64)
    assert y[:9].equal(x[:9]) and y[9] == 0
    refused(OutOfBounds, "element 40", bytes_kernel, torch.tensor([x.data_ptr()]), y, 41, 64)
    within = x.data_ptr() + torch.tensor([36, 0])
    run(several_kernel, (1,), within, y, 2)
    assert y[0] == x[9] and y[1] == x[0]
    both = torch.tensor([x.data_ptr(), y.data_ptr()])
    refused(Unsupported, "into several tensors", several_kernel, both, y, 2)


@triton.jit
def step_kernel(x, n, STEP, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(x + i, tl.load(x + i, mask=i < n) + STEP, mask=i < n)


def test_the_source_of_a_function_may_be_replaced():
    """`triton_kernels` specialises its kernels so; findings show the replacement."""
    replaced = triton.JITFunction(step_kernel.fn)
    replaced._unsafe_update_src(step_kernel.src.replace("n, STEP, B", "n, B").replace("STEP", "3"))
    replaced.params = [p for p in replaced.params if p.name != "STEP"]
    x = torch.zeros(10)
    with enabled():
        replaced[(1,)](x, 10, B=16)
    assert x.eq(3).all()
    error = refused(OutOfBounds, "element 15", replaced, x, 16, B=16)
    assert error.line == 3 and "tl.load(x + i, mask=i < n) + 3" in explain(error)
    run(step_kernel, (1,), x, 10, 4, B=16)
    assert x.eq(7).all()
