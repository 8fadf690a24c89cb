"""Cached batches through a stock ``DataLoader``: one gather a column instead of one object a sample.

``DataLoader`` asks the dataset for a batch by ``__getitems__`` and hands the answer to its ``collate_fn``. Where that
is ``default_collate``, the answer is a list of one sample whose leaves are columns; ``default_collate`` takes the
sample apart as it would any other, and finds for each column the function registered here (PyTorch's documented
extension point), which gathers the whole batch. So containers are handled by PyTorch itself, whatever they are.

Everybody else, a ``collate_fn`` of the user's in particular, gets a list of ordinary samples. Who asks is told by the
calling frame: should PyTorch rename what is looked for here, batches become slower and stay right.
"""

from __future__ import annotations

from functools import lru_cache
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, default_collate, get_worker_info
from torch.utils.data._utils.collate import collate, default_collate_fn_map
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from torchcache.reader import Reader, Rows
from torchcache.schema import Column

_FETCH_CODE = _MapDatasetFetcher.fetch.__code__
_SUBSET_CODE = Subset.__getitems__.__code__


class BatchColumn:
    """One column of a batch of cached samples, in the place of a leaf."""

    __slots__ = ("_column", "_reader", "_rows")

    def __init__(self, reader: Reader, rows: Rows, column: int) -> None:
        self._reader = reader
        self._rows = rows
        self._column = column

    def collate(self, sequence_type: type, collate_fn_map: Any) -> Any:
        """What ``default_collate`` makes of a list (or tuple) of this leaf of every sample."""
        rows = self._rows
        if _gathers(rows.table.schema.columns[self._column]):
            return self._reader.gather(rows, self._column, shared=get_worker_info() is not None)
        values = [self._reader.value(rows.table, self._column, row, True) for row in rows.rows.tolist()]
        return collate(sequence_type(values), collate_fn_map=collate_fn_map)


def _collate_column(batch: Any, *, collate_fn_map: Any = None) -> Any:
    return batch[0].collate(type(batch), collate_fn_map)


default_collate_fn_map[BatchColumn] = _collate_column
_known_map = dict(default_collate_fn_map)


def feeds_default_collate(caller: FrameType) -> bool:
    """Whether what ``__getitems__`` returns to this frame goes to ``default_collate`` as it is.

    Args:
        caller: the frame that called ``__getitems__``: the fetcher of a ``DataLoader``, perhaps with ``Subset``s
            between.
    """
    frame: FrameType | None = caller
    while frame is not None and frame.f_code is _SUBSET_CODE:
        frame = frame.f_back
    if frame is None or frame.f_code is not _FETCH_CODE:
        return False
    # A collate function that the user has registered for a type of theirs must see their samples.
    return frame.f_locals["self"].collate_fn is default_collate and default_collate_fn_map == _known_map


def batch_of(reader: Reader, rows: Rows) -> list[Any]:
    """A list of one sample whose leaves stand for those of all the rows."""
    return [rows.table.schema.rebuild([BatchColumn(reader, rows, c) for c in range(len(rows.table.columns))])]


@lru_cache(maxsize=4096)
def _gathers(column: Column) -> bool:
    """Whether gathering this column gives exactly what ``default_collate`` would make of its values."""
    if column.shape is None or column.torch_dtype is None or column.order or column.requires_grad:
        return False
    if column.kind == "npscalar":
        scalar: Any = np.zeros((), column.numpy_dtype)[()]
        return isinstance(scalar, (np.bool_, np.number)) and torch.as_tensor([scalar]).dtype == column.torch_dtype
    return column.kind in ("tensor", "ndarray", "int", "float", "bool") and _stacks(column.torch_dtype)


@lru_cache(maxsize=256)
def _stacks(dtype: torch.dtype) -> bool:
    """Whether ``default_collate`` can stack tensors of this dtype; some of the small floats PyTorch only stores."""
    try:
        torch.stack([torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype)] * 2)
    except (RuntimeError, NotImplementedError):
        return False
    return True
