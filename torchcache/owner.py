"""Owners: which process holds a claim, and whether it still lives.

An owner is a process that fills. It holds a lock on ``owners/<id>.lock``, which the kernel releases when the process
dies, however it dies: that the lock can be had is the proof of death. No heartbeat, no process number, no clock:
nothing that a container's namespace, a stopped process or a changed time could confuse.
"""

from __future__ import annotations

import os
from pathlib import Path

import filelock

from torchcache.errors import StoreUnavailableError

ID_BYTES = 16


class Owner:
    """The lock of this process. Made in the process that fills, after any fork."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(exist_ok=True)
            while not self._is_locked(folder):
                pass
        except (OSError, NotImplementedError) as error:
            raise StoreUnavailableError(f"{folder}: no lock can be had here ({error})") from error

    def _is_locked(self, folder: Path) -> bool:
        """Locks a new file; not if a sweep took it for a dead owner's, between its creation and its locking."""
        self.id = os.urandom(ID_BYTES)
        self._lock = _file_lock(folder, self.id)
        try:
            self._lock.acquire(blocking=False)
        except filelock.Timeout:
            return False
        if os.path.exists(self._lock.lock_file):
            return True
        self._lock.release()
        return False

    def release(self) -> None:
        """Gives the lock up; claims that still carry this owner's id count as a dead owner's from now on."""
        if self._lock.is_locked:
            Path(self._lock.lock_file).unlink(missing_ok=True)
            self._lock.release()


def is_alive(folder: Path, owner: bytes) -> bool:
    """Whether the owner still holds its lock; the lock file of a dead one is removed."""
    lock = _file_lock(folder, owner)
    if not os.path.exists(lock.lock_file):
        return False
    try:
        lock.acquire(blocking=False)
    except (filelock.Timeout, PermissionError):  # of another user, who keeps it to himself: time will tell
        return True
    Path(lock.lock_file).unlink(missing_ok=True)
    lock.release()
    return False


def sweep(folder: Path) -> int:
    """Removes the lock files of dead owners, and returns how many there were."""
    return sum(not is_alive(folder, owner) for owner in _ids(folder))


def any_alive(folder: Path) -> bool:
    """Whether anybody fills the store just now."""
    return any(is_alive(folder, owner) for owner in _ids(folder))


def count_alive(folder: Path) -> int:
    """How many processes fill the store just now."""
    return sum(is_alive(folder, owner) for owner in _ids(folder))


def _ids(folder: Path) -> list[bytes]:
    return [bytes.fromhex(file.stem) for file in folder.glob("[0-9a-f]" * 2 * ID_BYTES + ".lock")]


def _file_lock(folder: Path, owner: bytes) -> filelock.FileLock:
    # A soft lock would outlive its process, and a lock per thread is not what a process's life is.
    return filelock.FileLock(folder / f"{owner.hex()}.lock", fallback_to_soft=False, thread_local=False)
