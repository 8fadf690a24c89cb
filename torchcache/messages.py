"""Samples ⇄ a message from one rank to another: for each structure among them a schema and the body of a block."""

from __future__ import annotations

import struct
from collections.abc import Sequence
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
class Message:
    """The pieces of a message, to be sent one after another.

    Attributes:
        pieces: bytes-like objects.
        nbytes: of all of them; a multiple of 64.
    """

    pieces: list[Any]
    nbytes: int

    def write_to(self, out: np.ndarray[Any, Any]) -> None:
        """Copies the message into an array of ``nbytes`` bytes."""
        position = 0
        for piece in self.pieces:
            source = np.frombuffer(piece, np.uint8) if isinstance(piece, bytes) else piece.reshape(-1)
            out[position : position + source.nbytes] = source.view(np.uint8)
            position += source.nbytes


def pack(samples: Sequence[Flat]) -> Message:
    """Makes a message of samples.

    Args:
        samples: taken apart; their ``indices`` are whatever number the receiver is to know each sample by.
    """
    pieces: list[Any] = []
    end = 0

    def add(piece: Any) -> None:
        nonlocal end
        pieces.append(piece)
        end += piece.nbytes if isinstance(piece, np.ndarray) else len(piece)

    for flat in samples:
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

    def rows(self, column: int) -> torch.Tensor:
        """A fixed column as bytes, of shape ``(samples, bytes per sample)``; a view of the message."""
        start, count, stride = self._starts[column], len(self.numbers), self.schema.columns[column].stride
        return torch.from_numpy(self._data[start : start + count * stride]).view(count, stride)

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
