"""What the restricted shuffle of ``PartitionedSampler`` does to training.

LeNet-5 on MNIST, data parallel over the ranks of several nodes: each step's batch is made of one batch a rank, which
one process computes as one large batch (the average of the ranks' gradients is the gradient of it). Global shuffle is
``DistributedSampler``'s, partitioned shuffle ``PartitionedSampler``'s, with ``--repartition`` also with a new partition
each so many epochs. The same seeds give the same weights. The figure to read is the test accuracy after equal epochs,
its mean over the seeds and the range.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from common import (
    add_run_options,
    announced_environment,
    length,
    limited,
    new_parser,
    positive,
    seed_everything,
    table,
    write_json,
)
from data import add_data_options, announced_mnist, load_mnist
from lenet_mnist import lenet, sgd
from torch import nn
from torch.utils.data import DistributedSampler

from torchcache.distributed import PartitionedSampler


def options() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--nodes", type=positive, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--epochs", type=positive, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--seeds", type=positive, default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("--batch-size", type=positive, default=32, metavar="N", help="a rank's (%(default)s)")
    parser.add_argument("--repartition", type=positive, metavar="N", help="also with a new partition each N epochs")
    add_run_options(parser)
    add_data_options(parser)
    return parser.parse_args()


def in_memory(dataset: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """All images and labels."""
    images, labels = zip(*[dataset[i] for i in range(length(dataset))], strict=True)
    return torch.stack(images), torch.tensor(labels)


Samplers = Sequence[Any]


def train(images: torch.Tensor, labels: torch.Tensor, samplers: Samplers, args: argparse.Namespace, seed: int) -> Any:
    """A model trained on what the samplers of all ranks draw."""
    seed_everything(seed)
    model = lenet()
    optimizer = sgd(model)
    for epoch in range(args.epochs):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        drawn = torch.tensor([list(sampler) for sampler in samplers])
        for step in drawn.split(args.batch_size, dim=1):
            batch = step.reshape(-1)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    return model.eval()


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        return (model(images).argmax(1) == labels).double().mean().item()


def main() -> int:
    """Trains and reports. Returns the exit status."""
    args = options()
    facts = announced_environment()
    data = announced_mnist(args)
    training = in_memory(limited(load_mnist(args.data_dir, train=True), args.limit))
    test = in_memory(limited(load_mnist(args.data_dir, train=False), args.limit))
    nodes, indices = args.nodes, range(len(training[1]))

    def partitioned(rank: int, seed: int, every: int | None = None) -> PartitionedSampler:
        return PartitionedSampler(indices, nodes, rank, seed=seed, num_nodes=nodes, repartition_every=every)

    shuffles: dict[str, Callable[[int, int], Any]] = {
        "global": lambda rank, seed: DistributedSampler(indices, nodes, rank, seed=seed),
        "partitioned": partitioned,
    }
    if args.repartition:
        shuffles[f"partitioned anew each {args.repartition}"] = lambda r, s: partitioned(r, s, args.repartition)
    results = {
        name: [
            accuracy(train(*training, [make(rank, seed) for rank in range(nodes)], args, seed), *test)
            for seed in range(args.seed, args.seed + args.seeds)
        ]
        for name, make in shuffles.items()
    }
    print(f"{nodes} nodes of one rank, batches of {args.batch_size} a rank, {args.epochs} epochs, {args.seeds} seeds")
    rows = [
        [name, f"{statistics.mean(values):.4f}", f"{min(values):.4f} - {max(values):.4f}"]
        for name, values in results.items()
    ]
    print("\n" + table(["shuffle", "test accuracy, mean", "range"], rows))
    write_json(args, facts, {"data": data, "accuracy": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
