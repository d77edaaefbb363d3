"""A rank of `test_parallel.py`: its part of a batch against the whole, in one process."""

import json
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.flop_counter import FlopCounterMode

import tritonemu
from gdpa_kernels import gdpa, parallel

NEW = hasattr(dist, "all_gather_single")  # since PyTorch 2.13
RECEIVED = dict.fromkeys((
    "all_gather_single" if NEW else "all_gather_into_tensor",
    "reduce_scatter_single" if NEW else "reduce_scatter_tensor",
    "all_to_all_single", "all_reduce",
), 0)  # fmt: skip


def count_bytes(ranks: int) -> None:
    """Add up what the collectives bring to this rank from others."""

    def counted(name: str, call):
        def collective(out, *given, group=None):
            larger = max(out, *given, key=torch.Tensor.numel) if given else out
            times = 1 if given else 2  # a ring's all-reduce scatters sums and gathers them
            received = larger.numel() * larger.element_size() * (ranks - 1) // ranks
            RECEIVED[name] += times * received
            return call(out, *given, group=group)

        return collective

    for name in RECEIVED:
        setattr(dist, name, counted(name, getattr(dist, name)))


def by_dtensors(call, total: int, ranks: int):
    """A call whose tensors are shards of DTensors, and whose result is one's."""
    mesh = init_device_mesh("cpu", (ranks,))

    def called(*local, **options):
        options.pop("layout")
        *tensors, ends = local
        tensors = [
            DTensor.from_local(
                x, mesh, [Shard(0)], run_check=False, shape=(total, *x.shape[1:]),
                stride=(x.shape[1] * x.shape[2], x.shape[2], 1),
            )
            for x in tensors
        ]  # fmt: skip
        out = call(*tensors, ends, **options)
        assert out.placements == (Shard(0),) and out.shape == tensors[0].shape
        return out.to_local()

    return called


def found(case: dict, rank: int, ranks: int) -> dict:
    """Errors of the output and the gradients on each rank, bytes that this one received, as counted
    here and by the library, and the FLOPs of each."""
    RECEIVED.update(dict.fromkeys(RECEIVED, 0))
    ends, dtype, layout = case["ends"], getattr(torch, case["dtype"]), case["layout"]
    heads, keys, dim = case["shape"]
    seeds = case.get("seeds")
    rows = seeds or ends[-1]
    make = torch.Generator().manual_seed(7)
    q, k, v, grad = (
        torch.randn(n, h, dim, generator=make, dtype=torch.float64).to(dtype)
        for n, h in (
            (rows, heads), (ends[-1], keys), (ends[-1], keys),
            (rows * (len(ends) - 1 if seeds else 1), heads),
        )
    )  # fmt: skip
    clean = ends[1] if case.get("nan") else 0  # of the first sequence nothing may be left
    for x in (q, k, v, grad):
        x[:clean] = torch.nan

    def own(x: torch.Tensor) -> torch.Tensor:
        return parallel.shard(x, ends, rank, ranks, layout)

    masks = {} if seeds else {name: case[name] for name in ("causal", "window")}
    how = {} if seeds else {"stationary": case["stationary"]}
    mine = [x.clone().requires_grad_() for x in (q if seeds else own(q), own(k), own(v))]
    call = parallel.context_parallel_pooling if seeds else parallel.context_parallel_gdpa
    if case.get("dtensor"):
        call = by_dtensors(call, ends[-1], ranks)
    counting = tritonemu.enabled(), parallel.counted_bytes(), FlopCounterMode(display=False)
    with counting[0], counting[1] as library, counting[2] as flops:
        out = call(*mine, ends, layout=layout, **how, **masks, **case["options"])
        forward = sum(RECEIVED.values())
        gradients = torch.autograd.grad(out, mine, grad if seeds else own(grad))
    whole = [x.double().requires_grad_() for x in (q, k, v)]
    offsets = torch.tensor(ends, dtype=torch.int32)
    longest = max((b - a for a, b in zip(ends, ends[1:], strict=False)), default=0)
    wanted = gdpa(*whole, None if seeds else offsets, offsets, None, longest, **masks,
                  **case["options"] | {"impl": "reference", "backward_impl": "auto"})  # fmt: skip
    exact = torch.autograd.grad(wanted, whole, grad.double())
    errors = []
    own_tokens = own(torch.arange(ends[-1]))
    for x, y, whole_here in zip(
        (out, *gradients), (wanted, *exact), (seeds, seeds, None, None), strict=True
    ):
        here = torch.arange(len(y)) if whole_here else own_tokens
        apart = (x.double() - y[here])[here >= clean].abs()
        errors.append(float(apart.max() / (y[clean:].abs().max() or 1)) if apart.numel() else 0.0)
    gathered = [None] * ranks
    dist.all_gather_object(gathered, (errors, flops.get_total_flops()))
    total = sum(RECEIVED.values())
    return {
        "errors": [errors for errors, _ in gathered],
        "flops": [flops for _, flops in gathered],
        "bytes": {"forward": forward, "backward": total - forward},
        "counted": sum(library.values()),
    }


def outside() -> list[list[str]]:
    """What a rank that is not among those of a call is told, by its group and by its mesh."""
    x = torch.zeros(1, 2, 4)
    group, mesh = dist.new_group([0]), DeviceMesh("cpu", [0])
    sharded = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
    messages = []
    for call in (
        partial(parallel.context_parallel_gdpa, x, x, x, [0, 1], group=group),
        partial(parallel.context_parallel_pooling, x, x, x, [0, 1], group=group),
        partial(parallel.context_parallel_gdpa, sharded, sharded, sharded, [0, 1]),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, messages)
    return gathered


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count_bytes(ranks)
    cases = json.loads(sys.argv[1])
    results = {name: found(case, rank, ranks) for name, case in cases.items()}
    results["outside"] = outside()
    if rank == 0:
        print(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
