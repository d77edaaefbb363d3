"""The unmodified kernels of the installed fbtriton run, are right, and raise no false alarm."""

import re
import time
from functools import partial

import pytest

import tritonemu

from .tutorials import blackwell, cases, hopper
from .tutorials.cases import run_case

pytestmark = pytest.mark.tlx

CASES = {case.name: case for case in (*hopper.CASES, *blackwell.CASES)}
RANDOM_SCHEDULES = 8


@pytest.mark.parametrize(
    "schedules",
    (
        pytest.param(("modelled",), id="modelled"),
        pytest.param((0, 1), id="some", marks=pytest.mark.sweep),
        pytest.param(range(2, RANDOM_SCHEDULES), id="others", marks=pytest.mark.nightly),
    ),
)
@pytest.mark.parametrize("name", CASES)
def test_right_under_every_schedule(name, schedules):
    for schedule in schedules:
        run_case(CASES[name], schedule)


@pytest.mark.parametrize(
    "case, errors", blackwell.FAULTY, ids=lambda value: getattr(value, "name", "")
)
def test_faults_of_the_tutorials_are_found(case, errors):
    with pytest.raises(tritonemu.EmulatorError) as caught:
        run_case(case)
    assert type(caught.value).__name__ in errors


def test_the_published_gdpa_races_once_its_registers_are_not_refused(tmp_path):
    """Its output is read while the product that completes it may still run."""
    asks = 'tlx.async_task("default", registers=ACT_REGS)'
    text = (cases.FOLDER / "blackwell-gdpa.py").read_text()
    assert text.count(asks) == 1
    repaired = tmp_path / "blackwell-gdpa.py"
    repaired.write_text(text.replace(asks, 'tlx.async_task("default")'))
    kernel = cases.load.__wrapped__(str(repaired)).gdpa_kernel_tma_ws_blackwell.fn
    (build,) = {case.build for case, _ in blackwell.FAULTY if case.name == "blackwell_gdpa"}
    for schedule in ("modelled", 0, 1, 2):
        launch = build()
        with pytest.raises(tritonemu.Race) as caught:
            tritonemu.run(
                kernel, launch.grid, *launch.args, arch="sm_100", schedule=schedule, **launch.kwargs
            )
        lines = repaired.read_text().splitlines()
        (read,) = [
            n for n in {caught.value.line, caught.value.other[1]}
            if "local_load(o0_view)" in lines[n - 1]
        ]  # fmt: skip
        assert any("FIXME" in line for line in lines[read - 4 : read])


@pytest.mark.parametrize("config, rows", ((0, 256), (2, 256)), ids=("one CTA", "two CTAs"))
def test_the_published_backward_races_without_the_barrier_of_its_warps(config, rows, tmp_path):
    """As before facebookexperimental/triton#1992: P overwrites scores that a slow warp reads."""
    meets = "tlx.named_barrier_wait(QK_READ_DONE_BAR, NUM_COMPUTE_THREADS)"
    text = (cases.FOLDER / blackwell.PERSISTENT).read_text()
    assert text.count(meets) == 1
    edited = tmp_path / blackwell.PERSISTENT
    edited.write_text(text.replace(meets, "pass"))
    kernel = cases.load.__wrapped__(str(edited))._attn_bwd_ws.fn
    for schedule in ("modelled", 0, 1):
        launch = blackwell.backward(1, rows, causal=False, config=config)
        with pytest.raises(tritonemu.Race, match="have its bytes otherwise") as caught:
            tritonemu.run(
                kernel, launch.grid, *launch.args, arch="sm_100", schedule=schedule, **launch.kwargs
            )
        lines = edited.read_text().splitlines()
        assert "tlx.local_store(p_tiles" in lines[caught.value.line - 1]
        assert "tlx.local_load(qk_tiles" in lines[caught.value.other[1] - 1]


@pytest.mark.parametrize("ctas", (1, 2))
def test_a_grouped_gemm_needs_a_descriptor_more_than_buffers(ctas, tmp_path):
    file = "blackwell-grouped-gemm_test.py"
    text, count = re.subn(r"NUM_SMEM_BUFFERS \+\s*1\)", "1)", (cases.FOLDER / file).read_text())
    edited = tmp_path / file
    edited.write_text(text)
    kernel = cases.load.__wrapped__(str(edited)).grouped_matmul_tlx_kernel.fn
    launch = blackwell.gemm_grouped(blackwell.PROBLEMS, sms=2 * ctas, ctas=ctas)
    with pytest.raises(tritonemu.Race, match="may still read the one before; wait"):
        tritonemu.run(kernel, launch.grid, *launch.args, arch="sm_100", **launch.kwargs)
    assert count == 3


@pytest.mark.sweep
@pytest.mark.parametrize(
    "arch, build, seconds",
    (
        (
            "sm_90",
            partial(
                hopper.attention, f"{hopper.PIPELINED[0]}.py", hopper.PIPELINED[1], **hopper.LARGE
            ),
            0.5,
        ),
        ("sm_100", partial(blackwell.backward, 1, 512, causal=False, config=0), 1.0),
    ),
    ids=("forward", "backward"),
)  # fmt: skip
def test_one_head_of_512_rows_is_quick(arch, build, seconds):
    times = []
    for _ in range(4):
        launch = build()
        start = time.process_time()
        tritonemu.run(launch.kernel, launch.grid, *launch.args, arch=arch, **launch.kwargs)
        times.append(time.process_time() - start)
    assert min(times) < seconds
