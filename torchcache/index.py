"""The index of a complete store ⇄ one value: where each sample lies, to be used as it lies in the map.

docs/format.md is the specification.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from torchcache.block import COLUMN_ALIGN, HEAD_BYTES, PAGE_BYTES, BlockHead
from torchcache.column import Column
from torchcache.errors import CorruptStoreError
from torchcache.places import CPU, Places, Rows, Table
from torchcache.records import Seal
from torchcache.schema import Schema
from torchcache.serial import take

DENSE_BYTES = 8  # the size of an offset

_COUNTS = struct.Struct("<QQ")  # samples, schemas; then per schema its samples
_NO_OFFSETS = torch.empty(0, dtype=torch.int64, device=CPU)


def pack(places: Places, length: int, gather: Callable[[Rows, int], torch.Tensor]) -> bytearray:
    """The index of a complete store, with a block's head.

    Args:
        places: where the samples lie.
        length: how many there are.
        gather: gives the values of a column (``Reader.gather``).
    """
    tables, schema_of, row_of = places.tables, places.schema_of, places.row_of
    assert schema_of is not None and row_of is not None
    members = [np.flatnonzero(schema_of.numpy() == i) for i in range(len(tables))]
    arrays: list[np.ndarray[Any, Any]] = []
    if sum(len(m) > 0 for m in members) > 1:
        # Rows are numbered anew, in the order of the samples.
        rank = np.empty(length, "<i8")
        for member in members:
            rank[member] = np.arange(len(member))
        arrays += [schema_of.numpy().astype("<i4"), rank]
    for table, member in zip(tables, members, strict=True):
        rows = Rows(table, torch.from_numpy(row_of.numpy()[member]))
        for c, column in enumerate(table.schema.columns if len(member) else ()):
            found = gather(rows, c) if _is_dense(column) else take(table.columns[c], rows.rows)
            arrays.append(found.view(torch.uint8).numpy())
    body = bytearray(_COUNTS.pack(length, len(tables)))
    body += np.asarray([len(m) for m in members], "<i8").tobytes()
    for array in arrays:
        body += bytes(_padded(HEAD_BYTES + len(body)) - HEAD_BYTES - len(body)) + array.tobytes()
    body += bytes(max(0, PAGE_BYTES - len(body)))
    return bytearray(BlockHead.of(len(tables), length & 0xFFFFFFFF, body).pack() + body)


def unpack(data: mmap.mmap, seal: Seal, length: int, schemas: Sequence[Schema]) -> Places:
    """The places that an index names. Each number of theirs is checked when it is used.

    Args:
        data: the map of the file.
        seal: where in it the index lies.
        length: number of samples of the dataset.
        schemas: the store's schemas.

    Raises:
        CorruptStoreError, ValueError, TypeError, IndexError, struct.error: if it cannot be what ``pack`` has made.
    """
    samples, count = _COUNTS.unpack_from(data, seal.offset + HEAD_BYTES)
    if samples != length or count > len(schemas):
        raise CorruptStoreError(f"it is of {samples} samples, the store of {length}")
    values = _Values(data, seal)
    counts = values.take(count, "<i8").tolist()
    if min(counts, default=0) < 0 or sum(counts) != length:
        raise CorruptStoreError(f"it counts {sum(counts)} samples, the store {length}")
    used = [i for i, samples in enumerate(counts) if samples]
    schema_of = row_of = None
    if len(used) > 1:
        schema_of = torch.from_numpy(values.take_padded(length, "<i4"))
        row_of = torch.from_numpy(values.take_padded(length, "<i8"))
    tables = [Table(schema) for schema in schemas[:count]]
    for i in used:
        columns, dense = [], {}
        for c, column in enumerate(schemas[i].columns):
            if _is_dense(column):
                found = torch.from_numpy(values.take_padded(counts[i] * column.stride, "<u1")).view(column.wide_dtype)
                dense[c] = values.last, found.view(counts[i], *column.wide_shape)
                columns.append(_NO_OFFSETS)
            else:
                columns.append(torch.from_numpy(values.take_padded(counts[i], "<i8")))
        tables[i] = Table(schemas[i], columns, counts[i])
        tables[i].dense = dense
    return Places(tables, schema_of, row_of, tables[used[0]] if len(used) == 1 else None, True)


class _Values:
    """The arrays of an index, one after another.

    Attributes:
        last: where in the file the last one begins.
    """

    def __init__(self, data: mmap.mmap, seal: Seal) -> None:
        self._data = data
        self._seal = seal
        self._position = HEAD_BYTES + _COUNTS.size
        self.last = 0

    def take(self, count: int, dtype: str) -> np.ndarray[Any, Any]:
        self.last = self._seal.offset + self._position
        array: np.ndarray[Any, Any] = np.ndarray((count,), dtype, self._data, self.last)
        self._position += array.nbytes
        if self._position > self._seal.nbytes:
            raise CorruptStoreError("it is too short")
        return array

    def take_padded(self, count: int, dtype: str) -> np.ndarray[Any, Any]:
        self._position = _padded(self._position)
        return self.take(count, dtype)


def _is_dense(column: Column) -> bool:
    """Whether the index has the values of this column instead of their offsets.

    A label is no larger than its offset, and 64 labels are 64 cache lines apart where the blocks have them.
    """
    return column.shape is not None and column.torch_dtype is not None and 0 < column.stride <= DENSE_BYTES


def _padded(position: int) -> int:
    return -(-(position - HEAD_BYTES) // COLUMN_ALIGN) * COLUMN_ALIGN + HEAD_BYTES
