"""torchcache beside other libraries: warm shuffled epochs of the same samples in one run, in turns.

Workloads: MNIST (float32 1 x 28 x 28, batches of 64 and 256), CIFAR-10 (uint8 3 x 32 x 32, batches of 128), images
(4,000 uint8 3 x 224 x 224, batches of 64). Each library converts the source into its own format, in a folder of its
own, and is read as its documentation says, without and with workers; ``peer_formats.py`` has the code. Floors: a bare
loop of ``index_select`` on contiguous tensors in RAM, and a DataLoader over a data set that does nothing.

Columns: seconds to convert (for torchcache the fill), bytes on disk, seconds of an epoch, and the ratio to torchcache
through the stock loader, round by round. What is not installed or does not work is named with the reason. Libraries
that read in order shuffle through a buffer, which is less than the others do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import (
    Spread,
    add_run_options,
    alternate,
    announced_environment,
    clock,
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
from data import add_data_options, load_cifar10, load_mnist, prepare_cifar10, prepare_mnist
from peer_formats import PEERS, Loaders, arrays, as_list
from plots import add_plot_option, plot_bars, require_matplotlib
from torch.utils.data import DataLoader, Dataset, TensorDataset

BATCH_SIZES = {"mnist": (64, 256), "cifar10": (128,), "images": (64,)}
IMAGES = 4000
OURS = "torchcache"


def options() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--data", nargs="+", choices=list(BATCH_SIZES), default=list(BATCH_SIZES), help="default: all")
    parser.add_argument("--workers", type=non_negative, nargs="+", default=[0, 2], metavar="N", help="default: 0 2")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS), help="default: all")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="epochs of each; default: %(default)s")
    add_plot_option(parser, "the ratios")
    add_run_options(parser)
    add_data_options(parser)
    args = parser.parse_args()
    if OURS not in args.peers:
        parser.error(f"--peers: {OURS!r} must be among them, the others are compared with it")
    return args


class Images(Dataset[Any]):
    """Images of 224 x 224, each of its own noise."""

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.Generator().manual_seed(index)
        return torch.randint(256, (3, 224, 224), dtype=torch.uint8, generator=noise), index % 10


class Nothing(Dataset[Any]):
    """As long as another data set, and holds nothing."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


def load(name: str, args: argparse.Namespace) -> tuple[str, Dataset[Any]]:
    """What the data is, in words, and the data."""
    if name == "mnist":
        return prepare_mnist(args.data_dir, download=not args.no_download), load_mnist(args.data_dir, train=True)
    if name == "images":
        return "noise of 3 x 224 x 224, uint8", Images()
    from torchvision.transforms import PILToTensor

    said = prepare_cifar10(args.data_dir, download=not args.no_download)
    return said, load_cifar10(args.data_dir, train=True, transform=PILToTensor())


def reason(error: Exception) -> str:
    """An exception in a line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def convert(source: Dataset[Any], folder: Path, names: list[str], failed: dict[str, str]) -> dict[str, Any]:
    """For each library that works: its loaders, the seconds to convert, the bytes on disk."""
    found = {}
    for number, name in enumerate(names):
        place = folder / str(number)
        place.mkdir()
        start = clock()
        try:
            loaders = PEERS[name](source, place)
        except Exception as error:  # anybody's code: whatever it raises is the reason
            failed[name] = reason(error)
            continue
        nbytes = sum(file.stat().st_blocks * 512 for file in place.rglob("*") if file.is_file())
        found[name] = {"loaders": loaders, "fill_s": clock() - start, "bytes": nbytes}
    return found


def epoch(loaders: Loaders, batch_size: int, workers: int) -> tuple[float, int]:
    """Seconds of an epoch, the start of its workers included, and the number of batches."""
    start, count = clock(), 0
    for _ in loaders(batch_size, workers):
        count += 1
    return clock() - start, count


def bare_gathers(ram: TensorDataset, batch_size: int) -> float:
    """Seconds to select an epoch's batches from tensors in RAM."""
    start = clock()
    for indices in torch.randperm(len(ram)).split(batch_size):
        for column in ram.tensors:
            column.index_select(0, indices)
    return clock() - start


def working(
    found: dict[str, Any], samples: int, batch_size: int, workers: int, failed: dict[str, str]
) -> dict[str, Callable[[], float]]:
    """The contestants that give as many batches as they should, each warmed up by that epoch."""
    contestants: dict[str, Callable[[], float]] = {}
    for name, peer in found.items():
        try:
            _, count = epoch(peer["loaders"], batch_size, workers)
        except Exception as error:  # as above
            failed[f"{name}, {workers} workers"] = reason(error)
            continue
        if abs(count - samples / batch_size) > max(1, workers):  # a worker may end with a batch of its own
            failed[f"{name}, {workers} workers"] = f"gives {count} batches of {batch_size} of {samples} samples"
            continue
        contestants[name] = lambda peer=peer: epoch(peer["loaders"], batch_size, workers)[0]
    return contestants


def measure(
    source: Dataset[Any], found: dict[str, Any], size: int, workers: int, failed: dict[str, str], rounds: int
) -> Any:
    """Seconds of an epoch of every contestant in every round."""
    ram = TensorDataset(*arrays(source))
    nothing = DataLoader(Nothing(len(ram)), batch_size=size, shuffle=True, num_workers=workers, collate_fn=as_list)
    contestants = working(found, len(ram), size, workers, failed)
    contestants["floor: index_select"] = lambda: bare_gathers(ram, size)
    contestants["floor: a loader of nothing"] = lambda: epoch(lambda *_: nothing, size, workers)[0]
    return alternate(contestants, rounds)


def report(found: dict[str, Any], seconds: dict[str, list[float]]) -> dict[str, Spread]:
    """Prints a table of one workload; returns the ratios."""
    times = {name: ratios(values, seconds[OURS]) for name, values in seconds.items()}
    rows = []
    for name in sorted(seconds, key=lambda name: times[name].median):
        peer = found.get(name)
        fill = [f"{peer['fill_s']:.2f}", f"{peer['bytes'] / 1e6:.0f}"] if peer else ["", ""]
        rows.append([name, *fill, str(Spread.of(seconds[name])), str(times[name])])
    print(table(["", "fill, s", "MB on disk", "epoch, s", "epoch / torchcache"], rows))
    return times


def main() -> int:
    """Measures and reports. Returns the exit status."""
    args = options()
    if args.plot is not None:
        require_matplotlib()
    facts = announced_environment()
    results: dict[str, Any] = {}
    panels: dict[str, dict[str, Spread]] = {}
    for name in args.data:
        said, whole = load(name, args)
        source = limited(whole, args.limit)
        print(f"\ndata: {said}; {length(source):,} samples")
        failed: dict[str, str] = {}
        with scratch_folder(args.cache_dir, "peers") as folder:
            found = convert(source, folder, args.peers, failed)
            for size in BATCH_SIZES[name]:
                for workers in args.workers:
                    print(f"\n{name}, batches of {size}, {workers} workers")
                    seconds = measure(source, found, size, workers, failed, args.rounds)
                    times = report(found, seconds)
                    results[f"{name}-{size}-{workers}"] = {"seconds": seconds, "ratios": times}
                    panels[f"{name}, batches of {size}, {workers} workers"] = times
        for peer, why in failed.items():
            print(f"not compared: {peer}: {why}")
        results[name] = {
            "data": said,
            "failed": failed,
            "fill": {peer: {"seconds": of["fill_s"], "bytes": of["bytes"]} for peer, of in found.items()},
        }
    write_json(args, facts, {"workloads": results})
    if args.plot is not None:
        ordered = {title: dict(sorted(of.items(), key=lambda pair: pair[1].median)) for title, of in panels.items()}
        plot_bars(args.plot, ordered, "epoch / torchcache's through a stock DataLoader", OURS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
