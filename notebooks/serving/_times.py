"""Times of serving on a GPU: keys split between programs, candidates over a history, requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from _lib import steps
from gdpa_kernels import Lengths, Mask, gdpa
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.kernels import v8_own_waits as v8
from gdpa_kernels.serving import HistoryRules, PagedCache, score
from gdpa_lab.measuring import timing

HEADS, HEAD_DIM, LAYERS = 4, 128, 8
SPLITS = (
    (4, 64, 8192), (1, 64, 16384), (8, 64, 4096), (16, 64, 1024), (1, 2048, 16384), (1, 512, 4096),
    (4, 512, 4096), (8, 1, 4096),
)  # fmt: skip
"""Users, rows and keys of each: too few tiles for all multiprocessors."""
SCORES = (10, 6300, 2048), (32, 1024, 2048), (4, 4096, 100), (1, 16384, 2048)
"""Users, events and candidates of each; the first are MLPerf's for DLRMv3."""
WAYS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "pages of 64": (64, {}), "pages of 128": (128, {}), "gathered": (32, {}),
    "one call of v1": (64, {"impl": "v1_tiled", "in_one_call": True}),
}  # fmt: skip
"""Tokens of a page, which are gathered if too few for a tile, and options of `score`."""
REQUESTS = (20_000, 20.0), (20_000, 30.0), (8_000, 10.0)
"""Pages of 64 tokens and requests a second; with 8,000 pages not all users fit."""
SERVE = {
    "layers": 5, "dim": 512, "heads": 4, "history": 16384, "events": 8, "candidates": 2048,
    "users": 64, "batch": 10, "requests": 200, "page-size": 64, "device": "cuda",
}  # fmt: skip
ALLOWED = 8e-3
"""Greatest error of an output in bf16, relative to the largest element of the fp64 result."""


def measure(session: Any, _: object) -> None:
    """Fill the tables "splits" and "scores", microseconds of a call, and "requests", latencies."""
    device = session.device
    split = {}
    for users, rows, keys in SPLITS:
        for pieces, us in _splits(users, rows, keys, device).items():
            split[users, rows, keys, pieces] = us
    session.tabulate("splits", ("users", "rows", "keys", "pieces"), split)
    scored = {(*size, way): us for size in SCORES for way, us in _scores(*size, device).items()}
    session.tabulate("scores", ("users", "events", "candidates", "way"), scored)
    served = {}
    for pages, qps in REQUESTS:
        options = SERVE | {"pages": pages, "qps": qps}
        (row,) = steps.run("serve", *(x for k, v in options.items() for x in (f"--{k}", v)))
        key = pages, qps, row["served_qps"], row["hit_ratio"]
        served[key] = [1e3 * ms for ms in row["latencies_ms"]]
    session.tabulate("requests", ("pages", "qps", "served_qps", "hit_ratio"), served)


def _splits(users: int, rows: int, keys: int, device: torch.device) -> dict[int, list[float]]:
    """Microseconds of forward v8 by the pieces of its keys: one, and as many as it chooses."""
    ends = [torch.arange(users + 1, dtype=torch.int32, device=device) * n for n in (rows, keys)]
    batches = []
    for _ in range(LAYERS):
        q, k, v = (_draw(users * n, device) for n in (rows, keys, keys))
        batches.append(
            Batch(q, k, v, *ends, rows, keys, ("gelu_tanh",), HEAD_DIM**-0.5, 1 / keys, mask=Mask())
        )
    first = batches[0]
    right = gdpa(
        *(x[:n].double() for x, n in ((first.q, rows), (first.k, keys), (first.v, keys))),
        *(x[:2] for x in ends), rows, keys, output_scale=1 / keys, impl="reference",
    )  # fmt: skip
    calls = {}
    chosen = v8.default_config(first)
    for config in (replace(chosen, splits=1), chosen):
        work_list = v8.work_list_recipe(first, config).make(*first.offsets)
        run = partial(v8.forward, config=config, work_list=work_list)
        _check(f"{config.splits} pieces", run(first)[:rows], right)
        calls[config.splits] = [partial(run, batch) for batch in batches]
    return _times(calls, device)


def _scores(
    users: int, events: int, candidates: int, device: torch.device
) -> dict[str, list[float]]:
    """Microseconds of a layer's `score`, by the way in which pages are read."""
    q, k, v = (_draw(users * candidates, device) for _ in range(3))
    old = [_draw(users * events, device) for _ in range(2)]
    ends, options = Lengths.uniform(users, candidates, device), {"activation": "silu"}
    options["output_scale"] = 1 / (events + candidates)
    few = min(candidates, 64)  # a candidate sees its user's history and itself
    both = [torch.cat([x[:events], y[:few]]).double() for x, y in zip(old, (k, v), strict=True)]
    ends_of_few = (torch.tensor([0, n], device=device) for n in (few, events + few))
    right = gdpa(
        q[:few].double(), *both, *ends_of_few, few, events + few, impl="reference", **options,
        mask=Mask("lower_right", num_targets=torch.tensor([few], device=device)),
    )  # fmt: skip
    calls = {}
    for way, (page_size, chosen) in WAYS.items():
        pages = users * -(-events // page_size)
        cache = PagedCache(
            HistoryRules(LAYERS), pages, page_size, HEADS, HEAD_DIM, dtype=q.dtype, device=device
        )
        new = cache.append([*range(users)], [events] * users)
        for layer in range(LAYERS):
            cache.write(layer, new, *old)
        whole = cache.pages([*range(users)])
        run = partial(score, q, k, v, ends, candidates, cache, history=whole, **options, **chosen)
        _check(way, run(layer=0)[:few], right)
        calls[way] = [partial(run, layer=layer) for layer in range(LAYERS)]
    return _times(calls, device)


def _draw(rows: int, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)


def _check(name: str, out: torch.Tensor, right: torch.Tensor) -> None:
    error = float((out.double() - right).abs().max() / right.abs().max())
    if not error <= ALLOWED:
        raise ValueError(f"{name}: error must be at most {ALLOWED} of the largest, got {error:.1e}")


def _times(
    calls: Mapping[Any, Sequence[Callable[[], object]]], device: torch.device
) -> dict[Any, list[float]]:
    """Microseconds of one of several calls, which a CUDA graph makes one after the other."""
    graphs = {name: _captured(several) for name, several in calls.items()}
    samples = timing.sample_kernels({name: x.replay for name, x in graphs.items()}, device)
    return {name: [x / len(calls[name]) for x in us] for name, us in samples.items()}


def _captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph of the calls, which have been made once before."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph
