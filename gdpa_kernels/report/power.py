"""What a GPU reports of its clock and its power while it repeats one kernel."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd
import torch

from gdpa_kernels.measuring import inputs, measure, record, system
from gdpa_kernels.measuring.session import Session
from gdpa_kernels.measuring.workload import Workload

COLUMNS = ("impl", "activation", "sample", "sm_clock_mhz", "power_w", "throttle_reasons")
_CALLS = 100
_SAMPLES = 3
_INTERVAL_S = 0.35


def snapshots(session: Session, workload: Workload, kernels: Sequence[tuple[str, str]]) -> None:
    """Keep the table "power": three snapshots while each (impl, activation) runs `workload` again
    and again on the same inputs. A hundred calls must last longer than the snapshots take."""
    tensors = inputs.make_inputs(workload, device=session.device)
    rows = []
    for impl, activation in kernels:
        work = replace(workload, name=f"power-{activation}", activation=activation)
        made = measure.candidate(impl, replace(tensors, workload=work))
        made.call()
        torch.cuda.synchronize()
        for _ in range(_CALLS):
            made.call()
        for sample in range(_SAMPLES):
            time.sleep(_INTERVAL_S)
            now = system.state(session.device.index)
            reasons = ", ".join(now["throttle_reasons"] or ())
            rows.append((impl, activation, sample, now["sm_clock_mhz"], now["power_w"], reasons))
        torch.cuda.synchronize()
        session.log(f"  {impl} {activation}: clock and power")
        del made
    del tensors
    measure.free()
    session.tables["power"] = record.Table(COLUMNS, rows)


def summary(power: pd.DataFrame) -> pd.DataFrame:
    """By (impl, activation): medians of the clock and of the power, and at how many of the
    snapshots power limited the clock."""
    limited = power["throttle_reasons"].str.contains("power", case=False)
    by = power.assign(limited=limited).groupby(["impl", "activation"], sort=False)
    return pd.DataFrame(
        {
            "SM clock (MHz)": by["sm_clock_mhz"].median(),
            "power (W)": by["power_w"].median(),
            "at the power limit": by["limited"].sum(),
            "snapshots": by["limited"].count(),
        }
    )
