"""Random patches of large volumes: with ``copy=False`` a volume is a view of the cache, and only its patch is read.

python examples/volumes_random_patches.py [--samples 8] [--side 64]
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import DataLoader, Dataset

from torchcache import CachedDataset

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--samples", type=int, default=8)
parser.add_argument("--side", type=int, default=64)
arguments = parser.parse_args()

PATCH = 16


class Scans(Dataset[tuple[torch.Tensor, int]]):
    """Stands for volumes that take seconds to decode."""

    def __init__(self, length: int, side: int) -> None:
        self.length = length
        self.side = side

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        ramp = torch.arange(self.side, dtype=torch.float32)
        return index + ramp[:, None, None] + ramp[:, None] + ramp, index


def random_patch(sample: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, int]:
    volume, label = sample
    z, y, x = (int(torch.randint(size - PATCH + 1, ())) for size in volume.shape)
    # The copy of a patch: what is done to it does not reach the cache.
    return volume[z : z + PATCH, y : y + PATCH, x : x + PATCH].clone(), label


train = CachedDataset(Scans(arguments.samples, arguments.side), transform=random_patch, copy=False)
loader = DataLoader(train, batch_size=4, shuffle=True)
epochs = []
for epoch in range(3):
    epochs.append(
        {int(label): patch for patches, labels in loader for patch, label in zip(patches, labels, strict=True)}
    )
    print(f"epoch {epoch}: {len(epochs[-1])} patches, {train.stats.source_reads} volumes read in all")
differ = any(not torch.equal(epochs[1][label], epochs[2][label]) for label in epochs[1])
print(f"{PATCH**3 / arguments.side**3:.1%} of each volume is copied a read; the patches differ: {differ}")
