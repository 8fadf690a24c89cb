"""``torchcache.DataLoader`` gives what PyTorch's gives: batches, order, generator states."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Source, assert_same, image_and_label
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import torchcache
from torchcache import CachedDataset, loader

LENGTH = 203


@pytest.fixture
def cached(cache_dir: Path, tmp_path: Path) -> CachedDataset:
    cached = CachedDataset(Source(LENGTH, tmp_path / "reads"))
    cached.fill(progress=False)
    return cached


BARE: list[Any] = [image_and_label(i) for i in range(LENGTH)]


def states() -> Any:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def epochs(make: Callable[[], Any], taken: int | None = None) -> Any:
    """What two epochs give, or their first batches, and the generators' states after each batch."""
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    found = []
    made = make()
    for _ in range(2):
        for number, batch in enumerate(made, 1):
            found.append((batch, torch.get_rng_state().tolist()))
            if number == taken:
                break
        found.append(states())
    return found


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SETTINGS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "sequential": lambda d: {"batch_size": 8},
    "shuffled": lambda d: {"batch_size": 8, "shuffle": True},
    "one batch": lambda d: {"batch_size": 500, "shuffle": True},
    "whole batches": lambda d: {"batch_size": 29, "shuffle": True, "generator": generator(3)},
    "own generator": lambda d: {"batch_size": 8, "shuffle": True, "generator": generator(3)},
    "drop_last": lambda d: {"batch_size": 8, "shuffle": True, "drop_last": True, "generator": generator(3)},
    "replacement": lambda d: {"batch_size": 8, "sampler": RandomSampler(d, replacement=True, num_samples=70)},
    "fewer": lambda d: {"batch_size": 8, "sampler": RandomSampler(d, num_samples=70)},
    "weighted": lambda d: {"batch_size": 8, "sampler": WeightedRandomSampler(list(range(LENGTH)), 100)},
    "some": lambda d: {"batch_size": 8, "sampler": SubsetRandomSampler(range(5, 50))},
    "distributed": lambda d: {"batch_size": 8, "sampler": DistributedSampler(d, 3, 1)},
    "a list": lambda d: {"batch_size": 4, "sampler": [3, 3, 202, 0, 17]},
    "negative": lambda d: {"batch_size": 4, "sampler": [3, -1, -203]},
    "batch sampler": lambda d: {"batch_sampler": BatchSampler(SequentialSampler(d), 7, drop_last=True)},
    "batches": lambda d: {"batch_sampler": [[1, 2], [3], [4, 5, 6]]},
    "no batches": lambda d: {"batch_size": None},
    "collate_fn": lambda d: {"batch_size": 8, "collate_fn": list},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("taken", [None, 3])
def test_as_the_parent(cached: CachedDataset, name: str, taken: int | None) -> None:
    settings = SETTINGS[name]
    ours = epochs(lambda: torchcache.DataLoader(cached, **settings(cached)), taken)
    theirs = epochs(lambda: torch.utils.data.DataLoader(BARE, **settings(BARE)), taken)  # type: ignore[arg-type]
    assert_same(ours, theirs)


@pytest.mark.parametrize("name", ["own generator", "weighted"])
@pytest.mark.parametrize("persistent", [True, False])
def test_threads_as_worker_processes(cached: CachedDataset, name: str, persistent: bool) -> None:
    workers: dict[str, Any] = {"num_workers": 2, "persistent_workers": persistent}
    settings = SETTINGS[name]
    ours = epochs(lambda: torchcache.DataLoader(cached, **settings(cached), **workers))
    theirs = epochs(lambda: torch.utils.data.DataLoader(BARE, **settings(BARE), **workers))  # type: ignore[arg-type]
    assert_same(ours, theirs)


def shortcut_taken(made: torchcache.DataLoader) -> bool:
    return made._cached_batches() is not None


def test_subsets_of_subsets(cached: CachedDataset) -> None:
    for indices in (range(100, 10, -3), [5, 7, 5], np.arange(40), torch.arange(30)):
        ours: Dataset[Any] = Subset(Subset(cached, range(50, 150)), indices)  # type: ignore[arg-type]
        theirs: Dataset[Any] = Subset(Subset(BARE, range(50, 150)), indices)  # type: ignore[arg-type]
        if max(indices) >= 100:
            continue
        made = torchcache.DataLoader(ours, batch_size=4)
        assert shortcut_taken(made)
        assert_same(list(made), list(torch.utils.data.DataLoader(theirs, batch_size=4)))


def test_pieces_are_looked_up_apart(cached: CachedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "LOOK_UP_SAMPLES", 20)
    for name in ("sequential", "own generator", "drop_last", "one batch"):
        settings = SETTINGS[name]
        ours = epochs(lambda: torchcache.DataLoader(cached, **settings(cached)))  # noqa: B023
        assert_same(ours, epochs(lambda: torch.utils.data.DataLoader(BARE, **settings(BARE))))  # noqa: B023


def test_the_batches_are_the_users_own(cached: CachedDataset) -> None:
    made = torchcache.DataLoader(cached, batch_size=8)
    assert shortcut_taken(made)
    before = list(made)
    for images, labels in made:
        assert labels.untyped_storage().nbytes() == labels.nbytes
        images.zero_()
        labels.zero_()
    assert_same(list(made), before)


def test_what_is_left_to_the_parent(cached: CachedDataset, tmp_path: Path) -> None:
    incomplete = CachedDataset(Source(LENGTH, tmp_path / "others"), key="incomplete")
    transformed = CachedDataset(cached.dataset, transform=lambda sample: sample)
    for dataset, settings in (
        (incomplete, {}),
        (transformed, {}),
        (BARE, {}),
        (cached, {"collate_fn": list}),
        (cached, {"batch_size": None}),
        (cached, {"num_workers": 1, "worker_init_fn": print}),
    ):
        assert not shortcut_taken(torchcache.DataLoader(dataset, **settings))
    assert_same(list(torchcache.DataLoader(incomplete, 8)), list(torch.utils.data.DataLoader(BARE, 8)))  # type: ignore[arg-type]
    assert shortcut_taken(torchcache.DataLoader(incomplete))


def test_the_shortcut_counts_hits(cached: CachedDataset) -> None:
    hits = cached.stats.hits
    list(torchcache.DataLoader(cached, batch_size=8, shuffle=True))
    list(torchcache.DataLoader(cached, batch_size=8, sampler=[1, 2]))
    assert cached.stats.hits == hits + LENGTH + 2


def test_an_error_in_a_sampler_reaches_the_caller(cached: CachedDataset) -> None:
    with pytest.raises(IndexError, match="203 is out of range"):
        list(torchcache.DataLoader(cached, batch_size=2, sampler=[1, 2, 203]))


def test_nested_samples(cache_dir: Path) -> None:
    source = [{"a": torch.full((2, 3), i), "b": {"c": float(i)}} for i in range(20)]
    cached = CachedDataset(source, key="nested")
    cached.fill(progress=False)
    assert_same(list(torchcache.DataLoader(cached, 6)), list(torch.utils.data.DataLoader(source, 6)))  # type: ignore[arg-type]
