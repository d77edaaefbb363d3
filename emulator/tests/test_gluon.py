"""Gluon: its kernels run right under every schedule, and each mistake in them is found."""

import re
from collections import Counter

import pytest
import torch

from emulator.tests.checking import B200, everywhere, found, normal, refused
from tritonemu import (
    BarrierMisuse,
    Deadlock,
    EarlyExit,
    InvalidKernel,
    MissingFence,
    OutOfBounds,
    Race,
    ResourceLimit,
    UndefinedValue,
    UninitializedRead,
    run,
)
from tritonemu.compiler import allocated, asm_of
from tritonemu.gpu import has_gluon

pytestmark = pytest.mark.gluon
if not has_gluon():
    pytest.skip(
        "needs the Gluon of Triton 3.9, and this Triton has another", allow_module_level=True
    )

from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon.nvidia.hopper import (  # noqa: E402
    TensorDescriptor,
    TensorDescriptorIm2Col,
)

from emulator.tests import gluon_kernels as kernels  # noqa: E402
from tritonemu.ttgir import places  # noqa: E402


def boxed(tensor, *shape):
    layout = gl.NVMMASharedLayout.get_default_for([*shape], gl.float32)
    return TensorDescriptor.from_tensor(tensor, [*shape], layout)


def numbers(*shape):
    """Small integers: products and sums of them are exact."""
    return normal(*shape).mul(2).round()


def product(a, b, y):
    return 2 * (a.double() @ b.double())


F32 = torch.float32


def vector():
    return [normal(256, dtype=F32), torch.zeros(256)]


def tiles():
    return [boxed(normal(32, 64, dtype=F32), 32, 32), boxed(torch.zeros(32, 64), 32, 32)]


def sent():
    return [boxed(torch.zeros(96, 32), 32, 32), normal(96, 32, dtype=F32)]


def read():
    return [boxed(normal(96, 32, dtype=F32), 32, 32), torch.zeros(96, 32)]


def hopper():
    return [numbers(64, 64), numbers(64, 64), torch.zeros(64, 64)]


def blackwell():
    return [numbers(128, 64), numbers(64, 64), torch.zeros(128, 64)]


def loop():
    return [boxed(normal(640, 128, dtype=F32), 128, 128), torch.zeros(640, 128)]


def again():
    return [boxed(normal(128, 32, dtype=F32), 32, 32), boxed(torch.zeros(128, 32), 32, 32)]


def rows():
    layout = gl.NVMMASharedLayout.get_default_for([32, 32], gl.float32)
    source, target = normal(64, 32, dtype=F32), torch.zeros(64, 32)
    boxes = [TensorDescriptor.from_tensor(each, [1, 32], layout) for each in (source, target)]
    return [torch.arange(64).flip(0).int(), *boxes]


def factors(scale):
    return torch.exp2(scale.double() - 127).repeat_interleave(32, 1)


def microscaled():
    operands = [numbers(128, 128).to(torch.float8_e4m3fn) for _ in range(2)]
    scales = [torch.randint(125, 130, (128, 4), dtype=torch.uint8) for _ in range(2)]
    scales[1] = scales[1].view(4, 32, 4).transpose(0, 1).contiguous()
    return [*operands, *scales, torch.zeros(128, 128)]


def scaled_product(a, b, a_scale, b_scale, y):
    b_scale = b_scale.transpose(0, 1).reshape(128, 4)
    return (a.double() * factors(a_scale)) @ (b.double() * factors(b_scale)).T


RIGHT = {
    "cp_async": (vector, lambda x, y: x, {}),
    "tma_copy": (tiles, lambda x, y: x.base, {}),
    "fetched_and_read": (read, lambda x, y: x.base, {}),
    "wgmma": (hopper, product, {}),
    "transposed": (hopper, lambda a, b, y: a.double() @ b.double().T, {}),
    "tcgen05": (blackwell, product, B200),
    "used_again": (again, lambda x, y: x.base, {}),
    "invalidated": (lambda: [torch.zeros(1)], lambda y: torch.ones(1), {}),
    "gathered": (rows, lambda rows, x, y: x.base, B200),
    "scaled": (microscaled, scaled_product, B200),
    "allocated_in_loop": (loop, lambda x, y: x.base, {}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    make, gives, options = RIGHT[name]
    everywhere(getattr(kernels, name), (1,), make, gives, BUG="", **options)


def one_and_two():
    return [boxed(torch.zeros(32, 32), 32, 32), torch.zeros(64, 32)]


def twos(x, y):
    return torch.full((64, 32), 2.0)


@pytest.mark.parametrize("bug", ("", "waits before it stores"))
def test_dead_memory_is_free_once_its_copies_are_known_to_be_done(bug):
    everywhere(kernels.dead_memory, (1,), one_and_two, twos, BUG=bug)


@pytest.mark.parametrize("kernel", (kernels.kept_memory, kernels.kept_by_loop))
def test_memory_that_is_used_later_is_not_dead(kernel):
    everywhere(kernel, (1,), one_and_two, twos)


def test_a_copy_of_dead_memory_races_with_a_later_allocation():
    """Though a variable still names it."""
    match = "the compiler puts it where {} was, as no operation comes that uses that"
    found(Race, kernels.dead_memory, (1,), one_and_two, match.format("both"), BUG="no wait")
    found(Race, kernels.dead_in_loop, (1,), one_and_two, match.format("first"))


def test_where_the_compiler_puts_buffers():
    for kernel, options, apart in (
        (kernels.dead_memory, {"BUG": ""}, False),
        (kernels.kept_memory, {}, True),
    ):
        bound = dict(zip(kernel.arg_names, one_and_two(), strict=False)) | options
        (calls, first), (_, second) = places(allocated(asm_of(kernel, "sm_90", bound, {}), "sm_90"))
        assert (first != second) == apart
        assert calls[0][0] == "gluon_kernels.py"


def test_dead_memory_counts_as_the_compiler_lets_buffers_share_it():
    y = torch.zeros(128, 256)
    report = run(kernels.large_memory, (1,), y, KEPT=False)
    assert bool((y == 2).all()) and 2**17 <= report.shared_bytes < 2**18
    refused(ResourceLimit, "got 262144", kernels.large_memory, y, KEPT=True)


@pytest.mark.parametrize("bug", ("", "fence of consumer"))
def test_sent(bug):
    """The fence may be the producer's before it arrives, or the consumer's after it waits."""
    target, x = sent()
    everywhere(kernels.stored_and_sent, (1,), lambda: (target, x), BUG=bug)
    assert torch.equal(target.base, x)


# Kernel, mistake, what it is found as.
EARLY = (Race, UninitializedRead)
MISTAKES = (
    ("cp_async", "one group", Race),
    ("cp_async", "no commit", Race),
    ("cp_async", "no wait", Race),
    ("cp_async", "waits for one", Race),
    ("tma_copy", "no init", BarrierMisuse),
    ("tma_copy", "two inits", BarrierMisuse),
    ("tma_copy", "count of two", Deadlock),
    ("tma_copy", "no expect", Deadlock),
    ("tma_copy", "too few bytes", BarrierMisuse),
    ("tma_copy", "too many bytes", BarrierMisuse),
    ("tma_copy", "parity", (*EARLY, BarrierMisuse, Deadlock)),
    ("tma_copy", "no wait", (*EARLY, BarrierMisuse)),
    ("tma_copy", "phase stays", (Race, BarrierMisuse, Deadlock)),
    ("tma_copy", "no store wait", (Race, EarlyExit)),
    ("tma_copy", "one store in flight", (Race, EarlyExit)),
    ("tma_copy", "after invalidate", BarrierMisuse),
    ("stored_and_sent", "no fence", MissingFence),
    ("stored_and_sent", "fence after arrive", MissingFence),
    ("stored_and_sent", "no empty wait", (Race, BarrierMisuse)),
    ("stored_and_sent", "arrives early", (*EARLY, BarrierMisuse)),
    ("stored_and_sent", "no arrive", Deadlock),
    ("stored_and_sent", "arrives twice", BarrierMisuse),
    ("stored_and_sent", "no full wait", (*EARLY, BarrierMisuse)),
    ("stored_and_sent", "no store wait", (Race, EarlyExit)),
    ("stored_and_sent", "no empty arrive", Deadlock),
    ("fetched_and_read", "no fence", MissingFence),
    ("fetched_and_read", "arrives early", (Race, MissingFence)),
    ("used_again", "stores in flight", Race),
    ("invalidated", "while another waits", BarrierMisuse),
    ("wgmma", "operand stored", Race),
    ("wgmma", "no wait", InvalidKernel),
    ("wgmma", "one in flight", InvalidKernel),
    ("gathered", "no wait", EARLY),
    ("gathered", "bytes of one row", BarrierMisuse),
    ("gathered", "no store wait", (Race, EarlyExit)),
    ("scaled", "commit too early", EARLY),
    ("scaled", "factors stored", Race),
    ("tcgen05", "commit too early", Race),
    ("tcgen05", "no commit", Deadlock),
    ("tcgen05", "operand stored", Race),
    ("tcgen05", "no wait", (Race, UninitializedRead)),
)


@pytest.mark.parametrize(("name", "bug", "error"), MISTAKES)
def test_mistake(name, bug, error):
    make, _, options = RIGHT.get(name, (sent, None, {}))
    found(error, getattr(kernels, name), (1,), make, BUG=bug, **options)


def test_programs_are_taken_over():
    kernel = kernels.taken_over
    expected = torch.arange(1, 9).int()
    everywhere(kernel, (8,), lambda: [torch.zeros(8).int()], expected, BUG="", **B200)
    for bug, error in (("no wait", EARLY), ("no expect", (Deadlock, BarrierMisuse))):
        found(error, kernel, (8,), lambda: [torch.zeros(8).int()], BUG=bug, **B200)
    message = "needs arch sm_100"
    refused(InvalidKernel, message, kernel, torch.zeros(8).int(), BUG="")


def test_indices_name_what_is_used_of_shared_memory():
    def make():
        return [torch.arange(64.0), torch.zeros(64)]

    everywhere(kernels.backwards, (1,), make, torch.arange(63.0, -1.0, -1.0), FIRST=32)
    message = "an index of shared, which has 128"
    refused(OutOfBounds, message, kernels.backwards, *make(), FIRST=96)


def test_no_such_barrier():
    everywhere(kernels.no_such_barrier, (1,), lambda: (0, torch.zeros(1)), 1)
    refused(OutOfBounds, "index -1", kernels.no_such_barrier, 2, torch.zeros(1))


def test_layouts_are_converted_or_refused():
    i = torch.arange(512)
    everywhere(kernels.mixed, (1,), lambda: [torch.zeros(512).int()], 2 * i, CONVERT=True)
    refused(InvalidKernel, "layout", kernels.mixed, torch.zeros(512).int(), CONVERT=False)


def read_twice():
    source = boxed(normal(64, 32, dtype=F32), 32, 32)
    return [source, torch.zeros(64, 32), torch.zeros(64, 32)]


def test_the_fence_of_the_compiler_covers_what_others_did():
    kernel, source = kernels.read_by_both, lambda *values: values[0].base
    everywhere(kernel, (1,), read_twice, source, BUG="")
    found(MissingFence, kernel, (1,), read_twice, BUG="loads only")
    values = read_twice()
    bound = dict(zip(kernel.arg_names, values, strict=False))
    for bug in ("", "loads only"):
        ptx = asm_of(kernel, "sm_90", bound | {"BUG": bug}, {"num_warps": 4})["ptx"]
        assert ("fence.proxy.async" in ptx) == (not bug)


@pytest.mark.parametrize("arch", ("sm_90", "sm_100"))
def test_between_partitions_the_compiler_adds_no_fence(arch):
    kernel = kernels.stored_and_sent
    for bug, fences in (("", 3), ("no fence", 0)):
        bound = dict(zip(kernel.arg_names, sent(), strict=False)) | {"BUG": bug}
        ptx = asm_of(kernel, arch, bound, {"num_warps": 4})["ptx"]
        assert ptx.count("fence.proxy.async") == fences


def image(stride):
    """Two images of [5, 5], a filter of [3, 3] with a padding of 1, and 32 pixels at a time."""
    x, y = normal(2, 5, 5, 32, dtype=F32), torch.zeros(32, 32)
    layout = gl.NVMMASharedLayout.get_default_for([32, 32], gl.float32)
    box = TensorDescriptorIm2Col(
        *(x, x.shape, x.stride(), [32, 32], layout),
        element_strides=[1, stride, stride, 1],
        pixel_box_lower_corner=[-1, -1],
        pixel_box_upper_corner=[-1, -1],
    )
    return [box, boxed(y, 32, 32)]


@pytest.mark.parametrize("stride", (1, 2))
def test_im2col(stride):
    """The result is that of `unfold`; behind the last image all is zero."""

    def under(row, column):
        def expected(box, y):
            columns = torch.nn.functional.unfold(
                box.base.permute(0, 3, 1, 2), 3, padding=1, stride=stride
            )
            tap = columns.view(2, 32, 3, 3, -1)[:, :, row, column]
            pixels = tap.transpose(1, 2).reshape(-1, 32)[:32]
            return torch.cat([pixels, torch.zeros(32 - len(pixels), 32)])

        return expected

    for row, column in ((0, 0), (1, 2), (2, 2)):
        position = {"ROW": row, "COLUMN": column}
        expected = under(row, column)
        everywhere(kernels.pixels, (1,), lambda: image(stride), expected, BUG="", **position)
    for bug, error in (("no wait", Race), ("starts outside", OutOfBounds)):
        found(error, kernels.pixels, (1,), lambda: image(stride), BUG=bug, ROW=0, COLUMN=0)
    run(kernels.pixels, (1,), *image(stride), BUG="", ROW=0, COLUMN=0, compile=True)


@pytest.mark.parametrize("name", RIGHT)
def test_compiles(name):
    """Kernels that run here compile, too."""
    make, _, options = RIGHT[name]
    run(getattr(kernels, name), (1,), *make(), BUG="", compile=True, **options)


TMA_LOAD = r"cp\.async\.bulk\.tensor\.\dd\.(?:tile::gather4\.)?shared"
PTX = {
    "init": r"mbarrier\.init",
    "arrive": r"mbarrier\.arrive|tcgen05\.commit",
    "copy": rf"{TMA_LOAD}|cp\.async\.c[ag]|tcgen05\.cp",
    "TMA load": TMA_LOAD,
    "store": r"cp\.async\.bulk\.tensor\.\dd\.(?:tile::scatter4\.)?global",
    "mma": r"wgmma\.mma_async|tcgen05\.mma",
}
# Instructions of one MMA of 64 fp16, or 128 fp8, along K; of one gather of 32 rows, 16 by 4 warps.
INSTRUCTIONS_OF_AN_MMA, INSTRUCTIONS_OF_A_GATHER = 4, 2


@pytest.mark.parametrize("name", [name for name in RIGHT if name != "allocated_in_loop"])
def test_the_compiler_makes_as_many(name):
    """Barriers, arrivals, copies and MMAs are those of the PTX, whose loops are unrolled."""
    make, _, options = RIGHT[name]
    kernel, args = getattr(kernels, name), make()
    bound = dict(zip(kernel.arg_names, [*args, ""], strict=True))
    ptx = asm_of(kernel, options.get("arch", "sm_90"), bound, {})["ptx"]
    counts = {kind: len(re.findall(form, ptx)) for kind, form in PTX.items()}
    times = INSTRUCTIONS_OF_A_GATHER if name == "gathered" else 1
    report = run(kernel, (1,), *args, BUG="", trace=True, **options)
    ran = Counter(event.kind for event in report.timeline.events)
    assert counts["init"] == report.barriers
    assert counts["copy"] == times * ran["copy"] and counts["store"] == times * ran["store"]
    assert counts["arrive"] + counts["TMA load"] // times == ran["arrive"]
    assert counts["mma"] == INSTRUCTIONS_OF_AN_MMA * report.dots


def test_barriers_of_a_part_of_a_buffer_are_others_than_those_before_it():
    run(kernels.two_barrier_arrays, (1,), torch.zeros(1), arch="sm_90")


def test_a_copy_from_an_undefined_address_is_found():
    x, y, index = normal(128, dtype=F32), torch.zeros(128), torch.zeros(128, dtype=torch.int32)
    with pytest.raises(UndefinedValue, match="an address"):
        run(kernels.undefined_address, (1,), x, y, index, arch="sm_90")
