"""Leaves of many samples ⇄ one block of bytes.

A block holds samples that were published together and share a schema: a head of 48 bytes, then the fixed part of
every column, one column after another and each padded to 64 bytes, then the values of the ragged columns. LMDB lays
a large value 16 bytes into a page, so with a head of 48 bytes every column lies on a 64-byte boundary of the file.
docs/format.md is the specification.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torchcache.column import Column
from torchcache.errors import CorruptStoreError, UnsupportedSampleError
from torchcache.flatten import Flat, Uniform
from torchcache.leaves import Leaf
from torchcache.schema import Schema

ID_BYTES = 16  # a random name for each block, by which it is found in the mapped file
HEAD_BYTES = 48
COLUMN_ALIGN = 64  # bytes; a cache line, and the widest vector load
PAGE_BYTES = mmap.PAGESIZE  # from this length on LMDB gives a value pages of its own, where it never moves

_HEAD = struct.Struct("<16sIIQIIQ")  # id, schema, count, nbytes, checksum, 0, 0
assert _HEAD.size == HEAD_BYTES


@dataclass(frozen=True, slots=True)
class BlockHead:
    """The head of a block.

    Attributes:
        block_id: 16 random bytes.
        schema_id: number of the schema in the store.
        count: number of samples.
        nbytes: length of the whole block, head and padding included.
        checksum: CRC-32 of everything after the head, begun with that of the other fields.
    """

    block_id: bytes
    schema_id: int
    count: int
    nbytes: int
    checksum: int

    @classmethod
    def read(cls, block: Any) -> BlockHead:
        """Reads the head at the start of a buffer.

        Raises:
            CorruptStoreError: if the buffer is too short.
        """
        if len(block) < HEAD_BYTES:
            raise CorruptStoreError(f"a block of {len(block)} bytes is shorter than its head")
        block_id, schema_id, count, nbytes, checksum, _, _ = _HEAD.unpack_from(block)
        return cls(block_id, schema_id, count, nbytes, checksum)

    @classmethod
    def of(cls, schema_id: int, count: int, body: Any) -> BlockHead:
        """The head, with a new random id, to put in front of ``body``."""
        head = cls(os.urandom(ID_BYTES), schema_id, count, HEAD_BYTES + len(body), 0)
        return replace(head, checksum=head.checksum_of(body))

    def pack(self) -> bytes:
        return _HEAD.pack(self.block_id, self.schema_id, self.count, self.nbytes, self.checksum, 0, 0)

    def checksum_of(self, body: Any) -> int:
        """The checksum that this head should have in front of ``body``, the block without its head."""
        return zlib.crc32(body, zlib.crc32(_HEAD.pack(self.block_id, self.schema_id, self.count, self.nbytes, 0, 0, 0)))


def column_starts(columns: Sequence[Column], count: int) -> tuple[list[int], int]:
    """Where the fixed part of each column starts in a block of ``count`` samples, and where the last one ends."""
    starts, position = [], HEAD_BYTES
    for column in columns:
        starts.append(position)
        position += _padded(count * column.stride, COLUMN_ALIGN)
    return starts, position


def encode(schema: Schema, schema_id: int, samples: Sequence[Flat], min_bytes: int = 0) -> bytearray:
    """Writes samples as one block.

    Args:
        schema: what every sample fits.
        schema_id: its number in the store.
        samples: the samples, taken apart.
        min_bytes: pad the block to this length, so that LMDB gives it pages of its own.

    Returns:
        The block, with a new random id.
    """
    pieces, end = lay_out(schema, samples)
    block = bytearray().join([bytes(HEAD_BYTES), *pieces, bytes(max(0, min_bytes - end))])
    count = sum([len(flat.indices) for flat in samples])
    block[:HEAD_BYTES] = BlockHead.of(schema_id, count, memoryview(block)[HEAD_BYTES:]).pack()
    return block


def lay_out(schema: Schema, samples: Sequence[Flat]) -> tuple[list[Any], int]:
    """What follows the head of a block of these samples: the pieces, and where in the block the last one ends."""
    count = sum([len(flat.indices) for flat in samples])
    starts, end = column_starts(schema.columns, count)
    fixed: list[Any] = []
    ragged: list[Any] = []
    for c, (column, start) in enumerate(zip(schema.columns, starts, strict=True)):
        values = [flat.columns[c] for flat in samples]
        if column.shape is None:
            records, end = _encode_ragged(column, values, start, end, ragged)
            fixed.append(records)
        else:
            fixed.extend(_fixed_values(column, values))
        fixed.append(bytes(-count * column.stride % COLUMN_ALIGN))
    return fixed + ragged, end


def _fixed_values(column: Column, values: Sequence[Uniform | list[Leaf]]) -> list[Any]:
    found: list[Any] = []
    for part in values:
        if isinstance(part, Uniform):
            found.append(part.data)
        else:
            found += [data for _, data in part]
            if any(len(data) != column.stride for _, data in part):
                raise UnsupportedSampleError(f"a {column.kind} leaf has another size than its dtype and shape say")
    return found


def _encode_ragged(
    column: Column, values: Sequence[Uniform | list[Leaf]], start: int, end: int, out: list[Any]
) -> tuple[bytes, int]:
    """The records of a ragged column at ``start``; appends its values, from ``end`` of the block on, to ``out``."""
    leaves = [leaf for part in values for leaf in (part.leaves() if isinstance(part, Uniform) else part)]
    records = np.empty((len(leaves), 1 + column.ndim), "<i8")
    for row, (dims, data) in enumerate(leaves):
        # Relative to the block, whose columns begin on a 64-byte boundary 48 bytes later.
        padding = -(end - HEAD_BYTES) % column.align
        out.append(bytes(padding))
        out.append(data)
        end += padding
        records[row, 0] = end - (start + row * column.stride)
        records[row, 1:] = dims
        end += len(data)
    return records.tobytes(), end


def check(block: Any, schema: Schema, *, checksum: bool) -> None:
    """Checks that everything a block says lies inside it.

    Args:
        block: the whole block.
        schema: the schema it names.
        checksum: compare the checksum too, which reads every byte.

    Raises:
        CorruptStoreError: saying what is wrong.
    """
    head = BlockHead.read(block)
    name = head.block_id.hex()
    if bytes(block[:HEAD_BYTES]) != head.pack():
        raise CorruptStoreError(f"block {name} has a damaged head")
    if head.nbytes != len(block) or head.count < 1:
        raise CorruptStoreError(f"block {name} has {len(block)} bytes where its head says {head.nbytes}")
    starts, end = column_starts(schema.columns, head.count)
    if end > head.nbytes:
        raise CorruptStoreError(f"block {name} of {head.nbytes} bytes is too short for its {head.count} samples")
    for column, start in zip(schema.columns, starts, strict=True):
        if column.shape is None:
            _check_ragged(block, column, head.count, start, end, name)
    if checksum and head.checksum_of(memoryview(block)[HEAD_BYTES:]) != head.checksum:
        raise CorruptStoreError(f"block {name} does not match its checksum")


def _check_ragged(block: Any, column: Column, count: int, start: int, end: int, name: str) -> None:
    width = 1 + column.ndim
    records = np.frombuffer(block, "<i8", count * width, start).reshape(count, width)
    own = start + np.arange(count, dtype=np.int64) * column.stride
    # In floating point the product cannot wrap around; it is exact far beyond the size of a block.
    sizes = records[:, 1:].astype(np.float64).prod(axis=1) * column.itemsize
    first = records[:, 0].astype(np.float64) + own
    if (records[:, 1:] < 0).any() or (first < end).any() or (first + sizes > len(block)).any():
        raise CorruptStoreError(f"block {name} has a value that lies outside it")
    if (((records[:, 0] + own) - HEAD_BYTES) % column.align).any():
        raise CorruptStoreError(f"block {name} has a misaligned value")


def _padded(nbytes: int, align: int) -> int:
    return -(-nbytes // align) * align
