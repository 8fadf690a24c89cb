"""Samples ⇄ a message from one rank to another: for each structure among them a schema and the body of a block."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from torchcache.block import COLUMN_ALIGN, HEAD_BYTES, column_starts, lay_out
from torchcache.flatten import Flat, Uniform
from torchcache.schema import Schema

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
            may be one that is written ``Later``.
    """
    pieces: list[Any] = []
    end = 0

    def add(piece: Any) -> None:
        nonlocal end
        pieces.append(piece)
        end += _size(piece)

    for flat in [flat for flat in samples if flat.indices]:
        schema = Schema(flat.spec, tuple([c.dims if isinstance(c, Uniform) else None for c in flat.columns]))
        text = schema.to_json()
        body, body_end = lay_out(schema, [flat])
        add(_GROUP.pack(len(text), len(flat.indices), body_end - HEAD_BYTES))
        add(text)
        add(bytes(-end % 8))
        add(np.asarray(flat.indices, "<i8"))
        add(bytes(-end % COLUMN_ALIGN))
        for piece in body:
            add(piece)
        add(bytes(-end % COLUMN_ALIGN))
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
