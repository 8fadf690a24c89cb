"""A detection data set: images with any number of boxes each, put together by a ``collate_fn``.

python examples/detection_ragged_targets.py [--samples 128]
"""

from __future__ import annotations

import argparse
import collections
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from torchcache import CachedDataset

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--samples", type=int, default=128)
arguments = parser.parse_args()

SIDE = 64


class Squares(Dataset[tuple[tv_tensors.Image, dict[str, Any]]]):
    """Images of 0 to 4 bright squares; a target as torchvision's detection models take it."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[tv_tensors.Image, dict[str, Any]]:
        image = torch.zeros((3, SIDE, SIDE), dtype=torch.uint8)
        corners = [((7 * index + 12 * k) % (SIDE - 8), 12 * k) for k in range(index % 5)]
        for x, y in corners:
            image[:, y : y + 8, x : x + 8] = 255
        boxes = torch.tensor([[x, y, x + 8, y + 8] for x, y in corners], dtype=torch.float32).reshape(-1, 4)
        target = {
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(SIDE, SIDE)),  # type: ignore[call-overload]
            "labels": torch.ones(len(corners), dtype=torch.int64),
            "image_id": index,
        }
        return tv_tensors.Image(image), target


augment = v2.Compose([v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)])  # boxes are flipped, too


def collate(samples: list[tuple[Any, Any]]) -> tuple[torch.Tensor, list[Any]]:
    return torch.stack([image for image, _ in samples]), [target for _, target in samples]


train = CachedDataset(Squares(arguments.samples), transform=lambda sample: augment(*sample))
loader = DataLoader(train, batch_size=16, shuffle=True, collate_fn=collate)
for epoch in range(3):
    targets = [target for _, batch in loader for target in batch]
    images = collections.Counter(len(target["boxes"]) for target in targets)
    print(f"epoch {epoch}: images by number of boxes {dict(sorted(images.items()))}")
print(f"{train.stats.source_reads} source reads; the boxes are {type(targets[0]['boxes']).__name__}")
