"""Memory for large batches, used again when nobody has the batch any more.

New memory costs a page fault for each of its pages, and the C library gives large pieces back to the system as soon as
they are free: a batch of 40 MB takes up to ten times as long to gather into new memory as into the last one's. A
tensor's memory is in use as long as the tensor or any view of it exists; that it is not is what is waited for here.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

LARGE_BYTES = 4 << 20  # smaller pieces come from the C library, which keeps them
# What is kept for the next batches: as many as training and its loader have in hand, and less of very large ones.
MOST_FREE, MOST_FREE_BYTES = 3, 1 << 30
_ROUND = 2 << 20  # a size of the system's large pages

_free: list[mmap.mmap] = []  # the last one freed at the end; appending and popping are atomic, so there is no lock


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """``torch.empty`` in the CPU's memory: what is in it is anything."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < LARGE_BYTES:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    piece = _taken(nbytes)
    array = np.frombuffer(piece, np.uint8, nbytes)
    # The tensor's storage holds the array, and every view of the tensor holds the storage.
    weakref.finalize(array, _give_back, piece).atexit = False
    return torch.from_numpy(array).view(dtype).view(tuple(shape))


def copied(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A tensor of its own with the elements of an array."""
    if array.nbytes < LARGE_BYTES:
        return torch.from_numpy(array.copy())
    tensor = empty((array.nbytes,), torch.uint8)
    found = tensor.numpy().view(array.dtype).reshape(array.shape)
    np.copyto(found, array)
    return torch.from_numpy(found)


def _taken(nbytes: int) -> mmap.mmap:
    size = -(-nbytes // _ROUND) * _ROUND
    for _ in range(len(_free)):
        try:
            piece = _free.pop()
        except IndexError:  # another thread was faster
            break
        if size <= len(piece) <= 2 * size:
            return piece
        _free.insert(0, piece)
    piece = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        piece.madvise(mmap.MADV_HUGEPAGE)
    return piece


def _give_back(piece: mmap.mmap) -> None:
    _free.append(piece)
    while len(_free) > MOST_FREE or (len(_free) > 1 and sum(map(len, list(_free))) > MOST_FREE_BYTES):
        try:
            del _free[0]
        except IndexError:
            break


os.register_at_fork(after_in_child=_free.clear)  # the parent's, of which a child would make copies
