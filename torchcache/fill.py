"""The fill: claim, read, publish, wait.

docs/fill.md is the specification. In short: a sample that is not cached is claimed, read from the source and
published soon after in a block with others; what somebody else has claimed is waited for. Everything of ours is
published before we wait, so that two processes cannot wait for each other. A dead owner's claims are taken over at
once, a stopped one's after ``claim_timeout_s``. When the store cannot take more, the fill stops admitting and samples
come from the source.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Sequence
from multiprocessing.util import Finalize
from typing import Any, Literal, NamedTuple

from torch.utils.data import get_worker_info

from torchcache import owner as owners
from torchcache.admission import Admission
from torchcache.buffer import LATEST_S, Buffer, Flusher
from torchcache.errors import StoreError, StoreUnavailableError, UnsupportedSampleError
from torchcache.flatten import Flat, flatten_many
from torchcache.folder import OWNERS
from torchcache.owner import Owner
from torchcache.packing import LARGEST_SAMPLE_BYTES, pack, without_oversized
from torchcache.reader import Reader
from torchcache.records import Claim, Counters, LogEntry, Seal
from torchcache.section import Section
from torchcache.source import Source
from torchcache.store import Store
from torchcache.waiting import Activity, Waiting

CLAIM_TIMEOUT_S = 60.0  # by default; reading and publishing a batch takes less
MOST_CLAIMS_KEPT = 4096  # before those are dropped that count no more; else that is when we have none
# After multiprocessing has removed its temporary files (-100): a main process that was interrupted waits for no worker.
AT_EXIT = -200

logger = logging.getLogger("torchcache")

_fillers: weakref.WeakValueDictionary[int, Filler] = weakref.WeakValueDictionary()


class Fetched(NamedTuple):
    """What ``Filler.fetch`` has read from the source.

    Attributes:
        samples: as the source gave them.
        flat: all of them together, taken apart, if they were read at once and are of one structure. The caller's.
    """

    samples: dict[int, Any]
    flat: Flat | None = None


class Filler:
    """Brings samples from a source into a store, together with any number of other processes.

    Args:
        store: where to.
        reader: what this process knows of the store; kept up to date.
        source: the dataset.
        max_bytes: stop admitting when the store is this large; ``None``: no limit but the disk's reserve.
        on_unsupported: what becomes of a sample that cannot be stored: ``"error"``, or ``"bypass"`` to serve it.
        claim_timeout_s: a live owner that publishes nothing for so long is taken to be stopped.
    """

    def __init__(
        self,
        store: Store,
        reader: Reader,
        source: Source,
        *,
        max_bytes: int | None = None,
        on_unsupported: Literal["error", "bypass"] = "error",
        claim_timeout_s: float = CLAIM_TIMEOUT_S,
    ) -> None:
        self.source = source
        self._store = store
        self._reader = reader
        self._admission = Admission(store.path, max_bytes)
        self._on_unsupported = on_unsupported
        self.claim_timeout_s = claim_timeout_s
        store.lock_timeout_s = min(store.lock_timeout_s, claim_timeout_s)
        self._owners = store.path / OWNERS
        self._lock = Section()
        self._buffer = Buffer()
        self._flusher: Flusher | None = None
        self._owner: Owner | None = None
        # What each call of ``fetch`` has claimed and is reading. Weak: it may be interrupted at any moment.
        self._reading: weakref.WeakKeyDictionary[Waiting, list[int]] = weakref.WeakKeyDictionary()
        self._activity = Activity()
        self._uncounted = Counters()  # reads whose samples were not published
        self._unsealable = False
        self._closed = False
        _fillers[id(self)] = self

    @property
    def admitting(self) -> bool:
        return not self._admission.refused and not self._store.read_only

    def fetch(self, wanted: Sequence[int], *, wait: bool = True) -> Fetched:
        """Gets samples into the store, or at least from the source.

        Args:
            wanted: the indices, each once.
            wait: wait for what others have claimed; otherwise leave it.

        Returns:
            The samples that were read here. With ``wait``, all others are in the store, and the reader knows them.

        Raises:
            Whatever the source raises; the samples read before are kept.
        """
        samples: dict[int, Any] = {}
        waiting = Waiting(self._store, self._activity, self.claim_timeout_s)
        while True:
            self._admission.say()
            # Of a whole batch in the epoch that fills, the claim finds out what is missing.
            fresh = not samples and len(wanted) and not self._reader.holds(wanted[0])
            remaining = wanted if fresh else self._reader.missing([i for i in wanted if i not in samples])
            if not remaining:
                return Fetched(samples)
            if self._store.read_only and not self._admission.refused:
                self._refuse(StoreUnavailableError(self._store.read_only))
                continue
            if not self.admitting:
                samples.update(self._bypass(self._reader.missing(remaining)))
                return Fetched(samples)
            interrupted = self._interrupted(waiting).intersection(remaining) if self._reading else ()
            if interrupted:  # it would wait for itself
                samples.update(self._bypass(list(interrupted)))
                continue
            fetched = self._fetch_some(remaining, waiting, wait)
            if fetched is None:
                return Fetched(samples)
            if len(fetched.samples) == len(wanted):
                return fetched
            samples.update(fetched.samples)

    def _interrupted(self, call: Waiting) -> set[int]:
        """What this very thread is reading, in a call that is interrupted by this one: of a signal's handler, say."""
        with self._lock:
            calls = self._reading.items()
            return {i for other, claimed in calls if other is not call and other.thread == call.thread for i in claimed}

    def _fetch_some(self, wanted: Sequence[int], waiting: Waiting, wait: bool) -> Fetched | None:
        """Claims and reads what nobody has claimed; if that is nothing, waits a while (``None``: shall not wait)."""
        try:
            try:
                claim = self._claim(wanted, waiting)
                if claim.held and not claim.granted:
                    if not wait:
                        return None
                    self.flush()
                    self._flush_neighbours()
                    waiting.wait(set(claim.held.values()), claim.transaction)
            except StoreError as error:
                self._refuse(error)
                return Fetched({})
            return self._fill(claim.granted, waiting) if claim.granted else Fetched({})
        finally:
            self._reading.pop(waiting, None)

    def _flush_neighbours(self) -> None:
        """Publishes what other datasets of this process have for the same store, which this thread may be using too."""
        for reference in _fillers.valuerefs():
            filler = reference()
            if filler is not None and filler is not self and filler._store is self._store:
                filler.flush()

    def refresh(self) -> None:
        """Learns of everything that has been published."""
        with self._store.lock:
            self._learn(self._store.entries(self._reader.sequence))

    def _claim(self, wanted: Sequence[int], call: Waiting) -> Claim:
        def missing(entries: list[LogEntry]) -> list[int]:
            self._learn(entries)
            return self._reader.missing(wanted)

        with self._lock:
            if not self._buffer.indices.isdisjoint(wanted):
                self.flush()
            owner = self._owner or self._own()
            if not self._buffer.indices and not self._reading:
                owner.keep(())  # the others are published, or of a call that was interrupted
            elif owner.count > MOST_CLAIMS_KEPT:
                owner.keep(self._busy())
            elsewhere: frozenset[int] = frozenset()
            if self._reading:
                elsewhere = elsewhere.union(*self._reading.values())
            claim = self._store.claim(
                owner, self._reader.sequence, missing, busy=elsewhere, usurped=self._activity.stopped
            )
            self._reading[call] = claim.granted
        return claim

    def _busy(self) -> set[int]:
        """What we have claimed and not published."""
        return self._buffer.indices.union(*self._reading.values())

    def _learn(self, entries: list[LogEntry]) -> None:
        if not entries:
            return
        with self._store.lock:
            self._reader.apply(entries)
        self._activity.note(entry.owner for entry in entries)

    def _bypass(self, indices: Sequence[int]) -> dict[int, Any]:
        read = self.source.read(indices)
        self.note(Counters(source_reads=read.reads, source_seconds=read.seconds))
        if read.error is not None:
            raise read.error
        return read.samples

    def _fill(self, indices: list[int], call: Waiting) -> Fetched:
        """Reads what we have claimed, and keeps it to be published; gives back what could not be read or kept."""
        kept: list[int] = []
        try:
            read = self.source.read(indices)
            flats, unsupported = _take_apart(read.samples, self._store.identity.allow_pickle)
            reads = Counters(source_reads=read.reads, source_seconds=read.seconds)
            count = sum(len(flat.indices) for flat in flats)
            flats = [left for flat in flats if (left := without_oversized(flat)).indices]
            self._keep(flats, reads)
            kept = [index for flat in flats for index in flat.indices]
        finally:
            if len(kept) < len(indices):
                self._release(kept, call)
        if read.error is not None:
            raise read.error
        if unsupported is not None:
            if self._on_unsupported == "error":
                raise unsupported
            self._admission.say_uncached(f"{unsupported} (on_unsupported='bypass')")
        if len(kept) < count:
            reason = f"{self._store.path} takes no sample of more than {LARGEST_SAMPLE_BYTES:,} bytes"
            self._admission.say_uncached(reason)
        whole = len(flats) == 1 and len(kept) == len(indices)
        return Fetched(read.samples, flats[0] if whole else None)

    def _publish(self, samples: list[Flat], reads: Counters) -> None:
        """Appends samples to the store. If that is not possible, says so once, and nothing more is admitted.

        In the thread that reads: one of its own was tried, and made the epoch that fills slower (docs/fill.md).
        """
        try:
            while any(flat.indices for flat in samples):
                prepared = pack(samples, self._store)
                entries, totals = self._store.publish(
                    self._own().id, self._reader.sequence, prepared, reads + self._uncounted, self._admission.admits
                )
                if totals is not None:
                    self._uncounted = Counters()
                    self._seal_if_complete(totals)
                    return
                self._learn(entries)
                if self._admission.refused:
                    raise StoreUnavailableError(self._admission.refused)
                before = sum(len(flat.indices) for flat in samples)
                samples = [self._unpublished(flat) for flat in samples]
                reads += Counters(duplicate_reads=before - sum(len(flat.indices) for flat in samples))
            self._uncounted += reads
        except (StoreError, OSError) as error:
            self._uncounted += reads
            self._refuse(error)

    def _unpublished(self, samples: Flat) -> Flat:
        left = set(self._reader.missing(samples.indices))
        return samples.rows([row for row, index in enumerate(samples.indices) if index in left])

    def _refuse(self, error: BaseException) -> None:
        """Admits nothing more, and gives up what we have claimed."""
        self._admission.refuse(error, f"{self._reader.count} of {self._store.identity.length} samples are cached")
        self._disown()

    def _seal_if_complete(self, totals: Counters) -> None:
        if totals.samples >= self._store.identity.length:
            self.refresh()
            self.seal()

    def sealed(self) -> Seal | None:
        """The seal of a complete store, whoever has set it; ``None`` if it has none."""
        if self._store.seal is None:
            self.seal()
        return self._store.seal

    def seal(self) -> None:
        """Seals the store if it is complete. A store that cannot be sealed serves all the same."""
        if self._store.seal is not None or not (self._reader.complete and self._reader.count):
            return
        if self._store.read_only or self._unsealable:
            return
        try:
            seal = self._store.read_seal() or self._store.write_seal(self._reader.pack_index())
        except StoreError as error:
            self._unsealable = True
            logger.info("%s is complete and stays unsealed: %s", self._store.path, error)
            return
        self._reader.load_index(seal)
        self._disown()
        owners.sweep(self._owners)
        totals = self._store.counters()
        self._store.close()  # a sealed store needs no handle
        logger.info(
            "%s is complete: %d samples, %d bytes, %d source reads, %.1f s in the source",
            self._store.path, totals.samples, totals.nbytes, totals.source_reads, totals.source_seconds,
        )  # fmt: skip

    def _keep(self, samples: list[Flat], reads: Counters) -> None:
        """Publishes samples, or keeps copies for a block that they will share with others."""
        with self._lock:
            if not samples:
                self.note(reads)
                return
            try:
                self._buffer.add(samples, reads)
                last = self._reader.count + len(self._buffer.indices) >= self._store.identity.length
                ripe = last or self._closed or self._buffer.is_ripe
                if not ripe:
                    self._buffer.settle()
            except BaseException:  # no memory, say: what is half added is not published
                self._buffer = Buffer()
                raise
            if ripe or not self._flushes_later():
                self.flush()

    def flush(self) -> None:
        """Publishes what waits."""
        with self._lock:
            buffer, self._buffer = self._buffer, Buffer()
            if buffer.samples:
                self._publish(buffer.samples, buffer.reads)

    def _flushes_later(self) -> bool:
        """Has a thread see to it that what waits is published in time; whether there can be one."""
        if self._flusher is None:
            try:
                self._flusher = Flusher(self._lock, self._flush_old)
            except RuntimeError as error:  # as many threads as the system allows
                logger.info("%s: %s; each sample is published at once", self._store.path, error)
                return False
        return True

    def _flush_old(self) -> bool:
        if self._buffer.age >= LATEST_S:
            self.flush()
        elif not self._buffer.samples:
            self._flusher = None
        return self._flusher is not None

    def _stop_flusher(self) -> None:
        if self._flusher is not None:
            self._flusher.stop()
            self._flusher = None

    @property
    def uncounted(self) -> Counters:
        """Reads of this process that are not in the store's totals yet."""
        return self._uncounted

    def note(self, reads: Counters) -> None:
        """Counts reads of the source that bring nothing into the store."""
        with self._lock:
            self._uncounted += reads

    def _own(self) -> Owner:
        with self._lock:
            if self._owner is None:
                owners.sweep(self._owners)
                self._owner = Owner(self._owners)
                self._store.join(self._owner)
                # Runs at the end of a DataLoader worker too, which ends without atexit.
                Finalize(self, _close, args=(weakref.ref(self),), exitpriority=AT_EXIT)
            return self._owner

    def _release(self, kept: list[int], call: Waiting) -> None:
        """Gives back what a call has claimed, but for what it has kept."""
        with self._lock:
            self._reading[call] = kept
            if self._owner is not None:
                try:
                    self._store.release(self._owner, self._busy())
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
            self._closed = True  # what another thread, or who was interrupted, is still reading is published at once
            self.flush()
            self._stop_flusher()
            if self._uncounted.source_reads and not self._store.read_only and self._store.seal is None:
                self._count()
            self._disown()
            if self._reader.complete and get_worker_info() is None:  # a worker's end is waited for
                self._sync()
        self._admission.say()

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

    def before_fork(self) -> None:
        self._lock.acquire()
        _forking.append(self)
        self.flush()
        self._stop_flusher()

    def after_fork(self, in_child: bool) -> None:
        if in_child:
            if self._owner is not None:
                self._owner.forget()
                self._owner = None
            self._uncounted = Counters()
            self._reading.clear()  # by threads that are the parent's
        self._lock.release()


def _take_apart(samples: dict[int, Any], allow_pickle: bool) -> tuple[list[Flat], UnsupportedSampleError | None]:
    """Takes samples apart; of those that cannot be stored, returns the first one's error."""
    try:
        return flatten_many(list(samples), list(samples.values()), allow_pickle=allow_pickle), None
    except UnsupportedSampleError as error:
        if len(samples) == 1:
            return [], error
    each = [_take_apart({index: sample}, allow_pickle) for index, sample in samples.items()]
    return [flat for flats, _ in each for flat in flats], next(error for _, error in each if error is not None)


def _close(reference: weakref.ref[Filler]) -> None:
    filler = reference()
    if filler is not None:
        filler.close()


_forks = Section()  # one thread at a time forks
_forking: list[Filler] = []  # locked between the two fork hooks


def _before_fork() -> None:
    _forks.acquire()
    for reference in _fillers.valuerefs():  # a copy, as other threads add to them
        filler = reference()
        if filler is not None:
            filler.before_fork()


def _after_fork(in_child: bool) -> None:
    while _forking:
        _forking.pop().after_fork(in_child)
    _forks.release_after_fork(in_child)


# Hooks run in reverse order before a fork: these, which still write, before those of ``store``.
os.register_at_fork(
    before=_before_fork,
    after_in_parent=lambda: _after_fork(False),
    after_in_child=lambda: _after_fork(True),
)
