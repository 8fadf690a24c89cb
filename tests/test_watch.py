"""Attributes of the dataset that are set after it was wrapped: what training sees is what it would see without."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Source, assert_same
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

import torchcache
from torchcache import CacheBypassWarning, CachedDataset

LENGTH = 12


class Curriculum(Dataset[Any]):
    """Gives samples that depend on what was set, and changes attributes of its own while it is read."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length
        self.epoch = 0
        self.scale: Any = (1,)
        self.calls = 0
        self.last: Any = -1
        self.file: Any = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        self.last = index
        self.file = self.file or object()
        return torch.tensor([index, self.epoch, *self.scale])


def rows(dataset: Any, loader: Any = DataLoader, **settings: Any) -> list[Any]:
    return list(loader(dataset, batch_size=4, **settings))


@pytest.fixture
def noticed() -> Iterator[None]:
    with pytest.warns(CacheBypassWarning, match=r"dataset\.(\w+\.)*epoch was set .*wrap it anew") as caught:
        yield
    assert len(caught) == 1


def test_what_the_dataset_has_is_set_on_the_dataset(cache_dir: Path) -> None:
    bare = Curriculum()
    cached = CachedDataset(bare)
    cached.epoch = 3
    assert (bare.epoch, cached.epoch) == (3, 3)
    assert "epoch" not in vars(cached)
    cached.note, cached.transform = "mine", torch.neg
    assert not hasattr(bare, "note")
    assert not hasattr(bare, "transform")
    assert CachedDataset(CachedDataset(bare, key="inner"), key="outer").epoch == 3


@pytest.mark.parametrize("loader", [DataLoader, torchcache.DataLoader])
def test_an_attribute_that_is_set_between_epochs(cache_dir: Path, loader: Any, noticed: None) -> None:
    bare = Curriculum()
    cached = CachedDataset(bare)
    for _ in range(2):
        assert_same(rows(cached, loader), rows(Curriculum()))
    cached.epoch = 1
    for _ in range(2):
        assert_same(rows(cached, loader), rows(bare))
    assert rows(cached, loader)[0][0, 1] == 1
    cached.epoch = 2
    assert_same([cached[3], cached[5]], [bare[3], bare[5]])


@pytest.mark.filterwarnings("ignore::torchcache.CacheBypassWarning")
@pytest.mark.parametrize("persistent", [False, True])
def test_an_attribute_that_is_set_between_epochs_with_workers(cache_dir: Path, persistent: bool) -> None:
    settings: Any = {"num_workers": 1, "persistent_workers": persistent}
    epochs = []
    for dataset in (Curriculum(), CachedDataset(Curriculum())):
        loader = DataLoader(dataset, batch_size=4, **settings)
        seen = []
        for epoch in range(2):
            dataset.epoch = epoch
            seen.append(list(loader))
        epochs.append(seen)
    assert_same(epochs[1], epochs[0])
    assert epochs[0][1][0][0, 1] == (0 if persistent else 1)


def test_single_samples_in_a_worker(cache_dir: Path) -> None:
    cached = CachedDataset(Curriculum())
    cached.fill(progress=False)
    cached.epoch = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(DataLoader(cached, batch_size=None, sampler=[1, 2], num_workers=1))
    assert [x[1].item() for x in found] == [1, 1]


def test_a_pickled_copy_knows(cache_dir: Path, noticed: None) -> None:
    cached = CachedDataset(Curriculum())
    cached.fill(progress=False)
    cached.epoch = 1
    assert_same(pickle.loads(pickle.dumps(cached))[2], torch.tensor([2, 1, 1]))


def test_a_dataset_inside_of_others(cache_dir: Path, noticed: None) -> None:
    inner = Curriculum()
    bare = Subset(ConcatDataset([Subset(inner, range(8)), Curriculum(3)]), range(0, 11, 2))
    cached = CachedDataset(bare)
    assert_same(rows(cached), rows(bare))
    inner.epoch = 1
    assert_same(rows(cached), rows(bare))


def test_the_fill_ends_when_something_is_set(cache_dir: Path, noticed: None) -> None:
    cached = CachedDataset(Curriculum())
    cached[0]
    cached.dataset.epoch = 1
    assert_same(cached[1], torch.tensor([1, 1, 1]))
    assert_same(cached[0], torch.tensor([0, 1, 1]))
    cached.fill(progress=False)
    again = CachedDataset(Curriculum())
    assert again.stats.samples_cached == 1
    assert_same([again[i] for i in range(3)], [torch.tensor([i, 0, 1]) for i in range(3)])


def test_what_changes_nothing_is_no_change(cache_dir: Path) -> None:
    cached = CachedDataset(Curriculum())
    cached.fill(progress=False)
    calls = cached.calls
    for _ in range(2):
        cached.scale = tuple([1])  # noqa: C409
        cached.dataset.calls, cached.dataset.last, cached.dataset.file = 77, 5, object()
        rows(cached), cached[0], pickle.loads(pickle.dumps(Subset(cached, [0])))[0]
    assert cached.calls == 77 != calls
    assert cached.complete


def test_the_class_or_the_user_says_what_counts(cache_dir: Path, source: Source) -> None:
    chosen, named = CachedDataset(source), CachedDataset(Curriculum(), key="k")
    for cached in (chosen, named):
        cached.fill(progress=False)
    source.make, named.epoch = str, 1
    before = named[0]
    assert_same(rows(named)[0][0], before)
    assert rows(chosen)


class Opens(Curriculum):
    """Opens what the drift rules do not see, the way of an installed package."""

    def __getitem__(self, index: int) -> Any:
        vars(self).setdefault("handle", object())
        vars(self)["length"] = self.length + 0
        vars(self)["scale"] = list(self.scale)
        return super().__getitem__(index)


def test_what_reading_changes_is_no_change(cache_dir: Path) -> None:
    cached = CachedDataset(Opens())
    for _ in range(2):
        rows(cached), rows(cached, num_workers=1)
    assert cached.complete
    assert cached.stats.source_reads == LENGTH
