"""A rank of `test_parallel.py`: its part of a batch against the whole, in one process."""

import json
import sys

import torch
import torch.distributed as dist

import tritonemu
from gdpa_kernels import gdpa
from gdpa_kernels.gdpa import parallel

RECEIVED = {"all_gather_into_tensor": 0, "reduce_scatter_tensor": 0, "all_to_all_single": 0}


def count_bytes(ranks: int) -> None:
    """Add up what the collectives bring to this rank from others."""

    def counted(name: str, call):
        def collective(out, given, group=None):
            larger = max(out, given, key=torch.Tensor.numel)
            RECEIVED[name] += larger.numel() * larger.element_size() * (ranks - 1) // ranks
            return call(out, given, group=group)

        return collective

    for name in RECEIVED:
        setattr(parallel.dist, name, counted(name, getattr(dist, name)))


def found(case: dict, rank: int, ranks: int) -> dict:
    """Errors of the output and the gradients on each rank, and bytes that this one received."""
    RECEIVED.update(dict.fromkeys(RECEIVED, 0))
    ends, dtype = case["ends"], getattr(torch, case["dtype"])
    heads, keys, dim = case["shape"]
    make = torch.Generator().manual_seed(7)
    q, k, v, grad = (
        torch.randn(ends[-1], n, dim, generator=make, dtype=torch.float64).to(dtype)
        for n in (heads, keys, keys, heads)
    )
    clean = ends[1] if case.get("nan") else 0  # of the first sequence nothing may be left
    for x in (q, k, v, grad):
        x[:clean] = torch.nan
    first, last = parallel.rows_of_rank(ends[-1], rank, ranks)
    mine = [x[first:last].clone().requires_grad_() for x in (q, k, v)]
    with tritonemu.enabled():
        out = parallel.context_parallel_gdpa(
            *mine, ends, stationary=case["stationary"], causal=case["causal"],
            window=case["window"], **case["options"],
        )  # fmt: skip
        forward = sum(RECEIVED.values())
        gradients = torch.autograd.grad(out, mine, grad[first:last])
    whole = [x.double().requires_grad_() for x in (q, k, v)]
    offsets = torch.tensor(ends, dtype=torch.int32)
    longest = max((b - a for a, b in zip(ends, ends[1:], strict=False)), default=0)
    wanted = gdpa(*whole, offsets, offsets, longest, longest, causal=case["causal"],
                  window=case["window"], impl="reference")  # fmt: skip
    exact = torch.autograd.grad(wanted, whole, grad.double())
    errors = []
    for a, b in zip((out, *gradients), (wanted, *exact), strict=True):
        rows = slice(max(first, clean), last)
        apart = (a.double()[max(clean - first, 0) :] - b[rows]).abs()
        errors.append(float(apart.max() / b[clean:].abs().max()) if apart.numel() else 0.0)
    gathered = [None] * ranks
    dist.all_gather_object(gathered, errors)
    received = {"forward": forward, "backward": sum(RECEIVED.values()) - forward}
    return {"errors": gathered, "bytes": received}


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count_bytes(ranks)
    cases = json.loads(sys.argv[1])
    results = {name: found(case, rank, ranks) for name, case in cases.items()}
    if rank == 0:
        print(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
