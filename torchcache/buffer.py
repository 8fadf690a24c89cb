"""Samples that have been read and wait to be published in one block with others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torchcache.flatten import Flat
from torchcache.leaves import Spec
from torchcache.records import Counters
from torchcache.section import Section

SOON_S = 0.05  # older samples are published together with the next ones
LATEST_S = 0.1  # and at the latest after so long, by a thread, if there are no next ones
# From here on a block is worth its transaction. Blocks of 1.6 MB were no faster: their memory is fetched from the
# system each time.
ENOUGH_SAMPLES, ENOUGH_BYTES = 1024, 512 << 10


class Buffer:
    """The samples.

    Attributes:
        samples: taken apart.
        indices: all of theirs.
        reads: what it took to get them, for the store's totals.
    """

    def __init__(self) -> None:
        self.samples: list[Flat] = []
        self.indices: set[int] = set()
        self.reads = Counters()
        self._settled = 0  # so many of them are the buffer's own
        self._growing: dict[Spec, Flat] = {}  # those that have come one by one, of each structure together
        self._nbytes = 0
        self._since = 0.0

    def add(self, samples: list[Flat], reads: Counters) -> None:
        if not self.samples:
            self._since = time.monotonic()
        self.samples += samples
        self.reads += reads
        for flat in samples:
            self.indices.update(flat.indices)
            self._nbytes += flat.nbytes

    def settle(self) -> None:
        """Copies what was added: its memory is the caller's, who may write to it. Not if it is published at once."""
        added = self.samples[self._settled :]
        del self.samples[self._settled :]
        for flat in map(Flat.detached, added):
            growing = self._growing.get(flat.spec) if len(flat.indices) == 1 else None
            if growing is not None:
                growing.extend(flat)
            else:
                self.samples.append(flat)
                if len(flat.indices) == 1:
                    self._growing[flat.spec] = flat
        self._settled = len(self.samples)

    @property
    def is_ripe(self) -> bool:
        return len(self.indices) >= ENOUGH_SAMPLES or self._nbytes >= ENOUGH_BYTES or self.age >= SOON_S

    @property
    def age(self) -> float:
        """Seconds since the oldest sample came."""
        return time.monotonic() - self._since if self.samples else 0.0


class Flusher:
    """A thread that flushes a buffer in which samples have waited for ``LATEST_S``, and ends when none are left.

    Args:
        lock: held while the buffer is used. The thread never waits for it: who holds it may be about to stop it.
        flush_old: called with the lock held; flushes if need be, and says whether any are left.
    """

    def __init__(self, lock: Section, flush_old: Callable[[], bool]) -> None:
        self._lock = lock
        self._flush_old = flush_old
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchcache-flush", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(LATEST_S):
            if self._lock.acquire(blocking=False):
                try:
                    if not self._flush_old():
                        return
                finally:
                    self._lock.release()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
