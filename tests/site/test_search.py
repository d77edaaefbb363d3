"""What readers type into the search, and the page that they mean: among the first three results."""

from urllib.parse import quote

import pytest

FIRST = 3
SOUGHT = {
    "index": ("license",),
    "reproduce": ("install", "how to use", "requirements", "benchmark my gpu", "AMD"),
    "built": ("cite", "contribute"),
    "exercises": ("exercises", "how to write a kernel"),
    "glossary": ("glossary",),
    "api": ("api", "block_attention"),
    "operator/gdpa": ("gdpa", "softmax"),
    "operator/layouts": ("bank conflicts", "swizzle"),
    "operator/workloads": ("jagged",),
    "operator/activations": ("gelu", "silu"),
    "measuring/roofline": ("roofline", "memory bandwidth"),
    "measuring/protocol": ("H200", "benchmark"),
    "measuring/power_wall": ("power limit",),
    "measuring/masked_batches": ("causal mask",),
    "measuring/production_gap": ("MovieLens",),
    "measuring/profiles": ("nsight",),
    "measuring/got_wrong": ("predictions",),
    "tools/emulator": ("race condition", "deadlock"),
    "tools/claims": ("claims",),
    "tools/found_bugs": ("bugs",),
    "forward/first_tlx_kernel": ("TLX", "mbarrier", "triton"),
    "forward/v2_tma": ("TMA",),
    "forward/v3_persistent": ("persistent kernel",),
    "forward/v4_warp_specialized": ("warp specialization", "v4_warp_specialized"),
    "forward/v5_pingpong": ("ping pong",),
    "forward/planning": ("register spilling", "autotune"),
    "forward/results": ("speedup over FlashAttention", "cuDNN", "fa3"),
    "backward/by_hand": ("backward pass", "dq"),
    "training/op_in_a_model": ("torch.compile",),
    "training/layers": ("HSTU",),
    "training/host_time": ("cuda graph",),
    "training/step": ("training speed",),
    "training/ranks": ("torchrec", "multi gpu"),
    "serving/adds_up": ("kv cache",),
    "serving/own_operator": ("custom activation",),
    "block/block_attention": ("block attention",),
    "block/v4_rotary": ("rotary", "RoPE"),
    "blackwell/tensor_memory": ("B200", "tmem", "tcgen05"),
    "blackwell/flash_attention_4": ("flash attention 4",),
}
QUERIES = {query: page for page, queries in SOUGHT.items() for query in queries}


@pytest.mark.parametrize("query", QUERIES)
def test_the_search_finds_the_page_that_is_meant(site, tab, query):
    tab.goto(f"{(site / 'search.html').as_uri()}?q={quote(query)}")
    ended = "/finished|did not match/.test(document.getElementById('search-results').textContent)"
    tab.wait_for_function(ended)
    pages = tab.locator("#search-results li > a").evaluate_all("all => all.map(a => a.href)")
    tab.errors.clear()  # from the disk the excerpts of pages cannot be fetched
    pages = [page.partition("?")[0].partition("#")[0].removesuffix(".html") for page in pages]
    assert any(page.endswith(f"/{QUERIES[query]}") for page in pages[:FIRST]), pages[:5]
    are_notes = ["/notes/" in page for page in pages]
    assert are_notes == sorted(are_notes), "lab notes come last"
