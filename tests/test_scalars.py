"""``ds.stats`` for TensorBoard."""

from __future__ import annotations

from typing import Any

from helpers import Source

import torchcache


class Recorder:
    """Anything that has TensorBoard's method."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, Any, Any]] = []

    def add_scalar(self, tag: str, scalar_value: Any, global_step: Any = None) -> None:
        self.scalars.append((tag, scalar_value, global_step))


def test_stats_are_written_as_scalars(cache_dir: Any, source: Source) -> None:
    cached = torchcache.CachedDataset(source)
    cached.__getitems__([1, 2, 3])
    cached[2]
    writer = Recorder()
    torchcache.log_stats(writer, cached, 7)
    found = {tag: value for tag, value, step in writer.scalars if step == 7}
    stats = cached.stats
    assert found == {
        "torchcache/hits": 1,
        "torchcache/misses": 3,
        "torchcache/source_reads": 3,
        "torchcache/duplicate_reads": 0,
        "torchcache/source_seconds": stats.source_seconds,
        "torchcache/samples_cached": 3,
        "torchcache/bytes_cached": stats.bytes_cached,
    }
