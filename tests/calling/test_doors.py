"""Bad inputs at every door: a mistake has one kind of error, which names the argument."""

import re
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

import tritonemu
from gdpa_kernels import (
    PFFN,
    PMA,
    BlockAttention,
    GDPASelfAttention,
    Lengths,
    block_attention,
    gdpa,
    jagged,
)
from gdpa_kernels.serving import HistoryRules, PagedCache, score

TOTAL = 9
ENDS = torch.tensor([0, 4, TOTAL], dtype=torch.int32)
QKV = [torch.randn(TOTAL, 2, 16, generator=torch.Generator().manual_seed(i)) for i in range(3)]
X = torch.randn(TOTAL, 32, generator=torch.Generator().manual_seed(3))


def scored(offsets, max_seqlen=5, **options):
    cache = PagedCache(HistoryRules(1), 4, 4, 2, 16, dtype=torch.float32)
    return score(
        *QKV, offsets, max_seqlen, cache, 0, cache.pages([1, 2], missing="empty"), **options
    )


def compiled(offsets, max_seqlen=5, **options):
    torch._dynamo.reset()
    call = torch.compile(gdpa, backend="aot_eager")
    return call(*QKV, offsets, offsets, max_seqlen, max_seqlen, **options)


OFFSETS: dict[str, Callable] = {
    "gdpa": lambda offsets, m=5: gdpa(*QKV, offsets, offsets, m, m),
    "gdpa, keys": lambda offsets, m=5: gdpa(*QKV, ENDS, offsets, 5, m),
    "shared q": lambda offsets, m=5: gdpa(QKV[0], *QKV[1:], None, offsets, None, m),
    "compiled": compiled,
    "block_attention": lambda offsets, m=None: block_attention(*QKV, offsets),
    "GDPASelfAttention": lambda offsets, m=5: GDPASelfAttention(32, 2)((X, offsets), m),
    "PMA": lambda offsets, m=5: PMA(32, 2, 3)((X, offsets), m),
    "PFFN": lambda offsets, m=5: PFFN(32, 2, 8, 3)((X, offsets), torch.randn(2, 8), m),
    "BlockAttention": lambda offsets, m=None: BlockAttention(32, 2)((X, offsets)),
    "Lengths": lambda offsets, m=5: Lengths(offsets, m),
    "to_padded_tensor": lambda offsets, m=5: jagged.to_padded_tensor((X, offsets), 0.0, m),
    "mean": lambda offsets, m=None: jagged.mean((X, offsets)),
    "append": lambda offsets, m=None: jagged.append((X, offsets), torch.randn(2, 1, 32)),
    "score": scored,
}
INT32 = torch.int32
BAD_OFFSETS = {
    "a list": ([0, 4, TOTAL], TypeError),
    "an array": (np.array([0, 4, TOTAL], dtype=np.int32), TypeError),
    "floats": (ENDS.float(), TypeError),
    "bools": (ENDS.bool(), TypeError),
    "16 bits": (ENDS.short(), TypeError),
    "two dimensions": (ENDS[None], ValueError),
    "a number": (ENDS[0], ValueError),
    "nothing": (ENDS[:0], ValueError),
    "another device": (ENDS.to("meta"), ValueError),
    "a start behind 0": (torch.tensor([1, 4, TOTAL], dtype=INT32), ValueError),
    "a negative start": (torch.tensor([-1, 4, TOTAL], dtype=INT32), ValueError),
    "a fall": (torch.tensor([0, 10, TOTAL], dtype=INT32), ValueError),
    "an end beyond": (torch.tensor([0, 4, TOTAL + 1], dtype=INT32), ValueError),
    "64 bits that 32 do not hold": (torch.tensor([0, 4, 2**32 + TOTAL]), ValueError),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD_OFFSETS)
@pytest.mark.parametrize("door", OFFSETS)
def test_wrong_offsets(door, bad):
    offsets, error = BAD_OFFSETS[bad]
    if door == "Lengths" and bad == "an end beyond":
        pytest.skip("Lengths have no tensor beside them")
    with pytest.raises(error) as caught:
        OFFSETS[door](offsets)
    assert caught.type is error
    assert re.search("offsets|cu_seqlens", str(caught.value)), caught.value
    assert "got" in str(caught.value)


BAD_LENGTHS = {
    "a float": (5.0, TypeError), "a string": ("5", TypeError), "a bool": (True, TypeError),
    "a negative one": (-1, ValueError), "too short a one": (3, ValueError),
    "more than 32 bits": (2**31, ValueError), "more than 64 bits": (2**63, ValueError),
}  # fmt: skip
OF_LENGTH = [door for door, call in OFFSETS.items() if call.__defaults__ != (None,)]


@pytest.mark.parametrize("bad", BAD_LENGTHS)
@pytest.mark.parametrize("door", OF_LENGTH)
def test_wrong_max_seqlen(door, bad):
    value, error = BAD_LENGTHS[bad]
    if door == "compiled" and bad.startswith("more"):
        pytest.skip("of symbolic integers that is not asked")
    with pytest.raises(error, match="max_seqlen.* got") as caught:
        OFFSETS[door](ENDS, value)
    assert caught.type is error


BAD_OPTIONS = [
    ("window", 1.5, TypeError), ("window", "3", TypeError), ("window", True, TypeError),
    ("window", -1, ValueError), ("scale", "1", TypeError), ("scale", True, TypeError),
    ("scale", float("nan"), ValueError), ("output_scale", None, TypeError),
    ("activation", 3, TypeError), ("activation", "softmax", ValueError),
    ("activation", ("relu",) * 3, ValueError), ("causal", 1, TypeError),
    ("causal", "lower", ValueError), ("precise", 1, TypeError), ("validate", "no", TypeError),
    ("impl", 3, TypeError), ("impl", "v9", ValueError), ("backward_impl", b"v1", TypeError),
    ("backward_impl", "v9", ValueError), ("full_rows", 0.5, TypeError),
    ("full_rows", -1, ValueError),
    ("target_group_size", "2", TypeError), ("target_group_size", 0, ValueError),
    ("target_ranks", 2, TypeError), ("target_ranks", "mine", ValueError),
]  # fmt: skip
OPTIONS: dict[str, Callable] = {
    "gdpa": partial(gdpa, *QKV, ENDS, ENDS, 5, 5),
    "GDPASelfAttention": partial(GDPASelfAttention, 32, 2),
}


@pytest.mark.parametrize("name, value, error", BAD_OPTIONS, ids=str)
@pytest.mark.parametrize("door", OPTIONS)
def test_wrong_options(door, name, value, error):
    with pytest.raises(error, match=name) as caught:
        OPTIONS[door](**{name: value})
    assert caught.type is error


@pytest.mark.parametrize("name, value", [
    ("window", 2**63), ("window", 2**31), ("window", np.int64(3)), ("target_group_size", 2**63),
    ("target_group_size", 2**31 - 1), ("full_rows", 2**63), ("num_contexts", 2**40),
    ("num_contexts", np.int32(2)), ("scale", np.float32(0.5)), ("full_rows", np.int8(1)),
])  # fmt: skip
@pytest.mark.parametrize("impl", ("reference", "v1_tiled"))
def test_integers_of_any_size_and_kind(name, value, impl):
    """What is beyond every sequence is as what is just beyond; NumPy's numbers are numbers."""
    like = value.item() if isinstance(value, np.generic) else 2**20
    counts = {"num_targets": torch.tensor([2, 3])} if name != "scale" else {}
    more = {"window": 3} if name == "full_rows" else {}
    options = {"causal": True, "impl": impl, **counts, **more}
    options["backward_impl"] = {"reference": "reference"}.get(impl, "v1_tiled_backward")
    results = []
    with tritonemu.enabled():
        for given in (value, like):
            leaves = [x.clone().requires_grad_() for x in QKV]
            out = gdpa(*leaves, ENDS, ENDS, 5, 5, **options | {name: given})
            results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    assert all(map(torch.equal, *results))
