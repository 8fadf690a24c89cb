"""Staleness: comparing some of a store's samples with the source.

A key cannot see files that changed under the same path. So when a job opens a store that was there before it, a few
samples are read from the source once more and compared.

They are compared by the first process of the job that reads, at its first read, and not when the object is made: a
dataset may open its files at its first read, and what is opened before the workers are forked they would share.
"""

from __future__ import annotations

import mmap
import os
import warnings
from typing import Any

import numpy as np
from torch.utils.data import get_worker_info

from torchcache.compare import difference
from torchcache.errors import CacheBypassWarning, RandomSampleError, StaleCacheError, UnsupportedSampleError
from torchcache.reader import Reader
from torchcache.source import Source, UncacheableSourceError


class Duty:
    """How many samples are still to be compared, by one process of a job: forked ones share it, a pickle takes it.

    Args:
        count: how many.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._due = mmap.mmap(-1, 1)  # memory that forked processes share
        self._due[0] = count > 0

    def __getstate__(self) -> int:
        return self.take()

    def __setstate__(self, count: int) -> None:
        self.__init__(count)  # type: ignore[misc]

    def take(self) -> int:
        """How many to compare here; 0 if that is another process's business, or has been done."""
        if not self._due[0]:
            return 0
        self._due[0] = 0
        return self._count

    def give_back(self) -> None:
        """Has it done again: what was found must be found by the next one, too."""
        self._due[0] = 1


def is_first_process() -> bool:
    """Whether this process is the one of the node's that is to compare: the first worker of the first rank."""
    worker = get_worker_info()
    return (worker is None or worker.id == 0) and os.environ.get("LOCAL_RANK", "0") == "0"


def check_samples(count: int, reader: Reader, source: Source, *, length: int, path: os.PathLike[str]) -> int:
    """Compares cached samples, chosen at random, with the source; returns how many were compared.

    Args:
        count: how many to compare.
        reader: knows what is cached.
        source: the dataset.
        length: of the dataset, which may be shorter than the store.
        path: of the store, for messages.

    Raises:
        StaleCacheError: if one differs.
        RandomSampleError: if the source draws random numbers.
        UncacheableSourceError: if it has been changed since it was wrapped.
    """
    missing = reader.all_missing()
    cached = np.setdiff1d(np.arange(length), missing, assume_unique=True) if len(missing) else length
    most = cached if isinstance(cached, int) else len(cached)
    # A generator of its own, seeded by the system: training must draw what it draws without the cache.
    chosen = np.random.default_rng().choice(cached, min(count, most), replace=False)
    for index in sorted(chosen.tolist()):
        read = source.read([index], singly=True)
        if isinstance(read.error, (RandomSampleError, UncacheableSourceError)) or not isinstance(
            read.error, Exception | None
        ):
            raise read.error
        if read.error is not None:
            warnings.warn(
                f"{path} could not be compared with its source: reading sample {index} raised "
                f"{type(read.error).__name__}: {read.error}. What is cached is served; check=0 does not compare",
                CacheBypassWarning,
                stacklevel=2,
            )
            return 0
        schema, values = reader.values(index, True)
        found = _difference(schema.rebuild(values), read.samples[index])
        if found:
            raise StaleCacheError(
                f"{path} is not what its source gives now: of sample {index}, {found}. Remove that folder to cache "
                f"the source as it is now, or give this version another key=. Pass check=0 to serve what is cached, "
                f"or, if the source gives another sample each time, on_random='allow'"
            )
    return len(chosen)


def _difference(cached: Any, source: Any) -> str:
    try:
        return difference(cached, source)
    except UnsupportedSampleError as error:
        return f"what the source gives cannot be cached: {error}"
