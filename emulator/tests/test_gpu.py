"""Host code that was written for a GPU, where there is none."""

import pytest
import torch
import triton
import triton.language as tl

from tritonemu import InvalidKernel, Race, Unsupported, enabled, fake_gpu


@pytest.fixture(autouse=True)
def gpu():
    with fake_gpu():
        yield


@triton.jit
def double_kernel(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)


def test_it_is_there_while_the_context_is_open():
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    assert torch.cuda.get_device_capability() == (9, 0)
    assert torch.cuda.get_device_properties("cuda").multi_processor_count == 4
    with torch.accelerator.device_index(torch.ones(1, device="cuda").device.index):
        assert torch.accelerator.get_memory_info() == torch.cuda.mem_get_info()
        assert torch.accelerator.current_stream().query()
    assert triton.runtime.driver.active.get_current_target().arch == 90
    with fake_gpu("sm_100", multiprocessors=6):
        assert torch.cuda.get_device_capability(0) == (10, 0)
        assert torch.cuda.get_device_properties(0).name == "NVIDIA B200"
        known = triton.runtime.driver.active.utils.get_device_properties(0)
        assert known["multiprocessor_count"] == 6
    assert torch.cuda.get_device_capability() == (9, 0)
    with pytest.raises(ValueError, match="arch must be one of"), fake_gpu("sm_80"):
        pass


def test_without_the_context_nothing_is_left():
    def outside():
        return torch.cuda.is_available, torch.cuda.Stream, torch.Generator, torch.version.cuda

    with fake_gpu():
        inside = outside()
    assert all(a is not b for a, b in zip(outside()[:3], outside()[1:3], strict=False))
    assert inside[0] is not torch.cuda.is_initialized


@pytest.mark.parametrize(
    "make",
    (
        lambda: torch.ones(3, device="cuda"),
        lambda: torch.ones(3, device="cuda:0"),
        lambda: torch.ones(3, device=0),
        lambda: torch.ones(3, device=torch.device("cuda", 0), pin_memory=False),
        lambda: torch.ones(3).cuda(),
        lambda: torch.ones(3).cuda(0, non_blocking=True),
        lambda: torch.ones(3).to("cuda"),
        lambda: torch.ones(3).to("cuda", torch.float16),
        lambda: torch.ones(3).to(device="cuda"),
        lambda: torch.ones(3).to(torch.zeros(1, device="cuda")),
        lambda: torch.ones(3).pin_memory().cuda(),
        lambda: torch.ones(3, device=triton.runtime.driver.active.get_active_torch_device()),
        lambda: torch.empty_like(torch.ones(3, device="cuda")),
        lambda: torch.ones(3, device="cuda").new_empty(3),
        lambda: torch.cat([torch.ones(3, device="cuda"), torch.ones(3, device="cuda")]),
        lambda: torch.rand(3, device="cuda", generator=torch.Generator(device="cuda")),
        lambda: torch.nn.Linear(3, 3).cuda()(torch.ones(1, 3, device="cuda")),
        lambda: torch.nn.Linear(3, 3, device="cuda").weight,
    ),
)
def test_a_tensor_on_it(make):
    x = make()
    assert x.is_cuda and not x.is_cpu
    assert x.device == torch.device("cuda", 0) and x.get_device() == 0


def test_a_tensor_beside_it():
    for x in (torch.ones(3), torch.ones(3, device="cuda").cpu(), torch.ones(3) * 2):
        assert x.is_cpu and not x.is_cuda and x.device == torch.device("cpu")
    assert torch.ones(3, device="cuda").to("cpu").device.type == "cpu"
    assert torch.ones(3, device="cuda").to(torch.ones(1)).device.type == "cpu"


def test_moving_copies_and_staying_does_not():
    x = torch.ones(3)
    y = x.cuda()
    y += 1
    assert x.tolist() == [1, 1, 1] and y.cpu().tolist() == [2, 2, 2]
    y.cpu().zero_()
    assert y.tolist() == [2, 2, 2]
    assert y.cuda() is y and y.to("cuda") is y and x.cpu() is x


def test_by_default():
    with torch.device("cuda"):
        assert torch.ones(3).is_cuda
    torch.set_default_device("cuda")
    try:
        assert torch.ones(3).is_cuda and torch.ones(3, device="cpu").is_cpu
    finally:
        torch.set_default_device(None)
    assert torch.ones(3).is_cpu


def test_streams_and_events():
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(0):
        start.record()
        torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
        end.record()
    torch.cuda.synchronize()
    assert end.query() and start.elapsed_time(end) >= 0


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        double_kernel[(triton.cdiv(y.numel(), 8),)](y, y.numel(), BLOCK=8)
        return y

    @staticmethod
    def backward(ctx, grad):
        assert grad.is_cuda and torch.empty(1, device="cuda").is_cuda
        return Double.apply(grad.contiguous())


def test_kernels_run_forward_and_backward():
    x = torch.arange(20.0, device="cuda", requires_grad=True)
    with enabled() as reports:
        y = Double.apply(x)
        y.sum().backward()
        (again,) = torch.autograd.grad(Double.apply(x).sum(), x)
    assert y.is_cuda and torch.equal(y, 2 * x)
    assert x.grad.is_cuda and x.grad.device == x.device and x.grad.eq(2).all()
    assert again.eq(2).all()
    assert [report.programs for report in reports] == [3] * 4
    torch.testing.assert_close(y, 2 * x)


@pytest.mark.parametrize("device_types", (None, "cuda"))
def test_operators_of_the_program(device_types):
    name = f"tritonemu_tests::double_{device_types}".lower()

    @torch.library.custom_op(name, mutates_args=(), device_types=device_types)
    def double(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x, device="cuda").copy_(x)
        assert x.is_cuda and y.is_cuda
        double_kernel[(1,)](y, y.numel(), BLOCK=16)
        return y

    double.register_autograd(lambda ctx, grad: double(grad.contiguous()))
    x = torch.ones(12, device="cuda", requires_grad=True)
    with enabled() as reports:
        y = torch.compile(double)(x)
        y.sum().backward()
    assert y.is_cuda and y.eq(2).all() and x.grad.eq(2).all() and len(reports) == 2


def test_a_kernel_of_a_library_for_the_gpu():
    library = torch.library.Library("tritonemu_tests_library", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl(op_name="twice", fn=lambda x: 2 * x, dispatch_key="CUDA")
    assert torch.ops.tritonemu_tests_library.twice(torch.ones(3, device="cuda")).eq(2).all()


def test_a_benchmark_is_one_call():
    calls = []
    assert triton.testing.do_bench(lambda: calls.append(1)) >= 0
    assert len(triton.testing.do_bench(lambda: calls.append(1), quantiles=[0.2, 0.5])) == 2
    assert len(calls) == 2


def test_warming_up_launches_nothing():
    with enabled() as reports:
        warm = double_kernel.warmup(torch.zeros(8, device="cuda"), 8, BLOCK=8, grid=(1,))
    assert warm.n_regs > 0 and warm.metadata.shared > 0 and not reports


def test_clocks():
    assert triton.testing.nvsmi(["clocks.max.sm", "clocks.current.memory"]) == [1980, 3201]
    assert triton.testing.get_max_tensorcore_tflops(torch.float16, 1_980_000, 0) > 0


# Autotuned kernels.


@triton.autotune([triton.Config({"BLOCK": n}) for n in (8, 16, 32)], key=[])
@triton.jit
def tuned_kernel(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)
    if BLOCK == 32:
        tl.store(x_ptr, tl.program_id(0).to(tl.float32))


def tuned(x, **options):
    with enabled(**options) as reports:
        tuned_kernel[lambda meta: (triton.cdiv(40, meta["BLOCK"]),)](x, 40)
    return reports


def test_one_configuration_or_all():
    x = torch.ones(40, device="cuda")
    assert [report.programs for report in tuned(x)] == [5]
    assert x.eq(2).all() and tuned_kernel.best_config.kwargs == {"BLOCK": 8}
    with pytest.raises(Race) as caught:
        tuned(x, all_configs=True)
    assert "(configuration BLOCK=32, num_warps=4)" in str(caught.value)


def test_every_configuration_gets_the_same_input_and_the_first_one_stays():
    """Its hook is called once for each launch."""
    calls, x = [], torch.ones(40, device="cuda")
    configs = [triton.Config({"BLOCK": n}, pre_hook=calls.append) for n in (8, 16)]
    kernel = triton.autotune(configs, key=[])(double_kernel)
    with enabled(all_configs=True) as reports:
        kernel[lambda meta: (triton.cdiv(40, meta["BLOCK"]),)](x, 40)
    assert [report.programs for report in reports] == [3, 5]
    assert x.eq(2).all() and kernel.best_config.kwargs == {"BLOCK": 8}
    calls.clear()
    with enabled():
        kernel[(5,)](x, 40)
    # Two more to see what a launch after another one leaves (test_tuning.py).
    assert [given["BLOCK"] for given in calls] == [8] * 3


@triton.autotune([triton.Config({"BLOCK": n}) for n in (8, 16, 32)], key=[])
@triton.jit
def asserting_kernel(x_ptr, least, BLOCK: tl.constexpr, LEAST: tl.constexpr):
    tl.static_assert(BLOCK >= LEAST, "too small")
    tl.store(x_ptr + tl.arange(0, BLOCK), BLOCK)


def test_configurations_in_which_a_static_assertion_fails_are_passed_over():
    x = torch.zeros(40, device="cuda")
    with enabled() as reports:
        asserting_kernel[(1,)](x, 0, LEAST=16)
        with pytest.raises(InvalidKernel, match="too small"):
            asserting_kernel[(1,)](x, 0, LEAST=64)
    assert len(reports) == 1 and x.eq(16).sum() == 16


def test_findings_are_kept_although_the_program_goes_on():
    with enabled() as reports:
        for _ in range(2):
            with pytest.raises(InvalidKernel):
                double_kernel[(1,)](torch.zeros(8, device="cuda"), 8, BLOCK=7)
    assert [type(error) for error in reports.findings] == [InvalidKernel] * 2 and not reports


@pytest.mark.parametrize("grid", (4, ("a",), (2.5,), (), (1, 1, 1, 1), (-1,), None))
def test_a_wrong_grid_is_named(grid):
    with enabled(), pytest.raises(ValueError, match="^grid must "):
        double_kernel[grid](torch.zeros(8, device="cuda"), 8, BLOCK=8)


def test_cublas_is_pytorch():
    cublas = triton._C.libtriton.nvidia.cublas.CublasLt(torch.empty(8, device="cuda"))
    a, b = (torch.randn(n, 8, device="cuda", dtype=torch.float16) for n in (4, 6))
    c, d = torch.ones(4, 6, device="cuda"), torch.empty(4, 6, device="cuda")
    expected = a.float() @ b.float().T
    cublas.gemm(a, b, c, d, 2.0, 3.0)
    torch.testing.assert_close(d, 2 * expected + 3)
    cublas.matmul(a, b, c)
    torch.testing.assert_close(c, expected)
    with pytest.raises(Unsupported, match="cuBLAS: block_scaled_matmul_mxfp8"):
        cublas.block_scaled_matmul_mxfp8(a, b, c, a, b)


def test_layer_norm_of_halves_sums_its_gradients_in_fp32():
    x = torch.randn(1000, 64, device="cuda", dtype=torch.float16)
    weight = torch.ones(64, device="cuda", dtype=torch.float16, requires_grad=True)
    bias = torch.zeros_like(weight, requires_grad=True)
    gradient = torch.randn_like(x)
    y = torch.nn.functional.layer_norm(x, (64,), weight, bias)
    y.backward(gradient)
    assert y.dtype == bias.grad.dtype == torch.float16
    torch.testing.assert_close(bias.grad, gradient.double().sum(0).half(), rtol=0, atol=0.02)


def test_a_generator_has_a_position():
    (generator,) = torch.cuda.default_generators
    generator.set_offset(8)
    assert generator.get_offset() == 8 and torch.Generator("cuda").get_offset() == 0
    torch.manual_seed(3)
    assert generator.get_offset() == 0 and generator.initial_seed() == 3
    seed, offset = (state := generator.get_state()).view(torch.int64)
    assert (int(seed), int(offset)) == (3, 0)
    drawn = [torch.rand(4, generator=generator) for _ in range(2)]
    later = generator.get_state()
    drawn.append(torch.rand(4, generator=generator))
    for start, draws in ((state, drawn[:2]), (later, drawn[2:])):
        generator.set_state(start)
        assert all(torch.rand(4, generator=generator).equal(draw) for draw in draws)
    offset += 8  # as some programs do that draw in their own kernels
    generator.set_state(state)
    assert generator.get_offset() == 8
