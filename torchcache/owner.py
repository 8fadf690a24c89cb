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
import math
import os
import re
import resource
import sys
from array import array
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchcache.descriptors import Descriptor
from torchcache.errors import StoreUnavailableError

ID_BYTES = 16
Claims = np.ndarray[Any, np.dtype[np.int64]]

_SUFFIX = ".lock"
_NAME = re.compile(rf"[0-9a-f]{{{2 * ID_BYTES}}}\.lock")
_COUNT_BYTES = 8
_FIRST_READ_BYTES = 1 << 13  # as many claims as most owners have
# Of one owner. Nobody's batch is larger, and a file that says so takes no more memory.
MOST_CLAIMS = 1 << 20
# Files of others that are kept open, of all stores together, and the share of what a process may have open.
MOST_DESCRIPTORS, DESCRIPTORS_SHARE = 64, 1 / 16
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
        self._file = Descriptor(self._fd)
        self.keep(())
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._fd).st_nlink:
                return True
        except BlockingIOError:
            pass
        self._file.close()
        return False

    def claim(self, indices: Collection[int]) -> None:
        """Claims samples. The caller excludes other processes, and knows that they are nobody's.

        And that the descriptors of this process are what they were: see ``WriterLock.is_open``.
        """
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
        if self._file.close.alive:
            with contextlib.suppress(OSError):  # without its lock it is a dead owner's
                os.unlink(self._path)
            self.forget()

    def forget(self) -> None:
        """In a forked child: lets go of the lock, which stays the parent's."""
        self._file.close()
        self._fd = -1  # the number may be that of another file soon


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


class Others:
    """The owners that there are beside this one, to be asked at each claim what they have claimed.

    Args:
        folder: of the owners.
        length: number of samples; an owner that claims others is not believed.
    """

    def __init__(self, folder: Path, length: int) -> None:
        self._folder = folder
        self._length = length
        self._known: dict[bytes, _Other] = {}
        self._wanted: np.ndarray[Any, np.dtype[np.bool_]] | None = None

    def look(self) -> None:
        """Looks who there is. Those who come later are not known."""
        present = ids(self._folder)
        self._known = {owner: self._known[owner] for owner in present if owner in self._known}
        for owner in present:
            if owner not in self._known:
                self._known[owner] = _Other(_path(self._folder, owner), keeps=True)

    def holders(self, wanted: Sequence[int], ignored: Collection[bytes]) -> dict[int, bytes]:
        """Who has claimed which of the wanted samples."""
        if not wanted:
            return {}
        asked = [(owner, other.claims()) for owner, other in self._known.items() if owner not in ignored]
        if not any(record for _, record in asked):
            return {}
        claimed = np.frombuffer(b"".join([record for _, record in asked]), "<i8")
        if self._wanted is None:
            self._wanted = np.zeros(self._length, np.bool_)
        self._wanted[wanted] = True
        found = np.flatnonzero(self._wanted.take(claimed, mode="clip"))
        self._wanted[wanted] = False
        if not len(found):
            return {}
        ends = np.cumsum([len(record) // 8 for _, record in asked])
        by = [asked[row][0] for row in np.searchsorted(ends, found, "right").tolist()]
        gone = {owner for owner in set(by) if not os.path.exists(_path(self._folder, owner))}
        for owner in gone:  # what is kept open can be read all the same
            del self._known[owner]
        asked_for = set(wanted)  # clipping has made others of absurd numbers
        return {
            index: owner
            for index, owner in zip(claimed[found].tolist(), by, strict=True)
            if index in asked_for and owner not in gone
        }


_kept: set[int] = set()  # descriptors


class _Other:
    """Another owner's file, which is kept open if there are not too many."""

    def __init__(self, path: str, keeps: bool) -> None:
        self._path = path
        self._file: Descriptor | None = None
        if keeps and len(_kept) < min(MOST_DESCRIPTORS, DESCRIPTORS_SHARE * _descriptors()):
            with contextlib.suppress(OSError):
                number = os.open(path, _LOOK)
                _kept.add(number)
                self._file = Descriptor(number, _kept.discard)

    def claims(self) -> bytes:
        """What it has claimed; nothing if the file does not say."""
        try:
            if self._file is not None:
                return _claims(self._file.number)
            fd = os.open(self._path, _LOOK)
            try:
                return _claims(fd)
            finally:
                os.close(fd)
        except OSError:  # gone, no file, or of another user, who keeps it to himself: then samples may be read twice
            return b""


def _descriptors() -> float:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if soft == resource.RLIM_INFINITY else soft


def _claims(fd: int) -> bytes:
    record = os.pread(fd, _FIRST_READ_BYTES, 0)
    end = _COUNT_BYTES + 8 * min(int.from_bytes(record[:_COUNT_BYTES], "little"), MOST_CLAIMS)
    if end > _FIRST_READ_BYTES:
        record = os.pread(fd, end, 0)
    return record[_COUNT_BYTES : min(end, len(record) // 8 * 8)]


def claims(folder: Path, owner: bytes) -> Claims:
    """What an owner has claimed, which counts if it is alive; nothing if its file is gone, or does not say."""
    return np.frombuffer(_Other(_path(folder, owner), keeps=False).claims(), "<i8")


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
    try:
        names = os.listdir(folder)
    except OSError:  # none has begun yet, or nobody may look
        return []
    return [bytes.fromhex(name[: -len(_SUFFIX)]) for name in names if _NAME.fullmatch(name)]


def _path(folder: Path, owner: bytes) -> str:
    return os.path.join(folder, owner.hex() + _SUFFIX)
