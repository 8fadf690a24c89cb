"""LeNet-5 on MNIST, without a cache (the default), with one (--cache), or both in turns (--compare).

--compare starts from an empty cache in a folder of its own, which it removes again. Both trainings have the same
seeds, so both must compute the same: on the CPU the loss of every step is compared bit for bit, and any difference
makes the exit status 1. Read the ratio cached/uncached of the totals first: it includes the epoch that fills the
cache, the tests, and opening and closing the stores. "Waiting" is the time spent inside the DataLoader, so what the
other seconds hold is computation, which no cache can shorten. The test set is read anew every epoch, like the
training set, so with a cache it has a store of its own. A few steps of a model that is thrown away come first.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import (
    CountedDataset,
    ReadLog,
    Recipe,
    Training,
    add_data_options,
    add_run_options,
    add_training_options,
    comparison,
    environment,
    environment_line,
    epoch_table,
    length,
    limited,
    load_mnist,
    new_parser,
    plot_epochs,
    prepare_mnist,
    require_matplotlib,
    run_in_turns,
    scratch_folder,
    select_device,
    write_json,
)
from torch import nn
from torch.utils.data import Dataset

from torchcache import CachedDataset

Sets = tuple[Dataset[Any], Dataset[Any]]


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    add_training_options(parser, epochs=4, batch_size=64)
    add_run_options(parser)
    add_data_options(parser)
    return parser.parse_args(arguments)


def lenet() -> nn.Module:
    """LeNet-5 (LeCun et al. 1998, figure 2), with ReLU and max pooling as it is usually written today."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def source_sets(args: argparse.Namespace) -> Sets:
    """The training and the test set; ``--limit`` shortens both in proportion."""
    train, test = (load_mnist(args.data_dir, train=part) for part in (True, False))
    if args.limit is None:
        return train, test
    return limited(train, args.limit), limited(test, max(1, args.limit * length(test) // length(train)))


def counted_sets(sets: Sets, log: ReadLog) -> Sets:
    """The same sets, with every read counted."""
    return CountedDataset(sets[0], log), CountedDataset(sets[1], log)


def cached_sets(sets: Sets, cache_dir: Path | None) -> Sets:
    """The whole of what a user changes."""
    return (
        CachedDataset(sets[0], cache_dir=cache_dir, name="mnist-train"),
        CachedDataset(sets[1], cache_dir=cache_dir, name="mnist-test"),
    )


def train_once(args: argparse.Namespace, recipe: Recipe, sets: Sets) -> dict[str, Training]:
    """One training, with or without the cache."""
    run = Training(recipe, partial(cached_sets, sets, args.cache_dir) if args.cache else lambda: sets)
    name = "cached" if args.cache else "uncached"
    run_in_turns({name: run}, args.epochs)
    for part, dataset in zip(("training", "test"), run.sets, strict=True):
        if isinstance(dataset, CachedDataset):
            print(f"store of the {part} set: {dataset.stats.samples_cached:,} samples in {dataset.path}")
    run.close()
    return {name: run}


def train_both(args: argparse.Namespace, recipe: Recipe, sets: Sets) -> tuple[dict[str, Training], dict[str, int]]:
    """Both trainings in turns, and how often each read its source, as counted by the source itself."""
    with scratch_folder(args.cache_dir, "lenet") as folder:
        logs = {name: ReadLog(folder / f"{name}.reads") for name in ("uncached", "cached")}
        runs = {
            "uncached": Training(recipe, lambda: counted_sets(sets, logs["uncached"])),
            "cached": Training(recipe, lambda: cached_sets(counted_sets(sets, logs["cached"]), folder / "stores")),
        }
        try:
            run_in_turns(runs, args.epochs)
        finally:
            for run in runs.values():
                run.close()
        return runs, {name: log.total() for name, log in logs.items()}


def report_comparison(result: dict[str, Any], reads: dict[str, int], samples: int, device: torch.device) -> int:
    """Prints the verdict. Returns the exit status."""
    print(f"\ncached / uncached: {result['total']:.3f} in all")
    print(f"  the epoch that fills the cache: {result['first_epoch']:.3f}")
    if result["later_epochs"] is not None:
        waiting = f"{result['waiting_later_epochs']:.4f}"
        print(f"  the epochs after it: {result['later_epochs']:.3f}; waiting for data in them: {waiting}")
    counted = f"{reads['uncached']:,} uncached, {reads['cached']:,} cached"
    print(f"source reads: {counted}, for {samples:,} samples in both sets (counted by the source)")
    step = result["first_different_step"]
    if step is None:
        print(f"losses: identical, bit for bit, in all {result['steps']:,} steps")
        return 0
    print(f"losses: DIFFERENT from step {step:,} of {result['steps']:,} on")
    if device.type == "cpu":
        return 1
    print("(on CUDA some kernels are not repeatable: compare with --device cpu before you blame the cache)")
    return 0


def summary(run: Training) -> dict[str, Any]:
    """The numbers of a training, for JSON."""
    return {"total_s": run.total_s(), "store_s": run.store_s, "epochs": run.epochs}


def main() -> int:
    """Runs what the options ask for. Returns the exit status."""
    args = options()
    if args.plot is not None:
        require_matplotlib()
    device = select_device(args.device)
    facts = environment(device)
    print(environment_line(facts))
    data = prepare_mnist(args.data_dir, download=not args.no_download)
    print(f"data: {data}")
    sets = source_sets(args)
    print(f"LeNet-5, {length(sets[0]):,} training and {length(sets[1]):,} test images, batches of {args.batch_size}")
    recipe = Recipe(lenet, sgd, args.batch_size, args.workers, device, args.seed)
    Training(Recipe(lenet, sgd, args.batch_size, 0, device, args.seed), lambda: sets).warm_up()

    runs, reads = train_both(args, recipe, sets) if args.compare else (train_once(args, recipe, sets), {})
    print("\n" + epoch_table(runs))
    for name, run in runs.items():
        print(f"total {name}: {run.total_s():.2f} s, of it {run.store_s:.2f} s to open and close the sets")
    content: dict[str, Any] = {"data": data, "runs": {name: summary(run) for name, run in runs.items()}}
    status = 0
    if args.compare:
        content |= {"comparison": comparison(runs["cached"], runs["uncached"]), "source_reads": reads}
        status = report_comparison(content["comparison"], reads, sum(map(length, sets)), device)
    write_json(args, facts, content)
    if args.plot is not None:
        plot_epochs(args.plot, runs, "LeNet-5 on MNIST: seconds an epoch")
    return status


if __name__ == "__main__":
    sys.exit(main())
