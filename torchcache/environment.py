"""Opening LMDB environments, and turning LMDB's errors into ours. The only module that imports ``lmdb``."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb

from torchcache.descriptors import Descriptor
from torchcache.errors import CorruptStoreError, NotAStoreError, StoreError, StoreUnavailableError
from torchcache.section import interrupt

Environment = lmdb.Environment

DATA_FILE, WRITER_FILE = "data.mdb", "writer.lock"
LMDB_LOCK_FILE = "lock.mdb"  # other tools make one
LOCK_TIMEOUT_S = 60.0  # a transaction takes less than a millisecond; who has it so long is stopped
_PAUSE_FIRST_S, _PAUSE_LAST_S = 0.000_02, 0.001
DATABASES = (b"meta", b"schemas", b"blocks", b"ids", b"index")

# Address space to reserve, not memory or disk: the file grows as it is written. Smaller ones are tried in turn where
# a limit on address space (ulimit -v, batch systems) forbids the first.
MAP_SIZES = tuple(1 << bits for bits in (40, 38, 36, 34, 32, 30, 28))

_CORRUPT = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.BadValsizeError, lmdb.BadDbiError, lmdb.IncompatibleError)


class WriterLock:
    """Excludes other processes while one writes.

    LMDB's own lock is a mutex in shared memory of the kind that inherits priorities, for which the kernel looks up the
    holder's thread by its number: across PID namespaces, those of two containers, it fails or waits for ever. A
    ``flock`` knows no numbers, and is released when its holder dies, however it dies.
    """

    def __init__(self, path: Path) -> None:
        file = path / WRITER_FILE
        try:
            try:
                number = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except PermissionError:
                number = os.open(file, os.O_RDONLY | os.O_CLOEXEC)  # another user's: it can be locked all the same
        except OSError as error:
            raise StoreUnavailableError(f"{file} cannot be opened: {error}") from error
        self._path = path
        self._number = number
        self._file = Descriptor(number)
        self.close = self._file.close

    @property
    def is_open(self) -> bool:
        """Whether nothing else has closed its descriptor. To be asked before the lock is acquired."""
        return self._file.is_open

    def acquire(self, timeout_s: float) -> None:
        """Waits for the lock.

        Raises:
            StoreUnavailableError: if it cannot be had in time, or here at all.
            KeyboardInterrupt: if Ctrl-C is pressed meanwhile.
        """
        pause, until = _PAUSE_FIRST_S, time.monotonic() + timeout_s
        while True:
            try:
                return fcntl.flock(self._number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise StoreUnavailableError(
                        f"another process has been writing to {self._path} for {timeout_s:g} s; it may be stopped"
                    ) from None
            except OSError as error:
                raise StoreUnavailableError(f"{self._path / WRITER_FILE} cannot be locked: {error}") from error
            time.sleep(pause)
            interrupt()
            pause = min(2 * pause, _PAUSE_LAST_S)

    def release(self) -> None:
        fcntl.flock(self._number, fcntl.LOCK_UN)


def open_environment(path: Path, readonly: bool = False) -> lmdb.Environment:
    """Opens LMDB's file. Who writes holds the ``WriterLock``, for opening too."""
    data = path / DATA_FILE
    last_error: Exception | None = None
    occupy_standard_descriptors()
    for map_size in MAP_SIZES:
        if os.path.exists(data) and map_size < data.stat().st_size:
            break
        try:
            env = lmdb.open(
                str(path),
                map_size=map_size,
                max_dbs=len(DATABASES),
                readonly=readonly,
                lock=False,
                sync=False,
                metasync=False,
                readahead=False,
                create=False,
                mode=0o666,  # less the umask: a folder may be a group's
            )
        except lmdb.MemoryError as error:
            last_error = error
            continue
        try:
            _check_extent(env, data)
        except BaseException:
            env.close()
            raise
        return env
    raise StoreUnavailableError(f"{data} cannot be mapped: not enough address space (ulimit -v)") from last_error


def occupy_standard_descriptors() -> None:
    """Sees to it that none of 0, 1 and 2 becomes that of LMDB's file, where messages would be written into it."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)


def foreign(path: Path | str) -> NotAStoreError:
    """The error about an LMDB file that is somebody else's."""
    return NotAStoreError(f"{path} holds an LMDB file that torchcache did not write; choose another folder")


def open_databases(env: Environment, txn: Any, create: bool) -> dict[bytes, Any]:
    """The named databases of a store.

    Args:
        env: the environment.
        txn: a transaction of it.
        create: make those that are missing; otherwise the file is left as it is.

    Raises:
        NotAStoreError: if some are missing.
    """
    try:
        return {name: env.open_db(name, txn=txn, create=create) for name in DATABASES}
    except lmdb.NotFoundError as error:
        raise foreign(env.path()) from error


def _check_extent(env: lmdb.Environment, data: Path) -> None:
    """LMDB trusts its header; reading past the end of a shorter file would kill the process."""
    needed = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    size = data.stat().st_size
    if size < needed:
        raise CorruptStoreError(f"{data} has {size} bytes where its header says {needed}: it was truncated")


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turns LMDB's errors into ours."""
    try:
        yield
    except (lmdb.InvalidError, lmdb.VersionMismatchError) as error:
        raise NotAStoreError(f"{path / DATA_FILE} is not an LMDB file ({error}); choose another folder") from error
    except _CORRUPT as error:
        raise CorruptStoreError(f"{path / DATA_FILE} is damaged ({error})") from error
    except lmdb.Error as error:
        raise StoreUnavailableError(f"{path}: {error}") from error
    except StoreError:
        raise
    except OSError as error:  # no permission, too many open files, or the folder has been removed meanwhile
        raise StoreUnavailableError(f"{path}: {error}") from error


def is_created(path: Path, on_doubt: bool) -> bool:
    """Whether a store was completely created here.

    Looks without a lock, so that it may run into another process's creation; ``on_doubt`` is the answer then, and
    also for a file that is something else, of which opening it will complain.
    """
    data = path / DATA_FILE
    if not os.path.exists(data) or data.stat().st_size == 0:
        return False
    try:
        with contextlib.closing(open_environment(path, readonly=True)) as env, env.begin() as txn:
            names = {bytes(key) for key, _ in txn.cursor()}
            if not names <= set(DATABASES):
                return True
            return b"meta" in names and txn.get(b"format", db=env.open_db(b"meta", txn=txn, create=False)) is not None
    except (lmdb.Error, StoreError):
        return on_doubt
