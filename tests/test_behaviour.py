"""A wrapped dataset behaves as the bare one: samplers, lengths that change, the state of every random generator."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Source, assert_same, image_and_label
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, Subset, WeightedRandomSampler

import torchcache
from torchcache import CachedDataset, errors

LENGTH = 200


def take_all(dataset: Any, *, num_workers: int = 0, loader: Any = DataLoader, **settings: Any) -> list[Any]:
    torch.manual_seed(3)
    return list(loader(dataset, num_workers=num_workers, **settings))


def by_weight(n: int) -> Any:
    return WeightedRandomSampler([1.0] * (n // 2) + [5.0] * (n - n // 2), n)


def in_batches(n: int) -> Any:
    return BatchSampler(range(n), 7, drop_last=True)


def as_samples(batch: Any) -> Any:
    return batch


LOADERS: list[Callable[[], dict[str, Any]]] = [
    lambda: {"batch_size": None},
    lambda: {"batch_size": None, "shuffle": True},
    lambda: {"batch_size": 7, "drop_last": True, "shuffle": True},
    lambda: {"batch_size": 7, "sampler": by_weight(LENGTH)},
    lambda: {"batch_sampler": in_batches(LENGTH)},
    lambda: {"batch_sampler": [[1, 1, 2], [2, -1, 2]]},
    lambda: {"batch_sampler": [[], [1]], "collate_fn": as_samples},
]


@pytest.mark.parametrize("settings", LOADERS)
@pytest.mark.parametrize("loader", [DataLoader, torchcache.DataLoader])
def test_every_loader_gives_what_it_gives_bare(
    cache_dir: Path, source: Source, settings: Callable[[], Any], loader: Any
) -> None:
    cached = CachedDataset(source)
    bare = take_all(source, **settings())
    for num_workers in (0, 2, 0):  # cold, filled in part or wholly, warm
        assert_same(take_all(cached, num_workers=num_workers, loader=loader, **settings()), bare)


def test_a_batch_sampler_as_sampler_hands_lists_to_the_dataset(cache_dir: Path) -> None:
    class Rows(Dataset[Any]):
        rows = torch.arange(40).reshape(20, 2)

        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: Any) -> torch.Tensor:
            return self.rows[index]

    cached = CachedDataset(Rows())
    for _ in range(2):
        settings: dict[str, Any] = {"batch_size": None, "sampler": in_batches(20)}
        assert_same(take_all(cached, **settings), take_all(Rows(), **settings))
    assert cached.stats.samples_cached == 0


@pytest.mark.parametrize(
    "wrap",
    [
        lambda ds: Subset(CachedDataset(ds), range(0, LENGTH, 3)),
        lambda ds: CachedDataset(Subset(ds, range(0, LENGTH, 3))),
        lambda ds: CachedDataset(CachedDataset(Subset(ds, range(0, LENGTH, 3)), key="inner"), key="outer"),
        lambda ds: Subset(Subset(CachedDataset(Subset(ds, range(LENGTH))), range(0, LENGTH, 3)), range(67)),
        lambda ds: ConcatDataset([CachedDataset(Subset(ds, range(0, LENGTH, 3)))]),
    ],
)
def test_wrappers_nest_in_any_order(cache_dir: Path, source: Source, wrap: Callable[[Any], Any]) -> None:
    bare = take_all(Subset(source, range(0, LENGTH, 3)), batch_size=8)
    wrapped = wrap(source)
    for num_workers in (0, 2):
        assert_same(take_all(wrapped, batch_size=8, num_workers=num_workers), bare)


def test_breaking_off_in_mid_epoch(cache_dir: Path, source: Source) -> None:
    cached = CachedDataset(source)
    for _ in range(3):
        assert_same(next(iter(DataLoader(cached, batch_size=8, num_workers=2))), next(iter(DataLoader(source, 8))))
    assert_same(take_all(cached, batch_size=8), take_all(source, batch_size=8))


def test_a_dataset_that_shrinks_ends_where_it_ends(cache_dir: Path, source: Source) -> None:
    cached = CachedDataset(source)
    cached.fill(progress=False)
    assert_same(cached[LENGTH - 1], image_and_label(LENGTH - 1))
    source.length = 50
    for read in (lambda: cached[50], lambda: cached.__getitems__([0, 50]), lambda: cached[LENGTH - 1]):
        with pytest.raises(IndexError):
            read()
    for loader in (DataLoader, torchcache.DataLoader):
        with pytest.raises(IndexError):
            list(loader(cached, sampler=[0, 60], batch_size=2))
    assert_same(cached[-1], image_and_label(49))
    assert_same(take_all(cached, batch_size=8), take_all(source, batch_size=8))
    with_ours = take_all(cached, batch_size=8, loader=torchcache.DataLoader)
    assert_same(with_ours, take_all(source, batch_size=8))


@pytest.mark.parametrize("length", [150, 250])
def test_another_length_under_one_key_is_another_store(cache_dir: Path, source: Source, length: int) -> None:
    old = CachedDataset(source, key="k")
    old.fill(progress=False)
    source.length = length
    source.make = lambda index: image_and_label(index + 1)  # a file was added at the front
    for _ in range(2):
        new = CachedDataset(source, key="k", check=0)
        assert new.path != old.path
        new.fill(progress=False)
        assert_same([new[i] for i in (0, length - 1)], [image_and_label(1), image_and_label(length)])
    source.length = LENGTH
    assert CachedDataset(source, key="k", check=0).path == old.path
    with pytest.raises(errors.StoreMismatchError, match="source"):
        CachedDataset([1, 2], key="k", name="Source")


def test_a_length_that_changes_between_construction_and_use(cache_dir: Path, tmp_path: Path) -> None:
    """Another process has made the store meanwhile: that must not end the job in mid-training."""
    late = CachedDataset(Source(12, tmp_path / "a"), key="k")
    CachedDataset(Source(8, tmp_path / "b"), key="k").fill(progress=False)
    assert_same([late[i] for i in range(12)], [image_and_label(i) for i in range(12)])


def states() -> list[Any]:
    name, keys, *rest = np.random.get_state()
    return [random.getstate(), name, keys.tobytes(), rest, torch.get_rng_state().numpy().tobytes()]  # type: ignore[union-attr]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("loader", [DataLoader, torchcache.DataLoader])
def test_every_generator_is_left_as_without_the_cache(
    cache_dir: Path, source: Source, num_workers: int, loader: Any
) -> None:
    def after_an_epoch(dataset: Any) -> list[Any]:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(11)  # type: ignore[operator]
        for _ in loader(dataset, batch_size=16, shuffle=True, num_workers=num_workers):
            pass
        return states()

    bare = after_an_epoch(source)
    cached = CachedDataset(source)
    assert after_an_epoch(cached) == bare  # cold
    cached.close()
    assert after_an_epoch(CachedDataset(source)) == bare  # warm, and compared with the source
