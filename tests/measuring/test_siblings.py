"""Records beside the others of their system: what one record alone cannot tell."""

from dataclasses import replace

import numpy as np
import pytest

from gdpa_lab.measuring import record, siblings

NEWEST = "20261128T050638Z-forward-results-nvidia-h200-62ac9e84"
H100 = "20261128T081132Z-forward-results-nvidia-h100-80gb-hbm3-e05d55f3"
V7, V8 = "v7_packed", "v8_own_waits"


@pytest.fixture(scope="module")
def runs():
    return record.load_all()


def with_a(run, runs):
    """The reasons against one more record."""
    later = replace(run, id=f"20991128T150000Z{run.id[16:]}")
    return [text for other, text in siblings.problems([*runs, later]) if other is later]


def of(runs, name):
    (run,) = (run for run in runs if run.id == name)
    return run


def rows(run, change):
    return replace(run, rows=tuple(change(row) for row in run.rows))


def test_the_records_agree(runs):
    assert not [*siblings.problems(runs)]
    assert not with_a(of(runs, NEWEST), runs)


def test_a_record_of_another_machine_is_found(runs):
    other = replace(of(runs, H100), system=of(runs, NEWEST).system)
    assert "the copy of scope 'kernel' must be within 5 %" in with_a(other, runs)[0]


@pytest.mark.parametrize("share", (0.92, 1.08))
def test_slower_or_faster_ceilings_are_found(runs, share):
    def scaled(ceiling):
        return replace(ceiling, samples_us=tuple(share * us for us in ceiling.samples_us))

    run = of(runs, NEWEST)
    found = with_a(replace(run, ceilings=tuple(map(scaled, run.ceilings))), runs)
    assert any(f"got {1 / share:.2f} times their median" in text for text in found)


def test_kernels_under_another_name_are_found(runs):
    names = {V7: V8, V8: V7}
    swapped = rows(of(runs, NEWEST), lambda row: replace(row, impl=names.get(row.impl, row.impl)))
    found = with_a(swapped, runs)
    assert any(f"must be kernels of {V8}, got those of {V7}" in text for text in found)
    assert any(f"must be kernels of {V7}, got those of {V8}" in text for text in found)


def test_an_unknown_implementation_is_found(runs):
    run = of(runs, NEWEST)
    peer = next(row for row in run.rows if row.impl == "fa3")
    invented = replace(run, rows=(*run.rows, replace(peer, impl="fa5")))
    assert with_a(invented, runs) == [
        f"rows[{len(run.rows)}].impl must be an implementation or a baseline, got 'fa5'"
    ]


def test_dropped_samples_are_found(runs):
    """The faster half of those of one kernel."""

    def halved(row):
        if row.scope != "sustained" or row.impl != V8 or len(row.samples_us) < 20:
            return row
        return replace(row, samples_us=tuple(np.sort(row.samples_us)[: len(row.samples_us) // 2]))

    found = with_a(rows(of(runs, NEWEST), halved), runs)
    assert found and all("must take as long as those of its workload" in text for text in found)


def test_a_data_folder_with_such_a_record_is_refused(runs, monkeypatch):
    run = of(runs, NEWEST)
    monkeypatch.setattr(siblings, "problems", lambda _: iter([(run, "it differs")]))
    with pytest.raises(record.RecordError, match=f"{NEWEST}.json: it differs"):
        record.load_all()
