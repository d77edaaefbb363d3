"""Train KunlunLite or HSTULite on generated clicks or on ratings, on one device or on many.

python examples/train.py @examples/quick.txt
python examples/train.py @examples/quick.txt --eval-every 50 --log-csv log.csv --tensorboard runs
python examples/train.py --ratings ml-latest-small/ratings.csv --size tiny --max-seqlen 64
torchrun --nproc-per-node 2 examples/train.py --engine ddp --compile

The first learns visibly in two minutes on a CPU; examples/quick.txt tells its options and the curve
to expect. 3,200 rows of 20,000 items, the defaults with 50 steps of 64, are too few to learn from:
NE stays at 1. On a CPU "gdpa" is the operators' definition, one sequence after another: "eager" is
faster there. Every rank has equally many rows of a step; --deal says which.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import checkpoints
import logs
import numpy as np
import options
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from attentions import ATTENTIONS
from metrics import auc, bayes_loss, hit_rate_and_ndcg, normalized_entropy
from models import build
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from data import DEALS, HELD_OUT, Batch, deal

FREE = frozenset((
    "candidates", "checkpoint", "compile", "content", "deal", "device", "engine", "eval_batches",
    "eval_every", "k", "log_csv", "log_every", "out", "peak_tflops", "recompute", "resume",
    "save_every", "start", "tensorboard", "threads", "timeout",
))  # fmt: skip
"""Options that change no result, but for roundings, and what is made of others. The rest is saved
with a checkpoint."""


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = options.parser("Train a model of click-through rate on generated clicks.")
    parser.add_argument("--attention", choices=ATTENTIONS, default="gdpa")
    parser.add_argument("--engine", choices=("single", "ddp", "fsdp2"), default="single")
    parser.add_argument("--deal", choices=DEALS, default="balanced", help="rows to ranks")
    parser.add_argument("--steps", type=options.positive, default=200)
    parser.add_argument("--lr", type=float, default=2e-3, help="highest; OneCycleLR")
    parser.add_argument("--log-every", type=options.positive, default=10, help="steps")
    parser.add_argument("--eval-batches", type=options.positive, default=4)
    parser.add_argument(
        "--eval-every", type=options.positive, help="steps; default: at the end alone"
    )
    parser.add_argument(
        "--candidates", type=options.positive,
        help="other items that a clicked one is ranked among, for HR@k and NDCG@k: a forward each",
    )  # fmt: skip
    parser.add_argument("--k", type=options.positive, default=10, help="of HR@k and NDCG@k")
    parser.add_argument("--ratings", metavar="FILE", help="CSV as of MovieLens: ratings.py")
    parser.add_argument("--like", type=float, default=4.0, help="least rating of a click")
    parser.add_argument(
        "--negatives", type=options.share, default=0.5,
        help="share of the rows of --ratings that show any item, which is not clicked",
    )  # fmt: skip
    parser.add_argument("--log-csv", type=Path, metavar="FILE", help="numbers of the log")
    parser.add_argument("--tensorboard", metavar="FOLDER", help="the same for TensorBoard")
    parser.add_argument("--checkpoint", type=Path, help="folder of checkpoints")
    parser.add_argument("--save-every", type=options.positive, default=100, help="steps")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="from the newest in --checkpoint; with its options, but for --steps",
    )
    parser.add_argument(
        "--timeout", type=options.positive, default=300, help="seconds for a lost rank"
    )
    o = parser.parse_args(argv)
    check_ranks(parser, o)
    check_ratings(parser, o)
    o.content = content_of(o)
    o.start = check_checkpoint(parser, o)
    logs.check(parser, o)
    return o


def check_ratings(parser: options.Parser, o: argparse.Namespace) -> None:
    """Refuses options of the data that is not used."""
    clicks, file = ("law", "rows", "cold", "items", "topics"), ("like", "negatives")
    needed = "no --ratings" if o.ratings else "--ratings"
    for name in clicks if o.ratings else file:
        if getattr(o, name) != parser.get_default(name):
            parser.error(f"--{name} needs {needed}, got --{name} {getattr(o, name)}")


def check_ranks(parser: options.Parser, o: argparse.Namespace) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if (o.engine == "single") != ("RANK" not in os.environ):
        wanted = "none" if o.engine == "single" else f"torchrun --nproc-per-node N {sys.argv[0]}"
        parser.error(f"--engine {o.engine} needs {wanted}, got {ranks} processes of torchrun")
    if o.batch % ranks:
        parser.error(f"--batch must be a multiple of the {ranks} ranks, got {o.batch}")


def content_of(o: argparse.Namespace) -> str | None:
    """Size and SHA-256 of --ratings; None where no checkpoint needs them, or without the file."""
    if o.checkpoint is None or o.ratings is None or not Path(o.ratings).is_file():
        return None
    file = Path(o.ratings)
    return f"{file.stat().st_size} bytes, SHA-256 {checkpoints.sha256(file)}"


def check_checkpoint(parser: options.Parser, o: argparse.Namespace) -> Path | None:
    """The checkpoint to resume from. Refuses to mix two runs in one folder."""
    files = [] if o.checkpoint is None or not o.checkpoint.exists() else [*o.checkpoint.iterdir()]
    if not o.resume:
        if files:
            parser.error(f"--checkpoint must be empty without --resume, got {o.checkpoint}")
        return None
    if not files:
        parser.error(f"--resume needs a complete checkpoint in --checkpoint, got {o.checkpoint}")
    newest, asked = checkpoints.newest(o.checkpoint, say), trained(o)
    if newest is None:
        sys.exit(f"--resume needs a checkpoint that can be read, and {o.checkpoint} has none")
    saved = options_of(newest)
    differ = [name for name in asked if name != "steps" and asked[name] != saved.get(name)]
    if differ:
        was, got = (
            ", ".join(f"--{name.replace('_', '-')} {values.get(name)}" for name in differ)
            for values in (saved, asked)
        )
        parser.error(f"--resume needs the options of {newest}, {was}, got {got}")
    step = checkpoints.step_of(newest)
    if o.steps < step:
        parser.error(f"--steps must be at least the {step} of {newest}, got {o.steps}")
    return newest


def say(text: str) -> None:
    """Prints it once, whatever the number of ranks."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(text, flush=True)


class Loader:
    """The rows of this rank, step by step: a function of the step, so resuming needs no state."""

    def __init__(self, o: argparse.Namespace, rank: int, ranks: int, device: torch.device):
        self.source = options.source_of(o)
        self.o, self.rank, self.ranks, self.device = o, rank, ranks, device
        # FLOPs of a token over those of a pair, about: 8 dim^2 of projections over dim.
        self.linear = 8.0 * options.SIZES[o.size]["dim"]

    def batch(self, step: int) -> tuple[Batch, np.ndarray]:
        """The rows of this rank, and the lengths of all."""
        lengths = self.source.sample(step, self.o.batch)
        rows = deal(lengths, self.ranks, self.o.deal, self.linear)[self.rank]
        longest = self.o.max_seqlen if self.o.compile else None  # compiled for one max_seqlen
        return self.source.make_batch(lengths, rows, step, self.device, longest), lengths


def trained(o: argparse.Namespace) -> dict:
    """The options that decide what is trained, with what is in the file of --ratings."""
    chosen = {name: value for name, value in vars(o).items() if name not in FREE}
    return chosen if o.ratings is None else chosen | {"ratings": f"{o.ratings} ({o.content})"}


def options_of(checkpoint: Path) -> dict:
    """`trained` of the run that wrote it."""
    return json.loads((checkpoint / "options.json").read_text())


def state_of(model, optimizer) -> dict:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def save(o: argparse.Namespace, step: int, rank: int, model, optimizer) -> None:
    folder = o.checkpoint / f"step-{step}"
    if rank == 0:
        checkpoints.unseal(folder)
        (folder / "options.json").write_text(json.dumps(trained(o)))
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    if rank == 0:  # after the files of all ranks
        checkpoints.seal(folder)


def restore(o: argparse.Namespace, model, optimizer, schedule) -> int:
    """Loads the checkpoint `start`, of any engine and number of ranks; its step."""
    chosen = [o.start]
    if dist.is_initialized():  # rank 0 chooses for all
        dist.broadcast_object_list(chosen)
    (folder,) = chosen
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    step, planned = checkpoints.step_of(folder), options_of(folder)["steps"]
    say(f"resumes from {folder}")
    if planned != o.steps:
        say(f"the learning rate, planned for {planned} steps, goes on as planned for {o.steps}")
    schedule.last_epoch = step - 1
    schedule.step()
    return step


def gathered(x: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks, equally many each."""
    if not dist.is_initialized():
        return x
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


@torch.no_grad()
def evaluate(model, loader: Loader) -> dict[str, float]:
    """NE and AUC on rows that were never trained on, and of the true probabilities if known.

    With --candidates also HR@k and NDCG@k: the shown item of each clicked row is ranked among items
    that are drawn without replacement, all of which may be liked; itself it meets but once.
    """
    o, world, scored, ranked = loader.o, loader.source.world, [], []

    def score(batch: Batch) -> torch.Tensor:
        with options.autocast(loader.device):
            return model(batch).float()

    for step in range(HELD_OUT, HELD_OUT + o.eval_batches):
        batch, _ = loader.batch(step)
        known = [batch.label] if batch.logit is None else [batch.label, batch.logit]
        scored.append(gathered(torch.stack((score(batch), *known), 1)))
        if o.candidates:
            items = np.random.default_rng([o.seed, step]).permutation(world.items)[: o.candidates]
            others = [
                score(batch.showing(item, world)).masked_fill(batch.shown == item, -torch.inf)
                for item in items.tolist()
            ]
            ranked.append(gathered(torch.stack(others, 1)))
    logit, label, *truth = torch.cat(scored).unbind(1)
    scores = {}
    for name, each in (("", logit), ("bayes_", *truth))[: 1 + len(truth)]:
        loss = bayes_loss(each) if name else F.binary_cross_entropy_with_logits(each, label)
        scores[f"{name}ne"] = normalized_entropy(loss.item(), label)
        scores[f"{name}auc"] = auc(each, label)
    if o.candidates:
        clicked = label == 1
        scores["hr"], scores["ndcg"] = hit_rate_and_ndcg(
            logit[clicked], torch.cat(ranked)[clicked], o.k
        )
    return scores


def told(step: int, o: argparse.Namespace, scores: dict[str, float]) -> str:
    """A line of what `evaluate` found."""

    def part(name: str, key: str) -> str:
        bayes = f" (Bayes {scores['bayes_' + key]:.4f})" if f"bayes_{key}" in scores else ""
        return f"{name} {scores[key]:.4f}{bayes}"

    names = {"NE": "ne", "AUC": "auc", f"HR@{o.k}": "hr", f"NDCG@{o.k}": "ndcg"}
    parts = [part(name, key) for name, key in names.items() if key in scores]
    return f"step {step}, held out: {', '.join(parts)}"


def network(o: argparse.Namespace, loader: Loader, device: torch.device) -> torch.nn.Module:
    """The model, compiled and wrapped by the engine as told."""
    torch.manual_seed(o.seed)
    model = build(options.config_of(o, o.attention), loader.source.world).to(device)
    if o.engine == "fsdp2":
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    if o.compile:
        model.compile(backend=o.compile)
    if o.engine == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    return model


def train(o: argparse.Namespace, rank: int, ranks: int, device: torch.device) -> dict:
    """Trains as told; returns what `--out` gets."""
    loader, config = Loader(o, rank, ranks, device), options.config_of(o, o.attention)
    flops, peak = options.flops_of(config), options.peak_of(o, device)
    net = network(o, loader, device)
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(net.parameters(), lr=o.lr, weight_decay=1e-4, fused=fused)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, o.lr, o.steps)
    first = restore(o, net, optimizer, schedule) if o.resume else 0
    losses, curve, samples, work, clock = {}, {}, 0, 0.0, time.perf_counter()

    def judge(step: int) -> None:
        curve[step] = evaluate(net, loader)
        log.say(told(step, o, curve[step]))
        log.add(step, **curve[step])

    with logs.Logs(o, first, rank) as log:
        if o.eval_every and not first:
            judge(0)
            clock = time.perf_counter()
        for step in range(first, o.steps):
            batch, lengths = loader.batch(step)
            with options.autocast(device):
                logit = net(batch)
            loss = F.binary_cross_entropy_with_logits(logit.float(), batch.label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            lr = schedule.get_last_lr()[0]
            schedule.step()
            log.bar.update(o.batch)
            samples, work, done = samples + o.batch, work + flops(lengths), step + 1
            if done % o.log_every == 0 or done == o.steps:
                # Ranks have equally many rows: the mean of their means is the mean.
                losses[done] = gathered(loss.detach()[None]).mean().item()
                seconds = time.perf_counter() - clock
                log.say(progress(done, losses[done], samples, work, seconds, ranks, peak, device))
                log.add(done, loss=losses[done], rows_per_s=samples / seconds, lr=lr)
                samples, work, clock = 0, 0.0, time.perf_counter()
            if o.checkpoint and (done % o.save_every == 0 or done == o.steps):
                save(o, done, rank, net, optimizer)
            if o.eval_every and done % o.eval_every == 0 and done < o.steps:
                began = time.perf_counter()
                judge(done)
                clock += time.perf_counter() - began  # which is not training
        judge(o.steps)
    return {"losses": losses, "curve": curve, **curve[o.steps]}


def progress(step, loss, samples, work, seconds, ranks, peak, device) -> str:
    """A line of the log. Its time is that of everything: data, checkpoints, at first compiling."""
    rate = work / seconds / ranks / 1e12
    if device.type == "cuda":
        memory = torch.cuda.max_memory_allocated(device) / 2**30
    else:
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    mfu = "" if peak is None else f", MFU {rate / peak:.1%}"
    return (
        f"step {step}: loss {loss:.4f}, {samples / seconds:,.0f} samples/s, {rate:.3g} TFLOP/s a "
        f"device{mfu}, peak memory {memory:.1f} GiB"
    )


def join(o: argparse.Namespace) -> tuple[int, int, torch.device]:
    """Starts the engine's group of processes: the rank, how many there are, its device."""
    options.use_threads(o)
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = options.device_of(o, int(os.environ.get("LOCAL_RANK", 0)))
    options.check_attention(o.attention, device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if o.engine != "single":
        kind = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(kind, timeout=timedelta(seconds=o.timeout))
    return rank, ranks, device


def main(argv: list[str] | None = None) -> dict:
    o = arguments(argv)
    rank, ranks, device = join(o)
    try:
        results = train(o, rank, ranks, device)
    except RuntimeError as error:
        if o.engine == "single":
            raise
        traceback.print_exc()  # and no farewell to the group, which might wait for lost ranks
        print(f"rank {rank} of {ranks} stops: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()
    if o.out and rank == 0:
        Path(o.out).write_text(json.dumps({"options": vars(o), **results}, default=str, indent=1))
    return results


if __name__ == "__main__":
    main()
