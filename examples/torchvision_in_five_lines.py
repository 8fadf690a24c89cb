"""A torchvision dataset behind the cache: the first epoch fills it, the second reads from the map.

python examples/torchvision_in_five_lines.py [--samples 2000]
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.utils.data import DataLoader
from torchvision.datasets import FakeData
from torchvision.transforms import v2

from torchcache import CachedDataset

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--samples", type=int, default=2000)
arguments = parser.parse_args()

to_tensor = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.ToPureTensor()])
dataset = FakeData(arguments.samples, image_size=(3, 64, 64), transform=to_tensor)

train = CachedDataset(dataset)  # in $CACHE_DIR
loader = DataLoader(train, batch_size=64, shuffle=True)
for epoch in range(3):
    start = time.perf_counter()
    for _images, _labels in loader:
        pass
    stats = train.stats
    seconds = time.perf_counter() - start
    print(f"epoch {epoch}: {seconds:.3f} s, {stats.hits} hits, {stats.source_reads} source reads in all")
print(f"complete: {train.complete}, {stats.bytes_cached / 1e6:.1f} MB in {train.path}")
