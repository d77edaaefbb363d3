"""Clock and power by kernel, read from the table of a record."""

import pandas as pd

from gdpa_kernels.report import power


def test_summary_takes_medians_and_counts_limits():
    rows = [
        ("a", "relu", 0, 1500.0, 600.0, "sw_power_cap"),
        ("a", "relu", 1, 1700.0, 640.0, ""),
        ("a", "relu", 2, 1600.0, 610.0, "hw_slowdown, sw_power_cap"),
        ("b", "relu", 0, 1400.0, 690.0, "gpu_idle"),
    ]
    found = power.summary(pd.DataFrame(rows, columns=list(power.COLUMNS)))
    assert list(found.loc[("a", "relu")]) == [1600.0, 610.0, 2, 3]
    assert list(found.loc[("b", "relu")]) == [1400.0, 690.0, 0, 1]
