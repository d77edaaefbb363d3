"""Relative bias: as HSTU's code states it, in every implementation that takes it; its gradients."""

import copy
import pickle
from dataclasses import replace
from decimal import Decimal

import pytest
import torch
from torch import nn

from gdpa_kernels import GDPASelfAttention, RelativeBias, gdpa
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.gdpa import bias, reference
from gdpa_kernels.gdpa.device import bias_gradient
from gdpa_lab.measuring.compile_check import build_launch, read
from gdpa_lab.measuring.inputs import cu_seqlens
from tests.budget import within_budget
from tests.calls import DEVICE, assert_same_bits, cast, full_of_nan, kernels_run, required
from tests.fuzzing import ACTIVATIONS, meta
from tests.gdpa.cases import Case, batch_of
from tests.tiers import sweep, swept

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
NAMES = ["out", "dq", "dk", "dv", "dposition", "dtime"]
FORWARD = [r.impl for r in ladder.LADDERS["gdpa"] if "bias" in r.requires.extras][:3]
BACKWARD = "v1_tiled_backward"


def hstu(difference: int, buckets: int) -> int:
    """The bucket of a time, from the formula."""
    logarithm = Decimal(max(abs(difference), 1)).ln() / Decimal("0.301")
    return min(int(logarithm), buckets - 1)


def tables(num_heads: int, spread: int = 60, buckets: int = 40, seed: int = 5) -> tuple:
    """Of positions, fewer than the sequences are long, and of times; one for all heads where
    num_heads is 0."""
    make = torch.Generator().manual_seed(seed)
    heads = (num_heads,) if num_heads else ()
    sizes = 2 * spread - 1, buckets
    return tuple(torch.randn(*heads, n, generator=make).to(DEVICE) for n in sizes)


def times_of(rows: int, seed: int = 7) -> torch.Tensor:
    """Out of order and with repetitions: from equal to twelve days apart."""
    make = torch.Generator().manual_seed(seed)
    return torch.randint(0, 10**6, (rows,), generator=make).sort().values.roll(3).to(DEVICE)


def by_loops(
    call: dict, position_table, time_table, times_q, times_k, sees, place=lambda i, n: i
) -> torch.Tensor:
    """The output, pair by pair in the order of the formula; autograd gives the gradients."""
    q, k, v = (call[n] for n in "qkv")
    outs, group = [], q.shape[1] // k.shape[1]
    ends_q, ends_k = (call[f"cu_seqlens_{n}"].tolist() for n in "qk")
    for start_q, end_q, start_k, end_k in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        shift = end_k - start_k - end_q + start_q if call.get("causal") == "lower_right" else 0
        for row in range(end_q - start_q):
            heads = []
            for head in range(q.shape[1]):
                total = torch.zeros_like(q[0, 0])
                for j in range(end_k - start_k):
                    i = row + shift
                    if not sees(i, j, end_k - start_k):
                        continue
                    mine, theirs = start_q + row, start_k + j
                    s = call["scale"] * (q[mine, head] * k[theirs, head // group]).sum()
                    if position_table is not None:
                        table = (
                            position_table[head] if position_table.dim() == 2 else position_table
                        )
                        most = table.numel() // 2
                        keys = end_k - start_k
                        apart = place(j, keys) - place(i, keys)
                        s = s + table[max(-most, min(apart, most)) + most]
                    if time_table is not None:
                        table = time_table[head] if time_table.dim() == 2 else time_table
                        apart = int(times_q[mine]) - int(times_k[theirs])
                        s = s + table[hstu(apart, table.numel())]
                    total = total + ACTIVATIONS["silu"](s) * v[theirs, head // group]
                heads.append(call["output_scale"] * total)
            outs.append(torch.stack(heads))
    return torch.stack(outs)


def next_of(times: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """The time after each, of each sequence; the last one's own."""
    parts = [torch.cat((t[1:], t[-1:])) for t in times.split(lengths)]
    return torch.cat(parts)


LOOPS = {
    "causal": ((6, 0, 3), None, {"causal": True}, lambda i, j, n: j <= i),
    "full": ((5, 1), None, {}, lambda i, j, n: True),
    "window": ((7,), None, {"causal": True, "window": 2}, lambda i, j, n: 0 <= i - j <= 2),
    "delta": ((7, 4), (2, 4), {"causal": "lower_right"}, lambda i, j, n: j <= i),
    "targets": (
        (8,), None,
        {"causal": True, "num_targets": torch.tensor([3]).int(), "num_contexts": 2},
        lambda i, j, n: meta(i, j, n, 3, 2, None, 0),
    ),
    "groups": (
        (9,), (4,),
        {"causal": "lower_right", "num_targets": torch.tensor([6]).int(), "target_group_size": 2},
        lambda i, j, n: j <= i and (j < 3 or (i - 3) // 2 == (j - 3) // 2),
    ),
    "own_targets": (
        (8,), None,
        {"causal": True, "num_targets": torch.tensor([3]).int(), "target_ranks": "own"},
        lambda i, j, n: meta(i, j, n, 3, 0, None, 0),
    ),
}  # fmt: skip
PLACES = {"targets": lambda i, n: min(i, n - 3), "groups": lambda i, n: min(i, n - 6)}


@pytest.mark.parametrize("per_head", (sweep(False), True))
@pytest.mark.parametrize("which", ("both", sweep("position"), sweep("time")))
@pytest.mark.parametrize("mask", LOOPS)
def test_the_definition_is_the_formula(mask, which, per_head):
    """Values, and all gradients against autograd's; and v0's values where it takes the call."""
    lengths, queries, options, sees = LOOPS[mask]
    options = {"activation": "silu", "scale": 0.3, "output_scale": 0.7} | options
    case = Case(mask, queries or lengths, lengths, 4, 2, head_dim=3, options=options)
    call = required(case.arguments(FP64))
    position, time = (x.double().requires_grad_() for x in tables(4 * per_head, 4, 30))
    position = None if which == "time" else position
    time, times = (None, None) if which == "position" else (time, times_of(sum(lengths)))
    after = None if times is None else next_of(times, lengths)
    if queries is not None and after is not None:
        ends = cu_seqlens(lengths, DEVICE)[1:].tolist()
        after = torch.cat([after[e - n : e] for e, n in zip(ends, queries, strict=True)])
    leaves = [call[n] for n in "qkv"] + [x for x in (position, time) if x is not None]
    found = gdpa(**call, relative_bias=RelativeBias(position, time, times), impl="reference")
    place = {"place": PLACES[mask]} if mask in PLACES else {}
    wanted = by_loops(call, position, time, after, times, sees, **place)
    grad = torch.randn_like(wanted)
    pairs = zip(
        (found, *torch.autograd.grad(found, leaves, grad)),
        (wanted, *torch.autograd.grad(wanted, leaves, grad)),
        strict=True,
    )
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    if mask in ("causal", "full", "window"):
        eager = gdpa(**call, relative_bias=RelativeBias(position, time, times), impl="v0_eager")
        torch.testing.assert_close(eager, wanted, rtol=0, atol=1e-12)


def test_times_of_the_queries():
    """Of the event itself, of the next one, and as they are given."""
    lengths, n = (5, 0, 4), 9
    call = Case("call", lengths, options={"causal": True, "impl": "reference"}).arguments(FP64)
    _, time = (x.double() for x in tables(0, 4, 30))
    times = times_of(n)
    own = gdpa(**call, relative_bias=RelativeBias(None, time, times, next_time=False))
    given = gdpa(**call, relative_bias=RelativeBias(None, time, times, times))
    assert torch.equal(own, given)
    after = gdpa(**call, relative_bias=RelativeBias(None, time, times))
    assert not torch.equal(own, after)
    given = gdpa(**call, relative_bias=RelativeBias(None, time, times, next_of(times, lengths)))
    assert torch.equal(after, given)
    narrow = RelativeBias(None, time, times.int(), times.int())
    assert torch.equal(own, gdpa(**call, relative_bias=narrow))


# -- Buckets ---------------------------------------------------------------------------------------


def test_the_thresholds_are_those_of_the_formula():
    """Each is the least whole number of its bucket."""
    thresholds = bias.hstu_thresholds(146).tolist()
    for number, threshold in enumerate(thresholds, 1):
        assert hstu(threshold, 146) >= number > hstu(threshold - 1, 146)
    assert thresholds[:5] == [2, 2, 3, 4, 5]
    for wrong in (0, 147):
        with pytest.raises(ValueError, match=f"buckets must be .*, got {wrong}"):
            bias.hstu_thresholds(wrong)


def edges(buckets: int) -> list[int]:
    """Differences at every threshold and on both sides, of both signs; none; past the last."""
    at = bias.hstu_thresholds(buckets).unique().tolist()
    found = {0, 1, 10**17, *(x + d for x in at for d in (-1, 0, 1))}
    return sorted(found | {-x for x in found})


@pytest.mark.parametrize("buckets", (sweep(1), sweep(2), 33, sweep(129)))
@pytest.mark.parametrize("impl", FORWARD)
def test_every_implementation_puts_every_time_into_the_same_bucket(impl, buckets):
    """One query, one key and nothing but the bias: the output is the entry, and the gradient
    one."""
    apart = edges(buckets)
    n = len(apart)
    times_k = torch.full((n,), -(10**9), device=DEVICE)
    times_q = times_k + torch.tensor(apart, device=DEVICE)
    q, v = torch.zeros(n, 1, 16, device=DEVICE), torch.ones(n, 1, 16, device=DEVICE)
    ends = torch.arange(n + 1, dtype=torch.int32, device=DEVICE)
    table = torch.arange(buckets, dtype=FP32, device=DEVICE).requires_grad_()
    given = RelativeBias(None, table, times_k, times_q)
    backward = BACKWARD if impl == "v1_tiled" else "reference"
    with kernels_run():
        out = gdpa(
            q, q, v, ends, ends, 1, 1, activation="identity", relative_bias=given, impl=impl,
            backward_impl=backward,
        )  # fmt: skip
        (grad,) = torch.autograd.grad(out[:, 0, 0].sum(), table)
    wanted = [hstu(x, buckets) for x in apart]
    assert out[:, 0, 0].tolist() == wanted
    assert grad.tolist() == [wanted.count(b) for b in range(buckets)]


def test_thresholds_of_ones_own():
    thresholds = torch.tensor([10, 10, 100, 1000], device=DEVICE)
    times = torch.tensor([0, 9, 10, 99, 100, 5000], device=DEVICE)
    n = len(times)
    q, v = torch.zeros(n, 1, 16, device=DEVICE), torch.ones(n, 1, 16, device=DEVICE)
    ends = torch.arange(n + 1, dtype=torch.int32, device=DEVICE)
    table = torch.arange(5.0, device=DEVICE)
    given = RelativeBias(None, table, times, torch.zeros_like(times), thresholds)
    with kernels_run():
        for impl in FORWARD:
            out = gdpa(q, q, v, ends, ends, 1, 1, activation="identity", relative_bias=given,
                       impl=impl)  # fmt: skip
            assert out[:, 0, 0].tolist() == [0, 0, 2, 2, 3, 4]


# -- The kernels -----------------------------------------------------------------------------------

LENGTHS, DELTA = (150, 0, 9, 70), (40, 0, 9, 65)
INT = torch.int32
COUNTS = {
    "num_targets": torch.tensor([30, 0, 0, 5], dtype=INT, device=DEVICE),
    "num_contexts": torch.tensor([3, 0, 0, 40], dtype=INT, device=DEVICE),
}
KERNEL_CASES = {
    "full": Case("full", LENGTHS, num_heads=4),
    "causal": Case("causal", LENGTHS, num_heads=4, options={"causal": True}),
    "cross": Case("cross", (70, 20, 5), (30, 0, 131), 2, 1),
    "cross_causal": Case("cross_causal", (70, 3), (30, 90), 2, 1, options={"causal": "upper_left"}),
    "delta": Case("delta", DELTA, LENGTHS, 4, options={"causal": "lower_right"}),
    "more_queries": Case("more_queries", (90, 20), (30, 70), options={"causal": "lower_right"}),
    "window": Case("window", LENGTHS, options={"window": 20}),
    "targets": Case("targets", LENGTHS, options=COUNTS | {"causal": True, "window": 9}),
    "delta_targets": Case("delta_targets", DELTA, LENGTHS, options=COUNTS | {
        "causal": "lower_right", "num_contexts": None}),
    "groups": Case("groups", (150, 9, 70), options={
        "causal": True, "num_targets": torch.tensor([90, 0, 33], dtype=INT, device=DEVICE),
        "target_group_size": 3}),
    "own_targets": Case("own_targets", DELTA, LENGTHS, options=COUNTS | {
        "causal": "lower_right", "num_contexts": None, "target_ranks": "own"}),
    "per_head": Case("per_head", (60, 20), num_heads=4, options={
        "activation": ("gelu", "silu", "relu", "gelu_tanh"), "output_scale": 1 / 60}),
    "wide": Case("wide", (70, 5), head_dim=256, options={"causal": True}),
    "narrow": Case("narrow", (70, 5), head_dim=24, options={"causal": True}),
    "head_dim_128": Case("head_dim_128", (140, 5), head_dim=128),
    "packed": Case("packed", (40, 3, 70), packed=True),
    "empty_batch": Case("empty_batch", ()),
    "no_tokens": Case("no_tokens", (0, 0)),
}  # fmt: skip
QUICK = ("cross_causal", "delta_targets", "groups", "window", "head_dim_128", "no_tokens")


def biased(case: Case, dtype: torch.dtype, per_head: bool, seed: int = 0) -> tuple[dict, dict]:
    """A call of leaves without a bias, and the fields of its bias, tables leaves."""
    call = required({"activation": "silu"} | case.arguments(dtype, seed))
    position, time = tables(call["q"].shape[1] * per_head, seed=seed)
    queries = None
    if case.seqlens_k is not None and call.get("causal") != "lower_right" or "more" in case.name:
        queries = times_of(call["q"].shape[0], 11)
    return call, {
        "position_table": position.requires_grad_(), "time_table": time.requires_grad_(),
        "timestamps": times_of(call["k"].shape[0]), "query_timestamps": queries,
    }  # fmt: skip


def results(call: dict, fields: dict, impl: str, backward_impl: str) -> list[torch.Tensor]:
    """The output and all gradients."""
    leaves = [call[n] for n in "qkv"] + [fields["position_table"], fields["time_table"]]
    with kernels_run(), full_of_nan():
        given = RelativeBias(**fields)
        out = gdpa(**call, relative_bias=given, impl=impl, backward_impl=backward_impl)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def defined(call: dict, fields: dict, dtype: torch.dtype) -> list[torch.Tensor]:
    """The same by the definition in a dtype, every step of it."""
    moved = cast(call, dtype)
    moved = moved | {"scale": call["q"].shape[-1] ** -0.5}
    ends, right = (
        (moved["cu_seqlens_q"], moved["cu_seqlens_k"]),
        moved.get("causal") == "lower_right",
    )
    batch = batch_of(moved)
    batch = replace(batch, segments=batch.mask.segments(*ends, right, True))
    sizes = batch.num_heads, batch.q.shape[0], batch.k.shape[0]
    made = bias.bias_of_call(RelativeBias(**fields), *sizes, *ends, False, right, False)
    made = bias.Bias(*(x if x is None else x.detach() for x in made))
    batch = replace(batch, bias=made)
    out = reference.forward_in_dtype(batch)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(call["q"].dtype)
    grad = grad.to(DEVICE, dtype)
    tables = reference.bias_backward_in_dtype(grad, batch)
    like = fields["position_table"], fields["time_table"]
    tables = [x.view(y.shape) for x, y in zip(tables, like, strict=True)]
    return [out, *reference.backward_in_dtype(grad, batch), *tables]


@pytest.mark.parametrize(
    "dtype, per_head", (sweep(BF16, False), (BF16, True), sweep(FP32, False)), ids=str
)
@pytest.mark.parametrize("name", swept(KERNEL_CASES, QUICK))
def test_the_kernels_keep_the_budget(name, dtype, per_head):
    """Outputs and all gradients; those of the tables are sums in fp32."""

    def draw(i: int) -> tuple:
        call, fields = biased(KERNEL_CASES[name], dtype, per_head, i)
        found = results(call, fields, "v1_tiled", BACKWARD)
        low = defined(call, fields, dtype)
        low = [x.to(y.dtype) for x, y in zip(low, found, strict=True)]
        exact = defined(call, fields, FP64)
        return found, exact, low

    within_budget(draw, NAMES, least=2**20, most=3)  # the tables are small


@pytest.mark.parametrize("name", (sweep("causal"), "targets"))
def test_the_same_bits_in_every_run(name):
    call, fields = biased(KERNEL_CASES[name], BF16, False)
    torch.use_deterministic_algorithms(True)
    try:
        first = results(call, fields, "auto", "auto")
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_bits(results(call, fields, "auto", "auto"), first)
    with kernels_run(), launches() as seen:
        results(call, fields, "v1_tiled", BACKWARD)
    kernels = {launch.name: launch for launch in seen}
    assert {"tiled_kernel", "keys_kernel", "queries_kernel", "bias_kernel"} == set(kernels)
    code = build_launch(kernels["bias_kernel"]).asm["ptx"]
    assert not [word for word in code.split() if word.startswith(("atom.", "red."))]


@pytest.mark.parametrize("head_dim", (sweep(64), 128, sweep(256)))
def test_nothing_spills(head_dim):
    case = Case("call", (150, 40), num_heads=4, head_dim=head_dim, options={"causal": True})
    call, fields = biased(case, BF16, True)
    with kernels_run(), launches() as seen:
        results(call, fields, "v1_tiled", BACKWARD)
    assert len(seen) == 4
    for launch in seen:
        made = read(build_launch(launch))
        assert made.spill_bytes == 0 and made.shared_bytes <= 227 * 1024, launch.name


def test_sums_of_many_sequences_are_sums_of_theirs(monkeypatch):
    """Programs that have several sequences each."""
    monkeypatch.setattr(bias_gradient, "PROGRAMS", 8)
    case = Case("call", (40, 3, 0, 70, 20, 11, 1), options={"causal": True})
    call, fields = biased(case, FP32, False)
    found, wanted = results(call, fields, "v1_tiled", BACKWARD), defined(call, fields, FP64)
    for one, other in zip(found[4:], wanted[4:], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_what_no_pair_takes_reaches_nothing():
    """A table's entry that is NaN, beyond the longest sequence and for keys of a tile that do not
    exist; another sequence's keys."""
    call, fields = biased(Case("call", (30, 9), options={}), BF16, False)
    fields["time_table"] = tables(0, buckets=60)[1].requires_grad_()
    fields["timestamps"] += 10**12  # far from the 0 that stands for what does not exist
    wanted = results(call, fields, "v1_tiled", BACKWARD)
    with torch.no_grad():
        fields["position_table"][:30] = float("nan")  # 60 - 1 is the middle
        fields["position_table"][-30:] = float("nan")
        fields["time_table"][-1] = float("nan")
    assert_same_bits(results(call, fields, "v1_tiled", BACKWARD), wanted)


def test_only_what_needs_a_gradient_gets_one():
    call, fields = biased(KERNEL_CASES["causal"], BF16, False)
    whole = results(call, fields, "v1_tiled", BACKWARD)[4:]
    for name, wanted in zip(("position_table", "time_table"), whole, strict=True):
        some = {n: x.detach() if "table" in n and n != name else x for n, x in fields.items()}
        with kernels_run(), launches() as seen:
            out = gdpa(**cast(call, BF16), relative_bias=RelativeBias(**some), impl="v1_tiled")
            grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out)
            (found,) = torch.autograd.grad(out, some[name], grad)
        assert torch.equal(found, wanted)
        assert [launch.name for launch in seen] == ["tiled_kernel", "bias_kernel"]


# -- The operator ----------------------------------------------------------------------------------


P, T, TIMES = torch.zeros(9), torch.zeros(5), torch.zeros(9, dtype=torch.int64)
WRONG = (
    (TypeError, "relative_bias must be a RelativeBias or None, got Tensor", P),
    (ValueError, "must have a position_table or a time_table, got neither", RelativeBias()),
    (TypeError, "position_table must be a floating-point tensor or None, got torch.int64",
     RelativeBias(TIMES)),
    (ValueError, r"position_table must have shape \[entries\] or \[2, entries\], .* got \[3, 9\]",
     RelativeBias(torch.zeros(3, 9))),
    (ValueError, r"position_table must have an odd number of entries, 2 n - 1, got \[8\]",
     RelativeBias(P[:8])),
    (ValueError, "position_table must have .* on cpu, got .* on meta", RelativeBias(P.to("meta"))),
    (ValueError, r"time_table must have shape .* at least 1 entry, on cpu, got \[0\]",
     RelativeBias(P, T[:0], TIMES)),
    (TypeError, "timestamps must be an int32 or int64 tensor with time_table, got NoneType",
     RelativeBias(P, T)),
    (TypeError, "timestamps must be an int32 or int64 tensor with time_table, got torch.float32",
     RelativeBias(P, T, P)),
    (ValueError, r"timestamps must have shape \[9\] on cpu, got \[8\]",
     RelativeBias(P, T, TIMES[:8])),
    (ValueError, r"query_timestamps must have shape \[9\] on cpu, got \[8\]",
     RelativeBias(P, T, TIMES, TIMES[:8])),
    (ValueError, "timestamps must be None without a time_table, got a value",
     RelativeBias(P, None, TIMES)),
    (TypeError, "time_thresholds must be an int64 tensor or None, got torch.float32",
     RelativeBias(P, T, TIMES, None, P[:4])),
    (ValueError, r"time_thresholds must have shape \[4\], one less than time_table, .* got \[9\]",
     RelativeBias(P, T, TIMES, None, TIMES)),
    (ValueError, r"time_thresholds must rise, got \[1, 2, 3, 2\]",
     RelativeBias(P, T, TIMES, None, torch.tensor([1, 2, 3, 2]))),
    (ValueError, r"time_table must have at most 146 entries without .*, got \[147\]",
     RelativeBias(P, torch.zeros(147), TIMES)),
    (TypeError, "next_time must be a bool, got 1", RelativeBias(P, T, TIMES, next_time=1)),
)  # fmt: skip


@pytest.mark.skipif(DEVICE != "cpu", reason="the tensors above are on the CPU")
@pytest.mark.parametrize("error, message, given", WRONG)
def test_what_does_not_fit_is_refused(error, message, given):
    with pytest.raises(error, match=message):
        gdpa(**Case("call", (9,)).arguments(FP32), relative_bias=given)


@pytest.mark.parametrize("whose", ("keys", "queries"))
def test_times_differ_by_what_int64_holds(whose):
    """Within a sequence; at 2**63 a difference would be the size of a small one."""
    call = {**Case("call", (4, 5)).arguments(FP32), "causal": True}
    least, most = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
    _, table = tables(0)

    def called(rows: list[int], **options) -> torch.Tensor:
        times = torch.tensor(rows, device=DEVICE)
        times = (times,) if whose == "keys" else (torch.zeros_like(times), times)
        return gdpa(**call, relative_bias=RelativeBias(None, table, *times), **options)

    apart = [most] * 4 + [least + 1] * 5
    out = called(apart) if whose == "keys" else called([most] * 4 + [-most] * 5)
    assert out.isfinite().all(), "two sequences may be far from each other"
    wrong = [0] * 4 + [most, 0, 0, -1, 0] if whose == "keys" else [0] * 8 + [least]
    with pytest.raises(ValueError, match=r"timestamps must .* got a .* of 9223372036854775808 in "
                       "sequence 1"):  # fmt: skip
        called(wrong)
    called(wrong, validate=False)


def test_queries_without_times_or_positions_are_refused():
    call = Case("call", (5, 5), (9, 4)).arguments(FP32)
    times = times_of(13)
    given = RelativeBias(None, tables(0)[1], times)
    with pytest.raises(
        ValueError, match="query_timestamps must be given where a sequence has more"
    ):
        gdpa(**call, relative_bias=given)
    shared = Case("call", (5, 5), (9, 4), shared_q=True).arguments(FP32)
    with pytest.raises(ValueError, match="cu_seqlens_q must be given with relative_bias, got None"):
        gdpa(**shared, relative_bias=given)


# -- The layer -------------------------------------------------------------------------------------


def test_a_layer_learns_its_tables():
    """They are what `gdpa` takes, reach every gradient, and are in the checkpoint."""
    lengths = (6, 0, 9)
    layer = GDPASelfAttention(
        16, 2, causal=True, position_bias=5, time_bias=129, activation="silu", dtype=FP64
    )
    x, ends, times = torch.randn(15, 16, dtype=FP64), cu_seqlens(lengths, "cpu"), times_of(15).cpu()
    y, _ = layer((x, ends), timestamps=times)
    q, k, v = layer.qkv(x).unflatten(1, (3, 2, 8)).unbind(1)
    given = RelativeBias(layer.position_bias, layer.time_bias, times)
    options = {"causal": True, "activation": "silu", "relative_bias": given}
    wanted = layer.out(gdpa(q, k, v, ends, ends, **options).flatten(1))
    torch.testing.assert_close(y, wanted, rtol=0, atol=1e-14)
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in layer.parameters())
    names = {"position_bias": (9,), "time_bias": (129,)}
    assert {n: tuple(layer.state_dict()[n].shape) for n in names} == names
    assert "time_thresholds" not in layer.state_dict()
    own = GDPASelfAttention(16, 2, time_bias=129, next_time=False)
    assert own.position_bias is None and not own.relative_bias(times).next_time


def test_a_layer_that_was_made_nowhere_has_its_thresholds():
    layer = GDPASelfAttention(16, 2, time_bias=9, device="meta").to_empty(device="cpu")
    layer.time_thresholds.fill_(-1)
    layer.reset_parameters()
    assert torch.equal(layer.time_thresholds, bias.hstu_thresholds(9))
    assert layer.time_bias.abs().max() < 1


def test_a_layer_that_was_loaded_where_it_was_made_nowhere_has_its_thresholds():
    saved = GDPASelfAttention(16, 2, time_bias=9)
    layer = nn.Sequential(GDPASelfAttention(16, 2, time_bias=9, device="meta"))
    layer.load_state_dict(nn.Sequential(saved).state_dict(), assign=True)
    x, times = (torch.randn(5, 16), cu_seqlens((5,), "cpu")), times_of(5).cpu()
    for each in (layer[0], copy.deepcopy(layer)[0], pickle.loads(pickle.dumps(layer))[0]):
        assert torch.equal(each(x, timestamps=times)[0], saved(x, timestamps=times)[0])
    saved.load_state_dict(GDPASelfAttention(16, 2, time_bias=9, device="meta").state_dict(),
                          assign=True)  # fmt: skip
    assert saved.time_thresholds.is_meta


@pytest.mark.parametrize("move", (
    lambda layer: layer.to("cpu"), nn.Module.float, GDPASelfAttention.reset_parameters,
), ids=("to", "float", "reset"))  # fmt: skip
def test_a_layer_that_was_moved_under_inference_still_trains(move):
    layer, times = GDPASelfAttention(16, 2, time_bias=9), times_of(5).cpu()
    with torch.inference_mode():
        move(layer)
    y, _ = layer((torch.randn(5, 16), cu_seqlens((5,), "cpu")), timestamps=times)
    y.sum().backward()
    assert layer.time_bias.grad.any()


def test_what_moves_nothing_leaves_the_thresholds():
    """A captured graph reads them where they are; what converts integers, too, is undone."""
    layer = GDPASelfAttention(16, 2, time_bias=9)
    before = layer.time_thresholds
    assert layer.to("cpu").float().double().time_thresholds is before
    assert torch.equal(layer.type(torch.float16).time_thresholds, before)


def test_what_a_layer_does_not_take_is_refused():
    x = torch.randn(5, 16), cu_seqlens((5,), "cpu")
    with pytest.raises(ValueError, match="timestamps must be None without time_bias, got a value"):
        GDPASelfAttention(16, 2, position_bias=9)(x, timestamps=times_of(5).cpu())
    layer = GDPASelfAttention(16, 2, time_bias=9)
    for wrong, what in ((None, "NoneType"), (torch.zeros(5), "torch.float32")):
        says = f"timestamps must be an int32 or int64 tensor with time_bias, got {what}"
        with pytest.raises(TypeError, match=says):
            layer(x, timestamps=wrong)
    for name in ("position_bias", "time_bias"):
        with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got 0"):
            GDPASelfAttention(16, 2, **{name: 0})
    with pytest.raises(ValueError, match="time_bias must be at most 146, got 147"):
        GDPASelfAttention(16, 2, time_bias=147)
