"""ds.report(): what the cache saves, and whether it does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Source
from torch.utils.data import DataLoader

from torchcache import CachedDataset, report
from torchcache.records import Counters

LENGTH = 50


def busy(index: int) -> tuple[torch.Tensor, int]:
    """A sample that takes much longer to make than to read."""
    total = sum(i * i for i in range(50_000))
    return torch.full((4, 4), float(total % (index + 1))), index


def test_what_it_saves() -> None:
    totals = Counters(source_reads=2000, samples=1000, source_seconds=10.0)
    said = report.line("store", totals, 1000, 0.000_012)
    assert said == (
        "store: a sample takes 5 ms from the source and 12 µs from the cache; an epoch of 1,000 samples takes "
        "4.99 s less, added up over its workers"
    )
    assert "of 1,200 samples, of which 1,000 are cached takes 4.99 s" in report.line("store", totals, 1200, 0.000_012)


def test_a_source_that_is_as_fast() -> None:
    totals = Counters(source_reads=1000, samples=1000, source_seconds=0.01)
    said = report.line("store", totals, 1000, 8e-6)
    assert said.endswith(
        "10 µs from the source and 8 µs from the cache: the source is as fast as the cache, which saves nothing here"
    )


def test_nothing_read_yet(cache_dir: Path, tmp_path: Path) -> None:
    cached = CachedDataset(Source(LENGTH, tmp_path / "reads"), key="k")
    assert "nothing has been read" in cached.report()
    assert cached.stats.source_reads == 0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(2.5e-6, "2.5 µs"), (0.0421, "42.1 ms"), (3.14159, "3.14 s"), (303.4, "5 min 3 s"), (7260, "2 h 1 min")],
)
def test_times_in_words(seconds: float, words: str) -> None:
    assert report.in_words(seconds) == words


@pytest.mark.parametrize("share", [1, 0.5])
def test_of_a_real_store(cache_dir: Path, tmp_path: Path, share: float) -> None:
    source = Source(LENGTH, tmp_path / "reads", busy)
    cached = CachedDataset(source, key="k")
    count = int(LENGTH * share)
    list(DataLoader(cached, batch_size=10, sampler=range(LENGTH - count, LENGTH)))
    before, said = cached.stats, cached.report()
    found = re.search(r"from the source and .* from the cache; an epoch of 50 samples(.*) takes .* less", said)
    assert found is not None, said
    assert found[1] == ("" if share == 1 else ", of which 25 are cached")
    assert cached.stats == before, "reads of the report are counted nowhere"
    assert source.reads().total() == count
    cached.close()
    if share == 1:
        assert "less" in CachedDataset.open(cached.path).report()


def test_one_sample_cached(cache_dir: Path, tmp_path: Path) -> None:
    cached = CachedDataset(Source(1000, tmp_path / "reads", busy), key="k")
    cached[777]
    assert "of which 1 are cached" in cached.report()


def test_a_store_that_cannot_be_read(cache_dir: Path, tmp_path: Path) -> None:
    cached: Any = CachedDataset(Source(LENGTH, tmp_path / "reads", busy), key="k")
    cached.fill(progress=False)
    cached._connection.open().reader.only_table().columns[0] = torch.full((LENGTH,), 1 << 40)
    with pytest.warns(UserWarning, match="cannot be used"):
        assert "nothing has been read" in cached.report()
