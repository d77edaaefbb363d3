"""What the chapters do to a rung to show what a line of it is for, and to measure it changed."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType

from gdpa_kernels.calling import ladder
from gdpa_kernels.measuring.inputs import Inputs
from gdpa_kernels.measuring.measure import candidate
from gdpa_kernels.measuring.operators import Candidate

OPERATORS = {"forward": "gdpa", "backward": "gdpa_backward"}


@cache
def _folder() -> tempfile.TemporaryDirectory:
    """Where changed sources lie until the process ends: Triton reads them when it compiles."""
    return tempfile.TemporaryDirectory()


def changed(module: ModuleType, *changes: tuple[str, str]) -> ModuleType:
    """A copy of `module`, pieces of its source replaced: (old, new), one after the other.

    Raises ValueError unless each `old` occurs once.
    """
    text = Path(module.__file__).read_text(encoding="utf-8")
    for old, new in changes:
        if text.count(old) != 1:
            raise ValueError(f"old must occur once in {module.__name__}, got {old!r}")
        text = text.replace(old, new)
    path = Path(tempfile.mkdtemp(dir=_folder().name)) / Path(module.__file__).name
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"changed_{path.parent.name}", path)
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


def with_module(
    impl: str,
    inputs: Inputs,
    *,
    module: ModuleType | None = None,
    direction: str = "forward",
    **options: object,
) -> Candidate:
    """As `measure.candidate`, of GDPA; `module`, a changed one, stands in for the rung's own.

    Put in place of `measure.candidate` it lets a notebook measure (impl, variant, {"module": ..,
    "config": ..}). A schedule is made by `module` too, outside what is timed. Raises ValueError for
    a module without a config.
    """
    made = candidate(impl, inputs, direction=direction, **options)
    if module is None:
        return made
    if options.get("config") is None:
        raise ValueError(f"config must be given with a module, got none for {impl}")
    batch, config = inputs.batch(), options["config"]
    given = {"config": config}
    if "schedule" in ladder.rung(impl, OPERATORS[direction]).has:
        given["schedule"] = module.make_schedule(batch, config)
    if direction == "forward":
        made.call = lambda: module.forward(batch, **given)
    else:
        made.call = lambda: module.backward(inputs.grad_out, batch, **given)
    return made
