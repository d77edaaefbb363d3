"""Keys and values read in their pages by forward v8: what `score` gives, orders, and mistakes."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import tritonemu
from emulator.tests.judging import SCHEDULES, import_file
from gdpa_kernels import GDPASelfAttention, Lengths, Mask
from gdpa_kernels.calling import ladder
from gdpa_kernels.calling.launches import launches
from gdpa_kernels.gdpa import reference
from gdpa_kernels.gdpa.batch import Batch
from gdpa_kernels.gdpa.device import pages, work_list
from gdpa_kernels.gdpa.kernels import v8_own_waits as v8
from gdpa_kernels.serving import PagedCache, score, scores
from gdpa_kernels.serving.layers import candidates
from gdpa_kernels.serving.validity import HistoryRules
from gdpa_lab.measuring import compile_check
from tests.budget import within_budget
from tests.calls import at_an_odd_address, full_of_nan
from tests.serving.test_cache import ends
from tests.tiers import sweep

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHOWN = (65, 1, 63, 64, 130, 0)


def lengths_of(page: int) -> tuple[int, ...]:
    """Histories around the edges of pages of this size, and none."""
    return page + 1, 2 * page + 70, 0, page, 1, 3


def served(
    lengths: Sequence[int], shown: Sequence[int], page: int, *, heads: int = 2, kv_heads: int = 1,
    head_dim: int = 64, dtype: torch.dtype = BF16, seed: int = 0,
) -> tuple:  # fmt: skip
    """q, k, v and the other arguments of `score`. Users' pages lie anywhere, and what no token
    fills is NaN."""
    make = torch.Generator().manual_seed(seed)

    def draw(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, head_dim, generator=make).to(dtype)

    users = [*range(len(lengths))]
    number = sum(n // page + 2 for n in lengths)
    kept = PagedCache(HistoryRules(2), number, page, kv_heads, head_dim, dtype=dtype)
    kept.data.fill_(float("nan"))
    for each in range(number):
        kept.append([f"before {each}"], [1])
    for each in torch.randperm(number, generator=make).tolist():  # its page is the next to go
        kept.evict(f"before {each}")
    left = list(lengths)
    while any(left):
        some = [min(n, 1 + int(torch.randint(page, (), generator=make))) for n in left]
        order = torch.randperm(len(users), generator=make).tolist()
        table = kept.append(order, [some[user] for user in order])
        for layer in range(2):
            kept.write(layer, table, draw(sum(some), kv_heads), draw(sum(some), kv_heads))
        left = [n - m for n, m in zip(left, some, strict=True)]
    q, k, v = (draw(sum(shown), n) for n in (heads, kv_heads, kv_heads))
    return q, k, v, ends(*shown), max(shown), kept, 1, kept.pages(users, missing="empty")


def gathered(given: tuple, group: int = 1, **options) -> Batch:
    """[history; candidates] of arguments of `score`, as one call for the definition."""
    q, k, v, both, longest, kept, layer, table = given
    keys, values = kept.read_before(layer, table, k, v, both, longest)
    return Batch(
        q, keys, values, both, table.cu_seqlens + both, longest, table.max_seqlen + longest,
        ("silu",), q.shape[2] ** -0.5, mask=Mask("lower_right", target_group_size=group),
        segments=F.pad(both.diff()[:, None], (0, 1)), **options,
    )  # fmt: skip


def double(batch: Batch) -> torch.Tensor:
    """The definition in fp64."""
    wide = {name: getattr(batch, name).double() for name in "qkv"}
    return reference.forward(replace(batch, **wide))


def call(given: tuple, reads: bool, **options) -> tuple[torch.Tensor, list]:
    """What `score` gives, and its launches; whether it reads the pages in the kernel."""
    copied = mock.Mock(side_effect=PagedCache.read), mock.Mock(side_effect=PagedCache.read_before)
    read, before = (lambda cache, *args, copy=copy: copy(cache, *args) for copy in copied)
    with (
        mock.patch.multiple(PagedCache, read=read, read_before=before),
        tritonemu.enabled(multiprocessors=132), launches() as seen, full_of_nan(),
    ):  # fmt: skip
        out = score(*given, **options)
    assert reads != any(copy.called for copy in copied)
    return out, seen


def check(make, group: int = 1, reads: bool = True, **options) -> list:
    """Hold `score` of make(seed=...) to its error budget; the launches of the last call."""
    seen: list = []

    def draw(seed: int) -> tuple:
        given = make(seed=seed)
        batch = gathered(given, group, output_scale=0.5)
        own = {"target_group_size": group, "activation": "silu", "output_scale": 0.5}
        out, seen[:] = call(given, reads, **own, **options)
        return [out], [double(batch)], [reference.forward_in_dtype(batch)]

    within_budget(draw, ["out"])
    return seen


def kernels(seen: list) -> set[str]:
    return {launch.name for launch in seen}


@pytest.mark.parametrize("in_one_call", (True, False))
@pytest.mark.parametrize("dtype", (BF16, sweep(FP16)), ids=str)
@pytest.mark.parametrize("head_dim", (sweep(64), 128))
@pytest.mark.parametrize("page", (64, sweep(128), 192, sweep(256)))
def test_scores_are_the_definition(page, head_dim, dtype, in_one_call):
    """Histories around the edges of pages, candidates around those of tiles, scattered pages."""
    size = {"heads": 2, "kv_heads": 1, "head_dim": head_dim, "dtype": dtype}
    seen = check(partial(served, lengths_of(page), SHOWN, page, **size), in_one_call=in_one_call)
    assert ("diagonal_kernel" in kernels(seen)) != in_one_call
    launch = next(launch for launch in seen if launch.name == "own_waits_kernel")
    wide = head_dim == 128 and page % 128 == 0
    assert launch.constants["BLOCK_N"] == (128 if wide and in_one_call else 64)


@pytest.mark.parametrize("in_one_call", (True, False))
@pytest.mark.parametrize("group", (sweep(2), 7, sweep(64), 200))
def test_groups(group, in_one_call):
    check(partial(served, lengths_of(64), SHOWN, 64), group, in_one_call=in_one_call)


@pytest.mark.parametrize("heads, kv_heads", ((4, 2), (3, 3)))
def test_key_heads_and_strided_candidates(heads, kv_heads):
    def make(seed: int) -> tuple:
        q, k, v, *rest = served(
            lengths_of(64), SHOWN, 64, heads=heads, kv_heads=kv_heads, seed=seed
        )
        return *torch.cat((q, k, v), 1).split([heads, kv_heads, kv_heads], 1), *rest

    for in_one_call in (True, False):
        check(make, in_one_call=in_one_call)


@pytest.mark.parametrize("head_dim", (40, 256))
def test_other_heads(head_dim):
    """Boxes wider than head_dim; of 256 columns two blocks of 64 keys beside one tile of Q."""
    check(partial(served, lengths_of(128), SHOWN, 128, head_dim=head_dim), in_one_call=True)


@pytest.mark.parametrize("precise", (True, False))
def test_a_sum_in_fp32(precise):
    given = served(lengths_of(64), SHOWN, 64)
    options = {"activation": "silu", "precise": precise}
    exact = double(gathered(given))
    for in_one_call in (True, False):
        (wide, _), (out, _) = (
            call(given, True, in_one_call=in_one_call, out_dtype=dtype, **options)
            for dtype in (FP32, None)
        )
        assert wide.dtype == FP32 and torch.equal(wide.to(BF16), out)
        assert (wide.double() - exact).norm() < 5e-3 * exact.norm()


@pytest.mark.parametrize("head_dim", (sweep(64), 128))
@pytest.mark.parametrize("shown", ((100, 1), (20, 64)))
def test_keys_that_are_split(shown, head_dim):
    """Pieces of a history begin within its list of pages; of another one there may be none."""
    seen = check(partial(served, (900, 3), shown, 64, heads=1, head_dim=head_dim))
    assert kernels(seen) == {"work_list_kernel", "own_waits_kernel", "diagonal_kernel"}


def test_layers_share_the_list_of_their_histories(monkeypatch):
    """But in the capture of a graph, which may be replayed when others stand in these pages; what
    was written to is refused."""
    q, k, v, offsets, longest, *rest = served((900, 3), (20, 64), 64, heads=1)
    given, pages = (q, k, v, Lengths(offsets), longest, *rest), rest[-1]
    expected, _ = call((q, k, v, offsets, longest, *rest), True)
    for capturing, lists in ((False, 1), (False, 0), (True, 1), (False, 0)):
        monkeypatch.setattr(scores, "_is_captured", lambda _, now=capturing: now)
        found, seen = call(given, True)
        assert torch.equal(found, expected)
        assert [launch.name for launch in seen].count("work_list_kernel") == lists
    pages.cu_seqlens.add_(0)
    with pytest.raises(ValueError, match="history must not be modified after the check"):
        call(given, True)


@pytest.mark.parametrize("shown", ((0, 0), (5, 0)))
@pytest.mark.parametrize("lengths", ((0, 0), (0, 70)))
def test_nothing_to_see_or_to_score(lengths, shown):
    for in_one_call in (True, False):
        check(partial(served, lengths, shown, 64), in_one_call=in_one_call)


@pytest.mark.parametrize("page", (16, 32, 96))
def test_other_pages_are_gathered(page):
    for in_one_call in (True, False):
        seen = check(
            partial(served, (page + 1, 0, 70), (65, 1, 3), page), reads=False,
            in_one_call=in_one_call,
        )  # fmt: skip
        assert ("join_kernel" in kernels(seen)) == in_one_call


def test_what_v8_does_not_take_is_gathered():
    given = served((70, 1), (3, 5), 64)
    wide = tuple(x.float() for x in given[:3])
    kept = PagedCache(HistoryRules(2), 4, 64, 1, 64, dtype=FP32)
    kept.write(1, kept.append([0, 1], [70, 1]), *[torch.randn(71, 1, 64)] * 2)
    other = *wide, *given[3:5], kept, 1, kept.pages([0, 1])
    odd = *map(at_an_odd_address, given[:3]), *given[3:]
    for args, options in (
        (given, {"impl": "v1_tiled"}), (given, {"impl": "reference"}), (other, {}),
        (odd, {"in_one_call": True}),
    ):  # fmt: skip
        call(args, False, **options)
    with torch.autocast("cpu"):
        call(given, False)
    call((given[0].requires_grad_(), *given[1:]), False)
    with torch.no_grad():
        call(given, True)


def test_the_last_tokens_of_a_history_are_no_history():
    """`append` says where the new ones lie, among pages of the whole history."""
    kept = PagedCache(HistoryRules(2), 4, 64, 1, 64)
    for count in (50, 30):
        table = kept.append([0], [count])
        kept.write(1, table, *(torch.randn(count, 1, 64).to(BF16) for _ in "kv"))
    q, k, v = (torch.randn(5, 1, 64).to(BF16) for _ in "qkv")
    told = "must be PagedCache.pages of whole histories, got rows 50 up to 80 of 0, who has 80"
    for in_one_call in (True, False):
        with tritonemu.enabled(), pytest.raises(ValueError, match=f"history {told}"):
            score(q, k, v, ends(5), 5, kept, 1, table, in_one_call=in_one_call)
    with pytest.raises(ValueError, match=f"pages {told}"):
        kept.paged_kv(1, table, k, v, ends(5))


def test_one_compiled_kernel_for_all_lists():
    """What says where the pages lie has any alignment: of one tensor, at places of its own."""
    marked = v8.own_waits_kernel.params
    free = {p.name for p in marked if p.do_not_specialize_on_alignment}
    assert free == {"kv_indices_ptr", "kv_indptr_ptr", "paged_ends_ptr"}


def test_layers_read_the_pages():
    layer = GDPASelfAttention(128, 2, causal=True, activation="silu", dtype=BF16)
    kept, both = PagedCache(HistoryRules(1), 4, 64, 2, 64), ends(3, 70)
    new = kept.append([0, 1], [100, 5])
    with torch.no_grad():
        _, k, v = layer.qkv(torch.randn(105, 128).to(BF16)).view(105, 3, 2, 64).unbind(1)
    kept.write(0, new, k, v)
    given = layer, torch.randn(73, 128).to(BF16), both, 70, kept, 0, kept.pages([0, 1])
    with tritonemu.enabled():
        with mock.patch.object(PagedCache, "read_before"), mock.patch.object(PagedCache, "read"):
            found = candidates(*given)
        with mock.patch.object(scores, "_choose", lambda *_, **__: ("two, gathered", None)):
            wanted = candidates(*given)
    assert (found - wanted).norm() < 5e-3 * wanted.norm()


def test_a_call_with_wrong_users_is_refused():
    q, k, v, _, longest, *rest = served((70, 1), (3, 5), 64)
    with (
        tritonemu.enabled(),
        pytest.raises(ValueError, match="cu_seqlens must have shape .3., as the histories, got .2"),
    ):
        score(q, k, v, ends(8), 8, *rest)
    with (
        tritonemu.enabled(),
        pytest.raises(
            ValueError, match="k must be .* in torch.bfloat16 on .*, got .* in torch.float16"
        ),
    ):
        score(q.half(), k.half(), v.half(), ends(3, 5), longest, *rest)


PAGED = {"in one call": True, "history alone": False}


def paged(given: tuple, in_one_call: bool) -> Batch:
    """What v8 is called with."""
    q, k, v, both, longest, kept, layer, table = given
    whole = replace(
        gathered(given), k=k, v=v, activation=("relu",),
        paged_kv=kept.paged_kv(layer, table, k, v, both),
    )  # fmt: skip
    if in_one_call:
        return whole
    return replace(
        whole, k=k[:0], v=v[:0], cu_seqlens_k=table.cu_seqlens, max_seqlen_k=table.max_seqlen,
        mask=Mask(), segments=None, out_dtype=FP32,
    )  # fmt: skip


def test_other_rungs_refuse_it_by_name():
    batch = paged(served((70, 1), (3, 5), 64), True)
    for rung in (*ladder.RUNGS, ladder.REFERENCE):
        if rung.impl != "v8_own_waits" and "targets" in rung.requires.extras:
            assert rung.call_problem(batch) == "needs all keys in k, got keys in pages"
    small = replace(batch, paged_kv=replace(batch.paged_kv, page_size=32))
    for other, told in (
        (small, "needs pages of a multiple of 64 tokens, got 32"),
        (replace(batch, mask=Mask(window=3)), "needs window None with keys in pages, got 3"),
    ):
        assert ladder.rung("v8_own_waits").call_problem(other) == told
    with tritonemu.enabled(), pytest.raises(Exception, match="a tile lies in one page"):
        v8.forward(batch, config=v8.Config(BLOCK_N=128))


CONFIGS = (
    {}, {"BLOCK_N": 64, "num_stages": 2}, {"BLOCK_N": 64, "num_stages": 3, "q_slots": 1},
    {"BLOCK_N": 64, "num_stages": 4, "ahead": True},
)  # fmt: skip


@SCHEDULES
@pytest.mark.parametrize("in_one_call", PAGED.values(), ids=PAGED)
def test_any_schedule_and_config_gives_the_same_bits(in_one_call, seeds):
    """With relu each order of the roles computes the same; so do other buffers."""
    batch = paged(served((130, 0, 70), (65, 3, 1), 64), in_one_call)
    expected = None
    for options in CONFIGS:
        config = v8.Config(**options) if options else v8.default_config(batch)
        for schedule in ("modelled", *seeds):
            with tritonemu.enabled(schedule=schedule, max_steps=100_000, multiprocessors=1):
                found = v8.forward(batch, config=config)
            expected = found if expected is None else expected
            assert torch.equal(found, expected), (options, schedule)


# What is changed, in which file, for what.
MISTAKES = {
    "another user's pages": (pages, "+ paged.first_index + token //", "+ token //"),
    "the page before": (
        pages, "+ token // options.PAGE_SIZE", "+ (token - 1) // options.PAGE_SIZE"),
    "splits from the start": (pages, "token = paged.first_token + key", "token = key"),
    "a page without values": (
        pages, "first_row(page, options.PAGE_SIZE)", "page * options.PAGE_SIZE"),
    "a tile from the start of its page": (pages, " + token % options.PAGE_SIZE", ""),
    "unwritten slots": (pages, "tl.maximum(paged.tokens - token, 0)", "options.BLOCK_N"),
    "all slots of the last page": (
        pages, "tl.maximum(paged.tokens - token, 0)", "tl.cdiv(paged.tokens, 64) * 64"),
    "keys as values": (pages, "row += options.PAGE_SIZE", "row += 0"),
    "candidates one tile late": (pages, "key < packed.first_key:", "key <= packed.first_key:"),
    "candidates one tile early": (
        pages, "key < packed.first_key:", "key + 64 < packed.first_key:"),
    "their own keys from the start": (pages, "key -= packed.first_key", "pass"),
    "packed keys where keys are listed": (
        pages, "PackedKeys(start_q, len_q", "PackedKeys(start_k, len_k"),
    "packed keys at the end of the history": (
        pages, "tl.cdiv(tokens, options.BLOCK_N) * options.BLOCK_N", "tokens"),
    "another user's history": (pages, "sequence = sequence_of(list_ptr, item)", "sequence = 0"),
    "a list without padding": (work_list, "padded=block_n if", "padded=1 if"),
    "queries padded too": (
        work_list, "(keys - rows, PADDED) * PADDED + rows", "(keys, PADDED) * PADDED"),
    "entries without numbers": (
        work_list, "segments is not None or batch.paged_kv is not None", "segments is not None"),
}  # fmt: skip


@cache
def expected() -> list[tuple[Batch, v8.Config, torch.Tensor]]:
    """Batches, each with a config and what v8 gives: two tiles of keys lie in a page."""
    given = served((300, 0, 70), (65, 3, 130), 128)
    batches = [paged(given, in_one_call) for in_one_call in (True, False)]
    configs = [v8.default_config(batches[0]), v8.Config(BLOCK_N=64, num_stages=4, splits=2)]
    pairs = zip(batches, configs, strict=True)
    return [(batch, config, run(v8, batch, config)) for batch, config in pairs]


def run(module: ModuleType, batch: Batch, config: v8.Config) -> torch.Tensor:
    with tritonemu.enabled(max_steps=100_000, multiprocessors=1):
        return module.forward(batch, config=config)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(mistake, tmp_path):
    module, right, wrong = MISTAKES[mistake]
    text = Path(module.__file__).read_text()
    assert text.count(right) == 1
    file = tmp_path / "changed.py"
    file.write_text(text.replace(right, wrong))
    changed, kernel = import_file(file), import_file(Path(v8.__file__))
    for name in ("entry_keys", "locate_tile", "fetch_tile", "query_list_recipe"):
        if hasattr(changed, name):
            setattr(kernel, name, getattr(changed, name))
    wanted = expected()
    try:
        found = [run(kernel, batch, config) for batch, config, _ in wanted]
    except tritonemu.EmulatorError:
        return
    assert not all(map(torch.equal, found, [out for *_, out in wanted]))


@pytest.mark.parametrize("in_one_call", (True, sweep(False)))
@pytest.mark.parametrize("head_dim", (sweep(64), 128))
def test_the_code_is_as_lean(head_dim, in_one_call):
    """Pages cost v8 no register and no spill, and their TMA loads stand beside the others'."""
    size = (head_dim, 2 * head_dim), (130, 64), head_dim
    batch = paged(served(*size, head_dim=head_dim), in_one_call)
    batch = replace(batch, activation=("silu",))
    of_keys = replace(batch, paged_kv=None, **dict.fromkeys("kv", batch.paged_kv.pool))
    config = v8.default_config(batch)
    made, plain = (built(each, config) for each in (batch, of_keys))
    assert made.registers == plain.registers and made.spill_bytes == plain.spill_bytes
    assert made.spill_bytes == 0 or head_dim == 64 and not in_one_call  # four consumers, fp32
    assert not made.serialised and made.shared_bytes == plain.shared_bytes
    assert made.instructions["HGMMA"] == plain.instructions["HGMMA"]
    more = 2 if in_one_call else 0
    assert made.instructions["UTMALDG"] == plain.instructions["UTMALDG"] + more


def built(batch: Batch, config: v8.Config) -> compile_check.Compiled:
    with launches(run=False) as seen:
        v8.forward(batch, config=config)
    launch = next(launch for launch in seen if launch.name == "own_waits_kernel")
    return compile_check.read(compile_check.build_launch(launch))
