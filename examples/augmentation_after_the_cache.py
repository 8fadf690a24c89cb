"""Random augmentation after the cache: decoding and resizing are cached, crops and flips are drawn anew each epoch.

python examples/augmentation_after_the_cache.py [--samples 256]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchvision.datasets import FakeData
from torchvision.transforms import v2

from torchcache import CachedDataset, split_transform

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--samples", type=int, default=256)
arguments = parser.parse_args()

pipeline = v2.Compose(
    [
        v2.ToImage(),
        v2.ToPureTensor(),
        v2.Resize(40, antialias=True),
        v2.RandomCrop(32),  # from here on each epoch is different
        v2.RandomHorizontalFlip(),
        v2.ToDtype(torch.float32, scale=True),
    ]
)
fixed, random_part = split_transform(pipeline)


def augment(sample: Any) -> Any:
    image, label = sample
    return random_part(image), label


dataset = FakeData(arguments.samples, image_size=(3, 48, 48), transform=fixed)
train = CachedDataset(dataset, transform=augment)
first, second = (torch.cat([images for images, _ in DataLoader(train, batch_size=32)]) for _ in range(2))
print(f"{tuple(first.shape)} float images from a cache of uint8 ones, {train.stats.bytes_cached / 1e6:.1f} MB")
print(f"the epochs differ: {not torch.equal(first, second)}; the source was read {train.stats.source_reads} times")
