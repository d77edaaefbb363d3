"""How evenly ranks share the work of a step, and what their communication adds.

python examples/ranks.py --batch 576
torchrun --nproc-per-node 2 examples/ranks.py --engine ddp --batch 1152 --deals order balanced

For each deal of rows to ranks, prints and writes to --out: the time of a step, and the time that
each rank takes for its own rows without communication. A rank that waits for a slower one and one
that waits for gradients look alike in the first; the second tells them apart. "samples_s" in --out
has both for each rank and step.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path

import options
import torch
import torch.distributed as dist
from attentions import ATTENTIONS
from step import Clock, step
from torch.nn.parallel import DistributedDataParallel
from train import Loader, check_ranks, join, network

from data import DEALS


def arguments(given: list[str] | None) -> argparse.Namespace:
    p = options.parser("Time the ranks of a training step.")
    p.add_argument("--attention", choices=ATTENTIONS, default="gdpa")
    p.add_argument("--engine", choices=("single", "ddp", "fsdp2"), default="single")
    p.add_argument("--deals", nargs="+", choices=DEALS, default=["balanced"], metavar="DEAL")
    p.add_argument("--repeats", type=options.positive, default=20, help="timed steps")
    p.add_argument("--warmup", type=options.positive, default=4, help="steps before them")
    p.add_argument("--timeout", type=options.positive, default=300, help="seconds for a lost rank")
    o = p.parse_args(given)
    check_ranks(p, o)
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
    parts = [torch.empty_like(x, device=device) for _ in range(ranks)]
    dist.all_gather(parts, x.to(device))
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
        own = gathered(times(net, optimizer, batches, device, True), ranks, device)[:, o.warmup :]
        row["samples_s"]["own"] = own.tolist()
        row["own_s"] = own.median(1).values.tolist()
        row["slowest_s"] = own.amax(0).median().item()
        row["skew"] = (own.amax(0) / own.mean(0)).median().item()
    return row


def main(given: list[str] | None = None) -> list[dict]:
    o = arguments(given)
    rank, ranks, device = join(o)
    rows = [measure(o, how, rank, ranks, device) for how in o.deals]
    if rank == 0:
        for row in rows:
            text = f"{row['deal']}: step {1e3 * row['step_s']:.2f} ms"
            if row["own_s"]:
                own = ", ".join(f"{1e3 * s:.2f}" for s in row["own_s"])
                text += f"; own rows {own} ms, slowest over mean {row['skew']:.3f}"
            print(text, flush=True)
        if o.out:
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
            found = {"device": name, "options": vars(o), "rows": rows}
            Path(o.out).write_text(json.dumps(found, indent=1))
    if dist.is_initialized():
        dist.destroy_process_group()
    return rows


if __name__ == "__main__":
    main()
