"""The samples of a dataset, one by one and by batch: from its store where they are cached, else through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.utils.data import default_collate

from torchcache import collate, recipe
from torchcache.connection import Cache, Connection
from torchcache.errors import InPlaceWriteError, StoreError
from torchcache.fill import Fetched
from torchcache.indices import as_position, counted_from_start
from torchcache.items import READ_ERRORS
from torchcache.reader import as_indices
from torchcache.recipe import Recipe
from torchcache.schema import Schema
from torchcache.source import UncacheableSourceError

Transform = Callable[[Any], Any] | None


class Samples:
    """What ``CachedDataset`` serves.

    Args:
        dataset: the source; ``None``: there is none.
        connection: to its store.
        copy: whether a sample owns its memory.
        token: as what the dataset is known in the process that it comes from (``recipe.register``).

    Attributes:
        token: as what it is known here.
    """

    def __init__(self, dataset: Any, connection: Connection, copy: bool, token: bytes | None = None) -> None:
        self.token = recipe.register(self, token)
        self._dataset = dataset
        self._connection = connection
        self._copy = copy
        self._served = connection.served

    @property
    def length(self) -> int:
        if self._dataset is not None:
            return len(self._dataset)
        cache = self._connection.open()
        assert cache is not None
        return cache.store.identity.length

    def item(self, index: Any, transform: Transform) -> Any:
        """What ``ds[index]`` is."""
        cache = self._connection.ready
        if cache is not None and type(index) is int and transform is None:
            found = self._cached_item(index, cache)
            if found is not None:
                self._served.hits += 1
                return found[0]
        position = index if type(index) is int else as_position(index)
        if position is None:
            return self._foreign(index, transform)
        try:
            return self.at([position], transform)[0]
        except UncacheableSourceError as error:
            self._connection.leave(str(error))
            return self.at([position], transform)[0]

    def _cached_item(self, index: int, cache: Cache) -> tuple[Any] | None:
        """A cached sample, if its index is that of one as it is; no time is lost here."""
        reader = cache.reader
        if not 0 <= index < reader.length or (self._dataset is not None and index >= len(self._dataset)):
            return None
        if reader.read is not None and self._copy:
            try:
                return (reader.read(index),)
            except READ_ERRORS:
                pass  # what is wrong is found out below
        found = self._values(index, cache) if reader.holds(index) else None
        return None if found is None else (found[0].rebuild(found[1]),)

    def _foreign(self, index: Any, transform: Transform) -> Any:
        """A slice, a list, a key: whatever the dataset makes of it. Not cached, as it is not a sample's index."""
        if self._dataset is None:
            path = self._connection.path
            raise TypeError(f"{path} was opened without its dataset: it takes indices, not {type(index).__name__}")
        if transform is not None:
            raise TypeError(f"transform= works on single samples, and {type(index).__name__} is not a sample's index")
        return self._connection.read_source(index)

    def batch(self, indices: Sequence[Any], transform: Transform, *, to_collate: bool) -> Any:
        """The samples of a batch, or, ``to_collate``, what stands for them until ``default_collate``."""
        cache = self._connection.ready or self._connection.begin()
        if cache is None:
            return self._uncached(indices, transform)
        if to_collate and not self._has_shrunk(cache):
            gathered = self._gathered(indices, cache)
            if gathered is not None:
                return gathered
        positions = indices if set(map(type, indices)) == {int} else [as_position(index) for index in indices]
        if None in positions:
            return [self.item(index, transform) for index in indices]
        try:
            return self.at(positions, transform, to_collate=to_collate)
        except UncacheableSourceError as error:
            self._connection.leave(str(error))
            return self._uncached(indices, transform)

    def _uncached(self, indices: Sequence[Any], transform: Transform) -> Any:
        """A batch as a loader would get it from the dataset itself."""
        batched = getattr(self._dataset, "__getitems__", None)
        if batched is None:
            return [self.item(index, transform) for index in indices]
        found = batched(indices)
        self._served.misses += len(indices)
        if transform is None:
            return found
        if not isinstance(found, (list, tuple)):
            raise TypeError(
                f"transform= works on single samples, and __getitems__ of {type(self._dataset).__qualname__} gives "
                f"collated batches"
            )
        return [transform(sample) for sample in found]

    def _gathered(self, indices: Sequence[Any], cache: Cache) -> list[Any] | None:
        """A batch of cached samples for ``default_collate``; ``None`` if they must be had one by one."""
        try:
            rows = cache.reader.find(indices)
            batch = None if rows is None else collate.batch_of(cache.reader, rows)
        except StoreError as error:
            self._connection.bypass(error)
            return None
        if batch is not None:
            self._served.hits += len(indices)
        return batch

    def _has_shrunk(self, cache: Cache) -> bool:
        """Whether samples are cached that the dataset no longer has."""
        return self._dataset is not None and len(self._dataset) < cache.store.identity.length

    def recipe(self, indices: Sequence[Any], fetcher: FrameType) -> Recipe | None:
        """What a worker sends in the place of a batch; ``None`` if that cannot be, or would be slower.

        Args:
            indices: the samples of the batch.
            fetcher: to which it is returned (``collate.fetcher_of``).
        """
        if not recipe.leaves_worker(fetcher):
            return None
        cache = self._connection.ready or self._connection.begin()
        wanted = None if cache is None else as_indices(indices, cache.reader.length)
        if cache is None or wanted is None or self._has_shrunk(cache):
            return None
        try:
            seal = cache.filler.sealed()
            rows = None if seal is None else cache.reader.find(wanted)
        except StoreError:
            return None  # what is wrong is found out, and said, without a recipe
        if seal is None or rows is None or collate.shortcut(rows.table.schema) is None:
            return None
        if not cache.reader.expects_in_memory(rows):
            return None
        return Recipe(self.token, str(self._connection.path), seal.block_id, wanted)

    def received(self, path: str, seal: bytes, indices: torch.Tensor) -> Any:
        """What a recipe becomes: the batch that ``default_collate`` makes of these samples of a store."""
        try:
            reader = self._connection.reader_of(path, seal)
            rows = reader.find(indices)
            batch = None if rows is None else default_collate(collate.batch_of(reader, rows))
        except StoreError as error:
            self._connection.bypass(error)
            batch = None
        if batch is not None:
            self._served.hits += len(indices)
            return batch
        self._served.misses += len(indices)
        return default_collate([self._connection.read_source(index) for index in indices.tolist()])

    def at(self, positions: Sequence[Any], transform: Transform, *, to_collate: bool = False) -> list[Any]:
        """Samples as the dataset gives them, with ``transform`` applied.

        Args:
            positions: the indices as Python ints, maybe negative. The source is asked for ``0 <= i < length``: what
                it gives is kept for everybody who asks for that sample, whatever form their index has.
            transform: applied to each, if there is one.
            to_collate: they go to ``default_collate``, which need not stack again what the fill has stacked.
        """
        length = self.length
        order = positions
        if not positions or min(positions) < 0 or max(positions) >= length:
            order = [counted_from_start(position, length) for position in positions]
        (samples, flat), cache = self._fetch(list(dict.fromkeys(order)))
        if to_collate and flat is not None and flat.indices == order:
            stacked = collate.stacked_batch(flat)
            if stacked is not None:
                return stacked
        if transform is None and len(samples) == len(order):
            return [samples[index] for index in order]
        if cache is not None and not samples:
            cache.reader.announce(order)
        return [self._finished(index, samples, cache, transform) for index in order]

    def _fetch(self, wanted: list[int]) -> tuple[Fetched, Cache | None]:
        """Gets what is not cached: from the source, or by waiting until somebody else has."""
        cache = self._connection.ready or self._connection.begin()
        if cache is None:
            return Fetched({}), None
        known, length = wanted, cache.store.identity.length
        if self.length > length:  # samples that the dataset has got since are not cached
            known = [i for i in wanted if i < length]
        with self._connection.discarded_if_empty():
            fetched = cache.filler.fetch(known)
        self._served.misses += len(fetched.samples)
        return fetched, cache

    def _finished(self, index: int, samples: dict[int, Any], cache: Cache | None, transform: Transform) -> Any:
        """One sample: what the source has just given, else from the store, else from the source; transformed."""
        if index in samples:
            # Given away once: a second occurrence in the batch must be an object of its own.
            sample = samples.pop(index)
        else:
            found = self._values(index, cache)
            if found is not None:
                self._served.hits += 1
                return self._hit(*found, transform)
            self._served.misses += 1
            sample = self._connection.read_source(index)
        return sample if transform is None else transform(sample)

    def _values(self, index: int, cache: Cache | None) -> tuple[Schema, list[Any]] | None:
        """The leaves of a sample from the store; ``None`` if they cannot be had, and the source must be asked."""
        if cache is None or self._connection.bypassed:
            return None
        try:
            if self._is_cached(index, cache):
                return cache.reader.values(index, self._copy)
        except StoreError as error:
            self._connection.bypass(error)
        return None

    def _is_cached(self, index: int, cache: Cache) -> bool:
        if cache.reader.holds(index):
            return True
        if index >= cache.store.identity.length:
            return False
        cache.filler.flush()
        cache.filler.refresh()
        return cache.reader.holds(index)

    def _hit(self, schema: Schema, values: list[Any], transform: Transform) -> Any:
        sample = schema.rebuild(values)
        if transform is None:
            return sample
        result = transform(sample)
        # A view is new, so its version counts the writes of the transform alone.
        if not self._copy and any(isinstance(value, torch.Tensor) and value._version for value in values):
            raise InPlaceWriteError(
                f"transform {_describe(transform)} wrote into the sample it was given, which with copy=False is a view "
                f"of the cache: the next epoch would see it. Use copy=True, or clone the sample first"
            )
        return result


def _describe(transform: Any) -> str:
    return getattr(transform, "__qualname__", None) or type(transform).__qualname__
