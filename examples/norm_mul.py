"""Times `norm_mul` beside PyTorch's operators and what torch.compile makes of them.

python examples/norm_mul.py --tokens 131072 --width 512 --form stu --out norm_mul.json

Prints, and writes to --out, for each way and direction the median device time of isolated calls,
the bytes that one kernel would move, and their rate. Checks the results against fp64 first. Forms:
stu, `concat(u, a, u norm(a))` with SiLU of u; nvidia, `u norm(a)`.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import torch
from options import Parser, positive
from torch.nn import functional as F

from gdpa_kernels.norms.norm_mul import norm_mul
from gdpa_lab.measuring.timing import sample_kernels

FORMS = {"stu": {"concat": ("u", "a", "un"), "silu": True}, "nvidia": {}}


def by_pytorch(x, u, weight, bias, concat=("un",), silu=False):
    gate = F.silu(u) if silu else u
    n = F.layer_norm(x, x.shape[1:], weight.to(x.dtype), bias.to(x.dtype), 1e-6)
    parts = {"u": gate, "a": x, "un": gate * n}
    return torch.cat([parts[name] for name in concat], 1)


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--tokens", type=positive, default=131072)
    parser.add_argument("--width", type=positive, default=512)
    parser.add_argument("--form", choices=FORMS, default="stu")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    form, width, device = FORMS[options.form], options.width, options.device
    torch.manual_seed(0)
    x, wide = (
        torch.randn(options.tokens, n * width, device=device).bfloat16().requires_grad_()
        for n in (1, 4)
    )
    u = wide[:, :width]  # a slice of uvqk
    weight, bias = (torch.ones(width, device=device, requires_grad=True) for _ in range(2))
    parts = len(form.get("concat", ("un",)))
    grad = torch.randn(options.tokens, parts * width, device=device).bfloat16()
    ways = {
        "ours": norm_mul, "eager": by_pytorch, "torch.compile": torch.compile(by_pytorch),
    }  # fmt: skip
    few = [t[:256].double() for t in (x, u)]
    exact = by_pytorch(*few, weight.double(), bias.double(), **form)
    calls, outs = {}, []
    for name, way in ways.items():
        out = way(x, u, weight, bias, **form)
        outs.append(out)
        error = float((out[:256].double() - exact).abs().max() / exact.abs().max())
        assert error < 2**-6, f"{name}: {error}"
        calls[name, "forward"] = lambda way=way: way(x, u, weight, bias, **form)
        calls[name, "backward"] = lambda out=out: torch.autograd.grad(
            out, (x, wide, weight, bias), grad, retain_graph=True
        )
    moved = {"forward": 2 + parts, "backward": 4 + parts}
    times = sample_kernels({" ".join(key): call for key, call in calls.items()}, device)
    rows = []
    for (name, direction), samples in zip(calls, times.values(), strict=True):
        size = moved[direction] * x.nbytes
        time = statistics.median(samples)
        rows.append({"way": name, "direction": direction, "time_us": time, "bytes": size,
                     "TB/s": size / time / 1e6, "samples_us": samples})  # fmt: skip
        print(f"{name:14} {direction:9} {time:9.1f} us {size / time / 1e6:6.2f} TB/s")
    if options.out:
        report = {"device": torch.cuda.get_device_name(device), "rows": rows}
        options.out.write_text(json.dumps(report | {"form": options.form}))


if __name__ == "__main__":
    main()
