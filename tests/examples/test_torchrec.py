"""TorchRec's tables under our layers: the same as plain embeddings, and on two ranks as on one."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from data import World, make_batch
from tests.examples.ranks import printed

NEEDED = ("torchrec", "fbgemm_gpu")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING),
    reason=f"needs {', '.join(MISSING)}: pip install --no-deps -r examples/torchrec.txt",
)
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "torchrec_embeddings.py"


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=str)
@pytest.mark.parametrize("lengths", ((3, 0, 9, 1), (0, 0)), ids=str)
def test_logits_are_those_of_plain_embeddings(lengths, dtype):
    """Offsets of either dtype, empty histories, and batches of nothing else."""
    import torchrec_embeddings as script

    world = World(items=64, topics=4)
    lengths = np.array(lengths)
    batch = make_batch(world, lengths, np.arange(len(lengths)), 0)
    torch.manual_seed(0)
    model = script.Ranker(world)
    features = script.keyed(batch, dtype)
    assert features.offsets().dtype == dtype
    logit = model(features)
    logit.sum().backward()

    tables = model.tables.embeddings
    x = tables["item"].weight[batch.items] + tables["topic"].weight[batch.topics]
    x = x + tables["like"].weight[batch.likes] + tables["age"].weight[batch.ages]
    shown, ends = tables["item"].weight[batch.shown], batch.lengths.cu_seqlens.tolist()
    for row, (start, end) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
        own = torch.cat((x[start:end], shown[row : row + 1]))
        offsets = torch.tensor([0, len(own)])
        for layer in model.layers:
            own = own + layer((own, offsets))[0]
        torch.testing.assert_close(logit[row], model.head(own[-1])[0])
    assert tables["item"].weight.grad[batch.shown].abs().sum(1).min() > 0


def run(ranks: int, *arguments: str) -> list[float]:
    """The losses that rank 0 prints."""
    return [float(x) for x in re.findall(r"loss ([0-9.]+)", printed(ranks, SCRIPT, *arguments))]


def test_two_ranks_learn_what_one_learns():
    """Sharded tables, replicated layers: sums in another order, 1e-4 as printed."""
    one, two = (run(ranks, "--steps", "20", "--batch", "16") for ranks in (1, 2))
    assert len(one) == 2 and one == pytest.approx(two, abs=3e-4)
    assert run(2, "--steps", "10", "--batch", "16", "--offsets", "int32") == two[:1]
    assert len(run(1, "--steps", "3", "--batch", "16")) == 1, "the last step is printed"
