"""One store: the log of blocks, the claims on samples, the schemas, the totals, the seal.

A store is a folder with ``data.mdb`` (LMDB's), ``owners/`` (who fills, and claims what, see ``owner``), ``writer.lock``
and ``store.lock``. Blocks are appended and never overwritten or deleted, so that a byte once published never moves.
docs/format.md is the specification.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from torchcache import block as blocks
from torchcache import environment, filesystem, folder
from torchcache import owner as owners
from torchcache.block import HEAD_BYTES, ID_BYTES, BlockHead
from torchcache.database import Database, registry_lock
from torchcache.environment import Environment, foreign, translated
from torchcache.errors import (
    CorruptStoreError,
    FormatVersionError,
    NotAStoreError,
    StoreMismatchError,
    StoreUnavailableError,
)
from torchcache.folder import OWNERS
from torchcache.owner import Owner
from torchcache.records import FORMAT_LINE, Claim, Counters, Identity, LogEntry, LogRecord, Seal, Survey, number_key
from torchcache.schema import Schema
from torchcache.section import Deferred

LOOK_TIMEOUT_S = 5.0  # who lists stores does not want to wait for a stopped process
# One store object per folder and process: py-lmdb refuses to open a file twice.
_open_stores: weakref.WeakValueDictionary[str, Store] = weakref.WeakValueDictionary()


class Store(Database):
    """One store. Use ``Store.open`` and ``Store.create``; close by dropping it, or with ``close``.

    Attributes:
        identity: what it holds.
        schemas: the structures of its samples, by number.
        seal: where its index is; ``None`` while it is not complete.
        read_only: why nothing may be written to it; empty if it may.
    """

    def __init__(self, path: Path, layout_only: bool = False) -> None:
        super().__init__(path)
        self.identity: Identity
        self.schemas: list[Schema] = []
        self.seal: Seal | None = None
        self.read_only = ""
        self._layout_only = layout_only
        self._schema_ids: dict[bytes, int] = {}
        self._own: dict[int, LogRecord] = {}  # blocks that we have appended and not read in the log yet
        self._known = (-1, 0)  # a transaction, and the number up to which the log was known after it
        self._newest = b""  # the owner that joined last, as far as we know
        self._others: owners.Others | None = None  # those who had a file then

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
        environment.occupy_standard_descriptors()
        with registry_lock:  # before the guard, as everywhere: nobody waits for the one with the other
            if not os.path.exists(path / environment.DATA_FILE):
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
        if not os.path.exists(self.data_path):
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
        if bytes(version) != FORMAT_LINE:
            raise FormatVersionError(
                f"{self.path} has the format {bytes(version)[:40]!r}, this version of torchcache writes "
                f"{FORMAT_LINE!r}; remove the folder to fill it again"
            )
        self.identity = Identity.unpack(txn.get(b"identity", b"", db=meta), self.path)
        seal = txn.get(b"seal", db=meta)
        self.seal = None if seal is None else Seal.unpack(seal, self.path)
        self._read_schemas(txn)

    def _initialise(self, identity: Identity, parts: bytes) -> None:
        with self.lock, translated(self.path):
            self._environment(create=True)
        with self._write() as txn:
            meta = self._dbs[b"meta"]
            txn.put(b"identity", identity.pack(), db=meta)
            txn.put(b"counters", Counters().pack(), db=meta)
            txn.put(b"boot", boot_id(), db=meta)
            txn.put(b"parts", parts, db=meta)
            txn.put(b"format", FORMAT_LINE, db=meta)
        self.close()

    def _trust_after_restart(self, txn: Any) -> None:
        """Checks blocks and index if the machine was restarted before they were synced: it may have lost pages."""
        written_in = bytes(txn.get(b"boot", db=self._dbs[b"meta"], default=b""))
        if written_in and written_in != boot_id():
            self._check_blocks(txn)
            if not self.read_only:
                txn.put(b"boot", boot_id(), db=self._dbs[b"meta"])

    def close(self) -> None:
        with self.lock:
            super().close()
            self._known, self._others = (-1, 0), None

    @contextlib.contextmanager
    def _look(self) -> Iterator[Any]:
        """A transaction to read in: exact while the store can still change, without locks when it cannot."""
        with self._read() if self.read_only or self.seal is not None else self._write() as txn:
            yield txn

    def entries(self, since: int) -> list[LogEntry]:
        """The blocks from number ``since`` of the log on."""
        with self._look() as txn:
            return self._entries(txn, since)

    def _entries(self, txn: Any, since: int) -> list[LogEntry]:
        found = []
        cursor = txn.cursor(db=self._dbs[b"ids"])
        if cursor.set_range(number_key(since)):
            for key, value in cursor:
                found.append(self._entry(txn, int.from_bytes(key, "big"), value))
        if any(entry.head.schema_id >= len(self.schemas) for entry in found):
            self._read_schemas(txn)
        return found

    def _entry(self, txn: Any, sequence: int, record: Any) -> LogEntry:
        block = txn.get(number_key(sequence), db=self._dbs[b"blocks"])
        own = self._own.pop(sequence, None)
        if own is not None and block is not None and bytes(block[:ID_BYTES]) == own.head.block_id:
            return LogEntry(sequence, own.head, own.owner, self._offset(txn, block), own.indices)
        where = f"{self.path}: block {sequence}"
        if block is None:
            raise CorruptStoreError(f"{where} is missing")
        head, owner, indices = LogRecord.unpack(record, where)
        if bytes(block[:HEAD_BYTES]) != head.pack() or len(block) != head.nbytes or len(indices) != head.count:
            raise CorruptStoreError(f"{where} is not what the log says")
        # As unsigned numbers the negative ones are large: one comparison for both ends.
        if head.count and int(indices.view(np.uint64).max()) >= self.identity.length:
            raise CorruptStoreError(f"{where} holds samples that the dataset does not have")
        offset = self._offset(txn, block)
        if offset < 0 or (offset + HEAD_BYTES) % blocks.COLUMN_ALIGN:
            raise CorruptStoreError(f"{where} does not lie where a block can lie")
        return LogEntry(sequence, head, owner, offset, indices)

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

    def _append(self, txn: Any, owner: bytes, block: bytearray, indices: Sequence[int]) -> tuple[int, LogRecord]:
        cursor = txn.cursor(db=self._dbs[b"ids"])
        sequence = int.from_bytes(cursor.key(), "big") + 1 if cursor.last() else 0
        record = LogRecord(BlockHead.read(block), owner, np.asarray(indices, "<i8"))
        txn.put(number_key(sequence), block, db=self._dbs[b"blocks"], append=True)
        txn.put(number_key(sequence), record.pack(), db=self._dbs[b"ids"], append=True)
        return sequence, record

    def _read_schemas(self, txn: Any) -> None:
        cursor = txn.cursor(db=self._dbs[b"schemas"])
        if cursor.set_range(number_key(len(self.schemas))):
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
                    txn.put(number_key(len(self.schemas)), text, db=self._dbs[b"schemas"], append=True)
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
        return Counters.unpack(txn.get(b"counters", db=self._dbs[b"meta"]), self.path)

    def _put_counters(self, txn: Any, counters: Counters) -> None:
        txn.put(b"counters", counters.pack(), db=self._dbs[b"meta"])

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
        with Deferred(), folder.guard(self.path):
            with self._write() as txn:
                self._read_meta(txn)
                if self.seal is not None:
                    return self.seal
                txn.put(b"index", index, db=self._dbs[b"index"])
            with self._write() as txn:
                value = txn.get(b"index", db=self._dbs[b"index"])
                self.seal = Seal(self._offset(txn, value), len(value), BlockHead.read(value).block_id)
                txn.put(b"seal", self.seal.pack(), db=self._dbs[b"meta"])
            return self.seal

    def sync(self) -> None:
        """Brings a sealed store to the disk, after which it is trusted whatever becomes of the machine."""
        if self.read_only:
            return
        with self._write() as txn:
            self._read_meta(txn)
            if self.seal is None or not txn.get(b"boot", db=self._dbs[b"meta"]):
                return
        self._sync()
        with self._write() as txn:
            txn.put(b"boot", b"", db=self._dbs[b"meta"])
        self._sync()

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
            block = txn.get(number_key(entry.sequence), db=self._dbs[b"blocks"])
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
    with registry_lock, folder.guard(path):
        if folder.inode(path) != damaged:
            return None
        _open_stores.pop(os.path.realpath(path), None)
        path.rename(aside)
        return aside


def _together(parts: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    return np.concatenate([np.empty(0, np.int64), *parts])


def boot_id() -> bytes:
    """Differs from one start of the machine to the next; empty where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return b""
