"""One hash for what runs the same, another for what does not; and a launch compiled again."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.gdpa.kernels import v1_tiled, v1_tiled_backward, v8_own_waits
from gdpa_kernels.gdpa.ladder import v2_fused_backward
from gdpa_lab.measuring import compile_check, machine_code, measure, record
from gdpa_lab.measuring.inputs import make_inputs
from gdpa_lab.measuring.workloads import workload
from tests.calls import pretended
from tests.tiers import swept

SMALL = replace(workload("gdpa-self-full-256"), batch=2, max_seqlen_q=64, max_seqlen_k=64)

TEXT = """import triton
import triton.language as tl


@triton.jit
def scaled(x, FACTOR: tl.constexpr):
    return x * FACTOR + 1.0


@triton.jit
def a_kernel(x_ptr, FACTOR: tl.constexpr):
    at = x_ptr + tl.arange(0, 256)
    tl.store(at, scaled(tl.load(at), FACTOR))
"""
MORE = """

@triton.jit
def b_kernel(x_ptr):
    tl.store(x_ptr, 0.0)
"""
SAME = {
    "a comment": ("    at = ", "    # of this program\n    at = "),
    "lines before": ("import triton\n", "import triton\n\n\n\n"),
    "the kernel's name": ("a_kernel", "another_kernel"),
    "a helper's name": ("scaled", "times_factor"),
    "a variable's name": ("at", "where"),
    "a kernel more": ("\n\n@triton.jit\ndef a_", f"{MORE}\n\n@triton.jit\ndef a_"),
}  # fmt: skip
OTHER = {
    "a constant": ("1.0", "1.5"),
    "an operation": ("x * FACTOR +", "x * FACTOR -"),
    "the order": ("x * FACTOR + 1.0", "(x + 1.0) * FACTOR"),
    "a size": ("256", "512"),
}


def code_of(folder, text: str = TEXT) -> str:
    """The hash of the last kernel of `text`, a file in `folder`."""
    folder.mkdir(exist_ok=True)
    path = folder / "kernels.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"kernels_{folder.name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel = [x for name, x in vars(module).items() if name.endswith("_kernel")][-1]
    made = compile_check.build(
        kernel, {"x_ptr": "*fp32"}, {"FACTOR": 3.0}, options={"num_warps": 4}
    )
    return machine_code.digest(made.asm["cubin"])


@pytest.mark.parametrize("name", SAME | OTHER)
def test_a_hash_is_of_what_runs(tmp_path, name):
    old, new = (SAME | OTHER)[name]
    changed = re.sub(rf"\b{re.escape(old)}" if old.isidentifier() else re.escape(old), new, TEXT)
    assert changed != TEXT
    assert (code_of(tmp_path / "b", changed) == code_of(tmp_path / "a")) is (name in SAME)


@pytest.fixture
def gpu():
    """Triton compiles what it is told to run for an H200."""
    with pretended(90):
        yield


def launched(call) -> list[dict]:
    """Describe the launches of `call` as a record keeps and returns them."""
    with launches(run=False) as seen:
        call()
    return json.loads(json.dumps([machine_code.describe(launch) for launch in seen]))


def code_again(launch: dict) -> str:
    return machine_code.digest(machine_code.compile_again(launch).asm["cubin"])


def backward(module):
    inputs = make_inputs(SMALL, device="cpu")
    return lambda: module.backward(inputs.grad_out, inputs.batch())


CALLS = {
    "numbers and strides": lambda: v1_tiled.forward(make_inputs(SMALL, device="cpu").batch()),
    "descriptors and roles": lambda: v8_own_waits.forward(make_inputs(SMALL, device="cpu").batch()),
    "two kernels": backward(v2_fused_backward),
}


@pytest.mark.parametrize("name", swept(CALLS, ("numbers and strides",)))
def test_a_launch_compiles_again_to_its_code(gpu, name):
    for launch in launched(CALLS[name]):
        assert code_again(launch) == launch["code"]


def test_what_a_kernel_no_longer_specializes_is_no_part_of_its_code(gpu, monkeypatch):
    seeds = replace(SMALL, shared_q=True, lengths_k=SMALL.lengths_q)
    inputs = make_inputs(seeds, device="cpu")
    kept = launched(lambda: v1_tiled_backward.backward(inputs.grad_out, inputs.batch()))[-1]
    then = kept | {"attributes": kept["attributes"] | {"max_seqlen_q": [["tt.divisibility", 16]]}}
    one = {"constants": kept["constants"] | {"max_seqlen_q": 1},
           "signature": kept["signature"] | {"max_seqlen_q": "constexpr"}}  # fmt: skip
    assert code_again(then) == code_again(kept | one) == kept["code"]
    marked = next(p for p in v1_tiled_backward.queries_kernel.params if p.name == "max_seqlen_q")
    monkeypatch.setitem(marked.__dict__, "do_not_specialize", False)
    assert code_again(then) != kept["code"], "here it matters"


def test_what_a_launch_knows_of_its_numbers_counts(gpu):
    with launches(run=False) as seen:
        backward(v2_fused_backward)()
    kept = machine_code.describe(seen[-1])
    assert kept["kernel"] == "gdpa_kernels.gdpa.device.gradients:round_kernel"
    unknown = compile_check.build_launch(seen[-1])
    assert machine_code.digest(unknown.asm["cubin"]) != kept["code"]
    assert code_again({**kept, "attributes": {}}) != kept["code"]


def test_another_kernel_than_that_of_the_launch_is_refused(gpu):
    (launch,) = launched(CALLS["numbers and strides"])
    module, name = launch["kernel"].split(":")
    for kernel in (f"{module}:no_kernel", f"no_module:{name}"):
        with pytest.raises(LookupError, match=f"kernel must be of this package, got {kernel}"):
            machine_code.compile_again({**launch, "kernel": kernel})
    signature = {**launch["signature"], "more": "i32"}
    with pytest.raises(ValueError, match=rf"{name} must take .*'more'\], got "):
        machine_code.compile_again({**launch, "signature": signature})


def test_a_constant_that_a_kernel_no_longer_takes_is_left_out(gpu):
    (launch,) = launched(CALLS["numbers and strides"])
    signature = {**launch["signature"], "GONE": "constexpr"}
    older = {**launch, "signature": signature, "constants": {**launch["constants"], "GONE": 1}}
    assert code_again(older) == launch["code"]


def test_an_argument_that_a_kernel_takes_since_then_has_its_default(gpu):
    (launch,) = launched(CALLS["numbers and strides"])
    older = {**launch, **{x: dict(launch[x]) for x in ("signature", "constants")}}
    for values in (older["signature"], older["constants"]):
        del values["add_ptr"], values["LOWER_RIGHT"]
    assert code_again(older) == launch["code"]


def test_a_row_keeps_what_is_launched_while_it_is_timed(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    with launches(run=False):
        found = measure.launched(CALLS["two kernels"], SimpleNamespace(type="cuda"))
    assert [launch["kernel"].split(":")[1] for launch in found] == ["fused_kernel", "round_kernel"]
    assert measure.launched(CALLS["two kernels"], torch.device("cpu")) is None


def test_every_constant_of_a_rung_can_be_kept():
    inputs = make_inputs(SMALL, device="cpu")
    batch = inputs.batch()
    with launches(run=False) as seen:
        for impl in ladder.impls()[1:]:
            ladder.rung(impl).module().forward(batch)
        for impl in ladder.impls(direction="backward")[1:]:
            ladder.rung(impl).module().backward(inputs.grad_out, batch)
    assert len({launch.kernel for launch in seen}) > 20
    for launch in seen:
        for name, value in launch.constants.items():
            assert isinstance(value, bool | int | float | str | tuple | None), (launch.name, name)


PROGRAM = """import json, sys
import torch
from gdpa_lab.measuring import machine_code
arguments = machine_code._arguments
more = int(sys.argv[1])
machine_code._arguments = lambda *asked: (torch.ones(more), arguments(*asked))[1]
answers = [machine_code.answer(each) for each in json.load(sys.stdin)]
json.dump(answers, sys.stdout)
"""


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("impl", "scope"),
    [("v0_eager", "kernel"), ("v1_tiled", "kernel"), ("v3_persistent", "schedule")],
)
def test_the_process_its_hash_seed_and_what_makes_arguments_do_not_count(tmp_path, impl, scope):
    """Nor what the process was asked before."""
    plain = {name: value for name, value in SMALL.to_dict().items() if name != "name"}
    asked = {
        "operator": "gdpa", "impl": impl, "direction": "forward", "scope": scope,
        "config": {}, "workload": plain, "arch": 90,
    }  # fmt: skip
    found = set()
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "TRITON_CACHE_DIR": str(tmp_path / seed)}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, seed], input=json.dumps([asked] * int(seed)),
            capture_output=True, text=True, check=True, cwd=record.ROOT,
            env=os.environ | environment,
        )  # fmt: skip
        found |= {*json.loads(done.stdout)}
    assert len(found) == 1 and machine_code.is_code(*found)
