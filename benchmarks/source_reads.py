"""How often is the source read? Once for each sample, over all workers, processes and runs.

Two programs run one after another on one cache folder, each several shuffled epochs of MNIST with worker processes
of its own. The source writes down each index it is asked for. Exit status 0 means that each index stands there
exactly once, and that every epoch was right: an order-independent checksum over images and labels equals that of the
source.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    CountedDataset,
    ReadLog,
    add_run_options,
    announced_environment,
    length,
    limited,
    new_parser,
    non_negative,
    positive,
    scratch_folder,
    table,
    write_json,
)
from data import add_data_options, announced_mnist, load_mnist
from torch.utils.data import DataLoader

from torchcache import CachedDataset


def options() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--batch-size", type=positive, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--workers", type=non_negative, nargs="+", default=[2, 4], metavar="N", help="of each program; default: 2 4"
    )
    parser.add_argument("--epochs", type=positive, default=3, metavar="N", help="of each program; default: %(default)s")
    parser.add_argument("--start-method", choices=["fork", "spawn", "forkserver"], help="of workers; default: torch's")
    parser.add_argument("--persistent", action="store_true", help="keep the workers from epoch to epoch")
    add_run_options(parser)
    add_data_options(parser)
    parser.add_argument("--program", type=int, help=argparse.SUPPRESS)  # this process is one of the programs,
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # on this cache folder
    return parser.parse_args()


def checksum(loader: DataLoader[Any]) -> int:
    """A number that depends on every image and its label, and not on their order; wraps around at 2^64."""
    total = torch.zeros((), dtype=torch.int64)
    for images, labels in loader:
        bits = images.flatten(1).contiguous().view(torch.int32).to(torch.int64)
        places = torch.arange(1, bits.shape[1] + 1)
        total += ((bits * places).sum(1) * (labels + 1)).sum()
    return int(total)


def program(args: argparse.Namespace) -> dict[str, Any]:
    """One program: a few epochs through the cache."""
    source = limited(load_mnist(args.data_dir, train=True), args.limit)
    counted = CountedDataset(source, ReadLog(args.folder / "reads"))
    workers = args.workers[args.program]
    # The log is no part of the data's identity, hence a key.
    with CachedDataset(counted, cache_dir=args.folder / "stores", name="reads", key="source-reads", check=0) as dataset:
        loader = DataLoader(
            dataset,
            batch_size=args.batch_size,
            shuffle=True,
            num_workers=workers,
            multiprocessing_context=args.start_method if workers else None,
            persistent_workers=args.persistent and workers > 0,
            generator=torch.Generator().manual_seed(args.seed + args.program),
        )
        checksums, complete = [checksum(loader) for _ in range(args.epochs)], dataset.complete
    expected = checksum(DataLoader(source, batch_size=args.batch_size))  # not through the log, so not counted
    return {"samples": length(source), "checksums": checksums, "expected": expected, "complete": complete}


def run_program(number: int, folder: Path) -> dict[str, Any]:
    """The same in a process of its own, started with the options of this one."""
    command = [sys.executable, *sys.argv, "--program", str(number), "--folder", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"program {number + 1} ended with exit status {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def problems(results: list[dict[str, Any]], counts: np.ndarray[Any, Any]) -> list[str]:
    """What is wrong; empty where nothing is."""
    found = []
    if (counts != 1).any():
        found.append(f"{(counts == 0).sum():,} samples were never read, {(counts > 1).sum():,} more than once")
    for number, result in enumerate(results, 1):
        wrong = [epoch for epoch, value in enumerate(result["checksums"], 1) if value != result["expected"]]
        if wrong:
            found.append(f"program {number}: wrong images or labels in epoch {wrong}")
        if not result["complete"]:
            found.append(f"program {number}: the store is not complete afterwards")
    return found


def main() -> int:
    """Runs the programs and counts. Returns the exit status."""
    args = options()
    if args.program is not None:
        print(json.dumps(program(args)))
        return 0
    facts = announced_environment()
    data = announced_mnist(args)
    with scratch_folder(args.cache_dir, "reads") as folder:
        log, totals, results = ReadLog(folder / "reads"), [0], []
        for number in range(len(args.workers)):
            results.append(run_program(number, folder))
            totals.append(log.total())
        samples = results[0]["samples"]
        counts = log.counts(samples)
    reads = [after - before for before, after in pairwise(totals)]
    rows = [
        [str(number), str(workers), str(args.epochs), f"{args.epochs * samples:,}", f"{count:,}"]
        for number, (workers, count) in enumerate(zip(args.workers, reads, strict=True), 1)
    ]
    print("\n" + table(["program", "workers", "epochs", "samples drawn", "source reads"], rows))
    found = problems(results, counts)
    print(f"\nsource reads: {counts.sum():,} for {samples:,} samples: {'; '.join(found) or 'each exactly once'}")
    write_json(args, facts, {"data": data, "samples": samples, "source_reads": reads, "problems": found})
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
