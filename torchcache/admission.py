"""Whether a store takes more samples; and what is said, once, when it does not."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

from torchcache.errors import CacheBypassWarning

DISK_RESERVE = 0.05  # share of the disk that is left free
LOOK_EVERY_BYTES = 1 << 20  # of growth of the store: how often to look at the disk


class Admission:
    """Admits samples to a store until it is as large as it may be, or cannot be written to.

    Args:
        path: the store's folder.
        max_bytes: its largest size; ``None``: no limit but the disk's reserve.

    Attributes:
        refused: why nothing more is admitted; empty while it is.
    """

    def __init__(self, path: Path, max_bytes: int | None = None) -> None:
        self.refused = ""
        self._path = path
        self._max_bytes = max_bytes
        self._next_look = 0  # size of the store at which to look again how full the disk is
        self._unsaid = ""  # the warning, if the caller's thread has not given it yet
        self._said_uncached = False

    def admits(self, nbytes: int) -> bool:
        """Whether the store may grow to so many bytes."""
        if self._max_bytes is not None and nbytes > self._max_bytes:
            self.refused = f"max_bytes={self._max_bytes} is reached"
        if nbytes >= self._next_look:
            self._next_look = nbytes + LOOK_EVERY_BYTES
            disk = shutil.disk_usage(self._path)
            if disk.free < DISK_RESERVE * disk.total:
                self.refused = f"less than {DISK_RESERVE:.0%} of the disk is free"
        return not self.refused

    def refuse(self, error: BaseException, cached: str) -> None:
        """Admits nothing more.

        Args:
            error: the cause.
            cached: how much is, in words.
        """
        self.refused = str(error)
        self._unsaid = (
            f"{self._path} takes no more samples: {error}. {cached}; the others are read from the source "
            f"each epoch. Give the cache more room, or put it elsewhere with CACHE_DIR or cache_dir="
        )

    def say(self) -> None:
        """Gives the warning, with the cause and the remedy: in the caller's thread, where it can be caught."""
        if self._unsaid:
            message, self._unsaid = self._unsaid, ""
            warnings.warn(message, CacheBypassWarning, stacklevel=2)

    def say_uncached(self, reason: str) -> None:
        """Says once that there are samples which are not stored."""
        if not self._said_uncached:
            self._said_uncached = True
            message = f"{reason}: such samples are read from the source each epoch"
            warnings.warn(message, CacheBypassWarning, stacklevel=2)
