"""Where the time of a training step goes, attention by attention.

python examples/step.py --law ml25m --rows events --attentions gdpa v1 fa2_varlen padded_sdpa

Prints, and writes to --out, for each attention: the median time of a step and of its forward pass,
backward pass and optimizer; that of its self-attention alone, forward and backward, on the same
lengths; the times that these are medians of; and the step's time on the device by kind of
operator, as PyTorch's profiler counts it.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from pathlib import Path

import options
import torch
from attentions import ATTENTIONS, OURS, blocks
from models import BLOCK, WINDOW, Config, build
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from data import Batch, make_batch
from gdpa_kernels import block_attention

KINDS = {
    "attention": ("::gdpa_", "block_attention", "_flash_attention", "_efficient_attention",
                  "_cudnn_attention", "_scaled_dot_product", "varlen_attn"),
    "matmul": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
    "embedding": ("aten::embedding", "embedding_dense_backward"),
    "norm": ("_norm", "aten::rsqrt"),
    "optimizer": ("_fused_adamw", "_foreach", "Optimizer"),
    "compiled": ("triton_", "CompiledFunction", "Torch-Compiled", "inductor"),
}  # fmt: skip
"""Kind of operator: parts of names of PyTorch's operators, the first that fits. A fused kernel is
named after all that it does. What is in none is "other"."""


class Clock:
    """Seconds between marks, on the device."""

    def __init__(self, device: torch.device):
        self.cuda, self.marks = device.type == "cuda", []

    def mark(self) -> None:
        if not self.cuda:
            self.marks.append(time.perf_counter())
            return
        self.marks.append(torch.cuda.Event(enable_timing=True))
        self.marks[-1].record()

    def seconds(self) -> list[float]:
        if not self.cuda:
            return [b - a for a, b in zip(self.marks, self.marks[1:], strict=False)]
        self.marks[-1].synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in zip(self.marks, self.marks[1:], strict=False)]


def step(model, optimizer, batch: Batch, mark=lambda: None) -> None:
    mark()
    with options.autocast(batch.items.device):
        logit = model(batch)
    loss = F.binary_cross_entropy_with_logits(logit.float(), batch.label)
    mark()
    optimizer.zero_grad()
    loss.backward()
    mark()
    optimizer.step()
    mark()


def attend(c: Config):
    """Self-attention of a model: (q, k, v, lengths) to its output, without projections."""
    options_of = {"scale": (c.dim // c.heads) ** -0.5}
    attention = ATTENTIONS[c.attention]
    if c.model == "hstu":
        options_of |= {"activation": "silu", "output_scale": 1 / c.max_seqlen, "causal": True}
    elif c.mixer == "block" and c.attention in OURS:
        ours = OURS[c.attention]["block_attention"]
        return lambda q, k, v, n: block_attention(q, k, v, n, block_size=BLOCK, **ours)
    elif c.mixer == "block":
        return lambda q, k, v, n: attention(q, k, v, *[blocks(n, BLOCK)] * 2, **options_of)
    else:
        options_of |= {"activation": "gelu_tanh", "output_scale": c.max_seqlen**-0.5}
        options_of["window"] = WINDOW if c.mixer == "window" else None
    return lambda q, k, v, n: attention(q, k, v, n, n, **options_of)


def alone(c: Config, batch: Batch, repeats: int, warmup: int) -> list[float]:
    """Seconds of self-attention, forward and backward, each time."""
    device = batch.items.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = batch.lengths.total, c.heads, c.dim // c.heads
    q, k, v, grad = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    inputs, function, clocks = [x.requires_grad_() for x in (q, k, v)], attend(c), []
    for _ in range(warmup + repeats):
        clock = Clock(device)
        clock.mark()
        torch.autograd.grad(function(*inputs, batch.lengths), inputs, grad)
        clock.mark()
        clocks.append(clock)
    return [clock.seconds()[0] for clock in clocks[warmup:]]


def kinds(run, batches: list[Batch]) -> dict[str, float]:
    """Seconds of a step by kind of operator: on a GPU of its kernels, else of the CPU."""
    cuda = batches[0].items.is_cuda
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda) as profiler:
        for batch in batches:
            run(batch)
    seconds: Counter[str] = Counter()
    for event in profiler.events():
        # Operators only: a kernel's time is that of the operator that launched it.
        if event.device_type == torch.autograd.DeviceType.CPU:
            time_us = event.self_device_time_total if cuda else event.self_cpu_time_total
            names = (kind for kind, parts in KINDS.items() if any(p in event.name for p in parts))
            seconds[next(names, "other")] += time_us / 1e6 / len(batches)
    return dict(seconds)


def measure(o, attention: str, device: torch.device) -> dict:
    """The row of one attention."""
    config, world, traffic = (
        options.config_of(o, attention),
        options.world_of(o),
        options.traffic_of(o),
    )
    torch.manual_seed(o.seed)
    model = build(config, world).to(device)
    if o.compile:
        model.compile(backend=o.compile)
    optimizer = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda")
    longest, batches, lengths = o.max_seqlen if o.compile else None, [], []
    for i in range(o.warmup + o.repeats):
        lengths.append(traffic.sample(i, o.batch))
        rows = torch.arange(o.batch).numpy()
        batches.append(make_batch(world, lengths[-1], rows, i, device, longest))
        if o.mixer == "block" and attention not in OURS:
            blocks(batches[-1].lengths, BLOCK)  # untimed: it waits for the device
    clocks = []
    for batch in batches:
        clocks.append(Clock(device))
        step(model, optimizer, batch, clocks[-1].mark)
    parts = [clock.seconds() for clock in clocks[o.warmup :]]
    seconds = [sum(each) for each in parts]
    samples = {"step": seconds}
    for i, name in enumerate(("forward", "backward", "optimizer")):
        samples[name] = [each[i] for each in parts]
    samples["attention_alone"] = alone(config, batches[-1], o.repeats, o.warmup)
    timed = lengths[o.warmup :]
    work = statistics.median(map(options.flops_of(config), timed)) / 1e12
    row = {
        "attention": attention, "samples_s": samples,
        **{f"{name}_s": statistics.median(each) for name, each in samples.items()},
        "samples_per_s": o.batch / statistics.median(seconds),
        "tflops": work / statistics.median(seconds), "peak_tflops": options.peak_of(o, device),
        "tokens": statistics.median(int(n.sum()) for n in timed),
        "pairs": statistics.median(options.pairs(config, n).sum().item() for n in timed),
    }  # fmt: skip
    if device.type == "cuda":
        row["peak_memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    row["kinds_s"] = kinds(lambda batch: step(model, optimizer, batch), batches[:3])
    return row


def main(argv: list[str] | None = None) -> list[dict]:
    p = options.parser("Time a training step part by part.")
    p.add_argument("--attentions", nargs="+", choices=ATTENTIONS, default=["gdpa"], metavar="NAME")
    p.add_argument("--repeats", type=options.positive, default=10, help="timed steps")
    p.add_argument("--warmup", type=options.positive, default=3, help="steps before them")
    o = p.parse_args(argv)
    options.use_threads(o)
    device, rows = options.device_of(o), []
    for attention in o.attentions:
        options.check_attention(attention, device)
    for attention in o.attentions:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        rows.append(measure(o, attention, device))
        times = {k[:-2]: f"{1e3 * v:.2f} ms" for k, v in rows[-1].items() if isinstance(v, float)
                 and k.endswith("_s") and not k.startswith("samples")}  # fmt: skip
        print(attention, *(f"{k} {v}" for k, v in times.items()), sep=", ")
        shares = sorted(rows[-1]["kinds_s"].items(), key=lambda each: -each[1])
        print("   by kind:", ", ".join(f"{k} {1e3 * v:.2f} ms" for k, v in shares), flush=True)
    if o.out:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        report = {"device": name, "torch": torch.__version__, "options": vars(o), "rows": rows}
        Path(o.out).write_text(json.dumps(report, indent=1))
    return rows


if __name__ == "__main__":
    main()
