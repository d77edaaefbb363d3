"""Gluon over CTAs: right programs are right under every schedule, and mistakes are found."""

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
import triton
import triton.language as tl

from emulator.tests.checking import B200, everywhere, found, normal, refused
from emulator.tests.judging import import_file, judge
from tritonemu import (
    BarrierMisuse,
    Deadlock,
    EarlyExit,
    InvalidKernel,
    MissingFence,
    Race,
    UninitializedRead,
    Unsupported,
    run,
)
from tritonemu.compiler import asm_of
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

from emulator.tests import gluon_ctas as kernels  # noqa: E402
from emulator.tests import gluon_kernels  # noqa: E402
from emulator.tests.gluon_mutants import enumerate_mutants  # noqa: E402
from tritonemu.machine import sync  # noqa: E402

PATH = Path(kernels.__file__)
DTYPES = {
    torch.float32: gl.float32,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
}
PAIR = {"num_ctas": 2}
EARLY = (Race, UninitializedRead)


def boxed(tensor, shape, *cga_layout):
    layout = gl.NVMMASharedLayout.get_default_for(
        shape, DTYPES[tensor.dtype], cga_layout=cga_layout
    )
    return TensorDescriptor.from_tensor(tensor, shape, layout)


def product(a, b, c):
    return a.base.double() @ b.base.double()


def pair(tiles=1, steps=1):
    a, b = normal(256 * tiles, 64 * steps), normal(64 * steps, 64, seed=1)
    boxes = boxed(a, [256, 64], (1, 0)), boxed(b, [64, 64], (0, 1))
    return [*boxes, boxed(torch.zeros(256 * tiles, 64), [256, 64], (1, 0))]


def four():
    a, b = normal(512, 128), normal(128, 64, seed=1)
    boxes = boxed(a, [512, 64], (1, 0), (2, 0)), boxed(b, [64, 64], (0, 1), (0, 0))
    return [*boxes, boxed(torch.zeros(512, 64), [512, 64], (1, 0), (2, 0))]


def scaled():
    a = normal(256, 128, dtype=torch.float32).to(torch.float8_e4m3fn)
    b = normal(64, 128, seed=1, dtype=torch.float32).to(torch.float8_e4m3fn)
    factors = [torch.randint(125, 130, (n, 4), dtype=torch.uint8) for n in (256, 64)]
    packed = factors[0].view(2, 4, 32, 4).transpose(1, 2).reshape(2, 512)
    boxes = [boxed(a, [256, 128], (1, 0)), boxed(b, [64, 128], (1, 0))]
    return [*boxes, packed, factors[1], boxed(torch.zeros(256, 64), [256, 64], (1, 0))]


def scaled_product(a, b, a_scale, b_scale, c):
    scales = a_scale.view(2, 32, 4, 4).transpose(1, 2).reshape(256, 4)
    left, right = (
        box.base.double() * torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
        for box, scale in ((a, scales), (b, b_scale))
    )
    return left @ right.T


def shared_b(steps):
    a, b = normal(128, 64 * steps), normal(64 * steps, 64, seed=1)
    boxes = boxed(a, [128, 64], (1, 0)), boxed(b, [64, 64], (0, 0))
    return [*boxes, boxed(torch.zeros(128, 64), [128, 64], (1, 0))]


def twice():
    return [boxed(normal(64, 32, dtype=torch.float32), [32, 32], (0, 0)), torch.zeros(64, 32)]


def matrix():
    return [normal(4, 32, dtype=torch.float32), torch.zeros(4, 32)]


def vector():
    return [normal(256, dtype=torch.float32), torch.zeros(256)]


COLUMNS = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0], cga_layout=[[0, 1]])
LINEAR = gl.DistributedLinearLayout(
    reg_bases=[],
    lane_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [1, 0]],
    warp_bases=[[2, 0], [0, 0]],
    block_bases=[[0, 16]],
    shape=[4, 32],
)
RIGHT = {
    "multicast_again": (twice, lambda x, y: x.base, PAIR, 1),
    "peers": (matrix, lambda x, y: x, PAIR | {"C": COLUMNS}, 1),
    "pair_once": (pair, product, PAIR | B200, 1),
    "pairs_of_four": (four, product, B200 | {"num_ctas": 4}, 1),
    "scaled_pair": (scaled, scaled_product, PAIR | B200, 1),
    "persistent": (lambda: [torch.zeros(7)], lambda y: torch.ones(7), PAIR | B200, 7),
    "cp_async": (vector, lambda x, y: x, PAIR, 1),
    "sevens": (
        lambda: [boxed(torch.zeros(64, 32), [64, 32], (1, 0))],
        lambda y: torch.full((64, 32), 7.0),
        PAIR,
        1,
    ),
    "slot_again": (lambda: [torch.zeros(1)], lambda y: torch.ones(1), PAIR | B200, 1),
    "barrier_in_memory": (
        lambda: [torch.zeros(1)],
        lambda y: torch.ones(1),
        {"num_ctas": 4},
        1,
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    make, expected, options, programs = RIGHT[name]
    kernel = getattr(kernels, name)
    everywhere(kernel, (programs,), make, expected, 1e-3, BUG="", **options)
    run(kernel, (programs,), *make(), BUG="", compile=True, **options)


@pytest.mark.parametrize(
    ("name", "bug", "error"),
    (
        ("multicast_again", "count", Deadlock),
        ("multicast_again", "bytes of both", Deadlock),
        ("multicast_again", "no expect", Deadlock),
        ("multicast_again", "no wait", Race),
        ("multicast_again", "relaxed", Race),
        ("multicast_again", "barrier of a CTA", Race),
        ("multicast_again", "one wait for both", Race),
        ("peers", "stored", Race),
        ("peers", "loaded", Race),
        ("pair_once", "barrier of each", Race),
        ("pair_once", "one to wait", InvalidKernel),
        ("pair_once", "count of both", Deadlock),
        ("pair_once", "bytes of both", Deadlock),
        ("pair_once", "read by both", Race),
        ("pair_once", "no wait", Race),
        ("pair_once", "no store wait", EarlyExit),
        ("pairs_of_four", "own commit", BarrierMisuse),
        ("pairs_of_four", "commit to own pair", Deadlock),
        ("scaled_pair", "stored last", Race),
        ("persistent", "no barrier", BarrierMisuse),
        ("persistent", "each expects, no barrier", Race),
        ("persistent", "expected in one", BarrierMisuse),
        ("cp_async", "no wait", Race),
        ("sevens", "no fence", MissingFence),
        ("sevens", "fence too early", MissingFence),
        ("slot_again", "each expects", Race),
        ("barrier_in_memory", "no init", BarrierMisuse),
        ("barrier_in_memory", "arrives twice", BarrierMisuse),
    ),
)
def test_mistakes_are_found(name, bug, error):
    make, _, options, programs = RIGHT[name]
    found(error, getattr(kernels, name), (programs,), make, BUG=bug, **options)


SPREAD = {
    "to oneself": {"HAS": ((0,),), "GETS": ((0,),)},
    "to oneself of 4": {"HAS": ((0,), (0,)), "GETS": ((0,), (0,))},
    "from the first": {"HAS": ((0,),), "GETS": ((1,),)},
    "from the first of 4": {"HAS": ((0,), (0,)), "GETS": ((1,), (2,))},
}


def row():
    return [normal(512, dtype=torch.float32), torch.zeros(512)]


@pytest.mark.parametrize("how", SPREAD)
def test_an_asynchronous_store(how):
    options = SPREAD[how] | {"num_ctas": 2 ** len(SPREAD[how]["HAS"])}
    everywhere(kernels.sent, (1,), row, lambda x, y: x, BUG="", **options)
    wrong = {"4 bytes more": Deadlock, "4 bytes fewer": BarrierMisuse, "no wait": EARLY}
    if options["HAS"] != options["GETS"]:
        wrong["from all"] = Race
    for bug, error in wrong.items():
        found(error, kernels.sent, (1,), row, BUG=bug, **options)


@pytest.mark.parametrize("writer", (0, 1))
def test_a_slice_of_the_second_cta(writer):
    options = PAIR | {"WRITER": writer}
    make = lambda: [normal(4, 32, dtype=torch.float32), torch.zeros(2, 32)]  # noqa: E731
    everywhere(kernels.last_rows, (1,), make, lambda x, y: x[2:], BUG="", **options)
    for bug in ("read early", "relaxed", "no barrier"):
        found(Race, kernels.last_rows, (1,), make, BUG=bug, **options)
    if writer == 0:
        everywhere(kernels.last_rows, (1,), make, BUG="nobody else reads", **options)


@pytest.mark.parametrize(
    ("op", "bugs"),
    (("gather", ("stored", "gathered")), ("scatter", ("stored", "scattered"))),
)
def test_elements_of_other_ctas(op, bugs):
    make = lambda: [normal(2, 32, dtype=torch.float32), torch.zeros(2, 32)]  # noqa: E731
    options, halves = PAIR | {"OP": op}, [*range(16, 32), *range(16)]
    everywhere(kernels.halves_swapped, (1,), make, lambda x, y: x[:, halves], BUG="", **options)
    for bug in bugs:
        found(EARLY, kernels.halves_swapped, (1,), make, BUG=bug, **options)


def test_a_linear_layout_says_which_cta_loads():
    options = PAIR | {"C": LINEAR}
    everywhere(kernels.peers, (1,), matrix, lambda x, y: x, BUG="", **options)
    found(Race, kernels.peers, (1,), matrix, BUG="stored", **options)


def test_of_a_program_that_ends_too_early_no_barrier_is_asked():
    message = r"of its out, which ends with it; let it wait for this(\n|$)"
    refused(EarlyExit, message, kernels.pair_once, *pair(), BUG="no store wait", **PAIR, **B200)


def test_without_multicast_each_cta_loads_for_itself():
    values = twice()
    report = run(kernels.multicast_again, (1,), *values, BUG="no multicast", **PAIR)
    torch.testing.assert_close(values[1], values[0].base)
    assert report.programs == 2
    multicast = run(kernels.multicast_again, (1,), *twice(), BUG="", **PAIR)
    assert multicast.bytes_loaded * 2 == report.bytes_loaded


def test_a_row_over_ctas():
    x = normal(3, 2048, dtype=torch.float32)
    for number in (1, 2, 8):
        y = torch.zeros_like(x)
        run(kernels.softmax, (3,), x, y, 2048, num_ctas=number)
        torch.testing.assert_close(y, x.softmax(1))


PIPELINES = {
    "pair_kernel": (
        ("pair_kernel", "load_pair", "multiply_pair", "store_pair"),
        lambda: pair(3, 3),
        {"TILES": 3, "STEPS": 3, "STAGES": 2, **PAIR, **B200},
    ),
    "multicast_kernel": (
        ("multicast_kernel", "load_shared_b", "multiply_shared_b"),
        lambda: shared_b(5),
        {"STEPS": 5, "STAGES": 2, **PAIR},
    ),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_are_right(name):
    _, make, options = PIPELINES[name]
    kernel = getattr(kernels, name)
    everywhere(kernel, (1,), make, product, 1e-3, **options)
    run(kernel, (1,), *make(), compile=True, **options)


# The compiler puts a fence between a store and a TMA store of one partition by itself; and two
# arrivals of one role may change places.
HARMLESS = {
    "pair_kernel": {
        "store_pair: drop fence_async_shared()",
        "store_pair: fence_async_shared() before out.store(value)",
    },
    "multicast_kernel": {
        "multiply_shared_b: mbarrier.arrive(both_empty.index(stage)) before "
        "mbarrier.arrive(empty.index(stage))",
        "multiply_shared_b: drop fence_async_shared()",
        "multiply_shared_b: fence_async_shared() before out.store(acc)",
    },
}


@pytest.mark.parametrize(("name", "number"), (("pair_kernel", 49), ("multicast_kernel", 40)))
def test_mutants(name, number):
    functions, make, options = PIPELINES[name]

    def launch(module: ModuleType, schedule: str | int) -> None:
        values = make()
        run(getattr(module, name), (1,), *values, schedule=schedule, max_steps=5_000, **options)
        torch.testing.assert_close(values[-1].base.double(), product(*values), rtol=1e-3, atol=1e-3)

    mutants = enumerate_mutants(PATH, functions)
    errors = {m.what: judge(m, import_file, [launch]).error for m in mutants}
    assert len(errors) == number
    assert {what for what, error in errors.items() if not error} == HARMLESS[name]


def test_init_counts_for_every_cta_as_the_ptx_does(monkeypatch):
    counts = []
    original = sync.MBarrier
    monkeypatch.setattr(sync, "MBarrier", lambda *args: counts.append(args[3]) or original(*args))
    for name in ("pair_once", "pairs_of_four", "multicast_again"):
        make, _, options, _ = RIGHT[name]
        kernel, values = getattr(kernels, name), make()
        counts.clear()
        report = run(kernel, (1,), *values, BUG="", **options)
        options = dict(options)
        arch, bound = (
            options.pop("arch", "sm_90"),
            dict(zip(kernel.arg_names, values, strict=False)),
        )
        ptx = asm_of(kernel, arch, bound | {"BUG": ""}, {"num_warps": 4, **options})["ptx"]
        written = re.findall(r"mbarrier\.init\S+ \[\S+\], (\d+);", ptx)
        assert {*counts} == {*map(int, written)}
        assert report.barriers == len(written)


@pytest.mark.parametrize(
    "what",
    (
        *("atomic_scatter_add", "this use of a slice", "a value that CTAs have several of"),
        *("`else`", "a wait for bar", "a cluster barrier", "an allocation", "value of CTAs"),
        *("a return in a branch", "registers of 2 layouts"),
    ),
)
def test_not_known(what):
    x = torch.zeros(2)
    refused(Unsupported, what, kernels.some_ctas, x, x, WHAT=what, **PAIR)


def test_an_answer_proves_that_what_came_before_the_request_is_over():
    make, options = lambda: [torch.zeros(1)], PAIR | B200
    everywhere(kernels.answers, (1,), make, lambda y: torch.ones(1), **options)


def test_one_cta_has_rank_0_and_nobody_to_send_to():
    x, y = torch.ones(1), torch.zeros(1)
    run(kernels.first_of, (1,), x, y)
    assert torch.equal(x, y)
    one = {"HAS": (), "GETS": (), "BUG": "from all"}
    refused(InvalidKernel, "Triton refuses this kernel", kernels.sent, *row(), **one)


def test_pixels_of_several_ctas_are_not_known():
    x, layout = torch.zeros(1, 8, 8, 32), boxed(torch.zeros(32, 32), [32, 32], (0, 0)).layout
    corners = {"pixel_box_lower_corner": [-1, -1], "pixel_box_upper_corner": [0, 0]}
    image = TensorDescriptorIm2Col(x, x.shape, x.stride(), [32, 32], layout, **corners)
    target = boxed(torch.zeros(32, 32), [32, 32], (0, 0))
    options = {"ROW": 0, "COLUMN": 0, "BUG": "", **PAIR}
    refused(Unsupported, "async_load_im2col", gluon_kernels.pixels, image, target, **options)


def test_num_ctas_is_a_power_of_two():
    refused(InvalidKernel, "num_ctas must be", kernels.cp_async, *vector(), BUG="", num_ctas=3)


@triton.jit
def plain(x, y, N: tl.constexpr):
    offsets = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + offsets, tl.load(x + offsets) / tl.sum(tl.load(x + offsets)))


def test_a_triton_kernel_of_several_ctas_gives_the_same_values():
    x = normal(2, 512, dtype=torch.float32).abs()
    y = [torch.zeros_like(x) for _ in range(2)]
    for number, out in enumerate(y, 1):
        run(plain, (2,), x, out, 512, num_ctas=number)
    torch.testing.assert_close(y[0], x / x.sum(1, keepdim=True))
    assert torch.equal(*y)
