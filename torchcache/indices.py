"""What a dataset is asked by: its length, and what counts as the index of a sample."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset


def checked_length(dataset: Any) -> int:
    """The length of a map-style dataset.

    Raises:
        TypeError: if it is none, saying what to do.
    """
    what = dataset.__name__ if isinstance(dataset, type) else type(dataset).__name__
    if isinstance(dataset, type):
        raise TypeError(f"CachedDataset got the class {what}; pass an object: CachedDataset({what}(...))")
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"CachedDataset got the iterable dataset {what}, whose samples have no index to be cached under; wrap a "
            f"map-style dataset (__getitem__ and __len__), or make one of it: CachedDataset(list(dataset))"
        )
    if not hasattr(dataset, "__getitem__"):
        raise TypeError(f"CachedDataset got a {what}, which has no __getitem__; wrap a map-style dataset")
    if isinstance(dataset, (str, bytes, dict)):
        raise TypeError(f"CachedDataset got a {what}, which is not indexed by 0, 1, 2, …; wrap a map-style dataset")
    try:
        return operator.index(len(dataset))
    except TypeError as error:
        raise TypeError(
            f"CachedDataset got a {what} without a usable __len__ ({error}); it must tell how many samples there are"
        ) from error


def counted_from_start(position: int, length: int) -> int:
    index = position + length if position < 0 else position
    if not 0 <= index < length:
        raise IndexError(f"index {position} is out of range for a dataset of {length} samples")
    return index


def as_position(index: Any) -> int | None:
    """An index as a Python int, or ``None`` if it is something else.

    A bool is something else, and so is a tensor with a dimension: a dataset may well give them another sample than
    the plain number, which must not be cached under it.
    """
    if isinstance(index, bool) or (isinstance(index, (np.ndarray, torch.Tensor)) and index.ndim):
        return None
    try:
        return operator.index(index)
    except TypeError:
        return None
