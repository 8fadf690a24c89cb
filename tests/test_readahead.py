"""Read-ahead: what is asked for, when it begins and when it ends, over real files whose pages are dropped."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_same
from torch.utils.data import DataLoader, default_collate

import torchcache
from torchcache import CachedDataset, readahead
from torchcache.pagecache import is_resident
from torchcache.readahead import CALM, LOOK_EVERY, ReadAhead, _merged, ask_for

PAGE = mmap.PAGESIZE
PAGES = 256


class File:
    """A file and its map."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(os.urandom(PAGES * PAGE))
        self.fd = os.open(path, os.O_RDWR)
        os.fsync(self.fd)
        self.map = mmap.mmap(self.fd, PAGES * PAGE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.address = torch.frombuffer(self.map, dtype=torch.uint8).data_ptr()

    def drop(self) -> None:
        """Has the kernel forget the pages, and checks that it did."""
        self.map.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if any(is_resident(self.address + page * PAGE) for page in range(PAGES)):
            pytest.skip("this file system keeps its pages in memory")


@pytest.fixture
def file(tmp_path: Path) -> Iterator[File]:
    file = File(tmp_path / "file")
    yield file
    os.close(file.fd)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked for is noted, and asked for."""
    calls: list[Any] = []

    def noted(data: mmap.mmap, starts: Any, nbytes: Any) -> None:
        calls.append((starts, nbytes))
        ask_for(data, starts, nbytes)

    monkeypatch.setattr(readahead, "ask_for", noted)
    return calls


def test_whole_pages_each_once() -> None:
    starts = np.array([5 * PAGE + 1, 10, 20, PAGE, 5 * PAGE + 7])
    assert _merged(starts, 100) == ([0, 5 * PAGE], [2 * PAGE, 6 * PAGE])
    lengths = np.array([1, 3 * PAGE, 1, 1, PAGE])
    assert _merged(starts, lengths) == ([0, 5 * PAGE], [4 * PAGE, 7 * PAGE])
    assert _merged(np.array([PAGE]), 0) == ([PAGE], [PAGE])


def test_pages_that_are_not_in_memory_are_asked_for(file: File, asked: list[Any]) -> None:
    file.drop()
    ahead = ReadAhead()
    assert ahead.is_due(), "the first batch is looked at"
    ahead.announce(file.map, file.address, np.arange(0, PAGES * PAGE, 8 * PAGE), PAGE)
    assert len(asked) == 1


def test_it_ends_where_pages_are_in_memory(file: File, asked: list[Any]) -> None:
    starts = np.arange(0, PAGES * PAGE, 8 * PAGE)
    os.pread(file.fd, PAGES * PAGE, 0)
    ahead = ReadAhead()
    batches = [ahead.is_due() and ahead.announce(file.map, file.address, starts, PAGE) is None for _ in range(200)]
    assert not asked
    assert 200 // (LOOK_EVERY + 1) <= sum(batches) <= 200 // LOOK_EVERY + 1, "one batch in so many is looked at"
    file.drop()
    while not asked:  # one page that is not there is enough to begin again
        if ahead.is_due():
            ahead.announce(file.map, file.address, starts, PAGE)
    os.pread(file.fd, PAGES * PAGE, 0)
    for _ in range(2 * CALM):
        if ahead.is_due():
            ahead.announce(file.map, file.address, starts, PAGE)
    assert len(asked) <= CALM + 1
    assert not ahead.is_due()


def image(index: int) -> tuple[torch.Tensor, int]:
    return torch.full((3, 32, 32), index, dtype=torch.float32), index


def ragged(index: int) -> dict[str, Any]:
    return {"image": torch.full((3, 32, 30 + index % 5), index % 256, dtype=torch.uint8), "id": index}


class Made(torch.utils.data.Dataset[Any]):
    def __init__(self, make: Any) -> None:
        self.make = make

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def cold(make: Any, folder: Path, **options: Any) -> CachedDataset:
    """A complete store whose pages are not in memory, opened."""
    with CachedDataset(Made(make), cache_dir=folder, key="k") as ds:
        ds.fill(progress=False)
    ds = CachedDataset(Made(make), cache_dir=folder, key="k", check=0, **options)
    file = os.open(ds.path / "data.mdb", os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)
    return ds


def unchanged(sample: Any) -> Any:
    return sample


def own_collate(samples: list[Any]) -> Any:
    return samples


@pytest.mark.parametrize("cls", [DataLoader, torchcache.DataLoader])
@pytest.mark.parametrize("make", [image, ragged])
@pytest.mark.parametrize("options", [{}, {"transform": unchanged}, {"transform": unchanged, "copy": False}])
def test_a_cold_epoch_is_the_same_and_announced(
    tmp_path: Path, asked: list[Any], make: Any, cls: Any, options: dict[str, Any]
) -> None:
    collate = default_collate if make is image else own_collate
    warm = list(DataLoader(Made(make), batch_size=16, collate_fn=collate))
    ds = cold(make, tmp_path, **options)
    assert_same(list(cls(ds, batch_size=16, collate_fn=collate)), warm)
    if not asked:
        pytest.skip("this file system keeps its pages in memory")


def test_damaged_places_are_not_asked_for(tmp_path: Path, asked: list[Any]) -> None:
    ds = cold(image, tmp_path)
    cache = ds._connection.open()
    assert cache is not None
    cache.reader._announce(np.array([-PAGE, 0]), PAGE)
    cache.reader._announce(np.array([0, 1 << 60]), PAGE)
    cache.reader._announce(np.array([], np.int64), PAGE)
    assert not asked
