"""A training job without the cache (the default), with it (--cache), or both in turns (--compare)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import (
    CountedDataset,
    ReadLog,
    announced_environment,
    length,
    limited,
    scratch_folder,
    write_json,
)
from plots import plot_epochs, require_matplotlib
from torch.utils.data import Dataset
from training import (
    Recipe,
    Training,
    comparison,
    epoch_table,
    run_in_turns,
    select_device,
)

from torchcache import CachedDataset

Sets = tuple[Dataset[Any], Dataset[Any]]  # for training and for testing


@dataclass(frozen=True)
class Job:
    """What is trained, on what.

    Attributes:
        name: of the folders it makes.
        title: for people.
        prepare_data: sees to it that the data is there, and says what it is.
        sources: the sets as they are on the disk, all that is cached.
        uncached: the sets for a training without a cache.
        cached: the same with one, in a cache folder; all of what a user changes.
        recipe: how to train on a device.
    """

    name: str
    title: str
    prepare_data: Callable[[], str]
    sources: Callable[[], Sets]
    uncached: Callable[[Sets], Sets]
    cached: Callable[[Sets, Path | None], Sets]
    recipe: Callable[[torch.device], Recipe]


def shortened(sets: Sets, limit: int | None) -> Sets:
    """``--limit`` shortens both sets in proportion."""
    if limit is None:
        return sets
    train, test = sets
    return limited(train, limit), limited(test, max(1, limit * length(test) // length(train)))


def counted_sets(sets: Sets, log: ReadLog) -> Sets:
    """The same sets, with every read counted."""
    return CountedDataset(sets[0], log), CountedDataset(sets[1], log)


def train_once(args: argparse.Namespace, job: Job, recipe: Recipe, sets: Sets) -> dict[str, Training]:
    """One training, with or without the cache."""
    run = Training(recipe, lambda: job.cached(sets, args.cache_dir) if args.cache else job.uncached(sets))
    name = "cached" if args.cache else "uncached"
    run_in_turns({name: run}, args.epochs)
    for part, dataset in zip(("training", "test"), run.sets, strict=True):
        if isinstance(dataset, CachedDataset):
            print(f"store of the {part} set: {dataset.stats.samples_cached:,} samples in {dataset.path}")
    run.close()
    return {name: run}


def train_both(
    args: argparse.Namespace, job: Job, recipe: Recipe, sets: Sets
) -> tuple[dict[str, Training], dict[str, int]]:
    """Both trainings in turns, and how often each read its source, as counted by the source itself."""
    with scratch_folder(args.cache_dir, job.name) as folder:
        logs = {name: ReadLog(folder / f"{name}.reads") for name in ("uncached", "cached")}
        runs = {
            "uncached": Training(recipe, lambda: job.uncached(counted_sets(sets, logs["uncached"]))),
            "cached": Training(recipe, lambda: job.cached(counted_sets(sets, logs["cached"]), folder / "stores")),
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


def run(args: argparse.Namespace, job: Job) -> int:
    """Runs what the options ask for. Returns the exit status."""
    if args.plot is not None:
        require_matplotlib()
    device = select_device(args.device)
    facts = announced_environment(device)
    data = job.prepare_data()
    print(f"data: {data}")
    sets = shortened(job.sources(), args.limit)
    print(
        f"{job.title}, {length(sets[0]):,} training and {length(sets[1]):,} test images, batches of {args.batch_size}"
    )
    recipe = job.recipe(device)
    Training(replace(recipe, workers=0), lambda: job.uncached(sets)).warm_up()

    runs, reads = train_both(args, job, recipe, sets) if args.compare else (train_once(args, job, recipe, sets), {})
    print("\n" + epoch_table(runs))
    for name, training in runs.items():
        print(f"total {name}: {training.total_s():.2f} s, of it {training.store_s:.2f} s to open and close the sets")
    content: dict[str, Any] = {"data": data, "runs": {name: summary(training) for name, training in runs.items()}}
    status = 0
    if args.compare:
        content |= {"comparison": comparison(runs["cached"], runs["uncached"]), "source_reads": reads}
        status = report_comparison(content["comparison"], reads, sum(map(length, sets)), device)
    write_json(args, facts, content)
    if args.plot is not None:
        plot_epochs(args.plot, runs, f"{job.title}: seconds an epoch")
    return status
