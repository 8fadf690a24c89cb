"""The store of a dataset, as one process uses it: opened when it is needed, compared, set aside, done without."""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import get_worker_info

from torchcache import database, environment, filesystem, folder, owner, provenance, store, usage
from torchcache.check import Duty, check_samples, is_first_process
from torchcache.errors import (
    CacheBypassWarning,
    CacheFolderWarning,
    CorruptStoreError,
    NotAStoreError,
    StaleCacheError,
    StoreError,
    StoreMismatchError,
    StoreUnavailableError,
    UnsupportedSampleError,
)
from torchcache.fill import AT_EXIT, CLAIM_TIMEOUT_S, Filler
from torchcache.guard import RandomnessGuard
from torchcache.reader import Reader
from torchcache.records import Counters, Identity
from torchcache.source import Source, UncacheableSourceError, changed_after_wrapping
from torchcache.store import Store
from torchcache.watch import Watch

_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


@dataclass(frozen=True)
class Settings:
    """How a store is used; the arguments of ``CachedDataset`` of these names."""

    max_bytes: int | None = None
    on_random: Literal["error", "warn", "allow"] = "error"
    allow_pickle: bool = False
    check: int = 0
    on_unsupported: Literal["error", "bypass"] = "error"
    claim_timeout_s: float = CLAIM_TIMEOUT_S
    trust: bool = False

    def __post_init__(self) -> None:
        if self.on_unsupported not in ("error", "bypass"):
            raise ValueError(f'on_unsupported is "error" or "bypass", not {self.on_unsupported!r}')
        if self.check < 0:
            raise ValueError(f"check={self.check}: it is a number of samples, 0 to compare none")
        if not self.claim_timeout_s > 0:
            raise ValueError(f"claim_timeout_s={self.claim_timeout_s}: it is a time in seconds, more than 0")


@dataclass(frozen=True)
class Cache:
    """An open store.

    Attributes:
        known: samples that it held before this job: when it was opened, unless somebody was filling it.
    """

    store: Store
    reader: Reader
    filler: Filler
    known: int


class Connection:
    """From a dataset to its store. Pickles as settings.

    Args:
        path: the store's folder.
        identity: what the store has to hold; ``None``: whatever it holds.
        dataset: the source; ``None``: there is none.
        settings: how the store is used.
        parts: what went into the key, which came from the dataset: its attributes are watched. ``None``: the user gave
            it.

    Attributes:
        path: the store's folder.
        served: where this process has its samples from.
        ready: the open store, once samples may be read: what had to be compared has been.
        bypassed: the store cannot be used: every sample comes from the source.
    """

    def __init__(
        self,
        path: Path,
        identity: Identity | None,
        dataset: Any,
        settings: Settings,
        *,
        parts: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self.served = usage.Served()
        self.ready: Cache | None = None
        self.bypassed = False
        self._identity = identity
        self._dataset = dataset
        self._settings = settings
        self._guard = RandomnessGuard(settings.on_random)
        self._parts = provenance.to_record(parts)
        self._watch = Watch(dataset, parts is not None)
        self._duty = Duty(settings.check if settings.on_random == "error" else 0)  # else samples may differ
        self._cache: Cache | None = None
        self._sealed: tuple[bytes, Reader] | None = None  # of a store that a worker reads from and we do not
        self._records = False  # at the end of this process
        _connections.add(self)

    def __getstate__(self) -> dict[str, Any]:
        self.look_for_changes()
        fresh = {"served": usage.Served(), "_records": False, "_cache": None, "ready": None, "_sealed": None}
        return {**self.__dict__, **fresh}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _connections.add(self)

    def copy(self) -> Connection:
        """One of its own, for a copy of the dataset: not open."""
        return copy.copy(self)

    @property
    def exists(self) -> bool:
        """Whether there is something that may be a store."""
        return os.path.exists(self.path / environment.DATA_FILE)

    def open(self) -> Cache | None:
        """Opens the store, or makes it; ``None`` if that cannot be, which has been said then."""
        with database.registry_lock:
            if self._cache is None and not self.bypassed:
                inode, was_ours = folder.inode(self.path), os.path.exists(self.path / folder.GUARD_FILE)
                try:
                    self._warn_of_folder()
                    self._cache = self._open()
                except (CorruptStoreError, NotAStoreError) as error:
                    # With store.lock beside it, a file that is no store was one: its beginning is overwritten.
                    if self._identity is None or not (was_ours or isinstance(error, CorruptStoreError)):
                        raise
                    self._set_aside(inode, error)
                except (StoreUnavailableError, UnsupportedSampleError) as error:  # a class is not imported yet
                    self.bypass(error)
            return self._cache

    def begin(self) -> Cache | None:
        """Opens the store to read samples. The first process of a job to do so compares some with the dataset.

        Raises:
            StaleCacheError: if one differs.
        """
        self.look_for_changes()
        cache = self.open()
        if cache is not None and is_first_process():
            count = self._duty.take()
            if count and cache.known:
                self._compare(count, cache)
        self.ready = self._cache
        self._record_at_end()
        return self.ready

    def reader_of(self, path: str, seal: bytes) -> Reader:
        """A reader of the sealed store that a worker reads from, also if this process does without it.

        Raises:
            StoreError: if it cannot be read here.
        """
        cache = self.open()
        self._record_at_end()
        if cache is not None:
            if cache.store.seal is None:  # it was not complete yet when we looked
                cache.filler.refresh()
            known = cache.filler.sealed()
            if known is not None and known.block_id == seal:
                return cache.reader
        if self._sealed is None or self._sealed[0] != seal:
            opened = Store.open(Path(path))
            if opened.seal is None or opened.seal.block_id != seal:
                raise StoreUnavailableError(f"{path} is not the store any more that a worker reads from")
            reader = Reader(opened.data_path, opened.identity.length, opened.schemas, seal=opened.seal)
            self._sealed = seal, reader
        return self._sealed[1]

    def look_for_changes(self) -> None:
        """Does without the store if the dataset was changed since it was wrapped."""
        changed = [] if self.bypassed else self._watch.changed()
        if changed:
            self.leave(changed_after_wrapping(changed))

    def read_source(self, index: Any) -> Any:
        """What the dataset gives for an index that is not cached, whatever it is."""
        try:
            return self._dataset[index]
        finally:
            self._watch.refresh()

    def _open(self) -> Cache:
        if not self._settings.trust:
            folder.refuse_strangers(self.path)
        opened = self._open_store()
        reader = Reader(opened.data_path, opened.identity.length, opened.schemas, seal=opened.seal)
        filler = Filler(
            opened,
            reader,
            Source(self._dataset, self._guard, self._watch),
            max_bytes=self._settings.max_bytes,
            on_unsupported=self._settings.on_unsupported,
            claim_timeout_s=self._settings.claim_timeout_s,
        )
        if opened.seal is None:
            filler.refresh()
            filler.seal()
        known = reader.count
        if known and not opened.read_only and owner.any_alive(opened.path / folder.OWNERS):
            known = 0
        return Cache(opened, reader, filler, known)

    def _open_store(self) -> Store:
        """Opens the store, or makes it: one beside it if that is the dataset's from when it had another length."""
        if self._identity is None:
            opened = Store.open(self.path)
            opened.permit(self._settings.allow_pickle)
            # Before memory is taken for as many samples as it says that it will have.
            held = 0 if opened.seal is not None else sum(entry.head.count for entry in opened.entries(0))
            if opened.seal is None and held != opened.identity.length:
                raise StoreUnavailableError(
                    f"{self.path} holds {held} of {opened.identity.length} samples, and without the source dataset the "
                    f"others cannot be had; fill it with CachedDataset(dataset).fill()"
                )
            return opened
        try:
            return Store.create(self.path, self._identity, self._parts)
        except StoreMismatchError:
            if replace(Store.open(self.path).identity, length=self._identity.length) != self._identity:
                raise
        # Not the same store, grown: the samples may have moved to other indices.
        self.path = self.path.with_name(f"{self.path.name}-{self._identity.length}")
        return Store.create(self.path, self._identity, self._parts)

    def _compare(self, count: int, cache: Cache) -> None:
        length = min(len(self._dataset), cache.store.identity.length)
        try:
            checked = check_samples(count, cache.reader, cache.filler.source, length=length, path=self.path)
            cache.filler.note(Counters(source_reads=checked))
        except StaleCacheError:
            self._duty.give_back()
            raise
        except UncacheableSourceError as error:
            self.leave(str(error))
        except CorruptStoreError as error:
            self.bypass(error)

    def _warn_of_folder(self) -> None:
        risk = filesystem.risk(self.path)
        if risk is not None and risk.fills and get_worker_info() is None:
            warnings.warn(
                f"{self.path} lies on {risk.kind}: {risk.text}; choose another folder with CACHE_DIR or cache_dir=",
                CacheFolderWarning,
                stacklevel=4,
            )

    def _set_aside(self, inode: int, error: StoreError) -> None:
        """Renames a damaged store and begins a new one."""
        try:
            aside = store.set_aside(self.path, inode)
            if aside is not None:
                warnings.warn(
                    f"{error}. The damaged store is kept as {aside} and can be deleted; the samples are cached anew",
                    CacheBypassWarning,
                    stacklevel=4,
                )
            self._cache = self._open()
        except (OSError, StoreError) as second:
            self.bypass(second)

    def bypass(self, error: BaseException) -> None:
        """Does without the store from now on, and says so.

        Raises:
            error: if there is no dataset to read from instead.
        """
        if self._dataset is None:
            raise error
        if self.bypassed:
            return
        self.bypassed, self._cache, self.ready = True, None, None
        warnings.warn(
            f"{self.path} cannot be used: {error}. Samples are read from the source; choose another folder with "
            f"CACHE_DIR or cache_dir=",
            CacheBypassWarning,
            stacklevel=4,
        )

    def leave(self, why: str) -> None:
        """Does without the store from now on, as it is not what the dataset gives; what was read before is kept."""
        if self.bypassed:
            return
        self.close()
        self.bypassed = True
        warnings.warn(
            f"{why}. Samples are read from the dataset from now on, and not cached", CacheBypassWarning, stacklevel=4
        )

    @contextlib.contextmanager
    def discarded_if_empty(self) -> Iterator[None]:
        """What can never be cached leaves no empty store behind."""
        try:
            yield
        except (UnsupportedSampleError, UncacheableSourceError):
            cache = self._cache
            self.close()
            if cache is not None:
                # Best effort: others may be using it, or doing the same. The error is what the caller must see.
                with contextlib.suppress(StoreError, OSError):
                    store.destroy_if_empty(cache.store)
            raise

    def close(self) -> None:
        """Publishes what is not published yet and lets go of the store; the next use opens it again."""
        cache, self._cache, self.ready, self._sealed = self._cache, None, None, None
        if cache is not None:
            cache.filler.close()
        usage.record(self.served, self.path)

    def _record_at_end(self) -> None:
        if not self._records:
            self._records = True
            # Runs at the end of a DataLoader worker too, and when this object is dropped.
            Finalize(self, usage.record, args=(self.served, self.path), exitpriority=AT_EXIT)

    def begin_again(self) -> None:
        """In a forked process, which has not served anything yet."""
        self.ready = None
        self.served.hits = self.served.misses = self.served.recorded = 0
        self._records = False


def _begin_again() -> None:
    """A forked process looks for itself whether the dataset is still what was wrapped, and what is to be compared."""
    for connection in list(_connections):
        connection.begin_again()


os.register_at_fork(after_in_child=_begin_again)
