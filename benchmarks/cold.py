"""Random batches from a store that is not in memory, against the plain map, reads by threads, and the disk itself.

For each sample size a store is filled, and its pages are dropped before each turn (``posix_fadvise``, after the map has
let go of them). The contestants take turns, each with batches of its own:

- map: the gathers of a reader without read-ahead: one page fault after another;
- read-ahead: the same as they are, the kernel being told of the batch first (``torchcache.readahead``);
- read-ahead, next: the kernel is told of the next batch, too, as ``torchcache.DataLoader`` does, which knows it;
- pread: ``--threads`` threads that read the same samples into a tensor, a call each;
- sequential: the file from its beginning, which shows what the disk can do.

Then the first two again with the store in memory, where read-ahead must cost nothing. A rate is in MB/s of samples.
The kernel's own read-ahead (``/sys/block/*/queue/read_ahead_kb``) decides how bad a page fault is: it is printed.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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
from plots import add_plot_option, plot_bars, require_matplotlib
from torch.utils.data import Dataset

from torchcache import CachedDataset
from torchcache.readahead import CALM
from torchcache.reader import Reader
from torchcache.store import destroy

KB, MB = 1 << 10, 1 << 20
SIZES_KB = (4, 147, 4096)  # 147: uint8 images of 3 x 224 x 224
SEQUENTIAL_BYTES = MB  # a read
WARM_ROUNDS = 5  # for each cold one: they are short


def options() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--sizes-kb", type=positive, nargs="+", default=SIZES_KB, metavar="KB", help="of a sample")
    parser.add_argument("--file-mb", type=positive, default=2048, metavar="MB", help="default: %(default)s")
    parser.add_argument("--turn-mb", type=positive, default=256, metavar="MB", help="read a turn at most; default: 256")
    parser.add_argument("--batch-size", type=positive, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--batches", type=positive, default=40, metavar="N", help="a turn at most; default: 40")
    parser.add_argument("--threads", type=positive, default=16, metavar="N", help="that read; default: %(default)s")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="default: %(default)s")
    add_plot_option(parser, "the rates")
    add_run_options(parser)
    return parser.parse_args()


class Samples(Dataset[Any]):
    """Samples of so many bytes."""

    def __init__(self, samples: int, nbytes: int) -> None:
        self.samples, self.nbytes = samples, nbytes

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.nbytes,), index % 251, dtype=torch.uint8)


class Never:
    """In the place of a reader's ``ReadAhead``: none."""

    def is_due(self) -> bool:
        return False


class Store:
    """A filled store, and what is drawn from it.

    This is the one place that reaches below the public interface.
    """

    def __init__(self, folder: Path, sample_bytes: int, args: argparse.Namespace) -> None:
        samples = max(2, args.file_mb * MB // sample_bytes)
        self.dataset = CachedDataset(Samples(samples, sample_bytes), cache_dir=folder, key=f"cold-{sample_bytes}")
        self.dataset.fill()
        self.dataset.close()
        cache = self.dataset._connection.begin()
        assert cache is not None
        self.reader: Reader = cache.reader
        self.sample_bytes = sample_bytes
        self.batch_size = max(1, min(args.batch_size, samples // 2, args.turn_mb * MB // sample_bytes))
        self.batches = max(1, min(args.batches, args.turn_mb * MB // (self.batch_size * sample_bytes)))
        self.ahead = self.reader._ahead
        self.generator = torch.Generator().manual_seed(args.seed)
        self.file = os.open(self.dataset.path / "data.mdb", os.O_RDONLY)
        os.fsync(self.file)

    def close(self) -> None:
        """Removes it: the next one needs the room."""
        os.close(self.file)
        self.dataset.close()
        destroy(self.dataset.path)

    @property
    def turn_bytes(self) -> int:
        """Bytes of samples that a turn reads."""
        return self.batches * self.batch_size * self.sample_bytes

    def drop(self) -> None:
        """Has this process and the kernel forget the pages of the file."""
        if self.reader.map is not None:
            self.reader.map.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_DONTNEED)

    def order(self) -> list[torch.Tensor]:
        """The batches of a turn: other samples each time."""
        drawn = torch.randint(len(self.dataset), (self.batches * self.batch_size,), generator=self.generator)
        return list(drawn.split(self.batch_size))

    def gathers(self, ahead: Any, *, cold: bool) -> float:
        """Seconds to gather the batches of a turn."""
        order = self.order()
        if cold:
            self.drop()
        self.reader._ahead = ahead
        start = clock()
        for batch in order:
            rows = self.reader.find(batch)
            assert rows is not None
            self.reader.gather(rows, 0)
        return clock() - start

    def gathers_ahead(self) -> float:
        """Seconds to gather the batches of a turn, each being announced before the one before it is gathered."""
        order = self.order()
        self.drop()
        start = clock()
        found = [self.reader.find(batch) for batch in order]
        for rows, following in zip(found, [*found[1:], None], strict=True):
            assert rows is not None
            self.reader._ahead = self.ahead
            if rows is found[0]:
                self.reader.announce_rows(rows)
            if following is not None:
                self.reader.announce_rows(following)
            self.reader._ahead = Never()
            self.reader.gather(rows, 0)
        return clock() - start

    def preads(self, pool: ThreadPoolExecutor) -> float:
        """Seconds to read the batches of a turn by threads."""
        order = self.order()
        found = self.reader.only_table()
        assert found is not None
        unit = found.schema.columns[0].unit
        self.drop()
        start = clock()
        for batch in order:
            offsets = (found.look_up(0, batch) * unit).tolist()
            rows = list(torch.empty(len(batch), self.sample_bytes, dtype=torch.uint8).numpy())
            for count in pool.map(lambda row, offset: os.preadv(self.file, [row], offset), rows, offsets):
                assert count == self.sample_bytes
        return clock() - start

    def sequential(self) -> float:
        """Seconds to read as many bytes from the beginning of the file."""
        self.drop()
        return self._read_from_beginning(self.turn_bytes)

    def warm_up(self) -> None:
        """Brings the whole file into memory, and read-ahead to rest."""
        self._read_from_beginning(os.fstat(self.file).st_size)
        for _ in range(2 * CALM // self.batches + 1):
            self.gathers(self.ahead, cold=False)

    def _read_from_beginning(self, nbytes: int) -> float:
        buffer, position = bytearray(SEQUENTIAL_BYTES), 0
        start = clock()
        while position < nbytes:
            position += os.preadv(self.file, [buffer], position)
        return clock() - start


def device_read_ahead(path: Path) -> str:
    """What the kernel reads around a page fault on the device of a path, as it says itself."""
    device = os.stat(path).st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    for folder in (block, block.parent):  # a partition has its disk's
        if (folder / "queue").exists():
            return (folder / "queue" / "read_ahead_kb").read_text().strip() + " KB"
    return "unknown"


def measure(store: Store, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of a turn of each contestant in every round."""
    with ThreadPoolExecutor(args.threads) as pool:
        cold: dict[str, Callable[[], float]] = {
            "map": lambda: store.gathers(Never(), cold=True),
            "read-ahead": lambda: store.gathers(store.ahead, cold=True),
            "read-ahead, next": store.gathers_ahead,
            "pread": lambda: store.preads(pool),
            "sequential": store.sequential,
        }
        store.preads(pool)  # starts the threads
        seconds = alternate(cold, args.rounds)
    store.warm_up()
    warm: dict[str, Callable[[], float]] = {
        "map, warm": lambda: store.gathers(Never(), cold=False),
        "read-ahead, warm": lambda: store.gathers(store.ahead, cold=False),
    }
    for contestant in warm.values():
        contestant()
    return seconds | alternate(warm, WARM_ROUNDS * args.rounds)


def report(store: Store, seconds: dict[str, list[float]]) -> tuple[dict[str, Spread], dict[str, Spread]]:
    """Prints rates and ratios of one sample size, and returns both."""
    rates = {name: [store.turn_bytes / value / 1e6 for value in values] for name, values in seconds.items()}
    print(f"\nsamples of {store.sample_bytes // KB} KB, {store.batches} batches of {store.batch_size}")
    print(table(["contestant", "MB/s [lowest - highest]"], [[name, str(Spread.of(v))] for name, v in rates.items()]))
    pairs = [("read-ahead", other) for other in ("map", "pread", "sequential")]
    pairs += [("read-ahead, next", other) for other in ("map", "sequential")]
    pairs += [("pread", "sequential"), ("read-ahead, warm", "map, warm")]
    found = {f"{one} / {other}": ratios(rates[one], rates[other]) for one, other in pairs}
    print(table(["rate", "ratio [lowest - highest]"], [[name, str(ratio)] for name, ratio in found.items()]))
    return {name: Spread.of(values) for name, values in rates.items()}, found


def main() -> int:
    """Measures and reports. Returns the exit status."""
    args = options()
    if args.plot is not None:
        require_matplotlib()
    facts = announced_environment()
    results: dict[str, Any] = {}
    panels: dict[str, dict[str, Spread]] = {}
    with scratch_folder(args.cache_dir, "cold") as folder:
        around = device_read_ahead(folder)
        print(f"the kernel reads {around} around a page fault on this device")
        for size in args.sizes_kb:
            store = Store(folder, size * KB, args)
            seconds = measure(store, args)
            rates, found = report(store, seconds)
            results[f"{size} KB"] = {"seconds": seconds, "ratios": found}
            panels[f"samples of {size} KB"] = rates
            store.close()
    write_json(args, facts, {"read_around": around, "sizes": results})
    if args.plot is not None:
        plot_bars(args.plot, panels, "MB/s of samples", "read-ahead")
    return 0


if __name__ == "__main__":
    sys.exit(main())
