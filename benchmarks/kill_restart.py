"""Is a store right after its filling process was killed, again and again?

A program runs a shuffled DataLoader epoch over a source with a small delay a sample. At a random moment its whole
process group, workers included, gets SIGKILL; then it is started again, with another shuffle, on the same folder,
where nothing is cleaned up. The moments are spread over the time that the fill still needs, and count from before
the store is opened, so they fall into opening, claiming, reading and publishing. The last start runs to its end.
Exit status 0 means: that one ended well, the store is complete, and every sample equals the source's.

"Read again" are the samples that died with a process between the source and the store: what kills cost.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from common import (
    ReadLog,
    add_run_options,
    announced_environment,
    clock,
    new_parser,
    non_negative,
    positive,
    scratch_folder,
    table,
    write_json,
)
from torch.utils.data import DataLoader, Dataset, default_collate

from torchcache import CachedDataset

READY = "ready"
START_TIMEOUT_S = 120  # to import torch, on a busy machine
SLACK_S = 120  # for the last start, beyond what its delays add up to: after that it hangs


def options() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--kills", type=non_negative, default=10, metavar="N", help="default: %(default)s")
    parser.add_argument("--samples", type=positive, default=20_000, metavar="N", help="default: %(default)s")
    parser.add_argument("--delay-ms", type=float, default=1.0, metavar="MS", help="a sample; default: %(default)s")
    parser.add_argument("--batch-size", type=positive, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--workers", type=non_negative, default=2, metavar="N", help="default: %(default)s")
    add_run_options(parser)
    parser.add_argument("--start", type=int, help=argparse.SUPPRESS)  # this process is the one to kill,
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # in this folder
    args = parser.parse_args()
    args.samples = min(args.samples, args.limit or args.samples)
    return args


def sample(index: int) -> tuple[torch.Tensor, int, str]:
    """What the source holds at an index: an image, a label, and a text whose length varies."""
    image = torch.arange(784).mul(2 * index + 1).remainder(251).to(torch.uint8).view(1, 28, 28)
    return image, index % 10, f"sample {index} " + "." * (index % 29)


class SlowSource(Dataset[Any]):
    """The samples, each read of them slow, and written down in a log if there is one."""

    def __init__(self, samples: int, delay_s: float, log: ReadLog | None) -> None:
        self.samples, self.delay_s, self.log = samples, delay_s, log

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, str]:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        if self.log is not None:
            self.log.record([index])
        time.sleep(self.delay_s)
        return sample(index)


def open_cached(source: SlowSource, folder: Path) -> CachedDataset:
    """The store of the benchmark. The log and the delay are no part of the data's identity, hence a key."""
    return CachedDataset(source, cache_dir=folder / "stores", name="kill", key="kill-restart")


def fill(args: argparse.Namespace) -> None:
    """One start of the filling program: an epoch, in an order of its own."""
    source = SlowSource(args.samples, args.delay_ms / 1000, ReadLog(args.folder / "reads"))
    print(READY, flush=True)
    with open_cached(source, args.folder) as dataset:
        order = torch.Generator().manual_seed(args.seed + args.start)
        for _ in DataLoader(
            dataset, batch_size=args.batch_size, shuffle=True, num_workers=args.workers, generator=order
        ):
            pass


def start_and_kill(number: int, folder: Path, after_s: float, errors: IO[bytes]) -> int | None:
    """Starts the filling program, and kills its process group some seconds after it is ready.

    Returns:
        Its exit status where it ended by itself before, else None.
    """
    command = [sys.executable, *sys.argv, "--start", str(number), "--folder", str(folder)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
    assert child.stdout is not None  # for the type checker: it was asked for
    try:
        if child.stdout.readline().strip() != READY:
            return child.wait(START_TIMEOUT_S)
        return child.wait(after_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child.poll() is None:  # once it is reaped, its number may belong to others
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        child.stdout.close()


def run(args: argparse.Namespace, folder: Path, errors: IO[bytes]) -> tuple[list[list[str]], int | None]:
    """All starts. Returns a row for each kill, and the exit status of the last start (None: it hung)."""
    moments, log, rows = random.Random(args.seed), ReadLog(folder / "reads"), list[list[str]]()
    speed = max(1, args.workers) / max(args.delay_ms / 1000, 1e-5)  # samples a second, at best
    for number in range(args.kills):
        seen = int(np.count_nonzero(log.counts(args.samples)))
        # With k kills to come, a mean life of 1/(k + 1) of what is left spreads them over the whole fill.
        after_s = moments.uniform(0, 2 * (args.samples - seen) / speed / (args.kills - number + 1))
        status = start_and_kill(number, folder, after_s, errors)
        if status not in (None, 0):
            return rows, status
        seen = int(np.count_nonzero(log.counts(args.samples)))
        rows.append([str(number + 1), "no" if status is None else "yes", f"{after_s:.3f}", f"{seen:,}"])
        print(f"killed {number + 1} of {args.kills}, {seen:,} samples read", file=sys.stderr)
    return rows, start_and_kill(args.kills, folder, SLACK_S + args.samples / speed, errors)


def wrong_samples(args: argparse.Namespace, folder: Path) -> tuple[bool, list[int]]:
    """Whether the store is complete, and the indices at which it differs from the source, one by one and in batches."""
    wrong = set()
    with open_cached(SlowSource(args.samples, 0, None), folder) as dataset:
        complete = dataset.complete
        batches = iter(DataLoader(dataset, batch_size=args.batch_size))
        for part in torch.arange(args.samples).split(args.batch_size):
            expected = [sample(index) for index in part.tolist()]
            indices = part.tolist()
            if not same(next(batches), default_collate(expected)):
                wrong |= set(indices)
            wrong |= {i for i, right in zip(indices, expected, strict=True) if not same(dataset[i], right)}
    return complete, sorted(wrong)


def same(one: Any, other: Any) -> bool:
    """Equal in type and value, tensors inside tuples and lists included."""
    if isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(other, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def problems(args: argparse.Namespace, folder: Path, status: int | None) -> list[str]:
    """What is wrong after the last start; empty where nothing is."""
    if status is None:
        return [f"the last start was still running {SLACK_S} s after it should have ended"]
    if status != 0:
        return [f"a start ended with exit status {status}"]
    complete, wrong = wrong_samples(args, folder)
    found = [] if complete else ["the store is not complete"]
    if wrong:
        found.append(f"{len(wrong):,} wrong samples, the first at index {wrong[0]}")
    return found


def main() -> int:
    """Kills, restarts, and checks. Returns the exit status."""
    args = options()
    if args.start is not None:
        fill(args)
        return 0
    facts = announced_environment()
    size = f"{args.samples:,} samples of {args.delay_ms} ms, {args.workers} workers"
    print(f"{size}, {args.kills} kills, seed {args.seed}")
    with scratch_folder(args.cache_dir, "kill") as folder, tempfile.TemporaryFile() as errors:
        began = clock()
        rows, status = run(args, folder, errors)
        seconds = clock() - began
        again = int(ReadLog(folder / "reads").counts(args.samples).clip(1).sum()) - args.samples
        found = problems(args, folder, status)
        if found:
            errors.seek(0)
            print(errors.read().decode(errors="replace"), file=sys.stderr)
    print("\n" + table(["kill", "had ended", "after seconds", "samples read so far"], rows))
    killed = sum(row[1] == "no" for row in rows)
    print(f"\n{killed} killed while filling; read again: {again:,} of {args.samples:,} samples; {seconds:.0f} s in all")
    print("; ".join(found) if found else "the store is complete, and every sample equals the source's")
    write_json(args, facts, {"killed": killed, "samples_read_again": again, "problems": found})
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
