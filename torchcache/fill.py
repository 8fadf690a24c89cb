"""The fill: claim, read, publish, wait.

docs/fill.md is the specification. In short: a sample that is not cached is claimed in LMDB, read from the source and
published in a block with others; what somebody else has claimed is waited for. Everything of ours is published before
we wait, so that two processes cannot wait for each other. A dead owner's claims are taken over at once, a stopped
one's after ``CLAIM_TIMEOUT_S``. When the store cannot take more, the fill stops admitting and samples come from the
source.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
import warnings
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.util import Finalize
from typing import Any

from torch.utils.data import get_worker_info

from torchcache import owner as owners
from torchcache.errors import CacheBypassWarning, RandomSampleError, StoreError, StoreUnavailableError
from torchcache.flatten import Flat, Leaf, Spec, detach_leaves, flatten, flatten_many, gather_flat
from torchcache.folder import OWNERS
from torchcache.guard import RandomnessGuard
from torchcache.owner import Owner
from torchcache.packing import pack
from torchcache.reader import Reader
from torchcache.store import Counters, LogEntry, Store

CLAIM_TIMEOUT_S = 60.0  # a live owner that publishes nothing for so long is taken to be stopped
FLUSH_AFTER_S = 0.1  # single samples wait at most so long for others to share their block
FLUSH_SAMPLES, FLUSH_BYTES = 256, 8 << 20  # or until there are so many
DISK_RESERVE = 0.05  # share of the disk that is left free
LOOK_EVERY_BYTES = 1 << 20  # of growth of the store: how often to look at the disk
POLL_FIRST_S, POLL_LAST_S = 0.000_2, 0.02  # how often a waiting process looks at the log
PROBE_AFTER_S, PROBE_EVERY_S = 0.005, 0.2  # when it first asks whether the owner lives, and how often

logger = logging.getLogger("torchcache")

_fillers: weakref.WeakSet[Filler] = weakref.WeakSet()


class Filler:
    """Brings samples from a source into a store, together with any number of other processes.

    Args:
        store: where to.
        reader: what this process knows of the store; kept up to date.
        dataset: the source.
        guard: watches the source for random draws.
        max_bytes: stop admitting when the store is this large; ``None``: no limit but the disk's reserve.
    """

    def __init__(
        self,
        store: Store,
        reader: Reader,
        dataset: Any,
        *,
        guard: RandomnessGuard,
        max_bytes: int | None = None,
    ) -> None:
        self._store = store
        self._reader = reader
        self._dataset = dataset
        self._guard = guard
        self._max_bytes = max_bytes
        self._owners = store.path / OWNERS
        self._lock = threading.RLock()
        self._buffer: dict[int, tuple[Spec, list[Leaf]]] = {}
        self._buffer_bytes = 0
        self._flusher: _Flusher | None = None
        self._owner: Owner | None = None
        self._last_seen: dict[bytes, float] = {}  # when an owner last published, as far as we know
        self._uncounted = Counters()  # reads whose samples were not published
        self._buffer_reads = Counters()  # reads whose samples wait in the buffer
        self._next_look = 0  # size of the store at which to look again how full the disk is
        self._refused = ""  # why nothing more is admitted
        self._unsaid = ""  # the warning about it, if the caller's thread has not given it yet
        _fillers.add(self)

    @property
    def admitting(self) -> bool:
        return not self._refused and self._store.writable

    # -- reading through the source ----------------------------------------------------------------------

    def fetch(self, wanted: Sequence[int], *, buffered: bool = False, wait: bool = True) -> dict[int, Any]:
        """Gets samples into the store, or at least from the source.

        Args:
            wanted: the indices, each once.
            buffered: publish later, together with others (single samples), instead of at once.
            wait: wait for what others have claimed; otherwise leave it.

        Returns:
            The samples that were read here, as the source gave them. With ``wait``, all others are in the store, and
            the reader knows them.

        Raises:
            Whatever the source raises; the samples read before are kept.
        """
        samples: dict[int, Any] = {}
        waiting = _Waiting(self)
        while True:
            self._say()
            remaining = self._reader.missing([i for i in wanted if i not in samples])
            if not remaining:
                return samples
            if not self._store.writable and not self._refused:
                self._refuse(StoreUnavailableError("it may only be read"))
                continue
            if not self.admitting:
                samples.update(self._bypass(remaining))
                return samples
            granted: list[int] = []
            try:
                known_until = self._store.last_transaction()
                granted, held = self._claim(remaining, waiting.usurped)
                if held and not granted:
                    if not wait:
                        return samples
                    self.flush()
                    waiting.wait(set(held.values()), known_until)
            except StoreError as error:
                self._refuse(error)
            if granted:
                samples.update(self._fill(granted, buffered))
                if len(samples) == len(wanted):
                    return samples

    def refresh(self) -> None:
        """Learns of everything that has been published."""
        with self._store.lock:
            self._learn(self._store.entries(self._reader.sequence))

    def _claim(self, wanted: Sequence[int], usurped: frozenset[bytes]) -> tuple[list[int], dict[int, bytes]]:
        if self._buffer and any(index in self._buffer for index in wanted):
            self.flush()

        def missing(entries: list[LogEntry]) -> list[int]:
            self._learn(entries)
            return self._reader.missing(wanted)

        claim = self._store.claim(self._own().id, self._reader.sequence, missing, usurped)
        return claim.granted, claim.held

    def _learn(self, entries: list[LogEntry]) -> None:
        with self._store.lock:
            self._reader.apply(entries)
        now = time.monotonic()
        for entry in entries:
            self._last_seen[entry.owner] = now

    def _bypass(self, indices: Sequence[int]) -> dict[int, Any]:
        samples, seconds, error = self._read(indices)
        with self._lock:
            self._uncounted += Counters(source_reads=len(samples), source_seconds=seconds)
        if error is not None:
            raise error
        return samples

    def _fill(self, indices: list[int], buffered: bool) -> dict[int, Any]:
        """Reads what we have claimed, and publishes it; gives back what could not be read."""
        kept = False
        samples: dict[int, Any] = {}
        try:
            samples, seconds, error = self._read(indices)
            reads = Counters(source_reads=len(samples), source_seconds=seconds)
            if buffered:
                self._put_off(samples, reads)
            else:
                self._publish(flatten_many(list(samples), list(samples.values())), reads)
            kept = True
        finally:
            self._release([i for i in indices if not kept or i not in samples])
        if error is not None:
            raise error
        return samples

    def _read(self, indices: Sequence[int]) -> tuple[dict[int, Any], float, BaseException | None]:
        """Reads from the source until it raises; returns the samples, the seconds, and the error."""
        samples: dict[int, Any] = {}
        batched = getattr(self._dataset, "__getitems__", None)
        start = time.perf_counter()
        try:
            with self._guard.watch(self._dataset, len(indices)):
                if batched and len(indices) > 1:
                    found = list(batched(list(indices)))
                    if len(found) != len(indices):
                        raise ValueError(f"__getitems__ was asked for {len(indices)} samples and gave {len(found)}")
                    samples = dict(zip(indices, found, strict=True))
                else:
                    for index in indices:
                        samples[index] = self._dataset[index]
        except BaseException as error:  # whatever it is, it is raised again once the claims are in order
            if not isinstance(error, Exception) or isinstance(error, RandomSampleError):
                samples = {}
            return samples, time.perf_counter() - start, error
        return samples, time.perf_counter() - start, None

    # -- publishing --------------------------------------------------------------------------------------

    def _publish(self, samples: list[Flat], reads: Counters) -> None:
        """Appends samples to the store. If that is not possible, says so once, and nothing more is admitted.

        In the caller's thread: a thread of its own was tried, and made the epoch that fills slower (docs/fill.md).
        """
        try:
            while any(flat.indices for flat in samples):
                prepared = pack(samples, self._store)
                entries, totals = self._store.publish(
                    self._own().id, self._reader.sequence, prepared, reads + self._uncounted, self._admits
                )
                if totals is not None:
                    self._uncounted = Counters()
                    self._seal_if_complete(totals)
                    return
                self._learn(entries)
                if self._refused:
                    raise StoreUnavailableError(self._refused)
                before = sum(len(flat.indices) for flat in samples)
                samples = [self._unpublished(flat) for flat in samples]
                reads += Counters(duplicate_reads=before - sum(len(flat.indices) for flat in samples))
            self._uncounted += reads
        except (StoreError, OSError) as error:
            self._uncounted += reads
            self._refuse(error)

    def _unpublished(self, samples: Flat) -> Flat:
        left = set(self._reader.missing(samples.indices))
        self._release([index for index in samples.indices if index not in left])
        return samples.rows([row for row, index in enumerate(samples.indices) if index in left])

    def _admits(self, nbytes: int) -> bool:
        if self._max_bytes is not None and nbytes > self._max_bytes:
            self._refused = f"max_bytes={self._max_bytes} is reached"
        if nbytes >= self._next_look:
            self._next_look = nbytes + LOOK_EVERY_BYTES
            disk = shutil.disk_usage(self._store.path)
            if disk.free < DISK_RESERVE * disk.total:
                self._refused = f"less than {DISK_RESERVE:.0%} of the disk is free"
        return not self._refused

    def _refuse(self, error: BaseException) -> None:
        """Admits nothing more, and says so once, with the cause and the remedy."""
        self._refused = str(error)
        self._disown()
        cached = f"{self._reader.count} of {self._store.identity.length} samples are cached"
        self._unsaid = (
            f"{self._store.path} takes no more samples: {error}. {cached}; the others are read from the source "
            f"each epoch. Give the cache more room, or put it elsewhere with CACHE_DIR or cache_dir="
        )

    def _say(self) -> None:
        """Gives the warning in the caller's thread, where it can be caught or made an error."""
        if self._unsaid:
            message, self._unsaid = self._unsaid, ""
            warnings.warn(message, CacheBypassWarning, stacklevel=2)

    def _seal_if_complete(self, totals: Counters) -> None:
        if totals.samples >= self._store.identity.length:
            self.refresh()
            self.seal()

    def seal(self) -> None:
        """Seals the store if it is complete. A store that cannot be sealed serves all the same."""
        if not (self._reader.complete and self._reader.count and self._store.seal is None and self._store.writable):
            return
        try:
            seal = self._store.write_seal(self._reader.pack_index())
        except StoreError as error:
            logger.info("%s is complete and stays unsealed: %s", self._store.path, error)
            return
        self._reader.load_index(seal)
        owners.sweep(self._owners)
        totals = self._store.counters()
        logger.info(
            "%s is complete: %d samples, %d bytes, %d source reads, %.1f s in the source",
            self._store.path, totals.samples, totals.nbytes, totals.source_reads, totals.source_seconds,
        )  # fmt: skip

    # -- single samples ----------------------------------------------------------------------------------

    def _put_off(self, samples: Mapping[int, Any], reads: Counters) -> None:
        """Keeps samples for a block that they will share with others."""
        flat = {index: flatten(sample) for index, sample in samples.items()}
        with self._lock:
            for index, (spec, leaves) in flat.items():
                self._buffer[index] = (spec, detach_leaves(leaves))
                self._buffer_bytes += sum(len(data) for _, data in leaves)
            self._buffer_reads += reads
            if len(self._buffer) >= FLUSH_SAMPLES or self._buffer_bytes >= FLUSH_BYTES:
                self.flush()
            elif self._flusher is None:
                self._flusher = _Flusher(self)

    def flush(self) -> None:
        """Publishes what waits for company."""
        with self._lock:
            if self._buffer:
                self._publish(gather_flat(self._buffer), self._buffer_reads)
            self._buffer, self._buffer_bytes, self._buffer_reads = {}, 0, Counters()

    def _stop_flusher(self) -> None:
        if self._flusher is not None:
            self._flusher.stop()
            self._flusher = None

    # -- the owner ---------------------------------------------------------------------------------------

    def _own(self) -> Owner:
        with self._lock:
            if self._owner is None:
                owners.sweep(self._owners)
                self._owner = Owner(self._owners)
                # Runs at the end of a DataLoader worker too, which ends without atexit.
                Finalize(self, _close, args=(weakref.ref(self),), exitpriority=100)
            return self._owner

    def is_alive(self, owner: bytes) -> bool:
        if owners.is_alive(self._owners, owner):
            return True
        self._store.disown([owner])
        return False

    def _release(self, indices: Sequence[int]) -> None:
        if indices and self._owner is not None:
            try:
                self._store.release(self._owner.id, indices)
            except StoreError:
                self._disown()  # a dead owner's claims count no more

    def _disown(self) -> None:
        with self._lock:
            if self._owner is not None:
                self._owner.release()
                self._owner = None

    def close(self) -> None:
        """Publishes what waits, and gives up every claim."""
        with self._lock:
            self.flush()
            self._stop_flusher()
            if self._uncounted.source_reads and self._store.writable and self._store.seal is None:
                self._count()
            self._disown()
            if self._reader.complete and get_worker_info() is None:  # a worker's end is waited for
                self._sync()
        self._say()

    def _count(self) -> None:
        try:
            self._store.count(self._uncounted)
            self._uncounted = Counters()
        except StoreError as error:
            logger.info("%s: %s; some reads are not in the store's totals", self._store.path, error)

    def _sync(self) -> None:
        try:
            self._store.sync()
        except StoreError as error:
            logger.info("%s: %s; it is checked again if the machine is restarted", self._store.path, error)

    # -- forks -------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        self._lock.acquire()
        self.flush()
        self._stop_flusher()

    def after_fork(self, in_child: bool) -> None:
        if in_child:
            self._owner = None  # the parent's; filelock has closed the child's copy of its descriptor
            self._uncounted = Counters()
        self._lock.release()


class _Waiting:
    """Waits for what others have claimed, for one call of ``fetch``."""

    def __init__(self, filler: Filler) -> None:
        self.usurped: frozenset[bytes] = frozenset()
        self._filler = filler
        self._pause = POLL_FIRST_S
        self._started = time.monotonic()
        self._next_probe = self._started + PROBE_AFTER_S

    def wait(self, holders: set[bytes], known_until: int) -> None:
        """Waits until the log has grown, or one of the owners has been found dead or stopped.

        Args:
            holders: the owners.
            known_until: the number of the last transaction before it was seen that they hold what we want.
        """
        while self._filler._store.last_transaction() == known_until:
            time.sleep(self._pause)
            self._pause = min(2 * self._pause, POLL_LAST_S)
            if time.monotonic() >= self._next_probe:
                gone = {owner for owner in holders if self._is_gone(owner)}
                self._next_probe = time.monotonic() + PROBE_EVERY_S
                if gone:
                    self.usurped |= gone
                    return

    def _is_gone(self, owner: bytes) -> bool:
        seen = max(self._started, self._filler._last_seen.get(owner, 0.0))
        return time.monotonic() - seen > CLAIM_TIMEOUT_S or not self._filler.is_alive(owner)


class _Flusher:
    """A thread that publishes the single samples of the last 100 ms, and ends. It is stopped before a fork."""

    def __init__(self, filler: Filler) -> None:
        self._filler = filler  # not a weak reference: what waits is published even if the dataset is dropped
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchcache-flush", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(FLUSH_AFTER_S):
            # Not while a fork or a close holds the lock and waits for this thread.
            if self._filler._lock.acquire(blocking=False):
                try:
                    self._filler._flusher = None
                    self._filler.flush()
                    return
                finally:
                    self._filler._lock.release()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _close(reference: weakref.ref[Filler]) -> None:
    filler = reference()
    if filler is not None:
        filler.close()


_forking: list[Filler] = []  # locked between the two fork hooks


def _before_fork() -> None:
    _forking.extend(_fillers)
    for filler in _forking:
        filler.before_fork()


def _after_fork(in_child: bool) -> None:
    while _forking:
        _forking.pop().after_fork(in_child)


# Hooks run in reverse order before a fork: these, which still write, before those of ``store``.
os.register_at_fork(
    before=_before_fork,
    after_in_parent=lambda: _after_fork(False),
    after_in_child=lambda: _after_fork(True),
)
