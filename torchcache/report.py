"""Does it pay? What a sample costs from the source, and what from the cache, in one line."""

from __future__ import annotations

import time

import numpy as np

from torchcache.reader import Reader
from torchcache.records import Counters

TIMED_READS = 64  # enough for a mean; a few milliseconds where they are in memory
WORTH = 1.5  # a source that takes less than so many times a cached read is as fast as the cache


def seconds_per_cached_read(reader: Reader) -> float | None:
    """Mean time of reading one cached sample here and now; ``None`` if none is cached.

    Samples from all over the store are read one by one, those from disk that are not in memory. A batch by
    ``default_collate`` takes less.
    """
    cached = _some_cached(reader)
    if not cached:
        return None
    reader.values(cached[-1], True)  # the first read of all prepares what the others use
    start = time.perf_counter()
    for index in cached:
        schema, values = reader.values(index, True)
        schema.rebuild(values)
    return (time.perf_counter() - start) / len(cached)


def _some_cached(reader: Reader) -> list[int]:
    spread = np.unique(np.linspace(0, max(reader.length - 1, 0), min(TIMED_READS, reader.length)).astype(np.int64))
    some = [index for index in spread.tolist() if reader.holds(index)]
    if some or not reader.count:
        return some
    cached = np.setdiff1d(np.arange(reader.length), reader.all_missing(), assume_unique=True)
    return cached[:TIMED_READS].tolist()  # type: ignore[no-any-return]


def line(name: str, totals: Counters, length: int, cached_s: float | None) -> str:
    """What the cache saves each epoch.

    Args:
        name: of the store.
        totals: of all processes, in all runs.
        length: samples of the dataset.
        cached_s: seconds of a cached read.
    """
    if not totals.source_reads or cached_s is None:
        return f"{name}: nothing has been read through the cache yet, so there is nothing to compare"
    source_s = totals.source_seconds / totals.source_reads
    compared = f"a sample takes {in_words(source_s)} from the source and {in_words(cached_s)} from the cache"
    if source_s < WORTH * cached_s:
        return f"{name}: {compared}: the source is as fast as the cache, which saves nothing here"
    some = "" if totals.samples >= length else f", of which {totals.samples:,} are cached"
    saved = in_words(totals.samples * (source_s - cached_s))
    return f"{name}: {compared}; an epoch of {length:,} samples{some} takes {saved} less, added up over its workers"


def in_words(seconds: float) -> str:
    """A time in its largest unit, or the two largest."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
