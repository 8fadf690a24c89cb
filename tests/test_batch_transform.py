"""batch_transform=: one call on each batch that default_collate makes, and no sample without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Source, assert_same, image_and_label
from torch.utils.data import ConcatDataset, DataLoader, Subset, default_collate

import torchcache
from torchcache import CachedDataset, fingerprint

LENGTH = 40


def scaled(batch: Any) -> Any:
    images, labels = batch
    assert images.ndim == 4, "a whole batch"
    return {"images": images.div(2), "labels": labels}


def negative(sample: Any) -> Any:
    return -sample[0], sample[1]


def ragged(index: int) -> Any:
    """One that is collated by PyTorch itself: text has no column to gather."""
    return torch.full((1, 2, 2), float(index)), "x" * (index % 3)


def noisy(batch: Any) -> Any:
    return batch[0] + torch.rand(len(batch[0]), 1, 1, 1), batch[1]


def own_collate(samples: list[Any]) -> Any:
    return default_collate(samples)


@pytest.mark.parametrize("cls", [DataLoader, torchcache.DataLoader])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("make", "transform"), [(image_and_label, None), (image_and_label, negative), (ragged, None)])
def test_batches(cache_dir: Path, tmp_path: Path, cls: Any, num_workers: int, make: Any, transform: Any) -> None:
    source = Source(LENGTH, tmp_path / "reads", make)
    samples = [make(i) if transform is None else transform(make(i)) for i in range(LENGTH)]
    expected = [scaled(default_collate(samples[i : i + 8])) for i in range(0, LENGTH, 8)]
    cached = CachedDataset(source, transform, key="k", batch_transform=scaled)
    for _ in range(2):  # the epoch that fills, and a warm one
        assert_same(list(cls(cached, batch_size=8, num_workers=num_workers)), expected)
    assert set(source.reads().values()) == {1}
    subset = Subset(cached, range(8, 24))
    assert_same(list(cls(subset, batch_size=8, num_workers=num_workers)), expected[1:3])
    again = CachedDataset.open(cached.path, transform, batch_transform=scaled)
    assert_same(list(cls(again, batch_size=8)), expected)


def test_no_sample_is_seen_without_it(cache_dir: Path, tmp_path: Path) -> None:
    cached = CachedDataset(Source(LENGTH, tmp_path / "reads"), key="k", batch_transform=scaled)
    reads = [
        lambda: cached[0],
        lambda: cached.__getitems__([0, 1]),
        lambda: next(iter(DataLoader(cached, batch_size=None))),
        lambda: next(iter(DataLoader(cached, batch_size=4, collate_fn=own_collate))),
        lambda: next(iter(torchcache.DataLoader(cached, batch_size=4, collate_fn=own_collate))),
        lambda: next(iter(DataLoader(ConcatDataset([cached, cached]), batch_size=4))),
    ]
    for complete in range(2):
        for read in reads:
            with pytest.raises(TypeError, match="batch_transform= works on the batches that a DataLoader makes"):
                read()
        cached.fill(progress=False)
        assert cached.complete, complete


def test_what_it_draws_is_what_it_draws_in_the_stock_loader(cache_dir: Path, tmp_path: Path) -> None:
    cached = CachedDataset(Source(LENGTH, tmp_path / "reads"), key="k", batch_transform=noisy)
    cached.fill(progress=False)
    found = []
    for cls in (DataLoader, torchcache.DataLoader):
        for num_workers in (0, 2):
            torch.manual_seed(3)
            found.append((list(cls(cached, batch_size=8, shuffle=True, num_workers=num_workers)), torch.rand(())))
    assert_same(found[0], found[2])
    assert_same(found[1], found[3])


def test_a_damaged_store_is_read_from_the_source(cache_dir: Path, tmp_path: Path) -> None:
    source = Source(LENGTH, tmp_path / "reads")
    cached = CachedDataset(source, key="k", batch_transform=scaled)
    cached.fill(progress=False)
    expected = list(DataLoader(cached, batch_size=8))
    cache = cached._connection.open()
    assert cache is not None
    table = cache.reader.only_table()
    assert table is not None
    table.columns[0] = torch.full((LENGTH,), 1 << 40)
    with pytest.warns(torchcache.CacheBypassWarning):
        assert_same(list(torchcache.DataLoader(cached, batch_size=8)), expected)


def test_it_is_part_of_the_fingerprint(cache_dir: Path, tmp_path: Path) -> None:
    plain, other = (CachedDataset(Source(LENGTH, tmp_path / "r"), key="k", batch_transform=t) for t in (None, scaled))
    assert str(fingerprint(plain)) != str(fingerprint(other))
