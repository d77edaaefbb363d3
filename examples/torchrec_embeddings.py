"""Embedding tables of TorchRec, sharded over ranks, under the layers of this package; on the CPU.

pip install --no-deps -r examples/torchrec.txt
torchrun --nproc-per-node 2 examples/torchrec_embeddings.py --steps 100

A step's histories are one KeyedJaggedTensor of four features; EmbeddingCollection makes a
JaggedTensor of each, whose `offsets()` (int32 or int64, as the lengths were) become `Lengths`.
DistributedModelParallel shards the tables and replicates the layers (DDP). Rows of tables are
updated in backward (row-wise Adagrad), the layers by AdamW.
"""

from __future__ import annotations

import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from metrics import bayes_loss
from torch import nn
from torch.nn import functional as F

from data import AGES, Batch, Traffic, World, deal, make_batch
from gdpa_kernels import GDPASelfAttention, Lengths, Tokenwise, jagged

try:
    import torchrec
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.optim import RowWiseAdagrad, apply_optimizer_in_backward
    from torchrec.optim.optimizers import in_backward_optimizer_filter
except (ImportError, OSError) as error:  # fbgemm_gpu of another torch is an OSError
    MISSING = error
else:
    MISSING = None

DIM, HEADS, MAX_SEQLEN = 32, 2, 64


class Ranker(nn.Module):
    """Logits `[batch]` of what is shown behind each history: as HSTU has it, the last token's."""

    def __init__(self, world: World, layers: int = 2, device: torch.device | str = "cpu"):
        super().__init__()
        features = {"item": (world.items, ["item", "shown"]), "topic": (world.topics, ["topic"])}
        features |= {"like": (3, ["like"]), "age": (AGES, ["age"])}
        self.tables = torchrec.EmbeddingCollection(
            device=torch.device(device),
            tables=[
                torchrec.EmbeddingConfig(
                    name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=names
                )
                for name, (rows, names) in features.items()
            ],
        )
        options = {"causal": True, "qk_norm": True, "output_scale": MAX_SEQLEN**-0.5}
        self.layers = nn.ModuleList(
            nn.Sequential(Tokenwise(nn.RMSNorm(DIM)), GDPASelfAttention(DIM, HEADS, **options))
            for _ in range(layers)
        )
        self.head = nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, 1))

    def forward(self, features: torchrec.KeyedJaggedTensor) -> torch.Tensor:
        embeddings = self.tables(features)
        events = [embeddings[name].values() for name in ("item", "topic", "like", "age")]
        lengths = Lengths(embeddings["item"].offsets(), MAX_SEQLEN)
        x, lengths = jagged.append((sum(events), lengths), embeddings["shown"].values()[:, None])
        for layer in self.layers:
            x = x + layer((x, lengths))[0]
        return self.head(x[lengths.cu_seqlens[1:].long() - 1])[:, 0]


def keyed(batch: Batch, dtype: torch.dtype = torch.int64) -> torchrec.KeyedJaggedTensor:
    """A batch's features; their lengths and offsets are of `dtype`, int32 or int64."""
    history = batch.lengths.cu_seqlens.diff().to(dtype)
    features = {name: (getattr(batch, f"{name}s"), history) for name in ("item", "topic", "like")}
    features |= {"age": (batch.ages, history), "shown": (batch.shown, torch.ones_like(history))}
    values, lengths = zip(*features.values(), strict=True)
    return torchrec.KeyedJaggedTensor(
        keys=list(features), values=torch.cat(values), lengths=torch.cat(lengths)
    )


def sharded(model: Ranker) -> DistributedModelParallel:
    """The model with its tables spread over the ranks, as the planner of TorchRec sees fit."""
    apply_optimizer_in_backward(RowWiseAdagrad, model.tables.parameters(), {"lr": 0.1})
    sharders = [EmbeddingCollectionSharder()]
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)


def train(steps: int, rows: int, dtype: torch.dtype = torch.int64, log=print) -> list[float]:
    """The losses of `steps` steps of `rows` rows, of all ranks; the same for any number of them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    world, traffic = World(items=64, topics=4), Traffic("lognormal", MAX_SEQLEN - 1, "events")
    torch.manual_seed(0)
    model = sharded(Ranker(world))
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = torch.optim.AdamW(dense.values(), lr=3e-3)
    losses = []
    for step in range(steps):
        lengths = traffic.sample(step, rows)
        rows_of_rank = deal(lengths, ranks, "balanced")[rank]
        batch = make_batch(world, lengths[rows_of_rank], np.asarray(rows_of_rank), step)
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(keyed(batch, dtype)), batch.label)
        loss.backward()
        optimizer.step()
        mean = torch.stack((loss.detach(), bayes_loss(batch.logit)))
        dist.all_reduce(mean)
        losses.append(mean[0].item() / ranks)
        if rank == 0 and ((step + 1) % 10 == 0 or step + 1 == steps):
            log(f"step {step + 1}: loss {losses[-1]:.4f}, Bayes {mean[1] / ranks:.4f}")
    return losses


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=64, help="rows of a step, of all ranks")
    parser.add_argument("--offsets", choices=("int32", "int64"), default="int64")
    o = parser.parse_args(argv)
    if MISSING is not None:
        parser.error(f"needs torchrec as examples/torchrec.txt has it: {MISSING}")
    torch.set_num_threads(1)  # of small tensors more threads only wait
    alone = {} if "RANK" in os.environ else {"rank": 0, "world_size": 1, "store": dist.HashStore()}
    dist.init_process_group("gloo", **alone)
    try:
        return train(o.steps, o.batch, getattr(torch, o.offsets))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
