"""One sample at a time: ``ds[i]`` of a complete store in memory, for samples like MNIST's.

Contestants, in turns, each over all samples in one shuffled order: ``ds[i]`` with a float32 tensor of 1 x 28 x 28 and
an int, without ``transform``; the same with ``copy=False``, where the tensor is a view; the floor, a row of one tensor
in RAM, copied, and an int; and a list of ready samples, which is what a loop and an index cost. Microseconds a sample,
and the ratios of each round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from common import (
    Spread,
    add_run_options,
    alternate,
    announced_environment,
    clock,
    new_parser,
    positive,
    ratios,
    scratch_folder,
    table,
    write_json,
)
from torch.utils.data import Dataset

from torchcache import CachedDataset


def options() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--samples", type=positive, default=20_000, metavar="N", help="default: %(default)s")
    parser.add_argument("--rounds", type=positive, default=15, metavar="N", help="default: %(default)s")
    add_run_options(parser)
    return parser.parse_args()


class Images(Dataset[Any]):
    """Images and labels."""

    def __init__(self, samples: int) -> None:
        self.images = torch.rand(samples, 1, 28, 28, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], index % 10


def loop(get: Callable[[int], Any], order: list[int]) -> float:
    """Seconds to get every sample."""
    start = clock()
    for index in order:
        get(index)
    return clock() - start


def main() -> int:
    """Measures and reports. Returns the exit status."""
    args = options()
    facts = announced_environment()
    source = Images(args.samples)
    order = torch.randperm(args.samples, generator=torch.Generator().manual_seed(args.seed)).tolist()
    with scratch_folder(args.cache_dir, "item") as folder:
        with CachedDataset(source, cache_dir=folder, key="item") as filling:
            filling.fill()
        copies = CachedDataset(source, cache_dir=folder, key="item")
        views = CachedDataset(source, cache_dir=folder, key="item", copy=False)
        images, ready = source.images, [copies[index] for index in range(args.samples)]
        contestants: dict[str, Callable[[], float]] = {
            "ds[i]": lambda: loop(lambda i: copies[i], order),
            "ds[i], copy=False": lambda: loop(lambda i: views[i], order),
            "row of a tensor, copied": lambda: loop(lambda i: (images[i].clone(), i), order),
            "ready samples": lambda: loop(lambda i: ready[i], order),
        }
        for contestant in contestants.values():
            contestant()
        seconds = alternate(contestants, args.rounds)
        copies.close()
        views.close()
    micros = {name: [1e6 * value / args.samples for value in values] for name, values in seconds.items()}
    print(table(["a sample", "µs [lowest - highest]"], [[name, str(Spread.of(v))] for name, v in micros.items()]))
    found = {f"ds[i] / {name}": ratios(micros["ds[i]"], micros[name]) for name in list(micros)[1:]}
    print("\n" + table(["time", "ratio [lowest - highest]"], [[name, str(ratio)] for name, ratio in found.items()]))
    write_json(args, facts, {"microseconds": micros, "ratios": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
