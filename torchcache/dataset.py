"""``CachedDataset``: a dataset in front of a store."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch.utils.data import Dataset, default_collate

from torchcache import ahead, collate, folder, location, report
from torchcache.connection import Connection, Settings
from torchcache.errors import StoreError
from torchcache.fill import CLAIM_TIMEOUT_S
from torchcache.fingerprint import fingerprint
from torchcache.indices import checked_length
from torchcache.records import Counters, Identity
from torchcache.samples import Samples
from torchcache.source import UncacheableSourceError
from torchcache.split import split_dataset


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


class CachedDataset(Dataset[Any]):
    """Any map-style dataset, with its samples kept in a memory-mapped store on a local disk.

    The first epoch fills the store while it trains, together with all other processes that use it; later epochs, and
    later jobs, read from the map. Samples are equal to the dataset's in type and value.

    Args:
        dataset: the source: any object with ``__getitem__`` and ``__len__`` (and ``__getitems__`` if it has one).
        transform: applied to each sample after the cache, on every read: the place for random augmentation.
        batch_transform: applied to each batch as ``default_collate`` makes it, in one call: the place for a conversion
            or a normalisation that needs no look at single samples. Only a ``DataLoader`` that collates by
            ``default_collate`` makes such batches; every other read raises ``TypeError``, so that no sample is seen
            without it.
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
        claim_timeout_s: seconds after which another process that is reading a sample, and publishes nothing, is taken
            to be stopped, and the sample is read here. One that is dead is recognised at once.
        trust: use a store although it belongs to another user and everybody can write to it.
        allow_pickle: store objects of classes that cannot be stored otherwise by pickling them. Reading such a store
            executes what is in it, so that everybody who can write to its folder can run code in the training
            process. The store remembers it, and is opened with the same value only. ``register`` is the better way.

    Raises:
        TypeError: if ``dataset`` is not a map-style dataset.
        ValueError: if the store would lie in the dataset's own folder, or an argument has no meaning.
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
        batch_transform: Callable[[Any], Any] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        name: str | None = None,
        key: str | None = None,
        max_bytes: int | None = None,
        copy: bool = True,
        on_random: Literal["error", "warn", "allow"] = "error",
        allow_pickle: bool = False,
        check: int = 1,
        on_unsupported: Literal["error", "bypass"] = "error",
        claim_timeout_s: float = CLAIM_TIMEOUT_S,
        trust: bool = False,
    ) -> None:
        settings = Settings(max_bytes, on_random, allow_pickle, check, on_unsupported, claim_timeout_s, trust)
        length = checked_length(dataset)
        source = type(dataset)
        found = fingerprint(dataset, explain=True) if key is None else None
        identity = Identity(
            key=str(key) if found is None else found.key,
            source=f"{source.__module__}.{source.__qualname__}",
            length=length,
            allow_pickle=allow_pickle,
        )
        path = location.cache_folder(cache_dir) / location.store_name(name or source.__name__, identity.key)
        location.refuse_nesting(path, dataset)
        folder.refuse_foreign(path)  # a folder that is something else is refused now, not in mid-epoch
        parts = None if found is None else found.parts
        connection = Connection(path, identity, dataset, settings, parts=parts)
        self._set_up(dataset, transform, batch_transform, copy, connection)
        if self._connection.exists:
            self._connection.open()

    def _set_up(
        self,
        dataset: Any,
        transform: Callable[[Any], Any] | None,
        batch_transform: Callable[[Any], Any] | None,
        copy: bool,
        connection: Connection,
    ) -> None:
        # The dataset may have attributes of these names.
        self.__dict__.update(dataset=dataset, transform=transform, batch_transform=batch_transform)
        self._copy = copy
        self._connection = connection
        self._serving = Samples(dataset, connection, copy)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        *,
        batch_transform: Callable[[Any], Any] | None = None,
        copy: bool = True,
        allow_pickle: bool = False,
        trust: bool = False,
    ) -> CachedDataset:
        """Serves a complete store without its source dataset.

        Args:
            path: the store's folder (``ds.path``).
            transform: as for ``CachedDataset``.
            batch_transform: as for ``CachedDataset``.
            copy: as for ``CachedDataset``.
            allow_pickle: as for ``CachedDataset``.
            trust: as for ``CachedDataset``.

        Raises:
            StoreError: if there is no store, or an incomplete one.
        """
        self = cls.__new__(cls)
        settings = Settings(on_random="allow", allow_pickle=allow_pickle, trust=trust)
        connection = Connection(Path(os.fsdecode(path)).absolute(), None, None, settings)
        self._set_up(None, transform, batch_transform, copy, connection)
        self._connection.open()
        return self

    @classmethod
    def split(cls, dataset: Any, **kwargs: Any) -> CachedDataset:
        """Caches a dataset up to the first random step of its transforms, and applies the rest on each read.

        Samples are those of the dataset itself, also in what they draw from the generators. The dataset needs
        ``transform``, ``target_transform`` or ``transforms`` in the way of torchvision's, and to hand out what these
        give as it is. Each is cut as by ``split_transform``.

        Args:
            dataset: it is not changed; a shallow copy is cached.
            **kwargs: as for ``CachedDataset``, without ``transform``.

        Raises:
            TypeError: if the dataset has no such attribute.
            UnsupportedSampleError: when a sample is read, if the dataset works on what its transform gives, or its
                samples do not hold it.

        Example:
            >>> pipeline = Compose([Resize(256), RandomCrop(224), ToTensor()])
            >>> train = CachedDataset.split(ImageFolder(root, transform=pipeline))
        """
        if "transform" in kwargs:
            raise TypeError("split() applies the random part of the dataset's own transform; put yours at its end")
        found = split_dataset(dataset)
        if found is None:
            return cls(dataset, **kwargs)
        first, rest = found
        return cls(first, rest, **{"name": type(dataset).__name__, **kwargs})

    @property
    def path(self) -> Path:
        """The store's folder."""
        return self._connection.path

    @property
    def complete(self) -> bool:
        """Whether every sample is cached."""
        cache = self._connection.open()
        if cache is None:
            return False
        if not cache.reader.complete:
            try:
                cache.filler.flush()
                cache.filler.refresh()
            except StoreError as error:
                self._connection.bypass(error)
        return cache.reader.complete

    @property
    def stats(self) -> Stats:
        """What the cache has done so far."""
        totals = self._totals()
        return Stats(
            hits=self._connection.served.hits,
            misses=self._connection.served.misses,
            source_reads=totals.source_reads,
            duplicate_reads=totals.duplicate_reads,
            source_seconds=totals.source_seconds,
            samples_cached=totals.samples,
            bytes_cached=totals.nbytes,
        )

    def _totals(self) -> Counters:
        cache = self._connection.open()
        try:
            if cache is not None:
                cache.filler.flush()
                return cache.store.counters() + cache.filler.uncounted
        except StoreError as error:
            self._connection.bypass(error)
        return Counters()

    def report(self) -> str:
        """What the cache saves each epoch, in a line, or that it saves nothing because the source is as fast.

        The time of a read from the source is the mean over all processes and runs; that of a cached read is measured
        now, over some samples, one by one. ``transform`` is part of neither.

        Example:
            >>> print(train.report())  # after the first epoch
        """
        totals, cache, seconds = self._totals(), self._connection.open(), None
        try:
            if cache is not None:
                cache.filler.refresh()
                seconds = report.seconds_per_cached_read(cache.reader)
        except StoreError as error:
            self._connection.bypass(error)
        return report.line(self.path.name, totals, len(self), seconds)

    def fill(self, num_workers: int = 0, progress: bool = True, *, indices: Sequence[int] | None = None) -> None:
        """Reads everything that is not cached yet, in the order of the indices.

        Any number of processes may do so at once; they share the work.

        Args:
            num_workers: processes that read, as in a ``DataLoader``.
            progress: show a progress bar, on a terminal and in a notebook.
            indices: read only these.
        """
        self._connection.look_for_changes()
        # What has to be compared is, with workers, by the first of them: a handle that the dataset opens at its first
        # read must not be one that they share.
        cache = self._connection.ready or (self._connection.open() if num_workers else self._connection.begin())
        # First what nobody else is reading, then what others have not finished.
        for wait in (False, True):
            if cache is None or self._connection.bypassed or self.complete or not cache.filler.admitting:
                return
            read = functools.partial(self._fill_batch, wait)
            missing, total = cache.reader.all_missing(), len(self)
            if indices is not None:
                missing, total = np.intersect1d(missing, indices), len(indices)
            with self._connection.discarded_if_empty():
                ahead.fill_ahead(read, missing, num_workers=num_workers, progress=progress, total=total)
        if self.complete and cache is not None:
            cache.filler.seal()

    def _fill_batch(self, wait: bool, indices: list[int]) -> int:
        cache = self._connection.ready or self._connection.begin()
        if cache is not None and cache.filler.admitting:
            try:
                cache.filler.fetch(indices, wait=wait)
            except UncacheableSourceError as error:
                self._connection.leave(str(error))
        return len(indices)

    def close(self) -> None:
        """Publishes what is not published yet and lets go of the store; the next read opens it again."""
        self._connection.close()

    def __enter__(self) -> CachedDataset:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __len__(self) -> int:
        self._connection.look_for_changes()  # samplers ask for it at the start of an epoch
        return self._serving.length

    def __getitem__(self, index: Any) -> Any:
        if self.batch_transform is not None:
            raise self._not_a_batch()
        return self._serving.item(index, self.transform)

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        """The samples of a batch; what a ``DataLoader`` calls."""
        fetcher = collate.fetcher_of(sys._getframe(1))
        if self.batch_transform is not None and fetcher is None:
            raise self._not_a_batch()
        to_collate = self.transform is None and fetcher is not None and collate.is_default()
        if self.batch_transform is not None:
            batch = default_collate(self._serving.batch(indices, self.transform, to_collate=to_collate))
            return collate.collated(self.batch_transform(batch))
        if to_collate and fetcher is not None:
            recipe = self._serving.recipe(indices, fetcher)
            if recipe is not None:
                return collate.collated(recipe)
        return self._serving.batch(indices, self.transform, to_collate=to_collate)

    def _not_a_batch(self) -> TypeError:
        return TypeError(
            f"batch_transform= works on the batches that a DataLoader makes with default_collate, and this is another "
            f"read of {self.path.name}: call it in your collate_fn or on the device, or read single samples through a "
            f"CachedDataset of the same dataset without it"
        )

    def __getattr__(self, name: str) -> Any:
        # Only what is not found here; never while unpickling, when there is no dataset yet.
        dataset = self.__dict__.get("dataset")
        if dataset is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # What the dataset has and the wrapper has not is the dataset's, as when it is read.
        dataset = self.__dict__.get("dataset")
        own = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if dataset is None or own or not hasattr(dataset, name):
            super().__setattr__(name, value)
        else:
            setattr(dataset, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connection": self._connection.copy(), "_serving": self._serving.token}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._serving = Samples(self.dataset, self._connection, self._copy, state["_serving"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dataset!r}, path={str(self.path)!r})"

    def __fingerprint__(self) -> Any:
        """What identifies this dataset inside another: not where it is cached."""
        parts = (self.path.name if self.dataset is None else self.dataset, self.transform)
        return parts if self.batch_transform is None else (*parts, self.batch_transform)
