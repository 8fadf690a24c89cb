"""How many samples a store has served instead of the source, day by day: a small file beside it, for people to look at.

Written when a process ends or closes the dataset, never during an epoch. Nothing depends on it: where it cannot be
written, or is not what it should be, the numbers are lost and no more. docs/format.md is the specification.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from torchcache.folder import USAGE_FILE, locked

MOST_DAYS = 90  # older ones are added up
EARLIER = -1  # in the place of a day: all that are older

_RECORD = struct.Struct("<qq")  # day, samples
_DAY_S = 86_400

logger = logging.getLogger("torchcache")


@dataclass
class Served:
    """Where the samples came from that a process has served.

    Attributes:
        hits: from the store.
        misses: from the source.
        recorded: of the hits those that are in the file.
    """

    hits: int = 0
    misses: int = 0
    recorded: int = 0


@dataclass(frozen=True)
class Usage:
    """What the file says.

    Attributes:
        days: samples served from the store, by day since 1970-01-01 (UTC), in ascending order; ``EARLIER`` for all
            older ones.
    """

    days: dict[int, int]

    @property
    def total(self) -> int:
        return sum(self.days.values())


def read(path: Path) -> Usage:
    """What was recorded of the store in a folder; nothing where there is no such file, or another."""
    try:
        descriptor = _open(path, os.O_RDONLY)
        try:
            days = _parsed(_content(descriptor))
        finally:
            os.close(descriptor)
    except OSError:
        days = {}
    return Usage(days)


def record(served: Served, path: Path) -> None:
    """Adds the hits that are not recorded yet to today's, if that can be."""
    hits = served.hits - served.recorded
    if hits <= 0:
        return
    try:
        descriptor = _open(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:  # removed, or only read here
        logger.debug("%s: %d hits are not recorded: %s", path, hits, error)
        return
    try:
        if locked(descriptor, fcntl.LOCK_EX):
            _add(descriptor, hits, int(time.time() // _DAY_S))
            served.recorded += hits
        else:
            logger.debug("%s: %d hits are not recorded: the file cannot be locked", path, hits)
    except OSError as error:
        logger.debug("%s: %d hits are not recorded: %s", path, hits, error)
    finally:
        os.close(descriptor)


def _open(path: Path, flags: int) -> int:
    """The file, open, if it is one: who opens a pipe waits for its other end, and a device has no end."""
    descriptor = os.open(path / USAGE_FILE, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path / USAGE_FILE))
    return descriptor


def _content(descriptor: int) -> bytes:
    """What it holds; of one that is too long, as much as shows that."""
    return os.pread(descriptor, _most_bytes() + 1, 0)


def _add(descriptor: int, hits: int, today: int) -> None:
    data = _content(descriptor)
    days = _parsed(data)
    if data and not days:
        logger.debug("the file of hits is not what it should be, and is begun anew")
    days[today] = days.get(today, 0) + hits
    kept = sorted(day for day in days if day != EARLIER)[-MOST_DAYS:]
    earlier = sum(count for day, count in days.items() if day not in kept)
    records = [(EARLIER, earlier)] * (earlier > 0) + [(day, days[day]) for day in kept]
    data = b"".join([_RECORD.pack(day, min(count, (1 << 63) - 1)) for day, count in records])
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))


def _parsed(data: bytes) -> dict[int, int]:
    if len(data) > _most_bytes() or len(data) % _RECORD.size:
        return {}
    records = list(_RECORD.iter_unpack(data))
    days = [day for day, _ in records]
    if days != sorted(set(days)) or any(day < EARLIER for day in days) or any(count < 0 for _, count in records):
        return {}
    return dict(records)


def _most_bytes() -> int:
    return (MOST_DAYS + 1) * _RECORD.size
