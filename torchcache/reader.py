"""The private map of a store's file, and where in it each sample lies.

A process reads without LMDB: it maps ``data.mdb`` itself, private and writable, so that a stray write through a view
can neither crash the process nor reach the file. Python's ``mmap`` is reference-counted by every view of it, so a
view outlives the reader. Views and gathers are checked against the map's length by torch and NumPy, so that a hostile
offset can never leave it.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchcache import folder
from torchcache.block import COLUMN_ALIGN, HEAD_BYTES, PAGE_BYTES, BlockHead
from torchcache.column import Column
from torchcache.errors import CorruptStoreError, StoreError, StoreUnavailableError
from torchcache.flatten import GRAIN_ELEMENTS
from torchcache.items import reading
from torchcache.places import CPU, Places, Rows, Table
from torchcache.readahead import ReadAhead
from torchcache.schema import Schema
from torchcache.store import LogEntry, Seal

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0)  # copies of written pages are rare: promise no memory for them
_NO_OFFSETS = torch.empty(0, dtype=torch.int64, device=CPU)
DENSE_BYTES = 8  # the size of an offset
VERIFIED_BYTES = 4 << 20  # the checksum of an index so large takes a few milliseconds at each start
_INDEX = struct.Struct("<QQ")  # samples, schemas; then per schema its samples
# Copied bits are bits: which dtype carries them does not matter, only how many bytes it has.
_WIDE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Reader:
    """What one process knows of one store: the map, and the place of every sample.

    Args:
        path: the data file. It is opened at once.
        length: number of samples of the dataset.
        schemas: the store's schemas; a list that grows.
        seal: of a complete store: its index is loaded, without memory or time for each sample.
        marks: whether this is a use of the store (``folder.mark_used``), or only a look at it.

    Raises:
        CorruptStoreError: if the index is not what the seal says.
    """

    def __init__(
        self, path: Path, length: int, schemas: list[Schema], *, seal: Seal | None = None, marks: bool = True
    ) -> None:
        self._path = path
        self.length = length
        self._schemas = schemas
        self.sequence = 0  # the log is known up to this number
        self.count = 0  # samples known
        self.map: mmap.mmap | None = None
        self._fd = self._opened(marks)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._address = 0  # of the map in memory
        self._ahead = ReadAhead()
        # Reads the sample of an index: of a sealed store with one schema, and where nothing is wrong.
        self.read: Callable[[int], Any] | None = None
        self._windows: dict[Column, torch.Tensor] = {}
        if seal is None:
            self._places = Places(
                [],
                torch.full((length,), -1, dtype=torch.int32, device=CPU),
                torch.zeros(length, dtype=torch.int64, device=CPU),
            )
        else:
            self.load_index(seal, verify=seal.nbytes <= VERIFIED_BYTES)

    # -- the log and the index ---------------------------------------------------------------------------

    def apply(self, entries: Sequence[LogEntry]) -> None:
        """Learns of blocks, in the order of the log."""
        places = self._places
        if places.sealed:
            return
        assert places.schema_of is not None and places.row_of is not None
        for entry in entries:
            if entry.sequence < self.sequence:
                continue
            while len(places.tables) <= entry.head.schema_id:
                places.tables.append(Table(self._schemas[len(places.tables)]))
            row = places.tables[entry.head.schema_id].append(entry)
            schema_of, row_of = places.schema_of.numpy(), places.row_of.numpy()
            self.count += int((schema_of[entry.indices] < 0).sum())
            row_of[entry.indices] = np.arange(row, row + entry.head.count)
            schema_of[entry.indices] = entry.head.schema_id  # last: from here on, other threads read these rows
            self.sequence = entry.sequence + 1

    @property
    def complete(self) -> bool:
        return self.count == self.length

    def missing(self, indices: Sequence[int]) -> list[int]:
        """Those of the indices that are not cached."""
        schema_of = self._places.schema_of
        if self._places.sealed or schema_of is None:
            return []
        if len(indices) == 1:
            return [] if self.holds(indices[0]) else list(indices)
        wanted = np.asarray(indices, np.int64)
        return wanted[schema_of.numpy()[wanted] < 0].tolist()  # type: ignore[no-any-return]

    def all_missing(self) -> np.ndarray[Any, Any]:
        """Every index that is not cached, in ascending order."""
        schema_of = self._places.schema_of
        return (
            np.empty(0, np.int64) if self._places.sealed or schema_of is None else np.flatnonzero(schema_of.numpy() < 0)
        )

    def pack_index(self) -> bytearray:
        """The index of a complete store: what ``load_index`` reads. docs/format.md is the specification."""
        tables, schema_of, row_of = self._places.tables, self._places.schema_of, self._places.row_of
        assert schema_of is not None and row_of is not None and self.complete
        members = [torch.nonzero(schema_of == i)[:, 0] for i in range(len(tables))]
        arrays: list[np.ndarray[Any, Any]] = []
        if sum(len(m) > 0 for m in members) > 1:
            # Rows are numbered anew, in the order of the samples.
            rank = torch.empty(self.length, dtype=torch.int64, device=CPU)
            for member in members:
                rank[member] = torch.arange(len(member), device=CPU)
            arrays += [schema_of.numpy().astype("<i4"), rank.numpy().astype("<i8")]
        for table, member in zip(tables, members, strict=True):
            rows = Rows(table, row_of[member])
            for c, column in enumerate(table.schema.columns if len(member) else ()):
                places = self.gather(rows, c) if _is_dense(column) else table.columns[c][rows.rows]
                arrays.append(places.view(torch.uint8).numpy())
        body = bytearray(_INDEX.pack(self.length, len(tables)))
        body += np.asarray([len(m) for m in members], "<i8").tobytes()
        for array in arrays:
            body += bytes(_padded(HEAD_BYTES + len(body)) - HEAD_BYTES - len(body)) + array.tobytes()
        body += bytes(max(0, PAGE_BYTES - len(body)))
        return bytearray(BlockHead.of(len(tables), self.length & 0xFFFFFFFF, body).pack() + body)

    def load_index(self, seal: Seal, *, verify: bool = False) -> None:
        """Takes a sealed store's index straight from the map.

        Args:
            seal: where it lies.
            verify: compare the checksum, which takes time in proportion to the dataset. Without it, each number is
                checked when it is used.

        Raises:
            CorruptStoreError: if it is not what the seal says.
        """
        self._map_whole()
        value = self.bytes_at(seal.offset, seal.nbytes)
        head = BlockHead.read(value)
        if (head.block_id, head.nbytes) != (seal.block_id, seal.nbytes) or (
            verify and head.checksum_of(value[HEAD_BYTES:]) != head.checksum
        ):
            raise CorruptStoreError(f"{self._path}: the index is damaged")
        try:
            self._unpack_index(self._mapped(0), seal)
        except (ValueError, TypeError, IndexError, struct.error) as error:
            raise CorruptStoreError(f"{self._path}: the index cannot be read ({error})") from error

    def _unpack_index(self, data: mmap.mmap, seal: Seal) -> None:
        length, schemas = _INDEX.unpack_from(data, seal.offset + HEAD_BYTES)
        if length != self.length or schemas > len(self._schemas):
            raise CorruptStoreError(f"{self._path}: the index is of {length} samples, the store of {self.length}")
        position = HEAD_BYTES + _INDEX.size

        def take(count: int, dtype: str) -> np.ndarray[Any, Any]:
            nonlocal position
            array: np.ndarray[Any, Any] = np.ndarray((count,), dtype, data, seal.offset + position)
            position += array.nbytes
            if position > seal.nbytes:
                raise CorruptStoreError(f"{self._path}: the index is too short")
            return array

        counts = take(schemas, "<i8").tolist()
        if min(counts, default=0) < 0 or sum(counts) != length:
            raise CorruptStoreError(f"{self._path}: the index counts {sum(counts)} samples, the store {length}")
        used = [i for i, count in enumerate(counts) if count]
        schema_of = row_of = None
        if len(used) > 1:
            position = _padded(position)
            schema_of = torch.from_numpy(take(length, "<i4"))
            position = _padded(position)
            row_of = torch.from_numpy(take(length, "<i8"))
        tables = [Table(schema) for schema in self._schemas[:schemas]]
        for i in used:
            columns, dense = [], {}
            for c, column in enumerate(self._schemas[i].columns):
                position = _padded(position)
                if _is_dense(column):
                    first = seal.offset + position
                    values = torch.from_numpy(take(counts[i] * column.stride, "<u1")).view(_WIDE[column.unit])
                    dense[c] = first, values.view(counts[i], *_wide_shape(column))
                    columns.append(_NO_OFFSETS)
                else:
                    columns.append(torch.from_numpy(take(counts[i], "<i8")))
            tables[i] = Table(self._schemas[i], columns, counts[i])
            tables[i].dense = dense
        self._places = Places(tables, schema_of, row_of, tables[used[0]] if len(used) == 1 else None, True)
        self.count = length
        only = self._places.only
        self.read = None if only is None else reading(only, data)

    # -- reading -----------------------------------------------------------------------------------------

    def find(self, indices: Sequence[int] | torch.Tensor) -> Rows | None:
        """The rows of samples that are all cached and share a schema.

        Returns:
            ``None`` if some are not cached, are of different schemas, or are not indices ``0 <= i < length``.
        """
        if type(indices) is list and indices and type(indices[0]) is int and not self.holds(indices[0]):
            return None  # so it is in the epoch that fills: do not look at all of them
        wanted = as_indices(indices, self.length)
        return None if wanted is None else self._places.rows(wanted)

    def holds(self, index: int) -> bool:
        """Whether this is the index, not counted from the end, of a cached sample."""
        places = self._places
        return 0 <= index < self.length and (
            places.sealed or bool(places.schema_of.numpy()[index] >= 0)  # type: ignore[union-attr]
        )

    def values(self, index: int, copy: bool) -> tuple[Schema, list[Any]]:
        """The schema and the leaves of a cached sample; views of the map if not ``copy``."""
        table, row = self._places.place(index)
        return table.schema, self.row_values(table, row, copy)

    def row_values(self, table: Table, row: int, copy: bool) -> list[Any]:
        """The leaves of the sample in a row of a table."""
        return [self.value(table, c, row, copy) for c in range(len(table.columns))]

    def value(self, table: Table, c: int, row: int, copy: bool) -> Any:
        """Makes one leaf of a sample."""
        column = table.schema.columns[c]
        shape = column.shape
        offset = -1
        try:
            if c in table.dense:
                offset = table.dense[c][0] + row * column.stride
            else:
                offset = int(table.columns[c][row]) * column.unit
            if shape is None:
                record = self._record(column, offset)
                offset, shape = offset + record[0], record[1:]
            nbytes = column.nbytes(shape)
            if offset < 0:
                raise CorruptStoreError(f"{self._path}: a sample lies before the file's beginning")
            return column.decode(self._mapped(offset + nbytes), offset, shape, copy)
        except (ValueError, TypeError, IndexError, OverflowError, MemoryError, RuntimeError, struct.error) as error:
            raise CorruptStoreError(f"{self._path}: a sample at byte {offset} cannot be read ({error})") from error

    def _record(self, column: Column, offset: int) -> tuple[int, ...]:
        width = 1 + column.ndim
        record = struct.unpack_from(f"<{width}q", self._mapped(offset + 8 * width), offset)
        if min(record) < 0:  # NumPy takes a dimension of -1 for "as many as there are"
            raise CorruptStoreError(f"{self._path}: a record at byte {offset} is damaged")
        return record

    def gather(self, rows: Rows, c: int, *, shared: bool = False, out: torch.Tensor | None = None) -> torch.Tensor:
        """Copies one fixed column of samples from the map into a new tensor, in one call.

        Args:
            rows: which samples.
            c: which column; its dtype must be one of torch's.
            shared: make the tensor in shared memory, as a DataLoader worker does that is about to send it.
            out: copy the bytes there instead: a contiguous tensor of uint8 that starts at a multiple of 16 bytes.

        Returns:
            A tensor of shape ``(len(rows), *shape)`` and the column's torch dtype.
        """
        column = rows.table.schema.columns[c]
        shape, dtype = column.shape, column.torch_dtype
        assert shape is not None and dtype is not None
        count = rows.rows.numel()
        if math.prod(shape) == 0:
            return torch.empty((count, *shape), dtype=dtype, device=CPU)
        if out is not None:
            out = out.view(_WIDE[column.unit]).view(count, *_wide_shape(column))
        elif shared:
            out = _new_shared((count, *shape), dtype).view(_WIDE[column.unit])
        if c in rows.table.dense:
            found = _select(rows.table.dense[c][1], rows.rows, out)
            return found if dtype is found.dtype else found.view(dtype)
        offsets = rows.table.columns[c].index_select(0, rows.rows)
        if self._ahead.is_due():
            self._announce(offsets.numpy() * column.unit, column.stride)
        return self._gather_at(column, dtype, offsets, out)

    def only_table(self) -> Table | None:
        """The table of all samples, in their order, if the store is sealed and has but one schema."""
        return self._places.only

    def take(self, table: Table, c: int, found: torch.Tensor) -> torch.Tensor:
        """What ``gather`` returns, of samples whose places were looked up (``Table.look_up``)."""
        column = table.schema.columns[c]
        shape, dtype = column.shape, column.torch_dtype
        assert shape is not None and dtype is not None
        if math.prod(shape) == 0:
            return torch.empty((len(found), *shape), dtype=dtype, device=CPU)
        if c in table.dense:
            return found.clone().view(dtype)
        return self._gather_at(column, dtype, found, None)

    def announce(self, indices: Sequence[int]) -> None:
        """Says that these samples are about to be read one by one; see ``readahead``."""
        if len(indices) > 1 and self._ahead.is_due():
            rows = self.find(indices)
            if rows is not None:
                self._announce_rows(rows)

    def announce_rows(self, rows: Rows) -> None:
        """The same, given their rows."""
        if self._ahead.is_due():
            self._announce_rows(rows)

    def announce_places(self, table: Table, places: Sequence[torch.Tensor]) -> None:
        """Says that samples whose places were looked up are about to be taken."""
        if self._ahead.is_due():
            self._announce_places(table, places)

    def _announce_rows(self, rows: Rows) -> None:
        self._announce_places(rows.table, [rows.table.look_up(c, rows.rows) for c in range(len(rows.table.columns))])

    def _announce_places(self, table: Table, places: Sequence[torch.Tensor]) -> None:
        for c, (column, found) in enumerate(zip(table.schema.columns, places, strict=True)):
            if c in table.dense or not column.stride:
                continue
            starts = found.numpy() * column.unit
            self._announce(starts, column.stride)
            if column.shape is None:
                try:
                    records = [self._record(column, start) for start in starts.tolist()]
                except (CorruptStoreError, struct.error):
                    return
                sizes = np.asarray([column.nbytes(record[1:]) for record in records])
                self._announce(starts + np.asarray([record[0] for record in records]), sizes)

    def _announce(self, starts: np.ndarray[Any, Any], nbytes: np.ndarray[Any, Any] | int) -> None:
        size = len(self._mapped(1))
        # What is damaged is found out when it is read.
        if len(starts) and starts.min() >= 0 and (starts + nbytes).max() <= size:
            self._ahead.announce(self._mapped(1), self._address, starts, nbytes)

    def _gather_at(
        self, column: Column, dtype: torch.dtype, offsets: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        try:
            found = _select(self._window(column), offsets, out)
        except IndexError:
            # The file has grown since it was mapped, or the offset was never in it.
            self._map_to(int(offsets.max()) * column.unit + column.stride)
            try:
                found = _select(self._window(column), offsets, out)
            except IndexError as error:
                raise CorruptStoreError(f"{self._path}: a sample lies outside the file") from error
        return found if dtype is found.dtype else found.view(dtype)

    def _window(self, column: Column) -> torch.Tensor:
        """The map as a tensor whose row *r* is the value of this column that starts at unit *r* of the file."""
        window = self._windows.get(column)
        if window is None:
            unit, shape = column.unit, _wide_shape(column)
            elements = torch.frombuffer(self._mapped(1), dtype=torch.uint8)
            elements = elements[: len(elements) // unit * unit].view(_WIDE[unit])
            strides = torch.empty(shape, device="meta").stride()
            rows = max(len(elements) - math.prod(shape) + 1, 0)
            window = self._windows[column] = elements.as_strided((rows, *shape), (1, *strides))
        return window

    # -- the map -----------------------------------------------------------------------------------------

    def bytes_at(self, offset: int, nbytes: int) -> memoryview:
        """A view of a part of the file.

        Raises:
            CorruptStoreError: if the file does not have it.
        """
        if offset < 0 or nbytes < 0:
            raise CorruptStoreError(f"{self._path}: {nbytes} bytes at byte {offset} cannot be")
        return memoryview(self._mapped(offset + nbytes))[offset : offset + nbytes]

    def _mapped(self, end: int) -> mmap.mmap:
        """The map, long enough to hold byte ``end - 1`` of the file."""
        if self.map is None or len(self.map) < end:
            self._map_to(end)
        assert self.map is not None
        return self.map

    def _opened(self, marks: bool) -> int:
        try:
            # Kept open: the folder may be renamed or removed, and another take its place.
            descriptor = os.open(self._path, os.O_RDONLY)
        except OSError as error:
            raise StoreUnavailableError(f"{self._path} cannot be opened: {error}") from error
        if marks:
            folder.mark_used(self._path.parent, descriptor)
        return descriptor

    def _map_whole(self) -> None:
        """Maps all of a file that grows no more. The map keeps it open, and marked as used."""
        if self._close.alive:
            self._map_to(0)
            self._close()

    def _map_to(self, end: int) -> None:
        try:
            size = os.fstat(self._fd).st_size if self._close.alive else len(self._mapped(0))
            if not 0 <= end <= size:
                raise CorruptStoreError(f"{self._path}: a value ends at byte {end} of a file of {size} bytes")
            if self.map is not None and len(self.map) == size:
                return
            flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
            self.map = mmap.mmap(self._fd, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            self._address = torch.frombuffer(self.map, dtype=torch.uint8).data_ptr()
        except StoreError:
            raise
        except (OSError, ValueError) as error:
            raise StoreUnavailableError(f"{self._path} cannot be mapped: {error}") from error
        self._windows = {}


def as_indices(indices: Any, length: int) -> torch.Tensor | None:
    """Indices ``0 <= i < length``, at least one, as a tensor of int64; ``None`` if they are anything else."""
    try:
        array = indices.numpy() if isinstance(indices, torch.Tensor) else np.asarray(indices)
        # As unsigned numbers the negative ones are large: one comparison for both ends.
        if array.dtype != np.int64 or array.ndim != 1 or not len(array) or array.view(np.uint64).max() >= length:
            return None
        return torch.from_numpy(array)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _is_dense(column: Column) -> bool:
    """Whether the index of a sealed store has the values of this column instead of their offsets.

    A label is no larger than its offset, and 64 labels are 64 cache lines apart where the blocks have them.
    """
    return column.shape is not None and column.torch_dtype is not None and 0 < column.stride <= DENSE_BYTES


def _wide_shape(column: Column) -> tuple[int, ...]:
    """The shape of one value when its bytes are taken as elements of ``column.unit`` bytes."""
    shape = column.shape
    assert shape is not None
    return (*shape[:-1], shape[-1] * column.itemsize // column.unit) if shape else ()


def _select(window: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """``index_select`` in calls that PyTorch does not spread over threads (see ``GRAIN_ELEMENTS``)."""
    count = offsets.numel()
    elements = math.prod(window.shape[1:])
    if count * elements < GRAIN_ELEMENTS or torch.get_num_threads() == 1:
        return torch.index_select(window, 0, offsets, out=out)
    rows = max(1, GRAIN_ELEMENTS // elements)
    if out is None:
        out = torch.empty((count, *window.shape[1:]), dtype=window.dtype, device=CPU)
    parts = zip(out.split(rows), offsets.split(rows), strict=True)  # type: ignore[no-untyped-call]
    for part, where in parts:
        torch.index_select(window, 0, where, out=part)
    return out


def _new_shared(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    storage = torch.UntypedStorage._new_shared(math.prod(shape) * dtype.itemsize)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=dtype, device=CPU).set_(storage).resize_(shape)


def _padded(position: int) -> int:
    return -(-(position - HEAD_BYTES) // COLUMN_ALIGN) * COLUMN_ALIGN + HEAD_BYTES
