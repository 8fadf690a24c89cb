"""Samples ⇄ a message from one rank to another: for each structure among them a schema and the body of a block."""

from __future__ import annotations

import bisect
import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from torchcache.block import COLUMN_ALIGN, HEAD_BYTES, column_starts, lay_out
from torchcache.flatten import Flat, Uniform
from torchcache.places import CPU, Rows
from torchcache.reader import Reader
from torchcache.schema import Schema

LARGE_ROW_BYTES = 16 << 10  # from here on, copying rows one by one costs less than copying them twice
_GROUP = struct.Struct("<QQQ")  # bytes of the schema, number of samples, bytes of the body


@dataclass(frozen=True)
class Later:
    """Bytes of a message that are not there yet.

    Attributes:
        nbytes: how many.
        write: puts them into a tensor of so many bytes, which starts at a multiple of 64.
    """

    nbytes: int
    write: Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class Message:
    """The pieces of a message, to be sent one after another.

    Attributes:
        pieces: bytes, arrays, and what is to be written later.
        nbytes: of all of them; a multiple of 64.
    """

    pieces: list[Any]
    nbytes: int

    def write_to(self, out: np.ndarray[Any, Any]) -> None:
        """Puts the message into an array of ``nbytes`` bytes, which starts at a multiple of 64."""
        position = 0
        for piece in self.pieces:
            end = position + _size(piece)
            if isinstance(piece, Later):
                piece.write(torch.from_numpy(out[position:end]))
            elif end > position:
                out[position:end] = np.frombuffer(piece, np.uint8)
            position = end


NOTHING = Message([], 0)


def _size(piece: Any) -> int:
    return len(piece) if isinstance(piece, bytes) else int(piece.nbytes)


def pack(groups: Sequence[Cached | Read]) -> Message:
    """Makes a message of samples."""
    pieces: list[Any] = []
    end = 0
    for group in groups:
        if len(group):
            schema, body, nbytes = group.body()
            text = _text(schema)
            head = _GROUP.pack(len(text), len(group), nbytes) + text
            head += bytes(-len(head) % 8) + group.numbers.numpy().astype("<i8", copy=False).tobytes()
            head += bytes(-len(head) % COLUMN_ALIGN)
            padding = bytes(-nbytes % COLUMN_ALIGN)
            pieces += [head, *body, padding]
            end += len(head) + nbytes + len(padding)
    return Message(pieces, end)


@dataclass(frozen=True)
class Received:
    """Samples of one schema in a message.

    Attributes:
        schema: theirs.
        numbers: by which the receiver knows them.
    """

    schema: Schema
    numbers: torch.Tensor
    _data: np.ndarray[Any, Any]
    _starts: list[int]  # of the columns in the data

    def copy_rows(self, c: int, out: torch.Tensor) -> None:
        """Copies a fixed column to the rows ``numbers`` of ``out``, which is of bytes."""
        start, count, stride = self._starts[c], len(self.numbers), self.schema.columns[c].stride
        set_rows(out, self.numbers, torch.from_numpy(self._data[start : start + count * stride]).view(count, stride))

    def samples(self) -> list[Any]:
        """The samples themselves, which own their memory."""
        return [
            self.schema.rebuild([self._value(c, row) for c in range(len(self._starts))])
            for row in range(len(self.numbers))
        ]

    def _value(self, c: int, row: int) -> Any:
        column = self.schema.columns[c]
        offset, shape = self._starts[c] + row * column.stride, column.shape
        if shape is None:
            first, *dims = struct.unpack_from(f"<{1 + column.ndim}q", self._data.data, offset)
            offset, shape = offset + first, tuple(dims)
        return column.decode(self._data, offset, shape, True)


@dataclass(frozen=True)
class Cached:
    """Samples in the cache, with what their receiver knows them by; stands where ``Received`` ones do, too."""

    reader: Reader
    places: Rows
    numbers: torch.Tensor

    @property
    def schema(self) -> Schema:
        return self.places.table.schema

    def part(self, first: int, last: int, numbers: torch.Tensor) -> Cached:
        return Cached(self.reader, self.places._replace(rows=self.places.rows[first:last]), numbers[first:last])

    def __len__(self) -> int:
        return len(self.numbers)

    def here(self) -> Cached:
        return self

    def body(self) -> tuple[Schema, list[Any], int]:
        """What ``Read.body`` gives, copied from the map only into the message: its columns must be fixed."""
        starts, end = column_starts(self.schema.columns, len(self))
        offsets = [start - HEAD_BYTES for start in starts]
        nbytes = end - HEAD_BYTES
        return self.schema, [Later(nbytes, functools.partial(self._write, offsets))], nbytes

    def _write(self, offsets: list[int], out: torch.Tensor) -> None:
        for c, (column, offset) in enumerate(zip(self.schema.columns, offsets, strict=True)):
            self.reader.gather(self.places, c, out=out[offset : offset + len(self) * column.stride])

    def copy_rows(self, c: int, out: torch.Tensor) -> None:
        """Copies a column to the rows ``numbers`` of ``out``, which is of bytes."""
        if self.schema.columns[c].stride >= LARGE_ROW_BYTES and c not in self.places.table.dense:
            self.reader.scatter(self.places, c, out, self.numbers.tolist())
        else:
            column = self.reader.gather(self.places, c)
            set_rows(out, self.numbers, column.reshape(len(column), -1).view(torch.uint8))

    def samples(self) -> list[Any]:
        table, rows = self.places
        return [self.schema.rebuild(self.reader.row_values(table, row, True)) for row in rows.tolist()]


@dataclass(frozen=True)
class Read:
    """Samples to be sent that were read from the source, or are not all alike.

    Attributes:
        samples_of: taken apart; their ``indices`` count them as they were asked for, or are what the receiver knows
            them by.
    """

    samples_of: Flat

    @property
    def numbers(self) -> torch.Tensor:
        return torch.tensor(self.samples_of.indices)

    def part(self, first: int, last: int, numbers: torch.Tensor) -> Read:
        samples = self.samples_of
        rows = slice(bisect.bisect_left(samples.indices, first), bisect.bisect_left(samples.indices, last))
        columns = [Uniform(c.dims, c.data[rows]) if isinstance(c, Uniform) else c[rows] for c in samples.columns]
        return Read(Flat(samples.spec, numbers[samples.indices[rows]].tolist(), columns))

    def __len__(self) -> int:
        return len(self.samples_of.indices)

    def here(self) -> Received:
        message = pack([self])
        data = torch.empty(message.nbytes, dtype=torch.uint8, device=CPU).numpy()
        message.write_to(data)
        return unpack(data)[0]

    def body(self) -> tuple[Schema, list[Any], int]:
        """The schema, and the body of a block of the samples: its pieces and their bytes."""
        flat = self.samples_of
        schema = Schema(flat.spec, tuple([c.dims if isinstance(c, Uniform) else None for c in flat.columns]))
        pieces, end = lay_out(schema, [flat])
        return schema, pieces, end - HEAD_BYTES


def set_rows(out: torch.Tensor, numbers: torch.Tensor, rows: torch.Tensor) -> None:
    """``out[numbers] = rows`` for bytes, a whole row at a time."""
    item = f"V{rows.shape[1]}"
    out.numpy().view(item)[numbers.numpy()] = rows.numpy().view(item)


def unpack(data: np.ndarray[Any, Any]) -> list[Received]:
    """Reads a message.

    Args:
        data: its bytes, as an array of one dimension that starts at a multiple of 64.
    """
    found = []
    position = 0
    while position < len(data):
        text_bytes, count, body_bytes = _GROUP.unpack_from(data.data, position)
        position += _GROUP.size
        schema = _schema(data[position : position + text_bytes].tobytes())
        position += text_bytes
        position += -position % 8
        numbers = torch.from_numpy(data[position : position + 8 * count].view(np.int64))
        position += 8 * count
        position += -position % COLUMN_ALIGN
        starts, _ = column_starts(schema.columns, count)
        found.append(Received(schema, numbers, data, [position - HEAD_BYTES + start for start in starts]))
        position += body_bytes
        position += -position % COLUMN_ALIGN
    return found


@lru_cache(maxsize=256)
def _schema(text: bytes) -> Schema:
    return Schema.from_json(text)


@lru_cache(maxsize=256)
def _text(schema: Schema) -> bytes:
    return schema.to_json()
