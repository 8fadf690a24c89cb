"""Memory of batches that is given again once nobody holds what was made of it."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from typing import Any

import numpy as np
import torch

LARGE_BYTES = 128 << 10  # from here on malloc fetches memory from the system: a page fault every 4 KiB
_ALIGN = 64  # bytes
_CPU = torch.device("cpu")  # said each time: the user may have set another default


def new(nbytes: int) -> np.ndarray[Any, Any]:
    """Uninitialised bytes that start at a multiple of 64, as torch's tensors do.

    From NumPy, which asks the system for huge pages where there are 4 MiB and more.
    """
    memory = np.empty(nbytes + _ALIGN - 1, np.uint8)
    start = -memory.ctypes.data % _ALIGN
    return memory[start : start + nbytes]


class Pool:
    """Gives memory as ``torch.empty`` does, and gives it again when all that was made of it has gone.

    The storage of a tensor owns an array here, and whatever is made of the tensor (views, NumPy arrays, what autograd
    saves) holds the storage. When that is freed the array is, and not before; only then is the memory under it free.
    ``malloc`` would take the memory of any other tensor back at the same moment.

    Args:
        keep: how many pieces of memory of each size may wait to be given again; what is freed beyond that goes back
            to the system.
    """

    def __init__(self, keep: int) -> None:
        self._free: dict[int, deque[np.ndarray[Any, Any]]] = defaultdict(lambda: deque(maxlen=keep))

    def empty(self, nbytes: int) -> torch.Tensor:
        """A tensor of so many bytes, of any content."""
        if nbytes < LARGE_BYTES:
            return torch.empty(nbytes, dtype=torch.uint8, device=_CPU)
        free = self._free[nbytes]
        try:
            memory = free.pop()  # the last that came back: most of it may still be in the processor's cache
        except IndexError:
            memory = new(nbytes)
        owner = memory[:]
        weakref.finalize(owner, free.append, memory).atexit = False
        return torch.from_numpy(owner)
