"""Owners: which process has claimed what, and whether it still lives.

An owner is a process that fills. It holds a lock on ``owners/<id>.lock``, which the kernel releases when the process
dies, however it dies: that the lock can be had is the proof of death. No heartbeat, no process number, no clock:
nothing that a container's namespace, a stopped process or a changed time could confuse.

In the file it says which samples it has claimed. Nobody else writes there, so that what a death leaves half written is
a dead owner's, and counts no more than the rest of it. The files of others are read, never mapped, and as if anybody
might have written them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
import weakref
from array import array
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from torchcache.errors import StoreUnavailableError

ID_BYTES = 16
Claims = np.ndarray[Any, np.dtype[np.int64]]

_SUFFIX = ".lock"
_COUNT_BYTES = 8
_NO_CLAIMS: Claims = np.empty(0, np.int64)
_FIRST_READ_BYTES = 1 << 13  # as many claims as most owners have
# Of one owner. Nobody's batch is larger, and a file that says so takes no more memory.
MOST_CLAIMS = 1 << 20
# Neither a link to somewhere else nor a pipe that nobody writes to.
_LOOK = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Owner:
    """The lock of this process, and what it has claimed. Made in the process that fills, after any fork."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(exist_ok=True)
            while not self._is_locked(folder):
                pass
        except OSError as error:
            raise StoreUnavailableError(f"{folder}: no lock can be had here ({error})") from error

    def _is_locked(self, folder: Path) -> bool:
        """Locks a new file; not if a sweep took it for a dead owner's, between its creation and its locking."""
        self.id = os.urandom(ID_BYTES)
        self._path = _path(folder, self.id)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._close = weakref.finalize(self, os.close, self._fd)
        self.keep(())
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._fd).st_nlink:
                return True
        except BlockingIOError:
            pass
        self._close()
        return False

    def claim(self, indices: Collection[int]) -> None:
        """Claims samples. The caller excludes other processes, and knows that they are nobody's."""
        self._record.extend(indices)
        self._record[0] = self.count
        record = self._record
        if sys.byteorder == "big":
            record = array("q", record)
            record.byteswap()
        if os.pwrite(self._fd, record, 0) < record.itemsize * len(record):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)

    def keep(self, indices: Collection[int]) -> None:
        """Gives all claims up but these. Others learn of it by the next call of ``claim``."""
        self._record = array("q", (0, *indices))

    @property
    def count(self) -> int:
        """How many claims there are."""
        return len(self._record) - 1

    def release(self) -> None:
        """Gives the lock and every claim up."""
        if self._close.alive:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            self._close()

    def forget(self) -> None:
        """In a forked child: lets go of the lock, which stays the parent's."""
        self._close()


def is_alive(folder: Path, owner: bytes) -> bool:
    """Whether the owner still holds its lock; the lock file of a dead one is removed."""
    path = _path(folder, owner)
    try:
        fd = os.open(path, _LOOK)
    except FileNotFoundError:
        return False
    except OSError:  # of another user, who keeps it to himself: time will tell
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(OSError):  # where nothing can be removed, it stays a dead owner's
            os.unlink(path)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)


def claims(folder: Path, owner: bytes) -> Claims | None:
    """What an owner has claimed, which counts if it is alive; ``None`` if its file is gone.

    Nothing, where the file does not say: then samples may be read twice.
    """
    try:
        fd = os.open(_path(folder, owner), _LOOK)
    except FileNotFoundError:
        return None
    except OSError:
        return _NO_CLAIMS
    try:
        record = os.pread(fd, _FIRST_READ_BYTES, 0)
        count = min(int.from_bytes(record[:_COUNT_BYTES], "little"), MOST_CLAIMS)
        if _COUNT_BYTES + 8 * count > _FIRST_READ_BYTES:
            record = os.pread(fd, _COUNT_BYTES + 8 * count, 0)
    except OSError:  # no file, whatever else
        return _NO_CLAIMS
    finally:
        os.close(fd)
    count = min(count, len(record) // 8 - 1)
    return np.frombuffer(record, "<i8", count, _COUNT_BYTES) if count > 0 else _NO_CLAIMS


def sweep(folder: Path) -> int:
    """Removes the lock files of dead owners, and returns how many there were."""
    return sum(not is_alive(folder, owner) for owner in ids(folder))


def any_alive(folder: Path) -> bool:
    """Whether anybody fills the store just now."""
    return any(is_alive(folder, owner) for owner in ids(folder))


def count_alive(folder: Path) -> int:
    """How many processes fill the store just now."""
    return sum(is_alive(folder, owner) for owner in ids(folder))


def ids(folder: Path) -> list[bytes]:
    """Every owner that has a file, dead or alive."""
    return [bytes.fromhex(file.stem) for file in folder.glob("[0-9a-f]" * 2 * ID_BYTES + _SUFFIX)]


def _path(folder: Path, owner: bytes) -> str:
    return os.path.join(folder, owner.hex() + _SUFFIX)
