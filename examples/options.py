"""Command-line options of train.py and step.py, and what follows from them."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from models import BLOCK, EMBEDDINGS, MIXERS, MODELS, NORMS, STREAMS, WINDOW, Config, build
from ratings import Ratings
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from data import LAWS, ROWS, Clicks, Traffic, World, make_batch

SIZES = {
    "base": {"dim": 512, "heads": 4, "tokens": 8, "keys": 256, "seeds": 64},
    "tiny": {"dim": 32, "heads": 2, "tokens": 4, "keys": 16, "seeds": 4},
}
PEAKS = {"H100": 989, "H200": 989, "B200": 2250, "A100": 312}
"""Dense bf16 TFLOP/s by the makers' data sheets, SXM boards."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; `@FILE` stands for the options in a file, # for comments."""

    def __init__(self, **options):
        super().__init__(fromfile_prefix_chars="@", **options)

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}\n")

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        return shlex.split(arg_line, comments=True)


def parser(description: str) -> Parser:
    """The options of a model and its data."""
    options = Parser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    options.add_argument("--model", choices=MODELS, default="kunlun")
    options.add_argument(
        "--mixer", choices=MIXERS, default="gdpa", help="KunlunLite's self-attention"
    )
    options.add_argument("--size", choices=SIZES, default="base", help="width, heads, keys, seeds")
    options.add_argument(
        "--norms", choices=NORMS, default="eager",
        help="KunlunLite's: PyTorch's, or fused with residual adds, and of q and k in place",
    )  # fmt: skip
    options.add_argument(
        "--stream", choices=STREAMS, default="fp32", help="dtype of the residual stream"
    )
    options.add_argument(
        "--embedding", choices=EMBEDDINGS, default="matmul",
        help="rows of small tables: summed by a matmul, or looked up",
    )  # fmt: skip
    options.add_argument("--layers", type=positive, default=2)
    options.add_argument("--law", choices=LAWS, default="half", help="lengths of histories")
    options.add_argument(
        "--rows", choices=ROWS, default="users", help="a row is a user or an event"
    )
    options.add_argument("--cold", type=share, default=0.0, help="share of rows without history")
    options.add_argument("--max-seqlen", type=positive, default=1024)
    options.add_argument(
        "--batch", type=positive, default=1152, help="rows of a step, of all ranks"
    )
    options.add_argument("--items", type=positive, default=20_000)
    options.add_argument("--topics", type=positive, default=16)
    options.add_argument("--seed", type=int, default=7)
    options.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is one"
    )
    options.add_argument(
        "--threads", type=positive,
        help="of PyTorch on the CPU; default: OMP_NUM_THREADS, else 1 with --size tiny, whose "
        "operators are so small that more threads only wait, else PyTorch's, one per core",
    )  # fmt: skip
    options.add_argument("--recompute", action="store_true", help="activation checkpointing")
    options.add_argument(
        "--compile", nargs="?", const="inductor", metavar="BACKEND", help="torch.compile"
    )
    options.add_argument("--peak-tflops", type=float, help="of one device, for MFU")
    options.add_argument("--out", metavar="FILE", help="write results as JSON")
    return options


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be a number in [0, 1], got {text!r}")
    return value


def use_threads(o: argparse.Namespace) -> None:
    """Sets PyTorch's threads. Threads that wait for each other spin: on two cores that others use
    too, a tiny model took 92 s with two threads and 8 s with one."""
    if o.threads or (o.size == "tiny" and "OMP_NUM_THREADS" not in os.environ):
        torch.set_num_threads(o.threads or 1)


def device_of(o: argparse.Namespace, rank: int = 0) -> torch.device:
    kind = o.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda needs a CUDA device, and PyTorch finds none")
    return torch.device(kind, rank) if kind == "cuda" else torch.device(kind)


def check_attention(attention: str, device: torch.device) -> None:
    if attention in ("v1", "fa2_varlen") and device.type != "cuda":
        sys.exit(f"--attention {attention} needs a CUDA device, got {device.type}")


def config_of(o: argparse.Namespace, attention: str) -> Config:
    if o.norms == "fused" and o.model == "hstu":
        sys.exit("--norms fused needs --model kunlun, got hstu, which has LayerNorm")
    return Config(
        model=o.model, mixer=o.mixer, attention=attention, layers=o.layers,
        max_seqlen=o.max_seqlen, recompute=o.recompute, norms=o.norms, stream=o.stream,
        embedding=o.embedding, **SIZES[o.size],
    )  # fmt: skip


def world_of(o: argparse.Namespace) -> World:
    if o.items < o.topics or o.topics < 4:
        sys.exit(f"--topics must be 4 .. {o.items} (--items), got {o.topics}")
    return World(o.items, o.topics, seed=o.seed)


def traffic_of(o: argparse.Namespace) -> Traffic:
    least = getattr(LAWS[o.law], "minimum", 1)
    if o.max_seqlen < least:
        sys.exit(f"--max-seqlen must be at least {least} with --law {o.law}, got {o.max_seqlen}")
    return Traffic(o.law, o.max_seqlen, o.rows, o.cold, o.seed)


def source_of(o: argparse.Namespace) -> Clicks | Ratings:
    """The rows to train on: of --ratings, else generated."""
    if o.ratings is None:
        return Clicks(world_of(o), traffic_of(o))
    try:
        return Ratings(o.ratings, o.max_seqlen, o.like, o.negatives, o.seed)
    except ValueError as error:
        sys.exit(f"--ratings: {error}")


def autocast(device: torch.device) -> torch.autocast:
    """bf16 on a GPU; fp32 on a CPU, where bf16 is no faster."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def pairs(c: Config, lengths: np.ndarray) -> np.ndarray:
    """Pairs of tokens that count in self-attention, of each length."""
    n = np.asarray(lengths, dtype=np.float64)
    if c.model == "hstu":
        return (n + 1) * (n + 2) / 2
    if c.mixer == "block":
        return n // BLOCK * BLOCK**2 + (n % BLOCK) ** 2
    reach = (
        np.minimum(WINDOW, np.maximum(n - 1, 0)) if c.mixer == "window" else np.maximum(n - 1, 0)
    )
    return n + reach * (2 * n - 1 - reach)


def flops_of(c: Config) -> Callable[[np.ndarray], float]:
    """FLOPs of forward and backward, as a function of the lengths of a batch: of matmuls, of pairs
    that count, whatever an attention pads, whatever is computed again, and without lookups.

    A row has a part of its own, one per token and one per pair: three rows that FlopCounterMode
    counts on a CPU tell how much.
    """
    world = World(items=4, topics=4)
    model = build(replace(c, attention="gdpa", recompute=False, embedding="lookups"), world)
    probes = np.array([0, 1, 2 * BLOCK])
    flops = []
    for n in probes:
        batch = make_batch(world, np.array([n]), np.array([0]), 0)
        with FlopCounterMode(display=False) as counter:
            F.binary_cross_entropy_with_logits(model(batch), batch.label).backward()
        flops.append(counter.get_total_flops())
    parts = np.linalg.solve(np.stack([np.ones(3), probes, pairs(c, probes)], 1), flops)
    return lambda lengths: float(parts @ [len(lengths), lengths.sum(), pairs(c, lengths).sum()])


def peak_of(o: argparse.Namespace, device: torch.device) -> float | None:
    """TFLOP/s of one device, None if nobody told."""
    if o.peak_tflops or device.type != "cuda":
        return o.peak_tflops
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAKS.items() if key in name), None)
