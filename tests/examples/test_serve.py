"""examples/serve.py: its scores are those of the model on whole histories."""

import json

import pytest
import serve
import torch

from gdpa_kernels.serving import HistoryRules, PagedCache

SMALL = ["--layers", "2", "--dim", "32", "--heads", "2", "--history", "24", "--candidates", "6"]
SMALL += ["--users", "5", "--batch", "2", "--requests", "6", "--page-size", "4", "--qps", "50"]


def test_latencies_and_hits_are_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(serve, "TELL_S", 0.0)
    out, ratios = tmp_path / "served.json", []
    for pages in ("200", "36"):  # of all users, and of two
        serve.main([*SMALL, "--pages", pages, "--out", str(out)])
        (told,) = json.loads(out.read_text())["rows"]
        assert len(told["latencies_ms"]) == 6 and max(told["latencies_ms"]) == told["most_ms"]
        assert 0 < told["p50_ms"] <= told["p99_ms"] <= told["most_ms"] and told["served_qps"] < 60
        ratios.append(told["hit_ratio"])
    assert 0 <= ratios[1] < ratios[0] <= 1
    printed, progress = capsys.readouterr()
    assert json.loads(printed[: printed.index("}") + 1])["device"] in ("cpu", "cuda")
    lines = progress.splitlines()
    assert lines[0].endswith("6 requests at 50 a second") and "warm-up" in lines[1]
    assert sum("p50" in line and "p99" in line for line in lines) == 12


def test_an_interrupted_run_reports_what_it_has(tmp_path, monkeypatch):
    out, scores, calls = tmp_path / "served.json", serve.Server.scores, []

    def stops(*arguments):
        calls.append(arguments)
        if len(calls) == 5 + 4:  # of the warm-up, and three requests
            raise KeyboardInterrupt
        return scores(*arguments)

    monkeypatch.setattr(serve.Server, "scores", stops)
    serve.main([*SMALL, "--pages", "200", "--out", str(out)])
    (row,) = json.loads(out.read_text())["rows"]
    assert len(row["latencies_ms"]) == 3


def test_scores_are_those_of_whole_histories():
    torch.manual_seed(0)
    model = serve.Stack(2, 32, 2, 30).double()
    kept = PagedCache(HistoryRules(2), 20, 4, 2, 16, dtype=torch.float64)
    server = serve.Server(model, kept)
    history, shown = torch.randint(serve.ITEMS, (9,)), torch.randint(serve.ITEMS, (1, 4))
    server.read([3], [history[:5]])
    server.read([3], [history[5:]])
    found = server.scores([3], shown)
    ends, targets = torch.tensor([0, 13], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    whole = torch.cat((history, shown[0]))
    with torch.no_grad():
        x = model.run(whole, lambda layer, x, i: layer((x, ends), num_targets=targets)[0])
        wanted = model.score(torch.nn.functional.normalize(x[9:], dim=-1)).T
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("layer, part", ((0, "qkv"), (1, "out")))
def test_who_was_not_read_to_the_end_is_read_again(layer, part):
    """A layer runs out of memory before, or after, it has stored its keys and values."""
    torch.manual_seed(0)
    model = serve.Stack(2, 16, 2, 30).double()
    events, shown = [torch.arange(10), torch.arange(10, 22)], torch.arange(6).view(2, 3)
    found = []
    for fails in (False, True):
        server = serve.Server(model, PagedCache(HistoryRules(2), 16, 4, 2, 8, dtype=torch.float64))
        if fails:
            module = getattr(model.attentions[layer], part)
            handle = module.register_forward_pre_hook(out_of_memory)
            with pytest.raises(torch.OutOfMemoryError):
                server.read(["a", "b"], events)
            handle.remove()
        begins = [server.cache.length(user) for user in "ab"]
        assert begins == [0, 0]
        server.read(["a", "b"], events, begins)
        found.append(server.scores(["a", "b"], shown))
    assert torch.equal(*found)


def out_of_memory(*_) -> None:
    raise torch.OutOfMemoryError
