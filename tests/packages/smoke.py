"""Runs what an installed gdpa_kernels promises on a CPU, with numpy and torch alone beside it.

python smoke.py fbtriton    # every kernel compiles here; with tritonemu installed, two of them run
python smoke.py none        # no Triton: calls take the definition
"""

import sys
from importlib.util import find_spec

import torch

import gdpa_kernels
from gdpa_kernels import (
    PFFN,
    PMA,
    BlockAttention,
    GDPASelfAttention,
    Lengths,
    Mask,
    RelativeBias,
    block_attention,
    gdpa,
)
from gdpa_kernels import __main__ as doctor
from gdpa_kernels.serving import HistoryRules, PagedCache, score

ENDS = [0, 3, 3, 8]


def sequences(dtype=torch.float64, head_dim=64):
    torch.manual_seed(0)
    tensors = [torch.randn(8, 4, head_dim, dtype=dtype, requires_grad=True) for _ in "qkv"]
    return *tensors, torch.tensor(ENDS, dtype=torch.int32)


def by_formula(q, k, v, function):
    """function(scores) V of each sequence and head."""
    parts = [
        torch.einsum(
            "hqk,khd->qhd",
            function(torch.einsum("qhd,khd->hqk", q[a:b], k[a:b]) * q.shape[2] ** -0.5),
            v[a:b],
        )
        for a, b in zip(ENDS, ENDS[1:], strict=False)
    ]
    return torch.cat(parts)


def operators_compute_their_formulas():
    q, k, v, cu = sequences()
    silu = torch.nn.functional.silu
    bias = RelativeBias(torch.zeros(4, 9, dtype=q.dtype, requires_grad=True))
    mine = gdpa(q, k, v, cu, cu, 5, 5, activation="silu", relative_bias=bias)
    for ours, defined in (
        (mine, by_formula(q, k, v, silu)),
        (block_attention(q, k, v, cu), by_formula(q, k, v, lambda s: s.softmax(-1))),
    ):
        torch.testing.assert_close(ours, defined)
        gradients = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (ours, defined)]
        torch.testing.assert_close(*gradients)


def layers_learn_compile_and_export():
    x, lengths = torch.randn(8, 64), Lengths(torch.tensor(ENDS, dtype=torch.int32))
    layer = GDPASelfAttention(64, 4, mask=Mask(causal=True), qk_norm=True)
    expected = layer((x, lengths))[0]
    expected.sum().backward()
    BlockAttention(64, 4, qk_norm=True)((x, lengths))[0].sum().backward()
    PMA(64, 4, num_seeds=2)((x, lengths)).sum().backward()
    PFFN(64, 4, num_keys=8, summary_dim=16)((x, lengths), torch.randn(3, 16))[0].sum().backward()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled((x, lengths))[0], expected)


def a_cache_scores_candidates():
    q, k, v, cu = (x.detach() for x in sequences(torch.float32))
    cache = PagedCache(
        HistoryRules(num_layers=1), 64, 64, num_kv_heads=4, head_dim=64, dtype=q.dtype
    )
    cache.write(0, cache.append([1, 2, 3], [3, 0, 5]), k, v)
    for group in (1, 8):
        scores = score(q, k, v, cu, 5, cache, 0, cache.pages([1, 2, 3]), target_group_size=group)
        assert scores.shape == q.shape and scores.isfinite().all()


def kernels_run_in_the_emulator():
    import tritonemu

    q, k, v, cu = (x.detach() for x in sequences(torch.bfloat16))
    expected = gdpa(q, k, v, cu, cu, 5, 5, impl="reference")
    with tritonemu.enabled("sm_90"):
        for impl in ("v1_tiled", "v8_own_waits"):
            out = gdpa(q, k, v, cu, cu, 5, 5, impl=impl)
            torch.testing.assert_close(out, expected, atol=0.05, rtol=0.05)


def the_command_says_what_runs(compiler):
    assert doctor.main() == (0 if compiler == "fbtriton" else 1)


def main(compiler: str) -> None:
    """Run all of it with "fbtriton" or "none", which must be what is installed."""
    assert (find_spec("triton") is not None) == (compiler == "fbtriton"), "another Triton is here"
    operators_compute_their_formulas()
    layers_learn_compile_and_export()
    a_cache_scores_candidates()
    the_command_says_what_runs(compiler)
    if compiler == "fbtriton" and find_spec("tritonemu") is not None:
        kernels_run_in_the_emulator()
    print(f"torch {torch.__version__}, {compiler}: gdpa_kernels {gdpa_kernels.__version__} runs")


if __name__ == "__main__":
    main(*sys.argv[1:])
