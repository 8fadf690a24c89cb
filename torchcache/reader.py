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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from torchcache import folder, index, pagecache
from torchcache.block import HEAD_BYTES, BlockHead
from torchcache.column import Column
from torchcache.descriptors import Descriptor
from torchcache.errors import CorruptStoreError, StoreError, StoreUnavailableError
from torchcache.items import reading
from torchcache.places import CPU, Places, Rows, Table
from torchcache.readahead import ReadAhead
from torchcache.records import LogEntry, Seal
from torchcache.schema import Schema
from torchcache.serial import scatter, select, take

_T = TypeVar("_T")
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0)  # copies of written pages are rare: promise no memory for them
VERIFIED_BYTES = 4 << 20  # the checksum of an index so large takes a few milliseconds at each start


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
        self._file = self._opened(marks)
        self._address = 0  # of the map in memory
        self._ahead = ReadAhead()
        self._tells = pagecache.may_ask(path)
        # Reads the sample of an index: of a sealed store with one schema, and where nothing is wrong.
        self.read: Callable[[int], Any] | None = None
        self._windows: dict[Column, torch.Tensor] = {}
        if seal is None:
            self._places = Places(
                [],
                torch.from_numpy(np.full(length, -1, np.int32)),
                torch.from_numpy(np.zeros(length, np.int64)),
            )
        else:
            self.load_index(seal, verify=seal.nbytes <= VERIFIED_BYTES)

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
        assert self.complete
        return index.pack(self._places, self.length, self.gather)

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
        data = self._mapped(0)
        try:
            self._places = index.unpack(data, seal, self.length, self._schemas)
        except (CorruptStoreError, ValueError, TypeError, IndexError, struct.error) as error:
            raise CorruptStoreError(f"{self._path}: the index cannot be read ({error})") from error
        self.count = self.length
        only = self._places.only
        self.read = None if only is None else reading(only, data)

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
            out = out.view(column.wide_dtype).view(count, *column.wide_shape)
        elif shared:
            out = _new_shared((count, *shape), dtype).view(column.wide_dtype)
        if c in rows.table.dense:
            found = select(rows.table.dense[c][1], rows.rows, out)
            return found if dtype is found.dtype else found.view(dtype)
        offsets = take(rows.table.columns[c], rows.rows)
        if self._ahead.is_due():
            self._announce(offsets.numpy() * column.unit, column.stride)
        return self._gather_at(column, dtype, offsets, out)

    def scatter(self, rows: Rows, c: int, out: torch.Tensor, numbers: Sequence[int]) -> None:
        """Copies one fixed column of samples from the map to rows of a tensor, one by one: for large values.

        Args:
            rows: which samples.
            c: which column, not one that the index holds itself (``Table.dense``).
            out: a contiguous tensor of uint8, one row a sample; each row starts at a multiple of ``Column.unit`` bytes.
            numbers: for each sample its row there.
        """
        column = rows.table.schema.columns[c]
        assert c not in rows.table.dense
        offsets = take(rows.table.columns[c], rows.rows)
        if self._ahead.is_due():
            self._announce(offsets.numpy() * column.unit, column.stride)
        target = out.view(column.wide_dtype).view(len(out), *column.wide_shape)
        self._in_window(column, offsets, lambda window: scatter(window, offsets, target, numbers))

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
            return torch.from_numpy(found.numpy().copy()).view(dtype)
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

    def expects_in_memory(self, rows: Rows) -> bool:
        """Whether another process can read these samples without waiting for the disk, as far as is known."""
        if not (self._tells and self._ahead.is_calm):
            return False
        self.announce_rows(rows)
        return self._ahead.is_calm

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
        found = self._in_window(column, offsets, lambda window: select(window, offsets, out))
        return found if dtype is found.dtype else found.view(dtype)

    def _in_window(self, column: Column, offsets: torch.Tensor, copy: Callable[[torch.Tensor], _T]) -> _T:
        try:
            return copy(self._window(column))
        except IndexError:
            # The file has grown since it was mapped, or the offset was never in it.
            self._map_to(int(offsets.numpy().max()) * column.unit + column.stride)
            try:
                return copy(self._window(column))
            except IndexError as error:
                raise CorruptStoreError(f"{self._path}: a sample lies outside the file") from error

    def _window(self, column: Column) -> torch.Tensor:
        """The map as a tensor whose row *r* is the value of this column that starts at unit *r* of the file."""
        window = self._windows.get(column)
        if window is None:
            unit, shape = column.unit, column.wide_shape
            elements = torch.frombuffer(self._mapped(1), dtype=torch.uint8)
            elements = elements[: len(elements) // unit * unit].view(column.wide_dtype)
            strides = torch.empty(shape, device="meta").stride()
            rows = max(len(elements) - math.prod(shape) + 1, 0)
            window = self._windows[column] = elements.as_strided((rows, *shape), (1, *strides))
        return window

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

    def _opened(self, marks: bool) -> Descriptor:
        try:
            # Kept open: the folder may be renamed or removed, and another take its place.
            number = os.open(self._path, os.O_RDONLY)
        except OSError as error:
            raise StoreUnavailableError(f"{self._path} cannot be opened: {error}") from error
        if marks:
            folder.mark_used(self._path.parent, number)
        return Descriptor(number)

    def _map_whole(self) -> None:
        """Maps all of a file that grows no more. The map keeps it open, and marked as used."""
        if self._file.close.alive:
            self._map_to(0)
            self._file.close()

    def _map_to(self, end: int) -> None:
        try:
            size = os.fstat(self._file.number).st_size if self._file.close.alive else len(self._mapped(0))
            if not 0 <= end <= size:
                raise CorruptStoreError(f"{self._path}: a value ends at byte {end} of a file of {size} bytes")
            if self.map is not None and len(self.map) == size:
                return
            flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
            self.map = mmap.mmap(self._file.number, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
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


def _new_shared(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    storage = torch.UntypedStorage._new_shared(math.prod(shape) * dtype.itemsize)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=dtype, device=CPU).set_(storage).resize_(shape)
