"""Tables of profiled launches for the page."""

from __future__ import annotations

import pandas as pd

from gdpa_lab.measuring.profiling import COUNTERS, STATES

CHAPTER = "measuring/profiles"
"""The chapter whose record holds the profiles."""
STATE_NAMES = {
    "barrier": "barrier or MMA",
    "dispatch_stall": "dispatch",
    "drain": "last stores",
    "gmma": "MMA issue",
    "long_scoreboard": "memory or mbarrier",
    "math_pipe_throttle": "a busy unit",
    "mio_throttle": "queue to shared memory",
    "not_selected": "their turn",
    "short_scoreboard": "shared memory or MUFU",
    "wait": "fixed latency",
}
"""What warps wait for in states whose name, the profiler's, does not say so."""
SHARE = 0.02
"""Share of a call's time below which a kernel is not shown."""
_SUMS = [name for name, counter in COUNTERS.items() if counter.endswith(".sum")]


def kernels(rows: pd.DataFrame) -> pd.DataFrame:
    """Summarize a table "profiles" by kernel: those that take more than `SHARE` of a call's time.

    Launches of a kernel in a call are one row: `launches` counts them, counters that are sums are
    added, the others are means weighted by time. The index names the
    implementation, with the kernel where there are several.
    """
    rows = rows.assign(kernel=rows["kernel"].map(_function), launches=1)
    means = [name for name in (*COUNTERS, *STATES) if name not in _SUMS]
    rows[means] = rows[means].mul(rows["duration_ns"], axis=0)
    sums = rows.groupby(["impl", "kernel"], sort=False)[[*_SUMS, *means, "launches"]].sum()
    sums[means] = sums[means].div(sums["duration_ns"], axis=0)
    of_call = sums.groupby("impl")["duration_ns"].transform("sum")
    sums = sums[sums["duration_ns"] > SHARE * of_call]
    several = sums.groupby("impl").size() > 1
    sums.index = [f"{impl}: {name}" if several[impl] else impl for impl, name in sums.index]
    return sums


def waits(row: pd.Series, most: int = 3) -> str:
    """Format the greatest reasons why warps did not issue, in percent of their time."""
    greatest = row[[*STATES]].drop("selected").astype(float).nlargest(most)
    return ", ".join(
        f"{STATE_NAMES.get(name, name.replace('_', ' '))} {share:.0f}"
        for name, share in greatest.items()
    )


def beside(rows: pd.DataFrame) -> pd.DataFrame:
    """Format `kernels` of a table "profiles" with a row for each counter."""
    lines = {
        name: {
            "time, cold caches (µs)": f"{row['duration_ns'] / 1e3:,.0f}",
            "tensor cores busy (%)": f"{row['tensor_percent']:.0f}",
            "issue slots used (%)": f"{row['issue_percent']:.0f}",
            "warps that could issue, of those there": (
                f"{row['eligible_warps']:.2f} of {row['active_warps']:.1f}"
            ),
            "instructions (millions)": f"{row['instructions'] / 1e6:,.0f}",
            "{term}`MUFU` busy (%)": f"{row['mufu_percent']:.0f}",
            "shared memory busy (%)": f"{row['shared_percent']:.0f}",
            "L2 hits (%)": f"{row['l2_hit_percent']:.0f}",
            "DRAM read + written (GB)": (
                f"{row['dram_read_bytes'] / 1e9:.1f} + {row['dram_write_bytes'] / 1e9:.1f}"
            ),
            "DRAM busy (%)": f"{row['dram_percent']:.0f}",
            "warps {ref}`wait for <profile-counters>` (% of their time)": waits(row),
        }
        for name, row in kernels(rows).iterrows()
    }
    return pd.DataFrame(lines).rename_axis("counter").reset_index()


def _function(kernel: str) -> str:
    """Return the name of a kernel without its namespace, template and arguments."""
    name = kernel.replace("<unnamed>::", "").partition("(")[0].partition("<")[0]
    return name.rpartition("::")[2].split()[-1]
