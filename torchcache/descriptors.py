"""File descriptors that are closed with what holds them, and known to be of the file that they were opened for.

A program that goes on as a daemon closes every descriptor that there may be, and a number is another file's then.
"""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from collections.abc import Callable

File = tuple[int, int]


def file_of(number: int) -> File:
    """What tells the open file from all others: its device and its inode."""
    status = os.fstat(number)
    return status.st_dev, status.st_ino


class Descriptor:
    """An open file, closed with this object or by ``close``.

    Not when the interpreter ends: what waits to be published is published then, by whom depends on the order in which
    modules were imported, and the system closes what is left.

    Args:
        number: of the descriptor.
        closed: called with the number afterwards.
    """

    def __init__(self, number: int, closed: Callable[[int], object] | None = None) -> None:
        self._number = number
        self._file = file_of(number)
        self.close = weakref.finalize(self, _close, number, self._file, closed)
        self.close.atexit = False

    @property
    def is_open(self) -> bool:
        """Whether it is, and of the file that it was opened for."""
        try:
            return file_of(self._number) == self._file and self.close.alive
        except OSError:
            return False

    @property
    def number(self) -> int:
        """The descriptor.

        Raises:
            OSError: if it is no longer of that file.
        """
        if not self.is_open:
            raise OSError(errno.EBADF, f"{os.strerror(errno.EBADF)}: something else has closed it")
        return self._number


def _close(number: int, file: File, closed: Callable[[int], object] | None) -> None:
    with contextlib.suppress(OSError):  # closed by something else, and maybe another file's
        if file_of(number) == file:
            os.close(number)
    if closed is not None:
        closed(number)
