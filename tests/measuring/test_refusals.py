"""What a record of the right structure cannot say, and that no value anywhere in one goes further
than a reason."""

import json
import sys
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdpa_lab.measuring import record, refusals
from gdpa_lab.measuring.workload import STEP
from gdpa_lab.measuring.workloads import WORKLOADS, workload
from gdpa_lab.report import results
from tests import records
from tests.measuring.test_record import a_record, a_row, put
from tests.records import SHORT
from tests.tiers import examples

TURNED = workload("block-rotary-1735537")


def refusal(change=None, of=None) -> str | None:
    """Why the record `of` is refused after `change`, its digest made to fit."""
    data = (of or a_record()).to_dict()
    if change:
        change(data)
    try:
        record.checked({**data, "digest": refusals.digest(data)})
    except ValueError as error:
        return str(error)


def test_a_written_record_has_its_digest(tmp_path):
    made = a_record()
    record.systems.save(record.systems.describe(), tmp_path)
    data = json.loads(record.write(made, tmp_path).read_text())
    assert data["digest"] == refusals.digest(data) == refusals.digest(made.to_dict())
    assert data["digest"] == refusals.digest(dict(reversed(data.items())))


def test_what_a_row_counts():
    kinds = (
        {},
        {"direction": "backward", "scope": "op", "variant": STEP},
        {"direction": "backward", "variant": STEP},
        {"scope": "host"},
        {"scope": "schedule", "error": None},
        {"math": "rotary", "variant": "alone"},
    )
    rows = [records.a_row(TURNED, **{"math": "softmax", **kind}) for kind in kinds]
    both = [TURNED.flops("forward"), TURNED.flops("backward")]
    turned = 3 * 1_735_537 * 3 * 128  # q, k and v
    assert [row.flops for row in rows] == [both[0], sum(both), both[1], 0, 0, 3 * turned]
    assert rows[1].bytes_read == TURNED.bytes_read("forward") + TURNED.bytes_read("backward")
    assert (rows[5].bytes_written, rows[5].bytes_read) == (2 * turned, 2 * (turned + turned // 9))
    made = a_record(rows, workloads={TURNED.name: TURNED.to_dict()})
    assert refusal(of=made) is None
    for i in (3, 4):
        assert f"rows[{i}].flops must be 0" in refusal(put(both[0], "rows", i, "flops"), made)
    assert "rows[5].flops must be" in refusal(put(both[0], "rows", 5, "flops"), made)


def test_a_row_above_the_roofline_of_its_record_is_refused():
    made = a_record()
    row = made.rows[0]
    floor = results.ceilings(made).floor_us(row.flops, row.bytes_read, row.bytes_written)
    # 3 tensors read and one written at the rate of that copy, 4e9 bytes in 930 us
    assert floor == pytest.approx(4 * 1152 * 256 * 4 * 128 * 2 / 4e9 * 930)
    for percent, reason in (
        (104.9, None),
        (105.1, "rows[0].samples_us must be at most 105 % of the roofline that the ceilings"),
        (963, "make, got 963 %"),
    ):
        found = refusal(put([floor * 100 / percent] * 3, "rows", 0, "samples_us"))
        assert found is None if reason is None else reason in found
    slower = put([9300.0], "ceilings", 1, "samples_us")  # of ten times less bandwidth
    assert "of the roofline" in refusal(slower)
    assert refusal(put([floor / 10], "rows", 0, "samples_us"), replace(made, ceilings=())) is None


def paths(value, at=()):
    """Every place in JSON values, as the keys that lead there."""
    if at:
        yield at
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from paths(value[key], (*at, key))


def nested(depth: int) -> list:
    found: list = []
    for _ in range(depth):
        found = [found]
    return found


def test_deep_nesting_is_refused():
    data = a_record().to_dict()
    put(nested(sys.getrecursionlimit()), "rows", 0, "config", "x")(data)
    assert refusals.refusal(data) == "not a record: nested too deeply"


@cache
def example() -> dict:
    real = WORKLOADS["gdpa-self-ml1m-1024"]
    rows = [a_row(), records.a_row(real, impl="v2_tma")]
    workloads = {of.name: of.to_dict() for of in (SHORT, real)}
    return a_record(rows, workloads=workloads).to_dict()


PLACES = st.deferred(lambda: st.sampled_from(list(paths(example()))))
VALUES = (
    None, True, -1, 0, 1, 2**62, 10**400, 0.5, -0.0, 1e12, 1e308, 5e-324, "", "a", "x\n", "../x",
    "\ud800", [], [1, 2], ["a"], {}, {"a": None}, {"kind": "full"}, nested(200),
)  # fmt: skip


@examples(300)
@given(PLACES, st.sampled_from(VALUES))
def test_no_value_goes_further_than_a_reason(path, value):
    data = json.loads(json.dumps(example()))
    put(value, *path)(data)
    data["digest"] = refusals.digest(data)
    try:
        made = record.checked(refusals.parse(json.dumps(data).encode()))
    except ValueError as error:
        assert str(error)
    else:
        results.ceilings(made)
        assert made.to_dict() == {key: value for key, value in data.items() if key != "digest"}
