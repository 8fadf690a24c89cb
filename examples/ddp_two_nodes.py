"""Two nodes share one data set: each caches half of it, the source is read once a sample, the shuffle is the full one.

On each node (here both on one machine, so with a cache folder each):

CACHE_DIR=/tmp/node0 torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr 127.0.0.1 \
    --master-port 29500 examples/ddp_two_nodes.py
CACHE_DIR=/tmp/node1 torchrun --nnodes 2 --node-rank 1 (the rest as above)

It trains LeNet twice: from a plain DataLoader, and from the nodes' caches. The losses are the same, bit for bit.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from torchcache import CachedDataset
from torchcache.distributed import ExchangeLoader

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--samples", type=int, default=2048)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=32)
arguments = parser.parse_args()


class Digits(Dataset[Any]):
    """Stands for a data set on a slow store."""

    def __len__(self) -> int:
        return arguments.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.Generator().manual_seed(index)
        image = torch.rand((1, 28, 28), generator=noise)
        image[:, 2 * (index % 10) : 2 * (index % 10) + 8] += 1
        return image, index % 10


def lenet() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def train(loader: Iterable[Any], sampler: DistributedSampler[Any]) -> list[float]:
    """The loss of every step of this rank."""
    model = DistributedDataParallel(lenet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


dist.init_process_group("gloo")
torch.set_num_threads(1)  # four ranks on one machine
source = Digits()
sampler = DistributedSampler(source)
with CachedDataset(source) as dataset:
    loader = ExchangeLoader(dataset, sampler, arguments.batch_size)
    cached = train(loader, sampler)
    loader.close()
dist.barrier()  # everything is published
stats = CachedDataset(source).stats
plain = train(DataLoader(source, arguments.batch_size, sampler=sampler), sampler)

facts: list[Any] = [None] * dist.get_world_size()
nodes = loader.topology.node_of_rank
# In a group whose threads end before the interpreter does, as one of gloo's that lets go of a tensor later aborts the
# process. Those of the default group do not end: DistributedDataParallel holds it.
group = dist.new_group()
dist.all_gather_object(facts, (cached == plain, stats.source_reads, stats.samples_cached), group)
dist.destroy_process_group(group)
del group
if dist.get_rank() == 0:
    of_nodes = [facts[nodes.index(node)] for node in range(loader.topology.num_nodes)]
    print(f"{len(cached)} steps on each of {len(facts)} ranks, losses equal plain DDP's: {all(f[0] for f in facts)}")
    print(f"source reads: {sum(f[1] for f in of_nodes)} for {len(source)} samples and {arguments.epochs} epochs")
    print(f"samples cached on each node: {[f[2] for f in of_nodes]}")
dist.destroy_process_group()
