"""``CachedDataset``: a dataset in front of a store."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from torchcache import ahead, collate, environment, folder, location, owner, store
from torchcache.check import Duty, check_samples, is_first_process
from torchcache.errors import (
    CacheBypassWarning,
    CorruptStoreError,
    InPlaceWriteError,
    NotAStoreError,
    StaleCacheError,
    StoreError,
    StoreMismatchError,
    StoreUnavailableError,
    UnsupportedSampleError,
)
from torchcache.fill import Fetched, Filler
from torchcache.fingerprint import fingerprint
from torchcache.guard import RandomnessGuard
from torchcache.indices import as_position, checked_length, counted_from_start
from torchcache.reader import Reader
from torchcache.schema import Schema
from torchcache.source import CollatingSourceError
from torchcache.store import Counters, Identity, Store


@dataclass(frozen=True)
class Stats:
    """What a cache has done.

    Attributes:
        hits: samples that this process got from the cache.
        misses: samples that this process got from the source.
        source_reads: samples read from the source by all processes, in all runs.
        duplicate_reads: those among them that were read more than once, because an owner stalled.
        source_seconds: time spent inside the source by all processes, in all runs.
        samples_cached: samples in the store.
        bytes_cached: size of the store's blocks in bytes.
    """

    hits: int
    misses: int
    source_reads: int
    duplicate_reads: int
    source_seconds: float
    samples_cached: int
    bytes_cached: int


@dataclass(frozen=True)
class _Cache:
    """The open store of a dataset in this process.

    Attributes:
        known: samples that it held before this job: when it was opened, unless somebody was filling it.
    """

    store: Store
    reader: Reader
    filler: Filler
    known: int


class CachedDataset(Dataset[Any]):
    """Any map-style dataset, with its samples kept in a memory-mapped store on a local disk.

    The first epoch fills the store while it trains, together with all other processes that use it; later epochs, and
    later jobs, read from the map. Samples are equal to the dataset's in type and value.

    Args:
        dataset: the source: any object with ``__getitem__`` and ``__len__`` (and ``__getitems__`` if it has one).
        transform: applied to each sample after the cache, on every read: the place for random augmentation.
        cache_dir: the folder of the stores; default ``$CACHE_DIR``, else the user's cache folder.
        name: prefix of the store's folder; default the name of the dataset's class.
        key: identity of the content; default ``fingerprint(dataset)``. Two datasets of one key share a store, if they
            are of one class and length; one that has got another length gets a store of its own, beside the first.
        max_bytes: stop admitting samples when the store is this large; the others are read from the source each
            epoch. Either way 5 % of the disk is left free.
        copy: whether ``ds[i]`` owns its memory. ``False``: tensors are views of a private map of the store, arrays
            read-only ones; for large samples of which ``transform`` takes a part.
        on_random: what to do when producing a sample draws random numbers, which a cache would freeze: ``"error"``,
            ``"warn"`` or ``"allow"``.
        check: how many samples of a store that was there before this job are compared with the dataset at the first
            read, one process a node: files that change under the same path have the same key. Nothing is compared with
            ``on_random="allow"`` or ``"warn"``.
        on_unsupported: what to do with a sample that cannot be cached: ``"error"``, or ``"bypass"`` to read it from
            the dataset each time, with one warning.
        allow_pickle: store objects of classes that cannot be stored otherwise by pickling them. Reading such a store
            executes what is in it, so that everybody who can write to its folder can run code in the training
            process. The store remembers it, and is opened with the same value only. ``register`` is the better way.

    Raises:
        TypeError: if ``dataset`` is not a map-style dataset.
        FingerprintError: if the dataset holds something that cannot be identified; give a ``key``.
        NotAStoreError, FormatVersionError, StoreMismatchError: if the folder is in use for something else.

    Example:
        >>> train = CachedDataset(MNIST(root, transform=to_tensor))
        >>> loader = DataLoader(train, batch_size=64, shuffle=True)
    """

    def __init__(
        self,
        dataset: Any,
        transform: Callable[[Any], Any] | None = None,
        *,
        cache_dir: str | os.PathLike[str] | None = None,
        name: str | None = None,
        key: str | None = None,
        max_bytes: int | None = None,
        copy: bool = True,
        on_random: Literal["error", "warn", "allow"] = "error",
        allow_pickle: bool = False,
        check: int = 1,
        on_unsupported: Literal["error", "bypass"] = "error",
    ) -> None:
        if on_unsupported not in ("error", "bypass"):
            raise ValueError(f'on_unsupported is "error" or "bypass", not {on_unsupported!r}')
        if check < 0:
            raise ValueError(f"check={check}: it is a number of samples, 0 to compare none")
        length = checked_length(dataset)
        source = type(dataset)
        self.dataset = dataset
        self.transform = transform
        self._copy = copy
        self._max_bytes = max_bytes
        self._allow_pickle = allow_pickle
        self._guard = RandomnessGuard(on_random)
        self._duty = Duty(check if on_random == "error" else 0)  # else samples may differ
        self._on_unsupported = on_unsupported
        self._identity: Identity | None = Identity(
            key=fingerprint(dataset) if key is None else str(key),
            source=f"{source.__module__}.{source.__qualname__}",
            length=length,
            allow_pickle=allow_pickle,
        )
        self._path = location.cache_folder(cache_dir) / location.store_name(name or source.__name__, self._identity.key)
        self._reset()
        folder.refuse_foreign(self._path)  # a folder that is something else is refused now, not in mid-epoch
        if (self._path / environment.DATA_FILE).exists():
            self._connect()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        *,
        copy: bool = True,
        allow_pickle: bool = False,
    ) -> CachedDataset:
        """Serves a complete store without its source dataset.

        Args:
            path: the store's folder (``ds.path``).
            transform: as for ``CachedDataset``.
            copy: as for ``CachedDataset``.
            allow_pickle: as for ``CachedDataset``.

        Raises:
            StoreError: if there is no store, or an incomplete one.
        """
        self = cls.__new__(cls)
        self.dataset, self.transform = None, transform
        self._copy, self._max_bytes, self._identity, self._allow_pickle = copy, None, None, allow_pickle
        self._guard = RandomnessGuard("allow")
        self._duty, self._on_unsupported = Duty(0), "error"
        self._path = Path(os.fsdecode(path)).absolute()
        self._reset()
        cache = self._connect()
        assert cache is not None
        if not cache.reader.complete:
            raise StoreUnavailableError(
                f"{self._path} holds {cache.reader.count} of {cache.store.identity.length} samples, and without "
                f"the source dataset the others cannot be had; fill it with CachedDataset(dataset).fill()"
            )
        return self

    # -- the store ---------------------------------------------------------------------------------------

    def _reset(self) -> None:
        self._cache: _Cache | None = None
        self._ready: _Cache | None = None  # the same, once samples may be read: what had to be compared has been
        self._collates = False  # the dataset's ``__getitems__`` gives batches that are collated already
        self._bypassed = False  # the store cannot be used: every sample comes from the source
        self._hits = self._misses = 0

    def _connect(self) -> _Cache | None:
        """Opens the store, or makes it; ``None`` if that cannot be, which has been said then."""
        with store.registry_lock:
            if self._cache is None and not self._bypassed:
                inode, was_ours = folder.inode(self._path), (self._path / folder.GUARD_FILE).exists()
                try:
                    self._cache = self._open_cache()
                except (CorruptStoreError, NotAStoreError) as error:
                    # With store.lock beside it, a file that is no store was one: its beginning is overwritten.
                    if self._identity is None or not (was_ours or isinstance(error, CorruptStoreError)):
                        raise
                    self._set_aside(inode, error)
                except (StoreUnavailableError, UnsupportedSampleError) as error:  # a class is not imported yet
                    self._bypass(error)
            return self._cache

    def _open_store(self) -> Store:
        """Opens the store, or makes it: one beside it if that is the dataset's from when it had another length."""
        if self._identity is None:
            opened = Store.open(self._path)
            opened.permit(self._allow_pickle)
            return opened
        try:
            return Store.create(self._path, self._identity)
        except StoreMismatchError:
            if replace(Store.open(self._path).identity, length=self._identity.length) != self._identity:
                raise
        # Not the same store, grown: the samples may have moved to other indices.
        self._path = self._path.with_name(f"{self._path.name}-{self._identity.length}")
        return Store.create(self._path, self._identity)

    def _open_cache(self) -> _Cache:
        opened = self._open_store()
        reader = Reader(opened.data_path, opened.identity.length, opened.schemas)
        filler = Filler(
            opened,
            reader,
            self.dataset,
            guard=self._guard,
            max_bytes=self._max_bytes,
            on_unsupported=self._on_unsupported,
        )
        if opened.seal is not None:
            reader.load_index(opened.seal)
        else:
            filler.refresh()
            filler.seal()
        known = reader.count
        if known and opened.writable and owner.any_alive(opened.path / folder.OWNERS):
            known = 0
        return _Cache(opened, reader, filler, known)

    def _begin(self) -> _Cache | None:
        """Opens the store to read samples. The first process of a job to do so compares some with the dataset.

        Raises:
            StaleCacheError: if one differs.
        """
        cache = self._connect()
        if cache is not None and is_first_process():
            count = self._duty.take()
            if count and cache.known:
                self._compare(count, cache)
        self._ready = self._cache
        return self._ready

    def _compare(self, count: int, cache: _Cache) -> None:
        length = min(len(self), cache.store.identity.length)
        try:
            checked = check_samples(count, cache.reader, cache.filler.source, length=length, path=self._path)
            cache.filler.note(Counters(source_reads=checked))
        except StaleCacheError:
            self._duty.give_back()
            raise
        except CorruptStoreError as error:
            self._bypass(error)

    def _set_aside(self, inode: int, error: StoreError) -> None:
        """Renames a damaged store and begins a new one."""
        try:
            aside = store.set_aside(self._path, inode)
            warnings.warn(
                f"{error}. The damaged store is kept as {aside} and can be deleted; the samples are cached anew",
                CacheBypassWarning,
                stacklevel=4,
            )
            self._cache = self._open_cache()
        except (OSError, StoreError) as second:
            self._bypass(second)

    def _bypass(self, error: BaseException) -> None:
        if self.dataset is None:
            raise error
        self._bypassed, self._cache, self._ready = True, None, None
        warnings.warn(
            f"{self._path} cannot be used: {error}. Samples are read from the source; choose another folder with "
            f"CACHE_DIR or cache_dir=",
            CacheBypassWarning,
            stacklevel=4,
        )

    @property
    def path(self) -> Path:
        """The store's folder."""
        return self._path

    @property
    def complete(self) -> bool:
        """Whether every sample is cached."""
        cache = self._connect()
        if cache is None:
            return False
        if not cache.reader.complete:
            cache.filler.flush()
            cache.filler.refresh()
        return cache.reader.complete

    @property
    def stats(self) -> Stats:
        """What the cache has done so far."""
        cache = self._connect()
        if cache is not None:
            cache.filler.flush()
        totals = Counters() if cache is None else cache.store.counters() + cache.filler.uncounted
        return Stats(
            hits=self._hits,
            misses=self._misses,
            source_reads=totals.source_reads,
            duplicate_reads=totals.duplicate_reads,
            source_seconds=totals.source_seconds,
            samples_cached=totals.samples,
            bytes_cached=totals.nbytes,
        )

    def fill(self, num_workers: int = 0, progress: bool = True, *, indices: Sequence[int] | None = None) -> None:
        """Reads everything that is not cached yet, in the order of the indices.

        Any number of processes may do so at once; they share the work.

        Args:
            num_workers: processes that read, as in a ``DataLoader``.
            progress: show a progress bar, where there is a terminal.
            indices: read only these.
        """
        cache = self._ready or self._begin()
        # First what nobody else is reading, then what others have not finished.
        for wait in (False, True):
            if cache is None or self.complete or not cache.filler.admitting:
                return
            read = functools.partial(self._fill_batch, wait)
            missing, total = cache.reader.all_missing(), len(self)
            if indices is not None:
                missing, total = np.intersect1d(missing, indices), len(indices)
            with self._discarded_if_empty():
                ahead.fill_ahead(read, missing, num_workers=num_workers, progress=progress, total=total)
        if self.complete and cache is not None:
            cache.filler.seal()

    def _fill_batch(self, wait: bool, indices: list[int]) -> int:
        cache = self._ready or self._begin()
        if cache is not None and cache.filler.admitting:
            cache.filler.fetch(indices, wait=wait)
        return len(indices)

    def close(self) -> None:
        """Publishes what is not published yet and lets go of the store; the next read opens it again."""
        cache, self._cache, self._ready = self._cache, None, None
        if cache is not None:
            cache.filler.close()

    def __enter__(self) -> CachedDataset:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- reading -----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        if self.dataset is not None:
            return len(self.dataset)
        cache = self._connect()
        assert cache is not None
        return cache.store.identity.length

    def __getitem__(self, index: Any) -> Any:
        cache = self._ready
        if cache is not None and type(index) is int and self.transform is None and cache.reader.holds(index):
            values = None if self._has_shrunk(cache) else self._values(index, cache)
            if values is not None:
                self._hits += 1
                return self._hit(*values)
        position = index if type(index) is int else as_position(index)
        if position is None:
            return self._foreign(index)
        return self._samples([position])[0]

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        """The samples of a batch; what a ``DataLoader`` calls."""
        if self._collates:
            return self._collated(indices)
        cache = self._ready or self._begin()
        to_collate = self.transform is None and collate.feeds_default_collate(sys._getframe(1))
        if cache is not None and to_collate and not self._has_shrunk(cache):
            rows = cache.reader.find(indices)
            if rows is not None:
                self._hits += len(indices)
                return collate.batch_of(cache.reader, rows)
        positions = indices if set(map(type, indices)) == {int} else [as_position(index) for index in indices]
        if None in positions:
            return [self[index] for index in indices]
        try:
            return self._samples(positions, to_collate=to_collate)
        except CollatingSourceError as error:
            if self.transform is not None:
                raise TypeError(f"transform= works on single samples: {error}") from error
            self._collates = True
            warnings.warn(
                f"{error}. It is asked for every batch anew; nothing of them is cached",
                CacheBypassWarning,
                stacklevel=2,
            )
            return self._collated(indices)

    def _has_shrunk(self, cache: _Cache) -> bool:
        """Whether samples are cached that the dataset no longer has."""
        return self.dataset is not None and len(self.dataset) < cache.store.identity.length

    def _collated(self, indices: Sequence[Any]) -> Any:
        self._misses += len(indices)
        return self.dataset.__getitems__(indices)

    def _foreign(self, index: Any) -> Any:
        """A slice, a list, a key: whatever the dataset makes of it. Not cached, as it is not a sample's index."""
        if self.dataset is None:
            raise TypeError(
                f"{self._path} was opened without its dataset: it takes indices, not {type(index).__name__}"
            )
        if self.transform is not None:
            raise TypeError(f"transform= works on single samples, and {type(index).__name__} is not a sample's index")
        return self.dataset[index]

    def _samples(self, positions: Sequence[Any], *, to_collate: bool = False) -> list[Any]:
        """Samples as the dataset gives them, with ``transform`` applied.

        Args:
            positions: the indices as Python ints, maybe negative. The source is asked for ``0 <= i < length``: what
                it gives is kept for everybody who asks for that sample, whatever form their index has.
            to_collate: they go to ``default_collate``, which need not stack again what the fill has stacked.
        """
        length = len(self)
        order = positions
        if not positions or min(positions) < 0 or max(positions) >= length:
            order = [counted_from_start(position, length) for position in positions]
        (samples, flat), cache = self._fetch(list(dict.fromkeys(order)))
        if to_collate and flat is not None and flat.indices == order:
            stacked = collate.stacked_batch(flat)
            if stacked is not None:
                return stacked
        if self.transform is None and len(samples) == len(order):
            return [samples[index] for index in order]
        return [self._finished(index, samples, cache) for index in order]

    def _fetch(self, wanted: list[int]) -> tuple[Fetched, _Cache | None]:
        """Gets what is not cached: from the source, or by waiting until somebody else has."""
        cache = self._ready or self._begin()
        if cache is None:
            return Fetched({}), None
        known, length = wanted, cache.store.identity.length
        if len(self) > length:  # samples that the dataset has got since are not cached
            known = [i for i in wanted if i < length]
        with self._discarded_if_empty():
            fetched = cache.filler.fetch(known)
        self._misses += len(fetched.samples)
        return fetched, cache

    @contextlib.contextmanager
    def _discarded_if_empty(self) -> Iterator[None]:
        """What can never be cached leaves no empty store behind."""
        try:
            yield
        except UnsupportedSampleError:
            cache = self._cache
            self.close()
            if cache is not None:
                # Best effort: others may be using it, or doing the same. The error is what the caller must see.
                with contextlib.suppress(StoreError, OSError):
                    store.destroy_if_empty(cache.store)
            raise

    def _finished(self, index: int, samples: dict[int, Any], cache: _Cache | None) -> Any:
        """One sample: what the source has just given, else from the store, else from the source; transformed."""
        if index in samples:
            # Given away once: a second occurrence in the batch must be an object of its own.
            sample = samples.pop(index)
        else:
            values = self._values(index, cache)
            if values is not None:
                self._hits += 1
                return self._hit(*values)
            self._misses += 1
            sample = self.dataset[index]
        return sample if self.transform is None else self.transform(sample)

    def _values(self, index: int, cache: _Cache | None) -> tuple[Schema, list[Any]] | None:
        """The leaves of a sample from the store; ``None`` if they cannot be had, and the source must be asked."""
        if cache is None or self._bypassed:
            return None
        try:
            if self._is_cached(index, cache):
                return cache.reader.values(index, self._copy)
        except StoreError as error:
            self._bypass(error)
        return None

    def _is_cached(self, index: int, cache: _Cache) -> bool:
        if cache.reader.holds(index):
            return True
        if index >= cache.store.identity.length:
            return False
        cache.filler.flush()
        cache.filler.refresh()
        return cache.reader.holds(index)

    def _hit(self, schema: Schema, values: list[Any]) -> Any:
        if self.transform is None:
            return schema.rebuild(values)
        result = self.transform(schema.rebuild(values))
        # A view is new, so its version counts the writes of the transform alone.
        if not self._copy and any(isinstance(value, torch.Tensor) and value._version for value in values):
            raise InPlaceWriteError(
                f"transform {_describe(self.transform)} wrote into the sample it was given, which with copy=False is "
                f"a view of the cache: the next epoch would see it. Use copy=True, or clone the sample first"
            )
        return result

    # -- a wrapper's duties ------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        # Only what is not found here; never while unpickling, when there is no dataset yet.
        dataset = self.__dict__.get("dataset")
        if dataset is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(dataset, name)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state.update(_cache=None, _ready=None, _hits=0, _misses=0)
        return state

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dataset!r}, path={str(self._path)!r})"

    def __fingerprint__(self) -> Any:
        """What identifies this dataset inside another: not where it is cached."""
        return (self._path.name if self.dataset is None else self.dataset, self.transform)


def _describe(transform: Any) -> str:
    return getattr(transform, "__qualname__", None) or type(transform).__qualname__
