"""What a store keeps beside its samples, as values and as bytes. docs/format.md is the specification."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchcache.block import BlockHead
from torchcache.errors import CorruptStoreError

FORMAT_VERSION = 1
FORMAT_LINE = b"torchcache %d" % FORMAT_VERSION

_ENTRY = struct.Struct("<16s16sIIQI4x")  # block id, owner, schema, count, nbytes, checksum; then the sample indices
_COUNTERS = struct.Struct("<QQQQd")
_SEAL = struct.Struct("<QQ16s")


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

    @classmethod
    def unpack(cls, record: Any, path: Path) -> Identity:
        """Reads ``pack``'s bytes, of the store at ``path``.

        Raises:
            CorruptStoreError: if they are something else.
        """
        try:
            identity = cls(**json.loads(bytes(record)))
        except (TypeError, ValueError) as error:
            raise CorruptStoreError(f"{path} does not say what it holds ({error})") from error
        if type(identity.length) is not int or identity.length < 0:
            raise CorruptStoreError(f"{path} says that it holds {identity.length!r} samples")
        if type(identity.allow_pickle) is not bool:
            raise CorruptStoreError(f"{path} says allow_pickle={identity.allow_pickle!r}")
        return identity

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()


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

    @classmethod
    def unpack(cls, record: Any, path: Path) -> Counters:
        """Reads ``pack``'s bytes, of the store at ``path``.

        Raises:
            CorruptStoreError: if they are something else.
        """
        if record is None or len(record) != _COUNTERS.size:
            raise CorruptStoreError(f"{path} has lost its totals")
        return cls(*_COUNTERS.unpack(record))

    def pack(self) -> bytes:
        # dataclasses.astuple takes ten microseconds.
        return _COUNTERS.pack(self.source_reads, self.duplicate_reads, self.samples, self.nbytes, self.source_seconds)


class LogRecord(NamedTuple):
    """What the log says of a block: its head, who wrote it, whose samples it holds."""

    head: BlockHead
    owner: bytes
    indices: np.ndarray[Any, np.dtype[np.int64]]

    @classmethod
    def unpack(cls, record: Any, where: str) -> LogRecord:
        """Reads ``pack``'s bytes; ``where`` is for the error.

        Raises:
            CorruptStoreError: if they are something else.
        """
        if len(record) < _ENTRY.size or (len(record) - _ENTRY.size) % 8:
            raise CorruptStoreError(f"{where}: the log does not say what it holds")
        block_id, owner, schema_id, count, nbytes, checksum = _ENTRY.unpack_from(record)
        indices = np.frombuffer(bytes(record[_ENTRY.size :]), "<i8")
        return cls(BlockHead(block_id, schema_id, count, nbytes, checksum), owner, indices)

    def pack(self) -> bytes:
        head = self.head
        record = _ENTRY.pack(head.block_id, self.owner, head.schema_id, head.count, head.nbytes, head.checksum)
        return record + self.indices.tobytes()


class LogEntry(NamedTuple):
    """One published block: its number in the log, its head, who wrote it, where it lies, whose samples it holds."""

    sequence: int
    head: BlockHead
    owner: bytes
    offset: int
    indices: np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Seal:
    """Where the index of a complete store lies in its file.

    Attributes:
        offset: of the index value, in bytes from the file's beginning.
        nbytes: its length.
        block_id: the id in its head.
    """

    offset: int
    nbytes: int
    block_id: bytes

    @classmethod
    def unpack(cls, record: Any, path: Path) -> Seal:
        """Reads ``pack``'s bytes, of the store at ``path``.

        Raises:
            CorruptStoreError: if they are something else.
        """
        if len(record) != _SEAL.size:
            raise CorruptStoreError(f"{path} has a seal of {len(record)} bytes, and not {_SEAL.size}")
        return cls(*_SEAL.unpack(record))

    def pack(self) -> bytes:
        return _SEAL.pack(self.offset, self.nbytes, self.block_id)


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


def number_key(number: int) -> bytes:
    """The key of a numbered record, in the order of the numbers."""
    return number.to_bytes(8, "big")
