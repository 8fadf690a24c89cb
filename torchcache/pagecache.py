"""The page cache: how much of a file is in memory, how much room there is, and reading a file into it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

PIECE_BYTES = 8 << 20  # read at once: large enough for any disk, small enough for a progress bar
AHEAD_BYTES = 4 * PIECE_BYTES  # what the kernel is asked to read while we wait for a piece
WINDOW_BYTES = 1 << 30  # looked at in one call: a quarter of a megabyte of answers

_CACHESTAT = 451  # the number of the system call, on every architecture
_MEMINFO, _CGROUP, _CGROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_HELD = ("anon", "shmem", "total_rss", "total_shmem")  # what cgroups' memory.stat, v2 and v1, call what stays in memory

_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)
_mincore = getattr(_libc, "mincore", None)
if _mincore is not None:
    _mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class Room(NamedTuple):
    """How much the page cache can hold.

    Attributes:
        nbytes: in bytes; what it holds already counts as free.
        limit: what sets the limit, for messages.
    """

    nbytes: int
    limit: str


def room() -> Room | None:
    """What the page cache can hold here; ``None`` where the system does not tell."""
    found = list(_rooms())
    return min(found) if found else None


def _rooms() -> Iterator[Room]:
    with contextlib.suppress(OSError):
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield Room(1024 * int(line.split()[1]), "the machine's memory (MemAvailable)")
    for group in _memory_groups():
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _number(group / name)
            if limit is not None and limit < 1 << 62:  # version 1 says "none" by a large number
                yield Room(max(0, limit - _held(group)), f"the memory limit of the control group ({group / name})")


def _memory_groups() -> Iterator[Path]:
    """The control groups of this process that may limit its memory, with those around them."""
    with contextlib.suppress(OSError):
        for line in _CGROUP.read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root = _CGROUPS / "memory" if controllers else _CGROUPS
            group = root / place.lstrip("/")
            yield from (g for g in (group, *group.parents) if g.is_relative_to(root) and g.is_dir())


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # "max"
        return None


def _held(group: Path) -> int:
    try:
        fields = [line.split() for line in (group / "memory.stat").read_text().splitlines()]
    except OSError:
        return 0
    return sum(int(value) for name, value in fields if name in _HELD)


def may_ask(file: Path) -> bool:
    """Whether the kernel tells this process which pages of a file are in memory; to others it says that all are."""
    try:
        return os.access(file, os.W_OK) or file.stat().st_uid == os.geteuid()
    except OSError:
        return False


def is_resident(address: int) -> bool:
    """Whether the page of a mapped file at this address is in memory, as far as the system tells."""
    found = ctypes.c_ubyte()
    return _mincore is None or _mincore(address // _PAGE * _PAGE, 1, ctypes.byref(found)) != 0 or bool(found.value & 1)


def resident_bytes(file: Path) -> int | None:
    """How much of a file is in memory, in bytes; ``None`` where that cannot be had."""
    if not may_ask(file):
        return None
    try:
        with open(file, "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size == 0:
                return 0
            pages = _pages_by_cachestat(opened.fileno())
            if pages is None:
                pages = _pages_by_mincore(opened.fileno(), size)
    except OSError:
        return None
    return None if pages is None else min(size, pages * _PAGE)


def _pages_by_cachestat(descriptor: int) -> int | None:
    """Takes microseconds; Linux 6.5 and later."""
    whole, found = (ctypes.c_uint64 * 2)(0, 0), (ctypes.c_uint64 * 5)()
    failed = _libc.syscall(_CACHESTAT, descriptor, ctypes.byref(whole), ctypes.byref(found), 0)
    return None if failed else int(found[0])


def _pages_by_mincore(descriptor: int, size: int) -> int | None:
    """Takes some 15 seconds for a terabyte."""
    if _mincore is None:
        return None
    data = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
    start = int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])
    answers = np.empty(WINDOW_BYTES // _PAGE, np.uint8)
    pages = 0
    for offset in range(0, size, WINDOW_BYTES):
        length = min(WINDOW_BYTES, size - offset)
        if _mincore(start + offset, length, answers.ctypes.data):
            return None
        pages += int((answers[: -(-length // _PAGE)] & 1).sum())
    return pages


def load(file: Path, progress: Callable[[int], object] = lambda nbytes: None) -> int:
    """Reads a file into the page cache, and returns its size in bytes.

    Args:
        file: the file.
        progress: told of each piece how many bytes it has.
    """
    piece = bytearray(PIECE_BYTES)
    with open(file, "rb", buffering=0) as opened:
        descriptor, offset = opened.fileno(), 0
        while count := os.preadv(descriptor, [piece], offset):
            offset += count
            os.posix_fadvise(descriptor, offset, AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
            progress(count)
    return offset
