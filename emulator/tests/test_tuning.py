"""Autotuning runs a kernel many times on the same memory: what a second run changes is noted."""

import pytest
import torch
import triton
import triton.language as tl

from tritonemu import enabled

CONFIGS = [triton.Config({"B": size}) for size in (16, 32)]


def zero_out(arguments):
    arguments["out"].zero_()


@triton.jit
def update_kernel(x, out, n, B: tl.constexpr, KIND: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    value = tl.load(x + i, mask=i < n, other=0.0)
    if KIND == "atomic":
        tl.atomic_add(out + i % 4, value, mask=i < n)
    elif KIND == "lock":
        while tl.atomic_cas(out + n, 0, 1) == 1:
            pass
        tl.store(out + i, value, mask=i < n)
    elif KIND == "maximum":
        tl.atomic_max(out + i % 4, value, mask=i < n)
    elif KIND == "twice":
        tl.store(x + i, value * 2, mask=i < n)
    elif KIND == "relu":
        tl.store(x + i, tl.maximum(value, 0.0), mask=i < n)
    else:
        tl.store(out + i, value, mask=i < n)


def notes(kind, configs=CONFIGS, dtype=torch.float32, schedule="modelled", **options):
    kernel = triton.autotune(configs, key=["n"], **options)(update_kernel)
    x, out = torch.arange(-8.0, 8.0).to(dtype), torch.zeros(32, dtype=dtype)
    original = x.clone()
    with enabled(schedule=schedule) as reports:
        for _ in range(2):
            kernel[lambda meta: (triton.cdiv(16, meta["B"]),)](x, out, 16, KIND=kind)
            if kind == "lock":
                out.zero_()
    expected = {"twice": 4 * original, "relu": original.clamp(min=0)}
    assert torch.equal(x, expected.get(kind, original))
    if kind == "atomic":
        assert torch.equal(out[:4], 2 * original.view(4, 4).sum(0))
    assert all(not report.notes for report in reports[1:])
    return reports[0].notes


@pytest.mark.parametrize("kind, what", [("atomic", "out"), ("twice", "x")])
def test_what_a_second_run_changes(kind, what):
    (note,) = notes(kind)
    assert "for 2 configurations, before it runs as asked, and a run after another one" in note
    assert f"leaves something else in {what}: reset_to_zero or restore_value" in note


def test_a_second_run_that_ends_otherwise():
    (note,) = notes("lock", CONFIGS[:1] * 2, torch.int32)
    assert "a run after another one ends with Deadlock" in note


@pytest.mark.parametrize("kind", ["plain", "relu", "maximum"])
def test_what_a_second_run_leaves(kind):
    assert not notes(kind)


def test_what_is_reset_or_restored():
    assert not notes("atomic", restore_value=["out"])
    assert not notes("twice", restore_value=["x"])
    assert not notes("lock", CONFIGS[:1] * 2, torch.int32, restore_value=["out"])


@triton.jit
def add_kernel(out, B: tl.constexpr):
    tl.store(out + tl.arange(0, B), tl.load(out + tl.arange(0, B)) + 1)


def zero_hook(arguments, reset_only=False):
    arguments["out"].zero_()


ZEROED = [triton.Config({"B": size}, pre_hook=zero_out) for size in (16, 32)]


@pytest.mark.parametrize(
    "options, first, second",
    (
        ({"reset_to_zero": ["out"]}, 1, 2),
        ({"pre_hook": zero_hook}, 1, 2),
        ({"restore_value": ["out"]}, 6, 7),
        ({"reset_to_zero": ["out"], "restore_value": ["out"]}, 1, 2),
        ({"reset_to_zero": ["out"], "configs": CONFIGS[:1]}, 6, 7),
        ({"configs": ZEROED}, 1, 1),
    ),
)
def test_what_the_first_call_leaves(options, first, second):
    """Triton resets once more between the last run that is timed and the one that was asked for."""
    kernel, out = triton.autotune(**{"configs": CONFIGS, "key": [], **options})(add_kernel), []
    for every in (False, True):
        with enabled(all_configs=every) as reports:
            x = torch.full((32,), 5.0)
            for _ in range(2):
                kernel[(1,)](x)
                out.append(x[0].item())
        assert not any(report.notes for report in reports)
    assert out == [first, second] * 2


def test_when_nobody_tunes():
    assert not notes("atomic", CONFIGS[:1])
    assert not notes("atomic", schedule=3)
