"""Filling ahead: what is not cached yet, in the order of the indices, by any number of workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from torchcache.progress import bar

BATCH_SIZE = 64  # samples a block


class _Batches(Dataset[int]):
    """Reading a batch of samples as a dataset, so that a ``DataLoader``'s workers do it."""

    def __init__(self, read: Callable[[list[int]], int], indices: np.ndarray[Any, Any]) -> None:
        self._read = read
        self._indices = indices

    def __len__(self) -> int:
        return -(-len(self._indices) // BATCH_SIZE)

    def __getitem__(self, batch: int) -> int:
        return self._read(self._indices[batch * BATCH_SIZE : (batch + 1) * BATCH_SIZE].tolist())


def fill_ahead(
    read: Callable[[list[int]], int], indices: np.ndarray[Any, Any], *, num_workers: int, progress: bool, total: int
) -> None:
    """Reads samples in batches, and shows how far it is.

    Args:
        read: takes indices, brings their samples into the store, and returns how many of them it has dealt with. It
            is pickled where workers are spawned.
        indices: what to read, ascending.
        num_workers: processes that read; 0 reads here.
        progress: show a bar, on a terminal and in a notebook.
        total: samples of the whole dataset.
    """
    # A generator of its own: making a loader draws a seed, and filling must not change what training draws.
    loader = DataLoader(
        _Batches(read, indices), batch_size=None, num_workers=num_workers, generator=torch.Generator("cpu")
    )
    done = total - len(indices)
    with bar(show=progress, total=total, initial=done, unit=" samples") as shown:
        for count in loader:
            shown.update(int(count))
