"""The epoch that fills the cache, against the same epoch without a cache.

MNIST with ``ToTensor`` and ``Normalize`` through a stock shuffled DataLoader. The two take turns, in pairs, with the
order changed from pair to pair; every fill starts from an empty folder and ends with a complete store. The ratio to
read is fill/uncached: the median over the pairs, with the lowest and the highest. It covers the epoch, the start of
the workers included. "Whole" adds opening the data set (which finds its fingerprint) and closing it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from common import (
    Spread,
    add_run_options,
    alternate,
    announced_environment,
    clock,
    epoch_seconds,
    length,
    limited,
    new_parser,
    non_negative,
    positive,
    ratios,
    scratch_folder,
    table,
    write_json,
)
from data import add_data_options, announced_mnist, load_mnist
from torch.utils.data import DataLoader, Dataset

from torchcache import CachedDataset

WARM_UP_BATCHES = 50


def options() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--batch-size", type=positive, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--workers", type=non_negative, nargs="+", default=[0, 2], metavar="N", help="default: 0 2")
    parser.add_argument("--pairs", type=positive, default=3, metavar="N", help="default: %(default)s")
    add_run_options(parser)
    add_data_options(parser)
    return parser.parse_args()


@dataclass
class Contest:
    """Filling and uncached epochs with one number of workers."""

    source: Dataset[Any]
    args: argparse.Namespace
    workers: int
    whole: list[float] = field(default_factory=list)  # seconds of each fill, opening and closing included

    def epoch(self, dataset: Dataset[Any]) -> float:
        """Seconds of an epoch, shuffled by the same seed for both."""
        order = torch.Generator().manual_seed(self.args.seed)
        size = self.args.batch_size
        return epoch_seconds(
            DataLoader(dataset, batch_size=size, shuffle=True, num_workers=self.workers, generator=order)
        )

    def uncached(self) -> float:
        """Seconds of an epoch without a cache."""
        return self.epoch(self.source)

    def fill(self) -> float:
        """Seconds of an epoch that fills a new store."""
        with scratch_folder(self.args.cache_dir, "fill") as folder:
            start = clock()
            with CachedDataset(self.source, cache_dir=folder, name="fill") as dataset:
                seconds = self.epoch(dataset)
                end = clock()
                complete, stats = dataset.complete, dataset.stats
                resume = clock()  # looking at the result is not part of the fill
            self.whole.append(clock() - resume + end - start)
        if not complete or stats.source_reads != length(self.source):
            raise SystemExit(f"the fill is not what it should be: complete {complete}, {stats}")
        return seconds


def measure(contest: Contest, pairs: int) -> dict[str, list[float]]:
    """Seconds in each pair."""
    times = alternate({"uncached": contest.uncached, "fill": contest.fill}, pairs)
    return times | {"whole fill": contest.whole}


def main() -> int:
    """Measures and reports. Returns the exit status."""
    args = options()
    facts = announced_environment()
    data = announced_mnist(args)
    source = limited(load_mnist(args.data_dir, train=True), args.limit)
    print(f"{length(source):,} samples, batches of {args.batch_size}, {args.pairs} pairs")
    epoch_seconds(DataLoader(source, batch_size=args.batch_size), WARM_UP_BATCHES)

    times = {workers: measure(Contest(source, args, workers), args.pairs) for workers in args.workers}
    results = {
        workers: {name: ratios(seconds[name], seconds["uncached"]) for name in ("fill", "whole fill")}
        for workers, seconds in times.items()
    }
    rows = [
        [str(workers), f"{Spread.of(times[workers]['uncached']).median:.3f}", *map(str, result.values())]
        for workers, result in results.items()
    ]
    print("\n" + table(["workers", "uncached seconds", "fill / uncached", "whole fill / uncached"], rows))
    write_json(args, facts, {"data": data, "seconds": times, "ratios": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
