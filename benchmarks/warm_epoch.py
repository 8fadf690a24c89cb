"""A warm, shuffled epoch of MNIST through a stock DataLoader and through torchcache's, and the gather underneath.

Images are float32 (``ToTensor`` and ``Normalize``), the loader has no workers by default, and the store is complete,
was filled in another order than it is read in, and lies in the page cache. The contestants take turns:

- cached: ``CachedDataset``, reopened after its fill;
- cached, own loader: the same through ``torchcache.DataLoader``;
- uncached: the torchvision data set itself;
- in RAM: a ``TensorDataset`` of the same images;
- floor: a data set that does nothing, with a collate function that does nothing: sampler and loader alone;
- ready, with workers: the same, but it returns a batch that it has ready, which the worker only has to send.

Then the gathers alone, also in turns: batches of the store against ``index_select`` on contiguous tensors in RAM, as
PyTorch does it and on one thread (it spreads even such short copies over threads, and waits for the slowest of them).
"Gather" looks up the places of each batch, as under a stock loader, "gather, looked up" those of the epoch at once.
Every ratio is the median over the rounds, with the lowest and the highest. An epoch through the cache is first
compared with the same epoch from RAM, value by value.
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
from torch.utils.data import DataLoader, Dataset, TensorDataset

import torchcache
from torchcache import CachedDataset

WARM_UP_BATCHES = 50  # of the uncached data set, whose epochs are long and all alike


def options() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--batch-size", type=positive, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--workers", type=non_negative, default=0, metavar="N", help="default: %(default)s")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="epochs of each; default: %(default)s")
    parser.add_argument("--gather-rounds", type=positive, default=25, metavar="N", help="default: %(default)s")
    add_run_options(parser)
    add_data_options(parser)
    return parser.parse_args()


class Nothing(Dataset[Any]):
    """As long as another data set, and holds nothing: what remains is the cost of sampler and loader."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class Ready(Nothing):
    """Gives the same batch each time."""

    def __init__(self, samples: int, batch: list[torch.Tensor]) -> None:
        super().__init__(samples)
        self.batch = batch

    def __getitems__(self, indices: list[int]) -> Any:
        return [column[: len(indices)] for column in self.batch]


def unchanged(batch: Any) -> Any:
    """A collate function that does nothing."""
    return batch


def loader(
    dataset: Dataset[Any], args: argparse.Namespace, cls: type[DataLoader[Any]] = DataLoader, **more: Any
) -> DataLoader[Any]:
    """The same loader for everybody: shuffled by the same seed."""
    order = torch.Generator().manual_seed(args.seed)
    return cls(dataset, batch_size=args.batch_size, shuffle=True, num_workers=args.workers, generator=order, **more)


def filled(source: Dataset[Any], args: argparse.Namespace, folder: Path) -> CachedDataset:
    """The data set behind a complete store, filled by a shuffled epoch and opened again."""
    with CachedDataset(source, cache_dir=folder, name="warm") as dataset:
        order = torch.Generator().manual_seed(args.seed + 1)
        epoch_seconds(DataLoader(dataset, batch_size=args.batch_size, shuffle=True, generator=order))
    dataset = CachedDataset(source, cache_dir=folder, name="warm")
    if not dataset.complete:
        raise SystemExit(f"the store is not complete after an epoch: {dataset.stats}")
    return dataset


def in_ram(source: Dataset[Any]) -> TensorDataset:
    """Every sample, in one tensor of images and one of labels."""
    images, labels = zip(*DataLoader(source, batch_size=1000), strict=True)
    return TensorDataset(torch.cat(images), torch.cat(labels))


def check_equal(one: DataLoader[Any], other: DataLoader[Any]) -> None:
    """Ends the program if two loaders differ in any type, shape or value."""
    for number, (left, right) in enumerate(zip(one, other, strict=True)):
        for a, b in zip(left, right, strict=True):
            if a.dtype != b.dtype or not torch.equal(a, b):
                raise SystemExit(f"batch {number} from the cache differs from the same batch in RAM")


def measure_epochs(
    source: Dataset[Any], ram: TensorDataset, dataset: CachedDataset, args: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds of a whole epoch in each round."""
    epoch_seconds(loader(source, args), WARM_UP_BATCHES)
    nothing = Nothing(length(source))
    contestants = {
        "cached": lambda: epoch_seconds(loader(dataset, args)),
        "cached, own loader": lambda: epoch_seconds(loader(dataset, args, torchcache.DataLoader)),
        "uncached": lambda: epoch_seconds(loader(source, args)),
        "in RAM": lambda: epoch_seconds(loader(ram, args)),
        "floor": lambda: epoch_seconds(loader(nothing, args, collate_fn=unchanged)),
    }
    if args.workers:
        ready = Ready(length(source), [column[: args.batch_size].clone() for column in ram.tensors])
        contestants["ready"] = lambda: epoch_seconds(loader(ready, args, collate_fn=unchanged))
    return alternate(contestants, args.rounds)


def gather_loop(ds: CachedDataset, order: torch.Tensor, batch_size: int) -> float:
    """Seconds to gather an epoch's batches from the store, image and label columns, with no loader and no collate.

    ``order`` holds every index once, int64. This is the one place that reaches below the public interface.
    """
    cache = ds._connection.open()
    assert cache is not None  # a store that could not be opened would have ended the program before
    reader = cache.reader
    start = clock()
    for indices in order.split(batch_size):
        rows = reader.find(indices)
        assert rows is not None
        for column in range(len(rows.table.columns)):
            reader.gather(rows, column)
    return clock() - start


def looked_up_loop(ds: CachedDataset, order: torch.Tensor, batch_size: int) -> float:
    """Seconds for the same batches when the places of all samples are looked up at once."""
    cache = ds._connection.open()
    assert cache is not None
    reader, places = cache.reader, cache.reader.only_table()
    assert places is not None  # the store is complete, and all its samples are alike
    start = clock()
    columns = [places.look_up(column, order).split(batch_size) for column in range(len(places.columns))]
    for batch in zip(*columns, strict=True):
        for column, found in enumerate(batch):
            reader.take(places, column, found)
    return clock() - start


def ram_loop(ram: TensorDataset, order: torch.Tensor, batch_size: int) -> float:
    """Seconds for the same batches by ``index_select`` from contiguous tensors in RAM."""
    start = clock()
    for indices in order.split(batch_size):
        for column in ram.tensors:
            column.index_select(0, indices)
    return clock() - start


def on_one_thread(work: Callable[[], float]) -> float:
    """What ``work`` returns when PyTorch may not spread a call over threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return work()
    finally:
        torch.set_num_threads(threads)


def measure_gathers(ram: TensorDataset, dataset: CachedDataset, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of the bare gathers of an epoch in each round."""
    order = torch.randperm(len(ram), generator=torch.Generator().manual_seed(args.seed))
    contestants = {
        "gather": lambda: gather_loop(dataset, order, args.batch_size),
        "gather, looked up": lambda: looked_up_loop(dataset, order, args.batch_size),
        "index_select": lambda: ram_loop(ram, order, args.batch_size),
        "index_select, one thread": lambda: on_one_thread(lambda: ram_loop(ram, order, args.batch_size)),
    }
    for contestant in contestants.values():
        contestant()
    return alternate(contestants, args.gather_rounds)


def report(epochs: dict[str, list[float]], gathers: dict[str, list[float]]) -> dict[str, Spread]:
    """Prints the times, then the ratios, which it returns."""
    rows = [[name, *f"{Spread.of(values)}".split(" ", 1)] for name, values in (epochs | gathers).items()]
    print("\n" + table(["epoch of", "seconds", "lowest - highest"], rows))
    ours = ("cached", "cached, own loader"), ("gather", "gather, looked up")
    results = {
        f"{one} / {name}": ratios(times[one], times[name])
        for times, names in zip((epochs, gathers), ours, strict=True)
        for one in names
        for name in times
        if name not in names
    }
    gather = Spread.of(gathers["gather"]).median  # not of the same rounds
    floors = [seconds + gather for seconds in epochs["floor"]]
    for one in ours[0]:
        results[f"{one} / (gather + floor)"] = ratios(epochs[one], floors)
    rows = [[name, str(ratio), ratio.as_fraction()] for name, ratio in results.items()]
    print("\n" + table(["ratio", "median [lowest - highest]", "that is"], rows))
    return results


def main() -> int:
    """Measures and reports. Returns the exit status."""
    args = options()
    facts = announced_environment()
    data = announced_mnist(args)
    source = limited(load_mnist(args.data_dir, train=True), args.limit)
    print(f"{length(source):,} samples, batches of {args.batch_size}, {args.workers} workers, warm")
    with scratch_folder(args.cache_dir, "warm") as folder, filled(source, args, folder) as dataset:
        ram = in_ram(source)
        check_equal(loader(dataset, args), loader(ram, args))
        print("an epoch through the cache equals the same epoch from RAM, value by value")
        epochs = measure_epochs(source, ram, dataset, args)
        gathers = measure_gathers(ram, dataset, args)
    results = report(epochs, gathers)
    write_json(args, facts, {"data": data, "seconds": epochs | gathers, "ratios": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
