"""Four jobs search the learning rate at the same time, on one store: each sample is read from the source once.

python examples/hyperparameter_search.py [--samples 1024]

The jobs know nothing of each other: each wraps the data set, as if a scheduler had started it.
"""

from __future__ import annotations

import argparse
import multiprocessing

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from torchcache import CachedDataset

LEARNING_RATES = (0.003, 0.01, 0.03, 0.1)

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--samples", type=int, default=1024)
parser.add_argument("--epochs", type=int, default=3)
arguments = parser.parse_args()


class Blobs(Dataset[tuple[torch.Tensor, int]]):
    """Stands for a data set on a slow store."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        label = index % 3
        noise = torch.randn(32, generator=torch.Generator().manual_seed(index))
        return noise + label, label


def job(lr: float) -> float:
    """Trains; returns the loss of the last epoch."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Linear(32, 3)
    # check=0: a job that starts late need not compare a sample of what its sisters have just cached with the source.
    with CachedDataset(Blobs(arguments.samples), check=0) as train:
        loader = DataLoader(train, batch_size=32, shuffle=True)
        for _ in range(arguments.epochs):
            losses = []
            for points, labels in loader:
                loss = nn.functional.cross_entropy(model(points), labels)
                gradients = torch.autograd.grad(loss, list(model.parameters()))
                with torch.no_grad():
                    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                        parameter -= lr * gradient
                losses.append(loss.item())
    return sum(losses) / len(losses)


with multiprocessing.get_context("fork").Pool(len(LEARNING_RATES)) as pool:
    losses = pool.map(job, LEARNING_RATES)
for lr, loss in zip(LEARNING_RATES, losses, strict=True):
    print(f"lr {lr}: loss {loss:.3f}")
stats = CachedDataset(Blobs(arguments.samples)).stats
print(f"{len(losses)} jobs; source reads: {stats.source_reads}, of {stats.samples_cached} samples")
