"""Two ranks of one node share one store: each sample is read from the source once, not once a rank.

torchrun --nproc-per-node 2 examples/ddp_one_node.py [--samples 512]
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from torchcache import CachedDataset

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--samples", type=int, default=512)
parser.add_argument("--epochs", type=int, default=3)
arguments = parser.parse_args()


class Waves(Dataset[tuple[torch.Tensor, int]]):
    """Stands for a data set on a slow store."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        label = index % 4
        return torch.sin(torch.arange(64.0) * (label + 1) / 8 + index), label


dist.init_process_group("gloo")
torch.set_num_threads(1)  # two ranks on one machine
source = Waves(arguments.samples)

model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with CachedDataset(source) as train:  # the same line on every rank
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for waves, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(waves), labels).backward()
            optimizer.step()

dist.barrier()  # so that all is counted
if dist.get_rank() == 0:
    # A later job would read one sample more, to compare it with what is cached; check=0 compares none.
    stats = CachedDataset(source).stats
    print(f"{dist.get_world_size()} ranks, {arguments.epochs} epochs, {len(source)} samples")
    print(f"source reads: {stats.source_reads}, samples cached: {stats.samples_cached}")
dist.destroy_process_group()
