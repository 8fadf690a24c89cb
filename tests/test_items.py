"""Samples of a sealed store one at a time: the same as by the general way, also where the store is damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Source, assert_same, image_and_label

from torchcache import CacheBypassWarning, CachedDataset, errors, reader

LENGTH = 30

QUICK = [
    image_and_label,
    lambda i: (torch.full((3, 2, 4), i, dtype=torch.int16), i / 3, i % 2 == 0),
    lambda i: {"array": np.full((5, 7), i, ">f4"), "id": i},
    lambda i: [torch.full((9,), i, dtype=torch.bool), np.full((20,), i, "<U3")],
    lambda i: torch.full((12,), i, dtype=torch.complex64),
    lambda i: i,
]
GENERAL = [
    lambda i: (torch.full((3 + i % 2,), i), "x" * i),
    lambda i: torch.full((2, 3, 4, 5), float(i)).to(memory_format=torch.channels_last),
    lambda i: (torch.full((40,), float(i), requires_grad=True), torch.tensor(i)),
    lambda i: (np.float32(i), torch.zeros(0, 3), None),
    lambda i: torch.full((40,), i).to(torch.bfloat16),
]


@pytest.mark.parametrize("quick", [True, False])
def test_samples(cache_dir: Path, tmp_path: Path, quick: bool) -> None:
    for number, make in enumerate(QUICK if quick else GENERAL):
        source = Source(LENGTH, tmp_path / "reads", make)
        with CachedDataset(source, key=f"{quick}{number}") as cached:
            cached.fill(progress=False)
        cached[0]
        assert (read(cached) is not None) == quick, f"maker {number}"
        first = [cached[i] for i in range(LENGTH)]
        assert_same(first, [make(i) for i in range(LENGTH)])
        assert cached.stats.hits == LENGTH + 1
        for sample in first:  # each owns its memory
            for leaf in sample if isinstance(sample, (tuple, list)) else [sample]:
                if isinstance(leaf, torch.Tensor) and leaf.numel() and not leaf.requires_grad:
                    leaf.zero_()
        assert_same([cached[i - LENGTH] for i in range(LENGTH)], [make(i) for i in range(LENGTH)])
        for index in (LENGTH, -LENGTH - 1):
            with pytest.raises(IndexError):
                cached[index]


def read(cached: CachedDataset) -> Any:
    cache = cached._connection.ready
    assert cache is not None
    return cache.reader.read


@pytest.mark.parametrize("place", [-1, -(1 << 40), -(1 << 63), 1 << 40, (1 << 63) - 1])
def test_places_outside_the_file(cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    monkeypatch.setattr(reader, "VERIFIED_BYTES", 0)  # as in a large index, whose checksum is not compared
    source = Source(LENGTH, tmp_path / "reads")
    with CachedDataset(source, key="k") as cached:
        cached.fill(progress=False)
    cached[0]
    cache = cached._connection.ready
    assert cache is not None
    table = cache.reader.only_table()
    assert table is not None
    seal = cache.store.seal
    assert seal is not None
    offset = table.columns[0].data_ptr() - cache.reader._address
    cached.close()
    del cache, table
    with open(cached.path / "data.mdb", "r+b") as file:
        file.seek(offset + 8 * 7)
        file.write(np.int64(place).tobytes())
    for options in ({}, {"copy": False}):
        again = CachedDataset.open(cached.path, **options)  # type: ignore[arg-type]
        assert_same(again[6], image_and_label(6))
        with pytest.raises(errors.CorruptStoreError):
            again[7]
    cached = CachedDataset(source, key="k", check=0)
    with pytest.warns(CacheBypassWarning, match="cannot be used"):
        assert_same([cached[i] for i in range(LENGTH)], [image_and_label(i) for i in range(LENGTH)])


def test_a_source_that_has_shrunk(cache_dir: Path, tmp_path: Path) -> None:
    source = Source(LENGTH, tmp_path / "reads")
    cached = CachedDataset(source, key="k")
    cached.fill(progress=False)
    cached[0]
    source.length = 10
    assert_same(cached[9], image_and_label(9))
    with pytest.raises(IndexError):
        cached[10]
