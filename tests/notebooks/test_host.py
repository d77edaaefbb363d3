"""Measurements of the host's time of calls: every call is new, and the parts make the whole."""

from dataclasses import replace

import torch

from gdpa_kernels import gdpa
from gdpa_lab.measuring.inputs import make_inputs
from gdpa_lab.measuring.workloads import workload
from notebooks.training import _host

SMALL = replace(
    workload("gdpa-self-half-jagged-256"), name="small", batch=40, num_heads_q=1, num_heads_k=1,
    head_dim=16, max_seqlen_q=16, max_seqlen_k=16,
)  # fmt: skip


def test_every_batch_has_other_offsets():
    inputs = make_inputs(SMALL, device=torch.device("cpu"))
    ends = [call["cu_seqlens_k"] for call in _host.batches(inputs, 30)]
    assert len({tuple(x.tolist()) for x in ends}) == len(ends) == 29
    for call in _host.batches(inputs, 5):
        assert call["cu_seqlens_q"][-1] == len(call["q"]) and not call["validate"]
        assert torch.equal(gdpa(**call), gdpa(**call | {"validate": True})), "right offsets"


def test_rows_of_every_call(monkeypatch):
    monkeypatch.setattr(
        _host, "batches", lambda inputs, count=0, all=_host.batches: all(inputs, 50)
    )
    rows = _host.rows(SMALL, "cpu", in_a_row=5, rounds=2)
    named = {(call, what) for _, call, what, *_ in rows}
    ways = {f"{a}, {b}" for a in (_host.FORWARD, _host.STEP) for b in (_host.NEW, _host.SHARED)}
    assert named == {(c, w) for c in ("gdpa", "exp") for w in (*ways, *_host.PARTS)} | {
        ("Python", "a loop")
    }
    assert all(0 < p20 <= median <= p80 for *_, median, p20, p80 in rows)


def test_the_parts_of_a_backward_are_its_time():
    inputs = make_inputs(SMALL, device=torch.device("cpu"))
    parts = _host.parts(lambda q, **_: q.exp(), inputs, 20)
    assert set(parts) == set(_host.PARTS) and {len(times) for times in parts.values()} == {18}
