"""A batch that is cut between ranks gives what one process gives, and receives what was counted."""

import json
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from gdpa_kernels import Lengths, gdpa, parallel
from gdpa_kernels.calling.lengths import LaunchState
from gdpa_kernels.parallel import attention, shards
from tests.examples.ranks import printed
from tests.tiers import sweep

SCRIPT = Path(__file__).with_name("context_parallel.py")
ENDS = {
    "cut": [0, 5, 5, 17, 40, 41],
    "one": [0, 41],
    "few": [0, 1, 3],
    "none": [0, 0],
}


PLAIN = {
    "ends": ENDS["cut"], "dtype": "float64", "shape": (8, 4, 8), "causal": False, "window": None,
    "options": {"impl": "reference"}, "layout": "contiguous",
}  # fmt: skip
MASKS = {"all": {}, "causal": {"causal": True}, "window": {"causal": True, "window": 6}}
KERNELS = {
    "dtype": "bfloat16", "shape": (4, 4, 16), "causal": True,
    "options": {"impl": "v1_tiled", "backward_impl": "v1_tiled_backward"},
}  # fmt: skip
NAMES = ["relu", "silu", "gelu", "silu", "identity", "relu", "gelu", "relu_squared"]
CASES = {
    **MASKS,
    **{name: {"causal": True, "ends": ends} for name, ends in ENDS.items() if name != "cut"},
    "nan": {"causal": True, "ends": ENDS["few"], "nan": True},
    "kernels": KERNELS,
    "per head": {"causal": True, "options": {"impl": "reference", "activation": NAMES}},
}


ZIGZAG = {"layout": "zigzag"}
LONG = PLAIN | {"ends": [0, 3, 403], "shape": (4, 4, 2), "causal": True}
POOLING = {
    name: PLAIN | {"seeds": 3} | case
    for name, case in {
        "cut": {}, "one": {"ends": ENDS["one"]}, "none": {"ends": ENDS["none"]},
        "few": {"ends": ENDS["few"]}, "zigzag": ZIGZAG, "kernels": KERNELS,
        "per head": {"options": CASES["per head"]["options"]},
    }.items()
}  # fmt: skip


@pytest.fixture(scope="module", params=(2, sweep(4)))
def results(request) -> tuple[int, dict]:
    """What processes find, all cases in one start."""
    cases = {
        f"{stationary} {layout} {name}": PLAIN | case | {"stationary": stationary, "layout": layout}
        for stationary in parallel.STATIONARY for layout in parallel.LAYOUTS
        for name, case in CASES.items()
    }  # fmt: skip
    cases |= {
        f"{stationary} {layout} long": LONG | {"stationary": stationary, "layout": layout}
        for stationary in parallel.STATIONARY
        for layout in parallel.LAYOUTS
    }
    cases |= {
        f"{stationary} dtensor": PLAIN | {"causal": True, "dtensor": True, "stationary": stationary}
        for stationary in parallel.STATIONARY
    }
    cases |= {f"pooling {name}": case for name, case in POOLING.items()}
    return request.param, json.loads(printed(request.param, SCRIPT, json.dumps(cases)))


@pytest.mark.parametrize("layout", parallel.LAYOUTS)
@pytest.mark.parametrize("stationary", parallel.STATIONARY)
def test_ranks_compute_what_one_process_does(results, stationary, layout):
    """With a sequence across the cut, and a rank that has one piece, or nothing."""
    _, found = results
    for name in (*CASES, "long"):
        worst = torch.tensor(found[f"{stationary} {layout} {name}"]["errors"]).max()
        assert worst < (0.02 if name == "kernels" else 1e-14), name
        assert worst > 0 or name != "kernels", "they round"


@pytest.mark.parametrize("stationary", parallel.STATIONARY)
def test_dtensors_are_what_their_shards_are(results, stationary):
    _, found = results
    case, shards = found[f"{stationary} dtensor"], found[f"{stationary} contiguous causal"]
    assert case["errors"] == shards["errors"] and case["bytes"] == shards["bytes"]


def test_wrong_dtensors(alone):
    mesh = init_device_mesh("cpu", (1,))
    right, copied = (distribute_tensor(X, mesh, [at]) for at in (Shard(0), Replicate()))
    for error, message, k, options in (
        (TypeError, "k must be a DTensor as others are, got Tensor", X, {}),
        (ValueError, r"k must be sharded by tokens, .*got \(Replicate\(\),\) on", copied, {}),
        (ValueError, "layout must be 'contiguous' and group None for DTensors, .*'zigzag'", right,
         {"layout": "zigzag"}),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            parallel.context_parallel_gdpa(right, k, right, [0, 4], **options)


@pytest.mark.parametrize("name", POOLING)
def test_pooled_keys_are_those_of_all_ranks(results, name):
    """The result and the gradient of q are whole on every rank."""
    _, found = results
    worst = torch.tensor(found[f"pooling {name}"]["errors"]).max()
    assert worst < (0.02 if name == "kernels" else 1e-14)


@pytest.mark.parametrize("stationary", parallel.STATIONARY)
def test_zigzag_shards_have_equal_work(results, stationary):
    """FLOPs of a rank over the mean, as PyTorch counts them, forward and backward; of contiguous
    shards the last queries, or the first keys, have most."""
    ranks, found = results
    most, busiest = {}, {"queries": ranks - 1, "keys": 0}
    for layout in parallel.LAYOUTS:
        flops = torch.tensor(found[f"{stationary} {layout} long"]["flops"], dtype=torch.float64)
        most[layout] = (flops.max() / flops.mean()).item()
        if layout == "contiguous" and stationary in busiest:
            assert flops.argmax() == busiest[stationary]
    assert most["zigzag"] < 1.02
    assert most["contiguous"] > 1.2 or stationary == "sequences"


@pytest.mark.parametrize("layout", parallel.LAYOUTS)
@pytest.mark.parametrize("stationary", parallel.STATIONARY)
def test_a_rank_receives_the_bytes_that_were_predicted(results, stationary, layout):
    ranks, found = results
    for name, dtype in (("all", torch.float64), ("kernels", torch.bfloat16)):
        case = PLAIN | CASES[name]
        rows = max(len(rows_of(case["ends"], rank, ranks, layout)) for rank in range(ranks))
        wanted = parallel.predicted_bytes(stationary, rows, ranks, *case["shape"], dtype)
        got = found[f"{stationary} {layout} {name}"]
        assert tuple(got["bytes"].values()) == wanted
        assert got["counted"] == sum(wanted)


def test_predictions_are_the_table():
    """Of 8 query heads, 4 key heads and 16 rows of 8 numbers in bf16 on 2 ranks: f = 1 / 2."""
    shape = 8, 2, 8, 4, 8, torch.bfloat16
    tokens = 16 * 8
    assert {name: parallel.predicted_bytes(name, *shape) for name in parallel.STATIONARY} == {
        "queries": (2 * tokens * 4 * 2 // 2, 2 * tokens * 4 * 4 // 2),
        "keys": (tokens * 8 * (2 + 4) // 2,) * 2,
        "sequences": (2 * tokens * (8 + 4) * 2 // 2 // 2,) * 2,
    }
    with pytest.raises(ValueError, match="stationary must be one of .*, got 'ring'"):
        parallel.predicted_bytes("ring", *shape)


def test_pooling_receives_sums(results):
    """Twice f times the result in fp64 forward, and q backward."""
    ranks, found = results
    got, numbers = found["pooling cut"], 3 * 8 * 8
    forward, backward = (2 * n * numbers * 8 * (ranks - 1) // ranks for n in (5, 1))
    assert got["bytes"] == {"forward": forward, "backward": backward}
    assert got["counted"] == forward + backward


def rows_of(ends: list[int], rank: int, ranks: int, layout: str) -> list[int]:
    return parallel.shard(torch.arange(ends[-1]), ends, rank, ranks, layout).tolist()


@pytest.mark.parametrize("layout", parallel.LAYOUTS)
@pytest.mark.parametrize("ends", [*ENDS.values(), [0]])
def test_shards_are_put_together_again(ends, layout):
    x = torch.randn(ends[-1], 2, dtype=torch.float64, requires_grad=True)
    parts = [parallel.shard(x, ends, rank, 3, layout) for rank in range(3)]
    again = parallel.unshard(parts, ends, layout)
    assert torch.equal(again, x)
    assert torch.equal(torch.autograd.grad(again.sum(), x)[0], torch.ones_like(x))


def test_zigzag_holds_an_early_and_a_late_chunk():
    """Short sequences go round."""
    assert [rows_of([0, 8], rank, 2, "zigzag") for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    ones = list(range(9))
    assert [len(rows_of(ones, rank, 4, "zigzag")) for rank in range(4)] == [2, 2, 2, 2]


def test_rows_are_dealt_in_order():
    assert [parallel.rows_of_rank(10, rank, 4) for rank in range(4)] == [
        (0, 3), (3, 6), (6, 9), (9, 10),
    ]  # fmt: skip
    assert [parallel.rows_of_rank(2, rank, 4) for rank in range(4)] == [
        (0, 1), (1, 2), (2, 2), (2, 2),
    ]  # fmt: skip


@pytest.fixture
def alone(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


X = torch.zeros(4, 2, 8)
WRONG = (
    (ValueError, "stationary must be one of queries, keys, sequences, got 'ring'",
     (X, X, X, [0, 4]), {"stationary": "ring"}),
    (ValueError, "mask must have causal False or True, .* got Mask.causal='lower_right'",
     (X, X, X, [0, 4]), {"causal": "lower_right"}),
    (ValueError, "window must be None without causal, got 3", (X, X, X, [0, 4]), {"window": 3}),
    (TypeError, "cu_seqlens must be numbers of the host, got a tensor",
     (X, X, X, torch.tensor([0, 4])), {}),
    (ValueError, r"cu_seqlens must rise from 0, got \[0, 5, 4\]", (X, X, X, [0, 5, 4]), {}),
    (ValueError, "k must have the 5 rows of rank 0, got 4 rows", (X, X, X, [0, 5]), {}),
    (ValueError, "q must have the 4 rows of rank 0, got 3 rows", (X[:3], X, X, [0, 4]), {}),
    (ValueError, "layout must be one of contiguous, zigzag, got 'ring'",
     (X, X, X, [0, 4]), {"layout": "ring"}),
    (TypeError, "options must be of activation, .*, got num_targets",
     (X, X, X, [0, 4]), {"num_targets": torch.ones(1)}),
)  # fmt: skip


@pytest.mark.parametrize("error, message, given, options", WRONG)
def test_what_is_wrong_is_said(alone, error, message, given, options):
    with pytest.raises(error, match=message):
        parallel.context_parallel_gdpa(*given, **options)


@pytest.mark.parametrize("stationary", [*parallel.STATIONARY, None])
def test_autocast_is_that_of_gdpa(alone, stationary):
    """What is moved, and the result, have its dtype; None: a shared q."""
    x = torch.randn(4, 2, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        if stationary is None:
            out = parallel.context_parallel_pooling(x, x, x, [0, 4])
        else:
            out = parallel.context_parallel_gdpa(x, x, x, [0, 4], stationary=stationary)
        ends = torch.tensor([0, 4])
        assert torch.equal(out, gdpa(x, x, x, None if stationary is None else ends, ends))
    assert out.dtype == torch.bfloat16
    assert torch.autograd.grad(out.sum(), x)[0].dtype == torch.float32


@pytest.mark.parametrize("stationary", parallel.STATIONARY)
def test_layers_share_what_a_batch_is_cut_into(alone, stationary, monkeypatch):
    """The first call finds the places, also under inference; a second layer, which trains, does
    not."""
    given = [0, 3, 4], stationary, "zigzag"
    x = torch.randn(4, 2, 8, requires_grad=True)

    def layer():
        ends, stationary, layout = given
        return parallel.context_parallel_gdpa(
            x, x, x, ends, stationary=stationary, layout=layout, causal=True
        )

    with torch.inference_mode():
        first = layer()
    monkeypatch.delattr(shards.Sharding, "gathered_rows")
    second = layer()
    assert torch.equal(first, second)
    assert torch.autograd.grad(second.sum(), x)[0].shape == x.shape


@pytest.mark.parametrize(
    "first", (FakeTensorMode, torch.inference_mode, partial(torch.device, "meta"))
)
def test_a_first_call_of_another_kind_leaves_nothing(alone, first):
    """A mode that fakes operators, one without gradients, another default device."""
    x, ends = torch.randn(7, 2, 8, requires_grad=True), [0, 3, 7]

    def both() -> list[torch.Tensor]:
        parts = [parallel.shard(x, ends, rank, 2, "zigzag") for rank in range(2)]
        again = parallel.unshard(parts, ends, "zigzag")
        out = parallel.context_parallel_gdpa(x, x, x, ends, layout="zigzag")
        return [again, out, *torch.autograd.grad(again.sum() + out.sum(), x)]

    wanted = both()
    shards._sharding_of.cache_clear()
    attention._rank_call.cache_clear()
    with first():
        parallel.shard(torch.zeros(7, 1), ends, 0, 2, "zigzag")
        if first is not FakeTensorMode:  # refused there: offsets have no values
            parallel.context_parallel_gdpa(
                x.detach(), x.detach(), x.detach(), ends, layout="zigzag"
            )
    assert all(map(torch.equal, both(), wanted))


@pytest.mark.parametrize(
    "call", (parallel.context_parallel_gdpa, parallel.context_parallel_pooling)
)
def test_a_capture_is_refused(alone, call, monkeypatch):
    """A graph would read what nobody keeps for it, also where an earlier call has made it; refused
    before anything is moved."""
    call(X, X, X, [0, 4])
    captured = LaunchState(True, 7, True)
    monkeypatch.setattr(attention, "launch_state", lambda device: captured, raising=False)
    says = "cu_seqlens must be brought to the device outside .* of a CUDA graph, got a call in one"
    with parallel.counted_bytes() as counted, pytest.raises(ValueError, match=says):
        call(X, X, X, [0, 4])
    assert not counted


def test_pooling_takes_no_mask(alone):
    with pytest.raises(TypeError, match="options must be of activation, .*, got causal"):
        parallel.context_parallel_pooling(X, X, X, [0, 4], causal=True)


@pytest.mark.parametrize("wrong, message", [
    ({"rank": 2}, "rank must be less than the 2 ranks, got 2"),
    ({"rank": 0.0}, "rank must be an integer of at least 0, got 0.0"),
    ({"ranks": 0}, "ranks must be an integer of at least 1, got 0"),
    ({"x": None}, "x must be a tensor of rows, got None"),
    ({"cu_seqlens": [0, 3.7, 4]}, r"cu_seqlens must be integers of the host, got \[0, 3.7, 4\]"),
    ({"cu_seqlens": Lengths(torch.tensor([0, 4]))}, "cu_seqlens must be integers .*, got Lengths"),
    ({"x": X[:3]}, "x must have the 4 rows of the batch, got 3 rows"),
    ({"layout": None}, "layout must be one of contiguous, zigzag, got None"),
    ({"cu_seqlens": [1, 4]}, "cu_seqlens must rise from 0"),
])  # fmt: skip
def test_a_wrong_shard_is_said(wrong, message):
    given = {"x": X, "cu_seqlens": [0, 4], "rank": 0, "ranks": 2} | wrong
    with pytest.raises((TypeError, ValueError), match=message):
        parallel.shard(**given)


def test_a_missing_shard_is_said():
    with pytest.raises(ValueError, match=r"shards\[1\] must have the 2 rows of rank 1, got 1 rows"):
        parallel.unshard([X[:2], X[:1]], [0, 4])
    with pytest.raises(ValueError, match="the number of shards must be .* at least 1, got 0"):
        parallel.unshard([], [0, 4])


def test_a_rank_outside_is_told(results):
    members, *others = results[1]["outside"]
    assert members == []
    for rank, (group, pooled, mesh) in enumerate(others, 1):
        assert group == pooled == f"group must have rank {rank} in it, got one of other ranks"
        assert mesh.startswith(f"q must have rank {rank} in its mesh, got DeviceMesh")


@pytest.mark.parametrize("stationary", parallel.STATIONARY)
def test_names_are_of_all_heads(alone, stationary):
    """Refused before anything is moved."""
    says = r"activation must be one name or one per query head \(2\), got 3"
    with parallel.counted_bytes() as counted, pytest.raises(ValueError, match=says):
        parallel.context_parallel_gdpa(
            X, X, X, [0, 4], stationary=stationary, activation=("relu", "silu", "relu")
        )
    assert not counted


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("stationary", parallel.STATIONARY)
def test_no_collective_is_deprecated(alone, stationary, monkeypatch):
    """Those of before PyTorch 2.13, which is to warn of them, give the same."""
    x = torch.randn(4, 2, 8, requires_grad=True)

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        out = parallel.context_parallel_gdpa(x, x, x, [0, 4], stationary=stationary)
        return out, *torch.autograd.grad(out.sum(), x)

    current = both()
    for name in ("all_gather_single", "reduce_scatter_single"):
        monkeypatch.delattr(dist, name, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert all(map(torch.equal, both(), current))


def test_there_must_be_ranks():
    with pytest.raises(ValueError, match="group must be one of torch.distributed, which is not"):
        parallel.context_parallel_gdpa(X, X, X, [0, 4])
