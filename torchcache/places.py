"""Where in the file each sample lies: one table a schema, and which table and row each sample is in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from torchcache.block import column_starts
from torchcache.errors import CorruptStoreError
from torchcache.records import LogEntry
from torchcache.schema import Schema
from torchcache.serial import take

CPU = torch.device("cpu")  # said each time: the user may have set another default
_FIRST_ROWS = 1024


class Table:
    """Where the samples of one schema lie.

    Attributes:
        schema: what they share.
        columns: for each column one 64-bit file offset a sample, in units of ``Column.unit`` bytes: that of the value
            in a fixed column, that of the record in a ragged one.
        count: number of samples; the columns may be longer.
        dense: instead of offsets, for a column of small values in a sealed store: the offset of the first value, and
            all of them, one after another, as a view of the map.
    """

    def __init__(self, schema: Schema, columns: list[torch.Tensor] | None = None, count: int = 0) -> None:
        self.schema = schema
        self.columns = columns or [torch.empty(_FIRST_ROWS, dtype=torch.int64, device=CPU) for _ in schema.columns]
        self.count = count
        self.dense: dict[int, tuple[int, torch.Tensor]] = {}

    def append(self, entry: LogEntry) -> int:
        """Adds the samples of a block, and returns the row of the first."""
        first, last = self.count, self.count + entry.head.count
        if self.columns and last > len(self.columns[0]):
            # Replaced, not resized: another thread may be reading the old ones.
            self.columns = [
                torch.from_numpy(np.append(c[:first].numpy(), np.empty(last, np.int64))) for c in self.columns
            ]
        for known, (start, unit, steps) in zip(self.columns, _steps(self.schema, entry.head.count), strict=True):
            np.add(steps, (entry.offset + start) // unit, out=known.numpy()[first:last])
        self.count = last
        return first

    def look_up(self, c: int, rows: torch.Tensor) -> torch.Tensor:
        """For one column the offsets of samples, or the values themselves where it is dense; see ``Reader.take``."""
        source = self.dense[c][1] if c in self.dense else self.columns[c]
        return take(source, rows) if len(source) else rows


@lru_cache(maxsize=1024)
def _steps(schema: Schema, count: int) -> list[tuple[int, int, np.ndarray[Any, Any]]]:
    """For each column of a block of ``count`` samples: its start, the unit of its offsets, and those of its values."""
    starts, _ = column_starts(schema.columns, count)
    return [
        (start, column.unit, np.arange(count, dtype=np.int64) * (column.stride // column.unit))
        for start, column in zip(starts, schema.columns, strict=True)
    ]


class Rows(NamedTuple):
    """Some cached samples of one schema: the table that knows them, and their rows in it."""

    table: Table
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class Places:
    """Which table and row each sample is in. Replaced as a whole, because other threads read it.

    Attributes:
        tables: one a schema; grows.
        schema_of: per sample its schema, -1 for a sample that is not cached.
        row_of: per sample its row in that schema's table.
        only: instead of these two, the one table of a sealed store with one schema: every sample's row is its index.
        sealed: they are an index's, which is of all samples and whose numbers nobody has looked at.
    """

    tables: list[Table]
    schema_of: torch.Tensor | None
    row_of: torch.Tensor | None
    only: Table | None = None
    sealed: bool = False

    def place(self, index: int) -> tuple[Table, int]:
        if self.only is not None:
            return self.only, index
        assert self.schema_of is not None and self.row_of is not None
        rows = self._rows(int(self.schema_of[index]), self.row_of[index : index + 1])
        return rows.table, int(rows.rows)

    def rows(self, indices: torch.Tensor) -> Rows | None:
        """Samples that are all cached and share a schema, else ``None``."""
        if self.only is not None:
            return Rows(self.only, indices)
        assert self.schema_of is not None and self.row_of is not None
        schema_ids = self.schema_of.numpy().take(indices.numpy())
        first = int(schema_ids[0])
        if (first < 0 and not self.sealed) or bool((schema_ids != first).any()):
            return None
        return self._rows(first, take(self.row_of, indices))

    def _rows(self, schema_id: int, rows: torch.Tensor) -> Rows:
        if self.sealed and not 0 <= schema_id < len(self.tables):
            raise CorruptStoreError(f"the index names schema {schema_id}, which there is not")
        table = self.tables[schema_id]
        # As unsigned numbers the negative ones are large: one comparison for both ends.
        if self.sealed and rows.numpy().view(np.uint64).max() >= table.count:
            raise CorruptStoreError("the index names a row that there is not")
        return Rows(table, rows)
