"""Loads that a compiled loop issues before the stores of earlier iterations."""

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from emulator.tests.checking import grid2, place, refused
from tritonemu import Race, run
from tritonemu.ttgir import Module

B, STEPS = 32, 8


@triton.jit
def chain_kernel(x, w, steps, HOW: tl.constexpr, DISTANCE: tl.constexpr, STAGES: tl.constexpr):
    """Each tile is the product of the one `DISTANCE` before it."""
    tile = grid2(32, 32)
    if HOW == "before":
        tl.store(x + tile, tl.full((32, 32), 1.0, tl.float16))
    if HOW == "outer":
        for _ in range(2):
            for k in tl.range(0, steps, num_stages=STAGES):
                t = tl.dot(tl.load(x + k * 1024 + tile), tl.load(w + tile))
                tl.store(x + (steps + k) * 1024 + tile, t.to(tl.float16))
            x += steps * 1024
    else:
        for k in tl.range(0, steps, num_stages=STAGES):  # the loop
            t = tl.load(x + k * 1024 + tile)  # loads
            t = tl.dot(t, tl.load(w + tile))
            tl.store(x + (k + DISTANCE) * 1024 + tile, t.to(tl.float16))  # stores


@triton.jit
def boxes_kernel(x, w, steps, STAGES: tl.constexpr):
    for k in tl.range(0, steps, num_stages=STAGES):
        t = tl.dot(x.load([k * 32, 0]), w.load([0, 0]))  # loads
        x.store([k * 32 + 32, 0], t.to(tl.float16))  # stores


def arguments(how="", distance=1, stages=4):
    x, w = torch.ones(3 * STEPS, B, B).half(), torch.eye(B).half()
    return x, w, STEPS, how, distance, stages


# What n stages issue ahead, a load of the turn after the next being issued behind the store.
@pytest.mark.parametrize("arch", ("sm_90", "sm_100"))
@pytest.mark.parametrize("stages, distance", [(n, d) for n in (1, 2, 3, 4) for d in (1, 2, 3)])
def test_a_load_of_what_an_earlier_iteration_stored(arch, stages, distance):
    for warps in (1, 4):
        options = {"arch": arch, "num_warps": warps}
        if distance < stages - 1:
            error = refused(
                Race, "software pipeliner", chain_kernel, *arguments("", distance, stages),
                line="# loads", **options,
            )  # fmt: skip
            assert error.other == place(chain_kernel, "# stores") and error.buffer == "x"
            loop = place(chain_kernel, "# the loop")[1]
            start = f"iteration {distance} of the loop at {error.file}:{loop} loads an element"
            assert start in str(error) and "that iteration 0 stored to" in str(error)
        else:
            x, *others = arguments("", distance, stages)
            report = run(chain_kernel, (1,), x, *others, **options)
            assert not report.unjudged and bool((x == 1).all())


def test_the_stages_of_the_launch_count():
    refused(Race, "software pipeliner", chain_kernel, *arguments(stages=None))
    run(chain_kernel, (1,), *arguments(stages=None), num_stages=2)


@pytest.mark.parametrize("how", ("before", "outer"))
def test_a_store_before_the_loop_comes_before_its_loads(how):
    assert not run(chain_kernel, (1,), *arguments(how, STEPS)).unjudged


@triton.jit
def merged_kernel(x, w, tiles, STEPS: tl.constexpr, FLATTEN: tl.constexpr):
    """Each product starts with what the one before it has left."""
    tile = grid2(32, 32)
    for i in tl.range(0, tiles, num_stages=3, flatten=FLATTEN):
        acc = tl.zeros((32, 32), tl.float32)
        for k in tl.range(0, STEPS):
            t = tl.load(x + (i * STEPS + k) * 1024 + tile)  # loads
            acc += tl.dot(t, tl.load(w + k * 1024 + tile))
        tl.store(x + (i + 1) * STEPS * 1024 + tile, acc.to(tl.float16))  # stores


def test_a_loop_that_was_merged_with_an_inner_one_is_not_judged():
    x, w = torch.ones(4 * STEPS * B, B).half(), torch.zeros(4 * B, B).half()
    assert not run(merged_kernel, (1,), x, w, 3, 4, False).unjudged
    report = run(merged_kernel, (1,), x, w, 3, 4, True)
    ((file, line, question),) = report.unjudged
    assert (file, line) == place(merged_kernel, "# loads")
    stores = place(merged_kernel, "# stores")
    assert question == f"whether the loop issues it before {stores[0]}:{stores[1]}"


@pytest.mark.parametrize("arch", ("sm_90", "sm_100"))
def test_boxes_of_descriptors(arch):
    def boxes():
        tensors = torch.ones((STEPS + 1) * B, B).half(), torch.eye(B).half()
        return [TensorDescriptor.from_tensor(each, [B, B]) for each in tensors]

    error = refused(
        Race, "software pipeliner", boxes_kernel, *boxes(), STEPS, 4, arch=arch, line="# loads"
    )
    assert error.other == place(boxes_kernel, "# stores")
    assert not run(boxes_kernel, (1,), *boxes(), STEPS, 1, arch=arch).unjudged


TTGIR = """
    %a = ttg.async_copy_global_to_local %1, %2 : tensor<8x!tt.ptr<f16>, #b> -> <8xf16> loc(#loc5)
    %b = ttg.async_copy_global_to_local %1, %2 : tensor<8x!tt.ptr<f16>, #b> -> <8xf16> loc(#loc5)
    %6:8 = scf.for %k = %c0 to %n step %c1 iter_args(%e = %a, %f = %b) -> (i32)  : i32 {
      %g = "tt.reduce"(%e) <{axis = 1 : i32}> ({
      ^bb0(%h: f32 loc(#loc5), %i: f32 loc(#loc5)):
        tt.reduce.return %h : f32 loc(#loc5)
      }) : (tensor<8x8xf32, #b>) -> tensor<8xf32, #b> loc(#loc5)
      FIRST
      scf.if %p {
        tt.store %3, %4 : tensor<8x!tt.ptr<f16>, #b> loc(#loc6)
      } loc(#loc6)
      SECOND
      scf.yield %e, %f : i32 loc(#loc4)
    } {tt.num_stages = 3 : i32} loc(#loc4)
    scf.for %k = %c0 to %n step %c1 : i32 {
      %a = tt.load %1 : tensor<8x!tt.ptr<f16>, #b> loc(#loc5)
    } loc(#loc9)
#loc4 = loc("/a/c.py":4:3)
#loc5 = loc("t"(#loc7))
#loc6 = loc("/a/c.py":6:3)
#loc7 = loc("/a/c.py":5:3)
#loc9 = loc("/a/c.py":9:3)
"""
COPY = "%b = ttg.async_copy_global_to_local %1 : tensor<8x!tt.ptr<f16>, #b> -> <8xf16> loc(#loc5)"


def test_which_iterations_a_loop_issues_ahead():
    loop, load, store = (("/x/c.py", line) for line in (4, 5, 6))
    for text, most in ((TTGIR.replace("FIRST", COPY), 2), (TTGIR.replace("SECOND", COPY), 1)):
        module = Module(text)
        for distance in range(1, 5):
            assert module.issues_ahead(loop, load, store, distance) is (distance <= most)
        assert module.issues_ahead(("c.py", 8), load, store, 1) is None
        assert module.issues_ahead(("c.py", 9), load, store, 1) is None
        assert module.issues_ahead(loop, ("c.py", 8), store, 1) is None
        assert module.issues_ahead(loop, load, ("c.py", 8), 1) is None
        assert module.issues_ahead(loop, load, store, 1, nested=True) is None
    # Hoisted out of the loop, it comes before all stores.
    assert Module(TTGIR).issues_ahead(loop, load, store, 100) is True
    # Inlined twice, with two answers of three.
    inlined = TTGIR.partition("    scf.for")[0].replace("SECOND", COPY)
    module = Module(inlined + inlined + TTGIR)
    assert [module.issues_ahead(loop, load, store, d) for d in (1, 2)] == [True, None]
    module = Module(inlined + inlined + TTGIR.replace("SECOND", COPY))
    assert [module.issues_ahead(loop, load, store, d) for d in (1, 2)] == [True, False]
