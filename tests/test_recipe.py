"""Cached batches cross from workers as indices: the same batches, wherever and however they arrive."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import shutil
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Source, assert_same, image_and_label
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from torchcache import CacheBypassWarning, CachedDataset
from torchcache.recipe import Recipe

LENGTH = 200


@pytest.fixture
def full(cache_dir: Path, source: Source) -> CachedDataset:
    """A complete store, opened again."""
    with CachedDataset(source) as cached:
        cached.fill(progress=False)
    return CachedDataset(source)


def epoch(dataset: Any, **options: Any) -> list[Any]:
    options = {"batch_size": 16, "shuffle": True, "num_workers": 2, **options}
    generator = torch.Generator().manual_seed(3)
    return list(DataLoader(dataset, generator=generator, **options))


def of_the_source(**options: Any) -> list[Any]:
    return epoch([image_and_label(i) for i in range(LENGTH)], num_workers=0, **options)


@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_batches_arrive_as_without_the_cache(full: CachedDataset, source: Source, start_method: str) -> None:
    found = epoch(full, multiprocessing_context=start_method)
    assert_same(found, of_the_source())
    assert not any(column.is_shared() for batch in found for column in batch)
    assert full.stats.hits == LENGTH  # made here
    assert source.reads() == Counter({**dict.fromkeys(range(LENGTH), 1), **dict.fromkeys(checked(source), 2)})


def checked(source: Source) -> list[int]:
    """What was compared with the store, by the first worker."""
    return [index for index, count in source.reads().items() if count > 1]


def test_nothing_lies_in_shared_memory(full: CachedDataset) -> None:
    before = set(os.listdir("/dev/shm"))
    loader = DataLoader(full, batch_size=16, num_workers=2, prefetch_factor=4)
    batches = iter(loader)
    first = next(batches)
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("torch_")}
    assert_same(first, default_collate([image_and_label(i) for i in range(16)]))
    assert len(list(batches)) == len(loader) - 1


def test_the_first_epoch_fills_and_the_others_cross_as_indices(cache_dir: Path, source: Source) -> None:
    """The receiving process has never opened the store, and each worker learns that another has sealed it."""
    cached = CachedDataset(source)

    def loader(dataset: Any) -> DataLoader[Any]:
        order = torch.Generator().manual_seed(3)
        return DataLoader(dataset, 8, shuffle=True, num_workers=3, persistent_workers=True, generator=order)

    ours, expected = loader(cached), loader([image_and_label(i) for i in range(LENGTH)])
    hits = []
    for _ in range(4):
        assert_same(list(ours), list(expected))
        hits.append(cached._connection.served.hits)
    assert hits[3] - hits[2] == LENGTH
    assert source.reads() == Counter(range(LENGTH))


@pytest.mark.parametrize("persistent", [False, True])
def test_subsets_and_samplers(full: CachedDataset, persistent: bool) -> None:
    indices = [7, 3, 3, 199, 0, 12]
    loader = DataLoader(Subset(full, indices), batch_size=4, num_workers=1, persistent_workers=persistent)
    for _ in range(2):
        expected = [indices[:4], indices[4:]]
        assert_same(list(loader), [default_collate([image_and_label(i) for i in batch]) for batch in expected])
    assert full.stats.hits == 2 * len(indices)


def collate_and_double(samples: list[Any]) -> Any:
    images, labels = default_collate(samples)
    return 2 * images, labels


def test_a_collate_function_of_the_users(full: CachedDataset) -> None:
    found = epoch(full, collate_fn=collate_and_double)
    assert_same(found, [(2 * images, labels) for images, labels in of_the_source()])


def test_a_transform_of_the_batch_stays_in_the_worker(full: CachedDataset) -> None:
    full.batch_transform = collate_and_double_batch
    assert_same(epoch(full), [[2 * images, labels] for images, labels in of_the_source()])


def collate_and_double_batch(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    return [2 * batch[0], batch[1]]


def test_a_copy_is_a_dataset_of_its_own(full: CachedDataset) -> None:
    """Also when what it was copied from is gone, and under two loaders at a time."""
    first, second = copy.copy(full), pickle.loads(pickle.dumps(full))
    del full
    gc.collect()
    pairs = zip(DataLoader(first, 16, num_workers=1), DataLoader(second, 16, num_workers=1), strict=True)
    for number, (one, other) in enumerate(pairs):
        expected = default_collate([image_and_label(i) for i in range(LENGTH)[16 * number : 16 * number + 16]])
        assert_same(one, expected)
        assert_same(other, expected)
    assert first.stats.hits == second.stats.hits == LENGTH


class Offset(Dataset[Any]):
    """Numbers from one on."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((40,), self.first + index)


def test_attributes_changed_meanwhile(cache_dir: Path) -> None:
    """Workers have the dataset as it was, as without the cache."""
    source = Offset(1000)
    cached = CachedDataset(source, check=0)
    cached.fill(progress=False)
    batches = iter(DataLoader(cached, batch_size=16, num_workers=2))
    found = [next(batches)]
    source.first = 0
    with pytest.warns(CacheBypassWarning, match="set to something else"):
        assert len(cached) == LENGTH
    found += batches
    assert_same(found, list(DataLoader(Offset(1000), batch_size=16)))
    assert cached._connection.served.hits == LENGTH


def test_the_store_is_removed_meanwhile(cache_dir: Path, source: Source) -> None:
    """Workers have it open, the receiving process has not: the batches come from the source, after one warning."""
    with CachedDataset(source, check=0) as cached:
        cached.fill(progress=False)
    before = source.reads().total()
    batches = iter(DataLoader(cached, batch_size=16, num_workers=1))
    found = [next(batches)]
    cached.close()
    shutil.rmtree(cached.path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found += batches
    assert_same(found, list(DataLoader([image_and_label(i) for i in range(LENGTH)], batch_size=16)))
    assert [warning.category for warning in caught].count(CacheBypassWarning) == 1
    assert source.reads().total() - before >= LENGTH - 64


def test_an_arriving_error_is_raised_where_the_batch_is_handed_out(full: CachedDataset) -> None:
    data = pickle.dumps(Recipe(b"no such dataset.", str(full.path), b"", torch.arange(4)))
    arrived = pickle.loads(data)
    assert isinstance(arrived, ExceptionWrapper)
    with pytest.raises(RuntimeError, match="the dataset of a cached batch is gone"):
        arrived.reraise()


def test_only_what_lies_in_memory_crosses_as_indices(full: CachedDataset) -> None:
    """Otherwise the receiving process would wait for the disk."""
    full[0]
    cache = full._connection.ready
    assert cache is not None
    rows = cache.reader.find(list(range(LENGTH)))
    assert rows is not None
    assert cache.reader.expects_in_memory(rows)
    cache.reader._ahead._calm = 0
    assert not cache.reader.expects_in_memory(rows)
    found = epoch(full)
    assert_same(found, of_the_source())
    assert all(column.is_shared() for batch in found for column in batch)


def test_a_store_that_only_others_may_write_to(full: CachedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of such a file the kernel does not tell what lies in memory."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(full.path).st_uid + 1)
    monkeypatch.setattr("torchcache.folder.refuse_strangers", lambda path: None)
    opened = CachedDataset.open(full.path)
    full.close()
    found = epoch(opened)
    assert_same(found, of_the_source())
    assert all(column.is_shared() for batch in found for column in batch)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's call
def test_stateful_dataloader(full: CachedDataset) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    loader = stateful.StatefulDataLoader(full, batch_size=16, num_workers=2)
    assert_same(list(loader), list(DataLoader([image_and_label(i) for i in range(LENGTH)], batch_size=16)))
    assert full.stats.hits == LENGTH
    batches = iter(loader)
    first = [next(batches) for _ in range(3)]
    again = stateful.StatefulDataLoader(full, batch_size=16, num_workers=2)
    again.load_state_dict(loader.state_dict())
    assert_same([*first, *again], list(loader))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_pinned_memory(full: CachedDataset) -> None:
    found = epoch(full, pin_memory=True)
    assert all(column.is_pinned() for batch in found for column in batch)
    assert_same([[column.clone() for column in batch] for batch in found], of_the_source())
