"""One store: the log of blocks, the claims on samples, the schemas, the totals, the seal.

A store is a folder with ``data.mdb`` (LMDB's), ``owners/`` (who fills, and claims what, see ``owner``), ``writer.lock``
and ``store.lock``. Blocks are appended and never overwritten or deleted, so that a byte once published never moves.
docs/format.md is the specification.

All access to an unsealed store goes through write transactions, also where it only reads: one costs about a
microsecond, and LMDB's reader table, with its slots that outlive their processes and its process numbers that mean
nothing in another container, is never used.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import struct
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchcache import block as blocks
from torchcache import environment, filesystem, folder
from torchcache import owner as owners
from torchcache.block import HEAD_BYTES, ID_BYTES, BlockHead
from torchcache.environment import LOCK_TIMEOUT_S, Environment, WriterLock, foreign, translated
from torchcache.errors import (
    CorruptStoreError,
    FormatVersionError,
    NotAStoreError,
    StoreMismatchError,
    StoreUnavailableError,
)
from torchcache.folder import OWNERS
from torchcache.owner import Owner
from torchcache.schema import Schema

FORMAT_VERSION = 1

_ENTRY = struct.Struct("<16s16sIIQI4x")  # block id, owner, schema, count, nbytes, checksum; then the sample indices
_COUNTERS = struct.Struct("<QQQQd")
_SEAL = struct.Struct("<QQ16s")  # offset in the file, nbytes, block id of the index value
# One store object per folder and process: py-lmdb refuses to open a file twice.
_open_stores: weakref.WeakValueDictionary[str, Store] = weakref.WeakValueDictionary()
registry_lock = threading.RLock()  # held while stores are opened; taken before a fork, so that none is half open
# LMDB's handles that a process keeps at a time, three descriptors each: some have many datasets, and 1,024 descriptors.
MOST_HANDLES = 16
LOOK_TIMEOUT_S = 5.0  # who lists stores does not want to wait for a stopped process
_forking: list[Store] = []  # locked between the two fork hooks


@dataclass(frozen=True)
class Identity:
    """What a store holds, in words and numbers: kept in the store and compared when it is opened.

    Attributes:
        key: identity of the content (``fingerprint``, or what the user gave as ``key=``).
        source: qualified name of the dataset's class.
        length: number of samples of the dataset.
        allow_pickle: whether samples may hold pickled objects, which execute code when they are read.
    """

    key: str
    source: str
    length: int
    allow_pickle: bool = False


@dataclass(frozen=True)
class Counters:
    """Totals over all processes and runs that used the store; ``source_seconds`` is time spent inside the source."""

    source_reads: int = 0
    duplicate_reads: int = 0
    samples: int = 0
    nbytes: int = 0
    source_seconds: float = 0.0

    def __add__(self, other: Counters) -> Counters:
        return Counters(
            self.source_reads + other.source_reads,
            self.duplicate_reads + other.duplicate_reads,
            self.samples + other.samples,
            self.nbytes + other.nbytes,
            self.source_seconds + other.source_seconds,
        )

    def astuple(self) -> tuple[Any, ...]:
        return (self.source_reads, self.duplicate_reads, self.samples, self.nbytes, self.source_seconds)


class LogEntry(NamedTuple):
    """One published block: its number in the log, its head, who wrote it, where it lies, whose samples it holds."""

    sequence: int
    head: BlockHead
    owner: bytes
    offset: int
    indices: np.ndarray[Any, np.dtype[np.int64]]


class Survey(NamedTuple):
    """A store as of one moment.

    Attributes:
        entries: the log.
        blocks: how many blocks there are.
        counters: the totals.
        schemas: the schemas, as JSON.
        claimed: how many samples those who fill are reading.
        parts: what went into the key; empty if that is not known.
    """

    entries: list[LogEntry]
    blocks: int
    counters: Counters
    schemas: list[bytes]
    claimed: int
    parts: bytes


@dataclass(frozen=True, slots=True)
class Seal:
    """Where the index of a complete store lies in its file."""

    offset: int
    nbytes: int
    block_id: bytes


@dataclass(frozen=True, slots=True)
class Claim:
    """What ``Store.claim`` found.

    Attributes:
        granted: the indices that are ours now.
        held: the owners of the others.
        transaction: number of the last transaction (``last_transaction``) that was seen.
    """

    granted: list[int]
    held: dict[int, bytes]
    transaction: int


class _Own(NamedTuple):
    """What need not be read from the log, because we have written it."""

    head: BlockHead
    owner: bytes
    indices: np.ndarray[Any, Any]


class Store:
    """One store. Use ``Store.open`` and ``Store.create``; close by dropping it, or with ``close``.

    The LMDB handle is opened when it is first needed and closed before a fork: it must not cross one.
    """

    def __init__(self, path: Path, layout_only: bool = False) -> None:
        self.path = path
        self._layout_only = layout_only
        self.data_path = path / environment.DATA_FILE
        self.lock = threading.RLock()
        self.schemas: list[Schema] = []
        self.seal: Seal | None = None
        self.lock_timeout_s = LOCK_TIMEOUT_S
        self._env: Environment | None = None
        self._writer: WriterLock
        self._dbs: dict[bytes, Any] = {}
        self._base = 0  # address of the file's first byte in LMDB's map
        self._schema_ids: dict[bytes, int] = {}
        self._own: dict[int, _Own] = {}  # blocks that we have appended and not read in the log yet
        self._known = (-1, 0)  # a transaction, and the number up to which the log was known after it
        self._newest = b""  # the owner that joined last, as far as we know
        self._others: owners.Others | None = None  # those who had a file then
        self.identity: Identity
        self.read_only = ""  # why nothing may be written to it

    # -- opening -----------------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: Path) -> Store:
        """Opens an existing store.

        Raises:
            NotAStoreError: if there is none, or something else.
            FormatVersionError, CorruptStoreError, StoreUnavailableError: as they say.
        """
        with registry_lock:
            name = os.path.realpath(path)
            store = _open_stores.get(name)
            if store is None:
                store = cls(path)
                store._load()
                _open_stores[name] = store
            return store

    @classmethod
    @contextlib.contextmanager
    def look(cls, path: Path) -> Iterator[Store]:
        """An existing store to look at and not to read samples from: nothing is imported for it, nor checked.

        Raises:
            NotAStoreError, FormatVersionError, CorruptStoreError, StoreUnavailableError: as they say.
        """
        with registry_lock:  # nobody of this process can open the file meanwhile, which LMDB allows but once
            opened = _open_stores.get(os.path.realpath(path))
            if opened is not None:
                yield opened
                return
            store = cls(path, layout_only=True)
            store.lock_timeout_s = LOOK_TIMEOUT_S
            try:
                store._load()
                yield store
            finally:
                store.close()

    @classmethod
    def create(cls, path: Path, identity: Identity, parts: bytes = b"") -> Store:
        """Opens the store at ``path``, and makes an empty one first if there is none.

        Any number of processes may do so at once. An interrupted creation is completed by the next one.

        Args:
            path: its folder.
            identity: what it is to hold.
            parts: what went into the key, to be kept in a new one (see ``provenance``).
        """
        if not (path / environment.DATA_FILE).exists():
            risk = filesystem.risk(path)
            if risk is not None and not risk.fills:
                raise StoreUnavailableError(f"{path} would lie on {risk.kind}: {risk.text}")
            folder.make(path)
        if not environment.is_created(path, on_doubt=False):
            with folder.guard(path):
                if not environment.is_created(path, on_doubt=True):
                    cls(path)._initialise(identity, parts)
        store = cls.open(path)
        store.expect(identity)
        return store

    def expect(self, identity: Identity) -> None:
        """Refuses a dataset that contradicts what the store says of its own.

        Raises:
            StoreMismatchError: naming what differs.
        """
        self.permit(identity.allow_pickle)
        for field, ours in asdict(self.identity).items():
            theirs = getattr(identity, field)
            if ours != theirs:
                raise StoreMismatchError(
                    f"{self.path} holds another dataset: its {field} is {ours!r}, this dataset's is {theirs!r}. "
                    f"Give this one another key= or name=, or remove that folder"
                )

    def permit(self, allow_pickle: bool) -> None:
        """Refuses pickled objects if the user has not allowed them, and a permission that the store does not have.

        Raises:
            StoreMismatchError: saying what to do.
        """
        if self.identity.allow_pickle != allow_pickle:
            raise StoreMismatchError(
                f"{self.path} was made with allow_pickle={self.identity.allow_pickle}; open it with the same, if you "
                f"trust everybody who may have written to it, or give another name= or remove that folder"
            )

    def _load(self) -> None:
        if not self.data_path.exists():
            raise NotAStoreError(f"{self.path} holds no store: there is no {environment.DATA_FILE}")
        risk = filesystem.risk(self.path)
        if risk is not None and not risk.fills:
            self.read_only = f"it lies on {risk.kind}: {risk.text}"
        elif not (os.access(self.path, os.W_OK) and os.access(self.data_path, os.W_OK)):
            self.read_only = "it may only be read"
        with self._look() as txn:
            self._read_meta(txn)
            if not self._layout_only:
                self._trust_after_restart(txn)
        self.close()

    def _read_meta(self, txn: Any) -> None:
        meta = self._dbs[b"meta"]
        version = txn.get(b"format", db=meta)
        if version is None:
            raise foreign(self.path)
        if bytes(version) != _format_line():
            raise FormatVersionError(
                f"{self.path} has the format {bytes(version)[:40]!r}, this version of torchcache writes "
                f"{_format_line()!r}; remove the folder to fill it again"
            )
        try:
            self.identity = Identity(**json.loads(bytes(txn.get(b"identity", db=meta))))
            seal = txn.get(b"seal", db=meta)
            self.seal = None if seal is None else Seal(*_SEAL.unpack(seal))
        except (TypeError, ValueError, struct.error) as error:
            raise CorruptStoreError(f"{self.path} does not say what it holds ({error})") from error
        if type(self.identity.length) is not int or self.identity.length < 0:
            raise CorruptStoreError(f"{self.path} says that it holds {self.identity.length!r} samples")
        if type(self.identity.allow_pickle) is not bool:
            raise CorruptStoreError(f"{self.path} says allow_pickle={self.identity.allow_pickle!r}")
        self._read_schemas(txn)

    def _initialise(self, identity: Identity, parts: bytes) -> None:
        with self.lock, translated(self.path):
            self._environment(create=True)
        with self._write() as txn:
            meta = self._dbs[b"meta"]
            txn.put(b"identity", json.dumps(asdict(identity)).encode(), db=meta)
            txn.put(b"counters", _COUNTERS.pack(*Counters().astuple()), db=meta)
            txn.put(b"boot", boot_id(), db=meta)
            txn.put(b"parts", parts, db=meta)
            txn.put(b"format", _format_line(), db=meta)
        self.close()

    def _trust_after_restart(self, txn: Any) -> None:
        """Checks blocks and index if the machine was restarted before they were synced: it may have lost pages."""
        written_in = bytes(txn.get(b"boot", db=self._dbs[b"meta"], default=b""))
        if written_in and written_in != boot_id():
            self._check_blocks(txn)
            if not self.read_only:
                txn.put(b"boot", boot_id(), db=self._dbs[b"meta"])

    # -- the LMDB handle ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the LMDB handle; the next use opens it again."""
        with self.lock:
            if self._env is not None:
                self._env.close()
                self._writer.close()
                self._env = None
                self._dbs = {}
                self._others = None

    def _environment(self, create: bool = False) -> Environment:
        if self._env is None:
            _close_handles(MOST_HANDLES - 1)
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
            self._env, self._writer, self._base, self._known = env, writer, 0, (-1, 0)
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
    def _read_only(self) -> Iterator[Any]:
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

    @contextlib.contextmanager
    def _look(self) -> Iterator[Any]:
        """A transaction to read in: exact while the store can still change, without locks when it cannot."""
        with self._read_only() if self.read_only or self.seal is not None else self._write() as txn:
            yield txn

    def last_transaction(self) -> int:
        """A number that grows with every commit of any process; costs about a microsecond and takes no lock."""
        with self.lock, translated(self.path):
            return int(self._environment().info()["last_txnid"])

    # -- the log -----------------------------------------------------------------------------------------

    def entries(self, since: int) -> list[LogEntry]:
        """The blocks from number ``since`` of the log on."""
        with self._look() as txn:
            return self._entries(txn, since)

    def _entries(self, txn: Any, since: int) -> list[LogEntry]:
        found = []
        cursor = txn.cursor(db=self._dbs[b"ids"])
        if cursor.set_range(_key(since)):
            for key, value in cursor:
                found.append(self._entry(txn, int.from_bytes(key, "big"), value))
        if any(entry.head.schema_id >= len(self.schemas) for entry in found):
            self._read_schemas(txn)
        return found

    def _entry(self, txn: Any, sequence: int, record: Any) -> LogEntry:
        block = txn.get(_key(sequence), db=self._dbs[b"blocks"])
        own = self._own.pop(sequence, None)
        if own is not None and block is not None and bytes(block[:ID_BYTES]) == own.head.block_id:
            return LogEntry(sequence, own.head, own.owner, self._offset(txn, block), own.indices)
        if block is None or len(record) < _ENTRY.size or (len(record) - _ENTRY.size) % 8:
            raise CorruptStoreError(f"{self.path}: block {sequence} is missing, or the log does not say what it holds")
        block_id, owner, schema_id, count, nbytes, checksum = _ENTRY.unpack_from(record)
        head = BlockHead(block_id, schema_id, count, nbytes, checksum)
        indices = np.frombuffer(bytes(record[_ENTRY.size :]), "<i8")
        if bytes(block[:HEAD_BYTES]) != head.pack() or len(block) != nbytes or len(indices) != count:
            raise CorruptStoreError(f"{self.path}: block {sequence} is not what the log says")
        # As unsigned numbers the negative ones are large: one comparison for both ends.
        if count and int(indices.view(np.uint64).max()) >= self.identity.length:
            raise CorruptStoreError(f"{self.path}: block {sequence} holds samples that the dataset does not have")
        offset = self._offset(txn, block)
        if offset < 0 or (offset + HEAD_BYTES) % blocks.COLUMN_ALIGN:
            raise CorruptStoreError(f"{self.path}: block {sequence} does not lie where a block can lie")
        return LogEntry(sequence, head, owner, offset, indices)

    def _offset(self, txn: Any, value: Any) -> int:
        """Where a value of LMDB lies in the file.

        LMDB tells addresses. The first block is looked for in the file itself, which gives the address of the file's
        first byte and with it every other offset, without knowing anything about LMDB's pages.
        """
        if not self._base:
            first = txn.get(_key(0), db=self._dbs[b"blocks"])
            with open(self.data_path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                offset = data.find(bytes(first[:HEAD_BYTES]))
            if offset < 0:
                raise CorruptStoreError(f"{self.path}: the first block is not in the file")
            self._base = _address(first) - offset
        return _address(value) - self._base

    def join(self, owner: Owner) -> None:
        """Lets the others know that there is another owner, before it claims anything."""
        with self._write() as txn:
            txn.put(b"owner", owner.id, db=self._dbs[b"meta"])

    def claim(
        self,
        owner: Owner,
        since: int,
        missing: Callable[[list[LogEntry]], Sequence[int]],
        *,
        busy: Set[int] = frozenset(),
        usurped: frozenset[bytes] = frozenset(),
    ) -> Claim:
        """Claims samples, together with a look at the log, so that none can be published in between.

        Args:
            owner: who claims.
            since: the log is known up to this number.
            missing: takes the new entries of the log, and gives the indices that are still wanted.
            busy: samples that are the owner's own already, for another thread.
            usurped: owners whose claims count no more, because they are dead or stopped.
        """
        with self._exclusive() as env:
            transaction = env.info()["last_txnid"]
            wanted = missing(self._news(env, transaction, since))
            held = {} if self._others is None else self._others.holders(wanted, {owner.id, *usurped})
            if busy and owner.id not in usurped:
                held.update({index: owner.id for index in wanted if index in busy})
            granted = [index for index in wanted if index not in held] if held else list(wanted)
            if granted:
                owner.claim(granted)
            return Claim(granted, held, transaction)

    def _news(self, env: Environment, transaction: int, since: int) -> list[LogEntry]:
        """What has been published, and learns of new owners: a look at LMDB, if there was a transaction since."""
        if self._known == (transaction, since):
            return []
        with env.begin(write=True, buffers=True) as txn:
            entries = self._entries(txn, since)
            newest = bytes(txn.get(b"owner", b"", db=self._dbs[b"meta"]))
        if newest != self._newest or self._others is None:
            self._others = self._others or owners.Others(self.path / OWNERS, self.identity.length)
            self._others.look()
            self._newest = newest
        self._known = transaction, entries[-1].sequence + 1 if entries else since
        return entries

    def release(self, owner: Owner, left: Collection[int]) -> None:
        """Gives claims back, all but some, by a commit: whoever waits for one looks for these."""
        with self._write() as txn:
            owner.keep(left)
            owner.claim(())
            self._put_counters(txn, self._counters(txn))

    def _claimed(self, entries: Sequence[LogEntry]) -> int:
        """How many samples are claimed by owners that live, and not in the log."""
        folder = self.path / OWNERS
        found = [owners.claims(folder, owner) for owner in owners.ids(folder) if owners.is_alive(folder, owner)]
        published = [entry.indices for entry in entries]
        return len(np.setdiff1d(_together(found), _together(published)))

    def publish(
        self,
        owner: bytes,
        since: int,
        prepared: Sequence[tuple[bytearray, Sequence[int]]],
        counters: Counters,
        admit: Callable[[int], bool],
    ) -> tuple[list[LogEntry], Counters | None]:
        """Appends blocks in one transaction. Claims on what is in the log count no more.

        Args:
            owner: who publishes.
            since: the log is known up to this number.
            prepared: blocks, each with the indices of its samples.
            counters: what to add to the store's totals; samples and bytes are added here.
            admit: takes the store's size with these blocks, and says whether it may become that large.

        Returns:
            The new entries of the log (without these blocks), and the store's totals; ``None`` if nothing was
            published, because ``admit`` refused or the entries hold one of the samples (then drop it and try again).
        """
        with self._write() as txn:
            entries = self._entries(txn, since)
            taken = set(_together([entry.indices for entry in entries]).tolist())
            totals = self._counters(txn)
            size = totals.nbytes + sum(len(block) for block, _ in prepared)
            if not admit(size) or not all(taken.isdisjoint(indices) for _, indices in prepared):
                return entries, None
            appended = dict([self._append(txn, owner, block, indices) for block, indices in prepared])
            count = sum(len(indices) for _, indices in prepared)
            totals += counters + Counters(samples=count, nbytes=size - totals.nbytes)
            self._put_counters(txn, totals)
        self._own.update(appended)  # now that it is committed
        return entries, totals

    def _append(self, txn: Any, owner: bytes, block: bytearray, indices: Sequence[int]) -> tuple[int, _Own]:
        cursor = txn.cursor(db=self._dbs[b"ids"])
        sequence = int.from_bytes(cursor.key(), "big") + 1 if cursor.last() else 0
        head = BlockHead.read(block)
        record = _ENTRY.pack(head.block_id, owner, head.schema_id, head.count, head.nbytes, head.checksum)
        samples = np.asarray(indices, "<i8")
        txn.put(_key(sequence), block, db=self._dbs[b"blocks"], append=True)
        txn.put(_key(sequence), record + samples.tobytes(), db=self._dbs[b"ids"], append=True)
        return sequence, _Own(head, owner, samples)

    # -- schemas and totals ------------------------------------------------------------------------------

    def _read_schemas(self, txn: Any) -> None:
        cursor = txn.cursor(db=self._dbs[b"schemas"])
        if cursor.set_range(_key(len(self.schemas))):
            for key, text in cursor:
                if int.from_bytes(key, "big") != len(self.schemas):
                    raise CorruptStoreError(f"{self.path}: schema {len(self.schemas)} is missing")
                self._schema_ids[bytes(text)] = len(self.schemas)
                schema = Schema.from_json(
                    bytes(text), allow_pickle=self.identity.allow_pickle, layout_only=self._layout_only
                )
                self.schemas.append(schema)

    def schema_id(self, schema: Schema) -> int:
        """The number of a schema in the store, which learns it if need be."""
        for number, known in enumerate(self.schemas):
            if known is schema:
                return number
        text = schema.to_json()
        if text not in self._schema_ids:
            with self._write() as txn:
                self._read_schemas(txn)
                if text not in self._schema_ids:
                    txn.put(_key(len(self.schemas)), text, db=self._dbs[b"schemas"], append=True)
            with self._write() as txn:
                self._read_schemas(txn)
        return self._schema_ids[text]

    def counters(self) -> Counters:
        """The store's totals."""
        with self._look() as txn:
            return self._counters(txn)

    def survey(self) -> Survey:
        """The whole log with what else there is, as of one moment."""
        with self._look() as txn:
            cursor = txn.cursor(db=self._dbs[b"schemas"])
            texts = [bytes(text) for _, text in cursor]
            entries = self._entries(txn, 0)
            blocks_stored = txn.stat(self._dbs[b"blocks"])["entries"]
            parts = bytes(txn.get(b"parts", db=self._dbs[b"meta"], default=b""))
            return Survey(entries, blocks_stored, self._counters(txn), texts, self._claimed(entries), parts)

    def count(self, counters: Counters) -> None:
        """Adds to the store's totals."""
        with self._write() as txn:
            self._put_counters(txn, self._counters(txn) + counters)

    def _counters(self, txn: Any) -> Counters:
        record = txn.get(b"counters", db=self._dbs[b"meta"])
        if record is None or len(record) != _COUNTERS.size:
            raise CorruptStoreError(f"{self.path} has lost its totals")
        return Counters(*_COUNTERS.unpack(record))

    def _put_counters(self, txn: Any, counters: Counters) -> None:
        txn.put(b"counters", _COUNTERS.pack(*counters.astuple()), db=self._dbs[b"meta"])

    # -- sealing and checking ----------------------------------------------------------------------------

    def read_seal(self) -> Seal | None:
        """The seal, if anybody has set it meanwhile."""
        with self._look() as txn:
            self._read_meta(txn)
            return self.seal

    def write_seal(self, index: bytearray) -> Seal:
        """Makes a complete store a sealed one, unless it is.

        Nothing waits for the disk here, which would be in the middle of an epoch: see ``sync``.

        Args:
            index: the index value, with a block head (see ``reader``).

        Returns:
            The seal, whoever has set it.
        """
        with folder.guard(self.path):
            with self._write() as txn:
                self._read_meta(txn)
                if self.seal is not None:
                    return self.seal
                txn.put(b"index", index, db=self._dbs[b"index"])
            with self._write() as txn:
                value = txn.get(b"index", db=self._dbs[b"index"])
                self.seal = Seal(self._offset(txn, value), len(value), BlockHead.read(value).block_id)
                record = (self.seal.offset, self.seal.nbytes, self.seal.block_id)
                txn.put(b"seal", _SEAL.pack(*record), db=self._dbs[b"meta"])
            return self.seal

    def sync(self) -> None:
        """Brings a sealed store to the disk, after which it is trusted whatever becomes of the machine."""
        if self.read_only:
            return
        with self._write() as txn:
            self._read_meta(txn)
            if self.seal is None or not txn.get(b"boot", db=self._dbs[b"meta"]):
                return
        with self.lock, translated(self.path):
            self._environment().sync(True)
            with self._write() as txn:
                txn.put(b"boot", b"", db=self._dbs[b"meta"])
            self._environment().sync(True)

    def check_blocks(self) -> int:
        """Checks every block: its place, its schema, every offset in it, its checksum; and the index's.

        Returns:
            The number of blocks.

        Raises:
            CorruptStoreError: for the first one that is wrong.
        """
        with self._look() as txn:
            return self._check_blocks(txn)

    def _check_blocks(self, txn: Any) -> int:
        entries = self._entries(txn, 0)
        for entry in entries:
            if entry.head.schema_id >= len(self.schemas):
                raise CorruptStoreError(f"{self.path}: block {entry.sequence} has an unknown schema")
            block = txn.get(_key(entry.sequence), db=self._dbs[b"blocks"])
            blocks.check(block, self.schemas[entry.head.schema_id], checksum=True)
        if self.seal is not None:
            index = txn.get(b"index", db=self._dbs[b"index"], default=b"")
            head = BlockHead.read(index)
            if head.block_id != self.seal.block_id or head.checksum_of(index[HEAD_BYTES:]) != head.checksum:
                raise CorruptStoreError(f"{self.path}: the index does not match its checksum")
        return len(entries)


def destroy(path: Path) -> None:
    """Removes a store's folder. Who has it open keeps what is mapped."""
    with registry_lock:
        opened = _open_stores.pop(os.path.realpath(path), None)
        if opened is not None:
            opened.close()
        # Under another name first, so that nobody meets half a store or adds to it meanwhile.
        doomed = path.with_name(f"{path.name}.removed-{os.urandom(4).hex()}")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def destroy_if_empty(store: Store) -> bool:
    """Removes the folder of a store into which nothing was published, and in which nobody has a claim."""
    with registry_lock, folder.guard(store.path):  # in the order in which a store is opened
        with store._write() as txn:
            if txn.stat(store._dbs[b"ids"])["entries"] or store._claimed([]):
                return False
        destroy(store.path)
        return True


def set_aside(path: Path, damaged: int) -> Path | None:
    """Renames the folder of a damaged store, and returns its new name.

    Args:
        path: the store's folder.
        damaged: ``inode`` of the store that was found damaged; if another is there now, it is left alone (``None``).
    """
    aside = path.with_name(f"{path.name}.damaged-{os.urandom(4).hex()}")
    with folder.guard(path), registry_lock:
        if folder.inode(path) != damaged:
            return None
        _open_stores.pop(os.path.realpath(path), None)
        path.rename(aside)
        return aside


def _together(parts: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    return np.concatenate([np.empty(0, np.int64), *parts])


def _key(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _address(buffer: Any) -> int:
    return int(np.frombuffer(buffer, np.uint8, 1).__array_interface__["data"][0])


def _format_line() -> bytes:
    return b"torchcache %d" % FORMAT_VERSION


def boot_id() -> bytes:
    """Differs from one start of the machine to the next; empty where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return b""


def _close_handles(most: int) -> None:
    """Closes handles until there are no more than so many. Those in use just now are left: nobody waits for them."""
    for store in [store for store in list(_open_stores.values()) if store._env is not None][most:]:
        if store.lock.acquire(blocking=False):
            store.close()
            store.lock.release()


def _before_fork() -> None:
    registry_lock.acquire()
    _forking.extend(_open_stores.values())
    for store in _forking:
        store.lock.acquire()
        store.close()


def _after_fork() -> None:
    while _forking:
        _forking.pop().lock.release()
    registry_lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
