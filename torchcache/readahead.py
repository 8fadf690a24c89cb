"""Reading ahead: the kernel is told which pages a batch needs, while they are not in memory.

A page fault reads one place at a time, and waits for it. A batch is known as a whole, so all its pages can be asked for
before the first is touched, and the disk serves them side by side. Where the pages are in memory this would cost some
microseconds a sample for nothing. Whether they are is looked up for one page every few batches. Times tell less:
they cannot be had of views, and a busy machine looks like a cold one.
"""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

from torchcache.pagecache import is_resident

LOOK_EVERY = 32  # batches, while pages are in memory; a look takes microseconds
CALM = 64  # looks that must find their page in memory, one after another, before batches are no longer announced
PIECE_BYTES = 128 << 10  # the kernel takes no more at a time than its read-ahead size, which is rarely set lower

_PAGE = mmap.PAGESIZE

Offsets = npt.NDArray[np.int64]


class ReadAhead:
    """What one reader knows of whether its file lies in memory. Threads may share it: a lost count does no harm."""

    def __init__(self) -> None:
        self._batches_to_go = 0
        self._calm = CALM
        self._looks = 0

    def is_due(self) -> bool:
        """Counts a batch, and says whether ``announce`` shall be called for it."""
        self._batches_to_go -= 1
        return self._batches_to_go < 0

    @property
    def is_calm(self) -> bool:
        """Whether pages have been in memory for some time, or have not been looked for yet."""
        return self._calm >= CALM

    def announce(self, data: mmap.mmap, address: int, starts: Offsets, nbytes: Offsets | int) -> None:
        """Asks for the pages of a batch, unless pages have been in memory for some time.

        Args:
            data: the map of the file.
            address: where it begins in memory.
            starts: where values begin in the file, at least one.
            nbytes: their lengths. All of them lie inside the map.
        """
        self._looks += 1
        if is_resident(address + int(starts[self._looks % len(starts)])):
            self._calm += 1
        else:
            self._calm = 0
        if self.is_calm:
            self._batches_to_go = LOOK_EVERY
        else:
            ask_for(data, starts, nbytes)


def ask_for(data: mmap.mmap, starts: Offsets, nbytes: Offsets | int) -> None:
    """Has the kernel read these parts of a mapped file; waits for none of them."""
    for first, last in zip(*_merged(starts, nbytes), strict=True):
        for start in range(first, last, PIECE_BYTES):
            data.madvise(mmap.MADV_WILLNEED, start, min(PIECE_BYTES, last - start))


def _merged(starts: Offsets, nbytes: Offsets | int) -> tuple[list[int], list[int]]:
    """The whole pages of the parts, those that touch as one: where each begins, where each ends."""
    firsts, lasts = starts & -_PAGE, -(-(starts + nbytes) & -_PAGE)
    order = np.argsort(firsts)
    firsts, lasts = firsts[order], np.maximum.accumulate(lasts[order])
    gaps = np.flatnonzero(firsts[1:] > lasts[:-1])
    return firsts[np.append(0, gaps + 1)].tolist(), lasts[np.append(gaps, -1)].tolist()
