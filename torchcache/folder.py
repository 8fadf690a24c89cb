"""The folder of a store: creating, excluding, setting aside, destroying."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import filelock

from torchcache.environment import DATA_FILE, LMDB_LOCK_FILE, WRITER_FILE
from torchcache.errors import NotAStoreError, StoreUnavailableError

GUARD_FILE, OWNERS, USAGE_FILE = "store.lock", "owners", "usage"
FILES = (DATA_FILE, WRITER_FILE, LMDB_LOCK_FILE, GUARD_FILE, USAGE_FILE)
GUARD_TIMEOUT_S = 60.0  # creating, sealing and destroying take milliseconds; longer means a stopped process
# Who asks whether a store is in use has the lock for microseconds, if not held up.
USE_ATTEMPTS, USE_PAUSE_S = 200, 0.001


def make(path: Path) -> None:
    """Makes the folder, unless it is there; refuses one that holds something else.

    Raises:
        NotAStoreError: if the folder holds files that are not a store's, or is a file.
        StoreUnavailableError: if it cannot be made.
    """
    refuse_foreign(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreUnavailableError(f"the folder {path} cannot be made: {error}") from error


def refuse_foreign(path: Path) -> None:
    if not os.path.exists(path):
        return
    if not path.is_dir():
        raise NotAStoreError(f"{path} is a file where a store's folder should be; choose another cache_dir= or name=")
    try:
        foreign = sorted({entry.name for entry in path.iterdir()} - {*FILES, OWNERS})
    except OSError:  # no permission, which is said when it is opened
        return
    if foreign:
        raise NotAStoreError(f"{path} is not a store: it holds {foreign[0]!r}; choose another cache_dir= or name=")


def refuse_strangers(path: Path) -> None:
    """Refuses a store that belongs to another user and to which everybody can write.

    Raises:
        StoreUnavailableError: saying whose it is, and what to do.
    """
    for place in (path, path / DATA_FILE):
        try:
            status = place.stat()
        except OSError:
            continue
        if status.st_uid != os.geteuid() and status.st_mode & stat.S_IWOTH:
            raise StoreUnavailableError(
                f"{place} belongs to another user (uid {status.st_uid}) and everybody can write to it, so that "
                f"anybody may have put any samples there; pass trust=True if you trust them all"
            )


@contextlib.contextmanager
def guard(path: Path) -> Iterator[None]:
    """Excludes other processes while a store is created, sealed or destroyed.

    Raises:
        StoreUnavailableError: if the lock cannot be had.
    """
    lock = filelock.FileLock(path / GUARD_FILE, timeout=GUARD_TIMEOUT_S, fallback_to_soft=False)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise StoreUnavailableError(f"{path / GUARD_FILE} was not to be had for {GUARD_TIMEOUT_S:.0f} s") from error
    except OSError as error:
        raise StoreUnavailableError(f"{path / GUARD_FILE} cannot be locked: {error}") from error
    try:
        yield
    finally:
        lock.release()


def inode(path: Path) -> int:
    """The number of a store's data file, by which a store is told from another that took its place; 0: none."""
    try:
        return (path / DATA_FILE).stat().st_ino
    except OSError:
        return 0


def mark_used(path: Path, descriptor: int) -> None:
    """Says that this process uses a store, for as long as it lives or has the file open, and that it did so now.

    The lock is on the open file, which a memory map and a forked child keep too; the kernel releases it with the last
    of them, however they end. It is for ``in_use`` alone: a store serves as well without it.

    Args:
        path: the store's folder.
        descriptor: its data file, open.
    """
    locked(descriptor, fcntl.LOCK_SH)
    # Not the data file's own times: a look at the store changes them too.
    with contextlib.suppress(OSError):  # only read here
        os.utime(path / GUARD_FILE)


def locked(descriptor: int, operation: int) -> bool:
    """Locks an open file that others lock for microseconds; whether that was possible."""
    for _ in range(USE_ATTEMPTS):
        try:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
                return False  # a file system without locks
            time.sleep(USE_PAUSE_S)
    return False


def last_used(path: Path) -> float:
    """When a process last opened a store to use it, wrote to it, or recorded its hits; seconds since 1970."""
    times = []
    for file in (path / GUARD_FILE, path / DATA_FILE, path / USAGE_FILE):
        with contextlib.suppress(OSError):
            times.append(file.stat().st_mtime)
    return max(times) if times else path.stat().st_mtime


@contextlib.contextmanager
def unused(path: Path) -> Iterator[bool]:
    """Whether no process uses a store, and holds it so for the context. Where it cannot be told, it counts as used."""
    try:
        descriptor = os.open(path / DATA_FILE, os.O_RDONLY)
    except FileNotFoundError:
        yield True
        return
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except OSError:
            free = False
        yield free
    finally:
        os.close(descriptor)


def in_use(path: Path) -> bool:
    """Whether a process has the store open; see ``mark_used``."""
    with unused(path) as free:
        return not free
