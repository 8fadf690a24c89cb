"""What filling the cache adds to reading the source: claim, take apart, publish, in microseconds a sample.

For sources of several speeds, samples of several sizes, numbers of workers, by batch (``default_collate``) and item by
item (``batch_size=None``): an epoch that fills an empty store against the same epoch of the source alone, in turns.
The overhead is the difference of the two, by the number of samples; with workers it is of what is waited for in the
main process, so that it may be hidden, or none. The ratio fill/uncached is of whole epochs. The source gives uint8
tensors that exist already: it computes for times up to 1 ms (with the interpreter's lock), and sleeps for longer ones.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from common import (
    Spread,
    add_run_options,
    alternate,
    announced_environment,
    clock,
    epoch_seconds,
    new_parser,
    non_negative,
    positive,
    ratios,
    scratch_folder,
    table,
    write_json,
)
from torch.utils.data import DataLoader, Dataset

from torchcache import CachedDataset

POOL = 16  # different samples
SLEEPS_FROM_S = 1e-3


def options() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--source-us", type=non_negative, nargs="+", default=[0, 50, 5000], metavar="US")
    parser.add_argument("--sample-bytes", type=positive, nargs="+", default=[1000, 600_000], metavar="B")
    parser.add_argument("--workers", type=non_negative, nargs="+", default=[0, 2, 8], metavar="N")
    parser.add_argument("--modes", nargs="+", choices=("batch", "item"), default=["batch", "item"])
    parser.add_argument("--batch-size", type=positive, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--samples", type=positive, default=12_800, metavar="N", help="at most; default: %(default)s")
    parser.add_argument("--epoch-mb", type=positive, default=256, metavar="MB", help="at most; default: %(default)s")
    parser.add_argument("--epoch-s", type=positive, default=5, metavar="S", help="in the source, at most; default: 5")
    parser.add_argument("--pairs", type=positive, default=5, metavar="N", help="default: %(default)s")
    add_run_options(parser)
    return parser.parse_args()


class Timed(Dataset[Any]):
    """Tensors that take a given time to get."""

    def __init__(self, samples: int, nbytes: int, seconds: float) -> None:
        self.samples, self.seconds = samples, seconds
        self.pool = torch.arange(POOL, dtype=torch.uint8)[:, None].expand(POOL, nbytes).contiguous().unbind()

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.seconds >= SLEEPS_FROM_S:
            time.sleep(self.seconds)
        elif self.seconds:
            end = clock() + self.seconds
            while clock() < end:
                pass
        return self.pool[index % POOL]


@dataclass(frozen=True)
class Case:
    """One cell of the grid."""

    source_us: int
    sample_bytes: int
    workers: int
    mode: str

    def samples(self, args: argparse.Namespace) -> int:
        """As many as an epoch's limits allow."""
        by_time = args.epoch_s * 1e6 / max(self.source_us, 1)
        return max(1, int(min(args.samples, by_time, args.epoch_mb * 1e6 / self.sample_bytes)))


def epoch(dataset: Dataset[Any], case: Case, args: argparse.Namespace) -> float:
    """Seconds of an epoch in order; the samples come one by one, or by batch."""
    size = args.batch_size if case.mode == "batch" else None
    return epoch_seconds(DataLoader(dataset, batch_size=size, num_workers=case.workers))


def filling(source: Timed, case: Case, args: argparse.Namespace) -> float:
    """Seconds of an epoch that fills a new store."""
    with (
        scratch_folder(args.cache_dir, "overhead") as folder,
        CachedDataset(source, cache_dir=folder, key="overhead") as dataset,
    ):
        _ = dataset.complete  # opens it
        seconds = epoch(dataset, case, args)
        if not dataset.complete or dataset.stats.source_reads != len(source):
            raise SystemExit(f"the fill is not what it should be: {dataset.stats}")
    return seconds


def measure(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of both in each pair, the overhead in microseconds a sample, the ratio."""
    source = Timed(case.samples(args), case.sample_bytes, case.source_us / 1e6)
    seconds = alternate(
        {"uncached": lambda: epoch(source, case, args), "fill": lambda: filling(source, case, args)}, args.pairs
    )
    added = [
        1e6 * (fill - plain) / len(source) for fill, plain in zip(seconds["fill"], seconds["uncached"], strict=True)
    ]
    return {
        **asdict(case),
        "samples": len(source),
        "seconds": seconds,
        "overhead_us": Spread.of(added),
        "ratio": ratios(seconds["fill"], seconds["uncached"]),
    }


def main() -> int:
    """Measures and reports. Returns the exit status."""
    args = options()
    facts = announced_environment()
    print(f"batches of {args.batch_size}, {args.pairs} pairs")
    cells = itertools.product(args.source_us, args.sample_bytes, args.workers, args.modes)
    results = [measure(Case(*cell), args) for cell in cells]
    header = ["source, µs", "bytes", "workers", "by", "samples", "overhead, µs a sample", "fill / uncached"]
    fields = ("source_us", "sample_bytes", "workers", "mode", "samples", "overhead_us", "ratio")
    print(table(header, [[str(result[name]) for name in fields] for result in results]))
    write_json(args, facts, {"cases": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
