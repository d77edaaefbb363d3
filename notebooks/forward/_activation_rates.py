"""Measurements of gates, and how the chapter on forward v7 reads them from its record.

`run_all` fills a session: errors of every sequence ("accuracy"), its clocks in registers ("repeat",
"times", "clocks"), and `v6_short_kv` with seven activations on the same inputs, interleaved (rows).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import pandas as pd
import torch

from _lib import activation_sequences as sequences
from gdpa_kernels.gdpa import reference
from gdpa_lab.measuring import measure, operators, record, timing
from gdpa_lab.measuring.inputs import Inputs
from gdpa_lab.measuring.session import Session
from gdpa_lab.measuring.workloads import workload
from gdpa_lab.report.chapter import Chapter

NAMES = list(sequences.BY_NAME)
IN_KERNEL = ("identity", "relu", "gelu_tanh", "silu", "gelu", "hardswish", "gelu_taylor6")
LIMIT = 60.0
"""Errors are kept for abs(x) up to this."""

_FUNCTIONS = {name: known.function for name, known in reference.ACTIVATIONS.items()}


def exact(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function, in fp64, that a sequence stands for."""
    return _FUNCTIONS[sequences.BY_NAME[name].exact]


def computed(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same, but of the published polynomial itself, not GELU, and of LOOP the identity."""
    name = "identity" if name == sequences.LOOP else name
    return _FUNCTIONS.get(name) or exact(name)


def run_all(session: Session) -> None:
    """Everything that the chapter shows, into the tables and rows of `session`."""
    session.tables["accuracy"] = errors(
        torch.linspace(-LIMIT, LIMIT, 2**22 + 1, device=session.device)
    )
    _rates(session)
    for head_dim in (128, 64):
        _kernels(session, head_dim)
        torch.cuda.empty_cache()


def errors(x: torch.Tensor, names: Iterable[str] = NAMES) -> record.Table:
    """`sequences.error_per_x` of each sequence at `x`."""
    rows = [(name, LIMIT, sequences.error_per_x(name, exact(name), x)) for name in names]
    return record.Table(("sequence", "limit", "per_x"), rows)


def _rates(session: Session) -> None:
    repeated = sequences.Repeated.make(session.device, session.system.num_sms, rounds=256)
    calls = {}
    for name in (sequences.LOOP, *NAMES):
        known = sequences.BY_NAME.get(name)
        budget = 1e-5 + 1.5 * ((known.bound or 0.0) if known else 0.0)
        error = repeated.error_per_x(name, computed(name))
        assert error <= budget, f"{name}: {error:.3g} per x, budget {budget:.3g}"
        calls[name] = partial(repeated.run, name)
    session.tables["repeat"] = record.Table(
        ("programs", "warps", "block", "evaluations"),
        [(repeated.x.shape[0], sequences.WARPS, repeated.x.shape[1], repeated.evaluations)],
    )
    times = timing.sample_kernels(calls, session.device, session.protocol)
    session.tabulate("times", ("sequence",), {(name,): taken for name, taken in times.items()})
    rows = []
    for sample in range(10):
        for name, call in calls.items():
            call()
            cycles, sms = repeated.cycles()
            cycles.sort()
            rows.append((name, sample, sms, cycles[0], cycles[len(cycles) // 2], cycles[-1]))
    columns = ("sequence", "sample", "sms", "least", "median", "most")
    session.tables["clocks"] = record.Table(columns, rows)


def _kernels(session: Session, head_dim: int) -> None:
    """`v6_short_kv` on gdpa-self-full-1024 by activation, interleaved on the same inputs."""
    base = replace(workload("gdpa-self-full-1024"), head_dim=head_dim)

    def sample(tensors: Inputs) -> None:
        ready, calls = {}, {}
        for name in IN_KERNEL:
            work = replace(base, name=f"activation-{name}-{head_dim}", activation=name)
            operator = operators.of(replace(tensors, workload=work), "forward")
            tried = measure.attempt("v6_short_kv", operator)
            common = {"impl": "v6_short_kv", "math": "activation", "scope": "kernel"}
            common["error"] = tried.error
            if tried.failure is None:
                common |= {"config": dict(tried.candidate.config), "peak_bytes": tried.peak}
                ready[name], calls[name] = (work, common), tried.candidate.call
            else:
                session.add(work, record.Row.of(work, "forward", **common, failure=tried.failure))
        times = timing.sample_kernels(calls, session.device, session.protocol)
        for name, (work, common) in ready.items():
            session.add(work, record.Row.of(work, "forward", **common, samples_us=times[name]))

    session.launch("kernels", base, ["v6_short_kv"], sample)


def speeds(chapter: Chapter) -> pd.DataFrame:
    """By sequence, from the chapter's record: `clocks` of an SM for one element, `rate` (elements a
    clock), `error` (the largest share of abs(x) up to 60), and `GHz`.

    AssertionError if programs shared an SM, or if the SM's clock and CUDA's events disagree.
    """
    (setup,) = chapter.recorded("repeat").to_dict("records")
    clocks = chapter.recorded("clocks")
    assert (clocks["sms"] > 0.9 * setup["programs"]).all(), "programs shared an SM"
    median = clocks.groupby("sequence", sort=False)["median"].median()
    took = chapter.recorded("times").groupby("sequence")["time_us"].median()
    accuracy = chapter.recorded("accuracy")
    error = accuracy[accuracy["limit"] == LIMIT].set_index("sequence")["per_x"]
    table = pd.DataFrame({"clocks": median / setup["evaluations"], "GHz": median / took / 1e3})
    assert table["GHz"].between(0.5, 2.2).all(), "clock and events disagree"
    return table.assign(rate=1 / table["clocks"], error=error)
