"""FlashAttention-4 behind the baselines' signature, with its library replaced by one that notes
how it was called."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from gdpa_kernels.measuring import baselines, operators
from gdpa_kernels.measuring.inputs import make_inputs
from gdpa_kernels.measuring.laws import Full, Uniform
from gdpa_kernels.measuring.workload import Workload

WORK = Workload(
    name="small", batch=3, num_heads_q=2, num_heads_k=2, head_dim=16, max_seqlen_q=8,
    max_seqlen_k=4, lengths_q=Full(), lengths_k=Full(),
)  # fmt: skip


@pytest.fixture
def library(monkeypatch):
    """A stand-in for flash_attn.cute: softmax on dense tensors, and the threshold of its search at
    each ragged call."""
    cute, interface = ModuleType("flash_attn.cute"), ModuleType("flash_attn.cute.interface")
    interface.BIN_BATCH_SEARCH_THRESH = 256
    interface.seen = []

    def varlen(q, k, v, **_):
        interface.seen.append(interface.BIN_BATCH_SEARCH_THRESH)
        return q, None

    def dense(q, k, v, softmax_scale):
        assert q.shape == (3, 8, 2, 16) and k.shape == v.shape == (3, 4, 2, 16)
        p = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) * softmax_scale, -1)
        return torch.einsum("bhqk,bkhd->bqhd", p, v).contiguous(), None

    cute.flash_attn_varlen_func, cute.flash_attn_func = varlen, dense
    cute.interface = interface
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    monkeypatch.setattr(operators, "_peer", lambda baseline: None)
    return interface


def test_scan_lifts_the_threshold_of_the_lookup_during_its_calls_alone(library):
    operator = operators.of(make_inputs(WORK, device="cpu"), "forward")
    looked_up = operator.candidate("fa4", "")
    scanning = operator.candidate("fa4", "scan", scan=True)
    assert (scanning.variant, scanning.config) == ("scan", {"scan": True})
    for made in (looked_up, scanning, looked_up):
        made.call()
    assert library.seen == [256, math.inf, 256] and library.BIN_BATCH_SEARCH_THRESH == 256


def test_scan_says_so_if_the_library_has_no_such_threshold(library):
    del library.BIN_BATCH_SEARCH_THRESH
    call = baselines.BASELINES["fa4"].prepare(make_inputs(WORK, device="cpu"), scan=True)
    with pytest.raises(AttributeError, match="BIN_BATCH_SEARCH_THRESH"):
        call()


def test_dense_gives_the_rows_back_in_their_order(library):
    inputs = make_inputs(replace(WORK, dtype="float32"), device="cpu")
    out = baselines.BASELINES["fa4_dense"].prepare(inputs)()
    right = baselines.softmax_reference(inputs, torch.float64)
    torch.testing.assert_close(out.double(), right, atol=1e-5, rtol=1e-5)


def test_dense_refuses_a_jagged_batch(library):
    inputs = make_inputs(replace(WORK, lengths_q=Uniform(0.5)), device="cpu")
    with pytest.raises(baselines.Unsupported, match="sequences of one length, got a jagged batch"):
        baselines.BASELINES["fa4_dense"].prepare(inputs)
