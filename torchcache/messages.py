"""Samples ⇄ a message from one rank to another: for each structure among them a schema and the body of a block.

Large values need not be in it: they can follow it, each by itself, from where it lies to where it shall be.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from torchcache import memory
from torchcache.block import COLUMN_ALIGN, HEAD_BYTES, column_starts, lay_out
from torchcache.flatten import Flat, Uniform
from torchcache.schema import Schema

_GROUP = struct.Struct(
    "<QQQQ"
)  # bytes of the schema, number of samples, bytes of the body, a bit for each column apart
MOST_APART = 64  # so many of the first columns can be apart


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
class Apart:
    """The values of a column that follow the message, one by one; all columns of the group must be fixed.

    Attributes:
        values: their bytes, where they lie.
    """

    values: list[torch.Tensor]


@dataclass(frozen=True)
class Message:
    """The pieces of a message, to be sent one after another.

    Attributes:
        pieces: bytes, arrays, and what is to be written later.
        nbytes: of all of them; a multiple of 64.
        apart: the values that follow it, in the order of their tags: 0, 1, 2, …
    """

    pieces: list[Any]
    nbytes: int
    apart: Sequence[torch.Tensor] = ()

    def write_to(self, out: torch.Tensor) -> None:
        """Puts the message into a tensor of ``nbytes`` bytes."""
        position = 0
        array = out.numpy()
        for piece in self.pieces:
            nbytes = _size(piece)
            if isinstance(piece, Later):
                piece.write(out[position : position + nbytes])
            elif nbytes:
                array[position : position + nbytes] = np.frombuffer(piece, np.uint8)
            position += nbytes


def _size(piece: Any) -> int:
    return len(piece) if isinstance(piece, bytes) else int(piece.nbytes)


def pack(samples: Sequence[Flat]) -> Message:
    """Makes a message of samples.

    Args:
        samples: taken apart; their ``indices`` are whatever number the receiver is to know each sample by. A column
            may be one that is written ``Later``, or is ``Apart``.
    """
    pieces: list[Any] = []
    apart: list[torch.Tensor] = []
    end = 0

    def add(piece: Any) -> None:
        nonlocal end
        pieces.append(piece)
        end += _size(piece)

    for flat in [flat for flat in samples if flat.indices]:
        schema = Schema(flat.spec, tuple([c.dims if isinstance(c, Uniform) else None for c in flat.columns]))
        text = schema.to_json()
        uniform = {c: column for c, column in enumerate(flat.columns) if isinstance(column, Uniform)}
        follow = {c: column.data.values for c, column in uniform.items() if isinstance(column.data, Apart)}
        body = _body_without(follow, schema, flat) if follow else lay_out(schema, [flat])[0]
        add(_GROUP.pack(len(text), len(flat.indices), sum(map(_size, body)), sum(1 << c for c in follow)))
        apart += itertools.chain.from_iterable(follow.values())
        add(text)
        add(bytes(-end % 8))
        add(np.asarray(flat.indices, "<i8"))
        add(bytes(-end % COLUMN_ALIGN))
        for piece in body:
            add(piece)
        add(bytes(-end % COLUMN_ALIGN))
    return Message(pieces, end, apart)


def _body_without(follow: Container[int], schema: Schema, flat: Flat) -> list[Any]:
    """The body of a block of fixed columns, less those that follow."""
    count, body = len(flat.indices), []
    for c, (values, column) in enumerate(zip(flat.columns, schema.columns, strict=True)):
        if c not in follow:
            assert isinstance(values, Uniform)
            body += [values.data, bytes(-count * column.stride % COLUMN_ALIGN)]
    return body


@dataclass(frozen=True)
class Received:
    """Samples of one schema in a message.

    Attributes:
        schema: theirs.
        numbers: by which the receiver knows them.
        tags: for each column that is apart the tag of its first value; the others count from there.
    """

    schema: Schema
    numbers: torch.Tensor
    tags: dict[int, int]
    _data: np.ndarray[Any, Any]
    _starts: list[int]  # of the columns in the data; -1 for one that is apart
    _arrived: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict)  # the bytes of those

    def expected(self, c: int, out: torch.Tensor) -> list[tuple[torch.Tensor, int]]:
        """Where in ``out``, which is of bytes, the values of a column belong that is apart, and their tags."""
        return [(out[number], tag) for tag, number in enumerate(self.numbers.tolist(), self.tags[c])]

    def expected_here(self) -> list[tuple[torch.Tensor, int]]:
        """Where ``samples`` will look for all values that are apart, and their tags."""
        found = []
        for c, first in self.tags.items():
            room = memory.empty((len(self.numbers), self.schema.columns[c].stride), torch.uint8)
            self._arrived[c] = room.numpy().reshape(-1)
            found += [(row, tag) for tag, row in enumerate(room, first)]
        return found

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
        if c in self.tags:
            assert column.shape is not None  # no other is apart
            return column.decode(self._arrived[c], row * column.stride, column.shape, True)
        offset, shape = self._starts[c] + row * column.stride, column.shape
        if shape is None:
            first, *dims = struct.unpack_from(f"<{1 + column.ndim}q", self._data.data, offset)
            offset, shape = offset + first, tuple(dims)
        return column.decode(self._data, offset, shape, True)


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
    position = tag = 0
    while position < len(data):
        text_bytes, count, body_bytes, bits = _GROUP.unpack_from(data.data, position)
        position += _GROUP.size
        schema = _schema(data[position : position + text_bytes].tobytes())
        position += text_bytes
        position += -position % 8
        numbers = torch.from_numpy(data[position : position + 8 * count].view(np.int64))
        position += 8 * count
        position += -position % COLUMN_ALIGN
        apart = [c for c in range(len(schema.columns)) if bits >> c & 1]
        within, _ = column_starts([column for c, column in enumerate(schema.columns) if c not in apart], count)
        following = iter(within)
        starts = [-1 if c in apart else position - HEAD_BYTES + next(following) for c in range(len(schema.columns))]
        found.append(Received(schema, numbers, {c: tag + i * count for i, c in enumerate(apart)}, data, starts))
        tag += len(apart) * count
        position += body_bytes
        position += -position % COLUMN_ALIGN
    return found


@lru_cache(maxsize=256)
def _schema(text: bytes) -> Schema:
    return Schema.from_json(text)
