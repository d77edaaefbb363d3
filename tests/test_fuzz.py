"""Calls drawn at random against the same in fp64: operators, rungs and layers.

A few in the quick tier, more in the sweeps, many more at night.
"""

import random
from functools import partial

import pytest
import torch

import tritonemu
from gdpa_kernels import (
    PFFN,
    PMA,
    BlockAttention,
    GDPASelfAttention,
    Lengths,
    RelativeBias,
    block_attention,
    gdpa,
)
from gdpa_kernels.calling import ladder
from gdpa_kernels.gdpa.bias import hstu_thresholds
from gdpa_kernels.serving import PagedCache, score
from gdpa_kernels.serving.validity import HistoryRules
from gdpa_lab.measuring.inputs import cu_seqlens
from gdpa_lab.measuring.testing import compare
from tests.calls import full_of_nan
from tests.fuzzing import (
    ACTIVATIONS,
    attend,
    attend_blocks,
    composed,
    jagged,
    meta,
    nvidia,
    turned,
)
from tests.gdpa.test_registration import registered_activations
from tests.tiers import sweep

FUNCTIONS = ACTIVATIONS | {"sigmoid": torch.sigmoid, "elu": torch.nn.functional.elu}
LENGTHS = (0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
DTYPES = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)
STREAMS = ("b6_pair_stream", "b7_split_stream")
AT_NIGHT = (pytest.param(seed, marks=pytest.mark.nightly) for seed in range(24, 400))
SEEDS = [*range(6), *map(sweep, range(6, 24)), *AT_NIGHT]


@pytest.fixture
def draw(request, seed) -> random.Random:
    return random.Random(f"{request.config.option.seed} {request.function.__name__} {seed}")


LAYOUTS = {
    "contiguous": lambda n, h, d: torch.randn(n, h, d),
    "heads first": lambda n, h, d: torch.randn(h, n, d).transpose(0, 1),
    "dims first": lambda n, h, d: torch.randn(n, d, h).transpose(1, 2),
    "every other row": lambda n, h, d: torch.randn(2 * n, h, d)[::2],
    "every other dim": lambda n, h, d: torch.randn(n, h, 2 * d)[..., ::2],
    "odd address": lambda n, h, d: torch.randn(n * h * d + 1)[1:].view(n, h, d),
    "wide rows": lambda n, h, d: torch.randn(n, h, d + 8)[..., :d],
    "one row": lambda n, h, d: torch.randn(1, h, d).expand(n, h, d),
}


def tensor(draw, dtype, *shape) -> torch.Tensor:
    layout = draw.choice(("contiguous",) * 6 + tuple(LAYOUTS))
    made = LAYOUTS[layout](*shape)
    like = torch.empty_strided(made.shape, made.stride(), dtype=dtype)
    return made.to(dtype) if 0 in made.stride() else like.copy_(made)


def arch_of(*impls: str) -> str:
    return "sm_100" if any(impl.startswith("b") for impl in impls) else "sm_90"


def implementation(draw, operator: str, direction: str, tensors) -> str:
    """Mostly one that takes these tensors."""
    rungs = [rung for rung in ladder.LADDERS[operator] if direction in rung.directions]
    if draw.random() < 0.9:
        rungs = [rung for rung in rungs if rung.requires.tensors_problem(*tensors) is None]
    return draw.choice(("auto", *(rung.impl for rung in rungs)))


def differentiate(call, tensors, grad) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = call(*leaves)
    return out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))


def check(call, definition, exact, tensors, names=("out", "dq", "dk", "dv")) -> None:
    """Hold a call to twice PyTorch's error, plus a rounding of the largest value in the dtype of
    the first tensor: two in fp32, where another order of sums is all of the error."""
    grad = torch.randn_like(exact(*(x.double() for x in tensors))).to(tensors[0].dtype)
    found = differentiate(call, tensors, grad)
    wanted = differentiate(exact, [x.double() for x in tensors], grad.double())
    baseline = differentiate(definition, tensors, grad)
    for name, *three in zip(names, found, wanted, baseline, strict=True):
        check_one(name, tensors[0].dtype, *three)


def check_one(name: str, dtype: torch.dtype, actual, expected, low) -> None:
    """`check` of one result, of a call in `dtype`."""
    got = compare(name=name, actual=actual, expected=expected, baseline=low)
    unit = torch.finfo(dtype).eps * (2 if dtype == torch.float32 else 1)
    largest = expected.abs().max().item() if expected.numel() else 0.0
    assert got.max_abs <= got.max_abs_budget + 2 * unit * max(largest, 1.0), str(got)


@pytest.mark.parametrize("seed", SEEDS)
def test_gdpa(seed, draw):
    dtype, batch = draw.choice(DTYPES), draw.choice((1, 2, 3))
    heads = draw.choice((1, 2, 4))
    kv_heads = draw.choice([h for h in (1, 2, 4) if heads % h == 0])
    head_dim = draw.choice((16, 40, 64, 64, 128, 128, 192, 256))
    keys = draw.choices(LENGTHS, k=batch)
    rows = draw.choice((keys, draw.choices(LENGTHS, k=batch)))
    shared = draw.random() < 0.15
    rows = rows[:1] * batch if shared else rows
    names = tuple(draw.choices(list(ACTIVATIONS), k=draw.choice((1, heads))))
    scale = draw.choice((None, 0.2, -0.1))
    options = {
        "output_scale": draw.choice((1.0, 0.1, -2.0)),
        "causal": draw.choices((False, "upper_left", "lower_right"), (7, 2, 1))[0],
        "window": draw.choice((None, None, 0, 3, 70)),
    }
    total = rows[0] if shared else sum(rows)
    tensors = [tensor(draw, dtype, total, heads, head_dim)]
    tensors += [tensor(draw, dtype, sum(keys), kv_heads, head_dim) for _ in "kv"]
    impl = implementation(draw, "gdpa", "forward", tensors)
    backward = implementation(draw, "gdpa", "backward", tensors)
    if arch_of(impl) != arch_of(backward):
        backward = "v1_tiled_backward"
    ends = None if shared else cu_seqlens(rows, "cpu"), cu_seqlens(keys, "cpu")
    longest = max(rows) + draw.choice((0, 0, 5)) * (not shared), max(keys) + draw.choice((0, 5))
    if draw.random() < 0.3:
        pairs = zip(ends, longest, strict=True)
        ends = tuple(e if e is None else Lengths(e, most) for e, most in pairs)
        longest = longest[0] if shared else None, None

    def call(q, k, v, **chosen):
        return gdpa(q, k, v, *ends, *longest, activation=names, scale=scale, **options, **chosen)

    each = partial(attend, names=names, scale=head_dim**-0.5 if scale is None else scale, **options)
    exact = partial(jagged, each, keys, lengths_q=None if shared else rows)
    with tritonemu.enabled(arch_of(impl, backward), multiprocessors=draw.choice((1, 2, 3, 132))):
        try:
            chosen = {"impl": impl, "backward_impl": backward}
            check(partial(call, **chosen), partial(call, impl="reference"), exact, tensors)
        except NotImplementedError as error:
            assert " needs " in str(error) and ", got " in str(error)


def pairs(draw, lengths: list[int]) -> tuple[dict, list[int], list[torch.Tensor]]:
    """Masks: options of a call, rows of each sequence, and which pairs count."""
    targets, contexts, full, group, own = [0] * len(lengths), [0] * len(lengths), 0, 1, False
    window = draw.choice((None, None, 0, 3, 40, 70))
    causal = draw.choice((False, "upper_left", "lower_right", True, "lower_right"))
    with_targets = causal is True or (causal == "lower_right" and draw.random() < 0.5)
    rows = lengths
    if causal == "lower_right":
        rows = [draw.randint(0, n) for n in lengths]
    elif not with_targets and draw.random() < 0.3:
        rows = draw.choices(LENGTHS, k=len(lengths))
    options = {"causal": causal, "window": window}
    if with_targets:
        targets = [draw.choice((0, 1, n, draw.randint(0, n))) if n else 0 for n in lengths]
        own = draw.random() < 0.5
        group = draw.choice((1, 2, 7, 50)) if own else 1
        full = draw.choice((0, 5, 40)) if window is not None and not own else 0
        some = zip(lengths, targets, strict=True)
        contexts = [draw.randint(0, n - m) * (draw.random() < 0.5) for n, m in some]
        options |= {
            "num_targets": torch.tensor(targets, dtype=torch.int32),
            "num_contexts": torch.tensor(contexts, dtype=torch.int32),
            "target_group_size": group, "full_rows": full,
            "target_ranks": "own" if own else "shared",
        }  # fmt: skip

    def sees(i: int, j: int, *sizes: int) -> bool:
        if with_targets:
            return nvidia(i, j, *sizes, window, group) if own else meta(i, j, *sizes, window, full)
        return (not causal or j <= i) and (window is None or abs(i - j) <= window)

    keeps = []
    for r, n, m, c in zip(rows, lengths, targets, contexts, strict=True):
        first = n - r if causal == "lower_right" else 0
        each = [[sees(i, j, n, m, c) for j in range(n)] for i in range(first, first + r)]
        keeps.append(torch.tensor(each, dtype=torch.bool).view(r, n))
    return options, rows, keeps


def distances(draw, heads: int, rows: list[int], lengths: list[int], causal) -> tuple:
    """A relative bias: (tables, which they are, its other fields, what each pair takes of them)."""
    which = draw.choice((("position_table",), ("time_table",), ("position_table", "time_table")))
    sizes = {"position_table": 2 * draw.choice((1, 5, 70, 200)) - 1,
             "time_table": draw.choice((1, 20, 129))}  # fmt: skip
    own = {name: draw.choice(((), (heads,))) for name in which}
    tables = [0.5 * torch.randn(*own[name], sizes[name]) for name in which]
    if which == ("position_table",):
        fields, apart = {}, None
    else:
        most = draw.choice((3, 100, 10**6))
        times, of_rows = (torch.randint(0, most, (sum(n),)) for n in (lengths, rows))
        fields, parts = {"timestamps": times}, times.split(lengths)
        if (rows == lengths or causal == "lower_right") and draw.random() < 0.5:
            fields["next_time"] = draw.random() < 0.7
            of_each = [
                part[(torch.arange(n - r, n) + fields["next_time"]).clamp(max=n - 1)]
                for part, n, r in zip(parts, lengths, rows, strict=True)
            ]
        else:
            fields["query_timestamps"], of_each = of_rows, of_rows.split(rows)
        apart = [a[:, None] - b for a, b in zip(of_each, parts, strict=True)]
        if draw.random() < 0.3:
            limits = torch.randint(0, most, (sizes["time_table"] - 1,)).sort().values
            fields["time_thresholds"] = limits
        else:
            limits = hstu_thresholds(sizes["time_table"])

    def added(sequence: int, found: dict[str, torch.Tensor]) -> torch.Tensor:
        """[1 or heads, rows, keys] of a sequence."""
        r, n, total = rows[sequence], lengths[sequence], 0
        first = n - r if causal == "lower_right" else 0
        if "position_table" in found:
            most = sizes["position_table"] // 2
            apart_by = torch.arange(n) - torch.arange(first, first + r)[:, None]
            total = total + found["position_table"][..., apart_by.clamp(-most, most) + most]
        if "time_table" in found:
            buckets = (apart[sequence].abs()[..., None] >= limits).sum(-1)
            total = total + found["time_table"][..., buckets]
        return total if total.dim() == 3 else total[None]

    return tables, which, fields, added


@pytest.mark.parametrize("seed", SEEDS)
def test_gdpa_options(seed, draw):
    """Masks of generative-recommenders ("shared") and of recsys-examples ("own"), sums, a relative
    bias, registered activations and a v of its own width, all in one call."""
    with registered_activations():
        options_of_one_call(draw)


def options_of_one_call(draw) -> None:
    dtype, heads = draw.choice(DTYPES), draw.choice((1, 2, 4))
    kv_heads = draw.choice([h for h in (1, 2, 4) if heads % h == 0])
    head_dim = draw.choice((16, 64, 64, 128, 128, 200))
    width = draw.choice((head_dim,) * 5 + (40,))
    lengths = draw.choices(LENGTHS, k=draw.choice((1, 2, 3)))
    masks, rows, keeps = pairs(draw, lengths)
    names = tuple(draw.choices([*FUNCTIONS], k=draw.choice((1, heads))))
    options = masks | {
        "activation": names, "scale": draw.choice((head_dim**-0.5, 0.2, -0.1)),
        "output_scale": draw.choice((1.0, 0.1, -2.0)), "precise": draw.random() < 0.2,
        "out_dtype": draw.choice((None, None, torch.float32)),
    }  # fmt: skip
    tensors = {"q": tensor(draw, dtype, sum(rows), heads, head_dim)}
    tensors["k"] = tensor(draw, dtype, sum(lengths), kv_heads, head_dim)
    tensors["v"] = tensor(draw, dtype, sum(lengths), kv_heads, width)
    if draw.random() < 0.4:
        kind = draw.choice((dtype, torch.float32))
        tensors["add_to"] = tensor(draw, kind, sum(rows), heads, width)
    tables, which, fields, added = [], (), {}, None
    if draw.random() < 0.4:
        tables, which, fields, added = distances(draw, heads, rows, lengths, masks["causal"])
    tensors |= dict(zip(which, tables, strict=True))

    def exact(*given):
        found = dict(zip(tensors, given, strict=True))
        outs = []
        parts = zip(found["q"].split(rows), *(found[n].split(lengths) for n in "kv"), strict=True)
        for i, three in enumerate(parts):
            outs.append(attend(
                *three, names=names, scale=options["scale"], output_scale=options["output_scale"],
                keep=keeps[i], functions=FUNCTIONS, bias=added and added(i, found),
            ))  # fmt: skip
        out = torch.cat(outs)
        return out + found["add_to"] if "add_to" in found else out

    ends, longest = (cu_seqlens(rows, "cpu"), cu_seqlens(lengths, "cpu")), (max(rows), max(lengths))
    if draw.random() < 0.3:
        ends, longest = tuple(map(Lengths, ends)), (None, None)

    def call(*given, **chosen):
        found = dict(zip(tensors, given, strict=True))
        bias = {name: found.pop(name) for name in which}
        q, k, v = (found.pop(name) for name in "qkv")
        given = RelativeBias(**bias, **fields) if bias else None
        return gdpa(q, k, v, *ends, *longest, **options, **found, relative_bias=given, **chosen)

    impls = ("auto", "v1_tiled", "v8_own_waits", "v8_own_waits", "v0_eager", *STREAMS)
    backward_impls = ("auto", "v1_tiled_backward", "v4_warp_specialized_backward")
    if tables:
        impls, backward_impls = ("auto", "v1_tiled", "v1_tiled", "v0_eager"), backward_impls[:2]
    impl = draw.choice(impls)
    backward = draw.choice(backward_impls[: 2 if impl in STREAMS else None])
    chosen = {"impl": impl, "backward_impl": backward}
    multiprocessors = draw.choice((1, 2, 132))

    def run(**chosen) -> None:
        with tritonemu.enabled(arch_of(impl), multiprocessors=multiprocessors):
            each = partial(call, **chosen), partial(call, impl="reference")
            check(*each, exact, [*tensors.values()], ("out", *tensors))

    try:
        run(**chosen)
    except NotImplementedError as error:
        assert " needs " in str(error) and ", got " in str(error)
        run()


@pytest.mark.parametrize("seed", SEEDS)
def test_score(seed, draw):
    """Candidates over histories in pages, read there or gathered, in one call or two."""
    dtype, heads, users = draw.choice(DTYPES), draw.choice((1, 2, 4)), draw.choice((1, 2, 3))
    kv_heads = draw.choice([h for h in (1, 2, 4) if heads % h == 0])
    head_dim = draw.choice((16, 40, 64, 64, 128, 128, 256))
    page = draw.choice((1, 4, 16, 64, 64, 128, 128, 192, 256))
    edges = (page - 1, page, page + 1, 2 * page, draw.randint(0, 3 * page), 300)
    old, new = draw.choices(LENGTHS + edges, k=users), draw.choices(LENGTHS, k=users)
    group = draw.choice((1, 1, 2, 7, 50))
    names = tuple(draw.choices(list(ACTIVATIONS), k=draw.choice((1, heads))))
    own = {"scale": draw.choice((head_dim**-0.5, -0.1)), "output_scale": draw.choice((1.0, -2.0))}
    kept = PagedCache(
        HistoryRules(1), sum(-(-n // page) for n in old) + 1, page, kv_heads, head_dim, dtype=dtype
    )
    kept.data.fill_(torch.nan)
    history = [torch.randn(sum(old), kv_heads, head_dim).to(dtype) for _ in "kv"]
    kept.write(0, kept.append([*range(users)], old), *history)
    q, k, v = (tensor(draw, dtype, sum(new), h, head_dim) for h in (heads, kv_heads, kv_heads))
    ends, at = cu_seqlens(new, "cpu"), kept.pages([*range(users)])
    offsets = draw.choice((ends, Lengths(ends)))
    options = {"out_dtype": draw.choice((None, torch.float32)), "precise": draw.random() < 0.2}
    options["in_one_call"] = draw.choice((None, True, False))

    def call(impl: str) -> torch.Tensor:
        return score(
            q, k, v, offsets, max(max(new), 1), kept, 0, at, activation=names, impl=impl,
            target_group_size=group, **own, **options,
        )  # fmt: skip

    parts = [[x.double().split(n) for x, n in zip(pair, (old, new), strict=True)]
             for pair in ((history[0], k), (history[1], v))]  # fmt: skip
    outs = []
    for i, (mine, n, m) in enumerate(zip(q.double().split(new), old, new, strict=True)):
        keys, values = (torch.cat((before[i], now[i])) for before, now in parts)
        seen = [[nvidia(n + row, j, n + m, m, 0, None, group) for j in range(n + m)]
                for row in range(m)]  # fmt: skip
        keep = torch.tensor(seen, dtype=torch.bool).view(m, n + m)
        outs.append(attend(mine, keys, values, names=names, keep=keep, **own))
    schedule, programs = draw.choice(("modelled", seed)), draw.choice((1, 2, 132))
    with tritonemu.enabled("sm_90", schedule=schedule, multiprocessors=programs), full_of_nan():
        try:
            found = call(draw.choice(("auto", "auto", "v1_tiled", "v8_own_waits")))
        except NotImplementedError as error:
            assert " needs " in str(error) and ", got " in str(error)
            found = call("auto")
        check_one("out", dtype, found, torch.cat(outs), call("reference"))


@pytest.mark.parametrize("seed", SEEDS)
def test_block_attention(seed, draw):
    dtype, heads = draw.choice(DTYPES), draw.choice((1, 2, 4))
    head_dim = draw.choice((16, 48, 64, 64, 128, 128, 256))
    kv_heads = draw.choice([h for h in (1, 2, 4) if heads % h == 0])
    lengths = draw.choices(LENGTHS, k=draw.choice((1, 2, 3)))
    total, size = sum(lengths), draw.choice((16, 32, 64, 64, 64, 128))
    tensors = [tensor(draw, dtype, total, h, head_dim) for h in (heads, kv_heads, kv_heads)]
    impl = implementation(draw, "block_attention", "forward", tensors)
    turns, rotate_v = None, False
    if draw.random() < 0.5:
        turns = tuple(2 * torch.rand(2, total, head_dim // 2) - 1)
        rotate_v = draw.random() < 0.5
    ends = cu_seqlens(lengths, "cpu")
    options = {"block_size": size, "rotary": turns, "rotate_v": rotate_v}

    def exact(*tensors):
        if turns is not None:
            double = [x.double() for x in turns]
            count = 3 if rotate_v else 2
            tensors = [turned(x, *double) for x in tensors[:count]] + list(tensors[count:])
        each = partial(attend_blocks, scale=head_dim**-0.5, block_size=size)
        q, k, v = tensors
        return jagged(each, lengths, q, k, v, lengths)

    with tritonemu.enabled(arch_of(impl), multiprocessors=draw.choice((1, 2, 3, 132))):
        try:
            call = partial(block_attention, cu_seqlens=ends, **options)
            check(partial(call, impl=impl), partial(call, impl="reference"), exact, tensors)
        except NotImplementedError as error:
            assert " needs " in str(error) and ", got " in str(error)


@pytest.mark.parametrize("seed", SEEDS)
def test_layers(seed, draw):
    """Against their parameters in formulas, in values and in every gradient."""
    heads, head_dim = draw.choice((1, 2, 4)), draw.choice((2, 4, 8, 16))
    kv_heads = draw.choice([h for h in (1, 2, 4) if heads % h == 0])
    lengths, width = draw.choices((0, 1, 2, 5, 20, 63, 64, 65), k=draw.choice((1, 2, 3))), 7
    embed_dim, total = heads * head_dim, sum(lengths)
    qk_norm = draw.random() < 0.6
    common = {
        "qk_norm": qk_norm,
        "fused_qk_norm": qk_norm and draw.random() < 0.5,
        "bias": draw.random() < 0.7,
        "dtype": torch.float64,
    }
    names = tuple(draw.choices(list(ACTIVATIONS), k=draw.choice((1, heads))))
    scale, output_scale = draw.choice((0.2, -0.1)), draw.choice((1.0, 0.1, -2.0))
    of_gdpa = {"activation": names, "scale": scale, "output_scale": output_scale}
    masks = {"causal": draw.random() < 0.4, "window": draw.choice((None, 0, 3, 70))}
    size, kind = draw.choice((16, 64)), draw.choice(("self", "pma", "pffn", "block"))
    tokens, num_keys = draw.choice((None, 3)), draw.choice((1, 4))
    layer = {
        "self": lambda: GDPASelfAttention(embed_dim, heads, kv_heads, **masks, **of_gdpa, **common),
        "pma": lambda: PMA(embed_dim, heads, 3, kv_heads, **of_gdpa, **common),
        "pffn": lambda: PFFN(
            embed_dim, heads, width, num_keys, kv_heads, summary_tokens=tokens, **of_gdpa, **common
        ),
        "block": lambda: BlockAttention(embed_dim, heads, kv_heads, size, **common),
    }[kind]()
    x = torch.randn(total, embed_dim, dtype=torch.float64, requires_grad=True)
    shape = (len(lengths), width) if tokens is None else (len(lengths), tokens, width)
    summary = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    offsets = cu_seqlens(lengths, "cpu")
    offsets = draw.choice((lambda: offsets, offsets.long, lambda: Lengths(offsets)))()
    y = layer((x, offsets), *([summary] if kind == "pffn" else []))
    y = y if kind == "pma" else y[0]
    given = {"self": of_gdpa | masks, "block": {"block_size": size}}.get(kind, of_gdpa)
    expected = composed(layer, x, lengths, summary, **given)
    grad, leaves = torch.randn_like(expected), [x, summary, *layer.parameters()]
    found, wanted = (
        torch.autograd.grad(each, leaves, grad, allow_unused=True, materialize_grads=True)
        for each in (y, expected)
    )
    torch.testing.assert_close(y, expected, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-8)
