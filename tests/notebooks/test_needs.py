"""Requirements that the page on reproducing states of a reader's GPU."""

import re
from types import SimpleNamespace

from gdpa_kernels.calling import ladder
from notebooks.measuring import _needs


def test_every_rung_says_what_it_needs():
    text = _needs.support()
    assert text.count("<code>") == len(ladder.impls()) - 1  # all but the reference
    assert text.count("<td>sm_100</td>") == len(ladder.BLACKWELL_RUNGS)
    assert {"any", "sm_80 or newer", "sm_90"} <= set(re.findall("<td>(.*?)</td>", text))


def test_peaks_and_the_heaviest_are_those_of_the_record():
    def row(workload, **changes):
        values = {"impl": "v1_tiled", "scope": "kernel", "variant": "", "samples_us": (1.0,)}
        return SimpleNamespace(workload=workload, **({"peak_bytes": 7} | values | changes))

    small, large = "gdpa-self-full-256", "gdpa-self-full-1024"
    longest = [
        row("gdpa-self-full-2048", impl=i) for i in ("v0_eager", "torch_compile", "v1_tiled")
    ]
    longest.append(row("gdpa-self-full-2048", scope="op", peak_bytes=9))
    found = _needs.gigabytes(SimpleNamespace(rows=longest), [SimpleNamespace(rows=longest)])
    assert found["rung_peak_gb"] == found["v0_peak_gb"] == 7e-9
    assert found["v0_total_gb"] == found["compile_total_gb"] > found["inputs_gb"]
    run = SimpleNamespace(rows=[row(small), row(large, scope="op"), row("unknown")])
    assert _needs.heaviest([run]) == large
