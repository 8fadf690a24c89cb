"""The LMDB handle of a store: opened when it is first needed, few at a time, none across a fork.

All access to an unsealed store goes through write transactions, also where it only reads: one costs about a
microsecond, and LMDB's reader table, with its slots that outlive their processes and its process numbers that mean
nothing in another container, is never used.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from torchcache import environment
from torchcache.block import HEAD_BYTES
from torchcache.environment import LOCK_TIMEOUT_S, Environment, WriterLock, translated
from torchcache.errors import CorruptStoreError, StoreUnavailableError
from torchcache.section import Section

# Handles that a process keeps at a time, three descriptors each: some have many datasets, and 1,024 descriptors.
MOST_HANDLES = 16
registry_lock = Section()  # held while stores are opened; taken before a fork, so that none is half open

_databases: weakref.WeakValueDictionary[int, Database] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_lost: list[Environment] = []  # what cannot be closed
_forking: list[Database] = []  # locked between the two fork hooks


class Database:
    """LMDB's file in a store's folder, and transactions on it. Closed by dropping it, or with ``close``.

    Attributes:
        path: the folder.
        data_path: the file.
        lock: excludes other threads; held in every transaction.
        lock_timeout_s: how long to wait for another process that writes, in seconds.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data_path = path / environment.DATA_FILE
        self.lock = Section()
        self.lock_timeout_s = LOCK_TIMEOUT_S
        self._env: Environment | None = None
        self._writer: WriterLock
        self._dbs: dict[bytes, Any] = {}
        self._base = 0  # address of the file's first byte in LMDB's map
        self._opened = -1  # which of this process's openings was the last one
        _databases[id(self)] = self

    def close(self) -> None:
        """Closes the handle; the next use opens it again."""
        with self.lock:
            if self._env is not None:
                if self._writer.is_open:
                    self._env.close()
                else:  # nor, then, is LMDB's descriptor, which it does not tell: another file's would be closed
                    _lost.append(self._env)
                self._writer.close()
                self._env = None
                self._dbs = {}

    def last_transaction(self) -> int:
        """A number that grows with every commit of any process; costs about a microsecond and takes no lock."""
        with self.lock, translated(self.path):
            return int(self._environment().info()["last_txnid"])

    def _environment(self, create: bool = False) -> Environment:
        if self._env is not None and not self._writer.is_open:
            self.close()
            raise StoreUnavailableError(f"{self.path}: something has closed the descriptors of this process")
        if self._env is None:
            _close_oldest(MOST_HANDLES - 1)
            with contextlib.ExitStack() as undo:
                writer = WriterLock(self.path)
                undo.callback(writer.close)
                writer.acquire(self.lock_timeout_s)
                env = environment.open_environment(self.path)
                undo.callback(env.close)
                with env.begin(write=True) as txn:
                    self._dbs = environment.open_databases(env, txn, create=create)
                writer.release()
                undo.pop_all()
            self._env, self._writer, self._base, self._opened = env, writer, 0, next(_numbers)
        return self._env

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[Environment]:
        """Excludes other threads, and other processes that write or claim."""
        with self.lock, translated(self.path):
            env = self._environment()
            try:
                self._writer.acquire(self.lock_timeout_s)  # an interrupt may come as soon as it has returned
                yield env
            finally:
                self._writer.release()

    @contextlib.contextmanager
    def _write(self) -> Iterator[Any]:
        """A write transaction: committed at the end, aborted by an exception."""
        with self._exclusive() as env, env.begin(write=True, buffers=True) as txn:
            yield txn

    @contextlib.contextmanager
    def _read(self) -> Iterator[Any]:
        """A look at the file that needs no lock and no permission to write.

        A snapshot of a store that is being written may be torn while it is read: every block is recognised by its
        own id afterwards.
        """
        with self.lock, translated(self.path):
            self.close()
            env = environment.open_environment(self.path, readonly=True)
            try:
                with env.begin(buffers=True) as txn:
                    self._dbs, self._base = environment.open_databases(env, txn, create=False), 0
                    yield txn
            finally:
                env.close()
                self._dbs = {}

    def _sync(self) -> None:
        """Waits until everything that was written is on the disk."""
        with self.lock, translated(self.path):
            self._environment().sync(True)

    def _offset(self, txn: Any, value: Any) -> int:
        """Where a value of LMDB lies in the file.

        LMDB tells addresses. The first block is looked for in the file itself, which gives the address of the file's
        first byte and with it every other offset, without knowing anything about LMDB's pages.
        """
        if not self._base:
            cursor = txn.cursor(db=self._dbs[b"blocks"])
            first = cursor.value() if cursor.first() else b""
            with open(self.data_path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                offset = data.find(bytes(first[:HEAD_BYTES]))
            if not first or offset < 0:
                raise CorruptStoreError(f"{self.path}: the first block is not in the file")
            self._base = _address(first) - offset
        return _address(value) - self._base


def _address(buffer: Any) -> int:
    return int(np.frombuffer(buffer, np.uint8, 1).__array_interface__["data"][0])


def _alive() -> list[Database]:
    """Every database of this process; a copy, as other threads add to them."""
    return [database for reference in _databases.valuerefs() if (database := reference()) is not None]


def _close_oldest(most: int) -> None:
    """Closes handles until there are no more than so many. Those in use just now are left: nobody waits for them."""
    opened = sorted((database for database in _alive() if database._env is not None), key=lambda each: each._opened)
    for database in opened[: max(0, len(opened) - most)]:
        if database.lock.acquire(blocking=False):
            database.close()
            database.lock.release()


def _before_fork() -> None:
    registry_lock.acquire()
    for database in _alive():
        database.lock.acquire()
        _forking.append(database)
        database.close()


def _after_fork(in_child: bool) -> None:
    while _forking:
        _forking.pop().lock.release()
    registry_lock.release_after_fork(in_child)


os.register_at_fork(
    before=_before_fork,
    after_in_parent=lambda: _after_fork(False),
    after_in_child=lambda: _after_fork(True),
)
