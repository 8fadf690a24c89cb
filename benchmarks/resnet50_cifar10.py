"""ResNet-50 on CIFAR-10, without a cache (the default), with one (--cache), or both in turns (--compare).

The pipeline of the reference recipe: decode and resize (to --image-size), convert, crop and flip at random. What does
not draw random numbers is cached, as float32 or, with --uint8, as bytes that are normalised on the device; the crop
and the flip come after the cache, anew in every epoch. With --compare both trainings draw the same, so both must
compute the same losses, which is checked bit for bit on the CPU. How to read the ratios: see lenet_mnist.py.

--image-folder DIR reads JPEG files, DIR/train/<class>/* and DIR/test/<class>/*: a file and a decode a sample, as in an
object store. On a CPU use --limit: ResNet-50 computes for seconds a batch.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import add_run_options, length, new_parser, positive
from compare import Job, Sets, run
from data import CIFAR10_MEAN, CIFAR10_STD, add_data_options, load_cifar10, load_image_folder, prepare_cifar10
from torch import nn
from torch.utils.data import Dataset
from torchvision.models import resnet50
from torchvision.transforms import v2
from training import Recipe, add_training_options

from torchcache import CachedDataset


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    add_training_options(parser, epochs=3, batch_size=32)
    parser.add_argument("--image-size", type=positive, default=224, metavar="N", help="default: %(default)s")
    parser.add_argument("--uint8", action="store_true", help="cache bytes, and normalise them on the device")
    parser.add_argument("--amp", action="store_true", help="mixed precision")
    parser.add_argument("--image-folder", type=Path, metavar="DIR", help="image files instead of CIFAR-10's own")
    add_run_options(parser)
    add_data_options(parser)
    return parser.parse_args(arguments)


def fixed_steps(args: argparse.Namespace) -> v2.Compose:
    """What is the same each time: it is cached."""
    steps = [v2.ToImage(), v2.Resize((args.image_size, args.image_size), antialias=True), v2.ToPureTensor()]
    if not args.uint8:
        steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(CIFAR10_MEAN, CIFAR10_STD)]
    return v2.Compose(steps)


class Augment:
    """Crops and flips the image of a sample at random."""

    def __init__(self, size: int) -> None:
        self.steps = v2.Compose([v2.RandomCrop(size, padding=size // 8), v2.RandomHorizontalFlip()])

    def __call__(self, sample: Any) -> Any:
        image, label = sample
        return self.steps(image), label


class Transformed(Dataset[Any]):
    """A dataset with a transform of the whole sample: what ``CachedDataset`` has as ``transform=``."""

    def __init__(self, dataset: Dataset[Any], transform: Augment) -> None:
        self.dataset, self.transform = dataset, transform

    def __len__(self) -> int:
        return length(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.dataset[index])


def sources(args: argparse.Namespace) -> Sets:
    """The training and the test set, decoded and resized."""
    if args.image_folder is not None:
        load = partial(load_image_folder, args.image_folder)
    else:
        load = partial(load_cifar10, args.data_dir)
    return load(train=True, transform=fixed_steps(args)), load(train=False, transform=fixed_steps(args))


def uncached_sets(args: argparse.Namespace, sets: Sets) -> Sets:
    """Augments the training set."""
    return Transformed(sets[0], Augment(args.image_size)), sets[1]


def cached_sets(args: argparse.Namespace, sets: Sets, cache_dir: Path | None) -> Sets:
    """The whole of what a user changes."""
    return (
        CachedDataset(sets[0], Augment(args.image_size), cache_dir=cache_dir, name="cifar10-train"),
        CachedDataset(sets[1], cache_dir=cache_dir, name="cifar10-test"),
    )


def normalised(images: torch.Tensor) -> torch.Tensor:
    """What ``ToDtype`` and ``Normalize`` do, of a whole batch on the device."""
    mean, std = (torch.tensor(v, device=images.device).view(3, 1, 1) for v in (CIFAR10_MEAN, CIFAR10_STD))
    return images.float().div_(255).sub_(mean).div_(std)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum and weight decay."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)


def recipe(args: argparse.Namespace, device: torch.device) -> Recipe:
    """How to train."""
    prepare = normalised if args.uint8 else torch.Tensor.contiguous
    model = partial(resnet50, num_classes=10)
    return Recipe(model, sgd, args.batch_size, args.workers, device, args.seed, prepare, args.amp)


def main() -> int:
    """Runs what the options ask for. Returns the exit status."""
    args = options()
    download = not args.no_download
    in_folder = args.image_folder is not None
    job = Job(
        name="resnet",
        title=f"ResNet-50 on CIFAR-10 at {args.image_size}",
        prepare_data=lambda: (
            f"images in {args.image_folder}" if in_folder else prepare_cifar10(args.data_dir, download=download)
        ),
        sources=partial(sources, args),
        uncached=partial(uncached_sets, args),
        cached=partial(cached_sets, args),
        recipe=partial(recipe, args),
    )
    return run(args, job)


if __name__ == "__main__":
    sys.exit(main())
