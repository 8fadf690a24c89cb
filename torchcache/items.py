"""One sample of a sealed store, read by functions that are made for its columns once.

``Reader.value`` asks at each read what kind of column it has, whether its values are dense, whether the map is long
enough. In a sealed store of one schema the answers are the same for all samples. Here they are asked once; only what
most samples consist of, tensors, arrays and numbers of one shape, is read this way.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torchcache import memory
from torchcache.column import Column
from torchcache.places import Table

# What reading raises where an index or a sample is damaged; ``Reader.value`` then says what is wrong.
READ_ERRORS = (ValueError, TypeError, IndexError, OverflowError, MemoryError, RuntimeError, struct.error)


def reading(table: Table, data: mmap.mmap) -> Callable[[int], Any] | None:
    """A function from a row of a table to the sample, which owns its memory; ``None`` if some column needs more.

    It raises one of ``READ_ERRORS`` where a place lies outside the map or there is no such row.

    Args:
        table: of a sealed store.
        data: the whole file.
    """
    found = [_value_reading(table, c, data) for c in range(len(table.schema.columns))]
    reads = [read for read in found if read is not None]
    if len(reads) < len(found) or not reads:
        return None
    rebuild = table.schema.rebuild
    if len(reads) == 2:  # most data sets: no loop
        first, second = reads
        return lambda row: rebuild((first(row), second(row)))
    return lambda row: rebuild([read(row) for read in reads])


def _value_reading(table: Table, c: int, data: mmap.mmap) -> Callable[[int], Any] | None:
    column = table.schema.columns[c]
    if column.numpy_dtype is None or (not column.shape and column.kind not in ("int", "float", "bool")):
        return None
    if c in table.dense:
        values = table.dense[c][1].numpy()
        if column.kind in ("int", "float", "bool"):
            return values.view(column.numpy_dtype).item
        return None
    if column.kind in ("tensor", "ndarray") and not column.order and not column.requires_grad and column.stride:
        return _array_reading(column, table.columns[c], data)
    return None


def _array_reading(column: Column, places: torch.Tensor, data: mmap.mmap) -> Callable[[int], Any]:
    make, shape, dtype, unit = np.ndarray, column.shape, column.numpy_dtype, column.unit
    # As unsigned numbers the negative ones are large. NumPy takes a negative offset for one before the buffer.
    place = places.numpy().view(np.uint64).item
    if column.kind == "ndarray":
        return lambda row: make(shape, dtype, data, place(row) * unit).copy()  # type: ignore[arg-type]
    if column.stride >= memory.LARGE_BYTES:
        return lambda row: memory.copied(make(shape, dtype, data, place(row) * unit))  # type: ignore[arg-type]
    to_tensor = torch.from_numpy
    return lambda row: to_tensor(make(shape, dtype, data, place(row) * unit).copy())  # type: ignore[arg-type]
