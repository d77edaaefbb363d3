"""Measure how evenly ranks share the work of a step, and what their communication adds.

python examples/ranks.py --batch 576
torchrun --nproc-per-node 2 examples/ranks.py --engine ddp --batch 1152 --deals order balanced
torchrun --nproc-per-node 4 examples/ranks.py --context --size tiny --batch 3 --max-seqlen 512

For each deal of rows to ranks, prints and writes to --out: the time of a step, and the time that
each rank takes for its own rows without communication. A rank that waits for a slower one and one
that waits for gradients look alike in the first; the second tells them apart. "samples_s" in --out
has both for each rank and step.

--context: causal attention of the same histories, cut between ranks, against one process that has
them all: the errors (fp64 on a CPU, bf16 on a GPU), the bytes that a rank receives, as counted and
as predicted, the work of the busiest rank over the mean, and in --out the seconds of each call
forward and backward, of the slowest rank and of one process.
"""

from __future__ import annotations

import argparse
import json
import os
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path

import options
import torch
import torch.distributed as dist
from attentions import ATTENTIONS
from step import Clock, step
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode
from train import Loader, check_ranks, join, network

from data import DEALS
from gdpa_kernels import gdpa, parallel


def arguments(argv: list[str] | None) -> argparse.Namespace:
    p = options.parser("Time the ranks of a training step.")
    p.add_argument("--attention", choices=ATTENTIONS, default="gdpa")
    p.add_argument("--engine", choices=("single", "ddp", "fsdp2"), default="single")
    p.add_argument("--deals", nargs="+", choices=DEALS, default=["balanced"], metavar="DEAL")
    p.add_argument("--context", action="store_true", help="attention that is cut between ranks")
    p.add_argument("--repeats", type=options.positive, default=20, help="timed steps")
    p.add_argument("--warmup", type=options.positive, default=4, help="steps before them")
    p.add_argument("--timeout", type=options.positive, default=300, help="seconds for a lost rank")
    o = p.parse_args(argv)
    if not o.context:
        check_ranks(p, o)
    elif "RANK" not in os.environ:
        p.error("--context needs torchrun --nproc-per-node N, got a process without it")
    else:
        o.engine = "ddp"  # its group of processes
    return o


def times(net, optimizer, batches, device: torch.device, alone: bool) -> torch.Tensor:
    """Seconds of each step on this rank; `alone`: gradients stay on it, and ranks drift apart."""
    clocks = []
    for batch in batches:
        if dist.is_initialized() and alone:
            dist.barrier()
        clocks.append(Clock(device))
        with net.no_sync() if alone else nullcontext():
            step(net, optimizer, batch, clocks[-1].mark)
    return torch.tensor([sum(clock.seconds()) for clock in clocks])


def gathered(x: torch.Tensor, ranks: int, device: torch.device) -> torch.Tensor:
    """`x` of every rank, `[ranks, ...]`."""
    if ranks == 1:
        return x[None]
    x = x.to(device).contiguous()  # as NCCL needs it
    parts = [torch.empty_like(x) for _ in range(ranks)]
    dist.all_gather(parts, x)
    return torch.stack(parts).cpu()


def measure(o: argparse.Namespace, how: str, rank: int, ranks: int, device: torch.device) -> dict:
    """The row of one deal; `own_s` is None where an engine cannot do without communication."""
    loader = Loader(
        argparse.Namespace(**vars(o) | {"deal": how, "ratings": None}), rank, ranks, device
    )
    net = network(o, loader, device)
    optimizer = torch.optim.AdamW(net.parameters(), fused=device.type == "cuda")
    batches = [loader.batch(i)[0] for i in range(o.warmup + o.repeats)]
    together = gathered(times(net, optimizer, batches, device, False), ranks, device)
    tokens = torch.tensor([batch.lengths.total for batch in batches], dtype=torch.float64)
    step_s = together[:, o.warmup :].amax(0).median().item()
    row = {
        "engine": o.engine, "attention": o.attention, "deal": how, "ranks": ranks,
        "batch": o.batch, "step_s": step_s, "samples_per_s": o.batch / step_s,
        "tokens": gathered(tokens, ranks, device)[:, o.warmup :].median(1).values.tolist(),
        "own_s": None, "slowest_s": None, "skew": None,
        "samples_s": {"step": together[:, o.warmup :].tolist()},
    }  # fmt: skip
    if isinstance(net, DistributedDataParallel):
        seconds = gathered(times(net, optimizer, batches, device, True), ranks, device)[
            :, o.warmup :
        ]
        row["samples_s"]["own"] = seconds.tolist()
        row["own_s"] = seconds.median(1).values.tolist()
        row["slowest_s"] = seconds.amax(0).median().item()
        row["skew"] = (seconds.amax(0) / seconds.mean(0)).median().item()
    return row


def computed(call, q, k, v, grad) -> tuple[list[torch.Tensor], list[int], int]:
    """The result and the gradients; bytes received forward and backward; FLOPs."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    with parallel.counted_bytes() as received, FlopCounterMode(display=False) as flops:
        out = call(q, k, v)
        forward = received.total()
        results = [out, *torch.autograd.grad(out, (q, k, v), grad)]
    return results, [forward, received.total() - forward], flops.get_total_flops()


def call_seconds(call, q, k, v, grad, o: argparse.Namespace) -> torch.Tensor:
    """Seconds forward and backward `[2, repeats]` of calls in a row on this rank."""
    clocks = []
    for _ in range(o.warmup + o.repeats):
        clocks.append(Clock(q.device))
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        clocks[-1].mark()
        out = call(q, k, v)
        clocks[-1].mark()
        torch.autograd.grad(out, (q, k, v), grad)
        clocks[-1].mark()
    return torch.tensor([clock.seconds() for clock in clocks[o.warmup :]]).T


def context(o: argparse.Namespace, rank: int, ranks: int, device: torch.device) -> list[dict]:
    """The rows of --context."""
    ends = [0, *options.traffic_of(o).sample(0, o.batch).cumsum().tolist()]
    heads = options.SIZES[o.size]["heads"]
    shape = ends[-1], heads, options.SIZES[o.size]["dim"] // heads
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float64
    make = torch.Generator(device).manual_seed(o.seed)
    tensors = torch.randn(4, *shape, generator=make, device=device, dtype=dtype)
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    one = partial(gdpa, cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=True)
    wanted, _, _ = computed(one, *tensors)
    alone = gathered(call_seconds(one, *tensors, o), ranks, device).amax(0).tolist()
    rows = []
    for layout, stationary in product(parallel.LAYOUTS, parallel.STATIONARY):
        if stationary == "sequences" and heads % ranks:
            continue
        shard = partial(parallel.shard, cu_seqlens=ends, rank=rank, ranks=ranks, layout=layout)
        cut = {"cu_seqlens": ends, "layout": layout, "stationary": stationary, "causal": True}
        call = partial(parallel.context_parallel_gdpa, **cut)
        shards = [*map(shard, tensors)]
        results, received, flops = computed(call, *shards)
        seconds = gathered(call_seconds(call, *shards, o), ranks, device).amax(0).tolist()
        pairs = zip(results, wanted, strict=True)
        errors = [((a - shard(b)).norm() / b.norm()).item() for a, b in pairs]
        each = torch.tensor([*errors, flops, len(results[0])], dtype=torch.float64)
        each = gathered(each, ranks, device)
        most = int(each[:, 5].max())
        predicted = parallel.predicted_bytes(stationary, most, ranks, heads, *shape[1:], dtype)
        rows.append({
            "stationary": stationary, "layout": layout, "ranks": ranks, "tokens": ends[-1],
            "errors": each[:, :4].amax(0).tolist(), "received": received,
            "predicted": [*predicted], "busiest": (each[:, 4].max() / each[:, 4].mean()).item(),
            "forward_s": seconds[0], "backward_s": seconds[1], "alone_s": alone,
        })  # fmt: skip
    return rows


def said(row: dict) -> str:
    """A row in words."""
    if "stationary" in row:
        got, wanted = ("{:,} + {:,}".format(*row[name]) for name in ("received", "predicted"))
        return (
            f"{row['layout']}, {row['stationary']} stay: error {row['errors'][0]:.1e} forward, "
            f"{max(row['errors'][1:]):.1e} backward; a rank receives {got} bytes, predicted "
            f"{wanted}; busiest rank over mean {row['busiest']:.3f}"
        )
    text = f"{row['deal']}: step {1e3 * row['step_s']:.2f} ms"
    if row["own_s"]:
        milliseconds = ", ".join(f"{1e3 * s:.2f}" for s in row["own_s"])
        text += f"; own rows {milliseconds} ms, slowest over mean {row['skew']:.3f}"
    return text


def main(argv: list[str] | None = None) -> list[dict]:
    o = arguments(argv)
    rank, ranks, device = join(o)
    if o.context:
        rows = context(o, rank, ranks, device)
    else:
        rows = [measure(o, how, rank, ranks, device) for how in o.deals]
    if rank == 0:
        print(*map(said, rows), sep="\n", flush=True)
        if o.out:
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
            report = {"device": name, "options": vars(o), "rows": rows}
            Path(o.out).write_text(json.dumps(report, indent=1))
    if dist.is_initialized():
        dist.destroy_process_group()
    return rows


if __name__ == "__main__":
    main()
