"""A module with pieces of its source replaced, and such a module measured in a rung's place."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from gdpa_kernels import emulator
from gdpa_kernels.gdpa import v1_tiled, v4_warp_specialized_backward, v5_short_kv_backward
from gdpa_kernels.measuring import measure, timing
from gdpa_kernels.measuring.inputs import make_inputs
from gdpa_kernels.measuring.workload import workload
from gdpa_kernels.report import house, studies

SMALL = replace(
    workload("gdpa-self-half-jagged-256"), name="small", batch=2, max_seqlen_q=9, max_seqlen_k=9
)


def test_every_change_is_made_and_the_module_stays_as_it_is():
    text = house.__doc__
    made = studies.changed(house, (f'"""{text}"""', '"""One."""'), ('"""One."""', '"""Two."""'))
    assert made.__doc__ == "Two." and house.__doc__ == text


@pytest.mark.parametrize("old", ("no such line of it", "\n"))
def test_what_does_not_occur_once_is_refused(old):
    with pytest.raises(ValueError, match="old must occur once in gdpa_kernels.report.house, got"):
        studies.changed(house, (old, "new"))


def test_a_changed_module_is_checked_and_timed_like_the_rung(monkeypatch):
    """As the notebooks do it, in place of `measure.candidate`."""
    timed = []

    def sample(functions, device, protocol):
        timed.extend(functions)
        return dict.fromkeys(functions, [1.0])

    monkeypatch.setattr(measure, "candidate", studies.with_module)
    monkeypatch.setattr(measure, "run_once", lambda ready: (ready.call(), 0))
    monkeypatch.setattr(timing, "sample_kernels", sample)
    config = v1_tiled.Config(BLOCK_M=16, BLOCK_N=16)
    same = studies.changed(v1_tiled)
    wrong = studies.changed(v1_tiled, ("return out", "return -out"))
    listed = [
        ("v1_tiled", "as it is", {"config": config}),
        ("v1_tiled", "a copy", {"config": config, "module": same}),
        ("v1_tiled", "wrong", {"config": config, "module": wrong}),
    ]
    with emulator.enabled():
        rows = measure.measure(SMALL, listed, device=torch.device("cpu"), log=lambda text: None)
    right = [row for row in rows if row.failure is None]
    assert [row.variant for row in right] == ["as it is", "a copy"]
    assert all(row.config == asdict(config) for row in right)
    assert timed == ["v1_tiled as it is", "v1_tiled a copy"]


@pytest.mark.parametrize(
    "rung, maker, asked",
    (
        (
            v4_warp_specialized_backward,
            "make_schedule",
            ("k", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        ),
        (v5_short_kv_backward, "order_of", ("cu_seqlens_q",)),
    ),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_changed_backward_gets_a_schedule_of_its_own(rung, maker, asked):
    made_for = []
    module = SimpleNamespace(
        backward=lambda *given, **options: (given, options),
        **{maker: lambda *given: made_for.append(given) or "its own"},
    )
    inputs, config = make_inputs(SMALL, device="cpu"), rung.Config()
    impl, options = rung.__name__.split(".")[-1], {"direction": "backward", "config": config}
    with emulator.enabled():
        made = studies.with_module(impl, inputs, module=module, variant="changed", **options)
    (grad_out,), arguments = made.call()
    assert (made.impl, made.variant, made.config) == (impl, "changed", asdict(config))
    assert grad_out is inputs.grad_out
    assert arguments == inputs.rung_arguments() | {"config": config, "schedule": "its own"}
    (given,) = made_for
    assert all(a is getattr(inputs, name) for a, name in zip(given, asked, strict=True))


def test_a_module_without_a_config_is_refused():
    inputs = make_inputs(SMALL, device="cpu")
    with pytest.raises(ValueError, match="config must be given with a module, got none for v1"):
        studies.with_module("v1_tiled", inputs, module=v1_tiled)
