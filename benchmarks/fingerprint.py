"""What it costs to identify a dataset, which wrapping it does once: MNIST in memory, and long lists of files.

Every byte and every entry counts, so that the time grows with the dataset. A first call of each is not timed: it also
finds out which version of which package a class belongs to.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from common import (
    Spread,
    add_run_options,
    alternate,
    announced_environment,
    clock,
    limited,
    new_parser,
    positive,
    table,
    write_json,
)
from data import add_data_options, announced_mnist, load_mnist

from torchcache import fingerprint

CLASSES = 1000


class Files:
    """What an ``ImageFolder`` of so many files holds, without the files."""

    def __init__(self, paths: list[str]) -> None:
        self.root = "/data/train"
        self.samples = [(path, number % CLASSES) for number, path in enumerate(paths)]
        self.imgs = self.samples
        self.targets = [label for _, label in self.samples]


def options() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--paths", type=positive, default=1_300_000, metavar="N", help="default: %(default)s")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="default: %(default)s")
    add_run_options(parser)
    add_data_options(parser)
    return parser.parse_args()


def contestants(args: argparse.Namespace) -> dict[str, Any]:
    """What is identified, by a name for the table."""
    mnist = limited(load_mnist(args.data_dir, train=True), args.limit)
    names = (f"n{number % CLASSES:08d}/n{number % CLASSES:08d}_{number}.JPEG" for number in range(args.paths))
    paths = [f"/data/train/{name}" for name in names]
    files = Files(paths)
    return {"MNIST": mnist, "paths": paths, "(path, class) pairs": files.samples, "like ImageFolder": files}


def timed(obj: Any) -> Callable[[], float]:
    """A contestant: seconds to identify an object."""

    def seconds() -> float:
        start = clock()
        fingerprint(obj, explain=True)  # as wrapping does, which keeps what went in
        return clock() - start

    return seconds


def main() -> int:
    """Runs the benchmark. Returns the exit status."""
    args = options()
    facts = announced_environment()
    data = announced_mnist(args)
    objects = contestants(args)
    keys = {name: fingerprint(obj) for name, obj in objects.items()}
    times = alternate({name: timed(obj) for name, obj in objects.items()}, args.rounds)
    rows = [[name, str(Spread.of(seconds))] for name, seconds in times.items()]
    print("\n" + table([f"{args.paths:,} paths", "seconds"], rows))
    write_json(args, facts, {"data": data, "seconds": times, "keys": keys})
    return 0


if __name__ == "__main__":
    sys.exit(main())
