"""LeNet-5 on MNIST, without a cache (the default), with one (--cache), or both in turns (--compare).

--compare starts from an empty cache in a folder of its own, which it removes again. Both trainings have the same
seeds, so both must compute the same: on the CPU the loss of every step is compared bit for bit, and any difference
makes the exit status 1. Read the ratio cached/uncached of the totals first: it includes the epoch that fills the
cache, the tests, and opening and closing the stores. "Waiting" is the time spent inside the DataLoader, so what the
other seconds hold is computation, which no cache can shorten. The test set is read anew every epoch, like the
training set, so with a cache it has a store of its own. A few steps of a model that is thrown away come first.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from common import add_run_options, new_parser
from compare import Job, Sets, run
from data import add_data_options, load_mnist, prepare_mnist
from torch import nn
from training import Recipe, add_training_options

from torchcache import CachedDataset


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    add_training_options(parser, epochs=4, batch_size=64)
    add_run_options(parser)
    add_data_options(parser)
    return parser.parse_args(arguments)


def lenet() -> nn.Module:
    """LeNet-5 (LeCun et al. 1998, figure 2), with ReLU and max pooling as it is usually written today."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def cached_sets(sets: Sets, cache_dir: Path | None) -> Sets:
    """The whole of what a user changes."""
    return (
        CachedDataset(sets[0], cache_dir=cache_dir, name="mnist-train"),
        CachedDataset(sets[1], cache_dir=cache_dir, name="mnist-test"),
    )


def main() -> int:
    """Runs what the options ask for. Returns the exit status."""
    args = options()

    def recipe(device: torch.device) -> Recipe:
        return Recipe(lenet, sgd, args.batch_size, args.workers, device, args.seed)

    job = Job(
        name="lenet",
        title="LeNet-5 on MNIST",
        prepare_data=lambda: prepare_mnist(args.data_dir, download=not args.no_download),
        sources=lambda: (load_mnist(args.data_dir, train=True), load_mnist(args.data_dir, train=False)),
        uncached=lambda sets: sets,
        cached=cached_sets,
        recipe=recipe,
    )
    return run(args, job)


if __name__ == "__main__":
    sys.exit(main())
